"""Methods from names and plain values."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import UserError
from keepsight.models.card import Provenance
from keepsight.models.draft_sources import LayerSubset
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.allocate import Adaptive, Pyramid, Uniform
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.drafting.speckv import ModelDrafter, SparsePrefill
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
    Oracle,
    PyramidKV,
    Resources,
    SnapKV,
    SpeCache,
    SpecKV,
    SpecKVPC,
    SpeContext,
    SpecPC,
    make_method,
)
from keepsight.runtime.methods.drafts import ConstantText, OwnAnswer, PromptEnds, RandomTokens
from keepsight.runtime.methods.laq import QueryCache
from keepsight.runtime.methods.lookaheadkv import SoftTokens
from keepsight.runtime.methods.make import takes
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.state import Needs
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

DRAFT = LayerSubset((0, 2))
TOKENIZER = tiny_tokenizer()
AT_HAND = Resources(draft=DRAFT, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of max over soft tokens and heads, mean pooling over 3 and heads that share their layer's budget."""
    folder = tmp_path_factory.mktemp("adapter")
    settings = LookaheadSettings(tokens=4, rank=2, queries="max", group="max", pooling="avg", kernel=3, floor=0.4)
    Lookahead(tiny_model(), settings).adapter().save(folder, Provenance("tiny"), "# Card\n")
    return folder


@pytest.mark.parametrize(
    "name", [name for name in METHODS if takes(name, "budget") and name not in ("evict", "lookaheadkv", "specontext")]
)
def test_a_name_is_the_method_as_it_comes(name: str) -> None:
    made = make_method(name, 128, AT_HAND)
    kind = METHODS[name]
    assert type(made) is kind and getattr(made, "budget") == 128  # noqa: B009
    given = {"draft": DRAFT, "tokenizer": TOKENIZER}
    fields = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    parts: dict[str, Any] = {key: value for key, value in given.items() if key in fields}
    expected = SpecKV.with_draft(DRAFT, 128) if kind is SpecKV else kind(128, **parts)  # type: ignore[call-arg]
    assert made == expected


def test_packed_caches_need_no_budget() -> None:
    assert make_method("kivi", None, bits=4) == make_method("kivi", 64, bits=4) == Kivi(4)
    assert make_method("specache", None, topk=16) == SpeCache(topk=16)
    packed = make_method("kivi", None, inner={"name": "snapkv", "budget": 40, "pool": "none"})
    assert packed == Kivi(inner=SnapKV(40, pool=NO_POOL))


def test_full_needs_no_budget() -> None:
    assert make_method("full", None) == make_method("full", 64) == FullCache()


