"""keepsight data: make training data: prompts of a mixture and the target's own greedy answers.

    keepsight data recipe=smollm2-135m out=runs/data limit=200
    keepsight data recipe=llama8b mixture=my_mixture.yaml out=runs/data limit=20000
    keepsight data recipe=llama8b backend=server server.url=http://localhost:8000/v1 out=runs/data limit=20000

    keepsight data stats runs/data

A run that was killed resumes when the same command is run again. `stats` says what a data folder holds.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from keepsight import recipes
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import answered_elsewhere, training_dtype, training_target
from keepsight.data_gen.backends import Backend, InThisProcess, Server, ServerSettings, VllmEngine
from keepsight.data_gen.generate import generate_data
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.user_data import pinned
from keepsight.errors import UserError
from keepsight.files import from_json, require_writable
from keepsight.models.processes import launched
from keepsight.models.targets import Target

COMMANDS = {"stats": "what a data folder holds: counts, lengths, duplicates, truncated answers, as a table and a plot"}

BACKENDS = ("transformers", "vllm", "server")


@dataclass
class DataKeys(Recipe):
    """Which data is made, and who answers.

    Attributes:
        mixture: Name of a file in recipes/mixtures/, or a path to a YAML file of your own.
        limit: Number of samples.
        max_new_tokens: Longest answer of the data in tokens.
        skip: Bad rows of your data to skip at most, in this run and process; 0 makes one an error, null skips any number.
        backend: Who answers: transformers, in this process; vllm, in this process; or server, at server.url.
        server: The server of backend=server.
        vllm: Arguments of vLLM's engine, such as {gpu_memory_utilization: 0.5, max_model_len: 4096}.
    """

    mixture: str = "offline"
    limit: int = 200
    max_new_tokens: int = 128
    skip: int | None = None
    backend: str = "transformers"
    server: ServerSettings = field(default_factory=ServerSettings)
    vllm: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config(DataKeys):
    """Keys of `keepsight data`.

    Attributes:
        out: Folder for the shards and the manifest.
        seed: Random seed of the mixture's draws.
        shard_size: Samples per shard.
        batch_tokens: Prompt tokens per batch; lower it when memory runs out.
    """

    out: str = "???"
    seed: int = 0
    shard_size: int = 64
    batch_tokens: int = 8192


def run(config: Config) -> None:
    """Make the data and print its size."""
    at_least_one(config, "limit", "max_new_tokens", "shard_size", "batch_tokens")
    require_writable(Path(config.out))
    values = read_mixture(config.mixture)
    Mixture.from_config(values)  # so that nothing is asked of the Hub for a mixture that is wrong
    values = pinned(values, Path(config.out))
    mixture = Mixture.from_config(values)
    with _answering(config) as (target, backend):
        manifest = generate_data(
            target,
            mixture,
            values,
            Path(config.out),
            limit=config.limit,
            seed=config.seed,
            max_new_tokens=config.max_new_tokens,
            shard_size=config.shard_size,
            backend=backend,
            skip=config.skip,
        )
    if launched().is_main_process:
        print(
            f"{manifest['samples']} samples in {config.out}: {manifest['prompt_tokens']} prompt tokens, "
            f"{manifest['answer_tokens']} answer tokens"
        )


@contextmanager
def _answering(config: Config) -> Iterator[tuple[Target, Backend]]:
    """The target and who answers for it; only `transformers` loads its weights here."""
    if config.backend == "transformers":
        target = training_target(config)
        yield target, InThisProcess(target, config.batch_tokens)
    elif config.backend == "server":
        config.server.check()
        yield (target := answered_elsewhere(config)), Server(target, config.server)
    elif config.backend == "vllm":
        model, target = config.model, answered_elsewhere(config)
        dtype = training_dtype(model)
        options = {"revision": model.revision, "dtype": dtype, "trust_remote_code": model.trust_remote_code}
        with closing(VllmEngine(target, options | config.vllm)) as engine:
            yield target, engine
    else:
        raise UserError(f"backend={config.backend} is unknown; choose one of {', '.join(BACKENDS)}")


def read_mixture(name: str) -> dict[str, Any]:
    """Read a mixture's plain values from recipes/mixtures/NAME.yaml or from a YAML file.

    Raises:
        UserError: no such mixture, or the file is not YAML.
    """
    known = {path.stem: path for base in recipes.__path__ for path in sorted((Path(base) / "mixtures").glob("*.yaml"))}
    path = known.get(name) or Path(name)
    if not path.is_file():
        raise UserError(f"mixture={name} is neither a file nor one of {', '.join(known)}")
    try:  # what looks like a variable stays text: a file must not read the environment
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        values = from_json(json.dumps(loaded, ensure_ascii=False).encode())  # as the manifest will hold them
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a YAML file ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys such as min_tokens, max_tokens and sources")
    return values
