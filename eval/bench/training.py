"""The time and memory of a training step of a lookahead module, against a prefill of the same batch."""

import statistics
from collections.abc import Callable, Iterator

import torch

from keepsight.eval.bench.measure import seconds_of
from keepsight.eval.bench.runner import Runner, TableRow
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.state import prefill
from keepsight.tables import TerminalColumn
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import LookaheadTrainSettings, ReplaySettings
from keepsight.train.tracking import peak_memory

_COLUMNS = (
    TerminalColumn("pass", width=7, is_text=True),
    TerminalColumn("median s", ".3f"),
    TerminalColumn("fastest s", ".3f"),
    TerminalColumn("slowest s", ".3f"),
    TerminalColumn("in prefills", ".3f"),
    TerminalColumn("peak MiB", ".0f"),
)


def bench_step(
    runner: Runner,
    lookahead: Lookahead,
    tokens: int,
    answer_tokens: int,
    repeats: int,
    settings: LookaheadTrainSettings,
) -> Iterator[str]:
    """Time steps on one batch (forward, backward, optimiser) and its prefill in turn, as a few lines of text.

    The prefill covers prompt and answer; each is timed `repeats` times after one warm-up. `settings` decides the loss,
    the batch size, and the number of `replays` that are averaged.
    """
    cuts = f" at {settings.cuts} cuts" if settings.cuts > 1 else ""
    yield (
        f"{settings.batch_size} x {tokens} prompt + {answer_tokens} answer tokens, "
        f"{settings.replays} steps a pass of the model{cuts}, {repeats} repeats"
    )

    def measure(_: None) -> Iterator[TableRow]:
        return _prefill_and_step(lookahead, tokens, answer_tokens, repeats, settings)

    yield from runner.table("train", _COLUMNS, runner.rows("train", [({}, None)], measure))


def _prefill_and_step(
    lookahead: Lookahead, tokens: int, answer_tokens: int, repeats: int, settings: LookaheadTrainSettings
) -> Iterator[TableRow]:
    """A row for the prefill and one for the step."""
    model = lookahead.model
    vocabulary = model.config.get_text_config().vocab_size
    shape = (settings.batch_size, tokens + answer_tokens)
    ids = torch.randint(3, vocabulary - 1, shape, device=model.device)
    objective = ImportanceObjective(lookahead, settings.far, settings.gradient_checkpointing, settings.cuts)
    if settings.replays > 1:
        objective.buffer = ReplayBuffer(ReplaySettings())
    optimizer = torch.optim.AdamW(
        objective.trained_parameters(), lr=1e-4, weight_decay=0.0, fused=True
    )  # the trainer's

    def prefill_prompt() -> None:
        prefill(model, ids)

    def take_steps() -> None:
        for turn in range(settings.replays):
            batch = Batch(ids[:, :tokens], ids[:, tokens:], last=turn == settings.replays - 1)
            objective.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    prefill_seconds = []
    step_seconds = []
    prefill_peak = 0.0
    step_peak = 0.0
    for repeat in range(repeats + 1):
        seconds, prefill_peak = _measure(prefill_prompt)
        if repeat > 0:
            prefill_seconds.append(seconds)
        seconds, step_peak = _measure(take_steps)
        if repeat > 0:
            step_seconds.append(seconds / settings.replays)

    for name, times, peak in (("prefill", prefill_seconds, prefill_peak), ("step", step_seconds, step_peak)):
        median = statistics.median(times)
        yield {
            "pass": name,
            "median s": median,
            "fastest s": min(times),
            "slowest s": max(times),
            "in prefills": median / statistics.median(prefill_seconds),
            "peak MiB": peak,
        }


def _measure(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and peak memory so far in MiB: of the GPU, or of the process where there is none."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return seconds_of(action), peak_memory() / 2**20
