"""Judged accuracy, the paper's Acc: a chat model judges whether each answer of a run is correct.

    vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507
    python -m arcaligner.evaluation.judge --run runs/paper
    python -m arcaligner.evaluation.judge --agreement OpenQA-eval/data -n 200

The judge is behind an OpenAI-compatible endpoint and answers greedily. Its prompt contains the question, the golds and
the answer, not the passages. The paper prints no prompt; this one is from OpenQA-eval (Kamalloo et al., 2023). A reply
that begins with neither yes nor no is unreadable: it is counted, and scored as wrong. An answer for which no reply
comes is unjudged: it is counted, and left out of the mean.

    <run>/<task>/<method>.<judge>.verdicts.jsonl   id, digest of the prompt, verdict, reply: one line per verdict

Verdicts are appended as they come. A second run, also after the first was killed, asks only for missing verdicts and
for those of changed answers; with `--again` also where the reply was unreadable.

`--agreement` measures how far a judge agrees with people, on NQ301 of OpenQA-eval (MIT licence): 1,490 answers to
questions of NQ-open, each labeled acceptable or not. Do not use a judge that agrees less with people than EM does.
"""

import csv
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from ..common.files import digest, markdown_table, run_command
from ..common.rows import Row, contains_match, token_f1, usable_golds
from .chat_endpoint import ENDPOINT, ChatEndpoint
from .metrics import percent_interval, shown_interval
from .runs import AnswerFile, answer_files

logger = logging.getLogger(__name__)

JUDGE = "Qwen/Qwen3-30B-A3B-Instruct-2507"  # as in the paper
YES, UNREADABLE = "yes", "unreadable"
COUNTS = ("Judged answers", "Of these, reply neither yes nor no", "No reply")  # columns of tables
VERDICTS = ".verdicts"
_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)

# From prompts to the replies of the judge, in order; `None` without a reply.
Judge = Callable[[list[str]], Iterator[str | None]]


def judge_prompt(row: Row) -> str:
    """The prompt of the judge for an answer to a question that has a gold answer."""
    question = row["question"].strip()
    question += "" if question.endswith("?") else "?"
    candidate = " ".join(row["prediction"].split())
    golds = " or ".join(usable_golds(row["answers"]))
    request = "Is candidate correct? Answer yes or no."
    return f"Question: {question}\nAnswer: {golds}\nCandidate: {candidate}\n\n{request}"


def parse_verdict(reply: str) -> str:
    """The verdict of a reply, by its first word.

    >>> parse_verdict("**Yes**, it is."), parse_verdict("Not quite.")
    ('yes', 'unreadable')
    """
    match = _FIRST_WORD.match(reply)
    return match[1].lower() if match else UNREADABLE


def verdict_file(file: AnswerFile, judge: str) -> AnswerFile:
    """The file of the verdicts of a judge, named as in the command, on a file of answers."""
    slug = re.sub(r"[^\w.-]+", "--", judge.strip("/"))
    return dataclasses.replace(file, method=f"{file.method}.{slug}{VERDICTS}")


def judges_of(file: AnswerFile) -> list[str]:
    """The judges of a file's answers, as their file names spell them."""
    ending = f"{VERDICTS}.jsonl"
    paths = sorted(file.path.parent.glob(f"{file.method}.*{ending}"))
    return [path.name.removeprefix(f"{file.method}.").removesuffix(ending) for path in paths]


def read_verdicts(file: AnswerFile, rows: Sequence[Row]) -> dict[str, str | None]:
    """By id, the verdict of a judge on each current answer: `"yes"`, `"no"`, `"unreadable"`, or `None` if there is
    none."""
    verdicts = {line["prompt"]: line["verdict"] for line in file.read()}  # the last one counts
    return {row["id"]: verdicts.get(digest(judge_prompt(row))) for row in rows}


def judged_scores(file: AnswerFile, judge: str) -> dict[str, float]:
    """By id, 1.0 for each answer that the judge finds correct, and 0.0 for each other answer with a verdict."""
    verdicts = read_verdicts(verdict_file(file, judge), file.read())
    return {key: float(verdict == YES) for key, verdict in verdicts.items() if verdict is not None}


