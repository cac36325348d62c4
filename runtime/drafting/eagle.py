"""Chain drafting with an EAGLE head: each guess comes from the head's own output for the one before.

EAGLE-3 (arXiv 2503.01840), section 3.1, without its tree. Row t of a head reads the target's features of token t and
the embedding of token t + 1, and guesses token t + 2 (`keepsight.models.draft_head`). Where the target has read a
token, its features are known and the row is *verified*; beyond that, the head's own output for the row before replaces
them.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.runtime.attention import Softmax, grouped_attention
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.state import State, positions_of

_ROWS_AT_ONCE = 1024  # bounds the memory of a long prompt's mask and hidden layer


class DraftingHead(Protocol):
    """What drafting needs of a head; for shapes see `keepsight.models.draft_head.DraftHead`."""

    def layers_of(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The target's layers whose outputs are the features."""
        ...

    def embedding(self, model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
        """What embeds token ids for the head."""
        ...

    def combine(self, features: Tensor) -> Tensor:
        """The target's features of those layers, concatenated -> what `__call__` takes."""
        ...

    def __call__(
        self,
        embeddings: Tensor,
        features: Tensor,
        positions: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Run the head's layer over new rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the head's vocabulary, from the output of a pass."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of the head's."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters, all of one dtype."""
        ...


class HeadCache:
    """The keys and values of a head's rows; `attend` is the head's attention.

    Args:
        mask: [B, m] bool, False for padding among the first m rows; None when none is. Later rows are all real.
        window: Number of last rows whose queries are kept.

    Attributes:
        queries: [B, H, <= window, d] of the last rows, after RoPE; None before the first row.
    """

    def __init__(self, mask: Tensor | None = None, window: int = 0) -> None:
        self.mask, self.window = mask, window
        self.queries: Tensor | None = None
        self._layer: KeptLayer | None = None

    @property
    def keys(self) -> Tensor:
        """[B, K, rows, d], after RoPE."""
        assert self._layer is not None
        return self._layer.keys

    @property
    def rows(self) -> int:
        """Number of rows."""
        return 0 if self._layer is None else self._layer.keys.shape[2]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append rows and let them attend causally; see `keepsight.models.draft_head.HeadAttend`."""
        if self._layer is None:
            self._layer = KeptLayer(key, value, key.shape[2])
        else:
            self._layer.update(key, value)
        if self.window:
            earlier = query[:, :, :0] if self.queries is None else self.queries
            self.queries = torch.cat([earlier, query], dim=2)[:, :, -self.window :].clone()
        mask = self._mask(query.shape[2], query.device)
        return grouped_attention(query, self._layer.keys, self._layer.values, mask, Softmax(query.shape[3] ** -0.5))

    def crop(self, rows: int) -> None:
        """Keep the first `rows` rows; drop the others and their queries."""
        forgotten = self.rows - rows
        if self._layer is None or not forgotten:
            return
        self._layer.crop(-forgotten)
        if self.queries is not None:
            self.queries = self.queries[:, :, : self.queries.shape[2] - forgotten]

    def _mask(self, new: int, device: torch.device) -> Tensor:
        """[B or 1, 1, new, rows] bool: what each of the last `new` rows may see; padding sees itself."""
        place = torch.arange(self.rows, device=device)
        own = place[self.rows - new :, None]
        seen = (place <= own)[None, None]
        if self.mask is None:
            return seen
        real = functional.pad(self.mask, (0, self.rows - self.mask.shape[1]), value=True)
        return seen & real[:, None, None] | (place == own)


class ChainDrafter:
    """Drafts greedily after what a target has read; keeps the head's cache between drafts.

    Args:
        head: The draft head, on the target's device.
        target: The model whose tokens it guesses.
        mask: [B, N] bool, False for padding among the N tokens read at first, on the left; None when none is.
        window: Number of last rows whose queries the cache keeps.
    """

    def __init__(
        self, head: DraftingHead, target: PreTrainedModel, mask: Tensor | None = None, window: int = 0
    ) -> None:
        self.head, self.cache = head, HeadCache(mask, window)
        self._embed = head.embedding(target)
        self._dtype = next(head.parameters()).dtype
        self._verified = 0

    @torch.no_grad()
    def read(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Read verified rows; they replace what was drafted since the last ones.

        Args:
            features: [B, q, layers * hidden], the target's features of the next q >= 1 tokens.
            tokens: [B, q] int64, the token after each.

        Returns:
            The head's output for the last of them, [B, 1, hidden].
        """
        self.cache.crop(self._verified)
        parts = zip(features.split(_ROWS_AT_ONCE, dim=1), tokens.split(_ROWS_AT_ONCE, dim=1), strict=True)
        hidden = [self._pass(self.head.combine(each.to(self._dtype)), after)[:, -1:] for each, after in parts]
        self._verified = self.cache.rows
        return hidden[-1]

    @torch.no_grad()
    def draft(self, features: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Read verified rows and guess the `count` >= 1 tokens after them, [B, count] int64; arguments as `read`."""
        hidden = self.read(features, tokens)
        drafted = [self._guess(hidden)]
        while len(drafted) < count:
            hidden = self._pass(hidden, drafted[-1])
            drafted.append(self._guess(hidden))
        return torch.cat(drafted, dim=1)

    def _pass(self, features: Tensor, tokens: Tensor) -> Tensor:
        end = self.cache.rows + tokens.shape[1]
        mask = self.cache.mask
        if mask is not None:
            mask = functional.pad(mask, (0, end - mask.shape[1]), value=True)
        positions = positions_of(mask, end, tokens.device)[:, self.cache.rows :]
        return self.head(self._embed(tokens).to(self._dtype), features, positions, self.cache.attend)

    def _guess(self, hidden: Tensor) -> Tensor:
        return self.head.target_ids(self.head.logits(hidden).argmax(dim=-1))


def unread_rows(state: State, layers: tuple[int, ...], newest: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that a head can read of a state, as `ChainDrafter.read` takes them.

    Args:
        state: State of M tokens, the last m of which have recorded features.
        layers: The head's feature layers.
        newest: [B, 1] int64: the token after all that the state has read.

    Returns:
        Features [B, m, layers * hidden] and the token after each, [B, m].

    Raises:
        UserError: the features were not recorded.
    """
    if not state.features or not set(layers) <= set(state.needs.features):
        raise UserError(
            f"the features of layers {list(layers)} that the draft head reads were not recorded: prefill with "
            f"needs=Needs(features={layers})"
        )
    features = state.features_of(layers)
    return features, torch.cat([state.tokens, newest], dim=1)[:, -features.shape[1] :]
