"""Samples as batches: which are held out, how they are ordered and padded, and which prompts were trained on.

A share of the samples can be split before the question: the text before it is the prompt, and the answer begins with
the question and the end of the chat template. The stored data does not change.
"""

import base64
import hashlib
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
from keepsight.models.chat import chat_text, encode, has_chat_template

Prompts = frozenset[bytes]
"""Digests of trained prompts."""
_DIGEST = 6
"""Bytes of a digest: between a million prompts and a million others, the chance of a collision is 1 in 250."""
_LEAST, _MOST = 4, 160
"""Tokens of a question, without the end of the chat template."""
_CONTEXT = 64
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
        pairs = (self.prompt_ids, self.prompt_mask), (self.answer_ids, self.answer_mask)
        joined = torch.cat([ids for ids, _ in pairs], dim=1)
        if all(mask is None for _, mask in pairs):
            return joined, None
        masks = [torch.ones_like(ids, dtype=torch.bool) if mask is None else mask for ids, mask in pairs]
        return joined, torch.cat(masks, dim=1)

    def texts(self) -> list[Tensor]:
        """For each sample, its prompt and answer without padding, [n] int64."""
        ids, mask = self.joined()
        return list(ids) if mask is None else [row[real] for row, real in zip(ids, mask, strict=True)]

    def prompt_lengths(self) -> list[int]:
        """Number of prompt tokens of each sample, without padding."""
        return _lengths(self.prompt_ids, self.prompt_mask)

    def answer_lengths(self) -> list[int]:
        """Number of answer tokens of each sample, without padding."""
        return _lengths(self.answer_ids, self.answer_mask)


def _lengths(ids: Tensor, mask: Tensor | None) -> list[int]:
    return [ids.shape[1]] * len(ids) if mask is None else mask.sum(dim=1).tolist()


class Use(NamedTuple):
    """One of several uses of the sample with index `place`; `turn` and `last` as in `Batch`."""

    place: int
    turn: int
    last: bool


