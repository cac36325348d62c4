"""Every model type of transformers, as docs/model_types.md says: a sample here, all of them by `make test-grid`."""

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.configs import MODEL_TYPES
from tests.zoo.sweep import PAGE, PLACE, RESULTS, ROOT, Row, read_rows, table

SAMPLE = (
    "bart",
    "deepseek_v3",
    "doge",
    "falcon_h1",
    "gemma3",
    "gemma4_text",
    "gpt2",
    "inkling_text",
    "llama",
    "mamba",
    "nemotron_h",
    "qwen3_next",
    "stablelm",
)
"""Types of all kinds of layers, and of each reason to refuse one."""
RECORDED = read_rows(RESULTS)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Row]:
    """Those of the types whose tests were selected, from one sweep: the command imports everything once."""
    selected = set[str]()
    for item in request.session.items:
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == Path(__file__) and "model_type" in parameters:
            selected.add(parameters["model_type"])
    file = tmp_path_factory.mktemp("zoo") / "model_types.csv"
    command = [sys.executable, "-m", "tests.zoo.sweep", "--out", str(file), *sorted(selected)]
    subprocess.run(command, cwd=ROOT, check=True)
    return read_rows(file)


def grid_unless_in_sample(model_type: str) -> Any:
    marks = () if model_type in SAMPLE else pytest.mark.grid
    return pytest.param(model_type, marks=marks)


@pytest.mark.parametrize("model_type", map(grid_unless_in_sample, MODEL_TYPES))
def test_a_model_type_works_or_is_refused_as_the_page_says(model_type: str, outcomes: Mapping[str, Row]) -> None:
    outcome = dict(outcomes[model_type])
    recorded = dict(RECORDED[model_type])
    del outcome["transformers"], recorded["transformers"]
    assert outcome == recorded


def test_no_model_type_ends_in_a_traceback() -> None:
    failing = [model_type for model_type, row in RECORDED.items() if row["outcome"] == "fails"]
    assert failing == []
    assert all("\n" not in row["line"] for row in RECORDED.values())


def test_the_page_has_every_model_type_of_the_recorded_version() -> None:
    page = PAGE.read_text("utf-8")
    (table_of_page,) = PLACE.findall(page)
    assert table_of_page == table(RECORDED), "run `python -m tests.zoo.sweep --table`"
    versions = {row["transformers"] for row in RECORDED.values()}
    if versions == {version("transformers")}:
        assert sorted(RECORDED) == MODEL_TYPES
