"""RULER (arXiv:2404.06654): its 13 tasks, generated for the target's tokenizer at any length, or read from files."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.fill import filled
from keepsight.eval.tasks.protocols import Protocol
from keepsight.eval.tasks.rows import bucket, ruler_family
from keepsight.eval.tasks.ruler_sources import QaSource, essay_words, hotpotqa, squad
from keepsight.eval.tasks.ruler_texts import (
    NeedleText,
    RulerText,
    common_words,
    frequent_words,
    needles,
    question_over,
    variables,
)
from keepsight.eval.tasks.samples import RenderedSample, Sample, render_all
from keepsight.files import read_jsonl

NEEDLES = {
    "niah_single_1": NeedleText("noise"),
    "niah_single_2": NeedleText("essay"),
    "niah_single_3": NeedleText("essay", value="uuids"),
    "niah_multikey_1": NeedleText("essay", keys=4),
    "niah_multikey_2": NeedleText("needles"),
    "niah_multikey_3": NeedleText("needles", key="uuids", value="uuids"),
    "niah_multivalue": NeedleText("essay", values=4),
    "niah_multiquery": NeedleText("essay", keys=4, asked=4),
}
_SHORT = 4096
"""Below this length the reference makes smaller examples."""
_PREFIXES = {"niah": " The special magic", "cwe": " Answer: The top", "qa": " Answer:"}
_ACCORDING = " Answer: According"


@dataclass
class Ruler(Benchmark):
    """RULER.

    Attributes:
        haystack: Text file of essays, or RULER's PaulGrahamEssays.json; else the Hub's, else Python's documentation.
        squad: SQuAD's dev-v2.0.json for qa_1; else the Hub's, else questions about Python's documentation.
        hotpotqa: HotpotQA's hotpot_dev_distractor_v1.json for qa_2; else as for squad.
        dir: Folder of ready-made RULER files, which are used instead of generated prompts.
    """

    TASKS: ClassVar[tuple[str, ...]] = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")

    haystack: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    dir: str | None = None

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        return {"": [task for task in self.TASKS if task not in protocol.left_out]}

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        if self.dir is not None:
            return self._ready_made(task, Path(self.dir), request)
        return [sample for length in request.lengths for sample in self._generated(task, length, request)]

    def _generated(self, task: str, length: int, request: TaskRequest) -> list[RenderedSample]:
        def make(index: int, size: int) -> Sample:
            rng = random.Random(f"ruler:{task}:{length}:{request.seed}:{index}")
            return _sample(task, length, f"{request.seed}-{index}", text(index, rng, size), request.protocol)

        text, least = self._texts(task, length, request)
        return filled([partial(make, index) for index in range(request.samples)], length, request.tokenizer, least)

    def _texts(self, task: str, length: int, request: TaskRequest) -> tuple[Callable[..., RulerText], int]:
        """What makes the text of sample `index`, and the smallest size that it works for."""
        if task in NEEDLES:
            essay, note = essay_words(self.haystack) if NEEDLES[task].haystack == "essay" else ((), "")
            if note:
                request.notes["ruler haystack"] = note
            return lambda index, rng, size: needles(NEEDLES[task], essay, rng, size), 0
        if task == "vt":
            shown = _shown_noise(length, request.tokenizer)
            return lambda index, rng, size: variables(shown, rng, size), 0
        if task == "cwe":
            return lambda index, rng, size: common_words(length < _SHORT, rng, size), 10
        if task == "fwe":
            vocabulary = max((length - request.protocol.ruler_tokens["fwe"]) // 50, 4)
            return lambda index, rng, size: frequent_words(vocabulary, rng, size), 32
        source: QaSource = (squad if task == "qa_1" else hotpotqa)(self.squad if task == "qa_1" else self.hotpotqa)
        request.notes[f"ruler {task}"] = source.note
        asked = source.questions
        return lambda index, rng, size: question_over(asked[index % len(asked)], source.texts, rng, size), 1

    def _ready_made(self, task: str, folder: Path, request: TaskRequest) -> list[RenderedSample]:
        rows = [row for row in _rows(folder) if row[0] == task]
        if request.protocol.shuffled:
            rows = [rows[place] for place in np.random.RandomState(42).permutation(len(rows))]
        if not rows:
            raise UserError(
                f"ruler.dir: no row of {task} in the .jsonl files of {folder}; drop ruler.dir to generate it"
            )
        request.notes[f"ruler {task}"] = str(folder)
        wanted = rows[: request.samples or None]
        made = [_read_sample(task, length, path, row, request) for task, length, path, row in wanted]
        return [sample for sample in made if len(sample.prompt_ids) + sample.max_new_tokens <= request.context]


def _shown_noise(length: int, tokenizer: Any) -> int:
    """Lines of noise in the example of `vt`: about 500 tokens, of a short prompt a quarter."""
    text = variables(0, random.Random(0), 8)
    line = len(tokenizer(text.context, add_special_tokens=False)["input_ids"]) / 13
    return max(5, int((min(500, length // 4) - 8 * line) / line))


def _sample(task: str, length: int, name: str, text: RulerText, protocol: Protocol) -> Sample:
    """A text as a sample, its answer prefix where the protocol puts it."""
    after = text.after + (text.prefix if protocol.ruler_prefix == "prompt" else "")
    return Sample(
        id=name,
        task=f"ruler_{task}",
        length=length,
        prompt=text.before + text.context + after,
        question=after,
        references=text.references,
        metric="string_match_part" if ruler_family(task) == "qa" else "string_match_all",
        max_new_tokens=protocol.ruler_tokens[ruler_family(task)],
        answer_prefix=text.prefix if protocol.ruler_prefix == "answer" else "",
        chat=protocol.ruler_template,
        clean=protocol.ruler_clean,
        depth=text.depth,
    )


@lru_cache(maxsize=1)
def _rows(folder: Path) -> list[tuple[str, int, Path, dict[str, Any]]]:
    """Task, length, file and fields of each row below a folder.

    A row's task is its field `task`, else the name of its file, or of the folder for RULER's own `validation.jsonl`.
    Its length is a folder's name such as 4096, else the row's own, rounded up to a power of two.
    """
    if not folder.is_dir():
        raise UserError(f"ruler.dir={folder}: no such folder; it takes a folder of RULER's .jsonl files")
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        named = path.parent.name if path.stem in ("validation", "test") else path.stem
        lengths = [int(part) for part in path.relative_to(folder).parts if part.isdigit()]
        for row in read_jsonl(path):
            own = bucket(int(row.get("length", 0)))
            found.append((str(row.get("task", named)), lengths[-1] if lengths else own, path, row))
    return found


def _read_sample(task: str, length: int, path: Path, row: dict[str, Any], request: TaskRequest) -> RenderedSample:
    text, answers = row.get("input"), row.get("outputs")
    if not isinstance(text, str) or not isinstance(answers, list) or not answers:
        raise UserError(
            f"{path}: row {row.get('index')}: expected a text in input and a list in outputs, as RULER writes"
        )
    prefix = row.get("answer_prefix")
    if not isinstance(prefix, str):  # older files hold it in the text, in the model's own template or in none
        place = text.rfind(_PREFIXES.get(ruler_family(task), _ACCORDING))
        text, prefix = (text[:place], text[place:]) if place >= 0 else (text, "")
    place = text.rfind("\nWhat " if ruler_family(task) == "niah" else "\nQuestion:")
    before, after = (text[:place], text[place:]) if place >= 0 else (text, "")
    parts = RulerText("", before, after, prefix, tuple(str(answer) for answer in answers))
    made = _sample(task, length, str(row.get("index", row.get("id", ""))), parts, request.protocol)
    return render_all([made], request.tokenizer)[0]
