"""keepsight convert: make a public draft head that is a pickle (pytorch_model.bin) one that keepsight loads.

    keepsight convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B out=runs/head
    keepsight convert runs/downloaded-head

torch reads the pickle with `weights_only`, which makes tensors and runs nothing. The folder gets model.safetensors and
config.json, and is then what `draft.head=` takes.
"""

from dataclasses import dataclass
from pathlib import Path

from keepsight.errors import UserError
from keepsight.files import require_writable
from keepsight.models.hub import fetch_pickled_head
from keepsight.models.pickled_head import convert_head

POSITIONAL = ("head",)


@dataclass
class Config:
    """Keys of `keepsight convert`.

    Attributes:
        head: Folder or Hub id of the head.
        revision: Branch, tag or commit on the Hub.
        out: Folder for the converted head; by default the head's own folder.
    """

    head: str = "???"
    revision: str | None = None
    out: str | None = None


def run(config: Config) -> None:
    """Fetch, convert, load."""
    if config.out is None and not Path(config.head).is_dir():
        raise UserError(f"out= is required: {config.head} is no folder here, and would be fetched from the Hub")
    require_writable(out := Path(config.out or config.head))
    names = convert_head(fetch_pickled_head(config.head, config.revision), out)
    print(f"{len(names)} tensors in {out}; use it as draft.head={out}")
