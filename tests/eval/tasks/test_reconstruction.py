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
    samples = ReconstructionTask().samples("", request)
    assert [sample.length for sample in samples] == [1000] * 6 + [4000] * 6
    same_request = TaskRequest(tiny_tokenizer(), 8192, lengths=(1000, 4000), samples=6)
    assert samples == ReconstructionTask().samples("", same_request)
    scores_of_wrong_paragraphs: list[float] = []
    for sample in samples:
        assert sample.length * 0.5 < len(sample.prompt_ids) + MAX_NEW_TOKENS <= sample.length
        (reference,) = sample.references
        paragraphs = sample.context.split("\n\n")
        (index,) = (
            index for index, paragraph in enumerate(paragraphs) if " ".join(paragraph.split()).startswith(reference)
        )
        first_words = paragraphs[index].split()[:6]
        assert " ".join(first_words) in sample.question
        assert score(sample, reference) > 0.999
        assert sample.depth == pytest.approx((index + 0.5) / len(paragraphs))
        scores_of_wrong_paragraphs.append(score(sample, paragraphs[index - 1]))
    assert fmean(scores_of_wrong_paragraphs) < 0.4
    assert len({sample.depth for sample in samples}) > 8


def test_several_questions_share_a_text_and_can_be_split_from_it() -> None:
    request = TaskRequest(tiny_tokenizer(), 8192, lengths=(2000,), samples=2, every_question=True)
    samples = ReconstructionTask().samples("", request)
    groups = groups_of([render_apart(sample, request.tokenizer) for sample in samples], "multi")
    assert [len(group) for group in groups] == [ASKED] * 2
    for group in groups:
        assert len({sample.references for sample in group}) == ASKED
        assert len({tuple(sample.prompt_ids.tolist()) for sample in group}) == 1
        assert len(group[0].question_ids) > 5


def test_too_short_a_text_is_refused() -> None:
    with refused("lengths", "range"):
        ReconstructionTask().samples("", TaskRequest(tiny_tokenizer(), 8192, lengths=(120,), samples=1))
