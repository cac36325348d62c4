"""HELMET (arXiv:2410.02694): recall, RAG, citations, reranking, ICL, long questions and summaries, from its data."""

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest, file_rows, fill_in, text_field
from keepsight.eval.tasks.metrics import METRICS, metric, normalise
from keepsight.eval.tasks.samples import HELMET_JUDGED, RenderedSample, Sample, render
from keepsight.files import Row, own_yaml, read_json

_SHOTS = 2
_SEED = 42


@dataclass(frozen=True)
class HelmetTask:
    """A task of HELMET: its prompt with {context}, metric and generation length; `chat` is for the chat template.

    `file` is the rows' file below HELMET's folder, with {size} for one of `sizes`: lengths, or numbers of pairs,
    documents or demonstrations, one for each of HELMET's lengths; None where HELMET has no such task. `examples` is the
    file of the demonstrations; `demo` is one of a long text's task, and `shown` what stands around them, with {demos}.
    """

    prompt: str
    file: str
    sizes: list[int | None]
    metric: str
    tokens: int
    examples: str = ""
    demo: str = ""
    shown: str = ""
    chat: bool = False


_TABLE = own_yaml("keepsight.eval.tasks", "helmet")
HELMET_TASKS = {name: HelmetTask(**entry) for name, entry in _TABLE["tasks"].items()}
_LENGTHS: list[int] = _TABLE["lengths"]

Fields = Callable[[str, Row], tuple[dict[str, str], Any]]
"""A row's place, for messages, and the row -> the texts that fill the prompt, and the answers."""


@dataclass
class Helmet(Benchmark):
    """HELMET: helmet_recall, _rag, _cite, _rerank, _icl, _longqa and _summ, with the chat template where it has one.

    narrativeqa and the summaries need `judge.url`. Of citations the answers alone are scored: whether passages support
    them is another model's verdict in HELMET. Long texts are cut by the base model's tokenizer, not by Llama 2's.

    Attributes:
        dir: HELMET's `data` folder with ruler/, json_kv/, kilt/, msmarco/ and alce/, and with `prompts` beside it. Add
            rows from the Hub for ICL, icl/NAME/train.jsonl and test.jsonl with text and label (a whole number), and for
            long texts, the files in longqa/ and summ/ that an error names, with context, question, answer (one or more
            texts), options of choices, keypoints of summaries.
    """

    TASKS: ClassVar[tuple[str, ...]] = tuple(HELMET_TASKS)

    dir: str | None = None

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        kinds = ("recall", "rag", "cite", "rerank", "icl", "longqa", "summ")
        return {"": self.TASKS, **{kind: [task for task in self.TASKS if task.startswith(kind)] for kind in kinds}}

    @override
    def require(self, task: str, judge: str) -> None:
        if self.dir is None:
            raise UserError("helmet tasks need helmet.dir=FOLDER, the `data` folder of HELMET's download script")
        if HELMET_TASKS[task].metric in HELMET_JUDGED and not judge:
            raise UserError(f"task helmet_{task} needs a judge: judge.url=http://HOST:PORT/v1 judge.model=NAME")

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        self.require(task, request.judge)
        if wrong := [length for length in request.lengths if length not in _LENGTHS]:
            known = ", ".join(map(str, _LENGTHS))
            raise UserError(f"helmet: lengths={wrong[0]} is none of {known}, its data's lengths")
        return [sample for length in request.lengths for sample in self._samples(task, length, request)]

    def _samples(self, task: str, length: int, request: TaskRequest) -> list[RenderedSample]:
        entry, folder = HELMET_TASKS[task], Path(self.dir or "")
        size, examples = entry.sizes[_LENGTHS.index(length)], folder / entry.examples
        if size is None:
            request.notes[f"helmet {task} {length}"] = "HELMET has no data of this length"
            return []
        if task.startswith("icl"):
            fields_of = _icl(examples, size)
        elif task.startswith("rerank"):
            fields_of = _rerank([row for _, row in _rows(examples)])
        elif task.startswith("rag"):
            fields_of = _rag([row for _, row in _rows(examples)])
        elif task.startswith("cite"):
            fields_of = _cited(examples, size)
        elif entry.demo:
            fields_of = _long(entry, [row for _, row in _rows(examples)], size, request.tokenizer)
        else:
            fields_of = _key_value if task == "recall_json_kv" else _needle
        question = entry.prompt.partition("{context}")[2]

        def make(where: str, row: Row, number: int) -> Sample:
            fields, answers = fields_of(where, row)
            return Sample(
                id=str(row.get("index", number)),
                task=f"helmet_{task}",
                length=length,
                prompt=fill_in(entry.prompt, fields),
                question="" if "{demos}" in question else fill_in(question, fields),
                references=_texts(answers),
                metric=entry.metric,
                max_new_tokens=entry.tokens,
                chat=entry.chat,
                judge=request.judge if entry.metric in HELMET_JUDGED else "",
            )

        rows = _rows(folder / entry.file.format(size=size))
        return request.collect(f"helmet {task} {length}", rows, make, render=render)


