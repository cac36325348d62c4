"""`generate`: a method computes the state of a prompt, and `decode` generates the answer from it.

A method is also a `custom_generate` of transformers: `model.generate(**inputs, custom_generate=SnapKV(128))`.
"""

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from typing_extensions import Self, final, override

from keepsight.errors import UnfitModel, UserError, require_whole
from keepsight.models.chat import ids_of
from keepsight.models.decoder import context_of, input_embedding, input_shape, require_supported
from keepsight.models.identity import Identity, adapters_digest, weights_digest
from keepsight.models.transformers_internals import arguments_of_generate, is_of_caller, put_tokenizer_back
from keepsight.runtime import registry
from keepsight.runtime.attention import Reader, StateCache
from keepsight.runtime.images import IMAGE_INPUTS, Images
from keepsight.runtime.resources import MODULES, Resources
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.state import Needs, State, must_restart, pass_tokens, positions_of, prefill, read
from keepsight.runtime.static_step import static_step

logger = logging.getLogger("keepsight")

_HONOURED_INPUTS = IMAGE_INPUTS | {"attention_mask", "logits_to_keep", "past_key_values", "position_ids", "use_cache"}


@dataclass(frozen=True)
class PeriodicEviction:
    """Eviction while decoding: after every `interval` generated tokens, `compress` evicts from the state."""

    interval: int
    compress: Callable[[State], State]


Restart = Callable[[State, Tensor], State]
"""Takes a state and further tokens [B, q]; returns the state after them, for which everything was read again."""


@dataclass(frozen=True)
class Decoded:
    """Generated answers, and the state after them, which has read all tokens but each answer's last.

    `ids` [B, N + T] int64 are the prompt's ids, then the answers with their end tokens, padded on the right.
    """

    ids: Tensor
    state: State


def end_ids(model: PreTrainedModel) -> int | list[int] | None:
    """The tokens that end an answer, as the model's generation configuration has them; None where it names none."""
    config = model.generation_config
    return None if config is None else config.eos_token_id


def up_to_end(ids: list[int], end_tokens: Sequence[int]) -> list[int]:
    """The ids up to and including the first end token; those after it are padding."""
    for index, token in enumerate(ids):
        if token in end_tokens:
            return ids[: index + 1]
    return ids


