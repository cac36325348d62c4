"""`keepsight fit`: every stage, stopped in each of them and between two, and what the card says in the end."""

import itertools
import shutil
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from keepsight.commands import finetune, from_recipe
from keepsight.commands.fit import shortcomings
from keepsight.data_gen.store import ShardWriter
from keepsight.eval import record
from keepsight.files import file_digest, read_json, write_json, write_lines
from keepsight.models.distributed import shards_models
from keepsight.models.hub import plan_upload
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.targets import Target
from keepsight.train.dataset import PromptDigests, digests_from_text, prompt_digests
from keepsight.train.eviction import EvictionObjective
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.commands.commands import CommandLine, last_of_each_key, results_of, samples_of
from tests.launch import launch
from tests.tiny import save_tiny_target

pytestmark = pytest.mark.usefixtures("here")
TINY = ["model.id=tiny", "model.device=cpu", "model.dtype=float32"]
IMPORTANCE = [
    "lookahead.tokens=4",
    "train.steps=3",
    "train.save_every=1",
    "train.held_out=2",
    "train.replays=1",
    "train.report_to=[]",
    "train.unseen=0.5",
]
EVICTION = [
    "finetune.train.steps=3",
    "finetune.train.save_every=1",
    "finetune.train.held_out=2",
    "finetune.train.replays=1",
    "finetune.train.samples_per_step=2",
    "finetune.train.report_to=[]",
    "finetune.budgets=[40]",
    "finetune.uniform_share=0.5",
    "finetune.unseen=0.5",
]
ANSWERS = ["mixture=mixture.yaml", "limit=8", "max_new_tokens=4"]
EVALUATION = ["draft.layers=[0,2]", "tasks=niah_single", "lengths=320", "tests=2"]
EVALUATION += ["methods=full,lookaheadkv,speckv", "budgets=40"]
FIT = ["fit", *TINY, *IMPORTANCE, *EVICTION, *ANSWERS, *EVALUATION]


