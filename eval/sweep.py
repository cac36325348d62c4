"""The sweep: every method and budget on every sample, from one prefill per sample.

The prompt is prefilled once, the full cache answers, each observer observes once for all methods and budgets that use
it (`keepsight.eval.compress`), and the answers of all variants come from one batch (`keepsight.eval.answers`). Rows
that an earlier run has measured on the same inputs are used again (`keepsight.eval.reuse`).

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
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

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
from keepsight.eval.compress import Compressed, Seconds, SharedPrompt, attention_mass, needs_of_all, recall, since
from keepsight.eval.results import FULL, Key, Row
from keepsight.eval.reuse import find_rows, inputs_digest, method_text, sample_digest, target_digest
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


Cell = tuple[str, int | float | None]
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


@dataclass(frozen=True)
class Asked:
    """A question [1, q] int64 that is read after the context, and the full cache's answer; empty if the prompt has it.

    `answer` [1, T] int64 is the full cache's under `limits`, and `full` has it with its likelihood.
    """

    sample: RenderedSample
    question: Tensor
    limits: Limits
    answer: Tensor
    full: Answered


def result_row(
    target: Target,
    asked: Asked,
    variant: Variant,
    compressed: Compressed,
    answered: Answered,
    measured: dict[str, float | None],
) -> dict[str, Any]:
    """The row of a variant's answer in `results.jsonl`; `measured` are recall, mass and tau of its kept entries."""
    sample, state = asked.sample, compressed.state
    seconds = asdict(replace(compressed.seconds, question=answered.question))
    text = answer_text(target.tokenizer, answered.ids)
    evicts_again = variant.method.periodic_eviction(target.model) is not None
    appended = [asked.question.shape[1], *[1] * (len(answered.ids) - 1)]
    peak = None if evicts_again else state.copy().kv_peak_bytes(appended)
    row = {
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
        "kept": round(state.mean_entries(), 3),
        "kv_bytes": state.kv_bytes,
        "kv_peak_bytes": peak,
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
    numbers = {name: value for name, value in row.items() if isinstance(value, float)}
    infinite = [name for name in numbers if not math.isfinite(numbers[name]) and not (name == "score" and sample.judge)]
    if infinite:
        dtype = target.model.dtype
        advice = f"logits that are not finite in {dtype}; leave the method out, or choose model.dtype=float32"
        cause = advice if "excess_nll" in infinite else f"{infinite[0]}={row[infinite[0]]}"
        raise UserError(f"sample {sample.task}/{sample.id}: {variant.name} at budget {variant.budget} gives {cause}")
    return row


def _add_earlier_answers(samples: Sequence[RenderedSample], rows: Sequence[list[Row]]) -> None:
    """Add to the rows of later turns what their variants answered in the turns before, as `before`."""
    for sample, earlier, made in zip(samples[1:], rows, rows[1:], strict=False):
        said = {(row["method"], row["budget"]): [*row.get("before", []), row["answer"]] for row in earlier}
        for row in made if sample.earlier else []:
            row["before"] = said[row["method"], row["budget"]]


Note = Callable[[Sequence[RenderedSample], Variant, Tensor], object]
"""Takes samples with one prompt, a variant and [L, K, N] bool, which of the prompt's entries it keeps."""


FULL_CACHE = Variant(FULL, FullCache())


def evicting(variants: Sequence[Variant]) -> list[Variant]:
    """The variants without the full cache, which is always answered from first."""
    return [variant for variant in variants if not variant.method.is_full_cache]


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
            whole = f"{tokens} tokens, with {sample.max_new_tokens} for the answer more than the context of {context}"
            raise UserError(f"sample {sample.task}/{sample.id} has {whole}; lower lengths= or max_tokens=")
        for variant in variants:
            try:
                if sample.pictures and not variant.method.reads_images:
                    raise UserError(f"methods= names {variant.name!r}, which reads no images; {sample.task} has some")
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
) -> list[list[Row]]:
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
    rows = list[list[Row]]()
    for part in [[each] for each in samples] if samples[-1].earlier else [samples]:
        if part[0].earlier:
            whole = torch.cat([run.said[FULL_CACHE.cell][0].cpu(), part[0].question_ids])
            part = [replace(part[0], prompt_ids=whole, question_ids=whole[:0])]
        rows += run.answer_samples(part)
    _add_earlier_answers(samples, rows)
    return rows


