"""Middle truncation: the beginning and the end of the prompt. Nobody observes."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.runtime.prompt_compression.method import ShortenPrompt


@dataclass(frozen=True)
class Truncation(ShortenPrompt):
    """Keeps the first half and the last half of the budget and drops what is between (LongBench's rule).

    Of an odd budget the last half gets the odd token, where LongBench drops it. The tokens are kept as they are;
    LongBench decodes both halves and tokenises the joined text again.
    """

    @override
    def select(self, model: PreTrainedModel, input_ids: Tensor) -> Tensor:
        length, kept = len(input_ids), self.budget_for(len(input_ids))
        positions = torch.arange(length, device=input_ids.device)
        return torch.cat([positions[: kept // 2], positions[length - (kept - kept // 2) :]])
