"""Which weights a model has: what artifacts record of their base model, and compare when they are used."""

import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.errors import UserError
from keepsight.files import read_json, text_digest

logger = logging.getLogger("keepsight")

_RECORDED = "_keepsight_version"
_BLOCKS, _BLOCK = 256, 4096
_OF_NO_RESULT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


def folder_version(folder: Path) -> str:
    """Digest of a model's folder: its configuration, the headers of its weight files, and a sample of their values.

    Of each file 256 blocks of 4 KiB are read, evenly spread: other weights differ everywhere, and reading all of them
    would take longer than loading them. 15 GB take less than a second.

    Raises:
        UserError: there is no safetensors file, or the configuration is no JSON object.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(f"{folder}: no *.safetensors in this folder; keepsight reads no other weight files")
    digest = hashlib.sha256()
    if (folder / "config.json").is_file():
        config: dict[str, Any] = read_json(folder / "config.json", dict[str, Any])
        kept = {name: value for name, value in config.items() if name not in _OF_NO_RESULT}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in weights:
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            _sample(stream, path.stat().st_size, digest)
    return f"sha256:{digest.hexdigest()}"


def _sample(stream: BinaryIO, size: int, digest: "hashlib._Hash") -> None:
    """The header of a safetensors file, after its length in 8 bytes, and blocks of the rest."""
    header = 8 + int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    digest.update(size.to_bytes(8, "little") + stream.read(min(header, size)))
    rest = max(size - header, 0)
    for block in range(_BLOCKS):
        stream.seek(header + block * rest // _BLOCKS)
        digest.update(stream.read(min(_BLOCK, -(-rest // _BLOCKS))))


def record_version(model: PreTrainedModel, version: str | None) -> None:
    """Note on a model where its weights are from; None where its own configuration says so."""
    model.__dict__[_RECORDED] = version


def version_of(model: PreTrainedModel) -> str:
    """The revision on the Hub or the digest of the files that a model is from, and how it was quantised; or `unknown`.

    Models that were loaded without keepsight have one too, when they are from the Hub or from a folder.
    """
    config = model.config
    found = model.__dict__.get(_RECORDED) or getattr(config, "_commit_hash", None)
    if found is None and os.path.isdir(name := str(config.name_or_path or "")):
        try:
            found = folder_version(Path(name))
        except (UserError, OSError):
            found = None
    return f"{found or 'unknown'}{_quantised(config)}"


def _quantised(config: Any) -> str:
    quantisation: Any = getattr(config, "quantization_config", None)
    if quantisation is None:
        return ""
    values = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    kinds = [name.removeprefix("load_in_") for name in ("load_in_4bit", "load_in_8bit") if values.get(name)]
    method = values.get("quant_method", "an unknown method")
    return f" quantised by {' '.join([str(getattr(method, 'value', method)), *kinds])}"  # an enum in a loaded model


def warn_of_another_base(artifact: Path, base: str, version: str, model: PreTrainedModel) -> None:
    """Log one line where an artifact was trained on other weights than the model's, as far as both are known.

    Args:
        artifact: Its folder.
        base: Hub id or folder of the model that it was trained on.
        version: `version_of` that model.
        model: What it is used on.
    """
    own = version_of(model)
    if not own.startswith("unknown") and version not in ("", "unknown") and own != version:
        name = model.config.name_or_path or type(model).__name__
        logger.warning(
            "%s was trained on %s (%s), and this model is %s (%s): measure again what it is worth here",
            *(artifact, base or "a model without a name", version, name, own),
        )


def published_name(reference: str) -> str:
    """What may be published of a Hub id or a folder: the id as it is, a folder's name without its path."""
    return Path(reference).resolve().name if Path(reference).is_dir() else reference


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """`sha256:...` of the chat template; of the empty text when there is none."""
    return text_digest(str(tokenizer.chat_template or ""))


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """`sha256:...` of the tokens by their ids."""
    return text_digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def warn_of_another_tokenizer(
    artifact: Path, template: str, vocabulary: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log one line where prompts are made in another way than those that an artifact was trained on.

    Args:
        artifact: Its folder.
        template: `template_digest` in its training; empty where it is not recorded.
        vocabulary: `vocabulary_digest` in its training; empty where it is not recorded.
        tokenizer: What makes prompts now.
    """
    now = {"tokenizer": vocabulary_digest(tokenizer), "chat template": template_digest(tokenizer)}
    was = {"tokenizer": vocabulary, "chat template": template}
    for kind, digest in was.items():
        if digest and digest != now[kind]:
            _warn_once(
                f"{artifact} was trained with another {kind} ({digest}) than this one ({now[kind]}): {_ADVICE[kind]}"
            )
            return


_ADVICE = {
    "tokenizer": "take the base model's own, for its ids mean something else here",
    "chat template": "measure again what it is worth on prompts like these",
}


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
