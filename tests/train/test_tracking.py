"""What trackers are told, tokens a second, share of a peak, memory and every layer; and which values curves show."""

import itertools
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

from keepsight.models.decoder import full_attention_layers
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train import tracking
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plots import (
    ablation_figure,
    draft_head_figure,
    eviction_figure,
    lookahead_figure,
    retrieval_figure,
    running_mean,
)
from keepsight.train.tracking import peak_memory, peak_of, weights_per_token
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.families import fresh_model
from tests.train.runs import new_objective, samples, settings, train


class LogRecorder(TrainerCallback):
    """What a tracker is sent, which comes after keepsight's own callbacks."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.rows.append({**logs, "step": state.global_step})


def train_and_record(work: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[Batch], ImportanceObjective]:
    """The rows with a loss that a training logs, the batches that it trains on, and its objective."""
    objective = new_objective()
    batches: list[Batch] = []

    def record_batch(module: Any, args: Any, values: dict[str, Any]) -> None:
        batches.append(Batch(**values))

    objective.register_forward_pre_hook(record_batch, with_kwargs=True)
    trainer = ModuleTrainer(objective, settings(**changes), TrainingRun(work, samples()))
    recorder = LogRecorder()
    trainer.add_callback(recorder)
    assert trainer.fit()
    assert all("tokens_per_second" not in row for row in trainer.state.log_history)  # differs from run to run
    return [row for row in recorder.rows if "loss" in row], batches, objective


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that shows a second more each time it is looked at."""
    seconds = itertools.count()
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.parametrize("changes", [{"replays": 2, "batch_size": 1, "samples_per_step": 2}])
def test_losses_come_with_tokens_a_second_mfu_and_memory(changes: dict[str, Any], clock: None, tmp_path: Path) -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == 989
    assert peak_of("NVIDIA H100 PCIe") == 756
    assert peak_of("NVIDIA RTX 2060") == 0
    rows, batches, objective = train_and_record(tmp_path, flops=1e-6, **changes)
    assert [row["step"] for row in rows] == [3, 6, 8]
    batches_per_step = settings(**changes).accumulation(1, "train")
    previous_step = 0
    for row in rows:
        step = row["step"]
        steps = step - previous_step
        row_batches = batches[previous_step * batches_per_step : step * batches_per_step]
        tokens = sum(len(text) for batch in row_batches for text in batch.texts())
        flops = sum(objective.flops(batch) for batch in row_batches)
        assert row["tokens_per_second"] == pytest.approx(tokens / steps, abs=0.06)
        assert row["mfu"] == pytest.approx(flops / steps / 1e6, rel=1e-3)
        assert 0 < row["peak_memory_gib"] * 2**30 <= peak_memory() + 2**20
        previous_step = step


def test_tensorboard_shows_them_and_every_layer_but_the_console_does_not(tmp_path: Path, capsys: Any) -> None:
    train(new_objective(), settings(report_to=["tensorboard"], flops=1.0), tmp_path, samples())
    (file,) = tmp_path.rglob("events.*")
    events = EventAccumulator(str(file)).Reload()

    def values(tag: str) -> list[float]:
        return [event.value for event in events.Scalars(tag)]

    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/tokens_per_second", "train/mfu", "train/peak_memory_gib"} <= tags
    layer_tags = set()
    for name in ("kl", "recall", "tau"):
        layer_tags |= {f"eval/{name}_by_layer/{layer:02}" for layer in range(3)}
    assert {tag for tag in tags if "by_layer" in tag} == layer_tags
    assert [event.step for event in events.Scalars("eval/kl_by_layer/02")] == [0, 4, 8]

    kl_by_layer = [values(f"eval/kl_by_layer/0{layer}") for layer in range(3)]
    means_over_layers = [sum(layers) / 3 for layers in zip(*kl_by_layer, strict=True)]
    assert values("eval/kl") == pytest.approx(means_over_layers, rel=1e-4)
    assert "by_layer" not in capsys.readouterr().out


