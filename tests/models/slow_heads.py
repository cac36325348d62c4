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
    input_norm = weights["midlayer.input_layernorm.weight"]
    hidden_norm = weights["midlayer.hidden_norm.weight"]
    features: list[Tensor] = []
    inputs: list[Tensor] = []
    for embedding, tap in zip(embeddings, taps, strict=True):
        if config.get("fc_norm"):
            tap = _norm_thirds(tap, weights, eps)
        feature = weights["fc.weight"] @ tap
        normed_embedding = norm(embedding, input_norm, eps)
        normed_feature = norm(feature, hidden_norm, eps)
        features.append(feature)
        inputs.append(torch.cat([normed_embedding, normed_feature]))
    return _attention_and_mlp(weights, "midlayer", config, torch.stack(features), torch.stack(inputs), start)


def _norm_thirds(tap: Tensor, weights: Weights, eps: float) -> Tensor:
    """The states of the three tapped layers, each normed by itself."""
    thirds = tap.split(len(tap) // 3)
    return torch.cat([norm(third, weights[f"fc_norm.{index}.weight"], eps) for index, third in enumerate(thirds)])


def eagle3_logits(weights: Weights, config: dict[str, Any], hidden: Tensor) -> Tensor:
    """lm_head(norm(z)) of rows [n, hidden]."""
    logits: list[Tensor] = []
    for row in hidden:
        normed = norm(row, weights["norm.weight"], config["rms_norm_eps"])
        logits.append(weights["lm_head.weight"] @ normed)
    return torch.stack(logits)


def eagle1(weights: Weights, config: dict[str, Any], embeddings: Tensor, features: Tensor) -> Tensor:
    """What the EAGLE-1 layer puts out: x = fc([embedding, feature]); y = x + attention(x); y + mlp(norm(y))."""
    fc = weights["fc.weight"]
    bias = weights.get("fc.bias", torch.zeros(len(fc)))
    rows: list[Tensor] = []
    for embedding, feature in zip(embeddings, features, strict=True):
        rows.append(fc @ torch.cat([embedding, feature]) + bias)
    inputs = torch.stack(rows)
    return _attention_and_mlp(weights, "layers.0", config, inputs, inputs, 0)


def _attention_and_mlp(
    weights: Weights, layer: str, config: dict[str, Any], residual: Tensor, inputs: Tensor, start: int
) -> Tensor:
    """y = residual + attention(inputs); y + mlp(norm(y))."""
    post_attention_norm = weights[f"{layer}.post_attention_layernorm.weight"]
    gate_proj = weights[f"{layer}.mlp.gate_proj.weight"]
    up_proj = weights[f"{layer}.mlp.up_proj.weight"]
    down_proj = weights[f"{layer}.mlp.down_proj.weight"]
    attended = attention(weights, f"{layer}.self_attn", config, inputs, start)
    outputs: list[Tensor] = []
    for y in residual + attended:
        x = norm(y, post_attention_norm, config["rms_norm_eps"])
        outputs.append(y + down_proj @ (silu(gate_proj @ x) * (up_proj @ x)))
    return torch.stack(outputs)


def attention(weights: Weights, name: str, config: dict[str, Any], inputs: Tensor, start: int) -> Tensor:
    """Causal attention of rows [n, inputs] -> [n, hidden]; query head h reads KV head h // (H / K)."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    width = config.get("head_dim", config["hidden_size"] // heads)
    theta = config.get("rope_theta", 10000.0)

    def project(projection: str, row: int, head: int) -> Tensor:
        dimensions = slice(head * width, (head + 1) * width)
        projected = weights[f"{name}.{projection}_proj.weight"][dimensions] @ inputs[row]
        bias = weights.get(f"{name}.{projection}_proj.bias")
        return projected if bias is None else projected + bias[dimensions]

    def attend(row: int, head: int) -> Tensor:
        kv_head = head // (heads // kv_heads)
        query = rotate(project("q", row, head), start + row, theta)
        logits: list[Tensor] = []
        for earlier in range(row + 1):
            key = rotate(project("k", earlier, kv_head), start + earlier, theta)
            logits.append(query @ key / math.sqrt(width))
        attention_weights = torch.stack(logits).softmax(dim=0)
        output = torch.zeros(width)
        for earlier in range(row + 1):
            output += attention_weights[earlier] * project("v", earlier, kv_head)
        return output

    outputs: list[Tensor] = []
    for row in range(len(inputs)):
        heads_side_by_side = torch.cat([attend(row, head) for head in range(heads)])
        outputs.append(weights[f"{name}.o_proj.weight"] @ heads_side_by_side)
    return torch.stack(outputs)


def rotate(vector: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one head's vector: dimensions i and i + d / 2 turn by position / theta^(2i / d)."""
    half = len(vector) // 2
    rotated = vector.clone()
    for i in range(half):
        angle = position / theta ** (i / half)
        cosine = math.cos(angle)
        sine = math.sin(angle)
        rotated[i] = vector[i] * cosine - vector[i + half] * sine
        rotated[i + half] = vector[i + half] * cosine + vector[i] * sine
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
