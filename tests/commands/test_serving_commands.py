"""`keepsight prefix`, `serve` and `bench serve` as they are typed."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import yaml

from keepsight.commands import cli
from keepsight.commands.config_serving import Serve
from keepsight.commands.parse import quoted
from keepsight.commands.prefix import Document, Writer
from keepsight.commands.serve import _address, _divide_threads, _environment, _min_prompt_tokens, _prefix_folder
from keepsight.commands.variants import letters_for
from keepsight.files import JsonObject, from_json, write_lines, write_text
from keepsight.serving.prefix import PrefixStore
from tests.commands.commands import CommandLine
from tests.refused import refused
from tests.tiny import save_tiny_target, tiny_tokenizer
from tests.typed import text_of

LONG = "The ship sailed on. " * 60
TINY = ("model.id=tiny", "model.device=cpu", "model.dtype=float32", "adapter=adapter", "budget=160")

pytestmark = pytest.mark.usefixtures("here")


def ids_of(printed: str) -> list[str]:
    """The prefixes that `keepsight prefix` says can be sent."""
    return re.findall(r"^  send: \[\[keepsight:([0-9a-f]{32})\]\]QUESTION$", printed, flags=re.MULTILINE)


def test_a_prefix_is_read_once_and_found_again(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(Path("doc.txt"), LONG)
    prefix = ("prefix", *TINY, "prompt=@doc.txt", "out=prefixes")
    (name,) = ids_of(keepsight(*prefix))
    assert PrefixStore("prefixes").header(name).before == "<|user|>"
    (name_with_system,) = ids_of(keepsight(*prefix, "system=Be brief."))
    assert name_with_system != name
    assert PrefixStore("prefixes").header(name_with_system).before == "<|system|>Be brief.<|end|><|user|>"
    Path("prefixes", f"{name_with_system}.safetensors").unlink()
    assert ids_of(keepsight(*prefix, "system=Be brief.")) == [name_with_system]
    monkeypatch.setattr("keepsight.commands.prefix.Writer._prefill", None)  # nothing is read again
    assert ids_of(keepsight(*prefix)) == [name]


def test_a_model_with_windows_is_refused_before_its_weights_are_read(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    save_tiny_target(Path("windows"), "qwen3", use_sliding_window=True, sliding_window=64, layer_types=layer_types)
    monkeypatch.setattr("keepsight.commands.prefix.target_of", lambda _: pytest.fail("weights were read"))
    prefix = ("prefix", "model.id=windows", "model.device=cpu", "method=snapkv", "budget=160", "out=prefixes")
    message = keepsight.refuses("model", "model", *prefix, f"prompt={LONG}")
    assert "has layers with sliding_attention" in message


def test_pages_for_sglang_are_those_of_a_prefix(keepsight: CommandLine) -> None:
    write_text(Path("doc.txt"), LONG)
    prefix = ("prefix", *TINY, "method=snapkv", "prompt=@doc.txt", "out=prefixes")
    (name,) = ids_of(keepsight(*prefix))
    printed = keepsight(*prefix, "engine=sglang", "page=32")
    assert ids_of(printed) == [name]
    assert "model for SGLang: " in printed
    pages = sorted(Path("prefixes", "sglang").iterdir())
    assert [page.name for page in pages] == [f"{name}.32.{index}" for index in range(5)]
    prefix_bytes = Path("prefixes", f"{name}.safetensors").stat().st_size
    page_bytes = sum(page.stat().st_size for page in pages)
    assert 0 < prefix_bytes - page_bytes < 2048, "and a header"
    assert "which pages of 64 do not divide" in keepsight.fails(*prefix, "engine=sglang")


def test_bad_documents_are_skipped_and_counted(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    documents: list[dict[str, Any]] = [{"text": f"0 {LONG}"}, {"text": f"1 {LONG}"}, {"no": 1}, {"text": "a"}]
    write_lines(Path("docs.jsonl"), documents)
    prefix = ("prefix", *TINY, "documents=docs.jsonl", "out=prefixes", "page=32")
    printed = keepsight(*prefix, "method=adakv")
    assert len({*ids_of(printed)}) == 2
    assert printed.partition("model for vLLM: ")[0].endswith("2 prefixes in prefixes, 2 rows skipped\n")
    assert PrefixStore("prefixes").header(ids_of(printed)[0]).page == 32
    assert len([*Path("prefixes").glob("*.safetensors")]) == 2, "nothing of a text that cannot hold an id"

    lines_read = list[bytes]()

    def note_line_and_parse(line: bytes, *_: Any) -> Any:
        lines_read.append(line)
        return from_json(line)

    monkeypatch.setattr("keepsight.commands.prefix.from_json", note_line_and_parse)
    assert keepsight(*prefix, "method=adakv") == printed
    assert len(lines_read) == 4 + 2, "each line of the index once, not once for each document"

    keepsight.refuses("text", "type", *prefix, "method=adakv", "skip=0")
    keepsight.refuses("method", "conflict", *prefix, "method=adakv", "page=0")
    keepsight.refuses("prompt", "conflict", "prefix", *TINY, "out=prefixes")
    keepsight.refuses("budget", "range", *prefix, "budget=64")
    keepsight.refuses("method", "model", *prefix, "method=full")


def test_two_that_read_the_same_documents_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in the place of processes: the locks are of open files, not of processes."""
    write_lines(Path("docs.jsonl"), [{"text": f"{number} {LONG}"} for number in range(4)])
    sources_read = list[str]()
    both_read = Barrier(2)
    prefill = Writer._prefill

    def note_source_and_prefill(self: Writer, key: str, document: Document) -> JsonObject:
        sources_read.append(document.source)
        if len(sources_read) <= 2:
            both_read.wait(300)  # until the other reads a document too
        return prefill(self, key, document)

    monkeypatch.setattr(Writer, "_prefill", note_source_and_prefill)
    with ThreadPoolExecutor(2) as pool:
        codes = pool.map(cli.main, [["prefix", *TINY, "documents=docs.jsonl", "out=prefixes"]] * 2)
    assert [*codes] == [0, 0]
    assert sorted(sources_read) == [f"docs.jsonl:{line}" for line in range(1, 5)], "each is read once"
    assert len(Path("prefixes", "index.jsonl").read_bytes().splitlines()) == 4


