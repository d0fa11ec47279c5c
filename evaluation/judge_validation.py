"""How far a judge agrees with people, beside the string metrics and other judges.

    python -m arcaligner.evaluation.judge_validation --judgements OpenQA-eval/data \\
        --model Qwen/Qwen3-30B-A3B-Instruct-2507 --device cuda

NQ301 of OpenQA-eval (Kamalloo et al., 2023; https://github.com/ehsk/OpenQA-eval, MIT) has 1,490 answers of several
models to 301 questions of NQ-open, each found acceptable or not by people. Its folder `data` has

    NQ301_human.tsv                                              Question, Model answer, Acceptable?
    NQ301_BEM.tsv                                                the same answers with their golds
    NQ301_gpt-4.tsv, NQ301_BEM.tsv, NQ301_text-davinci-003.tsv   what other judges said, in the same order

A string metric says yes from 0.5 on. An unreadable verdict is a no, an answer without a verdict is left out. Verdicts
are kept in the output folder: a second run, after a kill too, asks for what is missing.
"""

import csv
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from sklearn.metrics import cohen_kappa_score

from ..files import run_command
from ..train.saving import write_whole
from .answering import Row
from .judge import (
    UNREADABLE,
    BatchOption,
    DeviceOption,
    EndpointOption,
    Judged,
    ModelOption,
    TimeoutOption,
    judge_answers,
    judge_slug,
    load_judge,
    problem_counts,
    read_verdicts,
)
from .metrics import bootstrap_interval, contains_match, raw_contains_match, token_f1

HUMAN_FILE, GOLD_FILE = "NQ301_human.tsv", "NQ301_BEM.tsv"
OTHER_JUDGES = {
    "GPT-4": "NQ301_gpt-4.tsv",
    "BEM": "NQ301_BEM.tsv",
    "text-davinci-003": "NQ301_text-davinci-003.tsv",
}
_EXPECTED = "Expected the files of the folder `data` of https://github.com/ehsk/OpenQA-eval."
STRING_METRICS = {"EM": contains_match, "EM, raw": raw_contains_match, "F1 >= 0.5": token_f1}


def read_judgements(folder: Path) -> tuple[list[Row], list[bool]]:
    """
    The answers that people judged.

    Returns:
        `tuple`: Rows with `id`, `question`, `answers` and `prediction`, and for each whether people accept it.

    Raises:
        `ValueError`: a file that is missing or other than expected.
    """
    questions = _column(folder / HUMAN_FILE, "Question")
    predictions = _column(folder / HUMAN_FILE, "Model answer")
    golds = _column(folder / GOLD_FILE, "Gold answers")
    _check_questions(folder / GOLD_FILE, questions)
    rows = [
        {"id": str(number), "question": question, "answers": gold.split(" | "), "prediction": prediction}
        for number, (question, gold, prediction) in enumerate(zip(questions, golds, predictions, strict=True))
    ]
    return rows, [verdict == "Yes" for verdict in _column(folder / HUMAN_FILE, "Acceptable?")]


def other_verdicts(folder: Path, questions: list[str]) -> dict[str, list[bool]]:
    """What the other judges said whose files are in the folder."""
    found = {}
    for judge, name in OTHER_JUDGES.items():
        if (folder / name).exists():
            _check_questions(folder / name, questions)
            # The last column but one; one file lacks the tab between question and answer, so that names do not fit.
            found[judge] = [line[-2] == "Yes" for line in _read_table(folder / name)[1:]]
    return found


