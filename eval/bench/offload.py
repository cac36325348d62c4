"""Methods that offload entries or read a part of them: step times, traffic, and hidden fetch time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.eval.bench.measure import median_seconds, random_ids, read_greedily, require_room, seconds_of
from keepsight.eval.bench.runner import Runner, TableRow
from keepsight.eval.tasks.niah import read_haystack
from keepsight.eval.tasks.samples import Sample, render
from keepsight.models.decoder import context_of
from keepsight.models.draft_head import DraftHead
from keepsight.models.retrieval_head import RetrievalHead, parameters, pruning
from keepsight.models.targets import Target
from keepsight.runtime.attention import Softmax, StateCache
from keepsight.runtime.generate import CacheMethod, FullCache, Method
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.offload import Traffic
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.kivi import Kivi
from keepsight.runtime.quantized.specache import SpeCache, most_attended, specache_layers
from keepsight.runtime.retrieval.elastic import elastic_layers
from keepsight.runtime.retrieval.specontext import RetrievalCache, SpeContext
from keepsight.runtime.sparse_read.selection import Quest
from keepsight.runtime.state import Needs, State, prefill
from keepsight.tables import TerminalColumn, name_column


def size_lines(target: Target, head: RetrievalHead, draft: DraftHead | None) -> Iterator[str]:
    """The head's parameters and bytes, and the share of the draft head, if known, that pruning removed."""
    head_parameters = parameters(head)
    model_parameters = parameters(target.model)
    head_bytes = sum(parameter.nbytes for parameter in head.parameters())
    yield (
        f"retrieval head (features: {head.config.features}): {head_parameters:,} parameters, {head_bytes:,} bytes as "
        f"{_dtype(head.q_proj.weight)}, {head_parameters / model_parameters:.2%} of the model's {model_parameters:,}; "
        f"{head.key_bytes} bytes of keys a token"
    )
    if draft is not None:
        yield f"draft head: {pruning(head, draft)}"


def step_lines(
    runner: Runner, target: Target, head: RetrievalHead, budget: int, lengths: Sequence[int], batch: int, repeats: int
) -> Iterator[str]:
    """A line for each length and method, with the parts of a step that reads with the head.

    KV entries, tokens and features are random. `head` is the time of its projections and selection, `gather` that of
    gathering in all layers, each measured alone; `rest` is the remainder of the step. With entries in CPU memory both
    overlap with the model, and only the whole step is measured. Lengths beyond the context are timed all the same.
    """
    model = target.model
    require_room(model, max(lengths), batch, beyond_context=True)
    methods: dict[str, CacheMethod] = {
        "full": FullCache(),
        "quest": Quest(budget),
        "specontext": SpeContext(budget, head),
        "specontext, offloaded": SpeContext(budget, head, offload=model.config.get_text_config().num_hidden_layers),
    }
    needs = feature_needs(model, head)
    threads = torch.get_num_threads()
    yield f"{batch} rows of random entries, budget {budget}, {_dtype(model)}, {repeats} steps, {threads} threads"

    def measure(method: CacheMethod, length: int) -> TableRow:
        step = _step(model, method, random_state(model, needs, batch, length), repeats)
        return {**step, "tokens/s": batch * 1000 / step["ms a step"]}

    columns = (
        TerminalColumn("tokens", "d"),
        name_column("method", methods),
        TerminalColumn("ms a step", ".2f"),
        TerminalColumn("tokens/s", ".1f"),
        TerminalColumn("speed-up", ".2f"),
        *(TerminalColumn(part, ".2f") for part in ("head", "gather", "rest")),
        TerminalColumn("loaded MB", ".3f"),
    )
    rows = runner.compare("steps", methods, measure, lengths=lengths, ratios={"speed-up": "tokens/s"})
    yield from runner.table("steps", columns, rows)
    if max(lengths) > context_of(model):
        yield f"beyond the model's context of {context_of(model)} tokens the time is the same as within one"


