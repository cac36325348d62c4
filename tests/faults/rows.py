"""Rows of the user's data and mixtures: each is read as it says, or refused in one line with its place."""

import codecs
import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from keepsight.commands.data import read_mixture
from keepsight.data_gen.prompts import Prompt
from keepsight.data_gen.user_data import HubDataset, LocalJsonl
from keepsight.errors import BadRow
from tests.faults.texts import Verdict, accepted, hostile, judged
from tests.faults.world import World

_NO_TEXT: tuple[Any, ...] = (None, 7, 1.5, True, [], {}, [1], {"text": "x"}, "", " \n\t")
_NO_TURNS: tuple[Any, ...] = (None, [], {}, "text", 7, [None], ["text"], [{}], [{"role": "user"}], [[{"role": "user"}]])
_NO_JSON = ("{", '{"prompt": "a"', "[1]", '"text"', "null", '{"prompt": "\\ud800"}', "[" * 9000, "\x00", '{"a":1}{}')
_NO_ROLE: tuple[Any, ...] = ("tool", 7, None, ["user"], {}, "User")
_NO_TURN: tuple[Any, ...] = (
    *(None, "user", {"content": "x"}, {"role": "user", "content": 7}, {"role": "user", "content": [{"type": "image"}]}),
    *({"role": role, "content": "x"} for role in _NO_ROLE),
)
_ROLES = ("system", "user", "assistant", "human", "gpt")
_PLAIN = {"human": "user", "gpt": "assistant"}
Turns = list[dict[str, str]]


