"""Compressed states on disk, from which further questions are answered: one self-describing safetensors file each.

The file holds the cache as in memory (ragged layers without padding), the recordings that later evictions need, and the
tokens read. Outputs of layers and the scores of trained scorers (KVzap and others) are left out. Nothing in it is ever
unpickled.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import at_home, atomic_files, from_json, json_digest
from keepsight.models.decoder import (
    cached_kv_heads,
    cached_layers,
    decoder_layers,
    full_attention_layers,
    has_latents,
    head_width,
    running_devices,
)
from keepsight.models.identity import Identity, adapters_digest, identity_of, tensors_digest
from keepsight.models.transformers_internals import DummyLayer
from keepsight.runtime.attention import Softmax, StateCache, is_bounded, recurrent_of
from keepsight.runtime.distance_bias import bias_of, positions_in, rejoined, without_positions
from keepsight.runtime.generate import CustomGenerate, Decoded, FullCache, GenerateRequest, decode
from keepsight.runtime.images import Images
from keepsight.runtime.layer import KeptLayer, RaggedLayer, Recorded
from keepsight.runtime.rotary import QueryStatistics
from keepsight.runtime.state import Needs, State, empty_cache, share

FILE = "state.safetensors"
QUESTIONS = ("seen", "unseen", "multi")
_KEY = "keepsight_state"


@dataclass(frozen=True)
class SavedState(CustomGenerate):
    """A loaded state and its metadata; `generate(model, question_ids, saved)` answers from it, any number of times.

    Attributes:
        state: State on the base model's device. Reading and decoding append to it: continue from a `state.copy()`.
        question: The part of the prompt that was compressed: `seen`, the whole prompt with its question; `unseen`, the
            context alone; `multi`, the context alone, to be asked several questions.
        target: Name of the model that read it, for information.
        identity: The model's weights and active adapters, and the tokenizer that rendered the prompt, where it was
            named.
    """

    state: State
    question: str
    target: str
    identity: Identity
    starts_prompts = False

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        """Answer what follows the saved prompt; `self.state` stays unchanged."""
        self.identity.require(Identity(adapters=adapters_digest(model)), "saved state: it was computed")
        if request.past is not None and request.past.method != self:
            raise UserError(
                "saved state: past_key_values come from another prompt than this state; continue with the method "
                "that computed them, or leave them out",
                field="past_key_values",
                code="state",
            )
        state = self.state if request.past is None else request.past.state
        state = state.unrecorded()
        if len(request.unread) != len(state.tokens) or request.mask is not None:
            raise UserError(
                f"saved state: {len(request.unread)} questions for {len(state.tokens)} prompts, or padded ones; "
                "ask one for each prompt, without padding",
                field="question",
                code="conflict",
            )
        return decode(model, FullCache().resume(model, state, request.unread, chunk=request.chunk), **request.decoding)


def save_state(
    state: State,
    path: str | Path,
    *,
    model: PreTrainedModel,
    question: str = "seen",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Save a state; `path` then holds all of it, or none of it.

    Its size is the state's `kv_bytes`, plus what was recorded, tokens and logits, plus a header of some kilobytes. A
    state that will never be evicted from again needs nothing recorded: save `state.unrecorded()`. The features of its
    tokens are left out in any case.

    Args:
        state: Dense or ragged state of any batch size.
        path: A file name that ends in `.safetensors`, or a folder, in which the file is called `state.safetensors`.
        model: The base model that read it.
        question: See `SavedState`.
        tokenizer: The tokenizer that rendered the prompt; with it, `load_state` refuses another one.

    Returns:
        The file.

    Raises:
        UserError: `question` is unknown, the state's method stores entries in its own form, or the state is of another
            model.
    """
    if any(layer.reads is not None for layer in state.layers):
        raise UserError(
            "a state of own_indexer is not saved, as its budget is no part of the entries; save one of the full cache",
            field="state",
            code="state",
        )
    if question not in QUESTIONS:
        raise UserError(
            f"question {question!r} is unknown; choose one of {', '.join(QUESTIONS)}", field="question", code="unknown"
        )
    if not state.has_plain_entries:
        raise UserError(
            f"{_file(path)}: a state whose method stores entries in its own form (kivi, specache, specontext, "
            "quest, exact_topk) cannot be saved; save the state that it was made from, and compress that one again",
            field="state",
            code="state",
        )
    file = _file(path)
    tensors = _tensors_of(state)
    state_shape = _shape_of_tensors(tensors, full_attention_layers(model.config))
    model_shape = _shape_of_model(model)
    if state_shape != model_shape:
        raise UserError(
            f"{file}: the state is not of this model: it has {state_shape}, the model {model_shape}",
            field="state",
            code="model",
        )

    header = _Header(
        question=question,
        target=str(model.config.name_or_path or ""),
        shape=model_shape,
        identity=identity_of(model, tokenizer),
        seen=state.cache.get_seq_length(),
        needs=_Needs(state.needs.window, state.needs.accumulated, state.needs.statistics),
        softmax=[layer.softmax[:2] for layer in state.layers if layer.recorded],
        pictured=bool(state.images),
    )
    header_text = json.dumps(asdict(replace(header, digest=_digest(header, tensors))))
    with atomic_files(file.parent, last=file.name) as unfinished:
        save_file(tensors, unfinished / file.name, metadata={"format": "pt", _KEY: header_text})
    return file


