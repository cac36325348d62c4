"""Prompts about a table of records: one cell, a row, or all rows that have a value."""

import csv
import html
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from keepsight.data_gen.prompts import Prompt, Request, Share, fit_prompt, user_prompt
from keepsight.data_gen.synthetic import frame_question
from keepsight.data_gen.words import distinct, draw, wordings

_ROW_NAMES = {"employee": "person", "project": "project", "device": "device", "order": "order", "part": "pair"}
"""What a row is about, by the kind of word in its first column."""

_COLUMNS = {
    "city": "city",
    "code": "code",
    "color": "color",
    "contact": "person",
    "date": "date",
    "day": "day",
    "location": "spot",
    "number": "digits",
    "price": "price",
    "time": "time",
}
"""Names of further columns, with the kind of word in their cells."""

_REPEATING_COLUMNS = ("city", "color", "day", "location")
"""Columns whose values occur in several rows."""

_MOST_LISTED = 6
"""A question about all rows with a value has at most this many rows as its answer."""

TextRow = list[str]
"""The cells of a row of a table."""


def _as_csv(columns: TextRow, rows: list[TextRow]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def _as_markdown(columns: TextRow, rows: list[TextRow]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _as_tabs(columns: TextRow, rows: list[TextRow]) -> str:
    return "\n".join("\t".join(row) for row in [columns, *rows])


def _as_json(columns: TextRow, rows: list[TextRow]) -> str:
    return "\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows)


def _as_html(columns: TextRow, rows: list[TextRow]) -> str:
    lines = ["<table>", "<tr><th>" + "</th><th>".join(columns) + "</th></tr>"]
    for row in rows:
        cells = [html.escape(cell) for cell in row]
        lines.append("<tr><td>" + "</td><td>".join(cells) + "</td></tr>")
    return "\n".join([*lines, "</table>"])


FORMATS: dict[str, Callable[[TextRow, list[TextRow]], str]] = {
    "csv": _as_csv,
    "html": _as_html,
    "json": _as_json,
    "markdown": _as_markdown,
    "tabs": _as_tabs,
}
"""Functions that write a table as text, by the name of the format."""


@dataclass(frozen=True)
class Tables:
    """A table of several columns, and a question about one cell, one row or all rows with a value.

    Attributes:
        truthful: Share of the prompts whose response is read from the table; the others have the model's own answer.
    """

    truthful: Share = 0.0

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        subject = rng.choice(sorted(_ROW_NAMES))
        columns = rng.sample(sorted(_COLUMNS), rng.randint(2, 5))
        names = distinct(_ROW_NAMES[subject], max(4, request.tokens // 6), rng)
        rows = []
        for name in names:
            cells = [draw(_COLUMNS[column], rng) for column in columns]
            rows.append([name, *cells])
        write = FORMATS[rng.choice(sorted(FORMATS))]
        seed = rng.getrandbits(64)
        is_truthful = rng.random() < self.truthful

        def make(characters: int) -> Prompt:
            length_of_row = len(write([subject, *columns], rows[:4])) / 5
            shown = rows[: max(4, int(characters / length_of_row))]
            form, question, answer = _question(subject, columns, shown, random.Random(seed))
            table = write([subject, *columns], shown)
            prompt = user_prompt(f"tables/{form}", frame_question(question, seed, table))
            if is_truthful:
                return replace(prompt, response=answer)
            return prompt

        return fit_prompt(make, request)


def _question(subject: str, columns: TextRow, rows: list[TextRow], rng: random.Random) -> tuple[str, str, str]:
    """The form of a question, the question, and its answer."""
    column_number = rng.randrange(len(columns))
    column = columns[column_number]
    row = rng.choice(rows)
    name = row[0]
    value = row[column_number + 1]

    matching = [other[0] for other in rows if other[column_number + 1] == value]
    if column in _REPEATING_COLUMNS and len(matching) <= _MOST_LISTED and rng.random() < 0.5:
        question = rng.choice(wordings("rows_of_table")).format(subject=subject, column=column, value=value)
        return "rows_with", question, ", ".join(matching) + "."
    if rng.random() < 0.25:
        question = rng.choice(wordings("row_of_table")).format(subject=subject, name=name)
        cells = [f"{title}: {cell}" for title, cell in zip(columns, row[1:], strict=True)]
        return "row", question, ", ".join(cells) + "."
    question = rng.choice(wordings("cell_of_table")).format(subject=subject, name=name, column=column)
    return "cell", question, f"{value}."
