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
    return [given for line in lines(page) if (given := command_of(line))]


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)])
def test_every_command_has_known_keys_and_values(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "model_of_adapter", lambda reference: {})  # the adapters in texts are the reader's
    for given in commands(page):
        name, arguments = cli.command_of(given)
        cli.configuration(name, [word for word in arguments if word != "..."])


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(page)])
def test_lists_are_written_without_brackets(page: str) -> None:
    """`tasks=niah,ruler`; brackets where an element is a mapping."""
    arguments = " ".join(word for given in commands(page) for word in given)
    assert not re.findall(r"\b(?:tasks|methods|budgets|lengths)=\[[\w.,]+\]", arguments)


def test_every_recipe_is_named() -> None:
    listed = text_of("docs/training.md").partition("\n## Recipes\n")[2].partition("\n## ")[0]
    recipes = {path.stem for path in (ROOT / "recipes" / "recipe").glob("*.yaml")}
    assert recipes == {*re.findall(r"`([\w.-]+)`", listed)}


@pytest.mark.parametrize("page", GUIDES)
def test_its_python_runs(page: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for block in re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL):
        run(block, names)


@pytest.mark.parametrize("page", [*GUIDES, *FINDINGS, "README.md", "RESULTS.md", "CONTRIBUTING.md"])
def test_the_files_it_links_to_are_there(page: str) -> None:
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    named = re.findall(r"`(examples/[\w.]+)`", text_of(page))
    missing = [path for path in linked if not (ROOT / page).parent.joinpath(path).exists()]
    assert not missing + [path for path in named if not (ROOT / path).exists()]


def test_results_link_only_where_the_site_has_them_too() -> None:
    """The site shows RESULTS.md as a page of `docs/`, and `results/` beside it; docs/hooks.py rewrites these links."""
    for page in ("RESULTS.md", *FINDINGS):
        links = re.findall(r"\]\(([^)]+)\)", text_of(page))
        wanted = (
            r"https://|#|results/|docs/"
            if page == "RESULTS.md"
            else r"https://|#|[\w-]+\.(csv|md)|\.\./(docs/|RESULTS\.md)"
        )
        assert links and all(re.match(wanted, link) for link in links), (page, links)


def test_every_finding_is_linked_from_results() -> None:
    linked = {f"results/{name}" for name in re.findall(r"\]\(results/([\w-]+\.md)", text_of("RESULTS.md"))}
    assert linked == {*FINDINGS}


def test_the_reference_names_what_exists_and_every_method() -> None:
    referred = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", text_of(page), flags=re.MULTILINE)]
    assert len(referred) == len({*referred})
    for name in referred:
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member) or find_spec(name), name
    assert {f"{each.__module__}.{each.__qualname__}" for each in METHODS.values()} <= {*referred}


def test_every_press_has_a_line_and_its_methods_exist() -> None:
    """The 44 presses of kvpress 0.5.5, and a proposed one, each in a line; what they become is in the registry."""
    table = text_of("docs/coming_from_kvpress.md").partition("\n## Every press\n")[2].partition("\n## ")[0]
    lines_of_presses = [line.split("|") for line in table.splitlines() if re.match(r"\| `\w+Press", line)]
    presses = [press for line in lines_of_presses for press in re.findall(r"`(\w+Press)\b", line[1])]
    methods = {name for line in lines_of_presses for name in re.findall(r"`([a-z][a-z0-9_+]*)`", line[2])}
    assert len(presses) == len({*presses}) == 45
    assert methods and methods <= {*METHODS}


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
        for entries in (1, 64, 128, 256, 512):
            ratio = script["ratio_of_head"](entries, length)
            assert int(length * (1 - ratio)) == min(entries, length)
            whole_ratio = script["ratio_of_model"](entries, length, heads)
            dropped = int(heads * length * whole_ratio)
            assert heads * length - dropped == heads * min(entries, length)


