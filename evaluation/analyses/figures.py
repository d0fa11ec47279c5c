"""What each analysis leaves behind: `<name>.png`, `<name>.svg`, `<name>.json` with the numbers and how to read them."""

import json
import os
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: files only
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from ...train.saving import write_whole

# Told apart by people who see colours differently, too (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
STYLE = {
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
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
    """A figure and its axes, inches wide and high, in the one style of all analyses."""
    with plt.rc_context(STYLE):
        return plt.subplots(figsize=(width, height), layout="constrained", **subplots)


def save_analysis(folder: Path, name: str, figure: Figure, data: dict[str, Any], reading: str) -> None:
    """Writes the picture in both forms and, with the line of reading help, the data; each in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for suffix, options in ((".png", {"dpi": 150}), (".svg", {"metadata": {"Date": None}})):
            temporary = folder / f"{name}.{os.getpid()}{suffix}"
            figure.savefig(temporary, **options)
            os.replace(temporary, folder / f"{name}{suffix}")
    plt.close(figure)
    write_whole(folder / f"{name}.json", json.dumps({"reading": reading, **data}, indent=1, ensure_ascii=False) + "\n")
