"""The objective of draft heads against a reference that drafts row by row; its teacher outputs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.data_gen.store import TrainingSample
from keepsight.files import file_digest, read_json, write_json
from keepsight.models.draft_head import DraftHead
from keepsight.models.identity import Identity, MadeWith
from keepsight.train.dataset import collate
from keepsight.train.draft_head import (
    DraftHeadObjective,
    HiddenStates,
    RunModel,
    StoredStates,
    frequent_tokens,
    measure_draft_head,
    new_draft_head,
    next_tokens,
    write_states,
)
from tests.close import assert_close
from tests.families import fresh_model
from tests.refused import refused
from tests.tiny import prompt_ids
from tests.train.head_runs import deep_model, head_objective, head_settings
from tests.train.runs import GRID, samples


class RowKeys:
    """Keys and values that one row of one step sees: those of step 0 up to it, and its own of the steps since."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys = keys
        self.values = values

    def copy(self) -> "RowKeys":
        return RowKeys(list(self.keys), list(self.values))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        group = query.shape[1] // key.shape[1]
        keys = torch.cat(self.keys, dim=2).repeat_interleave(group, dim=1)
        values = torch.cat(self.values, dim=2).repeat_interleave(group, dim=1)
        shares = (query @ keys.transpose(2, 3) / math.sqrt(query.shape[-1])).softmax(-1)
        return (shares @ values).transpose(1, 2)