def judge_answers(judge: Judge, rows: Sequence[Row], file: AnswerFile, again: bool = False) -> None:
    """Ask for the verdicts that are missing in a file of [`verdict_file`], and append them; `again` also asks for
    unreadable ones."""
    known, missing = read_verdicts(file, rows), (None, UNREADABLE) if again else (None,)
    todo = [(row["id"], judge_prompt(row)) for row in rows if known[row["id"]] in missing]
    if not todo:
        return
    file.path.parent.mkdir(parents=True, exist_ok=True)
    title = f"Judging answers of {file.method.removesuffix(VERDICTS)}"
    bar = {"description": title, "total": len(todo), "transient": True, "console": Console(stderr=True)}
    with file.claim():
        replies = track(judge([prompt for _, prompt in todo]), **bar)
        for (row_id, prompt), reply in zip(todo, replies, strict=True):
            if reply is not None:
                verdict = {"prompt": digest(prompt), "verdict": parse_verdict(reply), "reply": reply}
                file.append([{"id": row_id, **verdict}])
    verdicts = [*read_verdicts(file, rows).values()]
    if count := verdicts.count(UNREADABLE):
        logger.warning(
            "%s: the judge replied neither yes nor no about %d of %d answers. These answers count as wrong. To ask "
            "about them again, run `python -m arcaligner.evaluation.judge` with `--again`.",
            *(file.path, count, len(verdicts)),
        )


def judge_run(run: Path, endpoint: ChatEndpoint, again: bool = False) -> list[str]:
    """Judge all answers of a run to questions with a gold answer. Return the lines of a Markdown table."""
    rows = {file: [row for row in file.read() if usable_golds(row["answers"])] for file in answer_files(run)}
    rows = {file: answered for file, answered in rows.items() if answered}
    if not rows:
        raise ValueError(f"{run} contains no answers to questions with a gold answer. Run `arcaligner evaluate` first.")
    cells = []
    for file, answers in rows.items():
        judge_answers(endpoint, answers, verdicts := verdict_file(file, endpoint.model), again)
        scores = [*judged_scores(file, endpoint.model).values()]
        by_answer = [*read_verdicts(verdicts, answers).values()]
        shown = shown_interval(percent_interval(scores)) if scores else "-"
        cells.append([file.task, file.method, shown, len(scores), by_answer.count(UNREADABLE), by_answer.count(None)])
    columns = ("Task", "Method", f"Right answers according to {endpoint.model}, %", *COUNTS)
    return markdown_table(columns, cells)


# Agreement with people

HUMAN_FILE, GOLD_FILE = "NQ301_human.tsv", "NQ301_BEM.tsv"
OTHER_JUDGES = {"GPT-4": "NQ301_gpt-4.tsv", "BEM": "NQ301_BEM.tsv", "text-davinci-003": "NQ301_text-davinci-003.tsv"}
STRING_METRICS = {"EM": contains_match, "F1 of at least 0.5": token_f1}  # a score of 0.5 or more means yes
_EXPECTED = "Pass the folder `data` of https://github.com/ehsk/OpenQA-eval with `--agreement`."


def read_judgements(folder: Path) -> tuple[list[Row], list[bool]]:
    """
    The answers that people judged.

    Returns:
        `tuple`: Rows with `id`, `question`, `answers` and `prediction`, and for each, whether people accept it.

    Raises:
        `ValueError`: a file that is missing, or has a different format.
    """
    questions, predictions = (_column(folder / HUMAN_FILE, name) for name in ("Question", "Model answer"))
    golds = _column(folder / GOLD_FILE, "Gold answers")
    _check_questions(folder / GOLD_FILE, questions)
    rows = [
        {"id": str(number), "question": question, "answers": gold.split(" | "), "prediction": prediction}
        for number, (question, gold, prediction) in enumerate(zip(questions, golds, predictions, strict=True))
    ]
    return rows, [verdict == "Yes" for verdict in _column(folder / HUMAN_FILE, "Acceptable?")]


def other_verdicts(folder: Path, questions: list[str]) -> dict[str, list[bool]]:
    """Verdicts of GPT-4, BEM and text-davinci-003, if their files are in the folder, by the judge's name."""
    verdicts = {}
    for judge, name in OTHER_JUDGES.items():
        if (folder / name).exists():
            _check_questions(folder / name, questions)
            # By position, not by name: one file lacks the tab between question and answer, so its columns are shifted.
            verdicts[judge] = [line[-2] == "Yes" for line in _read_table(folder / name)[1:]]
    return verdicts


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
        raise ValueError(
            f"{path} has no column {name!r}, or a line with more or fewer columns than its first line. {_EXPECTED}"
        )
    return [line[header.index(name)] for line in lines]


def _check_questions(path: Path, questions: list[str]) -> None:
    """Raise for a table that is not about these questions in this order."""
    lines = _read_table(path)[1:]
    if len(lines) != len(questions) or not all(
        line[1].startswith(question) for line, question in zip(lines, questions, strict=True)
    ):
        raise ValueError(f"The lines of {path} are not about the same questions as those of {HUMAN_FILE}. {_EXPECTED}")


