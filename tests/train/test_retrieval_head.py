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
    batch_samples = samples(count)
    dataset = SampleDataset(batch_samples)
    values = collate([dataset[position] for position in range(count)])
    values.pop("indices")
    texts = [[*sample.prompt_ids, *sample.answer_ids] for sample in batch_samples]
    return values, texts


def weights_of(model, ids):
    """For each layer, the attention weights [H, S, S] of one unpadded text, from transformers' eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    return [layer[0] for layer in attentions]


def slow_importance(model, ids, kv_heads, selected_layers=slice(None)):
    """[K, S, S]: the mean over some layers and over the query heads of a KV head, entry by entry."""
    layers = weights_of(model, ids)[selected_layers]
    group = layers[0].shape[0] // kv_heads
    result = torch.zeros(kv_heads, len(ids), len(ids))
    for layer in layers:
        for head in range(layer.shape[0]):
            result[head // group] += layer[head] / (group * len(layers))
    return result


def test_importance_of_groups_is_that_of_their_layers():
    values, texts = batch_of()
    outputs = run_teacher(tiny_model(), grouped_retrieval_head(2, "none"), left_padded(Batch(**values)), 40)
    (importance,) = outputs.importance
    length = importance.shape[3]
    for row, ids in enumerate(texts):
        first_group = slow_importance(tiny_model(), ids, 2, slice(2))
        second_group = slow_importance(tiny_model(), ids, 2, slice(2, 3))
        expected = torch.cat([first_group, second_group])
        queries = min(40, len(ids))
        assert_close(importance[row, :, -queries:, length - len(ids) :], expected[:, -queries:])


def test_the_loss_of_groups_is_the_mean_of_heads_alone():
    """Each with the model's layers of its group, in a model of as many layers as groups."""
    head = grouped_retrieval_head(3)
    model = tiny_model()
    values, _ = batch_of(1)
    batch = left_padded(Batch(**values))
    outputs = run_teacher(model, head, batch, 6)
    scores = scores_of(head, model, batch, outputs)
    for group in range(3):
        head_alone = tiny_retrieval_head()
        for name in ("q_proj", "k_proj"):
            group_weight = getattr(head, name).weight.chunk(3)[group]
            getattr(head_alone, name).weight.data.copy_(group_weight)
        kv_heads = slice(2 * group, 2 * group + 2)
        group_outputs = replace(outputs, importance=[outputs.importance[0][:, kv_heads]])
        assert_close(scores[:, kv_heads], scores_of(head_alone, model, batch, group_outputs))


def test_a_batch_is_joined_without_holes():
    values, texts = batch_of()
    batch = left_padded(Batch(**values))
    assert batch.mask is not None
    for row, ids in enumerate(texts):
        length = len(ids)
        padding = batch.ids.shape[1] - length
        assert batch.ids[row, -length:].tolist() == ids
        assert batch.mask[row].tolist() == [False] * padding + [True] * length
        assert batch.positions[row, -length:].tolist() == list(range(length))
    assert batch.real(40).sum(1).tolist() == [min(40, len(ids)) for ids in texts]
    single_values, _ = batch_of(1)
    single = left_padded(Batch(**single_values))
    assert single.mask is None
    assert single.real(7).tolist() == [[True] * 7]


@torch.no_grad()
def slow_scores(head, model, ids):
    """[K, S, S] weights of one text: softmax of each query head, maximum over the group, normalised; by loops."""
    outputs: dict[int, Any] = {}

    def record(layer):
        def hook(module, args, output):
            outputs[layer] = output

        return hook

    for layer in LAYERS:  # transformers' own hidden states have the last layer's after the final norm
        model.model.layers[layer].register_forward_hook(record(layer))
    model(torch.tensor([ids]))
    features = torch.cat([outputs[layer][0] for layer in LAYERS], dim=-1)
    embeddings = model.get_input_embeddings().weight[ids]
    query_heads = head.config.num_attention_heads
    group = query_heads // head.kv_heads
    result = torch.zeros(head.kv_heads, len(ids), len(ids))
    keys = []
    for position in range(len(ids)):
        previous = features[position - 1] if position else torch.zeros_like(features[0])
        embedding = embeddings[position][None, None]
        query, key = head.project(embedding, previous[None, None], torch.tensor([[position]]))
        keys.append(key[0, :, 0])
        for query_head in range(query_heads):
            kv_head = query_head // group
            logits = torch.tensor([query[0, query_head, 0] @ past_key[kv_head] for past_key in keys]) / 8**0.5
            seen = result[kv_head, position, : position + 1]
            seen.copy_(torch.maximum(seen, logits.softmax(-1)))
        result[:, position] /= result[:, position].sum(-1, keepdim=True)
    return result


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def divergence(target: Tensor, predicted: Tensor) -> Tensor:
    """KL(target || predicted) of two distributions."""
    return (target * (target / predicted).log()).sum()


