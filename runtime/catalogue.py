"""What the registry says of its methods: name, paper, cost and first sentence, for tables and `keepsight methods`.

Import `keepsight.runtime.methods` first: it registers them.
"""

import inspect
import re
from dataclasses import dataclass

from keepsight.runtime.evict import Evict
from keepsight.runtime.registry import LABELS, METHODS

_SOURCES = re.compile(r" ?\((?=[^()]*(?:arXiv|section|algorithm|PR \d|after CPC))[^()]*\)")
"""A parenthesis of a docstring that names a source."""
_PAPER = re.compile(r"arXiv (\d{4}\.\d{4,5})|(https://openreview\.net/forum\?id=\w+)")


@dataclass(frozen=True)
class Description:
    """A method as tables show it.

    Attributes:
        name: What `methods=` calls it.
        label: What plots and pages call it.
        paper: The address of its paper, empty if it has none.
        summary: The first sentence of its docstring, without sources.
        cost: What it takes beyond a prefill.
    """

    name: str
    label: str
    paper: str
    summary: str
    cost: str


def descriptions(section: str) -> list[Description]:
    """The methods of one of `keepsight.runtime.generate.SECTIONS`, by their names; not the full cache."""
    described = []
    for name in sorted(METHODS):
        kind = METHODS[name]
        if kind.section == section and not kind.is_full_cache:
            described.append(describe(name))
    return described


def describe(name: str) -> Description:
    """A registered method."""
    kind = METHODS[name]
    first_paragraph = str(inspect.getdoc(kind)).partition("\n\n")[0]
    summary = _SOURCES.sub("", " ".join(first_paragraph.split()))
    return Description(name, LABELS.get(name, kind.__name__), _paper_of(kind), summary, kind.cost)


def _paper_of(kind: type) -> str:
    """The address of the paper that a method's docstring names, or that of the method that it is a variant of."""
    for base in kind.__mro__:
        if base is Evict:  # whose docstring names papers of its options
            return ""
        if base not in METHODS.values():
            continue
        source = _PAPER.search(base.__doc__ or "")
        if source and source[1]:
            return f"https://arxiv.org/abs/{source[1]}"
        if source:
            return source[0]
    return ""