def agreement(verdicts: list[bool], human: list[bool]) -> dict[str, Any]:
    """Percent of the judgements that agree, `[mean, low, high]` with a 95 % bootstrap interval, and Cohen's kappa."""
    from sklearn.metrics import cohen_kappa_score  # here, because tables of results do not need it

    hits = [float(verdict == accepted) for verdict, accepted in zip(verdicts, human, strict=True)]
    return {
        "judgements": len(hits),
        "agreement": percent_interval(hits) if hits else None,
        # Kappa is undefined unless both a yes and a no occur.
        "kappa": float(cohen_kappa_score(verdicts, human)) if len({*verdicts, *human}) == 2 else None,
    }


def judge_people(
    folder: Path, output: Path, judge: Judge, name: str, number: int | None = None, again: bool = False
) -> list[str]:
    """Ask a judge about the first `number` answers that people judged, and save the verdicts in `output`. Return a
    Markdown table: how well the judge, other judges and string metrics agree with people."""
    rows, human = read_judgements(folder)
    others = other_verdicts(folder, [row["question"] for row in rows])
    rows, human = rows[:number], human[:number]
    judge_answers(judge, rows, file := verdict_file(AnswerFile(output, "NQ301", "answers"), name), again)
    verdicts = read_verdicts(file, rows)
    judged = [(verdict == YES, ok) for verdict, ok in zip(verdicts.values(), human, strict=True) if verdict is not None]
    agreements = {name: agreement(*map(list, zip(*judged, strict=True))) if judged else agreement([], [])}
    agreements |= {other: agreement(theirs[:number], human) for other, theirs in others.items()}
    for title, metric in STRING_METRICS.items():
        agreements[title] = agreement([metric(row["prediction"], row["answers"]) >= 0.5 for row in rows], human)
    cells = []
    for title, numbers in agreements.items():
        share = "-" if numbers["agreement"] is None else shown_interval(numbers["agreement"])
        kappa = "-" if numbers["kappa"] is None else f"{numbers['kappa']:.2f}"
        counts = [[*verdicts.values()].count(verdict) if title == name else "" for verdict in (UNREADABLE, None)]
        cells.append([title, share, kappa, numbers["judgements"], *counts])
    lines = markdown_table(["Judge", "Agrees with people, %", "Cohen's kappa", *COUNTS], cells)
    if judged and agreements[name]["agreement"][0] < agreements["EM"]["agreement"][0]:
        lines += ["", f"{name} agrees less with people than EM does: do not use it as a judge."]
    return lines


def main(
    run: Annotated[
        Path | None, typer.Option(help="Folder of an evaluation (`--output` of `arcaligner evaluate`) to judge.")
    ] = None,
    people: Annotated[
        Path | None,
        typer.Option(
            "--agreement",
            help="Folder `data` of https://github.com/ehsk/OpenQA-eval, to measure how well the judge agrees with "
            "people.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model that judges, as the endpoint knows it.")] = JUDGE,
    endpoint: Annotated[
        str,
        typer.Option(
            help="Address of an OpenAI-compatible server. The API key is read from the environment variable "
            "OPENAI_API_KEY."
        ),
    ] = ENDPOINT,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for a reply.")] = 60.0,
    number: Annotated[
        int | None,
        typer.Option("-n", min=1, help="With `--agreement`: maximum number of human judgements to compare with."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the verdicts of `--agreement`.")] = Path("runs/judges"),
    again: Annotated[
        bool, typer.Option("--again", help="Ask again about answers for which the judge replied neither yes nor no.")
    ] = False,
) -> None:
    """Let a chat model judge whether the answers of a run are right (--run), or compare such a judge with people
    (--agreement). If the command is repeated, the judge is asked only about answers that it has not judged yet."""
    if (run is None) == (people is None):
        passed = "Neither `--run` nor `--agreement` was" if run is None else "Both `--run` and `--agreement` were"
        raise ValueError(
            f"{passed} passed; expected one of them. Pass `--run` to judge the answers of a run, or `--agreement` to "
            "compare the judge with people."
        )
    if run is not None and number is not None:
        raise ValueError("`-n` works with `--agreement` only; `--run` judges all answers of a run. Leave out `-n`.")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    judge = ChatEndpoint(model, endpoint, timeout=timeout)
    if run is not None:
        lines = judge_run(run, judge, again)
    else:
        lines = judge_people(people, output, judge, model, number, again)
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    run_command(main)
