"""The target's own answers: prompts in, token ids out. Who answers is a backend, such as transformers here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from keepsight.data_gen.prompts import Prompt
from keepsight.models.chat import chat_text
from keepsight.models.targets import Target


@dataclass(frozen=True)
class Rendered:
    """A prompt as token ids.

    Attributes:
        index: Position in the data set.
        source: Kind of prompt, such as `needles/single`.
        ids: Token ids, chat template included.
        response: Token ids of a given response; None when the target answers.
    """

    index: int
    source: str
    ids: list[int]
    response: list[int] | None


def render_prompt(index: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Apply the chat template (raw text stays raw) and tokenise."""
    text = chat_text(tokenizer, prompt.messages) if prompt.template else prompt.messages[0]["content"]
    ids = tokenizer(text + prompt.answer_prefix, add_special_tokens=not prompt.template)["input_ids"]
    response = None
    if prompt.response is not None:
        response = [*tokenizer(prompt.response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Rendered(index, prompt.source, list(ids), response)


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


AnsweredPrompts = list[tuple[Rendered, list[int]]]
"""Prompts with the token ids of their answers, end token included."""


class Backend(Protocol):
    """Something that answers as the target does, greedily."""

    def __call__(self, prompts: list[Rendered], max_new_tokens: int) -> Iterator[AnsweredPrompts]:
        """Answer prompts that have no response of their own; gives back what is ready, in any order."""
        ...


def answers(backend: Backend, prompts: list[Rendered], max_new_tokens: int) -> Iterator[AnsweredPrompts]:
    """The responses that prompts have of their own, then a backend's answers; each of at most `max_new_tokens`."""
    given = [(prompt, prompt.response[:max_new_tokens]) for prompt in prompts if prompt.response is not None]
    if given:
        yield given
    if asked := [prompt for prompt in prompts if prompt.response is None]:
        yield from backend(asked, max_new_tokens)


@dataclass(frozen=True)
class InThisProcess:
    """The target itself, in batches of at most `batch_tokens` prompt tokens, padding included."""

    target: Target
    batch_tokens: int

    def __call__(self, prompts: list[Rendered], max_new_tokens: int) -> Iterator[AnsweredPrompts]:
        """See `Backend`."""
        for batch in batches(prompts, self.batch_tokens):
            yield list(zip(batch, answer(self.target, batch, max_new_tokens), strict=True))


@torch.no_grad()
def answer(target: Target, batch: list[Rendered], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers of at most `max_new_tokens` tokens, end token included."""
    inputs = target.tokenizer.pad({"input_ids": [prompt.ids for prompt in batch]}, return_tensors="pt")
    generate: Any = target.model.generate
    output = generate(**inputs.to(target.model.device), max_new_tokens=max_new_tokens, do_sample=False)
    return [until(target.end_tokens, row) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


def until(ends: list[int], ids: list[int]) -> list[int]:
    """Up to and including the first end token; what follows is padding."""
    first = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: first + 1]
