"""Draft heads on disk: public EAGLE checkpoints and our own, in the same form, loaded strictly.

A head is a folder with `config.json` and `model.safetensors`, whose tensors have the names of public checkpoints. Ours
also hold `keepsight.json` (where the head comes from, the digest of the weights) and a card.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from keepsight.errors import UserError
from keepsight.files import atomic_files, file_digest, read_json, write_json, write_readme
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_head_config import public_config, read_head_config
from keepsight.models.feature_head import FeatureHead
from keepsight.models.lookahead import input_embedding, input_width
from keepsight.models.lookahead_files import Provenance
from keepsight.models.versions import warn_of_another_base
from keepsight.models.weight_files import (
    as_weights,
    check_digest,
    check_names_and_shapes,
    one_line,
    read_tensors,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG, WEIGHTS, ORIGIN = "config.json", "model.safetensors", "keepsight.json"
FILES = (CONFIG, WEIGHTS)

PICKLE = "pytorch_model.bin"

_EMBEDDING = "embed_tokens.weight"
_RELATIVE, _ABSOLUTE = 2**-6, 1e-4
"""Tolerances within which two embeddings are the same, rounded to different dtypes."""
_ROWS_AT_ONCE = 4096
_VOCABULARY = ("d2t", "t2d")


@dataclass(frozen=True)
class Origin:
    """What keepsight.json holds.

    Attributes:
        provenance: Where the head comes from.
        digests: `sha256:...` by file name.
    """

    provenance: Provenance
    digests: dict[str, str]


def load_draft_head(folder: Path, target: PreTrainedModel | None = None) -> DraftHead | FeatureHead:
    """Read a head: an EAGLE-3 one (`midlayer.*`, or `layers.0.*` with a `hidden_norm`), or an EAGLE-1 or EAGLE-2 one.

    Args:
        folder: The head's folder.
        target: The model that it drafts for. The head gets its device and dtype, and keeps an embedding of its own
            where the file's differs from the target's; without a target it stays on the CPU in the dtype of its file,
            has no such embedding, and a `FeatureHead` has no logits.

    Raises:
        UserError: a file is missing, corrupt, or differs from its recorded digest; a tensor is missing, surplus, of
            another shape than the configuration says, or not finite; or the head is for another target.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(_what_is_missing(folder, name))
    config = read_head_config(folder / CONFIG)
    origin: Origin | None = read_json(folder / ORIGIN, Origin) if (folder / ORIGIN).is_file() else None
    if target is not None:
        _check_target(folder, config, target)
        if origin is not None:
            warn_of_another_base(folder, origin.provenance.base_model, origin.provenance.base_version, target)
    tensors = _read_weights(folder, origin)
    embedding = tensors.pop(_EMBEDDING, None)
    head = _empty_head(folder, config, tensors, target)
    if isinstance(head, DraftHead):
        tensors = _complete_vocabulary(folder, head, tensors)
    check_names_and_shapes(folder / WEIGHTS, tensors, head.state_dict())
    dtype = target.dtype if target is not None else tensors["fc.weight"].dtype
    weights = {name: tensor for name, tensor in tensors.items() if name not in _VOCABULARY}
    head.load_state_dict(tensors | as_weights(folder / WEIGHTS, weights, dtype), assign=True)
    if target is not None and embedding is not None:
        head.own_embedding = _own_embedding(folder / WEIGHTS, embedding, target)
    return head.to(target.device if target is not None else "cpu").eval()


