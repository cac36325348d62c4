"""The model card of a retrieval head."""

from collections.abc import Mapping

from keepsight.models.card import CardBasics, example, write_card
from keepsight.models.retrieval_config import NONE, PREVIOUS_STEP, RetrievalConfig

_ABOUT = """A retrieval head ([SpeContext](https://arxiv.org/abs/2512.00722)) for `{base_model}`: the query
and key projections of a draft head, which say before every decoding step which entries of the KV cache the step will
read{groups}. It reads {reads}. {parameters:,} parameters; the embedding is the base model's and not stored here.
Trained with up to {trained:,} tokens; YaRN takes it further."""

_READS = {
    PREVIOUS_STEP: "the coming token's embedding, and what three of the base model's layers gave for the one before",
    NONE: "token embeddings alone",
}

_LEGEND = """
KL divergence of the head's attention from the target's importance, in nats: {kl}.

Only steps with more entries than the budget count. Hit rate: share of the target's top entries of a step and KV head
(by attention averaged over the layers that share a selection) that the head selects too. Mass: share of the target's
attention that the selection gets. Without a head: the first 4 and the latest entries. At best: the target's own top
entries. Overlap: share of a step's selection that the next step selects again.
"""


def retrieval_card(basics: CardBasics, config: RetrievalConfig, parameters: int, measured: str) -> str:
    """The card as Markdown.

    Args:
        basics: Title, provenance, data and licence.
        config: The head's shape.
        parameters: Number of its parameters.
        measured: What `comparison` returned.
    """
    use = example(basics.base_model, "SpeContext", 1024)
    return write_card(
        basics,
        tags="specontext, kv-cache, retrieval-head",
        about=_ABOUT.format(
            base_model=basics.base_model,
            groups=f", for each of {config.groups} groups of neighbouring layers" if config.groups > 1 else "",
            reads=_READS[config.features],
            parameters=parameters,
            trained=config.trained,
        ),
        use=f"{use}\n\nWith keepsight's commands: `retrieval=FOLDER_OR_HUB_ID methods=[full,specontext]`.",
        heading="Measured on held-out training samples",
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
