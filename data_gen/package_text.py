"""Prompts over the text that comes with Python: its language reference, docstrings and source files."""

import random
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from keepsight.corpus import Document, docstrings, sentences, source_documents, topic_documents
from keepsight.data_gen.prompts import (
    CHARACTERS_PER_TOKEN,
    Prompt,
    Request,
    Share,
    cut_at_word,
    fit_prompt,
    fit_text,
    user_prompt,
)
from keepsight.data_gen.words import wordings

Entry = tuple[str, str]
"""Name and text of a docstring or of a section."""
_SHORTEST_REPEATED = 60
"""Characters of the shortest paragraph that is to be repeated, if there is one."""


@dataclass(frozen=True)
class Documentation:
    """One document with a question or a task about the whole of it, or about one of its names.

    Attributes:
        topics: Share of prompts over the language reference; the others are over docstrings.
        about_name: Share of docstring prompts that ask about one object.
    """

    topics: Share = 0.5
    about_name: Share = 0.6

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        opening = rng.choice(wordings("openings"))
        task = rng.choice(wordings("whole_passage"))
        position = rng.random()
        if rng.random() < self.topics:
            return _topic_prompt(opening, task, position, request)

        entries = _long_docstrings()
        start = int(position * len(entries))
        if rng.random() < self.about_name:
            task = rng.choice(wordings("about_name"))
        asked_position = rng.random()

        def build(characters: int) -> str:
            shown = _consecutive(entries, start, characters)
            manual = "\n\n".join(f"{name}\n{text}" for name, text in shown)
            asked_name, _ = shown[int(asked_position * len(shown))]
            return str(opening.format(text=manual[: max(characters, 80)], task=task.format(name=asked_name)))

        return user_prompt("documentation/docstrings", fit_text(build, request))


def _topic_prompt(opening: str, task: str, position: float, request: Request) -> Prompt:
    """Paragraphs of a section of the language reference, and a task about all of them."""
    section = _long_enough(topic_documents("training"), request).text

    def build(characters: int) -> str:
        return opening.format(text=paragraphs_from(section, position, characters), task=task)

    return user_prompt("documentation/topic", fit_text(build, request))


def _consecutive(entries: tuple[Entry, ...], start: int, characters: int) -> list[Entry]:
    """Entries from index `start` on, about `characters` characters of them; after the last one comes the first."""
    shown: list[Entry] = []
    length = 0
    for name, text in entries[start:] + entries[:start]:
        length += len(name) + len(text) + 4
        if shown and length > characters:
            break
        shown.append((name, text))
    return shown


