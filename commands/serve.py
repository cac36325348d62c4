"""keepsight serve: an OpenAI server over evicted caches, with an engine of its own or beside vLLM's server."""

import asyncio
import importlib.util
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from keepsight.commands.config_serving import Serve as Config
from keepsight.commands.from_recipe import resources_of, target_of, without_weights
from keepsight.commands.variants import letters_for, method_of, paged_allocation, prefix_method
from keepsight.errors import UserError, printable
from keepsight.files import read_bytes, require_writable
from keepsight.models.decoder import context_of
from keepsight.models.model_files import located
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.methods import Resources
from keepsight.serving.choices import with_budget
from keepsight.serving.engine import Engine
from keepsight.serving.hosts import ANY, names_of
from keepsight.serving.inside import evicting_config, evicting_method, looks_back, shortest_evicted
from keepsight.serving.prefix import transfer_config
from keepsight.serving.vllm.access import ADAPTERS, GRACE, HOSTS, MAX_BUDGET, OPEN_METRICS, ORIGINS, STOPPING
from keepsight.serving.worker import Worker

_VLLM_KEYS = "page", "reader", "worker_threads", "min_prompt_tokens", "prefixes", "prefix_bytes", "vllm_options"
"""Keys that have no meaning without vLLM."""
_OUR_KEYS = "sessions", "later_turns", "grace", "read_timeout", "connections", "access_log"
"""Keys of keepsight's own server."""
_VLLM_OWN = (
    "model",
    "tokenizer",
    "served_model_name",
    "host",
    "port",
    "api_key",
    "middleware",
    "kv_transfer_config",
    "allowed_origins",
)
_VLLM_KEY = "VLLM_API_KEY"
"""vLLM's variable of the API key, which `key=` stands before."""
_SHUTDOWN_SECONDS = 25
"""Seconds that vLLM lets running answers take once it is told to stop."""
_END_SECONDS = 5
"""Seconds that vLLM may take to end then."""
THREADS = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable of the cores that it computes on."""
_RANKS = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
"""Options of vLLM with which it divides the cores among processes of its own."""
_LONGEST_SOCKET = 100
"""Bytes of the path of a Unix socket: macOS allows 103, Linux 107."""


def run(config: Config) -> None:
    """Serve until interrupted."""
    if config.key != Config.key and not os.environ.get(config.key):
        raise UserError(
            f"key={config.key}: this variable is not set, so that anybody could ask; set it, or leave key= out",
            field="key",
            code="missing",
        )
    if config.vllm:
        _run_vllm(config)
        return
    for name in _VLLM_KEYS:
        if _is_set(config, name):
            raise UserError(
                f"{name}= is for vLLM's server; leave it out, or add vllm=true", field=name, code="conflict"
            )
    try:
        from keepsight.serving.listener import Listening, server_of
        from keepsight.serving.server import Service
    except ImportError as error:
        raise UserError(
            f"keepsight serve needs {error.name}; run `pip install 'keepsight[serving]'`",
            field=error.name or "serving",
            code="missing",
        ) from None
    session_bytes = _session_bytes(config)
    resources = resources_of(config, without_weights(config))
    method = method_of(config, resources)  # bad values end here
    adapters = _by_adapter(config, resources, method_of)
    _check_max_budget(config, [method, *adapters.values()])
    key = os.environ.get(config.key) or None
    key_variable = config.key if key else None
    hosts = config.hosts
    if not hosts:
        hosts = [ANY] if key else names_of(config.host)
    with closing(listening(config.host, config.port)) as listener:
        target = target_of(config)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        engine = Engine(
            target.model,
            method,
            rows=config.rows,
            waiting=config.waiting,
            max_prompt_tokens=config.max_prompt_tokens,
            prefill_tokens=config.prefill_tokens,
            session_bytes=session_bytes,
            continues=config.later_turns == "continue",
        )
        for other in adapters.values():
            engine.admit(other)
        with engine:
            name = config.name or target.public_name
            service = Service(
                engine,
                target,
                name=name,
                key=key,
                answer_tokens=config.max_new_tokens,
                max_bytes=config.max_bytes,
                max_budget=config.max_budget,
                adapters=adapters,
                read_timeout=config.read_timeout,
                hosts=hosts,
                origins=config.origins,
                open_metrics=config.open_metrics,
            )
            options = Listening(
                config.grace, config.keep_alive, config.read_timeout, config.connections, config.access_log
            )
            server = server_of(service.app(), engine, options)
            host, port = listener.getsockname()[:2]
            url = f"{_address(host, port)}/v1"
            method_text = f"{config.method}, budget {config.budget}"
            print(printable(f"serving {name} at {url} with {method_text}; {_key_note(key_variable)}"))
            print(printable(f"next: {request_line(url, name, key_variable)}"))
            sys.stdout.flush()
            try:
                server.run(sockets=[listener])
            except KeyboardInterrupt:  # raised by either signal, once everything has ended
                print("stopped", file=sys.stderr)


def _by_adapter(config: Config, resources: Resources, make: Callable[[Config, Resources], Method]) -> dict[str, Evict]:
    """The method with each of the adapters that requests may choose, by name.

    Raises:
        UserError: an adapter cannot be loaded or is for another model, or the method observes with none.
    """
    methods: dict[str, Evict] = {}
    for name, reference in config.adapters.items():
        try:
            method = make(config, resources.with_modules(adapter=reference))
        except UserError as error:
            raise error.reworded(f"adapters={{{name}: {reference}}}: {error}") from None
        if not isinstance(method, Evict) or method.adapter_digest is None:
            raise UserError(
                f"adapters={{{name}: {reference}}}: {config.method} observes with no adapter; leave adapters= out",
                field="adapters",
                code="conflict",
            )
        methods[name] = method
    return methods


def _check_max_budget(config: Config, methods: Sequence[Method]) -> None:
    """UserError for a `max_budget` that a method cannot have."""
    if config.max_budget is None:
        return
    for method in methods:
        try:
            with_budget(method, config.max_budget)
        except UserError as error:
            raise error.reworded(f"max_budget={config.max_budget}: {error}") from None


def _session_bytes(config: Config) -> int:
    """Bytes of the states that are kept; 0 for none."""
    if config.sessions.strip() == "0":
        return 0
    try:
        return read_bytes(config.sessions)
    except UserError as error:
        raise UserError(f"sessions={error}, or 0 for none", field="sessions", code=error.code) from None


def _is_set(config: Config, name: str) -> bool:
    """Whether a key has another value than its default."""
    return bool(getattr(config, name) != getattr(Config(), name))


def _key_note(variable: str | None) -> str:
    """Says where the API key of requests is, if they need one: in an environment variable."""
    return f"requests need the key in {variable}" if variable else "requests need no key"


# Beside vLLM's server


def _run_vllm(config: Config) -> None:
    """Serve until interrupted; UserError for what cannot be served, and when vLLM's server ends."""
    _check_vllm(config)
    from keepsight.serving.vllm.folder import server_folder  # where there are Unix sockets

    outline = without_weights(config)
    resources = resources_of(config, outline)
    method = prefix_method(config, resources)  # bad values end here
    adapters = _by_adapter(config, resources, prefix_method)
    _check_max_budget(config, [method, *adapters.values()])
    evict = _evict_options(config) if config.reader == "vllm" else None
    target = outline if evict else target_of(config)
    min_prompt_tokens = _min_prompt_tokens(config, target)
    prefix_bytes = read_bytes(config.prefix_bytes)
    with server_folder() as folder, _prefix_folder(folder, prefix_bytes) as plain_prefixes:
        # Clients name prefixes of the first folder alone; those of the second are made and removed by this server.
        named_prefixes = Path(config.prefixes or Path(folder, "named"))
        named_prefixes.mkdir(parents=True, exist_ok=True)
        plain_prefixes.mkdir(parents=True, exist_ok=True)
        source, _, _ = located(config.model.id, config.model.revision, config.model.packaged_file)
        tokenizer = Path(folder, "tokenizer")
        stopping = Path(folder, "stopping")
        context = context_of(target.model)
        environment = _environment(config, min_prompt_tokens, context, source, tokenizer, named_prefixes)
        environment[STOPPING] = str(stopping)
        environment[ORIGINS] = json.dumps(config.origins)
        if config.hosts:
            environment[HOSTS] = json.dumps(config.hosts)
        shutdown_timeout = _shutdown_timeout(config)
        environment[GRACE] = str(max(shutdown_timeout - 2, 0.5))

        worker = None
        if evict:
            transfer = evicting_config(named_prefixes, plain_prefixes, evict)
            environment["KEEPSIGHT_EVICT"] = "1"
        else:
            transfer = transfer_config(named_prefixes, plain_prefixes)
            _divide_threads(config, target, environment)
            worker = Worker(
                target,
                method,
                plain_prefixes,
                adapters=adapters,
                page=config.page,
                waiting=config.waiting,
                max_bytes=prefix_bytes,
                max_tokens=config.max_prompt_tokens,
            )
            environment["KEEPSIGHT_WORKER"] = str(_started(worker, folder))

        port = _port_of(config)
        arguments = [*_arguments(config, target, source, tokenizer, transfer), f"--port={port}"]
        key_variable = None
        if os.environ.get(config.key):
            key_variable = config.key
        elif os.environ.get(_VLLM_KEY):
            key_variable = _VLLM_KEY

        try:
            with _child(arguments, environment, shutdown_timeout) as child, _stopped_before(worker, stopping):
                _wait_for(child, config.host, port)
                name = config.name or target.public_name
                url = f"{_address(config.host, port)}/v1"
                method_text = (
                    f"{config.method}, budget {config.budget}, for prompts of {min_prompt_tokens} tokens or more"
                )
                print(printable(f"vLLM serves {name} at {url} with {method_text}; {_key_note(key_variable)}"))
                print(printable(f"next: {request_line(url, name, key_variable)}"), flush=True)
                raise UserError(
                    f"vLLM's server ended with status {child.wait()}; its last lines say why",
                    field="vllm",
                    code="service",
                )
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
        finally:
            if worker is not None:
                worker.close()


