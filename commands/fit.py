"""keepsight fit: a module for a model in one command: answers, training, evaluation and model card."""

import gc
import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar, cast

import pandas as pd
import yaml
from omegaconf import OmegaConf
from typing_extensions import TypedDict

from keepsight.commands import config as configs
from keepsight.commands import data, finetune, train, train_heads
from keepsight.commands import eval as evaluation
from keepsight.commands.config_shared import Benchmarks, CardKeys, DataKeys, EvalKeys, Training, UsesMethods
from keepsight.commands.from_recipe import outline_of, resources_later, without_weights
from keepsight.commands.parse import compose_config, keys_of
from keepsight.commands.training import origins_of
from keepsight.commands.variants import variants_of
from keepsight.commands.verdicts import Verdict, verdict_of
from keepsight.data_gen.store import finished_manifest
from keepsight.errors import UserError
from keepsight.eval.report.summary import BOUNDS, OURS, kind_of
from keepsight.files import (
    Row,
    file_digest,
    read_json,
    read_jsonl,
    require_writable,
    whole_lines,
    write_json,
    write_text,
)
from keepsight.models.artifacts import check_repo_id
from keepsight.models.card import CARD, CardBasics, excess_rows, with_evaluation, with_section
from keepsight.models.decoder import has_latents, require_full_attention
from keepsight.models.distributed import launched, shards_models
from keepsight.models.lookahead import CONFIG, LookaheadAdapter
from keepsight.models.lookahead_settings import SELECTION, SELECTIONS, LookaheadSettings
from keepsight.models.retrieval_head import CONFIG as RETRIEVAL_CONFIG
from keepsight.train.dataset import digests_from_text
from keepsight.train.distributed import DIVIDED
from keepsight.train.settings import FreshSettings, TrainSettings
from keepsight.train.trainer import MEASUREMENTS

Stage = TypeVar("Stage", bound=Any)
_RECORD = "fit.json"


class _Record(TypedDict, total=False):
    """What the folder of a fit records.

    Attributes:
        keys: The keys of each stage's last run, by stage.
        trained: The training stage that ran last.
        evaluated: Digest of the module that was evaluated.
    """

    keys: dict[str, dict[str, str]]
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


@dataclass
class _FreshKeys:
    """The keys of the stages with new prompts; their other settings are those of the stages before."""

    fresh: FreshSettings


_KINDS: dict[str, type[Any]] = {
    "answers": configs.Data,
    "importance": configs.Train,
    "eviction": configs.Finetune,
    "fresh_answers": _FreshKeys,
    "fresh_eviction": _FreshKeys,
    "distillation": configs.TrainRetrievalHead,
    "evaluation": configs.Eval,
    "card": CardKeys,
}
"""The keys of each stage, some of which `fit` takes too."""
_TRAININGS = "importance", "eviction", "fresh_eviction"
"""Stages of a lookahead module that write one, in the folders of the same names."""
_EVICTIONS = "eviction", "fresh_eviction"
_FRESH = "fresh_answers", "fresh_eviction"
_DATA = {"answers": "data", "fresh_answers": "fresh_data"}
"""The folders of the answers."""
_DIVISIBLE = *_TRAININGS, "card"
"""Stages for which the model may be sharded over processes."""
_DECISIVE = 32
"""Held-out samples by which stages are judged, where the data allow as many."""
_SHORT = 8
"""Maximum number of a card's lines on where other methods are better."""
_MORE_THAN = 0.005
"""Smallest advantage of another method, in nats, that the card reports."""


