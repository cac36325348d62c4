"""RoPE of a base model, inverted and applied again; statistics of a layer's queries without their positions."""

import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import FULL, attention_of, decoder_of, has_latents, layer_kinds
from keepsight.runtime.rope_length import BY_LENGTH

SINKS = 4
"""First tokens whose queries are left out of the statistics: they are unlike all others."""


class Rotary:
    """RoPE of a decoder layer of a model; layers without it leave heads as they are.

    If `latent`, heads may be expanded from latents (MLA), and only their last dimensions have RoPE. A `UserError` if
    the model's latents, or angles that follow the prompt's length, cannot be undone.
    """

    def __init__(self, model: PreTrainedModel, index: int, *, latent: bool = False) -> None:
        decoder = decoder_of(model)
        config = model.config.get_text_config(decoder=True)
        attention: Any = attention_of(model, index)
        self._embedding: Any = None
        if getattr(attention, "use_rope", True):
            self._embedding = getattr(decoder, "rotary_emb", None)
        self._layer_kind = []
        if hasattr(self._embedding, "layer_types"):
            self._layer_kind.append(layer_kinds(model.config)[index])
        self._apply: Any = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        # Gemma 3n's and 4's rotates queries or keys, others both in one call.
        self._turns_one = self._apply is not None and "k" not in inspect.signature(self._apply).parameters
        # StableLM's and Phi's attention hands it the first dimensions alone, others all of them.
        self._rotated_first: int | None = getattr(attention, "rotary_ndims", None)
        self._latent = has_latents(model)

        parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        rope_type = (parameters.get(FULL) or parameters).get("rope_type")
        is_unknown = (self._latent and not latent) or (self._embedding is not None and self._apply is None)
        if rope_type in BY_LENGTH or is_unknown:
            reason = "its attention applies RoPE in its own way"
            if rope_type in BY_LENGTH:
                reason = f"its rope_type is {rope_type}"
            raise UserError(
                f"positions in cached keys of {config.model_type} cannot be undone: {reason}; take a method that "
                "reads keys as they are, such as quest",
                field="model",
                code="model",
            )

    def turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [B, h, n, d] float32 without positions -> at positions [B or 1, n]."""
        if self._embedding is None:
            return heads
        cos, sin = self._angles(heads, positions)
        return self._rotated(heads, cos, sin)

    def undone(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [B, h, n, d] float32 at positions [B or 1, n] -> without."""
        if self._embedding is None:
            return heads
        cos, sin = self._angles(heads, positions)
        scale = cos**2 + sin**2  # of YaRN's attention factor
        return self._rotated(heads, cos / scale, -sin / scale)

    @property
    def rotates(self) -> bool:
        """Whether the layer has RoPE."""
        return self._embedding is not None

    def moved(self, heads: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Heads [B, h, n, d] float32 at positions `before` [B or 1, n] -> at positions `after`."""
        return self.turned(self.undone(heads, before), after)

    def mean_over_positions(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [B, h, n, d] float32 without positions -> the mean of each over positions [m]."""
        if self._embedding is None:
            return heads
        cos, sin = self._angles(heads, positions[None])
        return self._rotated(heads, cos.mean(dim=1, keepdim=True), sin.mean(dim=1, keepdim=True))

    def pair_norms(self, heads: Tensor) -> Tensor:
        """The norm of each dimension's RoPE pair, [B, h, n, d]; 0 for dimensions without RoPE."""
        if self._embedding is None:
            return torch.zeros_like(heads)
        cos, sin = self._angles(heads, torch.zeros(1, 1, dtype=torch.long))
        # By a quarter turn each dimension gets the other of its pair; dimensions without RoPE stay as they are.
        zeros = torch.zeros_like(cos)
        ones = torch.ones_like(sin)
        others_of_pairs = self._rotated(heads, zeros, ones)
        ramp = torch.arange(1.0, heads.shape[-1] + 1, device=heads.device)[None, None, None]
        has_rope = self._rotated(ramp, zeros, ones) != ramp
        return torch.hypot(heads, others_of_pairs) * has_rope

    def _angles(self, heads: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions [B or 1, n], on the device of `heads`, where the embedding need not be."""
        device = next((buffer.device for buffer in self._embedding.buffers()), heads.device)
        cos, sin = self._embedding(heads.new_empty(0, device=device), positions.to(device), *self._layer_kind)
        return cos.to(heads.device), sin.to(heads.device)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads rotated by cosines and sines [B or 1, n or 1, r]."""
        fixed_width = heads.shape[-1] - cos.shape[-1] if self._latent else 0
        fixed = heads[..., :fixed_width]
        to_rotate = heads[..., fixed_width:]
        without = to_rotate[..., :0]
        if self._rotated_first is not None:
            without = to_rotate[..., self._rotated_first :]
            to_rotate = to_rotate[..., : self._rotated_first]
        if self._turns_one:
            rotated = self._apply(to_rotate, cos, sin)
        else:
            rotated = self._apply(to_rotate, to_rotate[:, :0], cos, sin)[0]
        return torch.cat([fixed, rotated, without], dim=-1)


class QueryStatistics(NamedTuple):
    """Sums over queries whose positions, counted from the first column of a batch, are undone.

    Attributes:
        queries: [B] float32, how many there were.
        total: [B, H, d] float32: sum of the queries.
        squares: [B, H, d, d] float32: sum of the outer products of queries with themselves.
        norms: [B, H, d] float32: sum of the norms of the pairs that RoPE rotates, scaled as RoPE does.
    """

    queries: Tensor
    total: Tensor
    squares: Tensor
    norms: Tensor

    @property
    def mean(self) -> Tensor:
        """[B, H, d] float32."""
        return self.total / self._counted

    @property
    def covariance(self) -> Tensor:
        """[B, H, d, d] float32, divided by the number of queries."""
        mean = self.mean
        return self.squares / self._counted[..., None] - mean[..., None] * mean[..., None, :]

    @property
    def mean_norms(self) -> Tensor:
        """[B, H, d] float32."""
        return self.norms / self._counted

    @property
    def _counted(self) -> Tensor:
        return self.queries.clamp(min=1)[:, None, None]


def with_queries(
    before: QueryStatistics | None, rotary: Rotary, query: Tensor, first: int, mask: Tensor | None
) -> QueryStatistics:
    """The statistics `before`, None for none, with more queries [B, H, q, d], after RoPE, in them.

    `first` is the column of the first of them; `mask` [B, M] bool is False for padding, its last q columns those of the
    queries; None for none.
    """
    columns = torch.arange(first, first + query.shape[2], device=query.device)
    counted = (columns >= SINKS).expand(len(query), -1)
    if mask is not None:
        mask = mask.to(query.device)
        counted = (mask & (mask.long().cumsum(dim=1) > SINKS))[:, -query.shape[2] :]
    query = query.float()
    unrotated = rotary.undone(query, columns[None])
    weights = counted[:, None, :, None].float()
    weighted = unrotated * weights
    statistics = QueryStatistics(
        queries=counted.sum(dim=1).float(),
        total=weighted.sum(dim=2),
        squares=weighted.mT @ unrotated,
        norms=(rotary.pair_norms(query) * weights).sum(dim=2),
    )
    if before is None:
        return statistics
    return QueryStatistics(*map(torch.add, before, statistics))
