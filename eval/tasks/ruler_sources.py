"""What RULER's tasks are made from: essays, and questions with their documents.

Each is read from a file of the user's, else from the Hub, else made from Python's documentation, which is in English
and always at hand but leads to other scores than the published texts.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from keepsight.corpus import Docstring, docstrings, evaluation_paragraphs, source_documents
from keepsight.errors import UserError
from keepsight.eval.tasks.hub import hub_rows
from keepsight.eval.tasks.ruler_texts import Question

OFFLINE = "Python's documentation"


class QaSource(NamedTuple):
    """Documents, the questions about them, and where both came from."""

    texts: tuple[str, ...]
    questions: tuple[Question, ...]
    note: str


@lru_cache(maxsize=4)
def essay_words(file: str | None) -> tuple[tuple[str, ...], str]:
    """The words of the essays, and where they came from.

    Args:
        file: A text file, RULER's PaulGrahamEssays.json, or None.

    Raises:
        UserError: the file cannot be read.
    """
    if file is not None:
        text = _read(Path(file))
        return tuple((_loaded(file, text)["text"] if file.endswith(".json") else text).split()), file
    name = "alessiodevoto/paul_graham_essays"
    if rows := hub_rows(name, "train"):
        return tuple(" ".join(str(row["text"]) for row in rows).split()), name
    return tuple(" ".join(evaluation_paragraphs()).split()), OFFLINE


@lru_cache(maxsize=4)
def squad(file: str | None) -> QaSource:
    """SQuAD's questions that have an answer (qa_1).

    Args:
        file: SQuAD's own dev-v2.0.json, or None.

    Raises:
        UserError: the file cannot be read.
    """
    name = "rajpurkar/squad_v2"
    if file is not None:
        articles = _fields(file, _loaded(file, _read(Path(file))), _squad_articles)
        return _asked(articles, file)
    if rows := hub_rows(name, "validation"):
        by_title: dict[str, list[tuple[str, str, list[str]]]] = {}
        for row in rows:
            by_title.setdefault(row["title"], []).append((row["context"], row["question"], row["answers"]["text"]))
        return _asked(by_title.values(), name)
    return _documentation_source(_one_hop)


@lru_cache(maxsize=4)
def hotpotqa(file: str | None) -> QaSource:
    """HotpotQA's questions in the setting with distractors (qa_2).

    Args:
        file: HotpotQA's own hotpot_dev_distractor_v1.json, or None.

    Raises:
        UserError: the file cannot be read.
    """
    name = "hotpotqa/hotpot_qa"
    if file is not None:
        return _fields(file, _loaded(file, _read(Path(file))), lambda rows: _hotpot(rows, file))
    if rows := hub_rows(name, "validation", "distractor"):
        for row in rows:
            row["context"] = list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
            row["supporting_facts"] = [[title] for title in row["supporting_facts"]["title"]]
        return _hotpot(rows, name)
    return _documentation_source(_two_hops)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from None


def _loaded(file: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None


def _fields(file: str, value: Any, read: Callable[[Any], Any]) -> Any:
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


def _documentation_source(ask: Callable[[dict[str, int], list[Docstring]], Iterator[Question]]) -> QaSource:
    """The documented objects of the standard library that have a first sentence of their own."""
    entries = [entry for document in source_documents("evaluation") for entry in docstrings(document)]
    known: dict[str, Docstring] = {}
    for entry in entries:
        if 20 <= len(_opening(entry)) <= 200 and len(entry.text) < 1500:
            known.setdefault(_opening(entry), entry)
    kept = [*known.values()]
    texts = tuple(f"{entry.name}\n{' '.join(entry.text.split())}" for entry in kept)
    place = {entry.name: index for index, entry in enumerate(kept)}
    return QaSource(texts, tuple(ask(place, kept)), OFFLINE)


def _opening(entry: Docstring) -> str:
    return re.split(r"(?<=[.!?])\s|\n\s*\n", entry.text.strip())[0].replace("\n", " ").rstrip(".")


def _one_hop(place: dict[str, int], entries: list[Docstring]) -> Iterator[Question]:
    for entry in entries:
        text = f'What is the full name of what Python documents as "{_opening(entry)}"?'
        yield Question(text, (entry.name,), (place[entry.name],))


def _two_hops(place: dict[str, int], entries: list[Docstring]) -> Iterator[Question]:
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
