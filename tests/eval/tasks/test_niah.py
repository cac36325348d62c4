"""Needles in a haystack: lengths, depths, references, and that nothing is shared with the training mixture."""

import re
from collections import defaultdict
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


def tokens_of(sample: RenderedSample, tokenizer: Any) -> int:
    """Tokens of the prompt and of the longest answer."""
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
    assert len({sample.id for sample in samples}) == 5
    assert len({sample.prompt for sample in samples}) == 5
    for sample in samples:
        assert sample.task == f"niah_{kind}"
        assert sample.length == 900
        assert sample.metric == "string_match_all"
        assert 900 - 250 < tokens_of(sample, tokenizer) <= 900  # the corpus' longest sentences have 150 tokens here
        stated = re.findall(r"One of the special magic numbers for (\w+-\w+) is: (\d{7})\.", sample.prompt)
        assert len(stated) == len(set(stated)) == needles
        assert len({key for key, _ in stated}) == keys
        assert len(sample.spans) == needles
        for span in sample.spans:
            assert span in sample.prompt
        asked_keys = re.findall(r"\w+-\w+", sample.prompt.splitlines()[-1])
        assert asked_keys == re.findall(r"\w+-\w+", sample.answer_prefix)
        asked_values = {value for key, value in stated if key in asked_keys}
        assert asked_values == set(sample.references)
        assert len(sample.references) == references
        assert score(sample, ", ".join(sample.references)) == 1.0
        assert score(sample, sample.references[0]) == 1 / references
        if references > 1:
            numbers_are = "Some special magic numbers are"
            assert sample.answer_prefix.endswith("text are")
        else:
            numbers_are = "A special magic number is"
            assert sample.answer_prefix.endswith("text is")
        assert sample.prompt.startswith(f"{numbers_are} hidden within the following text. Make sure to memorize it.")
        assert sample.prompt.endswith(" mentioned in the provided text?")


