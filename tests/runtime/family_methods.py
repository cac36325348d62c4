"""The methods, made so that they work on a short prompt of any family."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keepsight.models.decoder import entry_owners, has_latents, layer_kinds
from keepsight.models.draft_sources import LoadedDraft
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.runtime.distance_bias import has_distance_bias
from keepsight.runtime.methods import METHODS, Resources, make_method
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, adapter_fields
from keepsight.runtime.methods.scored import ScoredEvict, TrainedScores
from keepsight.runtime.retrieval.specontext import SpeContext
from keepsight.tables import markdown_table
from tests.families import FAMILIES, MORE, family_model, fresh_model
from tests.models.modules import SHAPE, random_on, save
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.models.scorers import tiny_scorer
from tests.tiny import SmallVocabulary, prompt_ids, tiny_model

LENGTH, BUDGET = 41, 16
PROMPT = prompt_ids(LENGTH)[0]
_TOKENIZER: Any = SmallVocabulary()
DRAFT = Resources(draft=LoadedDraft("tiny", "1", tiny_model()), tokenizer=_TOKENIZER)
OPTIONS: dict[str, dict[str, Any]] = {
    "laq": {"observer": {"lookahead": 4, "first_window": 4}},
    "laq++": {"observer": {"lookahead": 4, "first_window": 4, "window": 4}},
    "oracle": {"observer": {"drafter": {"max_new_tokens": 5}}},
    "speckv": {"window": 8, "observer": {"drafter": {"lookahead": 5}}},
    "snapkv": {"window": 8},
    "pyramidkv": {"window": 8},
    "adakv": {"window": 8},
    "criticalkv": {"window": 8},
    "critical_adakv": {"window": 8},
    "kvzip": {"observer": {"chunk": 24}},
    "kvzip+": {"observer": {"chunk": 24}},
    "kvgrad": {"observer": {"chunk": 24}},
    "h2o": {"window": 4},
    "kvzap": {"window": 8},
    "fastkvzip": {"window": 8},
    "locret": {"window": 8},
    "dms": {"window": 8},
    "dropkv": {"window": 8},
    "finch": {"window": 8, "chunk": 12, "rerotate": False},
    "compactor": {"observer": {"block": 10}},
    "chunkkv": {"window": 8, "chunk": 4},
    "eg_chunkkv": {"window": 8, "chunk": 4, "cut": 2},
    "specpc": {"window": 8, "kernel": 4},
    "speckvpc": {"window": 8, "prompt_window": 8, "kernel": 4, "lookahead": 5, "prompt_budget": BUDGET},
    "shadowkv": {"chunk": 4, "local": 2},
    "infllm": {"block": 1, "window": LENGTH + 6},
    "kivi": {"bits": 2, "group": 8, "residual": 8},
    "think": {"window": 8},
    "specache": {"bits": 1, "group": 8, "residual": 8, "topk": LENGTH, "speculative": False},
}
"""What fits the short prompt, and leaves keys at their positions (those that move: `test_rerotate.py`)."""
OTHERS = {"evict", "fastv", "own_indexer", "qfilters", "duoattention", "restorekv"}
OTHERS |= {"llmlingua2", "r2c", "sentence_similarity"}
"""Compositions; what reads nothing but images; what needs an indexer (`test_indexer.py`); what is scored by published
directions or patterns; what adds entries; what shortens a prompt with another package or reader."""
NAMES = [name for name in METHODS if name not in OTHERS]
_READING = ("exact_topk", "quest", "specontext", "clusterkv", "infllm", "shadowkv")
_OWN_FORM = ("kivi", "specache", "think", *_READING)
REFUSED = (
    dict.fromkeys(
        [("DeepSeek-V3", "kivi"), ("DeepSeek-V3", "specache"), ("DeepSeek-V3", "think")],
        "has layers of latent attention; ",
    )
    | {
        (family, name): "adds a bias by distance"
        for family in ("Inkling", "Inkling 2")
        for name in (*_OWN_FORM, "expected_attention", "expected_adakv", "triattention")
    }
    | {("Gemma 4 E2B, E4B", name): "read the same entries" for name in _OWN_FORM}
    | {
        ("Jamba", name): "read several tokens at once at the start alone"
        for name in ("oracle", "speckv", "dapq", "lookaheadkv", "kvzip", "kvzip+", "kvgrad")
    }
    | {
        ("GPT-2", "locret"): "has no q_proj, k_proj and v_proj",
        ("DeepSeek-V3", "locret"): "has no q_proj, k_proj and v_proj",
        ("DeepSeek-V3", "shadowkv"): "positions in cached keys of deepseek_v3 cannot be undone",
        ("DeepSeek-V3", "infllm"): "positions in cached keys of deepseek_v3 cannot be undone",
    }
)
"""What is refused, by family and method, and the words of the line that says so."""
WITH_IMAGE = {
    "Qwen2.5-VL (text)": "Qwen2.5-VL with an image",
    "Gemma 3 (multimodal class, text)": "Gemma 3 with an image",
}
"""Families of models that read images, and what they are called where there is one in the prompt."""


_LOOK_BACK, _SPARSE, _SHORTER = {"look-back"}, {"sparse read"}, {"prompt compression"}
KINDS: dict[str, set[str]] = {
    "full": {"all entries"},
    "oracle": _LOOK_BACK,
    "lookaheadkv": _LOOK_BACK,
    "laq": {"draft"},
    "laq++": {"draft"},
    "speckv": {"draft"},
    "dapq": _LOOK_BACK,
    "snapkv": {"window"},
    "pyramidkv": {"window"},
    "adakv": {"window"},
    "h2o": {"accumulated"},
    "tova": {"window"},
    "streamingllm": {"positions"},
    "lacache": {"positions"},
    "key_norm": {"positions"},
    "keydiff": {"geometry"},
    "curdkv": {"geometry"},
    "criticalkv": {"window", "output"},
    "critical_adakv": {"window", "output"},
    "rkv": {"window"},
    "kvzip": {"replay"},
    "kvzip+": {"replay", "output"},
    "kvgrad": {"replay", "output", "gradient"},
    "kvzap": {"trained scorer"},
    "fastkvzip": {"trained scorer"},
    "trimkv": {"trained scorer"},
    "dbtrimkv": {"trained scorer"},
    "locret": {"trained scorer", "projections"},
    "dms": {"trained scorer"},
    "dropkv": {"window", "output"},
    "chunkkv": {"window"},
    "eg_chunkkv": {"window"},
    "simlayerkv": {"window", "layers differ"},
    "finch": {"window"},
    "compactor": {"rotation", "own turns"},
    "expected_attention": {"rotation"},
    "expected_adakv": {"rotation"},
    "triattention": {"rotation"},
    "random": {"positions"},
    "specpc": _SHORTER,
    "speckvpc": _SHORTER,
    "truncation": _SHORTER,
    "kivi": {"packed"},
    "think": {"packed"},
    "specache": {"packed"},
    "specontext": _SPARSE,
    "quest": _SPARSE,
    "clusterkv": _SPARSE,
    "shadowkv": {"sparse read", "keys without positions"},
    "infllm": {"sparse read", "keys without positions", "own prefill"},
    "exact_topk": _SPARSE,
}
"""What a method does with the cache, or scores entries by; methods of one kind share code that a family can break.

