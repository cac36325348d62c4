"""Objectives of retrieval heads, and their scores."""

from typing import Any

from torch import Tensor

from keepsight.models.retrieval_head import RetrievalHead
from keepsight.train.replay import TeacherOutputs
from keepsight.train.retrieval_head import RetrievalObjective, Texts, head_scores
from keepsight.train.settings import RetrievalHeadSettings


def objective_of(
    head: RetrievalHead, model: Any, queries: int, temperature: float = 1.0, answers: float = 0.0
) -> RetrievalObjective:
    settings = RetrievalHeadSettings(queries=queries, temperature=temperature, answers=answers)
    return RetrievalObjective(head, model, settings)


def scores_of(head: RetrievalHead, model: Any, texts: Texts, outputs: TeacherOutputs) -> Tensor:
    embeddings = model.get_input_embeddings()(texts.ids).detach()
    features = outputs.features[0] if outputs.features else None
    return head_scores(head, texts, outputs.importance[0].shape[2], embeddings, features)
