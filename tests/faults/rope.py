"""Models whose RoPE depends on the length of the text, at lengths around the limit: the answers are transformers'."""

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch

from keepsight import Conversation, DapQ, SnapKV, generate
from keepsight.runtime.generate import FullCache
from keepsight.serving.engine import Engine, Job
from tests.faults.texts import Verdict, accepted, judged
from tests.faults.world import World
from tests.rope_models import KINDS, rope_model
from tests.tiny import prompt_ids


def rope(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Random models, lengths, chunks, batches, methods and ways to call them."""
    for _ in range(count):
        case = {
            "kind": rng.choice(KINDS),
            "seed": rng.randrange(20),
            "limit": rng.randrange(40, 72),
            "theta": rng.choice((100.0, 10000.0, 1e6)),
        }
        check = rng.choice((_as_transformers, _as_transformers, _on_one_side, _beside_others, _in_turns))
        yield judged((check.__name__, case), partial(check, case, rng))


def _near(rng: Random, limit: int) -> int:
    """A length of a prompt, most often close to the limit."""
    return rng.choice((limit + rng.randint(-16, 4), limit + rng.randint(-4, 16), rng.randint(12, 2 * limit)))


def _options(rng: Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 24), "do_sample": False, "eos_token_id": None}
    if rng.random() < 0.5:
        options["prefill_chunk_size"] = rng.randint(1, 40)
    return options


def _as_transformers(case: dict[str, Any], rng: Random) -> str:
    """The full cache, by itself or within a budget, of one prompt or of several, answers as `generate` does."""
    lengths = [_near(rng, case["limit"]) for _ in range(rng.choice((1, 1, 2, 3)))]
    ids, mask = prompt_ids(*lengths, seed=rng.randrange(100))
    options = _options(rng)
    plain = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    expected = rope_model(**case).generate(ids, attention_mask=mask, **plain)[:, ids.shape[1] :]
    method = rng.choice((None, SnapKV(512, window=8)))
    answer = accepted(lambda: generate(rope_model(**case), ids, method, attention_mask=mask, **options))
    assert torch.equal(answer, expected), f"{lengths} {options} {method}: {answer.tolist()} for {expected.tolist()}"
    return "right"


def _on_one_side(case: dict[str, Any], rng: Random) -> str:
    """Evicted texts on one side of LongRoPE's limit answer as a model without the other side's frequencies."""
    kind = rng.choice(("phi3", "longrope"))
    limit = case["limit"]
    is_beyond = rng.random() < 0.5
    options = _options(rng)
    shortest, longest = (limit + 1, 2 * limit) if is_beyond else (14, limit - options["max_new_tokens"])
    ids, _ = prompt_ids(rng.randint(shortest, longest), seed=rng.randrange(100))
    case_of_kind: dict[str, Any] = case | {"kind": kind}
    model = rope_model(**case_of_kind)
    one_sided = rope_model(**case_of_kind)
    rotary = one_sided.model.rotary_emb
    side = "long_factor" if is_beyond else "short_factor"
    factors = dict.fromkeys(("long_factor", "short_factor"), rotary.config.rope_parameters[side])
    rotary.config.rope_parameters |= factors
    frequencies, _ = _frequencies(rotary.config)
    rotary.inv_freq.copy_(frequencies)
    rotary.original_inv_freq.copy_(frequencies)
    method = SnapKV(rng.randint(9, 40), window=8)
    answer = accepted(partial(generate, model, ids, method, **options))
    expected = accepted(partial(generate, one_sided, ids, method, **options))
    assert torch.equal(answer, expected), f"{kind} {ids.shape} {options} {method}: {answer} for {expected}"
    return "right"


def _frequencies(config: Any) -> Any:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))


def _beside_others(case: dict[str, Any], rng: Random) -> str:
    """Requests in one batch of the engine answer as they do alone; refused are the same ones."""
    model = rope_model(**case)
    method = rng.choice((FullCache(), SnapKV(rng.randint(9, 40), window=8), DapQ(rng.randint(4, 40))))
    prompts = [prompt_ids(_near(rng, case["limit"]), seed=rng.randrange(100))[0] for _ in range(rng.randint(2, 4))]
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    max_new_tokens = [rng.randint(1, 24) for _ in prompts]
    expected: list[list[int]] = []
    jobs: list[Job] = []
    for ids, tokens in zip(prompts, max_new_tokens, strict=True):
        answer = accepted(partial(generate, model, ids, method, max_new_tokens=tokens, **options))
        expected.append(answer[0].tolist())
        jobs.append(Job(ids[0], max_new_tokens=tokens, **options))
    engine = Engine(model, method)
    for job in jobs:
        accepted(partial(engine.submit, job))
        for _ in range(rng.randrange(6)):
            engine.step()
    while engine.step():
        pass
    answers = [job.tokens for job in jobs]
    lengths = [ids.shape[1] for ids in prompts]
    assert answers == expected, f"{method} {lengths} {max_new_tokens}: {answers} for {expected}"
    return "right"


def _in_turns(case: dict[str, Any], rng: Random) -> str:
    """Turns over a full cache answer as transformers does with the cache of the turns before."""
    conversation = Conversation(rope_model(**case), FullCache())
    reference_model = rope_model(**case)
    options = _options(rng)
    plain = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    past = None
    ids = torch.empty(1, 0, dtype=torch.long)
    for number in range(rng.randint(2, 4)):
        turn, _ = prompt_ids(rng.randint(2, case["limit"] // 2 + 4), seed=rng.randrange(100))
        ids = torch.cat([ids, turn], dim=1)
        so_far = {"attention_mask": torch.ones_like(ids), "past_key_values": past}
        output = reference_model.generate(ids, return_dict_in_generate=True, **so_far, **plain)
        answer = accepted(partial(conversation.say, turn, **options))
        expected = output.sequences[:, ids.shape[1] :]
        assert torch.equal(answer, expected), f"turn {number} of {ids.shape[1]} {options}: {answer} for {expected}"
        ids = output.sequences
        past = output.past_key_values
    return "right"
