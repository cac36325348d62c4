"""Retrieval heads on disk: saved, verified, loaded. A head is a folder of two files and a card."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.files import atomic_files, file_digest, read_json, write_json, write_readme
from keepsight.models.lookahead_files import Provenance
from keepsight.models.retrieval_config import RetrievalConfig
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.retrieval_target import check_target
from keepsight.models.versions import warn_of_another_base
from keepsight.models.weight_files import as_weights, check_digest, check_names_and_shapes, one_line, read_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS, CONFIG = "retrieval_head.safetensors", "retrieval_config.json"
FILES = (WEIGHTS, CONFIG)


@dataclass(frozen=True)
class _Config:
    """What retrieval_config.json holds."""

    head: RetrievalConfig
    provenance: Provenance
    digests: dict[str, str]


def save_retrieval_head(
    head: RetrievalHead, folder: Path, provenance: Provenance, card: str, curves: "Figure | None" = None
) -> None:
    """Write a head's files into a folder, beside other files; a half-written head does not load.

    Args:
        head: The head, saved in its dtype.
        folder: Created if missing.
        provenance: Origin of the head.
        card: Model card in Markdown, for README.md.
        curves: The training's, for training.png.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    with atomic_files(folder, last=CONFIG) as unfinished:
        save_file(state, unfinished / WEIGHTS, metadata={"format": "pt"})
        digests = {WEIGHTS: file_digest(unfinished / WEIGHTS)}
        values = {"head": asdict(head.config), "provenance": asdict(provenance), "digests": digests}
        write_json(unfinished / CONFIG, values)
        write_readme(unfinished, card, curves)


def load_retrieval_head(folder: Path, target: PreTrainedModel | None = None) -> RetrievalHead:
    """Read and verify a head.

    Args:
        folder: Folder that `save_retrieval_head` wrote.
        target: The model whose entries it selects. The head gets its device and dtype; without one it stays on the CPU
            in the dtype of its file.

    Raises:
        UserError: a file is missing or corrupt, or differs from the recorded digest; a tensor is missing, surplus, of
            another shape than the configuration says, or not finite; or the head is for another target.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing; a retrieval head needs {' and '.join(FILES)}")
    try:
        read: _Config = read_json(folder / CONFIG, _Config)
    except ArithmeticError as error:
        raise UserError(f"{folder / CONFIG}: not a retrieval head's configuration ({one_line(error)})") from None
    check_digest(folder / WEIGHTS, read.digests.get(WEIGHTS, "missing"), CONFIG)
    try:
        with torch.device("meta"):
            head = RetrievalHead(read.head)
    except (StrictDataclassError, ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: no head can be made of it ({one_line(error)})") from None
    tensors = read_tensors(folder / WEIGHTS)
    check_names_and_shapes(folder / WEIGHTS, tensors, head.state_dict())
    if target is not None:
        try:
            check_target(head, target)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        warn_of_another_base(folder, read.provenance.base_model, read.provenance.base_version, target)
    dtype = target.dtype if target is not None else tensors["q_proj.weight"].dtype
    head.load_state_dict(as_weights(folder / WEIGHTS, tensors, dtype), assign=True)
    return head.to(target.device if target is not None else "cpu").requires_grad_(False).eval()
