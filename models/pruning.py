"""How much of a draft head its retrieval head leaves out (SpeContext, arXiv 2512.00722, section 4.3)."""

from dataclasses import dataclass

from torch import nn

from keepsight.models.draft_head import DraftHead
from keepsight.models.retrieval_head import RetrievalHead


@dataclass(frozen=True)
class Pruning:
    """How much of a draft head was pruned.

    Attributes:
        kept: Number of the retrieval head's parameters.
        draft: Number of the draft head's parameters, without the embedding, which is the target's.
        embedding: Number of the embedding's parameters.
    """

    kept: int
    draft: int
    embedding: int

    @property
    def gone(self) -> float:
        """Pruned share of the draft head's own parameters."""
        return 1 - self.kept / self.draft

    @property
    def gone_with_embedding(self) -> float:
        """The share when the embedding counts as a pruned part of the draft head, as in the paper."""
        return 1 - self.kept / (self.draft + self.embedding)


def pruning(head: RetrievalHead, draft: DraftHead) -> Pruning:
    """How much of `draft` was pruned to make `head`."""
    embedding = head.config.vocab_size * head.config.hidden_size
    return Pruning(parameters(head), parameters(draft), embedding)


def parameters(module: nn.Module) -> int:
    """Number of a module's parameters."""
    return sum(each.numel() for each in module.parameters())
