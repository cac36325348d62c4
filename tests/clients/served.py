"""Servers of a tiny model for real clients, and what `generate` answers."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight import SnapKV
from keepsight.models.targets import Target
from keepsight.runtime.generate import generate
from keepsight.serving.engine import Engine
from tests.package_files import ROOT
from tests.serving.loopback import METHOD
from tests.serving.vllm.stock import free_port, process

TOKENS = 12
VLLM_BUDGET = 96
PROMPTS = [f"{number} ships sailed on the sea. " * (2 + number % 9) for number in range(32)]
QUICK = pytest.mark.slow
"""Also a part of `make test-slow`."""


@dataclass
class Served:
    """A server of the model `tiny`; its engine where that is in this process, else its process."""

    url: str
    target: Target
    engine: Engine | None = None
    process: "subprocess.Popen[bytes] | None" = None
    _answers: dict[tuple[str, str, int], str] = field(default_factory=dict)

    def expected(self, kind: str, prompt: str, tokens: int = TOKENS) -> str:
        """The text of `generate`'s answer, from what the server keeps of a prompt."""
        key = (kind, prompt, tokens)
        if key not in self._answers:
            self._answers[key] = self._answer(*key)
        return self._answers[key]

    def _answer(self, kind: str, prompt: str, tokens: int) -> str:
        model = self.target.model
        tokenizer: Any = self.target.tokenizer
        if kind == "chat":
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        options: dict[str, Any] = {"max_new_tokens": tokens}
        if self.engine is not None:
            answer = generate(model, ids, METHOD, **options)
        elif ids.shape[1] < 2 * VLLM_BUDGET:
            answer = generate(model, ids, **options)
        else:  # the worker reads all but the last token
            with torch.no_grad():
                state = SnapKV(VLLM_BUDGET, window=8).start(model, ids[:, :-1])
            answer = generate(model, ids[:, -1:], state.unrecorded(), **options)
        text: str = tokenizer.decode(answer[0], skip_special_tokens=True)
        return text


@contextmanager
def starting_beside_vllm(target: Target, folder: Path, log: Path) -> Iterator[Served]:
    """Our server beside vLLM's, whose parser reads the calls of tools."""
    python = python_of("VLLM_VENV", ".venv-vllm", "make setup-vllm")
    port = free_port()
    vllm_options = [
        "kv_cache_memory_bytes: 134217728",
        "enable_auto_tool_choice: true",
        "tool_call_parser: hermes",
        "shutdown_timeout: 120",  # a busy machine answers slowly
    ]
    arguments = [
        f"model.id={folder}",
        "model.device=cpu",
        "model.dtype=float32",
        "method=snapkv",
        f"budget={VLLM_BUDGET}",
        "options={window: 8}",
        "vllm=true",
        f"port={port}",
        "name=tiny",
        "max_new_tokens=2000",
        "max_bytes=65536",
        f"vllm_options={{{', '.join(vllm_options)}}}",
    ]
    command = [python, "-m", "keepsight", "serve", *arguments]
    environment = {
        "KEEPSIGHT_API_KEY": "any",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    with process(f"http://127.0.0.1:{port}", log, *command, **environment) as server:
        yield Served(server.url, target, process=server.process)


def python_of(variable: str, default: str, command: str) -> str:
    """The interpreter of an environment; an error that says how to make it."""
    python = Path(os.environ.get(variable, ROOT / default), "bin/python")
    if not python.exists():
        pytest.fail(f"{python} is missing: run `{command}`, or name another folder in {variable}")
    return str(python)


def client_command(script: str, *arguments: str) -> list[str]:
    """A script of this folder in the environment of the clients."""
    python = python_of("CLIENTS_VENV", ".venv-clients", "make setup-clients")
    return [python, str(Path(__file__).with_name(script)), *arguments]


def environment_without_paths() -> dict[str, str]:
    """This process's environment, without what would let another one import its packages."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment.pop("OPENAI_API_KEY", None)
    return environment | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def outcomes_of(script: str, *arguments: str, cases: Any, folder: Path) -> list[dict[str, Any]]:
    """What a client prints that is given some cases."""
    finished = subprocess.run(
        client_command(script, *arguments),
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=900,
        env=environment_without_paths(),
        cwd=folder,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return list(json.loads(finished.stdout.splitlines()[-1]))
