"""Models without their weights: what can be known of a target before it is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.chat import with_arguments
from keepsight.models.locate import located
from keepsight.models.targets import DTYPES, Target
from keepsight.models.tokenizers import load_tokenizer
from keepsight.models.versions import record_version, version_of


def outline_model(
    model_id: str,
    *,
    revision: str | None = None,
    packaged: str | None = None,
    packaged_digest: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model on the meta device, made from its configuration alone; `dtype` auto means bfloat16.

    The arguments are those of `load_target`; a folder needs no more than its config.json.

    Raises:
        UserError: the configuration cannot be had, or the dtype is unknown.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose auto or one of {', '.join(DTYPES)}")
    source: str | Path = model_id
    where: dict[str, Any] = {}
    if not Path(model_id).is_dir():
        source, _, where = located(model_id, revision, packaged, packaged_digest)
    return _on_meta(model_id, source, where | {"trust_remote_code": trust_remote_code}, dtype)


def outline_target(
    model_id: str,
    *,
    revision: str | None = None,
    packaged: str | None = None,
    packaged_digest: str | None = None,
    template: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """A target whose model has no weights: its tokenizer, configuration and version, to prepare what another answers.

    The arguments are those of `load_target`.

    Raises:
        UserError: its configuration, tokenizer or version cannot be had.
    """
    source, version, where = located(model_id, revision, packaged, packaged_digest)
    options = where | {"trust_remote_code": trust_remote_code}
    model = _on_meta(model_id, source, options, "auto")
    try:
        tokenizer = load_tokenizer(source, **options)
        model.generation_config = GenerationConfig.from_pretrained(source, **where)
    except Exception as error:  # of files that are damaged or of another shape any is raised
        raise _missing(model_id, "tokenizer or generation_config.json", error) from None
    if template:
        tokenizer.chat_template = with_arguments(tokenizer.chat_template, template)
    model.config.name_or_path = model_id
    record_version(model, version)
    return Target(model, tokenizer, model_id, version_of(model), source if isinstance(source, Path) else None)


def _on_meta(model_id: str, source: str | Path, options: dict[str, Any], dtype: str) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(source, **options)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES.get(dtype, torch.bfloat16))
    except Exception as error:  # of values of another shape any is raised
        raise _missing(model_id, "configuration", error) from None
    return model


def _missing(model_id: str, what: str, error: Exception) -> UserError:
    return UserError(f"model {model_id!r}: its {what} cannot be had: {' '.join(str(error).split())[:300]}")
