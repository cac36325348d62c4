"""The model card of a lookahead adapter, and what it shares with the cards of heads."""

from collections.abc import Mapping, Sequence

from keepsight.models.lookahead_files import Provenance
from keepsight.models.lookahead_settings import LookaheadSettings

_CARD = """---
base_model: {base_model}
library_name: peft
pipeline_tag: text-generation
tags: [keepsight, lookaheadkv, kv-cache, lora]
license: {license}
---

# {title}

A keepsight lookahead module ([LookaheadKV](https://arxiv.org/abs/2603.10899)): {tokens} soft tokens and a LoRA of rank
{rank} that predict which prompt entries of the KV cache the coming answer of `{base_model}`
attends to. It never changes what the model says; it tells which entries to keep.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from keepsight import LookaheadKV

model = AutoModelForCausalLM.from_pretrained("{base_model}")
tokenizer = AutoTokenizer.from_pretrained("{base_model}")
inputs = tokenizer("a long prompt", return_tensors="pt")
model.generate(**inputs, custom_generate=LookaheadKV.from_pretrained("FOLDER_OR_HUB_ID", budget=128), max_new_tokens=64)
```

Plain `peft.PeftModel.from_pretrained` loads it too and leaves the base model's outputs unchanged.

{origin}

## Fidelity on held-out training samples

{fidelity}
"""

_ORIGIN = """## Training

{training}

Base model version: `{base_version}`. Chat template: `{template_digest}`. Training data: `{data_digest}`.
keepsight {keepsight_version}.

## Data

{sources}"""


def model_card(
    title: str,
    settings: LookaheadSettings,
    provenance: Provenance,
    sources: Mapping[str, int],
    fidelity: Mapping[str, float],
    notes: Sequence[str] = (),
    license_name: str = "apache-2.0",
) -> str:
    """The card as Markdown.

    Args:
        title: Its heading.
        settings: The module's shape.
        provenance: Where it comes from.
        sources: Samples by source.
        fidelity: `eval_kl`, `eval_recall`, `eval_tau` of the last measurement; empty when nothing was measured.
        notes: Lines on licences and origins of the data.
        license_name: An identifier the Hub knows.
    """
    return _CARD.format(
        title=title,
        license=license_name,
        tokens=settings.tokens,
        rank=settings.rank,
        base_model=provenance.base_model,
        origin=origin(provenance, sources, notes),
        fidelity=table(fidelity, "mean over layers"),
    )


def origin(provenance: Provenance, sources: Mapping[str, int], notes: Sequence[str]) -> str:
    """The sections on training and data of any card; arguments as for `model_card`."""
    rows = [f"| {name} | {count} |" for name, count in sources.items()]
    return _ORIGIN.format(
        base_version=provenance.base_version,
        template_digest=provenance.template_digest,
        data_digest=provenance.data_digest,
        keepsight_version=provenance.keepsight_version,
        training="\n".join(f"- {name}: {value}" for name, value in provenance.training.items()) or "Not recorded.",
        sources="\n".join(["| source | samples |", "| --- | --- |", *rows, "", *notes]),
    )


def table(measured: Mapping[str, float], heading: str) -> str:
    """What was measured as a Markdown table, `heading` over the values; one sentence when nothing was."""
    rows = [f"| {name.removeprefix('eval_')} | {value:.4f} |" for name, value in measured.items()]
    return "\n".join([f"| measure | {heading} |", "| --- | --- |", *rows]) if rows else "Not measured."
