"""Models whose indexers select what attention reads, against their own eager attention without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from keepsight import generate
from keepsight.errors import UserError
from keepsight.models.decoder import full_attention_layers, require_supported_config
from keepsight.runtime.join import join
from keepsight.runtime.methods import LookaheadKV, OwnIndexer, SnapKV, make_method
from keepsight.runtime.methods.lookaheadkv import adapter_fields
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.families import SMALL
from tests.models.modules import random_on
from tests.tiny import prompt_ids, tiny_model

KINDS = ["deepseek_v32", "glm_moe_dsa"]
LENGTH = 41
BUDGET = 16
TOP = 9
PROMPT = prompt_ids(LENGTH)[0]
ANSWER = prompt_ids(5, seed=1)[0]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
INDEXER: dict[str, Any] = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 16,  # with few of them, many scores are exactly 0, and which of equals are read is not defined
    "index_head_dim": 8,
    "index_topk": TOP,
}


def indexed_model(kind: str, attention: str = "sdpa", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | INDEXER | changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def slow_logits(kind: str, ids: Tensor, hidden: list[Tensor] | None = None, topk: int = TOP, first: int = 0) -> Tensor:
    """[1, S, V] of the model's eager attention without a cache.

    Tokens after the prompt do not see its entries that are `hidden`, [N] bool of each layer, nor do their indexers.
    Tokens from `first` on read the best `topk` entries alone, those before it the model's own number.
    """
    model = indexed_model(kind, "eager")
    hooks = []
    for index, layer in enumerate(model.model.layers):

        def hide(module: Any, args: Any, inputs: dict[str, Any], index: int = index) -> tuple[Any, dict[str, Any]]:
            mask = inputs["attention_mask"].clone()
            if hidden is not None:
                mask[..., LENGTH:, :LENGTH][..., hidden[index]] = torch.finfo(mask.dtype).min
            return args, {**inputs, "attention_mask": mask}

        def cut(module: Any, args: Any, output: Tensor) -> Tensor:
            best = output[:, first:, :topk]
            repeated = best[..., :1].expand(-1, -1, TOP - topk)  # in place of the others the best one again
            return torch.cat([output[:, :first], torch.cat([best, repeated], dim=-1)], dim=1)

        hooks.append(layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True))
        hooks.append(layer.self_attn.indexer.register_forward_hook(cut))
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_full_cache_answers_as_the_model_does(kind: str) -> None:
    model = indexed_model(kind)
    assert full_attention_layers(model.config) == [0, 1, 2]
    expected = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)[:, LENGTH:]
    assert torch.equal(generate(model, PROMPT, **GREEDY), expected)
    assert torch.equal(generate(model, PROMPT, SnapKV(LENGTH + 9, window=8), **GREEDY), expected)
    assert torch.equal(generate(model, PROMPT, prefill_chunk_size=9, **GREEDY), expected)
    assert_close(prefill(model, PROMPT).logits, slow_logits(kind, PROMPT)[:, -1])
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("allocate", ["uniform", {"name": "global", "floor": 0.2}])
@pytest.mark.parametrize("kind", KINDS)
def test_evicting_an_entry_evicts_its_indexers_key(kind: str, allocate: Any) -> None:
    """Then indexers select among what was kept, also where layers keep different numbers of entries."""
    model = indexed_model(kind)
    method: Any = make_method("snapkv", BUDGET, window=8, allocate=allocate)
    state = prefill(model, PROMPT, needs=method.needs())
    kept = method.select(state, method.importance(model, state))
    evicted = method.compress_state(model, state)
    entry_bytes = 4 * (16 + 4 + 8)  # latent, its part with RoPE, indexer's key
    assert int(evicted.counts().sum()) == 3 * BUDGET
    assert evicted.kv_bytes >= 3 * BUDGET * entry_bytes
    hidden = [~layer[0, 0] for layer in kept]
    text = torch.cat([PROMPT, ANSWER], dim=1)
    expected = slow_logits(kind, text, hidden)
    for index in range(ANSWER.shape[1]):
        evicted, logits = read(model, evicted, ANSWER[:, index : index + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + index])
    together = read(model, method.compress_state(model, state), ANSWER)[1]
    assert_close(together, expected[:, LENGTH:])
    assert not torch.allclose(expected, slow_logits(kind, text), atol=1e-3), "hidden entries matter"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_padded_batch_answer_as_they_do_alone(kind: str) -> None:
    model = indexed_model(kind)
    ids, mask = prompt_ids(LENGTH, 29, seed=3)
    for method in (None, SnapKV(BUDGET, window=8), SnapKV(35, window=8)):
        rows = generate(model, ids, method, attention_mask=mask, **GREEDY)
        for row, row_ids, row_mask in zip(rows, ids, mask, strict=True):
            alone = generate(model, row_ids[row_mask.bool()][None], method, **GREEDY)
            assert row.tolist() == alone[0].tolist()
    method = SnapKV(BUDGET, window=8)
    states = [method.start(model, ids[:1]), method.start(model, ids[1:, LENGTH - 29 :])]
    alone = torch.cat([read(model, state.copy(), ANSWER[:, :1])[1] for state in states])
    together = read(model, join(states), ANSWER[:, :1].expand(2, -1))[1]
    assert_close(together, alone)


def test_a_saved_state_has_the_indexers_keys(tmp_path: Path) -> None:
    model = indexed_model("deepseek_v32")
    state = SnapKV(BUDGET, window=8).start(model, PROMPT)
    save_state(state, tmp_path, model=model)
    loaded = load_state(tmp_path, model).state
    assert torch.equal(read(model, loaded, ANSWER)[1], read(model, state, ANSWER)[1])
    with pytest.raises(UserError, match="a state of own_indexer is not saved"):
        save_state(OwnIndexer(4).start(model, PROMPT), tmp_path, model=model)


def test_soft_tokens_observe_all_entries() -> None:
    model = indexed_model("deepseek_v32")
    method = LookaheadKV(BUDGET, **adapter_fields(random_on(model).adapter()))
    state = method.start(model, PROMPT)
    assert int(state.counts().sum()) == 3 * BUDGET
    assert read(model, state, ANSWER)[1].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_own_indexer_reads_the_budget_of_its_best_entries(kind: str) -> None:
    model = indexed_model(kind)
    state = OwnIndexer(4).start(model, PROMPT)
    text = torch.cat([PROMPT, ANSWER], dim=1)
    expected = slow_logits(kind, text, topk=4, first=LENGTH)
    assert_close(state.logits, expected[:, LENGTH - 1])
    for index in range(ANSWER.shape[1]):
        state, logits = read(model, state, ANSWER[:, index : index + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + index])
    all_read = generate(model, PROMPT, OwnIndexer(TOP), **GREEDY)
    assert torch.equal(all_read, generate(model, PROMPT, **GREEDY))
    uncut = slow_logits(kind, text)
    assert not torch.allclose(expected[:, LENGTH:], uncut[:, LENGTH:]), "entries that are not read matter"


def test_unsupported_budgets_methods_and_models_are_refused_in_one_line() -> None:
    model = indexed_model("deepseek_v32")
    with pytest.raises(UserError, match="budget 10 is more than the 9 entries that the indexer"):
        OwnIndexer(10).start(model, PROMPT)
    with pytest.raises(UserError, match="llama has no indexer"):
        OwnIndexer(4).start(tiny_model(), PROMPT)
    with pytest.raises(UserError, match=r"the ratio 0\.2 is another number for each prompt"):
        OwnIndexer(0.2).start(model, *prompt_ids(LENGTH, 20))
    with pytest.raises(UserError, match="an indexer of this model selects what is read"):
        make_method("quest", 64).start(model, PROMPT)
    shared = AutoConfig.for_model("glm_moe_dsa", **SMALL | INDEXER, indexer_types=["full", "shared", "shared"])
    with pytest.raises(UserError, match="glm_moe_dsa: some layers read what the indexer of an earlier layer selects"):
        require_supported_config(shared)
    for kind in ("deepseek_v4", "hy_v4"):
        with pytest.raises(UserError, match=f"{kind} has layers of"):
            require_supported_config(AutoConfig.for_model(kind))
