"""The model card of a draft head."""

from collections.abc import Mapping

from keepsight.models.card import CardBasics, metrics_table, write_card

_ABOUT = """An [EAGLE-3](https://arxiv.org/abs/2503.01840) draft head for `{base_model}`: one decoder layer
that guesses the next tokens from the outputs of three of the base model's layers. The embedding is the base model's
and not stored here. With greedy decoding the base model checks every guess, so the head changes how fast an answer
comes, not what it says."""

_USE = """With keepsight, give `draft.head=FOLDER_OR_HUB_ID` to a command, or load it in Python:

```python
from transformers import AutoModelForCausalLM
from keepsight.models.draft_head_files import load_draft_head
from keepsight.models.hub import fetch

model = AutoModelForCausalLM.from_pretrained("{base_model}")
head = load_draft_head(fetch("FOLDER_OR_HUB_ID"), model)
```

`config.json` and the names in `model.safetensors` are those of public EAGLE-3 heads."""


def draft_head_card(basics: CardBasics, metrics: Mapping[str, float]) -> str:
    """The card as Markdown.

    Args:
        basics: Title, provenance, data and licence.
        metrics: The last measurement, such as accepted length and agreement, by name; empty when nothing was measured.
    """
    return write_card(
        basics,
        tags="eagle3, speculative-decoding",
        about=_ABOUT.format(base_model=basics.base_model),
        use=_USE.format(base_model=basics.base_model),
        heading="Measured on held-out training samples",
        measured=metrics_table(metrics, "value"),
    )
