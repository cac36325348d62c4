"""`keepsight data backend=vllm`, with an engine that does what vLLM 0.32 did where it was run."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from keepsight.commands import data
from keepsight.data_gen import backends
from keepsight.errors import Code
from keepsight.files import read_json, write_json
from keepsight.models import model_files
from keepsight.models.targets import load_target
from tests.commands.commands import DATA, CommandLine, samples_of

pytestmark = pytest.mark.usefixtures("here")
TINY = ("model.id=tiny", "model.device=cpu", "model.dtype=float32")
DATA_WITH_VLLM = ("data", *TINY, *DATA, "backend=vllm")
DATA_WITH_TRANSFORMERS = ("data", *TINY, *DATA)


class Vllm(ModuleType):
    """Stands for the package vllm: as much of it as is used, answering with transformers.

    Like the real one it reads a folder or a Hub id alone, takes no repetition penalty from a model's files, gives the
    end token back, and cuts an answer silently where `max_model_len` leaves it less room.
    """

    def __init__(self) -> None:
        super().__init__("vllm")
        self.engines: list[dict[str, Any]] = []
        """The arguments of every engine."""
        self.sampling: list[dict[str, Any]] = []
        """How every prompt is sampled."""
        self.starts = True
        self.calls = 0
        self.fails_at = -1
        self.shutdowns = 0

    def SamplingParams(
        self, *, max_tokens: int, stop_token_ids: list[int], repetition_penalty: float = 1.0, **sampling: Any
    ) -> SimpleNamespace:
        self.sampling.append(sampling)
        return SimpleNamespace(max_tokens=max_tokens, stop_token_ids=stop_token_ids, penalty=repetition_penalty)

    def LLM(self, model: str, **options: Any) -> Any:
        if not self.starts:
            raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        assert Path(model).is_dir(), "Cannot find an appropriate cached snapshot folder"
        self.engines.append({"model": model, **options})
        target = load_target(model, device="cpu", dtype="float32")
        context = options.get("max_model_len", 4096)

        def answer(ids: list[int], sampling: SimpleNamespace) -> Any:
            if len(ids) >= context:
                raise ValueError(f"This model's maximum context length is {context} tokens.")
            prompt = torch.tensor([ids])
            generate: Any = target.model.generate
            sequences = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                repetition_penalty=sampling.penalty,
                max_new_tokens=min(sampling.max_tokens, context - len(ids)),
                eos_token_id=sampling.stop_token_ids,
                do_sample=False,
            )
            answer_ids = tuple(sequences[0, len(ids) :].tolist())
            reason = "stop" if answer_ids[-1] in sampling.stop_token_ids else "length"
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer_ids, finish_reason=reason)])

        def generate(prompts: list[dict[str, Any]], samplings: list[SimpleNamespace], *, use_tqdm: bool) -> Any:
            self.calls += 1
            if self.calls == self.fails_at:
                raise RuntimeError("EngineCore encountered an issue.\nSee stack trace (above) for the root cause.")
            return [
                answer(prompt["prompt_token_ids"], sampling)
                for prompt, sampling in zip(prompts, samplings, strict=True)
            ]

        def shutdown() -> None:
            self.shutdowns += 1

        core = SimpleNamespace(shutdown=shutdown)
        return SimpleNamespace(generate=generate, llm_engine=SimpleNamespace(engine_core=core))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    package = Vllm()
    monkeypatch.setitem(sys.modules, "vllm", package)
    return package


def answers_of(folder: Path) -> list[list[int]]:
    return [sample.answer_ids for sample in samples_of(folder)]


def test_vllm_answers_as_transformers_does(
    keepsight: CommandLine, here: Path, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(data, "training_dtype", lambda model: "float32")  # with auto vLLM takes what the files hold
    options = "vllm={max_model_len:900,enforce_eager:true}"
    keepsight(*DATA_WITH_VLLM, "model.revision=v2", options, "out=vllm")
    expected_engine = {
        "model": "tiny",
        "revision": "v2",
        "dtype": "float32",
        "trust_remote_code": False,
        "tensor_parallel_size": 2,
        "max_model_len": 900,
        "enforce_eager": True,
    }
    assert vllm.engines == [expected_engine]
    assert vllm.sampling == [{"temperature": 0.0}] * 6
    keepsight(*DATA_WITH_TRANSFORMERS, "out=transformers")
    assert read_json(here / "vllm" / "manifest.json") == read_json(here / "transformers" / "manifest.json")

    vllm.sampling.clear()
    keepsight(*DATA_WITH_VLLM, "out=sampled", "temperature=0.7", "top_p=0.9")
    assert {sampling["temperature"] for sampling in vllm.sampling} == {0.7}
    assert {sampling["top_p"] for sampling in vllm.sampling} == {0.9}
    assert len({sampling["seed"] for sampling in vllm.sampling}) == 6
    settings = read_json(here / "sampled" / "manifest.json")["settings"]
    assert (settings["temperature"], settings["top_p"]) == (0.7, 0.9)


def test_a_models_own_repetition_penalty(keepsight: CommandLine, here: Path, vllm: Vllm) -> None:
    """Transformers and vLLM's server read it from the model's generation_config.json, vLLM's engine does not."""
    keepsight(*DATA_WITH_TRANSFORMERS, "out=without_penalty", "max_new_tokens=12")
    path = here / "tiny" / "generation_config.json"
    write_json(path, read_json(path) | {"repetition_penalty": 1.9})
    keepsight(*DATA_WITH_TRANSFORMERS, "out=transformers", "max_new_tokens=12")
    keepsight(*DATA_WITH_VLLM, "out=vllm", "max_new_tokens=12")
    assert answers_of(here / "vllm") == answers_of(here / "transformers")
    assert answers_of(here / "transformers") != answers_of(here / "without_penalty")


