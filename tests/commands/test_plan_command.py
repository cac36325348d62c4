"""`keepsight plan`: the table, its conclusions, and bad input."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from keepsight.errors import Code
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.retrieval.memory_plan import MemoryPlan
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import plan_step
from tests.commands.commands import CommandLine, tree

# Names, not weights: the shape of Llama-3.1-8B.
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
HEAD = 4096 * 12288 + 8192 * (4096 + 1024) + 2 * 4096
"""Parameters of a retrieval head: what combines the features, queries and keys, two norms."""
OF_EIGHT_B = ("model.id=8b", "requests=4", "retrieval_head.groups=1")
EIGHT_B = (*OF_EIGHT_B, "memory=24GiB")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _rows(printed: str) -> list[list[float]]:
    lines = printed.split("\n\n")[1].splitlines()
    return [[float(value) for value in line.split()] for line in lines[1:]]


def test_a_table_from_a_configuration_alone(keepsight: CommandLine, here: Path) -> None:
    printed = keepsight("plan", *EIGHT_B)
    plan = MemoryPlan(24 * 2**30, 2 * 8_030_261_248, 2 * HEAD, 32, 8, 128, 4, 2048, 8 * 128 * 2, room=64, growth=1 / 16)
    rows = _rows(printed)
    assert [row[0] for row in rows] == list(range(33))
    assert [row[1] for row in rows] == [length // 4 for length in plan.thresholds]
    assert [row[3] for row in rows] == list(plan.paper_thresholds(4))
    assert rows[32][2] == pytest.approx(32 * plan.slots / 2**20, abs=0.05)
    given, conclusion = printed.split("\n\n")[0], printed.split("\n\n")[2]
    assert given.startswith("8b in bfloat16: 14.96 GiB of weights, 176.02 MiB of retrieval head; with 30% for")
    assert f"every layer stays on the GPU up to {plan.thresholds[0] // 4} tokens a request" in conclusion
    on_cpu = plan.layers_on_cpu(4 * 131072)
    assert f"context of 131072 tokens a request fits with {on_cpu} of 32 layers on the CPU; all of it " in conclusion
    assert tree(here) == ["8b/config.json"]


def test_what_the_context_needs(keepsight: CommandLine, here: Path) -> None:
    assert "fits with every layer on the GPU" in keepsight("plan", "model.id=8b", "memory=80GB")
    printed = keepsight("plan", "model.id=8b", "memory=24GiB", "requests=64")
    assert "does not fit: it needs" in printed and "with 32 of 32 layers on the CPU" in printed


@pytest.mark.usefixtures("drawn")
def test_a_plot(keepsight: CommandLine, here: Path) -> None:
    assert keepsight("plan", *EIGHT_B, "out=plots/plan.png").splitlines()[-1] == "plots/plan.png"
    assert (here / "plots" / "plan.png").read_bytes().startswith(b"\x89PNG")


WRONG: dict[str, tuple[str, Code]] = {
    "memory=8GiB": ("limit", "memory"),
    "memory=24gib": ("memory", "type"),
    "memory=null": ("memory", "missing"),
    "model.dtype=float8": ("model.dtype", "unknown"),
    "model.id=.": ("model.id", "file"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input(keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keepsight.refuses(*WRONG[wrong], "plan", *EIGHT_B, wrong)


SMALL = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}


def test_a_training_from_a_configuration_alone(keepsight: CommandLine, here: Path) -> None:
    (here / "8b" / "config.json").write_text(json.dumps(SMALL | {"num_attention_heads": 8}))
    given = ("plan", "train", "model.id=8b", "train.samples_per_step=16")
    printed = keepsight(*given, "tokens=512", "answer=64", "gpus=8", "gpu=1GiB", "flops=100", "utilisation=0.5")
    assert printed.startswith("8b in bfloat16, a prompt of 512 and an answer of 64 tokens on each GPU\n")
    assert "of 1.00 GiB a GPU" in printed and printed.count(": fits") == 1
    assert "at an assumed 50% of 100 TFLOP/s:" in printed
    assert re.match(r"[\d,]+ trainable parameters, \d+\.\d\d% of the model's [\d,]+$", printed.splitlines()[1])
    printed = keepsight(*given, "tokens=512", "gpu=10MiB", "gpus=8", "shard=true")
    assert "does not fit: lower tokens=\n" in printed and "sharded over 8 GPUs" in printed
    tries = {
        "gpus=8": "try shard=true or model.quantize=nf4",
        "": "try model.quantize=nf4",
        "stage=eviction": "try finetune.gradient_checkpointing=true or model.quantize=nf4",
        "stage=eviction gpus=8 finetune.gradient_checkpointing=true": (
            "try shard=true with finetune.train.replays=1 or model.quantize=nf4"
        ),
    }
    for keys, said in tries.items():
        printed = keepsight(*given, "tokens=512", "gpu=10MiB", *keys.split())
        assert f"does not fit: lower tokens= or {said}\n" in printed
    fsdp2 = "model.device_map=fsdp2"
    wrong: dict[str, tuple[str, Code]] = {
        "tokens=1000000000": ("tokens", "range"),
        "answer=100000": ("answer", "range"),
        "utilisation=2": ("utilisation", "range"),
        "model.quantize=int3": ("model.quantize", "unknown"),
        "model.device_map=auto": ("model.device_map", "conflict"),
        f"{fsdp2} shard=true": ("shard", "conflict"),
        "shard=true model.quantize=nf4": ("model.quantize", "conflict"),
        "shard=true stage=eviction": ("finetune.train.replays", "conflict"),
    }
    for keys, refusal in wrong.items():
        keepsight.refuses(*refusal, *given, *keys.split())


@pytest.mark.slow  # tests/train/test_plan.py divides a smaller one
def test_a_sharded_target_takes_less_of_each_gpu(keepsight: CommandLine, here: Path) -> None:
    """FSDP2 leaves whole what is in no layer: embeddings and what makes logits."""
    (here / "8b" / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 8, "vocab_size": 8192}))
    given = ("plan", "train", "model.id=8b", "tokens=64", "answer=8", "gpus=8")

    def weights(*more: str) -> float:
        printed = keepsight(*given, *more)
        assert ("sharded over 8 GPUs" in printed) == bool(more)
        number, unit = printed.splitlines()[1].split()[-2:]
        return float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]

    outside = 2 * 2 * 8192 * 4096
    whole, zero3, fsdp2 = weights(), weights("shard=true"), weights("model.device_map=fsdp2")
    assert zero3 < fsdp2 < whole / 2
    assert fsdp2 - zero3 == pytest.approx(outside * 7 / 8, rel=0.1)


def _times(printed: str) -> dict[str, float]:
    """What follows the assumption, in seconds by name."""
    units = {"s": 1.0, "min": 60.0, "h": 3600.0}
    lines = printed.partition("TFLOP/s:\n")[2].splitlines()
    split = (line.strip().rsplit(maxsplit=2) for line in lines)
    return {name.partition(",")[0]: float(value) * units[unit] for name, value, unit in split}


def test_the_time_is_told_by_part(keepsight: CommandLine, here: Path) -> None:
    """A reading is made once, and each of its uses takes a second pass."""
    (here / "8b" / "config.json").write_text(json.dumps(SMALL | {"num_attention_heads": 8}))
    given = ["plan", "train", "model.id=8b", "lookahead.tokens=128", "tokens=512", "gpus=8"]
    given += ["train.samples_per_step=16", "flops=0.001"]
    for replays in (1, 4):
        times = _times(keepsight(*given, f"train.replays={replays}"))
        first, second, step, whole = times.values()
        parts = ("first pass", "second pass and gradients", "a step of 16 samples on 8 GPUs", "86000 samples")
        assert tuple(times) == parts
        assert first > second > 0
        assert step == pytest.approx(2 * (first / replays + second), rel=0.15)  # of two digits
        assert whole == pytest.approx(86000 / 8 * (first + replays * second), rel=0.15)


@pytest.mark.slow  # tests/train/test_plan.py measures such a step
def test_the_eviction_stage_has_a_plan_of_its_own(keepsight: CommandLine, here: Path) -> None:
    """Recomputing leaves its memory to a layer; the model may be sharded."""
    (here / "8b" / "config.json").write_text(json.dumps(SMALL | {"num_attention_heads": 8, "num_hidden_layers": 8}))
    given = ["plan", "train", "model.id=8b", "stage=eviction", "tokens=2048", "answer=128", "lookahead.tokens=8"]

    def planned(what: str, *more: str) -> float:
        line = next(each for each in keepsight(*given, *more).splitlines() if each.startswith(f"  {what}"))
        number, unit = line.split()[-2:]
        return float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]

    second, weights = "second pass and", "model's weights"
    assert planned(second, "finetune.gradient_checkpointing=true") < 0.5 * planned(second)
    for sharded in ("shard=true", "model.device_map=fsdp2"):
        assert planned(weights, sharded, "gpus=8") < 0.7 * planned(weights)


def test_flops_are_those_of_the_matrices(here: Path) -> None:
    """Of the first pass over N + T tokens, and of n soft tokens with gradients; attention aside."""
    config = LlamaConfig.from_dict(SMALL | {"num_attention_heads": 8})
    settings = LookaheadSettings(tokens=8)
    plans = [
        plan_step(config, torch.bfloat16, lambda model: ImportanceObjective(Lookahead(model, settings)), tokens, 64)
        for tokens in (192, 448)
    ]
    flops = [plan.first_flops + plan.second_flops for plan in plans]
    width, inner, kv = 256, 512, 8 * 32
    layer = 2 * (2 * width * width + 2 * width * kv + 3 * width * inner)
    attention = 2 * (512**2 - 256**2) * 32 * 8
    assert flops[1] - flops[0] == pytest.approx(4 * (256 * layer + attention), rel=0.1)
    of_layer = 4 * width * width + 3 * width * inner + 2 * width
    assert plans[0].parameters == 2 * 1024 * width + 4 * of_layer + width
    lora = settings.rank * (4 * 2 * width + 3 * (width + inner))
    last = settings.rank * 2 * 2 * width  # the rest of the last layer gets no gradient
    assert plans[0].trained == 8 * width + 3 * lora + last


def test_the_time_to_the_first_token_is_that_of_the_passes(keepsight: CommandLine, here: Path) -> None:
    """Llama 3.1 8B on an H100, by hand: 989 TFLOP/s and 3.35 TB/s, of which 0.7 and 0.9 are reached."""
    from keepsight.eval.bench.roofline import SHAPES

    SHAPES["llama-3.1-8b"].save_pretrained(here / "llama-3.1-8b")
    columns = "card,kind,model,tokens,method,first_s\n"
    rows = ("full,0.2", '"lookaheadkv, uniform",0.21', "snapkv,")
    lines = [f"NVIDIA H100 80GB HBM3,generate,llama-3.1-8b,8192,{row}" for row in rows]
    lines.append("NVIDIA H100 NVL,generate,llama-3.1-8b,8192,full,0.9")  # another card
    (here / "gpu.csv").write_text(columns + "\n".join(lines))
    given = ("model.id=llama-3.1-8b", "lengths=[8192]", "measured=gpu.csv", "draft.layers=[0,1,2,3]")
    _, names, *found = keepsight("plan", "ttft", *given).splitlines()
    assert names.split()[:2] == ["tokens", "method"]
    cells = {name: figures for _, name, *figures in (re.split(" {2,}", line.strip()) for line in found)}
    assert list(cells) == ["forward pass only", "lookaheadkv", "snapkv", "speckv", "laq"]
    weights, attention = 6_979_321_856, 4 * 8192 * 4096 * 32 * 4096
    flops = 2 * 8192 * weights + attention + 2 * 128256 * 4096
    assert float(cells["forward pass only"][0]) == pytest.approx(flops / 1e12, abs=0.01)
    assert float(cells["forward pass only"][2]) == pytest.approx(flops / (989e12 * 0.7) * 1e3, abs=0.1)
    overhead = {name: float(each[3]) for name, each in cells.items() if name != "forward pass only"}
    step = (8_030_261_248 * 2 + 2 * 32 * 8 * 128 * 2 * 160) / (3.35e12 * 0.9) * 1e3  # reads the weights
    assert overhead["laq"] == pytest.approx(32 * step + 2 * overhead["snapkv"], rel=0.01)
    assert overhead["snapkv"] < overhead["lookaheadkv"] < 3 < overhead["speckv"] < overhead["laq"]
    assert (cells["forward pass only"][-1], cells["lookaheadkv"][-1]) == ("200.0", "210.0")
    keepsight.refuses("card", "unknown", "plan", "ttft", *given[:1], "card=H1")
    assert keepsight.fails("plan", "ttft", *given[:1], "measured=no.csv").startswith("measured=no.csv: no such file")
