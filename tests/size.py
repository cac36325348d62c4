"""How large the house is: `make size` prints lines by folder, files, and the functions on a method's way.

python -m tests.size
"""

import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
FOLDERS = ("keepsight", "models", "runtime", "train", "data_gen", "eval", "serving", "recipes", "checkpoints")


def source_files() -> list[Path]:
    """The Python files of the package and the scripts at the root."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted([*inside, *ROOT.glob("*.py")])


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
    print(f"{'source':<12} {by_folder.total():>7} lines in {len(lines)} files")
    total = sum(path.read_bytes().count(b"\n") for path in tests)
    print(f"{'tests':<12} {total:>7} lines in {len(tests)} files")
    short = sum(count < 60 for count in lines.values())
    print(f"files under 60 lines: {short}; the longest: {longest.relative_to(ROOT)}, {lines[longest]}")
    with contextlib.redirect_stderr(None):
        called = snapkv_functions()
    print(f"on SnapKV's way: {len(called)} functions in {len({path for path, _ in called})} files")


if __name__ == "__main__":
    main()
