"""SpecPC (arXiv 2506.08373): a draft model's attention decides which prompt tokens the target reads.

Section 5, algorithm 2 and table 8, with the details of the released code where it differs from the text: the window's
own keys are scored too, pooling takes an even kernel, and neighbours are added until the budget is full.

A draft head of the target can replace the draft model, a variant the paper does not have. It needs the target's
features of the whole prompt, so that the target reads the prompt twice, whole and shortened: this saves KV memory and
decoding time, but costs more prefill than the full cache.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.decoder import full_attention_layers
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.runtime.generate import decode, end_ids, stop_after
from keepsight.runtime.generate import GenerateRequest
from keepsight.runtime.images import Images
from keepsight.runtime.importance import observed_attention
from keepsight.runtime.latents import attended_entries
from keepsight.runtime.methods.head_answer import head_answer
from keepsight.runtime.methods.speckv import require_draft_fits
from keepsight.runtime.state import prefill
from keepsight.runtime.prompt_compression.method import ShortenPrompt
from keepsight.runtime.prompt_compression.neighborhood import select_tokens
from keepsight.runtime.attention import Softmax
from keepsight.runtime.state import Needs, State

_FIRST_LAYER = 8  # of the published configurations, whose drafts have 16 and 24 layers


@dataclass(frozen=True)
class SpecPC(ShortenPrompt):
    """Keeps the tokens that a draft model attends to as it begins to answer, and their neighbours (algorithm 2).

    Attributes:
        draft: Source of the draft model, or a draft head (see the module).
        lookahead: Tokens that the draft generates. The last of them is never read, so that one less observes beside
            the window; with 1 (as published) the window observes alone.
        first_layer: First of the draft's layers that scores; None for 8, or for half of the draft's layers where that
            is less. A draft head has a single layer.
        reduction: Reduction over observing queries, heads and layers: `max` or `sum`.
        pooling: Pooling over neighbouring tokens: `max` or `avg`.
        kernel: Tokens pooled; may be even; 1 turns pooling off. As published: 64 for Qwen2.5, 32 for Llama 3.
        neighbors: Tokens kept around a selected one, itself included; None for as many as `kernel`, 0 for none.
    """

    window: int = 64
    draft: DraftSource | DraftHeadSource = field(kw_only=True)
    lookahead: int = 1
    first_layer: int | None = None
    reduction: str = "max"
    pooling: str = "max"
    kernel: int = 64
    neighbors: int | None = None
    reads_images = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        require_whole(name, 1, window=self.window, lookahead=self.lookahead, kernel=self.kernel)
        require_whole(name, first_layer=self.first_layer or 0, neighbors=self.neighbors or 0)
        for option, known in (("reduction", ("max", "sum")), ("pooling", ("max", "avg"))):
            if getattr(self, option) not in known:
                raise UserError(f"{name}: {option} {getattr(self, option)!r} is unknown; choose {' or '.join(known)}")

    @override
    def check(self, length: int, context: int) -> None:
        super().check(length, context)
        if self.budget_for(length) == length:
            return  # nothing is drafted
        require_room(type(self).__name__, length, self.lookahead, context)

    @override
    def begin(self, model: PreTrainedModel, request: GenerateRequest) -> State:
        if not request.images:
            return super().begin(model, request)
        ids, images = request.input_ids, request.images
        if len(ids) != 1 or (request.mask is not None and not request.mask.all()):
            raise UserError(
                f"{type(self).__name__}: a prompt with images is shortened alone, without padding; give one"
            )
        if (kept := self.tokens_to_read(model, ids[0], images)) is not None:
            images, ids = images.shortened(model, ids, kept), ids[:, kept]
        return prefill(model, ids, chunk=request.chunk, needs=Needs(), images=images)

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        return self.select_by(self.look(model, input_ids, images)[0])

    def select_by(self, scores: Tensor) -> Tensor:
        """The tokens to keep, [C] int64 ascending, of a prompt with such scores [N] float32."""
        neighbors = self.kernel if self.neighbors is None else self.neighbors
        budget = self.budget_for(len(scores))
        return select_tokens(scores, budget, self.window, self.kernel, neighbors, self.pooling)

    @torch.no_grad()
    def look(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> tuple[Tensor, Tensor]:
        """Let the draft read a prompt and begin its answer.

        Args:
            model: The target.
            input_ids: [N] int64, without padding.
            images: Images in the prompt.

        Returns:
            The scores [N] float32 of the prompt's tokens, and what the draft generated: [T] int64, at most
            `lookahead` tokens, its end token included. Both on the device of `input_ids`.

        Raises:
            UserError: the draft has no layer `first_layer`, reads no images where there are some, or its context is too
                short for the prompt and its answer.
        """
        if isinstance(self.draft, DraftHeadSource):
            if images:
                raise UserError(f"{type(self).__name__}: a draft head reads no images; give a draft model that does")
            return self._look_with_head(model, self.draft, input_ids)
        draft = self.draft.of(model)
        places = self._scoring(draft)
        require_draft_fits(type(self).__name__, len(input_ids), self.lookahead, draft)
        prompt = input_ids[None].to(draft.device)
        needs = Needs(window=self.window + self.lookahead - 1)
        state = prefill(draft, prompt, needs=needs, images=images and images.read_by(draft))
        stop = stop_after(self.lookahead, end_ids(draft))
        decoded = decode(draft, state, stop, pad_token=0)
        scores = self._scores(draft, decoded.state, places, prompt.shape[1], decoded.ids.shape[1] - 1)
        return scores.to(input_ids.device), decoded.ids[0].to(input_ids.device)

    def _look_with_head(
        self, model: PreTrainedModel, draft: DraftHeadSource, input_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `look`. The head's first key is for the first two tokens, which get the same score."""
        if self.first_layer is not None:
            raise UserError(f"{type(self).__name__}: a draft head has one layer; leave out first_layer")
        state = prefill(model, input_ids[None], needs=Needs(features=draft.layers))
        answer = head_answer(model, state, draft, self.lookahead, self.window)
        real, cache = answer.draft.mask, answer.cache
        generated = answer.draft.ids[0] if real is None else answer.draft.ids[0, real[0]]
        read = len(generated) - 1
        cache.crop(len(input_ids) - 1 + read)
        assert cache.queries is not None
        seen = observed_attention(
            cache.queries,
            cache.keys,
            Softmax(cache.queries.shape[3] ** -0.5),
            len(input_ids) - 1,
            query_mask=self._weights(read).to(input_ids.device)[None],
            reduction=self.reduction,
        )
        scores = self._over_heads(seen[0])
        return torch.cat([scores[:1], scores]), generated

    def _scores(self, draft: PreTrainedModel, state: State, places: list[int], length: int, generated: int) -> Tensor:
        """[N] float32. Maximum and sum commute, so that all queries of a layer are reduced at once."""
        rows = self.window + generated
        weights, ahead = self._weights(generated).to(state.logits.device), state.trace.ahead
        layers = [*zip(state.trace.queries, attended_entries(draft, state), state.trace.softmax, strict=True)]
        by_layer = [
            observed_attention(
                queries[:, :, -rows:],
                each.keys,
                softmax,
                length,
                query_mask=weights[None],
                ahead=None if ahead is None else ahead[:, -rows:],
                reduction=self.reduction,
            )[0]
            for queries, each, softmax in map(layers.__getitem__, places)
        ]
        return self._over_heads(torch.cat(by_layer))

    def _weights(self, generated: int) -> Tensor:
        """[window + generated] float32: what the attention of each observing query counts."""
        ramp = torch.linspace(0, 1, self.window) if self.window > 1 else torch.ones(1)
        return functional.pad(ramp, (0, generated), value=1.0)

    def _over_heads(self, by_head: Tensor) -> Tensor:
        """[heads of all layers, N] -> [N]."""
        return by_head.amax(dim=0) if self.reduction == "max" else by_head.sum(dim=0)

    def _scoring(self, draft: PreTrainedModel) -> list[int]:
        """Which of the draft's layers with full attention score, by their places among these."""
        layers = draft.config.get_text_config().num_hidden_layers
        first = min(_FIRST_LAYER, layers // 2) if self.first_layer is None else self.first_layer
        if first >= layers:
            raise UserError(
                f"{type(self).__name__}: first_layer {first} is out of range: the draft's layers are 0 to {layers - 1}"
            )
        places = [place for place, layer in enumerate(full_attention_layers(draft.config)) if layer >= first]
        if not places:
            raise UserError(
                f"{type(self).__name__}: the draft has no layer with full attention from layer {first} on; lower "
                "first_layer, or take another draft"
            )
        return places


def require_room(name: str, length: int, lookahead: int, context: int) -> None:
    """Refuse prompts that leave no room for a draft in the target's context.

    Raises:
        UserError: with one line that names the numbers.
    """
    if length + lookahead > context:
        raise UserError(
            f"{name}: {lookahead} drafted tokens after a prompt of {length} do not fit the context of {context}; "
            "shorten the draft (lookahead) or the prompt"
        )
