"""The engine's answers are those of `generate` alone, whoever else is in the batch, comes, or leaves."""

import threading
from typing import Any

import pytest
import torch

from keepsight import LAQ, AdaKV, KeyNorm, KVzip, SnapKV
from keepsight.errors import UserError
from keepsight.runtime import batch_slots, join, static_batch, static_step
from keepsight.runtime.allocate import Global, Pyramid
from keepsight.runtime.generate import FullCache, generate
from keepsight.runtime.methods import H2O, ExpectedAttention, SpeCache
from keepsight.runtime.methods.reconstruction import Reconstruction
from keepsight.runtime.static_step import StaticStep
from keepsight.serving.engine import Busy, Closed, Engine, Job, TooLong
from tests.families import family_model, fresh_model
from tests.refused import refused
from tests.tiny import SmallVocabulary, prompt_ids, tiny_model

KVZIP = KVzip(24, Reconstruction(SmallVocabulary()))  # type: ignore[arg-type]
LENGTHS = (90, 33, 61, 20, 90, 120, 47)
METHODS = {
    "uniform": SnapKV(40, window=8),
    "ragged": AdaKV(40, window=8),
    "pages": SnapKV(32, window=8, allocate=Global(page=8)),
    "full": FullCache(),
}


def prompts(*lengths: int) -> list[torch.Tensor]:
    return [prompt_ids(length, seed=seed)[0][0] for seed, length in enumerate(lengths)]


def alone(model, method, ids, seed=None, **options):
    if seed is not None:
        torch.manual_seed(seed)
    return generate(model, ids[None], method, **options)[0].tolist()


def run(engine: Engine) -> None:
    while engine.step():
        pass


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_answers_are_those_of_generate_alone(method):
    """Fewer rows than requests, so that rows come and go in the middle of others' answers."""
    model = tiny_model()
    engine = Engine(model, method, rows=3)
    jobs = [Job(ids, max_new_tokens=4 + 5 * (place % 3)) for place, ids in enumerate(prompts(*LENGTHS))]
    for job in jobs:
        engine.submit(job)
    run(engine)
    assert [job.result(0) for job in jobs] == [alone(model, method, job.ids, **job.options) for job in jobs]
    assert {job.reason for job in jobs} <= {"stop", "length"} and engine.load == (0, 0) and engine.kv_bytes == 0
    budget = getattr(method, "budget", 1 << 20)
    assert [job.kept for job in jobs] == pytest.approx([min(length, budget) for length in LENGTHS], abs=8)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_static_steps_answer_alike_while_rows_join_and_leave(method, monkeypatch):
    """Also where a stretch is used up in the middle of answers. Rows of the buffers are powers of two."""
    monkeypatch.setattr(static_batch, "STRETCH", 5)
    loaded: list[StaticStep] = []
    load = StaticStep.load

    def count_load(step: StaticStep, *args: Any, **options: Any) -> None:
        loaded.append(step)
        load(step, *args, **options)

    monkeypatch.setattr(StaticStep, "load", count_load)
    monkeypatch.setattr("keepsight.serving.engine.read", None)  # every token is read by a static step
    model = tiny_model()
    engine = Engine(model, method, rows=3, static=True)
    jobs = [Job(ids, max_new_tokens=4 + 5 * (place % 3)) for place, ids in enumerate(prompts(*LENGTHS))]
    jobs += [Job(ids, seed=3, do_sample=True, temperature=0.8, max_new_tokens=9) for ids in prompts(55)]
    for job in jobs:
        engine.submit(job)
    run(engine)
    answers = [alone(model, method, job.ids, job.seed, **job.options) for job in jobs]
    assert [job.result(0) for job in jobs] == answers
    assert {step.capacity.rows for step in loaded} == {1, 2, 4}
    assert engine.kv_bytes == 0