COMPOSED: dict[str, tuple[str, dict[str, Any], Method]] = {
    "an option": ("snapkv", {"window": 16, "sinks": 2, "every": 4}, SnapKV(64, window=16, sinks=2, every=4)),
    "a part by its name": ("snapkv", {"allocate": "adakv"}, SnapKV(64, allocate=Adaptive())),
    "a part with options": (
        "snapkv",
        {"allocate": {"name": "pyramidkv", "beta": 5}},
        SnapKV(64, allocate=Pyramid(5)),
    ),
    "options alone": ("adakv", {"allocate": {"floor": 0.5}}, AdaKV(64, allocate=Adaptive(0.5))),
    "another part": ("adakv", {"allocate": "uniform"}, AdaKV(64, allocate=Uniform())),
    "pool by kind": ("snapkv", {"pool": "avg"}, SnapKV(64, pool=Pool("avg"))),
    "no pool": ("snapkv", {"pool": "none"}, SnapKV(64, pool=NO_POOL)),
    "pool's options": ("snapkv", {"pool": {"kernel": 5}}, SnapKV(64, pool=Pool("max", 5))),
    "reduce by one word": ("snapkv", {"reduce": "max"}, SnapKV(64, reduce=Reduce("max", "max"))),
    "reduce's options": ("snapkv", {"reduce": {"heads": "max"}}, SnapKV(64, reduce=Reduce("mean", "max"))),
    "observer's options": ("snapkv", {"observer": {"size": 8}}, SnapKV(64, PromptWindow(8))),
    "parts of parts": (
        "dapq",
        {"observer": {"drafter": {"first": 2}, "window": 3}},
        DapQ(64, DraftObserver(PromptEnds(2), 3)),
    ),
    "another part of a part": (
        "dapq",
        {"observer": {"drafter": {"name": "random_tokens", "count": 5}}},
        DapQ(64, DraftObserver(RandomTokens(5))),
    ),
    "a list": (
        "dapq",
        {"observer": {"drafter": {"name": "constant_text", "ids": [1, 2]}}},
        DapQ(64, DraftObserver(ConstantText([1, 2]))),
    ),
    "laq's guess": (
        "laq",
        {"observer": {"lookahead": 3, "first_pool": {"kernel": 5}, "budget": 48}},
        LAQ(64, QueryCache(lookahead=3, first_pool=Pool("max", 5), budget=48)),
    ),
    "the oracle's answer": (
        "oracle",
        {"observer": {"drafter": {"max_new_tokens": 9}}},
        Oracle(64, DraftObserver(OwnAnswer(9))),
    ),
    "speckv's draft": (
        "speckv",
        {"observer": {"drafter": {"lookahead": 4}}, "sparse": {"name": "vertical_slash", "vertical": 96}},
        SpecKV(64, DraftObserver(ModelDrafter(DRAFT, 4), None), sparse=SparsePrefill(96)),
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
    "values as they are": (
        "snapkv",
        {"pool": Pool("avg", 3), "allocate": Pyramid()},
        SnapKV(64, pool=Pool("avg", 3), allocate=Pyramid()),
    ),
    "prompts": ("specpc", {"window": 8, "neighbors": 0}, SpecPC(64, 8, draft=DRAFT, neighbors=0)),
    "the cascade": ("speckvpc", {"allocate": "adakv"}, SpecKVPC(64, draft=DRAFT, allocate=Adaptive())),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_options_and_parts(case: str) -> None:
    name, options, expected = COMPOSED[case]
    before = repr(options)
    made = make_method(name, 64, AT_HAND, **options)
    assert type(made) is type(expected) and made == expected
    assert hash(made) == hash(expected)  # sweeps look parts up
    assert repr(options) == before


def test_every_observer_and_drafter_can_be_composed() -> None:
    ids, _ = prompt_ids(90)
    model = tiny_model(vocab_size=512)
    given: dict[str, dict[str, Any]] = {
        "draft_tokens": {"drafter": "prompt_ends"},
        "query_cache": {"budget": 40},
        "prompt_window": {"size": 4},
        "ladder": {"span": 2},
    }
    drafters: dict[str, dict[str, Any]] = {"constant_text": {"ids": [5, 6]}}
    composed = [{"name": name, **given.get(name, {})} for name in OBSERVERS if name != "soft_tokens"]
    composed += [{"name": "draft_tokens", "drafter": {"name": name, **drafters.get(name, {})}} for name in DRAFTERS]
    answers = set()
    for observer in composed:
        for allocate in ("uniform", "pyramidkv", "adakv"):
            method = make_method("evict", 40, AT_HAND, observer=observer, pool="none", allocate=allocate, window=2)
            assert isinstance(method, Evict)
            state = method.start(model, ids)
            assert int(state.counts().sum()) == 40 * 3 * 2, observer
            answers.add(tuple(generate(model, ids, method, max_new_tokens=6, do_sample=False)[0].tolist()))
    assert len(answers) > 5


def test_an_adapter_says_how_it_was_trained(adapter: Path) -> None:
    resources = Resources(str(adapter))
    method = make_method("lookaheadkv", 64, resources)
    assert isinstance(method, LookaheadKV)
    assert (method.reduce, method.pool) == (Reduce("max", "max"), Pool("avg", 3))
    assert method.allocate == Adaptive(0.4, blend=False)
    assert make_method("lookaheadkv", 64, resources, allocate="uniform") == dataclasses.replace(
        method, allocate=Uniform()
    )
    assert isinstance(method.observer, SoftTokens) and method.observer.artifact is resources.artifact
    pooled = make_method("lookaheadkv", 64, resources, pool={"kernel": 5}, allocate="pyramidkv")
    parts: dict[str, Any] = {"observer": method.observer, "reduce": Reduce("max", "max")}
    assert pooled == LookaheadKV(64, pool=Pool("avg", 5), allocate=Pyramid(), **parts)
    free = make_method("evict", 64, resources, observer="soft_tokens")
    assert isinstance(free, Evict) and free.observer == method.observer and free.pool == Pool()


def test_a_retrieval_head_is_loaded_once_and_checked(tmp_path: Path) -> None:
    """With the target at hand, the layers of its features are named, which a prefill must record."""
    head = tiny_retrieval_head()
    head.config = dataclasses.replace(head.config, feature_layers=None)
    head.save(tmp_path, Provenance("tiny"), "# Card\n")
    target = tiny_model(num_hidden_layers=8)
    resources = Resources(retrieval=tmp_path, target=target)
    made = make_method("specontext", 64, resources, sinks=2, window=8)
    assert isinstance(made, SpeContext) and made == SpeContext(64, resources.head, 2, 8)
    assert make_method("specontext", 0.5, resources).needs() == Needs(features=(1, 3, 4))
    with pytest.raises(UserError, match=r"^SpeContext: this retrieval head does not name the layers of its features"):
        SpeContext.from_pretrained(tmp_path, 64).needs()
    with pytest.raises(UserError, match=r"^method 'specontext': .*KV heads 2 against 4"):
        make_method("specontext", 64, Resources(retrieval=tmp_path, target=tiny_model(num_key_value_heads=4)))
    with pytest.raises(UserError, match=r"^method 'specontext': there is no option 'head'; it takes sinks, window"):
        make_method("specontext", 64, resources, head="elsewhere")


def test_resources_are_looked_for_only_where_they_are_needed() -> None:
    nowhere = Resources("./nowhere")
    assert make_method("snapkv", 64, nowhere) == make_method("snapkv", 64) == SnapKV(64)
    assert make_method("h2o", 0.5) == H2O(0.5)
    assert make_method("pyramidkv", 64, None, observer=PromptWindow(4)) == PyramidKV(64, PromptWindow(4))
    for name, said in {
        "lookaheadkv": "needs adapter=FOLDER_OR_HUB_ID",
        "speckv": r"needs a draft: set draft\.layers=",
        "specpc": "needs a draft",
        "speckvpc": "needs a draft",
        "llmlingua2": "needs the target's tokenizer",
        "sentence_similarity": "needs the target's tokenizer",
        "specontext": r"needs retrieval=FOLDER_OR_HUB_ID; train one with train_retrieval_head\.py",
    }.items():
        with pytest.raises(UserError, match=f"^method {name!r}: {said}"):
            make_method(name, 128)
    with pytest.raises(UserError, match=r"^method 'evict': observer: drafter: needs a draft"):
        make_method("evict", 64, observer={"name": "draft_tokens", "drafter": "draft_model"})
    with pytest.raises(UserError, match=r"^method 'lookaheadkv': '\./nowhere' is neither"):
        make_method("lookaheadkv", 64, nowhere)


WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    ("snapkvv", 64, {}, "method 'snapkvv' is unknown; choose one of adakv, .*; did you mean 'snapkv'"),
    ("zzz", 64, {}, "method 'zzz' is unknown; choose one of adakv, .*, truncation$"),
    ("snapkv", None, {}, "method 'snapkv' needs a budget"),
    ("snapkv", 0, {}, "SnapKV: budget 0 is below 1"),
    ("snapkv", "64", {}, "SnapKV: budget '64' must be a whole number"),
    ("snapkv", True, {}, "SnapKV: budget True must be a whole number"),
    ("snapkv", float("nan"), {}, "SnapKV: budget nan is not a ratio"),
    ("snapkv", 64, {"windows": 8}, "method 'snapkv': there is no option 'windows'; it takes observer, reduce, pool, "),
    ("snapkv", 64, {"artifact": 8}, "method 'snapkv': there is no option 'artifact'"),
    ("specpc", 64, {"draft": "x"}, "method 'specpc': there is no option 'draft'"),
    ("snapkv", 64, {"window": 64}, "SnapKV: budget 64 must be above the 64 protected"),
    ("snapkv", 64, {"window": -1}, "SnapKV: window -1 must be a whole number"),
    ("snapkv", 64, {"every": 32}, "SnapKV: budget 64 must be above the 32 protected .* and the 32 of every"),
    ("snapkv", 0.5, {"every": 4}, "SnapKV: every 4 needs a budget in entries"),
    ("snapkv", 64, {"pool": {"kernel": 4}}, "method 'snapkv': pool: kernel 4 must be odd"),
    ("snapkv", 64, {"pool": {"size": 5}}, "method 'snapkv': pool: there is no option 'size'; it takes kind, kernel"),
    ("snapkv", 64, {"pool": "min"}, "method 'snapkv': pool: kind 'min' is unknown"),
    ("snapkv", 64, {"reduce": "sum"}, "method 'snapkv': reduce: queries 'sum' is unknown"),
    ("snapkv", 64, {"allocate": "ada"}, "method 'snapkv': allocate: 'ada' is unknown; choose one of adakv, "),
    ("snapkv", 64, {"allocate": {"floor": 1}}, "method 'snapkv': allocate: there is no option 'floor'; it takes none"),
    ("adakv", 64, {"allocate": {"floor": 2}}, "method 'adakv': allocate: adakv: floor 2 must be between 0 and 1"),
    (
        "adakv",
        4,
        {"window": 0, "observer": {"size": 4}},
        "adakv: budget 4 with floor 0.2 can leave a head without entries",
    ),
    ("pyramidkv", 9, {"window": 0, "observer": {"size": 4}}, "pyramidkv: budget 9 with beta 20 leaves"),
    ("evict", 64, {}, "method 'evict': option 'observer' is missing, one of draft_tokens, "),
    ("evict", 64, {"observer": "window"}, "method 'evict': observer: 'window' is unknown; choose one of "),
    ("evict", 64, {"observer": {"size": 4}}, "method 'evict': observer: give it a name, one of "),
    ("evict", 64, {"observer": "draft_tokens"}, "method 'evict': observer: option 'drafter' is missing"),
    ("dapq", 64, {"observer": {"drafter": "it"}}, "method 'dapq': observer: drafter: 'it' is unknown; choose one of "),
    ("dapq", 64, {"observer": {"drafter": {"first": "a"}}}, "observer: drafter: DapQ: first 'a' must be a whole"),
    ("laq", 16, {}, "LAQ: budget 16 must be above the first_window 32"),
    ("laq", 64, {"observer": {"lookahead": 0}}, "observer: LAQ: lookahead 0 must be a whole number of at least 1"),
    ("speckv", 64, {"sparse": {"vertical": 9}}, "method 'speckv': sparse: give it a name, one of vertical_slash"),
    ("specpc", 128, {"kernel": 0}, "SpecPC: kernel 0 must be a whole number of at least 1"),
    ("specpc", 32, {}, "SpecPC: budget 32 must be above the window of 64"),
    ("streamingllm", 4, {}, "StreamingLLM: budget 4 must be above the 4 protected"),
]


@pytest.mark.parametrize(("name", "budget", "options", "said"), WRONG)
def test_bad_values_are_named(name: str, budget: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        make_method(name, budget, AT_HAND, **options)
    assert "\n" not in str(error.value)


LATE: list[tuple[str, Any, dict[str, Any], str]] = [
    ("snapkv", 64, {"window": "x"}, "SnapKV: window 'x' must be a whole number"),
    ("snapkv", 64, {"window": [1]}, r"SnapKV: window \[1\] must be a whole number"),
    ("snapkv", 64, {"window": 0}, "SnapKV: a window of 0 cannot observe"),
    ("snapkv", 64, {"value_norm": 3}, "method 'snapkv': value_norm: 3 must be true or false"),
    ("snapkv", 64, {"value_norm": None}, "method 'snapkv': value_norm: None must be true or false"),
    ("snapkv", 64, {"during_prefill": "no"}, "method 'snapkv': during_prefill: 'no' must be true or false"),
    ("adakv", 64, {"allocate": {"blend": 1}}, "method 'adakv': allocate: blend: 1 must be true or false"),
    ("snapkv", 64, {"reduce": 3}, "method 'snapkv': reduce: 3 must be a name, or a mapping with a name and options"),
    ("snapkv", 64, {"pool": 5}, "method 'snapkv': pool: 5 must be a name, or a mapping"),
    ("snapkv", 64, {"pool": None}, "method 'snapkv': pool: None must be a name, or a mapping"),
    ("snapkv", 64, {"observer": 5}, "method 'snapkv': observer: 5 must be a name, or a mapping"),
    ("snapkv", 64, {"allocate": ["adakv"]}, r"method 'snapkv': allocate: \['adakv'\] must be a name, or a mapping"),
    ("snapkv", 64, {"observer": {"size": -3}}, "method 'snapkv': observer: SnapKV: a window of -3 cannot observe"),
    ("snapkv", 64, {"budget": 3}, "method 'snapkv': there is no option 'budget'"),
    ("snapkv", 64, {"resources": 3}, "method 'snapkv': there is no option 'resources'"),
    ("full", 64, {"window": 3}, "method 'full': there is no option 'window'; it takes none"),
    ("adakv", 64, {"allocate": {"floor": "x"}}, "method 'adakv': allocate: adakv: floor 'x' must be between 0 and 1"),
    ("laq", 64, {"observer": {"budget": "x"}}, "method 'laq': observer: LAQ: budget 'x' must be a whole number"),
    ("dapq", 64, {"observer": {"window": -1}}, "method 'dapq': observer: draft tokens: window -1 must be a whole"),
    ("dapq", 64, {"observer": {"drafter": {"name": "constant_text", "ids": 5}}}, "DapQ: ids 5 must be a list of token"),
    ("oracle", 64, {"observer": {"drafter": {"max_new_tokens": 0}}}, "oracle: max_new_tokens 0 must be a whole number"),
]


@pytest.mark.parametrize(("name", "budget", "options", "said"), LATE)
def test_values_that_would_fail_late_are_named(name: str, budget: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_method(name, budget, AT_HAND, **options)
