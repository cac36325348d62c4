"""A row of `results.jsonl`: what one variant answered to one question, and what that took."""

from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from keepsight.eval.answers import Answered, Limits, first_difference
from keepsight.eval.compress import Compressed
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.targets import Target
from keepsight.runtime.generate import Method

_SHOWN = 400
"""Characters at the end of a prompt that a row shows where its question is not known apart."""


@dataclass(frozen=True)
class Variant:
    """A method at one budget, under the names that the results show.

    Attributes:
        name: What the `method` column shows.
        method: The method at its budget.
    """

    name: str
    method: Method

    @property
    def budget(self) -> int | float | None:
        """Entries per layer and KV head; None for the full cache."""
        return getattr(self.method, "budget", None)


@dataclass(frozen=True)
class Asked:
    """A question put to the full cache.

    Attributes:
        sample: What is asked.
        question: [1, q] int64, what is read after the context; empty when the whole prompt was.
        limits: Limits of its answers.
        answer: [1, T] int64, the full cache's answer.
        full: The full cache's answer with its likelihood.
    """

    sample: RenderedSample
    question: Tensor
    limits: Limits
    answer: Tensor
    full: Answered


def row_of(
    target: Target,
    asked: Asked,
    variant: Variant,
    compressed: Compressed,
    answered: Answered,
    measured: dict[str, float | None],
) -> dict[str, Any]:
    """What a variant answered, as `results.jsonl` has it.

    Args:
        target: The model.
        asked: The question.
        variant: The method at its budget.
        compressed: What it answered from.
        answered: Its answer.
        measured: What `keepsight.eval.kept` says about what it kept: recall, mass and tau.
    """
    sample, state = asked.sample, compressed.state
    seconds = asdict(replace(compressed.seconds, question=answered.question))
    text = str(target.tokenizer.decode(answered.ids, skip_special_tokens=True))
    return {
        "task": sample.task,
        "length": sample.length,
        "sample": sample.id,
        "depth": sample.depth,
        "method": variant.name,
        "budget": variant.budget,
        "score": score(sample, text),
        "excess_nll": (answered.nll - asked.full.nll).mean().item(),
        "agreement": answered.hits.float().mean().item(),
        **measured,
        "first_difference": first_difference(answered.ids, asked.full.ids),
        "kept": round(state.counts().float().mean().item(), 3),
        "kv_bytes": state.kv_bytes,
        "seconds": seconds,
        "time_to_first_token": sum(seconds.values()),
        "tokens_per_second": answered.tokens_per_second,
        "rows": answered.rows,
        "answer": text,
        "answer_tokens": len(answered.ids),
        "references": list(sample.references),
        "asks": (sample.question or sample.prompt[-_SHOWN:]).strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
