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
from keepsight.eval.bench.roofline import CARDS, first_tokens, known_card, measured_on
from keepsight.eval.report.figures import GRID, STYLES, look
from keepsight.files import read_bytes, require_writable, size_text, write_png
from keepsight.models.decoder import context_of, decoder_layers
from keepsight.models.lookahead import Lookahead
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import QUANTIZE
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods.lookaheadkv import selection_fields
from keepsight.runtime.retrieval.memory_plan import MemoryPlan, plan_for
from keepsight.tables import TerminalColumn, terminal_list, terminal_table
from keepsight.train.distributed import SHARDED
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
    settings = config.retrieval_head
    head = RetrievalHead.untrained(model, settings.features, settings.max_tokens, settings.groups)
    plan = plan_for(
        model,
        limit=memory,
        head=sum(parameter.numel() for parameter in head.parameters()) * model.dtype.itemsize,
        head_keys=head.kv_heads * head.config.head_dim * model.dtype.itemsize,
        requests=config.requests,
        budget=config.budget,
        groups=settings.groups,
    )
    print("\n".join([*_assumptions(config, model, plan), "", _table(model, plan), "", *_conclusions(model, plan)]))
    if config.out is not None:
        write_png(Path(config.out), _figure(plan, config.model.id, context_of(model)))
        print(config.out)


def _memory(size: str | None) -> int:
    """Bytes of GPU memory: as given, or those of this machine's GPU."""
    if size is not None:
        return read_bytes(size)
    if not torch.cuda.is_available():
        raise UserError(
            "memory= is required, as this machine has no GPU; give the GPU's memory, such as memory=24GiB",
            field="memory",
            code="missing",
        )
    return torch.cuda.get_device_properties(0).total_memory


def _assumptions(config: Config, model: PreTrainedModel, plan: MemoryPlan) -> list[str]:
    dtype = str(model.dtype).removeprefix("torch.")
    return [
        f"{config.model.id} in {dtype}: {size_text(plan.weights)} of weights, {size_text(plan.head)} of retrieval "
        f"head; with {plan.share - 1:.0%} for activations {size_text(plan.weights_held)}",
        f"a token: {plan.layers} layers x {plan.kv_heads} KV heads x {plan.head_dim} dimensions x 2 (keys, values) x "
        f"{plan.item} bytes = {plan.layers * plan.entry} bytes, and {plan.head_keys} of the head's keys",
        f"{size_text(plan.limit)} of memory, requests={plan.requests}, budget={plan.budget}: "
        f"{size_text(plan.limit - plan.weights_held)} left for entries",
    ]


