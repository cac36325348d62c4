"""Attention to packed entries: by one set of operators, however many entries there are, or by one CUDA kernel."""

import torch
from torch import Tensor

from keepsight.runtime.attention import Softmax, later
from keepsight.runtime.offload import FetchedEntries
from keepsight.runtime.quantized import kernel
from keepsight.runtime.quantized.entries import PackedEntries


def attend_packed(
    query: Tensor,
    held: PackedEntries,
    softmax: Softmax,
    fetched: FetchedEntries | None = None,
    watched: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last q of T tokens; but for the kernel, all entries of the layer are unpacked at once.

    Args:
        query: [B, H, q, d].
        held: T entries of K KV heads.
        softmax: The layer's.
        fetched: Read in full precision in place of the packed entries with their indices.
        watched: Number n of first entries whose attention is returned, at least the fetched ones; the packed ones
            by default.

    Returns:
        The output [B, q, H, d], and the attention of the last query to the watched entries, [B, K, H / K, n] float32.
    """
    watched = held.packed_length if watched is None else watched
    if kernel.usable(query):
        return kernel.attend_in_kernel(query, held, softmax, fetched, watched)
    batch, heads, rows, width = query.shape
    keys, values = held.keys(), held.values()
    if fetched is not None:
        places = fetched.indices[..., None].expand(-1, -1, -1, width)
        keys.scatter_(2, places, fetched.keys)
        values.scatter_(2, places, fetched.values)
    logits = softmax.logits(query.reshape(batch, keys.shape[1], -1, width), keys).unflatten(2, (-1, rows))
    if rows > 1:
        logits[..., -rows:].masked_fill_(later(rows, query.device), -torch.inf)
    weights = softmax.normalised(logits)
    output = (weights.flatten(2, 3).to(values.dtype) @ values).view(batch, heads, rows, width)
    return output.transpose(1, 2).contiguous(), weights[..., -1, :watched]
