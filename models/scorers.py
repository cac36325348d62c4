"""Published, trained scorers: a small network per layer, which scores each KV entry from the layer's attention input.

A file is read as it was published: safetensors, or a pickle whose tensors are read by torch's `weights_only`, which
runs nothing that the file names. B batch, q tokens, D hidden size, H query heads, K KV heads, d head dimension.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self, override

from keepsight.errors import UserError, one_line
from keepsight.files import at_home
from keepsight.models.artifacts import as_weights, check_repo_id, hub_errors, read_tensors, unpickled
from keepsight.models.identity import tensors_digest

_SAFE = ("*.safetensors",)
_PICKLED = ("*.pt", "*.pth", "*.bin")
_GATES = 16
"""Width of FastKVzip's queries and keys."""

Weights = Mapping[str, Tensor]


class Scorer(ABC):
    """A scorer of KV entries with a network for each layer.

    Args:
        source: The file of the tensors, for messages.
        tensors: The published tensors whose names match `names`, by name.

    Attributes:
        names: Pattern of a tensor's name; its groups are the layer and the name within it.
        numbers: Number of outputs for each entry and KV head.
        by_place: Whether layers are counted among those with full attention, and not among all.
    """

    names: ClassVar[str]
    numbers: ClassVar[int] = 1
    by_place: ClassVar[bool] = False

    def __init__(self, source: Path | str, tensors: Mapping[str, Tensor]) -> None:
        self.source = source
        self._layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(self.names, name)
            if match:
                layer = int(match[1])
                self._layers.setdefault(layer, {})[match[2]] = tensor
        if not self._layers:
            raise UserError(f"{source}: holds no tensor of a {type(self).__name__}; name the file that was published")
        self._weights: dict[tuple[int, torch.dtype, torch.device], dict[str, Tensor]] = {}

    @cached_property
    def digest(self) -> str:
        """Digest of the scorer's kind and weights."""
        named_tensors = []
        for layer, tensors in sorted(self._layers.items()):
            for name, tensor in sorted(tensors.items()):
                named_tensors.append((f"{type(self).__name__} {layer}.{name}", tensor))
        return tensors_digest(named_tensors)

    @classmethod
    def from_pretrained(cls, reference: str | Path) -> Self:
        """The scorer in a file or a folder, or on the Hub as `user/name` or `user/name/FOLDER`.

        Raises:
            UserError: it cannot be loaded, or its files hold no tensors of this kind of scorer, or one of them twice.
        """
        source, tensors = published_tensors(str(reference), cls.names)
        return cls(source, tensors)

    def __call__(self, index: int, place: int, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        """Score the tokens of a pass: [B, K x numbers, q] float32, the numbers of a KV head side by side.

        `index` is the decoder layer, `place` its place among those with full attention, `hidden` [B, q, D] the input of
        its attention module, and `start` the number of tokens that it has seen before. A `UserError` if there are no
        weights for the layer, or they are for another model.
        """
        layer = place if self.by_place else index
        if layer not in self._layers:
            raise UserError(f"{self.source}: holds nothing for layer {layer}; take weights trained for this model")
        key = layer, hidden.dtype, hidden.device
        if key not in self._weights:
            weights = as_weights(Path(self.source), self._layers[layer], hidden.dtype)
            self._weights[key] = {name: tensor.to(hidden.device) for name, tensor in weights.items()}
        kv_heads = kv_heads_of(attention)
        try:
            scores = self.score(self._weights[key], attention, hidden, start)
        except (KeyError, RuntimeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else one_line(error, 120)
            raise UserError(
                f"{self.source}: layer {layer} does not fit this model ({reason}); take weights trained for it"
            ) from None
        if scores.shape[1] != kv_heads * self.numbers:
            scored_heads = scores.shape[1] // self.numbers
            raise UserError(
                f"{self.source}: scores {scored_heads} KV heads, and layer {index} of this model has {kv_heads}"
            )
        return scores.float()

    @abstractmethod
    def score(self, weights: Weights, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        """As `__call__`, with the layer's tensors by name."""


class KVzapScorer(Scorer):
    """KVzap (arXiv 2601.07891, section 3.2): the logarithm of KVzip+'s score, by one linear map or an MLP with GELU."""

    names = r"layers\.(\d+)\.(.+)"

    @override
    def score(self, weights: Weights, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        if "0.weight" in weights:
            inner = functional.gelu(functional.linear(hidden, weights["0.weight"], weights["0.bias"]))
            return functional.linear(inner, weights["2.weight"], weights["2.bias"]).mT
        return functional.linear(hidden, weights["weight"], weights["bias"]).mT


class FastKVzipScorer(Scorer):
    """Fast KVzip (arXiv 2601.17668): a gate from 0 to 1, an entry's own logit against those of 16 learned sinks.

    The bias is added once, as both published programs do at inference; the training script adds it twice.
    """

    names = r"module\.(\d+)\.(.+)"
    by_place = True

    @override
    def score(self, weights: Weights, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        bias = weights["b"].float()[:, 0]  # [K, G]
        query = functional.linear(hidden, weights["q_proj.weight"], weights["q_proj.bias"])
        key = functional.linear(hidden, weights["k_proj.weight"])
        query = _rms_norm(query.unflatten(-1, (*bias.shape, _GATES)), weights["q_norm.weight"])  # [B, q, K, G, 16]
        key = _rms_norm(key.unflatten(-1, (len(bias), _GATES)), weights["k_norm.weight"])
        logits = (query * key[..., None, :]).sum(dim=-1) * _GATES**-0.5 + bias
        sinks = torch.einsum("bqkgd,krd->bqkgr", query, weights["k_base"].float()[:, 0]) * _GATES**-0.5
        gates = torch.sigmoid(logits - sinks.logsumexp(dim=-1))  # 1 / (1 + the sum of exp(sink - logit))
        return gates.mean(dim=-1).mT


class TrimKVScorer(Scorer):
    """TRIM-KV (arXiv 2512.03324, 2605.09649): log b, b being the share of an entry that is left after each token.

    Two numbers for an entry: log b, and the entry's position. The gate's activation is SiLU, which is `hidden_act` of
    every model with published weights. Models with images name their layers `model.language_model.layers`.
    """

    names = r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.self_attn\.retention_gate\.(.+)"
    numbers = 2

    @override
    def score(self, weights: Weights, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        inner = functional.silu(functional.linear(hidden, weights["linear1.weight"], weights["linear1.bias"]))
        last = "linear2.weight"
        if "linear3.weight" in weights:
            inner = functional.silu(functional.linear(inner, weights["linear2.weight"], weights["linear2.bias"]))
            last = "linear3.weight"
        logits = functional.linear(inner, weights[last]).float() + weights["bias"].float()
        log_kept = functional.logsigmoid(logits).mT
        positions = torch.arange(start, start + log_kept.shape[2], dtype=torch.float32, device=log_kept.device)
        return torch.stack([log_kept, positions.expand_as(log_kept)], dim=2).flatten(1, 2)


class LocretScorer(Scorer):
    """Locret (arXiv 2410.01805, section 3.2): the largest attention logit expected, from queries, keys and values.

    All heads' queries, keys and values before RoPE are projected a second time for it.
    """

    names = r"(?:model\.)?layers\.(\d+)\.self_attn\.(fc[12]\.weight)"

    @override
    def score(self, weights: Weights, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        projections = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        if not all(hasattr(attention, name) for name in projections):
            raise UserError(f"{type(attention).__name__} has no q_proj, k_proj and v_proj, which Locret reads")
        states = torch.cat([getattr(attention, name)(hidden) for name in projections], dim=-1)
        inner = functional.silu(functional.linear(states, weights["fc1.weight"]))
        return functional.linear(inner, weights["fc2.weight"]).mT


def kv_heads_of(attention: Any) -> int:
    """KV heads of an attention module's cache."""
    return int(attention.config.num_attention_heads) // int(getattr(attention, "num_key_value_groups", 1))


def _rms_norm(states: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(states.float(), (_GATES,), weight.float(), eps=1e-6)


def published_tensors(reference: str, names: str = ".*") -> tuple[Path, dict[str, Tensor]]:
    """The first of the weight files, and from all of them the tensors whose names match the pattern, by name.

    Raises:
        UserError: as `published_files`; a file cannot be read, or two hold a tensor of the same name.
    """
    tensors: dict[str, Tensor] = {}
    holders: dict[str, Path] = {}
    files = published_files(reference)
    for file in files:
        file_tensors = read_tensors(file, names) if file.suffix == ".safetensors" else unpickled(file)
        for name, tensor in file_tensors.items():
            if not re.fullmatch(names, name):
                continue
            if name in holders:
                raise UserError(
                    f"{reference}: {holders[name].name} and {file.name} both hold {name}; name the one file whose "
                    "weights you want"
                )
            tensors[name] = tensor
            holders[name] = file
    return files[0], tensors


def published_files(reference: str) -> list[Path]:
    """The weight files of a file, a folder, or `user/name` or `user/name/FOLDER` on the Hub; safetensors first.

    Raises:
        UserError: there are none, or the Hub cannot be reached.
    """
    reference = at_home(reference)
    path = Path(reference)
    if path.is_file():
        return [path]
    if not path.is_dir():
        repo = "/".join(reference.split("/")[:2])
        subfolder = "/".join(reference.split("/")[2:])
        check_repo_id(repo)
        prefix = f"{subfolder}/" if subfolder else ""
        patterns = [prefix + pattern for pattern in (*_SAFE, *_PICKLED, "adapter_config.json")]
        with hub_errors(f"{reference!r} is no file or folder here and cannot be fetched from the Hub"):
            path = Path(snapshot_download(repo, allow_patterns=patterns)) / subfolder
    for file_patterns in (_SAFE, _PICKLED):
        files: list[Path] = []
        for pattern in file_patterns:
            files += path.glob(pattern)
        if files:
            return sorted(files)
    raise UserError(f"{reference}: no {', '.join((*_SAFE, *_PICKLED))} is there; name the scorer's file or folder")