@contextmanager
def _prefix_folder(folder: Path, nbytes: int) -> Iterator[Path]:
    """A folder for so many bytes of prefixes: in memory, or in the server's own folder where memory has less room."""
    from keepsight.serving.vllm.folder import memory_folder, server_folder

    memory = memory_folder(nbytes)
    if memory is None:
        yield Path(folder, "prefixes")
        return
    with server_folder(memory) as in_memory:
        yield in_memory


def _started(worker: Worker, folder: Path) -> Path:
    """The socket at which the worker serves, in a thread of its own."""
    worker_socket = Path(folder, "worker.sock")
    if len(os.fsencode(worker_socket)) > _LONGEST_SOCKET:
        raise UserError(
            f"{folder}: too long for the path of a socket; set TMPDIR to a shorter folder",
            field="TMPDIR",
            code="file",
        )
    threading.Thread(target=asyncio.run, args=(worker.serve(worker_socket),), name="worker", daemon=True).start()
    return worker_socket


def _evict_options(config: Config) -> dict[str, Any]:
    """The method as vLLM's connector takes it.

    Raises:
        UserError: the method cannot run inside vLLM.
    """
    options = {"name": config.method, "budget": config.budget, **config.options}
    if config.page:
        options["allocate"] = {**paged_allocation(config), "name": "global"}
    refusal = f"reader=vllm: {config.method} needs a pass of its own after the prompt; choose method=snapkv, or leave "
    try:
        method = evicting_method(options, config.page, ragged=config.page > 0)
    except UserError as error:
        if error.code == "model":
            raise UserError(f"{refusal}reader= out", field="reader", code="conflict") from None
        raise
    if looks_back(method):
        raise UserError(f"{refusal}reader= out", field="reader", code="conflict")
    return options


