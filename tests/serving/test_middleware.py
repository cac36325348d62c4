"""The middleware of vLLM's server: what it makes of requests, without vLLM."""

import pytest

from keepsight.errors import UserError
from keepsight.serving.vllm.middleware import PATHS, Rewriter
from tests.tiny import tiny_tokenizer

CHAT, COMPLETIONS = PATHS
TEXT = "for item in the list:\n    print(item)"


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(str(folder))
    return Rewriter(str(folder / "prefixes"), str(folder))


def test_a_document_to_evict_from_is_read_as_keepsight_prefix_reads_it(rewriter: Rewriter):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    asked = {"messages": turns, "max_completion_tokens": 50, "kv_transfer_params": {"keepsight_evict": 64}}
    found = rewriter.rewritten(CHAT, asked)
    before = "<|system|>Be brief.<|end|><|user|>"
    ids = rewriter.tokenizer(before + TEXT, add_special_tokens=False)["input_ids"]
    params = {"keepsight_evict": 64, "keepsight_before": before, "prompt_token_ids": ids}
    assert found == asked | {"max_completion_tokens": 1, "kv_transfer_params": params}
    assert rewriter.rewritten(CHAT, asked | {"kv_transfer_params": {"keepsight_evict": False}})["messages"] == turns


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "changes, why",
    [
        ({"kv_transfer_params": {"keepsight_evict": "all"}}, "'all'; give true, or a budget"),
        ({"kv_transfer_params": {"keepsight_evict": 0}}, "a budget above 0"),
        ({"n": 2}, "leave n out"),
        ({"stream": True}, "leave stream out"),
        ({"messages": [], "prompt": ["one", "two"]}, "the document as the text|give one prompt"),
    ],
)
def test_what_cannot_be_evicted_from_is_refused(rewriter: Rewriter, path, changes, why):
    turns = [{"role": "user", "content": TEXT}]
    asked = {"messages": turns, "prompt": TEXT, "kv_transfer_params": {"keepsight_evict": True}}
    with pytest.raises(UserError, match=why):
        rewriter.rewritten(path, asked | changes)
