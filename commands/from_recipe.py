"""From a configuration to the loaded base model, and the adapter, retrieval head and draft that it names."""

import functools
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight.commands.config_shared import ModelConfig, UsesMethods, UsesModel
from keepsight.errors import UserError
from keepsight.models.artifacts import fetch
from keepsight.models.draft_sources import DraftHeadSource, DraftSource, LayerSubset, load_draft, load_head
from keepsight.models.model_files import located, packaged_of
from keepsight.models.targets import Target, load_target, outline_model, outline_target
from keepsight.runtime.methods.make import Later, Resources, ResourcesLater


def target_of(config: UsesModel, device_map: Mapping[str, str] | None = None) -> Target:
    """Load the base model; a `device_map` takes precedence over the configuration's."""
    model = config.model
    names = ("dtype", "device", "attention", "template", "chat_template", "quantize")
    given = {name: getattr(model, name) for name in names}
    return load_target(**_files_of(model), **given, device_map=device_map or model.device_map)


def training_target(config: UsesModel, device_map: Mapping[str, str] | None = None) -> Target:
    """Load the base model in its `training_dtype`, for data and training."""
    return target_of(replace(config, model=replace(config.model, dtype=training_dtype(config.model))), device_map)


def training_dtype(model: ModelConfig) -> str:
    """The base model's dtype; `auto` is bfloat16 also on CPUs with AMX, which prefill three times faster in it.

    CPUs that have only bfloat16 vector instructions multiply matrices in it at half the speed of float32.
    """
    if model.dtype != "auto":
        return model.dtype
    on_cpu = model.device == "cpu" or (model.device == "auto" and not torch.cuda.is_available())
    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.7
    return "float32" if on_cpu and not known.get("amx_bf16") else "bfloat16"


def outline_of(config: UsesModel) -> PreTrainedModel:
    """The base model without its weights, from its configuration alone."""
    return outline_model(**_files_of(config.model), dtype=config.model.dtype)


def without_weights(config: UsesModel) -> Target:
    """The base model without its weights: for checks, or if another process generates the answers."""
    model = config.model
    return outline_target(**_files_of(model), template=model.template, chat_template=model.chat_template)


def _files_of(model: ModelConfig) -> dict[str, Any]:
    """Where the files of a model come from, as every loader takes it."""
    return {
        "model_id": model.id,
        "revision": model.revision,
        "packaged": model.own_file,
        "packaged_digest": model.packaged_digest,
        "trust_remote_code": model.trust_remote_code,
    }


def draft_named(config: UsesMethods) -> Later | None:
    """A placeholder for the draft until the base model is loaded, its files located; None if no draft is named.

    UserError if several kinds of draft are named, or its files cannot be found.
    """
    named = config.draft
    kinds = {"draft.layers": named.layers, "draft.id": named.id, "draft.head": named.head}
    given = [key for key, value in kinds.items() if value is not None]
    if len(given) > 1:
        one, other = given[:2]
        raise UserError(f"{one} and {other}={kinds[other]} name two drafts; add {one}=null or {other}=null")
    if named.head is not None:
        fetch(named.head, named.revision)
    if named.id is not None:
        located(named.id, named.revision, **packaged_of(named.id))
    if named.layers is not None:
        LayerSubset(tuple(named.layers))
    return Later("draft") if given else None


def draft_of(config: UsesMethods, target: Target) -> DraftSource | DraftHeadSource | None:
    """The draft, None if none is named; UserError as in `draft_named`, or if it does not fit the base model."""
    named, model = config.draft, config.model
    if draft_named(config) is None:
        return None
    if named.head is not None:
        return load_head(named.head, fetch(named.head, named.revision), target.model)
    if named.id is not None:
        options = {"dtype": model.dtype, "device": model.device, "attention": model.attention}
        return load_draft(named.id, target, revision=named.revision, **options)
    draft = LayerSubset(tuple(named.layers or ()))
    draft.of(target.model)
    return draft


def resources_of(config: UsesMethods, target: Target) -> Resources:
    """The resources of methods: adapter, draft and retrieval head, and the base model's tokenizer."""
    draft = functools.cache(lambda: draft_of(config, target))
    return Resources(config.adapter, draft, target.tokenizer, config.retrieval, target.model)


def resources_later(config: UsesMethods) -> Resources:
    """`resources_of` before the base model is loaded, to check methods."""
    draft = functools.cache(lambda: draft_named(config))
    return ResourcesLater(config.adapter, draft, Later("tokenizer"), config.retrieval)


def next_command(config: UsesModel, following: str) -> str:
    """The line that says what to type next: a command, its keys, and the model that this one ran with."""
    return f"next: keepsight {following} model.id={shlex.quote(config.model.id)}"
