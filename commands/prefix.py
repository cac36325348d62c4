"""keepsight prefix: prefill documents and evict from them once, as prefixes that vLLM loads."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from keepsight.commands.config_serving import Prefix as Config
from keepsight.commands.from_recipe import resources_of, target_of, without_weights
from keepsight.commands.inspect import read_text
from keepsight.commands.variants import letters_for, prefix_method
from keepsight.errors import BadRow, UserError, printable
from keepsight.files import (
    JsonObject,
    append_lines,
    cut_torn_line,
    from_json,
    hex_digest,
    json_digest,
    require_writable,
    text_lines,
)
from keepsight.models.chat import encode, has_chat_template, prompt_text
from keepsight.models.decoder import context_of
from keepsight.models.identity import identity_of
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.serving import sglang
from keepsight.serving.export import export, placeholders_of, require_no_windows
from keepsight.serving.prefix import MARK, PrefixStore, split_at_mark

INDEX = "index.jsonl"
LOCKS = ".locks"


@dataclass(frozen=True)
class Document:
    """A text, and where it came from."""

    source: str
    text: str


def run(config: Config) -> None:
    """Write the prefixes, and print the messages that ask about them."""
    if (config.prompt is None) == (config.documents is None):
        raise UserError(
            "give prompt=TEXT, prompt=@FILE or documents=FILE, one of them", field="prompt", code="conflict"
        )
    documents = [*_documents(config)]  # bad values are refused before anything loads
    require_writable(Path(config.out))
    sglang_page = 0
    if config.engine == "sglang":
        sglang_page = config.page or sglang.PAGE
        config = replace(config, page=0)  # heads keep equal numbers
    outline = without_weights(config)
    require_no_windows(outline.model)
    method = prefix_method(config, resources_of(config, outline))
    target = target_of(config)
    writer = Writer(config, target, method, sglang_page)

    run = _Run(config, writer)
    busy = list[Document]()
    for document in documents:
        if isinstance(document, BadRow):
            run.skip(str(config.documents), document)
        elif not run.write(document, wait=False):
            busy.append(document)
    for document in busy:
        run.write(document, wait=True)

    if not run.written:
        raise UserError(
            f"{config.documents}: none of its {run.skipped} rows could be read", field="documents", code="data"
        )
    summary = f"{run.written} prefixes in {config.out}"
    if run.skipped:
        summary += f", {run.skipped} rows skipped"
    print(summary)
    print(f"model for {'SGLang' if sglang_page else 'vLLM'}: {target.source}")


class _Run:
    """Counts the prefixes that a command has written, and the documents that it has skipped."""

    def __init__(self, config: Config, writer: "Writer") -> None:
        self.config = config
        self.writer = writer
        self.written = 0
        self.skipped = 0

    def write(self, document: Document, wait: bool) -> bool:
        """Write a document's prefix, or skip it; False while another process writes it, unless `wait`."""
        try:
            row = self.writer.write(document, wait)
        except UserError as error:
            self.skip(document.source, error)
            return True
        if row is None:
            return False
        self.written += 1
        print(printable(f"{row['id']}  {row['tokens']} tokens in {row['entries']}  {document.source}"), flush=True)
        print(f"  send: [[keepsight:{row['id']}]]QUESTION", flush=True)
        return True

    def skip(self, source: str, error: UserError) -> None:
        """Pass over a document; raises the error where more are skipped than `skip=` allows."""
        self.skipped += 1
        print(printable(f"skipped {source}: {error}"), file=sys.stderr)
        config = self.config
        if config.documents is None or (config.skip is not None and self.skipped > config.skip):
            raise error


