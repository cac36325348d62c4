"""RULER: that each task asks for what its text holds, at the length asked for, by the protocol asked for."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import Code
from keepsight.eval.tasks import benchmark, ruler, ruler_texts
from keepsight.eval.tasks.benchmark import PROTOCOLS, TaskRequest
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.ruler import Ruler
from keepsight.eval.tasks.ruler_texts import (
    NEEDLES,
    OFFLINE,
    Question,
    common_words,
    essay_words,
    frequent_words,
    hotpotqa,
    needles,
    question_over,
    squad,
    variables,
)
from keepsight.eval.tasks.samples import RenderedSample, Sample, render_all
from keepsight.files import write_json, write_lines
from tests.refused import refused

ESSAY = ("Every", "good", "thing", "has", "its", "time.", "Whoever", "waits", "will", "see", "it", "come.")
HILLS = [
    {"question": "How many hills?", "answers": [{"text": "seven"}, {"text": "7"}]},
    {"question": "Who?", "answers": [], "is_impossible": True},
]
RIVER = [{"question": "Flows?", "answers": [{"text": "Tiber"}]}]
ROME = [{"context": "Rome lies on seven hills.", "qas": HILLS}, {"context": "The Tiber flows there.", "qas": RIVER}]
SQUAD = {"data": [{"title": "Rome", "paragraphs": ROME}]}
PO = [["Po", ["The Po", " ends."]], ["Alps", ["High."]], ["Adria", ["A town."]]]
HOTPOT = [
    {"question": "Which sea?", "answer": "Adriatic", "supporting_facts": [["Po", 0], ["Adria", 1]], "context": PO}
]


@pytest.fixture(autouse=True)
def fresh_sources(no_hub: None) -> Iterator[None]:
    yield
    for source in (essay_words, squad, hotpotqa):
        source.cache_clear()


def samples_of(task: str, tokenizer: Any, length: int = 3000, count: int = 3, **settings: Any) -> list[RenderedSample]:
    return Ruler(**settings).samples(task, TaskRequest(tokenizer, 1 << 20, [length], count))


@pytest.mark.parametrize("task", Ruler.TASKS)
def test_every_task_fills_its_length_and_can_be_solved(task: str, words: Any) -> None:
    kind, _, _ = task.partition("_")
    longest_answers = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
    answer_prefix = " The special magic " if kind == "niah" else " Answer:"
    metric = "string_match_part" if kind == "qa" else "string_match_all"
    for length in (2500, 5000):
        samples = samples_of(task, words, length)
        assert len({sample.id for sample in samples}) == 3
        assert len({sample.prompt for sample in samples}) == 3
        for sample in samples:
            tokens = len(sample.prompt_ids) + sample.max_new_tokens
            assert sample.length == length
            assert 0.9 * length < tokens <= length
            words_of_prompt = (sample.prompt + sample.answer_prefix).split()
            assert tokens == 3 + len(words_of_prompt) + sample.max_new_tokens
            assert sample.question.startswith("\n")
            assert sample.prompt.endswith(sample.question)
            for reference in sample.references:
                assert reference in sample.context
            assert score(sample, " ".join(sample.references)) == 1.0
            assert sample.max_new_tokens == longest_answers[kind]
            assert sample.answer_prefix.startswith(answer_prefix)
            assert sample.metric == metric
    drawn_again = samples_of(task, words, length)
    assert [sample.prompt for sample in drawn_again] == [sample.prompt for sample in samples]


def test_prompts_are_rendered_less_than_twice_on_average(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,200 prompts take minutes because the search for a size is short."""
    rendered: list[Sample] = []

    def recorded_render(samples: Sequence[Sample], tokenizer: Any) -> list[RenderedSample]:
        rendered.extend(samples)
        return render_all(samples, tokenizer)

    monkeypatch.setattr(ruler, "render_all", recorded_render)
    tasks = Ruler.TASKS[::3]
    for task in tasks:
        samples_of(task, words, 4096, count=32)
    assert len(rendered) <= 2 * 32 * len(tasks)


