"""A slow SpeCache, written from its definition, for tests: dense keys and values, loops over heads."""

import torch
from transformers.cache_utils import DynamicCache

from keepsight.runtime.attention import run
from keepsight.runtime.quantized.packing import Quantizer
from tests.runtime.asked import answer_with, asking


def dequantised(quantizer: Quantizer, residual: int, keys, values):
    """What is read of T tokens [B, K, T, d] once they have settled: keys, values, and how many keys are packed."""
    length = keys.shape[2]
    packed, old = length - length % residual, max(length - residual, 0)
    read_keys, read_values = keys.clone(), values.clone()
    read_keys[:, :, :packed] = quantizer.unpack_keys(quantizer.pack_keys(keys[:, :, :packed]))
    read_values[:, :, :old] = quantizer.unpack_values(quantizer.pack_values(values[:, :, :old]))
    return read_keys, read_values, packed


class SlowSpeCache:
    """The base model with a SpeCache that keeps everything in full precision and pretends."""

    def __init__(self, model, method, ids):
        cache = DynamicCache()
        self.logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:]
        self.model, self.method, self.cache = model, method, asking(cache)
        self.length, self.guess, self.chosen = ids.shape[1], None, {}

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
        coming = {}

        def attend(layer, query, keys, values, scaling):
            read_keys, read_values, packed = dequantised(
                self.method.quantizer, self.method.residual, keys[:, :, : self.length], values[:, :, : self.length]
            )
            mixed_keys = torch.cat([read_keys, keys[:, :, self.length :]], dim=2)
            mixed_values = torch.cat([read_values, values[:, :, self.length :]], dim=2)
            if fetch_now:
                self.chosen[layer] = self._top(_weights(query, mixed_keys, scaling), keys.shape[1], packed)
            for row, heads in enumerate(self.chosen.get(layer, [])):
                for head, indices in enumerate(heads):
                    mixed_keys[row, head, indices] = keys[row, head, indices]
                    mixed_values[row, head, indices] = values[row, head, indices]
            weights = _weights(query, mixed_keys, scaling)
            after = self.length + accepted
            coming[layer] = self._top(weights, keys.shape[1], after - after % self.method.residual)
            group = query.shape[1] // keys.shape[1]
            return (weights @ mixed_values.repeat_interleave(group, dim=1)).transpose(1, 2).contiguous()

        positions = torch.arange(self.length, self.length + tokens.shape[1])[None]
        answer_with(self.cache, attend)
        logits = run(self.model, self.cache, input_ids=tokens, position_ids=positions).logits
        if not fetch_now:
            self.chosen = coming
        return logits

    def _top(self, weights, kv_heads, packed):
        """By row and KV head, the indices of the entries that the last query looks at most."""
        group = weights.shape[1] // kv_heads
        chosen = []
        for row in weights[:, :, -1, :packed]:
            heads = row.split(group)
            reduced = [head.amax(0) if self.method.heads == "max" else head.mean(0) for head in heads]
            chosen.append([each.argsort(descending=True)[: self.method.topk] for each in reduced])
        return chosen


def _weights(query, keys, scaling):
    """Causal softmax [B, H, q, S] of the last q of S tokens."""
    rows, length = query.shape[2], keys.shape[2]
    logits = query @ keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1).transpose(-1, -2) * scaling
    hidden = torch.arange(length) > torch.arange(length - rows, length)[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
