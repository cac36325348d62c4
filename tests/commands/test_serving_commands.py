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


def ids(printed: str) -> list[str]:
    return re.findall(r"^  send: \[\[keepsight:([0-9a-f]{32})\]\]QUESTION$", printed, flags=re.MULTILINE)


def test_a_prefix_is_read_once_and_found_again(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(Path("doc.txt"), LONG)
    given = ("prefix", *TINY, "prompt=@doc.txt", "out=prefixes")
    (name,) = ids(keepsight(*given))
    assert PrefixStore("prefixes").header(name).before == "<|user|>"
    (other,) = ids(keepsight(*given, "system=Be brief."))
    assert PrefixStore("prefixes").header(other).before == "<|system|>Be brief.<|end|><|user|>" and other != name
    Path("prefixes", f"{other}.safetensors").unlink()
    assert ids(keepsight(*given, "system=Be brief.")) == [other]
    monkeypatch.setattr("keepsight.commands.prefix.Writer._prefill", None)  # nothing is read again
    assert ids(keepsight(*given)) == [name]


def test_a_model_with_windows_is_refused_before_its_weights_are_read(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64, "layer_types": kinds}
    save_tiny_target(Path("windows"), "qwen3", **windows)
    monkeypatch.setattr("keepsight.commands.prefix.target_of", lambda _: pytest.fail("weights were read"))
    given = ("prefix", "model.id=windows", "model.device=cpu", "method=snapkv", "budget=160", "out=prefixes")
    line = keepsight.refuses("model", "model", *given, f"prompt={LONG}")
    assert "has layers with sliding_attention" in line


def test_pages_for_sglang_are_those_of_a_prefix(keepsight: CommandLine) -> None:
    write_text(Path("doc.txt"), LONG)
    given = ("prefix", *TINY, "method=snapkv", "prompt=@doc.txt", "out=prefixes")
    (name,) = ids(keepsight(*given))
    printed = keepsight(*given, "engine=sglang", "page=32")
    assert ids(printed) == [name] and "model for SGLang: " in printed
    files = sorted(Path("prefixes", "sglang").iterdir())
    assert [file.name for file in files] == [f"{name}.32.{index}" for index in range(5)]
    kept = Path("prefixes", f"{name}.safetensors").stat().st_size
    assert 0 < kept - sum(file.stat().st_size for file in files) < 2048, "and a header"
    assert "which pages of 64 do not divide" in keepsight.fails(*given, "engine=sglang")


def test_bad_documents_are_skipped_and_counted(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(Path("docs.jsonl"), [{"text": f"{number} {LONG}"} for number in range(2)] + [{"no": 1}, {"text": "a"}])
    given = ("prefix", *TINY, "documents=docs.jsonl", "out=prefixes", "page=32")
    printed = keepsight(*given, "method=adakv")
    assert len({*ids(printed)}) == 2 and printed.partition("model for vLLM: ")[0].endswith(
        "2 prefixes in prefixes, 2 rows skipped\n"
    )
    assert PrefixStore("prefixes").header(ids(printed)[0]).page == 32
    assert len([*Path("prefixes").glob("*.safetensors")]) == 2, "nothing of a text that cannot hold an id"
    read = list[bytes]()

    def counted(line: bytes, *_: Any) -> Any:
        read.append(line)
        return from_json(line)

    monkeypatch.setattr("keepsight.commands.prefix.from_json", counted)
    assert keepsight(*given, "method=adakv") == printed
    assert len(read) == 4 + 2, "each line of the index once, not once for each document"
    keepsight.refuses("text", "type", *given, "method=adakv", "skip=0")
    keepsight.refuses("method", "conflict", *given, "method=adakv", "page=0")
    keepsight.refuses("prompt", "conflict", "prefix", *TINY, "out=prefixes")
    keepsight.refuses("budget", "range", *given, "budget=64")
    keepsight.refuses("method", "model", *given, "method=full")


def test_two_that_read_the_same_documents_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in the place of processes: the locks are of open files, not of processes."""
    write_lines(Path("docs.jsonl"), [{"text": f"{number} {LONG}"} for number in range(4)])
    read, both, own = list[str](), Barrier(2), Writer._prefill

    def counted(self: Writer, key: str, document: Document) -> JsonObject:
        read.append(document.source)
        if len(read) <= 2:
            both.wait(300)  # until the other reads a document too
        return own(self, key, document)

    monkeypatch.setattr(Writer, "_prefill", counted)
    with ThreadPoolExecutor(2) as pool:
        codes = pool.map(cli.main, [["prefix", *TINY, "documents=docs.jsonl", "out=prefixes"]] * 2)
    assert [*codes] == [0, 0]
    assert sorted(read) == [f"docs.jsonl:{line}" for line in range(1, 5)], "each is read once"
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
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["kept_entries"] == 160 and code == 0 and "requests need the key in " in line


def test_a_server_with_few_descriptors_serves_beside_idle_connections_and_ends_at_sigterm() -> None:
    typed = [sys.executable, "-m", "keepsight", "serve", *TINY, "port=0", "name=ships", "access_log=true"]
    command = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *typed]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        ExitStack() as held,
    ):
        assert server.stdout is not None and server.stderr is not None
        url = server.stdout.readline().split(" at ")[1].split()[0].removesuffix("/v1")
        port = int(url.rpartition(":")[2])
        for _ in range(100):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{url}/v1/models", timeout=60, headers={"host": "evil.example"}).status_code == 403
        server.send_signal(signal.SIGTERM)
        code, errors = server.wait(60), server.stderr.read()
    assert code == 0 and len(errors.splitlines()) < 20, errors[-2000:]
    assert len(re.findall('"GET /health HTTP/1.1" 200$', errors, re.MULTILINE)) == 1


def test_values_that_cannot_be_served_end_in_one_line(keepsight: CommandLine) -> None:
    keepsight.refuses("key", "missing", "serve", *TINY, "key=UNSET_KEY")
    keepsight.refuses("budget", "range", "serve", *TINY, "budget=12.5")
    packed = ("method=specache", "options={group: 8, residual: 8}")
    keepsight.refuses("method", "model", "serve", *TINY, *packed, "port=0")
    keepsight.refuses("port", "service", "serve", *TINY, "host=nowhere.invalid")
    keepsight.refuses("budget", "range", "serve", *TINY, "method=snapkv", "max_budget=4", "port=0")
    keepsight.refuses("sessions", "type", "serve", *TINY, "method=snapkv", "sessions=much", "port=0")
    keepsight.refuses("later_turns", "unknown", "serve", *TINY, "method=snapkv", "later_turns=forget", "port=0")
    keepsight.refuses("page", "conflict", "serve", *TINY, "page=32")
    keepsight.refuses("adapters", "conflict", "serve", *TINY, "method=snapkv", "adapters={law: adapter}", "port=0")
    assert "adapters={law: nowhere}: " in keepsight.fails("serve", *TINY, "adapters={law: nowhere}", "port=0")
    keepsight.refuses("engine", "unknown", "prefix", *TINY, "prompt=a", "out=prefixes", "engine=tgi")
    keepsight.refuses("grace", "conflict", "serve", *TINY, "vllm=true", "grace=5")
    for alone in ("reader=vllm", "worker_threads=1"):
        keepsight.refuses(alone.partition("=")[0], "conflict", "serve", *TINY, alone)


def test_what_vllm_cannot_be_given_ends_in_one_line(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: object())
    monkeypatch.setattr("keepsight.commands.serve.cores_of_process", lambda: [0, 1, 2, 3])
    beside = ("serve", *TINY, "vllm=true")
    keepsight.refuses("worker_threads", "range", *beside, "worker_threads=4")
    keepsight.refuses("worker_threads", "conflict", *beside, "reader=vllm", "worker_threads=1")
    keepsight.refuses("adapters", "conflict", *beside, "reader=vllm", "adapters={law: adapter}")
    keepsight.refuses("budget", "range", *beside, "method=snapkv", "max_budget=4")
    for method in ("dapq", "laq"):
        keepsight.refuses("reader", "conflict", *beside, "reader=vllm", f"method={method}", "budget=160")


def test_the_worker_and_vllm_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    threads = torch.get_num_threads()

    def divided(cores: int, environment: dict[str, str] | None = None, **options: Any) -> tuple[int, str | None]:
        monkeypatch.setattr("keepsight.commands.serve.cores_of_process", lambda: [*range(cores)])
        torch.set_num_threads(7)
        environment = environment or {}
        _divide_threads(Serve(vllm=True, **options), target, environment)
        return torch.get_num_threads(), environment.get("VLLM_CPU_OMP_THREADS_BIND")

    try:
        assert divided(2) == (1, "1") and divided(8) == (4, "4,5,6,7") and divided(1) == (1, "0")
        assert divided(8, worker_threads=6) == (6, "6,7")
        assert divided(8, {"VLLM_CPU_OMP_THREADS_BIND": "2-3"}) == (7, "2-3"), "the operator's own division"
        assert divided(8, vllm_options={"tensor-parallel-size": 2}) == (7, None), "vLLM divides among its ranks"
        target.model.device = torch.device("meta")
        assert divided(8) == (7, None)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("has_room", [True, False])
def test_prefixes_lie_in_memory_where_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr("keepsight.serving.vllm.folder.MEMORY", memory)
    room = shutil.disk_usage(tmp_path).free
    with _prefix_folder(tmp_path / "server", room // 2 if has_room else room * 2) as folder:
        assert (folder.parent == memory) == has_room and (folder == tmp_path / "server" / "prefixes") != has_room
    assert not [*memory.iterdir()]


def test_addresses_are_urls() -> None:
    assert _address("127.0.0.1", 80) == "http://127.0.0.1:80" and _address("::1", 80) == "http://[::1]:80"


def test_the_shortest_prompt_that_is_read_beside_vllm_must_spell_an_id() -> None:
    target: Any = SimpleNamespace(tokenizer=tiny_tokenizer())
    letters = letters_for(target, 0.5)

    def least(budget: float, tokens: int) -> int:
        return _min_prompt_tokens(Serve(budget=budget, min_prompt_tokens=tokens), target)

    assert (least(300, 0), least(300, 200), least(0.5, 0)) == (600, 200, 4 * letters)
    assert least(0.5, 2 * letters) == 2 * letters
    for budget, fewest in ((0.5, 2 * letters), (300, letters)):
        with refused("min_prompt_tokens", "range"):
            least(budget, fewest - 1)


def test_vllm_is_asked_for_where_it_is_missing(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "vllm" else installed(name, *of))
    keepsight.refuses("vllm", "missing", "serve", *TINY, "vllm=true")
    assert "make setup-vllm" in keepsight.fails(
        "bench", "serve", *TINY[:-1], "vllm=true", "methods=[snapkv]", "tokens=300"
    )


def test_vllm_is_given_the_key_of_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own variable was emptied where keepsight's is unset, and the server was open."""

    def given() -> str:
        return _environment(Serve(), 400, 4096, "model", Path("tokenizer"), Path("prefixes"))["VLLM_API_KEY"]

    for name in ("KEEPSIGHT_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert given() == ""
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert given() == "theirs"
    monkeypatch.setenv("KEEPSIGHT_API_KEY", "ours")
    assert given() == "ours"


def test_the_page_says_what_the_commands_take() -> None:
    """Its blocks name their language, and are typed with vLLM: tests/serving/vllm/test_page.py."""
    blocks = dict[str, list[str]]()
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text_of("docs/serving.md"), re.DOTALL | re.MULTILINE):
        blocks.setdefault(language, []).append(block.replace("\\\n", " "))
    unit = re.findall("^ExecStart=(.*)", blocks["ini"][0], re.MULTILINE)[0]
    compose = yaml.safe_load(blocks["yaml"][0])["services"]["keepsight"]["command"]
    typed = [words for block in blocks["bash"] if (words := shlex.split(block))[0] == "keepsight"]
    for _, *words in (shlex.split(unit), compose, *typed):
        name, arguments = cli.command_of(words)
        cli.configuration(name, arguments)
    assert len(typed) == 8


def test_requests_from_evicted_caches_against_full_ones(keepsight: CommandLine) -> None:
    sizes = ("tokens=90", "answer_tokens=4", "requests=3", "rows=2", "methods=[snapkv]", "budgets=[48]")
    title, names, *lines = keepsight("bench", "serve", *TINY[:4], *sizes).splitlines()
    assert title.startswith("3 requests of 90 tokens and 4 of the answer, 2 at once, ")
    rows = [re.split(" {2,}", line) for line in lines]
    assert names.endswith("KV MiB") and [name for name, *_ in rows] == ["full cache", "snapkv 48"]
    full, evicted = ([float(figure) for figure in figures] for _, *figures in rows)
    of_full, kv_mib = 6, 9
    assert full[of_full] == 1 and evicted[kv_mib] < full[kv_mib]


def test_the_bench_of_arrivals_times_gaps(keepsight: CommandLine) -> None:
    load = ("tokens=120", "answer_tokens=6", "requests=4", "rows=3", "interval=0.01", "prefill_tokens=40")
    printed = keepsight("bench", "serve", *TINY[:-1], "methods=[snapkv]", "budgets=[48]", *load)
    columns = re.split(r"  +", printed.splitlines()[1].strip())
    assert {"gap ms", "p99 gap", "in all s"} <= {*columns}
    for line in printed.splitlines()[2:4]:
        row = dict(zip(columns, re.split(r"  +", line.strip()), strict=True))
        in_all_ms = 1000 * (float(row["in all s"]) + 0.05)  # as it was before rounding, at most
        assert 0 <= float(row["gap ms"]) <= float(row["p99 gap"]) <= in_all_ms
    keepsight.refuses("interval", "conflict", "bench", "serve", *TINY[:-1], "vllm=true", "interval=1")


def test_servers_take_turns_and_a_stopped_run_resumes(keepsight: CommandLine) -> None:
    load = ("tokens=120", "answer_tokens=4", "requests=4", "rows=2", "turns=2", "documents=2", "out=bench")
    small = {"name": "own", "label": "small", "method": "snapkv", "budget": 40}
    given = ("bench", "serve", *TINY[:-2], "methods=[snapkv]", "budgets=[48]", *load)
    lines = keepsight(*given, "servers=[full]", "workloads=[new,documents]").splitlines()
    assert lines[0].startswith("2 clients, 4 requests, prompts of up to 120 tokens, answers of 4")
    again = keepsight(*given, f"servers=[full,{quoted(small)}]", "workloads=[new,documents,chats]").splitlines()
    assert again[2:4] == lines[2:4], "what was measured is not measured again"
    rows = [dict(zip(re.split(" {2,}", again[1]), re.split(" {2,}", line), strict=True)) for line in again[2:]]
    assert [(row["server"], row["workload"]) for row in rows] == [
        (server, workload) for server in ("full", "small") for workload in ("new", "documents", "chats")
    ]
    for row in rows:
        assert row["failed"] == "0" and float(row["requests/min"]) > 0 and float(row["peak MiB"]) > 100
        assert 0 < float(row["first s"]) <= float(row["p99 first"]) and float(row["gap ms"]) <= float(row["p99 gap"])
    assert len(Path("bench", "servers.csv").read_text().splitlines()) == 7


def test_servers_that_cannot_be_measured_end_in_one_line(
    keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "vllm" else installed(name, *of))
    given = ("bench", "serve", *TINY[:-2], "methods=[snapkv]", "budgets=[48]", "tokens=120", "answer_tokens=4")
    keepsight.refuses("servers", "missing", *given, "servers=[stock]")
    keepsight.refuses("servers", "unknown", *given, "servers=[tgi]")
    keepsight.refuses("servers", "conflict", *given, "servers=[own,own]")
    keepsight.refuses("servers", "unknown", *given, "servers=[{name: own, port: 80}]")
    keepsight.refuses("methods", "range", *given[:5], "methods=[snapkv,tova]", "budgets=[48]", "servers=[own]")
    keepsight.refuses("vllm", "conflict", *given, "servers=[own]", "vllm=true")
    keepsight.refuses("tokens", "range", *given[:7], "tokens=100000", "servers=[own]")
    failing = "servers=[{name: own, method: snapkv, options: {window: 400}}]"
    assert "does not start" in keepsight.fails(*given, failing)


@pytest.mark.parametrize(
    "value",
    ["a b", "it's", "back\\slash\\", "", "true", "12", "a:b:c", "/tmp/x", "org/name", "shipped:a-b", "{a}", "[1"],
)
def test_values_are_quoted_for_another_command(value: str) -> None:
    arguments = [f"name={quoted(value)}", f"options={quoted({'a': [1, 2.5, None, True, value], 'b': {'c': value}})}"]
    config: Any = cli.configuration("serve", ["model.id=tiny", *arguments])
    assert config.name == value
    assert config.options == {"a": [1, 2.5, None, True, value], "b": {"c": value}}
