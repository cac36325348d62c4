"""Settings of a lookahead module, its selection, head weights; light to import, as configurations read it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keepsight.errors import UserError

LARGEST = {"tokens": 4096, "rank": 4096, "kernel": 4095}
"""Larger settings are typing errors, or come from a malicious artifact."""
_CHOICES = {
    "queries": ("mean", "max"),
    "group": ("mean", "max"),
    "pooling": ("max", "avg"),
    "sharing": ("layer", "model"),
}

HeadWeights = tuple[tuple[float, ...], ...]
"""For each layer with full attention, a weight of each KV head, by which its importance is multiplied."""
_LOWEST_WEIGHT = 2.0**-150
_HIGHEST_WEIGHT = (2 - 2**-23) * 2.0**127
"""Between these a weight is positive and finite in float32."""

SELECTIONS: dict[str, dict[str, Any]] = {
    "paper": {
        "queries": "mean",
        "group": "mean",
        "pooling": "max",
        "kernel": 7,
        "floor": None,
        "sharing": "layer",
        "value_norm": False,
    },
    "shared": {
        "queries": "max",
        "group": "mean",
        "pooling": "avg",
        "kernel": 1,
        "floor": 0.2,
        "sharing": "model",
        "value_norm": True,
    },
}
"""Presets of how a module's attention selects entries: a property of its use, which training does not fix.

`paper` is LookaheadKV's (arXiv 2603.10899, section 3 and appendix F). `shared` is ours, and the commands' default: no
pooling, one budget for the heads of all layers, head weights where they were learned, norms of values.
"""
SELECTIONS["uniform"] = SELECTIONS["shared"] | {"floor": None, "sharing": "layer"}
"""For serving engines: every head of every layer keeps the same number of entries, chosen as in `shared`."""
SELECTION = tuple(SELECTIONS["paper"])
"""The fields of a module's settings that are its selection."""


@dataclass
class LookaheadSettings:
    """The shape of a lookahead module, and how it is used: its selection, the fields from `queries` on.

    The defaults are the paper's; the commands default to the selection `shared`, see `SELECTIONS`.

    Attributes:
        tokens: Number of soft tokens, n.
        rank: LoRA rank; 0 trains the soft tokens alone.
        targets: Modules with a LoRA: `all` that the soft tokens' attention depends on; `qv`, the query and value
            projections; named modules, such as [q_proj, mlp.up_proj]; or `none`.
        alpha: LoRA alpha: the update is scaled by alpha / rank.
        dropout: LoRA dropout in training.
        queries: Reduction over the soft tokens at selection: `mean`, as in training, or `max`.
        group: Reduction over the query heads of a KV head: `mean` or `max`.
        pooling: Pooling over neighbouring entries: `max` or `avg`.
        kernel: Pooling kernel at selection; training uses unpooled importance.
        floor: Share of the KV budget that every head is guaranteed at selection; the rest is allocated by importance.
            None for the same number of entries in every head.
        sharing: Heads that share a budget if `floor` is set: those of a `layer` (AdaKV, arXiv 2407.11550) or of the
            whole `model` (KVzip, arXiv 2505.23416, section 4.1).
        value_norm: Multiply importance by the norm of the entry's value at selection.
    """

    tokens: int = 32
    rank: int = 8
    targets: list[str] = field(default_factory=lambda: ["all"])
    alpha: float = 32
    dropout: float = 0.0
    queries: str = "mean"
    group: str = "mean"
    pooling: str = "max"
    kernel: int = 7
    floor: float | None = None
    sharing: str = "layer"
    value_norm: bool = False

    def selecting(self, selection: str) -> "LookaheadSettings":
        """The same module with another selection; a `UserError` if it is not one of `SELECTIONS`."""
        if selection not in SELECTIONS:
            raise UserError(
                f"selection={selection} is unknown; choose one of {', '.join(SELECTIONS)}",
                field="selection",
                code="unknown",
            )
        return replace(self, **SELECTIONS[selection])

    def check(self) -> None:
        """Refuse settings that no module can have.

        Raises:
            UserError: a value is out of range; one line names it as a recipe does.
        """
        for name, least in {"tokens": 1, "rank": 0, "kernel": 1}.items():
            value = getattr(self, name)
            if not least <= value <= LARGEST[name]:
                raise UserError(
                    f"lookahead.{name}={value} must be from {least} to {LARGEST[name]}",
                    field=f"lookahead.{name}",
                    code="range",
                )
        if not self.targets or not all(self.targets):
            raise UserError(
                f"lookahead.targets={self.targets} must be all, qv, none, or names of modules",
                field="lookahead.targets",
                code="type",
            )
        if len(self.targets) > 1 and {"all", "none"} & {*self.targets}:
            raise UserError(
                f"lookahead.targets={self.targets}: all and none stand alone",
                field="lookahead.targets",
                code="conflict",
            )
        if self.kernel % 2 == 0:
            raise UserError(
                f"lookahead.kernel={self.kernel} must be odd, so that it has a middle",
                field="lookahead.kernel",
                code="range",
            )
        if not 0 < self.alpha < math.inf:
            raise UserError(f"lookahead.alpha={self.alpha} must be above 0", field="lookahead.alpha", code="range")
        if not 0 <= self.dropout < 1:
            raise UserError(
                f"lookahead.dropout={self.dropout} must be at least 0 and below 1",
                field="lookahead.dropout",
                code="range",
            )
        if self.floor is not None and not 0 <= self.floor <= 1:
            raise UserError(
                f"lookahead.floor={self.floor} must be from 0 to 1, or null for equally many in every head",
                field="lookahead.floor",
                code="range",
            )
        if self.sharing == "model" and self.floor is None:
            raise UserError(
                "lookahead.sharing=model needs lookahead.floor: the share that every head is guaranteed",
                field="lookahead.floor",
                code="missing",
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(
                    f"lookahead.{name}={value} is unknown; choose {' or '.join(choices)}",
                    field=f"lookahead.{name}",
                    code="unknown",
                )


def checked_weights(weights: Any, name: str) -> HeadWeights:
    """Weights of heads as tuples.

    Raises:
        UserError: they are not rows of equally many numbers, above 0 and finite in float32; one line that begins with
            `name`.
    """
    fault = UserError(
        f"{name} must be a row for each layer, of a finite number above 0 for each KV head",
        field=name.rpartition(" ")[2],
        code="type",
    )
    if not _is_row(weights):
        raise fault
    rows = []
    for row in weights:
        if not _is_row(row) or len(row) != len(weights[0]) or not all(map(_is_weight, row)):
            raise fault
        rows.append(tuple(map(float, row)))
    return tuple(rows)


def _is_row(value: Any) -> bool:
    """Whether this is a sequence, not empty, that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and _LOWEST_WEIGHT < value < _HIGHEST_WEIGHT
