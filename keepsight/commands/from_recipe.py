"""From a recipe to a loaded target, the adapter, the retrieval head and the draft it names."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight.commands.config import ModelConfig, Recipe
from keepsight.errors import UserError
from keepsight.models.artifacts import fetch
from keepsight.models.draft_sources import DraftHeadSource, DraftSource, LayerSubset, load_draft, load_head
from keepsight.models.targets import Target, load_target, outline_model, outline_target
from keepsight.runtime.methods.resources import Later, Resources, ResourcesLater


def target_of(recipe: Recipe, device_map: Mapping[str, str] | None = None) -> Target:
    """Load the recipe's target; a `device_map` goes before the recipe's."""
    model = recipe.model
    return load_target(
        **_files_of(model),
        dtype=model.dtype,
        device=model.device,
        attention=model.attention,
        template=model.template,
        quantize=model.quantize,
        device_map=device_map or model.device_map,
    )


def training_target(recipe: Recipe, device_map: Mapping[str, str] | None = None) -> Target:
    """The recipe's target in its `training_dtype`, for data and training."""
    return target_of(replace(recipe, model=replace(recipe.model, dtype=training_dtype(recipe.model))), device_map)


def training_dtype(model: ModelConfig) -> str:
    """The target's dtype; `auto` is bfloat16 also on CPUs with AMX, which read three times faster in it.

    CPUs without it whose vector instructions know bfloat16 multiply matrices in it at half the speed of float32.
    """
    if model.dtype != "auto":
        return model.dtype
    on_cpu = model.device == "cpu" or (model.device == "auto" and not torch.cuda.is_available())
    return "float32" if on_cpu and not torch.cpu.get_capabilities().get("amx_bf16") else "bfloat16"


def outline_of(recipe: Recipe) -> PreTrainedModel:
    """The recipe's target without its weights, from its configuration alone."""
    return outline_model(**_files_of(recipe.model), dtype=recipe.model.dtype)


def answered_elsewhere(recipe: Recipe) -> Target:
    """The recipe's target without its weights, for answers that do not come from this process."""
    return outline_target(**_files_of(recipe.model), template=recipe.model.template)


def _files_of(model: ModelConfig) -> dict[str, Any]:
    """Where the files of a target come from, as every loader takes it."""
    return {
        "model_id": model.id,
        "revision": model.revision,
        "packaged": model.own_file,
        "packaged_digest": model.packaged_digest,
        "trust_remote_code": model.trust_remote_code,
    }


def draft_of(recipe: Recipe, target: Target) -> DraftSource | DraftHeadSource | None:
    """The recipe's draft, found to fit the target; None when the recipe names none.

    Raises:
        UserError: several kinds of draft are named, or the one that is named does not fit the target.
    """
    named, model = recipe.draft, recipe.model
    kinds = {"draft.layers": named.layers, "draft.id": named.id, "draft.head": named.head}
    given = [key for key, value in kinds.items() if value is not None]
    if len(given) > 1:
        second = given[1]
        raise UserError(
            f"{given[0]} and {second}={kinds[second]} name two drafts; add {given[0]}=null or {second}=null"
        )
    if named.head is not None:
        return load_head(named.head, fetch(named.head, named.revision), target.model)
    if named.id is not None:
        options = {"dtype": model.dtype, "device": model.device, "attention": model.attention}
        return load_draft(named.id, target, revision=named.revision, **options)
    if named.layers is None:
        return None
    draft = LayerSubset(tuple(named.layers))
    draft.of(target.model)
    return draft


def resources_of(recipe: Recipe, target: Target) -> Resources:
    """What methods may need: the recipe's adapter, draft and retrieval head, and the target's tokenizer."""
    draft = functools.cache(lambda: draft_of(recipe, target))
    return Resources(recipe.adapter, draft, target.tokenizer, recipe.retrieval, target.model)


def resources_later(recipe: Recipe) -> Resources:
    """The same before the target is loaded, for methods that `bind` then completes."""
    named = recipe.draft
    draft = Later("draft") if any(each is not None for each in (named.layers, named.id, named.head)) else None
    return ResourcesLater(recipe.adapter, draft, Later("tokenizer"), recipe.retrieval)
