"""What the benchmarks that measure methods on the samples of an evaluation share: bench hits and bench importance."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from keepsight.commands.config_bench import BenchHits, BenchImportance
from keepsight.errors import UserError
from keepsight.eval.bench.runner import Runner, TableRow
from keepsight.eval.tasks.registry import Benchmarks
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.identity import MadeWith
from keepsight.models.targets import Target

_BENCHMARKS = tuple(benchmark.name for benchmark in fields(Benchmarks))


@dataclass(frozen=True)
class SampleColumns:
    """Columns of a line that say of which sample it is, and how many lines the sample has."""

    task: str
    length: int
    sample: str
    rows_in_case: int


def require_question_seen(config: BenchHits | BenchImportance, measured: str) -> None:
    """Refuse (`UserError`) questions that are kept apart from their prompts; `measured` says what is not for them."""
    if config.question != "seen":
        raise UserError(
            f"question={config.question}: {measured} with the question seen; leave it out",
            field="question",
            code="conflict",
        )


def rows_of_samples(
    runner: Runner,
    name: str,
    samples: Iterable[RenderedSample],
    measure: Callable[[RenderedSample], Iterable[dict[str, Any]]],
    kind: type,
) -> list[TableRow]:
    """Measure the samples that the runner's folder has not, and return its rows, of earlier tasks and lengths too.

    Args:
        runner: Keeps the rows.
        name: Name of the rows' file.
        samples: The samples.
        measure: The rows of a sample without these columns.
        kind: Type of a line of the file, a `SampleColumns`.
    """
    cases = []
    for sample in samples:
        columns = {"task": sample.task, "length": sample.length, "sample": sample.id}
        cases.append((columns, sample))
    list(runner.rows(name, cases, measure, unit="sample", kind=kind))
    return list(runner.rows_so_far(name, kind))


def made_with(config: BenchHits | BenchImportance, names: Iterable[str], target: Target) -> MadeWith:
    """The settings that all rows depend on: those of `names`, and of the benchmarks."""
    values = asdict(config)
    settings = {name: values[name] for name in (*names, "protocol", *_BENCHMARKS)}
    settings["model.id"] = target.name
    return MadeWith(target.identity, settings)
