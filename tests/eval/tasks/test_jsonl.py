"""Samples from the user's files in LongBench's and RULER's layouts."""

import gzip
import json
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import Code
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.jsonl import Jsonl
from keepsight.eval.tasks.metrics import METRICS
from keepsight.eval.tasks.registry import Benchmarks, make_all
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from tests.refused import refused

RULER = "RULER: string_match_part for qa_1/qa_2, else string_match_all over outputs"
READ = "Read: {context}\nQ: {input}\nA:"
QA: dict[str, Any] = {"layout": "longbench", "prompt": READ, "metric": "qa_f1", "max_new_tokens": 32}
NEEDLES: dict[str, Any] = {
    "layout": "ruler",
    "prompt": "{input}{answer_prefix}",
    "metric": RULER,
    "max_new_tokens": {"niah": 128, "qa": 32},
}


def row(identity: str, context: str = "some text", **changes: Any) -> dict[str, Any]:
    return {"input": "why?", "context": context, "answers": ["because"], "_id": identity, **changes}


def needle(task: str, index: int, **changes: Any) -> dict[str, Any]:
    return {"index": index, "task": task, "input": "Find it.", "outputs": ["7"], "answer_prefix": " It is", **changes}


def write(folder: Path, tasks: dict[str, Any], **files: Sequence[dict[str, Any]]) -> Path:
    """A folder of files, with tasks.json in it."""
    folder.mkdir(exist_ok=True)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def request_of(words: Any, **changes: Any) -> TaskRequest:
    return TaskRequest(words, **{"context": 9000, "samples": 0, "max_tokens": 4096, **changes})


def samples_of(folder: Path, request: TaskRequest, *files: str) -> list[RenderedSample]:
    return Jsonl(str(folder), [*files]).samples("", request)


def only_sample(folder: Path, words: Any) -> RenderedSample:
    (sample,) = samples_of(folder, request_of(words))
    return sample


def test_longbench_row(tmp_path: Path, words: Any) -> None:
    write(tmp_path, {"hotpotqa": QA}, hotpotqa=[row("x1", answers=["because", "so"])])
    context = "Read: some text"
    question = "\nQ: why?\nA:"
    expected = Sample("x1", "hotpotqa", 512, context + question, ("because", "so"), "qa_f1", 32, question=question)
    sample = only_sample(tmp_path, words)
    assert sample == render(expected, words)
    assert sample.context == context
    assert len(sample.prompt_ids) == 6 + 3


@pytest.mark.parametrize(
    ("template", "prompt", "question"),
    [
        ('{"k": {}}\n{context}\n{input}', '{"k": {}}\n{input} {0} {x.__class__}\nwhy?', "\nwhy?"),  # other braces stay
        ("{input}\n{context}", "why?\n{input} {0} {x.__class__}", ""),
    ],
)
def test_the_question_is_what_follows_the_context(
    tmp_path: Path, words: Any, template: str, prompt: str, question: str
) -> None:
    write(tmp_path, {"a": {**QA, "prompt": template}}, a=[row("1", "{input} {0} {x.__class__}")])
    sample = only_sample(tmp_path, words)
    assert sample.prompt == prompt
    assert sample.question == question


def test_ruler_rows(tmp_path: Path, words: Any) -> None:
    without_task = needle("", 0)
    del without_task["task"]
    write(
        tmp_path,
        {"mixed": NEEDLES, "qa_1": {**NEEDLES, "max_new_tokens": 5}},
        mixed=[needle("niah_single_1", 3), needle("qa_2", 3)],
        qa_1=[without_task],
    )
    samples = samples_of(tmp_path, request_of(words))
    assert [(sample.id, sample.task, sample.metric, sample.max_new_tokens) for sample in samples] == [
        ("niah_single_1-3", "mixed", "string_match_all", 128),
        ("qa_2-3", "mixed", "string_match_part", 32),
        ("qa_1-0", "qa_1", "string_match_part", 5),
    ]
    for sample in samples:
        assert sample.prompt == "Find it."
        assert sample.answer_prefix == " It is"


def test_plain_longbench_files_need_no_tasks(tmp_path: Path, words: Any) -> None:
    for name in ("hotpotqa", "trec"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row("1", all_classes=["because"])) + "\n")
    hotpotqa, trec = samples_of(tmp_path, request_of(words))
    assert (hotpotqa.task, hotpotqa.metric, hotpotqa.max_new_tokens) == ("hotpotqa", "qa_f1", 32)
    assert hotpotqa.chat
    assert hotpotqa.prompt.startswith("Answer the question based on the given passages. Only give me the answer")
    assert (trec.task, trec.metric, trec.max_new_tokens) == ("trec", "classification", 64)
    assert not trec.chat
    assert trec.prompt.endswith("\nsome text\nwhy?")


