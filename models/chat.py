"""A target's chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from keepsight.errors import UserError


def chat_text(tokenizer: Any, turns: Sequence[dict[str, Any]], **variables: Any) -> str:
    """The turns as the text that the target was trained on, ending where its answer begins; `variables` are the template's.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses these turns.
    """
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise UserError(f"model {name!r} has no chat template; choose an instruction-tuned model")
    try:
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True, **variables))
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise UserError(f"the chat template of {name!r} refuses the turns {roles}: {error}") from None


def with_arguments(template: Any, arguments: Mapping[str, Any]) -> str:
    """A chat template with arguments, such as `enable_thinking`, set in it: whoever applies it, applies them too.

    Raises:
        UserError: there is no template to set them in, or an argument is no value that can be written there.
    """
    if not isinstance(template, str):
        raise UserError(f"model.template={dict(arguments)}: the model has no single chat template to set this in")
    for name, value in arguments.items():
        if not name.isidentifier() or not isinstance(value, str | int | float | bool):
            raise UserError(f"model.template: {name}={value!r} must be a name with a text, a number, true or false")
    return "".join(f"{{% set {name} = {json.dumps(value)} %}}" for name, value in arguments.items()) + template
