"""Eviction inside vLLM: a prompt that vLLM has read itself becomes a prefix, and the next request asks about it.

    KEEPSIGHT_EVICT=1 python -m vllm.entrypoints.openai.api_server --model MODEL ... --kv-transfer-config '{
        "kv_connector": "EvictingConnector", "kv_connector_module_path": "keepsight.serving.vllm.record",
        "kv_role": "kv_consumer", "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"root": "prefixes", "evict": {"name": "snapkv", "budget": 128}}}'

A request with the `kv_transfer_params` {"keepsight_evict": true}, or a budget in place of true, is read and answered as
always. While it is read, an attention backend records the keys, values and queries that the method needs. When the last
token of the prompt is read, the connector evicts, writes a prefix to the root, and the reply has its id in its
`kv_transfer_params`: {"keepsight": ID, "entries": B, "seen": N}, or {"keepsight_error": WHY, "keepsight_status": 400}.

With `plain`, a folder that nobody else uses, the middleware makes such a request of every long prompt, and answers from
what it keeps (`keepsight.serving.vllm.engine_reader`); the prefixes of these lie in that folder.

Methods that score entries when they are read (SnapKV, TOVA, H2O and their like) run so, and LookaheadKV in two requests
(`keepsight.serving.vllm.soft_tokens`); others that look back with a pass of their own do not. Until a prompt is read,
its keys and values are in memory twice. One worker; CPU backend.
"""

import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.logger import init_logger
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.request import RequestStatus

from keepsight.errors import UserError, one_line
from keepsight.files import read_json, write_json
from keepsight.models.decoder import FULL, decoder_of, layer_kinds
from keepsight.models.identity import Identity
from keepsight.models.targets import fingerprints
from keepsight.runtime.allocate import Global
from keepsight.runtime.attention import Softmax
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import Reduce, observed_attention, reduce_group
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.state import Needs, PassRecorder, State
from keepsight.serving.export import Rotation, placeholders_of, rotations_of, turned_by, write_state
from keepsight.serving.inside import PLAIN_FOLDER, evicting_method, looks_back
from keepsight.serving.prefix import (
    EVICT,
    EVICTION_ERROR,
    EVICTION_STATUS,
    PLAIN_NAME,
    PREFIX_ID,
    TEXT_BEFORE,
    WHOLE_PREFIX_ID,
    digest_in,
    file_of,
    letters_of_id,
)
from keepsight.serving.vllm import ragged
from keepsight.serving.vllm.connector import KeepsightConnector, Step

logger = init_logger("vllm.keepsight")
TICKETS = ".evicted"


@dataclass
class Part:
    """The tokens of a recorded prompt that one step reads.

    Attributes:
        name: Name of the request.
        ticket: Name of the file in which the worker reports the result.
        block: Block of the step's last token; unlike earlier blocks it belongs to no other request.
        first: Number of tokens that are not recorded: those of the prefix that soft tokens look back at; else 0.
        start: Number of tokens read before.
        stop: Number of tokens read after the step.
        budget: The method's budget.
        tokens: In the last part, the tokens of the prompt; else None.
        before: In the last part, the rendered text before the document; see `keepsight.serving.prefix.Header`.
        plain: Name, which no other has, of a prefix of a plain request; None for a prefix that clients name.
    """

    name: str
    ticket: str
    block: int
    first: int
    start: int
    stop: int
    budget: int | float
    tokens: list[int] | None = None
    before: str = ""
    plain: str | None = None


@dataclass
class RecordingStep(Step):
    """The scheduler's message to the worker for one step: prompts to record, and requests that have ended."""

    parts: list[Part] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)


