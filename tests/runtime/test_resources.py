"""Methods that are made before the target is loaded, and completed when it is."""

from pathlib import Path

import pytest
import torch

from keepsight.errors import UserError
from keepsight.models.card import Provenance
from keepsight.models.draft_sources import LayerSubset
from keepsight.models.lookahead import Lookahead, LookaheadSettings
from keepsight.runtime.methods import METHODS, Resources, SpeContext, make_method
from keepsight.runtime.methods.resources import Later, ResourcesLater, bind
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("name", METHODS)
def test_a_bound_method_is_the_method_made_with_everything_at_hand(name: str, tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=8)
    Lookahead(tiny_model(), LookaheadSettings(tokens=4, rank=2)).adapter().save(tmp_path, Provenance("tiny"), "# Card")
    tiny_retrieval_head().save(tmp_path, Provenance("tiny"), "# Card\n")
    loaded = Resources(tmp_path, LayerSubset((0, 2)), tiny_tokenizer(), tmp_path, target)
    later = ResourcesLater(tmp_path, Later("draft"), Later("tokenizer"), tmp_path)
    options = {"observer": {"name": "draft_tokens", "drafter": "draft_model"}} if name == "evict" else {}
    made = make_method(name, 96, later, **options)
    expected = make_method(name, 96, loaded, **options)
    if name == "lookaheadkv":  # the adapter takes no target: it is loaded once
        assert bind(made, loaded) is made
        return
    assert bind(made, loaded) == expected
    if name in ("specontext", "speckv", "specpc", "speckvpc", "llmlingua2", "sentence_similarity", "evict"):
        assert made != expected
    else:
        assert made == expected


def test_what_is_missing_or_wrong_is_named_early(tmp_path: Path) -> None:
    for name, said in {
        "speckv": "needs a draft",
        "lookaheadkv": "needs adapter=",
        "specontext": "needs retrieval=",
    }.items():
        with pytest.raises(UserError, match=f"method {name!r}: {said}"):
            make_method(name, 64, ResourcesLater())
    with pytest.raises(UserError, match=r"retrieval_head\.safetensors is missing"):
        make_method("specontext", 64, ResourcesLater(retrieval=tmp_path))
    tiny_retrieval_head().save(tmp_path, Provenance("tiny"), "# Card\n")
    made = make_method("specontext", 64, ResourcesLater(retrieval=tmp_path), sinks=2)
    assert isinstance(made, SpeContext) and made.head == Later("head", str(tmp_path))
    other = Resources(retrieval=tmp_path, target=tiny_model(num_key_value_heads=4))
    with pytest.raises(UserError, match="KV heads 2 against 4"):
        bind(made, other)


def test_methods_may_name_adapters_and_heads_of_their_own(tmp_path: Path) -> None:
    target, own = tiny_model(num_hidden_layers=8), tmp_path / "own"
    for seed, folder in enumerate((tmp_path / "default", own)):
        torch.manual_seed(seed)
        lookahead = Lookahead(tiny_model(), LookaheadSettings(tokens=4 + seed, rank=2))
        lookahead.adapter().save(folder, Provenance("tiny"), "# Card")
        tiny_retrieval_head().save(folder, Provenance("tiny"), "# Card\n")
    loaded = Resources(tmp_path / "default", retrieval=tmp_path / "default", target=target)
    later = ResourcesLater(tmp_path / "default", retrieval=tmp_path / "default")
    for resources in (loaded, later):
        default, first, again = (
            bind(make_method("lookaheadkv", budget, resources, **options), loaded)
            for budget, options in ((64, {}), (64, {"adapter": str(own)}), (32, {"adapter": str(own)}))
        )
        assert (default.observer.positions(), first.observer.positions()) == (4, 5)
        assert first.observer.artifact is again.observer.artifact
        heads = [
            bind(make_method("specontext", 64, resources, **options), loaded).head
            for options in ({}, {"retrieval": str(own)}, {"retrieval": str(own)})
        ]
        assert heads[0] is loaded.head
        assert heads[1] is heads[2] is not heads[0]
    composed = make_method("evict", 64, Resources(), observer="soft_tokens", adapter=str(own))
    assert composed.adapter_digest == first.adapter_digest != default.adapter_digest
    for name, key in (("snapkv", "adapter"), ("lookaheadkv", "retrieval"), ("quest", "retrieval")):
        with pytest.raises(UserError, match=f"method {name!r}: there is no option {key!r}, it uses none"):
            make_method(name, 64, loaded, **{key: str(own)})
    with pytest.raises(UserError, match=r"^method 'lookaheadkv': '\./nowhere' is neither"):
        make_method("lookaheadkv", 64, loaded, adapter="./nowhere")
