"""From the answers of a run to `results.json`: means with intervals, and differences on the same questions."""

import json
from pathlib import Path
from typing import Any

from ..model_card import RESULTS_FILE
from ..train.saving import write_whole
from .judge import judges_of, read_verdicts, verdict_path
from .methods import METHODS
from .metrics import METRICS, percent_interval
from .runs import AnswerFile, answer_files
from .tables import results_page
from .tasks import TASKS

MAIN = "arcaligner"
# Methods that read all of the text, or nothing of it.
NOT_COMPRESSED = ("standard_rag", "full_text_lora", "empty_slot")


def write_results(run: Path) -> dict[str, Any]:
    """Writes `results.json` and `results.md` of all answers in a run's folder, and returns the former.

    Raises:
        `ValueError`: there are none.
    """
    results = summarize(run)
    write_whole(run / RESULTS_FILE, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_whole(run / "results.md", results_page(results))
    return results


def summarize(run: Path) -> dict[str, Any]:
    """
    What a run found, in percent.

    Returns:
        `dict`: `{"machine", "questions", "sets": {title: {"questions", "recall", "compression_rate", "methods",
        "differences"}}}`. `methods` has, by title, `[mean, low, high]` of each metric with 95 % bootstrap intervals
        over questions, `acc` by judge, and the costs. `differences` has the same of ArcAligner less a method, paired
        by question.
    """
    files = {(file.task, file.method): file for file in answer_files(run)}
    if not files:
        raise ValueError(f"{run} holds no answers. `python -m arcaligner evaluate` writes them.")
    answers = {key: {each["id"]: each for each in judged(file)} for key, file in files.items()}
    sets = {}
    for task in TASKS:
        of_task = {name: answers[task, name] for name in METHODS if answers.get((task, name))}
        if of_task:
            _check_pairs(run, task, of_task)
            sets[TASKS[task].title] = _summarize_task(task, of_task)
    machines = sorted({file.settings()["machine"] for file in files.values()})
    return {
        "machine": "; ".join(machines),
        "questions": min(entry["questions"] for entry in sets.values()),
        "sets": sets,
    }


def judged(file: AnswerFile) -> list[dict[str, Any]]:
    """The answers in a file, each with the `acc` it has from each judge that judged it."""
    rows = file.read()
    verdicts = {judge: read_verdicts(verdict_path(file, judge), rows).scores for judge in judges_of(file)}
    accs = [{judge: scores[row["id"]] for judge, scores in verdicts.items() if row["id"] in scores} for row in rows]
    return [row | {"acc": acc} for row, acc in zip(rows, accs, strict=True)]


def _check_pairs(run: Path, task: str, of_task: dict[str, dict[str, dict]]) -> None:
    """Refuses answers of two methods to questions of one id with other passages or golds."""
    rows: dict[str, tuple[str, str]] = {}
    for method, found in of_task.items():
        for key, answer in found.items():
            other, row = rows.setdefault(key, (method, answer["row"]))
            if row != answer["row"]:
                raise ValueError(
                    f"{run / task}: {other} and {method} answered question {key} with other passages or golds, so they "
                    "cannot be compared. Delete the files of one of them and answer anew, or in another folder."
                )


def _summarize_task(task: str, of_task: dict[str, dict[str, dict]]) -> dict[str, Any]:
    first = next(iter(of_task.values())).values()
    entry: dict[str, Any] = {
        "task": task,
        "questions": max(len(found) for found in of_task.values()),
        "recall": percent_interval([each["recall"] for each in first]),
        "methods": {METHODS[name].title: _summarize_method(name, found) for name, found in of_task.items()},
    }
    if MAIN in of_task:
        found = of_task[MAIN].values()
        entry["compression_rate"] = _rate(found)
        entry["slots_per_question"] = sum(each["context_tokens"] for each in found) / len(found)
        entry["differences"] = {
            METHODS[name].title: compare(of_task[MAIN], other) for name, other in of_task.items() if name != MAIN
        }
    return entry


def _summarize_method(name: str, found: dict[str, dict]) -> dict[str, Any]:
    rows = list(found.values())
    numbers: dict[str, Any] = {
        "questions": len(rows),
        "context_tokens": sum(row["context_tokens"] for row in rows) / len(rows),
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows) / len(rows),
        "seconds": sum(row["seconds"] for row in rows) / len(rows),
    }
    if name not in NOT_COMPRESSED and numbers["context_tokens"]:
        numbers["compression_rate"] = _rate(rows)
    judges = sorted({judge for row in rows for judge in row["acc"]})
    numbers["acc"] = {
        judge: percent_interval([row["acc"][judge] for row in rows if judge in row["acc"]]) for judge in judges
    }
    return numbers | {metric: percent_interval([row[metric] for row in rows]) for metric in METRICS}


def compare(ours: dict[str, dict], other: dict[str, dict]) -> dict[str, Any]:
    """A paired bootstrap over the questions that both answered: `[difference, low, high]` of each metric."""
    shared = [key for key in ours if key in other]
    if not shared:
        return {"questions": 0}
    return {"questions": len(shared)} | {
        metric: percent_interval([ours[key][metric] - other[key][metric] for key in shared]) for metric in METRICS
    }


def _rate(rows) -> float:
    """Tokens of the passages for each position of the prompt that stands for them."""
    return sum(row["passage_tokens"] for row in rows) / sum(row["context_tokens"] for row in rows)
