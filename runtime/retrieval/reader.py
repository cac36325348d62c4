"""Reading with a retrieval head: select, announce to all layers, run the model, keep the features for the next step.

An interrupted step leaves the cache unchanged.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.attention import run
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.retrieval.placement import Placement
from keepsight.runtime.retrieval.selector import HeadSelector
from keepsight.runtime.sparse_read.cache import SelectedLayer, SelectedState, Selection
from keepsight.runtime.state import State, full_layers, share, with_full_layers
from keepsight.runtime.token_reader import TokenReader
from keepsight.runtime.turn import TurnReader


class RetrievalCache(Cache):
    """Layers that read what is announced to them, and the selector that announces it.

    Args:
        layers: One for each layer of the target.
        selector: Selector that has seen as many tokens as the layers.
        placement: Decides which layers' entries are on the CPU.
    """

    def __init__(self, layers: list[Any], selector: HeadSelector, placement: Placement) -> None:
        super().__init__(layers=layers)
        self.selector, self.placement = selector, placement

    @property
    def selected_layers(self) -> list[SelectedLayer]:
        """The layers with full attention."""
        return [layer for layer in self.layers if isinstance(layer, SelectedLayer)]

    def by_layer(self, chosen: Selection) -> list[tuple[SelectedLayer, Selection]]:
        """Each layer with full attention, and what the retrieval head selected for it, on its device."""
        layers, config = self.selected_layers, self.selector.head.config

        @functools.cache
        def part(group: int, device: torch.device) -> Selection:
            return chosen.part(group, config.groups).on(device)

        groups = [config.group_of(place, len(layers)) for place in range(len(layers))]
        return [(layer, part(group, layer.keys.device)) for layer, group in zip(layers, groups, strict=True)]

    def announce(self, chosen: Selection) -> None:
        """Tell every layer what the next step reads."""
        for layer, part in self.by_layer(chosen):
            layer.prepare(part)

    def forget_after(self, length: int) -> None:
        """Drop what any layer holds of tokens beyond the first `length`."""
        self.selector.keys.crop(length)
        for layer in self.selected_layers:
            if layer.seen > length:
                layer.crop(length - layer.seen)


@dataclass(frozen=True)
class RetrievalState(SelectedState):
    """A state whose entries a retrieval head selects; its cache is a `RetrievalCache`."""

    @property
    @override
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    @override
    def kv_bytes(self) -> int:
        """Bytes on the device: keys and values there, and the retrieval head's keys."""
        return super().kv_bytes + retrieval_cache(self.cache).selector.bytes

    @override
    def counts(self) -> Tensor:
        layers = retrieval_cache(self.cache).selected_layers
        return self.lengths[:, None].expand(len(layers), -1, layers[0].keys.shape[1])

    @override
    def copy(self) -> State:
        own = retrieval_cache(self.cache)
        return replace(self, cache=RetrievalCache(list(share(own).layers), own.selector.share(), own.placement))


def retrieval_cache(cache: Cache) -> RetrievalCache:
    """The cache, if it is one.

    Raises:
        UserError: it is another one.
    """
    if not isinstance(cache, RetrievalCache):
        raise UserError("a retrieval head's reader reads states of its own method; give the state of method.start")
    return cache


class RetrievalTurnReader:
    """A model that reads a further turn after a `RetrievalState`; the retrieval head reads it too.

    Args:
        model: The target.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.config = model, model.config
        self._reader = TurnReader(model)

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, past_key_values: Cache, **options: Any) -> Any:
        """Append tokens to a `RetrievalCache`: see the model's own call."""
        cache = retrieval_cache(past_key_values)
        selector = cache.selector
        cache.placement.place(cache.layers, cache.get_seq_length() + input_ids.shape[1])
        with RecordFeatures(self._model, selector.layers) as recorded:
            output = self._reader(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, **options)
        features = torch.cat(recorded.outputs(), dim=-1) if selector.layers else None
        selector.read(self._model.get_input_embeddings()(input_ids), features, position_ids)
        return output


class RetrievalReader(TokenReader):
    """A model that reads each token of a `RetrievalState` after the retrieval head has selected the entries."""

    @override
    def step(self, token: Tensor, position: Tensor, attention_mask: Tensor | None, cache: Cache) -> Tensor:
        cache = retrieval_cache(cache)
        before, selector = cache.get_seq_length(), cache.selector
        cache.placement.place(cache.layers, before + 1)
        layers = with_full_layers(cache, full_layers(cache)).layers
        try:
            chosen = selector.select(self._model.get_input_embeddings()(token), position)
            cache.announce(chosen)
            with RecordFeatures(self._model, selector.layers) as recorded:
                output = run(
                    self._model,
                    cache,
                    input_ids=token,
                    attention_mask=attention_mask,
                    position_ids=position,
                    logits_to_keep=1,
                )
            if selector.layers:
                selector.features = torch.cat(recorded.outputs(), dim=-1)
        except BaseException:
            cache.layers[:] = layers
            cache.forget_after(before)
            raise
        return output.logits