def run(config: configs.Fit) -> None:
    """Run the stages and print how long each took."""
    require_writable(out := Path(config.out))
    asked, config = config, _completed(config)
    known = stages_of(config)
    chosen = [name for name in known if name in (config.stages or known)]
    _check_sharded(config, chosen)
    last = _source(out, chosen) if config.module == "lookahead" else "head"
    folder, adapter = str(out / _DATA["answers"]), str(out / "importance")
    answers = _stage(configs.Data, config, DataKeys, out=folder)
    fresh_answers = _fresh_answers(config, answers, str(out / _DATA["fresh_answers"]))
    trained = {"adapter" if config.module == "lookahead" else "retrieval": str(out / last), "samples": config.tests}
    tests = _stage(configs.Eval, config, Benchmarks, EvalKeys, UsesMethods, out=str(out / "eval"), **trained)
    fresh = {"fresh.mixture": fresh_answers} if "fresh_answers" in known else {}
    check(config, chosen, {"mixture": answers} | fresh, tests)
    _check_order(config, out, chosen)
    if "evaluation" in chosen:
        evaluation.samples_of(tests, without_weights(tests))  # unreadable tasks are refused here, not after hours
    if "fresh_answers" in chosen:
        data.ready(fresh_answers)  # likewise, data sets that cannot be read
    tuned = {"finetune": config.finetune, "max_prompt_tokens": config.max_prompt_tokens, "adapter": adapter}
    eviction = _stage(configs.Finetune, config, Training, data=folder, out=str(out / "eviction"), **tuned)
    again = replace(config.finetune, train=replace(config.finetune.train, steps=config.fresh.steps))
    fresh_eviction = replace(eviction, finetune=again, data=fresh_answers.out, out=str(out / "fresh_eviction"))
    selected = {name: getattr(config.lookahead, name) for name in SELECTION}
    distillation = _stage(configs.TrainRetrievalHead, config, data=folder, out=str(out / "head"))
    stages: dict[str, Callable[[], None]] = {
        "answers": lambda: data.run(answers),
        "importance": lambda: train.run(_stage(configs.Train, config, data=folder, out=adapter)),
        "eviction": lambda: finetune.run(eviction, selected),
        "fresh_answers": lambda: data.run(fresh_answers),
        "fresh_eviction": lambda: finetune.run(
            replace(fresh_eviction, adapter=str(out / _better(out, "eviction"))), selected
        ),
        "distillation": lambda: train_heads.retrieval(distillation),
        "evaluation": lambda: _evaluate(tests, out, _better(out, last)),
        "card": lambda: _write_card(config, out, _better(out, last), keys_of_stage(asked, "card")),
    }
    is_main, seconds = launched().is_main_process, dict[str, float]()
    for name in chosen:
        if is_main:
            print(f"\n=== {name}", flush=True)
        start = time.perf_counter()
        stages[name]()
        if is_main:
            trained_now = {"trained": name} if name in _TRAININGS else {}
            _record(out, keys=_recorded(out).get("keys", {}) | {name: keys_of_stage(asked, name)}, **trained_now)
        gc.collect()  # frees a training's model before the next stage loads another
        launched().wait_for_everyone()
        seconds[name] = time.perf_counter() - start
    if is_main:
        seconds["total"] = sum(seconds.values())
        print("\n" + "\n".join(f"{name:<14} {each:6.0f} s" for name, each in seconds.items()))
        for verdict in _verdicts(out, last):
            print(verdict.sentence())
        if "card" in chosen:
            print(f"next: keepsight push {shlex.quote(str(_published(config, out)))} USER/NAME --dry-run")


def stages_of(config: configs.Fit) -> tuple[str, ...]:
    """The stages that this module has, in order; UserError for others in `stages=`."""
    known: tuple[str, ...] = configs.RETRIEVAL_STAGES if config.module == "retrieval" else configs.LOOKAHEAD_STAGES
    if odd := sorted({*config.stages} - {*known}):
        raise UserError(f"stages: module={config.module} has no stage {odd[0]}; choose from {', '.join(known)}")
    if config.fresh.limit > 0:
        return known
    if asked := [name for name in _FRESH if name in config.stages]:
        raise UserError(f"stages: {asked[0]} needs fresh.limit=, the number of new prompts; it is 0")
    return tuple(name for name in known if name not in _FRESH)