def test_a_server_captures_a_graph_for_each_size_not_for_each_batch(monkeypatch):
    """What it would capture on a GPU; here the steps run one operator after another."""
    captured: list[StaticStep] = []
    monkeypatch.setattr(StaticStep, "capture", lambda step, model, state: captured.append(step))
    monkeypatch.setattr(static_step, "_memory", lambda device: (2**30, 2**30))
    monkeypatch.setattr(static_step, "_graphs_are_on", lambda state: True)
    monkeypatch.setattr(static_step, "reason_against_graph", lambda model, state: None)
    model, method = tiny_model(), METHODS["ragged"]
    engine = Engine(model, method, rows=3)
    for _ in range(2):
        jobs = [Job(ids, max_new_tokens=4 + 5 * (place % 3)) for place, ids in enumerate(prompts(*LENGTHS))]
        for job in jobs:
            engine.submit(job)
        run(engine)
        assert [job.result(0) for job in jobs] == [alone(model, method, job.ids, **job.options) for job in jobs]
    sizes = [step.capacity for step in captured if step.choice is None]
    assert len(sizes) == len(set(sizes)) and {size.rows for size in sizes} == {1, 2, 4}


@pytest.mark.parametrize("method", [SnapKV(24, window=8), AdaKV(24, window=8)], ids=["dense", "ragged"])
@pytest.mark.parametrize("family", ["Gemma 2", "GPT-OSS", "Qwen2.5-VL (text)", "DeepSeek-V3"])
def test_layers_of_every_kind_join_and_leave(family, method, monkeypatch):
    """Sliding windows whose padding goes when a longer row leaves, sinks, several positions a token, latents."""
    monkeypatch.setattr(join, "CALL", 0)  # ragged ones stay so
    model = family_model(family)
    engine = Engine(model, method, rows=2)
    jobs = [Job(ids, max_new_tokens=3 + 9 * (place % 2)) for place, ids in enumerate(prompts(70, 20, 45, 90))]
    for job in jobs:
        engine.submit(job)
    run(engine)
    assert [job.result(0) for job in jobs] == [alone(model, method, job.ids, **job.options) for job in jobs]


def test_sampling_is_that_of_a_seed_and_of_the_options():
    model, method = tiny_model(), METHODS["uniform"]
    engine = Engine(model, method, rows=4)
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0, "max_new_tokens": 12}
    penal: dict[str, Any] = {"repetition_penalty": 1.5, "do_sample": False, "max_new_tokens": 12}
    jobs = [Job(ids, seed=place, **sampled) for place, ids in enumerate(prompts(50, 70))]
    jobs += [Job(ids, **penal) for ids in prompts(60, 80)]
    for job in jobs:
        engine.submit(job)
    run(engine)
    assert [job.result(0) for job in jobs] == [alone(model, method, job.ids, job.seed, **job.options) for job in jobs]


def test_an_answer_ends_with_the_end_token_and_with_who_asked_for_it():
    model, method = tiny_model(), METHODS["uniform"]
    ids = prompts(90)[0]
    whole = alone(model, method, ids, max_new_tokens=12)
    model.generation_config.eos_token_id = [whole[4], 2]

    class Enough(Job):
        def took(self, token: int) -> bool:
            return len(self.tokens) == 3

    engine = Engine(model, method)
    ended, enough = Job(ids, max_new_tokens=12), Enough(ids, max_new_tokens=12)
    engine.submit(ended)
    engine.submit(enough)
    run(engine)
    assert ended.result(0) == whole[: whole.index(whole[4]) + 1] and ended.reason == "stop"
    assert enough.result(0) == whole[:3] and enough.reason == "stop"


def test_cancelled_requests_leave_and_disturb_nobody():
    model, method = tiny_model(), METHODS["ragged"]
    engine = Engine(model, method, rows=2)
    stays, leaves, never = (Job(ids, max_new_tokens=10) for ids in prompts(60, 120, 40))
    for job in (stays, leaves, never):
        engine.submit(job)
    never.cancel()
    engine.step()
    engine.step()
    before = engine.kv_bytes
    leaves.cancel()
    run(engine)
    assert stays.result(0) == alone(model, method, stays.ids, max_new_tokens=10)
    assert (leaves.reason, never.reason) == ("cancelled", "cancelled") and len(leaves.tokens) < 10 and before
    assert engine.totals.ended == {"stop": 0, "length": 1, "cancelled": 2, "failed": 0}


def layers_read(model, act) -> list[int]:
    """Indices of the decoder layers that read a prompt; `act` is called with their number after each."""
    read = list[int]()

    def note(module, inputs, output):
        if inputs[0].shape[1] > 1:
            read.append(module.self_attn.layer_idx)
            act(len(read))

    for layer in model.model.layers:
        layer.register_forward_hook(note)
    return read


