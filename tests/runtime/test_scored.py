"""Methods with trained scorers: published files that load, slow scores from the papers, and what is refused."""

import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from keepsight import generate
from keepsight.eval.inputs import method_text
from keepsight.models.scorers import FastKVzipScorer, KVzapScorer, LocretScorer, TrimKVScorer
from keepsight.runtime.methods import DBTrimKV, FastKVzip, KVzap, Locret, TrimKV, make_method
from keepsight.runtime.methods.scored import TrainedScores
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.models.scorers import tiny_scorer, tiny_tensors
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

LENGTH = 60
BUDGET = 20
METHODS: dict[str, Any] = {
    "kvzap": (KVzap, False),
    "kvzap, MLP": (KVzap, True),
    "fastkvzip": (FastKVzip, False),
    "trimkv": (TrimKV, False),
    "trimkv, deep": (TrimKV, True),
    "dbtrimkv": (DBTrimKV, True),
    "locret": (Locret, False),
}


def inputs_of(model: Any, ids: Tensor) -> list[Tensor]:
    """For each layer, what goes into its attention, [N, D]."""
    with torch.no_grad():
        hidden_states = model(ids, output_hidden_states=True).hidden_states
        inputs = []
        for layer, hidden in zip(model.model.layers, hidden_states, strict=False):
            inputs.append(layer.input_layernorm(hidden)[0])
    return inputs


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def linear(tensors: dict[str, Tensor], name: str, x: list[float], bias: bool = True) -> list[float]:
    weight = tensors[f"{name}.weight"].double().tolist()
    products = [dot(row, x) for row in weight]
    if not bias:
        return products
    offsets = tensors[f"{name}.bias"].double().tolist()
    return [product + offset for product, offset in zip(products, offsets, strict=True)]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def silu(values: list[float]) -> list[float]:
    return [z * sigmoid(z) for z in values]


def gelu(values: list[float]) -> list[float]:
    return [z * 0.5 * (1 + math.erf(z / math.sqrt(2))) for z in values]


def rms_normed(values: list[float], weight: Tensor) -> list[float]:
    """Of 16 numbers."""
    size = math.sqrt(dot(values, values) / 16 + 1e-6)
    return [value / size * scale for value, scale in zip(values, weight.tolist(), strict=True)]


