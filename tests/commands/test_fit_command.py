"""`keepsight fit`: every stage, stopped in each of them and between two, and what the card says in the end."""

import itertools
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from keepsight.commands import data, finetune, from_recipe, train
from keepsight.commands import eval as evaluation
from keepsight.commands.fit import shortcomings
from keepsight.data_gen.store import ShardWriter, finished_manifest, finished_samples
from keepsight.eval import record
from keepsight.files import file_digest, read_json, read_jsonl, write_json, write_lines
from keepsight.models.distributed import shards_models
from keepsight.models.hub import plan_upload
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.targets import Target
from keepsight.train.dataset import digests_from_text, prompt_digests
from keepsight.train.eviction import EvictionObjective
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.commands.commands import CommandLine, last_of_each_key
from tests.launch import launch
from tests.tiny import save_tiny_target

pytestmark = pytest.mark.usefixtures("here")
TRAINING = [
    *("model.id=tiny", "model.device=cpu", "model.dtype=float32", "lookahead.tokens=4"),
    *("train.steps=3", "train.save_every=1", "train.held_out=2", "train.replays=1", "train.report_to=[]"),
    "train.unseen=0.5",
]
EVICTING = [
    *("finetune.train.steps=3", "finetune.train.save_every=1", "finetune.train.held_out=2", "finetune.train.replays=1"),
    *(
        "finetune.train.samples_per_step=2",
        "finetune.train.report_to=[]",
        "finetune.budgets=[40]",
        "finetune.uniform_share=0.5",
        "finetune.unseen=0.5",
    ),
]
FIT = [
    *("fit", *TRAINING, *EVICTING, "mixture=mixture.yaml", "limit=8", "max_new_tokens=4", "draft.layers=[0,2]"),
    *("tasks=niah_single", "lengths=320", "tests=2", "methods=full,lookaheadkv,speckv", "budgets=40"),
]
STAGES: dict[str, tuple[Any, str, int, str]] = {
    "answers": (ShardWriter, "append", 1, "fitted/data/shard-00000.jsonl.partial"),
    "importance": (ImportanceObjective, "forward", 2, "fitted/importance/training/checkpoint-1/trainer_state.json"),
    "eviction": (EvictionObjective, "forward", 3, "fitted/eviction/training/checkpoint-1/trainer_state.json"),
    "evaluation": (record, "append_lines", 1, "fitted/eval/results.jsonl"),
}
"""What is interrupted in each: the owner and name of a function, at which call, and what is there by then."""


def stage_settings(folder: Path) -> dict[str, Any]:
    """What a module's folder says of the stages that made it."""
    return yaml.safe_load((folder / "stages.yaml").read_text())


def interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """A call of a function, counted from 1, is interrupted once it has done its work."""
    function, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == call:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)