def test_a_server_answers_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "keepsight", "serve", *TINY, "port=0", "name=ships"]
    environment = {**os.environ, "KEEPSIGHT_API_KEY": "secret"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        url = line.split(" at ")[1].split()[0]
        body = {"model": "ships", "messages": [{"role": "user", "content": LONG}], "max_tokens": 3}
        reply = httpx.post(f"{url}/chat/completions", json=body, headers={"authorization": "Bearer secret"}, timeout=60)
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    assert "requests need the key in " in line
    assert reply.json()["usage"]["prompt_tokens_details"]["kept_entries"] == 160
    assert code == 0


def test_a_server_with_few_descriptors_serves_beside_idle_connections_and_ends_at_sigterm() -> None:
    serve = [sys.executable, "-m", "keepsight", "serve", *TINY, "port=0", "name=ships", "access_log=true"]
    command = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *serve]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        ExitStack() as connections,
    ):
        assert server.stdout is not None
        assert server.stderr is not None
        url = server.stdout.readline().split(" at ")[1].split()[0].removesuffix("/v1")
        port = int(url.rpartition(":")[2])
        for _ in range(100):
            connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{url}/v1/models", timeout=60, headers={"host": "evil.example"}).status_code == 403
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
        errors = server.stderr.read()
    assert code == 0, errors[-2000:]
    assert len(errors.splitlines()) < 20, errors[-2000:]
    assert len(re.findall('"GET /health HTTP/1.1" 200$', errors, re.MULTILINE)) == 1


