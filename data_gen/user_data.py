"""Prompts from the user's data: a JSON Lines file, or a data set of the Hugging Face Hub read with `datasets`.

Rows are drawn in a shuffled order, each once before any comes again. Rows that are too long or too short are left out;
a row that cannot be read is a `BadRow` when it is drawn.
"""

import logging
import random
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import HfApi
from pydantic import Field

from keepsight.data_gen.prompts import ASKS, CountTokens, Prompt, Request, cut_at_word, fit, user_prompt
from keepsight.data_gen.store import earlier_settings
from keepsight.errors import BadRow, UserError, one_line
from keepsight.files import Row, file_digest, from_json, text_lines

logger = logging.getLogger("keepsight")

QuestionCount = Annotated[int, Field(ge=0, le=len(ASKS))]
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
_COLUMNS = ("prompt", "messages", "text")
_FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Builders of `datasets` that read plain data; others may run code."""
_BYTES_PER_TOKEN = 32
"""No tokenizer packs more bytes of real text into a token on average; longer texts are not even counted."""
_BUFFER = 1000
"""Rows among which a stream is shuffled; its files are shuffled too."""
_COMMIT = re.compile(r"(.*@)?[0-9a-f]{40}")
_START = re.compile(r"[0-9a-f]{7,39}")  # abbreviated commits; the Hub's files are fetched only by full ones
_SOURCES = 512
"""Number of sources whose counted and shuffled rows are cached; rows of further sources are read each time."""
_UNREACHED = re.compile("couldn't reach|offline mode", re.IGNORECASE)
_TRIES = 10
"""A data set is refused if this many rows are drawn first and all are bad."""


class _OtherTurns(BadRow):
    """A conversation with turns that are not read, such as those of tools."""


@dataclass(frozen=True)
class LocalJsonl:
    """Rows `{"prompt": ...}` or `{"messages": [...]}` of a file: UTF-8 or UTF-16, plain or gzipped.

    Attributes:
        path: The file.
        response_field: The field whose text, where a row has it, is used instead of the model's answer.
        template: Whether the chat template is applied to `prompt` rows; otherwise they are continued as they are.
        shortest: Rows with fewer tokens than this are left out, and those with more than `max_tokens`.
        leave_out: Patterns such as `LICENSED/*`; rows whose `source` matches one are left out.
        ask_itself: Number of questions that the base model writes about the text in `prompt`, a prompt for each;
            responses are ignored. 0 for rows that are prompts already.
        digest: `sha256:...` of the file. `keepsight data` refuses a file that differs, and adds the digest to the
            manifest, so that a resumed run reads the same rows.
    """

    path: str
    response_field: str = "response"
    template: bool = True
    shortest: int = 0
    leave_out: tuple[str, ...] = ()
    ask_itself: QuestionCount = 0
    digest: str = ""

    def __post_init__(self) -> None:
        if not Path(self.path).is_file():
            raise UserError(f"{self.path}: no such file; a mixture's local_jsonl names it")
        if self.ask_itself and not self.template:
            raise UserError(f"{self.path}: ask_itself needs the chat template; leave out template: false")

    def sample(self, request: Request) -> Prompt:
        """The next of the rows shuffled by `request.seed`, or the next question about one of them; see `Source`."""
        return _asked_about(self.ask_itself, request.number, lambda number: self._row(request, number))

    def _row(self, request: Request, number: int) -> Prompt:
        rows = _fitting_rows(self, request.limit, request.count_tokens)
        turn, position = divmod(number, len(rows))
        row = rows[_shuffled(f"{request.seed}:{self.path}:{turn}", len(rows))[position]]
        if isinstance(row, BadRow):
            raise row
        return row

    def rows(self) -> Iterator[Prompt | BadRow]:
        """The prompts of all rows, in the file's order."""
        for number, line in text_lines(Path(self.path)):
            try:
                row = from_json(line, Row)
                if not any(fnmatchcase(str(row.get("source")), pattern) for pattern in self.leave_out):
                    yield self._prompt(row)
            except ValueError as error:
                yield BadRow(f"{self.path}:{number}: {error}")

    def _prompt(self, row: Row) -> Prompt:
        response, source = row.get(self.response_field), str(row.get("source") or Path(self.path).stem)
        if response is not None and not isinstance(response, str):
            raise BadRow(f"{self.response_field} must be a string, got {type(response).__name__}")
        if row.get("messages") is not None:
            if self.ask_itself:
                raise BadRow("ask_itself needs a text in prompt, this row has messages")
            turns = _turns(row["messages"])
            if turns[-1]["role"] != "user":
                raise BadRow(f"messages must end with the user's turn, not with the {turns[-1]['role']}'s")
            return Prompt(source, turns, response)
        if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
            raise BadRow(f"expected a text in prompt, or a list in messages; got the fields {sorted(row)}")
        return replace(user_prompt(source, row["prompt"], template=self.template), response=response)


