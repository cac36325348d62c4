"""InfLLM (arXiv 2402.04617): a window, and earlier blocks that are looked up by their representative tokens.

Prompts are read this way from their first token on, and may be longer than the model's context.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Positive, UserError, Whole
from keepsight.models.decoder import full_attention_layers
from keepsight.runtime import registry
from keepsight.runtime.attention import OwnAttention, Reader, Softmax
from keepsight.runtime.importance import top_indices
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.rotary import Rotary
from keepsight.runtime.sparse_read.cache import SelectedState, SparseRead
from keepsight.runtime.state import State, empty_cache, read, with_full_layers

_BLOCKS_OF_BUDGET = 49
"""Blocks in the authors' budget of 6272 entries."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens that a token reads: `sinks`, a `window` that includes itself, and `top` blocks of `block` each.

    `representatives` tokens per query head represent a block; `step` tokens look up blocks at a time.
    """

    sinks: int
    window: int
    block: int
    top: int
    representatives: int
    step: int


class MemoryLayer(OwnAttention, KeptLayer):
    """A cache layer of keys without positions, and of the blocks' representatives.

    Fewer tokens than a block has lie between the last block and the window. Everything
    outside a token's window is read at one distance, the length of the window.
    """

    def __init__(self, sizes: Sizes, rotary: Rotary) -> None:
        super().__init__()
        self.sizes = sizes
        self.rotary = rotary
        self._blocks: Tensor | None = None  # [B, H, b, d]: means of the representatives' keys
        self._scores: Tensor | None = None  # [B, H, n] float32: attention that the last n tokens got in the window
        self._far = 0  # number of first tokens that are sinks or in blocks

    @property
    @override
    def nbytes(self) -> int:
        nbytes = super().nbytes
        if self._blocks is not None:
            nbytes += self._blocks.nbytes
        if self._scores is not None:
            nbytes += self._scores.nbytes
        return nbytes

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        if self._blocks is None:
            self._blocks = query.new_zeros(*query.shape[:2], 0, query.shape[3])
            self._scores = query.new_zeros(*query.shape[:2], 0, dtype=torch.float32)
        step = self.sizes.step
        steps = zip(query.split(step, dim=2), key.split(step, dim=2), value.split(step, dim=2), strict=True)
        outputs = []
        for step_query, step_key, step_value in steps:
            outputs.append(self._step(step_query, step_key, step_value, softmax))
        return torch.cat(outputs, dim=1)

    def _step(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Queries [B, H, e, d], keys and values [B, K, e, d] -> [B, e, H, d]."""
        start = self.seen
        rows = query.shape[2]
        kv_heads = key.shape[1]
        window = self.sizes.window
        positions = torch.arange(start, start + rows, device=query.device)[None]
        plain_key = self.rotary.undone(key.float(), positions).to(key.dtype)
        KeptLayer.update(self, plain_key, value)

        # Far tokens are read at the distance of the window, whatever their positions are.
        far_query = self.rotary.undone(query.float(), positions)
        far_query = self.rotary.turned(far_query, torch.full_like(positions, window)).to(query.dtype)
        far_keys, far_values, far_tokens = self._read_far(far_query)

        first_near = max(start - window + 1, 0)
        near_tokens = torch.arange(first_near, self.seen, device=query.device)
        near_keys = self.rotary.turned(self.keys[:, :, first_near:].float(), near_tokens[None]).to(query.dtype)
        near_values = self.values[:, :, first_near:]

        # A query does not see tokens after it, and sees those of its window once.
        far_age = positions[0, :, None] - far_tokens
        near_age = positions[0, :, None] - near_tokens
        unseen_far = (far_age < window) & (far_tokens >= self._far)
        unseen_near = (near_age < 0) | (near_age >= window)
        unseen = torch.cat([unseen_far, unseen_near], dim=1)

        far_query = far_query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
        near_query = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
        logits = torch.cat([softmax.logits(far_query, far_keys), softmax.logits(near_query, near_keys)], dim=3)
        logits = logits.unflatten(2, (-1, rows)).masked_fill(unseen, -torch.inf)
        weights = softmax.normalised(logits).flatten(1, 2)
        self._remember(weights[..., len(far_tokens) :].sum(dim=2))

        values = torch.cat([far_values, near_values], dim=2)
        grouped_weights = weights.unflatten(1, (kv_heads, -1)).flatten(2, 3).to(values.dtype)
        output = (grouped_weights @ values).unflatten(2, (-1, rows)).flatten(1, 2)
        return output.transpose(1, 2).contiguous()

    def _read_far(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, K, F, d] before the window, by queries [B, H, e, d], and which tokens they are, [F].

        Tokens in blocks are -1: rows choose different blocks.
        """
        assert self._blocks is not None
        sizes = self.sizes
        device = query.device
        with torch.autocast(device.type, enabled=False):
            scores = torch.einsum("bhd,bhnd->bn", query.float().mean(dim=2), self._blocks.float())
        blocks = top_indices(scores, min(sizes.top, self._blocks.shape[2]), signed=True)
        within_block = torch.arange(sizes.block, device=device)
        block_tokens = (sizes.sinks + blocks[..., None] * sizes.block + within_block).flatten(1)

        sinks = torch.arange(min(self._far, sizes.sinks), device=device)
        unfilled = torch.arange(self._far, max(self.seen - sizes.window, self._far), device=device)
        batch = len(query)
        tokens = torch.cat([sinks.expand(batch, -1), block_tokens, unfilled.expand(batch, -1)], dim=1)
        index = tokens[:, None, :, None].expand(-1, self.keys.shape[1], -1, -1)
        keys = self.keys.gather(2, index.expand(-1, -1, -1, self.keys.shape[3]))
        values = self.values.gather(2, index.expand(-1, -1, -1, self.values.shape[3]))
        return keys, values, torch.cat([sinks, torch.full_like(block_tokens[0], -1), unfilled])

    def _remember(self, attention: Tensor) -> None:
        """Add the attention [B, H, n] of the window's last n tokens, and make blocks of the tokens that left it."""
        assert self._scores is not None and self._blocks is not None
        sizes = self.sizes
        scored_from = self._far  # the token of the first score
        not_far = self.seen - self._far
        scores = attention.new_zeros(*attention.shape[:2], not_far)
        scores[..., : self._scores.shape[2]] += self._scores
        scores[..., not_far - attention.shape[2] :] += attention

        if self._far < sizes.sinks:
            self._far += max(min(sizes.sinks - self._far, not_far - sizes.window), 0)

        block_count = max(self.seen - self._far - sizes.window, 0) // sizes.block
        if block_count > 0:
            start = self._far
            end = start + block_count * sizes.block
            block_scores = scores[..., start - scored_from : end - scored_from]
            block_scores = block_scores.unflatten(2, (block_count, sizes.block)).contiguous()
            representatives = top_indices(block_scores, min(sizes.representatives, sizes.block))

            keys = self.keys[:, :, start:end].unflatten(2, (block_count, sizes.block))
            keys = keys.repeat_interleave(representatives.shape[1] // keys.shape[1], dim=1)
            index = representatives[..., None].expand(-1, -1, -1, -1, keys.shape[4])
            block_means = keys.gather(3, index).mean(dim=3)
            self._blocks = torch.cat([self._blocks, block_means], dim=2)
            self._far = end

        self._scores = scores[..., self._far - scored_from :].contiguous()

    @override
    def entries(self) -> LayerEntries:
        """All entries, keys at their own positions."""
        positions = torch.arange(self.seen, device=self.keys.device)[None]
        keys = self.rotary.turned(self.keys.float(), positions).to(self.keys.dtype)
        return LayerEntries(keys, self.values, None)

    @override
    def crop(self, tokens_to_remove: int) -> None:
        raise UserError(
            "crop: InfLLM's blocks depend on the tokens to remove; keep a copy of the state", field="crop", code="state"
        )


@registry.method("infllm", colour="#6699CC", marker="*")
@dataclass(frozen=True)
class InfLLM(SparseRead):
    """Reads sinks, a window, and the blocks that fit the queries best, during the prefill too.

    InfLLM (arXiv 2402.04617), section 3, with the authors' sizes in proportion: of 6272 entries 128 are sinks, 4096 the
    window, and 2048 in 16 blocks of 128. Blocks are whole numbers of entries, and what rounding leaves goes to more of
    them: 31 at budgets of 64 and 128, where half of the entries are the window. Where their code departs from the
    paper, the code is followed: the tokens of a block that got most attention in the window represent it, and their
    keys are averaged. Entries stay on the device, where the authors move blocks to the CPU. Tokens that do not fill a
    block yet are read besides the budget.

    Attributes:
        block: Entries of a block; a 49th of the budget by default. A block is represented by a key of every query head:
            with small budgets, whose blocks have one or two entries, these keys take more bytes than the entries.
        sinks: First entries, in blocks.
        window: Last entries, in blocks.
        representatives: Entries that represent a block, per query head.
        step: Tokens of a prompt that look up blocks at a time, in blocks; at most `window`.
    """

    block: Positive | None = None
    sinks: Whole = 1
    window: Positive = 32
    representatives: Positive = 4
    step: Positive = 4

    @override
    def __post_init__(self) -> None:
        if self.step > self.window:
            raise UserError(
                f"InfLLM: step {self.step} is above window {self.window}; give at most that many blocks",
                field="step",
                code="range",
            )
        super().__post_init__()

    @override
    def smallest_budget(self) -> tuple[int, str]:
        blocks = self.sinks + self.window + 1
        if self.block is None:
            return max(_BLOCKS_OF_BUDGET, blocks), "a 49th of it is a block"
        return blocks * self.block, "sinks, window and one block to choose"

    def sizes(self, length: int) -> Sizes:
        """The sizes for a prompt of `length` tokens and its answer."""
        budget = self.budget_for(length)
        block = self.block or budget // _BLOCKS_OF_BUDGET
        sinks = block * self.sinks
        window = block * self.window
        return Sizes(
            sinks=sinks,
            window=window,
            block=block,
            top=max((budget - sinks - window) // block, 1),
            representatives=self.representatives,
            step=block * self.step,
        )

    @override
    def check(self, length: int, context: int) -> None:
        """Prompts of any length: most of one lies outside the model's window."""

    @override
    def shares_prefill(self, length: int) -> bool:
        return False

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return model

    @override
    @torch.no_grad()
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        if mask is not None and not bool(mask.bool().all()):
            raise UserError(
                "InfLLM reads prompts without padding; give prompts one by one", field="prompt", code="data"
            )
        batch, length = input_ids.shape
        sizes = self.sizes(length)
        layers = [MemoryLayer(sizes, Rotary(model, index)) for index in full_attention_layers(model.config)]
        cache = with_full_layers(empty_cache(model), layers)
        lengths = input_ids.new_zeros(batch)
        state: State = SelectedState(cache, torch.empty(0), input_ids[:, :0], lengths, padded=False)

        if length > 1:
            chunk = max((options.get("chunk") or length) // sizes.step, 1) * sizes.step
            for chunk_ids in input_ids[:, :-1].split(chunk, dim=1):
                state, _ = read(model, state, chunk_ids, logits_to_keep=1)
        # The last token looks up blocks alone, as those of an answer do.
        state, _ = read(model, state, input_ids[:, -1:], logits_to_keep=1)
        return state

    @override
    def layers_for(self, model: PreTrainedModel, state: State) -> list[KeptLayer]:
        raise UserError(
            "InfLLM makes its blocks while it reads: this state was read densely; give it the prompt",
            field="state",
            code="state",
        )
