"""What is tried with a tiny random model of any type: answers with and without eviction, against transformers' own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.errors import UserError
from keepsight.models.decoder import full_attention_layers, has_latents, layer_kinds
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import generate
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, adapter_fields
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.state import prefill, read
from tests.close import rounding
from tests.models.modules import random_on
from tests.runtime.scoring import observed_by_query_head
from tests.runtime.slow_families import hiding, slow_pass, soft_token_attention
from tests.zoo.configs import small_model

WORKS = "works"
REFUSED = "refused"
NOT_TRIED = "not tried"
FAILS = "fails"
LENGTH = 41
BUDGET = 16
SOFT_TOKENS = LookaheadSettings(tokens=5, rank=2, alpha=8)
NOT_COMPARED = {"paligemma": "it reads its prompt in both directions, which the slow reference does not"}
ANSWER: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@dataclass(frozen=True)
class Outcome:
    """What came of a model type.

    Attributes:
        model_type: The type.
        outcome: `works`, `refused`, `not tried`, or `fails`.
        layers: The kinds of its layers.
        without: Methods and uses that are refused for it.
        line: Why it is refused or was not tried, or the error that it fails with.
    """

    model_type: str
    outcome: str
    layers: str = ""
    without: str = ""
    line: str = ""


def prompts(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts of ids that have no other meaning, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, 100, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 2), mask.long()


PROMPT, PROMPT_MASK = prompts(LENGTH)
CONTINUATION = prompts(6, seed=1)[0]


def assert_near(logits: Tensor, expected: Tensor) -> None:
    """Equal but for rounding, which recurrent states add up over tokens."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=16 * rounding(expected))


def snapkv(budget: int) -> SnapKV:
    return SnapKV(budget, window=8)


def plain_answer(model: Any) -> Tensor:
    """The answer [1, T] of transformers' own `generate`."""
    ids: Tensor = model.generate(PROMPT, attention_mask=PROMPT_MASK, **ANSWER)
    return ids[:, LENGTH:]


def check_full_budget(model: Any) -> None:
    """A budget that covers the prompt answers token for token as the full cache."""
    expected = generate(model, PROMPT, **ANSWER)
    assert generate(model, PROMPT, snapkv(LENGTH + 8), **ANSWER).tolist() == expected.tolist()


def check_as_masked(model: Any, method: Evict) -> None:
    """Logits after an eviction are those of transformers' eager attention with the evicted entries masked."""
    state = prefill(model, PROMPT, needs=method.needs())
    kept = state.select_all()
    if not method.fits(state):
        kept = method.select(state, method.importance(model, state))
    if full_attention_layers(model.config):
        heads = sum(layer.shape[1] for layer in kept)
        assert sum(int(layer.sum()) for layer in kept) == BUDGET * heads, "entries are counted"
    state = method.compress_state(model, state)
    _, expected = slow_pass(model, hiding(kept), input_ids=torch.cat([PROMPT, CONTINUATION], dim=1))
    assert_near(state.logits, expected[:, LENGTH - 1])
    reader = method.reader(model)
    for index in range(CONTINUATION.shape[1]):
        state, logits = read(reader, state, CONTINUATION[:, index : index + 1])
        assert_near(logits[:, 0], expected[:, LENGTH + index])


def check_snapkv(model: Any) -> None:
    check_as_masked(model, snapkv(BUDGET))


def check_lookaheadkv(model: Any) -> None:
    """With random weights: scores are those of one eager pass, and soft tokens leave all other state as it was.

    What stays is the same whether they are read with the prompt, where the model allows it, or after it.
    """
    module = random_on(model, SOFT_TOKENS)
    method = LookaheadKV(BUDGET, **adapter_fields(module.adapter()))
    state = prefill(model, PROMPT, needs=method.needs())
    embeddings = model.get_input_embeddings()(PROMPT)
    expected = soft_token_attention(module, embeddings, method.reduce.queries)
    scores = observed_by_query_head(model, method, state)
    for layer_scores, layer_expected in zip(scores, expected, strict=True):
        assert_near(layer_scores[0], layer_expected)
    check_as_masked(model, method)
    with_prompt = method.start(model, PROMPT)
    after_prompt = method.compress_state(model, state)
    assert_near(with_prompt.logits, after_prompt.logits)
    for entries, other_entries in zip(with_prompt.entries(), after_prompt.entries(), strict=True):
        assert_near(entries.keys, other_entries.keys)
        assert_near(entries.values, other_entries.values)


