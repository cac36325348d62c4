"""Methods from names and plain values."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from keepsight.errors import Code
from keepsight.models.card import Provenance
from keepsight.models.draft_sources import LayerSubset
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import load_target, outline_target
from keepsight.runtime.allocate import Adaptive, Pyramid, Uniform
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.drafting.speckv import MInference, ModelDrafter, SparsePrefill
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache, Method, generate
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.methods import (
    DRAFTERS,
    H2O,
    LAQ,
    METHODS,
    OBSERVERS,
    AdaKV,
    DapQ,
    Kivi,
    LookaheadKV,
    PyramidKV,
    Resources,
    SnapKV,
    SpeCache,
    SpecKV,
    SpecKVPC,
    SpeContext,
    make_method,
)
from keepsight.runtime.methods.drafts import PromptEnds
from keepsight.runtime.methods.laq import QueryCache
from keepsight.runtime.methods.lookaheadkv import SoftTokens
from keepsight.runtime.methods.restore import RestoreKV
from keepsight.runtime.methods.scored import ScoredEvict
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.state import Needs
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.models.scorers import save_restore, tiny_tensors
from tests.refused import refused
from tests.tiny import prompt_ids, save_tiny_target, tiny_model, tiny_tokenizer

DRAFT = LayerSubset((0, 2))
TOKENIZER = tiny_tokenizer()
RESOURCES = Resources(draft=DRAFT, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of max over soft tokens and heads, mean pooling over 3 and heads that share their layer's budget."""
    folder = tmp_path_factory.mktemp("adapter")
    settings = LookaheadSettings(tokens=4, rank=2, queries="max", group="max", pooling="avg", kernel=3, floor=0.4)
    Lookahead(tiny_model(), settings).adapter().save(folder, Provenance("tiny"), "# Card\n")
    return folder


def test_packed_and_full_caches_need_no_budget() -> None:
    assert make_method("kivi", None, bits=4) == make_method("kivi", 64, bits=4) == Kivi(4)
    assert make_method("full", None) == make_method("full", 64) == FullCache()
    assert make_method("specache", None, topk=16) == SpeCache(topk=16)
    packed = make_method("kivi", None, inner={"name": "snapkv", "budget": 40, "pool": "none"})
    assert packed == Kivi(inner=SnapKV(40, pool=NO_POOL))