def random_state(model: PreTrainedModel, needs: Needs, rows: int, length: int) -> State:
    """A state of random tokens, KV entries and features; all layers share the same entries until they append."""
    generator = torch.Generator(model.device).manual_seed(0)
    ids = random_ids(model, rows, length)
    start = prefill(model, ids[:, :1], needs=needs)

    def random_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=tensor.device, dtype=tensor.dtype)

    first_keys, first_values, _ = start.entries()[0]
    keys = random_like(first_keys, (*first_keys.shape[:2], length, first_keys.shape[3]))
    values = random_like(first_values, (*first_values.shape[:2], length, first_values.shape[3]))
    features = tuple(random_like(feature, (rows, length, feature.shape[2])) for feature in start.features)
    layers: list[Any] = [KeptLayer(keys, values, length) for _ in start.cache.layers]
    lengths = torch.full_like(start.lengths, length)
    return State(StateCache(layers=layers), start.logits, ids, lengths, start.needs, features)


@torch.no_grad()
def _step(model: PreTrainedModel, method: CacheMethod, state: State, repeats: int) -> TableRow:
    """Milliseconds of a step and of its parts, and the MB that it loads."""
    state = method.compress_state(model, state).unrecorded()
    reader = method.reader(model)

    def step() -> None:
        nonlocal state
        state = read_greedily(reader, state, 1)

    seconds = median_seconds(step, repeats)
    row = {"ms a step": seconds * 1000}
    if not isinstance(state.cache, RetrievalCache):
        return row
    layers_on_cpu = elastic_layers(state.cache.layers)
    if layers_on_cpu:
        traffic = layers_on_cpu[0].full.traffic
        return {**row, "loaded MB": traffic.fetched * len(layers_on_cpu) / traffic.selections / 1e6}
    embeddings = model.get_input_embeddings()(state.logits.argmax(dim=-1, keepdim=True))
    selector = state.cache.selector.share()
    positions = state.lengths[:, None]
    by_layer = state.cache.by_layer(selector.select(embeddings, positions))

    def gather() -> None:
        for layer, selection in by_layer:
            layer.gather(selection)

    selecting = median_seconds(lambda: selector.select(embeddings, positions), repeats)
    gathering = median_seconds(gather, repeats)
    rest = seconds - selecting - gathering
    return {**row, "head": selecting * 1000, "gather": gathering * 1000, "rest": rest * 1000}


def feature_needs(model: PreTrainedModel, head: RetrievalHead) -> Needs:
    """What a prefill records for the head."""
    return Needs(features=tuple(sorted(head.layers_of(model))))


def _dtype(tensor_or_model: Any) -> str:
    return str(tensor_or_model.dtype).removeprefix("torch.")


_QUESTION = "\n\nSummarize the text above."


def text_prompts(target: Target, tokens: int, count: int) -> list[list[int]]:
    """Prompts of about `tokens` tokens: the evaluation part of Python's documentation, with a task at the end."""
    require_room(target.model, tokens)

    def rendered(text: str) -> list[int]:
        sample = Sample("text", "documentation", 0, text + _QUESTION, (), "", 1, question=_QUESTION)
        return render(sample, target.tokenizer).prompt_ids.tolist()

    haystack = read_haystack(None, target.tokenizer)
    text_tokens = tokens - len(rendered(""))
    prompts = []
    for index in range(count):
        start = len(haystack.sentences) * index // count
        sentences = haystack.cut(start, haystack.count_in(start, text_tokens))
        prompts.append(rendered(" ".join(sentences)))
    return prompts


