"""The model card of a lookahead adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepsight.models.card import CardBasics, example, metrics_table, write_card
from keepsight.models.lookahead_settings import LookaheadSettings

_ABOUT = """\
A keepsight lookahead module ([LookaheadKV](https://arxiv.org/abs/2603.10899)): {tokens} soft tokens and {lora}
that predict which prompt entries of the KV cache the coming answer of `{base_model}`
attends to. It never changes what the model says; it tells which entries to keep."""


def lookahead_card(basics: CardBasics, settings: LookaheadSettings, fidelity: Mapping[str, float]) -> str:
    """The card as Markdown.

    Args:
        basics: Title, provenance, data and licence.
        settings: The module's shape.
        fidelity: `eval_kl`, `eval_recall`, `eval_tau` of the last measurement; empty when nothing was measured.
    """
    lora = f"a LoRA of rank {settings.rank}" if settings.rank and settings.targets != ["none"] else "no LoRA"
    use = example(basics.base_model, "LookaheadKV", 128)
    use += "\n\nPlain `peft.PeftModel.from_pretrained` loads it too and leaves the base model's outputs unchanged."
    return write_card(
        basics,
        tags="lookaheadkv, kv-cache, lora",
        about=_ABOUT.format(tokens=settings.tokens, lora=lora, base_model=basics.base_model),
        use=use,
        heading="Fidelity on held-out training samples",
        measured=metrics_table(fidelity, "mean over layers"),
        library="peft",
    )


HEAD_WEIGHTS = """\
## Weights of heads

The heads of all layers share one budget, and each has a weight by which its importance is multiplied before they are
compared (`keepsight train_head_weights`; head_weights.png)."""
FINETUNING = """\
## Fine-tuning on answers

The module and the weights of its heads were trained further, together, on what evicting with them costs the target's
answers (`keepsight finetune`; finetuning.png)."""
_EVICTION = """\
{about}

{training}

What stands above was measured before this training. Excess NLL is of an answer's tokens after the first, which follows
the whole prompt; 0 where a prompt is within the budget.

| held-out excess NLL (nats) | before | after |
| --- | --- | --- |
{rows}
"""


def with_eviction(
    folder: Path, about: str, training: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """The card of the adapter in a folder, with a last section on a training on what evicting costs.

    Args:
        folder: The adapter's.
        about: `HEAD_WEIGHTS` or `FINETUNING`; a section with this heading that the card has goes.
        training: How it was trained, by name.
        before: The measurements at the first step, `eval_excess_nll_at_BUDGET` in nats among them.
        after: Those after the last.
    """
    path, heading = folder / "README.md", about.partition("\n")[0]
    card = path.read_text(encoding="utf-8") if path.is_file() else "# keepsight lookahead adapter\n"
    first, *sections = _sections(card)
    kept = [each for each in sections if each.partition("\n")[0].rstrip() != heading]
    budgets = {name: name.rpartition("_")[2] for name in after if name.startswith("eval_excess_nll_at_")}
    rows = [f"| {budget} entries | {before[name]:.3f} | {after[name]:.3f} |" for name, budget in budgets.items()]
    listed = "\n".join(f"- {name}: {value}" for name, value in training.items())
    section = _EVICTION.format(about=about, training=listed, rows="\n".join(rows) or "| not measured | | |")
    return "".join([first, *kept]).rstrip() + "\n\n" + section


def _sections(card: str) -> list[str]:
    """What stands before the first section, and each section; a heading within a fence of code begins none."""
    parts, fenced = [""], False
    for line in card.splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            parts.append("")
        parts[-1] += line
    return parts
