"""Prompts with images: what a model takes beside their tokens, and the positions that it gives these."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.runtime.state import Needs

PIXELS = ("pixel_values", "mm_encoder_outputs")
"""Either of them holds the images: as the processor made them, or as `model.generate` has encoded them before."""
IMAGE_INPUTS = frozenset({*PIXELS, "image_grid_thw", "mm_token_type_ids", "token_type_ids"})


@dataclass(frozen=True)
class Images:
    """The images in the prompts of a batch.

    Attributes:
        inputs: Inputs of the model for them, as its processor names them; see `IMAGE_INPUTS`.
        positions: [3, B, N] int64: the positions of the prompts' tokens, where they are known and not as in text.
    """

    inputs: Mapping[str, Any]
    positions: Tensor | None = None

    @classmethod
    def among(cls, inputs: Mapping[str, Any]) -> "Images | None":
        """The images among a model's inputs; None where there are none."""
        if not any(inputs.get(name) for name in PIXELS[1:]) and inputs.get(PIXELS[0]) is None:
            return None
        positions = inputs.get("position_ids")
        known = positions[-3:] if positions is not None and positions.dim() == 3 else None
        return cls({name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}, known)

    def positions_in(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """The positions [3, B, N] that a model with M-RoPE gives the tokens; None where they are as in text.

        Raises:
            UserError: the processor's `mm_token_type_ids` are missing.
        """
        inner: Any = getattr(model, "model", None)
        if self.positions is not None or not hasattr(inner, "get_rope_index"):
            return self.positions
        if "mm_token_type_ids" not in self.inputs:
            raise UserError(
                "mm_token_type_ids, which say where images are, are missing; give all that the processor made"
            )
        named = {name: value for name, value in self.inputs.items() if name not in PIXELS}
        positions: Tensor = inner.get_rope_index(input_ids, attention_mask=mask, **named)[0]
        return positions

    def require_read_by(self, model: PreTrainedModel) -> None:
        """Refuse models that would pass over the images without a word.

        Raises:
            UserError: the model takes no images.
        """
        if "pixel_values" not in inspect.signature(model.forward).parameters:
            kind = model.config.model_type
            raise UserError(f"pixel_values is not supported by {kind}, which reads no images; leave it out")

    def require_observable(self, needs: Needs) -> None:
        """Refuse observers that look ahead: where there are `token_type_ids`, the tokens of an image see one another.

        Raises:
            UserError: tokens of an image would observe as if they saw only what is before them.
        """
        kinds = self.inputs.get("token_type_ids")
        if kinds is None:
            return
        observing = kinds if needs.received else kinds[:, max(kinds.shape[1] - needs.window, 0) :]
        if bool(torch.any(observing == 1)):
            raise UserError(
                "the tokens of an image see one another in this model, so that they cannot observe the prompt; take a "
                "shorter window, or a method that observes with tokens after the prompt, such as LookaheadKV"
            )
