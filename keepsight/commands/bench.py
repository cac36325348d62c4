"""keepsight bench: measure what a training step, a sweep, an eviction and a packed cache cost on this machine.

    keepsight bench train tokens=1024 answer_tokens=64      # one training step against one inference prefill
    keepsight bench eval tokens=1024 answer_tokens=24       # one sweep against as many separate runs
    keepsight bench evict lengths=[1024,4096]               # observe and select of each method against the prefill
    keepsight bench specache tokens=2048 bits=[1]           # a decoding step on packed entries, by part

Prints times as median of `repeats`, and peak memory. Nothing is written.
"""

from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from keepsight.config import Recipe, at_least_one
from keepsight.errors import UserError
from keepsight.eval.bench import bench_evict, bench_sweep
from keepsight.eval.bench_specache import bench_specache
from keepsight.models.lookahead import Lookahead
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.method import Method
from keepsight.runtime.methods import SpeCache, make_method
from keepsight.targets import resources_of, target_of
from keepsight.train.bench import bench_step

POSITIONAL = ("what",)
BENCHES = ("train", "eval", "evict", "specache")


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench`.

    Attributes:
        what: train, eval, evict or specache.
        tokens: Prompt length of all but bench evict.
        answer_tokens: Answer length; timed steps of bench specache.
        batch: Rows of bench specache.
        bits: Of bench specache.
        lengths: Prompt lengths of bench evict.
        methods: Of bench eval and bench evict.
        budgets: Entries per layer and KV head; bench evict takes the first.
        repeats: Timed repetitions after one that warms up.
        samples: Samples of bench eval.
    """

    what: str = "???"
    tokens: int = 1024
    answer_tokens: int = 24
    batch: int = 1
    bits: list[int] = field(default_factory=lambda: [1, 2])
    lengths: list[int] = field(default_factory=lambda: [1024, 4096])
    methods: list[str] = field(
        default_factory=lambda: ["lookaheadkv", "snapkv", "pyramidkv", "adakv", "tova", "streamingllm"]
    )
    budgets: list[int] = field(default_factory=lambda: [64, 128, 256])
    repeats: int = 5
    samples: int = 3


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "answer_tokens", "repeats", "samples", "batch")
    if config.what not in BENCHES:
        raise UserError(f"bench {config.what!r} is unknown; choose one of {', '.join(BENCHES)}")
    if not (config.lengths and config.methods and config.budgets):
        raise UserError("lengths=, methods= and budgets= must each name something to measure")
    target = target_of(config)
    if config.what == "train":
        lookahead = Lookahead(target.model, config.lookahead)
        print(bench_step(lookahead, config.tokens, config.answer_tokens, config.repeats))
    elif config.what == "eval":
        made = {f"{name} {budget}": method for name, budget, method in _made(config, target, config.budgets)}
        print(bench_sweep(target, made, config.tokens, config.answer_tokens, config.samples))
    elif config.what == "specache":
        for bits in config.bits:
            for line in bench_specache(target, SpeCache(bits), config.tokens, config.batch, config.answer_tokens):
                print(line, flush=True)
    else:
        evicting: dict[str, Evict] = {}
        for name, _, method in _made(config, target, config.budgets[:1]):
            if not isinstance(method, Evict):
                raise UserError(f"method {name!r} evicts nothing from the cache; bench evict measures those that do")
            evicting[name] = method
        for line in bench_evict(target, evicting, config.lengths, config.repeats):
            tqdm.write(line)


def _made(config: Config, target: Target, budgets: list[int]) -> list[tuple[str, Any, Method]]:
    resources = resources_of(config, target)
    return [(name, budget, make_method(name, budget, resources)) for name in config.methods for budget in budgets]
