"""Load a target: the frozen language model whose answers are looked ahead to.

A target comes from a local folder, a Hugging Face Hub id, or a GGUF file inside an installed Python package
(`keepsight.models.packaged`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available

from keepsight.errors import UserError
from keepsight.models.chat import with_arguments
from keepsight.models.decoder import require_supported
from keepsight.models.locate import located
from keepsight.models.offloaded import values_of
from keepsight.models.quantization import placement
from keepsight.models.tokenizers import load_tokenizer
from keepsight.models.versions import published_name, record_version, template_digest, version_of
from keepsight.models.zero3 import gathered

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = ("sdpa", "eager", "flash_attention_2")


@dataclass(frozen=True)
class Target:
    """A loaded target.

    Attributes:
        model: The model, in evaluation mode, without gradients on its parameters.
        tokenizer: Its tokenizer; pads on the left.
        name: Hub id or folder path, which adapters record as their base model.
        version: Revision (commit), or `sha256:...` of the GGUF file or the folder that the weights came from; and how
            they are quantised.
        folder: The folder that its files were read from; None for a Hub id.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    version: str
    folder: Path | None = None

    @property
    def source(self) -> str:
        """Where others find its files: a Hub id or a folder."""
        return str(self.folder or self.name)

    @property
    def public_name(self) -> str:
        """The Hub id, or the name of the folder: what may be published."""
        return published_name(self.name)

    @property
    def end_tokens(self) -> list[int]:
        """The ids that end an answer."""
        config = self.model.generation_config
        ids: Any = config.eos_token_id if config is not None else None
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return list(ids) if isinstance(ids, list | tuple) else [ids]

    @property
    def pad_token(self) -> int:
        """The id that fills batches: the tokenizer's, or an end token where it has none."""
        pad: Any = self.tokenizer.pad_token_id
        return self.end_tokens[0] if pad is None else int(pad)

    @property
    def vocabulary(self) -> int:
        """One more than its largest token id."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def template_digest(self) -> str:
        """`sha256:...` of the chat template; of the empty text when there is none."""
        return template_digest(self.tokenizer)


def load_target(
    model_id: str,
    *,
    revision: str | None = None,
    packaged: str | None = None,
    packaged_digest: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    template: Mapping[str, Any] | None = None,
    quantize: str | None = None,
    device_map: str | Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a target from a folder or the Hub, or from `packaged` when the Hub cannot be reached.

    Args:
        model_id: A local folder or a Hub id.
        revision: Branch, tag or commit on the Hub.
        packaged: `package/file.gguf` of an installed package, used when `model_id` is no folder and cannot be fetched.
        packaged_digest: The `sha256:...` that the packaged file must have.
        dtype: `auto` (bfloat16 on an accelerator, float32 on the CPU) or a key of `DTYPES`.
        device: `auto`, or a torch device.
        attention: `auto` (flash_attention_2 where installed and on a GPU, else transformers' choice), or one of
            `ATTENTION`.
        template: Arguments of the chat template; see `with_arguments`.
        quantize: `nf4` or `int8`: weights are quantised while they are loaded, by bitsandbytes.
        device_map: `auto` divides the layers over all GPUs, if `device` is `auto` and this process is the only one of
            its launch, else puts them on its own; what they cannot hold stays on the CPU, then on the disk, until it
            runs. Or a device for each part by its name, `""` for the whole. On `meta` no weights are read.
        trust_remote_code: Whether code from the model's repository may run.

    Raises:
        UserError: the model cannot be had, a digest differs, or a value is unknown.
    """
    devices = _devices(device)
    device = devices[0]
    options: dict[str, Any] = {
        "dtype": _dtype(dtype, device),
        "attn_implementation": _attention(attention, device),
        "trust_remote_code": trust_remote_code,
        **placement(quantize, device_map, devices, _dtype(dtype, device)),
    }
    source, version, where = located(model_id, revision, packaged, packaged_digest)
    target = _finish(model_id, version, source, device, options | where)
    if template:
        target.tokenizer.chat_template = with_arguments(target.tokenizer.chat_template, template)
    return target


def _finish(name: str, version: str | None, source: str | Path, device: str, options: dict[str, Any]) -> Target:
    try:
        tokenizer, model = _read(source, options)
    except UserError:
        raise
    except Exception as error:  # of files that are damaged or of another shape any is raised, tokenizers' has no type
        raise UserError(f"model {name!r} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    _require_finite(name, model)
    if "device_map" not in options:
        model = model.to(device)
    require_supported(model)
    model.config.name_or_path = name
    record_version(model, version)
    folder = source if isinstance(source, Path) else None
    target = Target(model.requires_grad_(False).eval(), tokenizer, name, version_of(model), folder)
    _require_end(target)
    return target


def _require_end(target: Target) -> None:
    ends = target.end_tokens
    if not ends or not all(isinstance(each, int) and each >= 0 for each in ends):
        raise UserError(
            f"model {target.name!r}: eos_token_id is {ends}, expected token ids; mend its generation_config.json or "
            "copy it again"
        )


def _require_finite(name: str, model: PreTrainedModel) -> None:
    for part, module in model.named_modules():
        with gathered(module):
            held = {key: values_of(model, key, value) for key, value in module.named_parameters(part, recurse=False)}
            broken = [key for key, value in held.items() if not (value.is_meta or value.isfinite().all())]
        if broken:
            raise UserError(f"model {name!r}: weight {broken[0]!r} is not finite; copy or download it again")


def _read(source: str | Path, options: dict[str, Any]) -> tuple[PreTrainedTokenizerBase, Any]:
    shared = {key: options[key] for key in ("trust_remote_code", "revision", "local_files_only") if key in options}
    tokenizer = load_tokenizer(source, **shared)
    kind = type(AutoConfig.from_pretrained(source, **shared))
    pictured = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    loader: Any = AutoModelForImageTextToText if pictured else AutoModelForCausalLM
    loaded: Any = loader.from_pretrained(source, output_loading_info=True, use_safetensors=True, **options)
    model, report = loaded
    if missing := report["missing_keys"]:  # transformers would go on with random weights
        raise ValueError(f"its weight files lack {min(missing)} and {len(missing) - 1} more; fetch it again")
    return tokenizer, model


def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; choose auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _attention(name: str, device: str) -> str | None:
    """None leaves it to transformers, which takes sdpa where the architecture has it, else eager."""
    if name not in ("auto", *ATTENTION):
        raise UserError(f"attention {name!r} is unknown; choose auto or one of {', '.join(ATTENTION)}")
    flash = device != "cpu" and is_flash_attn_2_available()
    if name == "flash_attention_2" and not flash:
        raise UserError("attention 'flash_attention_2' needs a GPU and the package flash-attn; choose auto")
    return ("flash_attention_2" if flash else None) if name == "auto" else name


def _devices(name: str) -> list[str]:
    """The devices that a model may be divided over, the first one its own."""
    if name == "auto":
        if not torch.cuda.is_available():
            return ["cpu"]
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return [f"cuda:{place}" for place in range(torch.cuda.device_count())]
        return [f"cuda:{os.environ.get('LOCAL_RANK', 0)}"]  # one GPU a process
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the second when torch was built without that device
        raise UserError(f"device {name!r} cannot be used ({str(error).partition('. ')[0]}); choose auto") from None
    if torch.device(name).type == "meta":
        raise UserError(f"device {name!r} cannot be used (it holds no values); choose auto")
    return [name]
