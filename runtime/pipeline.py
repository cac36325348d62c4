"""A context that is compressed once, and questions that are answered from it.

```python
pipe = keepsight.pipeline("Qwen/Qwen3-8B")
answers = pipe(document, questions=["Who signed?", "When?"], method=SnapKV(budget=512))
```

The method sees the context alone, as in `keepsight eval question=unseen`; a question is read after the eviction, and
nothing is evicted for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.chat import encode, has_chat_template, prompt_text
from keepsight.models.decoder import context_of
from keepsight.models.targets import load_target
from keepsight.runtime.generate import AnswersFrom, FullCache, Method, generate


class Pipeline:
    """Answers questions about a context, which a method compresses once.

    Args:
        model: The base model.
        tokenizer: Its tokenizer. With a chat template, context and question are a user's message; else plain text.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def __call__(
        self,
        context: str,
        questions: str | Sequence[str],
        method: Method | None = None,
        *,
        answer_prefix: str = "",
        max_new_tokens: int = 64,
        **options: Any,
    ) -> Any:
        """Answer one question or several.

        Args:
            context: The text that the questions are about.
            questions: One question, or several, each of which is answered from the same compressed context.
            method: The method, such as `SnapKV(budget=512)`; the full cache by default.
            answer_prefix: First words of the answer, which the model continues.
            max_new_tokens: Longest answer, in tokens.
            options: Further options of `model.generate`, such as `do_sample`.

        Returns:
            The answer's text for one question, a list of them for several; without special tokens.

        Raises:
            UserError: the context or a question is empty, the context is longer than the model's, or the template
                changes the context.
        """
        method = FullCache() if method is None else method
        asked = [questions] if isinstance(questions, str) else list(questions)
        if not context.strip() or not all(question.strip() for question in asked):
            raise UserError("pipeline: the context and every question need some text", field="question", code="range")
        if not asked:
            return []

        context_ids, _ = self._ids(context, asked[0], answer_prefix)
        method.check(context_ids.shape[1], context_of(self.model))
        state = method.start(self.model, context_ids)
        reader = AnswersFrom(method, state)
        answers = []
        for question in asked:
            _, question_ids = self._ids(context, question, answer_prefix)
            ids = generate(self.model, question_ids, reader, max_new_tokens=max_new_tokens, **options)
            answers.append(self.tokenizer.decode(ids[0], skip_special_tokens=True))
        if isinstance(questions, str):
            return answers[0]
        return answers

    def _ids(self, context: str, question: str, answer_prefix: str) -> tuple[Tensor, Tensor]:
        """The ids [1, n] int64 of the text up to the context's end, and of the question with all that follows it."""
        context = context.strip()
        turn = {"role": "user", "content": f"{context}\n\n{question.strip()}"}
        text = prompt_text(self.tokenizer, [turn], answer_prefix)
        end = text.find(context) + len(context)
        if end < len(context):
            raise UserError(
                "pipeline: the chat template changes the context, so that its end cannot be found",
                field="context",
                code="model",
            )
        has_special_tokens = has_chat_template(self.tokenizer)  # a template writes its own
        (context_ids,) = encode(self.tokenizer, [text[:end]], special=not has_special_tokens)
        (question_ids,) = encode(self.tokenizer, [text[end:]], special=False)
        device = self.model.device
        return torch.tensor([context_ids], device=device), torch.tensor([question_ids], device=device)


def pipeline(model: str | PreTrainedModel, tokenizer: Any = None, **options: Any) -> Pipeline:
    """A `Pipeline` for a model.

    Args:
        model: A Hub id or a folder, which is loaded; or a loaded model.
        tokenizer: The tokenizer of a loaded model.
        options: Of `load_target`, such as `dtype` and `device`, where the model is loaded.

    Raises:
        UserError: the model cannot be loaded, or a loaded one comes without its tokenizer.
    """
    if isinstance(model, str):
        target = load_target(model, **options)
        return Pipeline(target.model, target.tokenizer)
    if tokenizer is None:
        raise UserError("pipeline: give tokenizer= with a loaded model", field="tokenizer", code="missing")
    if options:
        raise UserError(
            f"pipeline: {next(iter(options))}= is for a model that is loaded here; leave it out",
            field=next(iter(options)),
            code="conflict",
        )
    return Pipeline(model, tokenizer)
