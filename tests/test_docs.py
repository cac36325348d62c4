"""What README and the documentation tell a reader to type is understood, what they name is there, tables agree."""

import importlib
import io
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from keepsight.commands import cli, parse
from keepsight.eval.record import Phases, ResultRow
from keepsight.files import write_json, write_lines
from keepsight.runtime.methods import METHODS
from keepsight.runtime.state import prefill
from tests.eval.report.results import row
from tests.test_readme import names as names
from tests.test_readme import run
from tests.typed import ROOT, command_of, lines, text_of

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
FINDINGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "results").glob("*.md"))
GUIDES = [page for page in PAGES if not page.startswith("docs/api/") and page != "docs/results.md"]
TEXTS = ["README.md", "RESULTS.md", *GUIDES, *FINDINGS]


def commands(page: str) -> list[list[str]]:
    """What follows `keepsight` in blocks without a language, a script counting as its command."""
    return [command for line in lines(page) if (command := command_of(line))]


def section(page: str, title: str) -> str:
    """The text below a title of the second level, up to the next such title."""
    return text_of(page).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)])
def test_every_command_has_known_keys_and_values(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "model_of_adapter", lambda reference: {})  # the adapters in texts are the reader's
    for command in commands(page):
        name, arguments = cli.command_of(command)
        cli.configuration(name, [argument for argument in arguments if argument != "..."])


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)])
def test_lists_are_written_without_brackets(page: str) -> None:
    """`tasks=niah,ruler`; brackets where an element is a mapping."""
    arguments = " ".join(" ".join(command) for command in commands(page))
    assert not re.findall(r"\b(?:tasks|methods|budgets|lengths)=\[[\w.,]+\]", arguments)


def test_every_recipe_is_named() -> None:
    mentioned = {*re.findall(r"`([\w.-]+)`", section("docs/training.md", "Recipes"))}
    recipes = {path.stem for path in (ROOT / "recipes" / "recipe").glob("*.yaml")}
    assert mentioned == recipes


@pytest.mark.parametrize("page", GUIDES)
def test_its_python_runs(page: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for block in re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL):
        run(block, names)


@pytest.mark.parametrize("page", [*GUIDES, *FINDINGS, "README.md", "RESULTS.md", "CONTRIBUTING.md"])
def test_the_files_it_links_to_are_there(page: str) -> None:
    folder = (ROOT / page).parent
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    assert [path for path in linked if not (folder / path).exists()] == []
    mentioned = re.findall(r"`(examples/[\w.]+)`", text_of(page))
    assert [path for path in mentioned if not (ROOT / path).exists()] == []


def test_results_link_only_where_the_site_has_them_too() -> None:
    """The site shows RESULTS.md as a page of `docs/`, and `results/` beside it; docs/hooks.py rewrites these links."""
    patterns = dict.fromkeys(FINDINGS, r"https://|#|[\w-]+\.(csv|md)|\.\./(docs/|RESULTS\.md)")
    patterns["RESULTS.md"] = r"https://|#|results/|docs/"
    for page, pattern in patterns.items():
        links = re.findall(r"\]\(([^)]+)\)", text_of(page))
        assert links, page
        assert [link for link in links if not re.match(pattern, link)] == [], page


def test_every_finding_is_linked_from_results() -> None:
    linked = {f"results/{name}" for name in re.findall(r"\]\(results/([\w-]+\.md)", text_of("RESULTS.md"))}
    assert linked == {*FINDINGS}


def test_the_reference_names_what_exists_and_every_method() -> None:
    documented = []
    for page in PAGES:
        documented += re.findall(r"^::: (\S+)$", text_of(page), flags=re.MULTILINE)
    assert len(documented) == len({*documented})
    for name in documented:
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member) or find_spec(name), name
    classes = {f"{method.__module__}.{method.__qualname__}" for method in METHODS.values()}
    assert classes <= {*documented}


