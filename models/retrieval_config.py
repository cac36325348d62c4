"""Shape of a retrieval head, and the RoPE that extends it beyond the context it was trained with."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field
from transformers import LlamaConfig
from typing_extensions import Self

from keepsight.errors import UserError
from keepsight.models.weight_files import LARGEST_SIZE

PREVIOUS_STEP, NONE = "previous-step", "none"
VARIANTS = (PREVIOUS_STEP, NONE)
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


@dataclass(frozen=True)
class RetrievalConfig:
    """Shape of a retrieval head; names as in a Llama configuration.

    Attributes:
        features: `previous-step`, the target's features of the previous token; or `none`, token embeddings alone.
        hidden_size: Width of the target's embedding.
        target_hidden_size: Width of each of the target's three feature layers.
        vocab_size: Size of the target's vocabulary.
        num_attention_heads: Query heads of each group.
        num_key_value_heads: KV heads of each group, as many as the target's cache has.
        head_dim: Dimensions of one head.
        rms_norm_eps: Epsilon of the norms.
        max_position_embeddings: Tokens it was trained with, or the context it was extended to.
        rope_parameters: RoPE parameters of transformers: `rope_type`, `rope_theta`, and what the type needs.
        feature_layers: The target's layers whose outputs are its features; None for EAGLE-3's default ones.
        fc_norm: Whether each layer's features are normed first (EAGLE-3.1).
        qkv_bias: Whether the projections have a bias.
        groups: Groups of neighbouring layers of the target, of equal sizes; each has projections of its own, and reads
            what these select.

    Raises:
        UserError: `features` is neither variant, the query heads do not fall into equal groups, or RoPE is not named.
    """

    features: str
    hidden_size: Size
    target_hidden_size: Size
    vocab_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: float
    max_position_embeddings: Size
    rope_parameters: dict[str, Any] = field(hash=False)
    feature_layers: tuple[int, ...] | None = None
    fc_norm: bool = False
    qkv_bias: bool = False
    groups: Size = 1

    def __post_init__(self) -> None:
        if self.features not in VARIANTS:
            raise UserError(f"features={self.features!r} is unknown; choose one of {', '.join(VARIANTS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

        if not {"rope_type", "rope_theta"} <= self.rope_parameters.keys():
            raise UserError(f"rope_parameters={self.rope_parameters} must name rope_type and rope_theta")

    def group_of(self, place: int, layers: int) -> int:
        """The group of the layer at a place among the target's `layers` layers with full attention."""
        return place * self.groups // layers

    @property
    def trained(self) -> int:
        """Context length that it was trained with."""
        return self.rope_parameters.get("original_max_position_embeddings", self.max_position_embeddings)

    def extended(self, context: int) -> Self:
        """The same head for a longer context, by YaRN (Peng et al. 2023, arXiv 2309.00071), without training.

        The factor is the context over the trained length, beta_fast 32, beta_slow 1, the attention factor
        0.1 ln(factor) + 1. Unchanged when its positions already reach that far, or when it has another kind of RoPE,
        which covers long contexts in its own way.
        """
        if context <= self.max_position_embeddings or self.rope_parameters["rope_type"] not in ("default", "yarn"):
            return self
        yarn = {
            "rope_type": "yarn",
            "rope_theta": self.rope_parameters["rope_theta"],
            "factor": context / self.trained,
            "original_max_position_embeddings": self.trained,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
        return replace(self, rope_parameters=yarn, max_position_embeddings=context)

    def trained_on(self, tokens: int, layers: tuple[int, ...]) -> Self:
        """The same head after training with samples of up to `tokens` tokens and the features of these layers."""
        named = replace(self, feature_layers=layers or None)
        if tokens <= self.max_position_embeddings or self.rope_parameters["rope_type"] != "default":
            return named
        return replace(named, max_position_embeddings=tokens)

    def llama(self) -> LlamaConfig:
        """The configuration that transformers needs for RoPE."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )
