"""HTML pages from the templates of this folder; every value is escaped unless a template says otherwise."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from keepsight.eval.report.styles import glyph, label_of
from keepsight.eval.report.tables import interval_text, number_text, sort_key, value_text

_FUNCTIONS = (glyph, label_of, value_text, interval_text, number_text, sort_key)
"""What templates may call."""


def render_page(template: str, **values: Any) -> str:
    """The page of a template in `templates/`, as one self-contained HTML text.

    Args:
        template: File name of the template, such as `report.html.j2`.
        **values: What the template names; a name that is missing raises `jinja2.UndefinedError`.
    """
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update({each.__name__: each for each in _FUNCTIONS})
    return environment.get_template(template).render(values)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and texts, such as `{"model.id": "..."}`, in their own order."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = ", ".join(map(str, value))
        else:
            flat[f"{prefix}{name}"] = "" if value is None else str(value)
    return flat


def _read(template: str) -> str:
    return (resources.files("keepsight.eval.report") / "templates" / template).read_text(encoding="utf-8")
