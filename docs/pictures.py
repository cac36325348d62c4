r"""Draws README's pictures of the inspect page, `docs/images/inspect.png` and `inspect_dark.png`, in Chromium.

    keepsight inspect recipe=qwen2.5-coder-0.5b compare=snapkv budget=64 prompt=@docs/images/inspect.txt \
        template=false max_new_tokens=12 out=runs/inspect.html
    python -m docs.pictures runs/inspect.html

Run it in the clone: the browser is that of the tests.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

from keepsight.errors import UserError
from tests.browser import browser

IMAGES = Path(__file__).resolve().parent / "images"
SIZE = 1100, 1156
"""Width and height of the pictures, in pixels: down to the first lines of the prompt."""


def main(arguments: list[str]) -> None:
    """Draw both pictures of the page of kept tokens that the only argument names."""
    if len(arguments) != 1:
        raise UserError("give the page of keepsight inspect, such as: python -m docs.pictures runs/inspect.html")
    path = Path(arguments[0])
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        for scheme, name in (("light", "inspect.png"), ("dark", "inspect_dark.png")):
            page.prefer(scheme)
            page.open(path, SIZE[0], ready="document.getElementById('lines').innerText")
            screenshot = Path(profile) / name
            page.screenshot(screenshot)
            top = Image.open(screenshot).convert("RGB").crop((0, 0, *SIZE))
            top.quantize(256).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
