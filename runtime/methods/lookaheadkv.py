"""LookaheadKV (arXiv 2603.10899): trained soft tokens observe the prompt in place of the answer to come."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from keepsight.errors import Whole
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.lookahead_settings import HeadWeights, LookaheadSettings
from keepsight.models.lora import LastRows
from keepsight.runtime import registry
from keepsight.runtime.allocate import Adaptive, Allocation, Global, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Pool, Reduce
from keepsight.runtime.observe import Observer, look_back
from keepsight.runtime.resources import Resources
from keepsight.runtime.state import State
from keepsight.runtime.tail import Tail


@registry.observer("soft_tokens")
@dataclass(frozen=True)
class SoftTokens(Observer):
    """A lookahead module's soft tokens observe through its LoRA (LookaheadKV, arXiv 2603.10899, algorithm 2).

    Attributes:
        artifact: The adapter.
        window: Number of last prompt tokens that observe too, without the LoRA (appendix E.2).
    """

    artifact: LookaheadAdapter
    window: Whole = 0
    signed = False

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        with self.artifact.attached(model) as tokens:
            embeddings = tokens.expand(len(state.logits), -1, -1)
            return look_back(model, state, embeddings, reduce=reduce, window=self.window)

    @property
    @override
    def joins_prefill(self) -> bool:
        return True

    @override
    def tail(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        mask: Tensor | None,
        reduce: Reduce,
        images: Images | None = None,
    ) -> Tail | None:
        batch = len(tokens)
        with self.artifact.attached(model) as soft_tokens:
            embeddings = soft_tokens.expand(batch, -1, -1)
        rows = LastRows(batch, embeddings.shape[1])
        return Tail(embeddings, reduce, window=self.window, adapter=lambda: self.artifact.attached(model, rows))

    @override
    def positions(self) -> int:
        return self.artifact.settings.tokens

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        self.artifact.require_base(model)

    @property
    @override
    def adapter_digest(self) -> str | None:
        return self.artifact.digest


@registry.method("lookaheadkv", colour="#0072B2", marker="o")
@dataclass(frozen=True)
class LookaheadKV(Evict):
    """Keeps what a lookahead module expects the answer to attend to, and no window (arXiv 2603.10899, appendix F)."""

    section = "answer"
    cost = "soft tokens in the prefill; a trained module"

    @classmethod
    def from_pretrained(
        cls,
        adapter: str | Path,
        budget: int | float | None = None,
        revision: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        selection: str | None = None,
        **options: Any,
    ) -> "LookaheadKV":
        """The method with an adapter (a folder, a Hub id or `shipped:NAME`) and the selection that its settings name.

        `selection` names another way: `shared`, `paper` or `uniform`, see `keepsight.models.lookahead_settings`.

        Each model that the method runs on is compared with the adapter's base, revision and quantisation. A
        tokenizer, if any, is compared with the adapter's vocabulary and chat template at once. `options` are
        fields of the method, or `compression_ratio` in place of the budget. A `UserError` if the adapter cannot be
        loaded, is corrupt, or an option is out of range.
        """
        artifact = LookaheadAdapter.from_pretrained(adapter, revision=revision)
        if tokenizer is not None:
            artifact.check_tokenizer(tokenizer)
        fields = adapter_fields(artifact, selection)
        fields.update(options)
        if budget is not None:
            fields["budget"] = budget
        return cls(**fields)

    @classmethod
    @override
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        return adapter_fields(resources.artifact, options.pop("selection", None))


def adapter_fields(artifact: LookaheadAdapter, selection: str | None = None) -> dict[str, Any]:
    """A method's fields for an adapter: its observer, and `selection_fields` of a selection or the adapter's own."""
    settings = artifact.settings
    if selection is not None:
        settings = settings.selecting(selection)
    fields = selection_fields(settings, artifact.head_weights)
    fields["observer"] = SoftTokens(artifact)
    return fields


def selection_fields(settings: LookaheadSettings, weights: HeadWeights | None = None) -> dict[str, Any]:
    """A method's reduction, weighting, pooling and allocation, as settings name them; weights are those of heads."""
    allocate: Allocation
    if settings.floor is None:
        allocate = Uniform()
    elif settings.sharing == "model":
        allocate = Global(settings.floor, weights)
    else:
        allocate = Adaptive(settings.floor, blend=False)
    return {
        "reduce": Reduce(settings.queries, settings.group),
        "value_norm": settings.value_norm,
        "pool": Pool(settings.pooling, settings.kernel),
        "allocate": allocate,
    }
