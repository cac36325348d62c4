"""Middle truncation: the beginning and the end of the prompt; nothing observes."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.runtime.images import Images
from keepsight.runtime.prompt_compression.method import ShortenPrompt


@dataclass(frozen=True)
class Truncation(ShortenPrompt):
    """Spends half of the budget on either end of the prompt and drops the middle (LongBench, arXiv 2308.14508).

    The odd token of an odd budget goes to the end; LongBench drops it. The tokens are kept as they are; LongBench
    decodes both halves and tokenises the joined text again.
    """

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        length, kept = len(input_ids), self.budget_for(len(input_ids))
        positions = torch.arange(length, device=input_ids.device)
        return torch.cat([positions[: kept // 2], positions[length - (kept - kept // 2) :]])
