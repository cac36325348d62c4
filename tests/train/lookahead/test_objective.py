"""The two-pass objective against one pass over everything, written out the slow way; batches; the divergence."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from keepsight.data_gen.shards import TrainingSample
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import PREFIX
from keepsight.train.dataset import Batch, SampleDataset, collate
from keepsight.train.fidelity import far_divergence, importance_divergence
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.tiny import FAMILIES, tiny_model

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
    named = lookahead.lora.tensors().items()
    return {name.removeprefix(PREFIX).replace(".lora_", ".").replace(".weight", ""): weight for name, weight in named}


def samples(*lengths: tuple[int, int]) -> list[TrainingSample]:
    """Random samples of (prompt, answer) tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 128, (count,), generator=generator).tolist()

    return [
        TrainingSample(index, "test", ids(prompt), ids(answer), "", "")
        for index, (prompt, answer) in enumerate(lengths)
    ]


def batch_of(rows: list[TrainingSample]) -> dict:
    batch = collate([SampleDataset(rows)[place] for place in range(len(rows))])
    batch.pop("indices")
    return batch


class TailLora(nn.Module):
    """A projection whose low-rank update reaches the last `rows` rows only (LookaheadKV, section 3.1)."""

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor, rows: int) -> None:
        super().__init__()
        self.base, self.rows = base, rows
        self.down, self.up = nn.Parameter(down.detach().clone()), nn.Parameter(up.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        update = hidden @ self.down.T @ self.up.T * (SHAPE.alpha / SHAPE.rank)
        gate = torch.arange(hidden.shape[1]) >= hidden.shape[1] - self.rows
        return self.base(hidden) + update * gate[:, None]


def one_pass(objective: ImportanceObjective, family: str, sample: TrainingSample) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one sample and its gradients: eager attention over [X; Y] for the target, over [X; P] for the guess."""
    prompt, whole = torch.tensor([sample.prompt_ids]), torch.tensor([sample.prompt_ids + sample.answer_ids])
    size = len(sample.prompt_ids)
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(whole, output_attentions=True).attentions
    target = [weights[:, :, size:, :size].mean(dim=2) for weights in attentions]
    weights = lora(objective.lookahead)
    gated = {}
    for name in sorted({name.rpartition(".")[0] for name in weights}):
        parent, _, child = name.rpartition(".")
        gated[name] = TailLora(model.get_submodule(name), weights[f"{name}.A"], weights[f"{name}.B"], SHAPE.tokens)
        setattr(model.get_submodule(parent), child, gated[name])
    tokens = objective.lookahead.tokens.detach().clone().requires_grad_()
    embeddings = torch.cat([model.get_input_embeddings()(prompt), tokens[None]], dim=1)
    attentions = model(inputs_embeds=embeddings, output_attentions=True).attentions
    predicted = [weights[:, :, size:, :size].mean(dim=2) for weights in attentions]
    losses = [
        (true * (true / guess).log()).sum(-1).mean()
        for true, guess in (
            (a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)) for a, b in zip(target, predicted, strict=True)
        )
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    parameters = {"tokens": tokens}
    for name, module in gated.items():
        parameters |= {f"{name}.A": module.down, f"{name}.B": module.up}
    return loss.detach(), gradients(parameters)


def gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.grad for name, value in parameters.items() if value.grad is not None}


def two_pass(objective: ImportanceObjective, rows: list[TrainingSample]) -> tuple[Tensor, dict[str, Tensor]]:
    objective.zero_grad()
    loss = objective(**batch_of(rows))["loss"]
    loss.backward()
    return loss.detach(), gradients(lora(objective.lookahead) | {"tokens": objective.lookahead.tokens})


@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_equal_one_pass_in_loss_and_gradients(family):
    objective = random_objective(family)
    (sample,) = samples((40, 9))
    expected, slow = one_pass(objective, family, sample)
    loss, found = two_pass(objective, [sample])
    assert loss.item() > 0.05
    assert_close(loss, expected)
    assert len(found) == 1 + 2 * (7 + 7 + 2)
    assert all(gradient.abs().max() > 1e-4 for gradient in slow.values())
    assert_close(found, slow)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_equals_the_mean_of_single_passes(family):
    """Prompts and answers of different lengths, the longest answer to the shortest prompt."""
    objective = random_objective(family)
    rows = samples((40, 3), (9, 14), (23, 8))
    singles = [one_pass(objective, family, sample) for sample in rows]
    loss, found = two_pass(objective, rows)
    assert_close(loss, torch.stack([single for single, _ in singles]).mean())
    means = {name: torch.stack([single[name] for _, single in singles]).mean(dim=0) for name in found}
    assert_close(found, means)


def test_the_importance_of_a_padded_row_is_that_of_the_row_alone():
    objective = random_objective()
    rows = samples((40, 3), (9, 14))
    padded = objective.importances(Batch(**batch_of(rows)))
    for place, sample in enumerate(rows):
        alone = objective.importances(Batch(**batch_of([sample])))
        for layers, single in zip(padded, alone, strict=True):
            for layer, expected in zip(layers, single, strict=True):
                size = len(sample.prompt_ids)
                assert_close(layer[place, :, -size:], expected[0])
                assert torch.all(layer[place, :, :-size] == 0)


def test_importance_is_the_share_of_attention_that_goes_to_the_prompt():
    """The softmax runs over what follows the prompt too, so that each head gives the prompt less than all."""
    target, predicted = random_objective().importances(Batch(**batch_of(samples((40, 9)))))
    for layer in [*target, *predicted]:
        assert layer.shape == (1, 4, 40)
        assert layer.dtype == torch.float32
        assert torch.all((layer.sum(-1) > 0) & (layer.sum(-1) < 1))


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


def test_collate_makes_no_mask_where_nothing_is_padded():
    batch = collate([{"index": 0, "prompt_ids": [5, 6], "answer_ids": [8], "length": 3}])
    assert (batch["prompt_mask"], batch["answer_mask"]) == (None, None)


def test_samples_carry_their_length_in_tokens():
    dataset = SampleDataset(samples((40, 9), (5, 2)))
    assert len(dataset) == 2
    assert [dataset[place]["length"] for place in (0, 1)] == [49, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_trainable_weight_is_dead_and_no_base_weight_has_a_gradient(family):
    """From the usual start, where B = 0 keeps A's gradient at zero for the first step."""
    torch.manual_seed(0)
    objective = ImportanceObjective(Lookahead(tiny_model(family), SHAPE))
    trainable = [weight for weight in objective.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-2)
    batch = batch_of(samples((40, 9), (23, 5)))
    for _ in range(2):
        optimizer.zero_grad()
        objective(**batch)["loss"].backward()
        optimizer.step()
    assert len(trainable) == 1 + 2 * (7 + 7 + 2)
    for name, weight in objective.named_parameters():
        learned = name == "lookahead.soft_tokens.weight" or name.startswith("lookahead.lora.")
        assert weight.requires_grad == learned, name
        if weight.requires_grad:
            assert weight.grad is not None and weight.grad.abs().max() > 0, name
        else:
            assert weight.grad is None, name


def test_importance_is_float32_under_autocast():
    """Sums over queries in bfloat16 would round what the loss compares."""
    objective, batch = random_objective(), Batch(**batch_of(samples((40, 9))))
    _, exact = objective.importances(batch)
    with torch.autocast("cpu", torch.bfloat16):
        layers = objective.importances(batch)
    assert {layer.dtype for both in layers for layer in both} == {torch.float32}
    for layer, expected in zip(layers[1], exact, strict=True):
        assert not torch.equal(layer, layer.bfloat16().float())
        assert (layer - expected).abs().max() < 0.05


def test_the_lora_can_be_trained_between_steps_and_is_off_for_the_target():
    """Trainers look for trainable parameters then; the target must not see it."""
    objective = random_objective()
    batch = batch_of(samples((40, 9)))
    target, _ = objective.importances(Batch(**batch))
    assert all(weight.requires_grad for weight in lora(objective.lookahead).values())
    torch.manual_seed(8)
    with torch.no_grad():
        for weight in lora(objective.lookahead).values():
            weight.normal_(std=0.2)
    again, predicted = objective.importances(Batch(**batch))
    assert all(torch.equal(*pair) for pair in zip(target, again, strict=True))
    assert all(layer.requires_grad for layer in predicted)
    assert not any(layer.requires_grad for layer in again)


def random_importance(*shape: int, seed: int) -> Tensor:
    """Not normalised: as attention to a prompt, rows sum to less than 1."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 0.9 / shape[-1]


def test_the_divergence_of_equal_importance_is_zero():
    target = [random_importance(2, 4, 30, seed=seed) for seed in (1, 2)]
    assert importance_divergence(target, target).item() == pytest.approx(0, abs=1e-6)
    assert importance_divergence(target, [layer * 0.3 for layer in target]).item() == pytest.approx(0, abs=1e-6)


def test_the_divergence_is_the_mean_kl_of_the_normalised_rows():
    target = [random_importance(2, 4, 30, seed=seed) for seed in (1, 2, 3)]
    predicted = [random_importance(2, 4, 30, seed=seed) ** 2 for seed in (4, 5, 6)]
    true, guess = (Categorical(logits=torch.stack(layers).log()) for layers in (target, predicted))
    expected = kl_divergence(true, guess).mean()
    assert expected > 0.1
    assert_close(importance_divergence(target, predicted), expected)
    reverse = importance_divergence(predicted, target)
    assert abs(reverse - expected) > 1e-2, "the direction matters: target first"


def test_the_divergence_is_finite_where_importance_underflows():
    target = torch.tensor([[[0.5, 0.2, 0.0, 0.0]]])
    predicted = torch.tensor([[[0.4, 0.0, 0.3, 0.0]]], requires_grad=True)
    loss = importance_divergence([target], [predicted])
    loss.backward()
    assert torch.isfinite(loss) and loss > 1
    assert predicted.grad is not None and torch.isfinite(predicted.grad).all()
    assert torch.isfinite(importance_divergence([target * 0], [predicted.detach() * 0]))


def test_the_divergence_ignores_padding():
    target, predicted = random_importance(1, 4, 30, seed=1), random_importance(1, 4, 30, seed=2)
    padding = torch.zeros(1, 4, 11)
    padded = importance_divergence([torch.cat([padding, target], -1)], [torch.cat([padding, predicted], -1)])
    assert_close(padded, importance_divergence([target], [predicted]))


def test_a_row_of_a_batch_without_far_entries_adds_nothing_to_their_divergence():
    torch.manual_seed(0)
    target, predicted = torch.rand(2, 3, 50).softmax(-1), torch.rand(2, 3, 50).softmax(-1).requires_grad_()
    mask = torch.arange(50) >= torch.tensor([[0], [20]])  # 50 and 30 tokens
    whole = far_divergence([target], [predicted], mask)
    alone = far_divergence([target[:1]], [predicted[:1]], None)
    assert_close(whole, alone / 2)
    whole.backward()
    assert predicted.grad is not None and predicted.grad[0].any() and not predicted.grad[1].any()


def test_the_divergence_refuses_layers_that_do_not_pair():
    layer = random_importance(1, 4, 30, seed=1)
    with pytest.raises(ValueError, match="shorter"):
        importance_divergence([layer, layer], [layer])
