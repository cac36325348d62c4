"""The two-pass objective against one pass over everything, written out the slow way; its divergence and fidelity."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from keepsight.data_gen.store import TrainingSample
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import PREFIX
from keepsight.train.dataset import Batch, collate
from keepsight.train.fidelity import far_divergence, importance_divergence
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.families import fresh_model
from tests.models.modules import random_on
from tests.refused import refused
from tests.runtime.slow_families import slow_pass, soft_token_attention
from tests.tiny import FAMILIES, prompt_ids, tiny_model
from tests.train.runs import GRID, batch_of, measure_fidelity, samples_of_lengths

SHAPE = LookaheadSettings(tokens=5, rank=2, alpha=8)


def random_objective(family: str = "llama") -> ImportanceObjective:
    """With LoRA as training leaves it: it starts with B = 0, where A has no gradient."""
    lookahead = Lookahead(tiny_model(family), SHAPE)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in lora(lookahead).values():
            parameter.normal_(std=0.2)
    return ImportanceObjective(lookahead)


def lora(lookahead: Lookahead) -> dict[str, nn.Parameter]:
    """`model.layers.0.self_attn.q_proj.A` and so on."""
    assert lookahead.lora is not None
    weights = {}
    for name, weight in lookahead.lora.tensors().items():
        short_name = name.removeprefix(PREFIX).replace(".lora_", ".").replace(".weight", "")
        weights[short_name] = weight
    return weights


class TailLora(nn.Module):
    """A projection whose low-rank update reaches the last `rows` rows only (LookaheadKV, section 3.1)."""

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor, rows: int) -> None:
        super().__init__()
        self.base = base
        self.rows = rows
        self.down = nn.Parameter(down.detach().clone())
        self.up = nn.Parameter(up.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        update = hidden @ self.down.T @ self.up.T * (SHAPE.alpha / SHAPE.rank)
        gate = torch.arange(hidden.shape[1]) >= hidden.shape[1] - self.rows
        return self.base(hidden) + update * gate[:, None]


def add_tail_lora(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, TailLora]:
    """Put a `TailLora` in place of every projection that has weights; returns them by name."""
    projections = {}
    for name in sorted({name.rpartition(".")[0] for name in weights}):
        parent, _, child = name.rpartition(".")
        base = model.get_submodule(name)
        projections[name] = TailLora(base, weights[f"{name}.A"], weights[f"{name}.B"], SHAPE.tokens)
        setattr(model.get_submodule(parent), child, projections[name])
    return projections


def normalised_divergence(target: Tensor, predicted: Tensor) -> Tensor:
    """The mean KL divergence of rows, each divided by its sum."""
    target_shares = target / target.sum(-1, keepdim=True)
    predicted_shares = predicted / predicted.sum(-1, keepdim=True)
    return (target_shares * (target_shares / predicted_shares).log()).sum(-1).mean()


def one_pass(objective: ImportanceObjective, family: str, sample: TrainingSample) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one sample and its gradients: eager attention over [X; Y] is the target, over [X; P] the prediction."""
    prompt = torch.tensor([sample.prompt_ids])
    prompt_and_answer = torch.tensor([sample.prompt_ids + sample.answer_ids])
    size = len(sample.prompt_ids)
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(prompt_and_answer, output_attentions=True).attentions
    target = [weights[:, :, size:, :size].mean(dim=2) for weights in attentions]

    projections = add_tail_lora(model, lora(objective.lookahead))
    tokens = objective.lookahead.tokens.detach().clone().requires_grad_()
    embeddings = torch.cat([model.get_input_embeddings()(prompt), tokens[None]], dim=1)
    attentions = model(inputs_embeds=embeddings, output_attentions=True).attentions
    predicted = [weights[:, :, size:, :size].mean(dim=2) for weights in attentions]

    layer_losses = [normalised_divergence(*layer) for layer in zip(target, predicted, strict=True)]
    loss = torch.stack(layer_losses).mean()
    loss.backward()
    parameters = {"tokens": tokens}
    for name, projection in projections.items():
        parameters[f"{name}.A"] = projection.down
        parameters[f"{name}.B"] = projection.up
    return loss.detach(), gradients(parameters)


def gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.grad for name, value in parameters.items() if value.grad is not None}


def two_pass(objective: ImportanceObjective, samples: list[TrainingSample]) -> tuple[Tensor, dict[str, Tensor]]:
    objective.zero_grad()
    loss = objective(**batch_of(samples))["loss"]
    loss.backward()
    return loss.detach(), gradients(lora(objective.lookahead) | {"tokens": objective.lookahead.tokens})


