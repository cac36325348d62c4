"""keepsight fit: a module for a model in one command: answers, training, evaluation and model card."""

import gc
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from typing_extensions import TypedDict

from keepsight.commands import config as configs
from keepsight.commands import data, finetune, train, train_heads
from keepsight.commands import eval as evaluation
from keepsight.commands.config_shared import Benchmarks, DataKeys, EvalKeys, Training, UsesMethods
from keepsight.commands.from_recipe import outline_of, resources_of, without_weights
from keepsight.commands.saved_config import published_config, save_config, yaml_of
from keepsight.commands.training import origins_of
from keepsight.commands.variants import variants_of
from keepsight.commands.verdicts import Verdict, verdict_of
from keepsight.data_gen.store import finished_manifest
from keepsight.errors import UserError
from keepsight.eval.report.summary import BOUNDS, OURS, kind_of
from keepsight.files import (
    file_digest,
    read_json,
    read_jsonl,
    require_writable,
    whole_lines,
    write_json,
    write_text,
)
from keepsight.models.artifacts import FIT_RECORD, STAGE_SETTINGS, check_repo_id
from keepsight.models.card import CARD, CardBasics, excess_rows, with_evaluation, with_section
from keepsight.models.decoder import has_latents, require_full_attention
from keepsight.models.distributed import launched, shards_models
from keepsight.models.lookahead import CONFIG, LookaheadAdapter
from keepsight.models.lookahead_settings import SELECTION
from keepsight.models.retrieval_head import CONFIG as RETRIEVAL_CONFIG
from keepsight.tables import markdown_table
from keepsight.train.dataset import digests_from_text
from keepsight.train.distributed import SHARDED
from keepsight.train.settings import TrainSettings
from keepsight.train.trainer import MEASUREMENTS

Stage = TypeVar("Stage", bound=Any)


class _Record(TypedDict, total=False):
    """What the folder of a fit records.

    Attributes:
        trained: The training stage that ran last.
        evaluated: Digest of the module that was evaluated.
    """

    trained: str
    evaluated: str


_STAND_IN: dict[str, dict[str, Any]] = {
    "lookahead": {"adapter": "shipped:smollm2-135m-lookahead"},
    "retrieval": {"retrieval": "shipped:smollm2-135m-retrieval"},
}
"""The bundled module of each kind. Methods are checked with it before there is a trained one."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "lookahead": {
        "title": "keepsight lookahead adapter",
        "methods": ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"],
    },
    "retrieval": {"title": "keepsight retrieval head", "methods": ["full", "exact_topk", "specontext", "quest"]},
}
"""The title of each kind of module, and the methods that it is compared with."""


_TRAININGS = "importance", "eviction", "fresh_eviction"
"""Stages of a lookahead module that write one, in the folders of the same names."""
_EVICTIONS = "eviction", "fresh_eviction"
_FRESH = "fresh_answers", "fresh_eviction"
_KEYS_OF_TRAININGS = {
    "importance": ("limit", "train"),
    "eviction": ("limit", "finetune.train"),
    "fresh_eviction": ("fresh.limit", "finetune.train"),
    "distillation": ("limit", "retrieval_head.train"),
}
"""The keys of each training's number of prompts, and of its settings."""
_DATA_FOLDERS = {"answers": "data", "fresh_answers": "fresh_data"}
"""The folders of the answers."""
_FOLDERS = {**_DATA_FOLDERS, **{name: name for name in _TRAININGS}, "distillation": "head", "evaluation": "eval"}
"""The folder of each stage that makes something."""
_SHARDABLE_STAGES = *_TRAININGS, "card"
"""Stages for which the model may be sharded over processes."""
_MOST_HELD_OUT = 32
"""Held-out samples by which stages are judged, where the data allow as many."""
_LISTED_SHORTCOMINGS = 8
"""Maximum number of a card's lines on where other methods are better."""
_REPORTED_ADVANTAGE = 0.005
"""Smallest advantage of another method, in nats, that the card reports."""


