"""Replay: the teacher outputs of a batch are kept and used in several training steps.

The base model's pass over prompt and answer does not depend on the module in training, and costs several times what the
module's own step does. So its outputs are kept, packed, and used `replays` times in a shuffled order before they are
dropped. That order is a function of the seed and of the outputs' sizes alone, so that a resumed training recomputes
what was kept and continues bit for bit.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import (
    KeyPath,
    MappingKey,
    TreeSpec,
    tree_flatten,
    tree_map,
    tree_map_with_path,
    tree_unflatten,
)
from torch.utils.data import Sampler
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.trainer_pt_utils import get_length_grouped_indices
from typing_extensions import Self

from keepsight.errors import UserError
from keepsight.files import one_writer
from keepsight.runtime.saved import layer_of_tensors, layer_tensors
from keepsight.runtime.state import empty_cache
from keepsight.train.dataset import Batch, Use
from keepsight.train.settings import ReplaySettings, TrainSettings

_MARK = ".keepsight-replay"
"""An empty file in each folder that a training fills."""
_ALIGNED = 64
"""Alignment, in bytes, of tensors that share a block of memory."""
_EXACT = ("importance", "answers")
"""The fields of teacher outputs that are stored without rounding."""


@dataclass(frozen=True)
class TeacherOutputs:
    """Outputs of the frozen base model for a batch, without gradients.

    Attributes:
        layers: The tensors of each layer of its cache by their names, see `layer_tensors`: `keys` and `values`, or the
            states of a recurrent layer; empty where the loss needs no cache.
        importance: Tensors in float32 that the loss compares with; stored without rounding.
        features: Hidden states.
        answers: The decoder's outputs for an answer's tokens, [B, T, hidden]; stored without rounding.
    """

    layers: list[dict[str, Tensor]] = field(default_factory=list)
    importance: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_cache(cls, cache: Cache, importance: Sequence[Tensor] = ()) -> Self:
        """The tensors of a cache, with importance."""
        layers = []
        for layer in cache.layers:
            tensors = layer_tensors(layer)
            layers.append({name: tensor for name, tensor in tensors.items() if tensor is not None})
        return cls(layers, list(importance))

    def cache(self, model: PreTrainedModel, length: int) -> Cache:
        """A cache of the base model with these layers, after `length` tokens."""
        layers = []
        for empty_layer, tensors in zip(empty_cache(model).layers, self.layers, strict=True):
            cast_tensors = {}
            for name, tensor in tensors.items():
                # Recurrent states are in float32 in models of any dtype.
                stays = name.startswith("recurrent") or not tensor.is_floating_point()
                cast_tensors[name] = tensor if stays else tensor.to(model.dtype)
            layers.append(layer_of_tensors(empty_layer, cast_tensors, length))
        return Cache(layers=layers)


def _devices(outputs: TeacherOutputs) -> TeacherOutputs:
    """The device of each tensor, in the tensor's place."""
    return TeacherOutputs(**tree_map(lambda tensor: tensor.device, vars(outputs)))


