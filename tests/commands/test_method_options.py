"""Options that a line of `methods=` has beside the method's own: values that it varies, and a draft of its own."""

from typing import Any

import pytest

from keepsight.commands.config import Eval
from keepsight.commands.from_recipe import resources_of, without_weights
from keepsight.commands.parse import parse
from keepsight.commands.variants import variants_of
from keepsight.models.draft_sources import LayerSubset
from tests.refused import refused

TINY = ("model.id=tiny", "model.device=cpu", "draft.layers=[0,2]", "out=out", "budgets=[40]")
pytestmark = pytest.mark.usefixtures("here")


def methods_of(method: str) -> dict[str, Any]:
    """The methods that a line of `methods=` makes, by name."""
    config = parse(Eval, [*TINY, f"methods=[{method}]"])
    resources = resources_of(config, without_weights(config))
    variants = variants_of(config.methods, config.budgets, config.bits, resources)
    return {variant.name: variant.method for variant in variants}


def test_an_option_of_a_part_takes_each_value() -> None:
    methods = methods_of("{name: speckv, vary: {observer.drafter.lookahead: [2,8]}, label: drafted}")
    lookaheads = {name: method.observer.drafter.lookahead for name, method in methods.items()}
    assert lookaheads == {"drafted lookahead=2": 2, "drafted lookahead=8": 8}
    for method in methods.values():
        assert method.observer.drafter.draft == LayerSubset((0, 2))


def test_options_are_combined_and_a_part_named_alone_gets_them() -> None:
    vary = "{observer.drafter.first: [1,4], pool.kernel: [1,7]}"
    methods = methods_of(f"{{name: dapq, observer: {{name: draft_tokens, drafter: prompt_ends}}, vary: {vary}}}")
    combinations = {(method.observer.drafter.first, method.pool.kernel) for method in methods.values()}
    assert combinations == {(1, 1), (1, 7), (4, 1), (4, 7)}
    for name, method in methods.items():
        assert name.endswith(f"kernel={method.pool.kernel}")


@pytest.mark.parametrize("vary", ["3", "{window: 8}", "{window: []}"])
def test_what_is_no_list_of_values_is_refused(vary: str) -> None:
    with refused("methods", "type"):
        methods_of(f"{{name: snapkv, vary: {vary}}}")


def test_a_method_names_its_own_draft() -> None:
    methods = methods_of("speckv,{name: speckv, draft: {layers: [0,1]}, label: b}")
    assert methods["speckv"].observer.drafter.draft == LayerSubset((0, 2))
    assert methods["b"].observer.drafter.draft == LayerSubset((0, 1))


@pytest.mark.parametrize(
    ("method", "field", "code"),
    [
        ("{name: speckv, draft: {layer: [0]}}", "draft", "unknown"),
        ("{name: speckv, draft: {layers: [9]}}", "draft.layers", "range"),
        ("{name: snapkv, draft: {layers: [0]}}", "draft", "unknown"),
    ],
)
def test_drafts_that_a_method_cannot_have_are_refused(method: str, field: str, code: Any) -> None:
    with refused(field, code):
        methods_of(method)
