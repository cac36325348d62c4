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


def numbers_by_name(lines: list[str]) -> dict[str, list[float]]:
    """The numbers of each line by its first cell."""
    numbers: dict[str, list[float]] = {}
    for line in lines:
        name, *texts = cells(line)
        numbers[name] = [float(text) for text in texts]
    return numbers


def test_a_training_step_against_a_prefill(keepsight: CommandLine) -> None:
    small = ("train.replays=2", "train.cuts=3", "tokens=60", "answer_tokens=5", "repeats=1")
    lines = keepsight("bench", "train", *TINY, *small).splitlines()
    assert lines[0] == "1 x 60 prompt + 5 answer tokens, 2 steps a pass of the model at 3 cuts, 1 repeats"
    assert cells(lines[1]) == ["pass", "median s", "fastest s", "slowest s", "in prefills", "peak MiB"]
    prefill_line, step_line = lines[2:]
    name, *_, in_prefills, _ = cells(prefill_line)
    assert name == "prefill"
    assert in_prefills == "1.000"
    name, median, fastest, slowest, in_prefills, _ = cells(step_line)
    assert name == "step"
    assert float(in_prefills) > 0
    assert float(fastest) <= float(median) <= float(slowest)


def test_a_sweep_against_single_runs(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("tokens=320", "answer_tokens=3", "samples=1", "budgets=[40,64]", "methods=[snapkv]")
    warnings = list[str]()
    for method in ("warning", "warning_once"):
        monkeypatch.setattr(logging.Logger, method, lambda _, *message, **__: warnings.append(str(message)))
    lines = keepsight("bench", "eval", *METHODS, *small).splitlines()
    assert [warning for warning in warnings if "eos_token_id" in warning] == []
    assert lines[0].startswith("2 variants, 320 prompt tokens, 3 answer tokens, 1 samples, ")
    assert [cells(line)[0] for line in lines[1:]] == ["method", "sweep", "separate runs"]
    assert cells(lines[2])[2] == "1.00"


def test_evictions_against_the_prefill(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that evicts during the prefill holds at most one full layer, beside what it keeps of the others."""
    monkeypatch.setattr(eviction, "_LEAST_SECONDS", 0.0)
    methods = "methods=[snapkv,{name: snapkv, during_prefill: false, label: after},lookaheadkv,h2o]"
    printed = keepsight("bench", "evict", *METHODS, "lengths=[90,2000]", methods, "repeats=1")
    _, heading, *lines = printed.splitlines()
    assert heading.split()[:2] == ["tokens", "method"]
    assert heading.endswith(" KV MiB")
    rows = [cells(line) for line in lines]
    lengths = [row[0] for row in rows]
    assert lengths == ["90"] * 6 + ["2000"] * 6
    names = [row[1] for row in rows]
    assert names == ["prefill", "sums for h2o", "snapkv 48", "after 48", "lookaheadkv 48", "h2o 48"] * 2

    layers = 3
    full = layers * 2000
    kept = layers * 48
    expected_entries = {
        "prefill": full,
        "snapkv 48": 2000 + kept,
        "after 48": full + kept,
        "lookaheadkv 48": 2000 + kept,
    }
    entry_mib = 2 * 8 * 2 * 4 / 2**20  # KV heads, dimensions, keys and values, bytes
    peaks = {row[1]: row[-1] for row in rows if row[0] == "2000"}
    for name, entries in expected_entries.items():
        assert peaks[name] == f"{entries * entry_mib:.1f}"


def test_decoding_steps_against_the_full_cache(keepsight: CommandLine) -> None:
    methods = "methods=[snapkv,adakv,{name: specache, group: 8},{name: quest, page: 8},{name: shadowkv, chunk: 4}]"
    keys = ("tokens=90", methods, "answer_tokens=2", "attention=[eager]", "batch=2")
    title, heading, *lines = keepsight("bench", "decode", *METHODS, *keys).splitlines()
    assert title.startswith("2 rows of 90 tokens, median of 2 steps, ")
    columns = ["method", "ms a step", "tokens/s", "of full", "of first", "KV MiB"]
    columns += ["selecting", "prefill s", "with prefill/s"]
    assert cells(heading) == columns
    lines_by_name = {cells(line)[0]: line for line in lines}
    row_of_quest = cells(lines_by_name.pop("quest page=8 48"))
    row_of_shadowkv = cells(lines_by_name.pop("shadowkv chunk=4 48"))
    for row in (row_of_quest, row_of_shadowkv):
        selecting = row[columns.index("selecting")]
        assert selecting.endswith("%"), "these two alone select"
        assert 0 < int(selecting.removesuffix("%")) < 100
    row_of_eager = cells(lines_by_name.pop("full cache, eager"))
    assert len(row_of_eager) == len(columns) - 2, "neither selecting nor a ratio to the first method"

    rows = numbers_by_name([*lines_by_name.values()])
    assert list(rows) == ["full cache", "snapkv 48", "adakv 48", "specache group=8"]
    full_ms, _, full_of_full, _, full_mib, *_ = rows["full cache"]
    snapkv_ms, _, _, snapkv_of_first, snapkv_mib, *_ = rows["snapkv 48"]
    adakv_mib = rows["adakv 48"][4]
    assert full_of_full == snapkv_of_first == 1
    assert snapkv_mib == adakv_mib < full_mib
    for milliseconds, speed, of_full, of_first, _, prefill_seconds, speed_with_prefill in rows.values():
        assert speed == pytest.approx(2000 / milliseconds, rel=0.2)  # printed with few digits
        assert of_full == pytest.approx(milliseconds / full_ms, rel=0.2)
        assert of_first == pytest.approx(milliseconds / snapkv_ms, rel=0.2)
        assert prefill_seconds >= 0
        assert 0 < speed_with_prefill < speed


def test_attention_that_is_not_there_is_refused(keepsight: CommandLine) -> None:
    decode = ("bench", "decode", *METHODS, "tokens=90", "methods=[snapkv]", "answer_tokens=1")
    keepsight.refuses("attention", "missing", *decode, "attention=[no_such_attention]")
    keepsight.refuses("attention", "conflict", *decode, "attention=[eager]", "batch=0")


def test_decoding_in_the_largest_batch_of_each_method(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MOST_ROWS", 6)
    monkeypatch.setattr(decoding, "free_tokens", lambda _: 700)
    keys = ("tokens=90", "methods=[snapkv,{name: specache, group: 8}]", "answer_tokens=2", "batch=0")
    title, heading, *lines = keepsight("bench", "decode", *METHODS, *keys).splitlines()
    assert title.startswith("rows of 90 tokens, median of 2 steps, ")
    assert heading.split()[:2] == ["method", "rows"]
    rows = numbers_by_name(lines)
    batches = {name: numbers[0] for name, numbers in rows.items()}
    assert list(batches) == ["full cache", "snapkv 48", "specache group=8"]
    assert list(batches.values()) == [3, 6, 2], "SpeCache holds 64 entries in full precision, and fetches 64"
    _, _, full_speed, *_ = rows["full cache"]
    for batch, milliseconds, speed, of_full, _ in rows.values():
        assert speed == pytest.approx(batch * 1000 / milliseconds, rel=0.2)
        assert of_full == pytest.approx(speed / full_speed, rel=0.2)


def test_operators_of_methods(keepsight: CommandLine) -> None:
    methods = "methods=[{name: snapkv, pool: none},lookaheadkv,{name: kivi, group: 8}]"
    title, heading, *lines = keepsight("bench", "ops", *METHODS, "tokens=90", methods).splitlines()
    assert title.startswith("operators / syncs a layer; 3 layers, 90 prompt tokens; ")
    assert heading.split() == ["method", "observe", "select", "gather", "decode"]
    filled_columns = {name: len(counts) for name, *counts in map(cells, lines)}
    assert filled_columns == {"plain model": 1, "snapkv pool=none 48": 4, "lookaheadkv 48": 4, "kivi group=8": 1}


@pytest.mark.usefixtures("heads")
def test_retrieval_with_a_head_and_without(keepsight: CommandLine) -> None:
    lines = keepsight(*RETRIEVE, "retrieval=head", "draft.head=draft", "tokens=300", "samples=2").splitlines()
    assert lines[0].startswith("retrieval head (features: previous-step): ")
    assert lines[1].startswith("draft head: ")
    assert lines[2].startswith("1 rows of random entries, budget 64, ")
    rows_of_steps = [line.split()[:2] for line in lines[4:7]]
    assert rows_of_steps == [["200", "full"], ["200", "quest"], ["200", "specontext"]]
    assert lines[8].startswith("2 texts of ")
    assert ", 3 steps each, " in lines[8]
    first_cells = [line.split()[0] for line in lines[9:]]
    assert first_cells == ["budget", "40", "64"]

    random_head = ("retrieval_head.features=none", "retrieval_head.groups=2")
    lines = keepsight(*RETRIEVE, *random_head, "batch=2").splitlines()
    assert lines[0].startswith("retrieval= is not set: this head has random weights")
    assert lines[2].startswith("2 rows of random entries, budget 64, ")
    assert lines[-1].startswith("bytes moved are not measured: ")


@pytest.mark.usefixtures("heads")
def test_speculative_decoding_of_needles_and_prompts_of_a_data_folder(keepsight: CommandLine) -> None:
    speculate = (*SPECULATE, "draft.head=draft")
    lines = keepsight(*speculate).splitlines()
    assert lines[0].startswith("2 prompts of ")
    assert ", answers of at most 6, drafts of 3, " in lines[0]
    assert lines[-1] == "2 of 2 answers are the same, token for token"

    keepsight("data", *TINY, *DATA)
    lines = keepsight(*speculate, "data=data").splitlines()
    assert lines[-1] == "2 of 2 answers are the same, token for token"
    keepsight.refuses("samples", "range", *speculate, "data=data", "samples=50")


HUGE = "1000000000"
HUGE_COMMANDS = [
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
    for command in HUGE_COMMANDS:
        name, *keys = command.split()
        if name in ("eval", "decode", "ops", "evict"):
            keys.append("methods=[snapkv]")
        message = keepsight.fails("bench", name, *TINY, *keys)
        assert "fit the context of 4096" in message or "the free memory has room for " in message, command


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
    for command, refusal in WRONG.items():
        name, *keys = command.split()
        keepsight.refuses(*refusal, "bench", name, *TINY, *keys)


TABLES_OF = {
    "train tokens=60 answer_tokens=5 repeats=1": ("train",),
    "eval adapter=adapter budgets=[48] methods=[snapkv] tokens=320 answer_tokens=3 samples=1": ("eval",),
    "evict adapter=adapter budgets=[48] methods=[snapkv] lengths=[90,120] repeats=1": ("evict",),
    "decode adapter=adapter budgets=[48] methods=[snapkv] tokens=90 answer_tokens=2": ("decode",),
    "decode adapter=adapter budgets=[48] methods=[snapkv] tokens=90 answer_tokens=2 batch=0": ("decode",),
    "ops adapter=adapter budgets=[48] methods=[snapkv] tokens=90": ("ops",),
    "serve adapter=adapter budgets=[48] methods=[snapkv] tokens=90 answer_tokens=6 requests=2 rows=2": ("serve",),
    "queries tokens=320 answer_tokens=3 samples=2": ("queries",),
    "queries tasks=[niah_single] tokens=320 answer_tokens=3 samples=2 by=[layer,head] text=So drawn={near:9}": (
        "queries",
        "queries_by_layer_head",
    ),
    "speculate draft.head=draft tokens=320 answer_tokens=6 samples=2": ("speculate",),
    "retrieve retrieval=head tokens=300 samples=2 lengths=[200] budgets=[40] repeats=1 answer_tokens=3": (
        "steps",
        "traffic",
    ),
}
"""The tables that commands write."""


@pytest.mark.usefixtures("heads")
@pytest.mark.parametrize("command", TABLES_OF)
def test_in_a_folder_nothing_is_measured_twice(
    command: str, keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times vary from run to run, so what is printed again to the last digit was read."""
    monkeypatch.setattr(eviction, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(decoding, "_MOST_ROWS", 2)
    name, *keys = command.split()
    bench = ("bench", name, *TINY, *keys, "out=out")
    printed = keepsight(*bench)
    tables = {path: path.read_text() for path in (here / "out").glob("*.csv")}
    assert tuple(sorted(path.stem for path in tables)) == TABLES_OF[command]
    rows = {path: path.read_text() for path in (here / "out").glob("*.jsonl")}
    assert keepsight(*bench) == printed
    for path, text in rows.items():
        assert path.read_text() == text
        path.write_text(text[: len(text) // 2])  # as a kill leaves it
    keepsight(*bench)
    for path, table in tables.items():
        resumed_table = path.read_text()
        assert resumed_table.splitlines()[0] == table.splitlines()[0]
        assert resumed_table.count("\n") == table.count("\n") > 1
    keepsight.refuses("model.dtype", "conflict", *bench, "model.dtype=bfloat16")
