"""SpeContext (arXiv 2512.00722): a retrieval head selects the entries of all layers before each step."""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import UserError, Whole
from keepsight.files import read_bytes
from keepsight.models.decoder import has_latents, require_one_device
from keepsight.models.retrieval_head import NONE, RetrievalHead
from keepsight.runtime import registry
from keepsight.runtime.attention import Reader, Softmax, StateCache, run
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.readers import TokenReader, TurnReader
from keepsight.runtime.retrieval.elastic import Placement
from keepsight.runtime.retrieval.memory_plan import plan_for
from keepsight.runtime.sparse_read.cache import SelectedLayer, SelectedState, Selection, SparseRead, entries_of
from keepsight.runtime.sparse_read.selection import TopAttention
from keepsight.runtime.state import Needs, State, full_layers, positions_of, prefill, share, with_full_layers


class HeadSelector:
    """Selects for all layers before the model runs, by the attention of a retrieval head over its own keys.

    The head covers as many positions as there are keys, and is extended as they grow. `layers` are the base model's
    layers whose outputs are its features; empty when it reads embeddings alone. `padding` [B] int64 counts tokens on
    the left.
    """

    selecting_method: ClassVar[str] = "select"
    """As of `LayerSelector`."""

    def __init__(
        self, head: RetrievalHead, layers: tuple[int, ...], padding: Tensor | None, top_attention: TopAttention
    ) -> None:
        self.head = head
        self.layers = layers
        self.padding = padding
        self.top_attention = top_attention
        self.features: Tensor | None = None  # [B, 1, w] of the last token; None before the first, or without layers
        self._layer = KeptLayer()  # of keys alone

    @property
    def keys(self) -> Tensor:
        """[B, K, C, d] of all tokens so far; K counts the KV heads of all groups."""
        return self._layer.keys

    def select(self, embeddings: Tensor, positions: Tensor) -> Selection:
        """Select the entries that the base model reads for a token, group after group, and append the token's key.

        `embeddings` [B, 1, hidden] are the base model's, `positions` [B or 1, 1] int64.
        """
        self._reach(self._layer.seen + 1)
        query, key = self.head.project(embeddings, self.features, positions)
        self._layer.update(key, key[..., :0])
        return self.top_attention.select(query, Softmax(self.head.scaling), self.keys, self.padding)

    def read(self, embeddings: Tensor, features: Tensor | None, positions: Tensor) -> None:
        """Append the keys of tokens that the base model has read without it.

        `embeddings` [B, q, hidden] and `features` [B, q, w] are the base model's of these tokens; features are zeros
        for padding, and None when the head reads none.
        """
        self._reach(self._layer.seen + embeddings.shape[1])
        earlier_features = None  # of the token before each
        if features is not None:
            last = self.features
            if last is None:
                last = torch.zeros_like(features[:, :1])
            earlier_features = torch.cat([last, features[:, :-1]], dim=1)
            self.features = features[:, -1:]
        keys = self.head.keys(self.head.inputs(embeddings, earlier_features), positions)
        self._layer.update(keys, keys[..., :0])

    def crop(self, length: int) -> None:
        """Keep the keys of the first `length` tokens."""
        tokens_to_remove = self._layer.seen - length
        if tokens_to_remove > 0:
            self._layer.crop(-tokens_to_remove)

    def _reach(self, length: int) -> None:
        """Extend the head to `length` positions, and rotate its keys to the new RoPE angles."""
        head = self.head.reaching(length)
        if head is self.head:
            return
        positions = torch.arange(self._layer.seen, device=self.keys.device)[None]
        if self.padding is not None:
            positions = (positions - self.padding[:, None]).clamp(min=0)
        keys = head.turned(self.keys, positions, self.head)
        self._layer = KeptLayer(keys, keys[..., :0], self._layer.seen)
        self.head = head

    def share(self) -> "HeadSelector":
        """An independent copy."""
        twin = copy.copy(self)
        twin._layer = self._layer.share()
        return twin


