"""Makes the links and pictures of README.md absolute, as a package index needs them, which shows that page alone.

It needs the standard library alone.

    python docs/absolute_links.py https://github.com/OWNER/NAME

changes README.md in place; the publishing workflow runs it in its own checkout.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)\s]+)")
_PICTURE = re.compile(r'((?:src|srcset|href)=")(?!https?://|#)([^"]+)')
_PICTURES = (".png", ".svg", ".gif", ".jpg")


def absolute(text: str, address: str) -> str:
    """The text with links to files of the project as links to its repository at an address."""

    def to_repository(path: str) -> str:
        kind = "raw" if path.endswith(_PICTURES) else "blob"
        return f"{address}/{kind}/main/{path}"

    text = _LINK.sub(lambda match: to_repository(match[1]), text)
    return _PICTURE.sub(lambda match: match[1] + to_repository(match[2]), text)


def main(arguments: list[str]) -> None:
    """Change README.md in place; the argument is the repository's address."""
    if len(arguments) != 1 or not arguments[0].startswith("https://"):
        sys.exit("give the repository's address, such as: python docs/absolute_links.py https://github.com/OWNER/NAME")
    page = ROOT / "README.md"
    page.write_text(absolute(page.read_text("utf-8"), arguments[0].rstrip("/")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
