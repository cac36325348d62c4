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

_PARTS = 49
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
        self.sizes, self.rotary = sizes, rotary
        self._blocks: Tensor | None = None  # [B, H, b, d]: means of the representatives' keys
        self._scores: Tensor | None = None  # [B, H, n] float32: attention that the last n tokens got in the window
        self._far = 0  # number of first tokens that are sinks or in blocks

    @property
    @override
    def nbytes(self) -> int:
        return super().nbytes + sum(each.nbytes for each in (self._blocks, self._scores) if each is not None)

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        if self._blocks is None:
            self._blocks = query.new_zeros(*query.shape[:2], 0, query.shape[3])
            self._scores = query.new_zeros(*query.shape[:2], 0, dtype=torch.float32)
        steps = zip(*(each.split(self.sizes.step, dim=2) for each in (query, key, value)), strict=True)
        return torch.cat([self._step(*heads, softmax=softmax) for heads in steps], dim=1)

    def _step(self, query: Tensor, key: Tensor, value: Tensor, *, softmax: Softmax) -> Tensor:
        """Queries [B, H, e, d], keys and values [B, K, e, d] -> [B, e, H, d]."""
        assert self._scores is not None
        start, rows, window = self.seen, query.shape[2], self.sizes.window
        positions = torch.arange(start, start + rows, device=query.device)[None]
        plain = self.rotary.undone(key.float(), positions).to(key.dtype)
        KeptLayer.update(self, plain, value)
        far_query = self.rotary.undone(query.float(), positions)
        far_query = self.rotary.turned(far_query, torch.full_like(positions, window)).to(query.dtype)
        far_keys, far_values, far_places = self._read_far(far_query)

        first = max(start - window + 1, 0)
        near_places = torch.arange(first, self.seen, device=query.device)
        near = self.rotary.turned(self.keys[:, :, first:].float(), near_places[None]).to(query.dtype)
        age = positions[0, :, None] - torch.cat([far_places, near_places])
        hidden = age < window  # far tokens that the window has too
        hidden[:, : len(far_places)] &= far_places >= self._far
        hidden[:, len(far_places) :] = (age < 0)[:, len(far_places) :] | ~hidden[:, len(far_places) :]
        grouped = [each.unflatten(1, (near.shape[1], -1)).flatten(2, 3) for each in (far_query, query)]
        logits = torch.cat([softmax.logits(grouped[0], far_keys), softmax.logits(grouped[1], near)], dim=3)
        logits = logits.unflatten(2, (-1, rows)).masked_fill(hidden, -torch.inf)
        weights = softmax.normalised(logits).flatten(1, 2)
        self._remember(weights[..., len(far_places) :].sum(dim=2))
        values = torch.cat([far_values, self.values[:, :, first:]], dim=2)
        grouped_weights = weights.unflatten(1, (values.shape[1], -1)).flatten(2, 3).to(values.dtype)
        output = (grouped_weights @ values).unflatten(2, (-1, rows)).flatten(1, 2)
        return output.transpose(1, 2).contiguous()

    def _read_far(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, K, F, d] before the window, by queries [B, H, e, d], and which tokens they are, [F].

        Tokens in blocks are -1: rows choose different blocks.
        """
        assert self._blocks is not None
        sizes, count, device = self.sizes, self._blocks.shape[2], query.device
        with torch.autocast(device.type, enabled=False):
            scores = torch.einsum("bhd,bhnd->bn", query.float().mean(dim=2), self._blocks.float())
        chosen = top_indices(scores, min(sizes.top, count), signed=True)
        within = torch.arange(sizes.block, device=device)
        tokens = (sizes.sinks + chosen[..., None] * sizes.block + within).flatten(1)
        sinks = torch.arange(min(self._far, sizes.sinks), device=device)
        rest = torch.arange(self._far, max(self.seen - sizes.window, self._far), device=device)
        places = torch.cat([each.expand(len(query), -1) for each in (sinks, tokens, rest)], dim=1)
        index = places[:, None, :, None].expand(-1, self.keys.shape[1], -1, -1)
        keys, values = (each.gather(2, index.expand(-1, -1, -1, each.shape[3])) for each in (self.keys, self.values))
        return keys, values, torch.cat([sinks, torch.full_like(tokens[0], -1), rest])

    def _remember(self, attention: Tensor) -> None:
        """Add the attention [B, H, n] of the window's last n tokens, and make blocks of the tokens that left it."""
        assert self._scores is not None and self._blocks is not None
        sizes, since = self.sizes, self.seen - self._far
        scores = attention.new_zeros(*attention.shape[:2], since)
        scores[..., : self._scores.shape[2]] += self._scores
        scores[..., since - attention.shape[2] :] += attention
        before = self._far
        if self._far < sizes.sinks:
            self._far += max(min(sizes.sinks - self._far, since - sizes.window), 0)
        count = max(self.seen - self._far - sizes.window, 0) // sizes.block
        if count:
            first, end = self._far, self._far + count * sizes.block
            of_blocks = scores[..., first - before : end - before].unflatten(2, (count, sizes.block)).contiguous()
            best = top_indices(of_blocks, min(sizes.representatives, sizes.block))
            keys = self.keys[:, :, first:end].unflatten(2, (count, sizes.block))
            keys = keys.repeat_interleave(best.shape[1] // keys.shape[1], dim=1)
            means = keys.gather(3, best[..., None].expand(-1, -1, -1, -1, keys.shape[4])).mean(dim=3)
            self._blocks = torch.cat([self._blocks, means], dim=2)
            self._far = end
        self._scores = scores[..., self._far - before :].contiguous()

    @override
    def entries(self) -> LayerEntries:
        """All entries, keys at their own positions."""
        positions = torch.arange(self.seen, device=self.keys.device)[None]
        keys = self.rotary.turned(self.keys.float(), positions).to(self.keys.dtype)
        return LayerEntries(keys, self.values, None)

    @override
    def crop(self, tokens_to_remove: int) -> None:
        raise UserError("crop: InfLLM's blocks depend on the tokens to remove; keep a copy of the state")


@registry.method("infllm", colour="#6699CC", marker="*")
@dataclass(frozen=True)
class InfLLM(SparseRead):
    """Reads sinks, a window, and the blocks that fit the queries best, while a prompt is read as well.

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
            raise UserError(f"InfLLM: step {self.step} is above window {self.window}; give at most that many blocks")
        super().__post_init__()

    @override
    def least(self) -> tuple[int, str]:
        blocks = self.sinks + self.window + 1
        if self.block is None:
            return max(_PARTS, blocks), "a 49th of it is a block"
        return blocks * self.block, "sinks, window and one block to choose"

    def sizes(self, length: int) -> Sizes:
        """The sizes for a prompt of `length` tokens and its answer."""
        budget = self.budget_for(length)
        block = self.block or budget // _PARTS
        sinks, window, step = (block * each for each in (self.sinks, self.window, self.step))
        top = max((budget - sinks - window) // block, 1)
        return Sizes(sinks, window, block, top, self.representatives, step)

    @override
    def check(self, length: int, context: int) -> None:
        self._check_budget(self.budget_for(length))

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
            raise UserError("InfLLM reads prompts without padding; give prompts one by one")
        rows, length = input_ids.shape
        self._check_budget(self.budget_for(length))
        sizes, cache = self.sizes(length), empty_cache(model)
        layers = [MemoryLayer(sizes, Rotary(model, index)) for index in full_attention_layers(model.config)]
        cache = with_full_layers(cache, layers)
        lengths = input_ids.new_zeros(rows)
        state: State = SelectedState(cache, torch.empty(0), input_ids[:, :0], lengths, padded=False)
        chunk = max((options.get("chunk") or length) // sizes.step, 1) * sizes.step
        prompt, last = input_ids[:, :-1], input_ids[:, -1:]  # the last token looks up blocks alone, as an answer's do
        for part in (*(prompt.split(chunk, dim=1) if length > 1 else ()), last):
            state, _ = read(model, state, part, logits_to_keep=1)
        return state

    @override
    def layers_for(self, model: PreTrainedModel, state: State) -> list[KeptLayer]:
        raise UserError("InfLLM makes its blocks while it reads: this state was read densely; give it the prompt")
