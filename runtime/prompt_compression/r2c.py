"""R2C (arXiv 2410.04139): a multi-document reader's cross-attention chooses chunks, then sentences, of the prompt."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, T5Config, T5ForConditionalGeneration
from typing_extensions import override

from keepsight.errors import Positive, Share, UserError, one_line
from keepsight.files import at_home
from keepsight.models.artifacts import unpickled
from keepsight.models.model_files import LOADING
from keepsight.runtime import registry
from keepsight.runtime.images import Images
from keepsight.runtime.prompt_compression.text import ShortenText, split_sentences, token_texts

_LONGEST_INPUT, _AT_ONCE = 512, 16
_PICKLE = "pytorch_model.bin"


class ReadChunk(NamedTuple):
    """The attention of a reader's first answer token to a chunk.

    `mean` is over the tokens of the reader's input for the chunk, question included, that get any attention; `tokens`
    are the character of the chunk at which each of the reader's tokens starts, and its attention.
    """

    mean: float
    tokens: list[tuple[int, float]]


Relevance = Callable[[str, list[str]], list[ReadChunk]]
"""Reads chunks to answer a question."""


@dataclass(frozen=True)
class Fusion:
    """Fusion-in-Decoder (arXiv 2007.01282): T5 encodes each chunk with the question, its decoder attends to them all.

    Attributes:
        model: Folder or Hub id of the reader with a T5 tokenizer: safetensors, or FiD's own `pytorch_model.bin`, of
            which the tensors alone are read.
    """

    model: str

    def __call__(self, question: str, chunks: list[str]) -> list[ReadChunk]:
        """The attention of the decoder's first token, summed over layers and heads (section 3.2)."""
        tokenizer, reader = _loaded(self.model)
        prefix = f"question: {question} title:  context: "
        encoding = tokenizer(
            [prefix + chunk for chunk in chunks],
            truncation=True,
            max_length=_LONGEST_INPUT,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        mask = encoding["attention_mask"]
        with torch.inference_mode():
            parts = zip(encoding["input_ids"].split(_AT_ONCE), mask.split(_AT_ONCE), strict=True)
            encoded = torch.cat([reader.encoder(ids, attention_mask=real)[0] for ids, real in parts])
            looked = reader.decoder(
                torch.tensor([[reader.config.decoder_start_token_id]]),
                encoder_hidden_states=encoded.flatten(0, 1)[None],
                encoder_attention_mask=mask.flatten()[None],
                output_attentions=True,
            ).cross_attentions
        attention = torch.stack(looked).float().sum(dim=(0, 1, 2, 3)).view(mask.shape)
        rows = zip(attention, mask.bool(), encoding["offset_mapping"], strict=True)
        return [_read(row[real], places[real].tolist(), len(prefix)) for row, real, places in rows]


def _read(attention: Tensor, places: list[list[int]], prefix: int) -> ReadChunk:
    some = attention[:-1][attention[:-1] > 0]  # the last token ends the input
    tokens = zip(places, attention.tolist(), strict=True)
    within = [(max(start - prefix, 0), weight) for (start, end), weight in tokens if end > max(prefix, start)]
    return ReadChunk(float(some.mean()) if len(some) else 0.0, within)


@lru_cache(maxsize=1)
def _loaded(model: str) -> Any:
    model = at_home(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        if (pickled := Path(model) / _PICKLE).is_file():
            reader = T5ForConditionalGeneration(T5Config.from_pretrained(model))
            # FiD wraps the encoder, and each of its blocks.
            named = {
                re.sub(r"^encoder\.encoder\.", "encoder.", name): each for name, each in unpickled(pickled).items()
            }
            weights = {name.replace(".module.", "."): each for name, each in named.items()}
            reader.load_state_dict({**reader.state_dict(), **weights})
        else:
            with LOADING:
                reader = T5ForConditionalGeneration.from_pretrained(model, use_safetensors=True)
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(error, 200)
        raise UserError(f"R2C: reader {model!r} cannot be loaded; give a folder or Hub id of T5: {reason}") from None
    reader.set_attn_implementation("eager")
    return tokenizer, reader.eval()


@registry.method("r2c", label="R2C")
@dataclass(frozen=True)
class R2C(ShortenText):
    """Keeps the window, and the chunks and sentences before it that a reader attends to (R2C, sections 3.3 and 3.4).

    The window's text is the question. Chunks are lines, packed up to `chunk` tokens; longer ones are divided evenly.
    Whole chunks make up 1 - `sentences` of the dropped tokens; sentences of the other chunks make up the rest, more of
    them in chunks of a low score. Lengths are counted in the base model's tokens, where R2C counts another model's; its
    special rules for demonstrations and titles are left out, and that which joins a block of more than 64 words to a
    long line after it. Sentences end at punctuation, where R2C takes nltk's. A chunk beyond the reader's 512 tokens has
    sentences that were not read, which are dropped last; R2C drops them only with their chunk.

    Attributes:
        relevance: Reads chunks to answer a question: `Fusion(FOLDER)`.
        chunk: Longest chunk, in tokens.
        sentences: Share of the surplus that goes sentence by sentence, rather than in whole chunks.
    """

    relevance: Relevance = field(kw_only=True)
    chunk: Positive = field(default=128, kw_only=True)
    sentences: Share = field(default=0.2, kw_only=True)

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        texts = token_texts(self.tokenizer, input_ids.tolist())
        before = len(texts) - self.window
        chunks = chunks_of(texts[:before], self.chunk)
        read = self.relevance("".join(texts[before:]), ["".join(texts[start:end]) for start, end in chunks])
        surplus = len(texts) - self.budget_for(len(texts))
        kept = _best_chunks(chunks, read, surplus * (1 - self.sentences))
        goes = surplus - (before - sum(end - start for start, end in (chunks[place] for place in kept)))
        dropped = _dropped_sentences(texts, [(chunks[place], read[place]) for place in kept], goes)
        tokens = [each for place in sorted(kept) for each in range(*chunks[place]) if each not in dropped]
        return self.with_window(torch.tensor(tokens, dtype=torch.long, device=input_ids.device), len(texts))


def chunks_of(texts: Sequence[str], longest: int) -> list[tuple[int, int]]:
    """Chunks of tokens, as their first and the one after their last: whole lines, or equal parts of a longer one."""
    ends = [place + 1 for place, text in enumerate(texts) if "\n" in text or place + 1 == len(texts)]
    chunks: list[tuple[int, int]] = []
    for start, end in zip([0, *ends], ends, strict=False):
        if chunks and end - chunks[-1][0] <= longest:
            chunks[-1] = chunks[-1][0], end
            continue
        parts = -(-(end - start) // longest)
        cuts = [start + (end - start) * part // parts for part in range(parts + 1)]
        chunks += pairwise(cuts)
    return chunks


def _best_chunks(chunks: list[tuple[int, int]], read: list[ReadChunk], surplus: float) -> list[int]:
    """The chunks that stay, the best first, until no more than `surplus` tokens are left out."""
    left, kept = sum(end - start for start, end in chunks), list[int]()
    for place in sorted(range(len(chunks)), key=lambda place: -read[place].mean):
        if left <= surplus:
            break
        kept.append(place)
        left -= chunks[place][1] - chunks[place][0]
    return kept


def _dropped_sentences(texts: list[str], ranked: list[tuple[tuple[int, int], ReadChunk]], goes: int) -> set[int]:
    """Tokens of the dropped sentences, at least `goes`; `ranked` has the best chunk first.

    The number of tokens that a chunk drops is inverse to its score. What it lacks is dropped from the next better
    chunk; what it drops in excess, as sentences are not cut, is spared in the best ones.
    """
    inverse = [1 / max(read.mean, 1e-30) for _, read in ranked]
    quotas, dropped, spare = [goes * each / sum(inverse) for each in inverse], set[int](), 0.0
    for place in reversed(range(len(ranked))):
        (start, end), read = ranked[place]
        quota, gone = quotas[place] + spare, 0
        for sentence in _by_score(texts[start:end], read):
            if gone >= quota or len(dropped) >= goes:
                break
            dropped |= {start + token for token in sentence}
            gone += len(sentence)
        spare = max(quota - gone, 0.0)
        excess = max(gone - quota, 0.0)
        for better in range(place):
            taken = min(quotas[better], excess)
            quotas[better], excess = quotas[better] - taken, excess - taken
    for (start, end), _ in reversed(ranked):  # what rounding has left
        for token in reversed(range(start, end)):
            if len(dropped) >= goes:
                return dropped
            dropped.add(token)
    return dropped


def _by_score(texts: list[str], read: ReadChunk) -> list[list[int]]:
    """The tokens of each sentence of a chunk, the lowest mean attention first, sentences that were not read last."""
    sentences, owners = split_sentences(texts)
    ends = [*accumulate(map(len, sentences))]
    weights: list[list[float]] = [[] for _ in sentences]
    for start, weight in read.tokens:
        weights[min(bisect_right(ends, start), len(ends) - 1)].append(weight)
    score = [sum(each) / len(each) if each else float("inf") for each in weights]
    tokens: list[list[int]] = [[] for _ in sentences]
    for token, owner in enumerate(owners):
        tokens[owner].append(token)
    return [tokens[place] for place in sorted(range(len(sentences)), key=score.__getitem__) if tokens[place]]
