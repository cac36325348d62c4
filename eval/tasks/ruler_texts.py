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
from keepsight.files import package_yaml, read_json

OFFLINE = "Python's documentation"
_WORDING = package_yaml("keepsight.eval.tasks", "ruler")

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
    before, after, prefix = _WORDING[kind].values()
    if fields:
        before = fill_in(before, fields)
        after = fill_in(after, fields)
        prefix = fill_in(prefix, fields)
    return RulerText(before, context, after, prefix, tuple(references), depth)


# Needles


def needles(knobs: NeedleText, essay: Sequence[str], rng: random.Random, size: int) -> RulerText:
    """Key-value sentences in a haystack of `size` words of the essay, or `size` sentences."""
    values_of_keys = []
    for _ in range(knobs.keys):
        key = _draw(knobs.key, rng)
        values_of_keys.append((key, [_draw(knobs.value, rng) for _ in range(knobs.values)]))
    asked = rng.sample(values_of_keys, knobs.asked)
    sentences_to_hide = []
    for key, values in values_of_keys:
        sentences_to_hide += [_fact(knobs.value, key, value) for value in values]
    rng.shuffle(sentences_to_hide)
    if knobs.haystack == "essay":
        context = _essay_with(sentences_to_hide, essay, rng, size)
    else:
        context = _lines_with(sentences_to_hide, knobs, rng, size)

    asked_keys = []
    references: list[str] = []
    for key, values in asked:
        asked_keys.append(key)
        references += values
    first_key, values_of_first = asked[0]
    first_fact = _fact(knobs.value, first_key, values_of_first[0])
    depth = context.index(first_fact) / len(context)
    if knobs.asked * knobs.values == 1:
        words = {"some": "A special magic", "what": knobs.value[:-1], "are": "is", "are_all": "is"}
    else:
        words = {"some": "Some special magic", "what": knobs.value, "are": "are", "are_all": "are all"}
    return _worded("niah", context, references, depth, query=listed(asked_keys), **words)


def _draw(kind: str, rng: random.Random) -> str:
    """A key or a value."""
    if kind == "words":
        return _draw_adjective_noun(rng)
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randint(10**6, 10**7 - 1))