def load_state(
    path: str | Path, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> SavedState:
    """Load a state that `save_state` wrote.

    `model` is the base model: the same weights in the same dtype; its name may differ. `tokenizer` is the one that will
    render the questions, and compared when both are known. A `UserError` if the file is missing, damaged, or of another
    base model or tokenizer.
    """
    file = _file(path)
    if not file.is_file():
        raise UserError(f"{file}: no such file; save a state with save_state first", field=file.name, code="missing")
    try:
        with safe_open(file, framework="pt") as stream:
            header = _header(file, stream.metadata())
            _check_target(file, header, model, tokenizer)
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a whole safetensors file ({error}); copy it again", field=file.name, code="file"
        ) from None
    if _digest(header, tensors) != header.digest:
        raise UserError(
            f"{file}: its contents differ from the digest in its header; copy it again", field=file.name, code="file"
        )
    needs = Needs(header.needs.window, header.needs.received, statistics=header.needs.queries)
    state = _state_of_tensors(_on_layer_devices(tensors, model), model, header.seen, needs, header.softmax)
    images = Images({}) if header.pictured else None
    state = replace(state, images=images)
    return SavedState(state, header.question, header.target, header.identity)


@dataclass(frozen=True)
class _Needs:
    """`Needs` without features and scorers, which are not saved."""

    window: int
    received: bool
    queries: bool = False


@dataclass(frozen=True)
class _Header:
    """The file's header, JSON in the safetensors metadata."""

    question: str
    target: str
    shape: dict[str, Any]
    identity: Identity
    seen: int
    needs: _Needs
    softmax: list[tuple[float, float | None]]
    pictured: bool
    digest: str = ""


def _header(file: Path, metadata: dict[str, str] | None) -> _Header:
    if metadata is None or _KEY not in metadata:
        raise UserError(
            f"{file}: a safetensors file but not a saved state; give one that save_state wrote",
            field=file.name,
            code="file",
        )
    try:
        header: _Header = from_json(metadata[_KEY].encode(), _Header)
    except ValueError as error:
        raise UserError(
            f"{file}: the header of this saved state is damaged ({error}); save it again", field=file.name, code="file"
        ) from None
    return header


