"""A slow SpeCache, written from its definition, for tests: dense keys and values, loops over heads."""

import torch
from transformers.cache_utils import DynamicCache

from keepsight.runtime.attention import run
from keepsight.runtime.quantized.packing import Quantizer
from tests.runtime.asked import answer_with, asking


def dequantised(quantizer: Quantizer, residual: int, keys, values):
    """What is read of T tokens [B, K, T, d] once they have settled: keys, values, and how many keys are packed."""
    length = keys.shape[2]
    packed_keys = length - length % residual
    packed_values = max(length - residual, 0)
    read_keys = keys.clone()
    read_values = values.clone()
    read_keys[:, :, :packed_keys] = quantizer.unpack_keys(quantizer.pack_keys(keys[:, :, :packed_keys]))
    read_values[:, :, :packed_values] = quantizer.unpack_values(quantizer.pack_values(values[:, :, :packed_values]))
    return read_keys, read_values, packed_keys


class SlowSpeCache:
    """The base model with a SpeCache that keeps everything in full precision and pretends."""

    def __init__(self, model, method, ids):
        cache = DynamicCache()
        self.logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:]
        self.model = model
        self.method = method
        self.cache = asking(cache)
        self.length = ids.shape[1]
        self.guess = None
        self.fetched = {}

    def read(self, token):
        """Logits [B, 1, V] after one token [B, 1]."""
        if not self.method.speculative:
            logits = self._forward(token, fetch_now=True)
            self.length += 1
            return logits
        if self.guess is None:
            self.guess = self._forward(token, accepted=0)[:, -1:].argmax(-1)
            self.cache.crop(-1)
        logits = self._forward(torch.cat([token, self.guess], dim=1), accepted=1)
        self.cache.crop(-1)
        self.guess = logits[:, -1:].argmax(-1)
        self.length += 1
        return logits[:, :1]

    def _forward(self, tokens, accepted=0, fetch_now=False):
        next_fetched = {}

        def attend(layer, query, keys, values, scaling):
            kv_heads = keys.shape[1]
            mixed_keys, mixed_values, packed = self._settled(keys, values)
            if fetch_now:
                self.fetched[layer] = self._top(_weights(query, mixed_keys, scaling), kv_heads, packed)
            for row, heads in enumerate(self.fetched.get(layer, [])):
                for head, indices in enumerate(heads):
                    mixed_keys[row, head, indices] = keys[row, head, indices]
                    mixed_values[row, head, indices] = values[row, head, indices]
            weights = _weights(query, mixed_keys, scaling)
            next_length = self.length + accepted
            next_packed = next_length - next_length % self.method.residual
            next_fetched[layer] = self._top(weights, kv_heads, next_packed)
            group = query.shape[1] // kv_heads
            return (weights @ mixed_values.repeat_interleave(group, dim=1)).transpose(1, 2).contiguous()

        positions = torch.arange(self.length, self.length + tokens.shape[1])[None]
        answer_with(self.cache, attend)
        logits = run(self.model, self.cache, input_ids=tokens, position_ids=positions).logits
        if not fetch_now:
            self.fetched = next_fetched
        return logits

    def _settled(self, keys, values):
        """Keys and values as they are read before anything is fetched, and how many keys are packed."""
        settled_keys = keys[:, :, : self.length]
        settled_values = values[:, :, : self.length]
        read_keys, read_values, packed = dequantised(
            self.method.quantizer, self.method.residual, settled_keys, settled_values
        )
        mixed_keys = torch.cat([read_keys, keys[:, :, self.length :]], dim=2)
        mixed_values = torch.cat([read_values, values[:, :, self.length :]], dim=2)
        return mixed_keys, mixed_values, packed

    def _top(self, weights, kv_heads, packed):
        """By row and KV head, the indices of the entries that the last query looks at most."""
        group = weights.shape[1] // kv_heads
        top = []
        for row in weights[:, :, -1, :packed]:
            row_top = []
            for head in row.split(group):
                scores = head.amax(0) if self.method.heads == "max" else head.mean(0)
                row_top.append(scores.argsort(descending=True)[: self.method.topk])
            top.append(row_top)
        return top


def _weights(query, keys, scaling):
    """Causal softmax [B, H, q, S] of the last q of S tokens."""
    rows = query.shape[2]
    length = keys.shape[2]
    group = query.shape[1] // keys.shape[1]
    logits = query @ keys.repeat_interleave(group, dim=1).transpose(-1, -2) * scaling
    hidden = torch.arange(length) > torch.arange(length - rows, length)[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
