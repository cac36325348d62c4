"""From a configuration to the loaded base model, and the adapter, retrieval head and draft that it names."""

import functools
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight.commands.config_shared import DraftConfig, ModelConfig, Plugins, UsesMethods, UsesModel
from keepsight.commands.variants import import_plugins
from keepsight.errors import UserError
from keepsight.models.artifacts import fetch
from keepsight.models.draft_sources import DraftHeadSource, DraftSource, LayerSubset, named_draft, named_head
from keepsight.models.targets import Target, load_target, outline_model, outline_target
from keepsight.runtime.methods import Resources


def target_of(config: UsesModel, device_map: Mapping[str, str] | None = None) -> Target:
    """Load the base model; a `device_map` takes precedence over the configuration's."""
    model = config.model
    return load_target(
        **_files_of(model),
        dtype=model.dtype,
        device=model.device,
        attention=model.attention,
        template=model.template,
        chat_template=model.chat_template,
        quantize=model.quantize,
        device_map=device_map or model.device_map,
    )


def training_target(config: UsesModel, device_map: Mapping[str, str] | None = None) -> Target:
    """Load the base model in its `training_dtype`, for data and training."""
    model = replace(config.model, dtype=training_dtype(config.model))
    return target_of(replace(config, model=model), device_map)


def training_dtype(model: ModelConfig) -> str:
    """The base model's dtype; `auto` is bfloat16 also on CPUs with AMX, which prefill three times faster in it.

    CPUs that have only bfloat16 vector instructions multiply matrices in it at half the speed of float32.
    """
    if model.dtype != "auto":
        return model.dtype
    on_cpu = model.device == "cpu" or (model.device == "auto" and not torch.cuda.is_available())
    cpu_capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.7
    return "float32" if on_cpu and not cpu_capabilities.get("amx_bf16") else "bfloat16"


def outline_of(config: UsesModel) -> PreTrainedModel:
    """The base model without its weights, from its configuration alone."""
    return outline_model(**_files_of(config.model), dtype=config.model.dtype)


def without_weights(config: UsesModel) -> Target:
    """The base model without its weights: to build methods, for checks, or if another process generates the answers."""
    model = config.model
    return outline_target(
        **_files_of(model),
        dtype=_loaded_dtype(model),
        template=model.template,
        chat_template=model.chat_template,
    )


def _loaded_dtype(model: ModelConfig) -> str:
    """The dtype in which `target_of` loads the base model."""
    if model.dtype != "auto":
        return model.dtype
    on_cpu = model.device == "cpu" or (model.device == "auto" and not torch.cuda.is_available())
    return "float32" if on_cpu else "bfloat16"


def _files_of(model: ModelConfig) -> dict[str, Any]:
    """Where the files of a model come from, as every loader takes it."""
    return {
        "model_id": model.id,
        "revision": model.revision,
        "packaged": model.packaged_file,
        "packaged_digest": model.packaged_digest,
        "trust_remote_code": model.trust_remote_code,
    }


def draft_of(config: UsesMethods, target: Target) -> DraftSource | DraftHeadSource | None:
    """The draft for a base model, which may be on the meta device; None if none is named.

    UserError if several kinds of draft are named, its files cannot be found, or it does not fit the base model.
    """
    draft = config.draft
    values = {"draft.layers": draft.layers, "draft.id": draft.id, "draft.head": draft.head}
    keys = [key for key, value in values.items() if value is not None]
    if not keys:
        return None
    if len(keys) > 1:
        raise UserError(
            f"{keys[0]} and {keys[1]}={values[keys[1]]} name two drafts; add {keys[0]}=null or {keys[1]}=null",
            field=keys[0],
            code="conflict",
        )

    model = config.model
    if draft.head is not None:
        return named_head(draft.head, fetch(draft.head, draft.revision), target.model)
    if draft.id is not None:
        return named_draft(
            draft.id,
            target,
            revision=draft.revision,
            dtype=model.dtype,
            device=model.device,
            attention=model.attention,
        )
    layers = LayerSubset(tuple(draft.layers or ()))
    layers.of(target.model)
    return layers


def resources_of(config: UsesMethods, target: Target) -> Resources:
    """The resources of methods: adapter, draft and retrieval head, and the base model's tokenizer.

    The base model need not have its weights yet: methods are built and checked with `without_weights`. The command's
    plugins are imported first.
    """
    if isinstance(config, Plugins):
        import_plugins(config.plugins)
    draft = functools.cache(lambda: draft_of(config, target))

    def other_draft(description: Mapping[str, Any]) -> DraftSource | DraftHeadSource | None:
        keys = [key.name for key in fields(DraftConfig)]
        unknown = [key for key in description if key not in keys]
        if unknown or not description:
            raise UserError(
                f"methods= names a draft by {unknown or 'nothing'}; write {{draft: {{layers: [0, 1]}}}}, with keys of "
                f"{', '.join(keys)}",
                field="draft",
                code="unknown",
            )
        return draft_of(replace(config, draft=DraftConfig(**description)), target)

    return Resources(config.adapter, draft, target.tokenizer, config.retrieval, target.model, drafts=other_draft)


def next_command(config: UsesModel, following: str) -> str:
    """What to type next: a command, its keys, and the model that this one ran with."""
    return f"keepsight {following} model.id={shlex.quote(config.model.id)}"
