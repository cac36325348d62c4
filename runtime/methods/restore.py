"""RestoreKV: KVzip, and within its budget the entries of a few learned tokens, which attend to the whole cache.

Their trained weights, soft tokens and a LoRA, load in both published formats: kvpress's PEFT adapter with
`restore_embeddings.safetensors`, and the authors' checkpoint, a pickle of tensors.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import Self, override

from keepsight.errors import UserError
from keepsight.files import read_json
from keepsight.models.artifacts import as_weights
from keepsight.models.decoder import input_shape
from keepsight.models.identity import tensors_digest
from keepsight.models.lora import FoldedLora, Lora
from keepsight.models.scorers import published_tensors
from keepsight.runtime import registry
from keepsight.runtime.methods.reconstruction import KVzip, KVzipPlus, ProbedLayer
from keepsight.runtime.observe import read_embeddings
from keepsight.runtime.resources import Resources
from keepsight.runtime.state import State, require_same_frequencies

_TOKENS_NAME = re.compile(r"(.*\.)?(restore_)?embeddings")
_LORA_NAME = re.compile(r"(?:base_model\.model\.|trainable_model_state\.)?(.+)\.lora_(a|b)(?:\.weight)?", re.IGNORECASE)
_PLUS_NAME = re.compile(r"_plus(\.\w+)?$", re.IGNORECASE)
ALPHA = 16.0
"""The authors' alpha, where no adapter_config.json names it."""


class RestoreWeights:
    """Learned tokens, and the LoRA with which they are read (RestoreKV, arXiv 2608.01247).

    `tokens` [n, D] are input embeddings; `lora` holds A [r, in] and B [out, r] of each linear module, by its name and
    `A` or `B`, whose update is scaled by alpha / r. `source` names the file of the tensors, for messages. `plus` says
    whether they were trained with KVzip+'s scores.
    """

    def __init__(
        self,
        source: Path | str,
        tokens: Tensor,
        lora: Mapping[tuple[str, str], Tensor],
        alpha: float = ALPHA,
        plus: bool = False,
    ) -> None:
        self.source = source
        self.tokens = tokens
        self.alpha = alpha
        self.plus = plus
        self._lora = dict(lora)
        self._bound: WeakKeyDictionary[PreTrainedModel, tuple[Tensor, FoldedLora | None]] = WeakKeyDictionary()
        named_tensors = [(f"tokens, alpha {alpha}", tokens)]
        for (name, matrix), tensor in sorted(self._lora.items()):
            named_tensors.append((f"{name}.{matrix}", tensor))
        self.digest = tensors_digest(named_tensors)

    @classmethod
    def from_pretrained(cls, reference: str | Path) -> Self:
        """The weights in a file or a folder, or on the Hub as `user/name`; `plus` if the name ends in `_plus`.

        Raises:
            UserError: they cannot be loaded, or their files hold no such tensors, or one of them twice.
        """
        file, tensors = published_tensors(str(reference))
        tokens = []
        lora = {}
        for name, tensor in tensors.items():
            if _TOKENS_NAME.fullmatch(name) and tensor.ndim == 2:
                tokens.append(tensor)
            lora_name = _LORA_NAME.fullmatch(name)
            if lora_name is not None:
                module, matrix = lora_name.groups()
                lora[module, matrix.upper()] = tensor
        if len(tokens) != 1:
            raise UserError(
                f"{reference}: holds no restore_embeddings; name weights that were published for RestoreKV",
                field="scorer",
                code="file",
            )

        config = file.parent / "adapter_config.json"
        alpha: Any = ALPHA
        if config.is_file():
            alpha = read_json(config, dict[str, Any]).get("lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise UserError(
                f"{config}: lora_alpha is {alpha!r}, expected a number; fetch it again", field="lora_alpha", code="type"
            )
        plus = _PLUS_NAME.search(Path(reference).name) is not None
        return cls(file, tokens[0], lora, float(alpha), plus)

    def bound(self, model: PreTrainedModel) -> tuple[Tensor, FoldedLora | None]:
        """The tokens [n, D] in a model's dtype and on its device, and their LoRA.

        Raises:
            UserError: they are for another model.
        """
        if model not in self._bound:
            self._bound[model] = self._bind(model)
        return self._bound[model]

    def _bind(self, model: PreTrainedModel) -> tuple[Tensor, FoldedLora | None]:
        weights = {"tokens": self.tokens}
        for (name, matrix), tensor in self._lora.items():
            weights[f"{name}.{matrix}"] = tensor
        weights = as_weights(Path(self.source), weights, torch.float32)

        modules = dict(model.named_modules())
        linears: dict[str, Any] = {name: modules.get(name) for name, _ in self._lora}
        not_linear = sorted(name for name, module in linears.items() if not hasattr(module, "in_features"))
        if not_linear:
            raise self._misfit(f"{not_linear[0]} is no linear module")
        dimensions = self.tokens.shape[1]
        if dimensions != input_shape(model)[1]:
            raise self._misfit(f"tokens have {dimensions} dimensions")
        tokens = weights["tokens"].to(model.device, model.dtype)
        if not linears:
            return tokens, None

        ranks = {tensor.shape[0] for (_, matrix), tensor in self._lora.items() if matrix == "A"}
        rank = ranks.pop() if ranks else 0
        lora = Lora(linears, rank, self.alpha, 0.0)
        for name, _, update in lora.parts():
            self._fill(update.lora_A, weights.get(f"{name}.A"), f"A of {name}")
            self._fill(update.lora_B, weights.get(f"{name}.B"), f"B of {name}")
        return tokens, FoldedLora(lora, model.dtype)

    def _misfit(self, what: str) -> UserError:
        return UserError(
            f"{self.source}: does not fit this model ({what}); take weights that were trained for it",
            field="scorer",
            code="model",
        )

    def _fill(self, parameter: nn.Parameter, tensor: Tensor | None, name: str) -> None:
        """Give a parameter the values of a tensor; a `UserError` if there is none, or its shape is another."""
        if tensor is None or tensor.shape != parameter.shape:
            shape = "nothing" if tensor is None else [*tensor.shape]
            raise UserError(
                f"{self.source}: {name} is {shape}, expected {[*parameter.shape]}; take weights that were trained for "
                "this model",
                field=name,
                code="model",
            )
        parameter.data = tensor.to(parameter.device)


