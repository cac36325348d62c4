"""Reconstruction: lengths, references, and questions that share a text."""

from statistics import fmean

import pytest

from keepsight.eval.sweep import groups_of
from keepsight.eval.tasks.benchmark import TaskRequest
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.reconstruction import ASKED, MAX_NEW_TOKENS, ReconstructionTask
from keepsight.eval.tasks.samples import render_apart
from tests.refused import refused
from tests.tiny import tiny_tokenizer


def test_a_paragraph_of_the_text_is_the_answer() -> None:
    request = TaskRequest(tiny_tokenizer(), 8192, lengths=(1000, 4000), samples=6)
    made = ReconstructionTask().samples("", request)
    assert [each.length for each in made] == [1000] * 6 + [4000] * 6
    assert made == ReconstructionTask().samples(
        "", TaskRequest(tiny_tokenizer(), 8192, lengths=(1000, 4000), samples=6)
    )
    others = list[float]()
    for sample in made:
        assert sample.length * 0.5 < len(sample.prompt_ids) + MAX_NEW_TOKENS <= sample.length
        (reference,), paragraphs = sample.references, sample.context.split("\n\n")
        (asked,) = (each for each in paragraphs if " ".join(each.split()).startswith(reference))
        assert " ".join(asked.split()[:6]) in sample.question and score(sample, reference) > 0.999
        assert sample.depth == pytest.approx((paragraphs.index(asked) + 0.5) / len(paragraphs))
        others.append(score(sample, paragraphs[paragraphs.index(asked) - 1]))
    assert fmean(others) < 0.4
    assert len({sample.depth for sample in made}) > 8


def test_several_questions_share_a_text_and_can_be_split_from_it() -> None:
    request = TaskRequest(tiny_tokenizer(), 8192, lengths=(2000,), samples=2, every_question=True)
    made = [render_apart(each, request.tokenizer) for each in ReconstructionTask().samples("", request)]
    groups = groups_of(made, "multi")
    assert [len(group) for group in groups] == [ASKED] * 2
    for group in groups:
        assert len({each.references for each in group}) == ASKED
        assert len({tuple(each.prompt_ids.tolist()) for each in group}) == 1 and len(group[0].question_ids) > 5


def test_too_short_a_text_is_refused() -> None:
    with refused("lengths", "range"):
        ReconstructionTask().samples("", TaskRequest(tiny_tokenizer(), 8192, lengths=(120,), samples=1))
