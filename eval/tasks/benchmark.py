"""Shared by all benchmarks: their interface, the protocols, and readers of files, rows and data sets of the Hub."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from keepsight.errors import UserError
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.files import JsonObject, from_json, package_yaml, regular, text_lines

_HUB_SECONDS = 5.0
"""Timeout of the first request to the Hub; its own client tries for half a minute."""
NO_TEMPLATE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
"""LongBench's few-shot and code tasks, whose prompts its authors do not put through the chat template."""
Make = Callable[[str, JsonObject, int], Any]
"""Makes the sample of a row, or a list of turns, from its place in a file (for messages), its fields and its number."""
_RULER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@dataclass(frozen=True)
class Protocol:
    """The conventions of one repository, as far as they are known to change scores; protocols.yaml has them all.

    Attributes:
        truncate: Whether LongBench prompts that are too long lose their middle; otherwise they are left out.
        limits: Longest LongBench prompt in tokens by part of the model's name; other models use their context length.
        no_template: LongBench tasks that skip the chat template.
        templated: Parts of the names of models whose chat template LongBench's other tasks use; "" for all models.
        always_templated: Parts of the names of models whose chat template all LongBench tasks use.
        left_out: Tasks that the repository's mean leaves out.
        extra_tokens: Added to LongBench's generation lengths.
        cue_after: Whether the end of a LongBench prompt, such as `Answer:`, begins the assistant's turn.
        system: System prompt of LongBench for models whose chat template has none of its own.
        shuffled: Whether a subset of a fixed task's samples is drawn with seed 42 instead of the first ones.
        clean: Post-processing of LongBench's answers, a key of `keepsight.eval.tasks.metrics.CLEAN`.
        ruler_clean: The same for RULER.
        ruler_tokens: Generation lengths of RULER by task family.
        ruler_prefix: Where RULER's answer prefix goes: it begins the answer, ends the prompt, or is left out.
        ruler_template: Whether RULER's prompts use the chat template.
    """

    truncate: bool = True
    limits: Mapping[str, int] = field(default_factory=dict)
    no_template: Collection[str] = NO_TEMPLATE
    templated: Sequence[str] = ("",)
    always_templated: Sequence[str] = ()
    left_out: Collection[str] = ()
    extra_tokens: int = 0
    cue_after: bool = False
    system: str = ""
    shuffled: bool = False
    clean: str = "none"
    ruler_clean: str = "none"
    ruler_tokens: Mapping[str, int] = field(default_factory=lambda: _RULER_TOKENS)
    ruler_prefix: Literal["answer", "prompt", "none"] = "answer"
    ruler_template: bool = True

    def limit_of(self, model: str) -> int | None:
        """Longest LongBench prompt for a model of this name; None for its context length."""
        for name, limit in self.limits.items():
            if name in model.lower():
                return limit
        return None

    def is_chat(self, task: str, model: str) -> bool:
        """Whether a LongBench task uses the chat template of a model of this name."""
        names = list(self.always_templated)
        if task not in self.no_template:
            names += self.templated
        return any(name in model.lower() for name in names)


_TABLE = package_yaml("keepsight.eval.tasks", "protocols")
PROTOCOLS = {name: Protocol(**fields) for name, fields in _TABLE.items()}
REFERENCE = PROTOCOLS["reference"]


def protocol_named(name: str) -> Protocol:
    """A protocol by its name; UserError if there is none."""
    if name not in PROTOCOLS:
        raise UserError(
            f"protocol={name} is unknown; choose one of {', '.join(PROTOCOLS)}", field="protocol", code="unknown"
        )
    return PROTOCOLS[name]


def no_images() -> Any:
    """Raises a UserError, in place of the processor in evaluations that read no images."""
    raise UserError(
        "tasks with images are not possible here; evaluate them with keepsight eval", field="tasks", code="conflict"
    )


