"""The data folder: stopped runs resume, damage is found, samples are counted."""

import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from keepsight.commands.cli import main
from keepsight.data_gen.store import (
    DataSettings,
    ShardWriter,
    Skipped,
    StoredSamples,
    TrainingSample,
    _write_shard,
    finished_manifest,
    finished_samples,
    read_training_samples,
)
from keepsight.files import read_json, read_jsonl, write_json, write_lines
from keepsight.models.identity import Identity
from keepsight.train.dataset import hold_out, samples_digest, truncated, with_short_prompts
from tests.refused import refused
from tests.train.runs import samples

IDENTITY = Identity(model="c0ffee", template="sha256:template")
SETTINGS = DataSettings("ada/tiny", IDENTITY, {"sources": [{"kind": "needles"}]}, 3, 10, 4, 16)
MODEL = ("ada/tiny", IDENTITY, 100)


def sample(index: int) -> TrainingSample:
    return TrainingSample(
        index=index,
        source="ab"[index % 2],
        prompt_ids=[5] * (index + 1),
        answer_ids=[7] * index + [2],
        prompt=f"prompt {index} ü",
        answer=f"answer {index}",
    )


def run(folder: Path, settings: DataSettings = SETTINGS, stop_after: int = 1000, skip: int = -1) -> dict[str, Any]:
    """Answer what is missing, the last sample of a shard first, until `stop_after` samples are written."""
    writer = ShardWriter(folder, settings)
    written = 0
    for shard in writer.settings.shards():
        for index in reversed(writer.missing(shard)):
            if written == stop_after:
                raise KeyboardInterrupt
            writer.append(shard, [Skipped(index, "bad") if index == skip else sample(index)])
            written += 1
        writer.finish(shard)
    return writer.complete()


def stopped(folder: Path, stop_after: int, settings: DataSettings = SETTINGS) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(folder, settings, stop_after)


def read(folder: Path) -> list[TrainingSample]:
    stored, _ = read_training_samples(folder, *MODEL)
    return list(stored)


