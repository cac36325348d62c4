"""SpecPC and SpecKV-PC (arXiv 2506.08373): a draft model's attention decides which prompt tokens the model reads."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Budget, Positive, UserError, Whole
from keepsight.models.decoder import context_of, full_attention_layers
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, Uniform
from keepsight.runtime.attention import Softmax
from keepsight.runtime.drafting.observer import DraftIds, DraftObserver, FixedDraft
from keepsight.runtime.drafting.speckv import SpecKV, require_draft_fits
from keepsight.runtime.drafting.speculative import head_answer
from keepsight.runtime.generate import Method, decode, end_ids, stop_after
from keepsight.runtime.images import Images
from keepsight.runtime.importance import observed_attention, recorded_queries
from keepsight.runtime.prompt_compression.method import ShortenPrompt, pad_left, unpadded
from keepsight.runtime.state import Needs, State, prefill


def select_tokens(
    scores: Tensor, budget: int, window: int, kernel: int, neighbors: int, pooling: str = "max"
) -> Tensor:
    """Select tokens [min(budget, N)] int64, ascending, by their scores [N] float, not negative.

    The last `window` tokens come first; then the tokens by their pooled scores, the highest first, each followed by its
    neighbours, the nearest first; until the budget is full. Ties go to the lowest index.

    Pooling is `max`, or `avg` that always divides by `kernel`; of an even kernel one more token follows a token than
    precedes it, and zeros pad both ends. A neighbourhood of `neighbors` tokens, itself included, has the same shape.
    """
    length = len(scores)
    device = scores.device
    if budget >= length:
        return torch.arange(length, device=device)

    before = (kernel - 1) // 2
    padded = functional.pad(scores[None], (before, kernel - 1 - before))
    pool = functional.max_pool1d if pooling == "max" else functional.avg_pool1d
    pooled = pool(padded, kernel, stride=1)[0]

    # All tokens in the order in which they are wanted; a token may come more than once.
    ranked = pooled.argsort(descending=True, stable=True)[:budget]
    offsets = _nearest_first(neighbors).to(device)
    neighbourhoods = (ranked[:, None] + offsets).clamp(0, length - 1).flatten()
    wanted = torch.cat([torch.arange(length - window, length, device=device), neighbourhoods])

    # Of each token, the first rank at which it is wanted.
    ranks = torch.arange(len(wanted), device=device)
    first_ranks = torch.full_like(scores, len(wanted), dtype=torch.long).scatter_reduce(0, wanted, ranks, "amin")
    return first_ranks.argsort(stable=True)[:budget].sort().values


def _nearest_first(neighbors: int) -> Tensor:
    """Offsets of a token's neighbours: 0, -1, 1, -2, 2, ..."""
    neighbors = max(neighbors, 1)
    offsets = torch.arange(neighbors) - (neighbors - 1) // 2
    return offsets[offsets.abs().argsort(stable=True)]


