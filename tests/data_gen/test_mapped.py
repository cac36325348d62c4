"""The memory-mapped copy that training reads: nothing of it is held, and no fault of it is ever read."""

import gc
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest

from keepsight.data_gen.finished import finished_manifest, finished_samples, read_training_samples
from keepsight.data_gen.mapped import MappedSamples, mapped_samples
from keepsight.data_gen.shard_writer import ShardWriter
from keepsight.data_gen.shards import DataSettings, TrainingSample
from keepsight.errors import UserError
from keepsight.files import text_digest
from keepsight.train.dataset import cut, hold_out, no_longer_than, samples_digest
from tests.train.runs import samples

SETTINGS = DataSettings("ada/tiny", "c0ffee", "sha256:template", {"sources": []}, 3, 10, 4, 16)


def sample(index: int, tokens: int = 5) -> TrainingSample:
    ids = [100_000 + (7 * index + place) % 9000 for place in range(tokens)]
    return TrainingSample(index, "test", ids, ids[: tokens // 2], f"prompt {index} ü", f"answer {index}")


def write(folder: Path, limit: int = 10, tokens: int = 5) -> Path:
    writer = ShardWriter(folder, replace(SETTINGS, limit=limit))
    for shard in writer.settings.shards():
        writer.append(shard, (sample(index, tokens) for index in writer.missing(shard)))
        writer.finish(shard)
    writer.complete()
    return folder


def read(folder: Path) -> list[TrainingSample]:
    return [*finished_samples(folder, finished_manifest(folder))]


def expected(limit: int = 10) -> list[TrainingSample]:
    return [sample(index) for index in range(limit)]


def test_a_process_holds_no_tokens(tmp_path: Path) -> None:
    """Nor when samples are held out, left out and cut. As lists they take 8 bytes a token and more."""
    count, tokens = 240, 600
    folder = write(tmp_path, count, tokens)
    read(folder)
    manifest = finished_manifest(folder)
    tracemalloc.start()
    try:
        mapped = finished_samples(folder, manifest)
        before, _ = tracemalloc.get_traced_memory()
        trained, held_out = hold_out(cut(no_longer_than(mapped, tokens), tokens + 100), 10)
        digest = samples_digest(trained.samples)
        held, peak = (each / (count * tokens * 1.5) for each in tracemalloc.get_traced_memory())
        listed = [*mapped]
        as_list = (tracemalloc.get_traced_memory()[0] - before) / (count * tokens * 1.5)
    finally:
        tracemalloc.stop()
    assert held < 1, "bytes a token"  # what the library itself has made
    assert as_list > 8
    assert peak < as_list / 2  # a few samples at a time, and what digests are made of
    assert pyarrow.total_allocated_bytes() < 1 << 20
    assert (len(trained), len(held_out), len(listed)) == (230, 10, 240)
    assert digest == samples_digest([each for place, each in enumerate(cut(listed, tokens + 100)) if place % 24 != 23])


def test_the_digest_is_that_of_earlier_releases() -> None:
    """Or no training that they began could be resumed."""
    rows = samples(3)
    assert samples_digest(rows) == text_digest(repr([(row.prompt_ids, row.answer_ids) for row in rows]))
    assert samples_digest([]) == text_digest("[]")


@pytest.mark.parametrize("name", ["samples.arrow", "samples.json"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.98])
def test_a_damaged_copy_is_made_anew(tmp_path: Path, name: str, place: float) -> None:
    assert read(write(tmp_path)) == expected()
    path = tmp_path / ".arrow" / name
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[int(place * len(whole))] ^= 1
    for content in (bytes(changed), whole[: int(place * len(whole))], None):
        path.unlink() if content is None else path.write_bytes(content)
        assert read(tmp_path) == expected()
        assert path.read_bytes() == whole


def test_a_shard_that_is_damaged_after_it_was_copied_is_refused(tmp_path: Path) -> None:
    read(write(tmp_path))
    shard = tmp_path / "shard-00001.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"prompt 5", b"prompt 4"))
    with pytest.raises(UserError, match=r"shard-00001.jsonl:2: changed .*run the same `keepsight data"):
        read(tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match=r"shard-00001.jsonl: no such file"):
        read(tmp_path)


def test_more_samples_are_copied_anew(tmp_path: Path) -> None:
    assert read(write(tmp_path)) == expected()
    first = finished_samples(tmp_path, finished_manifest(tmp_path))
    assert read(write(tmp_path, 15)) == expected(15)
    assert [*first] == expected()  # whoever reads the copy of before goes on
    assert read(write(tmp_path, 5)) == expected(5)


def test_processes_make_one_copy(tmp_path: Path) -> None:
    made = []

    def slowly() -> Iterator[TrainingSample]:
        made.append(1)
        yield from expected()

    with ThreadPoolExecutor(4) as pool:
        copies = [pool.submit(mapped_samples, tmp_path / "copy", "a", slowly) for _ in range(4)]
    assert [[*copy.result()] for copy in copies] == [expected()] * 4
    assert len(made) == 1


def test_a_copy_that_was_not_finished_is_none(tmp_path: Path) -> None:
    def stopped() -> Iterator[TrainingSample]:
        yield sample(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mapped_samples(tmp_path, "a", stopped)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert [*mapped_samples(tmp_path, "a", expected)] == expected()


def test_where_nothing_can_be_written_each_process_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    folder, temporary = write(tmp_path / "data"), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("keepsight.data_gen.mapped.FileLock", full)
    found = finished_samples(folder, finished_manifest(folder))
    assert [*found] == expected()
    assert not (folder / ".arrow" / "samples.arrow").exists()
    assert len([*temporary.iterdir()]) == 1
    del found
    gc.collect()
    assert not [*temporary.iterdir()]
    monkeypatch.undo()
    read(folder)
    monkeypatch.setattr("keepsight.data_gen.mapped.FileLock", full)
    assert read(folder) == expected()  # the copy that is there needs no lock


def test_samples_are_a_sequence(tmp_path: Path) -> None:
    mapped, _ = read_training_samples(write(tmp_path), "ada/tiny", "sha256:template", 200_000)
    assert isinstance(mapped, MappedSamples)
    every = expected()
    for each in (mapped, cut(mapped, 100)):
        assert (len(each), each[3], each[-1], each[2:9:3]) == (10, every[3], every[-1], every[2:9:3])
        assert every[4] in each
        with pytest.raises(IndexError):
            each[10]
    with pytest.raises(UserError, match=r"sample 0 has token 10000\d, but the vocabulary of 'ada/tiny' ends at 99999"):
        read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100_000)
