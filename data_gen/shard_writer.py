"""Writing shards (see `keepsight.data_gen.shards`): a killed run resumes without losing or repeating a sample."""

import logging
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keepsight.data_gen.shards import EXCHANGED, DataSettings, Manifest, TrainingSample, read_shard, shards_digest
from keepsight.errors import UserError, require_same
from keepsight.files import (
    append_lines,
    cut_torn_line,
    file_digest,
    read_json,
    sound_lines,
    write_json,
    write_lines,
)

logger = logging.getLogger("keepsight")


class ShardWriter:
    """Writes samples in shards. Several may write different shards of one folder at a time.

    Raises:
        UserError: the folder holds data made with other settings, or shards without a manifest.
    """

    def __init__(self, folder: Path, settings: DataSettings) -> None:
        self.folder, self.settings, self._has_written = folder, settings, False
        self._before = self._earlier()
        if self._before is None:
            write_json(folder / "manifest.json", {"complete": False, "settings": asdict(settings)})

    def missing(self, shard: range) -> list[int]:
        """Indices of a shard that no earlier run has answered."""
        path, partial = self._path(shard), self._partial(shard)
        if path.exists():
            if [sample.index for sample in self._sound(path) if sample.index in shard] == list(shard):
                return []
            path.rename(partial)  # limit= was raised, and the last shard has room for more; or lines were damaged
        if not partial.exists():
            return list(shard)
        cut_torn_line(partial)
        done = self._by_index(partial)
        return [index for index in shard if index not in done]

    def append(self, shard: range, samples: Iterable[TrainingSample]) -> None:
        """Add samples to the shard being written."""
        self._has_written = True
        append_lines(self._partial(shard), map(asdict, samples))

    def finish(self, shard: range) -> None:
        """Sort a shard's samples and give it its final name."""
        path, partial = self._path(shard), self._partial(shard)
        if not path.exists():
            held = self._by_index(partial)
            if lacking := set(shard) - held.keys():
                there = len(shard) - len(lacking)
                raise UserError(f"{partial}: {there} of {len(shard)} samples are there; run the same command again")
            write_lines(path, [asdict(held[index]) for index in sorted(held)])
        partial.unlink(missing_ok=True)

    def complete(self) -> dict[str, Any]:
        """Write the final manifest and return it.

        Raises:
            UserError: nothing was missing, but the shards are not those that the manifest was written for.
        """
        sources, prompts, answers = Counter[str](), 0, 0
        for shard in self.settings.shards():
            for sample in read_shard(self._path(shard), shard):
                sources[sample.source] += 1
                prompts, answers = prompts + len(sample.prompt_ids), answers + len(sample.answer_ids)
        paths = [*map(self._path, self.settings.shards())]
        names, digest = [path.name for path in paths], shards_digest(paths)
        made = Manifest(
            True, self.settings, sources.total(), prompts, answers, dict(sources.most_common()), names, digest
        )
        if self._before is not None and not self._has_written and made.digest != self._before.digest:
            raise UserError(f"{self.folder}: {EXCHANGED}; restore its files, or delete the folder")
        write_json(self.folder / "manifest.json", asdict(made))
        return asdict(made)

    def _earlier(self) -> Manifest | None:
        """The manifest of an earlier run that made all of these samples."""
        path, has_shards = self.folder / "manifest.json", any(self.folder.glob("shard-*"))
        if not path.exists():
            if has_shards:
                raise UserError(f"{self.folder}: manifest.json is missing; restore it, or delete the folder")
            return None
        before: Manifest = read_json(path, Manifest)
        if has_shards:
            same_limit = replace(before.settings, limit=self.settings.limit)
            advice = "choose another out=, or delete the folder"
            require_same(f"{self.folder}: this data was made", asdict(same_limit), asdict(self.settings), advice)
        return before if before.complete and before.settings == self.settings else None

    def _by_index(self, partial: Path) -> dict[int, TrainingSample]:
        """The samples of a shard that is being written, each once."""
        start = int(partial.name.removeprefix("shard-").partition(".")[0]) * self.settings.shard_size
        room = range(start, start + self.settings.shard_size)
        return {sample.index: sample for sample in reversed(self._sound(partial)) if sample.index in room}

    def _sound(self, path: Path) -> list[TrainingSample]:
        """A file's samples. One with changed lines is kept aside, and a file without these takes its place."""
        samples, faults = sound_lines(path, TrainingSample)
        if faults:
            aside = path.with_name(f"{path.name}.damaged-{file_digest(path)[7:15]}")
            logger.warning("%s; it is kept as %s, and what its place lacks is made again", faults[0], aside.name)
            shutil.copyfile(path, aside)
            write_lines(path, map(asdict, samples))
            self._has_written = True
        return samples

    def _path(self, shard: range) -> Path:
        return self.folder / f"shard-{shard.start // self.settings.shard_size:05d}.jsonl"

    def _partial(self, shard: range) -> Path:
        return self._path(shard).with_suffix(".jsonl.partial")
