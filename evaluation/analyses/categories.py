"""Where compressed passages help: right answers by whether Naive and StandardRAG are right, the paper's 4-way analysis.

TT: both are right; TF: Naive alone; FT: StandardRAG alone; FF: neither. FT shows which evidence survives compression,
TF how well a method resists misleading passages. The answers come from a run; no model is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ...common.files import markdown_table
from ..methods import find_method
from ..metrics import percent_interval
from ..runs import AnswerFile
from ..tasks import TASKS
from .figures import new_figure

CATEGORIES = ("TT", "TF", "FT", "FF")
BASES = ("naive", "standard_rag")


def categorize(run: Path, tasks: Sequence[str], methods: Sequence[str], right) -> dict[str, dict[str, Any]]:
    """
    Shares of right answers in each category, of the tasks that Naive and StandardRAG answered.

    Args:
        run (`Path`): The folder of a run.
        tasks, methods (`Sequence[str]`): Names, of the tasks and of the methods that are compared.
        right (`Callable`): From an [`AnswerFile`] to the ids of its answers, each with whether it is right.

    Returns:
        `{title: {category: {"questions", "methods": {title: [percent, low, high]}}}}`.
    """
    sets = {}
    for task in tasks:
        naive, text = (right(AnswerFile(run, task, method)) for method in BASES)
        parts: dict[str, list[str]] = {category: [] for category in CATEGORIES}
        for key in naive.keys() & text.keys():
            parts["FT"[naive[key]] + "FT"[text[key]]].append(key)
        if not any(parts.values()):
            continue
        is_right = {find_method(name).title: right(AnswerFile(run, task, name)) for name in methods}
        sets[TASKS[task].title] = {
            category: {"questions": len(keys), "methods": _shares(keys, is_right)} for category, keys in parts.items()
        }
    return sets


def _shares(keys: list[str], right: dict[str, dict[str, bool]]) -> dict[str, list[float]]:
    scores = {title: [float(of_method[key]) for key in keys if key in of_method] for title, of_method in right.items()}
    return {title: percent_interval(method_scores) for title, method_scores in scores.items() if method_scores}


def categories_table(sets: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown lines: a row for each set and method, a column for each category; sizes are next to the shares."""
    rows = []
    for title, parts in sets.items():
        rows.append([f"**{title}**, number of questions", *(parts[category]["questions"] for category in CATEGORIES)])
        for method in dict.fromkeys(method for part in parts.values() for method in part["methods"]):
            shares = (parts[category]["methods"].get(method) for category in CATEGORIES)
            rows.append([method, *("-" if share is None else f"{share[0]:.1f}" for share in shares)])
    return markdown_table(["Right answers, %", *CATEGORIES], rows)


def draw_categories(sets: dict[str, dict[str, Any]], metric: str) -> Figure:
    """Bars of each method in each category, a panel for each set; the sizes are below the categories."""
    figure, (panels,) = new_figure(3.2 * len(sets) + 0.6, 3.4, ncols=len(sets), sharey=True, squeeze=False)
    for axes, (title, parts) in zip(panels, sets.items(), strict=True):
        methods = list(dict.fromkeys(method for part in parts.values() for method in part["methods"]))
        width = 0.8 / max(1, len(methods))
        for number, method in enumerate(methods):
            heights = [parts[category]["methods"].get(method, [0.0])[0] for category in CATEGORIES]
            axes.bar(np.arange(len(CATEGORIES)) - 0.4 + (number + 0.5) * width, heights, width, label=method)
        labels = [f"{category}\nn={parts[category]['questions']}" for category in CATEGORIES]
        axes.set_xticks(range(len(CATEGORIES)), labels)
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel(f"{metric}, %")
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
    return figure
