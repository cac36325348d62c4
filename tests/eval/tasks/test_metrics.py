"""Each metric against values worked out by hand."""

import math
from typing import Any

import pytest

from keepsight.eval.tasks import registry  # noqa: F401 - for all metrics
from keepsight.eval.tasks.metrics import METRICS, score
from keepsight.eval.tasks.samples import Sample
from tests.refused import refused


def scored(metric: str, prediction: str, *references: str, classes: tuple[str, ...] = ()) -> float:
    sample = Sample("0", "task", 512, "prompt", references, metric, 16, classes=classes)
    return score(sample, prediction)


COLOURS = ("red", "dark red", "blue")
# Three parts of the right name in a row: removing while walking skips the second.
NESTED = ("a", "b", "c", "abc")

TRACE = "Belief:\n- Step 0: hall\n- Step 1: (its) box"
SOLUTION = "# Search\n<Solution>\n42 + 26 = 68\n68 - 6 = 62\n62 - 22 = 40\n</Solution>"

# Day 4 is spent in both cities.
TRIP = "<Plan>\n**Day 1-4:** Visit Oslo.\n**Day 4:** Fly from Oslo to Rome.\n**Day 4-6:** Visit Rome.\n</Plan>"

CASES: list[tuple[Any, ...]] = [
    # MileBench.
    ("milebench_rouge_l", "A b,\nC.", ["a x c y"], 4 / 7),
    ("milebench_word", "The number is 42.", ["42"], 1.0),
    ("milebench_word", "The number is 1425.", ["42"], 0.0),
    # Marks are dropped where they stand beside a space, else they become one.
    ("milebench_text", "On (the) 5/6 of May", ["the 5 6 of may"], 1.0),
    ("milebench_text", "On 1,5/6", ["on 156"], 1.0),
    # The article and the punctuation go: {cat, sat} against {cat, sat, on, mat}; P = 2/2, R = 2/4.
    ("qa_f1", "A cat sat.", ["the Cat sat on the mat"], 2 / 3),
    ("qa_f1", "The", ["an"], 0.0),
    # Words count as often as in both: {no: 2} against {no: 1}; P = 1/2, R = 1.
    ("qa_f1", "no no", ["no"], 2 / 3),
    ("qa_f1", "Paris", ["London", "Paris, France", "paris"], 1.0),
    ("qa_f1", "Paris\nQuestion: what", ["Paris"], 0.5),
    ("qa_f1_first_line", "\nParis\nQuestion: what", ["Paris"], 1.0),
    # The longest common subsequence of both is `a c`; P = 2/3, R = 2/4.
    ("rouge_l", "a b c", ["a x c y"], 4 / 7),
    ("rouge_l", "", ["a b"], 0.0),
    ("rouge_l", "...", ["a b"], 0.0),
    ("rouge_l_first_line", "a b\nc d", ["a b"], 1.0),
    # Half of the four characters match.
    ("code_sim", "abcd", ["abxy"], 0.5),
    ("code_sim", "\n\nreturn x\nmore", ["return x"], 1.0),
    ("code_sim", "```python\n# add\n// add\nreturn x", ["return x"], 1.0),
    ("code_sim", "# only a comment", ["return x"], 0.0),
    # Whole percent: 2 * 1 / 3.
    ("code_sim", "a", ["ab"], 0.67),
    ("count", "5, or perhaps 6", ["5"], 0.5),
    ("count", "five", ["5"], 0.0),
    ("retrieval", "Paragraph 7", ["Paragraph 7"], 1.0),
    ("retrieval", "7 or 8 or 7", ["Paragraph 7"], 2 / 3),
    ("retrieval", "none", ["Paragraph 7"], 0.0),
    ("string_match_all", "The values are 11 and ABC.", ["11", "abc", "22", "33"], 0.5),
    ("string_match_part", "It is PARIS.", ["London", "Paris"], 1.0),
    # RULER turns control characters into line breaks before it looks.
    ("string_match_part", "new\tyork", ["new\nyork"], 1.0),
    ("string_match_part", "new\tyork", ["new\tyork"], 0.0),
    ("answer_in_prediction", "It was the E.L. James novel.", ["Erika", "e l james"], 0.0),
    ("answer_in_prediction", "It was a novel by E. L. James", ["Erika", "E L. James"], 1.0),
    ("answer_in_prediction", "I do not know\nParis", ["Paris"], 0.0),
    ("answer_in_prediction", "anything", ["The"], 0.0),
    ("topic_in_prediction", "Topics:\nThe role of art, in society", ["the role of art in society"], 1.0),
    ("value_in_prediction", 'is "AB-12".', ["ab-12"], 1.0),
    ("number_in_prediction", "<29079>.", ["29079"], 1.0),
    ("number_in_prediction", "129079", ["29079"], 0.0),
    ("number_after_hashes", "2 + 3 = 5\n#### 2,317.00\n\nQuestion: 4\n#### 9", ["2317"], 1.0),
    ("number_after_hashes", "#### $18 a day", ["18"], 1.0),
    ("number_after_hashes", "#### -3", ["3"], 0.0),
    ("number_after_hashes", "####\n\nQuestion: Tom has 18", ["18"], 0.0),
    ("choice_letter", "(D) Yes, because", ["(D) Because of the war"], 1.0),
    ("choice_letter", "The answer is D.", ["(D) Because of the war"], 1.0),
    ("choice_letter", "A story of B", ["(B) x"], 1.0),
    ("choice_letter", "(B), not (D)", ["(D) x"], 0.0),
    # 我 is not in the reference, the punctuation does not count: {喜欢, 北京} of {我, 喜欢, 北京}; P = 2/3, R = 1.
    ("qa_f1_zh", "我喜欢北京。", ["喜欢，北京"], 0.8),
    ("rouge_l_zh", "我喜欢北京", ["我喜欢北京"], 1.0),
    ("chosen_letter", "The correct answer is (B)", ["B"], 1.0),
    ("chosen_letter", "**The correct answer is C**, as the text says", ["C"], 1.0),
    ("same_route", "So: <Route>\nFrom A, take a bus to B.\n</Route>", ["From A, take a bus to B."], 1.0),
    ("same_route", "From A, take a bus to B.", ["From A, take a bus to B."], 0.0),
    # Of two answered rows one is right, of three expected rows one is found: P = 1/2, R = 1/3.
    ("same_rows", "```tsv\nx\ty\nThe A\t1.\nB\t3\n```", ["x\ty\na\t1\nb\t2\nc\t3"], 0.4),
    ("same_rows", "y\tx\nA\t1\nend", ["x\ty\na\t1"], 1.0),
    ("same_rows", "x\nA", ["x\ty\na\t1"], 0.0),
    ("same_beliefs", "Thinking\n- Step 0: {x}\n- Step 0: in the Hall\n- Step 1: It's a box", [TRACE], 1.0),
    ("same_beliefs", "- Step 0: hall\n- Step 1: its bag", [TRACE], 0.0),
    ("reaches_target", SOLUTION, ["26 42 6 22 -> 40"], 1.0),
    ("reaches_target", SOLUTION, ["26 42 6 22 -> 41"], 0.0),
    ("reaches_target", SOLUTION.replace("68 - 6 = 62", "68 - 6 = 63"), ["26 42 6 22 -> 40"], 0.0),
    ("reaches_target", SOLUTION.replace("26", "25").replace("68", "67"), ["26 42 6 22 -> 40"], 0.0),
    ("reaches_target", f"<Solution>{'9' * 5000} + 1 = 2\n2 + 2 = 4\n4 + 4 = 8</Solution>", ["9 1 2 4 -> 8"], 0.0),
    ("reaches_target", "<Solution>7 / 2 = 3\n3 + 0 = 3\n3 + 0 = 3</Solution>", ["7 2 0 0 -> 3"], 0.0),
    ("same_trip", f"<Solving Procedure>Day 1-9</Solving Procedure>{TRIP}", ["Oslo 4, Rome 3"], 1.0),
    ("same_trip", TRIP, ["Rome 4, Oslo 3"], 0.0),
    ("same_trip", TRIP, ["Oslo 4, Rome 3, Bern 2"], 0.0),
    ("same_trip", TRIP, ["Oslo 4"], 1.0),  # what comes after the expected trip is not looked at
    ("same_trip", TRIP.replace("</Plan>", ""), ["Oslo 4, Rome 3"], 0.0),
    ("same_trip", "<Plan>Oslo, then Rome</Plan>", ["Oslo 4, Rome 3"], 0.0),
    ("exact_label", " Label: 12\nmore", ["12"], 1.0),
    ("exact_label", "The LABEL: label: 12", ["12"], 1.0),
    ("exact_label", "\n12", ["12"], 0.0),
    ("ndcg_10", " 12 > 5 > 12 > 7\n5 > 12", ["7 0, 12 3, 5 1"], 1.0),
    ("ndcg_10", "[ID: 7] > ID12", ["7 0, 12 1"], 1 / math.log2(3)),
    ("ndcg_10", "7 > 12", ["7 0, 12 0"], 0.0),
    (
        "passes_tests",
        "int main() {}",
        ['[[["2"], ["2"]]]'],
        0.0,
    ),  # no code block
    # Twice the words: 1 - (2 - 1) / 3; half of them: 1 - (2 - 1) / 2; four times or a third: nothing.
    ("wanted_length", "one two three four", ["2"], 2 / 3),
    ("wanted_length", "one", ["2"], 0.5),
    ("wanted_length", "one 22 三 x4", ["2"], 1.0),
    ("wanted_length", "a a a a", ["1"], 0.0),
    ("wanted_length", "", ["3"], 0.0),
]


