"""The objective of draft heads: unrolled over its own outputs, a head learns the target's next-token distributions."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepsight.models.draft_head import DraftHead
from keepsight.train.draft_head.chunked_loss import chunked_loss
from keepsight.train.draft_head.teacher import Reader, Teacher, teacher_of
from keepsight.train.draft_head.unrolled_attention import UnrolledAttention


class DraftHeadObjective(nn.Module):
    """The module that trainers wrap: batch in, loss out (training-time test; EAGLE-3, arXiv 2503.01840).

    At step i, row t of a text reads what step i - 1 put out in row t (at step 0 the target's features of token t) and
    the embedding of token t + 1 + i, and guesses token t + 2 + i. It learns from what the target says about that token:
    its probabilities, confined to the draft vocabulary and summing to 1 there. Where the target's first choice lies
    outside that vocabulary, nothing is learned.

    Args:
        head: In training; in float32.
        target: Gives embeddings and the lm_head. It is no part of this module: it is neither trained, saved nor moved.
        reader: Gives the target's states.
        unroll: Steps.
        decay: Weight of a step's loss relative to the step before.
        max_tokens: Longer texts are cut at the end.

    Attributes:
        head: As given.
    """

    def __init__(
        self, head: DraftHead, target: PreTrainedModel, reader: Reader, unroll: int, decay: float, max_tokens: int
    ) -> None:
        super().__init__()
        self.head = head
        self._target = (target,)  # in a tuple, for torch takes a module's attributes for parts of it
        self._read = reader
        self.unroll, self.decay, self.max_tokens = unroll, decay, max_tokens

    def forward(
        self,
        prompt_ids: Tensor,
        answer_ids: Tensor,
        prompt_mask: Tensor | None = None,
        answer_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The mean loss of a batch's samples, `{"loss": scalar}`; shapes as `keepsight.train.dataset.collate` makes."""
        ids, mask = join(prompt_ids, prompt_mask, answer_ids, answer_mask)
        losses = [self.loss(row[real]) for row, real in zip(ids, mask, strict=True)]
        return {"loss": torch.stack(losses).mean()}

    def loss(self, ids: Tensor) -> Tensor:
        """The loss of one text, [n] int64: the sum over steps of decay^i times the mean cross entropy of its rows."""
        steps, hidden = self.states(ids)
        teacher = self.teacher(hidden, _product_dtype(steps[0]))
        known = [teacher.known[1 + step :].float() for step in range(len(steps))]
        weights = [self.decay**step * rows / rows.sum().clamp(min=1) for step, rows in enumerate(known)]
        return chunked_loss(steps, self.head.lm_head.weight, teacher.probabilities, weights)

    def teacher(self, hidden: Tensor, dtype: torch.dtype) -> Teacher:
        """What the target says, given what its lm_head reads; see `teacher_of`."""
        return teacher_of(hidden, self._target[0], self.head.t2d.nonzero()[:, 0], dtype)

    def states(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Unroll the head over a text.

        Args:
            ids: [n] int64.

        Returns:
            For each step i, what the head's lm_head reads, [n - 1 - i, hidden] (a text shorter than the unrolling has
            fewer steps), and what the target's lm_head reads, [n, hidden]: row t of step i learns from row t + 1 + i.
        """
        ids = ids[: self.max_tokens]
        head, (target,) = self.head, self._target
        read = self._read(ids)
        dtype = head.fc.weight.dtype
        embeddings = target.get_input_embeddings()(ids[None]).detach().to(dtype)
        positions = torch.arange(len(ids), device=ids.device)[None]
        attend, steps = UnrolledAttention(), []
        features = head.combine(read.features[None].to(dtype))
        for step in range(min(self.unroll, len(ids) - 1)):
            rows = len(ids) - 1 - step
            following, places = embeddings[:, 1 + step :], positions[:, step : step + rows]
            features = head(following, features[:, :rows], places, attend)
            steps.append((features if head.norm_output else head.norm(features))[0])
        return steps, read.hidden


def join(
    prompt_ids: Tensor, prompt_mask: Tensor | None, answer_ids: Tensor, answer_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Prompts and answers side by side, [B, N + T], and which of their tokens are real (bool)."""
    masks = (
        torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        for ids, mask in ((prompt_ids, prompt_mask), (answer_ids, answer_mask))
    )
    return torch.cat([prompt_ids, answer_ids], dim=1), torch.cat(list(masks), dim=1)


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that matrix products take under mixed precision; the tensor's own without it."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
