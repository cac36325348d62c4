"""The distillation of retrieval heads against dense attention and slow loops; its measures against sets."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models.retrieval_head import RetrievalHead
from keepsight.train import retrieval_head as module
from keepsight.train.dataset import Batch, SampleDataset, collate
from keepsight.train.replay import TeacherOutputs
from keepsight.train.retrieval_head import (
    MEASURES,
    RetrievalObjective,
    Texts,
    at_budget,
    head_scores,
    left_padded,
    measure_retrieval_head,
    run_teacher,
)
from keepsight.train.settings import RetrievalHeadSettings
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.models.retrieval_heads import LAYERS, grouped_retrieval_head, target_for, tiny_retrieval_head
from tests.refused import refused
from tests.runtime.family_methods import kv_heads_of
from tests.runtime.slow_families import slow_pass
from tests.tiny import prompt_ids, tiny_model
from tests.train.runs import GRID, samples


def objective_of(
    head: RetrievalHead, model: Any, queries: int, temperature: float = 1.0, answers: float = 0.0
) -> RetrievalObjective:
    settings = RetrievalHeadSettings(queries=queries, temperature=temperature, answers=answers)
    return RetrievalObjective(head, model, settings)


def scores_of(head: RetrievalHead, model: Any, texts: Texts, outputs: TeacherOutputs) -> Tensor:
    embeddings = model.get_input_embeddings()(texts.ids).detach()
    features = outputs.features[0] if outputs.features else None
    return head_scores(head, texts, outputs.importance[0].shape[2], embeddings, features)


def batch_of(count=3):
    """Samples of different lengths as the trainer makes batches, and their tokens."""
    rows = samples(count)
    values = collate([SampleDataset(rows)[place] for place in range(count)])
    values.pop("indices")
    return values, [[*row.prompt_ids, *row.answer_ids] for row in rows]


def weights_of(model, ids):
    """For each layer, the attention weights [H, S, S] of one unpadded text, from transformers' eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [layer[0] for layer in model(torch.tensor([ids]), output_attentions=True).attentions]


