"""The model card of a retrieval head: use, training, data, evaluation."""

from collections.abc import Mapping, Sequence

from keepsight.models.lookahead_card import origin
from keepsight.models.lookahead_files import Provenance
from keepsight.models.retrieval_config import NONE, PREVIOUS_STEP, RetrievalConfig

_CARD = """---
base_model: {base_model}
pipeline_tag: text-generation
tags: [keepsight, specontext, kv-cache, retrieval-head]
license: {license}
---

# {title}

A retrieval head ([SpeContext](https://arxiv.org/abs/2512.00722)) for `{base_model}`: the query
and key projections of a draft head, which say before every decoding step which entries of the KV cache the step will
read. It reads {reads}. {parameters:,} parameters; the embedding is the base model's and not stored here.
Trained with up to {trained:,} tokens; YaRN takes it further.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from keepsight import SpeContext

model = AutoModelForCausalLM.from_pretrained("{base_model}")
tokenizer = AutoTokenizer.from_pretrained("{base_model}")
inputs = tokenizer("a long prompt", return_tensors="pt")
model.generate(**inputs, custom_generate=SpeContext.from_pretrained("FOLDER_OR_HUB_ID", budget=1024), max_new_tokens=64)
```

With keepsight's commands: `retrieval=FOLDER_OR_HUB_ID methods=[full,specontext]`.

{origin}

## Measured on held-out training samples

{measured}
"""

_READS = {
    PREVIOUS_STEP: "the coming token's embedding, and what three of the base model's layers gave for the one before",
    NONE: "token embeddings alone",
}

_LEGEND = """
KL divergence of the head's attention from the target's importance, in nats: {kl}.

Only steps with more entries than the budget count. Hit rate: share of the target's most important entries of a step and
KV head (mean over its layers) that the head selects too. Mass: share of the target's attention that the selection gets.
Without a head: the first 4 and the latest entries. At best: what the target itself would select. Overlap: share of a
step's selection that the next step selects again.
"""


def retrieval_card(
    title: str,
    config: RetrievalConfig,
    parameters: int,
    provenance: Provenance,
    sources: Mapping[str, int],
    measured: str,
    notes: Sequence[str] = (),
    license_name: str = "apache-2.0",
) -> str:
    """The card as Markdown.

    Args:
        title: Heading of the card.
        config: The head's shape.
        parameters: Number of its parameters.
        provenance: Origin of the head.
        sources: Number of samples by source.
        measured: Result of `comparison`.
        notes: Lines on licences and origins of the data.
        license_name: Licence identifier of the Hub.
    """
    reads = _READS[config.features]
    return _CARD.format(
        title=title,
        license=license_name,
        base_model=provenance.base_model,
        reads=reads,
        parameters=parameters,
        trained=config.trained,
        origin=origin(provenance, sources, notes),
        measured=measured,
    )


def comparison(first: Mapping[str, float], last: Mapping[str, float], before: str) -> str:
    """A Markdown table of two measurements, before and after distillation; one sentence when nothing was measured.

    Args:
        first: Metrics of the initial head: `eval_kl`, and for each budget B `eval_hit_B` and so on.
        last: Metrics of the distilled head.
        before: Name of the initial head.
    """
    if not first:
        return "Not measured."
    budgets = [name.removeprefix("eval_hit_") for name in first if name.startswith("eval_hit_")]
    heads = ["budget", "samples", f"hit rate, {before}", "distilled", "without a head"]
    heads += [f"mass, {before}", "distilled", "without a head", "at best", f"overlap, {before}", "distilled"]
    rows = [heads, ["---"] * len(heads)]
    for budget in budgets:
        columns = [(first, "hit"), (last, "hit"), (last, "window_hit"), (first, "mass"), (last, "mass")]
        columns += [(last, "window_mass"), (last, "best_mass"), (first, "overlap"), (last, "overlap")]
        names = [(log, f"eval_{name}_{budget}") for log, name in columns]
        values = [f"{log[name]:.3f}" if name in log else "-" for log, name in names]
        rows.append([budget, f"{last[f'eval_samples_{budget}']:.0f}", *values])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    kl = f"{before} {first['eval_kl']:.3f}, distilled {last['eval_kl']:.3f}"
    return table + "\n" + _LEGEND.format(kl=kl).rstrip()
