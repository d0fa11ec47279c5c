"""Quality against compression rate, from the answers of a run that holds several rates of a checkpoint.

    python -m arcaligner evaluate --recipe rates --data FOLDER
    python -m arcaligner.evaluation.analyses rates --run runs/evaluation

A point is a method at a rate (`arcaligner_x4`): its F1 and retention, across the tokens of the passages that one
position of the prompt stands for. Baselines at the same rate read as many positions. No model runs.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from ..methods import METHODS, base_name, find_method, sort_key
from ..results import MAIN, summarize
from ..runs import answer_files
from ..settings import split_names
from ..tasks import TASKS, find_task
from .figures import COLORS, FIGURES, Folder, draw_curve, new_figure, save_analysis, use_powers_of_two

MEASURES = {"f1": "F1, %", "retention": "retention of F1, %"}
# The ends of what can be reached, drawn as horizontal lines of the F1 panels.
BOUNDS = {"naive": ":", "full_text_lora": "--"}
CAPTION = (
    "Each line is a method, each point a rate at which the same checkpoint is read: to the right, one position of the "
    "prompt stands for more tokens of the passages (measured). Baselines at a rate read as many positions as there are "
    "slots. Retention is (F1 - closed book) / (fine-tuned full text - closed book). Dotted: closed book; dashed: the "
    "fine-tuned full text. Bars are 95 % bootstrap intervals over questions."
)


def analyze(run: Path, tasks: list[str] | None = None) -> dict[str, Any]:
    """The points of each method that was asked at several rates, of `tasks` or all that the run has.

    Returns:
        `dict`: `{"sets": {title: {"curves": {title: [point, ...]}, "bounds": {title: [mean, low, high]}}}}`, a point
        with `tokens_per_slot` (`None`: the aligner's own rate), `compression_rate`, `f1`, `em`, and `retention` where
        the run has its two ends.

    Raises:
        `ValueError`: no method at several rates, with the command that makes them.
    """
    wanted = {find_task(name).title for name in tasks or TASKS}
    methods = [find_method(name) for name in sorted({file.method for file in answer_files(run)}, key=sort_key)]
    results, sets = summarize(run), {}
    for title, entry in results["sets"].items():
        curves: dict[str, list[dict[str, Any]]] = {}
        for method in methods:
            numbers = entry["methods"].get(method.title)
            if numbers and (method.tokens_per_slot is not None or method.name == MAIN):
                point = {key: numbers[key] for key in ("compression_rate", "f1", "em", "retention") if key in numbers}
                point = {"tokens_per_slot": method.tokens_per_slot, **point}
                curves.setdefault(METHODS[base_name(method)].title, []).append(point)
        curves = {
            name: sorted(points, key=lambda point: point["compression_rate"])
            for name, points in curves.items()
            if len(points) > 1
        }
        if curves and title in wanted:
            titles = [METHODS[name].title for name in BOUNDS]
            bounds = {each: entry["methods"][each]["f1"] for each in titles if each in entry["methods"]}
            sets[title] = {"curves": curves, "bounds": bounds}
    if not sets:
        raise ValueError(
            f"{run} has no method at several rates. `python -m arcaligner evaluate --tokens-per-slot 4,8,16,segment "
            f"--output {run}`, with the other options of that run, adds them."
        )
    return {"sets": sets}


def draw(sets: dict[str, dict[str, Any]]) -> Figure:
    """A column for each set of questions, a row for each of `MEASURES` that there is."""
    points = [point for entry in sets.values() for curve in entry["curves"].values() for point in curve]
    measures = [measure for measure in MEASURES if any(measure in point for point in points)]
    shape = {"nrows": len(measures), "ncols": len(sets), "sharex": True, "sharey": "row", "squeeze": False}
    figure, grid = new_figure(3.4 * len(sets) + 0.6, 2.7 * len(measures) + 0.8, **shape)
    titles = list(dict.fromkeys(title for entry in sets.values() for title in entry["curves"]))
    for panels, measure in zip(grid, measures, strict=True):
        for axes, (title, entry) in zip(panels, sets.items(), strict=True):
            for method, curve in entry["curves"].items():
                shown = [point for point in curve if measure in point]
                color = COLORS[titles.index(method) % len(COLORS)]
                if shown:
                    draw_curve(axes, shown, "compression_rate", measure, label=method, color=color)
            for name, line in BOUNDS.items():
                if measure == "f1" and (bound := entry["bounds"].get(METHODS[name].title)):
                    axes.axhline(bound[0], color="grey", linestyle=line, linewidth=1)
            use_powers_of_two(axes)
            axes.set_title(title if measure == measures[0] else "")
        panels[0].set_ylabel(MEASURES[measure])
    figure.supxlabel("tokens of the passages per position", fontsize=10)
    found = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def rates(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")] = Path("runs/evaluation"),
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas. Default: all of the run.")] = None,
    folder: Folder = FIGURES,
) -> None:
    """F1 and retention against the measured compression rate."""
    numbers = analyze(run, split_names(tasks))
    save_analysis(folder, "rates", draw(numbers["sets"]), numbers, CAPTION)
    typer.echo(CAPTION)
