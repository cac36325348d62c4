"""The sources of training prompts: lengths, determinism, what their questions need, and the mixture's bookkeeping."""

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
from keepsight.data_gen import haystacks, key_values, retrieval
from keepsight.data_gen.mixture import SOURCES, Mixture
from keepsight.data_gen.prompts import DoesNotFit, Prompt, Request, fit
from keepsight.errors import UserError

OFFLINE = sorted(set(SOURCES) - {"local_jsonl", "hub_dataset"})
MIXTURES = sorted(Path(recipes.__file__).parent.glob("mixtures/*.yaml"))
NEEDS_THE_HUB = [path for path in MIXTURES if path.stem == "paper"]


def count_tokens(text: str) -> int:
    return len(re.findall(r"\w{1,4}|[^\w ]", text))


def mixture(kind: str, low: int = 200, high: int = 200, **options: Any) -> Mixture:
    return Mixture.from_config({"min_tokens": low, "max_tokens": high, "sources": [{"kind": kind, **options}]})


def content(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


@pytest.mark.parametrize("kind", OFFLINE)
@pytest.mark.parametrize("tokens", [120, 900])
def test_prompts_fill_their_length(kind: str, tokens: int) -> None:
    made = [mixture(kind, tokens, tokens).prompt(1, index, count_tokens) for index in range(20)]
    lengths = [count_tokens(content(prompt)) for prompt in made]
    assert max(lengths) <= tokens
    assert mean(lengths) > 0.7 * tokens
    assert len({content(prompt) for prompt in made}) == 20
    for prompt in made:
        assert prompt.messages[-1]["role"] == "user"
        assert prompt.response is None
        assert "{" not in prompt.answer_prefix


@pytest.mark.parametrize("kind", OFFLINE)
def test_a_prompt_depends_on_seed_and_index_alone(kind: str) -> None:
    forwards = [mixture(kind).prompt(5, index, count_tokens) for index in range(6)]
    fresh = mixture(kind)
    backwards = [fresh.prompt(5, index, count_tokens) for index in reversed(range(6))]
    assert forwards == backwards[::-1]
    assert forwards != [fresh.prompt(6, index, count_tokens) for index in range(6)]


def test_needles_and_question_are_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    quizzes = []
    draw = retrieval._quiz

    def recorded(form: str, rng: random.Random) -> retrieval.Quiz:
        quizzes.append((form, draw(form, rng)))
        return quizzes[-1][1]

    monkeypatch.setattr(retrieval, "_quiz", recorded)
    source = mixture("needles", 500, 500)
    for index in range(60):
        text = content(source.prompt(0, index, count_tokens))
        form, quiz = quizzes[-1]
        assert quiz.question in text
        assert all(needle in text for needle in quiz.needles)
        assert (len(quiz.needles) == 1) == (form == "single")
    assert {form for form, _ in quizzes} == set(retrieval.FORMS)


def test_needles_stand_at_their_depths() -> None:
    hay = [f"{row} " for row in range(100)]
    text = haystacks.with_needles(["late", "first", "middle"], [0.9, 0.0, 0.5], hay).split()
    assert [text.index(needle) for needle in ("first", "middle", "late")] == [0, 51, 92]
    assert [word for word in text if word.isdigit()] == [str(row) for row in range(100)]


@pytest.mark.parametrize("kind", sorted(haystacks.STREAMS))
def test_haystacks_have_no_end(kind: str) -> None:
    taken = haystacks.take(haystacks.hay_pieces(kind, random.Random(0)), 20_000)
    assert 18_000 < len("".join(taken)) <= 20_000
    assert all(piece[-1] in " \n" for piece in taken)


def test_share_of_answers_with_a_given_beginning() -> None:
    for share, expected in ((0.0, {False}), (1.0, {True})):
        source = mixture("needles", forms=[1, 0, 0, 0], haystacks=[0, 1, 0, 0, 0], prefixed=share)
        assert {bool(source.prompt(0, index, count_tokens).answer_prefix) for index in range(10)} == expected


@pytest.mark.parametrize("form", ["json", "colon", "table"])
def test_asked_pairs_stand_in_the_list(form: str) -> None:
    pairs = [(f"k{row}x", f"v{row}y") for row in range(40)]
    text = key_values._fill(pairs, key_values.FORMATS[form], "Q {key} {value} {other}", (0.99, 0.0), 3, 200)
    asked = re.search(r"Q k(\d+)x v(\d+)y k(\d+)x", text)
    assert asked is not None
    assert asked[1] == asked[2]
    for row in (asked[1], asked[3]):
        assert re.search(rf"k{row}x\W+v{row}y", text)
    assert 3 < len(set(re.findall(r"k\d+x", text))) < 40


def test_raw_prompts_are_verbatim_training_text() -> None:
    documents = [document.text for document in topic_documents("training") + source_documents("training")]
    for index in range(5):
        prompt = mixture("continuation").prompt(0, index, count_tokens)
        assert not prompt.template
        assert any(content(prompt) in text for text in documents)
    prompt = mixture("code_completion", raw=1.0).prompt(0, 0, count_tokens)
    assert not prompt.template
    assert any(content(prompt) in text for text in documents)


def test_fit_reaches_the_length_from_either_side() -> None:
    def request(tokens: int) -> Request:
        return Request(random.Random(0), tokens, tokens, str.__len__)

    assert 93 <= len(fit(lambda characters: "x" * (characters * 3), request(100))) <= 100
    assert 93 <= len(fit(lambda characters: "x" * (characters // 3), request(100))) <= 100
    assert fit(lambda _: "short", request(100)) == "short"
    with pytest.raises(DoesNotFit):
        fit(lambda characters: "x" * (101 + characters), request(100))


def test_what_does_not_fit_is_drawn_again_and_at_last_refused() -> None:
    text = content(mixture("needles", 64, 64, forms=[0, 0, 1, 0]).prompt(0, 0, count_tokens))
    assert count_tokens(text) <= 64
    with pytest.raises(UserError, match="no prompt of everyday fits 64 tokens; raise max_tokens"):
        mixture("everyday", 64, 64).prompt(0, 0, lambda text: 10 * len(text))


def test_draws_follow_the_weights() -> None:
    weights = {"needles": 5.0, "key_values": 3.0, "everyday": 2.0}
    sources = [{"kind": kind, "weight": weight} for kind, weight in weights.items()]
    made = Mixture.from_config({"min_tokens": 64, "max_tokens": 100, "sources": sources})
    drawn = Counter(made.prompt(0, index, count_tokens).source.split("/")[0] for index in range(1000))
    assert drawn == {"needles": 500, "key_values": 300, "everyday": 200}


def test_lengths_are_log_uniform() -> None:
    made = mixture("key_values", 100, 1600)
    lengths = [count_tokens(content(made.prompt(0, index, count_tokens))) for index in range(300)]
    assert max(lengths) <= 1600
    assert 0.35 < mean(length < math.sqrt(100 * 1600) for length in lengths) < 0.65


def test_an_entry_may_have_its_own_lengths() -> None:
    sources = [{"kind": "everyday", "min_tokens": 300, "max_tokens": 320}]
    made = Mixture.from_config({"min_tokens": 64, "max_tokens": 64, "sources": sources})
    assert 200 < count_tokens(content(made.prompt(0, 0, count_tokens))) <= 320


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"source": []}, "unknown key 'source'; did you mean sources"),
        ({"sources": []}, "sources must be a list of at least one"),
        ({"sources": ["needles"]}, r"sources\[0\]: expected \{kind: \.\.\., weight: \.\.\.\}, got 'needles'"),
        ({"sources": [{"kind": "needle"}]}, "unknown kind 'needle'; did you mean needles"),
        ({"sources": [{"kind": "everyday", "lang": "de"}]}, r"\(everyday\): unknown option 'lang' \(known: none\)"),
        ({"sources": [{"kind": "needles", "prefix": 1}]}, "unknown option 'prefix'; did you mean prefixed"),
        ({"sources": [{"kind": "needles", "prefixed": 2}]}, "prefixed must be a share between 0 and 1, got 2"),
        ({"sources": [{"kind": "needles", "forms": [1, 2]}]}, r"forms needs 4 weights .*got \[1, 2\]"),
        ({"sources": [{"kind": "needles", "forms": "all"}]}, "forms must be a list of weights, got 'all'"),
        ({"sources": [{"kind": "needles", "weight": 0}]}, "weight must be a number above 0, got 0"),
        ({"sources": [{"kind": "needles", "weight": "much"}]}, "weight must be a number above 0, got 'much'"),
        ({"min_tokens": 8, "sources": [{"kind": "needles"}]}, "64 <= min_tokens <= max_tokens, got 8 and 2048"),
        ({"max_tokens": 100, "sources": [{"kind": "needles"}]}, "got 200 and 100"),
        ({"sources": [{"kind": "local_jsonl"}]}, r"\(local_jsonl\): the option path is missing"),
        ({"sources": [{"kind": "local_jsonl", "path": "no.jsonl"}]}, "no.jsonl: no such file"),
    ],
)
def test_bad_mixtures(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        Mixture.from_config(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", sorted({*MIXTURES} - {*NEEDS_THE_HUB}), ids=lambda path: path.stem)
def test_shipped_mixtures(path: Path) -> None:
    made = Mixture.from_config(yaml.safe_load(path.read_text()))
    assert len({made.prompt(0, index, count_tokens).source.split("/")[0] for index in range(40)}) >= 3


def test_the_offline_mixture_has_every_source_that_needs_no_file() -> None:
    values = yaml.safe_load(next(path for path in MIXTURES if path.stem == "offline").read_text())
    assert sorted(source["kind"] for source in values["sources"]) == OFFLINE
    assert (values["min_tokens"], values["max_tokens"]) == (200, 2048)


def test_documents_belong_to_one_part_as_a_whole() -> None:
    training = {document.name for document in topic_documents("training") + source_documents("training")}
    evaluation = {document.name for document in topic_documents("evaluation") + source_documents("evaluation")}
    assert not training & evaluation
    assert 0.1 < len(evaluation) / len(training | evaluation) < 0.35
    assert (
        document_part("topics/try")
        == document_part("logging/handlers.py")
        == document_part("logging/__init__.py")
        == "evaluation"
    )
    assert document_part("topics/assert") == document_part("decimal.py") == document_part("_pydecimal.py") == "training"
    assert not any(name.startswith(("test/", "site-packages/")) for name in training | evaluation)


def test_docstrings_carry_their_names() -> None:
    (document,) = (document for document in source_documents("training") if document.name == "json/decoder.py")
    names = [entry.name for entry in docstrings(document)]
    assert names[:2] == ["json.decoder", "json.decoder.JSONDecodeError"]
    assert "json.decoder.JSONDecoder.decode" in names
