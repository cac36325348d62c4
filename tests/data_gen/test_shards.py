"""Shards: what a stopped run leaves is used once, and what is not finished does not pass for data."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from keepsight.data_gen.finished import read_training_samples
from keepsight.data_gen.shard_writer import ShardWriter
from keepsight.data_gen.shards import DataSettings, TrainingSample
from keepsight.errors import UserError
from keepsight.files import read_json, read_jsonl, text_digest, write_json, write_lines

SETTINGS = DataSettings("ada/tiny", "c0ffee", "sha256:template", {"sources": [{"kind": "needles"}]}, 3, 10, 4, 16)


def sample(index: int) -> TrainingSample:
    return TrainingSample(
        index, "ab"[index % 2], [5] * (index + 1), [7] * index + [2], f"prompt {index} ü", f"answer {index}"
    )


def run(folder: Path, settings: DataSettings = SETTINGS, stop_after: int = 1000) -> dict[str, Any]:
    """Answer what is missing, the last sample of a shard first, until `stop_after` samples are written."""
    writer = ShardWriter(folder, settings)
    for shard in writer.settings.shards():
        for index in reversed(writer.missing(shard)):
            if (stop_after := stop_after - 1) < 0:
                raise KeyboardInterrupt
            writer.append(shard, [sample(index)])
        writer.finish(shard)
    return writer.complete()


def indices(folder: Path) -> list[list[int]]:
    return [[row["index"] for row in read_jsonl(path)] for path in sorted(folder.glob("shard-*.jsonl"))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    manifest = run(tmp_path)
    assert names(tmp_path) == ["manifest.json", *(f"shard-0000{row}.jsonl" for row in range(3))]
    assert indices(tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    samples, read = read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)
    assert [*samples] == [sample(index) for index in range(10)]
    assert read == manifest == read_json(tmp_path / "manifest.json")
    assert manifest["settings"] == asdict(SETTINGS)
    counts = {"samples": 10, "prompt_tokens": 55, "answer_tokens": 55, "sources": {"a": 5, "b": 5}}
    assert {key: manifest[key] for key in counts} == counts
    assert manifest["shards"] == [f"shard-0000{row}.jsonl" for row in range(3)]


@pytest.mark.parametrize("stops", [[0], [1], [4], [5, 1, 1], [9], [3, 0, 3]])
def test_a_stopped_run_goes_on(tmp_path: Path, stops: list[int]) -> None:
    reference = run(tmp_path / "whole")
    folder, done = tmp_path / "stopped", 0
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            run(folder, stop_after=stop)
        done += stop
        assert indices(folder) == [[0, 1, 2, 3], [4, 5, 6, 7]][: done // 4]
        with pytest.raises(UserError, match=r"unfinished; run the same `keepsight data out=.*stopped` again"):
            read_training_samples(folder, "ada/tiny", "sha256:template", 100)
    assert run(folder, stop_after=10 - done) == reference
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


def test_a_line_torn_by_a_kill_is_made_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop_after=6)
    partial = tmp_path / "shard-00001.jsonl.partial"
    assert [row["index"] for row in read_jsonl(partial)] == [7, 6]
    partial.write_bytes(partial.read_bytes()[:-9])
    assert ShardWriter(tmp_path, SETTINGS).missing(range(4, 8)) == [4, 5, 6]
    run(tmp_path)
    assert indices(tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_kill_between_naming_a_shard_and_removing_its_work(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "shard-00001.jsonl.partial").write_bytes((tmp_path / "shard-00001.jsonl").read_bytes())
    run(tmp_path, stop_after=0)
    assert indices(tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert not list(tmp_path.glob("*.partial"))


def test_a_shard_with_a_sample_too_few_gets_no_name(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, SETTINGS)
    writer.append(range(0, 4), map(sample, [0, 1, 3]))
    with pytest.raises(UserError, match=r"shard-00000.jsonl.partial: 3 of 4 samples are there; run the same command"):
        writer.finish(range(0, 4))
    assert indices(tmp_path) == []


def test_raising_the_limit_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "data")
    more = replace(SETTINGS, limit=15)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data", more, stop_after=1)
    with pytest.raises(UserError, match="unfinished"):
        read_training_samples(tmp_path / "data", "ada/tiny", "sha256:template", 100)
    assert run(tmp_path / "data", more, stop_after=4) == run(tmp_path / "whole", more)
    samples, _ = read_training_samples(tmp_path / "data", "ada/tiny", "sha256:template", 100)
    assert [*samples] == [sample(index) for index in range(15)]


def test_lowering_the_limit_reads_fewer(tmp_path: Path) -> None:
    run(tmp_path)
    manifest = run(tmp_path, replace(SETTINGS, limit=5), stop_after=0)
    samples, _ = read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)
    assert [*samples] == [sample(index) for index in range(5)]
    assert manifest["samples"] == 5
    assert run(tmp_path, stop_after=0)["samples"] == 10


CHANGES: dict[str, Any] = {
    "model": "ada/other",
    "version": "decaf",
    "template_digest": "sha256:other",
    "mixture": {},
    "seed": 4,
    "shard_size": 5,
    "max_new_tokens": 17,
}


@pytest.mark.parametrize("key", CHANGES)
def test_other_settings_do_not_mix(tmp_path: Path, key: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop_after=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=f"this data was made with {key}=.*; choose another out=, or delete the folder"):
        run(tmp_path, replace(SETTINGS, **{key: CHANGES[key]}))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_that_made_nothing_binds_nobody(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, replace(SETTINGS, seed=99), stop_after=0)
    assert run(tmp_path)["settings"]["seed"] == 3


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest.json; make the data with `keepsight data out="):
        read_training_samples(tmp_path / "missing", "ada/tiny", "sha256:template", 100)
    run(tmp_path)
    with pytest.raises(UserError, match=r"answered by 'ada/tiny', not by 'ada/other'; make it again"):
        read_training_samples(tmp_path, "ada/other", "sha256:template", 100)
    with pytest.raises(UserError, match="another chat template of 'ada/tiny'"):
        read_training_samples(tmp_path, "ada/tiny", "sha256:other", 100)
    manifest = read_json(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"shards": []}))
    with pytest.raises(UserError, match="holds no sample"):
        read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    shard = tmp_path / "shard-00001.jsonl"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"shard-00001.jsonl:4: changed or cut off"):
        read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)


def damaged(path: Path, place: float) -> None:
    """One bit of the byte at this share of the file is turned over."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [index / 40 for index in range(40)])
