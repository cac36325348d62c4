"""Prompts from the user's data: a JSON Lines file, or a data set of the Hugging Face Hub read with `datasets`.

Rows are drawn in a shuffled order, each once before any comes again. Rows that are too long or too short are left out;
a row that cannot be read is a `BadRow` when it is drawn.
"""

import logging
import random
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import HfApi
from pydantic import Field

from keepsight.data_gen.prompts import (
    QUESTION_INSTRUCTIONS,
    CountTokens,
    Prompt,
    Request,
    cut_at_word,
    fit_text,
    user_prompt,
)
from keepsight.data_gen.store import earlier_settings
from keepsight.errors import BadRow, UserError, one_line
from keepsight.files import JsonObject, at_home, file_digest, from_json, text_lines

logger = logging.getLogger("keepsight")

QuestionCount = Annotated[int, Field(ge=0, le=len(QUESTION_INSTRUCTIONS))]
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
_COLUMNS = ("prompt", "messages", "text")
_FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Builders of `datasets` that read plain data; others may run code."""
_BYTES_PER_TOKEN = 32
"""No tokenizer packs more bytes of real text into a token on average; longer texts are not even counted."""
_BUFFER = 1000
"""Rows among which a stream is shuffled; its files are shuffled too."""
_COMMIT = re.compile(r"(.*@)?[0-9a-f]{40}")
_START_OF_COMMIT = re.compile(r"[0-9a-f]{7,39}")  # abbreviated commits; the Hub's files are fetched only by full ones
_SOURCES = 512
"""Number of sources whose counted and shuffled rows are cached; rows of further sources are read each time."""
_UNREACHED = re.compile("couldn't reach|offline mode", re.IGNORECASE)
_TRIES = 10
"""A data set is refused if this many rows are drawn first and all are bad."""
_NO_TURNS = "messages must be a list of turns that is not empty"


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
        object.__setattr__(self, "path", at_home(self.path))
        if not Path(self.path).is_file():
            raise UserError(
                f"{self.path}: no such file; a mixture's local_jsonl names it", field="path", code="missing"
            )
        if self.ask_itself and not self.template:
            raise UserError(
                f"{self.path}: ask_itself needs the chat template; leave out template: false",
                field="ask_itself",
                code="conflict",
            )

    def sample(self, request: Request) -> Prompt:
        """The next of the rows shuffled by `request.seed`, or the next question about one of them; see `Source`."""
        number, instruction = _row_and_instruction(request.number, self.ask_itself)
        rows = _fitting_local_rows(self, request.limit, request.count_tokens)
        epoch, position = divmod(number, len(rows))
        order = _shuffled(f"{request.seed}:{self.path}:{epoch}", len(rows))
        row = rows[order[position]]
        if isinstance(row, BadRow):
            raise row
        return _with_instruction(row, instruction)

    def rows(self) -> Iterator[Prompt | BadRow]:
        """The prompts of all rows, in the file's order."""
        for number, line in text_lines(Path(self.path)):
            try:
                row = from_json(line, JsonObject)
                if not self._is_left_out(row):
                    yield self._prompt(row)
            except UserError as error:
                yield BadRow(f"{self.path}:{number}: {error}", field=error.field, code=error.code)

    def _is_left_out(self, row: JsonObject) -> bool:
        source = str(row.get("source"))
        return any(fnmatchcase(source, pattern) for pattern in self.leave_out)

    def _prompt(self, row: JsonObject) -> Prompt:
        source = str(row.get("source") or Path(self.path).stem)
        response = row.get(self.response_field)
        if response is not None and not isinstance(response, str):
            raise BadRow(
                f"{self.response_field} must be a string, got {type(response).__name__}",
                field=self.response_field,
                code="type",
            )

        if row.get("messages") is not None:
            if self.ask_itself:
                raise BadRow(
                    "ask_itself needs a text in prompt, this row has messages", field="ask_itself", code="conflict"
                )
            turns = _turns(row["messages"])
            if turns[-1]["role"] != "user":
                raise BadRow(
                    f"messages must end with the user's turn, not with the {turns[-1]['role']}'s",
                    field="messages",
                    code="data",
                )
            return Prompt(source, turns, response)

        text = row.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise BadRow(
                f"expected a text in prompt, or a list in messages; got the fields {sorted(row)}",
                field="prompt",
                code="missing",
            )
        return replace(user_prompt(source, text, template=self.template), response=response)