@pytest.mark.parametrize(
    ("kv_heads", "features", "temperature"), [(4, "none", 2.0), (2, "previous-step", 0.5), (1, "previous-step", 1.0)]
)
def test_scores_and_loss_are_those_of_loops(kv_heads, features, temperature):
    """Softened, weights count to the power of 1 / temperature."""
    model = target_for(kv_heads)
    head = tiny_retrieval_head(features, kv_heads=kv_heads)
    with torch.no_grad():
        head.q_proj.weight.mul_(0.3)  # weights far from one-hot
    values, texts = batch_of()
    objective = objective_of(head, model, 6, temperature)
    batch = left_padded(Batch(**values))
    scores = scores_of(head, model, batch, run_teacher(model, head, batch, 6))
    losses = []
    for row, ids in enumerate(texts):
        predicted = slow_scores(head, target_for(kv_heads), ids)[:, -6:]
        assert_close(scores[row, :, :, -len(ids) :].exp(), predicted)
        target = slow_importance(target_for(kv_heads), ids, kv_heads)[:, -6:]
        for kv_head in range(kv_heads):
            for step in range(6):
                visible = len(ids) - 6 + step + 1
                softened_target = target[kv_head, step, :visible] ** (1 / temperature)
                softened_prediction = predicted[kv_head, step, :visible] ** (1 / temperature)
                losses.append(divergence(normalised(softened_target), normalised(softened_prediction)))
    expected_loss = torch.stack(losses).mean().item()
    assert objective(**values)["loss"].item() == pytest.approx(expected_loss, rel=1e-3)


def test_a_share_of_the_loss_is_of_the_answers_and_of_far_entries(monkeypatch):
    monkeypatch.setattr(module, "SINKS", 2)
    monkeypatch.setattr(module, "RECENT", 3)
    model = tiny_model()
    head = tiny_retrieval_head()
    values, ids = batch_of()
    texts = left_padded(Batch(**values))
    outputs = run_teacher(model, head, texts, 30)
    (importance,) = outputs.importance
    shares = scores_of(head, model, texts, outputs).detach().exp()
    rows, length = shares.shape[2:]
    all_entries = []
    far_entries = []
    for row, sample in enumerate(samples(3)):
        start = length - len(ids[row])
        answer = len(sample.answer_ids)
        for kv_head in range(2):
            for query in range(length - min(answer, rows), length):
                target = importance[row, kv_head, query - length + rows]
                predicted = shares[row, kv_head, query - length + rows]
                visible = slice(start, query + 1)
                all_entries.append(divergence(target[visible], predicted[visible]))
                far = slice(start + 2, query - 3 + 1)
                far_entries.append(divergence(normalised(target[far]), normalised(predicted[far])))
    answer_loss = (torch.stack(all_entries).mean() + torch.stack(far_entries).mean()) / 2
    loss_without_answers = objective_of(head, model, 30, 2.0)(**values)["loss"]
    mixed_loss = objective_of(head, model, 30, 2.0, 0.6)(**values)["loss"]
    assert_close(mixed_loss, 0.4 * loss_without_answers + 0.6 * answer_loss)


def test_gradients_reach_every_weight_of_the_head_and_none_of_the_target():
    model = tiny_model()
    head = tiny_retrieval_head()
    model.gradient_checkpointing_enable()
    objective = objective_of(head, model, 8).train()
    values, _ = batch_of()
    objective(**values)["loss"].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert head.training
    assert not model.training