def check_further_turns(model: Any) -> None:
    """A prompt that is read in two parts has the logits of one pass."""
    whole = prefill(model, PROMPT)
    _, logits = read(model, prefill(model, PROMPT[:, :30]), PROMPT[:, 30:])
    assert_near(logits[:, -1], whole.logits)


def check_padded_batch(model: Any) -> None:
    """The rows of a padded batch answer as they do alone."""
    ids, mask = prompts(LENGTH, LENGTH - 9, seed=2)
    rows = generate(model, ids, snapkv(BUDGET), attention_mask=mask, **ANSWER)
    for row, row_ids, row_mask in zip(rows, ids, mask, strict=True):
        alone = generate(model, row_ids[row_mask.bool()][None], snapkv(BUDGET), **ANSWER)
        assert row.tolist() == alone[0].tolist()


CHECKS: dict[str, Callable[[Any], None]] = {
    "budgets": check_full_budget,
    "`snapkv`": check_snapkv,
    "`lookaheadkv`": check_lookaheadkv,
    "further turns": check_further_turns,
    "padded batches": check_padded_batch,
}
"""By what is said to be refused where they end in a `UserError`."""


def examined(model_type: str) -> Outcome:
    """Try everything with a model type; an exception that is no `UserError` is the outcome `fails`."""
    if model_type in NOT_COMPARED:
        return Outcome(model_type, NOT_TRIED, line=NOT_COMPARED[model_type])
    try:
        model = small_model(model_type)
    except ImportError as error:
        return Outcome(model_type, NOT_TRIED, line=_first_line(error))
    except Exception as error:
        return Outcome(model_type, NOT_TRIED, line=f"no small configuration: {_first_line(error)}")
    try:
        try:
            generate(model, PROMPT, snapkv(BUDGET), **ANSWER)
        except UserError as refusal:
            assert "\n" not in str(refusal)
            return Outcome(model_type, REFUSED, _kinds(model), line=str(refusal))
        except Exception as failure:
            try:
                plain_answer(model)
            except Exception as error:
                line = f"transformers itself answers no text: {_first_line(error)}"
                return Outcome(model_type, NOT_TRIED, line=line)
            raise failure
        expected = plain_answer(model)
        before = traces(model)
        assert generate(model, PROMPT, **ANSWER).tolist() == expected.tolist(), "the full cache answers otherwise"
        without = []
        for name, check in CHECKS.items():
            try:
                check(model)
            except UserError as error:
                assert "\n" not in str(error)
                without.append(f"{name} ({error})")
        after = traces(model)
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        assert not changed, f"left changed: {', '.join(changed)}"
    except Exception as error:
        return Outcome(model_type, FAILS, line=f"{type(error).__name__}: {_first_line(error)}")
    return Outcome(model_type, WORKS, _kinds(model), "; ".join(without))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200] or type(error).__name__


def _kinds(model: Any) -> str:
    if not hasattr(model.config.get_text_config(decoder=True), "num_hidden_layers"):
        return ""
    kinds = [kind.removesuffix("_attention") for kind in dict.fromkeys(layer_kinds(model.config))]
    if has_latents(model):
        kinds = ["latent" if kind == "full" else kind for kind in kinds]
    return ", ".join(sorted(kinds))


def traces(model: nn.Module) -> dict[str, Any]:
    """What must be the same before and after: weights, hooks, attributes, and the attention's name."""
    traced: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        traced[f"{name} (weights)"] = tensor.double().sum().item()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if "hooks" in attribute:
                traced[f"{name}.{attribute}"] = len(value)
            elif value is None or isinstance(value, bool | int | float | str):
                traced[f"{name}.{attribute}"] = value
            else:
                traced[f"{name}.{attribute}"] = type(value).__name__
        config: Any = getattr(module, "config", None)
        if config is not None:
            traced[f"{name}.config"] = str(config.to_dict()), config._attn_implementation
    return traced
