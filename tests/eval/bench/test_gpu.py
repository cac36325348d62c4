"""The benchmark on a GPU, as far as a CPU goes: arithmetic against real states, resuming, what a dry run says."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from keepsight.errors import UserError
from keepsight.eval.bench import gpu, roofline
from keepsight.eval.bench.gpu import Bench, Results, main, run
from keepsight.eval.bench.roofline import (
    KERNELS,
    METHODS,
    Card,
    Figures,
    GpuRow,
    all_rows,
    known_card,
    memory_and_traffic,
)
from keepsight.runtime.join import join
from keepsight.runtime.state import State

CPU = torch.device("cpu")
CARD = Card("CPU", 1e12, 1e11, 2**30, 2**30)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> LlamaConfig:
    """A shape of which everything can be measured here."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 64,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    config = LlamaConfig(**shape)
    monkeypatch.setattr(gpu, "BUDGET", 64)
    monkeypatch.setattr(roofline, "BUDGET", 64)
    monkeypatch.setattr(gpu, "ANSWER", 8)
    monkeypatch.setattr(gpu, "STEPS", 2)
    monkeypatch.setattr(gpu, "TURNS", 1)
    monkeypatch.setattr(roofline, "MOST_ROWS", 2)
    monkeypatch.setitem(roofline.SHAPES, "tiny", config)
    roofline.outline.cache_clear()
    return config


@pytest.mark.parametrize("method", [method for method in METHODS if "flash" not in method])
def test_every_method_is_measured_and_holds_the_bytes_that_arithmetic_says(method: str, tiny: LlamaConfig) -> None:
    figures = Bench(CPU, CARD).measure(GpuRow("generate", "tiny", 200, method))
    kv_bytes, *_ = memory_and_traffic(method, tiny, 200)
    assert figures.kv_bytes == kv_bytes
    assert figures.rows == 2
    assert figures.first_s and figures.first_s > 0
    assert figures.step_s and figures.step_s > 0
    assert figures.batch_s and figures.batch_s > 0
    assert figures.peak_bytes
    assert figures.batch_peak_bytes


