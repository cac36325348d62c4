"""What the shared prefill of a sweep saves, against one run for each method and budget."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from keepsight.eval.niah import make_samples
from keepsight.eval.samples import render
from keepsight.eval.sweep import Variant, run_sample
from keepsight.models.targets import Target
from keepsight.runtime.evict import Method
from keepsight.runtime.generate import generate


def bench_sweep(target: Target, methods: Mapping[str, Method], tokens: int, answer_tokens: int, samples: int) -> str:
    """Seconds a sample of the sweep, and of a separate prefill and decode for each variant, as a few lines of text.

    The sweep's time includes the full cache's own answer and the teacher-forced scores that separate runs do not give.
    Answers of both end at an end token or after `answer_tokens` tokens.
    """
    variants = [Variant(name, method) for name, method in methods.items()]
    chosen = [
        replace(sample, max_new_tokens=answer_tokens)
        for sample in make_samples("single", tokens, samples + 1, 0, target.tokenizer)
    ]
    run_sample(target, chosen[0], variants, len(variants))
    start = time.perf_counter()
    for sample in chosen[1:]:
        run_sample(target, sample, variants, len(variants))
    shared = (time.perf_counter() - start) / samples
    start = time.perf_counter()
    for sample in chosen[1:]:
        ids = torch.tensor([render(sample, target.tokenizer)], device=target.model.device)
        for method in methods.values():
            generate(target.model, ids, method, max_new_tokens=answer_tokens, do_sample=False)
    separate = (time.perf_counter() - start) / samples
    return (
        f"{len(methods)} variants, {tokens} prompt tokens, at most {answer_tokens} answer tokens, {samples} samples\n"
        f"sweep     {shared:7.2f} s a sample\nseparate  {separate:7.2f} s a sample\nratio     {separate / shared:7.2f}"
    )