def test_values_that_cannot_be_served_end_in_one_line(keepsight: CommandLine) -> None:
    serve = ("serve", *TINY)
    packed = ("method=specache", "options={group: 8, residual: 8}")
    keepsight.refuses("key", "missing", *serve, "key=UNSET_KEY")
    keepsight.refuses("budget", "range", *serve, "budget=12.5")
    keepsight.refuses("method", "model", *serve, *packed, "port=0")
    keepsight.refuses("port", "service", *serve, "host=nowhere.invalid")
    keepsight.refuses("budget", "range", *serve, "method=snapkv", "max_budget=4", "port=0")
    keepsight.refuses("sessions", "type", *serve, "method=snapkv", "sessions=much", "port=0")
    keepsight.refuses("later_turns", "unknown", *serve, "method=snapkv", "later_turns=forget", "port=0")
    keepsight.refuses("page", "conflict", *serve, "page=32")
    keepsight.refuses("adapters", "conflict", *serve, "method=snapkv", "adapters={law: adapter}", "port=0")
    assert "adapters={law: nowhere}: " in keepsight.fails(*serve, "adapters={law: nowhere}", "port=0")
    keepsight.refuses("engine", "unknown", "prefix", *TINY, "prompt=a", "out=prefixes", "engine=tgi")
    keepsight.refuses("grace", "conflict", *serve, "vllm=true", "grace=5")
    keepsight.refuses("reader", "conflict", *serve, "reader=vllm")
    keepsight.refuses("worker_threads", "conflict", *serve, "worker_threads=1")


