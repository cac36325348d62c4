"""The sweep: every method and budget on every sample, from one prefill a sample.

For each sample the prompt is prefilled once, the full cache answers, each observer observes once for all methods and
budgets that use it, and the answers of all variants come from one batch (see `keepsight.eval.answers`).

`question` says what a method sees while it compresses: `seen`, the whole prompt; `unseen`, only what stands before
the question, which is read from the compressed cache; `multi`, the same, and all samples with one context are asked
of one compressed cache.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.answers import Answered, Limits, answer_all, answer_evicting
from keepsight.eval.metrics import score
from keepsight.eval.samples import Sample, render, render_apart
from keepsight.models.targets import Target
from keepsight.runtime.decode import decode, score_answer, stop_after
from keepsight.runtime.drafting import Draft, Drafter, DraftTokens, Given
from keepsight.runtime.evict import CacheMethod, Evict, FullCache, Method
from keepsight.runtime.importance import reduce_group, top_mask
from keepsight.runtime.methods.oracle import OwnAnswer
from keepsight.runtime.observe import Observer
from keepsight.runtime.prefill import prefill, read
from keepsight.runtime.prompt import ShortenPrompt
from keepsight.runtime.state import Needs, State

QUESTIONS = ("seen", "unseen", "multi")
FULL = "full"


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
        return getattr(self.method, "budget", None)


@dataclass(frozen=True)
class Seconds:
    """What a variant costs before its first token. What variants share is measured once and shown for each of them.

    Attributes:
        prefill: The target's pass over the prompt.
        draft: Whatever writes or reads a draft.
        observe: The observers' pass.
        select: Reduction, pooling, allocation and gathering.
    """

    prefill: float = 0.0
    draft: float = 0.0
    observe: float = 0.0
    select: float = 0.0


@dataclass
class _Shared:
    """What the variants of one prompt share: by drafter, by observer and reduction."""

    drafts: dict[Drafter, tuple[Draft, float]] = field(default_factory=dict)
    observed: dict[tuple[Observer, str], tuple[list[Tensor], float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Compressed:
    """A variant's state, what it cost, and which prompt entries it holds ([1, K, N] bool a layer) if they are known."""

    state: State
    seconds: Seconds
    selected: list[Tensor] | None


def run_sample(
    target: Target, sample: Sample, variants: Sequence[Variant], batch_tokens: int, question: str = "seen"
) -> list[dict[str, Any]]:
    """All rows of one sample; see `run_samples`."""
    return run_samples(target, [sample], variants, batch_tokens, question)[0]


def run_samples(
    target: Target, samples: Sequence[Sample], variants: Sequence[Variant], batch_tokens: int, question: str = "seen"
) -> list[list[dict[str, Any]]]:
    """All rows of samples that share a context, or of one sample: the full cache first, then every variant.

    Args:
        target: The model that answers.
        samples: Prompt, references and metric; several only under `question=multi`.
        variants: Methods and budgets; a full cache among them is answered once, not twice.
        batch_tokens: Bounds the batches; see `keepsight.eval.answers.Limits`.
        question: One of `QUESTIONS`.

    Raises:
        UserError: the prompt and its answer do not fit the target's context, an answer span was cut, or a sample does
            not say where its question starts.
    """
    parts = [_ids(sample, target, question) for sample in samples]
    prompt = parts[0][0]
    evicting = [variant for variant in variants if not isinstance(variant.method, FullCache)]
    for variant in evicting:
        variant.method.check(prompt.shape[1])
    start = time.perf_counter()
    prefilled = prefill(target.model, prompt, needs=_needs(evicting))
    seconds = Seconds(prefill=_since(start))
    asked = [_ask(target, sample, prefilled, rest) for sample, (_, rest) in zip(samples, parts, strict=True)]
    coming = Draft(torch.cat([ids for each in asked for ids in (each.rest, each.answer)], dim=1))
    compressed = _compress_all(target, prefilled, coming, evicting, seconds)
    truth = DraftTokens(Given(coming))(target.model, prefilled, "mean")
    recalls = [1.0 if each.state is prefilled else _recall(each.selected, truth) for each in compressed]
    rows = []
    for each in asked:
        shown = {"prompt_tokens": prompt.shape[1] + each.rest.shape[1], "question": question}
        answers = _answers(target, each, evicting, compressed, batch_tokens)
        full = _Compressed(prefilled, seconds, None)
        rows.append(
            [_row(target, each, Variant(FULL, FullCache()), full, each.full, 1.0) | shown]
            + [
                _row(target, each, *columns) | shown
                for columns in zip(evicting, compressed, answers, recalls, strict=True)
            ]
        )
    return rows


