"""Tiny random models that tests build for themselves."""

import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # attention that is far from uniform
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
FAMILIES = ["llama", "qwen3"]
FAMILY_PARAMS = ["llama", pytest.param("qwen3", marks=pytest.mark.slow)]
"""For fixtures of what no family changes; tests/runtime has tests of every family."""
_VOCABULARY = 512
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random 3-layer model in float32 with 4 query and 2 KV heads; `changes` go into its configuration."""
    torch.manual_seed(seed)
    shape = SHAPE | changes
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 entries, learned from Python's own documentation, with a chat template."""
    special = ["<|pad|>", "<|start|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([pydoc_data.topics.topics[name] for name in ("for", "class", "with")], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=_TEMPLATE,
    )


def base_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokenizer as a base model has it: without a chat template, and texts begin with its first token."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    start = "<|start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.convert_tokens_to_ids(start))]
    )
    return tokenizer


class SmallVocabulary:
    """A tokenizer of ids from 3 to 99, for tiny models, without a chat template."""

    chat_template = None
    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        """An id for each byte."""
        return {"input_ids": [[3 + byte % 97 for byte in text.encode()] for text in texts]}


def save_tiny_target(
    folder: Path, family: str = "llama", tokenizer: PreTrainedTokenizerFast | None = None, **changes: Any
) -> Path:
    """Save a tiny model (context of 4096 tokens) and a tokenizer as transformers does; returns `folder`."""
    tokenizer = tokenizer or tiny_tokenizer()
    model = tiny_model(family, vocab_size=len(tokenizer), max_position_embeddings=4096, pad_token_id=0, **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


def prompt_ids(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of the given lengths, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, 128, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 2), mask.long()
