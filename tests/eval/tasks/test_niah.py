"""Needles in a haystack: lengths, depths, references, and that nothing is shared with the training mixture."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from keepsight.commands.eval import Config
from keepsight.commands.from_recipe import resources_of, target_of
from keepsight.commands.parse import parse
from keepsight.corpus import evaluation_paragraphs, sentences, source_documents, topic_documents
from keepsight.data_gen.words import all_wordings
from keepsight.errors import Code
from keepsight.eval.sweep import Variant, run_samples
from keepsight.eval.tasks import niah
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.niah import make_samples
from keepsight.eval.tasks.ruler import Ruler
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.runtime.methods import make_method
from tests.refused import refused

TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 1000 tokens, trained on a little prose."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(evaluation_paragraphs()[:100], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE)


def used(sample: RenderedSample, tokenizer: Any) -> int:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": sample.prompt}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(prompt + sample.answer_prefix, add_special_tokens=False)["input_ids"]
    assert sample.prompt_ids.tolist() == ids
    return len(ids) + sample.max_new_tokens


@pytest.mark.parametrize(
    ("kind", "needles", "keys", "references"),
    [("single", 1, 1, 1), ("multikey", 4, 4, 1), ("multivalue", 4, 1, 4), ("multiquery", 4, 4, 4)],
)
def test_the_kinds(kind: str, needles: int, keys: int, references: int, tokenizer: PreTrainedTokenizerFast) -> None:
    samples = niah.make_samples(kind, 900, 5, 1, tokenizer)
    assert len({sample.id for sample in samples}) == len({sample.prompt for sample in samples}) == 5
    for sample in samples:
        assert (sample.task, sample.length, sample.metric) == (f"niah_{kind}", 900, "string_match_all")
        assert 900 - 250 < used(sample, tokenizer) <= 900  # the corpus' longest sentences have 150 tokens here
        stated = re.findall(r"One of the special magic numbers for (\w+-\w+) is: (\d{7})\.", sample.prompt)
        assert len(stated) == len(set(stated)) == len(sample.spans) == needles
        assert len({key for key, _ in stated}) == keys
        asked = re.findall(r"\w+-\w+", sample.prompt.splitlines()[-1])
        assert {value for key, value in stated if key in asked} == set(sample.references)
        assert asked == re.findall(r"\w+-\w+", sample.answer_prefix)
        assert all(span in sample.prompt for span in sample.spans) and len(sample.references) == references
        assert score(sample, ", ".join(sample.references)) == 1.0
        assert score(sample, sample.references[0]) == 1 / references
        some = "Some special magic numbers are" if references > 1 else "A special magic number is"
        assert sample.prompt.startswith(f"{some} hidden within the following text. Make sure to memorize it.")
        assert sample.prompt.endswith(" mentioned in the provided text?")
        assert sample.answer_prefix.endswith("text are" if references > 1 else "text is")


@pytest.mark.parametrize(("kind", "keys", "values"), [("single", 1, 1), ("multiquery", 4, 1), ("multivalue", 1, 4)])
def test_every_key_is_asked_for(kind: str, keys: int, values: int, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = niah.make_samples(kind, 900, 2, 1, tokenizer)
    asked = niah.make_samples(kind, 900, 2, 1, tokenizer, every_key=True)
    assert len(asked) == len({sample.key for sample in asked}) == 2 * keys
    for number, sample in enumerate(asked):
        first = asked[number // keys * keys]
        assert (sample.context, sample.spans, sample.task) == (first.context, first.spans, f"niah_{kind}")
        assert sample.prompt == sample.context + sample.question
        stated = re.findall(r"for (\w+-\w+) is: (\d{7})\.", sample.context)
        (key,) = re.findall(r"\w+-\w+", sample.question)
        assert key in sample.answer_prefix and f" {key}" not in first.question.replace(key, "") + first.context[:150]
        assert set(sample.references) == {value for other, value in stated if other == key}
        assert len(sample.references) == values and len(sample.spans) == keys * values
        assert all(span in sample.context for span in sample.spans)
        assert 900 - 250 < used(sample, tokenizer) <= 900
    for sample, others in zip(plain, (asked[:keys], asked[keys:]), strict=True):
        assert sorted(sample.references) == sorted(value for each in others for value in each.references)


def test_no_question_makes_the_prompt_too_long(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = "z" * 300  # the longest key's question decides how much haystack there is room for
    monkeypatch.setitem(niah.TEXTS, "nouns", ["ant", "bee", "cat", longest])
    for sample in niah.make_samples("multikey", 2500, 6, 0, tokenizer, every_key=True):
        assert used(sample, tokenizer) <= 2500


def test_same_seed_same_samples(tokenizer: PreTrainedTokenizerFast) -> None:
    first, more, other = (niah.make_samples("single", 600, *rest, tokenizer) for rest in ((3, 4), (5, 4), (3, 5)))
    assert first == more[:3]  # more samples begin with the same ones
    assert {sample.references for sample in first}.isdisjoint(sample.references for sample in other)


def test_needles_are_spread_over_all_depths(tokenizer: PreTrainedTokenizerFast) -> None:
    samples = niah.make_samples("single", 3000, 10, 0, tokenizer)
    depths = [sample.prompt.index(sample.spans[0]) / len(sample.prompt) for sample in samples]
    assert depths == pytest.approx([sample.depth for sample in samples], abs=0.1)
    for count in (5, 10):
        for part, depth in enumerate(sorted(depths[:count])):
            assert part / count - 0.1 < depth < (part + 1) / count + 0.1


def test_a_grid_of_depths(tokenizer: PreTrainedTokenizerFast) -> None:
    """Each depth at each length as often; results show where the needle stands."""
    request = TaskRequest(tokenizer, 4096, [1000, 2000], 2)
    samples = niah.Niah(depths=[0, 0.5, 1]).samples("depth", request)
    assert [(each.length, each.depth) for each in samples] == [
        (length, depth) for length in (1000, 2000) for depth in (0, 0, 0.5, 0.5, 1, 1)
    ]
    assert {each.task for each in samples} == {"niah_depth"} and len({each.key for each in samples}) == 12
    for each in samples:
        assert each.depth == pytest.approx(each.prompt.index(each.spans[0]) / len(each.prompt), abs=0.2)
    assert len(niah.Niah().depths) == 11
    with refused("niah.depths", "range"):
        niah.Niah(depths=[0.5, 1.5]).samples("depth", request)
    for benchmark, task in ((niah.Niah(), "single"), (Ruler(), "vt")):
        with refused("lengths", "range"):
            benchmark.samples(task, replace(request, lengths=[10**9]))


def test_own_haystack(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    text = tmp_path / "essay.txt"
    text.write_text("The  gardener\nslept. Nobody came! " + "endless " * 200)
    (sample,) = niah.make_samples("single", 1500, 1, 0, tokenizer, haystack=text)
    assert "The gardener slept." in sample.prompt
    assert 1500 - 100 < used(sample, tokenizer) <= 1500
    hay = sample.prompt.splitlines()[1].replace(sample.spans[0], "")
    assert set(hay.split()) <= set(text.read_text().split())


def test_bad_input(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    cases: list[tuple[str, int, Path | None, str, Code]] = [
        ("multi", 900, None, "kind", "unknown"),
        ("multikey", 60, None, "lengths", "range"),
        ("single", 900, tmp_path / "none.txt", "none.txt", "file"),
        ("single", 900, empty, "empty.txt", "range"),
        ("single", 900, binary, "binary.txt", "file"),
    ]
    for kind, length, haystack, field, code in cases:
        with refused(field, code):
            niah.make_samples(kind, length, 1, 0, tokenizer, haystack=haystack)


def test_evaluation_prose_occurs_in_no_training_document() -> None:
    documents = topic_documents("training") + source_documents("training")
    training = "\n".join(" ".join(document.text.split()) for document in documents)
    held_out = [sentence for paragraph in evaluation_paragraphs() for sentence in sentences(paragraph)]
    assert len(held_out) > 300
    assert [sentence for sentence in held_out if sentence in training] == []


def strings(value: Any) -> Iterator[str]:
    """Every text in a value of the training prompts' wordings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


