"""keepsight inspect: an HTML page of the prompt tokens that a method keeps."""

from functools import partial
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch

from keepsight.commands.config import Inspect as Config
from keepsight.commands.from_recipe import resources_of, target_of, without_weights
from keepsight.commands.variants import require_evict
from keepsight.errors import UserError, printable
from keepsight.eval.record import FULL
from keepsight.eval.report.pages import write_inspect_page
from keepsight.files import at_home, regular, require_writable
from keepsight.models.answer_text import answer_text
from keepsight.models.chat import encode, has_chat_template, prompt_text
from keepsight.models.decoder import context_of
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache, Method, decode, stop_after
from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.prompt_compression.text import token_texts
from keepsight.runtime.state import State, prefill


def run(config: Config) -> str:
    """Write the page; returns what to do next."""
    out = Path(config.out)
    require_writable(out, folder=False)
    if out.is_file() and not out.read_bytes().startswith(b"<!DOCTYPE html>"):
        raise UserError(f"out={out} is a file but not a page; choose another out=", field="out", code="file")
    resources = resources_of(config, without_weights(config))
    methods = {name: _method(name, config, resources) for name in (config.method, config.compare)}
    text = read_text(config.prompt)  # bad values are refused before anything loads

    target = target_of(config)
    ids = torch.tensor([_ids(text, config.template, target)], device=target.model.device)
    full_state = prefill(target.model, ids)
    answers = {FULL: _answer(FullCache(), target, full_state.copy(), config.max_new_tokens)}
    kept_entries = {}
    for name, method in methods.items():
        kept_entries[name], state = _evicted(method, target, ids)
        answers[name] = _answer(method, target, state, config.max_new_tokens)

    tokens = token_texts(target.tokenizer, ids[0].tolist())
    settings = {
        "model": target.name,
        "version": target.version,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "budget": config.budget,
        "adapter": config.adapter,
        "prompt tokens": len(tokens),
    }
    title = f"{Path(target.name).name}: {config.method} at budget {config.budget}"
    write_inspect_page(out, tokens, kept_entries, title, settings, answers)
    width = max(map(len, answers))
    for name, answer in answers.items():
        print(printable(f"{name:<{width}}  {shorten(answer, 100)}"))
    print(f"{len(tokens)} tokens, {config.budget} kept per layer and KV head: {config.out}")
    return "open the page in a browser"


def _method(name: str, config: Config, resources: Resources) -> Evict:
    options = config.options if name == config.method else {}
    method = make_method(name, config.budget, resources, **options)
    return require_evict(method, f"method {name!r} evicts nothing from the cache, so there is nothing to inspect")


def read_text(prompt: str) -> str:
    """A prompt from its text, or from @FILE."""
    if not prompt.startswith("@"):
        return prompt
    try:
        return regular(Path(at_home(prompt[1:]))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"prompt={prompt}: cannot be read as UTF-8 text ({error})", field="prompt", code="file"
        ) from None


def _ids(text: str, template: bool, target: Target) -> list[int]:
    if template:
        text = prompt_text(target.tokenizer, [{"role": "user", "content": text}])
    special = not template or not has_chat_template(target.tokenizer)
    (ids,) = encode(target.tokenizer, [text], special=special)
    context = context_of(target.model)
    if not 0 < len(ids) <= context:
        raise UserError(
            f"the prompt has {len(ids)} tokens; this model takes 1 to {context}", field="prompt", code="range"
        )
    return ids


def _evicted(method: Evict, target: Target, ids: torch.Tensor) -> tuple[np.ndarray, State]:
    """Which entries stay, [layers, KV heads, N] bool, and the state of these."""
    method.check(ids.shape[1], context_of(target.model))
    state: State = prefill(target.model, ids, needs=method.needs())
    if method.fits(state):
        raise UserError(
            f"budget={method.budget} keeps all {state.length} prompt tokens; lower it", field="budget", code="range"
        )
    evicted_state, kept_entries = method.evict(target.model, state)
    return torch.cat(kept_entries).cpu().numpy(), evicted_state


@torch.no_grad()
def _answer(method: Method, target: Target, state: State, limit: int) -> str:
    """The greedy answer from a state, which is changed."""
    decoded = decode(
        method.reader(target.model),
        state,
        stop_after(limit, target.end_tokens),
        pad_token=target.pad_token,
        eviction=method.periodic_eviction(target.model),
        restart=partial(method.restart, target.model),
    )
    return answer_text(target.tokenizer, decoded.ids[0].tolist())
