"""Tiny tokenizers of the kinds that models come with, and answers that a test writes itself."""

import re
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor, nn
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""One that knows tool calls and the role tool."""
_PIECES = ("Hi", "x", ".", "a", "b", " ", "\u2581", "\u2581Hi", "\u2581x", "def", "stop", "\u00e9", "\u65e5", "\n")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Gemma's and Mistral's: words with a mark for spaces, and a token for every byte that no word covers."""
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|tool|>"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    vocabulary = {name: token for token, name in enumerate(dict.fromkeys(names))}
    words = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=special[3:],
        chat_template=TEMPLATE,
    )


def byt5_tokenizer() -> ByT5Tokenizer:
    """As ByT5's: written in Python, a token for every byte."""
    tokenizer = ByT5Tokenizer(extra_ids=4)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class OwnChats(PreTrainedTokenizerBase):
    """With the public methods of mistral-common's class alone: no chat template, no backend, chats by its own code.

    Special tokens in a text are read as any other letters, and ids outside its vocabulary raise.
    """

    SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "<pad>")
    is_readable = True
    """Whether the text of a chat has the ids of the chat."""

    def __init__(self) -> None:
        names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        super().__init__(padding_side="left", **names)

    @property
    def all_special_tokens(self) -> list[str]:
        return [*self.SPECIAL]

    @property
    def all_special_ids(self) -> list[int]:
        return [*range(len(self.SPECIAL))]

    def __len__(self) -> int:
        return len(self.SPECIAL) + 256

    def get_vocab(self) -> dict[str, int]:
        return {name: token for token, name in enumerate([*self.SPECIAL, *map(chr, range(256))])}

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        vocabulary = self.get_vocab()
        if isinstance(tokens, str):
            return vocabulary[tokens]
        return [vocabulary[token] for token in tokens]

    def added_tokens_decoder(self) -> Any:  # type: ignore[override]  # mistral-common's is no property
        raise NotImplementedError("as in mistral-common's class: whoever calls it uses more than its public methods")

    def __call__(self, text: Any, add_special_tokens: bool = True, **_: Any) -> Any:
        if not isinstance(text, str):
            return {"input_ids": [self(line, add_special_tokens)["input_ids"] for line in text]}
        ids = [len(self.SPECIAL) + byte for byte in text.encode()]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        data = b""
        for token in token_ids:
            if token >= len(self):
                raise KeyError(f"Invalid token for decoding: {token}")
            if token >= len(self.SPECIAL):
                data += bytes([token - len(self.SPECIAL)])
            elif not skip_special_tokens:
                data += self.SPECIAL[token].encode()
        return data.decode(errors="replace")

    def apply_chat_template(  # type: ignore[override]  # mistral-common's has fewer options too
        self, conversation: Any, tokenize: bool = True, **options: Any
    ) -> Any:
        assert options.keys() <= {"add_generation_prompt", "continue_final_message"}
        text = "<s>"
        for turn in conversation:
            calls = "".join(f"[TOOL_CALLS]{call['function']}" for call in turn.get("tool_calls", ()))
            text += {
                "user": f"[INST]{turn['content']}[/INST]",
                "assistant": f"{turn['content']}{calls}</s>",
                "tool": f"[TOOL_RESULTS]{turn['content']}",
            }[turn["role"]]
        if not tokenize:
            return text if self.is_readable else text.replace(" ", "\u2581")
        ids = list[int]()
        for piece in re.split(r"(<s>|</s>|\[[A-Z_/]+\])", text):
            if piece in self.SPECIAL:
                ids.append(self.SPECIAL.index(piece))
            else:
                ids += self(piece, False)["input_ids"]
        return {"input_ids": ids}


def tokenizers_of_all_kinds() -> dict[str, Any]:
    """A tokenizer of each kind by name."""
    return {
        "byte level": tiny_tokenizer(),
        "byte fallback": byte_fallback_tokenizer(),
        "ByT5": byt5_tokenizer(),
        "own chats": OwnChats(),
    }


class ScriptedHead(nn.Module):
    """In place of a model's output layer: the next token of every pass is that of a script, its last one for ever.

    Attributes: `script`, the tokens, and `step`, the number of passes so far.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.script = [0]
        self.step = 0
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.zeros(vocabulary, 1), requires_grad=False)

    def say(self, tokens: list[int]) -> None:
        """Begin a script."""
        self.script = tokens
        self.step = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, q, V] for hidden states [B, q, H]."""
        token = self.script[min(self.step, len(self.script) - 1)]
        self.step += 1
        logits = hidden.new_zeros(*hidden.shape[:-1], self.vocabulary)
        logits[..., token] = 1.0
        return logits


def scripted(model: Any) -> ScriptedHead:
    """Let a model say what a test writes; returns the script."""
    head = ScriptedHead(int(model.config.vocab_size))
    model.lm_head = head
    return head
