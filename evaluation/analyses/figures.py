"""The figures of the pages: F1 against the compression, and against the time to the first token.

In the first, a point is a method with a number of tokens per slot (`arcaligner_x4`): F1 by tokens of the passages per
position of the prompt. In the second, a point is a way to give twenty passages to the model.
"""

import io
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no window: files only
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from ...common.files import write_atomically
from ...zoom_arcaligner import COARSER
from ..methods import split_name
from ..results import MAIN, method_titles
from .speed import ZOOMED, find_size, first_token_ms

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
    "svg.hashsalt": "arcaligner",  # equal figures give equal files
    "savefig.bbox": "tight",
}
BOUNDS = {"naive": ":", "full_text_lora": "--"}  # the ends of what can be reached, drawn as horizontal lines
PASSAGES = 20  # in the time to the first token


def new_figure(width: float, height: float, **subplots: Any):
    """A figure of `width` and `height` inches in the style of all figures, and its axes."""
    with plt.rc_context(STYLE):
        return plt.subplots(figsize=(width, height), layout="constrained", **subplots)


def save_figure(path: Path, figure: Figure) -> None:
    """Writes an SVG."""
    picture = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    write_atomically(path, picture.getvalue())
    plt.close(figure)


def compression_curves(entry: dict[str, Any]) -> dict[str, list[tuple[float, list[float]]]]:
    """Points of each method that was evaluated at several compressions, by its title: tokens of the passages per
    position, and F1 with its interval."""
    curves: dict[str, list[tuple[float, list[float]]]] = {}
    for name in method_titles({"": entry}):
        numbers, (method, tokens_per_slot) = entry["methods"][name], split_name(name)
        if tokens_per_slot is not None or method.name in (MAIN, ZOOMED):
            curves.setdefault(method.title, []).append((numbers["compression_rate"], numbers["f1"]))
    return {title: sorted(points) for title, points in curves.items() if len(points) > 1}


