"""Plain text, cut at a random point, to be continued."""

from dataclasses import dataclass
from functools import partial

from keepsight.corpus import source_documents, topic_documents
from keepsight.data_gen.documentation import long_enough
from keepsight.data_gen.prompts import Prompt, Request, fit, raw_prompt


@dataclass(frozen=True)
class Continuation:
    """A document of the training part from a random line on, cut at any word; without the chat template."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        part = topic_documents if request.rng.random() < 0.5 else source_documents
        text = long_enough(part("training"), request).text
        last_start = max(0, len(text) - 5 * request.tokens)
        start = request.rng.randint(0, last_start)
        start = text.find("\n", start) + 1 if start else 0
        return raw_prompt("text", fit(partial(_cut, text[start:].lstrip("\n")), request))


def _cut(text: str, characters: int) -> str:
    """About `characters` characters from the start, ending with a whole word."""
    if len(text) <= characters:
        return text.rstrip()
    words = text[: max(characters, 80)]
    return words[: words.rfind(" ")].rstrip() if " " in words else words
