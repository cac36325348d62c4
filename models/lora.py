"""LoRA beside a model: low-rank updates of its linear modules, applied while attached and nowhere else.

PEFT replaces the modules that it adapts, and with them the names in the model's `state_dict`, and it shares one switch
with the owner's own adapters. Here the updates are forward hooks, so that a model, quantised or adapted by its owner,
is as it was once they are removed. Names and shapes of the saved tensors are PEFT's, which loads them.
"""

import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import RECURRENT, decoder_layers, last_scored_layer, layer_kinds

PREFIX = "base_model.model."  # what PEFT puts before the names of a saved adapter's tensors

_LEFT_OUT = re.compile(r"(^|\.)(experts|router|gate|shared_expert_gate|kv_b_proj)(\.|$)")
"""Experts and their routers; the expansion of latents, which is applied to the cache and not to new tokens."""
_QUERY_OR_KEY = re.compile(r"(^|\.)(qkv|q|kv|k)_[^.]*$")
"""Projections of queries or keys."""
_QUERIES_AND_VALUES = r"(qkv|q|kv|v)_[^.]*"
"""Pattern of the query and value projections; fused ones (`qkv`, `kv`) contain the keys' too."""

_SAME_INPUT = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Modules of one parent that read the same input."""

_ATTACHED: ContextVar[tuple[object, ...]] = ContextVar("attached", default=())
"""Keys of the hooks attached in this thread, or asyncio task."""


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within the block, forward hooks on modules, called in this thread or asyncio task alone."""
    key = object()
    registered = []
    token = _ATTACHED.set((*_ATTACHED.get(), key))
    try:
        for module, hook in hooks:
            registered.append(module.register_forward_hook(_InContext(hook, key)))
        yield
    finally:
        _ATTACHED.reset(token)
        for handle in registered:
            handle.remove()