def slow_importance(model, ids, kv_heads, which=slice(None)):
    """[K, S, S]: the mean over some layers and over the query heads of a KV head, entry by entry."""
    layers = weights_of(model, ids)[which]
    group = layers[0].shape[0] // kv_heads
    result = torch.zeros(kv_heads, len(ids), len(ids))
    for layer in layers:
        for head in range(layer.shape[0]):
            result[head // group] += layer[head] / (group * len(layers))
    return result


def test_importance_of_groups_is_that_of_their_layers():
    values, ids = batch_of()
    read = run_teacher(tiny_model(), grouped_retrieval_head(2, "none"), left_padded(Batch(**values)), 40)
    (importance,) = read.importance
    length = importance.shape[3]
    for row, tokens in enumerate(ids):
        expected = torch.cat([slow_importance(tiny_model(), tokens, 2, layers) for layers in (slice(2), slice(2, 3))])
        shown = min(40, len(tokens))
        assert_close(importance[row, :, -shown:, length - len(tokens) :], expected[:, -shown:])


def test_the_loss_of_groups_is_the_mean_of_heads_alone():
    """Each with the model's layers of its group, in a model of as many layers as groups."""
    head, model = grouped_retrieval_head(3), tiny_model()
    values, _ = batch_of(1)
    batch = left_padded(Batch(**values))
    read = run_teacher(model, head, batch, 6)
    scores = scores_of(head, model, batch, read)
    for group in range(3):
        alone = tiny_retrieval_head()
        for name in ("q_proj", "k_proj"):
            own = getattr(head, name).weight.chunk(3)[group]
            getattr(alone, name).weight.data.copy_(own)
        of_group = replace(read, importance=[read.importance[0][:, 2 * group : 2 * group + 2]])
        assert_close(scores[:, 2 * group : 2 * group + 2], scores_of(alone, model, batch, of_group))


def test_a_batch_is_joined_without_holes():
    values, ids = batch_of()
    batch = left_padded(Batch(**values))
    assert batch.mask is not None
    for row, tokens in enumerate(ids):
        assert batch.ids[row, -len(tokens) :].tolist() == tokens
        assert batch.mask[row].tolist() == [False] * (batch.ids.shape[1] - len(tokens)) + [True] * len(tokens)
        assert batch.positions[row, -len(tokens) :].tolist() == list(range(len(tokens)))
    assert batch.real(40).sum(1).tolist() == [min(40, len(tokens)) for tokens in ids]
    single = left_padded(Batch(**batch_of(1)[0]))
    assert single.mask is None
    assert single.real(7).tolist() == [[True] * 7]


@torch.no_grad()
def slow_scores(head, model, ids):
    """[K, S, S] weights of one text: softmax of each query head, maximum over the group, normalised; by loops."""
    outputs = {}
    for number in LAYERS:  # transformers' own hidden states have the last layer's after the final norm
        model.model.layers[number].register_forward_hook(lambda _, __, output, at=number: outputs.update({at: output}))
    model(torch.tensor([ids]))
    features = torch.cat([outputs[layer][0] for layer in LAYERS], dim=-1)
    embeddings = model.get_input_embeddings().weight[ids]
    group = head.config.num_attention_heads // head.kv_heads
    result = torch.zeros(head.kv_heads, len(ids), len(ids))
    queries, keys = [], []
    for place in range(len(ids)):
        before = features[place - 1] if place else torch.zeros_like(features[0])
        query, key = head.project(embeddings[place][None, None], before[None, None], torch.tensor([[place]]))
        queries.append(query[0, :, 0])
        keys.append(key[0, :, 0])
        for number in range(head.config.num_attention_heads):
            kv_head = number // group
            logits = torch.tensor([queries[place][number] @ past[kv_head] for past in keys]) / 8**0.5
            result[kv_head, place, : place + 1] = torch.maximum(result[kv_head, place, : place + 1], logits.softmax(-1))
        result[:, place] /= result[:, place].sum(-1, keepdim=True)
    return result


@pytest.mark.parametrize(
    ("kv_heads", "features", "temperature"), [(4, "none", 2.0), (2, "previous-step", 0.5), (1, "previous-step", 1.0)]
)
def test_scores_and_loss_are_those_of_loops(kv_heads, features, temperature):
    """Softened, weights count to the power of 1 / temperature."""
    model, head = target_for(kv_heads), tiny_retrieval_head(features, kv_heads=kv_heads)
    with torch.no_grad():
        head.q_proj.weight.mul_(0.3)  # weights far from one-hot
    values, ids = batch_of()
    objective = objective_of(head, model, 6, temperature)
    batch = left_padded(Batch(**values))
    scores = scores_of(head, model, batch, run_teacher(model, head, batch, 6))
    losses = []
    for row, tokens in enumerate(ids):
        expected = slow_scores(head, target_for(kv_heads), tokens)[:, -6:]
        measured = scores[row, :, :, -len(tokens) :].exp()
        assert_close(measured, expected)
        true = slow_importance(target_for(kv_heads), tokens, kv_heads)[:, -6:]
        for kv_head in range(kv_heads):
            for step in range(6):
                visible = len(tokens) - 6 + step + 1
                pair = (each[kv_head, step, :visible] ** (1 / temperature) for each in (true, expected))
                p, q = (each / each.sum() for each in pair)
                losses.append((p * (p / q).log()).sum())
    assert objective(**values)["loss"].item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-3)


def test_a_share_of_the_loss_is_of_the_answers_and_of_far_entries(monkeypatch):
    monkeypatch.setattr(module, "SINKS", 2)
    monkeypatch.setattr(module, "RECENT", 3)
    model, head = tiny_model(), tiny_retrieval_head()
    values, ids = batch_of()
    texts = left_padded(Batch(**values))
    read = run_teacher(model, head, texts, 30)
    scores = scores_of(head, model, texts, read).detach()
    rows, length = scores.shape[2:]
    near, far = [], []
    for row, sample in enumerate(samples(3)):
        start, answer = length - len(ids[row]), len(sample.answer_ids)
        for kv_head in range(2):
            for query in range(length - min(answer, rows), length):
                p, q = (each[row, kv_head, query - length + rows] for each in (read.importance[0], scores.exp()))
                near.append((p[start : query + 1] * (p / q)[start : query + 1].log()).sum())
                p, q = (each[start + 2 : query - 3 + 1] / each[start + 2 : query - 3 + 1].sum() for each in (p, q))
                far.append((p * (p / q).log()).sum())
    answers = (torch.stack(near).mean() + torch.stack(far).mean()) / 2
    whole = objective_of(head, model, 30, 2.0)(**values)["loss"]
    mixed = objective_of(head, model, 30, 2.0, 0.6)(**values)["loss"]
    assert_close(mixed, 0.4 * whole + 0.6 * answers)


def test_gradients_reach_every_weight_of_the_head_and_none_of_the_target():
    model, head = tiny_model(), tiny_retrieval_head()
    model.gradient_checkpointing_enable()
    objective = objective_of(head, model, 8).train()
    objective(**batch_of()[0])["loss"].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert head.training and not model.training