def pack(outputs: TeacherOutputs, int8: bool) -> TeacherOutputs:
    """Teacher outputs on the CPU: keys and values in int8, as pairs with float32 scales [..., 1], the rest in bfloat16.

    Importance and answers stay exact: in bfloat16, a bfloat16 base model's replayed loss equals the one without replay.
    """

    def pack_tensor(path: KeyPath, tensor: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        name = _name(path)
        if int8 and name in ("keys", "values"):
            scale = tensor.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
            quantized = (tensor / scale).round().to(torch.int8)
            return quantized.contiguous().cpu(), scale.contiguous().cpu()
        if tensor.is_floating_point() and name not in _EXACT:
            tensor = tensor.to(torch.bfloat16)
        return tensor.contiguous().cpu()

    return TeacherOutputs(**tree_map_with_path(pack_tensor, vars(outputs)))


def _name(path: KeyPath) -> str:
    """The name of a layer's tensor, or of the field of teacher outputs that lists a tensor."""
    names = [step.key for step in path if isinstance(step, MappingKey)]
    return str(names[-1])


def unpack(packed: TeacherOutputs, devices: TeacherOutputs) -> TeacherOutputs:
    """The inverse of `pack` up to rounding, in float32; `devices` holds each tensor's device in its place."""

    def unpack_tensor(stored: Tensor | tuple[Tensor, Tensor], device: torch.device) -> Tensor:
        if isinstance(stored, tuple):
            quantized, scale = stored
            return quantized.to(device, non_blocking=True) * scale.to(device, non_blocking=True)
        tensor = stored.to(device, non_blocking=True)
        return tensor.float() if tensor.is_floating_point() else tensor

    tensors = tree_map(unpack_tensor, vars(packed), vars(devices), is_leaf=_is_packed_tensor)
    return TeacherOutputs(**tensors)


def _is_packed_tensor(node: object) -> bool:
    return isinstance(node, Tensor | tuple)


def require_replays_alone(folder: Path, processes: str = "process-*") -> None:
    """Raise a UserError if a folder of `replay.dir`, by the pattern of its name, holds files that no training wrote."""
    for path in folder.glob(processes):
        is_ours = path.is_dir() and ((path / _MARK).exists() or not any(path.iterdir()))
        if not is_ours:
            raise UserError(
                f"replay.dir: {path} holds files that no training wrote; choose another folder",
                field="replay.dir",
                code="conflict",
            )


@contextmanager
def _process_folder(folder: Path) -> Iterator[None]:
    """Yield an empty folder for this process alone, cleared of files of a killed training; afterwards it is deleted.

    Raises:
        UserError: the folder holds files that no training wrote, or another process uses it.
    """
    mark = folder / _MARK
    folder.mkdir(parents=True, exist_ok=True)
    require_replays_alone(folder.parent, folder.name)
    mark.touch()

    def clear() -> None:
        for path in folder.glob("*.safetensors"):
            path.unlink()

    with one_writer(folder):
        clear()
        try:
            yield
        finally:
            clear()
            mark.unlink()
    with suppress(OSError):  # not empty: someone else's files
        folder.rmdir()


class ReplayBuffer:
    """Stores packed teacher outputs for reuse: in memory, or within a `with` block in files.

    They are dropped after their last use. Each process has a folder of its own.
    """

    def __init__(self, settings: ReplaySettings, process: int = 0) -> None:
        self._int8 = settings.dtype == "int8"
        self._kept: dict[tuple[int, ...], tuple[list[Tensor] | Path, TreeSpec]] = {}
        self._devices = TeacherOutputs()  # of each tensor, alike for all batches
        self._files = 0
        self._folder = Path(settings.dir) / f"process-{process}" if settings.dir else None
        self._exit_stack = ExitStack()

    def bytes_of(self, outputs: TeacherOutputs) -> int:
        """Bytes of packed teacher outputs."""
        tensors, _ = tree_flatten(vars(pack(outputs, self._int8)))
        return sum(tensor.nbytes for tensor in tensors)

    def rounded(self, outputs: TeacherOutputs) -> TeacherOutputs:
        """Teacher outputs as `take` returns them: packed, and unpacked on their devices."""
        return unpack(pack(outputs, self._int8), _devices(outputs))

    def take(self, batch: Batch, run: Callable[[], TeacherOutputs]) -> TeacherOutputs:
        """A batch's teacher outputs: the kept ones, or else those that `run` computes.

        They are packed and unpacked even before their first use, so that all uses see the same values.
        """
        key = tuple(batch.indices)
        stored, spec = self._kept.pop(key, (None, None))
        if stored is None or spec is None:
            outputs = run()
            self._devices = _devices(outputs)
            stored, spec = tree_flatten(vars(pack(outputs, self._int8)))

        if isinstance(stored, Path):
            tensors_by_number = load_file(stored)
            tensors = [tensors_by_number[str(number)] for number in range(len(tensors_by_number))]
            if batch.last:
                stored.unlink()
            else:
                self._kept[key] = stored, spec
        else:
            tensors = stored
            if not batch.last:
                self._kept[key] = self._keep(tensors), spec
        return unpack(TeacherOutputs(**tree_unflatten(tensors, spec)), self._devices)

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._exit_stack.enter_context(_process_folder(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        self._exit_stack.close()

    def _keep(self, tensors: list[Tensor]) -> list[Tensor] | Path:
        if self._folder is None:
            return _outside_heap(tensors)
        self._files += 1
        path = self._folder / f"{self._files}.safetensors"
        save_file({str(number): tensor for number, tensor in enumerate(tensors)}, path)
        return path


def _outside_heap(tensors: list[Tensor]) -> list[Tensor]:
    """Copies outside the heap, whose memory returns to the system when they are dropped.

    In the heap they fragment what training steps allocate: of a buffer of 0.7 GB, 1.8 GB stayed, against 0.5 GB.
    """
    sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    memory = torch.frombuffer(mmap(-1, sum(sizes)), dtype=torch.uint8)
    copies = []
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        copy = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor))
        start += size
    return copies


def replay_order(sizes: Sequence[float], replays: int, memory: int, rng: random.Random) -> Iterator[tuple[int, int]]:
    """The order in which teacher outputs are used: (index of the batch, number of earlier uses).

    As many as fit into `memory` bytes, at least one, are in use at a time, and any of them may come next. After
    `replays` uses one is dropped, and the next ones take its place.
    """
    waiting = list(reversed(range(len(sizes))))
    uses: dict[int, int] = {}  # of the batches in use
    while waiting or uses:
        while waiting and (not uses or sizes[waiting[-1]] + sum(sizes[batch] for batch in uses) <= memory):
            uses[waiting.pop()] = 0
        batch = rng.choice(list(uses))
        yield batch, uses[batch]
        uses[batch] += 1
        if uses[batch] == replays:
            del uses[batch]


class ReplaySampler(Sampler[Use]):
    """Every sample `replays` times an epoch, batch after batch; seed and epoch decide the order.

    A round is one batch for each of the `processes`, in order, as accelerate distributes them. The batches of a round
    keep their samples and are used in the same steps: with `group_by_length` they take about as long, so that no
    process waits long for another. Samples that do not fill a round are left out of an epoch. Packed teacher outputs
    take `token_bytes` a token, and those of one process at most `memory` bytes.
    """

    def __init__(
        self, lengths: Sequence[int], token_bytes: float, memory: int, settings: TrainSettings, processes: int = 1
    ) -> None:
        self.lengths = list(lengths)
        self.token_bytes = token_bytes
        self.memory = memory
        self.settings = settings
        self.round_size = settings.batch_size * processes
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.lengths) // self.round_size * self.round_size * self.settings.replays

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate calls it when one begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Use]:
        rng = random.Random(f"{self.settings.seed}:{self.epoch}:0")
        rounds = self._rounds()
        sizes = []
        for indices in rounds:
            longest = max(self.lengths[index] for index in indices)
            sizes.append(self.token_bytes * self.settings.batch_size * longest)
        last_turn = self.settings.replays - 1
        for number, turn in replay_order(sizes, self.settings.replays, self.memory, rng):
            for index in rounds[number]:
                yield Use(index, turn, last=turn == last_turn)

    def _rounds(self) -> list[list[int]]:
        """The samples of each round: a batch of the first process, one of the second, and so on."""
        generator = torch.Generator().manual_seed(self.settings.seed + self.epoch)
        if self.settings.group_by_length:
            order = get_length_grouped_indices(self.lengths, self.round_size, generator=generator)
        else:
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
        full_rounds = len(order) // self.round_size
        starts = range(0, full_rounds * self.round_size, self.round_size)
        return [order[start : start + self.round_size] for start in starts]