def run(config: configs.Fit) -> str | None:
    """Run the stages and print how long each took; returns the command that publishes the module, once it is whole."""
    out = Path(config.out)
    require_writable(out)
    stages = _Stages(config)
    stages.check()

    is_main = launched().is_main_process
    seconds = dict[str, float]()
    for name in stages.names:
        if is_main:
            print(f"\n=== {name}", flush=True)
        start = time.perf_counter()
        stages.run(name)
        save_config(config)
        if is_main and name in _TRAININGS:
            _record(out, trained=name)
        gc.collect()  # frees a training's model before the next stage loads another
        launched().wait_for_everyone()
        seconds[name] = time.perf_counter() - start

    if is_main:
        seconds["total"] = sum(seconds.values())
        print()
        for name, duration in seconds.items():
            print(f"{name:<14} {duration:6.0f} s")
        for verdict in _verdicts(out, stages.last_training):
            print(verdict.sentence())
    if "card" not in stages.names:
        return None
    published = _published(stages.config, out)
    return f"keepsight push {shlex.quote(str(published))} USER/NAME --dry-run"


class _Stages:
    """The stages that a command runs.

    Attributes:
        config: The command's configuration, with what depends on the kind of module and on the data.
        out: The folder of the fit.
        names: The stages to run, in order.
        last_training: The folder in `out` of the module to evaluate and publish.
        answers: The configuration of the stage `answers`.
        fresh_answers: The configuration of the stage `fresh_answers`.
        tests: The configuration of the evaluation, of the module that the last training stage writes.
    """

    def __init__(self, requested: configs.Fit) -> None:
        """UserError for stages that the module does not have, or that a sharded model does not allow."""
        config = _completed(requested)
        self.config = config
        self.out = Path(config.out)
        self.names = [name for name in stages_of(config) if not config.stages or name in config.stages]
        _check_sharded(config, self.names)
        if config.module == "lookahead":
            self.last_training = _last_training(self.out, self.names)
            module_key = "adapter"
        else:
            self.last_training = "head"
            module_key = "retrieval"

        self.answers = _stage_config(configs.Data, config, DataKeys, out=self._folder(_DATA_FOLDERS["answers"]))
        fresh_folder = self._folder(_DATA_FOLDERS["fresh_answers"])
        self.fresh_answers = _fresh_answers(config, self.answers, fresh_folder)
        module = {module_key: self._folder(self.last_training)}
        self.tests = _stage_config(
            configs.Eval,
            config,
            Benchmarks,
            EvalKeys,
            UsesMethods,
            out=self._folder("eval"),
            samples=config.tests,
            **module,
        )

    def _folder(self, name: str) -> str:
        return str(self.out / name)

    def check(self) -> None:
        """UserError for whatever would stop one of the stages, before the first."""
        answers = {"mixture": self.answers}
        if "fresh_answers" in stages_of(self.config):
            answers["fresh.mixture"] = self.fresh_answers
        check(self.config, self.names, answers, self.tests)
        _check_order(self.config, self.out, self.names)
        if "evaluation" in self.names:
            # unreadable tasks are refused here, not after hours
            evaluation.samples_of(self.tests, without_weights(self.tests))
        if "fresh_answers" in self.names:
            data.check_data(self.fresh_answers)  # likewise, data sets that cannot be read

    def run(self, name: str) -> None:
        """Run one of the stages."""
        config = self.config
        if name == "answers":
            data.run(self.answers)
        elif name == "importance":
            train.run(_stage_config(configs.Train, config, data=self.answers.out, out=self._folder("importance")))
        elif name == "eviction":
            self._train_for_eviction(self._eviction())
        elif name == "fresh_answers":
            data.run(self.fresh_answers)
        elif name == "fresh_eviction":
            self._train_for_eviction(self._fresh_eviction())
        elif name == "distillation":
            head = self._folder("head")
            train_heads.retrieval(_stage_config(configs.TrainRetrievalHead, config, data=self.answers.out, out=head))
        elif name == "evaluation":
            _evaluate(self.tests, self.out, _stage_to_use(self.out, self.last_training))
        elif name == "card":
            _write_card(config, self.out, _stage_to_use(self.out, self.last_training))

    def _eviction(self) -> configs.Finetune:
        config = self.config
        return _stage_config(
            configs.Finetune,
            config,
            Training,
            data=self.answers.out,
            out=self._folder("eviction"),
            adapter=self._folder("importance"),
            finetune=config.finetune,
            max_prompt_tokens=config.max_prompt_tokens,
        )

    def _fresh_eviction(self) -> configs.Finetune:
        """As the eviction stage, from the better module so far, on the answers to new prompts."""
        eviction = self._eviction()
        train_settings = replace(eviction.finetune.train, steps=self.config.fresh.steps)
        return replace(
            eviction,
            finetune=replace(eviction.finetune, train=train_settings),
            data=self.fresh_answers.out,
            out=self._folder("fresh_eviction"),
            adapter=self._folder(_stage_to_use(self.out, "eviction")),
        )

    def _train_for_eviction(self, eviction: configs.Finetune) -> None:
        selection = {name: getattr(self.config.lookahead, name) for name in SELECTION}
        finetune.run(eviction, selection)


