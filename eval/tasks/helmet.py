"""HELMET (arXiv:2410.02694): its recall, RAG and ICL tasks, from a folder with HELMET's own data."""

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.protocols import Protocol
from keepsight.eval.tasks.rows import fill_in, text_field
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.files import read_jsonl

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
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


@dataclass(frozen=True)
class _Recall:
    """A task of RULER in HELMET's files: folder, template and generation length."""

    folder: str
    template: str
    tokens: int


_RECALL = {
    "recall_niah_mk_2": _Recall("niah_multikey_2", _ONE_NEEDLE, 50),
    "recall_niah_mk_3": _Recall("niah_multikey_3", _ONE_NEEDLE, 100),
    "recall_niah_mv": _Recall("niah_multivalue", _NEEDLES, 50),
}
_PAIRS = (50, 105, 220, 440, 900, 1800)
_DOCUMENTS = (20, 50, 105, 220, 440, 1000)
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
        kinds = {
            kind: [task for task in self.TASKS if task.startswith(f"{kind}_")] for kind in ("recall", "rag", "icl")
        }
        return {"": self.TASKS, **kinds}

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
        make = _recall if task in _RECALL else _rag if task in _RAG_FILES else _icl if task in _ICL_SHOTS else _pairs
        folder, limit = Path(self.dir), request.samples or None
        return [
            render(sample, request.tokenizer)
            for length in request.lengths
            for sample in make(task, folder, _LENGTHS.index(length), limit)
        ]


def _recall(task: str, folder: Path, size: int, limit: int | None) -> list[Sample]:
    kind = _RECALL[task]
    path = folder / "ruler" / kind.folder / f"validation_{_LENGTHS[size]}.jsonl"
    return [
        _sample(
            task,
            size,
            row.get("index", place),
            kind.template,
            {name: text_field(where, row, name) for name in ("type_needle_v", "context", "query")},
            _texts(row.get("answer", row.get("outputs"))),
            "string_match_all",
            kind.tokens,
        )
        for place, (where, row) in enumerate(_read(path)[:limit])
    ]


def _pairs(task: str, folder: Path, size: int, limit: int | None) -> list[Sample]:
    path = folder / "json_kv" / f"test_k{_PAIRS[size]}_dep6.jsonl"
    made = []
    for place, (where, row) in enumerate(_read(path)[:limit]):
        shown = [f"Key: {key}\nCorresponding value: {value}" for key, value in row.get("demos", [])[:_SHOTS]]
        fields = {name: text_field(where, row, name) for name in ("context", "question")}
        fields["demos"] = "".join(f"{each}\n\n" for each in shown)
        made.append(_sample(task, size, place, _KEY_VALUE, fields, _texts(row["answer"]), "topic_in_prediction", 100))
    return made


def _rag(task: str, folder: Path, size: int, limit: int | None) -> list[Sample]:
    name = _RAG_FILES[task]
    test, train = name.format(part="test" if task == "rag_popqa" else "dev"), name.format(part="train")
    demonstrations = _read(folder / "kilt" / f"{train}_k3_dep6.jsonl")
    made = []
    for place, (where, row) in enumerate(_read(folder / "kilt" / f"{test}_k{_DOCUMENTS[size]}_dep6.jsonl")[:limit]):
        key = "id" if "id" in row else "question"
        chosen = _demonstrations(str(row[key]), key, [each for _, each in demonstrations])
        shown = [f"{_documents(each)}\n\nQuestion: {each['question']}\nAnswer: {each['answers'][0]}" for each in chosen]
        fields = {"question": text_field(where, row, "question"), "context": _documents(row)}
        fields["demos"] = "".join(f"{each}\n\n" for each in shown)
        made.append(_sample(task, size, place, _RAG, fields, _texts(row["answers"]), "answer_in_prediction", 20))
    return made


def _demonstrations(own: str, key: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of a shuffling that the question decides, each question once and never the row's own."""
    seed = int(hashlib.sha256(own.encode()).hexdigest(), 16) % 2**31
    others = [row for row in rows if str(row[key]) != own]
    shuffled = (others[place] for place in np.random.default_rng(seed).permutation(len(others)))
    return list({str(row[key]): row for row in reversed(list(shuffled))}.values())[::-1][:_SHOTS]


def _documents(row: Mapping[str, Any]) -> str:
    return "\n\n".join(f"Document (Title: {each['title']}): {each['text']}" for each in row["ctxs"])


def _icl(task: str, folder: Path, size: int, limit: int | None) -> list[Sample]:
    """Balanced demonstrations, whose labels are numbers drawn anew for each text."""
    place = folder / "icl" / task.removeprefix("icl_")
    train = [row for _, row in _read(place / "train.jsonl")]
    shown = _balanced(train, _ICL_SHOTS[task][size])
    count = 1 + max(int(row["label"]) for row in train)
    made = []
    for number, (where, row) in enumerate(_read(place / "test.jsonl")[:limit]):
        text, labels = text_field(where, row, "text"), list(range(count))
        random.Random((int(hashlib.sha256(text.encode()).hexdigest(), 16) + _SEED) % 2**31).shuffle(labels)
        context = "\n\n".join(f"{each['text']}\nlabel: {labels[int(each['label'])]}" for each in shown)
        answer = (str(labels[int(row["label"])]),)
        made.append(
            _sample(task, size, number, _ICL, {"context": context, "question": text}, answer, "exact_label", 20)
        )
    return made


def _balanced(rows: Iterable[dict[str, Any]], shots: int) -> list[dict[str, Any]]:
    """As many rows of each label, in rounds that each hold every label once in random order."""
    rng = random.Random(_SEED)
    by_label: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    rounds = -(-shots // len(by_label))
    drawn: list[list[dict[str, Any]]] = [[] for _ in range(rounds)]
    for own in by_label.values():
        places = rng.sample(range(len(own)), rounds % len(own))
        while len(places) < rounds:
            places += rng.sample(range(len(own)), min(rounds - len(places), len(own)))
        for number, place in enumerate(places):
            drawn[number].append(own[place])
    for each in drawn:
        rng.shuffle(each)
    return [row for each in drawn for row in each][:shots]


def _sample(
    task: str,
    size: int,
    name: object,
    template: str,
    fields: Mapping[str, str],
    references: tuple[str, ...],
    metric: str,
    tokens: int,
) -> Sample:
    question = fill_in(template.partition("{context}")[2], fields)
    return Sample(
        id=str(name),
        task=f"helmet_{task}",
        length=_LENGTHS[size],
        prompt=fill_in(template, fields),
        question="" if "{demos}" in template.partition("{context}")[2] else question,
        references=references,
        metric=metric,
        max_new_tokens=tokens,
        chat=False,
    )


def _texts(value: Any) -> tuple[str, ...]:
    """One answer, several, or lists of them, as HELMET's files have them."""
    if isinstance(value, str):
        return (value,)
    return tuple(text for each in value for text in _texts(each))


@lru_cache(maxsize=2)
def _read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; helmet.dir must hold HELMET's data in its own layout")
    return [(f"{path}:{number}", row) for number, row in enumerate(read_jsonl(path), start=1)]
