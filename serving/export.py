"""From a state to a prefix file: the entries turned to the positions of a shorter prompt, whole or in pages."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.adapters import weights_digest
from keepsight.models.decoder import cached_kv_heads
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
    counts = state.counts()[:, 0].cpu()  # [L, K]
    entries = _placeholders_of(counts, page)
    after = turned(model, state, entries)
    keys, values = _packed(after, ragged=bool(page))
    tensors = {"keys": keys, "values": values} | ({"pages": counts // page} if page else {})
    config = model.config.get_text_config(decoder=True)
    header = Header(
        entries=entries,
        seen=int(state.lengths[0]),
        shape=(len(state.layers), cached_kv_heads(model), keys.shape[-1]),
        page=page,
        before=before,
        model=str(model.config.name_or_path or ""),
        weights=weights_digest(model),
        template=template,
        rope=_plain(getattr(config, "rope_parameters", None)),
        method=method,
        tokens=hashlib.sha256(json.dumps(state.tokens[0].tolist()).encode()).hexdigest(),
    )
    return write_prefix(root, header, tensors), header


def _placeholders_of(counts: Tensor, page: int) -> int:
    """How many placeholder tokens hold the entries of all heads, [L, K]."""
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
