"""RULER (arXiv:2404.06654): its 13 tasks, generated for the model's tokenizer at any length, or read from files.

Metrics as in https://github.com/NVIDIA/RULER, `scripts/eval`.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks import ruler_texts as texts
from keepsight.eval.tasks.benchmark import (
    Benchmark,
    Protocol,
    TaskRequest,
    file_rows,
    rows_of_task,
    ruler_family,
    text_field,
)
from keepsight.eval.tasks.samples import RenderedSample, Sample, bucket, render, render_all
from keepsight.files import JsonObject

_SHORT = 4096
"""Below this length the reference makes smaller examples."""
_PREFIXES = {"niah": " The special magic", "cwe": " Answer: The top", "qa": " Answer:"}
_ACCORDING = " Answer: According"

TextOf = Callable[[int, random.Random, int], texts.RulerText]
"""Makes the text of the sample of this index from a random generator and a size."""


@dataclass
class Ruler(Benchmark):
    """RULER.

    Attributes:
        haystack: Text file of essays, or RULER's PaulGrahamEssays.json; by default from the Hub, or Python's docs
            if the Hub cannot be reached.
        squad: SQuAD's dev-v2.0.json for qa_1; by default from the Hub, or questions about Python's documentation.
        hotpotqa: HotpotQA's hotpot_dev_distractor_v1.json for qa_2; by default as for squad.
        dir: Folder of RULER files to use instead of generated prompts.
    """

    TASKS: ClassVar[tuple[str, ...]] = (*texts.NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")

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
            return _samples_in_files(task, Path(self.dir), request)
        request.check_lengths()
        samples = []
        for length in request.lengths:
            samples += self._generated(task, length, request)
        return samples

    def _generated(self, task: str, length: int, request: TaskRequest) -> list[RenderedSample]:
        text_of, least = self._texts(task, length, request)

        def make(index: int, size: int) -> Sample:
            rng = random.Random(f"ruler:{task}:{length}:{request.seed}:{index}")
            return _sample(task, length, f"{request.seed}-{index}", text_of(index, rng, size), request.protocol)

        makes = [partial(make, index) for index in range(request.samples)]
        return samples_of_length(makes, length, request.tokenizer, least)

    def _texts(self, task: str, length: int, request: TaskRequest) -> tuple[TextOf, int]:
        """The generator of the text of sample `index`, and the smallest size that it works for."""
        if task in texts.NEEDLES:
            knobs = texts.NEEDLES[task]
            essay: Sequence[str] = ()
            if knobs.haystack == "essay":
                essay, request.notes["ruler haystack"] = texts.essay_words(self.haystack)
            return lambda index, rng, size: texts.needles(knobs, essay, rng, size), 0
        if task == "vt":
            example_lines = _example_lines(length, request.tokenizer)
            return lambda index, rng, size: texts.variables(example_lines, rng, size), 0
        if task == "cwe":
            return lambda index, rng, size: texts.common_words(length < _SHORT, rng, size), 10
        if task == "fwe":
            vocabulary = max((length - request.protocol.ruler_tokens["fwe"]) // 50, 4)
            return lambda index, rng, size: texts.frequent_words(vocabulary, rng, size), 32
        source = texts.squad(self.squad) if task == "qa_1" else texts.hotpotqa(self.hotpotqa)
        request.notes[f"ruler {task}"] = source.note

        def question(index: int, rng: random.Random, size: int) -> texts.RulerText:
            return texts.question_over(source.questions[index % len(source.questions)], source.texts, rng, size)

        return question, 1


def _example_lines(length: int, tokenizer: Any) -> int:
    """Lines of noise in the example of `vt`: about 500 tokens, of a short prompt a quarter."""
    text = texts.variables(0, random.Random(0), 8)
    line = len(tokenizer(text.context, add_special_tokens=False)["input_ids"]) / 13
    return max(5, int((min(500, length // 4) - 8 * line) / line))


def _sample(task: str, length: int, name: str, text: texts.RulerText, protocol: Protocol) -> Sample:
    """A text as a sample, its answer prefix at the protocol's place."""
    after = text.after
    if protocol.ruler_prefix == "prompt":
        after += text.prefix
    answer_prefix = text.prefix if protocol.ruler_prefix == "answer" else ""
    metric = "string_match_part" if ruler_family(task) == "qa" else "string_match_all"
    return Sample(
        id=name,
        task=f"ruler_{task}",
        length=length,
        prompt=text.before + text.context + after,
        question=after,
        references=text.references,
        metric=metric,
        max_new_tokens=protocol.ruler_tokens[ruler_family(task)],
        answer_prefix=answer_prefix,
        chat=protocol.ruler_template,
        clean=protocol.ruler_clean,
        depth=text.depth,
    )


