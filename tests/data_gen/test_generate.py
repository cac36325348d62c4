"""The model's answers: batched by length, ending at an end token, the same after kills; bad rows are skipped."""

import multiprocessing
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from keepsight.commands.cli import main
from keepsight.data_gen import generate
from keepsight.data_gen.backends import Answers, Backend, Decoding, InThisProcess, Rendered, answer, batches
from keepsight.data_gen.generate import answer_prompts, generate_data, question_in, render_prompt
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import Prompt
from keepsight.data_gen.store import TrainingSample, finished_manifest, finished_samples
from keepsight.data_gen.user_data import pin_sources
from keepsight.errors import BadRow, UserError
from keepsight.files import read_json, write_lines
from keepsight.models.targets import Target, load_target
from tests.data_gen.served import prompts
from tests.refused import refused


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
    return mixture_of(path, kinds=("key_values",))


def mixture_of(path: Path, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    sources = [{"kind": "local_jsonl", "path": str(path), "weight": 2.0}, *({"kind": kind} for kind in kinds)]
    return {"min_tokens": 100, "max_tokens": 400, "sources": sources}


def make(target: Target, values: dict[str, Any], out: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"limit": 24, "seed": 3, "max_new_tokens": 40, "shard_size": 5} | changes
    backend = settings.pop("backend", None) or InThisProcess(target, 400)
    return generate_data(target, pin_sources(values, out), out, backend=backend, **settings)


def samples_of(out: Path) -> list[TrainingSample]:
    return [*finished_samples(out, finished_manifest(out))]


def test_the_model_writes_questions_itself(target: Target, tmp_path: Path) -> None:
    """Each sample's prompt is the text and the first line of what the model answers to the instruction."""
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "A word of text. " * count} for count in (7, 8, 9)])
    source = {"kind": "local_jsonl", "path": str(tmp_path / "rows.jsonl"), "ask_itself": 2}
    values = {"min_tokens": 64, "max_tokens": 400, "sources": [source]}
    made = make(target, values, tmp_path / "data", limit=6)
    samples, count = samples_of(tmp_path / "data"), 0
    mixture = Mixture.from_config(values)
    for index in range(6):
        text = mixture.prompt(3, index, len)
        asked = render_prompt(index, text.with_question(str(text.question_instruction)), target.tokenizer)
        (written,) = answer(target, [asked], Decoding(64))
        question = question_in(str(target.tokenizer.decode(written, skip_special_tokens=True)), len(written) < 64)
        sample = next((each for each in samples if each.index == index), None)
        if not question:
            assert sample is None
            continue
        whole = render_prompt(index, text.with_question(question), target.tokenizer)
        assert sample and sample.prompt_ids == whole.ids
        assert [sample.answer_ids] == answer(target, [whole], Decoding(40))
        count += 1
    assert made["samples"] == count and 0 < count < 6


@pytest.mark.parametrize(
    ("text", "is_whole", "question"),
    [
        ("What is it?", True, "What is it?"),
        ("  What is it?\nIt is", False, "What is it?"),
        ("<think>\nLet me see.\n</think>\n\nWhy is it?", True, "Why is it?"),
        ("<think>\nLet me see", False, ""),
        ("What is the meaning of", False, ""),
        ("...", True, ""),
    ],
)
def test_a_question_is_a_whole_line_of_words(text: str, is_whole: bool, question: str) -> None:
    assert question_in(text, is_whole) == question


def test_samples_without_a_question_are_skipped(target: Target, tmp_path: Path) -> None:
    """The backend's reason is kept; a bad row ends the run before anything is asked, if none may be skipped."""

    def refusing(asked: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        numbers.append(decoding.max_new_tokens)
        yield [(prompt, BadRow("filtered") if prompt.index % 2 else written) for prompt in asked]

    numbers, written = list[int](), target.tokenizer("What is this text about?")["input_ids"]
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"prompt": f"Some text {number}."} for number in range(3)])
    values = {"min_tokens": 64, "sources": [{"kind": "local_jsonl", "path": str(rows), "ask_itself": 1}]}
    made = make(target, values, tmp_path / "data", limit=4, backend=refusing)
    assert numbers == [64, 40] and made["samples"] == 2
    assert [each["reason"] for each in made["skipped"]] == ["filtered", "filtered"]
    write_lines(rows, [{"messages": [{"role": "user", "content": "Why?"}]}, {"prompt": "Text."}])
    with refused("ask_itself", "conflict"):
        make(target, values, tmp_path / "other", limit=4, backend=refusing, skip=0)
    assert numbers == [64, 40]


