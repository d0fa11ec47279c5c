"""The latency benchmark's picture: time to the first token by passages, a line for each arm."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from ..evaluation.analyses.figures import new_figure, save_analysis

READING = (
    "Median time to the first token, both scales logarithmic; bars are the middle half of the rounds. Dashed lines are "
    "the shortest times that the machine's own peaks allow. Slots were made before: the encoder's time is not in it."
)
_WITH_LIMIT = ("standard_rag", "adaptive", "slots_cached")


def draw(report: dict[str, Any]) -> Figure:
    """A panel for each dtype, of the sizes with the smallest batch."""
    smallest = min(size["batch_size"] for size in report["sizes"])
    sizes = sorted((size for size in report["sizes"] if size["batch_size"] == smallest), key=lambda size: size["k"])
    dtypes = list(report["peaks"])
    figure, panels = new_figure(4.8 * len(dtypes), 4.0, ncols=len(dtypes), sharey=True, squeeze=False)
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        own = [size for size in sizes if size["dtype"] == dtype]
        passages = [size["k"] for size in own]
        for arm in own[0]["arms"]:
            first = [size["arms"][arm]["first_token"] for size in own]
            median = [1000 * each["median"] for each in first]
            below = [1000 * (each["median"] - each["lower"]) for each in first]
            above = [1000 * (each["upper"] - each["median"]) for each in first]
            line = axes.errorbar(passages, median, [below, above], marker="o", markersize=4, capsize=2, label=arm)
            if arm in _WITH_LIMIT:
                limit = [1000 * size["arms"][arm]["first_token_limit"] for size in own]
                axes.plot(passages, limit, linestyle="--", linewidth=1, color=line[0].get_color())
        axes.set(xscale="log", yscale="log", xlabel="passages", title=dtype, xticks=passages)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0][0].set_ylabel("time to the first token, ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def save(folder: Path, report: dict[str, Any]) -> None:
    """Writes the picture and the report: `latency.png`, `latency.svg`, `latency.json`."""
    save_analysis(folder, "latency", draw(report), report, READING)