def _samples_in_files(task: str, folder: Path, request: TaskRequest) -> list[RenderedSample]:
    """The samples of a task in files, in the lengths that they have."""
    rows = rows_of_task(_rows(folder), task)
    if request.protocol.shuffled:
        import numpy as np  # not at the top: `--help` imports this module

        rows = [rows[index] for index in np.random.RandomState(42).permutation(len(rows))]
    if not rows:
        raise UserError(
            f"ruler.dir: no row of {task} in the .jsonl files of {folder}; drop ruler.dir to generate it",
            field="ruler.dir",
            code="missing",
        )
    request.notes[f"ruler {task}"] = str(folder)
    by_length: dict[Any, list[tuple[str, JsonObject]]] = {}
    for where, row in rows:
        by_length.setdefault(row.get("nominal"), []).append((where, row))
    make = partial(_read_sample, task, request.protocol)
    samples: list[RenderedSample] = []
    for length, rows_of_length in by_length.items():
        name = f"ruler {task} rows" if length is None else f"ruler {task} rows of {length}"
        samples += request.collect(name, rows_of_length, make, render=render)
    return samples


@lru_cache(maxsize=1)
def _rows(folder: Path) -> list[tuple[str, JsonObject]]:
    """The rows below a folder, each with its place, with their tasks in `task` and those lengths known in `nominal`.

    A row's task is its field `task`, else the name of its file, or of the folder for RULER's own `validation.jsonl`.
    Its length is a folder's name such as 4096.
    """
    if not folder.is_dir():
        raise UserError(
            f"ruler.dir={folder}: no such folder; it takes a folder of RULER's .jsonl files",
            field="ruler.dir",
            code="missing",
        )
    rows = []
    for path in sorted(folder.rglob("*.jsonl")):
        task = path.parent.name if path.stem in ("validation", "test") else path.stem
        length: int | None = None
        for part in path.relative_to(folder).parts:
            if part.isdecimal():
                length = int(part)
        for where, fields in file_rows(path):
            row = {"task": task, **fields}
            if length is not None:
                row["nominal"] = length
            rows.append((where, row))
    return rows


def _read_sample(task: str, protocol: Protocol, where: str, row: JsonObject, _: int) -> Sample:
    """A row of RULER's files as a sample, its text parted at the question and at the answer's prefix."""
    text = text_field(where, row, "input")
    answers = row.get("outputs")
    if not isinstance(answers, list) or not answers or not all(type(answer) in (str, int) for answer in answers):
        raise UserError(
            f"{where}: field 'outputs' must be a list of texts or whole numbers, as RULER writes",
            field="outputs",
            code="type",
        )
    prefix = row.get("answer_prefix")
    if not isinstance(prefix, str):  # older files hold it in the text, in the model's own template or in none
        text, prefix = _parted(text, _PREFIXES.get(ruler_family(task), _ACCORDING))
    question_start = "\nWhat " if ruler_family(task) == "niah" else "\nQuestion:"
    before, after = _parted(text, question_start)
    parts = texts.RulerText("", before, after, prefix, tuple(map(str, answers)))
    length = row.get("nominal") or bucket(int(row.get("length", 0)))  # the row's own, rounded up
    name = str(row.get("index", row.get("id", "")))
    return _sample(task, length, name, parts, protocol)


def _parted(text: str, start: str) -> tuple[str, str]:
    """A text up to the last occurrence of `start`, and from there on; the second is empty where there is none."""
    position = text.rfind(start)
    if position < 0:
        return text, ""
    return text[:position], text[position:]


# The search for the size that fills a length

