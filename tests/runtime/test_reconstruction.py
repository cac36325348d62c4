"""KVzip, KVzip+ and KVgrad against written-out definitions: plain passes over prompt and probe, loops in float64."""

import math
from dataclasses import dataclass
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

BUDGET = 16
CHUNK = 20
LAYERS = 3
KV_HEADS = 2
GROUP = 2
"""Query heads of a KV head."""
WIDTH = 8
TOKENIZER = tiny_tokenizer()
USER = TOKENIZER.encode("<|user|>")[0]


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("qwen3", vocab_size=512, pad_token_id=511)  # whose embedding is 0


def probes(prompt):
    """What repeats each chunk: its start, and the ids. The template's <|user|> is not repeated."""
    first = int(prompt[0] == USER)
    for start in range(first, len(prompt), CHUNK):
        if start == first:
            request = TOKENIZER.encode("\n\nRepeat the previous context exactly.")
        else:
            text = "\n\nRepeat the part of the previous context exactly, starting with"
            request = TOKENIZER.encode(text) + prompt[start - 8 : start]
        yield start, request + TOKENIZER.encode("<|end|><|assistant|>") + prompt[start : start + CHUNK]


@dataclass
class LayerPass:
    """What a layer saw of prompt and probe, T tokens.

    Attributes:
        query: [H, T, d] float64.
        key: [K, T, d] float64.
        input_norms: Norms of the hidden states that the attention reads, [T].
        gradient_norms: Norms of the gradients at the attention's output, [T].
    """

    query: torch.Tensor
    key: torch.Tensor
    input_norms: torch.Tensor
    gradient_norms: torch.Tensor


def read(model, prompt, probe) -> list[LayerPass]:
    """Each layer's part in one pass over prompt and probe."""
    queries_and_keys: list[Any] = []
    inputs: list[Any] = []
    attention_outputs: list[Any] = []
    last_outputs: list[Any] = []

    def record_input(module, args, options):
        inputs.append(options["hidden_states"].detach())

    def record_attention_output(module, args, output):
        attention_outputs.append(output)

    def record_last_output(module, args, output):
        last_outputs.append(output)

    layers = model.model.layers
    hooks = []
    for layer in layers:
        hooks.append(layer.self_attn.register_forward_pre_hook(record_input, with_kwargs=True))
        hooks.append(layer.self_attn.o_proj.register_forward_hook(record_attention_output))
    hooks.append(layers[-1].register_forward_hook(record_last_output))
    with recording(model):
        model(
            torch.tensor([prompt + probe]),
            recorder=lambda _, query, key, *__: queries_and_keys.append((query[0].double(), key[0].double())),
        )
    for hook in hooks:
        hook.remove()

    (last_output,) = last_outputs
    phi = last_output[0, len(prompt) :].square().sum()
    gradients = torch.autograd.grad(phi, attention_outputs)
    passes = []
    for (query, key), hidden, gradient in zip(queries_and_keys, inputs, gradients, strict=True):
        passes.append(LayerPass(query, key, hidden[0].norm(dim=-1), gradient[0].norm(dim=-1)))
    return passes


def dot(left, right):
    return sum(x * y for x, y in zip(left.tolist(), right.tolist(), strict=True))


