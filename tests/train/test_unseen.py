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
from tests.train.runs import crash, disturbed, module_tensors, new_objective, same, samples, settings

TEXT = "The grey harbour wall was painted again in May, and the key is under the third stone.\n" * 20


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's, without its system prompt."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    chat_tokenizer = tiny_tokenizer()
    chat_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat_tokenizer.chat_template = CHATML
    return chat_tokenizer


@pytest.mark.parametrize(
    ("content", "prefix", "question"),
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
def test_where_a_question_begins(content: str, prefix: str, question: str | None, tokenizer: Any) -> None:
    text = chat_text(tokenizer, [{"role": "user", "content": content}]) + prefix
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = QuestionStarts(tokenizer)(ids)
    if question is None:
        assert start is None
    else:
        assert tokenizer.decode(ids[start:]) == f"{question}<|im_end|>\n<|im_start|>assistant\n{prefix}"


def test_where_a_second_turn_and_a_text_without_template_are_divided(tokenizer: Any) -> None:
    starts = QuestionStarts(tokenizer)
    messages = [
        {"role": "user", "content": TEXT + "What is grey?"},
        {"role": "assistant", "content": "The wall."},
        {"role": "user", "content": "And where is the key?"},
    ]
    ids = tokenizer(chat_text(tokenizer, messages), add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[starts(ids) :]).startswith("And where is the key?<|im_end|>")

    plain_ids = tokenizer(TEXT + "On Monday the stone was gone, and so was everything under it")["input_ids"]
    start = starts(plain_ids)
    assert tokenizer.decode(plain_ids[start:]).startswith("On Monday the stone")
    assert QuestionStarts(tiny_tokenizer())(plain_ids) == start  # the end of another chat template is not there either


def last_third(ids: Sequence[int]) -> int | None:
    """Where the last third begins, which is the question; some prompts have none."""
    return None if len(ids) == 15 else len(ids) - len(ids) // 3


def divided_by_hand(samples: list[TrainingSample]) -> list[TrainingSample]:
    divided = []
    for sample in samples:
        start = last_third(sample.prompt_ids)
        if start is not None:
            question = sample.prompt_ids[start:]
            sample = replace(sample, prompt_ids=sample.prompt_ids[:start], answer_ids=question + sample.answer_ids)
        divided.append(sample)
    return divided


def test_a_coin_of_seed_and_index_chooses_the_samples() -> None:
    all_samples = samples(140)
    all_divided = divided_by_hand(all_samples)
    partly_divided = list(PartlySplitSamples(all_samples, UnseenQuestions(0.3, 1, last_third)))
    changed = 0
    for sample, original, divided in zip(partly_divided, all_samples, all_divided, strict=True):
        assert sample in (original, divided)
        changed += sample != original
    assert 25 <= changed <= 50

    def split(samples: list[TrainingSample], share: float, seed: int) -> list[TrainingSample]:
        return list(PartlySplitSamples(samples, UnseenQuestions(share, seed, last_third)))

    assert split(all_samples[70:], 0.3, 1) == partly_divided[70:]
    assert split(all_samples, 0.3, 2) != partly_divided
    assert split(all_samples, 1.0, 1) == all_divided
    assert UnseenQuestions.for_tokenizer(None, 0.0, 1) is None  # type: ignore[arg-type]


def run(work: Path, share: float = 0.5) -> TrainingRun:
    return TrainingRun(work, samples(), unseen=UnseenQuestions(share, 0, last_third))


def fit(objective: Any, settings: Any, run: TrainingRun) -> ModuleTrainer:
    trainer = ModuleTrainer(objective, settings, run)
    assert trainer.fit()
    return trainer


def test_training_on_divided_samples_is_training_on_samples_made_so(tmp_path: Path) -> None:
    values = settings(held_out=4)
    objective = new_objective()
    trainer = fit(objective, values, run(tmp_path / "divided", 1.0))
    objective_by_hand = new_objective()
    trainer_by_hand = fit(objective_by_hand, values, TrainingRun(tmp_path / "by hand", divided_by_hand(samples())))
    assert same(module_tensors(objective), module_tensors(objective_by_hand))
    held_out = [sample for sample in samples() if sample.index in (9, 21, 33)]
    assert all(len(sample.prompt_ids) != 15 for sample in held_out)
    metrics = trainer.metrics
    expected = trainer_by_hand.metrics
    for name in ("kl", "recall", "tau"):
        assert metrics[f"eval_unseen_{name}"] == pytest.approx(expected[f"eval_{name}"], rel=1e-6)
    assert metrics["eval_kl"] != pytest.approx(expected["eval_kl"], rel=1e-3)
    recorded_prompts = trainer.trained().prompts
    assert recorded_prompts is not None
    assert recorded_prompts < prompt_digests(samples())


def test_it_resumes_alike_and_what_is_kept_of_held_out_samples_is_their_own(tmp_path: Path) -> None:
    values = settings(replays=2, held_out=4, unseen=0.5)
    uninterrupted = new_objective()
    trainer = fit(uninterrupted, values, run(tmp_path / "uninterrupted"))
    killed = tmp_path / "killed"
    with pytest.raises(RuntimeError, match="power failure"):
        fit(disturbed(5, crash), values, run(killed))
    assert read_json(killed / "settings.json", MadeWith).settings["train.unseen"] == 0.5
    with refused("train.unseen", "conflict"):
        fit(new_objective(), replace(values, unseen=0.0), run(killed))
    resumed = new_objective()
    resumed_trainer = fit(resumed, values, run(killed))
    assert same(module_tensors(resumed), module_tensors(uninterrupted))
    assert resumed_trainer.measurements() == trainer.measurements()
    without_buffer = ModuleTrainer(uninterrupted, values, run(tmp_path / "measured")).evaluate()
    for name in ("eval_kl", "eval_unseen_kl"):
        assert trainer.metrics[name] == pytest.approx(without_buffer[name], rel=2e-2)
    assert without_buffer["eval_kl"] != pytest.approx(without_buffer["eval_unseen_kl"], rel=5e-2)


def test_weights_of_heads_are_trained_and_measured_with_the_question_unseen(tmp_path: Path) -> None:
    allocate = {"name": "global", "floor": 0.2}
    method: Any = make_method("snapkv", 6, window=4, value_norm=True, allocate=allocate)
    finetune = FinetuneSettings(budgets=[6], freeze_module=True, head_weights_rate=0.1, unseen=1.0)

    def train_weights(training_run: TrainingRun) -> tuple[torch.Tensor, dict[str, Any]]:
        objective = EvictionObjective(tiny_model(), method, Global(0.2), finetune)
        assert objective.decisive()["finetune.unseen"] == 1.0
        trainer = fit(objective, settings(held_out=4), training_run)
        return objective.head_weights(), trainer.metrics

    weights, metrics = train_weights(run(tmp_path / "divided", 1.0))
    by_hand = TrainingRun(tmp_path / "by hand", divided_by_hand(samples()))
    weights_by_hand, metrics_by_hand = train_weights(by_hand)
    assert torch.equal(weights, weights_by_hand)
    assert weights.std() > 1e-3
    expected = metrics_by_hand["eval_excess_nll_at_6"]
    assert metrics["eval_unseen_excess_nll_at_6"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_excess_nll_at_6"] != pytest.approx(expected, rel=1e-3)
    labels = [label for label, _, _ in excess_rows(metrics, metrics)]
    assert labels == ["6 entries", "6 entries, question unseen"]