def test_what_vllm_cannot_serve_ends_in_one_line(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    monkeypatch.setattr("keepsight.commands.serve.cores_of_process", lambda: [0, 1, 2, 3])
    serve = ("serve", *TINY, "vllm=true")
    keepsight.refuses("worker_threads", "range", *serve, "worker_threads=4")
    keepsight.refuses("worker_threads", "conflict", *serve, "reader=vllm", "worker_threads=1")
    keepsight.refuses("adapters", "conflict", *serve, "reader=vllm", "adapters={law: adapter}")
    keepsight.refuses("budget", "range", *serve, "method=snapkv", "max_budget=4")
    for method in ("dapq", "laq"):
        keepsight.refuses("reader", "conflict", *serve, "reader=vllm", f"method={method}", "budget=160")


def test_the_worker_and_vllm_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    threads_before = torch.get_num_threads()

    def divide(cores: int, environment: dict[str, str] | None = None, **options: Any) -> tuple[int, str | None]:
        """The worker's threads, of which it had 7, and the cores of vLLM."""
        monkeypatch.setattr("keepsight.commands.serve.cores_of_process", lambda: [*range(cores)])
        torch.set_num_threads(7)
        environment = environment or {}
        _divide_threads(Serve(vllm=True, **options), target, environment)
        return torch.get_num_threads(), environment.get("VLLM_CPU_OMP_THREADS_BIND")

    try:
        assert divide(1) == (1, "0")
        assert divide(2) == (1, "1")
        assert divide(8) == (4, "4,5,6,7")
        assert divide(8, worker_threads=6) == (6, "6,7")
        assert divide(8, {"VLLM_CPU_OMP_THREADS_BIND": "2-3"}) == (7, "2-3"), "the operator's own division"
        assert divide(8, vllm_options={"tensor-parallel-size": 2}) == (7, None), "vLLM divides among its ranks"
        target.model.device = torch.device("meta")
        assert divide(8) == (7, None)
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("has_room", [True, False])
def test_prefixes_lie_in_memory_where_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr("keepsight.serving.vllm.folder.MEMORY", memory)
    free_bytes = shutil.disk_usage(tmp_path).free
    needed_bytes = free_bytes // 2 if has_room else free_bytes * 2
    with _prefix_folder(tmp_path / "server", needed_bytes) as folder:
        if has_room:
            assert folder.parent == memory
        else:
            assert folder == tmp_path / "server" / "prefixes"
    assert not [*memory.iterdir()]


def test_addresses_are_urls() -> None:
    assert _address("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert _address("::1", 80) == "http://[::1]:80"


def test_the_shortest_prompt_that_is_read_beside_vllm_must_spell_an_id() -> None:
    target: Any = SimpleNamespace(tokenizer=tiny_tokenizer())
    letters = letters_for(target, 0.5)

    def min_tokens(budget: float, min_prompt_tokens: int) -> int:
        return _min_prompt_tokens(Serve(budget=budget, min_prompt_tokens=min_prompt_tokens), target)

    assert min_tokens(300, 0) == 600
    assert min_tokens(300, 200) == 200
    assert min_tokens(0.5, 0) == 4 * letters
    assert min_tokens(0.5, 2 * letters) == 2 * letters
    for budget, fewest in ((0.5, 2 * letters), (300, letters)):
        with refused("min_prompt_tokens", "range"):
            min_tokens(budget, fewest - 1)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package vllm were not installed."""
    find_spec = importlib.util.find_spec

    def find_spec_except_vllm(name: str, *package: Any) -> Any:
        return None if name == "vllm" else find_spec(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec_except_vllm)


@pytest.mark.usefixtures("without_vllm")
def test_vllm_is_asked_for_where_it_is_missing(keepsight: CommandLine) -> None:
    keepsight.refuses("vllm", "missing", "serve", *TINY, "vllm=true")
    message = keepsight.fails("bench", "serve", *TINY[:-1], "vllm=true", "methods=[snapkv]", "tokens=300")
    assert "make setup-vllm" in message


def test_vllm_gets_the_key_of_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own variable was emptied where keepsight's is unset, and the server was open."""

    def key_of_vllm() -> str:
        environment = _environment(Serve(), 400, 4096, "model", Path("tokenizer"), Path("prefixes"))
        return environment["VLLM_API_KEY"]

    monkeypatch.delenv("KEEPSIGHT_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert key_of_vllm() == ""
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert key_of_vllm() == "theirs"
    monkeypatch.setenv("KEEPSIGHT_API_KEY", "ours")
    assert key_of_vllm() == "ours"


def test_the_page_says_what_the_commands_take() -> None:
    """Its blocks name their language, and are typed with vLLM: tests/serving/vllm/test_page.py."""
    blocks = dict[str, list[str]]()
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text_of("docs/serving.md"), re.DOTALL | re.MULTILINE):
        blocks.setdefault(language, []).append(block.replace("\\\n", " "))
    unit = re.findall("^ExecStart=(.*)", blocks["ini"][0], re.MULTILINE)[0]
    compose = yaml.safe_load(blocks["yaml"][0])["services"]["keepsight"]["command"]
    shell_commands = [shlex.split(block) for block in blocks["bash"]]
    keepsight_commands = [command for command in shell_commands if command[0] == "keepsight"]
    assert len(keepsight_commands) == 8
    for _, *words in (shlex.split(unit), compose, *keepsight_commands):
        name, arguments = cli.command_of(words)
        cli.configuration(name, arguments)


def table_of(heading: str, lines: list[str]) -> list[dict[str, str]]:
    """The rows of a printed table by column."""
    columns = re.split(" {2,}", heading.strip())
    return [dict(zip(columns, re.split(" {2,}", line.strip()), strict=True)) for line in lines]


def test_requests_from_evicted_caches_against_full_ones(keepsight: CommandLine) -> None:
    load = ("tokens=90", "answer_tokens=4", "requests=3", "rows=2", "methods=[snapkv]", "budgets=[48]")
    title, heading, *lines = keepsight("bench", "serve", *TINY[:4], *load).splitlines()
    assert title.startswith("3 requests of 90 tokens and 4 of the answer, 2 at once, ")
    assert heading.endswith("KV MiB")
    rows = [re.split(" {2,}", line) for line in lines]
    assert [name for name, *_ in rows] == ["full cache", "snapkv 48"]
    full, evicted = [[float(number) for number in numbers] for _, *numbers in rows]
    of_full = 6
    kv_mib = 9
    assert full[of_full] == 1
    assert evicted[kv_mib] < full[kv_mib]


def test_the_bench_of_arrivals_times_gaps(keepsight: CommandLine) -> None:
    load = ("tokens=120", "answer_tokens=6", "requests=4", "rows=3", "interval=0.01", "prefill_tokens=40")
    printed = keepsight("bench", "serve", *TINY[:-1], "methods=[snapkv]", "budgets=[48]", *load)
    _, heading, *lines = printed.splitlines()
    for row in table_of(heading, lines[:2]):
        in_all_ms = 1000 * (float(row["in all s"]) + 0.05)  # as it was before rounding, at most
        assert 0 <= float(row["gap ms"]) <= float(row["p99 gap"]) <= in_all_ms
    keepsight.refuses("interval", "conflict", "bench", "serve", *TINY[:-1], "vllm=true", "interval=1")


def test_servers_take_turns_and_a_stopped_run_resumes(keepsight: CommandLine) -> None:
    load = ("tokens=120", "answer_tokens=4", "requests=4", "rows=2", "turns=2", "documents=2", "out=bench")
    bench = ("bench", "serve", *TINY[:-2], "methods=[snapkv]", "budgets=[48]", *load)
    title, _, *lines_of_full = keepsight(*bench, "servers=[full]", "workloads=[new,documents]").splitlines()
    assert title.startswith("2 clients, 4 requests, prompts of up to 120 tokens, answers of 4")

    small = quoted({"name": "own", "label": "small", "method": "snapkv", "budget": 40})
    printed = keepsight(*bench, f"servers=[full,{small}]", "workloads=[new,documents,chats]")
    _, heading, *lines = printed.splitlines()
    assert lines[:2] == lines_of_full[:2], "what was measured is not measured again"
    rows = table_of(heading, lines)
    servers_and_workloads = [(row["server"], row["workload"]) for row in rows]
    assert servers_and_workloads == [*product(("full", "small"), ("new", "documents", "chats"))]
    for row in rows:
        assert row["failed"] == "0"
        assert float(row["requests/min"]) > 0
        assert float(row["peak MiB"]) > 100
        assert 0 < float(row["first s"]) <= float(row["p99 first"])
        assert float(row["gap ms"]) <= float(row["p99 gap"])
    assert len(Path("bench", "servers.csv").read_text().splitlines()) == 7


@pytest.mark.usefixtures("without_vllm")
def test_servers_that_cannot_be_measured_end_in_one_line(keepsight: CommandLine) -> None:
    bench = ("bench", "serve", *TINY[:-2], "methods=[snapkv]", "budgets=[48]", "tokens=120", "answer_tokens=4")
    keepsight.refuses("servers", "missing", *bench, "servers=[stock]")
    keepsight.refuses("servers", "unknown", *bench, "servers=[tgi]")
    keepsight.refuses("servers", "conflict", *bench, "servers=[own,own]")
    keepsight.refuses("servers", "unknown", *bench, "servers=[{name: own, port: 80}]")
    keepsight.refuses("methods", "range", *bench, "methods=[snapkv,tova]", "servers=[own]")
    keepsight.refuses("vllm", "conflict", *bench, "servers=[own]", "vllm=true")
    keepsight.refuses("tokens", "range", *bench, "tokens=100000", "servers=[own]")
    failing_server = "servers=[{name: own, method: snapkv, options: {window: 400}}]"
    assert "does not start" in keepsight.fails(*bench, failing_server)


@pytest.mark.parametrize(
    "value",
    ["a b", "it's", "back\\slash\\", "", "true", "12", "a:b:c", "/tmp/x", "org/name", "shipped:a-b", "{a}", "[1"],
)
def test_values_are_quoted_for_another_command(value: str) -> None:
    arguments = [f"name={quoted(value)}", f"options={quoted({'a': [1, 2.5, None, True, value], 'b': {'c': value}})}"]
    config: Any = cli.configuration("serve", ["model.id=tiny", *arguments])
    assert config.name == value
    assert config.options == {"a": [1, 2.5, None, True, value], "b": {"c": value}}