@dataclass(frozen=True)
class _Asked:
    """A question put to the full cache.

    Attributes:
        sample: What is asked.
        rest: [1, q] int64, what is read after the context; empty when the whole prompt was.
        answer: [1, T] int64, the full cache's.
        full: The same with its likelihood.
    """

    sample: Sample
    rest: Tensor
    answer: Tensor
    full: Answered


def _ids(sample: Sample, target: Target, question: str) -> tuple[Tensor, Tensor]:
    """What is compressed, and what is read after it; [1, N] and [1, q] int64."""
    if question == "seen":
        parts = render(sample, target.tokenizer), list[int]()
    else:
        parts = render_apart(sample, target.tokenizer)
    tokens, context = sum(map(len, parts)), target.model.config.get_text_config().max_position_embeddings
    if tokens + sample.max_new_tokens > context:
        raise UserError(
            f"sample {sample.task}/{sample.id} has {tokens} tokens, with {sample.max_new_tokens} for the answer more "
            f"than the context of {context}; lower lengths= or max_tokens="
        )
    first, rest = (torch.tensor([part], dtype=torch.long, device=target.model.device) for part in parts)
    return first, rest


def _needs(variants: Sequence[Variant]) -> Needs:
    needs = Needs()
    for variant in variants:
        if isinstance(variant.method, CacheMethod):
            needs = needs | variant.method.needs()
    return needs


def _limits(target: Target, sample: Sample, batch_tokens: int) -> Limits:
    return Limits(sample.max_new_tokens, target.end_tokens, batch_tokens)


def _read_rest(target: Target, state: State, rest: Tensor) -> State:
    """A copy of the state after the question."""
    return read(target.model, state.copy(), rest)[0] if rest.shape[1] else state


def _ask(target: Target, sample: Sample, prefilled: State, rest: Tensor) -> _Asked:
    state = _read_rest(target, prefilled, rest)
    start = time.perf_counter()
    criteria = stop_after(sample.max_new_tokens, target.end_tokens)
    answer = decode(target.model, state.copy(), criteria, pad_token=target.pad_token).ids
    speed = answer.shape[1] / _since(start)
    nll, hits = score_answer(target.model, state.copy(), answer)
    return _Asked(sample, rest, answer, Answered(answer[0], nll[0], hits[0], speed))


def _compress_all(
    target: Target, prefilled: State, coming: Draft, variants: Sequence[Variant], prefill_seconds: Seconds
) -> list[_Compressed]:
    shared, compressed = _Shared(), []
    for variant in variants:
        method = variant.method
        if isinstance(method, Evict) and not method.reads_itself(prefilled.tokens.shape[1]):
            compressed.append(_evicted(target, prefilled, coming, method, shared, prefill_seconds))
        elif isinstance(method, CacheMethod) and not isinstance(method, Evict):
            start = time.perf_counter()
            state = method.compress(target.model, prefilled)
            compressed.append(_Compressed(state, replace(prefill_seconds, select=_since(start)), None))
        elif isinstance(method, ShortenPrompt):
            compressed.append(_shortened(target, prefilled, method))
        else:
            start = time.perf_counter()
            state = method.start(target.model, prefilled.tokens)
            compressed.append(_Compressed(state, Seconds(prefill=_since(start)), None))
    return compressed


def _shortened(target: Target, prefilled: State, method: ShortenPrompt) -> _Compressed:
    start = time.perf_counter()
    short = method.shorten(target.model, prefilled.tokens)[0]
    chosen = _since(start)
    start = time.perf_counter()
    state = prefill(target.model, short[None], needs=Needs())
    return _Compressed(state, Seconds(prefill=_since(start), draft=chosen), None)


