"""HELMET (arXiv:2410.02694): its recall, RAG and ICL tasks, from a folder with HELMET's own data."""

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest, fill_in, rows_of, text_field
from keepsight.eval.tasks.metrics import metric, normalise
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.files import Row

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
_PAIRS = (50, 105, 220, 440, 900, 1800)
_DOCUMENTS = (20, 50, 105, 220, 440, 1000)
_SHOTS = 2
_SEED = 42
_MAGIC = "hidden within the following text. Make sure to memorize it. I will quiz you about the"
_ONE_NEEDLE = (
    f"A special magic {{type_needle_v}} is {_MAGIC} {{type_needle_v}} afterwards.\n{{context}}\n"
    "What is the special magic {type_needle_v} for {query} mentioned in the provided text?\n"
    "The special magic {type_needle_v} for {query} mentioned in the provided text is"
)
_NEEDLES = (
    f"Some special magic {{type_needle_v}} are {_MAGIC} {{type_needle_v}} afterwards.\n{{context}}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?\n"
    "The special magic {type_needle_v} for {query} mentioned in the provided text are"
)
_KEY_VALUE = (
    "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n{demos}"
    "Key: {question}\nCorresponding value:"
)
_RAG = (
    "Use the given documents to write a concise and short answer to the question. Write your answer in the following "
    "format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}\nAnswer:"
)
_ICL = (
    'Use the provided mapping from the text to label to assign a label to the text. Only output "label: {label}" and '
    "nothing else. \n\n{context}\n\n{question}\nlabel:"
)
_RECALL = {  # RULER's folder, template and generation length
    "recall_niah_mk_2": ("niah_multikey_2", _ONE_NEEDLE, 50),
    "recall_niah_mk_3": ("niah_multikey_3", _ONE_NEEDLE, 100),
    "recall_niah_mv": ("niah_multivalue", _NEEDLES, 50),
}
_RAG_FILES = {
    "rag_nq": "nq-{part}-multikilt_1000",
    "rag_triviaqa": "triviaqa-{part}-multikilt_1000",
    "rag_hotpotqa": "hotpotqa-{part}-multikilt_1000",
    "rag_popqa": "popqa_{part}_1000",
}
_ICL_SHOTS = {
    "icl_trec_coarse": (200, 400, 800, 1600, 3300, 6600),
    "icl_trec_fine": (200, 400, 800, 1600, 3200, 6400),
    "icl_banking77": (180, 360, 720, 1450, 2900, 5900),
    "icl_clinic150": (220, 440, 880, 1750, 3525, 7050),
    "icl_nlu": (250, 510, 1020, 2040, 4080, 8296),
}


@dataclass
class Helmet(Benchmark):
    """HELMET: helmet_recall, helmet_rag and helmet_icl, without the chat template, as its configurations have it.

    Attributes:
        dir: HELMET's `data` folder with ruler/, json_kv/ and kilt/; for ICL also icl/NAME/train.jsonl and test.jsonl,
            rows of text and label (a whole number).
    """

    TASKS: ClassVar[tuple[str, ...]] = (*_RECALL, "recall_json_kv", *_RAG_FILES, *_ICL_SHOTS)

    dir: str | None = None

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        kinds = ("recall", "rag", "icl")
        return {"": self.TASKS, **{kind: [task for task in self.TASKS if task.startswith(kind)] for kind in kinds}}

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        if self.dir is None:
            raise UserError(
                "helmet tasks need helmet.dir=FOLDER, the `data` folder that HELMET's download script makes"
            )
        if wrong := [length for length in request.lengths if length not in _LENGTHS]:
            raise UserError(
                f"helmet: lengths={wrong[0]} is none of {', '.join(map(str, _LENGTHS))}, its data's lengths"
            )
        read = _recall if task in _RECALL else _rag if task in _RAG_FILES else _icl if task in _ICL_SHOTS else _pairs
        made: list[RenderedSample] = []
        for length in request.lengths:
            rows, sample = read(task, Path(self.dir), _LENGTHS.index(length))

            def make(where: str, row: Row, number: int, sample: _Maker = sample) -> list[RenderedSample]:
                return [render(sample(where, row, number), request.tokenizer)]

            made += request.collect(f"helmet {task} {length}", rows, make)
        return made


Rows = list[tuple[str, Row]]


@lru_cache(maxsize=2)
def _rows(path: Path) -> Rows:
    return list(rows_of(path, "helmet.dir must hold HELMET's data in its own layout"))


_Maker = Callable[[str, Row, int], Sample]
"""Makes the sample of a row; the arguments are those of `keepsight.eval.tasks.benchmark.Make`."""


def _recall(task: str, folder: Path, size: int) -> tuple[Rows, _Maker]:
    name, template, tokens = _RECALL[task]

    def make(where: str, row: Row, number: int) -> Sample:
        fields = {name: text_field(where, row, name) for name in ("type_needle_v", "context", "query")}
        answers = _texts(row.get("answer", row.get("outputs")))
        return _sample(task, size, row.get("index", number), template, fields, answers, "string_match_all", tokens)

    return _rows(folder / "ruler" / name / f"validation_{_LENGTHS[size]}.jsonl"), make


