"""Tiny random models whose RoPE depends on the length of the text."""

from typing import Any

import torch
from transformers import Phi3Config, Phi3ForCausalLM

from tests.tiny import SHAPE, tiny_model

LIMIT = 64
KINDS = ("phi3", "longrope", "dynamic")


def rope_model(kind: str, seed: int = 0, limit: int = LIMIT, theta: float = 10000.0) -> Any:
    """A model whose frequencies change beyond `limit` tokens: LongRoPE of Phi-3 or of Llama, or dynamic NTK."""
    factors = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
    longrope: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": (1 + factors[0] / 2).tolist(),
        "long_factor": (3 + 6 * factors[1]).tolist(),
        "original_max_position_embeddings": limit,
        "rope_theta": theta,
    }
    if kind == "phi3":
        torch.manual_seed(seed)
        shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
        config = Phi3Config(
            **shape, original_max_position_embeddings=limit, sliding_window=None, rope_parameters=longrope
        )
        return Phi3ForCausalLM(config).eval()
    if kind == "longrope":
        return tiny_model(seed=seed, rope_parameters=longrope)
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": theta}
    return tiny_model(seed=seed, rope_parameters=dynamic, max_position_embeddings=limit)
