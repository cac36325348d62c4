"""The backend of `keepsight.serving.vllm.ragged` on top of vLLM's Triton attention, for GPUs.

Written against the sources of vLLM 0.32. Its kernel takes pages with any strides and needs no plan of a step, so that
KV heads are folded into the batch as on a CPU: one sequence for each request and KV head. Full CUDA graphs would replay
the block tables of the step that was captured; this backend refuses them, and piecewise graphs run it between graphs.

Experimental: the kernel ran in Triton's interpreter, and nothing of it on a GPU. It is used where
`KEEPSIGHT_RAGGED=triton` is in the environment.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVCacheLayout

from keepsight.serving.vllm.ragged import Ragged, Shared, fold


@dataclass(frozen=True)
class Folded:
    """A step with one sequence for each request and KV head, on the GPU.

    `order` [tokens * K] int64 are the rows of queries by request, head and token, and `starts` [R * K + 1] int32 where
    each sequence's begin. By layer: `lengths` [L, R * K] int32 and `tables` [L, R * K, n] int32 of pages.
    `most_queries` and `most_keys` are those of the longest sequence of all layers.
    """

    order: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    most_queries: int
    most_keys: int


class RaggedTritonImpl(Ragged, TritonAttentionImpl):
    """vLLM's Triton attention; steps in which a request has ragged heads run with the heads folded into the batch."""

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
        folded = None
        if attn_metadata is not None and self.shared is not None and self.shared.prefixes:
            folded = _folded(attn_metadata, self.shared)
        if folded is None or self.shared is None or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )

        layout = self.shared.layout
        layer_index = layout.layer_indices[layer.layer_name]
        tokens = attn_metadata.num_actual_tokens
        rows = tokens * self.num_kv_heads
        queries = query[:tokens].reshape(rows, -1, self.head_size)[folded.order].contiguous()
        folded_output = torch.empty_like(queries)
        keys, values = layout.pages.transpose(1, 2).split(self.head_size, dim=-1)  # [pages, size, 1, d]
        unified_attention(
            q=queries,
            k=keys,
            v=values,
            out=folded_output,
            cu_seqlens_q=folded.starts,
            max_seqlen_q=folded.most_queries,
            seqused_k=folded.lengths[layer_index],
            max_seqlen_k=folded.most_keys,
            softmax_scale=self.scale,
            causal=_causal(attn_metadata.causal, self.num_kv_heads),
            window_size=self.sliding_window,
            block_table=folded.tables[layer_index],
            softcap=self.logits_soft_cap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        output[:tokens].view(rows, -1, self.head_size)[folded.order] = folded_output
        return output


def _causal(causal: bool | Tensor, heads: int) -> bool | Tensor:
    """Whether the queries of each sequence see what follows them, from that of each request."""
    return causal.repeat_interleave(heads) if isinstance(causal, Tensor) else causal


def _folded(metadata: Any, shared: Shared) -> Folded | None:
    """The step's sequences, made in its first layer; None where no request has a prefix of ragged heads.

    The block tables are read on the CPU, which waits for the GPU once in a step.
    """
    if not hasattr(metadata, "keepsight"):
        metadata.keepsight = None
        table = metadata.block_table.cpu().long()
        if any(block in shared.prefixes for block in table[:, 0].tolist()):
            step = fold(metadata.query_start_loc.cpu().long(), table, metadata.seq_lens.cpu().long(), shared)
            device = shared.layout.pages.device
            metadata.keepsight = Folded(
                order=step.order.to(device),
                starts=step.starts.to(device),
                lengths=step.lengths.to(device),
                tables=step.tables.to(device),
                most_queries=int((step.starts[1:] - step.starts[:-1]).max()),
                most_keys=int(step.lengths.max()),
            )
    return metadata.keepsight


class RaggedTritonBuilder(TritonAttentionMetadataBuilder):
    """vLLM's builder of a step's metadata, outside of CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class RaggedTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend with `RaggedTritonImpl`, and with each KV head's entries of a block side by side."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The layouts in which a page is one block of memory."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type:
        """The class that computes attention."""
        return RaggedTritonImpl

    @staticmethod
    def get_builder_cls() -> type:
        """The class that builds a step's metadata."""
        return RaggedTritonBuilder