def _check_target(
    file: Path, header: _Header, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    subject = f"{file}: this state is of {header.target or 'a model without a name'!r}"
    for name, value in _shape_of_model(model).items():
        if header.shape.get(name) != value:
            raise UserError(
                f"{subject} with {name} {header.shape.get(name)}, but the model has {value}; load that model",
                field=name,
                code="model",
            )
    header.identity.require(identity_of(model, tokenizer), subject)


def _file(path: str | Path) -> Path:
    path = Path(at_home(path))
    return path if path.suffix == ".safetensors" else path / FILE


def _digest(header: _Header, tensors: dict[str, Tensor]) -> str:
    """Digest of the header, but for its own digest, and of all tensors."""
    fields = asdict(replace(header, digest=""))
    return json_digest([fields, tensors_digest(sorted(tensors.items()))])


def _shape_of_model(model: PreTrainedModel) -> dict[str, Any]:
    """The shape that a state must have."""
    config = model.config.get_text_config()
    return {
        "layers": cached_layers(model.config),
        "kv_heads": 1 if has_latents(model) else cached_kv_heads(model),
        "head_dim": config.kv_lora_rank if has_latents(model) else head_width(config),
        "vocabulary": config.vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _shape_of_tensors(tensors: dict[str, Tensor], scored: list[int]) -> dict[str, Any]:
    """The shape of the state of these tensors, as `_shape_of_model` gives it for a model of these `scored` layers."""
    keys = next(tensor for name, tensor in tensors.items() if name.endswith(".keys"))
    if scored:  # bounded layers may have other heads
        keys = tensors.get(f"layers.{scored[0]}.keys", keys)
    return {
        "layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
        "kv_heads": keys.shape[1],
        "head_dim": keys.shape[3],
        "vocabulary": tensors["logits"].shape[1],
        "dtype": str(keys.dtype).removeprefix("torch."),
    }


def _tensors_of(state: State) -> dict[str, Tensor]:
    """All tensors of a state by their names in the file."""
    layers = state.layers
    recorded = [layer.recorded for layer in layers if layer.recorded]
    unevicted = any(layer.token_mask is not None for layer in layers)
    tensors: dict[str, Tensor | None] = {
        "tokens": state.tokens,
        "lengths": state.lengths,
        "logits": state.logits,
        "mask": state.tokens_mask if unevicted else None,
        "shift": state.rope_offset if isinstance(state.rope_offset, Tensor) else None,
        "batch_shift": state.batch_offset if isinstance(state.batch_offset, Tensor) else None,
        "trace.ahead": recorded[0].ahead if recorded else None,
    }
    for index, layer in enumerate(share(state.cache).layers):
        for name, tensor in layer_tensors(layer).items():
            tensors[f"layers.{index}.{name}"] = tensor

    for index, recording in enumerate(recorded):
        tensors[f"trace.sinks.{index}"] = recording.softmax.sinks
        tensors[f"trace.window.{index}"] = recording.queries
        tensors[f"trace.received.{index}"] = recording.accumulated
        if recording.statistics is not None:
            for name, tensor in recording.statistics._asdict().items():
                tensors[f"trace.queries.{index}.{name}"] = tensor
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}


def layer_tensors(layer: Any) -> dict[str, Tensor | None]:
    """The tensors of a layer by their names."""
    if isinstance(layer, DummyLayer):
        return {}
    recurrent = recurrent_of(layer)
    if recurrent is not None:
        of_entries = copy.copy(layer)
        of_entries.recurrent = None
        return layer_tensors(of_entries) | layer_tensors(recurrent)
    tensors: dict[str, Tensor | None] = {}
    if not isinstance(layer, DynamicLayer):  # of a recurrent state
        for state_index, tensor in layer.conv_states.items():
            tensors[f"conv.{state_index}"] = tensor
        for state_index, tensor in layer.recurrent_states.items():
            tensors[f"recurrent.{state_index}"] = tensor
    elif isinstance(layer, RaggedLayer):
        keys, values = layer.packed()
        tensors["keys"] = keys.new_empty(*layer.counts.shape, 0, keys.shape[1])
        tensors["values"] = values.new_empty(*layer.counts.shape, 0, values.shape[1])
        tensors["kept_keys"] = keys
        tensors["kept_values"] = values
        tensors["counts"] = torch.from_numpy(layer.head_sizes())
    else:
        tensors["keys"] = layer.keys
        tensors["values"] = layer.values
        if isinstance(layer, KeptLayer):
            tensors["real"] = layer.real
    if isinstance(layer, KeptLayer) and layer.has_positions:
        _separate_positions(tensors)
    return tensors


def _separate_positions(tensors: dict[str, Tensor | None]) -> None:
    """Move the positions that follow a layer's keys to tensors of their own."""
    for name in ("keys", "kept_keys"):
        keys = tensors.get(name)
        if keys is not None:
            tensors[name] = without_positions(keys)
            tensors[f"{name}.positions"] = positions_in(keys)


def _on_layer_devices(tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a state on the model's devices: a layer's tensors are where that layer runs."""
    attention_layers = full_attention_layers(model.config)
    layer_devices = [running_devices(layer)[0] for layer in decoder_layers(model)]

    moved = {}
    for name, tensor in tensors.items():
        names = name.split(".")
        device = model.device
        if names[0] == "layers":  # layers.INDEX.NAME
            device = layer_devices[int(names[1])]
        elif names[0] == "trace" and len(names) > 2:  # trace.NAME.INDEX: of a layer with full attention
            device = layer_devices[attention_layers[int(names[2])]]
        moved[name] = tensor.to(device)
    return moved


def _state_of_tensors(
    tensors: dict[str, Tensor],
    model: PreTrainedModel,
    seen: int,
    needs: Needs,
    softmax: Sequence[tuple[float, float | None]],
) -> State:
    """The state of tensors named as `_tensors_of` does, after `seen` tokens, of which `needs` was recorded."""
    cache = empty_cache(model, tensors.get("mask"))
    layers = []
    for index, empty in enumerate(cache.layers):
        layers.append(layer_of_tensors(empty, _named(tensors, f"layers.{index}."), seen))
    state = State(StateCache(layers=layers), tensors["logits"], tensors["tokens"], tensors["lengths"], needs)
    state = replace(state, rope_offset=tensors.get("shift", 0), batch_offset=tensors.get("batch_shift", 0))

    tokens_mask = state.tokens_mask
    tokens_ahead = tensors.get("trace.ahead")
    for index, (layer, scaling_and_softcap) in enumerate(zip(state.layers, softmax, strict=False)):
        queries = tensors.get(f"trace.window.{index}")
        window = 0 if queries is None else queries.shape[2]
        statistics_tensors = _named(tensors, f"trace.queries.{index}.")
        statistics = QueryStatistics(**statistics_tensors) if statistics_tensors else None
        bias = None
        if queries is not None and layer.origin is not None:
            bias = bias_of(layer.origin[0], layer.origin[1], queries)
        layer.recorded = Recorded(
            Softmax(*scaling_and_softcap, tensors.get(f"trace.sinks.{index}"), bias),
            queries,
            query_mask=_last_columns(tokens_mask, window, layer.keys.device),
            ahead=_last_columns(tokens_ahead, window, layer.keys.device),
            accumulated=tensors.get(f"trace.received.{index}"),
            statistics=statistics,
        )
    return state


def _last_columns(marks: Tensor | None, count: int, device: torch.device) -> Tensor | None:
    """The last `count` columns of marks [B, N], on a device; None for none."""
    return None if marks is None else marks[:, marks.shape[1] - count :].to(device)


def layer_of_tensors(empty: Any, tensors: dict[str, Tensor], seen: int) -> Any:
    """A layer from its tensors; `empty` is the layer of an empty cache of the model."""
    layer: Any = empty
    if isinstance(layer, DummyLayer):
        return layer
    recurrent = recurrent_of(layer)
    if recurrent is not None:
        states = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in ("conv", "recurrent")}
        layer_of_tensors(recurrent, states, seen)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in states}
    if not isinstance(layer, DynamicLayer):  # of a recurrent state
        for name, tensor in tensors.items():
            kind, state_index = name.split(".")
            update_state = layer.update_conv_state if kind == "conv" else layer.update_recurrent_state
            update_state(tensor, state_idx=int(state_index))
        return layer

    for name in ("keys", "kept_keys"):
        if f"{name}.positions" in tensors:
            tensors = {**tensors, name: rejoined(tensors[name], tensors[f"{name}.positions"])}
    keys = tensors["keys"]
    values = tensors["values"]
    if is_bounded(layer):
        layer.update(keys, values)
        layer.cumulative_length = seen
        return layer

    layer = KeptLayer(keys, values, seen, tensors.get("real"))
    if "counts" in tensors:
        counts = tensors["counts"].cpu().numpy()
        layer = RaggedLayer(tensors["kept_keys"], tensors["kept_values"], counts, seen)
    elif "real" not in tensors:
        layer.token_mask = empty.token_mask
    layer.take_over_from(empty)
    return layer


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix by the rest of their names, numbers in numerical order."""
    with_prefix = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return dict(sorted(with_prefix.items(), key=lambda item: (len(item[0]), item[0])))