A method without a line is of a kind of its own: it meets every kind of family.
"""


def family_kinds(family: str) -> set[str]:
    """What keepsight's code depends on in a family's attention."""
    model = family_model(family)
    config = model.config.get_text_config()
    kinds = {
        *layer_kinds(model.config),
        f"{config.num_attention_heads // config.num_key_value_heads} queries a KV head",
    }
    found = {
        "every layer full": {*layer_kinds(model.config)} == {"full_attention"},
        "no layer full": "full_attention" not in kinds,
        "latents": has_latents(model),
        "sinks": any(name.endswith("sinks") for name, _ in model.named_parameters()),
        "softcap": getattr(config, "attn_logit_softcapping", None) is not None,
        "bias by distance": has_distance_bias(model.config),
        "M-RoPE": "mrope_section" in str(getattr(config, "rope_parameters", None)),
        "learned positions": getattr(config, "rope_parameters", None) is None,
        "shared entries": len({*entry_owners(model.config)}) < config.num_hidden_layers,
        "Mamba": "mamba" in model.config.model_type or "hybrid" in model.config.model_type,
    }
    return kinds | {kind for kind, holds in found.items() if holds}


def grid(names: Iterable[str] = NAMES, families: Iterable[str] = FAMILIES) -> list[Any]:
    """Every (family, method) as parameters: a pairwise cover of their kinds, and all others under the mark `grid`."""
    rows = {family: family_kinds(family) for family in families}
    columns = {name: KINDS.get(name, {name}) for name in names}
    fast = cover(rows, columns)
    return [
        pytest.param(family, name, marks=() if (family, name) in fast else pytest.mark.grid, id=f"{family}-{name}")
        for family in rows
        for name in columns
    ]


def reads_images(family: str, name: str) -> bool:
    """Whether a method takes prompts with images; SpecPC shortens none whose tokens see one another."""
    return METHODS[name].reads_images and (family, name) != ("Gemma 3 (multimodal class, text)", "specpc")


@cache
def pictured_draft(family: str) -> LoadedDraft:
    """Another model of a family that reads images."""
    return LoadedDraft("tiny", "1", fresh_model(family, seed=7))


@cache
def adapter(family: str, folder: Path) -> Any:
    """Of heads that share the whole model's budget, by the soft tokens' largest attention times the norm of values."""
    module = random_on(
        family_model(family), replace(SHAPE, queries="max", floor=0.25, sharing="model", value_norm=True)
    )
    return LookaheadAdapter.load(save(module, folder / family.replace("/", " ")))


def kv_heads_of(family: str) -> int:
    return int(family_model(family).config.get_text_config().num_key_value_heads)


def method_of(name: str, family: str, folder: Path) -> Any:
    if name == "lookaheadkv":
        return LookaheadKV(BUDGET, **adapter_fields(adapter(family, folder)))
    if name == "specontext":
        head = tiny_retrieval_head("none", kv_heads=kv_heads_of(family), max_position_embeddings=1024)
        return SpeContext(LENGTH + 8, head)
    if issubclass(kind := METHODS[name], ScoredEvict):
        return kind(BUDGET, TrainedScores(tiny_scorer(kind.scorer, family_model(family))), **OPTIONS.get(name, {}))
    covers = METHODS[name].selects_each_step and name != "exact_topk"
    budget = LENGTH + 8 if covers else BUDGET
    resources = replace(DRAFT, draft=pictured_draft(family)) if family in WITH_IMAGE else DRAFT
    return make_method(name, budget, resources, **OPTIONS.get(name, {}))


def table() -> str:
    """The table of docs/models.md: what is evicted from and what is refused, for each family."""
    rows = []
    for family in [*FAMILIES, *MORE]:
        rows.append(_row(family, family, [name for name in sorted(NAMES) if (family, name) in REFUSED]))
    for family, label in WITH_IMAGE.items():
        rows.append(_row(family, label, [name for name in sorted(NAMES) if not reads_images(family, name)]))
    return markdown_table(rows, ["family", "layers", "methods"])


def _row(family: str, label: str, refused: list[str]) -> tuple[str, str, str]:
    kinds = sorted({_KINDS[kind] for kind in layer_kinds(family_model(family).config)})
    kinds = ["latent" if has_latents(family_model(family)) else kind for kind in kinds]
    methods = "all"
    if refused:
        methods += f" but {', '.join(f'`{name}`' for name in refused)}"
    return label, ", ".join(kinds), methods


_KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "hybrid": "full with a recurrent state",
    "hybrid_sliding": "sliding with a recurrent state",
    "moe": "none",
}


Kinds = Mapping[str, Set[str]]
"""The names of rows or columns, and what each of them is."""


def cover(rows: Kinds, columns: Kinds) -> list[tuple[str, str]]:
    """Choose cases greedily, the same ones every time.

    Each kind of row meets each kind of column, and each row and each column occurs. Of the cases that add as many such
    pairs, the one whose row and column were chosen least often comes first.

    Returns:
        Names of rows and columns, in the order of the grid.
    """
    pairs = {
        (row, column): {*itertools.product(rows[row], columns[column]), (row, None), (None, column)}
        for row in rows
        for column in columns
    }
    missing = set[tuple[str | None, str | None]]().union(*pairs.values())
    chosen, used = set[tuple[str, str]](), Counter[str]()
    while missing:
        best = max(pairs, key=lambda case: (len(pairs[case] & missing), -used[case[0]] - used[case[1]]))
        chosen.add(best)
        used.update(best)
        missing -= pairs[best]
    return [case for case in pairs if case in chosen]