@dataclass(frozen=True)
class TaskRequest:
    """Parameters of an evaluation that apply to every task.

    Attributes:
        tokenizer: The base model's.
        context: Context length of the model, in tokens.
        lengths: Lengths of generated prompts in tokens, chat template and answer included.
        samples: Number of samples of a task, at each of its lengths; 0 for all of a fixed one.
        seed: Same seed, same generated samples.
        max_tokens: Longest prompt of `jsonl` samples in tokens; longer ones are left out.
        every_question: Whether every question about a context becomes a sample (`question=multi`).
        protocol: Conventions for prompts, truncation and post-processing.
        judge: `Judge.name` of the judge; empty for none.
        processor: Loads the model's image processor, or raises a UserError.
        skip: Rows at most that cannot be made into samples; None for any number.
        skipped: Filled by the tasks: why each row that was skipped cannot be made into a sample.
        notes: Filled by the tasks: sources of texts and samples left out. Results are shown with them.
    """

    tokenizer: Any
    context: int
    lengths: Sequence[int] = (1024,)
    samples: int = 20
    seed: int = 1000
    max_tokens: int = 2048
    every_question: bool = False
    protocol: Protocol = REFERENCE
    judge: str = ""
    processor: Callable[[], Any] = no_images
    skip: int | None = None
    skipped: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def check_lengths(self) -> None:
        """UserError for lengths of generated prompts beyond the context, which would be generated for hours."""
        longest = max(self.lengths, default=0)
        if longest > self.context:
            raise UserError(
                f"lengths={longest} is more than the context of {self.context} tokens; lower lengths=",
                field="lengths",
                code="range",
            )

    def collect(
        self,
        name: str,
        rows: Iterable[tuple[str, JsonObject]],
        make: Make,
        max_tokens: int | None = None,
        render: Callable[[Any, Any], RenderedSample] | None = None,
    ) -> list[RenderedSample]:
        """The samples of the first `self.samples` rows (0: of all) that fit; equal ids of a task are numbered.

        Invalid rows are skipped, and rows that are too long are left out; notes about `name` count both. `max_tokens`
        is the longest prompt in tokens; None for prompts that, with their answers, fit the context. UserError: all rows
        are bad, or more than `self.skip` of this evaluation.
        """
        samples: list[RenderedSample] = []
        faults: list[UserError] = []
        rows_read = 0
        rows_too_long = 0
        ids: dict[str, dict[str, int]] = {}
        for number, (where, row) in enumerate(rows):
            try:
                turns = self._turns(make(where, row, number), render)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                faults.append(_fault(where, error))
                self.skipped.append(str(faults[-1]))
                if self.skip is not None and len(self.skipped) > self.skip:
                    raise faults[-1].reworded(f"{faults[-1]}; fix the row, or raise skip={self.skip}") from None
                continue
            if self._is_too_long(turns, max_tokens):
                rows_too_long += 1
                continue
            for sample in turns:
                ids_of_task = ids.setdefault(sample.task, {})
                samples.append(replace(sample, id=_numbered(sample.id, ids_of_task)))
            rows_read += 1
            if rows_read == self.samples:
                break

        if faults and not samples and not rows_too_long:
            raise faults[0]
        notes = []
        if rows_too_long:
            limit = f"the context of {self.context} tokens" if max_tokens is None else f"max_tokens={max_tokens}"
            notes.append(f"{rows_too_long} samples do not fit {limit}")
        if faults:
            notes.append(f"{len(faults)} rows were skipped, such as {faults[0]}")
        if notes:
            self.notes[name] = "; ".join(notes)
        return samples

    def _turns(self, result: Any, render: Callable[[Any, Any], RenderedSample] | None) -> list[RenderedSample]:
        """The rendered samples of what a row was made into: a list of turns, or a sample."""
        if isinstance(result, list):
            return result
        return [result if render is None else render(result, self.tokenizer)]

    def _is_too_long(self, turns: Sequence[RenderedSample], max_tokens: int | None) -> bool:
        """Whether a prompt, or a conversation from its first prompt on, is too long; without a limit, answers count."""
        tokens = len(turns[0].prompt_ids)
        for turn in turns:
            tokens += len(turn.question_ids)
            if max_tokens is None:
                tokens += turn.max_new_tokens
        return tokens > (max_tokens or self.context)


def _fault(where: str, error: Exception) -> UserError:
    """Why a row cannot be made into a sample, with its place."""
    if isinstance(error, UserError):
        fault = error
    else:
        fault = UserError(f"not in the benchmark's own layout ({error!r:.100})", field="row", code="data")
    message = str(fault)
    if where not in message:
        message = f"{where}: {message}"
    return UserError(" ".join(message.split()), field=fault.field, code=fault.code)


def _numbered(name: str, counts: dict[str, int]) -> str:
    """The name, with the first free number where it is in `counts` already."""
    numbered = name
    while numbered in counts:
        counts[name] += 1
        numbered = f"{name}-{counts[name]}"
    counts[numbered] = 1
    return numbered


