"""Bytes that elastic loading moves on real text, against reloading everything that a step reads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from keepsight.eval.bench.retrieval import feature_needs
from keepsight.eval.bench.timing import read_greedily
from keepsight.eval.tasks.niah import read_haystack
from keepsight.eval.tasks.samples import Sample, render
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from keepsight.runtime.offload import Traffic
from keepsight.runtime.retrieval.elastic import elastic_layers
from keepsight.runtime.retrieval.specontext import SpeContext
from keepsight.runtime.state import State, context_of, prefill

_QUESTION = "\n\nSummarize the text above."


def text_prompts(target: Target, tokens: int, count: int) -> list[list[int]]:
    """Prompts of about `tokens` tokens: the evaluation part of Python's documentation, with a task at the end."""
    hay = read_haystack(None, target.tokenizer)
    bare = len(_rendered("", target))
    starts = [len(hay.sentences) * each // count for each in range(count)]
    return [_rendered(" ".join(hay.cut(start, hay.count_in(start, tokens - bare))), target) for start in starts]


def traffic_lines(
    target: Target, head: RetrievalHead, budgets: Sequence[int], prompts: Sequence[Sequence[int]], steps: int
) -> Iterator[str]:
    """The bytes a step loads when all layers' KV entries lie in CPU memory, a line for each budget.

    The first step of an answer, which fills the slots, is left out. `saved` is also the share of its entries that a
    step has in common with the one before. `sent` is each new token's own entry, sent to the CPU.

    Args:
        target: The model.
        head: A trained retrieval head: what a random one selects says nothing.
        budgets: KV entries that a KV head reads per step.
        prompts: Token ids of each prompt.
        steps: Greedy tokens after each prompt; end tokens are ignored.

    Raises:
        UserError: a prompt does not fit the model's context.
    """
    model, needs = target.model, feature_needs(target.model, head)
    layers = model.config.get_text_config().num_hidden_layers
    methods = {budget: SpeContext(budget, head, offload=layers) for budget in budgets}
    moved: dict[int, list[Traffic]] = {budget: [] for budget in budgets}
    for prompt in tqdm(prompts, desc="texts"):
        for method in methods.values():
            method.check(len(prompt), context_of(model))
        state = prefill(model, torch.tensor([prompt], device=model.device), needs=needs)
        for budget, method in methods.items():
            moved[budget].append(_traffic(model, method, state, steps))
    lengths = [len(each) for each in prompts]
    yield f"{len(prompts)} texts of {min(lengths)} to {max(lengths)} tokens, {steps} steps each, all layers on the CPU"
    yield f"{'budget':<9}{'elastic MB a step':>19}{'reloading MB a step':>21}{'saved':>8}{'sent MB a step':>16}"
    for budget, each in moved.items():
        sums = [sum(getattr(one, name) for one in each) for name in ("fetched", "asked", "offloaded")]
        loaded, asked, sent = (total / steps / len(prompts) / 1e6 for total in sums)
        yield f"{budget:<9}{loaded:>19.3f}{asked:>21.3f}{1 - loaded / asked:>8.1%}{sent:>16.3f}"


def _traffic(model: PreTrainedModel, method: SpeContext, state: State, steps: int) -> Traffic:
    """Traffic of the steps after the one that fills the slots."""
    reader = method.reader(model)
    state = read_greedily(reader, method.compress(model, state), 1)
    traffic = elastic_layers(state.cache.layers)[0].full.traffic
    before = replace(traffic)
    read_greedily(reader, state, steps)
    return Traffic(*(getattr(traffic, name) - value for name, value in vars(before).items()))


def _rendered(text: str, target: Target) -> list[int]:
    sample = Sample("text", "documentation", 0, text + _QUESTION, (), "", 1, question=_QUESTION)
    return render(sample, target.tokenizer).prompt_ids.tolist()
