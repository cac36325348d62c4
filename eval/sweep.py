"""The sweep: every method and budget on every sample, from one prefill per sample.

What an earlier run has measured on the same inputs is used again (`keepsight.eval.reuse`); the rest is run, samples
that share a context together (`keepsight.eval.run_samples`).
"""

import functools
from collections.abc import Callable, Iterator, Sequence

from keepsight.eval.results import Key, Row
from keepsight.eval.reuse import NOTHING, Earlier, inputs_digest, method_text, sample_digest, target_digest
from keepsight.eval.rows import Variant
from keepsight.eval.run_samples import FULL_CACHE, Note, evicting, run_samples
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.targets import Target


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