@dataclass
class Benchmark(ABC):
    """Several tasks under one name, such as `ruler` with `ruler_vt`; its fields are the command's keys `ruler.KEY`."""

    TASKS: ClassVar[tuple[str, ...]] = ("",)
    """Names of the tasks without the benchmark's; an empty one for a benchmark that is one task."""

    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        """Tasks by the name that stands for them; the empty name is the benchmark's own."""
        return {"": self.TASKS}

    def require(self, task: str, judge: str) -> None:
        """UserError for a task of `TASKS` whose files or judge are missing, before a model is loaded."""

    @abstractmethod
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        """The samples of one task, by its name in `TASKS`."""


def file_rows(path: Path, missing: str = "name an existing file") -> Iterator[tuple[str, JsonObject]]:
    """The rows of a JSON Lines file, UTF-8 or UTF-16, plain or gzipped; each with its place (`FILE:LINE`) for messages.

    UserError with the advice `missing` if there is no such file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; {missing}", field=path.name, code="missing")
    return json_rows(str(path), text_lines(path))


def json_rows(source: str, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[str, JsonObject]]:
    """The objects in numbered lines, each with its place; `source` names the file.

    A line that is no JSON object is an empty row, from which no sample can be made; its place says why.
    """
    for number, line in lines:
        try:
            yield f"{source}:{number}", from_json(line, JsonObject)
        except ValueError as error:
            yield f"{source}:{number}: {error}", {}


def rows_of_task(
    rows: Iterable[tuple[str, JsonObject]], task: str, field: str = "task"
) -> list[tuple[str, JsonObject]]:
    """The rows whose `field` names a task; those without it are in every task, where what they lack is said."""
    rows_here = []
    for where, row in rows:
        if row.get(field, task) == task:
            rows_here.append((where, row))
    return rows_here


def text_field(where: str, row: Mapping[str, Any], name: str) -> str:
    """A field of a row that holds a text, else UserError; `where` names the row."""
    if not isinstance(row.get(name), str):
        raise UserError(f"{where}: field {name!r} must be a text, {_got(row, name)}", field=name, code="type")
    return row[name]


def texts_field(where: str, row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A field of a row that holds a list of at least one text, else UserError; `where` names the row."""
    value = row.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise UserError(
            f"{where}: field {name!r} must be a list of texts that is not empty, {_got(row, name)}",
            field=name,
            code="type",
        )
    return tuple(value)


def _got(row: Mapping[str, Any], name: str) -> str:
    return f"got {str(row[name])[:60]!r}" if name in row else "but it is missing"


def fill_in(template: str, fields: Mapping[str, str]) -> str:
    """The template with its fields, in one pass: braces inside a field's text stay, no attribute is looked up."""
    return re.sub("{(" + "|".join(fields) + ")}", lambda match: fields[match[1]], template)


def ruler_family(task: str) -> str:
    """The family of a RULER task: `niah` of `niah_single_1`."""
    return task.split("_")[0]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; UserError if it cannot be read, or is empty."""
    try:
        text = regular(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read as UTF-8 text ({error}); name a text file", field=path.name, code="file"
        ) from None
    if not text.strip():
        raise UserError(
            f"{path}: the file is empty; name a file with at least some sentences", field=path.name, code="range"
        )
    return text


@lru_cache(maxsize=1)
def hub_reachable() -> bool:
    """Whether the Hub answers; also true where `HF_HUB_OFFLINE` says to use the local cache alone."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return True
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:  # the exception types differ between versions of the client
        return False
    return True


def hub_rows(name: str, split: str, configuration: str | None = None) -> list[dict[str, Any]] | None:
    """The rows of a data set; None where it is neither in the cache nor can be downloaded."""
    if not hub_reachable():
        return None
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset(name, configuration, split=split)]
    except (OSError, ValueError):  # ValueError: not in the cache of an offline machine
        return None


def hub_file(name: str, file: str, instead: str) -> Path:
    """A file of a data set `user/name`, downloaded once; else a UserError with the advice `instead`."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, file, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    if not hub_reachable():
        raise UserError(f"{name}/{file}: the Hub cannot be reached; {instead}", field=file, code="service")
    try:
        return Path(hf_hub_download(name, file, repo_type="dataset"))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name}/{file} cannot be downloaded ({reason}); {instead}", field=file, code="service"
        ) from None