def _row_and_instruction(number: int, questions: int) -> tuple[int, str | None]:
    """The row of prompt `number`, and the instruction to write a question where there are `questions` for each row."""
    if not questions:
        return number, None
    row, question = divmod(number, questions)
    return row, QUESTION_INSTRUCTIONS[question]


def _with_instruction(prompt: Prompt, instruction: str | None) -> Prompt:
    """The prompt, whose question the base model writes by the instruction, if there is one."""
    if instruction is None:
        return prompt
    return replace(prompt, question_instruction=instruction, response=None)


def _turns(value: Any) -> tuple[dict[str, str], ...]:
    """A conversation as `role` and `content`, also from `from` and `value`, and from lists of text parts."""
    if not isinstance(value, list) or not value:
        raise BadRow(_NO_TURNS, field="messages", code="type")
    return tuple({"role": _role(turn), "content": _content(turn)} for turn in value)


def _role(turn: Any) -> str:
    if not isinstance(turn, dict):
        raise BadRow(
            f"each of messages must be a turn with role and content, got {type(turn).__name__}",
            field="messages",
            code="type",
        )
    role = turn.get("role") or turn.get("from")
    if not isinstance(role, str) or role not in _ROLES:
        message = f"each of messages needs a role ({', '.join(_ROLES)}), got {role!r}"
        raise _OtherTurns(message, field="role", code="unknown")
    return _ROLES[role]


def _content(turn: dict[str, Any]) -> str:
    content = turn.get("content")
    if content is None:
        content = turn.get("value")
    if isinstance(content, list):
        content = _joined_text_parts(content)
    if not isinstance(content, str):
        cause = "tool calls" if turn.get("tool_calls") else type(content).__name__
        message = f"each of messages needs a text in content, the {_role(turn)}'s has {cause}"
        raise _OtherTurns(message, field="content", code="type")
    return content


def _joined_text_parts(content: list[Any]) -> Any:
    """The text of a list of parts of type `text`; any other list as it is."""
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return content
        texts.append(part["text"])
    return "".join(texts) if texts else content


@lru_cache(maxsize=_SOURCES)
def _fitting_local_rows(source: LocalJsonl, limit: int, count_tokens: CountTokens) -> tuple[Prompt | BadRow, ...]:
    """The rows of at most `limit` tokens and the bad ones; counted once for each `count_tokens` function."""
    bad_rows: list[BadRow] = []
    fitting_rows: list[Prompt | BadRow] = []
    is_empty = True
    for row in source.rows():
        is_empty = False
        if isinstance(row, BadRow):
            bad_rows.append(row)
            fitting_rows.append(row)
        elif _fits(source, row, limit, count_tokens):
            fitting_rows.append(row)

    if len(bad_rows) == len(fitting_rows):
        if bad_rows:
            first = bad_rows[0]
            raise UserError(str(first), field=first.field, code=first.code)
        most_tokens = 0 if is_empty else limit
        raise _none_fits(source.path, source, most_tokens)
    return tuple(fitting_rows)


def _none_fits(name: str, source: "LocalJsonl | HubDataset", limit: int) -> UserError:
    """The error that no row has at most `limit` tokens, or with `limit` 0 that there are none."""
    if not limit:
        return UserError(f"{name}: no rows", field="rows", code="missing")
    message = f"{name}: no row has {source.shortest} to {limit} tokens; raise the mixture's max_tokens"
    return UserError(message, field="max_tokens", code="range")


