"""ShadowKV (arXiv 2410.21465): keys in low rank before RoPE, values in CPU memory, and chunks read by their means.

Entries of a prompt are counted from a row's first token here, also where it is padded on the left.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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


class ChunkCounts(NamedTuple):
    """Numbers of tokens, chunks before the local part, outlier chunks and chunks to select: of each row, or of all."""

    tokens: list[int]
    chunks: list[int]
    outliers: list[int]
    selected: list[int]


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
    def from_keys(cls, keys: Tensor, real: Tensor | None, rank: int, rotary: Rotary) -> "LowRankKeys":
        """From keys [B, K, n, d] after RoPE, of which `real` [B, n] bool are tokens.

        The right singular vectors are the eigenvectors of the keys' Gram matrix: a decomposition of K x d numbers
        squared, however long the prompt is.
        """
        positions = torch.arange(keys.shape[2], device=keys.device)[None]
        plain_keys = rotary.undone(keys.float(), positions).transpose(1, 2).flatten(2)
        if real is not None:
            plain_keys = plain_keys * real[..., None]
        with torch.autocast(keys.device.type, enabled=False):
            gram = plain_keys.mT.double() @ plain_keys.double()
            vectors = torch.linalg.eigh(gram).eigenvectors[..., -rank:].to(plain_keys.dtype)
            left = plain_keys @ vectors
        right = vectors.mT.unflatten(2, (keys.shape[1], -1)).transpose(1, 2)
        return cls(left.to(keys.dtype), right.to(keys.dtype), rotary)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Keys [B, K, k, d] after RoPE of tokens [B, K, k] int64."""
        rows = torch.arange(len(self.left), device=tokens.device)[:, None, None]
        with torch.autocast(tokens.device.type, enabled=False):
            plain_keys = self.left[rows, tokens].float() @ self.right.float()
        keys = self.rotary.turned(plain_keys.flatten(0, 1)[:, None], tokens.flatten(0, 1))
        return keys.view_as(plain_keys).to(self.left.dtype)


