"""keepsight bench retrieve: a retrieval head's size, its decoding steps by part, and what elastic loading moves.

    keepsight bench retrieve retrieval=HEAD
    keepsight bench retrieve retrieval=null retrieval_head.features=none      # a head with random weights

Without `retrieval=` only size and speed are measured: what random weights choose says nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from keepsight.commands.bench.shared import print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import draft_of, resources_of, target_of
from keepsight.eval.bench.elastic import text_prompts, traffic_lines
from keepsight.eval.bench.retrieval import size_lines, step_lines
from keepsight.models.draft_head import DraftHead
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from keepsight.runtime.state import context_of


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench retrieve`.

    Attributes:
        lengths: KV entries in the cache while steps are timed; the entries are random.
        budgets: KV entries that a KV head reads per step; the largest one where steps are timed.
        batch: Batch size where steps are timed.
        repeats: Timed steps, after one to warm up.
        tokens: Length in tokens of the real texts over which loaded bytes are counted.
        samples: Number of these texts.
        answer_tokens: Decoding steps after each text.
    """

    lengths: list[int] = field(default_factory=lambda: [4096, 16384, 32768])
    budgets: list[int] = field(default_factory=lambda: [64, 256, 1024])
    batch: int = 1
    repeats: int = 5
    tokens: int = 4096
    samples: int = 3
    answer_tokens: int = 24


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "lengths", "budgets", "batch", "repeats", "tokens", "samples", "answer_tokens")
    print_lines(_lines(config, target_of(config)))


def _lines(config: Config, target: Target) -> Iterator[str]:
    if config.retrieval is None:
        yield "retrieval= is not given: this head has random weights, and takes as long as a trained one"
        context = context_of(target.model)
        shape = config.retrieval_head
        head = RetrievalHead.untrained(target.model, shape.features, context, shape.groups).to(target.model.dtype)
    else:
        head = resources_of(config, target).head
    yield from size_lines(target, head, _pruned_draft(config, target))
    yield from step_lines(target, head, max(config.budgets), config.lengths, config.batch, config.repeats)
    if config.retrieval is None:
        yield "bytes moved are not measured: what a random head chooses says nothing; give retrieval=FOLDER_OR_HUB_ID"
        return
    prompts = text_prompts(target, config.tokens, config.samples)
    yield from traffic_lines(target, head, config.budgets, prompts, config.answer_tokens)


def _pruned_draft(config: Config, target: Target) -> DraftHead | None:
    """The EAGLE-3 head that the recipe names, if it names one."""
    if config.draft.head is None:
        return None
    draft = draft_of(config, target)
    return draft.head if isinstance(draft, DraftHeadSource) and isinstance(draft.head, DraftHead) else None
