"""Draft sources: where the methods that observe with a drafted answer (SpecKV, SpecPC) get their draft model.

A source is a field of a method; `source.of(target)` is the draft model for a base model (`target`). Not every base
model has a smaller sibling with the same tokenizer, so the draft model may also be made of the base model's own layers,
as in self-speculative decoding (Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168). A draft head is no model of its
own: it continues from the base model's features.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.files import file_digest
from keepsight.models.decoder import decoder_layers, entry_owners
from keepsight.models.draft_head import PICKLE, WEIGHTS, EagleHead
from keepsight.models.model_files import packaged_of
from keepsight.models.targets import Target, load_target, outline_target

_DRAFTS: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], PreTrainedModel]] = WeakKeyDictionary()
"""For each base model, the drafts made of its layers; nothing is stored on the model itself."""


class DraftSource(Protocol):
    """Source of the draft model for a base model. Hashable: methods with equal sources can share one draft."""

    @property
    def name(self) -> str:
        """The source's name in tables and plots."""
        ...

    def of(self, target: PreTrainedModel) -> PreTrainedModel:
        """The draft model, in evaluation mode; the same one at every call."""
        ...


@dataclass(frozen=True)
class LayerSubset:
    """Some of the base model's layers between its embedding and its lm_head; the weights are shared, not copied.

    Attributes:
        layers: Indices of the layers to keep, ascending.

    Raises:
        UserError: `layers` is empty or does not ascend; or, when it is first used, the base model has no such layer.
    """

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        layers = []
        layer: Any
        for layer in self.layers:
            if getattr(layer, "ndim", None) == 0:  # a number of numpy or torch
                layer = layer.item()
            layers.append(layer)
        object.__setattr__(self, "layers", tuple(layers))
        if not self.layers:
            raise UserError(
                "draft layers [] keep nothing; name the layers of the base model to keep, such as [0,1,5]",
                field="draft.layers",
                code="range",
            )
        if any(type(layer) is not int or layer < 0 for layer in self.layers):
            raise UserError(
                f"draft layers {list(self.layers)} must be whole numbers, counted from 0",
                field="draft.layers",
                code="type",
            )
        if list(self.layers) != sorted(set(self.layers)):
            raise UserError(
                f"draft layers {list(self.layers)} must ascend, each named once", field="draft.layers", code="conflict"
            )

    @property
    def name(self) -> str:
        """The layers, such as `layers 0-3,7,9-11`."""
        starts = [layer for layer in self.layers if layer - 1 not in self.layers]
        ends = [layer for layer in self.layers if layer + 1 not in self.layers]
        runs = []
        for start, end in zip(starts, ends, strict=True):
            if start == end:
                runs.append(str(start))
            else:
                runs.append(f"{start}-{end}")
        return f"layers {','.join(runs)}"

    def of(self, target: PreTrainedModel) -> PreTrainedModel:
        """The model of these layers, made once per base model; a `UserError` if that has no such layer."""
        drafts = _DRAFTS.setdefault(target, {})
        if self.layers not in drafts:
            highest = self.layers[-1]
            count = target.config.get_text_config().num_hidden_layers
            if highest >= count:
                raise UserError(
                    f"draft layer {highest} is out of range: the base model's layers are 0 to {count - 1}",
                    field="draft.layers",
                    code="range",
                )
            drafts[self.layers] = keep_layers(target, self.layers)
        return drafts[self.layers]


@dataclass(frozen=True)
class LoadedDraft:
    """Another model with the base model's vocabulary, loaded already.

    Attributes:
        name: Hub id or folder.
        version: Revision or digest of its weights, as `Target.version`.
        model: The model, in evaluation mode, without gradients on its parameters.
    """

    name: str
    version: str
    model: PreTrainedModel = field(compare=False, repr=False)

    def of(self, target: PreTrainedModel) -> PreTrainedModel:
        """The loaded model, for any base model."""
        return self.model


