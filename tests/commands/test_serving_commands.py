"""`keepsight prefix`, `serve` and `bench serve` as they are typed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from keepsight.files import from_json, write_lines, write_text
from keepsight.serving.prefix import PrefixStore
from tests.commands.commands import CommandLine

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
    monkeypatch.setattr("keepsight.commands.prefix.Writer._read", None)  # nothing is read again
    assert ids(keepsight(*given)) == [name]


def test_bad_documents_are_skipped_and_counted(keepsight: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(Path("docs.jsonl"), [{"text": f"{number} {LONG}"} for number in range(2)] + [{"no": 1}, {"text": "a"}])
    given = ("prefix", *TINY, "documents=docs.jsonl", "out=prefixes", "page=32")
    printed = keepsight(*given, "method=adakv")
    assert len({*ids(printed)}) == 2 and printed.endswith("2 prefixes in prefixes, 2 rows skipped\n")
    assert PrefixStore("prefixes").header(ids(printed)[0]).page == 32
    assert len([*Path("prefixes").glob("*.safetensors")]) == 2, "nothing of a text that cannot hold an id"
    read = list[bytes]()

    def counted(line: bytes, *_: Any) -> Any:
        read.append(line)
        return from_json(line)

    monkeypatch.setattr("keepsight.commands.prefix.from_json", counted)
    assert keepsight(*given, "method=adakv") == printed
    assert len(read) == 4 + 2, "each line of the index once, not once for each document"
    assert "expected a text" in keepsight.fails(*given, "method=adakv", "skip=0")
    assert "page=32" in keepsight.fails(*given, "method=adakv", "page=0")
    assert "one of them" in keepsight.fails("prefix", *TINY, "out=prefixes")
    assert "raise budget=" in keepsight.fails(*given, "budget=64")
    assert "evicts nothing" in keepsight.fails(*given, "method=full")


def test_a_server_answers_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "keepsight", "serve", *TINY, "port=0", "name=ships"]
    environment = {**os.environ, "KEEPSIGHT_API_KEY": "secret"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        url = line.split(" at ")[1].split(",")[0]
        body = {"model": "ships", "messages": [{"role": "user", "content": LONG}], "max_tokens": 3}
        reply = httpx.post(f"{url}/chat/completions", json=body, headers={"authorization": "Bearer secret"}, timeout=60)
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["kept_entries"] == 160 and code == 0 and "a key asked" in line


def test_values_that_cannot_be_served_end_in_one_line(keepsight: CommandLine) -> None:
    assert "whole number" in keepsight.fails("serve", *TINY, "budget=12.5")
    assert "cannot answer in a batch" in keepsight.fails("serve", *TINY, "method=specache", "port=0")
    assert "host=nowhere.invalid" in keepsight.fails("serve", *TINY, "host=nowhere.invalid")


def test_requests_from_evicted_caches_against_full_ones(keepsight: CommandLine) -> None:
    sizes = ("tokens=90", "answer_tokens=4", "requests=3", "rows=2", "methods=[snapkv]", "budgets=[48]")
    title, names, *lines = keepsight("bench", "serve", *TINY[:4], *sizes).splitlines()
    assert title.startswith("3 requests of 90 tokens and 4 of the answer, 2 at once, ")
    assert names.endswith("KV MiB") and [line[:20].strip() for line in lines] == ["full cache", "snapkv 48"]
    full, evicted = ([float(each) for each in line[20:].split()] for line in lines)
    assert full[5] == 1 and evicted[6] < full[6]
