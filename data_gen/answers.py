"""The target's own answers: prompts in, token ids out, in batches of similar length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


@torch.no_grad()
def answer(target: Target, batch: list[Rendered], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers of at most `max_new_tokens` tokens, end token included; a given response is used as it is."""
    waiting = [prompt for prompt in batch if prompt.response is None]
    generated: dict[int, list[int]] = {}
    if waiting:
        ids = [prompt.ids for prompt in waiting]
        inputs = target.tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(target.model.device)
        generate: Any = target.model.generate
        output = generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        generated = {prompt.index: _until(target.end_tokens, row) for prompt, row in zip(waiting, rows, strict=True)}
    return [
        generated[prompt.index] if prompt.response is None else prompt.response[:max_new_tokens] for prompt in batch
    ]


def _until(ends: list[int], ids: list[int]) -> list[int]:
    """Up to and including the first end token; what follows is padding."""
    first = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: first + 1]
