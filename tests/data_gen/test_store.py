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
AGAIN = "run the same `keepsight data"


def sample(index: int) -> TrainingSample:
    return TrainingSample(
        index, "ab"[index % 2], [5] * (index + 1), [7] * index + [2], f"prompt {index} ü", f"answer {index}"
    )


def run(folder: Path, settings: DataSettings = SETTINGS, stop_after: int = 1000, skip: int = -1) -> dict[str, Any]:
    """Answer what is missing, the last sample of a shard first, until `stop_after` samples are written."""
    writer = ShardWriter(folder, settings)
    for shard in writer.settings.shards():
        for index in reversed(writer.missing(shard)):
            if (stop_after := stop_after - 1) < 0:
                raise KeyboardInterrupt
            writer.append(shard, [Skipped(index, "bad") if index == skip else sample(index)])
        writer.finish(shard)
    return writer.complete()


def stopped(folder: Path, stop_after: int, settings: DataSettings = SETTINGS) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(folder, settings, stop_after)


def read(folder: Path) -> list[TrainingSample]:
    return [*read_training_samples(folder, *MODEL)[0]]


def expected(count: int = 10) -> list[TrainingSample]:
    return [sample(index) for index in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shard_of(folder: Path, number: int = 1) -> Path:
    (path,) = folder.glob(f"shard-{number:05d}-*.arrow")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    manifest = run(tmp_path)
    found, read_manifest = read_training_samples(tmp_path, *MODEL)
    assert [*found] == expected()
    assert read_manifest == manifest == read_json(tmp_path / "manifest.json")
    counts = {"samples": 10, "prompt_tokens": 55, "answer_tokens": 55, "sources": {"a": 5, "b": 5}, "skipped": []}
    assert {key: manifest[key] for key in counts} == counts and manifest["settings"] == asdict(SETTINGS)
    assert sorted(contents(tmp_path)) == ["manifest.json", *manifest["shards"]] and len(manifest["shards"]) == 3


@pytest.mark.parametrize("stops", [[5, 1, 1], [3, 0, 3]])
def test_a_stopped_run_resumes(tmp_path: Path, stops: list[int]) -> None:
    reference = run(tmp_path / "whole")
    folder, done = tmp_path / "stopped", 0
    for stop in stops:
        stopped(folder, stop)
        done += stop
        assert len([*folder.glob("*.arrow")]) == done // 4
        with refused("data", "missing"):
            read(folder)
    assert run(folder, stop_after=10 - done) == reference
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize(("fault", "missing"), [("torn", [4, 5]), ("twice", [4])])
def test_a_stopped_shard_in_work_goes_on(tmp_path: Path, fault: str, missing: list[int]) -> None:
    reference = run(tmp_path / "whole")
    stopped(tmp_path / "data", 7)
    partial = tmp_path / "data" / "shard-00001.jsonl.partial"
    assert [row["index"] for row in read_jsonl(partial)] == [7, 6, 5]
    content = partial.read_bytes()
    partial.write_bytes({"torn": content[:-9], "twice": content * 2}[fault])
    assert ShardWriter(tmp_path / "data", SETTINGS).missing(range(4, 8)) == missing
    assert run(tmp_path / "data") == reference
    assert read(tmp_path / "data") == expected()


@pytest.mark.parametrize(("old", "new"), [(b'"index": 6', b'"index" 6'), (b'"prompt"', b'"promt"')])
def test_a_damaged_line_of_a_shard_in_work_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    reference = run(tmp_path / "whole")
    stopped(tmp_path / "data", 7)
    partial = tmp_path / "data" / "shard-00001.jsonl.partial"
    lines = partial.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(old, new)
    partial.write_bytes(b"".join(lines))
    with refused(partial.name, "file") as error:
        run(tmp_path / "data")
    assert f"{partial.name}:2: " in str(error.value)
    partial.unlink()
    assert run(tmp_path / "data") == reference


def test_a_kill_between_writing_a_shard_and_removing_its_lines(tmp_path: Path) -> None:
    reference = run(tmp_path)
    write_lines(tmp_path / "shard-00001.jsonl.partial", map(asdict, expected()[4:8]))
    assert run(tmp_path, stop_after=0) == reference
    assert not [*tmp_path.glob("*.partial")] and read(tmp_path) == expected()


def test_raising_and_lowering_the_limit(tmp_path: Path) -> None:
    reference = run(tmp_path / "data")
    first = read_training_samples(tmp_path / "data", *MODEL)[0]
    more = replace(SETTINGS, limit=15)
    stopped(tmp_path / "data", 1, more)
    with refused("data", "missing"):
        read(tmp_path / "data")
    assert run(tmp_path / "data", more, stop_after=4) == run(tmp_path / "whole", more)
    assert read(tmp_path / "data") == expected(15) and [*first] == expected()  # open files stay readable
    assert run(tmp_path / "data", replace(SETTINGS, limit=5), stop_after=0)["samples"] == 5
    assert read(tmp_path / "data") == expected(5)
    assert run(tmp_path / "data", stop_after=0)["samples"] == reference["samples"]
    assert read(tmp_path / "data") == expected()


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
    begun = replace(SETTINGS, date="2026-01-31")
    stopped(tmp_path, 0, replace(begun, seed=99))
    assert run(tmp_path, replace(SETTINGS, date="2026-02-01"))["settings"] == asdict(begun)


def test_skipped_samples_are_named_and_not_asked_for_again(tmp_path: Path) -> None:
    manifest = run(tmp_path, skip=5)
    assert manifest["skipped"] == [{"index": 5, "reason": "bad"}] and manifest["samples"] == 9
    assert run(tmp_path, stop_after=0) == manifest
    assert [each.index for each in read(tmp_path)] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    more = run(tmp_path, replace(SETTINGS, limit=11))
    assert more["skipped"] == manifest["skipped"] and more["samples"] == 10


def test_folders_without_usable_data_are_refused(tmp_path: Path) -> None:
    with refused("manifest.json", "missing"):
        read(tmp_path / "missing")
    manifest = run(tmp_path)
    with refused("model", "conflict"):
        read_training_samples(tmp_path, "ada/other", IDENTITY, 100)
    with refused("model", "conflict"):
        read_training_samples(tmp_path, "ada/tiny", replace(IDENTITY, template="sha256:other"), 100)
    later_version = replace(IDENTITY, model="decaf")  # such as a quantised one
    assert [*read_training_samples(tmp_path, "ada/tiny", later_version, 100)[0]] == expected()
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


@pytest.mark.parametrize("damage", ["first byte", "bit", "last byte", "cut"])
def test_a_changed_shard_is_refused_and_made_again_once_it_is_deleted(tmp_path: Path, damage: str) -> None:
    reference = run(tmp_path)
    shard = shard_of(tmp_path)
    whole = shard.read_bytes()
    changed = bytearray(whole)
    position = {"first byte": 0, "bit": len(whole) // 2, "last byte": len(whole) - 1, "cut": 0}[damage]
    changed[position] ^= 1
    shard.write_bytes(whole[:-100] if damage == "cut" else changed)
    for use in (read, run):
        with refused("shard", "file") as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)
    shard.unlink()
    assert run(tmp_path) == reference and shard.read_bytes() == whole
    assert read(tmp_path) == expected()


def test_samples_that_are_made_again_may_have_other_answers(tmp_path: Path) -> None:
    """As on another GPU: the folder is finished with the new samples, and is not refused."""
    run(tmp_path)
    shard_of(tmp_path).unlink()
    writer = ShardWriter(tmp_path, SETTINGS)
    assert writer.missing(range(4, 8)) == [4, 5, 6, 7]
    writer.append(range(4, 8), [replace(sample(index), answer="other") for index in range(4, 8)])
    writer.finish(range(4, 8))
    with refused("data", "missing"):
        read(tmp_path)
    run(tmp_path, stop_after=0)
    assert [each.answer for each in read(tmp_path)[3:5]] == ["answer 3", "other"]


def test_exchanged_shards_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    shard_of(tmp_path).unlink()
    _write_shard(tmp_path, 1, [replace(each, answer_ids=[1]) for each in expected()[4:8]])
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
    found, _ = read_training_samples(tmp_path, *MODEL)
    assert isinstance(found, StoredSamples)
    every = expected()
    for each in (found, truncated(found, 100)):
        assert (len(each), each[3], each[-1], each[2:9:3]) == (10, every[3], every[-1], every[2:9:3])
        assert every[4] in each
        with pytest.raises(IndexError):
            each[10]


def test_reading_takes_no_memory_for_tokens(tmp_path: Path) -> None:
    """Nor when samples are held out, left out and cut. As lists they take 36 bytes a token."""
    count, tokens = 240, 600
    writer = ShardWriter(tmp_path, replace(SETTINGS, limit=count, shard_size=count))
    ids = [[100_000 + (7 * index + place) % 9000 for place in range(tokens)] for index in range(count)]
    writer.append(range(count), (TrainingSample(row, "test", ids[row], ids[row][:300], "", "") for row in range(count)))
    writer.finish(range(count))
    writer.complete()
    finished_samples(tmp_path, finished_manifest(tmp_path))  # its imports take memory
    tracemalloc.start()
    try:
        stored = finished_samples(tmp_path, finished_manifest(tmp_path))
        trained, held_out = hold_out(truncated(with_short_prompts(stored, tokens), tokens + 100), 10)
        digest = samples_digest(trained.samples)
        held, peak = (each / (count * tokens * 1.5) for each in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert held < 1 and peak < 16 and pyarrow.total_allocated_bytes() < 1 << 20
    assert (len(trained), len(held_out)) == (230, 10)
    held_out_indices = {sample.index for sample in held_out.samples}
    kept = [sample for sample in truncated([*stored], tokens + 100) if sample.index not in held_out_indices]
    assert digest == samples_digest(kept)


def test_the_digest_of_samples_covers_all_ids_in_their_order() -> None:
    rows = samples(3)
    digests = {
        samples_digest(rows),
        samples_digest(rows[:2]),
        samples_digest(rows[::-1]),
        samples_digest([*rows[:2], replace(rows[2], answer_ids=[9])]),
        samples_digest([replace(row, prompt_ids=row.prompt_ids + row.answer_ids, answer_ids=[2]) for row in rows]),
        samples_digest([]),
    }
    assert len(digests) == 6
    assert samples_digest(rows) == samples_digest([replace(row, index=7, prompt="", source="x") for row in rows])


END, LIMIT = 2, 4
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
    assert main(["data", "stats", str(data), f"out={tmp_path / 'plot.png'}"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:4]] == ROWS
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (shard_0, _) = sorted(data.glob("*.arrow"))
    shard_0.write_bytes(shard_0.read_bytes()[:-1])
    assert main(["data", "stats", str(data)]) == 2
    assert shard_0.name in capsys.readouterr().err
    assert main(["data", "stats", str(tmp_path / "none")]) == 2
    assert "no manifest.json" in capsys.readouterr().err
