"""Samples as batches: which are held out, how they are ordered and padded, and which prompts were trained on.

A share of the samples can be split before the question: the text before it is the prompt, and the answer begins with
the question and the end of the chat template. The stored data does not change.
"""

import base64
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_length_grouped_indices
from typing_extensions import Self, override

from keepsight.data_gen.store import LazySamples, TrainingSample
from keepsight.errors import UserError
from keepsight.files import bytes_digest, hex_digest
from keepsight.models.chat import chat_text, encode, has_chat_template

PromptDigests = frozenset[bytes]
"""Digests of trained prompts."""
_DIGEST_BYTES = 6
"""Bytes of a digest: between a million prompts and a million others, the chance of a collision is 1 in 250."""
_SHORTEST_QUESTION = 4
_LONGEST_QUESTION = 160
"""Tokens of a question, without the end of the chat template."""
_SHORTEST_CONTEXT = 64
"""Fewest tokens before a question."""


@dataclass(frozen=True)
class Batch:
    """Prompts padded on the left, answers padded on the right.

    Attributes:
        prompt_ids: [B, N] int64.
        answer_ids: [B, T] int64.
        prompt_mask: [B, N] bool, False for padding; None when no prompt is padded.
        answer_mask: [B, T] bool, False for padding; None when no answer is padded.
        indices: The samples' numbers in the data set.
        turn: How many times this batch has been used before in the epoch; see `keepsight.train.replay`.
        last: Whether this is its last use.
    """

    prompt_ids: Tensor
    answer_ids: Tensor
    prompt_mask: Tensor | None = None
    answer_mask: Tensor | None = None
    indices: Sequence[int] = ()
    turn: int = 0
    last: bool = True

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Prompts followed by answers, [B, N + T], and their mask; None when nothing is padded."""
        ids = torch.cat([self.prompt_ids, self.answer_ids], dim=1)
        if self.prompt_mask is None and self.answer_mask is None:
            return ids, None
        prompt_mask = _mask_or_ones(self.prompt_ids, self.prompt_mask)
        answer_mask = _mask_or_ones(self.answer_ids, self.answer_mask)
        return ids, torch.cat([prompt_mask, answer_mask], dim=1)

    def texts(self) -> list[Tensor]:
        """For each sample, its prompt and answer without padding, [n] int64."""
        ids, mask = self.joined()
        if mask is None:
            return list(ids)
        return [row[row_mask] for row, row_mask in zip(ids, mask, strict=True)]

    def prompt_lengths(self) -> list[int]:
        """Number of prompt tokens of each sample, without padding."""
        return _lengths(self.prompt_ids, self.prompt_mask)

    def answer_lengths(self) -> list[int]:
        """Number of answer tokens of each sample, without padding."""
        return _lengths(self.answer_ids, self.answer_mask)


def _mask_or_ones(ids: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask


def _lengths(ids: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return [ids.shape[1]] * len(ids)
    return mask.sum(dim=1).tolist()


class Use(NamedTuple):
    """One of several uses of the sample with index `sample_index`; `turn` and `last` as in `Batch`."""

    sample_index: int
    turn: int
    last: bool


class SampleDataset(Dataset[dict[str, Any]]):
    """Prompt and answer ids of samples, with `length` (tokens) for samplers that group by it."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | Use) -> dict[str, Any]:
        use = index if isinstance(index, Use) else Use(index, turn=0, last=True)
        sample = self.samples[use.sample_index]
        return {
            "index": sample.index,
            "prompt_ids": sample.prompt_ids,
            "answer_ids": sample.answer_ids,
            "length": len(sample.prompt_ids) + len(sample.answer_ids),
            "turn": use.turn,
            "last": use.last,
        }

    def lengths(self) -> list[int]:
        """Length of each sample in tokens."""
        return [self[index]["length"] for index in range(len(self))]


