"""The measurement of a retrieval head on a tiny model: every line is there, and what can be known exactly is right."""

import pytest
import torch

from keepsight.eval.bench.offload import size_lines, step_lines, text_prompts, traffic_lines
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import Target
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

ENTRY = 2 * 8 * 4 * 2 * 8  # bytes of one entry of each KV head: key and value, 8 dimensions, float32, 2 heads, 8 layers


@pytest.fixture(scope="module")
def target():
    tokenizer = tiny_tokenizer()
    model = tiny_model(num_hidden_layers=8, vocab_size=len(tokenizer), max_position_embeddings=1024)
    return Target(model, tokenizer, "tiny", "0")


@pytest.fixture(scope="module", params=["previous-step", "none"])
def head(request, target):
    torch.manual_seed(1)
    head = RetrievalHead.untrained(target.model, request.param, 1024)
    for weight in (head.q_proj.weight, head.k_proj.weight):
        torch.nn.init.normal_(weight)  # chooses apart from one step to the next
    return head


def test_parameters_and_bytes(target):
    head = RetrievalHead.untrained(target.model, "previous-step", 1024)
    norms, fc, projections = 2 * 32, 3 * 32 * 32, 64 * (32 + 16)
    own = norms + fc + projections
    (line,) = size_lines(target, head, None)
    whole = sum(each.numel() for each in target.model.parameters())
    assert f": {own:,} parameters, {own * 4:,} bytes as float32, {own / whole:.2%} of the model's {whole:,}; " in line
    assert line.endswith("; 64 bytes of keys a token")  # 2 KV heads of 8 dimensions in float32


def test_a_line_for_each_length_and_method(target, head):
    title, names, *lines = step_lines(target, head, 40, [100, 1500], batch=2, repeats=2)
    assert title.startswith("2 rows of random entries, budget 40, float32, 2 steps, ")
    assert names.split()[:2] == ["entries", "method"]
    assert lines.pop().split()[:6] == ["beyond", "the", "model's", "context", "of", "1024;"]
    assert [(line[:9].strip(), line[9:31].strip()) for line in lines] == [
        (length, name)
        for length in ("100", "1500")
        for name in ("full", "quest", "specontext", "specontext, offloaded")
    ]
    columns = [[float(each) for each in line[31:].split()] for line in lines]
    assert [len(each) for each in columns] == [3, 3, 6, 4] * 2
    assert columns[0][2] == columns[4][2] == 1  # against itself
    for step in (columns[2], columns[6]):
        assert sum(step[3:]) == pytest.approx(step[0], abs=0.02)
    # At most the budget's entries of both rows are loaded; the first step loads no fewer.
    for step in (columns[3], columns[7]):
        assert 0 < step[3] <= round(40 * 2 * ENTRY / 1e6, 3)


def test_elastic_loading_moves_less(target, head):
    prompts = [ids.tolist() for ids in (prompt_ids(150)[0][0], prompt_ids(120, seed=1)[0][0])]
    title, names, *lines = traffic_lines(target, head, [8, 40], prompts, 5)
    assert title == "2 texts of 120 to 150 tokens, 5 steps each, all layers on the CPU"
    assert names.split()[0] == "budget"
    for budget, line in zip((8, 40), lines, strict=True):
        first, elastic, reloading, saved, sent = line.split()
        assert int(first) == budget
        assert float(reloading) == round(budget * ENTRY / 1e6, 3)
        assert 0 < float(elastic) <= float(reloading)
        assert float(saved[:-1]) / 100 == pytest.approx(1 - float(elastic) / float(reloading), abs=0.06)
        assert float(sent) == round(ENTRY / 1e6, 3)


def test_where_all_is_chosen_only_what_is_new_is_loaded(target, head):
    _, _, line = traffic_lines(target, head, [500], [prompt_ids(300)[0][0].tolist()], 6)
    _, elastic, reloading, _, _ = line.split()
    assert float(elastic) == round(ENTRY / 1e6, 3)  # the token of the step before
    # 301 entries in the first counted step, whose prompt has 300 and a token that filled the slots; then one more each.
    assert float(reloading) == round((301 + 306) / 2 * ENTRY / 1e6, 3)


def test_texts_have_about_the_length_that_is_asked_for(target):
    prompts = text_prompts(target, 600, 3)
    assert all(500 < len(each) <= 600 for each in prompts)
    assert len({tuple(each[:100]) for each in prompts}) == 3
    text = target.tokenizer.decode(prompts[0])
    assert text.endswith("Summarize the text above.<|end|><|assistant|>")
