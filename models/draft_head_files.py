"""Draft heads on disk: public EAGLE checkpoints and our own, in the same form, loaded strictly.

A head is a folder with `config.json` and `model.safetensors`, whose tensors have the names of public checkpoints. Ours
also hold `keepsight.json` (where the head comes from, the digest of the weights) and a card.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from keepsight.atomic import atomic_files
from keepsight.errors import UserError
from keepsight.files import file_digest, read_json, write_json
from keepsight.models.draft_head import DraftHead, head_width
from keepsight.models.feature_head import FeatureHead
from keepsight.models.lookahead import input_embedding
from keepsight.models.lookahead_files import Provenance
from keepsight.models.versions import warn_of_another_base
from keepsight.models.weight_files import (
    LARGEST_SIZE,
    as_weights,
    check_digest,
    check_names_and_shapes,
    one_line,
    read_tensors,
)

CONFIG, WEIGHTS, ORIGIN = "config.json", "model.safetensors", "keepsight.json"
FILES = (CONFIG, WEIGHTS)

_PICKLE = "pytorch_model.bin"
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous().clone() for k, v in '
    f"torch.load('{_PICKLE}', map_location='cpu', weights_only=True).items()}}, '{WEIGHTS}')\""
)
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_UNKNOWN_NORMS = ("norm_before_fc", "norm_before_residual")  # other layers than ours, by the same keys
_EMBEDDING = ("embed_tokens.weight",)  # the target's, which some public files repeat
_VOCABULARY = ("d2t", "t2d")
_SAVED = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "vocab_size",
)
_SAVED_IF_SET = ("eagle_config", "fc_norm", "norm_output", "qkv_bias")


@dataclass(frozen=True)
class Origin:
    """What keepsight.json holds.

    Attributes:
        provenance: Where the head comes from.
        digests: `sha256:...` by file name.
    """

    provenance: Provenance
    digests: dict[str, str]


def load_draft_head(folder: Path, target: PreTrainedModel | None = None) -> DraftHead | FeatureHead:
    """Read a head: an EAGLE-3 one (`midlayer.*`), or an EAGLE-1 or EAGLE-2 one (`layers.0.*`), by its tensors' names.

    Args:
        folder: The head's folder.
        target: The model that it drafts for. The head gets its device and dtype; without one it stays on the CPU in
            the dtype of its file, and a `FeatureHead` has no logits.

    Raises:
        UserError: a file is missing, corrupt, or differs from its recorded digest; a tensor is missing, surplus, of
            another shape than the configuration says, or not finite; or the head is for another target.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(_what_is_missing(folder, name))
    config = _read_config(folder / CONFIG)
    origin: Origin | None = read_json(folder / ORIGIN, Origin) if (folder / ORIGIN).is_file() else None
    if target is not None:
        _check_target(folder, config, target)
        if origin is not None:
            warn_of_another_base(folder, origin.provenance.base_model, origin.provenance.base_version, target)
    tensors = _read_weights(folder, origin)
    head = _empty_head(folder, config, tensors, target)
    if isinstance(head, DraftHead):
        tensors = _complete_vocabulary(folder, head, tensors)
    check_names_and_shapes(folder / WEIGHTS, tensors, head.state_dict())
    dtype = target.dtype if target is not None else tensors["fc.weight"].dtype
    weights = {name: tensor for name, tensor in tensors.items() if name not in _VOCABULARY}
    head.load_state_dict(tensors | as_weights(folder / WEIGHTS, weights, dtype), assign=True)
    return head.to(target.device if target is not None else "cpu").eval()


def save_draft_head(head: DraftHead, folder: Path, provenance: Provenance, card: str) -> None:
    """Write a head's files into a folder, beside other files; a half-written head does not load."""
    state = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    with atomic_files(folder, last=CONFIG) as unfinished:
        save_file(state, unfinished / WEIGHTS, metadata={"format": "pt"})
        digests = {WEIGHTS: file_digest(unfinished / WEIGHTS)}
        write_json(unfinished / ORIGIN, {"provenance": asdict(provenance), "digests": digests})
        write_json(unfinished / CONFIG, _public_config(head))
        (unfinished / "README.md").write_text(card, encoding="utf-8")


def how_to_convert(where: str) -> str:
    """What to do with a head that exists as a pickle alone; `where` names the folder."""
    return f"{_PICKLE} is a pickle, which keepsight does not read; convert it once {where}: {_CONVERT}"


def _what_is_missing(folder: Path, name: str) -> str:
    if name == WEIGHTS and (folder / _PICKLE).is_file():
        return f"{folder}: {how_to_convert('in that folder')}"
    return f"{folder}: {name} is missing; a draft head needs {' and '.join(FILES)}"