@dataclass(frozen=True)
class NamedDraft:
    """Another model with the base model's vocabulary, which is loaded when it is first used; `named_draft` makes it.

    Attributes:
        name: Hub id or folder.
        version: Revision or digest of its weights, as `Target.version`.
        options: Arguments of `load_target`.
    """

    name: str
    version: str
    options: Mapping[str, Any] = field(compare=False, repr=False)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, in evaluation mode; a `UserError` if it cannot be loaded."""
        return load_target(self.name, **self.options).model

    def of(self, target: PreTrainedModel) -> PreTrainedModel:
        """The model, for any base model: `named_draft` has compared the vocabularies."""
        return self.model


@dataclass(frozen=True)
class DraftHeadSource:
    """A draft head, and the layers of the base model whose outputs it reads.

    Attributes:
        name: Hub id or folder.
        layers: The layers.
        head: The head, on the base model's device and in its dtype; None for one that is loaded when it is first used.
        folder: The folder that it is loaded from.
        digest: `sha256:...` of its weights, by which results are told apart; empty where `head` itself does.
    """

    name: str
    layers: tuple[int, ...]
    head: EagleHead | None = field(default=None, repr=False)
    folder: Path | None = field(default=None, compare=False, repr=False)
    digest: str = ""

    def of(self, target: PreTrainedModel) -> EagleHead:
        """The head for its base model, the same one at every call; a `UserError` if its weights cannot be loaded."""
        if self.head is not None:
            return self.head
        assert self.folder is not None
        heads = _HEADS.setdefault(target, {})
        if self not in heads:
            heads[self] = EagleHead.load(self.folder, target)
        return heads[self]


_HEADS: WeakKeyDictionary[PreTrainedModel, dict[DraftHeadSource, EagleHead]] = WeakKeyDictionary()
"""For each base model, its draft heads that were loaded from folders."""


def named_head(name: str, folder: Path, target: PreTrainedModel) -> DraftHeadSource:
    """A draft head in a folder, which is loaded again, for its base model, when it is first used.

    Args:
        name: Hub id or folder.
        folder: The folder.
        target: The base model, which may be on the meta device.

    Raises:
        UserError: the folder holds no head, or one of another base model.
    """
    head = EagleHead.load(folder, target)
    weights = folder / WEIGHTS
    if not weights.is_file():
        weights = folder / PICKLE
    source = DraftHeadSource(name, head.layers_of(target), folder=folder, digest=file_digest(weights))
    if target.device.type != "meta":
        _HEADS.setdefault(target, {})[source] = head
    return source


def named_draft(model_id: str, target: Target, *, revision: str | None = None, **options: Any) -> NamedDraft:
    """A draft model for a base model, which is loaded when it is first used.

    Args:
        model_id: Hub id or folder. If a recipe names a packaged file of the draft, it is used as for a base model.
        target: The base model, which may be on the meta device.
        revision: Branch, tag or commit on the Hub.
        options: The `dtype`, `device` and `attention` of `load_target`.

    Raises:
        UserError: its configuration or tokenizer cannot be read, or has another vocabulary than the base model's.
    """
    files = {"revision": revision, **packaged_of(model_id)}
    outline = outline_target(model_id, **files)
    _check_vocabulary(outline, target)
    return NamedDraft(outline.name, outline.version, {**files, **options})


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of some of a model's layers, in the order of these indices, over the same tensors.

    It has its own modules and configuration: its layers are numbered from 0 in its caches, and its attention function
    can be switched independently. Adapters attached to the model are left out. The tensors must not be moved or cast on
    one of the two alone.

    Raises:
        UserError: layers of the model read the entries of others, or its configuration derives the kinds of its layers.
    """
    kind = model.config.model_type
    config = model.config.get_text_config()
    if entry_owners(model.config) != list(range(config.num_hidden_layers)):
        raise UserError(
            f"draft.layers: layers of {kind} read the entries of others, so that none can be left out",
            field="draft.layers",
            code="model",
        )
    if isinstance(getattr(type(config), config.attribute_map.get("layer_types", "layer_types"), None), property):
        raise UserError(
            f"draft.layers: {kind} derives the kinds of its layers from their places; take another draft",
            field="draft.layers",
            code="model",
        )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            memo[id(module)] = copy.deepcopy(module.get_base_layer(), memo)
    stack: Any = decoder_layers(model)
    kept = [copy.deepcopy(stack[layer], memo) for layer in layers]
    memo[id(stack)] = nn.ModuleList(kept)
    plain = copy.copy(model)  # without the record of its adapters
    plain.__dict__.pop("peft_config", None)
    draft = copy.deepcopy(plain, memo)
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    config = draft.config.get_text_config()
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    return draft


def _check_vocabulary(draft: Target, target: Target) -> None:
    draft_ids = draft.tokenizer.get_vocab()
    target_ids = target.tokenizer.get_vocab()
    ids = {**draft_ids, **target_ids}
    differing = [token for token in ids if draft_ids.get(token) != target_ids.get(token)]
    if not differing:
        return
    token = min(differing, key=ids.__getitem__)
    in_draft = f"id {draft_ids[token]}" if token in draft_ids else "missing"
    in_target = f"id {target_ids[token]}" if token in target_ids else "missing"
    raise UserError(
        f"draft {draft.name!r} has another vocabulary than the base model {target.name!r}: token {token!r} is "
        f"{in_draft} there and {in_target} in the base model; choose a draft of its family",
        field="draft",
        code="model",
    )
