"""A draft head's greedy answer to what the target has read (EAGLE-3, arXiv 2503.01840, section 3.1, for SpecKV)."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from keepsight.models.draft_sources import DraftHeadSource
from keepsight.runtime.drafting.eagle import ChainDrafter, HeadCache, unread_rows
from keepsight.runtime.drafting.observer import DraftIds, until_end
from keepsight.runtime.generate import end_ids
from keepsight.runtime.state import State


@dataclass(frozen=True)
class HeadAnswer:
    """A head's draft, and the head's cache after it.

    Attributes:
        draft: The draft; its first token is the target's own.
        cache: The head's cache: M - 1 rows for a prompt of M tokens (row t is that of token t + 1), and one for each
            token of the draft but the last.
    """

    draft: DraftIds
    cache: HeadCache


@torch.no_grad()
def head_answer(
    model: PreTrainedModel, state: State, drafting: DraftHeadSource, lookahead: int, window: int = 0
) -> HeadAnswer:
    """Let a head answer greedily.

    Args:
        model: The target.
        state: State of M >= 2 tokens, with the head's features in its trace.
        drafting: The head.
        lookahead: Length of the draft in tokens; those after an end token are padding.
        window: Number of last prompt tokens whose queries the cache keeps, beside those of the draft.

    Raises:
        UserError: the features were not recorded.
    """
    first = state.logits.argmax(dim=-1, keepdim=True)
    chain = ChainDrafter(drafting.head, model, state.tokens_mask, window + lookahead - 1)
    features, tokens = unread_rows(state, drafting.layers, first)
    if lookahead == 1:
        chain.read(features[:, :-1], tokens[:, :-1])
        ids = first
    else:
        ids = torch.cat([first, chain.draft(features, tokens, lookahead - 1)], dim=1)
    end = end_ids(model)
    return HeadAnswer(DraftIds(ids, None if end is None else until_end(ids, end)), chain.cache)
