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
from tests.runtime.prompt_compression.test_prompt_methods import PROSE, text_ids, wide_model
from tests.tiny import tiny_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a BERT of two labels; the package counts tokens by an encoding that it would download."""
    counting = SimpleNamespace(encode=lambda words, **_: words.split())
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(encoding_for_model=lambda _: counting))
    folder = tmp_path / "tiny-bert-base-multilingual-cased"
    folder.mkdir()
    letters = [*LETTERS, *LETTERS.upper(), *(f"##{letter}" for letter in LETTERS), *".,;?!'-()"]
    (folder / "vocab.txt").write_text(
        "\n".join(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]))
    )
    tokenizer = BertTokenizer.from_pretrained(str(folder), do_lower_case=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertForTokenClassification(BertConfig(vocab_size=len(tokenizer) + 100, **shape)).save_pretrained(folder)
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
        chances = model(**inputs).logits.softmax(dim=-1)[0, :, 1]
    spans = [(inputs.token_to_chars(place), place) for place in range(1, len(chances) - 1)]
    cursor, kept, dropped = 0, list[float](), list[float]()
    for word, is_kept in labelled:
        start = short.index(word, cursor)
        cursor = start + len(word)
        mean = torch.stack([chances[place] for span, place in spans if start <= span.start < cursor]).mean()
        (kept if is_kept else dropped).append(mean.item())
    assert "".join(word for word, _ in labelled) == short.replace(" ", "")
    assert min(kept) >= max(dropped) and len(kept) / len(labelled) == pytest.approx(0.4, abs=0.1)


@pytest.mark.slow
def test_the_method_keeps_its_words_and_the_window(classifier: Path) -> None:
    ids, tokenizer, package = text_ids(PROSE), tiny_tokenizer(), Package(str(classifier))
    rates = list[float]()

    def label(words: str, rate: float) -> text.LabelledWords:
        rates.append(rate)
        return package(words, rate)

    kept = LLMLingua2(40, 5, tokenizer=tokenizer, label=label).select(wide_model(), ids)
    texts = text.token_texts(tokenizer, ids[:-5].tolist())
    words = text.kept_tokens(texts, package("".join(texts), rates[-1]))
    assert kept.tolist() == [*words, *range(len(ids) - 5, len(ids))] and 10 < len(words) <= 35
