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


def rows_in(folder: Path) -> list[ResultRow]:
    return list(read_jsonl(folder / "results.jsonl", ResultRow))


def key_of(sample: str) -> Key:
    return "niah_single", 512, sample


def cells_of(*rows: ResultRow) -> set[tuple[Key, Cell]]:
    return {(row.key, row.cell) for row in rows}


def digest_of(number: int) -> str:
    return f"sha256:{number:064}"


def test_parts_are_merged_once(tmp_path: Path) -> None:
    """Rows of a sample that is not finished stay, and give way to those of when it is done again."""
    RowStore(tmp_path).add(rows("a", None, 4))
    stores = [RowStore(tmp_path, process, 3) for process in range(3)]
    for store, sample in zip(stores, "bcd", strict=True):
        store.add(rows(sample, None, 4))
    stores[1].add(rows("e", None, score=0.0))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["results-0.jsonl", "results-1.jsonl", "results-2.jsonl", "results.jsonl"]
    with (tmp_path / "results-2.jsonl").open("a") as stream:
        stream.write('{"task": "t", "len')
    assert len(rows_so_far(tmp_path)) == 9
    merge(tmp_path)
    merged = rows_in(tmp_path)
    assert len(merged) == 9
    assert merged[:4] == [*rows("a", None, 4), *rows("b", None, 4)]
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    cells: Digests = {("m", None): None, ("m", 4): None}
    store = RowStore(tmp_path)
    for sample in "abcd":
        assert store.has_all(key_of(sample), cells)
    assert not store.has_all(key_of("e"), cells)
    store.add(rows("e", None, 4))
    assert store.has_all(key_of("e"), cells)
    expected: list[ResultRow] = []
    for sample in "abced":
        expected += rows(sample, None, 4)
    merge(tmp_path)
    assert rows_in(tmp_path) == expected


def test_a_row_is_used_again_where_its_inputs_are_the_same(tmp_path: Path) -> None:
    """Under any name, of the same folder or another one; in a group only where all samples have it."""
    in_both = digest_of(0)
    reused_alone = digest_of(1)
    new = digest_of(3)
    folder = tmp_path / "a"
    reused_folder = tmp_path / "b"
    folder.mkdir()
    reused_folder.mkdir()
    RowStore(folder).add([row("m", 4, 1.0, inputs_digest=in_both), row("m", 4, 1.0, sample="1")])
    RowStore(reused_folder).add([row("m", 4, 0.5, inputs_digest=digest) for digest in (in_both, reused_alone)])
    store = RowStore(folder, reused=rows_to_reuse([reused_folder]))
    cell: Cell = ("m", 4)
    (rows_by_cell,) = store.find([{cell: in_both, ("other", 4): reused_alone, ("none", 4): None, ("new", 4): new}])
    scores = {method: row.score for (method, _), row in rows_by_cell.items()}
    assert scores == {"m": 1.0, "other": 0.5}
    assert store.find([{cell: in_both}, {cell: new}]) == [{}, {}]
    assert store.has_all(key_of("0"), {cell: in_both})
    assert not store.has_all(key_of("0"), {cell: reused_alone})
    with refused("reuse", "missing"):
        rows_to_reuse([tmp_path / "c"])


def test_rows_whose_inputs_have_changed_leave_the_file(tmp_path: Path) -> None:
    before = digest_of(0)
    changed = digest_of(1)
    store = RowStore(tmp_path)
    store.add([row("m", 4, 1.0, inputs_digest=before), row("n", 4, 1.0, inputs_digest=before), row("o", 4, 1.0)])
    digests: Digests = {("m", 4): changed, ("n", 4): before, ("o", 4): None, ("p", 4): digest_of(2)}
    planned: dict[Key, Digests] = {key_of("0"): digests}
    assert [dropped.method for dropped in store.drop_changed(planned)] == ["m"]
    assert [kept.method for kept in rows_in(tmp_path)] == ["n", "o"]
    assert store.drop_changed(planned) == []


def test_a_run_is_extended_and_nothing_else(tmp_path: Path) -> None:
    """Its rows say whether it is: methods by other names may stand for the same ones."""
    before = [*rows("a", None, 4), *rows("b", None, 4)]
    cells = cells_of(*before)
    cells_and_budget = cells | cells_of(*rows("a", 8))
    settings = {**SETTINGS, "methods": ["all"], "samples": 2, "adapter": None, "jsonl": {"dir": None}}
    write_json(tmp_path / "settings.json", settings)
    require_same_run(tmp_path, [], {"seed": 2}, set())
    changes = {"methods": ["m"], "samples": 0, "adapter": "a", "jsonl": {"dir": "d"}, "command": "c", "versions": {}}
    require_same_run(tmp_path, before, settings | changes, cells_and_budget)
    measured_on = {"target": {"name": "n", "template": "t"}, "judge": {"url": None, "parallel": 8}}
    write_json(tmp_path / "settings.json", settings | measured_on)
    require_same_run(tmp_path, before, settings, cells)  # before the model is loaded, it is not among the settings
    measured_elsewhere = {"target": {"name": "n", "template": "u"}, "judge": {"url": None, "parallel": 2}}
    require_same_run(tmp_path, before, settings | measured_elsewhere, cells)
    with refused("target", "conflict"):
        require_same_run(tmp_path, before, settings | {"target": {"name": "o"}}, cells)
    write_json(tmp_path / "settings.json", settings)
    for changed in ("seed", "more"):
        with refused(changed, "conflict"):
            require_same_run(tmp_path, before, settings | {changed: 3}, cells)
    with refused("samples", "conflict"):
        require_same_run(tmp_path, before, settings | {"samples": 3}, set())
    with refused("methods", "conflict"):
        require_same_run(tmp_path, before, settings, cells_of(*rows("a", None, 4)))
    write_json(tmp_path / "settings.json", settings | {"adapter": "b"})
    with refused("adapter", "conflict"):
        require_same_run(tmp_path, before, settings | {"adapter": "a"}, cells_and_budget)
    (tmp_path / "settings.json").unlink()
    with refused("settings.json", "missing"):
        require_same_run(tmp_path, before, settings, cells)


