"""Model cards: what the cards of all trained modules say in the same way."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepsight.models.licenses import license_lines
from keepsight.models.lookahead_files import Provenance

HUB_ID = "FOLDER_OR_HUB_ID"
"""Stands in a card for what is being described, until it is pushed."""

_CARD = """---
{base}{library}pipeline_tag: text-generation
tags: [keepsight, {tags}]
{license}
---

# {title}

{about}

## Use

{use}

## Training

{training}

Base model version: `{base_version}`. Chat template: `{template_digest}`. Training data: `{data_digest}`.
keepsight {keepsight_version}.

## Data

{sources}

## {heading}

{measured}
"""

_EXAMPLE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from keepsight import {method}

model = AutoModelForCausalLM.from_pretrained("{base_model}")
tokenizer = AutoTokenizer.from_pretrained("{base_model}")
inputs = tokenizer("a long prompt", return_tensors="pt")
model.generate(**inputs, custom_generate={method}.from_pretrained("FOLDER_OR_HUB_ID", budget={budget}), \
max_new_tokens=64)
```"""

_EVALUATION = "## Evaluation\n\nOf `keepsight eval`, with pictures in evaluation.png:"


@dataclass(frozen=True)
class CardBasics:
    """What every card needs to know.

    Attributes:
        title: Title of the card.
        provenance: Base model, training and data digest.
        sources: Number of training samples by source.
        notes: Markdown on the origin and licences of the data; may be empty.
        license: Licence of the weights, as an identifier the Hub knows; None for the base model's.
    """

    title: str
    provenance: Provenance
    sources: Mapping[str, int] = field(default_factory=dict)
    notes: str = ""
    license: str | None = None

    @property
    def base_model(self) -> str:
        """Hub id of the base model, or its name, which has no slash."""
        return self.provenance.base_model


def write_card(
    basics: CardBasics, *, tags: str, about: str, use: str, heading: str, measured: str, library: str = ""
) -> str:
    """A card as Markdown.

    Args:
        basics: Title, provenance, data and licence.
        tags: Tags on the Hub, separated by commas.
        about: What the module is.
        use: How it is used.
        heading: Heading of the measurements.
        measured: The measurements.
        library: The Hub's `library_name`; none by default.
    """
    origin = basics.provenance
    rows = [f"| {name} | {count} |" for name, count in basics.sources.items()]
    return _CARD.format(
        base=f"base_model: {basics.base_model}\n" if "/" in basics.base_model else "",
        library=f"library_name: {library}\n" if library else "",
        tags=tags,
        license=license_lines(basics.license, basics.base_model),
        title=basics.title,
        about=about,
        use=use,
        training="\n".join(f"- {name}: {value}" for name, value in origin.training.items()) or "Not recorded.",
        base_version=origin.base_version,
        template_digest=origin.template_digest,
        data_digest=origin.data_digest,
        keepsight_version=origin.keepsight_version,
        sources="\n".join(["| source | samples |", "| --- | --- |", *rows, "", basics.notes]).rstrip(),
        heading=heading,
        measured=measured,
    )


def example(base_model: str, method: str, budget: int) -> str:
    """Python code that generates with a method of `keepsight`, as a Markdown block."""
    return _EXAMPLE.format(base_model=base_model, method=method, budget=budget)


def with_evaluation(card: str, table: str) -> str:
    """A card that ends with a Markdown table of an evaluation, in place of the one that it may have had."""
    return f"{card.partition(_EVALUATION)[0].rstrip()}\n\n{_EVALUATION}\n\n{table.strip()}\n"


def metrics_table(metrics: Mapping[str, float], heading: str) -> str:
    """Metrics as a Markdown table with `heading` over the values; one sentence when nothing was measured."""
    rows = [f"| {name.removeprefix('eval_')} | {value:.4f} |" for name, value in metrics.items()]
    return "\n".join([f"| measure | {heading} |", "| --- | --- |", *rows]) if rows else "Not measured."
