"""MT-Bench and LongBench-Write from their own files; and how a prompt comes apart at its question."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import Code
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.judged import LongWriter, MtBench
from keepsight.eval.tasks.registry import Benchmarks, make_all
from keepsight.eval.tasks.samples import RenderedSample, Sample, render, render_apart
from keepsight.files import write_lines
from tests.refused import refused
from tests.tiny import tiny_tokenizer

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write .", "Rewrite ."]},
    {"question_id": 111, "category": "math", "turns": ["Add .", "Now subtract ."], "reference": ["3", "1"]},
    {"question_id": 121, "category": "coding", "turns": ["Code .", "Test ."]},
]
ANSWERS = [{"question_id": 121, "choices": [{"turns": ["def", "assert"]}]}]
WRITING = [
    {"id": 0, "prompt": "Write 100 words .", "type": "News", "length": 100},
    {"id": 2, "prompt": "Write much .", "type": "News", "length": 20000},
]


def samples_and_notes(
    words: Any, benchmarks: Benchmarks, task: str, **changes: Any
) -> tuple[list[RenderedSample], dict[str, str]]:
    options: dict[str, Any] = {"context": 4096, "samples": 0, "judge": "gpt-4 single"} | changes
    request = TaskRequest(words, **options)
    return make_all(benchmarks, [task], request), request.notes


def samples_of(words: Any, benchmarks: Benchmarks, task: str, **changes: Any) -> list[RenderedSample]:
    samples, _ = samples_and_notes(words, benchmarks, task, **changes)
    return samples


@pytest.fixture
def mt_bench(tmp_path: Path) -> Benchmarks:
    write_lines(tmp_path / "question.jsonl", QUESTIONS)
    write_lines(tmp_path / "gpt-4.jsonl", ANSWERS)
    return Benchmarks(mt_bench=MtBench(str(tmp_path / "question.jsonl"), str(tmp_path / "gpt-4.jsonl")))


def test_a_question_is_two_turns(words: Any, mt_bench: Benchmarks) -> None:
    samples, notes = samples_and_notes(words, mt_bench, "mt_bench")
    assert [sample.task for sample in samples] == ["mt_bench_turn_1", "mt_bench_turn_2"] * 3
    assert [sample.id for sample in samples] == ["81", "81", "111", "111", "121", "121"]
    assert [sample.references for sample in samples[::2]] == [(), ("3", "1"), ("def", "assert")]
    assert not notes
    first, second = samples[:2]
    assert (first.prompt, first.earlier) == ("Write .", ())
    assert (second.prompt, second.earlier) == ("Rewrite .", ("Write .",))
    for sample in samples:
        assert sample.max_new_tokens == 1024
        assert sample.judge == "gpt-4 single"
    assert len(first.question_ids) == 0
    assert len(second.question_ids) > 0


def test_questions_without_room_or_references_are_noted(words: Any, mt_bench: Benchmarks) -> None:
    mt_bench.mt_bench.references = None
    samples, notes = samples_and_notes(words, mt_bench, "mt_bench")
    assert [bool(sample.references) for sample in samples[::2]] == [False, True, False]
    assert notes["mt_bench references"].startswith("1 questions of math, reasoning, coding lack reference answers")
    samples, notes = samples_and_notes(words, mt_bench, "mt_bench", context=2059)
    assert {sample.id for sample in samples} == {"81", "121"}
    assert notes["mt_bench"] == "1 samples do not fit the context of 2059 tokens"
    of_one_question = samples_of(words, mt_bench, "mt_bench", samples=1)
    assert [sample.id for sample in of_one_question] == ["81", "81"]


def test_writing_is_judged_or_counted(words: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "write.jsonl", WRITING)
    benchmarks = Benchmarks(longwriter=LongWriter(str(tmp_path / "write.jsonl")))
    judged, _ = samples_of(words, benchmarks, "longwriter")
    assert (judged.metric, judged.judge, judged.references) == ("longbench-write", "gpt-4 single", ())
    counted, longer = samples_of(words, benchmarks, "longwriter_length")
    assert (counted.metric, counted.judge, counted.references) == ("wanted_length", "", ("100",))
    assert longer.references == ("20000",)
    assert longer.max_new_tokens == 4096 - len(longer.prompt_ids)
    in_large_context, _ = samples_of(words, benchmarks, "longwriter", context=99999)
    assert in_large_context.max_new_tokens == 32768
    benchmarks.longwriter.max_new_tokens = 64
    limited, _ = samples_of(words, benchmarks, "longwriter_length", judge="")
    assert limited.max_new_tokens == 64


def test_what_is_missing_is_named(words: Any, mt_bench: Benchmarks, tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "length.jsonl").write_text('{"prompt": "Write.", "length": 1e999}\n')
    cases: list[tuple[Benchmarks, str, str, str, Code]] = [
        (mt_bench, "mt_bench", "", "judge.url", "missing"),
        (Benchmarks(), "mt_bench", "j", "mt_bench.file", "service"),
        (Benchmarks(), "longwriter", "j", "longwriter.file", "missing"),
        (Benchmarks(longwriter=LongWriter(str(tmp_path / "length.jsonl"))), "longwriter_length", "", "length", "type"),
        (Benchmarks(longwriter=LongWriter(str(tmp_path / "gpt-4.jsonl"))), "longwriter", "", "judge.url", "missing"),
    ]
    for benchmarks, task, judge, field, code in cases:
        with refused(field, code):
            samples_of(words, benchmarks, task, judge=judge)
    for choices in ([], [None], "n/a"):
        write_lines(tmp_path / "gpt-4.jsonl", [{"question_id": 1, "choices": choices}])
        with refused("question_id", "missing"):
            samples_of(words, mt_bench, "mt_bench")
    write_lines(tmp_path / "gpt-4.jsonl", [{"question_id": 1, "choices": [{"turns": None}]}])
    with refused("turns", "type"):
        samples_of(words, mt_bench, "mt_bench")


CONTEXT = "Who is it? The fox said: who is it? It is the fox, said the bear."
QUESTION = "\n\nWho is it?"
SAMPLE = Sample(
    "one", "test", 64, CONTEXT + QUESTION, ("fox",), "qa_f1", 8, answer_prefix="Who is it?", question=QUESTION
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def apart(sample: Sample, tokenizer: Any) -> RenderedSample:
    return render_apart(render(sample, tokenizer), tokenizer)


def texts(sample: Sample, tokenizer: Any) -> tuple[str, str]:
    """The text before the question and from there on, which are the prompt."""
    unsplit = render(sample, tokenizer)
    assert len(unsplit.question_ids) == 0
    split = apart(sample, tokenizer)
    rejoined = [*split.prompt_ids, *split.question_ids]
    assert tokenizer.decode(rejoined) == tokenizer.decode(unsplit.prompt_ids)
    return tokenizer.decode(split.prompt_ids), tokenizer.decode(split.question_ids)


def test_with_a_chat_template(tokenizer: Any) -> None:
    before, after = texts(SAMPLE, tokenizer)
    assert before == f"<|user|>{CONTEXT}"
    assert after == f"{QUESTION}<|end|><|assistant|>Who is it?"


def test_without_a_chat_template(tokenizer: Any) -> None:
    assert texts(replace(SAMPLE, chat=False), tokenizer) == (CONTEXT, f"{QUESTION}Who is it?")


def test_white_space_goes_with_the_question(tokenizer: Any) -> None:
    spaced = replace(SAMPLE, prompt=f"  {CONTEXT} \n {QUESTION}\n ", question=f"{QUESTION}\n ", answer_prefix=" It is")
    for chat in (True, False):
        before, after = texts(replace(spaced, chat=chat), tokenizer)
        assert before.endswith(f"  {CONTEXT}")
        assert after.startswith(f" \n {QUESTION}\n ")


def test_a_template_that_strips_and_one_that_repeats_words_of_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content | trim }}\nWho is it? Now answer:"
    spaced = replace(SAMPLE, prompt=f" {CONTEXT}{QUESTION}\n", question=f"{QUESTION}\n")
    before, after = texts(spaced, tokenizer)
    assert before == CONTEXT
    assert after == f"{QUESTION}\nWho is it? Now answer:Who is it?"


@pytest.mark.parametrize(
    "sample",
    [
        replace(SAMPLE, question=""),
        replace(SAMPLE, question="\n "),
        replace(SAMPLE, prompt=QUESTION),
        replace(SAMPLE, prompt=f" {QUESTION}", chat=False),
    ],
)
def test_a_question_that_cannot_be_told_apart(sample: Sample, tokenizer: Any) -> None:
    with refused("question", "missing"):
        apart(sample, tokenizer)
