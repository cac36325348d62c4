"""ShadowKV (arXiv 2410.21465): keys in low rank before RoPE, values in CPU memory, and chunks read by their means.

Entries of a prompt are counted from a row's first token here, also where it is padded on the left.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Positive, Share, UserError, Whole
from keepsight.models.decoder import full_attention_layers
from keepsight.runtime import registry
from keepsight.runtime.attention import Softmax, grouped_attention
from keepsight.runtime.importance import attention_weights, reduce_group, top_indices
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.offload import FullEntries, Traffic
from keepsight.runtime.rotary import Rotary
from keepsight.runtime.sparse_read.cache import LayerSelector, SelectedLayer, Selection, SparseRead, entries_of
from keepsight.runtime.state import State


class Counts(NamedTuple):
    """Numbers of tokens, chunks before the local part, exact chunks and chunks to choose: of each row, or of all."""

    tokens: list[int]
    chunks: list[int]
    outliers: list[int]
    chosen: list[int]


@dataclass(frozen=True)
class LowRankKeys:
    """Keys of n tokens before RoPE, the KV heads of a layer side by side, as a product of rank r.

    Attributes:
        left: [B, n, r].
        right: [B, K, r, d].
        rotary: The layer's RoPE.
    """

    left: Tensor
    right: Tensor
    rotary: Rotary

    @classmethod
    def of(cls, keys: Tensor, real: Tensor | None, rank: int, rotary: Rotary) -> "LowRankKeys":
        """From keys [B, K, n, d] after RoPE, of which `real` [B, n] bool are tokens.

        The right singular vectors are the eigenvectors of the keys' Gram matrix: a decomposition of K x d numbers
        squared, however long the prompt is.
        """
        positions = torch.arange(keys.shape[2], device=keys.device)[None]
        plain = rotary.undone(keys.float(), positions).transpose(1, 2).flatten(2)
        if real is not None:
            plain = plain * real[..., None]
        with torch.autocast(keys.device.type, enabled=False):
            gram = plain.mT.double() @ plain.double()
            vectors = torch.linalg.eigh(gram).eigenvectors[..., -rank:].to(plain.dtype)
            left = plain @ vectors
        right = vectors.mT.unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
        return cls(left.to(keys.dtype), right.to(keys.dtype), rotary)

    def at(self, tokens: Tensor) -> Tensor:
        """Keys [B, K, k, d] after RoPE of tokens [B, K, k] int64."""
        rows = torch.arange(len(self.left), device=tokens.device)[:, None, None]
        with torch.autocast(tokens.device.type, enabled=False):
            plain = self.left[rows, tokens].float() @ self.right.float()
        turned = self.rotary.turned(plain.flatten(0, 1)[:, None], tokens.flatten(0, 1))
        return turned.view_as(plain).to(self.left.dtype)


@dataclass(frozen=True)
class ShadowPrompt(LayerSelector):
    """The prompt's entries of one layer, but for the local part; it is never written to.

    Attributes:
        keys: Their keys in low rank.
        values: Their values, on the CPU.
        landmarks: [B, K, c, d]: means of the chunks' keys after RoPE.
        open: [B, K, c] bool: chunks that a step may choose; False for outliers, and where a row has fewer chunks.
        outliers: Entries of the outliers.
        places: [B, K, o] int64: which entries these are.
        counts: Numbers of tokens and chunks.
        chunk: Entries per chunk.
    """

    keys: LowRankKeys
    values: FullEntries
    landmarks: Tensor
    open: Tensor
    outliers: LayerEntries
    places: Tensor
    counts: Counts
    chunk: int

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, counts: Counts, chunk: int, rank: int, rotary: Rotary, traffic: Traffic
    ) -> "ShadowPrompt":
        """From the entries [B, K, N, d] of a prompt, which begin with the first token."""
        real = None
        if len(counts.tokens) > 1:
            real = torch.arange(keys.shape[2], device=keys.device) < _column(counts.tokens, keys)
        end = max(counts.chunks) * chunk
        low = LowRankKeys.of(keys, real, min(rank, keys.shape[1] * keys.shape[3]), rotary)
        low = LowRankKeys(low.left[:, :end].contiguous(), low.right, rotary)
        keys, values = keys[:, :, :end], values[:, :, :end]
        chunks = keys.unflatten(2, (max(counts.chunks), chunk))
        landmarks = chunks.float().mean(dim=3)
        worst = torch.cosine_similarity(chunks.float(), landmarks[:, :, :, None], dim=4).amin(dim=3)
        number = torch.arange(worst.shape[2], device=keys.device)
        open_chunks = (number < _column(counts.chunks, keys)[:, None]).expand_as(worst)
        order = top_indices((-worst).masked_fill(~open_chunks, -torch.inf), max(counts.outliers), signed=True)
        taken = (number[: order.shape[2]] < _column(counts.outliers, keys)[:, None]).expand_as(order)
        is_outlier = torch.zeros_like(open_chunks).scatter(2, order, taken)
        places = _tokens(order, chunk)
        exact = [each.gather(2, places[..., None].expand(-1, -1, -1, each.shape[3])) for each in (keys, values)]
        outliers = LayerEntries(exact[0], exact[1], None if real is None else taken.repeat_interleave(chunk, dim=2))
        full = FullEntries.offload(keys[..., :0], values, traffic)
        open_chunks = open_chunks & ~is_outlier
        return cls(low, full, landmarks.to(keys.dtype), open_chunks, outliers, places, counts, chunk)

    @property
    @override
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = [self.keys.left, self.keys.right, self.landmarks, self.open, *self.outliers[:2], self.places]
        return sum(each.nbytes for each in tensors)

    def choose(self, query: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
        """The entries [B, K, k] int64 that a query [B, H, 1, d] reads beside outliers, and which are real."""
        count = min(max(self.counts.chosen), self.landmarks.shape[2])
        hidden = self.open.new_zeros(len(query), 1, 0)
        weights = attention_weights(query, self.landmarks, softmax, self.open, hidden)[:, :, 0]
        importance = reduce_group(weights, self.landmarks.shape[1], "max").masked_fill(~self.open, -1.0)
        chunks = top_indices(importance, count)
        tokens = _tokens(chunks, self.chunk)
        if self.outliers.real is None:
            return tokens, None
        within = torch.arange(count, device=query.device) < _column(self.counts.chosen, query)[:, None]
        real = within & self.open.gather(2, chunks)
        return tokens, real.repeat_interleave(self.chunk, dim=2)

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        """See `LayerSelector.select`; the indices are places in the whole cache."""
        chosen, real = self.choose(query, softmax)
        starts = _column([0] * len(query), query) if padding is None else padding[:, None]
        local = starts + _column(self.counts.chunks, query) * self.chunk
        rest = torch.arange(int(local.min()), keys.shape[2] - 1, device=query.device).expand(*chosen.shape[:2], -1)
        indices = torch.cat([starts[:, None] + chosen, starts[:, None] + self.places, rest], dim=2)
        if real is None or self.outliers.real is None:
            return Selection(indices, None)
        return Selection(indices, torch.cat([real, self.outliers.real, rest >= local[:, None]], dim=2))

    def read(self, query: Tensor, softmax: Softmax) -> LayerEntries:
        """The entries [B, K, k, d] that a query [B, H, 1, d] reads, outliers last."""
        tokens, real = self.choose(query, softmax)
        fetch = self.values.fetch(tokens)
        keys = self.keys.at(tokens)
        return _followed(LayerEntries(keys, fetch.rows(), real), self.outliers)

    def entries(self) -> LayerEntries:
        """All entries before the local part; keys are in low rank but for outliers."""
        batch, kv_heads, chunks, _ = self.landmarks.shape
        every = torch.arange(chunks * self.chunk, device=self.landmarks.device)
        keys = self.keys.at(every.expand(batch, kv_heads, -1))
        places = self.places[..., None].expand(-1, -1, -1, keys.shape[3])
        exact, real = self.outliers.keys, None
        if self.outliers.real is not None:
            exact = torch.where(self.outliers.real[..., None], exact, keys.gather(2, places))
            real = (every < _column(self.counts.chunks, keys) * self.chunk)[:, None].expand(-1, kv_heads, -1)
        return LayerEntries(keys.scatter(2, places, exact), self.values.read(keys.device), real)


def _column(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)[:, None]


def _tokens(chunks: Tensor, chunk: int) -> Tensor:
    """[B, K, m] int64, numbers of chunks -> [B, K, m x chunk], their entries."""
    return (chunks[..., None] * chunk + torch.arange(chunk, device=chunks.device)).flatten(2)


def _followed(first: LayerEntries, then: LayerEntries) -> LayerEntries:
    keys, values = (torch.cat(pair, dim=2) for pair in zip(first[:2], then[:2], strict=True))
    if first.real is None and then.real is None:
        return LayerEntries(keys, values, None)
    return LayerEntries(keys, values, torch.cat([first.marks, then.marks], dim=2))


class ShadowLayer(SelectedLayer):
    """A cache layer whose own keys and values [B, K, R, d] are the prompt's local part and all that was read since.

    `prompt` has the entries before these; `padding` [B] int64 is how many of the R entries, on the left, are padding.
    """

    def __init__(
        self, prompt: ShadowPrompt, keys: Tensor, values: Tensor, seen: int, padding: Tensor | None = None
    ) -> None:
        super().__init__(keys, values, seen, padding, prompt)
        self.prompt, self._local = prompt, keys.shape[2]

    @override
    def step(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.append(key, value)
        keys, values, real = _followed(self.prompt.read(query, softmax), super().entries())
        return grouped_attention(query, keys, values, None if real is None else real[:, :, None], softmax)

    @override
    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        self.append(keys, values)
        return self.entries()

    @override
    def entries(self) -> LayerEntries:
        """All entries, values copied to the device."""
        return _followed(self.prompt.entries(), super().entries())

    @override
    def crop(self, tokens_to_remove: int) -> None:
        if -tokens_to_remove > (read := self.keys.shape[2] - self._local):
            raise UserError(f"crop: cannot remove {-tokens_to_remove} tokens, only the {read} read since the prompt")
        super().crop(tokens_to_remove)


@registry.method("shadowkv", colour="#661100", marker="d")
@dataclass(frozen=True)
class ShadowKV(SparseRead):
    """Reads chunks of the prompt, by the means of their keys; see the module (ShadowKV, arXiv 2410.21465, section 4).

    A step reads the chosen chunks, the outliers, and the local part, all within the budget (the paper's counts the
    chosen ones alone); tokens since the prompt, which are kept exactly, come on top. Keys of prompts within the budget
    are in low rank too; the authors' code leaves passes of up to 4,096 tokens exact.

    Attributes:
        chunk: Entries per chunk.
        rank: Rank of the keys of all KV heads of a layer; at most their dimensions.
        local: Number of last full chunks that are kept exactly, with the entries after them.
        outliers: Share of the budget for chunks that are kept exactly, since a key in them is far from their mean (3/16
            in the paper's fast implementation).
    """

    chunk: Positive = 8
    rank: Positive = 160
    local: Whole = 4
    outliers: Share = 0.1875

    @override
    def __post_init__(self) -> None:
        if self.outliers == 1:
            raise UserError(f"ShadowKV: outliers {self.outliers!r} must be a share of the budget, from 0 to below 1")
        super().__post_init__()

    @override
    def least(self) -> tuple[int, str]:
        reason = "the local part, with one entry less than a chunk after it, the share of outliers, and a chunk"
        budget = self.chunk * (self.local + 2) - 1
        while self._chosen(budget, self.chunk * (self.local + 1) - 1) < 1:
            budget += 1
        return budget, reason

    def _chosen(self, budget: int, local: int) -> int:
        """Chunks to choose beside outliers and a local part of some entries."""
        return (budget - self._outliers(budget) * self.chunk - local) // self.chunk

    def _outliers(self, budget: int) -> int:
        return int(self.outliers * budget) // self.chunk

    def counts(self, state: State) -> Counts:
        """Numbers of tokens and chunks of a state's prompts."""
        budgets, width = self.budgets(state), state.tokens.shape[1]
        tokens = [width] * len(budgets) if state.tokens_mask is None else state.lengths.tolist()
        if state.tokens_mask is None:
            budgets, tokens = budgets[:1], tokens[:1]
        chunks = [max(length // self.chunk - self.local, 0) for length in tokens]
        outliers = [min(self._outliers(budget), each) for budget, each in zip(budgets, chunks, strict=True)]
        chosen = [
            min(max(self._chosen(budget, length - each * self.chunk), 0), each - own)
            for budget, length, each, own in zip(budgets, tokens, chunks, outliers, strict=True)
        ]
        return Counts(tokens, chunks, outliers, chosen)

    @override
    def layers_for(self, model: PreTrainedModel, state: State) -> list[KeptLayer]:
        counts, traffic, layers = self.counts(state), Traffic(), list[KeptLayer]()
        local = [length - chunks * self.chunk for length, chunks in zip(counts.tokens, counts.chunks, strict=True)]
        indexed = zip(full_attention_layers(model.config), entries_of(state), strict=True)
        for index, (keys, values, seen, padding) in indexed:
            recent = [each[:, :, seen - max(local) :].contiguous() for each in (keys, values)]
            if padding is not None:
                keys, values = _from_first(keys, padding), _from_first(values, padding)
                padding = max(local) - _column(local, keys)[:, 0]
            rotary = Rotary(model, index)
            prompt = ShadowPrompt.of(keys, values, counts, self.chunk, self.rank, rotary, traffic)
            layers.append(ShadowLayer(prompt, recent[0], recent[1], seen, padding))
        return layers


def _from_first(entries: Tensor, padding: Tensor) -> Tensor:
    """Entries [B, K, N, d] padded on the left -> padded on the right, by arbitrary entries."""
    places = torch.arange(entries.shape[2], device=entries.device) + padding[:, None]
    return entries.gather(2, places.clamp(max=entries.shape[2] - 1)[:, None, :, None].expand_as(entries))