@lru_cache(maxsize=2)
def _rows(path: Path) -> list[tuple[str, Row]]:
    if path.suffix == ".json" and path.is_file():
        return [(f"{path}: {number}", row) for number, row in enumerate(read_json(path, list[Row]))]
    return list(file_rows(path, "helmet.dir must hold HELMET's data in its own layout"))


def _texts(value: Any) -> tuple[str, ...]:
    """One answer, several, or lists of them, as HELMET's files have them, else TypeError."""
    if isinstance(value, list) and value:
        return tuple(text for each in value for text in _texts(each))
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no answer")
    return (value,)


def _needle(where: str, row: Row) -> tuple[dict[str, str], Any]:
    fields = {name: text_field(where, row, name) for name in ("type_needle_v", "context", "query")}
    return fields, row.get("answer", row.get("outputs"))


def _key_value(where: str, row: Row) -> tuple[dict[str, str], Any]:
    fields = {name: text_field(where, row, name) for name in ("context", "question")}
    shown = [f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in row.get("demos", [])[:_SHOTS]]
    return fields | {"demos": "".join(shown)}, row["answer"]


def _rag(examples: Sequence[Row]) -> Fields:
    def fields(where: str, row: Row) -> tuple[dict[str, str], Any]:
        key = "id" if "id" in row else "question"
        shown = [
            f"{_documents(each)}\n\nQuestion: {each['question']}\nAnswer: {each['answers'][0]}\n\n"
            for each in _demonstrations(str(row[key]), key, examples)
        ]
        question = text_field(where, row, "question")
        return {"question": question, "context": _documents(row), "demos": "".join(shown)}, row["answers"]

    return fields


def _rerank(examples: Sequence[Row]) -> Fields:
    """Passages to be put in order; the answer is the passages' labels, such as `12 3, 7 0`."""

    def fields(where: str, row: Row) -> tuple[dict[str, str], Any]:
        shown = [
            f"{_passages(each)}\n\nQuery: {each['query']}\nRanking: {' > '.join(_ranked(each))}\n\n"
            for each in _demonstrations(str(row["qid"]), "qid", examples)
        ]
        labels = ", ".join(f"{each['id']} {int(each['label'])}" for each in row["ctxs"])
        question = text_field(where, row, "query")
        return {"question": question, "context": _passages(row), "demos": "".join(shown)}, labels

    return fields


def _ranked(row: Row) -> list[str]:
    return [str(each["id"]) for each in sorted(row["ctxs"], key=lambda each: -int(each["label"]))]


def _passages(row: Row) -> str:
    named = "title" in row["ctxs"][0]
    return "\n\n".join(
        f"[ID: {each['id']}] Document{' (Title: ' + each['title'] + ')' if named else ''}: {each['text']}"
        for each in row["ctxs"]
    )


def _icl(examples: Path, shots: int) -> Fields:
    """Balanced demonstrations, whose labels are numbers drawn anew for each text."""
    train = [row for _, row in _rows(examples)]
    try:
        shown, count = _balanced(train, shots), 1 + max(int(row["label"]) for row in train)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        raise UserError(f"{examples}: expected rows of text and label, a whole number") from None

    def fields(where: str, row: Row) -> tuple[dict[str, str], Any]:
        text, labels = text_field(where, row, "text"), list(range(count))
        random.Random((int(hashlib.sha256(text.encode()).hexdigest(), 16) + _SEED) % 2**31).shuffle(labels)
        context = "\n\n".join(f"{each['text']}\nlabel: {labels[int(each['label'])]}" for each in shown)
        return {"context": context, "question": text}, str(labels[int(row["label"])])

    return fields


def _cited(examples: Path, size: int) -> Fields:
    """Questions about numbered passages (ALCE, arXiv:2305.14627); an answer of several aliases is one reference."""
    if not examples.is_file():
        raise UserError(f"{examples}: no such file; HELMET's `prompts` folder must lie beside helmet.dir")
    texts = read_json(examples, dict[str, Any])
    rng = random.Random(_SEED)

    def passages(docs: Sequence[Row]) -> str:
        return "\n\n".join(_filled(texts["doc_prompt"], each | {"ID": place}) for place, each in enumerate(docs, 1))

    def fields(where: str, row: Row) -> tuple[dict[str, str], Any]:
        shown = [
            _filled(
                texts["demo_prompt"], each | {"instruction": texts["instruction"], "context": passages(each["docs"])}
            )
            for each in rng.sample(texts["demos"], _SHOTS)
        ]
        given = {"demos": "".join(f"{each}\n\n\n" for each in shown), "instruction": texts["instruction"]}
        given |= {"question": text_field(where, row, "question"), "context": passages(row["docs"][:size])}
        aliases = [each["short_answers"] for each in row["qa_pairs"]] if "qa_pairs" in row else row["answers"]
        return given, ["\n".join(each) for each in aliases]

    return fields


