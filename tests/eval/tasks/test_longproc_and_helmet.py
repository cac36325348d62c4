"""LongProc and HELMET from files in their own layouts."""

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepsight.eval.tasks import longproc
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.helmet import Helmet, _demonstrations, _first_tokens
from keepsight.eval.tasks.longproc import LongProc
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.registry import Benchmarks, make_all
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.files import write_lines
from tests.refused import refused


def request_of(tokenizer: Any, **changes: Any) -> TaskRequest:
    return TaskRequest(**{"tokenizer": tokenizer, "context": 9000, "samples": 0, "lengths": [4096], **changes})


def test_longproc(tmp_path: Path, words: Any) -> None:
    numbers = {"nums": [2, 3, 4, 1], "target": 10}
    rows = [
        {"task": "countdown_0.5k", "input_prompt": "Count.", "item": numbers, "id": "a"},
        {"task": "tom_tracking_2k", "prompt": "Where?", "reference_output": "- Step 0: hall", "item": {}},
        {"task": "tom_tracking_2k", "prompt": "x " * 7000, "reference_output": "- Step 0: hall", "item": {}},
        {"task": "pseudo_to_code_2k", "prompt": "Write.", "reference_output": "int main", "item": {}},
    ]
    write_lines(tmp_path / "rows.jsonl", rows)
    request = request_of(words)
    benchmarks = Benchmarks(longproc=LongProc(str(tmp_path)))
    tom, countdown = make_all(benchmarks, ["longproc"], request)
    assert countdown.task == "longproc_countdown_0.5k"
    assert countdown.id == "a"
    assert countdown.max_new_tokens == 1024
    assert score(countdown, "<Solution>2 + 3 = 5\n5 + 4 = 9\n9 + 1 = 10</Solution>") == 1.0
    assert (tom.prompt, tom.length, tom.max_new_tokens) == ("Where?", 512, 3072)
    assert request.notes["longproc tom_tracking_2k"] == "1 samples do not fit the context of 9000 tokens"
    trip = {"ground_truth_cities": "Oslo**Rome", "ground_truth_durations": "4**3"}
    plan = "<Plan>\nDay 1-4: Oslo\nDay 4: Fly from Oslo to Rome.\nDay 4-6: Rome\n</Plan>"
    travel = {"task": "travel_planning_2k", "input_prompt": "Plan.", "reference_output": plan, "item": trip}
    write_lines(tmp_path / "travel.jsonl", [travel])
    (sample,) = make_all(benchmarks, ["longproc_travel_planning_2k"], request)
    assert sample.references == ("Oslo 4, Rome 3",)
    assert score(sample, plan) == 1.0
    write_lines(tmp_path / "travel.jsonl", [{**travel, "item": {"ground_truth_cities": "Oslo**Rome"}}])
    with refused("item", "type"):
        make_all(benchmarks, ["longproc_travel_planning_2k"], request)
    with refused("longproc.dir", "missing"):
        make_all(Benchmarks(), ["longproc"], request)
    for item in ({"nums": "2"}, {"nums": [2, 7.9], "target": 3}, {"nums": [2, True], "target": 3}, None):
        write_lines(tmp_path / "rows.jsonl", [{**rows[0], "item": item}])
        with refused("item", "type"):
            make_all(benchmarks, ["longproc_countdown_0.5k"], request)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """One program with two test cases, and one whose test cases cannot be read."""
    cases = [[["2 3"], ["5"]], [["10 -4"], ["6"]]]
    row = {"task": "pseudo_to_code_2k", "prompt": "Add.", "reference_output": "", "item": {"testcases": cases}}
    bad_row = {**row, "item": {"testcases": [[["2"], [5]]]}}
    write_lines(tmp_path / "rows.jsonl", [row, bad_row])
    return tmp_path


def test_programs_are_run_only_where_that_is_allowed(programs: Path, words: Any) -> None:
    request = request_of(words)
    with refused("longproc.run_programs", "conflict"):
        make_all(Benchmarks(longproc=LongProc(str(programs))), ["longproc_pseudo_to_code_2k"], request)
    assert LongProc(str(programs)).groups(request.protocol)[""] == []


@pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="the programs that are judged are compiled with g++, which is not installed; .ci/run installs it",
)
def test_programs_are_judged_by_what_they_print(programs: Path, words: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(longproc, "_SECONDS", 0.5)
    request = request_of(words)
    (sample,) = make_all(Benchmarks(longproc=LongProc(str(programs), run_programs=True)), ["longproc"], request)
    assert "item' must hold testcases" in request.skipped[0]
    program = "```c++\nint main() {{ int a, b; cin >> a >> b; cout << a {} b << endl; }}\n```"
    assert score(sample, program.format("+")) == 1.0
    assert score(sample, program.format("-")) == 0.0
    assert score(sample, program.format("+ c")) == 0.0
    assert score(sample, "no program") == 0.0
    assert score(sample, "```cpp\nint main(){for(;;);}```") == 0.0


def write_rows(folder: Path, path: str, rows: list[dict[str, Any]]) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    write_lines(folder / path, rows)


def samples_of(folder: Path, task: str, tokenizer: Any, **changes: Any) -> list[RenderedSample]:
    return make_all(Benchmarks(helmet=Helmet(str(folder))), [task], request_of(tokenizer, **changes))


def test_recall(tmp_path: Path, words: Any) -> None:
    row = {"type_needle_v": "numbers", "context": "hay", "query": "a-b", "answer": ["1", "2"], "index": 5}
    write_rows(tmp_path, "ruler/niah_multivalue/validation_4096.jsonl", [row])
    (sample,) = samples_of(tmp_path, "helmet_recall_niah_mv", words)
    assert sample.prompt == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\nhay\nWhat are all the special magic numbers for a-b mentioned in the provided "
        "text?\nThe special magic numbers for a-b mentioned in the provided text are"
    )
    assert not sample.chat
    assert sample.length == 4096
    assert sample.max_new_tokens == 50
    assert score(sample, "1") == 0.5
    assert sample.context.endswith("hay")
    pair = {"context": "{}", "question": "k", "answer": "v-1", "demos": [["a", "b"], ["c", "d"], ["e", "f"]]}
    write_rows(tmp_path, "json_kv/test_k50_dep6.jsonl", [pair])
    (sample,) = samples_of(tmp_path, "helmet_recall_json_kv", words)
    assert sample.prompt == (
        "{}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\nKey: a\nCorresponding "
        "value: b\n\nKey: c\nCorresponding value: d\n\nKey: k\nCorresponding value:"
    )
    assert score(sample, "It is\nv1.") == 1.0


def test_rag(tmp_path: Path, words: Any) -> None:
    def row(question: str, answer: str) -> dict[str, Any]:
        return {"question": question, "answers": [answer], "ctxs": [{"title": "T", "text": f"text of {question}"}]}

    write_rows(tmp_path, "kilt/nq-dev-multikilt_1000_k20_dep6.jsonl", [row("q", "ab"), row("r", "x")])
    write_rows(tmp_path, "kilt/nq-train-multikilt_1000_k3_dep6.jsonl", [row(name, name * 2) for name in "qsttuu"])
    first, second = samples_of(tmp_path, "helmet_rag_nq", words)
    start = "Use the given documents to write a concise and short answer to the question. Write your answer in the"
    assert first.prompt.startswith(start + " following format:\nAnswer: [answer]\n\nDocument (Title: T): text of ")
    assert first.prompt.endswith("\n\nDocument (Title: T): text of q\n\nQuestion: q\nAnswer:")
    questions = re.findall("^Question: (.*)$", first.prompt, re.MULTILINE)
    assert len(questions) == len(set(questions)) == 3
    assert questions[-1] == "q"
    drawn_again, _ = samples_of(tmp_path, "helmet_rag_nq", words)
    assert drawn_again.prompt == first.prompt
    assert score(second, "Answer: X") == 1.0
    assert second.max_new_tokens == 20


