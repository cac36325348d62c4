"""Prompts from the user's rows: a JSON Lines file, or a data set of the Hub, here as a folder with the same files."""

import gzip
import json
import pickle
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from keepsight import recipes
from keepsight.commands.data import read_mixture
from keepsight.data_gen import user_data
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import QUESTION_INSTRUCTIONS, Prompt
from keepsight.data_gen.store import DataSettings
from keepsight.data_gen.user_data import HubDataset, LocalJsonl, pin_sources
from keepsight.errors import BadRow, Code, UserError
from keepsight.files import file_digest
from keepsight.models.identity import Identity
from tests.refused import refused

PAPER = yaml.safe_load((Path(recipes.__file__).parent / "mixtures" / "paper.yaml").read_text())
SOURCES = {source["id"].rpartition("/")[2]: source for source in PAPER["sources"]}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def count_tokens(text: str) -> int:
    return len(text.split())


def write(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def local_mixture(path: str, max_tokens: int = 200, **options: Any) -> Mixture:
    source = {"kind": "local_jsonl", "path": path, **options}
    return Mixture.from_config({"min_tokens": 64, "max_tokens": max_tokens, "sources": [source]})


def hub_source(folder: Path, **options: Any) -> dict[str, Any]:
    """A source that reads a folder as a data set of the Hub."""
    return {"kind": "hub_dataset", "id": str(folder), "license": "mit", **options}


def prompts(source: dict[str, Any], count: int, seed: int = 0, **bounds: int) -> list[Prompt]:
    mixture = Mixture.from_config({"min_tokens": 64, "max_tokens": 16384, **bounds, "sources": [source]})
    return [mixture.prompt(seed, index, count_tokens) for index in range(count)]


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_local_rows_come_once_before_any_comes_again(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"prompt": f"row {row}"} for row in range(50)))
    mixture = Mixture.from_config({"sources": [{"kind": "local_jsonl", "path": path}, {"kind": "key_values"}]})
    all_prompts = [mixture.prompt(3, index, count_tokens) for index in range(400)]
    drawn = texts([prompt for prompt in all_prompts if prompt.source == "rows"])
    assert len(drawn) > 150
    assert drawn[:50] != drawn[50:100]
    for turn in range(3):
        assert len(set(drawn[50 * turn : 50 * turn + 50])) == 50


def test_local_rows_keep_their_fields_and_fit_the_lengths(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, user("Hello there")]
    path = write(
        tmp_path / "mine.jsonl",
        {"messages": chat, "source": "book"},
        {"prompt": "Hi", "reference": "Ho"},
        {"prompt": "long " * 300},
    )

    def prompts_by_start(**options: Any) -> dict[str, Prompt]:
        mixture = local_mixture(path, response_field="reference", template=False, **options)
        drawn = [mixture.prompt(0, index, count_tokens) for index in range(3)]
        return {prompt.messages[-1]["content"][:5]: prompt for prompt in drawn}

    from_book = Prompt("book", tuple(chat))
    without_source = Prompt("mine", (user("Hi"),), "Ho", template=False)
    assert prompts_by_start() == {"Hello": from_book, "Hi": without_source}
    assert prompts_by_start(max_tokens=700).keys() == {"Hello", "Hi", "long "}
    assert prompts_by_start(shortest=2) == {"Hello": from_book}


