"""The texts of RULER (arXiv:2404.06654; NVIDIA/RULER, scripts/data/synthetic) and their sources.

A generator is a function of a random generator and a size; the same seed gives the same needles at every size, so that
the size can be searched for. Essays and questions are read from a user's file, else from the Hub, else made from
Python's documentation, which is in English and always at hand but leads to other scores than the published texts.
"""

import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from math import pi
from pathlib import Path
from typing import Any, Literal, NamedTuple

from keepsight.corpus import Document, docstrings, evaluation_paragraphs, sentences, source_documents
from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import fill_in, hub_rows, read_text
from keepsight.eval.tasks.niah import listed
from keepsight.files import own_yaml, read_json

OFFLINE = "Python's documentation"
_WORDING = own_yaml("keepsight.eval.tasks", "ruler")

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = [round(100 * step / 39) for step in range(40)]
"""Percent; a needle in an essay stands at one of these."""


class RulerText(NamedTuple):
    """A prompt in parts, with its answer: the context is the haystack, and `prefix` begins the answer.

    `depth` is the position of the first reference in the context, 0 to 1; None where that has no meaning.
    """

    before: str
    context: str
    after: str
    prefix: str
    references: tuple[str, ...]
    depth: float | None = None


class NeedleText(NamedTuple):
    """The parameters of a needle task: haystack, types of keys and values, keys, values of each, keys asked for."""

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1


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


def _worded(kind: str, context: str, references: Iterable[str], depth: float | None = None, **fields: str) -> RulerText:
    """A text in RULER's wording, with its fields."""
    before, after, prefix = (fill_in(text, fields) if fields else text for text in _WORDING[kind].values())
    return RulerText(before, context, after, prefix, tuple(references), depth)


def needles(knobs: NeedleText, essay: Sequence[str], rng: random.Random, size: int) -> RulerText:
    """Key-value sentences in a haystack of `size` words of the essay, or `size` sentences."""
    facts = [
        (_drawn(knobs.key, rng), [_drawn(knobs.value, rng) for _ in range(knobs.values)]) for _ in range(knobs.keys)
    ]
    asked = rng.sample(facts, knobs.asked)
    hidden = [_fact(knobs.value, key, value) for key, values in facts for value in values]
    rng.shuffle(hidden)
    is_essay = knobs.haystack == "essay"
    context = _essay_with(hidden, essay, rng, size) if is_essay else _lines_with(hidden, knobs, rng, size)
    query = listed([key for key, _ in asked])
    if knobs.asked * knobs.values == 1:
        words = {"some": "A special magic", "what": knobs.value[:-1], "are": "is", "are_all": "is"}
    else:
        words = {"some": "Some special magic", "what": knobs.value, "are": "are", "are_all": "are all"}
    depth = context.index(_fact(knobs.value, asked[0][0], asked[0][1][0])) / len(context)
    return _worded("niah", context, (value for _, values in asked for value in values), depth, query=query, **words)


def _drawn(kind: str, rng: random.Random) -> str:
    if kind == "words":
        return _drawn_pair(rng)
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randint(10**6, 10**7 - 1))


