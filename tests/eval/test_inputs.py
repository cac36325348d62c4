"""What the digest of a row's inputs covers: every field of a method, and the source of classes that plugins define."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepsight.eval.inputs import method_text, plugin_digest, sample_digest
from keepsight.eval.tasks.samples import Sample, render
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods import SnapKV
from keepsight.runtime.observe import Observer
from tests.tiny import tiny_tokenizer

METHOD = """
from dataclasses import dataclass
{imports}
from keepsight.runtime.methods import SnapKV

@dataclass(frozen=True)
class Plugin(SnapKV):
    {body}
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported; they are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loaded = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


def plugin_of(module: str) -> Any:
    """The class of a module, imported anew with all that it imports."""
    imported = [name for name in sys.modules if name.startswith("plug_")]
    for name in imported:
        del sys.modules[name]
    importlib.invalidate_caches()
    return importlib.import_module(module).Plugin


def test_an_edited_plugin_is_another_method(plugins: Path) -> None:
    path = plugins / "plug_one.py"
    path.write_text(METHOD.format(imports="", body="share: float = 0.5"))
    text = method_text(plugin_of("plug_one")(64))
    assert method_text(plugin_of("plug_one")(64)) == text
    assert method_text(plugin_of("plug_one")(64, share=0.25)) != text
    path.write_text(METHOD.format(imports="", body="share: float = 0.5\n    factor = 2"))
    assert method_text(plugin_of("plug_one")(64)) != text


@pytest.mark.parametrize(
    ("imports", "beside"),
    [
        ("from plug_beside import FACTOR", "plug_beside.py"),
        ("import plug_beside", "plug_beside.py"),
        ("from plug_folder.deep import FACTOR", "plug_folder/deep.py"),
        ("from plug_through import OTHER", "plug_beside.py"),
    ],
)
def test_modules_beside_a_plugin_that_it_imports_count(plugins: Path, imports: str, beside: str) -> None:
    (plugins / "plug_folder").mkdir()
    for name in ("plug_beside.py", "plug_folder/__init__.py", "plug_folder/deep.py", "plug_unused.py"):
        (plugins / name).write_text("FACTOR = 1\n")
    (plugins / "plug_through.py").write_text("from plug_beside import FACTOR as OTHER\n")
    (plugins / "plug_one.py").write_text(METHOD.format(imports=imports, body="pass"))
    digest = plugin_digest(plugin_of("plug_one"))
    (plugins / "plug_unused.py").write_text("FACTOR = 2\n")
    assert plugin_digest(plugin_of("plug_one")) == digest
    (plugins / beside).write_text("FACTOR = 2\n")
    assert plugin_digest(plugin_of("plug_one")) != digest


def test_relative_imports_of_a_package_count_and_what_lies_beside_it_does_not(plugins: Path) -> None:
    package = plugins / "plug_package"
    (package / "parts").mkdir(parents=True)
    for name in ("__init__.py", "parts/__init__.py", "parts/deep.py", "other.py"):
        (package / name).write_text("FACTOR = 1\n")
    (plugins / "plug_beside.py").write_text("FACTOR = 1\n")
    imports = "from .parts.deep import FACTOR\nfrom . import other\nimport plug_beside"
    (package / "method.py").write_text(METHOD.format(imports=imports, body="pass"))
    digests = [plugin_digest(plugin_of("plug_package.method"))]
    for name in ("parts/deep.py", "other.py"):
        (package / name).write_text("FACTOR = 2\n")
        digests.append(plugin_digest(plugin_of("plug_package.method")))
    assert len(set(digests)) == 3
    (plugins / "plug_beside.py").write_text("FACTOR = 2\n")
    assert plugin_digest(plugin_of("plug_package.method")) == digests[-1]


def test_keepsights_own_methods_have_no_source_digest_and_every_option_counts() -> None:
    assert plugin_digest(SnapKV) is None
    texts = {method_text(SnapKV(64)), method_text(SnapKV(128)), method_text(SnapKV(64, window=8))}
    assert len(texts) == 3
    assert "" not in texts


def test_a_class_without_a_file_has_no_text() -> None:
    """As one that was typed into a notebook."""
    Typed: Any = type("Typed", (Observer,), {"__module__": "__typed__", "__call__": lambda *_: None})
    assert method_text(Evict(8, Typed())) == ""


def test_a_samples_names_do_not_count_and_all_else_does() -> None:
    sample = render(Sample("one", "t", 8, "What?", ("a",), "qa_f1", 4), tiny_tokenizer())
    digest = sample_digest(sample)
    assert digest == sample_digest(replace(sample, id="two", task="u", length=9, is_cut=True))
    for change in ({"references": ("b",)}, {"metric": "rouge"}, {"max_new_tokens": 5}, {"judge": "j"}, {"depth": 0.5}):
        assert sample_digest(replace(sample, **change)) != digest
    assert sample_digest(replace(sample, prompt_ids=sample.prompt_ids + 1)) != digest