def test_rerank(tmp_path: Path, words: Any) -> None:
    def row(query: str, labels: dict[str, int]) -> dict[str, Any]:
        passages = [{"id": key, "label": label, "text": f"text {key}"} for key, label in labels.items()]
        return {"qid": query, "query": query, "ctxs": passages}

    write_rows(tmp_path, "msmarco/test_reranking_data_k50_dep3.jsonl", [row("q", {"7": 0, "12": 3, "5": 1})])
    write_rows(tmp_path, "msmarco/test_reranking_data_k10_dep3.jsonl", [row(name, {"1": 1, "2": 3}) for name in "rqs"])
    (sample,) = samples_of(tmp_path, "helmet_rerank", words, lengths=[8192])
    demonstrations, question = sample.prompt.split("[ID: 7]")
    assert demonstrations.count("[ID: 1] Document: text 1\n\n[ID: 2] Document: text 2\n\nQuery: ") == 2
    assert demonstrations.count("\nRanking: 2 > 1\n\n") == 2
    assert "Query: q" not in demonstrations
    assert question == (
        " Document: text 7\n\n[ID: 12] Document: text 12\n\n[ID: 5] Document: text 5\n\nQuery: q\nRanking:"
    )
    best_gain = 3 + 1 / math.log2(3)
    gain_of_swapped = 1 + 3 / math.log2(3)
    assert score(sample, " 12 > 5 > 7") == pytest.approx(1)
    assert score(sample, "[ID: 5] > ID12\n12 > 5") == pytest.approx(gain_of_swapped / best_gain)
    assert score(sample, "9 > 7") == pytest.approx(0)
    assert score(sample, "") == pytest.approx(0)
    assert samples_of(tmp_path, "helmet_rerank", words) == []


def test_icl(tmp_path: Path, words: Any) -> None:
    train: list[dict[str, Any]] = []
    for label in range(5):
        train += [{"text": f"{label} {number}", "label": label} for number in range(60)]
    write_rows(tmp_path, "icl/trec_coarse/train.jsonl", train)
    write_rows(tmp_path, "icl/trec_coarse/test.jsonl", [{"text": "new", "label": 3}, {"text": "other", "label": 3}])
    first, second = samples_of(tmp_path, "helmet_icl_trec_coarse", words)
    _, demonstrations = first.context.split("nothing else. \n\n")
    label_and_name: list[tuple[str, str]] = []
    for demonstration in demonstrations.split("\n\n"):
        text, name = demonstration.split("\nlabel: ")
        label_and_name.append((text.split()[0], name))
    assert len(label_and_name) == 200
    assert Counter(label for label, _ in label_and_name) == dict.fromkeys("01234", 40)
    assert len(set(label_and_name)) == 5
    assert ("3", first.references[0]) in label_and_name
    assert first.prompt.endswith("\n\nnew\nlabel:")
    assert first.question == "\n\nnew\nlabel:"
    assert 'Only output "label: {label}" and nothing' in first.prompt
    assert first.references != second.references  # labels are drawn anew
    assert score(first, f" {first.references[0]}\n") == 1.0


@pytest.mark.parametrize(
    ("file", "task", "changes"),
    [
        ("ruler/niah_multivalue/validation_4096.jsonl", "recall_niah_mv", {"answer": None}),
        ("ruler/niah_multivalue/validation_4096.jsonl", "recall_niah_mv", {"answer": [["1"], 2]}),
        ("json_kv/test_k50_dep6.jsonl", "recall_json_kv", {"demos": [None]}),
        ("kilt/nq-dev-multikilt_1000_k20_dep6.jsonl", "rag_nq", {"ctxs": None}),
        ("kilt/nq-dev-multikilt_1000_k20_dep6.jsonl", "rag_nq", {"answers": {}}),
        ("icl/trec_coarse/test.jsonl", "icl_trec_coarse", {"label": None}),
    ],
)
def test_bad_rows_of_helmet_are_skipped(
    tmp_path: Path, words: Any, file: str, task: str, changes: dict[str, Any]
) -> None:
    good = {
        "type_needle_v": "n",
        "context": "{}",
        "query": "q",
        "question": "k",
        "text": "t",
        "label": 1,
        "answer": "v",
        "answers": ["v"],
        "ctxs": [{"title": "T", "text": "x"}],
        "demos": [],
    }
    write_rows(tmp_path, "kilt/nq-train-multikilt_1000_k3_dep6.jsonl", [])
    write_rows(tmp_path, "icl/trec_coarse/train.jsonl", [{"text": f"{label}", "label": label} for label in range(3)])
    write_rows(tmp_path, file, [good, good | changes])
    request = request_of(words)
    assert len(make_all(Benchmarks(helmet=Helmet(str(tmp_path))), [f"helmet_{task}"], request)) == 1
    assert f"{file}:2: not in the benchmark's own layout" in request.skipped[0]


