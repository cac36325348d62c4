"""Backends that answer prompts: transformers in this process, a server, or vLLM's offline engine."""

import os
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.pool import ThreadPool
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
from typing_extensions import NotRequired, TypedDict

from keepsight.data_gen.store import TokenIds
from keepsight.endpoint import Endpoint, EndpointError, ServerSettings, refuse_filtered
from keepsight.errors import BadRow, UserError, one_line
from keepsight.models.distributed import launched
from keepsight.models.targets import Target
from keepsight.runtime.generate import FullCache, up_to_end

_UNKNOWN_FORM = (400, 404, 422)
"""HTTP statuses of servers that do not accept a form of prompts; 404 also means an unknown model."""
_ENDED = ("stop", "eos", "eos_token", "stop_token", "stop_sequence", "stop_str", "end_turn", "end_of_turn", "complete")
_FULL = ("length", "max_tokens", "max_length", "max_output_tokens", "model_length")
_AGAIN = "run the same command again to continue"


@dataclass(frozen=True)
class Rendered:
    """A prompt of a `source` as token ids, chat template included; `response` is None when the model answers."""

    index: int
    source: str
    ids: list[int]
    response: list[int] | None


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded. Temperature 0 is greedy; draws depend only on the seed and the prompt's index."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def options(self, index: int) -> dict[str, Any]:
        """Parameters of a request for prompt `index`, by the names of the completions protocol and of vLLM."""
        fixed = {"max_tokens": self.max_new_tokens, "temperature": self.temperature}
        return fixed | ({"top_p": self.top_p, "seed": self.seed_of(index)} if self.temperature else {})

    def seed_of(self, index: int) -> int:
        """The random seed of prompt `index`."""
        return random.Random(f"keepsight:{self.seed}:{index}:answer").getrandbits(31)


Answers = list[tuple[Rendered, list[int] | BadRow]]
"""Prompts with the token ids of their answers, end token included, or with the reason why there is none."""