@registry.method("specpc")
@dataclass(frozen=True)
class SpecPC(ShortenPrompt):
    """Keeps the tokens that a draft model attends to as it begins to answer, and their neighbours.

    SpecPC (arXiv 2506.08373), algorithm 2.

    Attributes:
        draft: Source of the draft model, or a draft head.
        lookahead: Tokens that the draft generates. The last of them is never read, so that one less observes beside
            the window; with 1 (as published) the window observes alone.
        first_layer: First of the draft's layers that scores; None for 8, or for half of the draft's layers where that
            is less. A draft head has a single layer.
        reduction: Reduction over observing queries, heads and layers: `max` or `sum`.
        pooling: Pooling over neighbouring tokens: `max` or `avg`.
        kernel: Tokens pooled; may be even; 1 turns pooling off. As published: 64 for Qwen2.5, 32 for Llama 3.
        neighbors: Tokens kept around a selected one, itself included; None for as many as `kernel`, 0 for none.
    """

    window: Positive = 64
    draft: DraftSource | DraftHeadSource = field(kw_only=True)
    lookahead: Positive = 1
    first_layer: Whole | None = None
    reduction: Annotated[str, Literal["max", "sum"]] = "max"
    pooling: Annotated[str, Literal["max", "avg"]] = "max"
    kernel: Positive = 64
    neighbors: Whole | None = None
    reads_images = True
    takes_draft = True

    @override
    def check(self, length: int, context: int) -> None:
        super().check(length, context)
        if self.budget_for(length) == length:
            return  # nothing is drafted
        _require_room(type(self).__name__, length, self.lookahead, context)

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        images: Images | None = options.get("images")
        if not images:
            return super().start(model, input_ids, mask, **options)
        if len(input_ids) != 1 or (mask is not None and not mask.all()):
            raise UserError(
                f"{type(self).__name__}: a prompt with images is shortened alone, unpadded; give one",
                field="pixel_values",
                code="conflict",
            )
        kept_positions = self.tokens_to_read(model, input_ids[0], images)
        if kept_positions is not None:
            images = images.shortened(model, input_ids, kept_positions)
            input_ids = input_ids[:, kept_positions]
        return prefill(model, input_ids, chunk=options.get("chunk"), needs=Needs(), images=images)

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        scores, _ = self.draft_scores(model, input_ids, images)
        return self.best_tokens(scores)

    def best_tokens(self, scores: Tensor) -> Tensor:
        """The tokens to keep, [C] int64 ascending, of a prompt with such scores [N] float32."""
        neighbors = self.kernel if self.neighbors is None else self.neighbors
        budget = self.budget_for(len(scores))
        return select_tokens(scores, budget, self.window, self.kernel, neighbors, self.pooling)

    @torch.no_grad()
    def draft_scores(
        self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None
    ) -> tuple[Tensor, Tensor]:
        """Let the draft read a prompt [N] int64 and begin its answer.

        Returns:
            The scores [N] float32 of the prompt's tokens, and the draft's answer: [T] int64, at most `lookahead`
            tokens, its end token included. Both on the device of `input_ids`.

        Raises:
            UserError: the draft has no layer `first_layer`, reads no images where there are some, or its context is too
                short for the prompt and its answer.
        """
        if isinstance(self.draft, DraftHeadSource):
            if images:
                raise UserError(
                    f"{type(self).__name__}: a draft head reads no images; give a draft model that does",
                    field="draft",
                    code="model",
                )
            return self._head_scores(model, self.draft, input_ids)

        draft = self.draft.of(model)
        scoring_layers = self._scoring_layers(draft)
        length = len(input_ids)
        require_draft_fits(type(self).__name__, length, self.lookahead, draft)
        if images:
            images = images.read_by(draft, length)
        needs = Needs(window=self.window + self.lookahead - 1)
        state = prefill(draft, input_ids[None].to(draft.device), needs=needs, images=images)
        stop = stop_after(self.lookahead, end_ids(draft))
        decoded = decode(draft, state, stop, pad_token=0)

        # Maximum and sum commute, so that all queries of a layer are reduced at once.
        generated_queries = decoded.ids.shape[1] - 1
        weights = self._query_weights(generated_queries).to(state.logits.device)
        by_head = []
        layers = decoded.state.layers
        for index in scoring_layers:
            recorded = recorded_queries(layers[index], self.window + generated_queries)
            attention = observed_attention(
                recorded.queries,
                layers[index].attended().keys,
                recorded.softmax,
                length,
                query_mask=weights[None],
                ahead=recorded.ahead,
                reduction=self.reduction,
            )
            by_head.append(attention[0])
        scores = self._reduce_heads(torch.cat(by_head))
        return scores.to(input_ids.device), decoded.ids[0].to(input_ids.device)

    def _head_scores(self, model: PreTrainedModel, draft: DraftHeadSource, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `draft_scores`. The head's first key is for the first two tokens, which get the same score."""
        if self.first_layer is not None:
            raise UserError(
                f"{type(self).__name__}: a draft head has one layer; leave out first_layer",
                field="first_layer",
                code="conflict",
            )
        state = prefill(model, input_ids[None], needs=Needs(features=draft.layers))
        answer, cache = head_answer(model, state, draft, self.lookahead, self.window)
        generated = answer.ids[0]
        if answer.mask is not None:
            generated = generated[answer.mask[0]]

        generated_queries = len(generated) - 1
        cache.keep_first(len(input_ids) - 1 + generated_queries)
        assert cache.queries is not None
        attention = observed_attention(
            cache.queries,
            cache.keys,
            Softmax(cache.queries.shape[3] ** -0.5),
            len(input_ids) - 1,
            query_mask=self._query_weights(generated_queries).to(input_ids.device)[None],
            reduction=self.reduction,
        )
        scores = self._reduce_heads(attention[0])
        return torch.cat([scores[:1], scores]), generated

    def _query_weights(self, generated: int) -> Tensor:
        """[window + generated] float32: the weight of each observing query's attention."""
        ramp = torch.linspace(0, 1, self.window, dtype=torch.float32)
        if self.window == 1:
            ramp = torch.ones(1, dtype=torch.float32)
        return functional.pad(ramp, (0, generated), value=1.0)

    def _reduce_heads(self, by_head: Tensor) -> Tensor:
        """[heads of all layers, N] -> [N]."""
        if self.reduction == "max":
            return by_head.amax(dim=0)
        return by_head.sum(dim=0)

    def _scoring_layers(self, draft: PreTrainedModel) -> list[int]:
        """Which of the draft's layers with full attention score, by their indices among these."""
        layers = draft.config.get_text_config().num_hidden_layers
        first = self.first_layer
        if first is None:
            first = min(8, layers // 2)  # 8 in the published configurations, whose drafts have 16 and 24 layers
        if first >= layers:
            raise UserError(
                f"{type(self).__name__}: first_layer {first} is out of range: the draft's layers are 0 to {layers - 1}",
                field="first_layer",
                code="range",
            )
        full_layers = full_attention_layers(draft.config)
        scoring_layers = [index for index, layer in enumerate(full_layers) if layer >= first]
        if not scoring_layers:
            raise UserError(
                f"{type(self).__name__}: the draft has no layer with full attention from layer {first} on; lower "
                "first_layer, or take another draft",
                field="first_layer",
                code="model",
            )
        return scoring_layers


def _require_room(name: str, length: int, lookahead: int, context: int) -> None:
    if length + lookahead > context:
        raise UserError(
            f"{name}: {lookahead} drafted tokens after a prompt of {length} do not fit the context of {context}; "
            "shorten the draft (lookahead) or the prompt",
            field="lookahead",
            code="range",
        )


@registry.method("speckvpc")
@dataclass(frozen=True)
class SpecKVPC(Method):
    """Shortens the prompt by a draft model's attention, then evicts by the draft model's answer (arXiv 2506.08373).

    Attributes:
        budget: Entries per layer and KV head, or a ratio of the whole prompt; see `keepsight.runtime.evict`.
        draft: Source of the draft model, or a draft head.
        prompt_budget: Tokens that SpecPC keeps; never fewer than `budget`, so that the budget is always used.
        lookahead: Maximum length of the draft in tokens, its end token included; all of them observe.
        kernel: SpecPC's pooling and neighbourhood, in tokens (as published, for every model).
        first_layer: SpecPC's first scoring layer; see `SpecPC`.
        prompt_window: SpecPC's window: the last prompt tokens that are kept and that the draft observes with.
        window: Last tokens of the short prompt that are kept and observe too. The published window of 32 does not
            count the last prompt token, which is here an entry like any other: 33.
        allocate: Divides the budget over layers and KV heads.
    """

    section = "shorten"
    cost = "a draft model that reads the prompt first; a shorter prefill"
    takes_draft = True
    budget: Budget
    draft: DraftSource | DraftHeadSource = field(kw_only=True)
    prompt_budget: Positive = 2048
    lookahead: Positive = 20
    kernel: Positive = 32
    first_layer: Whole | None = None
    prompt_window: Positive = 64
    window: Whole = 33
    allocate: Allocation = Uniform()

    def __post_init__(self) -> None:
        # Both refuse options that are out of range.
        self._eviction(DraftIds(torch.empty(1, 0, dtype=torch.long)))
        self._compressor(0)

    @override
    def check(self, length: int, context: int) -> None:
        self._compressor(0).check(length, context)
        _require_room(type(self).__name__, length, self.lookahead, context)

    @override
    @torch.no_grad()
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        prompts = unpadded(input_ids, mask)
        shortened = []
        drafts = []
        for prompt in prompts:
            self.check(len(prompt), context_of(model))
            compressor = self._compressor(self.budget_for(len(prompt)))
            scores, draft = compressor.draft_scores(model, prompt)
            shortened.append(prompt[compressor.best_tokens(scores)])
            drafts.append(draft)

        lengths = tuple(len(prompt) for prompt in prompts)
        eviction = self._eviction(_pad_right(drafts), lengths)
        short_ids, short_mask = pad_left(shortened)
        state = prefill(model, short_ids, short_mask, needs=eviction.needs(), **options)
        return eviction.compress_state(model, state)

    def _compressor(self, entries: int) -> SpecPC:
        """The method that shortens a prompt, of which this many entries are kept in the end."""
        return SpecPC(
            max(self.prompt_budget, entries),
            self.prompt_window,
            draft=self.draft,
            lookahead=self.lookahead,
            kernel=self.kernel,
            first_layer=self.first_layer,
        )

    def _eviction(self, draft: DraftIds, lengths: tuple[int, ...] = ()) -> SpecKV:
        """The method that evicts from the shortened prompts, with their drafts; `lengths` are the prompts' own."""
        observer = DraftObserver(FixedDraft(draft), self.window)
        return _OfWholePrompt(self.budget, observer, allocate=self.allocate, window=self.window, lengths=lengths)


@dataclass(frozen=True)
class _OfWholePrompt(SpecKV):
    """SpecKV on shortened prompts, whose budgets are those for prompts of `lengths` tokens."""

    lengths: tuple[int, ...] = ()

    @override
    def budgets(self, state: State) -> list[int]:
        return [self.budget_for(length) for length in self.lengths]


def _pad_right(drafts: list[Tensor]) -> DraftIds:
    """A batch of drafts [T] int64, padded on the right."""
    ids = pad_sequence(drafts, batch_first=True)
    mask = pad_sequence([torch.ones_like(draft, dtype=torch.bool) for draft in drafts], batch_first=True)
    if bool(mask.all()):
        return DraftIds(ids, None)
    return DraftIds(ids, mask)