def test_what_is_missing(tmp_path: Path, words: Any) -> None:
    with refused("helmet.dir", "missing"):
        make_all(Benchmarks(), ["helmet_rag"], request_of(words))
    with refused("nq-train-multikilt_1000_k3_dep6.jsonl", "missing"):
        samples_of(tmp_path, "helmet_rag", words)
    with refused("lengths", "unknown"):
        samples_of(tmp_path, "helmet", words, lengths=[1000])
    assert len(Helmet().groups(request_of(words).protocol)[""]) == 21
    write_rows(tmp_path, "icl/nlu/train.jsonl", [{"text": "t", "label": None}])
    with refused("train.jsonl", "data"):
        samples_of(tmp_path, "helmet_icl_nlu", words)


def test_questions_about_a_long_text_are_cut_and_show_two_others(tmp_path: Path, words: Any) -> None:
    rows = [{"context": f"story {n}", "question": f"Who {n}?", "answer": [f"Ada {n}"]} for n in range(3)]
    rows[0]["context"] = "word " * 9000
    write_rows(tmp_path, "longqa/infbench_qa.jsonl", rows)
    first, second, _ = samples_of(tmp_path, "helmet_longqa_infbench_qa", words, lengths=[8192])
    instruction, _, after_instruction = first.prompt.partition("For example:\n\n")
    assert instruction.endswith("using a single phrase if possible.\n\n")
    demonstrations, _, text = after_instruction.partition("\n\nNow, read the following story:\n\n")
    assert sorted(demonstrations.split("\n\n")) == [
        "[story text]\nQuestion: Who 1?\nAnswer: Ada 1",
        "[story text]\nQuestion: Who 2?\nAnswer: Ada 2",
    ]
    context, _, question = text.partition(" ... [the rest of the text is omitted]")
    assert context.count("word") == 7982 - 8
    assert question == "\n\nQuestion: Who 0?"
    assert first.question == question
    assert second.prompt.endswith("story 1\n\nQuestion: Who 1?")
    assert first.chat
    assert first.length == 8192
    assert first.max_new_tokens == 10
    assert score(first, "Ada 0") == pytest.approx(1)
    assert samples_of(tmp_path, "helmet_longqa_infbench_qa", words) == []  # HELMET has none at 4096


class SlowTokenizer:
    """A tokenizer of words that does not know where in a text its tokens end."""

    is_fast = False
    vocabulary = ("one", "two", "three", "four")

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.vocabulary.index(word) for word in text.split()]}

    def decode(self, ids: list[int], *, clean_up_tokenization_spaces: bool) -> str:
        return " ".join(self.vocabulary[token] for token in ids)


def test_a_text_is_cut_with_any_tokenizer(words: Any) -> None:
    assert _first_tokens(SlowTokenizer(), "one two three four", 2) == "one two"
    assert _first_tokens(words, "word word word", 2).count("word") == 2


def test_choices_are_lettered(tmp_path: Path, words: Any) -> None:
    row = {"context": "story", "question": "Who?", "options": ["Ada", "Bob", "Cy", "Di"]}
    write_rows(tmp_path, "longqa/infbench_choice.jsonl", [{**row, "answer": [name]} for name in ("Bob", "Di", "Ada")])
    sample, *_ = samples_of(tmp_path, "helmet_longqa_infbench_choice", words, lengths=[8192])
    assert sample.prompt.endswith("story\n\nQuestion: Who?\nOptions:\nA. Ada\nB. Bob\nC. Cy\nD. Di")
    assert "A. Ada\nB. Bob\nC. Cy\nD. Di\nAnswer: D" in sample.prompt
    assert sample.references == ("B", "B. Bob")
    for right in ("B", "b.", "Answer: B", "It is B. Bob, I think"):
        assert score(sample, right) == 1
    for wrong in ("Bob", "A or B"):
        assert score(sample, wrong) == 0


