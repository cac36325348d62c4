"""How large the house is: `make size` prints lines by folder and kind, files, and functions on a method's way.

python -m tests.size
"""

import ast
import contextlib
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
FOLDERS = ("keepsight", "models", "runtime", "train", "data_gen", "eval", "serving", "recipes", "checkpoints")


def source_files() -> list[Path]:
    """The Python files of the package and the scripts at the root."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted([*inside, *ROOT.glob("*.py")])


def lines_of(path: Path) -> Counter[str]:
    """Lines of a file by what they are: text (docstrings and comments on lines of their own), blank, imports, code."""
    source = path.read_text(encoding="utf-8")
    kinds = dict.fromkeys(range(1, source.count("\n") + 1), "code")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kind = "imports"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str:
            kind = "text"
        else:
            continue
        kinds |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), kind)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL) and token.line.strip()[:1] in ("#", ""):
            kinds[token.start[0]] = "text" if token.line.strip() else "blank"
    return Counter(kinds.values())


def _described(files: Iterable[Path]) -> str:
    counted = sum(map(lines_of, files), Counter[str]())
    kinds = "docstrings and comments {text}, blank {blank}, imports {imports}, code {code}"
    return f"{counted.total():>7} lines: {kinds.format_map(counted)}"


def functions_called(action: Any) -> Counter[tuple[str, str]]:
    """(file, function) of the package, with the number of calls, while `action` runs."""
    called: Counter[tuple[str, str]] = Counter()
    files = {str(path.resolve()): path.relative_to(ROOT).as_posix() for path in source_files()}

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code  # comprehensions are no functions, though Python runs some of them as such
        if event == "call" and code.co_name not in _COMPREHENSIONS and (path := files.get(code.co_filename)):
            called[path, getattr(code, "co_qualname", code.co_name)] += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return called


def snapkv_functions() -> Counter[tuple[str, str]]:
    """The functions of ours that `model.generate(custom_generate=SnapKV(64))` calls on a Llama of two layers."""
    from keepsight import SnapKV
    from tests.tiny import prompt_ids, tiny_model

    model = tiny_model(num_hidden_layers=2)
    ids, mask = prompt_ids(100)
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    model.generate(ids, **given, custom_generate=SnapKV(64))  # what is imported or registered once
    return functions_called(lambda: model.generate(ids, **given, custom_generate=SnapKV(64)))


def main() -> None:
    """Print the counts."""
    lines = {path: path.read_bytes().count(b"\n") for path in source_files()}
    by_folder: Counter[str] = Counter()
    for path, count in lines.items():
        by_folder[path.relative_to(ROOT).parts[0] if path.parent != ROOT else "(root)"] += count
    for folder, count in by_folder.most_common():
        print(f"{folder:<12} {count:>7}")
    tests = [*(ROOT / "tests").rglob("*.py")]
    longest = max(lines, key=lambda path: lines[path])
    for name, files in (("source", [*lines]), ("tests", tests)):
        print(f"{name:<12} {_described(files)}; {len(files)} files")
    short = sum(count < 60 for count in lines.values())
    print(f"files under 60 lines: {short}; the longest: {longest.relative_to(ROOT)}, {lines[longest]}")
    with contextlib.redirect_stderr(None):
        called = snapkv_functions()
    print(f"on SnapKV's way: {len(called)} functions in {len({path for path, _ in called})} files")


if __name__ == "__main__":
    main()
