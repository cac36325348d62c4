"""The draft head of EAGLE-1 and EAGLE-2: one decoder layer that guesses the target's next feature.

Li et al. 2024, "EAGLE" (arXiv 2401.15077), section 3; EAGLE-2 (arXiv 2406.16858) drafts trees with the same head. The
feature is what the target's lm_head reads: the last hidden state, after the final norm. Row t reads the feature of
token t and the embedding of token t + 1 and guesses the feature of token t + 1; from it the target's own lm_head
guesses token t + 2. Module names are the keys of public checkpoints. Called like `DraftHead`.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from keepsight.errors import UserError
from keepsight.models.draft_head import EagleHead, HeadAttend, HeadAttention, HeadRotaryEmbedding


class FeatureLayer(nn.Module):
    """The decoder layer, without a norm before its attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], attend: HeadAttend) -> Tensor:
        """[B, q, hidden] -> [B, q, hidden]."""
        hidden = inputs + self.self_attn(inputs, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FeatureHead(EagleHead):
    """An EAGLE-1 or EAGLE-2 head; lm_head and embedding are the target's, unless it has an embedding of its own.

    Args:
        config: A Llama configuration of the layer, with `bias` (of `fc`, by default true) and `qkv_bias` (by default
            false) as public checkpoints have them.
        lm_head: The target's lm_head; without it there are no logits.
    """

    def __init__(self, config: LlamaConfig, lm_head: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bool(getattr(config, "bias", True)))
        self.layers = nn.ModuleList([FeatureLayer(config)])
        self.rotary_emb = HeadRotaryEmbedding(config)
        self._lm_head = (lm_head,)  # in a tuple, because torch registers modules that are attributes

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """The target's layer with the feature: one past the last, after the final norm (see `RecordFeatures`)."""
        return (target.config.get_text_config().num_hidden_layers,)

    def combine(self, features: Tensor) -> Tensor:
        """The target's feature [B, q, hidden], as it is."""
        return features

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: HeadAttend) -> Tensor:
        """One pass of the layer.

        Args:
            embeddings: [B, q, hidden], of tokens t + 1.
            features: [B, q, hidden] of tokens t: the target's, or the output of an earlier pass.
            positions: [B or 1, q] int64, for RoPE.
            attend: See `HeadAttend`.

        Returns:
            [B, q, hidden]: the features of the next row.
        """
        inputs = self.fc(torch.cat([embeddings, features], dim=-1))
        return self.layers[0](inputs, self.rotary_emb(embeddings, positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of `forward` -> logits [..., vocab] of token t + 2.

        Raises:
            UserError: the head was loaded without its target.
        """
        lm_head = self._lm_head[0]
        if lm_head is None:
            raise UserError("an EAGLE-1 or EAGLE-2 head has no lm_head of its own; load it together with its target")
        return lm_head(hidden)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of the draft's: the same."""
        return draft_ids
