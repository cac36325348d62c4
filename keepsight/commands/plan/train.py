"""keepsight plan train: the memory and time that training a lookahead module takes, before anything is loaded.

    keepsight plan train recipe=llama3.1-8b tokens=16384 gpus=8 gpu=80GB
    keepsight plan train recipe=llama3.1-70b tokens=16384 gpus=8 gpu=80GB shard=true
    keepsight plan train recipe=llama3.1-70b model.device_map=fsdp2 tokens=16384 gpus=8 gpu=80GB
    keepsight plan train recipe=llama3.3-70b model.quantize=nf4 tokens=8192 gpu=80GB

The step itself runs on tensors that hold nothing, which gives the memory that its tensors take at the worst moment:
within 10 % of what torch's allocator measures on small models. What a GPU's libraries and a fragmented allocator add,
often one or two GiB, is not in it. The times divide the counted operations by the GPU's peak at an assumed share of it.
"""

from dataclasses import dataclass

from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import outline_of
from keepsight.errors import UserError
from keepsight.files import read_bytes, size_text
from keepsight.models.targets import QUANTIZE
from keepsight.train.distributed import DIVIDED
from keepsight.train.lookahead.plan import StepPlan, plan_step


@dataclass
class Config(Recipe):
    """Keys of `keepsight plan train`; `model.dtype=auto` means bfloat16 here.

    Attributes:
        tokens: Longest prompt in tokens.
        answer: Longest answer in tokens.
        gpus: Number of GPUs.
        gpu: Memory of each: 80GB, 80GiB or a number of bytes.
        shard: Whether the target is divided over the GPUs by ZeRO-3; for FSDP2 give model.device_map=fsdp2.
        samples: Samples of the whole training.
        flops: Peak of a GPU in the target's dtype, in 1e12 operations a second; an H100's in bfloat16 by default.
        utilisation: Share of it that is assumed to be reached.
    """

    tokens: int = 16384
    answer: int = 512
    gpus: int = 1
    gpu: str = "80GB"
    shard: bool = False
    samples: int = 86000
    flops: float = 989.0
    utilisation: float = 0.4


def run(config: Config) -> None:
    """Print the plan."""
    at_least_one(config, "tokens", "answer", "gpus", "samples")
    for key, highest in (("flops", 1e6), ("utilisation", 1.0)):
        if not 0 < getattr(config, key) <= highest:
            raise UserError(f"{key}={getattr(config, key)} must be above 0 and at most {highest:g}")
    memory, quantize = read_bytes(config.gpu), config.model.quantize
    if quantize not in (None, *QUANTIZE):
        raise UserError(f"model.quantize={quantize} is unknown; choose one of {', '.join(QUANTIZE)}, or null")
    _check_placement(config)
    if config.train.batch_size > 1:
        raise UserError(f"train.batch_size={config.train.batch_size}: a plan is for one sample a GPU at a time")
    model, by_layer = outline_of(config), config.model.device_map == DIVIDED
    plan = plan_step(
        model.config,
        model.dtype,
        config.lookahead,
        config.train.far,
        config.tokens,
        config.answer,
        recomputes=config.train.gradient_checkpointing,
        cuts=config.train.cuts,
        quantize=quantize,
        shards=config.gpus if config.shard or by_layer else 1,
        layers_alone=by_layer,
    )
    dtype = quantize or str(model.dtype).removeprefix("torch.")
    print(
        f"{config.model.id} in {dtype}, a prompt of {config.tokens} and an answer of {config.answer} tokens on each GPU"
    )
    print("\n".join([*_memory(plan, memory, config), "", *_time(plan, config)]))


def _check_placement(config: Config) -> None:
    placed = config.model.device_map
    if placed == "auto":
        raise UserError("model.device_map=auto: where layers go is decided when the target is loaded; leave it out")
    if placed not in (None, DIVIDED):
        raise UserError(f"model.device_map={placed} is unknown here; choose {DIVIDED}, or null for whole targets")
    if placed and config.shard:
        raise UserError(f"shard=true is ZeRO-3, model.device_map={placed} is FSDP2: give one of them")
    if (placed or config.shard) and config.model.quantize:
        key = f"model.device_map={placed}" if placed else "shard=true"
        raise UserError(f"{key}: quantised weights cannot be divided; leave out model.quantize")


def _memory(plan: StepPlan, memory: int, config: Config) -> list[str]:
    divided = f", divided over {config.gpus} GPUs" if config.shard or config.model.device_map else ""
    fits = "fits" if plan.peak <= memory else "does not fit: lower tokens=, or try shard=true or model.quantize=nf4"
    rows = {
        f"target's weights{divided}": plan.weights,
        "module, its gradients and Adam's moments": plan.module,
        "first pass": plan.first,
        "second pass and gradients": plan.second,
    }
    listed = [f"  {name:<58} {size_text(size):>12}" for name, size in rows.items()]
    listed.insert(3, f"    of which KV entries and importance stay {size_text(plan.reading):>31}")
    return [*listed, f"  at the worst moment, of {size_text(memory)} a GPU {size_text(plan.peak):>31}: {fits}"]


def _time(plan: StepPlan, config: Config) -> list[str]:
    reached, uses = config.flops * 1e12 * config.utilisation, config.train.replays
    first, second = plan.first_flops / reached, plan.second_flops / reached
    step = max(1, config.train.samples_per_step or config.gpus)
    gpus = f"{config.gpus} GPU{'s' if config.gpus > 1 else ''}"
    times = {
        f"first pass, {plan.first_flops / 1e12:.1f} TFLOP": first,
        f"second pass and gradients, {plan.second_flops / 1e12:.1f} TFLOP": second,
        f"a step of {step} samples on {gpus}": -(-step // config.gpus) * (first / uses + second),
        f"{config.samples} samples, each read once and used {_times(uses)}": (first + uses * second)
        * config.samples
        / config.gpus,
    }
    return [
        f"at an assumed {config.utilisation:.0%} of {config.flops:g} TFLOP/s:",
        *(f"  {name:<58} {_duration(seconds):>12}" for name, seconds in times.items()),
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
