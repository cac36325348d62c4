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
ASKED = (*TINY, *DATA, "backend=vllm")


class Vllm(ModuleType):
    """Stands for the package vllm: as much of it as is used, answering with transformers.

    Like the real one it reads a folder or a Hub id alone, takes no repetition penalty from a model's files, gives the
    end token back, and cuts an answer silently where `max_model_len` leaves it less room.
    """

    def __init__(self) -> None:
        super().__init__("vllm")
        self.made: list[dict[str, Any]] = []
        self.calls = self.ended = 0
        self.fails_at, self.sampling = -1, list[dict[str, Any]]()
        self.starts = True

    def SamplingParams(
        self, *, max_tokens: int, stop_token_ids: list[int], repetition_penalty: float = 1.0, **sampling: Any
    ) -> SimpleNamespace:
        self.sampling.append(sampling)
        return SimpleNamespace(max_tokens=max_tokens, ends=stop_token_ids, penalty=repetition_penalty)

    def LLM(self, model: str, **options: Any) -> Any:
        if not self.starts:
            raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        assert Path(model).is_dir(), "Cannot find an appropriate cached snapshot folder"
        self.made.append({"model": model, **options})
        target = load_target(model, device="cpu", dtype="float32")
        room = options.get("max_model_len", 4096)

        def answer(ids: list[int], sampling: SimpleNamespace) -> Any:
            if len(ids) >= room:
                raise ValueError(f"This model's maximum context length is {room} tokens.")
            longest = min(sampling.max_tokens, room - len(ids))
            given: dict[str, Any] = {"max_new_tokens": longest, "eos_token_id": sampling.ends, "do_sample": False}
            generate: Any = target.model.generate
            asked = torch.tensor([ids])
            out = generate(asked, attention_mask=torch.ones_like(asked), repetition_penalty=sampling.penalty, **given)
            made = out[0, len(ids) :].tolist()
            reason = "stop" if made[-1] in sampling.ends else "length"
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(made), finish_reason=reason)])

        def generate(prompts: list[dict[str, Any]], sampling: list[SimpleNamespace], *, use_tqdm: bool) -> Any:
            self.calls += 1
            if self.calls == self.fails_at:
                raise RuntimeError("EngineCore encountered an issue.\nSee stack trace (above) for the root cause.")
            return [answer(each["prompt_token_ids"], own) for each, own in zip(prompts, sampling, strict=True)]

        def shutdown() -> None:
            self.ended += 1

        core = SimpleNamespace(shutdown=shutdown)
        return SimpleNamespace(generate=generate, llm_engine=SimpleNamespace(engine_core=core))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    monkeypatch.setitem(sys.modules, "vllm", made := Vllm())
    return made


