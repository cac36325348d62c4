"""Speed of an evaluation's sweep."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
from transformers import PreTrainedModel

from keepsight.eval.answers import default_batch_tokens
from keepsight.eval.bench.measure import require_room, seconds_of
from keepsight.eval.sweep import Variant, run_samples, sweep
from keepsight.eval.tasks.niah import make_samples
from keepsight.models.targets import Target
from keepsight.runtime.generate import Method, generate


def bench_sweep(
    target: Target, methods: Mapping[str, Method], tokens: int, answer_tokens: int, samples: int
) -> Iterator[str]:
    """Seconds per sample of the sweep, and of a separate prefill and decode per variant, as a few lines of text.

    The sweep's time includes the full cache's own answer, the teacher-forced scores and the recall, which separate
    runs lack. Every answer has exactly `answer_tokens` tokens in both: end tokens are ignored.
    """
    require_room(target.model, tokens)
    variants = [Variant(name, method) for name, method in methods.items()]
    chosen = [
        replace(sample, max_new_tokens=answer_tokens)
        for sample in make_samples("single", tokens, samples + 1, 0, target.tokenizer)
    ]
    most, (warm_up, *timed) = default_batch_tokens(target.model), chosen

    def one_by_one() -> None:
        for sample, method in product(timed, methods.values()):
            ids = sample.prompt_ids[None].to(target.model.device)
            generate(target.model, ids, method, max_new_tokens=answer_tokens, do_sample=False)

    with _endless(target.model):
        run_samples(target, [warm_up], variants, most)
        shared = seconds_of(lambda: list(sweep(target, timed, variants, set(), most))) / samples
        separate = seconds_of(one_by_one) / samples
    yield (
        f"{len(methods)} variants, {tokens} prompt tokens, {answer_tokens} answer tokens, {samples} samples, "
        f"{torch.get_num_threads()} threads"
    )
    yield f"sweep     {shared:7.2f} s a sample"
    yield f"separate  {separate:7.2f} s a sample"
    yield f"ratio     {separate / shared:7.2f}"


@contextmanager
def _endless(model: PreTrainedModel) -> Iterator[None]:
    """No token ends an answer within the block."""
    config = model.generation_config
    assert config is not None
    before = config.eos_token_id
    config.eos_token_id = model.config.get_text_config().vocab_size  # which no logit is for
    try:
        yield
    finally:
        config.eos_token_id = before