def stop_after(max_new_tokens: int, end_tokens: list[int] | int | None) -> StoppingCriteriaList:
    """Stop a row at an end token, and all rows after `max_new_tokens`."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_new_tokens)])
    if end_tokens is not None:
        criteria.append(EosTokenCriteria(end_tokens))
    return criteria


@torch.no_grad()
def decode(
    model: Reader,
    state: State,
    stopping_criteria: StoppingCriteriaList,
    *,
    pad_token: int,
    prompt_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    do_sample: bool = False,
    streamer: BaseStreamer | None = None,
    eviction: PeriodicEviction | None = None,
    restart: Restart | None = None,
    static: bool = False,
) -> Decoded:
    """Generate an answer for each row.

    On a GPU a step may be a CUDA graph's (`keepsight.runtime.static_step`); the answer is the same.

    Args:
        model: What reads the state: the base model without adapters, or the method's reader.
        state: State to start from; its cache grows.
        stopping_criteria: As transformers defines them, over prompt and answer.
        pad_token: Fills the rows that have ended.
        prompt_ids: [B, N], for processors and criteria that see the prompt; an empty prompt by default.
        logits_processor: As transformers defines it.
        do_sample: Sample from the processed logits instead of taking the arg-max.
        streamer: Receives each token.
        eviction: Eviction while decoding; None for none.
        restart: Reads everything again where the model drops its cache; see `Method.restart`. None to refuse evicted
            states there.
        static: Take the graph's step without a graph, on any device.

    Raises:
        UserError: the model drops its cache, and entries were evicted.
    """
    ids = prompt_ids if prompt_ids is not None else state.lengths.new_empty(len(state.logits), 0)
    first = ids.shape[1]
    steps = static_step(
        model,
        state,
        first,
        stopping_criteria,
        logits_processor,
        do_sample=do_sample,
        is_streamed=streamer is not None,
        pad_token=pad_token,
        without_graph=static,
    )
    with nullcontext() if eviction is not None else steps as step:
        if step is not None and step.choice is not None:
            answer = step.decode(model)
            return Decoded(torch.cat([ids, answer], dim=1), step.after(state, answer))

        logits = state.logits
        unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        since_eviction = 0
        while True:
            scores: Any = logits_processor(ids, logits) if logits_processor else logits  # type: ignore[arg-type]
            token = torch.multinomial(scores.softmax(-1), 1)[:, 0] if do_sample else scores.argmax(dim=-1)
            token = torch.where(unfinished, token, pad_token)
            ids = torch.cat([ids, token[:, None]], dim=1)
            if streamer is not None:
                streamer.put(token.cpu())
            unfinished = unfinished & ~stopping_criteria(ids, scores)
            if not unfinished.any():
                break
            if step is not None:
                logits = step.read(model, token)
                continue
            if eviction is not None and since_eviction == eviction.interval:
                state = eviction.compress(state)
                since_eviction = 0
            if restart is not None and must_restart(model, state, 1):
                state = restart(state, token[:, None])
                since_eviction = 0
            else:
                state, _ = read(model, state, token[:, None])
            since_eviction += 1
            logits = state.logits
        if step is not None:
            state = step.after(state, ids[:, first:])
    if streamer is not None:
        streamer.end()
    return Decoded(ids, state)


class Past(StateCache):
    """The `past_key_values` of an answer's output, from which the next turn continues.

    It stays unchanged, so that several turns, in several threads, can continue from it. Every model call that is not
    made by a method is refused before anything is appended.

    Args:
        method: The method that answered.
        decoded: Its answer to one prompt.
        mask: [1, N], 0 for padding of the prompt; None when there is none.
        model: The model that answered.

    Attributes:
        ids: [1, M] int64: prompt and answer, without the answer's last token, which has not been read.
        marks: [1, M] bool, False where `ids` is padding.
        adapters: Digest of the model's own adapters that were active.
    """

    def __init__(self, method: object, decoded: Decoded, mask: Tensor | None, model: PreTrainedModel) -> None:
        super().__init__(layers=decoded.state.cache.layers)
        self.method = method
        self.state = decoded.state
        self.ids = decoded.ids[:, :-1]
        self.marks = torch.ones_like(self.ids, dtype=torch.bool)
        if mask is not None:
            self.marks[:, : mask.shape[1]] = mask.bool()
        self.model = model
        self.adapters = adapters_digest(model)

    @override
    def crop(self, tokens_to_remove: int) -> None:
        self.refuse()

    @override
    def activate_past_recording(self) -> None:
        self.refuse()

    def __deepcopy__(self, memo: object) -> "Past":
        """The past itself: nothing changes it, and a copy would copy the model with it."""
        return self


@dataclass(frozen=True)
class GenerateRequest:
    """The arguments of `model.generate`, as a `custom_generate` gets them.

    Attributes:
        input_ids: [B, N] int64, the prompts, padded on the left.
        mask: [B, N], 0 for padding; None when no row is padded.
        past: Cache of an earlier answer, whose tokens `input_ids` repeats; None for a first turn.
        unread: [B, n] int64: the tokens of `input_ids` that `past` has not read.
        chunk: Tokens per forward pass of the prefill; None for the whole prompt in one.
        images: Images in the prompts; None for none.
        goes_on: Whether a further turn may continue from the answer.
        decoding: Keyword arguments of `decode`.
    """

    input_ids: Tensor
    mask: Tensor | None
    past: Past | None
    unread: Tensor
    chunk: int | None
    images: Images | None
    goes_on: bool
    decoding: dict[str, Any]


class _Signature:
    """The signature of a `custom_generate`, which transformers reads after it dropped the `tokenizer`; puts it back."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature | None:
        if instance is None:
            return None  # a class is called as its __init__ says
        put_tokenizer_back()
        return inspect.signature(instance.__call__)


