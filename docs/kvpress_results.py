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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    target = target_of(config)
    run = Path(config.out)
    out = run / "kvpress"
    target.model.save_pretrained(out / "model")
    target.tokenizer.save_pretrained(out / "model")

    full_rows = {}
    for row in read_lines(run / "results.jsonl"):
        if row["method"] == FULL:
            full_rows[row["task"], row["length"], row["sample"]] = row

    lines = []
    for sample in samples_of(config, target)[0]:
        full = full_rows.get(sample.key)
        if full is None or full["references"] != list(sample.references):
            sys.exit(f"{run} has not measured sample {sample.key}; give the keys of its evaluation, samples= too")
        answer = target.tokenizer(full["answer"], add_special_tokens=False)["input_ids"]
        if len(answer) < sample.max_new_tokens:
            answer.append(target.end_tokens[0])  # the text does not show it
        asked = sample
        if config.question != "seen":
            asked = render_apart(sample, target.tokenizer)
        exported = {
            "task": sample.task,
            "length": sample.length,
            "answer": answer,
            "needle": sample.references[0] if sample.task == "niah_single" else None,
            "prompt": asked.prompt_ids.tolist(),
            "question": asked.question_ids.tolist(),
        }
        lines.append(json.dumps(exported) + "\n")
    (out / "samples.jsonl").write_text("".join(lines), "utf-8")


def press_kinds() -> dict[str, Callable[[float], Any]]:
    """The presses that rank the entries of each head in one prefill: by name, a maker that takes the ratio."""
    import kvpress

    def snapkv(ratio: float) -> Any:
        return kvpress.SnapKVPress(ratio, 32, 3)

    def critical(ratio: float) -> Any:  # keepsight's is {name: criticalkv, pool: {kind: avg, kernel: 3}}
        return kvpress.CriticalKVPress(snapkv(ratio))

    def expected(ratio: float) -> Any:
        return kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2))

    return {
        "SnapKVPress": kvpress.SnapKVPress,
        "SnapKVPress(window_size=32, kernel_size=3)": snapkv,
        "CriticalKVPress(SnapKVPress(32, 3))": critical,
        "KeyDiffPress": kvpress.KeyDiffPress,
        "TOVAPress": kvpress.TOVAPress,
        "ExpectedAttentionPress": kvpress.ExpectedAttentionPress,
        "AdaKVPress(ExpectedAttentionPress, epsilon=0.01)": expected,
    }


@dataclass(frozen=True)
class Compressed:
    """What a press leaves of a prompt at one budget: a cache, and by layer the entries that are masked in it."""

    press: str
    budget: int | float
    cache: DynamicCache
    masked: list[Any]
    """By layer: indices of rows, heads and entries, as kvpress's patched attention takes them, or None."""


def compressed_in_one_prefill(
    model: Any, prompt: Tensor, ratios: dict[int | float, float]
) -> tuple[list[Compressed], DynamicCache, Tensor]:
    """Read a prompt [1, N] once and compress it by every press of `press_kinds` at the ratio of every budget.

    Returns:
        The compressed caches, the whole cache, and the logits [1, 1, V] float32 of the last token.
    """
    from kvpress.presses.base_press import BasePress

    presses = []
    for name, kind in press_kinds().items():
        for budget, ratio in ratios.items():
            presses.append((kind(ratio), Compressed(name, budget, DynamicCache(), [])))

    class AllPresses(BasePress):
        """Calls all presses for each layer, and changes nothing in the layer itself."""

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            for press, compressed in presses:
                module.masked_key_indices = None
                kept = press.compress(module, hidden_states, keys, values, attentions, kwargs)
                compressed.cache.update(*kept, module.layer_idx)
                compressed.masked.append(module.masked_key_indices)
            module.masked_key_indices = None
            return keys, values

    whole = DynamicCache()
    with AllPresses()(model):
        logits = model(prompt, past_key_values=whole, logits_to_keep=1).logits.float()
    return [compressed for _, compressed in presses], whole, logits