class SampleSubset(LazySamples):
    """A subset of a data set's samples, read when they are accessed.

    Args:
        samples: The data set.
        indices: Indices of the subset.
        max_tokens: Length to which samples are truncated; see `truncated`.
    """

    def __init__(
        self, samples: Sequence[TrainingSample], indices: Sequence[int], max_tokens: int | None = None
    ) -> None:
        self._samples = samples
        self._indices = indices
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self._indices)

    @override
    def read(self, index: int) -> TrainingSample:
        sample = self._samples[self._indices[index]]
        if self._max_tokens is None:
            return sample
        ids = [*sample.prompt_ids, *sample.answer_ids][: self._max_tokens]
        prompt_length = min(len(sample.prompt_ids), len(ids) - 1)
        return replace(sample, prompt_ids=ids[:prompt_length], answer_ids=ids[prompt_length:])


def with_short_prompts(samples: Sequence[TrainingSample], prompt_tokens: int) -> SampleSubset:
    """The samples whose prompts have at most this many tokens."""
    indices = []
    for index, sample in enumerate(samples):
        if len(sample.prompt_ids) <= prompt_tokens:
            indices.append(index)
    return SampleSubset(samples, indices)


def truncated(samples: Sequence[TrainingSample], max_tokens: int) -> SampleSubset:
    """Samples cut to their first `max_tokens` tokens, 2 or more; at least the last of them counts as answer."""
    return SampleSubset(samples, range(len(samples)), max_tokens)


def require_training_samples(samples: Sequence[TrainingSample], held_out: int, key: str) -> None:
    """Raise a UserError unless there are more samples than are held out; `key` names the settings in a recipe."""
    if len(samples) <= held_out:
        raise UserError(
            f"{key}.held_out={held_out} needs more than the {len(samples)} samples of the data; lower it",
            field=f"{key}.held_out",
            code="range",
        )


def hold_out(
    samples: Sequence[TrainingSample], held_out: int, key: str = "train", trained: PromptDigests | None = None
) -> tuple[SampleDataset, SampleDataset]:
    """Split samples into training and held-out ones, which are of all kinds and, where there are such, long.

    At most `held_out` samples are held out; prompts that an earlier stage was `trained` on only if there are no others.
    Each source has a share in proportion to its samples, of prompts that are longer than the median of all: short ones
    hardly tell two modules apart. A held-out prompt that occurs again is not trained on. A `UserError`, with the
    settings' `key` in a recipe, if there are too few samples, or too few different prompts, for both.
    """
    require_training_samples(samples, held_out, key)
    candidates: Sequence[int] = range(len(samples))
    if trained:
        untrained = [index for index, sample in enumerate(samples) if prompt_digest(sample) not in trained]
        candidates = untrained or candidates
    held_out_indices = _held_out_indices(samples, candidates, held_out)

    held_out_prompts = prompt_digests(samples[index] for index in held_out_indices)
    training_indices: Sequence[int] = range(len(samples))
    if held_out_prompts:
        training_indices = [
            index for index, sample in enumerate(samples) if prompt_digest(sample) not in held_out_prompts
        ]
    if not training_indices:
        raise UserError(
            f"{key}.held_out={held_out}: every prompt of the data is held out, since they repeat; lower it",
            field=f"{key}.held_out",
            code="range",
        )
    training = SampleSubset(samples, training_indices)
    measured = SampleSubset(samples, held_out_indices)
    return SampleDataset(training), SampleDataset(measured)


