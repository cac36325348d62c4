"""A target's chat template."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from keepsight.errors import UserError


def chat_text(tokenizer: Any, turns: Sequence[dict[str, str]]) -> str:
    """The turns as the text that the target was trained on, ending where its answer begins.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses these turns.
    """
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise UserError(f"model {name!r} has no chat template; choose an instruction-tuned model")
    try:
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise UserError(f"the chat template of {name!r} refuses the turns {roles}: {error}") from None