@dataclass(frozen=True)
class _Run:
    """The arguments of `run_samples`, and its steps.

    `said` has each variant's conversation so far, [1, M] int64, without the last answer's end token.
    """

    target: Target
    variants: list[Variant]
    batch_tokens: int
    question: str
    note: Note
    refused: Refused | None
    sampling: Sampling
    said: dict[Cell, Tensor] = field(default_factory=dict)

    def answer_samples(self, samples: Sequence[RenderedSample]) -> list[list[Row]]:
        """The rows of samples with one prompt, or of one turn of a conversation, after which `said` has it too."""
        target, said = self.target, self.said
        compared = [each for each in self.variants if not samples[0].earlier or each.cell in said]
        check_samples(target, samples, compared, self.refused)
        compared = [each for each in compared if each.cell not in (self.refused or ())]
        prompt = samples[0].prompt_ids[None].to(target.model.device)
        pictures = samples[0].pictures.inputs() if samples[0].pictures else {}
        images = Images.among({name: each.to(target.model.device) for name, each in pictures.items()})
        needs = needs_of_all([variant.method for variant in compared])
        start = time.perf_counter()
        state = prefill(target.model, prompt, needs=needs, images=images)
        seconds = since(start) - state.seconds
        asked = [self._ask(state, each) for each in samples]
        answers = DraftIds(torch.cat([ids for each in asked for ids in (each.question, each.answer)], dim=1))
        decoding = sum(len(each.full.ids) / (each.full.tokens_per_second or 1.0) for each in asked)
        shared = SharedPrompt(target.model, state, answers, seconds, decoding, images)
        attended = shared.attention(), shared.ranks()
        full = FULL_CACHE, Compressed(state, Seconds(prefill=seconds), None)
        kept = {"recall": 1.0, "mass": 1.0, "tau": None}
        rows = [[result_row(target, each, *full, each.full, kept)] for each in asked]
        before = said.get(FULL_CACHE.cell)
        self._continue(FULL_CACHE, prompt, asked[0].full.ids)
        length = prompt.shape[1]

        def run(group: Sequence[Variant]) -> None:
            own = [_own_prompt(prompt, before, said.get(variant.cell)) for variant in group]
            found = self._answer_group(shared, attended, asked, group, own)
            for made, (of_group, _) in zip(rows, found, strict=True):
                made += of_group
            for variant, whole, ids in zip(group, own, found[0][1], strict=True):
                self._continue(variant, whole, ids)

        def fits(group: Sequence[Variant]) -> bool:
            return sum(min(each.method.budget_for(length), length) for each in group) <= self.batch_tokens

        for group in batches(compared, fits):
            try:
                run(group)
            except UserError:  # of one variant: the others are run without it
                if self.refused is None:
                    raise
                for variant in group:
                    try:
                        run([variant])
                    except UserError as error:
                        self.refused[variant.cell] = error
        for each, made in zip(asked, rows, strict=True):
            more = {"prompt_tokens": length + each.question.shape[1], "question": self.question}
            made[:] = [row | more for row in made]
        return rows

    def _ask(self, state: State, sample: RenderedSample) -> Asked:
        """A sample, answered from the full cache."""
        target, rest = self.target, sample.question_ids[None].to(self.target.model.device)
        limits = Limits(sample.max_new_tokens, target.end_tokens, self.batch_tokens, self.sampling)
        return Asked(sample, rest, limits, *answer_full(target.model, state, rest, limits))

    def _continue(self, variant: Variant, prompt: Tensor, answer: Tensor) -> None:
        """Note a prompt [1, N] and its answer [T], without the end token that the next turn begins with."""
        answer = answer[:-1] if answer[-1:].tolist()[0] in self.target.end_tokens else answer
        self.said[variant.cell] = torch.cat([prompt, answer[None]], dim=1)

    def _answer_group(
        self,
        shared: SharedPrompt,
        attended: tuple[Tensor, Tensor],
        asked: Sequence[Asked],
        group: Sequence[Variant],
        own: Sequence[Tensor],
    ) -> list[tuple[list[Row], list[Tensor]]]:
        """For each question, the rows of variants that are decoded in one batch, and their answers [T] int64.

        `attended` are `attention` and `ranks`, `own` each variant's prompt [1, N] in its own conversation.
        """
        (attention, ranks), methods = attended, [variant.method for variant in group]
        compressed = [shared.compress(method) for method in methods]
        measured = [
            {"recall": recall(one.kept, ranks), "mass": attention_mass(one.kept, attention), "tau": shared.tau(method)}
            for method, one in zip(methods, compressed, strict=True)
        ]
        other = [place for place, prompt in enumerate(own) if not torch.equal(prompt, shared.state.tokens)]
        rows = []
        for each in asked:
            answers = self._answers(each, methods, [one.state for one in compressed])
            of_own = self._own_answers(each, [methods[at] for at in other], [own[at] for at in other])
            for place, ids in zip(other, of_own, strict=True):
                answers[place] = replace(answers[place], ids=ids)
            columns = zip(group, compressed, answers, measured, strict=True)
            made = [result_row(self.target, each, *column) for column in columns]
            rows.append((made, [answered.ids for answered in answers]))
        for variant, state in zip(group, compressed, strict=True):
            if state.kept is not None:
                self.note([each.sample for each in asked], variant, state.kept)
        return rows

    def _answers(self, asked: Asked, methods: Sequence[Method], states: Sequence[State]) -> list[Answered]:
        """Methods that evict while decoding and states that cannot be joined answer alone, all others in batches."""
        alone = [self._alone(asked, *pair) for pair in zip(methods, states, strict=True)]
        rest = [state for state, answered in zip(states, alone, strict=True) if answered is None]
        batched = iter(answer_all(self.target.model, rest, asked.question, asked.answer, asked.limits))
        return [answered or next(batched) for answered in alone]

    def _own_answers(self, asked: Asked, methods: Sequence[Method], prompts: Sequence[Tensor]) -> list[Tensor]:
        """The answers [T] int64 of methods to prompts [1, N] of their own."""
        states = [method.start(self.target.model, prompt) for method, prompt in zip(methods, prompts, strict=True)]
        alone = [self._alone(asked, *pair) for pair in zip(methods, states, strict=True)]
        rest = [state for state, answered in zip(states, alone, strict=True) if answered is None]
        batched = iter(answer_each(self.target.model, rest, asked.limits))
        return [answered.ids if answered else next(batched) for answered in alone]

    def _alone(self, asked: Asked, method: Method, state: State) -> Answered | None:
        """The answer of a method that evicts while decoding, or from a state that cannot be joined; None for others."""
        model, eviction = self.target.model, method.periodic_eviction(self.target.model)
        if eviction is None and can_join(state):
            return None
        readers = method.turn_reader(model), method.reader(model)
        return answer_alone(readers, state, asked.question, asked.answer, asked.limits, eviction)


