"""LongBench by name: prompts, truncation, protocols, files and the archive of the Hub."""

import json
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keepsight.eval.tasks import longbench
from keepsight.eval.tasks.benchmark import PROTOCOLS, REFERENCE, TaskRequest, protocol_named
from keepsight.eval.tasks.longbench import LongBench, LongBenchV2, longbench_tasks, without_middle
from keepsight.eval.tasks.metrics import METRICS, score
from keepsight.eval.tasks.registry import Benchmarks, make_all, tasks_of
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.files import write_json, write_lines
from tests.refused import refused

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROW = {"input": "Who?", "context": "Ada did it.", "answers": ["Ada"], "length": 4500, "_id": "x", "all_classes": None}


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """One token a byte."""
    vocabulary = {letter: token for token, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE)


def request_of(tokenizer: Any, protocol: str = "reference", **changes: Any) -> TaskRequest:
    return TaskRequest(
        **{"tokenizer": tokenizer, "context": 4000, "samples": 0, "protocol": PROTOCOLS[protocol], **changes}
    )


def sample_of(task: str, tokenizer: Any, folder: Path, protocol: str = "reference", **row: Any) -> RenderedSample:
    write_lines(folder / f"{task}.jsonl", [{**ROW, **row}])
    (sample,) = LongBench(str(folder)).samples(task, request_of(tokenizer, protocol))
    return sample


def text_of(sample: RenderedSample, tokenizer: Any) -> str:
    return tokenizer.decode(sample.prompt_ids)


def test_the_table_is_the_benchmarks() -> None:
    tasks = longbench_tasks()
    by_tokens = Counter(task.tokens for task in tasks.values())
    assert by_tokens == {32: 7, 64: 6, 128: 4, 512: 4}
    assert tasks["samsum"].tokens == 128
    for task in tasks.values():
        assert task.metric in METRICS
        assert task.before.count("{context}") == 1
    groups = LongBench().groups(REFERENCE)
    assert len(groups[""]) == 16
    assert len(groups["e"]) == 13
    groups_of_draft_based = LongBench().groups(PROTOCOLS["draft-based"])
    assert len(groups_of_draft_based[""]) == 14
    first_line = {name for name, task in tasks.items() if task.metric.endswith("first_line")}
    assert first_line == {"triviaqa", "samsum"}  # classification always scores the first line


def test_a_prompt(tmp_path: Path, letters: Any) -> None:
    sample = sample_of("multifieldqa_en", letters, tmp_path)
    prompt = (
        "Read the following text and answer briefly.\n\nAda did it.\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: Who?\nAnswer:"
    )
    assert sample.prompt == prompt
    assert text_of(sample, letters) == f"<user>{prompt}<end><assistant>"
    assert sample.question == "Question: Who?\nAnswer:"
    assert sample.task == "longbench_multifieldqa_en"
    assert sample.id == "x"
    assert sample.max_new_tokens == 64
    assert score(sample, "Ada") == 1.0


def test_few_shot_and_code_prompts_go_without_the_template(tmp_path: Path, letters: Any) -> None:
    sample = sample_of("trec", letters, tmp_path, input="Question: Who?\nType:", all_classes=["Person", "Place"])
    assert text_of(sample, letters).endswith("examples of questions.\n\nAda did it.\nQuestion: Who?\nType:")
    assert sample.question == "Question: Who?\nType:"
    assert sample.classes == ("Person", "Place")
    sample = sample_of("repobench-p", letters, tmp_path, input="x = 1\n")
    assert text_of(sample, letters) == "Please complete the code given below. \nAda did it.x = 1\nNext line of code:\n"


