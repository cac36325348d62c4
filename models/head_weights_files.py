"""A lookahead adapter with weights of heads, on disk."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight.files import atomic_files, file_digest, write_json, write_png, write_readme
from keepsight.models.head_weights import HeadWeights
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_files import (
    ADAPTER,
    CONFIG,
    PEFT_CONFIG,
    TOKENS,
    Artifact,
    Provenance,
    save_tensors,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_with_head_weights(
    artifact: Artifact,
    folder: Path,
    weights: HeadWeights,
    provenance: Provenance,
    card: str,
    pictures: Mapping[str, "Figure"],
    module: Lookahead | None = None,
) -> None:
    """Write an adapter with weights of heads into a folder, with pictures by file name.

    Its tensors are those of `module` where that is given, else those of `artifact`, whose other pictures stay.
    """
    shown = [path.name for path in artifact.folder.glob("*.png") if path.is_file() and not path.is_symlink()]
    kept = {name: (artifact.folder / name).read_bytes() for name in (ADAPTER, TOKENS, PEFT_CONFIG, *shown)}
    with atomic_files(folder, last=CONFIG) as unfinished:
        for name, content in kept.items():
            (unfinished / name).write_bytes(content)
        if module is not None:
            save_tensors(module, unfinished)
        digests = {name: file_digest(unfinished / name) for name in (ADAPTER, TOKENS, PEFT_CONFIG)}
        settings = {"settings": asdict(artifact.settings), "provenance": asdict(provenance), "digests": digests}
        write_json(unfinished / CONFIG, settings | {"head_weights": weights})
        for name, figure in pictures.items():
            write_png(unfinished / name, figure)
        write_readme(unfinished, card)
