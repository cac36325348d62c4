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
from keepsight.models.decoder import FULL, decoder_of, has_latents
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

    def turn(self, keys: Tensor, by: int) -> Tensor:
        """Rotate keys [..., d], after RoPE, by `by` further positions, in float64; the result has the keys' dtype."""
        width = 2 * len(self.inv_freq)
        angle = by * self.inv_freq.to(keys.device)
        cos, sin = angle.cos(), angle.sin()
        part = keys[..., :width].double()
        first, second = (part[..., ::2], part[..., 1::2]) if self.interleaved else part.chunk(2, dim=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, dim=-1).flatten(-2) if self.interleaved else torch.cat(pair, dim=-1)
        return torch.cat([turned.to(keys.dtype), keys[..., width:]], dim=-1)


def rotations_of(model: PreTrainedModel) -> list[Rotation | None]:
    """The rotation of each layer with full attention; None for one without.

    Raises:
        UserError: the model has no rotary positions, scales them by the prompt's length, or has layers whose entries
            cannot be rotated (latents, sliding windows, recurrent states).
    """
    kind, config = model.config.model_type, model.config.get_text_config(decoder=True)
    if has_latents(model):
        raise UserError(f"{kind} caches latents, which cannot be rotated yet; serve a model with keys and values")
    decoder = decoder_of(model)
    rotary: Any = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise UserError(f"{kind} has no rotary positions, so that its evicted entries fit no other position")
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(FULL) or parameters  # by kind of layer in models that have several
    if (scaling := parameters.get("rope_type", "default")) not in ROPE_TYPES:
        raise UserError(
            f"{kind} scales rotary positions by {scaling}, whose frequencies depend on the prompt's length; "
            f"supported are {', '.join(ROPE_TYPES)}"
        )
    by_kind: Tensor | None = getattr(rotary, f"{FULL}_inv_freq", None)
    frequencies: Tensor = rotary.inv_freq if by_kind is None else by_kind
    found = list[Rotation | None]()
    for layer in decoder.layers:
        attention = layer.self_attn
        unrotated = getattr(attention, "use_rope", True) in (False, 0)
        rotation = Rotation(frequencies.detach().double().cpu(), _is_interleaved(attention, len(frequencies)))
        found.append(None if unrotated else rotation)
    return found


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


@torch.no_grad()
def turned(model: PreTrainedModel, state: State, entries: int) -> State:
    """A state with its keys rotated to the positions of a prompt of `entries` tokens, where the next token follows.

    The state is of one prompt, before or after eviction, whose layers all have full attention; it stays unchanged, and
    nothing is recorded in the new one. A `UserError` if the model's keys cannot be rotated, or the rotation changes the
    next token's logits.
    """
    if len(state.lengths) != 1 or not state.joins:
        raise UserError("a prefix is made of one prompt, and of entries that are stored as they are")
    if bounded := [type(layer).__name__ for layer in state.cache.layers if is_bounded(layer)]:
        raise UserError(
            f"{model.config.model_type} has layers with a {bounded[0]}, whose window or state is not that of a shorter "
            "prompt; serve a model whose layers all have full attention"
        )
    after, token = turned_by(rotations_of(model), state, entries), state.logits.argmax(dim=-1, keepdim=True)
    expected, found = (read(model, each, token)[1].log_softmax(-1) for each in (state.unrecorded(), after.copy()))
    if (difference := float((expected.exp() * (expected - found).abs()).sum())) > _TOLERANCE[model.dtype]:
        raise UserError(
            f"{model.config.model_type} depends on positions in a way that rotating its keys does not preserve: "
            f"log-probabilities differ by {difference:.2g}; serve another model"
        )
    return after


