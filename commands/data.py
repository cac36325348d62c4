"""keepsight data: training data, and what a data folder contains."""

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from keepsight import recipes
from keepsight.commands.config import Data as Config
from keepsight.commands.config import DataStats
from keepsight.commands.config_shared import check_sampling
from keepsight.commands.from_recipe import next_command, outline_of, training_dtype, training_target, without_weights
from keepsight.commands.saved_config import save_config
from keepsight.data_gen.backends import Backend, InThisProcess, Server, VllmEngine
from keepsight.data_gen.generate import check_sizes, generate_data
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.store import TrainingSample, earlier_settings, finished_manifest, finished_samples
from keepsight.data_gen.user_data import pin_sources, use_local_rows
from keepsight.errors import UserError, printable, require_same
from keepsight.files import at_home, from_json, json_digest, read_yaml, require_writable, write_png
from keepsight.models.distributed import launched
from keepsight.models.targets import Target


def run(config: Config) -> str:
    """Make the data and print its size; returns the command that trains on it."""
    mixture = check_data(config)
    out = Path(config.out)
    keys = ("seed", "shard_size", "max_new_tokens", "temperature", "top_p", "answers")
    settings = {key: getattr(config, key) for key in keys}
    earlier = earlier_settings(out)
    if earlier is not None and any(out.glob("shard-*")):
        chosen_settings = {**settings, "model": config.model.id, "mixture": mixture}
        settings_of_folder = {key: getattr(earlier, key) for key in chosen_settings}
        advice = "choose another out=, or delete the folder"
        require_same(f"{out}: this data was made", settings_of_folder, chosen_settings, advice)
    with _answering(config) as (target, backend):
        manifest = generate_data(
            target, mixture, out, limit=config.limit, backend=backend, skip=config.skip, **settings
        )
    save_config(config)
    if launched().is_main_process:
        tokens = f"{manifest['prompt_tokens']} prompt tokens, {manifest['answer_tokens']} answer tokens"
        print(f"{manifest['samples']} samples in {config.out}: {tokens}")
    return next_command(config, f"train data={quote(config.out)} out=runs/adapter")


def check(config: Config, key: str = "mixture") -> dict[str, Any]:
    """The values of the mixture that `key` names, after all checks (UserError) without the Hub and the base model."""
    require_writable(Path(config.out))
    check_sampling(config.temperature, config.top_p)
    values = read_mixture(config.mixture, config.rows, key)
    Mixture.from_config(values)
    if config.backend == "server":
        config.server.check()
    return values


def check_data(config: Config) -> dict[str, Any]:
    """The mixture's values, after all checks (UserError) that do not need the base model's weights."""
    out = Path(config.out)
    values = pin_sources(check(config), out)
    mixture = Mixture.from_config(values)
    mixture.check()
    check_sizes(outline_of(config), mixture, out, config.limit, config.max_new_tokens)
    return values


def stats(config: DataStats) -> None:
    """Print the table and draw the plot."""
    folder = Path(config.folder)
    out = Path(config.out) if config.out else folder / "stats.png"
    require_writable(out, folder=False)
    manifest = finished_manifest(folder)
    frame = stats_of(finished_samples(folder, manifest), manifest.settings.max_new_tokens)
    print(printable(stats_table(frame), lines=True))
    write_png(out, stats_figure(frame))
    print(f"plot: {out}")


def stats_of(samples: Iterable[TrainingSample], max_new_tokens: int) -> pd.DataFrame:
    """A row for each sample, with the columns source, prompt and answer (tokens), duplicate and truncated (bool).

    A sample is a duplicate if an earlier one has its prompt. The last token of an answer with fewer than
    `max_new_tokens` counts as an end token.
    """
    rows = []
    for sample in samples:
        row = {
            "source": sample.source,
            "prompt": len(sample.prompt_ids),
            "answer": len(sample.answer_ids),
            "last": sample.answer_ids[-1],
            "prompt_ids": json_digest(sample.prompt_ids),
        }
        rows.append(row)
    frame = pd.DataFrame(rows, columns=["source", "prompt", "answer", "last", "prompt_ids"])
    end_tokens = frame["last"][frame["answer"] < max_new_tokens]
    frame["truncated"] = (frame["answer"] >= max_new_tokens) & ~frame["last"].isin(end_tokens)
    frame["duplicate"] = frame["prompt_ids"].duplicated()
    return frame.drop(columns=["last", "prompt_ids"])


