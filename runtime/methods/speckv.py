"""SpecKV (arXiv 2506.08373): a small draft's answer observes the prompt, together with the prompt's last tokens."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.runtime.attention import Softmax
from keepsight.runtime.drafting.observer import Drafter, DraftIds, DraftObserver, GivenDraft, greedy_draft
from keepsight.runtime.evict import Evict
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Pool, Reduce, observed_attention, protected, reduce_group
from keepsight.runtime.methods.head_answer import head_answer
from keepsight.runtime.sparse_prefill import Score, SparsePrefill
from keepsight.runtime.state import Needs, State, context_of, prefill


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """A draft's greedy answer to everything the target has read.

    A draft model reads all of it again. A draft head reads the features that the prefill recorded, in one layer, and
    continues from the target's own first token.

    Attributes:
        draft: Source of the draft model, or a draft head.
        lookahead: Maximum length of the draft in tokens, its end token included. The paper lets the draft finish its
            answer: give the task's answer length for that.
    """

    draft: DraftSource | DraftHeadSource
    lookahead: int = 32

    def __post_init__(self) -> None:
        require_whole("SpecKV", 1, lookahead=self.lookahead)

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        if isinstance(self.draft, DraftHeadSource):
            return head_answer(model, state, self.draft, self.lookahead).draft
        return self.write(model, state.tokens, state.tokens_mask)

    @override
    def needs(self) -> Needs:
        return Needs(features=self.draft.layers) if isinstance(self.draft, DraftHeadSource) else Needs()

    @override
    def longest(self) -> int:
        return self.lookahead

    def write(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None) -> DraftIds:
        """The draft for tokens [B, M] that `model`, the target, need not have read; `mask` is False for padding.

        Raises:
            UserError: prompt and draft do not fit the draft model's context, or the draft is a head.
        """
        if isinstance(self.draft, DraftHeadSource):
            raise UserError("SpecKV: a draft head reads what the target has read; give a draft model to write before")
        drafting = self.draft.of(model)
        require_draft_fits("SpecKV", tokens.shape[1], self.lookahead, drafting)
        return greedy_draft(drafting, prefill(drafting, tokens, mask, needs=Needs()), self.lookahead)


@dataclass(frozen=True)
class SpecKV(Evict):
    """Keeps what the draft or the last 33 prompt tokens attend to most (arXiv 2506.08373, section 4 and table 8).

    The published budget C and window W leave out the last prompt token, which is read again before the answer: they
    are budget C + 1 and window W + 1 here. That token's entry and the first answer token come from the prefill.

    Ada-SpecKV is `allocate=Adaptive()`: the paper names it, its code does not have it, and this is a reconstruction
    (the importance of SpecKV, the allocation of AdaKV).

    Attributes:
        sparse: Sparse prefill of prompts longer than its `vertical + band` tokens; None to read all prompts densely.
            It applies to `start` alone: a prompt that `compress` is given has been read already.
    """

    reduce: Reduce = Reduce("max", "max")
    pool: Pool = Pool("max", 7)
    window: int = 33
    sparse: SparsePrefill | None = None
    reads_images = False  # the draft would not see them

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparse is None:
            return
        if self._drafter() is None:
            raise UserError(
                "SpecKV: sparse needs an observer that is DraftObserver of a ModelDrafter, and a draft that is a "
                "model: a draft head reads what the target has read"
            )
        most = self.sparse.vertical + self.sparse.band
        if not isinstance(self.budget, int) or self.budget > most:
            raise UserError(
                f"SpecKV: sparse needs a budget of at most {most} entries (vertical + band), not {self.budget}"
            )

    @classmethod
    def with_draft(
        cls, draft: DraftSource | DraftHeadSource, budget: int | float, lookahead: int = 32, **parts: Any
    ) -> "SpecKV":
        """The method with a draft; `parts` are other fields.

        Raises:
            UserError: a value is out of range.
        """
        return cls(budget, DraftObserver(ModelDrafter(draft, lookahead), window=None), **parts)

    @override
    def shares_prefill(self, length: int) -> bool:
        drafter = self._drafter()
        if self.sparse is None or drafter is None or length <= self.budget_for(length):
            return True
        return not self.sparse.active(length + drafter.lookahead)

    @override
    def start(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        images: Images | None = None,
    ) -> State:
        drafter, length = self._drafter(), input_ids.shape[1]
        if drafter is None or self.sparse is None or self.shares_prefill(length):
            return super().start(model, input_ids, mask, chunk=chunk, images=images)
        _refuse(length, mask, chunk)
        draft = drafter.write(model, input_ids)
        if not self.sparse.active(length + draft.ids.shape[1]):
            given = replace(self, sparse=None, observer=replace(self.observer, drafter=GivenDraft(draft)))  # type: ignore[type-var]
            return given.start(model, input_ids)
        score = self._score(draft, length)
        read = self.sparse(model, input_ids, draft.ids, score, needs=self.needs(), window=self.window)
        return self.keep(read[0], self.select(*read))

    def _drafter(self) -> ModelDrafter | None:
        drafter = self.observer.drafter if isinstance(self.observer, DraftObserver) else None
        return drafter if isinstance(drafter, ModelDrafter) and not isinstance(drafter.draft, DraftHeadSource) else None

    def _score(self, draft: DraftIds, length: int) -> Score:
        """What `reduced` says of a prompt of `length` tokens, for one layer of a pass over prompt and draft."""
        observer = self.bound_observer
        window = min(getattr(observer, "window", 0), length)
        rows, real = window + draft.ids.shape[1], draft.mask
        if real is not None:
            real = functional.pad(real, (window, 0), value=True)

        def score(query: Tensor, key: Tensor, softmax: Softmax) -> Tensor:
            observed = observed_attention(
                query[:, :, -rows:], key, softmax, length, query_mask=real, reduction=self.reduce.queries
            )
            scores = reduce_group(observed, key.shape[1], self.reduce.heads)
            return protected(scores, None, self.pool, self.sinks, self.window)

        return score


def require_draft_fits(name: str, length: int, lookahead: int, drafting: PreTrainedModel) -> None:
    """Refuse prompts that a draft model cannot read and answer.

    Raises:
        UserError: with one line that names the numbers.
    """
    if length + lookahead > (context := context_of(drafting)):
        raise UserError(
            f"{name}: a prompt of {length} tokens and a draft of {lookahead} do not fit the draft model's context of "
            f"{context}; shorten the draft (lookahead) or the prompt, or take another draft model"
        )


def _refuse(length: int, mask: Tensor | None, chunk: int | None) -> None:
    if chunk is not None and chunk < length:
        raise UserError(
            f"SpecKV: sparse reads the prompt of {length} tokens in one pass, not in chunks of {chunk}; "
            "leave out chunk or sparse"
        )
    if mask is not None and not bool(mask.bool().all()):
        raise UserError("SpecKV: sparse reads prompts without padding; give prompts one by one, or leave out sparse")
