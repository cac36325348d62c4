"""HELMET (arXiv:2410.02694): recall, RAG, citations, reranking, ICL, long questions and summaries, from its data."""

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
from keepsight.eval.tasks.metrics import metric, normalise, sample_metric
from keepsight.eval.tasks.samples import HELMET_JUDGED, RenderedSample, Sample
from keepsight.eval.tasks.task_format import TaskEntry, TaskRow, load
from keepsight.files import JsonObject, hex_digest, package_yaml, read_json

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


_TABLE = package_yaml("keepsight.eval.tasks", "helmet")
HELMET_TASKS = {name: HelmetTask(**entry) for name, entry in _TABLE["tasks"].items()}
_LENGTHS: list[int] = _TABLE["lengths"]

Fields = Callable[[str, JsonObject], tuple[dict[str, str], Any]]
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
        groups: dict[str, Sequence[str]] = {"": self.TASKS}
        for kind in ("recall", "rag", "cite", "rerank", "icl", "longqa", "summ"):
            groups[kind] = [task for task in self.TASKS if task.startswith(kind)]
        return groups

    @override
    def require(self, task: str, judge: str) -> None:
        if self.dir is None:
            raise UserError(
                "helmet tasks need helmet.dir=FOLDER, the `data` folder of HELMET's download script",
                field="helmet.dir",
                code="missing",
            )
        if HELMET_TASKS[task].metric in HELMET_JUDGED and not judge:
            raise UserError(
                f"task helmet_{task} needs a judge: judge.url=http://HOST:PORT/v1 judge.model=NAME",
                field="judge.url",
                code="missing",
            )

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        self.require(task, request.judge)
        samples = []
        for length in request.lengths:
            if length not in _LENGTHS:
                lengths = ", ".join(map(str, _LENGTHS))
                raise UserError(
                    f"helmet: lengths={length} is none of {lengths}, its data's lengths",
                    field="lengths",
                    code="unknown",
                )
        for length in request.lengths:
            samples += self._samples(task, length, request)
        return samples

    def _samples(self, task: str, length: int, request: TaskRequest) -> list[RenderedSample]:
        """The samples of one length; none, and a note, where HELMET has no data of it."""
        entry = HELMET_TASKS[task]
        folder = Path(self.dir or "")
        size = entry.sizes[_LENGTHS.index(length)]
        if size is None:
            request.notes[f"helmet {task} {length}"] = "HELMET has no data of this length"
            return []
        fields_of = _fields_of_task(task, folder / entry.examples, size, request.tokenizer)

        def convert(where: str, row: JsonObject, number: int) -> TaskRow:
            fields, answers = fields_of(where, row)
            return TaskRow(str(row.get("index", number)), fields, _texts(answers))

        judge = request.judge if entry.metric in HELMET_JUDGED else ""
        shared = TaskEntry(
            task=f"helmet_{task}",
            prompt=entry.prompt,
            metric=entry.metric,
            max_new_tokens=entry.tokens,
            length=length,
            chat=entry.chat,
            judge=judge,
        )
        rows = _rows(folder / entry.file.format(size=size))
        return load(f"helmet {task} {length}", shared, rows, convert, request)


def _fields_of_task(task: str, examples: Path, size: int, tokenizer: Any) -> Fields:
    """How the rows of a task fill its prompt; `examples` is its file of demonstrations, `size` as in `HelmetTask`."""
    entry = HELMET_TASKS[task]
    if task == "recall_json_kv":
        return _key_value
    if task.startswith("recall"):
        return _needle
    if task.startswith("icl"):
        return _icl(examples, size)
    if task.startswith("cite"):
        return _cited(examples, size)
    demonstrations = _rows_alone(examples)
    if task.startswith("rerank"):
        return _rerank(demonstrations)
    if task.startswith("rag"):
        return _rag(demonstrations)
    return _long(entry, demonstrations, size, tokenizer)


@lru_cache(maxsize=2)
def _rows(path: Path) -> list[tuple[str, JsonObject]]:
    if path.suffix == ".json" and path.is_file():
        return [(f"{path}: {number}", row) for number, row in enumerate(read_json(path, list[JsonObject]))]
    return list(file_rows(path, "helmet.dir must hold HELMET's data in its own layout"))


