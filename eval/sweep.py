"""The sweep: every method and budget on every sample, from one prefill per sample.

The prompt is prefilled once, the full cache answers, each observer observes once for all methods and budgets that use
it (`keepsight.eval.compress`), and the answers of all variants come from one batch (`keepsight.eval.answers`). Rows
that were measured before on the same inputs are used again (`keepsight.eval.record.RowStore`).

`question` says what a method compresses: `seen`, the whole prompt; `unseen`, only the part before the question, which
is then read after the compressed cache; `multi`, the same, with one compressed cache for all samples of one context. In
a conversation each turn's prompt is the whole conversation so far, read and compressed anew. A variant's answer follows
its own earlier answers; its likelihood and what it keeps are measured in the full cache's conversation, which is the
same for all variants.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.eval.answers import (
    GREEDY,
    Answered,
    Limits,
    Sampling,
    answer_all,
    answer_alone,
    answer_each,
    answer_full,
    batches,
    first_difference,
)
from keepsight.eval.compress import Compressed, SharedPrompt, attention_mass, needs_of_all, recall, since
from keepsight.eval.inputs import inputs_digest, method_text, sample_digest, target_digest
from keepsight.eval.record import FULL, NO_TIME, Cell, Digests, ResultRow, RowStore
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.answer_text import answer_text
from keepsight.models.decoder import context_of
from keepsight.models.targets import Target
from keepsight.runtime.drafting.observer import DraftIds
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.images import Images
from keepsight.runtime.join import can_join
from keepsight.runtime.state import State, prefill

_SHOWN = 400
"""Number of characters from the end of a prompt that a row shows if its question is not separate."""

Refused = dict[Cell, UserError]
"""The errors of variants that were left out, by name and budget."""


@dataclass(frozen=True)
class Variant:
    """A method at its budget, and the name that the `method` column shows."""

    name: str
    method: Method

    @property
    def budget(self) -> int | float | None:
        """Entries per layer and KV head; None for the full cache."""
        return getattr(self.method, "budget", None)

    @property
    def cell(self) -> Cell:
        """Name and budget, as rows have them."""
        return self.name, self.budget


FULL_CACHE = Variant(FULL, FullCache())


def evicting(variants: Sequence[Variant]) -> list[Variant]:
    """The variants without the full cache, which is always answered from first."""
    return [variant for variant in variants if not variant.method.is_full_cache]


Note = Callable[[Sequence[RenderedSample], Variant, Tensor], object]
"""Takes samples with one prompt, a variant and [L, K, N] bool, which of the prompt's entries it keeps."""


@dataclass(frozen=True)
class Question:
    """A question [1, q] int64 that is read after the context, and the full cache's answer; empty if the prompt has it.

    `answer` [1, T] int64 is the full cache's under `limits`, and `full` has it with its likelihood.
    """

    sample: RenderedSample
    tokens: Tensor
    limits: Limits
    answer: Tensor
    full: Answered


@dataclass(frozen=True)
class KeptQuality:
    """How well a variant's kept entries match the answer's attention; None where that is not known.

    See `recall`, `attention_mass` and `kendall_taus` of `keepsight.eval.compress`.
    """

    recall: float | None
    mass: float | None
    tau: float | None


# One row