COMPOSED: dict[str, tuple[str, dict[str, Any], Method]] = {
    "an option": ("snapkv", {"window": 16, "sinks": 2, "every": 4}, SnapKV(64, window=16, sinks=2, every=4)),
    "a part by its name": ("snapkv", {"allocate": "adakv"}, SnapKV(64, allocate=Adaptive())),
    "options alone": ("adakv", {"allocate": {"floor": 0.5}}, AdaKV(64, allocate=Adaptive(0.5))),
    "pool's options": ("snapkv", {"pool": {"kernel": 5}}, SnapKV(64, pool=Pool("max", 5))),
    "reduce by one word": ("snapkv", {"reduce": "max"}, SnapKV(64, reduce=Reduce("max", "max"))),
    "parts of parts": (
        "dapq",
        {"observer": {"drafter": {"first": 2}, "window": 3}},
        DapQ(64, DraftObserver(PromptEnds(2), 3)),
    ),
    "options three deep": (
        "laq",
        {"observer": {"lookahead": 3, "first_pool": {"kernel": 5}, "budget": 48}},
        LAQ(64, QueryCache(lookahead=3, first_pool=Pool("max", 5), budget=48)),
    ),
    "speckv's draft": (
        "speckv",
        {"observer": {"drafter": {"lookahead": 4}}, "sparse": {"name": "vertical_slash", "vertical": 96}},
        SpecKV(64, DraftObserver(ModelDrafter(DRAFT, 4), None), sparse=SparsePrefill(96)),
    ),
    "a prefill by its name": (
        "speckv",
        {"sparse": "minference"},
        SpecKV(64, DraftObserver(ModelDrafter(DRAFT), None), sparse=MInference()),
    ),
    "all free": (
        "evict",
        {
            "observer": {"name": "draft_tokens", "drafter": "draft_model", "window": 4},
            "reduce": "max",
            "pool": "none",
            "allocate": {"name": "adakv", "floor": 0.5, "blend": False},
            "window": 4,
        },
        Evict(
            64,
            DraftObserver(ModelDrafter(DRAFT), 4),
            Reduce("max", "max"),
            NO_POOL,
            Adaptive(0.5, blend=False),
            window=4,
        ),
    ),
    "the cascade": ("speckvpc", {"allocate": "adakv"}, SpecKVPC(64, draft=DRAFT, allocate=Adaptive())),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_options_and_parts(case: str) -> None:
    name, options, expected = COMPOSED[case]
    before = repr(options)
    method = make_method(name, 64, RESOURCES, **options)
    assert type(method) is type(expected)
    assert method == expected
    assert hash(method) == hash(expected)  # sweeps look parts up
    assert repr(options) == before


def test_every_observer_and_drafter_can_be_composed() -> None:
    ids, _ = prompt_ids(90)
    model = tiny_model(vocab_size=512)
    observer_options: dict[str, dict[str, Any]] = {
        "draft_tokens": {"drafter": "prompt_ends"},
        "query_cache": {"budget": 40},
        "prompt_window": {"window": 4},
        "ladder": {"span": 2},
    }
    drafter_options: dict[str, dict[str, Any]] = {"constant_text": {"ids": [5, 6]}}
    observers: list[dict[str, Any]] = []
    for name in OBSERVERS:
        if name != "soft_tokens":
            observers.append({"name": name, **observer_options.get(name, {})})
    for name in DRAFTERS:
        drafter = {"name": name, **drafter_options.get(name, {})}
        observers.append({"name": "draft_tokens", "drafter": drafter})
    answers = set()
    for observer in observers:
        method = make_method("evict", 40, RESOURCES, observer=observer, pool="none", allocate="adakv", window=2)
        assert isinstance(method, Evict)
        state = method.start(model, ids)
        assert int(state.counts().sum()) == 40 * 3 * 2, observer
        answers.add(tuple(generate(model, ids, method, max_new_tokens=6, do_sample=False)[0].tolist()))
    assert len(answers) > 5


def test_an_adapter_says_how_it_was_trained(adapter: Path) -> None:
    resources = Resources(str(adapter))
    method = make_method("lookaheadkv", 64, resources)
    assert isinstance(method, LookaheadKV)
    assert method.reduce == Reduce("max", "max")
    assert method.pool == Pool("avg", 3)
    assert method.allocate == Adaptive(0.4, blend=False)
    assert isinstance(method.observer, SoftTokens)
    assert method.observer.artifact is resources.artifact

    uniform = make_method("lookaheadkv", 64, resources, allocate="uniform")
    assert uniform == dataclasses.replace(method, allocate=Uniform())
    pooled = make_method("lookaheadkv", 64, resources, pool={"kernel": 5}, allocate="pyramidkv")
    parts: dict[str, Any] = {"observer": method.observer, "reduce": Reduce("max", "max")}
    assert pooled == LookaheadKV(64, pool=Pool("avg", 5), allocate=Pyramid(), **parts)

    composed = make_method("evict", 64, resources, observer="soft_tokens")
    assert isinstance(composed, Evict)
    assert composed.observer == method.observer
    assert composed.pool == Pool()


def test_a_retrieval_head_is_loaded_once_and_checked(tmp_path: Path) -> None:
    """With the target at hand, the layers of its features are named, which a prefill must record."""
    head = tiny_retrieval_head()
    head.config = dataclasses.replace(head.config, feature_layers=None)
    head.save(tmp_path, Provenance("tiny"), "# Card\n")
    target = tiny_model(num_hidden_layers=8)
    resources = Resources(retrieval=tmp_path, target=target)
    method = make_method("specontext", 64, resources, sinks=2, window=8)
    assert isinstance(method, SpeContext)
    assert method == SpeContext(64, resources.head, 2, 8)
    assert make_method("specontext", 0.5, resources).needs() == Needs(features=(1, 3, 4))
    with refused("retrieval", "missing"):
        SpeContext.from_pretrained(tmp_path, 64).needs()
    with refused("retrieval", "model"):
        make_method("specontext", 64, Resources(retrieval=tmp_path, target=tiny_model(num_key_value_heads=4)))
    with refused("head", "unknown"):
        make_method("specontext", 64, resources, head="elsewhere")


def test_resources_are_looked_for_only_where_they_are_needed() -> None:
    missing_adapter = Resources("./nowhere")
    assert make_method("snapkv", 64, missing_adapter) == make_method("snapkv", 64) == SnapKV(64)
    assert make_method("h2o", 0.5) == H2O(0.5)
    assert make_method("pyramidkv", 64, None, observer=PromptWindow(4)) == PyramidKV(64, PromptWindow(4))
    needs = {"lookaheadkv": "adapter", "speckvpc": "draft", "llmlingua2": "tokenizer", "specontext": "retrieval"}
    for name, resource in needs.items():
        with refused(resource, "missing") as error:
            make_method(name, 128)
        assert str(error.value).startswith(f"method {name!r}: ")
    with refused("draft", "missing"):
        make_method("evict", 64, observer={"name": "draft_tokens", "drafter": "draft_model"})
    with refused("artifact", "unknown"):
        make_method("lookaheadkv", 64, missing_adapter)


WRONG: list[tuple[str, Any, dict[str, Any], str, Code]] = [
    ("snapkvv", 64, {}, "method", "unknown"),
    ("snapkv", None, {}, "budget", "missing"),
    ("snapkv", 0, {}, "budget", "range"),
    ("snapkv", True, {}, "budget", "type"),
    ("snapkv", 1.5, {}, "budget", "range"),
    ("snapkv", 64, {"windows": 8}, "windows", "unknown"),
    ("specpc", 64, {"draft": "x"}, "draft", "unknown"),
    ("snapkv", 64, {"window": 64}, "budget", "range"),
    ("snapkv", 64, {"window": 0}, "window", "range"),
    ("snapkv", 64, {"every": 32}, "budget", "range"),
    ("snapkv", 0.5, {"every": 4}, "every", "conflict"),
    ("snapkv", 64, {"value_norm": 3}, "value_norm", "type"),
    ("snapkv", 64, {"pool": {"kernel": 4}}, "kernel", "range"),
    ("snapkv", 64, {"pool": "min"}, "kind", "unknown"),
    ("snapkv", 64, {"allocate": "ada"}, "allocate", "unknown"),
    ("snapkv", 64, {"allocate": {"name": ["adakv"]}}, "allocate", "unknown"),
    ("snapkv", 64, {"allocate": {"name": "adakv", 1: 2, "b": 3}}, "1", "unknown"),
    ("snapkv", 64, {"allocate": {"floor": 1}}, "floor", "unknown"),
    ("adakv", 4, {"window": 0, "observer": {"window": 4}}, "budget", "range"),
    ("evict", 64, {}, "observer", "missing"),
    ("evict", 64, {"observer": "draft_tokens"}, "drafter", "missing"),
    ("dapq", 64, {"observer": {"drafter": {"first": "a"}}}, "first", "type"),
    ("laq", 16, {}, "budget", "range"),
    ("laq", 64, {"observer": {"budget": "x"}}, "budget", "type"),
    ("speckv", 64, {"sparse": {"vertical": 9}}, "sparse", "missing"),
    ("specpc", 32, {}, "budget", "range"),
]


@pytest.mark.parametrize(("name", "budget", "options", "field", "code"), WRONG)
def test_bad_values_are_refused(name: str, budget: Any, options: dict[str, Any], field: str, code: Code) -> None:
    with refused(field, code) as error:
        make_method(name, budget, RESOURCES, **options)
    assert name.split("+")[0] in str(error.value).lower()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny base model."""
    return save_tiny_target(tmp_path_factory.mktemp("base"))


def save_adapter(model: Any, folder: Path, tokens: int = 4) -> None:
    adapter = Lookahead(model, LookaheadSettings(tokens=tokens, rank=2)).adapter()
    adapter.save(folder, Provenance("tiny"), "# Card\n")


def save_head(model: Any, folder: Path) -> None:
    head = RetrievalHead.untrained(model, "none", 64)
    head.save(folder, Provenance("tiny"), "# Card\n")


BUILT_ELSEWHERE = ("own_indexer", "qfilters", "duoattention")
"""Built in `test_indexer.py`, for another model, and in `test_kvpress_methods.py` and `test_duoattention.py`, from
published directions and patterns."""


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BUILT_ELSEWHERE])
def test_a_method_is_built_once_before_the_base_model_has_weights(name: str, base: Path, tmp_path: Path) -> None:
    """Built with the model on the meta device, it answers with the loaded one."""
    outline = outline_target(str(base), dtype="float32")
    save_adapter(tiny_model(), tmp_path)
    save_head(load_target(str(base), device="cpu").model, tmp_path)
    resources = Resources(tmp_path, DRAFT, outline.tokenizer, tmp_path, outline.model)
    options_of_methods: dict[str, dict[str, Any]] = {
        "evict": {"observer": {"name": "draft_tokens", "drafter": "draft_model"}},
        "r2c": {"relevance": {"name": "fusion", "model": "t5"}},
        "kivi": {"group": 8, "residual": 8},
        "specache": {"group": 8, "residual": 8},
    }
    options = options_of_methods.get(name, {})
    kind = METHODS[name]
    if issubclass(kind, ScoredEvict):
        save_file(tiny_tensors(kind.scorer, tiny_model()), tmp_path / "scorer.safetensors")
        options["scorer"] = tmp_path / "scorer.safetensors"
    if kind is RestoreKV:
        options["scorer"] = save_restore(tmp_path / "restore", tiny_model())
    method = make_method(name, 96, resources, **options)
    assert type(method) is kind
    if name in ("lookaheadkv", "specontext", "speckv", "kivi", "snapkv"):
        ids, _ = prompt_ids(120)
        answer = generate(load_target(str(base), device="cpu").model, ids, method, max_new_tokens=2, do_sample=False)
        assert answer.shape == (1, 2)


UNFIT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, Code]] = {
    "a draft's layer": ("speckv", {}, {"draft": lambda: LayerSubset((0, 9)).of(tiny_model())}, "draft.layers", "range"),
    "a head's sizes": ("specontext", {}, {"retrieval": "head"}, "retrieval", "model"),
    "an adapter's size": ("lookaheadkv", {}, {"adapter": "adapter"}, "adapter", "model"),
    "a group of numbers": ("kivi", {"group": 64}, {}, "group", "range"),
    "a layer for images": ("fastv", {"layer": 30}, {}, "layer", "range"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_does_not_fit_is_refused_before_it_has_weights(case: str, base: Path, tmp_path: Path) -> None:
    name, options, unfit, field, code = UNFIT[case]
    other_model = tiny_model(hidden_size=64, vocab_size=128)
    save_adapter(other_model, tmp_path / "adapter")
    save_head(other_model, tmp_path / "head")
    outline = outline_target(str(base), dtype="float32")
    resources = Resources(tokenizer=outline.tokenizer, target=outline.model)
    for resource, value in unfit.items():
        changes: dict[str, Any] = {resource: tmp_path / value if isinstance(value, str) else value}
        resources = dataclasses.replace(resources, **changes)
    with refused(field, code):
        make_method(name, 96, resources, **options)


def test_what_is_missing_is_named_early(tmp_path: Path) -> None:
    with refused("draft", "missing"):
        make_method("speckv", 64, Resources())
    with refused("retrieval_head.safetensors", "missing"):
        make_method("specontext", 64, Resources(retrieval=tmp_path))


def test_methods_may_name_adapters_and_heads_of_their_own(tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=8)
    default_folder = tmp_path / "default"
    named_folder = tmp_path / "named"
    for seed, folder in enumerate((default_folder, named_folder)):
        torch.manual_seed(seed)
        save_adapter(tiny_model(), folder, tokens=4 + seed)
        tiny_retrieval_head().save(folder, Provenance("tiny"), "# Card\n")
    resources = Resources(default_folder, retrieval=default_folder, target=target)
    named = str(named_folder)
    make: Any = make_method

    default = make("lookaheadkv", 64, resources)
    of_name = make("lookaheadkv", 64, resources, adapter=named)
    of_name_again = make("lookaheadkv", 32, resources, adapter=named)
    assert default.observer.positions() == 4
    assert of_name.observer.positions() == 5
    assert of_name.observer.artifact is of_name_again.observer.artifact

    default_head = make("specontext", 64, resources).head
    named_head = make("specontext", 64, resources, retrieval=named).head
    named_head_again = make("specontext", 64, resources, retrieval=named).head
    assert default_head is resources.head
    assert named_head is named_head_again is not default_head

    composed = make_method("evict", 64, Resources(), observer="soft_tokens", adapter=named)
    assert composed.adapter_digest == of_name.adapter_digest != default.adapter_digest
    for name, key in (("snapkv", "adapter"), ("lookaheadkv", "retrieval"), ("quest", "retrieval")):
        with refused(key, "unknown"):
            make_method(name, 64, resources, **{key: named})
    with refused("artifact", "unknown"):
        make_method("lookaheadkv", 64, resources, adapter="./nowhere")
