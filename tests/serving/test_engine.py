"""The engine's answers are those of `generate` alone, whoever else is in the batch, comes, or leaves."""

import threading
from collections.abc import Iterable
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


def alone(model, method, ids, seed=None, **options) -> list[int]:
    """The answer of `generate` to a prompt that shares its batch with no other."""
    if seed is not None:
        torch.manual_seed(seed)
    return generate(model, ids[None], method, **options)[0].tolist()


def jobs_of(*lengths: int, **options: Any) -> list[Job]:
    """A request for a prompt of each length, all with the same options."""
    return [Job(ids, **options) for ids in prompts(*lengths)]


def mixed_jobs() -> list[Job]:
    """Requests for prompts of `LENGTHS`, whose answers have 4, 9 and 14 tokens in turn."""
    return [Job(ids, max_new_tokens=4 + 5 * (index % 3)) for index, ids in enumerate(prompts(*LENGTHS))]


def assert_answered_as_alone(model, method, *jobs: Job) -> None:
    """Fail unless each request has the answer that `generate` gives to it alone."""
    for job in jobs:
        options = dict(job.options)
        if job.ignore_end:
            options["eos_token_id"] = None
        assert job.result(0) == alone(model, method, job.ids, job.seed, **options)


def submit_all(engine: Engine, jobs: Iterable[Job]) -> None:
    for job in jobs:
        engine.submit(job)


def run(engine: Engine) -> None:
    while engine.step():
        pass


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_answers_are_those_of_generate_alone(method):
    """Fewer rows than requests, so that rows come and go in the middle of others' answers."""
    model = tiny_model()
    engine = Engine(model, method, rows=3)
    jobs = mixed_jobs()
    submit_all(engine, jobs)
    run(engine)
    assert_answered_as_alone(model, method, *jobs)
    assert {job.reason for job in jobs} <= {"stop", "length"}
    assert engine.load == (0, 0)
    assert engine.kv_bytes == 0
    budget = getattr(method, "budget", 1 << 20)
    entries = [min(length, budget) for length in LENGTHS]
    assert [job.kept for job in jobs] == pytest.approx(entries, abs=8)


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
    jobs = [*mixed_jobs(), *jobs_of(55, seed=3, do_sample=True, temperature=0.8, max_new_tokens=9)]
    submit_all(engine, jobs)
    run(engine)
    assert_answered_as_alone(model, method, *jobs)
    assert {step.capacity.rows for step in loaded} == {1, 2, 4}
    assert engine.kv_bytes == 0


def test_a_server_captures_a_graph_for_each_size_not_for_each_batch(monkeypatch):
    """What it would capture on a GPU; here the steps run one operator after another."""
    captured: list[StaticStep] = []
    monkeypatch.setattr(StaticStep, "capture", lambda step, model, state: captured.append(step))
    monkeypatch.setattr(static_step, "_memory", lambda device: (2**30, 2**30))
    monkeypatch.setattr(static_step, "_graphs_are_on", lambda state: True)
    monkeypatch.setattr(static_step, "reason_against_graph", lambda model, state: None)
    model = tiny_model()
    method = METHODS["ragged"]
    engine = Engine(model, method, rows=3)
    for _ in range(2):
        jobs = mixed_jobs()
        submit_all(engine, jobs)
        run(engine)
        assert_answered_as_alone(model, method, *jobs)
    sizes = [step.capacity for step in captured if step.choice is None]
    assert len(sizes) == len(set(sizes))
    assert {size.rows for size in sizes} == {1, 2, 4}


@pytest.mark.parametrize("method", [SnapKV(24, window=8), AdaKV(24, window=8)], ids=["dense", "ragged"])
@pytest.mark.parametrize("family", ["Gemma 2", "GPT-OSS", "Qwen2.5-VL (text)", "DeepSeek-V3"])
def test_layers_of_every_kind_join_and_leave(family, method, monkeypatch):
    """Sliding windows whose padding goes when a longer row leaves, sinks, several positions a token, latents."""
    monkeypatch.setattr(join, "CALL", 0)  # ragged ones stay so
    model = family_model(family)
    engine = Engine(model, method, rows=2)
    jobs = [Job(ids, max_new_tokens=3 + 9 * (index % 2)) for index, ids in enumerate(prompts(70, 20, 45, 90))]
    submit_all(engine, jobs)
    run(engine)
    assert_answered_as_alone(model, method, *jobs)