def result_row(
    target: Target,
    question: Question,
    variant: Variant,
    compressed: Compressed,
    answered: Answered,
    quality: KeptQuality,
    *,
    prompt_tokens: int,
    question_mode: str,
) -> ResultRow:
    """The row of a variant's answer; `question_mode` is `seen`, `unseen` or `multi`.

    UserError: a number is infinite or NaN.
    """
    sample = question.sample
    state = compressed.state
    seconds = replace(compressed.seconds, question=answered.question)
    text = answer_text(target.tokenizer, answered.ids.tolist())
    if variant.method.periodic_eviction(target.model) is None:
        appended = [question.tokens.shape[1], *[1] * (len(answered.ids) - 1)]
        kv_peak_bytes = state.copy().kv_peak_bytes(appended)
    else:
        kv_peak_bytes = None
    row = ResultRow(
        task=sample.task,
        length=sample.length,
        sample=sample.id,
        depth=sample.depth,
        method=variant.name,
        budget=variant.budget,
        score=score(sample, text),
        excess_nll=(answered.nll - question.full.nll).mean().item(),
        agreement=answered.hits.float().mean().item(),
        recall=quality.recall,
        mass=quality.mass,
        tau=quality.tau,
        first_difference=first_difference(answered.ids, question.full.ids),
        kept=round(state.mean_entries(), 3),
        kv_bytes=state.kv_bytes,
        kv_peak_bytes=kv_peak_bytes,
        seconds=seconds,
        time_to_first_token=seconds.total,
        tokens_per_second=answered.tokens_per_second,
        rows=answered.rows,
        answer=text,
        answer_tokens=len(answered.ids),
        references=list(sample.references),
        asks=(sample.question or sample.prompt[-_SHOWN:]).strip(),
        date=datetime.now(timezone.utc).date().isoformat(),
        prompt_tokens=prompt_tokens,
        question=question_mode,
    )
    _check_finite(row, target, is_judged=bool(sample.judge))
    return row


def _check_finite(row: ResultRow, target: Target, *, is_judged: bool) -> None:
    """UserError if a number of a row is infinite or NaN; a judged answer's score is NaN until the verdict."""
    infinite = []
    for column, value in vars(row).items():
        awaits_verdict = column == "score" and is_judged
        if isinstance(value, float) and not math.isfinite(value) and not awaits_verdict:
            infinite.append(column)
    if not infinite:
        return
    if "excess_nll" in infinite:
        dtype = target.model.dtype
        cause = f"logits that are not finite in {dtype}; leave the method out, or choose model.dtype=float32"
    else:
        cause = f"{infinite[0]}={getattr(row, infinite[0])}"
    raise UserError(
        f"sample {row.task}/{row.sample}: {row.method} at budget {row.budget} gives {cause}",
        field="sample",
        code="data",
    )


# The rows of samples that share a prefill


def check_samples(
    target: Target, samples: Sequence[RenderedSample], variants: Sequence[Variant], refused: Refused | None = None
) -> None:
    """UserError for what `run_samples` would refuse: too long a sample, or too short a prompt for a method.

    `refused` gets the first error of each variant that refuses a sample; None to raise it.
    """
    context = context_of(target.model)
    for sample in samples:
        tokens = len(sample.prompt_ids) + len(sample.question_ids)
        if tokens + sample.max_new_tokens > context:
            raise UserError(
                f"sample {sample.task}/{sample.id} has {tokens} tokens, with {sample.max_new_tokens} for the answer "
                f"more than the context of {context}; lower lengths= or max_tokens=",
                field="lengths",
                code="range",
            )
        for variant in variants:
            try:
                if sample.pictures and not variant.method.reads_images:
                    raise UserError(
                        f"methods= names {variant.name!r}, which reads no images; {sample.task} has some",
                        field="methods",
                        code="model",
                    )
                variant.method.check(len(sample.prompt_ids), context)
            except UserError as error:
                if refused is None:
                    raise
                refused.setdefault(variant.cell, error)


