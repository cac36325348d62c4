"""LongBench and LongBench-E (arXiv:2308.14508) by name, from the Hub or from a folder in LongBench's own layout."""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.hub import hub_file
from keepsight.eval.tasks.longbench_table import LongBenchTask, longbench_tasks
from keepsight.eval.tasks.metrics import METRICS
from keepsight.eval.tasks.protocols import Protocol
from keepsight.eval.tasks.rows import fill_in, text_field, texts_field
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.files import read_jsonl

_ENGLISH, _CHINESE = tuple(longbench_tasks())[:16], tuple(longbench_tasks())[16:]
_NOT_IN_E = {"narrativeqa", "musique", "qmsum"}
_BY_LENGTH = tuple(f"e_{task}" for task in _ENGLISH if task not in _NOT_IN_E)
TEMPLATE_ROOM = 64
"""Tokens that a chat template may add to a prompt."""


@dataclass
class LongBench(Benchmark):
    """LongBench: the 16 English tasks; longbench_zh the Chinese ones, longbench_e those of LongBench-E.

    Attributes:
        dir: Folder with LongBench's own files, qasper.jsonl or for LongBench-E qasper_e.jsonl; else the Hub's.
        max_tokens: Longest prompt, from whose middle a longer one loses tokens; 0 for the target's context.
    """

    TASKS: ClassVar[tuple[str, ...]] = (*_ENGLISH, *_CHINESE, *_BY_LENGTH)

    dir: str | None = None
    max_tokens: int = 0

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        all_groups = {"": _ENGLISH, "zh": _CHINESE, "e": _BY_LENGTH}
        return {
            name: [task for task in tasks if task not in protocol.left_out and self._is_there(task)]
            for name, tasks in all_groups.items()
        }

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        name = task.removeprefix("e_")
        entry = longbench_tasks()[name]
        if entry.metric.endswith("_zh"):
            METRICS[entry.metric]("", Sample("", task, 0, "", ("",), entry.metric, 1))  # misses its package here
        made, left_out, rows = [], 0, self._rows(task)
        if request.protocol.shuffled:  # as datasets' shuffle(seed=42)
            all_rows = [*rows]
            rows = (all_rows[place] for place in np.random.default_rng(42).permutation(len(all_rows)))
        for place, (where, row) in enumerate(rows):
            if place == request.samples > 0:
                break
            sample = self._sample(name, entry, where, row, place, request)
            if task != name:
                sample = replace(sample, task=f"longbench_{task}", length=_words_bucket(row))
            if len(sample.prompt_ids) + sample.max_new_tokens <= request.context:
                made.append(sample)
            else:
                left_out += 1
        if left_out:
            request.notes[f"longbench {task}"] = (
                f"{left_out} samples do not fit the context of {request.context} tokens"
            )
        return made

    def _is_there(self, task: str) -> bool:
        return self.dir is None or self._file(task).is_file()

    def _file(self, task: str) -> Path:
        assert self.dir is not None
        return Path(self.dir) / _file_name(task)

    def _rows(self, task: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Where a row stands, and the row."""
        if self.dir is not None:
            path = self._file(task)
            if not path.is_file():
                raise UserError(f"longbench.dir: {path} is missing; without longbench.dir it is taken from the Hub")
            yield from ((f"{path}:{number}", row) for number, row in enumerate(read_jsonl(path), start=1))
            return
        archive = hub_file("THUDM/LongBench", "data.zip", "name a folder with its files: longbench.dir=FOLDER")
        with zipfile.ZipFile(archive) as members, members.open(f"data/{_file_name(task)}") as lines:
            yield from ((f"{archive}:{task}:{number}", json.loads(line)) for number, line in enumerate(lines, start=1))

    def _sample(
        self, name: str, entry: LongBenchTask, where: str, row: Mapping[str, Any], place: int, request: TaskRequest
    ) -> RenderedSample:
        protocol, tokenizer = request.protocol, request.tokenizer
        fields = {key: text_field(where, row, key) for key in ("context", "input")}
        tokens = entry.tokens + protocol.extra_tokens
        question = fill_in(entry.question, fields)
        if entry.is_cue_in_input:
            question = question.removesuffix(entry.cue)
        cue = entry.cue if not entry.is_cue_in_input or fields["input"].endswith(entry.cue) else ""
        limit = self.max_tokens or protocol.limit_of(tokenizer.name_or_path) or request.context - tokens - TEMPLATE_ROOM
        asked = question + ("" if protocol.cue_after else cue)
        whole = fill_in(entry.before, fields) + asked
        prompt = without_middle(whole, limit, tokenizer) if protocol.truncate else whole
        rendered = render(
            Sample(
                id=str(row.get("_id", place)),
                task=f"longbench_{name}",
                length=limit if protocol.truncate else request.context,
                prompt=prompt,
                question=asked if prompt.endswith(asked) else "",
                references=texts_field(where, row, "answers"),
                metric=entry.metric,
                max_new_tokens=tokens,
                answer_prefix=cue if protocol.cue_after else "",
                system=protocol.system if _takes_system_prompt(tokenizer) else "",
                chat=protocol.is_chat(name, tokenizer.name_or_path),
                classes=texts_field(where, row, "all_classes") if entry.metric == "classification" else (),
                clean=protocol.clean,
            ),
            tokenizer,
        )
        return replace(rendered, is_cut=prompt != whole)


def without_middle(prompt: str, limit: int, tokenizer: Any) -> str:
    """The prompt's first and last `limit // 2` tokens, if it has more than `limit`; as text, which is tokenized again.

    Special tokens count but are not kept, as in LongBench's pred.py.
    """
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) <= limit:
        return prompt
    half = limit // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))


def _words_bucket(row: Mapping[str, Any]) -> int:
    """LongBench-E's classes by number of words: below 4000, below 8000, and the rest, which is shown as 16000."""
    words = int(row.get("length", 0))
    return next((most for most in (4000, 8000) if words < most), 16000)


def _takes_system_prompt(tokenizer: Any) -> bool:
    """Qwen2.5's template has a system prompt of its own, which the repositories keep."""
    return "qwen" not in tokenizer.name_or_path.lower()


def _file_name(task: str) -> str:
    return f"{task.removeprefix('e_')}_e.jsonl" if task.startswith("e_") else f"{task}.jsonl"
