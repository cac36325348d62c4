"""A slow, obvious model: it keeps all it ever read, computes everything anew, and hides what was evicted."""

import torch
from transformers import AttentionInterface

from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods.drafts import Oracle
from keepsight.runtime.methods.lookaheadkv import LookaheadKV
from keepsight.runtime.methods.positions import StreamingLLM
from keepsight.runtime.methods.window import PromptWindow
from tests.close import assert_close
from tests.runtime.dense import best_of
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
        self.model = model
        self.method = method
        self.layers = config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        self.ids = torch.empty(1, 0, dtype=torch.long)
        self.alive = [torch.ones(self.kv_heads, 0).bool() for _ in range(self.layers)]
        self.visible = [torch.ones(self.kv_heads, 0, 0).bool() for _ in range(self.layers)]
        self.certain_queries = 0  # how many of the last tokens are certainly not evicted

    def read(self, ids):
        """Append tokens [1, m], which see what is alive."""
        past = self.ids.shape[1]
        count = ids.shape[1]
        self.ids = torch.cat([self.ids, ids], dim=1)
        self.certain_queries += count
        new_entries = torch.ones(self.kv_heads, count).bool()
        for layer in range(self.layers):
            alive = torch.cat([self.alive[layer], new_entries], dim=1)
            visible = torch.zeros(self.kv_heads, past + count, past + count).bool()
            visible[:, :past, :past] = self.visible[layer]
            for query in range(past, past + count):
                visible[:, query, : query + 1] = alive[:, : query + 1]
            self.alive[layer] = alive
            self.visible[layer] = visible

    def logits(self):
        """[1, V], of the last token."""
        return self.look()[0][:, -1]

    def look(self):
        """Logits [1, M, V]; for each layer queries [H, M, d], keys and values [K, M, d], as when they were read."""
        return self._pass(self.visible, input_ids=self.ids)

    def answer(self, tokens, every=0):
        """Greedy; as after `decode`, the last token is not read."""
        answer = []
        read_since_eviction = 0
        while True:
            token = self.logits().argmax(-1, keepdim=True)
            answer.append(token)
            if len(answer) == tokens:
                return torch.cat(answer, dim=1)
            if every and read_since_eviction == every:
                self.evict()
                read_since_eviction = 0
            self.read(token)
            read_since_eviction += 1

    def check_decoding(self, ids, tokens):
        """Assert that decoding after a prompt gives this model's answer, logits and counts."""
        method = self.method
        self.read(ids)
        self.evict()
        expected = self.answer(tokens, method.every)
        state = method.start(self.model, ids)
        eviction = method.periodic_eviction(self.model)
        decoded = decode(self.model, state, stop_after(tokens, None), pad_token=0, eviction=eviction)
        assert decoded.ids.tolist() == expected.tolist()
        assert_close(decoded.state.logits, self.logits())
        expected_counts = [alive.sum(dim=1).tolist() for alive in self.alive]
        assert decoded.state.counts()[:, 0].tolist() == expected_counts

    def evict(self):
        """Keep the budget's best entries, if there are more."""
        method = self.method
        budget = method.budget - method.every
        counts_alive = torch.stack([alive.sum(1) for alive in self.alive])
        if counts_alive.double().mean() > budget:
            importance = self.importance()
            counts = divide(method.allocate, [scores[None] for scores in importance], budget)
            for scores, count, alive in zip(importance, counts, self.alive, strict=True):
                for head in range(self.kv_heads):
                    kept = best_of(scores[head].tolist(), int(count[0, head]))
                    alive[head] = False
                    alive[head, kept] = True
        self.certain_queries = min(self.certain_queries, method.window)

    def importance(self):
        """For each layer, [K, M]: +inf where protected, -inf where evicted."""
        observed = self._observed()
        return [self._pooled(scores, alive) for scores, alive in zip(observed, self.alive, strict=True)]

    def _pooled(self, observed, alive):
        """Heads averaged, neighbours pooled: [K, M], +inf where protected, -inf where evicted."""
        method = self.method
        result = torch.full(alive.shape, -torch.inf)
        reach = method.pool.kernel // 2
        for head in range(self.kv_heads):
            entries = alive[head].nonzero()[:, 0].tolist()
            mean = observed[head * self.group : (head + 1) * self.group].mean(0)
            window_start = len(entries) - method.window
            before_window = entries[:window_start]
            for index, entry in enumerate(before_window):
                neighbours = before_window[max(index - reach, 0) : index + reach + 1]
                result[head, entry] = mean[neighbours].max()
            result[head, entries[window_start:]] = torch.inf
            result[head, entries[: method.sinks]] = torch.inf
        return result

    def _observed(self):
        """For each layer, [H, M]: how important each entry is to the method's observers."""
        method = self.method
        observer = method.observer
        if type(method) is StreamingLLM:
            heads = self.kv_heads * self.group
            positions = torch.arange(self.ids.shape[1]).float()
            return [positions.expand(heads, -1)] * self.layers
        if isinstance(observer, PromptWindow):
            window = observer.window or method.window
            return self._observed_by_window(min(window, self.certain_queries))
        _, _, keys, values = self.look()
        if type(method) is Oracle:
            draft = self._draft(observer.drafter.max_new_tokens)
            return self._observed_by_rows({"input_ids": draft}, keys, values)
        assert type(method) is LookaheadKV
        with observer.artifact.attached(self.model) as tokens:
            return self._observed_by_rows({"inputs_embeds": tokens[None]}, keys, values)

    def _observed_by_window(self, rows):
        """The mean attention of the last tokens."""
        _, queries, keys, _ = self.look()
        length = self.ids.shape[1]
        causal = torch.ones(length, length).tril().bool()[-rows:]
        return [
            self._weights(query[:, -rows:], key, alive[:, None] & causal).mean(1)
            for query, key, alive in zip(queries, keys, self.alive, strict=True)
        ]

    def _draft(self, tokens):
        """The answer [1, T], up to and including its end token."""
        ahead = Slow(self.model, self.method)
        ahead.ids = self.ids
        ahead.alive = list(self.alive)
        ahead.visible = list(self.visible)
        draft = ahead.answer(tokens)
        ends = (draft[0] == self.model.generation_config.eos_token_id).nonzero()[:, 0].tolist()
        return draft[:, : ends[0] + 1] if ends else draft

    def _observed_by_rows(self, rows, keys, values):
        """Rows that follow what was read look back at what is alive."""
        count = next(iter(rows.values())).shape[1]
        causal = torch.ones(count, count).tril().bool()
        visible_rows = causal.expand(self.kv_heads, -1, -1)
        visible = []
        for alive in self.alive:
            visible_past = alive[:, None].expand(-1, count, -1)
            visible.append(torch.cat([visible_past, visible_rows], dim=2))
        _, queries, all_keys, _ = self._pass(visible, past=(keys, values), **rows)
        return [
            self._weights(query, key, mask).mean(1)[:, : self.ids.shape[1]]
            for query, key, mask in zip(queries, all_keys, visible, strict=True)
        ]

    def _weights(self, query, key, visible):
        """Attention weights [H, q, S]."""
        key = key.repeat_interleave(self.group, dim=0)
        visible = visible.repeat_interleave(self.group, dim=0)
        logits = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        return logits.masked_fill(~visible, -torch.inf).softmax(-1)

    @torch.no_grad()
    def _pass(self, visible, past=None, **rows):
        """Logits [1, q, V]; for each layer queries [H, q, d], keys and values [K, S, d], past ones included."""
        queries = {}
        keys = {}
        values = {}

        def dense(module, query, key, value, attention_mask, **_):
            layer = module.layer_idx
            queries[layer] = query[0]
            keys[layer] = key[0]
            values[layer] = value[0]
            if past is not None:
                past_keys, past_values = past
                keys[layer] = torch.cat([past_keys[layer], key[0]], dim=1)
                values[layer] = torch.cat([past_values[layer], value[0]], dim=1)
            weights = self._weights(query[0], keys[layer], visible[layer])
            output = weights @ values[layer].repeat_interleave(self.group, dim=0)
            return output.transpose(0, 1)[None].contiguous(), None

        AttentionInterface.register("test_slow", dense)
        implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation("test_slow")
        first = 0 if past is None else past[0][0].shape[1]
        count = next(iter(rows.values())).shape[1]
        positions = torch.arange(first, first + count)[None]
        try:
            output = self.model(**rows, position_ids=positions, use_cache=False)
        finally:
            self.model.set_attn_implementation(implementation)
        layers = range(self.layers)
        return (
            output.logits,
            [queries[layer] for layer in layers],
            [keys[layer] for layer in layers],
            [values[layer] for layer in layers],
        )