def save_draft_head(
    head: DraftHead, folder: Path, provenance: Provenance, card: str, curves: "Figure | None" = None
) -> None:
    """Write a head's files into a folder, beside other files; a half-written head does not load.

    With `curves`, those of the training, training.png is one of them.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    if head.own_embedding is not None:
        state[_EMBEDDING] = head.own_embedding.cpu()
    with atomic_files(folder, last=CONFIG) as unfinished:
        save_file(state, unfinished / WEIGHTS, metadata={"format": "pt"})
        digests = {WEIGHTS: file_digest(unfinished / WEIGHTS)}
        write_json(unfinished / ORIGIN, {"provenance": asdict(provenance), "digests": digests})
        write_json(unfinished / CONFIG, public_config(head))
        write_readme(unfinished, card, curves)


def how_to_convert(reference: object) -> str:
    """What to do with a head, a folder or a Hub id, that exists as a pickle alone."""
    return f"{PICKLE} is a pickle, which is read only to convert it, once: keepsight convert {reference} out=HEAD"


def _what_is_missing(folder: Path, name: str) -> str:
    if name == WEIGHTS and (folder / PICKLE).is_file():
        return f"{folder}: {how_to_convert(folder)}"
    return f"{folder}: {name} is missing; a draft head needs {' and '.join(FILES)}"


def _check_target(folder: Path, config: LlamaConfig, target: PreTrainedModel) -> None:
    text = target.config.get_text_config()
    sizes = {
        "hidden size": (config.hidden_size, input_width(target)),
        "feature width": (getattr(config, "target_hidden_size", None) or config.hidden_size, text.hidden_size),
        "vocabulary": (config.vocab_size, text.vocab_size),
    }
    for name, (own, its) in sizes.items():
        if own != its:
            raise UserError(
                f"{folder}: this draft head is for a target with {name} {own}, but that of "
                f"{target.config.name_or_path or type(target).__name__} is {its}; choose the target's own head"
            )


def _read_weights(folder: Path, origin: Origin | None) -> dict[str, Tensor]:
    if origin is not None:
        check_digest(folder / WEIGHTS, origin.digests.get(WEIGHTS, "missing"), ORIGIN)
    tensors = read_tensors(folder / WEIGHTS)
    if "layers.0.hidden_norm.weight" not in tensors:
        return tensors
    return {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}


def _own_embedding(path: Path, embedding: Tensor, target: PreTrainedModel) -> Tensor | None:
    """A head's embedding on the target's device and in its dtype, if it is another than the target's."""
    base = input_embedding(target)
    if embedding.shape != base.shape:
        raise UserError(
            f"{path}: tensor {_EMBEDDING!r} has shape {list(embedding.shape)}, the target's is {list(base.shape)}"
        )
    own = as_weights(path, {_EMBEDDING: embedding}, target.dtype)[_EMBEDDING]
    pairs = zip(own.split(_ROWS_AT_ONCE), base.split(_ROWS_AT_ONCE), strict=True)
    is_same = all(torch.allclose(row.float(), its.float().cpu(), _RELATIVE, _ABSOLUTE) for row, its in pairs)
    return None if is_same else own.to(base.device)


def _empty_head(
    folder: Path, config: LlamaConfig, tensors: dict[str, Tensor], target: PreTrainedModel | None
) -> DraftHead | FeatureHead:
    """The head that the tensors' names belong to, on the meta device."""
    try:
        with torch.device("meta"):
            if any(key.startswith("midlayer.") for key in tensors):
                return DraftHead(config)
            if any(key.startswith("layers.0.") for key in tensors):
                return FeatureHead(config, None if target is None else target.get_output_embeddings())
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: no layer can be made of it ({one_line(error)})") from None
    raise UserError(
        f"{folder / WEIGHTS}: no EAGLE head, which has tensors called midlayer.* or layers.0.*; "
        f"the first here is {min(tensors, default='missing')!r}"
    )


def _complete_vocabulary(folder: Path, head: DraftHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with checked d2t and t2d, which may be missing when the draft's vocabulary is the target's."""
    draft, whole = len(head.d2t), len(head.t2d)
    is_held = tensors.keys() >= {"lm_head.weight"} and len(tensors["lm_head.weight"]) == draft  # or it is a slip
    if draft == whole and is_held and not tensors.keys() & set(_VOCABULARY):
        identity = {"d2t": torch.zeros(draft, dtype=torch.long), "t2d": torch.ones(whole, dtype=torch.bool)}
        return tensors | identity
    if [tensors[name].shape for name in _VOCABULARY if name in tensors] != [(draft,), (whole,)]:
        return tensors  # which names or shapes are wrong is said where all are checked
    offsets, member = tensors["d2t"].long(), tensors["t2d"].bool()
    ids = offsets + torch.arange(draft)
    if not torch.equal(ids.sort().values, member.nonzero().flatten()):
        raise UserError(f"{folder / WEIGHTS}: d2t and t2d name different tokens; fetch it again")
    return tensors | {"d2t": offsets, "t2d": member}
