"""Real clients against our own server on loopback: every greedy answer in float32 is that of `generate`.

They run in an environment of their own (`make setup-clients`), `vllm bench serve` in vLLM's (`make setup-vllm`).
"""

import itertools
import json
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from keepsight import SnapKV
from keepsight.models.targets import Target
from keepsight.runtime.generate import generate
from keepsight.serving.engine import Engine
from tests.package_files import ROOT
from tests.serving.loopback import METHOD, serving, wait_until
from tests.serving.vllm.stock import free_port, process, stock_target

pytestmark = pytest.mark.clients
ASK = Path(__file__).with_name("ask.py")
TOKENS = 12
REPLACEMENT = "\ufffd"
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`: the command itself asks for the version of a package `vllm`, which the CPU build is not."""
VLLM_BUDGET = 96
PROMPTS = [f"{number} ships sailed on the sea. " * (2 + number % 9) for number in range(32)]
SCHEMA = {
    "type": "object",
    "properties": {"ship": {"enum": ["sloop", "brig"]}, "masts": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["ship", "masts"],
    "additionalProperties": False,
}
QUICK = pytest.mark.slow
"""Also a part of `make test-slow`."""


@dataclass
class Served:
    """A server of the model `tiny`; its engine where that is in this process."""

    url: str
    target: Target
    engine: Engine | None = None

    def expected(self, kind: str, prompt: str) -> str:
        """The text of `generate`'s answer, from what the server keeps of a prompt."""
        model = self.target.model
        tokenizer: Any = self.target.tokenizer
        if kind == "chat":
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        options: dict[str, Any] = {"max_new_tokens": TOKENS}
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("clients")) / "model"


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return stock_target(folder)


@pytest.fixture(scope="module")
def own(target: Target) -> Iterator[Served]:
    with serving(target, rows=16) as (url, engine):
        yield Served(url, target, engine)


@pytest.fixture(scope="module")
def beside_vllm(target: Target, folder: Path) -> Iterator[Served]:
    python = python_of("VLLM_VENV", ".venv-vllm", "make setup-vllm")
    port = free_port()
    command = [python, "-m", "keepsight", "serve", f"model.id={folder}", "model.device=cpu", "model.dtype=float32"]
    command += [
        "method=snapkv",
        f"budget={VLLM_BUDGET}",
        "options={window: 8}",
        "vllm=true",
        f"port={port}",
        "name=tiny",
    ]
    command += ["max_new_tokens=2000", "vllm_options={kv_cache_memory_bytes: 134217728}"]
    environment = {
        "KEEPSIGHT_API_KEY": "any",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    with process(f"http://127.0.0.1:{port}", folder.parent / "serve.log", *command, **environment) as server:
        yield Served(server.url, target)


def python_of(variable: str, default: str, command: str) -> str:
    """The interpreter of an environment; an error that says how to make it."""
    python = Path(os.environ.get(variable, ROOT / default), "bin/python")
    if not python.exists():
        pytest.fail(f"{python} is missing: run `{command}`, or name another folder in {variable}")
    return str(python)


CLIENTS = {"openai": 51, "litellm": 44, "langchain-openai": 42, "llm": 8, "inspect-ai": 32, "lm-eval": 32}
"""How many texts each of them asks for."""


def ask_as(client: str, served: Served, folder: Path) -> None:
    """Let a client ask, and compare what it got."""
    python = python_of("CLIENTS_VENV", ".venv-clients", "make setup-clients")
    cases = {"prompts": PROMPTS, "tokens": TOKENS, "schema": SCHEMA}
    done = subprocess.run(
        [python, str(ASK), client, served.url, str(folder)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=900,
        env=environment_without_paths() | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    answers = 0
    for answer in found:
        if answer["kind"] == "json":
            ship = json.loads(answer["text"])
            assert ship["ship"] in ("sloop", "brig") and 1 <= ship["masts"] <= 9
        elif answer["kind"] == "refused":
            assert answer["prompt"] in answer["text"]
        else:
            expected = served.expected(answer["kind"], answer["prompt"])
            if served.engine is None:  # vLLM leaves out bytes at an answer's end that are no whole character
                expected = expected.rstrip(REPLACEMENT)
                answer["text"] = answer["text"].rstrip(REPLACEMENT)
            assert answer["text"] == expected
            answers += 1
    assert answers == CLIENTS[client]


def environment_without_paths() -> dict[str, str]:
    """This process's environment, without what would let another one import its packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}


@pytest.mark.parametrize("client", [pytest.param("openai", marks=QUICK), *list(CLIENTS)[1:]])
def test_answers_are_those_of_generate(client: str, own: Served, tmp_path: Path) -> None:
    """Chats, streams, completions, JSON of a schema, 32 at once, an answer that is left in the middle."""
    engine = own.engine
    assert engine is not None
    cancelled_before = engine.totals.ended["cancelled"]
    ask_as(client, own, tmp_path)
    if client == "openai":
        wait_until(lambda: engine.totals.ended["cancelled"] > cancelled_before)
    wait_until(lambda: engine.load == (0, 0))


@pytest.mark.parametrize("client", CLIENTS)
def test_answers_beside_vllm_are_those_of_generate(client: str, beside_vllm: Served, tmp_path: Path) -> None:
    ask_as(client, beside_vllm, tmp_path)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize("server", ["own", "beside_vllm"])
def test_vllm_bench_serve(
    server: str, backend: str, folder: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    served: Served = request.getfixturevalue(server)
    python = python_of("VLLM_VENV", ".venv-vllm", "make setup-vllm")
    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    command = [python, "-c", BENCH, "--backend", backend]
    command += ["--base-url", served.url, "--endpoint", endpoint, "--model", "tiny", "--tokenizer", str(folder)]
    command += ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "16", "--ignore-eos"]
    command += [
        "--num-prompts",
        "32",
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "result.json",
    ]
    environment = environment_without_paths() | {"OPENAI_API_KEY": "any", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 32 and result["total_output_tokens"] == 32 * 16, result


@pytest.mark.parametrize("requests", [pytest.param(300, marks=QUICK), 1000])
def test_memory_stays_after_mixed_requests(requests: int, target: Target) -> None:
    """Of all lengths and options, some left in the middle, some refused; beside sessions that fill their room."""
    with serving(target, rows=16, session_bytes=1 << 23, continues=True) as (url, engine):

        def ask(number: int) -> None:
            dice = random.Random(number)
            body: dict[str, Any] = {
                "model": "tiny",
                "max_tokens": dice.randint(1, 24),
                "temperature": dice.choice([0, 1]),
            }
            text = dice.choice(PROMPTS) * dice.randint(1, 6)
            path = dice.choice(["/v1/completions", "/v1/chat/completions"])
            body |= {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
            body |= dice.choice(
                [{}, {"n": 2}, {"top_p": 0.5}, {"stop": ["a"]}, {"n": 0}, {"cache_salt": str(number % 9)}]
            )
            if dice.random() < 0.3:
                with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=120) as reply:
                    list(itertools.islice(reply.iter_lines(), dice.randint(1, 9)))
                return
            status = httpx.post(url + path, json=body, timeout=120).status_code
            assert status == (400 if body.get("n") == 0 else 200)

        def resident() -> float:
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            (value,) = (line.split()[1] for line in lines if line.startswith("process_resident_memory_bytes "))
            return float(value) / 2**20

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(requests // 2)))
            wait_until(lambda: engine.load == (0, 0))
            before = resident()
            list(pool.map(ask, range(requests // 2, requests)))
        wait_until(lambda: engine.load == (0, 0))
        assert resident() < before + 24, "MiB"
        assert engine.totals.ended["failed"] == 0 and engine.totals.ended["cancelled"] > 0
        assert 0 < engine.sessions.nbytes <= engine.sessions.max_bytes
