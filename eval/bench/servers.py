"""Clients of servers over HTTP: our own, vLLM's, and vLLM's from evicted caches take turns with the same load."""

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from keepsight.errors import UserError, one_line
from keepsight.eval.bench.runner import Runner, TableRow
from keepsight.eval.bench.serving import percentile
from keepsight.tables import TerminalColumn, name_column

NEW, DOCUMENTS, CHATS = WORKLOADS = ("new", "documents", "chats")
QUESTION = 24
"""Tokens of a question, and of the message of a chat's later turn."""
_WORDS = """
river stone light window garden letter morning engine bridge copper winter signal market forest ladder harbour yellow
silent narrow ancient quickly slowly carried opened turned under across before while because every third seven twelve
paper iron glass water summer teacher captain doctor village island
"""
_START_SECONDS = 900.0
"""Seconds that a server may take to start."""
_END_SECONDS = 60.0
_POLL_SECONDS = 0.25
"""Seconds between two looks at a server's start, or at its memory."""


@dataclass(frozen=True)
class ServerCommand:
    """A server to measure.

    Attributes:
        name: Its name in the table.
        arguments: The command, without the port.
        port: How the port is given, such as `port={}`.
        environment: Variables beside those of this process.
        prefix: The command that makes prefixes of documents, without the file and the folder; empty for a server that
            reads documents whole.
        options: What tells it from another server of this name, for rows that are kept.
        needs_vllm: Whether it is one of vLLM.
    """

    name: str
    arguments: Sequence[str]
    port: str
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    options: str = ""
    needs_vllm: bool = False


@dataclass(frozen=True)
class Load:
    """What the clients ask.

    Attributes:
        clients: Number of clients, each with one request at a time.
        requests: Number of requests.
        tokens: Longest prompt, or length of a document, or of a chat's first message, in tokens.
        answer_tokens: Length of each answer in tokens.
        documents: Number of documents that the questions are about, in turn.
        turns: Turns of a chat.
    """

    clients: int
    requests: int
    tokens: int
    answer_tokens: int
    documents: int
    turns: int

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, with room for what a chat template adds."""
        return self.tokens + self.turns * (2 * QUESTION + self.answer_tokens) + 256


@dataclass
class _Answer:
    """Times of an answer, in seconds: to its first token, and between tokens; or why there is none."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""


def bench_servers(
    runner: Runner,
    servers: Sequence[ServerCommand],
    tokenizer: Any,
    workloads: Sequence[str],
    load: Load,
    rounds: int,
    folder: Path,
) -> Iterator[str]:
    """A line for each server and workload in each round; `folder` is for logs, documents and prefixes.

    A server is started for the workloads of its round that are not measured yet, and ended before the next starts.
    """
    yield (
        f"{load.clients} clients, {load.requests} requests, prompts of up to {load.tokens} tokens, answers of "
        f"{load.answer_tokens}"
    )
    cases: list[tuple[TableRow, tuple[ServerCommand, str]]] = []
    for number in range(1, rounds + 1):
        for server in servers:
            for workload in workloads:
                case = {"round": number, "server": server.name, "options": server.options, "workload": workload}
                cases.append((case, (server, workload)))
    texts = _Texts(tokenizer)
    columns = [
        name_column("server", [server.name for server in servers]),
        name_column("workload", workloads),
        TerminalColumn("round", "d"),
        *(TerminalColumn(name, form) for name, form in _FORMS.items()),
    ]
    with _running(folder) as running:

        def measure(case: tuple[ServerCommand, str]) -> list[TableRow]:
            server, workload = case
            return [_measured(running.of(server), texts, workload, load)]

        yield from runner.table("servers", columns, runner.rows("servers", cases, measure))


_FORMS = {
    "requests/min": ".2f",
    "first s": ".2f",
    "p99 first": ".2f",
    "gap ms": ".0f",
    "p99 gap": ".0f",
    "peak MiB": ".0f",
    "prefixes s": ".1f",
    "failed": "d",
}
"""How each figure is written."""


# The load


