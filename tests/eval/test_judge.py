"""What a judge is asked, and what its words are worth, against FastChat's and LongWriter's definitions."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from keepsight.errors import BadRow, Code
from keepsight.eval.judge import LONGBENCH_WRITE, Judge
from keepsight.eval.record import ResultRow
from keepsight.eval.tasks.samples import Sample
from tests.eval.judging import endpoint
from tests.eval.report.results import row
from tests.refused import refused

FIRST = Sample("81", "mt_bench_turn_1", 512, "Name a {fish}.", (), "mt_bench", 16, judge="j")
SECOND = Sample("81", "mt_bench_turn_2", 512, "And a bird?", (), "mt_bench", 16, earlier=(FIRST.prompt,), judge="j")
MATHS = Sample("111", "mt_bench_turn_1", 512, "1 + 1?", ("two", "three"), "mt_bench", 16, judge="j")
MATHS_AGAIN = Sample(
    "111", "mt_bench_turn_2", 512, "And 1?", ("two", "three"), "mt_bench", 16, earlier=("1 + 1?",), judge="j"
)
TEXT = Sample("0", "longwriter", 512, "Write 100 words.", (), LONGBENCH_WRITE, 16, judge="j")
MARKS = {"Relevance": 5, "Accuracy": 4, "Coherence": 3, "Clarity": 2, "Breadth and Depth": 1, "Reading Experience": 3}


def rows(*answers: str, before: tuple[str, ...] = ()) -> list[ResultRow]:
    return [row("m", 64, math.nan, answer=answer, before=[*before] or None) for answer in answers]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.endpoint.FIRST_WAIT", 0.0)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Good. Rating: [[7]]", 0.7),
        ("[[2]] at first, then [[8.5]]", 0.85),
        ("<think>[[3]]</think> Rating: [[8]]", 0.8),
        ("so [[3]] </think> Rating: [[8]]", 0.8),
        ('It says "[[10]]", `[[9]]`.\n> [[10]]\nRating: [[4]]\nThe format was "[[5]]".', 0.4),
        ("<think>[[3]] <think>[[2]]</think> [[1]]</think> Rating: [[8]] ", 0.8),
        ("<reasoning>[[3]]</reasoning>~~~\n[[2]]\n~~~\nRating: [[8]]\n```\nRating: [[5]]\n```", 0.8),
        ("It isn't '[[10]]', it's “the\nworst”: [[4]]", 0.4),
        ("[THINK][[3]][/THINK][[8]]<think >[[2]]", 0.8),
        ("<|channel|>analysis<|message|>[[3]]<|end|><|channel|>final<|message|>[[8]]", 0.8),
        ("[Reasoning] It is short. Rating: [[8]]", 0.8),
        ("Rating: [6]", 0.6),
        ("of [3], but [[4]]", 0.4),
    ],
)
def test_a_single_answer_is_rated(words: str, expected: float) -> None:
    with endpoint(lambda _: words) as heard:
        (judged,) = Judge(heard.url).score(FIRST, rows(" A cod. "))
    assert judged.score == pytest.approx(expected)
    assert judged.judgments == [words]
    (body,) = heard.bodies
    assert body["temperature"] == 0
    assert body["max_tokens"] == 2048
    assert body["model"] == "gpt-4"
    system, user = body["messages"]
    assert system == {"role": "system", "content": "You are a helpful assistant."}
    assert user["content"].startswith(
        "[Instruction]\nPlease act as an impartial judge and evaluate the quality of the "
    )
    assert user["content"].endswith(
        '"Rating: [[5]]".\n\n[Question]\nName a {fish}.\n\n'
        "[The Start of Assistant's Answer]\nA cod.\n[The End of Assistant's Answer]"
    )


def test_the_second_turn_is_judged_with_the_first() -> None:
    with endpoint(lambda _: "[[5]]") as heard:
        Judge(heard.url).score(SECOND, rows("A gull.", before=("A cod.",)))
        Judge(heard.url).score(MATHS, rows("2"))
        Judge(heard.url).score(MATHS_AGAIN, rows("3", before=("2",)))
    general, maths, maths_again = (body["messages"][-1]["content"] for body in heard.bodies)
    conversation = (
        "### User:\nName a {fish}.\n\n### Assistant A:\nA cod.\n\n### User:\nAnd a bird?\n\n### Assistant A:\nA gull."
    )
    assert general == (
        f"<|The Start of Assistant A's Conversation with User|>\n\n{conversation}\n\n"
        "<|The End of Assistant A's Conversation with User|>"
    )
    assert "second user question" in heard.bodies[0]["messages"][0]["content"]
    assert "[The Start of Reference Answer]\ntwo\n[The End of Reference Answer]" in maths
    assert "three" not in maths
    assert maths_again.startswith(
        "<|The Start of Reference Answer|>\n\n### User:\n1 + 1?\n\n### Reference answer:\ntwo\n\n"
    )
    end_of_reference = "### User:\nAnd 1?\n\n### Reference answer:\nthree\n\n<|The End of Reference Answer|>\n\n\n<|The"
    assert end_of_reference in maths_again


def test_equal_answers_are_judged_once_and_judged_rows_keep_their_scores() -> None:
    with endpoint(lambda _: "[[9]]") as heard:
        judged_before = row("m", 64, 0.3, answer="judged before")
        judged = Judge(heard.url).score(FIRST, [*rows("same", "same", "other"), judged_before])
    assert [judged_row.score for judged_row in judged] == [0.9, 0.9, 0.9, 0.3]
    assert len(heard.bodies) == 2


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    # In game 1 assistant A is the variant, in game 2 it is the full cache.
    [("AB", 1.0), ("BA", 0.0), ("AA", 0.5), ("CC", 0.5), ("AC", 0.5), ("CB", 0.5)],
)
def test_pairs_are_compared_in_both_orders(verdicts: str, expected: float) -> None:
    verdict_of_game_1 = verdicts[0]
    verdict_of_game_2 = verdicts[1]

    def say(body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        if text.index("variant's") < text.index("full one's"):
            return f"I think [[{verdict_of_game_1}]]"
        return f"I think [[{verdict_of_game_2}]]"

    with endpoint(say) as heard:
        full, variant, same_as_full = Judge(heard.url, mode="pairwise").score(
            FIRST, rows("full one's", "variant's", "full one's")
        )
    assert variant.score == expected
    assert full.score == 0.5
    assert same_as_full.score == 0.5
    assert len(heard.bodies) == 2
    prompts = [body["messages"][1]["content"] for body in heard.bodies]
    prompt_of_game_1 = (
        "[User Question]\nName a {fish}.\n\n[The Start of Assistant A's Answer]\nvariant's\n"
        "[The End of Assistant A's Answer]\n\n[The Start of Assistant B's Answer]\nfull one's\n"
        "[The End of Assistant B's Answer]"
    )
    assert prompt_of_game_1 in prompts


def test_texts_get_six_marks() -> None:
    no_numbers = json.dumps(dict.fromkeys(MARKS, True))
    one_mark = json.dumps({"Relevance": 5})
    all_marks = f"So:\n```json\n{json.dumps(MARKS, indent=1)}\n```"
    replies = iter([no_numbers, one_mark, all_marks])
    with endpoint(lambda _: next(replies)) as heard:
        (judged,) = Judge(heard.url).score(TEXT, rows("Words."))
    assert judged.score == pytest.approx((4 + 3 + 2 + 1 + 0 + 2) / 4 / 6)
    assert [body["temperature"] for body in heard.bodies] == [0.5] * 3
    (message,) = heard.bodies[0]["messages"]
    assert "<User Request>\n\nWrite 100 words.\n\n</User Request>\n\n<Response>\n\nWords." in message["content"]


def test_no_verdict_and_no_endpoint_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint(lambda _: "It is fine.") as heard:
        with refused("judge.model", "data", BadRow):
            Judge(heard.url).score(FIRST, rows("A cod."))
        assert [body["temperature"] for body in heard.bodies] == [0, 0.5, 0.5, 0.5, 0.5]
    thinking = {"finish_reason": "length", "message": {"content": None, "reasoning_content": "[[3]]"}}
    with endpoint(lambda _: thinking) as heard, refused("judge.model", "data", BadRow):
        Judge(heard.url).score(FIRST, rows("A cod."))
    with endpoint(lambda _: 401) as heard, refused("judge.url", "service"):
        Judge(heard.url).score(FIRST, rows("A cod."))
    assert len(heard.bodies) == 1
    replies: Iterator[Any] = iter([500, 429, {"message": None}, {"message": {"content": [7]}}, "[[1]]"])
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with endpoint(lambda _: next(replies)) as heard:
        (judged,) = Judge(heard.url).score(FIRST, rows("A cod."))
    assert judged.score == 0.1
    assert {headers["authorization"] for headers in heard.headers} == {"Bearer secret"}
    with refused("judge.url", "service"):
        Judge(heard.url).score(FIRST, rows("A cod."))  # it is gone


@pytest.mark.parametrize(
    "reply",
    [
        {"finish_reason": "content_filter", "message": {"content": None}},
        {"finish_reason": "content_filter", "message": {"content": "[[1"}},
        (400, {"code": "content_filter", "message": "The response was filtered"}),
        (403, {"message": "Blocked by our Content Policy."}),
        (400, {"message": "max_tokens is too large: this model's maximum context length is 8192 tokens."}),
    ],
)
def test_what_the_judge_refuses_to_read_is_a_bad_row(reply: Any) -> None:
    with endpoint(lambda _: reply) as heard, pytest.raises(BadRow, match=r"judge.* mt_bench_turn_1/81"):
        Judge(heard.url).score(FIRST, rows("A cod."))
    assert len(heard.bodies) == 1


@pytest.mark.parametrize(
    ("judge", "field", "code"),
    [
        (Judge(mode="both"), "judge.mode", "unknown"),
        (Judge(parallel=0), "judge.parallel", "range"),
        (Judge("localhost:8000"), "judge.url", "type"),
    ],
)
def test_bad_keys_are_refused(judge: Judge, field: str, code: Code) -> None:
    with refused(field, code):
        judge.check()


@pytest.mark.parametrize(
    "words",
    [
        *("[[0]]", "[[11]]", "[[NaN]]", '"[[7]]"', "```\n[[7]]", "> [[7]]"),
        *("<think>[[3]]", "[THINK][[3]][/THINK] I can't.", "<seed:think>[[3]]", "<Think>[[3]]</Think>", "◁think▷[[3]]"),
    ],
)
def test_marks_outside_the_scale_thinking_and_quotes_are_no_verdict(words: str) -> None:
    with endpoint(lambda _: words) as heard, refused("judge.model", "data"):
        Judge(heard.url).score(FIRST, rows("A cod."))


def test_nan_among_six_marks_is_no_verdict() -> None:
    def marks(clarity: float | None) -> str:
        return json.dumps(MARKS | {"Clarity": clarity})

    replies = iter(
        [
            marks(math.nan),
            marks(9),
            marks(None),
            "[" * 100_000,
            f"<think>{marks(5)}</think>{json.dumps(MARKS)}",
        ]
    )
    with endpoint(lambda _: next(replies)) as heard:
        (judged,) = Judge(heard.url).score(TEXT, rows("Words."))
    assert judged.score == pytest.approx(0.5)


def test_a_judge_that_refuses_parameters_is_asked_without_them() -> None:
    def say(body: dict[str, Any]) -> str | tuple[int, str]:
        for name in ("max_tokens", "temperature"):
            if name in body:
                return 400, f"Unsupported parameter: {name!r}"
        return "[[7]]"

    with endpoint(say) as heard:
        judge = Judge(heard.url, options={"reasoning_effort": "low"})

        def score() -> float:
            (judged,) = judge.score(FIRST, rows("A cod."))
            return judged.score

        assert score() == 0.7
        assert len(heard.bodies) == 3
        assert heard.bodies[-1]["max_completion_tokens"] == 2048
        assert heard.bodies[-1]["reasoning_effort"] == "low"
        judge.options = {"max_completion_tokens": 99, "temperature": None}
        assert score() == 0.7
        assert len(heard.bodies) == 4
        judge.options = {"max_tokens": 99, "temperature": None}
        assert score() == 0.7
    assert len(heard.bodies) == 6
    assert heard.bodies[-1].keys() == {"model", "messages", "max_completion_tokens"}
    assert heard.bodies[-1]["max_completion_tokens"] == 99


def test_helmets_answers_and_summaries_are_marked() -> None:
    """Fluency times correctness; a summary's fluency times the F1 of its points and sentences."""
    question = "\n\nQuestion: Who?"
    answer = Sample("1", "t", 1, f"text{question}", ("Ada", "A."), "helmet-answer", 9, question=question, judge="j")
    with endpoint(lambda _: 'So {"fluency": 1, "correctness": 2}') as heard:
        (judged,) = Judge(heard.url, mode="pairwise").score(answer, rows("Bob"))
    assert judged.score == pytest.approx(2 / 3)
    (message,) = heard.bodies[0]["messages"]
    assert message["content"].endswith("\n\nQuestion: Who?\nCorrect answers: Ada; A.\nAnswer: Bob")
    replies = {
        "key points": '{"recall": 1}',
        "sentences": '{"precision": 3, "sentences": 4}',
        "fluency": '{"fluency": 1}',
    }

    def say(body: dict[str, Any]) -> str:
        instruction, *_ = body["messages"][0]["content"].split("\n")
        return next(reply for subject, reply in replies.items() if subject in instruction)

    summary = Sample("1", "t", 1, "text", ("expert's", "one", "two"), "helmet-summary", 9, judge="j")
    with endpoint(say) as heard:
        (judged,) = Judge(heard.url).score(summary, rows("short"))
        assert judged.score == pytest.approx(2 * 0.5 * 0.75 / 1.25)
        assert judged.judgments is not None
        assert len(judged.judgments) == 3
        prompts = [body["messages"][0]["content"] for body in heard.bodies]
        assert any("Key points:\n1. one\n2. two\n" in prompt for prompt in prompts)
        assert any("Expert's summary: expert's\n" in prompt for prompt in prompts)
        replies["fluency"] = '{"fluency": 0}'
        (judged,) = Judge(heard.url).score(summary, rows("short"))
        assert judged.score == 0
        replies["key points"] = '{"recall": 3}'  # of two
        with refused("judge.model", "data", BadRow):
            Judge(heard.url).score(summary, rows("short"))
