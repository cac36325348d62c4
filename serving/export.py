"""From a state to a prefix file: an evicted cache as the KV entries of an ordinary, shorter prompt, whole or in pages.

With rotary positions, the score of a query at position p with a key at position s depends on p - s alone. A prompt of N
tokens whose heads keep B entries continues at position N. Rotated by a further -(N - B), the kept keys are those of a
prompt of B tokens, and an engine continues at position B: its scheduler, pages and positions need no change. Values do
not change, and the order of the entries does not matter.

The rotation is exact for plain, linear, Llama-3 and YaRN scaling (whose factor is in the keys already), for partial
rotation, M-RoPE and layers without rotation. `turned` compares the next token's logits before and after, so that a
model whose attention depends on positions in another way is refused.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.files import json_digest
from keepsight.models.decoder import (
    BOUNDED,
    FULL,
    WITHOUT_CACHE,
    decoder_layers,
    decoder_of,
    has_latents,
    layer_kinds,
)
from keepsight.models.identity import Identity, identity_of
from keepsight.runtime.attention import StateCache, is_bounded
from keepsight.runtime.layer import KeptLayer, RaggedLayer
from keepsight.runtime.state import State, read
from keepsight.serving.prefix import Header, write_prefix

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Scalings of rotary positions whose frequencies do not depend on the length of the prompt."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Mean difference of two log-probabilities that rounding explains: up to 0.06 in bfloat16, 0.4 after a wrong
rotation."""


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates its keys.

    Attributes:
        inv_freq: [r / 2] float64, the frequency of each pair of the first r dimensions of a head.
        interleaved: Whether dimensions 2i and 2i + 1 are a pair; else i and i + r / 2.
    """

    inv_freq: Tensor
    interleaved: bool

    def turn(self, keys: Tensor, positions: int) -> Tensor:
        """Rotate keys [..., d], after RoPE, by further positions, in float64; the result has the keys' dtype."""
        width = 2 * len(self.inv_freq)
        angle = positions * self.inv_freq.to(keys.device)
        cos = angle.cos()
        sin = angle.sin()
        unturned = keys[..., :width].double()
        if self.interleaved:
            x = unturned[..., ::2]
            y = unturned[..., 1::2]
        else:
            x, y = unturned.chunk(2, dim=-1)

        turned_x = x * cos - y * sin
        turned_y = y * cos + x * sin
        if self.interleaved:
            turned = torch.stack([turned_x, turned_y], dim=-1).flatten(-2)
        else:
            turned = torch.cat([turned_x, turned_y], dim=-1)
        return torch.cat([turned.to(keys.dtype), keys[..., width:]], dim=-1)


def rotations_of(model: PreTrainedModel) -> list[Rotation | None]:
    """The rotation of each layer with full attention; None for one without.

    Raises:
        UserError: the model has no rotary positions, scales them by the prompt's length, or has layers whose entries
            cannot be rotated (latents, sliding windows, recurrent states).
    """
    kind = model.config.model_type
    config = model.config.get_text_config(decoder=True)
    if has_latents(model):
        raise UserError(
            f"{kind} caches latents, which cannot be rotated yet; serve a model with keys and values",
            field="model",
            code="model",
        )
    decoder = decoder_of(model)
    rotary: Any = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise UserError(
            f"{kind} has no rotary positions, so that its evicted entries fit no other position",
            field="model",
            code="model",
        )
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(FULL) or parameters  # by kind of layer in models that have several
    scaling = parameters.get("rope_type", "default")
    if scaling not in ROPE_TYPES:
        raise UserError(
            f"{kind} scales rotary positions by {scaling}, whose frequencies depend on the prompt's length; "
            f"supported are {', '.join(ROPE_TYPES)}",
            field="model",
            code="model",
        )
    by_kind: Tensor | None = getattr(rotary, f"{FULL}_inv_freq", None)
    frequencies: Tensor = rotary.inv_freq if by_kind is None else by_kind
    rotations: list[Rotation | None] = []
    for layer in decoder_layers(model):
        attention = layer.self_attn
        rotation = None
        if getattr(attention, "use_rope", True) not in (False, 0):
            interleaved = _is_interleaved(attention, len(frequencies))
            rotation = Rotation(frequencies.detach().double().cpu(), interleaved)
        rotations.append(rotation)
    return rotations


