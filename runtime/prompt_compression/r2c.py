"""R2C (arXiv 2410.04139): a multi-document reader's cross-attention chooses chunks, then sentences, of the prompt."""

import math
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

_LONGEST_INPUT = 512
_CHUNKS_AT_ONCE = 16
_PICKLE = "pytorch_model.bin"


class Chunk(NamedTuple):
    """Consecutive tokens of a prompt: the first one, and the one after the last."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.start


class ChunkAttention(NamedTuple):
    """The attention of a reader's first answer token to a chunk.

    `mean` is over the tokens of the reader's input for the chunk, question included, that get any attention; `tokens`
    are the character of the chunk at which each of the reader's tokens starts, and its attention.
    """

    mean: float
    tokens: list[tuple[int, float]]


Relevance = Callable[[str, list[str]], list[ChunkAttention]]
"""Reads chunks to answer a question."""


@registry.part("relevance", "fusion")
@dataclass(frozen=True)
class Fusion:
    """Fusion-in-Decoder (arXiv 2007.01282): T5 encodes each chunk with the question, its decoder attends to them all.

    Attributes:
        model: Folder or Hub id of the reader with a T5 tokenizer: safetensors, or FiD's own `pytorch_model.bin`, of
            which the tensors alone are read.
    """

    model: str

    def __call__(self, question: str, chunks: list[str]) -> list[ChunkAttention]:
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
        ids = encoding["input_ids"]
        mask = encoding["attention_mask"]
        encoded = []
        with torch.inference_mode():
            for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
                block = slice(start, start + _CHUNKS_AT_ONCE)
                encoded.append(reader.encoder(ids[block], attention_mask=mask[block])[0])
            cross_attentions = reader.decoder(
                torch.tensor([[reader.config.decoder_start_token_id]]),
                encoder_hidden_states=torch.cat(encoded).flatten(0, 1)[None],
                encoder_attention_mask=mask.flatten()[None],
                output_attentions=True,
            ).cross_attentions
        attention = torch.stack(cross_attentions).float().sum(dim=(0, 1, 2, 3)).view(mask.shape)

        chunk_attentions = []
        for weights, real, offsets in zip(attention, mask.bool(), encoding["offset_mapping"], strict=True):
            chunk_attentions.append(_chunk_attention(weights[real], offsets[real].tolist(), len(prefix)))
        return chunk_attentions


def _chunk_attention(weights: Tensor, offsets: list[list[int]], prefix: int) -> ChunkAttention:
    """From the attention of a reader's input and its tokens' offsets, of which a chunk's are `prefix` or higher."""
    without_end = weights[:-1]  # the last token ends the input
    attended = without_end[without_end > 0]
    mean = float(attended.mean()) if len(attended) else 0.0

    tokens = []
    for (start, end), weight in zip(offsets, weights.tolist(), strict=True):
        is_in_chunk = end > max(prefix, start)  # special tokens have no text
        if is_in_chunk:
            tokens.append((max(start - prefix, 0), weight))
    return ChunkAttention(mean, tokens)


