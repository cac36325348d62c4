"""Measures presses of kvpress on the samples and answers of a `keepsight eval` run: excess NLL, and needles found.

kvpress 0.5.5 needs transformers below 5.3 and keepsight 5.10 or later, so that kvpress has an environment of its own.
`export` runs where keepsight is, with the keys of the evaluation, and adds to its `out` a folder `kvpress`: the model's
weights and, for each sample, the prompt and the full cache's answer. `measure` knows nothing of keepsight:

    python docs/kvpress_results.py export out=runs/real tasks=[jsonl] jsonl.dir=DIR ...  # as keepsight eval was given

    python -m venv runs/kvpress && runs/kvpress/bin/pip install kvpress==0.5.5
    runs/kvpress/bin/python docs/kvpress_results.py measure runs/real/kvpress 64 128 256
"""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

NEEDLE_TOKENS = 16


def export(keys: list[str]) -> None:
    """Write `model/`, and `samples.jsonl` with {task, length, prompt, answer, needle} a line, ids of tokens."""
    from keepsight.commands.eval import Config, samples_of
    from keepsight.commands.from_recipe import target_of
    from keepsight.commands.parse import parse
    from keepsight.eval.results import FULL

    config = parse(Config, keys)
    target, out = target_of(config), Path(config.out) / "kvpress"
    for part in (target.model, target.tokenizer):
        part.save_pretrained(out / "model")
    measured = map(json.loads, (out.parent / "results.jsonl").read_text("utf-8").splitlines())
    full = {(row["task"], row["length"], row["sample"]): row for row in measured if row["method"] == FULL}
    rows = []
    for sample in samples_of(config, target)[0]:
        row = full.get(sample.key)
        if row is None or row["references"] != list(sample.references):
            sys.exit(
                f"{out.parent} has not measured sample {sample.key}; give the keys of its evaluation, samples= too"
            )
        answer = target.tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        if len(answer) < sample.max_new_tokens:
            answer.append(target.end_tokens[0])  # the text does not show it
        needle = sample.references[0] if sample.task == "niah_single" else None
        row = {"task": sample.task, "length": sample.length, "answer": answer, "needle": needle}
        rows.append(json.dumps(row | {"prompt": sample.prompt_ids.tolist()}) + "\n")
    (out / "samples.jsonl").write_text("".join(rows), "utf-8")


def measure(folder: Path, budgets: list[int]) -> Iterator[dict[str, Any]]:
    """For each sample, what each press gives at each budget."""
    from kvpress import ExpectedAttentionPress, SnapKVPress, TOVAPress
    from kvpress.presses.base_press import BasePress

    class Presses(BasePress):
        """All from one prefill: for each budget a cache with a row for each press; the full cache stays as it is."""

        def __init__(self, length: int) -> None:
            # Half an entry more, so that rounding down the kept share gives the budget.
            ratios = [max(1 - (budget + 0.5) / length, 0.0) for budget in budgets]
            self.presses = [[kind(ratio) for kind in kinds.values()] for ratio in ratios]
            self.caches = [DynamicCache() for _ in budgets]

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            for presses, cache in zip(self.presses, self.caches, strict=True):
                kept = [press.compress(module, hidden_states, keys, values, attentions, kwargs) for press in presses]
                cache.update(*map(torch.cat, zip(*kept, strict=True)), module.layer_idx)
            return keys, values

    kinds = {
        "SnapKVPress": SnapKVPress,
        "SnapKVPress(window_size=32, kernel_size=3)": lambda ratio: SnapKVPress(ratio, 32, 3),
        "TOVAPress": TOVAPress,
        "ExpectedAttentionPress": ExpectedAttentionPress,
    }
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for sample in map(json.loads, (folder / "samples.jsonl").read_text("utf-8").splitlines()):
        prompt, answer = torch.tensor([sample["prompt"]]), torch.tensor([sample["answer"]])
        length, full = prompt.shape[1], DynamicCache()
        presses = Presses(length)
        with presses(model):
            first = model(prompt, past_key_values=full, logits_to_keep=1).logits.float()
        whole, agreed = likelihood(model, full, first, length, answer)
        for budget, cache in zip(budgets, presses.caches, strict=True):
            assert cache.get_seq_length() == min(budget, length)
            rows = first.expand(len(kinds), -1, -1)
            excess = likelihood(model, cache, rows, length, answer.expand(len(kinds), -1))[0] - whole
            found: list[bool | None] = [None] * len(kinds)
            if sample["needle"]:
                cache.crop(min(budget, length))
                ids = greedy(model, cache, rows, length)
                found = [sample["needle"] in text for text in tokenizer.batch_decode(ids)]
            for name, *values in zip(kinds, excess.mean(dim=1).tolist(), found, strict=True):
                row = {"task": sample["task"], "length": sample["length"], "press": name, "budget": budget}
                yield row | dict(zip(("excess", "found"), values, strict=True)) | {"agreement": agreed.mean().item()}