def _read_table(path: Path) -> list[list[str]]:
    """The lines of a table, its header first."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return list(csv.reader(file, delimiter="\t"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no {path}. {_EXPECTED}") from error


def _column(path: Path, name: str) -> list[str]:
    """A column by its name."""
    header, *lines = _read_table(path) or [[]]
    if name not in header or any(len(line) != len(header) for line in lines):
        raise ValueError(f"{path} has columns {header}, or a line of others; {name!r} is needed. {_EXPECTED}")
    return [line[header.index(name)] for line in lines]


def _check_questions(path: Path, questions: list[str]) -> None:
    """Refuses a table that is not about these questions in this order."""
    lines = _read_table(path)[1:]
    if len(lines) != len(questions) or not all(
        line[1].startswith(question) for line, question in zip(lines, questions, strict=True)
    ):
        raise ValueError(f"The {len(lines)} lines of {path} are not about the questions of {HUMAN_FILE}. {_EXPECTED}")


def agreement(verdicts: list[bool], human: list[bool]) -> dict[str, Any]:
    """Percent of the judgements that agree, `[mean, low, high]` with a 95 % bootstrap interval, and Cohen's kappa."""
    hits = [100.0 * (verdict == accepted) for verdict, accepted in zip(verdicts, human, strict=True)]
    return {
        "judgements": len(hits),
        "agreement": [sum(hits) / len(hits), *bootstrap_interval(hits)] if hits else None,
        # Without both a yes and a no there is no chance to correct for.
        "kappa": float(cohen_kappa_score(verdicts, human)) if len({*verdicts, *human}) == 2 else None,
    }


def compare(rows: list[Row], human: list[bool], judged: Judged, others: dict[str, list[bool]]) -> dict[str, dict]:
    """The agreement with people of the judge (`"judge"`), other judges and string metrics, by name."""
    accepted = dict(zip((row["id"] for row in rows), human, strict=True))
    scores = judged.scores
    result = {
        "judge": agreement([bool(score) for score in scores.values()], [accepted[key] for key in scores])
        | {"unreadable": judged.count(UNREADABLE), "unjudged": judged.count(None)}
    }
    result |= {name: agreement(verdicts, human) for name, verdicts in others.items()}
    for name, metric in STRING_METRICS.items():
        result[name] = agreement([metric(row["prediction"], row["answers"]) >= 0.5 for row in rows], human)
    return result


def show(found: dict[str, dict], model: str) -> Table:
    """The table of what `compare` found."""
    columns = ("n", "agreement [95 %]", "kappa", "unreadable", "unjudged")
    table = Table("judge", *columns, title="agreement with people on NQ301")
    for name, numbers in found.items():
        share = "-" if numbers["agreement"] is None else "{:.1f} [{:.1f}, {:.1f}]".format(*numbers["agreement"])
        kappa = "-" if numbers["kappa"] is None else f"{numbers['kappa']:.2f}"
        counts = [str(numbers.get(key, "")) for key in ("unreadable", "unjudged")]
        table.add_row(model if name == "judge" else name, str(numbers["judgements"]), share, kappa, *counts)
    return table


def main(
    judgements: Annotated[Path, typer.Option(help="Folder with the files of OpenQA-eval.")],
    model: ModelOption,
    output: Annotated[Path, typer.Option(help="Folder for verdicts and numbers.")] = Path("runs/judges"),
    num_judgements: Annotated[int | None, typer.Option("-n", min=1, help="Only the first so many.")] = None,
    endpoint: EndpointOption = None,
    device: DeviceOption = "cpu",
    batch_size: BatchOption = 16,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Compares a judge with people, and prints and writes how far they agree."""
    rows, human = read_judgements(judgements)
    others = other_verdicts(judgements, [row["question"] for row in rows])
    rows, human = rows[:num_judgements], human[:num_judgements]
    others = {name: verdicts[:num_judgements] for name, verdicts in others.items()}
    stem = f"NQ301{f'-{num_judgements}' if num_judgements else ''}.{judge_slug(model)}"
    path = output / f"{stem}.verdicts.jsonl"
    if read_verdicts(path, rows).count(None):
        judge_answers(load_judge(model, endpoint, device, batch_size, timeout), rows, path, "NQ301")
    found = compare(rows, human, read_verdicts(path, rows), others)
    write_whole(output / f"{stem}.json", json.dumps(found, indent=1) + "\n")
    Console().print(show(found, model))
    if problems := problem_counts([path]):
        typer.echo(f"Unjudged answers are asked for again by the same command: {problems}.", err=True)


if __name__ == "__main__":
    run_command(main)
