"""Scores of an answer against one reference, from 0 to 1, as LongBench computes them (arXiv 2308.14508).

https://github.com/THUDM/LongBench, `metrics.py` and `eval.py`.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rapidfuzz import fuzz
from rouge import Rouge

from keepsight.errors import UserError


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles, and more than single spaces (SQuAD's convention)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the two bags of words."""
    answered, expected = normalise(prediction).split(), normalise(reference).split()
    shared = (Counter(answered) & Counter(expected)).total()
    return 2 * shared / (len(answered) + len(expected)) if shared else 0.0


_ROUGE_L: Any = Rouge(metrics=["rouge-l"])


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of ROUGE-L as the package `rouge` has it; 0 where it gives up, as in LongBench."""
    try:
        return float(_ROUGE_L.get_scores(prediction, reference)[0]["rouge-l"]["f"])
    # It refuses a text without a word, and it recurses over the words of a sentence.
    except (ValueError, RecursionError):
        return 0.0


def class_score(prediction: str, reference: str, classes: Sequence[str]) -> float:
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


def code_sim(prediction: str, reference: str) -> float:
    """Edit similarity of the first line that is neither a fence nor holds a comment, in whole percent.

    LongBench calls `fuzzywuzzy`, whose result depends on whether python-Levenshtein is installed (GPL, both); this
    is the result with it.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, reference)) / 100


def integers(text: str) -> list[str]:
    """The whole numbers in a text, as they are written."""
    return re.findall(r"\d+", text)


def share_of_integers(prediction: str, number: str) -> float:
    """The share of the integers in the prediction that are `number`."""
    found = integers(prediction)
    return found.count(number) / len(found) if found else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """`share_of_integers` of the number in a reference such as `Paragraph 7`."""
    return max((share_of_integers(prediction, number) for number in integers(reference)[:1]), default=0.0)


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


def qa_f1_zh(prediction: str, reference: str) -> float:
    """`qa_f1` over Chinese words without punctuation."""
    marks = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)

    def bag(text: str) -> Counter[str]:
        words = ("".join(word.lower().translate(marks).split()) for word in _chinese_words(text))
        return Counter(word for word in words if word)

    answered, expected = bag(prediction), bag(reference)
    shared = (answered & expected).total()
    return 2 * shared / (answered.total() + expected.total()) if shared else 0.0


def rouge_l_zh(prediction: str, reference: str) -> float:
    """`rouge_l` over Chinese words."""
    return rouge_l(" ".join(_chinese_words(prediction)), " ".join(_chinese_words(reference)))


def chosen_letter(prediction: str, reference: str) -> float:
    """Whether the letter that LongBench v2 reads from an answer (pred.py) is the reference."""
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found[1] == reference)
