"""Sentence similarity: keeps the sentences of a prompt that are closest to its question.

After CPC (arXiv 2409.01227, section 3), with any sentence encoder in place of the one trained there. The encoder runs
in the `sentence-transformers` package: `pip install keepsight[sentences]`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.images import Images
from keepsight.runtime.prompt_compression.text import ShortenText, optional_package, token_texts

_SENTENCE = re.compile(r".+?(?:[.!?]+[\"')\]]*(?=\s|\Z)|\n|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Cosine:
    """Cosine similarity of sentence embeddings.

    Attributes:
        model: Folder or Hub id of a sentence encoder.
    """

    model: str = "sentence-transformers/all-MiniLM-L6-v2"

    def __call__(self, sentences: list[str], question: str) -> Tensor:
        """How close each sentence is to the question, [S] float32.

        Raises:
            UserError: the package is not installed or the encoder cannot be had.
        """
        embeddings = _encoder(self.model).encode(
            [*sentences, question], convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        return (embeddings[:-1] @ embeddings[-1]).float().cpu()


@dataclass(frozen=True)
class SentenceSimilarity(ShortenText):
    """Keeps the window, and in their order the sentences before it that are closest to its text.

    A token belongs to the sentence in which its text begins. The last sentence kept is cut to what is left of the
    budget, so that it is always used up. Ties go to the earlier sentence.

    Attributes:
        similarity: Scores sentences by a question, [S]; cosine similarity of embeddings by default.
    """

    similarity: Callable[[list[str], str], Tensor] = Cosine()

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        texts = token_texts(self.tokenizer, input_ids.tolist())
        before = len(texts) - self.window
        sentences, owners = split_sentences(texts[:before])
        worth = [place for place, sentence in enumerate(sentences) if sentence.strip()]
        scores = torch.full((len(sentences),), -torch.inf)
        if worth:
            scores[worth] = self.similarity([sentences[place] for place in worth], "".join(texts[before:]))
        place = torch.empty(len(sentences), dtype=torch.long)
        place[scores.argsort(descending=True, stable=True)] = torch.arange(len(sentences))
        by_rank = place[torch.tensor(owners, dtype=torch.long)].argsort(stable=True)
        kept = by_rank[: self.budget_for(len(texts)) - self.window].sort().values
        return self.with_window(kept.to(input_ids.device), len(texts))


def split_sentences(texts: list[str]) -> tuple[list[str], list[int]]:
    """The sentences of a text, and which of them each token belongs to.

    Args:
        texts: The text of each token; see `keepsight.runtime.prompt_compression.text.token_texts`.

    Returns:
        The sentences, which together are the joined text, and for each token the index of one of them. A sentence ends
        at a line break, or at a full stop, exclamation or question mark before white space.
    """
    sentences = _SENTENCE.findall("".join(texts)) or [""]
    ends = [*accumulate(len(sentence) for sentence in sentences)]
    owners, current = [], 0
    for start in accumulate((len(each) for each in texts[:-1]), initial=0):
        while start >= ends[current] and current + 1 < len(ends):
            current += 1
        owners.append(current)
    return sentences, owners


@lru_cache(maxsize=1)
def _encoder(model: str) -> Any:
    package = optional_package("sentence_transformers", "sentences")
    try:
        return package.SentenceTransformer(model, trust_remote_code=False, model_kwargs={"use_safetensors": True})
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"SentenceSimilarity: model {model!r} cannot be loaded; give a folder or a Hub id: {reason}"
        ) from None