TRACKED = {
    "train/loss",
    "train/tokens_per_second",
    "train/mfu",
    "eval/kl",
    "eval/kl_by_layer/02",
    "eval/tau_by_layer/00",
}


@pytest.mark.slow
def test_trackio_gets_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a data base on this machine; nothing goes to the Hub."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    trainer, _ = train(new_objective(), settings(report_to=["trackio"], flops=1.0), tmp_path / "work", samples())
    (file,) = (tmp_path / "trackio").rglob("*.db")
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute("select metrics from metrics order by id").fetchall()
    logged = [json.loads(text) for (text,) in rows]
    assert set().union(*logged) >= TRACKED
    kl = [row["eval/kl"] for row in logged if "eval/kl" in row]
    assert kl[-1] == pytest.approx(trainer.metrics["eval_kl"])


def causal_attention(model: Any, length: int) -> int:
    """Operations of the first pass's attention, which torch does not count on a CPU."""
    config = model.config.get_text_config()
    width = config.head_dim * config.num_attention_heads
    return 2 * length**2 * width * len(full_attention_layers(model.config))


@pytest.mark.parametrize(("family", "cuts"), [("Llama 3", 4), ("Phi-3, Phi-4", 1), ("Gemma 3 (text)", 1)])
def test_a_steps_operations_are_those_that_torch_counts(family: str, cuts: int) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 192, "moe_intermediate_size": 96, "head_dim": 16}
    model = fresh_model(family, **shape, max_position_embeddings=4096)
    objective = ImportanceObjective(Lookahead(model, LookaheadSettings(tokens=16, rank=1)), cuts=cuts)
    ids = torch.randint(3, 100, (1, 640), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :600], ids[:, 600:])
    with FlopCounterMode(display=False) as counter:
        objective.loss(batch).backward()
    expected = counter.get_total_flops() + causal_attention(model, 640)
    assert objective.flops(batch) == pytest.approx(expected, rel=0.15)
    replayed = Batch(batch.prompt_ids, batch.answer_ids, turn=1)
    assert 0 < objective.flops(replayed) < 0.2 * cuts * objective.flops(batch)


@pytest.mark.parametrize(("family", "expert"), [("Qwen3-MoE", 3 * 32 * 24), ("GPT-OSS", 3 * 32 * 48)])
def test_a_token_is_sent_to_some_experts_alone(family: str, expert: int) -> None:
    """To two of four, which torch's counter does not see."""
    model = fresh_model(family)
    layers = 4
    attention = 2 * 32 * (32 + 16)
    expected = layers * (attention + 2 * expert)
    assert weights_per_token(model) == expected
    for weight in model.parameters():  # as ZeRO-3 leaves them
        weight.ds_shape = weight.shape
        weight.data = torch.empty(0)
    assert weights_per_token(model) == expected


PanelLines = dict[str, dict[str, list[float]]]


def drawn_lines(figure: Figure) -> PanelLines:
    """For each panel by title, the values of each line by label; all that is done to draw them is done."""
    figure.draw_without_rendering()
    lines_of_panels: PanelLines = {}
    for panel in figure.axes:
        lines = {}
        for line in panel.get_lines():
            lines[str(line.get_label())] = np.asarray(line.get_xydata()).ravel().tolist()
        lines_of_panels[panel.get_title()] = lines
    return lines_of_panels


def evaluation(step: int, value: float) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step}
    for offset, name in enumerate(("kl", "recall", "tau")):
        row[f"eval_{name}"] = value + offset / 10
        row[f"eval_{name}_by_layer"] = [value + offset / 10, value / 2]
    return row


