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
from tests.train.runs import GRID, batch_of
from tests.train.runs import measured as fidelity_of
from tests.train.runs import sized as samples

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
    """Loss of one sample and its gradients: eager attention over [X; Y] is the target, over [X; P] the prediction."""
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


@pytest.mark.parametrize("lengths", [[(40, 9)], [(40, 3), (9, 14), (23, 8)]], ids=["one", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_equal_one_pass_in_loss_and_gradients(family, lengths):
    """Of a padded batch the mean of its rows alone, the longest answer to the shortest prompt; the owner of the model
    has left gradient checkpointing on."""
    objective = random_objective(family)
    objective.lookahead.model.gradient_checkpointing_enable()
    objective.train()
    rows = samples(*lengths)
    singles = [one_pass(objective, family, sample) for sample in rows]
    loss, found = two_pass(objective, rows)
    assert loss.item() > 0.05
    assert len(found) == 1 + 2 * (7 + 7 + 2)
    assert all(gradient.abs().max() > 1e-4 for gradient in singles[0][1].values())
    assert_close(loss, torch.stack([single for single, _ in singles]).mean())
    means = {name: torch.stack([single[name] for _, single in singles]).mean(dim=0) for name in found}
    assert_close(found, means)


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
    objective, batch = random_objective(), Batch(**batch_of(samples((40, 9))))
    _, exact = objective.importances(batch)
    with torch.autocast("cpu", torch.bfloat16):
        layers = objective.importances(batch)
    assert {layer.dtype for both in layers for layer in both} == {torch.float32}
    for layer, expected in zip(layers[1], exact, strict=True):
        assert not torch.equal(layer, layer.bfloat16().float())
        assert (layer - expected).abs().max() < 0.05


def random_importance(*shape: int, seed: int) -> Tensor:
    """Not normalised: as attention to a prompt, rows sum to less than 1."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 0.9 / shape[-1]


def test_the_divergence_is_the_mean_kl_of_the_normalised_rows():
    target = [random_importance(2, 4, 30, seed=seed) for seed in (1, 2, 3)]
    predicted = [random_importance(2, 4, 30, seed=seed) ** 2 for seed in (4, 5, 6)]
    true, guess = (Categorical(logits=torch.stack(layers).log()) for layers in (target, predicted))
    expected = kl_divergence(true, guess).mean()
    assert expected > 0.1
    assert_close(importance_divergence(target, [layer * 0.3 for layer in predicted]), expected)


def test_the_divergence_is_finite_where_importance_underflows():
    target = torch.tensor([[[0.5, 0.2, 0.0, 0.0]]])
    predicted = torch.tensor([[[0.4, 0.0, 0.3, 0.0]]], requires_grad=True)
    loss = importance_divergence([target], [predicted])
    loss.backward()
    assert torch.isfinite(loss) and loss > 1
    assert predicted.grad is not None and torch.isfinite(predicted.grad).all()
    assert torch.isfinite(importance_divergence([target * 0], [predicted.detach() * 0]))


def test_a_row_of_a_batch_without_far_entries_adds_nothing_to_their_divergence():
    torch.manual_seed(0)
    target, predicted = torch.rand(2, 3, 50).softmax(-1), torch.rand(2, 3, 50).softmax(-1).requires_grad_()
    mask = torch.arange(50) >= torch.tensor([[0], [20]])  # 50 and 30 tokens
    whole = far_divergence([target], [predicted], mask)
    alone = far_divergence([target[:1]], [predicted[:1]], None)
    assert_close(whole, alone / 2)
    whole.backward()
    assert predicted.grad is not None and predicted.grad[0].any() and not predicted.grad[1].any()


@pytest.mark.parametrize("family", [*GRID, "Inkling"])
def test_importances_are_the_models_own_attention(family: str) -> None:
    lookahead = random_on(fresh_model(family))
    (ids, mask), answer = prompt_ids(30, 17), prompt_ids(5, 5, seed=1)[0]
    with torch.no_grad():
        layers = ImportanceObjective(lookahead).importances(Batch(ids, answer, mask.bool()))
    for row, length in enumerate((30, 17)):
        prompt = ids[row : row + 1, 30 - length :]
        weights, _ = slow_pass(lookahead.model, input_ids=torch.cat([prompt, answer[row : row + 1]], dim=1))
        wanted = [each[0, :, length:, :length].mean(dim=1) for each in weights]
        predicted = soft_token_attention(lookahead, lookahead.model.get_input_embeddings()(prompt))
        for found, expected in zip(layers, (wanted, predicted), strict=True):
            for each, its in zip(found, expected, strict=True):
                assert_close(each[row, :, 30 - length :], its)


def test_a_model_that_forgets_by_itself_is_refused() -> None:
    with refused("model", "model"):
        ImportanceObjective(random_on(fresh_model("Mistral with a window")))


class Given(ImportanceObjective):
    """An objective whose importances are given, for as many batches as it is asked."""

    def __init__(self, *answers: tuple[list[Tensor], list[Tensor]]) -> None:
        super().__init__(Lookahead(tiny_model(), LookaheadSettings(tokens=2, rank=2)))
        self.answers = iter(answers)

    def importances(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        return next(self.answers)


def prompts(*lengths: int) -> dict:
    rows = [{"index": 0, "prompt_ids": [5] * length, "answer_ids": [6], "length": length + 1} for length in lengths]
    return collate(rows)


def heads(*rows: list[float]) -> Tensor:
    """[1, 4, N]: two KV heads; the query heads of each see the same."""
    return torch.tensor(rows).repeat_interleave(2, dim=0)[None]


def ranks(count: int, seed: int) -> Tensor:
    """[1, 4, N] of distinct values below 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator) + 1.0 for _ in range(4)])[None] / (count + 1)


