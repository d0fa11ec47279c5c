"""Answers the questions of tasks with methods, scores them, and writes tables: `python -m arcaligner evaluate`.

    python -m arcaligner evaluate --recipe smollm2_135m
    python -m arcaligner evaluate --checkpoint runs/mine --tasks squad --methods naive,arcaligner -n 200 \\
        --output runs/try

A second run, after a kill too, does what is missing; several may run at once with other tasks or methods. A method
whose weights or package are not here is skipped by name. When it ends, `results.json` and `results.md` are written from
all answers in the folder.
"""

import dataclasses
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.progress import Progress

from .answering import MAX_NEW_TOKENS, Row
from .batches import in_batches, longest_first
from .methods import METHODS, Checkpoints, Method
from .metrics import METRICS, contains_match
from .reading import Answer, MissingMethodError, Reader, dtype_on
from .results import write_results
from .retrieval import retrieve
from .runs import AnswerFile, digest, text_digest
from .settings import EvaluationSettings, TaskSettings
from .tasks import TASKS, choose_passages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """
    A way to answer whose answers have files of their own.

    Args:
        name (`str`): Of these files.
        title (`str`): Beside the progress bar.
        made_with (`dict`): What its answers are made with, besides `made_with` of each task.
        load (`Callable`): Makes the reader.
    """

    name: str
    title: str
    made_with: dict[str, Any]
    load: Callable[[], Reader]


def evaluate(settings: EvaluationSettings) -> dict[str, Any]:
    """
    Answers what is not answered yet, and writes the tables.

    Returns:
        `dict`: What `results.json` holds.

    Raises:
        `ValueError`: answers in the folder that were made otherwise.
    """
    rows = {name: load_rows(name, task, settings) for name, task in settings.tasks.items()}
    for method in (METHODS[name] for name in settings.methods):
        try:
            answer_tasks(variant_of(method, settings.checkpoints), rows, settings)
        except MissingMethodError as error:
            logger.warning("skipped %s: %s", method.title, error)
    return write_results(settings.output)


def load_rows(name: str, task: TaskSettings, settings: EvaluationSettings) -> list[Row]:
    """The questions of a task with the passages that are read."""
    rows = TASKS[name].load(settings.data, task.num_questions)
    if task.passages == "retrieved":
        retrieval = dataclasses.replace(settings.retrieval, top_k=task.top_k or settings.retrieval.top_k)
        rows = retrieve(rows, retrieval, settings.cache_dir, settings.checkpoints.device)
    rows = choose_passages(rows, task.passages, task.top_k)
    if not any(row["passages"] for row in rows) and set(settings.methods) - {"naive", "empty_slot"}:
        raise ValueError(
            f"{TASKS[name].title} has no passages of its own. Retrieve some with `--passages retrieved --corpus "
            f"SOURCE`, or name with `--data` a folder whose {name}.jsonl.gz has them."
        )
    if num_empty := sum(not row["passages"] for row in rows):
        logger.warning("%s: %d of %d questions have no passage", TASKS[name].title, num_empty, len(rows))
    return rows


def variant_of(method: Method, checkpoints: Checkpoints) -> Variant:
    """A method as a way to answer."""
    of_method = {"weights": method.fingerprint_of(checkpoints), "checkpoint": method.checkpoint_of(checkpoints)}
    return Variant(method.name, method.title, of_method, lambda: method.load(checkpoints))


def answer_tasks(variant: Variant, rows: dict[str, list[Row]], settings: EvaluationSettings) -> None:
    """What is left of all tasks in one way, by a reader that is loaded when something is."""
    files = {name: AnswerFile(settings.output, name, variant.name) for name in rows}
    todo = {name: file.open(variant.made_with | made_with(name, settings), rows[name]) for name, file in files.items()}
    if any(todo.values()):
        reader = variant.load()
        for name, left in todo.items():
            answer_file(reader, files[name], left, settings.batch_size, f"{TASKS[name].title}: {variant.title}")


def made_with(task: str, settings: EvaluationSettings) -> dict[str, Any]:
    """What the answers to a task are made with, whichever method answers."""
    chosen = settings.tasks[task]
    keys = {
        "passages": chosen.passages,
        "top_k": chosen.top_k,
        "max_new_tokens": MAX_NEW_TOKENS,
        "dtype": str(dtype_on(settings.checkpoints.device)),
        "batch_size": settings.batch_size,
        "machine": machine(settings.checkpoints.device),
    }
    if chosen.passages == "retrieved":
        keys["retrieval"] = dataclasses.asdict(settings.retrieval)
    return keys


def answer_file(reader: Reader, file: AnswerFile, rows: list[Row], batch_size: int, title: str) -> None:
    """Appends the answers to `rows`, behind a progress bar."""
    with file.claim(), Progress(transient=True) as progress:
        bar = progress.add_task(title, total=len(rows))
        logger.info("%s, %d questions", title, len(rows))  # stays, also where no bar can be drawn
        found = in_batches(longest_first(rows), batch_size, partial(timed, reader))
        for batch, (answers, seconds) in found:
            file.append(map(record, batch, answers, [seconds / len(batch)] * len(batch)))
            progress.advance(bar, len(batch))


def timed(reader: Reader, rows: list[Row]) -> tuple[list[Answer], float]:
    """Answers, and the seconds they took."""
    start = time.perf_counter()
    return reader.answer(rows), time.perf_counter() - start


def record(row: Row, answer: Answer, seconds: float) -> dict[str, Any]:
    """The line of an answer."""
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
        "seconds": round(seconds, 4),
        **answer.measured,
        "prompt": text_digest(answer.prompt_ids),
        "row": digest(row),
    }


def machine(device: str) -> str:
    """The processor, or the accelerator, that answers."""
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"
