"""LookaheadKV: trained soft tokens observe the prompt in place of the answer that is still to come."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from keepsight.models.adapter import Artifact, load_lookahead
from keepsight.models.hub import fetch
from keepsight.runtime.evict import Evict
from keepsight.runtime.observe import observe
from keepsight.runtime.prefill import Prefilled


@dataclass(frozen=True)
class SoftTokens:
    """A lookahead module's soft tokens observe, seen through its LoRA (LookaheadKV, section 3, algorithm 2).

    Attributes:
        artifact: The adapter; attached to whatever model is observed with, once.
    """

    artifact: Artifact

    def __call__(self, model: PreTrainedModel, prefilled: Prefilled) -> list[Tensor]:
        """Observe; see `keepsight.runtime.evict.Observer`."""
        module = self.artifact.attach(model)
        with module.active():
            return observe(model, prefilled.cache, prefilled.mask, module.observers(len(prefilled.logits)))


@dataclass(frozen=True)
class LookaheadKV(Evict):
    """Keeps what a trained lookahead module expects the answer to attend to. No window is kept (appendix F)."""

    @classmethod
    def from_pretrained(
        cls, adapter: str | Path, budget: int | float, revision: str | None = None, **options: Any
    ) -> "LookaheadKV":
        """The method with an adapter from a folder or the Hub, reduced and pooled as the adapter says.

        Raises:
            UserError: the adapter cannot be had, is corrupt, or an option is out of range.
        """
        artifact = load_lookahead(fetch(str(adapter), revision))
        settings = artifact.settings
        parts: dict[str, Any] = {
            "group": settings.group,
            "pooling": settings.pooling,
            "kernel": settings.kernel,
        } | options
        return cls(budget, SoftTokens(artifact), **parts)
