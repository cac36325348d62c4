"""Benchmarks as converters into our format: their samples are those of the time before there was one loader."""

from pathlib import Path
from typing import Any

import pytest

from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.helmet import Helmet
from keepsight.eval.tasks.jsonl import Jsonl
from keepsight.eval.tasks.judged import LongWriter, MtBench
from keepsight.eval.tasks.longproc import LongProc
from keepsight.eval.tasks.registry import Benchmarks, make_all
from keepsight.files import json_digest, write_json, write_lines

ROWS: dict[str, list[dict[str, Any]]] = {
    "helmet/ruler/niah_multivalue/validation_4096.jsonl": [
        {"type_needle_v": "numbers", "context": "hay {query}", "query": "a-b", "answer": ["1", "2"], "index": 5},
        {"type_needle_v": "words", "context": "straw", "query": "c-d", "outputs": ["x"]},
    ],
    "longproc/rows.jsonl": [
        {"task": "countdown_0.5k", "input_prompt": "Count.", "item": {"nums": [2, 3, 4, 1], "target": 10}, "id": "a"},
        {"task": "tom_tracking_2k", "prompt": "Where {input}?", "reference_output": "- Step 0: hall", "item": {}},
    ],
    "mt_bench.jsonl": [
        {"question_id": 81, "category": "writing", "turns": ["Write .", "Rewrite ."]},
        {"question_id": 111, "category": "math", "turns": ["Add .", "Now subtract ."], "reference": ["3", "1"]},
    ],
    "longwriter.jsonl": [{"id": 2, "prompt": "Write much .", "type": "News", "length": 20000}],
    "jsonl/qasper.jsonl": [{"context": "a {input} b", "input": "who ?", "answers": ["he", "she"], "_id": "q"}],
    "jsonl/mixed.jsonl": [
        {"task": "qa_1", "index": 3, "input": "Read .", "outputs": ["x"], "answer_prefix": " Answer:"},
        {"task": "niah_single_1", "index": 4, "input": "Find .", "outputs": ["7"], "answer_prefix": " It is"},
    ],
}
TASKS = {
    "qasper": {"layout": "longbench", "prompt": "{context}\n\nQ: {input}\nA:", "metric": "qa_f1", "max_new_tokens": 16},
    "mixed": {
        "layout": "ruler",
        "prompt": "{input}{answer_prefix}",
        "metric": "RULER: string_match_part for qa_1/qa_2, else string_match_all over outputs",
        "max_new_tokens": {"qa": 32, "niah": 128},
    },
}
# Digests of the samples that each benchmark made itself, at commit 94f5a1d3.
BEFORE = {
    "helmet_recall_niah_mv": "sha256:22da4e2365609d9cb39968201f348915b5039e34513c51b0e915ec1fdd02e9fb",
    "longproc": "sha256:cf51ee8544a82939251ea0c2e5903dccfa83116ff0e76d98a4ab6a82e9834ae5",
    "mt_bench": "sha256:e9019aa9a62c170b5c9b5a915ec83ec9e544fcb73926f53ee8944885278f31e8",
    "longwriter": "sha256:4bb0cf05326821bfa04c8dc8f5fe26ef9e2a05657fd47318c7525effc8cc22ae",
    "longwriter_length": "sha256:455bdcf243a19655c9b759abb2fd7953c394013e09d2cd53a464a72548d30c8e",
    "jsonl": "sha256:ba33a4a068363ea34c3f3404d8c95d43b82171d39488b77098811fd5e73a8e21",
}


@pytest.fixture
def benchmarks(tmp_path: Path) -> Benchmarks:
    for name, rows in ROWS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows)
    write_json(tmp_path / "jsonl" / "tasks.json", TASKS)
    return Benchmarks(
        helmet=Helmet(str(tmp_path / "helmet")),
        longproc=LongProc(str(tmp_path / "longproc")),
        mt_bench=MtBench(str(tmp_path / "mt_bench.jsonl")),
        longwriter=LongWriter(str(tmp_path / "longwriter.jsonl")),
        jsonl=Jsonl(str(tmp_path / "jsonl")),
    )


@pytest.mark.parametrize("name", BEFORE)
def test_the_samples_are_those_of_before(name: str, benchmarks: Benchmarks, words: Any) -> None:
    request = TaskRequest(words, context=4096, lengths=[4096], samples=0, judge="gpt-4 single")
    samples = []
    for sample in make_all(benchmarks, [name], request):
        values = dict(vars(sample))
        assert values.pop("draw") == 0  # newer than the digests
        for key in ("prompt_ids", "question_ids"):
            values[key] = values[key].tolist()
        samples.append(values)
    assert samples and not request.skipped
    assert json_digest(samples) == BEFORE[name]
