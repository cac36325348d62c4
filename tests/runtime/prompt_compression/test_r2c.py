"""R2C: which chunks and sentences stay, by a slow reading of the paper, and a tiny Fusion-in-Decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from keepsight.runtime.prompt_compression import r2c
from keepsight.runtime.prompt_compression.r2c import R2C, ChunkAttention, Fusion, split_chunks
from keepsight.runtime.prompt_compression.text import split_sentences, token_texts
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.prompt_compression.prompts import shared_with_question, text_ids, wide_model
from tests.tiny import tiny_tokenizer

LINES = [
    "The red fox sleeps here. It dreams of the sea! Nothing else is said about it.",
    "A wall is built of stone. The gate of the wall is open at night.",
    "Ships sail to the north. The captain counts the waves. He sleeps at noon. Nobody wakes him then.",
    "Bread costs three coins. The baker is asleep.",
    "At night the gate is shut. The guard reads a book about ships.",
]
QUESTION = "Who opens the gate at night?"
TEXT = "\n".join(LINES) + "\n" + QUESTION
WINDOW = 14


def slow_chunks(lengths: list[int], by_attention: list[int], least: float) -> list[int]:
    """The chunks that get the most attention, best first, until they have at least so many tokens."""
    kept: list[int] = []
    tokens = 0
    while tokens < least:
        chunk = by_attention[len(kept)]
        kept.append(chunk)
        tokens += lengths[chunk]
    return kept


def sentence_scores(sentences: list[str], attention: ChunkAttention) -> list[float]:
    """Mean attention of each sentence's tokens; a sentence without any comes last."""
    scores = []
    start = 0
    for sentence in sentences:
        end = start + len(sentence)
        weights = [weight for offset, weight in attention.tokens if start <= offset < end]
        scores.append(sum(weights) / len(weights) if weights else 1e9)
        start = end
    return scores


def without_worst_sentences(owner_of: dict[int, int], scores: list[float], quota: float, most: int) -> list[int]:
    """The tokens that stay when the worst sentences go, one by one, until `quota` or `most` tokens are gone.

    `owner_of` has the sentence of each token.
    """
    tokens = list(owner_of)
    removed = 0
    while tokens and removed < quota and removed < most:
        remaining = {owner_of[token] for token in tokens}
        worst = min(remaining, key=lambda sentence: (scores[sentence], sentence))
        tokens = [token for token in tokens if owner_of[token] != worst]
        removed = len(owner_of) - len(tokens)
    return tokens


def slow_selection(texts: list[str], chunks: Sequence[tuple[int, int]], budget: int, share: float) -> list[int]:
    """Section 3.3 and 3.4, chunk by chunk, from the text alone."""
    before = len(texts) - WINDOW
    question = "".join(texts[-WINDOW:])
    attention = shared_with_question(question, ["".join(texts[start:end]) for start, end in chunks])
    by_attention = sorted(range(len(chunks)), key=lambda chunk: -attention[chunk].mean)
    least = before - (len(texts) - budget) * (1 - share)
    lengths = [end - start for start, end in chunks]
    kept = slow_chunks(lengths, by_attention, least)

    to_remove = sum(lengths[chunk] for chunk in kept) + WINDOW - budget
    inverse = {chunk: 1 / attention[chunk].mean for chunk in kept}
    quota = {chunk: to_remove * inverse[chunk] / sum(inverse.values()) for chunk in kept}
    selected: list[int] = []
    unused = 0.0
    for rank in range(len(kept) - 1, -1, -1):
        chunk = kept[rank]
        quota[chunk] += unused
        start, end = chunks[chunk]
        sentences, owners = split_sentences(texts[start:end])
        owner_of = dict(zip(range(start, end), owners, strict=True))
        scores = sentence_scores(sentences, attention[chunk])
        tokens = without_worst_sentences(owner_of, scores, quota[chunk], to_remove)
        selected += tokens
        removed = lengths[chunk] - len(tokens)
        to_remove -= removed
        unused = max(quota[chunk] - removed, 0)
        excess = max(removed - quota[chunk], 0)
        for better in kept[:rank]:
            forgiven = min(excess, quota[better])
            quota[better] -= forgiven
            excess -= forgiven
    return [*sorted(selected), *range(before, len(texts))]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("budget", [30, 60, 90, 120])
def test_chunks_then_sentences_stay(budget, share):
    ids = text_ids(TEXT)
    tokenizer = tiny_tokenizer()
    method = R2C(budget, WINDOW, tokenizer=tokenizer, relevance=shared_with_question, chunk=40, sentences=share)
    texts = token_texts(tokenizer, ids.tolist())
    chunks = split_chunks(texts[:-WINDOW], 40)
    kept = method.select(wide_model(), ids).tolist()
    assert kept == slow_selection(texts, chunks, budget, share)
    assert len(kept) <= budget < len(texts)
    assert kept == sorted({*kept})


