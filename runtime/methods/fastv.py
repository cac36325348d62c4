"""FastV (arXiv 2403.06764): tokens of images that receive little attention leave the prefill after a few layers."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import Budget, Positive, UserError
from keepsight.models.decoder import FULL, decoder_layers, layer_kinds
from keepsight.runtime import registry
from keepsight.runtime.features import in_this_thread
from keepsight.runtime.generate import Method
from keepsight.runtime.images import Images
from keepsight.runtime.importance import top_mask
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import PromptWindow
from keepsight.runtime.state import Needs, State, prefill


@registry.method("fastv", label="FastV")
@dataclass(frozen=True)
class FastV(Method):
    """Leaves out, from a layer on, the tokens of images that the prompt's last token attends to least.

    FastV (arXiv 2403.06764), section 4.1. Their hidden states go no further, so that the layers from there on compute
    less and hold fewer entries; earlier layers keep all. Tokens stay at their positions. Only those of images are
    chosen from, once (the form with a cache).

    Attributes:
        budget: Tokens of the prompt's images that stay, or their share, 1 - R in the paper.
        layer: K: the number of layers that read all tokens; the last of them ranks tokens by its attention.
    """

    section = "shorten"
    cost = "none; later layers read fewer tokens"
    budget: Budget
    layer: Positive = 2
    reads_images = True

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        kinds = layer_kinds(model.config)
        if {*kinds} != {FULL}:
            raise UserError(
                f"FastV: {model.config.model_type} has layers with a bounded cache; take SnapKV",
                field="model",
                code="model",
            )
        if self.layer >= len(kinds):
            raise UserError(
                f"FastV: layer {self.layer} must be below the model's {len(kinds)} layers", field="layer", code="range"
            )
        if getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None):
            raise UserError(
                f"FastV: {model.config.model_type} reads its images in several layers; take SnapKV",
                field="model",
                code="model",
            )

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        images: Images | None = options.get("images")
        if images is None:
            raise UserError(
                "FastV leaves out tokens of images, and the prompt has none; for text take SnapKV",
                field="pixel_values",
                code="missing",
            )
        if len(input_ids) != 1:
            raise UserError(
                "FastV: each prompt keeps different tokens; give one prompt at a time", field="input_ids", code="range"
            )
        if mask is not None and not bool(mask.all()):
            raise UserError("FastV: the prompt is padded; give it without padding", field="attention_mask", code="data")
        self.check_model(model)

        is_image_token = images.places_in(model, input_ids)[0]
        image_tokens = int(is_image_token.sum())
        budget = super().budget_for(image_tokens)
        if budget >= image_tokens:
            return prefill(model, input_ids, mask, needs=Needs(), **options)
        pruning = _Pruning(self.layer, budget, is_image_token)
        with pruning.attached(model):
            state = prefill(model, input_ids, mask, needs=Needs(window=1), after_layer=pruning.after_layer, **options)
        return state.unrecorded()

    @override
    def budget_for(self, length: int) -> int:
        return length  # the budget counts image tokens alone


class _Pruning:
    """A prefill that drops image tokens on the way into one of the layers.

    Args:
        first_pruned: Index of the layer that is the first to read fewer tokens.
        budget: Number of image tokens that stay.
        is_image_token: [N] bool, the prompt's tokens of images.
    """

    def __init__(self, first_pruned: int, budget: int, is_image_token: Tensor) -> None:
        self._first_pruned = first_pruned
        self._budget = budget
        self._is_image_token = is_image_token
        self._kept_positions: Tensor | None = None  # [C] int64, once the layer before has ranked the tokens

    def attached(self, model: PreTrainedModel) -> ExitStack:
        """Hooks that cut the inputs of the layers from the first pruned one on; they are removed on exit."""
        hooks = ExitStack()
        for index, layer in enumerate(decoder_layers(model)):
            if index >= self._first_pruned:
                hook = _PruneInputs(self, cuts_hidden=index == self._first_pruned)
                hooks.callback(layer.register_forward_pre_hook(in_this_thread(hook), with_kwargs=True).remove)
        return hooks

    def after_layer(self, cache: Cache, index: int, layer: KeptLayer) -> KeptLayer:
        """Rank tokens after the last layer that reads all; later layers hold fewer entries than they have seen."""
        if index == self._first_pruned - 1:
            attention = PromptWindow(1).score(layer, "mean")[0].mean(dim=0)
            is_image_token = self._is_image_token.to(attention.device)
            top = top_mask(attention.masked_fill(~is_image_token, -torch.inf), self._budget)
            self._kept_positions = (top | ~is_image_token).nonzero()[:, 0]
        if index < self._first_pruned:
            return layer
        pruned = layer.share()
        pruned.seen = len(self._is_image_token)
        pruned.real = torch.ones_like(layer.keys[..., 0], dtype=torch.bool)
        return pruned

    @property
    def kept_positions(self) -> Tensor:
        """[C] int64: the positions of the tokens that stay, ascending."""
        assert self._kept_positions is not None
        return self._kept_positions


@dataclass(frozen=True)
class _PruneInputs:
    """A hook that cuts the inputs of a layer to the tokens that stay.

    Attributes:
        pruning: The prefill's pruning.
        cuts_hidden: Whether the hidden states are of all tokens still: those of later layers have been cut.
    """

    pruning: _Pruning
    cuts_hidden: bool

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kept = self.pruning.kept_positions
        kwargs = dict(kwargs)
        if self.cuts_hidden and args:
            args = args[0][:, kept], *args[1:]
        elif self.cuts_hidden:
            kwargs["hidden_states"] = kwargs["hidden_states"][:, kept]

        mask = kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = _pruned_mask(mask, kept)
        cosines, sines = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = (cosines[..., kept, :], sines[..., kept, :])
        kwargs["position_ids"] = None  # read by flash attention alone, which would take the gaps for other prompts
        return args, kwargs


def _pruned_mask(mask: Any, kept_positions: Tensor) -> Tensor:
    """A model's mask for some of the tokens: [B, 1, N, N], or [B, N] for flash attention."""
    if not isinstance(mask, Tensor):
        raise UserError(
            "FastV: flex_attention's mask cannot be cut; load the model with attention=sdpa",
            field="model.attention",
            code="model",
        )
    if mask.dim() == 2:
        return mask[..., kept_positions]
    return mask[..., kept_positions, :][..., kept_positions]
