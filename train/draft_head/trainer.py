"""Train an EAGLE-3 draft head."""

from typing import Any

from typing_extensions import override

from keepsight.train.draft_head.measure import measure_draft_head
from keepsight.train.draft_head.objective import DraftHeadObjective
from keepsight.train.head_trainer import HeadTrainer


class DraftHeadTrainer(HeadTrainer[DraftHeadObjective]):
    """Saves the head alone, and measures how many tokens of its drafts are accepted."""

    weights_file = "draft_head.safetensors"
    settings_key = "draft_head.train"

    @override
    def measure(self) -> dict[str, Any]:
        with self.accelerator.autocast():
            return measure_draft_head(self.objective, self.held_out_batches()).values()
