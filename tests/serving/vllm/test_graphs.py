"""What vLLM asks a connector before it chooses CUDA graphs, in the way in which it asks."""

from typing import Any

import pytest

from tests.serving.vllm.stock import CONNECTOR

EVICTING = CONNECTOR | {
    "kv_connector": "EvictingConnector",
    "kv_connector_module_path": "keepsight.serving.vllm.record",
}


@pytest.mark.parametrize(("settings", "expected"), [(EVICTING, True), (CONNECTOR, False)], ids=["evicting", "loading"])
def test_only_recording_keeps_attention_out_of_full_cuda_graphs(settings: dict[str, Any], expected: bool) -> None:
    """A replay of a full graph calls no backend, so that nothing would be recorded; prefixes are loaded outside."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    options = {"root": "prefixes", "evict": {"name": "snapkv", "budget": 128}}
    transfer = KVTransferConfig(**settings, kv_connector_extra_config=options)
    connector = KVConnectorFactory.get_connector_class(transfer)
    assert connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config) is expected
