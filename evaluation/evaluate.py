"""Answer the questions of tasks with methods, score the answers, write tables: `python -m arcaligner evaluate`.

    python -m arcaligner evaluate --recipe smollm2_135m
    python -m arcaligner evaluate --checkpoint runs/mine/3_gating --tasks squad --methods naive,arcaligner -n 200 \\
        --output runs/try
    python -m arcaligner evaluate --recipe smollm2_135m --methods arcaligner_x4,arcaligner_xsegment,truncated_x4

A second run, also after the first was killed, answers only the questions not answered yet. Several processes may run
at the same time, with different tasks or methods. A method whose weights or package are missing is skipped, and named.
At the end, `results.json` and `results.md` are written from all answers in the folder. `--floor` answers each question
once more from the passages of another question, which shows what a method gets right without evidence.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..answering_arcaligner import MAX_NEW_TOKENS
from ..common.files import counted, describe_machine, digest, tracked
from ..common.rows import Row
from ..loading_arcaligner import default_dtype
from ..processing_arcaligner import ArcAlignerProcessor
from .answering import Answer, in_batches
from .methods import Method, MissingMethodError, find_method
from .metrics import METRICS, contains_match
from .results import write_results
from .runs import FLOOR, AnswerFile, row_digest
from .settings import EvaluationSettings
from .tasks import TASKS, select_passages, with_passages, wrong_passages

logger = logging.getLogger(__name__)

MIN_CANDIDATES = 5  # found by vectors, and as many by text, before the two lists are merged


def evaluate(settings: EvaluationSettings) -> dict[str, Any]:
    """Answer the remaining questions, write the tables, and return the content of `results.json`."""
    rows = {name: load_rows(name, settings) for name in settings.tasks}
    wrong = {}
    if settings.floor:
        wrong = {name: wrong_passages(task_rows, TASKS[name].title) for name, task_rows in rows.items()}
    answer_all(rows, wrong, settings)
    return write_results(settings.output)


def answer_all(
    rows: dict[str, list[Row]],
    wrong: dict[str, list[Row]],
    settings: EvaluationSettings,
    on_done: Callable[[int], None] = lambda number: None,
) -> dict[str, str]:
    """Answer the unanswered `rows` of the tasks with all methods and, for their floor, the rows `wrong`: the same
    questions with the passages of other questions. `on_done` is called with the number of new answers. Return the
    titles of the methods that were skipped, each with the reason."""
    runs, skipped = [(settings, rows)], {}
    names = [name for name in settings.methods if name != "naive"]  # which uses no passages
    if wrong and names:
        runs.append((replace(settings, output=settings.output / FLOOR, methods=names), wrong))
    for run, task_rows in runs:
        for method in map(find_method, run.methods):
            try:
                answer_tasks(method, task_rows, run, on_done)
            except MissingMethodError as error:
                if run is settings:  # log it once
                    logger.warning("Skipped %s: %s", method.title, error)
                skipped[method.title] = str(error)
                on_done(sum(map(len, task_rows.values())))
    return skipped


def load_rows(name: str, settings: EvaluationSettings) -> list[Row]:
    """The questions of a task with the passages to use."""
    task = settings.tasks[name]
    rows = TASKS[name].load(settings.data, task.num_questions)
    if task.passages == "retrieved":
        rows = retrieve(rows, settings.corpus, settings.checkpoint, task.top_k or 1)
    has_passages = any(row["passages"] for row in rows)
    rows = select_passages(rows, task.passages, task.top_k)
    if not any(row["passages"] for row in rows) and set(settings.methods) != {"naive"}:
        if has_passages:
            raise ValueError(
                f"The questions of {TASKS[name].title} have no gold passages (`meta.gold` is empty). Use all passages "
                "with `--passages given`, or correct the rows."
            )
        raise ValueError(
            f"The questions of {TASKS[name].title} have no passages. Retrieve some with `--passages retrieved --corpus "
            f"CORPUS`, or add `passages` to {name}.jsonl.gz in a folder, and pass this folder with `--data`."
        )
    if num_empty := sum(not row["passages"] for row in rows):
        kind = "gold passages" if task.passages == "gold" else "passages"
        logger.warning(
            "%s: %d of %d questions have no %s. They are answered without any, and count in the scores. "
            "`--passages retrieved --corpus CORPUS` finds passages for all questions.",
            *(TASKS[name].title, num_empty, len(rows), kind),
        )
    return rows


def retrieve(rows: list[Row], corpus: str, checkpoint: str, top_k: int) -> list[Row]:
    """Rows with the `top_k` passages that a corpus, made by the aligner `checkpoint`, returns for their questions, the
    best first."""
    from ..apps.corpus.retrieve import Retriever  # of the extra `corpus`
    from ..apps.corpus.table import Corpus

    retriever = Retriever(Corpus(corpus), ArcAlignerProcessor.from_pretrained(checkpoint))
    num_passages = max(top_k, MIN_CANDIDATES)
    return [
        with_passages(row, retriever(row["question"], num_passages).documents[:top_k])
        for row in tracked(rows, "Retrieving passages")
    ]


def answer_tasks(
    method: Method, rows: dict[str, list[Row]], settings: EvaluationSettings, on_done: Callable[[int], None]
) -> None:
    """Answer the unanswered `rows` of the tasks with a method; its models are loaded only if there are any."""
    of_method = method.answer_settings(settings)
    files = {task: AnswerFile(settings.output, task, method.name) for task in rows}
    todo = {task: file.open(of_method | task_settings(task, settings), rows[task]) for task, file in files.items()}
    answer = method.load(settings) if any(todo.values()) else None
    on_done(sum(len(rows[task]) - len(unanswered) for task, unanswered in todo.items()))
    for task, unanswered in todo.items():
        if unanswered:
            title = f"{TASKS[task].title}: {method.title}" + (", floor" if settings.output.name == FLOOR else "")
            # A log line remains, even without a progress bar.
            logger.info("Answering %s of %s", counted(len(unanswered), "question"), title)
            with files[task].claim():
                in_batches(unanswered, settings.batch_size, partial(answer_batch, answer, files[task], on_done), title)


def answer_batch(
    answer: Callable[[list[Row]], list[Answer]], file: AnswerFile, on_done: Callable[[int], None], rows: list[Row]
) -> None:
    """Answer rows, and append the answers to a file."""
    file.append(map(record, rows, answer(rows)))
    on_done(len(rows))


def task_settings(task: str, settings: EvaluationSettings) -> dict[str, Any]:
    """The settings that answers to a task depend on, whatever the method."""
    options, machine = settings.tasks[task], describe_machine(settings.device)
    device = machine["device"] if machine["device"] != "cpu" else f"{machine['cores']} cores of {machine['cpu']}"
    keys = {
        "passages": options.passages,
        "top_k": options.top_k,
        "about": options.about,
        "max_new_tokens": MAX_NEW_TOKENS,
        "dtype": str(default_dtype(settings.device)),
        "batch_size": settings.batch_size,
        "machine": f"{device}, torch {machine['torch']}",
    }
    if options.passages == "retrieved":
        keys["corpus"] = settings.corpus
    return keys


def record(row: Row, answer: Answer) -> dict[str, Any]:
    """The line that a file of answers has for one answer."""
    texts = " ".join(passage["text"] for passage in row["passages"])
    return {
        "id": row["id"],
        "question": row["question"],
        "answers": row["answers"],
        "prediction": answer.text,
        **{name: metric(answer.text, row["answers"]) for name, metric in METRICS.items()},
        "recall": contains_match(texts, row["answers"]),
        "prompt_tokens": len(answer.prompt_ids),
        "context_tokens": answer.context_tokens,
        "passage_tokens": answer.passage_tokens,
        **({} if answer.answerability is None else {"answerability": answer.answerability}),
        "prompt": digest(answer.prompt_ids),
        "row": row_digest(row),
    }
