"""Base models: loading a model with its tokenizer, quantised or over several devices, or without its weights.

`fingerprints` computes, from a model's files alone, the digests of its weights by which prefixes of others are refused.
"""

import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import get_max_memory
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import (
    cached_file,
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

from keepsight.errors import UserError, one_line
from keepsight.experimental import is_on
from keepsight.files import at_home
from keepsight.models.chat import load_tokenizer, set_chat_template, with_arguments
from keepsight.models.decoder import require_supported, require_supported_config, values_of
from keepsight.models.distributed import whole_weights
from keepsight.models.identity import (
    FIRST_VALUES,
    Identity,
    digest_of_first_values,
    record_version,
    template_digest,
    version_of,
)
from keepsight.models.model_files import LOADING, Packaged, hub_answers, located, published_name
from keepsight.models.transformers_internals import commit_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLASH = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
ATTENTION = ("sdpa", "eager", *FLASH)
QUANTIZE = ("nf4", "int8")


@dataclass(frozen=True)
class Target:
    """A loaded base model.

    Attributes:
        model: The model, in evaluation mode, without gradients on its parameters.
        tokenizer: Its tokenizer; pads on the left.
        name: Hub id or folder path, which adapters record as their base model.
        version: See `version_of`; `unknown` where it is not known.
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
        """The name that may be published: the Hub id, or the folder's name without its path."""
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
    def identity(self) -> Identity:
        """The version of its files, and its tokenizer: what data and modules made with it record."""
        return Identity(model=version_of(self.model), template=template_digest(self.tokenizer))


def load_target(
    model_id: str,
    *,
    revision: str | None = None,
    packaged: Packaged | None = None,
    packaged_digest: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    template: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    quantize: str | None = None,
    device_map: str | Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a base model from a folder, from `packaged` if that is installed, or from the Hub.

    Args:
        model_id: A local folder or a Hub id.
        revision: Branch, tag or commit on the Hub.
        packaged: `package/file.gguf` of a package: if installed, its weights are used in place of the Hub's. Or the
            parts of such a file, from which `make models` has made weights in the cache.
        packaged_digest: The `sha256:...` that the packaged file must have.
        dtype: `auto` (bfloat16 on an accelerator, float32 on the CPU) or a key of `DTYPES`.
        device: `auto`, or a torch device.
        attention: `auto` (transformers' choice), or one of `ATTENTION`; those of `FLASH` are experimental.
        template: Arguments of the chat template; see `with_arguments`.
        chat_template: A Jinja file with the chat template to use in place of the tokenizer's own, if it has one.
        quantize: `nf4` or `int8`: weights are quantised while they are loaded, by bitsandbytes.
        device_map: `auto` spreads the layers over all GPUs (experimental), if `device` is `auto` and this process is
            the only one of its launch, else places them on the process's own device; layers that do not fit stay on the
            CPU, then on disk, until they run. Or a device for each module by its name, `""` for the whole. On `meta` no
            weights are read.
        trust_remote_code: Whether code from the model's repository may run.

    Raises:
        UserError: the model cannot be loaded or is not supported, a digest differs, or a value is unknown.
    """
    model_id = at_home(model_id)
    devices = _devices(device)
    loaded_dtype = _dtype(dtype, devices[0])
    options: dict[str, Any] = {
        "dtype": loaded_dtype,
        "attn_implementation": _attention(attention, devices[0]),
        "trust_remote_code": trust_remote_code,
        **placement(quantize, device_map, devices, loaded_dtype),
    }
    source, version, hub_options = located(model_id, revision, packaged, packaged_digest)
    options |= hub_options
    with _reading(model_id):
        tokenizer, model = _read(source, options, template, chat_template)
    _require_finite(model_id, model)
    if "device_map" not in options:
        model = model.to(devices[0])
    require_supported(model)
    target = _target(model_id, model.requires_grad_(False).eval(), tokenizer, source, version)
    end_tokens = target.end_tokens
    if not end_tokens or not all(isinstance(token, int) and token >= 0 for token in end_tokens):
        raise UserError(
            f"model {model_id!r}: eos_token_id is {end_tokens}, expected token ids; copy the model again",
            field="eos_token_id",
            code="type",
        )
    return target


def _read(
    source: str | Path,
    options: dict[str, Any],
    template: Mapping[str, Any] | None,
    chat_template: str | Path | None,
) -> tuple[PreTrainedTokenizerBase, Any]:
    """The tokenizer and the model; what can be refused without the weights is refused before these are read."""
    file_options: dict[str, Any] = {}
    for name in ("trust_remote_code", "revision", "local_files_only"):
        if name in options:
            file_options[name] = options[name]
    tokenizer = _tokenizer(source, file_options, template, chat_template)
    config = AutoConfig.from_pretrained(source, **file_options)
    require_supported_config(config)
    attention = options["attn_implementation"]
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        attention = attention or "eager"  # sdpa, the default of some versions of transformers, has no soft-capping
    loader: Any = _loader(config)
    with LOADING:
        model, report = loader.from_pretrained(
            source,
            output_loading_info=True,
            use_safetensors=True,
            **{**options, "attn_implementation": attention},
        )
    missing = report["missing_keys"]
    if missing:  # transformers would go on with random weights
        raise ValueError(f"its weight files lack {min(missing)} and {len(missing) - 1} more; fetch it again")
    return tokenizer, model


def _loader(config: Any) -> Any:
    """The class of transformers that makes the model of a configuration."""
    kind = type(config)
    with_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def _tokenizer(
    source: str | Path,
    options: dict[str, Any],
    template: Mapping[str, Any] | None,
    chat_template: str | Path | None,
) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(source, **options)
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    if template:
        tokenizer.chat_template = with_arguments(tokenizer.chat_template, template)
    return tokenizer


def _target(
    model_id: str, model: Any, tokenizer: PreTrainedTokenizerBase, source: str | Path, version: str | None
) -> Target:
    model.config.name_or_path = model_id
    record_version(model, version)
    folder = source if isinstance(source, Path) else None
    return Target(model, tokenizer, model_id, version_of(model) or "unknown", folder)


def _require_finite(model_id: str, model: PreTrainedModel) -> None:
    for module_name, module in model.named_modules():
        with whole_weights(module):
            for name, parameter in module.named_parameters(module_name, recurse=False):
                weight = values_of(model, name, parameter)
                if not weight.is_meta and not weight.isfinite().all():
                    raise UserError(
                        f"model {model_id!r}: weight {name!r} is not finite; copy or download it again",
                        field=name,
                        code="data",
                    )


def _dtype(name: str, device: str) -> torch.dtype:
    if name != "auto" and name not in DTYPES:
        raise UserError(
            f"dtype {name!r} is unknown; choose auto or one of {', '.join(DTYPES)}", field="model.dtype", code="unknown"
        )
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device == "cpu" else torch.bfloat16


def _attention(name: str, device: str) -> str | None:
    """None leaves it to transformers, which takes sdpa where the architecture has it, else eager."""
    if name not in ("auto", *ATTENTION):
        raise UserError(
            f"attention {name!r} is unknown; choose auto or one of {', '.join(ATTENTION)}",
            field="model.attention",
            code="unknown",
        )
    if name in FLASH and (device == "cpu" or not FLASH[name]()):
        raise UserError(
            f"attention {name!r} needs a GPU and its package of flash-attn; choose auto",
            field="model.attention",
            code="missing",
        )
    if name != "auto":
        return name
    if device != "cpu" and is_flash_attn_2_available() and is_on("flash"):
        return "flash_attention_2"
    return None


def _devices(name: str) -> list[str]:
    """The devices over which a model may be distributed; it runs on the first one otherwise."""
    if name == "auto":
        if not torch.cuda.is_available():
            return ["cpu"]
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return [f"cuda:{os.environ.get('LOCAL_RANK', 0)}"]  # one GPU a process
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the second when torch was built without that device
        raise UserError(
            f"device {name!r} cannot be used ({str(error).partition('. ')[0]}); choose auto",
            field="model.device",
            code="unknown",
        ) from None
    if torch.device(name).type == "meta":
        raise UserError(
            f"device {name!r} cannot be used (it holds no values); choose auto", field="model.device", code="unknown"
        )
    return [name]


# Quantisation and placement


def placement(
    quantize: str | None, device_map: str | Mapping[str, str] | None, devices: Sequence[str], dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for quantisation and several devices; none for the ordinary case.

    `quantize` is `nf4`, in 4 bits (arXiv 2305.14314, with double quantisation), `int8` (arXiv 2208.07339) or None, and
    `dtype` that of computation; `device_map` is as in `load_target`, None for the first of `devices` alone. A
    `UserError` if a value is unknown, or bitsandbytes is not installed.
    """
    if isinstance(device_map, str) and device_map != "auto":
        raise UserError(
            f"model.device_map={device_map} is unknown here; choose auto, or null for model.device alone",
            field="model.device_map",
            code="unknown",
        )
    if quantize is None:
        return _placement_options(device_map, devices) if device_map else {}
    if quantize not in QUANTIZE:
        raise UserError(
            f"model.quantize={quantize} is unknown; choose one of {', '.join(QUANTIZE)}, or null",
            field="model.quantize",
            code="unknown",
        )
    if find_spec("bitsandbytes") is None:
        raise UserError(
            f"model.quantize={quantize} needs the package bitsandbytes; run `pip install bitsandbytes`",
            field="model.quantize",
            code="missing",
        )
    if quantize == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    else:
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    options = _placement_options(device_map or {"": devices[0]}, devices)
    options["quantization_config"] = quantization
    return options


def _placement_options(device_map: str | Mapping[str, str], devices: Sequence[str]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that place the layers as `device_map` says; `auto` uses these GPUs alone."""
    if device_map != "auto":
        return {"device_map": device_map}
    gpus = [torch.device(device).index or 0 for device in devices]
    max_memory = {}
    for device, most in get_max_memory().items():
        if device in gpus or not isinstance(device, int):  # GPUs by their number, beside "cpu"
            max_memory[device] = most
    return {"device_map": "auto", "max_memory": max_memory}


def keep_gradients(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU, so that gradients flow through them.

    On processors with AVX512-BF16 it would repack them at the first pass without gradients, for inference alone.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


# Models without weights


def outline_model(
    model_id: str, *, dtype: str = "auto", trust_remote_code: bool = False, **files: Any
) -> PreTrainedModel:
    """A model on the meta device, made from its configuration alone; arguments as of `outline_target`.

    `dtype` auto means bfloat16; a folder needs only a config.json. A `UserError` if the configuration cannot be read,
    or the dtype is unknown.
    """
    model_id = at_home(model_id)
    source: str | Path = model_id
    options: dict[str, Any] = {}
    if not Path(model_id).is_dir():
        source, _, options = located(model_id, **files)
    options["trust_remote_code"] = trust_remote_code
    return _on_meta(model_id, source, options, _dtype(dtype, "meta"))


def outline_target(
    model_id: str,
    *,
    dtype: str = "bfloat16",
    template: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    trust_remote_code: bool = False,
    **files: Any,
) -> Target:
    """A base model without weights: tokenizer, configuration, version, and a model on the meta device.

    The arguments are those of `load_target`; `files` are its `revision`, `packaged` and `packaged_digest`. A
    `UserError` if its configuration, tokenizer or version cannot be read.
    """
    model_id = at_home(model_id)
    source, version, hub_options = located(model_id, **files)
    options = {**hub_options, "trust_remote_code": trust_remote_code}
    model = _on_meta(model_id, source, options, _dtype(dtype, "meta"))
    with _reading(model_id, "tokenizer or generation_config.json"):
        tokenizer = _tokenizer(source, options, template, chat_template)
        model.generation_config = GenerationConfig.from_pretrained(source, **hub_options)
    return _target(model_id, model, tokenizer, source, version)


def _on_meta(model_id: str, source: str | Path, options: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    with _reading(model_id, "configuration"), torch.device("meta"):
        config = AutoConfig.from_pretrained(source, **options)
        model: PreTrainedModel = _loader(config).from_config(config, dtype=dtype)
        return model


@contextmanager
def _reading(model_id: str, what: str = "") -> Iterator[None]:
    """Turn any error of the block, which reads a model or a part of one, into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged files and values of another shape raise anything, tokenizers' have no type
        fault = f": its {what} cannot be read" if what else " cannot be loaded"
        raise UserError(f"model {model_id!r}{fault}: {one_line(error)}", field="model.id", code="file") from error


# Images


def processor_of(target: Target) -> Any:
    """The processor of a model that reads images: it makes token ids and pixels from text and images.

    Raises:
        UserError: the model reads no images, or its processor cannot be loaded.
    """
    config = target.model.config
    if "pixel_values" not in inspect.signature(target.model.forward).parameters:
        raise UserError(
            f"model {target.name!r} ({config.model_type}) reads no images; choose one that does, such as Qwen2.5-VL",
            field="model.id",
            code="model",
        )
    hub_options: dict[str, Any] = {}
    if not Path(target.name).is_dir():
        hub_options = {"revision": commit_of(config), "local_files_only": not hub_answers()}
    try:
        processor = AutoProcessor.from_pretrained(target.name, trust_remote_code=False, **hub_options)
    except Exception as error:  # damaged files raise anything
        remedy = "install what it names" if isinstance(error, ImportError) else "fetch the model again"
        raise UserError(
            f"{target.name!r}: its processor of images cannot be loaded ({one_line(error, 200)}); {remedy}",
            field="model.id",
            code="file",
        ) from error
    if not hasattr(processor, "image_processor"):
        raise UserError(
            f"model {target.name!r} comes without a preprocessor_config.json; download it again",
            field="preprocessor_config.json",
            code="missing",
        )
    return processor


def fingerprints(model: str) -> frozenset[str]:
    """`weights_digest` of a model in each dtype that it may be loaded in; none if its files use other names of weights.

    The model is a folder or Hub id whose files are on this machine; a `UserError` if its configuration cannot be read.
    """
    outline = outline_model(model, dtype="float32")
    folder = Path(cached_file(model, "config.json") or model).parent
    try:
        first = _first_values(folder)
        values = [first[name] for name, _ in outline.named_parameters()]
    except (KeyError, OSError, SafetensorError):
        return frozenset()
    digests = set()
    for dtype in DTYPES.values():
        digests.add(digest_of_first_values([value.to(dtype) for value in values]))
    return frozenset(digests)


def _first_values(folder: Path) -> dict[str, Tensor]:
    """The first rows of each weight in a folder's files, with at least `FIRST_VALUES` values if the weight has them."""
    rows: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                weight = file.get_slice(name)
                shape = weight.get_shape()
                if shape and 0 not in shape:
                    rows[name] = weight[: math.ceil(FIRST_VALUES / math.prod(shape[1:]))]
    return rows
