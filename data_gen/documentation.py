"""Questions and summaries over real English: the language reference and the library's docstrings."""

from dataclasses import dataclass
from functools import lru_cache, partial

from keepsight.corpus import Document, docstrings, source_documents, topic_documents
from keepsight.data_gen.prompts import CHARACTERS_PER_TOKEN, Prompt, Request, fit, user_prompt

WHOLE_PASSAGE = (
    "Summarize the text above.",
    "Summarize this in one paragraph.",
    "Summarize this in two or three sentences.",
    "Give me the five most important points as a bulleted list.",
    "What is this about? Answer in one sentence.",
    "Explain this to somebody who has just started programming.",
    "Explain the main idea in plain words.",
    "List the terms that are introduced here, each with a short explanation.",
    "What should a reader remember from this?",
    "Write a title for this text.",
    "Write three questions that this text answers.",
    "Give an example for what is described here.",
    "Which mistakes does this text help to avoid?",
    "Rewrite the text above so that it is half as long.",
    "What are the exceptions or special cases that are mentioned?",
    "tl;dr?",
    "I did not understand this at all. Can you help?",
    "Why would anyone need this?",
    "Turn this into a short FAQ.",
    "Which parts are the most surprising, and why?",
    "Is there anything here about errors? If so, what?",
    "Make a short quiz with answers from this text.",
    "How does this work, step by step?",
    "Describe when to use this and when not to.",
)
ABOUT_NAME = (
    "What does {name} do?",
    "Explain what {name} is for.",
    "When would I use {name}?",
    "What does the text say about {name}?",
    "How does {name} work?",
    "Describe {name} in one sentence.",
    "Summarize the part about {name}.",
    "What should I know before I use {name}?",
    "Give me the description of {name}, word for word.",
    "Write an example that uses {name}.",
    "A colleague asked me about {name}. What should I answer?",
)
WHICH_PASSAGE = (
    'Which passage says this: "{quote}"?',
    'Where does it say "{quote}"? Give the number only.',
    'Find the number of the passage that contains "{quote}".',
    'Continue the sentence that begins with "{quote}".',
    'What comes right after "{quote}"?',
)
OPENINGS = (
    "{text}\n\n{task}",
    "{text}\n\n{task}",
    "Here is a text:\n\n{text}\n\n{task}",
    "{task}\n\n{text}",
    "I have a question about the following.\n\n{text}\n\n{task}",
    "Text:\n{text}\n\nTask: {task}\nAnswer:",
    "Read this first.\n<document>\n{text}\n</document>\n{task}",
    "{text}\n---\n{task} Keep it short.",
    "{text}\n\n{task} Be thorough.",
)
NUMBERINGS = ("Passage {number}:\n{text}", "[{number}] {text}", "Document {number}: {text}", "({number}) {text}")


@dataclass(frozen=True)
class Documentation:
    """One document with a question or a task about the whole of it, or about one of its names.

    Attributes:
        topics: Share of prompts over the language reference; the others are over docstrings.
        about_name: Share of docstring prompts that ask about one object.
    """

    topics: float = 0.5
    about_name: float = 0.6

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        opening, whole, place = rng.choice(OPENINGS), rng.choice(WHOLE_PASSAGE), rng.random()
        if rng.random() < self.topics:
            text = long_enough(topic_documents("training"), request).text
            return user_prompt("documentation/topic", fit(partial(_passage, text, place, opening, whole), request))
        entries = _rich_entries()
        start = int(place * len(entries))
        about = rng.choice(ABOUT_NAME) if rng.random() < self.about_name else ""
        build = partial(_entries, entries, start, opening, about or whole, rng.random())
        return user_prompt("documentation/docstrings", fit(build, request))


@dataclass(frozen=True)
class Passages:
    """Several numbered passages and a question that needs one of them.

    Attributes:
        quoted: Share of prompts that quote a passage; the others ask about an object by its name.
    """

    quoted: float = 0.5

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        entries = _rich_entries()
        chosen = [rng.choice(entries) for _ in range(2 + request.tokens // 30)]
        wordings = WHICH_PASSAGE if rng.random() < self.quoted else ABOUT_NAME
        build = partial(_numbered, chosen, rng.choice(NUMBERINGS), rng.choice(wordings), rng.choice(OPENINGS))
        return user_prompt("documentation/passages", fit(partial(build, rng.random()), request))


@lru_cache(maxsize=1)
def _rich_entries() -> tuple[tuple[str, str], ...]:
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


def _passage(text: str, place: float, opening: str, task: str, characters: int) -> str:
    return opening.format(text=paragraphs_from(text, place, characters), task=task)


def _entries(
    entries: tuple[tuple[str, str], ...], start: int, opening: str, task: str, place: float, characters: int
) -> str:
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
    share = max(120, characters // max(1, min(len(chosen), characters // 400)))
    texts = [text[:share] for _, text in chosen[: max(1, characters // share)]]
    asked = int(place * len(texts))
    words = texts[asked].split()
    task = wording.format(name=chosen[asked][0], quote=" ".join(words[: min(9, len(words))]))
    body = "\n\n".join(numbering.format(number=number, text=text) for number, text in enumerate(texts, 1))
    return opening.format(text=body, task=task)


def long_enough(documents: tuple[Document, ...], request: Request) -> Document:
    """A random document that can fill the wanted length, or the longest of some tries."""
    tries = [request.rng.choice(documents) for _ in range(12)]
    characters = int(CHARACTERS_PER_TOKEN * request.tokens)
    return next((document for document in tries if len(document.text) >= characters), max(tries, key=_length))


def _length(document: Document) -> int:
    return len(document.text)
