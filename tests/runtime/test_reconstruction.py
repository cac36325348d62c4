"""KVzip, KVzip+ and KVgrad against written-out definitions: plain passes over prompt and probe, loops in float64."""

import math
from typing import Any

import pytest
import torch

from keepsight.runtime.attention import recording
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import KVgrad, KVzip, KVzipPlus, Resources, make_method
from keepsight.runtime.methods.reconstruction import Attribution, Reconstruction
from tests.refused import refused
from tests.runtime.scoring import kept_entries
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

BUDGET, CHUNK, GROUP, WIDTH = 16, 20, 2, 8
TOKENIZER = tiny_tokenizer()
USER = TOKENIZER.encode("<|user|>")[0]


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("qwen3", vocab_size=512, pad_token_id=511)  # whose embedding is 0


def probes(prompt):
    """What repeats each chunk: its first place, and the ids. The template's <|user|> is not repeated."""
    first = int(prompt[0] == USER)
    for start in range(first, len(prompt), CHUNK):
        text = "\n\nRepeat the previous context exactly."
        if start > first:
            text = "\n\nRepeat the part of the previous context exactly, starting with"
        asked = TOKENIZER.encode(text) + (prompt[start - 8 : start] if start > first else [])
        yield start, asked + TOKENIZER.encode("<|end|><|assistant|>") + prompt[start : start + CHUNK]


def read(model, prompt, probe):
    """Of each layer: queries and keys [heads][tokens][d] of prompt and probe, and the norms of rows for each method."""
    seen: list[Any] = []
    inputs: list[Any] = []
    outputs: list[Any] = []
    hooks = [layer.self_attn.register_forward_pre_hook(_into(inputs), with_kwargs=True) for layer in model.model.layers]
    hooks += [layer.self_attn.o_proj.register_forward_hook(lambda *a: outputs.append(a[2])) for layer in _layers(model)]
    hooks += [_layers(model)[-1].register_forward_hook(lambda *a: outputs.append(a[2]))]
    with recording(model):
        model(torch.tensor([prompt + probe]), recorder=lambda _, query, key, *__: seen.append((query[0], key[0])))
    for hook in hooks:
        hook.remove()
    *added, last = outputs
    phi = last[0, len(prompt) :].square().sum()
    gradients = torch.autograd.grad(phi, added)
    norms = [(each[0].norm(dim=-1), slope[0].norm(dim=-1)) for each, slope in zip(inputs, gradients, strict=True)]
    return [(*map(torch.Tensor.double, pair), *of) for pair, of in zip(seen, norms, strict=True)]


def _layers(model):
    return model.model.layers


def _into(inputs):
    return lambda module, args, kwargs: inputs.append(kwargs["hidden_states"].detach())


def dot(one, other):
    return sum(x * y for x, y in zip(one.tolist(), other.tolist(), strict=True))