@pytest.mark.parametrize(
    ("method", "layers"),
    [(METHODS["uniform"], 1), (METHODS["uniform"], 3), (METHODS["full"], 2), (KVZIP, 1), (KVZIP, 5)],
    ids=["first layer", "last layer", "full cache", "first of two passes", "second of two passes"],
)
def test_a_prompt_that_nobody_waits_for_is_read_no_further(method, layers):
    model = tiny_model(max_position_embeddings=1024)
    engine = Engine(model, method, rows=3)
    first, leaves, last = (Job(ids, max_new_tokens=6) for ids in prompts(60, 120, 90))
    engine.submit(first)
    engine.step()
    read = layers_read(model, lambda count: leaves.cancel() if count == layers else None)
    engine.submit(leaves)
    engine.step()
    assert (leaves.reason, len(read), leaves.tokens) == ("cancelled", layers, [])
    engine.submit(last)
    run(engine)
    assert [job.result(0) for job in (first, last)] == [
        alone(model, method, job.ids, max_new_tokens=6) for job in (first, last)
    ]


def test_an_engine_that_closes_reads_no_prompt_to_its_end():
    model = tiny_model()
    engine = Engine(model, METHODS["uniform"], rows=2)
    read = layers_read(model, lambda count: engine.close())
    with engine:
        engine.submit(job := Job(prompts(90)[0], max_new_tokens=6))
        assert job.done.wait(60)
    assert (job.reason, len(read)) == ("cancelled", 1)


def test_a_drained_engine_finishes_what_runs():
    model, method = tiny_model(), METHODS["uniform"]
    engine = Engine(model, method, rows=1)
    runs, waits = (Job(ids, max_new_tokens=6) for ids in prompts(60, 50))
    engine.submit(runs)
    engine.step()
    engine.submit(waits)
    engine.drain()
    assert waits.reason == "cancelled" and runs.reason is None
    for ask in (lambda: engine.submit(Job(prompts(40)[0])), engine.require_room):
        with pytest.raises(Closed):
            ask()
    run(engine)
    assert runs.result(0) == alone(model, method, runs.ids, max_new_tokens=6)


def test_requests_in_preparation_count_as_waiting():
    engine = Engine(tiny_model(), METHODS["uniform"], rows=1, waiting=2)
    engine.submit(Job(prompts(40)[0], max_new_tokens=2))
    engine.require_room()
    with pytest.raises(Busy):
        engine.require_room(preparing=1)


def test_prompts_without_room_for_the_tokens_of_the_method_are_too_long():
    model = tiny_model()
    engine = Engine(model, LAQ(40))
    with pytest.raises(TooLong, match="maximum context length is 256"):
        engine.submit(Job(prompts(250)[0], max_new_tokens=2))
    engine = Engine(model, KeyNorm(0.1, allocate=Pyramid()))
    with refused("budget", "range") as error:
        engine.submit(Job(prompts(100)[0], max_new_tokens=2))
    assert not isinstance(error.value, TooLong), "a longer one would do"


def test_requests_that_were_cancelled_while_waiting_make_room_for_others():
    engine = Engine(tiny_model(), METHODS["uniform"], rows=1, waiting=1)
    first, leaves, comes = (Job(ids, max_new_tokens=4) for ids in prompts(60, 50, 40))
    engine.submit(first)
    engine.step()
    engine.submit(leaves)
    with pytest.raises(Busy):
        engine.submit(comes)
    leaves.cancel()
    engine.submit(comes)
    assert leaves.reason == "cancelled" and engine.load == (1, 1)
    run(engine)
    assert {first.reason, comes.reason} <= {"stop", "length"}


@pytest.mark.parametrize("where", ["join", "joined_fields"])
def test_a_request_that_cannot_join_the_batch_fails_alone(where, monkeypatch):
    """Where the batch is copied, and where the layers have a place for it already."""
    model, method = tiny_model(), METHODS["uniform"]
    engine = Engine(model, method, rows=2)
    good, bad = (Job(ids, max_new_tokens=6) for ids in prompts(60, 70))
    engine.submit(good)
    engine.step()

    def fail(*_):
        raise MemoryError("no room")

    if where == "join":
        monkeypatch.setattr(batch_slots, "_all_admit", lambda *_: False)
    monkeypatch.setattr(batch_slots, where, fail)
    engine.submit(bad)
    run(engine)
    assert good.result(0) == alone(model, method, good.ids, max_new_tokens=6) and bad.reason == "failed"