FACT = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (.+?)\.(?= |\n|$)")
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.mark.parametrize("task", NEEDLES)
def test_needles(task: str) -> None:
    needle = NEEDLES[task]
    text = needles(needle, ESSAY, random.Random(0), 60)
    facts = FACT.findall(text.context)
    distractors = 60 if needle.haystack == "needles" else 0
    assert len(facts) == needle.keys * needle.values + distractors
    value_format = UUID if needle.value == "uuids" else r"\d{7}"
    for kind, _, value in facts:
        assert kind == needle.value
        assert re.fullmatch(value_format, value)
    asked_values = [value for _, key, value in facts if key in text.after]
    assert len(asked_values) == needle.asked * needle.values
    assert len(text.references) == needle.asked * needle.values
    assert set(asked_values) == set(text.references)
    asks_for_several = len(text.references) > 1
    assert ("What are all" in text.after) == asks_for_several
    assert text.before.startswith("Some") == asks_for_several
    larger = needles(needle, ESSAY, random.Random(0), 200)
    assert larger.after == text.after
    assert larger.references == text.references
    if needle.haystack == "essay":
        without_needles = FACT.sub("", text.context).split()
        assert without_needles == [*ESSAY] * 5  # 60 words


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_3"])
def test_the_depth_is_that_of_the_asked_needle(task: str) -> None:
    for seed in range(5):
        text = needles(NEEDLES[task], ESSAY, random.Random(seed), 1000)
        assert text.depth is not None
        depth = text.context.index(text.references[0]) / len(text.context)
        assert text.depth <= depth < text.depth + 0.03


def test_variables_follow_from_each_other() -> None:
    text = variables(5, random.Random(0), 20)
    question = re.search(r"assigned the value (\d{5})", text.after)
    assert question is not None
    lines = text.context.split("\n")
    assert len(lines) == 25
    assignments = [line.strip() for line in lines if line.startswith("VAR")]
    for name in text.references:
        assert re.fullmatch("[A-Z]{5}", name)
    expected = [f"VAR {text.references[0]} = {question[1]}"]
    for source, name in pairwise(text.references):
        expected.append(f"VAR {name} = VAR {source}")
    assert assignments == expected
    example = re.search(
        r"5 variables are assigned the value (\d{5}), they are:  ([A-Z]{3})(?: [A-Z]{3}){4}\n\n", text.before
    )
    assert example is not None
    value, first_name = example.groups()
    assert f"VAR {first_name} = {value}" in text.before
    assert text.before.count("Memorize and track") == 2


WORD_ENTRY = re.compile(r"(\d+)\. (.+?)(?= \d+\. |$)")


@pytest.mark.parametrize(("short", "often", "seldom"), [(True, 6, 1), (False, 30, 3)])
def test_common_words_are_the_most_frequent(short: bool, often: int, seldom: int) -> None:
    text = common_words(short, random.Random(0), 50)
    entries = WORD_ENTRY.findall(text.context)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    for word in text.references:
        assert counts[word] == often
    assert sorted(counts.values()) == [seldom] * 40 + [often] * 10
    assert "1. " in text.before
    assert text.before.count("Memorize the ones") == 2
    longer_than_the_dictionary = common_words(True, random.Random(0), 12_000)
    distinct_words = {word for _, word in WORD_ENTRY.findall(longer_than_the_dictionary.context)}
    assert len(distinct_words) == 12_000


def test_frequent_words_are_the_most_frequent() -> None:
    text = frequent_words(80, random.Random(0), 2000)
    most_common = Counter(text.context.split()).most_common(4)
    assert [word for word, _ in most_common] == ["...", *text.references]
    # n * k^-2 / zeta(2)
    assert [count for _, count in most_common] == [1215, 303, 135, 75]


