"""Prefill: the prompt becomes KV entries, once for all observers."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from keepsight.errors import UserError
from keepsight.models.decoder import FULL
from keepsight.runtime.attention import Reader, Recorder, run
from keepsight.runtime.cache import empty_cache, full_layers
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.images import Images
from keepsight.runtime.state import Needs, State, Trace, TraceRecorder

WINDOW = Needs(window=32)
"""The observation window that most methods need."""


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chunk: int | None = None,
    needs: Needs = WINDOW,
    last_recorder: Callable[[Cache, TraceRecorder], Recorder] | None = None,
    images: Images | None = None,
) -> State:
    """Run the prompt through the model.

    Args:
        model: A causal language model.
        input_ids: [B, N] int64, padded on the left.
        attention_mask: [B, N], 0 for padding; None when no row is padded.
        chunk: Tokens per forward pass; None for the whole prompt in one. The result is the same: eviction waits for
            the whole prompt, so that every token attends to all before it.
        needs: What to record of the prompt for observers.
        last_recorder: Makes what records the last pass, around the given recorder; it may put other layers in place of
            those that have been read.
        images: Images in the prompt, which is then read in one pass.

    Raises:
        UserError: the model is not supported, or images cannot be read so.
    """
    mask = attention_mask.bool() if attention_mask is not None and not attention_mask.bool().all() else None
    lengths = torch.full((len(input_ids),), input_ids.shape[1], device=input_ids.device)
    lengths = lengths if mask is None else mask.sum(dim=1)
    positions, shift = positions_of(mask, input_ids.shape[1], input_ids.device), None
    if images:
        _require_one_pass(chunk)
        images.require_read_by(model)
        if (own := images.positions_in(model, input_ids, mask)) is not None:
            positions, shift = own, own.amax(dim=(0, 2)) + 1 - lengths
    cache, trace = empty_cache(model), Trace(needs)
    step = chunk or input_ids.shape[1]
    for start in range(0, input_ids.shape[1], step):
        end = min(start + step, input_ids.shape[1])
        seen = None if mask is None else mask[:, :end]
        recorder = TraceRecorder(trace, seen)
        around = last_recorder if end == input_ids.shape[1] else None
        with RecordFeatures(model, needs.features) as recorded:
            output = run(
                model,
                cache,
                recorder=around(cache, recorder) if around is not None else recorder,
                attention_mask=seen,
                position_ids=positions[..., start:end],
                logits_to_keep=1,
                **(images.with_tokens(input_ids) if images else {"input_ids": input_ids[:, start:end]}),
            )
        trace = recorder.trace(recorded.outputs())
        _require_seen(model, cache, trace, end)
    return State(
        cache,
        mask,
        output.logits[:, -1].float(),
        input_ids,
        lengths,
        trace,
        shift,
        padded=mask is not None,
    )


def _require_one_pass(chunk: int | None) -> None:
    if chunk is not None:
        raise UserError("a prompt with images is read in one pass; leave out prefill_chunk_size")


def _require_seen(model: PreTrainedModel, cache: Cache, trace: Trace, length: int) -> None:
    """Refuse models whose first pass shows attention or caches of their own kind."""
    held = {layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer)}
    if held != {length} or len(trace.softmax) != len(full_layers(cache)):
        raise UserError(
            f"{model.config.model_type} attends or caches in a way of its own, so that its queries or entries are not "
            "seen; load another model, such as Llama, Qwen, Mistral or Gemma"
        )


@torch.no_grad()
def read(model: Reader, state: State, tokens: Tensor, *, logits_to_keep: int = 0) -> tuple[State, Tensor]:
    """Read more tokens after a state, evicted or not; the state's cache grows.

    Args:
        model: The target, without adapters.
        state: State to read after.
        tokens: [B, q] int64, none of them padding.
        logits_to_keep: Number of last tokens whose logits are computed; 0 for all.

    Returns:
        The state after them, and the logits [B, q, V] float32 of all q tokens, or of the last ones.
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    mask = None if state.mask is None else functional.pad(state.mask, (0, tokens.shape[1]), value=True)
    after = replace(state, mask=mask, tokens=torch.cat([state.tokens, tokens], dim=1))
    recorder = TraceRecorder(state.trace, mask)
    attention_mask = state.attention_mask()
    with RecordFeatures(model, state.trace.needs.features) as recorded:
        output = run(
            model,
            state.cache,
            recorder=recorder if state.trace.needs != Needs() else None,
            input_ids=tokens,
            attention_mask=None
            if attention_mask is None
            else functional.pad(attention_mask, (0, tokens.shape[1]), value=True),
            position_ids=state.next_position[:, None] + steps,
            logits_to_keep=logits_to_keep,
        )
    logits = output.logits.float()
    trace = recorder.trace(recorded.outputs()) if state.trace.needs != Needs() else state.trace
    return replace(after, logits=logits[:, -1], lengths=state.lengths + tokens.shape[1], trace=trace), logits


def positions_of(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Position ids [B, N] (or [1, N] without a mask): real tokens count from 0, padding gets 0."""
    if mask is None:
        return torch.arange(length, device=device)[None]
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def context_of(model: PreTrainedModel) -> int:
    """Context length of a model: its number of positions, or that to which YaRN stretches them; huge without either."""
    config = model.config.get_text_config(decoder=True)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(FULL) or rope  # by kind of layer in models that have several
    stretched = rope["factor"] * rope["original_max_position_embeddings"] if rope.get("rope_type") == "yarn" else 0
    return max(int(getattr(config, "max_position_embeddings", None) or sys.maxsize), int(stretched))