@pytest.mark.parametrize("lengths", [[(40, 9)], [(40, 3), (9, 14), (23, 8)]], ids=["one", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_equal_one_pass_in_loss_and_gradients(family, lengths):
    """Of a padded batch the mean of its rows alone, the longest answer to the shortest prompt; the owner of the model
    has left gradient checkpointing on."""
    objective = random_objective(family)
    objective.lookahead.model.gradient_checkpointing_enable()
    objective.train()
    samples = samples_of_lengths(*lengths)
    expected_losses = []
    expected_gradients = []
    for sample in samples:
        sample_loss, sample_gradients = one_pass(objective, family, sample)
        expected_losses.append(sample_loss)
        expected_gradients.append(sample_gradients)

    loss, actual_gradients = two_pass(objective, samples)
    assert loss.item() > 0.05
    assert len(actual_gradients) == 1 + 2 * (7 + 7 + 2)
    assert all(gradient.abs().max() > 1e-4 for gradient in expected_gradients[0].values())
    assert_close(loss, torch.stack(expected_losses).mean())
    mean_gradients = {}
    for name in actual_gradients:
        gradients_of_samples = [sample_gradients[name] for sample_gradients in expected_gradients]
        mean_gradients[name] = torch.stack(gradients_of_samples).mean(dim=0)
    assert_close(actual_gradients, mean_gradients)


def test_collate_pads_prompts_on_the_left_and_answers_on_the_right():
    rows = [
        {"index": 4, "prompt_ids": [5, 6, 7], "answer_ids": [8], "length": 4},
        {"index": 2, "prompt_ids": [9], "answer_ids": [3, 4], "length": 3},
    ]
    batch = collate(rows)
    assert batch["prompt_ids"].tolist() == [[5, 6, 7], [0, 0, 9]]
    assert batch["prompt_mask"].tolist() == [[True] * 3, [False, False, True]]
    assert batch["answer_ids"].tolist() == [[8, 0], [3, 4]]
    assert batch["answer_mask"].tolist() == [[True, False], [True, True]]
    assert batch["indices"] == [4, 2]


def test_importance_is_float32_under_autocast():
    """Sums over queries in bfloat16 would round what the loss compares."""
    objective = random_objective()
    batch = Batch(**batch_of(samples_of_lengths((40, 9))))
    _, exact = objective.importances(batch)
    with torch.autocast("cpu", torch.bfloat16):
        target, predicted = objective.importances(batch)
    assert {layer.dtype for layer in [*target, *predicted]} == {torch.float32}
    for layer, expected in zip(predicted, exact, strict=True):
        assert not torch.equal(layer, layer.bfloat16().float())
        assert (layer - expected).abs().max() < 0.05


def random_importance(*shape: int, seed: int) -> Tensor:
    """Not normalised: as attention to a prompt, rows sum to less than 1."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 0.9 / shape[-1]


def test_the_divergence_is_the_mean_kl_of_the_normalised_rows():
    target = [random_importance(2, 4, 30, seed=seed) for seed in (1, 2, 3)]
    predicted = [random_importance(2, 4, 30, seed=seed) ** 2 for seed in (4, 5, 6)]
    target_shares = Categorical(logits=torch.stack(target).log())
    predicted_shares = Categorical(logits=torch.stack(predicted).log())
    expected = kl_divergence(target_shares, predicted_shares).mean()
    assert expected > 0.1
    scaled = [layer * 0.3 for layer in predicted]
    assert_close(importance_divergence(target, scaled), expected)


def test_the_divergence_is_finite_where_importance_underflows():
    target = torch.tensor([[[0.5, 0.2, 0.0, 0.0]]])
    predicted = torch.tensor([[[0.4, 0.0, 0.3, 0.0]]], requires_grad=True)
    loss = importance_divergence([target], [predicted])
    loss.backward()
    assert torch.isfinite(loss)
    assert loss > 1
    assert predicted.grad is not None
    assert torch.isfinite(predicted.grad).all()
    all_zero = torch.zeros_like(target)
    assert torch.isfinite(importance_divergence([all_zero], [all_zero]))


def test_a_row_of_a_batch_without_far_entries_adds_nothing_to_their_divergence():
    torch.manual_seed(0)
    target = torch.rand(2, 3, 50).softmax(-1)
    predicted = torch.rand(2, 3, 50).softmax(-1).requires_grad_()
    mask = torch.arange(50) >= torch.tensor([[0], [20]])  # 50 and 30 tokens
    divergence = far_divergence([target], [predicted], mask)
    first_row_alone = far_divergence([target[:1]], [predicted[:1]], None)
    assert_close(divergence, first_row_alone / 2)
    divergence.backward()
    assert predicted.grad is not None
    assert predicted.grad[0].any()
    assert not predicted.grad[1].any()


@pytest.mark.parametrize("family", [*GRID, "Inkling"])
def test_importances_are_the_models_own_attention(family: str) -> None:
    lookahead = random_on(fresh_model(family))
    model = lookahead.model
    ids, mask = prompt_ids(30, 17)
    answer = prompt_ids(5, 5, seed=1)[0]
    with torch.no_grad():
        target, predicted = ImportanceObjective(lookahead).importances(Batch(ids, answer, mask.bool()))
    for row, length in enumerate((30, 17)):
        start = 30 - length
        prompt = ids[row : row + 1, start:]
        weights, _ = slow_pass(model, input_ids=torch.cat([prompt, answer[row : row + 1]], dim=1))
        for layer, layer_weights in zip(target, weights, strict=True):
            expected = layer_weights[0, :, length:, :length].mean(dim=1)
            assert_close(layer[row, :, start:], expected)
        expected_prediction = soft_token_attention(lookahead, model.get_input_embeddings()(prompt))
        for layer, expected in zip(predicted, expected_prediction, strict=True):
            assert_close(layer[row, :, start:], expected)


def test_a_model_that_forgets_by_itself_is_refused() -> None:
    with refused("model", "model"):
        ImportanceObjective(random_on(fresh_model("Mistral with a window")))


class PresetImportance(ImportanceObjective):
    """An objective whose importances, target and predicted, are preset for each batch that it is asked about."""

    def __init__(self, *importances_of_batches: tuple[list[Tensor], list[Tensor]]) -> None:
        super().__init__(Lookahead(tiny_model(), LookaheadSettings(tokens=2, rank=2)))
        self.preset = iter(importances_of_batches)

    def importances(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        return next(self.preset)


def prompts(*lengths: int) -> dict:
    rows = [{"index": 0, "prompt_ids": [5] * length, "answer_ids": [6], "length": length + 1} for length in lengths]
    return collate(rows)


def heads(*rows: list[float]) -> Tensor:
    """[1, 4, N]: two KV heads; the query heads of each see the same."""
    return torch.tensor(rows).repeat_interleave(2, dim=0)[None]


def ranks(count: int, seed: int) -> Tensor:
    """[1, 4, N] of distinct values below 1."""
    generator = torch.Generator().manual_seed(seed)
    heads = [torch.randperm(count, generator=generator) + 1.0 for _ in range(4)]
    return torch.stack(heads)[None] / (count + 1)


def test_recall_and_tau_by_hand():
    """Of the true top 2, {0, 1} and {2, 3}, the prediction keeps 0 and 3; pairs in the wrong order: 2 and 1 of 6."""
    target = heads([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
    predicted = heads([0.4, 0.1, 0.3, 0.2], [0.1, 0.3, 0.2, 0.4])
    objective = PresetImportance(([target], [predicted]))
    fidelity = measure_fidelity(objective, [prompts(4)], budget=2)
    assert fidelity.recall == [pytest.approx((1 / 2 + 1 / 2) / 2)]
    assert fidelity.tau == [pytest.approx(((6 - 2 * 2) / 6 + (6 - 2 * 1) / 6) / 2)]


def test_padding_does_not_count():
    """A padded batch of two measures what its rows measure alone; their mean is over samples, not over batches."""

    def layers(size: int, offset: int) -> list[Tensor]:
        """The importance of a prompt in two layers."""
        return [ranks(size, seed + offset) for seed in (1, 2)]

    def padded(rows: list[Tensor]) -> Tensor:
        longest = max(row.shape[-1] for row in rows)
        return torch.cat([nn.functional.pad(row, (longest - row.shape[-1], 0)) for row in rows])

    def batch_layers(*sizes: int, offset: int) -> list[Tensor]:
        """The importance of a batch of prompts in two layers, padded on the left."""
        rows_of_layers = zip(*(layers(size, offset) for size in sizes), strict=True)
        return [padded(list(rows)) for rows in rows_of_layers]

    alone = []
    for size in (30, 12, 21):
        objective = PresetImportance((layers(size, 0), layers(size, 9)))
        alone.append(measure_fidelity(objective, [prompts(size)], budget=5))

    objective = PresetImportance(
        (batch_layers(30, 12, offset=0), batch_layers(30, 12, offset=9)),
        (layers(21, 0), layers(21, 9)),
    )
    together = measure_fidelity(objective, [prompts(30, 12), prompts(21)], budget=5)
    for name in ("kl", "recall", "tau"):
        of_samples = torch.tensor([getattr(fidelity, name) for fidelity in alone])
        expected = of_samples.mean(dim=0).tolist()
        assert getattr(together, name) == pytest.approx(expected, abs=1e-6)


def test_a_level_prediction_has_a_finite_tau():
    """Importance that underflows or is uniform has no ranking: tau must not poison the mean with NaN."""
    level = torch.full((1, 4, 10), 0.05)
    objective = PresetImportance(([ranks(10, 1)], [level]))
    fidelity = measure_fidelity(objective, [prompts(10)], budget=4)
    assert fidelity.tau == [0.0]
