"""The objective of draft heads: unrolled over its own outputs, a head learns the target's next-token distributions."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.models.draft_head import DraftHead
from keepsight.train.dataset import Batch
from keepsight.train.draft_head.chunked_loss import chunked_loss
from keepsight.train.draft_head.teacher import TargetReader, Teacher, teacher_of
from keepsight.train.draft_head.unrolled_attention import UnrolledAttention
from keepsight.train.objective import HeadObjective


class DraftHeadObjective(HeadObjective):
    """The training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2).

    At step i, row t of a text reads what step i - 1 put out in row t (at step 0 the target's features of token t) and
    the embedding of token t + 1 + i, and guesses token t + 2 + i. It learns from what the target says about that token:
    its probabilities, confined to the draft vocabulary and summing to 1 there. Where the target's top-1 token lies
    outside that vocabulary, nothing is learned; nor is it from the tokens of a prompt, which nobody will draft.

    Args:
        head: The head in training, in float32.
        target: Gives embeddings and the lm_head; not a submodule: it is neither trained, saved nor moved.
        reader: Gives the target's states.
        unroll: Number of steps.
        decay: Weight of a step's loss relative to the step before.
        max_tokens: Longest text in tokens; longer ones are truncated at the end.
    """

    head: DraftHead

    def __init__(
        self, head: DraftHead, target: PreTrainedModel, reader: TargetReader, unroll: int, decay: float, max_tokens: int
    ) -> None:
        super().__init__()
        self.head = head
        self._target = (target,)  # in a tuple, for torch takes a module's attributes for parts of it
        self._read = reader
        self.unroll, self.decay, self.max_tokens = unroll, decay, max_tokens

    @override
    def loss(self, batch: Batch) -> Tensor:
        texts = zip(batch.texts(), batch.prompt_lengths(), strict=True)
        return torch.stack([self.text_loss(ids, prompt) for ids, prompt in texts]).mean()

    def text_loss(self, ids: Tensor, prompt: int = 0) -> Tensor:
        """The loss of one text, [n] int64: the sum over steps of decay^i times the mean cross entropy of its rows.

        Only rows count that guess a token after the first `prompt`.
        """
        steps, hidden = self.states(ids)
        teacher = self.teacher(hidden, _product_dtype(steps[0]))
        answer = torch.arange(1, len(hidden) + 1, device=ids.device) >= prompt  # row j of the target's guesses j + 1
        known = [(teacher.known & answer)[1 + step :].float() for step in range(len(steps))]
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
        embeddings = head.embedding(target)(ids[None]).detach().to(dtype)
        positions = torch.arange(len(ids), device=ids.device)[None]
        attend, steps = UnrolledAttention(), []
        features = head.combine(read.features[None].to(dtype))
        for step in range(min(self.unroll, len(ids) - 1)):
            rows = len(ids) - 1 - step
            following, places = embeddings[:, 1 + step :], positions[:, step : step + rows]
            features = head(following, features[:, :rows], places, attend)
            steps.append((features if head.norm_output else head.norm(features))[0])
        return steps, read.hidden


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that matrix products take under mixed precision; the tensor's own without it."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