def test_protocols(tmp_path: Path, letters: Any) -> None:
    press = sample_of("qasper", letters, tmp_path, "kvpress")
    assert (press.answer_prefix, press.max_new_tokens) == ("Answer:", 148)
    assert text_of(press, letters).endswith("Question: Who?\n\n<end><assistant>Answer:")
    press = sample_of("trec", letters, tmp_path, "kvpress", input="Question: Who?\nType:", all_classes=["Ada"])
    assert text_of(press, letters).endswith("Question: Who?\n<end><assistant>Type:")
    assert score(press, " \n Ada\nQuestion") == 1.0
    draft = sample_of("qasper", letters, tmp_path, "draft-based")
    assert text_of(draft, letters).startswith("<system>A chat between a curious human")
    assert score(draft, "Answer: Bob. The answer is: Ada") == 1.0
    assert score(sample_of("qasper", letters, tmp_path), "Answer: Bob. The answer is: Ada") < 0.5
    write_lines(tmp_path / "lcc.jsonl", [{**ROW, "_id": name} for name in "abcde"])
    drawn = LongBench(str(tmp_path)).samples("lcc", request_of(letters, "draft-based", samples=2))
    drawn_ids = [sample.id for sample in drawn]
    shuffled = list(Dataset.from_dict({"name": list("abcde")}).shuffle(seed=42)["name"])
    assert drawn_ids == shuffled[:2]
    assert drawn_ids != ["a", "b"]
    letters.name_or_path = "meta-llama/Llama-3.1-8B-Instruct"
    factory = sample_of("qasper", letters, tmp_path, "kvcache-factory")
    letters.name_or_path = ""
    assert factory.length == 7500
    assert factory.chat
    with refused("protocol", "unknown"):
        protocol_named("mine")


@pytest.mark.parametrize(
    ("protocol", "model", "chat", "few_shot"),
    [
        ("reference", "org/any", True, False),
        ("kvcache-factory", "mistralai/Mistral-7B-Instruct-v0.2", False, False),
        ("draft-based", "Qwen/Qwen3-8B", True, True),
    ],
)
def test_who_applies_the_chat_template(
    tmp_path: Path, letters: Any, monkeypatch: pytest.MonkeyPatch, protocol: str, model: str, chat: bool, few_shot: bool
) -> None:
    monkeypatch.setattr(letters, "name_or_path", model)
    assert sample_of("qasper", letters, tmp_path, protocol).chat == chat
    assert sample_of("triviaqa", letters, tmp_path, protocol).chat == few_shot


def test_the_middle_is_cut(tmp_path: Path, letters: Any) -> None:
    assert without_middle("0123456789", 10, letters) == "0123456789"
    assert without_middle("0123456789", 9, letters) == "01236789"
    long = "a" * 3000 + "b" * 3000
    sample = sample_of("qasper", letters, tmp_path, context=long)
    limit = 4000 - 128 - 64
    assert sample.length == limit
    assert len(sample.prompt) == limit
    assert sample.prompt.startswith("You are given a scientific")
    assert sample.prompt.endswith("Who?\n\nAnswer:")
    assert sample.question == "Question: Who?\n\nAnswer:"
    assert len(sample.prompt_ids) == limit + len("<user><end><assistant>")
    (sample,) = LongBench(str(tmp_path), max_tokens=40).samples("qasper", request_of(letters))
    assert len(sample.prompt) == 40
    assert sample.question == ""  # it lost its beginning
    assert sample.is_cut
    assert not sample_of("qasper", letters, tmp_path).is_cut


def test_without_truncation_long_prompts_are_left_out(tmp_path: Path, letters: Any) -> None:
    write_lines(tmp_path / "lcc.jsonl", [{**ROW, "context": "x" * 5000}, ROW])
    request = request_of(letters, "draft-based")
    assert len(LongBench(str(tmp_path)).samples("lcc", request)) == 1
    assert request.notes == {"longbench lcc": "1 samples do not fit the context of 4000 tokens"}


def test_longbench_e_by_length(tmp_path: Path, letters: Any) -> None:
    rows = [json.dumps({**ROW, "length": words}) for words in (3999, 4000, 7999, 8000)]
    (tmp_path / "lcc_e.jsonl").write_text("\n".join([*rows, rows[0].replace("3999", "1e999")]))
    request = request_of(letters)
    samples = LongBench(str(tmp_path)).samples("e_lcc", request)
    assert "lcc_e.jsonl:5: not in the benchmark's own layout (OverflowError" in request.notes["longbench e_lcc"]
    assert [sample.id for sample in samples] == ["x", "x-2", "x-3", "x-4"]
    assert [sample.length for sample in samples] == [4000, 8000, 8000, 16000]
    for sample in samples:
        assert sample.task == "longbench_e_lcc"
        assert not sample.chat