class RecordedPrompt:
    """A prompt in prefill: its queries, keys and values, as they pass the attention layers.

    Args:
        layers: Number of layers.
        needs: What to record for the method.
    """

    def __init__(self, layers: int, needs: Needs) -> None:
        self.cache = Cache(layers=[KeptLayer() for _ in range(layers)])
        self.needs = needs
        self.error = ""

    def add(self, index: int, softmax: Softmax, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Append a layer's queries [n, H, d], keys and values [n, K, d] of n tokens."""
        try:
            # Clones: the engine uses the memory again.
            query = query.transpose(0, 1)[None].clone()
            key = key.transpose(0, 1)[None].clone()
            value = value.transpose(0, 1)[None].clone()
            layer: Any = self.cache.layers[index]
            layer.update(key, value)
            PassRecorder(self.cache, self.needs, None)(index, query, layer.keys, softmax, None, None)
        except Exception as error:  # of one request, not of those in its batch
            self.error = one_line(error)

    def state(self, tokens: list[int]) -> State:
        """The state of these tokens; a `UserError` if not every token was seen in every layer."""
        layers: list[Any] = self.cache.layers
        lengths = {layer.get_seq_length() for layer in layers}
        if self.error:
            raise UserError(self.error)
        if lengths != {len(tokens)}:
            raise UserError(
                f"{sorted(lengths)} of {len(tokens)} tokens passed through the backend", field="prompt", code="state"
            )
        return _state(self.cache, tokens, self.needs)


def _state(cache: Cache, tokens: list[int], needs: Needs) -> State:
    return State(cache, torch.zeros(1, 1), torch.tensor([tokens]), torch.tensor([len(tokens)]), needs, padded=False)


class Recording:
    """A mixin before a backend's implementation: it records the requests of a batch that are to be evicted from."""

    connector: "EvictingConnector | None" = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Tensor:
        """See vLLM's `AttentionImpl`; queries [tokens, H, d], keys and values [tokens, K, d], after RoPE."""
        impl: Any = self
        if self.connector is not None and self.connector.parts and attn_metadata is not None:
            if not hasattr(attn_metadata, "keepsight_parts"):
                attn_metadata.keepsight_parts = self.connector.recorded(attn_metadata)
            for rows, prompt in attn_metadata.keepsight_parts:
                softmax = Softmax(impl.scale, impl.logits_soft_cap or None, impl.sinks)
                prompt.add(extract_layer_index(layer.layer_name), softmax, query[rows], key[rows], value[rows])
        forward: Any = super().forward  # type: ignore[misc]
        answer: Tensor = forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        return answer


class RecordingImpl(Recording, CPUAttentionBackendImpl):
    """vLLM's CPU attention, recording."""


class RaggedRecordingImpl(Recording, ragged.RaggedImpl):
    """Attention to ragged heads, recording."""


class RecordingBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `RecordingImpl`."""

    @staticmethod
    def get_impl_cls() -> type:
        """The class that computes attention."""
        return RecordingImpl


class RaggedRecordingBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `RaggedRecordingImpl`."""

    @staticmethod
    def get_impl_cls() -> type:
        """The class that computes attention."""
        return RaggedRecordingImpl


class EvictingConnector(KeepsightConnector):
    """Loads prefixes, and makes prefixes of prompts that the engine has read; see the module.

    `kv_connector_extra_config` holds `evict` too: a method's name, budget and options. A one-line `UserError` at
    start-up as by `KeepsightConnector`, and for a method that cannot run so, several workers, or a model whose keys
    cannot be rotated.
    """

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether full CUDA graphs would leave out what runs in each layer: a replay records nothing."""
        return True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.world_size > 1:
            raise UserError(
                "keepsight: eviction inside vLLM needs one worker; start it without tensor parallelism",
                field="tensor_parallel_size",
                code="conflict",
            )
        if not ragged.records():
            raise UserError(
                f"keepsight: eviction inside vLLM needs its attention backend; set {ragged.RECORDS}=1",
                field=ragged.RECORDS,
                code="missing",
            )
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.method = evicting_method(options.get("evict"), self.block_size, ragged=ragged.is_asked_for())
        if looks_back(self.method) and not (vllm_config.lora_config and vllm_config.model_config.enable_prompt_embeds):
            raise UserError(
                "keepsight: soft tokens need --enable-lora, --max-lora-rank and --enable-prompt-embeds",
                field="enable_lora",
                code="missing",
            )
        self.plain: Path | None = None
        if options.get(PLAIN_FOLDER):
            self.plain = Path(options[PLAIN_FOLDER])
            self._prepare_plain(self.plain, role)
        self.page = self.method.allocate.page if isinstance(self.method.allocate, Global) else 0
        model = vllm_config.model_config
        self.name = model.model
        self.config = model.hf_config
        self.context = model.max_model_len
        self.weights = ""
        self.rotations = rotations_from(self.config)
        self._asked: dict[str, tuple[Any, Evict, int]] = {}  # requests whose prompt is being read, and `Part.first`
        self._refused: dict[str, str] = {}
        self._tickets: dict[str, str] = {}
        # The worker's: prompts that are read, the step's parts by the block of their last token, files of results
        self.prompts: dict[str, RecordedPrompt] = {}
        self.parts: dict[int, Part] = {}
        self._written: dict[str, Path] = {}

    def _prepare_plain(self, folder: Path, role: Any) -> None:
        """Read prefixes from the middleware's folder too; the scheduler's side empties it."""
        if looks_back(self.method):
            raise UserError(
                f"keepsight: soft tokens look back in a second request, which plain requests have not; leave out "
                f"{PLAIN_FOLDER}, or name a method that scores entries while they are read, such as snapkv",
                field=PLAIN_FOLDER,
                code="conflict",
            )
        self.store.others.append(folder)
        if role == KVConnectorRole.SCHEDULER:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.safetensors"):
                path.unlink(missing_ok=True)

    # The scheduler's side

    def on_new_request(self, request: Any) -> None:
        """Note whether a request asks for eviction."""
        wanted = (request.kv_transfer_params or {}).get(EVICT)
        if wanted is None or wanted is False:
            return
        try:
            method, first = self._method_for(request, wanted)
        except Exception as error:  # one request must not end the engine
            self._refused[request.request_id] = one_line(error)
            return
        request.skip_reading_prefix_cache = not first  # every key has to pass through the backend
        self._asked[request.request_id] = (request, method, first)
        self._tickets[request.request_id] = uuid.uuid4().hex

    def _method_for(self, request: Any, wanted: Any) -> tuple[Evict, int]:
        """The method, and the entries of the prefix that the request's soft tokens look back at; 0 for none."""
        method = self.method if wanted is True else replace(self.method, budget=wanted)
        tokens = request.prompt_token_ids
        digest = None if tokens is None else digest_in(tokens, self.alphabet)
        length = request.num_prompt_tokens
        observed = 0
        if digest is not None and request.prompt_embeds is not None and looks_back(method):
            length = self.store.header(digest).entries
            observed = length
            if request.num_prompt_tokens != length + method.observer.positions():
                raise UserError(
                    f"{EVICT}: not the soft tokens of the adapter; make the prompt by observing_prompt",
                    field="prompt",
                    code="data",
                )
        elif tokens is None or request.prompt_embeds is not None or request.has_encoder_inputs or request.lora_request:
            raise UserError(
                f"{EVICT}: only tokens read without images, embeddings and LoRA can be a prefix",
                field="prompt",
                code="conflict",
            )
        elif digest is not None:
            raise UserError(
                f"{EVICT}: the prompt begins with a prefix, which was evicted from before",
                field="prompt",
                code="conflict",
            )

        method.check(length, self.context)
        entries = min(method.budget_for(length), length)
        letters = letters_of_id(len(self.alphabet))
        if entries < letters:
            raise UserError(
                f"{EVICT}: {entries} entries cannot spell an id of {letters} letters; raise the budget",
                field="budget",
                code="range",
            )
        return method, observed

    def _plain_name(self, request: Any) -> str | None:
        """The name of a prefix of a plain request; None for one that clients name."""
        name = request.kv_transfer_params.get(PLAIN_NAME)
        return None if self.plain is None or name is None else str(name)

    def _may_have_lora(self, request: Any) -> bool:
        return request.request_id in self._asked

    def build_connector_meta(self, scheduler_output: Any) -> RecordingStep:
        """The `RecordingStep` for the worker."""
        step: Any = super().build_connector_meta(scheduler_output)
        parts = []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            if name not in self._asked:
                continue
            request, method, first = self._asked[name]
            start = request.num_computed_tokens
            stop = start + count
            (blocks,) = scheduler_output.kv_connector_block_state.get_block_ids(name)
            part = Part(
                name=name,
                ticket=self._tickets[name],
                block=blocks[(stop - 1) // self.block_size],
                first=first,
                start=start,
                stop=stop,
                budget=method.budget,
            )
            if stop >= request.num_prompt_tokens:
                part.tokens = request.prompt_token_ids
                part.before = str(request.kv_transfer_params.get(TEXT_BEFORE, ""))
                part.plain = self._plain_name(request)
                del self._asked[name]
            parts.append(part)
        return RecordingStep(step.loads, step.prefixes, parts, set(scheduler_output.finished_req_ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; returns the fields of its reply about the eviction."""
        name = request.request_id
        self._requests.pop(name, None)
        self._asked.pop(name, None)
        if name in self._refused:
            return False, {EVICTION_ERROR: self._refused.pop(name), EVICTION_STATUS: 400}
        ticket = self._tickets.pop(name, None)
        if ticket is None:
            return False, None  # nothing was asked
        path = self._file_of(ticket)
        if not path.is_file():
            return False, None  # the client left
        result = read_json(path)
        path.unlink(missing_ok=True)
        if request.status == RequestStatus.FINISHED_ABORTED and self._plain_name(request) is not None:
            self._remove_plain(result)
        return False, result

    def _remove_plain(self, result: dict[str, Any]) -> None:
        """Remove a prefix of a plain request, of which the middleware will not hear."""
        digest = result.get(PREFIX_ID)
        if self.plain is not None and digest is not None:
            file_of(self.plain, digest).unlink(missing_ok=True)

    def _file_of(self, ticket: str) -> Path:
        """The file in which the worker, which may be another process, reports the result for a prompt."""
        return self.store.root / TICKETS / f"{ticket}.json"

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take note of the caches, by layer.

        Raises:
            UserError: the engine rotates keys in another way than the model's configuration says.
        """
        super().register_kv_caches(kv_caches)
        for name in kv_caches:
            implementation = self._modules[name].impl
            if not isinstance(implementation, Recording):
                raise UserError(
                    f"keepsight: eviction inside vLLM works with its CPU backend alone, not with "
                    f"{type(implementation).__name__}; use the worker or `keepsight prefix`",
                    field=ragged.RECORDS,
                    code="conflict",
                )
            implementation.connector = self
        self.weights = min(fingerprints(self.name), default="")  # one of those that the middleware accepts
        rotations = [rotation for rotation in self.rotations if rotation is not None]
        ropes = rotary_embedding._ROPE_DICT.values()
        agrees = len(self.rotations) == len(kv_caches)
        if rotations:  # all by the same frequencies
            agrees = agrees and any(_agree(rotations[0], rope) for rope in ropes)
        if not agrees:
            raise UserError(
                "keepsight: vLLM rotates this model's keys unlike transformers; use `keepsight prefix`",
                field="model",
                code="model",
            )

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Tell the attention backend what to record in the step."""
        super().bind_connector_metadata(connector_metadata)
        for name in connector_metadata.finished:
            self.prompts.pop(name, None)
            path = self._written.pop(name, None)
            if path is not None and path.is_file():  # of a client that left; the others are read before
                self._remove_plain(read_json(path))
                path.unlink(missing_ok=True)
        for part in connector_metadata.parts:
            if part.start != part.first:
                continue
            # The prompt's first tokens, also of a request that was preempted.
            needs = self.method.needs()
            if part.first:
                needs = Needs(window=self.method.bound_observer.positions())
            self.prompts[part.name] = RecordedPrompt(len(self._caches), needs)
        self.parts = {part.block: part for part in connector_metadata.parts}

    def recorded(self, metadata: Any) -> list[tuple[slice, RecordedPrompt]]:
        """Rows of a batch that are recorded, from the attention's metadata."""
        starts = metadata.query_start_loc.tolist()
        recorded = []
        for index, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            part = self.parts.get(int(metadata.block_table[index, (length - 1) // self.block_size]))
            if part is not None and length == part.stop and rows.stop - rows.start == part.stop - part.start:
                recorded.append((rows, self.prompts[part.name]))
        return recorded

    def wait_for_save(self) -> None:
        """Evict from the prompts whose last token was read in the step."""
        step: Any = self._get_connector_metadata()
        self.parts = {}
        for part in step.parts:
            if part.tokens is None:
                continue
            try:
                prompt = self.prompts.pop(part.name, None)
                if prompt is None:
                    raise UserError(
                        "soft tokens were in vLLM's prefix cache; give each pass a cache_salt of its own",
                        field="cache_salt",
                        code="conflict",
                    )
                result = self._evicted(prompt.state(part.tokens[part.first :]), part)
            except Exception as error:  # of one request, not of those in its batch
                logger.warning("no prefix was made of a prompt of %d tokens: %s", part.stop, error)
                status = 400 if isinstance(error, UserError) else 500
                result = {EVICTION_ERROR: one_line(error), EVICTION_STATUS: status}
            self._report(part, result)

    def _report(self, part: Part, result: dict[str, Any]) -> None:
        """Write the result for a prompt where the scheduler's side finds it."""
        path = self._file_of(part.ticket)
        try:
            path.parent.mkdir(exist_ok=True, parents=True)
            write_json(path, result)
        except OSError as error:  # the reply then says nothing
            logger.warning("%s: %s", path, error)
        self._written[part.name] = path

    @torch.no_grad()
    def _evicted(self, state: State, part: Part) -> dict[str, Any]:
        """Write the kept entries of a prompt, or of the prompt that these soft tokens attend to."""
        model: Any = None  # no further pass is run
        method = replace(self.method, budget=part.budget)
        if looks_back(method) and not part.first:
            # The ticket gives this file, which is removed later, a digest of its own.
            digest, header = write_state(
                self.config, state, state, self.store.root, before=part.before, method=f"whole: {part.ticket}"
            )
            return {WHOLE_PREFIX_ID: digest, "entries": header.entries, "seen": header.seen}

        before = part.before
        if part.first:
            prompt_digest = str(digest_in(part.tokens, self.alphabet))
            prompt = _whole_state(self.store.tensors(prompt_digest))
            before = self.store.header(prompt_digest).before
            kept, _ = method.evict(model, prompt, _looked_back(state, prompt, method.reduce))
        else:
            kept = method.compress_state(model, state)

        root = self.store.root
        method_text = repr(method)
        if self.plain is not None and part.plain is not None:
            root = self.plain
            method_text = f"serve {part.plain}: {method_text}"
        digest, header = write_state(
            self.config,
            kept,
            turned_by(self.rotations, kept, placeholders_of(kept, self.page)),
            root,
            page=self.page,
            before=before,
            method=method_text,
            identity=Identity(model=self.weights or None),
        )
        if part.first:
            self.store.path(prompt_digest).unlink(missing_ok=True)
        return {PREFIX_ID: digest, "entries": header.entries, "seen": header.seen}


def _whole_state(tensors: dict[str, Tensor]) -> State:
    """The state of a prompt whose keys were not rotated."""
    length = tensors["keys"].shape[2]
    layers: list[Any] = []
    for keys, values in zip(tensors["keys"], tensors["values"], strict=True):
        layers.append(KeptLayer(keys[None], values[None], length))
    return _state(Cache(layers=layers), [0] * length, Needs())


def _looked_back(observers: State, state: State, reduce: Reduce) -> list[Tensor]:
    """The scores of `keepsight.runtime.observe.look_back`, from recorded queries and keys of soft tokens."""
    scores = []
    for observer, layer in zip(observers.layers, state.layers, strict=True):
        assert observer.recorded is not None and observer.recorded.queries is not None
        length = layer.keys.shape[2]
        keys = torch.cat([layer.keys, observer.keys], dim=2)
        attention = observed_attention(
            observer.recorded.queries, keys, observer.softmax, length, reduction=reduce.queries
        )
        scores.append(reduce_group(attention, keys.shape[1], reduce.heads))
    return scores


def rotations_from(config: Any) -> list[Rotation | None]:
    """The rotation of each layer, from a model's configuration alone.

    Raises:
        UserError: keys of the model cannot be rotated.
    """
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    if {*layer_kinds(config)} != {FULL} or getattr(text, "attn_temperature_tuning", False):
        raise UserError(
            f"{config.model_type} has layers without full attention; serve another model", field="model", code="model"
        )
    if "llama_4_scaling_beta" in parameters:
        raise UserError(
            f"{config.model_type} scales queries by their position; serve another model", field="model", code="model"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UserError(
            f"{config.model_type} is not a language model of transformers: {one_line(error)}",
            field="model",
            code="model",
        ) from None
    decoder = decoder_of(model)
    if hasattr(decoder, "rotary_emb"):
        decoder.rotary_emb = type(decoder.rotary_emb)(text)  # with its frequencies
    return rotations_of(model)


def _agree(rotation: Rotation, rope: Any) -> bool:
    """Whether vLLM uses this rotation: its table holds cosines and sines by position, times a factor."""
    table = rope.cos_sin_cache.float().cpu()
    positions = torch.tensor([1, 16, 256]).clamp(max=len(table) - 1)
    angles = positions[:, None] * rotation.inv_freq
    expected = torch.cat([angles.cos(), angles.sin()], dim=1).float() * table[0, 0]
    return (
        rope.is_neox_style != rotation.interleaved
        and table.shape[1:] == expected.shape[1:]
        and bool((table[positions] - expected).abs().max() < 0.02)
    )