def test_curves_of_a_lookahead_module() -> None:
    """What is not finite is left out; a list is drawn at the first and the last measurement."""
    losses = [{"step": step, "loss": 1 / step, "learning_rate": 1e-3} for step in range(1, 5)]
    log = [
        evaluation(0, 0.1),
        *losses[:2],
        evaluation(2, 0.3),
        *losses[2:],
        evaluation(4, 0.5),
        {"step": 5, "loss": float("nan")},
    ]
    figure = lookahead_figure(log)
    assert figure.axes[0].get_yscale() == "log"
    loss, ranks, kl, _, tau = drawn_lines(figure).values()
    assert loss["held-out KL"] == [0, 0.1, 2, 0.3, 4, 0.5]
    assert loss["training (running mean)"][1::2] == pytest.approx(running_mean([1, 1 / 2, 1 / 3, 1 / 4]))
    assert ranks["recall at the budget"] == pytest.approx([0, 0.2, 2, 0.4, 4, 0.6])
    assert ranks["Kendall's tau"] == pytest.approx([0, 0.3, 2, 0.5, 4, 0.7])
    assert kl == {"step 0": pytest.approx([0, 0.1, 1, 0.05]), "step 4": pytest.approx([0, 0.5, 1, 0.25])}
    assert tau["step 4"] == pytest.approx([0, 0.7, 1, 0.25])

    figure_without_evaluations = lookahead_figure(losses)
    empty = [panel.get_title() for panel in figure_without_evaluations.axes if panel.texts]
    assert len(empty) == 4
    assert "Training loss, and KL divergence of held-out samples (nats)" not in empty


def head_evaluation(step: int, value: float) -> dict[str, Any]:
    return {
        "step": step,
        "eval_kl": 3 * value,
        "eval_agreement": value,
        "eval_accepted_length": 5 * value,
        "eval_acceptance_by_position": [value, value / 2],
        "eval_agreement_by_step": [value, value / 3],
    }


def test_curves_of_a_draft_head() -> None:
    log = [head_evaluation(0, 0.1), {"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, head_evaluation(2, 0.4)]
    lines = drawn_lines(draft_head_figure(log))
    assert lines["Accepted tokens of a draft, held-out"] == {"greedy drafts": pytest.approx([0, 0.5, 2, 2.0])}
    assert lines["Held-out answers, mean over a draft"] == {
        "KL (nats)": pytest.approx([0, 0.3, 2, 1.2]),
        "top-1 agreement": pytest.approx([0, 0.1, 2, 0.4]),
    }
    assert lines["Accepted, given that all before are"] == {
        "step 0": pytest.approx([1, 0.1, 2, 0.05]),
        "step 2": pytest.approx([1, 0.4, 2, 0.2]),
    }
    assert lines["Top-1 agreement with the model"]["step 2"] == pytest.approx([1, 0.4, 2, 0.4 / 3])
    assert "training (running mean)" in lines["Loss (nats)"]


def test_curves_of_a_retrieval_head() -> None:
    log = [{"step": 1, "loss": 30.0, "eval_kl": 15.0, "eval_hit_64": 0.25, "eval_window_hit_64": 0.125}]
    loss, hits = drawn_lines(retrieval_figure(log)).values()
    assert loss["held-out KL"] == [1, 15.0]
    assert list(hits.values()) == [[1, 0.25], [1, 0.125]]
    assert "64 entries" in hits


def test_curves_of_an_ablation_and_of_a_training_on_answers() -> None:
    cells = {"rank0": [evaluation(0, 0.1)], "rank2": [evaluation(0, 0.3), evaluation(2, 0.4)]}
    lines = drawn_lines(ablation_figure(cells))["Held-out KL divergence (nats)"]
    assert lines["rank0"] == [0, 0.1]
    assert lines["rank2"] == [0, 0.3, 2, 0.4]

    log = [{"step": 1, "loss": 2.0, "eval_excess_nll_at_6": 0.5}]
    head_weights = torch.tensor([[1, 2.0]] * 3)
    figure = eviction_figure(log, head_weights, [6])
    assert drawn_lines(figure)["Held-out excess NLL (nats)"]["6 entries"] == [1, 0.5]
    (image,) = figure.axes[2].images
    assert np.asarray(image.get_array()).tolist() == [[0, 0, 0], [1, 1, 1]]