@torch.no_grad()
def run_samples(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    batch_tokens: int,
    question: str = "seen",
    note: Note = lambda *_: None,
    refused: Refused | None = None,
    sampling: Sampling = GREEDY,
) -> list[list[ResultRow]]:
    """All rows of samples that share a context, or of one sample: the full cache first, then every variant.

    Args:
        target: The base model.
        samples: Prompt, references and metric; several only under `question=multi`, or the turns of a conversation.
        variants: Methods and budgets; a full cache among them is answered once, not twice.
        batch_tokens: Bounds the batches; see `keepsight.eval.answers.Limits`.
        question: What the methods see: `seen`, `unseen` or `multi`. The samples come split for all but `seen`.
        note: Called with the entries of the prompt that each variant keeps, where these are known.
        refused: Gets the error of each variant that raises a UserError, which then has no rows; None to raise it.
        sampling: How answers are decoded.

    Raises:
        UserError: as `check_samples`.
    """
    run = _Run(target, evicting(variants), batch_tokens, question, note, refused, sampling)
    if not samples[-1].earlier:
        return run.answer_samples(samples)

    rows_of_turns: list[list[ResultRow]] = []
    for turn in samples:
        if turn.earlier:
            conversation = run.conversations[FULL_CACHE.cell][0].cpu()
            prompt = torch.cat([conversation, turn.question_ids])
            turn = replace(turn, prompt_ids=prompt, question_ids=prompt[:0])
        (rows,) = run.answer_samples([turn])
        if rows_of_turns:
            rows = _with_earlier_answers(rows, rows_of_turns[-1])
        rows_of_turns.append(rows)
    return rows_of_turns