@dataclass(frozen=True)
class Interruption:
    """Of a stage, once a call of a function (counted from 1) has done its work."""

    owner: Any
    function: str
    call: int
    written: str
    """What the stage has written by then."""

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        function = getattr(self.owner, self.function)
        calls = itertools.count(1)

        def call_and_interrupt(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if next(calls) == self.call:
                raise KeyboardInterrupt
            return result

        patch.setattr(self.owner, self.function, call_and_interrupt)


BEFORE_EVICTION = [
    Interruption(ShardWriter, "append", 1, "fitted/data/shard-00000.jsonl.partial"),
    Interruption(ImportanceObjective, "forward", 2, "fitted/importance/training/checkpoint-1/trainer_state.json"),
]
FROM_EVICTION = [
    Interruption(EvictionObjective, "forward", 3, "fitted/eviction/training/checkpoint-1/trainer_state.json"),
    Interruption(record, "append_lines", 1, "fitted/eval/results.jsonl"),
]


def press_ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


def stages_of(printed: str) -> list[str]:
    """The stages that a command says it runs."""
    return [line.removeprefix("=== ") for line in printed.splitlines() if line.startswith("===")]


def stage_settings(folder: Path) -> dict[str, Any]:
    """What a module's folder says of the stages that made it."""
    return yaml.safe_load((folder / "stages.yaml").read_text())


def floor_of(folder: Path) -> float | None:
    return LookaheadAdapter.load(folder).settings.floor


def trained_on(folder: Path) -> PromptDigests:
    """Digests of the prompts that an adapter was trained on."""
    digests = digests_from_text(LookaheadAdapter.load(folder).provenance.trained_on)
    assert digests is not None
    return digests


def fit_interrupted_in_every_stage(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And between two stages."""

    def interrupt(interruption: Interruption) -> None:
        assert not (here / interruption.written).exists()
        with monkeypatch.context() as patch:
            interruption.patch(patch)
            assert "run the same command again to resume" in keepsight.fails(*FIT, "out=fitted")
        assert (here / interruption.written).exists()

    for interruption in BEFORE_EVICTION:
        interrupt(interruption)
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "run", press_ctrl_c)
        assert "run the same command again to resume" in keepsight.fails(*FIT, "out=fitted")
    for interruption in FROM_EVICTION:
        interrupt(interruption)


def require_card_and_settings_of_every_stage(here: Path) -> None:
    folder = here / "fitted/adapter"
    settings = stage_settings(folder)
    assert [*settings] == ["answers", "importance", "eviction", "evaluation"]
    assert settings["answers"]["limit"] == 8
    assert settings["answers"]["mixture"] == "mixture.yaml"
    assert settings["importance"]["train"]["steps"] == 3
    assert settings["eviction"]["finetune"]["uniform_share"] == 0.5
    assert settings["eviction"]["out"] == "DIR"
    assert settings["evaluation"]["tasks"] == ["niah_single"]
    assert settings["evaluation"]["samples"] == 2
    assert "fitted" not in (folder / "stages.yaml").read_text()
    assert yaml.safe_load((here / "fitted/eviction/config.yaml").read_text())["adapter"] == "fitted/importance"
    assert yaml.safe_load((here / "fitted/config.yaml").read_text())["out"] == "fitted"

    card = (folder / "README.md").read_text()
    assert len(card.splitlines()) < 90
    assert card.index("## Settings") < card.index("## Evaluation") < card.index("## Limitations")
    assert card.count("## Evaluation") == 1
    assert "| LookaheadKV |" in card.replace("lookaheadkv", "LookaheadKV")
    assert "fitted" not in card
    assert "importance (what answers attend to): " in card
    assert "| excess NLL (nats), 40 entries in every " in card
    assert card.count("share of samples with the question unseen 0.5; ") == 2
    pictures = {"evaluation.png", "training.png", "finetuning.png"}
    assert {*plan_upload(folder, "ada/tiny").files} == {*LookaheadAdapter.files, "README.md", "stages.yaml"} | pictures


def test_stopped_in_every_stage_it_ends_as_if_it_had_not_been(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_interrupted_in_every_stage(keepsight, here, monkeypatch)
    rows_before = results_of(here / "fitted/eval")
    printed = keepsight(*FIT, "out=fitted")
    assert stages_of(printed) == ["answers", "importance", "eviction", "evaluation", "card"]
    assert printed.count("next: ") == 1, "that of the last stage alone"
    assert printed.splitlines()[-1].startswith("next: ")
    rows = results_of(here / "fitted/eval")
    assert len(rows) == 2 * 3
    assert len(rows_before) == 3
    assert all(row in rows for row in rows_before)
    assert {row["method"] for row in rows} == {"full", "lookaheadkv", "speckv"}

    keepsight("train", *TINY, *IMPORTANCE, "data=fitted/data", "out=importance")
    keepsight("finetune", *TINY, *EVICTION, "data=fitted/data", "adapter=importance", "out=eviction")
    fitted = here / "fitted/adapter"
    for name in ("adapter_model.safetensors", "lookahead_tokens.safetensors"):
        assert file_digest(fitted / name) == file_digest(here / "eviction" / name)
    adapter = LookaheadAdapter.load(fitted)
    assert adapter.settings == LookaheadAdapter.load(here / "importance").settings.selecting("shared")
    assert adapter.head_weights is not None
    assert len(trained_on(fitted)) >= 6
    assert trained_on(fitted) <= prompt_digests(samples_of(here / "fitted/data"))
    require_card_and_settings_of_every_stage(here)

    card = (fitted / "README.md").read_text()
    settings = stage_settings(fitted)
    keepsight("fit", *TINY, "out=fitted", "stages=[card]")
    assert (fitted / "README.md").read_text() == card
    assert stage_settings(fitted) == settings, "of all stages still"

    shutil.rmtree(here / "fitted/eviction")
    keepsight(*FIT, "out=fitted", "selection=uniform", "stages=[eviction,evaluation]", "finetune.uniform_share=0")
    assert (here / "fitted/eval-1/results.jsonl").is_file()
    assert (here / "fitted/eval/results.jsonl").is_file()
    assert floor_of(here / "fitted/importance") == 0.2
    assert floor_of(here / "fitted/eviction") is None
    keepsight(*FIT, "out=fitted", "stages=[card]", "finetune.uniform_share=0")
    assert stage_settings(fitted)["eviction"]["finetune"]["uniform_share"] == 0
    assert floor_of(fitted) is None

    shutil.rmtree(here / "fitted/eviction")
    keepsight(*FIT, "out=fitted", "stages=[eviction,card]", "lookahead.floor=0.5")
    assert floor_of(fitted) == 0.5
    assert [*stage_settings(fitted)] == ["answers", "importance", "eviction"]


def test_the_eviction_stage_goes_on_with_new_prompts(keepsight: CommandLine, here: Path) -> None:
    """With those and the settings that two commands would use; the card lists both parts."""
    (here / "other.yaml").write_text("min_tokens: 100\nmax_tokens: 200\nsources:\n  - {kind: dialogue}\n")
    fresh = ("fresh.limit=6", "fresh.steps=2", "fresh.max_new_tokens=6", "fresh.mixture=other.yaml")
    printed = keepsight(*FIT, *fresh, "out=fitted")
    assert stages_of(printed) == [
        "answers",
        "importance",
        "eviction",
        "fresh_answers",
        "fresh_eviction",
        "evaluation",
        "card",
    ]

    keepsight("data", *TINY, "mixture=other.yaml", "seed=1", "limit=6", "max_new_tokens=6", "out=fresh_data")
    two_steps = (*EVICTION, "finetune.train.steps=2")
    keepsight("finetune", *TINY, *two_steps, "data=fresh_data", "adapter=fitted/eviction", "out=finetuned")
    folder = here / "fitted/adapter"
    fitted = LookaheadAdapter.load(folder)
    finetuned = LookaheadAdapter.load(here / "finetuned")
    assert_close(fitted.tokens, finetuned.tokens)
    assert fitted.head_weights == finetuned.head_weights
    assert fitted.provenance.training["fine-tuning, steps"] == 3
    assert fitted.provenance.training["fine-tuning 2, steps"] == 2
    prompts_of_eviction = trained_on(here / "fitted/eviction")
    assert prompts_of_eviction
    assert prompts_of_eviction < trained_on(here / "fitted/fresh_eviction")

    card = (folder / "README.md").read_text()
    assert "eviction (the loss that eviction causes): steps 3; " in card
    assert "eviction, part 2: steps 2; " in card
    assert "documentation/dialogue" in card
    settings = stage_settings(folder)
    assert [*settings] == ["answers", "importance", "eviction", "fresh_answers", "fresh_eviction", "evaluation"]
    assert settings["fresh_answers"]["limit"] == 6
    assert settings["fresh_eviction"]["finetune"]["train"]["steps"] == 2

    keepsight(*FIT, *fresh, "out=fitted", "stages=[eviction,card]")  # though the folder has a later stage
    assert [*stage_settings(folder)] == ["answers", "importance", "eviction"]
    card = (folder / "README.md").read_text()
    assert "## Evaluation" not in card, "it was of the later stage"
    assert not (folder / "evaluation.png").exists()

    keepsight(*FIT, "out=fitted", "stages=[evaluation,card]")
    card = (folder / "README.md").read_text()
    assert "part 2" not in card
    assert "## Evaluation" in card

    keepsight.refuses("fresh.limit", "range", *FIT, *fresh, "fresh.limit=2", "out=fitted")
    message = keepsight.refuses("limit", "range", *FIT, "limit=2", "out=none")
    assert message.startswith("limit=2: train.held_out=2 ")
    message = keepsight.refuses("limit", "range", *FIT, "limit=2", "out=none", "stages=[eviction]")
    assert message.startswith("limit=2: finetune.train.held_out=2 ")
    keepsight.refuses("fresh.mixture", "unknown", *FIT, *fresh, "fresh.mixture=absent", "out=none")
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
    load_target = from_recipe.load_target
    models: list[weakref.ref[Any]] = []
    models_held_at_loads: list[int] = []

    def count_models_and_load_target(**options: Any) -> Target:
        models_held_at_loads.append(sum(model() is not None for model in models))
        target = load_target(**options)
        models.append(weakref.ref(target.model))
        return target

    monkeypatch.setattr(from_recipe, "load_target", count_models_and_load_target)
    keepsight(*FIT, "train.steps=1", "finetune.train.steps=1", "tests=1", "out=fitted")
    assert models_held_at_loads == [0, 0, 0, 0]


def test_a_retrieval_head_has_its_own_stages_and_other_ones_are_refused(keepsight: CommandLine, here: Path) -> None:
    distillation = [
        "retrieval_head.queries=8",
        "retrieval_head.features=none",
        "retrieval_head.train.steps=2",
        "retrieval_head.train.held_out=2",
        "retrieval_head.train.budget=6",
        "retrieval_head.train.report_to=[]",
    ]
    fit_head = [*FIT, "module=retrieval", "methods=[]", *distillation, "out=fitted"]
    printed = keepsight(*fit_head)
    assert stages_of(printed) == ["answers", "distillation", "evaluation", "card"]
    methods = {row["method"] for row in results_of(here / "fitted/eval")}
    assert methods == {"full", "exact_topk", "specontext", "quest"}
    card = (here / "fitted/head/README.md").read_text()
    assert "# keepsight retrieval head" in card
    assert "## Settings" in card
    assert card.index("## Evaluation") < card.index("## Limitations")
    settings = stage_settings(here / "fitted/head")
    assert [*settings] == ["answers", "distillation", "evaluation"]
    assert settings["distillation"]["retrieval_head"]["queries"] == 8
    assert plan_upload(here / "fitted/head", "ada/head").files
    for stage in ("eviction", "fresh_eviction"):
        message = keepsight.refuses("stages", "unknown", *fit_head, f"stages=[{stage}]")
        assert stage in message
        assert message.endswith("answers, distillation, evaluation, card")
    keepsight.refuses("model.device_map", "conflict", *FIT, "out=divided", "model.device_map=fsdp2")


def test_what_a_later_stage_needs_is_said_before_the_first(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = (*FIT, "out=none")
    for stage in ("eviction", "evaluation", "card"):
        message = keepsight.refuses("stages", "missing", *fit, f"stages=[{stage}]")
        assert stage in message
        assert message.endswith("run importance first")
    keepsight.refuses("manifest.json", "missing", *fit, "stages=[importance]")
    message = keepsight.refuses("stages", "missing", *fit, "module=retrieval", "methods=[]", "stages=[evaluation]")
    assert message.endswith("run distillation first")

    keepsight.refuses("finetune.uniform_share", "conflict", *fit, "selection=uniform")
    no_full_batches = ("finetune.train.samples_per_step=3", "finetune.train.batch_size=2")
    keepsight.refuses("finetune.train.samples_per_step", "range", *fit, *no_full_batches)
    nothing_to_train = ("finetune.uniform_share=0", "finetune.freeze_module=true", "selection=uniform")
    keepsight.refuses("finetune.freeze_module", "conflict", *fit, *nothing_to_train)

    with monkeypatch.context() as patch:
        patch.setattr("keepsight.commands.fit.has_latents", lambda model: True)
        message = keepsight.refuses("stages", "model", *fit)
        assert message.endswith("stages=[answers,importance,evaluation,card]")
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert "stages=" not in keepsight.fails(*fit, "model.id=ada/absent")

    config = read_json(here / "tiny" / "config.json")
    write_json(here / "tiny" / "config.json", config | {"model_type": "mistral", "sliding_window": 8})
    message = keepsight.fails(*fit, "module=retrieval", "methods=[]", "retrieval_head.train.held_out=2")
    assert "full attention" in message
    assert "stages=" not in message


@pytest.mark.parametrize("stage", [2, 3])
def test_zero3_is_refused_before_the_answers_where_it_cannot_train(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
    assert shards_models() == (stage == 3)
    if stage == 3:
        keepsight.refuses("finetune.train.replays", "conflict", *FIT, "finetune.train.replays=2", "out=none")
        keepsight.refuses("stages", "conflict", *FIT, "out=none", "module=retrieval", "methods=[]")


def test_a_card_says_where_another_method_loses_less_than_its_own_module() -> None:
    """The full cache and bounds, whatever their options, are no competitors."""
    losses = {"full": 0.0, "exact_topk": 0.0, "oracle mean 3": 0.0, "specontext": 0.2, "quest": 0.1}
    rows: list[dict[str, Any]] = []
    for method, loss in losses.items():
        budget = None if method == "full" else 64
        row = {"task": "niah_single", "length": 1024, "method": method, "budget": budget, "excess_nll": loss}
        rows.append(row)
    sentence = "- niah_single, 1024, budget 64: quest loses 0.100 nats, this module 0.200"
    assert [*shortcomings(rows, "specontext")] == [sentence]
    assert not [*shortcomings(rows, "quest")]


def scores_of(folder: Path) -> list[tuple[str, str, float]]:
    """Sample, method and score of every row."""
    return sorted((row["sample"], row["method"], row["score"]) for row in results_of(folder))


@pytest.mark.slow
def test_two_processes_and_a_killed_one_make_the_module_of_one(keepsight: CommandLine, here: Path) -> None:
    """Of a Qwen3, which the other tests of this file do not have."""
    save_tiny_target(here / "qwen", "qwen3")
    qwen = ["model.id=qwen", "train.samples_per_step=2", "finetune.train.steps=4"]
    qwen += ["train.group_by_length=false", "finetune.train.group_by_length=false"]
    fit = last_of_each_key([*FIT, *qwen])
    result = launch(here, "-m", "keepsight", *fit, "out=two")
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("=== evaluation") == 1
    keepsight(*fit, "out=one")
    for stage in ("importance", "eviction"):
        training = read_json(here / f"two/{stage}/training/settings.json")
        assert training["settings"]["launch.processes"] == 2
        one = LookaheadAdapter.load(here / "one" / stage)
        two = LookaheadAdapter.load(here / "two" / stage)
        assert_close(two.tokens, one.tokens)
        for name, tensor in one.lora.items():
            assert_close(two.lora[name], tensor)
        if stage == "eviction":
            assert_close(torch.tensor(two.head_weights), torch.tensor(one.head_weights))
    scores = scores_of(here / "one/eval")
    assert len(scores) == 6
    assert scores_of(here / "two/eval") == scores
    assert (here / "two/adapter/README.md").read_text().count("## Evaluation") == 1

    process = subprocess.Popen([sys.executable, "-m", "keepsight", *fit, "out=killed"], cwd=here)
    checkpoint = here / "killed/eviction/training/checkpoint-1"
    while not checkpoint.is_dir():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert checkpoint.is_dir()
    assert not (here / "killed/adapter").exists()
    keepsight(*fit, "out=killed")
    for name in ("adapter_model.safetensors", "lookahead_tokens.safetensors"):
        assert file_digest(here / "killed/adapter" / name) == file_digest(here / "one/adapter" / name)