Make = Callable[[int], Sample]
"""Makes a sample whose haystack has that many units (words, sentences, documents)."""
_BATCH = 16
"""Prompts are rendered in batches, since tokenizers then work in parallel; more would hold too much text."""
_ROUNDS = 12


@dataclass
class _Search:
    """Search for the size of one sample: `low` is the largest size known to fit, `high` the smallest too long."""

    make: Make
    size: int
    low: int
    high: float = math.inf
    best: RenderedSample | None = None


def samples_of_length(makes: Sequence[Make], length: int, tokenizer: Any, least: int = 0) -> list[RenderedSample]:
    """Samples whose prompt and answer fill `length` tokens to within one unit or 2 percent.

    The size comes from how tokens grow with units, after the first prompts from the number of characters, and is then
    corrected by the length of the whole prompt, so that most prompts are rendered once or twice. `least` is the least
    size that makes a valid sample; UserError if it is too long.
    """
    if not makes:
        return []
    small, larger = render_all([makes[0](least), makes[0](least + 32)], tokenizer)
    tokens_per_unit = max((len(larger.prompt_ids) - len(small.prompt_ids)) / 32, 0.1)
    characters_per_unit = max((len(larger.prompt) - len(small.prompt)) / 32, 0.1)
    spare_tokens = length - small.max_new_tokens - len(small.prompt_ids)
    size = max(least, least + int(spare_tokens / tokens_per_unit))
    characters = 0.0  # of a prompt that fills its length, once some are known
    samples: list[RenderedSample] = []
    for start in range(0, len(makes), _BATCH):
        block = []
        for make in makes[start : start + _BATCH]:
            first_size = _by_characters(make, size, characters, characters_per_unit, least)
            block.append(_Search(make, first_size, least - 1))
        samples_of_block = _search(block, length, tokens_per_unit, least, tokenizer)
        size = block[0].low
        characters_of_length = []
        for sample in samples_of_block:
            answerless = length - sample.max_new_tokens
            characters_of_length.append(len(sample.prompt) * answerless / len(sample.prompt_ids))
            samples.append(replace(sample, length=length))
        characters = mean(characters_of_length)
    return samples


def _by_characters(make: Make, size: int, characters: float, characters_per_unit: float, least: int) -> int:
    """The size at which a prompt has about as many characters as earlier ones that filled their length; 0 for none."""
    if not characters:
        return size
    for _ in range(3):
        step = math.floor((characters - len(make(size).prompt)) / characters_per_unit)
        if not step:
            break
        size = max(size + step, least)
    return size


def _search(block: list[_Search], length: int, rate: float, least: int, tokenizer: Any) -> list[RenderedSample]:
    """The best sample of each search of a block; `rate` is in tokens per unit."""
    pending = block
    for _ in range(_ROUNDS):
        rendered = render_all([search.make(search.size) for search in pending], tokenizer)
        unfinished = []
        for search, sample in zip(pending, rendered, strict=True):
            if _goes_on(search, sample, length, rate):
                unfinished.append(search)
        pending = unfinished
        if not pending or any(search.high <= least for search in pending):
            break

    samples = []
    for search in block:
        if search.best is None:
            search.low = least
            search.best = render(search.make(least), tokenizer)
            tokens = len(search.best.prompt_ids) + search.best.max_new_tokens
            if tokens > length:
                shortest = f"a sample without haystack needs {tokens} tokens"
                raise UserError(
                    f"{search.best.task}: length {length} is too short; {shortest}", field="lengths", code="range"
                )
        samples.append(search.best)
    return samples


def _goes_on(search: _Search, sample: RenderedSample, length: int, rate: float) -> bool:
    """Take in the length of a rendered size; whether another one is worth a try, which then is `search.size`."""
    spare = length - sample.max_new_tokens - len(sample.prompt_ids)
    if spare >= 0:
        search.low = search.size
        search.best = sample
        step = int(spare / rate)
        if spare <= length // 50 or step < 1:
            return False
        search.size = int(min(search.low + step, search.high - 1))
    else:
        search.high = search.size
        search.size = max(search.size - math.ceil(-spare / rate), search.low + 1)
    return search.low < search.size < search.high or search.best is None
