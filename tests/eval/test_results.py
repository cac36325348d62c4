"""Rows of several processes and runs in one file, and what is refused when rows are read."""

import math
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import UserError
from keepsight.eval.kept_tokens import path_of
from keepsight.eval.record import Cell, Digests, Key, ResultRow, RowStore, merge, rows_so_far, rows_to_reuse
from keepsight.eval.report.pages import write_outputs, write_sample_pages
from keepsight.eval.results import Run, read_run, require_same_run
from keepsight.files import read_jsonl, write_json, write_lines
from tests.eval.report.results import row
from tests.refused import refused

SETTINGS = {"seed": 1, "command": "eval", "versions": {"torch": "2"}}
REQUIRED = [field.name for field in fields(ResultRow) if field.default is MISSING]


def rows(sample: str, *budgets: int | None, score: float = 1.0) -> list[ResultRow]:
    return [row("m", budget, score, sample=sample) for budget in budgets]


def lines_of(path: Path) -> list[ResultRow]:
    return list(read_jsonl(path, ResultRow))


def test_parts_are_merged_once(tmp_path: Path) -> None:
    """Rows of a sample that is not finished stay, and give way to those of when it is done again."""
    RowStore(tmp_path).add(rows("a", None, 4))
    stores = [RowStore(tmp_path, process, 3) for process in range(3)]
    for store, sample in zip(stores, "bcd", strict=True):
        store.add(rows(sample, None, 4))
    stores[1].add(rows("e", None, score=0.0))
    names = ["results-0.jsonl", "results-1.jsonl", "results-2.jsonl", "results.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with (tmp_path / names[2]).open("a") as stream:
        stream.write('{"task": "t", "len')
    assert len(rows_so_far(tmp_path)) == 9
    merge(tmp_path)
    merged = lines_of(tmp_path / "results.jsonl")
    assert merged[:4] == [*rows("a", None, 4), *rows("b", None, 4)] and len(merged) == 9
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    cells: Digests = {("m", None): None, ("m", 4): None}
    store = RowStore(tmp_path)
    assert [store.has_all(("niah_single", 512, sample), cells) for sample in "abcde"] == [True] * 4 + [False]
    store.add(rows("e", None, 4))
    assert store.has_all(("niah_single", 512, "e"), cells)
    expected = [each for sample in "abced" for each in rows(sample, None, 4)]
    merge(tmp_path)
    assert lines_of(tmp_path / "results.jsonl") == expected


def test_a_row_is_used_again_where_its_inputs_are_the_same(tmp_path: Path) -> None:
    """Under any name, of the same folder or another one; in a group only where all samples have it."""
    digests = [f"sha256:{number:064}" for number in range(4)]
    for name in "ab":
        (tmp_path / name).mkdir()
    RowStore(tmp_path / "a").add([row("m", 4, 1.0, inputs_digest=digests[0]), row("m", 4, 1.0, sample="1")])
    RowStore(tmp_path / "b").add([row("m", 4, 0.5, inputs_digest=digest) for digest in digests[:2]])
    store = RowStore(tmp_path / "a", reused=rows_to_reuse([tmp_path / "b"]))
    key: Key = ("niah_single", 512, "0")
    cell: Cell = ("m", 4)
    (found,) = store.find([{cell: digests[0], ("other", 4): digests[1], ("none", 4): None, ("new", 4): digests[3]}])
    assert {name: each.score for (name, _), each in found.items()} == {"m": 1.0, "other": 0.5}
    assert store.find([{cell: digests[0]}, {cell: digests[3]}]) == [{}, {}]
    assert store.has_all(key, {cell: digests[0]}) and not store.has_all(key, {cell: digests[1]})
    with refused("reuse", "missing"):
        rows_to_reuse([tmp_path / "c"])


def test_rows_whose_inputs_have_changed_leave_the_file(tmp_path: Path) -> None:
    first, second, other = (f"sha256:{number:064}" for number in range(3))
    store = RowStore(tmp_path)
    store.add([row("m", 4, 1.0, inputs_digest=first), row("n", 4, 1.0, inputs_digest=first), row("o", 4, 1.0)])
    digests: Digests = {("m", 4): second, ("n", 4): first, ("o", 4): None, ("p", 4): other}
    planned: dict[Key, Digests] = {("niah_single", 512, "0"): digests}
    assert [each.method for each in store.drop_changed(planned)] == ["m"]
    assert [each.method for each in lines_of(tmp_path / "results.jsonl")] == ["n", "o"]
    assert store.drop_changed(planned) == []


def test_a_run_is_extended_and_nothing_else(tmp_path: Path) -> None:
    """Its rows say whether it is: methods by other names may stand for the same ones."""
    before = [*rows("a", None, 4), *rows("b", None, 4)]
    cells = {(each.key, each.cell) for each in before}
    more = cells | {(each.key, each.cell) for each in rows("a", 8)}
    settings = {**SETTINGS, "methods": ["all"], "samples": 2, "adapter": None, "jsonl": {"dir": None}}
    write_json(tmp_path / "settings.json", settings)
    require_same_run(tmp_path, [], {"seed": 2}, set())
    changes = {"methods": ["m"], "samples": 0, "adapter": "a", "jsonl": {"dir": "d"}, "command": "c", "versions": {}}
    require_same_run(tmp_path, before, settings | changes, more)
    measured_on = {"target": {"name": "n", "template": "t"}, "judge": {"url": None, "parallel": 8}}
    write_json(tmp_path / "settings.json", settings | measured_on)
    require_same_run(tmp_path, before, settings, cells)  # before the model is loaded, it is not among the settings
    other = {"target": {"name": "n", "template": "u"}, "judge": {"url": None, "parallel": 2}}
    require_same_run(tmp_path, before, settings | other, cells)
    with refused("target", "conflict"):
        require_same_run(tmp_path, before, settings | {"target": {"name": "o"}}, cells)
    write_json(tmp_path / "settings.json", settings)
    for changed in ("seed", "more", "samples"):
        with refused(changed, "conflict"):
            require_same_run(tmp_path, before, settings | {changed: 3}, cells if changed != "samples" else set())
    with refused("methods", "conflict"):
        require_same_run(tmp_path, before, settings, {key for key in cells if key[0][2] == "a"})
    write_json(tmp_path / "settings.json", settings | {"adapter": "b"})
    with refused("adapter", "conflict"):
        require_same_run(tmp_path, before, settings | {"adapter": "a"}, more)
    (tmp_path / "settings.json").unlink()
    with refused("settings.json", "missing"):
        require_same_run(tmp_path, before, settings, cells)


TEXTS = ("task", "sample", "method", "answer", "question", "date", "asks")
DIGESTS = ("sample_digest", "inputs_digest")
MEASURES_THAT_MAY_LACK = ("kv_peak_bytes", "tokens_per_second", "depth", "recall", "mass", "tau", "first_difference")
LISTS_THAT_MAY_LACK = ("before", "judgments", "context")
MAY_BE_NULL = ("budget", *MEASURES_THAT_MAY_LACK, *LISTS_THAT_MAY_LACK, *DIGESTS)


def test_every_row_that_is_read_makes_a_report(tmp_path: Path) -> None:
    """Without columns that may be left out, and with null; both with an odd text wherever one may be."""
    odd = row("m", 64, 1.0).columns() | dict.fromkeys(TEXTS, "\x1b[2J$=1+1\u2028<b>")
    short = {name: value for name, value in odd.items() if name in REQUIRED}
    write_lines(tmp_path / "results.jsonl", [short, odd | dict.fromkeys(MAY_BE_NULL)])
    write_json(tmp_path / "settings.json", SETTINGS)
    write_outputs([read_run(tmp_path)], tmp_path)
    assert (tmp_path / "report.html").is_file()


WRONG = {"object": {"a": [1]}, "text": "\x1b[2J", "null": None, "true": True, "nan": math.nan, "huge": -(10**400)}


@pytest.mark.parametrize("wrong", [*WRONG.values(), math.inf], ids=[*WRONG, "inf"])
def test_a_wrong_column_is_one_line_when_it_is_read(tmp_path: Path, wrong: object) -> None:
    """Signed again, so that no digest shows it."""
    allowed = TEXTS if isinstance(wrong, str) else MAY_BE_NULL if wrong is None else ()
    for column in (field.name for field in fields(ResultRow)):
        first, second = (row("m", budget, 1.0).columns() for budget in (64, 32))
        write_lines(tmp_path / "results.jsonl", [first, second | {column: wrong}])
        write_json(tmp_path / "settings.json", SETTINGS)
        if column in allowed:
            assert getattr(read_run(tmp_path).rows[1], column) == wrong
        else:
            with refused("results.jsonl", "file") as error:
                read_run(tmp_path)
            assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "said"), [('{"a": ' + "[" * 5000, "not valid JSON"), ('{"kv_bytes": 1e999}', "task: Field required")]
)
def test_lines_that_no_run_has_written(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "results.jsonl").write_text(f"{line}\n")
    with refused("results.jsonl", "file"):
        read_run(tmp_path)