def expected(count: int = 10) -> list[TrainingSample]:
    return [sample(index) for index in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shard_of(folder: Path, number: int = 1) -> Path:
    (path,) = folder.glob(f"shard-{number:05d}-*.arrow")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    manifest = run(tmp_path)
    stored, read_manifest = read_training_samples(tmp_path, *MODEL)
    assert list(stored) == expected()
    assert read_manifest == manifest == read_json(tmp_path / "manifest.json")
    assert manifest["samples"] == 10
    assert manifest["prompt_tokens"] == 55
    assert manifest["answer_tokens"] == 55
    assert manifest["sources"] == {"a": 5, "b": 5}
    assert manifest["skipped"] == []
    assert manifest["settings"] == asdict(SETTINGS)
    assert sorted(contents(tmp_path)) == ["manifest.json", *manifest["shards"]]
    assert len(manifest["shards"]) == 3


@pytest.mark.parametrize("stops", [[5, 1, 1], [3, 0, 3]])
def test_a_stopped_run_resumes(tmp_path: Path, stops: list[int]) -> None:
    reference = run(tmp_path / "uninterrupted")
    folder = tmp_path / "stopped"
    written = 0
    for stop_after in stops:
        stopped(folder, stop_after)
        written += stop_after
        assert len(list(folder.glob("*.arrow"))) == written // 4
        with refused("data", "missing"):
            read(folder)
    assert run(folder, stop_after=10 - written) == reference
    assert contents(folder) == contents(tmp_path / "uninterrupted")


@pytest.mark.parametrize(("fault", "missing"), [("torn", [4, 5]), ("twice", [4])])
def test_a_stopped_shard_in_work_goes_on(tmp_path: Path, fault: str, missing: list[int]) -> None:
    reference = run(tmp_path / "uninterrupted")
    data = tmp_path / "data"
    stopped(data, 7)
    partial = data / "shard-00001.jsonl.partial"
    assert [row["index"] for row in read_jsonl(partial)] == [7, 6, 5]
    content = partial.read_bytes()
    partial.write_bytes(content[:-9] if fault == "torn" else content * 2)
    assert ShardWriter(data, SETTINGS).missing(range(4, 8)) == missing
    assert run(data) == reference
    assert read(data) == expected()


@pytest.mark.parametrize(("old", "new"), [(b'"index": 6', b'"index" 6'), (b'"prompt"', b'"promt"')])
def test_a_damaged_line_of_a_shard_in_work_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    reference = run(tmp_path / "uninterrupted")
    data = tmp_path / "data"
    stopped(data, 7)
    partial = data / "shard-00001.jsonl.partial"
    lines = partial.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(old, new)
    partial.write_bytes(b"".join(lines))
    with refused(partial.name, "file") as error:
        run(data)
    assert f"{partial.name}:2: " in str(error.value)
    partial.unlink()
    assert run(data) == reference


def test_a_kill_between_writing_a_shard_and_removing_its_lines(tmp_path: Path) -> None:
    reference = run(tmp_path)
    write_lines(tmp_path / "shard-00001.jsonl.partial", map(asdict, expected()[4:8]))
    assert run(tmp_path, stop_after=0) == reference
    assert list(tmp_path.glob("*.partial")) == []
    assert read(tmp_path) == expected()


def test_raising_and_lowering_the_limit(tmp_path: Path) -> None:
    data = tmp_path / "data"
    reference = run(data)
    first_samples, _ = read_training_samples(data, *MODEL)
    more = replace(SETTINGS, limit=15)
    stopped(data, 1, more)
    with refused("data", "missing"):
        read(data)
    assert run(data, more, stop_after=4) == run(tmp_path / "uninterrupted", more)
    assert read(data) == expected(15)
    assert list(first_samples) == expected()  # open files stay readable
    assert run(data, replace(SETTINGS, limit=5), stop_after=0)["samples"] == 5
    assert read(data) == expected(5)
    assert run(data, stop_after=0)["samples"] == reference["samples"]
    assert read(data) == expected()


def test_other_settings_do_not_mix(tmp_path: Path) -> None:
    stopped(tmp_path, 1)
    before = contents(tmp_path)
    changes: dict[str, Any] = {"model": "ada/other", "mixture": {}, "seed": 4, "temperature": 0.7}
    for name, value in changes.items():
        with refused(name, "conflict"):
            run(tmp_path, replace(SETTINGS, **{name: value}))
    with refused("model", "conflict"):
        run(tmp_path, replace(SETTINGS, identity=replace(IDENTITY, model="decaf")))
    assert contents(tmp_path) == before


def test_a_run_without_a_sample_may_be_replaced_and_its_date_is_kept(tmp_path: Path) -> None:
    first_settings = replace(SETTINGS, date="2026-01-31")
    stopped(tmp_path, 0, replace(first_settings, seed=99))
    manifest = run(tmp_path, replace(SETTINGS, date="2026-02-01"))
    assert manifest["settings"] == asdict(first_settings)


def test_skipped_samples_are_named_and_not_asked_for_again(tmp_path: Path) -> None:
    manifest = run(tmp_path, skip=5)
    assert manifest["skipped"] == [{"index": 5, "reason": "bad"}]
    assert manifest["samples"] == 9
    assert run(tmp_path, stop_after=0) == manifest
    assert [stored.index for stored in read(tmp_path)] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    later_manifest = run(tmp_path, replace(SETTINGS, limit=11))
    assert later_manifest["skipped"] == manifest["skipped"]
    assert later_manifest["samples"] == 10


def test_folders_without_usable_data_are_refused(tmp_path: Path) -> None:
    with refused("manifest.json", "missing"):
        read(tmp_path / "missing")
    manifest = run(tmp_path)
    with refused("model", "conflict"):
        read_training_samples(tmp_path, "ada/other", IDENTITY, 100)
    with refused("model", "conflict"):
        read_training_samples(tmp_path, "ada/tiny", replace(IDENTITY, template="sha256:other"), 100)
    later_version = replace(IDENTITY, model="decaf")  # such as a quantised one
    stored, _ = read_training_samples(tmp_path, "ada/tiny", later_version, 100)
    assert list(stored) == expected()
    with refused("answer_ids", "model"):
        read_training_samples(tmp_path, "ada/tiny", IDENTITY, 7)
    write_json(tmp_path / "manifest.json", manifest | {"shards": []})
    with refused("data", "range"):
        read(tmp_path)
    write_json(tmp_path / "manifest.json", manifest)
    shard_of(tmp_path).unlink()
    with refused("shard", "missing"):
        read(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with refused("manifest.json", "missing"):
        run(tmp_path, replace(SETTINGS, seed=4))


def damaged(content: bytes, damage: str) -> bytes:
    changed = bytearray(content)
    if damage == "bit":
        changed[len(content) // 2] ^= 1
    elif damage == "first byte":
        changed[0] ^= 1
    elif damage == "last byte":
        changed[-1] ^= 1
    else:
        del changed[-100:]
    return bytes(changed)


@pytest.mark.parametrize("damage", ["first byte", "bit", "last byte", "cut"])
def test_a_changed_shard_is_refused_and_made_again_once_it_is_deleted(tmp_path: Path, damage: str) -> None:
    reference = run(tmp_path)
    shard = shard_of(tmp_path)
    content = shard.read_bytes()
    shard.write_bytes(damaged(content, damage))
    for use in (read, run):
        with refused("shard", "file") as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)
    shard.unlink()
    assert run(tmp_path) == reference
    assert shard.read_bytes() == content
    assert read(tmp_path) == expected()


def test_samples_that_are_made_again_may_have_other_answers(tmp_path: Path) -> None:
    """As on another GPU: the folder is finished with the new samples, and is not refused."""
    run(tmp_path)
    shard_of(tmp_path).unlink()
    writer = ShardWriter(tmp_path, SETTINGS)
    shard = range(4, 8)
    assert writer.missing(shard) == [4, 5, 6, 7]
    writer.append(shard, [replace(sample(index), answer="other") for index in shard])
    writer.finish(shard)
    with refused("data", "missing"):
        read(tmp_path)
    run(tmp_path, stop_after=0)
    assert [stored.answer for stored in read(tmp_path)[3:5]] == ["answer 3", "other"]


def test_exchanged_shards_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    shard_of(tmp_path).unlink()
    _write_shard(tmp_path, 1, [replace(stored, answer_ids=[1]) for stored in expected()[4:8]])
    with refused("shard", "file"):
        run(tmp_path)
    with refused("shard", "missing"):
        read(tmp_path)


@pytest.mark.parametrize("key", ["settings", "extra"])
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, key: str) -> None:
    manifest = run(tmp_path)
    write_json(tmp_path / "manifest.json", manifest | {key: "7"})
    for use in (read, run):
        with refused("manifest.json", "file") as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)


