"""Arguments that no command may take: those that once went wrong, and every key with values of another type."""

from collections.abc import Iterator
from random import Random
from typing import get_origin

from keepsight.commands.config import COMMANDS
from keepsight.commands.parse import keys_of
from tests.faults.world import INSPECT, MAKERS, PUSHES, TINY, Scene

_EVAL = f"eval {' '.join(TINY)} out=o lengths=300 samples=1 budgets=40 methods=snapkv"
_TRAIN = f"train {' '.join(TINY)} data=data out=o train.steps=1 train.held_out=2 train.report_to=[]"
_DATA = f"data {' '.join(TINY)} mixture=mixture.yaml limit=2 out=o"
_INSPECT = f"inspect {' '.join(TINY)} prompt=@text.txt budget=40 method=snapkv out=o.html"

KNOWN = (
    *(f"{_TRAIN} train.{argument}" for argument in (
        "learning_rate=-1", "learning_rate=nan", "learning_rate=inf", "warmup=-1", "warmup=2.0", "seed=-1",
        "seed=4294967296", "report_to=[nope]", "report_to=nope", "steps=-1", "epochs=0", "epochs=nan", "batch_size=0",
        "accumulation=0", "clip=0", "clip=nan", "precision=fp8", "held_out=-1", "held_out=99", "measure_every=0",
        "save_every=0", "budget=0", "replays=0", "far=2", "cuts=-1", "cuts=0", "cuts=65", "min_learning_rate=-1",
    )),
    *(f"{_TRAIN} lookahead.{argument}" for argument in (
        "tokens=0", "tokens=-1", "tokens=10000000000000", "rank=-1", "rank=1000000", "dropout=1.5", "dropout=nan",
        "pooling=foo", "kernel=0", "kernel=4", "kernel=-3", "group=foo", "alpha=0", "alpha=nan",
    )),
    *(f"{_TRAIN} {argument}" for argument in (
        "replay.memory=many", "replay.dtype=int3", "init=none", "init=head", "max_prompt_tokens=1", "out=text.txt",
        "out=text.txt/o", "data=text.txt", "data=tiny", "data=eval", "init=adapter lookahead.tokens=4",
        "model.id=text.txt", "model.id=data", "model.dtype=int8", "model.attention=fast", "recipe=none",
    )),
    *(f"{_DATA} {argument}" for argument in (
        "model.device=meta", "model.device=cuda:99", "mixture=text.txt", "mixture=tiny/model.safetensors",
        "mixture=tiny", "mixture=none", "limit=0", "limit=-1", "limit=1e10", "limit=1000000000000", "seed=many",
        "shard_size=0", "max_new_tokens=0", "max_new_tokens=99999999999999999999", "batch_tokens=0", "out=text.txt",
        "max_new_tokens=4090",
    )),
    *(f"{_EVAL} {argument}" for argument in (
        "budgets=[12345678901234567890]", "budgets=12345678901234567890", "budgets=[0]", "budgets=[-1]",
        "budgets=[1.5]", "budgets=[nan]", "budgets=[many]", "budgets=[]", "tasks=niah_sngle", "tasks=[]",
        "tasks=jsonl", "tasks=niah,niah_single", "lengths=20", "lengths=-1", "lengths=1000000", "lengths=[]",
        "samples=0", "samples=-1", "question=heard", "haystack=none", "haystack=tiny",
        "haystack=tiny/model.safetensors", "max_tokens=-1 tasks=jsonl jsonl.dir=tiny", "tasks=jsonl jsonl.dir=data",
        "max_new_tokens=-1", "max_batch_tokens=-1", "bits=[3] methods=kivi", "bits=[many]", "methods=[]",
        "methods=snapkw", "methods=[{}]", "methods=[7]", "methods=[[snapkv]]", "methods=[{name:kivi,inner:7}]",
        "methods=[{name:kivi,inner:nope}]", "methods=[{name:kivi,inner:kivi}]", "methods=[{name:kivi,group:0}]",
        "methods=[{name:snapkv,window:-1}]", "methods=[{name:snapkv,window:many}]", "methods=[{name:snapkv,pool:7}]",
        "methods=[{name:snapkv,pool:{kernel:99999}}]", "methods=[{name:snapkv,every:-1}]", "methods=[snapkv,snapkv]",
        "methods=lookaheadkv", "methods=lookaheadkv adapter=none", "methods=lookaheadkv adapter=head",
        "methods=lookaheadkv adapter=shipped:none", "methods=specontext retrieval=adapter", "methods=speckv",
        "methods=speckv draft.layers=[9]", "methods=speckv draft.layers=[-1]", "methods=speckv draft.layers=[]",
        "methods=speckv draft.layers=[1,0]", "methods=speckv draft.id=none", "methods=speckv draft.head=adapter",
        "methods=speckv draft.layers=[0] draft.id=tiny", "out=text.txt", "out=text.txt/o",
    )),
    *(f"{_INSPECT} {argument}" for argument in (
        "out=tiny", "out=text.txt", "out=text.txt/o", "out=data", "method=full", "method=none", "compare=full",
        "budget=0", "budget=-5", "budget=99999", "prompt=@none", "prompt=@tiny", "prompt=@tiny/model.safetensors",
        "options={a:1}", "options=7", "options={window:-1}", "template=maybe", "\ud800=1", "prompt=\ud800",
    )),
    *("push", "push adapter", "push none ada/x", "push tiny ada/x", "push data ada/x", "push adapter ada",
      "push adapter a/b/c", "push adapter ada/x y", "push adapter ../x", "push text.txt ada/x", "nothing",
      "bench nothing", "data", "data --", "data =", "data out", "data out=", "data a.b.c=1",
      "data +out=o", "data ~out", "data hydra.run.dir=x", "--verbose"),
)  # fmt: skip
"""The issue's, and their like."""

_OF_NO_NUMBER = ("many", "[1]", "{a:1}", "1_0x", "0x", "1;2", "99999999999999999999999999999999")
_WRONG = {
    int: (*_OF_NO_NUMBER, "1.5", "nan", "1e3", "null"),
    float: (*_OF_NO_NUMBER[:6], "null"),
    bool: ("maybe", "2", "[true]", "{a:1}", "null"),
    str: ("\ud800",),
    list: ("[1", "[a,[b]"),
}


def wrong_lines(rng: Random, count: int) -> list[str]:
    """`KNOWN` and others up to `count`, or so many of `KNOWN`."""
    if count <= len(KNOWN):
        return rng.sample(KNOWN, count)
    others = list(_of_another_type())
    return [*KNOWN, *rng.sample(others, count - len(KNOWN))]


def _of_another_type() -> Iterator[str]:
    base: dict[str, Scene] = {scene.arguments[0]: scene for scene in (*MAKERS, INSPECT, *PUSHES)}
    for name, (schema, _) in COMMANDS.items():
        valid_line = " ".join(base[name].arguments) if name in base else f"{name} out=o"
        for key in keys_of(schema):
            for wrong_value in _WRONG.get(get_origin(key.kind) or key.kind, ()):
                yield f"{valid_line} {key.name}={wrong_value}"
