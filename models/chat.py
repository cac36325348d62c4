"""Tokenizers: loading, prompts as ids, chat templates, and the digests by which artifacts recognise them."""

import functools
import json
import logging
import math
import re
import string
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, regular

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(source: str | Path, **options: Any) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or Hub id; pads on the left, with its end token where it has no padding token.

    It encodes a word at once, because some values of a damaged tokenizer_config.json raise only then. Where files are
    missing or damaged, transformers and tokenizers raise exceptions of any type.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, padding_side="left", **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer("word")
    if has_chat_template(tokenizer) and not tokenizer.chat_template:
        _require_readable_chats(tokenizer)
    return tokenizer


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer renders chats: by its chat template or, as mistral-common's does, by code of its class."""
    from transformers import PreTrainedTokenizerBase

    usual = PreTrainedTokenizerBase.apply_chat_template
    return bool(tokenizer.chat_template) or getattr(type(tokenizer), "apply_chat_template", usual) is not usual


def _require_readable_chats(tokenizer: "PreTrainedTokenizerBase") -> None:
    """UserError unless the text of a chat has the ids that the tokenizer's class itself renders the chat to."""
    name = type(tokenizer).__name__
    logging.getLogger(type(tokenizer).__module__).setLevel(logging.ERROR)  # it warns of every chat what is checked here
    first = [{"role": "user", "content": " Two  words\n and \N{LATIN SMALL LETTER E WITH ACUTE}."}]
    later = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    for turns in (first, [*first, *later]):
        rendered: Any = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True)
        ids = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
        if encode(tokenizer, [chat_text(tokenizer, turns)], special=False) != [list(ids)]:
            raise UserError(
                f"its tokenizer ({name}) renders chats that cannot be read as text; give a folder with tokenizer.json "
                "and a chat template, and uninstall the package that the class comes from (mistral-common)",
                field="tokenizer",
                code="model",
            )


def encode(tokenizer: Any, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """The token ids of texts; special tokens that a chat template has written are read as such.

    Args:
        tokenizer: Any tokenizer of transformers.
        texts: The texts.
        special: Whether the tokenizer adds its special tokens, as around a text that no chat template has rendered. A
            text that already begins with them, such as a rendered chat with BOS, gets none.
    """
    if not special:
        return _encode_rendered(tokenizer, texts)
    start_text = _start_text(tokenizer)
    if not start_text or not any(text.startswith(start_text) for text in texts):
        return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=True)["input_ids"]]
    encoded = []
    for text in texts:
        if text.startswith(start_text):
            encoded += _encode_rendered(tokenizer, [text])
        else:
            encoded.append(list(tokenizer(text)["input_ids"]))
    return encoded


def _encode_rendered(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of texts that are rendered already: nothing is added, and special tokens are read as such."""
    special_ids = _unread_special_tokens(tokenizer)
    if not special_ids:
        return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    longest_first = sorted(special_ids, key=len, reverse=True)
    boundary = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
    encoded = []
    for text in texts:
        ids: list[int] = []
        for piece in filter(None, boundary.split(text)):
            if piece in special_ids:
                ids.append(special_ids[piece])
            else:
                ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        encoded.append(ids)
    return encoded


def start_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer adds before a text, such as BOS."""
    ids = list(tokenizer("a")["input_ids"])
    text_ids = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(ids)):
        if ids[start : start + len(text_ids)] == text_ids:
            return ids[:start]
    return []


def _start_text(tokenizer: Any) -> str:
    """The text of `start_tokens`, as a chat template writes it; empty where there are none."""
    start = start_tokens(tokenizer)
    if not start:
        return ""
    special_texts = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return "".join(special_texts.get(token, "") for token in start)