def _with_earlier_answers(rows: Sequence[ResultRow], rows_before: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows of a later turn, with what their variants have answered in the turns before, as `before`."""
    answers = {row.cell: [*(row.before or []), row.answer] for row in rows_before}
    return [replace(row, before=answers[row.cell]) for row in rows]


@dataclass(frozen=True)
class _Run:
    """The arguments of `run_samples`, and its steps.

    `conversations` has each variant's conversation so far, [1, M] int64, without the last answer's end token.
    """

    target: Target
    variants: list[Variant]
    batch_tokens: int
    question: str
    note: Note
    refused: Refused | None
    sampling: Sampling
    conversations: dict[Cell, Tensor] = field(default_factory=dict)

    def answer_samples(self, samples: Sequence[RenderedSample]) -> list[list[ResultRow]]:
        """The rows of samples with one prompt, or of one turn, which is then in the variants' conversations too."""
        variants = self._variants_that_answer(samples)
        prompt = self._share_prompt(samples, variants)
        for group in batches(variants, prompt.fits):
            try:
                prompt.answer(group)
            except UserError:  # of one variant: the others are run without it
                if self.refused is None:
                    raise
                for variant in group:
                    try:
                        prompt.answer([variant])
                    except UserError as error:
                        self.refused[variant.cell] = error
        return prompt.rows

    def _variants_that_answer(self, samples: Sequence[RenderedSample]) -> list[Variant]:
        """The variants that do not refuse the samples, and in a later turn have answered all turns before."""
        variants = self.variants
        if samples[0].earlier:
            variants = [variant for variant in variants if variant.cell in self.conversations]
        check_samples(self.target, samples, variants, self.refused)
        if self.refused:
            variants = [variant for variant in variants if variant.cell not in self.refused]
        return variants

    def _share_prompt(self, samples: Sequence[RenderedSample], variants: Sequence[Variant]) -> "_AnsweredPrompt":
        """The samples' prompt, prefilled and answered from the full cache, for the variants to share."""
        model = self.target.model
        tokens = samples[0].prompt_ids[None].to(model.device)
        pictures = samples[0].pictures.inputs() if samples[0].pictures else {}
        images = Images.among({name: values.to(model.device) for name, values in pictures.items()})
        needs = needs_of_all([variant.method for variant in variants])

        start = time.perf_counter()
        state = prefill(model, tokens, needs=needs, images=images)
        prefill_seconds = since(start) - state.seconds

        questions = []
        continuation = []
        decoding_seconds = 0.0
        for sample in samples:
            question = self._ask(state, sample)
            questions.append(question)
            continuation += [question.tokens, question.answer]
            decoding_seconds += len(question.full.ids) / (question.full.tokens_per_second or 1.0)
        answers = DraftIds(torch.cat(continuation, dim=1))
        shared = SharedPrompt(model, state, answers, prefill_seconds, decoding_seconds, images)
        return _AnsweredPrompt(self, tokens, shared, questions)

    def _ask(self, state: State, sample: RenderedSample) -> Question:
        """A sample's question, answered from the full cache."""
        tokens = sample.question_ids[None].to(self.target.model.device)
        sampling = replace(self.sampling, seed=self.sampling.seed + sample.draw)
        limits = Limits(sample.max_new_tokens, self.target.end_tokens, self.batch_tokens, sampling)
        answer, full = answer_full(self.target.model, state, tokens, limits)
        return Question(sample, tokens, limits, answer, full)

    def continue_conversation(self, variant: Variant, prompt: Tensor, answer: Tensor) -> None:
        """Note a prompt [1, N] and its answer [T], without the end token that the next turn begins with."""
        if answer[-1:].tolist()[0] in self.target.end_tokens:
            answer = answer[:-1]
        self.conversations[variant.cell] = torch.cat([prompt, answer[None]], dim=1)


class _AnsweredPrompt:
    """A prompt that the full cache has answered, and `rows`, those of its samples so far, the full cache's first.

    Args:
        run: What all prompts share.
        tokens: The prompt [1, N] int64, in the full cache's conversation.
        shared: The prompt's prefill.
        questions: The samples of the prompt, with the full cache's answers.
    """

    def __init__(self, run: _Run, tokens: Tensor, shared: SharedPrompt, questions: Sequence[Question]) -> None:
        self.run = run
        self.tokens = tokens
        self.shared = shared
        self.questions = questions
        self.attention = shared.attention()
        self.ranks = shared.ranks()
        self.conversation_before = run.conversations.get(FULL_CACHE.cell)

        seconds = replace(NO_TIME, prefill=shared.seconds)
        compressed = Compressed(shared.state, seconds, None)
        quality = KeptQuality(recall=1.0, mass=1.0, tau=None)
        self.rows: list[list[ResultRow]] = []
        for question in questions:
            self.rows.append([self._row(question, FULL_CACHE, compressed, question.full, quality)])
        run.continue_conversation(FULL_CACHE, tokens, questions[0].full.ids)

    def fits(self, group: Sequence[Variant]) -> bool:
        """Whether the entries that variants keep of the prompt fit into one batch."""
        length = self.tokens.shape[1]
        entries = sum(min(variant.method.budget_for(length), length) for variant in group)
        return entries <= self.run.batch_tokens

    def answer(self, group: Sequence[Variant]) -> None:
        """Add the rows of variants that are decoded in one batch."""
        compressed = []
        qualities = []
        for variant in group:
            result = self.shared.compress(variant.method)
            compressed.append(result)
            qualities.append(
                KeptQuality(
                    recall=recall(result.kept, self.ranks),
                    mass=attention_mass(result.kept, self.attention),
                    tau=self.shared.tau(variant.method),
                )
            )

        prompts = list(map(self._prompt_of, group))
        rows_of_questions: list[list[ResultRow]] = []
        answers_of_questions: list[list[Answered]] = []
        for question in self.questions:
            answers = self._measured_answers(question, group, compressed)
            self._replace_diverged(question, group, prompts, answers)
            answers_of_questions.append(answers)
            rows = []
            for variant, result, answered, quality in zip(group, compressed, answers, qualities, strict=True):
                rows.append(self._row(question, variant, result, answered, quality))
            rows_of_questions.append(rows)

        samples = [question.sample for question in self.questions]
        for variant, result in zip(group, compressed, strict=True):
            if result.kept is not None:
                self.run.note(samples, variant, result.kept)
        for rows, new_rows in zip(self.rows, rows_of_questions, strict=True):
            rows += new_rows
        for variant, prompt, answered in zip(group, prompts, answers_of_questions[0], strict=True):
            self.run.continue_conversation(variant, prompt, answered.ids)

    def _row(
        self,
        question: Question,
        variant: Variant,
        compressed: Compressed,
        answered: Answered,
        quality: KeptQuality,
    ) -> ResultRow:
        return result_row(
            self.run.target,
            question,
            variant,
            compressed,
            answered,
            quality,
            prompt_tokens=self.tokens.shape[1] + question.tokens.shape[1],
            question_mode=self.run.question,
        )

    def _prompt_of(self, variant: Variant) -> Tensor:
        """The prompt [1, N] with the variant's own conversation in place of the full cache's."""
        conversation = self.run.conversations.get(variant.cell)
        if self.conversation_before is None or conversation is None:
            return self.tokens
        return torch.cat([conversation, self.tokens[:, self.conversation_before.shape[1] :]], dim=1)

    def _measured_answers(
        self, question: Question, group: Sequence[Variant], compressed: Sequence[Compressed]
    ) -> list[Answered]:
        """Each variant's answer, with the likelihood of the full cache's answer.

        Variants that evict while decoding, and states that cannot be joined, answer alone; all others in batches.
        """
        model = self.run.target.model
        answers: dict[int, Answered] = {}
        batched = []
        states = []
        for position, (variant, result) in enumerate(zip(group, compressed, strict=True)):
            if self._answers_alone(variant.method, result.state):
                answers[position] = self._answer_alone(question, variant.method, result.state)
            else:
                batched.append(position)
                states.append(result.state)
        answers_of_batches = answer_all(model, states, question.tokens, question.answer, question.limits)
        answers.update(zip(batched, answers_of_batches, strict=True))
        return [answers[position] for position in sorted(answers)]

    def _replace_diverged(
        self, question: Question, group: Sequence[Variant], prompts: Sequence[Tensor], answers: list[Answered]
    ) -> None:
        """In place, give variants whose conversation went another way the answers to their own prompts."""
        model = self.run.target.model
        batched = []
        states = []
        for position, (variant, prompt) in enumerate(zip(group, prompts, strict=True)):
            if torch.equal(prompt, self.shared.state.tokens):
                continue
            state = variant.method.start(model, prompt)
            if self._answers_alone(variant.method, state):
                ids = self._answer_alone(question, variant.method, state).ids
                answers[position] = replace(answers[position], ids=ids)
            else:
                batched.append(position)
                states.append(state)
        for position, ids in zip(batched, answer_each(model, states, question.limits), strict=True):
            answers[position] = replace(answers[position], ids=ids)

    def _answers_alone(self, method: Method, state: State) -> bool:
        return method.periodic_eviction(self.run.target.model) is not None or not can_join(state)

    def _answer_alone(self, question: Question, method: Method, state: State) -> Answered:
        model = self.run.target.model
        readers = (method.turn_reader(model), method.reader(model))
        eviction = method.periodic_eviction(model)
        return answer_alone(readers, state, question.tokens, question.answer, question.limits, eviction)


# The sweep


@dataclass(frozen=True)
class SampleGroup:
    """Samples that share a prefill, and what their rows depend on.

    Attributes:
        samples: One sample, the turns of a conversation, or under `question=multi` the samples about one context.
        contents: The `sample_digest` of each.
        inputs: For each, the `inputs_digest` of every variant by its cell, the full cache first.
    """

    samples: list[RenderedSample]
    contents: list[str]
    inputs: list[Digests]


def plan(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    question: str = "seen",
    sampling: Sampling = GREEDY,
) -> list[SampleGroup]:
    """What a sweep has to measure: the samples in their groups, and the digest of every row's inputs.

    Under `question=multi` samples that stand one after another and share task, length and context are one group.
    """
    target_text = target_digest(target)
    if sampling.temperature:
        target_text += f"all {sampling}"
    method_texts = {}
    for variant in (FULL_CACHE, *evicting(variants)):
        method_texts[variant.cell] = method_text(variant.method)
    groups = []
    for group in groups_of(samples, question):
        asks = "turns" if group[-1].earlier else question
        contents = list(map(sample_digest, group))
        inputs: list[Digests] = []
        for position in range(len(group)):
            digests = {}
            for cell, text in method_texts.items():
                digests[cell] = inputs_digest(target_text, contents, position, asks, text)
            inputs.append(digests)
        groups.append(SampleGroup(group, contents, inputs))
    return groups


def groups_of(samples: Sequence[RenderedSample], question: str) -> list[list[RenderedSample]]:
    """Samples by prefill: a single sample, the turns of a conversation, or under `multi` samples with one context."""
    groups: list[list[RenderedSample]] = []
    for sample in samples:
        if groups and _shares_prefill(sample, groups[-1][0], question):
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _shares_prefill(sample: RenderedSample, first: RenderedSample, question: str) -> bool:
    """Whether a sample belongs to the group that begins with another."""
    if sample.earlier:
        return True
    same = (sample.task, sample.length, sample.context) == (first.task, first.length, first.context)
    return question == "multi" and same


def sweep(
    target: Target,
    groups: Sequence[SampleGroup],
    variants: Sequence[Variant],
    batch_tokens: int,
    store: RowStore,
    question: str = "seen",
    note: Note = lambda *_: None,
    refused: Refused | None = None,
    sampling: Sampling = GREEDY,
) -> Iterator[list[ResultRow]]:
    """All rows of each sample of which the store does not have all, those that it has among them.

    `groups` are those of `plan` for the same target, variants, question and sampling. A variant in `refused` is left
    out of all later samples. The other arguments are those of `run_samples`. UserError as there, and where every
    variant was refused.
    """
    measure = functools.partial(
        run_samples,
        target,
        batch_tokens=batch_tokens,
        question=question,
        note=note,
        refused=refused,
        sampling=sampling,
    )
    columns = [FULL_CACHE, *evicting(variants)]
    evictions = len(columns) - 1
    for group in groups:
        if refused:
            columns = [variant for variant in columns if variant.cell not in refused]
        inputs = []
        incomplete = []
        for position, sample in enumerate(group.samples):
            inputs.append({variant.cell: group.inputs[position][variant.cell] for variant in columns})
            if not store.has_all(sample.key, inputs[position]):
                incomplete.append(position)
        if not incomplete:
            continue

        stored = store.find(inputs)
        missing = [variant for variant in columns if variant.cell not in stored[0]]
        measured: list[list[ResultRow]] = []
        if missing and FULL_CACHE not in missing:
            measured = measure(group.samples, missing)
        if FULL_CACHE in missing or _full_cache_differs(stored, measured):
            # The other rows compare a method with an answer of the full cache that is not there any more.
            stored = []
            measured = measure(group.samples, columns)

        for position in incomplete:
            by_cell = {row.cell: row for row in measured[position]} if measured else {}
            if stored:
                by_cell.update(stored[position])
            yield _rows_of_sample(group, position, columns, by_cell, question)
        if refused and len(refused) == evictions:
            (name, budget), error = next(iter(refused.items()))
            message = f"{name} at budget {budget}: {error}"
            raise UserError(message, field=error.field, code=error.code)


def _full_cache_differs(stored: Sequence[Mapping[Cell, ResultRow]], measured: Sequence[Sequence[ResultRow]]) -> bool:
    """Whether the full cache answers otherwise than in stored rows, which rounding may cause."""
    for stored_rows, measured_rows in zip(stored, measured, strict=False):  # nothing may have been measured
        if measured_rows[0].answer != stored_rows[FULL_CACHE.cell].answer:
            return True
    return False


def _rows_of_sample(
    group: SampleGroup, position: int, columns: Sequence[Variant], by_cell: Mapping[Cell, ResultRow], question: str
) -> list[ResultRow]:
    """A sample's rows in the order of the variants, under its names and theirs, and with what they depend on."""
    sample = group.samples[position]
    context = group.contents[0] if question == "multi" else None
    rows = []
    for variant in columns:
        row = by_cell.get(variant.cell)
        if row is None:  # the variant was refused
            continue
        rows.append(
            replace(
                row,
                task=sample.task,
                length=sample.length,
                sample=sample.id,
                method=variant.name,
                budget=variant.budget,
                sample_digest=group.contents[position],
                context=context,
                inputs_digest=group.inputs[position][variant.cell],
            )
        )
    return rows