class _Texts:
    """Texts of random words, the same ones each time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def of(self, tokens: int, seed: str) -> str:
        """A text of so many tokens, which begins unlike those of other seeds."""
        words = random.Random(seed).choices(_WORDS.split(), k=tokens)  # a word is at least one token
        ids = self.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"][:tokens]
        return str(self.tokenizer.decode(ids))


def _conversations(texts: _Texts, workload: str, load: Load) -> list[list[str]]:
    """The user's turns of each conversation."""
    if workload == NEW:
        lengths = random.Random(0)
        prompts = []
        for index in range(load.requests):
            length = lengths.randint(max(load.tokens // 2, 1), load.tokens)
            prompts.append([texts.of(length, f"new {index}")])
        return prompts
    chats = []
    for chat in range(max(load.requests // load.turns, 1)):
        turns = [texts.of(load.tokens, f"chat {chat}")]
        for turn in range(1, load.turns):
            turns.append(texts.of(QUESTION, f"chat {chat} turn {turn}"))
        chats.append(turns)
    return chats


def _questions(texts: _Texts, load: Load, documents: Sequence[str]) -> list[list[str]]:
    """A question about each document in turn; a document is its text, or the name of its prefix."""
    conversations = []
    for index in range(load.requests):
        document = documents[index % len(documents)]
        conversations.append([f"{document}\n\n{texts.of(QUESTION, f'question {index}')}?"])
    return conversations


def _measured(server: "_Server", texts: _Texts, workload: str, load: Load) -> TableRow:
    """The figures of a workload."""
    seconds_of_prefixes = 0.0
    if workload == DOCUMENTS:
        documents = [texts.of(load.tokens, f"document {index}") for index in range(load.documents)]
        start = time.perf_counter()
        if server.command.prefix:
            documents = server.prefixes(documents)
            seconds_of_prefixes = time.perf_counter() - start
        conversations = _questions(texts, load, documents)
    else:
        conversations = _conversations(texts, workload, load)

    def converse(turns: list[str]) -> list[_Answer]:
        return _converse(server.client, turns, load.answer_tokens)

    with _peak_memory(server.process.pid) as peak, ThreadPoolExecutor(load.clients) as pool:
        start = time.perf_counter()
        answers = []
        for answers_of_conversation in pool.map(converse, conversations):
            answers += answers_of_conversation
        seconds = time.perf_counter() - start
    return _figures(answers, seconds) | {"peak MiB": peak[0] / 2**20, "prefixes s": seconds_of_prefixes}


def _figures(answers: list[_Answer], seconds: float) -> TableRow:
    """The figures of answers; UserError if there is none."""
    complete = [answer for answer in answers if not answer.error]
    if not complete:
        raise UserError(f"no request was answered: {answers[0].error}", field="servers", code="service")
    first = [answer.first for answer in complete]
    gaps = []
    for answer in complete:
        gaps += answer.gaps
    if not gaps:  # answers of one token
        gaps = [0.0]
    return {
        "requests/min": 60 * len(complete) / seconds,
        "first s": statistics.median(first),
        "p99 first": percentile(first, 0.99),
        "gap ms": 1000 * statistics.median(gaps),
        "p99 gap": 1000 * percentile(gaps, 0.99),
        "failed": len(answers) - len(complete),
    }


def _converse(client: openai.OpenAI, turns: list[str], answer_tokens: int) -> list[_Answer]:
    """The answers to the user's turns, up to one that fails."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = _ask(client, messages, answer_tokens)
        answers.append(answer)
        if answer.error:
            break
        messages.append({"role": "assistant", "content": answer.text})
    return answers


def _ask(client: openai.OpenAI, messages: list[dict[str, str]], answer_tokens: int) -> _Answer:
    """The streamed answer to messages, of exactly so many tokens."""
    answer = _Answer()
    request: Any = {"messages": messages, "max_tokens": answer_tokens, "temperature": 0, "stream": True}
    before = time.perf_counter()
    create: Any = client.chat.completions.create
    try:
        for chunk in create(model=MODEL_NAME, extra_body={"ignore_eos": True}, **request):
            if not chunk.choices or not chunk.choices[0].delta.content:
                continue
            now = time.perf_counter()
            if answer.text:
                answer.gaps.append(now - before)
            else:
                answer.first = now - before
            before = now
            answer.text += chunk.choices[0].delta.content
    except (openai.OpenAIError, httpx.HTTPError) as error:
        answer.error = one_line(error)
    if not answer.text:
        answer.error = answer.error or "the answer is empty"
    return answer


# Servers

MODEL_NAME = "bench"
"""The model's name in requests."""


class _Server:
    """A server that runs."""

    def __init__(self, command: ServerCommand, folder: Path, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.command = command
        self.folder = folder
        self.process = process
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=3600)

    def prefixes(self, documents: Sequence[str]) -> list[str]:
        """The names of the documents' prefixes, which are made."""
        path = self.folder / "documents.jsonl"
        lines = [json.dumps({"text": text}) for text in documents]
        path.write_text("\n".join(lines) + "\n")
        printed = _run([*self.command.prefix, f"documents={path}", f"out={self.folder}"])
        names = []
        for line in printed.splitlines():
            name = line.strip().removeprefix("send: ").removesuffix("QUESTION")
            if name != line.strip():
                names.append(name)
        return names


def _run(arguments: Sequence[str]) -> str:
    """What a command prints; UserError with its last line if it fails."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(arguments[:4])} ...: {_last_line(done.stderr)}", field="servers", code="service")
    return done.stdout


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else "nothing"


class _Running:
    """The server that runs, if one does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server: _Server | None = None

    def of(self, command: ServerCommand) -> _Server:
        """The server of a command; another one is ended before."""
        if self._server is None or self._server.command is not command:
            self.end()
            self._server = _started(command, self.folder)
        return self._server

    def end(self) -> None:
        """End the server."""
        if self._server is None:
            return
        process = self._server.process
        self._server = None
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _running(folder: Path) -> Iterator[_Running]:
    running = _Running(folder)
    try:
        yield running
    finally:
        running.end()


def _started(command: ServerCommand, folder: Path) -> _Server:
    """A server that answers; UserError if it ends before."""
    folder = folder / command.name
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # closed again: the port is free
        port = int(listening.getsockname()[1])
    arguments = [argument.replace("{folder}", str(folder)) for argument in command.arguments]
    arguments += command.port.format(port).split()
    log = folder / "server.log"
    with log.open("wb") as out:
        environment = {**os.environ, **command.environment}
        process = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                server = _Server(command, folder, process, url)
                _ask(server.client, [{"role": "user", "content": "Who are you?"}], 4)  # what runs once
                return server
        time.sleep(_POLL_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    last = _last_line(log.read_text(errors="replace"))
    raise UserError(f"server {command.name} does not start ({log}): {last}", field="servers", code="service")


@contextmanager
def _peak_memory(pid: int) -> Iterator[list[float]]:
    """The largest number of bytes of a process and its children while this is open, in a list."""
    peak = [_memory(pid)]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            peak[0] = max(peak[0], _memory(pid))

    watcher = threading.Thread(target=watch, name="memory", daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def _memory(pid: int) -> float:
    """Bytes of a process and its children; pages that several share are counted once where the system tells."""
    total = 0.0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                memory: Any = process.memory_full_info()
                total += getattr(memory, "pss", memory.rss)
    return total
