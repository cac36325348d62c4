"""keepsight plan: memory of entries on the CPU and of training a lookahead module; time to the first token."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedModel

from keepsight.commands.config_bench import Plan as Config
from keepsight.commands.config_bench import PlanTrain, PlanTtft
from keepsight.commands.config_shared import ModelConfig, UsesModel
from keepsight.commands.from_recipe import outline_of
from keepsight.errors import UserError
from keepsight.eval.bench.roofline import CARDS, known_card, measured_on, table_lines
from keepsight.eval.report.figures import GRID, STYLES, look
from keepsight.files import read_bytes, require_writable, size_text, write_png
from keepsight.models.decoder import context_of, decoder_of
from keepsight.models.lookahead import Lookahead
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import QUANTIZE
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods.lookaheadkv import selection_fields
from keepsight.runtime.retrieval.memory_plan import MemoryPlan, plan_for
from keepsight.train.distributed import DIVIDED
from keepsight.train.eviction import EvictionObjective, TokensInTraining
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import StepPlan, plan_step
from keepsight.train.settings import TrainSettings


def run(config: Config) -> None:
    """Print the table, and plot it."""
    if config.out is not None:
        require_writable(Path(config.out), folder=False)
    memory = _memory(config.memory)
    model = outline_of(config)
    shape = config.retrieval_head
    head = RetrievalHead.untrained(model, shape.features, shape.max_tokens, shape.groups)
    size = sum(each.numel() for each in head.parameters()) * model.dtype.itemsize
    head_keys = head.kv_heads * head.config.head_dim * model.dtype.itemsize
    load = {"requests": config.requests, "budget": config.budget, "groups": shape.groups}
    plan = plan_for(model, limit=memory, head=size, head_keys=head_keys, **load)
    print("\n".join([*_assumptions(config, model, plan), "", *_table(model, plan), "", *_conclusions(model, plan)]))
    if config.out is not None:
        write_png(Path(config.out), _figure(plan, config.model.id, context_of(model)))
        print(config.out)


def _memory(named: str | None) -> int:
    if named is not None:
        return read_bytes(named)
    if not torch.cuda.is_available():
        raise UserError("memory= is required, as this machine has no GPU; give the GPU's memory, such as memory=24GiB")
    return torch.cuda.get_device_properties(0).total_memory


def _assumptions(config: Config, model: PreTrainedModel, plan: MemoryPlan) -> list[str]:
    dtype, left = str(model.dtype).removeprefix("torch."), plan.limit - plan.weights_held
    return [
        f"{config.model.id} in {dtype}: {size_text(plan.weights)} of weights, {size_text(plan.head)} of retrieval "
        f"head; with {plan.share - 1:.0%} for activations {size_text(plan.weights_held)}",
        f"a token: {plan.layers} layers x {plan.kv_heads} KV heads x {plan.head_dim} dimensions x 2 (keys, values) x "
        f"{plan.item} bytes = {plan.layers * plan.entry} bytes, and {plan.head_keys} of the head's keys",
        f"{size_text(plan.limit)} of memory, requests={plan.requests}, budget={plan.budget}: {size_text(left)} left "
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
    panel.set_title(f"{name}, {size_text(plan.limit)}, {plan.requests} request{'s' * (plan.requests > 1)}", fontsize=10)
    panel.set(xlabel=f"tokens a request, up to the context of {context}", ylabel="layers on the CPU")
    panel.set(xlim=(0, context), ylim=(0, plan.layers))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    look(panel)
    return figure


def run_ttft(config: PlanTtft) -> None:
    """Print the table."""
    if config.card not in CARDS:
        raise UserError(f"card={config.card} is unknown; choose one of {', '.join(CARDS)}")
    measured = measured_on(Path(config.measured), config.card, config.model.id) if config.measured else {}
    model, draft = outline_of(config), None
    if config.draft.id is not None:
        given = ModelConfig(config.draft.id, config.draft.revision, dtype=config.model.dtype)
        draft = outline_of(UsesModel(given))
    elif config.draft.layers is not None:
        draft = outline_of(config)
        draft.config.get_text_config(decoder=True).num_hidden_layers = len(config.draft.layers)
        layers = decoder_of(draft).layers
        del layers[len(config.draft.layers) :]
    print("\n".join(table_lines(model, draft, known_card(config.card), config.lengths, config.budget, measured)))
    if draft is None:
        print("speckv needs a draft: draft.id= or draft.layers=")


def run_training(config: PlanTrain) -> None:
    """Print the plan."""
    memory, quantize = read_bytes(config.gpu), config.model.quantize
    _check(config)
    model, by_layer = outline_of(config), config.model.device_map == DIVIDED
    context = context_of(model)
    tokens = config.tokens or min(16384, context)
    if tokens > context:
        raise UserError(f"tokens={tokens} is more than the model's context of {context}; lower it")
    step = model.config, model.dtype, partial(_objective, config), tokens, config.answer
    shards = config.gpus if config.shard or by_layer else 1
    plan = plan_step(*step, quantize=quantize, shards=shards, layers_alone=by_layer)
    dtype = quantize or str(model.dtype).removeprefix("torch.")
    print(f"{config.model.id} in {dtype}, a prompt of {tokens} and an answer of {config.answer} tokens on each GPU")
    print("\n".join([*_training_memory(plan, memory, config), "", *_time(plan, config)]))


def _objective(config: PlanTrain, model: PreTrainedModel) -> ImportanceObjective | EvictionObjective:
    lookahead, train = Lookahead(model, config.lookahead), config.train
    if config.stage == "importance":
        return ImportanceObjective(lookahead, train.far, train.gradient_checkpointing, train.cuts)
    parts = selection_fields(replace(config.lookahead, sharing="model"))  # as `keepsight finetune` trains
    allocate = parts.pop("allocate")
    method = Evict(1, TokensInTraining(lookahead), **parts)
    return EvictionObjective(model, method, allocate, config.finetune, lookahead)


def _training(config: PlanTrain) -> TrainSettings:
    return config.train if config.stage == "importance" else config.finetune.train


def _key(config: PlanTrain) -> str:
    return "train" if config.stage == "importance" else "finetune.train"


def _check(config: PlanTrain) -> None:
    placed, quantize = config.model.device_map, config.model.quantize
    if config.stage == "eviction" and config.finetune.freeze_module:
        raise UserError("finetune.freeze_module=true: a plan is for a module in training; leave it out")
    if quantize not in (None, *QUANTIZE):
        raise UserError(f"model.quantize={quantize} is unknown; choose one of {', '.join(QUANTIZE)}, or null")
    if (size := _training(config).batch_size) > 1:
        raise UserError(f"{_key(config)}.batch_size={size}: a plan is for one sample a GPU at a time")
    if placed == "auto":
        raise UserError("model.device_map=auto: where layers go is decided when the model is loaded; leave it out")
    if placed not in (None, DIVIDED):
        raise UserError(f"model.device_map={placed} is unknown here; choose {DIVIDED}, or null for the whole model")
    if placed and config.shard:
        raise UserError(f"shard=true is ZeRO-3, model.device_map={placed} is FSDP2: give one of them")
    if (placed or config.shard) and (replays := _training(config).replays) > 1:
        raise UserError(f"{_key(config)}.replays={replays}: with ZeRO-3 or FSDP2 use 1")
    if (placed or config.shard) and quantize:
        key = f"model.device_map={placed}" if placed else "shard=true"
        raise UserError(f"{key}: quantised weights cannot be divided; leave out model.quantize")


def _training_memory(plan: StepPlan, memory: int, config: PlanTrain) -> list[str]:
    divided = f", divided over {config.gpus} GPUs" if config.shard or config.model.device_map else ""
    fits = "fits" if plan.peak <= memory else f"does not fit: {' or '.join(['lower tokens=', *_savings(plan, config)])}"
    rows = {
        f"model's weights{divided}": plan.weights,
        "module, its gradients and Adam's moments": plan.module,
        "first pass": plan.first,
        "second pass and gradients": plan.second,
    }
    listed = [f"  {name:<58} {size_text(size):>12}" for name, size in rows.items()]
    listed.insert(3, f"    of which KV entries and importance stay {size_text(plan.outputs):>31}")
    return [*listed, f"  at the worst moment, of {size_text(memory)} a GPU {size_text(plan.peak):>31}: {fits}"]


def _savings(plan: StepPlan, config: PlanTrain) -> list[str]:
    """What else saves memory: keys that are not given yet."""
    key, section = ("train", config.train) if config.stage == "importance" else ("finetune", config.finetune)
    found = list[str]()
    if plan.second > plan.first and not section.gradient_checkpointing:
        found.append(f"{key}.gradient_checkpointing=true")
    if not (config.shard or config.model.device_map or config.model.quantize):
        if config.gpus > 1:
            once = f" with {_key(config)}.replays=1" * (_training(config).replays > 1)
            found.append(f"shard=true{once}")
        found.append("model.quantize=nf4")
    return [f"try {found[0]}", *found[1:]] if found else []


def _time(plan: StepPlan, config: PlanTrain) -> list[str]:
    reached, uses = config.flops * 1e12 * config.utilisation, _training(config).replays
    first, second = plan.first_flops / reached, plan.second_flops / reached
    step = max(1, _training(config).samples_per_step or config.gpus)
    gpus = f"{config.gpus} GPU{'s' if config.gpus > 1 else ''}"
    times = {
        f"first pass, {plan.first_flops / 1e12:.1f} TFLOP": first,
        f"second pass and gradients, {plan.second_flops / 1e12:.1f} TFLOP": second,
        f"a step of {step} samples on {gpus}": -(-step // config.gpus) * (first / uses + second),
        f"{config.samples} samples, each read once and used {f'{uses} times' if uses > 1 else 'once'}": (
            first + uses * second
        )
        * config.samples
        / config.gpus,
    }
    return [
        f"at an assumed {config.utilisation:.0%} of {config.flops:g} TFLOP/s:",
        *(f"  {name:<58} {_duration(seconds):>12}" for name, seconds in times.items()),
    ]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
