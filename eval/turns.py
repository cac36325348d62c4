"""Later turns of a conversation: the prompt was compressed once, and each variant continues from its own answers.

`excess_nll` and `agreement` of a later turn are measured in the full cache's conversation, which is the same for all.
Methods that evict while decoding read what they said before in one pass, and then evict.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keepsight.eval.answers import Answered, answer_alone, answer_each
from keepsight.eval.compress import Compressed
from keepsight.eval.rows import Asked
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.targets import Target
from keepsight.runtime.generate import Method
from keepsight.runtime.join import can_join


def go_on(target: Target, question: Tensor, answer: Tensor, sample: RenderedSample) -> Tensor:
    """What is read after the compressed prompt for a later turn.

    Args:
        target: The model that answers.
        question: [1, q] int64, what was read for the turn before.
        answer: [T] int64, what was answered then.
        sample: The later turn.

    Returns:
        [1, q + T + n] int64; of the answer without its end token, with which the sample's own tokens begin.
    """
    said = answer[:-1] if answer[-1:].tolist()[0] in target.end_tokens else answer
    return torch.cat([question, said[None], sample.question_ids[None].to(answer.device)], dim=1)


def in_own_words(
    target: Target,
    asked: Asked,
    methods: Sequence[Method],
    compressed: Sequence[Compressed],
    answers: Sequence[Answered],
    questions: Sequence[Tensor],
) -> list[Answered]:
    """The answers of variants, those that said something else before than the full cache in their own conversation.

    Args:
        target: The model that answers.
        asked: The turn, in the full cache's conversation.
        methods: The variants.
        compressed: What they answer from.
        answers: Their answers in the full cache's conversation.
        questions: For each variant, [1, q] int64, what is read after the compressed prompt; see `go_on`.
    """
    model, own = target.model, dict[int, Tensor]()
    differing = [index for index, each in enumerate(questions) if not torch.equal(each, asked.question)]
    for index in differing:
        method, state = methods[index], compressed[index].state
        reapply = method.reapply(model)
        if reapply is not None or not can_join(state):
            readers = method.turn_reader(model), method.reader(model)
            alone = answer_alone(readers, state, questions[index], asked.answer, asked.limits, reapply)
            own[index] = alone.ids
    together = [index for index in differing if index not in own]
    states, rest = [compressed[index].state for index in together], [questions[index] for index in together]
    own.update(zip(together, answer_each(model, states, rest, asked.limits), strict=True))
    return [replace(answer, ids=own.get(index, answer.ids)) for index, answer in enumerate(answers)]


def add_before(samples: Sequence[RenderedSample], rows: Sequence[list[dict[str, Any]]]) -> None:
    """Add to the rows of later turns what their variants answered in the turns before, as `before`."""
    for sample, earlier, made in zip(samples[1:], rows, rows[1:], strict=False):
        for row, said in zip(made if sample.earlier else [], earlier, strict=False):
            row["before"] = [*said.get("before", []), said["answer"]]