class CustomGenerate(ABC):
    """A callable for `model.generate(**inputs, custom_generate=...)`, used instead of transformers' own decoding.

    Attributes:
        reads_images: Whether prompts may contain images.
        starts_prompts: Whether the ids begin a prompt; text then gets the tokenizer's special tokens.
    """

    reads_images = False
    starts_prompts = True
    __signature__ = _Signature()

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
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The hook that transformers calls.

        Returns:
            As `model.generate`: prompt and answer, [B, N + T] int64; with `return_dict_in_generate`, the output that
            holds them, their `scores` and `logits` if asked for, and `past_key_values` to continue from.

        Raises:
            UserError: `model.generate` has an argument that is not supported.
        """
        require_supported(model)
        embedding = input_embedding(model)
        if not embedding.is_meta:  # as it is where accelerate offloads it
            input_ids = input_ids.to(embedding.device)
            for name, value in model_kwargs.items():
                if isinstance(value, Tensor):
                    model_kwargs[name] = value.to(embedding.device)

        options = arguments_of_generate()
        user_options = options.get("kwargs", {})
        if "cache" in model_kwargs:  # its name since transformers 5.24
            model_kwargs["past_key_values"] = model_kwargs.pop("cache")
        chunk = generation_config.prefill_chunk_size
        if chunk is not None:
            require_whole("custom_generate", 1, prefill_chunk_size=chunk)
        images = None
        if IMAGE_INPUTS & model_kwargs.keys():
            raw = {name: value for name, value in user_options.items() if name in IMAGE_INPUTS}
            images = Images.among(model_kwargs, raw, generation_config.num_return_sequences or 1, len(input_ids))
        _require_honoured(generation_config, options, model_kwargs, input_ids, images)

        past = model_kwargs.get("past_key_values")
        if not isinstance(past, Past):
            past = None  # transformers gives an empty cache
        if past is not None:
            self._require_continued(model, past, input_ids, user_options)
        if images:
            self._require_images(past)

        logits = _LogitsRecorder()
        scores = _LogitsRecorder()
        processors = list(logits_processor)
        if generation_config.output_scores:
            processors.append(scores)
        if generation_config.output_logits:
            processors.insert(0, logits)
        decoding = {
            "prompt_ids": input_ids,
            "stopping_criteria": stopping_criteria,
            "pad_token": int(generation_config.pad_token_id or 0),
            "logits_processor": LogitsProcessorList(processors),
            "do_sample": bool(generation_config.do_sample),
            "streamer": options.get("streamer"),
        }
        returns_past = bool(generation_config.return_dict_in_generate)

        mask = model_kwargs.get("attention_mask")
        if past is None:
            unread = input_ids
            past_mask = mask
        else:
            unread = input_ids[:, past.ids.shape[1] :]
            past_mask = past.marks
            mask = None
        vocabulary, _ = input_shape(model)
        if not images:  # images have ids of their own
            unknown = unread[(unread < 0) | (unread >= vocabulary)]
            if unknown.numel():
                raise UserError(
                    f"token id {int(unknown[0])} is not in the vocabulary of {vocabulary}; take the model's tokenizer",
                    field="input_ids",
                    code="range",
                )

        request = GenerateRequest(input_ids, mask, past, unread, chunk, images, returns_past, decoding)
        elsewhere = torch.get_default_device().type not in ("cpu", model.device.type)  # such as meta
        with torch.device("cpu") if elsewhere else nullcontext():
            decoded = self.answer(model, request)
        if not returns_past:
            return decoded.ids
        output: dict[str, Any] = {"sequences": decoded.ids, "scores": scores.recorded, "logits": logits.recorded}
        return GenerateDecoderOnlyOutput(**output, past_key_values=Past(self, decoded, past_mask, model))

    def _require_images(self, past: Past | None) -> None:
        if past is not None:
            raise UserError(
                "custom_generate: only the first turn may hold images; leave out pixel_values afterwards",
                field="pixel_values",
                code="conflict",
            )
        if not self.reads_images:
            raise UserError(
                f"custom_generate: {type(self).__name__} reads no images (pixel_values); take SpecPC, or a "
                "method that evicts from the cache, such as SnapKV or LookaheadKV",
                field="pixel_values",
                code="model",
            )

    def _require_continued(
        self, model: PreTrainedModel, past: Past, input_ids: Tensor, user_options: Mapping[str, Any]
    ) -> None:
        """Refuse ids, a mask or positions that do not continue what was read, and a past that this method cannot use.

        `user_options` are those of `model.generate` as the caller passed them.
        """
        if len(input_ids) != 1:
            raise UserError(
                "custom_generate: past_key_values continue one sequence at a time; give [1, n] ids",
                field="input_ids",
                code="range",
            )
        read = past.ids.shape[1]
        if not torch.equal(input_ids[:, :read], past.ids):
            raise UserError(
                f"custom_generate: with past_key_values the input_ids must begin with the {read} tokens already read, "
                "as output.sequences does, and continue with the next turn",
                field="input_ids",
                code="conflict",
            )
        real = functional.pad(past.marks, (0, input_ids.shape[1] - read), value=True)
        mask = user_options.get("attention_mask")
        positions = None if past.state.images else user_options.get("position_ids")
        for name, value in (("attention_mask", mask), ("position_ids", positions)):
            if value is not None and value.shape != input_ids.shape:
                shape = list(value.shape)
                raise UserError(
                    f"custom_generate: {name} of shape {shape} are not for the {real.shape[1]} input_ids",
                    field=name,
                    code="data",
                )
        if mask is not None and bool((mask.to(real.device) != real).any()):
            raise UserError(
                "custom_generate: the attention_mask hides other tokens than when past_key_values were computed; give "
                "that mask and a 1 for each further token, or leave it out",
                field="attention_mask",
                code="conflict",
            )
        if positions is not None:
            expected = positions_of(real, real.shape[1], real.device)
            if bool((real & (positions.to(real.device) != expected)).any()):
                raise UserError(
                    "custom_generate: position_ids other than 0, 1, 2, ... are not supported",
                    field="position_ids",
                    code="data",
                )
        recorded = Identity(adapters=past.adapters)
        present = Identity(adapters=adapters_digest(model))
        if past.model is not model:
            recorded = replace(recorded, model=weights_digest(past.model))
            present = replace(present, model=weights_digest(model))
        remedy = "continue with that, or leave out past_key_values"
        recorded.require(present, "custom_generate: past_key_values were computed", remedy)
        past.state.require_unchanged()
        if past.method != self and not past.state.has_plain_entries:
            raise UserError(
                f"custom_generate: past_key_values of {type(past.method).__name__} are stored in its own form; "
                "continue with the same method",
                field="past_key_values",
                code="state",
            )


class _LogitsRecorder(LogitsProcessor):
    """Records the logits [B, V] of each token and leaves them as they are; `recorded` is None before the first."""

    recorded: tuple[Tensor, ...] | None = None

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.recorded = (*(self.recorded or ()), scores.clone())
        return scores


def _require_honoured(
    config: GenerationConfig, options: dict[str, Any], inputs: dict[str, Any], input_ids: Tensor, images: Images | None
) -> None:
    """Refuse options of `model.generate` that a compressed cache cannot support, and padding on the right."""
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UserError(
            f"custom_generate: {mode.replace('_', ' ')} (num_beams={config.num_beams}) is not possible with a "
            "compressed cache; decode greedily or sample, and leave out num_beams and assistants",
            field="num_beams",
            code="conflict",
        )
    asked = {
        **inputs,
        "output_attentions": config.output_attentions or None,
        "output_hidden_states": config.output_hidden_states or None,
        "synced_gpus": options.get("synced_gpus") or None,
        "cache_implementation": _asked("cache_implementation", config, options),
        "use_cache=False": _asked("use_cache", config, options) is False or None,
    }
    for name in sorted(asked.keys() - _HONOURED_INPUTS):
        if asked[name] is not None and asked[name] != {}:
            raise UserError(
                f"custom_generate: {name} is not supported; leave it out, or generate without a method",
                field=name.partition("=")[0],
                code="conflict",
            )
    past = inputs.get("past_key_values")
    if isinstance(past, Past):
        return
    if past is not None and (past.get_seq_length() or is_of_caller(past)):
        raise UserError(
            "custom_generate: past_key_values must be those of a keepsight answer with "
            f"return_dict_in_generate=True, not a {type(past).__name__} of another origin",
            field="past_key_values",
            code="state",
        )

    width = input_ids.shape[1]
    mask = inputs.get("attention_mask")
    positions = None if images else inputs.get("position_ids")
    for name, value in (("attention_mask", mask), ("position_ids", positions)):
        if value is not None and value.shape[-1] != width:
            raise UserError(
                f"custom_generate: {name} are for {value.shape[-1]} tokens, not for {width}", field=name, code="data"
            )
    if mask is not None and bool((mask[:, :-1] > mask[:, 1:]).any()):
        raise UserError(
            "custom_generate: the attention_mask hides tokens after a prompt's first; pad on the left, and give an "
            "attention_mask where prompts hold the pad token",
            field="attention_mask",
            code="data",
        )
    differing = torch.zeros(1, dtype=torch.bool)
    if positions is not None:
        differing = positions != positions_of(mask, width, input_ids.device)
        if mask is not None:
            differing = differing & mask.bool()  # no token sees padding: transformers has 1 there
    if bool(differing.any()):
        raise UserError(
            "custom_generate: position_ids other than 0, 1, 2, ... are not supported; leave them out",
            field="position_ids",
            code="data",
        )


def _asked(name: str, config: GenerationConfig, options: dict[str, Any]) -> Any:
    """An option of `model.generate` where the caller set it; a default of the model's configuration is no request."""
    if name in options.get("kwargs", {}):
        return options["kwargs"][name]
    default = getattr(getattr(options.get("self"), "generation_config", None), name, None)
    value = getattr(config, name, None)
    return None if value == default else value


