"""The two-pass objective against one pass over everything, written out the slow way; its divergence and fidelity."""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import PREFIX
from keepsight.train.dataset import Batch, SampleDataset, collate
from keepsight.train.fidelity import Fidelity, far_divergence, importance_divergence
from keepsight.train.importance import ImportanceObjective
from tests import families
from tests.close import assert_close
from tests.families import fresh_model
from tests.models.modules import random_on
from tests.runtime.slow_families import slow_pass, soft_token_attention
from tests.tiny import FAMILIES, prompt_ids, tiny_model
from tests.train.runs import measured as fidelity_of

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


WINDOWED = "Mistral with a window"


@pytest.mark.parametrize("family", sorted({*families.FAMILIES} - {WINDOWED}))
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
    with pytest.raises(UserError, match="mistral has no layer with full attention, so that there is nothing to choose"):
        ImportanceObjective(random_on(fresh_model(WINDOWED)))


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


def test_a_perfect_prediction_scores_perfectly():
    layers = [ranks(30, seed) for seed in (1, 2, 3)]
    fidelity = fidelity_of(Given((layers, [layer * 0.5 for layer in layers])), [prompts(30)], budget=8)
    assert fidelity.recall == pytest.approx([1, 1, 1])
    assert fidelity.tau == pytest.approx([1, 1, 1])
    assert fidelity.kl == pytest.approx([0, 0, 0], abs=1e-6)


def test_the_opposite_order_scores_worst():
    layer = heads([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1])
    fidelity = fidelity_of(Given(([layer], [0.5 - layer])), [prompts(4)], budget=2)
    assert (fidelity.recall, fidelity.tau) == ([0.0], pytest.approx([-1.0]))


def test_recall_and_tau_by_hand():
    """Of the true top 2, {0, 1} and {2, 3}, the prediction keeps 0 and 3; pairs in the wrong order: 2 and 1 of 6."""
    target = heads([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
    predicted = heads([0.4, 0.1, 0.3, 0.2], [0.1, 0.3, 0.2, 0.4])
    fidelity = fidelity_of(Given(([target], [predicted])), [prompts(4)], budget=2)
    assert fidelity.recall == [pytest.approx((1 / 2 + 1 / 2) / 2)]
    assert fidelity.tau == [pytest.approx(((6 - 2 * 2) / 6 + (6 - 2 * 1) / 6) / 2)]


def test_query_heads_are_averaged_before_entries_are_ranked():
    """Each query head of a KV head prefers another entry; their mean prefers a third."""
    target = torch.tensor([[[0.5, 0.0, 0.4], [0.0, 0.5, 0.4]] * 2])
    predicted = torch.tensor([[[0.1, 0.1, 0.7]] * 4])
    fidelity = fidelity_of(Given(([target], [predicted])), [prompts(3)], budget=1)
    assert fidelity.recall == [1.0]


def test_tau_counts_concordant_pairs():
    target, predicted = ranks(12, 1), ranks(12, 2)
    fidelity = fidelity_of(Given(([target], [predicted])), [prompts(12)], budget=3)
    taus = []
    for true, guess in zip(*(each.view(2, 2, 12).mean(1) for each in (target, predicted)), strict=True):
        signs = [
            ((true[a] - true[b]).sign() * (guess[a] - guess[b]).sign()).item()
            for a, b in itertools.combinations(range(12), 2)
        ]
        ties = [
            sum((each[a] == each[b]).item() for a, b in itertools.combinations(range(12), 2)) for each in (true, guess)
        ]
        taus.append(sum(signs) / ((66 - ties[0]) * (66 - ties[1])) ** 0.5)
    assert fidelity.tau == [pytest.approx(sum(taus) / 2, abs=1e-6)]


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


def test_a_prompt_no_longer_than_the_budget_counts_as_recalled():
    given = Given(([ranks(6, 1)], [ranks(6, 2)]))
    assert fidelity_of(given, [prompts(6)], budget=64).recall == [1.0]


def test_ties_are_broken_alike_on_both_sides():
    level = torch.full((1, 4, 10), 0.05)
    assert fidelity_of(Given(([level], [level.clone()])), [prompts(10)], budget=4).recall == [1.0]


def test_a_level_prediction_has_a_finite_tau():
    """Importance that underflows or is uniform has no ranking: tau must not poison the mean with NaN."""
    fidelity = fidelity_of(Given(([ranks(10, 1)], [torch.full((1, 4, 10), 0.05)])), [prompts(10)], budget=4)
    assert fidelity.tau == [0.0]


def test_measuring_leaves_no_gradient_and_the_lora_on():
    torch.manual_seed(0)
    objective = ImportanceObjective(Lookahead(tiny_model(), LookaheadSettings(tokens=2, rank=2)))
    fidelity = fidelity_of(objective, [prompts(12), prompts(9, 5)], budget=4)
    assert all(0 <= value <= 1 for value in fidelity.recall)
    assert all(-1 <= value <= 1 for value in fidelity.tau)
    assert (len(fidelity.kl), min(fidelity.kl) > 0) == (3, True)
    assert all(weight.grad is None for weight in objective.parameters())
    assert any(".lora_" in name and weight.requires_grad for name, weight in objective.named_parameters())


def test_metrics_are_means_over_layers_under_the_names_that_are_logged():
    fidelity = Fidelity(kl=[1.0, 3.0], recall=[0.5, 0.7], tau=[0.0, -0.5])
    assert fidelity.metrics() == {
        **{"eval_kl": 2.0, "eval_recall": pytest.approx(0.6), "eval_tau": -0.25},
        "eval_kl_by_layer": [1.0, 3.0],
        "eval_recall_by_layer": [0.5, 0.7],
        "eval_tau_by_layer": [0.0, -0.5],
    }
