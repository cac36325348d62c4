"""Samples whose question comes after the compression: what is compressed ends before it.

Such a sample is divided: the part before the question is its prompt, and the question, the end of the chat template and
the answer are its answer. The stored data stays as it is.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase
from typing_extensions import Self, override

from keepsight.data_gen.store import LazySamples, TrainingSample
from keepsight.models.chat import chat_text

_LEAST, _MOST = 4, 160
"""Tokens of a question, without the end of the chat template."""
_CONTEXT = 64
"""Fewest tokens before a question."""


class QuestionStarts:
    """Where the question of a prompt begins, by its token ids alone.

    Args:
        tokenizer: The base model's; a chat template that it has ends the user's turn before the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        mark = "QUESTION"
        turn = [{"role": "user", "content": mark}]
        end = chat_text(tokenizer, turn).rpartition(mark)[2] if tokenizer.chat_template else ""
        self._end: list[int] = list(tokenizer(end, add_special_tokens=False)["input_ids"])
        self._tokenizer, self._breaks = tokenizer, dict[int, bool]()

    def __call__(self, prompt_ids: Sequence[int]) -> int | None:
        """The number of tokens before the question: up to the last line break that can precede one.

        4 to 160 tokens follow it, up to the end of the user's turn; at least 64, and half of the prompt, precede it.
        None where no line break does.
        """
        ids, size = list(prompt_ids), len(self._end)
        last = len(ids) - size
        end = next((place for place in range(last, -1, -1) if ids[place : place + size] == self._end), last)
        first = max(end - _MOST, _CONTEXT, (len(ids) + 1) // 2)
        return next((place for place in range(end - _LEAST, first - 1, -1) if self._ends_line(ids[place - 1])), None)

    def _ends_line(self, token: int) -> bool:
        if token not in self._breaks:
            self._breaks[token] = str(self._tokenizer.decode([token])).endswith("\n")
        return self._breaks[token]


@dataclass(frozen=True)
class Unseen:
    """Which samples of a training are divided before their question.

    Attributes:
        share: Share of the samples, above 0; those without a place for it stay as they are.
        seed: Decides with a sample's index alone whether it is one of them.
        starts: Where a prompt's question begins.
    """

    share: float
    seed: int
    starts: Callable[[Sequence[int]], int | None]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> Self | None:
        """None where the share is 0."""
        return cls(share, seed, QuestionStarts(tokenizer)) if share else None

    def divided(self, sample: TrainingSample) -> TrainingSample | None:
        """The sample with its question in its answer; None where there is no place to divide it."""
        if (start := self.starts(sample.prompt_ids)) is None:
            return None
        asked = [*sample.prompt_ids[start:], *sample.answer_ids]
        return replace(sample, prompt_ids=sample.prompt_ids[:start], answer_ids=asked)

    def held_out(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """All held-out samples that can be divided.

        Their indices are below 0, so that teacher outputs that are kept differ from those of the whole samples.
        """
        divided = [each for each in map(self.divided, samples) if each is not None]
        return [replace(each, index=~each.index) for each in divided]


class SomeUnseen(LazySamples):
    """Samples of a training, a share of them divided before their question."""

    def __init__(self, samples: Sequence[TrainingSample], unseen: Unseen) -> None:
        self._samples, self._unseen = samples, unseen

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def read(self, place: int) -> TrainingSample:
        sample, unseen = self._samples[place], self._unseen
        chosen = random.Random(f"{unseen.seed}:{sample.index}:unseen").random() < unseen.share
        return (unseen.divided(sample) if chosen else None) or sample