def test_sampling_is_that_of_a_seed_and_of_the_options():
    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=4)
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0, "max_new_tokens": 12}
    penalized: dict[str, Any] = {"repetition_penalty": 1.5, "do_sample": False, "max_new_tokens": 12}
    jobs = [Job(ids, seed=seed, **sampled) for seed, ids in enumerate(prompts(50, 70))]
    jobs += jobs_of(60, 80, **penalized)
    submit_all(engine, jobs)
    run(engine)
    assert_answered_as_alone(model, method, *jobs)


def test_an_answer_ends_with_the_end_token_and_where_the_request_says_so():
    model = tiny_model()
    method = METHODS["uniform"]
    (ids,) = prompts(90)
    unended = alone(model, method, ids, max_new_tokens=12)
    end = unended[4]
    model.generation_config.eos_token_id = [end, 2]

    class StopsAtThree(Job):
        def took(self, token: int) -> bool:
            return len(self.tokens) == 3

    engine = Engine(model, method)
    at_end_token = Job(ids, max_new_tokens=12)
    at_three = StopsAtThree(ids, max_new_tokens=12)
    submit_all(engine, (at_end_token, at_three))
    run(engine)
    assert at_end_token.result(0) == unended[: unended.index(end) + 1]
    assert at_end_token.reason == "stop"
    assert at_three.result(0) == unended[:3]
    assert at_three.reason == "stop"


def test_cancelled_requests_leave_and_disturb_nobody():
    model = tiny_model()
    method = METHODS["ragged"]
    engine = Engine(model, method, rows=2)
    stays, leaves, never_starts = jobs_of(60, 120, 40, max_new_tokens=10)
    submit_all(engine, (stays, leaves, never_starts))
    never_starts.cancel()
    engine.step()
    engine.step()
    assert engine.kv_bytes
    leaves.cancel()
    run(engine)
    assert_answered_as_alone(model, method, stays)
    assert leaves.reason == "cancelled"
    assert never_starts.reason == "cancelled"
    assert len(leaves.tokens) < 10
    assert engine.totals.ended == {"stop": 0, "length": 1, "cancelled": 2, "failed": 0}


def layers_read(model, act) -> list[int]:
    """Indices of the decoder layers that read a prompt; `act` is called with how many have, after each."""
    indices = list[int]()

    def note(module, inputs, output):
        if inputs[0].shape[1] > 1:
            indices.append(module.self_attn.layer_idx)
            act(len(indices))

    for layer in model.model.layers:
        layer.register_forward_hook(note)
    return indices


@pytest.mark.parametrize(
    ("method", "layers"),
    [(METHODS["uniform"], 1), (METHODS["uniform"], 3), (METHODS["full"], 2), (KVZIP, 1), (KVZIP, 5)],
    ids=["first layer", "last layer", "full cache", "first of two passes", "second of two passes"],
)
def test_a_prompt_that_nobody_waits_for_is_read_no_further(method, layers):
    model = tiny_model(max_position_embeddings=1024)
    engine = Engine(model, method, rows=3)
    before, leaves, after = jobs_of(60, 120, 90, max_new_tokens=6)
    engine.submit(before)
    engine.step()
    read = layers_read(model, lambda count: leaves.cancel() if count == layers else None)
    engine.submit(leaves)
    engine.step()
    assert leaves.reason == "cancelled"
    assert len(read) == layers
    assert leaves.tokens == []
    engine.submit(after)
    run(engine)
    assert_answered_as_alone(model, method, before, after)


def test_an_engine_that_closes_reads_no_prompt_to_its_end():
    model = tiny_model()
    engine = Engine(model, METHODS["uniform"], rows=2)
    read = layers_read(model, lambda count: engine.close())
    (job,) = jobs_of(90, max_new_tokens=6)
    with engine:
        engine.submit(job)
        assert job.done.wait(60)
    assert job.reason == "cancelled"
    assert len(read) == 1


def test_a_drained_engine_finishes_what_runs():
    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=1)
    running, waiting = jobs_of(60, 50, max_new_tokens=6)
    engine.submit(running)
    engine.step()
    engine.submit(waiting)
    engine.drain()
    assert waiting.reason == "cancelled"
    assert running.reason is None
    with pytest.raises(Closed):
        engine.submit(Job(prompts(40)[0]))
    with pytest.raises(Closed):
        engine.require_room()
    run(engine)
    assert_answered_as_alone(model, method, running)