class Writer:
    """Writes prefixes to a folder, as other processes may do at the same time; UserError if no id can be encoded.

    With `sglang_page`, pages of so many entries are written for SGLang as well.
    """

    def __init__(self, config: Config, target: Target, method: Evict, sglang_page: int = 0) -> None:
        self.out = Path(config.out)
        self.page = config.page
        self.sglang_page = sglang_page
        self.target = target
        self.method = method
        self.store = PrefixStore(self.out)
        self.letters = letters_for(target, method.budget)
        self._rows = dict[str, list[JsonObject]]()  # of the index, by key
        self._read_to = 0  # bytes of the index

        messages = [{"role": "user", "content": f"{MARK}?"}]
        if config.system is not None:
            messages.insert(0, {"role": "system", "content": config.system})
        around = split_at_mark(prompt_text(target.tokenizer, messages))
        if around is None:
            raise UserError(
                f"the chat template of {target.name!r} does not render a message's text once, as it is",
                field="model.id",
                code="model",
            )
        self.before, _ = around
        self.identity = identity_of(target.model, target.tokenizer)
        settings = {
            "identity": asdict(self.identity),
            "dtype": str(target.model.dtype),
            "method": repr(method),
            "adapter": method.adapter_digest,
            "before": self.before,
            "page": self.page,
        }
        self.settings = json_digest(settings)

    def write(self, document: Document, wait: bool) -> JsonObject | None:
        """The index row of a document, which is prefilled if it has none; None while another process prefills it.

        UserError if it does not fit the model's context, or cannot be stored.
        """
        row = self._row(document, wait)
        if row is not None and self.sglang_page:
            sglang.write_pages(self.store, row["id"], self.sglang_page)
        return row

    def _row(self, document: Document, wait: bool) -> JsonObject | None:
        """As `write`, without pages for SGLang."""
        key = hex_digest([f"{self.settings} {document.text}".encode()])
        row = self._written_row(key)
        if row is not None:
            return row
        folder = self.out / LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        timeout = -1 if wait else 0
        try:
            with FileLock(folder / key[:32], timeout=timeout):
                return self._written_row(key) or self._prefill(key, document)
        except Timeout:
            return None

    def _written_row(self, key: str) -> JsonObject | None:
        """The index row of a prefix that is there."""
        self._read_index()
        for row in self._rows.get(key, []):
            try:
                self.store.header(row["id"])
            except (UserError, KeyError, TypeError):
                continue  # removed or damaged: it is made anew
            return row
        return None

    def _read_index(self) -> None:
        """Read the lines that this process or another has added; a torn one and bad ones are passed over."""
        index = self.out / INDEX
        if not index.is_file():
            return
        with index.open("rb") as lines:
            lines.seek(self._read_to)
            for line in lines:
                if line.endswith(b"\n"):
                    self._read_to += len(line)
                    with suppress(ValueError):
                        row = from_json(line, JsonObject)
                        self._rows.setdefault(str(row.get("key")), []).append(row)

    def _prefill(self, key: str, document: Document) -> JsonObject:
        """Prefill a document, evict from it, and write its prefix and its index row."""
        model = self.target.model
        tokenizer = self.target.tokenizer
        special = not has_chat_template(tokenizer)
        (ids,) = encode(tokenizer, [self.before + document.text], special=special)
        context = context_of(model)
        if len(ids) > context:
            raise UserError(
                f"the document has {len(ids)} tokens, and the model's context is {context}",
                field="documents",
                code="range",
            )
        self.method.check(len(ids), context)

        state = self.method.start(model, torch.tensor([ids], device=model.device))
        entries = placeholders_of(state, self.page)
        if entries < self.letters:
            raise UserError(
                f"{entries} entries cannot spell an id of {self.letters} letters; send it as it is",
                field="documents",
                code="range",
            )
        digest, header = export(
            model,
            state,
            self.out,
            page=self.page,
            before=self.before,
            identity=self.identity,
            method=repr(self.method),
        )

        row = {"key": key, "id": digest, "source": document.source, "tokens": len(ids), "entries": header.entries}
        index = self.out / INDEX
        with FileLock(self.out / LOCKS / "index"):
            if index.exists():
                cut_torn_line(index)
            append_lines(index, [row])
        return row


def _documents(config: Config) -> Iterator[Document | BadRow]:
    if config.documents is None:
        yield Document(str(config.prompt)[:60], read_text(str(config.prompt)))
        return
    path = Path(config.documents)
    if not path.is_file():
        raise UserError(f"documents={path}: no such file", field="documents", code="missing")
    for number, line in text_lines(path):
        try:
            row = from_json(line, JsonObject)
            text = row.get("text")
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"expected a text in 'text', got the fields {sorted(row)}", field="text", code="type")
            yield Document(f"{path}:{number}", text)
        except UserError as error:
            yield BadRow(f"line {number}: {error}", field=error.field, code=error.code)
