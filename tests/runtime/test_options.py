"""What users write: options as numbers of any library, ratios, prompts in any form; and methods that are copied."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepsight import LAQ, Conversation, Evict, LookaheadKV, SnapKV, StreamingLLM, generate
from keepsight.errors import UserError
from keepsight.models.draft_sources import LayerSubset
from keepsight.runtime.allocate import Adaptive, Global
from keepsight.runtime.drafting.speckv import MInference, SparsePrefill
from keepsight.runtime.drafting.speculative import Speculative
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.methods import KeyNorm, Kivi, Truncation
from keepsight.runtime.methods.positions import Earliness, RandomScores
from keepsight.runtime.observe import Observer
from tests.families import family_model
from tests.models.modules import random_module, save
from tests.refused import refused
from tests.runtime.family_methods import BUDGET, NAMES, PROMPT, method_of
from tests.runtime.retrieval.heads import tiny_head
from tests.tiny import prompt_ids, save_tiny_target, tiny_model, tiny_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
IDS = prompt_ids(60)[0]


@pytest.mark.parametrize("scalar", [np.int64, np.int32, torch.tensor], ids=["int64", "int32", "tensor"])
def test_numbers_of_numpy_and_torch_are_numbers(scalar: Any) -> None:
    method = SnapKV(scalar(40), window=scalar(8), pool=Pool(kernel=scalar(5)), allocate=Adaptive(np.float64(0.5)))
    expected = SnapKV(40, window=8, pool=Pool(kernel=5), allocate=Adaptive(0.5))
    assert method == expected
    assert hash(method) == hash(expected)

    head = tiny_head()

    def other_parts(number: Any) -> str:
        parts = (
            LayerSubset((number(0), number(2))),
            SparsePrefill(number(32), number(64)),
            MInference(number(40)),
            Kivi(number(2), number(8)),
            Truncation(number(9)),
            Speculative(head, tokens=number(3)),
        )
        return repr(parts)

    assert other_parts(scalar) == other_parts(int)

    answer = generate(tiny_model(), IDS, SnapKV(40, window=8), **GREEDY, prefill_chunk_size=7)
    options: dict[str, Any] = GREEDY | {"max_new_tokens": np.int64(6), "prefill_chunk_size": np.int64(7)}
    assert torch.equal(generate(tiny_model(), IDS, SnapKV(scalar(40), window=8), **options), answer)

    wrong: Any
    for wrong in (np.float64(40.0), np.int64(-1), np.array([40]), True, torch.tensor(True)):
        with pytest.raises(UserError) as error:
            SnapKV(wrong)
        assert error.value.field == "budget"


def test_a_compression_ratio_is_the_evicted_share() -> None:
    snapkv: Any = SnapKV
    assert snapkv(compression_ratio=0.9) == SnapKV(0.1)
    assert snapkv(compression_ratio=np.float32(0.5), window=8) == SnapKV(0.5, window=8)
    assert snapkv(compression_ratio=0) == SnapKV(1.0)
    assert snapkv(compression_ratio=0.75, window=8).start(tiny_model(), IDS).length == 15
    with refused("compression_ratio", "conflict"):  # tests/test_errors.py has its range
        snapkv(compression_ratio=0.5, budget=64)


WITH_HEAD_OR_DRAFT = ("specontext", "speckv", "specpc", "speckvpc")


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_of_a_method_and_other_defaults_of_torch_change_nothing(name: str, tmp_path: Path) -> None:
    """Also after it has been used: what it prepared for a model's modules is not for copies of them.

    Other default dtypes and devices; float64 models, and autocast, which compute.
    """
    model = family_model("Llama 3")
    method = method_of(name, "Llama 3", tmp_path)

    def answer(method: Any = method) -> Any:
        return generate(model, PROMPT, method, **GREEDY)

    def answer_on_meta() -> Any:
        torch.set_default_device("meta")  # of this thread alone: after None, torch 2.7 has no default device to ask for
        return answer()

    expected = answer()
    assert "\n" not in repr(method)
    assert len(repr(method)) < 500
    assert torch.equal(answer(copy.deepcopy(method)), expected)
    assert torch.equal(answer(pickle.loads(pickle.dumps(method))), expected)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(answer_on_meta).result(), expected)
    if name in WITH_HEAD_OR_DRAFT:
        return
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(answer(), expected)
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert answer().shape == expected.shape
    if name != "lookaheadkv":
        double: Any = copy.deepcopy(model).double()
        assert torch.equal(generate(double, PROMPT, method, **GREEDY), expected)


def test_a_method_shows_what_is_not_by_default(tmp_path: Path) -> None:
    assert repr(SnapKV(64)) == "SnapKV(budget=64)"
    assert repr(StreamingLLM(0.5, sinks=2)) == "StreamingLLM(budget=0.5, sinks=2)"
    assert repr(SnapKV(64, allocate=Adaptive(0.5))) == "SnapKV(budget=64, allocate=Adaptive(floor=0.5))"
    method = LookaheadKV.from_pretrained(save(random_module(), tmp_path / "a"), compression_ratio=0.75)
    assert method.budget == 0.25
    assert repr(method).startswith("LookaheadKV(budget=0.25, observer=SoftTokens(artifact=LookaheadAdapter('")


def test_prompts_in_the_forms_that_tokenizers_give(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path)
    model = tiny_model(vocab_size=512)
    tokenizer = tiny_tokenizer()
    method = SnapKV(12, window=4)
    texts = ["for each of the names in the class", "with the class"]
    inputs: Any = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])  # as many tokenizers do
    expected = generate(model, inputs["input_ids"], method, attention_mask=inputs["attention_mask"], **GREEDY)
    assert torch.equal(generate(model, inputs, method, **GREEDY), expected)
    assert torch.equal(generate(model, **inputs, method=method, **GREEDY), expected)
    assert torch.equal(generate(model, texts, method, tokenizer=tokenizer, **GREEDY), expected)

    single: Any = tokenizer(texts[0], return_tensors="pt")
    expected = generate(model, single["input_ids"], method, **GREEDY)
    assert torch.equal(generate(model, texts[0], method, tokenizer=tokenizer, **GREEDY), expected)
    with refused("tokenizer", "missing"):
        generate(model, texts[0], method, **GREEDY)
    model.config.name_or_path = str(folder)
    assert torch.equal(Conversation(model, method).say(texts[0], **GREEDY), expected)
    assert torch.equal(Conversation(model, method).say(single, **GREEDY), expected)
    assert torch.equal(generate(model, texts[0], method, **GREEDY), expected)

    ids: Any = expected
    wrong: Any
    for wrong in ({"input_ids": [[1, 2]]}, {"attention_mask": ids}, [], ids[0], ids.float()):
        with refused("input_ids", "type"):
            generate(model, wrong, method, **GREEDY)
    with refused("input_ids", "range"):
        generate(model, ids[:, :0], method, **GREEDY)
    mask = torch.tensor([[1], [0]]).expand(2, IDS.shape[1])
    with refused("attention_mask", "range"):
        generate(model, IDS.repeat(2, 1), method, attention_mask=mask, **GREEDY)


def test_stop_strings_end_an_answer() -> None:
    model = tiny_model(vocab_size=512)
    tokenizer = tiny_tokenizer()
    method = SnapKV(12, window=4)
    unstopped = generate(model, IDS, method, **GREEDY)
    stop = tokenizer.decode(unstopped[0, 2])
    options: dict[str, Any] = {"stop_strings": [stop], "tokenizer": tokenizer, **GREEDY}
    by_transformers = model.generate(IDS, **options)[:, IDS.shape[1] :]
    assert by_transformers.shape[1] < 6 or str(stop) not in str(tokenizer.decode(by_transformers[0]))

    expected = unstopped[:, :3]
    assert torch.equal(generate(model, IDS, method, **options), expected)
    with_prompt = model.generate(IDS, custom_generate=method, **options)
    assert torch.equal(with_prompt[:, IDS.shape[1] :], expected)
    assert next(iter(signature(SnapKV).parameters)) == "budget", "a class is called as its fields say"
    answer = Conversation(model, method).say(IDS, stop_strings=stop, tokenizer=tokenizer, **GREEDY)
    assert torch.equal(answer, expected)


@pytest.mark.parametrize("name", ["snapkv", "kivi", "quest", "truncation", "full"])
def test_a_compressed_prompt_is_gone_on_from(name: str, tmp_path: Path) -> None:
    model = family_model("Llama 3")
    method = method_of(name, "Llama 3", tmp_path)
    past = method.compress(model, input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT))
    expected = Conversation(model, method).say(PROMPT, **GREEDY)
    for _ in range(2):  # the past stays as it is
        assert torch.equal(generate(model, PROMPT, method, past_key_values=past, **GREEDY), expected)
    if name == "snapkv":
        assert past.state.length == BUDGET

    turn, _ = prompt_ids(5, seed=1)
    answer = generate(model, torch.cat([PROMPT, turn], dim=1), method, past_key_values=past, **GREEDY)
    state = method.resume(model, method.start(model, PROMPT), turn)
    assert answer[0, 0] == state.logits.argmax()


class Signed(Observer):
    """Scores of both signs, of which it says nothing."""

    def __call__(self, model: Any, state: Any, reduce: Any) -> Any:
        return [layer.keys.float().sum(dim=-1) for layer in state.entries()]


def test_scores_that_can_be_negative_are_not_multiplied() -> None:
    assert Evict(12, RandomScores(), value_norm=True).start(tiny_model(), IDS).length == 12
    for make, field in (
        (lambda: KeyNorm(12, value_norm=True), "value_norm"),
        (lambda: StreamingLLM(12, observer=Earliness(), value_norm=True), "value_norm"),
        (lambda: KeyNorm(12, allocate=Global(0.2, [[1.0, 2.0]] * 3)), "allocate.weights"),  # type: ignore[arg-type]
        (lambda: Evict(12, Signed(), value_norm=True).start(tiny_model(), IDS), "value_norm"),
    ):
        with refused(field, "conflict"):
            make()


@pytest.mark.parametrize("wrong", [-1, 256, 10**9])
def test_ids_beyond_the_vocabulary(wrong: int) -> None:
    model = tiny_model(vocab_size=256)
    method = SnapKV(16, window=4)
    ids = IDS % 256
    wrong_ids = torch.cat([ids[:, :9], torch.tensor([[wrong]])], dim=1)
    conversation = Conversation(model, method)
    past = method.compress(model, input_ids=ids)
    wrong_turn = torch.cat([past.ids, wrong_ids], dim=1)
    options: dict[str, Any] = GREEDY | {"return_dict_in_generate": True}
    for ask in (
        lambda: generate(model, wrong_ids, method, **GREEDY),
        lambda: generate(model, wrong_ids, **GREEDY),
        lambda: method.compress(model, input_ids=wrong_ids),
        lambda: conversation.say(wrong_ids, **GREEDY),
        lambda: model.generate(wrong_ids, custom_generate=method, **GREEDY),
        lambda: generate(model, wrong_turn, method, past_key_values=past, **options),
    ):
        with refused("input_ids", "range"):
            ask()
    assert conversation.say(ids, **GREEDY).shape == (1, 6)


def test_value_norms_of_a_float64_model() -> None:
    method = SnapKV(12, window=4, value_norm=True)
    expected = generate(tiny_model(), IDS, method, **GREEDY)
    assert torch.equal(generate(tiny_model().double(), IDS, method, **GREEDY), expected)


@pytest.mark.parametrize("method", [SnapKV(40, window=8), LAQ(40)])
def test_a_prompt_beyond_the_context_is_named(method: Any) -> None:
    with refused("prompt", "range"):
        generate(tiny_model(), prompt_ids(300)[0], method, **GREEDY)


def test_parts_may_be_named_in_python() -> None:
    """As on the command line: a name, a mapping with a name, or options that change the method's own part."""
    snapkv: Any = SnapKV
    expected = SnapKV(40, allocate=Adaptive(0.5), pool=Pool("max", 5), window=8)
    assert snapkv(40, allocate={"name": "adakv", "floor": 0.5}, pool={"kernel": 5}, window=8) == expected
    assert snapkv(40, allocate="adakv", pool="none") == SnapKV(40, allocate=Adaptive(), pool=NO_POOL)
    kivi: Any = Kivi
    assert kivi(inner={"name": "snapkv", "budget": 40, "pool": "none"}) == Kivi(inner=SnapKV(40, pool=NO_POOL))
    for options, field in (
        ({"ratio": 0.5}, "ratio"),
        ({"allocate": "ada"}, "allocate"),
        ({"pool": {"size": 3}}, "size"),
    ):
        with refused(field, "unknown") as error:
            snapkv(40, **options)
        assert str(error.value).startswith("SnapKV: ")


def test_reprs_are_one_short_line(tmp_path: Path) -> None:
    state = SnapKV(40, window=8).start(tiny_model(), IDS)
    assert repr(state) == "State(rows=1, tokens=60, entries=40, kv=0.01 MiB)"
    method = LookaheadKV.from_pretrained(save(random_module(), tmp_path), 40)
    text = repr(method)
    assert len(text) < 300
    assert "\n" not in text
    assert str(tmp_path) in text