def stats_table(frame: pd.DataFrame) -> str:
    """A table of the sources, the largest first, and of all samples; lengths as shortest / median / longest."""
    by_source = sorted(frame.groupby("source"), key=lambda group: (-len(group[1]), str(group[0])))
    rows = [_stats_row(printable(str(source)), samples) for source, samples in by_source]
    rows.append(_stats_row("all", frame))
    return pd.DataFrame(rows).to_string(index=False)


def _stats_row(source: str, samples: pd.DataFrame) -> dict[str, Any]:
    return {
        "source": source,
        "samples": len(samples),
        "prompt tokens": _span(samples["prompt"]),
        "answer tokens": _span(samples["answer"]),
        "duplicates": samples["duplicate"].sum(),
        "truncated": samples["truncated"].sum(),
    }


def _span(lengths: Any) -> str:
    """The shortest, median and longest length."""
    return f"{lengths.min()} / {lengths.quantile(0.5, interpolation='higher'):.0f} / {lengths.max()}"


def stats_figure(frame: pd.DataFrame) -> Figure:
    """Histograms of the lengths of prompts and answers."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for panel, name in zip(figure.subplots(1, 2), ("prompt", "answer"), strict=True):
        panel.hist(frame[name], bins=40, color="#0072B2")
        panel.set(xlabel=f"{name} tokens", ylabel="samples")
        panel.spines[["top", "right"]].set_visible(False)
    return figure


@contextmanager
def _answering(config: Config) -> Iterator[tuple[Target, Backend]]:
    """The base model and the backend that answers; only `transformers` loads the weights here."""
    if config.backend == "transformers":
        target = training_target(config)
        yield target, InThisProcess(target, config.batch_tokens)
    elif config.backend == "server":
        target = without_weights(config)
        yield target, Server(target, config.server)
    else:
        target = without_weights(config)
        options = {
            "revision": config.model.revision,
            "dtype": training_dtype(config.model),
            "trust_remote_code": config.model.trust_remote_code,
            **config.vllm,
        }
        with closing(VllmEngine(target, options)) as engine:
            yield target, engine


def package_mixtures() -> dict[str, Path]:
    """The mixtures that come with keepsight, by name."""
    mixtures = {}
    for folder in recipes.__path__:
        for path in sorted((Path(folder) / "mixtures").glob("*.yaml")):
            mixtures[path.stem] = path
    return mixtures


def read_mixture(name: str, rows: str | None = None, key: str = "mixture") -> dict[str, Any]:
    """Plain values of recipes/mixtures/NAME.yaml or of a YAML file (else UserError); `rows` as in `Data`."""
    mixtures = package_mixtures()
    path = mixtures.get(name) or Path(at_home(name))
    if not path.is_file():
        raise UserError(f"{key}={name} is neither a file nor one of {', '.join(mixtures)}", field=key, code="unknown")
    text = read_yaml(path)
    try:
        mixture = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)  # without the environment
        values = from_json(json.dumps(mixture, ensure_ascii=False).encode())  # as the manifest will store them
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a YAML file ({' '.join(str(error).split())})", field="mixture", code="file"
        ) from None
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: expected keys such as min_tokens, max_tokens and sources", field="mixture", code="type"
        )
    sources = values.get("sources")
    if isinstance(sources, list):
        rows_folder = Path(rows) if rows else None
        values["sources"] = use_local_rows(sources, rows_folder)
    return values