def test_recall_and_tau_by_hand():
    """Of the true top 2, {0, 1} and {2, 3}, the prediction keeps 0 and 3; pairs in the wrong order: 2 and 1 of 6."""
    target = heads([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
    predicted = heads([0.4, 0.1, 0.3, 0.2], [0.1, 0.3, 0.2, 0.4])
    fidelity = fidelity_of(Given(([target], [predicted])), [prompts(4)], budget=2)
    assert fidelity.recall == [pytest.approx((1 / 2 + 1 / 2) / 2)]
    assert fidelity.tau == [pytest.approx(((6 - 2 * 2) / 6 + (6 - 2 * 1) / 6) / 2)]


def test_padding_does_not_count():
    """A padded batch of two measures what its rows measure alone; their mean is over samples, not over batches."""
    rows = [[(ranks(size, seed), ranks(size, seed + 9)) for seed in (1, 2)] for size in (30, 12, 21)]
    single = [Given(([true for true, _ in row], [guess for _, guess in row])) for row in rows]
    alone = [
        fidelity_of(given, [prompts(row[0][0].shape[-1])], budget=5) for given, row in zip(single, rows, strict=True)
    ]

    def padded(which: int) -> list[Tensor]:
        pad = torch.zeros(1, 4, 18)
        return [torch.cat([rows[0][layer][which], torch.cat([pad, rows[1][layer][which]], -1)]) for layer in (0, 1)]

    third = ([true for true, _ in rows[2]], [guess for _, guess in rows[2]])
    together = fidelity_of(Given((padded(0), padded(1)), third), [prompts(30, 12), prompts(21)], budget=5)
    for name in ("kl", "recall", "tau"):
        expected = torch.tensor([getattr(each, name) for each in alone]).mean(dim=0).tolist()
        assert getattr(together, name) == pytest.approx(expected, abs=1e-6)


def test_a_level_prediction_has_a_finite_tau():
    """Importance that underflows or is uniform has no ranking: tau must not poison the mean with NaN."""
    fidelity = fidelity_of(Given(([ranks(10, 1)], [torch.full((1, 4, 10), 0.05)])), [prompts(10)], budget=4)
    assert fidelity.tau == [0.0]
