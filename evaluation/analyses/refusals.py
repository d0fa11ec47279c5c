"""Abstention on questions that the passages do not answer: how many, at which cost, and the AUROC.

    python -m arcaligner evaluate --recipe smollm2_135m --tasks squad,squad_unanswerable --data FOLDER
    python -m arcaligner.evaluation.analyses.refusals --run runs/evaluation --methods arcaligner,arcaligner_x4

The answers come from a run; no model is loaded. An answer counts as refused if it is the aligner's `no_answer`, or if
its answerability is below the threshold that was fitted on validation questions. The cost is the F1 of answers to
answerable questions that are refused.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from sklearn.metrics import roc_auc_score

from ...common.files import markdown_table, run_command
from ...configuration_arcaligner import ArcAlignerConfig
from ...processing_arcaligner import ArcAlignerProcessor
from ..methods import find_method
from ..metrics import percent_interval, shown_interval
from ..runs import AnswerFile
from ..settings import split_names

TASKS = "squad", "squad_unanswerable"  # with the answer in the passages, and without
COLUMNS = "", "refused, %", "wrongly refused, %", "F1", "F1 lost", "AUROC"


def read_answers(run: Path, task: str, method: str) -> list[dict[str, Any]]:
    """The answers of a method to a task, each with `is_refused`."""
    file = AnswerFile(run, task, method)
    answers = file.read()
    if not answers or "answerability" not in answers[0]:
        raise ValueError(
            f"{file.path} has no answers with an answerability. Make them with `python -m arcaligner evaluate "
            f"--recipe smollm2_135m --data FOLDER --tasks {','.join(TASKS)} --methods {method} --output {run}`."
        )
    checkpoint = file.settings()["checkpoint"]
    least = ArcAlignerConfig.from_pretrained(checkpoint).answerability_threshold
    if least is None:
        raise ValueError(
            f"{checkpoint} has no answerability head. Fit it with `python -m arcaligner.train.confidence`, and "
            "evaluate again."
        )
    no_answer = ArcAlignerProcessor.from_pretrained(checkpoint).no_answer
    return [row | {"is_refused": row["answerability"] < least or row["prediction"] == no_answer} for row in answers]


def refusals(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")] = Path("runs/evaluation"),
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "arcaligner,arcaligner_x4",
) -> None:
    """Print how many unanswerable questions are refused, and what that costs. Shares are in percent with 95 %
    intervals; the table also has F1, the F1 points that refusals lose, and the AUROC of the answerability."""
    rows = []
    for name in split_names(methods):
        answered, unanswered = (read_answers(run, task, name) for task in TASKS)
        wrongly, rightly = ([float(each["is_refused"]) for each in some] for some in (answered, unanswered))
        f1 = 100 * np.array([each["f1"] for each in answered])
        sure = [each["answerability"] for each in answered + unanswered]
        auroc = roc_auc_score([True] * len(answered) + [False] * len(unanswered), sure)
        shares = [shown_interval(percent_interval(some)) for some in (rightly, wrongly)]
        lost = (f1 * wrongly).mean()
        rows.append([find_method(name).title, *shares, f"{f1.mean():.1f}", f"{lost:.1f}", f"{auroc:.3f}"])
    typer.echo("\n".join(markdown_table(COLUMNS, rows)))


if __name__ == "__main__":
    run_command(refusals)