def draw_compressions(sets: dict[str, Any]) -> Figure:
    """F1 by compression: a panel for each of the `sets` with methods at several compressions."""
    curves = {title: points for title, entry in sets.items() if (points := compression_curves(entry))}
    methods = dict.fromkeys(name for by_method in curves.values() for name in by_method)
    colors = dict(zip(methods, cycle(COLORS), strict=False))
    size = 3.4 * len(curves) + 0.6, 3.5
    figure, (panels,) = new_figure(*size, ncols=len(curves), sharex=True, sharey=True, squeeze=False)
    for axes, (title, of_set) in zip(panels, curves.items(), strict=True):
        for method, points in of_set.items():
            compressions = [compression for compression, _ in points]
            means, lows, highs = np.transpose([f1 for _, f1 in points])
            style = {"marker": "o", "markersize": 4, "capsize": 2, "color": colors[method]}
            axes.errorbar(compressions, means, [means - lows, highs - means], label=method, **style)
        for name, line in BOUNDS.items():
            if name in sets[title]["methods"]:
                axes.axhline(sets[title]["methods"][name]["f1"][0], color="grey", linestyle=line, linewidth=1)
        axes.set(xscale="log", title=title)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("F1, %")
    figure.supxlabel("tokens of the passages per position", fontsize=10)
    legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    handles = {label: handle for legend in legends for handle, label in legend}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def draw_bars(bars: dict[tuple[str, str], dict[str, float]], label: str) -> Figure:
    """Grouped bars: a panel for each backbone, a group for each set, a bar for each method; `bars` are by backbone and
    set, then by method."""
    backbones = list(dict.fromkeys(backbone for backbone, _ in bars))
    figure, (panels,) = new_figure(4.6 * len(backbones) + 0.6, 3.4, ncols=len(backbones), sharey=True, squeeze=False)
    methods = list(dict.fromkeys(method for values in bars.values() for method in values))
    width = 0.8 / len(methods)
    for axes, backbone in zip(panels, backbones, strict=True):
        sets = {title: values for (name, title), values in bars.items() if name == backbone}
        for number, method in enumerate(methods):
            places = np.arange(len(sets)) - 0.4 + (number + 0.5) * width
            axes.bar(places, [values.get(method, 0.0) for values in sets.values()], width, label=method)
        axes.set_xticks(range(len(sets)), list(sets), fontsize=8)
        axes.set_title(backbone, fontsize=10)
    panels[0].set_ylabel(label)
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def draw_ratios(sets: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    """EM and F1 by measured tokens per slot, a panel for each set; `sets` has the numbers of each set by ratio."""
    figure, (panels,) = new_figure(3.6 * len(sets) + 0.6, 3.2, ncols=len(sets), sharey=True, squeeze=False)
    for axes, (title, numbers) in zip(panels, sets.items(), strict=True):
        points = sorted(numbers.values(), key=lambda point: point["compression_rate"])
        compressions = [point["compression_rate"] for point in points]
        for metric, name in (("em", "EM"), ("f1", "F1")):
            axes.plot(compressions, [point[metric][0] for point in points], marker="o", markersize=4, label=name)
        axes.set(xscale="log", title=title, xlabel="tokens per slot, measured")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(compressions, [f"{compression:.0f}" for compression in compressions])
    # For all panels, which share the axis. An end that is set before the last panel is drawn would not change any more.
    panels[0].set(ylabel="%", ylim=(0, None))
    panels[0].legend()
    return figure


def speed_curves(report: dict[str, Any], sets: dict[str, Any]) -> dict[str, list[tuple[float, float, int | str]]]:
    """Points of the figure for each way to give `PASSAGES` to the model: milliseconds to the first token, of a latency
    `report`; mean F1 of the `sets`; and tokens per slot. A method that lacks a set has no points."""
    default = report["own_tokens_per_slot"]
    curves: dict[str, list[tuple[float, float, int | str]]] = {}

    def add(title: str, arm: str, size: dict[str, Any], method: str, tokens_per_slot: int | str) -> None:
        if all(method in entry["methods"] for entry in sets.values()):
            f1 = sum(entry["methods"][method]["f1"][0] for entry in sets.values()) / len(sets)
            curves.setdefault(title, []).append((first_token_ms(size, arm), f1, tokens_per_slot))

    for tokens_per_slot in dict.fromkeys(size["tokens_per_slot"] for size in report["sizes"]):
        size = find_size(report, PASSAGES, tokens_per_slot)
        method = MAIN if tokens_per_slot == default else f"{MAIN}_x{tokens_per_slot}"
        add("slots, encoded beforehand", "off", size, method, tokens_per_slot)
        add("slots, cached", "slots_cached", size, method, tokens_per_slot)
        if ZOOMED in size["arms"]:
            of_zoom = ZOOMED if tokens_per_slot == COARSER * default else f"{ZOOMED}_x{tokens_per_slot}"
            add("slots with zoom", ZOOMED, size, of_zoom, tokens_per_slot)
    size = find_size(report, PASSAGES, default)
    add("text, fine-tuned", "standard_rag", size, "full_text_lora", "text")
    add("text, fine-tuned, cached", "standard_rag_cached", size, "full_text_lora", "text")
    return curves


def draw_speed(report: dict[str, Any], sets: dict[str, Any]) -> Figure:
    """F1 by time to the first token, each point with its tokens per slot."""
    figure, axes = new_figure(6.4, 3.8)
    for name, points in speed_curves(report, sets).items():
        axes.plot([ms for ms, *_ in points], [f1 for _, f1, _ in points], marker="o", label=name)
        for ms, f1, tokens_per_slot in points:
            axes.annotate(tokens_per_slot, (ms, f1), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(xlabel="time to the first token, ms", ylabel="F1, %", xscale="log", ylim=(0, None))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
