"""The benchmarks on a tiny model: every line is there; bad values, and what has no room, end in one line."""

import logging
import re
from pathlib import Path

import pytest

from keepsight.errors import Code
from keepsight.eval.bench import decoding, eviction
from keepsight.models.card import Provenance
from keepsight.models.retrieval_head import RetrievalHead
from tests.commands.commands import DATA, CommandLine
from tests.runtime.retrieval.heads import tiny_head

TINY = ("model.id=tiny", "model.device=cpu")
METHODS = (*TINY, "adapter=adapter", "budgets=[48]")
RETRIEVE = ("bench", "retrieve", *TINY, "lengths=[200]", "budgets=[40,64]", "repeats=1", "answer_tokens=3")
SPECULATE = ("bench", "speculate", *TINY, "tokens=320", "answer_tokens=6", "samples=2", "draft_tokens=3")

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def heads(here: Path) -> None:
    """`draft`, a draft head, and `head`, a retrieval head made from it."""
    draft = tiny_head(512)
    draft.save(here / "draft", Provenance("tiny"), "# Card\n")
    RetrievalHead.from_draft(draft, "previous-step").save(here / "head", Provenance("tiny"), "# Card\n")


def cells(line: str) -> list[str]:
    """The cells of a line that are not blank."""
    return re.split(" {2,}", line.strip())


def test_a_training_step_against_a_prefill(keepsight: CommandLine) -> None:
    small = ("train.replays=2", "train.cuts=3", "tokens=60", "answer_tokens=5", "repeats=1")
    lines = keepsight("bench", "train", *TINY, *small).splitlines()
    at = "2 steps a pass of the model at 3 cuts"
    assert lines[0] == f"1 x 60 prompt + 5 answer tokens, {at}, 1 repeats"
    assert cells(lines[1]) == ["pass", "median s", "fastest s", "slowest s", "in prefills", "peak MiB"]
    prefill, step = map(cells, lines[2:])
    assert prefill[0] == "prefill" and prefill[4] == "1.000"
    assert step[0] == "step" and float(step[4]) > 0 and float(step[2]) <= float(step[1]) <= float(step[3])