def check(config: configs.Fit, chosen: Sequence[str], answers: Mapping[str, configs.Data], tests: configs.Eval) -> None:
    """Check (UserError) the keys before the first of the chosen stages, with a shipped module in place of the new one.

    `answers` are those to be generated, by the key that names their mixture.
    """
    config.fresh.check()
    of_stage = {
        "importance": ("limit", config.limit, "train", config.train),
        "eviction": ("limit", config.limit, "finetune.train", config.finetune.train),
        "fresh_eviction": ("fresh.limit", config.fresh.limit, "finetune.train", config.finetune.train),
        "distillation": ("limit", config.limit, "retrieval_head.train", config.retrieval_head.train),
    }
    for key, limit, section, settings in (of_stage[name] for name in chosen if name in of_stage):
        if limit <= settings.held_out:
            raise UserError(
                f"{key}={limit}: {section}.held_out={settings.held_out} of the prompts are held out; raise it"
            )
        settings.accumulation(launched().num_processes, section)
    for key, each in answers.items():
        data.check(each, key)
    if config.base is not None:
        check_repo_id(config.base)
    for key, settings in (("train", config.train), ("finetune.train", config.finetune.train)):
        settings.check(key)
    if evictions := [name for name in _EVICTIONS if name in chosen]:
        config.finetune.check_selection(config.lookahead.floor)
    if set(chosen) & {*_TRAININGS, "distillation"}:
        require_full_attention(model := outline_of(config))
        if evictions and has_latents(model):
            left = ",".join(name for name in chosen if name not in (*evictions, "fresh_answers"))
            raise UserError(
                f"stages: {evictions[0]} needs keys and values, {model.config.model_type} caches latents; leave it "
                f"out: stages=[{left}]"
            )
    evaluation.check(tests)
    stand_in = replace(tests, **_STAND_IN[config.module])
    variants_of(tests.methods, tests.budgets, tests.bits, resources_later(stand_in))


def _fresh_answers(config: configs.Fit, answers: configs.Data, out: str) -> configs.Data:
    """The settings of the answers to new prompts, from those of the first `answers`; see `FreshSettings`."""
    fresh, named = config.fresh, f"{config.mixture}-fresh"
    mixture = fresh.mixture or (named if named in data.own_mixtures() else config.mixture)
    given: dict[str, Any] = {
        "mixture": mixture,
        "limit": fresh.limit,
        "max_new_tokens": fresh.max_new_tokens,
        "out": out,
    }
    return replace(answers, seed=answers.seed + 1, **given)


def _check_sharded(config: configs.Fit, chosen: Sequence[str]) -> None:
    """UserError for stages and settings that a model sharded over processes does not allow."""
    by_fsdp2 = config.model.device_map == DIVIDED
    if by_fsdp2 and (whole := [each for each in chosen if each not in _DIVISIBLE]):
        raise UserError(
            f"stages: {whole[0]} needs the whole model, not model.device_map={DIVIDED}, which is for "
            "stages=[importance,eviction] or [fresh_eviction]; run it in one process, with model.device_map=auto if no "
            "GPU holds the model"
        )
    if not by_fsdp2 and not shards_models():
        return
    if "distillation" in chosen:
        raise UserError("stages: distillation does not support ZeRO-3; use recipes/accelerate/ddp.yaml or zero2.yaml")
    eviction = "finetune.train", config.finetune.train
    training = {"importance": ("train", config.train), "eviction": eviction, "fresh_eviction": eviction}
    for key, settings in (training[name] for name in chosen if name in training):
        if settings.replays > 1:
            sharded = f"model.device_map={DIVIDED}" if by_fsdp2 else "ZeRO-3"
            raise UserError(f"{key}.replays={settings.replays}: with {sharded} use 1")


def _check_order(config: configs.Fit, out: Path, chosen: Sequence[str]) -> None:
    """UserError if a stage needs answers or a module of an earlier one, which is neither chosen nor there."""
    first = "importance" if config.module == "lookahead" else "distillation"
    modules = {name: out / name / CONFIG for name in _TRAININGS} | {"distillation": out / "head" / RETRIEVAL_CONFIG}
    needs = {"eviction": ["importance"], "fresh_eviction": ["eviction"]}
    needs |= {name: [first, *_EVICTIONS] for name in ("evaluation", "card")}
    data_of = {first: "answers", "eviction": "answers", "fresh_eviction": "fresh_answers"}
    for place, name in enumerate(chosen):
        before, needed = chosen[:place], needs.get(name, [])
        if needed and not any(each in before or modules[each].is_file() for each in needed):
            raise UserError(f"stages: {name} needs a trained module, and {out} has none; run {needed[0]} first")
        if name in data_of and data_of[name] not in before:
            finished_manifest(out / _DATA[data_of[name]])


