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
from transformers import LogitsProcessor, LogitsProcessorList
from typing_extensions import NotRequired, TypedDict

from keepsight.data_gen.store import TokenIds
from keepsight.endpoint import Endpoint, EndpointError, ServerSettings, refuse_filtered
from keepsight.errors import BadRow, UserError, one_line
from keepsight.models.distributed import launched
from keepsight.models.targets import Target
from keepsight.runtime.generate import FullCache, up_to_end
from keepsight.runtime.sampling import warpers

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
        options: dict[str, Any] = {"max_tokens": self.max_new_tokens, "temperature": self.temperature}
        if self.temperature:
            options["top_p"] = self.top_p
            options["seed"] = self.seed_of(index)
        return options

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
    processors = LogitsProcessorList()
    if decoding.temperature:
        processors.append(_Sampling(decoding, batch))
    generate: Any = target.model.generate
    output = generate(
        **inputs.to(target.model.device),
        max_new_tokens=decoding.max_new_tokens,
        do_sample=False,
        logits_processor=processors,
        # FullCache grows in place and, with a padding mask, does not repeat entries for each query head.
        custom_generate=FullCache(),
    )
    prompt_length = inputs["input_ids"].shape[1]
    answer_rows = output[:, prompt_length:].tolist()
    return [up_to_end(row, target.end_tokens) for row in answer_rows]