def test_a_folder_with_some_of_the_files(tmp_path: Path, letters: Any) -> None:
    for task in ("lcc", "hotpotqa", "dureader"):
        write_lines(tmp_path / f"{task}.jsonl", [ROW] * 3)
    benchmarks = Benchmarks(longbench=LongBench(str(tmp_path)))
    samples = make_all(benchmarks, ["longbench"], request_of(letters, samples=2))
    assert [sample.task for sample in samples] == ["longbench_hotpotqa"] * 2 + ["longbench_lcc"] * 2
    assert [task for _, task in tasks_of(benchmarks, "longbench_zh", REFERENCE)] == ["dureader"]
    with refused("tasks", "missing"):
        tasks_of(benchmarks, "longbench_e", REFERENCE)
    with refused("trec.jsonl", "missing"):
        make_all(benchmarks, ["longbench_trec"], request_of(letters))
    with refused("tasks", "unknown"):
        tasks_of(benchmarks, "longbench_nothing", REFERENCE)
    with refused("tasks", "unknown"):
        tasks_of(benchmarks, "nothing", REFERENCE)


def test_chinese_tasks_need_jieba_before_anything_is_answered(
    tmp_path: Path, letters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample_of("dureader", letters, tmp_path).metric == "rouge_l_zh"
    monkeypatch.setitem(sys.modules, "jieba", None)
    with refused("jieba", "missing"):
        LongBench(str(tmp_path)).samples("dureader", request_of(letters))


def test_the_archive_of_the_hub(tmp_path: Path, letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("data/qasper.jsonl", json.dumps(ROW) + "\n" + json.dumps({**ROW, "answers": 3}) + "\n")
    monkeypatch.setattr(longbench, "hub_file", lambda name, file, instead: archive)
    (sample,) = LongBench().samples("qasper", request_of(letters, samples=1))
    assert sample.references == ("Ada",)
    with refused("answers", "type"):
        LongBench().samples("qasper", request_of(letters, skip=0))
    request = request_of(letters)
    assert len(LongBench().samples("qasper", request)) == 1
    assert len(request.skipped) == 1
    assert "1 rows were skipped, such as " in request.notes["longbench qasper"]


def test_no_hub_and_no_folder(letters: Any, no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names, **options: None)
    with refused("data.zip", "service"):
        LongBench().samples("qasper", request_of(letters))


@pytest.mark.parametrize("name", ["data.json", "rows.jsonl"])
def test_longbench_v2(tmp_path: Path, letters: Any, name: str) -> None:
    row = {"_id": "7", "length": "short", "question": " Who? ", "context": "Ada did it.", "answer": "B"}
    row |= {f"choice_{letter}": f"It is {letter}." for letter in "ABCD"}
    rows = [row, {**row, "length": "long", "context": "x" * 5000}]
    write = write_json if name == "data.json" else write_lines
    write(tmp_path / name, rows)
    request = request_of(letters)
    benchmarks = Benchmarks(longbench_v2=LongBenchV2(str(tmp_path / name)))
    short, long = make_all(benchmarks, ["longbench_v2"], request)
    assert short.task == "longbench_v2_short"
    assert long.task == "longbench_v2_long"
    assert short.prompt.startswith("Please read the following text and answer the question below.\n\n<text>\nAda")
    assert short.prompt.endswith(
        "What is the correct answer to this question: Who?\nChoices:\n(A) It is A.\n(B) It is B.\n(C) It is C.\n"
        '(D) It is D.\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
    )
    assert short.context.endswith("</text>\n\n")
    assert len(long.prompt) == 4000 - 128 - 64
    assert long.is_cut
    assert not short.is_cut
    assert score(short, "The correct answer is (B)") == 1.0
    assert score(short, "The correct answer is (C)") == 0.0
    with_bad_row = tmp_path / f"bad_{name}"
    write(with_bad_row, [row, {**row, "choice_A": None}])
    request = request_of(letters)
    assert len(LongBenchV2(str(with_bad_row)).samples("short", request)) == 1
    assert len(request.skipped) == 1