def _held_out_indices(samples: Sequence[TrainingSample], candidates: Sequence[int], held_out: int) -> Sequence[int]:
    """Which of the samples with these indices are held out, in ascending order; see `hold_out`."""
    if held_out >= len(candidates):
        return candidates
    if held_out == 0:
        return []
    lengths: dict[int, int] = {}
    indices_by_source: dict[str, list[int]] = {}
    for index in candidates:
        sample = samples[index]
        lengths[index] = len(sample.prompt_ids)
        indices_by_source.setdefault(sample.source, []).append(index)

    median_length = median(lengths.values())
    counts = _shares([len(indices) for indices in indices_by_source.values()], held_out)
    held_out_indices: set[int] = set()
    for indices, count in zip(indices_by_source.values(), counts, strict=True):
        long = [index for index in indices if lengths[index] > median_length]
        if len(long) < count:
            longest_first = sorted(indices, key=lambda index: -lengths[index])
            long = sorted(longest_first[:count])
        for number in range(count):  # spread over the whole data
            held_out_indices.add(long[(2 * number + 1) * len(long) // (2 * count)])
    return sorted(held_out_indices)


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """`count` divided among groups in proportion to their sizes, at most a group's size and, if it suffices, one each.

    `count` is less than all sizes together.
    """
    least = 1 if count >= len(sizes) else 0
    shares = [least] * len(sizes)
    total = sum(sizes)
    while sum(shares) < count:
        shortfalls = []
        for size, share in zip(sizes, shares, strict=True):
            shortfall = count * size / total - share
            if share == size:
                shortfall = -math.inf
            shortfalls.append(shortfall)
        shares[shortfalls.index(max(shortfalls))] += 1
    return shares


def samples_digest(samples: Iterable[TrainingSample]) -> str:
    """Digest of all token ids in their order."""
    return bytes_digest(f"{sample.prompt_ids} {sample.answer_ids}\n".encode() for sample in samples)


class GroupedByLength(Sampler[int]):
    """Groups samples of similar length; seed and epoch decide the order."""

    def __init__(self, samples: SampleDataset, group: int, seed: int) -> None:
        self.lengths = samples.lengths()
        self.group = group
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate calls it when one begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.group, generator=generator))


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pad prompts on the left and answers on the right; the values are the fields of `Batch`."""
    prompts, prompt_mask = _pad([row["prompt_ids"] for row in rows], left=True)
    answers, answer_mask = _pad([row["answer_ids"] for row in rows], left=False)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "answer_ids": answers,
        "answer_mask": answer_mask,
        "indices": [row["index"] for row in rows],
        "turn": rows[0].get("turn", 0),
        "last": rows[0].get("last", True),
    }


def _pad(rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor | None]:
    longest = max(len(row) for row in rows)
    padded = []
    for row in rows:
        padding = [0] * (longest - len(row))
        if left:
            padded.append(padding + row)
        else:
            padded.append(row + padding)
    ids = torch.tensor(padded)

    lengths = torch.tensor([len(row) for row in rows])[:, None]
    if bool((lengths == longest).all()):
        return ids, None
    columns = torch.arange(longest)
    if left:
        return ids, columns >= longest - lengths
    return ids, columns < lengths


def prompt_digest(sample: TrainingSample) -> bytes:
    """A digest that identifies a sample's prompt."""
    return bytes.fromhex(hex_digest([array("q", sample.prompt_ids).tobytes()]))[:_DIGEST_BYTES]


def prompt_digests(samples: Iterable[TrainingSample]) -> PromptDigests:
    """Digests of the prompts of samples."""
    return frozenset(map(prompt_digest, samples))


def digests_as_text(prompts: PromptDigests | None) -> str:
    """The digests of trained prompts as base64 text for an artifact; empty if they are not known."""
    return base64.b64encode(b"".join(sorted(prompts or ()))).decode()


def digests_from_text(text: str) -> PromptDigests | None:
    """The inverse of `digests_as_text`; a `UserError` if the text is damaged."""
    try:
        joined = base64.b64decode(text, validate=True)
    except ValueError:
        raise UserError(
            f"trained_on={text[:20]!r}... is not base64; fetch the artifact again", field="trained_on", code="file"
        ) from None
    starts = range(0, len(joined), _DIGEST_BYTES)
    return frozenset(joined[start : start + _DIGEST_BYTES] for start in starts) or None


