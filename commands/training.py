"""Shared by the training commands: input checks, the run to resume, provenance, and the final message."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepsight import __version__
from keepsight.commands.config_shared import CardKeys, Training
from keepsight.data_gen.store import TrainingSample, finished_manifest, finished_samples, read_training_samples
from keepsight.errors import UserError
from keepsight.files import file_digest, read_json, require_writable
from keepsight.models.artifacts import check_repo_id, fetch
from keepsight.models.card import CardBasics, Provenance
from keepsight.models.draft_head import ORIGIN
from keepsight.models.lookahead import CONFIG
from keepsight.models.retrieval_head import CONFIG as RETRIEVAL_CONFIG
from keepsight.models.targets import Target
from keepsight.train.dataset import (
    PromptDigests,
    digests_as_text,
    digests_from_text,
    require_training_samples,
    with_short_prompts,
)
from keepsight.train.replay import require_replays_alone
from keepsight.train.settings import TrainSettings
from keepsight.train.trainer import ModuleTrainer, Trained, TrainingRun, scalar_values


def check_inputs(config: Training, key: str, settings: TrainSettings) -> Sequence[TrainingSample]:
    """The samples of a training, after every check of folders, data and Hub id (UserError); `key` has the settings."""
    require_writable(Path(config.out))
    if config.replay.dir is not None:
        require_writable(Path(config.replay.dir), key="replay.dir")
        if settings.replays > 1:
            require_replays_alone(Path(config.replay.dir))
    if isinstance(config, CardKeys) and config.base is not None:
        check_repo_id(config.base)

    manifest = finished_manifest(Path(config.data))
    model_of_data = manifest.settings.model
    if model_of_data != config.model.id:
        raise UserError(
            f"{config.data}: this data was answered by {model_of_data!r}, not by {config.model.id!r}; make it again",
            field="model",
            code="conflict",
        )
    samples = _short_enough(config, finished_samples(Path(config.data), manifest))
    require_training_samples(samples, settings.held_out, key)
    return samples


def read_samples(config: Training, target: Target) -> tuple[Sequence[TrainingSample], dict[str, Any]]:
    """The data's samples of at most `max_prompt_tokens`, and its manifest; UserError if none, or of another model."""
    samples, manifest = read_training_samples(Path(config.data), target.name, target.identity, target.vocabulary)
    return _short_enough(config, samples), manifest


