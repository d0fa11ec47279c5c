"""Quality against compression rate: answers from half a sentence, one and three sentences a slot.

    python -m arcaligner.evaluation.analyses rates --recipe smollm2_135m --tasks squad,popqa_longtail
    python -m arcaligner.evaluation.analyses rates --recipe smollm2_135m --checkpoint runs/half --checkpoint runs/three

One aligner is read with each of these segmentations. Several are read with their own: the paper trains one for each.

    <output>/rates/<task>/sentences_<n>.jsonl   the answers, as a run of `evaluate` keeps them; a killed one goes on
"""

import copy
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, ScalarFormatter

from ...processing_arcaligner import ArcAlignerProcessor
from ..evaluate import Variant, answer_tasks, load_rows
from ..fingerprints import fingerprint
from ..reading import SlotReader, load_aligner
from ..settings import EvaluationSettings, read_settings, split_names
from ..tasks import TASKS
from .curves import METRICS, answers_to, draw_curve, quality
from .figures import new_figure, save_analysis
from .options import FIGURES, Data, Folder

SEGMENTATIONS = (0.5, 1, 3)  # of the paper: 12x, 24x, 72x


@dataclass(frozen=True)
class Reading:
    """An aligner, what tells its weights from others, and how many sentences stand in each of its slots."""

    checkpoint: str
    weights: str
    sentences_per_segment: float

    @property
    def name(self) -> str:
        """Of its answers' files."""
        return f"sentences_{self.sentences_per_segment:g}"


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
        answer_tasks(variant_of(reading, settings.checkpoints.device), rows, settings)
    sets = {
        TASKS[name].title: [measure(each, answers_to(asked, settings.output, name, each.name)) for each in readings]
        for name, asked in rows.items()
    }
    return {"trained_for_each": len(checkpoints) > 1, "sets": sets}


def variant_of(reading: Reading, device: str) -> Variant:
    """A reading as a way to answer."""
    title = f"{reading.sentences_per_segment:g} sentences a slot"
    return Variant(reading.name, title, asdict(reading), lambda: load_reader(reading, device))


def load_reader(reading: Reading, device: str) -> SlotReader:
    """The aligner with the reading's segmentation; others that share its processor keep theirs."""
    model, processor = load_aligner(reading.checkpoint, device)
    processor = copy.copy(processor)
    processor.sentences_per_segment = reading.sentences_per_segment
    return SlotReader(model, processor, gate_mode="adaptive")


def measure(reading: Reading, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Quality of the answers, and tokens of their passages for each slot."""
    return {
        "sentences_per_segment": reading.sentences_per_segment,
        "weights": reading.weights,
        "compression_rate": sum(each["passage_tokens"] for each in answers)
        / sum(each["context_tokens"] for each in answers),
        **quality(answers),
    }


def draw(sets: dict[str, list[dict[str, Any]]]) -> Figure:
    """A panel for each metric, a line for each set of questions."""
    figure, panels = new_figure(9.0, 3.8, ncols=len(METRICS))
    for axes, (metric, label) in zip(panels, METRICS.items(), strict=True):
        for title, points in sets.items():
            draw_curve(axes, points, "compression_rate", metric, label=title)
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
    given = {"checkpoint": checkpoint[0] if checkpoint else None, "tasks": split_names(tasks)}
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
