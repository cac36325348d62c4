"""All methods and budgets on one sample, or on the samples of one context, from one prefill.

The prompt is prefilled once, the full cache answers, each observer observes once for all methods and budgets that use
it (`keepsight.eval.compress`), and the answers of all variants come from one batch (`keepsight.eval.answers`).

`question` says what a method sees while it compresses: `seen`, the whole prompt; `unseen`, only what stands before
the question, which is read from the compressed cache; `multi`, the same, and all samples with one context are asked
of one compressed cache. The turns of a conversation are always answered from one compressed cache, the first turn's,
each after the ones before (`keepsight.eval.turns`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.answers import Answered, Limits, answer_all, answer_alone, answer_full
from keepsight.eval.compress import Compressed, Seconds, SharedPrompt, needs_of_all, since
from keepsight.eval.kept import attention_mass, recall
from keepsight.eval.results import FULL, Row
from keepsight.eval.rows import Asked, Variant, row_of
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.eval.turns import add_before, go_on, in_own_words
from keepsight.models.targets import Target
from keepsight.runtime.drafting.observer import DraftIds
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.images import Images
from keepsight.runtime.join import can_join
from keepsight.runtime.state import State, context_of, prefill

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
                answers = in_own_words(target, each, methods, compressed, answers, questions)
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
