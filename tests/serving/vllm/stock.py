"""vLLM's own server on loopback, tiny random models that it can serve, and prefixes with the answers of `generate`."""

import json
import os
import pydoc_data.topics
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import torch

from keepsight import SnapKV, generate, load_state, save_state
from keepsight.models.chat import chat_text
from keepsight.models.targets import Target, load_target
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.state import State
from keepsight.serving.export import export
from keepsight.serving.prefix import MARK, alphabet_of, placeholders
from tests.package_files import ROOT
from tests.tiny import tiny_model, tiny_tokenizer

BLOCK, TOKENS = 32, 24
TOPICS = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 4000]
QUESTIONS = ("\nWhy?", "\nWhat does the text above say of names, and of what binds them in a block?")
SHAPE = {"head_dim": 32, "hidden_size": 64, "max_position_embeddings": 4096, "pad_token_id": 0, "eos_token_id": 2}
CONNECTOR = {
    "kv_connector": "KeepsightConnector",
    "kv_connector_module_path": "keepsight.serving.vllm.connector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "fail",
}
LONGEST_WAIT = 900.0
"""Seconds that a server may take to start on a busy machine."""


def stock_target(folder: Path, family: str = "llama") -> Target:
    """A tiny random model with a head size of vLLM's CPU kernels, and special tokens that spell ids."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|reserved_{place}|>" for place in range(16)]})
    model = tiny_model(family, vocab_size=len(tokenizer), **SHAPE)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return load_target(str(folder), device="cpu", dtype="float32")


@dataclass(frozen=True)
class Case:
    """A document that was made a prefix, a question about it, and what `generate` answers.

    Attributes:
        digest: Of the prefix.
        question: What follows `[[keepsight:ID]]` in the message.
        prompt: Token ids of a completion's prompt.
        answer: Ids of the greedy answer.
    """

    digest: str
    question: str
    prompt: list[int]
    answer: list[int]


class Library:
    """Makes prefixes in a folder."""

    def __init__(self, target: Target, root: Path) -> None:
        self.target, self.root = target, root
        self.alphabet = alphabet_of(target.tokenizer)
        text = chat_text(target.tokenizer, [{"role": "user", "content": MARK}])
        self.before, _, self.after = text.partition(MARK)

    def ids(self, text: str) -> torch.Tensor:
        """Token ids [1, N] of a text."""
        return self.target.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def cases(self, document: str, budget: int, page: int = 0, tokens: int = TOKENS, **options: Any) -> list[Case]:
        """One case for each question; `options` are those of `generate`."""
        model = self.target.model
        method = SnapKV(budget, window=8, allocate=Global(page=page) if page else Uniform())
        state = method.start(model, self.ids(self.before + document))
        digest, header = export(model, state, self.root, page=page, before=self.before)
        made = []
        for question in QUESTIONS:
            asked = self.ids(question + self.after)
            prompt = placeholders(digest, header.entries, self.alphabet) + asked[0].tolist()
            made.append(Case(digest, question, prompt, self.answer(state, asked, tokens, **options)))
        return made

    def answer(self, state: State, asked: torch.Tensor, tokens: int, **options: Any) -> list[int]:
        """The greedy answer to `asked` [1, n] after a state, which is saved and loaded."""
        model = self.target.model
        with TemporaryDirectory() as folder:
            saved = save_state(state.unrecorded(), Path(folder), model=model)
            return generate(model, asked, load_state(saved, model), max_new_tokens=tokens, **options)[0].tolist()

    def ordinary(self, text: str, tokens: int = TOKENS) -> Case:
        """A prompt without a prefix."""
        ids = self.ids(self.before + text + self.after)
        return Case("", text, ids[0].tolist(), generate(self.target.model, ids, max_new_tokens=tokens)[0].tolist())


@dataclass
class Server:
    """A server that runs in a process group of its own."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, key: str = "any", **options: Any) -> openai.OpenAI:
        """A client that does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300, **options)

    def metric(self, name: str, key: str = "any") -> float:
        """The sum of a metric's values."""
        lines = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {key}"}).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.log.read_text(errors='replace')[-6000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise RuntimeError(f"no answer in {LONGEST_WAIT} s:\n{self.log.read_text(errors='replace')[-6000:]}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the server and its engine."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        self.process.wait(60)


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def process(url: str, log: Path, *command: str, **environment: str) -> Iterator[Server]:
    """A command that serves at a URL, once it answers; all of its group is killed at the end."""
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | given, start_new_session=True)
    server = Server(url, child, log)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def vllm_arguments(model: Path, root: Path, **options: Any) -> list[str]:
    """Arguments of vLLM's server with the connector and the middleware."""
    given = {
        **{"model": model, "served_model_name": "tiny", "dtype": "float32", "block_size": BLOCK},
        **{"max_model_len": 2048, "max_num_seqs": 16, "kv_cache_memory_bytes": 2**27},
        "middleware": "keepsight.serving.vllm.middleware.Prefixes",
        "kv_transfer_config": json.dumps(CONNECTOR | {"kv_connector_extra_config": {"root": str(root)}}),
        **options,
    }
    named = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items()]
    return ["--enforce-eager", *(part for pair in named for part in pair)]


@contextmanager
def serving(model: Path, root: Path, log: Path, ragged: bool = True, **options: Any) -> Iterator[Server]:
    """vLLM's server, as `docs/serving.md` starts it."""
    port = free_port()
    arguments = vllm_arguments(model, root, host="127.0.0.1", port=port, **options)
    environment = {"KEEPSIGHT_ROOT": str(root), "KEEPSIGHT_MODEL": str(model), "KEEPSIGHT_RAGGED": str(int(ragged))}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    with process(f"http://127.0.0.1:{port}", log, *command, **environment) as server:
        yield server


def completed(server: Server, case: Case, tokens: int = TOKENS, key: str = "any", **options: Any) -> list[int]:
    """The ids that `/v1/completions` answers."""
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    asked = {"model": "tiny", "prompt": case.prompt, "max_tokens": tokens, "temperature": 0} | options
    create: Any = server.client(key).completions.create
    return create(**asked, extra_body=extra).choices[0].model_dump()["token_ids"]


def completed_together(server: Server, cases: list[Case], tokens: int) -> list[list[int]]:
    """The ids that one request of `/v1/completions` answers to the prompts of all cases, so many to each."""
    asked = {"model": "tiny", "prompt": [case.prompt for case in cases], "max_tokens": tokens, "temperature": 0}
    create: Any = server.client().completions.create
    choices = create(**asked, extra_body={"return_token_ids": True, "min_tokens": tokens}).choices
    return [choice.model_dump()["token_ids"] for choice in sorted(choices, key=lambda choice: choice.index)]


def chatted(server: Server, case: Case, tokens: int = TOKENS, key: str = "any", **options: Any) -> list[int]:
    """The ids that `/v1/chat/completions` streams for a message that names the prefix."""
    content = f"[[keepsight:{case.digest}]]{case.question}" if case.digest else case.question
    asked = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    create: Any = server.client(key).chat.completions.create
    chunks = create(**asked | {"temperature": 0, "stream": True} | options, extra_body={"return_token_ids": True})
    return [id for chunk in chunks for choice in chunk.choices for id in choice.model_dump().get("token_ids") or []]