def test_questions_come_with_what_they_need() -> None:
    documents = [f"text {number}" for number in range(9)]
    question = Question("Which?", ("this",), needed=(4, 7), near=(1,))
    text = question_over(question, documents, random.Random(0), 5)
    shown = re.findall(r"Document (\d):\n(text \d)", text.context)
    assert [number for number, _ in shown] == ["1", "2", "3", "4", "5"]
    shown_documents = {document for _, document in shown}
    assert len(shown_documents) == 5
    assert {"text 4", "text 7", "text 1"} <= shown_documents
    assert text.after.endswith("Question: Which?")
    small = question_over(question, documents, random.Random(0), 1)
    assert sorted(re.findall(r"text \d", small.context)) == ["text 4", "text 7"]
    large = question_over(question, documents, random.Random(0), 20)
    assert large.context.count("Document") == 20


def test_sources_from_files(tmp_path: Path, words: Any) -> None:
    write_json(tmp_path / "squad.json", SQUAD)
    write_json(tmp_path / "hotpot.json", HOTPOT)
    write_json(tmp_path / "essays.json", {"text": "A  b.\nC d."})
    words_of_essays, _ = essay_words(str(tmp_path / "essays.json"))
    assert words_of_essays == ("A", "b.", "C", "d.")
    of_squad = squad(str(tmp_path / "squad.json"))
    assert of_squad.texts == ("Rome lies on seven hills.", "The Tiber flows there.")
    assert of_squad.questions[0] == Question("How many hills?", ("seven", "7"), (0,), (1,))
    assert [question.text for question in of_squad.questions] == ["How many hills?", "Flows?"]
    of_hotpot = hotpotqa(str(tmp_path / "hotpot.json"))
    assert of_hotpot.texts == ("Adria\nA town.", "Alps\nHigh.", "Po\nThe Po ends.")
    assert of_hotpot.questions == (Question("Which sea?", ("Adriatic",), (2, 0), (1,)),)
    request = TaskRequest(words, 10**6, [400], 2)
    samples = Ruler(squad=str(tmp_path / "squad.json")).samples("qa_1", request)
    assert [sample.references for sample in samples] == [("seven", "7"), ("Tiber",)]
    assert request.notes == {"ruler qa_1": str(tmp_path / "squad.json")}


def test_sources_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    context = {"title": ["Po", "Alps"], "sentences": [["The Po", " ends."], ["High."]]}
    rows = {
        "rajpurkar/squad_v2": [
            {"title": "R", "context": "Hills.", "question": "How many?", "answers": {"text": ["7"]}},
            {"title": "R", "context": "Hills.", "question": "Who?", "answers": {"text": []}},
        ],
        "hotpotqa/hotpot_qa": [
            {"question": "Which?", "answer": "this", "supporting_facts": {"title": ["Po"]}, "context": context}
        ],
        "alessiodevoto/paul_graham_essays": [{"text": "One two."}, {"text": "Three."}],
    }
    monkeypatch.setattr(ruler_texts, "hub_rows", lambda name, split, configuration=None: rows[name])
    assert squad(None).questions == (Question("How many?", ("7",), (0,)),)
    assert hotpotqa(None).questions == (Question("Which?", ("this",), (1,), (0,)),)
    assert essay_words(None) == (("One", "two.", "Three."), "alessiodevoto/paul_graham_essays")


def test_without_the_hub_the_documentation_is_used_and_named(words: Any) -> None:
    request = TaskRequest(words, 10**6, [3000], 1)
    for task in ("niah_single_2", "qa_1", "qa_2"):
        Ruler().samples(task, request)
    assert request.notes == {"ruler haystack": OFFLINE, "ruler qa_1": OFFLINE, "ruler qa_2": OFFLINE}
    documentation = hotpotqa(None)
    for question in documentation.questions[:20]:
        owner, method = (documentation.texts[index].split("\n")[0] for index in question.needed)
        assert method == f"{owner}.{question.answers[0]}"


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [("squad.json", "[]", "file"), ("squad.json", "{", "file"), ("none.json", None, "missing")],
)
def test_bad_files(tmp_path: Path, name: str, text: str | None, code: Code) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with refused(name, code):
        squad(str(tmp_path / name))