def traffic_lines(
    runner: Runner,
    target: Target,
    head: RetrievalHead,
    budgets: Sequence[int],
    prompts: Sequence[Sequence[int]],
    steps: int,
) -> Iterator[str]:
    """The bytes a step loads when all layers' KV entries lie in CPU memory, a line for each budget.

    The first step of an answer, which fills the slots, is left out, and end tokens are ignored. `saved` is also the
    share of its entries that a step has in common with the one before. `sent` is each new token's own entry, sent to
    the CPU. UserError for a prompt that does not fit the model's context.
    """
    model = target.model
    needs = feature_needs(model, head)
    layers = model.config.get_text_config().num_hidden_layers
    methods = {budget: SpeContext(budget, head, offload=layers) for budget in budgets}

    def measure(prompt: Sequence[int]) -> Iterator[TableRow]:
        for method in methods.values():
            method.check(len(prompt), context_of(model))
        state = prefill(model, torch.tensor([prompt], device=model.device), needs=needs)
        for budget, method in methods.items():
            traffic = _traffic(model, method, state, steps)
            sizes = {"loaded": traffic.fetched, "asked": traffic.asked, "sent": traffic.offloaded}
            yield {"budget": budget, **sizes}

    cases: list[tuple[TableRow, Sequence[int]]] = [({"text": index}, prompt) for index, prompt in enumerate(prompts)]
    rows = list(runner.rows("texts", cases, measure, unit="text"))
    lengths = list(map(len, prompts))
    yield f"{len(prompts)} texts of {min(lengths)} to {max(lengths)} tokens, {steps} steps each, all layers on the CPU"
    columns = (
        TerminalColumn("budget", "d"),
        TerminalColumn("elastic MB a step", ".3f"),
        TerminalColumn("reloading MB a step", ".3f"),
        TerminalColumn("saved", ".1%"),
        TerminalColumn("sent MB a step", ".3f"),
    )
    of_budgets = [_mean_traffic(rows, budget, steps * len(prompts)) for budget in budgets]
    yield from runner.table("traffic", columns, of_budgets)


def _mean_traffic(rows: Sequence[TableRow], budget: int, all_steps: int) -> TableRow:
    """MB a step with a budget, over all texts."""
    loaded = 0.0
    asked = 0.0
    sent = 0.0
    for row in rows:
        if row["budget"] == budget:
            loaded += row["loaded"] / all_steps / 1e6
            asked += row["asked"] / all_steps / 1e6
            sent += row["sent"] / all_steps / 1e6
    return {
        "budget": budget,
        "elastic MB a step": loaded,
        "reloading MB a step": asked,
        "saved": 1 - loaded / asked,
        "sent MB a step": sent,
    }


def _traffic(model: PreTrainedModel, method: SpeContext, state: State, steps: int) -> Traffic:
    """Traffic of the steps after the one that fills the slots."""
    reader = method.reader(model)
    state = read_greedily(reader, method.compress_state(model, state), 1)
    traffic = elastic_layers(state.cache.layers)[0].full.traffic
    before = replace(traffic)
    read_greedily(reader, state, steps)
    return Traffic(*(getattr(traffic, name) - value for name, value in vars(before).items()))


def bench_specache(
    runner: Runner, target: Target, method: SpeCache, tokens: int, batch: int, steps: int
) -> Iterator[str]:
    """A line for each cache and for each part of a step, in milliseconds; prompts are random tokens.

    SpeCache, with its speculative token and without, is compared with the full cache and KIVI. `waited` is the time for
    which the model waited for entries being fetched, `hidden` the share of the fetches' time in which it did not.
    """
    model = target.model
    require_room(model, tokens + steps, batch)
    ids = random_ids(model, batch, tokens)
    yield f"{batch} rows of {tokens} tokens, {steps} steps, {torch.get_num_threads()} threads; {method}"
    speculative = replace(method, speculative=True)
    methods = {
        "full": FullCache(),
        "KIVI": Kivi(method.bits, method.group, method.residual, one_bit=method.one_bit),
        "SpeCache": speculative,
        "not speculative": replace(method, speculative=False),
    }

    def measure(compared_method: Method, _: int) -> TableRow:
        return _step_with_cache(model, compared_method, ids, steps)

    columns = (
        TerminalColumn("method", width=20, is_text=True),
        TerminalColumn("ms a step", ".1f"),
        TerminalColumn("tokens/s", ".1f"),
        TerminalColumn("KV MB", ".2f"),
        TerminalColumn("moved MB a step", ".2f"),
        TerminalColumn("waited ms", ".2f"),
        TerminalColumn("hidden", ".0%"),
    )
    steps_name = f"steps_{method.bits}_bits"
    rows = runner.compare(steps_name, methods, measure, lengths=[tokens])
    yield from runner.table(steps_name, columns, rows)

    def measure_parts(_: None) -> Iterator[TableRow]:
        return _parts_of_step(model, speculative, ids, steps)

    parts_name = f"parts_{method.bits}_bits"
    parts_columns = (TerminalColumn("part", width=20, is_text=True), TerminalColumn("ms a step", ".1f"))
    parts = runner.rows(parts_name, [({"tokens": tokens}, None)], measure_parts)
    yield f"its parts, in {model.config.get_text_config().num_hidden_layers} layers"
    yield from runner.table(parts_name, parts_columns, parts)