def _rows_alone(path: Path) -> list[JsonObject]:
    """The rows of a file, without where they stand."""
    return [row for _, row in _rows(path)]


def _texts(value: Any) -> tuple[str, ...]:
    """One answer, several, or lists of them, as HELMET's files have them, else TypeError."""
    if isinstance(value, list) and value:
        texts: list[str] = []
        for answer in value:
            texts += _texts(answer)
        return tuple(texts)
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no answer")
    return (value,)


# How the rows of each kind of task fill its prompt


def _needle(where: str, row: JsonObject) -> tuple[dict[str, str], Any]:
    fields = {
        "type_needle_v": text_field(where, row, "type_needle_v"),
        "context": text_field(where, row, "context"),
        "query": text_field(where, row, "query"),
    }
    return fields, row.get("answer", row.get("outputs"))


def _key_value(where: str, row: JsonObject) -> tuple[dict[str, str], Any]:
    context = text_field(where, row, "context")
    question = text_field(where, row, "question")
    demos = ""
    for key, value in row.get("demos", [])[:_SHOTS]:
        demos += f"Key: {key}\nCorresponding value: {value}\n\n"
    return {"context": context, "question": question, "demos": demos}, row["answer"]


def _rag(examples: Sequence[JsonObject]) -> Fields:
    """Questions over documents."""

    def fields(where: str, row: JsonObject) -> tuple[dict[str, str], Any]:
        key = "id" if "id" in row else "question"
        demos = ""
        for demo in _demonstrations(str(row[key]), key, examples):
            demos += f"{_documents(demo)}\n\nQuestion: {demo['question']}\nAnswer: {demo['answers'][0]}\n\n"
        question = text_field(where, row, "question")
        return {"question": question, "context": _documents(row), "demos": demos}, row["answers"]

    return fields


def _documents(row: JsonObject) -> str:
    documents = []
    for passage in row["ctxs"]:
        documents.append(f"Document (Title: {passage['title']}): {passage['text']}")
    return "\n\n".join(documents)


def _rerank(examples: Sequence[JsonObject]) -> Fields:
    """Passages to be put in order; the answer is the passages' labels, such as `12 3, 7 0`."""

    def fields(where: str, row: JsonObject) -> tuple[dict[str, str], Any]:
        demos = ""
        for demo in _demonstrations(str(row["qid"]), "qid", examples):
            demos += f"{_passages(demo)}\n\nQuery: {demo['query']}\nRanking: {_ranking(demo)}\n\n"
        labels = []
        for passage in row["ctxs"]:
            labels.append(f"{passage['id']} {int(passage['label'])}")
        question = text_field(where, row, "query")
        return {"question": question, "context": _passages(row), "demos": demos}, ", ".join(labels)

    return fields


def _ranking(row: JsonObject) -> str:
    ranked = sorted(row["ctxs"], key=lambda passage: -int(passage["label"]))
    return " > ".join(str(passage["id"]) for passage in ranked)


def _passages(row: JsonObject) -> str:
    has_titles = "title" in row["ctxs"][0]
    passages = []
    for passage in row["ctxs"]:
        title = f" (Title: {passage['title']})" if has_titles else ""
        passages.append(f"[ID: {passage['id']}] Document{title}: {passage['text']}")
    return "\n\n".join(passages)


def _icl(examples: Path, shots: int) -> Fields:
    """Balanced demonstrations, whose labels are numbers drawn anew for each text."""
    train = _rows_alone(examples)
    try:
        demonstrations = _balanced(train, shots)
        label_count = 1 + max(int(row["label"]) for row in train)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{examples}: expected rows of text and label, a whole number", field=examples.name, code="data"
        ) from None

    def fields(where: str, row: JsonObject) -> tuple[dict[str, str], Any]:
        text = text_field(where, row, "text")
        labels = list(range(label_count))
        random.Random((_hash(text) + _SEED) % 2**31).shuffle(labels)
        demos = []
        for demo in demonstrations:
            demos.append(f"{demo['text']}\nlabel: {labels[int(demo['label'])]}")
        return {"context": "\n\n".join(demos), "question": text}, str(labels[int(row["label"])])

    return fields


