"""DMS: the decisions of both published forms, against slow loops, and when an entry is evicted."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
import transformers.models.qwen3.modeling_qwen3 as qwen3
from safetensors.torch import save_file
from torch import Tensor

from keepsight import generate
from keepsight.models.scorers import DMSScorer, DMSSettings
from keepsight.runtime.allocate import Threshold
from keepsight.runtime.methods import DMS, KVzap, make_method
from keepsight.runtime.methods.scored import TrainedScores
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.models.scorers import tiny_scorer, tiny_tensors
from tests.refused import refused
from tests.runtime.slow_families import hiding, slow_pass
from tests.tiny import prompt_ids, tiny_model

LENGTH = 60
WINDOW = 8
IDS = prompt_ids(LENGTH)[0]
SETTINGS = DMSSettings(scale=3.0, offset=1.5)


def model_and_tensors(form: str) -> tuple[Any, dict[str, Tensor]]:
    """A tiny Qwen3 whose norms are not 1, and decisions for it: in its own queries, or in separate projections."""
    model = tiny_model("qwen3")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(0.5 + torch.rand(weight.shape, generator=generator))
    if form == "projections":
        tensors = tiny_tensors(DMSScorer, model, deep=True)
        for index, layer in enumerate(model.model.layers):
            tensors[f"model.layers.{index}.input_layernorm.weight"] = layer.input_layernorm.weight.detach().clone()
            tensors[f"model.layers.{index}.self_attn.dms_proj_alpha.weight"] *= 10  # decisions of both kinds
        return model, tensors
    names = ("q_proj.weight", "q_norm.weight")
    return model, {name: weight.detach().clone() for name, weight in model.named_parameters() if name.endswith(names)}


def method_with(
    tensors: dict[str, Tensor], budget: int | float, settings: DMSSettings = SETTINGS, **options: Any
) -> DMS:
    observer = TrainedScores(DMSScorer("tiny", tensors, settings))
    return DMS(budget, observer, window=WINDOW, **options)


def product(weights: list[float], inputs: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, inputs, strict=True))


def normed(values: list[float], weights: list[float]) -> list[float]:
    """RMSNorm."""
    root_mean_square = math.sqrt(sum(value * value for value in values) / len(values) + 1e-6)
    return [value / root_mean_square * weight for value, weight in zip(values, weights, strict=True)]


def slow_logits(model: Any, tensors: dict[str, Tensor], form: str, settings: DMSSettings = SETTINGS) -> Tensor:
    """[L, K, N]: what each token decides, above 0 to evict; token after token, from the layers' inputs."""
    with torch.no_grad():
        inputs = model(IDS, output_hidden_states=True).hidden_states
    by_layer = []
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}.self_attn."
        weights = {name.removeprefix(prefix): tensor.double().tolist() for name, tensor in tensors.items()}
        input_norm = layer.input_layernorm.weight.double().tolist()
        by_token = []
        for hidden in inputs[index][0].double().tolist():
            if form == "projections":
                values = projected_values(hidden, weights)
            else:
                values = query_values(hidden, input_norm, weights)
            by_token.append([value * settings.scale - settings.offset for value in values])
        by_layer.append(torch.tensor(by_token).T)
    return torch.stack(by_layer)


def projected_values(hidden: list[float], weights: dict[str, Any]) -> list[float]:
    """A value for each KV head from a layer's input, by a norm and a projection of the scorer."""
    states = normed(hidden, weights["dms_proj_alpha_norm.weight"])
    return [product(row, states) for row in weights["dms_proj_alpha.weight"]]


def query_values(hidden: list[float], input_norm: list[float], weights: dict[str, Any]) -> list[float]:
    """A value for each KV head: the last channel of the first of its query heads."""
    states = normed(hidden, input_norm)
    values = []
    for first_row in (0, 16):  # query heads 0 and 2 of four, 8 channels each
        matrix = weights["q_proj.weight"][first_row : first_row + 8]
        query = [product(row, states) for row in matrix]
        values.append(normed(query, weights["q_norm.weight"])[-1])
    return values