def test_every_press_has_a_line_and_its_methods_exist() -> None:
    """The 44 presses of kvpress 0.5.5, and a proposed one, each in a line; what they become is in the registry."""
    presses = []
    methods = set()
    for line in section("docs/coming_from_kvpress.md", "Every press").splitlines():
        if re.match(r"\| `\w+Press", line):
            _, press_cell, method_cell, *_ = line.split("|")
            presses += re.findall(r"`(\w+Press)\b", press_cell)
            methods |= {*re.findall(r"`([a-z][a-z0-9_+]*)`", method_cell)}
    assert len(presses) == 45
    assert len({*presses}) == 45
    assert methods
    assert methods <= {*METHODS}


TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_holds_the_tables_of_the_files(page: Path) -> None:
    text = page.read_text("utf-8")
    assert TABLES["MARKED_TABLE"].search(text)
    assert TABLES["with_tables"](text) == text, "python docs/tables.py makes them"


def test_presses_of_kvpress_are_asked_for_exactly_the_budget() -> None:
    """By their own rounding: of the kept share of a head, and of what is dropped from all heads."""
    script = runpy.run_path(str(ROOT / "docs" / "kvpress_results.py"))
    heads = 90
    for length in (65, 513, 1000, 2047, 8191):
        for budget in (1, 64, 128, 256, 512):
            entries = min(budget, length)
            ratio_of_head = script["ratio_of_head"](budget, length)
            assert int(length * (1 - ratio_of_head)) == entries
            ratio_of_model = script["ratio_of_model"](budget, length, heads)
            dropped = int(heads * length * ratio_of_model)
            assert heads * length - dropped == heads * entries


def test_rules_for_layers_that_share_entries_are_compared() -> None:
    """The script's own rule, in loops, and rows of the file of trials."""
    script = runpy.run_path(str(ROOT / "docs" / "shared_entries.py"))
    model = script["untrained_model"](0).eval()
    methods = script["methods"](13)
    method = methods["question observes, largest layer of means over heads"]
    prompt, _ = script["samples"](script["Stage"](40, 4, 4, 0.0, 2), True, torch.Generator().manual_seed(1))
    state = prefill(model, prompt, needs=method.needs())
    for layer, importance in zip(state.layers, method.importance(model, state), strict=True):
        assert layer.readers in (1, 4)
        attention = method.bound_observer.score(layer, "mean")  # two KV heads with two query heads a layer
        for head in range(2):
            for entry in range(1, prompt.shape[1] - script["QUESTION"]):
                means = []
                for reader in range(layer.readers):
                    first = 2 * (head * layer.readers + reader)
                    pair = attention[1, first : first + 2, entry]
                    means.append(float(pair[0] + pair[1]) / 2)
                assert abs(float(importance[1, head, entry]) - max(means)) < 1e-6

    rows = script["rows"]([script["measure"](model, 3, 1, (13,))] * 2)
    columns = (ROOT / "results" / "trials.csv").read_text("utf-8").splitlines()[0]
    table = pd.read_csv(io.StringIO("\n".join([columns, *rows])))
    assert len(table) == 2 * 2 * (1 + len(methods))
    assert (table["samples"] == 6).all()
    assert table["difference"].notna().sum() == 2 * 2 * 3  # beside the full cache and two chosen rules


def assert_cells(line: dict[str, Any], **expected: Any) -> None:
    """Fail unless some cells of a table's line are these."""
    assert {name: line[name] for name in expected} == expected