def _fact(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _essay_with(hidden: Sequence[str], essay: Sequence[str], rng: random.Random, size: int) -> str:
    """The essay's first words, repeated where it has too few, with sentences hidden between its own."""
    words = [*essay] * (size // len(essay)) + [*essay[: size % len(essay)]]
    hay = sentences(" ".join(words))
    places = sorted(len(hay) * depth // 100 for depth in rng.sample(_DEPTHS, len(hidden)))
    for place, sentence in sorted(zip(places, hidden, strict=True), key=lambda each: each[0], reverse=True):
        hay.insert(place, sentence)
    return " ".join(hay)


def _lines_with(hidden: Sequence[str], knobs: NeedleText, rng: random.Random, size: int) -> str:
    lines = [NOISE] * size
    if knobs.haystack == "needles":
        others = random.Random(rng.random())  # so that what comes after does not depend on the size
        lines = [_fact(knobs.value, _drawn(knobs.key, others), _drawn(knobs.value, others)) for _ in range(size)]
    depths = sorted((rng.random() for _ in hidden), reverse=True)
    for depth, sentence in zip(depths, hidden, strict=True):
        lines.insert(int(depth * size), sentence)
    return "\n".join(lines)


_HOPS = 4


def variables(shown: int, rng: random.Random, size: int) -> RulerText:
    """A chain of assignments among `size` lines of noise, after an example among `shown` lines."""
    example = _chain(3, rng, shown)
    asked = _chain(5, rng, size)
    whole = example.before + example.context + example.after + example.prefix + " " + " ".join(example.references)
    return RulerText(f"{whole}\n\n{asked.before}", asked.context, asked.after, asked.prefix, asked.references)


def _chain(letters: int, rng: random.Random, size: int) -> RulerText:
    names: dict[str, None] = {}
    while len(names) <= _HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    chain, value = [*names], str(rng.randint(10000, 99998))
    lines = [f"VAR {chain[0]} = {value}"]
    lines += [f"VAR {name} = VAR {source} " for source, name in pairwise(chain)]
    places = sorted(rng.random() for _ in lines)
    text = [NOISE] * size
    for place, line in sorted(zip(places, lines, strict=True), reverse=True):
        text.insert(int(place * size), line)
    return _worded("vt", "\n".join(text).replace(". \n", ".\n"), chain, value=value, count=str(len(chain)))


_COMMON = 10


def common_words(short: bool, rng: random.Random, size: int) -> RulerText:
    """A numbered list in which 10 of `size` different words come more often, after an example; shorter if `short`."""
    example = _numbered(20 if short else 40, 3 if short else 10, 1 if short else 3, rng)
    asked = _numbered(size, 6 if short else 30, 1 if short else 3, rng)
    answer = " ".join(f"{place}. {word}" for place, word in enumerate(example.references, start=1))
    whole = f"{example.before}{example.context}{example.after}{example.prefix} {answer}"
    return RulerText(f"{whole}\n{asked.before}", asked.context, asked.after, asked.prefix, asked.references)


def _numbered(size: int, often: int, seldom: int, rng: random.Random) -> RulerText:
    words = _drawn_words(size, rng)
    listed = words[:_COMMON] * often + words[_COMMON:] * seldom
    rng.shuffle(listed)
    context = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
    return _worded("cwe", context, words[:_COMMON])


def frequent_words(vocabulary: int, rng: random.Random, size: int) -> RulerText:
    """About `size` coded words whose frequencies follow a zeta distribution (alpha 2); the most frequent is noise."""
    coded: dict[str, None] = {}
    while len(coded) < vocabulary:
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    words = ["...", *list(coded)[1:]]
    zeta = pi**2 / 6
    listed = [word for rank, word in enumerate(words, start=1) for _ in range(int(size * rank**-2 / zeta))]
    rng.shuffle(listed)
    return _worded("fwe", " ".join(listed), words[1:4])


class Question(NamedTuple):
    """A question with accepted answers, the indices of the documents that hold one, and those of related documents."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


def question_over(question: Question, texts: Sequence[str], rng: random.Random, size: int) -> RulerText:
    """A question over `size` documents, which include the needed ones; where there are too few, they are repeated."""
    near = rng.sample(question.near, len(question.near))
    known = {*question.needed, *near}
    others = [index for index in range(len(texts)) if index not in known]
    order = [*question.needed, *near, *rng.sample(others, len(others))]
    order = (order * (size // len(order) + 1))[: max(size, len(question.needed))]
    rng.shuffle(order)
    context = "\n\n".join(f"Document {place}:\n{texts[index]}" for place, index in enumerate(order, start=1))
    return _worded("qa", context, question.answers, question=question.text)


@lru_cache(maxsize=4)
def _words_of(kind: str) -> tuple[str, ...]:
    """The words of the package `wonderwords` of a kind (noun, adjective, verb), in alphabetical order."""
    text = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({line.strip() for line in text.splitlines() if line.strip()}))


@lru_cache(maxsize=1)
def _all_words() -> tuple[str, ...]:
    return tuple(sorted({*_words_of("noun"), *_words_of("adjective"), *_words_of("verb")}))


def _drawn_words(count: int, rng: random.Random) -> list[str]:
    """So many different words; where there are not enough, pairs of an adjective and a noun as well."""
    words = _all_words()
    if count <= len(words):
        return rng.sample(words, count)
    missing = count - len(words)
    pairs = dict.fromkeys(_drawn_pair(rng) for _ in range(2 * missing))
    return [*rng.sample(words, len(words)), *list(pairs)[:missing]]


def _drawn_pair(rng: random.Random) -> str:
    """Such as `dirty-testimony`, the keys of needles."""
    return f"{rng.choice(_words_of('adjective'))}-{rng.choice(_words_of('noun'))}"


class QaSource(NamedTuple):
    """Documents, the questions about them, and where both came from."""

    texts: tuple[str, ...]
    questions: tuple[Question, ...]
    note: str


@lru_cache(maxsize=4)
def essay_words(file: str | None) -> tuple[tuple[str, ...], str]:
    """The words of the essays, and where they came from; `file` is a text or RULER's PaulGrahamEssays.json."""
    if file is not None:
        text = read_json(Path(file), dict[str, Any]).get("text") if file.endswith(".json") else read_text(Path(file))
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{file}: expected text, or an object with it as RULER's PaulGrahamEssays.json")
        return tuple(text.split()), file
    name = "alessiodevoto/paul_graham_essays"
    if rows := hub_rows(name, "train"):
        return tuple(" ".join(str(row["text"]) for row in rows).split()), name
    return tuple(" ".join(evaluation_paragraphs()).split()), OFFLINE


@lru_cache(maxsize=4)
def squad(file: str | None) -> QaSource:
    """SQuAD's questions that have an answer (qa_1); `file` is SQuAD's own dev-v2.0.json."""
    name = "rajpurkar/squad_v2"
    if file is not None:
        return _from_file(file, lambda value: _asked(_squad_articles(value), file))
    if rows := hub_rows(name, "validation"):
        by_title: dict[str, list[tuple[str, str, list[str]]]] = {}
        for row in rows:
            by_title.setdefault(row["title"], []).append((row["context"], row["question"], row["answers"]["text"]))
        return _asked(by_title.values(), name)
    return _documentation_source(_one_hop)


@lru_cache(maxsize=4)
def hotpotqa(file: str | None) -> QaSource:
    """HotpotQA's questions in the setting with distractors (qa_2); `file` is its hotpot_dev_distractor_v1.json."""
    name = "hotpotqa/hotpot_qa"
    if file is not None:
        return _from_file(file, lambda rows: _hotpot(rows, file))
    if rows := hub_rows(name, "validation", "distractor"):
        for row in rows:
            row["context"] = list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
            row["supporting_facts"] = [[title] for title in row["supporting_facts"]["title"]]
        return _hotpot(rows, name)
    return _documentation_source(_two_hops)


def _from_file(file: str, read: Callable[[Any], QaSource]) -> QaSource:
    value = read_json(Path(file))
    try:
        return read(value)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{file}: not in the layout of the data set's own file ({error!r})") from None


Article = list[tuple[str, str, list[str]]]
"""Paragraph, question and answers."""


def _squad_articles(value: Any) -> list[Article]:
    return [
        [
            (paragraph["context"], asked["question"], [answer["text"] for answer in asked["answers"]])
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
        for article in value["data"]
    ]


def _asked(articles: Iterable[Article], note: str) -> QaSource:
    """Every question with its paragraph and the other ones of its article; unanswerable ones have no answers."""
    articles = list(articles)
    texts = sorted({paragraph for article in articles for paragraph, _, _ in article})
    place = {text: index for index, text in enumerate(texts)}
    questions = []
    for article in articles:
        own = sorted({place[paragraph] for paragraph, _, _ in article})
        for paragraph, question, answers in article:
            if answers:
                needed = place[paragraph]
                near = tuple(index for index in own if index != needed)
                questions.append(Question(question, tuple(answers), (needed,), near))
    return QaSource(tuple(texts), tuple(questions), note)


def _hotpot(rows: Iterable[Any], note: str) -> QaSource:
    """The paragraphs with the supporting facts are needed, the question's other ones are near."""
    rows = list(rows)
    named = [{title: f"{title}\n{''.join(parts)}" for title, parts in row["context"]} for row in rows]
    texts = sorted({text for paragraphs in named for text in paragraphs.values()})
    place = {text: index for index, text in enumerate(texts)}
    questions = []
    for row, paragraphs in zip(rows, named, strict=True):
        facts = {fact[0] for fact in row["supporting_facts"]}
        needed = tuple(place[text] for title, text in paragraphs.items() if title in facts)
        near = tuple(place[text] for title, text in paragraphs.items() if title not in facts)
        questions.append(Question(row["question"], (row["answer"],), needed, near))
    return QaSource(tuple(texts), tuple(questions), note)


def _documentation_source(ask: Callable[[dict[str, int], list[Document]], Iterator[Question]]) -> QaSource:
    """The documented objects of the standard library that have a first sentence of their own."""
    entries = [entry for document in source_documents("evaluation") for entry in docstrings(document)]
    known: dict[str, Document] = {}
    for entry in entries:
        if 20 <= len(_opening(entry)) <= 200 and len(entry.text) < 1500:
            known.setdefault(_opening(entry), entry)
    kept = [*known.values()]
    texts = tuple(f"{entry.name}\n{' '.join(entry.text.split())}" for entry in kept)
    place = {entry.name: index for index, entry in enumerate(kept)}
    return QaSource(texts, tuple(ask(place, kept)), OFFLINE)


def _opening(entry: Document) -> str:
    return re.split(r"(?<=[.!?])\s|\n\s*\n", entry.text.strip())[0].replace("\n", " ").rstrip(".")


def _one_hop(place: dict[str, int], entries: list[Document]) -> Iterator[Question]:
    for entry in entries:
        text = f'What is the full name of what Python documents as "{_opening(entry)}"?'
        yield Question(text, (entry.name,), (place[entry.name],))


def _two_hops(place: dict[str, int], entries: list[Document]) -> Iterator[Question]:
    """A method by what is said of it and of its class, which are two documents."""
    by_name = {entry.name: entry for entry in entries}
    for entry in entries:
        owner, _, method = entry.name.rpartition(".")
        if owner in by_name and not method.startswith("_"):
            text = (
                f'What is the method called that Python documents as "{_opening(entry)}", of the class or module '
                f'that it documents as "{_opening(by_name[owner])}"?'
            )
            yield Question(text, (method,), (place[owner], place[entry.name]))
