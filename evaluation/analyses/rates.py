"""Quality against compression rate: answers from half a sentence, one and three sentences a slot.

    python -m arcaligner.evaluation.analyses rates --recipe smollm2_135m --tasks squad,popqa_longtail
    python -m arcaligner.evaluation.analyses rates --recipe smollm2_135m --checkpoint runs/half --checkpoint runs/three

One aligner is read with each of these segmentations. Several are read with their own: the paper trains one for each.

    <output>/rates/<task>/sentences_<n>.jsonl   the answers, as a run of `evaluate` keeps them; a killed one goes on
"""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, ScalarFormatter

from ...processing_arcaligner import ArcAlignerProcessor
from ..answering import Row
from ..evaluate import answer_file, load_rows, made_with
from ..fingerprints import fingerprint
from ..metrics import percent_interval
from ..reading import SlotReader, load_aligner
from ..runs import AnswerFile
from ..settings import EvaluationSettings, read_settings
from ..tasks import TASKS
from .figures import new_figure, save_analysis
from .options import FIGURES, Data, Folder

SEGMENTATIONS = (0.5, 1, 3)  # of the paper: 12x, 24x, 72x
METRICS = {"f1": "F1", "em": "EM (non-strict)"}


@dataclass(frozen=True)
class Reading:
    """An aligner, what tells its weights from others, and how many sentences stand in each of its slots."""

    checkpoint: str
    weights: str
    sentences_per_segment: float


def readings_of(checkpoints: list[str]) -> list[Reading]:
    """One aligner with each of `SEGMENTATIONS`; several, each with its own.

    Raises:
        `ValueError`: two of several have the same; no checkpoint.
    """
    weights = [fingerprint(each) for each in checkpoints]
    if len(checkpoints) == 1:
        return [Reading(checkpoints[0], weights[0], sentences) for sentences in SEGMENTATIONS]
    own = [ArcAlignerProcessor.from_pretrained(each).sentences_per_segment for each in checkpoints]
    if len(set(own)) < len(own):
        listed = ", ".join(f"{each} has {sentences:g}" for each, sentences in zip(checkpoints, own, strict=True))
        raise ValueError(
            f"Two aligners have as many sentences a slot: {listed}. Name such as were trained with different "
            "`sentences_per_segment`, or a single one, to be read with several."
        )
    readings = [Reading(*each) for each in zip(checkpoints, weights, own, strict=True)]
    return sorted(readings, key=lambda each: each.sentences_per_segment)


def analyse(settings: EvaluationSettings, checkpoints: list[str]) -> dict[str, Any]:
    """
    Answers what is not answered yet, and measures quality and rate.

    Args:
        settings ([`EvaluationSettings`]): Tasks, data and device, and the folder for answers; its methods are not used.
        checkpoints (`list[str]`): One aligner or several, as in `readings_of`.

    Returns:
        `dict`: `{"trained_for_each", "sets": {title: [{"sentences_per_segment", "weights", "questions",
        "compression_rate", "f1", "em"}]}}`, scores in percent with their intervals.
    """
    readings = readings_of(checkpoints)
    rows = {name: load_rows(name, task, settings) for name, task in settings.tasks.items()}
    for reading in readings:
        answer_tasks(reading, rows, settings)
    sets = {
        TASKS[name].title: [measure(each, answers_in(settings.output, name, each).read(), asked) for each in readings]
        for name, asked in rows.items()
    }
    return {"trained_for_each": len(checkpoints) > 1, "sets": sets}


def answers_in(folder: Path, task: str, reading: Reading) -> AnswerFile:
    """Where the answers of a reading are."""
    return AnswerFile(folder, task, f"sentences_{reading.sentences_per_segment:g}")


def answer_tasks(reading: Reading, rows: dict[str, list[Row]], settings: EvaluationSettings) -> None:
    """All tasks, with an aligner that is loaded when there is something left to answer."""
    todo = {}
    for name, asked in rows.items():
        of_reading = dataclasses.asdict(reading) | made_with(name, settings)
        todo[name] = answers_in(settings.output, name, reading).open(of_reading, asked)
    if not any(todo.values()):
        return
    reader = load_reader(reading, settings.checkpoints.device)
    for name, left in todo.items():
        title = f"{TASKS[name].title}: {reading.sentences_per_segment:g} sentences a slot"
        answer_file(reader, answers_in(settings.output, name, reading), left, settings.batch_size, title)


def load_reader(reading: Reading, device: str) -> SlotReader:
    """The aligner with the reading's segmentation; others that share its processor keep theirs."""
    model, processor = load_aligner(reading.checkpoint, device)
    processor = copy.copy(processor)
    processor.sentences_per_segment = reading.sentences_per_segment
    return SlotReader(model, processor, gate_mode="adaptive")


def measure(reading: Reading, answers: list[dict[str, Any]], rows: list[Row]) -> dict[str, Any]:
    """Quality of the answers to `rows`, and tokens of their passages for each slot."""
    asked = {row["id"] for row in rows}
    answers = [answer for answer in answers if answer["id"] in asked]
    return {
        "sentences_per_segment": reading.sentences_per_segment,
        "weights": reading.weights,
        "questions": len(answers),
        "compression_rate": sum(each["passage_tokens"] for each in answers)
        / sum(each["context_tokens"] for each in answers),
        **{metric: percent_interval([each[metric] for each in answers]) for metric in METRICS},
    }


def draw(sets: dict[str, list[dict[str, Any]]]) -> Figure:
    """A panel for each metric, a line for each set of questions."""
    figure, panels = new_figure(9.0, 3.8, ncols=len(METRICS))
    for axes, (metric, label) in zip(panels, METRICS.items(), strict=True):
        for title, points in sets.items():
            rates = [point["compression_rate"] for point in points]
            means, lows, highs = zip(*(point[metric] for point in points), strict=True)
            below = [max(0.0, mean - low) for mean, low in zip(means, lows, strict=True)]
            above = [max(0.0, high - mean) for mean, high in zip(means, highs, strict=True)]
            axes.errorbar(rates, means, [below, above], marker="o", markersize=4, capsize=2, label=title)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))  # 8, 12, 16, 24, 32, 48, ...
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of passages a slot")
        axes.set_ylabel(f"{label}, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def rates(
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="An aligner, not the recipe's; repeated, several that were trained for it.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe of evaluation/recipes, or a YAML file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, with commas between; else those of the recipe.")] = None,
    data: Data = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="At most so many questions of each task.")] = None,
    device: Annotated[str | None, typer.Option(help="Where models run: cpu, cuda.")] = None,
    folder: Folder = FIGURES,
) -> None:
    """F1 and EM against the measured compression rate."""
    given = {"checkpoint": checkpoint[0] if checkpoint else None, "tasks": tasks and tasks.split(",")}
    given |= {"data": data, "device": device, "output": folder / "rates"}
    settings = read_settings(recipe, given, {"num_questions": num_questions})
    numbers = analyse(settings, checkpoint or [settings.checkpoints.aligner])
    which = (
        "an aligner that was trained for it" if numbers["trained_for_each"] else "the same aligner, not trained anew"
    )
    reading = (
        "Each point is all questions of a set, read with half a sentence, one or more sentences a slot (to the right: "
        f"fewer slots) by {which}, at the rate that was measured; bars are 95 % bootstrap intervals."
    )
    save_analysis(folder, "rates", draw(numbers["sets"]), numbers, reading)
    typer.echo(reading)
