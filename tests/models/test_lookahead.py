"""Lookahead modules on tiny random models: what they leave alone, and that they predict the same when loaded."""

import pytest
import torch
from peft import PeftModel

from keepsight.files import file_digest
from keepsight.models.lookahead import ADAPTER, Lookahead, LookaheadAdapter
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import PREFIX
from keepsight.runtime.state import entries
from keepsight.runtime.methods import LookaheadKV
from keepsight.runtime.state import prefill
from keepsight.train.lookahead.objective import LookaheadObjective
from tests.close import assert_close
from tests.families import family_model
from tests.models.modules import SHAPE, importance, importance_of, lora_parameters, random_module, save
from tests.tiny import FAMILIES, prompt_ids, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_that_is_off_leaves_logits_alone_bit_for_bit(family):
    ids, mask = prompt_ids(30, 17)
    with torch.no_grad():
        expected = tiny_model(family)(ids, attention_mask=mask).logits
        module = random_module(family)
        off = module.model(ids, attention_mask=mask).logits
        with module.active():
            on = module.model(ids, attention_mask=mask).logits
        off_again = module.model(ids, attention_mask=mask).logits
    assert torch.equal(off, expected)
    assert torch.equal(off_again, expected)
    assert not torch.allclose(on, expected, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_observing_leaves_prompt_and_model_alone_bit_for_bit(family, tmp_path):
    ids, mask = prompt_ids(30, 17)
    method = LookaheadKV.from_pretrained(save(random_module(family), tmp_path / "adapter"), 8)
    model = tiny_model(family)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        prefilled = prefill(model, ids, mask)
        before = [tensor.clone() for each in entries(prefilled.cache) for tensor in each[:2]]
        kept = method.compress(model, prefilled)
        after = model(ids, attention_mask=mask).logits
    assert kept.length == 8
    assert torch.equal(after, expected)
    assert all(
        torch.equal(*pair)
        for pair in zip(before, [t for each in entries(prefilled.cache) for t in each[:2]], strict=True)
    )
    assert prefilled.length == 30


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_reaches_what_the_loss_reads_and_nothing_else(family):
    module = random_module(family)
    adapted = {name.split(".lora_")[0].removeprefix(PREFIX) for name in lora_parameters(module)}
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    mlp = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    last = {"self_attn.q_proj", "self_attn.k_proj"}
    assert adapted == {
        f"model.layers.{layer}.{name}"
        for layer, names in enumerate([attention | mlp, attention | mlp, last])
        for name in names
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_only_tokens_and_lora_are_trainable(family):
    module = random_module(family)
    LookaheadObjective(module)
    trainable = {id(value) for value in module.parameters() if value.requires_grad}
    assert trainable == {id(value) for value in [module.tokens, *lora_parameters(module).values()]}
    assert all(value.dtype == torch.float32 for value in module.parameters() if value.requires_grad)


def test_half_precision_targets_get_weights_in_float32():
    target = tiny_model()
    target.bfloat16()
    module = Lookahead(target, SHAPE)
    assert {value.dtype for value in [*lora_parameters(module).values(), module.tokens]} == {torch.float32}
    assert module.observers(3).dtype == torch.bfloat16
    assert module.observers(3).shape == (3, 5, 32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_saved_adapter_predicts_the_same_when_loaded(family, rank, tmp_path):
    module = random_module(family, LookaheadSettings(tokens=5, rank=rank, alpha=8, group="max", kernel=3))
    folder = save(module, tmp_path / "adapter")
    artifact = LookaheadAdapter.load(folder)
    assert (artifact.settings, artifact.provenance.base_model) == (module.settings, "ada/tiny")
    model = tiny_model(family)
    prefilled = prefill(model, *prompt_ids(30, 17))
    expected = importance(module, prefill(module.model, *prompt_ids(30, 17)))
    assert_close(importance_of(artifact, model, prefilled), expected)
    with artifact.attached(model) as tokens, artifact.attached(model) as again:
        assert tokens is again and not tokens.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_loads_it_and_leaves_the_base_model_as_it_is(family, tmp_path):
    module = random_module(family)
    folder = save(module, tmp_path / "adapter")
    ids, mask = prompt_ids(30, 17)
    with torch.no_grad():
        expected = tiny_model(family)(ids, attention_mask=mask).logits
        loaded = PeftModel.from_pretrained(tiny_model(family), str(folder))
        assert torch.equal(loaded(input_ids=ids, attention_mask=mask).logits, expected)
    weights = {name.replace(".default", ""): value for name, value in loaded.named_parameters() if ".lora_" in name}
    saved = module.lora_state()
    assert set(weights) == set(saved)
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_with_the_lora_forced_on_applies_the_same_lora(family, tmp_path):
    """The saved LoRA is an activated one of PEFT: told how many rows it is for, it does what our second pass does."""
    module = random_module(family)
    embeddings = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with module.active():
            expected = module.model(inputs_embeds=embeddings).logits
        loaded = PeftModel.from_pretrained(tiny_model(family), str(save(module, tmp_path / "adapter")))
        logits = loaded(inputs_embeds=embeddings, alora_offsets=[5]).logits
    assert_close(logits, expected)


def test_two_adapters_on_one_model_do_not_disturb_each_other(tmp_path):
    ids, mask = prompt_ids(30, 17)
    modules = [random_module(seed=seed) for seed in (7, 8)]
    expected = [importance(module, prefill(module.model, ids, mask)) for module in modules]
    model = tiny_model()
    artifacts = [LookaheadAdapter.load(save(module, tmp_path / str(number))) for number, module in enumerate(modules)]
    prefilled = prefill(model, ids, mask)
    for number in (0, 1, 0):
        assert_close(importance_of(artifacts[number], model, prefilled), expected[number])
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)


@pytest.mark.parametrize("change", [{"rank": 0}, {"alpha": 16}])
def test_adapters_that_share_their_lora_are_told_apart(change, tmp_path):
    """Of rank 0, or trained with another alpha: the LoRA's file is the same, the adapter is not."""
    shape = LookaheadSettings(**{"tokens": 5, "rank": 2, "alpha": 8} | change)
    first, second = random_module(settings=SHAPE if shape.rank else shape), random_module(settings=shape)
    with torch.no_grad():
        second.tokens.mul_(2)
    folders = [save(module, tmp_path / name) for name, module in (("first", first), ("second", second))]
    assert file_digest(folders[0] / ADAPTER) == file_digest(folders[1] / ADAPTER)
    model = tiny_model()
    prefilled = prefill(model, *prompt_ids(30, 17))
    for folder, own in zip(folders, (first, second), strict=True):
        artifact = LookaheadAdapter.load(folder)
        with artifact.attached(model) as tokens:
            assert torch.equal(tokens, own.tokens)
        expected = importance(own, prefill(own.model, *prompt_ids(30, 17)))
        assert_close(importance_of(artifact, model, prefilled), expected)


@pytest.mark.parametrize("family", ["Llama 3", "Gemma 3 (text)"])
def test_soft_tokens_start_at_the_scale_of_the_embeddings(family):
    model = family_model(family)
    module = Lookahead(model, LookaheadSettings(tokens=64, rank=2))
    embedded = model.get_input_embeddings()(torch.arange(128))
    assert module.tokens.std().item() == pytest.approx(embedded.std().item(), rel=0.1)
