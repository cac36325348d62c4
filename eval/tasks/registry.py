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
from keepsight.eval.tasks.reconstruction import Reconstruction
from keepsight.eval.tasks.ruler import Ruler
from keepsight.eval.tasks.samples import RenderedSample


@dataclass
class Benchmarks:
    """Every benchmark under its name, with its keys."""

    niah: Niah = field(default_factory=Niah)
    reconstruction: Reconstruction = field(default_factory=Reconstruction)
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
    tasks = [pair for name in names for pair in tasks_of(benchmarks, name, request.protocol)]
    return [sample for benchmark, task in tasks for sample in benchmark.samples(task, request)]


def tasks_of(benchmarks: Benchmarks, name: str, protocol: Protocol) -> list[tuple[Benchmark, str]]:
    """The tasks that a name stands for, each with its benchmark; UserError if it is unknown, or none is there."""
    known: dict[str, Benchmark] = {each.name: getattr(benchmarks, each.name) for each in fields(Benchmarks)}
    for owner in sorted(known, key=len, reverse=True):
        if name == owner or name.startswith(f"{owner}_"):
            benchmark, rest = known[owner], name[len(owner) + 1 :]
            groups = benchmark.groups(protocol)
            if rest in groups and not groups[rest]:
                raise UserError(f"task {name!r}: none of its files is there, or the protocol takes its tasks out")
            if rest in groups or rest in benchmark.TASKS:
                return [(benchmark, task) for task in groups.get(rest, [rest])]
            parts = [part for part in (*groups, *benchmark.TASKS) if part]
            raise UserError(f"task {name!r} is unknown; {owner} has {', '.join(f'{owner}_{part}' for part in parts)}")
    raise UserError(f"task {name!r} is unknown; choose from {', '.join(known)}, or one of their tasks")