def read(model: PreTrainedModel, cache: DynamicCache, tokens: Tensor, position: int) -> Tensor:
    """Logits [R, T, V] float32 of tokens [R, T] that stand at `position`, each row after its row of the cache."""
    places = torch.arange(position, position + tokens.shape[1])[None].expand_as(tokens)
    return model(tokens, past_key_values=cache, position_ids=places).logits.float()


def likelihood(
    model: PreTrainedModel, cache: DynamicCache, first: Tensor, position: int, answer: Tensor
) -> tuple[Tensor, Tensor]:
    """Of answers [R, T], `first` [R, 1, V] their first tokens' logits: nats, and 1 for first choices, both [R, T]."""
    logits = torch.cat([first, read(model, cache, answer[:, :-1], position)], dim=1)
    return cross_entropy(logits.mT, answer, reduction="none"), (logits.argmax(dim=-1) == answer).float()


def greedy(model: PreTrainedModel, cache: DynamicCache, first: Tensor, position: int) -> Tensor:
    """Greedy answers [R, NEEDLE_TOKENS], what a model says after their end included."""
    ids = first.argmax(dim=-1)
    for place in range(position, position + NEEDLE_TOKENS - 1):
        ids = torch.cat([ids, read(model, cache, ids[:, -1:], place).argmax(dim=-1)], dim=1)
    return ids


def table(rows: list[dict[str, Any]]) -> None:
    """Print, for each press and budget, the mean over tasks with its 95 % bootstrap interval, and the needles found."""
    print(f"the full cache agrees with keepsight's in {fmean(row['agreement'] for row in rows):.2%} of tokens")
    for budget, press in sorted({(row["budget"], row["press"]) for row in rows}):
        tasks, needles = defaultdict[str, list[float]](list), defaultdict[int, list[bool]](list)
        for row in rows:
            if (row["budget"], row["press"]) == (budget, press):
                tasks[row["task"]].append(row["excess"])
                needles[row["length"]] += [row["found"]] if row["found"] is not None else []
        low, high = interval([*tasks.values()])
        found = "".join(f"; {length} tokens: {sum(hits)} of {len(hits)}" for length, hits in needles.items() if hits)
        mean, count = fmean(map(fmean, tasks.values())), sum(map(len, tasks.values()))
        print(f"{budget:>4} entries  {press:<43}{mean:.3f} ({low:.2f} to {high:.2f}), {count} samples{found}")


def interval(tasks: list[list[float]], resamples: int = 2000) -> tuple[float, float]:
    """Ends of the 95 % bootstrap interval of the mean over tasks, samples drawn within each."""
    draw = random.Random(95)
    means = sorted(fmean(fmean(draw.choices(task, k=len(task))) for task in tasks) for _ in range(resamples))
    return means[resamples // 40], means[-resamples // 40]


if __name__ == "__main__":
    half, *given = sys.argv[1:]
    if half == "export":
        export(given)
    else:
        written = Path(given[0]) / "measured.jsonl"
        with torch.no_grad(), written.open("w", encoding="utf-8") as stream:
            for measured in measure(Path(given[0]), [int(budget) for budget in given[1:]]):
                print(json.dumps(measured), file=stream, flush=True)
        table([json.loads(line) for line in written.read_text("utf-8").splitlines()])
