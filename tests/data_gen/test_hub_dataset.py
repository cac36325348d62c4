"""Data sets of the Hub, as folders with the same files and columns: what becomes of their rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepsight import recipes
from keepsight.data_gen.hub_dataset import HubDataset
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import Prompt
from keepsight.errors import UserError

PAPER = yaml.safe_load((Path(recipes.__file__).parent / "mixtures" / "paper.yaml").read_text())
SOURCES = {source["id"].rpartition("/")[2]: source for source in PAPER["sources"]}
LONG_SFT = """---
license: cc-by-nc-2.0
configs:
- config_name: long_sft
  data_files:
    - split: train
      path: long_sft/long_sft_QA_train.json
    - split: test
      path: long_sft/long_sft_QA_dev.json
- config_name: NarrativeQA_131072
  data_files:
    - split: train
      path: NarrativeQA_131072/NarrativeQA_131072_QA_train.json
---
"""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "ChatQA2-Long-SFT-data": (
        "long_sft/long_sft_QA_train.json",
        [
            {"question": f"User: A book of {row}.\n\nQ: Which?\n\nAssistant:", "answer": [f"{row}"], "word count": 6}
            for row in range(12)
        ],
    ),
    "tulu-3-sft-olmo-2-mixture": (
        "data/train-00000-of-00001.jsonl",
        [
            {"id": f"s{row}", "messages": [user(f"Hello {row}"), assistant("Yes?"), user("Go on"), assistant("No")]}
            for row in range(12)
        ],
    ),
    "the-stack-dedup": (
        "data/python/data-00000-of-00001.jsonl",
        [
            {"hexsha": f"{row}", "lang": "Python", "content": f"x = {row}\n" + "def f(x): return x + 1\n" * 200}
            for row in range(12)
        ],
    ),
    **{
        name: (
            "data/train-00000-of-00001.jsonl",
            [{"prompt": f"Q: {row}\nA: 1\nQ: 2\nA:", "chosen": "3", "rejected": "4"} for row in range(12)],
        )
        for name in ("MetaMath_DPO_FewShot", "HellaSwag_DPO_FewShot", "ARC_DPO_FewShot")
    },
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def count_tokens(text: str) -> int:
    return len(text.split())


def written(folder: Path, name: str) -> str:
    """A folder with a data set's files, in the layout of its repository."""
    file, rows = ROWS[name]
    path = folder / name / file
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    if name == "ChatQA2-Long-SFT-data":
        (folder / name / "README.md").write_text(LONG_SFT)
        (path.parent / "long_sft_QA_dev.json").write_text(json.dumps(rows[:1]))
    return str(folder / name)


def local(source: dict[str, Any], folder: Path, **changes: Any) -> dict[str, Any]:
    """A source of the paper's mixture that reads a folder instead; its files are JSON Lines instead of Parquet."""
    name = source["id"].rpartition("/")[2]
    given = {**source, "id": written(folder, name), **changes}
    files = [each.replace("parquet", "jsonl") for each in given.get("files", []) if "python" in each]
    return given | ({"files": files} if files else {})


def prompts(source: dict[str, Any], count: int, seed: int = 0, **bounds: int) -> list[Prompt]:
    made = Mixture.from_config({"min_tokens": 64, "max_tokens": 16384, **bounds, "sources": [source]})
    return [made.prompt(seed, index, count_tokens) for index in range(count)]


def texts(made: list[Prompt]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in made]


def test_the_counts_of_the_paper() -> None:
    assert {name: source["weight"] for name, source in SOURCES.items()} == {
        "ChatQA2-Long-SFT-data": 50,
        "tulu-3-sft-olmo-2-mixture": 20,
        "the-stack-dedup": 7,
        "MetaMath_DPO_FewShot": 3,
        "HellaSwag_DPO_FewShot": 3,
        "ARC_DPO_FewShot": 3,
    }
    assert all(source["license"] and source["revision"] for source in SOURCES.values())


def test_a_question_loses_the_words_that_separate_speakers(tmp_path: Path) -> None:
    made = prompts(local(SOURCES["ChatQA2-Long-SFT-data"], tmp_path), 12)
    assert sorted(texts(made)) == sorted(f"A book of {row}.\n\nQ: Which?" for row in range(12))
    assert {prompt.source for prompt in made} == {"ChatQA2-Long-SFT-data/long_sft"}
    assert all(prompt.template and prompt.response is None for prompt in made)


