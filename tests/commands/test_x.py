from pathlib import Path
import pytest
from transformers import TrainingArguments
from keepsight.models import targets
from keepsight.models.targets import load_target
from tests.commands.test_offloaded_target import *
from tests.devices import *

PLACES = {f"model.{n}": FIRST for n in ("embed_tokens","rotary_emb",*(f"layers.{i}" for i in range(4)))} | {f"model.layers.{i}": SECOND for i in range(4,7)} | {"model.norm":SECOND,"lm_head":SECOND}

@pytest.mark.parametrize("command", ["eval","draft","retrieval","fit"])
def test_x(keepsight, here, monkeypatch, command):
    monkeypatch.setattr(TrainingArguments, "device", property(lambda s: FIRST))
    import accelerate
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda s: FIRST))
    M="methods=[full,oracle,lookaheadkv,speckv,quest,snapkv,h2o,tova,streamingllm,{name: snapkv,allocate: adakv}]"
    with several_devices():
        monkeypatch.setattr(targets, "placement", lambda *_: {"device_map": PLACES})
        if command=="eval":
            keepsight(*LOOKAHEAD, *TINY, "data=data", "out=adapter")
            keepsight("eval", *TINY, *NEEDLES, M, "adapter=adapter", "out=out")
            parts = read_jsonl(here/"out"/"results.jsonl")
            monkeypatch.setattr(targets, "placement", lambda *_: {})
            keepsight("eval", *TINY, *NEEDLES, M, "adapter=adapter", "out=whole")
            whole = read_jsonl(here/"whole"/"results.jsonl")
            w=comparable(whole)
            for a,b in zip(parts,w):
                a=a|CLOCKS
                if a!=b: print("DIFF",a["method"],[(k,a[k],b[k]) for k in a if a[k]!=b[k]])
            assert 0
        if command=="draft":
            keepsight(*DRAFT_HEAD, *TINY, "data=data", "out=head")
        if command=="retrieval":
            keepsight("train_retrieval_head", *TINY, "data=data", "out=rhead", *(f"retrieval_head.train.{each}" for each in SHORT))
        if command=="fit":
            assert 0

def test_heads(keepsight, here, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "device", property(lambda s: FIRST))
    import accelerate
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda s: FIRST))
    for name in ("train_draft_head","train_retrieval_head"):
        keys = DRAFT_HEAD[1:] if "draft" in name else [f"retrieval_head.train.{each}" for each in SHORT]
        keepsight(name, *TINY, *keys, "data=data", f"out=w{name}")
        with several_devices():
            monkeypatch.setattr(targets, "placement", lambda *_: {"device_map": PLACES})
            keepsight(name, *TINY, *keys, "data=data", f"out=p{name}")
        monkeypatch.setattr(targets, "placement", lambda *_: {})
        import glob
        for f in glob.glob(f"w{name}/*.safetensors"):
            a,b=load_file(f),load_file("p"+f[1:])
            print("CMP", f, max((a[k].float()-b[k].float()).abs().max().item() for k in a))
    assert 0