def taps(model, head: DraftHead, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[1, n, 3 * hidden] and the logits [n, vocab], by transformers' own output."""
    output = model(ids[None], output_hidden_states=True)
    hidden = [output.hidden_states[1 + layer] for layer in head.layers_of(model)]
    return torch.cat(hidden, dim=-1), output.logits[0]


def reference_steps(model, head: DraftHead, ids: Tensor, unroll: int) -> list[list[Tensor]]:
    """For each row t, the head's logits of its steps."""
    features, _ = taps(model, head, ids)
    embeddings = model.get_input_embeddings()(ids[None])
    logits_of_rows: list[list[Tensor]] = []
    keys_of_first_steps = RowKeys([], [])
    for row in range(len(ids) - 1):
        state = head.combine(features[:, row : row + 1])
        keys = keys_of_first_steps
        logits = []
        for step in range(min(unroll, len(ids) - 1 - row)):
            embedding = embeddings[:, row + 1 + step : row + 2 + step]
            position = torch.tensor([[row + step]])
            state = head(embedding, state, position, keys)
            logits.append(head.logits(state)[0, 0])
            if step == 0:
                keys = keys_of_first_steps.copy()
        logits_of_rows.append(logits)
    return logits_of_rows


def reference_loss(model, head: DraftHead, ids: Tensor, unroll: int, decay: float, prompt: int = 0) -> Tensor:
    _, target = taps(model, head, ids)
    vocabulary = head.t2d.nonzero()[:, 0]
    logits_of_rows = reference_steps(model, head, ids, unroll)
    total = torch.zeros(())
    for step in range(unroll):
        entropies = []
        for row, logits in enumerate(logits_of_rows):
            if step >= len(logits):
                continue
            target_logits = target[row + 1 + step]
            drafts_an_answer = row + 2 + step >= prompt  # the position of the token that this row guesses
            if drafts_an_answer and head.t2d[target_logits.argmax()]:
                expected = target_logits[vocabulary].softmax(-1)
                entropies.append(-(expected * logits[step].log_softmax(-1)).sum())
        if entropies:
            total = total + decay**step * torch.stack(entropies).mean()
    return total


@pytest.mark.parametrize(
    ("family", "prompt", "length", "unroll", "rows"),
    [("llama", 9, 17, 4, 1024), ("qwen3", 9, 17, 4, 5), ("llama", 0, 6, 8, 1024)],
)
def test_loss_and_gradients_equal_drafting_row_by_row(family, prompt, length, unroll, rows, monkeypatch):
    """Also of texts that are truncated, and then shorter than the unrolling; and some rows at a time."""
    monkeypatch.setattr("keepsight.train.draft_ops._ROWS", rows)
    objective = head_objective(family, head_settings(max_tokens=length, unroll=unroll))
    head = objective.head
    ids = torch.tensor(samples()[1].prompt_ids)
    loss = objective.text_loss(ids, prompt)
    expected_loss = reference_loss(objective._model[0], head, ids[:length], unroll, decay=0.8, prompt=prompt)
    assert_close(loss, expected_loss)
    weights = dict(head.named_parameters())
    gradients = torch.autograd.grad(loss, list(weights.values()))
    expected_gradients = torch.autograd.grad(expected_loss, list(weights.values()))
    for name, gradient, expected in zip(weights, gradients, expected_gradients, strict=True):
        assert expected.abs().max() > 1e-6, name
        assert_close(gradient, expected)


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_a_batch_is_the_mean_of_its_samples_whatever_their_lengths(loss_on):
    objective = head_objective(settings=head_settings(loss_on=loss_on))
    rows = [_row(sample) for sample in samples(5)]
    batch = collate(rows)
    assert batch.pop("indices") == [0, 3, 6, 9, 12]
    text_losses = []
    for row in rows:
        first_learned = len(row["prompt_ids"]) if loss_on == "answers" else 0
        ids = torch.tensor(row["prompt_ids"] + row["answer_ids"])
        text_losses.append(objective.text_loss(ids, first_learned))
    assert_close(objective(**batch)["loss"], torch.stack(text_losses).mean())


def test_a_text_whose_answer_is_truncated_away_teaches_nothing():
    objective = head_objective(settings=head_settings(max_tokens=8))
    loss = objective.text_loss(torch.tensor(samples()[0].prompt_ids), first_learned=9)
    assert loss.item() == 0
    gradients = torch.autograd.grad(loss, list(objective.head.parameters()))
    assert not any(gradient.any() for gradient in gradients)


def _row(sample: TrainingSample) -> dict:
    return {"index": sample.index, "prompt_ids": sample.prompt_ids, "answer_ids": sample.answer_ids}


def test_bfloat16_targets_and_autocast_stay_close_and_leave_the_head_in_float32():
    exact = head_objective()
    rounded = head_objective()
    rounded._model[0].bfloat16()
    ids = torch.tensor(samples()[0].prompt_ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss = rounded.text_loss(ids)
    loss.backward()
    exact.text_loss(ids).backward()
    for (name, weight), exact_weight in zip(rounded.head.named_parameters(), exact.head.parameters(), strict=True):
        assert weight.grad is not None
        assert exact_weight.grad is not None
        assert weight.grad.dtype == torch.float32
        assert torch.cosine_similarity(weight.grad.flatten(), exact_weight.grad.flatten(), dim=0) > 0.9, name


class PresetDrafts(DraftHeadObjective):
    """A head whose first choice is preset: `drafts[step][row]` in the model's ids."""

    drafts: list[list[int]]

    def states(self, ids: Tensor):
        _, read = super().states(ids)
        vocabulary = self.head.t2d.nonzero()[:, 0].tolist()
        index_of_token = {token: index for index, token in enumerate(vocabulary)}
        steps = []
        for step in range(min(self.settings.unroll, len(ids) - 1)):
            tokens = self.drafts[step][: len(ids) - 1 - step]
            indices = torch.tensor([index_of_token[token] for token in tokens])
            steps.append(torch.nn.functional.one_hot(indices, self.head.lm_head.out_features).float())
        return steps, read


def test_acceptance_is_counted_draft_by_draft():
    """An answer of six tokens, a head that is wrong at three positions only; counted by hand."""
    model = deep_model()
    head = new_draft_head(model, torch.arange(128))
    head.lm_head = torch.nn.Linear(128, 128, bias=False)
    head.lm_head.weight.data.copy_(10 * torch.eye(128))
    objective = PresetDrafts(head, model, RunModel(model, head.layers_of(model)), head_settings(unroll=3))
    prompt = [9, 8, 7, 6]
    answer = [20, 21, 22, 23, 24, 25]
    ids = prompt + answer
    objective.drafts = [[*ids[2 + step :], 5, 5, 5] for step in range(3)]
    # The drafts begin in the rows 2 to 7, with the tokens 20 to 25.
    objective.drafts[0][3] = 0  # the draft that begins with 21 fails at once
    objective.drafts[1][4] = 0  # the one with 22 at its second token
    objective.drafts[2][2] = 0  # the one with 20 at its third
    batch = collate([{"index": 0, "prompt_ids": prompt, "answer_ids": answer}])
    measurements = measure_draft_head(objective, [batch])
    # First tokens: 6 drafts, 5 right. Second: of 20 to 24 without 21, 4 drafts, 3 right. Third: 20 and 23; 20 fails.
    assert measurements["eval_acceptance_by_position"] == pytest.approx([5 / 6, 3 / 4, 1 / 2])
    assert measurements["eval_accepted_length"] == pytest.approx(5 / 6 * (1 + 3 / 4 * (1 + 1 / 2)))


def test_divergence_and_agreement_equal_counting_row_by_row():
    objective = head_objective(settings=head_settings(vocabulary=128))
    model = objective._model[0]
    rows = [_row(sample) for sample in samples(3)]
    measurements = measure_draft_head(objective, [collate(rows)])
    divergences = torch.zeros(4)
    agreements = torch.zeros(4)
    drafts = torch.zeros(4)
    for row in rows:
        ids = torch.tensor(row["prompt_ids"] + row["answer_ids"])
        _, target = taps(model, objective.head, ids)
        first = len(row["prompt_ids"]) - 2  # whose first step guesses the answer's first token
        logits_of_positions = reference_steps(model, objective.head, ids, 4)
        for position, logits_of_steps in list(enumerate(logits_of_positions))[first:]:
            for step, logits in enumerate(logits_of_steps):
                expected = target[position + 1 + step]
                divergence = torch.nn.functional.kl_div(
                    logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="sum"
                )
                divergences[step] += divergence.item()
                agreements[step] += float(logits.argmax() == expected.argmax())
                drafts[step] += 1
    assert measurements["eval_kl_by_step"] == pytest.approx((divergences / drafts).tolist(), rel=1e-4)
    assert measurements["eval_agreement_by_step"] == pytest.approx((agreements / drafts).tolist())


def test_the_vocabulary_holds_the_answers_most_frequent_tokens_and_the_end_tokens():
    sample = TrainingSample(0, "test", [5, 5, 5, 9, 9, 3, 4], [9, 7], "", "")
    assert frequent_tokens([sample], 4, [2], 16).tolist() == [2, 5, 7, 9]
    assert frequent_tokens([sample], 16, [2], 16).tolist() == list(range(16))
    with refused("draft_head.vocabulary", "range"):
        frequent_tokens([sample], 17, [2], 16)


LOGITS: dict[str, dict[str, Any]] = {
    "Gemma 2": {"final_logit_softcapping": 1.0},
    "Gemma 3 (text)": {"final_logit_softcapping": 1.0},
    "Granite": {"logits_scaling": 8.0},
    "Granite 4 (Mamba-2)": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("family", [*GRID, "Inkling"])
def test_the_teacher_says_what_the_model_says(family: str) -> None:
    model = fresh_model(family, **LOGITS.get(family, {}))
    ids = prompt_ids(20)[0]
    vocabulary = torch.arange(3, 90)
    with torch.no_grad():
        logits = model(ids).logits[0]
    hidden = RunModel(model, [0, 1, 2])(ids[0]).hidden
    teacher = next_tokens(hidden, model, vocabulary, torch.float32)
    assert_close(teacher.probabilities, logits[:, vocabulary].softmax(dim=-1))
    assert torch.equal(teacher.in_vocabulary, torch.isin(logits.argmax(dim=-1), vocabulary))


@pytest.mark.parametrize("kind", ["removed", "doubled"])
def test_hidden_states_that_are_incomplete_are_refused(tmp_path: Path, kind: str) -> None:
    """Whatever their digest says."""
    ids = torch.tensor([3, 5])
    states = HiddenStates(torch.ones(2, 3), torch.ones(2, 2))
    write_states(tmp_path, lambda ids: states, [[3, 5]], MadeWith(Identity(), {}))
    path = tmp_path / "readings-00000.safetensors"
    manifest = tmp_path / "manifest.json"
    assert StoredStates(tmp_path)(ids).hidden.shape == (2, 2)

    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("hidden"))
    if kind == "doubled":
        tensors[name] = torch.ones(4, 2)
    else:
        tensors["other"] = tensors.pop(name)
    save_file(tensors, path)
    write_json(manifest, read_json(manifest) | {"digests": {path.name: file_digest(path)}})
    with refused("features", "file"):
        StoredStates(tmp_path)(ids)
