"""Mean or largest over the layers that read one set of KV entries: measured on tiny models trained to recall.

    OMP_NUM_THREADS=1 python docs/shared_entries.py 3 280

trains three models for 280 seconds of processor time each and prints rows of `results/trials.csv`. A model has the
architecture of Gemma 4: a layer with a window of two tokens, and four with full attention, of which the last three read
the entries of the first. Training begins with contexts of 16 tokens and ends with 256.

The context has chains of two links (a b, and elsewhere b c) between fillers. The question lists four keys; the answer
repeats each with its value, which is the next token of its link (one step), or the end of its chain (two steps). A
model that takes two steps attends to one entry in a layer and to another in a later layer, so that the layers that
share entries need different ones. The last tokens observe, as in SnapKV: they are the question.
"""

import sys
import time
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from typing_extensions import override

from keepsight import LAQ, FullCache, SnapKV
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Reduce
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.methods.laq import QueryCache
from keepsight.runtime.state import read

LETTERS = 48  # tokens that can stand first in a chain, as many that can stand second, and third
FILLERS = 24
BEGIN, END, ASK, ONE, TWO = range(5)
FIRST_LETTER = 5
FIRST_FILLER = FIRST_LETTER + 3 * LETTERS
VOCABULARY = FIRST_FILLER + FILLERS
QUESTION = 6  # tokens: ASK, four keys, ONE or TWO
ASKED = 4
LENGTH, CHAINS = 256, 12
BUDGETS = (9, 11, 13, 15, 19, 23, 31)
TRIAL = "layers that share entries: tiny Gemma 4, recall over 256 tokens"


class Stage(NamedTuple):
    """A part of the training: tokens of the context, chains in it, keys asked for, share of two steps, batch size."""

    length: int
    chains: int
    asked: int
    two_steps: float
    rows: int


STAGES = (
    Stage(16, 2, 4, 0.0, 64),
    Stage(32, 4, 8, 0.0, 48),
    Stage(32, 4, 4, 0.6, 48),
    Stage(64, 8, 8, 0.6, 32),
    Stage(128, 12, 8, 0.6, 16),
    Stage(LENGTH, CHAINS, 8, 0.6, 8),
)
LEARNING_RATE = 3e-3


