"""From a state to a prefix file: the entries turned to the positions of a shorter prompt, whole or in pages."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.model_files import weights_digest
from keepsight.runtime.state import State
from keepsight.serving.prefix import Header, write_prefix
from keepsight.serving.turn import turned


def export(
    model: PreTrainedModel,
    state: State,
    root: Path,
    *,
    page: int = 0,
    before: str = "",
    template: str = "",
    method: str = "",
) -> tuple[str, Header]:
    """Write the state of one prompt as a prefix.

    Args:
        model: The model that read it.
        state: One prompt, evicted from. Without `page` all heads keep the same number of entries.
        root: Folder of the prefixes.
        page: Entries of a page of the engine's cache, of which every head keeps a multiple; 0 for uniform heads.
        before: Rendered text before the document; see `Header`.
        template: Digest of the chat template.
        method: The method that evicted, for information.

    Returns:
        The digest and the header.

    Raises:
        UserError: the heads keep numbers of entries that cannot be stored so, or the model's entries cannot be turned.
    """
    after = turned(model, state, placeholders_of(state, page))
    about = {"before": before, "template": template, "method": method, "weights": weights_digest(model)}
    return write_state(model.config, state, after, root, page=page, **about)


def write_state(
    config: Any, state: State, after: State, root: Path, *, page: int = 0, **about: Any
) -> tuple[str, Header]:
    """Write a state whose keys were turned; see `export`.

    Args:
        config: The model's configuration.
        state: The state before the turn.
        after: The state after it.
        root: Folder of the prefixes.
        page: Entries of a page; 0 for uniform heads.
        about: Other fields of the header.
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
        tokens=hashlib.sha256(json.dumps(state.tokens[0].tolist()).encode()).hexdigest(),
        **about,
    )
    return write_prefix(root, header, tensors), header


def placeholders_of(state: State, page: int) -> int:
    """Number of placeholder tokens that hold the entries of all heads.

    Raises:
        UserError: heads keep different numbers of entries, or parts of pages.
    """
    counts = state.counts()[:, 0].cpu()  # [L, K]
    if page:
        if (counts % page).any():
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