def test_protocols(words: Any) -> None:
    def sample_of(protocol: str) -> RenderedSample:
        request = TaskRequest(words, 10**6, [3000], 1, protocol=PROTOCOLS[protocol])
        (sample,) = Ruler().samples("vt", request)
        return sample

    factory = sample_of("kvcache-factory")
    assert (factory.chat, factory.max_new_tokens, factory.answer_prefix) == (False, 64, "")
    assert factory.prompt.endswith("they are: ")
    assert factory.question.endswith("they are: ")
    draft = sample_of("draft-based")
    assert (draft.chat, draft.max_new_tokens, draft.answer_prefix) == (True, 64, "")
    assert draft.prompt.endswith("in the text above.")
    press = sample_of("kvpress")
    assert (press.chat, press.max_new_tokens) == (True, 30)
    assert press.answer_prefix.endswith("they are: ")
    value = press.references[0]
    in_two_lines = f"{value[:2]}\n{value[2:]}"
    assert score(press, in_two_lines) == 1 / len(press.references)
    assert score(factory, in_two_lines) == 0.0
    assert score(draft, f"{value} The answer is: no") == 0.0
    assert len(Ruler().groups(PROTOCOLS["kvcache-factory"])[""]) == 11
    assert len(Ruler().groups(PROTOCOLS["reference"])[""]) == 13


def test_a_length_that_is_too_short(words: Any) -> None:
    with refused("lengths", "range"):
        samples_of("niah_single_1", words, 100)


def test_ready_made_files(tmp_path: Path, words: Any) -> None:
    """NVIDIA's layout, the older one with the prefix in the text, and rows that name their task."""
    text = "Memorize.\nA is 7.\nWhat is the special magic number for a?"
    prefix = " The special magic number for a is"
    row: dict[str, Any] = {"index": 3, "input": text, "outputs": ["7"]}
    write_lines(
        in_new_folder(tmp_path / "4096" / "niah_single_1" / "validation.jsonl"), [row | {"answer_prefix": prefix}]
    )
    write_lines(in_new_folder(tmp_path / "8192" / "niah_single_1.jsonl"), [row | {"index": 4, "input": text + prefix}])
    write_mixed_rows(tmp_path / "mixed.jsonl")
    samples = samples_of("niah_single_1", words, count=0, dir=str(tmp_path))
    assert [(sample.id, sample.length) for sample in samples] == [("3", 4096), ("4", 8192)]
    for sample in samples:
        assert sample.max_new_tokens == 128
        assert sample.prompt == text
        assert sample.answer_prefix == prefix
        assert sample.context == "Memorize.\nA is 7."
    assert samples_of("niah_single_1", words, count=1, dir=str(tmp_path)) == samples  # one of each length
    request = TaskRequest(words, 1 << 20, samples=0)
    (sample,) = Ruler(dir=str(tmp_path)).samples("vt", request)
    assert (sample.length, sample.task, sample.references) == (1024, "ruler_vt", ("7",))
    assert len(request.skipped) == 6
    assert "6 rows were skipped" in request.notes["ruler vt rows"]
    with refused("ruler.dir", "missing"):
        samples_of("cwe", words, dir=str(tmp_path))


def write_mixed_rows(path: Path) -> None:
    """Six rows of `vt` that cannot be used, and one that can."""
    row: dict[str, Any] = {
        "task": "vt",
        "input": "x\nQuestion: which?",
        "outputs": [7],
        "answer_prefix": " B",
        "length": 900,
    }
    changes = ({"length": None}, {"length": "1e9"}, {"outputs": [None]}, {"outputs": "A"}, {"input": None})
    lines = [json.dumps(row | change) for change in changes]
    lines.append(json.dumps(row).replace("900", "1e999"))
    lines.append(json.dumps(row))
    path.write_text("\n".join(lines))


def in_new_folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_hub_rows_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "hub_reachable", lambda: True)

    def refuse(*names: Any, **options: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    assert benchmark.hub_rows("a/b", "train") is None
