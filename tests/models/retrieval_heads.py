"""Draft heads and the retrieval heads they are pruned to, on tiny random models."""

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig

from keepsight.models.card import Provenance
from keepsight.models.draft_head import DraftHead
from keepsight.models.retrieval_head import RetrievalHead
from tests.tiny import tiny_model

LAYERS = (0, 1, 2)
"""The tiny target's feature layers: it is too shallow for the default ones."""


def tiny_draft_head(heads: int = 4, kv_heads: int = 2, seed: int = 0, **changes: Any) -> DraftHead:
    """A random head for `tiny_model`."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "vocab_size": 128,
        "draft_vocab_size": 64,
        "max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }
    head = DraftHead(LlamaConfig(**shape | changes)).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)  # norms that do something
    return head


def tiny_retrieval_head(features: str = "previous-step", **options: Any) -> RetrievalHead:
    """A head pruned from `tiny_draft_head`."""
    return RetrievalHead.from_draft(tiny_draft_head(**options), features)


def grouped_retrieval_head(groups: int, features: str = "previous-step", **options: Any) -> RetrievalHead:
    """The same for groups of layers, whose projections differ."""
    head = tiny_retrieval_head(features, **options).grouped(groups)
    with torch.no_grad():
        for projection in (head.q_proj.weight, head.k_proj.weight):
            projection.add_(torch.randn(projection.shape, generator=torch.Generator().manual_seed(5)), alpha=0.3)
    return head


def tiny_deepseek(seed: int = 0) -> Any:
    """A random model with latent attention: 3 layers, 4 heads whose keys are wider (12) than their values (6)."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return DeepseekV3ForCausalLM(config).eval()


def target_for(kv_heads: int, heads: int = 4) -> Any:
    """A tiny Llama with so many KV heads."""
    return tiny_model(num_attention_heads=heads, num_key_value_heads=kv_heads)


def provenance_of(folder: Path) -> Provenance:
    """Where the head in a folder comes from."""
    return RetrievalHead.load(folder).provenance
