"""Replay: what a pass of the target shows is kept, and used in several training steps.

The pass over prompt and answer does not depend on the module in training, and costs several times what the module's
own step does. So each reading is kept, packed, and used `replays` times in a shuffled order before it is dropped. That
order is a function of the seed and of the readings' sizes alone: a training that is resumed reads again what it held,
and goes on bit for bit.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from mmap import mmap
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices
from typing_extensions import Self

from keepsight.train.dataset import Batch, Use
from keepsight.train.settings import ReplaySettings, TrainSettings

Reading = dict[str, Tensor]
"""What the target shows of a batch, as named tensors: KV entries are `keys.LAYER` and `values.LAYER`."""

_ENTRIES = ("keys.", "values.")
_COMPARED = "importance"
"""What losses compare with is not rounded: in bfloat16, a bfloat16 target's replayed loss is exactly the fresh one."""
_SCALE = "scale."
_ALIGNED = 64
"""Bytes, at multiples of which tensors begin that share a piece of memory."""


def replay_order(sizes: Sequence[float], replays: int, memory: int, rng: random.Random) -> Iterator[tuple[int, int]]:
    """The order in which readings are used: (number of the reading, how many times it was used before).

    As many readings as fit into `memory` bytes, at least one, are in use at a time, and any of them may come next.
    After `replays` uses a reading is dropped, and the next ones take its place.
    """
    waiting, turns = list(range(len(sizes)))[::-1], dict[int, int]()
    while waiting or turns:
        while waiting and (not turns or sizes[waiting[-1]] + sum(sizes[each] for each in turns) <= memory):
            turns[waiting.pop()] = 0
        number = rng.choice(list(turns))
        yield number, turns[number]
        turns[number] += 1
        if turns[number] == replays:
            del turns[number]


class ReplaySampler(Sampler[Use]):
    """Every sample `replays` times an epoch, batch after batch; seed and epoch decide the order.

    A batch keeps its samples through all its uses. Several processes have readings of their own: of every `processes`
    batches the n-th is the n-th process's, as accelerate deals them out. What does not fill a batch for each process is
    left out of an epoch, by chance something else each time.

    Args:
        lengths: Tokens of each sample.
        token_bytes: Bytes of a packed reading per token.
        memory: Bytes that the readings of one process may take.
        settings: Batch size, replays, seed, and whether samples of similar length are batched.
        processes: Number of processes.
    """

    def __init__(
        self, lengths: Sequence[int], token_bytes: float, memory: int, settings: TrainSettings, processes: int = 1
    ) -> None:
        self.lengths, self.token_bytes, self.memory = list(lengths), token_bytes, memory
        self.settings, self.processes, self.epoch = settings, processes, 0

    @property
    def _rounds(self) -> int:
        """Batches of each process."""
        return len(self.lengths) // (self.settings.batch_size * self.processes)

    def __len__(self) -> int:
        return self._rounds * self.processes * self.settings.batch_size * self.settings.replays

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate calls it when one begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Use]:
        batches, last = self._batches(), self.settings.replays - 1
        orders = [self._order(batches[process :: self.processes], process) for process in range(self.processes)]
        for batch, turn in chain.from_iterable(zip(*orders, strict=True)):
            yield from (Use(place, turn, turn == last) for place in batch)

    def _batches(self) -> list[list[int]]:
        size, generator = self.settings.batch_size, torch.Generator().manual_seed(self.settings.seed + self.epoch)
        if self.settings.group_by_length:
            order = get_length_grouped_indices(self.lengths, size * self.processes, generator=generator)
        else:
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
        return [order[size * number : size * (number + 1)] for number in range(self._rounds * self.processes)]

    def _order(self, batches: list[list[int]], process: int) -> Iterator[tuple[list[int], int]]:
        rng = random.Random(f"{self.settings.seed}:{self.epoch}:{process}")
        sizes = [self.token_bytes * len(batch) * max(self.lengths[place] for place in batch) for batch in batches]
        return (
            (batches[number], turn) for number, turn in replay_order(sizes, self.settings.replays, self.memory, rng)
        )