@pytest.mark.parametrize(
    ("name", "entry", "chat", "metric"),
    [
        ("triviaqa", {}, False, "qa_f1_first_line"),
        ("mine", {"longbench_task": "trec", "metric": "classification"}, False, "classification"),
        ("mine", {"like": "samsum", "metric": "rouge_l"}, False, "rouge_l_first_line"),
        ("mine", {"like": "qmsum", "metric": "rouge_l"}, True, "rouge_l"),
        ("mine", {"metric": "answer string in prediction, or qa_f1"}, True, "answer_in_prediction"),
    ],
)
def test_conventions_of_longbench_tasks(
    tmp_path: Path, words: Any, name: str, entry: dict[str, Any], chat: bool, metric: str
) -> None:
    folder = write(tmp_path / "eval", {name: {**QA, **entry}}, **{name: [row("1", all_classes=["because", "x"])]})
    (folder / "tasks.json").rename(tmp_path / "tasks.json")  # beside the folder will do
    sample = only_sample(folder, words)
    assert sample.chat == chat
    assert sample.metric == metric
    assert sample.classes == (("because", "x") if metric == "classification" else ())


def test_lengths(tmp_path: Path, words: Any) -> None:
    """The bucket of the rendered prompt; the first samples that fit, the others noted."""
    rows: list[dict[str, Any]] = []
    for index, tokens in enumerate((513, 1025, 73, 1024, 80)):
        context = " ".join(["w"] * (tokens - 7))  # 7 words of both templates
        rows.append(row(str(index), context))
    write(tmp_path, {"b": QA, "a": QA}, a=rows, b=[row("0")])
    request = request_of(words, samples=3, max_tokens=1024)
    samples = make_all(Benchmarks(jsonl=Jsonl(str(tmp_path))), ["jsonl"], request)
    assert [(sample.task, sample.id, sample.length) for sample in samples] == [
        ("a", "0", 1024),
        ("a", "2", 512),
        ("a", "3", 1024),
        ("b", "0", 512),
    ]
    assert request.notes == {"a": "1 samples do not fit max_tokens=1024"}


def test_equal_ids_are_numbered(tmp_path: Path, words: Any) -> None:
    without_id = row("")
    del without_id["_id"]
    write(tmp_path, {"a": QA}, a=[row("x"), row("x"), row("x-2"), without_id, row("x")])
    samples = samples_of(tmp_path, request_of(words))
    assert [sample.id for sample in samples] == ["x", "x-2", "x-2-2", "4", "x-3"]


def test_many_equal_ids_take_linear_time(words: Any) -> None:
    """12,000 took 103 s when each id was searched for from 2 on."""
    sample = render(Sample("x", "a", 512, "Why?", ("because",), "qa_f1", 8), words)
    start = time.process_time()
    samples = request_of(words).collect("a", (("a:1", {}) for _ in range(12_000)), lambda *_: [sample])
    assert samples[-1].id == "x-12000"
    assert len({sample.id for sample in samples}) == 12_000
    assert time.process_time() - start < 2


BAD_ROWS: list[tuple[dict[str, Any], dict[str, Any], str, Code]] = [
    (QA, {"input": "q", "context": "c"}, "answers", "type"),
    (QA, row("1", answers=[None]), "answers", "type"),
    (QA, {**row("1"), "context": None}, "context", "type"),
    ({**QA, "metric": "classification"}, row("1"), "all_classes", "type"),
    ({**QA, "metric": "wanted_length"}, row("1", answers=["long"]), "metric", "data"),
    ({**QA, "metric": "reaches_target"}, row("1", answers=["7"]), "metric", "data"),
    (QA, row("1", "refused"), "messages", "data"),
    (NEEDLES, row("1"), "outputs", "type"),
    (NEEDLES, needle("niah_single_1", 0, outputs=[7]), "outputs", "type"),
    (NEEDLES, needle("vt", 0), "task", "unknown"),
]


@pytest.mark.parametrize(("entry", "bad", "field", "code"), BAD_ROWS)
def test_a_bad_row_is_skipped_and_noted(
    tmp_path: Path, words: Any, entry: Any, bad: dict[str, Any], field: str, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if 'refused' in messages[0].content %}{{ raise_exception('no such word') }}{% endif %}"
    monkeypatch.setattr(words, "chat_template", refusing + words.chat_template)
    number = "7" if entry.get("metric") == "wanted_length" else "1 2 3 4 -> 5"
    good = needle("qa_1", 0) if entry is NEEDLES else row("0", all_classes=["x"], answers=[number])
    write(tmp_path, {"a": entry}, a=[good, bad, good])
    request = request_of(words)
    assert len(samples_of(tmp_path, request)) == 2
    assert len(request.skipped) == 1
    assert request.notes["a"].startswith("1 rows were skipped, such as ")
    assert "\n" not in request.notes["a"]
    with refused(field, code) as error:
        samples_of(tmp_path, request_of(words, skip=0))
    assert "a.jsonl:2: " in str(error.value)
    assert "skip=0" in str(error.value)
    write(tmp_path, {"a": entry}, a=[bad, bad])
    with refused(field, code) as error:  # with no sample at all, the first fault
        samples_of(tmp_path, request_of(words))
    assert "a.jsonl:1: " in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