def _fits(source: "LocalJsonl | HubDataset", prompt: Prompt, limit: int, count_tokens: CountTokens) -> bool:
    text = prompt.text
    if len(text.encode(errors="replace")) > limit * _BYTES_PER_TOKEN:
        return False
    return source.shortest <= count_tokens(text) <= limit


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
        object.__setattr__(self, "id", at_home(self.id))
        named_columns = [name for name in _COLUMNS if getattr(self, name)]
        if len(named_columns) != 1:
            raise UserError(
                f"{self.id}: a mixture's hub_dataset names one column, as one of {', '.join(_COLUMNS)}",
                field="prompt",
                code="missing",
            )
        if self.text and self.response:
            raise UserError(
                f"{self.id}: documents of text are cut and continued, and have no response",
                field="response",
                code="conflict",
            )
        if (self.question or self.ask) and not self.prompt:
            raise UserError(
                f"{self.id}: question and ask are appended to the texts of prompt; name their column so",
                field="question",
                code="conflict",
            )
        ways_to_ask = [bool(self.question), bool(self.ask), bool(self.ask_itself)]
        if sum(ways_to_ask) > 1:
            raise UserError(
                f"{self.id}: give only one of question, ask and ask_itself; each appends questions",
                field="question",
                code="conflict",
            )
        if self.ask_itself and not (self.prompt and self.template and not self.response):
            raise UserError(
                f"{self.id}: ask_itself needs texts of prompt, the chat template, and no response",
                field="ask_itself",
                code="conflict",
            )

    @property
    def column(self) -> str:
        """The column of prompts."""
        return self.prompt or self.messages or self.text

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        columns: dict[str, None] = {}
        for column in (self.column, self.question, self.response):
            if column:
                columns[column.partition(".")[0]] = None
        return tuple(columns)

    @property
    def name(self) -> str:
        """Name of its prompts in the manifest."""
        last_part = self.id.rstrip("/").rpartition("/")[2]
        if last_part and self.subset:
            return f"{last_part}/{self.subset}"
        return last_part or self.subset

    def sample(self, request: Request) -> Prompt:
        """The next of the rows that fit, in an order that depends on `request.seed`; see `Source`."""
        number, instruction = _row_and_instruction(request.number, self.ask_itself)
        rows = _fitting_hub_rows(self, request.limit, request.count_tokens, request.seed)
        prompt = _with_instruction(rows.prompt(number), instruction)
        if not self.text:
            return prompt

        document = prompt.messages[0]["content"]
        beginning = document[: round(request.rng.uniform(0.1, 1) * len(document))]

        def build(characters: int) -> str:
            return cut_at_word(beginning, characters)

        text = fit_text(build, replace(request, tokens=request.limit))
        return user_prompt(self.name, text, template=False)

    def check(self) -> None:
        """UserError for a data set that cannot be read or is not plain data; only its card is downloaded."""
        _builder(self)

    def row_prompt(self, row: JsonObject) -> Prompt | None:
        """The prompt of a row, None if it has no user turn to answer; BadRow if a column has another type."""
        value = _value(row, self.column)
        if self.messages:
            return self._conversation(value, row)
        text = _text(value)
        for label in self.strip:
            text = text.removeprefix(label).rstrip().removesuffix(label).rstrip()
        if not text.strip():
            return None
        has_template = self.template and not self.text
        prompt = user_prompt(self.name, self._with_question(text, row), template=has_template)
        return replace(prompt, response=self._response(row))

    def _with_question(self, text: str, row: JsonObject) -> str:
        if self.question:
            return f"{text}\n\n{_text(_value(row, self.question))}"
        if self.ask:
            return f"{text}\n\n{random.Random(text).choice(self.ask)}"
        return text

    def _conversation(self, value: Any, row: JsonObject) -> Prompt | None:
        """The turns up to the user's last one, with the answer to it if that is the response; None if one lacks."""
        if not isinstance(value, list):
            raise BadRow(_NO_TURNS, field="messages", code="type")
        unread_turns = list(value)
        answer_turn = None
        while unread_turns and _role(unread_turns[-1]) == "assistant":
            answer_turn = unread_turns.pop()
        if not unread_turns:
            return None
        turns = _turns(unread_turns)
        if turns[-1]["role"] != "user":
            return None

        if self.response != self.messages:
            return Prompt(self.name, turns, self._response(row))
        if answer_turn is None:
            return None
        return Prompt(self.name, turns, _content(answer_turn))

    def _response(self, row: JsonObject) -> str | None:
        if not self.response:
            return None
        value = _value(row, self.response)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not isinstance(value, str):
            raise BadRow(
                f"response {self.response!r}: expected a text, got {type(value).__name__}",
                field=str(self.response),
                code="type",
            )
        return value


def _value(row: JsonObject, column: str) -> Any:
    """The value of a column, or of a field inside it; BadRow if the row has none."""
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise BadRow(f"{column!r} has no field {name!r}", field=name, code="missing")
        value = value[name]
    return value


