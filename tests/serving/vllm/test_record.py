"""Eviction inside vLLM: the entries that keepsight keeps itself, and its answers; engines in this process, a server."""

import copy
import dataclasses
import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from keepsight import H2O, LookaheadKV, SnapKV
from keepsight.errors import UserError
from keepsight.models.targets import fingerprints, load_target
from keepsight.runtime.allocate import Global
from keepsight.runtime.state import read
from keepsight.serving.export import export
from keepsight.serving.prefix import PrefixStore, alphabet_of, placeholders
from keepsight.serving.vllm.soft_tokens import lora_for_vllm, observing_prompt
from tests.close import assert_close
from tests.serving.adapters import random_adapter
from tests.serving.vllm.stock import CONNECTOR, TOPICS, Library, chatted, serving, stock_target
from tests.tiny import save_tiny_target

BUDGET, PAGE, NEW = 160, 32, 8
LENGTHS = (300, 353, 384, 417, 449, 500, 171, 600)


class Case(NamedTuple):
    """A prompt, what is asked after it, keepsight's prefix and its answer."""

    prompt: list[int]
    asked: list[int]
    digest: str
    answer: list[int]


class World:
    """An engine that evicts, and the same prompts read and evicted from by keepsight."""

    def __init__(self, folder: Path, kind: str, executor: str) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.v1.attention import selector

        from keepsight.serving.vllm.ragged import register

        model = save_tiny_target(folder / "model", hidden_size=64, head_dim=32)
        self.target = load_target(str(model), device="cpu", dtype="float32")
        self.alphabet, self.weights = alphabet_of(self.target.tokenizer), fingerprints(str(model))
        self.page, self.folder, evict = 0, folder, {"name": "snapkv", "budget": BUDGET}
        self.method: Any = SnapKV(BUDGET)
        options: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "max_num_batched_tokens": 128}
        if kind == "ragged":
            self.page, self.method = PAGE, SnapKV(BUDGET, allocate=Global(page=PAGE))
            evict |= {"allocate": {"name": "global", "page": PAGE}}
        elif kind == "h2o":
            self.method, evict = H2O(BUDGET), evict | {"name": "h2o"}
        elif kind == "soft tokens":
            random_adapter(self.target, folder / "adapter")
            self.method = LookaheadKV.from_pretrained(folder / "adapter", BUDGET)
            evict = {"name": "lookaheadkv", "budget": BUDGET, "adapter": str(folder / "adapter")}
            options |= {"enable_lora": True, "max_lora_rank": 8, "enable_prompt_embeds": True}
        elif kind == "little room":  # for 1,365 tokens
            options |= {
                "kv_cache_memory_bytes": 2**21,
                "max_num_batched_tokens": 48,
                "scheduler_reserve_full_isl": False,
            }
        self.own, self.made = PrefixStore(folder / "own"), PrefixStore(folder / "made")
        self.cases = [self._case(length) for length in LENGTHS]
        register()
        selector._cached_get_attn_backend.cache_clear()  # of the engine before
        transfer = KVTransferConfig(
            kv_connector="EvictingConnector",
            kv_connector_module_path="keepsight.serving.vllm.record",
            kv_role="kv_consumer",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"root": str(folder / "made"), "evict": evict},
        )
        self.engine = LLM(
            model=str(model), dtype="float32", enforce_eager=True, block_size=32, max_model_len=1024, max_num_seqs=16,
            distributed_executor_backend=executor, kv_transfer_config=transfer, **options,
        )  # fmt: skip

    def _case(self, length: int) -> Case:
        ids = torch.randint(6, 512, (1, length + 5), generator=torch.Generator().manual_seed(length))
        prompt, asked, model = ids[:, :length], ids[:, length:], self.target.model
        state = self.method.start(model, prompt)
        digest, _ = export(model, state, self.own.root, page=self.page)
        answer, (state, _) = list[int](), read(model, state.unrecorded(), asked)
        for _ in range(NEW):
            answer.append(int(state.logits.argmax()))
            state, _ = read(model, state, torch.tensor([answer[-1:]]))
        return Case(prompt[0].tolist(), asked[0].tolist(), digest, answer)

    def ask(self, prompts: list[list[int]], params: list[Any], new: int = NEW) -> list[Any]:
        """Requests of one batch, each with its `kv_transfer_params` or None."""
        from vllm import SamplingParams

        extra = [None if each is None else {"kv_transfer_params": each} for each in params]
        sampling = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, extra_args=each) for each in extra]
        return self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    def evicted(self, cases: list[Case], wanted: Any = True) -> list[dict[str, Any]]:
        """What the replies to prompts that are read in one batch say of their eviction."""
        replies = self.ask([case.prompt for case in cases], [{"keepsight_evict": wanted}] * len(cases), 1)
        return [reply.kv_transfer_params for reply in replies]

    def check(self, said: list[dict[str, Any]]) -> None:
        """Compare entries and answers with keepsight's own."""
        for case, each in zip(self.cases, said, strict=True):
            assert each.keys() == {"keepsight", "entries", "seen"} and each["seen"] == len(case.prompt)
            assert self.made.header(each["keepsight"]).identity.model in self.weights
            made, own = self.made.tensors(each["keepsight"]), self.own.tensors(case.digest)
            assert made.keys() == own.keys()
            for name in own:
                assert_close(made[name].float(), own[name].float())
        prompts = [
            placeholders(each["keepsight"], each["entries"], self.alphabet) + case.asked
            for case, each in zip(self.cases, said, strict=True)
        ]
        answers = [list(reply.outputs[0].token_ids) for reply in self.ask(prompts, [None] * len(prompts))]
        assert answers == [case.answer for case in self.cases]