@pytest.mark.parametrize(
    ("row", "field", "code"),
    [
        ({"text": "x"}, "prompt", "missing"),
        ({"prompt": "x", "response": 3}, "response", "type"),
        ({"messages": []}, "messages", "type"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role", "unknown"),
        ({"messages": [user("x") | {"content": [{"type": "text", "text": None}]}]}, "content", "type"),
        ({"messages": [assistant("x")]}, "messages", "data"),
        ({"messages": [{"role": "gpt", "content": None, "tool_calls": [{}]}]}, "content", "type"),
        ({"prompt": "word " * 1000}, "max_tokens", "range"),
        ([1], "", "type"),
    ],
)
def test_rows_that_are_all_bad_end_in_one_line(tmp_path: Path, row: object, field: str, code: Code) -> None:
    path = write(tmp_path / "rows.jsonl", row)
    with refused(field, code) as error:
        local_mixture(path).prompt(0, 0, count_tokens)
    message = str(error.value)
    assert message.startswith(path)
    assert "\n" not in message


def test_one_bad_row_is_named_when_it_is_drawn_and_the_others_are_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": null}\n{"prompt": "c"}\n{"prompt": "\\ud800"}\n{"prompt": "d')
    mixture = local_mixture(str(path))
    drawn = []
    reasons = []
    for index in range(5):
        try:
            drawn.append(mixture.prompt(0, index, count_tokens))
        except BadRow as error:
            reasons.append(str(error))
    assert sorted(texts(drawn)) == ["a", "c"]
    null, surrogate, torn = sorted(reasons)
    assert null.startswith(f"{path}:2: expected a text")
    assert "rows.jsonl:4: not valid" in surrogate
    assert "rows.jsonl:5: not valid" in torn


def test_rows_of_a_folder_stand_in_for_the_hub(tmp_path: Path) -> None:
    """With the weights of the mixture for SmolLM2, and without the sources that are left out."""
    from_hub = read_mixture("smollm2")
    Mixture.from_config(from_hub)
    hub_sources = [source for source in from_hub["sources"] if source["kind"] == "hub_dataset"]
    for source in hub_sources:
        assert len(source["revision"]) == 40
        assert "local" not in source
    with refused("rows", "missing"):
        read_mixture("smollm2", "missing")

    text = " ".join(["word"] * 120)
    for name in ("long_qa", "summarization", "chat", "code", "few_shot", "text"):
        rows = [{"prompt": f"{source} {text}", "source": source} for source in ("TREC", "P3-T0/dream_x", name)]
        write(tmp_path / f"{name}.jsonl", *rows)
    from_folder = read_mixture("smollm2", str(tmp_path))
    weights = [source["weight"] for source in from_folder["sources"]]
    assert weights == [source["weight"] for source in from_hub["sources"]]
    sources_of_rows = []
    for entry in Mixture.from_config(from_folder).entries:
        if isinstance(entry.source, LocalJsonl):
            sources_of_rows.append({row.source for row in entry.source.rows() if isinstance(row, Prompt)})
    assert len(sources_of_rows) == len(hub_sources)
    assert sources_of_rows[0] == {"TREC", "long_qa"}
    assert sources_of_rows[4] == {"P3-T0/dream_x", "few_shot"}
    with refused("local", "missing"):
        read_mixture("paper", str(tmp_path))


def test_encodings_and_forms_of_conversations(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"from": "human", "value": "Hé"}, {"from": "gpt", "value": "Ho"}, user("?")]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": None, "prompt": "c"},
    ]
    expected = [(user("Hé"), assistant("Ho"), user("?")), (user("ab"),), (user("c"),)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    zipped = gzip.compress(text.encode())
    path = tmp_path / "rows.jsonl"
    for content in (text.encode(), text.encode("utf-8-sig"), text.encode("utf-16"), zipped):
        path.write_bytes(content)
        read_rows = list(LocalJsonl(str(path)).rows())
        assert [row.messages for row in read_rows if isinstance(row, Prompt)] == expected
    path.write_bytes(zipped[:20])
    with pytest.raises(UserError, match="neither text nor gzipped text"):
        list(LocalJsonl(str(path)).rows())


def test_drawing_from_many_rows_takes_no_time_for_each(tmp_path: Path) -> None:
    """Shuffling 200,000 rows at every draw took 0.6 s a prompt; so would reading each of 40 files again."""
    rows = [{"prompt": f"row {row}"} for row in range(1000)]
    paths = [write(tmp_path / f"{file}.jsonl", *rows) for file in range(40)]
    mixture = Mixture.from_config({"sources": [{"kind": "local_jsonl", "path": path} for path in paths]})
    for index in range(1000):
        mixture.prompt(0, index, count_tokens)
    start = time.process_time()
    for index in range(1000, 1300):
        mixture.prompt(0, index, count_tokens)
    assert time.process_time() - start < 0.3


ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "ChatQA2-Long-SFT-data": (
        "long_sft/long_sft_QA_train.json",
        [{"question": f"User: Book {row}.\n\nQ: Which?\n\nAssistant:", "answer": [f"{row}"]} for row in range(12)],
    ),
    "tulu-3-sft-olmo-2-mixture": (
        "data/train-00000-of-00001.jsonl",
        [{"messages": [user(f"Hello {row}"), assistant("Yes?"), user("Go on"), assistant("No")]} for row in range(12)],
    ),
    "the-stack-dedup": (
        "data/python/data-00000-of-00001.jsonl",
        [{"content": f"x = {row}\n" + "def f(x): return x + 1\n" * 200} for row in range(12)],
    ),
    "ARC_DPO_FewShot": (
        "data/train-00000-of-00001.jsonl",
        [{"prompt": f"Q: {row}\nA: 1\nQ: 2\nA:", "chosen": "3", "rejected": "4"} for row in range(12)],
    ),
}
LONG_SFT = """---
configs:
- config_name: long_sft
  data_files:
    - split: train
      path: long_sft/long_sft_QA_train.json
    - split: test
      path: long_sft/long_sft_QA_dev.json
---
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def local(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A source of the paper's mixture that reads a folder in the repository's layout, of JSON instead of Parquet."""
    file, rows = ROWS[name]
    path = folder / name / file
    write(path, *rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        (folder / name / "README.md").write_text(LONG_SFT)
        (path.parent / "long_sft_QA_dev.json").write_text(json.dumps(rows[:1]))
    source = {**SOURCES[name], "id": str(folder / name), **changes}
    files = [pattern.replace("parquet", "jsonl") for pattern in source.get("files", []) if "python" in pattern]
    if files:
        source["files"] = files
    return source


def test_what_becomes_of_the_papers_rows(tmp_path: Path) -> None:
    questions = prompts(local("ChatQA2-Long-SFT-data", tmp_path), 12)
    assert sorted(texts(questions)) == sorted(f"Book {row}.\n\nQ: Which?" for row in range(12))
    assert {prompt.source for prompt in questions} == {"ChatQA2-Long-SFT-data/long_sft"}
    assert all(prompt.template and prompt.response is None for prompt in questions)
    chats = prompts(local("tulu-3-sft-olmo-2-mixture", tmp_path), 12)
    assert all(prompt.messages[1:] == (assistant("Yes?"), user("Go on")) for prompt in chats)
    assert len({prompt.messages[0]["content"] for prompt in chats}) == 12
    few_shot = prompts(local("ARC_DPO_FewShot", tmp_path), 12)
    assert not any(prompt.template for prompt in few_shot)
    assert all(text.endswith("A:") for text in texts(few_shot))


@pytest.mark.parametrize("rows", [0, 12])
def test_responses_of_the_data_set(rows: int, tmp_path: Path) -> None:
    """Columns of texts or lists of one, and the assistant's last turn."""
    for name, column, expected in (
        ("ChatQA2-Long-SFT-data", "answer", {str(row) for row in range(12)}),
        ("ARC_DPO_FewShot", "chosen", {"3"}),
        ("tulu-3-sft-olmo-2-mixture", "messages", {"No"}),
    ):
        with_responses = prompts(local(name, tmp_path, response=column, rows=rows), 12)
        assert {prompt.response for prompt in with_responses} == expected
        assert texts(with_responses) == texts(prompts(local(name, tmp_path, rows=rows), 12))
    with pytest.raises(UserError, match="'answers'"):  # of a data set that is streamed its library says so
        prompts(local("ARC_DPO_FewShot", tmp_path, response="answers", rows=rows), 1)
    write(tmp_path / "null" / "rows.jsonl", {"a": "x", "b": "y"}, {"a": "z", "b": None})
    mixture = Mixture.from_config({"sources": [hub_source(tmp_path / "null", prompt="a", response="b")]})
    with refused("b", "type", BadRow):
        [mixture.prompt(0, index, count_tokens) for index in range(2)]


@pytest.mark.parametrize("rows", [0, 12])
def test_questions_follow_the_documents_of_another_column(rows: int, tmp_path: Path) -> None:
    """Paragraphs of sentences inside a column, as in HotpotQA; a question of the row, or one of the mixture's."""
    context = {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]}
    write(tmp_path / "rows.jsonl", *({"context": context, "question": f"Is it {row}?"} for row in range(12)))
    source = hub_source(tmp_path, prompt="context.sentences", rows=rows)
    with_own_question = prompts(source | {"question": "question"}, 12)
    assert sorted(texts(with_own_question)) == sorted(f"One. Two.\n\nThree.\n\nIs it {row}?" for row in range(12))

    asking = source | {"prompt": "question", "ask": ["Why?", "How?"], "template": False}
    with_question_of_mixture = prompts(asking, 24)
    assert {text.partition("\n\n")[2] for text in texts(with_question_of_mixture)} == {"Why?", "How?"}
    assert not with_question_of_mixture[0].template
    assert len(set(texts(with_question_of_mixture))) == 12  # a row always gets the same question
    with refused("words", "missing"):
        prompts(source | {"prompt": "context.words"}, 1)
    with refused("text", "type"):
        prompts(source | {"prompt": "context"}, 1)
    with refused("question", "conflict"):
        HubDataset("x", "mit", text="context", question="question")
    with refused("question", "conflict"):
        HubDataset("x", "mit", prompt="context", question="question", ask=("Why?",))


