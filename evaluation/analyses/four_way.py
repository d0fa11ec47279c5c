"""Where compressed passages help: right answers by whether Naive and StandardRAG succeed, the paper's 4-way analysis.

    python -m arcaligner.evaluation.analyses four-way --run runs/evaluation
    python -m arcaligner.evaluation.analyses four-way --run runs/paper --judge Qwen/Qwen3-30B-A3B-Instruct-2507

TT: both are right; TF: Naive alone; FT: StandardRAG alone; FF: neither. FT shows what survives compression, TF how far
misleading passages are resisted. The answers of the run are read, no model runs.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ...common.files import markdown_table
from ..judge import judged_scores
from ..methods import base_name, find_method, sort_key
from ..metrics import percent_interval, shown_interval
from ..runs import AnswerFile, answer_files
from ..tasks import TASKS

CATEGORIES = ("TT", "TF", "FT", "FF")
COMPARED = ("arcaligner", "xrag", "projector_only", "llmlingua")


def analyze(run: Path, judge: str | None = None) -> dict[str, dict[str, Any]]:
    """Shares of right answers in each category, of the sets that Naive and StandardRAG answered, as `{title: {"TT":
    {"questions", "methods": {title: [percent, low, high]}}}}`. Right is what the `judge` says; without one, an EM of 1.

    Raises:
        `ValueError`: no such answers or verdicts, with the commands that make them.
    """
    sets = {}
    for task in TASKS:
        right = {file.method: right_answers(file, judge) for file in answer_files(run) if file.task == task}
        naive, text = right.get("naive", {}), right.get("standard_rag", {})
        parts = {category: [] for category in CATEGORIES}
        for key in (each for each in naive if each in text):
            parts["FT"[naive[key]] + "FT"[text[key]]].append(key)
        if any(parts.values()):
            compared = [name for name in sorted(right, key=sort_key) if base_name(find_method(name)) in COMPARED]
            found = {find_method(name).title: right[name] for name in compared}
            sets[TASKS[task].title] = {category: summarize(keys, found) for category, keys in parts.items()}
    if not sets:
        raise ValueError(
            f"{run} has no set that Naive and StandardRAG answered{f' and {judge} has judged' if judge else ''}. "
            f"`python -m arcaligner evaluate --methods naive,standard_rag,arcaligner --output {run}` writes the "
            f"answers, `python -m arcaligner.evaluation.judge --run {run}` judges them."
        )
    return sets


def summarize(keys: list[str], right: dict[str, dict[str, bool]]) -> dict[str, Any]:
    """The number of questions in a category, and the share that each method, by its title, gets right."""
    scores = {title: [own[key] for key in keys if key in own] for title, own in right.items()}
    return {
        "questions": len(keys),
        "methods": {title: percent_interval(own) for title, own in scores.items() if own},
    }


def right_answers(file: AnswerFile, judge: str | None) -> dict[str, bool]:
    """By id, whether an answer is right; ids without an answer or a verdict are left out."""
    if judge is None:
        return {answer["id"]: answer["em"] == 1 for answer in file.read()}
    return {key: score == 1 for key, score in judged_scores(file, judge).items()}


def four_way(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")] = Path("runs/evaluation"),
    judge: Annotated[str | None, typer.Option(help="A judge that decides what is right. Default: EM.")] = None,
) -> None:
    """Prints right answers, in percent, by whether Naive (first letter) and StandardRAG (second) are right."""
    for title, parts in analyze(run, judge).items():
        columns = [f"{category}, n = {part['questions']}" for category, part in parts.items()]
        methods = dict.fromkeys(method for part in parts.values() for method in part["methods"])
        found = {method: [part["methods"].get(method) for part in parts.values()] for method in methods}
        rows = ([method, *(shown_interval(each) if each else "-" for each in own)] for method, own in found.items())
        typer.echo("\n".join([*markdown_table([title, *columns], rows), ""]))
