"""Runs with different backbones side by side: Naive, StandardRAG and ArcAligner, as in the paper's figure.

    python -m arcaligner.evaluation.analyses backbones --run SmolLM2-135M=runs/evaluation --run Llama-3.1-8B=runs/llama

Each run is a folder of `python -m arcaligner evaluate`, with an aligner of its backbone.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ...model_card import METRIC_TITLES, RESULTS_FILE
from ..methods import METHODS
from .bars import draw_panels
from .figures import save_analysis
from .options import FIGURES, Folder

SHOWN = tuple(METHODS[name].title for name in ("naive", "standard_rag", "arcaligner"))
PREFERRED = ("acc", "em")  # the paper's figure shows judged accuracy
TITLES = {**METRIC_TITLES, "acc": "Acc (judged)"}


def analyse(runs: dict[str, Path], metric: str | None = None) -> dict[str, Any]:
    """
    The shown methods of each run on the sets that all runs have.

    Args:
        runs (`dict[str, Path]`): Folders by title.
        metric (`str`, *optional*): Key of `results.json`; judged accuracy where all have it, or else non-strict EM.

    Returns:
        `dict`: `{"metric", "sets": {title: {run: {"questions", "methods": {title: [mean, low, high]}}}}}`, in percent.

    Raises:
        `ValueError`: no results, no set that all have, or one without the metric.
    """
    found = {title: read_sets(folder) for title, folder in runs.items()}
    shared = [name for name in next(iter(found.values())) if all(name in sets for sets in found.values())]
    if not shared:
        listed = "; ".join(f"{title}: {', '.join(sets)}" for title, sets in found.items())
        raise ValueError(f"No set of questions is in all runs, so none can be put side by side. {listed}.")
    numbers = {(name, run): shown_methods(found[run][name]) for name in shared for run in runs}
    metric = metric or next((each for each in PREFERRED if not without(numbers, each)), PREFERRED[-1])
    if lacking := without(numbers, metric):
        known = sorted({key for methods in numbers.values() for each in methods.values() for key in _metrics(each)})
        where = ", ".join(f"{name} of {run}" for name, run in lacking)
        raise ValueError(
            f"{', '.join(SHOWN)} have no {metric!r} in {where}. Name another with `--metric` ({', '.join(known)}), or "
            "write the results again with `python -m arcaligner evaluate`."
        )
    sets = {
        name: {
            run: {
                "questions": found[run][name]["questions"],
                "methods": {title: each[metric] for title, each in numbers[name, run].items() if metric in each},
            }
            for run in runs
        }
        for name in shared
    }
    return {"metric": metric, "sets": sets}


def read_sets(folder: Path) -> dict[str, dict]:
    """The sets in the results of a run.

    Raises:
        `ValueError`: a folder without results.
    """
    path = folder / RESULTS_FILE
    if not path.is_file():
        raise ValueError(f"There is no {path}. `python -m arcaligner evaluate --output {folder}` writes it.")
    return json.loads(path.read_text(encoding="utf-8"))["sets"]


def shown_methods(entry: dict[str, Any]) -> dict[str, dict]:
    """The numbers of a set's shown methods; `acc` is the judge's where there is one alone."""
    shown = {}
    for title in SHOWN:
        if numbers := entry["methods"].get(title):
            judges = list(numbers["acc"].values())
            shown[title] = {key: value for key, value in numbers.items() if key != "acc"}
            shown[title] |= {"acc": judges[0]} if len(judges) == 1 else {}
    return shown


def without(numbers: dict[tuple, dict[str, dict]], metric: str) -> list[tuple]:
    """Those whose methods all lack a metric."""
    return [key for key, methods in numbers.items() if not any(metric in _metrics(each) for each in methods.values())]


def _metrics(numbers: dict[str, Any]) -> list[str]:
    """The metrics among a method's numbers: those with an interval."""
    return [key for key, value in numbers.items() if isinstance(value, list)]


def read_runs(runs: list[str]) -> dict[str, Path]:
    """Folders by title.

    Raises:
        `ValueError`: another form than TITLE=FOLDER, or one title twice.
    """
    folders = {}
    for run in runs:
        title, _, folder = run.partition("=")
        if not title or not folder:
            raise ValueError(f"`--run {run}`: expected TITLE=FOLDER, as `--run SmolLM2-135M=runs/evaluation`.")
        if title in folders:
            raise ValueError(f"Two runs have the title {title!r}: {folders[title]} and {folder}. Give each its own.")
        folders[title] = Path(folder)
    return folders


def backbones(
    run: Annotated[list[str], typer.Option(help="TITLE=FOLDER of a run; can be repeated.")],
    metric: Annotated[str | None, typer.Option(help="acc, em, f1, em_raw; else acc where judged, or em.")] = None,
    folder: Folder = FIGURES,
) -> None:
    """Naive, StandardRAG and ArcAligner with different backbones."""
    data = analyse(read_runs(run), metric)
    panels = {
        name: {title: found["methods"] for title, found in by_run.items()} for name, by_run in data["sets"].items()
    }
    label = TITLES[data["metric"]]
    reading = (
        f"{label} of the same methods with each backbone, with 95 % bootstrap intervals: what is to be compared is the "
        "order of the three bars in each group."
    )
    save_analysis(folder, "backbones", draw_panels(panels, f"{label}, %"), data, reading)
    typer.echo(reading)
