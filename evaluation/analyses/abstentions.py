"""Abstention on questions that the passages do not answer: how often, at what cost in F1, and the AUROC.

    python -m arcaligner evaluate --recipe smollm2_135m --tasks squad,squad_unanswerable --data FOLDER
    python -m arcaligner.evaluation.analyses.abstentions --run runs/evaluation --methods arcaligner,arcaligner_x4

The answers come from a run; no model is loaded. An answer counts as an abstention if it is the aligner's `no_answer`,
or if its answerability is below the threshold that was fitted on validation questions. The cost is the F1 that is lost
by abstentions on answerable questions.
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
COLUMNS = (
    "Method",
    "Abstained on unanswerable questions, %",
    "Abstained on answerable questions, %",
    "F1 without abstentions, %",
    "F1 lost by abstentions, points",
    "AUROC of the answerability",
)


def read_answers(run: Path, task: str, method: str) -> list[dict[str, Any]]:
    """The answers of a method to a task, each with `is_abstention`."""
    file = AnswerFile(run, task, method)
    answers = file.read()
    if not answers:
        raise ValueError(
            f"There are no answers in {file.path}. Run `arcaligner evaluate --recipe smollm2_135m --data FOLDER "
            f"--tasks {','.join(TASKS)} --methods {method} --output {run}`."
        )
    if "answerability" not in answers[0]:
        raise ValueError(
            f"The answers in {file.path} have no answerability; expected those of a method with slots, from an aligner "
            "with an answerability head. Choose other `--methods`, or fit a head with `python -m "
            "arcaligner.train.confidence` and evaluate again into an empty folder."
        )
    checkpoint = file.settings()["checkpoint"]
    threshold = ArcAlignerConfig.from_pretrained(checkpoint).answerability_threshold
    if threshold is None:
        raise ValueError(
            f"The config.json of {checkpoint} has no `answerability_threshold`. Fit an answerability head with `python "
            "-m arcaligner.train.confidence`, which also sets this threshold, and evaluate again."
        )
    no_answer = ArcAlignerProcessor.from_pretrained(checkpoint).no_answer
    return [
        row | {"is_abstention": row["answerability"] < threshold or row["prediction"] == no_answer} for row in answers
    ]


def abstentions(
    run: Annotated[Path, typer.Option(help="Folder of an evaluation (`--output` of `arcaligner evaluate`).")] = Path(
        "runs/evaluation"
    ),
    methods: Annotated[
        str, typer.Option(help="Methods that answer from slots, separated by commas.")
    ] = "arcaligner,arcaligner_x4",
) -> None:
    """Print how often methods abstain on unanswerable and on answerable questions, in percent with 95 % intervals. For
    answerable questions, the table also has the F1 without abstentions, and how many points of F1 abstentions cost. The
    AUROC says how well the answerability separates the two kinds of questions."""
    rows = []
    for name in split_names(methods):
        answered, unanswered = (read_answers(run, task, name) for task in TASKS)
        wrongly, rightly = (
            [float(answer["is_abstention"]) for answer in answers] for answers in (answered, unanswered)
        )
        f1 = 100 * np.array([answer["f1"] for answer in answered])
        answerabilities = [answer["answerability"] for answer in answered + unanswered]
        auroc = roc_auc_score([True] * len(answered) + [False] * len(unanswered), answerabilities)
        shares = [shown_interval(percent_interval(scores)) for scores in (rightly, wrongly)]
        lost = (f1 * wrongly).mean()
        rows.append([find_method(name).title, *shares, f"{f1.mean():.1f}", f"{lost:.1f}", f"{auroc:.3f}"])
    typer.echo("\n".join(markdown_table(COLUMNS, rows)))


if __name__ == "__main__":
    run_command(abstentions)
