"""What `keepsight data stats` says of a data folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from keepsight.commands.cli import main
from keepsight.data_gen.stats import ALL, SourceStats, stats_of
from keepsight.data_gen.store import DataSettings, ShardWriter, TrainingSample

END, LIMIT = 2, 4
SAMPLES = [
    TrainingSample(0, "essays", [5, 6, 7], [8, END], "", ""),
    TrainingSample(1, "needles/single", [5, 6], [8, 9, 9, 9], "", ""),  # truncated
    TrainingSample(2, "essays", [5, 6], [8, 9, 9, END], "", ""),  # as long as is allowed; the prompt of 1
    TrainingSample(3, "essays", [5, 6, 7], [8, END], "", ""),  # the prompt of 0
]


def test_stats_by_source_and_of_all() -> None:
    stats = stats_of(SAMPLES, LIMIT)
    assert list(stats) == ["essays", "needles/single", ALL]
    assert stats["essays"] == SourceStats((2, 3, 3), (2, 2, 4), duplicates=2, truncated=0)
    assert stats["needles/single"] == SourceStats((2,), (4,), duplicates=0, truncated=1)
    assert stats[ALL] == SourceStats((2, 2, 3, 3), (2, 2, 4, 4), duplicates=2, truncated=1)


def write(folder: Path, samples: list[TrainingSample]) -> ShardWriter:
    settings = DataSettings("ada/tiny", "v", "t", {"sources": {}}, 0, len(samples), 3, LIMIT)
    writer = ShardWriter(folder, settings)
    for shard in settings.shards():
        writer.append(shard, [samples[index] for index in shard])
        writer.finish(shard)
    return writer


def test_the_command_prints_a_table_and_draws_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", SAMPLES).complete()
    assert main(["data", "stats", str(tmp_path / "data")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["essays", "3", "2", "/", "3", "/", "3", "2", "/", "2", "/", "4", "2", "0"]
    assert lines[3][:2] == ["all", "4"]
    assert (tmp_path / "data" / "stats.png").read_bytes().startswith(b"\x89PNG")
    assert main(["data", "stats", str(tmp_path / "data"), f"out={tmp_path / 'plot.png'}"]) == 0
    assert (tmp_path / "plot.png").exists()


def test_an_unfinished_or_damaged_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = write(tmp_path / "data", SAMPLES)
    assert main(["data", "stats", str(tmp_path / "data")]) == 2
    assert "unfinished" in capsys.readouterr().err
    writer.complete()
    shard = tmp_path / "data" / "shard-00000.jsonl"
    shard.write_text(shard.read_text().replace("essays", "essence"))
    assert main(["data", "stats", str(tmp_path / "data")]) == 2
    assert "shard-00000.jsonl" in capsys.readouterr().err
    assert main(["data", "stats", str(tmp_path / "none")]) == 2
    assert "no manifest.json" in capsys.readouterr().err


def test_the_same_prompt_from_another_source_is_a_duplicate() -> None:
    twice = [SAMPLES[0], replace(SAMPLES[0], index=1, source="code")]
    assert stats_of(twice, LIMIT)["code"].duplicates == 1
