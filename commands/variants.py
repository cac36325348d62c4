"""The methods that a command compares (`methods=`, `budgets=`, `bits=`, `plugins=`) or serves with (`method=`)."""

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from typing import Any

from keepsight.commands.config_serving import Evicting
from keepsight.commands.recipe import say_once
from keepsight.errors import Budget, UserError, require_kind
from keepsight.eval.record import FULL
from keepsight.eval.sweep import Variant
from keepsight.models.targets import Target
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.methods import METHODS, Resources, make_method
from keepsight.runtime.methods.make import has_field
from keepsight.serving.prefix import alphabet_of, letters_of


def variants_of(methods: list[Any], budgets: list[Any], bits: list[int], resources: Resources) -> list[Variant]:
    """Every method at every budget; the arguments are the command's keys of these names.

    `all` stands for every method, at each budget with which it can be made by its defaults; a line names the others.
    UserError: nothing is named, something twice, or a method cannot be made.
    """
    variants: list[Variant] = []
    left: list[tuple[str, Any, UserError]] = []
    for budget in budgets:
        require_kind(Budget, f"budgets={budgets}: budget", budget)
    for given, is_asked in _with_all(methods):
        if given == FULL or given == {"name": FULL}:
            continue  # the sweep always answers from the full cache first
        for name, label, options in _by_bits(*_read_method(given), bits):
            for budget in budgets if has_field(name, "budget") else [None]:
                if any((each.name, each.budget) == (label, budget) for each in variants):
                    raise UserError(f"methods= and budgets= name {label!r} at budget {budget} twice; name it once")
                try:
                    variants.append(Variant(label, make_method(name, budget, resources, **options)))
                except UserError as error:
                    if is_asked or options:
                        raise
                    left.append((label, budget, error))
    if left:
        say_once(f"methods=all leaves out {_listed(left, [each.name for each in variants])}")
    if not variants:
        raise UserError("methods= and budgets= must name at least one method that evicts, and one budget")
    return variants


ALL = "all"


def _with_all(methods: list[Any]) -> Iterator[tuple[Any, bool]]:
    """The methods, with names in place of `all`, and whether each was asked for by itself."""
    if ALL in methods:
        for name in METHODS:
            if name not in (FULL, "evict") and name not in methods:  # a composition has no defaults
                yield name, False
    for given in methods:
        if given != ALL:
            yield given, True


def _listed(left: Iterable[tuple[str, Any, UserError]], made: list[str]) -> str:
    """Methods that could not be made, and why; with their budgets if they are made at others."""
    reasons: dict[str, list[str]] = {}
    for name, budget, error in left:
        subject = f"{name} at budget {budget}" if name in made else name
        subjects = reasons.setdefault(str(error).partition(": ")[2], [])
        subjects += [subject] if subject not in subjects else []
    return "; ".join(f"{', '.join(subjects)}: {why}" for why, subjects in reasons.items())


def import_plugins(names: Iterable[str]) -> None:
    """Import modules, of the working folder too, or entry points of the group keepsight; they may add to METHODS.

    UserError: one cannot be imported, or adds something to METHODS that is not a method.
    """
    here = os.getcwd()
    for name in names:
        points = entry_points(group="keepsight", name=name)
        sys.path.append(here)
        try:
            for point in points:
                point.load()
            if not points:
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever that code raises
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"plugins={name} cannot be imported ({said}); name a module or an entry point") from error
        finally:
            os.chdir(here)  # paths of other keys are relative to it
            sys.path.remove(here)
        for key, kind in METHODS.items():
            if not (isinstance(kind, type) and issubclass(kind, Method) and is_dataclass(kind)):
                raise UserError(f"plugins={name}: METHODS[{key!r}] must be a dataclass of Method's, got {kind!r:.60}")


def require_evict(method: Method, refusal: str) -> Evict:
    """The method, if it evicts entries from the cache; else a UserError with the message `refusal`."""
    if not isinstance(method, Evict):
        raise UserError(refusal)
    return method


def _by_bits(
    name: str, label: str, options: dict[str, Any], bits: list[int]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The method once for each of `bits`, if it has that option and `options` do not set it."""
    if not bits or "bits" in options or not has_field(name, "bits"):
        yield name, label, options
        return
    for each in bits:
        yield name, f"{label} bits={each}", options | {"bits": each}


def _read_method(given: Any) -> tuple[str, str, dict[str, Any]]:
    """Name, label and options of one of `methods`."""
    if not isinstance(given, str | dict):
        raise UserError(f"methods={given!r}: expected a method's name, or {{name: NAME, option: value}}")
    options = {"name": given} if isinstance(given, str) else {str(key): value for key, value in given.items()}
    name = str(options.pop("name", ""))
    label = str(options.pop("label", " ".join([name, *_said(options)])))
    if FULL in (name, label):
        raise UserError(f"methods={given!r}: {FULL!r} is the full cache, which takes no options; give another label")
    if "budget" in options:
        raise UserError(f"methods={given!r}: there is no option 'budget'; budgets= is for all methods")
    return name, label, options


def _said(options: dict[str, Any]) -> list[str]:
    """Options as a label shows them: `window=4`, `pool(kernel=5)`, `observer=draft_tokens(window=4)`."""
    said = []
    for key, value in options.items():
        if isinstance(value, dict):
            inner = ", ".join(_said({each: value[each] for each in value if each != "name"}))
            name = f"={value['name']}" if "name" in value else ""
            said.append(f"{key}{name}({inner})" if inner else f"{key}{name}")
        else:
            said.append(f"{key}={value}")
    return said


def method_of(config: Evicting, resources: Resources, **options: object) -> Method:
    """The method; `options` take precedence over the configuration's."""
    budget = config.budget if has_field(config.method, "budget") else None
    return make_method(config.method, budget, resources, **{**config.options, **options})


def letters_for(target: Target, budget: int | float) -> int:
    """Number of tokens that encode a prefix's id; UserError if the budget or the tokenizer has too few."""
    letters = letters_of(len(alphabet_of(target.tokenizer)))
    if isinstance(budget, int) and budget < letters:
        raise UserError(f"budget={budget} entries cannot spell an id of {letters} letters; raise budget=")
    return letters


def prefix_method(config: Evicting, resources: Resources) -> Evict:
    """A method whose heads keep the same numbers of entries, or whole pages; UserError for others."""
    refusal = f"method={config.method} evicts nothing from the cache, so there is no prefix to write"
    method = require_evict(method_of(config, resources), refusal)
    if config.page:
        shared = isinstance(method.allocate, Global)  # keeps its trained head weights
        allocate = {"page": config.page} if shared else {"name": "global", "page": config.page}
        given = config.options.get("allocate")
        given = {"name": given} if isinstance(given, str) else given or {}
        method = require_evict(method_of(config, resources, allocate={**given, **allocate}), refusal)
    elif not isinstance(method.allocate, Uniform):
        kind = type(method.allocate).__name__
        advice = "give page=32 for vLLM with KEEPSIGHT_RAGGED=1, or options={allocate: uniform}"
        raise UserError(f"method={config.method} lets heads keep different numbers of entries ({kind}); {advice}")
    if method.every:
        raise UserError("a prefix is evicted from once: leave out the option every")
    return method
