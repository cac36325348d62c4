"""What something was made with, and whether that is at hand: a digest of base model, tokenizer, adapters and data.

KV entries, training data and trained modules fit only what they were made with. Each of them records an `Identity`, and
whoever reads it compares that with the identity of what is at hand.

A base model is recognised in two ways. What is published, or made by one model for another copy of it (modules, data),
records the version of its files (`version_of`), which does not depend on the dtype. What holds its KV entries (states,
prefixes) records the digest of the loaded weights (`weights_digest`), which every model has.
"""

import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.errors import UserError, require_same
from keepsight.files import bytes_digest, json_digest, read_json
from keepsight.models.decoder import values_of
from keepsight.models.transformers_internals import commit_of

logger = logging.getLogger("keepsight")

FIRST_VALUES = 64
"""Number of first values of each weight in `weights_digest`."""
_PARTS = {
    "model": ("another base model", "load that model"),
    "template": ("another tokenizer or chat template", "use those of its base model"),
    "adapters": ("another set of active adapters", "activate those, and no others"),
    "data": ("other training data", "use that data"),
}
"""The parts of an identity: their names in messages, and what to do where they differ."""
_LONG_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]+")
_RECORDED = "_keepsight_version"
_BLOCKS = 256
_BLOCK_BYTES = 4096
_NO_WEIGHTS_DEPEND_ON = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Keys of a config.json."""


@dataclass(frozen=True)
class Identity:
    """What something was made with: a digest of each part; None where it is not known or does not matter.

    Attributes:
        model: The base model: `version_of` its files, or `weights_digest`.
        template: `template_digest` of its tokenizer.
        adapters: `adapters_digest` of its owner's adapters; empty where none was active.
        data: Digest of the training data.
    """

    model: str | None = None
    template: str | None = None
    adapters: str | None = None
    data: str | None = None

    def difference(self, present: "Identity", remedy: str = "") -> str:
        """In words, what differs from what is at hand; empty where nothing does.

        Of each part that both know: what was recorded, what is at hand, and what to do, which `remedy` replaces.
        """
        differences = []
        for name, (words, usual_remedy) in _PARTS.items():
            recorded = getattr(self, name)
            at_hand = getattr(present, name)
            if recorded is None or at_hand is None or recorded == at_hand:
                continue
            digests = f"recorded: {_short(recorded)}, at hand: {_short(at_hand)}"
            differences.append(f"{words} ({digests}): {remedy or usual_remedy}")
        return "; ".join(differences)

    def require(self, present: "Identity", subject: str, remedy: str = "") -> None:
        """UserError if something that was made with this does not fit what is at hand; see `difference`.

        `subject` begins the message and says what was made, as in `runs/data: this data was made`.
        """
        difference = self.difference(present, remedy)
        if difference:
            raise UserError(f"{subject} with {difference}", field="model", code="conflict")

    def warn(self, present: "Identity", subject: str, remedy: str = "") -> None:
        """Like `require`, but log the message, each once."""
        difference = self.difference(present, remedy)
        if difference:
            _warn_once(f"{subject} with {difference}")


@dataclass(frozen=True)
class MadeWith:
    """What a folder's content was made with, as a JSON file beside it records: an identity, and settings by name."""

    identity: Identity
    settings: dict[str, Any]

    def require(self, present: "MadeWith", subject: str, remedy: str) -> None:
        """UserError if the identity differs from what is at hand, else with all settings that differ."""
        self.identity.require(present.identity, subject, remedy)
        require_same(subject, self.settings, present.settings, remedy)


