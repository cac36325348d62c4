"""Measures presses of kvpress on the samples and answers of a `keepsight eval` run: excess NLL, and needles found.

kvpress 0.5.5 needs transformers below 5.3, keepsight needs 5.18 or later: kvpress has an environment of its own.
`export` runs where keepsight is, with the keys of the evaluation, and adds to its `out` a folder `kvpress`: the model's
weights and, for each sample, the prompt, the question that follows it with `question=unseen`, and the full cache's
answer. `measure` does not import keepsight:

    python docs/kvpress_results.py export out=runs/real tasks=[jsonl] jsonl.dir=DIR ...  # as keepsight eval was given

    python -m venv runs/kvpress && runs/kvpress/bin/pip install kvpress==0.5.5
    runs/kvpress/bin/python docs/kvpress_results.py measure runs/real/kvpress 64 128 256

Budgets are entries per layer and KV head, or ratios of the prompt such as 0.1, as in `keepsight eval`. KVzip and KVgrad
take several prefills a sample; `measure` leaves them out unless its last argument is `all`.
"""

import copy
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
    """Write `model/`, and `samples.jsonl` with {task, length, needle} and the ids of prompt, question and answer."""
    from keepsight.commands.eval import Config, samples_of
    from keepsight.commands.from_recipe import target_of
    from keepsight.commands.parse import parse
    from keepsight.eval.record import FULL
    from keepsight.eval.tasks.samples import render_apart

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
        asked = sample if config.question == "seen" else render_apart(sample, target.tokenizer)
        ids = {"prompt": asked.prompt_ids.tolist(), "question": asked.question_ids.tolist()}
        rows.append(json.dumps(row | ids) + "\n")
    (out / "samples.jsonl").write_text("".join(rows), "utf-8")


def measure(folder: Path, budgets: list[int | float], slow: bool) -> Iterator[dict[str, Any]]:
    """Yield the row of each press at each budget for each sample; with `slow`, KVzip and KVgrad as well."""
    import kvpress
    from kvpress.presses.base_press import BasePress

    def snapkv(ratio: float) -> Any:
        return kvpress.SnapKVPress(ratio, 32, 3)

    def expected(ratio: float) -> Any:
        return kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2))

    kinds: dict[str, Any] = {
        "SnapKVPress": kvpress.SnapKVPress,
        "SnapKVPress(window_size=32, kernel_size=3)": snapkv,
        # keepsight's is {name: criticalkv, pool: {kind: avg, kernel: 3}}
        "CriticalKVPress(SnapKVPress(32, 3))": lambda ratio: kvpress.CriticalKVPress(snapkv(ratio)),
        "KeyDiffPress": kvpress.KeyDiffPress,
        "TOVAPress": kvpress.TOVAPress,
        "ExpectedAttentionPress": kvpress.ExpectedAttentionPress,
        "AdaKVPress(ExpectedAttentionPress, epsilon=0.01)": expected,
    }

    class Presses(BasePress):
        """All presses in one prefill: for each press and budget a cache, and by layer its masked entries."""

        def __init__(self, ratios: list[float]) -> None:
            self.presses = {(name, place): kind(r) for name, kind in kinds.items() for place, r in enumerate(ratios)}
            self.caches = {key: DynamicCache() for key in self.presses}
            self.masked: dict[tuple[str, int], list[Any]] = {key: [] for key in self.presses}

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            for key, press in self.presses.items():
                module.masked_key_indices = None
                kept = press.compress(module, hidden_states, keys, values, attentions, kwargs)
                self.caches[key].update(*kept, module.layer_idx)
                self.masked[key].append(module.masked_key_indices)
            module.masked_key_indices = None
            return keys, values

    def replaying(
        kind: Any, options: dict[str, Any], prompt: Tensor, ratios: list[float]
    ) -> tuple[DynamicCache, list[list[Any]]]:
        """The whole cache, and what a press that repeats the prompt masks in it at each ratio."""
        masked, cache = [], DynamicCache()

        class AtRatios(kind):  # type: ignore[misc]
            def compress_post(self, model: PreTrainedModel) -> None:
                for self.compression_ratio in ratios:
                    mask(model, [None] * len(model.model.layers))  # a ratio of 0 masks nothing
                    super().compress_post(model)
                    masked.append([layer.self_attn.masked_key_indices for layer in model.model.layers])

        with AtRatios(max(ratios), **options)(model):
            model(prompt, past_key_values=cache, logits_to_keep=1)
        cache.crop(prompt.shape[1])
        return cache, masked

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    for sample in map(json.loads, (folder / "samples.jsonl").read_text("utf-8").splitlines()):
        prompt, asked, answer = (torch.tensor([sample[part]]).long() for part in ("prompt", "question", "answer"))
        length, full = prompt.shape[1], DynamicCache()
        kept = [max(round(each * length), 1) if isinstance(each, float) else each for each in budgets]
        ratios = [ratio_of_head(entries, length) for entries in kept]
        presses = Presses(ratios)
        with presses(model):
            first = model(prompt, past_key_values=full, logits_to_keep=1).logits.float()
        found = {key: (presses.caches[key], presses.masked[key]) for key in presses.presses}
        global_ratios = [ratio_of_model(entries, length, heads) for entries in kept]
        # KVgrad's chunks are keepsight's, as in kvpress since its pull request 286; 0.5.5 has 512.
        replayed = {kvpress.KVzipPress: {}, kvpress.KVgradPress: {"chunk_size": 256}}
        for kind, options in replayed.items() if slow else ():
            cache, masked = replaying(kind, options, prompt, global_ratios)
            found |= {(kind.__name__, place): (copy.deepcopy(cache), each) for place, each in enumerate(masked)}
        mask(model, [None] * len(model.model.layers))
        whole, agreed = likelihood(model, full, first, length, asked, answer)
        for (name, place), (cache, masked) in found.items():
            mask(model, masked)
            excess = likelihood(model, cache, first, length, asked, answer)[0] - whole
            needle = None
            if sample["needle"]:
                cache.crop(cache.get_seq_length() - asked.shape[1] - answer.shape[1] + 1)
                needle = sample["needle"] in tokenizer.batch_decode(greedy(model, cache, first, length, asked))[0]
            row = {"task": sample["task"], "length": sample["length"], "press": name, "budget": budgets[place]}
            yield row | {"excess": excess.mean().item(), "found": needle, "agreement": agreed.mean().item()}


