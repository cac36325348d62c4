"""keepsight bench speculate: speculative decoding with a draft head against plain decoding.

    keepsight bench speculate draft.head=HEAD draft.layers=null
    keepsight bench speculate draft.head=HEAD draft.layers=null data=runs/data samples=10

Prints tokens per second of both, the acceptance length, and whether the answers are the same.
"""

from dataclasses import dataclass
from pathlib import Path

from keepsight.commands.bench.shared import print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import draft_of, target_of
from keepsight.data_gen.store import read_training_samples
from keepsight.errors import UserError
from keepsight.eval.bench.speculative import bench_speculate
from keepsight.eval.tasks.niah import make_samples
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.models.targets import Target


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench speculate`.

    Attributes:
        tokens: Prompt length in tokens; the longest one where prompts come from `data`.
        answer_tokens: Longest answer in tokens.
        draft_tokens: Tokens per draft.
        data: Folder made by `keepsight data`, whose last prompts are taken; needles in a haystack by default.
        samples: Number of prompts.
    """

    tokens: int = 1024
    answer_tokens: int = 24
    draft_tokens: int = 5
    data: str | None = None
    samples: int = 3


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "answer_tokens", "draft_tokens", "samples")
    if config.draft.head is None:
        raise UserError("bench speculate measures a draft head; name it: draft.head=FOLDER_OR_HUB_ID draft.layers=null")
    target = target_of(config)
    draft = draft_of(config, target)
    assert isinstance(draft, DraftHeadSource)
    prompts = _data_prompts(config, target) if config.data else _needle_prompts(config, target)
    print_lines(bench_speculate(target, draft.head, prompts, config.answer_tokens, config.draft_tokens))


def _needle_prompts(config: Config, target: Target) -> list[list[int]]:
    samples = make_samples("single", config.tokens, config.samples, 0, target.tokenizer)
    return [sample.prompt_ids.tolist() for sample in samples]


def _data_prompts(config: Config, target: Target) -> list[list[int]]:
    """The last prompts of a data folder that are short enough."""
    assert config.data is not None
    samples, _ = read_training_samples(Path(config.data), target.name, target.template_digest, target.vocabulary)
    prompts = [sample.prompt_ids for sample in samples if len(sample.prompt_ids) <= config.tokens]
    if len(prompts) < config.samples:
        raise UserError(
            f"data={config.data}: {len(prompts)} prompts have at most {config.tokens} tokens, samples= needs "
            f"{config.samples}; lower it, or raise tokens="
        )
    return prompts[-config.samples :]
