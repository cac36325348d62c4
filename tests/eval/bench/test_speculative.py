"""The measurement of a draft head on a tiny model, where what it must say is known."""

from keepsight.eval.bench.decoding import bench_speculate
from keepsight.models.targets import Target
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.state import prefill
from tests.runtime.retrieval.heads import Oracle, tiny_head
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer


def measured(head, prompts, answer_tokens, draft_tokens):
    target = Target(tiny_model(eos_token_id=None), tiny_tokenizer(), "tiny", "0")
    return list(bench_speculate(target, head, prompts, answer_tokens, draft_tokens))


def test_a_head_that_knows_half_of_each_draft():
    ids = prompt_ids(50)[0]
    model = tiny_model(eos_token_id=None)
    answer = decode(model, prefill(model, ids), stop_after(13, None), pad_token=0).ids[0]
    # After the first token: 2 of 4 drafts right and a token of the target's own, four times.
    title, heads, plain, speculative, ratio, length, shares, same = measured(
        Oracle(answer, {3, 6, 9, 12}), ids.tolist(), 13, 4
    )
    assert title.startswith("1 prompts of 50 to 50 tokens, answers of at most 13, drafts of 4, torch.float32, ")
    assert heads.split() == ["decoding", "tokens", "seconds", "tokens/s"]
    assert plain.split()[:2] == ["plain", "13"] and speculative.split()[:2] == ["speculative", "13"]
    assert float(ratio.split()[1]) > 0
    assert length.startswith("acceptance length 3.00 tokens")
    assert shares.endswith(": 1.00 1.00 0.00 0.00")
    assert same == "1 of 1 answers are the same, token for token"


def test_several_prompts_with_a_random_head():
    prompts = [prompt_ids(length, seed=length)[0][0].tolist() for length in (20, 31, 44)]
    lines = measured(tiny_head(), prompts, 6, 3)
    assert lines[0].startswith("3 prompts of 20 to 44 tokens, answers of at most 6, drafts of 3, ")
    assert lines[2].split()[:2] == ["plain", "18"] and lines[3].split()[:2] == ["speculative", "18"]
    assert lines[-1] == "3 of 3 answers are the same, token for token"


def test_answers_of_one_token_draft_nothing():
    lines = measured(tiny_head(), prompt_ids(20)[0].tolist(), 1, 3)
    assert lines[-2].endswith(": nothing was drafted")
