"""A new method is one module: commands, exports, pages and the builder know it by the registry alone."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import keepsight
from keepsight.commands.variants import import_plugins, variants_of
from keepsight.errors import Code
from keepsight.models.targets import outline_target
from keepsight.runtime import methods, registry
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import METHODS, Resources, make_method
from tests.refused import refused
from tests.tiny import prompt_ids, save_tiny_target, tiny_model

ROOT = Path(__file__).resolve().parents[1]
TOY = '''"""A toy."""

from dataclasses import dataclass

from keepsight.errors import UserError, Whole
from keepsight.runtime import registry
from keepsight.runtime.evict import Evict
from keepsight.runtime.observe import Observer


@registry.observer("toy_values")
@dataclass(frozen=True)
class ToyValues(Observer):
    def __call__(self, model, state, reduce):
        return [layer.values.norm(dim=-1).float() for layer in state.entries()]


@registry.method("toy", label="Toy")
@dataclass(frozen=True)
class ToyMethod(Evict):
    """Keeps the entries with the longest values (Toy, arXiv 2601.00001, section 2)."""

    observer: Observer = ToyValues()
    window: Whole = 4

    def check_model(self, model):
        if self.window > model.config.num_hidden_layers * 4:
            message = f"ToyMethod: window {self.window} is too long for this model"
            raise UserError(message, field="window", code="range")
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """The class of a method in a file of the working folder, as `plugins=` finds it; it is forgotten afterwards."""
    tables: list[dict[str, Any]] = [registry.METHODS, registry.OBSERVERS, registry.LABELS]
    tables_before = [dict(table) for table in tables]
    (tmp_path / "toy_of_a_test.py").write_text(TOY, "utf-8")
    monkeypatch.chdir(tmp_path)
    import_plugins(["toy_of_a_test"])
    yield METHODS["toy"]
    for table, entries in zip(tables, tables_before, strict=True):
        table.clear()
        table.update(entries)
    del sys.modules["toy_of_a_test"]


def test_a_module_is_all_that_a_method_needs(toy: type[Any], tmp_path: Path) -> None:
    outline = outline_target(str(save_tiny_target(tmp_path / "base")), dtype="float32")
    resources = Resources(tokenizer=outline.tokenizer, target=outline.model)
    methods_by_name = {variant.name: variant.method for variant in variants_of(["all"], [40], [], resources)}
    assert methods_by_name["toy"] == toy(40)
    assert make_method("toy", 40, resources) == toy(40)
    assert keepsight.ToyMethod is toy
    assert methods.ToyMethod is toy  # type: ignore[attr-defined]
    exports: Any = keepsight.__all__
    assert "ToyMethod" in exports
    assert "ToyMethod" in dir(keepsight)

    ids, _ = prompt_ids(90)
    method = make_method("toy", 40, resources, window=6, pool="none")
    assert method == toy(40, window=6, pool=registry.NO_POOL)
    state = method.start(tiny_model(), ids)
    assert int(state.counts().sum()) == 40 * 3 * 2
    assert generate(tiny_model(), ids, method, max_new_tokens=2, do_sample=False).shape == (1, 2)


def test_its_pages_are_made_of_its_docstring(toy: type[Any]) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    row = (
        "| `toy` | Toy | [2601.00001](https://arxiv.org/abs/2601.00001) | Keeps the entries with the longest values. |"
    )
    page = tables["with_tables"]((ROOT / "docs" / "methods.md").read_text("utf-8"))
    assert row in page.splitlines()
    api = tables["with_tables"]((ROOT / "docs" / "api" / "methods.md").read_text("utf-8"))
    assert "::: toy_of_a_test.ToyMethod" in api.splitlines()
    assert "from toy_of_a_test import ToyMethod as ToyMethod" in tables["stub"]().splitlines()


@pytest.mark.parametrize(
    ("options", "field", "code"),
    [
        ({"windows": 3}, "windows", "unknown"),
        ({"window": -1}, "window", "range"),
        ({"window": 13}, "window", "range"),
        ({"adapter": "DIR"}, "adapter", "unknown"),
    ],
)
def test_wrong_options_are_refused_by_the_builder(
    toy: type[Any], options: dict[str, Any], field: str, code: Code
) -> None:
    with refused(field, code) as error:
        make_method("toy", 40, Resources(target=tiny_model()), **options)
    assert "\n" not in str(error.value)


def test_the_stub_for_type_checkers_names_every_method() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    assert tables["STUB"].read_text("utf-8") == tables["stub"](), "python docs/tables.py makes it"