def stages_of(config: configs.Fit) -> tuple[str, ...]:
    """The stages that this module has, in order; UserError for others in `stages=`."""
    stages: tuple[str, ...] = configs.LOOKAHEAD_STAGES
    if config.module == "retrieval":
        stages = configs.RETRIEVAL_STAGES
    unknown = sorted(set(config.stages) - set(stages))
    if unknown:
        raise UserError(
            f"stages: module={config.module} has no stage {unknown[0]}; choose from {', '.join(stages)}",
            field="stages",
            code="unknown",
        )
    if config.fresh.limit > 0:
        return stages

    for name in _FRESH:
        if name in config.stages:
            raise UserError(
                f"stages: {name} needs fresh.limit=, the number of new prompts; it is 0",
                field="fresh.limit",
                code="missing",
            )
    return tuple(name for name in stages if name not in _FRESH)


def check(config: configs.Fit, stages: Sequence[str], answers: Mapping[str, configs.Data], tests: configs.Eval) -> None:
    """Check (UserError) the keys before the first of the stages, with a shipped module in place of the new one.

    `answers` are those to be generated, by the key that names their mixture.
    """
    config.fresh.check()
    _check_held_out(config, stages)
    for key, stage_answers in answers.items():
        data.check(stage_answers, key)
    if config.base is not None:
        check_repo_id(config.base)
    config.train.check("train")
    config.finetune.train.check("finetune.train")
    evictions = [name for name in _EVICTIONS if name in stages]
    if evictions:
        config.finetune.check_selection(config.lookahead.floor)

    if {*_TRAININGS, "distillation"}.intersection(stages):
        model = outline_of(config)
        require_full_attention(model)
        if evictions and has_latents(model):
            others = ",".join(name for name in stages if name not in (*evictions, "fresh_answers"))
            raise UserError(
                f"stages: {evictions[0]} needs keys and values, {model.config.model_type} caches latents; leave it "
                f"out: stages=[{others}]",
                field="stages",
                code="model",
            )
    evaluation.check(tests)
    stand_in = replace(tests, **_STAND_IN[config.module])
    # The stand-in is of another base model, with which nothing is compared.
    resources = replace(resources_of(stand_in, without_weights(tests)), target=None)
    variants_of(tests.methods, tests.budgets, tests.bits, resources)


def _check_held_out(config: configs.Fit, stages: Sequence[str]) -> None:
    """UserError for a training that holds out all of its prompts, or whose steps do not divide into batches."""
    for name in stages:
        if name not in _KEYS_OF_TRAININGS:
            continue
        limit_key, section = _KEYS_OF_TRAININGS[name]
        limit: int = attrgetter(limit_key)(config)
        settings: TrainSettings = attrgetter(section)(config)
        if limit <= settings.held_out:
            raise UserError(
                f"{limit_key}={limit}: {section}.held_out={settings.held_out} of the prompts are held out; raise it",
                field=limit_key,
                code="range",
            )
        settings.accumulation(launched().num_processes, section)


def _fresh_answers(config: configs.Fit, answers: configs.Data, out: str) -> configs.Data:
    """The settings of the answers to new prompts, from those of the first `answers`; see `FreshSettings`."""
    mixture = config.fresh.mixture
    if not mixture:
        fresh_name = f"{config.mixture}-fresh"
        mixture = fresh_name if fresh_name in data.package_mixtures() else config.mixture
    values: dict[str, Any] = {
        "mixture": mixture,
        "limit": config.fresh.limit,
        "max_new_tokens": config.fresh.max_new_tokens,
        "seed": answers.seed + 1,
        "out": out,
    }
    return replace(answers, **values)


