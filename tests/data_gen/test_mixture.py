"""The sources of training prompts: lengths, determinism, what their questions need, and the mixture's bookkeeping."""

import hashlib
import html
import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from keepsight import recipes
from keepsight.corpus import docstrings, document_part, source_documents, topic_documents
from keepsight.data_gen import package_text, synthetic
from keepsight.data_gen.mixture import SOURCES, Mixture
from keepsight.data_gen.prompts import DoesNotFit, Prompt, Request, cut_at_word, fit_text
from keepsight.data_gen.user_data import use_local_rows
from keepsight.data_gen.words import wordings
from keepsight.errors import Code
from tests.refused import refused

OFFLINE = sorted(set(SOURCES) - {"local_jsonl", "hub_dataset"})
MIXTURES = sorted(path for path in Path(recipes.__file__).parent.glob("mixtures/*.yaml") if path.stem != "paper")

TRUTHFUL = {"described_passages", "reconstruction", "second_turn"}
"""Sources whose response is the true one by default."""

DIGESTS = {"needles": "1fffdf9d62623010", "key_values": "a228d00a5c86d45e", "everyday": "60c402c32295fc37"}
"""Of the tree of 2026-11-24."""


def count_tokens(text: str) -> int:
    return len(re.findall(r"\w{1,4}|[^\w ]", text))


def mixture_of(kind: str, low: int = 200, high: int = 200, **options: Any) -> Mixture:
    return Mixture.from_config({"min_tokens": low, "max_tokens": high, "sources": [{"kind": kind, **options}]})


