"""Attention that an indexer makes sparse: DeepSeek-V3.2 and GLM-MoE-DSA (DeepSeek Sparse Attention).

Beside each latent entry such a layer keeps a small key. The indexer scores these keys for each query, and attention
reads the `index_topk` best entries alone. Layers store the indexer's key at the end of the value, so that evicting an
entry evicts its key too: the indexer then selects among what was kept. Observers, such as soft tokens or a window's
queries, score all entries, as if the indexer selected every one.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache

from keepsight.models.decoder import INDEXED, layer_kinds


def selected(indices: Tensor, mask: Tensor | None, keys: int, most: int | None = None) -> Tensor:
    """The mask [B, 1, q, S] of the entries that are selected, of S `keys`; in the form of `mask`, bool by default.

    `indices` [B, q, k]: the entries that the indexer selects for each of q queries, best first. Only the first `most`
    count.
    """
    is_read = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    is_read = is_read.scatter(-1, indices[..., :most].long(), True)[:, None]
    if mask is None:
        return is_read
    if mask.dtype == torch.bool:
        return mask & is_read
    return mask.masked_fill(~is_read, torch.finfo(mask.dtype).min)


@contextmanager
def masks_of_layers(model: Any, cache: Cache) -> Iterator[None]:
    """Within the block, each layer with an indexer gets a mask of its own: layers may hold different entries.

    A model makes one mask for all layers, and its indexers need one that fits the entries.
    """
    if not isinstance(model, nn.Module) or INDEXED not in layer_kinds(model.config):
        yield
        return
    thread = threading.get_ident()

    def with_mask(module: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if threading.get_ident() != thread:
            return args, inputs
        hidden: Tensor = inputs["hidden_states"] if "hidden_states" in inputs else args[0]
        mask = _visible(cache.layers[module.layer_idx], hidden)
        return args, {**inputs, "attention_mask": mask}

    with ExitStack() as hooks:
        for module in model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "indexer"):
                handle = module.register_forward_pre_hook(with_mask, with_kwargs=True)
                hooks.callback(handle.remove)
        yield


def _visible(layer: Any, hidden: Tensor) -> Tensor:
    """[B, 1, q, S] bool: what each of q new tokens [B, q, hidden] may see of a layer's entries and of each other.

    A layer that attends by itself sees no entries through it. Every token sees itself, padding too: a row of nothing
    would become NaN.
    """
    batch, queries, _ = hidden.shape
    stored = 0
    real = None
    if not hasattr(layer, "attend") and layer.is_initialized:
        stored = layer.keys.shape[2]
        real = layer.real
    keys = stored + queries
    positions = torch.arange(keys, device=hidden.device)
    mask = (positions <= positions[stored:, None]).expand(batch, 1, queries, keys)
    token_mask = None if hasattr(layer, "attend") else layer.token_mask
    if real is not None:
        real = functional.pad(real[:, :1], (0, queries), value=True)
    elif token_mask is not None:
        real = token_mask[:, None, :keys].to(hidden.device)
        real = functional.pad(real, (0, keys - real.shape[2]), value=True)
    if real is None:
        return mask
    is_self = positions == positions[stored:, None]
    return (mask & real[:, :, None]) | is_self