def test_a_model_with_windows_alone_is_served():
    model = family_model("Mistral with a window")
    engine, (ids,) = Engine(model, METHODS["uniform"], rows=2), prompts(60)
    engine.submit(job := Job(ids, max_new_tokens=4))
    run(engine)
    assert job.result(0) == alone(model, METHODS["uniform"], ids, max_new_tokens=4) and job.kept == 0


def test_a_method_that_fails_on_this_model_ends_the_start():
    class ForAnother(SnapKV):
        def start(self, *given, **options):
            raise UserError("this module was trained for another model", field="adapter", code="model")

    with refused("adapter", "model"):
        Engine(tiny_model(), ForAnother(40, window=8), rows=2)


def test_what_fails_fails_alone(monkeypatch):
    model, method = tiny_model(), METHODS["uniform"]
    engine = Engine(model, method, rows=2)
    good, bad = (Job(ids, max_new_tokens=6) for ids in prompts(60, 70))
    start = SnapKV.start

    def fail(self, model, ids, *given, **options):
        if ids.shape[1] == 70:
            raise MemoryError("no room")
        return start(self, model, ids, *given, **options)

    monkeypatch.setattr(SnapKV, "start", fail)
    engine.submit(good)
    engine.submit(bad)
    run(engine)
    assert good.result(0) == alone(model, method, good.ids, max_new_tokens=6)
    with pytest.raises(MemoryError):
        bad.result(0)
    with refused("prompt", "range"):
        engine.submit(Job(torch.zeros(0, dtype=torch.long)))
    with refused("prompt", "range"):
        engine.submit(Job(prompts(200)[0], max_new_tokens=100))


def test_a_text_that_cannot_be_taken_fails_alone():
    class Torn(Job):
        def took(self, token: int) -> bool:
            raise ValueError("no such token")

        def ended(self) -> None:
            raise ValueError("no such text")

    model, method = tiny_model(), METHODS["uniform"]
    engine = Engine(model, method, rows=2)
    good, torn = (kind(ids, max_new_tokens=6) for kind, ids in zip((Job, Torn), prompts(60, 70), strict=True))
    engine.submit(good)
    engine.submit(torn)
    run(engine)
    assert good.result(0) == alone(model, method, good.ids, max_new_tokens=6) and torn.reason == "failed"


def test_requests_of_many_threads_and_a_full_queue():
    model, method = tiny_model(), METHODS["uniform"]
    engine, asked = Engine(model, method, rows=4, waiting=3), prompts(*range(20, 100, 5))
    for ids in asked[:3]:
        engine.submit(Job(ids, max_new_tokens=2))
    with pytest.raises(Busy):
        engine.submit(Job(asked[0], max_new_tokens=2))
    engine.waiting = 64
    jobs = [Job(ids, max_new_tokens=8) for ids in asked]
    with engine:
        threads = [threading.Thread(target=engine.submit, args=(job,)) for job in jobs]
        for each in threads:
            each.start()
        answers = [job.result(60) for job in jobs]
    assert answers == [alone(model, method, ids, max_new_tokens=8) for ids in asked]
    with pytest.raises(Closed, match="shutting down"):
        engine.submit(Job(asked[0]))


@pytest.mark.parametrize("method", [SpeCache(), SnapKV(40, window=8, every=4)], ids=["own form", "while decoding"])
def test_methods_that_cannot_join_are_refused(method):
    with refused("method", "model"):
        Engine(tiny_model(), method)


@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_running_answers_go_on_while_a_prompt_is_read_in_chunks(method, static):
    model = tiny_model()
    engine = Engine(model, method, rows=3, prefill_tokens=20, static=static)
    running, arriving = (Job(ids, max_new_tokens=24, ignore_end=True) for ids in prompts(33, 120))
    engine.submit(running)
    engine.step()
    engine.submit(arriving)
    tokens_before = len(running.tokens)
    engine.step()
    # Static steps lie between six chunks and after them; others are in five, before the last and after it.
    assert len(running.tokens) == tokens_before + (6 if static else 7)
    assert len(arriving.tokens) == 1
    run(engine)
    for job in (running, arriving):
        answer = alone(model, method, job.ids, max_new_tokens=24, eos_token_id=None)
        assert job.result(0) == answer[len(job.ids) :] or job.result(0) == answer
    assert engine.totals.prefill_seconds > 0 and engine.totals.decode_seconds > 0


