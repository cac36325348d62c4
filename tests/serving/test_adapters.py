"""Several adapters beside one base model, of which a request chooses one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from keepsight import LookaheadKV
from keepsight.models.targets import Target
from keepsight.runtime.generate import generate
from keepsight.serving.engine import Engine
from keepsight.serving.server import Service
from tests.serving.adapters import adapters_of
from tests.serving.loopback import running

PLAIN = "/v1/completions"
BUDGET = 24
TOKENS = 16
TEXTS = [f"{number} ships sailed on the sea, and {number + 2} came back. " * 9 for number in range(3)]


@pytest.fixture(scope="module")
def methods(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, LookaheadKV]:
    """The server's own, and two that requests name."""
    folder = Path(tmp_path_factory.mktemp("adapters"))
    default, law, code = adapters_of(target, folder, BUDGET, count=3)
    return {None: default, "law": law, "code": code}


@pytest.fixture(params=[0, 32], ids=["whole", "parts"])
def url(request: pytest.FixtureRequest, target: Target, methods: dict[str | None, LookaheadKV]) -> Iterator[str]:
    """A server that reads prompts whole, or in parts beside the answers that run."""
    adapters = {name: method for name, method in methods.items() if name is not None}
    engine = Engine(target.model, methods[None], rows=9, prefill_tokens=request.param, session_bytes=1 << 24)
    for method in adapters.values():
        engine.admit(method)
    limits: dict[str, Any] = {"answer_tokens": 40, "max_bytes": 1 << 16, "max_budget": 40}
    app = Service(engine, target, name="tiny", key=None, adapters=adapters, **limits).app()
    with engine, running(app, engine) as (url, _):
        yield url


def ask(url: str, prompt: str, **keepsight: Any) -> dict[str, Any]:
    """The reply to a completion that makes these choices of ours."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "keepsight": keepsight}
    return dict(httpx.post(url + PLAIN, json=body, timeout=120).raise_for_status().json())


def answer_alone(target: Target, prompt: str, method: LookaheadKV) -> str:
    """The answer of `generate`."""
    ids = target.tokenizer(prompt, return_tensors="pt")["input_ids"]
    answer = generate(target.model, ids, method, max_new_tokens=TOKENS)[0]
    return str(target.tokenizer.decode(answer, skip_special_tokens=True))


def test_each_request_is_evicted_from_by_its_own_adapter(url, target, methods):
    """All at once, with budgets of their own among them: no LoRA acts in another's pass."""
    cases: list[tuple[str, str | None, int | None]] = []
    expected = []
    for prompt in TEXTS:
        for name, method in methods.items():
            cases.append((prompt, name, None))
            expected.append(answer_alone(target, prompt, method))
            cases.append((prompt, name, 40))
            expected.append(answer_alone(target, prompt, replace(method, budget=40)))
    assert len({*expected}) > len(TEXTS) * 2, "the adapters keep other entries"

    def answer(case: tuple[str, str | None, int | None]) -> str:
        prompt, adapter, budget = case
        return ask(url, prompt, adapter=adapter, budget=budget)["choices"][0]["text"]

    with ThreadPoolExecutor(9) as pool:
        answers = [*pool.map(answer, cases)]
    assert answers == expected


def test_states_of_an_adapter_serve_no_other(url):
    def cached(choice: dict[str, Any]) -> int:
        usage = ask(url, TEXTS[0], **choice)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    choices: list[dict[str, Any]] = [{}, {"adapter": "law"}, {"adapter": "code"}, {"adapter": "law", "budget": 40}]
    assert [cached(choice) for choice in choices] == [0] * 4
    assert min(cached(choice) for choice in choices) > 0


def test_names(url):
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["keepsight"] == {"max_budget": 40, "adapters": ["law", "code"]}
    body = {"model": "tiny", "prompt": TEXTS[0], "keepsight": {"adapter": "poems"}}
    error = httpx.post(url + PLAIN, json=body).json()["error"]
    assert error["code"] == 400
    assert error["param"] == "keepsight.adapter"
    assert "'poems'" in error["message"]
    assert "'law', 'code'" in error["message"]