class SampleDataset(Dataset[dict[str, Any]]):
    """Prompt and answer ids of samples, with `length` (tokens) for samplers that group by it."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | Use) -> dict[str, Any]:
        use = index if isinstance(index, Use) else Use(index, 0, True)
        sample = self.samples[use.place]
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
        return [self[place]["length"] for place in range(len(self))]


class Chosen(LazySamples):
    """A subset of a data set's samples, read when they are accessed.

    Args:
        samples: The data set.
        places: Indices of the subset.
        max_tokens: Length to which samples are truncated; see `cut`.
    """

    def __init__(self, samples: Sequence[TrainingSample], places: Sequence[int], max_tokens: int | None = None) -> None:
        self._samples, self._places, self._max_tokens = samples, places, max_tokens

    def __len__(self) -> int:
        return len(self._places)

    @override
    def read(self, place: int) -> TrainingSample:
        sample = self._samples[self._places[place]]
        if self._max_tokens is None:
            return sample
        ids = [*sample.prompt_ids, *sample.answer_ids][: self._max_tokens]
        prompt = min(len(sample.prompt_ids), len(ids) - 1)
        return replace(sample, prompt_ids=ids[:prompt], answer_ids=ids[prompt:])


def no_longer_than(samples: Sequence[TrainingSample], prompt_tokens: int) -> Chosen:
    """The samples whose prompts have at most this many tokens."""
    return Chosen(samples, [place for place, each in enumerate(samples) if len(each.prompt_ids) <= prompt_tokens])


def cut(samples: Sequence[TrainingSample], max_tokens: int) -> Chosen:
    """Truncate samples to their first `max_tokens` tokens, 2 or more; at least the last of them counts as answer."""
    return Chosen(samples, range(len(samples)), max_tokens)


def require_more(samples: Sequence[TrainingSample], held_out: int, key: str) -> None:
    """Raise a UserError unless there are more samples than are held out; `key` names the settings in a recipe."""
    if len(samples) <= held_out:
        raise UserError(f"{key}.held_out={held_out} needs more than the {len(samples)} samples of the data; lower it")


def hold_out(
    samples: Sequence[TrainingSample], held_out: int, key: str = "train", trained: Prompts | None = None
) -> tuple[SampleDataset, SampleDataset]:
    """Split samples into training and held-out ones, which are of all kinds and, where there are such, long.

    At most `held_out` samples are held out; prompts that an earlier stage was `trained` on only if there are no others.
    Each source has a share in proportion to its samples, of prompts that are longer than the median of all: short ones
    hardly tell two modules apart. A held-out prompt that occurs again is not trained on. A `UserError`, with the
    settings' `key` in a recipe, if there are too few samples, or too few different prompts, for both.
    """
    require_more(samples, held_out, key)
    new = [place for place, each in enumerate(samples) if prompt_digest(each) not in trained] if trained else []
    measured = _measured_places(samples, new or range(len(samples)), held_out)
    apart = prompts_of(samples[place] for place in measured)
    rest = [place for place, each in enumerate(samples) if not apart or prompt_digest(each) not in apart]
    if not rest:
        raise UserError(f"{key}.held_out={held_out}: every prompt of the data is held out, since they repeat; lower it")
    return SampleDataset(Chosen(samples, rest)), SampleDataset(Chosen(samples, sorted(measured)))


def _measured_places(samples: Sequence[TrainingSample], among: Sequence[int], held_out: int) -> set[int]:
    """Which of the samples at the places `among` are held out; see `hold_out`."""
    if held_out >= len(among):
        return {*among}
    if held_out == 0:
        return set()
    lengths = dict[int, int]()
    by_source = dict[str, list[int]]()
    for place in among:
        sample = samples[place]
        lengths[place] = len(sample.prompt_ids)
        by_source.setdefault(sample.source, []).append(place)
    middle = median(lengths.values())
    counts = _shares([len(places) for places in by_source.values()], held_out)
    measured = set[int]()
    for places, count in zip(by_source.values(), counts, strict=True):
        long = [place for place in places if lengths[place] > middle]
        if len(long) < count:
            longest_first = sorted(places, key=lambda place: -lengths[place])
            long = sorted(longest_first[:count])
        for number in range(count):  # spread over the whole data
            measured.add(long[(2 * number + 1) * len(long) // (2 * count)])
    return measured


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """`count` divided among groups in proportion to their sizes, at most a group's size and, if it suffices, one each.

    `count` is less than all sizes together.
    """
    least = 1 if count >= len(sizes) else 0
    shares = [least] * len(sizes)
    total = sum(sizes)
    while sum(shares) < count:
        pairs = zip(sizes, shares, strict=True)
        wanting = [count * size / total - share if share < size else -math.inf for size, share in pairs]
        shares[wanting.index(max(wanting))] += 1
    return shares


def samples_digest(samples: Iterable[TrainingSample]) -> str:
    """`sha256:` and the digest of all token ids in their order."""
    digest = hashlib.sha256(b"[")
    for place, sample in enumerate(samples):
        digest.update(f"{', ' if place else ''}{(sample.prompt_ids, sample.answer_ids)!r}".encode())
    digest.update(b"]")
    return f"sha256:{digest.hexdigest()}"


class GroupedByLength(Sampler[int]):
    """Groups samples of similar length; seed and epoch decide the order."""

    def __init__(self, samples: SampleDataset, group: int, seed: int) -> None:
        self.lengths, self.group, self.seed, self.epoch = samples.lengths(), group, seed, 0

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
    longest = max(map(len, rows))
    padding = [[0] * (longest - len(row)) for row in rows]
    ids = torch.tensor([pad + row if left else row + pad for row, pad in zip(rows, padding, strict=True)])
    if not any(padding):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    order = torch.arange(longest)
    return ids, order >= longest - lengths if left else order < lengths


def prompt_digest(sample: TrainingSample) -> bytes:
    """A digest that identifies a sample's prompt."""
    return hashlib.sha256(array("q", sample.prompt_ids).tobytes()).digest()[:_DIGEST]


