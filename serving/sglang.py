"""Prefixes for SGLang: pages of its hierarchical cache, and a client that checks that they were read.

SGLang (0.5.23) can keep a cache in files, `--hicache-storage-backend file`. A file is a page of consecutive tokens:
with the layout `layer_first` the keys [L, page, K, d] and then the values. Its name is a SHA-256 of the page's token
ids and of the name before it, which begins with the request's `cache_salt`. A prompt whose first pages have files is
read from them; without a word, SGLang computes pages that it does not find from the tokens. Those of a prefix are
placeholders, from which nothing right can be computed. So `Client` does two things for each request:

- It gives the request a salt of its own and links the prefix's pages under the names that follow from it. What SGLang
  computes for a request can then never be taken for the pages of another one.
- It compares `cached_tokens` of the reply with the prefix's entries, and discards answers that were computed otherwise.
  A streamed answer is asked for at `/generate`, whose events say it from the first on; the chunks of `/v1/completions`
  say it at the end alone.
"""

import hashlib
import http.client
import json
import os
import shutil
import struct
import urllib.error
import urllib.request
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, atomic_file
from keepsight.models.chat import encode, prompt_text
from keepsight.serving.prefix import MARK, PrefixStore, alphabet_of, placeholders, split_at_mark

PAGE = 64
"""Entries of a page, by default."""
FOLDER = "sglang"
"""Folder of the pages, within that of the prefixes."""
_SALT = b"sglang-cache-namespace-v1"
_REQUIRED = {
    "hicache_storage_backend": "file",
    "hicache_mem_layout": "layer_first",
    "hicache_storage_prefetch_policy": "wait_complete",
    "enable_cache_report": True,
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "speculative_algorithm": None,
}
"""Settings of SGLang's server with which its files are those written here, by their names in `/server_info`."""
_THRESHOLD = 256
"""Tokens from which SGLang looks for files, where `prefetch_threshold` is not set."""
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "regex",
    "json_schema",
    "ebnf",
    "logit_bias",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
)
"""Fields of `/v1/completions` that `/generate` takes as sampling parameters, under another name or the same."""
Chunks: TypeAlias = Generator[dict[str, Any], None, None]
_MAX_TOKENS = 16
"""Of an answer, where a request does not say; `/v1/completions` has that default, and `/generate` another."""


def page_keys(ids: Sequence[int], page: int, salt: str | None = None) -> list[str]:
    """SGLang's names of the full pages of token ids, 64 hex digits each.

    Args:
        ids: Token ids below 2^32.
        page: Tokens of a page.
        salt: The request's `cache_salt`.
    """
    before = b"" if salt is None else _seed(salt)
    keys = []
    for start in range(0, len(ids) - page + 1, page):
        tokens = struct.pack(f"<{page}I", *ids[start : start + page])
        before = hashlib.sha256(before + tokens).digest()
        keys.append(before.hex())
    return keys


def _seed(salt: str) -> bytes:
    """What the names of a salt's pages begin with; the request has no `extra_key`."""
    encoded = salt.encode()
    return hashlib.sha256(_SALT + b"\0" + b"\1" + struct.pack("<Q", len(encoded)) + encoded).digest()


def file_name(key: str, model: str) -> str:
    """SGLang's file of a page, for the name under which it serves the model on one GPU."""
    return f"{key}_{model.replace('/', '-')}_0_1.bin"


