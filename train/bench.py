"""The cost of a training step, against one inference prefill of the same prompt and answer."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from keepsight.models.lookahead import Lookahead
from keepsight.runtime.state import prefill
from keepsight.train.ablation import Cell, SideBySide
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import LookaheadTrainSettings, ReplaySettings
from keepsight.train.tracking import peak_memory


def bench_step(
    cells: Sequence[Lookahead], tokens: int, answer_tokens: int, repeats: int, settings: LookaheadTrainSettings
) -> Iterator[str]:
    """Time steps on one batch (forward, backward, optimiser) and its prefill in turn, as a few lines of text.

    Args:
        cells: Modules on one base model; several learn side by side, as in an ablation.
        tokens: Prompt length in tokens.
        answer_tokens: Answer length in tokens; the prefill runs over prompt and answer.
        repeats: Timed repetitions of each, after one to warm up.
        settings: The loss, the batch size, and `replays`: the mean of so many steps is shown.
    """
    model, replays = cells[0].model, settings.replays
    shape = settings.batch_size, tokens + answer_tokens
    ids = torch.randint(3, model.config.get_text_config().vocab_size - 1, shape, device=model.device)
    options = settings.far, settings.gradient_checkpointing, settings.cuts
    alone = [Cell(str(place), ImportanceObjective(cell, *options), settings) for place, cell in enumerate(cells)]
    objective = SideBySide(alone) if len(alone) > 1 else alone[0].objective
    objective.buffer = ReplayBuffer(ReplaySettings()) if replays > 1 else None
    learned = objective.trained_parameters()
    optimizer = torch.optim.AdamW(learned, lr=1e-4, weight_decay=0.0, fused=True)  # the trainer's

    def steps() -> None:
        for turn in range(replays):
            objective.loss(Batch(ids[:, :tokens], ids[:, tokens:], last=turn == replays - 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def infer() -> None:
        prefill(model, ids)

    times: dict[str, list[float]] = {"prefill": [], "step": []}
    peaks = {}
    for repeat in range(repeats + 1):
        for name, action in (("prefill", infer), ("step", steps)):
            seconds, peaks[name] = _measure(action)
            if repeat:
                times[name].append(seconds / (replays if name == "step" else 1))
    ratio = statistics.median(times["step"]) / statistics.median(times["prefill"])
    counted = f", {len(cells)} modules" if len(cells) > 1 else ""
    cut = f" at {settings.cuts} cuts" if settings.cuts > 1 else ""
    yield (
        f"{shape[0]} x {tokens} prompt + {answer_tokens} answer tokens{counted}, "
        f"{replays} steps a pass of the model{cut}, {repeats} repeats"
    )
    for name, values in times.items():
        span = f"{statistics.median(values):7.3f} s ({min(values):.3f} to {max(values):.3f})"
        yield f"{name:<8} {span}, peak memory {peaks[name]:.0f} MiB"
    yield f"a step takes {ratio:.3f} prefills"


def _measure(action: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and peak memory so far in MiB: of the GPU, or of the process where there is none."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, peak_memory() / 2**20