def probe_scores(name, layer: LayerPass, head, entries, written_norms, probe_rows):
    """The largest score of each entry over the rows of a probe, for one query head."""
    best = [0.0] * len(entries)
    for row in probe_rows:
        seen = [*entries, *range(probe_rows.start, row + 1)]
        powers = []
        for position in seen:
            logit = dot(layer.query[head, row], layer.key[head // GROUP, position]) / math.sqrt(WIDTH)
            powers.append(math.exp(logit))
        factor = 1.0
        if name == "kvzip+":
            factor = 1 / layer.input_norms[row].item()
        if name == "kvgrad":
            factor = layer.gradient_norms[row].item()
        for index, written_norm in enumerate(written_norms):
            score = powers[index] / sum(powers)
            if name != "kvzip":
                score *= written_norm
            best[index] = max(best[index], score * factor)
    return best


def reference_scores(name, model, prompt) -> dict[tuple[int, int, int], float]:
    """The score of each layer, KV head and entry."""
    values = [layer.values[0] for layer in model(torch.tensor([prompt])).past_key_values.layers]
    scores: dict[tuple[int, int, int], float] = {}
    for start, probe in probes(prompt):
        entries = [*range(min(4, start)), *range(start, min(start + CHUNK, len(prompt)))]
        probe_rows = range(len(prompt), len(prompt) + len(probe))
        for index, layer in enumerate(read(model, prompt, probe)):
            output_weight = model.model.layers[index].self_attn.o_proj.weight
            for head in range(KV_HEADS * GROUP):
                kv_head = head // GROUP
                head_weight = output_weight[:, head * WIDTH : (head + 1) * WIDTH]
                written_norms = [(head_weight @ values[index][kv_head, entry]).norm().item() for entry in entries]
                best = probe_scores(name, layer, head, entries, written_norms, probe_rows)
                for entry, score in zip(entries, best, strict=True):
                    if entry >= start:
                        scores[index, kv_head, entry] = max(scores.get((index, kv_head, entry), 0.0), score)
    return scores


def reference(name, model, prompt, budget=BUDGET):
    """The kept entries of each layer and KV head: 4 sinks of each, and the best of all."""
    scores = reference_scores(name, model, prompt)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]
    candidates = [entry for entry in scores if entry[2] >= 4]
    ranked = sorted(candidates, key=lambda entry: (-scores[entry], entry))
    best = ranked[: len(heads) * (budget - 4)]
    kept = [[[0, 1, 2, 3] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
    for layer, head, position in sorted(best):
        kept[layer][head].append(position)
    return kept


def method_of(name, budget=BUDGET):
    return make_method(name, budget, Resources(tokenizer=TOKENIZER), observer={"chunk": CHUNK})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvzip", "kvzip+", "kvgrad"])
def test_methods_keep_what_their_definitions_say(name, tiny):
    """Alone, and in a batch with padding, in which the shortest prompt fits the budget."""
    ids, mask = prompt_ids(53, 38, 9, seed=1)
    batch = kept_entries(method_of(name), tiny, ids, mask)
    chat = torch.cat([torch.tensor([[USER]]), ids[:1, 1:]], dim=1)
    batch_with_chat = kept_entries(method_of(name), tiny, torch.cat([ids[1:2], chat]), mask[[1, 0]])
    assert batch_with_chat[1] == reference(name, tiny, chat[0].tolist())
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
    assert batch == inferred
    assert batch[1] == kept_entries(method, tiny, ids[1:2, 16:])[0]
    for parameter in tiny.parameters():
        assert parameter.requires_grad
        assert parameter.grad is None
    assert method.start(tiny, ids, mask).counts().sum(dim=(0, 2)).tolist() == [96, 96, 48]


@pytest.mark.parametrize("name", ["kvzip", "kvgrad"])
def test_an_evicted_cache_can_be_evicted_again(name, tiny):
    """While decoding, and at the next turn, when entries no longer tell their positions."""
    ids = prompt_ids(41, seed=3)[0]
    answer = generate(tiny, ids, method_of(name, 24), max_new_tokens=8, eos_token_id=None)
    assert answer.shape == (1, 8)

    conversation = Conversation(tiny, method_of(name, 24))
    conversation.say(ids, max_new_tokens=8, eos_token_id=None)
    conversation.say(ids[:, :11], max_new_tokens=1, eos_token_id=None)
    assert conversation.state is not None
    assert int(conversation.state.counts().sum()) == 6 * 24


def test_options_and_limits(tiny):
    tokenizer: Any = TOKENIZER
    resources = Resources(tokenizer=tokenizer)
    assert Reconstruction(tokenizer).chunk == 2048  # kvpress's
    assert Attribution(tokenizer).chunk == 256  # kvpress's
    assert method_of("kvgrad") == KVgrad(BUDGET, Attribution(tokenizer, CHUNK))
    assert make_method("kvzip+", 9, resources) == KVzipPlus(9, Reconstruction(tokenizer, normalized=True))
    KVzip(BUDGET, Reconstruction(tokenizer)).check(100, 256)
    with refused("prompt", "range"):
        KVzip(BUDGET, Reconstruction(tokenizer)).check(100, 200)
    with refused("chunk", "range"):
        Reconstruction(tokenizer, 0)
    with refused("normalized", "conflict"):
        Attribution(tokenizer, normalized=True)
