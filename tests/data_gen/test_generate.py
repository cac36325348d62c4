"""The target's answers: batched by length, ending at an end token, and the same after any number of kills."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from keepsight.data_gen.backends import (
    AnsweredPrompts,
    Backend,
    InThisProcess,
    Rendered,
    answer,
    answers,
    batches,
    render_prompt,
)
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import Prompt
from keepsight.errors import UserError
from keepsight.files import read_json, read_jsonl, write_lines
from keepsight.models.targets import Target, load_target
from tests.tiny import save_tiny_target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def load(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    """With so many end tokens that answers differ in length."""
    loaded = load(folder)
    assert loaded.model.generation_config is not None
    loaded.model.generation_config.eos_token_id = [2, *range(100, 140)]
    return loaded


@pytest.fixture(scope="module")
def mixture_values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Made-up prompts, and rows of a file of which some have their answers."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": f"Say {number} in words." * (1 + number % 4)} for number in range(9)]
    write_lines(path, [{**row, "response": "Given ü!"} if number % 3 else row for number, row in enumerate(rows)])
    sources = [{"kind": "local_jsonl", "path": str(path), "weight": 2.0}, {"kind": "key_values"}]
    return {"min_tokens": 100, "max_tokens": 400, "sources": sources}


def rendered(*lengths: int) -> list[Rendered]:
    generator = torch.Generator().manual_seed(0)
    return [
        Rendered(index, "test", torch.randint(6, 512, (length,), generator=generator).tolist(), None)
        for index, length in enumerate(lengths)
    ]


def test_batches_are_of_similar_length_and_bounded_with_their_padding() -> None:
    lengths = random.Random(0).choices(range(1, 60), k=80)
    prompts = rendered(*lengths)
    made = list(batches(prompts, 200))
    assert [len(prompt.ids) for batch in made for prompt in batch] == sorted(lengths)
    assert sorted(prompt.index for batch in made for prompt in batch) == list(range(80))
    sizes = [len(batch) * len(batch[-1].ids) for batch in made]
    assert max(sizes) <= 200
    firsts = [len(batch[0].ids) for batch in made[1:]]
    assert all((len(batch) + 1) * first > 200 for batch, first in zip(made, firsts, strict=False))


def test_a_prompt_longer_than_the_bound_is_a_batch_of_its_own() -> None:
    assert [[len(prompt.ids) for prompt in batch] for batch in batches(rendered(50, 3, 60, 4), 20)] == [
        [3, 4],
        [50],
        [60],
    ]
    assert list(batches([], 20)) == []


def test_answers_end_with_the_first_end_token(target: Target) -> None:
    answers = answer(target, rendered(*range(8, 40, 2)), 24)
    ended = [ids for ids in answers if ids[-1] in target.end_tokens]
    assert len(ended) > 0 and len({len(ids) for ids in answers}) > 2
    for ids in answers:
        assert not set(ids[:-1]) & set(target.end_tokens)
        assert len(ids) == 24 or ids in ended


def test_batched_answers_equal_single_ones(target: Target) -> None:
    prompts = rendered(*range(8, 40, 2))
    assert answer(target, prompts, 24) == [answer(target, [prompt], 24)[0] for prompt in prompts]


def test_given_responses_are_used_and_nothing_is_generated(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Prompt("mine", ({"role": "user", "content": "Hello?"},), response="So be it.")
    asked = Prompt("mine", ({"role": "user", "content": "Hello?"},))
    prompts = [render_prompt(0, given, target.tokenizer), render_prompt(1, asked, target.tokenizer)]
    assert prompts[0].ids == prompts[1].ids

    def answered(asked: list[Rendered], longest: int) -> list[list[int]]:
        return [ids for ready in answers(InThisProcess(target, 400), asked, longest) for _, ids in ready]

    first, second = answered(prompts, 16)
    assert target.tokenizer.decode(first) == "So be it.<|end|>"
    assert second == answer(target, prompts[1:], 16)[0] != first
    monkeypatch.setattr(type(target.model), "generate", None)
    assert answered(prompts[:1], 16) == [first]
    assert answered(prompts[:1], 3) == [first[:3]]


def test_prompts_go_through_the_chat_template_unless_they_are_raw(target: Target) -> None:
    turns = ({"role": "user", "content": "Hello?"},)
    chat = render_prompt(0, Prompt("mine", turns, answer_prefix="Well,"), target.tokenizer)
    assert target.tokenizer.decode(chat.ids) == "<|user|>Hello?<|end|><|assistant|>Well,"
    raw = render_prompt(0, Prompt("mine", turns, template=False), target.tokenizer)
    assert target.tokenizer.decode(raw.ids) == "Hello?"


def make(target: Target, values: dict[str, Any], out: Path, **changes: Any) -> dict[str, Any]:
    settings = {"limit": 24, "seed": 3, "max_new_tokens": 40, "shard_size": 5} | changes
    return generate_data(
        target, Mixture.from_config(values), values, out, backend=InThisProcess(target, 400), **settings
    )


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("shard-*.jsonl")) for row in read_jsonl(path)]


@pytest.fixture(scope="module")
def whole(folder: Path, mixture_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run gives that nothing stops."""
    out = tmp_path_factory.mktemp("whole")
    make(load(folder), mixture_values, out)
    return out


