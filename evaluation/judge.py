"""Judged accuracy, the paper's Acc: a chat model says of each answer of a run whether it is correct.

    python -m arcaligner.evaluation.judge --run runs/paper --model Qwen/Qwen3-30B-A3B-Instruct-2507 --device cuda
    python -m arcaligner.evaluation.judge --run runs/paper --model Qwen/Qwen3-30B-A3B-Instruct-2507 \\
        --endpoint http://localhost:8000/v1

The judge reads the question, the golds and the answer, and not the passages. The paper prints no prompt; this one is of
OpenQA-eval (Kamalloo et al., 2023), whose human judgements `judge_validation.py` compares a judge with. It ends with
the wish for a yes or a no. A reply that begins with neither is unreadable: counted, and scored as wrong. A question
without a reply stays unjudged: counted, and left out of the mean.

    <run>/<task>/<method>.<judge>.verdicts.jsonl   id, digest of the prompt, verdict, reply: one line an answer

Verdicts are appended as they come. A second run, after a kill too, asks for those that are missing and for those of
answers that are other than they were.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..files import run_command
from ..train.saving import write_whole
from .answering import Row
from .judge_models import KEY_VARIABLE, EndpointJudge, Judge, LocalJudge, Reply
from .metrics import percent_interval, shown_interval, usable_golds
from .runs import AnswerFile, answer_files, text_digest

YES, NO, UNREADABLE = "yes", "no", "unreadable"
VERDICTS = ".verdicts.jsonl"
_NEEDED = ("id", "question", "answers", "prediction")
_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)

ModelOption = Annotated[str, typer.Option(help="The judge: a chat model's folder or Hub id, or its name there.")]
EndpointOption = Annotated[
    str | None,
    typer.Option(help=f"OpenAI-compatible address that serves it, as http://localhost:8000/v1; key: ${KEY_VARIABLE}."),
]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs, without an endpoint.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Answers at a time.")]
TimeoutOption = Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the endpoint's reply.")]


@dataclass(frozen=True)
class Judged:
    """
    What a judge said of some answers.

    Args:
        verdicts (`dict[str, str | None]`): By id: `"yes"`, `"no"`, `"unreadable"`, or `None` without a reply.
    """

    verdicts: dict[str, str | None]

    @property
    def scores(self) -> dict[str, float]:
        """By id, 1.0 for a yes and 0.0 for all else; nothing for what is unjudged."""
        return {key: float(verdict == YES) for key, verdict in self.verdicts.items() if verdict is not None}

    def count(self, verdict: str | None) -> int:
        """Answers with a verdict."""
        return sum(each == verdict for each in self.verdicts.values())


def judge_prompt(row: Row) -> str:
    """What the judge is asked about an answer.

    Raises:
        `ValueError`: a row without question, prediction or gold.
    """
    if missing := [key for key in _NEEDED if key not in row]:
        raise ValueError(f"An answer has no {', '.join(missing)}: {row}. Expected {', '.join(_NEEDED)}.")
    golds = usable_golds(row["answers"])
    if not golds:
        raise ValueError(f"Question {row['id']!r} has no gold to judge by: {row['answers']}. Leave it out of the run.")
    question = row["question"].strip()
    question += "" if question.endswith("?") else "?"
    candidate = " ".join(row["prediction"].split())
    asked = "Is candidate correct? Answer yes or no."
    return f"Question: {question}\nAnswer: {' or '.join(golds)}\nCandidate: {candidate}\n\n{asked}"


def parse_verdict(reply: str) -> str:
    """The verdict of a reply, by its first word.

    >>> parse_verdict("**Yes**, it is."), parse_verdict("Not quite.")
    ('yes', 'unreadable')
    """
    found = _FIRST_WORD.match(reply)
    return found[1].lower() if found else UNREADABLE


def judge_slug(judge: str) -> str:
    """A judge's name in names of files.

    >>> judge_slug("Qwen/Qwen3-30B-A3B-Instruct-2507")
    'Qwen--Qwen3-30B-A3B-Instruct-2507'
    """
    return re.sub(r"[^\w.-]+", "--", judge.strip("/"))


def verdict_path(file: AnswerFile, judge: str) -> Path:
    """Where the verdicts of a judge on a file of answers are."""
    return file.path.with_name(f"{file.method}.{judge_slug(judge)}{VERDICTS}")


def judged_scores(run: Path, task: str, method: str, judge: str) -> dict[str, float]:
    """By id, 1.0 for each answer that the judge, named as in the command, finds correct, 0.0 for others it judged.

    An answer that is not judged as it is now is left out.
    """
    file = AnswerFile(run, task, method)
    return read_verdicts(verdict_path(file, judge), file.read()).scores


def judges_of(file: AnswerFile) -> list[str]:
    """Slugs of the judges that have judged answers in a file."""
    paths = sorted(file.path.parent.glob(f"{file.method}.*{VERDICTS}"))
    return [path.name.removeprefix(f"{file.method}.").removesuffix(VERDICTS) for path in paths]


def read_verdicts(path: Path, rows: Sequence[Row]) -> Judged:
    """The verdicts in a file on answers as they are now."""
    found = {line["prompt"]: line["verdict"] for line in _read_lines(path)}
    return Judged({row["id"]: found.get(text_digest(judge_prompt(row))) for row in rows})


def judge_answers(judge: Judge, rows: Sequence[Row], path: Path, title: str) -> None:
    """
    Asks for the verdicts that are missing in a file, and leaves it with a line an answer.

    Args:
        judge ([`Judge`]): Replies.
        rows (`Sequence[dict]`): With `id`, `question`, `answers` and `prediction`.
        path (`Path`): The file; what it has of these answers is kept.
        title (`str`): For the progress bar.
    """
    prompts = [judge_prompt(row) for row in rows]
    known = {line["prompt"]: line for line in _read_lines(path) if line["verdict"] is not None}
    found = [known.get(text_digest(prompt)) for prompt in prompts]
    lines = [line and {**line, "id": row["id"]} for line, row in zip(found, rows, strict=True)]
    todo = [number for number, line in enumerate(lines) if line is None]
    write_whole(path, _text(line for line in lines if line))
    replies = judge.replies([prompts[number] for number in todo])
    with open(path, "a", encoding="utf-8") as file:
        bar = {"description": title, "total": len(todo), "transient": True, "console": Console(stderr=True)}
        for reply in track(replies, **bar):
            number = todo[reply.index]
            lines[number] = _line(rows[number]["id"], prompts[number], reply)
            file.write(_text([lines[number]]))
            file.flush()
    write_whole(path, _text(lines))


def _line(row_id: str, prompt: str, reply: Reply) -> dict[str, Any]:
    line = {"id": row_id, "prompt": text_digest(prompt), "verdict": None, "reply": reply.text}
    if reply.text is None:
        return line | {"problem": reply.problem}
    return line | {"verdict": parse_verdict(reply.text)}


def _text(lines) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines; of one that a kill cut off, nothing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def load_judge(model: str, endpoint: str | None, device: str, batch_size: int, timeout: float) -> Judge:
    """The judge of the command's options."""
    if endpoint is None:
        return LocalJudge(model, device, batch_size)
    return EndpointJudge(model, endpoint, timeout, batch_size)


