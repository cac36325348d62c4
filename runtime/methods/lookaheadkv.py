"""LookaheadKV: trained soft tokens observe the prompt in place of the answer that is still to come."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.models.hub import fetch
from keepsight.models.lookahead_files import Artifact, load_lookahead
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import Pool, Reduce
from keepsight.runtime.observe import Observer, look_back
from keepsight.runtime.state import State


@dataclass(frozen=True)
class SoftTokens(Observer):
    """A lookahead module's soft tokens observe, seen through its LoRA (LookaheadKV, section 3, algorithm 2).

    Attributes:
        artifact: The adapter; attached to whatever model is observed with, once.
    """

    artifact: Artifact

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduction: str) -> list[Tensor]:
        module = self.artifact.attach(model)
        with module.active():
            return look_back(model, state, module.observers(len(state.logits)), reduction=reduction)

    @override
    def positions(self) -> int:
        return self.artifact.settings.tokens

    @property
    @override
    def adapter_digest(self) -> str | None:
        return self.artifact.digest


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
        return cls(budget, **parts_of(artifact) | options)


def parts_of(artifact: Artifact) -> dict[str, Any]:
    """The observer, reduction and pooling that an adapter was trained for."""
    settings = artifact.settings
    return {
        "observer": SoftTokens(artifact),
        "reduce": Reduce(heads=settings.group),
        "pool": Pool(settings.pooling, settings.kernel),
    }
