"""Real English and real code from every Python installation, split in two: a training and an evaluation part.

Documents are the language reference's topics (`pydoc_data.topics`) and the standard library's source files. A document
belongs to one part as a whole, by a hash of its name, so that the training mixture and the evaluation share none.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from keepsight.errors import UserError
from keepsight.files import hex_digest

Part = Literal["training", "evaluation"]

# Test suites, generated tables and third-party packages: not written to be read.
SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "ensurepip"),
    *("turtledemo", "pydoc_data", "__phello__"),
}

SHARED_WORDS = 6
"""An evaluation sentence whose first words, this many, occur in a training document counts as training text."""


@dataclass(frozen=True)
class Document:
    """A topic of the language reference (`topics/assert`), a library's source file, or a docstring by its object."""

    name: str
    text: str


def document_part(name: str) -> Part:
    """The part that the document `name` belongs to, the same on every machine; one in five is for evaluation.

    A package is one document here, and a module goes with its pure-Python twin (`_pydecimal` with `decimal`), because
    their texts repeat each other.
    """
    folder, _, topic = name.partition("/")
    group = topic if folder == "topics" else re.sub(r"^(_py|_)", "", folder.removesuffix(".py"))
    first_byte = int(hex_digest([group.encode()])[:2], 16)
    is_evaluation = first_byte % 5 == 0
    return "evaluation" if is_evaluation else "training"


def is_topic(document: Document) -> bool:
    """Whether the document is a topic of the language reference rather than a source file."""
    return document.name.startswith("topics/")


@lru_cache(maxsize=4)
def topic_documents(part: Part) -> tuple[Document, ...]:
    """The topics of the language reference that belong to `part`, by name."""
    documents = [Document(f"topics/{topic}", text) for topic, text in sorted(topics.items())]
    return tuple(document for document in documents if document_part(document.name) == part)


@lru_cache(maxsize=4)
def source_documents(part: Part) -> tuple[Document, ...]:
    """The library's source files that belong to `part`, by name; UserError if this Python has none on disk."""
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if _is_library(name) and document_part(name) == part:
            documents.append(Document(name, path.read_text(encoding="utf-8", errors="replace")))
    if not documents:
        raise UserError(
            f"{library}: no .py files of the standard library; use a Python that keeps its sources",
            field="library",
            code="missing",
        )
    return tuple(documents)


def _is_library(name: str) -> bool:
    """Whether a source file, by its path in the library, is written to be read."""
    for folder in name.split("/")[:-1]:
        if folder in SKIPPED_FOLDERS or folder.startswith("config-"):
            return False
    return not name.startswith("_sysconfigdata")


@lru_cache(maxsize=512)
def docstrings(document: Document) -> tuple[Document, ...]:
    """The docstrings of a source file by `module.Class.method`, module first; empty where it does not parse."""
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return ()
    module = document.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return tuple(_docstrings_below(tree, module))


def _docstrings_below(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> Iterator[Document]:
    text = ast.get_docstring(node)
    if text:
        yield Document(name, text)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _docstrings_below(child, f"{name}.{child.name}")


def prose(text: str) -> list[str]:
    """The paragraphs of `text` that are running English, each on one line; listings and tables are left out."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    return [paragraph for paragraph in paragraphs if _is_prose(paragraph)]


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < 120 or not paragraph[0].isupper() or paragraph[-1] not in ".!?":
        return False
    plain = sum(character.isalpha() or character in " ,.'’" for character in paragraph)
    return plain >= 0.96 * len(paragraph) and not re.search(r">>>|::|  |[=_{}\[\]<>|\\]", paragraph)


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, in order."""
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)


@lru_cache(maxsize=1)
def evaluation_paragraphs() -> tuple[str, ...]:
    """Prose of the evaluation part, document by document, without the sentences that are also in training documents."""
    texts = [topic.text for topic in topic_documents("evaluation")]
    for document in source_documents("evaluation"):
        texts += [docstring.text for docstring in docstrings(document)]
    paragraphs: list[list[str]] = []  # each as its sentences
    openings: set[tuple[str, ...]] = set()
    for text in texts:
        for paragraph in prose(text):
            paragraphs.append(sentences(paragraph))
            openings.update(map(_opening, paragraphs[-1]))

    shared_openings = _openings_in_training(openings)
    used_sentences: set[str] = set()
    evaluation_texts = []
    for paragraph_sentences in paragraphs:
        fresh = [sentence for sentence in paragraph_sentences if sentence not in used_sentences]
        fresh = [sentence for sentence in fresh if _opening(sentence) not in shared_openings]
        fresh = [sentence for sentence in fresh if len(_opening(sentence)) == SHARED_WORDS]
        used_sentences.update(fresh)
        if fresh:
            evaluation_texts.append(" ".join(fresh))
    return tuple(evaluation_texts)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _opening(sentence: str) -> tuple[str, ...]:
    return tuple(_words(sentence)[:SHARED_WORDS])


def _openings_in_training(openings: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Those of the openings whose words follow each other anywhere in a training document."""
    shared_openings: set[tuple[str, ...]] = set()
    for document in topic_documents("training") + source_documents("training"):
        words = _words(document.text)
        shifted_words = [words[start:] for start in range(SHARED_WORDS)]
        windows = zip(*shifted_words, strict=False)
        shared_openings.update(openings.intersection(windows))
    return shared_openings
