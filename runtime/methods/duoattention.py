"""DuoAttention: heads that a published pattern calls retrieval heads keep all entries, the others few."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import Self, override

from keepsight.errors import Positive, UserError, as_options
from keepsight.files import at_home, read_json, regular
from keepsight.models.decoder import full_attention_layers
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, HeadSizes, shortened
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.layer import Counts
from keepsight.runtime.methods.positions import Recency
from keepsight.runtime.observe import Observer
from keepsight.runtime.resources import Resources

_PATTERN = "full_attention_heads.tsv"
_SETTINGS = "config.json"
_EXPECTED = f"name a folder of DuoAttention's attn_patterns, or its {_PATTERN}"


@dataclass(frozen=True)
class HeadPattern:
    """What was learned about the heads of a model, as DuoAttention publishes it.

    Attributes:
        source: The file, for messages.
        scores: L rows of K numbers from 0 to 1: how much each KV head needs entries from far back.
        sinks: First entries of a streaming head in the training; None where no settings were beside the pattern.
        recent: Its most recent entries; None likewise.
    """

    source: str = field(compare=False)
    scores: tuple[tuple[float, ...], ...]
    sinks: int | None = None
    recent: int | None = None

    @classmethod
    def from_pretrained(cls, reference: str | Path) -> Self:
        """Load it from a tab-separated file with a line for each layer, or from a folder with one and its settings.

        Numbers are clipped to 0 to 1, as in the authors' program.

        Raises:
            UserError: there is no such file, or it holds something else.
        """
        path = Path(at_home(str(reference)))
        file = path / _PATTERN if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{reference}: there is no pattern; {_EXPECTED}", field="scorer", code="missing")
        try:
            lines = regular(file).read_text(encoding="utf-8").splitlines()
            rows = []
            for line in filter(str.strip, lines):
                rows.append([float(number) for number in line.split("\t")])
            numbers = np.array(rows, dtype=np.float64)
        except ValueError:  # not UTF-8, no number, or rows of different lengths
            numbers = np.empty(0)
        if numbers.ndim != 2 or not numbers.size or not np.isfinite(numbers).all():
            raise UserError(
                f"{file}: expected lines of as many finite numbers each, between tabs; {_EXPECTED}",
                field="scorer",
                code="file",
            )
        scores = tuple(tuple(row) for row in numbers.clip(0, 1).tolist())
        return cls(str(file), scores, *_settings_beside(file))


def _settings_beside(file: Path) -> tuple[int | None, int | None]:
    """`sink_size` and `recent_size` of the settings beside a pattern; None where these do not name them."""
    settings = file.parent / _SETTINGS
    if not settings.is_file():
        return None, None
    content = read_json(settings, dict[str, Any])
    sizes = (content.get("sink_size"), content.get("recent_size"))
    for size in sizes:
        if size is not None and (type(size) is not int or size < 1):
            raise UserError(
                f"{settings}: sink_size and recent_size are {sizes}, expected whole numbers above 0; fetch it again",
                field="scorer",
                code="type",
            )
    return sizes


@as_options
@dataclass(frozen=True)
class StreamingHeads(Allocation):
    """Streaming heads keep few entries, retrieval heads all: the heads of the lowest scores of a pattern stream.

    As many stream as the budget requires. They keep the protected entries and the `recent` last ones, at most half of
    the budget while there are retrieval heads, and share what these leave of it.

    Attributes:
        pattern: The scores of the model's KV heads.
        recent: Number of most recent entries of a streaming head.
    """

    reads_scores = False
    pattern: HeadPattern
    recent: Positive = 256

    def require_shape(self, layers: int, kv_heads: int) -> None:
        """Refuse (`UserError`) a model with other layers with full attention, or KV heads, than the pattern has."""
        scores = self.pattern.scores
        if (len(scores), len(scores[0])) != (layers, kv_heads):
            raise UserError(
                f"{self.pattern.source}: a pattern of {len(scores)} layers and {len(scores[0])} KV heads does not fit "
                f"this model, which has {layers} and {kv_heads}; take that of this model",
                field="scorer",
                code="model",
            )

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        layers, _, kv_heads = sizes.real.shape
        self.require_shape(layers, kv_heads)
        order = np.argsort(np.array(self.pattern.scores).ravel(), kind="stable")
        rows = []
        for row, budget in enumerate(budgets):
            real = sizes.real[:, row].reshape(-1, 1)
            protected = sizes.protected[:, row].reshape(-1, 1)
            short = np.minimum(real, protected + self.recent).clip(max=np.maximum(protected + 1, budget // 2))
            rows.append(shortened(real, short, order, budget).reshape(layers, kv_heads))
        return np.stack(rows, axis=1)


@registry.method("duoattention", label="DuoAttention")
@dataclass(frozen=True)
class DuoAttention(Evict):
    """Retrieval heads of a pattern keep all entries, streaming heads sinks and recent ones (arXiv 2410.10819).

    The authors let a share of the heads stream; here the budget decides how many. Sinks and recent entries are those of
    the settings beside the pattern, or 4 and 256. The authors' streaming heads read the prompt with few entries too;
    here it is read with full attention first, as in kvpress.
    """

    section = "weights"
    cost = "nothing; a published pattern"
    observer: Observer = Recency()
    pool: Pool = NO_POOL
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.allocate, StreamingHeads):
            raise UserError(
                f"{type(self).__name__}: allocate {type(self.allocate).__name__} has no pattern of heads; take "
                f"{type(self).__name__}.from_pretrained(FOLDER, budget), or scorer: FOLDER",
                field="allocate",
                code="conflict",
            )

    @classmethod
    def from_pretrained(cls, pattern: str | Path, budget: int | float, **options: Any) -> Self:
        """The method with a published pattern: a file or a folder, and further fields.

        Raises:
            UserError: it cannot be loaded, or an option is out of range.
        """
        return cls(budget, **(_fields(HeadPattern.from_pretrained(pattern)) | options))

    @classmethod
    @override
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        return _fields(resources.scorer_of(HeadPattern))

    @property
    @override
    def modules(self) -> frozenset[str]:
        return super().modules | {"scorer"}

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        super().check_model(model)
        config = model.config.get_text_config(decoder=True)
        assert isinstance(self.allocate, StreamingHeads)
        self.allocate.require_shape(len(full_attention_layers(model.config)), config.num_key_value_heads)


def _fields(pattern: HeadPattern) -> dict[str, Any]:
    """The fields of a `DuoAttention` with a pattern."""
    fields: dict[str, Any] = {"allocate": StreamingHeads(pattern)}
    if pattern.recent is not None:
        fields["allocate"] = StreamingHeads(pattern, pattern.recent)
    if pattern.sinks is not None:
        fields["sinks"] = pattern.sinks
    return fields