def test_what_is_missing_is_one_line_when_it_is_read(tmp_path: Path) -> None:
    whole, path = row("m", 64, 1.0).columns(), tmp_path / "results.jsonl"
    for column in REQUIRED:
        write_lines(path, [{name: each for name, each in whole.items() if name != column}])
        with refused("results.jsonl", "file"):
            merge(tmp_path)
    write_lines(path, [whole | {"seconds": {"prefill": 1.0}}])
    with refused("results.jsonl", "file"):
        rows_to_reuse([tmp_path])


@pytest.mark.parametrize("digest", ["a", "sha256:../../elsewhere", "sha256:" + "g" * 64])
def test_a_damaged_digest_is_one_line_not_a_row_without_one(tmp_path: Path, digest: object) -> None:
    """A file is named after it, and a row without one would count as measured on unknown inputs."""
    for column in DIGESTS:
        write_lines(tmp_path / "results.jsonl", [row("m", 64, 1.0).columns() | {column: digest}])
        with refused("results.jsonl", "file"):
            read_run(tmp_path)


@pytest.mark.parametrize("changed", [{"target": "text"}, {"versions": ["2"]}, {"versions": {"torch": 2}}])
def test_damaged_settings_are_one_line(tmp_path: Path, changed: dict[str, Any]) -> None:
    write_lines(tmp_path / "results.jsonl", [row("m", 64, 1.0).columns()])
    write_json(tmp_path / "settings.json", SETTINGS | changed)
    for read in (lambda: read_run(tmp_path), lambda: require_same_run(tmp_path, [row("m", 64, 1.0)], SETTINGS, set())):
        with refused("settings.json", "file"):
            read()


def test_what_was_kept_of_a_sample_is_read_whole_or_refused(tmp_path: Path) -> None:
    digest = f"sha256:{'1' * 64}"
    read = Run(tmp_path, [row("m", 64, 1.0, sample_digest=digest)], {})
    path = path_of(tmp_path, read.rows[0])
    kept = {"tokens": ["a", " b"], "layers": 1, "heads": 1, "counts": {"m 64": "eJxjZAQAAAUAAw=="}}
    write_json(path, kept)
    assert [*write_sample_pages([read], tmp_path / "samples")] == [("niah_single", 512, "0")]
    for name in kept:
        write_json(path, kept | {name: None})
        with pytest.raises(UserError, match=rf"kept/1{{16}}\.json: {name}: "):
            write_sample_pages([read], tmp_path / "samples")
