"""The digest of what a row of an evaluation depends on, by which `keepsight.eval.record.RowStore` finds it again.

The digest covers the base model's weights, dtype, device and attention; the sample's tokens, references and metric; the
method with every option, its trained weights and, where its class is a plugin's, its source; and `RESULTS_VERSION`,
which stands for the code of keepsight itself. It does not cover names: a method under another label, or a sample under
another number, is the same.
"""

import ast
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from keepsight.eval.tasks.samples import RenderedSample
from keepsight.files import bytes_digest, file_digest, json_digest
from keepsight.models.identity import tensors_digest, weights_digest
from keepsight.models.targets import Target
from keepsight.models.transformers_internals import attention_of_config
from keepsight.runtime.generate import Method

RESULTS_VERSION = 2
"""Raised with every change of the code that changes a score, an answer or a likelihood."""
_NAMES_OF_A_SAMPLE = ("id", "task", "length", "is_cut")
_NO_PLUGINS = {"keepsight", "peft", "torch", "transformers", "typing_extensions", *sys.stdlib_module_names}
"""Packages whose code is no plugin's; `RESULTS_VERSION` stands for that of the first."""


def target_digest(target: Target) -> str:
    """Digest of the base model and of the device: what answers and times depend on apart from sample and method."""
    model = target.model
    device = [model.device.type, str(model.dtype), attention_of_config(model.config), target.end_tokens]
    return json_digest([RESULTS_VERSION, target.version, weights_digest(model), *device])


def sample_digest(sample: RenderedSample) -> str:
    """Digest of a sample's prompt and scoring, without its names."""
    contents = dict(vars(sample))
    for name in _NAMES_OF_A_SAMPLE:
        del contents[name]
    if not contents["draw"]:
        del contents["draw"]  # the digests of greedy answers are older than it
    return bytes_digest([_text(contents).encode()])


def inputs_digest(target: str, contents: Sequence[str], position: int, question: str, method: str) -> str | None:
    """Digest of everything that a row depends on; None where `method`, a `method_text`, is empty.

    `contents` are the `sample_digest` of the samples that share the compressed cache, the row's at `position`;
    `question` is one of `keepsight.runtime.saved.QUESTIONS`, or `turns` of a conversation.
    """
    if not method:
        return None
    return json_digest([target, *contents, position, question, method])


def method_text(method: Method) -> str:
    """A method with all its parts, weights as digests; empty where a part has no text that says all of it."""
    try:
        return _text(method)
    except TypeError:
        return ""


def _text(value: Any) -> str:
    return json.dumps(value, default=_described, sort_keys=True)


def _described(part: Any) -> Any:
    """JSON values for tensors, modules, artifacts, and the frozen dataclasses that methods are made of."""
    if isinstance(part, Tensor):
        return part.tolist()
    if isinstance(part, PreTrainedTokenizerBase):
        return "tokenizer"  # the base model's
    source = plugin_digest(type(part))
    if isinstance(part, nn.Module):
        module = [getattr(part, "config", None), _weights(part)]
        return module if source is None else [*module, source]
    if not is_dataclass(part) or isinstance(part, type):
        raise TypeError(f"{type(part)} has no text")

    described: dict[str, Any] = {"kind": type(part).__qualname__}
    if source is not None:
        described["source"] = source
    digest = getattr(part, "digest", None)
    if digest:
        described["digest"] = digest
        return described
    for option in fields(part):
        if option.compare and option.init:
            described[option.name] = getattr(part, option.name)
    return described


@functools.lru_cache(maxsize=2)
def _weights(module: nn.Module) -> str:
    return tensors_digest(module.state_dict().items())


# The source of plugins


def plugin_digest(kind: type) -> str | None:
    """Digest of the files of a plugin that a class and its bases come from; None for a class of keepsight's own.

    They are the modules of the classes, and those beside them that these import.
    TypeError: a class was defined where no file has its source, such as in a notebook.
    """
    paths: set[Path] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _NO_PLUGINS:
            continue
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if file is None:
            raise TypeError(f"{base} has no source file")
        paths |= _files_of_plugin(base.__module__, Path(file))
    if not paths:
        return None
    return json_digest([file_digest(path) for path in sorted(paths)])


def _files_of_plugin(module: str, file: Path) -> set[Path]:
    """A module's file, and those of the modules of the same package or folder that it imports, directly or not."""
    depth = module.count(".")
    if file.name == "__init__.py":
        depth += 1
    import_folder = file.parents[depth]
    plugin_folder = import_folder / module.partition(".")[0] if depth > 0 else import_folder
    is_alone = depth == 0 and import_folder.name in ("site-packages", "dist-packages")  # beside all other packages

    paths = {file}
    unread = [file]
    while unread and not is_alone:
        path = unread.pop()
        for imported in _imported_files(path, import_folder):
            if imported not in paths and imported.is_relative_to(plugin_folder):
                paths.add(imported)
                unread.append(imported)
    return paths


def _imported_files(path: Path, import_folder: Path) -> Iterator[Path]:
    """The files in a folder that the import statements of a Python file may name."""
    if path.suffix != ".py":
        return
    for statement in ast.walk(ast.parse(path.read_bytes())):
        names: list[str] = []
        folder = import_folder
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            module = statement.module or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in statement.names]
            if statement.level:
                folder = path.parents[statement.level - 1]
        for name in names:
            parts = name.split(".")
            if folder == import_folder and parts[0] in _NO_PLUGINS:
                continue
            for length in range(1, len(parts) + 1):
                module_path = folder.joinpath(*parts[:length])
                for candidate in (module_path.with_name(f"{module_path.name}.py"), module_path / "__init__.py"):
                    if candidate.is_file():
                        yield candidate
