"""What the results of an evaluation depend on, for its report and for resuming it."""

import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from keepsight import __version__
from keepsight.commands.config import ModelConfig, Recipe
from keepsight.eval.rows import Variant
from keepsight.files import file_digest
from keepsight.models.artifacts import fetch
from keepsight.models.retrieval_head import WEIGHTS
from keepsight.models.targets import Target

_OF_NO_RESULT = (
    *("defaults", "lookahead", "train", "replay", "draft_head", "retrieval_head"),
    *("out", "max_batch_tokens", "reuse", "pages"),
)
"""Keys that no answer depends on."""


def settings_of(config: Recipe, target: Target, variants: list[Variant]) -> dict[str, Any]:
    """The configuration, the target, the methods' trained weights, the hardware and the library versions."""
    given = asdict(config)
    kept = {key: given[key] for key in given if key not in _OF_NO_RESULT}
    digests = dict.fromkeys(filter(None, (variant.method.adapter_digest for variant in variants)))
    versions = {
        "keepsight": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": _device(target),
    }
    return kept | {
        "target": {
            "name": target.name,
            "version": target.version,
            "dtype": str(target.model.dtype).removeprefix("torch."),
            "quantization": _quantization(config.model, target),
            "attention": target.model.config._attn_implementation,
        },
        "adapter": config.adapter,
        "adapter_digest": ", ".join(digests) or None,
        "retrieval": config.retrieval,
        "retrieval_digest": ", ".join(_head_digests(config, variants)) or None,
        "versions": versions,
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "keepsight"), *sys.argv[1:]]),
    }


def _head_digests(config: Recipe, variants: list[Variant]) -> Iterator[str]:
    """Digests of the retrieval heads that methods use: the recipe's, and those that methods name themselves."""
    if not any(variant.method.uses_retrieval_head for variant in variants):
        return
    own = [given.get("retrieval") for given in getattr(config, "methods", []) if isinstance(given, Mapping)]
    for named in dict.fromkeys(filter(None, [config.retrieval, *own])):
        yield file_digest(fetch(named) / WEIGHTS)


def _quantization(model: ModelConfig, target: Target) -> str:
    """How the weights are quantized, or were before they were loaded; `none`."""
    quantized: Any = getattr(target.model.config, "quantization_config", None)
    if quantized is not None:
        settings = quantized if isinstance(quantized, dict) else quantized.to_dict()
        return str(settings.get("quant_method", "unknown"))
    if model.packaged is not None and target.version.startswith("sha256:") and not Path(model.id).is_dir():
        name = Path(model.packaged).stem
        kind = re.search(r"I?Q\d\w*|B?F\d+", name, flags=re.IGNORECASE)
        return f"GGUF {kind[0] if kind else name}, dequantized"
    return "none"


def _device(target: Target) -> str:
    if target.model.device.type == "cuda":
        return torch.cuda.get_device_name(target.model.device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"