def test_a_packaged_target_is_read_from_its_folder(
    keepsight: CommandLine, here: Path, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM knows nothing of the package, and would ask the Hub for the id."""
    monkeypatch.setattr(model_files, "hub_answers", lambda: False)
    monkeypatch.setattr(model_files, "installed_file", Path)
    monkeypatch.setattr(model_files, "dequantised", lambda path, digest: (here / "tiny", "sha256:packed"))
    packaged = ("model.id=ada/tiny", "model.packaged=package/tiny.gguf", "model.packaged_id=ada/tiny")
    keepsight("data", *packaged, *DATA, "backend=vllm", "out=vllm")
    assert [engine["model"] for engine in vllm.engines] == [str(here / "tiny")]
    settings = read_json(here / "vllm" / "manifest.json")["settings"]
    assert settings["model"] == "ada/tiny"
    assert settings["identity"]["model"] == "sha256:packed"


@pytest.mark.parametrize("fails_at", [-1, 1])
def test_the_engine_ends_with_the_data(keepsight: CommandLine, vllm: Vllm, fails_at: int) -> None:
    """Or its processes hold the GPU's memory while `keepsight fit` trains."""
    vllm.fails_at = fails_at
    if fails_at > 0:
        keepsight.fails(*DATA_WITH_VLLM)
    else:
        keepsight(*DATA_WITH_VLLM)
    assert len(vllm.engines) == 1
    assert vllm.shutdowns == 1


def test_an_engine_that_dies_is_one_line_and_the_data_can_be_resumed(
    keepsight: CommandLine, here: Path, vllm: Vllm
) -> None:
    vllm.fails_at = 2
    message = keepsight.refuses("vllm", "service", *DATA_WITH_VLLM)
    assert "EngineCore encountered an issue" in message
    assert "run the same command again" in message
    assert len([*(here / "data").glob("*.arrow")]) == 1  # of two samples
    assert keepsight(*DATA_WITH_VLLM).startswith("6 samples in data: ")
    assert len(vllm.engines) == 2
    assert keepsight(*DATA_WITH_VLLM).startswith("6 samples in data: ")
    assert len(vllm.engines) == 2, "nothing is left to answer"


def test_an_answer_that_was_cut_for_want_of_room_is_refused(keepsight: CommandLine, here: Path, vllm: Vllm) -> None:
    keepsight(*DATA_WITH_TRANSFORMERS, "out=transformers")
    longest = max(len(sample.prompt_ids) for sample in samples_of(here / "transformers"))
    codes: dict[int, Code] = {longest + 2: "range", longest: "service"}
    for context, code in codes.items():
        options = f"vllm={{max_model_len:{context}}}"
        keepsight.refuses("vllm", code, *DATA_WITH_VLLM, options, f"out=data-{context}")


def test_what_keeps_an_engine_from_starting_is_one_line(
    keepsight: CommandLine, here: Path, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)
        keepsight.refuses("vllm", "missing", *DATA_WITH_VLLM)
    assert not (here / "data").exists()
    with monkeypatch.context() as patch:
        patch.setattr(backends, "launched", lambda: SimpleNamespace(num_processes=2))
        keepsight.refuses("backend", "conflict", *DATA_WITH_VLLM)
    assert not (here / "data").exists()
    vllm.starts = False
    assert "Engine core initialization failed" in keepsight.refuses("vllm", "service", *DATA_WITH_VLLM)
    assert not vllm.engines
