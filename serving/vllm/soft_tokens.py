"""The soft tokens' pass of LookaheadKV in vLLM's offline engine: a second request, with prompt embeddings and a LoRA.

vLLM applies a LoRA to whole requests and refuses activated ones, so that the prompt cannot be read and looked back at
in one request. The first, with {"keepsight_evict": true}, makes a prefix of the whole prompt. The second is the
placeholders of that prefix and the soft tokens, under the LoRA; `keepsight.serving.vllm.record` scores the entries by
their queries, writes the evicted prefix and removes the whole one:

    lora = LoRARequest("lookahead", 1, str(lora_for_vllm(adapter, folder)))
    prompt = observing_prompt(adapter, first.kv_transfer_params, alphabet, dtype)
    (second,) = llm.generate([prompt], sampling, lora_request=lora)

The engine needs `enable_lora`, `max_lora_rank` and `enable_prompt_embeds`. It does not work over HTTP.
"""

import uuid
from pathlib import Path
from typing import Any

import torch

from keepsight.errors import UserError
from keepsight.files import read_json, write_json
from keepsight.models.artifacts import write_tensors
from keepsight.models.lookahead import ADAPTER, PEFT_CONFIG, LookaheadAdapter
from keepsight.serving.prefix import WHOLE_PREFIX_ID, placeholders


def lora_for_vllm(adapter: LookaheadAdapter, folder: Path) -> Path:
    """Write an adapter's LoRA to an existing folder, as an ordinary LoRA, which vLLM loads; returns the folder.

    Raises:
        UserError: the adapter was never saved.
    """
    if not (adapter.folder / PEFT_CONFIG).is_file():
        raise UserError(
            "the adapter was not saved; give one that was read from a folder", field="adapter", code="state"
        )
    config = read_json(adapter.folder / PEFT_CONFIG)
    write_tensors(folder / ADAPTER, adapter.lora)
    write_json(folder / PEFT_CONFIG, config | {"alora_invocation_tokens": None})
    return folder


def observing_prompt(
    adapter: LookaheadAdapter, reply: dict[str, Any], alphabet: list[int], dtype: torch.dtype
) -> dict[str, Any]:
    """The prompt of the soft tokens' pass for `LLM.generate`, with the LoRA and {"keepsight_evict": true}.

    `reply` are the first reply's `kv_transfer_params`, `alphabet` is that of `alphabet_of`, and `dtype` the engine's.
    """
    entries = reply["entries"]
    soft_tokens = adapter.tokens.to(dtype)
    count, width = soft_tokens.shape
    return {
        "prompt_embeds": torch.cat([soft_tokens.new_zeros(entries, width), soft_tokens]),
        "prompt_token_ids": [*placeholders(reply[WHOLE_PREFIX_ID], entries, alphabet), *[0] * count],
        "prompt_is_token_ids": [True] * entries + [False] * count,
        "cache_salt": uuid.uuid4().hex,  # or a pass that is repeated would find some soft tokens in vLLM's cache
    }
