"""Pages for SGLang: its own names for them, its order of numbers, and a client that takes no answer without them.

The vectors were made with the sources of the wheel sglang 0.5.23 (`pip download --no-deps sglang`), which does not
import without its dependencies: `hash_binding.cpp` compiled by `torch.utils.cpp_extension.load(name="hicache_hash_cpp",
sources=["sglang/srt/mem_cache/cpp_utils/hash_binding.cpp"], extra_ldflags=["-lcrypto"])`, called as
`get_hash(array("q", ids), len(ids), 1, False, prior, page)`, and `storage_namespace_seed` of `mem_cache/utils.py`.
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight import AdaKV, SnapKV
from keepsight.errors import UserError
from keepsight.runtime.allocate import Global
from keepsight.serving.export import export
from keepsight.serving.prefix import PrefixStore, alphabet_of, placeholders
from keepsight.serving.sglang import Client, file_name, page_keys, write_pages
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

PAGE = 16
ENTRIES = 160
SETTINGS = {
    "hicache_storage_backend": "file",
    "hicache_mem_layout": "layer_first",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 64}',
    "enable_cache_report": True,
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "speculative_algorithm": None,
    "page_size": PAGE,
    "served_model_name": "group/tiny",
    "dtype": "float32",
    "kv_cache_dtype": "auto",
}


def test_names_are_those_of_sglang() -> None:
    assert page_keys(range(12), 4) == [
        "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
        "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
        "fd5bd05ab69776768cb177e87c5ef6f8f8dec410a03a3c238a58a89c01ba803c",
    ]
    assert page_keys([5, 70000, 2**31, 2**32 - 1, 7, 7], 4) == [
        "f5a11760328ea0e3ac51af4c34e84887f024cf4f6caa2778a65de6c58e24b56c"
    ]
    assert page_keys(range(8), 4, "a document's salt") == [
        "371aa21aee2158eb822ee58b9c2e7ac69af90ff8a4a87f46da62f2e4e96be826",
        "1e2ad058ebf4fb5a63651c597bb1bf2a46e4cd7a80c1c57abe50abf56507ff01",
    ]
    assert file_name("ab", "org/Model-1B") == "ab_org-Model-1B_0_1.bin"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def digest(root: Path) -> str:
    """A prefix of a tiny model, whose chat template begins a message with <|user|>."""
    model = tiny_model()
    state = SnapKV(ENTRIES, window=8).start(model, prompt_ids(200)[0])
    return export(model, state, root, before="<|user|>")[0]


def test_a_page_holds_keys_and_values_by_layer_token_and_head(root: Path, digest: str) -> None:
    store = PrefixStore(root)
    tensors = store.tensors(digest)
    layers, kv_heads, entries, _ = tensors["keys"].shape
    paths = write_pages(store, digest, PAGE)
    assert len(paths) == 10
    assert len(paths) * PAGE == entries
    for page, path in enumerate(paths):
        expected = []
        for name in ("keys", "values"):
            for layer in range(layers):
                for entry in range(page * PAGE, (page + 1) * PAGE):
                    for head in range(kv_heads):
                        expected.append(tensors[name][layer, head, entry])
        numbers = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        assert torch.equal(numbers, torch.cat(expected))


def test_pages_that_sglang_cannot_read_are_refused(root: Path, digest: str) -> None:
    store = PrefixStore(root)
    with pytest.raises(UserError, match="160 entries, which pages of 48 do not divide"):
        write_pages(store, digest, 48)
    model = tiny_model()
    method = AdaKV(32, window=8, allocate=Global(page=8))
    ragged, _ = export(model, method.start(model, prompt_ids(200)[0]), root, page=8)
    with pytest.raises(UserError, match="different numbers of entries"):
        write_pages(store, ragged, 8)


def event_of(text: str | None, cached: int | None, reason: str | None = None) -> dict[str, Any]:
    """An event of `/generate`: the text so far, and what is known of the request."""
    meta: dict[str, Any] = {
        "id": "1",
        "finish_reason": {"type": reason} if reason else None,
        "prompt_tokens": 170,
        "completion_tokens": 2,
    }
    if cached is not None:
        meta["cached_tokens"] = cached
    return {"text": text, "output_ids": [1], "meta_info": meta}


def complete_answer(cached: int) -> Iterator[Any]:
    yield event_of(" a", cached)
    yield event_of(" a", cached)
    yield event_of(" a café", cached, "stop")
    yield "[DONE]"


class Server(ThreadingHTTPServer):
    """Reads files as SGLang does, by a loop of its own, and counts the tokens that it finds."""

    daemon_threads = True

    def __init__(self, storage: Path, expected: list[bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.storage = storage
        self.expected = expected
        self.settings = dict(SETTINGS)
        self.requests: list[dict[str, Any]] = []
        self.before: Callable[[], None] = lambda: None
        self.events: Callable[[int], Iterator[Any]] = complete_answer
        self.ended = threading.Event()

    def cached(self, request: dict[str, Any]) -> int:
        salt = request["cache_salt"].encode()
        parts = b"sglang-cache-namespace-v1\x00\x01" + len(salt).to_bytes(8, "little") + salt
        chain = hashlib.sha256(parts).digest()
        ids = request["prompt"] if "prompt" in request else request["input_ids"]
        count = 0
        while count + PAGE <= len(ids):
            tokens = b"".join(token.to_bytes(4, "little") for token in ids[count : count + PAGE])
            chain = hashlib.sha256(chain + tokens).digest()
            path = self.storage / f"{chain.hex()}_group-tiny_0_1.bin"
            if not path.is_file():
                break
            assert path.read_bytes() == self.expected[count // PAGE]
            count += PAGE
        return count


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(self.server.settings)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.before()
        details = {"cached_tokens": self.server.cached(request)}
        if self.path == "/generate":
            self.stream(details["cached_tokens"])
            return
        self.reply({"choices": [{"text": " a"}], "usage": {"prompt_tokens_details": details}})

    def stream(self, cached: int) -> None:
        """Events as SGLang sends them, each written at once; a client that has left ends it."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in self.server.events(cached):
                data = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()
        except OSError:
            pass
        self.server.ended.set()

    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(root: Path, digest: str, tmp_path: Path) -> Iterator[Server]:
    expected = [path.read_bytes() for path in write_pages(PrefixStore(root), digest, PAGE)]
    server = Server(tmp_path / "storage", expected)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client_of(server: Server, root: Path) -> Client:
    return Client(f"http://127.0.0.1:{server.server_port}", root, server.storage, tiny_tokenizer())