SECTIONS = {
    "answer": "Evict by predicting the answer",
    "prompt": "Evict by the prompt alone",
    "weights": "Evict with published weights",
    "shorten": "Shorten the prompt",
    "quantize": "Store entries in fewer bytes",
    "read": "Keep all entries, read a few per token",
}
"""The tables of docs/methods.md, which `python docs/tables.py` makes of the registry and docstrings."""


class Method(CustomGenerate):
    """A method: it reads a prompt and returns the state that the answer is decoded from.

    Attributes:
        is_full_cache: Whether it answers from the full cache.
        selects_each_step: Whether it keeps every entry and selects at each step which of them are read.
        uses_retrieval_head: Whether a retrieval head selects what is read.
        takes_draft: Whether it reads a draft model or a draft head, which its option `draft` can name.
        every: Eviction interval: number of generated tokens between two evictions while decoding; 0 for none.
        section: Which table of docs/methods.md its row is in, one of `SECTIONS`.
        cost: What it takes beyond a prefill, in a few words.
    """

    section: str = "prompt"
    cost: str = "scores in the prefill"
    is_full_cache = False
    selects_each_step = False
    uses_retrieval_head = False
    takes_draft = False
    every: int = 0

    @final
    @classmethod
    def build(cls, resources: Resources | None = None, budget: int | float | None = None, /, **options: Any) -> Self:
        """The method from plain values, as YAML and the command line give them.

        Args:
            resources: Adapter, retrieval head, draft and tokenizer, for the methods that need them. With their base
                model, loaded or on the meta device, the method is compared.
            budget: Entries per layer and KV head, or a ratio; unused by methods that keep all entries.
            options: Other fields of the method, as values or as plain text and mappings; `adapter`, `retrieval` or
                `scorer`, a folder or Hub id, in place of that of the resources; `draft`, a mapping, in place of their
                draft.

        Raises:
            UserError: an unknown option, a value out of range, or a resource that is missing.
            UnfitModel: the method cannot run on the model.
        """
        name = registry.name_of(cls)
        modules: dict[str, str] = {}
        for option in MODULES:
            if options.get(option) is not None:
                modules[option] = str(options.pop(option))
        resources = (resources or Resources()).with_modules(**modules)
        if isinstance(options.get("draft"), dict) and cls.takes_draft:
            resources = resources.with_draft(options.pop("draft"))
        takes_budget = "budget" in registry.field_names(cls)
        if takes_budget and budget is None:
            raise UserError(
                f"method {name!r} needs a budget, in entries per layer and KV head", field="budget", code="missing"
            )

        try:
            defaults = cls.fields_from(resources, options)
            fields = registry.fields_of(cls, options, resources, defaults, already_set=("budget",))
            if takes_budget:
                fields["budget"] = budget
            constructor: Any = cls
            method: Self = constructor(**fields)
        except UserError as error:
            raise error.reworded(_with_method(cls, error)) from None
        if resources.target is not None:
            try:
                method.check_model(resources.target)
            except UserError as error:
                raise UnfitModel(_with_method(cls, error), field=error.field, code=error.code) from None

        for option in modules:
            if option not in method.modules:
                raise UserError(
                    f"method {name!r}: there is no option {option!r}, it uses none", field=option, code="unknown"
                )
        return method

    @classmethod
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        """The fields that depend on trained modules, a draft or the tokenizer: what `build` takes as their defaults.

        Options that are no fields are taken out of `options`. A `UserError` if a resource is missing.
        """
        return {}

    @property
    def modules(self) -> frozenset[str]:
        """Which trained modules it uses, of `keepsight.runtime.resources.MODULES`."""
        return frozenset() if self.adapter_digest is None else frozenset({"adapter"})

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse (`UserError`) a model, loaded or on the meta device, that this method cannot run on."""

    def reads_chunks(self) -> bool:
        """Whether it can read a prompt in several passes."""
        return True

    @abstractmethod
    def start(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        between: Callable[[], None] | None = None,
        images: Images | None = None,
    ) -> State:
        """Read a prompt and return the state to answer from.

        Args:
            model: The base model.
            input_ids: [B, N] int64, padded on the left.
            mask: [B, N], 0 for padding; None when no row is padded.
            chunk: Tokens per forward pass of the prefill; None for the whole prompt in one.
            between: Called between two of these passes; see `prefill`.
            images: Images in the prompts; None for none.
        """

    def resume(
        self,
        model: PreTrainedModel,
        state: State,
        tokens: Tensor,
        *,
        chunk: int | None = None,
        between: Callable[[], None] | None = None,
    ) -> State:
        """Read a further turn and return the state to answer from, within the budget again.

        The state, of this method or one that `has_plain_entries`, stays unchanged. `tokens` are [B, n] int64, without
        padding; with n = 0 the answer follows what has been read. `chunk` and `between` are as for `start`.
        """
        if must_restart(model, state, tokens.shape[1]):
            return self.restart(model, state, tokens)
        reader = model if state.has_plain_entries else self.turn_reader(model)
        state = state.copy()
        count = tokens.shape[1]
        end = 0
        while end < count:
            start = end
            end = min(start + pass_tokens(chunk, between, count), count)
            if start and between is not None:
                between()
            state, _ = read(reader, state, tokens[:, start:end], logits_to_keep=1, more=count - end)
        return state

    def restart(self, model: PreTrainedModel, state: State, tokens: Tensor) -> State:
        """Read everything again, with further tokens [B, q], and return the state to answer from.

        Models such as Phi-3 drop their cache where a text grows beyond a limit (see `rope_length`). The method is then
        applied to the whole text again. A `UserError` if it cannot be.
        """
        raise self._no_restart(model, type(self).__name__)

    def _no_restart(self, model: PreTrainedModel, what: str) -> UserError:
        limit = length_limit(model.config)
        assert limit is not None
        return limit.error(f"reads everything again there, which {what} cannot")

    def compress(self, model: PreTrainedModel, **inputs: Any) -> Any:
        """Read prompts without generating; `inputs` are the arguments of `generate`.

        Returns:
            The `past_key_values` for `generate` or `model.generate` with this method; later prompts begin with the
            same ids.
        """
        once = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
        return generate(model, method=self, **inputs | once).past_key_values

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the lookahead adapter that it observes with; None without one."""
        return None

    def budget_for(self, length: int) -> int:
        """The budget for a prompt of `length` tokens, in entries per layer and KV head; `length` without a budget.

        A ratio is rounded, and raised to `least_budget` where it gives less; a warning is logged once. Room for the
        tokens of an eviction interval is taken off.
        """
        budget = getattr(self, "budget", length)
        if isinstance(budget, float):
            entries = round(budget * length)
            least = self.least_budget()
            if entries < least:
                if least > 1:
                    _warn_ratio_raised(type(self).__name__, budget, least)
                entries = least
            return entries - self.every
        return int(budget) - self.every

    def least_budget(self) -> int:
        """The fewest entries that a ratio stands for, however short the prompt is."""
        return 1

    def budgets(self, state: State) -> list[int]:
        """The budget of each row, for its own number of tokens."""
        batch, width = state.tokens.shape
        alike = isinstance(getattr(self, "budget", None), int) or state.tokens_mask is None
        lengths = [width] * batch if alike else state.lengths.tolist()
        return [self.budget_for(length) for length in lengths]

    def needs(self) -> Needs:
        """What the prefill has to record."""
        return Needs()

    def tokens_to_read(self, model: PreTrainedModel, prompt: Tensor, images: Images | None = None) -> Tensor | None:
        """Indices [C] int64, ascending, of the tokens of a prompt [N] that the model reads; None to read all of it."""
        return None

    def reader(self, model: PreTrainedModel) -> Reader:
        """The model, or a wrapper that reads and decodes from this method's states in its place."""
        return model

    def turn_reader(self, model: PreTrainedModel) -> Reader:
        """The model or wrapper that reads a further turn after this method's states, many tokens a pass."""
        return self.reader(model)

    def periodic_eviction(self, model: PreTrainedModel) -> PeriodicEviction | None:
        """Eviction while decoding; None for a method that does not evict then."""
        return None

    def check(self, length: int, context: int) -> None:
        """Refuse (`UserError`) a prompt of `length` tokens that this method cannot read, before any model runs.

        `context` is the base model's context length.
        """

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        if request.past is not None:
            state = self.resume(model, request.past.state, request.unread, chunk=request.chunk)
        else:
            ids = request.input_ids
            mask = request.mask
            if not ids.numel():
                raise UserError("the prompt has no tokens; give at least one", field="input_ids", code="range")
            lengths = {ids.shape[1]} if mask is None else set(mask.sum(dim=1).tolist())
            for length in lengths:
                if not length:
                    raise UserError(
                        "a prompt has no tokens: its row of attention_mask is all 0; leave that row out",
                        field="attention_mask",
                        code="range",
                    )
                self.check(length, context_of(model))
            state = self.start(model, ids, mask, chunk=request.chunk, images=request.images)

        eviction = self.periodic_eviction(model) if self.every else None
        if eviction is None and not request.goes_on and state.needs != Needs():
            state = replace(state, needs=Needs(), features=())  # unread recordings would slow every step
        restart = functools.partial(self.restart, model)
        return decode(self.reader(model), state, eviction=eviction, restart=restart, **request.decoding)