def _evicted(
    target: Target, prefilled: State, coming: Draft, method: Evict, shared: _Shared, seconds: Seconds
) -> _Compressed:
    if method.fits(prefilled):
        return _Compressed(prefilled, seconds, None)
    observer = method.observer.for_window(method.window)
    if isinstance(observer, DraftTokens):
        draft, took = _draft(target, prefilled, coming, observer.drafter, shared)
        observer, seconds = replace(observer, drafter=Given(draft)), replace(seconds, draft=took)
        shared_as: Observer = method.observer.for_window(method.window)
    else:
        shared_as = observer
    key = shared_as, method.reduce.queries
    if key not in shared.observed:
        start = time.perf_counter()
        observed = observer(target.model, prefilled, method.reduce.queries)
        shared.observed[key] = observed, _since(start)
    observed, took = shared.observed[key]
    start = time.perf_counter()
    selected = method.select(prefilled, method.reduced(prefilled, observed))
    state = method.gather(prefilled, selected)
    return _Compressed(state, replace(seconds, observe=took, select=_since(start)), selected)


def _draft(target: Target, prefilled: State, coming: Draft, drafter: Drafter, shared: _Shared) -> tuple[Draft, float]:
    if isinstance(drafter, OwnAnswer):
        return coming, 0.0  # the oracle's draft is what follows under the full cache, which is known already
    if drafter not in shared.drafts:
        start = time.perf_counter()
        draft = drafter(target.model, prefilled)
        shared.drafts[drafter] = draft, _since(start)
    return shared.drafts[drafter]


def _recall(selected: list[Tensor] | None, truth: list[Tensor]) -> float | None:
    """Share of the entries which the coming tokens attend to most, in equal number a head, that are kept.

    None when the entries that were kept are not the prompt's.
    """
    if selected is None:
        return None
    found = wanted = 0
    for kept, importance in zip(selected, truth, strict=True):
        best = reduce_group(importance, kept.shape[1])
        count = round(kept.float().sum(-1).mean().item())
        top = top_mask(best, min(count, best.shape[-1]))
        found, wanted = found + int((kept & top).sum()), wanted + int(top.sum())
    return found / max(wanted, 1)


def _answers(
    target: Target, asked: _Asked, variants: Sequence[Variant], compressed: Sequence[_Compressed], batch_tokens: int
) -> list[Answered]:
    limits = _limits(target, asked.sample, batch_tokens)
    states = [_read_rest(target, each.state, asked.rest) for each in compressed]
    reapplied = [variant.method.reapply(target.model) for variant in variants]
    together = [index for index, each in enumerate(reapplied) if each is None]
    answers = dict(
        zip(
            together,
            answer_all(target.model, [states[index] for index in together], asked.answer, limits),
            strict=True,
        )
    )
    for index, each in enumerate(reapplied):
        if each is not None:
            answers[index] = answer_evicting(target.model, states[index], asked.answer, limits, each)
    return [answers[index] for index in range(len(variants))]


def _row(
    target: Target, asked: _Asked, variant: Variant, compressed: _Compressed, answered: Answered, recall: float | None
) -> dict[str, Any]:
    sample, state = asked.sample, compressed.state
    text = str(target.tokenizer.decode(answered.ids, skip_special_tokens=True))
    return {
        "task": sample.task,
        "length": sample.length,
        "sample": sample.id,
        "method": variant.name,
        "budget": variant.budget,
        "score": score(sample, text),
        "excess_nll": (answered.nll - asked.full.nll).mean().item(),
        "agreement": answered.hits.float().mean().item(),
        "recall": recall,
        "kept": round(state.held().float().mean().item(), 3),
        "kv_bytes": state.kv_bytes,
        "seconds": asdict(compressed.seconds),
        "time_to_first_token": sum(asdict(compressed.seconds).values()),
        "tokens_per_second": answered.tokens_per_second,
        "answer": text,
        "references": list(sample.references),
    }


def _since(start: float) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def sweep(
    target: Target,
    samples: Sequence[Sample],
    variants: Sequence[Variant],
    done: set[tuple[Any, ...]],
    batch_tokens: int,
    question: str = "seen",
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each sample that is not in `done` (a set of (task, length, sample id)).

    Under `question=multi` samples that stand one after another and share task, length and context are one group.
    """
    for group in groups_of(samples, question):
        wanted = [(sample.task, sample.length, sample.id) not in done for sample in group]
        if any(wanted):
            rows = run_samples(target, group, variants, batch_tokens, question)
            yield from (each for each, missing in zip(rows, wanted, strict=True) if missing)


def groups_of(samples: Sequence[Sample], question: str) -> list[list[Sample]]:
    """What is run together: single samples, or under `multi` those with one context."""
    if question != "multi":
        return [[sample] for sample in samples]
    return [list(group) for _, group in groupby(samples, lambda each: (each.task, each.length, each.context))]
