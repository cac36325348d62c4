"""Samples in a memory-mapped Arrow file: however large a data set is, a process holds what it is reading.

The shards stay what counts. The file is a copy of them, which the first reader of a data folder makes, and the next one
again where it is missing, damaged, or a copy of other shards.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock
from typing_extensions import override

from keepsight.data_gen.lazy_samples import LazySamples
from keepsight.data_gen.shards import TrainingSample
from keepsight.errors import UserError
from keepsight.files import atomic_files, file_digest, read_json, write_json

_ROWS, _SEAL = "samples.arrow", "samples.json"
_AT_ONCE = 100
"""Samples that are held while the file is written."""


class MappedSamples(LazySamples):
    """Samples that are read from a file when they are asked for.

    Args:
        path: An Arrow file.
        held: What goes when the samples are no longer used, such as the folder that holds the file.
    """

    def __init__(self, path: Path, held: object = None) -> None:
        from datasets import Dataset  # takes seconds

        self._rows: Any = Dataset.from_file(str(path))
        self._held = held

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def read(self, place: int) -> TrainingSample:
        return TrainingSample(**self._rows[place])

    @override
    def __iter__(self) -> Iterator[TrainingSample]:
        return (TrainingSample(**row) for row in self._rows)


def mapped_samples(folder: Path, of: str, read: Callable[[], Iterable[TrainingSample]]) -> MappedSamples:
    """The samples that `read` gives, from their copy in a folder, which is made if it is not there.

    Where nothing can be written to the folder, each process has a copy of its own among the system's temporary files.

    Args:
        folder: Created if missing.
        of: Digest of what they are read from: a copy of anything else is made anew.
        read: Called by one process at a time; the others wait for it.
    """
    if not _is_copy(folder, of):
        try:
            folder.mkdir(exist_ok=True)
            with FileLock(folder / ".lock"):
                if not _is_copy(folder, of):
                    _copy(folder, of, read())
        except OSError:
            own = tempfile.TemporaryDirectory(prefix="keepsight-")
            _copy(Path(own.name), of, read())
            return MappedSamples(Path(own.name, _ROWS), own)
    return MappedSamples(folder / _ROWS)


def _is_copy(folder: Path, of: str) -> bool:
    try:
        return read_json(folder / _SEAL, dict[str, str]) == {"of": of, "digest": file_digest(folder / _ROWS)}
    except (OSError, UserError):
        return False


def _copy(folder: Path, of: str, samples: Iterable[TrainingSample]) -> None:
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    ids, text = List(Value("int32")), Value("string")
    columns = {"index": Value("int64"), "source": text, "prompt_ids": ids, "answer_ids": ids}
    with atomic_files(folder, last=_SEAL) as unfinished:
        path = unfinished / _ROWS
        features = Features({**columns, "prompt": text, "answer": text})
        with ArrowWriter(path=str(path), features=features, writer_batch_size=_AT_ONCE) as writer:
            for sample in samples:
                writer.write(asdict(sample))
            writer.finalize()
        write_json(unfinished / _SEAL, {"of": of, "digest": file_digest(path)})
