"""The methods that a command compares (`methods=`, `budgets=`, `bits=`, `plugins=`) or serves with (`method=`)."""

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from itertools import product
from typing import Any

from keepsight.commands.config_serving import Evicting
from keepsight.commands.recipe import say_once
from keepsight.errors import Budget, UnfitModel, UserError, one_line, require_kind
from keepsight.eval.record import FULL
from keepsight.eval.sweep import Variant
from keepsight.models.targets import Target
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.methods import METHODS, Resources, make_method
from keepsight.runtime.registry import has_field
from keepsight.serving.prefix import alphabet_of, letters_of_id


def variants_of(methods: list[Any], budgets: list[Any], bits: list[int], resources: Resources) -> list[Variant]:
    """Every method at every budget; the arguments are the command's keys of these names.

    `all` stands for every method at every budget that its defaults allow; a line names what is left out. A method with
    `vary` becomes one variant per value (`_varied`).

    Raises:
        UserError: nothing is named, something is named twice, or a method cannot be made.
    """
    for budget in budgets:
        require_kind(Budget, f"budgets={budgets}: budget", budget)
    variants: list[Variant] = []
    left_out: list[tuple[str, Any, UserError]] = []
    for method, is_named in _with_all(methods):
        if method in (FULL, {"name": FULL}):
            continue  # the sweep always answers from the full cache first
        for name, label, options in _read_variants(method, bits):
            budgets_of_method = budgets if has_field(name, "budget") else [None]
            for budget in budgets_of_method:
                if any((variant.name, variant.budget) == (label, budget) for variant in variants):
                    raise UserError(
                        f"methods= and budgets= name {label!r} at budget {budget} twice; name it once",
                        field="methods",
                        code="conflict",
                    )
                try:
                    variants.append(Variant(label, make_method(name, budget, resources, **options)))
                except UserError as error:
                    if is_named or (options and not isinstance(error, UnfitModel)):
                        raise
                    left_out.append((label, budget, error))
    if left_out:
        say_once(f"methods=all leaves out {_reasons(left_out, [variant.name for variant in variants])}")
    if not variants:
        raise UserError(
            "methods= and budgets= must name at least one method that evicts, and one budget",
            field="methods",
            code="range",
        )
    return variants


ALL = "all"


def _with_all(methods: list[Any]) -> Iterator[tuple[Any, bool]]:
    """The methods, with names in place of `all`, and whether each is named by itself."""
    if ALL in methods:
        for name in METHODS:
            if name not in (FULL, "evict") and name not in methods:  # a composition has no defaults
                yield name, False
    for method in methods:
        if method != ALL:
            yield method, True


def _reasons(left_out: Iterable[tuple[str, Any, UserError]], names: list[str]) -> str:
    """Methods that could not be made, and why; with their budgets if they are among the `names` made at others."""
    subjects_by_reason: dict[str, list[str]] = {}
    for name, budget, error in left_out:
        reason = str(error).partition(": ")[2]
        subject = f"{name} at budget {budget}" if name in names else name
        subjects = subjects_by_reason.setdefault(reason, [])
        if subject not in subjects:
            subjects.append(subject)
    return "; ".join(f"{', '.join(subjects)}: {reason}" for reason, subjects in subjects_by_reason.items())


def import_plugins(names: Iterable[str]) -> None:
    """Import modules, of the working folder too, or entry points of the group keepsight; they may add to METHODS.

    UserError: one cannot be imported, or adds something to METHODS that is not a method.
    """
    working_folder = os.getcwd()
    for name in names:
        points = entry_points(group="keepsight", name=name)
        sys.path.append(working_folder)
        try:
            for point in points:
                point.load()
            if not points:
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever that code raises
            reason = one_line(f"{type(error).__name__}: {error}")
            raise UserError(
                f"plugins={name} cannot be imported ({reason}); name a module or an entry point",
                field="plugins",
                code="missing",
            ) from error
        finally:
            os.chdir(working_folder)  # paths of other keys are relative to it
            sys.path.remove(working_folder)
        for key, kind in METHODS.items():
            if not (isinstance(kind, type) and issubclass(kind, Method) and is_dataclass(kind)):
                raise UserError(
                    f"plugins={name}: METHODS[{key!r}] must be a dataclass of Method's, got {kind!r:.60}",
                    field="plugins",
                    code="type",
                )


def require_evict(method: Method, refusal: str) -> Evict:
    """The method, if it evicts entries from the cache; else a UserError with the message `refusal`."""
    if not isinstance(method, Evict):
        raise UserError(refusal, field="method", code="model")
    return method