def test_a_batch_that_runs_out_of_memory_loses_an_eighth_of_its_rows(
    tiny: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def limited_join(states: list[State]) -> State:
        batches.append(len(states))
        if len(states) > 10:
            raise torch.OutOfMemoryError
        return join(states)

    monkeypatch.setattr(gpu, "join", limited_join)
    monkeypatch.setattr(gpu, "rows_that_fit", lambda row, card: 17)
    figures = Bench(CPU, CARD).measure(GpuRow("generate", "tiny", 100, "snapkv"))
    assert batches == [17, 15, 14, 13, 12, 11, 10]
    assert figures.rows == 10
    assert figures.batch_s


def test_a_training_step_and_a_kernel_are_measured(tiny: LlamaConfig) -> None:
    step = Bench(CPU, CARD).measure(GpuRow("train", "tiny", 64, "lookahead module"))
    assert step.first_s
    assert step.step_s
    assert step.share == step.step_s / step.first_s
    assert step.peak_bytes
    kernel = Bench(CPU, CARD).measure(GpuRow("attention", "tiny", 64, "sdpa"))
    assert kernel.first_s
    assert kernel.step_s
    assert kernel.kv_bytes == 2 * 2 * 64 * 2 * 32


def test_rooflines_of_a_prompt_and_of_steps() -> None:
    """Llama-3.1-8B: 6.98e9 weights in its layers, 0.53e9 in its logits, 131,072 bytes a token."""
    row = GpuRow("generate", "llama-3.1-8b", 8192, "full")
    layers = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    logits = 4096 * 128256
    norms = 65 * 4096
    bytes_of_weights = 2 * (layers + logits + norms)
    card = Card("?", 1e15, 1e12, 80 * 10**9)
    least = roofline.roofline(row, card, rows=4)
    assert least.first_s == pytest.approx((2 * 8192 * layers + 4 * 8192 * 4096 * 4096 * 32) / 1e15)
    assert least.step_s
    assert least.step_s == pytest.approx((bytes_of_weights + 8192 * 131072) / 1e12)
    assert least.batch_s == pytest.approx(least.step_s + 3 * 8192 * 131072 / 1e12)
    of_many_rows = roofline.roofline(GpuRow("generate", "llama-3.1-8b", 8192, "snapkv"), card, rows=4096)
    assert of_many_rows.batch_s == pytest.approx((bytes_of_weights + 4096 * 1024 * 131072) / 1e12)
    card_that_computes_slowly = Card("?", 1e12, 1e15, 80 * 10**9)
    compute_bound = roofline.roofline(row, card_that_computes_slowly, rows=1)
    assert compute_bound.step_s == pytest.approx((2 * (layers + logits) + 4 * 4096 * 8192 * 32) / 1e12)


def test_batches_fit_the_card_and_the_memory_beside_it() -> None:
    card = known_card("H100")
    row = GpuRow("generate", "llama-3.1-8b", 131072, "full")
    assert roofline.roofline(row, card).rows == 2
    offloaded = GpuRow("generate", "llama-3.1-8b", 32768, "specontext, offloaded")
    assert roofline.roofline(offloaded, card).rows == int(128 * 0.8 / (2 * 4))
    with pytest.raises(UserError, match="--card 'TPU' is unknown"):
        known_card("TPU")


ROWS = [GpuRow("generate", "tiny", tokens, "full") for tokens in (100, 101, 102, 103)]


class ScriptedBench:
    """A bench that measures nothing; rows of some numbers of tokens raise an error."""

    device = CPU
    card = CARD

    def __init__(self, errors: dict[int, BaseException] | None = None) -> None:
        self.errors = errors or {}
        self.measured: list[int] = []

    def measure(self, row: GpuRow) -> Figures:
        self.measured.append(row.tokens)
        if row.tokens in self.errors:
            raise self.errors[row.tokens]
        return Figures(1.0, 0.5, 0.25, 2, 0.5, 1, 1, 1)


def run_rows(bench: ScriptedBench, results: Results, minutes: float = 60) -> int:
    """Number of rows of `ROWS` that are missing in the end."""
    return run(bench, results, ROWS, minutes)  # type: ignore[arg-type]


def test_rows_are_resumed_and_those_that_end_the_process_are_begun_twice(tiny: LlamaConfig, tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu.csv"
    errors: dict[int, BaseException] = {100: KeyboardInterrupt(), 102: RuntimeError("no\nluck")}
    killed = ScriptedBench(errors)
    with pytest.raises(KeyboardInterrupt):
        run_rows(killed, Results(path))
    assert killed.measured == [100]
    killed_again = ScriptedBench(errors)
    with pytest.raises(KeyboardInterrupt):
        run_rows(killed_again, Results(path))
    assert killed_again.measured == [101, 102, 103, 100], "what ended a process comes last"
    bench = ScriptedBench()
    assert run_rows(bench, Results(path)) == 0
    assert bench.measured == []
    by_tokens = {line["tokens"]: line for line in csv.DictReader(path.open())}
    assert by_tokens["100"]["attempts"] == "2"
    assert by_tokens["102"]["note"] == "RuntimeError: no luck"
    measured = by_tokens["101"]
    assert measured["first_s"] == "1.0"
    assert measured["card"] == "CPU"
    least = roofline.roofline(ROWS[1], CARD, rows=2)
    floors = [float(measured[f"{name}_roofline"]) for name in gpu.FLOORS]
    assert floors == [least.first_s, least.step_s, least.batch_s]
    assert len(Results(path).missing("another card", ROWS)) == 4


def test_no_row_is_begun_after_the_time(tiny: LlamaConfig, tmp_path: Path) -> None:
    bench = ScriptedBench()
    assert run_rows(bench, Results(tmp_path / "gpu.csv"), minutes=-1) == 4
    assert bench.measured == []


def test_a_table_of_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text("card,tokens\nH100,5\n")
    with pytest.raises(UserError, match="columns"):
        Results(tmp_path / "gpu.csv")


def test_a_dry_run_has_a_line_for_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry", "--card", "H200", "--out", str(tmp_path / "none.csv")]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in printed if line.split()[0] in roofline.SHAPES and " / " in line]
    assert len(rows) == len(all_rows()) == 3 * (2 * len(METHODS) + len(KERNELS)) + 4
    for line in rows:
        assert "- / " in line
    assert not (tmp_path / "none.csv").exists()
    assert any("14.96 GiB of weights, 131072 bytes of KV entries a token" in line for line in printed)
    assert main(["--dry", "--card", "abacus"]) == 2


@pytest.mark.slow  # imports everything anew
def test_a_bare_machine_has_all_that_the_benchmark_and_its_tests_import() -> None:
    """docs/performance.md: torch, transformers, accelerate, peft, triton, pydantic and pytest."""
    lacks = ("datasets", "hydra", "hypothesis", "matplotlib", "omegaconf", "pandas", "pyarrow", "scipy", "tensorboard")
    code = f"import sys\nsys.modules |= dict.fromkeys({lacks})\nimport keepsight.eval.bench.gpu, tests.conftest"
    code += "\nimport tests.gpu.test_kernels, tests.gpu.test_methods"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