def _asked_about(questions: int, number: int, row: Callable[[int], Prompt]) -> Prompt:
    """Prompt `number` where the base model writes so many questions about each row; the row itself for 0."""
    if not questions:
        return row(number)
    place, question = divmod(number, questions)
    return replace(row(place), asks=ASKS[question], response=None)


def _turns(value: Any) -> tuple[dict[str, str], ...]:
    """A conversation as `role` and `content`, also from `from` and `value`, and from lists of text parts."""
    if not isinstance(value, list) or not value:
        raise BadRow("messages must be a list of turns that is not empty")
    return tuple({"role": _role(turn), "content": _content(turn)} for turn in value)


def _role(turn: Any) -> str:
    if not isinstance(turn, dict):
        raise BadRow(f"each of messages must be a turn with role and content, got {type(turn).__name__}")
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str) or role not in _ROLES:
        raise _OtherTurns(f"each of messages needs a role ({', '.join(_ROLES)}), got {role!r}")
    return _ROLES[role]


def _content(turn: dict[str, Any]) -> str:
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        texts = [part["text"] for part in content if part.get("type") == "text" and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str):
        cause = "tool calls" if turn.get("tool_calls") else type(content).__name__
        raise _OtherTurns(f"each of messages needs a text in content, the {_role(turn)}'s has {cause}")
    return content


@lru_cache(maxsize=_SOURCES)
def _fitting_rows(source: LocalJsonl, limit: int, count_tokens: CountTokens) -> tuple[Prompt | BadRow, ...]:
    """The rows of at most `limit` tokens and the bad ones; counted once for each `count_tokens` function."""
    every = [*source.rows()]
    rows = [row for row in every if isinstance(row, BadRow) or _fits(source, row, limit, count_tokens)]
    if all(isinstance(row, BadRow) for row in rows):
        raise UserError(rows[0] if rows else _none_fits(source.path, source, limit if every else 0))
    return tuple(rows)


def _none_fits(name: str, source: "LocalJsonl | HubDataset", limit: int) -> str:
    fault = f"no row has {source.shortest} to {limit} tokens; raise the mixture's max_tokens" if limit else "no rows"
    return f"{name}: {fault}"


def _fits(source: "LocalJsonl | HubDataset", prompt: Prompt, limit: int, count_tokens: CountTokens) -> bool:
    text = "\n".join(turn["content"] for turn in prompt.messages)
    too_long = len(text.encode(errors="replace")) > limit * _BYTES_PER_TOKEN
    return not too_long and source.shortest <= count_tokens(text) <= limit


@lru_cache(maxsize=_SOURCES)
def _shuffled(name: str, count: int) -> "array[int]":
    """The numbers below `count`, shuffled with `name` as the seed."""
    order = array("q", range(count))
    random.Random(name).shuffle(order)
    return order


