"""The record of an evaluation: `ResultRow`, one method's answer to one sample, and `RowStore`, the rows of a folder.

`results.jsonl` has a row a line. Every row has the digest of what it depends on (`keepsight.eval.inputs`), and by these
digests the store decides what is measured: a row is used again where its inputs are the same, whether the command is
resumed, extended, or takes rows of other folders (`reuse=`), and is measured again where they have changed.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from keepsight.errors import UserError
from keepsight.files import append_lines, at_home, read_jsonl, whole_lines, write_lines

FULL = "full"
"""The full cache in the `method` column."""
Key = tuple[str, int, str]
"""Task, length and id of a sample."""
Cell = tuple[str, int | float | None]
"""Name and budget of a variant, as rows have them."""
Digests = Mapping[Cell, str | None]
"""For each variant of a sample, the digest of what its row depends on; None where that has no digest."""

Digest = Annotated[str, Field(pattern=r"\Asha256:[0-9a-f]{64}\z")]
Count = Annotated[int, Field(ge=0, le=2**53)]

RESULTS = "results.jsonl"
_PARTS = "results-*.jsonl"
_ONLY_WHERE_SET = ("before", "context", "judgments")
"""Columns that `results.jsonl` has only in the rows that have a value for them."""
_CELLS_SHOWN = 3


@dataclass(frozen=True)
class Phases:
    """Seconds before a method's first token, by phase. Shared steps are timed once and shown for each method.

    Attributes:
        prefill: The model's pass over the prompt; everything, for a method that reads the prompt in its own way.
        draft: Generating a draft, or choosing the tokens of a shorter prompt.
        observe: The observer's pass, LAQ's draft included.
        select: Reduction, pooling, allocation and gathering.
        question: Prefill of a question after the compression, in one batch with other variants.
    """

    prefill: FiniteFloat
    draft: FiniteFloat
    observe: FiniteFloat
    select: FiniteFloat
    question: FiniteFloat

    @property
    def total(self) -> float:
        """The time to the first token."""
        return self.prefill + self.draft + self.observe + self.select + self.question


NO_TIME = Phases(prefill=0.0, draft=0.0, observe=0.0, select=0.0, question=0.0)


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One variant's answer to one sample: a line of `results.jsonl`.

    Attributes:
        task: The sample's task.
        length: The prompt length in tokens that was asked for.
        sample: The sample's id.
        depth: Position of the needle in the context, 0 the beginning and 1 the end; None where there is no needle.
        method: Name of the variant.
        budget: Entries per layer and KV head, or a share of the prompt; None for the full cache.
        score: The task's metric, 0 to 1; NaN until a judge has scored the answer.
        excess_nll: Mean negative log-likelihood of the full cache's answer, minus the full cache's, in nats per token.
        agreement: Share of that answer's tokens that are the arg-max.
        recall, mass, tau: How well the kept entries match the answer's attention; None where they are not known.
        first_difference: Index of the first token that differs from the full cache's answer; None where none does.
        kept: Mean number of entries per layer and KV head.
        kv_bytes: Bytes of the cache after the compression.
        kv_peak_bytes: Most bytes of the cache while it answers; None where the method evicts while decoding.
        seconds: Seconds before the first token, by phase.
        time_to_first_token: Their sum.
        tokens_per_second: What the whole batch of `rows` answers decoded, each from where it leaves the full cache's;
            None where nothing was left to decode.
        rows: Number of answers in the batch.
        answer: The answer's text.
        answer_tokens: Its number of tokens.
        references: Accepted answers.
        asks: The question, or the end of the prompt where the question is not separate.
        date: Day of the measurement, as in 2026-11-29.
        prompt_tokens: Tokens of the prompt, question included.
        question: What the method has seen while compressing: `seen`, `unseen` or `multi`.
        sample_digest: Digest of the sample's prompt and scoring.
        context: With `question=multi`, the `sample_digest` of the first sample about the same context.
        inputs_digest: Digest of everything that the row depends on; None where the method has none.
        before: In a conversation, the variant's answers to the earlier turns.
        judgments: The judge's words.
    """

    task: str
    length: Count
    sample: str
    depth: FiniteFloat | None
    method: str
    budget: Count | FiniteFloat | None
    score: FiniteFloat
    excess_nll: FiniteFloat
    agreement: FiniteFloat
    recall: FiniteFloat | None
    mass: FiniteFloat | None
    tau: FiniteFloat | None
    first_difference: Count | None
    kept: FiniteFloat
    kv_bytes: FiniteFloat
    kv_peak_bytes: FiniteFloat | None
    seconds: Phases
    time_to_first_token: FiniteFloat
    tokens_per_second: FiniteFloat | None
    rows: Count
    answer: str
    answer_tokens: Count
    references: list[str]
    asks: str
    date: str
    prompt_tokens: Count
    question: str
    sample_digest: Digest | None = None
    context: Digest | None = None
    inputs_digest: Digest | None = None
    before: list[str] | None = None
    judgments: list[str] | None = None

    @property
    def key(self) -> Key:
        """The sample that the row is about."""
        return self.task, self.length, self.sample

    @property
    def cell(self) -> Cell:
        """The variant that the row is about."""
        return self.method, self.budget

    def columns(self) -> dict[str, Any]:
        """The columns as a line of `results.jsonl` has them."""
        columns = asdict(self)
        for name in _ONLY_WHERE_SET:
            if columns[name] is None:
                del columns[name]
        return columns


