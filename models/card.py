"""Model cards: the record of an artifact's training, and the card that is generated from it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from keepsight.models.identity import Identity, version_of
from keepsight.tables import markdown_table

CARD = "README.md"
HUB_ID = "FOLDER_OR_HUB_ID"
"""Placeholder in a card for where the artifact is, until it is pushed."""

LICENSES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-14B-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-7B-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": "apache-2.0",
    "Qwen/Qwen3-1.7B": "apache-2.0",
    "Qwen/Qwen3-30B-A3B": "apache-2.0",
    "Qwen/Qwen3-4B": "apache-2.0",
    "Qwen/Qwen3-8B": "apache-2.0",
    "Qwen/Qwen3.5-4B": "apache-2.0",
    "Qwen/Qwen3.5-9B": "apache-2.0",
    "allenai/Olmo-3-7B-Instruct": "apache-2.0",
    "google/gemma-3-270m": "gemma",
    "google/gemma-3-27b-it": "gemma",
    "google/gemma-3-4b-it": "gemma",
    "google/gemma-4-12B-it": "apache-2.0",
    "google/gemma-4-E4B-it": "apache-2.0",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3.1",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3.2",
    "meta-llama/Llama-3.2-3B-Instruct": "llama3.2",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3.3",
    "microsoft/phi-4": "mit",
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": "apache-2.0",
    "mistralai/Mistral-7B-Instruct-v0.3": "apache-2.0",
    "nvidia/Nemotron-H-8B-Base-8K": "other",  # a licence of NVIDIA's own, for research
    "openai/gpt-oss-20b": "apache-2.0",
}
"""Licences of base models, under which artifacts are published: Hub id -> the Hub's identifier of the licence."""

_CARD = """---
{{ card_data }}
---

# {{ title }}

{{ about }}

{{ judged }}

## Use

{{ use }}

## Training

{% for name, value in training.items() %}- {{ name }}: {{ value }}
{% else %}Not recorded.
{% endfor %}
Base model version: `{{ base_version }}`. Tokenizer and chat template: `{{ template }}`. \
Training data: `{{ data }}`.
keepsight {{ keepsight_version }}.

## Data

{% if sources %}Samples by source: {{ sources }}.{% endif %}

{{ notes }}

## {{ heading }}

{{ measured }}
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

_EVALUATION = "## Evaluation\n\nMeasured by `keepsight eval`; plots are in evaluation.png:\n\n"
HEAD_WEIGHTS = """\
## Weights of heads

The heads of all layers share one budget, and each has a weight by which its importance is multiplied before they are
compared (head_weights.png)."""
FINETUNING = """\
## Fine-tuning for eviction

The module and the weights of its heads were trained further, jointly, on the loss of the base model's answers after
eviction (`keepsight finetune`; finetuning.png)."""
_EVICTION = """\
{about}

{training}

The measurements above are from before this training. Excess NLL counts an answer's tokens after the first, which is
predicted from the whole prompt; it is 0 where a prompt is within the budget.

{table}"""


@dataclass(frozen=True)
class Provenance:
    """Origin of an artifact; saved with it.

    Attributes:
        base_model: Hub id of the base model, or its name without a slash; never a folder's path, as this is published.
        identity: The version of the base model, the tokenizer that made the prompts, and the training data.
        training: Summary of the training: steps, prompt lengths, losses.
        keepsight_version: Version of keepsight that trained it.
        trained_on: Which prompts it was trained on, as the training records them; empty where that is not known.
    """

    base_model: str
    identity: Identity = Identity()
    training: dict[str, Any] = field(default_factory=dict)
    keepsight_version: str = ""
    trained_on: str = ""

    def warn_of_another_model(self, artifact: Path, model: PreTrainedModel) -> None:
        """Warn, once, if a model has other weights than the one that the artifact in a folder was trained with."""
        subject = f"{artifact} was trained for {self.base_model or 'a model without a name'}"
        remedy = "evaluate it again on this one"
        self.identity.warn(Identity(model=version_of(model)), subject, remedy)


@dataclass(frozen=True)
class CardBasics:
    """The part of a card that all artifacts have.

    Attributes:
        title: Title of the card.
        provenance: Base model, training and data digest.
        sources: Number of training samples by source.
        notes: Markdown on the origin and licences of the data; may be empty.
        license: Licence of the weights, as an identifier the Hub knows; None for the base model's.
        judged: What each stage of the training did for the module; may be empty.
    """

    title: str
    provenance: Provenance
    sources: Mapping[str, int] = field(default_factory=dict)
    notes: str = ""
    license: str | None = None
    judged: str = ""

    @property
    def base_model(self) -> str:
        """Hub id of the base model, or its name, which has no slash."""
        return _quotable(self.provenance.base_model)


def write_card(
    basics: CardBasics,
    *,
    tags: list[str],
    about: str,
    use: str,
    heading: str,
    measured: str,
    library: str | None = None,
) -> str:
    """A card as Markdown.

    `about` says what the module is, and `use` how it is used; `heading` is over the measurements, `measured`, which may
    be empty; `library` is the Hub's `library_name`, and `tags` are those on the Hub.
    """
    origin = basics.provenance
    hub_id = basics.base_model if "/" in basics.base_model else None
    data = ModelCardData(
        base_model=hub_id,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["keepsight", *tags],
        **_license(basics.license, basics.base_model),
    )
    card = ModelCard.from_template(
        data,
        template_str=_CARD,
        title=plain_text(basics.title),
        about=about,
        judged=plain_text(basics.judged),
        use=use,
        training={plain_text(name): plain_text(value) for name, value in origin.training.items()},
        base_version=_quotable(origin.identity.model or "unknown"),
        template=_quotable(origin.identity.template or "unknown"),
        data=_quotable(origin.identity.data or "unknown"),
        keepsight_version=_quotable(origin.keepsight_version),
        sources="; ".join(f"{plain_text(name)} ({count})" for name, count in basics.sources.items()),
        notes=basics.notes,
        heading=heading,
        measured=measured or "Not measured.",
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _license(license: str | None, base_model: str) -> dict[str, Any]:
    """Licence fields of the card's metadata: of `license`, else of the base model, else a link to it."""
    identifier = license or LICENSES.get(base_model)
    if identifier and (license or identifier != "other"):
        return {"license": identifier}
    fields = {"license": "other", "license_name": "license-of-the-base-model"}
    if "/" in base_model:
        fields["license_link"] = f"https://huggingface.co/{base_model}"
    return fields


