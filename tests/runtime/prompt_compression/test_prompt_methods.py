"""What methods that shorten the prompt have in common, and those that choose among words and sentences."""

import random
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from keepsight import generate
from keepsight.runtime.prompt_compression import text
from keepsight.runtime.prompt_compression.r2c import R2C
from keepsight.runtime.prompt_compression.text import (
    LLMLingua2,
    SentenceSimilarity,
    Truncation,
    kept_tokens,
    split_sentences,
    token_texts,
)
from tests.refused import refused
from tests.runtime.prompt_compression.prompts import (
    PROSE,
    by_word_length,
    small_cascade,
    small_specpc,
    text_ids,
    text_methods,
    tiny_draft,
    wide_model,
)
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("length", "budget", "expected"),
    [(10, 5, [0, 1, 7, 8, 9]), (10, 1, [9]), (10, 0.4, [0, 1, 8, 9]), (3, 5, [0, 1, 2])],
)
def test_truncation_keeps_both_ends(length, budget, expected):
    ids = torch.arange(length)[None] + 3
    (short,) = Truncation(budget).shorten(tiny_model(), ids)
    assert (short - 3).tolist() == expected


def all_methods():
    draft = tiny_draft(vocab_size=512)
    return [Truncation(20), small_specpc(draft=draft), small_specpc(draft=draft, lookahead=4), *text_methods()]


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: type(method).__name__)
def test_answers_follow_the_short_prompt(method):
    """The state is that of the kept tokens as a prompt of their own, and `generate` answers from it."""
    model, ids = wide_model(), text_ids(PROSE)[None]
    (short,) = method.shorten(model, ids)
    assert len(short) <= 20
    if not isinstance(method, LLMLingua2 | R2C):  # whole words, chunks and sentences
        assert len(short) == 20
    if method.window:
        assert torch.equal(short[-method.window :], ids[0, -method.window :])
    state = method.start(model, ids)
    assert state.lengths.tolist() == [len(short)]
    assert torch.equal(state.counts(), torch.full((3, 1, 2), len(short)))

    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    short_with_answer = model.generate(short[None], attention_mask=torch.ones(1, len(short)), **greedy)
    expected = short_with_answer[:, len(short) :]
    assert torch.equal(generate(model, ids, method, **greedy), expected)
    with_prompt = model.generate(ids, custom_generate=method, **greedy)
    assert torch.equal(with_prompt, torch.cat([ids, expected], dim=1))


@pytest.mark.parametrize("method", [small_specpc(window=30, budget=40), small_cascade(prompt_window=30)])
def test_prompts_shorter_than_the_window_are_refused(method):
    """By `check`, before any model runs, and by `start`."""
    with refused("prompt", "range"):
        method.check(20, 256)
    with refused("prompt", "range"):
        method.start(tiny_model(), *prompt_ids(31, 20))
    method.check(30, 256)


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (lambda: small_specpc(window=0), "window", "range"),
        (lambda: small_specpc(reduction="mean"), "reduction", "unknown"),
        (lambda: small_cascade(budget=9), "budget", "range"),
        (lambda: small_cascade(prompt_budget=0.5), "prompt_budget", "type"),
        (lambda: text.Package("some-encoder"), "model", "unknown"),
        (lambda: small_specpc(4), "budget", "range"),
    ],
)
def test_values_out_of_range_are_refused(make, field, code):
    with refused(field, code) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["naïve café — 東京 🙂🙃 end\n", "<|user|>Hi<|end|> there"])
def test_pieces_are_the_text(text):
    ids = text_ids(text).tolist()
    texts = token_texts(tiny_tokenizer(), ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_sentences_own_their_tokens():
    texts = ["One", " is", " here.", " Two", "?\n", "\n", "Pi", " is", " 3", ".", "5", ' "so', '."', " End"]
    sentences, owners = split_sentences(texts)
    assert sentences == ["One is here.", " Two?", "\n\n", 'Pi is 3.5 "so."', " End"]
    assert owners == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4]


def test_the_closest_sentences_are_kept_in_order():
    ids = text_ids(PROSE)
    _, sentence_similarity, _ = text_methods(budget=60, window=12)
    kept = sentence_similarity.select(wide_model(), ids).tolist()
    assert " The with statement wraps the execution of a block!" in tiny_tokenizer().decode(ids[kept])
    assert kept[-12:] == list(range(len(ids) - 12, len(ids)))
    assert len(kept) == 60
    assert kept == sorted(set(kept))


def test_kept_words_find_their_tokens():
    texts = ["The", " qui", "ck", " fox", ",", "\n", "  ", "the", " ", "end"]
    words = [("The", True), ("quick", False), ("gone", True), ("fox", True), (",", False), ("the", True)]
    assert kept_tokens(texts, words) == [0, 3, 7]
    assert kept_tokens(texts, [("quick", True)]) == [1, 2]
    assert kept_tokens(texts, []) == []
    assert kept_tokens(["", "", "€", " 5", "", "é", ""], [("€", True), ("5", False), ("é", True)]) == [0, 1, 2, 4, 5]