@functools.lru_cache(maxsize=16)
def _unread_special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens by their texts, of a tokenizer that reads these texts as any other; else none."""
    special_ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for text, token in special_ids.items():
        if list(tokenizer(text, add_special_tokens=False)["input_ids"]) == [token]:
            return {}
    return special_ids


def ids_of(model: "PreTrainedModel", prompts: Any, options: dict[str, Any], special: bool) -> "Tensor":
    """The ids [B, N] of prompts, on the model's device: text, a tokenizer's output or ids.

    Other outputs of a tokenizer, and the mask of texts of several lengths, are added to `options`. With `special`, text
    gets the special tokens that begin a prompt; see `encode`.

    Raises:
        UserError: they are something else, text without a tokenizer, or text that begins a prompt where it continues
            one (`special` is False).
    """
    from torch import Tensor, int32, int64

    tokenizer = options.pop("tokenizer", None)
    stop_strings = options.pop("stop_strings", None)
    if isinstance(prompts, str):
        prompts = [prompts]
    is_text = isinstance(prompts, list) and bool(prompts) and all(isinstance(prompt, str) for prompt in prompts)
    if is_text or stop_strings:
        tokenizer = tokenizer or _tokenizer_of(model)
    if is_text:
        rows = encode(tokenizer, prompts, special=special)
        if not special:
            _require_no_start(tokenizer, rows)
        prompts = _padded(rows, tokenizer.pad_token_id or 0)
    if isinstance(prompts, Mapping):
        for name, value in prompts.items():
            options.setdefault(name, value)
        prompts = options.pop("input_ids", None)
    if "pixel_values" not in options:
        options.pop("token_type_ids", None)  # many tokenizers return them, of no use to a decoder
    if not isinstance(prompts, Tensor) or prompts.dim() != 2 or prompts.dtype not in (int64, int32):
        raise UserError(
            "input_ids must be a tensor [B, N] of int64, text, or what a tokenizer makes with return_tensors='pt'",
            field="input_ids",
            code="type",
        )
    if stop_strings:
        options |= {"tokenizer": tokenizer, "stop_strings": stop_strings}
    embedding: Any = model.get_input_embeddings().weight
    return prompts if embedding.is_meta else prompts.to(embedding.device)  # meta: accelerate offloads it


def _require_no_start(tokenizer: Any, rows: list[list[int]]) -> None:
    """Refuse texts that continue a prompt and begin as one does."""
    start = start_tokens(tokenizer)
    if start and any(ids[: len(start)] == start for ids in rows):
        raise UserError(
            f"the text begins with {tokenizer.decode(start)!r}, as a new prompt does, but it continues one; give what "
            "follows alone, or a chat that was rendered again to Conversation.say_rendered",
            field="input_ids",
            code="conflict",
        )


def _padded(rows: list[list[int]], pad_token: int) -> dict[str, "Tensor"]:
    """Rows of ids as `input_ids` [B, N], padded on the left, and their `attention_mask`."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    marks = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token, padding_side="left"),
        "attention_mask": pad_sequence(marks, batch_first=True, padding_side="left"),
    }


def _tokenizer_of(model: "PreTrainedModel") -> Any:
    try:
        return load_tokenizer(model.config.name_or_path or "")
    except Exception as error:  # whatever the Hub's client raises
        raise UserError(
            f"give tokenizer=; there is none beside the model ({type(error).__name__})",
            field="tokenizer",
            code="missing",
        ) from None


def prompt_text(
    tokenizer: Any, turns: Sequence[dict[str, Any]], answer_prefix: str = "", chat_template: str | None = None
) -> str:
    """The turns as the model reads them, up to the first words of its answer.

    A model with a chat template (the tokenizer's, or `chat_template`) reads them as `chat_text` writes them. A base
    model has none, as in RULER's and LongBench's evaluations: it reads the turns' plain text, with a blank line between
    two turns, and continues it. The tokenizer adds its special tokens to plain text alone: a template writes its own.

    Raises:
        UserError: the chat template refuses these turns.
    """
    if has_chat_template(tokenizer):
        return chat_text(tokenizer, turns, chat_template) + answer_prefix
    text = "\n\n".join(str(turn["content"]) for turn in turns)
    if not answer_prefix:
        return text
    separated = text[-1:].isspace() or answer_prefix[0].isspace()
    separator = "" if separated else "\n"
    return f"{text}{separator}{answer_prefix}"


