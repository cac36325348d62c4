"""The lookahead module: n soft tokens, and LoRA that is on for them alone (arXiv 2603.10899, section 3)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import Lora, chosen_targets
from keepsight.models.zero3 import gathered, whole_shape


class Lookahead(nn.Module):
    """A lookahead module beside its target. The target is as it was except within `active()`.

    Attributes:
        model: The target.
        soft_tokens: Embeds the soft tokens, [n, hidden] float32; a module of its own, for ZeRO-3 gathers the weights
            of a module when that module is called.
        settings: The module's shape.
        lora: The updates of the target's linear modules; None for rank 0 or no targets.

    Raises:
        UserError: the settings name modules that the target does not have.
    """

    def __init__(self, model: PreTrainedModel, settings: LookaheadSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        scale = float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))  # Gemma scales what it looks up
        with gathered(model.get_input_embeddings()):
            embedding = input_embedding(model)
            random = torch.randn(settings.tokens, embedding.shape[1], device=embedding.device)
            random = random * embedding.float().std() * scale
        self.soft_tokens = nn.Embedding.from_pretrained(random, freeze=False)
        linears = chosen_targets(model, settings.targets) if settings.rank else {}
        self.lora = Lora(linears, settings.rank, settings.alpha, settings.dropout) if linears else None

    @property
    def tokens(self) -> Tensor:
        """The weights of `soft_tokens`."""
        return self.soft_tokens.weight

    def active(self) -> AbstractContextManager[None]:
        """The LoRA is on within the block."""
        return nullcontext() if self.lora is None else self.lora.attached()

    def observers(self, batch: int) -> Tensor:
        """The soft tokens as input embeddings [batch, n, hidden] in the target's dtype."""
        places = torch.arange(self.settings.tokens, device=self.tokens.device)
        return self.soft_tokens(places).to(self.model.dtype).expand(batch, -1, -1)

    def lora_state(self) -> dict[str, Tensor]:
        """The LoRA's tensors under the names PEFT saves them with."""
        own = {} if self.lora is None else self.lora.tensors()
        return {name: value.detach().contiguous().cpu() for name, value in own.items()}

    def load_state(self, lora: dict[str, Tensor], tokens: Tensor) -> None:
        """Set the weights.

        Raises:
            UserError: a tensor is missing, surplus, or of another shape.
        """
        own: dict[str, Tensor] = {} if self.lora is None else dict(self.lora.tensors())
        if odd := set(own) ^ set(lora):
            raise UserError(f"missing or surplus LoRA tensor {min(odd)!r}: the adapter is for another model")
        given = lora | {"lookahead_tokens": tokens}
        for name, value in (own | {"lookahead_tokens": self.tokens}).items():
            if given[name].shape != value.shape:
                raise UserError(
                    f"tensor {name!r} has shape {list(given[name].shape)}, this model needs {list(value.shape)}: "
                    "the adapter is for another model"
                )
            with torch.no_grad():
                value.copy_(given[name])


def input_width(model: PreTrainedModel) -> int:
    """The width of the input embedding."""
    weight: Any = model.get_input_embeddings().weight
    return whole_shape(weight)[1]


def input_embedding(model: PreTrainedModel) -> Tensor:
    """The input embedding [vocabulary, hidden], detached."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.detach()
