"""`keepsight data stats`: the table and plot of a data folder."""

from pathlib import Path

import pytest

from keepsight.commands.cli import main
from keepsight.data_gen.store import DataSettings, ShardWriter, TrainingSample

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
