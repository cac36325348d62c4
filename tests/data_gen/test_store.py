"""The data folder: stopped runs resume, damage is found and repaired, earlier data is converted, samples counted."""

import gc
import json
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
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
from keepsight.errors import UserError
from keepsight.files import read_json, read_jsonl, text_digest, write_json, write_lines
from keepsight.train.dataset import hold_out, samples_digest, truncated, with_short_prompts
from tests.train.runs import samples

SETTINGS = DataSettings("ada/tiny", "c0ffee", "sha256:template", {"sources": [{"kind": "needles"}]}, 3, 10, 4, 16)
MODEL = ("ada/tiny", "sha256:template", 100)
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


def earlier(folder: Path, count: int = 10, signed: bool = True) -> dict[str, Any]:
    """A finished folder of JSON Lines, as earlier versions wrote it; and its manifest."""
    folder.mkdir()
    rows = [asdict(each) for each in expected(count)]
    names = [f"shard-{number:05d}.jsonl" for number in range(-(-count // 4))]
    for number, name in enumerate(names):
        own = rows[4 * number : 4 * number + 4]
        if signed:
            write_lines(folder / name, own)
        else:
            (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own))
    settings = asdict(replace(SETTINGS, limit=count))
    del settings["date"]
    counts = {"samples": count, "prompt_tokens": 55, "answer_tokens": 55, "sources": {"a": 5, "b": 5}}
    digest = text_digest("".join((folder / name).read_text() for name in names))
    manifest = {"complete": True, "settings": settings, **counts, "shards": names, "digest": digest}
    write_json(folder / "manifest.json", manifest)
    (folder / ".arrow").mkdir()
    (folder / ".arrow" / "samples.arrow").write_bytes(b"a copy")
    return manifest


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
        with pytest.raises(UserError, match=r"unfinished; run the same `keepsight data out=.*stopped` again"):
            read(folder)
    assert run(folder, stop_after=10 - done) == reference
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("fault", ["torn", "bit", "twice"])
def test_a_damaged_shard_in_work(tmp_path: Path, fault: str) -> None:
    reference = run(tmp_path / "whole")
    stopped(tmp_path / "data", 7)
    partial = tmp_path / "data" / "shard-00001.jsonl.partial"
    assert [row["index"] for row in read_jsonl(partial)] == [7, 6, 5]
    content = bytearray(partial.read_bytes())
    content[len(content) // 2] ^= fault == "bit"
    partial.write_bytes({"torn": content[:-9], "bit": content, "twice": content * 2}[fault])
    again = {"torn": [4, 5], "bit": [4, 6], "twice": [4]}[fault]
    assert ShardWriter(tmp_path / "data", SETTINGS).missing(range(4, 8)) == again
    assert run(tmp_path / "data") == reference
    assert read(tmp_path / "data") == expected()


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
    with pytest.raises(UserError, match="unfinished"):
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
        with pytest.raises(UserError, match=f"made with {name}=.*; choose another out=, or delete the folder"):
            run(tmp_path, replace(SETTINGS, **{name: value}))
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
    with pytest.raises(UserError, match=r"no manifest.json; make the data with `keepsight data out="):
        read(tmp_path / "missing")
    manifest = run(tmp_path)
    with pytest.raises(UserError, match=r"answered by 'ada/tiny', not by 'ada/other'; make it again"):
        read_training_samples(tmp_path, "ada/other", "sha256:template", 100)
    with pytest.raises(UserError, match="another chat template of 'ada/tiny'"):
        read_training_samples(tmp_path, "ada/tiny", "sha256:other", 100)
    with pytest.raises(UserError, match="has token 7, but the vocabulary of 'ada/tiny' ends at 6; make the data again"):
        read_training_samples(tmp_path, "ada/tiny", "sha256:template", 7)
    write_json(tmp_path / "manifest.json", manifest | {"shards": []})
    with pytest.raises(UserError, match="has no samples"):
        read(tmp_path)
    write_json(tmp_path / "manifest.json", manifest)
    shard_of(tmp_path).unlink()
    with pytest.raises(UserError, match=rf"shard-00001-.*: no such file; {AGAIN}"):
        read(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest.json is missing; restore it, or delete the folder"):
        run(tmp_path, replace(SETTINGS, seed=4))


@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
def test_a_changed_bit_is_found_named_and_repaired(
    tmp_path: Path, place: float, caplog: pytest.LogCaptureFixture
) -> None:
    reference = run(tmp_path)
    shard = shard_of(tmp_path)
    whole = shard.read_bytes()
    changed = bytearray(whole)
    changed[int(place * len(whole))] ^= 1
    shard.write_bytes(changed)
    for _ in range(2):  # reading repairs nothing
        with pytest.raises(UserError, match=rf"{shard.name}: changed .*{AGAIN}") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)
    assert run(tmp_path) == reference and shard.read_bytes() == whole
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == changed and f"{shard.name}: changed since it was written" in caplog.text
    assert read(tmp_path) == expected()


def test_repairing_may_be_killed_and_give_other_answers(tmp_path: Path) -> None:
    """As on another GPU: the folder is finished with the new samples, and is not refused."""
    run(tmp_path)
    shard_of(tmp_path).write_bytes(b"damaged")
    writer = ShardWriter(tmp_path, SETTINGS)
    assert writer.missing(range(4, 8)) == [4, 5, 6, 7]
    writer.append(range(4, 8), [replace(sample(index), answer="other") for index in range(4, 8)])
    writer.finish(range(4, 8))
    with pytest.raises(UserError, match="unfinished"):
        read(tmp_path)
    run(tmp_path, stop_after=0)
    assert [each.answer for each in read(tmp_path)[3:5]] == ["answer 3", "other"]


def test_exchanged_shards_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    shard_of(tmp_path).unlink()
    _write_shard(tmp_path, 1, [replace(each, answer_ids=[1]) for each in expected()[4:8]])
    with pytest.raises(UserError, match=r"not the ones that manifest.json names; restore its files"):
        run(tmp_path)
    with pytest.raises(UserError, match=rf"no such file; {AGAIN}"):
        read(tmp_path)


@pytest.mark.parametrize("key", ["settings", "extra"])
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, key: str) -> None:
    manifest = run(tmp_path)
    write_json(tmp_path / "manifest.json", manifest | {key: "7"})
    for use in (read, run):
        with pytest.raises(UserError, match=rf"manifest.json: {key}: ") as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("signed", [True, False], ids=["digests", "no digests"])
def test_data_of_earlier_versions_is_converted_once(
    tmp_path: Path, signed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    before = earlier(folder, signed=signed)
    with ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(read, folder) for _ in range(4)]]
    assert found == [expected()] * 4
    assert caplog.text.count("converting the samples of an earlier version to Arrow") == 1
    after = read_json(folder / "manifest.json")
    assert sorted(after["shards"]) == sorted(path.name for path in folder.glob("shard-*"))
    assert after["digest"] == before["digest"] and not (folder / ".arrow").exists()
    assert run(folder, stop_after=0) == after
    assert after["shards"] == run(tmp_path / "new")["shards"]


def test_data_of_earlier_versions_is_resumed_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "data"
    before = earlier(folder)
    assert run(folder, stop_after=0)["digest"] == before["digest"]
    shutil.rmtree(folder)
    earlier(folder)
    text = (folder / "shard-00001.jsonl").read_text()
    (folder / "shard-00001.jsonl").write_text(text.replace("prompt 5", "prompt 4"))
    with pytest.raises(UserError, match=rf"shard-00001.jsonl:2: changed or cut off .*{AGAIN}"):
        read(folder)
    manifest = run(folder, stop_after=1)
    assert "shard-00001.jsonl:2: changed" in caplog.text and len([*folder.glob("*.damaged-*")]) == 1
    assert manifest["shards"] == run(tmp_path / "new")["shards"] and read(folder) == expected()
    assert not [*folder.glob("*.jsonl*l")] and not (folder / ".arrow").exists()


def test_an_unfinished_run_of_an_earlier_version_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "data"
    manifest = earlier(folder)
    write_json(folder / "manifest.json", {"complete": False, "settings": manifest["settings"]})
    (folder / "shard-00002.jsonl").rename(folder / "shard-00002.jsonl.partial")
    (folder / "shard-00001.jsonl").unlink()
    assert run(folder, stop_after=4)["shards"] == run(tmp_path / "new")["shards"]
    assert caplog.text.count("converting") == 1 and read(folder) == expected()


@pytest.mark.parametrize("ids", [[], [-1], [1.5]])
def test_converting_refuses_malformed_token_ids(tmp_path: Path, ids: Any) -> None:
    manifest = earlier(tmp_path / "data")
    shard = tmp_path / "data" / "shard-00001.jsonl"
    write_lines(shard, [{**row, "answer_ids": ids} if row["index"] == 6 else row for row in [*read_jsonl(shard)]])
    digest = text_digest("".join((tmp_path / "data" / name).read_text() for name in manifest["shards"]))
    write_json(tmp_path / "data" / "manifest.json", manifest | {"digest": digest})
    with pytest.raises(UserError, match=r"shard-00001.jsonl:3: ") as caught:
        read(tmp_path / "data")
    assert "\n" not in str(caught.value) and "answer_ids" in str(caught.value)


def test_converting_refuses_exchanged_lines(tmp_path: Path) -> None:
    earlier(tmp_path / "data")
    shard = tmp_path / "data" / "shard-00001.jsonl"
    rows = [*read_jsonl(shard)]
    write_lines(shard, [rows[0] | {"answer_ids": [9]}, *rows[1:]])
    for use in (read, run):
        with pytest.raises(UserError, match=r"not the ones that manifest.json names; restore"):
            use(tmp_path / "data")
    write_lines(shard, rows[:2] + rows[3:])
    with pytest.raises(UserError, match=r"shard-00001.jsonl: lacks one of the samples 4 to 7 in order"):
        read(tmp_path / "data")


def test_a_folder_that_cannot_be_written_to_is_converted_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    earlier(tmp_path / "data")
    before, temporary = {path.name for path in (tmp_path / "data").iterdir()}, tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("keepsight.data_gen.store.FileLock", refused)
    found = finished_samples(tmp_path / "data", finished_manifest(tmp_path / "data"))
    assert [*found] == expected() and len([*temporary.iterdir()]) == 1
    assert {path.name for path in (tmp_path / "data").iterdir()} == before
    del found
    gc.collect()
    assert not [*temporary.iterdir()]


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


def test_the_digest_of_samples_is_that_of_earlier_versions() -> None:
    """Or no training that they began could be resumed."""
    rows = samples(3)
    assert samples_digest(rows) == text_digest(repr([(row.prompt_ids, row.answer_ids) for row in rows]))
    assert samples_digest([]) == text_digest("[]")


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
    settings = DataSettings("ada/tiny", "v", "t", {"sources": []}, 0, len(SAMPLES), 3, LIMIT)
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