def test_rules_for_layers_that_share_entries_are_compared() -> None:
    """The script's own rule, in loops, and rows of the file of trials."""
    script = runpy.run_path(str(ROOT / "docs" / "shared_entries.py"))
    model = script["untrained_model"](0).eval()
    methods = script["methods"](13)
    method = methods["question observes, largest layer of means over heads"]
    prompt, _ = script["samples"](script["Stage"](40, 4, 4, 0.0, 2), True, torch.Generator().manual_seed(1))
    state = prefill(model, prompt, needs=method.needs())
    for layer, importance in zip(state.layers, method.importance(model, state), strict=True):
        readers = {1: 1, 4: 4}[layer.readers]
        paid = method.bound_observer.score(layer, "mean")  # two KV heads with two query heads a layer
        for head in range(2):
            for entry in range(1, prompt.shape[1] - script["QUESTION"]):
                by_layer = []
                for reader in range(readers):
                    first = 2 * (head * readers + reader)
                    by_layer.append(float(paid[1, first, entry] + paid[1, first + 1, entry]) / 2)
                assert abs(float(importance[1, head, entry]) - max(by_layer)) < 1e-6

    rows = script["rows"]([script["measure"](model, 3, 1, (13,))] * 2)
    columns = (ROOT / "results" / "trials.csv").read_text("utf-8").splitlines()[0]
    table = pd.read_csv(io.StringIO("\n".join([columns, *rows])))
    assert len(table) == 2 * 2 * (1 + len(methods)) and (table["samples"] == 6).all()
    assert table["difference"].notna().sum() == 2 * 2 * 3  # beside the full cache and two chosen rules


def test_the_table_of_all_methods_is_made_of_an_evaluation(tmp_path: Path) -> None:
    """Two samples of one method: means, the cost against the full cache's prefill, kvpress's rows beside them."""
    script = runpy.run_path(str(ROOT / "docs" / "method_results.py"))
    rest = {"task": "a", "length": 99, "score": 1.0, "agreement": 1.0, "kept": 9, "rows": 1, "references": ["b"]}
    rest |= {
        "time_to_first_token": 1.0,
        "tokens_per_second": 1.0,
        "answer": "b",
        "question": "seen",
        "date": "2026-01-02",
    }
    rows = []
    for sample in "cd":
        variants = (("full", None, 0.0, 0.0), ("keydiff", 9, 0.25 * (sample == "c"), 0.1))
        for method, budget, excess, taken in variants:
            seconds = Phases(prefill=2.0, draft=0.0, observe=0.0, select=taken, question=5.0)
            values: dict[str, Any] = {
                **rest,
                "sample": sample,
                "kv_bytes": 2**20,
                "excess_nll": excess,
                "seconds": seconds,
            }
            rows.append(row(method, budget, **values).columns())
    write_lines(tmp_path / "results.jsonl", rows)
    write_json(tmp_path / "settings.json", {"target": {"dtype": "float32"}})
    (tmp_path / "kvpress").mkdir()
    measured = {"task": "a", "length": 99, "press": "KeyDiffPress", "budget": 9, "excess": 0.5}
    write_lines(tmp_path / "kvpress" / "measured.jsonl", [measured, measured | {"excess": 0.7}])
    lines = script["summarized"](tmp_path, "1 core").set_index("method").to_dict("index")
    assert lines["keydiff"] == {
        **{"question": "seen", "budget": "9", "excess_nll": "0.125", "low": "0.00", "high": "0.25", "score": "1.000"},
        **{"cost": "5.0", "kv_mib": "1.00", "samples": 2, "dtype": "float32", "date": "2026-01-02"},
        **{"processor": "1 core", "run": tmp_path.name},
    }
    assert (lines["full"]["budget"], lines["full"]["cost"]) == ("", "0.0")
    press = lines["kvpress KeyDiffPress"]
    assert (press["excess_nll"], press["budget"], press["score"], press["kv_mib"]) == ("0.600", "9", "", "")
    (line,) = script["differences"](tmp_path, "1 core").to_dict("records")
    assert (line["method"], line["minus"], line["difference"]) == ("keydiff", "kvpress KeyDiffPress", "-0.4750")


