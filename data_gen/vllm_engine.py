"""Answers from vLLM's offline engine, on all GPUs of the machine (optional extra `vllm`)."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from keepsight.data_gen.answers import AnsweredPrompts, Rendered, until
from keepsight.errors import UserError
from keepsight.models.targets import Target


class VllmEngine:
    """An engine in this process; its scheduler makes the batches.

    Raises:
        UserError: vLLM is not installed.
    """

    def __init__(self, target: Target, **options: Any) -> None:
        try:
            self._vllm: Any = import_module("vllm")
        except ImportError:
            raise UserError(
                "backend=vllm needs the package vllm (pip install vllm); or start a server with it elsewhere and give "
                "backend=server server.url="
            ) from None
        gpus = max(1, torch.cuda.device_count())
        self._target = target
        self._engine = self._vllm.LLM(model=target.name, tensor_parallel_size=gpus, **options)

    def __call__(self, prompts: list[Rendered], max_new_tokens: int) -> Iterator[AnsweredPrompts]:
        """See `Backend`."""
        ends = self._target.end_tokens
        greedy = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=ends)
        given = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        replies = self._engine.generate(given, greedy, use_tqdm=False)
        ids = [until(ends, list(reply.outputs[0].token_ids)) for reply in replies]
        yield list(zip(prompts, ids, strict=True))