def _text(value: Any) -> str:
    """A text as it is; a list of paragraphs, each a text or a list of sentences, as one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRow(f"expected a text, got {type(value).__name__}", field="text", code="type")
    paragraphs = []
    for paragraph in value:
        texts = [paragraph] if isinstance(paragraph, str) else paragraph
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadRow("expected a text or a list of texts, got a list of other values", field="text", code="type")
        paragraphs.append(" ".join(text.strip() for text in texts))
    return "\n\n".join(paragraphs)


class _FittingHubRows:
    """The rows of a data set that fit, in a shuffled order; searched only as far as needed."""

    def __init__(self, source: HubDataset, limit: int, count_tokens: CountTokens, seed: int) -> None:
        self._source = source
        self._limit = limit
        self._longest = 1 << 60 if source.text else limit  # a document is cut
        self._count_tokens = count_tokens
        self._rows = _loaded(source)
        self._order_name = f"{seed}:{source.id}:{source.subset}"
        self._untried = _shuffled(f"{self._order_name}:0", len(self._rows))[::-1]
        self._drawn: list[int] = []  # rows that fit, and bad ones
        self._good_rows = 0
        self._first_fault: BadRow | None = None

    def prompt(self, number: int) -> Prompt:
        """Prompt `number`; when all rows were drawn they come again in another order."""
        while len(self._drawn) <= number and self._untried:
            self._try(self._untried.pop())
        gives_up = len(self._drawn) >= _TRIES or not self._untried
        if not self._drawn or (not self._good_rows and gives_up):
            limit = self._limit if len(self._rows) else 0
            if self._first_fault is not None:
                first = self._first_fault
                raise UserError(str(first), field=first.field, code=first.code)
            raise _none_fits(self._source.id, self._source, limit)

        epoch, position = divmod(number, len(self._drawn))
        if epoch:
            position = _shuffled(f"{self._order_name}:{epoch}", len(self._drawn))[position]
        prompt = self._read(self._drawn[position])
        assert prompt is not None
        return prompt

    def _try(self, row: int) -> None:
        """Note a row that fits, or that is bad; a conversation with other roles is left out."""
        try:
            prompt = self._read(row)
        except BadRow as error:
            self._first_fault = self._first_fault or error
            if not isinstance(error, _OtherTurns):
                self._drawn.append(row)
            return
        if prompt and _fits(self._source, prompt, self._longest, self._count_tokens):
            self._drawn.append(row)
            self._good_rows += 1

    def _read(self, row: int) -> Prompt | None:
        try:
            return self._source.row_prompt(self._rows[row])
        except BadRow as error:
            raise error.reworded(f"{self._source.id}: row {row}: column {self._source.column!r}: {error}") from None


@lru_cache(maxsize=_SOURCES)
def _fitting_hub_rows(source: HubDataset, limit: int, count_tokens: CountTokens, seed: int) -> _FittingHubRows:
    return _FittingHubRows(source, limit, count_tokens, seed)


def _options(source: HubDataset) -> JsonObject:
    revision = None if Path(source.id).is_dir() else commit_of(source.revision)
    return {"path": source.id, "name": source.subset or None, "revision": revision}


@contextmanager
def _reading(source: HubDataset) -> Iterator[None]:
    """Turn exceptions of `datasets` into a `UserError`."""
    try:
        yield
    except Exception as error:  # from its readers, the Hub's client and the network
        reason = one_line(error.__cause__ or error) or type(error).__name__
        advice = ""
        if "gated" in reason.lower():
            advice += "; accept its terms on the Hub and log in with `hf auth login`"
        if _UNREACHED.search(reason):
            advice += "; without access to the Hub use rows=DIR or mixture=offline"
        raise UserError(
            f"data set {source.id!r} cannot be read: {reason}{advice}", field="id", code="service"
        ) from None


@lru_cache(maxsize=_SOURCES)
def _builder(source: HubDataset) -> Any:
    """The builder of a data set that is plain data."""
    from datasets import load_dataset_builder  # importing it takes seconds

    with _reading(source):
        builder = load_dataset_builder(**_options(source), data_files=list(source.files) or None)
        kind = type(builder).__module__.split(".")[2]
        if kind not in _FORMATS:
            raise UserError(f"it is read by {kind}, which is none of {', '.join(_FORMATS)}", field="id", code="unknown")
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
    for column in source.columns:
        if column not in rows.column_names:
            names = ", ".join(rows.column_names)
            raise UserError(
                f"data set {source.id!r} has no column {column!r}; it has {names}", field=column, code="unknown"
            )
    return rows.select_columns([*source.columns])


def _streamed(
    columns: tuple[str, ...], patterns: tuple[str | None, ...], rows: int, **options: Any
) -> Iterator[JsonObject]:
    """The first rows of each pattern's files, in a fixed shuffled order."""
    from datasets import load_dataset

    for pattern in patterns:
        stream = load_dataset(**options, data_files=pattern, streaming=True)
        rows_per_pattern = -(-rows // len(patterns))
        for row in stream.shuffle(seed=0, buffer_size=_BUFFER).take(rows_per_pattern):
            for column in columns:
                if column not in row:
                    raise ValueError(f"it has no column {column!r}; it has {', '.join(row)}")
            yield {column: row[column] for column in columns}


def use_local_rows(sources: list[Any], folder: Path | None) -> list[Any]:
    """A mixture's sources, with data sets of the Hub replaced by the rows in `folder` that their `local` names.

    `local` has the fields of `LocalJsonl`, with `path` in the folder; a data set's weight and lengths stay. UserError
    if there is no such folder, or a data set has no `local`.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(
            f"rows={folder}: no such folder; it holds the files that the mixture's `local` entries name",
            field="rows",
            code="missing",
        )
    replaced = []
    for source in sources:
        if isinstance(source, dict):
            paths = {key: at_home(source[key]) for key in ("id", "path") if isinstance(source.get(key), str)}
            source = {**source, **paths}
            if source.get("kind") == "hub_dataset":
                source = _local_rows_of(source, folder)
        replaced.append(source)
    return replaced


def _local_rows_of(source: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The source with the local rows of a data set of the Hub; without a folder the data set itself."""
    if folder is None:
        return {key: value for key, value in source.items() if key != "local"}
    local = source.get("local")
    if not isinstance(local, dict) or not isinstance(local.get("path"), str):
        raise UserError(
            f"rows={folder}: {source.get('id')} of the mixture needs `local: {{path: FILE}}`; add it",
            field="local",
            code="missing",
        )
    values: dict[str, Any] = {"kind": "local_jsonl"}
    for key in ("weight", "min_tokens", "max_tokens"):
        if key in source:
            values[key] = source[key]
    return {**values, **local, "path": str(folder / at_home(local["path"]))}


def pin_sources(mixture: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A mixture with its data pinned: Hub data sets to commits (`main` becomes `main@COMMIT`), local files to digests.

    A run that is resumed in `folder` keeps its commits. If the Hub does not tell the commit, the revision is kept, with
    a warning. UserError if the folder's manifest is damaged, or a file is not the one that its entry or an earlier run
    in `folder` names.
    """
    earlier = earlier_settings(folder)
    earlier_sources = earlier.mixture["sources"] if earlier else []
    sources = [_pin(source, earlier_sources) for source in mixture["sources"]]
    return {**mixture, "sources": sources}


def commit_of(revision: str) -> str:
    """The revision to fetch: the commit of `main@COMMIT`, or the revision itself."""
    return revision.rpartition("@")[2] if _COMMIT.fullmatch(revision) else revision


def _pin(source: dict[str, Any], earlier_sources: list[dict[str, Any]]) -> dict[str, Any]:
    if source["kind"] == "local_jsonl":
        return _pin_digest(source, earlier_sources)
    revision = source.get("revision", "main")
    if source["kind"] != "hub_dataset" or Path(source["id"]).is_dir() or _COMMIT.fullmatch(revision):
        return source
    for earlier in earlier_sources:
        earlier_revision = earlier.get("revision", "")
        is_same = earlier_revision == revision or earlier_revision.startswith(f"{revision}@")
        if earlier.get("id") == source["id"] and earlier_revision and is_same:
            return {**source, "revision": earlier_revision}
    return {**source, "revision": _with_commit(source["id"], revision)}


def _pin_digest(source: dict[str, Any], earlier_sources: list[dict[str, Any]]) -> dict[str, Any]:
    path = source["path"]
    digest = file_digest(Path(path))
    expected = digest
    for earlier in earlier_sources:
        if earlier.get("path") == path:
            expected = earlier["digest"]
            break
    expected = source.get("digest") or expected
    if expected != digest:
        raise UserError(
            f"{path}: the file has {digest}, expected {expected}; restore it, or choose another out=",
            field="rows",
            code="file",
        )
    return {**source, "digest": digest}


def _with_commit(dataset_id: str, revision: str) -> str:
    """`REVISION@COMMIT` by the Hub; the revision itself, with a warning, if the Hub does not tell the commit."""
    api = HfApi()
    commit: str | None = None
    try:
        if _START_OF_COMMIT.fullmatch(revision):
            for info in api.list_repo_commits(dataset_id, repo_type="dataset"):
                if info.commit_id.startswith(revision):
                    commit = info.commit_id
                    break
        if commit is None:
            commit = api.dataset_info(dataset_id, revision=revision, timeout=20).sha
    except Exception as error:  # of the Hub, its client and the network; reading the data set says what is missing
        reason = one_line(error, 200)
        logger.warning(
            "data set %s: the commit of %s is unknown, its rows may change (%s)", dataset_id, revision, reason
        )
        return revision
    return f"{revision}@{commit}" if commit else revision
