"""The sweep: every method and budget on every sample, from one prefill per sample.

The prompt is prefilled once, the full cache answers, each observer observes once for all methods and budgets that use
it (`keepsight.eval.compress`), and the answers of all variants come from one batch (`keepsight.eval.answers`). Rows
that an earlier run has measured on the same inputs are used again (`keepsight.eval.reuse`).

`question` says what a method sees while it compresses: `seen`, the whole prompt; `unseen`, only the part before the
question, which is read from the compressed cache; `multi`, the same, and all samples with one context are asked of one
compressed cache. The turns of a conversation are always answered from one compressed cache, the first turn's. In a
later turn each variant continues from its own answers; `excess_nll` and `agreement` are measured in the full cache's
conversation, which is the same for all.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.answers import (
    Answered,
    Limits,
    answer_all,
    answer_alone,
    answer_each,
    answer_full,
    first_difference,
)
from keepsight.eval.compress import Compressed, Seconds, SharedPrompt, attention_mass, needs_of_all, recall, since
from keepsight.eval.results import FULL, Key, Row
from keepsight.eval.reuse import NOTHING, Earlier, inputs_digest, method_text, sample_digest, target_digest
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.targets import Target
from keepsight.runtime.drafting.observer import DraftIds
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.images import Images
from keepsight.runtime.join import can_join
from keepsight.runtime.state import State, context_of, prefill

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
        measured: What `keepsight.eval.compress` says about what it kept: recall, mass and tau.
    """
    sample, state = asked.sample, compressed.state
    seconds = asdict(replace(compressed.seconds, question=answered.question))
    text = str(target.tokenizer.decode(answered.ids, skip_special_tokens=True))
    excess_nll = (answered.nll - asked.full.nll).mean().item()
    if not math.isfinite(excess_nll):
        raise UserError(
            f"sample {sample.task}/{sample.id}: {variant.name} at budget {variant.budget} gives logits that "
            f"are not finite in {target.model.dtype}; leave the method out, or choose model.dtype=float32"
        )
    return {
        "task": sample.task,
        "length": sample.length,
        "sample": sample.id,
        "depth": sample.depth,
        "method": variant.name,
        "budget": variant.budget,
        "score": score(sample, text),
        "excess_nll": excess_nll,
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


def go_on(target: Target, question: Tensor, answer: Tensor, sample: RenderedSample) -> Tensor:
    """What is read after the compressed prompt for a later turn.

    Args:
        target: The model that answers.
        question: [1, q] int64, what was read for the turn before.
        answer: [T] int64, what was answered then.
        sample: The later turn.

    Returns:
        [1, q + T + n] int64; of the answer without its end token, with which the sample's own tokens begin.
    """
    said = answer[:-1] if answer[-1:].tolist()[0] in target.end_tokens else answer
    return torch.cat([question, said[None], sample.question_ids[None].to(answer.device)], dim=1)


def own_conversations(
    target: Target,
    asked: Asked,
    methods: Sequence[Method],
    compressed: Sequence[Compressed],
    answers: Sequence[Answered],
    questions: Sequence[Tensor],
) -> list[Answered]:
    """The answers of variants, each in its own conversation where its earlier answers differ from the full cache's.

    Args:
        target: The model that answers.
        asked: The turn, in the full cache's conversation.
        methods: The variants.
        compressed: What they answer from.
        answers: Their answers in the full cache's conversation.
        questions: For each variant, [1, q] int64, what is read after the compressed prompt; see `go_on`.
    """
    model, own = target.model, dict[int, Tensor]()
    differing = [index for index, each in enumerate(questions) if not torch.equal(each, asked.question)]
    for index in differing:
        method, state = methods[index], compressed[index].state
        reapply = method.reapply(model)
        if reapply is not None or not can_join(state):
            readers = method.turn_reader(model), method.reader(model)
            alone = answer_alone(readers, state, questions[index], asked.answer, asked.limits, reapply)
            own[index] = alone.ids
    together = [index for index in differing if index not in own]
    states, rest = [compressed[index].state for index in together], [questions[index] for index in together]
    own.update(zip(together, answer_each(model, states, rest, asked.limits), strict=True))
    return [replace(answer, ids=own.get(index, answer.ids)) for index, answer in enumerate(answers)]


def add_before(samples: Sequence[RenderedSample], rows: Sequence[list[dict[str, Any]]]) -> None:
    """Add to the rows of later turns what their variants answered in the turns before, as `before`."""
    for sample, earlier, made in zip(samples[1:], rows, rows[1:], strict=False):
        for row, said in zip(made if sample.earlier else [], earlier, strict=False):
            row["before"] = [*said.get("before", []), said["answer"]]


Note = Callable[[Sequence[RenderedSample], Variant, Tensor], object]
"""Takes samples with one prompt, a variant and [L, K, N] bool, which of the prompt's entries it keeps."""


FULL_CACHE = Variant(FULL, FullCache())


def evicting(variants: Sequence[Variant]) -> list[Variant]:
    """The variants without the full cache, which is always answered from first."""
    return [variant for variant in variants if not variant.method.is_full_cache]


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
            if sample.pictures and not variant.method.reads_images:
                raise UserError(f"methods= names {variant.name!r}, which reads no images; {sample.task} has some")
            variant.method.check(len(sample.prompt_ids), context)


def run_sample(
    target: Target, sample: RenderedSample, variants: Sequence[Variant], batch_tokens: int, question: str = "seen"
) -> list[Row]:
    """All rows of one sample; see `run_samples`."""
    return run_samples(target, [sample], variants, batch_tokens, question)[0]


@torch.no_grad()
def run_samples(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    batch_tokens: int,
    question: str = "seen",
    note: Note = lambda *_: None,
) -> list[list[Row]]:
    """All rows of samples that share a context, or of one sample: the full cache first, then every variant.

    Args:
        target: The model that answers.
        samples: Prompt, references and metric; several only under `question=multi`, or the turns of a conversation.
        variants: Methods and budgets; a full cache among them is answered once, not twice.
        batch_tokens: Bounds the batches; see `keepsight.eval.answers.Limits`.
        question: What the methods see: `seen`, `unseen` or `multi`. The samples come split for all but `seen`.
        note: Is told which entries of the prompt each variant keeps, where that is known.

    Raises:
        UserError: as `check_samples`.
    """
    check_samples(target, samples, variants)
    compared = evicting(variants)
    prompt = samples[0].prompt_ids[None].to(target.model.device)
    images, needs = _images(target, samples[0]), needs_of_all([variant.method for variant in compared])
    start = time.perf_counter()
    state = prefill(target.model, prompt, needs=needs, images=images)
    seconds = since(start) - state.seconds
    asked = _ask(target, state, samples, batch_tokens)
    shared = _shared(target, state, asked, seconds, images)
    ranks, attention = shared.ranks(), shared.attention()
    shown = [{"prompt_tokens": prompt.shape[1] + each.question.shape[1], "question": question} for each in asked]
    full = FULL_CACHE, Compressed(state, Seconds(prefill=seconds), None)
    whole = {"recall": 1.0, "mass": 1.0, "tau": None}
    rows = [[row_of(target, each, *full, each.full, whole) | more] for each, more in zip(asked, shown, strict=True)]
    length = prompt.shape[1]
    for group in batched_by_entries(compared, lambda each: min(each.method.budget_for(length), length), batch_tokens):
        methods = [variant.method for variant in group]
        compressed = [shared.compress(method) for method in methods]
        measured = [
            {"recall": recall(kept, ranks), "mass": attention_mass(kept, attention), "tau": shared.tau(method)}
            for method, kept in zip(methods, (each.kept for each in compressed), strict=True)
        ]
        for variant, made_of in zip(group, compressed, strict=True):
            if made_of.kept is not None:
                note(samples, variant, made_of.kept)
        questions, answers = list[Tensor](), list[Answered]()
        for each, more, made in zip(asked, shown, rows, strict=True):
            if each.sample.earlier:
                said_before = zip(questions, answers, strict=True)
                questions = [go_on(target, before, answer.ids, each.sample) for before, answer in said_before]
                answers = _answers(target, each, methods, compressed)
                answers = own_conversations(target, each, methods, compressed, answers, questions)
            else:
                questions, answers = [each.question] * len(group), _answers(target, each, methods, compressed)
            columns = zip(group, compressed, answers, measured, strict=True)
            made += [row_of(target, each, *column) | more for column in columns]
    add_before(samples, rows)
    return rows


def batched_by_entries(
    items: Iterable[Variant], entries: Callable[[Variant], int], most: int
) -> Iterator[list[Variant]]:
    """Consecutive variants whose states together hold at most `most` entries per head; a single one may exceed it."""
    batch, held = list[Variant](), 0
    for item in items:
        size = entries(item)
        if batch and held + size > most:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def _ask(target: Target, state: State, samples: Sequence[RenderedSample], batch_tokens: int) -> list[Asked]:
    """Every sample put to the full cache; a later turn of a conversation after the answers to the ones before."""
    asked = list[Asked]()
    for sample in samples:
        rest = sample.question_ids[None].to(target.model.device)
        if sample.earlier:
            rest = go_on(target, asked[-1].question, asked[-1].answer[0], sample)
        limits = Limits(sample.max_new_tokens, target.end_tokens, batch_tokens)
        asked.append(Asked(sample, rest, limits, *answer_full(target.model, state, rest, limits)))
    return asked


def _images(target: Target, sample: RenderedSample) -> Images | None:
    """The images in a prompt, on the target's device."""
    made = sample.pictures.inputs() if sample.pictures else {}
    return Images.among({name: each.to(target.model.device) for name, each in made.items()})


def _shared(
    target: Target, state: State, asked: Sequence[Asked], seconds: float, images: Images | None
) -> SharedPrompt:
    """What methods share. All questions with their answers, one after another, are what comes."""
    whole = asked[-1:] if asked[-1].sample.earlier else asked  # a conversation's last question holds all before it
    coming = DraftIds(torch.cat([ids for each in whole for ids in (each.question, each.answer)], dim=1))
    writing = sum(len(each.full.ids) / (each.full.tokens_per_second or 1.0) for each in asked)
    return SharedPrompt(target.model, state, coming, seconds, writing, images)


def _answers(
    target: Target, asked: Asked, methods: Sequence[Method], compressed: Sequence[Compressed]
) -> list[Answered]:
    """Methods that evict while decoding and states that cannot be joined answer alone, all others in batches."""
    model, question = target.model, (asked.question, asked.answer, asked.limits)
    answers = {}
    for index, (method, each) in enumerate(zip(methods, compressed, strict=True)):
        reapply = method.reapply(model)
        if reapply is not None or not can_join(each.state):
            readers = method.turn_reader(model), method.reader(model)
            answers[index] = answer_alone(readers, each.state, *question, reapply)
    together = [index for index in range(len(methods)) if index not in answers]
    batched = answer_all(model, [compressed[index].state for index in together], *question)
    answers.update(zip(together, batched, strict=True))
    return [answers[index] for index in range(len(methods))]


def sweep(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    done: set[Key],
    batch_tokens: int,
    question: str = "seen",
    earlier: Earlier = NOTHING,
    note: Note = lambda *_: None,
) -> Iterator[list[Row]]:
    """The rows of each sample whose key is not in `done`, with what they depend on as digests.

    Under `question=multi` samples that stand one after another and share task, length and context are one group.

    Args:
        target: The model that answers.
        samples: Prompts, references and metrics.
        variants: Methods and budgets.
        done: `Sample.key` of those that are left out.
        batch_tokens: See `run_samples`.
        question: See `run_samples`.
        earlier: Rows that are used again where they depend on the same inputs.
        note: See `run_samples`.
    """
    columns = [FULL_CACHE, *evicting(variants)]
    of_target, methods = target_digest(target), [method_text(variant.method) for variant in columns]
    for group in groups_of(samples, question):
        wanted = [sample.key not in done for sample in group]
        if not any(wanted):
            continue
        contents = [sample_digest(sample) for sample in group]
        inputs = [
            [inputs_digest(of_target, contents, place, question, method) for method in methods]
            for place in range(len(group))
        ]
        run = functools.partial(run_samples, target, group, batch_tokens=batch_tokens, question=question, note=note)
        rows = _completed(run, columns, earlier.of(inputs))
        for sample, content, made, digests, missing in zip(group, contents, rows, inputs, wanted, strict=True):
            names = {"task": sample.task, "length": sample.length, "sample": sample.id, "sample_digest": content}
            if missing:
                yield [row | names | {"inputs_digest": digest} for row, digest in zip(made, digests, strict=True)]


def _completed(
    run: Callable[[list[Variant]], list[list[Row]]], columns: list[Variant], found: list[list[Row | None]]
) -> list[list[Row]]:
    """The rows of a group of samples: those found, and what `run` gives for the other variants.

    Where the full cache was not found, or now answers otherwise by rounding, nothing that was found is comparable.
    """
    missing = [variant for variant, row in zip(columns, found[0], strict=True) if row is None]
    if FULL_CACHE in missing:
        return run(columns)
    made: Sequence[Sequence[Row | None]] = run(missing) if missing else found
    if any(old[0] and new[0] and old[0]["answer"] != new[0]["answer"] for old, new in zip(found, made, strict=True)):
        return run(columns)
    rows = []
    for old, new in zip(found, made, strict=True):
        fresh = iter([row for row in new[1:] if row])
        cells = [{"method": variant.name, "budget": variant.budget} for variant in columns]
        rows.append([(row or next(fresh)) | cell for row, cell in zip(old, cells, strict=True)])
    return rows


def groups_of(samples: Sequence[RenderedSample], question: str) -> list[list[RenderedSample]]:
    """What is run together: single samples, the turns of a conversation, or under `multi` those with one context."""
    groups: list[list[RenderedSample]] = []
    for sample in samples:
        if groups and (sample.earlier or (question == "multi" and _shared_by(sample) == _shared_by(groups[-1][0]))):
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _shared_by(sample: RenderedSample) -> tuple[str, int, str]:
    return sample.task, sample.length, sample.context
