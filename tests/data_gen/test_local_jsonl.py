"""Prompts from a local file: which rows are drawn, what is kept of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import Prompt
from keepsight.errors import UserError


def count_tokens(text: str) -> int:
    return len(text.split())


def mixture(path: str, max_tokens: int = 200, **options: Any) -> Mixture:
    source = {"kind": "local_jsonl", "path": path, **options}
    return Mixture.from_config({"min_tokens": 64, "max_tokens": max_tokens, "sources": [source]})


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_local_rows_come_once_before_any_comes_again(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"prompt": f"row {row}"} for row in range(50)))
    made = Mixture.from_config({"sources": [{"kind": "local_jsonl", "path": path}, {"kind": "key_values"}]})
    prompts = [made.prompt(3, index, count_tokens) for index in range(400)]
    drawn = [prompt.messages[0]["content"] for prompt in prompts if prompt.source == "rows"]
    assert len(drawn) > 150
    for turn in range(3):
        assert len(set(drawn[50 * turn : 50 * turn + 50])) == 50
    assert drawn[:50] != drawn[50:100]


def test_local_rows_keep_their_fields(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    path = write(tmp_path / "mine.jsonl", {"messages": chat, "source": "book"}, {"prompt": "Hi", "reference": "Ho"})
    made = mixture(path, response_field="reference", template=False)
    by_source = {prompt.source: prompt for prompt in (made.prompt(0, index, count_tokens) for index in range(2))}
    assert by_source["book"] == Prompt("book", tuple(chat))
    assert by_source["mine"] == Prompt("mine", ({"role": "user", "content": "Hi"},), "Ho", template=False)


def test_local_rows_are_chosen_by_source_and_length(tmp_path: Path) -> None:
    names = ["P3/a", "P3/b", "news", "newsreel", "long"]
    rows = [{"prompt": "long " * 300 if name == "long" else name, "source": name} for name in names]
    path = write(tmp_path / "rows.jsonl", *rows)

    def sources(**options: Any) -> set[str]:
        made = mixture(path, **options)
        return {made.prompt(0, index, count_tokens).source for index in range(5)}

    assert sources() == {"P3/a", "P3/b", "news", "newsreel"}
    assert sources(max_tokens=700) == set(names)
    assert sources(max_tokens=700, shortest=250) == {"long"}
    assert sources(include=["P3/", "news"]) == {"P3/a", "P3/b", "news", "newsreel"}
    assert sources(include=["P3"], exclude=["P3/b"]) == {"P3/a"}
    assert sources(exclude=["P3", "newsreel"]) == {"news"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "x"}, r"row 1: expected a text in prompt, or a list in messages; got the fields \['text'\]"),
        ({"prompt": "  "}, "row 1: expected a text in prompt"),
        ({"prompt": "x", "response": 3}, "row 1: response must be a string, got int"),
        ({"messages": []}, "messages must be a list of turns"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "each of messages needs a role"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "must end with the user's turn, not with the",
        ),
        ({"prompt": "word " * 1000}, "no row has 0 to 200 tokens; raise the mixture"),
    ],
)
def test_bad_local_rows(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    path = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(UserError, match=expected) as error:
        mixture(path).prompt(0, 0, count_tokens)
    assert str(error.value).startswith(path)
    assert "\n" not in str(error.value)


def test_a_cut_off_local_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not valid JSON"):
        mixture(str(path)).prompt(0, 0, count_tokens)
