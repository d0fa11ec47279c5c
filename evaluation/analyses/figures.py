"""Shared by the figures: the style, curves with intervals, and the files that each one writes."""

import io
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no window: files only
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...common.files import write_whole

# Also distinguishable with color blindness (Okabe and Ito).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
STYLE = {
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "font.size": 10,
    "legend.frameon": False,
    "svg.hashsalt": "arcaligner",  # the same picture is the same file
    "savefig.bbox": "tight",
}


def new_figure(width: float = 7.0, height: float = 3.5, **subplots: Any):
    """A figure and its axes, in inches, in the style of all analyses."""
    with plt.rc_context(STYLE):
        return plt.subplots(figsize=(width, height), layout="constrained", **subplots)


def save_analysis(folder: Path, name: str, figure: Figure, data: dict[str, Any], caption: str) -> None:
    """Writes `<name>.svg`, and `<name>.json` with the numbers and, as `reading`, the caption."""
    picture = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    write_whole(folder / f"{name}.svg", picture.getvalue())
    plt.close(figure)
    write_whole(folder / f"{name}.json", json.dumps({"reading": caption, **data}, indent=1, ensure_ascii=False) + "\n")


def draw_curve(axes: Axes, points: list[dict[str, Any]], across: str, metric: str, **style: Any) -> None:
    """A line of a metric of the points, with its intervals, over another of their numbers."""
    means, lows, highs = np.transpose([point[metric] for point in points])
    style = {"marker": "o", "markersize": 4, "capsize": 2} | style
    reach = np.maximum(0, [means - lows, highs - means])
    axes.errorbar([point[across] for point in points], means, reach, **style)
