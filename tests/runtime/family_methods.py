"""The methods, with options that suit a short prompt of any family."""

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

LENGTH = 41
BUDGET = 16
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
OTHERS = {
    "evict",  # a composition
    "fastv",  # reads nothing but images
    "own_indexer",  # needs an indexer: `test_indexer.py`
    "qfilters",  # scores by published directions
    "duoattention",  # scores by published patterns
    "restorekv",  # adds entries
    "llmlingua2",  # shortens a prompt with another package or reader
    "r2c",
    "sentence_similarity",
}
"""Methods that the grid leaves out."""
NAMES = [name for name in METHODS if name not in OTHERS]
_SPARSE_READERS = ["exact_topk", "quest", "specontext", "clusterkv", "infllm", "shadowkv"]
_PACKED = ["kivi", "specache", "think"]
_ESTIMATED_ATTENTION = ["expected_attention", "expected_adakv", "triattention"]  # from the rotation by position
_READS_AFTER_PROMPT = ["oracle", "speckv", "dapq", "lookaheadkv", "kvzip", "kvzip+", "kvgrad"]
_REFUSALS = [
    ("Inkling", [*_PACKED, *_SPARSE_READERS, *_ESTIMATED_ATTENTION], "adds a bias by distance"),
    ("Inkling 2", [*_PACKED, *_SPARSE_READERS, *_ESTIMATED_ATTENTION], "adds a bias by distance"),
    ("Gemma 4 E2B, E4B", [*_PACKED, *_SPARSE_READERS], "read the same entries"),
    ("Jamba", _READS_AFTER_PROMPT, "read several tokens at once at the start alone"),
    ("GPT-2", ["locret"], "has no q_proj, k_proj and v_proj"),
    ("DeepSeek-V3", _PACKED, "has layers of latent attention; "),
    ("DeepSeek-V3", ["locret"], "has no q_proj, k_proj and v_proj"),
    ("DeepSeek-V3", ["shadowkv", "infllm"], "positions in cached keys of deepseek_v3 cannot be undone"),
]
REFUSED = {(family, name): message for family, names, message in _REFUSALS for name in names}
"""What is refused, by family and method, and a part of the message that says so."""
WITH_IMAGE = {
    "Qwen2.5-VL (text)": "Qwen2.5-VL with an image",
    "Gemma 3 (multimodal class, text)": "Gemma 3 with an image",
}
"""Families of models that read images, and what they are called where there is one in the prompt."""


_LOOK_BACK = {"look-back"}
_SPARSE = {"sparse read"}
_SHORTER = {"prompt compression"}
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
    attention_kinds = set(layer_kinds(model.config))
    group = config.num_attention_heads // config.num_key_value_heads
    traits = {
        "every layer full": attention_kinds == {"full_attention"},
        "no layer full": "full_attention" not in attention_kinds,
        "latents": has_latents(model),
        "sinks": any(name.endswith("sinks") for name, _ in model.named_parameters()),
        "softcap": getattr(config, "attn_logit_softcapping", None) is not None,
        "bias by distance": has_distance_bias(model.config),
        "M-RoPE": "mrope_section" in str(getattr(config, "rope_parameters", None)),
        "learned positions": getattr(config, "rope_parameters", None) is None,
        "shared entries": len({*entry_owners(model.config)}) < config.num_hidden_layers,
        "Mamba": "mamba" in model.config.model_type or "hybrid" in model.config.model_type,
    }
    kinds = {kind for kind, holds in traits.items() if holds}
    return attention_kinds | kinds | {f"{group} queries a KV head"}


def grid(names: Iterable[str] = NAMES, families: Iterable[str] = FAMILIES) -> list[Any]:
    """Every (family, method) as parameters: a pairwise cover of their kinds, and all others under the mark `grid`."""
    rows = {family: family_kinds(family) for family in families}
    columns = {name: KINDS.get(name, {name}) for name in names}
    always_run = cover(rows, columns)
    parameters = []
    for family, name in itertools.product(rows, columns):
        marks = [] if (family, name) in always_run else [pytest.mark.grid]
        parameters.append(pytest.param(family, name, marks=marks, id=f"{family}-{name}"))
    return parameters


