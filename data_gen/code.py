"""Code from the standard library: to be completed, explained and searched."""

import re
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from keepsight.corpus import source_documents
from keepsight.data_gen.documentation import long_enough
from keepsight.data_gen.prompts import CHARACTERS_PER_TOKEN, Prompt, Request, fit, raw_prompt, user_prompt

COMPLETE = (
    "Complete the code:\n\n{code}",
    "Continue this Python code. Write the next lines only.\n\n```python\n{code}\n```",
    "Please complete the code given below.\n{code}\nNext line of code:",
    "```python\n# {name}\n{code}\n```\n\nWhat comes next?",
)
ASK = (
    "What does this code do?",
    "Explain this code.",
    "Explain this code line by line.",
    "Summarize this file in a few sentences.",
    "List the functions and classes, each with one sentence about it.",
    "Which errors can this code raise, and when?",
    "Write a docstring for `{function}`.",
    "What does `{function}` return?",
    "Write a unit test for `{function}`.",
    "Which arguments does `{function}` take, and what are they for?",
    "Repeat the definition of `{function}`.",
    "How could `{function}` be made simpler?",
    "Review this code. What would you change?",
    "Translate `{function}` to JavaScript.",
)
CODE_FRAMES = (
    "{code}\n\n{task}",
    "```python\n{code}\n```\n\n{task}",
    "{task}\n\n```python\n{code}\n```",
    "Here is a part of {name}:\n\n{code}\n\n{task}",
)


@dataclass(frozen=True)
class CodeCompletion:
    """A file of the library up to a random line, to be continued.

    Attributes:
        raw: Share of prompts that are the code alone, without the chat template.
    """

    raw: float = 0.5

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        name, lines = _file(request)
        place = rng.randrange(_first_cut(lines, request.tokens), len(lines) + 1)
        if rng.random() < self.raw:
            return raw_prompt("code/completion_raw", fit(partial(_lines_before, lines, place), request))
        build = partial(_completion, rng.choice(COMPLETE), name, lines, place)
        return user_prompt("code/completion", fit(build, request))


@dataclass(frozen=True)
class CodeQuestions:
    """A stretch of a library file and a question about it."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        name, lines = _file(request)
        start = rng.randrange(len(lines))
        build = partial(_question, rng.choice(CODE_FRAMES), rng.choice(ASK), name, lines, start)
        return user_prompt("code/questions", fit(build, request))


def _file(request: Request) -> tuple[str, list[str]]:
    """Name and lines of a library file."""
    document = long_enough(source_documents("training"), request)
    return document.name, document.text.splitlines()


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


def _completion(frame: str, name: str, lines: list[str], place: int, characters: int) -> str:
    return frame.format(name=name, code=_lines_before(lines, place, characters).rstrip("\n"))


def _question(frame: str, task: str, name: str, lines: list[str], start: int, characters: int) -> str:
    end = start + 1
    while end < len(lines) and len("\n".join(lines[start : end + 1])) <= characters:
        end += 1
    code = "\n".join(lines[start:end])
    code = code if end < len(lines) else _lines_before(lines, len(lines), characters)
    functions = re.findall(r"(?:def|class) (\w+)", code)
    function = functions[start % len(functions)] if functions else "this"
    return frame.format(code=code[: max(characters, 80)].rstrip(), name=name, task=task.format(function=function))
