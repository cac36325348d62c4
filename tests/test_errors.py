"""Errors name their field and a code, also those of the helpers that check most values."""

import copy
import pickle
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt
from pydantic import TypeAdapter, ValidationError

from keepsight.errors import (
    Budget,
    Code,
    Share,
    UserError,
    Whole,
    as_options,
    code_of,
    require_kind,
    require_same,
    require_whole,
)
from keepsight.files import from_json
from tests.refused import refused


@as_options
@dataclass(frozen=True)
class Options:
    budget: Budget
    window: Whole = 0
    share: Share = 0.5
    exact: bool = True
    kind: Annotated[str, Literal["avg", "max"]] = "avg"


@pytest.mark.parametrize(
    ("options", "field", "code"),
    [
        ({"budget": 0}, "budget", "range"),
        ({"budget": 1.5}, "budget", "range"),
        ({"budget": "8"}, "budget", "type"),
        ({"budget": True}, "budget", "type"),
        ({"budget": 8, "window": -1}, "window", "range"),
        ({"budget": 8, "window": 1.0}, "window", "type"),
        ({"budget": 8, "share": 2.0}, "share", "range"),
        ({"budget": 8, "exact": 1}, "exact", "type"),
        ({"budget": 8, "kind": "mean"}, "kind", "unknown"),
        ({"budget": 8, "widnow": 4}, "widnow", "unknown"),
        ({"budget": 8, "compression_ratio": 0.5}, "compression_ratio", "conflict"),
        ({"compression_ratio": 1}, "compression_ratio", "range"),
        ({"compression_ratio": "half"}, "compression_ratio", "type"),
    ],
)
def test_an_option_that_is_refused(options: dict[str, Any], field: str, code: Code) -> None:
    with refused(field, code):
        Options(**options)


def test_the_helpers_name_the_field() -> None:
    with refused("tries", "range"):
        require_whole("server", 1, parallel=3, tries=0)
    with refused("tries", "type"):
        require_whole("server", 1, parallel=3, tries="4")
    with refused("budget", "range"):
        require_kind(Budget, "budgets=[0]: budget", 0)
    with refused("limit", "conflict"):
        require_same("runs/data: made", {"seed": 0, "limit": 4}, {"seed": 0, "limit": 5}, "choose another out=")
    with refused("window", "type"):
        from_json(b'{"budget": 8, "window": "4"}', Options)
    with refused("budget", "missing"):
        from_json(b"{}", Options)


POSITIVE: Any = Annotated[float, Gt(0)]
OPTIONAL = POSITIVE | None


@pytest.mark.parametrize(
    ("kind", "value", "code"),
    [
        (int | list[int], "x", "type"),
        (Literal["a", "b"], "c", "unknown"),
        (OPTIONAL, -1.0, "range"),
    ],
)
def test_what_pydantic_finds_has_a_code(kind: Any, value: Any, code: Code) -> None:
    with pytest.raises(ValidationError) as error:
        TypeAdapter(kind).validate_python(value)
    assert code_of(error.value) == code


def test_an_error_keeps_its_field_where_it_is_worded_anew_copied_or_sent_to_another_process() -> None:
    error = UserError("budget 0 must be at least 1", field="budget", code="range")
    for other in (error.reworded("SnapKV: budget 0"), copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (other.field, other.code) == ("budget", "range")
    assert str(error.reworded("SnapKV: budget 0")) == "SnapKV: budget 0"