def main(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")],
    model: ModelOption,
    endpoint: EndpointOption = None,
    device: DeviceOption = "cpu",
    batch_size: BatchOption = 16,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Judges all answers of a run and prints their accuracy."""
    rows = {file: found for file in answer_files(run) if (found := file.read())}
    if not rows:
        raise ValueError(f"{run} holds no answers. `python -m arcaligner evaluate` writes them.")
    paths = {file: verdict_path(file, model) for file in rows}
    waiting = [file for file in rows if read_verdicts(paths[file], rows[file]).count(None)]
    if waiting:
        judge = load_judge(model, endpoint, device, batch_size, timeout)
        for file in waiting:
            judge_answers(judge, rows[file], paths[file], f"{file.task}: {file.method}")
    table = Table("task", "method", "Acc [95 %]", "judged", "unreadable", "unjudged", title=f"judged by {model}")
    for file in rows:
        judged = read_verdicts(paths[file], rows[file])
        counts = [len(judged.scores), judged.count(UNREADABLE), judged.count(None)]
        scores = [*judged.scores.values()]
        shown = shown_interval(percent_interval(scores)) if scores else "-"
        table.add_row(file.task, file.method, shown, *map(str, counts))
    Console().print(table)
    if problems := problem_counts(paths.values()):
        typer.echo(f"Unjudged answers are asked for again by the same command: {problems}.", err=True)


def problem_counts(paths) -> str:
    """Why answers are unjudged, and how many for each reason."""
    lines = [line for path in paths for line in _read_lines(path) if line["verdict"] is None]
    problems = [line["problem"] for line in lines]
    return ", ".join(f"{problems.count(problem)} {problem}" for problem in dict.fromkeys(problems))


if __name__ == "__main__":
    run_command(main)
