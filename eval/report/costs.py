"""What methods take: seconds by phase, decoding speed, KV entries and memory."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepsight.eval.report.tables import Column, Table

_COLUMNS = (
    Column("budget", "budget"),
    Column("method", "method", is_text=True),
    *(Column(phase, f"{phase} (s)") for phase in ("prefill", "draft", "observe", "select")),
    Column("time_to_first_token", "time to first token (s)"),
    Column("question", "question (s)"),
    Column("tokens_per_second", "tokens/s of its batch", digits=1),
    Column("rows", "batch size", digits=1),
    Column("kept", "KV entries kept", digits=1),
    Column("kv_mib", "KV cache (MiB)", digits=2),
)


@dataclass(frozen=True)
class Timing:
    """Means of one method and budget over all samples.

    Attributes:
        method: Name of the method.
        budget: KV entries per layer and KV head; None where all are kept.
        seconds: Seconds of each phase before the first token.
        time_to_first_token: Sum of these seconds.
        tokens_per_second: Decoding speed of the whole batch; None where nothing was left to decode.
        rows: Number of answers in that batch.
        recall: Share of the entries that the answer attends to most which were kept; None where it has no meaning.
        kept: KV entries kept per layer and KV head.
        kv_mib: Size of keys and values in MiB.
    """

    method: str
    budget: int | None
    seconds: dict[str, float]
    time_to_first_token: float
    tokens_per_second: float | None
    rows: float
    recall: float | None
    kept: float
    kv_mib: float


def timings(rows: Sequence[dict[str, Any]]) -> list[Timing]:
    """Mean seconds, kept entries and cache size for each method and budget, the full cache first."""
    variants: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        variants[row["budget"] or 0, row["method"]].append(row)
    return [_timing(variants[key]) for key in sorted(variants)]


def cost_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Means over samples of every method and budget."""
    return Table(
        "costs",
        "Time and memory, means over samples.",
        _COLUMNS,
        [
            {
                "budget": each.budget,
                "method": each.method,
                **each.seconds,
                **{
                    name: getattr(each, name)
                    for name in ("time_to_first_token", "tokens_per_second", "rows", "kept", "kv_mib")
                },
            }
            for each in timings(rows)
        ],
    )


def _timing(rows: list[dict[str, Any]]) -> Timing:
    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    speeds = [row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None]
    recalls = [row["recall"] for row in rows if row["recall"] is not None]
    return Timing(
        method=rows[0]["method"],
        budget=rows[0]["budget"],
        seconds={phase: statistics.fmean(row["seconds"][phase] for row in rows) for phase in rows[0]["seconds"]},
        time_to_first_token=mean("time_to_first_token"),
        tokens_per_second=statistics.fmean(speeds) if speeds else None,
        rows=mean("rows"),
        recall=statistics.fmean(recalls) if recalls else None,
        kept=mean("kept"),
        kv_mib=mean("kv_bytes") / 2**20,
    )