class CacheMethod(Method):
    """A method that reads the whole prompt and then compresses its cache."""

    @abstractmethod
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        """The compressed state to decode from; `state` stays unchanged."""

    @override
    def restart(self, model: PreTrainedModel, state: State, tokens: Tensor) -> State:
        if state.images:
            raise self._no_restart(model, "a prompt with images")
        mask = state.tokens_mask
        if mask is not None:
            mask = functional.pad(mask, (0, tokens.shape[1]), value=True)
        return self.start(model, torch.cat([state.tokens, tokens], dim=1), mask)

    @override
    def resume(self, model: PreTrainedModel, state: State, tokens: Tensor, **options: Any) -> State:
        after = super().resume(model, state, tokens, **options)
        return self.compress_state(model, after) if after.has_plain_entries else after

    def shares_prefill(self, length: int) -> bool:
        """Whether it compresses an ordinary prefill of `length` tokens, which other methods can share."""
        return True

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        return self.compress_state(model, prefill(model, input_ids, mask, needs=self.needs(), **options))


@registry.method("full", colour="#6A6A6A", line="--")
@dataclass(frozen=True)
class FullCache(CacheMethod):
    """Evicts nothing: the reference that every other method is compared with."""

    cost = "none"
    is_full_cache = True
    reads_images = True

    @override
    def restart(self, model: PreTrainedModel, state: State, tokens: Tensor) -> State:
        raise self._no_restart(model, "a cache that another method evicted from")  # `read` reads whole ones again

    @override
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        return state.copy()


