"""`keepsight plan`: the table, its conclusions, and bad input."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from keepsight.errors import Code
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.retrieval.memory_plan import MemoryPlan
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import StepPlan, plan_step
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
EIGHT_B = ("model.id=8b", "requests=4", "retrieval_head.groups=1", "memory=24GiB")
BYTES = {"MiB": 2**20, "GiB": 2**30}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_from_a_configuration_alone(keepsight: CommandLine, here: Path) -> None:
    printed = keepsight("plan", *EIGHT_B)
    plan = MemoryPlan(24 * 2**30, 2 * 8_030_261_248, 2 * HEAD, 32, 8, 128, 4, 2048, 8 * 128 * 2, room=64, growth=1 / 16)
    model, table, conclusion, *_ = printed.split("\n\n")
    assert model.startswith("8b in bfloat16: 14.96 GiB of weights, 176.02 MiB of retrieval head; with 30% for")

    rows = [line.split() for line in table.splitlines()[1:]]
    layers_on_cpu = [int(row[0]) for row in rows]
    assert layers_on_cpu == list(range(33))
    tokens = [float(row[1]) for row in rows]
    assert tokens == [threshold // 4 for threshold in plan.thresholds]
    slots_mib = [float(row[2]) for row in rows]
    assert slots_mib[32] == pytest.approx(32 * plan.slots / 2**20, abs=0.05)
    tokens_of_paper = [float(row[3]) for row in rows]
    assert tokens_of_paper == list(plan.paper_thresholds(4))

    assert f"every layer stays on the GPU up to {plan.thresholds[0] // 4} tokens a request" in conclusion
    on_cpu = plan.layers_on_cpu(4 * 131072)
    assert f"context of 131072 tokens a request fits with {on_cpu} of 32 layers on the CPU; all of it " in conclusion
    assert tree(here) == ["8b/config.json"]


def test_what_the_context_needs(keepsight: CommandLine, here: Path) -> None:
    assert "fits with every layer on the GPU" in keepsight("plan", "model.id=8b", "memory=80GB")
    printed = keepsight("plan", "model.id=8b", "memory=24GiB", "requests=64")
    assert "does not fit: it needs" in printed
    assert "with 32 of 32 layers on the CPU" in printed


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


SMALL = {
    **SHAPE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1024,
}
ADVICE = {
    "gpus=8 shard=true": "lower tokens=",
    "gpus=8": "lower tokens= or try shard=true or model.quantize=nf4",
    "": "lower tokens= or try model.quantize=nf4",
    "stage=eviction": "lower tokens= or try finetune.gradient_checkpointing=true or model.quantize=nf4",
    "stage=eviction gpus=8 finetune.gradient_checkpointing=true": (
        "lower tokens= or try shard=true with finetune.train.replays=1 or model.quantize=nf4"
    ),
}
"""What to do about a training that does not fit."""
WRONG_TRAININGS: dict[str, tuple[str, Code]] = {
    "tokens=1000000000": ("tokens", "range"),
    "answer=100000": ("answer", "range"),
    "utilisation=2": ("utilisation", "range"),
    "model.quantize=int3": ("model.quantize", "unknown"),
    "model.device_map=auto": ("model.device_map", "conflict"),
    "model.device_map=fsdp2 shard=true": ("shard", "conflict"),
    "shard=true model.quantize=nf4": ("model.quantize", "conflict"),
    "shard=true stage=eviction": ("finetune.train.replays", "conflict"),
}


def test_a_training_from_a_configuration_alone(keepsight: CommandLine, here: Path) -> None:
    (here / "8b" / "config.json").write_text(json.dumps(SMALL))
    plan = ("plan", "train", "model.id=8b", "train.samples_per_step=16")
    printed = keepsight(*plan, "tokens=512", "answer=64", "gpus=8", "gpu=1GiB", "flops=100", "utilisation=0.5")
    assert printed.startswith("8b in bfloat16, a prompt of 512 and an answer of 64 tokens on each GPU\n")
    assert "of 1.00 GiB a GPU" in printed
    assert printed.count(": fits") == 1
    assert "at an assumed 50% of 100 TFLOP/s:" in printed
    assert re.match(r"[\d,]+ trainable parameters, \d+\.\d\d% of the model's [\d,]+$", printed.splitlines()[1])

    for keys, advice in ADVICE.items():
        printed = keepsight(*plan, "tokens=512", "gpu=10MiB", *keys.split())
        assert f"does not fit: {advice}\n" in printed
        assert ("sharded over 8 GPUs" in printed) == ("shard=true" in keys)

    for keys, refusal in WRONG_TRAININGS.items():
        keepsight.refuses(*refusal, *plan, *keys.split())


@pytest.mark.slow  # tests/train/test_plan.py divides a smaller one
def test_a_sharded_target_takes_less_of_each_gpu(keepsight: CommandLine, here: Path) -> None:
    """FSDP2 does not divide what is in no layer: embeddings and the LM head."""
    (here / "8b" / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 8, "vocab_size": 8192}))

    def weights(*sharding: str) -> float:
        """Bytes on each GPU."""
        printed = keepsight("plan", "train", "model.id=8b", "tokens=64", "answer=8", "gpus=8", *sharding)
        assert ("sharded over 8 GPUs" in printed) == bool(sharding)
        return _bytes_in_row(printed, "model's weights")

    unsharded = weights()
    zero3 = weights("shard=true")
    fsdp2 = weights("model.device_map=fsdp2")
    assert zero3 < fsdp2 < unsharded / 2
    embeddings_and_head = 2 * 2 * 8192 * 4096
    assert fsdp2 - zero3 == pytest.approx(embeddings_and_head * 7 / 8, rel=0.1)


def _bytes_in_row(printed: str, row: str) -> float:
    """The memory at the end of the line of a printed plan that begins with `row`, in bytes."""
    for line in printed.splitlines():
        if line.startswith(f"  {row}"):
            *_, number, unit = line.split()
            return float(number) * BYTES[unit]
    raise AssertionError(f"the plan has no row {row!r}")


def _times(printed: str) -> dict[str, float]:
    """What follows the assumption, in seconds by name."""
    seconds_of = {"s": 1.0, "min": 60.0, "h": 3600.0}
    times: dict[str, float] = {}
    for line in printed.partition("TFLOP/s:\n")[2].splitlines():
        name, number, unit = line.strip().rsplit(maxsplit=2)
        times[name.partition(",")[0]] = float(number) * seconds_of[unit]
    return times


def test_the_time_is_told_by_pass_and_step(keepsight: CommandLine, here: Path) -> None:
    """The base model reads a sample once, and every replay of what it gave takes a second pass."""
    (here / "8b" / "config.json").write_text(json.dumps(SMALL))
    plan = ["plan", "train", "model.id=8b", "lookahead.tokens=128", "tokens=512", "gpus=8"]
    plan += ["train.samples_per_step=16", "flops=0.001"]
    for replays in (1, 4):
        times = _times(keepsight(*plan, f"train.replays={replays}"))
        assert list(times) == [
            "first pass",
            "second pass and gradients",
            "a step of 16 samples on 8 GPUs",
            "86000 samples",
        ]
        first_pass, second_pass, step, all_samples = times.values()
        assert first_pass > second_pass > 0
        assert step == pytest.approx(2 * (first_pass / replays + second_pass), rel=0.15)  # printed with two digits
        assert all_samples == pytest.approx(86000 / 8 * (first_pass + replays * second_pass), rel=0.15)


@pytest.mark.slow  # tests/train/test_plan.py measures such a step
def test_the_eviction_stage_has_a_plan_of_its_own(keepsight: CommandLine, here: Path) -> None:
    """Recomputing leaves its memory to a layer; the model may be sharded."""
    (here / "8b" / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 8}))
    plan = ("plan", "train", "model.id=8b", "stage=eviction", "tokens=2048", "answer=128", "lookahead.tokens=8")

    def planned_bytes(row: str, *keys: str) -> float:
        return _bytes_in_row(keepsight(*plan, *keys), row)

    stored = planned_bytes("second pass and")
    recomputed = planned_bytes("second pass and", "finetune.gradient_checkpointing=true")
    assert recomputed < 0.5 * stored
    unsharded = planned_bytes("model's weights")
    for sharding in ("shard=true", "model.device_map=fsdp2"):
        assert planned_bytes("model's weights", sharding, "gpus=8", "finetune.train.replays=1") < 0.7 * unsharded


def test_flops_are_those_of_the_matrices(here: Path) -> None:
    """Of the first pass over N + T tokens, and of n soft tokens with gradients; attention aside."""
    config = LlamaConfig.from_dict(SMALL)
    settings = LookaheadSettings(tokens=8)

    def objective(model: PreTrainedModel) -> ImportanceObjective:
        return ImportanceObjective(Lookahead(model, settings))

    def plan_for(tokens: int) -> StepPlan:
        return plan_step(config, torch.bfloat16, objective, tokens, 64)

    short = plan_for(192)
    long = plan_for(448)
    added_flops = long.first_flops + long.second_flops - short.first_flops - short.second_flops
    layers = 4
    width = 256
    inner = 512
    kv_width = 8 * 32
    matrices = 2 * (2 * width * width + 2 * width * kv_width + 3 * width * inner)
    attention = 2 * (512**2 - 256**2) * 32 * 8
    assert added_flops == pytest.approx(layers * (256 * matrices + attention), rel=0.1)

    parameters_of_layer = 4 * width * width + 3 * width * inner + 2 * width
    assert short.parameters == 2 * 1024 * width + layers * parameters_of_layer + width
    lora = settings.rank * (4 * 2 * width + 3 * (width + inner))
    lora_of_last_layer = settings.rank * 2 * 2 * width  # its other matrices get no gradient
    assert short.trained == 8 * width + 3 * lora + lora_of_last_layer


def test_the_time_to_the_first_token_is_that_of_the_passes(keepsight: CommandLine, here: Path) -> None:
    """Llama 3.1 8B on an H100, by hand: 989 TFLOP/s and 3.35 TB/s, of which 0.7 and 0.9 are reached."""
    from keepsight.eval.bench.roofline import SHAPES

    SHAPES["llama-3.1-8b"].save_pretrained(here / "llama-3.1-8b")
    rows = [
        "card,kind,model,tokens,method,first_s",
        "NVIDIA H100 80GB HBM3,generate,llama-3.1-8b,8192,full,0.2",
        'NVIDIA H100 80GB HBM3,generate,llama-3.1-8b,8192,"lookaheadkv, uniform",0.21',
        "NVIDIA H100 80GB HBM3,generate,llama-3.1-8b,8192,snapkv,",
        "NVIDIA H100 NVL,generate,llama-3.1-8b,8192,full,0.9",  # another card
    ]
    (here / "gpu.csv").write_text("\n".join(rows))
    model = "model.id=llama-3.1-8b"
    printed = keepsight("plan", "ttft", model, "lengths=[8192]", "measured=gpu.csv", "draft.layers=[0,1,2,3]")
    _, heading, *lines = printed.splitlines()
    assert heading.split()[:2] == ["tokens", "method"]
    cells: dict[str, list[str]] = {}
    for line in lines:
        _, method, *numbers = re.split(" {2,}", line.strip())
        cells[method] = numbers
    assert list(cells) == ["forward pass only", "lookaheadkv", "snapkv", "speckv", "laq"]

    weights = 6_979_321_856
    attention = 4 * 8192 * 4096 * 32 * 4096
    flops = 2 * 8192 * weights + attention + 2 * 128256 * 4096
    tera_flops, _, milliseconds, *_, measured = cells["forward pass only"]
    assert float(tera_flops) == pytest.approx(flops / 1e12, abs=0.01)
    assert float(milliseconds) == pytest.approx(flops / (989e12 * 0.7) * 1e3, abs=0.1)
    assert measured == "200.0"
    assert cells["lookaheadkv"][-1] == "210.0"

    snapkv, lookaheadkv, speckv, laq = (float(cells[name][3]) for name in ("snapkv", "lookaheadkv", "speckv", "laq"))
    bytes_of_a_step = 8_030_261_248 * 2 + 2 * 32 * 8 * 128 * 2 * 160  # weights and entries
    step_ms = bytes_of_a_step / (3.35e12 * 0.9) * 1e3
    assert laq == pytest.approx(32 * step_ms + 2 * snapkv, rel=0.01)
    assert snapkv < lookaheadkv < 3 < speckv < laq

    keepsight.refuses("card", "unknown", "plan", "ttft", model, "card=H1")
    message = keepsight.fails("plan", "ttft", model, "measured=no.csv")
    assert message.startswith("measured=no.csv: no such file")
