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
    rows = []
    for number in range(9):
        row = {"prompt": f"Say {number} in words." * (1 + number % 4)}
        if number % 3:
            row["response"] = "Given ü!"
        rows.append(row)
    write_lines(path, rows)
    return mixture_of(path, kinds=("key_values",))


def mixture_of(path: Path, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    sources = [{"kind": "local_jsonl", "path": str(path), "weight": 2.0}, *({"kind": kind} for kind in kinds)]
    return {"min_tokens": 100, "max_tokens": 400, "sources": sources}


def run(target: Target, values: dict[str, Any], out: Path, **changes: Any) -> dict[str, Any]:
    """Answer the prompts of a mixture; returns the manifest."""
    settings: dict[str, Any] = {"limit": 24, "seed": 3, "max_new_tokens": 40, "shard_size": 5} | changes
    backend = settings.pop("backend", None) or InThisProcess(target, 400)
    return generate_data(target, pin_sources(values, out), out, backend=backend, **settings)


def samples_of(out: Path) -> list[TrainingSample]:
    return list(finished_samples(out, finished_manifest(out)))


def write_own_question(target: Target, text: Prompt, index: int) -> str:
    """The question that the model writes about a text; empty if it writes none."""
    instructed = render_prompt(index, text.with_question(str(text.question_instruction)), target.tokenizer)
    (ids,) = answer(target, [instructed], Decoding(64))
    return question_in(str(target.tokenizer.decode(ids, skip_special_tokens=True)), len(ids) < 64)


def test_the_model_writes_questions_itself(target: Target, tmp_path: Path) -> None:
    """Each sample's prompt is the text and the first line of what the model answers to the instruction."""
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"prompt": "A word of text. " * count} for count in (7, 8, 9)])
    source = {"kind": "local_jsonl", "path": str(rows), "ask_itself": 2}
    values = {"min_tokens": 64, "max_tokens": 400, "sources": [source]}
    manifest = run(target, values, tmp_path / "data", limit=6)
    samples = {sample.index: sample for sample in samples_of(tmp_path / "data")}
    mixture = Mixture.from_config(values)
    with_question = 0
    for index in range(6):
        text = mixture.prompt(3, index, len)
        question = write_own_question(target, text, index)
        if not question:
            assert index not in samples
            continue
        prompt = render_prompt(index, text.with_question(question), target.tokenizer)
        assert samples[index].prompt_ids == prompt.ids
        assert [samples[index].answer_ids] == answer(target, [prompt], Decoding(40))
        with_question += 1
    assert manifest["samples"] == with_question
    assert 0 < with_question < 6


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
    question = target.tokenizer("What is this text about?")["input_ids"]
    lengths: list[int] = []

    def refuse_odd_prompts(asked: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        lengths.append(decoding.max_new_tokens)
        yield [(prompt, BadRow("filtered") if prompt.index % 2 else question) for prompt in asked]

    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"prompt": f"Some text {number}."} for number in range(3)])
    values = {"min_tokens": 64, "sources": [{"kind": "local_jsonl", "path": str(rows), "ask_itself": 1}]}
    manifest = run(target, values, tmp_path / "data", limit=4, backend=refuse_odd_prompts)
    assert lengths == [64, 40]
    assert manifest["samples"] == 2
    assert [skipped["reason"] for skipped in manifest["skipped"]] == ["filtered", "filtered"]
    write_lines(rows, [{"messages": [{"role": "user", "content": "Why?"}]}, {"prompt": "Text."}])
    with refused("ask_itself", "conflict"):
        run(target, values, tmp_path / "other", limit=4, backend=refuse_odd_prompts, skip=0)
    assert lengths == [64, 40]


def test_batches_are_of_similar_length_and_bounded_with_their_padding() -> None:
    lengths = [*random.Random(0).choices(range(1, 60), k=80), 300]
    all_batches = list(batches(prompts(*lengths), 200))
    batched_prompts = [prompt for batch in all_batches for prompt in batch]
    assert [len(prompt.ids) for prompt in batched_prompts] == sorted(lengths)
    assert sorted(prompt.index for prompt in batched_prompts) == list(range(81))
    *bounded, batch_of_the_longest = all_batches
    assert max(len(batch) * len(batch[-1].ids) for batch in bounded) <= 200
    assert len(batch_of_the_longest) == 1
    assert len(all_batches) < 20
    assert list(batches([], 20)) == []