def plain_text(value: object) -> str:
    """Text from outside on one line of Markdown, also in a table: without markup, links and control characters."""
    characters = [character if character.isprintable() else " " for character in str(value)]
    printable = "".join(characters)
    return re.sub(r"([\\|<`*]|(?<=])\()", r"\\\1", " ".join(printable.split()))


def _quotable(text: str) -> str:
    """Text from outside without the characters that end a quotation in Markdown or Python."""
    return re.sub(r"[^\w ./:@+=,()-]", "", text)


def read_card(folder: Path) -> str:
    """The card in a folder; bytes that are not UTF-8 are replaced."""
    return (folder / CARD).read_text(encoding="utf-8-sig", errors="replace")


def example(base_model: str, method: str, budget: int) -> str:
    """Python code that generates with a method of `keepsight`, as a Markdown block."""
    return _EXAMPLE.format(base_model=base_model, method=method, budget=budget)


def metrics_table(metrics: Mapping[str, float], heading: str) -> str:
    """Metrics as a Markdown table with `heading` over the values; empty when nothing was measured."""
    if not metrics:
        return ""
    rows = [(name.removeprefix("eval_"), f"{value:.4f}") for name, value in metrics.items()]
    return markdown_table(rows, ["measure", heading]).rstrip()


def with_evaluation(card: str, table: str) -> str:
    """A card that ends with a Markdown table of an evaluation, in place of the section that it may have had."""
    return with_section(card, f"{_EVALUATION}{table.strip()}\n")


def with_eviction(
    folder: Path, about: str, training: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """The card of the adapter in a folder, with a last section on a training for the loss after eviction.

    `about`, `HEAD_WEIGHTS` or `FINETUNING`, replaces the section with the same heading; `training` is by name; `before`
    and `after` are measurements at the first and the last step, with `eval_excess_nll_at_BUDGET` in nats.
    """
    card = read_card(folder) if (folder / CARD).is_file() else "# keepsight lookahead adapter\n"
    rows = excess_rows(before, after) or [("not measured", "", "")]
    table = markdown_table(rows, ["held-out excess NLL (nats)", "before", "after"])
    listed = "\n".join(f"- {plain_text(name)}: {plain_text(value)}" for name, value in training.items())
    section = _EVICTION.format(about=about, training=listed, table=table)
    return with_section(card, section)


def excess_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of a Markdown table: held-out excess NLL at each budget, before and after a training."""
    rows = []
    for name, value in after.items():
        if "_excess_nll" not in name:
            continue
        label = name.rpartition("_")[2] + " entries"
        if "_uniform_" in name:
            label += " in every head"
        if "_unseen_" in name:
            label += ", question unseen"
        rows.append((label, f"{before[name]:.3f}", f"{value:.3f}"))
    return rows


def with_section(card: str, section: str) -> str:
    """The card with a section at its end, without the one of the same heading; headings in code fences do not count."""
    heading = section.partition("\n")[0]
    sections = [""]
    in_fence = False
    for line in card.splitlines(keepends=True):
        if line.startswith("```"):
            in_fence = not in_fence
        if line.startswith("## ") and not in_fence:
            sections.append("")
        sections[-1] += line
    other_sections = [text for text in sections if text.partition("\n")[0].rstrip() != heading]
    return "".join(other_sections).rstrip() + "\n\n" + section
