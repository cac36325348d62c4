"""Methods with published, trained scorers: KVzap, Fast KVzip, TRIM-KV, DBTrimKV, Locret.

A small network in each layer scores a token's entries from the input of the layer's attention, as the token is read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Self, override

from keepsight.errors import UserError
from keepsight.models.scorers import FastKVzipScorer, KVzapScorer, LocretScorer, Scorer, TrimKVScorer
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, Global
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver
from keepsight.runtime.resources import Resources
from keepsight.runtime.state import Needs


@dataclass(frozen=True)
class TrainedScores(LayerObserver):
    """The scores of a trained scorer, computed as each entry is read.

    TRIM-KV predicts log b, and p is the entry's position: its score after n tokens is (n + 1 - p) log b, the logarithm
    of the part of the entry that is left.

    Attributes:
        scorer: The scorer.
    """

    scorer: Scorer

    @property
    def digest(self) -> str:
        """Digest of the scorer, by which results are told apart."""
        return self.scorer.digest

    @override
    def needs(self) -> Needs:
        return Needs(scorers=(self.scorer,))

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        scores = None if layer.recorded is None else layer.recorded.scores.get(self.scorer)
        if scores is None or scores.shape[2] != layer.entries().keys.shape[2]:
            raise UserError(
                f"{type(self.scorer).__name__}: entries were not scored when they were read, or come from a file; read "
                "the prompt with this method, or prefill with needs=method.needs()",
                field="needs",
                code="state",
            )
        if self.scorer.outputs_per_head == 1:
            return scores
        decay, position = scores.unflatten(1, (-1, 2)).unbind(dim=2)
        return (layer.get_seq_length() + 1 - position) * decay


@dataclass(frozen=True)
class ScoredEvict(Evict):
    """Base of the methods with published, trained scorers.

    Attributes:
        scorer: The kind of scorer.
    """

    section = "weights"
    cost = "a small network in the prefill; published weights"
    scorer: ClassVar[type[Scorer]]
    pool: Pool = NO_POOL

    @classmethod
    def from_pretrained(cls, weights: str | Path, budget: int | float, **options: Any) -> Self:
        """The method with published weights: a file, a folder, or `user/name` or `user/name/FOLDER` on the Hub.

        Raises:
            UserError: they cannot be loaded, are for another method, or an option is out of range.
        """
        return cls(budget, TrainedScores(cls.scorer.from_pretrained(weights)), **options)

    @classmethod
    @override
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        return {"observer": TrainedScores(resources.scorer_of(cls.scorer))}

    @property
    @override
    def modules(self) -> frozenset[str]:
        return super().modules | {"scorer"}


@registry.method("kvzap", label="KVzap")
@dataclass(frozen=True)
class KVzap(ScoredEvict):
    """Keeps what the repetition of the prompt would attend to, as a network predicts it (KVzap, arXiv 2601.07891).

    The paper evicts entries that score below a threshold, tau, except for the last 128 tokens (section 3.3). One budget
    for the heads of all layers equals a threshold that keeps that many entries; `allocate=Threshold(tau)` takes tau
    itself. A window of 32 leaves room in small budgets.
    """

    scorer = KVzapScorer
    allocate: Allocation = Global(floor=0.0)
    window: int = 32


@registry.method("fastkvzip", label="Fast KVzip")
@dataclass(frozen=True)
class FastKVzip(ScoredEvict):
    """Keeps what KVzip would, as a gate predicts it; the heads of all layers share the budget (arXiv 2601.17668).

    4 sinks as in kvpress. The window is 2 % of the prompt there (4,096 tokens of a long one), here 32 tokens. The
    authors evict from the prompt in chunks of 16,000.
    """

    scorer = FastKVzipScorer
    allocate: Allocation = Global(floor=0.0)
    sinks: int = 4
    window: int = 32


@registry.method("trimkv", label="TRIM-KV")
@dataclass(frozen=True)
class TrimKV(ScoredEvict):
    """Keeps the entries that have decayed least, each at a rate of its own (TRIM-KV, arXiv 2512.03324, section 3).

    With `every` it evicts while decoding too, as in the paper.
    """

    scorer = TrimKVScorer


@registry.method("dbtrimkv", label="DBTrimKV")
@dataclass(frozen=True)
class DBTrimKV(TrimKV):
    """TRIM-KV with one budget for the heads of all layers (DBTrimKV, arXiv 2605.09649).

    As in the authors' default no head has a floor. Each keeps its newest entry here, so that none is empty. The
    authors' optional floor is added to what a head wins; `Global`'s is a minimum.
    """

    allocate: Allocation = Global(floor=0.0)
    window: int = 1


@registry.method("locret")
@dataclass(frozen=True)
class Locret(ScoredEvict):
    """Keeps the entries whose largest attention logit is expected to be highest (Locret, arXiv 2410.01805, section 3).

    Locret evicts after each chunk of the prefill, keeps the last 100 tokens without scoring them, and renumbers
    positions. Here the whole prompt is read with full attention first, the window is 32 tokens, and keys stay at their
    positions.
    """

    scorer = LocretScorer
    window: int = 32
