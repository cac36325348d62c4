"""Pasts that several calls share: whatever is done with them, a right call answers as it does on a fresh one."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.models.draft_sources import LayerSubset
from keepsight.models.targets import load_target
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.generate import Past, generate
from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.saved import load_state, save_state
from tests.families import family_model
from tests.faults.texts import Verdict, accepted, judged
from tests.faults.world import World
from tests.tiny import prompt_ids

METHODS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    **{name: ({"window": 8}, (20, 40)) for name in ("snapkv", "adakv", "pyramidkv", "h2o", "criticalkv")},
    **{name: ({}, (20, 40)) for name in ("tova", "streamingllm", "lacache", "key_norm", "keydiff", "dapq")},
    **{name: ({}, (20, 40)) for name in ("expected_attention", "truncation", "random", "simlayerkv")},
    "chunkkv": ({"window": 8, "chunk": 5}, (20, 40)),
    "compactor": ({"observer": {"block": 9}}, (20, 40)),
    "finch": ({"window": 8, "chunk": 11, "rerotate": False}, (20, 40)),
    "think": ({"window": 8}, (None,)),
    "snapkv, again": ({"name": "snapkv", "window": 8, "every": 3}, (20, 40)),
    "laq": ({}, (40,)),
    "kivi": ({"bits": 2, "group": 8, "residual": 8}, (None,)),
    "quest": ({}, (32, 48)),
    "full": ({}, (None,)),
}
"""Options and budgets by method."""
FAMILIES = ("Llama 3", "Qwen3", "Gemma 3 (text)", "Mistral with a window")
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


@cache
def method_of(name: str, budget: int | None) -> Any:
    """A method as `METHODS` has it; its options may name another method than its key."""
    options, _ = METHODS[name]
    without_name = {key: value for key, value in options.items() if key != "name"}
    return make_method(options.get("name", name), budget, **without_name)


class Cases:
    """Models, and methods that run on them, by name."""

    def __init__(self, world: World) -> None:
        self.models: dict[str, Any] = {family: family_model(family) for family in FAMILIES}
        self.models["tiny"] = load_target(str(world.folder / "tiny"), device="cpu").model
        self._trained = Resources(world.folder / "adapter", LayerSubset((0, 2)), retrieval=world.folder / "retrieval")
        self._methods: dict[tuple[str, int | None], Any] = {}

    def draw(self, rng: Random) -> tuple[str, str, int | None]:
        """The names of a model and a method, and a budget."""
        model = rng.choice(list(self.models))
        names: list[str] = list(METHODS)
        if model == "tiny":
            names += ["lookaheadkv"] * 4
        name = rng.choice(names)
        if name not in METHODS:
            return model, name, rng.choice((20, 40))
        return model, name, rng.choice(METHODS[name][1])

    def method(self, name: str, budget: int | None) -> Any:
        """The method of a name and budget."""
        if name in METHODS:
            return method_of(name, budget)
        key = name, budget
        if key not in self._methods:
            self._methods[key] = make_method(name, budget, self._trained)
        return self._methods[key]


def pasts(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """One to six operations on a past, of which the right ones are compared with those on a fresh past."""
    cases = Cases(world)
    folder = world.folder.with_name("pasts")
    for _ in range(count):
        seed = rng.random()
        case = cases.draw(rng)
        yield judged((case, seed), partial(_trial, cases, case, Random(seed), folder))


def _trial(cases: Cases, case: tuple[str, str, int | None], rng: Random, folder: Path) -> str:
    model_name, method_name, budget = case
    model = cases.models[model_name]
    method = cases.method(method_name, budget)
    prompt, _ = prompt_ids(rng.choice((45, 60)), seed=rng.randrange(9))
    trial = _Trial(model, method, prompt, folder)
    for _ in range(rng.randint(1, 6)):
        operation = rng.choice(_OPERATIONS)
        operation(trial, rng)
        accepted(lambda: trial.ask(rng))
    return "right"


class _Trial:
    """A past, and the turns that led to it, from which a fresh one is computed."""

    def __init__(self, model: Any, method: Any, prompt: Tensor, folder: Path) -> None:
        self.model = model
        self.method = method
        self.prompt = prompt
        self.folder = folder
        self.turns: list[Tensor] = []
        self.past = self.fresh()

    def fresh(self) -> Past:
        """A past that nothing else uses."""
        past = self.method.compress(self.model, input_ids=self.prompt)
        for ids in self.turns:
            past = self.answer(ids, past, return_dict_in_generate=True).past_key_values
        return past

    def answer(self, ids: Tensor, past: Past, **options: Any) -> Any:
        return self.model.generate(ids, custom_generate=self.method, past_key_values=past, **GREEDY, **options)

    def longer(self, rng: Random) -> Tensor:
        """The ids that the past has read, and a further turn."""
        return torch.cat([self.past.ids, prompt_ids(rng.randint(1, 9), seed=rng.randrange(99))[0]], dim=1)

    def ask(self, rng: Random) -> None:
        """A right call, against the same on a fresh past."""
        ids = self.longer(rng)
        answer = self.answer(ids, self.past)
        expected = self.answer(ids, self.fresh())
        assert torch.equal(answer, expected), f"answered {answer[0].tolist()} and not {expected[0].tolist()}"


def _refused(action: Callable[[], Any]) -> None:
    try:
        action()
    except UserError as error:
        assert len(str(error).splitlines()) == 1, f"several lines: {error}"
        return
    raise AssertionError("a plain call was not refused")


def _plain(trial: _Trial, rng: Random) -> None:
    ids = trial.longer(rng)
    options = rng.choice(({}, {"num_beams": 2}, {"do_sample": True}, {"use_cache": True}))
    ids = rng.choice((ids, ids[:, -5:], ids[:, : trial.past.ids.shape[1]]))
    past = rng.choice((trial.past, copy.deepcopy(trial.past), trial.past.state.cache))
    _refused(lambda: trial.model.generate(ids, past_key_values=past, **GREEDY | options))


def _forward(trial: _Trial, rng: Random) -> None:
    past = rng.choice((trial.past, trial.past.state.cache, trial.past.state.copy().cache))
    _refused(lambda: trial.model(trial.longer(rng)[:, -3:], past_key_values=past))


def _changed(trial: _Trial, rng: Random) -> None:
    past: Any = trial.past
    _refused(rng.choice((lambda: past.crop(-1), past.reset, lambda: past.batch_repeat_interleave(2))))


def _wrong(trial: _Trial, rng: Random) -> None:
    ids = trial.longer(rng)
    other = ids.clone()
    other[0, rng.randrange(trial.past.ids.shape[1])] += 1
    wrong: dict[str, Any] = rng.choice(
        (
            {"attention_mask": (torch.arange(ids.shape[1]) != 3).long()[None]},
            {"position_ids": torch.arange(ids.shape[1])[None] + 1},
            {"use_cache": False},
            {"num_beams": 2},
            {"ids": other},
            {"ids": ids[:, 1:]},
        )
    )
    ids = wrong.pop("ids", ids)
    _refused(lambda: trial.answer(ids, trial.past, **wrong))


def _threads(trial: _Trial, rng: Random) -> None:
    turns = [trial.longer(rng) for _ in range(rng.randint(2, 4))]
    expected = [trial.answer(ids, trial.fresh()).tolist() for ids in turns]
    with ThreadPoolExecutor(len(turns)) as pool:
        answers = list(pool.map(lambda ids: trial.answer(ids, trial.past).tolist(), turns))
    assert answers == expected, "threads answered otherwise"


def _goes_on(trial: _Trial, rng: Random) -> None:
    ids = trial.longer(rng)
    before = trial.past
    trial.past = trial.answer(ids, before, return_dict_in_generate=True).past_key_values
    trial.turns.append(ids)


def _talks(trial: _Trial, rng: Random) -> None:
    if trial.past.state.has_plain_entries:
        turn = trial.longer(rng)[:, -3:]
        answer = Conversation(trial.model, trial.method, trial.past.state).say(turn, **GREEDY)
        expected = Conversation(trial.model, trial.method, trial.fresh().state).say(turn, **GREEDY)
        assert torch.equal(answer, expected), "a conversation answered otherwise"


def _saves(trial: _Trial, rng: Random) -> None:
    if trial.past.state.has_plain_entries:
        turn = trial.longer(rng)[:, -3:]
        saved = load_state(save_state(trial.past.state, trial.folder, model=trial.model), trial.model)
        conversation = Conversation(trial.model, method_of("full", None), trial.fresh().state)
        expected = conversation.say(turn, **GREEDY)
        _refused(lambda: trial.model.generate(turn, past_key_values=saved.state.cache, **GREEDY))
        for _ in range(2):
            assert torch.equal(generate(trial.model, turn, saved, **GREEDY), expected), "a saved state: otherwise"


def _grows(trial: _Trial, rng: Random) -> None:
    """Its layers are reached into, after which it is of no use, and says so."""
    spoilt: Any = trial.fresh()
    if layers := spoilt.state.layers:
        rng.choice(layers).seen += rng.choice((1, 2, -1))
        _refused(lambda: trial.answer(trial.longer(rng), spoilt))


_OPERATIONS = (_plain, _plain, _plain, _forward, _changed, _wrong, _threads, _goes_on, _talks, _saves, _grows)