def _completed(config: configs.Fit) -> configs.Fit:
    """The configuration with what depends on the kind of module and on the data, where it is not given."""
    given = {key: getattr(config, key) or value for key, value in _DEFAULTS[config.module].items()}
    train = _deciding(config.train, config.limit)
    tuned = replace(config.finetune, train=_deciding(config.finetune.train, config.limit))
    return replace(config, **given, train=train, finetune=tuned)


def _deciding(settings: TrainSettings, limit: int) -> TrainSettings:
    """The settings with enough held-out samples to tell two modules apart, unless another number than usual is given.

    They are a quarter of the data, at most 32 and at least the usual number.
    """
    usual = TrainSettings().held_out
    if settings.held_out != usual:
        return settings
    return replace(settings, held_out=max(usual, min(_DECISIVE, limit // 4)))


def _recorded(out: Path) -> "_Record":
    return read_json(path, _Record) if (path := out / _RECORD).is_file() else {}


def _record(out: Path, **values: Any) -> None:
    write_json(out / _RECORD, {**_recorded(out), **values})


def _better(out: Path, stage: str) -> str:
    """The stage whose module is used after a stage: its own, or the one before where it made the module worse."""
    worse = [verdict.before for verdict in _verdicts(out, stage) if verdict.stage == stage and verdict.is_worse]
    return worse[0] if worse else stage


def _verdicts(out: Path, last: str) -> list[Verdict]:
    """The verdicts on the eviction stages up to the stage `last`, of those whose measurements are there."""
    verdicts = list[Verdict]()
    best = "importance"
    for stage in _EVICTIONS[: _TRAININGS.index(last)] if last in _TRAININGS else ():
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
        module = file_digest(out / source / (RETRIEVAL_CONFIG if source == "head" else CONFIG))
        if _recorded(out).get("evaluated", module) != module and (results := Path(tests.out)).exists():
            free = next(each for number in count(1) if not (each := out / f"eval-{number}").exists())
            print(f"{results}: these results are of an earlier module; they are moved to {results.rename(free)}")
        _record(out, evaluated=module)
    launched().wait_for_everyone()
    evaluation.run(tests)


def _source(out: Path, chosen: list[str]) -> str:
    """The folder of the module to evaluate and publish: that of the last training stage, chosen or already done."""
    chosen_now = [name for name in _TRAININGS if name in chosen]
    there = [name for name in _TRAININGS if (out / name / CONFIG).is_file()]
    before = [name for name in there if name == _recorded(out).get("trained")]
    return (chosen_now or before or there or ["importance"])[-1]


def _published(config: configs.Fit, out: Path) -> Path:
    return out / ("adapter" if config.module == "lookahead" else "head")


def _stage(kind: type[Stage], config: configs.Fit, *shared: type, **given: Any) -> Stage:
    """A stage's configuration: the keywords, and this command's values of its other keys, or of those in `shared`."""
    names = [each.name for keys in shared or (kind,) for each in fields(keys) if hasattr(config, each.name)]
    return kind(**{name: getattr(config, name) for name in names} | given)


def _write_card(config: configs.Fit, out: Path, source: str, keys: dict[str, str]) -> None:
    """Write the module that is published: the last stage's, with a card of all stages and the evaluation's picture."""
    if not launched().is_main_process:
        return
    evaluated, published = out / "eval", _published(config, out)
    module = file_digest(out / source / (RETRIEVAL_CONFIG if source == "head" else CONFIG))
    is_evaluated = _recorded(out).get("evaluated") == module
    if config.module == "lookahead":
        artifact = LookaheadAdapter.load(out / source)
        judged = " ".join(verdict.sentence() for verdict in _verdicts(out, _source(out, [])))
        card = written_card(artifact, config, out, source, judged)
        if source != "fresh_eviction":
            keys |= _without_later_stages(config, source)
        keys = _selection_keys(config, artifact.settings) | keys
        card = with_section(card, command_section(out, artifact.provenance.base_model, keys, source))
        card = with_results(card, evaluated) if is_evaluated else card
        artifact.save(published, artifact.provenance, card)
    else:
        card, head = (published / CARD).read_text(encoding="utf-8"), read_json(published / RETRIEVAL_CONFIG, Row)
        card = with_section(card, command_section(out, head["provenance"]["base_model"], keys, source))
        write_text(published / CARD, with_results(card, evaluated, "specontext") if is_evaluated else card)
    (published / "evaluation.png").unlink(missing_ok=True)  # of an earlier module
    if is_evaluated and (picture := evaluated / "plots" / "overview.png").is_file():
        shutil.copyfile(picture, published / "evaluation.png")
    print(f"{published}: the module, its card and its pictures")


def _without_later_stages(config: configs.Fit, source: str) -> dict[str, str]:
    """`stages=` for a module of the stage `source`, if the command without it would train further."""
    given = _recipe_of(config) if config.fresh.limit == 0 else config
    known = stages_of(replace(given, module="lookahead", stages=[]))
    left_out = {*_TRAININGS[_TRAININGS.index(source) + 1 :], *_FRESH}
    kept = [each for each in known if each not in left_out]
    return {"stages": f"[{','.join(kept)}]"} if len(kept) < len(known) else {}


def _recipe_of(config: configs.Fit) -> configs.Fit:
    """The configuration with the model's id alone."""
    made: Any = OmegaConf.to_object(compose_config(configs.Fit, [f"model.id={config.model.id}", "out=DIR"])[0])
    return cast(configs.Fit, made)


def keys_of_stage(config: configs.Fit, stage: str) -> dict[str, str]:
    """The keys of a stage with another value than the recipe for the model has; no folder's path is published."""
    default = _recipe_of(config)
    unlike = dict[str, str]()
    for key in keys_of(configs.Fit):
        value: Any = config
        usual: Any = default
        for name in key.name.split("."):
            value, usual = getattr(value, name), getattr(usual, name)
        if value != usual and key.name not in ("out", "model.id", "stages") and _is_of(key.name, stage):
            text = yaml.safe_dump(_without_paths(value), default_flow_style=True, width=1 << 20).splitlines()[0]
            unlike[key.name] = text
    return unlike


def _is_of(key: str, stage: str) -> bool:
    """Whether a stage has a key, or none has it, such as `module`."""
    name = {"tests": "samples"}.get(key, key.partition(".")[0])
    owners = [each for each, kind in _KINDS.items() if name in (part.name for part in fields(kind))]
    return stage in (owners or [stage])


def _selection_keys(config: configs.Fit, settings: LookaheadSettings) -> dict[str, str]:
    """The keys for a module's selection, where it is not that of the recipe: a preset's name, or single ones."""
    was, now = ({name: getattr(each, name) for name in SELECTION} for each in (_recipe_of(config).lookahead, settings))
    preset = [name for name, values in SELECTIONS.items() if values == now]
    if preset and was != now:
        return {"selection": preset[0]}
    return {
        f"lookahead.{name}": yaml.safe_dump(now[name]).split("\n")[0] for name in SELECTION if now[name] != was[name]
    }


def command_section(out: Path, model: str, own: Mapping[str, str], source: str) -> str:
    """A card's section with the command for the module of stage `source`.

    It has the model's Hub id, the keys of the stages that ran in `out`, and `own` ones, which alone have a selection.
    """
    ran, left_out = _recorded(out).get("keys", {}), ["card", *(() if source == "fresh_eviction" else _FRESH)]
    stages = [ran[name].items() for name in _KINDS if name in ran and name not in left_out]
    of_selection = {"selection", *(f"lookahead.{name}" for name in SELECTION)}
    of_stages = [(name, value) for name, value in chain.from_iterable(stages) if name not in of_selection]
    keys = dict([*of_stages, *own.items()])
    said = [shlex.quote(f"{name}={value}") for name, value in keys.items()]
    return "## Command\n\n```\n" + " ".join(["keepsight fit", shlex.quote(model), *said, "out=DIR"]) + "\n```\n"


def _without_paths(value: Any) -> Any:
    """A value with DIR for folders, and the names of files for their paths."""
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    if not isinstance(value, str) or not os.path.exists(value):  # also of a text that is too long for a path
        return value
    return "DIR" if os.path.isdir(value) else os.path.basename(value)


def written_card(artifact: LookaheadAdapter, config: configs.Fit, out: Path, source: str, judged: str = "") -> str:
    """The card as Markdown, without command and results: of the module of the stage `source`, in the fit's `out`.

    `judged` says what each stage did for the module.
    """
    data_folders = ["data", "fresh_data"] if source == "fresh_eviction" else ["data"]
    manifests = [finished_manifest(out / each) for each in data_folders]
    origin = artifact.provenance
    answers = [
        f"{each.samples} prompts, {each.prompt_tokens} tokens; {each.answer_tokens} of answers" for each in manifests
    ]
    evictions = finetune.eviction_records(origin.training)
    first = {key: value for key, value in origin.training.items() if key.partition(", ")[0] not in evictions}
    parts = {f"eviction, part {part}": _listed(each) for part, each in enumerate(evictions.values(), 1) if part > 1}
    stages = {
        "answers": "; then ".join(answers),
        "importance (what answers attend to)": _listed(first),
        "eviction (the loss that eviction causes)": next(map(_listed, evictions.values()), "not run"),
        **parts,
        "trained on": f"{len(digests_from_text(origin.trained_on) or ())} prompts; their digests are in its files",
    }
    short = replace(origin, training=stages)
    origins = dict.fromkeys(chain.from_iterable(origins_of(each.settings.mixture).splitlines() for each in manifests))
    notes = "\n\n".join(each for each in ("\n".join(origins), config.data_notes) if each)
    sources = sum((Counter(each.sources) for each in manifests), Counter[str]())
    basics = CardBasics(config.title, short, sources, notes, config.license, judged)
    rows = _measured(out / source)
    held_out = "| held-out samples | before the last stage | after it |\n| --- | --- | --- |\n" + "\n".join(rows)
    return artifact.card(basics, held_out if rows else "")


def _listed(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {value}" for name, value in values.items())


def _measured(stage: Path) -> list[str]:
    """Rows of a table of the first and last measurement of a stage's training."""
    if not (measured := whole_lines(stage / "training" / MEASUREMENTS)):
        return []
    first, last = measured[0], measured[-1]
    plain = [name for name in ("eval_kl", "eval_recall", "eval_tau") if name in last]
    listed = [f"| {name.removeprefix('eval_')} | {first[name]:.3f} | {last[name]:.3f} |" for name in plain]
    return listed or [f"| excess NLL (nats), {row.removeprefix('| ')}" for row in excess_rows(first, last)]


def with_results(card: str, evaluated: Path, own: str = OURS) -> str:
    """A card with an evaluation's table at its end, if there is one, and where other methods lose less than `own`."""
    if not (table := evaluated / "tables" / "overall.md").is_file():
        return card
    card = with_evaluation(card, table.read_text(encoding="utf-8"))
    found = [*shortcomings([*read_jsonl(evaluated / "results.jsonl")], own)]
    lines = found[:_SHORT] or ["- Nowhere in this evaluation does another method lose less."]
    more = [f"- and in {len(found) - _SHORT} more places"] if len(found) > _SHORT else []
    rest = "- Nothing else was measured here: no other tasks, lengths or budgets."
    return with_section(card, "## Limitations\n\n" + "\n".join([*lines, *more, rest]) + "\n")


def shortcomings(rows: Sequence[Mapping[str, Any]], own: str) -> Iterator[str]:
    """Lines of Markdown: where a method with the same budget has a lower excess NLL; the largest difference first."""
    frame = pd.DataFrame([*rows], columns=["task", "length", "budget", "method", "excess_nll"], dtype=object)
    frame = frame[frame["budget"].notna() & ~frame["method"].map(kind_of).isin(BOUNDS)].astype({"excess_nll": float})
    found = []
    for (task, length, _), at_budget in frame.groupby(["task", "length", "budget"]):
        budget, means = at_budget["budget"].iloc[0], at_budget.groupby("method")["excess_nll"].mean()
        best = means.idxmin()
        if own in means and (less := means[own] - means[best]) > _MORE_THAN:
            said = f"- {task}, {length or 'all lengths'}, budget {budget}: {best} loses {means[best]:.3f} nats, "
            found.append((less, f"{said}this module {means[own]:.3f}"))
    yield from (line for _, line in sorted(found, reverse=True))
