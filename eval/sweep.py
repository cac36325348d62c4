"""The sweep: every method and budget on every sample, from one prefill a sample.

For each sample the prompt is prefilled once, the full cache answers, each method observes once for all its budgets,
and the decodes of all variants run as one batch. The full cache's answer is then scored under each evicted cache in
one forward pass.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.metrics import score
from keepsight.eval.samples import Sample, render
from keepsight.models.targets import Target
from keepsight.runtime.cache import cache_bytes
from keepsight.runtime.decode import Kept, decode, join, score_answer, stop_after
from keepsight.runtime.evict import Evict, FullCache, Method
from keepsight.runtime.methods.oracle import OwnAnswer
from keepsight.runtime.prefill import Prefilled, prefill


@dataclass(frozen=True)
class Variant:
    """A method at one budget, under the names that the results show.

    Attributes:
        name: What the `method` column shows.
        method: Its parts.
    """

    name: str
    method: Method

    @property
    def budget(self) -> int | float | None:
        """Entries per layer and KV head; None for the full cache."""
        return self.method.budget if isinstance(self.method, Evict) else None


@dataclass
class _Clock:
    """Seconds by phase of one sample."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


def run_sample(target: Target, sample: Sample, variants: Sequence[Variant], max_batch: int) -> list[dict[str, Any]]:
    """All rows of one sample: the full cache first, then every variant.

    Args:
        target: The model that answers.
        sample: Prompt, references and metric.
        variants: Methods and budgets; a full cache among them is answered once, not twice.
        max_batch: Variants decoded together.

    Raises:
        UserError: the prompt and its answer do not fit the target's context, or an answer span was cut.
    """
    clock = _Clock()
    prompt = torch.tensor([_checked_ids(sample, target)], device=target.model.device)
    prefilled = prefill(target.model, prompt)
    clock.lap("prefill")
    full = FullCache().compress(target.model, prefilled)
    answer = _answer(target, sample, full.copy())[:, : sample.max_new_tokens]
    clock.lap("decode")
    base_nll, base_hits = score_answer(target.model, full.copy(), answer)
    rows = [_row(target, sample, Variant("full", FullCache()), full, answer[0], base_nll[0], base_nll[0], base_hits[0])]
    clock.lap("score")
    states = _states(target, prefilled, answer, variants)
    clock.lap("observe")
    evicted = [variant for variant in variants if isinstance(variant.method, Evict)]
    for start in range(0, len(evicted), max_batch):
        chosen, kept = evicted[start : start + max_batch], states[start : start + max_batch]
        batch = join(kept)
        nll, hits = score_answer(target.model, batch.copy(), answer.expand(len(kept), -1))
        clock.lap("score")
        answers = _answer(target, sample, batch)
        clock.lap("decode")
        rows += [
            _row(target, sample, variant, state, ids, each_nll, base_nll[0], each_hits)
            for variant, state, ids, each_nll, each_hits in zip(chosen, kept, answers, nll, hits, strict=True)
        ]
    return [row | {"prompt_tokens": prompt.shape[1], "seconds": clock.seconds} for row in rows]


def _checked_ids(sample: Sample, target: Target) -> list[int]:
    ids = render(sample, target.tokenizer)
    context = target.model.config.get_text_config().max_position_embeddings
    if len(ids) + sample.max_new_tokens > context:
        raise UserError(
            f"sample {sample.task}/{sample.id} has {len(ids)} tokens, with {sample.max_new_tokens} for the answer more "
            f"than the context of {context}; lower lengths= or max_tokens="
        )
    return ids


def _states(target: Target, prefilled: Prefilled, answer: Tensor, variants: Sequence[Variant]) -> list[Kept]:
    """What each evicting variant keeps. A method observes once for all its budgets."""
    states, observed = [], {}
    for variant in variants:
        method = variant.method
        if not isinstance(method, Evict):
            continue
        if isinstance(method.observer, OwnAnswer):
            method = replace(method, observer=OwnAnswer(known=answer))
        if method.entries(prefilled) >= prefilled.length:
            states.append(method.compress(target.model, prefilled))
            continue
        if variant.name not in observed:
            observed[variant.name] = method.importance(target.model, prefilled)
        states.append(method.keep(prefilled, observed[variant.name]))
    return states


def _answer(target: Target, sample: Sample, kept: Kept) -> Tensor:
    """Greedy answers [B, T]."""
    criteria = stop_after(sample.max_new_tokens, target.end_tokens)
    return decode(target.model, kept, criteria, pad_token=target.pad_token)


def _row(
    target: Target,
    sample: Sample,
    variant: Variant,
    kept: Kept,
    ids: Tensor,
    nll: Tensor,
    base_nll: Tensor,
    hits: Tensor,
) -> dict[str, Any]:
    text = str(target.tokenizer.decode(ids, skip_special_tokens=True))
    return {
        "task": sample.task,
        "length": sample.length,
        "sample": sample.id,
        "method": variant.name,
        "budget": variant.budget,
        "score": score(sample, text),
        "excess_nll": (nll - base_nll).mean().item(),
        "agreement": hits.float().mean().item(),
        "kept": kept.size,
        "kv_bytes": cache_bytes(kept.cache),
        "answer": text,
        "references": list(sample.references),
        "question": "seen",
    }


def sweep(
    target: Target, samples: Sequence[Sample], variants: Sequence[Variant], done: set[tuple[Any, ...]], max_batch: int
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each sample that is not in `done` (a set of (task, length, sample id))."""
    for sample in samples:
        if (sample.task, sample.length, sample.id) not in done:
            yield run_sample(target, sample, variants, max_batch)
