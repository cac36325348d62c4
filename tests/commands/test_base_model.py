"""The commands on a base model, which has no chat template: prompts are plain text after its first token."""

from pathlib import Path
from typing import Any

import pytest

from keepsight.files import read_json
from keepsight.models.identity import template_digest
from keepsight.serving.prefix import PrefixStore
from tests.commands.commands import DATA, NEEDLES, CommandLine, results_of, samples_of
from tests.tiny import base_tokenizer

TINY = ("model.id=tiny", "model.device=cpu", "model.dtype=float32")
LONG = "The ship sailed on. " * 60
START: Any = base_tokenizer().convert_tokens_to_ids("<|start|>")


@pytest.fixture(autouse=True)
def base(here: Path) -> Path:
    """`tiny` without its chat template."""
    (here / "tiny" / "chat_template.jinja").unlink()
    base_tokenizer().save_pretrained(str(here / "tiny"))
    return here


@pytest.mark.parametrize("question", ["seen", "unseen"])
def test_it_is_evaluated(keepsight: CommandLine, question: str) -> None:
    keys = ("methods=[full,snapkv]", "pages=0", f"question={question}", "out=run")
    printed = keepsight("eval", *TINY, *NEEDLES, *keys)
    assert "--- head\n<|start|>" in printed
    assert "<|start|><|start|>" not in printed
    assert len(results_of(Path("run"))) == 3 * (1 + 2)


def test_its_answers_are_training_data(keepsight: CommandLine) -> None:
    keepsight("data", *TINY, *DATA)
    samples = samples_of(Path("data"))
    for sample in samples:
        assert sample.prompt_ids.count(START) == 1
        assert sample.prompt_ids[0] == START
    prompts_of_rows = {sample.prompt for sample in samples if sample.prompt.startswith("<|start|>Say ")}
    assert prompts_of_rows
    assert prompts_of_rows <= {f"<|start|>Say {number}." for number in range(9)}


def test_its_kept_entries_are_shown(keepsight: CommandLine) -> None:
    keys = ("method=snapkv", "compare=streamingllm", "budget=40", "max_new_tokens=4", "out=page.html")
    printed = keepsight("inspect", *TINY, f"prompt={LONG}", *keys)
    tokens = len(base_tokenizer()(LONG)["input_ids"])
    assert f"{tokens} tokens, 40 kept" in printed


def test_its_prefixes_are_the_documents_alone(keepsight: CommandLine) -> None:
    printed = keepsight("prefix", *TINY, "method=snapkv", "budget=160", f"prompt={LONG}", "out=prefixes")
    tokens = len(base_tokenizer()(LONG)["input_ids"])
    assert f"{tokens} tokens in 160" in printed
    (path,) = Path("prefixes").glob("*.safetensors")
    assert PrefixStore("prefixes").header(path.stem).before == ""


def test_a_template_file_is_recorded_with_results_and_data(keepsight: CommandLine, here: Path) -> None:
    template = here / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}answer:")
    model = (*TINY, f"model.chat_template={template}")
    evaluation = ("eval", *model, *NEEDLES, "methods=[full,snapkv]", "pages=0", "out=run")
    assert "--- head\nuser:" in keepsight(*evaluation)
    tokenizer = base_tokenizer()
    tokenizer.chat_template = template.read_text()
    digest = template_digest(tokenizer)
    assert read_json(Path("run", "settings.json"))["target"]["template"] == digest

    keepsight("data", *model, *DATA)
    assert read_json(Path("data", "manifest.json"))["settings"]["identity"]["template"] == digest
    keepsight.refuses("model", "conflict", "train", *TINY, "data=data", "out=trained", "train.held_out=1")

    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert "run: measured again: " in keepsight(*evaluation)