def test_who_leaves_while_a_prompt_is_read_in_chunks_ends_alone():
    """The one whose prompt is read is no fault of the running one, nor the reverse."""
    model, method = tiny_model(), METHODS["ragged"]
    leaves_during: dict[str, Job] = {}

    class Leaving(Job):
        def took(self, token: int) -> bool:
            if len(self.tokens) == 3:
                leaves_during["job"].cancel()
            return False

    first, second, third = prompts(33, 120, 61)
    for leaver in ("arriving", "running"):
        engine = Engine(model, method, rows=3, prefill_tokens=20)
        running = Leaving(first, max_new_tokens=12, ignore_end=True)
        arriving, other = (Job(ids, max_new_tokens=12, ignore_end=True) for ids in (second, third))
        leaves_during["job"] = arriving if leaver == "arriving" else running
        engine.submit(running)
        engine.step()
        engine.submit(arriving)
        engine.submit(other)
        run(engine)
        reasons = {"running": running.reason, "arriving": arriving.reason, "other": other.reason}
        assert reasons.pop(leaver) == "cancelled" and set(reasons.values()) == {"length"}


def passes_of(model) -> list[int]:
    """The tokens of each forward pass from here on."""
    seen = list[int]()

    def note(module, arguments, options):
        seen.append(options["input_ids"].shape[1] if "input_ids" in options else options["inputs_embeds"].shape[1])

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


BESIDE = METHODS | {"summed attention": H2O(40), "statistics": ExpectedAttention(40)}


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "Llama 3") for method in BESIDE.values()),
        (METHODS["ragged"], "Qwen3"),
        (METHODS["uniform"], "Qwen3-MoE"),
        (METHODS["uniform"], "GLM-4"),
        (METHODS["ragged"], "SmolLM3"),
    ],
)
def test_a_chunk_and_the_tokens_of_all_answers_are_one_pass(method, family):
    """But for the last chunk, whose observers are read with it: one decoding step comes before it, and one after."""
    model = fresh_model(family)
    engine = Engine(model, method, rows=4, prefill_tokens=20)
    running = [Job(ids, max_new_tokens=20, ignore_end=True) for ids in prompts(33, 61, 47)]
    for job in running:
        engine.submit(job)
        engine.step()
    arriving = Job(prompts(118)[0], max_new_tokens=20, ignore_end=True)
    engine.submit(arriving)
    lengths = [len(job.tokens) for job in running]
    steps_before = engine.totals.decode_steps
    passes = passes_of(model)
    engine.step()
    assert passes[:5] == [23] * 5, "20 tokens of the prompt and one of each answer"
    assert [len(job.tokens) for job in running] == [length + 7 for length in lengths]
    assert engine.totals.decode_steps == steps_before + 7
    run(engine)
    for job in (*running, arriving):
        assert job.result(0) == alone(model, method, job.ids, max_new_tokens=20, eos_token_id=None)


def test_answers_that_end_leave_while_a_prompt_is_read():
    model, method = tiny_model(), METHODS["ragged"]
    engine = Engine(model, method, rows=4, prefill_tokens=20)
    first, second, arriving = prompts(33, 61, 160)
    jobs = [Job(first, max_new_tokens=9, ignore_end=True), Job(second, max_new_tokens=5, ignore_end=True)]
    for job in jobs:
        engine.submit(job)
        engine.step()
    assert [len(job.tokens) for job in jobs] == [6, 1]
    jobs.append(Job(arriving, max_new_tokens=6, ignore_end=True))
    engine.submit(jobs[-1])
    passes = passes_of(model)
    engine.step()
    assert passes[:8] == [22, 22, 21, 20, 20, 20, 20, 20]
    run(engine)
    for job in jobs:
        answer = alone(model, method, job.ids, max_new_tokens=job.options["max_new_tokens"], eos_token_id=None)
        assert job.result(0) == answer


def test_a_short_prompt_does_not_wait_for_a_long_one():
    model, method = tiny_model(), METHODS["uniform"]
    engine = Engine(model, method, rows=3, prefill_tokens=20)
    running, long, short = (Job(ids, max_new_tokens=12, ignore_end=True) for ids in prompts(33, 200, 18))
    engine.submit(running)
    engine.step()
    engine.submit(long)
    engine.submit(short)
    engine.step()
    assert len(long.tokens) == 1 and len(short.tokens) > 6
    run(engine)
    for job in (running, long, short):
        assert job.result(0) == alone(model, method, job.ids, max_new_tokens=12, eos_token_id=None)
    assert engine.load == (0, 0)


