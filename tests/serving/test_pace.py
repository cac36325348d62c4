"""Parts of a prompt are as long as streams can wait for, by the times of the latest passes."""

from typing import Any

import pytest

from keepsight.serving import engine as engine_module
from keepsight.serving.engine import Engine, Job
from keepsight.serving.pace import CHUNK, Pace
from tests.serving.test_engine import METHODS, assert_answered_as_alone, jobs_of, passes_of, prompts, run
from tests.tiny import tiny_model


def measured(step: float, token: float, fixed: float = 0.0, rounds: int = 20) -> Pace:
    """A pace on a machine with these seconds of a step, of a token of a prompt, and of a pass beside its tokens."""
    pace = Pace(None)
    for _ in range(rounds):
        pace.stepped(step)
        tokens = pace.tokens(others_wait=False)
        pace.passed(tokens, fixed + token * tokens)
    return pace


@pytest.mark.parametrize(
    ("step", "token", "fixed"),
    [(0.09, 0.003, 0.0), (0.09, 0.003, 0.06), (0.02, 0.00005, 0.004), (0.4, 0.005, 0.1)],
    ids=["two cores", "with overhead", "a GPU", "a larger model"],
)
def test_a_part_takes_three_steps(step: float, token: float, fixed: float) -> None:
    tokens = measured(step, token, fixed).tokens(others_wait=False)
    assert fixed + token * tokens == pytest.approx(3 * step, rel=0.2)
    assert tokens % 16 == 0


def test_a_part_is_larger_where_others_wait() -> None:
    """They would wait longer, as weights are read for each part."""
    slow = measured(0.09, 0.003)
    assert 64 <= slow.tokens(others_wait=False) < CHUNK == slow.tokens(others_wait=True)
    usual = measured(0.09, 0.001)
    assert usual.tokens(others_wait=True) == pytest.approx(6 * 0.09 / 0.001, abs=16)
    fast = measured(0.02, 0.00005)
    assert fast.tokens(others_wait=True) == pytest.approx(2 * fast.tokens(others_wait=False), abs=16)
    assert fast.tokens(others_wait=False) > CHUNK


def test_bounds_and_fixed_sizes() -> None:
    assert Pace(None).tokens(others_wait=False) == CHUNK, "before anything was measured"
    assert measured(0.001, 0.01).tokens(others_wait=False) == 64
    assert measured(9.0, 0.00001).tokens(others_wait=False) == 4096
    fixed = Pace(20)
    fixed.stepped(1.0)
    fixed.passed(20, 0.001)
    assert fixed.tokens(others_wait=True) == 20


def test_one_slow_pass_changes_little() -> None:
    pace = measured(0.09, 0.003)
    usual = pace.tokens(others_wait=False)
    pace.passed(usual, 30.0)
    pace.stepped(30.0)
    assert pace.tokens(others_wait=False) == usual


class Clock:
    """Stands for the time: each forward pass takes as long as its tokens and a fixed part say."""

    def __init__(self, token: float, fixed: float) -> None:
        self.now = 0.0
        self.token = token
        self.fixed = fixed

    def perf_counter(self) -> float:
        return self.now

    def watch(self, model: Any) -> None:
        def take_time(module: Any, arguments: Any, options: Any) -> None:
            inputs = options.get("input_ids")
            if inputs is None:
                inputs = options["inputs_embeds"]
            self.now += self.fixed + self.token * inputs.shape[1]

        model.base_model.register_forward_pre_hook(take_time, with_kwargs=True)


@pytest.mark.parametrize("name", ["uniform", "ragged"])
@pytest.mark.parametrize("static", [False, True])
def test_no_token_comes_four_steps_after_the_one_before(
    name: str, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once passes have been measured; a clock counts tokens of passes in the place of seconds."""
    model = tiny_model()
    clock = Clock(token=1.0, fixed=45.0)
    monkeypatch.setattr(engine_module, "time", clock)
    engine = Engine(model, METHODS[name], rows=4, static=static)
    clock.watch(model)
    gaps = list[float]()

    class Streaming(Job):
        time_of_token = 0.0

        def took(self, token: int) -> bool:
            if len(self.tokens) > 1:
                gaps.append(clock.now - self.time_of_token)
            self.time_of_token = clock.now
            return False

    running = Streaming(prompts(33)[0], max_new_tokens=90, ignore_end=True)
    engine.submit(running)
    for _ in range(12):
        engine.step()
    first, *later = jobs_of(150, 240, 230, max_new_tokens=3, ignore_end=True)
    engine.submit(first)
    engine.step()
    gaps.clear()
    passes = passes_of(model)
    for job in later:
        engine.submit(job)
        while not job.tokens:
            engine.step()
    run(engine)
    step = clock.fixed + clock.token
    assert max(gaps) <= 4.2 * step, "a part and, in static steps, one of the answers"
    assert 64 < max(passes) < 100
    assert_answered_as_alone(model, METHODS[name], running, first, *later)