def slow_kept(logits: Tensor) -> Tensor:
    """[L, K, N] bool: entries that the next token decided to evict are, once a window of tokens has followed."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    for layer in range(logits.shape[0]):
        for head in range(logits.shape[1]):
            for entry in range(LENGTH - WINDOW):
                kept[layer, head, entry] = bool(logits[layer, head, entry + 1] <= 0)
    return kept


@pytest.mark.parametrize("form", ["queries", "projections"])
def test_kept_entries_are_those_that_were_not_decided_against(form: str) -> None:
    model, tensors = model_and_tensors(form)
    logits = slow_logits(model, tensors, form)
    method = method_with(tensors, 1.0, allocate=Threshold())
    state = prefill(model, IDS, needs=method.needs())
    for scores, layer_logits in zip(method.observer(model, state, method.reduce), logits, strict=True):
        assert_close(scores[0, :, :-1], -layer_logits[:, 1:])
        assert bool(scores[0, :, -1].isinf().all())
    kept = method.select(state, method.importance(model, state))
    expected = slow_kept(logits)
    assert torch.equal(torch.stack(kept)[:, 0], expected)
    assert 0 < int(expected.sum()) < expected.numel()
    different_counts = expected.sum(-1).unique()
    assert len(different_counts) > 2
    answer = IDS[:, :3]
    _, logits = read(model, method.start(model, IDS), answer)
    _, expected_logits = slow_pass(model, hiding(kept), input_ids=torch.cat([IDS, answer], dim=1))
    assert_close(logits, expected_logits[:, LENGTH:])


def test_a_budget_keeps_the_best_of_all_heads_and_is_the_most_under_a_threshold() -> None:
    model, tensors = model_and_tensors("queries")
    logits = slow_logits(model, tensors, "queries")
    scores = -logits[:, :, 1 : LENGTH - WINDOW + 1]
    for budget in (14, 30):
        lowest_kept = scores.flatten().topk((budget - WINDOW) * 6).values[-1]
        method = method_with(tensors, budget)
        state = prefill(model, IDS, needs=method.needs())
        kept = torch.stack(method.select(state, method.importance(model, state)))[:, 0]
        assert torch.equal(kept[..., :-WINDOW], scores >= lowest_kept)
        assert bool(kept[..., -WINDOW:].all())
        capped = replace(method, allocate=Threshold())
        kept = torch.stack(capped.select(state, capped.importance(model, state)))[:, 0]
        assert torch.equal(kept[..., :-WINDOW], (scores >= lowest_kept) & (scores >= 0))


def test_prompts_in_parts_and_batches_keep_the_same() -> None:
    """The decision about the last entry of a part is read in the next one."""
    model, tensors = model_and_tensors("queries")
    ids, mask = prompt_ids(LENGTH, 43)
    method = method_with(tensors, 20)
    batch_counts = method.start(model, ids, mask).counts()
    in_chunks = method.start(model, ids, mask, chunk=7)
    assert torch.equal(in_chunks.counts(), batch_counts)
    alone = method.start(model, ids[1:, LENGTH - 43 :])
    assert torch.equal(alone.counts()[:, 0], batch_counts[:, 1])
    unsplit = method.start(model, IDS)
    first_turn = prefill(model, IDS[:, :50], needs=method.needs())
    in_turns = method.resume(model, first_turn, IDS[:, 50:])
    for layer, turn_layer in zip(unsplit.entries(), in_turns.entries(), strict=True):
        assert_close(layer.keys, turn_layer.keys)


def test_entries_are_evicted_when_they_leave_the_window_while_an_answer_is_decoded() -> None:
    model, tensors = model_and_tensors("queries")
    logits = slow_logits(model, tensors, "queries")
    method = method_with(tensors, 1000, allocate=Threshold(), every=1)
    state = method.start(model, IDS[:, :40])
    for length in range(41, LENGTH + 1):
        state, _ = read(model, state, IDS[:, length - 1 : length])
        state = method.compress_state(model, state)
        before_window = length - WINDOW
        first_layer = logits[0]  # later layers read what earlier ones evict
        expected = (first_layer[:, 1 : before_window + 1] <= 0).sum(dim=-1) + WINDOW
        assert state.counts()[0, 0].tolist() == expected.tolist()
    answer = generate(model, IDS, method, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert answer.shape == (1, 6)


def test_weights_load_as_they_are_published(tmp_path: Path) -> None:
    """Two shards, and the settings in config.json; FastDMS's in a file of their own."""
    model, tensors = model_and_tensors("queries")
    weights = [*tensors.items(), ("model.norm.weight", torch.ones(4))]
    save_file(dict(weights[:3]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(weights[3:]), tmp_path / "model-00002-of-00002.safetensors")
    config = {"dms_alpha_scale": 3.0, "dms_initial_alpha_offset": 1.5, "dms_window_size": 512, "dms_cr": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    method: Any = make_method("dms", 20, scorer=str(tmp_path), window=WINDOW)
    assert method.observer.scorer.settings == SETTINGS
    expected = method_with(tensors, 20)
    assert method.observer.digest == expected.observer.digest  # type: ignore[attr-defined]
    assert torch.equal(method.start(model, IDS).counts(), expected.start(model, IDS).counts())
    metadata = tmp_path / "dms_metadata.json"
    metadata.write_text(json.dumps({"alpha_scale": 2, "alpha_offset": 0, "window_size": 256}))
    fast_dms = DMSScorer.from_pretrained(tmp_path)
    assert fast_dms.settings == DMSSettings(2.0, 0.0)
    assert fast_dms.digest != method.observer.digest
    metadata.write_text(json.dumps({"alpha_scale": "large"}))
    with refused("dms_alpha_scale", "type"):
        DMSScorer.from_pretrained(tmp_path)
    metadata.write_text(json.dumps({"alpha_scale": 1.0, "dms_alpha_per": "token"}))
    with refused("dms_alpha_per", "unknown"):
        DMSScorer.from_pretrained(tmp_path)


def test_a_decision_of_a_layer_is_that_of_its_first_head() -> None:
    model, tensors = model_and_tensors("projections")
    method = method_with(tensors, 20, DMSSettings(3.0, 1.5, "layer"))
    state = prefill(model, IDS, needs=method.needs())
    logits = slow_logits(model, tensors, "projections")
    for scores, layer_logits in zip(method.observer(model, state, method.reduce), logits, strict=True):
        assert_close(scores[0, :, :-1], -layer_logits[:1, 1:].expand(2, -1))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_with_decisions_in_its_queries_attends_without_them(family: str, monkeypatch: Any) -> None:
    """The full cache answers as the model does with the last channel of query heads 0 and 2 at 0, around RoPE."""
    settings: dict[str, Any] = {"dms_alpha_scale": 100.0, "dms_initial_alpha_offset": 5.0}
    model = tiny_model(family, **settings)
    plain = tiny_model(family)
    module = {"qwen3": qwen3, "llama": llama}[family]
    plain_logits = plain(IDS).logits
    rotate = module.apply_rotary_pos_emb

    def rotate_without_decisions(query: Tensor, key: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        query = query.clone()
        query[:, ::2, :, -1] = 0
        query, key = rotate(query, key, *args, **options)
        query[:, ::2, :, -1] = 0
        return query, key

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(module, "apply_rotary_pos_emb", rotate_without_decisions)
        expected = plain(IDS).logits
    assert not torch.allclose(plain_logits, expected, atol=1e-2)
    state = prefill(model, IDS[:, :-4])
    assert_close(state.logits, expected[:, -5])
    assert_close(read(model, state, IDS[:, -4:])[1], expected[:, -4:])
    with torch.no_grad():
        assert_close(model(IDS).logits, plain_logits)  # left as it was
    separate = tiny_model(family, **settings, dms_separate_alpha=True)
    assert_close(prefill(separate, IDS).logits, plain_logits[:, -1])


def test_scorers_and_options_that_do_not_fit_are_refused() -> None:
    model, tensors = model_and_tensors("queries")
    with refused("window", "range"):
        DMS(20, TrainedScores(DMSScorer("tiny", tensors)), window=0)
    with refused("scorer", "file"):
        DMSScorer("tiny", {"model.layers.0.input_layernorm.weight": torch.ones(4)})
    without_last_layer = {name: tensor for name, tensor in tensors.items() if "layers.2" not in name}
    with refused("scorer", "model"):
        method_with(without_last_layer, 20).start(model, IDS)
    deep = tiny_tensors(DMSScorer, model, deep=True)
    without_norms = {name: tensor for name, tensor in deep.items() if "input_layernorm" not in name}
    with refused("scorer", "model"):
        method_with(without_norms, 20).start(model, IDS)
    with refused("least", "range"):
        Threshold(math.nan)
    with refused("window", "range"):
        make_method("key_norm", 20, allocate="threshold")


def test_kvzap_evicts_below_its_tau() -> None:
    model = tiny_model()
    tau = -0.25
    method = KVzap(0.9, TrainedScores(tiny_scorer(KVzap.scorer, model)), window=WINDOW, allocate=Threshold(tau))
    state = prefill(model, IDS, needs=method.needs())
    kept = method.select(state, method.importance(model, state))
    for selected, scores in zip(kept, method.observer(model, state, method.reduce), strict=True):
        assert torch.equal(selected[..., :-WINDOW], scores[..., :-WINDOW] >= tau)
