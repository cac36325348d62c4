"""keepsight bench: measure what a training step and a sweep cost on this machine.

    keepsight bench train tokens=1024 answer_tokens=64      # one training step against one inference prefill
    keepsight bench eval tokens=1024 samples=3              # one sweep against as many separate runs

Prints times as median and range of `repeats`, and peak memory. Nothing is written.
"""

from dataclasses import dataclass

from keepsight.config import Recipe, at_least_one
from keepsight.errors import UserError
from keepsight.eval.bench import bench_sweep
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.methods import make_method
from keepsight.targets import adapter_of, target_of
from keepsight.train.bench import bench_step

POSITIONAL = ("what",)


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench`.

    Attributes:
        what: train or eval.
        tokens: Prompt length.
        answer_tokens: Answer length.
        repeats: Timed repetitions after one that warms up.
        samples: Samples of bench eval.
    """

    what: str = "???"
    tokens: int = 1024
    answer_tokens: int = 64
    repeats: int = 5
    samples: int = 3


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "answer_tokens", "repeats", "samples")
    if config.what == "train":
        lookahead = Lookahead(target_of(config).model, config.lookahead)
        print(bench_step(lookahead, config.tokens, config.answer_tokens, config.repeats))
    elif config.what == "eval":
        methods = [(name, budget) for name in ("lookaheadkv", "snapkv", "streamingllm") for budget in (64, 128, 256)]
        made = {f"{name} {budget}": make_method(name, budget, adapter_of(config)) for name, budget in methods}
        print(bench_sweep(target_of(config), made, config.tokens, config.answer_tokens, config.samples))
    else:
        raise UserError(f"bench {config.what!r} is unknown; choose train or eval")
