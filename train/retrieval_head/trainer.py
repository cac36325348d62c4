"""Distil a retrieval head."""

from typing import Any

from typing_extensions import override

from keepsight.train.head_trainer import HeadTrainer
from keepsight.train.retrieval_head.measure import BUDGETS, measure_retrieval_head
from keepsight.train.retrieval_head.objective import RetrievalObjective


class RetrievalTrainer(HeadTrainer[RetrievalObjective]):
    """Saves the head alone, and measures its hit rate at SpeContext's budgets and at `train.budget`."""

    weights_file = "retrieval_head.safetensors"
    settings_key = "retrieval_head.train"

    @override
    def measure(self) -> dict[str, Any]:
        budgets = sorted({*BUDGETS, self.settings.budget})
        return measure_retrieval_head(self.objective, self.held_out_batches(), budgets).metrics()

    def first_and_last(self) -> tuple[dict[str, float], dict[str, float]]:
        """The measurements before the first step and after the last; both empty without held-out samples."""
        rows = self.measurements()
        return (rows[0], rows[-1]) if rows else ({}, {})