def _divide_threads(config: Config, target: Target, environment: dict[str, str]) -> None:
    """Give the worker so many cores, and vLLM's process the others; the operator's own division comes first."""
    if target.model.device.type != "cpu" or environment.get(THREADS):
        return
    if any(_vllm_options(config).get(name, 1) != 1 for name in _RANKS):
        return
    cores = cores_of_process()
    threads = config.worker_threads or min(max(len(cores) // 2, 1), torch.get_num_threads())
    torch.set_num_threads(threads)
    environment[THREADS] = ",".join(map(str, cores[threads:] or cores[-1:]))


def cores_of_process() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def _stopped_before(worker: Worker | None, stopping: Path) -> Iterator[None]:
    """Refuse new and waiting requests before vLLM's server is told to stop, while running answers end."""
    try:
        yield
    finally:
        with suppress(OSError):
            stopping.touch()
        if worker is not None:
            worker.stop()


def _address(host: str, port: int) -> str:
    """The URL of a server; IPv6 addresses stand in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def request_line(url: str, name: str, key: str | None) -> str:
    """A curl command with an example request; `key` is the variable with the API key, None without one."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 16})
    authorization = f' -H "Authorization: Bearer ${key}"' if key else ""
    return f"curl {url}/chat/completions{authorization} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def _check_vllm(config: Config) -> None:
    """UserError for values that vLLM's server cannot have, before anything loads."""
    for name in _OUR_KEYS:
        if _is_set(config, name):
            raise UserError(
                f"{name}= is for keepsight's own server; leave it out, or leave out vllm=true",
                field=name,
                code="conflict",
            )
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vllm=true needs vLLM beside keepsight, in an environment of its own: in a clone, run `make setup-vllm`; "
            "elsewhere, install 'vllm>=0.32,<0.34' there",
            field="vllm",
            code="missing",
        )
    if config.model.quantize:
        raise UserError(
            f"model.quantize={config.model.quantize}: vLLM serves the model's own weights; leave it out",
            field="model.quantize",
            code="conflict",
        )
    _shutdown_timeout(config)
    for name in config.vllm_options:
        if name.replace("-", "_") in _VLLM_OWN:
            raise UserError(
                f"vllm_options={{{name}: ...}} is set by keepsight itself; leave it out",
                field="vllm_options",
                code="conflict",
            )
    if config.page and isinstance(config.budget, int) and 0 < config.min_prompt_tokens <= config.budget:
        raise UserError(
            f"min_prompt_tokens={config.min_prompt_tokens}: with page={config.page} it must be above the budget, "
            f"{config.budget}",
            field="min_prompt_tokens",
            code="range",
        )
    if config.reader == "vllm" and config.adapters:
        raise UserError("adapters= is for reader=worker; leave one of them out", field="adapters", code="conflict")
    if config.reader == "vllm" and config.worker_threads:
        raise UserError(
            "worker_threads= is for reader=worker; leave one of them out", field="worker_threads", code="conflict"
        )
    cores = len(cores_of_process())
    if config.worker_threads >= cores > 1:
        raise UserError(
            f"worker_threads={config.worker_threads} leaves vLLM none of {cores} cores; give at most {cores - 1}",
            field="worker_threads",
            code="range",
        )
    if config.prefixes is not None and not Path(config.prefixes).is_dir():
        require_writable(Path(config.prefixes), key="prefixes")
    read_bytes(config.prefix_bytes)
    _port_of(config)


def _min_prompt_tokens(config: Config, target: Target) -> int:
    """Length of the shortest prompt to evict from; its kept entries must encode an id."""
    budget = config.budget
    letters = letters_for(target, budget)
    fewest_tokens = letters if isinstance(budget, int) else math.ceil(letters / budget)
    if config.min_prompt_tokens == 0:
        return shortest_evicted(budget, letters)
    if config.min_prompt_tokens < fewest_tokens:
        raise UserError(
            f"min_prompt_tokens={config.min_prompt_tokens}: what budget={budget} keeps of so few cannot spell an id of "
            f"{letters} letters; give at least {fewest_tokens}",
            field="min_prompt_tokens",
            code="range",
        )
    return config.min_prompt_tokens


def _arguments(
    config: Config, target: Target, source: str | Path, tokenizer: Path, transfer: dict[str, Any]
) -> list[str]:
    """The arguments of vLLM's server, for which the tokenizer is written to a folder."""
    target.tokenizer.save_pretrained(str(tokenizer))  # with the arguments of model.template
    target.model.config.save_pretrained(str(tokenizer))
    options: dict[str, Any] = {
        "model": source,
        "tokenizer": tokenizer,
        "served_model_name": config.name or target.public_name,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "host": config.host,
        "max_num_seqs": config.rows,
        "override_generation_config": json.dumps({"max_new_tokens": config.max_new_tokens}),
        "middleware": "keepsight.serving.vllm.middleware.Prefixes",
        "allowed_origins": config.origins,
        "kv_transfer_config": json.dumps(transfer),
        "enforce_eager": target.model.device.type in ("cpu", "meta"),  # compiling takes minutes on CPUs
        "trust_remote_code": config.model.trust_remote_code,
        "shutdown_timeout": _SHUTDOWN_SECONDS,
    }
    if config.model.revision and isinstance(source, str):
        options["revision"] = config.model.revision
    if config.page:
        options["block_size"] = config.page
    if config.max_prompt_tokens:
        options["max_model_len"] = config.max_prompt_tokens + config.max_new_tokens
    options.update(_vllm_options(config))

    arguments = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            if value:
                arguments.append(flag)
        elif isinstance(value, dict | list):
            arguments.append(f"{flag}={json.dumps(value)}")
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def _vllm_options(config: Config) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in config.vllm_options.items()}


