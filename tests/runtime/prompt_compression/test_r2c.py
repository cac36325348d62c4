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
TEXT, WINDOW = "\n".join(LINES) + "\nWho opens the gate at night?", 14


def slow_selection(texts: list[str], chunks: Sequence[tuple[int, int]], budget: int, share: float) -> list[int]:
    """Section 3.3 and 3.4, chunk by chunk, from the text alone."""
    before, question = len(texts) - WINDOW, "".join(texts[-WINDOW:])
    read = shared_with_question(question, ["".join(texts[a:b]) for a, b in chunks])
    order = sorted(range(len(chunks)), key=lambda place: -read[place].mean)
    least = before - (len(texts) - budget) * (1 - share)
    kept: list[int] = []
    while sum(chunks[place][1] - chunks[place][0] for place in kept) < least:
        kept.append(order[len(kept)])
    held = {place: [*range(*chunks[place])] for place in kept}
    goes = sum(map(len, held.values())) + WINDOW - budget
    inverse = {place: 1 / read[place].mean for place in kept}
    quota = {place: goes * inverse[place] / sum(inverse.values()) for place in kept}
    total, spare = 0, 0.0
    for number in range(len(kept) - 1, -1, -1):
        place = kept[number]
        quota[place] += spare
        start, end = chunks[place]
        sentences, owners = split_sentences(texts[start:end])
        scores = []
        for each in range(len(sentences)):
            first = sum(map(len, sentences[:each]))
            inside = [weight for at, weight in read[place].tokens if first <= at < first + len(sentences[each])]
            scores.append(sum(inside) / len(inside) if inside else 1e9)
        removed = 0
        while removed < quota[place] and total < goes and held[place]:
            left = {owners[token - start] for token in held[place]}
            worst = min(left, key=lambda each: (scores[each], each))
            going = [token for token in held[place] if owners[token - start] == worst]
            held[place] = [token for token in held[place] if token not in going]
            removed, total = removed + len(going), total + len(going)
        spare = max(quota[place] - removed, 0)
        excess = max(removed - quota[place], 0)
        for better in kept[:number]:
            taken = min(excess, quota[better])
            quota[better] -= taken
            excess -= taken
    return [*sorted(token for tokens in held.values() for token in tokens), *range(before, len(texts))]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("budget", [30, 60, 90, 120])
def test_chunks_then_sentences_stay(budget, share):
    ids, tokenizer = text_ids(TEXT), tiny_tokenizer()
    method = R2C(budget, WINDOW, tokenizer=tokenizer, relevance=shared_with_question, chunk=40, sentences=share)
    texts = token_texts(tokenizer, ids.tolist())
    chunks = split_chunks(texts[:-WINDOW], 40)
    kept = method.select(wide_model(), ids).tolist()
    assert kept == slow_selection(texts, chunks, budget, share)
    assert len(kept) <= budget < len(texts) and kept == sorted({*kept})


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
    reader, tokenizer = T5ForConditionalGeneration.from_pretrained(folder).eval(), tiny_tokenizer()
    prefix = f"question: {question} title:  context: "
    given = [tokenizer(prefix + chunk, return_offsets_mapping=True) for chunk in chunks]
    found: list[torch.Tensor] = []

    def attend(module: Any, inputs: Any, named: Any) -> None:
        query = module.q(inputs[0] if inputs else named["hidden_states"]).view(3, 4)
        key = module.k(named["key_value_states"])[0].view(-1, 3, 4)
        found.append(torch.einsum("hd,shd->hs", query, key).softmax(dim=-1).sum(dim=0))

    blocks: Any = reader.decoder.block
    hooks = [block.layer[1].EncDecAttention.register_forward_pre_hook(attend, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        states = torch.cat([reader.encoder(torch.tensor([each["input_ids"]]))[0] for each in given], dim=1)
        reader.decoder(torch.tensor([[0]]), encoder_hidden_states=states)
    for hook in hooks:
        hook.remove()
    read, start = [], 0
    for each in given:
        row = sum(found)[start : (start := start + len(each["input_ids"]))].tolist()  # type: ignore[index]
        placed = [(a - len(prefix), b - len(prefix), w) for (a, b), w in zip(each["offset_mapping"], row, strict=True)]
        tokens = [(max(first, 0), weight) for first, end, weight in placed if end > 0]
        read.append(ChunkAttention(sum(row[:-1]) / (len(row) - 1), tokens))
    return read


@pytest.mark.parametrize("form", ["safetensors", "FiD's pickle"])
def test_the_decoders_first_token_attends_to_all_chunks(folder, form, tmp_path):
    place = folder
    if form != "safetensors":
        place = tmp_path
        state = T5ForConditionalGeneration.from_pretrained(folder).state_dict()
        wrapped = {}
        for name, tensor in state.items():
            if name.startswith("encoder."):
                head, _, rest = name.removeprefix("encoder.block.").partition(".")
                name = f"encoder.encoder.block.{head}.module.{rest}" if "block" in name else f"encoder.{name}"
            wrapped[name] = tensor
        torch.save(wrapped, place / "pytorch_model.bin")
        T5Config.from_pretrained(folder).save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
    r2c._loaded.cache_clear()
    read = Fusion(str(place))("Who opens the gate?", LINES[:3])
    for one, other in zip(read, slow_read(folder, "Who opens the gate?", LINES[:3]), strict=True):
        assert [start for start, _ in one.tokens] == [start for start, _ in other.tokens]
        assert_close(torch.tensor([each for _, each in one.tokens]), torch.tensor([each for _, each in other.tokens]))
        assert one.mean == pytest.approx(other.mean, rel=1e-4)
    method = R2C(70, WINDOW, tokenizer=tiny_tokenizer(), relevance=Fusion(str(place)))
    assert len(method.select(wide_model(), text_ids(TEXT))) <= 70


def test_what_is_wrong_is_named(tmp_path):
    common: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "relevance": Fusion(str(tmp_path))}
    with refused("chunk", "range"):
        R2C(70, WINDOW, chunk=0, **common)
    with refused("sentences", "range"):
        R2C(70, WINDOW, sentences=1.2, **common)
    with refused("reader", "file"):
        R2C(70, WINDOW, **common).select(wide_model(), text_ids(TEXT))
