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
from keepsight.models.decoder import RECURRENT, decoder_of, full_attention_layers, layer_kinds

PREFIX = "base_model.model."  # what PEFT puts before the names of a saved adapter's tensors

_LEFT_OUT = re.compile(r"(^|\.)(experts|router|gate|shared_expert_gate|kv_b_proj)(\.|$)")
"""Experts and their routers; the expansion of latents, which is applied to the cache and not to new tokens."""
_SCORED = re.compile(r"(^|\.)(qkv|q|kv|k)_[^.]*$")
"""Projections of queries and keys."""
_QUERIES_AND_VALUES = r"(qkv|q|kv|v)_[^.]*"
"""Projections of queries and values, without and with those of keys."""

_SAME_INPUT = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Modules of one parent that read the same input."""

_ATTACHED: ContextVar[tuple[object, ...]] = ContextVar("attached", default=())
"""Keys of the hooks attached in this thread, or asyncio task."""


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within the block, forward hooks on modules, called in this thread or asyncio task alone."""
    key, registered = object(), []
    token = _ATTACHED.set((*_ATTACHED.get(), key))
    try:
        for module, hook in hooks:
            registered.append(module.register_forward_hook(_InContext(hook, key)))
        yield
    finally:
        _ATTACHED.reset(token)
        for each in registered:
            each.remove()


class _InContext:
    """A hook that acts only where its key is attached. A deep copy of the module gets a hook that does nothing."""

    def __init__(self, hook: Callable[..., Any], key: object) -> None:
        self._hook, self._key = hook, key

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        return self._hook(module, inputs, output) if self._key in _ATTACHED.get() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing


class Lora(nn.Module):
    """Low-rank updates of linear modules, by their names in the model, each scaled by alpha / rank."""

    def __init__(self, linears: Mapping[str, nn.Module], rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.names = tuple(linears)
        self._linears = tuple(linears.values())
        self.updates = nn.ModuleList([Update(linear, rank, alpha / rank, dropout) for linear in self._linears])

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block, the linear modules give their output plus the update."""
        pairs = zip(self._linears, self.updates, strict=True)
        with hooked((linear, partial(_add_update, update)) for linear, update in pairs):
            yield

    def parts(self) -> Iterator[tuple[str, nn.Module, Any]]:
        """Each module's name, the module, and its update."""
        yield from zip(self.names, self._linears, self.updates, strict=True)

    def tensors(self) -> dict[str, nn.Parameter]:
        """Its parameters under the names that PEFT saves them with."""
        return {
            f"{PREFIX}{name.removeprefix(PREFIX)}.lora_{part}.weight": getattr(update, f"lora_{part}")
            for name, update in zip(self.names, self.updates, strict=True)
            for part in ("A", "B")
        }


class Update(nn.Module):
    """The update of one linear module, in float32, begun as PEFT does: A random, B zero."""

    def __init__(self, linear: Any, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        device = linear.weight.device if linear.weight.device.type != "meta" else torch.device("cpu")
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=torch.float32, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling, self.dropout = scaling, dropout

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
        self._inputs: list[_Input] = []
        groups = defaultdict(list)
        for name, linear, update in lora.parts():
            parent, _, own = name.rpartition(".")
            kind = next((place for place, names in enumerate(_SAME_INPUT) if own in names), name)
            groups[parent, kind].append((linear, update))
        for group in groups.values():
            read = _Input(torch.cat([update.lora_A.detach().to(dtype) for _, update in group]), len(group))
            self._inputs.append(read)
            for place, (linear, update) in enumerate(group):
                up = (update.lora_B.detach() * update.scaling).to(dtype)
                self._updates.append((linear, _FoldedUpdate(read, place, up.t())))

    @contextmanager
    def attached(self, rows: LastRows | None = None) -> Iterator[None]:
        """Within the block, the linear modules give their output plus the update, of all tokens or the last ones."""
        hooks = [(linear, partial(update, rows)) for linear, update in self._updates]
        try:
            with hooked(hooks):
                yield
        finally:
            for read in self._inputs:
                read.release()


class _Input(threading.local):
    """The input that one or more modules read, multiplied by all their A at once; each thread's pass has its own."""

    inputs: Tensor | None = None
    low: tuple[Tensor, ...] = ()
    left = 0

    def __init__(self, down: Tensor, readers: int) -> None:  # called again in each thread
        self._down, self._readers = down, readers

    def low_rank(self, place: int, inputs: Tensor, rows: LastRows | None) -> Tensor:
        """Inputs [..., in] times the A of the module at `place`: [m, r], m the number of tokens, or of the last ones.

        The inputs are released once all modules have read them: those of all layers would outweigh a layer's scores.
        """
        if inputs is not self.inputs:
            chosen = inputs if rows is None else _by_row(inputs, rows)[:, -rows.tokens :]
            low = functional.linear(chosen, self._down.to(inputs)).flatten(0, -2)
            self.inputs, self.low, self.left = inputs, low.chunk(self._readers, dim=-1), self._readers
        low = self.low[place]
        self.left -= 1
        if not self.left:
            self.release()
        return low

    def release(self) -> None:
        """Release the input."""
        self.inputs, self.low, self.left = None, (), 0


class _FoldedUpdate:
    """The forward hook that adds the update of one linear module to its output, in place.

    Args:
        read: The module's input times A.
        place: The module's place among those with the same input.
        up: [r, out], B transposed and scaled.
    """

    def __init__(self, read: _Input, place: int, up: Tensor) -> None:
        self._read = read
        self._place = place
        self._up = up

    def __call__(self, rows: LastRows | None, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        low = self._read.low_rank(self._place, inputs[0], rows).to(output.dtype)
        up = self._up.to(output)
        if rows is None:
            return output.flatten(0, -2).addmm_(low, up).view(output.shape)
        last = _by_row(output, rows)[:, -rows.tokens :]
        last += (low @ up).view(last.shape)
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
    decoder, kinds = decoder_of(model), layer_kinds(model.config)
    start = next(name for name, module in model.named_modules() if module is decoder)
    last = max(full_attention_layers(model.config), default=-1)
    found = {}
    for index, layer in enumerate(decoder.layers[: last + 1]):
        if kinds[index] not in RECURRENT:
            for name, linear in linears(layer):
                if not _LEFT_OUT.search(name) and (index < last or _SCORED.search(name)):
                    found[".".join(filter(None, (start, "layers", str(index), name)))] = linear
    return found


def chosen_targets(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of `lora_targets` that settings choose: `all` or `none` alone; or `qv`, and dotted suffixes of names.

    A `UserError` if the model has no module of such a name.
    """
    found, chosen = lora_targets(model), set[str]()
    if targets[0] in ("all", "none"):
        return found if targets[0] == "all" else {}
    for target in targets:
        end = re.compile(rf"(^|\.)({_QUERIES_AND_VALUES if target == 'qv' else re.escape(target)})$")
        named = {name for name in found if end.search(name)}
        if not named:
            raise UserError(
                f"lookahead.targets: no module that can get a LoRA is {target!r}; there are {_short(found)}"
            )
        chosen |= named
    return {name: found[name] for name in found if name in chosen}


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
