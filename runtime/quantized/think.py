"""ThinK: keys of the prompt without the channels that add least to the products with the last queries."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Positive, Share, UserError
from keepsight.models.decoder import has_latents
from keepsight.runtime import registry
from keepsight.runtime.attention import OwnAttention, Softmax, later
from keepsight.runtime.distance_bias import require_no_distance_bias
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.importance import ROWS_AT_ONCE, recorded_queries, top_mask
from keepsight.runtime.layer import Counts, KeptLayer, LayerEntries
from keepsight.runtime.quantized.kivi import PackedState, require_equal_heads, require_evicts_once, require_unpadded
from keepsight.runtime.state import Needs, State, with_full_layers


class ThinLayer(OwnAttention, KeptLayer):
    """A layer whose older entries have keys of fewer channels; the recent ones and what is appended have all.

    Args:
        thin_keys: [B, K, C, c], the older keys' channels.
        channels: [B, K, c] int64, which channels these are.
        old_values: [B, K, C, d], the older values.
        keys: [B, K, r, d], the recent keys.
        values: [B, K, r, d], the recent values.
        seen: Logical length.
    """

    def __init__(
        self, thin_keys: Tensor, channels: Tensor, old_values: Tensor, keys: Tensor, values: Tensor, seen: int
    ) -> None:
        super().__init__(keys, values, seen)
        self.thin_keys = thin_keys
        self.channels = channels
        self.old_values = old_values

    @property
    @override
    def longest(self) -> int:
        return self.thin_keys.shape[2] + self.keys.shape[2]

    @override
    def head_sizes(self) -> Counts:
        return np.full(self.keys.shape[:2], self.longest)

    @property
    @override
    def nbytes(self) -> int:
        return super().nbytes + self.thin_keys.nbytes + self.channels.nbytes + self.old_values.nbytes

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return KeptLayer.update(self, key_states, value_states)

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.longest + query_length, self.seen - self.longest

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """See `OwnAttention`; the new keys and values have been appended."""
        queries = query.shape[2]
        outputs = []
        for start in range(0, queries, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, queries)
            visible = self.keys.shape[2] - (queries - end)
            outputs.append(self._attend_block(query[:, :, start:end], visible, softmax))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attend_block(self, query: Tensor, visible: int, softmax: Softmax) -> Tensor:
        """[B, q, H, d]: the attention of queries [B, H, q, d], the last of the first `visible` recent entries."""
        batch, heads, queries, _ = query.shape
        keys = self.keys[:, :, :visible]
        values = self.values[:, :, :visible]
        kv_heads = keys.shape[1]
        grouped = query.reshape(batch, kv_heads, -1, query.shape[3])
        channels = self.channels[:, :, None].expand(-1, -1, grouped.shape[2], -1)
        old_logits = softmax.logits(grouped.gather(-1, channels), self.thin_keys)
        logits = torch.cat([old_logits, softmax.logits(grouped, keys)], dim=-1)
        logits = logits.view(batch, kv_heads, heads // kv_heads, queries, -1)
        logits[..., logits.shape[-1] - queries :].masked_fill_(
            later(queries, query.device), torch.finfo(torch.float32).min
        )
        weights = softmax.normalised(logits).flatten(2, 3).to(values.dtype)
        old = self.old_values.shape[2]
        output = weights[..., :old] @ self.old_values + weights[..., old:] @ values
        return output.view(batch, heads, queries, -1).transpose(1, 2).contiguous()

    @override
    def entries(self) -> LayerEntries:
        """All entries as observers see them, with zeros in the channels that were dropped."""
        old_keys = self.old_values.new_zeros(*self.thin_keys.shape[:3], self.keys.shape[3])
        old_keys.scatter_(-1, self.channels[:, :, None].expand_as(self.thin_keys), self.thin_keys)
        keys = torch.cat([old_keys, self.keys], dim=2)
        return LayerEntries(keys, torch.cat([self.old_values, self.values], dim=2), None)


@registry.method("think", label="ThinK")
@dataclass(frozen=True)
class ThinK(CacheMethod):
    """Drops half of the channels of the keys before the last 32, by the last 32 queries (ThinK, arXiv 2407.21018).

    A channel's score is the mean square of the queries times that of the keys, for each KV head. As in the paper recent
    keys, and those of the answer, keep all channels. The bytes are saved: kvpress sets the channels to zero instead,
    those of the recent keys too.

    Attributes:
        share: Share of the channels that is dropped.
        window: Number of last tokens whose queries decide, and whose keys stay whole.
        inner: Method that evicts first, the same number of entries in every KV head of a layer; none by default.
    """

    section = "quantize"
    cost = "scores after the prefill"
    share: Share = 0.5
    window: Positive = 32
    inner: Evict | None = None

    def __post_init__(self) -> None:
        if self.inner is None:
            return
        require_evicts_once(self.inner)
        if self.inner.rerotate:
            raise UserError(
                "inner: rerotate moves the keys, and not the queries that decide; set it to false",
                field="inner",
                code="conflict",
            )

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        require_no_distance_bias(model)
        if has_latents(model):
            raise UserError(
                f"{model.config.model_type} has layers of latent attention; channels can only be dropped where the "
                "cache holds keys of each head",
                field="model",
                code="model",
            )
        if self.inner is not None:
            self.inner.check_model(model)

    @override
    def needs(self) -> Needs:
        needs = Needs(window=self.window)
        return needs if self.inner is None else needs | self.inner.needs()

    @override
    def check(self, length: int, context: int) -> None:
        if self.inner is not None:
            self.inner.check(length, context)

    @override
    @torch.no_grad()
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        self.check_model(model)
        require_unpadded(mask)
        return super().start(model, input_ids, mask, **options)

    @override
    @torch.no_grad()
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        """A copy of a state with thin keys; nothing is recorded for observers from here on."""
        self.check_model(model)
        require_unpadded(state.tokens_mask)
        kept = state if self.inner is None else self.inner.compress_state(model, state)
        layers: list[Any] = []
        for layer, kept_layer in zip(state.layers, kept.layers, strict=True):
            queries = recorded_queries(layer, self.window).queries
            keys, values, real = kept_layer.entries()
            require_equal_heads(real)
            layers.append(self._thin(queries, keys, values, kept_layer.get_seq_length()))
        return kept.as_kind(PackedState, with_full_layers(kept.cache, layers))

    def _thin(self, queries: Tensor, keys: Tensor, values: Tensor, seen: int) -> ThinLayer:
        """A layer of keys and values [B, K, C, d] with the channels that queries [B, H, w, d] need most."""
        kv_heads, entries, width = keys.shape[1:]
        query_squares = queries.float().square().mean(dim=2).unflatten(1, (kv_heads, -1)).mean(dim=2)
        scores = query_squares * keys.float().square().mean(dim=2)  # [B, K, d]
        kept = max(width - int(width * self.share), 1)
        mask = top_mask(scores, kept)
        channels = torch.nonzero_static(mask, size=mask.shape[0] * kv_heads * kept)[:, -1].view(-1, kv_heads, kept)
        old = max(entries - self.window, 0)
        thin_keys = keys[:, :, :old].gather(-1, channels[:, :, None].expand(-1, -1, old, -1))
        return ThinLayer(
            thin_keys, channels, values[:, :, :old].clone(), keys[:, :, old:].clone(), values[:, :, old:].clone(), seen
        )
