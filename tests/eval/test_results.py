"""Rows of several processes and runs in one file, and what is refused when rows are read."""

import math
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import UserError
from keepsight.eval.kept_tokens import path_of
from keepsight.eval.report.pages import write_outputs, write_sample_pages
from keepsight.eval.results import Measured, Row, Run, finished, merge, part_of, read_run
from keepsight.eval.reuse import earlier_rows
from keepsight.files import append_lines, read_json, read_jsonl, write_json, write_lines
from tests.eval.report.results import row

SETTINGS = {"seed": 1, "command": "eval", "versions": {"torch": "2"}}


def rows(sample: str, *budgets: int | None) -> list[Row]:
    return [row("m", budget, 1.0, sample=sample) for budget in budgets]


def test_parts_are_merged_once(tmp_path: Path) -> None:
    """Rows of a sample that is not finished stay, and give way to those of when it is done again."""
    merge(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]
    names = [part_of(tmp_path, process, 3) for process in range(3)]
    assert [path.name for path in names] == ["results-0.jsonl", "results-1.jsonl", "results-2.jsonl"]
    append_lines(part_of(tmp_path, 0, 1), rows("a", None, 4))
    for path, sample in zip(names, "bcd", strict=True):
        append_lines(path, rows(sample, None, 4))
    append_lines(names[1], [each | {"score": 0.0} for each in rows("e", None)])
    with names[2].open("a") as stream:
        stream.write('{"task": "t", "len')
    merge(tmp_path, SETTINGS)
    found = list(read_jsonl(tmp_path / "results.jsonl"))
    assert found[:4] == [*rows("a", None, 4), *rows("b", None, 4)] and len(found) == 9
    assert finished(found, 2) == {("niah_single", 512, sample) for sample in "abcd"}
    append_lines(tmp_path / "results.jsonl", rows("e", None, 4))
    expected = [each for sample in "abced" for each in rows(sample, None, 4)]
    assert sorted(read_run(tmp_path).rows, key=str) == sorted(expected, key=str)
    merge(tmp_path, SETTINGS)
    assert sorted(read_jsonl(tmp_path / "results.jsonl"), key=str) == sorted(expected, key=str)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "settings.json"]


def test_other_settings_are_refused_while_there_are_results(tmp_path: Path) -> None:
    merge(tmp_path, SETTINGS)
    merge(tmp_path, SETTINGS | {"seed": 2})
    append_lines(part_of(tmp_path, 1, 2), rows("a", None, 4))
    merge(tmp_path, SETTINGS | {"seed": 2, "command": "other", "versions": {}})
    assert read_json(tmp_path / "settings.json")["command"] == "other"
    for changed in ({"seed": 3}, {"seed": 2, "more": 1}):
        with pytest.raises(UserError, match=r"these results were made with (seed=2|more=None), now it is [31]; choose"):
            merge(tmp_path, SETTINGS | changed)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(UserError, match=r"settings\.json: no such file"):
        merge(tmp_path, SETTINGS)
    assert list(read_jsonl(tmp_path / "results.jsonl")) == rows("a", None, 4)


TEXTS = ("task", "sample", "method", "answer", "question", "date", "asks")
DIGESTS = ("sample_digest", "inputs_digest")
MEASURES_THAT_MAY_LACK = ("kv_peak_bytes", "tokens_per_second", "depth", "recall", "mass", "tau", "first_difference")
MAY_BE_NULL = ("budget", *MEASURES_THAT_MAY_LACK, *DIGESTS)


def test_every_row_that_is_read_makes_a_report(tmp_path: Path) -> None:
    """One from before columns were added, and one with null; both with an odd text wherever one may be."""
    odd = row("m", 64, 1.0) | dict.fromkeys(TEXTS, "\x1b[2J$=1+1\u2028<b>")
    old = {name: value for name, value in odd.items() if name in Measured.__required_keys__}
    write_lines(tmp_path / "results.jsonl", [old, odd | dict.fromkeys(MAY_BE_NULL)])
    write_json(tmp_path / "settings.json", SETTINGS)
    write_outputs([read_run(tmp_path)], tmp_path)
    assert (tmp_path / "report.html").is_file()


WRONG = {"object": {"a": [1]}, "text": "\x1b[2J", "null": None, "true": True, "nan": math.nan, "huge": -(10**400)}


@pytest.mark.parametrize("wrong", [*WRONG.values(), math.inf], ids=[*WRONG, "inf"])
def test_a_wrong_column_is_one_line_when_it_is_read(tmp_path: Path, wrong: object) -> None:
    """Signed again, so that no digest shows it."""
    allowed = TEXTS if isinstance(wrong, str) else MAY_BE_NULL if wrong is None else ()
    for column in Measured.__annotations__:
        write_lines(tmp_path / "results.jsonl", [row("m", 64, 1.0), row("m", 32, 1.0) | {column: wrong}])
        write_json(tmp_path / "settings.json", SETTINGS)
        if column in allowed:
            assert read_run(tmp_path).rows[1][column] == wrong
        else:
            with pytest.raises(UserError, match=rf"results\.jsonl:2: {column}[.\w-]*: ") as error:
                read_run(tmp_path)
            assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "said"), [('{"a": ' + "[" * 5000, "not valid JSON"), ('{"kv_bytes": 1e999}', "task: Field required")]
)
def test_lines_that_no_run_has_written(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "results.jsonl").write_text(f"{line}\n")
    with pytest.raises(UserError, match=rf"results\.jsonl:1: {said}"):
        read_run(tmp_path)


def test_what_is_missing_is_one_line_when_it_is_read(tmp_path: Path) -> None:
    whole, path = row("m", 64, 1.0), tmp_path / "results.jsonl"
    for column in Measured.__required_keys__:
        write_lines(path, [{name: each for name, each in whole.items() if name != column}])
        with pytest.raises(UserError, match=rf"results\.jsonl:1: {column}: Field required"):
            merge(tmp_path, SETTINGS)
    write_lines(path, [whole | {"seconds": {"prefill": 1.0}}])
    with pytest.raises(UserError, match=r"results\.jsonl:1: seconds\.draft: Field required"):
        earlier_rows([tmp_path])


@pytest.mark.parametrize("digest", ["a", "sha256:../../elsewhere", "sha256:" + "g" * 64])
def test_a_damaged_digest_is_one_line_not_a_row_without_one(tmp_path: Path, digest: object) -> None:
    """A file is named after it, and a row without one would count as measured on unknown inputs."""
    for column in DIGESTS:
        write_lines(tmp_path / "results.jsonl", [row("m", 64, 1.0) | {column: digest}])
        with pytest.raises(UserError, match=rf"results\.jsonl:1: {column}: "):
            read_run(tmp_path)


@pytest.mark.parametrize("changed", [{"target": "text"}, {"versions": ["2"]}, {"versions": {"torch": 2}}])
def test_damaged_settings_are_one_line(tmp_path: Path, changed: dict[str, Any]) -> None:
    write_lines(tmp_path / "results.jsonl", [row("m", 64, 1.0)])
    write_json(tmp_path / "settings.json", SETTINGS | changed)
    (name,) = changed
    for read in (lambda: read_run(tmp_path), lambda: merge(tmp_path, SETTINGS)):
        with pytest.raises(UserError, match=rf"settings\.json: {name}"):
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