@pytest.fixture(scope="module", params=["uniform", "ragged"])
def world(request, tmp_path_factory) -> Iterator[World]:
    """One engine after another: a process has one KV connector."""
    kind = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("KEEPSIGHT_EVICT", "1")
        patch.setenv("KEEPSIGHT_RAGGED", str(int(kind == "ragged")))
        made = World(tmp_path_factory.mktemp("world"), kind, "mp" if kind == "ragged" else "uni")
        yield made
        made.engine.llm_engine.engine_core.shutdown()
        del made.engine
        gc.collect()


def only(kind: str) -> Any:
    """A test of one kind of engine."""
    return pytest.mark.parametrize("world", [kind], indirect=True)


def test_the_entries_and_answers_of_a_batch_read_in_chunks_are_keepsights(world):
    world.check(world.evicted(world.cases))


def test_prompts_in_vllms_own_prefix_cache_are_read_anew(world):
    world.ask([case.prompt for case in world.cases], [None] * len(world.cases), 1)
    again = world.ask([world.cases[0].prompt], [None], 1)
    assert again[0].num_cached_tokens > 0  # an ordinary request finds it there
    world.check([world.evicted([case])[0] for case in world.cases])


def test_ordinary_requests_of_the_same_prompts_in_the_batch_are_not_recorded(world):
    prompts = [case.prompt for case in world.cases for _ in range(2)]
    alone = world.ask(prompts[::2], [None] * len(LENGTHS))
    mixed = world.ask(prompts, [{"keepsight_evict": True}, None] * len(LENGTHS))
    world.check([reply.kv_transfer_params for reply in mixed[::2]])
    assert all(reply.kv_transfer_params is None for reply in mixed[1::2])
    texts = [[list(reply.outputs[0].token_ids) for reply in each] for each in (alone, mixed[::2], mixed[1::2])]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("wanted, why", [(0, "budget 0"), ("many", "'many'"), (64, "spell an id"), (20, "protected")])
def test_what_cannot_be_evicted_is_refused_in_the_reply(world, wanted, why):
    (said,) = world.evicted(world.cases[:1], wanted)
    assert why in said["keepsight_error"]


def test_a_part_of_the_placeholders_is_not_read_as_text(world):
    (said,) = world.evicted(world.cases[:1])
    ids = placeholders(said["keepsight"], said["entries"], world.alphabet)
    whole, cut, known = [*ids, 9], ids[:150] + [9] * 300, ids[:130] + [9] * 300
    replies = world.ask([whole, cut, known], [None] * 3)
    assert [bool(reply.outputs[0].token_ids) for reply in replies] == [True, False, False]


def test_nothing_is_left_of_a_client_that_has_left(world):
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from keepsight.serving.vllm.record import TICKETS

    engine, files = world.engine.llm_engine, {*world.made.root.glob("*.safetensors")}
    asked = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": {"keepsight_evict": True}})
    engine.add_request("left", {"prompt_token_ids": world.cases[-1].prompt}, asked)
    engine.step()
    engine.abort_request(["left"])
    world.ask([world.cases[0].prompt], [None], 1)
    assert {*world.made.root.glob("*.safetensors")} == files
    (left,) = world.engine.collective_rpc(lambda _: len(get_kv_transfer_group().prompts))
    assert not left and not [*world.made.root.glob(f"{TICKETS}/*")]


@only("h2o")
def test_attention_is_accumulated_over_the_parts_of_a_prompt(world):
    world.check(world.evicted(world.cases))