@pytest.mark.parametrize(("metric", "prediction", "references", "expected"), CASES)
def test_value(metric: str, prediction: str, references: list[str], expected: float) -> None:
    assert scored(metric, prediction, *references) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "gold", "classes", "expected"),
    [
        ("It is blue", "blue", COLOURS, 1.0),
        ("blue or red", "blue", COLOURS, 0.5),
        ("dark red", "dark red", COLOURS, 1.0),
        # "red" is no part of "blue", and stays beside "dark red".
        ("dark red", "blue", COLOURS, 0.0),
        ("abc", "abc", NESTED, 0.5),
        ("Blue", "blue", COLOURS, 0.0),
        ("\nblue\nred", "blue", COLOURS, 1.0),
    ],
)
def test_classification(prediction: str, gold: str, classes: tuple[str, ...], expected: float) -> None:
    assert scored("classification", prediction, gold, classes=classes) == expected


def test_rouge_l_gives_up_on_a_sentence_too_long_to_recurse_over() -> None:
    words = " ".join(f"w{number}" for number in range(1200))
    assert scored("rouge_l", words, words) == 0.0


def test_every_metric_is_tried() -> None:
    elsewhere = {"classification", "milebench_choice", "listed_answers", "short_answers", "letter_or_option"}
    assert {case[0] for case in CASES} | elsewhere == set(METRICS)