def test_requests_in_preparation_count_as_waiting():
    engine = Engine(tiny_model(), METHODS["uniform"], rows=1, waiting=2)
    submit_all(engine, jobs_of(40, max_new_tokens=2))
    engine.require_room()
    with pytest.raises(Busy):
        engine.require_room(preparing=1)


def test_prompts_without_room_for_the_tokens_of_the_method_are_too_long():
    model = tiny_model()
    engine = Engine(model, LAQ(40))
    (long,) = jobs_of(250, max_new_tokens=2)
    with pytest.raises(TooLong, match="maximum context length is 256"):
        engine.submit(long)
    engine = Engine(model, KeyNorm(0.1, allocate=Pyramid()))
    (short,) = jobs_of(100, max_new_tokens=2)
    with refused("budget", "range") as error:
        engine.submit(short)
    assert not isinstance(error.value, TooLong), "a longer one would do"


def test_requests_that_were_cancelled_while_waiting_make_room_for_others():
    engine = Engine(tiny_model(), METHODS["uniform"], rows=1, waiting=1)
    running, leaves, comes = jobs_of(60, 50, 40, max_new_tokens=4)
    engine.submit(running)
    engine.step()
    engine.submit(leaves)
    with pytest.raises(Busy):
        engine.submit(comes)
    leaves.cancel()
    engine.submit(comes)
    assert leaves.reason == "cancelled"
    assert engine.load == (1, 1)
    run(engine)
    assert {running.reason, comes.reason} <= {"stop", "length"}


@pytest.mark.parametrize("function", ["join", "joined_fields"])
def test_a_request_that_cannot_join_the_batch_fails_alone(function, monkeypatch):
    """Where the batch is copied, and where the layers have a slot for it already."""
    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=2)
    good, bad = jobs_of(60, 70, max_new_tokens=6)
    engine.submit(good)
    engine.step()

    def fail(*_):
        raise MemoryError("no room")

    if function == "join":
        monkeypatch.setattr(batch_slots, "_all_admit", lambda *_: False)
    monkeypatch.setattr(batch_slots, function, fail)
    engine.submit(bad)
    run(engine)
    assert_answered_as_alone(model, method, good)
    assert bad.reason == "failed"


def test_a_model_with_windows_alone_is_served():
    model = family_model("Mistral with a window")
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=2)
    (job,) = jobs_of(60, max_new_tokens=4)
    engine.submit(job)
    run(engine)
    assert_answered_as_alone(model, method, job)
    assert job.kept == 0


def test_a_method_that_fails_on_this_model_ends_the_start():
    class ForAnotherModel(SnapKV):
        def start(self, *args, **options):
            raise UserError("this module was trained for another model", field="adapter", code="model")

    with refused("adapter", "model"):
        Engine(tiny_model(), ForAnotherModel(40, window=8), rows=2)


def test_what_fails_fails_alone(monkeypatch):
    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=2)
    good, bad = jobs_of(60, 70, max_new_tokens=6)
    start = SnapKV.start

    def fail_on_the_bad_prompt(self, model, ids, *args, **options):
        if ids.shape[1] == 70:
            raise MemoryError("no room")
        return start(self, model, ids, *args, **options)

    monkeypatch.setattr(SnapKV, "start", fail_on_the_bad_prompt)
    submit_all(engine, (good, bad))
    run(engine)
    assert_answered_as_alone(model, method, good)
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

    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=2)
    good_ids, torn_ids = prompts(60, 70)
    good = Job(good_ids, max_new_tokens=6)
    torn = Torn(torn_ids, max_new_tokens=6)
    submit_all(engine, (good, torn))
    run(engine)
    assert_answered_as_alone(model, method, good)
    assert torn.reason == "failed"


def test_requests_of_many_threads_and_a_full_queue():
    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=4, waiting=3)
    lengths = range(20, 100, 5)
    submit_all(engine, jobs_of(*lengths[:3], max_new_tokens=2))
    with pytest.raises(Busy):
        engine.submit(Job(prompts(20)[0], max_new_tokens=2))
    engine.waiting = 64
    jobs = jobs_of(*lengths, max_new_tokens=8)
    with engine:
        for job in jobs:
            threading.Thread(target=engine.submit, args=(job,)).start()
        for job in jobs:
            job.result(60)
    assert_answered_as_alone(model, method, *jobs)
    with pytest.raises(Closed, match="shutting down"):
        engine.submit(Job(prompts(20)[0]))


