"""Prompts from data sets of the Hugging Face Hub, read with `datasets`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from keepsight.data_gen.pinned import commit_of
from keepsight.data_gen.prompts import ROLES, CountTokens, Prompt, Request, cut_at_word, fit, length_up_to, raw_prompt
from keepsight.errors import UserError

COLUMNS = ("prompt", "messages", "text")
_BUFFER = 1000
"""Rows among which a stream is shuffled; its files are shuffled too."""


@dataclass(frozen=True)
class HubDataset:
    """Rows of a data set, each drawn once before any comes again; those that do not fit are skipped.

    Exactly one of `prompt`, `messages` and `text` names the column that is read. Given answers are not used: turns of
    the assistant at the end are dropped, earlier ones stay.

    Attributes:
        id: Hub id of the data set, or a folder with the same files.
        license: Its licence, for the manifest and the model card.
        revision: Commit, tag or branch; `branch@commit`, as a manifest says it, is that commit.
        subset: Its configuration; the only one by default.
        split: Its split.
        files: Patterns of the files to read; by default those that the data set's card names.
        prompt: Column of texts, each the one turn of a user.
        messages: Column of lists of turns with role and content.
        text: Column of documents, which are cut at a random point and continued without the chat template.
        strip: What is cut off a prompt's ends, such as the words that separate speakers.
        rows: Streams that many rows, evenly from each of `files`, where the whole is too large; 0 downloads all of it.
        template: Whether the chat template is applied to `prompt`s; otherwise they are continued as they are.
        shortest: Rows with fewer tokens than this are skipped.
    """

    id: str
    license: str
    revision: str = "main"
    subset: str = ""
    split: str = "train"
    files: tuple[str, ...] = ()
    prompt: str = ""
    messages: str = ""
    text: str = ""
    strip: tuple[str, ...] = ()
    rows: int = 0
    template: bool = True
    shortest: int = 0

    def __post_init__(self) -> None:
        if sum(bool(getattr(self, name)) for name in COLUMNS) != 1:
            raise UserError(f"{self.id}: a mixture's hub_dataset names one column, as one of {', '.join(COLUMNS)}")

    @property
    def column(self) -> str:
        """The column that is read."""
        return self.prompt or self.messages or self.text

    @property
    def name(self) -> str:
        """What the manifest calls its prompts."""
        return "/".join(part for part in (self.id.rstrip("/").rpartition("/")[2], self.subset) if part)

    def sample(self, request: Request) -> Prompt:
        """Row `request.number` of those that fit, in an order that depends on `request.seed`; see `Source`."""
        prompt = _fitting(self, request.limit, request.count_tokens, request.seed).prompt(request.number)
        return _cut(prompt, request) if self.text else prompt

    def row_prompt(self, value: Any) -> Prompt | None:
        """The prompt in a row's column; None where there is none, as in a row without a turn of the user.

        Raises:
            UserError: the column holds something else.
        """
        if self.messages:
            return self._conversation(value)
        if not isinstance(value, str):
            raise UserError(f"{self.id}: column {self.column!r} must hold texts, got {type(value).__name__}")
        text = _stripped(value, self.strip)
        if not text.strip():
            return None
        return Prompt(self.name, ({"role": "user", "content": text},), template=self.template and not self.text)

    def _conversation(self, turns: Any) -> Prompt | None:
        if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
            raise UserError(f"{self.id}: column {self.column!r} must hold lists of turns with role and content")
        kept = [{"role": turn["role"], "content": turn.get("content")} for turn in turns]
        while kept and kept[-1]["role"] == "assistant":
            kept.pop()
        plain = all(turn["role"] in ROLES and isinstance(turn["content"], str) for turn in kept)
        return Prompt(self.name, tuple(kept)) if kept and plain and kept[-1]["role"] == "user" else None


class _Fitting:
    """The rows of a data set that fit, in a shuffled order; found only as far as they are asked for."""

    def __init__(self, source: HubDataset, limit: int, count_tokens: CountTokens, seed: int) -> None:
        self._source, self._limit, self._count_tokens, self._seed = source, limit, count_tokens, seed
        self._rows = _loaded(source)
        self._waiting = self._shuffled(len(self._rows), 0)[::-1]
        self._found: list[int] = []

    def prompt(self, number: int) -> Prompt:
        """Prompt `number`; when all rows were drawn they come again in another order."""
        while len(self._found) <= number and self._waiting:
            row = self._waiting.pop()
            if self._fits(self._at(row)):
                self._found.append(row)
        if not self._found:
            source = self._source
            raise UserError(
                f"{source.id}: no row has {source.shortest} to {self._limit} tokens; raise the mixture's max_tokens"
            )
        turn, place = divmod(number, len(self._found))
        place = self._shuffled(len(self._found), turn)[place] if turn else place
        prompt = self._at(self._found[place])
        assert prompt is not None
        return prompt

    def _at(self, row: int) -> Prompt | None:
        return self._source.row_prompt(self._rows[row][self._source.column])

    def _fits(self, prompt: Prompt | None) -> bool:
        if prompt is None:
            return False
        longest = 1 << 60 if self._source.text else self._limit  # a document is cut
        text = "\n".join(turn["content"] for turn in prompt.messages)
        return self._source.shortest <= length_up_to(longest, text, self._count_tokens) <= longest

    def _shuffled(self, count: int, turn: int) -> list[int]:
        order = list(range(count))
        random.Random(f"{self._seed}:{self._source.id}:{self._source.subset}:{turn}").shuffle(order)
        return order


@lru_cache(maxsize=32)
def _fitting(source: HubDataset, limit: int, count_tokens: CountTokens, seed: int) -> _Fitting:
    return _Fitting(source, limit, count_tokens, seed)


def _cut(prompt: Prompt, request: Request) -> Prompt:
    """A document up to a random point, at the latest where it has as many tokens as allowed."""
    document = prompt.messages[0]["content"]
    part = document[: round(request.rng.uniform(0.1, 1) * len(document))]
    wanted = replace(request, tokens=request.limit)
    return raw_prompt(prompt.source, fit(partial(cut_at_word, part), wanted))


def _stripped(text: str, ends: tuple[str, ...]) -> str:
    for end in ends:
        text = text.removeprefix(end).rstrip().removesuffix(end).rstrip()
    return text


@lru_cache(maxsize=32)
def _loaded(source: HubDataset) -> Any:
    """The rows, in memory-mapped files of the cache of `datasets`.

    Raises:
        UserError: the data set cannot be had or has no such configuration, split or column.
    """
    from datasets import Dataset, load_dataset  # takes seconds
    from datasets.exceptions import DatasetsError

    revision = None if Path(source.id).is_dir() else commit_of(source.revision)
    options = {"path": source.id, "name": source.subset or None, "split": source.split, "revision": revision}
    try:
        if source.rows:
            patterns = source.files or (None,)
            given = {**options, "column": source.column, "patterns": patterns, "rows": source.rows}
            return Dataset.from_generator(_streamed, gen_kwargs=given)
        rows = load_dataset(**options, data_files=list(source.files) or None)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        gated = "; accept its terms on the Hub and log in with `hf auth login`" if "gated" in reason.lower() else ""
        raise UserError(f"data set {source.id!r} cannot be read: {reason}{gated}") from None
    if source.column not in rows.column_names:
        raise UserError(
            f"data set {source.id!r} has no column {source.column!r}; it has {', '.join(rows.column_names)}"
        )
    return rows


def _streamed(column: str, patterns: tuple[str | None, ...], rows: int, **options: Any) -> Iterator[dict[str, Any]]:
    """The first rows of each pattern's files, in a shuffled order that is always the same."""
    from datasets import load_dataset

    for pattern in patterns:
        stream = load_dataset(**options, data_files=pattern, streaming=True)
        for row in stream.shuffle(seed=0, buffer_size=_BUFFER).take(-(-rows // len(patterns))):
            if column not in row:
                raise ValueError(f"it has no column {column!r}; it has {', '.join(row)}")
            yield {column: row[column]}
