"""`keepsight bench train`, `eval` and `evict` on a tiny target: every line is there; bad values of these and others."""

import logging

import pytest

from keepsight.eval.bench import eviction
from tests.commands.commands import CommandLine

TINY = ("model.id=tiny", "model.device=cpu", "adapter=adapter")

pytestmark = pytest.mark.usefixtures("here")


def test_a_training_step_against_a_prefill(keepsight: CommandLine) -> None:
    lines = keepsight(
        "bench", "train", *TINY[:2], "train.replays=1", "tokens=60", "answer_tokens=5", "repeats=1"
    ).splitlines()
    assert lines[0] == "1 x 60 prompt + 5 answer tokens, 1 steps a pass of the model, 1 repeats"
    assert [line.split()[0] for line in lines[1:]] == ["prefill", "step", "a"]


def test_a_sweep_against_single_runs(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("tokens=320", "answer_tokens=3", "samples=1", "budgets=[40,64]", "methods=[snapkv]")
    warned = list[str]()
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(logging.Logger, name, lambda _, *given, **__: warned.append(str(given)))
    lines = keepsight("bench", "eval", *TINY, *small).splitlines()
    assert [each for each in warned if "eos_token_id" in each] == []
    assert lines[0].startswith("2 variants, 320 prompt tokens, 3 answer tokens, 1 samples, ")
    assert [line.split()[0] for line in lines[1:]] == ["sweep", "separate", "ratio"]


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_LEAST_SECONDS", 0.0)


@pytest.mark.usefixtures("briefly")
def test_evictions_against_the_prefill(keepsight: CommandLine) -> None:
    small = ("lengths=[90,120]", "methods=[snapkv,lookaheadkv]", "budgets=[48]", "repeats=1")
    _, names, *lines = keepsight("bench", "evict", *TINY, *small).splitlines()
    assert names.split()[:2] == ["tokens", "method"] and names.endswith(" KV MiB")
    rows = [(line[:7].strip(), line[9:].split("  ")[0]) for line in lines]
    methods = ("prefill", "snapkv 48", "lookaheadkv 48")
    assert rows == [(length, method) for length in ("90", "120") for method in methods]


def test_decoding_steps_against_the_full_cache(keepsight: CommandLine) -> None:
    given = ("tokens=90", "methods=[snapkv,adakv,{name: specache, group: 8}]", "budgets=[48]", "answer_tokens=2")
    title, names, *lines = keepsight("bench", "decode", *TINY, *given, "batch=2").splitlines()
    assert title.startswith("2 rows of 90 tokens, median of 2 steps, ")
    assert names.split("  ")[0] == "method"
    rows = {line[:20].strip(): [float(each) for each in line[20:].split()] for line in lines}
    assert list(rows) == ["full cache", "snapkv 48", "adakv 48", "specache group=8"]
    full, snapkv, adakv, _ = rows.values()
    assert full[2] == snapkv[3] == 1
    for milliseconds, speed, of_full, of_first, _ in rows.values():
        assert speed == pytest.approx(2000 / milliseconds, rel=0.2)
        assert of_full == pytest.approx(milliseconds / full[0], rel=0.2)
        assert of_first == pytest.approx(milliseconds / snapkv[0], rel=0.2)  # printed with few digits
    assert snapkv[4] == adakv[4] < full[4], "KV MiB held"


def test_operators_of_methods(keepsight: CommandLine) -> None:
    given = ("tokens=90", "methods=[{name: snapkv, pool: none},lookaheadkv,{name: kivi, group: 8}]", "budgets=[48]")
    title, names, *lines = keepsight("bench", "ops", *TINY, *given).splitlines()
    assert title.startswith("operators / syncs a layer; 3 layers, 90 prompt tokens; ")
    assert names.split() == ["method", "observe", "select", "gather", "decode"]
    assert [line[:20].strip() for line in lines] == [
        "plain model",
        "snapkv pool=none 48",
        "lookaheadkv 48",
        "kivi group=8",
    ]


HUGE = "1000000000"
HUGE_VALUES = [
    *(f"{name} tokens={HUGE}" for name in ("train", "eval", "decode", "ops", "specache")),
    *(f"{name} lengths=[64,{HUGE}]" for name in ("evict", "retrieve")),
    *(f"{name} batch={HUGE}" for name in ("decode", "specache", "retrieve")),
    f"decode tokens=64 answer_tokens={HUGE}",
    f"train train.batch_size={HUGE}",
]


@pytest.mark.parametrize("given", HUGE_VALUES)
def test_what_has_no_room_is_refused_before_it_is_allocated(keepsight: CommandLine, given: str) -> None:
    name, *keys = given.split()
    keys += [] if name in ("train", "retrieve", "specache") else ["methods=[snapkv]", "adapter=adapter"]
    keys += ["retrieval_head.features=none"] if name == "retrieve" else []
    message = keepsight.fails("bench", name, *TINY[:2], *keys)
    assert "fit the context of 4096" in message or "the free memory has room for " in message


def test_bad_values(keepsight: CommandLine) -> None:
    assert keepsight.fails("bench", "evict", *TINY, "lengths=[64,0]") == "lengths=[64, 0] must be greater than 0"
    assert keepsight.fails("bench", "evict", *TINY, "methods=[full]") == (
        "methods= and budgets= must name at least one method that evicts, and one budget"
    )
    message = keepsight.fails("bench", "specache", *TINY[:2], "tokens=60", "answer_tokens=2", "bits=[1]")
    assert message == "group 32 does not divide the head dimension 8; choose a group of 8"
    assert keepsight.fails("bench", "train", *TINY[:2], "lengths=[64]").startswith(
        "'lengths' is no key of this command"
    )
