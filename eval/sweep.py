"""The sweep: every method and budget on every sample, from one prefill per sample.

For each sample the prompt is prefilled once, the full cache answers, each observer observes once for all methods and
budgets that use it (`keepsight.eval.compress`), and the answers of all variants come from one batch
(`keepsight.eval.answers`).

`question` says what a method sees while it compresses: `seen`, the whole prompt; `unseen`, only what stands before
the question, which is read from the compressed cache; `multi`, the same, and all samples with one context are asked
of one compressed cache.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.answers import Answered, Limits, answer_all, answer_alone, answer_full, batched_by_entries
from keepsight.eval.compress import Compressed, Seconds, SharedPrompt, needs_of_all, recall, since
from keepsight.eval.guesses import Guesses
from keepsight.eval.results import FULL
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.targets import Target
from keepsight.runtime.drafting.observer import DraftIds
from keepsight.runtime.method import FullCache, Method
from keepsight.runtime.prefill import context_of, prefill
from keepsight.runtime.state import State

QUESTIONS = ("seen", "unseen", "multi")


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
class _Asked:
    """A question put to the full cache.

    Attributes:
        sample: What is asked.
        question: [1, q] int64, what is read after the context; empty when the whole prompt was.
        limits: Limits of its answers.
        guesses: Texts that its answers may resemble.
        answer: [1, T] int64, the full cache's answer.
        full: The full cache's answer with its likelihood.
    """

    sample: RenderedSample
    question: Tensor
    limits: Limits
    guesses: Guesses
    answer: Tensor
    full: Answered


def sweep(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    done: set[tuple[str, int, str]],
    batch_tokens: int,
    question: str = "seen",
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each sample whose key is not in `done`.

    Under `question=multi` samples that stand one after another and share task, length and context are one group.
    """
    # In bfloat16 rounding depends on how many tokens a pass reads, and may decide between two that are equally likely:
    # what was said to one sample must not change what is said to another.
    said = Guesses() if target.model.dtype == torch.float32 else None
    for group in groups_of(samples, question):
        wanted = [sample.key not in done for sample in group]
        if any(wanted):
            rows = run_samples(target, group, variants, batch_tokens, question, said)
            yield from (each for each, missing in zip(rows, wanted, strict=True) if missing)


def groups_of(samples: Sequence[RenderedSample], question: str) -> list[list[RenderedSample]]:
    """What is run together: single samples, or under `multi` those with one context."""
    if question != "multi":
        return [[sample] for sample in samples]
    return [list(group) for _, group in groupby(samples, lambda each: (each.task, each.length, each.context))]


def check_samples(target: Target, samples: Sequence[RenderedSample], variants: Sequence[Variant]) -> None:
    """Refuse what `run_samples` would refuse, before the target runs.

    Raises:
        UserError: a sample does not fit the target's context, or a method cannot work on so short a prompt.
    """
    context = context_of(target.model)
    for sample in samples:
        tokens = len(sample.prompt_ids) + len(sample.question_ids)
        if tokens + sample.max_new_tokens > context:
            raise UserError(
                f"sample {sample.task}/{sample.id} has {tokens} tokens, with {sample.max_new_tokens} for the answer "
                f"more than the context of {context}; lower lengths= or max_tokens="
            )
        for variant in variants:
            variant.method.check(len(sample.prompt_ids), context)


def run_sample(
    target: Target, sample: RenderedSample, variants: Sequence[Variant], batch_tokens: int, question: str = "seen"
) -> list[dict[str, Any]]:
    """All rows of one sample; see `run_samples`."""
    return run_samples(target, [sample], variants, batch_tokens, question)[0]


