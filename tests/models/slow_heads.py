"""EAGLE heads written from their definitions, one token and one attention head at a time, on plain tensors."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu

Weights = dict[str, Tensor]


def eagle3(weights: Weights, config: dict[str, Any], embeddings: Tensor, taps: Tensor, start: int = 0) -> Tensor:
    """What the EAGLE-3 layer puts out, before the last norm.

    Row t: f = fc(taps); u = [norm(embedding), norm(f)]; y = f + attention(u); y + mlp(norm(y)).

    Args:
        weights: By their public names.
        config: As in `config.json`.
        embeddings: [n, hidden].
        taps: [n, 3 * width].
        start: RoPE position of the first row.
    """
    eps = config["rms_norm_eps"]
    features, inputs = [], []
    for embedding, tap in zip(embeddings, taps, strict=True):
        if config.get("fc_norm"):
            thirds = tap.split(len(tap) // 3)
            tap = torch.cat([norm(third, weights[f"fc_norm.{i}.weight"], eps) for i, third in enumerate(thirds)])
        feature = weights["fc.weight"] @ tap
        normed = norm(embedding, weights["midlayer.input_layernorm.weight"], eps)
        features.append(feature)
        inputs.append(torch.cat([normed, norm(feature, weights["midlayer.hidden_norm.weight"], eps)]))
    return _rest(weights, "midlayer", config, torch.stack(features), torch.stack(inputs), start)


def eagle3_logits(weights: Weights, config: dict[str, Any], hidden: Tensor) -> Tensor:
    """lm_head(norm(z)) of rows [n, hidden]."""
    rows = [weights["lm_head.weight"] @ norm(row, weights["norm.weight"], config["rms_norm_eps"]) for row in hidden]
    return torch.stack(rows)


def eagle1(weights: Weights, config: dict[str, Any], embeddings: Tensor, features: Tensor) -> Tensor:
    """What the EAGLE-1 layer puts out: x = fc([embedding, feature]); y = x + attention(x); y + mlp(norm(y))."""
    bias = weights.get("fc.bias", torch.zeros(len(weights["fc.weight"])))
    pairs = zip(embeddings, features, strict=True)
    inputs = torch.stack([weights["fc.weight"] @ torch.cat(pair) + bias for pair in pairs])
    return _rest(weights, "layers.0", config, inputs, inputs, 0)


def _rest(weights: Weights, layer: str, config: dict[str, Any], residual: Tensor, inputs: Tensor, start: int) -> Tensor:
    attended = attention(weights, f"{layer}.self_attn", config, inputs, start)
    rows = []
    for before, change in zip(residual, attended, strict=True):
        y = before + change
        x = norm(y, weights[f"{layer}.post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate, up = weights[f"{layer}.mlp.gate_proj.weight"] @ x, weights[f"{layer}.mlp.up_proj.weight"] @ x
        rows.append(y + weights[f"{layer}.mlp.down_proj.weight"] @ (silu(gate) * up))
    return torch.stack(rows)


def attention(weights: Weights, name: str, config: dict[str, Any], inputs: Tensor, start: int) -> Tensor:
    """Causal attention of rows [n, inputs] -> [n, hidden]; query head h reads KV head h // (H / K)."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads", heads)
    width = config.get("head_dim", hidden // heads)
    theta = config.get("rope_theta", 10000.0)

    def project(which: str, row: Tensor, head: int) -> Tensor:
        rows = slice(head * width, (head + 1) * width)
        bias = weights.get(f"{name}.{which}_proj.bias")
        projected = weights[f"{name}.{which}_proj.weight"][rows] @ row
        return projected if bias is None else projected + bias[rows]

    outputs = []
    for t, row in enumerate(inputs):
        parts = []
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            query = rotate(project("q", row, head), start + t, theta)
            keys = [rotate(project("k", inputs[s], kv_head), start + s, theta) for s in range(t + 1)]
            scores = torch.stack([query @ key / math.sqrt(width) for key in keys]).softmax(dim=0)
            parts.append(sum(scores[s] * project("v", inputs[s], kv_head) for s in range(t + 1)))
        outputs.append(weights[f"{name}.o_proj.weight"] @ torch.cat(parts))  # type: ignore[arg-type]
    return torch.stack(outputs)


def rotate(vector: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one head's vector: dimensions i and i + d / 2 turn by position / theta^(2i / d)."""
    half, rotated = len(vector) // 2, vector.clone()
    for i in range(half):
        angle = position / theta ** (i / half)
        rotated[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
        rotated[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
    return rotated


def norm(vector: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of one vector."""
    return vector / math.sqrt(float((vector * vector).mean()) + eps) * weight


def causal_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`HeadAttend` over the tokens of one pass alone, without padding."""
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2)