def test_the_table_of_papers_figures_is_made_of_runs(tmp_path: Path) -> None:
    """Means over two tasks, values of an option in their order, and one row where the budget does not matter."""
    script = runpy.run_path(str(ROOT / "docs" / "paper_results.py"))
    folder = tmp_path / "figures_similarity"
    folder.mkdir()
    lines = ["task,method,budget,samples,recall,tau"]
    for task, method, tau in (("a", "t=16", 0.1), ("b", "t=16", 0.3), ("a", "t=4", 0.5), ("b", "t=4", 0.5)):
        lines += [f"{task},{method},64,3,0.{len(method)},{tau}", f"{task},{method},128,3,0.9,{tau}"]
    (folder / "importance.csv").write_text("\n".join(lines))
    rows = script["rows_of"](folder, "1 core")
    found = rows[["setting", "budget", "measure", "value"]].to_numpy().tolist()
    four = [["t=4", "64", "recall", "0.3"], ["t=4", "", "tau", "0.5"], ["t=4", "128", "recall", "0.9"]]
    sixteen = [["t=16", "64", "recall", "0.4"], ["t=16", "", "tau", "0.2"], ["t=16", "128", "recall", "0.9"]]
    assert found == four + sixteen and {*rows["samples"]} == {6} and {*rows["run"]} == {folder.name}
    assert (rows["paper"].iloc[0], rows["figure"].iloc[0]) == ("LookaheadKV", "table 8")


def evaluated(folder: Path, rows: list[ResultRow], **settings: Any) -> Path:
    """A folder as `keepsight eval` leaves it."""
    folder.mkdir(parents=True)
    write_lines(folder / "results.jsonl", [row.columns() for row in rows])
    target = {"name": "user/small", "dtype": "bfloat16"}
    defaults = {"target": target, "adapter": "shipped:a", "jsonl": {"files": []}, "max_tokens": 2048, "command": "c"}
    write_json(folder / "settings.json", {**defaults, **settings})
    return folder


def test_the_tables_of_real_models_are_made_of_runs(tmp_path: Path) -> None:
    """Lengths apart, means over tasks, only methods that have all samples, needles by depth."""
    script = importlib.import_module("docs.real_models")
    rows = []
    for task, length, depth in (("niah_single", 400, 0.0), ("niah_single", 400, 0.9), ("niah_multikey", 800, 0.5)):
        where: dict[str, Any] = {"task": task, "length": length, "sample": f"{depth}", "depth": depth}
        rows.append(row("full", None, 1.0, time_to_first_token=1.0, **where))
        rows.append(row("lookaheadkv", 64, float(depth == 0), excess_nll=depth, time_to_first_token=2.5, **where))
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
    assert (line["score"], line["excess_nll"], line["first_s"]) == ("0.500", "0.450", "2.50")
    assert (line["tasks"], line["budget"], line["samples"], line["run"]) == ("needles", "64", "2", "needles")
    assert float(line["score_low"]) < 0.5 < float(line["score_high"])

    needles = script.needles_of(folder, "1 core")
    ours = needles[needles["method"] == "LookaheadKV (shipped)"]
    found = ours[["kind", "length", "depth", "score"]].to_numpy().tolist()
    assert found == [
        ["single", 400, "0.00", "1.000"],
        ["single", 400, "0.90", "0.000"],
        ["multikey", 800, "0.50", "0.000"],
    ]
    assert {*needles["method"]} == {"full cache", "LookaheadKV (shipped)", "SpecKV, 0.5B"}