def _environment(
    config: Config,
    min_prompt_tokens: int,
    context: int,
    source: str | Path,
    tokenizer: Path,
    prefixes: Path,
) -> dict[str, str]:
    """The environment of vLLM's server: this process's, with what the middleware reads."""
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(config.keep_alive),
        "DO_NOT_TRACK": "1",
        **os.environ,
        "KEEPSIGHT_ROOT": str(prefixes),
        "KEEPSIGHT_MODEL": str(source),
        "KEEPSIGHT_TOKENIZER": str(tokenizer),
        "KEEPSIGHT_LEAST": str(min_prompt_tokens),
        "KEEPSIGHT_CONTEXT": str(context),
        "KEEPSIGHT_ANSWER": str(config.max_new_tokens),
        "KEEPSIGHT_MAX_BYTES": str(config.max_bytes),
        "KEEPSIGHT_PREFIX_BYTES": config.prefix_bytes,
        "KEEPSIGHT_RAGGED": str(int(config.page > 0)),
        MAX_BUDGET: str(config.budget if config.max_budget is None else config.max_budget),
        ADAPTERS: json.dumps([*config.adapters]),
        OPEN_METRICS: str(int(config.open_metrics)),
        # Not in the arguments, which every user sees.
        _VLLM_KEY: os.environ.get(config.key) or os.environ.get(_VLLM_KEY, ""),
    }


