"""Scores of an answer as MileBench computes them (arXiv 2404.18532).

https://github.com/MileBench/MileBench, `evaluate.py`. Its oddities are kept, since published tables have them.
"""

import re
from collections.abc import Sequence

from keepsight.eval.tasks.longbench_metrics import rouge_l

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_PERIODS = 32  # it passes a flag of this value where re.sub takes a count


def plain(text: str) -> str:
    """Lower case in one line; marks are spaces, or nothing where they stand beside one."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    bare, digits = text, re.search(r"\d,\d", text)
    for mark in _MARKS:
        beside = f"{mark} " in text or f" {mark}" in text
        bare = bare.replace(mark, "" if beside or digits else " ")
    bare = re.sub(r"\.(?!\d)", "", bare, count=_PERIODS)
    return bare.strip("'").strip('"').strip().lower()


def chosen(answer: str, choices: Sequence[str]) -> str:
    """The letter of the choice that an answer names, as A for the first; other text where it names none.

    An answer names a choice by letter and text, by its text (which is found only without signs that are special in
    regular expressions, such as the point of 2.5), or by the letter alone. No answer is C.
    """
    answer, plain_choices = plain(answer), [plain(choice) for choice in choices]
    if not answer:
        return "C"
    letters = [chr(ord("A") + place) for place in range(len(choices))]
    named = [_escaped(plain(f"{letter} {choice}")) for letter, choice in zip(letters, plain_choices, strict=True)]
    if found := re.search("|".join(named), answer):
        return found[0][:1].upper()
    texts = [_escaped(choice).replace(" ", "") for choice in plain_choices]
    if (found := re.search("|".join(texts), answer.replace(" ", ""))) and found[0].strip() in texts:
        return letters[texts.index(found[0].strip())]
    return "".join(letter for letter in answer.upper() if letter in letters)


def right_choice(answer: str, reference: str, choices: Sequence[str]) -> float:
    """Whether an answer names the reference among the choices."""
    place = [plain(choice) for choice in choices].index(plain(reference))
    return float(chosen(answer, choices) == chr(ord("A") + place))


def plain_rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L of the plain texts; 0 for an empty answer."""
    return rouge_l(plain(answer), plain(reference))


def has_word(answer: str, reference: str) -> float:
    """Whether the reference is a word of the answer: the needles in a haystack."""
    return float(plain(reference) in plain(answer).split())


def has_text(answer: str, reference: str) -> float:
    """Whether the reference stands in the answer: MMCoQA."""
    return float(plain(reference) in plain(answer))


def _escaped(text: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)