def _own_prompt(prompt: Tensor, before: Tensor | None, own: Tensor | None) -> Tensor:
    """A turn's prompt [1, N] with the variant's own conversation in place of `before`, the full cache's."""
    return prompt if before is None or own is None else torch.cat([own, prompt[:, before.shape[1] :]], dim=1)


def sweep(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    done: set[Key],
    batch_tokens: int,
    question: str = "seen",
    earlier: Mapping[str, Row] | None = None,
    note: Note = lambda *_: None,
    refused: Refused | None = None,
    sampling: Sampling = GREEDY,
) -> Iterator[list[Row]]:
    """The rows of each sample whose key is not in `done`, with what they depend on as digests.

    Under `question=multi` samples that stand one after another and share task, length and context are one group. Rows
    of `earlier` are used again where they depend on the same inputs; a variant in `refused` is left out of all later
    samples. The other arguments are those of `run_samples`. UserError as there, and where every variant was refused.
    """
    of_target, digest_of = target_digest(target) + (f"all {sampling}" if sampling.temperature else ""), {}
    for variant in (columns := [FULL_CACHE, *evicting(variants)]):
        digest_of[variant.cell] = method_text(variant.method)
    given: dict[str, Any] = {"batch_tokens": batch_tokens, "question": question, "note": note}
    given |= {"refused": refused, "sampling": sampling}
    for group in groups_of(samples, question):
        wanted = [sample.key not in done for sample in group]
        if not any(wanted):
            continue
        contents, asks = [sample_digest(sample) for sample in group], "turns" if group[-1].earlier else question
        inputs = [
            {
                cell: inputs_digest(of_target, contents, place, asks, method)
                for cell, method in digest_of.items()
                if cell not in (refused or ())
            }
            for place in range(len(group))
        ]
        columns = [variant for variant in columns if variant.cell in inputs[0]]
        found = find_rows(earlier or {}, [[*each.values()] for each in inputs])
        rows = _completed(functools.partial(run_samples, target, group, **given), columns, found)
        for sample, content, made, digests, missing in zip(group, contents, rows, inputs, wanted, strict=True):
            names = {"task": sample.task, "length": sample.length, "sample": sample.id, "sample_digest": content}
            names |= {"context": contents[0]} if question == "multi" else {}
            if missing:
                yield [row | names | {"inputs_digest": digests[row["method"], row["budget"]]} for row in made]
        if refused and len(refused) == len(digest_of) - 1:
            (name, budget), error = next(iter(refused.items()))
            raise UserError(f"{name} at budget {budget}: {error}")


def _completed(
    run: Callable[[list[Variant]], list[list[Row]]], columns: list[Variant], found: list[list[Row | None]]
) -> list[list[Row]]:
    """The rows of a group of samples: `found` has rows of earlier runs, and `run` measures the missing variants.

    If the full cache's rows were not found, or its answer now differs by rounding, no row found is comparable.
    """
    missing = [variant for variant, row in zip(columns, found[0], strict=True) if row is None]
    if FULL_CACHE in missing:
        return run(columns)
    made = run(missing) if missing else [[] for _ in found]
    if any(old[0] and new and old[0]["answer"] != new[0]["answer"] for old, new in zip(found, made, strict=True)):
        return run(columns)
    rows = []
    for old, new in zip(found, made, strict=True):
        fresh = {(row["method"], row["budget"]): row for row in new}
        cells = [
            (row or fresh.get(variant.cell), {"method": variant.name, "budget": variant.budget})
            for variant, row in zip(columns, old, strict=True)
        ]
        rows.append([row | cell for row, cell in cells if row])
    return rows


def groups_of(samples: Sequence[RenderedSample], question: str) -> list[list[RenderedSample]]:
    """Samples by prefill: a single sample, the turns of a conversation, or under `multi` samples with one context."""
    groups: list[list[RenderedSample]] = []
    for sample in samples:
        if groups and (sample.earlier or (question == "multi" and _shared_by(sample) == _shared_by(groups[-1][0]))):
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _shared_by(sample: RenderedSample) -> tuple[str, int, str]:
    return sample.task, sample.length, sample.context
