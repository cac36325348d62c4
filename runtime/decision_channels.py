"""Models that DMS has trained to hold its decisions in their queries, such as `nvidia/Qwen3-8B-DMS-8x`.

The last channel of the first query head of each KV head is a decision there (`keepsight.models.scorers.DMSScorer`), and
no part of the query: it is 0 before RoPE, and again after it, as in the program that NVIDIA publishes with that model.
That holds for every method and for the full cache. transformers' own classes know nothing of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from keepsight.models.lora import hooked


def holds_decisions(config: Any) -> bool:
    """Whether the queries of a text model of this configuration hold decisions: no projection of their own does."""
    return getattr(config, "dms_alpha_scale", None) is not None and not getattr(config, "dms_separate_alpha", False)


def without_decisions(query: Tensor, kv_heads: int) -> Tensor:
    """A copy of queries [B, H, q, d] without decisions."""
    query = query.clone()
    query[:, :: query.shape[1] // kv_heads, :, -1] = 0
    return query


@contextmanager
def decisions_left_out(model: Any) -> Iterator[None]:
    """Within the block, a model's queries have no decisions before RoPE; models that hold none stay as they are."""
    config = model.config.get_text_config(decoder=True)
    if not holds_decisions(config):
        yield
        return
    heads = int(config.num_attention_heads)
    group = heads // int(config.num_key_value_heads)

    def leave_out(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Of projected queries [B, q, H x d], or of normed ones [B, q, H, d]."""
        queries = output.reshape(*output.shape[:2], heads, -1).clone()
        queries[..., ::group, -1] = 0
        return queries.view_as(output)

    hooks = []
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):
            hooks.append((getattr(module, "q_norm", module.q_proj), leave_out))
    with hooked(hooks):
        yield