@pytest.mark.parametrize(("kind", "keys", "values"), [("single", 1, 1), ("multiquery", 4, 1), ("multivalue", 1, 4)])
def test_every_key_is_asked_for(kind: str, keys: int, values: int, tokenizer: PreTrainedTokenizerFast) -> None:
    samples = niah.make_samples(kind, 900, 2, 1, tokenizer, every_key=True)
    assert len(samples) == 2 * keys
    assert len({sample.key for sample in samples}) == 2 * keys
    for index, sample in enumerate(samples):
        first_of_context = samples[index // keys * keys]
        assert sample.context == first_of_context.context
        assert sample.spans == first_of_context.spans
        assert sample.task == f"niah_{kind}"
        assert sample.prompt == sample.context + sample.question
        stated = re.findall(r"for (\w+-\w+) is: (\d{7})\.", sample.context)
        (asked_key,) = re.findall(r"\w+-\w+", sample.question)
        assert asked_key in sample.answer_prefix
        assert f" {asked_key}" not in first_of_context.question.replace(asked_key, "")
        assert f" {asked_key}" not in first_of_context.context[:150]
        assert set(sample.references) == {value for key, value in stated if key == asked_key}
        assert len(sample.references) == values
        assert len(sample.spans) == keys * values
        for span in sample.spans:
            assert span in sample.context
        assert 900 - 250 < tokens_of(sample, tokenizer) <= 900
    of_all_keys = niah.make_samples(kind, 900, 2, 1, tokenizer)
    for sample, by_key in zip(of_all_keys, (samples[:keys], samples[keys:]), strict=True):
        references: list[str] = []
        for sample_of_key in by_key:
            references += sample_of_key.references
        assert sorted(sample.references) == sorted(references)


def test_no_question_makes_the_prompt_too_long(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = "z" * 300  # the longest key's question decides how much haystack there is room for
    monkeypatch.setitem(niah.TEXTS, "nouns", ["ant", "bee", "cat", longest])
    for sample in niah.make_samples("multikey", 2500, 6, 0, tokenizer, every_key=True):
        assert tokens_of(sample, tokenizer) <= 2500


def test_same_seed_same_samples(tokenizer: PreTrainedTokenizerFast) -> None:
    three = niah.make_samples("single", 600, 3, 4, tokenizer)
    five = niah.make_samples("single", 600, 5, 4, tokenizer)
    other_seed = niah.make_samples("single", 600, 3, 5, tokenizer)
    assert three == five[:3]  # more samples begin with the same ones
    references = {sample.references for sample in three}
    assert references.isdisjoint(sample.references for sample in other_seed)


def depth_in_prompt(sample: RenderedSample) -> float:
    """Where the needle stands, as a share of the prompt's characters."""
    return sample.prompt.index(sample.spans[0]) / len(sample.prompt)


def test_needles_are_spread_over_all_depths(tokenizer: PreTrainedTokenizerFast) -> None:
    samples = niah.make_samples("single", 3000, 10, 0, tokenizer)
    depths = [depth_in_prompt(sample) for sample in samples]
    assert depths == pytest.approx([sample.depth for sample in samples], abs=0.1)
    for count in (5, 10):
        for index, depth in enumerate(sorted(depths[:count])):
            assert index / count - 0.1 < depth < (index + 1) / count + 0.1


def test_a_grid_of_depths(tokenizer: PreTrainedTokenizerFast) -> None:
    """Each depth at each length as often; results show where the needle stands."""
    request = TaskRequest(tokenizer, 4096, [1000, 2000], 2)
    samples = niah.Niah(depths=[0, 0.5, 1]).samples("depth", request)
    assert [sample.length for sample in samples] == [1000] * 6 + [2000] * 6
    assert [sample.depth for sample in samples] == [0, 0, 0.5, 0.5, 1, 1] * 2
    assert len({sample.key for sample in samples}) == 12
    for sample in samples:
        assert sample.task == "niah_depth"
        assert sample.depth == pytest.approx(depth_in_prompt(sample), abs=0.2)
    assert len(niah.Niah().depths) == 11
    with refused("niah.depths", "range"):
        niah.Niah(depths=[0.5, 1.5]).samples("depth", request)
    for benchmark, task in ((niah.Niah(), "single"), (Ruler(), "vt")):
        with refused("lengths", "range"):
            benchmark.samples(task, replace(request, lengths=[10**9]))


def test_a_haystack_of_the_user(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    haystack = tmp_path / "essay.txt"
    haystack.write_text("The  gardener\nslept. Nobody came! " + "endless " * 200)
    (sample,) = niah.make_samples("single", 1500, 1, 0, tokenizer, haystack=haystack)
    assert "The gardener slept." in sample.prompt
    assert 1500 - 100 < tokens_of(sample, tokenizer) <= 1500
    hay = sample.prompt.splitlines()[1].replace(sample.spans[0], "")
    assert set(hay.split()) <= set(haystack.read_text().split())


def test_bad_input(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    binary = tmp_path / "binary.txt"
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
    held_out: list[str] = []
    for paragraph in evaluation_paragraphs():
        held_out += sentences(paragraph)
    assert len(held_out) > 300
    assert [sentence for sentence in held_out if sentence in training] == []


def strings(value: Any) -> Iterator[str]:
    """Every text in a value of the training prompts' wordings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def plain(phrase: str) -> str:
    """A phrase in lower case without its placeholders."""
    return " ".join(re.sub(r"\{\w+\}|[^\w{}]+", " ", phrase.lower()).split())


def test_phrases_are_not_shared_with_training() -> None:
    training = {plain(text) for text in strings({**all_wordings(), "words": []})}
    wordings = [niah.TEXTS["needle"], *niah.TEXTS["one"].values(), *niah.TEXTS["some"].values()]
    evaluation: set[str] = set()
    for wording in wordings:
        evaluation |= {plain(sentence) for sentence in re.split(r"(?<=[.?])\s|\n", wording)}
    evaluation.discard("")
    assert len(training) > 150
    assert len(evaluation) >= 9
    for text in training:
        assert "magic" not in text
        for sentence in evaluation:
            assert sentence not in text


def test_key_words_are_not_shared_with_training() -> None:
    training: set[str] = set()
    for text in strings(all_wordings()):
        training.update(re.findall(r"\w+", text.lower()))
    assert {"lantern", "copper"} <= training
    key_words = niah.TEXTS["adjectives"] + niah.TEXTS["nouns"]
    evaluation = set(key_words)
    assert len(evaluation) == len(key_words) > 100
    plurals = {word + "s" for word in evaluation}
    assert not training & (evaluation | plurals)


@pytest.mark.slow
def test_on_needles_the_oracle_is_ahead_of_lookaheadkv_and_that_of_snapkv():
    config = parse(Config, ["model.device=cpu", "out=unused"])
    target = target_of(config)
    resources = resources_of(config, target)
    variants = [Variant(name, make_method(name, 64, resources)) for name in ("oracle", "lookaheadkv", "snapkv")]
    scores: dict[str, list[float]] = defaultdict(list)
    excess_nlls: dict[str, list[float]] = defaultdict(list)
    for sample in make_samples("single", 512, 4, 7, target.tokenizer, max_new_tokens=12):
        (rows,) = run_samples(target, [sample], variants, 10_000)
        for row in rows:
            scores[row.method].append(row.score)
            excess_nlls[row.method].append(row.excess_nll)
    assert fmean(scores["full"]) >= fmean(scores["oracle"])
    assert fmean(scores["oracle"]) >= fmean(scores["lookaheadkv"])
    assert fmean(scores["lookaheadkv"]) > fmean(scores["snapkv"])
    assert sum(excess_nlls["lookaheadkv"]) < sum(excess_nlls["snapkv"])
    assert sum(excess_nlls["oracle"]) < sum(excess_nlls["snapkv"])
