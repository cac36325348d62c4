"""Prompts with images: the model's inputs beside the token ids, and the positions of the tokens."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import decoder_of
from keepsight.runtime.features import in_this_thread

PIXELS = ("pixel_values", "mm_encoder_outputs")
"""Inputs with the images themselves: as the processor made them, or encoded by `model.generate`."""
_NO_KINDS = "mm_token_type_ids, which say where images are, are missing; pass everything that the processor returns"
_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Inputs [B, N] that say which tokens are those of images; models take one of them."""
_POSITIONS = ("position_ids", "cache_position")
"""What a decoder is told of its tokens' positions, which follows from the inputs of the model."""
IMAGE_INPUTS = frozenset({*PIXELS, "image_grid_thw", *_KINDS})


@dataclass(frozen=True)
class Images:
    """The images in the prompts of a batch.

    Attributes:
        inputs: Inputs of the model for them, as its processor names them; see `IMAGE_INPUTS`.
        positions: [3, B, N] int64: the tokens' M-RoPE positions, where they are known; else None.
        processed: The inputs as the processor made them, for another model that reads the same images. Empty where they
            are not kept: in states from disk, batches of states and shortened prompts.
    """

    inputs: Mapping[str, Any]
    positions: Tensor | None = None
    processed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def among(
        cls, inputs: Mapping[str, Any], processed: Mapping[str, Any] | None = None, copies: int = 1, rows: int = 1
    ) -> "Images | None":
        """The images among a model's inputs; None for none.

        `processed` are the inputs before any image was encoded and before each prompt became `copies` of the `rows`.
        """
        if not any(inputs.get(name) for name in PIXELS[1:]) and inputs.get(PIXELS[0]) is None:
            return None
        positions = inputs.get("position_ids")
        rope_positions = None
        if positions is not None and positions.dim() == 3:
            rope_positions = positions[-3:]
        raw_inputs = _image_inputs(processed or inputs)
        if copies > 1 and rows == copies:
            raw_inputs = {name: torch.cat([tensor] * copies) for name, tensor in raw_inputs.items()}
        elif copies > 1:
            raw_inputs = {}
        return cls(_image_inputs(inputs), rope_positions, raw_inputs)

    def with_tokens(self, input_ids: Tensor) -> Mapping[str, Any]:
        """All that the model takes for prompts of these tokens [B, N]."""
        return {"input_ids": input_ids, **self.inputs}

    def read_by(self, other: PreTrainedModel, length: int) -> "Images":
        """The same images for another model with the same processor, in prompts extended by text to `length` tokens.

        Raises:
            UserError: what the processor made is not kept.
        """
        if not self.processed:
            raise UserError(
                "a draft model has to read the images again, which are not kept in saved states, batches or shortened "
                "prompts, and with num_return_sequences it reads the images of one prompt alone; give the prompts one "
                "by one",
                field="pixel_values",
                code="conflict",
            )
        inputs = {}
        for name, tensor in self.processed.items():
            tensor = tensor.to(other.device)
            if name in _KINDS:
                tensor = functional.pad(tensor, (0, length - tensor.shape[1]))
            inputs[name] = tensor
        return Images(inputs)

    def shortened(self, model: PreTrainedModel, input_ids: Tensor, kept: Tensor) -> "Images":
        """The images of a prompt [1, N] that is shortened to its tokens `kept` [C] int64, ascending.

        The tokens are embedded before some are left out. Positions are renumbered without gaps: 0, 1, 2, ... for text,
        and the same rows and columns for a whole image. A `UserError` if the model's images cannot be read in part.
        """
        if "token_type_ids" in self.inputs:
            raise UserError(
                f"the tokens of an image see one another in {model.config.model_type}, so that none can be left out; "
                "take a method that evicts from the cache, such as LookaheadKV",
                field="pixel_values",
                code="model",
            )
        positions = self.positions_in(model, input_ids, None)
        if positions is not None:
            positions = positions[..., kept].unique(return_inverse=True)[1]
        options = _decoder_options(model, self.with_tokens(input_ids))
        if any("deepstack" in name and value is not None for name, value in options.items()):
            raise UserError(
                f"{model.config.model_type} reads its images in several layers, so that none of their tokens can be "
                "left out; take a method that evicts from the cache, such as LookaheadKV",
                field="pixel_values",
                code="model",
            )
        return _Embedded({"inputs_embeds": options["inputs_embeds"][:, kept]}, positions)

    def embeddings_alone(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """The input embeddings [B, N, hidden] of prompts [B, N], if the decoder reads nothing else of the images.

        The model then reads these embeddings as it reads the tokens and pixels themselves, and more can be appended to
        them. It encodes the images for them; its decoder reads nothing. None where the model builds the attention mask
        outside its decoder (tokens of an image that see one another) or hands images to several layers. `mask` [B, N]
        is 0 for padding.

        Raises:
            UserError: the model takes no images.
        """
        self.require_read_by(model)
        named = inspect.signature(decoder_of(model).forward).parameters
        if "token_type_ids" in self.inputs or any("deepstack" in name for name in named):
            return None  # known before the images are encoded
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # which change no embedding
        of_tokens = {"attention_mask": mask, "position_ids": positions}
        options = _decoder_options(model, {**self.with_tokens(input_ids), **of_tokens})
        embeddings: Tensor | None = options.pop("inputs_embeds", None)
        decoder_mask = options.pop("attention_mask", None)
        has_own_mask = decoder_mask is not None and (not isinstance(decoder_mask, Tensor) or decoder_mask.dim() != 2)
        for name in _POSITIONS:
            options.pop(name, None)
        if embeddings is None or has_own_mask or any(map(_has_tensors, options.values())):
            return None
        again = _decoder_options(model, {"inputs_embeds": embeddings, **of_tokens})
        return embeddings if again.get("inputs_embeds") is embeddings else None  # not scaled a second time

    def positions_in(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """The positions [3, B, N] that a model with M-RoPE gives the tokens; None where they are as in text.

        Raises:
            UserError: the processor's `mm_token_type_ids` are missing.
        """
        inner: Any = getattr(model, "model", None)
        if self.positions is not None or not hasattr(inner, "get_rope_index"):
            return self.positions
        if "mm_token_type_ids" not in self.inputs:
            raise UserError(_NO_KINDS, field="mm_token_type_ids", code="missing")
        options = {name: value for name, value in self.inputs.items() if name not in PIXELS}
        positions: Tensor = inner.get_rope_index(input_ids, attention_mask=mask, **options)[0]
        return positions

    def places_in(self, model: PreTrainedModel, input_ids: Tensor) -> Tensor:
        """[B, N] bool, which of the prompts' tokens are those of images.

        Raises:
            UserError: neither the processor nor the model's configuration says so.
        """
        for name in _KINDS:
            if name in self.inputs:
                kinds: Tensor = self.inputs[name]
                return kinds.bool()
        image_token = getattr(model.config, "image_token_id", None)
        if image_token is None:
            raise UserError(_NO_KINDS, field="mm_token_type_ids", code="missing")
        return input_ids == image_token

    def require_read_by(self, model: PreTrainedModel) -> None:
        """Refuse models that would silently ignore the images.

        Raises:
            UserError: the model takes no images.
        """
        if "pixel_values" not in inspect.signature(model.forward).parameters:
            model_type = model.config.model_type
            raise UserError(
                f"pixel_values is not supported by {model_type}, which reads no images; leave it out, or take one that "
                "does",
                field="pixel_values",
                code="model",
            )


def _image_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: inputs[name] for name in IMAGE_INPUTS if inputs.get(name) is not None}


class _Embedded(Images):
    """The tokens themselves are among the inputs, as embeddings."""

    @override
    def with_tokens(self, input_ids: Tensor) -> Mapping[str, Any]:
        return self.inputs


class _DecoderReached(Exception):
    """Raised by a hook to end a forward pass where the decoder begins."""


@torch.no_grad()
def _decoder_options(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the decoder is called with, by name, for a prompt with images; it reads nothing."""

    @in_this_thread
    def stop(module: Any, args: Any, options: dict[str, Any]) -> None:
        raise _DecoderReached(options)

    model = getattr(model, "_orig_mod", model)  # a compiled model's own forward pass cannot be ended
    hook = decoder_of(model).register_forward_pre_hook(stop, with_kwargs=True)
    options: dict[str, Any] = {}
    try:
        model(**inputs, use_cache=False)
    except _DecoderReached as reached:
        (options,) = reached.args
    finally:
        hook.remove()
    return dict(options)


def _has_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or holds values of its own that may be."""
    return isinstance(value, Tensor) or (isinstance(value, list | tuple | dict) and bool(value))
