"""Published, trained scorers: a small network per layer, which scores each KV entry from the layer's attention input.

A file is read as it was published: safetensors, or a pickle whose tensors are read by torch's `weights_only`, which
runs nothing that the file names. B batch, q tokens, D hidden size, H query heads, K KV heads, d head dimension.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Self, override

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, read_json
from keepsight.models.artifacts import as_weights, check_repo_id, hub_errors, read_tensors, unpickled
from keepsight.models.decoder import norm_epsilon
from keepsight.models.identity import tensors_digest

_SAFE = ("*.safetensors",)
_PICKLED = ("*.pt", "*.pth", "*.bin")
_GATES = 16
"""Width of FastKVzip's queries and keys."""
_BESIDE = ("adapter_config.json", "config.json", "dms_metadata.json")
"""Settings that are fetched with weights, where they are there."""

Weights = Mapping[str, Tensor]


class Scorer(ABC):
    """A scorer of KV entries with a network for each layer.

    Args:
        source: The file of the tensors, for messages.
        tensors: The published tensors whose names match `names`, by name.

    Attributes:
        names: Pattern of a tensor's name; its groups are the layer and the name within it.
        outputs_per_head: Number of outputs for each entry and KV head.
        counts_full_layers_only: Whether layers are counted among those with full attention, and not among all.
    """

    names: ClassVar[str]
    outputs_per_head: ClassVar[int] = 1
    counts_full_layers_only: ClassVar[bool] = False

    def __init__(self, source: Path | str, tensors: Mapping[str, Tensor]) -> None:
        self.source = source
        self._layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(self.names, name)
            if match:
                layer = int(match[1])
                self._layers.setdefault(layer, {})[match[2]] = tensor
        if not self._layers:
            raise UserError(
                f"{source}: holds no tensor of a {type(self).__name__}; name the file that was published",
                field="scorer",
                code="file",
            )
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

    def __call__(self, index: int, full_layer_number: int, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        """Score the tokens of a pass: [B, K x outputs_per_head, q] float32, the outputs of a KV head side by side.

        `index` is the decoder layer, `full_layer_number` its number among those with full attention, `hidden` [B, q, D]
        the input of its attention module, and `start` the number of tokens that it has seen before. A `UserError` if
        there are no weights for the layer, or they are for another model.
        """
        layer = full_layer_number if self.counts_full_layers_only else index
        if layer not in self._layers:
            raise UserError(
                f"{self.source}: holds nothing for layer {layer}; take weights trained for this model",
                field="scorer",
                code="model",
            )
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
                f"{self.source}: layer {layer} does not fit this model ({reason}); take weights trained for it",
                field="scorer",
                code="model",
            ) from None
        if scores.shape[1] != kv_heads * self.outputs_per_head:
            scored_heads = scores.shape[1] // self.outputs_per_head
            raise UserError(
                f"{self.source}: scores {scored_heads} KV heads, and layer {index} of this model has {kv_heads}",
                field="scorer",
                code="model",
            )
        return scores.float()

    @abstractmethod
    def score(self, weights: Weights, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        """As `__call__`, with the layer's tensors by name."""

    def joined(self, before: Tensor | None, scores: Tensor) -> Tensor:
        """The scores [B, K x numbers, C + q] of all entries of a layer, from those of C earlier ones and of a pass.

        `before` is None where there are no earlier ones.
        """
        return scores if before is None else torch.cat([before, scores], dim=-1)


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
    counts_full_layers_only = True

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

    Two outputs for an entry: log b, and the entry's position. The gate's activation is SiLU, which is `hidden_act` of
    every model with published weights. Models with images name their layers `model.language_model.layers`.
    """

    names = r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.self_attn\.retention_gate\.(.+)"
    outputs_per_head = 2

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
            raise UserError(
                f"{type(attention).__name__} has no q_proj, k_proj and v_proj, which Locret reads",
                field="model",
                code="model",
            )
        states = torch.cat([getattr(attention, name)(hidden) for name in projections], dim=-1)
        inner = functional.silu(functional.linear(states, weights["fc1.weight"]))
        return functional.linear(inner, weights["fc2.weight"]).mT


@dataclass(frozen=True)
class DMSSettings:
    """What a DMS decision depends on beside its weights, as `config.json` or `dms_metadata.json` names it.

    Attributes:
        scale: Factor of the neuron or projection (`dms_alpha_scale`).
        offset: What is then taken off (`dms_initial_alpha_offset`, in FastDMS's metadata `alpha_offset`): a neuron at
            0 keeps its entry.
        per: Whether each KV head decides (`head`), or the first one for its `layer` (`dms_alpha_per`).
    """

    scale: float = 100.0
    offset: float = 5.0
    per: Literal["head", "layer"] = "head"

    @classmethod
    def beside(cls, weights: Path) -> "DMSSettings":
        """The settings of a file of weights; those of the published model where no file beside it names them.

        Raises:
            UserError: a setting has another form.
        """
        for file in (weights.parent / "dms_metadata.json", weights.parent / "config.json"):
            if not file.is_file():
                continue
            content = read_json(file, dict[str, Any])
            scale = _first_of(content, "dms_alpha_scale", "alpha_scale")
            if scale is None:
                continue
            offset = _first_of(content, "dms_initial_alpha_offset", "dms_alpha_offset", "alpha_offset")
            per = content.get("dms_alpha_per", cls.per)
            numbers = (scale, cls.offset if offset is None else offset)
            if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
                raise UserError(
                    f"{file}: dms_alpha_scale and dms_initial_alpha_offset are {numbers}, expected numbers",
                    field="dms_alpha_scale",
                    code="type",
                )
            if per not in ("head", "layer"):
                raise UserError(
                    f"{file}: dms_alpha_per is {per!r}, expected 'head' or 'layer'; fetch it again",
                    field="dms_alpha_per",
                    code="unknown",
                )
            return cls(float(numbers[0]), float(numbers[1]), per)
        return cls()


class DMSScorer(Scorer):
    """DMS (arXiv 2506.05345): how far a trained decision is from evicting an entry; evicted where it is below 0.

    Published in two forms. `nvidia/Qwen3-8B-DMS-8x` and FastDMS's checkpoints read the last channel of the first query
    head of each KV head, before RoPE, after the norm of queries where there is one. Adapters that NVIDIA's
    Model-Optimizer trains (`experimental/dms`, `dms_separate_alpha`) project the layer's input, under a norm of their
    own; it is found again from the attention's input, divided by the weight of the norm before it.

    The decision about an entry is read at the token after it, as in NVIDIA's programs; the newest entry has none yet,
    and its score is infinite.
    """

    names = (
        r"(?:model\.)?layers\.(\d+)\.(input_layernorm\.weight|"
        r"self_attn\.(?:q_proj|q_norm|dms_proj_alpha|dms_proj_alpha_norm)\.(?:weight|bias))"
    )

    def __init__(self, source: Path | str, tensors: Mapping[str, Tensor], settings: DMSSettings | None = None) -> None:
        super().__init__(source, tensors)
        self.settings = settings or DMSSettings.beside(Path(source))
        names = chain.from_iterable(self._layers.values())
        if not any(name.startswith("self_attn.") for name in names):
            raise UserError(
                f"{source}: holds no queries or decisions of DMS; name the file that was published",
                field="scorer",
                code="file",
            )

    @cached_property
    @override
    def digest(self) -> str:
        settings = torch.tensor([self.settings.scale, self.settings.offset, float(self.settings.per == "layer")])
        return tensors_digest([(super().digest, settings)])

    @override
    def score(self, weights: Weights, attention: nn.Module, hidden: Tensor, start: int) -> Tensor:
        is_adapter = "self_attn.dms_proj_alpha.weight" in weights
        values = _projected(weights, attention, hidden) if is_adapter else _neurons(weights, attention, hidden)
        kept_by = self.settings.offset - values.float() * self.settings.scale
        if self.settings.per == "layer":
            kept_by = kept_by[..., :1].expand_as(kept_by)
        return kept_by.mT

    @override
    def joined(self, before: Tensor | None, scores: Tensor) -> Tensor:
        of_entries = functional.pad(scores[..., 1:], (0, 1), value=torch.inf)
        if before is None:
            return of_entries
        return torch.cat([before[..., :-1], scores[..., :1], of_entries], dim=-1)


def _neurons(weights: Weights, attention: Any, hidden: Tensor) -> Tensor:
    """[B, q, K]: the last channel of the first query head of each KV head, before RoPE."""
    queries = functional.linear(hidden, weights["self_attn.q_proj.weight"], weights.get("self_attn.q_proj.bias"))
    heads = int(attention.config.num_attention_heads)
    first_heads = queries.unflatten(-1, (heads, -1))[..., :: heads // kv_heads_of(attention), :]
    norm = weights.get("self_attn.q_norm.weight")
    if norm is not None:
        width = first_heads.shape[-1]
        first_heads = functional.rms_norm(first_heads.float(), (width,), norm.float(), norm_epsilon(attention.config))
    return first_heads[..., -1]


def _projected(weights: Weights, attention: Any, hidden: Tensor) -> Tensor:
    """[B, q, K]: the projection of a layer's input under a norm of its own."""
    norm = weights["input_layernorm.weight"].float()
    normalised = torch.where(norm == 0, 0.0, hidden.float() / norm)
    states = (normalised * weights["self_attn.dms_proj_alpha_norm.weight"].float()).to(hidden.dtype)
    bias = weights.get("self_attn.dms_proj_alpha.bias")
    return functional.linear(states, weights["self_attn.dms_proj_alpha.weight"], bias)


def _first_of(content: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of some names that a mapping has; None for none."""
    return next((content[name] for name in names if content.get(name) is not None), None)


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
                    "weights you want",
                    field="scorer",
                    code="conflict",
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
        patterns = [prefix + pattern for pattern in (*_SAFE, *_PICKLED, *_BESIDE)]
        with hub_errors(f"{reference!r} is no file or folder here and cannot be fetched from the Hub"):
            path = Path(snapshot_download(repo, allow_patterns=patterns)) / subfolder
    for file_patterns in (_SAFE, _PICKLED):
        files: list[Path] = []
        for pattern in file_patterns:
            files += path.glob(pattern)
        if files:
            return sorted(files)
    raise UserError(
        f"{reference}: no {', '.join((*_SAFE, *_PICKLED))} is there; name the scorer's file or folder",
        field="scorer",
        code="missing",
    )
