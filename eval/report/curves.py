"""Lines of methods: a measure against the budget, the time to the first token or the memory, with 95 % intervals."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from keepsight.eval.report.intervals import Estimate
from keepsight.eval.report.panels import TEXT, look
from keepsight.eval.report.styles import Style, in_order
from keepsight.eval.report.summary import SummaryRow


@dataclass(frozen=True)
class Measure:
    """A column of the summary, and how its axis is drawn.

    Attributes:
        name: The column.
        label: Name in plots.
        scale: Sets the y-axis for values and the ends of their intervals.
    """

    name: str
    label: str
    scale: Callable[[Axes, list[float]], None]


@dataclass(frozen=True)
class Against:
    """What a measure is drawn against.

    Attributes:
        label: Name in plots.
        value: Reads it from a row of the summary; None where it was not measured.
        scale: Sets the x-axis for some values.
        apart: Whether methods are offset sideways by a few percent, so that intervals at equal values do not overlap.
    """

    label: str
    value: Callable[[SummaryRow], float | None]
    scale: Callable[[Axes, list[float]], None]
    apart: bool = False


def draw_curves(
    axes: Axes, rows: Sequence[SummaryRow], measure: Measure, against: Against, styles: Mapping[str, Style]
) -> None:
    """One line a method, and the full cache as a level.

    Args:
        axes: Where.
        rows: Rows of one task and length, or means over several.
        measure: The y-axis.
        against: The x-axis.
        styles: Styles of all methods of the run; the place of a method in it names its marks.
    """
    estimates = [row.estimates[measure.name] for row in rows]
    measure.scale(axes, [end for each in estimates for end in (each.value, *each.ends)])
    placed = [(row, value) for row in rows if (value := against.value(row)) is not None]
    against.scale(axes, [value for _, value in placed])
    numbers = {method: f"m{number}" for number, method in enumerate(styles)}
    for row in rows:
        if row.budget is None:
            _level(axes, row.estimates[measure.name].value, against.value(row), row.method, styles, numbers)
    placed = [(row, value) for row, value in placed if row.budget is not None]
    methods = in_order(row.method for row, _ in placed)
    for place, method in enumerate(methods):
        shift = 2 ** (0.04 * (place - (len(methods) - 1) / 2)) if against.apart else 1.0
        points = [(row, value * shift) for row, value in placed if row.method == method]
        points.sort(key=lambda point: budget_entries(point[0]) or 0)
        _line(axes, [(at, row.estimates[measure.name]) for row, at in points], method, styles, numbers)
    axes.set(xlabel=against.label, ylabel=measure.label)
    look(axes)


def _level(
    axes: Axes, level: float, at: float | None, method: str, styles: Mapping[str, Style], numbers: Mapping[str, str]
) -> None:
    """A method that keeps every entry: a level, and a point where it has a place on the x-axis."""
    style, number = styles[method], numbers[method]
    axes.axhline(level, color=style.colour, linestyle=style.line, linewidth=1, label=method, gid=f"{number}-level")
    if at is not None:
        axes.plot(at, level, "*", color=style.colour, markersize=8, gid=f"{number}-point")


def _line(
    axes: Axes,
    points: Sequence[tuple[float, Estimate]],
    method: str,
    styles: Mapping[str, Style],
    numbers: Mapping[str, str],
) -> None:
    style, number = styles[method], numbers[method]
    at, estimates = zip(*points, strict=True)
    low, high = zip(*(each.ends for each in estimates), strict=True)
    axes.vlines(at, low, high, style.colour, linewidth=1, alpha=0.5, gid=f"{number}-intervals")
    width = 2.0 if method == "lookaheadkv" else 1.4
    values = [each.value for each in estimates]
    (line,) = axes.plot(at, values, style.line, color=style.colour, linewidth=width, label=method)
    # A score of 0 lies on the edge of the panel.
    line.set(marker=style.marker, markersize=4.5, clip_on=False, gid=f"{number}-line")


def budget_scale(axes: Axes, budgets: list[float]) -> None:
    """A tick at each budget, equal ratios at equal distances."""
    ticks = sorted(set(budgets))
    if not ticks:
        axes.xaxis.set_major_locator(NullLocator())
        return
    axes.set_xscale("log", base=2)
    margin = 1.35 if len(ticks) > 1 else 2.0
    axes.set_xlim(ticks[0] / margin, ticks[-1] * margin)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([f"{round(tick, 2):g}" for tick in ticks])


def budget_entries(row: SummaryRow) -> float | None:
    """The budget as a number of entries; the mean over prompts where it is a share of each."""
    return row.means["budget_entries"] if isinstance(row.budget, float) else row.budget


def budget_of(rows: Iterable[SummaryRow]) -> Against:
    """The axis of budgets: of shares where all are shares of the prompt."""
    are_shares = {isinstance(row.budget, float) for row in rows if row.budget is not None}
    return SHARE if are_shares == {True} else BUDGET


def _cost_scale(axes: Axes, values: list[float]) -> None:
    """Linear, or logarithmic where the values differ a lot."""
    if not values or min(values) <= 0 or max(values) < 4 * min(values):
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = 0.08 * (high - low) or 0.1 * high or 1.0
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    else:
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _unit_scale(axes: Axes, values: list[float]) -> None:
    """From 0, with room for every interval; a fifth of the range at least, so that noise does not look like a gain."""
    axes.set_ylim(0, min(1.05, max(0.2, 1.08 * max(values, default=1.0))))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _nats_scale(axes: Axes, values: list[float]) -> None:
    """Logarithmic above 0.01 nats, linear below, since an evicted cache may be as good as the full one, or better."""
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    axes.set_ylim(min(-0.002, 1.6 * min(values, default=0.0)), max(0.1, 1.6 * max(values, default=0.0)))
    axes.yaxis.set_major_locator(FixedLocator([-1, -0.1, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _share_scale(axes: Axes, values: list[float]) -> None:
    axes.set_ylim(max(0.0, math.floor(10 * min(values, default=0.0) - 0.5) / 10), 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _difference_scale(axes: Axes, values: list[float]) -> None:
    """Around a line at zero; a tenth of the range at least on both sides."""
    axes.axhline(0, color=TEXT, linewidth=0.8)
    most = max(0.1, *(1.08 * abs(value) for value in values))
    axes.set_ylim(-most, most)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")


SCORE = Measure("score", "score", _unit_scale)
EXCESS_NLL = Measure("excess_nll", "excess NLL (nats/token)", _nats_scale)
AGREEMENT = Measure("agreement", "top-1 agreement", _share_scale)
DIFFERENCES = (
    Measure("score", "score difference", _difference_scale),
    Measure("excess_nll", "difference of excess NLL (nats)", _difference_scale),
    Measure("agreement", "agreement difference", _difference_scale),
)
BUDGET = Against("KV budget (entries per layer and head)", budget_entries, budget_scale, apart=True)
SHARE = Against("KV budget (share of the prompt)", lambda row: row.budget, budget_scale, apart=True)
TIME = Against("time to first token (s)", lambda row: row.means["time_to_first_token"], _cost_scale)
MEMORY = Against("KV cache (MiB)", lambda row: row.means["kv_mib"], _cost_scale)
