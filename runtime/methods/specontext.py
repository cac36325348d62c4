"""SpeContext (arXiv 2512.00722): before every step a retrieval head selects the entries that the target reads."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.files import read_bytes
from keepsight.models.decoder import has_latents, require_one_device
from keepsight.models.retrieval_head import NONE, RetrievalHead, of_the_token_before
from keepsight.runtime.attention import Reader
from keepsight.runtime.images import Images
from keepsight.runtime.retrieval.memory_plan import plan_for
from keepsight.runtime.retrieval.placement import Placement
from keepsight.runtime.retrieval.reader import RetrievalCache, RetrievalReader, RetrievalState, RetrievalTurnReader
from keepsight.runtime.retrieval.selector import HeadSelector
from keepsight.runtime.sparse_read.cache import MakeLayer, SelectedLayer, selected_layers
from keepsight.runtime.sparse_read.method import SparseRead
from keepsight.runtime.sparse_read.mla import layers_of
from keepsight.runtime.sparse_read.top_k import StepBudget
from keepsight.runtime.state import Needs, State, positions_of, prefill, with_full_layers

_BLOCK = 4096
"""Prompt tokens whose features are concatenated at a time."""


@dataclass(frozen=True)
class SpeContext(SparseRead):
    """Reads what a retrieval head selects before the target runs: the same entries in all layers of a group.

    SpeContext (arXiv 2512.00722), section 4.3, where all layers are one group.

    Where the longest prompt of a batch and its answer, which grows, exceed what the head was trained with, YaRN extends
    it to twice that length, four times, and so on.

    Attributes:
        head: The retrieval head; it is moved to the target's device.
        sinks: Number of first entries that are always read; none in the paper.
        window: Number of last entries that are always read; none in the paper.
        offload: Number of last layers whose entries are in CPU memory from the start.
        memory_limit: Device memory for weights and entries, such as 24GiB or a number of bytes: before they would
            exceed it, layers move to the CPU one at a time. None for no limit. It holds from the first decoding step
            on: the prefill has all layers on the device.
    """

    head: RetrievalHead = field(repr=False)
    sinks: int = 0
    window: int = 0
    offload: int = 0
    memory_limit: int | str | None = None
    uses_retrieval_head = True

    @override
    def __post_init__(self) -> None:
        require_whole("SpeContext", sinks=self.sinks, window=self.window, offload=self.offload)
        if self.memory_limit is not None:
            read_bytes(str(self.memory_limit))
        super().__post_init__()

    @classmethod
    def from_pretrained(
        cls, head: str | Path, budget: int | float, revision: str | None = None, **options: Any
    ) -> "SpeContext":
        """The method with a retrieval head (a folder, a Hub id or `shipped:NAME`); `options` are other fields.

        Raises:
            UserError: the head cannot be had, is corrupt, or an option is out of range.
        """
        return cls(budget, RetrievalHead.from_pretrained(head, revision=revision), **options)

    @override
    def least(self) -> tuple[int, str]:
        return self.sinks + self.window + 1, "sinks + window + one entry to choose"

    @override
    def needs(self) -> Needs:
        if self.head.config.features == NONE:
            return Needs()
        if self.head.config.feature_layers is None:
            raise UserError("SpeContext: this retrieval head does not name the layers of its features; call `start`")
        return _needs(self.head.config.feature_layers)

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return RetrievalReader(model)

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return RetrievalTurnReader(model)

    @override
    def start(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        images: Images | None = None,
    ) -> State:
        self._require(model)
        self._placement(model, *input_ids.shape).on_cpu(*input_ids.shape)  # what can never fit ends here
        needs = _needs(self.head.layers_of(model))
        return self.compress(model, prefill(model, input_ids, mask, chunk=chunk, needs=needs))

    @override
    @torch.no_grad()
    def compress(self, model: PreTrainedModel, state: State) -> State:
        self._require(model)
        selected = selected_layers(state, layers_of(model, state, self.layers_for(state)))
        layers = with_full_layers(state.cache, selected).layers
        placement = self._placement(model, *state.tokens.shape)
        placement.place(layers, state.tokens.shape[1])
        cache = RetrievalCache(layers, self._selector(model, state), placement)
        return state.as_kind(RetrievalState, cache)

    @override
    def layers_for(self, state: State) -> MakeLayer:
        return lambda index, *entries: SelectedLayer(*entries)

    def _require(self, model: PreTrainedModel) -> None:
        self.head.check_model(model)
        if self.offload or self.memory_limit is not None:
            require_one_device(model)
        if self.offload and has_latents(model):
            raise UserError(
                f"SpeContext: offload {self.offload} does not apply to {model.config.model_type}: all heads share its "
                "latents, which stay on the device; give offload 0"
            )

    def _placement(self, model: PreTrainedModel, rows: int, length: int) -> Placement:
        budget, plan = self.budget_for(length), None
        if self.memory_limit is not None:
            plan = plan_for(
                model,
                limit=read_bytes(str(self.memory_limit)),
                requests=rows,
                budget=budget,
                head=sum(each.nbytes for each in self.head.parameters()),
                head_keys=self.head.key_bytes,
                groups=self.head.config.groups,
            )
        return Placement(budget, model.device, self.offload, plan)

    def _selector(self, model: PreTrainedModel, state: State) -> HeadSelector:
        length, mask = state.tokens.shape[1], state.tokens_mask
        head = self.head.to(model.device).reaching(length)
        layers = head.layers_of(model)
        if missing := sorted(set(layers) - set(state.needs.features)):
            raise UserError(
                f"SpeContext: the prefill did not record layer {missing[0]}; give it needs=method.needs(), or call "
                "method.start"
            )
        return HeadSelector(
            head,
            layers,
            torch.cat([*_prompt_keys(head, layers, model, state)], dim=2),
            state.features_of(layers, slice(-1, None)) if layers else None,
            None if mask is None else length - state.lengths,
            StepBudget(tuple(self.budgets(state)), self.sinks, self.window),
        )


def _needs(layers: tuple[int, ...]) -> Needs:
    return Needs(features=tuple(sorted(layers)))


def _prompt_keys(
    head: RetrievalHead, layers: tuple[int, ...], model: PreTrainedModel, state: State
) -> Iterator[Tensor]:
    """The head's keys [B, K, n, d] of everything read, block after block."""
    embed, mask, length = model.get_input_embeddings(), state.tokens_mask, state.tokens.shape[1]
    positions = positions_of(mask, length, state.tokens.device)
    for start in range(0, length, _BLOCK):
        block = slice(start, start + _BLOCK)
        features = None
        if layers:
            before = slice(max(start - 1, 0), start + _BLOCK)
            recorded = state.features_of(layers, before)
            features = of_the_token_before(recorded, None if mask is None else mask[:, before])
            features = features[:, start - before.start :]
        inputs = head.inputs(embed(state.tokens[:, block]), features)
        yield head.keys(inputs, positions[:, block])