def compressed_by_replay(
    model: Any, kind: Any, options: dict[str, Any], prompt: Tensor, ratios: dict[int | float, float]
) -> list[Compressed]:
    """Compress a prompt [1, N] by a press that repeats the text, at the ratio of every budget.

    `kind` is KVzipPress or KVgradPress: the text is repeated once, and its scores serve all ratios.
    """
    layers = model.model.layers
    cache = DynamicCache()
    results = []

    class AtAllRatios(kind):  # type: ignore[misc]
        """Masks entries once for each ratio."""

        def compress_post(self, model: PreTrainedModel) -> None:
            for budget, ratio in ratios.items():
                self.compression_ratio = ratio
                mask(model, [None] * len(layers))  # a ratio of 0 masks nothing
                super().compress_post(model)
                masked = [layer.self_attn.masked_key_indices for layer in layers]
                results.append((budget, masked))

    with AtAllRatios(max(ratios.values()), **options)(model):
        model(prompt, past_key_values=cache, logits_to_keep=1)
    mask(model, [None] * len(layers))
    cache.crop(prompt.shape[1])
    return [Compressed(kind.__name__, budget, copy.deepcopy(cache), masked) for budget, masked in results]


def measure(folder: Path, budgets: list[int | float], slow: bool) -> Iterator[dict[str, Any]]:
    """Yield the row of each press at each budget for each sample; with `slow`, KVzip and KVgrad as well."""
    import kvpress

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    unmasked = [None] * len(model.model.layers)
    # KVgrad's chunks are keepsight's, as in kvpress since its pull request 286; 0.5.5 has 512.
    replaying = {kvpress.KVzipPress: {}, kvpress.KVgradPress: {"chunk_size": 256}} if slow else {}

    for sample in read_lines(folder / "samples.jsonl"):
        prompt, question, answer = (torch.tensor([sample[part]]).long() for part in ("prompt", "question", "answer"))
        length = prompt.shape[1]
        entries = {budget: entries_of(budget, length) for budget in budgets}
        ratios_of_heads = {budget: ratio_of_head(count, length) for budget, count in entries.items()}
        ratios_of_models = {budget: ratio_of_model(count, length, heads) for budget, count in entries.items()}

        caches, whole, first = compressed_in_one_prefill(model, prompt, ratios_of_heads)
        for kind, options in replaying.items():
            caches += compressed_by_replay(model, kind, options, prompt, ratios_of_models)

        mask(model, unmasked)
        whole_loss, agreed = likelihood(model, whole, first, length, question, answer)
        for compressed in caches:
            mask(model, compressed.masked)
            loss, _ = likelihood(model, compressed.cache, first, length, question, answer)
            is_needle_found = None
            if sample["needle"]:
                read_since = question.shape[1] + answer.shape[1] - 1
                compressed.cache.crop(compressed.cache.get_seq_length() - read_since)
                ids = greedy(model, compressed.cache, first, length, question)
                is_needle_found = sample["needle"] in tokenizer.batch_decode(ids)[0]
            yield {
                "task": sample["task"],
                "length": sample["length"],
                "press": compressed.press,
                "budget": compressed.budget,
                "excess": (loss - whole_loss).mean().item(),
                "found": is_needle_found,
                "agreement": agreed.mean().item(),
            }
        mask(model, unmasked)


def entries_of(budget: int | float, length: int) -> int:
    """The entries that a budget leaves of a prompt of `length` tokens: a whole number is itself, a share is rounded."""
    if isinstance(budget, float):
        return max(round(budget * length), 1)
    return budget


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
    """Mask entries in kvpress's patched attention: for each layer indices of rows, heads and entries, or None."""
    for layer, indices in zip(model.model.layers, masked, strict=True):
        layer.self_attn.masked_key_indices = indices


