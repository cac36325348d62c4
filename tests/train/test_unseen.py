"""Samples divided before their question: where, which, and that training on them is training on samples made so."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.data_gen.store import TrainingSample
from keepsight.files import read_json
from keepsight.models.card import excess_rows
from keepsight.models.chat import chat_text
from keepsight.models.identity import MadeWith
from keepsight.runtime.allocate import Global
from keepsight.runtime.methods import make_method
from keepsight.train.dataset import PartlySplitSamples, QuestionStarts, UnseenQuestions, prompt_digests
from keepsight.train.eviction import EvictionObjective
from keepsight.train.settings import FinetuneSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.refused import refused
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.runs import crash, disturbed, objective, same, samples, settings, tensors

TEXT = "The grey harbour wall was painted again in May, and the key is under the third stone.\n" * 20


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's, without its system prompt."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHATML
    return made


@pytest.mark.parametrize(
    ("content", "prefix", "asked"),
    [
        (TEXT + "\nQuestion: Where is the key?\nA:", "", "Question: Where is the key?\nA:"),
        (TEXT + "\nWhere is the key?", "The key is hidden under the", "Where is the key?"),
        ("Where is the key?\n" + TEXT.strip(), "", TEXT.partition("\n")[0]),
        ("Where is the key?\n" + TEXT.replace("\n", " "), "", None),
        (TEXT + "\n" + "Where is the key? " * 40, "", None),
        ("Here it is:\nWhere is the key?", "", None),
    ],
    ids=["last", "prefix of the answer", "first", "no line break", "long", "short"],
)
def test_where_a_question_begins(content: str, prefix: str, asked: str | None, tokenizer: Any) -> None:
    text = chat_text(tokenizer, [{"role": "user", "content": content}]) + prefix
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = QuestionStarts(tokenizer)(ids)
    tail = f"<|im_end|>\n<|im_start|>assistant\n{prefix}"
    assert (None if start is None else tokenizer.decode(ids[start:])) == (None if asked is None else asked + tail)


def test_where_a_second_turn_and_a_text_without_template_are_divided(tokenizer: Any) -> None:
    turns = [("user", TEXT + "What is grey?"), ("assistant", "The wall."), ("user", "And where is the key?")]
    text = chat_text(tokenizer, [{"role": role, "content": content} for role, content in turns])
    starts, ids = QuestionStarts(tokenizer), tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[starts(ids) :]).startswith("And where is the key?<|im_end|>")
    raw = tokenizer(TEXT + "On Monday the stone was gone, and so was everything under it")["input_ids"]
    assert tokenizer.decode(raw[starts(raw) :]).startswith("On Monday the stone")
    assert QuestionStarts(tiny_tokenizer())(raw) == starts(raw)  # the end of another chat template is not there either


def third(ids: Sequence[int]) -> int | None:
    """The last third is a question; some prompts have none."""
    return None if len(ids) == 15 else len(ids) - len(ids) // 3


def by_hand(rows: list[TrainingSample]) -> list[TrainingSample]:
    pairs = [(row, third(row.prompt_ids) or len(row.prompt_ids)) for row in rows]
    return [
        replace(row, prompt_ids=row.prompt_ids[:at], answer_ids=row.prompt_ids[at:] + row.answer_ids)
        for row, at in pairs
    ]


def test_a_coin_of_seed_and_index_chooses_the_samples() -> None:
    rows, whole = samples(140), by_hand(samples(140))
    divided = [*PartlySplitSamples(rows, UnseenQuestions(0.3, 1, third))]
    assert all(each in pair for each, *pair in zip(divided, rows, whole, strict=True))
    assert 25 <= sum(each != row for each, row in zip(divided, rows, strict=True)) <= 50
    later = rows[70:]
    assert [*PartlySplitSamples(later, UnseenQuestions(0.3, 1, third))] == divided[70:]
    assert [*PartlySplitSamples(rows, UnseenQuestions(0.3, 2, third))] != divided
    assert [*PartlySplitSamples(rows, UnseenQuestions(1.0, 1, third))] == whole
    assert UnseenQuestions.for_tokenizer(None, 0.0, 1) is None  # type: ignore[arg-type]


def run(work: Path, share: float = 0.5) -> TrainingRun:
    return TrainingRun(work, samples(), unseen=UnseenQuestions(share, 0, third))


def fit(one: Any, given: Any, of: TrainingRun) -> ModuleTrainer:
    trainer = ModuleTrainer(one, given, of)
    assert trainer.fit()
    return trainer


def test_training_on_divided_samples_is_training_on_samples_made_so(tmp_path: Path) -> None:
    ours, theirs, given = objective(), objective(), settings(held_out=4)
    trainer = fit(ours, given, run(tmp_path / "ours", 1.0))
    expected = fit(theirs, given, TrainingRun(tmp_path / "theirs", by_hand(samples())))
    assert same(tensors(ours), tensors(theirs))
    rows = [row for row in samples() if row.index in (9, 21, 33)]
    assert [len(row.prompt_ids) for row in rows].count(15) == 0
    for name in ("kl", "recall", "tau"):
        assert trainer.metrics[f"eval_unseen_{name}"] == pytest.approx(expected.metrics[f"eval_{name}"], rel=1e-6)
    assert trainer.metrics["eval_kl"] != pytest.approx(expected.metrics["eval_kl"], rel=1e-3)
    recorded = trainer.trained().prompts
    assert recorded is not None and recorded < prompt_digests(samples())


def test_it_resumes_alike_and_what_is_kept_of_held_out_samples_is_their_own(tmp_path: Path) -> None:
    given = settings(replays=2, held_out=4, unseen=0.5)
    whole = objective()
    trainer = fit(whole, given, run(tmp_path / "whole"))
    with pytest.raises(RuntimeError, match="power failure"):
        fit(disturbed(5, crash), given, run(tmp_path / "parts"))
    path = tmp_path / "parts" / "settings.json"
    assert read_json(path, MadeWith).settings["train.unseen"] == 0.5
    with refused("train.unseen", "conflict"):
        fit(objective(), replace(given, unseen=0.0), run(tmp_path / "parts"))
    resumed = objective()
    again = fit(resumed, given, run(tmp_path / "parts"))
    assert same(tensors(resumed), tensors(whole)) and again.measurements() == trainer.measurements()
    measured = ModuleTrainer(whole, given, run(tmp_path / "alone")).evaluate()  # keeps nothing
    for name in ("eval_kl", "eval_unseen_kl"):
        assert trainer.metrics[name] == pytest.approx(measured[name], rel=2e-2)
    assert measured["eval_kl"] != pytest.approx(measured["eval_unseen_kl"], rel=5e-2)


def test_weights_of_heads_are_trained_and_measured_with_the_question_unseen(tmp_path: Path) -> None:
    allocate = {"name": "global", "floor": 0.2}
    method: Any = make_method("snapkv", 6, window=4, value_norm=True, allocate=allocate)
    given = FinetuneSettings(budgets=[6], freeze_module=True, head_weights_rate=0.1, unseen=1.0)
    found = {}
    for name, of in {"ours": run(tmp_path / "ours", 1.0), "theirs": None}.items():
        one = EvictionObjective(tiny_model(), method, Global(0.2), given)
        assert one.decisive()["finetune.unseen"] == 1.0
        trained = fit(one, settings(held_out=4), of or TrainingRun(tmp_path / name, by_hand(samples())))
        found[name] = one.head_weights(), trained.metrics
    assert torch.equal(found["ours"][0], found["theirs"][0]) and found["ours"][0].std() > 1e-3
    measured, expected = found["ours"][1], found["theirs"][1]["eval_excess_nll_at_6"]
    assert measured["eval_unseen_excess_nll_at_6"] == pytest.approx(expected, rel=1e-5)
    assert measured["eval_excess_nll_at_6"] != pytest.approx(expected, rel=1e-3)
    assert [label for label, _, _ in excess_rows(measured, measured)] == ["6 entries", "6 entries, question unseen"]