def test_the_table_of_all_methods_is_made_of_an_evaluation(tmp_path: Path) -> None:
    """Two samples of one method: means, the cost against the full cache's prefill, kvpress's rows beside them."""
    script = runpy.run_path(str(ROOT / "docs" / "method_results.py"))
    shared: dict[str, Any] = {
        "task": "a",
        "length": 99,
        "score": 1.0,
        "agreement": 1.0,
        "kept": 9,
        "rows": 1,
        "references": ["b"],
        "time_to_first_token": 1.0,
        "tokens_per_second": 1.0,
        "answer": "b",
        "question": "seen",
        "date": "2026-01-02",
        "kv_bytes": 2**20,
    }
    without_eviction = Phases(prefill=2.0, draft=0.0, observe=0.0, select=0.0, question=5.0)
    with_eviction = Phases(prefill=2.0, draft=0.0, observe=0.0, select=0.1, question=5.0)
    rows = []
    for sample, excess in (("c", 0.25), ("d", 0.0)):
        full = row("full", None, sample=sample, excess_nll=0.0, seconds=without_eviction, **shared)
        keydiff = row("keydiff", 9, sample=sample, excess_nll=excess, seconds=with_eviction, **shared)
        rows += [full.columns(), keydiff.columns()]
    write_lines(tmp_path / "results.jsonl", rows)
    write_json(tmp_path / "settings.json", {"target": {"dtype": "float32"}})
    (tmp_path / "kvpress").mkdir()
    measured = {"task": "a", "length": 99, "press": "KeyDiffPress", "budget": 9, "excess": 0.5}
    write_lines(tmp_path / "kvpress" / "measured.jsonl", [measured, measured | {"excess": 0.7}])

    lines = script["summarized"](tmp_path, "1 core").set_index("method").to_dict("index")
    assert lines["keydiff"] == {
        "question": "seen",
        "budget": "9",
        "excess_nll": "0.125",
        "low": "0.00",
        "high": "0.25",
        "score": "1.000",
        "cost": "5.0",
        "kv_mib": "1.00",
        "samples": 2,
        "dtype": "float32",
        "date": "2026-01-02",
        "processor": "1 core",
        "run": tmp_path.name,
    }
    assert_cells(lines["full"], budget="", cost="0.0")
    assert_cells(lines["kvpress KeyDiffPress"], excess_nll="0.600", budget="9", score="", kv_mib="")
    (line,) = script["differences"](tmp_path, "1 core").to_dict("records")
    assert_cells(line, method="keydiff", minus="kvpress KeyDiffPress", difference="-0.4750")


def test_the_table_of_papers_figures_is_made_of_runs(tmp_path: Path) -> None:
    """Means over two tasks, values of an option in their order, and one row where the budget does not matter."""
    script = runpy.run_path(str(ROOT / "docs" / "paper_results.py"))
    folder = tmp_path / "figures_similarity"
    folder.mkdir()
    lines = [
        "task,method,budget,samples,recall,tau",
        "a,t=16,64,3,0.4,0.1",
        "a,t=16,128,3,0.9,0.1",
        "b,t=16,64,3,0.4,0.3",
        "b,t=16,128,3,0.9,0.3",
        "a,t=4,64,3,0.3,0.5",
        "a,t=4,128,3,0.9,0.5",
        "b,t=4,64,3,0.3,0.5",
        "b,t=4,128,3,0.9,0.5",
    ]
    (folder / "importance.csv").write_text("\n".join(lines))
    rows = script["rows_of"](folder, "1 core")
    assert rows[["setting", "budget", "measure", "value"]].to_numpy().tolist() == [
        ["t=4", "64", "recall", "0.3"],
        ["t=4", "", "tau", "0.5"],
        ["t=4", "128", "recall", "0.9"],
        ["t=16", "64", "recall", "0.4"],
        ["t=16", "", "tau", "0.2"],
        ["t=16", "128", "recall", "0.9"],
    ]
    assert {*rows["samples"]} == {6}
    assert {*rows["run"]} == {folder.name}
    assert rows["paper"].iloc[0] == "LookaheadKV"
    assert rows["figure"].iloc[0] == "table 8"


def evaluated(folder: Path, rows: list[ResultRow], **settings: Any) -> Path:
    """A folder as `keepsight eval` leaves it."""
    folder.mkdir(parents=True)
    write_lines(folder / "results.jsonl", [row.columns() for row in rows])
    defaults = {
        "target": {"name": "user/small", "dtype": "bfloat16"},
        "adapter": "shipped:a",
        "jsonl": {"files": []},
        "max_tokens": 2048,
        "command": "c",
    }
    write_json(folder / "settings.json", {**defaults, **settings})
    return folder