@pytest.mark.parametrize("kind", ["hub_dataset", "local_jsonl"])
def test_the_model_is_to_write_questions_about_each_text_in_turn(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"prompt": f"Text {row}.", "response": "No."} for row in range(4)))
    sources = {"hub_dataset": hub_source(tmp_path, prompt="prompt"), "local_jsonl": {"kind": kind, "path": path}}
    source = sources[kind]
    drawn = prompts(source | {"ask_itself": 3}, 12)
    first_text = drawn[:3]
    assert [prompt.question_instruction for prompt in first_text] == [*QUESTION_INSTRUCTIONS[:3]]
    assert len(set(texts(first_text))) == 1
    assert Counter(texts(drawn)) == {f"Text {row}.": 3 for row in range(4)}
    assert not any(prompt.response for prompt in drawn)
    with_question = drawn[0].with_question("Why?")
    assert texts([with_question]) == [f"{texts(drawn)[0]}\n\nWhy?"]
    assert with_question.question_instruction is None
    with refused("ask_itself", "range"):
        prompts(source | {"ask_itself": len(QUESTION_INSTRUCTIONS) + 1}, 1)
    with refused("ask_itself", "conflict"):
        prompts(source | {"ask_itself": 1, "template": False}, 1)


@pytest.mark.parametrize(
    "other", [{"ask": ("Why?",)}, {"question": "b"}, {"response": "b"}, {"prompt": "", "text": "b"}]
)
def test_the_model_writes_no_questions_beside_others(other: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        HubDataset("x", "mit", **{"prompt": "a", "ask_itself": 1, **other})
    assert error.value.code == "conflict"


@pytest.mark.parametrize("rows", [0, 12])
def test_a_document_is_cut_at_a_random_point(rows: int, tmp_path: Path) -> None:
    source = local("the-stack-dedup", tmp_path, rows=rows)
    documents = [row["content"] for row in ROWS["the-stack-dedup"][1]]
    drawn = prompts(source, 24)
    assert not any(prompt.template for prompt in drawn)
    for text in texts(drawn):
        assert any(document.startswith(text) for document in documents)
    lengths = [count_tokens(text) for text in texts(drawn)]
    assert min(lengths) < 400
    assert max(lengths) > 900
    assert len(set(lengths)) > 20
    bounded = prompts(source, 12, max_tokens=100)
    assert max(count_tokens(text) for text in texts(bounded)) <= 100


def test_each_row_comes_once_before_any_comes_again_and_in_the_same_order(tmp_path: Path) -> None:
    source = local("ARC_DPO_FewShot", tmp_path)
    drawn = texts(prompts(source, 36))
    for turn in range(3):
        assert len(set(drawn[12 * turn : 12 * turn + 12])) == 12
    assert drawn[:12] != drawn[12:24]
    assert texts(prompts(source, 36)) == drawn
    assert texts(prompts(source, 36, seed=1)) != drawn
    mixture = Mixture.from_config({"min_tokens": 64, "sources": [source]})
    for index in (30, 2, 17):
        assert texts([mixture.prompt(0, index, count_tokens)]) == [drawn[index]]
    streamed = texts(prompts({**source, "rows": 5}, 20))
    draws_of_rows = Counter(streamed).values()
    assert sorted(draws_of_rows) == [4] * 5


def test_rows_without_a_user_or_too_long_are_left_out_and_bad_ones_named(tmp_path: Path) -> None:
    rows = [
        {"messages": [assistant("Hello")]},
        {"messages": [user("Call it"), {"role": "tool", "content": "4"}, user("And?")]},
        {"messages": [user("long " * 300)]},
        {"messages": [user("Hello"), assistant("a"), assistant("b")]},
    ]
    write(tmp_path / "rows.jsonl", *rows)
    source = hub_source(tmp_path, messages="messages")
    assert texts(prompts(source, 3, max_tokens=200)) == ["Hello"] * 3
    with refused("role", "unknown"):
        prompts(source | {"shortest": 2}, 1, max_tokens=64)
    write(tmp_path / "texts" / "rows.jsonl", {"messages": ["Hello"]})
    with refused("messages", "type"):
        prompts(hub_source(tmp_path / "texts", messages="messages"), 1)
    write(tmp_path / "null" / "rows.jsonl", {"text": "a b"}, {"text": None})
    mixture = Mixture.from_config({"sources": [hub_source(tmp_path / "null", prompt="text")]})
    with refused("text", "type", BadRow):
        [mixture.prompt(0, index, count_tokens) for index in range(2)]
    write(tmp_path / "short" / "rows.jsonl", {"text": "a b"})
    with refused("max_tokens", "range"):
        prompts(hub_source(tmp_path / "short", prompt="text", shortest=3), 1, max_tokens=64)


def test_missing_columns_and_splits_are_named(tmp_path: Path) -> None:
    source = local("ARC_DPO_FewShot", tmp_path)
    with refused("promt", "unknown"):
        prompts(source | {"prompt": "promt"}, 1)
    with refused("id", "service"):
        prompts(source | {"split": "tset"}, 1)
    with refused("prompt", "missing"):
        HubDataset("ada/none", "mit")


def test_a_data_set_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    mixture = Mixture.from_config({"sources": [SOURCE | {"id": "ada/none"}]})
    with refused("id", "service"):
        mixture.check()


@pytest.mark.parametrize("name", ["pandas", "webdataset", "rows"])
def test_data_that_may_run_code_is_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles, by the name of a builder of `datasets` or in a folder; and a script in a folder."""
    touched = tmp_path / "ran"

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (touched,)

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "x.pkl").write_bytes(pickle.dumps(Touch()))
    (folder / "rows.py").write_text(f"open({str(touched)!r}, 'w')")
    source = {"kind": "hub_dataset", "id": name, "license": "mit", "text": "text"}
    for files in (["rows/x.pkl"], ["x.pkl"], []):
        with refused("id", "service"):
            Mixture.from_config({"sources": [source | {"files": files, "rows": 3}]}).check()
        with refused("id", "service"):
            prompts(source | {"files": files}, 1)
    assert not touched.exists()


OLD_COMMIT = "c0ffee" * 6 + "c0ff"
SOURCE = {"kind": "hub_dataset", "id": "ada/rows", "license": "mit", "prompt": "question"}


NEW_COMMIT = "beef" * 10
V1_COMMIT = "1" * 40


class Hub:
    """Stands for the Hub's interface: the commit of each branch of one data set, and its history."""

    def __init__(self) -> None:
        self.commits = {"main": OLD_COMMIT, "v1": V1_COMMIT}
        self.asked: list[str] = []

    def dataset_info(self, name: str, *, revision: str, timeout: float) -> SimpleNamespace:
        self.asked.append(revision)
        return SimpleNamespace(sha=self.commits[revision])

    def list_repo_commits(self, name: str, *, repo_type: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(commit_id=commit) for commit in (NEW_COMMIT, OLD_COMMIT)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    interface = Hub()
    monkeypatch.setattr(user_data, "HfApi", lambda: interface)
    return interface


def write_unfinished_manifest(folder: Path, mixture: dict[str, Any]) -> None:
    settings = DataSettings("model", Identity(), mixture, 0, 1, 1, 1)
    (folder / "manifest.json").write_text(json.dumps({"complete": False, "settings": asdict(settings)}))


def pinned_revisions(*sources: dict[str, Any], folder: Path) -> list[str | None]:
    pinned = pin_sources({"sources": list(sources)}, folder)
    return [source.get("revision") for source in pinned["sources"]]


def test_branches_tags_and_starts_of_commits_become_commits(hub: Hub, tmp_path: Path) -> None:
    sources = [SOURCE, {**SOURCE, "revision": "v1"}, {**SOURCE, "revision": NEW_COMMIT}, {"kind": "needles"}]
    expected = [f"main@{OLD_COMMIT}", f"v1@{V1_COMMIT}", NEW_COMMIT, None]
    assert pinned_revisions(*sources, folder=tmp_path) == expected
    assert len(hub.asked) == 2

    start = OLD_COMMIT[:7]
    assert pinned_revisions({**SOURCE, "revision": start}, folder=tmp_path) == [f"{start}@{OLD_COMMIT}"]
    hub.commits["20260101"] = NEW_COMMIT  # a tag that looks like the start of a commit
    assert pinned_revisions({**SOURCE, "revision": "20260101"}, folder=tmp_path) == [f"20260101@{NEW_COMMIT}"]

    local_folder = {**SOURCE, "id": str(tmp_path), "revision": "main"}
    hub.asked.clear()
    assert pinned_revisions(local_folder, folder=tmp_path) == ["main"]
    assert not hub.asked


def test_a_run_that_resumes_reads_the_rows_it_began_with(hub: Hub, tmp_path: Path) -> None:
    mixture = {"sources": [SOURCE, {**SOURCE, "revision": "v1"}, {**SOURCE, "revision": OLD_COMMIT[:7]}]}
    pinned = pin_sources(mixture, tmp_path)
    write_unfinished_manifest(tmp_path, pinned)
    hub.commits["main"] = NEW_COMMIT
    hub.asked.clear()
    assert pin_sources(mixture, tmp_path) == pinned
    assert not hub.asked
    assert pinned_revisions(SOURCE, folder=tmp_path / "other") == [f"main@{NEW_COMMIT}"]
    hub.asked.clear()
    write_unfinished_manifest(tmp_path, {"sources": [{**SOURCE, "revision": "main"}]})  # without the Hub
    assert pinned_revisions(SOURCE, folder=tmp_path) == ["main"]
    assert not hub.asked


def test_a_local_file_that_changes_is_refused_when_a_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "What is keepsight?"}\n')
    source = {"kind": "local_jsonl", "path": str(path)}
    source_with_digest = {**source, "digest": file_digest(path)}
    pinned = pin_sources({"sources": [source]}, tmp_path)
    assert pinned == {"sources": [source_with_digest]}
    write_unfinished_manifest(tmp_path, pinned)
    assert pin_sources({"sources": [source]}, tmp_path) == pinned
    path.write_text('{"prompt": "What else?"}\n')
    with refused("rows", "file"):
        pin_sources({"sources": [source]}, tmp_path)
    with refused("rows", "file"):
        pin_sources({"sources": [source_with_digest]}, tmp_path / "other")


def test_a_revision_that_the_hub_does_not_know_stays_with_a_warning(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert pinned_revisions({**SOURCE, "revision": "v9"}, folder=tmp_path) == ["v9"]
    assert "data set ada/rows: the commit of v9 is unknown, its rows may change" in caplog.text


def test_the_commit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load_dataset_builder(**options: Any) -> Any:
        asked.append(options["revision"])
        raise ValueError("enough")

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    for revision in (f"main@{OLD_COMMIT}", OLD_COMMIT, "release@2"):
        with pytest.raises(UserError, match="enough"):
            HubDataset("ada/rows", "mit", revision=revision, prompt="question").check()
    assert asked == [OLD_COMMIT, OLD_COMMIT, "release@2"]
