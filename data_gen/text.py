"""Plain text, cut at a random point, to be continued."""

from dataclasses import dataclass
from functools import partial

from keepsight.corpus import source_documents, topic_documents
from keepsight.data_gen.documentation import long_enough
from keepsight.data_gen.prompts import Prompt, Request, cut_at_word, fit, raw_prompt


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
        return raw_prompt("text", fit(partial(cut_at_word, text[start:].lstrip("\n")), request))