@functools.cache
def _warn_ratio_raised(name: str, ratio: float, least: int) -> None:
    """Log once that a ratio of short prompts leaves fewer entries than a method needs."""
    logger.warning(
        "%s: the ratio %s leaves fewer entries of some prompts than it needs; it keeps %d", name, ratio, least
    )


def _with_method(kind: type[Method], error: UserError) -> str:
    """The message of an error, with the method's name."""
    message = str(error)
    return message if message.startswith(f"{kind.__name__}:") else f"method {registry.name_of(kind)!r}: {message}"


def make_method(name: str, budget: int | float | None, resources: Resources | None = None, /, **options: Any) -> Method:
    """A method by its name, such as `snapkv`; see `Method.build`. A `UserError` if there is none of this name."""
    method: Method = registry.method_class(name).build(resources, budget, **options)
    return method


@dataclass(frozen=True)
class AnswersFrom(CustomGenerate):
    """Answers what follows a state, any number of times; the state stays unchanged, and nothing more is evicted.

    Attributes:
        method: The method that made the state.
        state: What it read, of one prompt.
    """

    method: Method
    state: State = field(repr=False)
    starts_prompts = False

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        if request.past is not None or request.mask is not None or request.images is not None:
            raise UserError(
                "a question to a state is one row of ids without padding, images or past_key_values",
                field="question",
                code="data",
            )
        # The general `resume`: those of methods that evict would evict again, with the question in view.
        state = Method.resume(self.method, model, self.state, request.input_ids, chunk=request.chunk)
        return decode(self.method.reader(model), state, **request.decoding)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | Mapping[str, Any] | str | list[str],
    method: CustomGenerate | State | Past | None = None,
    *,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """Answer prompts from a cache that `method` has compressed.

    Args:
        model: Any causal language model of transformers with full attention.
        input_ids: [B, N] int64, padded on the left; or all that a tokenizer or processor returned; or the prompts as
            text, which is tokenized as it is, without a chat template.
        method: The method, such as `SnapKV(budget=128)`; the full cache by default. Or what `load_state`,
            `method.compress` or `method.start` returns, whose prompt the ids follow: they are read, and nothing more is
            evicted.
        attention_mask: [B, N], 0 for padding; needed when a row is padded.
        options: Options of `model.generate`: `max_new_tokens`, `do_sample`, `temperature`, `streamer`, ... With
            `stop_strings`, or text, also `tokenizer`; by default the one beside the model.

    Returns:
        [B, T] int64: the answers alone, without the prompts, padded on the right. With `return_dict_in_generate=True`,
        the output of `model.generate` as it is, whose `sequences` begin with the prompts.

    Raises:
        UserError: `method` is something else, or an option of `model.generate` is not supported.
    """
    if method is None:
        method = FullCache()
    elif isinstance(method, Past):
        if not isinstance(method.method, Method):
            raise UserError(
                "generate: these past_key_values are a conversation's; go on with its say()",
                field="past_key_values",
                code="state",
            )
        method = AnswersFrom(method.method, method.state)
    elif isinstance(method, State):
        if not method.has_plain_entries:
            raise UserError(
                "generate: this state stores entries in its method's own form; pass the past_key_values that "
                "method.compress returns, or call Conversation(model, method, state).say(input_ids)",
                field="past_key_values",
                code="state",
            )
        method = AnswersFrom(FullCache(), method)
    if not isinstance(method, CustomGenerate):  # transformers ignores what it cannot call
        name = method.__name__ if isinstance(method, type) else type(method).__name__
        raise UserError(f"generate: {name} is not a method such as SnapKV(budget=128)", field="method", code="type")
    require_supported(model)  # some models have a `generate` of their own, which would not ask
    input_ids = ids_of(model, input_ids, options, method.starts_prompts)
    own_mask = options.pop("attention_mask", None)
    attention_mask = own_mask if attention_mask is None else attention_mask
    if attention_mask is None and options.get("past_key_values") is None:
        attention_mask = input_ids.new_ones(input_ids.shape)
    if attention_mask is not None:
        options["attention_mask"] = attention_mask.to(input_ids.device)
    output = model.generate(input_ids=input_ids, custom_generate=method, **options)  # type: ignore[operator]
    return output if isinstance(output, GenerateDecoderOnlyOutput) else output[:, input_ids.shape[1] :]
