"""An attention backend of vLLM (CPU) for prefixes whose heads keep different numbers of entries.

A prefix is stored in pages: one page is the entries of one KV head of one layer in one block. The pages of a prefix
lie in the blocks that vLLM allocated for its placeholder tokens, whatever layer and head they belong to; a request's
own tokens lie where vLLM puts them. Attention is vLLM's kernel with the KV heads folded into the batch: one sequence
for each request and KV head, with a block table and a length of its own. Requests without a prefix are read so as well.

Experimental: it has run on vLLM's CPU backend alone. It is used where `KEEPSIGHT_RAGGED=1` is in the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from keepsight.errors import UserError
from keepsight.serving.prefix import Header

SWITCH, RECORDS = "KEEPSIGHT_RAGGED", "KEEPSIGHT_EVICT"


@dataclass(frozen=True)
class Layout:
    """The buffer that holds all layers' caches.

    Attributes:
        layers: Number of layers.
        blocks: Blocks of a layer.
        heads: KV heads.
        size: Entries of a block.
        pages: [layers * blocks * heads, 1, size, 2 * width], the buffer as pages of one head each.
        places: Number of each layer by its name.
    """

    layers: int
    blocks: int
    heads: int
    size: int
    pages: Tensor
    places: dict[str, int]

    def page_ids(self, numbers: Tensor, block_ids: Tensor) -> Tensor:
        """Pages of the buffer for the page numbers of a request whose blocks are `block_ids`, all int64."""
        block, rest = numbers // (self.layers * self.heads), numbers % (self.layers * self.heads)
        return (rest // self.heads * self.blocks + block_ids[block]) * self.heads + rest % self.heads


class Pages:
    """Which pages of a request's placeholder blocks belong to which layer and head.

    Args:
        counts: [L, K] int64, pages of each head. Pages are numbered in this order.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.first = counts.flatten().cumsum(0).view_as(counts) - counts
        self.blocks = -(-int(counts.sum()) // counts.numel())


@dataclass
class Shared:
    """Shared by the layers of an engine: their buffer, and the step's prefixes by the request's first block."""

    layout: Layout
    prefixes: dict[int, Pages] = field(default_factory=dict)


def is_asked_for() -> bool:
    """Whether the environment asks for the backend."""
    return os.environ.get(SWITCH) == "1"


def records() -> bool:
    """Whether the environment asks for the backend of `keepsight.serving.vllm.record`."""
    return os.environ.get(RECORDS) == "1"


def shared_by(modules: Mapping[str, Any], kv_caches: dict[str, Tensor]) -> Shared | None:
    """Make the `Shared` of the layers with these caches; None if they do not use the backend.

    Raises:
        UserError: the layers' caches are not adjacent parts of one buffer.
    """
    impls = [impl for name in kv_caches if isinstance(impl := modules[name].impl, RaggedImpl)]
    if not impls:
        return None
    names, (first, *_) = [*kv_caches], kv_caches.values()
    blocks, heads, size, width = first.shape
    step = first.stride(0) * first.element_size() * blocks
    addresses = [cache.data_ptr() - first.data_ptr() for cache in kv_caches.values()]
    if first.stride(0) != heads * size * width or addresses != [place * step for place in range(len(names))]:
        raise UserError(f"keepsight: the caches of the layers do not lie in one buffer; start without {SWITCH}=1")
    shape = len(names) * blocks * heads, 1, size, width
    pages = torch.as_strided(first, shape, (size * width, size * width, width, 1))
    places = {name: place for place, name in enumerate(names)}
    shared = Shared(Layout(len(names), blocks, heads, size, pages, places))
    for impl in impls:
        impl.shared = shared
    return shared


def load(
    module: Any,
    layout: Layout,
    header: Header,
    tensors: dict[str, Tensor],
    blocks: list[int],
    first: int,
    dtype: torch.dtype,
) -> None:
    """Write the pages of a prefix into a request's blocks; those before entry `first` are there already.

    Raises:
        UserError: the engine's blocks are of another size.
    """
    if header.page != layout.size or header.shape[:2] != (layout.layers, layout.heads):
        raise UserError(
            f"the prefix has pages of {header.page} entries, {header.shape[0]} layers and {header.shape[1]} heads, the "
            f"engine blocks of {layout.size}, {layout.layers} layers and {layout.heads} heads"
        )
    total = int(tensors["pages"].sum())
    numbers = torch.arange(min(first // layout.size * layout.layers * layout.heads, total), total)
    where = layout.page_ids(numbers, torch.tensor(blocks))
    slots = (where[:, None] * layout.size + torch.arange(layout.size)).flatten()
    part = slice((total - len(numbers)) * layout.size, None)
    key, value = (tensors[name][part][:, None].to(dtype).contiguous() for name in ("keys", "values"))
    module.impl.do_kv_cache_update(module, key, value, layout.pages, slots)


@dataclass(frozen=True)
class Folded:
    """A step with one sequence for each request and KV head.

    `order` [tokens * K] int64 are the rows of queries by request, head and token, and `starts` [R * K + 1] int32 where
    each sequence's begin. By layer: `lengths` [L, R * K] int32, `tables` [L, R * K, n] int32 of pages, and the kernel's
    plans.
    """

    order: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    plans: list[Any]


class RaggedImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention; steps in which a request has ragged heads run with the heads folded into the batch."""

    shared: Shared | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Tensor:
        """See vLLM's `AttentionImpl`; queries [tokens, H, d]."""
        firsts = [] if attn_metadata is None else attn_metadata.block_table[:, 0].tolist()
        if self.shared is None or not any(first in self.shared.prefixes for first in firsts):
            arguments = query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            return super().forward(layer, *arguments)
        layout = self.shared.layout
        folded, place = self._folded(attn_metadata, layer, self.shared), layout.places[layer.layer_name]
        rows = attn_metadata.num_actual_tokens * self.num_kv_heads
        queries = query[: attn_metadata.num_actual_tokens].reshape(rows, -1, self.head_size)[folded.order].contiguous()
        answers = torch.empty_like(queries)
        keys, values = layout.pages.view(len(layout.pages), 1, layout.size * 2, -1).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=keys,
            value_cache=values,
            output=answers,
            query_start_loc=folded.starts,
            seq_lens=folded.lengths[place],
            scale=self.scale,
            causal=attn_metadata.causal,
            alibi_slopes=None,
            sliding_window=self.sliding_window,
            block_table=folded.tables[place],
            softcap=self.logits_soft_cap,
            scheduler_metadata=folded.plans[place],
            s_aux=None,
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        output[: attn_metadata.num_actual_tokens].view(rows, -1, self.head_size)[folded.order] = answers
        return output

    def _folded(self, metadata: Any, layer: Any, shared: Shared) -> Folded:
        """The step's sequences; made in its first layer."""
        layout = shared.layout
        if (made := getattr(metadata, "keepsight", None)) is not None:
            return made
        starts, table, lengths = metadata.query_start_loc.long(), metadata.block_table.long(), metadata.seq_lens.long()
        order, counts = _order(starts, layout.heads)
        tables, of_heads = _tables(table, lengths, shared)
        folded_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        plans = [
            ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(counts),
                num_heads=self.num_queries_per_kv,
                num_kv_heads=1,
                head_dim=self.head_size,
                seq_lens=of_layer,
                dtype=layout.pages.dtype,
                query_start_loc=folded_starts,
                causal=metadata.causal,
                sliding_window_size=-1,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            for of_layer in of_heads
        ]
        metadata.keepsight = Folded(order, folded_starts, of_heads, tables, plans)
        return metadata.keepsight


def _order(starts: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`Folded.order`, and the number of queries of each sequence."""
    spans = [torch.arange(first, stop) for first, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    order = [(span * heads + torch.arange(heads)[:, None]).flatten() for span in spans]
    return torch.cat(order), (starts[1:] - starts[:-1]).repeat_interleave(heads)


def _tables(table: Tensor, lengths: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """`Folded.tables` and `Folded.lengths` of requests with block tables [R, n] and lengths [R]."""
    layout = shared.layout
    layers, heads, size = layout.layers, layout.heads, layout.size
    prefixes = [shared.prefixes.get(first) for first in table[:, 0].tolist()]
    longest = table.shape[1] + 1 + max(0 if prefix is None else int(prefix.counts.max()) for prefix in prefixes)
    tables = torch.zeros(layers, len(prefixes) * heads, longest, dtype=torch.long)
    of_heads = torch.zeros(layers, len(prefixes) * heads, dtype=torch.int32)
    layer, head = torch.arange(layers)[:, None, None], torch.arange(heads)[:, None]
    for row, prefix in enumerate(prefixes):
        at, length = slice(row * heads, (row + 1) * heads), int(lengths[row])
        used, skipped = -(-length // size), 0 if prefix is None else prefix.blocks
        counts = torch.zeros(layers, heads, dtype=torch.long) if prefix is None else prefix.counts
        if prefix is not None:
            numbers = prefix.first[..., None] + torch.arange(int(counts.max()))
            numbers = numbers.clamp(max=int(counts.sum()) - 1)  # beyond a head's own pages, overwritten or not read
            tables[:, at, : numbers.shape[2]] = layout.page_ids(numbers, table[row])
        own = (layer * layout.blocks + table[row, skipped:used]) * heads + head  # [L, K, n]
        tables[:, at].scatter_(2, counts[..., None] + torch.arange(own.shape[2]), own)
        of_heads[:, at] = (counts * size + length - skipped * size).int()
    return tables.int(), of_heads


class RaggedBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `RaggedImpl`."""

    @staticmethod
    def get_impl_cls() -> type:
        """The class that computes attention."""
        return RaggedImpl


def register() -> None:
    """Put the backend that the environment asks for in the place of vLLM's own.

    An entry point of `vllm.general_plugins` calls it in each process.
    """
    if not (is_asked_for() or records()):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    recording = f"{__package__}.record.{'Ragged' if is_asked_for() else ''}RecordingBackend"
    backend = recording if records() else f"{__name__}.{RaggedBackend.__name__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)