def _balanced(rows: Iterable[JsonObject], shots: int) -> list[JsonObject]:
    """As many rows of each label, in rounds that each have every label once in random order."""
    rng = random.Random(_SEED)
    by_label: dict[Any, list[JsonObject]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    round_count = math.ceil(shots / len(by_label))
    rounds: list[list[JsonObject]] = [[] for _ in range(round_count)]
    for rows_of_label in by_label.values():
        count = len(rows_of_label)
        indices = rng.sample(range(count), round_count % count)
        while len(indices) < round_count:
            indices += rng.sample(range(count), min(round_count - len(indices), count))
        for rows_of_round, index in zip(rounds, indices, strict=True):
            rows_of_round.append(rows_of_label[index])

    balanced: list[JsonObject] = []
    for rows_of_round in rounds:
        rng.shuffle(rows_of_round)
        balanced += rows_of_round
    return balanced[:shots]


def _cited(examples: Path, size: int) -> Fields:
    """Questions about numbered passages (ALCE, arXiv:2305.14627); an answer of several aliases is one reference."""
    if not examples.is_file():
        raise UserError(
            f"{examples}: no such file; HELMET's `prompts` folder must lie beside helmet.dir",
            field=examples.name,
            code="missing",
        )
    texts = read_json(examples, dict[str, Any])
    rng = random.Random(_SEED)

    def passages(docs: Sequence[JsonObject]) -> str:
        filled = []
        for number, doc in enumerate(docs, start=1):
            filled.append(_filled(texts["doc_prompt"], {**doc, "ID": number}))
        return "\n\n".join(filled)

    def fields(where: str, row: JsonObject) -> tuple[dict[str, str], Any]:
        instruction = texts["instruction"]
        demos = ""
        for demo in rng.sample(texts["demos"], _SHOTS):
            of_demo = {**demo, "instruction": instruction, "context": passages(demo["docs"])}
            demos += _filled(texts["demo_prompt"], of_demo) + "\n\n\n"
        question = text_field(where, row, "question")
        context = passages(row["docs"][:size])
        filled = {"demos": demos, "instruction": instruction, "question": question, "context": context}
        aliases_of_answers = row["answers"] if "qa_pairs" not in row else map(_short_answers_of, row["qa_pairs"])
        return filled, list(map("\n".join, aliases_of_answers))

    return fields


def _short_answers_of(question_and_answer: JsonObject) -> Sequence[str]:
    return list(question_and_answer["short_answers"])


def _filled(template: str, row: JsonObject) -> str:
    return fill_in(template, {name: str(value) for name, value in row.items()})


def _long(entry: HelmetTask, examples: Sequence[JsonObject], size: int, tokenizer: Any) -> Fields:
    """Questions about a long text, or its summary, of which `size` tokens stay; the answer, and a summary's points."""
    end = " ... [the rest of the text is omitted]"
    end_tokens = len(tokenizer(end, add_special_tokens=False)["input_ids"])

    def fields(where: str, row: JsonObject) -> tuple[dict[str, str], Any]:
        text = text_field(where, row, "context")
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) > size:
            text = _first_tokens(tokenizer, text, size - end_tokens) + end
        others = [example for example in examples if example is not row]
        demos = []
        for demo in random.Random(_SEED).sample(others, _SHOTS):
            question_of_demo, _ = _question_fields(demo)
            demos.append(_filled(entry.demo, question_of_demo))
        filled, answers = _question_fields(row)
        filled["demos"] = fill_in(entry.shown, {"demos": "\n\n".join(demos)})
        filled["context"] = text
        return filled, [*answers, *row.get("keypoints", [])]

    return fields


def _first_tokens(tokenizer: Any, text: str, count: int) -> str:
    """The beginning of a text that has `count` tokens; only fast tokenizers say where in the text a token ends."""
    if tokenizer.is_fast:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        _, last_character = encoding["offset_mapping"][count - 1]
        return text[:last_character]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False))


