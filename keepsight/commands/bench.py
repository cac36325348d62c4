"""keepsight bench: measure what training, sweeps, evictions, packed caches, drafts and retrieval cost on this machine.

    keepsight bench train tokens=1024 answer_tokens=64      # one training step against one inference prefill
    keepsight bench eval tokens=1024 answer_tokens=24       # one sweep against as many separate runs
    keepsight bench evict lengths=[1024,4096]               # observe and select of each method against the prefill
    keepsight bench specache tokens=2048 bits=[1]           # a decoding step on packed entries, by part
    keepsight bench speculate draft.head=HEAD draft.layers=null     # speculative decoding against plain decoding
    keepsight bench retrieve retrieval=HEAD                 # a retrieval head: its size, its steps, what it loads

Prints times as median of `repeats`, and peak memory. Nothing is written.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import draft_of, resources_of, target_of
from keepsight.data_gen.shards import read_training_samples
from keepsight.errors import UserError
from keepsight.eval.bench.elastic import text_prompts, traffic_lines
from keepsight.eval.bench.retrieval import size_lines, step_lines
from keepsight.eval.bench.specache import bench_specache
from keepsight.eval.bench.speculative import bench_speculate
from keepsight.eval.bench.sweep import bench_evict, bench_sweep
from keepsight.eval.tasks.niah import make_samples
from keepsight.eval.tasks.samples import render
from keepsight.models.draft_head import DraftHead
from keepsight.models.drafts import HeadDraft
from keepsight.models.lookahead import Lookahead
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.method import Method
from keepsight.runtime.methods import SpeCache, make_method
from keepsight.runtime.prefill import context_of
from keepsight.train.lookahead.bench import bench_step

POSITIONAL = ("what",)
_TOKENS, _BUDGETS = 1024, [64, 128, 256]


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench`.

    Attributes:
        what: train, eval, evict, specache, speculate or retrieve.
        tokens: Prompt length of all but bench evict, 1024 by default, 4096 for the texts of bench retrieve; the longest
            one where prompts come from `data`.
        answer_tokens: Answer length; timed steps of bench specache; the longest answer of bench speculate.
        draft_tokens: Tokens of a draft of bench speculate.
        data: Folder made by `keepsight data`, for the prompts of bench speculate; needles in a haystack by default.
        batch: Rows of bench specache and of bench retrieve's steps.
        bits: Of bench specache.
        lengths: Prompt lengths of bench evict, [1024,4096] by default; entries of bench retrieve, [4096,16384,32768].
        methods: Of bench eval and bench evict.
        budgets: Entries per layer and KV head, [64,128,256] by default, [64,256,1024] of bench retrieve. Bench evict
            takes the first, and the steps of bench retrieve the largest.
        repeats: Timed repetitions after one that warms up.
        samples: Samples of bench eval, prompts of bench speculate, texts of bench retrieve.
    """

    what: str = "???"
    tokens: int | None = None
    answer_tokens: int = 24
    draft_tokens: int = 5
    data: str | None = None
    batch: int = 1
    bits: list[int] = field(default_factory=lambda: [1, 2])
    lengths: list[int] | None = None
    methods: list[str] = field(
        default_factory=lambda: ["lookaheadkv", "snapkv", "pyramidkv", "adakv", "tova", "streamingllm"]
    )
    budgets: list[int] | None = None
    repeats: int = 5
    samples: int = 3


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "answer_tokens", "draft_tokens", "repeats", "samples", "batch")
    if config.tokens is not None:
        at_least_one(config, "tokens")
    if config.what not in BENCHES:
        raise UserError(f"bench {config.what!r} is unknown; choose one of {', '.join(BENCHES)}")
    if [] in (config.lengths, config.methods, config.budgets):
        raise UserError("lengths=, methods= and budgets= must each name something to measure")
    if any(length < 1 for length in config.lengths or ()):
        raise UserError(f"lengths={config.lengths} must each be at least 1")
    for line in BENCHES[config.what](config, target_of(config)):
        tqdm.write(line)
        sys.stdout.flush()


def _train(config: Config, target: Target) -> Iterator[str]:
    lookahead = Lookahead(target.model, config.lookahead)
    yield bench_step(lookahead, config.tokens or _TOKENS, config.answer_tokens, config.repeats)


