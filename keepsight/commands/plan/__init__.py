"""keepsight plan: how many layers must keep their KV entries in CPU memory, for a model, a GPU and a load.

    keepsight plan recipe=llama8b memory=24GiB requests=4 budget=2048
    keepsight plan recipe=qwen3-8b memory=40GB out=runs/plan.png
    keepsight plan model.id=path/to/a/folder/with/config.json memory=24GiB
    keepsight plan train recipe=llama8b tokens=16384 gpus=8 gpu=80GB

A method that reads a few KV entries per step, chosen by a retrieval head, needs few of them on the GPU: a layer whose
entries lie in CPU memory has `budget` slots there. For each number of such layers the table gives the longest request
that fits; as an answer grows past these lengths, layers move to the CPU one at a time, the last one first. The GPU also
holds the weights of the target and of a retrieval head of its shape, 30 % of both for activations, and the head's keys.
The last column is the formula of SpeContext (arXiv 2512.00722, algorithm 1, its line 3 corrected), which counts the
head's values and repeated KV heads as well. Only the model's configuration is fetched, no weights. `plan train` plans
the training of a lookahead module instead.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedModel

from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import outline_of
from keepsight.errors import UserError
from keepsight.eval.report.panels import GRID, look
from keepsight.eval.report.styles import STYLES
from keepsight.files import read_bytes, size_text, write_png
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.runtime.state import context_of
from keepsight.runtime.retrieval.memory_plan import MemoryPlan, plan_for

COMMANDS = {"train": "memory and time of a training, by part, before anything is loaded"}


@dataclass
class Config(Recipe):
    """Keys of `keepsight plan`; `model.dtype=auto` means bfloat16 here.

    Attributes:
        memory: GPU memory: 24GiB, 24GB or a number of bytes; by default that of this machine's GPU.
        requests: Number of requests decoded together.
        budget: KV entries that each KV head reads per token.
        out: PNG file for a plot of the table; none by default.
    """

    memory: str | None = None
    requests: int = 1
    budget: int = 2048
    out: str | None = None


def run(config: Config) -> None:
    """Print the table, and plot it."""
    at_least_one(config, "requests", "budget")
    memory = _memory(config.memory)
    model = outline_of(config)
    shape = config.retrieval_head
    head = RetrievalHead.untrained(model, shape.features, shape.max_tokens, shape.groups)
    size = sum(each.numel() for each in head.parameters()) * model.dtype.itemsize
    head_keys = head.kv_heads * head.config.head_dim * model.dtype.itemsize
    plan = plan_for(
        model,
        limit=memory,
        requests=config.requests,
        budget=config.budget,
        head=size,
        head_keys=head_keys,
        groups=shape.groups,
    )
    print("\n".join([*_given(config, model, plan), "", *_table(model, plan), "", *_conclusions(model, plan)]))
    if config.out is not None:
        write_png(Path(config.out), _figure(plan, config.model.id, context_of(model)))
        print(config.out)


def _memory(given: str | None) -> int:
    if given is not None:
        return read_bytes(given)
    if not torch.cuda.is_available():
        raise UserError("memory= is required, as this machine has no GPU; give the GPU's memory, such as memory=24GiB")
    return torch.cuda.get_device_properties(0).total_memory


def _given(config: Config, model: PreTrainedModel, plan: MemoryPlan) -> list[str]:
    dtype, left = str(model.dtype).removeprefix("torch."), plan.limit - plan.weights_held
    return [
        f"{config.model.id} in {dtype}: {size_text(plan.weights)} of weights, {size_text(plan.head)} of retrieval "
        f"head; with {plan.share - 1:.0%} for activations {size_text(plan.weights_held)}",
        f"a token: {plan.layers} layers x {plan.kv_heads} KV heads x {plan.head_dim} dimensions x 2 (keys, values) x "
        f"{plan.item} bytes = {plan.layers * plan.entry} bytes, and {plan.head_keys} of the head's keys",
        f"{size_text(plan.limit)} of memory, {_requests(plan)}, budget {plan.budget}: {size_text(left)} left "
        "for entries",
    ]


def _table(model: PreTrainedModel, plan: MemoryPlan) -> list[str]:
    """A line for each number of layers on the CPU."""
    config = model.config.get_text_config()
    published = plan.paper_thresholds(config.num_attention_heads // plan.kv_heads)
    lines = ["layers on the CPU  tokens a request  slots (MiB)  published formula"]
    for on_cpu, (length, paper) in enumerate(zip(plan.thresholds, published, strict=True)):
        slots = on_cpu * plan.slots / 2**20
        lines.append(f"{on_cpu:17}  {length // plan.requests:16}  {slots:10.1f}  {max(paper, 0):17}")
    return lines


def _conclusions(model: PreTrainedModel, plan: MemoryPlan) -> list[str]:
    context = context_of(model)
    needed, on_cpu = plan.least(context * plan.requests)
    if needed <= plan.limit:
        on_cpu = plan.layers_on_cpu(context * plan.requests)
        end = f"fits with {on_cpu} of {plan.layers} layers on the CPU" if on_cpu else "fits with every layer on the GPU"
    else:
        end = f"does not fit: it needs {size_text(needed)}, with {on_cpu} of {plan.layers} layers on the CPU"
    whole = plan.memory(context * plan.requests, 0)
    return [
        f"every layer stays on the GPU up to {plan.thresholds[0] // plan.requests} tokens a request",
        f"the model's context of {context} tokens a request {end}; all of it on the GPU takes {size_text(whole)}",
    ]


def _requests(plan: MemoryPlan) -> str:
    return f"{plan.requests} request{'s' if plan.requests > 1 else ''}"


def _figure(plan: MemoryPlan, name: str, context: int) -> Figure:
    """Layers on the CPU against the length of a request, up to the model's context."""
    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    panel = figure.subplots()
    fitting = [length // plan.requests for length in plan.thresholds]
    lengths = [length for length in fitting if length < context]
    ends = [context] if len(lengths) < len(fitting) else []
    layers = range(len(lengths) + len(ends))
    panel.step([0, *lengths, *ends], [0, *layers], where="pre", color=STYLES["lookaheadkv"].colour, linewidth=1.6)
    if not ends:
        panel.axvspan(lengths[-1], context, color=GRID, linewidth=0)
        panel.text((lengths[-1] + context) / 2, plan.layers / 2, "does not fit", ha="center", rotation=90, fontsize=8.5)
    panel.set_title(f"{name}, {size_text(plan.limit)}, {_requests(plan)}", fontsize=10)
    panel.set(xlabel=f"tokens a request, up to the context of {context}", ylabel="layers on the CPU")
    panel.set(xlim=(0, context), ylim=(0, plan.layers))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    look(panel)
    return figure
