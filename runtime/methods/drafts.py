"""Methods whose observers are tokens after the prompt: the oracle (the answer itself), DapQ (pseudo tokens)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Positive, UserError, Whole
from keepsight.models.decoder import input_shape
from keepsight.runtime import registry
from keepsight.runtime.drafting.observer import (
    Drafter,
    DraftIds,
    DraftObserver,
    PromptDrafter,
    greedy_draft,
    until_end,
)
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import decode, end_ids, stop_after
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.observe import Observer
from keepsight.runtime.sampling import seeded_draws, warpers
from keepsight.runtime.state import State


@registry.drafter("own_answer")
@dataclass(frozen=True)
class OwnAnswer(Drafter):
    """The base model's greedy answer from the whole state (LookaheadKV, arXiv 2603.10899, section 2, equation 1).

    Attributes:
        max_new_tokens: Maximum length of the answer in tokens.
    """

    max_new_tokens: Positive = 64

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        return greedy_draft(model, state.copy(), self.max_new_tokens)

    @override
    def longest(self) -> int:
        return 0  # it takes the positions of the answer itself, which has to fit anyway


@registry.drafter("sampled_answer")
@dataclass(frozen=True)
class SampledAnswer(Drafter):
    """A sampled answer of the base model from the whole state (LookaheadKV, arXiv 2603.10899, appendix E.3).

    Attributes:
        temperature: Sampling temperature.
        max_new_tokens: Maximum length of the answer in tokens.
        seed: Seed of the draws, which depend on the prompt too.
    """

    temperature: Annotated[float, Gt(0)] = 0.8
    max_new_tokens: Positive = 64
    seed: int = 0

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        end = end_ids(model)
        stop = stop_after(self.max_new_tokens, end)
        options: dict[str, Any] = {"logits_processor": warpers(self.temperature), "do_sample": True}
        with seeded_draws(self.seed, state):
            decoded = decode(model, state.copy(), stop, pad_token=0, **options)
        return DraftIds(decoded.ids, until_end(decoded.ids, end))

    @override
    def longest(self) -> int:
        return 0  # as for the answer itself


@registry.method("oracle", label="oracle attention", colour="#009E73", marker="D", line=":")
@dataclass(frozen=True)
class Oracle(Evict):
    """Keeps what the full cache's own answer attends to."""

    section = "answer"
    cost = "the full cache's own answer"
    observer: Observer = DraftObserver(OwnAnswer())


@registry.drafter("prompt_ends")
@dataclass(frozen=True)
class PromptEnds(PromptDrafter):
    """The first and the last tokens read so far (DapQ, arXiv 2603.11564, section 5.1).

    A row with fewer tokens than `first` or `last` repeats the one at that end.

    Attributes:
        first: Number of first tokens.
        last: Number of last tokens.
    """

    first: Whole = 4
    last: Whole = 28

    def __post_init__(self) -> None:
        if self.first + self.last < 1:
            raise UserError(
                "DapQ: first 0 and last 0 leave no pseudo token; give at least one of them", field="first", code="range"
            )

    @override
    def write(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> DraftIds:
        batch, width = tokens.shape
        device = tokens.device
        if mask is None:
            start = torch.zeros(batch, 1, dtype=torch.long, device=device)
        else:
            start = width - mask.long().sum(dim=1, keepdim=True)  # of each row's real tokens
        first_positions = (start + torch.arange(self.first, device=device)).clamp(max=width - 1)
        last_positions = (width - self.last + torch.arange(self.last, device=device)).expand(batch, -1)
        positions = torch.cat([first_positions, torch.maximum(last_positions, start)], dim=1)
        return DraftIds(tokens.gather(1, positions))

    @override
    def longest(self) -> int:
        return self.first + self.last


@registry.drafter("random_tokens")
@dataclass(frozen=True)
class RandomTokens(PromptDrafter):
    """Tokens drawn uniformly from the vocabulary, the same ones for every prompt.

    Attributes:
        count: Number of tokens.
        seed: Seed of the random generator.
    """

    count: Positive = 32
    seed: int = 0

    @override
    def write(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> DraftIds:
        generator = torch.Generator().manual_seed(self.seed)
        vocabulary, _ = input_shape(model)
        ids = torch.randint(vocabulary, (1, self.count), generator=generator)
        return DraftIds(ids.to(tokens.device).expand(len(tokens), -1))

    @override
    def longest(self) -> int:
        return self.count


@registry.drafter("constant_text")
@dataclass(frozen=True)
class ConstantText(PromptDrafter):
    """The same text after every prompt.

    Attributes:
        ids: Token ids of the text, in any sequence type.
    """

    ids: Sequence[int]

    def __post_init__(self) -> None:
        value: Any = self.ids
        if hasattr(value, "tolist"):
            value = value.tolist()
        ids = tuple(value) if isinstance(value, Sequence) else ()
        if not ids or any(type(token) is not int or token < 0 for token in ids):
            raise UserError(f"DapQ: ids {value!r} must be a list of token ids, at least one", field="ids", code="type")
        object.__setattr__(self, "ids", ids)

    @override
    def write(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> DraftIds:
        ids: Tensor = torch.tensor([list(self.ids)], device=tokens.device)
        vocabulary, _ = input_shape(model)
        largest = int(ids.max())
        if largest >= vocabulary:
            raise UserError(
                f"DapQ: token id {largest} is outside the base model's vocabulary of {vocabulary}",
                field="ids",
                code="range",
            )
        return DraftIds(ids.expand(len(tokens), -1))

    @override
    def longest(self) -> int:
        return len(self.ids)


@registry.method("dapq", colour="#E69F00", marker="X")
@dataclass(frozen=True)
class DapQ(Evict):
    """32 pseudo tokens observe from the answer's first positions (DapQ, arXiv 2603.11564, section 4).

    The paper keeps no window. It does not say whether it pools, nor how a KV head's query heads are reduced: pooling
    is off and the mean is taken unless told otherwise.
    """

    section = "answer"
    cost = "32 tokens in the prefill"
    observer: Observer = DraftObserver(PromptEnds())
    pool: Pool = NO_POOL
