"""What each method costs: seconds by phase, decoding speed, KV entries and memory."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from keepsight.eval.report.styles import in_order
from keepsight.eval.report.tables import Cells, Column, Table
from keepsight.eval.results import Row

_PHASES = ("prefill", "draft", "observe", "select")
_COLUMNS = (
    Column("budget", "budget"),
    Column("method", "method", is_text=True),
    *(Column(phase, f"{phase} (s)") for phase in _PHASES),
    Column("time_to_first_token", "time to first token (s)"),
    Column("question", "question (s)"),
    Column("tokens_per_second", "tokens/s of its batch", digits=1),
    Column("rows", "batch size", digits=1),
    Column("kept", "KV entries kept", digits=1),
    Column("kv_mib", "KV cache (MiB)", digits=2),
)


def cost_table(rows: Sequence[Row]) -> Table:
    """Means over all samples of every method and budget, the full cache first."""
    order = {method: place for place, method in enumerate(in_order(row["method"] for row in rows))}
    variants: dict[tuple[float, int], list[Row]] = defaultdict(list)
    for row in rows:
        variants[row["budget"] or 0, order[row["method"]]].append(row)
    cells = [_cells(variants[key]) for key in sorted(variants)]
    return Table("costs", "Time and memory, means over samples.", _COLUMNS, cells)


def _cells(rows: list[Row]) -> Cells:
    speeds = [row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None]
    return {
        "budget": rows[0]["budget"],
        "method": rows[0]["method"],
        **{phase: statistics.fmean(row["seconds"][phase] for row in rows) for phase in (*_PHASES, "question")},
        **{name: statistics.fmean(row[name] for row in rows) for name in ("time_to_first_token", "rows", "kept")},
        "tokens_per_second": statistics.fmean(speeds) if speeds else None,
        "kv_mib": statistics.fmean(row["kv_bytes"] for row in rows) / 2**20,
    }
