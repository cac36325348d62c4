"""Reading samples from files in LongBench's and RULER's layouts."""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from keepsight.errors import UserError
from keepsight.eval.tasks.jsonl import read_samples
from keepsight.eval.tasks.samples import RenderedSample, Sample, render

RULER = "RULER: string_match_part for qa_1/qa_2, else string_match_all over outputs"
READ = "Read: {context}\nQ: {input}\nA:"
QA: dict[str, Any] = {"layout": "longbench", "prompt": READ, "metric": "qa_f1", "max_new_tokens": 32}
FIND = "{input}{answer_prefix}"
LIMITS = {"niah": 128, "qa": 32}
NEEDLES: dict[str, Any] = {"layout": "ruler", "prompt": FIND, "metric": RULER, "max_new_tokens": LIMITS}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; the chat template adds 3 to a prompt."""
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    template = "{% for message in messages %}<user> {{ message.content }} <end> {% endfor %}<assistant>"
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=template)


def row(identity: str, context: str = "some text", **changes: Any) -> dict[str, Any]:
    fields = {"input": "why?", "context": context, "answers": ["because"], "length": 2, "dataset": "d"}
    return {**fields, "language": "en", "all_classes": None, "_id": identity, **changes}


def needle(task: str, index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "task": task,
        "input": "Find it.",
        "outputs": ["7", "8"],
        "answer_prefix": " It is",
        **changes,
    }


def write(folder: Path, tasks: dict[str, Any], **files: Sequence[dict[str, Any]]) -> Path:
    """A folder of files, with tasks.json in it."""
    folder.mkdir(exist_ok=True)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def refused(folder: Path, files: list[str] | None, tokenizer: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_samples(folder, files, 100, tokenizer)


def one(folder: Path, tokenizer: Any) -> RenderedSample:
    samples, _ = read_samples(folder, None, 4096, tokenizer)
    assert len(samples) == 1
    return samples[0]


def test_longbench_row(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, {"hotpotqa": QA}, hotpotqa=[row("x1", answers=["because", "so"])])
    prompt = "Read: some text\nQ: why?\nA:"
    sample = one(tmp_path, tokenizer)
    expected = Sample("x1", "hotpotqa", 512, prompt, ("because", "so"), "qa_f1", 32, question="\nQ: why?\nA:")
    assert sample == render(expected, tokenizer)
    assert len(sample.prompt_ids) == 6 + 3  # the words of the prompt and of the template
    assert sample.context == "Read: some text"


@pytest.mark.parametrize(
    ("template", "question"),
    [
        ("{context}\n{input}", "\nwhy?"),
        ("Sum up.\n{context}\nNow sum up:", "\nNow sum up:"),
        ("{input}\n{context}", ""),
    ],
)
def test_the_question_is_what_follows_the_context(tmp_path: Path, tokenizer: Any, template: str, question: str) -> None:
    write(tmp_path, {"a": {**QA, "prompt": template}}, a=[row("1", "why? {input} why?\nwhy?")])
    assert one(tmp_path, tokenizer).question == question


def test_ruler_rows(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, {"ruler_4k": NEEDLES}, ruler_4k=[needle("niah_single_1", 3), needle("qa_2", 3)])
    samples, _ = read_samples(tmp_path, ["ruler_4k"], 100, tokenizer)
    found = [(s.id, s.task, s.metric, s.max_new_tokens, s.prompt, s.answer_prefix, s.references) for s in samples]
    assert found == [
        ("niah_single_1-3", "ruler_4k", "string_match_all", 128, "Find it.", " It is", ("7", "8")),
        ("qa_2-3", "ruler_4k", "string_match_part", 32, "Find it.", " It is", ("7", "8")),
    ]
    assert all(sample.chat and not sample.question for sample in samples)


def test_ruler_file_named_after_its_task(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{key: value for key, value in needle("", 0).items() if key != "task"}]
    write(tmp_path, {"qa_1": {**NEEDLES, "max_new_tokens": 5}}, qa_1=rows)
    sample = one(tmp_path, tokenizer)
    assert (sample.id, sample.metric, sample.max_new_tokens) == ("qa_1-0", "string_match_part", 5)


def test_tasks_beside_the_folder(tmp_path: Path, tokenizer: Any) -> None:
    folder = write(tmp_path / "eval", {"a": QA}, a=[row("1")])
    (folder / "tasks.json").rename(tmp_path / "tasks.json")
    assert one(folder, tokenizer).task == "a"


def test_plain_longbench_files_need_no_tasks(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("hotpotqa", "trec"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row("1", all_classes=["because"])) + "\n")
    samples, _ = read_samples(tmp_path, None, 4096, tokenizer)
    found = [(each.task, each.metric, each.max_new_tokens, each.chat) for each in samples]
    assert found == [("hotpotqa", "qa_f1", 32, True), ("trec", "classification", 64, False)]
    assert samples[0].prompt.startswith("Answer the question based on the given passages. Only give me the answer")
    assert samples[0].prompt.endswith("\n\nQuestion: why?\nAnswer:") and samples[1].prompt.endswith("\nsome text\nwhy?")


@pytest.mark.parametrize(
    ("name", "entry", "chat", "metric"),
    [
        ("triviaqa", {}, False, "qa_f1_first_line"),
        ("mine", {"like": "samsum", "metric": "rouge_l"}, False, "rouge_l_first_line"),
        ("mine", {"longbench_task": "trec", "metric": "classification"}, False, "classification"),
        ("lcc", {"metric": "code_sim"}, False, "code_sim"),
        ("repobench-p", {"metric": "code_sim"}, False, "code_sim"),
        ("mine", {"like": "qmsum", "metric": "rouge_l"}, True, "rouge_l"),
        ("mine", {"like": None}, True, "qa_f1"),
        ("mine", {"metric": "answer string in prediction, or qa_f1"}, True, "answer_in_prediction"),
        ("mine", {"metric": "number after #### equal"}, True, "number_after_hashes"),
    ],
)
def test_conventions_of_longbench_tasks(
    tmp_path: Path, tokenizer: Any, name: str, entry: dict[str, Any], chat: bool, metric: str
) -> None:
    write(tmp_path, {name: {**QA, **entry}}, **{name: [row("1", all_classes=["because", "x"])]})
    sample = one(tmp_path, tokenizer)
    assert (sample.chat, sample.metric) == (chat, metric)
    assert sample.classes == (("because", "x") if metric == "classification" else ())


def test_length_is_the_bucket_of_the_rendered_prompt(tmp_path: Path, tokenizer: Any) -> None:
    # The template and the question have 4 words, the chat template 3.
    around = 4 + 3
    contexts = [" ".join(["w"] * (tokens - around)) for tokens in (512, 513, 1024, 1025)]
    write(tmp_path, {"a": QA}, a=[row(str(number), text) for number, text in enumerate(contexts)])
    samples, too_long = read_samples(tmp_path, None, 1024, tokenizer)
    assert [(sample.id, sample.length) for sample in samples] == [("0", 512), ("1", 1024), ("2", 1024)]
    assert too_long == {"a": 1}


def test_limit_takes_the_first_that_fit(tmp_path: Path, tokenizer: Any) -> None:
    long = "w " * 50
    rows = [row("1", long), row("2"), row("3", long), row("4"), row("5", long)]
    write(tmp_path, {"b": QA, "a": QA}, b=rows, a=rows)
    samples, too_long = read_samples(tmp_path, ["b", "a"], 40, tokenizer, limit=2)
    assert [(sample.task, sample.id) for sample in samples] == [("b", "2"), ("b", "4"), ("a", "2"), ("a", "4")]
    assert too_long == {"b": 2, "a": 2}


def test_ids_are_made_unique(tmp_path: Path, tokenizer: Any) -> None:
    nameless = {key: value for key, value in row("").items() if key != "_id"}
    write(tmp_path, {"a": QA}, a=[row("x"), row("x"), row("x-2"), nameless, row("x")])
    samples, _ = read_samples(tmp_path, None, 100, tokenizer)
    assert [sample.id for sample in samples] == ["x", "x-2", "x-2-2", "4", "x-3"]


def test_braces_in_a_field_stay_text(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, {"a": QA}, a=[row("1", "{input} {0} {context.__class__} {{")])
    assert one(tmp_path, tokenizer).prompt == "Read: {input} {0} {context.__class__} {{\nQ: why?\nA:"


def test_braces_that_name_no_field_stay_text(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, {"a": {**QA, "prompt": 'Like {"k": {}}: {context}'}}, a=[row("1")])
    assert one(tmp_path, tokenizer).prompt == 'Like {"k": {}}: some text'


def test_files_that_cannot_be_scored_are_left_out_with_a_reason(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = {"a": QA, "proc": {"layout": "longproc"}, "zh": {**QA, "metric": "own_f1"}}
    write(tmp_path, tasks, a=[row("1")], proc=[{}], zh=[{}], stray=[{}])
    with caplog.at_level(logging.WARNING):
        assert one(tmp_path, tokenizer).task == "a"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "proc is left out: layout 'longproc' is not supported" in said[0]
    assert "stray is left out: neither tasks.json nor LongBench has an entry" in said[1]
    assert "zh is left out: metric 'own_f1' is not supported" in said[2]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["nothing"], r"has no nothing\.jsonl; it has a, proc, stray"),
        (["../eval/a"], r"has no \.\./eval/a\.jsonl"),
        (["a", "proc"], "proc cannot be read: layout 'longproc' is not supported; supported layouts: longbench, ruler"),
        (["stray"], "stray cannot be read: neither tasks.json nor LongBench has an entry"),
    ],
)
def test_named_file_that_cannot_be_read(tmp_path: Path, tokenizer: Any, files: list[str], message: str) -> None:
    write(tmp_path, {"a": QA, "proc": {"layout": "longproc"}}, a=[row("1")], proc=[{}], stray=[{}])
    refused(tmp_path, files, tokenizer, message)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**QA, "metric": "bleu"}, "metric 'bleu' is not supported; .*metrics: qa_f1, .*'value in prediction'"),
        ({**QA, "prompt": "{context.__class__}"}, r"a: prompt has the unknown field {context.__class__}"),
        ({**QA, "prompt": "{context} {question}"}, r"unknown field {question}; known: {context} and {input}"),
        ({**QA, "prompt": "no field"}, r"prompt must hold {context} and {input}"),
        ({**QA, "prompt": None}, "prompt must be a text"),
        ({**QA, "max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({**QA, "max_new_tokens": "32"}, "max_new_tokens must be a whole number"),
        ({**QA, "max_new_tokens": {"a": 32}}, "max_new_tokens must be a whole number"),
        ({**NEEDLES, "prompt": "{answer_prefix}{input}"}, r"must hold {input} and end with {answer_prefix}"),
        ({**NEEDLES, "prompt": "{input}"}, r"must hold {input} and end with {answer_prefix}"),
    ],
)
def test_bad_entry_of_tasks_json(tmp_path: Path, tokenizer: Any, entry: dict[str, Any], message: str) -> None:
    write(tmp_path, {"a": entry}, a=[row("1")])
    refused(tmp_path, ["a"], tokenizer, message)


@pytest.mark.parametrize(
    ("entry", "bad", "message"),
    [
        (QA, {"input": "q", "context": "c"}, r"a\.jsonl:3: field 'answers' must be .* but it is missing"),
        (QA, row("1", answers=[]), r"a\.jsonl:3: field 'answers' must be a list of texts .* got '\[\]'"),
        (QA, row("1", answers="because"), r"a\.jsonl:3: field 'answers' must be a list"),
        (QA, {**row("1"), "context": None}, r"a\.jsonl:3: field 'context' must be a text"),
        ({**QA, "metric": "classification"}, row("1"), r"a\.jsonl:3: field 'all_classes' must be a list"),
        (NEEDLES, row("1"), r"a\.jsonl:3: field 'outputs' must be .* but it is missing"),
        (NEEDLES, needle("qa_1", 0, answer_prefix=None), r"a\.jsonl:3: field 'answer_prefix' must be a text"),
        (NEEDLES, needle("niah_single_1", 0, outputs=[7]), r"a\.jsonl:3: field 'outputs' must be a list of texts"),
        (NEEDLES, needle("vt", 0), r"a\.jsonl:3: RULER task 'vt' is not of the families .*: niah, qa"),
    ],
)
def test_bad_row_is_named_by_its_line(
    tmp_path: Path, tokenizer: Any, entry: dict[str, Any], bad: dict[str, Any], message: str
) -> None:
    good = needle("qa_1", 0) if entry is NEEDLES else row("0", all_classes=["x"])
    write(tmp_path, {"a": entry})
    (tmp_path / "a.jsonl").write_text(json.dumps(good) + "\n\n" + json.dumps(bad) + "\n")
    refused(tmp_path, ["a"], tokenizer, message)


def test_truncated_line(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, {"a": QA}, a=[row("1"), row("2")])
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text()[:-20])
    refused(tmp_path, ["a"], tokenizer, r"a\.jsonl:2: not valid JSON")


def test_missing_folder_and_files(tmp_path: Path, tokenizer: Any) -> None:
    refused(tmp_path / "nowhere", None, tokenizer, "nowhere: no such folder")
    folder = tmp_path / "eval"
    folder.mkdir()
    refused(folder, None, tokenizer, r"holds no \.jsonl file")
    (folder / "a.jsonl").write_text(json.dumps(row("1")))
    refused(folder, None, tokenizer, r"no tasks\.json in it or beside it")
    (folder / "tasks.json").write_text("[]")
    refused(folder, None, tokenizer, r"tasks\.json: expected an object")
    (folder / "tasks.json").write_text('{"a": {"layout": "longproc"}}')
    refused(folder, None, tokenizer, "none of a can be read")


@pytest.mark.parametrize(("max_tokens", "limit", "message"), [(0, None, "max_tokens=0"), (9, 0, "limit=0")])
def test_numbers_below_one(tmp_path: Path, tokenizer: Any, max_tokens: int, limit: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_samples(tmp_path, None, max_tokens, tokenizer, limit)


def test_many_equal_ids_take_linear_time(tmp_path: Path, tokenizer: Any) -> None:
    """12,000 took 103 s when each id was searched for from 2 on."""
    write(tmp_path, {"a": QA}, a=[row("x")] * 12_000)
    start = time.process_time()
    samples, _ = read_samples(tmp_path, None, 100, tokenizer)
    assert samples[-1].id == "x-12000" and len({sample.id for sample in samples}) == 12_000
    assert time.process_time() - start < 40


def test_references_that_the_metric_cannot_use_are_named_by_their_line(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path, {"a": {**QA, "metric": "wanted_length"}}, a=[row("1", answers=["7"]), row("2", answers=["long"])])
    refused(tmp_path, None, tokenizer, r"a\.jsonl:2: .*'wanted_length' does not fit its references")