def _is_interleaved(attention: Any, pairs: int) -> bool:
    """Whether the model's own function rotates neighbouring dimensions."""
    rotate: Any = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is None:
        return False  # `turned` checks the result
    key = torch.zeros(1, 1, 1, 2 * pairs)
    key[..., 0] = 1.0
    angle = torch.full((1, 1, 2 * pairs), 0.5)
    try:
        _, rotated = rotate(key, key, angle.cos(), angle.sin())
    except (RuntimeError, TypeError, ValueError):
        return False
    return pairs > 1 and bool(rotated[0, 0, 0, 1] != 0)


def require_no_windows(model: PreTrainedModel) -> None:
    """Refuse a model that no prefix can be made for, by its configuration, before its weights are read.

    Raises:
        UserError: some of its layers keep a window or a state.
    """
    for kind in layer_kinds(model.config):
        if kind in BOUNDED and kind not in WITHOUT_CACHE:
            raise _window_error(model, kind)


def _window_error(model: PreTrainedModel, layer: str) -> UserError:
    return UserError(
        f"{model.config.model_type} has layers with {layer}, whose window or state is not that of a shorter prompt; "
        "serve a model whose layers all have full attention",
        field="model",
        code="model",
    )


@torch.no_grad()
def turned(model: PreTrainedModel, state: State, entries: int, *, compare: bool = True) -> State:
    """A state with its keys rotated to the positions of a prompt of `entries` tokens, where the next token follows.

    The state is of one prompt, before or after eviction, whose layers all have full attention; it stays unchanged, and
    nothing is recorded in the new one. A `UserError` if the model's keys cannot be rotated, or the rotation changes the
    next token's logits; with `compare=False` these are not computed, which takes two passes.
    """
    if len(state.lengths) != 1 or not state.has_plain_entries:
        raise UserError(
            "a prefix is made of one prompt, and of entries that are stored as they are", field="state", code="state"
        )
    kind = model.config.model_type
    for layer in state.cache.layers:
        if is_bounded(layer):
            raise _window_error(model, f"a {type(layer).__name__}")

    after = turned_by(rotations_of(model), state, entries)
    if not compare:
        return after
    token = state.logits.argmax(dim=-1, keepdim=True)
    _, logits = read(model, state.unrecorded(), token)
    _, turned_logits = read(model, after.copy(), token)
    expected = logits.log_softmax(-1)
    difference = float((expected.exp() * (expected - turned_logits.log_softmax(-1)).abs()).sum())
    if difference > _TOLERANCE[model.dtype]:
        raise UserError(
            f"{kind} depends on positions in a way that rotating its keys does not preserve: "
            f"log-probabilities differ by {difference:.2g}; serve another model",
            field="model",
            code="model",
        )
    return after


def turned_by(rotations: Sequence[Rotation | None], state: State, entries: int) -> State:
    """`turned` by known rotations of the layers, without a comparison of logits."""
    positions = entries - int(state.lengths[0] + state.rope_offset)
    layers: list[Any] = []
    for layer, rotation in zip(state.layers, rotations, strict=True):
        if isinstance(layer, RaggedLayer):
            keys, values = layer.packed()
        else:
            keys = layer.keys
            values = layer.values
        if rotation is not None:
            keys = rotation.turn(keys, positions)
        if isinstance(layer, RaggedLayer):
            layers.append(RaggedLayer(keys, values, layer.head_sizes(), entries))
        else:
            layers.append(KeptLayer(keys, values, entries, layer.real))

    lengths = torch.full_like(state.lengths, entries)
    placeholder_tokens = state.tokens.new_zeros(1, entries)
    return State(StateCache(layers=layers), state.logits, placeholder_tokens, lengths, padded=False)