def test_chunks_are_whole_lines_or_equal_parts():
    texts = ["a", "b\n", "c\n", *"defghij", "\n", "k"]
    assert split_chunks(texts, 3) == [(0, 3), (3, 5), (5, 8), (8, 11), (11, 12)]
    assert split_chunks(texts, 100) == [(0, 12)]
    assert split_chunks([], 3) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fusion")
    shape: dict[str, Any] = {"vocab_size": 512, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 3}
    shape |= {"decoder_start_token_id": 0, "initializer_factor": 1.0}
    torch.manual_seed(0)
    reader = T5ForConditionalGeneration(T5Config(**shape))
    reader.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def slow_read(folder: Path, question: str, chunks: list[str]) -> list[ChunkAttention]:
    """Each chunk encoded alone; the first decoder token's cross-attention by hand."""
    reader = T5ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = tiny_tokenizer()
    prefix = f"question: {question} title:  context: "
    encoded = [tokenizer(prefix + chunk, return_offsets_mapping=True) for chunk in chunks]
    weights_by_layer: list[torch.Tensor] = []

    def attend(module: Any, inputs: Any, options: Any) -> None:
        hidden = inputs[0] if inputs else options["hidden_states"]
        query = module.q(hidden).view(3, 4)
        key = module.k(options["key_value_states"])[0].view(-1, 3, 4)
        weights_by_layer.append(torch.einsum("hd,shd->hs", query, key).softmax(dim=-1).sum(dim=0))

    hooks = []
    blocks: Any = reader.decoder.block
    for block in blocks:
        hooks.append(block.layer[1].EncDecAttention.register_forward_pre_hook(attend, with_kwargs=True))
    with torch.no_grad():
        states = [reader.encoder(torch.tensor([chunk["input_ids"]]))[0] for chunk in encoded]
        reader.decoder(torch.tensor([[0]]), encoder_hidden_states=torch.cat(states, dim=1))
    for hook in hooks:
        hook.remove()

    weights = torch.stack(weights_by_layer).sum(dim=0).tolist()
    attention = []
    first = 0
    for chunk in encoded:
        last = first + len(chunk["input_ids"])
        chunk_weights = weights[first:last]
        tokens = []
        for (start, end), weight in zip(chunk["offset_mapping"], chunk_weights, strict=True):
            if end > len(prefix):
                tokens.append((max(start - len(prefix), 0), weight))
        mean = sum(chunk_weights[:-1]) / (len(chunk_weights) - 1)
        attention.append(ChunkAttention(mean, tokens))
        first = last
    return attention


def save_as_fid(folder: Path, target: Path) -> None:
    """Save a reader as Fusion-in-Decoder does: a pickle in which modules wrap the encoder and its blocks."""
    state = T5ForConditionalGeneration.from_pretrained(folder).state_dict()
    wrapped = {}
    for name, tensor in state.items():
        if name.startswith("encoder.block"):
            block, _, parameter = name.removeprefix("encoder.block.").partition(".")
            name = f"encoder.encoder.block.{block}.module.{parameter}"
        elif name.startswith("encoder."):
            name = f"encoder.{name}"
        wrapped[name] = tensor
    torch.save(wrapped, target / "pytorch_model.bin")
    T5Config.from_pretrained(folder).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)


@pytest.mark.parametrize("form", ["safetensors", "FiD's pickle"])
def test_the_decoders_first_token_attends_to_all_chunks(folder, form, tmp_path):
    reader = folder
    if form != "safetensors":
        save_as_fid(folder, tmp_path)
        reader = tmp_path
    r2c._loaded.cache_clear()
    question = "Who opens the gate?"
    attention = Fusion(str(reader))(question, LINES[:3])
    for chunk, expected in zip(attention, slow_read(folder, question, LINES[:3]), strict=True):
        starts = [start for start, _ in chunk.tokens]
        weights = torch.tensor([weight for _, weight in chunk.tokens])
        assert starts == [start for start, _ in expected.tokens]
        assert_close(weights, torch.tensor([weight for _, weight in expected.tokens]))
        assert chunk.mean == pytest.approx(expected.mean, rel=1e-4)
    method = R2C(70, WINDOW, tokenizer=tiny_tokenizer(), relevance=Fusion(str(reader)))
    assert len(method.select(wide_model(), text_ids(TEXT))) <= 70


def test_bad_options_and_missing_readers_are_refused(tmp_path):
    common: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "relevance": Fusion(str(tmp_path))}
    with refused("chunk", "range"):
        R2C(70, WINDOW, chunk=0, **common)
    with refused("sentences", "range"):
        R2C(70, WINDOW, sentences=1.2, **common)
    with refused("reader", "file"):
        R2C(70, WINDOW, **common).select(wide_model(), text_ids(TEXT))
