"""Prompts from a JSON Lines file of the user's."""

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from keepsight.data_gen.prompts import ROLES, CountTokens, Prompt, Request, length_up_to
from keepsight.errors import UserError
from keepsight.files import read_jsonl


@dataclass(frozen=True)
class LocalJsonl:
    """Rows `{"prompt": ...}` or `{"messages": [...]}`, each drawn once before any comes again.

    Rows are used as they are; those longer than `max_tokens` are skipped.

    Attributes:
        path: The file.
        response_field: The field whose text, where a row has it, is used instead of the target's answer.
        include: Keep only rows whose `source` is one of these or begins with one of these; all when empty.
        exclude: Drop rows whose `source` is one of these or begins with one of these.
        template: Whether the chat template is applied to `prompt` rows; otherwise they are continued as they are.
        shortest: Rows with fewer tokens than this are skipped.
    """

    path: str
    response_field: str = "response"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    template: bool = True
    shortest: int = 0

    def __post_init__(self) -> None:
        if not Path(self.path).is_file():
            raise UserError(f"{self.path}: no such file; a mixture's local_jsonl names its rows with path")

    def sample(self, request: Request) -> Prompt:
        """Row `request.number` of a shuffling by `request.seed`; see `Source`."""
        rows = _fitting(self, request.limit, request.count_tokens)
        turn, position = divmod(request.number, len(rows))
        order = list(range(len(rows)))
        random.Random(f"{request.seed}:{self.path}:{turn}").shuffle(order)
        return rows[order[position]]

    def prompts(self) -> tuple[Prompt, ...]:
        """All rows that `include` and `exclude` leave, in the file's order.

        Raises:
            UserError: a row is malformed.
        """
        rows = enumerate(read_jsonl(Path(self.path)), start=1)
        return tuple(self._prompt(row, number) for number, row in rows if self._chosen(str(row.get("source", ""))))

    def _chosen(self, source: str) -> bool:
        included = not self.include or source.startswith(self.include)
        return included and not (self.exclude and source.startswith(self.exclude))

    def _prompt(self, row: dict[str, Any], number: int) -> Prompt:
        where = f"{self.path}: row {number}"
        response = row.get(self.response_field)
        if response is not None and not isinstance(response, str):
            raise UserError(f"{where}: {self.response_field} must be a string, got {type(response).__name__}")
        source = str(row.get("source") or Path(self.path).stem)
        if "messages" in row:
            return Prompt(source, _messages(row["messages"], where), response)
        if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
            raise UserError(f"{where}: expected a text in prompt, or a list in messages; got the fields {sorted(row)}")
        return Prompt(source, ({"role": "user", "content": row["prompt"]},), response, template=self.template)


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: messages must be a list of turns that is not empty")
    for turn in value:
        if not isinstance(turn, dict) or turn.get("role") not in ROLES or not isinstance(turn.get("content"), str):
            raise UserError(f"{where}: each of messages needs a role ({', '.join(ROLES)}) and a text in content")
    if value[-1]["role"] != "user":
        raise UserError(f"{where}: messages must end with the user's turn, not with the {value[-1]['role']}'s")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)


@lru_cache(maxsize=16)
def _fitting(source: LocalJsonl, limit: int, count_tokens: CountTokens) -> tuple[Prompt, ...]:
    """The rows of at most `limit` tokens; counted once for each `count_tokens` function."""
    fitting = tuple(row for row in source.prompts() if source.shortest <= _length(row, limit, count_tokens) <= limit)
    if not fitting:
        raise UserError(
            f"{source.path}: no row has {source.shortest} to {limit} tokens; raise the mixture's max_tokens"
        )
    return fitting


def _length(row: Prompt, limit: int, count_tokens: CountTokens) -> int:
    text = "\n".join(turn["content"] for turn in row.messages)
    return length_up_to(limit, text, count_tokens)
