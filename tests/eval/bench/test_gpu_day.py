"""`make gpu-day`, as far as a CPU goes: what a dry run prints, and every kind of row on a tiny model."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from keepsight.eval.bench import gpu, gpu_day, roofline
from keepsight.eval.bench.gpu_day import DayBench, DayFigures, DayRow, all_rows, floor_of, main, run, summary
from keepsight.eval.bench.roofline import Card, known_card
from tests.package_files import ROOT

CPU = torch.device("cpu")
CARD = Card("CPU", 1e12, 1e11, 2**30, 2**30)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape of which everything can be measured here."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        vocab_size=64,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    monkeypatch.setattr(gpu_day, "MODEL", "tiny")
    monkeypatch.setattr(gpu_day, "STEPS", 2)
    monkeypatch.setattr(gpu_day, "TURNS", 1)
    monkeypatch.setattr(gpu_day, "BATCH", 2)
    monkeypatch.setattr(gpu, "BUDGET", 32)
    monkeypatch.setattr(roofline, "BUDGET", 32)
    monkeypatch.setattr(gpu, "ANSWER", 8)
    monkeypatch.setattr(gpu, "TURNS", 1)
    monkeypatch.setattr(roofline, "MOST_ROWS", 3)
    monkeypatch.setitem(roofline.SHAPES, "tiny", config)
    roofline.outline.cache_clear()


def test_a_dry_run_has_a_line_with_bytes_and_rooflines_for_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry", "--out", str(tmp_path / "none.csv")]) == 0
    first, card, title, header, *lines = capsys.readouterr().out.splitlines()
    assert "dry run" in first
    assert "H200" in card
    assert f"{len(all_rows())} rows" in title
    assert "tokens/s" in header
    assert len(lines) == len(all_rows())
    for row, line in zip(all_rows(), lines, strict=True):
        assert line.startswith(row.part)
        if row.part in ("decoding", "training"):
            assert line.count("- / ") >= 2
            assert "iB" in line
        if row.part == "decoding":  # first token, step, 8 rows, and tokens per second of the largest batch
            assert line.count("- / ") == (3 if row.method == "transformers" else 4)
    assert not (tmp_path / "none.csv").exists()
    assert main(["--dry", "--card", "abacus"]) == 2


def test_make_prints_the_dry_run() -> None:
    command = ["make", "-n", "gpu-day", "DRY=1", f"GPU_PYTHON={sys.executable}"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "keepsight.eval.bench.gpu_day" in completed.stdout
    assert "--dry" in completed.stdout


def test_a_key_given_to_make_takes_the_place_of_the_default() -> None:
    command = ["make", "-n", "fit-day", f"GPU_PYTHON={sys.executable}", "FIT=train.minutes=2 seed=1"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    training = next(line for line in completed.stdout.splitlines() if "keepsight train" in line)
    assert training.count("train.minutes=") == 1
    assert training.endswith("train.minutes=2 seed=1")
    assert training.count("train.epochs=") == 1


def test_what_is_worth_most_comes_first() -> None:
    rows = all_rows()
    assert rows[0] == DayRow("tests")
    assert len(set(rows)) == len(rows)
    decoding_rows = [row for row in rows if row.part == "decoding"]
    assert {row.tokens for row in decoding_rows} == {8192, 32768}
    for method in ("full", "snapkv", "lookaheadkv, uniform", "lookaheadkv, shared"):
        cases = {(row.tokens, row.decoding) for row in decoding_rows if row.method == method}
        assert cases == {(8192, "eager"), (8192, "graph"), (32768, "eager"), (32768, "graph")}
    of_transformers = {row.decoding for row in decoding_rows if row.method == "transformers"}
    assert of_transformers == {"eager", "generate_batch", "static, compiled"}


@pytest.mark.parametrize("decoding", ["eager", "graph"])
@pytest.mark.parametrize("method", ["full", "lookaheadkv, shared"])
def test_decoding_is_measured(method: str, decoding: str, tiny: None) -> None:
    figures, note = DayBench(CPU, CARD).figures(DayRow("decoding", method, 100, decoding))
    assert note == ""
    assert figures.kv_bytes
    assert figures.rows
    assert figures.step_s and figures.step_s > 0
    assert figures.step8_s and figures.step8_s > 0
    assert figures.batch_s and figures.batch_s > 0
    if decoding == "eager":
        assert figures.first_s
        assert figures.share is not None
        assert figures.capture_s is None
    else:
        assert figures.first_s is None
        assert figures.capture_s
        assert figures.load_s


def test_what_reads_less_and_training_are_measured(tiny: None) -> None:
    of_quest, _ = DayBench(CPU, CARD).figures(DayRow("decoding", "quest", 100, "eager"))
    assert of_quest.first_s
    assert of_quest.step_s
    assert of_quest.step8_s
    assert of_quest.rows
    assert of_quest.batch_s
    of_training, _ = DayBench(CPU, CARD).figures(DayRow("training", "lookahead module", 64))
    assert of_training.step_s
    assert of_training.share


@pytest.mark.parametrize("decoding", ["eager", "static, compiled"])
def test_transformers_is_measured(decoding: str, tiny: None) -> None:
    """On a CPU transformers compiles nothing by itself."""
    figures, _ = DayBench(CPU, CARD).figures(DayRow("decoding", "transformers", 60, decoding))
    assert figures.first_s
    assert figures.step_s is not None
    assert figures.step8_s is not None


class ScriptedBench:
    """A bench that measures nothing; every row raises `error` if there is one."""

    device = CPU
    card = CARD

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.measured: list[DayRow] = []

    def figures(self, row: DayRow) -> tuple[DayFigures, str]:
        self.measured.append(row)
        if self.error is not None:
            raise self.error
        return DayFigures(1.0, step_s=0.5), ""


def test_rows_are_written_one_by_one_and_resumed(tiny: None, tmp_path: Path) -> None:
    rows: Any = [DayRow("decoding", "full", 100, "eager"), DayRow("decoding", "full", 100, "graph")]
    path = tmp_path / "day.csv"
    bench: Any = ScriptedBench(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(bench, gpu.Results(path, gpu_day.COLUMNS, "date"), rows, 60)
    bench = ScriptedBench(ValueError("not\nhere"))
    assert run(bench, gpu.Results(path, gpu_day.COLUMNS, "date"), rows[1:], 60) == 0
    bench = ScriptedBench()
    assert run(bench, gpu.Results(path, gpu_day.COLUMNS, "date"), rows, 60) == 0
    assert bench.measured == rows[:1]
    lines = {line["decoding"]: line for line in csv.DictReader(path.open())}
    assert lines["graph"]["note"] == "ValueError: not here"
    assert lines["eager"]["step_s"] == "0.5"
    assert float(lines["eager"]["step_s_roofline"]) == floor_of(rows[0], CARD).step_s
    bench = ScriptedBench()
    assert run(bench, gpu.Results(tmp_path / "late.csv", gpu_day.COLUMNS, "date"), rows, -1) == 2


def test_a_graph_of_the_full_cache_has_room_for_its_copy() -> None:
    card = known_card("H200")
    eager = floor_of(DayRow("decoding", "full", 8192, "eager"), card)
    graph = floor_of(DayRow("decoding", "full", 8192, "graph"), card)
    assert eager.rows
    assert graph.rows
    assert graph.rows < eager.rows / 3


def test_the_summary_of_tests() -> None:
    output = "F..\nFAILED tests/gpu/test_graph.py::test_one - boom\n=== 1 failed, 2 passed in 3.1s ==="
    assert summary(output) == "1 failed, 2 passed in 3.1s; test_one"
    assert summary("..\nstopped after 120 s") == "no test ended; stopped after 120 s"
