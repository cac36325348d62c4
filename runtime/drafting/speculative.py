"""The method that decodes speculatively, from the cache of another method; see `keepsight.runtime.drafting.decode`."""

from dataclasses import dataclass, field

from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.runtime.attention import Reader
from keepsight.runtime.drafting.decode import decode_speculatively, require_single
from keepsight.runtime.drafting.eagle import DraftingHead
from keepsight.runtime.generate import CacheMethod, Decoded, FullCache, GenerateRequest, Reapply
from keepsight.runtime.state import Needs, State, context_of, prefill


@dataclass(frozen=True)
class Speculative(CacheMethod):
    """Answers from another method's cache faster, with a draft head: the same greedy answer.

    `generate(model, ids, Speculative(head, SnapKV(128)))`. Only `generate` speculates; a `Conversation` and the
    evaluation decode plainly from the method's states.

    Attributes:
        head: Drafts for the target.
        inner: Method that decides what stays in the cache.
        tokens: Tokens per draft.

    Raises:
        UserError: `tokens` is below 1, or `inner` evicts while decoding or does not read the whole prompt.
    """

    head: DraftingHead = field(compare=False, repr=False)
    inner: CacheMethod = FullCache()
    tokens: int = 5

    def __post_init__(self) -> None:
        require_whole("speculative decoding", 1, tokens=self.tokens)
        name = type(self.inner).__name__
        if not isinstance(self.inner, CacheMethod):
            raise UserError(f"speculative decoding: {name} shortens prompts; give a method that evicts from the cache")
        if self.inner.selects_each_step:
            raise UserError(
                f"speculative decoding: {name} chooses anew for each token what it reads; give the full cache, or a "
                "method that evicts"
            )
        if self.inner.every:
            raise UserError(f"speculative decoding: {name} evicts while decoding; make it with every=0")

    @override
    def check(self, length: int, context: int) -> None:
        self.inner.check(length, context)
        if not self.inner.shares_prefill(length):
            raise UserError(
                f"speculative decoding: {type(self.inner).__name__} reads this prompt of {length} tokens sparsely, "
                "which leaves the draft head without features; leave out sparse"
            )

    @override
    def needs(self) -> Needs:
        return self.inner.needs()

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        return self.inner.compress(model, state)

    @override
    def reader(self, model: PreTrainedModel) -> Reader:
        return self.inner.reader(model)

    @override
    def reapply(self, model: PreTrainedModel) -> Reapply | None:
        return self.inner.reapply(model)

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        require_single(request.input_ids)
        if request.do_sample:
            raise UserError("speculative decoding is greedy: give do_sample=False")
        if request.past is not None:
            raise UserError("speculative decoding: leave out past_key_values, or go on with the inner method")
        self.check(request.input_ids.shape[1], context_of(model))
        needs = self.inner.needs() | Needs(features=self.head.layers_of(model))
        return decode_speculatively(
            model,
            self.inner.compress(
                model, prefill(model, request.input_ids, request.mask, chunk=request.chunk, needs=needs)
            ),
            self.head,
            request.stopping_criteria,
            tokens=self.tokens,
            prompt_ids=request.input_ids,
            logits_processor=request.logits_processor,
            streamer=request.streamer,
        )