def test_too_many_kept_words_are_asked_for_again():
    """A compressor that keeps twice what it is asked for."""
    rates = []

    def keep_twice_the_rate(text, rate):
        rates.append(rate)
        return by_word_length(text, min(2 * rate, 1))

    def keep_everything(text, _rate):
        return by_word_length(text, 1)

    ids = text_ids(PROSE)
    method = LLMLingua2(40, 5, tokenizer=tiny_tokenizer(), label=keep_twice_the_rate)
    kept = method.select(wide_model(), ids)
    assert 5 < len(kept) <= 40
    assert len(rates) > 1

    never_short_enough = LLMLingua2(40, 5, tokenizer=tiny_tokenizer(), label=keep_everything)
    kept = never_short_enough.select(wide_model(), ids)
    assert kept.tolist() == list(range(len(ids) - 5, len(ids)))


class FakeCompressor:
    """As `llmlingua.PromptCompressor`: it seeds every generator, and labels words in one string."""

    def __init__(self, model_name, device_map, model_config, use_llmlingua2):
        assert use_llmlingua2 and model_config == {"trust_remote_code": False, "use_safetensors": True}
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(42)

    def compress_prompt_llmlingua2(self, context, rate, return_word_label, word_sep, label_sep):
        assert return_word_label
        labelled = [f"{word}{label_sep}{int(keep)}" for word, keep in by_word_length(context[0], rate)]
        return {"fn_labeled_original_prompt": word_sep.join(labelled)}


def random_states():
    """The states of the process's random number generators."""
    numpy_state = str(np.random.get_state(legacy=False))
    return random.getstate(), numpy_state, torch.random.get_rng_state().tolist()


def test_llmlingua_package_is_called_with_its_own_interface(monkeypatch):
    compressor = Mock(wraps=FakeCompressor)
    monkeypatch.setitem(sys.modules, "llmlingua", SimpleNamespace(PromptCompressor=compressor))
    text._compressor.cache_clear()
    model = wide_model()
    ids = text_ids(PROSE)
    tokenizer = tiny_tokenizer()
    by_package = LLMLingua2(40, 5, tokenizer=tokenizer)
    by_length = LLMLingua2(40, 5, tokenizer=tokenizer, label=by_word_length)
    before = random_states()
    kept = [by_package.select(model, ids).tolist() for _ in range(2)]
    assert random_states() == before
    text._compressor.cache_clear()
    assert kept == [by_length.select(model, ids).tolist()] * 2
    compressor.assert_called_once()


class FakeEncoder:
    """As `sentence_transformers.SentenceTransformer`: bags of words."""

    def __init__(self, model, trust_remote_code, model_kwargs):
        if model == "nowhere":
            raise OSError("no such folder\nand more lines")
        assert not trust_remote_code and model_kwargs == {"use_safetensors": True}

    def encode(self, texts, convert_to_tensor, normalize_embeddings, show_progress_bar):
        assert convert_to_tensor and normalize_embeddings and not show_progress_bar
        vocabulary = sorted(set(" ".join(texts).lower().split()))
        counts = []
        for sentence in texts:
            words = sentence.lower().split()
            counts.append([float(words.count(word)) for word in vocabulary])
        return torch.nn.functional.normalize(torch.tensor(counts), dim=1)


def test_sentence_transformers_package_is_called_with_its_own_interface(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=FakeEncoder))
    text._encoder.cache_clear()
    close, far = text.Cosine()(["which block", "something else"], "which block is it").tolist()
    assert (close, far) == (pytest.approx(2 / 8**0.5), 0)
    with refused("model", "file"):
        text.Cosine("nowhere")(["a"], "b")
    text._encoder.cache_clear()


def test_sentences_are_ranked_in_float32_whatever_the_default_dtype():
    """Similarities that bfloat16 holds for equal."""
    ids = text_ids("One two. Three four. Five six. Seven")

    def similarity(sentences, question):
        return torch.tensor([0.5 + index / 10**5 for index in range(len(sentences))], dtype=torch.float32)

    method = SentenceSimilarity(8, 3, tokenizer=tiny_tokenizer(), similarity=similarity)
    model = wide_model()
    expected = method.select(model, ids)
    torch.set_default_dtype(torch.bfloat16)
    try:
        kept = method.select(model, ids)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(kept, expected)
    assert int(kept[0]) > 3


@pytest.mark.parametrize(
    ("module", "kind", "cached"),
    [
        ("llmlingua", LLMLingua2, text._compressor),
        ("sentence_transformers", SentenceSimilarity, text._encoder),
    ],
)
def test_a_missing_package_is_named(monkeypatch, module, kind, cached):
    cached.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with refused(module, "missing"):
        kind(20, 5, tokenizer=tiny_tokenizer()).select(wide_model(), text_ids(PROSE))
