"""Where compressed passages help: right answers by whether Naive and StandardRAG succeed, the paper's 4-way analysis.

    python -m arcaligner.evaluation.analyses four-way --run runs/evaluation
    python -m arcaligner.evaluation.analyses four-way --run runs/paper --judge Qwen/Qwen3-30B-A3B-Instruct-2507

TT: both are right; TF: Naive alone; FT: StandardRAG alone; FF: neither. The answers of the run are read, no model runs.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..judge import judged_scores
from ..methods import find_method
from ..metrics import percent_interval
from ..runs import AnswerFile, answer_files
from ..settings import at_rates, split_names, split_rates
from ..tasks import TASKS
from .figures import FIGURES, Folder, draw_panels, save_analysis

CATEGORIES = ("TT", "TF", "FT", "FF")
NAIVE, FULL_TEXT, MAIN = "naive", "standard_rag", "arcaligner"
COMPARED = [MAIN, "xrag", "projector_only", "llmlingua"]


def analyze(
    run: Path, tasks: list[str] | None = None, judge: str | None = None, rates: list[int | str] | None = None
) -> dict[str, Any]:
    """
    Shares of right answers in each category.

    Args:
        run (`Path`): Folder with answers.
        tasks (`list[str]`, *optional*): Names; all that the run has.
        judge (`str`, *optional*): What it says is right; without a judge, a non-strict exact match.
        rates (`list`, *optional*): `tokens_per_slot` of the compressors that have rates; the checkpoint's own without.

    Returns:
        `dict`: `{"right", "sets": {title: {"questions", "categories": {"TT": {"questions", "methods": {title:
        {"questions", "right", "share"}}}}}}}`, `share` with its interval, in percent.

    Raises:
        `ValueError`: answers or verdicts that are not there, with the command that makes them.
    """
    answered = {file.task for file in answer_files(run)}
    names = tasks or [name for name in TASKS if name in answered]
    if not names:
        raise ValueError(f"{run} holds no answers. `python -m arcaligner evaluate` writes them.")
    return {
        "right": f"judged by {judge}" if judge else "non-strict EM",
        "sets": {TASKS[name].title: analyze_task(run, name, judge, at_rates(COMPARED, rates or [])) for name in names},
    }


def analyze_task(run: Path, task: str, judge: str | None, compared: list[str]) -> dict[str, Any]:
    """The entry of a task, over the questions that Naive and StandardRAG answered; the first method is required."""
    right = {method: right_answers(run, task, method, judge) for method in (NAIVE, FULL_TEXT, *compared)}
    if missing := [method for method in (NAIVE, FULL_TEXT, compared[0]) if not right[method]]:
        raise ValueError(
            f"{run} has no answers to {task} of {', '.join(missing)}{f' that {judge} has judged' if judge else ''}. "
            f"`python -m arcaligner evaluate --tasks {task} --methods {','.join(missing)} --output {run}`, with the "
            f"other options of that run, writes them; `python -m arcaligner.evaluation.judge --run {run}` judges them."
        )
    members: dict[str, list[str]] = {category: [] for category in CATEGORIES}
    for key in right[NAIVE]:
        if key in right[FULL_TEXT]:
            members["".join("T" if right[method][key] else "F" for method in (NAIVE, FULL_TEXT))].append(key)
    categories = {}
    for category, keys in members.items():
        scores = {method: [right[method][key] for key in keys if key in right[method]] for method in compared}
        categories[category] = {
            "questions": len(keys),
            "methods": {
                find_method(method).title: {"questions": len(own), "right": sum(own), "share": percent_interval(own)}
                for method, own in scores.items()
                if own
            },
        }
    return {"questions": sum(map(len, members.values())), "categories": categories}


def right_answers(run: Path, task: str, method: str, judge: str | None) -> dict[str, bool]:
    """By id, whether an answer is right; ids without an answer or a verdict are left out."""
    if judge is None:
        return {answer["id"]: answer["em"] == 1 for answer in AnswerFile(run, task, method).read()}
    return {key: score == 1 for key, score in judged_scores(AnswerFile(run, task, method), judge).items()}


def four_way(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")] = Path("runs/evaluation"),
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas. Default: all of the run.")] = None,
    judge: Annotated[str | None, typer.Option(help="A judge that decides what is right. Default: EM.")] = None,
    tokens_per_slot: Annotated[
        str | None, typer.Option(help="Rates of the methods that have them, with commas.")
    ] = None,
    folder: Folder = FIGURES,
) -> None:
    """Right answers by whether Naive and StandardRAG succeed."""
    data = analyze(run, split_names(tasks), judge, split_rates(tokens_per_slot))
    panels = {
        title: {
            f"{category}\nn = {found['questions']}": {
                method: each["share"] for method, each in found["methods"].items()
            }
            for category, found in entry["categories"].items()
        }
        for title, entry in data["sets"].items()
    }
    caption = (
        "Of the n questions that Naive (first letter) and StandardRAG (second) answer rightly (T) or wrongly (F), the "
        f"share that compressed passages get right ({data['right']}), with 95 % bootstrap intervals: FT shows what "
        "survives compression, TF how far misleading passages are resisted."
    )
    save_analysis(folder, "four_way", draw_panels(panels, "right answers, %"), data, caption)
    typer.echo(caption)