def reads_images(family: str, name: str) -> bool:
    """Whether a method takes prompts with images; SpecPC shortens none whose tokens see one another."""
    return METHODS[name].reads_images and (family, name) != ("Gemma 3 (multimodal class, text)", "specpc")


@cache
def pictured_draft(family: str) -> LoadedDraft:
    """Another model of a family that reads images."""
    return LoadedDraft("tiny", "1", fresh_model(family, seed=7))


@cache
def adapter(family: str, folder: Path) -> Any:
    """An adapter whose heads share the model's budget, by the soft tokens' largest attention times the value norm."""
    settings = replace(SHAPE, queries="max", floor=0.25, sharing="model", value_norm=True)
    module = random_on(family_model(family), settings)
    artifact = folder / family.replace("/", " ")
    return LookaheadAdapter.load(save(module, artifact))


def kv_heads_of(family: str) -> int:
    return int(family_model(family).config.get_text_config().num_key_value_heads)


def method_of(name: str, family: str, folder: Path) -> Any:
    if name == "lookaheadkv":
        return LookaheadKV(BUDGET, **adapter_fields(adapter(family, folder)))
    if name == "specontext":
        head = tiny_retrieval_head("none", kv_heads=kv_heads_of(family), max_position_embeddings=1024)
        return SpeContext(LENGTH + 8, head)
    options = OPTIONS.get(name, {})
    kind = METHODS[name]
    if issubclass(kind, ScoredEvict):
        scorer = tiny_scorer(kind.scorer, family_model(family))
        return kind(BUDGET, TrainedScores(scorer), **options)
    reads_all_entries = kind.selects_each_step and name != "exact_topk"
    budget = LENGTH + 8 if reads_all_entries else BUDGET
    resources = DRAFT
    if family in WITH_IMAGE:
        resources = replace(DRAFT, draft=pictured_draft(family))
    return make_method(name, budget, resources, **options)


def table() -> str:
    """The table of docs/models.md: what is evicted from and what is refused, for each family."""
    rows = []
    for family in [*FAMILIES, *MORE]:
        refused = [name for name in sorted(NAMES) if (family, name) in REFUSED]
        rows.append(_row(family, family, refused))
    for family, label in WITH_IMAGE.items():
        refused = [name for name in sorted(NAMES) if not reads_images(family, name)]
        rows.append(_row(family, label, refused))
    return markdown_table(rows, ["family", "layers", "methods"])


def _row(family: str, label: str, refused: list[str]) -> tuple[str, str, str]:
    model = family_model(family)
    layers = sorted({_LAYER_LABELS[kind] for kind in layer_kinds(model.config)})
    if has_latents(model):
        layers = ["latent"]
    methods = "all"
    if refused:
        methods += f" but {', '.join(f'`{name}`' for name in refused)}"
    return label, ", ".join(layers), methods


_LAYER_LABELS = {
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
    pairs: dict[tuple[str, str], set[tuple[str | None, str | None]]] = {}
    for row, column in itertools.product(rows, columns):
        kind_pairs = itertools.product(rows[row], columns[column])
        pairs[row, column] = {*kind_pairs, (row, None), (None, column)}
    missing = set[tuple[str | None, str | None]]().union(*pairs.values())
    uses = Counter[str]()

    def gain(case: tuple[str, str]) -> tuple[int, int]:
        row, column = case
        return len(pairs[case] & missing), -uses[row] - uses[column]

    selection = set[tuple[str, str]]()
    while missing:
        best = max(pairs, key=gain)
        selection.add(best)
        uses.update(best)
        missing -= pairs[best]
    return [case for case in pairs if case in selection]