def _check_sharded(config: configs.Fit, stages: Sequence[str]) -> None:
    """UserError for stages and settings that a model sharded over processes does not allow."""
    by_fsdp2 = config.model.device_map == SHARDED
    if by_fsdp2:
        for name in stages:
            if name not in _SHARDABLE_STAGES:
                raise UserError(
                    f"stages: {name} needs the whole model, not model.device_map={SHARDED}, which is for "
                    "stages=[importance,eviction] or [fresh_eviction]; run it in one process, with "
                    "model.device_map=auto if no GPU holds the model",
                    field="model.device_map",
                    code="conflict",
                )
    elif not shards_models():
        return

    if "distillation" in stages:
        raise UserError(
            "stages: distillation does not support ZeRO-3; use recipes/accelerate/ddp.yaml or zero2.yaml",
            field="stages",
            code="conflict",
        )
    sharding = f"model.device_map={SHARDED}" if by_fsdp2 else "ZeRO-3"
    for name in stages:
        if name not in _KEYS_OF_TRAININGS:
            continue
        _, section = _KEYS_OF_TRAININGS[name]
        settings: TrainSettings = attrgetter(section)(config)
        if settings.replays > 1:
            raise UserError(
                f"{section}.replays={settings.replays}: with {sharding} use 1",
                field=f"{section}.replays",
                code="conflict",
            )


def _check_order(config: configs.Fit, out: Path, stages: Sequence[str]) -> None:
    """UserError if a stage needs answers or a module of an earlier one, which is neither chosen nor there."""
    module_files = {name: out / name / CONFIG for name in _TRAININGS}
    module_files["distillation"] = out / "head" / RETRIEVAL_CONFIG
    first_training = "importance" if config.module == "lookahead" else "distillation"
    modules_of = {
        "eviction": ["importance"],
        "fresh_eviction": ["eviction"],
        "evaluation": [first_training, *_EVICTIONS],
        "card": [first_training, *_EVICTIONS],
    }
    answers_of = {first_training: "answers", "eviction": "answers", "fresh_eviction": "fresh_answers"}

    for index, name in enumerate(stages):
        earlier_stages = stages[:index]
        trainings = modules_of.get(name, [])
        has_module = any(training in earlier_stages or module_files[training].is_file() for training in trainings)
        if trainings and not has_module:
            raise UserError(
                f"stages: {name} needs a trained module, and {out} has none; run {trainings[0]} first",
                field="stages",
                code="missing",
            )
        if name in answers_of and answers_of[name] not in earlier_stages:
            finished_manifest(out / _DATA_FOLDERS[answers_of[name]])


def _completed(config: configs.Fit) -> configs.Fit:
    """The configuration with what depends on the kind of module and on the data, where it is not given."""
    values = {}
    for key, default in _DEFAULTS[config.module].items():
        values[key] = getattr(config, key) or default
    values["train"] = _with_enough_held_out(config.train, config.limit)
    values["finetune"] = replace(config.finetune, train=_with_enough_held_out(config.finetune.train, config.limit))
    return replace(config, **values)


