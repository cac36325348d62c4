"""RoPE whose frequencies depend on the length of the text: LongRoPE (Phi-3, Phi-3.5, Phi-4-mini) and dynamic NTK.

LongRoPE (arXiv 2402.13753) has two sets of frequencies, for texts up to a limit and for longer ones; dynamic NTK has
frequencies of its own for every length beyond its limit. transformers takes the largest position of a forward pass as
the length. That is right for a prompt that is read in one pass, but not for one that is read in chunks, nor for rows of
a batch that were read apart. Within `counted_lengths`, each row has the frequencies of the length that it is given.

When a text grows beyond the limit, the keys in the cache keep the frequencies that they were computed with. Phi-3 is
the exception: transformers drops its cache there and reads everything again.
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.errors import UserError

BY_LENGTH = ("dynamic", "longrope")
"""Values of `rope_type` whose frequencies depend on the length of the text."""
_REREADING = ("phi3", "phimoe", "phi4_multimodal")
"""Models whose cache transformers (5.18 to 5.24) drops at the limit."""
_LOCK = threading.Lock()
_PASS_COUNTS: Counter[int] = Counter()
"""How many passes are under way, by the id of the RoPE module."""
_THREAD = threading.local()
"""In each thread, the `lengths` of its pass."""


@dataclass(frozen=True)
class LengthLimit:
    """Where the frequencies of a model change.

    Attributes:
        tokens: The longest text with the first frequencies.
        rope_type: `longrope` or `dynamic`.
        model_type: The model's type.
        rereads: Whether the model's cache is dropped and everything read again when a text grows beyond the limit.
    """

    tokens: int
    rope_type: str
    model_type: str
    rereads: bool

    def same(self, before: Tensor, after: Tensor) -> bool:
        """Whether texts of both lengths [B] have the same frequencies, in every row."""
        if self.rope_type == "longrope":
            return bool(((before > self.tokens) == (after > self.tokens)).all())
        return bool((before.clamp(min=self.tokens) == after.clamp(min=self.tokens)).all())

    def remaining(self, lengths: Tensor, count: int) -> list[int]:
        """Of rows of `lengths` [B] that grow beyond the limit within `count` tokens: how many tokens fit before it."""
        remaining = self.tokens - lengths
        return remaining[(remaining >= 0) & (remaining < count)].tolist()

    def error(self, reason: str) -> UserError:
        """The error of a text that cannot grow beyond the limit for this reason."""
        name = "original_max_position_embeddings" if self.rope_type == "longrope" else "max_position_embeddings"
        return UserError(
            f"{self.model_type} has other RoPE frequencies ({self.rope_type}) for texts of more than {self.tokens} "
            f"tokens ({name}), and {reason}; keep prompt and answer within {self.tokens} tokens, give a prompt that is "
            "longer by itself, or use the full cache",
            field="prompt",
            code="range",
        )


def length_limit(config: Any) -> LengthLimit | None:
    """The limit of a model, from its configuration; None where its frequencies do not depend on the length."""
    text = config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    for layer_parameters in (parameters, *parameters.values()):  # by kind of layer in models that have several
        if not isinstance(layer_parameters, dict):
            continue
        rope_type = layer_parameters.get("rope_type")
        if rope_type not in BY_LENGTH:
            continue
        tokens = None
        if rope_type == "longrope":
            tokens = layer_parameters.get("original_max_position_embeddings")
        rereads = rope_type == "longrope" and text.model_type in _REREADING
        return LengthLimit(int(tokens or text.max_position_embeddings), rope_type, text.model_type, rereads)
    return None


@contextmanager
def counted_lengths(model: Any, lengths: Tensor | None = None) -> Iterator[None]:
    """Within the block, passes of this thread have the frequencies of texts of `lengths` [B] tokens.

    By default the length is the largest position of the pass plus 1, as in transformers. Unlike there, frequencies do
    not depend on earlier passes, and those of the model stay unchanged. Re-entrant, and safe in several threads.
    """
    if length_limit(model.config) is None:
        yield
        return
    modules = [module for module in model.modules() if _is_by_length(module)]
    before = getattr(_THREAD, "lengths", None)
    for module in modules:
        _install_forward(module)
    _THREAD.lengths = [] if lengths is None else lengths.tolist()
    try:
        yield
    finally:
        _THREAD.lengths = before
        for module in modules:
            _restore_forward(module)


def _is_by_length(module: nn.Module) -> bool:
    rope_type: Any = getattr(module, "rope_type", None)
    rope_types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(name in BY_LENGTH for name in rope_types)


def _install_forward(module: nn.Module) -> None:
    """Replace the forward pass of a RoPE module by one that asks the thread for lengths; calls nest."""
    with _LOCK:
        _PASS_COUNTS[id(module)] += 1
        if _PASS_COUNTS[id(module)] == 1:
            module.forward = _ForwardByLength(module, module.forward, vars(module).get("forward"))


def _restore_forward(module: nn.Module) -> None:
    """Put the forward pass of a RoPE module back at the last of the nested calls."""
    with _LOCK:
        _PASS_COUNTS[id(module)] -= 1
        if _PASS_COUNTS[id(module)]:
            return
        del _PASS_COUNTS[id(module)]
        forward: Any = vars(module).pop("forward")
        if forward.instance_forward is not None:  # such as the hook of accelerate
            module.forward = forward.instance_forward


@dataclass(frozen=True)
class _ForwardByLength:
    """The forward pass of a RoPE module, at the lengths of the pass of the thread.

    Attributes:
        module: The RoPE module.
        original: Its forward pass until now, which passes without lengths get.
        instance_forward: The same where the module itself has it, not its class; else None.
    """

    module: nn.Module
    original: Callable[..., Any]
    instance_forward: Callable[..., Any] | None

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths: list[int] | None = getattr(_THREAD, "lengths", None)
        if lengths is None:
            return self.original(x, position_ids, *args, **kwargs)
        distinct_lengths = sorted(set(lengths)) or [int(position_ids.max()) + 1]
        if len(distinct_lengths) == 1:
            return _angles(self.module, x, position_ids, distinct_lengths[0], args, kwargs)

        if position_ids.shape[-2] == 1:
            position_ids = position_ids.expand(*position_ids.shape[:-2], len(lengths), -1)
        row_order = []
        by_length = []
        for length in distinct_lengths:
            rows = [row for row, row_length in enumerate(lengths) if row_length == length]
            row_order += rows
            by_length.append(_angles(self.module, x, position_ids[..., rows, :], length, args, kwargs))
        order = torch.tensor(row_order, device=position_ids.device).argsort()
        if isinstance(by_length[0], Tensor):
            return _in_order(by_length, order)
        return tuple(_in_order(tensors, order) for tensors in zip(*by_length, strict=True))


def _in_order(tensors: Sequence[Tensor], order: Tensor) -> Tensor:
    """The rows of tensors [..., rows, n, d], concatenated and then ordered."""
    return torch.cat([*tensors], dim=-3)[..., order.to(tensors[0].device), :, :]


def _angles(
    module: Any, x: Tensor, position_ids: Tensor, length: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What a RoPE module returns for positions [..., B, n] of a text of `length` tokens.

    The module gets the text's last position too, so that it chooses the frequencies by itself.
    """
    last_position = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
    with_last = torch.cat([position_ids, last_position], dim=-1)
    returned = type(module).forward(_fresh_copy(module), x, with_last, *args, **kwargs)
    if isinstance(returned, Tensor):
        return returned[..., :-1, :]
    return tuple(tensor[..., :-1, :] for tensor in returned)


def _fresh_copy(module: Any) -> Any:
    """A copy of a RoPE module as it was before its first pass: in the module itself, frequencies outlast a pass."""
    fresh = copy.copy(module)
    vars(fresh).pop("forward", None)
    fresh._buffers = {}
    for name, buffer in module._buffers.items():
        fresh._buffers[name] = None if buffer is None else buffer.clone()

    for name in [*fresh._buffers, *vars(module)]:
        if name.endswith("original_inv_freq"):
            fresh._buffers[name.replace("original_", "")] = getattr(module, name).clone()
        elif name.endswith("max_seq_len_cached"):
            setattr(fresh, name, module.original_max_seq_len)
    return fresh