def _question_fields(row: JsonObject) -> tuple[dict[str, str], list[str]]:
    """The question, its options and the first answer of a row as texts; and the answers."""
    answers = list(_texts(row["answer"]))
    question = str(row.get("question", ""))
    if "options" not in row:
        return {"question": question, "answer": answers[0].strip()}, answers
    lettered = [f"{letter}. {option}" for letter, option in zip("ABCD", row["options"], strict=True)]
    right = row["options"].index(answers[0])
    fields = {"question": question, "options": "\n".join(lettered), "answer": "ABCD"[right]}
    return fields, ["ABCD"[right], lettered[right]]


def _demonstrations(name: str, key: str, rows: Sequence[JsonObject]) -> list[JsonObject]:
    """The first rows, shuffled with the question as the seed, each question once and never the row's own, `name`."""
    import numpy as np  # not at the top: `--help` imports this module

    others = []
    for row in rows:
        if str(row[key]) != name:
            others.append(row)
    demonstrations: dict[str, JsonObject] = {}
    for index in np.random.default_rng(_hash(name) % 2**31).permutation(len(others)):
        demonstrations.setdefault(str(others[index][key]), others[index])
    return list(demonstrations.values())[:_SHOTS]


def _hash(text: str) -> int:
    return int(hex_digest([text.encode()]), 16)


# Metrics


@metric("exact_label")
def _exact_label(prediction: str, reference: str) -> float:
    """Whether the first line says the reference, after `label:` where it says that (HELMET, parse_output)."""
    line = prediction.split("\n")[0]
    after_label = re.search("label:(.*)", line, re.IGNORECASE)
    if after_label is not None:
        line = after_label[1]
    label = re.sub("^label:", "", line.strip(), flags=re.IGNORECASE)
    return float(normalise(label) == normalise(reference))


@metric("ndcg_10")
def _ndcg(prediction: str, reference: str) -> float:
    """NDCG of the 10 first documents of the longest ranking in the first line, such as `3 > 1 > 2` (trec_eval's).

    The reference has each document and its gain, such as `12 3, 7 0`; brackets, colons and `ID` are left out.
    """
    gains = {}
    for document_and_gain in reference.split(", "):
        document, gain = document_and_gain.split()
        gains[document] = int(gain)
    best = _discounted(sorted(gains.values(), reverse=True))
    if best == 0:
        return 0.0
    line = re.sub(r"[\[\]:]", "", prediction.split("\n")[0]).lower().replace("id", "")
    longest = max(re.findall(r"\d+(?:\s*>\s*\d+)*", line), key=len, default="")
    gains_of_ranking = []
    for document in dict.fromkeys(map(str.strip, longest.split(">"))):
        gains_of_ranking.append(gains.get(document, 0))
    return _discounted(gains_of_ranking) / best


def _discounted(gains: Sequence[int]) -> float:
    total = 0.0
    for rank, gain in enumerate(gains[:10]):
        total += gain / math.log2(rank + 2)
    return total


@metric("letter_or_option")
def _letter_or_option(prediction: str, reference: str) -> float:
    """Whether the prediction is the letter, after `Answer:` where it says that, or holds the option with its letter."""
    if len(reference) > 1:
        return float(reference.lower() in prediction.lower())
    line = re.sub(r"^.*?answer:", "", prediction.replace("\n", " "), flags=re.IGNORECASE)
    return float(reference.lower() in (normalise(prediction), normalise(line)))


@sample_metric("short_answers")
def _short_answers(prediction: str, sample: Sample) -> float:
    """The share of the references of which an alias, one a line, occurs in the prediction (ALCE's STR-EM)."""
    text = normalise(prediction)
    hits = 0
    for reference in sample.references:
        hits += any(normalise(alias) in text for alias in reference.split("\n"))
    return hits / len(sample.references)


@sample_metric("listed_answers")
def _listed_answers(prediction: str, sample: Sample) -> float:
    """How many of 5 references, or of all where they are fewer, a list with commas holds (QAMPARI's recall of 5)."""
    line = re.sub(r"\[\d+\]", "", prediction.split("\n")[0]).rstrip(". ")
    items = set(map(normalise, line.split(",")))
    hits = 0
    for reference in sample.references:
        if not items.isdisjoint(map(normalise, reference.split("\n"))):
            hits += 1
    return min(1.0, hits / min(5, len(sample.references)))
