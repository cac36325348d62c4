"""The model card of a draft head: use, training, data, evaluation."""

from collections.abc import Mapping, Sequence

from keepsight.models.lookahead_card import measured_table, origin
from keepsight.models.lookahead_files import Provenance

_CARD = """---
base_model: {base_model}
pipeline_tag: text-generation
tags: [keepsight, eagle3, speculative-decoding]
license: {license}
---

# {title}

An [EAGLE-3](https://arxiv.org/abs/2503.01840) draft head for `{base_model}`: one decoder layer
that guesses the next tokens from the outputs of three of the base model's layers. The embedding is the base model's
and not stored here. With greedy decoding the base model checks every guess, so the head changes how fast an answer
comes, not what it says.

## Use

With keepsight, give `draft.head=FOLDER_OR_HUB_ID` to a command, or load it in Python:

```python
from transformers import AutoModelForCausalLM
from keepsight.models.draft_head_files import load_draft_head
from keepsight.models.hub import fetch

model = AutoModelForCausalLM.from_pretrained("{base_model}")
head = load_draft_head(fetch("FOLDER_OR_HUB_ID"), model)
```

`config.json` and the names in `model.safetensors` are those of public EAGLE-3 heads.

{origin}

## Measured on held-out training samples

{measured}
"""


def draft_head_card(
    title: str,
    provenance: Provenance,
    sources: Mapping[str, int],
    metrics: Mapping[str, float],
    notes: Sequence[str] = (),
    license_name: str = "apache-2.0",
) -> str:
    """The card as Markdown.

    Args:
        title: Heading of the card.
        provenance: Origin of the head.
        sources: Number of samples by source.
        metrics: The last measurement, such as acceptance length and agreement, by name; empty when nothing was
            measured.
        notes: Lines on licences and origins of the data.
        license_name: Licence identifier of the Hub.
    """
    return _CARD.format(
        title=title,
        license=license_name,
        base_model=provenance.base_model,
        origin=origin(provenance, sources, notes),
        measured=measured_table(metrics, "value"),
    )
