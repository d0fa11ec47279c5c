"""The figure of quality against compression rate, from results that hold several rates of a checkpoint.

A point is a method at a rate (`arcaligner_x4`): its F1 across the tokens of the passages that one position of the
prompt stands for. Baselines at the same rate read as many positions. No model runs.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from ..methods import METHODS, split_name
from ..results import MAIN, method_titles
from .figures import COLORS, draw_curve, new_figure, save_analysis

# The ends of what can be reached, drawn as horizontal lines.
BOUNDS = {"naive": ":", "full_text_lora": "--"}
CAPTION = (
    "Each line is a method, each point a rate at which the same checkpoint is read: to the right, one position of the "
    "prompt stands for more tokens of the passages (measured). Baselines at a rate read as many positions as there are "
    "slots. Dotted: closed book; dashed: the fine-tuned full text. Bars are 95 % bootstrap intervals over questions."
)


def analyze(results: dict[str, Any]) -> dict[str, Any]:
    """The points of each method that was asked at several rates.

    Returns:
        `dict`: `{title: {"curves": {title: [point, ...]}, "bounds": {title: [mean, low, high]}}}`, a point with
        `tokens_per_slot` (`None`: the aligner's own rate), `compression_rate`, `f1` and `em`.
    """
    sets = {}
    for title, entry in results["sets"].items():
        curves: dict[str, list[dict[str, Any]]] = {}
        for name in method_titles({title: entry}):
            numbers, (method, rate) = entry["methods"][name], split_name(name)
            if rate is not None or method.name == MAIN:
                point = {key: numbers[key] for key in ("compression_rate", "f1", "em")}
                curves.setdefault(method.title, []).append({"tokens_per_slot": rate, **point})
        curves = {
            name: sorted(points, key=lambda point: point["compression_rate"])
            for name, points in curves.items()
            if len(points) > 1
        }
        if curves:
            known = [name for name in BOUNDS if name in entry["methods"]]
            bounds = {METHODS[name].title: entry["methods"][name]["f1"] for name in known}
            sets[title] = {"curves": curves, "bounds": bounds}
    return sets


def draw(sets: dict[str, dict[str, Any]]) -> Figure:
    """A panel for each set of questions."""
    figure, (panels,) = new_figure(3.4 * len(sets) + 0.6, 3.5, ncols=len(sets), sharex=True, sharey=True, squeeze=False)
    titles = list(dict.fromkeys(title for entry in sets.values() for title in entry["curves"]))
    for axes, (title, entry) in zip(panels, sets.items(), strict=True):
        for method, curve in entry["curves"].items():
            color = COLORS[titles.index(method) % len(COLORS)]
            draw_curve(axes, curve, "compression_rate", "f1", label=method, color=color)
        for name, line in BOUNDS.items():
            if bound := entry["bounds"].get(METHODS[name].title):
                axes.axhline(bound[0], color="grey", linestyle=line, linewidth=1)
        axes.set(xscale="log", title=title)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("F1, %")
    figure.supxlabel("tokens of the passages per position", fontsize=10)
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def save_rates(folder: Path, results: dict[str, Any]) -> None:
    """Writes `rates.svg` and `rates.json`."""
    sets = analyze(results)
    if not sets:
        raise ValueError(
            "No method was asked at several rates. `python -m arcaligner evaluate --tokens-per-slot 4,8,16,segment`, "
            "with the other options of the run, adds them."
        )
    save_analysis(folder, "rates", draw(sets), {"sets": sets}, CAPTION)