@dataclass(frozen=True)
class HubDataset:
    """Rows of a data set; exactly one of `prompt`, `messages` and `text` names the column of prompts.

    A column inside another is named `outer.inner`. A list of texts is read as paragraphs, each a text or its sentences.

    Attributes:
        id: Hub id of the data set, or a folder with the same files.
        license: Its licence, for the manifest and the model card.
        revision: Commit, tag or branch; `branch@commit`, as in a manifest, means that commit.
        subset: Its configuration; the only one by default.
        split: Its split.
        files: Patterns of the files to read; by default the ones that the data set's card names.
        prompt: Column of texts, each the one turn of a user.
        question: Column of questions, each appended to the text of `prompt`.
        ask: Questions, one of which is appended to each text of `prompt`.
        ask_itself: Number of questions that the base model writes about each text of `prompt`, a prompt for each.
        messages: Column of lists of turns with role and content; rows with turns of other roles are left out.
        text: Column of documents, which are cut at a random point and continued without the chat template.
        response: Column of responses, texts or lists of one, used instead of the model's answers; with the column of
            `messages`, the assistant's turns at the ends of conversations. By default the model answers.
        strip: Texts to remove from a prompt's ends, such as the labels of speakers.
        rows: Streams that many rows, evenly from each of `files`, where the whole is too large; 0 downloads all of it.
        template: Whether the chat template is applied to `prompt`s; otherwise they are continued as they are.
        shortest: Rows with fewer tokens than this are left out, and those with more than `max_tokens`.
    """

    id: str
    license: str
    revision: str = "main"
    subset: str = ""
    split: str = "train"
    files: tuple[str, ...] = ()
    prompt: str = ""
    question: str = ""
    ask: tuple[str, ...] = ()
    ask_itself: QuestionCount = 0
    messages: str = ""
    text: str = ""
    response: str = ""
    strip: tuple[str, ...] = ()
    rows: int = 0
    template: bool = True
    shortest: int = 0

    def __post_init__(self) -> None:
        if sum(bool(getattr(self, name)) for name in _COLUMNS) != 1:
            raise UserError(f"{self.id}: a mixture's hub_dataset names one column, as one of {', '.join(_COLUMNS)}")
        if self.text and self.response:
            raise UserError(f"{self.id}: documents of text are cut and continued, and have no response")
        if (self.question or self.ask) and not self.prompt:
            raise UserError(f"{self.id}: question and ask are appended to the texts of prompt; name their column so")
        if sum(map(bool, (self.question, self.ask, self.ask_itself))) > 1:
            raise UserError(f"{self.id}: give only one of question, ask and ask_itself; each appends questions")
        if self.ask_itself and not (self.prompt and self.template and not self.response):
            raise UserError(f"{self.id}: ask_itself needs texts of prompt, the chat template, and no response")

    @property
    def column(self) -> str:
        """The column of prompts."""
        return self.prompt or self.messages or self.text

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        named = (self.column, self.question, self.response)
        return tuple(dict.fromkeys(name.partition(".")[0] for name in named if name))

    @property
    def name(self) -> str:
        """Name of its prompts in the manifest."""
        return "/".join(part for part in (self.id.rstrip("/").rpartition("/")[2], self.subset) if part)

    def sample(self, request: Request) -> Prompt:
        """The next of the rows that fit, in an order that depends on `request.seed`; see `Source`."""
        rows = _fitting(self, request.limit, request.count_tokens, request.seed)
        prompt = _asked_about(self.ask_itself, request.number, rows.prompt)
        if not self.text:
            return prompt
        document = prompt.messages[0]["content"]
        part = document[: round(request.rng.uniform(0.1, 1) * len(document))]
        text = fit(partial(cut_at_word, part), replace(request, tokens=request.limit))
        return user_prompt(self.name, text, template=False)

    def check(self) -> None:
        """UserError for a data set that cannot be read or is not plain data; only its card is downloaded."""
        _builder(self)

    def row_prompt(self, row: Row) -> Prompt | None:
        """The prompt of a row, None if it has no user turn to answer; BadRow if a column has another type."""
        value = _value(row, self.column)
        if self.messages:
            return self._conversation(value, row)
        value = _text(value)
        for end in self.strip:
            value = value.removeprefix(end).rstrip().removesuffix(end).rstrip()
        if not value.strip():
            return None
        made = user_prompt(self.name, self._with_question(value, row), template=self.template and not self.text)
        return replace(made, response=self._response(row))

    def _with_question(self, value: str, row: Row) -> str:
        if self.question:
            return f"{value}\n\n{_text(_value(row, self.question))}"
        return f"{value}\n\n{random.Random(value).choice(self.ask)}" if self.ask else value

    def _conversation(self, value: Any, row: Row) -> Prompt | None:
        turns, last = list(value) if isinstance(value, list) else value, None
        while isinstance(turns, list) and turns and _role(turns[-1]) == "assistant":
            last = turns.pop()
        read = () if turns == [] else _turns(turns)
        if not read or read[-1]["role"] != "user":
            return None
        if self.response != self.messages:
            return Prompt(self.name, read, self._response(row))
        return Prompt(self.name, read, _content(last)) if last else None

    def _response(self, row: Row) -> str | None:
        value: Any = _value(row, self.response) if self.response else None
        if isinstance(value, list) and len(value) == 1:
            (value,) = value
        if self.response and not isinstance(value, str):
            raise BadRow(f"response {self.response!r}: expected a text, got {type(value).__name__}")
        return None if value is None else str(value)


def _value(row: Row, column: str) -> Any:
    """The value of a column, or of a field inside it; BadRow if the row has none."""
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise BadRow(f"{column!r} has no field {name!r}")
        value = value[name]
    return value