def test_a_changed_bit_is_found_named_and_mended(
    tmp_path: Path, place: float, caplog: pytest.LogCaptureFixture
) -> None:
    reference = run(tmp_path)
    shard = tmp_path / "shard-00001.jsonl"
    whole, line = shard.read_bytes(), 1 + shard.read_bytes()[: int(place * shard.stat().st_size)].count(b"\n")
    damaged(shard, place)
    changed = shard.read_bytes()
    for _ in range(2):  # reading signs nothing
        with pytest.raises(UserError, match=rf"shard-00001.jsonl:{line}: .*run the same `keepsight data") as caught:
            read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)
        assert "\n" not in str(caught.value)
    assert run(tmp_path) == reference
    assert shard.read_bytes() == whole
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == changed and f"it is kept as {aside.name}" in caplog.text
    assert read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)[1] == reference


def test_a_bit_changed_in_a_shard_being_written(tmp_path: Path) -> None:
    reference = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data", stop_after=7)
    damaged(tmp_path / "data" / "shard-00001.jsonl.partial", 0.4)
    assert run(tmp_path / "data") == reference


def test_lines_written_twice_are_dropped(tmp_path: Path) -> None:
    """Two writers of earlier releases wedged a folder so."""
    reference = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data", stop_after=7)
    for name in ("shard-00000.jsonl", "shard-00001.jsonl.partial"):
        path = tmp_path / "data" / name
        path.write_bytes(path.read_bytes() * 2)
    assert run(tmp_path / "data") == reference


def test_lowering_the_limit_within_a_shard_being_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop_after=7)
    assert run(tmp_path, replace(SETTINGS, limit=5))["samples"] == 5
    assert run(tmp_path) == run(tmp_path / "whole")


def test_whole_lines_of_another_text_are_found(tmp_path: Path) -> None:
    """A shard exchanged, or edited and its lines signed again."""
    run(tmp_path)
    shard = tmp_path / "shard-00001.jsonl"
    rows = list(read_jsonl(shard))
    rows[2]["answer_ids"][0] += 1
    write_lines(shard, rows)
    for check in (
        lambda: run(tmp_path),
        lambda: read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100),
    ):
        with pytest.raises(UserError, match=r"together they are not what manifest.json has the digest of; restore"):
            check()
    write_lines(shard, rows[:2] + rows[3:])
    with pytest.raises(UserError, match=r"shard-00001.jsonl: does not hold the samples 4 to 7, each once"):
        read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)


def test_shards_without_a_manifest_are_nobodys(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest.json is missing; restore it, or delete the folder"):
        run(tmp_path, replace(SETTINGS, seed=4))


@pytest.mark.parametrize("ids", [[], [-1], [1.5], ["5"], [100], [10**30], None])
def test_token_ids_that_are_none(tmp_path: Path, ids: Any) -> None:
    run(tmp_path)
    shard = tmp_path / "shard-00001.jsonl"
    rows = list(read_jsonl(shard))
    write_lines(shard, [{**row, "answer_ids": ids} if row["index"] == 6 else row for row in rows])
    manifest = read_json(tmp_path / "manifest.json")
    texts = (tmp_path / name for name in manifest["shards"])
    write_json(tmp_path / "manifest.json", manifest | {"digest": text_digest("".join(map(Path.read_text, texts)))})
    with pytest.raises(UserError, match=r"sample 6 has token 1.* ends at 99|shard-00001.jsonl:3: answer_ids") as caught:
        read_training_samples(tmp_path, "ada/tiny", "sha256:template", 100)
    assert "\n" not in str(caught.value)


def test_data_of_before_lines_had_digests_is_read(tmp_path: Path) -> None:
    reference = run(tmp_path / "signed")
    manifest = read_json(tmp_path / "signed" / "manifest.json")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in manifest["shards"]:
        rows = read_jsonl(tmp_path / "signed" / name)
        (plain / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    digest = text_digest("".join((plain / name).read_text() for name in manifest["shards"]))
    (plain / "manifest.json").write_text(json.dumps(manifest | {"digest": digest}))
    samples, _ = read_training_samples(plain, "ada/tiny", "sha256:template", 100)
    assert [*samples] == [*read_training_samples(tmp_path / "signed", "ada/tiny", "sha256:template", 100)[0]]
    assert run(plain) == reference | {"digest": digest}
    text = (plain / "shard-00001.jsonl").read_text()
    (plain / "shard-00001.jsonl").write_text(text.replace("prompt 5", "prompt 4"))
    with pytest.raises(UserError, match=r"together they are not what manifest.json has the digest of"):
        read_training_samples(plain, "ada/tiny", "sha256:template", 100)