def test_vllm_answers_as_transformers_does(
    keepsight: CommandLine, here: Path, engine: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(data, "training_dtype", lambda model: "float32")  # with auto vLLM takes what the files hold
    keepsight("data", *ASKED, "model.revision=v2", "vllm={max_model_len:900,enforce_eager:true}", "out=vllm")
    given = {"revision": "v2", "dtype": "float32", "trust_remote_code": False}
    given |= {"max_model_len": 900, "enforce_eager": True}
    assert engine.made == [{"model": "tiny", "tensor_parallel_size": 2, **given}]
    keepsight("data", *TINY, *DATA, "out=own")
    own, theirs = (read_json(here / name / "manifest.json") for name in ("own", "vllm"))
    assert theirs == own
    assert engine.sampling == [{"temperature": 0.0}] * 6
    engine.sampling.clear()
    keepsight("data", *ASKED, "out=sampled", "temperature=0.7", "top_p=0.9")
    assert {(each["temperature"], each["top_p"]) for each in engine.sampling} == {(0.7, 0.9)}
    assert len({each["seed"] for each in engine.sampling}) == 6
    settings = read_json(here / "sampled" / "manifest.json")["settings"]
    assert (settings["temperature"], settings["top_p"]) == (0.7, 0.9)


def test_a_models_own_repetition_penalty(keepsight: CommandLine, here: Path, engine: Vllm) -> None:
    """Which transformers and vLLM's server read from its generation_config.json, vLLM's engine not."""
    keepsight("data", *TINY, *DATA, "out=before", "max_new_tokens=12")
    path = here / "tiny" / "generation_config.json"
    write_json(path, read_json(path) | {"repetition_penalty": 1.9})
    keepsight("data", *TINY, *DATA, "out=own", "max_new_tokens=12")
    keepsight("data", *ASKED, "out=vllm", "max_new_tokens=12")
    before, own, theirs = ([row.answer_ids for row in samples_of(here / each)] for each in ("before", "own", "vllm"))
    assert theirs == own != before


def test_a_packaged_target_is_read_from_its_folder(
    keepsight: CommandLine, here: Path, engine: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM knows nothing of the package, and would ask the Hub for the id."""
    monkeypatch.setattr(model_files, "hub_answers", lambda: False)
    monkeypatch.setattr(model_files, "installed_file", Path)
    monkeypatch.setattr(model_files, "dequantised", lambda path, digest: (here / "tiny", "sha256:packed"))
    packaged = ("model.id=ada/tiny", "model.packaged=package/tiny.gguf", "model.packaged_id=ada/tiny")
    keepsight("data", *packaged, *DATA, "backend=vllm", "out=vllm")
    assert [each["model"] for each in engine.made] == [str(here / "tiny")]
    settings = read_json(here / "vllm" / "manifest.json")["settings"]
    assert (settings["model"], settings["identity"]["model"]) == ("ada/tiny", "sha256:packed")


@pytest.mark.parametrize("fails_at", [-1, 1])
def test_the_engine_ends_with_the_data(keepsight: CommandLine, engine: Vllm, fails_at: int) -> None:
    """Or its processes hold the GPU's memory while `keepsight fit` trains."""
    engine.fails_at = fails_at
    (keepsight if fails_at < 0 else keepsight.fails)("data", *ASKED)
    assert (len(engine.made), engine.ended) == (1, 1)


def test_an_engine_that_dies_is_one_line_and_is_gone_on_with(keepsight: CommandLine, here: Path, engine: Vllm) -> None:
    engine.fails_at = 2
    said = keepsight.refuses("vllm", "service", "data", *ASKED)
    assert "EngineCore encountered an issue" in said and "run the same command again" in said
    assert len([*(here / "data").glob("*.arrow")]) == 1  # of two samples
    assert keepsight("data", *ASKED).startswith("6 samples in data: ")
    assert len(engine.made) == 2
    assert keepsight("data", *ASKED).startswith("6 samples in data: ")
    assert len(engine.made) == 2  # nothing is left to answer


def test_an_answer_that_was_cut_for_want_of_room_is_refused(keepsight: CommandLine, here: Path, engine: Vllm) -> None:
    keepsight("data", *TINY, *DATA, "out=own")
    longest = max(len(row.prompt_ids) for row in samples_of(here / "own"))
    codes: dict[int, Code] = {longest + 2: "range", longest: "service"}
    for room, code in codes.items():
        keepsight.refuses("vllm", code, "data", *ASKED, f"vllm={{max_model_len:{room}}}", f"out=data-{room}")


def test_what_keeps_an_engine_from_starting_is_one_line(
    keepsight: CommandLine, here: Path, engine: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[Any, str, Any, str, Code]] = [
        (sys.modules, "vllm", None, "vllm", "missing"),
        (backends.__dict__, "launched", lambda: SimpleNamespace(num_processes=2), "backend", "conflict"),
    ]
    for patched, name, value, field, code in cases:
        with monkeypatch.context() as patch:
            patch.setitem(patched, name, value)
            keepsight.refuses(field, code, "data", *ASKED)
        assert not (here / "data").exists()
    engine.starts = False
    assert "Engine core initialization failed" in keepsight.refuses("vllm", "service", "data", *ASKED)
    assert not engine.made
