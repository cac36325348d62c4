"""Samples as batches."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from keepsight.data_gen.shards import TrainingSample
from keepsight.errors import UserError


class SampleDataset(Dataset[dict[str, Any]]):
    """Prompt and answer ids of samples, with `length` (tokens) for samplers that group by it."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {
            "index": sample.index,
            "prompt_ids": sample.prompt_ids,
            "answer_ids": sample.answer_ids,
            "length": len(sample.prompt_ids) + len(sample.answer_ids),
        }


def split(samples: Sequence[TrainingSample], held_out: int, key: str = "train") -> tuple[SampleDataset, SampleDataset]:
    """Training samples, and every k-th sample held out, so that all parts of the mixture are measured.

    Args:
        samples: All of them.
        held_out: How many at most are held out.
        key: Where the recipe has `held_out`, for the message.

    Raises:
        UserError: too few samples for both.
    """
    if len(samples) <= held_out:
        raise UserError(f"{key}.held_out={held_out} needs more than the {len(samples)} samples of the data; lower it")
    step = math.ceil(len(samples) / held_out) if held_out else len(samples) + 1
    measured = samples[step - 1 :: step]
    chosen = {sample.index for sample in measured}
    return SampleDataset([sample for sample in samples if sample.index not in chosen]), SampleDataset(measured)


class GroupedByLength(Sampler[int]):
    """Samples of similar length one after the other, in an order that seed and epoch decide."""

    def __init__(self, samples: SampleDataset, group: int, seed: int) -> None:
        self.lengths = [samples[place]["length"] for place in range(len(samples))]
        self.group, self.seed, self.epoch = group, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate when an epoch begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.group, generator=generator))


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pad prompts on the left and answers on the right.

    Returns:
        `prompt_ids` [B, N], `answer_ids` [B, T], their masks (bool; None where nothing is padded), and `indices`.
    """
    prompts, prompt_mask = _pad([row["prompt_ids"] for row in rows], left=True)
    answers, answer_mask = _pad([row["answer_ids"] for row in rows], left=False)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "answer_ids": answers,
        "answer_mask": answer_mask,
        "indices": [row["index"] for row in rows],
    }


def _pad(rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor | None]:
    longest = max(map(len, rows))
    padding = [[0] * (longest - len(row)) for row in rows]
    ids = torch.tensor([pad + row if left else row + pad for row, pad in zip(rows, padding, strict=True)])
    if not any(padding):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    order = torch.arange(longest)
    return ids, order >= longest - lengths if left else order < lengths
