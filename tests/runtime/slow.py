"""A slow, obvious model: it keeps all it ever read, computes everything anew, and hides what was evicted."""

import torch
from transformers import AttentionInterface

from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods.drafts import Oracle
from keepsight.runtime.methods.lookaheadkv import LookaheadKV
from keepsight.runtime.methods.positions import StreamingLLM
from keepsight.runtime.methods.window import PromptWindow
from tests.close import assert_close
from tests.runtime.scoring import divide


class Slow:
    """One sequence under one `Evict` method, from the definitions, on dense masked attention.

    Attributes:
        ids: [1, M], everything read.
        alive: For each layer, [K, M] bool: what is not evicted.
        visible: For each layer, [K, M, M] bool: what each token could see when it was read.
    """

    def __init__(self, model, method):
        config = model.config
        self.model, self.method = model, method
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        self.ids = torch.empty(1, 0, dtype=torch.long)
        self.alive = [torch.ones(self.kv_heads, 0).bool() for _ in range(self.layers)]
        self.visible = [torch.ones(self.kv_heads, 0, 0).bool() for _ in range(self.layers)]
        self.own_queries = 0  # how many of the last tokens are certainly not evicted

    def read(self, ids):
        before, more = self.ids.shape[1], ids.shape[1]
        self.ids = torch.cat([self.ids, ids], dim=1)
        self.own_queries += more
        self.alive = [torch.cat([layer, torch.ones(self.kv_heads, more).bool()], dim=1) for layer in self.alive]
        for index, alive in enumerate(self.alive):
            visible = torch.zeros(self.kv_heads, before + more, before + more).bool()
            visible[:, :before, :before] = self.visible[index]
            for row in range(before, before + more):
                visible[:, row, : row + 1] = alive[:, : row + 1]
            self.visible[index] = visible

    def logits(self):
        """[1, V], of the last token."""
        return self.look()[0][:, -1]

    def look(self):
        """Logits [1, M, V]; for each layer queries [H, M, d], keys and values [K, M, d], as when they were read."""
        return self._pass(self.visible, input_ids=self.ids)

    def answer(self, tokens, every=0):
        """Greedy; as after `decode`, the last token is not read."""
        answer, since = [], 0
        while True:
            token = self.logits().argmax(-1, keepdim=True)
            answer.append(token)
            if len(answer) == tokens:
                return torch.cat(answer, dim=1)
            if every and since == every:
                self.evict()
                since = 0
            self.read(token)
            since += 1

    def check_decoding(self, ids, tokens):
        """Assert that decoding after a prompt gives this model's answer, logits and counts."""
        method = self.method
        self.read(ids)
        self.evict()
        expected = self.answer(tokens, method.every)
        eviction = method.periodic_eviction(self.model)
        after = decode(
            self.model, method.start(self.model, ids), stop_after(tokens, None), pad_token=0, eviction=eviction
        )
        assert after.ids.tolist() == expected.tolist()
        assert_close(after.state.logits, self.logits())
        assert after.state.counts()[:, 0].tolist() == [layer.sum(dim=1).tolist() for layer in self.alive]

    def evict(self):
        method, budget = self.method, self.method.budget - self.method.every
        if torch.stack([layer.sum(1) for layer in self.alive]).double().mean() > budget:
            importance = self.importance()
            counts = divide(method.allocate, [layer[None] for layer in importance], budget)
            for layer, count, alive in zip(importance, counts, self.alive, strict=True):
                for head in range(self.kv_heads):
                    order = sorted(range(len(layer[head])), key=lambda entry: (-layer[head, entry].item(), entry))
                    alive[head] = False
                    alive[head, order[: int(count[0, head])]] = True
        self.own_queries = min(self.own_queries, method.window)

    def importance(self):
        """For each layer, [K, M]: +inf where protected, -inf where evicted."""
        return [self._pooled(layer, alive) for layer, alive in zip(self._observed(), self.alive, strict=True)]

    def _pooled(self, observed, alive):
        """Heads averaged, neighbours pooled: [K, M], +inf where protected, -inf where evicted."""
        method, result = self.method, torch.full(alive.shape, -torch.inf)
        reach = method.pool.kernel // 2
        for head in range(self.kv_heads):
            entries = alive[head].nonzero()[:, 0].tolist()
            mean = observed[head * self.group : (head + 1) * self.group].mean(0)
            free = entries[: len(entries) - method.window]
            for place, entry in enumerate(free):
                near = free[max(place - reach, 0) : place + reach + 1]
                result[head, entry] = max(mean[each].item() for each in near)
            result[head, entries[len(entries) - method.window :]] = torch.inf
            result[head, entries[: method.sinks]] = torch.inf
        return result

    def _observed(self):
        """For each layer, [H, M]: how important each entry is to the method's observers."""
        method, observer = self.method, self.method.observer
        if type(method) is StreamingLLM:
            return [torch.arange(self.ids.shape[1]).float().expand(self.kv_heads * self.group, -1)] * self.layers
        if isinstance(observer, PromptWindow):
            return self._of_window(min(observer.window or method.window, self.own_queries))
        _, _, keys, values = self.look()
        if type(method) is Oracle:
            rows = {"input_ids": self._draft(observer.drafter.max_new_tokens)}
            return self._of_rows(rows, keys, values)
        assert type(method) is LookaheadKV
        with observer.artifact.attached(self.model) as tokens:
            return self._of_rows({"inputs_embeds": tokens[None]}, keys, values)

    def _of_window(self, rows):
        _, queries, keys, _ = self.look()
        length = self.ids.shape[1]
        causal = torch.ones(length, length).tril().bool()[-rows:]
        return [
            self._weights(query[:, -rows:], key, alive[:, None] & causal).mean(1)
            for query, key, alive in zip(queries, keys, self.alive, strict=True)
        ]

    def _draft(self, tokens):
        ahead = Slow(self.model, self.method)
        ahead.ids, ahead.alive, ahead.visible = self.ids, list(self.alive), list(self.visible)
        draft = ahead.answer(tokens)
        ends = (draft[0] == self.model.generation_config.eos_token_id).nonzero()[:, 0].tolist()
        return draft[:, : ends[0] + 1] if ends else draft

    def _of_rows(self, rows, keys, values):
        """Rows that follow what was read look back at what is alive."""
        count = next(iter(rows.values())).shape[1]
        causal = torch.ones(count, count).tril().bool()
        visible = [
            torch.cat([alive[:, None].expand(-1, count, -1), causal.expand(self.kv_heads, -1, -1)], dim=2)
            for alive in self.alive
        ]
        _, queries, seen, _ = self._pass(visible, past=(keys, values), **rows)
        return [
            self._weights(query, key, mask).mean(1)[:, : self.ids.shape[1]]
            for query, key, mask in zip(queries, seen, visible, strict=True)
        ]

    def _weights(self, query, key, visible):
        """[H, q, S]."""
        key, visible = (each.repeat_interleave(self.group, dim=0) for each in (key, visible))
        logits = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        return logits.masked_fill(~visible, -torch.inf).softmax(-1)

    @torch.no_grad()
    def _pass(self, visible, past=None, **rows):
        """Logits [1, q, V]; for each layer queries [H, q, d], keys and values [K, S, d], past ones included."""
        queries, keys, values = {}, {}, {}

        def dense(module, query, key, value, attention_mask, **_):
            layer = module.layer_idx
            queries[layer], keys[layer], values[layer] = query[0], key[0], value[0]
            if past is not None:
                keys[layer] = torch.cat([past[0][layer], key[0]], dim=1)
                values[layer] = torch.cat([past[1][layer], value[0]], dim=1)
            weights = self._weights(query[0], keys[layer], visible[layer])
            output = weights @ values[layer].repeat_interleave(self.group, dim=0)
            return output.transpose(0, 1)[None].contiguous(), None

        AttentionInterface.register("test_slow", dense)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("test_slow")
        first = 0 if past is None else past[0][0].shape[1]
        count = next(iter(rows.values())).shape[1]
        try:
            output = self.model(**rows, position_ids=torch.arange(first, first + count)[None], use_cache=False)
        finally:
            self.model.set_attn_implementation(before)
        order = range(self.layers)
        return output.logits, [queries[i] for i in order], [keys[i] for i in order], [values[i] for i in order]
