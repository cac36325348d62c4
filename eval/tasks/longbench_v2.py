"""LongBench v2 (arXiv:2412.15204): questions with four choices, by the length of their context."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.hub import hub_file
from keepsight.eval.tasks.longbench import TEMPLATE_ROOM, without_middle
from keepsight.eval.tasks.rows import fill_in, text_field
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.files import read_json, read_jsonl

_BEFORE = "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
_QUESTION = (
    "What is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    '(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
_FIELDS = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")
_TOKENS = 128


@dataclass
class LongBenchV2(Benchmark):
    """LongBench v2 without chain of thought.

    Attributes:
        file: Its data.json, or a JSONL file of its rows; else the Hub's.
        max_tokens: Longest prompt, from whose middle a longer one loses tokens; 0 for the target's context.
    """

    TASKS: ClassVar[tuple[str, ...]] = ("short", "medium", "long")

    file: str | None = None
    max_tokens: int = 0

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        path = (
            hub_file("THUDM/LongBench-v2", "data.json", "name its data.json: longbench_v2.file=FILE")
            if (self.file is None)
            else Path(self.file)
        )
        limit = self.max_tokens or request.context - _TOKENS - TEMPLATE_ROOM
        rows = [row for row in _rows(path) if row.get("length") == task]
        return [_sample(path, task, row, limit, request.tokenizer) for row in rows[: request.samples or None]]


@lru_cache(maxsize=1)
def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return list(read_jsonl(path))
    rows = read_json(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: expected a list of objects, as in LongBench v2's data.json")
    return rows


def _sample(path: Path, task: str, row: Mapping[str, Any], limit: int, tokenizer: Any) -> RenderedSample:
    where = f"{path}: {row.get('_id')}"
    fields = {name: text_field(where, row, name).strip() for name in _FIELDS}
    question = fill_in(_QUESTION, fields)
    whole = fill_in(_BEFORE, fields) + question
    prompt = without_middle(whole, limit, tokenizer)
    rendered = render(
        Sample(
            id=str(row.get("_id")),
            task=f"longbench_v2_{task}",
            length=limit,
            prompt=prompt,
            question=question if prompt.endswith(question) else "",
            references=(text_field(where, row, "answer"),),
            metric="chosen_letter",
            max_new_tokens=_TOKENS,
        ),
        tokenizer,
    )
    return replace(rendered, is_cut=prompt != whole)