def read(model: PreTrainedModel, cache: DynamicCache, tokens: Tensor, position: int) -> Tensor:
    """Logits [R, T, V] float32 of tokens [R, T] that stand at `position`, each row after its row of the cache."""
    positions = torch.arange(position, position + tokens.shape[1])
    position_ids = positions[None].expand_as(tokens)
    return model(tokens, past_key_values=cache, position_ids=position_ids).logits.float()


def likelihood(
    model: PreTrainedModel, cache: DynamicCache, first: Tensor, position: int, question: Tensor, answer: Tensor
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (nats) of an answer [1, T] to a question [1, q], and 1 for arg-max tokens, both [1, T].

    `first` [1, 1, V] are the logits of the prompt's last token, which choose the answer's first where q is 0.
    """
    following = torch.cat([question, answer[:, :-1]], dim=1)
    logits = torch.cat([first, read(model, cache, following, position)], dim=1)
    logits = logits[:, question.shape[1] :]
    loss = cross_entropy(logits.mT, answer, reduction="none")
    agreed = (logits.argmax(dim=-1) == answer).float()
    return loss, agreed


def greedy(model: PreTrainedModel, cache: DynamicCache, first: Tensor, position: int, question: Tensor) -> Tensor:
    """Greedy answer [1, NEEDLE_TOKENS] to a question, including tokens after its end."""
    logits = first
    if question.shape[1]:
        logits = read(model, cache, question, position)[:, -1:]
    ids = logits.argmax(dim=-1)
    answer_position = position + question.shape[1]
    for step in range(NEEDLE_TOKENS - 1):
        logits = read(model, cache, ids[:, -1:], answer_position + step)
        ids = torch.cat([ids, logits.argmax(dim=-1)], dim=1)
    return ids


def table(rows: list[dict[str, Any]]) -> None:
    """Print, for each press and budget, the mean over tasks with its 95 % bootstrap interval, and the needles found."""
    agreement = fmean(row["agreement"] for row in rows)
    print(f"the full cache agrees with keepsight's in {agreement:.2%} of tokens")
    groups = defaultdict[tuple[float, str], list[dict[str, Any]]](list)
    for row in rows:
        groups[row["budget"], row["press"]].append(row)
    for (budget, press), group in sorted(groups.items()):
        excess_by_task = defaultdict[str, list[float]](list)
        needles_by_length = defaultdict[int, list[bool]](list)
        for row in group:
            excess_by_task[row["task"]].append(row["excess"])
            if row["found"] is not None:
                needles_by_length[row["length"]].append(row["found"])
        mean = fmean(fmean(values) for values in excess_by_task.values())
        low, high = interval([*excess_by_task.values()])
        needles = ""
        for length, found in needles_by_length.items():
            needles += f"; {length} tokens: {sum(found)} of {len(found)}"
        print(f"{budget:>4}  {press:<43}{mean:.3f} ({low:.2f} to {high:.2f}), {len(group)} samples{needles}")


def interval(tasks: list[list[float]]) -> tuple[float, float]:
    """Ends of the 95 % bootstrap interval of the mean over tasks, samples drawn within each."""
    draw = random.Random(95)
    means = []
    for _ in range(2000):
        means.append(fmean(fmean(draw.choices(task, k=len(task))) for task in tasks))
    means.sort()
    return means[50], means[-50]  # 2.5 % lie beyond each


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def main(arguments: list[str]) -> None:
    """Run the half that the first argument names, `export` or `measure`, with the others."""
    half, *rest = arguments
    if half == "export":
        export(rest)
        return
    folder, *budgets = rest
    slow = budgets[-1] == "all"
    if slow:
        budgets.pop()
    measured = Path(folder) / "measured.jsonl"
    with torch.no_grad(), measured.open("w", encoding="utf-8") as stream:
        for row in measure(Path(folder), [json.loads(budget) for budget in budgets], slow):
            print(json.dumps(row), file=stream, flush=True)
    table(read_lines(measured))


if __name__ == "__main__":
    main(sys.argv[1:])
