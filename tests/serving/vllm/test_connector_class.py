"""What vLLM asks a connector's class before it chooses CUDA graphs or allows sleep mode."""

from typing import Any

import pytest

from tests.serving.vllm.stock import CONNECTOR

EVICTING = CONNECTOR | {
    "kv_connector": "EvictingConnector",
    "kv_connector_module_path": "keepsight.serving.vllm.record",
}


def asked(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The configuration and the class of a connector, as vLLM finds it."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    options = {"root": "prefixes", "evict": {"name": "snapkv", "budget": 128}}
    transfer = KVTransferConfig(**settings, kv_connector_extra_config=options)
    return transfer, KVConnectorFactory.get_connector_class(transfer)


@pytest.mark.parametrize(("settings", "expected"), [(EVICTING, True), (CONNECTOR, False)], ids=["evicting", "loading"])
def test_only_recording_keeps_attention_out_of_full_cuda_graphs(settings: dict[str, Any], expected: bool) -> None:
    """A replay of a full graph calls no backend, so that nothing would be recorded; prefixes are loaded outside."""
    transfer, connector = asked(settings)
    assert connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config) is expected


@pytest.mark.parametrize("settings", [EVICTING, CONNECTOR], ids=["evicting", "loading"])
def test_sleep_mode_is_not_supported(settings: dict[str, Any]) -> None:
    """vLLM 0.33 asks; 0.32, whose classes do not have the question, never does."""
    transfer, connector = asked(settings)
    assert connector.supports_sleep_mode(transfer) is False
