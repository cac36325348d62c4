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


def mixture(kind: str, low: int = 200, high: int = 200, **options: Any) -> Mixture:
    return Mixture.from_config({"min_tokens": low, "max_tokens": high, "sources": [{"kind": kind, **options}]})


def content(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


@pytest.mark.parametrize("kind", OFFLINE)
def test_prompts_fill_their_length_and_depend_on_seed_and_index_alone(kind: str) -> None:
    for tokens in (120, 900):
        made = [mixture(kind, tokens, tokens).prompt(1, index, count_tokens) for index in range(12)]
        lengths = [count_tokens("\n".join(turn["content"] for turn in prompt.messages)) for prompt in made]
        assert max(lengths) <= tokens and mean(lengths) > 0.7 * tokens
        assert len({repr(prompt.messages) for prompt in made}) == 12
        assert all(prompt.messages[-1]["role"] == "user" for prompt in made)
        assert kind in TRUTHFUL or all(prompt.response is None for prompt in made)
        assert not any("{" in prompt.answer_prefix for prompt in made)
    fresh = mixture(kind, 900, 900)
    assert made == [fresh.prompt(1, index, count_tokens) for index in reversed(range(12))][::-1]
    assert made != [fresh.prompt(2, index, count_tokens) for index in range(12)]


def test_prompts_for_a_seed_are_those_of_earlier_versions() -> None:
    """Or resumed runs mix two data sets. Sources over the standard library's text depend on the version of Python."""
    made = {}
    for kind, options in (("needles", {"haystacks": [0, 1, 1, 1, 0]}), ("key_values", {}), ("everyday", {})):
        source = mixture(kind, 100, 800, **options)
        drawn = [source.prompt(3, index, count_tokens) for index in range(40)]
        text = repr([(each.source, content(each), each.answer_prefix, each.response) for each in drawn])
        made[kind] = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert made == DIGESTS


def test_needles_and_question_are_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    quizzes = []
    make_quiz = synthetic.make_quiz

    def recorded(form: str, rng: random.Random) -> synthetic.Quiz:
        quizzes.append((form, make_quiz(form, rng)))
        return quizzes[-1][1]

    monkeypatch.setattr(synthetic, "make_quiz", recorded)
    source = mixture("needles", 500, 500)
    for index in range(60):
        text = content(source.prompt(0, index, count_tokens))
        form, quiz = quizzes[-1]
        assert quiz.question in text and all(needle in text for needle in quiz.needles)
        assert (len(quiz.needles) == 1) == (form == "single")
    assert {form for form, _ in quizzes} == set(synthetic.FORMS)
    hay = [f"{row} " for row in range(100)]
    words = synthetic.hide_needles(["late", "first", "middle"], [0.9, 0.0, 0.5], hay).split()
    assert [words.index(needle) for needle in ("first", "middle", "late")] == [0, 51, 92]
    assert [word for word in words if word.isdigit()] == [str(row) for row in range(100)]


def test_haystacks_have_no_end() -> None:
    for stream in synthetic.HAYSTACKS.values():
        taken = synthetic.take_pieces(stream(random.Random(0)), 20_000)
        assert 18_000 < len("".join(taken)) <= 20_000
        assert all(piece[-1] in " \n" for piece in taken)


def test_options_of_needles() -> None:
    for share, expected in ((0.0, {False}), (1.0, {True})):
        source = mixture("needles", forms=[1, 0, 0, 0], haystacks=[0, 1, 0, 0, 0], prefixed=share, truthful=True)
        made = [source.prompt(0, index, count_tokens) for index in range(10)]
        assert {bool(prompt.answer_prefix) for prompt in made} == expected
        assert all((prompt.response or "?").split()[-1].rstrip(".") in content(prompt) for prompt in made)


def test_answers_about_tables_are_in_their_rows() -> None:
    forms = set[str]()
    for index in range(60):
        prompt = mixture("tables", 300, 900, truthful=1.0).prompt(0, index, count_tokens)
        forms.add(prompt.source.removeprefix("tables/"))
        text, answer = content(prompt), (prompt.response or "?").removesuffix(".")
        for cell in answer.split(", "):
            assert html.escape(cell.split(": ")[-1]) in text
    assert forms == {"cell", "row", "rows_with"}


def test_described_passages_and_second_questions_have_their_answers() -> None:
    for index in range(20):
        prompt = mixture("described_passages", 400, 900).prompt(0, index, count_tokens)
        number = int((prompt.response or "").removeprefix("Passage "))
        passage = re.split(rf"(?:Passage |\[|Document |\(){number}[\]):]+\s", content(prompt))[1].strip()
        of_passage = [summary for summary, text in package_text._summarized_docstrings() if text[:60] == passage[:60]]
        assert any(summary in content(prompt) for summary in of_passage)
        turns = mixture("second_turn", 400, 900, about_all=0.0).prompt(0, index, count_tokens)
        opening, reply, _ = (turn["content"] for turn in turns.messages)
        for answer in (reply, turns.response or "?"):
            assert answer.rstrip(".").split()[-1].lower() in opening.lower()
        imports = mixture("code_completion", 900, 900, imports=1.0, raw=1.0).prompt(0, index, count_tokens)
        named = re.findall(r"^# (\S+\.py)$", content(imports), re.MULTILINE)
        assert all(document_part(name) == "training" for name in named)


def test_a_paragraph_to_repeat_is_in_the_text_before_the_question() -> None:
    for index in range(20):
        prompt = mixture("reconstruction", 300, 900).prompt(0, index, count_tokens)
        passage, text = prompt.response or "?", content(prompt)
        assert len(passage) >= 40 and passage in text
        assert any(wording.format(start=" ".join(passage.split()[:6])) in text for wording in wordings("repeat"))


def test_things_are_where_they_were_carried() -> None:
    """The response is what a reader of the story finds."""
    for each_move, form in ((0.0, "last_place"), (1.0, "each_move")):
        source = mixture("state_tracking", 400, 900, each_move=each_move, truthful=True)
        moves = 0
        for index in range(30):
            prompt = source.prompt(0, index, count_tokens)
            places = _followed(form, content(prompt))
            moves += len(places) - 1
            answer = ", then ".join(places) if each_move else places[-1]
            assert prompt.source == f"state_tracking/{form}"
            assert prompt.response == f"{answer[:1].upper()}{answer[1:]}."
        assert moves > 30


def _followed(form: str, text: str) -> list[str]:
    """Where the thing that a prompt asks about was, read from the sentences alone."""
    patterns = [re.escape(wording).replace(r"\{thing\}", "([a-z]+-[a-z]+)") for wording in wordings(form)]
    thing = next(asked[1] for pattern in patterns if (asked := re.search(pattern, text)))
    places, carrier = list[str](), ""
    for sentence in re.findall(r"[A-Z][^.?]*\.", text):
        if first := re.search(rf"The {thing} is in (.*)\.", sentence):
            places.append(first[1])
        elif walk := re.search(r"(\w+) (?:walked to|went over to|moved on to|could be found in) (.*)\.", sentence):
            places += [walk[2]] if walk[1] == carrier else []
        elif f"the {thing}" in sentence:
            taken = re.search(r"(\w+) (?:picked|took|was carrying)", sentence)
            carrier = taken[1] if taken else ""
    return places


@pytest.mark.parametrize("form", sorted(synthetic.FORMATS))
def test_asked_pairs_stand_in_the_list(form: str) -> None:
    pairs = [(f"k{row}x", f"v{row}y") for row in range(40)]
    asked_list = synthetic._AskedList(pairs, synthetic.FORMATS[form], "Q {key} {value} {other}", 0.99, 0.0, 3)
    text = asked_list.text(200)
    asked = re.search(r"Q k(\d+)x v(\d+)y k(\d+)x", text)
    assert asked is not None and asked[1] == asked[2]
    assert all(re.search(rf"k{row}x\W+(value\W+)?v{row}y", text) for row in (asked[1], asked[3]))
    assert 3 <= len(set(re.findall(r"k\d+x", text))) < 40


def test_raw_prompts_are_verbatim_training_text() -> None:
    documents = [document.text for document in topic_documents("training") + source_documents("training")]
    made = [mixture("continuation").prompt(0, index, count_tokens) for index in range(5)]
    for prompt in (*made, mixture("code_completion", raw=1.0).prompt(0, 0, count_tokens)):
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
    text = content(mixture("needles", 64, 64, forms=[0, 0, 1, 0]).prompt(0, 0, count_tokens))
    assert count_tokens(text) <= 64
    with refused("max_tokens", "range"):
        mixture("everyday", 64, 64).prompt(0, 0, lambda text: 10 * len(text))


def test_draws_follow_the_weights_and_lengths() -> None:
    weights = {"needles": 5.0, "key_values": 3.0, "everyday": 2.0}
    sources = [{"kind": kind, "weight": weight} for kind, weight in weights.items()]
    made = Mixture.from_config({"min_tokens": 64, "max_tokens": 100, "sources": sources})
    drawn = Counter(made.prompt(0, index, count_tokens).source.split("/")[0] for index in range(1000))
    assert drawn == {"needles": 500, "key_values": 300, "everyday": 200}
    made = mixture("key_values", 100, 1600)
    lengths = [count_tokens(content(made.prompt(0, index, count_tokens))) for index in range(300)]
    assert max(lengths) <= 1600
    assert 0.35 < mean(length < math.sqrt(100 * 1600) for length in lengths) < 0.65  # log-uniform
    own = [{"kind": "everyday", "min_tokens": 300, "max_tokens": 320}]
    made = Mixture.from_config({"min_tokens": 64, "max_tokens": 64, "sources": own})
    assert 200 < count_tokens(content(made.prompt(0, 0, count_tokens))) <= 320


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
    for name in (each["local"]["path"] for each in values["sources"] if "local" in each):
        (tmp_path / name).write_text(json.dumps({"prompt": "word " * 600, "source": name}) + "\n")
    made = Mixture.from_config(values | {"sources": use_local_rows(values["sources"], tmp_path)})
    assert len({made.prompt(0, index, count_tokens).source.split("/")[0] for index in range(40)}) >= 3
    if path.stem == "offline":  # every source that needs no file
        assert sorted(source["kind"] for source in values["sources"]) == OFFLINE


def test_both_mixtures_of_smollm2_take_the_same_data_sets() -> None:
    """At the same commits and licences, without the same rows."""
    paths = {path.stem: path for path in MIXTURES}
    read = [yaml.safe_load(paths[name].read_text())["sources"] for name in ("smollm2", "smollm2-fresh")]
    first, second = (
        {
            (each["id"], each["license"], each["revision"], str(each["local"].get("leave_out")))
            for each in sources
            if "id" in each
        }
        for sources in read
    )
    assert first == second and len(first) == 6


def test_documents_belong_to_one_part_as_a_whole() -> None:
    training = {document.name for document in topic_documents("training") + source_documents("training")}
    evaluation = {document.name for document in topic_documents("evaluation") + source_documents("evaluation")}
    assert not training & evaluation
    assert 0.1 < len(evaluation) / len(training | evaluation) < 0.35
    parts = {"evaluation": ("topics/try", "logging/handlers.py", "logging/__init__.py"),
             "training": ("topics/assert", "decimal.py", "_pydecimal.py")}  # fmt: skip
    assert all({document_part(name) for name in names} == {part} for part, names in parts.items())
    assert not any(name.startswith(("test/", "site-packages/")) for name in training | evaluation)
    (document,) = (document for document in source_documents("training") if document.name == "json/decoder.py")
    names = [entry.name for entry in docstrings(document)]
    assert names[:2] == ["json.decoder", "json.decoder.JSONDecodeError"]
    assert "json.decoder.JSONDecoder.decode" in names


def test_documents_are_cut_at_words_where_the_language_has_spaces() -> None:
    assert cut_at_word("one two three " * 40, 100) == ("one two three " * 40)[:97]
    page = "标题 " + "这是一个没有空格的句子。" * 40
    assert cut_at_word(page, 200) == page[:200]