TEXTS = ("task", "sample", "method", "answer", "question", "date", "asks")
DIGESTS = ("sample_digest", "inputs_digest")
MEASURES_THAT_MAY_LACK = ("kv_peak_bytes", "tokens_per_second", "depth", "recall", "mass", "tau", "first_difference")
LISTS_THAT_MAY_LACK = ("before", "judgments", "context")
MAY_BE_NULL = ("budget", *MEASURES_THAT_MAY_LACK, *LISTS_THAT_MAY_LACK, *DIGESTS)


def test_every_row_that_is_read_makes_a_report(tmp_path: Path) -> None:
    """Without columns that may be left out, and with null; both with a hostile text wherever one may be."""
    hostile = row("m", 64, 1.0).columns() | dict.fromkeys(TEXTS, "\x1b[2J$=1+1\u2028<b>")
    required = {name: hostile[name] for name in REQUIRED}
    write_lines(tmp_path / "results.jsonl", [required, hostile | dict.fromkeys(MAY_BE_NULL)])
    write_json(tmp_path / "settings.json", SETTINGS)
    write_outputs([read_run(tmp_path)], tmp_path)
    assert (tmp_path / "report.html").is_file()


WRONG = {"object": {"a": [1]}, "text": "\x1b[2J", "null": None, "true": True, "nan": math.nan, "huge": -(10**400)}


@pytest.mark.parametrize("wrong", [*WRONG.values(), math.inf], ids=[*WRONG, "inf"])
def test_a_wrong_column_is_one_line_when_it_is_read(tmp_path: Path, wrong: object) -> None:
    """Signed again, so that no digest shows it."""
    allowed: tuple[str, ...] = ()
    if isinstance(wrong, str):
        allowed = TEXTS
    elif wrong is None:
        allowed = MAY_BE_NULL
    for field in fields(ResultRow):
        valid = row("m", 64, 1.0).columns()
        changed = row("m", 32, 1.0).columns() | {field.name: wrong}
        write_lines(tmp_path / "results.jsonl", [valid, changed])
        write_json(tmp_path / "settings.json", SETTINGS)
        if field.name in allowed:
            assert getattr(read_run(tmp_path).rows[1], field.name) == wrong
        else:
            with refused("results.jsonl", "file") as error:
                read_run(tmp_path)
            assert "\n" not in str(error.value)
            assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"), [('{"a": ' + "[" * 5000, "not valid JSON"), ('{"kv_bytes": 1e999}', "task: Field required")]
)
def test_lines_that_no_run_has_written(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "results.jsonl").write_text(f"{line}\n")
    with refused("results.jsonl", "file") as error:
        read_run(tmp_path)
    assert reason in str(error.value)


def test_what_is_missing_is_one_line_when_it_is_read(tmp_path: Path) -> None:
    columns = row("m", 64, 1.0).columns()
    path = tmp_path / "results.jsonl"
    for required in REQUIRED:
        write_lines(path, [{name: value for name, value in columns.items() if name != required}])
        with refused("results.jsonl", "file"):
            merge(tmp_path)
    write_lines(path, [columns | {"seconds": {"prefill": 1.0}}])
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
    with refused("settings.json", "file"):
        read_run(tmp_path)
    with refused("settings.json", "file"):
        require_same_run(tmp_path, [row("m", 64, 1.0)], SETTINGS, set())


def test_the_kept_tokens_of_a_sample_are_read_completely_or_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, [row("m", 64, 1.0, sample_digest=f"sha256:{'1' * 64}")], {})
    path = path_of(tmp_path, run.rows[0])
    kept_tokens = {"tokens": ["a", " b"], "layers": 1, "heads": 1, "counts": {"m 64": "eJxjZAQAAAUAAw=="}}
    write_json(path, kept_tokens)
    pages = write_sample_pages([run], tmp_path / "samples")
    assert list(pages) == [key_of("0")]
    for name in kept_tokens:
        write_json(path, kept_tokens | {name: None})
        with pytest.raises(UserError, match=rf"kept/1{{16}}\.json: {name}: "):
            write_sample_pages([run], tmp_path / "samples")