def ratio_of_head(entries: int, length: int) -> float:
    """The compression ratio at which a press keeps so many entries of each head.

    It rounds the kept share of each head down: half an entry more gives the budget.
    """
    return max(1 - (entries + 0.5) / length, 0.0)


def ratio_of_model(entries: int, length: int, heads: int) -> float:
    """The compression ratio at which a press that ranks the entries of all `heads` keeps so many a head on average.

    It rounds the number it drops down, once for all heads: half an entry more in all gives the budget.
    """
    return max(1 - (entries - 0.5 / heads) / length, 0.0)


def mask(model: Any, masked: list[Any]) -> None:
    """Mask entries in kvpress's patched attention of each layer: indices of rows, heads and entries, or None."""
    for layer, each in zip(model.model.layers, masked, strict=True):
        layer.self_attn.masked_key_indices = each


def read(model: PreTrainedModel, cache: DynamicCache, tokens: Tensor, position: int) -> Tensor:
    """Logits [R, T, V] float32 of tokens [R, T] that stand at `position`, each row after its row of the cache."""
    places = torch.arange(position, position + tokens.shape[1])[None].expand_as(tokens)
    return model(tokens, past_key_values=cache, position_ids=places).logits.float()


def likelihood(
    model: PreTrainedModel, cache: DynamicCache, first: Tensor, position: int, question: Tensor, answer: Tensor
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (nats) of an answer [1, T] to a question [1, q], and 1 for arg-max tokens, both [1, T].

    `first` [1, 1, V] are the logits of the prompt's last token, which choose the answer's first where q is 0.
    """
    logits = torch.cat([first, read(model, cache, torch.cat([question, answer[:, :-1]], dim=1), position)], dim=1)
    logits = logits[:, question.shape[1] :]
    return cross_entropy(logits.mT, answer, reduction="none"), (logits.argmax(dim=-1) == answer).float()


def greedy(model: PreTrainedModel, cache: DynamicCache, first: Tensor, position: int, question: Tensor) -> Tensor:
    """Greedy answer [1, NEEDLE_TOKENS] to a question, including tokens after its end."""
    if question.shape[1]:
        first = read(model, cache, question, position)[:, -1:]
    ids, position = first.argmax(dim=-1), position + question.shape[1]
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
        print(f"{budget:>4}  {press:<43}{mean:.3f} ({low:.2f} to {high:.2f}), {count} samples{found}")


def interval(tasks: list[list[float]]) -> tuple[float, float]:
    """Ends of the 95 % bootstrap interval of the mean over tasks, samples drawn within each."""
    draw = random.Random(95)
    means = sorted(fmean(fmean(draw.choices(task, k=len(task))) for task in tasks) for _ in range(2000))
    return means[50], means[-50]  # 2.5 % lie beyond each


if __name__ == "__main__":
    half, *arguments = sys.argv[1:]
    if half == "export":
        export(arguments)
    else:
        written, slow = Path(arguments[0]) / "measured.jsonl", arguments[-1] == "all"
        with torch.no_grad(), written.open("w", encoding="utf-8") as stream:
            budgets = [json.loads(each) for each in arguments[1:] if each != "all"]
            for measured in measure(Path(arguments[0]), budgets, slow):
                print(json.dumps(measured), file=stream, flush=True)
        table([json.loads(line) for line in written.read_text("utf-8").splitlines()])