def _text(value: Any) -> str:
    """A text as it is; a list of paragraphs, each a text or a list of sentences, as one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRow(f"expected a text, got {type(value).__name__}")
    paragraphs = [[part] if isinstance(part, str) else part for part in value]
    if not all(isinstance(part, list) and all(isinstance(each, str) for each in part) for part in paragraphs):
        raise BadRow("expected a text or a list of texts, got a list of other values")
    return "\n\n".join(" ".join(each.strip() for each in part) for part in paragraphs)


class _Fitting:
    """The rows of a data set that fit, in a shuffled order; searched only as far as needed."""

    def __init__(self, source: HubDataset, limit: int, count_tokens: CountTokens, seed: int) -> None:
        self._source, self._limit, self._count_tokens = source, limit, count_tokens
        self._rows = _loaded(source)
        self._name = f"{seed}:{source.id}:{source.subset}"
        self._waiting = _shuffled(f"{self._name}:0", len(self._rows))[::-1]
        self._found: list[int] = []
        self._good, self._reason = 0, ""

    def prompt(self, number: int) -> Prompt:
        """Prompt `number`; when all rows were drawn they come again in another order."""
        while len(self._found) <= number and self._waiting:
            self._try(self._waiting.pop())
        if not self._found or (not self._good and (len(self._found) >= _TRIES or not self._waiting)):
            limit = self._limit if len(self._rows) else 0
            raise UserError(self._reason or _none_fits(self._source.id, self._source, limit))
        turn, place = divmod(number, len(self._found))
        place = _shuffled(f"{self._name}:{turn}", len(self._found))[place] if turn else place
        prompt = self._at(self._found[place])
        assert prompt is not None
        return prompt

    def _try(self, row: int) -> None:
        """Note a row that fits, or that is bad; a conversation with other roles is left out."""
        longest = 1 << 60 if self._source.text else self._limit  # a document is cut
        try:
            prompt = self._at(row)
        except BadRow as error:
            self._reason = self._reason or str(error)
            if not isinstance(error, _OtherTurns):
                self._found.append(row)
            return
        if prompt and _fits(self._source, prompt, longest, self._count_tokens):
            self._found.append(row)
            self._good += 1

    def _at(self, row: int) -> Prompt | None:
        try:
            return self._source.row_prompt(self._rows[row])
        except BadRow as error:
            raise type(error)(f"{self._source.id}: row {row}: column {self._source.column!r}: {error}") from None


@lru_cache(maxsize=_SOURCES)
def _fitting(source: HubDataset, limit: int, count_tokens: CountTokens, seed: int) -> _Fitting:
    return _Fitting(source, limit, count_tokens, seed)


def _options(source: HubDataset) -> Row:
    revision = None if Path(source.id).is_dir() else commit_of(source.revision)
    return {"path": source.id, "name": source.subset or None, "revision": revision}


@contextmanager
def _reading(source: HubDataset) -> Iterator[None]:
    """Turn exceptions of `datasets` into a `UserError`."""
    try:
        yield
    except Exception as error:  # from its readers, the Hub's client and the network
        reason = one_line(error.__cause__ or error) or type(error).__name__
        gated = "; accept its terms on the Hub and log in with `hf auth login`" if "gated" in reason.lower() else ""
        away = "; without access to the Hub use rows=DIR or mixture=offline" if _UNREACHED.search(reason) else ""
        raise UserError(f"data set {source.id!r} cannot be read: {reason}{gated}{away}") from None


@lru_cache(maxsize=_SOURCES)
def _builder(source: HubDataset) -> Any:
    """The builder of a data set that is plain data."""
    from datasets import load_dataset_builder  # importing it takes seconds

    with _reading(source):
        builder = load_dataset_builder(**_options(source), data_files=list(source.files) or None)
        kind = type(builder).__module__.split(".")[2]
        if kind not in _FORMATS:
            raise UserError(f"it is read by {kind}, which is none of {', '.join(_FORMATS)}")
        return builder


@lru_cache(maxsize=_SOURCES)
def _loaded(source: HubDataset) -> Any:
    """The rows, in memory-mapped files of the cache of `datasets`; UserError if they cannot be read."""
    from datasets import Dataset

    builder = _builder(source)
    with _reading(source):
        if source.rows:
            options = {**_options(source), "split": source.split, "columns": source.columns, "rows": source.rows}
            options["patterns"] = source.files or (None,)  # a tuple: lists would be divided among processes
            return Dataset.from_generator(_streamed, gen_kwargs=options)
        builder.download_and_prepare()
        rows = builder.as_dataset(split=source.split)
    if missing := [each for each in source.columns if each not in rows.column_names]:
        names = ", ".join(rows.column_names)
        raise UserError(f"data set {source.id!r} has no column {missing[0]!r}; it has {names}")
    return rows.select_columns([*source.columns])


def _streamed(columns: tuple[str, ...], patterns: tuple[str | None, ...], rows: int, **options: Any) -> Iterator[Row]:
    """The first rows of each pattern's files, in a fixed shuffled order."""
    from datasets import load_dataset

    for pattern in patterns:
        stream = load_dataset(**options, data_files=pattern, streaming=True)
        for row in stream.shuffle(seed=0, buffer_size=_BUFFER).take(-(-rows // len(patterns))):
            if missing := [each for each in columns if each not in row]:
                raise ValueError(f"it has no column {missing[0]!r}; it has {', '.join(row)}")
            yield {each: row[each] for each in columns}


def on_rows(sources: list[Any], folder: Path | None) -> list[Any]:
    """A mixture's sources, with data sets of the Hub replaced by the rows in `folder` that their `local` names.

    `local` has the fields of `LocalJsonl`, with `path` in the folder; a data set's weight and lengths stay. UserError
    if there is no such folder, or a data set has no `local`.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"rows={folder}: no such folder; it holds the files that the mixture's `local` entries name")
    return [_on_rows(each, folder) if isinstance(each, dict) else each for each in sources]


def _on_rows(source: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    if source.get("kind") != "hub_dataset":
        return source
    if folder is None:
        return {key: value for key, value in source.items() if key != "local"}
    local = source.get("local")
    if not isinstance(local, dict) or not isinstance(local.get("path"), str):
        raise UserError(f"rows={folder}: {source.get('id')} of the mixture needs `local: {{path: FILE}}`; add it")
    kept = {key: source[key] for key in ("weight", "min_tokens", "max_tokens") if key in source}
    return {"kind": "local_jsonl", **kept, **local, "path": str(folder / local["path"])}


def pinned(mixture: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A mixture with its data pinned: Hub data sets to commits (`main` becomes `main@COMMIT`), local files to digests.

    A run that is resumed in `folder` keeps its commits. If the Hub does not tell the commit, the revision is kept, with
    a warning. UserError if the folder's manifest is damaged, or a file is not the one that its entry or an earlier run
    in `folder` names.
    """
    earlier = earlier_settings(folder)
    before = earlier.mixture["sources"] if earlier else []
    return {**mixture, "sources": [_pinned(source, before) for source in mixture["sources"]]}


def commit_of(revision: str) -> str:
    """The revision to fetch: the commit of `main@COMMIT`, or the revision itself."""
    return revision.rpartition("@")[2] if _COMMIT.fullmatch(revision) else revision


def _pinned(source: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    if source["kind"] == "local_jsonl":
        return _with_digest(source, before)
    revision = source.get("revision", "main")
    if source["kind"] != "hub_dataset" or Path(source["id"]).is_dir() or _COMMIT.fullmatch(revision):
        return source
    known = (each["revision"] for each in before if each.get("id") == source["id"] and "revision" in each)
    same = (each for each in known if each == revision or each.startswith(f"{revision}@"))
    return {**source, "revision": next(same, None) or _asked(source["id"], revision)}


def _with_digest(source: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    path, digest = source["path"], file_digest(Path(source["path"]))
    earlier = next((each for each in before if each.get("path") == path), {"digest": digest})
    if "digest" not in earlier:  # by an earlier version
        return source
    if (expected := source.get("digest") or earlier["digest"]) != digest:
        raise UserError(f"{path}: the file has {digest}, expected {expected}; restore it, or choose another out=")
    return {**source, "digest": digest}


def _asked(name: str, revision: str) -> str:
    api = HfApi()
    try:
        history = api.list_repo_commits(name, repo_type="dataset") if _START.fullmatch(revision) else []
        commits = (each.commit_id for each in history if each.commit_id.startswith(revision))
        commit = next(commits, None) or api.dataset_info(name, revision=revision, timeout=20).sha
    except Exception as error:  # of the Hub, its client and the network; reading the data set says what is missing
        reason = one_line(error, 200)
        logger.warning("data set %s: the commit of %s is unknown, its rows may change (%s)", name, revision, reason)
        return revision
    return f"{revision}@{commit}" if commit else revision
