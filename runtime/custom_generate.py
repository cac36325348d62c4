"""The hook of transformers: `model.generate(**inputs, custom_generate=...)`."""

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import require_supported
from keepsight.runtime.decode import Decoded
from keepsight.runtime.generate_request import GenerateRequest, Past
from keepsight.runtime.images import IMAGE_INPUTS, Images
from keepsight.runtime.prefill import positions_of

_READ = IMAGE_INPUTS | {"attention_mask", "logits_to_keep", "past_key_values", "position_ids", "use_cache"}


class CustomGenerate(ABC):
    """What transformers calls in place of its own decoding: `model.generate(**inputs, custom_generate=...)`.

    Attributes:
        reads_images: Whether prompts may hold images.
    """

    reads_images = False

    @abstractmethod
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        """Answer prompts."""

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The hook that transformers calls.

        Returns:
            As `model.generate`: prompt and answer, [B, N + T] int64; with `return_dict_in_generate`, the output that
            holds them, their `scores` and `logits` if asked for, and `past_key_values` to go on from.

        Raises:
            UserError: `model.generate` was given something that this cannot honour.
        """
        require_supported(model)
        options = _options_of_generate()
        _require_honoured(generation_config, options, model_kwargs)
        mask, past = model_kwargs.get("attention_mask"), self._past(input_ids, model_kwargs.get("past_key_values"))
        if images := Images.among(model_kwargs, options.get("kwargs")):
            self._require_images(past)
        if past is None:
            _require_padded_on_the_left(mask, input_ids, None if images else model_kwargs.get("position_ids"))
        logits, scores = _Recorder(), _Recorder()
        request = GenerateRequest(
            input_ids,
            mask if past is None else None,
            past,
            generation_config.prefill_chunk_size,
            int(generation_config.pad_token_id or 0),
            stopping_criteria,
            LogitsProcessorList(
                [
                    *([logits] if generation_config.output_logits else []),
                    *logits_processor,
                    *([scores] if generation_config.output_scores else []),
                ]
            ),
            bool(generation_config.do_sample),
            options.get("streamer"),
            bool(generation_config.return_dict_in_generate),
            images,
        )
        decoded = self.answer(model, request)
        if not generation_config.return_dict_in_generate:
            return decoded.ids
        output: dict[str, Any] = {"sequences": decoded.ids, "scores": scores.recorded, "logits": logits.recorded}
        return GenerateDecoderOnlyOutput(**output, past_key_values=Past(self, decoded))

    def _require_images(self, past: Past | None) -> None:
        if past is not None:
            raise UserError("custom_generate: only the first turn may hold images; leave out pixel_values afterwards")
        if not self.reads_images:
            raise UserError(
                f"custom_generate: {type(self).__name__} reads no images (pixel_values); take SpecPC, or a "
                "method that evicts from the cache, such as SnapKV or LookaheadKV"
            )

    def _past(self, input_ids: Tensor, given: Cache | None) -> Past | None:
        """The given past, if `input_ids` continue it and this can go on from it; None for an empty one."""
        if not isinstance(given, Past):
            if given is not None and (given.get_seq_length() or getattr(given, "_is_user_defined", False)):
                raise UserError(
                    "custom_generate: past_key_values must be those of a keepsight answer with "
                    f"return_dict_in_generate=True, not a {type(given).__name__} of another origin"
                )
            return None
        if len(input_ids) != 1:
            raise UserError("custom_generate: past_key_values go on with one sequence at a time; give [1, n] ids")
        read = given.ids.shape[1]
        if input_ids.shape[1] <= read or not torch.equal(input_ids[:, :read], given.ids):
            raise UserError(
                f"custom_generate: with past_key_values the input_ids must begin with the {read} tokens already read, "
                "as output.sequences does, and go on with the next turn"
            )
        if given.method != self and not given.state.joins:
            raise UserError(
                f"custom_generate: past_key_values of {type(given.method).__name__} are stored in its own form; go on "
                "with the same method"
            )
        return given


class _Recorder(LogitsProcessor):
    """Records the logits [B, V] of each token and leaves them as they are; `recorded` is None before the first."""

    recorded: tuple[Tensor, ...] | None = None

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.recorded = (*(self.recorded or ()), scores.clone())
        return scores


def _options_of_generate() -> dict[str, Any]:
    """The arguments of the running `model.generate`.

    transformers shows a streamer the prompt but gives it to no callable of ours, and silently drops an assistant
    model (5.10 to 5.23); its frame is the only place where they can be had.
    """
    code, frame = inspect.unwrap(vars(GenerationMixin)["generate"]).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _require_honoured(config: GenerationConfig, options: dict[str, Any], inputs: dict[str, Any]) -> None:
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UserError(
            f"custom_generate: {mode.replace('_', ' ')} (num_beams={config.num_beams}) is not possible with a "
            "compressed cache; decode greedily or sample, and leave out num_beams and assistants"
        )
    given = {name for name, value in inputs.items() if value is not None and value != {}} - _READ
    given |= {name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)}
    given |= {"synced_gpus"} if options.get("synced_gpus") else set()
    given |= {"cache_implementation"} & options.get("kwargs", {}).keys()  # the model's own is no wish
    if given:
        raise UserError(
            f"custom_generate: {min(given)} is not supported; leave it out, or call generate without a method"
        )


def _require_padded_on_the_left(mask: Tensor | None, input_ids: Tensor, positions: Tensor | None) -> None:
    width = input_ids.shape[1]
    if odd := [each.shape[-1] for each in (mask, positions) if each is not None and each.shape[-1] != width]:
        raise UserError(f"custom_generate: attention_mask or position_ids are for {odd[0]} tokens, not for {width}")
    if mask is not None and bool((mask[:, :-1] > mask[:, 1:]).any()):
        raise UserError(
            "custom_generate: the attention_mask hides tokens after a prompt's first; pad on the left, and give an "
            "attention_mask where prompts hold the pad token"
        )
    if positions is not None and bool((positions != positions_of(mask, width, input_ids.device)).any()):
        raise UserError("custom_generate: position_ids other than 0, 1, 2, ... are not supported; leave them out")
