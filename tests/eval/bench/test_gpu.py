"""The benchmark on a GPU, as far as a CPU goes: arithmetic against real states, resuming, what a dry run says."""

import csv
import subprocess
import sys
from collections.abc import Callable
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
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 64,
        "num_hidden_layers": 3,
        "head_dim": 32,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, **heads)
    for module in (gpu, roofline):
        monkeypatch.setattr(module, "BUDGET", 64)
    for name, value in {"ANSWER": 8, "STEPS": 2, "TURNS": 1}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(roofline, "MOST_ROWS", 2)
    monkeypatch.setitem(roofline.SHAPES, "tiny", config)
    roofline.outline.cache_clear()
    return config


@pytest.mark.parametrize("method", [each for each in METHODS if "flash" not in each])
def test_every_method_is_measured_and_holds_the_bytes_that_arithmetic_says(method: str, tiny: LlamaConfig) -> None:
    figures = Bench(CPU, CARD).measure(GpuRow("generate", "tiny", 200, method))
    assert figures.kv_bytes == memory_and_traffic(method, tiny, 200)[0]
    assert figures.rows == 2 and all(getattr(figures, name) > 0 for name in ("first_s", "step_s", "batch_s"))
    assert figures.peak_bytes and figures.batch_peak_bytes


def test_a_batch_that_runs_out_of_memory_loses_an_eighth_of_its_rows(
    tiny: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(states: list[State]) -> State:
        tried.append(len(states))
        if len(states) > 10:
            raise torch.OutOfMemoryError
        return join(states)

    tried = list[int]()
    monkeypatch.setattr(gpu, "join", limited)
    monkeypatch.setattr(gpu, "rows_that_fit", lambda row, card: 17)
    figures = Bench(CPU, CARD).measure(GpuRow("generate", "tiny", 100, "snapkv"))
    assert tried == [17, 15, 14, 13, 12, 11, 10] and figures.rows == 10 and figures.batch_s


def test_a_training_step_and_a_kernel_are_measured(tiny: LlamaConfig) -> None:
    step = Bench(CPU, CARD).measure(GpuRow("train", "tiny", 64, "lookahead module"))
    assert step.first_s and step.step_s and step.share == step.step_s / step.first_s and step.peak_bytes
    kernel = Bench(CPU, CARD).measure(GpuRow("attention", "tiny", 64, "sdpa"))
    assert kernel.first_s and kernel.step_s and kernel.kv_bytes == 2 * 2 * 64 * 2 * 32


def test_rooflines_of_a_prompt_and_of_steps() -> None:
    """Llama-3.1-8B: 6.98e9 weights in its layers, 0.53e9 in its logits, 131,072 bytes a token."""
    card, row = Card("?", 1e15, 1e12, 80 * 10**9), GpuRow("generate", "llama-3.1-8b", 8192, "full")
    layers, logits = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336), 4096 * 128256
    least = roofline.roofline(row, card, rows=4)
    assert least.first_s == pytest.approx((2 * 8192 * layers + 4 * 8192 * 4096 * 4096 * 32) / 1e15)
    norms = 65 * 4096
    assert least.step_s and least.step_s == pytest.approx((2 * (layers + logits + norms) + 8192 * 131072) / 1e12)
    assert least.batch_s == pytest.approx(least.step_s + 3 * 8192 * 131072 / 1e12)
    many = roofline.roofline(GpuRow("generate", "llama-3.1-8b", 8192, "snapkv"), card, rows=4096)
    assert many.batch_s == pytest.approx((2 * (layers + logits + norms) + 4096 * 1024 * 131072) / 1e12)
    slow = roofline.roofline(row, Card("?", 1e12, 1e15, 80 * 10**9), rows=1)
    assert slow.step_s == pytest.approx((2 * (layers + logits) + 4 * 4096 * 8192 * 32) / 1e12)


def test_batches_fit_the_card_and_the_memory_beside_it() -> None:
    card, row = known_card("H100"), GpuRow("generate", "llama-3.1-8b", 131072, "full")
    assert roofline.roofline(row, card).rows == 2
    offloaded = GpuRow("generate", "llama-3.1-8b", 32768, "specontext, offloaded")
    assert roofline.roofline(offloaded, card).rows == int(128 * 0.8 / (2 * 4))
    with pytest.raises(UserError, match="--card 'TPU' is unknown"):
        known_card("TPU")


ROWS = [GpuRow("generate", "tiny", 100 + place, "full") for place in range(4)]


class Pretended:
    """A bench whose rows do what they are told."""

    device, card = CPU, CARD

    def __init__(self, **by_tokens: Callable[[], Figures]) -> None:
        self.by_tokens, self.measured = by_tokens, list[int]()

    def measure(self, row: GpuRow) -> Figures:
        self.measured.append(row.tokens)
        return self.by_tokens.get(f"at{row.tokens}", lambda: Figures(1.0, 0.5, 0.25, 2, 0.5, 1, 1, 1))()


def _raise(error: BaseException) -> Any:
    raise error


def test_rows_are_resumed_and_those_that_end_the_process_are_begun_twice(tiny: LlamaConfig, tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu.csv"
    dies: dict[str, Any] = {
        "at100": lambda: _raise(KeyboardInterrupt()),
        "at102": lambda: _raise(RuntimeError("no\nluck")),
    }
    first = Pretended(**dies)
    with pytest.raises(KeyboardInterrupt):
        run(first, Results(path), ROWS, 60)  # type: ignore[arg-type]
    assert first.measured == [100]
    second = Pretended(**dies)
    with pytest.raises(KeyboardInterrupt):
        run(second, Results(path), ROWS, 60)  # type: ignore[arg-type]
    assert second.measured == [101, 102, 103, 100], "what ended a process comes last"
    third = Pretended()
    assert run(third, Results(path), ROWS, 60) == 0 and third.measured == []  # type: ignore[arg-type]
    lines = [*csv.DictReader(path.open())]
    by_tokens = {line["tokens"]: line for line in lines}
    assert by_tokens["102"]["note"] == "RuntimeError: no luck" and by_tokens["100"]["attempts"] == "2"
    assert by_tokens["101"]["first_s"] == "1.0" and by_tokens["101"]["card"] == "CPU"
    least = roofline.roofline(ROWS[1], CARD, rows=2)
    assert [float(by_tokens["101"][f"{name}_roofline"]) for name in gpu.FLOORS] == [
        least.first_s,
        least.step_s,
        least.batch_s,
    ]
    assert len(Results(path).missing("another card", ROWS)) == 4


def test_no_row_is_begun_after_the_time(tiny: LlamaConfig, tmp_path: Path) -> None:
    bench, results = Pretended(), Results(tmp_path / "gpu.csv")
    assert run(bench, results, ROWS, -1) == 4 and bench.measured == []  # type: ignore[arg-type]


def test_a_table_of_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text("card,tokens\nH100,5\n")
    with pytest.raises(UserError, match="columns"):
        Results(tmp_path / "gpu.csv")


def test_a_dry_run_has_a_line_for_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry", "--card", "H200", "--out", str(tmp_path / "none.csv")]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in printed if line.split()[0] in roofline.SHAPES and " / " in line]
    assert len(rows) == len(all_rows()) == 3 * (2 * len(METHODS) + len(KERNELS)) + 4
    assert all("- / " in line for line in rows) and not (tmp_path / "none.csv").exists()
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