def _short(digest: str) -> str:
    return _LONG_DIGEST.sub(r"\1", digest) or "none"


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def identity_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Identity:
    """The identity of a loaded model by its weights, with its active adapters, and its tokenizer if that matters."""
    template = None if tokenizer is None else template_digest(tokenizer)
    return Identity(model=weights_digest(model), template=template, adapters=adapters_digest(model))


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of what a tokenizer makes of a chat: of its template, and of its tokens with their ids."""
    return json_digest([tokenizer.chat_template, tokenizer.get_vocab()])


# The version of a model's files


def record_version(model: PreTrainedModel, version: str | None) -> None:
    """Record on a model which version it was loaded from; None where its configuration holds the commit."""
    model.__dict__[_RECORDED] = version


def version_of(model: PreTrainedModel) -> str | None:
    """The Hub commit or the digest of the files that a model was loaded from, and its quantisation; None if unknown.

    It works for models that were loaded without keepsight too, from the Hub or from a folder.
    """
    config: Any = model.config
    version: str | None = model.__dict__.get(_RECORDED) or commit_of(config)
    name = str(config.name_or_path or "")
    if version is None and os.path.isdir(name):
        with suppress(UserError, OSError):
            version = folder_version(Path(name))
    if version is None:
        return None

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


def folder_version(folder: Path) -> str:
    """Digest of a model's folder: its configuration, the headers of its weight files, and a sample of their values.

    Of each file 256 blocks of 4 KiB are read, evenly spread: different weights differ everywhere, and reading all of
    them would take longer than loading them. 15 GB take less than a second. A `UserError` if there is no safetensors
    file, or the configuration is no JSON object.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(
            f"{folder}: no *.safetensors in this folder; keepsight reads no other weight files",
            field="weights",
            code="missing",
        )
    return bytes_digest(_sample_of_folder(folder, weights))


def _sample_of_folder(folder: Path, weights: Iterable[Path]) -> Iterator[bytes]:
    if (folder / "config.json").is_file():
        config: dict[str, Any] = read_json(folder / "config.json", dict[str, Any])
        for name in _NO_WEIGHTS_DEPEND_ON:
            config.pop(name, None)
        yield json.dumps(config, sort_keys=True).encode()
    for path in weights:
        yield path.name.encode()
        with path.open("rb") as stream:
            yield from _sample_of_file(stream, path.stat().st_size)


def _sample_of_file(stream: BinaryIO, size: int) -> Iterator[bytes]:
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


# Loaded weights


def weights_digest(model: nn.Module) -> str:
    """Digest of the first values of each of a model's own weights, without adapters; it differs between dtypes."""
    return digest_of_first_values(_own_weights(model))


def digest_of_first_values(weights: Iterable[Tensor]) -> str:
    """`weights_digest` of a model that has these weights, in this order, of which only the first values are read."""
    first_values = torch.cat([weight.detach().flatten()[:FIRST_VALUES].float().cpu() for weight in weights])
    return bytes_digest([_bytes_of(first_values)])


def adapters_digest(model: nn.Module) -> str:
    """Digest of the weights of the active adapters, whatever their names; empty where none is active."""
    contents = _active_adapters(model)
    first = next(contents, None)
    return "" if first is None else bytes_digest(chain([first], contents))


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of tensors with their names, shapes and dtypes, in this order."""
    return bytes_digest(_named_contents(tensors))


def _named_contents(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    for name, tensor in tensors:
        yield f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode()
        yield _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _own_weights(model: nn.Module) -> Iterator[Tensor]:
    """The weights without those of adapters; one at a time, as reading an offloaded one takes memory."""
    adapter_tensors: set[int] = set()
    for layer in _adapter_layers(model):
        for container in _adapter_containers(layer):
            adapter_tensors.update(map(id, _tensors_in(container)))
    for name, parameter in model.named_parameters():
        if id(parameter) not in adapter_tensors:
            yield values_of(model, name, parameter)


def _active_adapters(model: nn.Module) -> Iterator[bytes | memoryview]:
    """The tensors and factors of the active adapters of all modules, as bytes."""
    for layer in _adapter_layers(model):
        if layer.disable_adapters:
            continue
        for adapter in layer.active_adapters:
            for container in _adapter_containers(layer):
                if adapter not in container:
                    continue
                value = container[adapter]
                if isinstance(value, int | float):
                    yield str(float(value)).encode()
                for tensor in _tensors_in(value):
                    yield _bytes_of(tensor)


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


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """A tensor, or the tensors of a module; none of other values."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
