"""Real clients against our own server and the one beside vLLM: every greedy answer in float32 is that of `generate`.

They run in an environment of their own (`make setup-clients`), `vllm bench serve` in vLLM's (`make setup-vllm`).
"""

import itertools
import json
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from keepsight.models.targets import Target
from tests.clients.served import PROMPTS, QUICK, TOKENS, Served, environment_without_paths, outcomes_of, python_of
from tests.serving.loopback import metrics_of, serving, wait_until

pytestmark = pytest.mark.clients
REPLACEMENT = "\ufffd"
KEY = {"authorization": "Bearer any"}
MOST_TOKENS = 24
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`: the command itself asks for the version of a package `vllm`, which the CPU build is not."""
SCHEMA = {
    "type": "object",
    "properties": {"ship": {"enum": ["sloop", "brig"]}, "masts": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["ship", "masts"],
    "additionalProperties": False,
}

CLIENTS = {"openai": 51, "litellm": 44, "langchain-openai": 42, "llm": 8, "inspect-ai": 32, "lm-eval": 32}
"""How many texts each of them asks for."""


def ask_as(client: str, served: Served, folder: Path) -> None:
    """Let a client ask, and compare what it got."""
    cases = {"prompts": PROMPTS, "tokens": TOKENS, "schema": SCHEMA}
    answers = outcomes_of("ask.py", client, served.url, str(folder), cases=cases, folder=folder)
    compared = 0
    for answer in answers:
        if answer["kind"] == "json":
            ship = json.loads(answer["text"])
            assert ship["ship"] in ("sloop", "brig")
            assert 1 <= ship["masts"] <= 9
        elif answer["kind"] == "refused":
            assert answer["prompt"] in answer["text"]
        else:
            expected = served.expected(answer["kind"], answer["prompt"])
            assert comparable(answer["text"], served) == comparable(expected, served)
            compared += 1
    assert compared == CLIENTS[client]


def comparable(text: str, served: Served) -> str:
    """A text without what servers write in different ways.

    vLLM leaves out bytes at an answer's end that are no whole character.
    """
    return text if served.engine is not None else text.rstrip(REPLACEMENT)


@pytest.mark.parametrize("client", [pytest.param("openai", marks=QUICK), *list(CLIENTS)[1:]])
def test_answers_are_those_of_generate(client: str, our_server: Served, tmp_path: Path) -> None:
    """Chats, streams, completions, JSON of a schema, 32 at once, an answer that is left in the middle."""
    engine = our_server.engine
    assert engine is not None
    cancelled_before = engine.totals.ended["cancelled"]
    ask_as(client, our_server, tmp_path)
    if client == "openai":
        wait_until(lambda: engine.totals.ended["cancelled"] > cancelled_before)
    wait_until(lambda: engine.load == (0, 0))


@pytest.mark.parametrize("client", CLIENTS)
def test_answers_beside_vllm_are_those_of_generate(client: str, beside_vllm: Served, tmp_path: Path) -> None:
    ask_as(client, beside_vllm, tmp_path)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize("server", ["our_server", "beside_vllm"])
def test_vllm_bench_serve(
    server: str, backend: str, folder: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    served: Served = request.getfixturevalue(server)
    options = {
        "--backend": backend,
        "--base-url": served.url,
        "--endpoint": "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions",
        "--model": "tiny",
        "--tokenizer": str(folder),
        "--dataset-name": "random",
        "--random-input-len": "200",
        "--random-output-len": "16",
        "--num-prompts": "32",
        "--result-dir": str(tmp_path),
        "--result-filename": "result.json",
    }
    python = python_of("VLLM_VENV", ".venv-vllm", "make setup-vllm")
    command = [python, "-c", BENCH, "--ignore-eos", "--save-result"]
    for name, value in options.items():
        command += [name, value]
    environment = environment_without_paths() | {"OPENAI_API_KEY": "any", "HF_HUB_OFFLINE": "1"}
    bench = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=tmp_path)
    assert bench.returncode == 0, bench.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 32, result
    assert result["total_output_tokens"] == 32 * 16, result


class Mixed:
    """A request of a number: of any length and with any options, left in the middle, refused, or greedy."""

    def __init__(self, number: int) -> None:
        dice = random.Random(number)
        self.path = dice.choice(["/v1/completions", "/v1/chat/completions"])
        self.kind = "chat" if "chat" in self.path else "completion"
        self.tokens = dice.randint(1, MOST_TOKENS)
        self.prompt = dice.choice(PROMPTS[:8]) * dice.randint(1, 3)
        is_greedy = dice.random() < 0.5
        self.body: dict[str, Any] = {"model": "tiny", "max_tokens": self.tokens, "temperature": 0 if is_greedy else 1}
        if self.kind == "chat":
            self.body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            self.body["prompt"] = self.prompt
        options: list[dict[str, Any]] = [
            {},
            {"n": 2},
            {"top_p": 0.5},
            {"stop": ["a"]},
            {"n": 0},
            {"cache_salt": str(number % 9)},
        ]
        self.body |= dice.choice(options)
        self.streams = dice.random() < 0.3
        self.leaves_after = dice.choice([None, dice.randint(1, 9)])  # lines
        self.is_greedy = is_greedy and self.body.get("n") != 0

    def status(self, served: Served) -> int:
        """What it gets: vLLM gives no two greedy answers."""
        answers = self.body.get("n", 1)
        if answers == 0:
            return 400
        if answers == 2 and self.body["temperature"] == 0 and served.engine is None:
            return 400
        return 200

    def ask(self, client: httpx.Client, served: Served) -> list[str] | None:
        """The texts of the answers; None where they are not those of `generate`."""
        is_compared = self.is_greedy and self.status(served) == 200
        if self.streams:
            lines = self.stream(client, served)
            is_complete = self.leaves_after is None
            return self.texts_of(lines) if is_compared and is_complete else None
        reply = client.post(served.url + self.path, json=self.body, headers=KEY)
        assert reply.status_code == self.status(served), reply.text
        if not is_compared:
            return None
        return [text_of(choice) for choice in reply.json()["choices"]]

    def stream(self, client: httpx.Client, served: Served) -> list[str]:
        """The lines of a streamed answer up to where the request leaves."""
        body = self.body | {"stream": True}
        with client.stream("POST", served.url + self.path, json=body, headers=KEY) as reply:
            return list(itertools.islice(reply.iter_lines(), self.leaves_after))

    def texts_of(self, lines: list[str]) -> list[str]:
        """The texts of the choices of a stream."""
        texts = [""] * self.body.get("n", 1)
        for line in lines:
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += text_of(choice)
        return texts

    def expected(self, served: Served) -> str:
        """The text of `generate`'s answer."""
        text = served.expected(self.kind, self.prompt, self.tokens)
        stop = self.body.get("stop")
        return text.partition(stop[0])[0] if stop else text


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, or of a chunk of one."""
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


@pytest.mark.parametrize("requests", [pytest.param(200, marks=QUICK), 1000])
def test_memory_stays_after_mixed_requests(requests: int, target: Target) -> None:
    """Beside sessions that fill their room; greedy answers, streamed or not, are those of `generate`.

    The clients share their connections, since each `httpx.Client` takes memory of this process, too.
    """
    with serving(target, rows=16, session_bytes=1 << 23) as (url, engine), httpx.Client(timeout=120) as client:
        served = Served(url, target, engine)

        def resident_mib() -> float:
            return metrics_of(url)["process_resident_memory_bytes"] / 2**20

        answers = ask_all(client, served, range(requests // 2))
        wait_until(lambda: engine.load == (0, 0))
        mib_before = resident_mib()
        answers |= ask_all(client, served, range(requests // 2, requests))
        wait_until(lambda: engine.load == (0, 0))
        assert resident_mib() < mib_before + 24
        assert engine.totals.ended["failed"] == 0
        assert engine.totals.ended["cancelled"] > 0
        assert 0 < engine.sessions.nbytes <= engine.sessions.max_bytes
        assert engine.totals.cached_tokens > 0
    check_answers(served, answers, requests)


def test_memory_beside_vllm_stays_after_mixed_requests(beside_vllm: Served) -> None:
    """That of all processes: the worker's, vLLM's server and its engine."""
    requests = 1000
    assert beside_vllm.process is not None
    parent = psutil.Process(beside_vllm.process.pid)

    def resident_bytes() -> int:
        return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])

    with httpx.Client(timeout=300) as client:
        answers = ask_all(client, beside_vllm, range(requests // 2))
        bytes_before = resident_bytes()
        answers |= ask_all(client, beside_vllm, range(requests // 2, requests))
        assert resident_bytes() < 1.05 * bytes_before
        metrics = client.get(f"{beside_vllm.url}/metrics", headers=KEY).text
    assert 'keepsight_prompts_total{of="known"}' in metrics, "some prompts were long, and came again"
    check_answers(beside_vllm, answers, requests)


def ask_all(client: httpx.Client, served: Served, numbers: range) -> dict[int, list[str]]:
    """The answers to compare, by the numbers of the requests, of which sixteen run at once."""
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda number: Mixed(number).ask(client, served), numbers)]
    return {number: texts for number, texts in zip(numbers, answers, strict=True) if texts is not None}


def check_answers(served: Served, answers: dict[int, list[str]], requests: int) -> None:
    """Compare greedy answers with those of `generate`."""
    assert len(answers) > requests // 5
    for number, texts in answers.items():
        request = Mixed(number)
        expected = comparable(request.expected(served), served)
        for text in texts:
            assert comparable(text, served) == expected, f"request {number}: {request.body}"