class RetrievalCache(StateCache):
    """The layers of the base model, the selector of the entries that they read, and their placement."""

    def __init__(self, layers: list[Any], selector: HeadSelector, placement: Placement) -> None:
        super().__init__(layers=layers)
        self.selector = selector
        self.placement = placement

    @property
    def selected_layers(self) -> list[SelectedLayer]:
        """The layers with full attention."""
        return [layer for layer in self.layers if isinstance(layer, SelectedLayer)]

    def by_layer(self, selection: Selection) -> list[tuple[SelectedLayer, Selection]]:
        """Each layer with full attention, and what the retrieval head selected for it, on its device."""
        config = self.selector.head.config
        layers = self.selected_layers
        # The layers of a group on one device get one object, by which they know that they share a change of slots.
        group_selections: dict[tuple[int, torch.device], Selection] = {}
        layer_selections = []
        for index, layer in enumerate(layers):
            group = config.group_of(index, len(layers))
            device = layer.keys.device
            if (group, device) not in group_selections:
                group_selections[group, device] = selection.of_group(group, config.groups, device)
            layer_selections.append((layer, group_selections[group, device]))
        return layer_selections

    def keep_first(self, length: int) -> None:
        """Drop all entries of tokens beyond the first `length`."""
        self.selector.crop(length)
        for layer in self.selected_layers:
            if layer.seen > length:
                layer.crop(length - layer.seen)


@dataclass(frozen=True, repr=False)
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
        return super().kv_bytes + retrieval_cache(self.cache).selector.keys.nbytes

    @override
    def counts(self) -> Tensor:
        layers = retrieval_cache(self.cache).selected_layers
        return self.lengths[:, None].expand(len(layers), -1, layers[0].keys.shape[1])

    @override
    def copy(self) -> State:
        cache = retrieval_cache(self.cache)
        layers = list(share(cache).layers)
        return replace(self, cache=RetrievalCache(layers, cache.selector.share(), cache.placement))


def retrieval_cache(cache: Cache) -> RetrievalCache:
    """The cache as a `RetrievalCache`; a `UserError` if it is another kind."""
    if not isinstance(cache, RetrievalCache):
        raise UserError(
            "a retrieval head's reader reads states of its own method; give the state of method.start",
            field="state",
            code="state",
        )
    return cache


class RetrievalTurnReader:
    """A model that reads a further turn after a `RetrievalState`; the retrieval head reads it too."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.config = model.config
        self._reader = TurnReader(model)

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, past_key_values: Cache, **options: Any) -> Any:
        """Append tokens to a `RetrievalCache`: see the model's own call."""
        cache = retrieval_cache(past_key_values)
        selector = cache.selector
        cache.placement.move_layers(cache.layers, cache.get_seq_length() + input_ids.shape[1])
        with RecordFeatures(self._model, selector.layers) as recorded:
            output = self._reader(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, **options)

        features = None
        if selector.layers:
            features = torch.cat(recorded.outputs(), dim=-1)
        embeddings = self._model.get_input_embeddings()(input_ids)
        selector.read(embeddings, features, position_ids)
        return output


class RetrievalReader(TokenReader):
    """A model that reads each token of a `RetrievalState` after the retrieval head has selected the entries."""

    @override
    def step(self, token: Tensor, position: Tensor, attention_mask: Tensor | None, cache: Cache) -> Tensor:
        cache = retrieval_cache(cache)
        selector = cache.selector
        length = cache.get_seq_length()
        cache.placement.move_layers(cache.layers, length + 1)
        layers = with_full_layers(cache, full_layers(cache)).layers
        try:
            embeddings = self._model.get_input_embeddings()(token)
            selection = selector.select(embeddings, position)
            for layer, layer_selection in cache.by_layer(selection):
                layer.prepare(layer_selection)
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
            cache.keep_first(length)
            raise
        return output.logits


_BLOCK = 4096
"""Bounds the memory of a prompt's concatenated features, in tokens."""