def _read_variants(method: Any, bits: list[int]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, label and options of one of `methods`: one per value that it varies and per number of bits."""
    for name, label, options in _varied(*read_method(method)):
        yield from _by_bits(name, label, options, bits)


def _varied(name: str, label: str, options: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The method once for each combination of the values in its option `vary`: {OPTION: [VALUE, ...]}.

    An option of a part is named as `observer.window`. The label ends in the option's last name and its value, as
    `window=8`, by which a report draws scores against the values.
    """
    options = dict(options)
    vary = options.pop("vary", {})
    if not isinstance(vary, dict) or not all(isinstance(values, list) and values for values in vary.values()):
        raise UserError(
            f"methods= names {name!r} with vary: {vary!r}; write {{vary: {{OPTION: [VALUE, VALUE]}}}}",
            field="methods",
            code="type",
        )
    for values in product(*vary.values()):
        varied_options = options
        varied_label = label
        for key, value in zip(vary, values, strict=True):
            varied_options = _with_option(varied_options, str(key).split("."), value)
            varied_label += f" {str(key).rpartition('.')[2]}={value}"
        yield name, varied_label, varied_options


def _with_option(options: dict[str, Any], path: list[str], value: object) -> dict[str, Any]:
    """The options with one of them, or of a part of them, set; a part that is a name alone gets options."""
    first, *rest = path
    if not rest:
        return {**options, first: value}
    part = options.get(first, {})
    if isinstance(part, str):
        part = {"name": part}
    return {**options, first: _with_option(dict(part), rest, value)}


def _by_bits(
    name: str, label: str, options: dict[str, Any], bits: list[int]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The method once for each of `bits`, if it has that option and `options` do not set it."""
    if not bits or "bits" in options or not has_field(name, "bits"):
        yield name, label, options
        return
    for width in bits:
        yield name, f"{label} bits={width}", {**options, "bits": width}


def read_method(method: Any) -> tuple[str, str, dict[str, Any]]:
    """Name, label and options of one of `methods`."""
    if isinstance(method, str):
        options: dict[str, Any] = {"name": method}
    elif isinstance(method, dict):
        options = {str(key): value for key, value in method.items()}
    else:
        raise UserError(
            f"methods={method!r}: expected a method's name, or {{name: NAME, option: value}}",
            field="methods",
            code="type",
        )
    name = str(options.pop("name", ""))
    if not name:
        raise UserError(
            f"methods={method!r}: there is no name; write {{name: NAME, option: value}}",
            field="methods",
            code="missing",
        )
    fixed_options = {key: value for key, value in options.items() if key != "vary"}
    default_label = " ".join([name, *_option_texts(fixed_options)])
    label = str(options.pop("label", default_label))
    if FULL in (name, label):
        raise UserError(
            f"methods={method!r}: {FULL!r} is the full cache, which takes no options; give another label",
            field="methods",
            code="conflict",
        )
    if "budget" in options:
        raise UserError(
            f"methods={method!r}: there is no option 'budget'; budgets= is for all methods",
            field="methods",
            code="conflict",
        )
    return name, label, options


def _option_texts(options: dict[str, Any]) -> list[str]:
    """Options as a label shows them: `window=4`, `pool(kernel=5)`, `observer=draft_tokens(window=4)`."""
    texts = []
    for key, value in options.items():
        if not isinstance(value, dict):
            texts.append(f"{key}={value}")
            continue
        text = key
        if "name" in value:
            text += f"={value['name']}"
        inner_options = {name: option for name, option in value.items() if name != "name"}
        if inner_options:
            text += f"({', '.join(_option_texts(inner_options))})"
        texts.append(text)
    return texts


def method_of(config: Evicting, resources: Resources, **options: object) -> Method:
    """The method; `options` take precedence over the configuration's."""
    budget = config.budget if has_field(config.method, "budget") else None
    all_options = {**config.options, **options}
    return make_method(config.method, budget, resources, **all_options)


def letters_for(target: Target, budget: int | float) -> int:
    """Number of tokens that encode a prefix's id; UserError if the budget or the tokenizer has too few."""
    letters = letters_of_id(len(alphabet_of(target.tokenizer)))
    if isinstance(budget, int) and budget < letters:
        raise UserError(
            f"budget={budget} entries cannot spell an id of {letters} letters; raise budget=",
            field="budget",
            code="range",
        )
    return letters


def paged_allocation(config: Evicting) -> dict[str, Any]:
    """The options of the allocation, in pages."""
    allocate = config.options.get("allocate") or {}
    if isinstance(allocate, str):
        allocate = {"name": allocate}
    return {**allocate, "page": config.page}


def prefix_method(config: Evicting, resources: Resources) -> Evict:
    """A method whose heads keep the same numbers of entries, or whole pages; UserError for others."""
    refusal = f"method={config.method} evicts nothing from the cache, so there is no prefix to write"
    method = require_evict(method_of(config, resources), refusal)
    if config.page:
        allocate = paged_allocation(config)
        if not isinstance(method.allocate, Global):  # which keeps its trained head weights
            allocate["name"] = "global"
        method = require_evict(method_of(config, resources, allocate=allocate), refusal)
    elif not isinstance(method.allocate, Uniform):
        kind = type(method.allocate).__name__
        advice = "give page=32 for vLLM with KEEPSIGHT_RAGGED=1, or options={allocate: uniform}"
        raise UserError(
            f"method={config.method} lets heads keep different numbers of entries ({kind}); {advice}",
            field="method",
            code="conflict",
        )
    if method.every:
        raise UserError("a prefix is evicted from once: leave out the option every", field="every", code="conflict")
    return method
