"""A slow reference for any family: transformers' own eager attention over whole sequences; entries can be hidden."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from keepsight.models.decoder import embedded_inputs, entry_owners, full_attention_layers
from keepsight.models.lookahead import Lookahead

Hide = Callable[[int, Tensor], Tensor]
"""Number among the full-attention layers, attention weights [H, S, S] if nothing is hidden, -> [H, S, S] bool, True
where a query may not look."""


def slow_pass(model: Any, hide: Hide | None = None, **inputs: Any) -> tuple[list[Tensor], Tensor]:
    """One pass without cache and without keepsight.

    Returns:
        Attention weights [B, H, S, S] of each layer with full attention, with those of layers that share its entries
        as further heads, and logits [B, S, V].
    """
    full_layers = full_attention_layers(model.config)
    owners = entry_owners(model.config)
    full_indices = {layer: full_layers.index(owner) for layer, owner in enumerate(owners) if owner in full_layers}
    weights: dict[int, list[Tensor]] = {}
    call_count = itertools.count()  # for a block that attends in several layers, one after the other

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        layer: int | None = module.layer_idx
        if layer is None or layer < 0:
            full_index: int | None = next(call_count)
        else:
            full_index = full_indices.get(layer)
        heads = query.shape[1]
        kv_heads = key.shape[1]
        if full_index is not None and hide is not None:
            _, unhidden = eager(module, query, key, value, attention_mask, **options)
            hidden = hide(full_index, unhidden[0])
            lowest = torch.finfo(query.dtype).min
            attention_mask = attention_mask.expand(-1, heads, -1, -1).masked_fill(hidden, lowest)
        output, attention = eager(module, query, key, value, attention_mask, **options)
        sinks = options.get("s_aux")
        if sinks is not None and torch.allclose(attention.sum(dim=-1), torch.ones(())):  # Granite leaves sinks out
            repeated = key.repeat_interleave(heads // kv_heads, dim=1)
            logits = query @ repeated.mT * options["scaling"] + attention_mask
            share_of_entries = (logits.logsumexp(dim=-1) - sinks[:, None]).sigmoid()
            attention = attention * share_of_entries[..., None]
        if full_index is not None:  # layers that read the same entries: side by side by KV head
            weights.setdefault(full_index, []).append(attention.unflatten(1, (kv_heads, -1)))
        return output, attention

    AttentionInterface.register("test_slow", attend)
    AttentionMaskInterface.register("test_slow", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    config = model.config.get_text_config(decoder=True)
    implementation = config._attn_implementation
    config._attn_implementation = {"": "test_slow"}
    try:
        with torch.no_grad():
            logits = model(use_cache=False, **inputs).logits
    finally:
        config._attn_implementation = {"": implementation}
    by_layer = [torch.cat(weights[index], dim=2).flatten(1, 2) for index in sorted(weights)]
    return by_layer, logits


def hiding(kept: list[Tensor]) -> Hide:
    """What follows N prompt tokens sees only those entries of them that were kept, [1, K, N] bool of each layer."""

    def hide(layer: int, weights: Tensor) -> Tensor:
        hidden = torch.zeros_like(weights, dtype=torch.bool)
        evicted = ~kept[layer][0]
        kv_heads, length = evicted.shape
        by_head = evicted.repeat_interleave(len(weights) // kv_heads, dim=0)
        hidden[:, length:, :length] = by_head[:, None]
        return hidden

    return hide


def below_top(prompt: int, budget: int, kv_heads: int) -> Hide:
    """Each token after the prompt sees, beside itself, the `budget` keys that each KV head attends to most."""

    def hide(layer: int, weights: Tensor) -> Tensor:
        hidden = torch.zeros_like(weights, dtype=torch.bool)
        group = len(weights) // kv_heads
        for row in range(prompt, weights.shape[1]):
            for heads in torch.arange(len(weights)).split(group):
                best = weights[heads, row, :row].amax(dim=0).topk(budget).indices
                hidden[heads, row, :row] = torch.ones(row, dtype=torch.bool).index_fill(0, best, False)
        return hidden

    return hide


def soft_token_attention(
    lookahead: Lookahead, embedded: Tensor, reduction: str = "mean", **inputs: Any
) -> list[Tensor]:
    """[H, N] of each layer: mean or max attention of soft tokens after a prompt, in one pass, LoRA on for them alone.

    The prompt is embedded, [1, N, hidden]; `inputs` are what else the model takes for prompt and soft tokens.
    """
    model = lookahead.model
    prompt_length = embedded.shape[1]
    length = prompt_length + len(lookahead.tokens)
    is_soft_token = torch.arange(length) >= prompt_length
    state = lookahead.lora_state()
    scale = lookahead.settings.alpha / lookahead.settings.rank
    hooks = []
    for name, linear in model.named_modules():
        a = state.get(f"base_model.model.{name}.lora_A.weight")
        b = state.get(f"base_model.model.{name}.lora_B.weight")
        if a is None or b is None:
            continue

        def add(module: Any, inputs: Any, output: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            hidden = inputs[0]
            batch_size = hidden.numel() // length // a.shape[1]
            lora_is_on = is_soft_token.repeat(batch_size).view(*hidden.shape[:-1], 1)
            return output + (hidden @ a.T @ b.T) * scale * lora_is_on

        hooks.append(linear.register_forward_hook(add))
    embeddings = torch.cat([embedded, lookahead.observers(1)], dim=1)
    weights, _ = slow_pass(model, **embedded_inputs(model, embeddings), **inputs)
    for hook in hooks:
        hook.remove()
    to_prompt = [layer_weights[0, :, prompt_length:, :prompt_length] for layer_weights in weights]
    if reduction == "max":
        return [attention.amax(dim=1) for attention in to_prompt]
    return [attention.mean(dim=1) for attention in to_prompt]
