"""keepsight bench draft: search for the layers of a model that make a good draft."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from keepsight.commands.config_bench import BenchDraft as Config
from keepsight.commands.data import read_mixture
from keepsight.commands.from_recipe import target_of
from keepsight.data_gen.backends import InThisProcess
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.store import TrainingSample, read_training_samples
from keepsight.errors import UserError
from keepsight.files import write_json, write_png
from keepsight.models.draft_sources import keep_layers
from keepsight.models.targets import Target
from keepsight.train.dataset import no_longer_than
from keepsight.train.draft_layers import Subset, Text, closeness, draft_figure, read_answer, relative_time, search


def run(config: Config) -> None:
    """Search, compare, print and write."""
    target, out = target_of(config), Path(config.out)
    layers = target.model.config.get_text_config().num_hidden_layers
    if not all(size < layers for size in config.keep):
        raise UserError(f"keep={config.keep}: expected sizes from 1 to {layers - 1}, the model has {layers} layers")
    samples, digest = _samples(config, target)
    texts = _texts(target, samples[: config.samples], config.answer_tokens)
    searched = search(target.model, texts, min(config.keep), out / "search.jsonl")
    texts = _texts(target, samples[config.samples :], config.answer_tokens)
    chosen = [_held_out(target, subset, texts) for subset in searched if len(subset.layers) in config.keep]
    prompt, model = samples[config.samples].prompt_ids, target.model
    times = [relative_time(keep_layers(model, subset.layers), model, prompt) for subset in chosen]
    counts = {key: getattr(config, key) for key in ("samples", "held_out", "answer_tokens")}
    settings = {"model": target.name, "version": target.version, "data": digest} | counts
    rows = [asdict(subset) | {"time": time} for subset, time in zip(chosen, times, strict=True)]
    write_json(out / "draft.json", {"settings": settings, "drafts": rows})
    write_png(out / "draft.png", draft_figure(searched, chosen))
    print(f"{_table(chosen, times, config)}\n\nfor the recipe:")
    for subset in chosen:
        print(f"draft: {{layers: {subset.layers}}}")


def _samples(config: Config, target: Target) -> tuple[Sequence[TrainingSample], str]:
    """As many texts as `samples` and `held_out` in all, and the digest of their data."""
    wanted = config.samples + config.held_out
    folder = Path(config.data) if config.data else Path(config.out) / "data"
    longest = config.prompt_tokens[1]
    if not config.data:
        _answer(config, target, folder, wanted)
    samples, manifest = read_training_samples(folder, target.name, target.template_digest, target.vocabulary)
    if config.data:
        samples = no_longer_than(samples, longest)
    if len(samples) < wanted:
        raise UserError(
            f"data={folder}: {len(samples)} samples have at most {longest} prompt tokens, "
            f"samples= and held_out= need {wanted}; lower them, or raise prompt_tokens="
        )
    return samples[:wanted], manifest["digest"]


def _answer(config: Config, target: Target, folder: Path, count: int) -> None:
    """Make texts: prompts of the mixture with the base model's answers."""
    shortest, longest = config.prompt_tokens
    values = read_mixture(config.mixture) | {"min_tokens": shortest, "max_tokens": longest}
    generate_data(
        target,
        values,
        folder,
        limit=count,
        seed=config.seed,
        max_new_tokens=config.answer_tokens,
        shard_size=64,
        backend=InThisProcess(target, 8192),
    )


def _texts(target: Target, samples: Sequence[TrainingSample], answer_tokens: int) -> list[Text]:
    return [read_answer(target.model, sample.prompt_ids, sample.answer_ids[:answer_tokens]) for sample in samples]


def _held_out(target: Target, subset: Subset, texts: list[Text]) -> Subset:
    return Subset(**asdict(closeness(keep_layers(target.model, subset.layers), texts)), layers=subset.layers)


def _table(chosen: list[Subset], times: list[float], config: Config) -> str:
    lines = [f"{config.held_out} held-out texts, at most {config.answer_tokens} answer tokens of each"]
    lines.append("layers  agreement  accepted  KL (nats)  time a token")
    for subset, time in zip(chosen, times, strict=True):
        values = f"{subset.agreement:9.3f}  {subset.accepted:8.1f}  {subset.kl:9.3f}  {time:11.2f}x"
        lines.append(f"{len(subset.layers):6}  {values}")
    return "\n".join(lines)