@lru_cache(maxsize=1)
def _loaded(model: str) -> Any:
    model = at_home(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        pickled = Path(model) / _PICKLE
        if pickled.is_file():
            reader = T5ForConditionalGeneration(T5Config.from_pretrained(model))
            weights = reader.state_dict()
            for name, tensor in unpickled(pickled).items():
                # FiD wraps the encoder, and each of its blocks.
                name = re.sub(r"^encoder\.encoder\.", "encoder.", name).replace(".module.", ".")
                weights[name] = tensor
            reader.load_state_dict(weights)
        else:
            with LOADING:
                reader = T5ForConditionalGeneration.from_pretrained(model, use_safetensors=True)
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(error, 200)
        raise UserError(
            f"R2C: reader {model!r} cannot be loaded; give a folder or Hub id of T5: {reason}",
            field="reader",
            code="file",
        ) from None
    reader.set_attn_implementation("eager")
    return tokenizer, reader.eval()


@registry.method("r2c", label="R2C")
@dataclass(frozen=True)
class R2C(ShortenText):
    """Keeps the window, and the chunks and sentences before it that a reader attends to.

    R2C (arXiv 2410.04139), sections 3.3 and 3.4. The window's text is the question. Chunks are lines, packed up to
    `chunk` tokens; longer ones are divided evenly. Whole chunks make up 1 - `sentences` of the dropped tokens;
    sentences of the other chunks make up the rest, more of them in chunks of a low score. Lengths are counted in the
    base model's tokens, where R2C counts another model's; its special rules for demonstrations and titles are left out,
    and that which joins a block of more than 64 words to a long line after it. Sentences end at punctuation, where R2C
    takes nltk's. A chunk beyond the reader's 512 tokens has sentences that were not read, which are dropped last; R2C
    drops them only with their chunk.

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
        before_window = len(texts) - self.window
        chunks = split_chunks(texts[:before_window], self.chunk)
        question = "".join(texts[before_window:])
        attentions = self.relevance(question, ["".join(texts[chunk.start : chunk.end]) for chunk in chunks])

        # Whole chunks go first, then sentences of those that are left.
        surplus = len(texts) - self.budget_for(len(texts))
        ranked = _best_chunks(chunks, attentions, surplus * (1 - self.sentences))
        tokens_in_chunks = sum(chunk.length for chunk, _ in ranked)
        dropped_with_chunks = before_window - tokens_in_chunks
        dropped = _dropped_sentences(texts, ranked, surplus - dropped_with_chunks)

        kept = set[int]()
        for chunk, _ in ranked:
            kept.update(range(chunk.start, chunk.end))
        positions = sorted(kept - dropped)
        return self.with_window(torch.tensor(positions, dtype=torch.long, device=input_ids.device), len(texts))


def split_chunks(texts: Sequence[str], longest: int) -> list[Chunk]:
    """Tokens, by their `texts`, in chunks of at most `longest`: whole lines, or equal parts of a longer one."""
    chunks: list[Chunk] = []
    start = 0
    for index, text in enumerate(texts):
        end = index + 1
        if "\n" not in text and end < len(texts):
            continue  # in the middle of a line
        if chunks and end - chunks[-1].start <= longest:
            chunks[-1] = Chunk(chunks[-1].start, end)
        else:
            length = end - start
            parts = math.ceil(length / longest)
            cuts = [start + length * part // parts for part in range(parts + 1)]
            chunks.extend(Chunk(first, last) for first, last in pairwise(cuts))
        start = end
    return chunks


def _best_chunks(
    chunks: list[Chunk], attentions: list[ChunkAttention], surplus: float
) -> list[tuple[Chunk, ChunkAttention]]:
    """The chunks that stay, the best first, until no more than `surplus` tokens are left out."""
    left_out = sum(chunk.length for chunk in chunks)
    best = []
    ranked = sorted(zip(chunks, attentions, strict=True), key=lambda ranked_chunk: -ranked_chunk[1].mean)
    for chunk, attention in ranked:
        if left_out <= surplus:
            break
        best.append((chunk, attention))
        left_out -= chunk.length
    return best


def _dropped_sentences(texts: list[str], ranked: list[tuple[Chunk, ChunkAttention]], target: int) -> set[int]:
    """Tokens of the dropped sentences, at least `target`; `ranked` has the best chunk first.

    The number of tokens that a chunk drops is inverse to its score. What it lacks is dropped from the next better
    chunk; what it drops in excess, as sentences are not cut, is spared in the best ones.
    """
    inverse_scores = [1 / max(attention.mean, 1e-30) for _, attention in ranked]
    total = sum(inverse_scores)
    quotas = [target * inverse / total for inverse in inverse_scores]
    dropped = set[int]()
    missing = 0.0
    for rank in reversed(range(len(ranked))):
        chunk, attention = ranked[rank]
        quota = quotas[rank] + missing
        dropped_here = 0
        for sentence in _sentences_by_score(texts[chunk.start : chunk.end], attention):
            if dropped_here >= quota or len(dropped) >= target:
                break
            dropped.update(chunk.start + token for token in sentence)
            dropped_here += len(sentence)

        missing = max(quota - dropped_here, 0.0)
        excess = max(dropped_here - quota, 0.0)
        for better in range(rank):
            spared = min(quotas[better], excess)
            quotas[better] -= spared
            excess -= spared

    for chunk, _ in reversed(ranked):  # what rounding has left
        for token in reversed(range(chunk.start, chunk.end)):
            if len(dropped) >= target:
                return dropped
            dropped.add(token)
    return dropped


def _sentences_by_score(texts: list[str], attention: ChunkAttention) -> list[list[int]]:
    """The tokens of each sentence of a chunk, the lowest mean attention first, sentences that were not read last."""
    sentences, owners = split_sentences(texts)
    ends = [*accumulate(map(len, sentences))]
    weights: list[list[float]] = [[] for _ in sentences]
    for start, weight in attention.tokens:
        index = min(bisect_right(ends, start), len(ends) - 1)
        weights[index].append(weight)
    scores = []
    for sentence_weights in weights:
        if sentence_weights:
            scores.append(sum(sentence_weights) / len(sentence_weights))
        else:
            scores.append(math.inf)

    tokens: list[list[int]] = [[] for _ in sentences]
    for token, owner in enumerate(owners):
        tokens[owner].append(token)
    order = sorted(range(len(sentences)), key=scores.__getitem__)
    return [tokens[index] for index in order if tokens[index]]