class _Sampling(LogitsProcessor):
    """Adds Gumbel noise from each prompt's own generator: the arg-max is a sample that does not depend on the batch."""

    def __init__(self, decoding: Decoding, batch: list[Rendered]) -> None:
        self._warpers = warpers(decoding.temperature, decoding.top_p)
        self._generators = [torch.Generator().manual_seed(decoding.seed_of(prompt.index)) for prompt in batch]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Noisy logits, [B, vocabulary] float64."""
        vocabulary = scores.shape[1]
        rows = []
        for generator in self._generators:
            rows.append(torch.rand(vocabulary, generator=generator, dtype=torch.float64))
        uniform = torch.stack(rows)
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
        self._target = target
        self._settings = settings
        self._name = f"server.url={settings.url}"
        self._forms = [self._ids_and_ids_back, self._ids, self._text]

    def __call__(self, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        """See `Backend`; UserError if the server fails: then no further prompt is sent."""
        stopped = threading.Event()
        failure: UserError | None = None
        endpoint = Endpoint(str(self._settings.url), self._settings.key, self._settings.tries, stopped)

        def ask(prompt: Rendered) -> Answers:
            if stopped.is_set():
                return []
            return [(prompt, self._ask(prompt, decoding, endpoint))]

        first_prompt, *further_prompts = prompts
        yield ask(first_prompt)
        if not further_prompts:
            return
        pool = ThreadPool(min(self._settings.parallel, len(further_prompts)))  # Ctrl-C does not wait for its threads
        replies = pool.imap_unordered(ask, further_prompts)
        try:
            for _ in further_prompts:
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
                answer_ids = self._post(prompt, decoding, form(prompt), endpoint)
                self._forms = [form]
                return answer_ids
            except BadRow as error:
                return error
            except EndpointError as error:
                if error.is_filter:
                    return BadRow(f"prompt {prompt.index} ({prompt.source}): {error}", field="answer", code="data")
                refusal = error
                if error.status not in _UNKNOWN_FORM:
                    break
        advice = f"once this is fixed, {_AGAIN}" if refusal.status else _AGAIN
        raise UserError(
            f"{self._name}: no answer to prompt {prompt.index} ({refusal}); finished answers are kept: {advice}",
            field="server.url",
            code="service",
        )

    def _post(self, prompt: Rendered, decoding: Decoding, prompt_form: dict[str, Any], endpoint: Endpoint) -> list[int]:
        """The token ids of the answer to a prompt that is sent in a form, checked against what was asked."""
        model = self._settings.model or self._target.name
        body = {"model": model, **decoding.options(prompt.index), **prompt_form}
        reply = endpoint.post("completions", body, _completion)
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        name = f"prompt {prompt.index} ({prompt.source})"
        must_serve = f"it must serve {self._target.name!r}"

        prompt_tokens = usage.get("prompt_tokens")
        if prompt_tokens not in (None, len(prompt.ids)):
            raise UserError(
                f"{self._name}: it read {name} as {prompt_tokens} tokens, not as {len(prompt.ids)}; {must_serve}",
                field="server.url",
                code="model",
            )
        reason = (choice.get("finish_reason") or "").lower()
        longest = decoding.max_new_tokens
        answer_tokens = usage.get("completion_tokens") or longest
        if reason in _FULL and answer_tokens < longest:
            raise UserError(
                f"{self._name}: {name} has {len(prompt.ids)} tokens, which leaves no room for {longest} more; "
                "serve it with a longer context",
                field="server.url",
                code="range",
            )
        answer_ids = choice.get("token_ids") or self._tokenize(choice["text"], reason)
        if not answer_ids:
            raise BadRow(f"{name}: {self._name}: its answer is empty", field="answer", code="data")
        if max(answer_ids) >= self._target.vocabulary:
            raise UserError(
                f"{self._name}: its answer to {name} has tokens outside the vocabulary; {must_serve}",
                field="server.url",
                code="model",
            )
        return answer_ids[:longest]

    def _tokenize(self, text: str, reason: str) -> list[int]:
        """The ids of a text, with an end token if the model ended it."""
        tokenizer = self._target.tokenizer
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if reason in _ENDED:
            end_tokens = self._target.end_tokens
            end_token = tokenizer.eos_token_id
            if end_token not in end_tokens:
                end_token = end_tokens[0]
            ids.append(end_token)
        return ids

    def _ids_and_ids_back(self, prompt: Rendered) -> dict[str, Any]:
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
        raise BadRow(
            f"{self._name}: it takes no token ids, and no text has exactly the ids of prompt {prompt.index}; "
            "use a server that takes ids, such as vLLM's",
            field="prompt",
            code="data",
        )


def _completion(reply: Any) -> _Completion:
    """A checked reply of the completions protocol; ValueError if malformed or truncated, EndpointError if filtered."""
    completion = TypeAdapter(_Completion).validate_python(reply, strict=True)
    choice = completion["choices"][0]
    refuse_filtered(choice)
    reason = choice.get("finish_reason") or ""
    if reason.lower() not in (*_ENDED, *_FULL, ""):
        raise ValueError(f"the answer is truncated: finish_reason={reason}")  # vLLM and SGLang abort it when they end
    return completion


class VllmEngine:
    """vLLM's offline engine on all GPUs of the machine (optional extra `vllm`); it starts with the first prompts.

    Of `target` only tokenizer and configuration are used; `options` are arguments of `vllm.LLM`. UserError if vLLM is
    not installed, or this process is one of several.
    """

    def __init__(self, target: Target, options: Mapping[str, Any]) -> None:
        if launched().num_processes > 1:
            raise UserError(
                "backend=vllm uses all GPUs from one process; start keepsight data without accelerate launch or "
                "torchrun",
                field="backend",
                code="conflict",
            )
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # commands print their results to stdout
        try:
            self._vllm: Any = import_module("vllm")
        except ImportError:
            raise UserError(
                "backend=vllm needs the package vllm (pip install vllm); or start a server with it elsewhere and use "
                "backend=server server.url=",
                field="vllm",
                code="missing",
            ) from None
        self._target = target
        self._options = options
        self._engine: Any = None

    def __call__(self, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        """See `Backend`; UserError if the engine does not start, ends, or has too short a context."""
        end_tokens = self._target.end_tokens
        config = self._target.model.generation_config
        penalty = getattr(config, "repetition_penalty", None) or 1.0  # vLLM reads it only in its server
        requests = []
        sampling_params = []
        for prompt in prompts:
            requests.append({"prompt_token_ids": prompt.ids})
            sampling_params.append(
                self._vllm.SamplingParams(
                    **decoding.options(prompt.index), stop_token_ids=end_tokens, repetition_penalty=penalty
                )
            )
        if self._engine is None:
            self._engine = self._start()
        try:
            replies = self._engine.generate(requests, sampling_params, use_tqdm=False)
        except Exception as error:  # vLLM's errors have no common class
            reason = one_line(error)
            raise UserError(
                f"backend=vllm: no answer ({reason}); finished answers are kept: {_AGAIN}", field="vllm", code="service"
            ) from error

        answers: Answers = []
        for prompt, reply in zip(prompts, replies, strict=True):
            output = reply.outputs[0]
            if output.finish_reason == "length" and len(output.token_ids) < decoding.max_new_tokens:
                raise UserError(
                    f"backend=vllm: prompt {prompt.index} has {len(prompt.ids)} tokens, which leaves no room for "
                    f"{decoding.max_new_tokens} more; raise max_model_len in vllm=",
                    field="vllm",
                    code="range",
                )
            answers.append((prompt, up_to_end(list(output.token_ids), end_tokens)))
        yield answers

    def close(self) -> None:
        """End the engine's processes, which would otherwise occupy their memory until this process ends."""
        if self._engine is not None:
            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None

    def _start(self) -> Any:
        gpus = max(1, torch.cuda.device_count())
        options = {"model": self._target.source, "tensor_parallel_size": gpus, **self._options}
        try:
            return self._vllm.LLM(**options)
        except Exception as error:  # whatever its workers raise
            raise UserError(
                f"backend=vllm: the engine does not start ({one_line(error)}); see vLLM's messages above; "
                "with 'vllm={gpu_memory_utilization:0.5,max_model_len:4096}' it takes less memory",
                field="vllm",
                code="service",
            ) from error