def plain(phrase: str) -> str:
    """A phrase in lower case without its placeholders."""
    return " ".join(re.sub(r"\{\w+\}|[^\w{}]+", " ", phrase.lower()).split())


def test_phrases_are_not_shared_with_training() -> None:
    training = {plain(text) for text in strings({**all_wordings(), "words": []})}
    wordings = [niah.TEXTS["needle"], *niah.TEXTS["one"].values(), *niah.TEXTS["some"].values()]
    evaluation = {plain(part) for phrase in wordings for part in re.split(r"(?<=[.?])\s|\n", phrase)} - {""}
    assert len(training) > 150
    assert len(evaluation) >= 9
    assert not training & evaluation
    assert not [text for text in training if "magic" in text or any(part in text for part in evaluation)]


def test_key_words_are_not_shared_with_training() -> None:
    training = {word.lower() for text in strings(all_wordings()) for word in re.findall(r"\w+", text)}
    assert {"lantern", "copper"} <= training
    words = niah.TEXTS["adjectives"] + niah.TEXTS["nouns"]
    evaluation = {*words}
    assert len(evaluation) == len(words) > 100
    assert not training & (evaluation | {word + "s" for word in evaluation})


@pytest.mark.slow
def test_on_needles_the_oracle_is_ahead_of_lookaheadkv_and_that_of_snapkv():
    config = parse(Config, ["model.device=cpu", "out=unused"])
    target = target_of(config)
    resources = resources_of(config, target)
    variants = [Variant(name, make_method(name, 64, resources)) for name in ("oracle", "lookaheadkv", "snapkv")]
    samples = make_samples("single", 512, 4, 7, target.tokenizer, max_new_tokens=12)
    rows = [row for sample in samples for row in run_samples(target, [sample], variants, 10_000)[0]]
    score = {name: fmean(row.score for row in rows if row.method == name) for name in ("full", "oracle", "snapkv")}
    ours = fmean(row.score for row in rows if row.method == "lookaheadkv")
    assert score["full"] >= score["oracle"] >= ours > score["snapkv"]
    loss = {row.method: 0.0 for row in rows}
    for row in rows:
        loss[row.method] += row.excess_nll
    assert loss["lookaheadkv"] < loss["snapkv"]
    assert loss["oracle"] < loss["snapkv"]