def test_samples_are_a_sequence(tmp_path: Path) -> None:
    run(tmp_path)
    stored, _ = read_training_samples(tmp_path, *MODEL)
    assert isinstance(stored, StoredSamples)
    as_list = expected()
    for sequence in (stored, truncated(stored, 100)):
        assert len(sequence) == 10
        assert sequence[3] == as_list[3]
        assert sequence[-1] == as_list[-1]
        assert sequence[2:9:3] == as_list[2:9:3]
        assert as_list[4] in sequence
        with pytest.raises(IndexError):
            sequence[10]


def write_long_samples(folder: Path, count: int, tokens: int) -> None:
    """Data of one shard, with prompts of so many tokens and answers of 300."""
    writer = ShardWriter(folder, replace(SETTINGS, limit=count, shard_size=count))
    long_samples = []
    for index in range(count):
        ids = [100_000 + (7 * index + position) % 9000 for position in range(tokens)]
        long_samples.append(TrainingSample(index, "test", ids, ids[:300], "", ""))
    writer.append(range(count), long_samples)
    writer.finish(range(count))
    writer.complete()


def test_reading_takes_no_memory_for_tokens(tmp_path: Path) -> None:
    """Nor when samples are held out, left out and cut. As lists they take 36 bytes a token."""
    count = 240
    tokens = 600
    write_long_samples(tmp_path, count, tokens)
    finished_samples(tmp_path, finished_manifest(tmp_path))  # its imports take memory
    tracemalloc.start()
    try:
        stored = finished_samples(tmp_path, finished_manifest(tmp_path))
        trained, held_out = hold_out(truncated(with_short_prompts(stored, tokens), tokens + 100), 10)
        digest = samples_digest(trained.samples)
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tokens_in_all = count * tokens * 1.5
    assert held_bytes / tokens_in_all < 1
    assert peak_bytes / tokens_in_all < 16
    assert pyarrow.total_allocated_bytes() < 1 << 20
    assert len(trained) == 230
    assert len(held_out) == 10
    held_out_indices = {sample.index for sample in held_out.samples}
    in_memory = truncated(list(stored), tokens + 100)
    remaining = [sample for sample in in_memory if sample.index not in held_out_indices]
    assert digest == samples_digest(remaining)