class ReadingBuffer:
    """Holds the packed readings that are used again, in memory or as files; leaving it as a context drops them.

    Args:
        settings: How they are packed, and where they are held.
        process: Number of this process; each has a folder of its own.
    """

    def __init__(self, settings: ReplaySettings, process: int = 0) -> None:
        self._int8 = settings.dtype == "int8"
        self._held: dict[tuple[int, ...], Reading | Path] = {}
        self._devices = dict[str, torch.device]()  # of each tensor, by its name, alike in all readings
        self._files = 0
        self._folder = Path(settings.dir) / f"process-{process}" if settings.dir else None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # what a killed run left
            self._folder.mkdir(parents=True)

    def bytes_of(self, reading: Reading) -> int:
        """Bytes that a reading takes."""
        return sum(each.nbytes for each in pack(reading, self._int8).values())

    def take(self, batch: Batch, read: Callable[[], Reading]) -> Reading:
        """A batch's reading, unpacked: the one that is held, or else a new one.

        It is packed also before its first use, so that all uses are of the same values.
        """
        key = tuple(batch.indices)
        held = self._held.pop(key, None)
        packed = load_file(held) if isinstance(held, Path) else held
        if packed is None:
            reading = read()
            self._devices = {name: tensor.device for name, tensor in reading.items()}
            packed = pack(reading, self._int8)
        if not batch.last:
            self._held[key] = held if isinstance(held, Path) else self._hold(packed)
        elif isinstance(held, Path):
            held.unlink()
        return unpack(packed, self._devices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _hold(self, packed: Reading) -> Reading | Path:
        if self._folder is None:
            return in_own_memory(packed)
        self._files += 1
        path = self._folder / f"{self._files}.safetensors"
        save_file(packed, path)
        return path


def in_own_memory(packed: Reading) -> Reading:
    """Copies outside the heap, whose memory goes back to the system when they are dropped.

    In the heap they stand between what training steps allocate, and leave holes: of a buffer that held 0.7 GB and then
    nothing, 1.8 GB stayed, against 0.5 GB.
    """
    ends = list(accumulate(-(-each.nbytes // _ALIGNED) * _ALIGNED for each in packed.values()))
    room = torch.frombuffer(mmap(-1, ends[-1]), dtype=torch.uint8)
    held: Reading = {}
    for (name, tensor), start in zip(packed.items(), [0, *ends], strict=False):
        size = tensor.nbytes
        held[name] = room[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return held


def pack(reading: Mapping[str, Tensor], int8: bool) -> Reading:
    """On the CPU, KV entries in int8 with a float32 scale for each head and token, or with all else in bfloat16.

    Importance stays as it is.
    """
    packed: Reading = {}
    for name, tensor in reading.items():
        if int8 and name.startswith(_ENTRIES):
            scale = tensor.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
            packed[name], packed[_SCALE + name] = (tensor / scale).round().to(torch.int8), scale
        else:
            rounded = tensor.is_floating_point() and not name.startswith(_COMPARED)
            packed[name] = tensor.to(torch.bfloat16) if rounded else tensor
    return {name: tensor.contiguous().cpu() for name, tensor in packed.items()}


def unpack(packed: Mapping[str, Tensor], devices: Mapping[str, torch.device]) -> Reading:
    """What `pack` was given, as far as rounding left it, each tensor on its device; floats in float32."""
    moved = {name: tensor.to(devices[name.removeprefix(_SCALE)], non_blocking=True) for name, tensor in packed.items()}
    whole = {name: tensor for name, tensor in moved.items() if not name.startswith(_SCALE)}
    return {name: _unpacked(tensor, moved.get(_SCALE + name)) for name, tensor in whole.items()}


def _unpacked(tensor: Tensor, scale: Tensor | None) -> Tensor:
    if scale is not None:
        return tensor * scale
    return tensor.float() if tensor.is_floating_point() else tensor
