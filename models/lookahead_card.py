"""The model card of a lookahead adapter."""

from collections.abc import Mapping

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