def test_batches_are_of_similar_length_and_bounded_with_their_padding() -> None:
    lengths = [*random.Random(0).choices(range(1, 60), k=80), 300]
    made = list(batches(prompts(*lengths), 200))
    assert [len(prompt.ids) for batch in made for prompt in batch] == sorted(lengths)
    assert sorted(prompt.index for batch in made for prompt in batch) == list(range(81))
    assert max(len(batch) * len(batch[-1].ids) for batch in made[:-1]) <= 200 and len(made[-1]) == 1
    assert len(made) < 20 and list(batches([], 20)) == []


def test_batched_answers_equal_single_ones_and_end_with_the_first_end_token(target: Target) -> None:
    asked = prompts(*range(8, 40, 2))
    made = answer(target, asked, Decoding(24))
    assert made == [answer(target, [prompt], Decoding(24))[0] for prompt in asked]
    ended = [ids for ids in made if ids[-1] in target.end_tokens]
    assert len(ended) > 0 and len({len(ids) for ids in made}) > 2
    for ids in made:
        assert not set(ids[:-1]) & set(target.end_tokens)
        assert len(ids) == 24 or ids in ended


def test_sampled_answers_depend_on_the_seed_and_the_index_alone(target: Target) -> None:
    asked, sampled = prompts(*range(8, 40, 2)), Decoding(8, temperature=1, seed=1)
    made = answer(target, asked, sampled)
    assert made == [answer(target, [prompt], sampled)[0] for prompt in asked]
    assert made != answer(target, asked, replace(sampled, seed=2)) and made != answer(target, asked, Decoding(8))
    assert answer(target, asked, replace(sampled, top_p=1e-6)) == answer(target, asked, Decoding(8))


def test_samples_follow_the_models_distribution(target: Target) -> None:
    """Temperature 1.5 and a nucleus of 0.6: the first token of 2,000 samples, against probabilities in float64."""
    (prompt,) = prompts(12)
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt.ids])).logits[0, -1].double()
    shares, order = torch.softmax(logits / 1.5, -1).sort(descending=True)
    nucleus = order[: int((shares.cumsum(0) < 0.6).sum()) + 1]
    expected = torch.zeros_like(logits).index_put((nucleus,), torch.softmax(logits[nucleus] / 1.5, -1))
    same = [replace(prompt, index=index) for index in range(2000)]
    drawn = [ids[0] for ids in answer(target, same, Decoding(1, temperature=1.5, top_p=0.6))]
    assert {*drawn} <= {*nucleus.tolist()}
    found = torch.bincount(torch.tensor(drawn), minlength=len(logits)) / 2000
    spread = (expected * (1 - expected) / 2000).sqrt()
    assert ((found - expected).abs() <= 5 * spread + 1e-9).all()