def _table(model: PreTrainedModel, plan: MemoryPlan) -> str:
    """A line for each number of layers on the CPU."""
    config = model.config.get_text_config()
    paper_lengths = plan.paper_thresholds(config.num_attention_heads // plan.kv_heads)
    rows = []
    for layers_on_cpu, (length, paper_length) in enumerate(zip(plan.thresholds, paper_lengths, strict=True)):
        rows.append(
            {
                "layers on the CPU": layers_on_cpu,
                "tokens a request": length // plan.requests,
                "slots (MiB)": layers_on_cpu * plan.slots / 2**20,
                "published formula": max(paper_length, 0),
            }
        )
    forms = {"layers on the CPU": "d", "tokens a request": "d", "slots (MiB)": ".1f", "published formula": "d"}
    return terminal_table(rows, [TerminalColumn(name, form) for name, form in forms.items()])


def _conclusions(model: PreTrainedModel, plan: MemoryPlan) -> list[str]:
    """What the table says of requests as long as the model's context."""
    context = context_of(model)
    tokens = context * plan.requests
    least_memory, layers_on_cpu = plan.least(tokens)
    if least_memory > plan.limit:
        layers = f"{layers_on_cpu} of {plan.layers} layers on the CPU"
        fit = f"does not fit: it needs {size_text(least_memory)}, with {layers}"
    else:
        layers_on_cpu = plan.layers_on_cpu(tokens)
        fit = "fits with every layer on the GPU"
        if layers_on_cpu:
            fit = f"fits with {layers_on_cpu} of {plan.layers} layers on the CPU"
    memory_on_gpu = size_text(plan.memory(tokens, 0))
    return [
        f"every layer stays on the GPU up to {plan.thresholds[0] // plan.requests} tokens a request",
        f"the model's context of {context} tokens a request {fit}; all of it on the GPU takes {memory_on_gpu}",
    ]


def _figure(plan: MemoryPlan, name: str, context: int) -> Figure:
    """Layers on the CPU against the length of a request, up to the model's context."""
    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    panel = figure.subplots()
    longest_requests = [length // plan.requests for length in plan.thresholds]  # by the number of layers on the CPU
    lengths = [length for length in longest_requests if length < context]
    if len(lengths) == len(longest_requests):
        panel.axvspan(lengths[-1], context, color=GRID, linewidth=0)
        panel.text((lengths[-1] + context) / 2, plan.layers / 2, "does not fit", ha="center", rotation=90, fontsize=8.5)
    else:
        lengths.append(context)
    layers = range(len(lengths))
    panel.step([0, *lengths], [0, *layers], where="pre", color=STYLES["lookaheadkv"].colour, linewidth=1.6)
    requests = "1 request" if plan.requests == 1 else f"{plan.requests} requests"
    panel.set_title(f"{name}, {size_text(plan.limit)}, {requests}", fontsize=10)
    panel.set(xlabel=f"tokens a request, up to the context of {context}", ylabel="layers on the CPU")
    panel.set(xlim=(0, context), ylim=(0, plan.layers))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    look(panel)
    return figure


def run_ttft(config: PlanTtft) -> None:
    """Print the table."""
    if config.card not in CARDS:
        raise UserError(
            f"card={config.card} is unknown; choose one of {', '.join(CARDS)}", field="card", code="unknown"
        )
    measured = {}
    if config.measured:
        measured = measured_on(Path(config.measured), config.card, config.model.id)
    model = outline_of(config)
    draft = None
    if config.draft.id is not None:
        draft_model = ModelConfig(config.draft.id, config.draft.revision, dtype=config.model.dtype)
        draft = outline_of(UsesModel(draft_model))
    elif config.draft.layers is not None:
        draft = outline_of(config)
        draft.config.get_text_config(decoder=True).num_hidden_layers = len(config.draft.layers)
        layers = decoder_layers(draft)
        del layers[len(config.draft.layers) :]
    print(first_tokens(model, draft, known_card(config.card), config.lengths, config.budget, measured))
    if draft is None:
        print("speckv needs a draft: draft.id= or draft.layers=")


def run_training(config: PlanTrain) -> None:
    """Print the plan."""
    memory = read_bytes(config.gpu)
    _check(config)
    model = outline_of(config)
    context = context_of(model)
    tokens = config.tokens or min(16384, context)
    if tokens > context:
        raise UserError(
            f"tokens={tokens} is more than the model's context of {context}; lower it", field="tokens", code="range"
        )

    by_layer = config.model.device_map == SHARDED
    shards = config.gpus if config.shard or by_layer else 1
    plan = plan_step(
        model.config,
        model.dtype,
        partial(_objective, config),
        tokens,
        config.answer,
        quantize=config.model.quantize,
        shards=shards,
        layers_alone=by_layer,
    )
    dtype = config.model.quantize or str(model.dtype).removeprefix("torch.")
    print(f"{config.model.id} in {dtype}, a prompt of {tokens} and an answer of {config.answer} tokens on each GPU")
    share = plan.trained / plan.parameters
    print(f"{plan.trained:,} trainable parameters, {share:.2%} of the model's {plan.parameters:,}\n")
    print(f"{_training_memory(plan, memory, config)}\n\n{_time(plan, config)}")


def _objective(config: PlanTrain, model: PreTrainedModel) -> ImportanceObjective | EvictionObjective:
    lookahead = Lookahead(model, config.lookahead)
    if config.stage == "importance":
        settings = config.train
        return ImportanceObjective(lookahead, settings.far, settings.gradient_checkpointing, settings.cuts)
    parts = selection_fields(replace(config.lookahead, sharing="model"))  # as `keepsight finetune` trains
    allocate = parts.pop("allocate")
    method = Evict(1, TokensInTraining(lookahead), **parts)
    return EvictionObjective(model, method, allocate, config.finetune, lookahead)


def _training(config: PlanTrain) -> tuple[str, TrainSettings]:
    """The key of the stage's settings, and the settings."""
    if config.stage == "importance":
        return "train", config.train
    return "finetune.train", config.finetune.train


def _check(config: PlanTrain) -> None:
    """UserError for what cannot be planned, or cannot be trained."""
    section, settings = _training(config)
    device_map = config.model.device_map
    quantize = config.model.quantize
    if config.stage == "eviction" and config.finetune.freeze_module:
        raise UserError(
            "finetune.freeze_module=true: a plan is for a module in training; leave it out",
            field="finetune.freeze_module",
            code="conflict",
        )
    if quantize not in (None, *QUANTIZE):
        raise UserError(
            f"model.quantize={quantize} is unknown; choose one of {', '.join(QUANTIZE)}, or null",
            field="model.quantize",
            code="unknown",
        )
    if settings.batch_size > 1:
        value = f"{section}.batch_size={settings.batch_size}"
        raise UserError(
            f"{value}: keepsight plan assumes one sample per GPU; set {section}.batch_size=1",
            field=f"{section}.batch_size",
            code="conflict",
        )
    if device_map == "auto":
        raise UserError(
            "model.device_map=auto: where layers go is decided when the model is loaded; leave it out",
            field="model.device_map",
            code="conflict",
        )
    if device_map not in (None, SHARDED):
        raise UserError(
            f"model.device_map={device_map} is unknown here; choose {SHARDED}, or null for the whole model",
            field="model.device_map",
            code="unknown",
        )
    if device_map and config.shard:
        raise UserError(
            f"shard=true is ZeRO-3, model.device_map={device_map} is FSDP2: give one of them",
            field="shard",
            code="conflict",
        )
    if not device_map and not config.shard:
        return

    if settings.replays > 1:
        raise UserError(
            f"{section}.replays={settings.replays}: with ZeRO-3 or FSDP2 use 1",
            field=f"{section}.replays",
            code="conflict",
        )
    if quantize:
        key = f"model.device_map={device_map}" if device_map else "shard=true"
        raise UserError(
            f"{key}: quantised weights cannot be sharded; leave out model.quantize",
            field="model.quantize",
            code="conflict",
        )


def _training_memory(plan: StepPlan, memory: int, config: PlanTrain) -> str:
    sharded = f", sharded over {config.gpus} GPUs" if config.shard or config.model.device_map else ""
    fits = "fits"
    if plan.peak > memory:
        fits = f"does not fit: {' or '.join(['lower tokens=', *_savings(plan, config)])}"
    sizes = {
        f"model's weights{sharded}": size_text(plan.weights),
        "module, its gradients and Adam's moments": size_text(plan.module),
        "first pass": size_text(plan.first),
        "  of which KV entries and importance stay": size_text(plan.outputs),
        "second pass and gradients": size_text(plan.second),
        f"at the worst moment, of {size_text(memory)} a GPU": size_text(plan.peak),
    }
    return f"{terminal_list(sizes)}: {fits}"


def _savings(plan: StepPlan, config: PlanTrain) -> list[str]:
    """What else saves memory: keys that are not given yet."""
    section, settings = _training(config)
    savings = list[str]()
    if plan.second > plan.first:
        if config.stage == "importance" and not config.train.gradient_checkpointing:
            savings.append("train.gradient_checkpointing=true")
        if config.stage == "eviction" and not config.finetune.gradient_checkpointing:
            savings.append("finetune.gradient_checkpointing=true")
    if not (config.shard or config.model.device_map or config.model.quantize):
        if config.gpus > 1 and settings.replays > 1:
            savings.append(f"shard=true with {section}.replays=1")
        elif config.gpus > 1:
            savings.append("shard=true")
        savings.append("model.quantize=nf4")
    if savings:
        savings[0] = f"try {savings[0]}"
    return savings


def _time(plan: StepPlan, config: PlanTrain) -> str:
    _, settings = _training(config)
    flops = config.flops * 1e12 * config.utilisation
    first_pass = plan.first_flops / flops
    second_pass = plan.second_flops / flops
    samples_per_step = max(1, settings.samples_per_step or config.gpus)
    samples_per_gpu = -(-samples_per_step // config.gpus)
    seconds_per_sample = first_pass + settings.replays * second_pass
    gpus = "1 GPU" if config.gpus == 1 else f"{config.gpus} GPUs"
    uses = "once" if settings.replays == 1 else f"{settings.replays} times"
    step = samples_per_gpu * (first_pass / settings.replays + second_pass)
    training = seconds_per_sample * config.samples / config.gpus
    times = {
        f"first pass, {plan.first_flops / 1e12:.1f} TFLOP": _duration(first_pass),
        f"second pass and gradients, {plan.second_flops / 1e12:.1f} TFLOP": _duration(second_pass),
        f"a step of {samples_per_step} samples on {gpus}": _duration(step),
        f"{config.samples} samples, each read once and used {uses}": _duration(training),
    }
    return f"at an assumed {config.utilisation:.0%} of {config.flops:g} TFLOP/s:\n{terminal_list(times)}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