def test_a_conversation_loses_the_last_answer_and_keeps_the_earlier_turns(tmp_path: Path) -> None:
    made = prompts(local(SOURCES["tulu-3-sft-olmo-2-mixture"], tmp_path), 12)
    assert {len(prompt.messages) for prompt in made} == {3}
    assert all(prompt.messages[1:] == (assistant("Yes?"), user("Go on")) for prompt in made)
    assert len({prompt.messages[0]["content"] for prompt in made}) == 12


@pytest.mark.parametrize("rows", [0, 12])
def test_a_document_is_cut_at_a_random_point(rows: int, tmp_path: Path) -> None:
    source = local(SOURCES["the-stack-dedup"], tmp_path, rows=rows)
    documents = [row["content"] for row in ROWS["the-stack-dedup"][1]]
    made = prompts(source, 24)
    assert all(not prompt.template and any(document.startswith(text) for document in documents)
               for prompt, text in zip(made, texts(made), strict=True))  # fmt: skip
    lengths = [count_tokens(text) for text in texts(made)]
    assert min(lengths) < 400 < 900 < max(lengths) and len(set(lengths)) > 20
    assert max(map(count_tokens, texts(prompts(source, 12, max_tokens=100)))) <= 100


@pytest.mark.parametrize("name", ["MetaMath_DPO_FewShot", "HellaSwag_DPO_FewShot", "ARC_DPO_FewShot"])
def test_few_shot_prompts_are_completed(name: str, tmp_path: Path) -> None:
    made = prompts(local(SOURCES[name], tmp_path), 12)
    assert all(not prompt.template and text.endswith("A:") for prompt, text in zip(made, texts(made), strict=True))


def test_each_row_comes_once_before_any_comes_again_and_in_the_same_order(tmp_path: Path) -> None:
    source = local(SOURCES["ARC_DPO_FewShot"], tmp_path)
    drawn = texts(prompts(source, 36))
    for turn in range(3):
        assert len(set(drawn[12 * turn : 12 * turn + 12])) == 12
    assert drawn[:12] != drawn[12:24]
    assert drawn == texts(prompts(source, 36)) != texts(prompts(source, 36, seed=1))
    made = Mixture.from_config({"min_tokens": 64, "sources": [source]})
    assert [made.prompt(0, index, count_tokens).messages[0]["content"] for index in (30, 2, 17)] == [
        drawn[index] for index in (30, 2, 17)
    ]


def test_a_stream_takes_no_more_rows_than_it_is_told(tmp_path: Path) -> None:
    source = local(SOURCES["ARC_DPO_FewShot"], tmp_path, rows=5)
    assert Counter(Counter(texts(prompts(source, 20))).values()) == {4: 5}


def test_rows_without_a_user_or_too_long_are_skipped(tmp_path: Path) -> None:
    rows = [
        {"messages": [assistant("Hello")]},
        {"messages": [user("Call it"), {"role": "tool", "content": "4"}, user("And?")]},
        {"messages": [user("long " * 300)]},
        {"messages": [user("Hello"), assistant("a"), assistant("b")]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "hub_dataset", "id": str(tmp_path), "license": "mit", "messages": "messages"}
    assert texts(prompts(source, 3, max_tokens=200)) == ["Hello"] * 3
    with pytest.raises(UserError, match="no row has 2 to 64 tokens; raise the mixture's max_tokens"):
        prompts(source | {"shortest": 2}, 1, max_tokens=64)


@pytest.mark.parametrize("rows", [0, 3])
def test_what_a_data_set_does_not_have_is_named(rows: int, tmp_path: Path) -> None:
    source = local(SOURCES["ARC_DPO_FewShot"], tmp_path, rows=rows)
    with pytest.raises(UserError, match="has no column 'promt'; it has prompt, chosen, rejected"):
        prompts(source | {"prompt": "promt"}, 1)
    with pytest.raises(UserError, match=r"cannot be read: .* split.*tset"):
        prompts(source | {"split": "tset"}, 1)


def test_a_data_set_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="data set 'ada/none' cannot be read: Couldn't reach"):
        prompts({"kind": "hub_dataset", "id": "ada/none", "license": "mit", "text": "text"}, 1)


def test_exactly_one_column() -> None:
    with pytest.raises(UserError, match="names one column, as one of prompt, messages, text"):
        HubDataset("ada/none", "mit")
