"""Draws the plot of README from the first table of RESULTS.md.

python docs/plot_results.py
"""

import re
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from keepsight.eval.report.figures import STYLES, look
from keepsight.runtime.registry import Style

DOCS = Path(__file__).parent
ROWS = {  # a row of the table, as it is labelled and drawn
    "StreamingLLM": ("StreamingLLM", STYLES["streamingllm"]),
    "untrained soft tokens": ("untrained soft tokens", Style(STYLES["lookaheadkv"].colour, "o", ":")),
    "SpecKV (26-layer draft)": ("SpecKV", STYLES["speckv"]),
    "SnapKV, mean over 3": ("SnapKV", STYLES["snapkv"]),
    "DapQ": ("DapQ", STYLES["dapq"]),
    "LAQ": ("LAQ", STYLES["laq"]),
    "LookaheadKV, the paper's selection": (
        "LookaheadKV, the paper's selection",
        Style(STYLES["lookaheadkv"].colour, "o", "--"),
    ),
    "**LookaheadKV** (shipped)": ("LookaheadKV", STYLES["lookaheadkv"]),
    "oracle attention (mean over 3)": ("oracle attention", STYLES["oracle"]),
}
BUDGETS = [64, 128, 256]


def measured() -> dict[str, list[tuple[float, float, float]]]:
    """By row of the table, for each budget: the mean and the ends of its interval."""
    table = (DOCS.parent / "RESULTS.md").read_text("utf-8").partition("| method |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    numbers = {name: [re.findall(r"\d\.\d+", cell) for cell in row] for name, *row in cells}
    return {name: [(float(a), float(b), float(c)) for a, b, c in row] for name, row in numbers.items()}


def draw() -> Figure:
    """Excess NLL against the budget."""
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, (name, (label, style)) in enumerate(ROWS.items()):
        means, low, high = zip(*measured()[name], strict=True)
        budgets = [budget * 2 ** (0.03 * (place - 4)) for budget in BUDGETS]  # so that intervals stay apart
        axes.vlines(budgets, low, high, style.colour, linewidth=1, alpha=0.5)
        width = 2.4 if label == "LookaheadKV" else 1.4
        axes.plot(budgets, means, style.line, marker=style.marker, color=style.colour, linewidth=width, label=label)
    axes.set(xscale="log", ylim=0, xlabel="entries kept per layer and KV head", ylabel="excess NLL (nats a token)")
    axes.xaxis.set(major_locator=FixedLocator(BUDGETS), minor_locator=NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    look(axes)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


if __name__ == "__main__":
    draw().savefig(DOCS / "images" / "excess_nll.png", facecolor="white")
