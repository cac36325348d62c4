"""Gather: copy the selected entries out of a layer, whose memory is then freed."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from keepsight.runtime.cache import entries, is_bounded, with_full_layers
from keepsight.runtime.cache_layers import KeptLayer, LayerEntries, RaggedLayer
from keepsight.runtime.importance import stacked, top_mask
from keepsight.runtime.rounding import Counts


def keep(cache: Cache, kept: Sequence[Tensor], padded: bool = False, counts: Counts | None = None) -> Cache:
    """A new cache with only the kept entries; the given one is untouched.

    Args:
        cache: A cache of L layers with full attention.
        kept: L tensors [B, K, C] bool: which entries stay. Layers in which all heads keep the same number are dense,
            the others ragged.
        padded: Whether rows were padded; see `all_ragged`.
        counts: [L, B, K], the number that each head keeps. Counted by default, for which the CPU has to wait.
    """
    counts = counted(kept) if counts is None else counts
    ragged, marked = all_ragged(cache, padded), lengths_differ(counts)
    seen = cache.get_seq_length()
    layers = [
        kept_layer(held, mask, count, seen, ragged=ragged, marked=marked)
        for held, mask, count in zip(entries(cache), kept, counts, strict=True)
    ]
    return with_full_layers(cache, layers)


def counted(kept: Sequence[Tensor]) -> Counts:
    """[L, B, K], the number of entries that each head keeps, of L masks [B, K, C]; the CPU waits for it."""
    held = torch.stack([mask.sum(dim=-1).to(kept[0].device) for mask in kept]).tolist() if kept else []
    return np.array(held, dtype=np.int64)


def all_ragged(cache: Cache, padded: bool) -> bool:
    """Whether every layer must be ragged, and so heed no mask: bounded layers go on to need that of padding."""
    return padded and any(map(is_bounded, cache.layers))


def lengths_differ(counts: Counts) -> bool:
    """Whether heads [L, B, K] keep different numbers: the model's mask has one length, which then fits no layer."""
    return bool(counts.size) and bool(counts.min() != counts.max())


def select_top(importance: Sequence[Tensor], counts: Counts) -> list[Tensor]:
    """For each layer, its most important entries [B, K, C] bool, [L, B, K] in each head; ties go to the first index."""
    chosen: list[Tensor] = []
    for places, layers in stacked(importance):
        count = count_of(counts[places])
        chosen += top_mask(layers, counts[places] if count is None else count).unbind()
    return chosen


def kept_layer(
    held: LayerEntries, mask: Tensor, counts: Counts, seen: int, *, ragged: bool = False, marked: bool = False
) -> KeptLayer:
    """A layer of the kept entries [B, K, C] bool.

    Args:
        held: The layer's entries.
        mask: Which of them stay.
        counts: [B, K], how many of them each head keeps.
        seen: Logical length.
        ragged: Whether the layer is ragged though all heads keep the same number.
        marked: Whether a dense layer marks its entries as real, so that it heeds no mask of the model.
    """
    count = None if ragged else count_of(counts)
    rows = torch.nonzero_static(mask.flatten(), size=int(counts.sum()))[:, 0]  # the CPU does not wait for it
    # Whole rows are copied: indexing by the mask itself would copy number by number.
    keys, values = (each.reshape(-1, each.shape[-1]).index_select(0, rows) for each in (held.keys, held.values))
    if count is None:
        return RaggedLayer(keys, values, counts, seen)
    shape = *mask.shape[:2], count
    keys, values = (each.view(*shape, each.shape[-1]) for each in (keys, values))
    return KeptLayer(keys, values, seen, mask.new_ones(shape) if marked else None)


def kept_received(received: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """[B, H, C] at the kept entries [B, K, C] bool of each head's KV head, padded on the left where heads differ."""
    group, length, count = received.shape[1] // mask.shape[1], mask.shape[2], count_of(counts)
    if count is not None:
        places = torch.nonzero_static(mask, size=int(counts.sum()))[:, -1].view(*counts.shape, count)
        return received.gather(2, places.repeat_interleave(group, dim=1))
    places = (mask * torch.arange(1, length + 1, device=mask.device)).topk(int(counts.max()), dim=-1).values.flip(-1)
    places = places.repeat_interleave(group, dim=1)  # from 1 on; 0 where a head keeps fewer than others
    return received.gather(2, (places - 1).clamp(min=0)).masked_fill(places == 0, 0.0)


def count_of(counts: Counts) -> int | None:
    """The number that all heads [..., B, K] keep; None where they differ."""
    return int(counts.min()) if counts.min() == counts.max() else None