def test_the_tables_of_real_models_are_made_of_runs(tmp_path: Path) -> None:
    """Lengths apart, means over tasks, only methods that have all samples, needles by depth."""
    script = importlib.import_module("docs.real_models")
    rows = []
    for task, length, depth in (("niah_single", 400, 0.0), ("niah_single", 400, 0.9), ("niah_multikey", 800, 0.5)):
        sample: dict[str, Any] = {"task": task, "length": length, "sample": f"{depth}", "depth": depth}
        rows.append(row("full", None, 1.0, time_to_first_token=1.0, **sample))
        rows.append(row("lookaheadkv", 64, float(depth == 0), excess_nll=depth, time_to_first_token=2.5, **sample))
    rows.append(row("speckv 0.5B", 64, 1.0, task="niah_single", length=400, sample="0.0", depth=0.0))
    folder = evaluated(tmp_path / "needles", rows, tasks=["niah_single", "niah_multikey"])
    table = script.scores_of(folder, "1 core")
    lines = table.set_index(["length", "method"]).to_dict("index")
    assert [*lines] == [
        ("400", "full cache"),
        ("400", "LookaheadKV (shipped)"),
        ("800", "full cache"),
        ("800", "LookaheadKV (shipped)"),
    ]
    line = lines["400", "LookaheadKV (shipped)"]
    assert_cells(line, score="0.500", excess_nll="0.450", first_s="2.50")
    assert_cells(line, tasks="needles", budget="64", samples="2", run="needles")
    assert float(line["score_low"]) < 0.5 < float(line["score_high"])

    needles = script.needles_of(folder, "1 core")
    assert {*needles["method"]} == {"full cache", "LookaheadKV (shipped)", "SpecKV, 0.5B"}
    ours = needles[needles["method"] == "LookaheadKV (shipped)"]
    assert ours[["kind", "length", "depth", "score"]].to_numpy().tolist() == [
        ["single", 400, "0.00", "1.000"],
        ["single", 400, "0.90", "0.000"],
        ["multikey", 800, "0.50", "0.000"],
    ]


def test_files_of_code_are_told_from_other_files(tmp_path: Path) -> None:
    script = importlib.import_module("docs.real_models")
    code_row = row("full", None, 1.0, task="lcc", length=512)
    prose_row = row("full", None, 1.0, task="trec", length=1024)
    folder = evaluated(tmp_path / "code", [code_row], tasks=["jsonl"], jsonl={"files": ["lcc", "repobench-p"]})
    (line,) = script.scores_of(folder, "1 core").to_dict("records")
    assert_cells(line, tasks="code", length="2048", budget="")
    files = {"files": ["lcc", "trec"]}
    folder = evaluated(tmp_path / "real", [code_row, prose_row], tasks=["jsonl"], jsonl=files, max_tokens=4096)
    (line,) = script.scores_of(folder, "1 core").to_dict("records")
    assert_cells(line, tasks="real prompts", length="4096", samples="2")


def test_the_table_of_fits_is_made_of_their_log(tmp_path: Path) -> None:
    """The last fit of that folder in the log, with the memory that GNU time prints after it."""
    script = importlib.import_module("docs.real_models")
    fit = tmp_path / "fit_small"
    rows = []
    for sample in "ab":
        rows.append(row("full", None, 1.0, sample=sample))
        for budget in (64, 9):
            rows.append(row("lookaheadkv", budget, 1.0, sample=sample))
            rows.append(row("snapkv", budget, float(sample == "b"), sample=sample))
    evaluated(fit / "eval", rows, tasks=["niah_single"])
    write_json(fit / "fit.json", {"trained": "eviction"})
    (fit / "data").mkdir()
    settings = {
        "model": "user/small",
        "identity": {},
        "mixture": {},
        "seed": 0,
        "limit": 48,
        "max_new_tokens": 4,
        "shard_size": 64,
    }
    write_json(fit / "data" / "manifest.json", {"complete": True, "settings": settings, "samples": 48})
    log = (
        "runs/fit_small/adapter: the module, its card and its pictures\n\nanswers 1 s\ntotal 1 s\n\n=== answers\n"
        "runs/fit_small/adapter: the module, its card and its pictures\n\nanswers          84 s\nimportance      30 s\n"
        "total          114 s\n\tMaximum resident set size (kbytes): 2048\n\n=== answers\ntotal 9 s\n"
    )
    (line,) = script.fit_of(fit, "1 core", log).to_dict("records")
    assert_cells(line, answers_s="84", importance_s="30", eviction_s="", total_s="114")
    assert_cells(line, peak_mib="2", samples=48, budget="9", run="fit_small")
    assert_cells(line, full="2 of 2", lookaheadkv="2 of 2", snapkv="1 of 2")
    with pytest.raises(SystemExit, match="fit_other"):
        script.stages_of(log, "fit_other")


