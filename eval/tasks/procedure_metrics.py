"""The scores of LongProc's tasks whose right answer is one text (princeton-pli/LongProc, longproc/*_evaluator.py)."""

import csv
import re
import string
from fractions import Fraction
from itertools import pairwise

_ARTICLES = r"\b(?:a|an|the)\b"
_TOM_WORDS = r"\b(?:a|an|the|on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
_NO_MARKS = str.maketrans("", "", string.punctuation + "’")


def same_route(prediction: str, reference: str) -> float:
    """path_traversal: whether what stands between <Route> and </Route> is the reference."""
    return float(_tagged(prediction, "Route") == reference.strip())


def _tagged(text: str, tag: str) -> str | None:
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return text[start + len(tag) + 2 : end].strip() if start >= 0 and end >= 0 else None


def same_beliefs(prediction: str, reference: str) -> float:
    """tom_tracking: whether the last trace names the same belief at every step, up to little words and punctuation."""
    trace = prediction[max(prediction.rfind("- Step 0:"), 0) :]
    return float(_beliefs(trace) == _beliefs(reference))


def _beliefs(text: str) -> list[str]:
    steps = (line.split("-", 1)[1] for line in text.strip().split("\n") if re.match(r"- Step \d+:", line))
    return [" ".join(re.sub(_TOM_WORDS, " ", step.lower().translate(_NO_MARKS)).split()) for step in steps]


def same_trip(prediction: str, reference: str) -> float:
    """travel_planning: whether the trip begins with the cities of the reference, each for as many days.

    Args:
        prediction: Holds the plan between <Plan> and </Plan>: lines with days such as `Day 1-4`, and flights.
        reference: Such as `Oslo 4, Rome 3`; a day of travel counts for both cities.
    """
    plan = _tagged(prediction, "Plan") or ""
    ends = re.findall(r"^.*?\d+-(\d{1,9})", plan, re.MULTILINE)
    flights = re.findall(r"^.*Day (\d{1,9}).*from (\w+) to (\w+)", plan, re.MULTILINE)
    if not ends or not flights:
        return 0.0
    days = [1, *(int(day) for day, _, _ in flights), int(ends[-1])]
    cities = [flights[0][1], *(city for _, _, city in flights)]
    stays = [f"{city} {end - start + 1}" for city, (start, end) in zip(cities, pairwise(days), strict=True)]
    wanted = reference.split(", ")
    return float(stays[: len(wanted)] == wanted)


def reaches_target(prediction: str, reference: str) -> float:
    """countdown: whether three right equations use each number once and end at the target.

    Args:
        prediction: Holds the equations between <Solution> and </Solution>.
        reference: Such as `26 42 6 22 -> 40`.
    """
    given, _, target = reference.partition(" -> ")
    numbers, lines = [int(number) for number in given.split()], (_tagged(prediction, "Solution") or "").split("\n")
    for line in lines:
        found = re.fullmatch(r"\s*(-?\d{1,99})\s*([-+*/])\s*(-?\d{1,99})\s*=\s*(-?\d{1,99})\s*", line)
        if found is None or not _holds(int(found[1]), found[2], int(found[3]), int(found[4])):
            return 0.0
        for used in (int(found[1]), int(found[3])):
            if used not in numbers:
                return 0.0
            numbers.remove(used)
        numbers.append(int(found[4]))
    return float(len(lines) == 3 and numbers[0] == int(target))


def _holds(left: int, sign: str, right: int, result: int) -> bool:
    if sign == "/":
        return right != 0 and Fraction(left, right) == result
    return {"+": left + right, "-": left - right, "*": left * right}[sign] == result


def same_rows(prediction: str, reference: str) -> float:
    """html_to_tsv: F1 over the rows of the two tables, whatever their order; cells are normalised."""
    found = re.search(r"```tsv([\s\S]*)```", prediction)
    text = found[1] if found else prediction.split("```tsv")[1] if "```tsv" in prediction else prediction
    (width, expected), (own_width, answered) = _table(reference), _table(text)
    if not expected or not answered or width != own_width:
        return 0.0
    precision = sum(row in expected for row in answered) / len(answered)
    recall = sum(row in answered for row in expected) / len(expected)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _table(text: str) -> tuple[int, list[tuple[str, ...]]]:
    """Columns of the header, and the rows: a broken last one is left out, the cells of other broken ones are N/A."""
    header, *rows = list(csv.reader(text.strip().split("\n"), delimiter="\t")) or [[]]
    if rows and len(rows[-1]) != len(header):
        rows.pop()
    whole = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return len(header), [tuple(map(_normalised, row)) for row in whole]


def _normalised(cell: str) -> str:
    bare = cell.lower().translate(str.maketrans("", "", string.punctuation))
    return "".join(re.sub(_ARTICLES, " ", bare).split())