def slow_kvzap(tensors: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    if "weight" in tensors:
        return linear({"f.weight": tensors["weight"], "f.bias": tensors["bias"]}, "f", x)
    return linear(tensors, "2", gelu(linear(tensors, "0", x)))


def slow_fastkvzip(tensors: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    queries = linear(tensors, "q_proj", x)
    keys = linear(tensors, "k_proj", x, bias=False)
    kv_heads, _, group = tensors["b"].shape
    scores = []
    for kv_head in range(kv_heads):
        key = rms_normed(keys[16 * kv_head : 16 * kv_head + 16], tensors["k_norm.weight"])
        gates = []
        for member in range(group):
            start = 16 * (kv_head * group + member)
            query = rms_normed(queries[start : start + 16], tensors["q_norm.weight"])
            logit = dot(query, key) / 4 + float(tensors["b"][kv_head, 0, member])
            sink_logits = [dot(query, sink) / 4 for sink in tensors["k_base"][kv_head, 0].tolist()]
            gates.append(1 / (1 + sum(math.exp(sink_logit - logit) for sink_logit in sink_logits)))
        scores.append(sum(gates) / group)
    return scores


def slow_trimkv(tensors: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    """`left` tokens were read from this one on, itself included."""
    hidden = silu(linear(tensors, "linear1", x))
    last = "linear2"
    if "linear3.weight" in tensors:
        hidden = silu(linear(tensors, "linear2", hidden))
        last = "linear3"
    scores = []
    for logit, bias in zip(linear(tensors, last, hidden, bias=False), tensors["bias"].tolist(), strict=True):
        scores.append((left + 1) * math.log(sigmoid(logit + bias)))
    return scores


def slow_locret(tensors: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    attention = model.model.layers[index].self_attn
    states = []
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        states += linear({"p.weight": projection.weight}, "p", x, bias=False)
    hidden = silu(linear(tensors, "fc1", states, bias=False))
    return linear(tensors, "fc2", hidden, bias=False)


SLOW = {
    KVzapScorer: slow_kvzap,
    FastKVzipScorer: slow_fastkvzip,
    TrimKVScorer: slow_trimkv,
    LocretScorer: slow_locret,
}


def published(kind: Any, tensors: dict[str, Tensor], path: Path) -> Path:
    """A file as its authors publish it: safetensors, or a pickle, in which Fast KVzip's layers are a list."""
    if kind is KVzapScorer:
        save_file(tensors, path / "model.safetensors")
        return path
    if kind is FastKVzipScorer:
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            _, layer, parameter = name.split(".", 2)
            layers.setdefault(layer, {})[parameter] = tensor
        torch.save({"module": [*layers.values()], "loss": 0.5, "acc": [0.1]}, path / "q2_dim16_sink16.pt")
        return path / "q2_dim16_sink16.pt"
    torch.save(tensors | {"model.embed_tokens.weight": torch.ones(2, 2)}, path / "weights.bin")
    return path


def window_of(kind: Any) -> dict[str, Any]:
    """The option of the methods that have a window."""
    return {} if issubclass(kind, TrimKV) else {"window": 8}


def tensors_of_layer(kind: Any, tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """A layer's part of a scorer's tensors, by their names within the layer."""
    of_layer = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(kind.scorer.names, name)
        if match and int(match[1]) == index:
            of_layer[match[2]] = tensor
    return of_layer


def slow_scores(kind: Any, tensors: dict[str, Tensor], model: Any, ids: Tensor) -> list[Tensor]:
    """For each layer [K, N], token by token."""
    scores = []
    for index, inputs in enumerate(inputs_of(model, ids)):
        of_layer = tensors_of_layer(kind, tensors, index)
        rows = []
        for position, x in enumerate(inputs.double().tolist()):
            rows.append(SLOW[kind.scorer](of_layer, x, LENGTH - position, model, index))
        scores.append(torch.tensor(rows).T)
    return scores


def kept_over_all_heads(method: Any, scores: Tensor) -> Tensor:
    """What a threshold over all heads keeps of [L, K, n] unprotected entries, but for what each head is promised."""
    protected = method.sinks + method.window
    promised = scores.topk(max(int(BUDGET * method.allocate.floor) - protected, 0), dim=-1).indices
    ranked = scores.scatter(-1, promised, torch.inf)
    heads = scores[..., 0].numel()
    threshold = ranked.flatten().topk((BUDGET - protected) * heads).values[-1]
    return ranked >= threshold


@pytest.mark.parametrize("name", METHODS)
def test_scores_and_kept_entries_are_those_of_the_paper(name, tmp_path):
    kind, deep = METHODS[name]
    model = tiny_model()
    ids = prompt_ids(LENGTH)[0]
    tensors = tiny_tensors(kind.scorer, model, deep=deep)
    method = kind.from_pretrained(published(kind.scorer, tensors, tmp_path), BUDGET, **window_of(kind))
    state = prefill(model, ids, needs=method.needs())
    scores = method.observer(model, state, method.reduce)
    expected = slow_scores(kind, tensors, model, ids)
    for layer, expected_layer in zip(scores, expected, strict=True):
        assert_close(layer[0], expected_layer)

    kept = method.select(state, method.importance(model, state))
    window = slice(LENGTH - method.window, LENGTH)
    unprotected = slice(method.sinks, LENGTH - method.window)
    assert sum(int(layer.sum()) for layer in kept) == BUDGET * sum(layer.shape[1] for layer in kept)
    for layer in kept:
        assert layer[..., window].all()
        assert layer[..., : method.sinks].all()
    if "bal" in type(method.allocate).__name__:
        over_all_heads = kept_over_all_heads(method, torch.stack(expected)[..., unprotected])
        assert torch.equal(torch.stack(kept)[:, 0, :, unprotected], over_all_heads)
        return
    count = BUDGET - method.sinks - method.window
    for layer, expected_layer in zip(kept, expected, strict=True):
        best = expected_layer[:, unprotected].topk(count).indices
        expected_kept = torch.zeros_like(expected_layer[:, unprotected], dtype=torch.bool).scatter(-1, best, True)
        assert torch.equal(layer[0, :, unprotected], expected_kept)


@pytest.mark.parametrize("name", METHODS)
def test_batches_chunks_and_eviction_while_reading_keep_the_same(name):
    kind, _ = METHODS[name]
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, 43)
    method = kind(BUDGET, TrainedScores(tiny_scorer(kind.scorer, model)), **window_of(kind))
    evicted_at_once = method.compress_state(model, prefill(model, ids, mask, needs=method.needs()))
    for state in (method.start(model, ids, mask), method.start(model, ids, mask, chunk=16)):
        for expected, layer in zip(evicted_at_once.entries(), state.entries(), strict=True):
            assert_close(expected.keys, layer.keys)
    alone = method.start(model, ids[1:, LENGTH - 43 :])
    assert torch.equal(alone.counts()[:, 0], evicted_at_once.counts()[:, 1])


def test_entries_fade_while_decoding():
    """Evicting every 4 tokens keeps what remains of all entries, prompt and answer alike."""
    model = tiny_model()
    ids = prompt_ids(LENGTH)[0]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tiny_tensors(TrimKVScorer, model).items()}
    scorer = TrimKVScorer("tiny", tensors)
    method = TrimKV(BUDGET, TrainedScores(scorer), every=4)
    assert generate(model, ids, method, max_new_tokens=11).shape[1] <= 11
    state = method.start(model, ids)
    for _ in range(2):
        longer, _ = read(model, state.copy(), prompt_ids(4, seed=2)[0])
        state = method.compress_state(model, longer)
        newest = state.cache.get_seq_length()
        for layer in state.layers:  # equal rates keep the most recent
            assert layer.recorded
            assert layer.recorded.scores[scorer][0, 1].tolist() == [*range(newest - 16, newest)]


def test_what_does_not_fit_is_refused(tmp_path):
    model = tiny_model()
    ids = prompt_ids(LENGTH)[0]
    tensors = tiny_tensors(KVzapScorer, model)
    folder = published(KVzapScorer, tensors, tmp_path)
    method = make_method("kvzap", BUDGET, scorer=str(folder), window=8)
    assert isinstance(method, KVzap)
    assert method.start(model, ids).length > 0
    with refused("scorer", "missing"):
        make_method("kvzap", BUDGET)
    with refused("scorer", "unknown"):
        make_method("snapkv", 64, scorer=str(folder))
    with refused("scorer", "file"):
        make_method("locret", 64, scorer=str(folder))
    with refused("needs", "state"):
        method.compress_state(model, prefill(model, ids))
    sizes: list[dict[str, Any]] = [{"hidden_size": 48}, {"num_key_value_heads": 4}, {"num_hidden_layers": 4}]
    for changes in sizes:
        other_model = tiny_model(**changes)
        with refused("scorer", "model"):
            method.start(other_model, ids)
    with refused("artifact", "unknown"):
        KVzap.from_pretrained("nowhere", 64)
    (tmp_path / "empty").mkdir()
    with refused("scorer", "missing"):
        KVzap.from_pretrained(tmp_path / "empty", 64)
    for name in ("q2.pt", "q4.pt"):
        torch.save({name: torch.ones(2), **tensors}, tmp_path / "empty" / name)
    with refused("scorer", "conflict"):
        KVzap.from_pretrained(tmp_path / "empty", 64)
    (tmp_path / "bad.pt").write_bytes(pickle.dumps({"layers.0.weight": Path("trap")}, 2))
    with refused("bad.pt", "file"):
        KVzap.from_pretrained(tmp_path / "bad.pt", 64)


def test_layers_of_a_model_with_images_have_a_longer_name():
    model = tiny_model()
    tensors = tiny_tensors(TrimKVScorer, model)
    longer_names = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    assert TrimKVScorer("longer", longer_names).digest == TrimKVScorer("tiny", tensors).digest


def test_results_of_other_weights_are_told_apart():
    model = tiny_model()
    tensors = tiny_tensors(KVzapScorer, model)
    same = {name: tensor.clone() for name, tensor in tensors.items()}
    doubled = {name: tensor * 2 for name, tensor in tensors.items()}

    def text_of(weights: dict[str, Tensor]) -> Any:
        return method_text(KVzap(64, TrainedScores(KVzapScorer("tiny", weights))))

    assert text_of(tensors)
    assert text_of(doubled)
    assert text_of(tensors) == text_of(same) != text_of(doubled)


def test_a_gate_of_zeros_is_one_against_its_16_sinks():
    model = tiny_model()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tiny_tensors(FastKVzipScorer, model).items()}
    method = FastKVzip(BUDGET, TrainedScores(FastKVzipScorer("tiny", tensors)), window=8)
    state = prefill(model, prompt_ids(49)[0], needs=method.needs())
    for scores in method.observer(model, state, method.reduce):
        assert_close(scores, torch.full_like(scores, 1 / 17))
