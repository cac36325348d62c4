"""LLMLingua-2's package itself, with a small random classifier in place of the published one."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, BertTokenizer

from keepsight.runtime.prompt_compression import text
from keepsight.runtime.prompt_compression.text import LLMLingua2, Package
from tests.runtime.prompt_compression.prompts import PROSE, text_ids, wide_model
from tests.tiny import tiny_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a BERT of two labels; the package counts tokens by an encoding that it would download."""
    counting = SimpleNamespace(encode=lambda words, **_: words.split())
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(encoding_for_model=lambda _: counting))
    folder = tmp_path / "tiny-bert-base-multilingual-cased"
    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *LETTERS.upper()]
    vocabulary += [f"##{letter}" for letter in LETTERS]
    vocabulary += [*".,;?!'-()"]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)))
    tokenizer = BertTokenizer.from_pretrained(str(folder), do_lower_case=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = BertConfig(vocab_size=len(tokenizer) + 100, **shape)
    BertForTokenClassification(config).save_pretrained(folder)
    text._compressor.cache_clear()
    return folder


@pytest.mark.slow
def test_the_words_that_the_classifier_prefers_are_kept(classifier: Path) -> None:
    """A word's probability is the mean over its tokens, all in one stretch."""
    short = " ".join(PROSE.split()[:40])
    labelled = Package(str(classifier))(short, 0.4)
    model = BertForTokenClassification.from_pretrained(classifier).eval()
    inputs = BertTokenizer.from_pretrained(str(classifier))(short, return_tensors="pt")
    with torch.no_grad():
        probabilities = model(**inputs).logits.softmax(dim=-1)[0, :, 1]
    end = 0
    kept: list[float] = []
    dropped: list[float] = []
    for word, is_kept in labelled:
        start = short.index(word, end)
        end = start + len(word)
        of_word = []
        for token in range(1, len(probabilities) - 1):
            if start <= inputs.token_to_chars(token).start < end:
                of_word.append(probabilities[token])
        mean = torch.stack(of_word).mean().item()
        if is_kept:
            kept.append(mean)
        else:
            dropped.append(mean)
    assert "".join(word for word, _ in labelled) == short.replace(" ", "")
    assert min(kept) >= max(dropped)
    assert len(kept) / len(labelled) == pytest.approx(0.4, abs=0.1)


@pytest.mark.slow
def test_the_method_keeps_its_words_and_the_window(classifier: Path) -> None:
    ids = text_ids(PROSE)
    tokenizer = tiny_tokenizer()
    package = Package(str(classifier))
    rates: list[float] = []

    def label(words: str, rate: float) -> text.LabelledWords:
        rates.append(rate)
        return package(words, rate)

    kept = LLMLingua2(40, 5, tokenizer=tokenizer, label=label).select(wide_model(), ids)
    texts = text.token_texts(tokenizer, ids[:-5].tolist())
    word_tokens = text.kept_tokens(texts, package("".join(texts), rates[-1]))
    window = range(len(ids) - 5, len(ids))
    assert kept.tolist() == [*word_tokens, *window]
    assert 10 < len(word_tokens) <= 35