def test_the_server_reads_the_prefix_and_then_the_question(server: Server, root: Path, digest: str) -> None:
    reply = client_of(server, root).ask(digest, " what is it?", max_tokens=4, temperature=0)
    assert reply["choices"][0]["text"] == " a"
    (request,) = server.requests
    tokenizer = tiny_tokenizer()
    ids = placeholders(digest, ENTRIES, alphabet_of(tokenizer))
    assert request["prompt"][:ENTRIES] == ids
    assert tokenizer.decode(request["prompt"][ENTRIES:]) == " what is it?<|end|><|assistant|>"
    assert request["model"] == "group/tiny"
    assert request["max_tokens"] == 4
    assert request["temperature"] == 0
    assert not [*server.storage.iterdir()], "the links of a request are removed"


def test_each_request_has_names_of_its_own(server: Server, root: Path, digest: str) -> None:
    """So that what the server computed for one that missed is not taken for the prefix by the next."""
    client = client_of(server, root)
    client.ask(digest, " one")
    client.ask(digest, " one")
    assert len({request["cache_salt"] for request in server.requests}) == 2


def lose_files(server: Server, count: int) -> None:
    """Have this many files missing at the first two requests."""

    def lose() -> None:
        if len(server.requests) < 3:
            for path in sorted(server.storage.iterdir())[:count]:
                path.unlink()

    server.before = lose


@pytest.mark.parametrize("lost", [1, 10])
def test_an_answer_without_the_whole_prefix_is_asked_for_again(
    server: Server, root: Path, digest: str, lost: int
) -> None:
    lose_files(server, lost)
    reply = client_of(server, root).ask(digest, " one")
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == ENTRIES
    assert len(server.requests) == 3
    server.requests.clear()
    server.before = lambda: shutil.rmtree(server.storage)
    with pytest.raises(UserError, match="read 0 of the prefix's 160 entries in the last of 3 attempts"):
        client_of(server, root).ask(digest, " one")
    assert not server.storage.exists()


def pieces(chunks: Iterable[dict[str, Any]]) -> list[str]:
    return [chunk["choices"][0]["text"] for chunk in chunks]


def test_a_streamed_answer_comes_in_pieces(server: Server, root: Path, digest: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "seed": 7, "stop": ["x"], "stream": True}
    chunks = [*client_of(server, root).stream(digest, " what is it?", **fields)]
    assert pieces(chunks) == [" a", " café"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 170,
        "completion_tokens": 2,
        "total_tokens": 172,
        "prompt_tokens_details": {"cached_tokens": ENTRIES},
    }
    (request,) = server.requests
    tokenizer = tiny_tokenizer()
    assert request["input_ids"][:ENTRIES] == placeholders(digest, ENTRIES, alphabet_of(tokenizer))
    assert tokenizer.decode(request["input_ids"][ENTRIES:]) == " what is it?<|end|><|assistant|>"
    assert request["sampling_params"] == {"max_new_tokens": 4, "temperature": 0, "sampling_seed": 7, "stop": ["x"]}
    assert request["stream"] is True
    assert not [*server.storage.iterdir()]


def test_a_piece_comes_before_the_next_one_is_written(server: Server, root: Path, digest: str) -> None:
    """And closing the iterator ends the request, whose links are then removed."""
    go_on = threading.Event()

    def slowly(cached: int) -> Iterator[Any]:
        yield event_of(" a", cached)
        assert go_on.wait(30)
        while True:
            yield event_of(" a b", cached)

    server.events = slowly
    chunks = client_of(server, root).stream(digest, " one")
    assert pieces([next(chunks)]) == [" a"]
    assert len([*server.storage.iterdir()]) == ENTRIES // PAGE
    go_on.set()
    assert pieces([next(chunks)]) == [" b"]
    chunks.close()
    assert server.ended.wait(30)
    assert not [*server.storage.iterdir()]