class Backend(Protocol):
    """Generates the base model's answers."""

    def __call__(self, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        """Answer prompts that have no response of their own; yields what is ready, in any order."""
        ...


@dataclass(frozen=True)
class InThisProcess:
    """Answers with the model in this process, in batches of at most `batch_tokens` prompt tokens, padding included."""

    target: Target
    batch_tokens: int

    def __call__(self, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        """See `Backend`."""
        for batch in batches(prompts, self.batch_tokens):
            yield list(zip(batch, answer(self.target, batch, decoding), strict=True))


def batches(prompts: list[Rendered], max_tokens: int) -> Iterator[list[Rendered]]:
    """Batches of prompts of similar length, at most `max_tokens` tokens each, padding included (or one prompt)."""
    batch: list[Rendered] = []
    for prompt in sorted(prompts, key=lambda rendered: len(rendered.ids)):
        if batch and len(prompt.ids) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


@torch.no_grad()
def answer(target: Target, batch: list[Rendered], decoding: Decoding) -> list[list[int]]:
    """The token ids of the answers to a batch, end tokens included."""
    inputs = target.tokenizer.pad({"input_ids": [prompt.ids for prompt in batch]}, return_tensors="pt")
    generate: Any = target.model.generate
    sampling = LogitsProcessorList([_Sampling(decoding, batch)] if decoding.temperature else [])
    options = {"max_new_tokens": decoding.max_new_tokens, "do_sample": False, "logits_processor": sampling}
    # FullCache grows in place and, with a padding mask, does not repeat entries for each query head.
    output = generate(**inputs.to(target.model.device), **options, custom_generate=FullCache())
    return [up_to_end(row, target.end_tokens) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


class _Sampling(LogitsProcessor):
    """Adds Gumbel noise from each prompt's own generator: the arg-max is a sample that does not depend on the batch."""

    def __init__(self, decoding: Decoding, batch: list[Rendered]) -> None:
        self._warpers = LogitsProcessorList([TemperatureLogitsWarper(float(decoding.temperature))])
        if decoding.top_p < 1:
            self._warpers.append(TopPLogitsWarper(decoding.top_p))
        self._generators = [torch.Generator().manual_seed(decoding.seed_of(prompt.index)) for prompt in batch]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Noisy logits, [B, vocabulary] float64."""
        size = scores.shape[1]
        uniform = torch.stack([torch.rand(size, generator=each, dtype=torch.float64) for each in self._generators])
        logits: Tensor = self._warpers(input_ids, scores.float())  # type: ignore[arg-type]
        return logits - uniform.log().neg().log().to(scores.device)


class _Choice(TypedDict):
    text: str
    token_ids: NotRequired[TokenIds | Annotated[list[Any], Field(max_length=0)] | None]
    finish_reason: NotRequired[str | None]


class _Usage(TypedDict):
    prompt_tokens: NotRequired[int | None]
    completion_tokens: NotRequired[int | None]


class _Completion(TypedDict):
    choices: list[_Choice]
    usage: NotRequired[_Usage | None]


class Server:
    """A server of OpenAI's completions protocol, such as those of vLLM, SGLang or llama.cpp.

    Prompts are sent as token ids, or as text to a server that takes no ids. vLLM returns the answer's token ids; the
    text from other servers is tokenised again, which gives the generated ids, except for rare words that the model
    tokenised in an unusual way.
    """

    def __init__(self, target: Target, settings: ServerSettings) -> None:
        settings.check()
        self._target, self._settings, self._name = target, settings, f"server.url={settings.url}"
        self._forms = [self._ids_both_ways, self._ids, self._text]

    def __call__(self, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        """See `Backend`; UserError if the server fails: then no further prompt is sent."""
        stopped, failure = threading.Event(), None
        endpoint = Endpoint(str(self._settings.url), self._settings.key, self._settings.tries, stopped)

        def ask(prompt: Rendered) -> Answers:
            return [] if stopped.is_set() else [(prompt, self._ask(prompt, decoding, endpoint))]

        first, *others = prompts
        yield ask(first)
        if not others:
            return
        pool = ThreadPool(min(self._settings.parallel, len(others)))  # Ctrl-C does not wait for its threads
        replies = pool.imap_unordered(ask, others)
        try:
            for _ in others:
                try:
                    yield next(replies)
                except UserError as error:
                    failure = failure or error
                    stopped.set()  # pending replies are still waited for
        finally:
            stopped.set()
            pool.close()
        if failure:
            raise failure

    def _ask(self, prompt: Rendered, decoding: Decoding, endpoint: Endpoint) -> list[int] | BadRow:
        """The answer to a prompt; the first call finds the form of prompts that the server accepts."""
        refusal = EndpointError("not asked")
        for form in self._forms:
            try:
                made = self._post(prompt, decoding, form, endpoint)
                self._forms = [form]
                return made
            except BadRow as error:
                return error
            except EndpointError as error:
                if error.is_filter:
                    return BadRow(f"prompt {prompt.index} ({prompt.source}): {error}")
                refusal = error
                if error.status not in _UNKNOWN_FORM:
                    break
        after = f"once this is fixed, {_AGAIN}" if refusal.status else _AGAIN
        reason = f"no answer to prompt {prompt.index} ({refusal}); finished answers are kept: {after}"
        raise UserError(f"{self._name}: {reason}")

    def _post(self, prompt: Rendered, decoding: Decoding, form: Any, endpoint: Endpoint) -> list[int]:
        body = {"model": self._settings.model or self._target.name, **decoding.options(prompt.index), **form(prompt)}
        reply = endpoint.post("completions", body, _completion)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        said, longest = f"prompt {prompt.index} ({prompt.source})", decoding.max_new_tokens
        reason = (choice.get("finish_reason") or "").lower()
        serve = f"it must serve {self._target.name!r}"
        if usage.get("prompt_tokens") not in (None, len(prompt.ids)):
            read = f"it read {said} as {usage.get('prompt_tokens')} tokens, not as {len(prompt.ids)}"
            raise UserError(f"{self._name}: {read}; {serve}")
        if reason in _FULL and (usage.get("completion_tokens") or longest) < longest:
            room = f"{said} has {len(prompt.ids)} tokens, which leaves no room for {longest} more"
            raise UserError(f"{self._name}: {room}; serve it with a longer context")
        ids = choice.get("token_ids") or self._tokenised(choice["text"], reason)
        if not ids:
            raise BadRow(f"{said}: {self._name}: its answer is empty")
        if max(ids) >= self._target.vocabulary:
            raise UserError(f"{self._name}: its answer to {said} has tokens outside the vocabulary; {serve}")
        return ids[:longest]

    def _tokenised(self, text: str, reason: str) -> list[int]:
        """The ids of a text, with an end token if the model ended it."""
        ids = list(self._target.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends, usual = self._target.end_tokens, self._target.tokenizer.eos_token_id
        return [*ids, usual if usual in ends else ends[0]] if reason in _ENDED else ids

    def _ids_both_ways(self, prompt: Rendered) -> dict[str, Any]:
        return {"prompt": prompt.ids, "return_token_ids": True}

    def _ids(self, prompt: Rendered) -> dict[str, Any]:
        return {"prompt": prompt.ids}

    def _text(self, prompt: Rendered) -> dict[str, Any]:
        """A text that the tokenizer, including the special tokens it adds, encodes to exactly the prompt's ids."""
        tokenizer = self._target.tokenizer
        for ids in (prompt.ids, prompt.ids[1:]):
            text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            if list(tokenizer(text)["input_ids"]) == prompt.ids:
                return {"prompt": text}
        no_text = f"it takes no token ids, and no text has exactly the ids of prompt {prompt.index}"
        raise BadRow(f"{self._name}: {no_text}; use a server that takes ids, such as vLLM's")


def _completion(reply: Any) -> _Completion:
    """A checked reply of the completions protocol; ValueError if malformed or truncated, EndpointError if filtered."""
    read = TypeAdapter(_Completion).validate_python(reply, strict=True)
    refuse_filtered(choice := read["choices"][0])
    reason = choice.get("finish_reason") or ""
    if reason.lower() not in (*_ENDED, *_FULL, ""):
        raise ValueError(f"the answer is truncated: finish_reason={reason}")  # vLLM and SGLang abort it when they end
    return read


class VllmEngine:
    """vLLM's offline engine on all GPUs of the machine (optional extra `vllm`); it starts with the first prompts.

    Of `target` only tokenizer and configuration are used; `options` are arguments of `vllm.LLM`. UserError if vLLM is
    not installed, or this process is one of several.
    """

    def __init__(self, target: Target, options: Mapping[str, Any]) -> None:
        if launched().num_processes > 1:
            advice = "start keepsight data without accelerate launch or torchrun"
            raise UserError(f"backend=vllm uses all GPUs from one process; {advice}")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # commands print their results to stdout
        try:
            self._vllm: Any = import_module("vllm")
        except ImportError:
            other = "start a server with it elsewhere and use backend=server server.url="
            raise UserError(f"backend=vllm needs the package vllm (pip install vllm); or {other}") from None
        self._target, self._options = target, options
        self._engine: Any = None

    def __call__(self, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        """See `Backend`; UserError if the engine does not start, ends, or has too short a context."""
        ends, config = self._target.end_tokens, self._target.model.generation_config
        penalty = getattr(config, "repetition_penalty", None) or 1.0  # vLLM reads it only in its server
        fixed = {"stop_token_ids": ends, "repetition_penalty": penalty}
        options = [self._vllm.SamplingParams(**decoding.options(each.index), **fixed) for each in prompts]
        if self._engine is None:
            self._engine = self._start()
        try:
            asked = [{"prompt_token_ids": each.ids} for each in prompts]
            replies = self._engine.generate(asked, options, use_tqdm=False)
        except Exception as error:  # vLLM's errors have no common class
            reason = one_line(error)
            raise UserError(f"backend=vllm: no answer ({reason}); finished answers are kept: {_AGAIN}") from error
        answers = [reply.outputs[0] for reply in replies]
        for prompt, made in zip(prompts, answers, strict=True):
            if made.finish_reason == "length" and len(made.token_ids) < decoding.max_new_tokens:
                room = f"has {len(prompt.ids)} tokens, which leaves no room for {decoding.max_new_tokens} more"
                raise UserError(f"backend=vllm: prompt {prompt.index} {room}; raise max_model_len in vllm=")
        yield [(prompt, up_to_end(list(made.token_ids), ends)) for prompt, made in zip(prompts, answers, strict=True)]

    def close(self) -> None:
        """End the engine's processes, which would otherwise occupy their memory until this process ends."""
        if self._engine is not None:
            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None

    def _start(self) -> Any:
        gpus = max(1, torch.cuda.device_count())
        try:
            return self._vllm.LLM(**{"model": self._target.source, "tensor_parallel_size": gpus, **self._options})
        except Exception as error:  # whatever its workers raise
            raise UserError(
                f"backend=vllm: the engine does not start ({one_line(error)}); see vLLM's messages above; "
                "with 'vllm={gpu_memory_utilization:0.5,max_model_len:4096}' it takes less memory"
            ) from error
