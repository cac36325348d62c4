"""The retrieval head: a draft head pruned to what selecting entries of the target's KV cache needs.

SpeContext (arXiv 2512.00722), section 4.3, keeps the embedding and the query and key projections of the EAGLE-3 layer.
Token t is scored before the target reads it: with its embedding, and in the variant `previous-step` with the target's
features of token t - 1, from the previous step. Its RoPE position is t. The embedding is the target's.

The paper selects once for all layers. With `groups` above 1, which is keepsight's own, runs of neighbouring layers have
queries and keys of their own, made of the same inputs.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from typing_extensions import Self

from keepsight.errors import UserError
from keepsight.models.decoder import cached_kv_heads, require_layers_for
from keepsight.models.draft_head import DraftHead, HeadRotaryEmbedding, default_feature_layers
from keepsight.models.retrieval_config import NONE, PREVIOUS_STEP, RetrievalConfig


class RetrievalHead(nn.Module):
    """Queries and keys whose attention selects the entries that the target reads.

    Attributes:
        config: The head's shape.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width = hidden
        self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        if config.features == PREVIOUS_STEP:
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps=eps) for _ in range(3))
            self.fc = nn.Linear(3 * config.target_hidden_size, hidden, bias=False)
            self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
            width = 2 * hidden
        heads = config.groups * config.num_attention_heads
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, self.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.rotary_emb = HeadRotaryEmbedding(config.llama())

    @property
    def kv_heads(self) -> int:
        """KV heads of all groups, group after group; head h of a group selects for KV head h of each of its layers."""
        return self.config.groups * self.config.num_key_value_heads

    @property
    def scaling(self) -> float:
        """Factor of the dot products."""
        return self.config.head_dim**-0.5

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's keys."""
        return self.kv_heads * self.config.head_dim * self.k_proj.weight.element_size()

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """The target's layers whose outputs are the features; empty when it reads embeddings alone."""
        if self.config.features == NONE:
            return ()
        return self.config.feature_layers or default_feature_layers(target.config.get_text_config().num_hidden_layers)

    def project(self, embeddings: Tensor, features: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of some tokens, after RoPE.

        Args:
            embeddings: [B, q, hidden], the target's embeddings of the tokens.
            features: [B, q, 3 * target_hidden], the target's features of each token's predecessor (see
                `of_the_token_before`); None for a head that reads none.
            positions: [B or 1, q] int64, the tokens' positions.

        Returns:
            The queries [B, H, q, d] and the keys [B, K, q, d], in the dtype of the weights.
        """
        inputs = self.inputs(embeddings, features)
        return self.queries(inputs, positions), self.keys(inputs, positions)

    def inputs(self, embeddings: Tensor, features: Tensor | None) -> Tensor:
        """Inputs of the projections, [B, q, hidden or 2 * hidden]; arguments as for `project`."""
        dtype = self.q_proj.weight.dtype
        normed = self.input_layernorm(embeddings.to(dtype))
        if self.config.features == NONE:
            return normed
        if features is None:
            raise ValueError(f"a head with features={self.config.features!r} needs the features of the token before")
        features = features.to(dtype)
        if self.config.fc_norm:
            taps = features.chunk(3, dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        return torch.cat([normed, self.hidden_norm(self.fc(features))], dim=-1)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """From `inputs`, [B, H, q, d] after RoPE."""
        return self._rotated(self.q_proj(inputs), positions)

    def keys(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """From `inputs`, [B, K, q, d] after RoPE."""
        return self._rotated(self.k_proj(inputs), positions)

    def _rotated(self, projected: Tensor, positions: Tensor) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return _rotate(heads, *self.rotary_emb(heads.float(), positions))

    def grouped(self, groups: int) -> "RetrievalHead":
        """A head of more groups, with weights of its own: each group is split into as many groups, which begin alike.

        Raises:
            UserError: `groups` is no multiple of this head's.
        """
        own = self.config.groups
        if own == groups:
            return self
        if groups % own:
            raise UserError(
                f"this retrieval head has {own} groups of layers, which cannot be split into {groups}; "
                f"give retrieval_head.groups={own} or a multiple"
            )
        head = RetrievalHead(replace(self.config, groups=groups)).to(self.q_proj.weight)
        weights = self.state_dict()
        for name in weights:
            if name.startswith(("q_proj", "k_proj")):
                parts = weights[name].unflatten(0, (own, -1))
                weights[name] = parts.repeat_interleave(groups // own, dim=0).flatten(0, 1)
        head.load_state_dict(weights)
        return head

    def extended(self, context: int) -> "RetrievalHead":
        """A head with the same weights (shared, not copied) for a longer context; see `RetrievalConfig.extended`."""
        config = self.config.extended(context)
        if config is self.config:
            return self
        with torch.device("meta"):
            head = RetrievalHead(config)
        head.load_state_dict(self.state_dict(), assign=True)
        head.rotary_emb.to(self.q_proj.weight.device)
        return head.requires_grad_(self.q_proj.weight.requires_grad).train(self.training)

    def reaching(self, length: int) -> "RetrievalHead":
        """The head extended to `length` positions, by a power of two, so that batching seldom changes what is read."""
        context = self.config.trained
        while context < length:
            context *= 2
        return self.extended(context)

    def turned(self, keys: Tensor, positions: Tensor, before: "RetrievalHead") -> Tensor:
        """Keys [B, K, n, d] that `before`, this head for another context, made at positions [B or 1, n], as its own."""
        cos, sin = before.rotary_emb(keys.float(), positions)
        scale = (cos**2 + sin**2)[:, None]  # of YaRN's attention factor
        plain = _rotate(keys.float(), cos, -sin) / scale
        return _rotate(plain, *self.rotary_emb(plain, positions)).to(keys.dtype)

    @classmethod
    def from_draft(cls, draft: nn.Module, features: str) -> Self:
        """Prune a draft head to its query and key projections, norms, and feature projection.

        Args:
            draft: An EAGLE-3 head; its weights are copied.
            features: `previous-step`; or `none`, which keeps the half of the projections that reads embeddings.

        Raises:
            UserError: it is no EAGLE-3 head, or `features` is neither.
        """
        if not isinstance(draft, DraftHead):
            raise UserError("only EAGLE-3 draft heads can be pruned; this is one of EAGLE-1 or EAGLE-2")
        config, layer = draft.config, draft.midlayer
        head = cls(
            RetrievalConfig(
                features=features,
                hidden_size=config.hidden_size,
                target_hidden_size=draft.fc.in_features // 3,
                vocab_size=config.vocab_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=layer.self_attn.k_proj.out_features // layer.self_attn.width,
                head_dim=layer.self_attn.width,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters or {}),
                feature_layers=draft.feature_layers,
                fc_norm=hasattr(draft, "fc_norm"),
                qkv_bias=layer.self_attn.q_proj.bias is not None,
            )
        )
        weights = draft.state_dict() | layer.state_dict() | layer.self_attn.state_dict()
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.copy_(weights[name][..., : parameter.shape[-1]])
        return head.to(draft.fc.weight.device, draft.fc.weight.dtype)

    @classmethod
    def untrained(cls, target: PreTrainedModel, features: str, trained: int, groups: int = 1) -> Self:
        """A head of a target's shape with random projections, to be distilled on up to `trained` tokens.

        Raises:
            UserError: `features` is neither variant, or the target has fewer layers with full attention than groups.
        """
        require_layers_for(groups, target)
        config = target.config.get_text_config()
        heads, kv_heads = config.num_attention_heads, cached_kv_heads(target)
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            RetrievalConfig(
                features=features,
                hidden_size=config.hidden_size,
                target_hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=config.hidden_size // heads // 2 * 2,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=trained,
                rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
                groups=groups,
            )
        ).to(target.device)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, n, d] turned by angles [B or 1, n, d], in float32."""
    rotated, _ = apply_rotary_pos_emb(heads.float(), heads[:, :0].float(), cos, sin)
    return rotated.to(heads.dtype)


def of_the_token_before(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """Features [B, q, w] of tokens 0 to q - 1 -> row t holds those of token t - 1, zeros where there is none.

    Args:
        features: [B, q, w].
        mask: [B, q] bool, False for padding on the left; None when nothing is padding.
    """
    if mask is not None:
        features = features.masked_fill(~mask[..., None], 0)
    return functional.pad(features, (0, 0, 1, -1))
