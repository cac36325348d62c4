"""Cache layers whose KV heads hold different numbers of entries: bytes, joining, reading, attention."""

import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache

from keepsight.runtime import join as batches
from keepsight.runtime import ragged_kernel
from keepsight.runtime.allocate import Adaptive, Pyramid
from keepsight.runtime.attention import Softmax, grouped_attention, recording
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.importance import Pool
from keepsight.runtime.join import join
from keepsight.runtime.layer import RaggedLayer
from keepsight.runtime.methods import SnapKV, StreamingLLM
from keepsight.runtime.state import Needs, prefill, read
from tests.close import assert_close
from tests.package_files import ROOT
from tests.runtime.scoring import recorded
from tests.tiny import FAMILIES, prompt_ids, tiny_model

DTYPES = [torch.float32, torch.bfloat16]
RAGGED = SnapKV(12, window=3, pool=Pool(kernel=3), allocate=Adaptive())
CAPPED = Softmax(0.3, 5.0, torch.arange(12.0))
METHODS = [RAGGED, SnapKV(12, window=3, allocate=Pyramid(beta=4)), StreamingLLM(9), StreamingLLM(20), FullCache()]


def random_cache(lengths, dtype=torch.float32, layers=2, seen=50):
    """A ragged cache [B, K] of random entries, and the same entries as lists."""
    generator = torch.Generator().manual_seed(0)
    counts = np.array(lengths)
    packed = []
    for _ in range(layers):
        packed.append(torch.randn(2, int(counts.sum()), 4, generator=generator, dtype=torch.float32).to(dtype))
    return Cache(layers=[RaggedLayer(keys, values, counts, seen) for keys, values in packed]), packed


@pytest.mark.parametrize("call", [0, 1 << 20], ids=["unpadded", "padded"])
@pytest.mark.parametrize(("family", "dtype"), [*zip(reversed(FAMILIES), DTYPES, strict=True)])
def test_joined_states_decode_as_they_do_alone(family, dtype, call, monkeypatch):
    """Dense, ragged and unevicted states of a padded batch, all in one."""
    monkeypatch.setattr(batches, "CALL", call)
    model = tiny_model(family).to(dtype)
    prefilled = prefill(model, *prompt_ids(30, 13))
    states = [method.compress_state(model, prefilled) for method in METHODS]
    tokens = prompt_ids(*[4] * 2 * len(states), seed=4)[0]
    joined, logits = read(model, join([state.copy() for state in states]), tokens)
    is_ragged = any(isinstance(layer, RaggedLayer) for layer in joined.layers)
    assert is_ragged == (call == 0)
    assert torch.equal(joined.counts(), torch.cat([state.counts() + 4 for state in states], dim=1))
    for index, state in enumerate(states):
        rows = slice(2 * index, 2 * index + 2)
        _, logits_alone = read(model, state.copy(), tokens[rows])
        assert_close(logits[rows], logits_alone, dtype)
    if dtype == torch.float32:
        ids = decode(model, join(states), stop_after(6, None), pad_token=0).ids
        answers = [decode(model, state.copy(), stop_after(6, None), pad_token=0).ids for state in states]
        assert torch.equal(ids, torch.cat(answers))


@pytest.mark.parametrize(
    ("method", "dtype"), [*((method, torch.float32) for method in METHODS), (RAGGED, torch.bfloat16)]
)
def test_reading_several_tokens_equals_reading_one_by_one(dtype, method):
    model = tiny_model("qwen3").to(dtype)
    state = method.compress_state(model, prefill(model, *prompt_ids(30, 13), needs=Needs(3, accumulated=True)))
    tokens = prompt_ids(6, 6, seed=5)[0]
    at_once, logits = read(model, state.copy(), tokens)
    one_by_one = state.copy()
    expected_logits = []
    for token in tokens.split(1, dim=1):
        one_by_one, token_logits = read(model, one_by_one, token)
        expected_logits.append(token_logits)
    assert_close(logits, torch.cat(expected_logits, dim=1), dtype)
    assert torch.equal(at_once.counts(), state.counts() + 6)
    assert torch.equal(at_once.tokens, one_by_one.tokens)
    assert torch.equal(at_once.lengths, one_by_one.lengths)
    for name in ("queries", "accumulated"):
        assert_close(recorded(at_once, name), recorded(one_by_one, name), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_recording_attention_computes_what_the_model_does(dtype, attention):
    """With a mask and without, in one pass and from a cache; whatever the model was loaded with."""
    model = tiny_model().to(dtype)
    model.set_attn_implementation(attention)
    ids, mask = prompt_ids(20, 13)
    outputs = []
    for guest in (nullcontext(), recording(model)):
        cache = DynamicCache()
        with torch.no_grad(), guest:
            start = model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache).logits[:, -1]
            continuation = model(ids[:, 15:], attention_mask=mask, past_key_values=cache).logits
            without_mask = model(ids[:1, -13:]).logits
        outputs.append([start, continuation, without_mask])
    plain, while_recording = outputs
    assert_close(plain, while_recording, dtype)


def test_a_kernel_may_lay_out_its_output_as_it_likes(monkeypatch):
    """The kernels that torch has on a GPU return [B, K, r, d] with the heads beside each other in memory."""
    query = torch.randn(2, 6, 3, 8)
    key = torch.randn(2, 2, 3, 8)
    value = torch.randn(2, 2, 3, 8)
    expected = grouped_attention(query, key, value, None, Softmax(0.3))
    attend = functional.scaled_dot_product_attention

    def by_token(*states, **options):
        return attend(*states, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", by_token)
    assert_close(grouped_attention(query, key, value, None, Softmax(0.3)), expected)


@pytest.mark.skipif(not ragged_kernel.HAS_TRITON, reason="Triton has no wheels for this platform, or is not installed")
@pytest.mark.parametrize(("rows", "softmax"), [(1, CAPPED), (2, Softmax(0.3)), (30, CAPPED)])
def test_the_kernel_attends_as_one_head_after_another(monkeypatch, rows, softmax):
    """Run by Triton's interpreter: heads of one entry and of several parts, in room that more tokens have."""
    monkeypatch.setattr(ragged_kernel, "PART", 32)
    monkeypatch.setattr(ragged_kernel, "BLOCK", 16)
    generator = torch.Generator().manual_seed(1)
    width = 24

    def random_states(*shape):
        return torch.randn(*shape, width, generator=generator)

    counts = np.array([[1, 40, 7], [90, 3, 32]])
    layer = RaggedLayer(random_states(counts.sum()), random_states(counts.sum()), counts, 200)
    layer.update(random_states(2, 3, 3), random_states(2, 3, 3))
    key = random_states(2, 3, rows)
    value = random_states(2, 3, rows)
    layer.update(key, value)
    query = random_states(2, 12, rows)
    expected = layer.attend(query, key, value, softmax)
    monkeypatch.setattr(ragged_kernel, "usable", lambda query, values: True)
    assert_close(layer.attend(query, key, value, softmax), expected)


def test_without_a_compiler_there_is_no_kernel(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(ragged_kernel.shutil, "which", lambda name: None)
    assert not ragged_kernel.can_compile.__wrapped__()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "ragged"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_compile_for_a_gpu(name, dtype):
    """No GPU is needed for that, but another process: this one's Triton interprets."""
    command = [sys.executable, "-m", "tests.runtime.compile_kernel", name, dtype]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert process.returncode == 0, process.stderr
    on_tensor_cores, has_code, shared_bytes = process.stdout.split()
    assert on_tensor_cores == "True"
    assert has_code == "True"
    assert int(shared_bytes) < 99 * 1024, "more bytes of shared memory than a program has"