def test_a_sweep_against_single_runs(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("tokens=320", "answer_tokens=3", "samples=1", "budgets=[40,64]", "methods=[snapkv]")
    warned = list[str]()
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(logging.Logger, name, lambda _, *given, **__: warned.append(str(given)))
    lines = keepsight("bench", "eval", *METHODS, *small).splitlines()
    assert [each for each in warned if "eos_token_id" in each] == []
    assert lines[0].startswith("2 variants, 320 prompt tokens, 3 answer tokens, 1 samples, ")
    assert [cells(line)[0] for line in lines[1:]] == ["method", "sweep", "separate runs"]
    assert cells(lines[2])[2] == "1.00"


def test_evictions_against_the_prefill(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of KV entries: a layer whole and what stays of all, where a method evicts during the prefill."""
    monkeypatch.setattr(eviction, "_LEAST_SECONDS", 0.0)
    methods = "methods=[snapkv,{name: snapkv, during_prefill: false, label: after},lookaheadkv,h2o]"
    _, names, *lines = keepsight("bench", "evict", *METHODS, "lengths=[90,2000]", methods, "repeats=1").splitlines()
    assert names.split()[:2] == ["tokens", "method"] and names.endswith(" KV MiB")
    rows = [tuple(cells(line)[:2]) for line in lines]
    variants = ("prefill", "sums for h2o", "snapkv 48", "after 48", "lookaheadkv 48", "h2o 48")
    assert rows == [(length, name) for length in ("90", "2000") for name in variants]
    layers, entry = 3, 2 * 8 * 2 * 4 / 2**20  # KV heads, dimensions, keys and values, bytes
    whole, stays = layers * 2000, layers * 48
    expected = [whole, 2000 + stays, whole + stays, 2000 + stays]
    peaks = {cells(line)[1]: cells(line)[-1] for line in lines[6:]}
    found = [peaks[name] for name in ("prefill", "snapkv 48", "after 48", "lookaheadkv 48")]
    assert found == [f"{entries * entry:.1f}" for entries in expected]


def test_decoding_steps_against_the_full_cache(keepsight: CommandLine) -> None:
    methods = "methods=[snapkv,adakv,{name: specache, group: 8},{name: quest, page: 8},{name: shadowkv, chunk: 4}]"
    given = ("tokens=90", methods, "answer_tokens=2", "attention=[eager]")
    title, names, *lines = keepsight("bench", "decode", *METHODS, *given, "batch=2").splitlines()
    assert title.startswith("2 rows of 90 tokens, median of 2 steps, ")
    times = ["ms a step", "tokens/s", "of full", "of first", "KV MiB"]
    assert cells(names) == ["method", *times, "selecting", "prefill s", "with prefill/s"]
    figures = {name: figures for name, *figures in map(cells, lines)}
    quest = figures.pop("quest page=8 48")
    for selecting in (quest, figures.pop("shadowkv chunk=4 48")):
        assert selecting[5].endswith("%") and 0 < int(selecting[5][:-1]) < 100, "these two alone select"
    eager = figures.pop("full cache, eager")
    assert len(eager) == len(quest) - 2, "neither selecting nor a ratio to the first method"
    rows = {name: [float(figure) for figure in numbers] for name, numbers in figures.items()}
    assert list(rows) == ["full cache", "snapkv 48", "adakv 48", "specache group=8"]
    assert all(0 < numbers[-1] < numbers[1] and numbers[-2] >= 0 for numbers in rows.values())
    full, snapkv, adakv, _ = rows.values()
    assert full[2] == snapkv[3] == 1
    for milliseconds, speed, of_full, of_first, *_ in rows.values():
        assert speed == pytest.approx(2000 / milliseconds, rel=0.2)
        assert of_full == pytest.approx(milliseconds / full[0], rel=0.2)
        assert of_first == pytest.approx(milliseconds / snapkv[0], rel=0.2)  # printed with few digits
    assert snapkv[4] == adakv[4] < full[4], "KV MiB held"


def test_attention_that_is_not_there_is_refused(keepsight: CommandLine) -> None:
    given = ("bench", "decode", *METHODS, "tokens=90", "methods=[snapkv]", "answer_tokens=1")
    keepsight.refuses("attention", "missing", *given, "attention=[no_such_attention]")
    keepsight.refuses("attention", "conflict", *given, "attention=[eager]", "batch=0")


def test_decoding_in_the_largest_batch_of_each_method(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MOST_ROWS", 6)
    monkeypatch.setattr(decoding, "free_tokens", lambda _: 700)
    given = ("tokens=90", "methods=[snapkv,{name: specache, group: 8}]", "answer_tokens=2", "batch=0")
    title, names, *lines = keepsight("bench", "decode", *METHODS, *given).splitlines()
    assert title.startswith("rows of 90 tokens, median of 2 steps, ") and names.split()[:2] == ["method", "rows"]
    rows = {name: [float(figure) for figure in figures] for name, *figures in map(cells, lines)}
    assert list(rows) == ["full cache", "snapkv 48", "specache group=8"]
    assert [each[0] for each in rows.values()] == [3, 6, 2], "SpeCache: 64 whole, 64 fetched"
    for count, milliseconds, speed, of_full, _ in rows.values():
        assert speed == pytest.approx(count * 1000 / milliseconds, rel=0.2)
        assert of_full == pytest.approx(speed / rows["full cache"][2], rel=0.2)


def test_operators_of_methods(keepsight: CommandLine) -> None:
    given = ("tokens=90", "methods=[{name: snapkv, pool: none},lookaheadkv,{name: kivi, group: 8}]")
    title, names, *lines = keepsight("bench", "ops", *METHODS, *given).splitlines()
    assert title.startswith("operators / syncs a layer; 3 layers, 90 prompt tokens; ")
    assert names.split() == ["method", "observe", "select", "gather", "decode"]
    counted = {name: len(counts) for name, *counts in map(cells, lines)}
    assert counted == {"plain model": 1, "snapkv pool=none 48": 4, "lookaheadkv 48": 4, "kivi group=8": 1}


@pytest.mark.usefixtures("heads")
def test_retrieval_with_a_head_and_without(keepsight: CommandLine) -> None:
    lines = keepsight(*RETRIEVE, "retrieval=head", "draft.head=draft", "tokens=300", "samples=2").splitlines()
    assert lines[0].startswith("retrieval head (features: previous-step): ")
    assert lines[1].startswith("draft head: ")
    assert lines[2].startswith("1 rows of random entries, budget 64, ")
    assert [line.split()[:2] for line in lines[4:7]] == [["200", name] for name in ("full", "quest", "specontext")]
    assert lines[8].startswith("2 texts of ") and ", 3 steps each, " in lines[8]
    assert [line.split()[0] for line in lines[9:]] == ["budget", "40", "64"]
    random = ("retrieval_head.features=none", "retrieval_head.groups=2", "batch=2")
    lines = keepsight(*RETRIEVE, *random).splitlines()
    assert lines[0].startswith("retrieval= is not set: this head has random weights")
    assert lines[2].startswith("2 rows of random entries, budget 64, ")
    assert lines[-1].startswith("bytes moved are not measured: ")


@pytest.mark.usefixtures("heads")
def test_speculative_decoding_of_needles_and_prompts_of_a_data_folder(keepsight: CommandLine) -> None:
    lines = keepsight(*SPECULATE, "draft.head=draft").splitlines()
    assert lines[0].startswith("2 prompts of ") and ", answers of at most 6, drafts of 3, " in lines[0]
    assert lines[-1] == "2 of 2 answers are the same, token for token"
    keepsight("data", *TINY, *DATA)
    lines = keepsight(*SPECULATE, "draft.head=draft", "data=data").splitlines()
    assert lines[-1] == "2 of 2 answers are the same, token for token"
    keepsight.refuses("samples", "range", *SPECULATE, "draft.head=draft", "data=data", "samples=50")


HUGE = "1000000000"
HUGE_VALUES = [
    *(f"{name} tokens={HUGE}" for name in ("train", "eval", "decode", "ops", "specache")),
    *(f"{name} lengths=[64,{HUGE}]" for name in ("evict", "retrieve")),
    *(f"{name} batch={HUGE}" for name in ("decode", "specache", "retrieve")),
    f"decode tokens=64 answer_tokens={HUGE}",
    f"train train.batch_size={HUGE}",
    f"retrieve retrieval=head tokens={HUGE}",
    f"speculate draft.head=draft tokens={HUGE}",
]


@pytest.mark.usefixtures("heads")
def test_what_has_no_room_is_refused_before_it_is_allocated(keepsight: CommandLine) -> None:
    for given in HUGE_VALUES:
        name, *keys = given.split()
        keys += ["methods=[snapkv]"] if name in ("eval", "decode", "ops", "evict") else []
        message = keepsight.fails("bench", name, *TINY, *keys)
        assert "fit the context of 4096" in message or "the free memory has room for " in message, given


WRONG: dict[str, tuple[str, Code]] = {
    "evict methods=[snapkv] lengths=[64,0]": ("lengths", "range"),
    "evict methods=[full]": ("methods", "range"),
    "train lengths=[64]": ("lengths", "unknown"),
    "serve methods=[snapkv] tokens=90 answer_tokens=1 requests=2 rows=2": ("answer_tokens", "range"),
    "ops methods=[snapkv] tokens=90 out=/dev/null": ("out", "file"),
    "retrieve lengths=[]": ("lengths", "range"),
    "retrieve retrieval=none/": ("artifact", "unknown"),
    "speculate": ("draft.head", "missing"),
    "speculate draft.head=tiny draft.layers=[0,1]": ("draft.layers", "conflict"),
    "speculate draft.head=tiny/..": ("model.safetensors", "missing"),
}


def test_bad_values(keepsight: CommandLine) -> None:
    for given, refusal in WRONG.items():
        name, *keys = given.split()
        keepsight.refuses(*refusal, "bench", name, *TINY, *keys)


IN_FOLDERS = {
    "train tokens=60 answer_tokens=5 repeats=1": ("train",),
    "eval adapter=adapter budgets=[48] methods=[snapkv] tokens=320 answer_tokens=3 samples=1": ("eval",),
    "evict adapter=adapter budgets=[48] methods=[snapkv] lengths=[90,120] repeats=1": ("evict",),
    "decode adapter=adapter budgets=[48] methods=[snapkv] tokens=90 answer_tokens=2": ("decode",),
    "decode adapter=adapter budgets=[48] methods=[snapkv] tokens=90 answer_tokens=2 batch=0": ("decode",),
    "ops adapter=adapter budgets=[48] methods=[snapkv] tokens=90": ("ops",),
    "serve adapter=adapter budgets=[48] methods=[snapkv] tokens=90 answer_tokens=6 requests=2 rows=2": ("serve",),
    "queries tokens=320 answer_tokens=3 samples=2": ("queries",),
    "queries tasks=[niah_single] tokens=320 answer_tokens=3 samples=2 by=[layer,head] text=So drawn={near:9}": (
        *("queries", "queries_by_layer_head"),
    ),
    "speculate draft.head=draft tokens=320 answer_tokens=6 samples=2": ("speculate",),
    "retrieve retrieval=head tokens=300 samples=2 lengths=[200] budgets=[40] repeats=1 answer_tokens=3": (
        *("steps", "traffic"),
    ),
}
"""Commands, and the tables that they write."""


@pytest.mark.usefixtures("heads")
@pytest.mark.parametrize("given", IN_FOLDERS)
def test_in_a_folder_nothing_is_measured_twice(
    given: str, keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times vary from run to run, so what is printed again to the last digit was read."""
    monkeypatch.setattr(eviction, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(decoding, "_MOST_ROWS", 2)
    name, *keys = given.split()
    command = ("bench", name, *TINY, *keys, "out=out")
    printed = keepsight(*command)
    tables = {path.stem: path.read_text() for path in (here / "out").glob("*.csv")}
    assert tuple(sorted(tables)) == IN_FOLDERS[given]
    rows = {path: path.read_text() for path in (here / "out").glob("*.jsonl")}
    assert keepsight(*command) == printed
    for path, text in rows.items():  # as a kill leaves them
        assert path.read_text() == text
        path.write_text(text[: len(text) // 2])
    keepsight(*command)
    for stem, text in tables.items():
        again = (here / "out" / f"{stem}.csv").read_text()
        assert again.partition("\n")[0] == text.partition("\n")[0]
        assert again.count("\n") == text.count("\n") > 1
    keepsight.refuses("model.dtype", "conflict", *command, "model.dtype=bfloat16")
