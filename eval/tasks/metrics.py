"""The registry of metrics, each from 0 to 1, and the metrics that several benchmarks or a `tasks.json` use.

RULER and LongBench report a mean over samples times 100; here nothing is multiplied or rounded.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from typing import Any, TypeVar

from keepsight.errors import UserError, one_line
from keepsight.eval.tasks.samples import Sample

Metric = Callable[[str, Sample], float]
Single = TypeVar("Single", bound=Callable[[str, str], float])
OfSample = TypeVar("OfSample", bound=Metric)

METRICS: dict[str, Metric] = {}
"""All metrics by name: those of this file, and of each benchmark once its module is imported."""


def metric(name: str) -> Callable[[Single], Single]:
    """Register a score against one reference; the score of a sample is the best over its references."""

    def register(single: Single) -> Single:
        def best(prediction: str, sample: Sample) -> float:
            return max(single(prediction, reference) for reference in sample.references)

        METRICS[name] = best
        return single

    return register


def sample_metric(name: str) -> Callable[[OfSample], OfSample]:
    """Register a score of a whole sample, by all of its references or its classes."""

    def register(of_sample: OfSample) -> OfSample:
        METRICS[name] = of_sample
        return of_sample

    return register


def first_line(prediction: str) -> str:
    """The first line that is not empty: after its answer a model shown examples continues with another example."""
    return prediction.lstrip("\n").split("\n", 1)[0]


def score(sample: Sample, prediction: str) -> float:
    """The score of an answer, from 0 to 1, by the sample's own metric; NaN where a judge is still to be asked.

    UserError: the metric is not in `METRICS`, cannot work with the sample's references, or gives no finite number.
    """
    if sample.judge:
        return math.nan
    if sample.metric not in METRICS:
        names = ", ".join(sorted(METRICS))
        raise UserError(
            f"sample {sample.task}/{sample.id}: unknown metric {sample.metric!r}; known: {names}",
            field="metric",
            code="unknown",
        )
    where = f"sample {sample.task}/{sample.id}: metric {sample.metric!r}"
    try:
        value = METRICS[sample.metric](CLEAN[sample.clean](prediction), sample)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        references = str(sample.references)[:60]
        raise UserError(
            f"{where} does not fit its references {references} ({one_line(error, 80)})", field="metric", code="data"
        ) from None
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{where} gives {value!r:.60}; it must give a finite number", field="metric", code="data")
    return float(value)


_TAGS = ("<think>", "Answer:", "Summary:", "The final answer is:", "The answer is:", "Next line of code:")


def _after_last_tag(prediction: str) -> str:
    for tag in _TAGS:
        prediction = prediction.split(tag)[-1]
    return prediction.strip()


CLEAN: dict[str, Callable[[str], str]] = {
    "none": lambda prediction: prediction,
    # kvpress.
    "left_stripped": str.lstrip,
    "no_control_characters": lambda prediction: re.sub(r"[\x00-\x1f]", "", prediction.strip()),
    # draft-based-approx-llm: the text after the last of its tags.
    "after_last_tag": _after_last_tag,
}
"""Post-processing of an answer before it is scored, by the protocol that has it."""


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles, and more than single spaces (SQuAD's convention)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def f1(answered: Counter[str], expected: Counter[str]) -> float:
    """Harmonic mean of precision and recall over two bags of words."""
    shared = (answered & expected).total()
    return 2 * shared / (answered.total() + expected.total()) if shared else 0.0


@metric("qa_f1")
def qa_f1(prediction: str, reference: str) -> float:
    """F1 over the two bags of normalised words."""
    return f1(Counter(normalise(prediction).split()), Counter(normalise(reference).split()))


@lru_cache(maxsize=1)
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


@metric("rouge_l")
def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of ROUGE-L by the package `rouge`; 0 where that fails, as in LongBench."""
    try:
        return float(_rouge().get_scores(prediction, reference)[0]["rouge-l"]["f"])
    # It refuses a text without a word, and it recurses over the words of a sentence.
    except (ValueError, RecursionError):
        return 0.0


@metric("qa_f1_first_line")
def _qa_f1_of_first_line(prediction: str, reference: str) -> float:
    """`qa_f1` of the first line."""
    return qa_f1(first_line(prediction), reference)


@metric("rouge_l_first_line")
def _rouge_l_of_first_line(prediction: str, reference: str) -> float:
    """`rouge_l` of the first line."""
    return rouge_l(first_line(prediction), reference)


def integers(text: str) -> list[str]:
    """The whole numbers in a text, as they are written."""
    return re.findall(r"\d+", text)


def contains(text: str, part: str) -> bool:
    """Whether a part that is not empty occurs in a text, ignoring case."""
    return bool(part) and part.lower() in text.lower()


@metric("topic_in_prediction")
def _topic_in_prediction(prediction: str, reference: str) -> float:
    """Whether the normalised reference occurs in the normalised prediction."""
    return float(contains(normalise(prediction), normalise(reference)))


@metric("answer_in_prediction")
def _answer_in_prediction(prediction: str, reference: str) -> float:
    """In the first line, as Lost in the Middle and HELMET's RAG have it: a long answer could repeat the passages."""
    return _topic_in_prediction(prediction.split("\n")[0], reference)


@metric("value_in_prediction")
def _value_in_prediction(prediction: str, reference: str) -> float:
    """Whether the reference occurs in the prediction, ignoring case."""
    return float(contains(prediction, reference))


@metric("number_in_prediction")
def _number_in_prediction(prediction: str, reference: str) -> float:
    """Whether the reference is one of the whole numbers in the prediction."""
    return float(reference in integers(prediction))


@metric("number_after_hashes")
def _number_after_hashes(prediction: str, reference: str) -> float:
    """Whether the number after the first `####`, which ends a solution of GSM8K, equals the reference's."""
    after_hashes = prediction.partition("####")[2].split("\n", 1)[0]
    answered = _amounts(after_hashes)
    expected = _amounts(reference)
    return float(bool(answered) and answered[:1] == expected[-1:])


def _amounts(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)]


@metric("choice_letter")
def _choice_letter(prediction: str, reference: str) -> float:
    """Whether the first letter A to H that stands alone is the reference's; the article in `A story` is none."""
    letter = r"\b([B-H]|A(?!\s+[a-z]))\b(?!['’])"
    answered = re.search(letter, prediction)
    expected = re.search(letter, reference)
    return float(answered is not None and expected is not None and answered[1] == expected[1])


def _printable(prediction: str) -> str:
    """RULER's cleaning: control characters become line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction).strip()


@sample_metric("string_match_all")
def _string_match_all(prediction: str, sample: Sample) -> float:
    """The share of the references that occur in the prediction, ignoring case."""
    text = _printable(prediction)
    return sum(contains(text, reference) for reference in sample.references) / len(sample.references)


@metric("string_match_part")
def _string_match_part(prediction: str, reference: str) -> float:
    """Whether the reference occurs in the prediction, ignoring case: of several, one is enough."""
    return float(contains(_printable(prediction), reference))