def test_a_metric_of_a_plugin_must_give_a_finite_number(
    tmp_path: Path, words: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "mine", lambda prediction, sample: value)
    write(tmp_path, {"a": {**QA, "metric": "mine"}}, a=[row("1")])
    with refused("metric", "data"):
        samples_of(tmp_path, request_of(words))
    monkeypatch.setitem(METRICS, "mine", lambda prediction, sample: 1)
    assert only_sample(tmp_path, words).metric == "mine"


TEXT = json.dumps(row("é", "Zoë sleeps."), ensure_ascii=False) + "\n\n" + json.dumps(row("2")) + "\n"


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode("utf-8-sig"),
        TEXT.encode("utf-16"),
        gzip.compress(TEXT.encode()),
    ],
    ids=["BOM", "UTF-16", "gzip"],
)
def test_encodings(tmp_path: Path, words: Any, data: bytes) -> None:
    write(tmp_path, {"a": QA})
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "tasks.json").write_bytes(json.dumps({"a": QA}).encode("utf-8-sig"))
    first, second = samples_of(tmp_path, request_of(words))
    assert first.id == "é"
    assert first.prompt == "Read: Zoë sleeps.\nQ: why?\nA:"
    assert second.id == "2"


@pytest.mark.parametrize(
    ("data", "field", "code"),
    [
        (b"[3]", "context", "type"),
        (b"[" * 100_000, "context", "type"),
        (b'{"context": "\\ud800"}', "context", "type"),
        (b"\xff\xfe\x00", "a.jsonl", "file"),
        (gzip.compress(TEXT.encode())[:-9], "a.jsonl", "file"),
    ],
    ids=["list", "deep", "surrogate", "half UTF-16", "cut gzip"],
)
def test_files_that_are_no_json_lines(tmp_path: Path, words: Any, data: bytes, field: str, code: Code) -> None:
    """A line that is no object is a row without fields; its place and fault are in the message."""
    write(tmp_path, {"a": QA})
    (tmp_path / "a.jsonl").write_bytes(data)
    with refused(field, code) as error:
        samples_of(tmp_path, request_of(words))
    assert "a.jsonl:" in str(error.value)


def test_a_line_that_is_cut_is_skipped(tmp_path: Path, words: Any) -> None:
    write(tmp_path, {"a": QA})
    (tmp_path / "a.jsonl").write_bytes(TEXT.encode()[:-20])
    request = request_of(words)
    assert [sample.id for sample in samples_of(tmp_path, request)] == ["é"]
    assert re.match(r"1 rows were skipped, such as .*a\.jsonl:3: not valid JSON", request.notes["a"])


def test_files_that_cannot_be_scored(tmp_path: Path, words: Any, caplog: pytest.LogCaptureFixture) -> None:
    tasks = {"a": QA, "proc": {"layout": "longproc"}, "zh": {**QA, "metric": "own_f1"}}
    write(tmp_path, tasks, a=[row("1")], proc=[{}], zh=[{}], stray=[{}])
    with caplog.at_level(logging.WARNING):
        assert only_sample(tmp_path, words).task == "a"
    reasons = {"proc": "layout 'longproc'", "stray": "neither tasks.json nor LongBench", "zh": "metric 'own_f1'"}
    for (name, reason), record in zip(reasons.items(), caplog.records, strict=True):
        assert f"{name} is left out: {reason}" in record.getMessage()
        with refused("jsonl.files", "data"):
            samples_of(tmp_path, request_of(words), "a", name)
    with refused("jsonl.files", "unknown"):
        samples_of(tmp_path, request_of(words), "../eval/a")


@pytest.mark.parametrize(
    ("entry", "field", "code"),
    [
        ({**QA, "prompt": "{context.__class__}"}, "context.__class__", "unknown"),
        ({**QA, "prompt": "no field"}, "prompt", "missing"),
        ({**QA, "prompt": None}, "prompt", "type"),
        ({**QA, "max_new_tokens": 0}, "max_new_tokens", "type"),
        ({**QA, "max_new_tokens": {"a": 32}}, "max_new_tokens", "type"),
        ({**NEEDLES, "prompt": "{answer_prefix}{input}"}, "prompt", "missing"),
    ],
)
def test_bad_entry_of_tasks_json(tmp_path: Path, words: Any, entry: dict[str, Any], field: str, code: Code) -> None:
    write(tmp_path, {"a": entry}, a=[row("1")])
    with refused(field, code):
        samples_of(tmp_path, request_of(words))


def test_missing_folder_and_files(tmp_path: Path, words: Any) -> None:
    def require_refused(field: str, code: Code, folder: Path = tmp_path / "eval") -> None:
        with refused(field, code):
            samples_of(folder, request_of(words))

    require_refused("jsonl.dir", "missing", tmp_path / "nowhere")
    (tmp_path / "eval").mkdir()
    require_refused("jsonl.dir", "missing")
    (tmp_path / "eval" / "a.jsonl").write_text(json.dumps(row("1")))
    require_refused("tasks.json", "missing")
    (tmp_path / "eval" / "tasks.json").write_text("[]")
    require_refused("tasks.json", "type")
    (tmp_path / "eval" / "tasks.json").write_text('{"a": {"layout": "longproc"}}')
    require_refused("jsonl.files", "data")
