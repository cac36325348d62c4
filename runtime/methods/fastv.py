"""FastV (arXiv 2403.06764): tokens of images that receive little attention leave the prefill after a few layers."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import Budget, Positive, UserError
from keepsight.models.decoder import FULL, decoder_of, layer_kinds
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
    """Leaves out, from a layer on, the tokens of images that the prompt's last token attends to least (section 4.1).

    Their hidden states go no further, so that the layers from there on compute less and hold fewer entries; earlier
    layers keep all. Tokens stay at their positions. Only those of images are chosen from, once (the form with a cache).

    Attributes:
        budget: Tokens of the prompt's images that stay, or their share, 1 - R in the paper.
        layer: K: the number of layers that read all tokens; the last of them ranks tokens by its attention.
    """

    budget: Budget
    layer: Positive = 2
    reads_images = True

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        images: Images | None = options.get("images")
        if images is None:
            raise UserError("FastV leaves out tokens of images, and the prompt has none; for text take SnapKV")
        if len(input_ids) != 1:
            raise UserError("FastV: each prompt keeps different tokens; give one prompt at a time")
        if mask is not None and not bool(mask.all()):
            raise UserError("FastV: the prompt is padded; give it without padding")
        kinds = layer_kinds(model.config)
        if {*kinds} != {FULL}:
            raise UserError(f"FastV: {model.config.model_type} has layers with a bounded cache; take SnapKV")
        if self.layer >= len(kinds):
            raise UserError(f"FastV: layer {self.layer} must be below the model's {len(kinds)} layers")
        if getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None):
            raise UserError(f"FastV: {model.config.model_type} reads its images in several layers; take SnapKV")
        of_images = images.places_in(model, input_ids)[0]
        stays = super().budget_for(int(of_images.sum()))
        if stays >= int(of_images.sum()):
            return prefill(model, input_ids, mask, needs=Needs(), **options)
        pruning = _Pruning(self.layer, stays, of_images)
        with pruning.attached(model):
            state = prefill(model, input_ids, mask, needs=Needs(window=1), after_layer=pruning.after, **options)
        return state.unrecorded()

    @override
    def budget_for(self, length: int) -> int:
        return length  # the budget counts image tokens alone


class _Pruning:
    """A prefill that drops image tokens before `layer`; `stays` of the tokens marked in `of_images` [N] bool remain."""

    def __init__(self, layer: int, stays: int, of_images: Tensor) -> None:
        self._layer, self._stays, self._of_images = layer, stays, of_images
        self._kept = of_images  # [C] int64, once they are chosen

    def attached(self, model: PreTrainedModel) -> ExitStack:
        """Hooks that cut the inputs of the layers from the first one on; they are removed on exit."""
        hooks, layers = ExitStack(), decoder_of(model).layers
        for index in range(self._layer, len(layers)):
            hook = layers[index].register_forward_pre_hook(self._cutting(index == self._layer), with_kwargs=True)
            hooks.callback(hook.remove)
        return hooks

    def after(self, cache: Cache, place: int, layer: KeptLayer) -> KeptLayer:
        """Choose after the last layer that reads all; later layers hold fewer entries than they have seen."""
        if place == self._layer - 1:
            attention = PromptWindow(1).score(layer, "mean")[0].mean(dim=0)
            images = self._of_images.to(attention.device)
            top = top_mask(attention.masked_fill(~images, -torch.inf), self._stays)
            self._kept = (top | ~images).nonzero()[:, 0]
        if place < self._layer:
            return layer
        cut = layer.share()
        cut.seen, cut.real = len(self._of_images), torch.ones_like(layer.keys[..., 0], dtype=torch.bool)
        return cut

    def _cutting(self, first: bool) -> Callable[..., Any]:
        @in_this_thread
        def cut(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            kept, named = self._kept, dict(named)
            if first and inputs:
                inputs = inputs[0][:, kept], *inputs[1:]
            elif first:
                named["hidden_states"] = named["hidden_states"][:, kept]
            named["attention_mask"] = _cut_mask(named.get("attention_mask"), kept)
            named["position_embeddings"] = tuple(each[..., kept, :] for each in named["position_embeddings"])
            named["position_ids"] = None  # read by flash attention alone, which would take the gaps for other prompts
            return inputs, named

        return cut


def _cut_mask(mask: Any, kept: Tensor) -> Any:
    """A model's mask for some of the tokens: [B, 1, N, N], [B, N] for flash attention, or None."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise UserError("FastV: flex_attention's mask cannot be cut; load the model with attention=sdpa")
    return mask[..., kept] if mask.dim() == 2 else mask[..., kept, :][..., kept]
