"""An attention backend of vLLM (CPU) for prefixes whose heads keep different numbers of entries.

A prefix is stored in pages: one page is the entries of one KV head of one layer in one block. The pages of a prefix
lie in the blocks that vLLM allocated for its placeholder tokens, whatever layer and head they belong to; a request's
own tokens lie where vLLM puts them. Attention is vLLM's kernel with the KV heads folded into the batch: one sequence
for each request and KV head, with a block table and a length of its own. Requests without a prefix are read so as well.

Experimental: it has run on vLLM's CPU backend alone. It is used where `KEEPSIGHT_RAGGED=1` is in the environment. For
GPUs there is `keepsight.serving.vllm.ragged_triton`.
"""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from keepsight.errors import UserError
from keepsight.serving.prefix import Header

SWITCH = "KEEPSIGHT_RAGGED"
TRITON = "triton"
"""The value of the switch that asks for Triton's attention."""
RECORDS = "KEEPSIGHT_EVICT"


@dataclass(frozen=True)
class Layout:
    """The buffer that holds all layers' caches.

    Attributes:
        layers: Number of layers.
        blocks: Blocks of a layer.
        heads: KV heads.
        size: Entries of a block.
        pages: [layers * blocks * heads, 1, size, 2 * width], the buffer as pages of one head each.
        layer_indices: Index of each layer by its name.
    """

    layers: int
    blocks: int
    heads: int
    size: int
    pages: Tensor
    layer_indices: dict[str, int]

    def page_ids(self, numbers: Tensor, block_ids: Tensor) -> Tensor:
        """Pages of the buffer for the page numbers of a request whose blocks are `block_ids`, all int64."""
        pages_per_block = self.layers * self.heads
        block = block_ids[numbers // pages_per_block]
        layer = numbers % pages_per_block // self.heads
        head = numbers % self.heads
        return (layer * self.blocks + block) * self.heads + head


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
    return os.environ.get(SWITCH) in ("1", TRITON)


def records() -> bool:
    """Whether the environment asks for the backend of `keepsight.serving.vllm.record`."""
    return os.environ.get(RECORDS) == "1"


class Ragged:
    """An attention implementation of vLLM that reads ragged heads.

    Attributes:
        shared: Shared by the layers of the engine; None before their caches are known.
    """

    shared: Shared | None = None

    def require_foldable(self) -> None:
        """Refuse what differs between the query heads of different KV heads, which become one.

        Raises:
            UserError: the model's attention has sinks or ALiBi, or its cache is quantized.
        """
        has_sinks = getattr(self, "sinks", None) is not None
        if has_sinks or getattr(self, "alibi_slopes", None) is not None:
            raise UserError(
                f"keepsight: attention with sinks or ALiBi cannot read ragged heads; start without {SWITCH}",
                field=SWITCH,
                code="model",
            )
        dtype = getattr(self, "kv_cache_dtype", "auto")
        if os.environ.get(SWITCH) == TRITON and dtype not in ("auto", "float16", "bfloat16"):
            raise UserError(
                f"keepsight: kv_cache_dtype={dtype} is not read by {SWITCH}={TRITON}; start without it",
                field="kv_cache_dtype",
                code="conflict",
            )


def shared_by(modules: Mapping[str, Any], kv_caches: dict[str, Tensor]) -> Shared | None:
    """Make the `Shared` of the layers with these caches; None if they do not use the backend.

    Raises:
        UserError: the layers' caches are not adjacent parts of one buffer, or have another layout than [blocks, heads,
            entries, 2 x width].
    """
    impls = [modules[name].impl for name in kv_caches]
    impls = [impl for impl in impls if isinstance(impl, Ragged)]
    if not impls:
        return None
    for impl in impls:
        impl.require_foldable()

    caches = [*kv_caches.values()]
    first_cache = caches[0]
    blocks, heads, size, width = first_cache.shape
    page = size * width
    strides = (heads * page, page, width, 1)
    if any(cache.shape != first_cache.shape or cache.stride() != strides for cache in caches):
        raise UserError(
            f"keepsight: the layers' caches have strides {first_cache.stride()} in place of {strides}, so that a "
            "KV head's entries in a block do not lie side by side; set VLLM_KV_CACHE_LAYOUT=LBHNC, or start without "
            f"{SWITCH}=1",
            field="VLLM_KV_CACHE_LAYOUT",
            code="conflict",
        )
    cache_bytes = first_cache.element_size() * blocks * heads * page
    offsets = [cache.data_ptr() - first_cache.data_ptr() for cache in caches]
    if offsets != [index * cache_bytes for index in range(len(caches))]:
        raise UserError(
            f"keepsight: the caches of the layers do not lie in one buffer; start without {SWITCH}=1",
            field=SWITCH,
            code="conflict",
        )

    layout = Layout(
        layers=len(caches),
        blocks=blocks,
        heads=heads,
        size=size,
        pages=torch.as_strided(
            first_cache,
            (len(caches) * blocks * heads, 1, size, width),
            (page, page, width, 1),
        ),
        layer_indices={name: index for index, name in enumerate(kv_caches)},
    )
    shared = Shared(layout)
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
            f"engine blocks of {layout.size}, {layout.layers} layers and {layout.heads} heads",
            field="prefix",
            code="model",
        )
    total = int(tensors["pages"].sum())
    numbers = torch.arange(min(first // layout.size * layout.layers * layout.heads, total), total)
    page_ids = layout.page_ids(numbers, torch.tensor(blocks))
    slots = (page_ids[:, None] * layout.size + torch.arange(layout.size)).flatten()
    start = (total - len(numbers)) * layout.size
    device = layout.pages.device
    slots = slots.to(device)
    keys = tensors["keys"][start:, None].to(device, dtype).contiguous()
    values = tensors["values"][start:, None].to(device, dtype).contiguous()
    module.impl.do_kv_cache_update(module, keys, values, layout.pages, slots)


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


class RaggedImpl(Ragged, CPUAttentionBackendImpl):
    """vLLM's CPU attention; steps in which a request has ragged heads run with the heads folded into the batch."""

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
        first_blocks = []
        if attn_metadata is not None:
            first_blocks = attn_metadata.block_table[:, 0].tolist()
        if self.shared is None or not any(block in self.shared.prefixes for block in first_blocks):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )

        layout = self.shared.layout
        folded = self._folded(attn_metadata, layer, self.shared)
        layer_index = layout.layer_indices[layer.layer_name]
        tokens = attn_metadata.num_actual_tokens
        rows = tokens * self.num_kv_heads
        queries = query[:tokens].reshape(rows, -1, self.head_size)[folded.order].contiguous()
        folded_output = torch.empty_like(queries)
        keys, values = layout.pages.view(len(layout.pages), 1, layout.size * 2, -1).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=keys,
            value_cache=values,
            output=folded_output,
            query_start_loc=folded.starts,
            seq_lens=folded.lengths[layer_index],
            scale=self.scale,
            causal=attn_metadata.causal,
            alibi_slopes=None,
            sliding_window=self.sliding_window,
            block_table=folded.tables[layer_index],
            softcap=self.logits_soft_cap,
            scheduler_metadata=folded.plans[layer_index],
            s_aux=None,
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        output[:tokens].view(rows, -1, self.head_size)[folded.order] = folded_output
        return output

    def _folded(self, metadata: Any, layer: Any, shared: Shared) -> Folded:
        """The step's sequences; made in its first layer."""
        folded: Folded | None = getattr(metadata, "keepsight", None)
        if folded is not None:
            return folded

        layout = shared.layout
        step = fold(metadata.query_start_loc.long(), metadata.block_table.long(), metadata.seq_lens.long(), shared)
        plans = []
        for layer_lengths in step.lengths:
            plan = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(layer_lengths),
                num_heads=self.num_queries_per_kv,
                num_kv_heads=1,
                head_dim=self.head_size,
                seq_lens=layer_lengths,
                dtype=layout.pages.dtype,
                query_start_loc=step.starts,
                causal=metadata.causal,
                sliding_window_size=-1,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            plans.append(plan)
        metadata.keepsight = Folded(step.order, step.starts, step.lengths, step.tables, plans)
        return metadata.keepsight


class FoldedStep(NamedTuple):
    """See `Folded`; on the CPU."""

    order: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor


def fold(starts: Tensor, table: Tensor, lengths: Tensor, shared: Shared) -> FoldedStep:
    """The sequences of requests [R] whose queries begin at `starts` [R + 1]; for the others see `_tables`."""
    order, query_counts = _order(starts, shared.layout.heads)
    tables, head_lengths = _tables(table, lengths, shared)
    folded_starts = torch.cat([query_counts.new_zeros(1), query_counts.cumsum(0)]).int()
    return FoldedStep(order, folded_starts, head_lengths, tables)


def _order(starts: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`Folded.order`, and the number of queries of each sequence."""
    request_orders = []
    for first, stop in itertools.pairwise(starts.tolist()):
        tokens = torch.arange(first, stop)
        request_orders.append((tokens * heads + torch.arange(heads)[:, None]).flatten())
    query_counts = (starts[1:] - starts[:-1]).repeat_interleave(heads)
    return torch.cat(request_orders), query_counts


def _tables(table: Tensor, lengths: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """`Folded.tables` and `Folded.lengths` of requests with block tables [R, n] and lengths [R]."""
    layout = shared.layout
    layers = layout.layers
    heads = layout.heads
    size = layout.size
    layer = torch.arange(layers)[:, None, None]
    head = torch.arange(heads)[:, None]

    prefixes = [shared.prefixes.get(first_block) for first_block in table[:, 0].tolist()]
    most_pages = max([0, *(int(prefix.counts.max()) for prefix in prefixes if prefix is not None)])
    tables = torch.zeros(layers, len(prefixes) * heads, table.shape[1] + 1 + most_pages, dtype=torch.long)
    head_lengths = torch.zeros(layers, len(prefixes) * heads, dtype=torch.int32)
    for row, prefix in enumerate(prefixes):
        length = int(lengths[row])
        sequences = slice(row * heads, (row + 1) * heads)
        prefix_blocks = 0
        prefix_pages = torch.zeros(layers, heads, dtype=torch.long)
        if prefix is not None:
            prefix_blocks = prefix.blocks
            prefix_pages = prefix.counts
            numbers = prefix.first[..., None] + torch.arange(int(prefix_pages.max()))
            # Beyond a head's own pages they are overwritten or not read.
            numbers = numbers.clamp(max=int(prefix_pages.sum()) - 1)
            tables[:, sequences, : numbers.shape[2]] = layout.page_ids(numbers, table[row])

        blocks = table[row, prefix_blocks : -(-length // size)]
        pages = (layer * layout.blocks + blocks) * heads + head  # [L, K, n]
        tables[:, sequences].scatter_(2, prefix_pages[..., None] + torch.arange(pages.shape[2]), pages)
        head_lengths[:, sequences] = (prefix_pages * size + length - prefix_blocks * size).int()
    return tables.int(), head_lengths


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

    if os.environ.get(SWITCH) == TRITON:
        if records():
            raise UserError(
                f"keepsight: {RECORDS}=1 works with vLLM's CPU backend alone; start without {SWITCH}={TRITON}",
                field=RECORDS,
                code="conflict",
            )
        register_backend(AttentionBackendEnum.TRITON_ATTN, f"{__package__}.ragged_triton.RaggedTritonBackend")
        return
    if not records():
        backend = f"{__name__}.RaggedBackend"
    elif is_asked_for():
        backend = f"{__package__}.record.RaggedRecordingBackend"
    else:
        backend = f"{__package__}.record.RecordingBackend"
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)