def test_files_of_code_are_told_from_other_files(tmp_path: Path) -> None:
    script = importlib.import_module("docs.real_models")
    rows = [row("full", None, 1.0, task=task, length=length) for task, length in (("lcc", 512), ("trec", 1024))]
    folder = evaluated(tmp_path / "code", rows[:1], tasks=["jsonl"], jsonl={"files": ["lcc", "repobench-p"]})
    (line,) = script.scores_of(folder, "1 core").to_dict("records")
    assert (line["tasks"], line["length"], line["budget"]) == ("code", "2048", "")
    folder = evaluated(tmp_path / "real", rows, tasks=["jsonl"], jsonl={"files": ["lcc", "trec"]}, max_tokens=4096)
    (line,) = script.scores_of(folder, "1 core").to_dict("records")
    assert (line["tasks"], line["length"], line["samples"]) == ("real prompts", "4096", "2")


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
    settings = {"model": "user/small", "identity": {}, "mixture": {}, "seed": 0, "limit": 48, "max_new_tokens": 4}
    settings["shard_size"] = 64
    write_json(fit / "data" / "manifest.json", {"complete": True, "settings": settings, "samples": 48})
    log = (
        "runs/fit_small/adapter: the module, its card and its pictures\n\nanswers 1 s\ntotal 1 s\n\n=== answers\n"
        "runs/fit_small/adapter: the module, its card and its pictures\n\nanswers          84 s\nimportance      30 s\n"
        "total          114 s\n\tMaximum resident set size (kbytes): 2048\n\n=== answers\ntotal 9 s\n"
    )
    (line,) = script.fit_of(fit, "1 core", log).to_dict("records")
    assert (line["answers_s"], line["importance_s"], line["eviction_s"], line["total_s"]) == ("84", "30", "", "114")
    assert (line["peak_mib"], line["samples"], line["budget"], line["run"]) == ("2", 48, "9", "fit_small")
    assert (line["full"], line["lookaheadkv"], line["snapkv"]) == ("2 of 2", "2 of 2", "1 of 2")
    with pytest.raises(SystemExit, match="fit_other"):
        script.stages_of(log, "fit_other")


def test_commands_of_runs_name_no_path_of_the_machine() -> None:
    script = importlib.import_module("docs.real_models")
    methods = "'methods=[{name: x, adapter: %s}, snapkv]' adapter=shipped:a/b model.id=user/small"
    command = "keepsight eval jsonl.dir=/a/b out=/c/run9 " + methods % "/d/e-f/paper05"
    assert script.public_command(command, "run9") == (
        "keepsight eval jsonl.dir=DIR out=runs/run9 " + methods % "PAPER05"
    )


def test_the_tables_of_real_models_show_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section each, the full cache in every column, equal lines of two runs in one, and signs for needles."""
    score = {"model": "o/m", "tasks": "RULER", "question": "seen", "length": "1024", "score_low": "", "score_high": ""}
    score |= {"excess_low": "", "excess_high": "", "first_s": "1.00", "date": "d", "processor": "p", "samples": "4"}
    scores = [
        score | {"method": "full cache", "budget": "", "score": "0.5", "excess_nll": "0", "run": "a"},
        score | {"method": "LAQ", "budget": "64", "score": "0.25", "excess_nll": "1", "run": "a"},
        score | {"method": "full cache", "budget": "", "score": "0.5", "excess_nll": "0", "run": "b"},
        score | {"method": "LAQ", "budget": "128", "score": "0.4", "excess_nll": "0.5", "run": "b"},
    ]
    needle = {"model": "o/m", "question": "seen", "kind": "single", "method": "LAQ", "budget": "64", "samples": "1"}
    needle |= {"length": "2048", "date": "d", "processor": "p", "run": "a"}
    depths = {"0.00": "1", "0.50": "0", "1.00": "0.5"}
    needles = [needle | {"depth": depth, "score": found} for depth, found in depths.items()]
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
    assert all(TABLES["read"]("gpu")["card"])  # `make bench-gpu` writes it
    files = [path.stem for path in (ROOT / "results").glob("*.csv") if path.stem not in ("runs", "gpu", "gpu_day")]
    rows = pd.concat([TABLES["read"](file)[["processor", "run"]] for file in files])
    assert len(rows) > 300 and all(rows["processor"].fillna(""))
    assert {*rows["run"]} == {*TABLES["read"]("runs")["run"]} - {"untrained"}


def test_links_of_the_page_of_the_package_index_are_absolute() -> None:
    absolute = runpy.run_path(str(ROOT / "docs" / "absolute_links.py"))["absolute"]
    text = absolute((ROOT / "README.md").read_text("utf-8"), "https://github.com/o/n")
    links = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)', text)
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links)
    assert "https://github.com/o/n/raw/main/docs/images/" in text
    assert "https://github.com/o/n/blob/main/docs/quickstart.md" in text


def test_readme_counts_the_other_methods() -> None:
    """All but LookaheadKV, the full cache and the composition of parts."""
    (number,) = re.findall(r"comparing them with (\d+) other methods", text_of("README.md"))
    assert int(number) == len(METHODS.keys() - {"lookaheadkv", "full", "evict"})
