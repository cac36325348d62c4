"""`keepsight bench serve servers=[...]`: the commands of the servers, and their load."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keepsight.commands.config_serving import BenchServe, Serve
from keepsight.commands.config_shared import ModelConfig
from keepsight.commands.parse import quoted
from keepsight.commands.serve import THREADS, cores_of_process
from keepsight.commands.variants import read_method
from keepsight.errors import UserError
from keepsight.eval.answers import entry_bytes
from keepsight.eval.bench.measure import require_room
from keepsight.eval.bench.runner import Runner
from keepsight.eval.bench.servers import CHATS, DOCUMENTS, MODEL_NAME, Load, ServerCommand, bench_servers
from keepsight.models.model_files import located
from keepsight.models.targets import Target

STOCK = "stock"
_PAGE = 32
KINDS: dict[str, dict[str, Any]] = {
    "own": {},
    "full": {"method": "full"},
    STOCK: {},
    "vllm": {"vllm": True, "options": {"allocate": "uniform"}},
    "paged": {"vllm": True, "page": _PAGE},
    "inside": {"vllm": True, "reader": "vllm", "options": {"allocate": "uniform"}},
}
"""The keys of `keepsight serve` with which each server is started."""
_MODEL_KEYS = ("id", "revision", "dtype", "device", "attention", "trust_remote_code")
"""Keys of the model that are passed on to servers; they take the others from the recipe of the same id."""
_SET_HERE = ("name", "label", "port", "host", "rows", "vllm_options", "prefixes")


def require_alone(config: BenchServe) -> None:
    """UserError for keys that the servers do not have."""
    if config.vllm or config.interval:
        raise UserError(
            "vllm= and interval= are for an engine without a server; leave them out, or leave out servers=",
            field="vllm",
            code="conflict",
        )
    if len(config.methods) != 1 or len(config.budgets) != 1:
        raise UserError(
            "servers= takes one of methods= and one of budgets=; a server with others is {name: own, label: LABEL, "
            "method: NAME, budget: NUMBER}",
            field="methods",
            code="range",
        )


def lines(config: BenchServe, runner: Runner, outline: Target) -> Iterator[str]:
    """The lines of the table."""
    turns = config.turns if CHATS in config.workloads else 1
    load = Load(
        clients=config.clients or config.rows,
        requests=config.requests,
        tokens=config.tokens,
        answer_tokens=config.answer_tokens,
        documents=config.documents,
        turns=turns,
    )
    require_room(outline.model, load.longest)
    servers = commands_of(config, outline, load)
    with TemporaryDirectory(prefix="keepsight-bench-") as scratch:
        folder = runner.folder or Path(scratch)
        yield from bench_servers(
            runner, servers, outline.tokenizer, config.workloads, load, config.rounds, folder / "servers"
        )


def commands_of(config: BenchServe, outline: Target, load: Load) -> list[ServerCommand]:
    """The servers of `servers=`; UserError for an unknown one, or two of one name."""
    commands = []
    labels = set()
    for server in config.servers:
        keys = dict(server) if isinstance(server, dict) else {"name": server}
        name = keys.pop("name", None)
        label = str(keys.pop("label", name))
        if name not in KINDS:
            raise UserError(
                f"servers={server}: unknown; choose {', '.join(KINDS)}, or {{name: NAME, label: LABEL, KEY: VALUE}}",
                field="servers",
                code="unknown",
            )
        if label in labels:
            raise UserError(f"servers= names {label!r} twice; give one another label", field="servers", code="conflict")
        labels.add(label)
        if name == STOCK:
            commands.append(_stock(config, outline, load, label, keys))
        else:
            options = KINDS[name].get("options", {}) | keys.get("options", {})
            keys_of_server = {**KINDS[name], **keys, "options": options}
            commands.append(_ours(config, outline, load, label, keys_of_server, bool(keys)))
    if any(command.needs_vllm for command in commands) and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "servers= names one of vLLM, which is not here; in a clone, run `make setup-vllm` and use .venv-vllm",
            field="servers",
            code="missing",
        )
    return commands


def _ours(
    config: BenchServe, outline: Target, load: Load, label: str, keys: dict[str, Any], has_options: bool
) -> ServerCommand:
    """A server of `keepsight serve` with these keys, over the method of the command."""
    values = _keys_of_serve(config, keys)
    shared = _model_arguments(config)
    arguments = [sys.executable, "-m", "keepsight", "serve", *shared, *_arguments(values)]
    arguments += [f"name={MODEL_NAME}", f"rows={config.rows}", f"waiting={max(config.requests, 64)}"]
    arguments.append(f"max_new_tokens={max(config.answer_tokens, 16)}")
    is_vllm = bool(keys.get("vllm"))
    prefix: list[str] = []
    if is_vllm:
        arguments += [f"vllm_options={quoted(_vllm_options(config, outline, load))}"]
        if DOCUMENTS in config.workloads:
            arguments.append("prefixes={folder}")
            names = ("method", "budget", "options", "page")
            evicting: dict[str, Any] = {name: values[name] for name in names if name in values}
            prefix = [sys.executable, "-m", "keepsight", "prefix", *shared, *_arguments(evicting)]
    environment = _all_cores(config) if keys.get("reader") == "vllm" else {}
    options_text = json.dumps(keys) if has_options else ""
    return ServerCommand(label, arguments, "port={}", environment, prefix, options_text, is_vllm)


def _keys_of_serve(config: BenchServe, keys: dict[str, Any]) -> dict[str, Any]:
    """The method of the command with its budget and options, and the server's own keys, which count more.

    Raises:
        UserError: a key is none of keepsight serve's, or is set by the benchmark.
    """
    names = {key.name for key in fields(Serve)}
    for key in keys:
        if key not in names or key in _SET_HERE:
            raise UserError(
                f"servers: {key}= is no key of keepsight serve that can be chosen here; leave it out",
                field="servers",
                code="unknown",
            )
    method, _, options = read_method(config.methods[0])
    values: dict[str, Any] = {}
    if keys.get("method") != "full":
        values = {"method": method, "budget": config.budgets[0]}
    values |= keys
    if "method" not in keys:  # the command's options are for its own method
        values["options"] = options | keys["options"]
    if not values["options"]:
        del values["options"]
    return values


def _all_cores(config: BenchServe) -> dict[str, str]:
    """The variable that lets vLLM compute on all cores of a CPU, as our own server does; by default it leaves some."""
    if config.model.device != "cpu":
        return {}
    return {THREADS: ",".join(map(str, cores_of_process()))}


def _stock(config: BenchServe, outline: Target, load: Load, label: str, keys: dict[str, Any]) -> ServerCommand:
    """VLLM's server alone; `keys` are options of its own."""
    source, _, _ = located(config.model.id, config.model.revision, config.model.packaged_file)
    options: dict[str, Any] = {
        "model": str(source),
        "served_model_name": MODEL_NAME,
        "dtype": str(outline.model.dtype).removeprefix("torch."),
        "host": "127.0.0.1",
        "max_num_seqs": config.rows,
        **_vllm_options(config, outline, load),
        **keys,
    }
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    if config.model.device == "cpu":
        arguments.append("--enforce-eager")  # as the others do: compiling takes minutes on a CPU
    for name, value in options.items():
        arguments.append(f"--{name.replace('_', '-')}={value}")
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= _all_cores(config)
    options_text = json.dumps(keys) if keys else ""
    return ServerCommand(label, arguments, "--port={}", environment, options=options_text, needs_vllm=True)


def _vllm_options(config: BenchServe, outline: Target, load: Load) -> dict[str, Any]:
    """Options of every vLLM: the same cache, with room for the full caches of all rows."""
    longest = -(-load.longest // _PAGE) * _PAGE
    cache = (config.rows + 1) * longest * entry_bytes(outline.model)
    return {"kv_cache_memory_bytes": cache, "max_model_len": longest, "block_size": _PAGE}


def _model_arguments(config: BenchServe) -> list[str]:
    """The model and the adapter as arguments."""
    default = ModelConfig()
    arguments = []
    for key in _MODEL_KEYS:
        value = getattr(config.model, key)
        if value != getattr(default, key):
            arguments.append(f"model.{key}={quoted(value)}")
    if config.adapter is not None:
        arguments.append(f"adapter={quoted(config.adapter)}")
    return arguments


def _arguments(values: dict[str, Any]) -> list[str]:
    return [f"{key}={quoted(value)}" for key, value in values.items()]