def test_given_responses_are_used_and_nothing_is_generated(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = ({"role": "user", "content": "Hello?"},)
    asked = [
        render_prompt(0, Prompt("mine", turns, response="So be it."), target.tokenizer),
        render_prompt(1, Prompt("mine", turns), target.tokenizer),
    ]

    def answered(asked: list[Rendered], longest: int) -> list[list[int] | BadRow]:
        backend = InThisProcess(target, 400)
        return [ids for answers in answer_prompts(backend, asked, Decoding(longest)) for _, ids in answers]

    first, second = answered(asked, 16)
    assert isinstance(first, list) and target.tokenizer.decode(first) == "So be it.<|end|>"
    assert second == answer(target, asked[1:], Decoding(16))[0] != first
    monkeypatch.setattr(type(target.model), "generate", None)
    assert answered(asked[:1], 3) == [first[:3]]


def test_prompts_go_through_the_chat_template_unless_they_are_raw(target: Target) -> None:
    turns = ({"role": "user", "content": "Hello?"},)
    chat = render_prompt(0, Prompt("mine", turns, answer_prefix="Well,"), target.tokenizer)
    assert target.tokenizer.decode(chat.ids) == "<|user|>Hello?<|end|><|assistant|>Well,"
    raw = render_prompt(0, Prompt("mine", turns, template=False), target.tokenizer)
    assert target.tokenizer.decode(raw.ids) == "Hello?"


@pytest.fixture(scope="module")
def whole(folder: Path, mixture_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a run that nothing stops."""
    out = tmp_path_factory.mktemp("whole")
    make(load(folder), mixture_values, out)
    return out


def test_the_manifest_counts_the_samples_and_samples_hold_ids_and_text(whole: Path, folder: Path) -> None:
    rows, manifest, target = samples_of(whole), read_json(whole / "manifest.json"), load(folder)
    assert [row.index for row in rows] == list(range(24))
    assert manifest["complete"] and manifest["samples"] == 24
    assert manifest["prompt_tokens"] == sum(len(row.prompt_ids) for row in rows)
    assert manifest["answer_tokens"] == sum(len(row.answer_ids) for row in rows)
    assert manifest["sources"] == Counter(row.source for row in rows)
    assert manifest["sources"]["rows"] > 9 and len(manifest["sources"]) > 3
    made = manifest["settings"]
    assert [made[name] for name in ("model", "identity", "date")] == [str(folder), asdict(target.identity), ""]
    for row in rows:
        assert target.tokenizer.decode(row.prompt_ids) == row.prompt
        assert target.tokenizer.decode(row.answer_ids, skip_special_tokens=True) == row.answer
    given = [row for row in rows if row.answer == "Given ü!"]
    assert 6 < len(given) < 16 and all(row.answer_ids[-1] == 2 for row in given)


def test_raising_the_limit_keeps_the_samples(
    target: Target, mixture_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(target, mixture_values, tmp_path / "data", limit=7)
    first, asked = samples_of(tmp_path / "data"), list[int]()

    def noted(backend: Backend, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        asked.extend(prompt.index for prompt in prompts)
        return answer_prompts(backend, prompts, decoding)

    monkeypatch.setattr(generate, "answer_prompts", noted)
    make(target, mixture_values, tmp_path / "data", limit=12)
    assert sorted(asked) == list(range(7, 12)) and samples_of(tmp_path / "data")[:7] == first
    make(target, mixture_values, tmp_path / "once", limit=12)
    assert samples_of(tmp_path / "data") == samples_of(tmp_path / "once")
    with refused("temperature", "conflict"):
        make(target, mixture_values, tmp_path / "data", limit=12, temperature=0.7)


def test_lengths_beyond_the_context_and_sizes_beyond_the_disk_are_refused(
    target: Target, mixture_values: dict[str, Any], tmp_path: Path
) -> None:
    with refused("max_new_tokens", "range"):
        make(target, mixture_values, tmp_path, max_new_tokens=3990)
    with refused("max_new_tokens", "range"):
        make(target, mixture_values, tmp_path, max_new_tokens=4090)
    with refused("limit", "memory"):
        make(target, mixture_values, tmp_path, limit=10**13)
    assert not list(tmp_path.glob("shard-*"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "role": ({"messages": [{"role": "tool", "content": "4"}]}, "needs a role"),
    "null": ({"prompt": None}, "expected a text in prompt"),
    "template": ({"messages": [{"role": "user", "content": "refused"}]}, "the chat template of .* refuses the turns"),
    "division": ({"prompt": "zero"}, "the chat template of .* refuses the turns user: .*division by zero"),
    "empty": ({"prompt": "none"}, "it has no tokens"),
    "long": ({"prompt": "x", "response": "fine"}, "more than the context of 4096; lower the mixture's max_tokens"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_skipped_counted_and_named(
    kind: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, reason = BAD[kind]
    target, good = load(folder), [{"prompt": f"Say {number}."} for number in range(5)]
    target.tokenizer.chat_template = (
        "{% if 'refused' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
        + f"{{% if messages[0].content != 'none' %}}{target.tokenizer.chat_template}{{% endif %}}"
        + "{% if messages[0].content == 'zero' %}{{ 1 / 0 }}{% endif %}"
        + ("{% if messages[0].content == 'x' %}{{ ' long' * 4100 }}{% endif %}" if kind == "long" else "")
    )
    write_lines(tmp_path / "rows.jsonl", [*good, row])
    values, made = mixture_of(tmp_path / "rows.jsonl"), {"limit": 6, "max_new_tokens": 4}
    manifest = make(target, values, tmp_path / "data", **made)
    (skipped,) = manifest["skipped"]
    assert manifest["samples"] == 5 and len(samples_of(tmp_path / "data")) == 5
    assert re.search(reason, skipped["reason"])
    assert f"1 of 6 samples were skipped, such as {skipped['index']}: " in caplog.text
    monkeypatch.setattr(InThisProcess, "__call__", None)
    assert make(target, values, tmp_path / "data", **made) == manifest
    monkeypatch.undo()
    with pytest.raises(UserError, match=rf"{reason}.*; fix it, or raise skip=0"):
        make(target, values, tmp_path / "strict", **made, skip=0)
    assert make(target, values, tmp_path / "strict", **made, skip=1) == manifest


def test_data_of_which_every_row_is_refused_is_an_error(folder: Path, tmp_path: Path) -> None:
    target, rows = load(folder), tmp_path / "rows.jsonl"
    target.tokenizer.chat_template = "{{ raise_exception('no') }}"
    write_lines(rows, [{"prompt": f"Say {number}."} for number in range(3)])
    for _ in range(2):
        with refused("limit", "data"):
            make(target, mixture_of(rows), tmp_path / "data", limit=3, max_new_tokens=4)


def test_a_template_with_a_clock_tells_the_date_on_which_the_data_was_begun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(folder)
    target.tokenizer.chat_template = "{{ strftime_now('%d %b %Y, %-m') }}" + str(target.tokenizer.chat_template)
    write_lines(tmp_path / "rows.jsonl", [{"prompt": f"Say {number}."} for number in range(6)])
    values = mixture_of(tmp_path / "rows.jsonl")
    day = make(target, values, tmp_path / "data", limit=3, max_new_tokens=4)["settings"]["date"]
    later = SimpleNamespace(today=lambda: date(2031, 2, 3), fromisoformat=date.fromisoformat)
    monkeypatch.setattr(generate, "date", later)
    manifest = make(target, values, tmp_path / "data", limit=6, max_new_tokens=4)
    assert manifest["settings"]["date"] == day != "2031-02-03"
    begun = datetime.fromisoformat(day).strftime("%d %b %Y, %-m")
    assert all(row.prompt.startswith(begun) for row in samples_of(tmp_path / "data"))
    assert make(target, values, tmp_path / "new", limit=1, max_new_tokens=4)["settings"]["date"] == "2031-02-03"


def written(out: Path) -> int:
    """Samples in the finished shards, of 5 each, and in the unfinished one."""
    try:
        lines = sum(path.read_bytes().count(b"\n") for path in out.glob("shard-*.partial"))
    except FileNotFoundError:  # a shard was finished meanwhile
        return written(out)
    return lines + 5 * len([*out.glob("shard-*.arrow")])


def kill_at(samples: int, folder: Path, mixture: Path, out: Path, delay: float) -> None:
    """Run the command, and kill it a moment after the data folder has so many samples."""
    arguments = [f"model.id={folder}", f"mixture={mixture}", f"out={out}", "model.device=cpu", "model.dtype=float32"]
    arguments += ["limit=24", "seed=3", "max_new_tokens=40", "shard_size=5", "batch_tokens=400"]
    process = multiprocessing.get_context("fork").Process(target=one_thread, args=(["data", *arguments],))
    process.start()
    deadline = time.monotonic() + 90
    while process.is_alive() and written(out) < samples and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def one_thread(arguments: list[str]) -> None:
    """The command in a fork, which has none of its parent's threads."""
    torch.set_num_threads(1)
    sys.exit(main(arguments))


def test_killed_runs_resume_without_a_lost_or_a_doubled_sample(
    folder: Path, mixture_values: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    mixture, out, rng = tmp_path / "mixture.yaml", tmp_path / "data", random.Random()
    mixture.write_text(yaml.safe_dump(mixture_values))
    for samples in (rng.randint(1, 8), rng.randint(9, 14)):
        kill_at(samples, folder, mixture, out, rng.uniform(0, 0.05))
        assert read_json(out / "manifest.json")["complete"] is False
    make(load(folder), mixture_values, out)
    assert [*map(asdict, samples_of(out))] == [*map(asdict, samples_of(whole))]
    assert {path.name for path in out.glob("[!.]*")} == {path.name for path in whole.glob("[!.]*")}
    assert read_json(out / "manifest.json") == read_json(whole / "manifest.json")
