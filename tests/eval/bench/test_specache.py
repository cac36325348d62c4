"""The measurement of SpeCache's steps on a tiny model: every line is there, and its bytes are right."""

from keepsight.eval.bench.offload import bench_specache
from keepsight.models.targets import Target
from keepsight.runtime.quantized.specache import SpeCache
from tests.tiny import tiny_model, tiny_tokenizer


def test_every_cache_and_every_part_has_a_line():
    target = Target(tiny_model(), tiny_tokenizer(), "tiny", "0")
    lines = list(bench_specache(target, SpeCache(2, 8, 8, topk=4), tokens=40, batch=2, steps=5))
    caches = {line[:22].strip(): line[22:].split() for line in lines[2:6]}
    assert list(caches) == ["full", "KIVI", "SpeCache", "no guess"]
    megabytes = {name: float(columns[2]) for name, columns in caches.items()}
    # 48 tokens x 2 rows x 3 layers x 2 KV heads x 8 dimensions x 2 x 4 bytes, as two decimals show it
    assert megabytes["full"] == round(48 * 2 * 3 * 2 * 8 * 2 * 4 / 1e6, 2)
    assert megabytes["KIVI"] <= megabytes["SpeCache"] == megabytes["no guess"]
    # Of each step 4 entries a head come back; tokens 41 to 48 are packed and offloaded in the last of 5 steps.
    moved = round((4 + 8 / 5) * 2 * 3 * 2 * 8 * 2 * 4 / 1e6, 2)
    assert float(caches["SpeCache"][3]) == float(caches["no guess"][3]) == moved
    assert [line[:22].strip() for line in lines[6:]] == [
        "dequantise",
        "attention, with it",
        "select",
        "select and fetch",
    ]
