"""keepsight serve vllm=true: vLLM's server, and beside it a worker that reads and evicts from long prompts for it."""

import asyncio
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keepsight.commands.config_serving import Serve as Config
from keepsight.commands.from_recipe import resources_later, resources_of, target_of
from keepsight.commands.variants import prefix_method
from keepsight.errors import UserError, printable
from keepsight.files import require_writable
from keepsight.models.model_files import located
from keepsight.models.targets import Target
from keepsight.serving.prefix import alphabet_of, letters_of
from keepsight.serving.worker import Worker

KEYS = "page", "min_prompt_tokens", "prefixes", "vllm_options"
"""Keys that mean nothing without vLLM."""
_OWN = "model", "tokenizer", "served_model_name", "host", "port", "api_key", "middleware", "kv_transfer_config"
_GRACE = 30.0
"""Seconds that vLLM has to end in."""


def run(config: Config) -> None:
    """Serve until interrupted, or until vLLM's server ends.

    Raises:
        UserError: a value cannot be served, vLLM is not installed, or its server ended.
    """
    _check(config)
    prefix_method(config, resources_later(config))  # bad values end here, before anything loads
    target = target_of(config)
    method = prefix_method(config, resources_of(config, target))
    with TemporaryDirectory(prefix="keepsight-") as made:
        root = Path(config.prefixes or made, *(() if config.prefixes else ("prefixes",)))
        root.mkdir(parents=True, exist_ok=True)
        worker = Worker(target, method, root, page=config.page, waiting=config.waiting)
        at = Path(made, "worker.sock")
        threading.Thread(target=asyncio.run, args=(worker.serve(at),), name="worker", daemon=True).start()
        port = config.port or _free_port(config.host)
        source, _, _ = located(config.model.id, config.model.revision, config.model.own_file)
        command = [*_command(config, target, source, root, Path(made, "tokenizer")), f"--port={port}"]
        try:
            with _child(command, _environment(config, target, source, root, at)) as child:
                _wait_for(child, config.host, port)
                name, url = config.name or target.public_name, f"http://{config.host}:{port}/v1"
                print(printable(f"{name} at {url} by vLLM, {method} from {_least(config, target)} tokens"), flush=True)
                raise UserError(f"vLLM's server ended with status {child.wait()}; its last lines tell why")
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
        finally:
            worker.remove_made()


def _check(config: Config) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vllm=true needs vLLM; run `make setup-vllm`, or `pip install 'keepsight[vllm,serving]'`")
    if config.model.quantize:
        raise UserError(f"model.quantize={config.model.quantize}: vLLM serves the model's own weights; leave it out")
    for name in config.vllm_options:
        if name.replace("-", "_") in _OWN:
            raise UserError(f"vllm_options={{{name}: ...}} is set by keepsight itself; leave it out")
    if config.prefixes is not None:
        require_writable(Path(config.prefixes))
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((config.host, config.port))
        except OSError as error:
            raise UserError(f"host={config.host} port={config.port}: {error}; choose others") from None


def _least(config: Config, target: Target) -> int:
    """Shortest prompt that is evicted from; its entries spell an id."""
    letters, budget = letters_of(len(alphabet_of(target.tokenizer))), config.budget
    if isinstance(budget, int) and budget < letters:
        raise UserError(f"budget={budget} entries cannot spell an id of {letters} letters; raise budget=")
    twice = 2 * budget if isinstance(budget, int) else math.ceil(2 * letters / budget)
    return config.min_prompt_tokens or int(twice)


def _command(config: Config, target: Target, source: str | Path, root: Path, tokenizer: Path) -> list[str]:
    target.tokenizer.save_pretrained(str(tokenizer))  # with the arguments of model.template
    target.model.config.save_pretrained(str(tokenizer))
    transfer = {
        "kv_connector": "KeepsightConnector",
        "kv_connector_module_path": "keepsight.serving.vllm.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"root": str(root)},
    }
    given: dict[str, Any] = {
        "model": source,
        "tokenizer": tokenizer,
        "served_model_name": config.name or target.public_name,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "host": config.host,
        "max_num_seqs": config.rows,
        "override_generation_config": json.dumps({"max_new_tokens": config.max_new_tokens}),
        "middleware": "keepsight.serving.vllm.middleware.Prefixes",
        "kv_transfer_config": json.dumps(transfer),
        "enforce_eager": target.model.device.type == "cpu",  # compiling takes minutes there
        "trust_remote_code": config.model.trust_remote_code,
    }
    given |= {"revision": config.model.revision} if config.model.revision and isinstance(source, str) else {}
    given |= {"block_size": config.page} if config.page else {}
    given |= {"max_model_len": config.max_prompt_tokens + config.max_new_tokens} if config.max_prompt_tokens else {}
    given |= {name.replace("-", "_"): value for name, value in config.vllm_options.items()}
    return [part for name, value in given.items() if (part := _option(name, value))]


def _option(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else ""
    return f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"


def _environment(config: Config, target: Target, source: str | Path, root: Path, at: Path) -> dict[str, str]:
    own = {
        "KEEPSIGHT_ROOT": str(root),
        "KEEPSIGHT_MODEL": str(source),
        "KEEPSIGHT_WORKER": str(at),
        "KEEPSIGHT_LEAST": str(_least(config, target)),
        "KEEPSIGHT_MAX_BYTES": str(config.max_bytes),
        "KEEPSIGHT_RAGGED": str(int(config.page > 0)),
        "VLLM_API_KEY": os.environ.get(config.key, ""),  # not in the arguments, which every user sees
    }
    return {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **os.environ, **own}


@contextmanager
def _child(arguments: list[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """VLLM's server in a process group of its own, which ends with this process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = [sys.executable, "-m", "keepsight.serving.vllm.launch", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_group(child.pid)


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _wait_for(child: "subprocess.Popen[bytes]", host: str, port: int) -> None:
    """Until the server answers.

    Raises:
        UserError: it ended.
    """
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    while True:
        try:
            with urllib.request.urlopen(f"http://{local}:{port}/health", timeout=5):
                return
        except OSError:
            if (code := child.poll()) is not None:
                raise UserError(
                    f"vLLM's server ended with status {code} before it answered; its last lines tell why"
                ) from None
            time.sleep(0.2)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listening:
        return int(listening.getsockname()[1])