def _eval(config: Config, target: Target) -> Iterator[str]:
    made = {f"{name} {budget}": method for name, budget, method in _made(config, target, config.budgets or _BUDGETS)}
    yield bench_sweep(target, made, config.tokens or _TOKENS, config.answer_tokens, config.samples)


def _evict(config: Config, target: Target) -> Iterable[str]:
    evicting: dict[str, Evict] = {}
    for name, _, method in _made(config, target, (config.budgets or _BUDGETS)[:1]):
        if not isinstance(method, Evict):
            raise UserError(f"method {name!r} evicts nothing from the cache; bench evict measures those that do")
        evicting[name] = method
    return bench_evict(target, evicting, config.lengths or [1024, 4096], config.repeats)


def _specache(config: Config, target: Target) -> Iterator[str]:
    for bits in config.bits:
        tokens = config.tokens or _TOKENS
        yield from bench_specache(target, SpeCache(bits), tokens, config.batch, config.answer_tokens)


def _speculate(config: Config, target: Target) -> Iterable[str]:
    if config.draft.head is None:
        raise UserError("bench speculate measures a draft head; name it: draft.head=FOLDER_OR_HUB_ID draft.layers=null")
    draft = draft_of(config, target)
    assert isinstance(draft, HeadDraft)
    prompts = _data_prompts(config, target) if config.data else _needle_prompts(config, target)
    return bench_speculate(target, draft.head, prompts, config.answer_tokens, config.draft_tokens)


def _retrieve(config: Config, target: Target) -> Iterator[str]:
    budgets = config.budgets or [64, 256, 1024]
    if config.retrieval is None:
        yield "retrieval= is not given: this head has random weights, and takes as long as a trained one"
        context = context_of(target.model)
        head = RetrievalHead.untrained(target.model, config.retrieval_head.features, context).to(target.model.dtype)
    else:
        head = resources_of(config, target).head
    yield from size_lines(target, head, _pruned_draft(config, target))
    lengths = config.lengths or [4096, 16384, 32768]
    yield from step_lines(target, head, max(budgets), lengths, config.batch, config.repeats)
    if config.retrieval is None:
        yield "bytes moved are not measured: what a random head chooses says nothing; give retrieval=FOLDER_OR_HUB_ID"
        return
    prompts = text_prompts(target, config.tokens or 4096, config.samples)
    yield from traffic_lines(target, head, budgets, prompts, config.answer_tokens)


def _pruned_draft(config: Config, target: Target) -> DraftHead | None:
    """The EAGLE-3 head that the recipe names, if it names one."""
    if config.draft.head is None:
        return None
    draft = draft_of(config, target)
    return draft.head if isinstance(draft, HeadDraft) and isinstance(draft.head, DraftHead) else None


BENCHES: dict[str, Callable[[Config, Target], Iterable[str]]] = {
    "train": _train,
    "eval": _eval,
    "evict": _evict,
    "specache": _specache,
    "speculate": _speculate,
    "retrieve": _retrieve,
}


def _made(config: Config, target: Target, budgets: list[int]) -> list[tuple[str, Any, Method]]:
    resources = resources_of(config, target)
    return [(name, budget, make_method(name, budget, resources)) for name in config.methods for budget in budgets]


def _needle_prompts(config: Config, target: Target) -> list[list[int]]:
    samples = make_samples("single", config.tokens or _TOKENS, config.samples, 0, target.tokenizer)
    return [render(sample, target.tokenizer) for sample in samples]


def _data_prompts(config: Config, target: Target) -> list[list[int]]:
    """The last prompts of a data folder that are short enough."""
    assert config.data is not None
    samples, _ = read_training_samples(Path(config.data), target.name, target.template_digest)
    most = config.tokens or _TOKENS
    prompts = [sample.prompt_ids for sample in samples if len(sample.prompt_ids) <= most]
    if len(prompts) < config.samples:
        raise UserError(
            f"data={config.data}: {len(prompts)} prompts have at most {most} tokens, samples= needs "
            f"{config.samples}; lower it, or raise tokens="
        )
    return prompts[-config.samples :]