def untrained_model(seed: int) -> Any:
    """A random model of Gemma 4's architecture, of 0.7 million parameters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=32,
        sliding_window=2,
        layer_types=["sliding_attention"] + ["full_attention"] * 4,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "q_norm" in name:  # at 1, attention is too sharp to learn from
            torch.nn.init.constant_(weight, 0.3)
    return model


def samples(stage: Stage, two_steps: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts [B, length + asked + 2] and answers [B, 2 x asked], key and value in turn."""
    rows = stage.rows

    def distinct(count: int, limit: int) -> Tensor:
        """[B, count]: different random numbers below `limit`."""
        return torch.rand(rows, limit, generator=generator).argsort(dim=1)[:, :count]

    context = torch.randint(FIRST_FILLER, VOCABULARY, (rows, stage.length), generator=generator)
    context[:, 0] = BEGIN
    first = FIRST_LETTER + distinct(stage.chains, LETTERS)
    middle = FIRST_LETTER + LETTERS + distinct(stage.chains, LETTERS)
    last = FIRST_LETTER + 2 * LETTERS + distinct(stage.chains, LETTERS)
    sources = torch.cat([first, middle], dim=1)
    targets = torch.cat([middle, last], dim=1)
    positions = 1 + 2 * distinct(2 * stage.chains, (stage.length - 1) // 2)
    context.scatter_(1, positions, sources)
    context.scatter_(1, positions + 1, targets)

    if two_steps:
        sources = first
        targets = last
    links = distinct(stage.asked, sources.shape[1])
    keys = sources.gather(1, links)
    values = targets.gather(1, links)
    ask = torch.full((rows, 1), ASK)
    steps = torch.full((rows, 1), TWO if two_steps else ONE)
    return torch.cat([context, ask, keys, steps], dim=1), torch.stack([keys, values], dim=2).flatten(1)


def train(seed: int, seconds: float) -> Any:
    """A model trained for so many seconds of processor time; a stage ends where its loss is small."""
    model = untrained_model(seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    begun = time.process_time()
    stages = iter(STAGES)
    stage = next(stages)
    losses = [3.0, 3.0]  # moving means, of one step and of two
    step = 0
    while (used := time.process_time() - begun) < seconds:
        step += 1
        warm = min(1, step / 50, max(0.05, (1 - used / seconds) / 0.3))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm
        two_steps = bool(torch.rand((), generator=generator) < stage.two_steps)
        prompt, answer = samples(stage, two_steps, generator)
        ids = torch.cat([prompt, answer[:, :-1]], dim=1)
        logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] :: 2]
        loss = functional.cross_entropy(logits.flatten(0, 1), answer[:, 1::2].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        losses[two_steps] = 0.95 * losses[two_steps] + 0.05 * loss.item()
        if losses[0] < 0.2 and (losses[1] < 0.2 or not stage.two_steps) and stage is not STAGES[-1]:
            print(f"seed {seed}, step {step}, {used:.0f} s: {stage} is learned", file=sys.stderr, flush=True)
            stage = next(stages)
            losses = [1.0, 1.0]
    print(f"seed {seed}, step {step}: losses {losses[0]:.3f}, {losses[1]:.3f}", file=sys.stderr, flush=True)
    return model.eval()


@dataclass(frozen=True)
class LargestLayer(SnapKV):
    """SnapKV by the largest of the layers that read an entry, each by the mean over its query heads."""

    @override
    def layer_importance(self, scores: Tensor, layer: KeptLayer) -> Tensor:
        by_layer = scores.unflatten(1, (layer.kv_heads, layer.readers, -1)).mean(dim=3)
        return super().layer_importance(by_layer.amax(dim=2), layer)


def methods(budget: int) -> dict[str, Evict]:
    """Each rule with the prompt's own last tokens as observers, and with a draft."""
    largest = Reduce(heads="max")
    question: dict[str, Any] = {"window": QUESTION, "sinks": 1, "pool": NO_POOL}
    draft = QueryCache(lookahead=2 * ASKED, first_window=QUESTION, first_pool=NO_POOL)
    drafted: dict[str, Any] = {"observer": draft, "window": QUESTION, "sinks": 1, "pool": NO_POOL}
    return {
        "question observes, mean over layers and heads (chosen)": SnapKV(budget, **question),
        "question observes, largest layer of means over heads": LargestLayer(budget, **question),
        "question observes, largest over layers and heads": SnapKV(budget, reduce=largest, **question),
        "draft observes, mean over layers and heads (chosen)": LAQ(budget, **drafted),
        "draft observes, largest over layers and heads": LAQ(budget, reduce=largest, **drafted),
    }


class Measured(NamedTuple):
    """Of each prompt: the KL divergence of the full cache's answer, nats a value, and the share of values found."""

    divergence: Tensor
    score: Tensor


@torch.no_grad()
def measure(model: Any, prompts: int, seed: int, budgets: tuple[int, ...] = BUDGETS) -> dict[Any, Measured]:
    """By number of steps, budget and method; a budget of 0 is the full cache."""
    results: dict[Any, Measured] = {}
    generator = torch.Generator().manual_seed(seed)
    for steps in (1, 2):
        prompt, answer = samples(Stage(LENGTH, CHAINS, ASKED, 0.0, prompts), steps == 2, generator)
        full = _log_probabilities(model, FullCache(), prompt, answer)
        for budget in (0, *budgets):
            rules: dict[str, Any] = methods(budget) if budget else {"full cache": FullCache()}
            for name, method in rules.items():
                log_probabilities = _log_probabilities(model, method, prompt, answer)
                divergence = (full.exp() * (full - log_probabilities)).sum(dim=-1).mean(dim=1)
                is_correct = log_probabilities.argmax(dim=-1) == answer[:, 1::2]
                results[steps, budget, name] = Measured(divergence, is_correct.float().mean(dim=1))
    return results


def _log_probabilities(model: Any, method: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    """[B, asked, V]: of the values, each after its key and all that the answer has before it."""
    logits = read(model, method.start(model, prompt), answer[:, :-1])[1]
    return logits[:, ::2].float().log_softmax(dim=-1)


def rows(results: list[dict[Any, Measured]]) -> list[str]:
    """Lines of `results/trials.csv`: means over all models' prompts, and differences from the chosen rule."""
    lines = []
    for steps, budget, name in results[0]:
        baseline = f"{name.partition(',')[0]}, mean over layers and heads (chosen)"
        for field, measure_name in (("divergence", "KL from the full cache, nats a value"), ("score", "values found")):
            values = torch.cat([getattr(of_model[steps, budget, name], field) for of_model in results])
            difference = ""
            error = ""
            if budget and name != baseline:
                base = torch.cat([getattr(of_model[steps, budget, baseline], field) for of_model in results])
                pairs = (values - base).numpy()
                difference = f"{pairs.mean():+.4f}"
                error = f"{pairs.std(ddof=1) / np.sqrt(len(pairs)):.4f}"
            measured = f"{measure_name}, {steps} step{'s' * (steps > 1)}"
            cells = (
                f'"{TRIAL}"',
                f'"{name}"',
                f'"{measured}"',
                budget or "",
                f"{values.mean():.4f}",
                difference,
                error,
            )
            line = ",".join(map(str, (*cells, len(values), date.today(), "1 core", "shared_entries")))
            lines.append(line)
    return lines


if __name__ == "__main__":
    models, seconds = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    measured = [measure(train(seed, seconds), 200, 1000 + seed) for seed in range(models)]
    for of_model in measured:
        for steps in (1, 2):
            score = of_model[steps, 0, "full cache"].score.mean()
            print(f"full cache, {steps} steps: {score:.3f} of the values", file=sys.stderr)
    print("\n".join(rows(measured)))