@only("little room")
def test_prompts_that_are_preempted_are_recorded_anew(world, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = list[int]()
    preempt = Scheduler._preempt_request

    def counted(self: Any, request: Any, *given: Any, **named: Any) -> None:
        preempted.append(request.num_computed_tokens - request.num_prompt_tokens)
        preempt(self, request, *given, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    replies = world.ask([case.prompt for case in world.cases], [{"keepsight_evict": True}] * len(LENGTHS), 200)
    world.check([reply.kv_transfer_params for reply in replies])
    assert min(preempted) < 0 < max(preempted)  # some in the middle of their prompts


@only("soft tokens")
def test_soft_tokens_look_back_in_a_second_request(world, tmp_path: Path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = world.method.observer.artifact
    lora = LoRARequest("lookahead", 1, str(lora_for_vllm(adapter, tmp_path)))
    asked = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"keepsight_evict": True}})

    def passed(whole: list[dict[str, Any]]) -> list[dict[str, Any]]:
        prompts: Any = [observing_prompt(adapter, each, world.alphabet, torch.float32) for each in whole]
        replies = world.engine.generate(prompts, asked, lora_request=lora, use_tqdm=False)
        return [reply.kv_transfer_params for reply in replies]

    world.check(passed(world.evicted(world.cases)))
    assert len([*world.made.root.glob("*.safetensors")]) == len(world.cases)  # the whole ones are removed
    (whole,) = world.evicted(world.cases[:1])
    short = observing_prompt(adapter, whole, world.alphabet, torch.float32)
    cut: Any = {name: value[:-1] for name, value in short.items()}
    (reply,) = world.engine.generate([cut], asked, use_tqdm=False)
    assert "not the soft tokens" in reply.kv_transfer_params["keepsight_error"]


@only("uniform")
@pytest.mark.parametrize(
    "changes, why",
    [
        ({"engine_id": "another"}, "has an engine already"),
        ({"kv_load_failure_policy": "recompute"}, "placeholders as text"),
        ({"kv_connector_extra_config": {}}, "needs root"),
        ({}, "not tested with keepsight; install 0.31"),
    ],
)
def test_an_engine_that_would_answer_wrongly_does_not_start(world, monkeypatch, changes, why):
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    worker: Any = get_kv_transfer_group()
    config = copy.copy(worker._vllm_config)
    config.kv_transfer_config = dataclasses.replace(config.kv_transfer_config, **changes)
    if not changes:
        monkeypatch.setattr("keepsight.serving.vllm.connector.ADMITTED", ("0.31",))
    with pytest.raises(UserError, match=why):
        type(worker)(config, KVConnectorRole.SCHEDULER, worker._kv_cache_config)


@only("ragged")
def test_a_prefix_that_is_lost_fails_its_own_requests_alone(world):
    """Its entries are in vLLM's prefix cache, and where its pages lie is read again."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    said = world.evicted(world.cases[:2])
    prompts = [
        placeholders(each["keepsight"], each["entries"], world.alphabet) + case.asked
        for case, each in zip(world.cases[:2], said, strict=True)
    ]
    answers = [case.answer for case in world.cases[:2]]
    path = world.made.path(said[0]["keepsight"])
    whole = path.read_bytes()
    for data, expected in ((whole, answers), (whole[:-100], [[], answers[1]]), (whole, answers)):
        path.write_bytes(data)
        world.engine.collective_rpc(lambda _: get_kv_transfer_group().store._tensors.clear())
        assert [list(each.outputs[0].token_ids) for each in world.ask(prompts, [None] * 2)] == expected


def test_a_server_evicts_from_a_message_and_answers_the_next(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KEEPSIGHT_EVICT", "1")
    library = Library(stock_target(tmp_path / "model"), tmp_path / "own")
    documents = [TOPICS[n][:1500] for n in range(8)]
    cases = [library.cases(document, 128) for document in documents]
    evict = {"root": str(tmp_path / "made"), "evict": {"name": "snapkv", "budget": 128, "window": 8}}
    connector = {"kv_connector": "EvictingConnector", "kv_connector_module_path": "keepsight.serving.vllm.record"}
    config = json.dumps(CONNECTOR | connector | {"kv_connector_extra_config": evict})
    log = tmp_path / "server.log"
    with serving(tmp_path / "model", tmp_path / "made", log, ragged=False, kv_transfer_config=config) as server:

        def asked(document: str, wanted: Any = True) -> httpx.Response:
            turns = [{"role": "user", "content": document}]
            body = {"model": "tiny", "messages": turns, "kv_transfer_params": {"keepsight_evict": wanted}}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)

        with ThreadPoolExecutor(8) as pool:
            said = [reply.json()["kv_transfer_params"] for reply in pool.map(asked, documents)]
        made = [
            dataclasses.replace(case, digest=each["keepsight"])
            for each, both in zip(said, cases, strict=True)
            for case in both
        ]
        with ThreadPoolExecutor(16) as pool:
            answers = [*pool.map(lambda case: chatted(server, case), made)]
        assert answers == [case.answer for case in made]
        assert asked(documents[0], "all").status_code == 400
        assert "spell an id" in asked(documents[0], 20).json()["kv_transfer_params"]["keepsight_error"]