def _pairs(task: str, folder: Path, size: int) -> tuple[Rows, _Maker]:
    def make(where: str, row: Row, number: int) -> Sample:
        shown = [f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in row.get("demos", [])[:_SHOTS]]
        fields = {name: text_field(where, row, name) for name in ("context", "question")} | {"demos": "".join(shown)}
        answers = _texts(row["answer"])
        return _sample(task, size, number, _KEY_VALUE, fields, answers, "topic_in_prediction", 100)

    return _rows(folder / "json_kv" / f"test_k{_PAIRS[size]}_dep6.jsonl"), make


def _rag(task: str, folder: Path, size: int) -> tuple[Rows, _Maker]:
    name = _RAG_FILES[task]
    test, train = name.format(part="test" if task == "rag_popqa" else "dev"), name.format(part="train")
    examples = [row for _, row in _rows(folder / "kilt" / f"{train}_k3_dep6.jsonl")]

    def make(where: str, row: Row, number: int) -> Sample:
        key = "id" if "id" in row else "question"
        shown = [
            f"{_documents(each)}\n\nQuestion: {each['question']}\nAnswer: {each['answers'][0]}\n\n"
            for each in _demonstrations(str(row[key]), key, examples)
        ]
        question = text_field(where, row, "question")
        fields = {"question": question, "context": _documents(row), "demos": "".join(shown)}
        return _sample(task, size, number, _RAG, fields, _texts(row["answers"]), "answer_in_prediction", 20)

    return _rows(folder / "kilt" / f"{test}_k{_DOCUMENTS[size]}_dep6.jsonl"), make


def _icl(task: str, folder: Path, size: int) -> tuple[Rows, _Maker]:
    """Balanced demonstrations, whose labels are numbers drawn anew for each text."""
    files = folder / "icl" / task.removeprefix("icl_")
    train = [row for _, row in _rows(files / "train.jsonl")]
    shown = _balanced(train, _ICL_SHOTS[task][size])
    try:
        count = 1 + max(int(row["label"]) for row in train)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{files / 'train.jsonl'}: expected rows of text and label, a whole number") from None

    def make(where: str, row: Row, number: int) -> Sample:
        text, labels = text_field(where, row, "text"), list(range(count))
        random.Random((int(hashlib.sha256(text.encode()).hexdigest(), 16) + _SEED) % 2**31).shuffle(labels)
        context = "\n\n".join(f"{each['text']}\nlabel: {labels[int(each['label'])]}" for each in shown)
        fields, answers = {"context": context, "question": text}, (str(labels[int(row["label"])]),)
        return _sample(task, size, number, _ICL, fields, answers, "exact_label", 20)

    return _rows(files / "test.jsonl"), make


def _sample(
    task: str,
    size: int,
    name: object,
    template: str,
    fields: Mapping[str, str],
    answers: tuple[str, ...],
    metric: str,
    tokens: int,
) -> Sample:
    """A sample; its question is the template's part after the context, where no examples are in it."""
    after = template.partition("{context}")[2]
    return Sample(
        id=str(name),
        task=f"helmet_{task}",
        length=_LENGTHS[size],
        prompt=fill_in(template, fields),
        question="" if "{demos}" in after else fill_in(after, fields),
        references=answers,
        metric=metric,
        max_new_tokens=tokens,
        chat=False,
    )


def _texts(value: Any) -> tuple[str, ...]:
    """One answer, several, or lists of them, as HELMET's files have them.

    Raises:
        TypeError: something else is among them.
    """
    if isinstance(value, list) and value:
        return tuple(text for each in value for text in _texts(each))
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no answer")
    return (value,)


def _demonstrations(own: str, key: str, rows: Sequence[Row]) -> list[Row]:
    """The first of a shuffling seeded by the question, each question once and never the row's own."""
    seed = int(hashlib.sha256(own.encode()).hexdigest(), 16) % 2**31
    others = [row for row in rows if str(row[key]) != own]
    shuffled = (others[place] for place in np.random.default_rng(seed).permutation(len(others)))
    return list({str(row[key]): row for row in reversed(list(shuffled))}.values())[::-1][:_SHOTS]


def _documents(row: Row) -> str:
    return "\n\n".join(f"Document (Title: {each['title']}): {each['text']}" for each in row["ctxs"])


def _balanced(rows: Iterable[Row], shots: int) -> list[Row]:
    """As many rows of each label, in rounds that each have every label once in random order."""
    rng = random.Random(_SEED)
    by_label: dict[Any, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    rounds = -(-shots // len(by_label))
    drawn: list[list[Row]] = [[] for _ in range(rounds)]
    for own in by_label.values():
        places = rng.sample(range(len(own)), rounds % len(own))
        while len(places) < rounds:
            places += rng.sample(range(len(own)), min(rounds - len(places), len(own)))
        for number, place in enumerate(places):
            drawn[number].append(own[place])
    for each in drawn:
        rng.shuffle(each)
    return [row for each in drawn for row in each][:shots]


@metric("exact_label")
def _exact_label(prediction: str, reference: str) -> float:
    """Whether the first line says the reference, after `label:` where it says that (HELMET, parse_output)."""
    line = prediction.split("\n")[0]
    found = re.search("label:(.*)", line, re.IGNORECASE)
    label = re.sub("^label:", "", (found[1] if found else line).strip(), flags=re.IGNORECASE)
    return float(normalise(label) == normalise(reference))
