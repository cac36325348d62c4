"""The retrieval head: a draft head pruned to the parts that select entries of the KV cache.

SpeContext (arXiv 2512.00722), section 4.3, keeps the embedding and the query and key projections of the EAGLE-3 layer.
Token t is scored before the model reads it: with its embedding, and in the variant `previous-step` with the model's
features of token t - 1, from the previous step. Its RoPE position is t. The embedding is the base model's.

The paper selects once for all layers. With `groups` above 1, which is keepsight's own, runs of neighbouring layers have
queries and keys of their own, made of the same inputs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from typing_extensions import Self

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, read_json, write_json
from keepsight.models import draft_head
from keepsight.models.artifacts import LARGEST_SIZE, Artifact, check_digest, load_weights, read_tensors, write_tensors
from keepsight.models.card import CardBasics, Provenance, example, metrics_table, write_card
from keepsight.models.decoder import FULL, cached_kv_heads, full_attention_layers, input_shape, norm_epsilon
from keepsight.models.draft_head import (
    DraftHead,
    EagleHead,
    HeadRotaryEmbedding,
    default_feature_layers,
    normed_features,
)
from keepsight.tables import markdown_table

WEIGHTS = "retrieval_head.safetensors"
CONFIG = "retrieval_config.json"
PREVIOUS_STEP = "previous-step"
NONE = "none"
VARIANTS = (PREVIOUS_STEP, NONE)
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]

_ABOUT = """A retrieval head ([SpeContext](https://arxiv.org/abs/2512.00722)) for `{base_model}`: the query
and key projections of a draft head, which predict before every decoding step which entries of the KV cache the step
will read{groups}. It reads {reads}. {parameters:,} parameters; the embedding is the base model's and not stored here.
Trained with up to {trained:,} tokens; YaRN extends it further."""

_READS = {
    PREVIOUS_STEP: "the coming token's embedding, and outputs of three of the base model's layers for the one before",
    NONE: "token embeddings alone",
}

_LEGEND = """
KL divergence of the head's attention from the base model's importance, in nats: {kl}.

Only steps with more entries than the budget count. Hit rate: share of the base model's top entries of a step and KV
head (by attention averaged over the layers that share a selection) that the head selects too. Mass: share of the base
model's attention on the selected entries. Without a head: the first 4 and the latest entries. At best: the base model's
own top entries. Overlap: share of a step's selection that the next step selects again.
"""


@dataclass(frozen=True)
class RetrievalConfig:
    """Shape of a retrieval head; names as in a Llama configuration.

    Attributes:
        features: `previous-step`, the model's features of the previous token; or `none`, token embeddings alone.
        hidden_size: Width of the model's embedding.
        target_hidden_size: Width of each of the model's three feature layers.
        vocab_size: Size of the model's vocabulary.
        num_attention_heads: Query heads of each group.
        num_key_value_heads: KV heads of each group, as many as the model's cache has.
        head_dim: Dimensions of one head.
        rms_norm_eps: Epsilon of the norms.
        max_position_embeddings: Tokens it was trained with, or the context it was extended to.
        rope_parameters: RoPE parameters of transformers: `rope_type`, `rope_theta`, and what the type needs.
        feature_layers: The model's layers whose outputs are its features; None for EAGLE-3's default ones.
        fc_norm: Whether each layer's features are normed first (EAGLE-3.1).
        qkv_bias: Whether the projections have a bias.
        groups: Groups of neighbouring layers, of equal sizes; each has projections and selections of its own.

    Raises:
        UserError: `features` is neither variant, the query heads do not fall into equal groups, or RoPE is not named.
    """

    features: str
    hidden_size: Size
    target_hidden_size: Size
    vocab_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    max_position_embeddings: Size
    rope_parameters: dict[str, Any] = field(hash=False)
    feature_layers: tuple[int, ...] | None = None
    fc_norm: bool = False
    qkv_bias: bool = False
    groups: Size = 1

    def __post_init__(self) -> None:
        if self.features not in VARIANTS:
            raise UserError(
                f"features={self.features!r} is unknown; choose one of {', '.join(VARIANTS)}",
                field="features",
                code="unknown",
            )
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if heads % kv_heads:
            raise UserError(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}",
                field="num_attention_heads",
                code="range",
            )
        if not {"rope_type", "rope_theta"} <= self.rope_parameters.keys():
            raise UserError(
                f"rope_parameters={self.rope_parameters} must name rope_type and rope_theta",
                field="rope_parameters",
                code="type",
            )
        if type(self.trained) is not int or not 0 < self.trained <= LARGEST_SIZE:
            raise UserError(
                f"rope_parameters: original_max_position_embeddings={self.trained} is not a possible size",
                field="rope_parameters",
                code="range",
            )

    def group_of(self, index: int, layers: int) -> int:
        """The group of a layer by its index among the model's `layers` layers with full attention."""
        return index * self.groups // layers

    @property
    def trained(self) -> int:
        """Context length that it was trained with."""
        return self.rope_parameters.get("original_max_position_embeddings", self.max_position_embeddings)

    def extended(self, context: int) -> Self:
        """The same head for a longer context, by YaRN (Peng et al. 2023, arXiv 2309.00071), without training.

        The factor is the context over the trained length, beta_fast 32, beta_slow 1, the attention factor
        0.1 ln(factor) + 1. Unchanged when its positions already reach that far, or when it has another kind of RoPE,
        which covers long contexts in its own way.
        """
        if context <= self.max_position_embeddings or self.rope_parameters["rope_type"] not in ("default", "yarn"):
            return self
        yarn = {
            "rope_type": "yarn",
            "rope_theta": self.rope_parameters["rope_theta"],
            "factor": context / self.trained,
            "original_max_position_embeddings": self.trained,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
        return replace(self, rope_parameters=yarn, max_position_embeddings=context)

    def trained_on(self, tokens: int, layers: tuple[int, ...]) -> Self:
        """The same head after training with samples of up to `tokens` tokens and the features of these layers."""
        trained = replace(self, feature_layers=layers or None)
        if tokens <= self.max_position_embeddings or self.rope_parameters["rope_type"] != "default":
            return trained
        return replace(trained, max_position_embeddings=tokens)

    def llama(self) -> LlamaConfig:
        """The configuration that transformers needs for RoPE."""
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
        values = {name: getattr(self, name) for name in names}
        return LlamaConfig(rope_parameters=dict(self.rope_parameters), **values)


class RetrievalHead(nn.Module, Artifact):
    """Queries and keys whose attention selects the entries that the model reads.

    Attributes:
        config: The head's shape.
    """

    kind = "retrieval head"
    files = (WEIGHTS, CONFIG)

    def __init__(self, config: RetrievalConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        width = hidden
        self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        if config.features == PREVIOUS_STEP:
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps=eps) for _ in range(3))
            self.fc = nn.Linear(3 * config.target_hidden_size, hidden, bias=False)
            self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
            width = 2 * hidden
        heads = config.groups * config.num_attention_heads
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, self.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.rotary_emb = HeadRotaryEmbedding(config.llama())

    @property
    def kv_heads(self) -> int:
        """KV heads of all groups, group after group; head h of a group selects for KV head h of each of its layers."""
        return self.config.groups * self.config.num_key_value_heads

    @property
    def scaling(self) -> float:
        """Factor of the dot products."""
        return self.config.head_dim**-0.5

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's keys."""
        return self.kv_heads * self.config.head_dim * self.k_proj.weight.element_size()

    def layers_of(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The model's layers whose outputs are the features; empty when it reads embeddings alone."""
        if self.config.features == NONE:
            return ()
        return self.config.feature_layers or default_feature_layers(model.config.get_text_config().num_hidden_layers)

    def project(self, embeddings: Tensor, features: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, q, d] and keys [B, K, q, d] of tokens at positions [B or 1, q], in the weights' dtype.

        `embeddings` [B, q, hidden] are the model's, `features` [B, q, 3 * target_hidden] those of each token's
        predecessor (see `of_the_token_before`); None for a head that reads none.
        """
        inputs = self.inputs(embeddings, features)
        return self.queries(inputs, positions), self.keys(inputs, positions)

    def inputs(self, embeddings: Tensor, features: Tensor | None) -> Tensor:
        """Inputs of the projections, [B, q, hidden or 2 * hidden]; arguments as for `project`."""
        dtype = self.q_proj.weight.dtype
        normed = self.input_layernorm(embeddings.to(dtype))
        if self.config.features == NONE:
            return normed
        if features is None:
            raise ValueError(f"a head with features={self.config.features!r} needs the features of the token before")
        return torch.cat([normed, self.hidden_norm(self.fc(normed_features(self, features.to(dtype))))], dim=-1)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """From `inputs`, [B, H, q, d] after RoPE."""
        return self._rotated(self.q_proj(inputs), positions)

    def keys(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """From `inputs`, [B, K, q, d] after RoPE."""
        return self._rotated(self.k_proj(inputs), positions)

    def _rotated(self, projected: Tensor, positions: Tensor) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return _rotate(heads, *self.rotary_emb(heads.float(), positions))

    def grouped(self, groups: int) -> "RetrievalHead":
        """A copy with more groups: each group is split into equally many, which start from its weights.

        Raises:
            UserError: `groups` is no multiple of this head's.
        """
        present_groups = self.config.groups
        if present_groups == groups:
            return self
        if groups % present_groups:
            raise UserError(
                f"this retrieval head has {present_groups} groups of layers, which cannot be split into {groups}; "
                f"give retrieval_head.groups={present_groups} or a multiple",
                field="retrieval_head.groups",
                code="range",
            )
        head = RetrievalHead(replace(self.config, groups=groups)).to(self.q_proj.weight)
        weights = self.state_dict()
        for name in weights:
            if name.startswith(("q_proj", "k_proj")):
                by_group = weights[name].unflatten(0, (present_groups, -1))
                weights[name] = by_group.repeat_interleave(groups // present_groups, dim=0).flatten(0, 1)
        head.load_state_dict(weights)
        return head

    def extended(self, context: int) -> "RetrievalHead":
        """A head with the same weights (shared, not copied) for a longer context; see `RetrievalConfig.extended`."""
        config = self.config.extended(context)
        if config is self.config:
            return self
        with torch.device("meta"):
            head = RetrievalHead(config)
        head.load_state_dict(self.state_dict(), assign=True)
        head.rotary_emb.to(self.q_proj.weight.device)
        return head.requires_grad_(self.q_proj.weight.requires_grad).train(self.training)

    def reaching(self, length: int) -> "RetrievalHead":
        """The head extended to `length` positions, by a power of two, so that batching seldom changes selections."""
        context = self.config.trained
        while context < length:
            context *= 2
        return self.extended(context)

    def turned(self, keys: Tensor, positions: Tensor, before: "RetrievalHead") -> Tensor:
        """Keys [B, K, n, d] of `before`, this head for another context, at positions [B or 1, n] -> by this RoPE."""
        cos, sin = before.rotary_emb(keys.float(), positions)
        scale = (cos**2 + sin**2)[:, None]  # of YaRN's attention factor
        plain = _rotate(keys.float(), cos, -sin) / scale
        return _rotate(plain, *self.rotary_emb(plain, positions)).to(keys.dtype)

    @classmethod
    def from_draft(cls, draft: nn.Module, features: str) -> Self:
        """Prune an EAGLE-3 draft head to copies of its query and key projections, norms, and feature projection.

        With `features` `none` only the half of the projections that reads embeddings stays. A `UserError` if it is no
        EAGLE-3 head or has an embedding of its own, or `features` is neither variant.
        """
        if not isinstance(draft, DraftHead):
            raise UserError(
                "only EAGLE-3 draft heads can be pruned; this is one of EAGLE-1 or EAGLE-2", field="head", code="model"
            )
        if draft.own_embedding is not None:
            raise UserError(
                "this draft head has an embedding of its own, and a retrieval head reads the base model's; distil it: "
                "train_retrieval_head.py head=FOLDER_OR_HUB_ID",
                field="head",
                code="model",
            )
        config = draft.config
        layer = draft.midlayer
        head = cls(
            RetrievalConfig(
                features=features,
                hidden_size=config.hidden_size,
                target_hidden_size=draft.fc.in_features // 3,
                vocab_size=config.vocab_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=layer.self_attn.k_proj.out_features // layer.self_attn.width,
                head_dim=layer.self_attn.width,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters or {}),
                feature_layers=draft.feature_layers,
                fc_norm=hasattr(draft, "fc_norm"),
                qkv_bias=layer.self_attn.q_proj.bias is not None,
            )
        )
        weights = draft.state_dict() | layer.state_dict() | layer.self_attn.state_dict()
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.copy_(weights[name][..., : parameter.shape[-1]])
        return head.to(draft.fc.weight.device, draft.fc.weight.dtype)

    @classmethod
    def untrained(cls, model: PreTrainedModel, features: str, trained: int, groups: int = 1) -> Self:
        """A head of a model's shape with random projections, to be distilled on up to `trained` tokens.

        Raises:
            UserError: `features` is neither variant, or the model has fewer layers with full attention than groups.
        """
        require_layers_for(groups, model)
        config = model.config.get_text_config()
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        rope = rope.get(FULL) or rope  # by kind of layer in models that have several
        return cls(
            RetrievalConfig(
                features=features,
                hidden_size=config.hidden_size,
                target_hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=cached_kv_heads(model),
                head_dim=config.hidden_size // config.num_attention_heads // 2 * 2,
                rms_norm_eps=norm_epsilon(config),
                max_position_embeddings=trained,
                rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
                groups=groups,
            )
        ).to(model.device)

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the head fits a model.

        Raises:
            UserError: hidden size, vocabulary or KV heads differ; or the model is too shallow for features or groups.
        """
        config = self.config
        text = model.config.get_text_config()
        pairs = {
            "hidden size": (config.hidden_size, input_shape(model)[1]),
            "feature width": (config.target_hidden_size, text.hidden_size),
            "vocabulary": (config.vocab_size, text.vocab_size),
            "KV heads": (config.num_key_value_heads, cached_kv_heads(model)),
        }
        differing = []
        for size_name, (head_size, model_size) in pairs.items():
            if head_size != model_size:
                differing.append(f"{size_name} {head_size} against {model_size}")
        if differing:
            name = model.config.name_or_path or type(model).__name__
            raise UserError(
                f"this retrieval head is for another model than {name}: {', '.join(differing)}; choose its own",
                field="retrieval",
                code="model",
            )
        self.layers_of(model)
        # Without any such layer the method itself refuses the model, and says why.
        layers = len(full_attention_layers(model.config))
        if 0 < layers < config.groups:
            raise UserError(
                f"this retrieval head has {config.groups} groups of layers, and the model {layers} layers with full "
                "attention; choose its own",
                field="retrieval",
                code="model",
            )

    @classmethod
    def load(cls, folder: Path, model: PreTrainedModel | None = None) -> Self:
        """Read and verify a head; see `Artifact.load`.

        A draft head in the folder is pruned and used as it is, as in the paper; it reads the model's features of the
        previous token.
        """
        folder = Path(at_home(folder))
        if has_draft_head(folder):
            return cls._pruned(folder, model)
        try:
            cls._require_files(folder)
        except UserError as error:
            raise error.reworded(
                f"{folder}: expected a retrieval head ({', '.join(cls.files)}), or an EAGLE-3 draft head, which is "
                f"pruned ({draft_head.CONFIG}, {draft_head.WEIGHTS}); train one with train_retrieval_head.py"
            ) from None
        saved: _Saved = read_json(folder / CONFIG, _Saved)
        check_digest(folder / WEIGHTS, saved.digests.get(WEIGHTS, "missing"), CONFIG)
        try:
            with torch.device("meta"):
                head = cls(saved.head)
        except (StrictDataclassError, ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder / CONFIG}: no head can be made of it ({one_line(error, 200)})", field=CONFIG, code="file"
            ) from None
        if model is not None:
            try:
                head.check_model(model)
            except UserError as error:
                raise error.reworded(f"{folder}: {error}") from None
            saved.provenance.warn_of_another_model(folder, model)
        load_weights(head, folder / WEIGHTS, read_tensors(folder / WEIGHTS), model, "q_proj.weight")
        head.provenance = saved.provenance
        return head.requires_grad_(False)

    @classmethod
    def _pruned(cls, folder: Path, model: PreTrainedModel | None) -> Self:
        draft = EagleHead.load(folder, model)
        if draft.may_have_embedding:
            raise UserError(
                f"{folder}: this draft head has an embedding that must be compared with the base model's; give "
                "RetrievalHead.from_pretrained(..., model=model)",
                field="model",
                code="missing",
            )
        try:
            head = cls.from_draft(draft, PREVIOUS_STEP)
            if model is not None:
                head.check_model(model)
                head.config = replace(head.config, feature_layers=head.layers_of(model))
        except UserError as error:
            raise error.reworded(f"{folder}: {error}") from None
        head.provenance = draft.provenance
        return head.eval().requires_grad_(False)

    def _write(self, folder: Path) -> None:
        digests = write_tensors(folder / WEIGHTS, self.state_dict())
        values = {"head": asdict(self.config), "provenance": asdict(self.provenance), "digests": digests}
        write_json(folder / CONFIG, values)

    def card(self, basics: CardBasics, measured: Any = "") -> str:
        """The model card; `measured` is what `comparison` returns."""
        use = example(basics.base_model, "SpeContext", 1024)
        groups = ""
        if self.config.groups > 1:
            groups = f", for each of {self.config.groups} groups of neighbouring layers"
        if not isinstance(measured, str):
            measured = metrics_table(measured, "value")
        return write_card(
            basics,
            tags=["specontext", "kv-cache", "retrieval-head"],
            about=_ABOUT.format(
                base_model=basics.base_model,
                groups=groups,
                reads=_READS[self.config.features],
                parameters=parameters(self),
                trained=self.config.trained,
            ),
            use=f"{use}\n\nWith keepsight's commands: `retrieval=FOLDER_OR_HUB_ID methods=[full,specontext]`.",
            heading="Measured on held-out training samples",
            measured=measured,
        )


@dataclass(frozen=True)
class _Saved:
    """Content of retrieval_config.json."""

    head: RetrievalConfig
    provenance: Provenance
    digests: dict[str, str]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, H, n, d] rotated by cosines and sines [B or 1, n, d], in float32."""
    rotated, _ = apply_rotary_pos_emb(heads.float(), heads[:, :0].float(), cos, sin)
    return rotated.to(heads.dtype)


def of_the_token_before(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """Features [B, q, w] of tokens 0 to q - 1 -> row t holds those of token t - 1, zeros where there is none.

    `mask` [B, q] bool is False for padding on the left; None when nothing is padding.
    """
    if mask is not None:
        features = features.masked_fill(~mask[..., None], 0)
    return functional.pad(features, (0, 0, 1, -1))


def has_draft_head(folder: Path) -> bool:
    """Whether an artifact's folder has a draft head in place of a retrieval head."""
    has_retrieval_head = any((folder / name).is_file() for name in RetrievalHead.files)
    return not has_retrieval_head and (folder / draft_head.CONFIG).is_file()


def weights_path(folder: Path) -> Path:
    """The file of the weights that `RetrievalHead.load` reads from a folder."""
    return draft_head.weights_path(folder) if has_draft_head(folder) else folder / WEIGHTS


def require_layers_for(groups: int, model: PreTrainedModel) -> None:
    """Refuse more groups than the model has layers to select for.

    Raises:
        UserError: there are more.
    """
    layers = len(full_attention_layers(model.config))
    if groups > layers:
        raise UserError(
            f"retrieval_head.groups={groups}: the model has {layers} layers with full attention; lower it",
            field="retrieval_head.groups",
            code="range",
        )


def parameters(module: nn.Module) -> int:
    """Number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def pruning(head: RetrievalHead, draft: DraftHead) -> str:
    """One sentence on how much of a draft head its retrieval head leaves out (arXiv 2512.00722, section 4.3)."""
    kept = parameters(head)
    draft_parameters = parameters(draft)
    with_embedding = draft_parameters + head.config.vocab_size * head.config.hidden_size
    return (
        f"{kept:,} of the draft head's {draft_parameters:,} parameters stay: {1 - kept / draft_parameters:.1%} are "
        f"gone, {1 - kept / with_embedding:.1%} counted with the embedding, which is the base model's"
    )


def comparison(first: Mapping[str, float], last: Mapping[str, float], before: str) -> str:
    """A Markdown table of two measurements, before and after distillation; one sentence when nothing was measured.

    `first` and `last` are metrics of the initial head, called `before`, and of the distilled one: `eval_kl`, and for
    each budget B `eval_hit_B` and so on.
    """
    if not first:
        return "Not measured."
    columns = [
        (f"hit rate, {before}", first, "hit"),
        ("distilled", last, "hit"),
        ("without a head", last, "window_hit"),
        (f"mass, {before}", first, "mass"),
        ("distilled", last, "mass"),
        ("without a head", last, "window_mass"),
        ("at best", last, "best_mass"),
        (f"overlap, {before}", first, "overlap"),
        ("distilled", last, "overlap"),
    ]
    titles = [title for title, _, _ in columns]
    rows = []
    for metric in first:
        if not metric.startswith("eval_hit_"):
            continue
        budget = metric.removeprefix("eval_hit_")
        row = [budget, f"{last[f'eval_samples_{budget}']:.0f}"]
        for _, log, name in columns:
            value = log.get(f"eval_{name}_{budget}")
            cell = "-" if value is None else f"{value:.3f}"
            row.append(cell)
        rows.append(row)
    table = markdown_table(rows, ["budget", "samples", *titles])
    kl = f"{before} {first['eval_kl']:.3f}, distilled {last['eval_kl']:.3f}"
    return table + _LEGEND.format(kl=kl).rstrip()
