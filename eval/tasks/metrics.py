"""The metrics by name, each from 0 to 1: LongBench's, RULER's, and those of retrieval tasks.

RULER: https://github.com/NVIDIA/RULER, `scripts/eval`. It and LongBench report a mean over samples times 100; here
nothing is multiplied or rounded.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal

from keepsight.errors import UserError
from keepsight.eval.tasks.longbench_metrics import (
    chosen_letter,
    class_score,
    code_sim,
    integers,
    normalise,
    qa_f1,
    qa_f1_zh,
    retrieval,
    rouge_l,
    rouge_l_zh,
    share_of_integers,
)
from keepsight.eval.tasks.milebench_metrics import has_text, has_word, plain_rouge_l, right_choice
from keepsight.eval.tasks.procedure_metrics import reaches_target, same_beliefs, same_route, same_rows, same_trip
from keepsight.eval.tasks.samples import Sample

Metric = Callable[[str, Sample], float]


def score(sample: Sample, prediction: str) -> float:
    """The score of an answer, from 0 to 1, by the sample's own metric; NaN where a judge is still to be asked.

    Raises:
        UserError: the sample names a metric that is not in `METRICS`.
    """
    if sample.judge:
        return math.nan
    if sample.metric not in METRICS:
        known = ", ".join(sorted(METRICS))
        raise UserError(f"sample {sample.task}/{sample.id}: unknown metric {sample.metric!r}; known: {known}")
    return METRICS[sample.metric](CLEAN[sample.clean](prediction), sample)


def _best(single: Callable[[str, str], float]) -> Metric:
    """The highest score over the references of a score against one reference."""
    return lambda prediction, sample: max(single(prediction, reference) for reference in sample.references)


def _of_first_line(metric: Metric) -> Metric:
    """`metric` of the first line alone: after its answer a model shown examples goes on with one more example."""
    return lambda prediction, sample: metric(_first_line(prediction), sample)


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n", 1)[0]


def _classification(prediction: str, sample: Sample) -> float:
    return max(class_score(prediction, reference, sample.classes) for reference in sample.references)


def _right_choice(prediction: str, sample: Sample) -> float:
    return right_choice(prediction, sample.references[0], sample.classes)


def _contains(text: str, part: str) -> bool:
    return bool(part) and part.lower() in text.lower()


def _printable(prediction: str) -> str:
    """RULER's cleaning: control characters become line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction).strip()


def _string_match_all(prediction: str, sample: Sample) -> float:
    """The share of the references that occur in the prediction, ignoring case."""
    text = _printable(prediction)
    return sum(_contains(text, reference) for reference in sample.references) / len(sample.references)


def _string_match_part(prediction: str, reference: str) -> float:
    return float(_contains(_printable(prediction), reference))


def _answer_in_prediction(prediction: str, reference: str) -> float:
    return float(_contains(normalise(prediction), normalise(reference)))


def _amounts(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)]


def _number_after_hashes(prediction: str, reference: str) -> float:
    """Whether the number after the first `####`, which ends a solution of GSM8K, equals the reference's."""
    answered = _amounts(prediction.partition("####")[2].split("\n", 1)[0])
    return float(bool(answered) and answered[:1] == _amounts(reference)[-1:])


def _choice_letter(prediction: str, reference: str) -> float:
    """Whether the first letter A to H that stands alone is the reference's; the article in `A story` is none."""
    letter = r"\b([B-H]|A(?!\s+[a-z]))\b(?!['’])"
    answered, expected = re.search(letter, prediction), re.search(letter, reference)
    return float(answered is not None and expected is not None and answered[1] == expected[1])


def _exact_label(prediction: str, reference: str) -> float:
    """Whether the first line says the reference, after `label:` where it says that (HELMET, parse_output)."""
    line = prediction.split("\n")[0]
    found = re.search("label:(.*)", line, re.IGNORECASE)
    label = re.sub("^label:", "", (found[1] if found else line).strip(), flags=re.IGNORECASE)
    return float(normalise(label) == normalise(reference))


def _wanted_length(prediction: str, reference: str) -> float:
    """How near a text comes to its number of words, a Chinese character being one; 0 at 4 times or a third of it.

    LongWriter's S_l, eval_length.py and count_words in pred.py.
    """
    words, wanted = len(re.findall(r"[\u4e00-\u9fff]|\b[a-zA-Z]+\b", prediction)), int(reference)
    if words > wanted:
        return max(0.0, 1 - (words / wanted - 1) / 3)
    return max(0.0, 1 - (wanted / words - 1) / 2) if words else 0.0


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
    # draft-based-approx-llm: what stands after the last of its tags.
    "after_last_tag": _after_last_tag,
}
"""What is done to an answer before its metric sees it, by the protocol that does so."""

METRICS: dict[str, Metric] = {
    # LongBench. It cuts the answers of few-shot tasks after the first line; its classification tasks all are.
    "qa_f1": _best(qa_f1),
    "qa_f1_first_line": _of_first_line(_best(qa_f1)),
    "rouge_l": _best(rouge_l),
    "rouge_l_first_line": _of_first_line(_best(rouge_l)),
    "classification": _of_first_line(_classification),
    "code_sim": _best(code_sim),
    "qa_f1_zh": _best(qa_f1_zh),
    "rouge_l_zh": _best(rouge_l_zh),
    "count": _best(share_of_integers),
    "retrieval": _best(retrieval),
    # LongBench v2.
    "chosen_letter": _best(chosen_letter),
    # LongProc.
    "same_route": _best(same_route),
    "same_rows": _best(same_rows),
    "same_beliefs": _best(same_beliefs),
    "reaches_target": _best(reaches_target),
    "same_trip": _best(same_trip),
    # MileBench.
    "milebench_choice": _right_choice,
    "milebench_rouge_l": _best(plain_rouge_l),
    "milebench_word": _best(has_word),
    "milebench_text": _best(has_text),
    # HELMET.
    "exact_label": _best(_exact_label),
    # LongBench-Write.
    "wanted_length": _best(_wanted_length),
    # RULER.
    "string_match_all": _string_match_all,
    "string_match_part": _best(_string_match_part),
    # A whole answer could repeat the passages, which hold what is asked for: Lost in the Middle and HELMET's RAG take
    # what stands before the first line break.
    "answer_in_prediction": lambda prediction, sample: _best(_answer_in_prediction)(prediction.split("\n")[0], sample),
    "topic_in_prediction": _best(_answer_in_prediction),
    "value_in_prediction": _best(lambda prediction, reference: float(_contains(prediction, reference))),
    "number_in_prediction": _best(lambda prediction, reference: float(reference in integers(prediction))),
    "number_after_hashes": _best(_number_after_hashes),
    "choice_letter": _best(_choice_letter),
}
