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
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest, file_rows, ruler_family, text_field
from keepsight.eval.tasks.samples import RenderedSample, Sample, bucket, render, render_all
from keepsight.files import Row

_SHORT = 4096
"""Below this length the reference makes smaller examples."""
_PREFIXES = {"niah": " The special magic", "cwe": " Answer: The top", "qa": " Answer:"}
_ACCORDING = " Answer: According"


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
            return _ready_made(task, Path(self.dir), request)
        request.check_lengths()
        return [sample for length in request.lengths for sample in self._generated(task, length, request)]

    def _generated(self, task: str, length: int, request: TaskRequest) -> list[RenderedSample]:
        def make(index: int, size: int) -> Sample:
            rng = random.Random(f"ruler:{task}:{length}:{request.seed}:{index}")
            return _sample(task, length, f"{request.seed}-{index}", text(index, rng, size), request.protocol)

        text, least = self._texts(task, length, request)
        return filled([partial(make, index) for index in range(request.samples)], length, request.tokenizer, least)

    def _texts(self, task: str, length: int, request: TaskRequest) -> tuple[Callable[..., texts.RulerText], int]:
        """The generator of the text of sample `index`, and the smallest size that it works for."""
        if task in texts.NEEDLES:
            essay, note = texts.essay_words(self.haystack) if texts.NEEDLES[task].haystack == "essay" else ((), "")
            if note:
                request.notes["ruler haystack"] = note
            return lambda index, rng, size: texts.needles(texts.NEEDLES[task], essay, rng, size), 0
        if task == "vt":
            shown = _shown_noise(length, request.tokenizer)
            return lambda index, rng, size: texts.variables(shown, rng, size), 0
        if task == "cwe":
            return lambda index, rng, size: texts.common_words(length < _SHORT, rng, size), 10
        if task == "fwe":
            vocabulary = max((length - request.protocol.ruler_tokens["fwe"]) // 50, 4)
            return lambda index, rng, size: texts.frequent_words(vocabulary, rng, size), 32
        source = texts.squad(self.squad) if task == "qa_1" else texts.hotpotqa(self.hotpotqa)
        request.notes[f"ruler {task}"] = source.note
        asked = source.questions
        return lambda index, rng, size: texts.question_over(asked[index % len(asked)], source.texts, rng, size), 1


def _shown_noise(length: int, tokenizer: Any) -> int:
    """Lines of noise in the example of `vt`: about 500 tokens, of a short prompt a quarter."""
    text = texts.variables(0, random.Random(0), 8)
    line = len(tokenizer(text.context, add_special_tokens=False)["input_ids"]) / 13
    return max(5, int((min(500, length // 4) - 8 * line) / line))


def _sample(task: str, length: int, name: str, text: texts.RulerText, protocol: Protocol) -> Sample:
    """A text as a sample, its answer prefix at the protocol's place."""
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


def _ready_made(task: str, folder: Path, request: TaskRequest) -> list[RenderedSample]:
    rows = [(where, row) for where, row in _rows(folder) if row["task"] == task]
    if request.protocol.shuffled:
        import numpy as np  # not at the top: `--help` imports this module

        rows = [rows[place] for place in np.random.RandomState(42).permutation(len(rows))]
    if not rows:
        raise UserError(f"ruler.dir: no row of {task} in the .jsonl files of {folder}; drop ruler.dir to generate it")
    request.notes[f"ruler {task}"] = str(folder)
    make = partial(_read_sample, task, request.protocol)
    by_length: dict[Any, list[tuple[str, Row]]] = {}
    for where, row in rows:
        by_length.setdefault(row.get("nominal"), []).append((where, row))
    made: list[RenderedSample] = []
    for length, each in by_length.items():
        name = f"ruler {task} rows" if length is None else f"ruler {task} rows of {length}"
        made += request.collect(name, each, make, render=render)
    return made


@lru_cache(maxsize=1)
def _rows(folder: Path) -> list[tuple[str, Row]]:
    """The rows below a folder, each with its place, with their tasks in `task` and those lengths known in `nominal`.

    A row's task is its field `task`, else the name of its file, or of the folder for RULER's own `validation.jsonl`.
    Its length is a folder's name such as 4096.
    """
    if not folder.is_dir():
        raise UserError(f"ruler.dir={folder}: no such folder; it takes a folder of RULER's .jsonl files")
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        named = path.parent.name if path.stem in ("validation", "test") else path.stem
        lengths = [int(part) for part in path.relative_to(folder).parts if part.isdecimal()]
        known = {"nominal": lengths[-1]} if lengths else {}
        found += [(where, {"task": named, **row, **known}) for where, row in file_rows(path)]
    return found


def _read_sample(task: str, protocol: Protocol, where: str, row: Row, _: int) -> Sample:
    text, answers, prefix = text_field(where, row, "input"), row.get("outputs"), row.get("answer_prefix")
    if not isinstance(answers, list) or not answers or not all(type(each) in (str, int) for each in answers):
        raise UserError(f"{where}: field 'outputs' must be a list of texts or whole numbers, as RULER writes")
    if not isinstance(prefix, str):  # older files hold it in the text, in the model's own template or in none
        place = text.rfind(_PREFIXES.get(ruler_family(task), _ACCORDING))
        text, prefix = (text[:place], text[place:]) if place >= 0 else (text, "")
    place = text.rfind("\nWhat " if ruler_family(task) == "niah" else "\nQuestion:")
    before, after = (text[:place], text[place:]) if place >= 0 else (text, "")
    parts = texts.RulerText("", before, after, prefix, tuple(map(str, answers)))
    length = row.get("nominal") or bucket(int(row.get("length", 0)))  # the row's own, rounded up
    name = str(row.get("index", row.get("id", "")))
    return _sample(task, length, name, parts, protocol)


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


def filled(makes: Sequence[Make], length: int, tokenizer: Any, least: int = 0) -> list[RenderedSample]:
    """Samples whose prompt and answer fill `length` tokens to within one unit or 2 percent.

    The size comes from how tokens grow with units, after the first prompts from the number of characters, and is then
    corrected by the length of the whole prompt, so that most prompts are rendered once or twice. `least` is the least
    size that makes a valid sample; UserError if it is too long.
    """
    if not makes:
        return []
    small, larger = render_all([makes[0](least), makes[0](least + 32)], tokenizer)
    fixed, rate = len(small.prompt_ids), max((len(larger.prompt_ids) - len(small.prompt_ids)) / 32, 0.1)
    characters = max((len(larger.prompt) - len(small.prompt)) / 32, 0.1)
    size, wanted = max(least, least + int((length - small.max_new_tokens - fixed) / rate)), 0.0
    made: list[RenderedSample] = []
    for start in range(0, len(makes), _BATCH):
        block = [
            _Search(make, _by_characters(make, size, wanted, characters, least), least - 1)
            for make in makes[start : start + _BATCH]
        ]
        best = _search(block, length, rate, least, tokenizer)
        size = block[0].low
        wanted = mean(len(each.prompt) * (length - each.max_new_tokens) / len(each.prompt_ids) for each in best)
        made += [replace(each, length=length) for each in best]
    return made


def _by_characters(make: Make, size: int, wanted: float, rate: float, least: int) -> int:
    """The size at which a prompt has about as many characters as earlier ones that filled their length."""
    for _ in range(3 if wanted else 0):
        step = math.floor((wanted - len(make(size).prompt)) / rate)
        if not step:
            break
        size = max(size + step, least)
    return size


def _search(block: list[_Search], length: int, rate: float, least: int, tokenizer: Any) -> list[RenderedSample]:
    """The best sample of each search of a block."""
    pending = block
    for _ in range(_ROUNDS):
        rendered = render_all([each.make(each.size) for each in pending], tokenizer)
        pending = [each for each, sample in zip(pending, rendered, strict=True) if _goes_on(each, sample, length, rate)]
        if not pending or any(each.high <= least for each in pending):
            break
    for each in block:
        if each.best is None:
            each.low, each.best = least, render(each.make(least), tokenizer)
            if (needed := len(each.best.prompt_ids) + each.best.max_new_tokens) > length:
                shortest = f"a sample without haystack needs {needed} tokens"
                raise UserError(f"{each.best.task}: length {length} is too short; {shortest}")
    return [each.best for each in block if each.best is not None]


def _goes_on(search: _Search, sample: RenderedSample, length: int, rate: float) -> bool:
    """Take in the length of a rendered size; whether another one is worth a try, which then is `search.size`."""
    spare = length - sample.max_new_tokens - len(sample.prompt_ids)
    if spare >= 0:
        search.low, search.best = search.size, sample
        step = int(spare / rate)
        if spare <= length // 50 or step < 1:
            return False
        search.size = int(min(search.low + step, search.high - 1))
    else:
        search.high = search.size
        search.size = max(search.size - math.ceil(-spare / rate), search.low + 1)
    return search.low < search.size < search.high or search.best is None
