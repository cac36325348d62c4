"""MileBench from a folder, on a tiny target that reads images: its samples, and methods that evict image tokens."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.errors import Code
from keepsight.eval.inputs import sample_digest
from keepsight.eval.sweep import Variant, check_samples, run_samples
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.milebench import MileBench
from keepsight.eval.tasks.registry import Benchmarks, make_all
from keepsight.eval.tasks.samples import RenderedSample, render_apart
from keepsight.models.card import Provenance
from keepsight.models.draft_sources import named_draft
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import Target, load_target, processor_of
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.generate import FullCache, generate
from keepsight.runtime.methods import FastV, LookaheadKV, Oracle, SnapKV, SpecPC
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.sparse_read.selection import Quest
from tests.eval.pictured import row, save_pictured_target, without_videos, write_data_set
from tests.refused import refused
from tests.tiny import save_tiny_target

MANY = 100_000
CHOICES = ["red", "dark blue"]
SCENES = [
    row(7, "Before {image#1} and after {image#2}\nWhat has changed?", ["xx.png", "y.png"], "dark blue", CHOICES),
    row(8, "{table#1}{image#1} and {image#2}: which?", ["a.png", "y.png", "xx.png"], "red", CHOICES),
]
QUESTIONS = [row(0, "{image#1}What is seen here?", ["z.png"], "A green field.")]


@pytest.fixture(autouse=True)
def images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_videos(monkeypatch)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_pictured_target(tmp_path_factory.mktemp("vl"))), dtype="float32", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data_set(tmp_path, "SceneTransition", "multi-choice", SCENES)
    return write_data_set(tmp_path, "IEdit", "open-ended", QUESTIONS)


def made(target: Target, folder: Path, *names: str, **changes: Any) -> list[RenderedSample]:
    request = TaskRequest(target.tokenizer, context=changes.pop("context", 4096), **changes)
    request = replace(request, processor=partial(processor_of, target))
    return make_all(Benchmarks(milebench=MileBench(str(folder))), names or ["milebench"], request)


def test_samples_are_those_of_the_reference(target: Target, folder: Path) -> None:
    edit, first, second = made(target, folder)
    assert [each.key for each in (edit, first)] == [
        ("milebench_IEdit", 512, "0"),
        ("milebench_SceneTransition", 512, "7"),
    ]
    assert edit.prompt == "Look at the pictures, then answer.\n{image#1}What is seen here?"
    assert first.prompt == (
        "Look at the pictures, then answer.\nBefore {image#1} and after {image#2}\nWhat has changed?\n"
        "Choice list: \nA. red\nB. dark blue\nYour answer is: "
    )
    assert (edit.metric, first.metric, first.max_new_tokens) == ("milebench_rouge_l", "milebench_choice", 512)
    assert (first.references, first.classes) == (("dark blue",), tuple(CHOICES))
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert second.pictures.text == (
        f"<|user|>Look at the pictures, then answer.\n{place}{place} and {place}: which?\nChoice list: \nA. red\n"
        "B. dark blue\nYour answer is: <|end|><|assistant|>"
    )
    # Tables and images are counted apart: the files come in the order of the text.
    assert [path.name for path in second.pictures.paths] == ["a.png", "y.png", "xx.png"]
    inputs = second.pictures.inputs()
    # 16 x 16 pixels are 4 x 4 patches, 4 of them a token; 16 x 24 pixels are 6 tokens. An odd name has 24 rows.
    assert inputs["image_grid_thw"].tolist() == [[1, 6, 4], [1, 6, 4], [1, 4, 4]]
    image = target.model.config.image_token_id
    assert int((second.prompt_ids == image).sum()) == 6 + 6 + 4
    assert torch.equal(inputs["input_ids"][0], second.prompt_ids)
    assert torch.equal(inputs["mm_token_type_ids"][0] == 1, second.prompt_ids == image)
    assert [each.key for each in made(target, folder, "milebench_IEdit")] == [edit.key]
    assert [each.id for each in made(target, folder, samples=1)] == ["0", "7"]


def test_the_digest_depends_on_the_files(target: Target, folder: Path) -> None:
    (before,) = made(target, folder, "milebench_IEdit")
    digest = sample_digest(before)
    assert sample_digest(made(target, folder, "milebench_IEdit")[0]) == digest
    path = folder / "IEdit" / "images" / "z.png"
    path.write_bytes((folder / "SceneTransition" / "images" / "y.png").read_bytes())
    assert sample_digest(before) != digest


@pytest.fixture(scope="module")
def variants(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Variant]:
    adapter, draft = tmp_path_factory.mktemp("adapter"), save_pictured_target(tmp_path_factory.mktemp("draft"), seed=7)
    module = Lookahead(load_target(target.name, device="cpu").model, LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(adapter, Provenance(target.name), "# Card\n")
    source = named_draft(str(draft), target, dtype="float32", device="cpu")
    return [
        Variant("snapkv", SnapKV(24, window=8)),
        Variant("lookaheadkv", LookaheadKV.from_pretrained(adapter, 24)),
        Variant("specpc", SpecPC(32, 8, draft=source, kernel=4)),
        Variant("specpc", SpecPC(MANY, 8, draft=source, kernel=4)),
        Variant("oracle", Oracle(24, observer=DraftObserver(OwnAnswer(8)))),
        Variant("fastv", FastV(4, 1)),
    ]


@pytest.mark.parametrize("place", [0, 2])
def test_answers_equal_generate_with_the_pixels(
    target: Target, variants: list[Variant], folder: Path, place: int
) -> None:
    sample = replace(made(target, folder)[place], max_new_tokens=8)
    rows = run_samples(target, [sample], variants, MANY)[0]
    inputs = sample.pictures.inputs()
    for method, one in zip([FullCache(), *(each.method for each in variants)], rows, strict=True):
        answer = generate(target.model, method=method, max_new_tokens=8, **inputs)
        assert one.answer == target.tokenizer.decode(answer[0], skip_special_tokens=True), one.method
    tokens = len(sample.prompt_ids)
    assert [each.kept for each in rows[:-1]] == [tokens, 24, 24, 32, tokens, 24]
    assert 4 < rows[-1].kept < tokens, "the first layer's entries all stay, and text in the others"
    assert all(each.score in (0.0, 1.0) or each.task == "milebench_IEdit" for each in rows)
    blind = replace(sample, pictures=None)
    assert run_samples(target, [blind], variants[:1], MANY)[0][1].excess_nll != rows[1].excess_nll


def test_what_reads_no_images_is_refused(target: Target, folder: Path, tmp_path: Path) -> None:
    samples = made(target, folder)
    with refused("methods", "model"):
        check_samples(target, samples, [Variant("quest", Quest(64))])
    with refused("question", "missing"):
        render_apart(samples[0], target.tokenizer)
    text = load_target(str(save_tiny_target(tmp_path / "text")), device="cpu")
    with refused("model.id", "model"):
        made(text, folder)


def test_samples_beyond_the_context_are_counted(target: Target, folder: Path) -> None:
    notes: dict[str, str] = {}
    first, second = made(target, folder, "milebench_SceneTransition")
    context = len(second.prompt_ids) + 512
    assert len(first.prompt_ids) > len(second.prompt_ids)
    samples = made(target, folder, "milebench_SceneTransition", context=context, notes=notes)
    assert [each.id for each in samples] == ["8"]
    assert notes["milebench_SceneTransition"] == f"1 samples do not fit the context of {context} tokens"


def test_faults_of_the_folder_are_one_line(target: Target, folder: Path, tmp_path: Path) -> None:
    def cannot_be_read(field: str, code: Code, *names: str) -> None:
        with refused(field, code):
            made(target, folder, *names)

    path = folder / "IEdit" / "IEdit.json"
    whole = json.loads(path.read_text())

    def with_row(**changes: Any) -> None:
        data = [{**QUESTIONS[0], **changes}]
        path.write_text(json.dumps({"meta_data": whole["meta_data"], "data": data}))

    cannot_be_read("tasks", "unknown", "milebench_Nothing")
    with_row(task_instruction_id=3)
    cannot_be_read("task_instruction", "missing")
    for response in ("", None, {"a": 1}):
        with_row(response=response)
        cannot_be_read("response", "missing")
    with_row(task_instance={"context": "What?", "images_path": ["z.png"]})
    cannot_be_read("image", "data")
    with_row(task_instance={"context": "{image#1}", "images_path": ["gone.png"]})
    cannot_be_read("image", "missing")
    with_row(task_instance={"context": "{image#1}", "images_path": ["../../z.png"]})
    cannot_be_read("image", "file")
    (folder / "IEdit" / "images" / "z.png").write_bytes(b"no image")
    with_row()
    cannot_be_read("z.png", "file")
    path.write_text(json.dumps({"meta_data": {"question_type": "other", "task_instruction": []}, "data": []}))
    cannot_be_read("IEdit.json", "type")
    write_data_set(folder, "SceneTransition", "multi-choice", [{**SCENES[0], "response": "green"}])
    cannot_be_read("response", "unknown", "milebench_SceneTransition")
    with refused("milebench.dir", "missing"):
        made(target, tmp_path / "nothing")
    with refused("milebench.dir", "missing"):
        make_all(Benchmarks(), ["milebench"], TaskRequest(target.tokenizer, context=4096))