@registry.method("specontext", colour="#332288", marker="h")
@dataclass(frozen=True)
class SpeContext(SparseRead):
    """Reads entries that a retrieval head selects before the base model runs, the same in all layers of a group.

    SpeContext (arXiv 2512.00722), section 4.3, where all layers are one group.

    Where a prompt and its growing answer exceed the head's training length, YaRN extends the head to twice that length,
    four times, and so on.

    Attributes:
        head: The retrieval head; it is moved to the model's device.
        sinks: Number of first entries that are always read; none in the paper.
        window: Number of last entries that are always read; none in the paper.
        heads: `each` KV head reads entries of its own; `same`: all heads of a layer read the same (section 4.2's
            batch-level retrieval).
        offload: Number of last layers whose entries are in CPU memory from the start.
        loading: How such a layer gets the selected entries: `elastic` loads only what the previous step did not
            read, while earlier layers compute; `whole` loads all of them when the layer reads them.
        memory_limit: Device memory for weights and entries, such as 24GiB or a number of bytes: before they would
            exceed it, layers move to the CPU one at a time. None for no limit. It holds from the first decoding step
            on: the prefill has all layers on the device.
    """

    head: RetrievalHead = field(repr=False)
    sinks: Whole = 0
    window: Whole = 0
    heads: Annotated[str, Literal["each", "same"]] = "each"
    offload: Whole = 0
    loading: Annotated[str, Literal["elastic", "whole"]] = "elastic"
    memory_limit: int | str | None = None
    uses_retrieval_head = True

    @override
    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            read_bytes(str(self.memory_limit))
        super().__post_init__()

    @classmethod
    def from_pretrained(
        cls, head: str | Path, budget: int | float, revision: str | None = None, **options: Any
    ) -> "SpeContext":
        """The method with a retrieval head (a folder, a Hub id or `shipped:NAME`); `options` are other fields.

        Raises:
            UserError: the head cannot be loaded, is corrupt, or an option is out of range.
        """
        return cls(budget, RetrievalHead.from_pretrained(head, revision=revision), **options)

    @property
    @override
    def modules(self) -> frozenset[str]:
        return super().modules | {"retrieval"}

    @override
    def smallest_budget(self) -> tuple[int, str]:
        return self.sinks + self.window + 1, "sinks + window + one entry to choose"

    @override
    def needs(self) -> Needs:
        if self.head.config.features == NONE:
            return Needs()
        if self.head.config.feature_layers is None:
            raise UserError(
                "SpeContext: this retrieval head does not name the layers of its features; call `start`",
                field="retrieval",
                code="missing",
            )
        return _needs(self.head.config.feature_layers)

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return RetrievalReader(model)

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return RetrievalTurnReader(model)

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        self.check_model(model)
        rows, length = input_ids.shape
        self._placement(model, rows, length).on_cpu(rows, length)  # refuses what can never fit
        needs = _needs(self.head.layers_of(model))
        return self.compress_state(model, prefill(model, input_ids, mask, needs=needs, **options))

    @override
    @torch.no_grad()
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        self.check_model(model)
        layers = with_full_layers(state.cache, self.layers_for(model, state)).layers
        rows, length = state.tokens.shape
        placement = self._placement(model, rows, length)
        placement.move_layers(layers, length)
        cache = RetrievalCache(layers, self._selector(model, state), placement)
        return state.as_kind(RetrievalState, cache)

    @override
    def layers_for(self, model: PreTrainedModel, state: State) -> list[SelectedLayer]:
        layers = []
        for (keys, values, seen, padding), prefilled in zip(entries_of(state), state.layers, strict=True):
            layer = SelectedLayer(keys, values, seen, padding)
            layer.expansion = prefilled.expansion
            layers.append(layer)
        return layers

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        self.head.check_model(model)
        if self.offload or self.memory_limit is not None:
            require_one_device(model)
        if self.offload and has_latents(model):
            raise UserError(
                f"SpeContext: offload {self.offload} does not apply to {model.config.model_type}: all heads share its "
                "latents, which stay on the device; give offload 0",
                field="offload",
                code="model",
            )

    def _placement(self, model: PreTrainedModel, rows: int, length: int) -> Placement:
        budget = self.budget_for(length)
        plan = None
        if self.memory_limit is not None:
            plan = plan_for(
                model,
                limit=read_bytes(str(self.memory_limit)),
                requests=rows,
                budget=budget,
                head=sum(parameter.nbytes for parameter in self.head.parameters()),
                head_keys=self.head.key_bytes,
                groups=self.head.config.groups,
            )
        return Placement(budget, model.device, self.offload, plan, self.loading == "elastic")

    def _selector(self, model: PreTrainedModel, state: State) -> HeadSelector:
        length = state.tokens.shape[1]
        mask = state.tokens_mask
        head = self.head.to(model.device).reaching(length)
        layers = head.layers_of(model)
        missing = sorted(set(layers) - set(state.needs.features))
        if missing:
            raise UserError(
                f"SpeContext: the prefill did not record layer {missing[0]}; give it needs=method.needs(), or call "
                "method.start",
                field="state",
                code="state",
            )

        padding = None if mask is None else length - state.lengths
        shared = head.config.groups if self.heads == "same" else 0
        top_attention = TopAttention(tuple(self.budgets(state)), self.sinks, self.window, shared)
        selector = HeadSelector(head, layers, padding, top_attention)
        embed = model.get_input_embeddings()
        positions = positions_of(mask, length, state.tokens.device)
        for start in range(0, length, _BLOCK):
            block = slice(start, start + _BLOCK)
            features = None
            if layers:
                features = state.features_of(layers, block)
                if mask is not None:
                    features = features.masked_fill(~mask[:, block, None], 0)
            selector.read(embed(state.tokens[:, block]), features, positions[:, block])
        return selector


def _needs(layers: tuple[int, ...]) -> Needs:
    return Needs(features=tuple(sorted(layers)))