def test_commands_of_runs_name_no_path_of_the_machine() -> None:
    script = importlib.import_module("docs.real_models")
    methods = "'methods=[{name: x, adapter: %s}, snapkv]' adapter=shipped:a/b model.id=user/small"
    command = "keepsight eval jsonl.dir=/a/b out=/c/run9 " + methods % "/d/e-f/paper05"
    public = "keepsight eval jsonl.dir=DIR out=runs/run9 " + methods % "PAPER05"
    assert script.public_command(command, "run9") == public


def test_the_tables_of_real_models_show_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section each, the full cache in every column, equal lines of two runs in one, and signs for needles."""
    score = {
        "model": "o/m",
        "tasks": "RULER",
        "question": "seen",
        "length": "1024",
        "score_low": "",
        "score_high": "",
        "excess_low": "",
        "excess_high": "",
        "first_s": "1.00",
        "date": "d",
        "processor": "p",
        "samples": "4",
    }
    full_cache = score | {"method": "full cache", "budget": "", "score": "0.5", "excess_nll": "0"}
    scores = [
        full_cache | {"run": "a"},
        score | {"method": "LAQ", "budget": "64", "score": "0.25", "excess_nll": "1", "run": "a"},
        full_cache | {"run": "b"},
        score | {"method": "LAQ", "budget": "128", "score": "0.4", "excess_nll": "0.5", "run": "b"},
    ]
    needle = {
        "model": "o/m",
        "question": "seen",
        "kind": "single",
        "method": "LAQ",
        "budget": "64",
        "samples": "1",
        "length": "2048",
        "date": "d",
        "processor": "p",
        "run": "a",
    }
    needles = [
        needle | {"depth": "0.00", "score": "1"},
        needle | {"depth": "0.50", "score": "0"},
        needle | {"depth": "1.00", "score": "0.5"},
    ]
    files = {"real_models": scores, "real_models_needles": needles}
    functions = TABLES["TABLE_FUNCTIONS"]
    monkeypatch.setitem(functions["fits"].__globals__, "read", lambda file: pd.DataFrame(files[file]))
    assert functions["models-ruler"]() == (
        "\n## RULER by prompt length\n\n### m, 1,024 tokens, question seen\n\n"
        "| method | 64 entries | 128 entries | samples | date | processor | run |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| full cache | 0.50 / 0.00 | 0.50 / 0.00 | 4 | d | p | a, b |\n"
        "| LAQ | 0.25 / 1.00 | – | 4 | d | p | a |\n"
        "| LAQ | – | 0.40 / 0.50 | 4 | d | p | b |\n\n"
    )
    assert functions["models-code"]() == ""
    assert "| LAQ | 64 | ●○◐ | d | p | a |" in functions["models-needles"]()
    assert TABLES["needles_figure"](TABLES["DARK"]) is not None


def test_each_row_of_the_files_has_a_run_and_a_processor() -> None:
    read = TABLES["read"]
    assert all(read("gpu")["card"])  # `make bench-gpu` writes it
    files = {path.stem for path in (ROOT / "results").glob("*.csv")} - {"runs", "gpu", "gpu_day"}
    rows = pd.concat([read(file)[["processor", "run"]] for file in files])
    assert len(rows) > 300
    assert all(rows["processor"].fillna(""))
    assert {*rows["run"]} == {*read("runs")["run"]} - {"untrained"}


def test_links_of_the_page_of_the_package_index_are_absolute() -> None:
    absolute = runpy.run_path(str(ROOT / "docs" / "absolute_links.py"))["absolute"]
    text = absolute((ROOT / "README.md").read_text("utf-8"), "https://github.com/o/n")
    links = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)', text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "https://github.com/o/n/raw/main/docs/images/" in text
    assert "https://github.com/o/n/blob/main/docs/quickstart.md" in text


def test_readme_counts_the_other_methods() -> None:
    """All but LookaheadKV, the full cache and the composition of parts."""
    (number,) = re.findall(r"comparing them with (\d+) other methods", text_of("README.md"))
    assert int(number) == len(METHODS.keys() - {"lookaheadkv", "full", "evict"})
