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


def samples_of(target: Target, folder: Path, *tasks: str, context: int = 4096, **options: Any) -> list[RenderedSample]:
    request = TaskRequest(target.tokenizer, context=context, processor=partial(processor_of, target), **options)
    return make_all(Benchmarks(milebench=MileBench(str(folder))), tasks or ["milebench"], request)


def test_samples_are_those_of_the_reference(target: Target, folder: Path) -> None:
    edit, first, second = samples_of(target, folder)
    assert edit.key == ("milebench_IEdit", 512, "0")
    assert first.key == ("milebench_SceneTransition", 512, "7")
    assert edit.prompt == "Look at the pictures, then answer.\n{image#1}What is seen here?"
    assert first.prompt == (
        "Look at the pictures, then answer.\nBefore {image#1} and after {image#2}\nWhat has changed?\n"
        "Choice list: \nA. red\nB. dark blue\nYour answer is: "
    )
    assert edit.metric == "milebench_rouge_l"
    assert first.metric == "milebench_choice"
    assert first.max_new_tokens == 512
    assert first.references == ("dark blue",)
    assert first.classes == tuple(CHOICES)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert second.pictures.text == (
        f"<|user|>Look at the pictures, then answer.\n{image}{image} and {image}: which?\nChoice list: \nA. red\n"
        "B. dark blue\nYour answer is: <|end|><|assistant|>"
    )
    # Tables and images are counted apart: the files come in the order of the text.
    assert [path.name for path in second.pictures.paths] == ["a.png", "y.png", "xx.png"]
    inputs = second.pictures.inputs()
    # 16 x 16 pixels are 4 x 4 patches, 4 of them a token; 16 x 24 pixels are 6 tokens. An odd name has 24 rows.
    assert inputs["image_grid_thw"].tolist() == [[1, 6, 4], [1, 6, 4], [1, 4, 4]]
    is_image = second.prompt_ids == target.model.config.image_token_id
    assert is_image.sum() == 6 + 6 + 4
    assert torch.equal(inputs["input_ids"][0], second.prompt_ids)
    assert torch.equal(inputs["mm_token_type_ids"][0] == 1, is_image)
    (only_edit,) = samples_of(target, folder, "milebench_IEdit")
    assert only_edit.key == edit.key
    assert [sample.id for sample in samples_of(target, folder, samples=1)] == ["0", "7"]


def test_the_digest_depends_on_the_files(target: Target, folder: Path) -> None:
    (sample,) = samples_of(target, folder, "milebench_IEdit")
    digest = sample_digest(sample)
    (same_sample,) = samples_of(target, folder, "milebench_IEdit")
    assert sample_digest(same_sample) == digest
    other_image = (folder / "SceneTransition" / "images" / "y.png").read_bytes()
    (folder / "IEdit" / "images" / "z.png").write_bytes(other_image)
    assert sample_digest(sample) != digest


@pytest.fixture(scope="module")
def variants(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Variant]:
    adapter = tmp_path_factory.mktemp("adapter")
    draft = save_pictured_target(tmp_path_factory.mktemp("draft"), seed=7)
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


@pytest.mark.parametrize("index", [0, 2])
def test_answers_equal_generate_with_the_pixels(
    target: Target, variants: list[Variant], folder: Path, index: int
) -> None:
    sample = replace(samples_of(target, folder)[index], max_new_tokens=8)
    (rows,) = run_samples(target, [sample], variants, MANY)
    inputs = sample.pictures.inputs()
    methods = [FullCache(), *(variant.method for variant in variants)]
    for method, measured in zip(methods, rows, strict=True):
        answer = generate(target.model, method=method, max_new_tokens=8, **inputs)
        assert measured.answer == target.tokenizer.decode(answer[0], skip_special_tokens=True), measured.method
    *other_rows, fastv_row = rows
    tokens = len(sample.prompt_ids)
    assert [measured.kept for measured in other_rows] == [tokens, 24, 24, 32, tokens, 24]
    assert 4 < fastv_row.kept < tokens, "the first layer's entries all stay, and text in the others"
    if sample.task != "milebench_IEdit":
        assert {measured.score for measured in rows} <= {0.0, 1.0}
    without_images = replace(sample, pictures=None)
    ((_, blind_row),) = run_samples(target, [without_images], variants[:1], MANY)
    assert blind_row.excess_nll != rows[1].excess_nll


def test_what_reads_no_images_is_refused(target: Target, folder: Path, tmp_path: Path) -> None:
    samples = samples_of(target, folder)
    with refused("methods", "model"):
        check_samples(target, samples, [Variant("quest", Quest(64))])
    with refused("question", "missing"):
        render_apart(samples[0], target.tokenizer)
    text_target = load_target(str(save_tiny_target(tmp_path / "text")), device="cpu")
    with refused("model.id", "model"):
        samples_of(text_target, folder)


def test_samples_beyond_the_context_are_counted(target: Target, folder: Path) -> None:
    notes: dict[str, str] = {}
    first, second = samples_of(target, folder, "milebench_SceneTransition")
    context = len(second.prompt_ids) + 512
    assert len(first.prompt_ids) > len(second.prompt_ids)
    samples = samples_of(target, folder, "milebench_SceneTransition", context=context, notes=notes)
    assert [sample.id for sample in samples] == ["8"]
    assert notes["milebench_SceneTransition"] == f"1 samples do not fit the context of {context} tokens"


def test_faults_of_the_folder_are_one_line(target: Target, folder: Path, tmp_path: Path) -> None:
    def require_refused(field: str, code: Code, *tasks: str) -> None:
        with refused(field, code):
            samples_of(target, folder, *tasks)

    path = folder / "IEdit" / "IEdit.json"
    meta_data = json.loads(path.read_text())["meta_data"]

    def write_row(**changes: Any) -> None:
        path.write_text(json.dumps({"meta_data": meta_data, "data": [QUESTIONS[0] | changes]}))

    require_refused("tasks", "unknown", "milebench_Nothing")
    write_row(task_instruction_id=3)
    require_refused("task_instruction", "missing")
    for response in ("", None, {"a": 1}):
        write_row(response=response)
        require_refused("response", "missing")
    write_row(task_instance={"context": "What?", "images_path": ["z.png"]})
    require_refused("image", "data")
    write_row(task_instance={"context": "{image#1}", "images_path": ["gone.png"]})
    require_refused("image", "missing")
    write_row(task_instance={"context": "{image#1}", "images_path": ["../../z.png"]})
    require_refused("image", "file")
    (folder / "IEdit" / "images" / "z.png").write_bytes(b"no image")
    write_row()
    require_refused("z.png", "file")
    path.write_text(json.dumps({"meta_data": {"question_type": "other", "task_instruction": []}, "data": []}))
    require_refused("IEdit.json", "type")
    write_data_set(folder, "SceneTransition", "multi-choice", [SCENES[0] | {"response": "green"}])
    require_refused("response", "unknown", "milebench_SceneTransition")
    with refused("milebench.dir", "missing"):
        samples_of(target, tmp_path / "nothing")
    with refused("milebench.dir", "missing"):
        make_all(Benchmarks(), ["milebench"], TaskRequest(target.tokenizer, context=4096))
