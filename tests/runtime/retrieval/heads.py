"""Draft heads for tests: a random one, one that knows the answer, and a slow chain of drafts."""

import torch
from torch import nn
from transformers import LlamaConfig

from keepsight.models.draft_head import DraftHead, EagleHead
from tests.close import assert_close
from tests.models.slow_heads import causal_attend

LAYERS = (0, 1, 2)


def tiny_head(vocabulary: int = 128) -> DraftHead:
    """A random EAGLE-3 head for `tiny_model`, with a vocabulary of every second token."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    config.draft_vocab_size = vocabulary // 2
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    head = DraftHead(config)
    for weight in head.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.2)
    head.set_vocabulary(torch.arange(vocabulary // 2) * 2)
    return head.eval()


@torch.no_grad()
def slow_chain(head, model, ids, first, count):
    """Draft `count` tokens after ids [1, N] and `first`, the whole head over all rows for every one of them.

    Returns:
        The tokens, and the queries [H, rows, d] and keys [K, rows, d] of the last pass.
    """
    taps = model(ids, output_hidden_states=True).hidden_states
    features = head.combine(torch.cat([taps[layer + 1] for layer in LAYERS], dim=-1))
    tokens = torch.cat([ids[:, 1:], first[None, None]], dim=1)
    drafted: list[int] = []
    seen = {}

    def attend(query, key, value):
        seen["last"] = query[0], key[0]
        return causal_attend(query, key, value)

    while len(drafted) < count:
        positions = torch.arange(tokens.shape[1])[None]
        hidden = head(model.get_input_embeddings()(tokens), features, positions, attend)
        guess = head.target_ids(head.logits(hidden[0, -1]).argmax())
        drafted.append(int(guess))
        features = torch.cat([features, hidden[:, -1:]], dim=1)
        tokens = torch.cat([tokens, guess[None, None]], dim=1)
    return drafted, seen["last"]


class Oracle(EagleHead):
    """Drafts the tokens of an answer after a prompt of 50 tokens, but for some places where it is wrong.

    It knows where it is by the positions of its rows: row t guesses token t + 2.

    Args:
        answer: [T] int64.
        wrong: Places of the answer where it guesses another token.
    """

    def __init__(self, answer: torch.Tensor, wrong: set[int] | None = None, prompt: int = 50) -> None:
        super().__init__()
        self.answer, self.wrong, self.prompt = answer.tolist(), wrong or set(), prompt
        self.unused = nn.Parameter(torch.zeros(1))

    def layers_of(self, model):
        return LAYERS

    def embedding(self, model):
        return model.get_input_embeddings()

    def combine(self, features):
        return features[..., :1]

    def forward(self, embeddings, features, positions, attend):
        rows = positions.shape[1]
        # The rows' positions pass through the attention as values: a cache that lost a row or kept one would show.
        own = positions[:, None, :, None].float().expand(1, 1, rows, 2)
        seen = attend(torch.zeros_like(own), torch.zeros_like(own), own)[:, :, 0, :1]
        assert_close(seen[..., 0], positions.float() / 2)
        return positions[..., None].float()

    def logits(self, hidden):
        place = (hidden[..., 0].long() + 2 - self.prompt).tolist()
        guesses = [[self._guess(each) for each in row] for row in place]
        return nn.functional.one_hot(torch.tensor(guesses), 128).float()

    def target_ids(self, draft_ids):
        return draft_ids

    def _guess(self, place: int) -> int:
        token = self.answer[place] if 0 <= place < len(self.answer) else 0
        return (token + 1) % 128 if place in self.wrong else token