@pytest.mark.parametrize("method", [SpeCache(), SnapKV(40, window=8, every=4)], ids=["own form", "while decoding"])
def test_methods_that_cannot_join_are_refused(method):
    with refused("method", "model"):
        Engine(tiny_model(), method)


@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_running_answers_go_on_while_a_prompt_is_read_in_chunks(method, static):
    model = tiny_model()
    engine = Engine(model, method, rows=3, prefill_tokens=20, static=static)
    running, arriving = jobs_of(33, 120, max_new_tokens=24, ignore_end=True)
    engine.submit(running)
    engine.step()
    engine.submit(arriving)
    tokens_before = len(running.tokens)
    engine.step()
    # Static steps lie between six chunks and after them; others are in five, before the last and after it.
    steps = 6 if static else 7
    assert len(running.tokens) == tokens_before + steps
    assert len(arriving.tokens) == 1
    run(engine)
    assert_answered_as_alone(model, method, running, arriving)
    assert engine.totals.prefill_seconds > 0
    assert engine.totals.decode_seconds > 0


def reasons_where_one_leaves(leaver: str) -> dict[str, str | None]:
    """How each request ends where one of them is cancelled while a prompt is read."""
    jobs: dict[str, Job] = {}

    class CancelsTheLeaver(Job):
        def took(self, token: int) -> bool:
            if len(self.tokens) == 3:
                jobs[leaver].cancel()
            return False

    first, second, third = prompts(33, 120, 61)
    jobs["running"] = CancelsTheLeaver(first, max_new_tokens=12, ignore_end=True)
    jobs["arriving"] = Job(second, max_new_tokens=12, ignore_end=True)
    jobs["waiting"] = Job(third, max_new_tokens=12, ignore_end=True)
    engine = Engine(tiny_model(), METHODS["ragged"], rows=3, prefill_tokens=20)
    engine.submit(jobs["running"])
    engine.step()
    submit_all(engine, (jobs["arriving"], jobs["waiting"]))
    run(engine)
    return {name: job.reason for name, job in jobs.items()}


def test_who_leaves_while_a_prompt_is_read_in_chunks_ends_alone():
    """The one whose prompt is read is no fault of the running one, nor the reverse."""
    reasons = reasons_where_one_leaves("arriving")
    assert reasons == {"running": "length", "arriving": "cancelled", "waiting": "length"}
    reasons = reasons_where_one_leaves("running")
    assert reasons == {"running": "cancelled", "arriving": "length", "waiting": "length"}


def passes_of(model) -> list[int]:
    """The tokens of each forward pass from here on."""
    lengths = list[int]()

    def note(module, arguments, options):
        tokens = options["input_ids"] if "input_ids" in options else options["inputs_embeds"]
        lengths.append(tokens.shape[1])

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return lengths


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
    running = jobs_of(33, 61, 47, max_new_tokens=20, ignore_end=True)
    for job in running:
        engine.submit(job)
        engine.step()
    (arriving,) = jobs_of(118, max_new_tokens=20, ignore_end=True)
    engine.submit(arriving)
    lengths_before = [len(job.tokens) for job in running]
    steps_before = engine.totals.decode_steps
    passes = passes_of(model)
    engine.step()
    assert passes[:5] == [23] * 5, "20 tokens of the prompt and one of each answer"
    assert [len(job.tokens) for job in running] == [length + 7 for length in lengths_before]
    assert engine.totals.decode_steps == steps_before + 7
    run(engine)
    assert_answered_as_alone(model, method, *running, arriving)


def test_answers_that_end_leave_while_a_prompt_is_read():
    model = tiny_model()
    method = METHODS["ragged"]
    engine = Engine(model, method, rows=4, prefill_tokens=20)
    first, second, third = prompts(33, 61, 160)
    longer = Job(first, max_new_tokens=9, ignore_end=True)
    shorter = Job(second, max_new_tokens=5, ignore_end=True)
    for job in (longer, shorter):
        engine.submit(job)
        engine.step()
    assert len(longer.tokens) == 6
    assert len(shorter.tokens) == 1
    arriving = Job(third, max_new_tokens=6, ignore_end=True)
    engine.submit(arriving)
    passes = passes_of(model)
    engine.step()
    assert passes[:8] == [22, 22, 21, 20, 20, 20, 20, 20]
    run(engine)
    assert_answered_as_alone(model, method, longer, shorter, arriving)