def _fact(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _essay_with(sentences_to_hide: Sequence[str], essay: Sequence[str], rng: random.Random, size: int) -> str:
    """The essay's first words, repeated where it has too few, with sentences hidden between its own."""
    words = [*essay] * (size // len(essay)) + [*essay[: size % len(essay)]]
    haystack = sentences(" ".join(words))
    depths = rng.sample(_DEPTHS, len(sentences_to_hide))
    indices = sorted(len(haystack) * depth // 100 for depth in depths)
    placed = sorted(zip(indices, sentences_to_hide, strict=True), key=lambda pair: pair[0], reverse=True)
    for index, sentence in placed:
        haystack.insert(index, sentence)
    return " ".join(haystack)


def _lines_with(sentences_to_hide: Sequence[str], knobs: NeedleText, rng: random.Random, size: int) -> str:
    """Lines of noise, or of other needles, with sentences hidden between them."""
    lines = [NOISE] * size
    if knobs.haystack == "needles":
        others = random.Random(rng.random())  # so that what comes after does not depend on the size
        lines = []
        for _ in range(size):
            key = _draw(knobs.key, others)
            lines.append(_fact(knobs.value, key, _draw(knobs.value, others)))
    depths = sorted((rng.random() for _ in sentences_to_hide), reverse=True)
    for depth, sentence in zip(depths, sentences_to_hide, strict=True):
        lines.insert(int(depth * size), sentence)
    return "\n".join(lines)


# Variable tracking


_HOPS = 4


def variables(example_lines: int, rng: random.Random, size: int) -> RulerText:
    """A chain of assignments among `size` lines of noise, after an example among `example_lines` lines."""
    example = _chain(3, rng, example_lines)
    text = _chain(5, rng, size)
    answer = " ".join(example.references)
    example_text = f"{example.before}{example.context}{example.after}{example.prefix} {answer}"
    return text._replace(before=f"{example_text}\n\n{text.before}")


def _chain(letters: int, rng: random.Random, size: int) -> RulerText:
    names: dict[str, None] = {}
    while len(names) <= _HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    chain = list(names)
    value = str(rng.randint(10000, 99998))
    assignments = [f"VAR {chain[0]} = {value}"]
    for source, name in pairwise(chain):
        assignments.append(f"VAR {name} = VAR {source} ")
    depths = sorted(rng.random() for _ in assignments)
    lines = [NOISE] * size
    for depth, assignment in sorted(zip(depths, assignments, strict=True), reverse=True):
        lines.insert(int(depth * size), assignment)
    return _worded("vt", "\n".join(lines).replace(". \n", ".\n"), chain, value=value, count=str(len(chain)))


# Common and frequent words

_COMMON = 10


def common_words(short: bool, rng: random.Random, size: int) -> RulerText:
    """A numbered list in which 10 of `size` different words come more often, after an example; shorter if `short`."""
    if short:
        example = _numbered_words(20, 3, 1, rng)
        text = _numbered_words(size, 6, 1, rng)
    else:
        example = _numbered_words(40, 10, 3, rng)
        text = _numbered_words(size, 30, 3, rng)
    answer = _numbered(example.references)
    example_text = f"{example.before}{example.context}{example.after}{example.prefix} {answer}"
    return text._replace(before=f"{example_text}\n{text.before}")


def _numbered_words(size: int, common_count: int, rare_count: int, rng: random.Random) -> RulerText:
    words = _draw_words(size, rng)
    repeated = words[:_COMMON] * common_count + words[_COMMON:] * rare_count
    rng.shuffle(repeated)
    return _worded("cwe", _numbered(repeated), words[:_COMMON])


def _numbered(words: Iterable[str]) -> str:
    """Such as `1. apple 2. pear`."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(vocabulary: int, rng: random.Random, size: int) -> RulerText:
    """About `size` coded words whose frequencies follow a zeta distribution (alpha 2); the most frequent is noise."""
    coded: dict[str, None] = {}
    while len(coded) < vocabulary:
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    words = list(coded)
    words[0] = "..."
    zeta = pi**2 / 6
    repeated: list[str] = []
    for rank, word in enumerate(words, start=1):
        repeated += [word] * int(size * rank**-2 / zeta)
    rng.shuffle(repeated)
    return _worded("fwe", " ".join(repeated), words[1:4])


# Questions


class Question(NamedTuple):
    """A question with accepted answers, the indices of the documents that hold one, and those of related documents."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


def question_over(question: Question, texts: Sequence[str], rng: random.Random, size: int) -> RulerText:
    """A question over `size` documents, which include the needed ones; where there are too few, they are repeated."""
    near = rng.sample(question.near, len(question.near))
    of_question = {*question.needed, *near}
    others = sorted(set(range(len(texts))) - of_question)
    order = [*question.needed, *near, *rng.sample(others, len(others))]
    order = (order * (size // len(order) + 1))[: max(size, len(question.needed))]
    rng.shuffle(order)
    documents = []
    for number, index in enumerate(order, start=1):
        documents.append(f"Document {number}:\n{texts[index]}")
    return _worded("qa", "\n\n".join(documents), question.answers, question=question.text)


# Words


@lru_cache(maxsize=4)
def _words_of(kind: str) -> tuple[str, ...]:
    """The words of the package `wonderwords` of a kind (noun, adjective, verb), in alphabetical order."""
    text = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(sorted(set(filter(None, map(str.strip, text.splitlines())))))


@lru_cache(maxsize=1)
def _all_words() -> tuple[str, ...]:
    return tuple(sorted({*_words_of("noun"), *_words_of("adjective"), *_words_of("verb")}))


def _draw_words(count: int, rng: random.Random) -> list[str]:
    """So many different words; where there are not enough, pairs of an adjective and a noun as well."""
    words = _all_words()
    if count <= len(words):
        return rng.sample(words, count)
    missing = count - len(words)
    pairs = dict.fromkeys(_draw_adjective_noun(rng) for _ in range(2 * missing))
    return [*rng.sample(words, len(words)), *list(pairs)[:missing]]


def _draw_adjective_noun(rng: random.Random) -> str:
    """Such as `dirty-testimony`, the keys of needles."""
    return f"{rng.choice(_words_of('adjective'))}-{rng.choice(_words_of('noun'))}"


# Sources


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
            raise UserError(
                f"{file}: expected text, or an object with it as RULER's PaulGrahamEssays.json",
                field=file,
                code="file",
            )
        return tuple(text.split()), file
    name = "alessiodevoto/paul_graham_essays"
    rows = hub_rows(name, "train")
    if rows:
        return tuple(" ".join(str(row["text"]) for row in rows).split()), name
    return tuple(" ".join(evaluation_paragraphs()).split()), OFFLINE


@lru_cache(maxsize=4)
def squad(file: str | None) -> QaSource:
    """SQuAD's questions that have an answer (qa_1); `file` is SQuAD's own dev-v2.0.json."""
    name = "rajpurkar/squad_v2"
    if file is not None:
        return _from_file(file, _squad_source)
    rows = hub_rows(name, "validation")
    if not rows:
        return _documentation_source(_one_hop)
    by_title: dict[str, Article] = {}
    for row in rows:
        by_title.setdefault(row["title"], []).append((row["context"], row["question"], row["answers"]["text"]))
    return _source_of_articles(by_title.values(), name)


@lru_cache(maxsize=4)
def hotpotqa(file: str | None) -> QaSource:
    """HotpotQA's questions in the setting with distractors (qa_2); `file` is its hotpot_dev_distractor_v1.json."""
    name = "hotpotqa/hotpot_qa"
    if file is not None:
        return _from_file(file, _hotpot_source)
    rows = hub_rows(name, "validation", "distractor")
    if not rows:
        return _documentation_source(_two_hops)
    for row in rows:
        row["context"] = list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
        row["supporting_facts"] = [[title] for title in row["supporting_facts"]["title"]]
    return _hotpot_source(rows, name)


def _from_file(file: str, read: Callable[[Any, str], QaSource]) -> QaSource:
    value = read_json(Path(file))
    try:
        return read(value, file)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{file}: not in the layout of the data set's own file ({error!r})", field=Path(file).name, code="file"
        ) from None


Article = list[tuple[str, str, list[str]]]
"""Paragraph, question and answers."""


def _squad_source(value: Any, note: str) -> QaSource:
    articles = []
    for article in value["data"]:
        questions = []
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = [answer["text"] for answer in question["answers"]]
                questions.append((paragraph["context"], question["question"], answers))
        articles.append(questions)
    return _source_of_articles(articles, note)


def _source_of_articles(articles: Iterable[Article], note: str) -> QaSource:
    """Every question with its paragraph and the other ones of its article; unanswerable ones have no answers."""
    articles = list(articles)
    paragraphs_of_articles = []
    for article in articles:
        paragraphs_of_articles.append({paragraph for paragraph, _, _ in article})
    texts = sorted(set().union(*paragraphs_of_articles))
    index_of = _indices(texts)

    questions = []
    for article, paragraphs in zip(articles, paragraphs_of_articles, strict=True):
        of_article = sorted(map(index_of.__getitem__, paragraphs))
        for paragraph, question, answers in article:
            if answers:
                needed = index_of[paragraph]
                near = [*of_article]
                near.remove(needed)
                questions.append(Question(question, tuple(answers), (needed,), tuple(near)))
    return QaSource(tuple(texts), tuple(questions), note)


def _hotpot_source(rows: Iterable[Any], note: str) -> QaSource:
    """The paragraphs with the supporting facts are needed, the question's other ones are near."""
    rows = list(rows)
    paragraphs_of_rows = []
    paragraphs: set[str] = set()
    for row in rows:
        by_title = {title: f"{title}\n{''.join(parts)}" for title, parts in row["context"]}
        paragraphs_of_rows.append(by_title)
        paragraphs.update(by_title.values())
    texts = sorted(paragraphs)
    index_of = _indices(texts)

    questions = []
    for row, by_title in zip(rows, paragraphs_of_rows, strict=True):
        supporting = {fact[0] for fact in row["supporting_facts"]}
        needed: list[int] = []
        near: list[int] = []
        for title, text in by_title.items():
            indices = needed if title in supporting else near
            indices.append(index_of[text])
        questions.append(Question(row["question"], (row["answer"],), tuple(needed), tuple(near)))
    return QaSource(tuple(texts), tuple(questions), note)


def _indices(names: Iterable[str]) -> dict[str, int]:
    """The position of each name."""
    return {name: index for index, name in enumerate(names)}


def _documentation_source(ask: Callable[[dict[str, int], list[Document]], Iterator[Question]]) -> QaSource:
    """The documented objects of the standard library that have a first sentence of their own."""
    by_opening: dict[str, Document] = {}
    for document in source_documents("evaluation"):
        for entry in docstrings(document):
            if 20 <= len(_opening(entry)) <= 200 and len(entry.text) < 1500:
                by_opening.setdefault(_opening(entry), entry)
    entries = list(by_opening.values())
    names = []
    texts = []
    for entry in entries:
        names.append(entry.name)
        texts.append(f"{entry.name}\n{' '.join(entry.text.split())}")
    return QaSource(tuple(texts), tuple(ask(_indices(names), entries)), OFFLINE)


def _opening(entry: Document) -> str:
    return re.split(r"(?<=[.!?])\s|\n\s*\n", entry.text.strip())[0].replace("\n", " ").rstrip(".")


def _one_hop(index_of: dict[str, int], entries: list[Document]) -> Iterator[Question]:
    """An object by what is said of it."""
    for entry in entries:
        text = f'What is the full name of what Python documents as "{_opening(entry)}"?'
        yield Question(text, (entry.name,), (index_of[entry.name],))


def _two_hops(index_of: dict[str, int], entries: list[Document]) -> Iterator[Question]:
    """A method by what is said of it and of its class, which are two documents."""
    by_name = {entry.name: entry for entry in entries}
    for entry in entries:
        owner, _, method = entry.name.rpartition(".")
        if owner in by_name and not method.startswith("_"):
            text = (
                f'What is the method called that Python documents as "{_opening(entry)}", of the class or module '
                f'that it documents as "{_opening(by_name[owner])}"?'
            )
            yield Question(text, (method,), (index_of[owner], index_of[entry.name]))