def test_no_text_comes_before_the_server_says_what_it_read(server: Server, root: Path, digest: str) -> None:
    client = client_of(server, root)
    server.events = lambda cached: iter(
        [event_of(" a", None), {"text": " a b"}, event_of(" a b c", cached, "length"), "[DONE]"]
    )
    assert pieces(client.stream(digest, " one")) == [" a b c"]
    server.events = lambda cached: iter([event_of(" a", None), event_of(" a b", None, "stop"), "[DONE]"])
    with pytest.raises(UserError, match="read 0 of the prefix's 160 entries"):
        next(client.stream(digest, " one"))


@pytest.mark.parametrize("lost", [1, 10])
def test_nothing_comes_of_a_stream_without_the_whole_prefix(server: Server, root: Path, digest: str, lost: int) -> None:
    client = client_of(server, root)
    lose_files(server, lost)
    assert pieces(client.stream(digest, " one")) == [" a", " café"]
    assert len({request["cache_salt"] for request in server.requests}) == 3
    server.before = lambda: shutil.rmtree(server.storage)
    received = list[Any]()
    with pytest.raises(UserError, match="read 0 of the prefix's 160 entries in the last of 3 attempts"):
        received += client.stream(digest, " one")
    assert received == []


def test_a_server_that_sends_pieces_is_understood(server: Server, root: Path, digest: str) -> None:
    server.settings["incremental_streaming_output"] = True
    server.events = lambda cached: iter(
        [event_of(" a", None), event_of(" b", cached), event_of("", cached, "stop"), "[DONE]"]
    )
    assert pieces(client_of(server, root).stream(digest, " one")) == [" a b", ""]


BROKEN: dict[str, Callable[[int], Iterator[Any]]] = {
    "ended before the answer did": lambda cached: iter([event_of(" a", cached)]),
    "out of memory": lambda cached: iter([event_of(" a", cached), {"error": {"message": "out of memory"}}, "[DONE]"]),
    "the request was aborted": lambda cached: iter([event_of(" a", cached), event_of(" a", cached, "abort"), "[DONE]"]),
    "has 16 of the prefix's 160 entries left": lambda cached: iter([event_of(" a", cached), event_of(" a b", 16)]),
    "Expecting": lambda cached: iter([event_of(" a", cached), "{"]),
}


@pytest.mark.parametrize("line", BROKEN)
def test_an_answer_that_breaks_off_ends_in_one_line(server: Server, root: Path, digest: str, line: str) -> None:
    server.events = BROKEN[line]
    chunks = client_of(server, root).stream(digest, " one")
    assert pieces([next(chunks)]) == [" a"]
    with pytest.raises(UserError, match=line) as caught:
        next(chunks)
    assert "\n" not in str(caught.value)
    assert len(server.requests) == 1, "a second answer might go on otherwise"
    assert not [*server.storage.iterdir()]


REFUSED = {
    "hicache_storage_backend": "nixl",
    "hicache_mem_layout": "page_first",
    "hicache_storage_prefetch_policy": "best_effort",
    "enable_cache_report": False,
    "tp_size": 2,
    "speculative_algorithm": "EAGLE",
    "kv_cache_dtype": "fp8_e4m3",
}


@pytest.mark.parametrize("name", REFUSED)
def test_servers_with_files_of_another_form_are_refused(server: Server, root: Path, name: str) -> None:
    server.settings[name] = REFUSED[name]
    with pytest.raises(UserError, match=name):
        client_of(server, root)


def test_requests_whose_answer_cannot_be_checked_are_refused(server: Server, root: Path, digest: str) -> None:
    client = client_of(server, root)
    unchecked: list[dict[str, Any]] = [{"stream": True}, {"n": 2}]
    for fields in unchecked:
        with pytest.raises(UserError, match="ask for one answer"):
            client.ask(digest, " one", **fields)
    streamed: list[dict[str, Any]] = [{"n": 2}, {"logprobs": 5}]
    for fields in streamed:
        with pytest.raises(UserError, match="is no field of a streamed request"):
            client.stream(digest, " one", **fields)
    with pytest.raises(UserError, match="renders another text before the document"):
        client.ask(digest, " one", system="Be brief.")
    server.settings["hicache_storage_backend_extra_config"] = None
    with pytest.raises(UserError, match="looks for files from 256 tokens on"):
        client_of(server, root).ask(digest, " one")
    server.settings |= {"dtype": "bfloat16", "hicache_storage_backend_extra_config": '{"prefetch_threshold": 64}'}
    with pytest.raises(UserError, match="start it with --dtype float32"):
        client_of(server, root).ask(digest, " one")
    assert not server.requests
    with pytest.raises(UserError, match="start SGLang's server"):
        Client("http://127.0.0.1:9", root, server.storage, tiny_tokenizer())