@dataclass(frozen=True)
class Passages:
    """Several numbered passages and a question that needs one of them.

    Attributes:
        quoted: Share of prompts that quote a passage; the others ask about an object by its name.
    """

    quoted: Share = 0.5

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        docstring_entries = _long_docstrings()
        entries = [rng.choice(docstring_entries) for _ in range(2 + request.tokens // 30)]
        question_list = "which_passage" if rng.random() < self.quoted else "about_name"
        numbering = rng.choice(wordings("numberings"))
        question = rng.choice(wordings(question_list))
        opening = rng.choice(wordings("openings"))
        asked_position = rng.random()

        def build(characters: int) -> str:
            shown = _excerpts(entries, 1, characters)
            name, text = shown[int(asked_position * len(shown))]
            first_words = " ".join(text.split()[:9])
            task = question.format(name=name, quote=first_words)
            return str(opening.format(text=_numbered_passages(numbering, shown), task=task))

        return user_prompt("documentation/passages", fit_text(build, request))


@lru_cache(maxsize=1)
def _long_docstrings() -> tuple[Entry, ...]:
    """Name and text of the training part's longer docstrings, in the order of the library."""
    entries = []
    for document in source_documents("training"):
        for docstring in docstrings(document):
            text = docstring.text.strip()
            if len(text) >= 150:
                entries.append((docstring.name, text))
    return tuple(entries)


def paragraphs_from(text: str, position: float, characters: int) -> str:
    """Whole paragraphs of `text`, about `characters` characters, from one at `position` (0 to 1) or earlier."""
    paragraphs = text.strip().split("\n\n")
    start = int(position * len(paragraphs))
    while start > 0 and len("\n\n".join(paragraphs[start:])) < characters:
        start -= 1
    end = start + 1
    while end < len(paragraphs) and len("\n\n".join(paragraphs[start : end + 1])) <= characters:
        end += 1
    return "\n\n".join(paragraphs[start:end])[: max(characters, 80)]


def _excerpts(entries: list[Entry], least: int, characters: int) -> list[Entry]:
    """The first entries, at least `least`, with truncated texts of about `characters` characters in all."""
    most_entries = min(len(entries), characters // 400)
    excerpt_length = max(120, characters // max(1, most_entries))
    count = max(least, characters // excerpt_length)
    return [(name, text[:excerpt_length]) for name, text in entries[:count]]


def _numbered_passages(numbering: str, entries: list[Entry]) -> str:
    passages = []
    for number, (_, text) in enumerate(entries, 1):
        passages.append(numbering.format(number=number, text=text))
    return "\n\n".join(passages)


@dataclass(frozen=True)
class DescribedPassages:
    """Several numbered passages, and the summary of one of them: which is it? Its number is the response.

    The passages are docstrings without their first paragraphs, one of which is the summary.
    """

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        summarized = _summarized_docstrings()
        entries = rng.sample(summarized, min(2 + request.tokens // 30, len(summarized)))
        asked_position = rng.random()
        numbering = rng.choice(wordings("numberings"))
        opening = rng.choice(wordings("openings"))
        wording = rng.choice(wordings("described_passage"))

        def make(characters: int) -> Prompt:
            shown = _excerpts(entries, 2, characters)
            asked = int(asked_position * len(shown))
            summary, _ = shown[asked]
            task = wording.format(summary=summary)
            text = opening.format(text=_numbered_passages(numbering, shown), task=task)
            return replace(user_prompt("documentation/described", text), response=f"Passage {asked + 1}")

        return fit_prompt(make, request)


@dataclass(frozen=True)
class ReconstructionSource:
    """Paragraphs of the language reference, one of which is to be repeated word for word. It is the response."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        section = _long_enough(topic_documents("training"), request).text
        position = rng.random()
        asked_position = rng.random()
        opening = rng.choice(wordings("openings"))
        wording = rng.choice(wordings("repeat"))

        def make(characters: int) -> Prompt:
            paragraphs = paragraphs_from(section, position, characters).split("\n\n")
            candidates = [paragraph for paragraph in paragraphs if len(paragraph) >= _SHORTEST_REPEATED]
            if not candidates:
                candidates = [max(paragraphs, key=len)]
            paragraph = candidates[int(asked_position * len(candidates))].strip()
            first_words = " ".join(paragraph.split()[:6])
            text = opening.format(text="\n\n".join(paragraphs), task=wording.format(start=first_words))
            return replace(user_prompt("documentation/repeated", text), response=paragraph)

        return fit_prompt(make, request)


@dataclass(frozen=True)
class Dialogue:
    """Several documents and a conversation about them, of which the model writes the next answer.

    Documents are sections of the language reference and docstrings, the earlier answers sentences of them.
    """

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        entries = []
        for _ in range(rng.randint(3, 6)):
            source = _sections() if rng.random() < 0.5 else _long_docstrings()
            entry = rng.choice(source)
            if entry not in entries:
                entries.append(entry)
        numbering = rng.choice(wordings("numberings"))
        seed = rng.random()

        def build(characters: int) -> str:
            shown = _excerpts(entries, 1, characters)
            conversation = _conversation(shown, random.Random(seed), characters // 6)
            return f"{_numbered_passages(numbering, shown)}\n\n{conversation}"

        return user_prompt("documentation/dialogue", fit_text(build, request))


@lru_cache(maxsize=1)
def _sections() -> tuple[Entry, ...]:
    """Heading and text of the training part's sections of the language reference."""
    entries = []
    for document in topic_documents("training"):
        heading = document.text.strip().partition("\n")[0]
        entries.append((heading, document.text))
    return tuple(entries)


def _conversation(entries: list[Entry], rng: random.Random, characters: int) -> str:
    """Up to three questions about documents and answers from them, and a last question; about `characters` long."""
    speakers = rng.choice(wordings("speakers"))
    task = rng.choice(wordings("continue_dialogue"))
    question_count = 1 + min(rng.randint(1, 3), characters // 80)
    utterances: list[str] = []
    for name, text in rng.sample(entries, min(len(entries), question_count)):
        without_underlines = re.sub(r"[*=~^-]{4,}", " ", text)
        one_line = " ".join(without_underlines.split())
        document_sentences = [cut_at_word(sentence, 160) for sentence in sentences(one_line)]
        answer = rng.randrange(1, len(document_sentences)) if len(document_sentences) > 1 else 0
        sentence_before = document_sentences[max(answer - 1, 0)]  # or the answer itself, where it is the first
        quote = " ".join(sentence_before.split()[:6])
        question = rng.choice(wordings("follow_up")).format(name=name, quote=quote)
        utterances += [question, document_sentences[answer]]

    lines = [task]
    for number, utterance in enumerate(utterances[:-1]):
        lines.append(f"{speakers[number % 2]}: {utterance}")
    return "\n".join(lines)


@lru_cache(maxsize=1)
def _summarized_docstrings() -> tuple[Entry, ...]:
    """First paragraph, on one line, and the rest of the training part's longer docstrings."""
    rest_by_summary: dict[str, str] = {}
    for _, text in _long_docstrings():
        first_paragraph, _, rest = text.partition("\n\n")
        if len(rest) > 150:
            summary = " ".join(first_paragraph.split())
            rest_by_summary[summary] = rest.strip()
    return tuple(rest_by_summary.items())


@dataclass(frozen=True)
class CodeCompletion:
    """A file of the library up to a random line, to be continued.

    Attributes:
        raw: Share of prompts that are the code alone, without the chat template.
        imports: Share of prompts that begin with modules that the file imports.
    """

    raw: Share = 0.5
    imports: Share = 0.0

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        document = _long_enough(source_documents("training"), request)
        lines = document.text.splitlines()
        end = rng.randrange(_first_end(lines, request.tokens), len(lines) + 1)
        modules: tuple[Document, ...] = ()
        if self.imports and rng.random() < self.imports:
            modules = _imported_modules(document)

        def build_code(characters: int) -> str:
            return _code_before(document.name, modules, lines, end, characters)

        if rng.random() < self.raw:
            return user_prompt("code/completion_raw", fit_text(build_code, request), template=False)

        frame = rng.choice(wordings("complete"))

        def build(characters: int) -> str:
            return str(frame.format(name=document.name, code=build_code(characters).rstrip("\n")))

        return user_prompt("code/completion", fit_text(build, request))


def _imported_modules(document: Document) -> tuple[Document, ...]:
    """The training part's modules that a source file imports, in the order of the file."""
    modules_by_name = {}
    for module in source_documents("training"):
        modules_by_name[module.name.removesuffix(".py").removesuffix("/__init__")] = module

    imported = []
    import_names = re.findall(r"^(?:from|import) ([\w.]+)", document.text, re.MULTILINE)
    for name in dict.fromkeys(import_names):
        imported_module = modules_by_name.get(name.replace(".", "/"))
        if imported_module is not None and imported_module != document:
            imported.append(imported_module)
    return tuple(imported)


def _code_before(name: str, modules: tuple[Document, ...], lines: list[str], end: int, characters: int) -> str:
    """The lines before line `end` of file `name`, after the beginnings of `modules`, if any, as half of the text."""
    if not modules:
        return _lines_before(lines, end, characters)
    shown_modules = modules[: max(1, characters // 1500)]
    module_length = max(80, characters // 2 // len(shown_modules))
    text = ""
    for module in shown_modules:
        beginning = _lines_from(module.text.splitlines(), 0, module_length)[:module_length]
        text += f"# {module.name}\n{beginning}\n\n"
    characters_left = max(characters - len(shown_modules) * module_length, 80)
    return text + f"# {name}\n" + _lines_before(lines, end, characters_left)


@dataclass(frozen=True)
class CodeQuestions:
    """A stretch of a library file and a question about it."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        document = _long_enough(source_documents("training"), request)
        lines = document.text.splitlines()
        start = rng.randrange(len(lines))
        frame = rng.choice(wordings("code_frames"))
        question = rng.choice(wordings("ask"))

        def build(characters: int) -> str:
            code = _lines_from(lines, start, characters)
            functions = re.findall(r"(?:def|class) (\w+)", code)
            function = functions[start % len(functions)] if functions else "this"
            task = question.format(function=function)
            return str(frame.format(code=code[: max(characters, 80)].rstrip(), name=document.name, task=task))

        return user_prompt("code/questions", fit_text(build, request))


def _first_end(lines: list[str], tokens: int) -> int:
    """The first line with enough text before it to fill a prompt of `tokens` tokens, or else the middle one."""
    length = 0
    for row, line in enumerate(lines, start=1):
        length += len(line) + 1
        if length >= CHARACTERS_PER_TOKEN * tokens:
            return row
    return len(lines) // 2


def _lines_before(lines: list[str], end: int, characters: int) -> str:
    """The lines before line `end`, about `characters` characters of them (at least one line)."""
    start = end - 1
    length = len(lines[start])
    while start > 0:
        length += len(lines[start - 1]) + 1
        if length > characters:
            break
        start -= 1
    return "\n".join(lines[start:end])[: max(characters, 80)] + "\n"


def _lines_from(lines: list[str], start: int, characters: int) -> str:
    """About `characters` characters of lines from line `start` on, or the last ones where it has too few."""
    end = start + 1
    while end < len(lines) and len("\n".join(lines[start : end + 1])) <= characters:
        end += 1
    if end == len(lines):
        return _lines_before(lines, len(lines), characters)
    return "\n".join(lines[start:end])


@dataclass(frozen=True)
class Continuation:
    """A document of the training part from a random line on, cut at any word; without the chat template."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        documents = topic_documents if rng.random() < 0.5 else source_documents
        text = _long_enough(documents("training"), request).text
        start = rng.randint(0, max(0, len(text) - 5 * request.tokens))
        if start > 0:
            start = text.find("\n", start) + 1
        text = text[start:].lstrip("\n")

        def build(characters: int) -> str:
            return cut_at_word(text, characters)

        return user_prompt("text", fit_text(build, request), template=False)


def _long_enough(documents: tuple[Document, ...], request: Request) -> Document:
    """A random document that can fill the wanted length, or the longest of some tries."""
    tries = [request.rng.choice(documents) for _ in range(12)]
    for document in tries:
        if len(document.text) >= int(CHARACTERS_PER_TOKEN * request.tokens):
            return document
    return max(tries, key=lambda document: len(document.text))
