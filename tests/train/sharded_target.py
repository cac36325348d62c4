"""How far the logits of a base model that FSDP2 sharded over the processes are from those of an unsharded one."""

import sys

import torch
from torch.distributed.tensor import DTensor

from keepsight.commands import train
from keepsight.commands.config_shared import ModelConfig
from keepsight.models.targets import load_target
from keepsight.train.distributed import SHARDED
from tests.tiny import prompt_ids

if __name__ == "__main__":
    folder = sys.argv[1]
    prompt, _ = prompt_ids(30)
    model = ModelConfig(id=folder, device="cpu", dtype="float32", device_map=SHARDED)
    sharded = train.placed_target(train.Config(model=model)).model
    unsharded = load_target(folder, device="cpu", dtype="float32").model
    assert isinstance(sharded.model.layers[0].mlp.up_proj.weight, DTensor)
    tied = getattr(sharded.get_output_embeddings(), "weight") is sharded.get_input_embeddings().weight  # noqa: B009
    with torch.no_grad():
        difference = (sharded(prompt).logits - unsharded(prompt).logits).abs().max().item()
    print(f"tied {tied}, equal {difference < 1e-5} ({difference})", flush=True)