def content(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def draw(mixture: Mixture, count: int, seed: int = 0) -> list[Prompt]:
    """The first prompts of a mixture."""
    return [mixture.prompt(seed, index, count_tokens) for index in range(count)]


@pytest.mark.parametrize("kind", OFFLINE)
def test_prompts_fill_their_length_and_depend_on_seed_and_index_alone(kind: str) -> None:
    for tokens in (120, 900):
        prompts = draw(mixture_of(kind, tokens, tokens), 12, seed=1)
        lengths = [count_tokens("\n".join(turn["content"] for turn in prompt.messages)) for prompt in prompts]
        assert max(lengths) <= tokens
        assert mean(lengths) > 0.7 * tokens
        assert len({repr(prompt.messages) for prompt in prompts}) == 12
        assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
        assert kind in TRUTHFUL or all(prompt.response is None for prompt in prompts)
        assert not any("{" in prompt.answer_prefix for prompt in prompts)
    fresh = mixture_of(kind, 900, 900)
    drawn_in_reverse = [fresh.prompt(1, index, count_tokens) for index in reversed(range(12))]
    assert drawn_in_reverse[::-1] == prompts
    assert draw(fresh, 12, seed=2) != prompts


def test_prompts_for_a_seed_are_those_of_earlier_versions() -> None:
    """Or resumed runs mix two data sets. Sources over the standard library's text depend on the version of Python."""
    options: dict[str, Any] = {"needles": {"haystacks": [0, 1, 1, 1, 0]}}
    digests = {}
    for kind in ("needles", "key_values", "everyday"):
        prompts = draw(mixture_of(kind, 100, 800, **options.get(kind, {})), 40, seed=3)
        text = repr([(prompt.source, content(prompt), prompt.answer_prefix, prompt.response) for prompt in prompts])
        digests[kind] = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digests == DIGESTS


def test_needles_and_question_are_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    quizzes: list[tuple[str, synthetic.Quiz]] = []
    make_quiz = synthetic.make_quiz

    def recorded(form: str, rng: random.Random) -> synthetic.Quiz:
        quiz = make_quiz(form, rng)
        quizzes.append((form, quiz))
        return quiz

    monkeypatch.setattr(synthetic, "make_quiz", recorded)
    mixture = mixture_of("needles", 500, 500)
    for index in range(60):
        text = content(mixture.prompt(0, index, count_tokens))
        form, quiz = quizzes[-1]
        assert quiz.question in text
        assert all(needle in text for needle in quiz.needles)
        assert (len(quiz.needles) == 1) == (form == "single")
    assert {form for form, _ in quizzes} == set(synthetic.FORMS)

    hay = [f"{row} " for row in range(100)]
    pieces = synthetic.hide_needles(["late", "first", "middle"], [0.9, 0.0, 0.5], hay).split()
    assert [pieces.index(needle) for needle in ("first", "middle", "late")] == [0, 51, 92]
    assert [piece for piece in pieces if piece.isdigit()] == [str(row) for row in range(100)]


def test_haystacks_have_no_end() -> None:
    for stream in synthetic.HAYSTACKS.values():
        pieces = synthetic.take_pieces(stream(random.Random(0)), 20_000)
        assert 18_000 < len("".join(pieces)) <= 20_000
        assert all(piece[-1] in " \n" for piece in pieces)


def test_options_of_needles() -> None:
    for share, expected in ((0.0, {False}), (1.0, {True})):
        mixture = mixture_of("needles", forms=[1, 0, 0, 0], haystacks=[0, 1, 0, 0, 0], prefixed=share, truthful=True)
        prompts = draw(mixture, 10)
        assert {bool(prompt.answer_prefix) for prompt in prompts} == expected
        for prompt in prompts:
            last_word = (prompt.response or "?").split()[-1].rstrip(".")
            assert last_word in content(prompt)


def test_answers_about_tables_are_in_their_rows() -> None:
    forms = set[str]()
    for prompt in draw(mixture_of("tables", 300, 900, truthful=1.0), 60):
        forms.add(prompt.source.removeprefix("tables/"))
        text = content(prompt)
        answer = (prompt.response or "?").removesuffix(".")
        for cell in answer.split(", "):
            assert html.escape(cell.split(": ")[-1]) in text
    assert forms == {"cell", "row", "rows_with"}


def test_described_passages_and_second_questions_have_their_answers() -> None:
    for prompt in draw(mixture_of("described_passages", 400, 900), 20):
        number = int((prompt.response or "").removeprefix("Passage "))
        passage = re.split(rf"(?:Passage |\[|Document |\(){number}[\]):]+\s", content(prompt))[1].strip()
        summaries = [summary for summary, text in package_text._summarized_docstrings() if text[:60] == passage[:60]]
        assert any(summary in content(prompt) for summary in summaries)
    for prompt in draw(mixture_of("second_turn", 400, 900, about_all=0.0), 20):
        opening, reply, _ = (turn["content"] for turn in prompt.messages)
        for answer in (reply, prompt.response or "?"):
            assert answer.rstrip(".").split()[-1].lower() in opening.lower()
    for prompt in draw(mixture_of("code_completion", 900, 900, imports=1.0, raw=1.0), 20):
        imported = re.findall(r"^# (\S+\.py)$", content(prompt), re.MULTILINE)
        assert all(document_part(name) == "training" for name in imported)


def test_a_paragraph_to_repeat_is_in_the_text_before_the_question() -> None:
    for prompt in draw(mixture_of("reconstruction", 300, 900), 20):
        paragraph = prompt.response or "?"
        text = content(prompt)
        assert len(paragraph) >= 40
        assert paragraph in text
        start = " ".join(paragraph.split()[:6])
        assert any(wording.format(start=start) in text for wording in wordings("repeat"))


def test_things_are_where_they_were_carried() -> None:
    """The response is what a reader of the story finds."""
    for each_move, form in ((0.0, "last_place"), (1.0, "each_move")):
        moves = 0
        for prompt in draw(mixture_of("state_tracking", 400, 900, each_move=each_move, truthful=True), 30):
            rooms = _rooms_in_story(form, content(prompt))
            moves += len(rooms) - 1
            answer = ", then ".join(rooms) if each_move else rooms[-1]
            assert prompt.source == f"state_tracking/{form}"
            assert prompt.response == f"{answer[:1].upper()}{answer[1:]}."
        assert moves > 30


def _rooms_in_story(form: str, text: str) -> list[str]:
    """Where the thing that a prompt asks about was, read from the sentences alone."""
    thing = _thing_asked_about(form, text)
    rooms: list[str] = []
    carrier = ""
    for sentence in re.findall(r"[A-Z][^.?]*\.", text):
        if first := re.search(rf"The {thing} is in (.*)\.", sentence):
            rooms.append(first[1])
        elif walk := re.search(r"(\w+) (?:walked to|went over to|moved on to|could be found in) (.*)\.", sentence):
            if walk[1] == carrier:
                rooms.append(walk[2])
        elif f"the {thing}" in sentence:
            pickup = re.search(r"(\w+) (?:picked|took|was carrying)", sentence)
            carrier = pickup[1] if pickup else ""
    return rooms


def _thing_asked_about(form: str, text: str) -> str:
    for wording in wordings(form):
        pattern = re.escape(wording).replace(r"\{thing\}", "([a-z]+-[a-z]+)")
        if question := re.search(pattern, text):
            return question[1]
    raise AssertionError(f"no question of the form {form}")


@pytest.mark.parametrize("form", sorted(synthetic.FORMATS))
def test_asked_pairs_stand_in_the_list(form: str) -> None:
    pairs = [(f"k{row}x", f"v{row}y") for row in range(40)]
    asked_list = synthetic._AskedList(pairs, synthetic.FORMATS[form], "Q {key} {value} {other}", 0.99, 0.0, 3)
    text = asked_list.text(200)
    question = re.search(r"Q k(\d+)x v(\d+)y k(\d+)x", text)
    assert question is not None
    key, value, other_key = question.groups()
    assert key == value
    for row in (key, other_key):
        assert re.search(rf"k{row}x\W+(value\W+)?v{row}y", text)
    assert 3 <= len(set(re.findall(r"k\d+x", text))) < 40


def test_raw_prompts_are_verbatim_training_text() -> None:
    documents = [document.text for document in topic_documents("training") + source_documents("training")]
    prompts = [*draw(mixture_of("continuation"), 5), *draw(mixture_of("code_completion", raw=1.0), 1)]
    for prompt in prompts:
        assert not prompt.template
        assert any(content(prompt) in text for text in documents)


def test_fit_reaches_the_length_from_either_side() -> None:
    request = Request(random.Random(0), 100, 100, str.__len__)
    assert 93 <= len(fit_text(lambda characters: "x" * (characters * 3), request)) <= 100
    assert 93 <= len(fit_text(lambda characters: "x" * (characters // 3), request)) <= 100
    assert fit_text(lambda _: "short", request) == "short"
    with pytest.raises(DoesNotFit):
        fit_text(lambda characters: "x" * (101 + characters), request)


def test_what_does_not_fit_is_drawn_again_and_at_last_refused() -> None:
    (prompt,) = draw(mixture_of("needles", 64, 64, forms=[0, 0, 1, 0]), 1)
    assert count_tokens(content(prompt)) <= 64
    with refused("max_tokens", "range"):
        mixture_of("everyday", 64, 64).prompt(0, 0, lambda text: 10 * len(text))


def test_draws_follow_the_weights_and_lengths() -> None:
    weights = {"needles": 5.0, "key_values": 3.0, "everyday": 2.0}
    sources = [{"kind": kind, "weight": weight} for kind, weight in weights.items()]
    weighted = Mixture.from_config({"min_tokens": 64, "max_tokens": 100, "sources": sources})
    drawn = Counter(prompt.source.split("/")[0] for prompt in draw(weighted, 1000))
    assert drawn == {"needles": 500, "key_values": 300, "everyday": 200}

    lengths = [count_tokens(content(prompt)) for prompt in draw(mixture_of("key_values", 100, 1600), 300)]
    assert max(lengths) <= 1600
    share_below_geometric_mean = mean(length < math.sqrt(100 * 1600) for length in lengths)
    assert 0.35 < share_below_geometric_mean < 0.65  # log-uniform

    source_with_bounds = {"kind": "everyday", "min_tokens": 300, "max_tokens": 320}
    bounded = Mixture.from_config({"min_tokens": 64, "max_tokens": 64, "sources": [source_with_bounds]})
    (prompt,) = draw(bounded, 1)
    assert 200 < count_tokens(content(prompt)) <= 320


@pytest.mark.parametrize(
    ("config", "field", "code"),
    [
        ({"source": []}, "source", "unknown"),
        ({"sources": ["needles"]}, "sources", "type"),
        ({"sources": [{"kind": "needle"}]}, "needle", "unknown"),
        ({"sources": [{"kind": "needles", "prefixed": 2}]}, "prefixed", "range"),
        ({"sources": [{"kind": "needles", "forms": [1, 2]}]}, "forms", "range"),
        ({"sources": [{"kind": "needles", "weight": float("nan")}]}, "weight", "range"),
        ({"min_tokens": 8, "sources": [{"kind": "needles"}]}, "min_tokens", "range"),
        ({"max_tokens": 10**12, "sources": [{"kind": "local_jsonl", "path": __file__}]}, "max_tokens", "range"),
        ({"max_tokens": 100, "sources": [{"kind": "needles"}]}, "min_tokens", "range"),
        ({"sources": [{"kind": "local_jsonl"}]}, "path", "missing"),
        ({"sources": [{"kind": "local_jsonl", "path": "no.jsonl"}]}, "path", "missing"),
    ],
)
def test_bad_mixtures(config: dict[str, Any], field: str, code: Code) -> None:
    with refused(field, code) as error:
        Mixture.from_config(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", MIXTURES, ids=lambda path: path.stem)
def test_shipped_mixtures(path: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    for source in values["sources"]:
        if "local" in source:
            name = source["local"]["path"]
            (tmp_path / name).write_text(json.dumps({"prompt": "word " * 600, "source": name}) + "\n")
    mixture = Mixture.from_config(values | {"sources": use_local_rows(values["sources"], tmp_path)})
    drawn_kinds = {prompt.source.split("/")[0] for prompt in draw(mixture, 40)}
    assert len(drawn_kinds) >= 3
    if path.stem == "offline":  # every source that needs no file
        assert sorted(source["kind"] for source in values["sources"]) == OFFLINE


def test_both_mixtures_of_smollm2_take_the_same_data_sets() -> None:
    """At the same commits and licences, without the same rows."""
    paths = {path.stem: path for path in MIXTURES}

    def data_sets(mixture: str) -> set[tuple[str, ...]]:
        sources = yaml.safe_load(paths[mixture].read_text())["sources"]
        return {
            (source["id"], source["license"], source["revision"], str(source["local"].get("leave_out")))
            for source in sources
            if "id" in source
        }

    assert data_sets("smollm2") == data_sets("smollm2-fresh")
    assert len(data_sets("smollm2")) == 6


def test_documents_belong_to_one_part_as_a_whole() -> None:
    training = {document.name for document in topic_documents("training") + source_documents("training")}
    evaluation = {document.name for document in topic_documents("evaluation") + source_documents("evaluation")}
    assert not training & evaluation
    assert 0.1 < len(evaluation) / len(training | evaluation) < 0.35
    for name in ("topics/try", "logging/handlers.py", "logging/__init__.py"):
        assert document_part(name) == "evaluation"
    for name in ("topics/assert", "decimal.py", "_pydecimal.py"):
        assert document_part(name) == "training"
    assert not any(name.startswith(("test/", "site-packages/")) for name in training | evaluation)
    (decoder,) = (document for document in source_documents("training") if document.name == "json/decoder.py")
    names = [entry.name for entry in docstrings(decoder)]
    assert names[:2] == ["json.decoder", "json.decoder.JSONDecodeError"]
    assert "json.decoder.JSONDecoder.decode" in names


def test_documents_are_cut_at_words_where_the_language_has_spaces() -> None:
    assert cut_at_word("one two three " * 40, 100) == ("one two three " * 40)[:97]
    page = "标题 " + "这是一个没有空格的句子。" * 40
    assert cut_at_word(page, 200) == page[:200]