def held_out_text(held_out: Iterable[TrainingSample], trained: PromptDigests | None) -> tuple[str, bool]:
    """A model card's text on the held-out samples, and whether the module is known to be trained on none of them."""
    digests = [prompt_digest(sample) for sample in held_out]
    if trained is None:
        return f"{len(digests)}; whether an earlier stage was trained on them is not recorded", not digests
    trained_before = sum(digest in trained for digest in digests)
    return f"{len(digests)}, {trained_before or 'none'} of them trained on before", not trained_before


class QuestionStarts:
    """Finds where the question of a prompt begins, from its token ids alone.

    Args:
        tokenizer: The base model's. Its chat template, if any, ends the user's turn before the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._line_breaks: dict[int, bool] = {}  # whether a token ends in one
        turn_end = ""
        if has_chat_template(tokenizer):
            mark = "QUESTION"
            text = chat_text(tokenizer, [{"role": "user", "content": mark}])
            turn_end = text.rpartition(mark)[2]
        (self._turn_end,) = encode(tokenizer, [turn_end], special=False)

    def __call__(self, prompt_ids: Sequence[int]) -> int | None:
        """The number of tokens before the question: up to the last line break that can precede one.

        The line break is followed by 4 to 160 tokens of the user's turn and preceded by at least 64 tokens and half of
        the prompt. None if there is no such line break.
        """
        ids = list(prompt_ids)
        question_end = self._end_of_last_turn(ids)
        earliest = max(question_end - _LONGEST_QUESTION, _SHORTEST_CONTEXT, (len(ids) + 1) // 2)
        for start in range(question_end - _SHORTEST_QUESTION, earliest - 1, -1):
            if self._ends_line(ids[start - 1]):
                return start
        return None

    def _end_of_last_turn(self, ids: list[int]) -> int:
        """Index of the tokens that end the last turn; where they are not found, of as many tokens at the end."""
        length = len(self._turn_end)
        last = len(ids) - length
        for index in range(last, -1, -1):
            if ids[index : index + length] == self._turn_end:
                return index
        return last

    def _ends_line(self, token: int) -> bool:
        if token not in self._line_breaks:
            self._line_breaks[token] = str(self._tokenizer.decode([token])).endswith("\n")
        return self._line_breaks[token]


@dataclass(frozen=True)
class UnseenQuestions:
    """Selects the training samples that are split before the question.

    Attributes:
        share: Share of the samples, above 0. Samples in which no question is found are not split.
        seed: With a sample's index, decides whether it is selected.
        question_start: Where a prompt's question begins; see `QuestionStarts`.
    """

    share: float
    seed: int
    question_start: Callable[[Sequence[int]], int | None]

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> Self | None:
        """A selection for the prompts of a tokenizer; None if the share is 0."""
        return cls(share, seed, QuestionStarts(tokenizer)) if share else None

    def selects(self, sample: TrainingSample) -> bool:
        """Whether the sample is among those that are split if a question is found."""
        return random.Random(f"{self.seed}:{sample.index}:unseen").random() < self.share

    def split(self, sample: TrainingSample) -> TrainingSample | None:
        """The sample with its question moved to the answer; None if no question is found."""
        start = self.question_start(sample.prompt_ids)
        if start is None:
            return None
        question_and_answer = [*sample.prompt_ids[start:], *sample.answer_ids]
        return replace(sample, prompt_ids=sample.prompt_ids[:start], answer_ids=question_and_answer)

    def split_held_out(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """All held-out samples that can be split.

        Their negative indices keep stored teacher outputs apart from those of the unsplit samples.
        """
        split_samples = []
        for sample in samples:
            split_sample = self.split(sample)
            if split_sample is not None:
                split_samples.append(replace(split_sample, index=~sample.index))
        return split_samples


class PartlySplitSamples(LazySamples):
    """Training samples, a share of them split before the question."""

    def __init__(self, samples: Sequence[TrainingSample], unseen: UnseenQuestions) -> None:
        self._samples = samples
        self._unseen = unseen

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def read(self, index: int) -> TrainingSample:
        sample = self._samples[index]
        if not self._unseen.selects(sample):
            return sample
        return self._unseen.split(sample) or sample