def _shutdown_timeout(config: Config) -> float:
    """Seconds that vLLM lets running answers take once it is told to stop."""
    seconds = _vllm_options(config).get("shutdown_timeout", _SHUTDOWN_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or seconds < 0:
        raise UserError(
            f"vllm_options={{shutdown_timeout: {seconds}}}: give a whole number of seconds",
            field="vllm_options",
            code="type",
        )
    return seconds


@contextmanager
def _child(
    arguments: list[str], environment: dict[str, str], shutdown_timeout: float
) -> Iterator["subprocess.Popen[bytes]"]:
    """VLLM's server in a process group of its own, which ends with this process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = [sys.executable, "-m", "keepsight.serving.vllm.launch", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        yield child
    finally:
        child.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait(shutdown_timeout + _END_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _wait_for(child: "subprocess.Popen[bytes]", host: str, port: int) -> None:
    """Wait until the server answers; UserError if it ends before."""
    local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    while True:
        try:
            with urllib.request.urlopen(f"{_address(local_host, port)}/health", timeout=5):
                return
        except OSError:
            status = child.poll()
            if status is not None:
                raise UserError(
                    f"vLLM's server ended with status {status} at once; its last lines say why",
                    field="vllm",
                    code="service",
                ) from None
            time.sleep(0.2)


def _port_of(config: Config) -> int:
    """The port, or a free one in place of 0; UserError as in `listening`."""
    with closing(listening(config.host, config.port)) as listener:
        return int(listener.getsockname()[1])


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens before the model is loaded; UserError for a port in use or an unknown host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UserError(f"host={host} port={port}: {error}; choose others", field="port", code="service") from None