def prompts_of(samples: Iterable[TrainingSample]) -> Prompts:
    """Digests of the prompts of samples."""
    return frozenset(map(prompt_digest, samples))


def prompts_as_text(prompts: Prompts | None) -> str:
    """The digests of trained prompts as base64 text for an artifact; empty if they are not known."""
    return base64.b64encode(b"".join(sorted(prompts or ()))).decode()


def prompts_from_text(text: str) -> Prompts | None:
    """The inverse of `prompts_as_text`; a `UserError` if the text is damaged."""
    try:
        joined = base64.b64decode(text, validate=True)
    except ValueError:
        raise UserError(f"trained_on={text[:20]!r}... is not base64; fetch the artifact again") from None
    return frozenset(joined[start : start + _DIGEST] for start in range(0, len(joined), _DIGEST)) or None


def held_out_text(held_out: Iterable[TrainingSample], trained: Prompts | None) -> tuple[str, bool]:
    """A model card's text on the held-out samples, and whether the module is known to be trained on none of them."""
    digests = [prompt_digest(sample) for sample in held_out]
    if trained is None:
        return f"{len(digests)}; whether an earlier stage was trained on them is not recorded", not digests
    again = sum(digest in trained for digest in digests)
    return f"{len(digests)}, {again or 'none'} of them trained on before", not again


class QuestionStarts:
    """Finds where the question of a prompt begins, from its token ids alone.

    Args:
        tokenizer: The base model's. Its chat template, if any, ends the user's turn before the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        mark = "QUESTION"
        turn = [{"role": "user", "content": mark}]
        end = chat_text(tokenizer, turn).rpartition(mark)[2] if has_chat_template(tokenizer) else ""
        (self._end,) = encode(tokenizer, [end], special=False)
        self._tokenizer, self._breaks = tokenizer, dict[int, bool]()

    def __call__(self, prompt_ids: Sequence[int]) -> int | None:
        """The number of tokens before the question: up to the last line break that can precede one.

        The line break is followed by 4 to 160 tokens of the user's turn and preceded by at least 64 tokens and half of
        the prompt. None if there is no such line break.
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
    """Selects the training samples that are split before the question.

    Attributes:
        share: Share of the samples, above 0. Samples in which no question is found are not split.
        seed: With a sample's index, decides whether it is selected.
        starts: Where a prompt's question begins.
    """

    share: float
    seed: int
    starts: Callable[[Sequence[int]], int | None]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> Self | None:
        """A selection for the prompts of a tokenizer; None if the share is 0."""
        return cls(share, seed, QuestionStarts(tokenizer)) if share else None

    def divided(self, sample: TrainingSample) -> TrainingSample | None:
        """The sample with its question moved to the answer; None if no question is found."""
        if (start := self.starts(sample.prompt_ids)) is None:
            return None
        asked = [*sample.prompt_ids[start:], *sample.answer_ids]
        return replace(sample, prompt_ids=sample.prompt_ids[:start], answer_ids=asked)

    def held_out(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """All held-out samples that can be split.

        Their negative indices keep stored teacher outputs apart from those of the whole samples.
        """
        divided = [each for each in map(self.divided, samples) if each is not None]
        return [replace(each, index=~each.index) for each in divided]


class SomeUnseen(LazySamples):
    """Training samples, a share of them split before the question."""

    def __init__(self, samples: Sequence[TrainingSample], unseen: Unseen) -> None:
        self._samples, self._unseen = samples, unseen

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def read(self, place: int) -> TrainingSample:
        sample, unseen = self._samples[place], self._unseen
        chosen = random.Random(f"{unseen.seed}:{sample.index}:unseen").random() < unseen.share
        return (unseen.divided(sample) if chosen else None) or sample