@dataclass(frozen=True)
class ShadowPrompt(LayerSelector):
    """The prompt's entries of one layer, but for the local part; it is never written to.

    Attributes:
        keys: Their keys in low rank.
        values: Their values, on the CPU.
        landmarks: [B, K, c, d]: means of the chunks' keys after RoPE.
        selectable: [B, K, c] bool: chunks that a step may select; False for outliers, and where a row has fewer chunks.
        outliers: Entries of the outliers.
        outlier_tokens: [B, K, o] int64: which entries these are.
        counts: Numbers of tokens and chunks.
        chunk: Entries per chunk.
    """

    selecting_method: ClassVar[str] = "select_tokens"

    keys: LowRankKeys
    values: FullEntries
    landmarks: Tensor
    selectable: Tensor
    outliers: LayerEntries
    outlier_tokens: Tensor
    counts: ChunkCounts
    chunk: int

    @classmethod
    def from_entries(
        cls, keys: Tensor, values: Tensor, counts: ChunkCounts, chunk: int, rank: int, rotary: Rotary, traffic: Traffic
    ) -> "ShadowPrompt":
        """From the entries [B, K, N, d] of a prompt, which begin with the first token."""
        real = None
        if len(counts.tokens) > 1:
            real = torch.arange(keys.shape[2], device=keys.device) < _column(counts.tokens, keys)
        low_rank = LowRankKeys.from_keys(keys, real, min(rank, keys.shape[1] * keys.shape[3]), rotary)

        # The local part stays as it is: only what is before it is read from here.
        chunk_count = max(counts.chunks)
        end = chunk_count * chunk
        low_rank = LowRankKeys(low_rank.left[:, :end].contiguous(), low_rank.right, rotary)
        keys = keys[:, :, :end]
        values = values[:, :, :end]

        # Outliers are the chunks with a key that is furthest from the mean of the chunk's keys.
        chunks = keys.unflatten(2, (chunk_count, chunk))
        landmarks = chunks.float().mean(dim=3)
        similarity = torch.cosine_similarity(chunks.float(), landmarks[:, :, :, None], dim=4).amin(dim=3)
        chunk_numbers = torch.arange(chunk_count, device=keys.device)
        exists = (chunk_numbers < _column(counts.chunks, keys)[:, None]).expand_as(similarity)
        distance = (-similarity).masked_fill(~exists, -torch.inf)
        outlier_chunks = top_indices(distance, max(counts.outliers), signed=True)
        ranks = chunk_numbers[: outlier_chunks.shape[2]]
        real_outliers = (ranks < _column(counts.outliers, keys)[:, None]).expand_as(outlier_chunks)
        is_outlier = torch.zeros_like(exists).scatter(2, outlier_chunks, real_outliers)

        outlier_tokens = _chunk_tokens(outlier_chunks, chunk)
        index = outlier_tokens[..., None]
        outlier_keys = keys.gather(2, index.expand(-1, -1, -1, keys.shape[3]))
        outlier_values = values.gather(2, index.expand(-1, -1, -1, values.shape[3]))
        real_entries = None
        if real is not None:
            real_entries = real_outliers.repeat_interleave(chunk, dim=2)
        return cls(
            keys=low_rank,
            values=FullEntries.offload(keys[..., :0], values, traffic),
            landmarks=landmarks.to(keys.dtype),
            selectable=exists & ~is_outlier,
            outliers=LayerEntries(outlier_keys, outlier_values, real_entries),
            outlier_tokens=outlier_tokens,
            counts=counts,
            chunk=chunk,
        )

    @property
    @override
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = [
            self.keys.left,
            self.keys.right,
            self.landmarks,
            self.selectable,
            self.outliers.keys,
            self.outliers.values,
            self.outlier_tokens,
        ]
        return sum(tensor.nbytes for tensor in tensors)

    def select_tokens(self, query: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
        """The entries [B, K, k] int64 that a query [B, H, 1, d] reads beside outliers, and which are real."""
        count = min(max(self.counts.selected), self.landmarks.shape[2])
        all_seen = self.selectable.new_zeros(len(query), 1, 0)  # all chunks are before the query
        weights = attention_weights(query, self.landmarks, softmax, self.selectable, all_seen)[:, :, 0]
        importance = reduce_group(weights, self.landmarks.shape[1], "max").masked_fill(~self.selectable, -1.0)
        chunks = top_indices(importance, count)
        tokens = _chunk_tokens(chunks, self.chunk)
        if self.outliers.real is None:
            return tokens, None

        within_budget = torch.arange(count, device=query.device) < _column(self.counts.selected, query)[:, None]
        real_chunks = within_budget & self.selectable.gather(2, chunks)
        return tokens, real_chunks.repeat_interleave(self.chunk, dim=2)

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        """See `LayerSelector.select`; the indices are those of the whole cache."""
        tokens, real = self.select_tokens(query, softmax)
        starts = _column([0] * len(query), query) if padding is None else padding[:, None]
        local_starts = starts + _column(self.counts.chunks, query) * self.chunk
        local = torch.arange(int(local_starts.min()), keys.shape[2] - 1, device=query.device)
        local = local.expand(*tokens.shape[:2], -1)
        indices = torch.cat([starts[:, None] + tokens, starts[:, None] + self.outlier_tokens, local], dim=2)
        if real is None or self.outliers.real is None:
            return Selection(indices, None)
        real_local = local >= local_starts[:, None]
        return Selection(indices, torch.cat([real, self.outliers.real, real_local], dim=2))

    def read(self, query: Tensor, softmax: Softmax) -> LayerEntries:
        """The entries [B, K, k, d] that a query [B, H, 1, d] reads, outliers last."""
        tokens, real = self.select_tokens(query, softmax)
        fetch = self.values.fetch(tokens)
        keys = self.keys.of_tokens(tokens)  # while the values are on their way
        return _followed(LayerEntries(keys, fetch.rows(), real), self.outliers)

    def entries(self) -> LayerEntries:
        """All entries before the local part; keys are in low rank but for outliers."""
        batch, kv_heads, chunks, _ = self.landmarks.shape
        tokens = torch.arange(chunks * self.chunk, device=self.landmarks.device)
        keys = self.keys.of_tokens(tokens.expand(batch, kv_heads, -1))
        values = self.values.read(keys.device)

        index = self.outlier_tokens[..., None].expand(-1, -1, -1, keys.shape[3])
        if self.outliers.real is None:
            return LayerEntries(keys.scatter(2, index, self.outliers.keys), values, None)
        outlier_keys = torch.where(self.outliers.real[..., None], self.outliers.keys, keys.gather(2, index))
        real = tokens < _column(self.counts.chunks, keys) * self.chunk
        return LayerEntries(
            keys.scatter(2, index, outlier_keys),
            values,
            real[:, None].expand(-1, kv_heads, -1),
        )


def _column(numbers: list[int], like: Tensor) -> Tensor:
    """Numbers -> [n, 1] int64, on the device of a tensor."""
    return torch.tensor(numbers, device=like.device)[:, None]


def _chunk_tokens(chunks: Tensor, chunk: int) -> Tensor:
    """[B, K, m] int64, numbers of chunks -> [B, K, m x chunk], their entries."""
    return (chunks[..., None] * chunk + torch.arange(chunk, device=chunks.device)).flatten(2)


def _followed(entries: LayerEntries, later: LayerEntries) -> LayerEntries:
    """Entries followed by others along dimension 2."""
    keys = torch.cat([entries.keys, later.keys], dim=2)
    values = torch.cat([entries.values, later.values], dim=2)
    if entries.real is None and later.real is None:
        return LayerEntries(keys, values, None)
    return LayerEntries(keys, values, torch.cat([entries.marks, later.marks], dim=2))


class ShadowLayer(SelectedLayer):
    """A cache layer whose own keys and values [B, K, R, d] are the prompt's local part and all that was read since.

    `prompt` has the entries before these; `padding` [B] int64 is how many of the R entries, on the left, are padding.
    """

    def __init__(
        self, prompt: ShadowPrompt, keys: Tensor, values: Tensor, seen: int, padding: Tensor | None = None
    ) -> None:
        super().__init__(keys, values, seen, padding, prompt)
        self.prompt = prompt
        self._local = keys.shape[2]

    @override
    def step(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.append(key, value)
        keys, values, real = _followed(self.prompt.read(query, softmax), super().entries())
        mask = None if real is None else real[:, :, None]
        return grouped_attention(query, keys, values, mask, softmax)

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
        read = self.keys.shape[2] - self._local
        if -tokens_to_remove > read:
            raise UserError(
                f"crop: cannot remove {-tokens_to_remove} tokens, only the {read} read since the prompt",
                field="crop",
                code="state",
            )
        super().crop(tokens_to_remove)


@registry.method("shadowkv", colour="#661100", marker="d")
@dataclass(frozen=True)
class ShadowKV(SparseRead):
    """Reads chunks of the prompt, by the means of their keys (ShadowKV, arXiv 2410.21465, section 4).

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
            raise UserError(
                f"ShadowKV: outliers {self.outliers!r} must be a share of the budget, from 0 to below 1",
                field="outliers",
                code="range",
            )
        super().__post_init__()

    @override
    def smallest_budget(self) -> tuple[int, str]:
        reason = "the local part, with one entry less than a chunk after it, the share of outliers, and a chunk"
        local = self.chunk * (self.local + 1) - 1
        budget = local + self.chunk
        while self._selected_chunks(budget, local) < 1:
            budget += 1
        return budget, reason

    def _selected_chunks(self, budget: int, local: int) -> int:
        """Number of chunks to select beside outliers and `local` entries of the local part."""
        return (budget - self._outlier_chunks(budget) * self.chunk - local) // self.chunk

    def _outlier_chunks(self, budget: int) -> int:
        return int(self.outliers * budget) // self.chunk

    def counts(self, state: State) -> ChunkCounts:
        """Numbers of tokens and chunks of a state's prompts."""
        budgets = self.budgets(state)
        if state.tokens_mask is None:
            budgets = budgets[:1]
            lengths = [state.tokens.shape[1]]
        else:
            lengths = state.lengths.tolist()

        counts = ChunkCounts([], [], [], [])
        for budget, length in zip(budgets, lengths, strict=True):
            chunks = max(length // self.chunk - self.local, 0)
            outliers = min(self._outlier_chunks(budget), chunks)
            affordable = max(self._selected_chunks(budget, length - chunks * self.chunk), 0)
            counts.tokens.append(length)
            counts.chunks.append(chunks)
            counts.outliers.append(outliers)
            counts.selected.append(min(affordable, chunks - outliers))
        return counts

    @override
    def layers_for(self, model: PreTrainedModel, state: State) -> list[KeptLayer]:
        counts = self.counts(state)
        local_lengths = []
        for length, chunks in zip(counts.tokens, counts.chunks, strict=True):
            local_lengths.append(length - chunks * self.chunk)
        longest_local = max(local_lengths)

        traffic = Traffic()
        layers: list[KeptLayer] = []
        indexed_entries = zip(full_attention_layers(model.config), entries_of(state), strict=True)
        for index, (keys, values, seen, padding) in indexed_entries:
            local_keys = keys[:, :, seen - longest_local :].contiguous()
            local_values = values[:, :, seen - longest_local :].contiguous()
            if padding is not None:
                keys = _from_first(keys, padding)
                values = _from_first(values, padding)
                padding = longest_local - _column(local_lengths, keys)[:, 0]
            prompt = ShadowPrompt.from_entries(
                keys, values, counts, self.chunk, self.rank, Rotary(model, index), traffic
            )
            layers.append(ShadowLayer(prompt, local_keys, local_values, seen, padding))
        return layers


def _from_first(entries: Tensor, padding: Tensor) -> Tensor:
    """Entries [B, K, N, d] padded on the left -> padded on the right, by arbitrary entries."""
    width = entries.shape[2]
    index = torch.arange(width, device=entries.device) + padding[:, None]
    index = index.clamp(max=width - 1)[:, None, :, None].expand_as(entries)
    return entries.gather(2, index)
