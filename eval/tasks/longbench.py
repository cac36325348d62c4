"""LongBench and LongBench-E (arXiv:2308.14508) and LongBench v2 (arXiv:2412.15204), from the Hub or from their files.

Prompts, truncation and metrics as in https://github.com/THUDM/LongBench: `pred.py`, `eval.py`, `metrics.py`.
"""

import re
import string
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import (
    Benchmark,
    Protocol,
    TaskRequest,
    file_rows,
    fill_in,
    hub_file,
    json_rows,
    rows_of_task,
    text_field,
    texts_field,
)
from keepsight.eval.tasks.metrics import METRICS, f1, first_line, integers, metric, rouge_l, sample_metric
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.files import JsonObject, package_yaml, read_json

_TEMPLATE_TOKENS = 64
"""Tokens that a chat template may add to a prompt."""


@dataclass(frozen=True)
class LongBenchTask:
    """One task of LongBench: its metric, its generation length, and its prompt, with {context} and {input} to fill in.

    The prompt is `before` with {context}, the question, and `cue`, such as `Answer:`; a question that is {input} alone
    holds the cue already.
    """

    before: str
    question: str
    cue: str
    tokens: int
    metric: str

    @property
    def is_cue_in_input(self) -> bool:
        """Whether the rows' own field ends with the cue, as in the few-shot tasks."""
        return self.question == "{input}" and not self.metric.startswith("code")

    @property
    def template(self) -> str:
        """The whole prompt."""
        if self.is_cue_in_input:
            return self.before + self.question
        return self.before + self.question + self.cue


@lru_cache(maxsize=1)
def longbench_tasks() -> dict[str, LongBenchTask]:
    """All tasks by name, the 16 English ones first."""
    return {name: LongBenchTask(**entry) for name, entry in package_yaml("keepsight.eval.tasks", "longbench").items()}


_ENGLISH = tuple(longbench_tasks())[:16]
_CHINESE = tuple(longbench_tasks())[16:]
_BY_LENGTH = tuple(f"e_{task}" for task in _ENGLISH if task not in ("narrativeqa", "musique", "qmsum"))


@dataclass
class LongBench(Benchmark):
    """LongBench: the 16 English tasks; longbench_zh the Chinese ones, longbench_e those of LongBench-E.

    Attributes:
        dir: Folder with LongBench's files, such as qasper.jsonl or LongBench-E's qasper_e.jsonl; the Hub's by default.
        max_tokens: Longest prompt in tokens; longer ones are truncated in the middle. 0 for the model's context.
    """

    TASKS: ClassVar[tuple[str, ...]] = (*_ENGLISH, *_CHINESE, *_BY_LENGTH)

    dir: str | None = None
    max_tokens: int = 0

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        groups: dict[str, list[str]] = {}
        for name, tasks in {"": _ENGLISH, "zh": _CHINESE, "e": _BY_LENGTH}.items():
            groups[name] = []
            for task in tasks:
                if task not in protocol.left_out and self._has_file(task):
                    groups[name].append(task)
        return groups

    def _has_file(self, task: str) -> bool:
        return self.dir is None or (Path(self.dir) / _file_name(task)).is_file()

    @override
    def require(self, task: str, judge: str) -> None:
        if self.dir is None:
            _archive()

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        name = task.removeprefix("e_")
        entry = longbench_tasks()[name]
        if entry.metric.endswith("_zh"):
            METRICS[entry.metric]("", Sample("", task, 0, "", ("",), entry.metric, 1))  # fails here without jieba
        rows: Iterable[tuple[str, JsonObject]] = self._rows(task)
        if request.protocol.shuffled:  # as datasets' shuffle(seed=42)
            import numpy as np  # not at the top: `--help` imports this module

            in_order = list(rows)
            rows = [in_order[index] for index in np.random.default_rng(42).permutation(len(in_order))]

        def make(where: str, row: JsonObject, number: int) -> RenderedSample:
            sample = self._sample(name, entry, where, row, number, request)
            if task == name:
                return sample
            return replace(sample, task=f"longbench_{task}", length=_words_bucket(row))

        return request.collect(f"longbench {task}", rows, make)

    def _rows(self, task: str) -> Iterator[tuple[str, JsonObject]]:
        """Where a row stands, and the row."""
        if self.dir is not None:
            yield from file_rows(Path(self.dir) / _file_name(task), "without longbench.dir it is taken from the Hub")
            return
        archive = _archive()
        with zipfile.ZipFile(archive) as members, members.open(f"data/{_file_name(task)}") as lines:
            yield from json_rows(f"{archive}:{task}", enumerate(lines, start=1))

    def _sample(
        self, name: str, entry: LongBenchTask, where: str, row: JsonObject, number: int, request: TaskRequest
    ) -> RenderedSample:
        protocol = request.protocol
        model = request.tokenizer.name_or_path
        fields = {"context": text_field(where, row, "context"), "input": text_field(where, row, "input")}
        max_new_tokens = entry.tokens + protocol.extra_tokens
        limit = self.max_tokens or protocol.limit_of(model) or request.context - max_new_tokens - _TEMPLATE_TOKENS

        question = fill_in(entry.question, fields)
        cue = entry.cue
        if entry.is_cue_in_input:
            question = question.removesuffix(cue)
            if not fields["input"].endswith(cue):
                cue = ""
        answer_prefix = ""
        if protocol.cue_after:
            answer_prefix = cue
        else:
            question += cue
        whole_prompt = fill_in(entry.before, fields) + question
        prompt = whole_prompt
        length = request.context
        if protocol.truncate:
            prompt = without_middle(whole_prompt, limit, request.tokenizer)
            length = limit

        # Qwen2.5's template has a system prompt of its own, which the repositories keep.
        system = "" if "qwen" in model.lower() else protocol.system
        classes: tuple[str, ...] = ()
        if entry.metric == "classification":
            classes = texts_field(where, row, "all_classes")
        sample = Sample(
            id=str(row.get("_id", number)),
            task=f"longbench_{name}",
            length=length,
            prompt=prompt,
            question=_if_whole(question, prompt),
            references=texts_field(where, row, "answers"),
            metric=entry.metric,
            max_new_tokens=max_new_tokens,
            answer_prefix=answer_prefix,
            system=system,
            chat=protocol.is_chat(name, model),
            classes=classes,
            clean=protocol.clean,
        )
        return replace(render(sample, request.tokenizer), is_cut=prompt != whole_prompt)