def test_batched_answers_equal_single_ones_and_end_with_the_first_end_token(target: Target) -> None:
    asked = prompts(*range(8, 40, 2))
    answers = answer(target, asked, Decoding(24))
    assert answers == [answer(target, [prompt], Decoding(24))[0] for prompt in asked]
    ended = [ids for ids in answers if ids[-1] in target.end_tokens]
    assert len(ended) > 0
    assert len({len(ids) for ids in answers}) > 2
    for ids in answers:
        assert not set(ids[:-1]) & set(target.end_tokens)
        assert len(ids) == 24 or ids in ended


def test_sampled_answers_depend_on_the_seed_and_the_index_alone(target: Target) -> None:
    asked = prompts(*range(8, 40, 2))
    sampling = Decoding(8, temperature=1, seed=1)
    answers = answer(target, asked, sampling)
    greedy = answer(target, asked, Decoding(8))
    assert answers == [answer(target, [prompt], sampling)[0] for prompt in asked]
    assert answers != answer(target, asked, replace(sampling, seed=2))
    assert answers != greedy
    assert answer(target, asked, replace(sampling, top_p=1e-6)) == greedy


def test_samples_follow_the_models_distribution(target: Target) -> None:
    """Temperature 1.5 and a nucleus of 0.6: the first token of 2,000 samples, against probabilities in float64."""
    (prompt,) = prompts(12)
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt.ids])).logits[0, -1].double()
    sorted_shares, tokens = torch.softmax(logits / 1.5, -1).sort(descending=True)
    nucleus = tokens[: int((sorted_shares.cumsum(0) < 0.6).sum()) + 1]
    expected = torch.zeros_like(logits)
    expected[nucleus] = torch.softmax(logits[nucleus] / 1.5, -1)

    copies = [replace(prompt, index=index) for index in range(2000)]
    answers = answer(target, copies, Decoding(1, temperature=1.5, top_p=0.6))
    drawn = [ids[0] for ids in answers]
    assert set(drawn) <= set(nucleus.tolist())
    shares = torch.bincount(torch.tensor(drawn), minlength=len(logits)) / 2000
    deviation = (expected * (1 - expected) / 2000).sqrt()
    assert ((shares - expected).abs() <= 5 * deviation + 1e-9).all()