def test_the_manifest_counts_what_the_shards_hold(whole: Path, folder: Path) -> None:
    rows, manifest = rows_of(whole), read_json(whole / "manifest.json")
    assert [row["index"] for row in rows] == list(range(24))
    assert manifest["complete"] and manifest["samples"] == 24
    assert manifest["prompt_tokens"] == sum(len(row["prompt_ids"]) for row in rows)
    assert manifest["answer_tokens"] == sum(len(row["answer_ids"]) for row in rows)
    assert manifest["sources"] == Counter(row["source"] for row in rows)
    assert manifest["sources"]["rows"] > 9 and len(manifest["sources"]) > 3
    assert manifest["settings"]["model"] == str(folder)
    target = load(folder)
    assert manifest["settings"]["template_digest"] == target.template_digest
    assert manifest["settings"]["version"] == target.version


def test_rows_hold_ids_and_text(whole: Path, target: Target) -> None:
    rows = rows_of(whole)
    for row in rows:
        assert target.tokenizer.decode(row["prompt_ids"]) == row["prompt"]
        assert target.tokenizer.decode(row["answer_ids"], skip_special_tokens=True) == row["answer"]
    given = [row for row in rows if row["answer"] == "Given ü!"]
    assert 6 < len(given) < 16 and all(row["answer_ids"][-1] == 2 for row in given)


def test_raising_the_limit_keeps_what_is_there(
    target: Target, mixture_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(target, mixture_values, tmp_path / "data", limit=7)
    first = rows_of(tmp_path / "data")
    asked: list[int] = []

    def noted(backend: Backend, prompts: list[Rendered], limit: int) -> Iterator[AnsweredPrompts]:
        asked.extend(prompt.index for prompt in prompts)
        return answers(backend, prompts, limit)

    monkeypatch.setattr("keepsight.data_gen.generate.answers", noted)
    make(target, mixture_values, tmp_path / "data", limit=12)
    assert sorted(asked) == list(range(7, 12))
    assert rows_of(tmp_path / "data")[:7] == first
    make(target, mixture_values, tmp_path / "once", limit=12)
    assert rows_of(tmp_path / "data") == rows_of(tmp_path / "once")
    with pytest.raises(UserError, match="seed=3, now it is 4"):
        make(target, mixture_values, tmp_path / "data", limit=12, seed=4)


def test_a_prompt_beyond_the_context_is_refused(target: Target, mixture_values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"prompt \d+ \(.+\) has \d+ tokens, with 3990 for the answer more than the context"
    ):
        make(target, mixture_values, tmp_path, max_new_tokens=3990)
    assert not list(tmp_path.glob("shard-*"))
    with pytest.raises(UserError, match=r"max_new_tokens=4090 and prompts of 100 tokens are together more than"):
        make(target, mixture_values, tmp_path, max_new_tokens=4090)
    assert not list(tmp_path.glob("shard-*"))


def written(out: Path) -> int:
    """Lines in the shards and in the one in work."""
    try:
        return sum(path.read_bytes().count(b"\n") for path in out.glob("shard-*"))
    except FileNotFoundError:  # a shard got its final name meanwhile
        return written(out)


def start(folder: Path, mixture: Path, out: Path) -> "subprocess.Popen[bytes]":
    arguments = [f"model.id={folder}", f"mixture={mixture}", f"out={out}"]
    arguments += [
        "model.device=cpu",
        "model.dtype=float32",
        "limit=24",
        "seed=3",
        "max_new_tokens=40",
        "shard_size=5",
        "batch_tokens=400",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "keepsight", "data", *arguments], env=environment)


def kill_when(process: "subprocess.Popen[bytes]", out: Path, lines: int, delay: float) -> None:
    """Kill the process a moment after the folder holds so many lines."""
    deadline = time.monotonic() + 90
    while process.poll() is None and written(out) < lines and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_killed_runs_go_on_without_a_lost_or_a_doubled_sample(
    folder: Path, mixture_values: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    mixture, out, rng = tmp_path / "mixture.yaml", tmp_path / "data", random.Random()
    mixture.write_text(yaml.safe_dump(mixture_values))
    for lines in (rng.randint(1, 8), rng.randint(9, 14)):
        kill_when(start(folder, mixture, out), out, lines, rng.uniform(0, 0.05))
        assert all(len(list(read_jsonl(path))) == 5 for path in out.glob("shard-*.jsonl"))
        assert read_json(out / "manifest.json")["complete"] is False
    make(load(folder), mixture_values, out)
    assert rows_of(out) == rows_of(whole)
    assert {path.name for path in out.glob("[!.]*")} == {path.name for path in whole.iterdir()}
    assert read_json(out / "manifest.json") == read_json(whole / "manifest.json")
