"""Scores of one answer against its references, each from 0 to 1: LongBench's, RULER's, and those of retrieval tasks.

LongBench: https://github.com/THUDM/LongBench, `metrics.py` and `eval.py`. RULER: https://github.com/NVIDIA/RULER,
`scripts/eval`. Both report a mean over samples times 100; here nothing is multiplied or rounded.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from rapidfuzz import fuzz
from rouge import Rouge

from keepsight.errors import UserError
from keepsight.eval.tasks.procedure_metrics import reaches_target, same_beliefs, same_route, same_rows
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


def _normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles, and more than single spaces (SQuAD's convention)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def _qa_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the two bags of words."""
    answered, expected = _normalise(prediction).split(), _normalise(reference).split()
    shared = (Counter(answered) & Counter(expected)).total()
    return 2 * shared / (len(answered) + len(expected)) if shared else 0.0


_ROUGE_L: Any = Rouge(metrics=["rouge-l"])


def _rouge_l(prediction: str, reference: str) -> float:
    """F-measure of ROUGE-L as the package `rouge` has it; 0 where it gives up, as in LongBench."""
    try:
        return float(_ROUGE_L.get_scores(prediction, reference)[0]["rouge-l"]["f"])
    # It refuses a text without a word, and it recurses over the words of a sentence.
    except (ValueError, RecursionError):
        return 0.0


def _classification(prediction: str, sample: Sample) -> float:
    return max(_class_score(prediction, reference, sample.classes) for reference in sample.references)


def _class_score(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (number of class names in the prediction) where the right one is among them.

    Names that are part of the right one do not count, but LongBench removes them from the list that it is walking
    along and so skips the name after each: of two such neighbours the second stays and halves the score.
    """
    named = [name for name in classes if name in prediction]
    position = 0
    while position < len(named):
        if named[position] != reference and named[position] in reference:
            del named[position]
        position += 1
    return 1 / len(named) if reference in named else 0.0


def _code_sim(prediction: str, reference: str) -> float:
    """Edit similarity of the first line that is neither a fence nor holds a comment, in whole percent.

    LongBench calls `fuzzywuzzy`, whose result depends on whether python-Levenshtein is installed (GPL, both); this
    is the result with it.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, reference)) / 100


def _integers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def _share(prediction: str, number: str) -> float:
    """The share of the integers in the prediction that are `number`."""
    found = _integers(prediction)
    return found.count(number) / len(found) if found else 0.0


def _retrieval(prediction: str, reference: str) -> float:
    """`_share` of the number in a reference such as `Paragraph 7`."""
    return max((_share(prediction, number) for number in _integers(reference)[:1]), default=0.0)


def _contains(text: str, part: str) -> bool:
    return bool(part) and part.lower() in text.lower()


def _printable(prediction: str) -> str:
    """RULER's cleaning: control characters become line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction).strip()


def _string_match_all(prediction: str, sample: Sample) -> float:
    """The share of the references that stand in the prediction, whatever their case."""
    text = _printable(prediction)
    return sum(_contains(text, reference) for reference in sample.references) / len(sample.references)


def _string_match_part(prediction: str, reference: str) -> float:
    return float(_contains(_printable(prediction), reference))


def _answer_in_prediction(prediction: str, reference: str) -> float:
    return float(_contains(_normalise(prediction), _normalise(reference)))


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


_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟"
    "〰〾〿–—‘’‛“”„‟…‧﹏."
)


def _chinese_words(text: str) -> list[str]:
    """The words that `jieba` finds (it logs what it loads).

    Raises:
        UserError: the package is missing.
    """
    try:
        import jieba
    except ImportError:
        raise UserError("LongBench's Chinese tasks need jieba; pip install 'keepsight[zh]'") from None
    return list(jieba.cut(text))


def _qa_f1_zh(prediction: str, reference: str) -> float:
    """`_qa_f1` over Chinese words without punctuation."""
    marks = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)

    def bag(text: str) -> Counter[str]:
        words = ("".join(word.lower().translate(marks).split()) for word in _chinese_words(text))
        return Counter(word for word in words if word)

    answered, expected = bag(prediction), bag(reference)
    shared = (answered & expected).total()
    return 2 * shared / (answered.total() + expected.total()) if shared else 0.0


def _rouge_l_zh(prediction: str, reference: str) -> float:
    return _rouge_l(" ".join(_chinese_words(prediction)), " ".join(_chinese_words(reference)))


def _chosen_letter(prediction: str, reference: str) -> float:
    """Whether the letter that LongBench v2 reads from an answer (pred.py) is the reference."""
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found[1] == reference)


def _exact_label(prediction: str, reference: str) -> float:
    """Whether the first line says the reference, after `label:` where it says that (HELMET, parse_output)."""
    line = prediction.split("\n")[0]
    found = re.search("label:(.*)", line, re.IGNORECASE)
    label = re.sub("^label:", "", (found[1] if found else line).strip(), flags=re.IGNORECASE)
    return float(_normalise(label) == _normalise(reference))


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
    "qa_f1": _best(_qa_f1),
    "qa_f1_first_line": _of_first_line(_best(_qa_f1)),
    "rouge_l": _best(_rouge_l),
    "rouge_l_first_line": _of_first_line(_best(_rouge_l)),
    "classification": _of_first_line(_classification),
    "code_sim": _best(_code_sim),
    "qa_f1_zh": _best(_qa_f1_zh),
    "rouge_l_zh": _best(_rouge_l_zh),
    "count": _best(_share),
    "retrieval": _best(_retrieval),
    # LongBench v2.
    "chosen_letter": _best(_chosen_letter),
    # LongProc.
    "same_route": _best(same_route),
    "same_rows": _best(same_rows),
    "same_beliefs": _best(same_beliefs),
    "reaches_target": _best(reaches_target),
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
    "number_in_prediction": _best(lambda prediction, reference: float(reference in _integers(prediction))),
    "number_after_hashes": _best(_number_after_hashes),
    "choice_letter": _best(_choice_letter),
}