def reference(name, model, prompt, budget=BUDGET):
    """The kept entries of each layer and KV head."""
    values = [layer.values[0] for layer in model(torch.tensor([prompt])).past_key_values.layers]
    scores: dict[tuple[int, int, int], float] = {}
    for start, probe in probes(prompt):
        entries = [*range(min(4, start)), *range(start, min(start + CHUNK, len(prompt)))]
        for layer, (query, key, read_norms, slopes) in enumerate(read(model, prompt, probe)):
            weight = _layers(model)[layer].self_attn.o_proj.weight
            for head in range(4):
                part = weight[:, head * WIDTH : (head + 1) * WIDTH]
                written = [(part @ values[layer][head // GROUP, entry]).norm().item() for entry in entries]
                for row in range(len(prompt), len(prompt) + len(probe)):
                    seen = [*entries, *range(len(prompt), row + 1)]
                    powers = [
                        math.exp(dot(query[head, row], key[head // GROUP, each]) / math.sqrt(WIDTH)) for each in seen
                    ]
                    for place, entry in enumerate(entries):
                        score = powers[place] / sum(powers)
                        if name != "kvzip":
                            score *= written[place]
                        score *= {"kvzip+": 1 / read_norms[row].item(), "kvgrad": slopes[row].item()}.get(name, 1.0)
                        at = layer, head // GROUP, entry
                        if entry >= start:
                            scores[at] = max(scores.get(at, 0.0), score)
    sinks = [(layer, head, entry) for layer in range(3) for head in range(2) for entry in range(4)]
    best = sorted((at for at in scores if at[2] >= 4), key=lambda at: (-scores[at], at))
    chosen = {*sinks, *best[: 6 * budget - len(sinks)]}
    return [[[e for e in range(len(prompt)) if (layer, head, e) in chosen] for head in range(2)] for layer in range(3)]


def method_of(name, budget=BUDGET):
    return make_method(name, budget, Resources(tokenizer=TOKENIZER), observer={"chunk": CHUNK})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvzip", "kvzip+", "kvgrad"])
def test_methods_keep_what_their_definitions_say(name, tiny):
    """Alone, and in a batch with padding, in which the shortest prompt fits the budget."""
    ids, mask = prompt_ids(53, 38, 9, seed=1)
    batch = kept_entries(method_of(name), tiny, ids, mask)
    chat = torch.cat([torch.tensor([[USER]]), ids[:1, 1:]], dim=1)
    beside = torch.cat([ids[1:2], chat])
    assert kept_entries(method_of(name), tiny, beside, mask[[1, 0]])[1] == reference(name, tiny, chat[0].tolist())
    for row, length in enumerate((53, 38)):
        alone = ids[row : row + 1, 53 - length :]
        expected = reference(name, tiny, alone[0].tolist())
        assert kept_entries(method_of(name), tiny, alone)[0] == expected
        assert batch[row] == expected
    assert batch[2] == [[[*range(9)]] * 2] * 3


@pytest.mark.parametrize("name", ["kvzip", "kvzip+", "kvgrad"])
def test_batches_chunks_and_inference_mode_change_nothing(name, tiny):
    """As little as the passes change the model: its weights stay trainable, and get no gradient."""
    method = method_of(name)
    ids, mask = prompt_ids(47, 31, 8, seed=2)
    batch = kept_entries(method, tiny, ids, mask)
    with torch.inference_mode():
        inferred = kept_entries(method, tiny, ids, mask)
    assert batch == inferred and batch[1] == kept_entries(method, tiny, ids[1:2, 16:])[0]
    assert all(each.requires_grad and each.grad is None for each in tiny.parameters())
    assert method.start(tiny, ids, mask).counts().sum(dim=(0, 2)).tolist() == [96, 96, 48]


@pytest.mark.parametrize("name", ["kvzip", "kvgrad"])
def test_an_evicted_cache_can_be_evicted_again(name, tiny):
    """While decoding, and at the next turn, when entries no longer tell their places."""
    ids = prompt_ids(41, seed=3)[0]
    whole = generate(tiny, ids, method_of(name, 24), max_new_tokens=8, eos_token_id=None)
    assert whole.shape == (1, 8)
    talk = Conversation(tiny, method_of(name, 24))
    talk.say(ids, max_new_tokens=8, eos_token_id=None)
    talk.say(ids[:, :11], max_new_tokens=1, eos_token_id=None)
    assert talk.state is not None and int(talk.state.counts().sum()) == 6 * 24


def test_options_and_limits(tiny):
    given: Any = TOKENIZER
    assert (Reconstruction(given).chunk, Attribution(given).chunk) == (2048, 256)  # kvpress's
    assert method_of("kvgrad") == KVgrad(BUDGET, Attribution(given, CHUNK))
    assert make_method("kvzip+", 9, Resources(tokenizer=given)) == KVzipPlus(9, Reconstruction(given, normalized=True))
    KVzip(BUDGET, Reconstruction(given)).check(100, 256)
    with refused("prompt", "range"):
        KVzip(BUDGET, Reconstruction(given)).check(100, 200)
    with refused("chunk", "range"):
        Reconstruction(given, 0)
    with refused("normalized", "conflict"):
        Attribution(given, normalized=True)