@pytest.mark.parametrize("family", GRID)
def test_importance_is_the_models_own_attention(family: str) -> None:
    model, kv_heads = family_model(family), kv_heads_of(family)
    (ids, mask), answer = prompt_ids(30, 17), prompt_ids(5, 5, seed=1)[0]
    head = tiny_retrieval_head("none", kv_heads=kv_heads)
    found = run_teacher(model, head, left_padded(Batch(ids, answer, mask.bool())), 10).importance[0]
    assert (found[1, ..., :13] == 0).all()
    for row, length in enumerate((30, 17)):
        text = torch.cat([ids[row : row + 1, 30 - length :], answer[row : row + 1]], dim=1)
        weights = torch.stack(slow_pass(model, input_ids=text)[0])[:, 0, :, -10:]
        mean = weights.unflatten(1, (kv_heads, -1)).mean(dim=(0, 2))
        assert_close(found[row, ..., 30 - length :], mean / mean.sum(dim=-1, keepdim=True))


def test_sinks_of_padded_rows_leave_gradients_finite() -> None:
    (ids, mask), answer = prompt_ids(30, 3), prompt_ids(5, 5, seed=1)[0]
    head = tiny_retrieval_head("none")
    objective_of(head, fresh_model("GPT-OSS"), 20, answers=0.5).loss(Batch(ids, answer, mask.bool())).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in head.parameters())


@pytest.mark.parametrize("family", ["Mistral with a window", "Inkling"])
def test_a_model_that_forgets_by_itself_or_adds_a_bias_is_refused(family: str) -> None:
    with refused("model", "model"):
        objective_of(tiny_retrieval_head("none"), fresh_model(family), 10)


def causal(kv_heads, rows, length, seed):
    """Random weights of the last `rows` of `length` tokens, that add up to 1."""
    torch.manual_seed(seed)
    logits = torch.randn(kv_heads, rows, length)
    hidden = torch.ones(rows, length).bool().triu(length - rows + 1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def top(weights, budget):
    order = sorted(range(len(weights)), key=lambda place: -weights[place])
    return set(order[:budget])


def slow(target, guess, budget):
    """The measures by sets, step by step."""
    kv_heads, rows, length = target.shape
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    for head in range(kv_heads):
        before = None
        for row in range(rows):
            last = length - rows + row
            if last + 1 <= budget:
                continue
            true, chosen = top(target[head, row].tolist(), budget), top(guess[head, row].tolist(), budget)
            window = {*range(min(4, budget)), *range(last, last - max(budget - 4, 0), -1)}
            found["hit"].append(len(true & chosen) / budget)
            found["window_hit"].append(len(true & window) / budget)
            found["mass"].append(sum(target[head, row, place].item() for place in chosen))
            found["window_mass"].append(sum(target[head, row, place].item() for place in window))
            found["best_mass"].append(sum(target[head, row, place].item() for place in true))
            if before is not None:
                found["overlap"].append(len(before & chosen) / budget)
            before = chosen
    return {name: sum(values) / len(values) for name, values in found.items() if values}


@pytest.mark.parametrize(("rows", "budget"), [(6, 5), (30, 7), (30, 3), (6, 29), (30, 30)])
def test_measures_are_those_of_sets(rows, budget):
    """None where a sample is within the budget."""
    target, guess = causal(2, rows, 30, 0), causal(2, rows, 30, 1)
    assert at_budget(target, guess, budget) == pytest.approx(slow(target, guess, budget), rel=1e-4)
    assert bool(at_budget(target, guess, budget)) == (budget < 30)


def test_batches_measure_what_single_samples_do():
    objective = objective_of(tiny_retrieval_head(), tiny_model(), 6).train()
    rows = SampleDataset(samples(6))
    batches = [collate([rows[place] for place in range(start, start + 3)]) for start in (0, 3)]
    metrics = measure_retrieval_head(objective, batches, [4, 30, 500])
    assert (metrics["eval_samples_4"], metrics["eval_samples_30"]) == (6, 1)
    assert "eval_hit_500" not in metrics
    single = measure_retrieval_head(objective, [collate([rows[place]]) for place in range(6)], [4, 30, 500])
    assert metrics == pytest.approx(single, rel=1e-4)
    assert objective.training and objective.head.training


def test_scores_that_are_no_numbers_are_refused():
    objective = objective_of(tiny_retrieval_head(), tiny_model(), 6)
    with torch.no_grad():
        objective.head.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="scores of held-out samples are not finite"):
        measure_retrieval_head(objective, [collate([SampleDataset(samples(1))[0]])], [4])
