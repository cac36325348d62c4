"""Rows of several processes and runs in one file."""

from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import UserError
from keepsight.eval.results import Measured, finished, merge, part_of
from keepsight.files import append_lines, read_json, read_jsonl, whole_lines, write_json, write_lines

SETTINGS = {"seed": 1, "command": "eval", "versions": {"torch": "2"}}


def rows(sample: str, *budgets: int | None) -> list[dict[str, Any]]:
    return [{"task": "t", "length": 8, "sample": sample, "method": "m", "budget": budget} for budget in budgets]


def test_parts_are_merged_once(tmp_path: Path) -> None:
    merge(tmp_path, SETTINGS, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]
    names = [part_of(tmp_path, process, 3) for process in range(3)]
    assert [path.name for path in names] == ["results-0.jsonl", "results-1.jsonl", "results-2.jsonl"]
    append_lines(part_of(tmp_path, 0, 1), rows("a", None, 4))
    for path, sample in zip(names, "bcd", strict=True):
        append_lines(path, rows(sample, None, 4))
    append_lines(names[1], rows("e", None))
    with names[2].open("a") as stream:
        stream.write('{"task": "t", "len')
    merge(tmp_path, SETTINGS, 2)
    expected = [row for sample in "abcd" for row in rows(sample, None, 4)]
    assert list(read_jsonl(tmp_path / "results.jsonl")) == expected
    assert finished(tmp_path) == {("t", 8, sample) for sample in "abcd"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "settings.json"]


def test_a_kill_between_merging_and_removing_loses_nothing(tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", SETTINGS)
    for path in (part_of(tmp_path, 0, 1), part_of(tmp_path, 1, 2)):
        write_lines(path, rows("a", None, 4))
    merge(tmp_path, SETTINGS, 2)
    assert list(read_jsonl(tmp_path / "results.jsonl")) == rows("a", None, 4)


def test_other_settings_are_refused_while_there_are_results(tmp_path: Path) -> None:
    merge(tmp_path, SETTINGS, 2)
    merge(tmp_path, SETTINGS | {"seed": 2}, 2)
    append_lines(part_of(tmp_path, 1, 2), rows("a", None, 4))
    merge(tmp_path, SETTINGS | {"seed": 2, "command": "other", "versions": {}}, 2)
    assert read_json(tmp_path / "settings.json")["command"] == "other"
    for changed in ({"seed": 3}, {"seed": 2, "more": 1}):
        with pytest.raises(UserError, match=r"these results were made with (seed=2|more=None), now it is [31]; choose"):
            merge(tmp_path, SETTINGS | changed, 2)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(UserError, match=r"settings\.json: no such file"):
        merge(tmp_path, SETTINGS, 2)
    assert list(read_jsonl(tmp_path / "results.jsonl")) == rows("a", None, 4)


def test_an_answer_that_left_nothing_to_write_has_no_speed(tmp_path: Path) -> None:
    """Where all tokens are those of the full cache's answer, nothing is decoded."""
    measured = dict.fromkeys(("score", "excess_nll", "agreement", "kv_bytes", "time_to_first_token"), 1.0)
    place = {"task": "niah", "length": 512, "sample": "0", "method": "snapkv", "budget": 64, "date": "2026-11-22"}
    row = place | measured | {"seconds": {}, "tokens_per_second": None, "answer": "4711", "references": ["4711"]}
    write_lines(tmp_path / "results.jsonl", [row])
    assert whole_lines(tmp_path / "results.jsonl", Measured) == [row]