def turned_by(rotations: Sequence[Rotation | None], state: State, entries: int) -> State:
    """`turned` by known rotations of the layers, without a comparison of logits."""
    by = entries - int(state.lengths[0] + state.rope_offset)
    pairs = zip(state.layers, rotations, strict=True)
    layers: list[Any] = [_turned(layer, rotation, by, entries) for layer, rotation in pairs]
    lengths, placeholders = torch.full_like(state.lengths, entries), state.tokens.new_zeros(1, entries)
    return State(StateCache(layers=layers), state.logits, placeholders, lengths, padded=False)


def _turned(layer: KeptLayer, rotation: Rotation | None, by: int, entries: int) -> KeptLayer:
    def turn(keys: Tensor) -> Tensor:
        return keys if rotation is None else rotation.turn(keys, by)

    if isinstance(layer, RaggedLayer):
        keys, values = layer.packed()
        return RaggedLayer(turn(keys), values, layer.head_sizes(), entries)
    return KeptLayer(turn(layer.keys), layer.values, entries, layer.real)


def export(
    model: PreTrainedModel,
    state: State,
    root: Path,
    *,
    page: int = 0,
    before: str = "",
    identity: Identity | None = None,
    method: str = "",
) -> tuple[str, Header]:
    """Write the evicted state of one prompt as a prefix in the folder `root`; returns its digest and header.

    `page` is the number of entries of a page of the engine's cache, of which every head keeps a multiple; 0 where all
    heads keep the same number. `before` is the rendered text before the document (see `Header`), `identity` the
    `identity_of` the model, by default without its tokenizer, and `method` describes the method. A `UserError` if heads
    keep numbers of entries that cannot be stored so, or the model's keys cannot be rotated.
    """
    after = turned(model, state, placeholders_of(state, page))
    about = {"before": before, "method": method, "identity": identity or identity_of(model)}
    return write_state(model.config, state, after, root, page=page, **about)


def write_state(
    config: Any, state: State, after: State, root: Path, *, page: int = 0, **about: Any
) -> tuple[str, Header]:
    """Write a state whose keys were rotated; see `export`.

    `state` and `after` are the state before and after the rotation; `about` are other fields of the header.
    """
    keys, values = _packed(after, ragged=bool(page))
    counts = state.counts()[:, 0].cpu()  # [L, K]
    tensors = {"keys": keys, "values": values} | ({"pages": counts // page} if page else {})
    header = Header(
        entries=int(after.lengths[0]),
        seen=int(state.lengths[0]),
        shape=(*counts.shape, keys.shape[-1]),
        page=page,
        model=str(config.name_or_path or ""),
        rope=_plain(getattr(config.get_text_config(decoder=True), "rope_parameters", None)),
        tokens=json_digest(state.tokens[0].tolist()),
        **about,
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
                raise UserError(f"the prompt of {int(state.lengths)} tokens is within the budget; send it as it is")
            raise UserError(
                f"heads keep parts of pages of {page} entries; choose allocate={{name: global, page: {page}}} and a "
                f"budget that {page} divides"
            )
        return -(-int(counts.sum()) // (page * counts.numel())) * page
    if counts.min() != counts.max():
        raise UserError(
            f"heads keep {int(counts.min())} to {int(counts.max())} entries, and an engine's pages hold the same "
            "number for every head; choose allocate=uniform, or a page size for engines with keepsight's backend"
        )
    return int(counts.min())


def _packed(state: State, ragged: bool) -> tuple[Tensor, Tensor]:
    """Keys and values [L, K, B, d], or the real ones of each layer and head after one another, [total, d]."""
    entries = state.entries()
    if not ragged:
        return torch.stack([each.keys[0] for each in entries]), torch.stack([each.values[0] for each in entries])
    real = [(each, selected[0]) for each, selected in zip(entries, state.select_all(), strict=True)]
    return torch.cat([each.keys[0][own] for each, own in real]), torch.cat([each.values[0][own] for each, own in real])


def _plain(parameters: Any) -> dict[str, Any] | None:
    return None if parameters is None else json.loads(json.dumps(dict(parameters), default=str))
