"""Static decoding steps of a batch that rows join and leave, as a server's does.

Between two joins the batch is loaded into the buffers of a `StaticStep`, whose rows are a power of two. Unused rows
have no entries, and their results are dropped. A row that leaves becomes such a row, and nothing is copied. After a
join, or when the room of a stretch is used up, the entries are packed and loaded again. So a graph is captured once for
each number of rows, and for each size that entries round up to, not for each batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime.attention import StateCache
from keepsight.runtime.join import last_entries, offsets_of
from keepsight.runtime.layer import KeptLayer, RaggedLayer
from keepsight.runtime.state import State
from keepsight.runtime.static_step import StaticStep, borrowed_step, give_back, may_be_static

STRETCH = 64
"""Tokens of each row that are read before the entries are packed and loaded again; room for them is reserved."""


@dataclass
class _Stretch:
    """A batch in the buffers of a step.

    Attributes:
        step: The step.
        before: The state that was loaded, without its entries, which are in the step.
        layers: Its layers, likewise: those after it take over from them what does not depend on entries.
        slots: The rows of the step that answers still need, in the order of the batch.
        index: The same as a tensor.
        tokens: [B] int64 each: what every row of the step has read since.
    """

    step: StaticStep
    before: State
    layers: list[KeptLayer]
    slots: list[int]
    index: Tensor
    tokens: list[Tensor]


class StaticBatch:
    """Reads the tokens of a batch by static steps where it can; one thread uses it.

    Args:
        model: The base model.
        without_graph: Take steps without a graph, on any device; for tests.
    """

    def __init__(self, model: PreTrainedModel, without_graph: bool = False) -> None:
        self._model = model
        self._without_graph = without_graph
        self._stretch: _Stretch | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that hold the batch; 0 where it is in its state."""
        stretch = self._stretch  # another thread may ask
        return 0 if stretch is None else stretch.step.nbytes

    @property
    def is_full(self) -> bool:
        """Whether the room of the stretch is used up."""
        return self._stretch is not None and len(self._stretch.tokens) == STRETCH

    def takes(self, state: State) -> bool:
        """Whether steps after a state may be static, so that its entries may lie in the buffers of a step."""
        return self._stretch is not None or may_be_static(state, self._without_graph)

    def read(self, state: State, tokens: Tensor) -> State | None:
        """Read a token [B, 1] of each row of a state; None where steps of it cannot be static.

        The state after it has the logits of the rows, and neither entries nor tokens: `settled` returns these. It has
        to be called before reading where the room of the stretch `is_full`.
        """
        if self._stretch is None and not self._begin(state):
            return None
        stretch = self._stretch
        assert stretch is not None
        step_tokens = tokens.new_zeros(stretch.step.capacity.rows)
        step_tokens[stretch.index] = tokens[:, 0]
        stretch.tokens.append(step_tokens)
        logits = stretch.step.read(self._model, step_tokens)
        return replace(state, cache=StateCache(layers=[]), logits=logits[stretch.index])

    def last_entries(self, state: State, row: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """As `keepsight.runtime.join.last_entries`, of a state that `read` returned or of another."""
        stretch = self._stretch
        if stretch is None:
            return last_entries(state, row, count)
        slots = [stretch.slots[row]]
        appended = len(stretch.tokens)
        entries = []
        for number in range(len(stretch.layers)):
            keys, values, counts = stretch.step.packed(number, slots, appended)
            sizes = counts.ravel().tolist()
            row_keys = torch.stack([head_keys[-count:] for head_keys in keys.split(sizes)])
            row_values = torch.stack([head_values[-count:] for head_values in values.split(sizes)])
            entries.append((row_keys[None], row_values[None]))
        return entries

    def keep(self, state: State, rows: Sequence[int]) -> State | None:
        """The rows of a state that `read` returned; None where it did not, and entries have to be copied."""
        stretch = self._stretch
        if stretch is None:
            return None
        stretch.slots = [stretch.slots[row] for row in rows]
        stretch.index = torch.tensor(stretch.slots, device=stretch.index.device)
        return replace(state, logits=state.logits[[*rows]])

    def settled(self, state: State) -> State:
        """The state with its entries and tokens, after which the batch is in it alone; another state unchanged."""
        stretch = self._stretch
        if stretch is None:
            return state
        before = stretch.before
        index = stretch.index
        count = len(stretch.tokens)
        tokens = torch.cat([before.tokens[index], torch.stack(stretch.tokens, dim=1)[index]], dim=1)
        lengths = before.lengths[index] + count
        width = int(lengths.max())
        layers: list[Any] = []
        for number, layer in enumerate(stretch.layers):
            settled = RaggedLayer(*stretch.step.packed(number, stretch.slots, count), width)
            settled.take_over_from(layer)
            layers.append(settled)
        after = replace(
            before,
            cache=StateCache(layers=layers),
            logits=state.logits,
            tokens=tokens[:, tokens.shape[1] - width :],
            lengths=lengths,
            rope_offset=offsets_of(before.rope_offset, index),
            batch_offset=offsets_of(before.batch_offset, index),
            padded=bool((lengths < width).any()),
        )
        self.drop()
        return after

    def drop(self) -> None:
        """Forget the batch; its step may serve others."""
        if self._stretch is not None and not self._without_graph:
            give_back(self._model, self._stretch.step)
        self._stretch = None

    def _begin(self, state: State) -> bool:
        rows = len(state.lengths)
        step_rows = 1 << (rows - 1).bit_length()
        step = borrowed_step(self._model, state, STRETCH, step_rows, without_graph=self._without_graph)
        if step is None:
            return False
        layers = []
        for layer in state.layers:
            without_entries = KeptLayer()
            without_entries.take_over_from(layer)
            layers.append(without_entries)
        slots = list(range(rows))
        index = torch.arange(rows, device=state.logits.device)
        self._stretch = _Stretch(step, replace(state, cache=StateCache(layers=[])), layers, slots, index, [])
        return True
