"""The digest of a row's inputs, by which rows of earlier runs are used again.

The digest covers the base model's weights, dtype, device and attention; the sample's tokens, references and metric; the
method with every option and its trained weights; and `RESULTS_VERSION`. It does not cover names: a method
under another label, or a sample under another number, is the same.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from keepsight.errors import UserError
from keepsight.eval.results import Measured, Row
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.files import at_home, read_jsonl, text_digest
from keepsight.models.model_files import weights_digest
from keepsight.models.targets import Target
from keepsight.runtime.generate import Method

RESULTS_VERSION = 2
"""Raised with every change of the code that changes a score, an answer or a likelihood."""
_NOT_ASKED = ("id", "task", "length", "is_cut")


def earlier_rows(folders: Iterable[str | Path]) -> dict[str, Row]:
    """The rows of earlier runs by `inputs_digest`; UserError for a folder without results."""
    rows: dict[str, Row] = {}
    for folder in folders:
        path = Path(at_home(folder)) / "results.jsonl"
        if not path.is_file():
            raise UserError(f"reuse={folder}: no results.jsonl there; name folders that keepsight eval has written")
        rows |= by_digest(read_jsonl(path, Measured))
    return rows


def by_digest(rows: Iterable[Row]) -> dict[str, Row]:
    """The rows that have an `inputs_digest`, by it."""
    return {row["inputs_digest"]: row for row in rows if row.get("inputs_digest")}


def find_rows(rows: Mapping[str, Row], digests: Sequence[Sequence[str | None]]) -> list[list[Row | None]]:
    """The rows of a group of samples, by sample and variant; None for a variant that any of the samples lacks."""
    found = [[rows.get(digest or "") for digest in row] for row in digests]
    whole = [all(column) for column in zip(*found, strict=True)]
    return [[each if is_whole else None for each, is_whole in zip(row, whole, strict=True)] for row in found]


def target_digest(target: Target) -> str:
    """Digest of the base model and of the device: what answers and times depend on apart from sample and method."""
    model = target.model
    place = [model.device.type, str(model.dtype), model.config._attn_implementation, target.end_tokens]
    return text_digest(json.dumps([RESULTS_VERSION, target.version, weights_digest(model), *place]))


def sample_digest(sample: RenderedSample) -> str:
    """Digest of a sample's prompt and scoring, without its names."""
    left_out = _NOT_ASKED if sample.pictures else (*_NOT_ASKED, "pictures")  # as when no sample had any
    return text_digest(_text({name: value for name, value in vars(sample).items() if name not in left_out}))


def inputs_digest(target: str, contents: Sequence[str], place: int, question: str, method: str) -> str | None:
    """Digest of everything that a row depends on; None where `method`, a `method_text`, is empty.

    `contents` are the `sample_digest` of the samples that share the compressed cache, the row's at `place`; `question`
    is one of `keepsight.runtime.saved.QUESTIONS`, or `turns` of a conversation.
    """
    return text_digest(json.dumps([target, *contents, place, question, method])) if method else None


def method_text(method: Method) -> str:
    """A method with all its parts, weights as digests; empty where a part has no text that says all of it."""
    try:
        return _text(method)
    except TypeError:
        return ""


def _text(value: Any) -> str:
    return json.dumps(value, default=_described, sort_keys=True)


def _described(part: Any) -> Any:
    """JSON values for tensors, modules, artifacts, and the frozen dataclasses that methods are made of."""
    if isinstance(part, Tensor):
        return part.tolist()
    if isinstance(part, nn.Module):
        return [getattr(part, "config", None), _weights(part)]
    if isinstance(part, PreTrainedTokenizerBase):
        return "tokenizer"  # the base model's
    if not is_dataclass(part) or isinstance(part, type):
        raise TypeError(f"{type(part)} has no text")
    digest = getattr(part, "digest", None)
    values = {each.name: getattr(part, each.name) for each in fields(part) if each.compare and each.init}
    return {"kind": type(part).__qualname__} | ({"digest": digest} if digest else values)


@functools.lru_cache(maxsize=2)
def _weights(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
