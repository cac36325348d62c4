"""Prompts over the text that comes with Python: its language reference, docstrings and source files."""

import random
import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate

from keepsight.corpus import Document, docstrings, sentences, source_documents, topic_documents
from keepsight.data_gen.prompts import (
    CHARACTERS_PER_TOKEN,
    Prompt,
    Request,
    Share,
    cut_at_word,
    fit,
    fitted,
    user_prompt,
)
from keepsight.data_gen.words import wordings

Entries = tuple[tuple[str, str], ...]
"""Names and texts of docstrings."""
_REPEATED = 60
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
        opening, whole, place = rng.choice(wordings("openings")), rng.choice(wordings("whole_passage")), rng.random()
        if rng.random() < self.topics:
            text = _long_enough(topic_documents("training"), request).text

            def build(characters: int) -> str:
                return str(opening.format(text=paragraphs_from(text, place, characters), task=whole))

            return user_prompt("documentation/topic", fit(build, request))
        entries = _rich_entries()
        about = rng.choice(wordings("about_name")) if rng.random() < self.about_name else whole
        manual = partial(_manual, entries, int(place * len(entries)), opening, about, rng.random())
        return user_prompt("documentation/docstrings", fit(manual, request))


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
        entries = _rich_entries()
        chosen = [rng.choice(entries) for _ in range(2 + request.tokens // 30)]
        questions = wordings("which_passage" if rng.random() < self.quoted else "about_name")
        frame = (rng.choice(wordings("numberings")), rng.choice(questions), rng.choice(wordings("openings")))
        return user_prompt("documentation/passages", fit(partial(_numbered, chosen, *frame, rng.random()), request))


@lru_cache(maxsize=1)
def _rich_entries() -> Entries:
    """Name and text of the training part's longer docstrings, in the order of the library."""
    documents = source_documents("training")
    named = ((entry.name, entry.text.strip()) for document in documents for entry in docstrings(document))
    return tuple((name, text) for name, text in named if len(text) >= 150)


def paragraphs_from(text: str, place: float, characters: int) -> str:
    """Whole paragraphs of `text`, about `characters` characters, from a paragraph at `place` (0 to 1) or earlier."""
    paragraphs = text.strip().split("\n\n")
    first = int(place * len(paragraphs))
    while first > 0 and len("\n\n".join(paragraphs[first:])) < characters:
        first -= 1
    last = first + 1
    while last < len(paragraphs) and len("\n\n".join(paragraphs[first : last + 1])) <= characters:
        last += 1
    return "\n\n".join(paragraphs[first:last])[: max(characters, 80)]


def _manual(entries: Entries, start: int, opening: str, task: str, place: float, characters: int) -> str:
    """Consecutive docstrings, as a manual would print them, and the task about one of them or about all."""
    shown: list[tuple[str, str]] = []
    length = 0
    for name, text in entries[start:] + entries[:start]:
        length += len(name) + len(text) + 4
        if shown and length > characters:
            break
        shown.append((name, text))
    manual = "\n\n".join(f"{name}\n{text}" for name, text in shown)[: max(characters, 80)]
    name = shown[int(place * len(shown))][0]
    return opening.format(text=manual, task=task.format(name=name))


def _numbered(
    chosen: list[tuple[str, str]], numbering: str, wording: str, opening: str, place: float, characters: int
) -> str:
    shown = _excerpts(chosen, 1, characters)
    name, text = shown[int(place * len(shown))]
    task = wording.format(name=name, quote=" ".join(text.split()[:9]))
    return opening.format(text=_body(numbering, shown), task=task)


def _excerpts(chosen: list[tuple[str, str]], least: int, characters: int) -> list[tuple[str, str]]:
    """The first entries, at least `least`, with truncated texts of about `characters` characters in all."""
    share = max(120, characters // max(1, min(len(chosen), characters // 400)))
    return [(name, text[:share]) for name, text in chosen[: max(least, characters // share)]]


def _body(numbering: str, shown: list[tuple[str, str]]) -> str:
    return "\n\n".join(numbering.format(number=number, text=text) for number, (_, text) in enumerate(shown, 1))


@dataclass(frozen=True)
class DescribedPassages:
    """Several numbered passages, and the summary of one of them: which is it? Its number is the response.

    The passages are docstrings without their first paragraphs, one of which is the summary.
    """

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        entries = _summarised_entries()
        chosen = rng.sample(entries, min(2 + request.tokens // 30, len(entries)))
        place, numbering, opening = rng.random(), rng.choice(wordings("numberings")), rng.choice(wordings("openings"))
        wording = rng.choice(wordings("described_passage"))

        def make(characters: int) -> Prompt:
            shown = _excerpts(chosen, 2, characters)
            asked = int(place * len(shown))
            text = opening.format(text=_body(numbering, shown), task=wording.format(summary=shown[asked][0]))
            return replace(user_prompt("documentation/described", text), response=f"Passage {asked + 1}")

        return fitted(make, request)


@dataclass(frozen=True)
class Reconstruction:
    """Paragraphs of the language reference, one of which is to be repeated word for word. It is the response."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        text = _long_enough(topic_documents("training"), request).text
        place, asked = rng.random(), rng.random()
        opening, wording = rng.choice(wordings("openings")), rng.choice(wordings("repeat"))

        def make(characters: int) -> Prompt:
            paragraphs = paragraphs_from(text, place, characters).split("\n\n")
            longer = [each for each in paragraphs if len(each) >= _REPEATED] or [max(paragraphs, key=len)]
            passage = longer[int(asked * len(longer))].strip()
            task = wording.format(start=" ".join(passage.split()[:6]))
            prompt = user_prompt("documentation/repeated", opening.format(text="\n\n".join(paragraphs), task=task))
            return replace(prompt, response=passage)

        return fitted(make, request)


@dataclass(frozen=True)
class Dialogue:
    """Several documents and a conversation about them, of which the model writes the next answer.

    Documents are sections of the language reference and docstrings, the earlier answers sentences of them.
    """

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        drawn = [
            rng.choice(_topic_entries() if rng.random() < 0.5 else _rich_entries()) for _ in range(rng.randint(3, 6))
        ]
        chosen, numbering, seed = [*dict.fromkeys(drawn)], rng.choice(wordings("numberings")), rng.random()

        def build(characters: int) -> str:
            shown = _excerpts(chosen, 1, characters)
            return f"{_body(numbering, shown)}\n\n{_conversation(shown, random.Random(seed), characters // 6)}"

        return user_prompt("documentation/dialogue", fit(build, request))


@lru_cache(maxsize=1)
def _topic_entries() -> Entries:
    """Heading and text of the training part's sections of the language reference."""
    return tuple((topic.text.strip().partition("\n")[0], topic.text) for topic in topic_documents("training"))


def _conversation(documents: list[tuple[str, str]], rng: random.Random, characters: int) -> str:
    """Up to three questions about documents and answers from them, and a last question; about `characters` long."""
    speakers, task, told = rng.choice(wordings("speakers")), rng.choice(wordings("continue_dialogue")), list[str]()
    asked = rng.sample(documents, min(len(documents), 1 + min(rng.randint(1, 3), characters // 80)))
    for name, text in asked:
        prose = re.sub(r"[*=~^-]{4,}", " ", text)  # headings are underlined
        parts = [cut_at_word(each, 160) for each in sentences(" ".join(prose.split()))]
        place = rng.randrange(1, len(parts)) if len(parts) > 1 else 0
        quoted = " ".join(parts[max(place - 1, 0)].split()[:6])  # of the sentence before the answer, if there is one
        told += [rng.choice(wordings("follow_up")).format(name=name, quote=quoted), parts[place]]
    return "\n".join([task, *(f"{speakers[number % 2]}: {line}" for number, line in enumerate(told[:-1]))])


@lru_cache(maxsize=1)
def _summarised_entries() -> Entries:
    """First paragraph, on one line, and the rest of the training part's longer docstrings."""
    parts = (text.split("\n\n", 1) for _, text in _rich_entries())
    named = {" ".join(part[0].split()): part[1].strip() for part in parts if len(part) == 2 and len(part[1]) > 150}
    return tuple(named.items())


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
        place = rng.randrange(_first_cut(lines, request.tokens), len(lines) + 1)
        before = _imported(document) if self.imports and rng.random() < self.imports else ()
        if rng.random() < self.raw:
            text = fit(partial(_code_before, document.name, before, lines, place), request)
            return user_prompt("code/completion_raw", text, template=False)
        frame = rng.choice(wordings("complete"))

        def build(characters: int) -> str:
            code = _code_before(document.name, before, lines, place, characters).rstrip("\n")
            return str(frame.format(name=document.name, code=code))

        return user_prompt("code/completion", fit(build, request))


def _imported(document: Document) -> tuple[Document, ...]:
    """The training part's modules that a source file imports, in the order of the file."""
    names = dict.fromkeys(re.findall(r"^(?:from|import) ([\w.]+)", document.text, re.MULTILINE))
    by_name = {each.name.removesuffix(".py").removesuffix("/__init__"): each for each in source_documents("training")}
    found = (by_name.get(name.replace(".", "/")) for name in names)
    return tuple(each for each in found if each is not None and each != document)


def _code_before(name: str, modules: tuple[Document, ...], lines: list[str], place: int, characters: int) -> str:
    """The lines before line `place` of file `name`, after the beginnings of `modules`, if any, as half of the text."""
    if not modules:
        return _lines_before(lines, place, characters)
    shown = modules[: max(1, characters // 1500)]
    share = max(80, characters // 2 // len(shown))
    heads = (f"# {each.name}\n{_lines_from(each.text.splitlines(), 0, share)[:share]}\n\n" for each in shown)
    return "".join(heads) + f"# {name}\n" + _lines_before(lines, place, max(characters - len(shown) * share, 80))


@dataclass(frozen=True)
class CodeQuestions:
    """A stretch of a library file and a question about it."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        document = _long_enough(source_documents("training"), request)
        lines = document.text.splitlines()
        start = rng.randrange(len(lines))
        frame, task = rng.choice(wordings("code_frames")), rng.choice(wordings("ask"))

        def build(characters: int) -> str:
            code = _lines_from(lines, start, characters)
            functions = re.findall(r"(?:def|class) (\w+)", code)
            function = functions[start % len(functions)] if functions else "this"
            code = code[: max(characters, 80)].rstrip()
            return str(frame.format(code=code, name=document.name, task=task.format(function=function)))

        return user_prompt("code/questions", fit(build, request))


def _first_cut(lines: list[str], tokens: int) -> int:
    """The first line with enough text before it to fill a prompt of `tokens` tokens, or else the middle one."""
    lengths = accumulate(len(line) + 1 for line in lines)
    enough = (row for row, length in enumerate(lengths, start=1) if length >= CHARACTERS_PER_TOKEN * tokens)
    return next(enough, len(lines) // 2)


def _lines_before(lines: list[str], end: int, characters: int) -> str:
    """The lines before line `end`, about `characters` characters of them (at least one line)."""
    start, length = end - 1, len(lines[end - 1])
    while start > 0 and (length := length + len(lines[start - 1]) + 1) <= characters:
        start -= 1
    return "\n".join(lines[start:end])[: max(characters, 80)] + "\n"


def _lines_from(lines: list[str], start: int, characters: int) -> str:
    """About `characters` characters of lines from line `start` on, or the last ones where it has too few."""
    end = start + 1
    while end < len(lines) and len("\n".join(lines[start : end + 1])) <= characters:
        end += 1
    return "\n".join(lines[start:end]) if end < len(lines) else _lines_before(lines, len(lines), characters)


@dataclass(frozen=True)
class Continuation:
    """A document of the training part from a random line on, cut at any word; without the chat template."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        part = topic_documents if request.rng.random() < 0.5 else source_documents
        text = _long_enough(part("training"), request).text
        start = request.rng.randint(0, max(0, len(text) - 5 * request.tokens))
        start = text.find("\n", start) + 1 if start else 0
        text = fit(partial(cut_at_word, text[start:].lstrip("\n")), request)
        return user_prompt("text", text, template=False)


def _long_enough(documents: tuple[Document, ...], request: Request) -> Document:
    """A random document that can fill the wanted length, or the longest of some tries."""
    tries = [request.rng.choice(documents) for _ in range(12)]
    characters = int(CHARACTERS_PER_TOKEN * request.tokens)
    long = (document for document in tries if len(document.text) >= characters)
    return next(long, max(tries, key=lambda document: len(document.text)))