@pytest.mark.parametrize(
    ("task", "fields", "answer", "expected_score"),
    [
        ("asqa", {"qa_pairs": [{"short_answers": ["1999", "99"]}, {"short_answers": ["Rome"]}]}, "In Rome [1].", 0.5),
        ("qampari", {"answers": [["Ada", "A. L."], ["Bob"], ["Cy"]]}, "ada [1], Bob [2][3], Zed [4].", 2 / 3),
    ],
)
def test_citations_show_numbered_passages(
    tmp_path: Path, words: Any, task: str, fields: dict[str, Any], answer: str, expected_score: float
) -> None:
    docs = [{"title": f"T{n}", "text": f"text {n}"} for n in range(40)]
    (tmp_path / "data" / "alce").mkdir(parents=True)
    rows = [{"question": "Q?", "docs": docs, **fields}]
    (tmp_path / "data" / "alce" / f"{task}_eval_gtr_top2000.json").write_text(json.dumps(rows))
    prompts = {
        "instruction": "Cite.",
        "demo_prompt": "{instruction}|{question}|{context}|{answer}",
        "doc_prompt": "[{ID}](Title: {title}): {text}",
        "demos": [{"question": f"D{n}?", "answer": "A [1].", "docs": docs[:1]} for n in range(3)],
    }
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / f"{task}_revised.json").write_text(json.dumps(prompts))
    (sample,) = samples_of(tmp_path / "data", f"helmet_cite_{task}", words, lengths=[8192])
    assert sample.prompt.count("Cite.|D") == 2
    assert "|[1](Title: T0): text 0|A [1].\n\n\n" in sample.prompt
    assert "Cite.\n\nQuestion: Q?\n\n[1](Title: T0): text 0\n\n[2]" in sample.prompt
    assert sample.prompt.endswith("[30](Title: T29): text 29")
    assert sample.chat
    assert score(sample, answer) == pytest.approx(expected_score)


def test_summaries_and_answers_are_for_a_judge(tmp_path: Path, words: Any) -> None:
    rows = [{"context": f"papers {n}", "answer": f"Summary {n}", "keypoints": ["one", "two"]} for n in range(2)]
    write_rows(tmp_path, "summ/multi_lexsum.jsonl", rows)
    write_rows(tmp_path, "summ/multi_lexsum_train.jsonl", rows)
    sample, _ = samples_of(tmp_path, "helmet_summ_multi_lexsum", words, lengths=[8192], judge="gpt-4 single")
    assert sample.references == ("Summary 0", "one", "two")
    assert sample.judge == "gpt-4 single"
    assert sample.prompt.endswith("Legal documents:\npapers 0\n\nNow please summarize the case.")
    for task in ("summ_multi_lexsum", "longqa_narrativeqa"):
        with refused("judge.url", "missing"):
            samples_of(tmp_path, f"helmet_{task}", words, lengths=[8192])


def test_demonstrations_are_the_first_of_each_question_in_shuffled_order() -> None:
    """As HELMET's drop_duplicates keeps them: a later row of a question does not change the order of the others."""
    rows = [{"question": f"q{number % 5}", "number": number} for number in range(15)]
    for name_number in range(8):
        name = f"name {name_number}"
        seed = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2**31
        expected: list[dict[str, Any]] = []
        for index in np.random.default_rng(seed).permutation(15):
            if rows[index]["question"] not in [row["question"] for row in expected]:
                expected.append(rows[index])
        assert _demonstrations(name, "question", rows) == expected[:2]
    questions = [row["question"] for row in _demonstrations("q1", "question", rows)]
    assert "q1" not in questions
