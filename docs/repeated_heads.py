"""Writes a base model with one KV head for each query head, to measure selection per query head.

    python docs/repeated_heads.py recipe=smollm2-135m out=runs/repeated
    keepsight eval model.id=runs/repeated 'methods=[snapkv,laq]' ...

The code of SnapKV, PyramidKV, H2O and LAQ repeats keys and values for every query head before it selects entries. Here
the rows of the key and value projections are repeated instead. The model computes the same, and every method selects,
counts and stores entries for each query head. Memory grows by the number of query heads that shared a KV head.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch

from keepsight.errors import UserError
from keepsight.models.decoder import decoder_layers


def with_repeated_heads(model: Any) -> Any:
    """A copy of a model with as many KV heads as query heads; its logits are the same.

    Raises:
        UserError: keys and values are not made by `k_proj` and `v_proj` in every layer.
    """
    config = copy.deepcopy(model.config)
    group = config.num_attention_heads // config.num_key_value_heads
    weights = dict(model.state_dict())
    for index, layer in enumerate(decoder_layers(model)):
        attention: Any = getattr(layer, "self_attn", None)
        for name in ("k_proj", "v_proj"):
            projection = getattr(attention, name, None)
            if not isinstance(projection, torch.nn.Linear):
                raise UserError(
                    f"layer {index} of {config.model_type} has no projection {name}; take a model such as Llama",
                    field="model",
                    code="model",
                )
            prefix = next(key for key, module in model.named_modules() if module is projection)
            for parameter in ("weight", "bias"):
                rows = weights.get(f"{prefix}.{parameter}")
                if rows is not None:
                    by_head = rows.unflatten(0, (config.num_key_value_heads, -1))
                    weights[f"{prefix}.{parameter}"] = by_head.repeat_interleave(group, dim=0).flatten(0, 1)

    config.num_key_value_heads = config.num_attention_heads
    repeated = type(model)(config).to(model.dtype)
    repeated.load_state_dict(weights)
    repeated.generation_config = model.generation_config
    return repeated.eval()


def main(keys: list[str]) -> None:
    """Write the model of a recipe, or of `model.id=`, with repeated heads and its tokenizer to `out`."""
    from keepsight.commands.eval import Config
    from keepsight.commands.from_recipe import target_of
    from keepsight.commands.parse import parse

    config = parse(Config, keys)
    target = target_of(config)
    out = Path(config.out)
    with_repeated_heads(target.model).save_pretrained(out)
    target.tokenizer.save_pretrained(out)
    print(f"{target.name} with {target.model.config.num_attention_heads} KV heads in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
