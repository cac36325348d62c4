"""What the project claims, on the real model and the shipped adapter: oracle >= LookaheadKV > SnapKV at budget 64."""

from statistics import fmean

from keepsight.commands.eval import Config
from keepsight.commands.from_recipe import resources_of, target_of
from keepsight.commands.parse import parse
from keepsight.eval.sweep import Variant, run_samples
from keepsight.eval.tasks.niah import make_samples
from keepsight.runtime.methods import make_method


def test_on_needles_the_oracle_is_ahead_of_lookaheadkv_and_that_of_snapkv():
    config = parse(Config, ["model.device=cpu", "out=unused"])
    target = target_of(config)
    resources = resources_of(config, target)
    variants = [Variant(name, make_method(name, 64, resources)) for name in ("oracle", "lookaheadkv", "snapkv")]
    samples = make_samples("single", 512, 4, 7, target.tokenizer, max_new_tokens=12)
    rows = [row for sample in samples for row in run_samples(target, [sample], variants, 10_000)[0]]
    score = {
        name: fmean(row["score"] for row in rows if row["method"] == name) for name in ("full", "oracle", "snapkv")
    }
    ours = fmean(row["score"] for row in rows if row["method"] == "lookaheadkv")
    assert score["full"] >= score["oracle"] >= ours > score["snapkv"]
    loss = {row["method"]: 0.0 for row in rows}
    for row in rows:
        loss[row["method"]] += row["excess_nll"]
    assert loss["lookaheadkv"] < loss["snapkv"]
    assert loss["oracle"] < loss["snapkv"]