def _step_with_cache(model: PreTrainedModel, method: Method, ids: Tensor, steps: int) -> TableRow:
    """Milliseconds of a step, the size of the cache, and what it moves."""
    state = method.start(model, ids)
    reader = method.reader(model)
    state = read_greedily(reader, state, 3)
    layers = specache_layers(state.cache)
    traffic = layers[0].full.traffic if layers else None
    if traffic is not None:
        traffic.fetched = 0
        traffic.offloaded = 0
        traffic.fetching = 0.0
        traffic.waited = 0.0

    def decode() -> None:
        nonlocal state
        state = read_greedily(reader, state, steps)

    seconds = seconds_of(decode) / steps
    row = {"ms a step": seconds * 1000, "tokens/s": len(ids) / seconds, "KV MB": state.kv_bytes / 1e6}
    if traffic is not None:
        hidden = 1 - traffic.waited / traffic.fetching if traffic.fetching else 1.0
        row["moved MB a step"] = (traffic.fetched + traffic.offloaded) / steps / 1e6
        row["waited ms"] = traffic.waited / steps * 1000
        row["hidden"] = max(hidden, 0)
    return row


@torch.no_grad()
def _parts_of_step(model: PreTrainedModel, method: SpeCache, ids: Tensor, repeats: int) -> Iterator[TableRow]:
    """Parts measured one by one on the first layer; a real step runs all layers, its fetches in parallel."""
    state = read_greedily(method.reader(model), method.start(model, ids), 1)
    config = model.config.get_text_config()
    layer = specache_layers(state.cache)[0]
    packed = layer.packed
    group = config.num_attention_heads // packed.recent_values.shape[1]
    query = packed.recent_values[:, :, -2:].repeat_interleave(group, dim=1)
    _, attention = attend_packed(query, packed, Softmax(1.0))

    def fetch() -> None:
        fetching = layer.begin_fetch(attention)
        if fetching is not None:
            fetching.wait()

    full = layer.full
    device = packed.recent_values.device
    batch, kv_heads = packed.recent_values.shape[:2]
    one_percent = max(full.length // 100, 1)
    contiguous = torch.arange(one_percent * batch * kv_heads)  # entries lie token by token
    spread = torch.arange(0, full.length, max(full.length // one_percent, 1))[:one_percent]
    scattered = (spread[:, None] * batch * kv_heads + torch.arange(batch * kv_heads)).flatten()
    parts: dict[str, Callable[[], object]] = {
        "dequantise": lambda: (packed.keys(), packed.values()),
        "attention, with it": lambda: attend_packed(query, packed, Softmax(1.0)),
        "select": lambda: most_attended(attention, layer.topk, layer.heads),
        "select and fetch": fetch,
        "load all entries": lambda: full.read(device),
        "load 1 % in a row": lambda: full.rows(contiguous).to(device),
        "load 1 % scattered": lambda: full.rows(scattered).to(device),
    }
    for name, part in parts.items():
        yield {"part": name, "ms a step": median_seconds(part, repeats) * 1000 * config.num_hidden_layers}