def rows(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """A file, a column of a data set, or a mixture, each with an oracle of what is in it."""
    folder = world.folder.with_name("rows")
    folder.mkdir(exist_ok=True)
    for _ in range(count):
        kind = rng.choice((_file, _file, _column, _mixture))
        seed = rng.random()
        yield judged((kind.__name__, seed), partial(kind, folder, Random(seed)))


def _file(folder: Path, rng: Random) -> str:
    drawn = [_row(rng) for _ in range(rng.randint(1, 6))]
    lines: list[tuple[str, Prompt | None]] = []
    for line, expected in drawn:
        lines += [("", None)] * (rng.random() < 0.2) + [(line, expected)]
    end = rng.choice(("\n", "\r\n"))
    data = end.join(line for line, _ in lines) + rng.choice((end, ""))
    content = rng.choice((data.encode(), codecs.BOM_UTF8 + data.encode(), data.encode("utf-16")))
    path = folder / "rows.jsonl"
    path.write_bytes(gzip.compress(content) if rng.random() < 0.2 else content)
    numbers = [number for number, (line, _) in enumerate(lines, start=1) if line]
    rows_read = accepted(lambda: list(LocalJsonl(str(path)).rows()))
    assert len(rows_read) == len(drawn), f"{len(rows_read)} rows of {len(drawn)}"
    for number, (line, expected), row in zip(numbers, drawn, rows_read, strict=True):
        if expected is None:
            assert isinstance(row, BadRow), f"{line[:200]!r} was read as {row}"
            assert str(number) in str(row), f"{line[:200]!r}: {row!r}"
            assert len(str(row).splitlines()) == 1, f"{line[:200]!r}: {row!r}"
        else:
            assert row == expected, f"{line[:200]!r} was read as {row!r}"
    return "right"


def _row(rng: Random) -> tuple[str, Prompt | None]:
    """A line, and the prompt that it holds; None where it holds none."""
    if rng.random() < 0.15:
        return rng.choice(_NO_JSON), None
    row: dict[str, Any] = {}
    if rng.random() < 0.3:
        row["other"] = [hostile(rng), {"a": None}]
        row["id"] = rng.randrange(9)
    source = rng.choice(("rows", hostile(rng)))
    if source != "rows":
        row["source"] = source
    response = rng.choice((None, hostile(rng)))
    if response is not None:
        row["response"] = response
    is_bad = rng.random() < 0.3
    if rng.random() < 0.5:
        text = hostile(rng)
        row["prompt"] = rng.choice(_NO_TEXT) if is_bad else text
        turns = [{"role": "user", "content": text}]
        is_bad = is_bad or not text.strip()
    else:
        row["messages"], turns = _turns(rng, is_bad)
        is_bad = is_bad or turns[-1]["role"] != "user"
    if rng.random() < 0.1:
        row["response"] = rng.choice((7, ["a"], {}, True))
        is_bad = True
    expected = None if is_bad else Prompt(source, tuple(turns), response)
    return json.dumps(row, ensure_ascii=rng.random() < 0.5), expected


def _turns(rng: Random, is_bad: bool) -> tuple[Any, Turns]:
    """Turns in one of the forms that data sets have them in, and as the product should read them."""
    stored: list[Any] = []
    expected: Turns = []
    count = rng.randint(1, 4)
    for index in range(count):
        is_last = index + 1 == count
        role = rng.choice(("user", "user", "human", "assistant")) if is_last else rng.choice(_ROLES)
        text = hostile(rng)
        parts = [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]
        forms = {"role": role, "content": text}, {"from": role, "value": text}, {"role": role, "content": parts}
        stored.append(rng.choice(forms))
        expected.append({"role": _PLAIN.get(role, role), "content": text})
    if is_bad and rng.random() < 0.5:
        return rng.choice(_NO_TURNS), expected
    if is_bad:
        bad_turn = rng.choice(_NO_TURN)
        stored[rng.randrange(count)] = bad_turn
    return stored, expected


def _column(folder: Path, rng: Random) -> str:
    """A data set's column; assistant turns at its end are dropped."""
    if rng.random() < 0.5:
        value: Any = rng.choice((hostile(rng), None, 7, b"x", [7]))
        prompt = HubDataset("x", "mit", prompt="column").row_prompt({"column": value})
        assert isinstance(value, str), f"{value!r} was read as {prompt}"
        text = prompt.messages[0]["content"] if prompt else ""
        assert text == (value if value.strip() else ""), repr(value)
        return "right"
    is_bad = rng.random() < 0.3
    stored, turns = _turns(rng, is_bad)
    source = HubDataset("x", "mit", messages="column")
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if is_bad:
        prompt = source.row_prompt({"column": stored})
        assert prompt is None or len(prompt.messages) < len(stored), f"{stored} was read as {prompt}"
        return "right"
    prompt = accepted(lambda: source.row_prompt({"column": stored}))
    messages = prompt.messages if prompt else None
    expected = tuple(turns) if turns and turns[-1]["role"] == "user" else None
    assert messages == expected, f"{stored} was read as {prompt}"
    return "right"


def _mixture(folder: Path, rng: Random) -> str:
    """A mixture's file: what is too large, too deep or no YAML is refused at once."""
    path = folder / "mixture.yaml"
    began = monotonic()
    if rng.random() < 0.3:
        kind = "".join(filter(str.isprintable, hostile(rng))).replace("${", "$")
        text = f"min_tokens: 80\nsources: [{{kind: {json.dumps(kind, ensure_ascii=False)}}}]\n"
        path.write_text(text, encoding=rng.choice(("utf-8", "utf-8-sig", "utf-16")))
        mixture = accepted(lambda: read_mixture(str(path)))
        assert mixture == {"min_tokens": 80, "sources": [{"kind": kind}]}, f"{text!r} was read as {mixture}"
        return "right"
    levels = rng.randint(8, 40)
    deep = "[" * 90_000
    large = "a: 1\n" * 300_000
    bad = (_bomb(levels), _bomb_of_merges(levels), deep, "a: &a [*a]", "sources: [{", large, "\x00", "[]")
    text = rng.choice(bad)
    path.write_text(text, encoding="utf-8")
    try:
        mixture = read_mixture(str(path))
    finally:
        assert monotonic() - began < 10, "it took long"
    raise AssertionError(f"{text[:200]!r} was read as {str(mixture)[:200]}")


def _bomb(levels: int) -> str:
    """YAML whose every level holds the one below nine times."""
    lines = ["a0: &a0 [x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{_nine_times(level - 1)}]")
    return "\n".join(lines)


def _bomb_of_merges(levels: int) -> str:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level}\n  <<: [{_nine_times(level - 1)}]")
    return "\n".join(lines)


def _nine_times(level: int) -> str:
    return ", ".join([f"*a{level}"] * 9)
