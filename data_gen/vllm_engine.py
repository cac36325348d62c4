"""Answers from vLLM's offline engine, on all GPUs of the machine (optional extra `vllm`)."""

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from keepsight.data_gen.answers import AnsweredPrompts, Rendered, until
from keepsight.errors import UserError
from keepsight.models.distributed import launched
from keepsight.models.targets import Target


class VllmEngine:
    """An engine of this process; its scheduler makes the batches. It starts with the first prompts.

    Args:
        target: Who answers; only its tokenizer and configuration are used here.
        options: Arguments of `vllm.LLM`, such as `gpu_memory_utilization`.

    Raises:
        UserError: vLLM is not installed, or this process is one of several.
    """

    def __init__(self, target: Target, options: Mapping[str, Any]) -> None:
        if launched().num_processes > 1:
            raise UserError(
                "backend=vllm uses all GPUs from one process; start keepsight data without accelerate launch or "
                "torchrun"
            )
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # commands print their results to stdout
        try:
            self._vllm: Any = import_module("vllm")
        except ImportError:
            raise UserError(
                "backend=vllm needs the package vllm (pip install vllm); or start a server with it elsewhere and give "
                "backend=server server.url="
            ) from None
        self._target, self._options = target, options
        self._engine: Any = None

    def __call__(self, prompts: list[Rendered], max_new_tokens: int) -> Iterator[AnsweredPrompts]:
        """See `Backend`.

        Raises:
            UserError: the engine does not start, ends, or has no room for an answer.
        """
        ends, config = self._target.end_tokens, self._target.model.generation_config
        greedy = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            stop_token_ids=ends,
            repetition_penalty=getattr(config, "repetition_penalty", None) or 1.0,  # vLLM reads it for servers alone
        )
        given = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        if self._engine is None:
            self._engine = self._start()
        try:
            replies = self._engine.generate(given, greedy, use_tqdm=False)
        except Exception as error:  # its own have no class in common
            raise UserError(
                f"backend=vllm: no answer ({_said(error)}); what was answered is kept: run the same command again to "
                "go on"
            ) from error
        answers = [reply.outputs[0] for reply in replies]
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.finish_reason == "length" and len(answer.token_ids) < max_new_tokens:
                raise UserError(
                    f"backend=vllm: prompt {prompt.index} has {len(prompt.ids)} tokens, which leaves no room for "
                    f"{max_new_tokens} more; raise max_model_len in vllm="
                )
        yield list(zip(prompts, [until(ends, list(answer.token_ids)) for answer in answers], strict=True))

    def close(self) -> None:
        """End the engine's processes, which would otherwise hold their memory as long as this one runs."""
        if self._engine is not None:
            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None

    def _start(self) -> Any:
        gpus = max(1, torch.cuda.device_count())
        given = {"model": self._target.source, "tensor_parallel_size": gpus, **self._options}
        try:
            return self._vllm.LLM(**given)
        except Exception as error:  # whatever its workers raise
            raise UserError(
                f"backend=vllm: the engine does not start ({_said(error)}); see what vLLM says above; "
                "with 'vllm={gpu_memory_utilization:0.5,max_model_len:4096}' it takes less memory"
            ) from error


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