def write_pages(store: PrefixStore, digest: str, page: int) -> list[Path]:
    """The files of a prefix's pages; written where they are missing.

    Raises:
        UserError: there is no such prefix, its heads keep different numbers of entries, or `page` does not divide them.
    """
    header = store.header(digest)
    if header.page:
        raise UserError(
            f"prefix {digest}: its heads keep different numbers of entries, which SGLang cannot read; make it with "
            "options={allocate: uniform}",
            field="options",
            code="conflict",
        )
    if header.entries % page:
        raise UserError(
            f"prefix {digest} has {header.entries} entries, which pages of {page} do not divide; give a budget that "
            f"{page} divides, and send prompts within it as they are",
            field="budget",
            code="conflict",
        )
    folder = store.root / FOLDER
    paths = [folder / f"{digest}.{page}.{index}" for index in range(header.entries // page)]
    if all(path.is_file() for path in paths):
        return paths

    folder.mkdir(parents=True, exist_ok=True)
    tensors = store.tensors(digest)
    entries = torch.stack([tensors["keys"], tensors["values"]]).transpose(2, 3)  # [2, L, B, K, d]
    for path, entries_of_page in zip(paths, entries.split(page, dim=2), strict=True):
        with atomic_file(path) as unfinished:
            unfinished.write_bytes(entries_of_page.contiguous().view(torch.uint8).numpy().tobytes())
    return paths


def sampling_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of `/generate` for fields of `/v1/completions`.

    Raises:
        UserError: there is none for a field, or several answers are asked for.
    """
    parameters: dict[str, Any] = {"max_new_tokens": _MAX_TOKENS}
    for name, value in fields.items():
        if name in _RENAMED:
            parameters[_RENAMED[name]] = value
        elif name in _SAMPLING:
            parameters[name] = value
        elif not (name == "stream" and value) and not (name == "n" and value == 1):
            raise UserError(
                f"{name}={value!r} is no field of a streamed request to SGLang; leave it out, or call `ask`",
                field=name,
                code="conflict",
            )
    return parameters


@dataclass(frozen=True)
class _Question:
    """A question about a document, as token ids.

    Attributes:
        entries: Number of the prefix's entries, which the server must read.
        ids: The placeholders of the prefix.
        prompt: The same, followed by the question.
        paths: The files of the prefix's pages.
    """

    entries: int
    ids: list[int]
    prompt: list[int]
    paths: list[Path]


class Client:
    """Asks a server of SGLang about documents whose prefixes are in a folder, and discards answers without them.

    Args:
        url: Address of the server, such as http://127.0.0.1:30000.
        root: Folder of `keepsight prefix engine=sglang`.
        storage: The server's SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR. On the file system of `root` its files are links.
        tokenizer: The model's.
        key: The server's API key; None for none.
        attempts: How often a question is asked until the server has read the prefix.
        timeout: Seconds to wait for a reply.

    Raises:
        UserError: the server is not there, or has other settings than it needs.
    """

    def __init__(
        self,
        url: str,
        root: str | Path,
        storage: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str | None = None,
        attempts: int = 3,
        timeout: float = 600.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._storage = Path(at_home(storage))
        self._tokenizer = tokenizer
        self._key = key
        self._attempts = attempts
        self._timeout = timeout
        self.store = PrefixStore(root)
        info = self._call("/server_info", None)
        _require_settings(info)
        self._page = int(info["page_size"])
        self._model = str(info["served_model_name"])
        self._dtype = str(info.get("dtype"))
        self._least = _threshold(info)
        self._sends_pieces = bool(info.get("incremental_streaming_output"))  # in place of the answer so far

    def ask(self, digest: str, question: str, system: str | None = None, **fields: Any) -> dict[str, Any]:
        """The server's reply to a question about a document; `fields` are those of `/v1/completions`.

        `system` is the system message with which the prefix was made.

        Raises:
            UserError: there is no such prefix, the server refuses the request, or it does not read the prefix in so
                many attempts.
        """
        if fields.get("stream") or fields.get("n", 1) != 1:
            refused_field = "stream" if fields.get("stream") else "n"
            raise UserError(
                "SGLang says in a reply's usage how much it read from its cache: ask for one answer, and call `stream` "
                "for a streamed one",
                field=refused_field,
                code="conflict",
            )
        asked = self._question(digest, question, system)
        read = 0
        for _ in range(self._attempts):
            with self._linked(asked) as salt:
                request = {**fields, "model": self._model, "prompt": asked.prompt, "cache_salt": salt}
                reply = self._call("/v1/completions", request)
            usage = reply.get("usage") or {}
            read = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            if read == asked.entries:
                return reply
        raise self._missed(read, asked.entries)

    def stream(self, digest: str, question: str, system: str | None = None, **fields: Any) -> Chunks:
        """The answer to a question about a document, piece by piece, as chunks of a streamed `/v1/completions`.

        Nothing comes before the server has said that it read the whole prefix. Each chunk has one choice, with a
        further piece of the answer; the last one has the reason why it ends, and the usage. Closing the iterator ends
        the request.

        Args:
            digest: The prefix.
            question: What is asked.
            system: The system message with which the prefix was made.
            **fields: Those fields of `/v1/completions` that say how tokens are chosen and where an answer ends.

        Raises:
            UserError: as for `ask`, where the iterator is advanced first; or the answer breaks off.
        """
        parameters = sampling_parameters(fields)
        asked = self._question(digest, question, system)
        return self._checked_chunks(asked, parameters)

    def _checked_chunks(self, asked: _Question, parameters: dict[str, Any]) -> Chunks:
        """The chunks of the first of so many attempts for which the server reads the whole prefix."""
        read = 0
        for _ in range(self._attempts):
            with self._linked(asked) as salt:
                request = {"input_ids": asked.prompt, "sampling_params": parameters, "cache_salt": salt, "stream": True}
                with closing(self._events("/generate", request)) as events:
                    try:
                        yield from self._chunks(events, asked.entries)
                        return
                    except _MissedError as missed:
                        read = missed.read
        raise self._missed(read, asked.entries)

    def _chunks(self, events: Chunks, entries: int) -> Chunks:
        """The chunks of a reply's events; none before one of these says that all entries were read.

        Raises:
            UserError: the answer breaks off.
            _MissedError: the server has not read the `entries` from its cache; no chunk has come.
        """
        answer = ""
        sent = 0  # characters of it
        is_checked = False
        for event in events:
            text = event.get("text") or ""
            answer = answer + text if self._sends_pieces else text
            meta = event.get("meta_info") or {}
            read = meta.get("cached_tokens")
            if read is not None and read != entries:
                if sent:  # it was paused, and read again from other entries
                    raise self._broken_off(f"the server has {read} of the prefix's {entries} entries left")
                raise _MissedError(read)
            is_checked = is_checked or read is not None
            if not is_checked:
                continue
            reason = meta.get("finish_reason")
            if reason and reason.get("type") == "abort":
                raise self._broken_off(str(reason.get("message") or "the request was aborted"))
            piece = answer[sent:]
            if piece or reason:
                yield _chunk(piece, {**meta, "cached_tokens": entries})
            sent = max(sent, len(answer))
            if reason:
                return
        if not is_checked:
            raise _MissedError(0)
        raise self._broken_off("the stream ended before the answer did")

    def _broken_off(self, reason: str) -> UserError:
        return UserError(
            f"{self._url}/generate: {one_line(reason, 200)}; what has come of the answer is not all of it: ask again",
            field="url",
            code="service",
        )

    def _missed(self, read: int, entries: int) -> UserError:
        return UserError(
            f"the server read {read} of the prefix's {entries} entries in the last of {self._attempts} attempts, so "
            "that its answers are no answers about the document; look at its log, and ask again later",
            field="cached_tokens",
            code="service",
        )

    def _question(self, digest: str, question: str, system: str | None) -> _Question:
        """A question about a document, after a check that the server can read its prefix."""
        header = self.store.header(digest)
        tensors = self.store.tensors(digest)
        dtype = str(tensors["keys"].dtype).removeprefix("torch.")
        if dtype != self._dtype:
            raise UserError(
                f"prefix {digest} is of {dtype}, the server's dtype is {self._dtype}; start it with --dtype {dtype}",
                field="dtype",
                code="conflict",
            )
        if header.entries < self._least:
            raise UserError(
                f"prefix {digest} has {header.entries} entries, and the server looks for files from {self._least} "
                'tokens on; start it with --hicache-storage-backend-extra-config \'{"prefetch_threshold": '
                f"{header.entries}}}'",
                field="prefetch_threshold",
                code="range",
            )
        paths = write_pages(self.store, digest, self._page)
        ids = placeholders(digest, header.entries, alphabet_of(self._tokenizer))
        prompt = ids + self._question_ids(header.before, question, system)
        return _Question(header.entries, ids, prompt, paths)

    def _question_ids(self, before: str, question: str, system: str | None) -> list[int]:
        """The tokens behind the document of a chat message that asks about it."""
        messages = [{"role": "user", "content": f"{MARK}{question}"}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        around = split_at_mark(prompt_text(self._tokenizer, messages))
        if around is None or around[0] != before:
            raise UserError(
                "the chat template renders another text before the document than when the prefix was made; give the "
                "model's tokenizer, and the system message of that time",
                field="system",
                code="conflict",
            )
        (ids,) = encode(self._tokenizer, [around[1]], special=False)
        return ids

    @contextmanager
    def _linked(self, asked: _Question) -> Iterator[str]:
        """Within the block the server finds the pages of a question's prefix, for requests with this salt."""
        salt = uuid.uuid4().hex
        keys = page_keys(asked.ids, self._page, salt)
        files = [self._storage / file_name(key, self._model) for key in keys]
        try:
            self._storage.mkdir(parents=True, exist_ok=True)
            for path, file in zip(asked.paths, files, strict=True):
                try:
                    os.link(path, file)
                except OSError:  # on another file system
                    shutil.copyfile(path, file)
            yield salt
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        with self._opened(path, body) as reply:
            return json.loads(reply.read())

    def _events(self, path: str, body: dict[str, Any]) -> Chunks:
        """The events of a streamed reply; closing the generator closes the connection, which ends the request."""
        with self._opened(path, body) as reply:
            try:
                for line in reply:
                    kind, _, data = line.decode().strip().partition(":")
                    if kind == "data" and data.strip() == "[DONE]":
                        return
                    if kind == "data":
                        event = json.loads(data)
                        if not isinstance(event, dict) or event.get("error"):
                            raise self._broken_off(data)
                        yield event
            except UserError:
                raise
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise self._broken_off(str(error)) from None

    @contextmanager
    def _opened(self, path: str, body: dict[str, Any] | None) -> Iterator[Any]:
        """The reply to a request; within the block, too, an error of the connection or of the reply is a UserError."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            text = one_line(error.read().decode(errors="replace"), 200)
            raise UserError(f"{self._url}{path}: HTTP {error.code}: {text}", field="url", code="service") from None
        except UserError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserError(
                f"{self._url}{path}: {one_line(error)}; start SGLang's server, or give its address",
                field="url",
                code="service",
            ) from None


class _MissedError(Exception):
    """The server has read only `read` of a prefix's entries from its cache."""

    def __init__(self, read: int) -> None:
        super().__init__(read)
        self.read = read


def _chunk(piece: str, meta: dict[str, Any]) -> dict[str, Any]:
    """A chunk of `/v1/completions` with a piece of an answer, from what an event of `/generate` says beside it."""
    reason = meta.get("finish_reason")
    chunk: dict[str, Any] = {
        "object": "text_completion",
        "choices": [{"index": 0, "text": piece, "finish_reason": reason["type"] if reason else None}],
    }
    if reason:
        prompt_tokens = int(meta.get("prompt_tokens") or 0)
        answer_tokens = int(meta.get("completion_tokens") or 0)
        chunk["usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
            "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
        }
    return chunk


def _require_settings(info: dict[str, Any]) -> None:
    """Refuse a server whose files have another form, or that says nothing of what it read."""
    for name, expected in _REQUIRED.items():
        if info.get(name) != expected:
            raise UserError(
                f"SGLang's server has {name}={info.get(name)!r}, and prefixes need {expected!r}; start it as "
                "docs/serving.md says",
                field=name,
                code="conflict",
            )
    if info.get("kv_cache_dtype") not in ("auto", info.get("dtype")):
        raise UserError(
            f"SGLang's server has kv_cache_dtype={info.get('kv_cache_dtype')!r}, and prefixes hold the model's own "
            "numbers; start it without --kv-cache-dtype",
            field="kv_cache_dtype",
            code="conflict",
        )


def _threshold(info: dict[str, Any]) -> int:
    """Tokens from which a server looks for files."""
    config = info.get("hicache_storage_backend_extra_config") or {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            config = {}  # the name of a file, which the server reads itself
    return int(config.get("prefetch_threshold", _THRESHOLD))