def test_stopped_in_every_stage_it_ends_as_if_it_had_not_been(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, (owner, name, call, left) in zip((data, train, finetune, evaluation), STAGES.values(), strict=True):
        if module is finetune:  # between two stages
            with monkeypatch.context() as patch:
                patch.setattr(module, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                assert "run the same command again to resume" in keepsight.fails(*FIT, "out=fitted")
        assert not (here / left).exists()
        with monkeypatch.context() as patch:
            interrupt(patch, owner, name, call)
            assert "run the same command again to resume" in keepsight.fails(*FIT, "out=fitted")
        assert (here / left).exists()
    kept = [*read_jsonl(here / "fitted/eval/results.jsonl")]
    printed = keepsight(*FIT, "out=fitted")
    assert [line for line in printed.splitlines() if line.startswith("===")] == [
        *("=== answers", "=== importance", "=== eviction", "=== evaluation", "=== card")
    ]
    assert printed.count("next: ") == 1 and printed.splitlines()[-1].startswith("next: ")  # no stage says its own
    rows = [*read_jsonl(here / "fitted/eval/results.jsonl")]
    assert len(rows) == 2 * 3 == 2 * len(kept) and all(row in rows for row in kept)
    assert {row["method"] for row in rows} == {"full", "lookaheadkv", "speckv"}
    fitted, trained = here / "fitted" / "adapter", here / "trained"
    keepsight("train", *TRAINING, "data=fitted/data", "out=first")
    given = ("model.id=tiny", "model.device=cpu", "model.dtype=float32", "data=fitted/data", "adapter=first")
    keepsight("finetune", *given, *EVICTING, "out=trained")
    for name in ("adapter_model.safetensors", "lookahead_tokens.safetensors"):
        assert file_digest(fitted / name) == file_digest(trained / name)
    artifact = LookaheadAdapter.load(fitted)
    assert artifact.settings == LookaheadAdapter.load(here / "first").settings.selecting("shared")
    assert artifact.head_weights is not None
    samples = finished_samples(here / "fitted/data", finished_manifest(here / "fitted/data"))
    on = digests_from_text(artifact.provenance.trained_on)
    assert on is not None and len(on) >= 6 and on <= prompt_digests(samples)
    card = (fitted / "README.md").read_text()
    settings = stage_settings(fitted)
    assert [*settings] == ["answers", "importance", "eviction", "evaluation"]
    assert settings["answers"]["limit"] == 8 and settings["importance"]["train"]["steps"] == 3
    assert settings["eviction"]["finetune"]["uniform_share"] == 0.5 and settings["eviction"]["out"] == "DIR"
    assert settings["evaluation"]["tasks"] == ["niah_single"] and settings["evaluation"]["samples"] == 2
    assert settings["answers"]["mixture"] == "mixture.yaml" and "fitted" not in (fitted / "stages.yaml").read_text()
    assert yaml.safe_load((here / "fitted/eviction/config.yaml").read_text())["adapter"] == "fitted/importance"
    assert yaml.safe_load((here / "fitted/config.yaml").read_text())["out"] == "fitted"
    assert card.index("## Settings") < card.index("## Evaluation") < card.index("## Limitations")
    assert "fitted" not in card
    assert "importance (what answers attend to): " in card and "| excess NLL (nats), 40 entries in every " in card
    assert card.count("share of samples with the question unseen 0.5; ") == 2
    assert len(card.splitlines()) < 90
    assert card.count("## Evaluation") == 1 and "| LookaheadKV |" in card.replace("lookaheadkv", "LookaheadKV")
    upload = plan_upload(fitted, "ada/tiny")
    pictures = {"evaluation.png", "training.png", "finetuning.png"}
    assert {*LookaheadAdapter.files, "README.md", "stages.yaml"} | pictures == {*upload.files}
    keepsight("fit", *TRAINING[:3], "out=fitted", "stages=[card]")
    assert (fitted / "README.md").read_text() == card and stage_settings(fitted) == settings  # of all stages still
    shutil.rmtree(here / "fitted/eviction")
    keepsight(*FIT, "out=fitted", "selection=uniform", "stages=[eviction,evaluation]", "finetune.uniform_share=0")
    assert (here / "fitted/eval-1/results.jsonl").is_file() and (here / "fitted/eval/results.jsonl").is_file()
    floors = [LookaheadAdapter.load(here / "fitted" / name).settings.floor for name in ("importance", "eviction")]
    assert floors == [0.2, None]
    keepsight(*FIT, "out=fitted", "stages=[card]", "finetune.uniform_share=0")
    assert stage_settings(fitted)["eviction"]["finetune"]["uniform_share"] == 0
    assert LookaheadAdapter.load(fitted).settings.floor is None
    shutil.rmtree(here / "fitted/eviction")
    keepsight(*FIT, "out=fitted", "stages=[eviction,card]", "lookahead.floor=0.5")
    assert LookaheadAdapter.load(fitted).settings.floor == 0.5
    assert [*stage_settings(fitted)] == ["answers", "importance", "eviction"]


def test_the_eviction_stage_goes_on_with_new_prompts(keepsight: CommandLine, here: Path) -> None:
    """With those and the settings that two commands would use; the card lists both parts."""
    (here / "other.yaml").write_text("min_tokens: 100\nmax_tokens: 200\nsources:\n  - {kind: dialogue}\n")
    fresh = ("fresh.limit=6", "fresh.steps=2", "fresh.max_new_tokens=6", "fresh.mixture=other.yaml")
    printed = keepsight(*FIT, *fresh, "out=fitted")
    assert [line.removeprefix("=== ") for line in printed.splitlines() if line.startswith("===")] == [
        *("answers", "importance", "eviction", "fresh_answers", "fresh_eviction", "evaluation", "card")
    ]
    tiny = ("model.id=tiny", "model.device=cpu", "model.dtype=float32")
    keepsight("data", *tiny, "mixture=other.yaml", "seed=1", "limit=6", "max_new_tokens=6", "out=new")
    more = last_of_each_key([*EVICTING, "finetune.train.steps=2"])
    keepsight("finetune", *tiny, *more, "data=new", "adapter=fitted/eviction", "out=trained")
    fitted, trained = (LookaheadAdapter.load(here / name) for name in ("fitted/adapter", "trained"))
    assert_close(fitted.tokens, trained.tokens)
    assert fitted.head_weights == trained.head_weights
    assert fitted.provenance.training["fine-tuning, steps"] == 3
    assert fitted.provenance.training["fine-tuning 2, steps"] == 2
    first, last = (
        digests_from_text(LookaheadAdapter.load(here / "fitted" / name).provenance.trained_on)
        for name in ("eviction", "fresh_eviction")
    )
    assert first and last and first < last
    card = (here / "fitted/adapter/README.md").read_text()
    assert "eviction (the loss that eviction causes): steps 3; " in card and "eviction, part 2: steps 2; " in card
    assert "documentation/dialogue" in card
    settings = stage_settings(here / "fitted/adapter")
    assert [*settings] == ["answers", "importance", "eviction", "fresh_answers", "fresh_eviction", "evaluation"]
    assert settings["fresh_answers"]["limit"] == 6 and settings["fresh_eviction"]["finetune"]["train"]["steps"] == 2
    keepsight(*FIT, *fresh, "out=fitted", "stages=[eviction,card]")  # its folder has a later one
    card = (here / "fitted/adapter/README.md").read_text()
    assert [*stage_settings(here / "fitted/adapter")] == ["answers", "importance", "eviction"]
    assert "## Evaluation" not in card  # that of the later one is left out
    assert not (here / "fitted/adapter/evaluation.png").exists()
    keepsight(*FIT, "out=fitted", "stages=[evaluation,card]")
    card = (here / "fitted/adapter/README.md").read_text()
    assert "part 2" not in card and "## Evaluation" in card
    keepsight.refuses("fresh.limit", "range", *FIT, *last_of_each_key([*fresh, "fresh.limit=2"]), "out=fitted")
    message = keepsight.refuses("limit", "range", *FIT, "limit=2", "out=none")
    assert message.startswith("limit=2: train.held_out=2 ")
    message = keepsight.refuses("limit", "range", *FIT, "limit=2", "out=none", "stages=[eviction]")
    assert message.startswith("limit=2: finetune.train.held_out=2 ")
    absent = last_of_each_key([*fresh, "fresh.mixture=absent"])
    keepsight.refuses("fresh.mixture", "unknown", *FIT, *absent, "out=none")
    keepsight.refuses("fresh.limit", "missing", *FIT, "out=none", "stages=[fresh_answers]")


def test_no_stage_holds_the_target_of_the_one_before(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a GPU would have to hold two."""
    (here / "books").mkdir()
    write_lines(here / "books" / "rows.jsonl", [{"text": f"Book {number}. " * 60} for number in range(9)])
    source = "{kind: hub_dataset, id: books, license: mit, text: text}"
    (here / "mixture.yaml").write_text(f"min_tokens: 100\nmax_tokens: 400\nsources:\n  - {source}\n")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here / "cache")
    load, models, held = from_recipe.load_target, list[Any](), list[int]()

    def noted(**options: Any) -> Target:
        held.append(sum(model() is not None for model in models))
        target = load(**options)
        models.append(weakref.ref(target.model))
        return target

    monkeypatch.setattr(from_recipe, "load_target", noted)
    keepsight(*FIT, "train.steps=1", "finetune.train.steps=1", "tests=1", "out=fitted")
    assert held == [0, 0, 0, 0]


def test_a_retrieval_head_has_its_own_stages_and_other_ones_are_refused(keepsight: CommandLine, here: Path) -> None:
    short = ("steps=2", "held_out=2", "budget=6", "report_to=[]")
    given = [*FIT, "module=retrieval", "methods=[]", *(f"retrieval_head.train.{each}" for each in short)]
    given = last_of_each_key([*given, "retrieval_head.queries=8", "retrieval_head.features=none", "out=fitted"])
    printed = keepsight(*given)
    assert [line for line in printed.splitlines() if line.startswith("===")] == [
        *("=== answers", "=== distillation", "=== evaluation", "=== card")
    ]
    compared = {row["method"] for row in read_jsonl(here / "fitted/eval/results.jsonl")}
    assert compared == {"full", "exact_topk", "specontext", "quest"}
    card = (here / "fitted/head/README.md").read_text()
    assert "# keepsight retrieval head" in card and "## Settings" in card
    settings = stage_settings(here / "fitted/head")
    assert [*settings] == ["answers", "distillation", "evaluation"]
    assert settings["distillation"]["retrieval_head"]["queries"] == 8
    assert card.index("## Evaluation") < card.index("## Limitations")
    assert plan_upload(here / "fitted/head", "ada/head").files
    for stage in ("eviction", "fresh_eviction"):
        message = keepsight.refuses("stages", "unknown", *given, f"stages=[{stage}]")
        assert stage in message and message.endswith("answers, distillation, evaluation, card")
    keepsight.refuses("model.device_map", "conflict", *FIT, "out=divided", "model.device_map=fsdp2")


def test_what_a_later_stage_needs_is_said_before_the_first(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {"eviction": "importance", "evaluation": "importance", "card": "importance"}
    for stage, before in needed.items():
        message = keepsight.refuses("stages", "missing", *FIT, "out=none", f"stages=[{stage}]")
        assert stage in message and message.endswith(f"run {before} first")
    keepsight.refuses("manifest.json", "missing", *FIT, "out=none", "stages=[importance]")
    of_head = (*FIT, "out=none", "module=retrieval", "methods=[]", "stages=[evaluation]")
    assert keepsight.refuses("stages", "missing", *of_head).endswith("run distillation first")
    keepsight.refuses("finetune.uniform_share", "conflict", *FIT, "out=none", "selection=uniform")
    odd = last_of_each_key([*FIT, "finetune.train.samples_per_step=3", "finetune.train.batch_size=2"])
    keepsight.refuses("finetune.train.samples_per_step", "range", *odd, "out=none")
    alone = last_of_each_key([*FIT, "finetune.uniform_share=0", "finetune.freeze_module=true", "selection=uniform"])
    keepsight.refuses("finetune.freeze_module", "conflict", *alone, "out=none")
    with monkeypatch.context() as patch:
        patch.setattr("keepsight.commands.fit.has_latents", lambda model: True)
        message = keepsight.refuses("stages", "model", *FIT, "out=none")
        assert message.endswith("stages=[answers,importance,evaluation,card]")
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert "stages=" not in keepsight.fails(*last_of_each_key([*FIT, "model.id=ada/absent"]), "out=none")
    config = read_json(here / "tiny" / "config.json")
    write_json(here / "tiny" / "config.json", config | {"model_type": "mistral", "sliding_window": 8})
    few = ("module=retrieval", "methods=[]", "retrieval_head.train.held_out=2")
    said = keepsight.fails(*FIT, *few, "out=none")
    assert "full attention" in said and "stages=" not in said


@pytest.mark.parametrize("stage", [2, 3])
def test_zero3_is_refused_before_the_answers_where_it_cannot_train(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
    assert shards_models() == (stage == 3)
    if stage == 3:
        twice = last_of_each_key([*FIT, "finetune.train.replays=2"])
        keepsight.refuses("finetune.train.replays", "conflict", *twice, "out=none")
        keepsight.refuses("stages", "conflict", *FIT, "out=none", "module=retrieval", "methods=[]")


def test_a_card_says_where_another_method_loses_less_than_its_own_module() -> None:
    """The full cache and bounds, whatever their options, are no competitors."""
    losses = {"full": 0.0, "exact_topk": 0.0, "oracle mean 3": 0.0, "specontext": 0.2, "quest": 0.1}
    place = {"task": "niah_single", "length": 1024}
    rows = [
        {**place, "method": name, "budget": None if name == "full" else 64, "excess_nll": loss}
        for name, loss in losses.items()
    ]
    said = "- niah_single, 1024, budget 64: quest loses 0.100 nats, this module 0.200"
    assert [*shortcomings(rows, "specontext")] == [said] and not [*shortcomings(rows, "quest")]


@pytest.mark.slow
def test_two_processes_and_a_killed_one_make_the_module_of_one(keepsight: CommandLine, here: Path) -> None:
    """Of a Qwen3, which the other tests of this file do not have."""
    save_tiny_target(here / "qwen", "qwen3")
    more = ["model.id=qwen", "train.samples_per_step=2", "finetune.train.steps=4"]
    more += ["train.group_by_length=false", "finetune.train.group_by_length=false"]
    given = last_of_each_key([*FIT, *more])
    result = launch(here, "-m", "keepsight", *given, "out=two")
    assert result.returncode == 0, result.stderr[-4000:]
    keepsight(*given, "out=one")
    for stage in ("importance", "eviction"):
        assert read_json(here / f"two/{stage}/training/settings.json")["settings"]["launch.processes"] == 2
        one, two = (LookaheadAdapter.load(here / name / stage) for name in ("one", "two"))
        assert_close(two.tokens, one.tokens)
        for name, value in one.lora.items():
            assert_close(two.lora[name], value)
    assert_close(torch.tensor(two.head_weights), torch.tensor(one.head_weights))
    scores = [
        sorted((row["sample"], row["method"], row["score"]) for row in read_jsonl(here / name / "eval/results.jsonl"))
        for name in ("one", "two")
    ]
    assert scores[0] == scores[1] and len(scores[0]) == 6
    assert (here / "two/adapter/README.md").read_text().count("## Evaluation") == 1
    assert result.stdout.count("=== evaluation") == 1

    killed = subprocess.Popen([sys.executable, "-m", "keepsight", *given, "out=killed"], cwd=here)
    while not (checkpoint := here / "killed/eviction/training/checkpoint-1").is_dir():
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    assert checkpoint.is_dir() and not (here / "killed/adapter").exists()
    keepsight(*given, "out=killed")
    for name in ("adapter_model.safetensors", "lookahead_tokens.safetensors"):
        assert file_digest(here / "killed/adapter" / name) == file_digest(here / "one/adapter" / name)