def _read_config(path: Path) -> LlamaConfig:
    values: dict[str, Any] = read_json(path, dict[str, Any])
    for name in _SIZES:
        if type(size := values.get(name)) is not int or not 0 < size <= LARGEST_SIZE:
            raise UserError(f"{path}: {name} is missing or no possible size; this is no EAGLE head's configuration")
    if (layers := values.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"{path}: num_hidden_layers is {layers}; an EAGLE head has 1, this is another model")
    if unknown := [name for name in _UNKNOWN_NORMS if values.get(name)]:
        raise UserError(f"{path}: {unknown[0]}={values[unknown[0]]} is not supported; choose another head")
    if not _names_three_layers(values.get("eagle_config")):
        raise UserError(
            f"{path}: eagle_config={values['eagle_config']!r}: expected three whole numbers in "
            "eagle_aux_hidden_state_layer_ids, the target's layers that the head reads"
        )
    try:
        return LlamaConfig.from_dict(values)
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a Llama layer's configuration ({one_line(error)})") from None


def _names_three_layers(eagle_config: Any) -> bool:
    if eagle_config is None:
        return True
    layers = eagle_config.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle_config, dict) else ()
    return layers is None or (isinstance(layers, list) and [type(layer) for layer in layers] == [int, int, int])


def _check_target(folder: Path, config: LlamaConfig, target: PreTrainedModel) -> None:
    text = target.config.get_text_config()
    sizes = {
        "hidden size": (config.hidden_size, input_embedding(target).shape[1]),
        "feature width": (getattr(config, "target_hidden_size", None) or config.hidden_size, text.hidden_size),
        "vocabulary": (config.vocab_size, text.vocab_size),
    }
    for name, (own, its) in sizes.items():
        if own != its:
            raise UserError(
                f"{folder}: this draft head is for a target with {name} {own}, but that of "
                f"{target.config.name_or_path or type(target).__name__} is {its}; choose the target's own head"
            )


def _read_weights(folder: Path, origin: Origin | None) -> dict[str, Tensor]:
    if origin is not None:
        check_digest(folder / WEIGHTS, origin.digests.get(WEIGHTS, "missing"), ORIGIN)
    return read_tensors(folder / WEIGHTS, but=_EMBEDDING)


def _empty_head(
    folder: Path, config: LlamaConfig, tensors: dict[str, Tensor], target: PreTrainedModel | None
) -> DraftHead | FeatureHead:
    """The head that the tensors' names belong to, on the meta device."""
    try:
        with torch.device("meta"):
            if any(key.startswith("midlayer.") for key in tensors):
                return DraftHead(config)
            if any(key.startswith("layers.0.") for key in tensors):
                return FeatureHead(config, None if target is None else target.get_output_embeddings())
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: no layer can be made of it ({one_line(error)})") from None
    raise UserError(
        f"{folder / WEIGHTS}: no EAGLE head, which has tensors called midlayer.* or layers.0.*; "
        f"the first here is {min(tensors, default='missing')!r}"
    )


def _complete_vocabulary(folder: Path, head: DraftHead, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with checked d2t and t2d, which may be missing when the draft's vocabulary is the target's."""
    draft, whole = len(head.d2t), len(head.t2d)
    is_held = tensors.keys() >= {"lm_head.weight"} and len(tensors["lm_head.weight"]) == draft  # or it is a slip
    if draft == whole and is_held and not tensors.keys() & set(_VOCABULARY):
        identity = {"d2t": torch.zeros(draft, dtype=torch.long), "t2d": torch.ones(whole, dtype=torch.bool)}
        return tensors | identity
    if [tensors[name].shape for name in _VOCABULARY if name in tensors] != [(draft,), (whole,)]:
        return tensors  # which names or shapes are wrong is said where all are checked
    offsets, member = tensors["d2t"].long(), tensors["t2d"].bool()
    ids = offsets + torch.arange(draft)
    if not torch.equal(ids.sort().values, member.nonzero().flatten()):
        raise UserError(f"{folder / WEIGHTS}: d2t and t2d name different tokens; fetch it again")
    return tensors | {"d2t": offsets, "t2d": member}


def _public_config(head: DraftHead) -> dict[str, Any]:
    """The configuration under the names of public heads, which serving engines read.

    `target_hidden_size` is left out when it is `hidden_size`: EAGLE's own code takes its presence for a head with an
    embedding of its own.
    """
    config = head.config
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta", 10000.0)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in _SAVED},
        "head_dim": head_width(config),
        "num_hidden_layers": 1,
        "draft_vocab_size": len(head.d2t),
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    if (width := head.fc.in_features // 3) != config.hidden_size:
        values["target_hidden_size"] = width
    return values | {name: getattr(config, name) for name in _SAVED_IF_SET if getattr(config, name, None)}
