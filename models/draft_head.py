"""Draft heads, which predict the base model's next tokens from its own features: EAGLE-3, EAGLE-1 and EAGLE-2.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3.1): row t reads the features of token t, outputs of three of the
model's layers, and the embedding of token t + 1, and predicts token t + 2. The layer's output replaces the features of
the next row, so that drafting can continue without the model.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077, section 3; EAGLE-2, arXiv 2406.16858, drafts trees with the same head): the
feature is the input of the model's lm_head. Row t predicts the feature of token t + 1, from which the
model's own lm_head predicts token t + 2.

Module names are the keys of public checkpoints, `keepsight.json` is ours. Heads that are published as a pickle are read
by torch's `weights_only`, which makes tensors and runs nothing.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from typing_extensions import Self

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, read_json, write_json
from keepsight.models.artifacts import (
    LARGEST_SIZE,
    Artifact,
    as_weights,
    check_digest,
    load_weights,
    read_tensors,
    unpickled,
    write_tensors,
)
from keepsight.models.card import CardBasics, Provenance, metrics_table, write_card
from keepsight.models.decoder import floats_of, head_width, input_embedding, input_shape
from keepsight.models.identity import logger

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ORIGIN = "keepsight.json"
PICKLE = "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_RELATIVE = 2**-6
_ABSOLUTE = 1e-4
"""Tolerances within which two embeddings are the same, rounded to different dtypes."""
_ROWS_AT_ONCE = 4096
_UNKNOWN_NORMS = ("norm_before_fc", "norm_before_residual")  # layers of another form, under the same keys

HeadAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of a head's layer: queries [B, H, q, d], keys and values [B, K, q, d] of the new tokens, after RoPE ->
[B, q, H, d]. The caller decides which earlier tokens they see: a cache, a training step, a padding mask."""