@torch.no_grad()
def run_samples(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    batch_tokens: int,
    question: str = "seen",
    said: Guesses | None = None,
) -> list[list[dict[str, Any]]]:
    """All rows of samples that share a context, or of one sample: the full cache first, then every variant.

    Args:
        target: The model that answers.
        samples: Prompt, references and metric; several only under `question=multi`.
        variants: Methods and budgets; a full cache among them is answered once, not twice.
        batch_tokens: Bounds the batches; see `keepsight.eval.answers.Limits`.
        question: What the methods see, one of `QUESTIONS`: the samples come split for all but `seen`.
        said: Answers to other samples, which often resemble each other; these are added. None to look at no others.

    Raises:
        UserError: as `check_samples`.
    """
    check_samples(target, samples, variants)
    evicting = [variant for variant in variants if not variant.method.is_full_cache]
    prompt = samples[0].prompt_ids[None].to(target.model.device)
    start = time.perf_counter()
    state = prefill(target.model, prompt, needs=needs_of_all([variant.method for variant in evicting]))
    seconds = since(start) - state.trace.seconds
    asked, of_prompt = [], Guesses(said)
    of_prompt.learn(prompt[0].tolist())
    for sample in samples:
        rest = sample.question_ids[None].to(target.model.device)
        limits = Limits(sample.max_new_tokens, target.end_tokens, batch_tokens)
        guesses = Guesses(of_prompt)
        guesses.learn(rest[0].tolist())
        asked.append(_Asked(sample, rest, limits, guesses, *answer_full(target.model, state, rest, limits, guesses)))
    shared = _shared(target, state, asked, seconds)
    ranks = shared.ranks()
    shown = [{"prompt_tokens": prompt.shape[1] + each.question.shape[1], "question": question} for each in asked]
    full = Variant(FULL, FullCache()), Compressed(state, Seconds(prefill=seconds), None)
    rows = [[_row(target, each, *full, each.full, 1.0) | more] for each, more in zip(asked, shown, strict=True)]
    length = prompt.shape[1]
    for group in batched_by_entries(evicting, lambda each: min(each.method.budget_for(length), length), batch_tokens):
        methods = [variant.method for variant in group]
        compressed = [shared.compress(method) for method in methods]
        recalls = [recall(each.kept, ranks) for each in compressed]
        for each, more, made in zip(asked, shown, rows, strict=True):
            answers = _answers(target, each, methods, compressed)
            columns = zip(group, compressed, answers, recalls, strict=True)
            made += [_row(target, each, *column) | more for column in columns]
            if said is not None:
                for ids in {tuple(answer.ids.tolist()) for answer in (each.full, *answers)}:
                    said.learn([*ids])
    return rows


def _shared(target: Target, state: State, asked: Sequence[_Asked], seconds: float) -> SharedPrompt:
    """What methods share. Under `multi` all questions with their answers, one after another, are what comes."""
    coming = DraftIds(torch.cat([ids for each in asked for ids in (each.question, each.answer)], dim=1))
    writing = sum(len(each.full.ids) / (each.full.tokens_per_second or 1.0) for each in asked)
    return SharedPrompt(target.model, state, coming, seconds, writing)


def _answers(
    target: Target, asked: _Asked, methods: Sequence[Method], compressed: Sequence[Compressed]
) -> list[Answered]:
    """Methods that evict while decoding and states that cannot be joined answer alone, all others in batches."""
    model, question = target.model, (asked.question, asked.answer, asked.limits)
    answers = {}
    for index, (method, each) in enumerate(zip(methods, compressed, strict=True)):
        reapply = method.reapply(model)
        if reapply is not None or not each.state.joins:
            readers = method.turn_reader(model), method.reader(model)
            answers[index] = answer_alone(readers, each.state, *question, reapply)
    together = [index for index in range(len(methods)) if index not in answers]
    batched = answer_all(model, [compressed[index].state for index in together], *question, asked.guesses)
    answers.update(zip(together, batched, strict=True))
    return [answers[index] for index in range(len(methods))]


def _row(
    target: Target, asked: _Asked, variant: Variant, compressed: Compressed, answered: Answered, found: float | None
) -> dict[str, Any]:
    sample, state = asked.sample, compressed.state
    seconds = asdict(replace(compressed.seconds, question=answered.question))
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
        "recall": found,
        "kept": round(state.held().float().mean().item(), 3),
        "kv_bytes": state.kv_bytes,
        "seconds": seconds,
        "time_to_first_token": sum(seconds.values()),
        "tokens_per_second": answered.tokens_per_second,
        "rows": answered.rows,
        "answer": text,
        "references": list(sample.references),
    }