def test_a_short_prompt_does_not_wait_for_a_long_one():
    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=3, prefill_tokens=20)
    running, long, short = jobs_of(33, 200, 18, max_new_tokens=12, ignore_end=True)
    engine.submit(running)
    engine.step()
    submit_all(engine, (long, short))
    engine.step()
    assert len(long.tokens) == 1
    assert len(short.tokens) > 6
    run(engine)
    assert_answered_as_alone(model, method, running, long, short)
    assert engine.load == (0, 0)


def test_a_short_prompt_is_read_in_chunks_too(monkeypatch):
    """So that it makes no answer wait longer than a long one does."""
    model = tiny_model()
    method = METHODS["ragged"]
    monkeypatch.setattr("keepsight.serving.pace.CHUNK", 16)
    engine = Engine(model, method, rows=4)
    engine.pace.stepped(1.0)
    engine.pace.passed(1, 3 / 16)
    monkeypatch.setattr(engine.pace, "passed", lambda *_: None)
    monkeypatch.setattr(engine.pace, "stepped", lambda *_: None)
    running, long, short = jobs_of(33, 200, 61, max_new_tokens=30, ignore_end=True)
    engine.submit(running)
    engine.step()
    submit_all(engine, (long, short))
    passes = passes_of(model)
    engine.step()
    least_tokens = 64 + 1  # the fewest of a chunk, with that of the running answer
    assert max(passes) <= least_tokens + 1
    assert len(short.tokens) > 1
    run(engine)
    assert_answered_as_alone(model, method, running, long, short)


def test_what_fails_in_a_pass_of_both_fails_both():
    """Some layers' caches have grown, others have not."""
    model = tiny_model()
    method = METHODS["uniform"]
    engine = Engine(model, method, rows=3, prefill_tokens=20)
    running, arriving, later = jobs_of(33, 120, 47, max_new_tokens=12, ignore_end=True)
    engine.submit(running)
    engine.step()

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    hook = model.model.layers[-1].register_forward_hook(fail)
    engine.submit(arriving)
    engine.step()
    hook.remove()
    assert running.reason == "failed"
    assert arriving.reason == "failed"
    engine.submit(later)
    run(engine)
    assert_answered_as_alone(model, method, later)


@pytest.mark.parametrize(
    "method", [SnapKV(40, window=8), AdaKV(40, window=8), FullCache()], ids=["dense", "ragged", "full"]
)
def test_rows_take_the_slots_of_those_that_left(method, monkeypatch):
    """A batch is copied when its room is used up, not when a row joins or leaves."""
    monkeypatch.setattr(join, "CALL", 0)  # ragged ones stay so
    model = tiny_model()
    engine = Engine(model, method, rows=4, prefill_tokens=0)
    jobs = []
    for index, ids in enumerate(prompts(*[60] * 24)):
        jobs.append(Job(ids, max_new_tokens=3 + 4 * (index % 3), ignore_end=True))
    submit_all(engine, jobs)
    run(engine)
    assert_answered_as_alone(model, method, *jobs)
    copied = engine._slots.copied
    assert copied.joined == 24
    assert copied.regrown <= 1 + 2 + 4, "the room doubles up to four rows, and was grown once more for tokens"
    assert copied.moved <= 24


@pytest.mark.parametrize("name", ["uniform", "ragged"])
def test_memory_of_a_batch_stays_where_it_is(name, monkeypatch):
    monkeypatch.setattr(join, "CALL", 0)
    engine = Engine(tiny_model(), METHODS[name], rows=4, prefill_tokens=0)
    answer_lengths = (40, 30, 4, 30, 30)
    jobs = []
    for ids, tokens in zip(prompts(*[60] * 5), answer_lengths, strict=True):
        jobs.append(Job(ids, max_new_tokens=tokens, ignore_end=True))

    def addresses() -> list[int]:
        assert engine.state is not None
        return [layer.keys.untyped_storage().data_ptr() for layer in engine.state.layers]

    for job in jobs[:3]:
        engine.submit(job)
        engine.step()
    addresses_before = addresses()
    for job in jobs[3:]:
        engine.submit(job)
        for _ in range(4):
            engine.step()
    assert jobs[2].reason == "length", "its slot is free"
    assert all(job.tokens for job in jobs)
    assert addresses() == addresses_before
