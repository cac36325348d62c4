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
    places = {layer: full_layers.index(owner) for layer, owner in enumerate(owners) if owner in full_layers}
    weights: dict[int, list[Tensor]] = {}
    in_order = itertools.count()  # of a block that attends in several layers, one after the other

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        index: int | None = module.layer_idx
        if index is None or index < 0:
            place: int | None = next(in_order)
        else:
            place = places.get(index)
        if place is not None and hide is not None:
            hidden = hide(place, eager(module, query, key, value, attention_mask, **options)[1][0])
            attention_mask = attention_mask.expand(-1, query.shape[1], -1, -1).masked_fill(
                hidden, torch.finfo(query.dtype).min
            )
        output, paid = eager(module, query, key, value, attention_mask, **options)
        sinks = options.get("s_aux")
        if sinks is not None and torch.allclose(paid.sum(dim=-1), torch.ones(())):  # Granite returns them without
            repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            logits = query @ repeated.mT * options["scaling"] + attention_mask
            paid = paid * (logits.logsumexp(dim=-1) - sinks[:, None]).sigmoid()[..., None]
        if place is not None:  # layers that read the same entries: side by side by KV head
            weights.setdefault(place, []).append(paid.unflatten(1, (key.shape[1], -1)))
        return output, paid

    AttentionInterface.register("test_slow", attend)
    AttentionMaskInterface.register("test_slow", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    config = model.config.get_text_config(decoder=True)
    loaded = config._attn_implementation
    config._attn_implementation = {"": "test_slow"}
    try:
        with torch.no_grad():
            logits = model(use_cache=False, **inputs).logits
    finally:
        config._attn_implementation = {"": loaded}
    return [torch.cat(weights[place], dim=2).flatten(1, 2) for place in sorted(weights)], logits


def hiding(kept: list[Tensor]) -> Hide:
    """What follows N prompt tokens sees only those entries of them that were kept, [1, K, N] bool of each layer."""

    def hide(place: int, weights: Tensor) -> Tensor:
        hidden, evicted = torch.zeros_like(weights, dtype=torch.bool), ~kept[place][0]
        count = evicted.shape[1]
        hidden[:, count:, :count] = evicted.repeat_interleave(len(weights) // len(evicted), dim=0)[:, None]
        return hidden

    return hide


def below_top(prompt: int, budget: int, kv_heads: int) -> Hide:
    """Each token after the prompt sees, beside itself, the `budget` keys that each KV head attends to most."""

    def hide(place: int, weights: Tensor) -> Tensor:
        hidden, group = torch.zeros_like(weights, dtype=torch.bool), len(weights) // kv_heads
        for row in range(prompt, weights.shape[1]):
            for heads in torch.arange(len(weights)).split(group):
                best = weights[heads, row, :row].amax(dim=0).topk(budget).indices
                seen = torch.zeros(row, dtype=torch.bool).index_fill(0, best, True)
                hidden[heads, row, :row] = ~seen
        return hidden

    return hide


def soft_token_attention(
    lookahead: Lookahead, embedded: Tensor, reduction: str = "mean", **inputs: Any
) -> list[Tensor]:
    """[H, N] of each layer: mean or max attention of soft tokens after a prompt, in one pass, LoRA on for them alone.

    The prompt is embedded, [1, N, hidden]; `inputs` are what else the model takes for prompt and soft tokens.
    """
    model, hooks = lookahead.model, []
    length, count = embedded.shape[1], len(lookahead.tokens)
    state = lookahead.lora_state()
    scale = lookahead.settings.alpha / lookahead.settings.rank
    for name, linear in model.named_modules():
        a, b = (state.get(f"base_model.model.{name}.lora_{part}.weight") for part in "AB")
        if a is None or b is None:
            continue

        def add(module: Any, inputs: Any, output: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            own = (torch.arange(length + count) >= length).repeat(inputs[0].numel() // (length + count) // a.shape[1])
            return output + (inputs[0] @ a.T @ b.T) * scale * own.view(*inputs[0].shape[:-1], 1)

        hooks.append(linear.register_forward_hook(add))
    embeddings = torch.cat([embedded, lookahead.observers(1)], dim=1)
    weights, _ = slow_pass(model, **embedded_inputs(model, embeddings), **inputs)
    for hook in hooks:
        hook.remove()
    seen = [each[0, :, length:, :length] for each in weights]
    return [each.amax(dim=1) if reduction == "max" else each.mean(dim=1) for each in seen]