def test_a_short_prompt_is_read_in_chunks_too(monkeypatch):
    """So that it makes no answer wait longer than a long one does."""
    model, method = tiny_model(), METHODS["ragged"]
    monkeypatch.setattr("keepsight.serving.pace.CHUNK", 16)
    engine = Engine(model, method, rows=4)
    engine.pace.stepped(1.0)
    engine.pace.passed(1, 3 / 16)
    monkeypatch.setattr(engine.pace, "passed", lambda *_: None)
    monkeypatch.setattr(engine.pace, "stepped", lambda *_: None)
    jobs = [Job(ids, max_new_tokens=30, ignore_end=True) for ids in prompts(33, 200, 61)]
    engine.submit(jobs[0])
    engine.step()
    engine.submit(jobs[1])
    engine.submit(jobs[2])
    passes = passes_of(model)
    engine.step()
    tokens = 64 + 1  # the fewest of a chunk, with that of the running answer
    assert max(passes) <= tokens + 1 and len(jobs[2].tokens) > 1
    run(engine)
    for job in jobs:
        assert job.result(0) == alone(model, method, job.ids, max_new_tokens=30, eos_token_id=None)


def test_what_fails_in_a_pass_of_both_fails_both():
    """Some layers' caches have grown, others have not."""
    model, method = tiny_model(), METHODS["uniform"]
    engine = Engine(model, method, rows=3, prefill_tokens=20)
    running, arriving, later = (Job(ids, max_new_tokens=12, ignore_end=True) for ids in prompts(33, 120, 47))
    engine.submit(running)
    engine.step()

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    hook = model.model.layers[-1].register_forward_hook(fail)
    engine.submit(arriving)
    engine.step()
    hook.remove()
    assert (running.reason, arriving.reason) == ("failed", "failed")
    engine.submit(later)
    run(engine)
    assert later.result(0) == alone(model, method, later.ids, max_new_tokens=12, eos_token_id=None)


@pytest.mark.parametrize(
    "method", [SnapKV(40, window=8), AdaKV(40, window=8), FullCache()], ids=["dense", "ragged", "full"]
)
def test_rows_take_the_slots_of_those_that_left(method, monkeypatch):
    """A batch is copied when its room is used up, not when a row joins or leaves."""
    monkeypatch.setattr(join, "CALL", 0)  # ragged ones stay so
    model = tiny_model()
    engine = Engine(model, method, rows=4, prefill_tokens=0)
    jobs = [
        Job(ids, max_new_tokens=3 + 4 * (place % 3), ignore_end=True) for place, ids in enumerate(prompts(*[60] * 24))
    ]
    for job in jobs:
        engine.submit(job)
    run(engine)
    for job in jobs:
        options: dict[str, Any] = {"max_new_tokens": job.options["max_new_tokens"], "eos_token_id": None}
        assert job.result(0) == alone(model, method, job.ids, **options)
    copied = engine._slots.copied
    assert copied.joined == 24
    assert copied.regrown <= 1 + 2 + 4, "the room doubles up to four rows, and was grown once more for tokens"
    assert copied.moved <= 24


@pytest.mark.parametrize("name", ["uniform", "ragged"])
def test_memory_of_a_batch_stays_where_it_is(name, monkeypatch):
    monkeypatch.setattr(join, "CALL", 0)
    engine = Engine(tiny_model(), METHODS[name], rows=4, prefill_tokens=0)
    jobs = [
        Job(ids, max_new_tokens=tokens, ignore_end=True)
        for ids, tokens in zip(prompts(*[60] * 5), (40, 30, 4, 30, 30), strict=True)
    ]
    for job in jobs[:3]:
        engine.submit(job)
        engine.step()
    assert engine.state is not None
    addresses = [layer.keys.untyped_storage().data_ptr() for layer in engine.state.layers]
    for job in jobs[3:]:
        engine.submit(job)
        for _ in range(4):
            engine.step()
    assert jobs[2].reason == "length" and all(job.tokens for job in jobs)
    assert [layer.keys.untyped_storage().data_ptr() for layer in engine.state.layers] == addresses
