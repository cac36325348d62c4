"""Tiny random models that tests build for themselves."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

_SHAPE = {
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


def tiny_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random 3-layer model in float32 with 4 query and 2 KV heads."""
    torch.manual_seed(seed)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE)).eval()
    return LlamaForCausalLM(LlamaConfig(**_SHAPE)).eval()


def prompt_ids(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of the given lengths, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, 128, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 2), mask.long()
