"""Questions that the passages do not answer: how many are refused, at which price, and what confidence is worth.

    python -m arcaligner evaluate --recipe smollm2_135m --tasks squad,squad_unanswerable --data FOLDER
    python -m arcaligner.evaluation.analyses.refusals --run runs/evaluation --methods arcaligner,arcaligner_x4

From the answers of a run; no model runs. An answer is refused where it is the aligner's `no_answer`, or where its
confidence is below the threshold that was fitted on validation questions. The price is the F1 of the answers to
answerable questions that are refused. The risk-coverage curve keeps the answers with the most confidence: the share
that is kept to the right, the share of these that is wrong upwards, unanswerable questions among them.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure

from ...common.files import markdown_table, run_command
from ...processing_arcaligner import ArcAlignerProcessor
from ..methods import find_method
from ..metrics import percent_interval, shown_interval
from ..runs import AnswerFile
from ..settings import split_names
from ..tasks import find_task
from .figures import new_figure, save_analysis

CAPTION = (
    "Answers sorted by confidence, the surest first: to the right, a larger share of all questions is answered; "
    "upwards, the share of these answers that is wrong. Questions that the passages do not answer are among them: any "
    "answer to these but the refusal is wrong. The dot is the threshold that was fitted on other questions."
)


def read_answers(run: Path, tasks: list[str], method: str) -> list[dict[str, Any]]:
    """The answers of a method to tasks, with `is_answered` and, of each, `is_refused` and its `confidence`."""
    found = []
    for task in map(find_task, tasks):
        file = AnswerFile(run, task.name, method)
        answers = file.read()
        if not answers or "confidence" not in answers[0]:
            raise ValueError(
                f"{file.path} has no answers with a confidence. Ask with `python -m arcaligner evaluate "
                f"--tasks {','.join(tasks)} --methods {method} --output {run}`."
            )
        processor = ArcAlignerProcessor.from_pretrained(file.settings()["checkpoint"])
        if processor.answer_probe is None:
            raise ValueError(f"{file.settings()['checkpoint']} has no `answer_probe` any more. Fit it, and ask again.")
        for answer in answers:
            is_unsure = answer["confidence"] < processor.answer_probe["threshold"]
            says_no = answer["prediction"] == processor.no_answer
            is_wrong = answer["em"] < 1 if task.is_answered else not says_no
            about = {"is_answered": task.is_answered, "is_refused": is_unsure or says_no, "is_wrong": is_wrong}
            found.append(answer | about)
    return found


def summarize(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Refusals, their price in points of F1 and the curve of one method; shares in percent, with 95 % intervals."""
    asked = {kind: [each for each in answers if each["is_answered"] == kind] for kind in (True, False)}
    if not all(asked.values()):
        raise ValueError(
            f"The tasks have {len(asked[True])} answerable questions and {len(asked[False])} unanswerable ones; "
            "expected both. Name them with `--tasks`."
        )
    refused = {kind: np.array([each["is_refused"] for each in some], dtype=float) for kind, some in asked.items()}
    f1 = np.array([each["f1"] for each in asked[True]])
    sure = {kind: np.array([each["confidence"] for each in some]) for kind, some in asked.items()}
    above = np.sign(sure[True][:, None] - sure[False]).mean()
    order = np.argsort([-each["confidence"] for each in answers], kind="stable")
    wrong = np.array([each["is_wrong"] for each in answers])[order]
    said = np.array([not each["is_refused"] for each in answers])
    kept = np.unique(np.linspace(1, len(answers), 200).astype(int))  # a curve needs no more points
    return {
        "refused": percent_interval(refused[False]),
        "wrongly_refused": percent_interval(refused[True]),
        "f1": 100 * f1.mean(),
        "f1_lost": 100 * (f1 * refused[True]).mean(),
        "auroc": (1 + above) / 2,
        "coverage": (100 * kept / len(answers)).round(3).tolist(),
        "risk": (100 * wrong.cumsum()[kept - 1] / kept).round(3).tolist(),
        "own": [100 * said.mean(), 100 * (wrong[np.argsort(order)] & said).sum() / max(1, said.sum())],
    }


def draw(methods: dict[str, dict[str, Any]]) -> Figure:
    """A risk-coverage curve for each method."""
    figure, axes = new_figure()
    for title, numbers in methods.items():
        (line,) = axes.plot(numbers["coverage"], numbers["risk"], label=title)
        axes.plot(*numbers["own"], marker="o", color=line.get_color())
    axes.set_xlabel("questions answered, %")
    axes.set_ylabel("answers that are wrong, %")
    axes.legend()
    return figure


def refusals(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")] = Path("runs/evaluation"),
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "arcaligner,arcaligner_x4",
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = "squad,squad_unanswerable",
    output: Annotated[Path, typer.Option(help="Folder for the figure and its data.")] = Path("runs/figures"),
) -> None:
    """How many unanswerable questions are refused, what that costs, and what confidence is worth."""
    names = split_names(tasks)
    found = {find_method(name).title: summarize(read_answers(run, names, name)) for name in split_names(methods)}
    save_analysis(output, "refusals", draw(found), {"tasks": names, "methods": found}, CAPTION)
    lines = [
        [title, *(shown_interval(each[name]) for name in ("refused", "wrongly_refused"))]
        + [f"{each['f1']:.1f}", f"{each['f1_lost']:.1f}", f"{each['auroc']:.3f}"]
        for title, each in found.items()
    ]
    columns = ["", "refused, %", "wrongly refused, %", "F1", "F1 lost", "AUROC"]
    typer.echo("\n".join([*markdown_table(columns, lines), "", CAPTION]))


if __name__ == "__main__":
    run_command(refusals)