def _if_whole(question: str, prompt: str) -> str:
    """The question, or nothing where truncation has cut it off from the prompt's end."""
    return question if prompt.endswith(question) else ""


def _archive() -> Path:
    return hub_file("THUDM/LongBench", "data.zip", "name a folder with its files: longbench.dir=FOLDER")


def without_middle(prompt: str, limit: int, tokenizer: Any) -> str:
    """The prompt's first and last `limit // 2` tokens, if it has more than `limit`; as text, which is tokenized again.

    Special tokens count but are not kept, as in LongBench's pred.py.
    """
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) <= limit:
        return prompt
    half = limit // 2
    beginning = tokenizer.decode(ids[:half], skip_special_tokens=True)
    end = tokenizer.decode(ids[-half:], skip_special_tokens=True)
    return str(beginning + end)


def _words_bucket(row: JsonObject) -> int:
    """LongBench-E's classes by number of words: below 4000, below 8000, and the rest, which is shown as 16000."""
    words = int(row.get("length", 0))
    for limit in (4000, 8000):
        if words < limit:
            return limit
    return 16000


def _file_name(task: str) -> str:
    return f"{task.removeprefix('e_')}_e.jsonl" if task.startswith("e_") else f"{task}.jsonl"


def _class_score(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (number of class names in the prediction) where the right one is among them.

    Names that are part of the right one do not count, but LongBench removes them from the list that it is walking
    along and so skips the name after each: of two such neighbours the second stays and halves the score.
    """
    named = [name for name in classes if name in prediction]
    position = 0
    while position < len(named):
        if named[position] != reference and named[position] in reference:
            del named[position]
        position += 1
    return 1 / len(named) if reference in named else 0.0


@sample_metric("classification")
def _classification(prediction: str, sample: Sample) -> float:
    """The first line's score of a class name, the best over the references."""
    line = first_line(prediction)
    return max(_class_score(line, reference, sample.classes) for reference in sample.references)


@metric("code_sim")
def _code_sim(prediction: str, reference: str) -> float:
    """Edit similarity of the first line that is neither a fence nor holds a comment, in whole percent.

    LongBench calls `fuzzywuzzy`, whose result depends on whether python-Levenshtein is installed (GPL, both); this
    is the result with it.
    """
    from rapidfuzz import fuzz

    code = ""
    for line in prediction.lstrip("\n").split("\n"):
        if not any(mark in line for mark in ("`", "#", "//")):
            code = line
            break
    return round(fuzz.ratio(code, reference)) / 100


@metric("count")
def _share_of_integers(prediction: str, number: str) -> float:
    """The share of the integers in the prediction that are `number`."""
    numbers = integers(prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


@metric("retrieval")
def _retrieval(prediction: str, reference: str) -> float:
    """`count` of the number in a reference such as `Paragraph 7`."""
    numbers = integers(reference)
    return _share_of_integers(prediction, numbers[0]) if numbers else 0.0


_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟"
    "〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_MARKS = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)


def _chinese_words(text: str) -> list[str]:
    """The words that `jieba` finds (it logs what it loads); UserError if it is missing."""
    try:
        import jieba
    except ImportError:
        raise UserError(
            "LongBench's Chinese tasks need jieba; run `pip install 'keepsight[zh]'`",
            field="jieba",
            code="missing",
        ) from None
    return list(jieba.cut(text))


@metric("qa_f1_zh")
def _qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 over Chinese words without punctuation."""
    return f1(_chinese_bag(prediction), _chinese_bag(reference))


def _chinese_bag(text: str) -> Counter[str]:
    bag: Counter[str] = Counter()
    for word in _chinese_words(text):
        bare_word = "".join(word.lower().translate(_NO_MARKS).split())
        if bare_word:
            bag[bare_word] += 1
    return bag


@metric("rouge_l_zh")
def _rouge_l_zh(prediction: str, reference: str) -> float:
    """ROUGE-L over Chinese words."""
    return rouge_l(" ".join(_chinese_words(prediction)), " ".join(_chinese_words(reference)))


_V2_BEFORE = "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
_V2_QUESTION = (
    "What is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    '(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
_V2_FIELDS = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")
_V2_TOKENS = 128


@dataclass
class LongBenchV2(Benchmark):
    """LongBench v2 without chain of thought: questions with four choices, by the length of their context.

    Attributes:
        file: LongBench v2's data.json, or a JSONL file of its rows; the Hub's by default.
        max_tokens: Longest prompt in tokens; longer ones are truncated in the middle. 0 for the model's context.
    """

    TASKS: ClassVar[tuple[str, ...]] = ("short", "medium", "long")

    file: str | None = None
    max_tokens: int = 0

    @override
    def require(self, task: str, judge: str) -> None:
        self._path()

    def _path(self) -> Path:
        if self.file is not None:
            return Path(self.file)
        return hub_file("THUDM/LongBench-v2", "data.json", "name its data.json: longbench_v2.file=FILE")

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        path = self._path()
        limit = self.max_tokens or request.context - _V2_TOKENS - _TEMPLATE_TOKENS
        rows = rows_of_task(_v2_rows(path), task, "length")
        make = partial(_v2_sample, task, limit, request.tokenizer)
        return request.collect(f"longbench_v2 {task}", rows, make)


@lru_cache(maxsize=1)
def _v2_rows(path: Path) -> list[tuple[str, JsonObject]]:
    if path.suffix == ".jsonl":
        return [*file_rows(path)]
    return [(f"{path}: {row.get('_id')}", row) for row in read_json(path, list[JsonObject])]


def _v2_sample(task: str, limit: int, tokenizer: Any, where: str, row: JsonObject, _: int) -> RenderedSample:
    fields = {}
    for name in _V2_FIELDS:
        fields[name] = text_field(where, row, name).strip()
    question = fill_in(_V2_QUESTION, fields)
    whole_prompt = fill_in(_V2_BEFORE, fields) + question
    prompt = without_middle(whole_prompt, limit, tokenizer)
    sample = Sample(
        id=str(row.get("_id")),
        task=f"longbench_v2_{task}",
        length=limit,
        prompt=prompt,
        question=_if_whole(question, prompt),
        references=(text_field(where, row, "answer"),),
        metric="chosen_letter",
        max_new_tokens=_V2_TOKENS,
    )
    return replace(render(sample, tokenizer), is_cut=prompt != whole_prompt)


@metric("chosen_letter")
def _chosen_letter(prediction: str, reference: str) -> float:
    """Whether the letter that LongBench v2 reads from an answer is the reference."""
    text = prediction.replace("*", "")
    letter = re.search(r"The correct answer is \(([A-D])\)", text)
    if letter is None:
        letter = re.search(r"The correct answer is ([A-D])", text)
    return float(letter is not None and letter[1] == reference)
