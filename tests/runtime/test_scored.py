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

LENGTH, BUDGET = 60, 20
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
        states = model(ids, output_hidden_states=True).hidden_states
        return [layer.input_layernorm(each)[0] for layer, each in zip(model.model.layers, states, strict=False)]


def linear(tensors: dict[str, Tensor], name: str, x: list[float], bias: bool = True) -> list[float]:
    rows = tensors[f"{name}.weight"].double().tolist()
    added = tensors[f"{name}.bias"].double().tolist() if bias else [0.0] * len(rows)
    return [sum(a * b for a, b in zip(row, x, strict=True)) + each for row, each in zip(rows, added, strict=True)]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def slow_kvzap(of: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    if "weight" in of:
        return linear({"f.weight": of["weight"], "f.bias": of["bias"]}, "f", x)
    return linear(of, "2", [z * 0.5 * (1 + math.erf(z / math.sqrt(2))) for z in linear(of, "0", x)])


def slow_fastkvzip(of: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    def normed(values: list[float], weight: Tensor) -> list[float]:
        size = math.sqrt(sum(v * v for v in values) / 16 + 1e-6)
        return [v / size * w for v, w in zip(values, weight.tolist(), strict=True)]

    def product(a: list[float], b: list[float]) -> float:
        return sum(v * w for v, w in zip(a, b, strict=True)) / 4

    queries, keys, scores = linear(of, "q_proj", x), linear(of, "k_proj", x, bias=False), []
    heads, _, group = of["b"].shape
    for head in range(heads):
        key, gates = normed(keys[16 * head : 16 * head + 16], of["k_norm.weight"]), []
        for member in range(group):
            place = 16 * (head * group + member)
            query = normed(queries[place : place + 16], of["q_norm.weight"])
            own = product(query, key) + float(of["b"][head, 0, member])
            sinks = [product(query, sink) for sink in of["k_base"][head, 0].tolist()]
            gates.append(1 / (1 + sum(math.exp(sink - own) for sink in sinks)))
        scores.append(sum(gates) / group)
    return scores


def slow_trimkv(of: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    """`left` tokens were read from this one on, itself included."""
    inner = [z * sigmoid(z) for z in linear(of, "linear1", x)]
    if "linear3.weight" in of:
        inner = [z * sigmoid(z) for z in linear(of, "linear2", inner)]
    last = linear(of, "linear3" if "linear3.weight" in of else "linear2", inner, bias=False)
    return [(left + 1) * math.log(sigmoid(z + c)) for z, c in zip(last, of["bias"].tolist(), strict=True)]


def slow_locret(of: dict[str, Tensor], x: list[float], left: int, model: Any, index: int) -> list[float]:
    attention, states = model.model.layers[index].self_attn, []
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        states += linear({"p.weight": part.weight}, "p", x, bias=False)
    inner = [z * sigmoid(z) for z in linear(of, "fc1", states, bias=False)]
    return linear(of, "fc2", inner, bias=False)


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
            _, place, rest = name.split(".", 2)
            layers.setdefault(place, {})[rest] = tensor
        torch.save({"module": [*layers.values()], "loss": 0.5, "acc": [0.1]}, path / "q2_dim16_sink16.pt")
        return path / "q2_dim16_sink16.pt"
    torch.save(tensors | {"model.embed_tokens.weight": torch.ones(2, 2)}, path / "weights.bin")
    return path


@pytest.mark.parametrize("name", METHODS)
def test_scores_and_kept_entries_are_those_of_the_paper(name, tmp_path):
    (kind, deep), model, ids = METHODS[name], tiny_model(), prompt_ids(LENGTH)[0]
    tensors = tiny_tensors(kind.scorer, model, deep=deep)
    window: dict[str, Any] = {} if issubclass(kind, TrimKV) else {"window": 8}
    method = kind.from_pretrained(published(kind.scorer, tensors, tmp_path), BUDGET, **window)
    state = prefill(model, ids, needs=method.needs())
    scores = method.observer(model, state, method.reduce)
    expected = []
    for index, inputs in enumerate(inputs_of(model, ids)):
        named = [(re.fullmatch(kind.scorer.names, key), each) for key, each in tensors.items()]
        part = {match[2]: each for match, each in named if match and int(match[1]) == index}
        rows = [
            SLOW[kind.scorer](part, x, LENGTH - place, model, index) for place, x in enumerate(inputs.double().tolist())
        ]
        expected.append(torch.tensor(rows).T)
        assert_close(scores[index][0], expected[-1])
    kept = method.select(state, method.importance(model, state))
    assert sum(int(each.sum()) for each in kept) == BUDGET * sum(each.shape[1] for each in kept)
    free, protected = slice(method.sinks, LENGTH - method.window), method.sinks + method.window
    assert all(bool(each[..., LENGTH - method.window :].all() and each[..., : method.sinks].all()) for each in kept)
    allocate: Any = method.allocate
    if "bal" in type(allocate).__name__:  # a threshold over all heads, but for what each is promised
        every = torch.stack(expected)[..., free]
        promised = every.topk(max(int(BUDGET * allocate.floor) - protected, 0), dim=-1).indices
        ranked = every.scatter(-1, promised, torch.inf)
        least = ranked.flatten().topk((BUDGET - protected) * every[..., 0].numel()).values[-1]
        assert torch.equal(torch.stack(kept)[:, 0, :, free], ranked >= least)
    else:
        for each, score in zip(kept, expected, strict=True):
            best = score[:, free].topk(BUDGET - protected).indices + method.sinks
            assert [{*row.nonzero()[:, 0].tolist()} - {*range(LENGTH - method.window, LENGTH)} for row in each[0]] == [
                {*row.tolist()} for row in best
            ]


@pytest.mark.parametrize("name", METHODS)
def test_batches_chunks_and_eviction_while_reading_keep_the_same(name):
    (kind, _), model, (ids, mask) = METHODS[name], tiny_model(), prompt_ids(LENGTH, 43)
    window: dict[str, Any] = {} if issubclass(kind, TrimKV) else {"window": 8}
    method = kind(BUDGET, TrainedScores(tiny_scorer(kind.scorer, model)), **window)
    whole = method.compress_state(model, prefill(model, ids, mask, needs=method.needs()))
    for state in (method.start(model, ids, mask), method.start(model, ids, mask, chunk=16)):
        for one, other in zip(whole.entries(), state.entries(), strict=True):
            assert_close(one.keys, other.keys)
    alone = method.start(model, ids[1:, LENGTH - 43 :])
    assert torch.equal(alone.counts()[:, 0], whole.counts()[:, 1])


def test_entries_fade_while_decoding():
    """Evicting every 4 tokens keeps what remains of all entries, prompt and answer alike."""
    model, ids = tiny_model(), prompt_ids(LENGTH)[0]
    tensors = {name: each * 0 for name, each in tiny_tensors(TrimKVScorer, model).items()}
    scorer = TrimKVScorer("tiny", tensors)
    method = TrimKV(BUDGET, TrainedScores(scorer), every=4)
    assert generate(model, ids, method, max_new_tokens=11).shape[1] <= 11
    state = method.start(model, ids)
    for _ in range(2):
        state = method.compress_state(model, read(model, state.copy(), prompt_ids(4, seed=2)[0])[0])
        newest = state.cache.get_seq_length()
        for layer in state.layers:  # equal rates keep the most recent
            assert layer.recorded and layer.recorded.scores[scorer][0, 1].tolist() == [*range(newest - 16, newest)]


def test_what_does_not_fit_is_refused(tmp_path):
    model, ids = tiny_model(), prompt_ids(LENGTH)[0]
    tensors = tiny_tensors(KVzapScorer, model)
    folder = published(KVzapScorer, tensors, tmp_path)
    method = make_method("kvzap", BUDGET, scorer=str(folder), window=8)
    assert isinstance(method, KVzap) and method.start(model, ids).length > 0
    with refused("scorer", "missing"):
        make_method("kvzap", BUDGET)
    with refused("scorer", "unknown"):
        make_method("snapkv", 64, scorer=str(folder))
    with refused("scorer", "file"):
        make_method("locret", 64, scorer=str(folder))
    with refused("needs", "state"):
        method.compress_state(model, prefill(model, ids))
    for other in (
        tiny_model(hidden_size=48),
        tiny_model(num_key_value_heads=4),
        tiny_model(num_hidden_layers=4),
    ):
        with refused("scorer", "model"):
            method.start(other, ids)
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
    longer = {name.replace("model.", "model.language_model."): each for name, each in tensors.items()}
    assert TrimKVScorer("longer", longer).digest == TrimKVScorer("tiny", tensors).digest


def test_results_of_other_weights_are_told_apart():
    model = tiny_model()
    tensors = tiny_tensors(KVzapScorer, model)
    same, other = ({name: each * factor for name, each in tensors.items()} for factor in (1, 2))
    texts = [method_text(KVzap(64, TrainedScores(KVzapScorer("tiny", each)))) for each in (tensors, same, other)]
    assert texts[0] == texts[1] != texts[2] and all(texts)


def test_a_gate_of_zeros_is_one_against_its_16_sinks():
    model = tiny_model()
    tensors = {name: each * 0 for name, each in tiny_tensors(FastKVzipScorer, model).items()}
    method = FastKVzip(BUDGET, TrainedScores(FastKVzipScorer("tiny", tensors)), window=8)
    state = prefill(model, prompt_ids(49)[0], needs=method.needs())
    for each in method.observer(model, state, method.reduce):
        assert_close(each, torch.full_like(each, 1 / 17))