class _RestoringLayer(ProbedLayer):
    """A layer that learned tokens attend to, which records their own entries [B, K, n, d]."""

    learned_keys: Tensor
    learned_values: Tensor

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self.learned_keys = key_states
        self.learned_values = value_states
        return super().update(key_states, value_states, *args, **kwargs)


@registry.method("restorekv", label="RestoreKV", colour="#66A61E", marker="P")
@dataclass(frozen=True)
class RestoreKV(KVzip):
    """KVzip's selection with learned entries in its budget (RestoreKV, arXiv 2608.01247).

    n learned tokens (8 as published) are read after the prompt, through a LoRA of their own, while the cache is whole.
    Their entries stay in every layer and head, beside the budget - n that KVzip keeps; later tokens are at positions n
    higher. A prompt that fits the budget stays as it is, unless it is in a batch with one that does not. At a later
    turn that exceeds it, the tokens are read again, and KVzip selects also among their earlier entries. By name, `plus`
    weights come with KVzip+'s observer.

    Attributes:
        weights: The trained weights; in a recipe `scorer` names them: a file, a folder or a Hub id.
    """

    section = "weights"
    cost = "two more passes over the prompt; published weights"
    weights: RestoreWeights | None = None
    evicts_after_prefill = True

    @override
    def __post_init__(self) -> None:
        if not isinstance(self.weights, RestoreWeights):
            raise UserError(
                "RestoreKV: weights must be RestoreWeights.from_pretrained(FILE_FOLDER_OR_HUB_ID)",
                field="weights",
                code="type",
            )
        if self.every:
            raise UserError(
                "RestoreKV: learned entries are added once, after the prompt; leave out every",
                field="every",
                code="conflict",
            )
        if self.rerotate:
            raise UserError(
                "RestoreKV: learned entries come right after the prompt, whose keys rerotate moves; leave it out",
                field="rerotate",
                code="conflict",
            )
        if isinstance(self.budget, int):
            fixed_entries = self.added_entries + self.sinks + self.window
            if self.budget <= fixed_entries:
                raise UserError(
                    f"RestoreKV: budget {self.budget} must be above {fixed_entries}, the {self.added_entries} learned "
                    "entries and the protected ones (sinks + window)",
                    field="budget",
                    code="range",
                )
        super().__post_init__()

    @classmethod
    @override
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        weights = resources.scorer_of(RestoreWeights)
        scores = KVzipPlus if weights.plus else KVzip
        return {"observer": scores.observer_of(resources.find("tokenizer")), "weights": weights}

    @property
    @override
    def modules(self) -> frozenset[str]:
        return super().modules | {"scorer"}

    @property
    def added_entries(self) -> int:
        """Number of learned entries: part of the budget, not of `budget_for`."""
        return 0 if self.weights is None else len(self.weights.tokens)

    @override
    def least_budget(self) -> int:
        return super().least_budget() + self.added_entries

    @override
    def budget_for(self, length: int) -> int:
        return super().budget_for(length) - self.added_entries

    @override
    def check(self, length: int, context: int) -> None:
        if length > self.budget_for(length) + self.added_entries:
            super().check(length, context)

    @override
    def fits(self, state: State) -> bool:
        if not state.layers:
            return True
        entries_of_rows = state.counts().double().mean(dim=(0, 2)) - self.added_entries
        budgets = zip(entries_of_rows.tolist(), self.budgets(state), strict=True)
        return all(entries <= budget for entries, budget in budgets)

    @override
    @torch.no_grad()
    def keep(self, model: PreTrainedModel, state: State, selected: list[Tensor]) -> State:
        read_layers = self._read_learned_tokens(model, state)
        after = super().keep(model, state, selected)
        for layer, read_layer in zip(after.layers, read_layers, strict=True):
            layer.update(read_layer.learned_keys, read_layer.learned_values)
            layer.seen -= self.added_entries  # they are no tokens of the prompt
            layer.added = self.added_entries
            layer.recent = None  # whose entries come before them
        return replace(after, rope_offset=torch.full_like(state.lengths, self.added_entries) + state.rope_offset)

    def _read_learned_tokens(self, model: PreTrainedModel, state: State) -> list[_RestoringLayer]:
        """Each layer of a state, with the learned tokens' entries in it."""
        assert self.weights is not None
        tokens, lora = self.weights.bound(model)
        require_same_frequencies(model, state, self.added_entries)
        layers = [_RestoringLayer(layer, state.tokens_mask) for layer in state.layers]
        embeddings = tokens.expand(len(state.lengths), -1, -1)
        first = state.lengths + state.rope_offset
        with nullcontext() if lora is None else lora.attached():
            read_embeddings(model, state.cache, layers, state.tokens_mask, embeddings, first)
        return layers