def test_the_digest_of_samples_covers_all_ids_in_their_order() -> None:
    first, second, third = samples(3)
    joined = [
        replace(sample, prompt_ids=sample.prompt_ids + sample.answer_ids, answer_ids=[2])
        for sample in (first, second, third)
    ]
    digests = {
        samples_digest([first, second, third]),
        samples_digest([first, second]),
        samples_digest([third, second, first]),
        samples_digest([first, second, replace(third, answer_ids=[9])]),
        samples_digest(joined),
        samples_digest([]),
    }
    assert len(digests) == 6
    same_ids = [replace(sample, index=7, prompt="", source="x") for sample in (first, second, third)]
    assert samples_digest(same_ids) == samples_digest([first, second, third])


END = 2
LIMIT = 4
SAMPLES = [
    TrainingSample(0, "essays", [5, 6, 7], [8, END], "", ""),
    TrainingSample(1, "needles/single", [5, 6], [8, 9, 9, 9], "", ""),  # truncated
    TrainingSample(2, "essays", [5, 6], [8, 9, 9, END], "", ""),  # as long as is allowed; the prompt of 1
    TrainingSample(3, "essays", [5, 6, 7], [8, END], "", ""),  # the prompt of 0
]
ROWS = [
    "essays 3 2 / 3 / 3 2 / 2 / 4 2 0",
    "needles/single 1 2 / 2 / 2 4 / 4 / 4 0 1",
    "all 4 2 / 3 / 3 2 / 4 / 4 2 1",
]


def test_the_command_prints_a_table_and_draws_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    settings = DataSettings("ada/tiny", Identity(), {"sources": []}, 0, len(SAMPLES), 3, LIMIT)
    writer = ShardWriter(data, settings)
    for shard in settings.shards():
        writer.append(shard, [SAMPLES[index] for index in shard])
        writer.finish(shard)
    assert main(["data", "stats", str(data)]) == 2
    assert "unfinished" in capsys.readouterr().err

    writer.complete()
    plot = tmp_path / "plot.png"
    assert main(["data", "stats", str(data), f"out={plot}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in printed[1:4]] == ROWS
    assert plot.read_bytes().startswith(b"\x89PNG")

    first_shard, _ = sorted(data.glob("*.arrow"))
    first_shard.write_bytes(first_shard.read_bytes()[:-1])
    assert main(["data", "stats", str(data)]) == 2
    assert first_shard.name in capsys.readouterr().err

    assert main(["data", "stats", str(tmp_path / "none")]) == 2
    assert "no manifest.json" in capsys.readouterr().err