def chat_text(
    tokenizer: Any, turns: Sequence[dict[str, Any]], chat_template: str | None = None, **arguments: Any
) -> str:
    """The turns as text by the chat template (the tokenizer's by default), ending where the model's answer begins.

    `arguments` are further ones of the template, or of `apply_chat_template`.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses these turns.
    """
    name = tokenizer.name_or_path
    if not has_chat_template(tokenizer):
        raise UserError(
            f"model {name!r} has no chat template; set one by model.chat_template=FILE, or ask for the completion of a "
            "plain text",
            field="model.chat_template",
            code="missing",
        )
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **arguments}
    if chat_template is not None:
        options["chat_template"] = chat_template
    try:
        return str(tokenizer.apply_chat_template(list(turns), **options))
    except Exception as error:  # templates, which come with models, raise anything
        roles = ", ".join(str(turn.get("role")) for turn in turns)
        raise UserError(
            f"the chat template of {name!r} refuses the turns {roles}: {one_line(error)}", field="messages", code="data"
        ) from None


USUAL_ROLES = frozenset({"system", "user", "assistant"})
"""Roles of messages that templates may write without naming them."""


@cache
def template_roles(template: str) -> frozenset[str]:
    """The roles of messages that a chat template is made for: the usual ones, and those that it names.

    Many templates write any role into the prompt, also one that the model has never seen. A template that has no place
    for one of the usual roles refuses it itself.
    """
    from jinja2 import Environment

    literals = [text[1:-1] for _, kind, text in Environment().lex(template) if kind == "string"]
    return USUAL_ROLES | {*literals}


def with_arguments(template: Any, arguments: Mapping[str, Any]) -> str:
    """A chat template that sets arguments of its own, such as `enable_thinking`.

    Raises:
        UserError: there is no single template, or an argument is not a value that can be written there.
    """
    if not isinstance(template, str):
        raise UserError(
            f"model.template={dict(arguments)}: the model has no single chat template to set this in",
            field="model.template",
            code="model",
        )
    assignments = []
    for name, value in arguments.items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        is_text = isinstance(value, str) and not re.search("[\ud800-\udfff]", value)  # a lone surrogate has no UTF-8
        if not name.isidentifier() or not (is_number or is_text):
            raise UserError(
                f"model.template: {name}={value!a} must be a name with a text, a number, true or false",
                field="model.template",
                code="type",
            )
        assignments.append(f"{{% set {name} = {json.dumps(value)} %}}")
    return "".join(assignments) + template


def with_date(template: str, day: date) -> str:
    """A chat template whose `strftime_now` gives the time 00:00 of a day; transformers' own gives the present time."""
    directives = []
    for letter in string.ascii_letters:
        directives += [f"%{letter}", f"%-{letter}"]
    directives.append("%%")

    midnight = datetime.combine(day, time())
    replacements = {}
    for directive in directives:
        text = midnight.strftime(directive)
        if text != directive:  # strftime leaves directives that it does not have as they are
            replacements[directive] = text
    macro = (
        f"{{%- macro strftime_now(format) -%}}{{%- set rendered = namespace(text=format) -%}}"
        f"{{%- for directive, text in {json.dumps(replacements)}.items() -%}}"
        "{%- set rendered.text = rendered.text.replace(directive, text) -%}"
        "{%- endfor -%}{{ rendered.text }}{%- endmacro -%}"
    )
    return macro + template


def set_chat_template(tokenizer: "PreTrainedTokenizerBase", path: str | Path) -> None:
    """Give a tokenizer the chat template in a Jinja file, in place of its own if it has one.

    Raises:
        UserError: the file cannot be read, or it is no template that writes a user's message.
    """
    source = f"model.chat_template={path}"
    message = "a user's message"
    if not tokenizer.chat_template and has_chat_template(tokenizer):
        raise UserError(
            f"{source}: {type(tokenizer).__name__} renders chats by code of its own; leave it out",
            field="model.chat_template",
            code="model",
        )
    try:
        tokenizer.chat_template = regular(Path(at_home(path))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{source}: cannot be read as UTF-8 text ({one_line(error)})", field="model.chat_template", code="file"
        ) from None
    try:
        text = chat_text(tokenizer, [{"role": "user", "content": message}])
    except UserError as error:
        message = f"{source}: {error}; expected a Jinja template"
        raise UserError(message, field="model.chat_template", code="file") from None
    if message not in text:
        raise UserError(
            f"{source}: expected a Jinja template that writes each message's content; it leaves it out",
            field="model.chat_template",
            code="file",
        )