def _filled(template: str, row: Row) -> str:
    return fill_in(template, {name: str(value) for name, value in row.items()})


def _long(entry: HelmetTask, examples: Sequence[Row], size: int, tokenizer: Any) -> Fields:
    """Questions about a long text, or its summary, of which `size` tokens stay; the answer, and a summary's points."""
    end = " ... [the rest of the text is omitted]"
    spare = len(tokenizer(end, add_special_tokens=False)["input_ids"])

    def fields(where: str, row: Row) -> tuple[dict[str, str], Any]:
        text = text_field(where, row, "context")
        places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        others = [each for each in examples if each is not row]
        shown = [_filled(entry.demo, _options(each)[0]) for each in random.Random(_SEED).sample(others, _SHOTS)]
        given, answers = _options(row)
        given["demos"] = fill_in(entry.shown, {"demos": "\n\n".join(shown)})
        given["context"] = text if len(places) <= size else text[: places[size - spare - 1][1]] + end
        return given, [*answers, *row.get("keypoints", [])]

    return fields


def _options(row: Row) -> tuple[dict[str, str], list[str]]:
    """The question, its options and the first answer of a row as texts; and the answers."""
    answers = [*_texts(row["answer"])]
    given = {"question": str(row.get("question", "")), "answer": answers[0].strip()}
    if "options" in row:
        lettered = {letter: f"{letter}. {option}" for letter, option in zip("ABCD", row["options"], strict=True)}
        right = "ABCD"[row["options"].index(answers[0])]
        given |= {"options": "\n".join(lettered.values()), "answer": right}
        answers = [right, lettered[right]]
    return given, answers


def _demonstrations(own: str, key: str, rows: Sequence[Row]) -> list[Row]:
    """The first rows, shuffled with the question as the seed, each question once and never the row's own."""
    import numpy as np  # not at the top: `--help` imports this module

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


@metric("ndcg_10")
def _ndcg(prediction: str, reference: str) -> float:
    """NDCG of the 10 first documents of the longest ranking in the first line, such as `3 > 1 > 2` (trec_eval's).

    The reference has each document and its gain, such as `12 3, 7 0`; brackets, colons and `ID` are left out.
    """
    gains = {name: int(gain) for name, gain in (each.split() for each in reference.split(", "))}
    line = re.sub(r"[\[\]:]", "", prediction.split("\n")[0]).lower().replace("id", "")
    longest = max((found[0] for found in re.finditer(r"\d+(?:\s*>\s*\d+)*", line)), key=len, default="")
    ranking = dict.fromkeys(each.strip() for each in longest.split(">"))
    best = _discounted(sorted(gains.values(), reverse=True))
    return _discounted([gains.get(each, 0) for each in ranking]) / best if best else 0.0


def _discounted(gains: list[int]) -> float:
    return sum(gain / math.log2(place + 2) for place, gain in enumerate(gains[:10]))


@metric("letter_or_option")
def _letter_or_option(prediction: str, reference: str) -> float:
    """Whether the prediction is the letter, after `Answer:` where it says that, or holds the option with its letter."""
    if len(reference) > 1:
        return float(reference.lower() in prediction.lower())
    line = re.sub(r"^.*?answer:", "", prediction.replace("\n", " "), flags=re.IGNORECASE)
    return float(reference.lower() in (normalise(prediction), normalise(line)))


def _found(prediction: str, sample: Sample) -> float:
    """The share of the references of which an alias, one a line, occurs in the prediction (ALCE's STR-EM)."""
    text = normalise(prediction)
    hits = [any(normalise(alias) in text for alias in each.split("\n")) for each in sample.references]
    return sum(hits) / len(hits)


METRICS["short_answers"] = _found


def _listed(prediction: str, sample: Sample) -> float:
    """How many of 5 references, or of all where they are fewer, a list with commas holds (QAMPARI's recall of 5)."""
    parts = re.sub(r"\[\d+\]", "", prediction.split("\n")[0]).rstrip(". ").split(",")
    items = {normalise(each) for each in parts}
    hits = sum(any(normalise(alias) in items for alias in each.split("\n")) for each in sample.references)
    return min(1.0, hits / min(5, len(sample.references)))


METRICS["listed_answers"] = _listed
