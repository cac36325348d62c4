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
    last_pass = {}

    def attend(query, key, value):
        last_pass["queries and keys"] = query[0], key[0]
        return causal_attend(query, key, value)

    while len(drafted) < count:
        positions = torch.arange(tokens.shape[1])[None]
        hidden = head(model.get_input_embeddings()(tokens), features, positions, attend)
        guess = head.target_ids(head.logits(hidden[0, -1]).argmax())
        drafted.append(int(guess))
        features = torch.cat([features, hidden[:, -1:]], dim=1)
        tokens = torch.cat([tokens, guess[None, None]], dim=1)
    return drafted, last_pass["queries and keys"]


class Oracle(EagleHead):
    """Drafts the tokens of an answer, but for some positions where it is wrong.

    It knows where it is by the positions of its rows: row t guesses token t + 2.

    Args:
        answer: [T] int64.
        wrong: Positions in the answer where it guesses another token.
        prompt: Tokens of the prompt.
    """

    def __init__(self, answer: torch.Tensor, wrong: set[int] | None = None, prompt: int = 50) -> None:
        super().__init__()
        self.answer = answer.tolist()
        self.wrong = wrong or set()
        self.prompt = prompt
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
        values = positions[:, None, :, None].float().expand(1, 1, rows, 2)
        means = attend(torch.zeros_like(values), torch.zeros_like(values), values)[:, :, 0, :1]
        assert_close(means[..., 0], positions.float() / 2)
        return positions[..., None].float()

    def logits(self, hidden):
        guessed_positions = hidden[..., 0].long() + 2 - self.prompt
        guesses = [self._guess(position) for position in guessed_positions.flatten().tolist()]
        tokens = torch.tensor(guesses).view(guessed_positions.shape)
        return nn.functional.one_hot(tokens, 128).float()

    def target_ids(self, draft_ids):
        return draft_ids

    def _guess(self, position: int) -> int:
        token = self.answer[position] if 0 <= position < len(self.answer) else 0
        return (token + 1) % 128 if position in self.wrong else token
