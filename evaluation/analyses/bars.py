"""Panels of grouped bars with their intervals."""

import itertools

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .figures import COLOURS, new_figure

# By group and title of a bar: mean, low and high end of its interval. A bar that is not there leaves a gap.
Groups = dict[str, dict[str, list[float]]]


def draw_panels(panels: dict[str, Groups], label: str) -> Figure:
    """
    A figure with a panel of grouped bars for each entry, two in a row.

    Args:
        panels (`dict[str, Groups]`): By title of the panel. A bar has the same colour in all of them.
        label (`str`): What the height of a bar is.
    """
    titles = dict.fromkeys(bar for groups in panels.values() for bars in groups.values() for bar in bars)
    colours = dict(zip(titles, itertools.cycle(COLOURS), strict=False))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = new_figure(4.6 * columns, 2.5 * rows + 0.5, nrows=rows, ncols=columns, squeeze=False, sharey=True)
    for axes, (title, groups) in zip(grid.flat, panels.items(), strict=False):
        draw_groups(axes, groups, colours)
        axes.set_title(title)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel(label)
    patches = [Patch(color=colour, label=title) for title, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=2 * columns, frameon=False)
    return figure


def draw_groups(axes: Axes, groups: Groups, colours: dict[str, str]) -> None:
    """The bars of each group side by side, in the order of `colours`."""
    width = 0.8 / len(colours)
    for number, (title, colour) in enumerate(colours.items()):
        found = {place: bars[title] for place, bars in enumerate(groups.values()) if title in bars}
        if not found:
            continue
        shift = (number - (len(colours) - 1) / 2) * width
        means, lows, highs = np.array(list(found.values())).T
        reach = np.maximum(0, [means - lows, highs - means])  # an interval of one value may miss it by rounding
        axes.bar(
            [place + shift for place in found], means, width, yerr=reach, color=colour, error_kw={"linewidth": 0.8}
        )
    axes.set_xticks(range(len(groups)), list(groups))