def _with_enough_held_out(settings: TrainSettings, limit: int) -> TrainSettings:
    """The settings with enough held-out samples to tell two modules apart, unless another number than usual is given.

    They are a quarter of the data, at most 32 and at least the usual number.
    """
    usual = TrainSettings().held_out
    if settings.held_out != usual:
        return settings
    return replace(settings, held_out=max(usual, min(_MOST_HELD_OUT, limit // 4)))


def _recorded(out: Path) -> "_Record":
    path = out / FIT_RECORD
    return read_json(path, _Record) if path.is_file() else {}


def _record(out: Path, **values: Any) -> None:
    write_json(out / FIT_RECORD, {**_recorded(out), **values})


def _stage_to_use(out: Path, stage: str) -> str:
    """The stage whose module is used after a stage: its own, or the one before where it made the module worse."""
    for verdict in _verdicts(out, stage):
        if verdict.stage == stage and verdict.is_worse:
            return verdict.before
    return stage


def _verdicts(out: Path, last: str) -> list[Verdict]:
    """The verdicts on the eviction stages up to the stage `last`, of those whose measurements are there."""
    if last not in _TRAININGS:
        return []
    verdicts = list[Verdict]()
    best = "importance"
    for stage in _EVICTIONS[: _TRAININGS.index(last)]:
        verdict = verdict_of(out, stage, best)
        if verdict is not None:
            verdicts.append(verdict)
        if verdict is None or not verdict.is_worse:
            best = stage
    return verdicts


def _evaluate(tests: configs.Eval, out: Path, source: str) -> None:
    """Evaluate the module of the stage `source`; results of an earlier one are moved to another folder."""
    if source != "head":
        tests = replace(tests, adapter=str(out / source))
    if launched().is_main_process:
        module = _module_digest(out, source)
        results = Path(tests.out)
        if _recorded(out).get("evaluated", module) != module and results.exists():
            number = 1
            while (out / f"eval-{number}").exists():
                number += 1
            moved = results.rename(out / f"eval-{number}")
            print(f"{results}: these results are of an earlier module; they are moved to {moved}")
        _record(out, evaluated=module)
    launched().wait_for_everyone()
    evaluation.run(tests)


def _module_digest(out: Path, source: str) -> str:
    """The digest of a module: of its configuration, in the folder of the stage `source`."""
    name = RETRIEVAL_CONFIG if source == "head" else CONFIG
    return file_digest(out / source / name)


def _last_training(out: Path, stages: Sequence[str]) -> str:
    """The folder of the module to evaluate and publish: that of the last training stage, chosen or already done."""
    latest = _recorded(out).get("trained")
    trainings = [name for name in _TRAININGS if name in stages]
    if trainings:
        return trainings[-1]
    finished = [name for name in _TRAININGS if (out / name / CONFIG).is_file()]
    if latest in finished:
        return latest
    return finished[-1] if finished else "importance"


def _published(config: configs.Fit, out: Path) -> Path:
    return out / ("adapter" if config.module == "lookahead" else "head")


def _stage_config(stage: type[Stage], config: configs.Fit, *key_classes: type, **values: Any) -> Stage:
    """A stage's configuration: `values`, and this command's values of its other keys, or of those in `key_classes`."""
    for key_class in key_classes or (stage,):
        for key in fields(key_class):
            if hasattr(config, key.name):
                values.setdefault(key.name, getattr(config, key.name))
    return stage(**values)


def _write_card(config: configs.Fit, out: Path, source: str) -> None:
    """Write the module that is published: the last stage's, with a card of all stages and the evaluation's picture."""
    if not launched().is_main_process:
        return
    evaluated = out / "eval"
    published = _published(config, out)
    is_evaluated = _recorded(out).get("evaluated") == _module_digest(out, source)
    settings_of_stages = _settings_of_stages(out, source, is_evaluated)
    settings_section = (
        f"## Settings\n\n`{STAGE_SETTINGS}` has every setting of each stage that made this module: "
        f"{', '.join(settings_of_stages)}.\n"
    )

    if config.module == "lookahead":
        artifact = LookaheadAdapter.load(out / source)
        verdicts = _verdicts(out, _last_training(out, []))
        judged = " ".join(verdict.sentence() for verdict in verdicts)
        card = written_card(artifact, config, out, source, judged)
        card = with_section(card, settings_section)
        if is_evaluated:
            card = with_results(card, evaluated)
        artifact.save(published, artifact.provenance, card)
    else:
        card = (published / CARD).read_text(encoding="utf-8")
        card = with_section(card, settings_section)
        if is_evaluated:
            card = with_results(card, evaluated, "specontext")
        write_text(published / CARD, card)
    write_text(published / STAGE_SETTINGS, yaml_of(settings_of_stages))

    (published / "evaluation.png").unlink(missing_ok=True)  # of an earlier module
    picture = evaluated / "plots" / "overview.png"
    if is_evaluated and picture.is_file():
        shutil.copyfile(picture, published / "evaluation.png")
    print(f"{published}: the module, its card and its pictures")


def _settings_of_stages(out: Path, source: str, is_evaluated: bool) -> dict[str, Any]:
    """For each stage behind the module of the stage `source`, the configuration of its last run, without paths."""
    stages = ["answers", "distillation"]
    if source in _TRAININGS:
        stages = list(configs.LOOKAHEAD_STAGES[: configs.LOOKAHEAD_STAGES.index(source) + 1])
    if is_evaluated:
        stages.append("evaluation")
    settings = {}
    for stage in stages:
        config = published_config(out / _FOLDERS[stage])
        if config is not None:
            settings[stage] = config
    return settings


def written_card(artifact: LookaheadAdapter, config: configs.Fit, out: Path, source: str, judged: str = "") -> str:
    """The card as Markdown, without command and results: of the module of the stage `source`, in the fit's `out`.

    `judged` says what each stage did for the module.
    """
    data_folders = ["data", "fresh_data"] if source == "fresh_eviction" else ["data"]
    manifests = [finished_manifest(out / folder) for folder in data_folders]
    answers = []
    origins = list[str]()
    sources = Counter[str]()
    for manifest in manifests:
        answers.append(
            f"{manifest.samples} prompts, {manifest.prompt_tokens} tokens; {manifest.answer_tokens} of answers"
        )
        for line in origins_of(manifest.settings.mixture).splitlines():
            if line not in origins:
                origins.append(line)
        sources += Counter(manifest.sources)

    provenance = artifact.provenance
    evictions = finetune.eviction_records(provenance.training)
    importance = {}
    for key, value in provenance.training.items():
        if key.partition(", ")[0] not in evictions:
            importance[key] = value
    eviction_texts = [_listed(record) for record in evictions.values()]
    stages = {
        "answers": "; then ".join(answers),
        "importance (what answers attend to)": _listed(importance),
        "eviction (the loss that eviction causes)": eviction_texts[0] if eviction_texts else "not run",
    }
    for index, text in enumerate(eviction_texts[1:], start=2):
        stages[f"eviction, part {index}"] = text
    trained_prompts = digests_from_text(provenance.trained_on) or ()
    stages["trained on"] = f"{len(trained_prompts)} prompts; their digests are in its files"

    notes = "\n\n".join(filter(None, ["\n".join(origins), config.data_notes]))
    short_provenance = replace(provenance, training=stages)
    basics = CardBasics(config.title, short_provenance, sources, notes, config.license, judged)
    rows = _measured(out / source)
    if not rows:
        return artifact.card(basics, "")
    table = markdown_table(rows, ["held-out samples", "before the last stage", "after it"])
    return artifact.card(basics, table.rstrip())


def _listed(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {value}" for name, value in values.items())


def _measured(stage: Path) -> list[tuple[str, str, str]]:
    """Rows of a table of the first and last measurement of a stage's training."""
    measurements = whole_lines(stage / "training" / MEASUREMENTS)
    if not measurements:
        return []
    before = measurements[0]
    after = measurements[-1]
    rows = []
    for name in ("kl", "recall", "tau"):
        if f"eval_{name}" in after:
            rows.append((name, f"{before[f'eval_{name}']:.3f}", f"{after[f'eval_{name}']:.3f}"))
    if rows:
        return rows
    for label, value_before, value_after in excess_rows(before, after):
        rows.append((f"excess NLL (nats), {label}", value_before, value_after))
    return rows


def with_results(card: str, evaluated: Path, method: str = OURS) -> str:
    """A card with an evaluation's table at its end, if there is one, and where other methods lose less than its own."""
    table = evaluated / "tables" / "overall.md"
    if not table.is_file():
        return card
    card = with_evaluation(card, table.read_text(encoding="utf-8"))
    limitations = list(shortcomings(list(read_jsonl(evaluated / "results.jsonl")), method))
    lines = limitations[:_LISTED_SHORTCOMINGS]
    if not limitations:
        lines.append("- Nowhere in this evaluation does another method lose less.")
    if len(limitations) > _LISTED_SHORTCOMINGS:
        lines.append(f"- and in {len(limitations) - _LISTED_SHORTCOMINGS} more places")
    lines.append("- Nothing else was measured here: no other tasks, lengths or budgets.")
    return with_section(card, "## Limitations\n\n" + "\n".join(lines) + "\n")


def shortcomings(rows: Sequence[Mapping[str, Any]], method: str) -> Iterator[str]:
    """Lines of Markdown: where another method has a lower excess NLL at the same budget; the largest difference first.

    Methods that see more than the budget allows, such as the full cache, are left out.
    """
    frame = pd.DataFrame([*rows], columns=["task", "length", "budget", "method", "excess_nll"], dtype=object)
    is_bound = frame["method"].map(kind_of).isin(BOUNDS)
    frame = frame[frame["budget"].notna() & ~is_bound].astype({"excess_nll": float})
    lines = list[tuple[float, str]]()
    for (task, length, _), at_budget in frame.groupby(["task", "length", "budget"]):
        budget = at_budget["budget"].iloc[0]
        means = at_budget.groupby("method")["excess_nll"].mean()
        if method not in means:
            continue
        best = means.idxmin()
        advantage = means[method] - means[best]
        if advantage > _REPORTED_ADVANTAGE:
            setting = f"{task}, {length or 'all lengths'}, budget {budget}"
            line = f"- {setting}: {best} loses {means[best]:.3f} nats, this module {means[method]:.3f}"
            lines.append((advantage, line))
    yield from (line for _, line in sorted(lines, reverse=True))