@pytest.mark.parametrize("family", GRID)
def test_importance_is_the_models_own_attention(family: str) -> None:
    model = family_model(family)
    kv_heads = kv_heads_of(family)
    ids, mask = prompt_ids(30, 17)
    answer = prompt_ids(5, 5, seed=1)[0]
    head = tiny_retrieval_head("none", kv_heads=kv_heads)
    (importance,) = run_teacher(model, head, left_padded(Batch(ids, answer, mask.bool())), 10).importance
    assert (importance[1, ..., :13] == 0).all()
    for row, length in enumerate((30, 17)):
        text = torch.cat([ids[row : row + 1, 30 - length :], answer[row : row + 1]], dim=1)
        layer_weights, _ = slow_pass(model, input_ids=text)
        weights = torch.stack(layer_weights)[:, 0, :, -10:]
        mean = weights.unflatten(1, (kv_heads, -1)).mean(dim=(0, 2))
        assert_close(importance[row, ..., 30 - length :], mean / mean.sum(dim=-1, keepdim=True))


def test_sinks_of_padded_rows_leave_gradients_finite() -> None:
    ids, mask = prompt_ids(30, 3)
    answer = prompt_ids(5, 5, seed=1)[0]
    head = tiny_retrieval_head("none")
    objective = objective_of(head, fresh_model("GPT-OSS"), 20, answers=0.5)
    objective.loss(Batch(ids, answer, mask.bool())).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in head.parameters())


@pytest.mark.parametrize("family", ["Mistral with a window", "Inkling"])
def test_a_model_that_forgets_by_itself_or_adds_a_bias_is_refused(family: str) -> None:
    with refused("model", "model"):
        objective_of(tiny_retrieval_head("none"), fresh_model(family), 10)


def causal_weights(kv_heads, rows, length, seed):
    """Random weights of the last `rows` of `length` tokens, that add up to 1."""
    torch.manual_seed(seed)
    logits = torch.randn(kv_heads, rows, length)
    hidden = torch.ones(rows, length).bool().triu(length - rows + 1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def top_positions(weights, budget):
    order = sorted(range(len(weights)), key=lambda position: -weights[position])
    return set(order[:budget])


def slow_measures(target, predicted, budget):
    """The measures by sets, step by step."""
    kv_heads, rows, length = target.shape
    measures: dict[str, list[float]] = {name: [] for name in MEASURES}
    for head in range(kv_heads):
        previous = None
        for row in range(rows):
            last = length - rows + row
            if last + 1 <= budget:
                continue
            weights = target[head, row].tolist()
            best = top_positions(weights, budget)
            selected = top_positions(predicted[head, row].tolist(), budget)
            sinks = range(min(4, budget))
            recent = range(last, last - max(budget - 4, 0), -1)
            window = {*sinks, *recent}
            measures["hit"].append(len(best & selected) / budget)
            measures["window_hit"].append(len(best & window) / budget)
            measures["mass"].append(sum(weights[position] for position in selected))
            measures["window_mass"].append(sum(weights[position] for position in window))
            measures["best_mass"].append(sum(weights[position] for position in best))
            if previous is not None:
                measures["overlap"].append(len(previous & selected) / budget)
            previous = selected
    return {name: sum(values) / len(values) for name, values in measures.items() if values}


@pytest.mark.parametrize(("rows", "budget"), [(6, 5), (30, 7), (30, 3), (6, 29), (30, 30)])
def test_measures_are_those_of_sets(rows, budget):
    """None where a sample is within the budget."""
    target = causal_weights(2, rows, 30, seed=0)
    predicted = causal_weights(2, rows, 30, seed=1)
    measures = at_budget(target, predicted, budget)
    assert measures == pytest.approx(slow_measures(target, predicted, budget), rel=1e-4)
    assert bool(measures) == (budget < 30)


def test_batches_measure_what_single_samples_do():
    objective = objective_of(tiny_retrieval_head(), tiny_model(), 6).train()
    dataset = SampleDataset(samples(6))
    budgets = [4, 30, 500]
    batches = [collate([dataset[0], dataset[1], dataset[2]]), collate([dataset[3], dataset[4], dataset[5]])]
    metrics = measure_retrieval_head(objective, batches, budgets)
    assert metrics["eval_samples_4"] == 6
    assert metrics["eval_samples_30"] == 1
    assert "eval_hit_500" not in metrics
    single_samples = [collate([dataset[position]]) for position in range(6)]
    assert metrics == pytest.approx(measure_retrieval_head(objective, single_samples, budgets), rel=1e-4)
    assert objective.training
    assert objective.head.training


def test_scores_that_are_no_numbers_are_refused():
    objective = objective_of(tiny_retrieval_head(), tiny_model(), 6)
    with torch.no_grad():
        objective.head.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="scores of held-out samples are not finite"):
        measure_retrieval_head(objective, [collate([SampleDataset(samples(1))[0]])], [4])
