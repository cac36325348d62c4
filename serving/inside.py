"""What can be evicted inside vLLM: the methods, and the fields and the configuration of `serving.vllm.record`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods import make_method
from keepsight.runtime.methods.lookaheadkv import SoftTokens
from keepsight.runtime.observe import LayerObserver

CONNECTOR = "EvictingConnector"
PLAIN_FOLDER = "plain"
"""In the connector's configuration, the folder of the prefixes that are made of plain requests, which is emptied when
the engine starts: the middleware keeps and removes what is in it."""
RAGGED = "KEEPSIGHT_RAGGED"
"""The variable that asks vLLM for the backend of ragged heads."""


@dataclass(frozen=True)
class PlainEviction:
    """An engine that evicts from plain requests.

    Attributes:
        folder: The folder of their prefixes.
        budget: The method's budget.
        context: Tokens of the longest prompt with its answer.
    """

    folder: Path
    budget: int | float
    context: int

    def shortest(self, letters: int) -> int:
        """Length of the shortest prompts that are evicted from, if the operator names none."""
        return shortest_evicted(self.budget, letters)


def shortest_evicted(budget: int | float, letters: int) -> int:
    """Length of the shortest prompts that a server evicts from by default; `letters` entries encode a prefix's id."""
    if isinstance(budget, int):
        return 2 * max(budget, letters)
    return math.ceil(2 * letters / budget)


def plain_eviction(vllm_config: Any) -> PlainEviction | None:
    """What an engine's configuration says of plain requests; None where it does not evict from them."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    options = transfer.kv_connector_extra_config
    if not options.get(PLAIN_FOLDER):
        return None
    return PlainEviction(
        Path(options[PLAIN_FOLDER]), options["evict"]["budget"], vllm_config.model_config.max_model_len
    )


def evicting_config(root: str | Path, plain: Path, evict: dict[str, Any]) -> dict[str, Any]:
    """The `--kv-transfer-config` of a vLLM that evicts from plain requests.

    `root` is the folder of prefixes that clients name, `plain` that of plain requests, and `evict` a method's name,
    budget and options.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "keepsight.serving.vllm.record",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"root": str(root), PLAIN_FOLDER: str(plain), "evict": evict},
    }


def looks_back(method: Evict) -> bool:
    """Whether a method's soft tokens look back in a request of their own."""
    return isinstance(method.observer, SoftTokens)


def evicting_method(config: Any, block_size: int, *, ragged: bool) -> Evict:
    """The method of a configuration {"name": ..., "budget": ..., further options}.

    `ragged` says whether the engine's backend reads heads of different lengths, in pages of `block_size` entries.

    Raises:
        UserError: it cannot run inside vLLM.
    """
    options = dict(config) if isinstance(config, dict) else {}
    if not {"name", "budget"} <= options.keys():
        raise UserError(
            'keepsight: kv_connector_extra_config needs evict, such as {"name": "snapkv", "budget": 128}',
            field="evict",
            code="missing",
        )
    name = str(options.pop("name"))
    method = make_method(name, options.pop("budget"), None, **options)
    if (
        not isinstance(method, Evict)
        or not isinstance(method.bound_observer, LayerObserver | SoftTokens)
        or method.every
        or method.rerotate
        or method.needs_model
        or method.needs().features
        or method.needs().statistics
    ):
        raise UserError(
            f"keepsight: {name} cannot run in vLLM, where a method evicts once, by scores of the tokens read, as "
            "snapkv does; use keepsight prefix",
            field="evict",
            code="model",
        )
    if isinstance(method.allocate, Global) and method.allocate.page == block_size and ragged:
        return method
    if not isinstance(method.allocate, Uniform):
        raise UserError(
            f"keepsight: {name} gives heads different numbers of entries; set {RAGGED}=1 and give it "
            f'"allocate": {{"name": "global", "page": {block_size}}}, or "allocate": "uniform"',
            field="evict",
            code="conflict",
        )
    return method