def test_unknown_metric_names_the_known_ones() -> None:
    with refused("metric", "unknown"):
        scored("own_f1", "x", "y")


@pytest.mark.parametrize(
    ("prediction", "reference", "expected", "classes"),
    [
        # Letter and text, text without spaces, the letter alone, letters of a longer text, and C for nothing.
        ("B. Dark red, I think.", "dark red", 1.0, COLOURS),
        ("It turned blue!", "blue", 1.0, COLOURS),
        ("It is darkred", "dark red", 1.0, COLOURS),
        ("dark red", "red", 0.0, COLOURS),
        (" (b)", "dark red", 1.0, COLOURS),
        ("", "blue", 1.0, COLOURS),
        # A point between digits stays, and is then found beside its letter alone.
        ("A. 2.5", "2.5", 1.0, ("2.5", "3")),
        ("2.5", "2.5", 0.0, ("2.5", "3")),
    ],
)
def test_milebench_choice(prediction: str, reference: str, expected: float, classes: tuple[str, ...]) -> None:
    assert scored("milebench_choice", prediction, reference, classes=classes) == expected


@pytest.mark.parametrize(
    ("metric", "reference"),
    [
        ("wanted_length", "long"),
        ("wanted_length", "0"),
        ("reaches_target", "a b -> c"),
        ("reaches_target", "1 2"),
        ("milebench_choice", "green"),
        ("rouge_l", None),
        ("qa_f1", 7),
        ("string_match_all", ["a"]),
    ],
)
def test_references_that_a_metric_cannot_use_end_in_one_line(metric: str, reference: Any) -> None:
    with refused("metric", "data"):
        scored(metric, "7", reference)


def test_a_table_with_a_carriage_return_scores_nothing() -> None:
    assert scored("same_rows", "x\ty\na\rb\tc\nd\te", "x\ty\na\tb") == 0.0