class _InContext:
    """A hook that acts only where its key is attached. A deep copy of the module gets a hook that does nothing."""

    def __init__(self, hook: Callable[..., Any], key: object) -> None:
        self._hook = hook
        self._key = key

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        if self._key not in _ATTACHED.get():
            return None
        return self._hook(module, inputs, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing


class Lora(nn.Module):
    """Low-rank updates of linear modules, by their names in the model, each scaled by alpha / rank."""

    def __init__(self, linears: Mapping[str, nn.Module], rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.names = tuple(linears)
        self._linears = tuple(linears.values())
        self.updates = nn.ModuleList()
        for linear in self._linears:
            self.updates.append(Update(linear, rank, alpha / rank, dropout))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block, the linear modules give their output plus the update."""
        hooks = []
        for linear, update in zip(self._linears, self.updates, strict=True):
            hooks.append((linear, partial(_add_update, update)))
        with hooked(hooks):
            yield

    def parts(self) -> Iterator[tuple[str, nn.Module, Any]]:
        """Each module's name, the module, and its update."""
        yield from zip(self.names, self._linears, self.updates, strict=True)

    def tensors(self) -> dict[str, nn.Parameter]:
        """Its parameters under the names that PEFT saves them with."""
        tensors: dict[str, nn.Parameter] = {}
        for name, _, update in self.parts():
            saved_name = f"{PREFIX}{name.removeprefix(PREFIX)}"
            tensors[f"{saved_name}.lora_A.weight"] = update.lora_A
            tensors[f"{saved_name}.lora_B.weight"] = update.lora_B
        return tensors


class Update(nn.Module):
    """The update of one linear module, in float32, begun as PEFT does: A random, B zero."""

    def __init__(self, linear: Any, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        device = linear.weight.device if linear.weight.device.type != "meta" else torch.device("cpu")
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=torch.float32, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = scaling
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        """The term to add to the output: inputs [..., in] -> [..., out] float32."""
        inputs = functional.dropout(inputs.to(self.lora_A.dtype), self.dropout, self.training)
        low = functional.linear(inputs, self.lora_A.to(inputs.device)) * self.scaling
        return functional.linear(low, self.lora_B.to(inputs.device))


def _add_update(
    update: Callable[[Tensor], Tensor], module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    return (output + update(inputs[0])).to(output.dtype)


class LastRows(NamedTuple):
    """The last `tokens` of each row of a batch, which are all that an adapter changes."""

    batch: int
    tokens: int


class FoldedLora:
    """A trained LoRA for inference: in a model's dtype, scaling folded into B, one A for modules with the same input.

    A copy without gradients and dropout.
    """

    def __init__(self, lora: Lora, dtype: torch.dtype) -> None:
        self._updates: list[tuple[nn.Module, _FoldedUpdate]] = []
        self._inputs: list[_SharedInput] = []
        groups = defaultdict(list)
        for name, linear, update in lora.parts():
            groups[_input_key(name)].append((linear, update))
        for group in groups.values():
            down = torch.cat([update.lora_A.detach().to(dtype) for _, update in group])
            shared_input = _SharedInput(down, len(group))
            self._inputs.append(shared_input)
            for number, (linear, update) in enumerate(group):
                up = (update.lora_B.detach() * update.scaling).to(dtype)
                self._updates.append((linear, _FoldedUpdate(shared_input, number, up.t())))

    @contextmanager
    def attached(self, rows: LastRows | None = None) -> Iterator[None]:
        """Within the block, the linear modules give their output plus the update, of all tokens or the last ones."""
        hooks = [(linear, partial(update, rows)) for linear, update in self._updates]
        try:
            with hooked(hooks):
                yield
        finally:
            for shared_input in self._inputs:
                shared_input.release()


def _input_key(name: str) -> tuple[str, int | str]:
    """A key that is equal for the names of modules that read the same input."""
    parent, _, last_part = name.rpartition(".")
    for number, siblings in enumerate(_SAME_INPUT):
        if last_part in siblings:
            return parent, number
    return parent, name


class _SharedInput(threading.local):
    """The input that one or more modules read, multiplied by all their A at once; each thread's pass has its own."""

    inputs: Tensor | None = None
    low_rank_parts: tuple[Tensor, ...] = ()
    waiting = 0

    def __init__(self, down: Tensor, readers: int) -> None:  # called again in each thread
        self._down = down
        self._readers = readers

    def low_rank(self, reader: int, inputs: Tensor, rows: LastRows | None) -> Tensor:
        """Inputs [..., in] times the A of a reading module: [m, r], m the number of tokens, or of the last ones.

        The inputs are released once all modules have read them: those of all layers would outweigh a layer's scores.
        """
        if inputs is not self.inputs:
            read_inputs = inputs if rows is None else _by_row(inputs, rows)[:, -rows.tokens :]
            low_rank = functional.linear(read_inputs, self._down.to(inputs)).flatten(0, -2)
            self.inputs = inputs
            self.low_rank_parts = low_rank.chunk(self._readers, dim=-1)
            self.waiting = self._readers
        part = self.low_rank_parts[reader]
        self.waiting -= 1
        if self.waiting == 0:
            self.release()
        return part

    def release(self) -> None:
        """Release the input."""
        self.inputs = None
        self.low_rank_parts = ()
        self.waiting = 0


class _FoldedUpdate:
    """The forward hook that adds the update of one linear module to its output, in place.

    Args:
        shared_input: The module's input times A.
        reader: The module's number among those with the same input.
        up: [r, out], B transposed and scaled.
    """

    def __init__(self, shared_input: _SharedInput, reader: int, up: Tensor) -> None:
        self._shared_input = shared_input
        self._reader = reader
        self._up = up

    def __call__(self, rows: LastRows | None, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        low_rank = self._shared_input.low_rank(self._reader, inputs[0], rows).to(output.dtype)
        up = self._up.to(output)
        if rows is None:
            return output.flatten(0, -2).addmm_(low_rank, up).view(output.shape)
        last_rows = _by_row(output, rows)[:, -rows.tokens :]
        last_rows += (low_rank @ up).view(last_rows.shape)
        return output


def _by_row(tokens: Tensor, rows: LastRows) -> Tensor:
    """A view [B, q, d] of what a module read or returned: experts and their like flatten a batch to [B x q, d]."""
    return tokens if tokens.dim() == 3 else tokens.unflatten(0, (rows.batch, -1))


def nothing(*_: object) -> None:
    """A hook that changes nothing."""


def lora_targets(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear modules that importance depends on, by name.

    Importance is computed from the queries and keys of layers with full attention. In the last of them only the
    projections of queries and keys count, and nothing after it. Experts are left out, and layers with a recurrent
    state.
    """
    stack = decoder_layers(model)
    kinds = layer_kinds(model.config)
    stack_name = next(name for name, module in model.named_modules() if module is stack)
    last_layer = last_scored_layer(model.config)
    targets = {}
    for index, layer in enumerate(stack[: last_layer + 1]):
        if kinds[index] in RECURRENT:
            continue
        recurrent = [name for name, module in layer.named_modules() if hasattr(module, "conv1d")]
        for name, linear in linears(layer):
            if any(name.startswith(f"{mixer}.") for mixer in recurrent):
                continue
            is_scored = index < last_layer or _QUERY_OR_KEY.search(name)
            if is_scored and not _LEFT_OUT.search(name):
                targets[f"{stack_name}.{index}.{name}"] = linear
    return targets


def chosen_targets(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of `lora_targets` that settings choose: `all` or `none` alone; or `qv`, and dotted suffixes of names.

    A `UserError` if the model has no module of such a name.
    """
    available = lora_targets(model)
    if targets[0] == "all":
        return available
    if targets[0] == "none":
        return {}
    selected_names: set[str] = set()
    for target in targets:
        suffix = _QUERIES_AND_VALUES if target == "qv" else re.escape(target)
        pattern = re.compile(rf"(^|\.)({suffix})$")
        matching = {name for name in available if pattern.search(name)}
        if not matching:
            raise UserError(
                f"lookahead.targets: no module that can get a LoRA is {target!r}; there are {_short(available)}",
                field="lookahead.targets",
                code="unknown",
            )
        selected_names |= matching
    return {name: linear for name, linear in available.items() if name in selected_names}


def _short(names: Iterable[str]) -> str:
    """The last parts of names, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def linears(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The linear modules inside a module by name; where PEFT has wrapped one, the wrapper."""
    for name, child in module.named_children():
        if hasattr(child, "in_features") and hasattr(child, "out_features"):
            yield prefix + name, child
        else:
            yield from linears(child, f"{prefix}{name}.")