def export(
    model: PreTrainedModel,
    state: State,
    root: Path,
    *,
    page: int = 0,
    before: str = "",
    identity: Identity | None = None,
    method: str = "",
    compare: bool = True,
) -> tuple[str, Header]:
    """Write the evicted state of one prompt as a prefix in the folder `root`; returns its digest and header.

    `page` is the number of entries of a page of the engine's cache, of which every head keeps a multiple; 0 where all
    heads keep the same number. `before` is the rendered text before the document (see `Header`), `identity` the
    `identity_of` the model, by default without its tokenizer, and `method` describes the method. `compare=False` leaves
    out the comparison of `turned`, for a model that has passed it. A `UserError` if heads keep numbers of entries that
    cannot be stored so, or the model's keys cannot be rotated.
    """
    return write_state(
        model.config,
        state,
        turned(model, state, placeholders_of(state, page), compare=compare),
        root,
        page=page,
        before=before,
        method=method,
        identity=identity or identity_of(model),
    )


def write_state(
    config: Any, state: State, after: State, root: Path, *, page: int = 0, **fields: Any
) -> tuple[str, Header]:
    """Write a state whose keys were rotated; see `export`.

    `state` and `after` are the state before and after the rotation; `fields` are further ones of the header.
    """
    keys, values = _packed(after, ragged=bool(page))
    counts = state.counts()[:, 0].cpu()
    layers, kv_heads = counts.shape
    tensors = {"keys": keys, "values": values}
    if page:
        tensors["pages"] = counts // page
    header = Header(
        entries=int(after.lengths[0]),
        seen=int(state.lengths[0]),
        shape=(layers, kv_heads, keys.shape[-1]),
        page=page,
        model=str(config.name_or_path or ""),
        rope=_rope_parameters(config),
        tokens=json_digest(state.tokens[0].tolist()),
        **fields,
    )
    return write_prefix(root, header, tensors), header


def placeholders_of(state: State, page: int) -> int:
    """Number of placeholder tokens that hold the entries of all heads.

    Raises:
        UserError: heads keep different numbers of entries, or parts of pages, such as those of a prompt within the
            budget.
    """
    counts = state.counts()[:, 0].cpu()  # [L, K]
    if page:
        if (counts % page).any():
            if bool((counts == state.lengths.cpu()).all()):
                raise UserError(
                    f"the prompt of {int(state.lengths)} tokens is within the budget; send it as it is",
                    field="prompt",
                    code="range",
                )
            raise UserError(
                f"heads keep parts of pages of {page} entries; choose allocate={{name: global, page: {page}}} and a "
                f"budget that {page} divides",
                field="allocate",
                code="conflict",
            )
        return -(-int(counts.sum()) // (page * counts.numel())) * page
    if counts.min() != counts.max():
        raise UserError(
            f"heads keep {int(counts.min())} to {int(counts.max())} entries, and an engine's pages hold the same "
            "number for every head; choose allocate=uniform, or a page size for engines with keepsight's backend",
            field="allocate",
            code="conflict",
        )
    return int(counts.min())


def _packed(state: State, ragged: bool) -> tuple[Tensor, Tensor]:
    """Keys and values [L, K, B, d], or the real ones of each layer and head after one another, [total, d]."""
    keys = []
    values = []
    for entries in state.entries():
        layer_keys = entries.keys[0]
        layer_values = entries.values[0]
        if ragged:
            is_real = entries.marks[0]
            layer_keys = layer_keys[is_real]
            layer_values = layer_values[is_real]
        keys.append(layer_keys)
        values.append(layer_values)
    if ragged:
        return torch.cat(keys), torch.cat(values)
    return torch.stack(keys), torch.stack(values)


def _rope_parameters(config: Any) -> dict[str, Any] | None:
    """A model's parameters of rotary positions, as JSON can store them."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    return None if parameters is None else json.loads(json.dumps(dict(parameters), default=str))
