"""Sampled tokens: how logits are warped, and draws that a seed and the tokens read so far decide."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from keepsight.runtime.state import State


def warpers(temperature: float, top_p: float = 1.0) -> LogitsProcessorList:
    """The processors of logits before a draw: the temperature, above 0, and the nucleus where `top_p` is below 1."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors


@contextmanager
def seeded_draws(seed: int, state: State) -> Iterator[None]:
    """Within the block torch's draws depend on the seed and on the state's tokens alone; after it they go on as before.

    The same state, seed and warpers give the same tokens, so drafts are sampled as answers are.
    """
    device = state.logits.device
    forked_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(forked_devices):
        torch.manual_seed(random.Random(f"{seed}:{state.tokens.tolist()}").getrandbits(31))
        yield