class RowStore:
    """The rows of an evaluation's folder by sample and variant, and all rows that may be used again by their inputs.

    Each of several processes appends to a file of its own, `results-0.jsonl`, `results-1.jsonl`, ...; `merge` moves
    their rows into `results.jsonl`. A store without a folder is empty, and keeps nothing.
    """

    def __init__(
        self, folder: Path | None = None, process: int = 0, processes: int = 1, reused: Iterable[ResultRow] = ()
    ) -> None:
        """`reused` are rows of other folders, see `rows_to_reuse`; the folder's own take precedence."""
        self._folder = folder
        self._file = f"results-{process}.jsonl" if processes > 1 else RESULTS
        self._rows: dict[tuple[Key, Cell], ResultRow] = {}
        self._by_inputs: dict[str, ResultRow] = {}
        for row in reused:
            self._use(row)
        if folder is not None:
            self._hold(whole_lines(folder / RESULTS, ResultRow))

    def _hold(self, rows: Iterable[ResultRow]) -> None:
        for row in rows:
            self._rows[row.key, row.cell] = row
            self._use(row)

    def _use(self, row: ResultRow) -> None:
        """Let a row answer for every sample and variant with the same inputs."""
        if row.inputs_digest is not None:
            self._by_inputs[row.inputs_digest] = row

    def has_all(self, sample: Key, inputs: Digests) -> bool:
        """Whether the folder has a sample's rows of all these variants, measured on these inputs."""
        for cell, digest in inputs.items():
            row = self._rows.get((sample, cell))
            if row is None or row.inputs_digest != digest:
                return False
        return True

    def find(self, inputs_of_group: Sequence[Digests]) -> list[dict[Cell, ResultRow]]:
        """The rows of samples that share a prefill, by sample and variant.

        A variant of which one of the samples has no row is left out for all: it has to be measured on all of them.
        """
        rows_of_samples: list[dict[Cell, ResultRow]] = []
        for inputs in inputs_of_group:
            rows = {}
            for cell, digest in inputs.items():
                if digest in self._by_inputs:
                    rows[cell] = self._by_inputs[digest]
            rows_of_samples.append(rows)
        in_all = set.intersection(*map(set, rows_of_samples))
        for rows in rows_of_samples:
            for cell in rows.keys() - in_all:
                del rows[cell]
        return rows_of_samples

    def drop_changed(self, planned: Mapping[Key, Digests]) -> list[ResultRow]:
        """Remove from the folder the rows whose inputs are not what is planned now, and return them."""
        changed = []
        for (sample, cell), row in self._rows.items():
            inputs = planned.get(sample, {})
            if cell in inputs and inputs[cell] != row.inputs_digest:
                changed.append(row)
        for row in changed:
            del self._rows[row.key, row.cell]
        if changed and self._folder is not None:
            write_lines(self._folder / RESULTS, map(ResultRow.columns, self._rows.values()))
        return changed

    def add(self, rows: Sequence[ResultRow]) -> None:
        """Append the rows of a sample to this process's file, and hold them."""
        self._hold(rows)
        if self._folder is not None:
            append_lines(self._folder / self._file, list(map(ResultRow.columns, rows)))


def rows_to_reuse(folders: Iterable[str | Path]) -> list[ResultRow]:
    """The rows of other evaluations' folders; UserError for a folder without results."""
    rows: list[ResultRow] = []
    for folder in folders:
        path = Path(at_home(folder)) / RESULTS
        if not path.is_file():
            raise UserError(
                f"reuse={folder}: no {RESULTS} there; name folders that keepsight eval has written",
                field="reuse",
                code="missing",
            )
        rows += read_jsonl(path, ResultRow)
    return rows


def merge(folder: Path) -> None:
    """Move the rows of all processes, of this run and earlier ones, into `results.jsonl`, a sample's side by side."""
    results = folder / RESULTS
    parts = sorted(folder.glob(_PARTS))
    written = whole_lines(results, ResultRow)
    for part in parts:
        written += whole_lines(part, ResultRow)
    rows = latest_rows(written)
    if parts or rows != written:
        write_lines(results, map(ResultRow.columns, rows))
    for part in parts:
        part.unlink()


def rows_so_far(folder: Path) -> list[ResultRow]:
    """The rows of a folder and of all processes' files in it, as they lie there, without lines that a kill has torn."""
    rows: list[ResultRow] = []
    for path in (folder / RESULTS, *sorted(folder.glob(_PARTS))):
        if path.is_file():
            rows += read_jsonl(path, ResultRow, skip_torn=True)
    return latest_rows(rows)


def latest_rows(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """One row for each sample and variant, the last, in the order of the samples.

    A sample has several where it was done again, after a kill or with more variants.
    """
    by_sample: dict[Key, dict[Cell, ResultRow]] = {}
    for row in rows:
        rows_of_sample = by_sample.setdefault(row.key, {})
        rows_of_sample.pop(row.cell, None)  # so that the rows stand in the order in which they came last
        rows_of_sample[row.cell] = row
    latest: list[ResultRow] = []
    for rows_of_sample in by_sample.values():
        latest += rows_of_sample.values()
    return latest


def cells_text(rows: Collection[ResultRow]) -> str:
    """The rows' variants and how many rows each has, such as `snapkv at budget 64 (3 rows)`; of many only some."""
    texts = []
    counts = Counter(row.cell for row in rows)
    for (method, budget), count in list(counts.items())[:_CELLS_SHOWN]:
        name = method if budget is None else f"{method} at budget {budget}"
        noun = "row" if count == 1 else "rows"
        texts.append(f"{name} ({count} {noun})")
    others = len(counts) - len(texts)
    if others > 0:
        texts.append(f"{others} more")
    return ", ".join(texts)