def _short_enough(config: Training, samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
    """The samples of at most `max_prompt_tokens` tokens, where the command has that key; 0 keeps all."""
    longest = getattr(config, "max_prompt_tokens", 0)
    if longest:
        samples = with_short_prompts(samples, longest)
    if not samples:
        raise UserError(
            f"max_prompt_tokens={longest} leaves no sample of {config.data}; raise it",
            field="max_prompt_tokens",
            code="range",
        )
    return samples


def run_of(config: Training, target: Target, samples: Sequence[TrainingSample], key: str, *weights: str) -> TrainingRun:
    """The `TrainingRun` of a command; it resumes only with the same base model and the same initial module.

    `key` is the command's key that names the initial module, whose folder has one of the files `weights`.
    """
    initial = getattr(config, key)
    folder = fetch(initial) if initial else None
    initial_weights = None
    if folder is not None:
        for name in weights:
            if (folder / name).is_file():
                initial_weights = file_digest(folder / name)
                break
    return TrainingRun(
        Path(config.out) / "training",
        samples,
        target.identity,
        {"model.dtype": _dtype_of(target), f"command.{key}": initial_weights},
        config.replay,
        _prompts_of(folder),
    )


def _prompts_of(folder: Path | None) -> PromptDigests | None:
    """The prompts that an artifact's module was trained on, None if not recorded; empty for a new module."""
    if folder is None:
        return frozenset()
    for path in (folder / CONFIG, folder / ORIGIN, folder / RETRIEVAL_CONFIG):
        if path.is_file():
            return digests_from_text(read_json(path, dict[str, Any])["provenance"].get("trained_on", ""))
    return None


def basics_of(
    config: CardKeys,
    target: Target,
    manifest: Mapping[str, Any],
    trained: Trained,
    described: Mapping[str, Any],
    loss: str = "nats",
) -> CardBasics:
    """The record of a training for card and artifact: `described` has further facts, `loss` the loss's unit."""
    losses = trained.losses
    training: dict[str, Any] = {
        **_weights_origin(config, target),
        "steps": trained.steps,
        "samples": trained.samples,
        "held-out samples": trained.held_out,
        **described,
        "learning rate": trained.settings.learning_rate,
    }
    if trained.settings.replays > 1:
        training["steps on each teacher output"] = trained.settings.replays
    training["samples a step"] = trained.samples_per_step
    first_and_last_loss = [round(losses[0], 4), round(losses[-1], 4)] if losses else []
    training[f"first and last logged loss ({loss})"] = first_and_last_loss

    provenance = Provenance(
        config.base or target.public_name,
        replace(target.identity, data=manifest["digest"]),
        training,
        __version__,
        digests_as_text(trained.prompts),
    )
    notes = "\n\n".join(filter(None, [origins_of(manifest["settings"]["mixture"]), config.data_notes]))
    return CardBasics(config.title, provenance, manifest["sources"], notes, config.license)


def origins_of(mixture: Mapping[str, Any]) -> str:
    """The data sets of a mixture's prompts, with their licences; no folder's path is published."""
    lines = []
    for source in mixture.get("sources", []):
        if "license" not in source:
            continue
        name = source["id"]
        link = f"[{name}](https://huggingface.co/datasets/{name})"
        if Path(name).is_dir():
            link = Path(name).name
        lines.append(f"- {link} ({source['license']})")
    if not lines:
        return ""
    return "\n".join(["PromptDigests from data sets:", "", *lines])


def _weights_origin(config: CardKeys, target: Target) -> dict[str, str]:
    """The packaged, quantised file of the base model's weights, or their dtype."""
    dtype = _dtype_of(target)
    packaged = config.model.packaged
    digest = config.model.packaged_digest
    if packaged is None or digest is None or not target.version.startswith(digest):
        return {"base model's dtype": dtype}
    name = Path(packaged).name if isinstance(packaged, str) else "a GGUF file"
    return {"base model's weights": f"{name}, quantised weights that were dequantised to {dtype}"}


def _dtype_of(target: Target) -> str:
    return str(target.model.dtype).removeprefix("torch.")


def length_summary(what: str, lengths: list[int]) -> dict[str, list[int]]:
    """The shortest, median and longest length, as the card lists them."""
    ordered = sorted(lengths)
    return {f"{what} (shortest, median, longest)": [ordered[0], ordered[len(ordered) // 2], ordered[-1]]}


def ending(trainer: ModuleTrainer[Any], config: Training, what: str) -> str:
    """A training's final message: that `what` was trained, and the metrics after and before."""
    measurements = [scalar_values(row) for row in trainer.measurements()]
    before = measurements[0] if len(measurements) > 1 else {}
    metrics = []
    for name, value in trainer.metrics.items():
        text = f"{name.removeprefix('eval_')} {_number_text(value)}"
        if name in before:
            text += f" (before: {_number_text(before[name])})"
        metrics.append(text)
    measured = ", ".join(metrics) or "not measured"
    return f"{what} after step {trainer.state.global_step} in {config.out}: {measured}"


def _number_text(value: float) -> str:
    """Three decimals, or where these would all be zeros two significant digits."""
    if value and abs(value) < 0.0005:
        return f"{value:.2g}"
    return f"{value:.3f}"


def require_finished(finished: bool, config: Training, trainer: ModuleTrainer[Any]) -> None:
    """UserError if the training was interrupted, once every process has written its files."""
    if not finished:
        trainer.accelerator.wait_for_everyone()  # a launcher ends all processes when the first has failed
        advice = f"the checkpoint and the weights so far are in {config.out}: run the same command again to resume"
        raise UserError(f"interrupted at step {trainer.state.global_step}; {advice}", field="step", code="conflict")
