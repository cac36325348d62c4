"""The lookahead module: n soft tokens, and LoRA that is on for them alone (arXiv 2603.10899, section 3)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.lookahead_settings import LookaheadSettings

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."  # what PEFT puts before the names of a saved adapter's tensors


class Lookahead(nn.Module):
    """A target with a lookahead module attached. The LoRA is off unless `switch(True)` or `active()` turns it on.

    Attributes:
        model: The target; its own parameters are frozen.
        soft_tokens: Embeds the soft tokens, [n, hidden] float32; a module of its own, for ZeRO-3 gathers the weights
            of a module when that module is called.
        settings: The module's shape.
    """

    def __init__(self, model: PreTrainedModel, settings: LookaheadSettings, name: str = "lookahead") -> None:
        super().__init__()
        model.requires_grad_(False)
        embedding = input_embedding(model)
        random = torch.randn(settings.tokens, embedding.shape[1], device=embedding.device)
        self.soft_tokens = nn.Embedding.from_pretrained(random * embedding.float().std().item(), freeze=False)
        self.model, self.settings, self.name = model, settings, name
        if settings.rank:
            inject_adapter_in_model(lora_config(model, settings), model, name)
        self._layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer) and name in layer.lora_A]
        for layer in self._layers:
            layer.lora_A[name].float()
            layer.lora_B[name].float()
        self.switch(False)

    @property
    def tokens(self) -> Tensor:
        """The weights of `soft_tokens`."""
        return self.soft_tokens.weight

    def switch(self, on: bool) -> None:
        """Turn the LoRA on or off; whether its weights get gradients does not change.

        PEFT's own `enable_adapters` visits all weights of all adapters, several per cent of an observation's time.
        """
        for layer in self._layers:
            if on and layer.active_adapters != [self.name]:
                layer.set_adapter([self.name], inference_mode=not self.tokens.requires_grad)
            layer._disable_adapters = not on

    @contextmanager
    def active(self, on: bool = True) -> Iterator[None]:
        """Turn the LoRA on (or off) within the block, and back after it."""
        self.switch(on)
        try:
            yield
        finally:
            self.switch(not on)

    def observers(self, batch: int) -> Tensor:
        """The soft tokens as input embeddings [batch, n, hidden] in the target's dtype."""
        places = torch.arange(self.settings.tokens, device=self.tokens.device)
        return self.soft_tokens(places).to(self.model.dtype).expand(batch, -1, -1)

    def lora_state(self) -> dict[str, Tensor]:
        """The LoRA's tensors under the names PEFT saves them with."""
        if not self._layers:
            return {}
        state = get_peft_model_state_dict(self.model, adapter_name=self.name, save_embedding_layers=False)
        return {_PREFIX + key: value.detach().contiguous().cpu() for key, value in state.items()}

    def load_state(self, lora: dict[str, Tensor], tokens: Tensor) -> None:
        """Set the weights.

        Raises:
            UserError: a tensor is missing, surplus, or of another shape.
        """
        own = self.lora_state()
        if odd := set(own) ^ set(lora):
            raise UserError(f"missing or surplus LoRA tensor {min(odd)!r}: the adapter is for another model")
        for key, value in [*own.items(), ("lookahead_tokens", self.tokens)]:
            given = tokens if key == "lookahead_tokens" else lora[key]
            if given.shape != value.shape:
                raise UserError(
                    f"tensor {key!r} has shape {list(given.shape)}, this model needs {list(value.shape)}: "
                    "the adapter is for another model"
                )
        with torch.no_grad():
            self.tokens.copy_(tokens)
        if lora:
            plain = {key.removeprefix(_PREFIX): value for key, value in lora.items()}
            set_peft_model_state_dict(self.model, plain, adapter_name=self.name)


def input_embedding(model: PreTrainedModel) -> Tensor:
    """The input embedding [vocabulary, hidden], detached."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def lora_config(model: PreTrainedModel, settings: LookaheadSettings) -> LoraConfig:
    """LoRA on every projection that the loss can reach.

    Importance reads queries and keys only, so the last layer's value, output and MLP projections get no gradient.
    """
    last = model.config.get_text_config().num_hidden_layers - 1
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=list(PROJECTIONS),
        exclude_modules=rf".*layers\.{last}\.(self_attn\.[vo]_proj|mlp\..*)",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path,
    )
