"""The EAGLE-3 draft head: one decoder layer that guesses the target's next tokens from the target's own features.

Li et al. 2025, "EAGLE-3" (arXiv 2503.01840), section 3.1. Row t reads the target's features of token t and the
embedding of token t + 1, and guesses token t + 2. The layer's output replaces the features of the next row, so that
drafting can continue without the target. Module names are the keys of public checkpoints.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from typing_extensions import Self

from keepsight.errors import UserError
from keepsight.models.decoder import head_width

HeadAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of a head's layer: queries [B, H, q, d], keys and values [B, K, q, d] of the new tokens, after RoPE ->
[B, q, H, d]. The caller decides which earlier tokens they see: a cache, a training step, a padding mask."""


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose outputs EAGLE-3 reads, low, middle and high, of a target with `layers` layers.

    Their outputs are the inputs of layers 2, L // 2 and L - 3, counted from 0.

    Raises:
        UserError: the target has too few layers for three different ones.
    """
    chosen = 1, layers // 2 - 1, layers - 4
    if not 0 <= chosen[0] < chosen[1] < chosen[2]:
        raise UserError(f"a target of {layers} layers is too shallow for an EAGLE-3 head; name its feature layers")
    return chosen


class HeadAttention(nn.Module):
    """Projections of a head's layer.

    Args:
        config: The head's configuration; `qkv_bias` (default false) gives queries, keys and values a bias.
        inputs: Width of the inputs.
    """

    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        super().__init__()
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads or 1, head_width(config)
        bias = bool(getattr(config, "qkv_bias", False))
        self.width = width
        self.q_proj = nn.Linear(inputs, heads * width, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)

    def forward(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], attend: HeadAttend) -> Tensor:
        """[B, q, inputs] -> [B, q, hidden]; `rotation` holds RoPE's cosines and sines."""
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        return self.o_proj(attend(query, key, value).flatten(2))


class HeadRotaryEmbedding(LlamaRotaryEmbedding):
    """RoPE whose frequencies stay in float32 and are computed at once, even where the head is on the meta device.

    In half precision the angles of far positions would be wrong.
    """

    def __init__(self, config: LlamaConfig) -> None:
        with torch.device("cpu"):
            super().__init__(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            setattr(self, name, frequencies.to(self.get_buffer(name).device))
        return self


class HeadLayer(nn.Module):
    """The decoder layer. The residual is the un-normed feature, not the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, embeddings: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], attend: HeadAttend
    ) -> Tensor:
        """Embeddings and features [B, q, hidden] -> [B, q, hidden]."""
        inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(inputs, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """What EAGLE's heads of all versions share.

    Attributes:
        own_embedding: [vocab, hidden], where the head's embedding differs from the target's; it is not trained.
    """

    own_embedding: Tensor | None = None

    def embedding(self, target: PreTrainedModel) -> Callable[[Tensor], Tensor]:
        """What embeds token ids [B, q] for the head, [B, q, hidden]: the target's embedding, or its own."""
        if self.own_embedding is None:
            return target.get_input_embeddings()
        return partial(functional.embedding, weight=self.own_embedding)


class DraftHead(EagleHead):
    """An EAGLE-3 head; the embedding is the target's, unless it has its own.

    Args:
        config: A Llama configuration of the layer (`hidden_size`, heads, RoPE, ...) with, as public checkpoints have
            them, `vocab_size` of the target, `draft_vocab_size`, `target_hidden_size` (by default `hidden_size`), and
            `eagle_config` with `eagle_aux_hidden_state_layer_ids`, the target's feature layers. EAGLE-3.1 adds
            `fc_norm`, a norm for each of the three layers' features, and `norm_output`: the features of the next row
            are what the last norm gives.

    Attributes:
        d2t: [draft_vocab] int64: the target's id minus the draft's id.
        t2d: [vocab] bool: whether the target's id is in the draft's vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        draft_vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.norm_output = bool(getattr(config, "norm_output", False))
        if getattr(config, "fc_norm", False):
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(3 * width, config.hidden_size, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.rotary_emb = HeadRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < draft_vocab)

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        """Indices of the target's layers whose outputs are its features; None for the default ones."""
        named: dict[str, Any] = getattr(self.config, "eagle_config", None) or {}
        layers = named.get("eagle_aux_hidden_state_layer_ids")
        return None if layers is None else tuple(layers)

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """The target's layers whose outputs are the features."""
        return self.feature_layers or default_feature_layers(target.config.get_text_config().num_hidden_layers)

    def combine(self, features: Tensor) -> Tensor:
        """The target's features of three layers, concatenated: [B, q, 3 * target_hidden] -> [B, q, hidden]."""
        if hasattr(self, "fc_norm"):
            taps = features.chunk(3, dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: HeadAttend) -> Tensor:
        """One pass of the layer.

        Args:
            embeddings: [B, q, hidden], of tokens t + 1.
            features: [B, q, hidden] of tokens t: from `combine`, or the output of an earlier pass.
            positions: [B or 1, q] int64, for RoPE.
            attend: See `HeadAttend`.

        Returns:
            [B, q, hidden], the features of the next row; before the last norm unless the config has `norm_output`.
        """
        hidden = self.midlayer(embeddings, features, self.rotary_emb(embeddings, positions), attend)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of `forward` -> logits [..., draft_vocab] of token t + 2."""
        return self.lm_head(hidden if self.norm_output else self.norm(hidden))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of the draft's."""
        return draft_ids + self.d2t[draft_ids]

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Set the draft's vocabulary: [draft_vocab] int64, ids of the target, ascending."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True