def test_given_responses_are_used_and_nothing_is_generated(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = ({"role": "user", "content": "Hello?"},)
    with_response = render_prompt(0, Prompt("mine", turns, response="So be it."), target.tokenizer)
    without_response = render_prompt(1, Prompt("mine", turns), target.tokenizer)

    def answers_to(asked: list[Rendered], longest: int) -> list[list[int] | BadRow]:
        backend = InThisProcess(target, 400)
        return [ids for answers in answer_prompts(backend, asked, Decoding(longest)) for _, ids in answers]

    response, generated = answers_to([with_response, without_response], 16)
    assert isinstance(response, list)
    assert target.tokenizer.decode(response) == "So be it.<|end|>"
    assert [generated] == answer(target, [without_response], Decoding(16))
    assert generated != response
    monkeypatch.setattr(type(target.model), "generate", None)
    assert answers_to([with_response], 3) == [response[:3]]


def test_prompts_go_through_the_chat_template_unless_they_are_raw(target: Target) -> None:
    turns = ({"role": "user", "content": "Hello?"},)
    chat = render_prompt(0, Prompt("mine", turns, answer_prefix="Well,"), target.tokenizer)
    assert target.tokenizer.decode(chat.ids) == "<|user|>Hello?<|end|><|assistant|>Well,"
    raw = render_prompt(0, Prompt("mine", turns, template=False), target.tokenizer)
    assert target.tokenizer.decode(raw.ids) == "Hello?"


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, mixture_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a run that nothing stops."""
    out = tmp_path_factory.mktemp("uninterrupted")
    run(load(folder), mixture_values, out)
    return out


def test_the_manifest_counts_the_samples_and_samples_hold_ids_and_text(uninterrupted: Path, folder: Path) -> None:
    samples = samples_of(uninterrupted)
    manifest = read_json(uninterrupted / "manifest.json")
    target = load(folder)
    assert [sample.index for sample in samples] == list(range(24))
    assert manifest["complete"]
    assert manifest["samples"] == 24
    assert manifest["prompt_tokens"] == sum(len(sample.prompt_ids) for sample in samples)
    assert manifest["answer_tokens"] == sum(len(sample.answer_ids) for sample in samples)
    assert manifest["sources"] == Counter(sample.source for sample in samples)
    assert manifest["sources"]["rows"] > 9
    assert len(manifest["sources"]) > 3
    settings = manifest["settings"]
    assert settings["model"] == str(folder)
    assert settings["identity"] == asdict(target.identity)
    assert settings["date"] == ""
    for sample in samples:
        assert target.tokenizer.decode(sample.prompt_ids) == sample.prompt
        assert target.tokenizer.decode(sample.answer_ids, skip_special_tokens=True) == sample.answer
    with_response = [sample for sample in samples if sample.answer == "Given ü!"]
    assert 6 < len(with_response) < 16
    assert all(sample.answer_ids[-1] == 2 for sample in with_response)


def test_raising_the_limit_keeps_the_samples(
    target: Target, mixture_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    run(target, mixture_values, data, limit=7)
    first_samples = samples_of(data)
    asked: list[int] = []

    def record_and_answer(backend: Backend, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
        asked.extend(prompt.index for prompt in prompts)
        return answer_prompts(backend, prompts, decoding)

    monkeypatch.setattr(generate, "answer_prompts", record_and_answer)
    run(target, mixture_values, data, limit=12)
    assert sorted(asked) == list(range(7, 12))
    assert samples_of(data)[:7] == first_samples
    run(target, mixture_values, tmp_path / "at once", limit=12)
    assert samples_of(data) == samples_of(tmp_path / "at once")
    with refused("temperature", "conflict"):
        run(target, mixture_values, data, limit=12, temperature=0.7)


def test_lengths_beyond_the_context_and_sizes_beyond_the_disk_are_refused(
    target: Target, mixture_values: dict[str, Any], tmp_path: Path
) -> None:
    with refused("max_new_tokens", "range"):
        run(target, mixture_values, tmp_path, max_new_tokens=3990)
    with refused("max_new_tokens", "range"):
        run(target, mixture_values, tmp_path, max_new_tokens=4090)
    with refused("limit", "memory"):
        run(target, mixture_values, tmp_path, limit=10**13)
    assert not list(tmp_path.glob("shard-*"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "role": ({"messages": [{"role": "tool", "content": "4"}]}, "needs a role"),
    "null": ({"prompt": None}, "expected a text in prompt"),
    "template": ({"messages": [{"role": "user", "content": "refused"}]}, "the chat template of .* refuses the turns"),
    "division": ({"prompt": "zero"}, "the chat template of .* refuses the turns user: .*division by zero"),
    "empty": ({"prompt": "none"}, "it has no tokens"),
    "long": ({"prompt": "x", "response": "fine"}, "more than the context of 4096; lower the mixture's max_tokens"),
}


def refusing_template(template: str, kind: str) -> str:
    """A chat template that raises for some prompts, leaves one empty, and for the kind `long` makes one too long."""
    return (
        "{% if 'refused' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
        + f"{{% if messages[0].content != 'none' %}}{template}{{% endif %}}"
        + "{% if messages[0].content == 'zero' %}{{ 1 / 0 }}{% endif %}"
        + ("{% if messages[0].content == 'x' %}{{ ' long' * 4100 }}{% endif %}" if kind == "long" else "")
    )


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_skipped_counted_and_named(
    kind: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_row, reason = BAD[kind]
    target = load(folder)
    target.tokenizer.chat_template = refusing_template(str(target.tokenizer.chat_template), kind)
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [*({"prompt": f"Say {number}."} for number in range(5)), bad_row])
    values = mixture_of(rows)
    data = tmp_path / "data"
    manifest = run(target, values, data, limit=6, max_new_tokens=4)
    (skipped,) = manifest["skipped"]
    assert manifest["samples"] == 5
    assert len(samples_of(data)) == 5
    assert re.search(reason, skipped["reason"])
    assert f"1 of 6 samples were skipped, such as {skipped['index']}: " in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(InThisProcess, "__call__", None)
        assert run(target, values, data, limit=6, max_new_tokens=4) == manifest
    strict = tmp_path / "strict"
    with pytest.raises(UserError, match=rf"{reason}.*; fix it, or raise skip=0"):
        run(target, values, strict, limit=6, max_new_tokens=4, skip=0)
    assert run(target, values, strict, limit=6, max_new_tokens=4, skip=1) == manifest


def test_data_of_which_every_row_is_refused_is_an_error(folder: Path, tmp_path: Path) -> None:
    target = load(folder)
    target.tokenizer.chat_template = "{{ raise_exception('no') }}"
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"prompt": f"Say {number}."} for number in range(3)])
    for _ in range(2):
        with refused("limit", "data"):
            run(target, mixture_of(rows), tmp_path / "data", limit=3, max_new_tokens=4)


def test_a_template_with_a_clock_tells_the_date_on_which_the_data_was_begun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(folder)
    target.tokenizer.chat_template = "{{ strftime_now('%d %b %Y, %-m') }}" + str(target.tokenizer.chat_template)
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"prompt": f"Say {number}."} for number in range(6)])
    values = mixture_of(rows)
    data = tmp_path / "data"
    first_day = run(target, values, data, limit=3, max_new_tokens=4)["settings"]["date"]
    later = SimpleNamespace(today=lambda: date(2031, 2, 3), fromisoformat=date.fromisoformat)
    monkeypatch.setattr(generate, "date", later)
    manifest = run(target, values, data, limit=6, max_new_tokens=4)
    assert manifest["settings"]["date"] == first_day
    assert first_day != "2031-02-03"
    formatted = datetime.fromisoformat(first_day).strftime("%d %b %Y, %-m")
    assert all(sample.prompt.startswith(formatted) for sample in samples_of(data))
    assert run(target, values, tmp_path / "new", limit=1, max_new_tokens=4)["settings"]["date"] == "2031-02-03"


def written_samples(out: Path) -> int:
    """Samples in the finished shards, of 5 each, and in the unfinished one."""
    try:
        unfinished = sum(path.read_bytes().count(b"\n") for path in out.glob("shard-*.partial"))
    except FileNotFoundError:  # a shard was finished meanwhile
        return written_samples(out)
    return unfinished + 5 * len(list(out.glob("shard-*.arrow")))


def kill_at(samples: int, folder: Path, mixture: Path, out: Path, delay: float) -> None:
    """Run the command, and kill it a moment after the data folder has so many samples."""
    arguments = [
        "data",
        f"model.id={folder}",
        "model.device=cpu",
        "model.dtype=float32",
        f"mixture={mixture}",
        f"out={out}",
        "limit=24",
        "seed=3",
        "max_new_tokens=40",
        "shard_size=5",
        "batch_tokens=400",
    ]
    process = multiprocessing.get_context("fork").Process(target=one_thread, args=(arguments,))
    process.start()
    deadline = time.monotonic() + 90
    while process.is_alive() and written_samples(out) < samples and time.monotonic() < deadline:
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
    folder: Path, mixture_values: dict[str, Any], uninterrupted: Path, tmp_path: Path
) -> None:
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(yaml.safe_dump(mixture_values))
    out = tmp_path / "data"
    rng = random.Random()
    for samples in (rng.randint(1, 8), rng.randint(9, 14)):
        kill_at(samples, folder, mixture, out, rng.uniform(0, 0.05))
        assert read_json(out / "manifest.json")["complete"] is False
    run(load(folder), mixture_values, out)
    assert samples_of(out) == samples_of(uninterrupted)
    names = {path.name for path in out.glob("[!.]*")}
    assert names == {path.name for path in uninterrupted.glob("[!.]*")}
    assert read_json(out / "manifest.json") == read_json(uninterrupted / "manifest.json")
