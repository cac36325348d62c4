"""All benchmarks by name, and the tasks that a name in `tasks=` stands for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest
from keepsight.eval.tasks.helmet import Helmet
from keepsight.eval.tasks.jsonl import Jsonl
from keepsight.eval.tasks.judged import LongWriter, MtBench
from keepsight.eval.tasks.longbench import LongBench, LongBenchV2
from keepsight.eval.tasks.longproc import LongProc
from keepsight.eval.tasks.milebench import MileBench
from keepsight.eval.tasks.niah import Niah
from keepsight.eval.tasks.reconstruction import ReconstructionTask
from keepsight.eval.tasks.ruler import Ruler
from keepsight.eval.tasks.samples import RenderedSample


@dataclass
class Benchmarks:
    """Every benchmark under its name, with its keys."""

    niah: Niah = field(default_factory=Niah)
    reconstruction: ReconstructionTask = field(default_factory=ReconstructionTask)
    ruler: Ruler = field(default_factory=Ruler)
    longbench: LongBench = field(default_factory=LongBench)
    longbench_v2: LongBenchV2 = field(default_factory=LongBenchV2)
    longproc: LongProc = field(default_factory=LongProc)
    helmet: Helmet = field(default_factory=Helmet)
    milebench: MileBench = field(default_factory=MileBench)
    mt_bench: MtBench = field(default_factory=MtBench)
    longwriter: LongWriter = field(default_factory=LongWriter)
    jsonl: Jsonl = field(default_factory=Jsonl)


def make_all(benchmarks: Benchmarks, names: Sequence[str], request: TaskRequest) -> list[RenderedSample]:
    """The samples of the named tasks, each name a benchmark's, such as `ruler`, or a task's; UserError if unknown."""
    samples: list[RenderedSample] = []
    tasks: list[tuple[Benchmark, str]] = []
    for name in names:
        tasks += tasks_of(benchmarks, name, request.protocol)
    for benchmark, task in tasks:
        samples += benchmark.samples(task, request)
    return samples


def tasks_of(benchmarks: Benchmarks, name: str, protocol: Protocol) -> list[tuple[Benchmark, str]]:
    """The tasks that a name stands for, each with its benchmark; UserError if it is unknown, or none is there."""
    by_name: dict[str, Benchmark] = {field.name: getattr(benchmarks, field.name) for field in fields(Benchmarks)}
    for owner in sorted(by_name, key=len, reverse=True):
        if name == owner or name.startswith(f"{owner}_"):
            return _tasks_of_benchmark(owner, by_name[owner], name, protocol)
    raise UserError(
        f"task {name!r} is unknown; choose from {', '.join(by_name)}, or one of their tasks",
        field="tasks",
        code="unknown",
    )


def _tasks_of_benchmark(owner: str, benchmark: Benchmark, name: str, protocol: Protocol) -> list[tuple[Benchmark, str]]:
    """As `tasks_of`, for a name that begins with that of its benchmark."""
    task_name = name[len(owner) + 1 :]
    groups = benchmark.groups(protocol)
    if task_name in groups:
        if not groups[task_name]:
            raise UserError(
                f"task {name!r}: none of its files is there, or the protocol takes its tasks out",
                field="tasks",
                code="missing",
            )
        return [(benchmark, task) for task in groups[task_name]]
    if task_name in benchmark.TASKS:
        return [(benchmark, task_name)]
    task_names = [f"{owner}_{task}" for task in (*groups, *benchmark.TASKS) if task]
    raise UserError(f"task {name!r} is unknown; {owner} has {', '.join(task_names)}", field="tasks", code="unknown")