_VOCABULARY = ("d2t", "t2d")
_SAVED = (*SIZES, "hidden_act", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
_SAVED_IF_SET = ("eagle_config", "fc_norm", "norm_output", "qkv_bias")

_ABOUT = """An [EAGLE-3](https://arxiv.org/abs/2503.01840) draft head for `{base_model}`: one decoder layer
that predicts the next tokens from the outputs of three of the base model's layers. The embedding is the base model's
and not stored here. With greedy decoding the base model verifies every draft token, so the head changes the speed of an
answer, not its tokens."""

_USE = """With keepsight, give `draft.head=FOLDER_OR_HUB_ID` to a command, or load it in Python:

```python
from transformers import AutoModelForCausalLM
from keepsight.models.draft_head import DraftHead

model = AutoModelForCausalLM.from_pretrained("{base_model}")
head = DraftHead.from_pretrained("FOLDER_OR_HUB_ID", model=model)
```

`config.json` and the names in `model.safetensors` are those of public EAGLE-3 heads."""


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose outputs EAGLE-3 reads, low, middle and high, of a model with `layers` layers.

    Their outputs are the inputs of layers 2, L // 2 and L - 3, counted from 0. A `UserError` if the model has too few
    layers for three different ones.
    """
    low = 1
    middle = layers // 2 - 1
    high = layers - 4
    if not low < middle < high:
        raise UserError(
            f"a model of {layers} layers is too shallow for an EAGLE-3 head; name its feature layers",
            field="layers",
            code="model",
        )
    return low, middle, high


# Layers


class HeadAttention(nn.Module):
    """Projections of a head's layer.

    Args:
        config: The head's configuration; `qkv_bias` (default false) gives queries, keys and values a bias.
        inputs: Width of the inputs.
    """

    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        super().__init__()
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or 1
        width = head_width(config)
        bias = bool(getattr(config, "qkv_bias", False))
        self.width = width
        self.q_proj = nn.Linear(inputs, heads * width, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)

    def forward(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], attend: HeadAttend) -> Tensor:
        """[B, q, inputs] -> [B, q, hidden]; `rotation` holds RoPE's cosines and sines."""
        query = self._heads(self.q_proj(inputs))
        key = self._heads(self.k_proj(inputs))
        value = self._heads(self.v_proj(inputs))
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        return self.o_proj(attend(query, key, value).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, q, heads * width] -> [B, heads, q, width]."""
        return projected.unflatten(-1, (-1, self.width)).transpose(1, 2)


class HeadRotaryEmbedding(LlamaRotaryEmbedding):
    """RoPE whose frequencies stay in float32 and are computed at once, even where the head is on the meta device.

    In half precision the angles of far positions would be wrong.
    """

    def __init__(self, config: LlamaConfig) -> None:
        with torch.device("cpu"):
            super().__init__(config)
        values = dict(floats_of(config.rope_parameters))
        has_finite_values = all(map(math.isfinite, values.values()))
        if not has_finite_values or not all(buffer.isfinite().all() for buffer in self.buffers()):
            raise ValueError(f"RoPE's parameters {config.rope_parameters} are not finite")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            setattr(self, name, frequencies.to(self.get_buffer(name).device))
        return self


class HeadLayer(nn.Module):
    """The decoder layer of EAGLE-1, or of EAGLE-3, which norms its inputs; the residual is the feature.

    Args:
        config: The head's configuration.
        with_embedding: Whether the attention reads normed embeddings and features side by side (EAGLE-3), or the
            features as they are (EAGLE-1).
    """

    def __init__(self, config: LlamaConfig, with_embedding: bool) -> None:
        super().__init__()
        width = config.hidden_size
        eps = config.rms_norm_eps
        inputs = 2 * width if with_embedding else width
        self.self_attn = HeadAttention(config, inputs)
        self.mlp = LlamaMLP(config)
        if with_embedding:
            self.hidden_norm = LlamaRMSNorm(width, eps=eps)
            self.input_layernorm = LlamaRMSNorm(width, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)

    def forward(
        self, embeddings: Tensor | None, features: Tensor, rotation: tuple[Tensor, Tensor], attend: HeadAttend
    ) -> Tensor:
        """Embeddings (None for EAGLE-1) and features [B, q, hidden] -> [B, q, hidden]."""
        inputs = features
        if embeddings is not None:
            inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        hidden: Tensor = features + self.self_attn(inputs, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


# Heads


class EagleHead(nn.Module, Artifact):
    """Base of EAGLE's heads of all versions. `load` makes the head that a folder holds.

    Attributes:
        config: A Llama configuration of the layer.
        own_embedding: [vocab, hidden], where the head's embedding differs from the model's; it is not trained.
        may_have_embedding: Whether the file has an embedding that may differ: it was read without a model to compare.
    """

    kind = "draft head"
    files = (WEIGHTS, CONFIG)
    optional = (ORIGIN,)
    config: LlamaConfig
    own_embedding: Tensor | None = None
    may_have_embedding: bool = False

    def embedding(self, model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
        """The function that embeds token ids [B, q] for the head, [B, q, hidden]: the model's embedding, or its own."""
        if self.own_embedding is None:
            return model.get_input_embeddings()
        return partial(functional.embedding, weight=self.own_embedding)

    @classmethod
    def load(cls, folder: Path, model: PreTrainedModel | None = None) -> Self:
        """Read a head: an EAGLE-3 one (`midlayer.*`, or `layers.0.*` with a `hidden_norm`), or an EAGLE-1 or -2 one.

        See `Artifact.load`. With a model the head keeps an embedding of its own where the file's differs from the
        model's; without one, or with one on the meta device, it has none, and a `FeatureHead` has no logits.
        """
        folder = Path(at_home(folder))
        if not (folder / PICKLE).is_file() or (folder / WEIGHTS).exists():
            cls._require_files(folder)
        config = read_config(folder / CONFIG)
        origin: Origin | None = read_json(folder / ORIGIN, Origin) if (folder / ORIGIN).is_file() else None
        has_values = model is not None and not input_embedding(model).is_meta
        if model is not None:
            check_model(folder, config, model)
            if origin is not None and has_values:
                origin.provenance.warn_of_another_model(folder, model)
        path, tensors = read_weights(folder, origin)
        embedding = tensors.pop(EMBEDDING, None)
        head = _empty_head(folder / CONFIG, path, config, tensors, model)
        if not isinstance(head, cls):
            raise UserError(
                f"{folder}: an EAGLE-1 or EAGLE-2 head; only EAGLE-3 heads can be used here",
                field="draft.head",
                code="model",
            )
        if isinstance(head, DraftHead):
            tensors = _complete_vocabulary(path, head, tensors)
        load_weights(head, path, tensors, model, "fc.weight", exact=_VOCABULARY)
        if model is not None and has_values and embedding is not None:
            head.own_embedding = own_embedding(path, embedding, model)
        head.may_have_embedding = model is None and embedding is not None
        if origin is not None:
            head.provenance = origin.provenance
        return head

    def _write(self, folder: Path) -> None:
        tensors = dict(self.state_dict())
        if self.own_embedding is not None:
            tensors[EMBEDDING] = self.own_embedding
        digests = write_tensors(folder / WEIGHTS, tensors)
        write_json(folder / ORIGIN, {"provenance": asdict(self.provenance), "digests": digests})
        write_json(folder / CONFIG, self.public_config())

    def public_config(self) -> dict[str, Any]:
        """The configuration under the names of public heads, which serving engines read.

        Raises:
            UserError: the head is of a version that can only be loaded.
        """
        raise UserError("only EAGLE-3 heads can be saved", field="draft.head", code="model")

    def card(self, basics: CardBasics, measured: Any = "") -> str:
        """See `Artifact.card`; a `UserError` for versions that can only be loaded."""
        raise UserError("only EAGLE-3 heads can be saved", field="draft.head", code="model")

    @abstractmethod
    def layers_of(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The model's layers whose outputs are the features."""

    @abstractmethod
    def combine(self, features: Tensor) -> Tensor:
        """The model's features as the first input of `forward`: [B, q, layers * width] -> [B, q, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Output of `forward` -> logits [..., draft_vocab] of token t + 2."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft's vocabulary -> ids of the model's."""
        return draft_ids


class DraftHead(EagleHead):
    """An EAGLE-3 head; the embedding is the model's, unless it has its own.

    Args:
        config: A Llama configuration of the layer (`hidden_size`, heads, RoPE, ...) with, as public checkpoints have
            them, `vocab_size` of the model, `draft_vocab_size`, `target_hidden_size` (by default `hidden_size`), and
            `eagle_config` with `eagle_aux_hidden_state_layer_ids`, the model's feature layers. EAGLE-3.1 adds
            `fc_norm`, a norm for each of the three layers' features, and `norm_output`: the features of the next row
            are the outputs of the last norm.

    Attributes:
        d2t: [draft_vocab] int64: the model's id minus the draft's id.
        t2d: [vocab] bool: whether the model's id is in the draft's vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        draft_vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.norm_output = bool(getattr(config, "norm_output", False))
        if getattr(config, "fc_norm", False):
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(3 * width, config.hidden_size, bias=False)
        self.midlayer = HeadLayer(config, with_embedding=True)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.rotary_emb = HeadRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < draft_vocab)

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        """Indices of the model's layers whose outputs are its features; None for the default ones."""
        eagle_config: dict[str, Any] = getattr(self.config, "eagle_config", None) or {}
        layers = eagle_config.get("eagle_aux_hidden_state_layer_ids")
        return None if layers is None else tuple(layers)

    def layers_of(self, model: PreTrainedModel) -> tuple[int, ...]:
        """See `EagleHead.layers_of`."""
        return self.feature_layers or default_feature_layers(model.config.get_text_config().num_hidden_layers)

    def combine(self, features: Tensor) -> Tensor:
        """The model's features of three layers, concatenated: [B, q, 3 * target_hidden] -> [B, q, hidden]."""
        return self.fc(normed_features(self, features))

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: HeadAttend) -> Tensor:
        """One pass of the layer: the next row's features [B, q, hidden]; before the last norm unless `norm_output`.

        `embeddings` [B, q, hidden] are of tokens t + 1, `features` [B, q, hidden] of tokens t: from `combine`, or the
        output of an earlier pass. `positions` are [B or 1, q] int64.
        """
        hidden = self.midlayer(embeddings, features, self.rotary_emb(embeddings, positions), attend)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of `forward` -> logits [..., draft_vocab] of token t + 2."""
        normed = hidden if self.norm_output else self.norm(hidden)
        return self.lm_head(normed)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """See `EagleHead.target_ids`."""
        return draft_ids + self.d2t[draft_ids]

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Set the draft's vocabulary: [draft_vocab] int64, ids of the model, ascending."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def card(self, basics: CardBasics, measured: Any = "") -> str:
        """The model card; `measured` holds the last measurement, such as accepted length and agreement."""
        if not isinstance(measured, str):
            measured = metrics_table(measured, "value")
        return write_card(
            basics,
            tags=["eagle3", "speculative-decoding"],
            about=_ABOUT.format(base_model=basics.base_model),
            use=_USE.format(base_model=basics.base_model),
            heading="Measured on held-out training samples",
            measured=measured,
        )

    def public_config(self) -> dict[str, Any]:
        """The configuration under the names of public heads, which serving engines read.

        `target_hidden_size` is left out when it is `hidden_size`: EAGLE's own code takes its presence for a head with
        an embedding of its own.
        """
        config = self.config
        rope: dict[str, Any] = dict(config.rope_parameters or {})
        theta = rope.pop("rope_theta", 10000.0)
        values = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{name: getattr(config, name) for name in _SAVED},
            "head_dim": head_width(config),
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.d2t),
            "rope_theta": theta,
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            "tie_word_embeddings": False,
            "torch_dtype": str(self.fc.weight.dtype).removeprefix("torch."),
        }
        target_width = self.fc.in_features // 3
        if target_width != config.hidden_size or self.own_embedding is not None:
            values["target_hidden_size"] = target_width
        for name in _SAVED_IF_SET:
            value = getattr(config, name, None)
            if value:
                values[name] = value
        return values


def normed_features(head: Any, features: Tensor) -> Tensor:
    """Features [..., 3 * target_hidden] of three layers, each through its norm where the head has an `fc_norm`."""
    if not hasattr(head, "fc_norm"):
        return features
    layers = features.chunk(3, dim=-1)
    normed = [norm(layer) for norm, layer in zip(head.fc_norm, layers, strict=True)]
    return torch.cat(normed, dim=-1)


class FeatureHead(EagleHead):
    """An EAGLE-1 or EAGLE-2 head; lm_head and embedding are the model's, unless it has an embedding of its own.

    Args:
        config: A Llama configuration of the layer, with `bias` (of `fc`, by default true) and `qkv_bias` (by default
            false) as public checkpoints have them.
        lm_head: The model's lm_head; without it there are no logits.
    """

    def __init__(self, config: LlamaConfig, lm_head: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bool(getattr(config, "bias", True)))
        self.layers = nn.ModuleList([HeadLayer(config, with_embedding=False)])
        self.rotary_emb = HeadRotaryEmbedding(config)
        self._lm_head = (lm_head,)  # in a tuple, because torch registers modules that are attributes

    def layers_of(self, model: PreTrainedModel) -> tuple[int, ...]:
        """One past the last layer: its output after the final norm (see `RecordFeatures`)."""
        return (model.config.get_text_config().num_hidden_layers,)

    def combine(self, features: Tensor) -> Tensor:
        """The model's feature [B, q, hidden], as it is."""
        return features

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: HeadAttend) -> Tensor:
        """One pass of the layer: [B, q, hidden], the features of the next row; arguments as in `DraftHead.forward`."""
        inputs = self.fc(torch.cat([embeddings, features], dim=-1))
        return self.layers[0](None, inputs, self.rotary_emb(embeddings, positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of `forward` -> logits [..., vocab] of token t + 2.

        Raises:
            UserError: the head was loaded without its model.
        """
        lm_head = self._lm_head[0]
        if lm_head is None:
            raise UserError(
                "an EAGLE-1 or EAGLE-2 head has no lm_head of its own; load it with its model",
                field="lm_head",
                code="model",
            )
        return lm_head(hidden)


# Reading


@dataclass(frozen=True)
class Origin:
    """Content of keepsight.json: digests are `sha256:...` by file name."""

    provenance: Provenance
    digests: dict[str, str]


def read_config(path: Path) -> LlamaConfig:
    """A head's config.json, checked as strictly as its tensors."""
    values: dict[str, Any] = read_json(path, dict[str, Any])
    eps = values.get("rms_norm_eps", 1e-6)
    if type(eps) is not float or not 0 < eps < 1:
        raise UserError(
            f"{path}: rms_norm_eps={eps} must be above 0 and below 1; fetch it again",
            field="rms_norm_eps",
            code="range",
        )
    for name in SIZES:
        size = values.get(name)
        if type(size) is not int or not 0 < size <= LARGEST_SIZE:
            raise UserError(
                f"{path}: {name} is missing or not a size; this configures no EAGLE head", field=name, code="type"
            )
    layers = values.get("num_hidden_layers", 1)
    if layers != 1:
        raise UserError(
            f"{path}: num_hidden_layers is {layers}; an EAGLE head has 1, this is another model",
            field="num_hidden_layers",
            code="range",
        )
    for name in _UNKNOWN_NORMS:
        if values.get(name):
            raise UserError(
                f"{path}: {name}={values[name]} is not supported; choose another head", field=name, code="unknown"
            )
    if not _names_three_layers(values.get("eagle_config")):
        raise UserError(
            f"{path}: eagle_config={values['eagle_config']!r}: expected three whole numbers in "
            "eagle_aux_hidden_state_layer_ids, the model's layers that the head reads",
            field="eagle_config",
            code="type",
        )
    try:
        return LlamaConfig.from_dict(values)
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: not a Llama layer's configuration ({one_line(error, 200)})", field="config.json", code="file"
        ) from None


def _names_three_layers(eagle_config: Any) -> bool:
    if eagle_config is None:
        return True
    if not isinstance(eagle_config, dict):
        return False
    layers = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        return True
    return isinstance(layers, list) and [type(layer) for layer in layers] == [int, int, int]


def check_model(folder: Path, config: LlamaConfig, model: PreTrainedModel) -> None:
    """Refuse a head for a model of other sizes."""
    text = model.config.get_text_config()
    sizes = {
        "hidden size": (config.hidden_size, input_shape(model)[1]),
        "feature width": (getattr(config, "target_hidden_size", None) or config.hidden_size, text.hidden_size),
        "vocabulary": (config.vocab_size, text.vocab_size),
    }
    for name, (head_size, model_size) in sizes.items():
        if head_size != model_size:
            raise UserError(
                f"{folder}: this draft head is for a model with {name} {head_size}, but that of "
                f"{model.config.name_or_path or type(model).__name__} is {model_size}; choose the model's own head",
                field=name,
                code="model",
            )


def weights_path(folder: Path) -> Path:
    """The file of a draft head's weights: safetensors, or else the pickle that some authors publish."""
    path = folder / WEIGHTS
    return path if path.is_file() else folder / PICKLE


def read_weights(folder: Path, origin: Origin | None) -> tuple[Path, dict[str, Tensor]]:
    """The file of a head's weights and its tensors, an EAGLE-3 layer's under `midlayer.*`."""
    path = weights_path(folder)
    if path.name == PICKLE:
        tensors = unpickled(path)
        logger.warning("%s: a pickle; only its %d tensors were read, no code was run", path, len(tensors))
    else:
        if origin is not None:
            check_digest(path, origin.digests.get(WEIGHTS, "missing"), ORIGIN)
        tensors = read_tensors(path)
    if "layers.0.hidden_norm.weight" in tensors:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    return path, tensors


def own_embedding(path: Path, embedding: Tensor, model: PreTrainedModel) -> Tensor | None:
    """A head's embedding on the model's device and in its dtype, if it differs from the model's."""
    base = input_embedding(model)
    if embedding.shape != base.shape:
        raise UserError(
            f"{path}: {EMBEDDING!r} has shape {list(embedding.shape)}, the model's is {list(base.shape)}",
            field=EMBEDDING,
            code="model",
        )
    head_embedding = as_weights(path, {EMBEDDING: embedding}, model.dtype)[EMBEDDING]
    for head_rows, base_rows in zip(head_embedding.split(_ROWS_AT_ONCE), base.split(_ROWS_AT_ONCE), strict=True):
        if not torch.allclose(head_rows.float(), base_rows.float().cpu(), _RELATIVE, _ABSOLUTE):
            return head_embedding.to(base.device)
    return None


def _empty_head(
    config_path: Path, path: Path, config: LlamaConfig, tensors: dict[str, Tensor], model: PreTrainedModel | None
) -> EagleHead:
    """The head that the tensors' names belong to, on the meta device."""
    try:
        with torch.device("meta"):
            if any(key.startswith("midlayer.") for key in tensors):
                return DraftHead(config)
            if any(key.startswith("layers.0.") for key in tensors):
                lm_head = None if model is None else model.get_output_embeddings()
                return FeatureHead(config, lm_head)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"{config_path}: no layer can be made of it ({one_line(error, 200)})", field="config.json", code="file"
        ) from None
    raise UserError(
        f"{path}: no EAGLE head, which has tensors called midlayer.* or layers.0.*; "
        f"the first here is {min(tensors, default='missing')!r}",
        field="draft.head",
        code="file",
    )


def _complete_vocabulary(path: Path, head: DraftHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with checked d2t and t2d, which may be missing when the draft's vocabulary is the model's."""
    draft_size = len(head.d2t)
    model_size = len(head.t2d)
    has_lm_head = "lm_head.weight" in tensors and len(tensors["lm_head.weight"]) == draft_size
    has_vocabulary = any(name in tensors for name in _VOCABULARY)
    if draft_size == model_size and has_lm_head and not has_vocabulary:
        offsets = torch.zeros(draft_size, dtype=torch.long)
        is_drafted = torch.ones(model_size, dtype=torch.bool)
        return {**tensors, "d2t": offsets, "t2d": is_drafted}
    if [tensors[name].shape for name in _VOCABULARY if name in tensors] != [(draft_size,), (model_size,)]:
        return tensors  # `check_names_and_shapes` names the fault
    offsets = tensors["d2t"].long()
    is_drafted = tensors["t2d"].bool()
    ids = offsets + torch.arange(draft_size)
    if not torch.equal(ids.sort().values, is_drafted.nonzero().flatten()):
        raise UserError(f"{path}: d2t and t2d name different tokens; fetch it again", field="d2t", code="file")
    return {**tensors, "d2t": offsets, "t2d": is_drafted}
