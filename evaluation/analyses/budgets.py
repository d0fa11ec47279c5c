"""Quality against operations: one aligner read with several settings of refinement and numbers of slots.

    python -m arcaligner.evaluation.analyses budgets --recipe smollm2_135m --tasks squad,hotpotqa -n 200
    python -m arcaligner.evaluation.analyses budgets --recipe smollm2_135m --tasks hotpotqa --knobs max_slots

One setting is changed at a time, and its curve goes through the aligner as it is configured. The operations of an
answer are those of its prefill, counted while it runs: its share of its batch.

    <output>/budgets/<task>/<setting>.jsonl   the answers, with their operations; a killed run continues
"""

import dataclasses
import itertools
from functools import partial
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ...configuration_arcaligner import ArcAlignerConfig
from ...train.corpora import Row
from ..answering import Answer, SlotAnswerer, flop_counter, load_aligner, slot_inputs
from ..evaluate import answer_tasks, load_rows
from ..methods import fingerprint
from ..runs import answers_to
from ..settings import EvaluationSettings, read_settings, split_names
from ..tasks import TASKS
from .figures import COLORS, FIGURES, Data, Folder, draw_curve, new_figure, quality, save_analysis
from .gates import require_gates

BUDGETS = (0.05, 0.1, 0.2)
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
MAX_SLOTS = (2, 4, 8)
# The curves of each knob, and how their lines look.
KNOBS = {
    "refinement_budget": {"refinement_budget": "-"},
    "gate_threshold": {"gate_threshold": "-"},
    "max_refinement_steps": {"max_refinement_steps": "-"},
    "max_slots": {"drop": "-", "merge": "--"},
}
CAPTION = (
    "In each column one setting of the aligner changes, the others stay as configured; on dashed lines slots are "
    "merged, not dropped. To the right: operations of the prefill of all questions, counted while it runs; 100 % are "
    "those of the same questions with all their slots and no refinement. Bars are 95 % bootstrap intervals over "
    "questions."
)


# What differs from the aligner's configuration at inference.
Setting = dict[str, Any]
AS_CONFIGURED: Setting = {}
NO_REFINEMENT: Setting = {"max_refinement_steps": 0}


def name_of(setting: Setting) -> str:
    """The name of its answers' files."""
    return "_".join(f"{key}_{value}" for key, value in setting.items()) or "as_configured"


def curves_of(knobs: list[str], config: ArcAlignerConfig) -> dict[str, dict[str, Setting]]:
    """The settings of each curve of the knobs, by value of the knob, ordered by cost. Equal ones are run once."""
    threshold, steps = config.gate_threshold, config.max_refinement_steps
    curves = {
        "refinement_budget": {"0": NO_REFINEMENT}
        | {f"{each:g}": {"refinement_budget": each} for each in BUDGETS}
        | {"∞": AS_CONFIGURED},
        "gate_threshold": {
            f"{each:g}": AS_CONFIGURED if each == threshold else {"gate_threshold": each}
            for each in sorted({*THRESHOLDS, threshold})
        },
        "max_refinement_steps": {str(each): {"max_refinement_steps": each} for each in range(steps)}
        | {str(steps): AS_CONFIGURED},
    }
    for policy in KNOBS["max_slots"]:
        slots = {str(each): {"max_slots": each, "slot_policy": policy} for each in MAX_SLOTS}
        curves[policy] = slots | {"all": AS_CONFIGURED}
    return {curve: curves[curve] for knob in knobs for curve in KNOBS[knob]}


class MeasuringAnswerer(SlotAnswerer):
    """Also measures the operations of the prefill."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        inputs = slot_inputs(self.processor, rows, **self.slots).to(self.model.device)
        with torch.no_grad(), flop_counter() as counter:
            self.model(**inputs, **self.refinement, use_cache=True, logits_to_keep=1)
        measured = {"prefill_flops": counter.get_total_flops() / len(rows)}
        return [dataclasses.replace(answer, measured=measured) for answer in super().answer(rows)]


def load_answerer(checkpoint: str, setting: Setting, device: str) -> MeasuringAnswerer:
    """The aligner, read with a setting."""
    model, processor = load_aligner(checkpoint, device)
    require_gates(model, checkpoint)
    slots = {key: value for key, value in setting.items() if key in ("max_slots", "slot_policy")}
    refinement = {key: value for key, value in setting.items() if key not in slots}
    return MeasuringAnswerer(model, processor, slots=slots, gate_mode="adaptive", **refinement)


def analyze(settings: EvaluationSettings, knobs: list[str]) -> dict[str, Any]:
    """
    Answers what is not answered yet, and measures quality and operations.

    Args:
        settings ([`EvaluationSettings`]): Aligner, tasks, data and device, and the folder for answers; its methods are
            not used.
        knobs (`list[str]`): Of `KNOBS`.

    Returns:
        `dict`: `{"checkpoint", "weights", "sets": {title: {curve: [point, ...]}}}`, a point as of `measure`.
    """
    checkpoint, device = settings.checkpoints.aligner, settings.checkpoints.device
    curves = curves_of(knobs, ArcAlignerConfig.from_pretrained(checkpoint))
    weights = fingerprint(checkpoint)
    rows = {name: load_rows(name, task, settings) for name, task in settings.tasks.items()}
    settings_of = [NO_REFINEMENT, *(each for points in curves.values() for each in points.values())]
    for own_name, setting in {name_of(each): each for each in settings_of}.items():
        made_with = {"checkpoint": checkpoint, "weights": weights, **setting}
        load = partial(load_answerer, checkpoint, setting, device)
        answer_tasks(own_name, own_name, made_with, load, rows, settings)
    sets = {}
    for name, asked in rows.items():
        base = answers_to(asked, settings.output, name, name_of(NO_REFINEMENT))
        sets[TASKS[name].title] = {
            curve: [
                {"value": value, **measure(answers_to(asked, settings.output, name, name_of(setting)), base)}
                for value, setting in points.items()
            ]
            for curve, points in curves.items()
        }
    return {"checkpoint": checkpoint, "weights": weights, "sets": sets}


def measure(answers: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """
    A point of a curve.

    Args:
        answers (`list[dict]`): With the setting.
        base (`list[dict]`): To the same questions, with all slots and no refinement.

    Returns:
        `dict`: `cost`, the operations of the prefills in percent of the base's; `slots` per question; and the answers'
        quality.
    """
    flops, of_base = (sum(answer["prefill_flops"] for answer in each) for each in (answers, base))
    slots = sum(answer["context_tokens"] for answer in answers) / len(answers)
    return {"cost": 100 * flops / of_base, "slots": slots, **quality(answers)}


def draw(sets: dict[str, dict[str, list[dict[str, Any]]]], knobs: list[str]) -> Figure:
    """F1 against operations: a column for each knob, a color for each set; merged slots are dashed."""
    figure, grid = new_figure(3.2 * len(knobs) + 0.6, 3.8, ncols=len(knobs), sharey=True, squeeze=False)
    colors = dict(zip(sets, itertools.cycle(COLORS), strict=False))
    for axes, knob in zip(grid[0], knobs, strict=True):
        for (title, curves), (curve, line) in itertools.product(sets.items(), KNOBS[knob].items()):
            draw_curve(axes, curves[curve], "cost", "f1", color=colors[title], linestyle=line)
            for point in curves[curve]:
                place = {"textcoords": "offset points", "xytext": (3, 3), "fontsize": 7, "color": "grey"}
                axes.annotate(point["value"], (point["cost"], point["f1"][0]), **place)
        axes.set_title(knob)
    grid[0][0].set_ylabel("F1, %")
    figure.supxlabel("operations of the prefill, % of that with all slots and no refinement", fontsize=10)
    handles = [Line2D([], [], color=color, label=title) for title, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def budgets(
    checkpoint: Annotated[str | None, typer.Option(help="An aligner, not the recipe's.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe of evaluation/recipes, or a YAML file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, separated by commas. Default: the recipe's.")] = None,
    knobs: Annotated[str, typer.Option(help="Settings to change, separated by commas.")] = ",".join(KNOBS),
    data: Data = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="Maximum number of questions of each task.")] = None,
    device: Annotated[str | None, typer.Option(help="Where models run: cpu, cuda.")] = None,
    folder: Folder = FIGURES,
) -> None:
    """F1 against operations, for budgets of refinement and numbers of slots.

    All four knobs ask each question 15 times. Two cores answer 500 questions once in two to four minutes, so a task
    takes half an hour to an hour. A killed run continues where it stopped.
    """
    names = split_names(knobs)
    if unknown := [name for name in names if name not in KNOBS]:
        raise ValueError(f"There is no knob {', '.join(map(repr, unknown))}; known: {', '.join(KNOBS)}.")
    given = {"checkpoint": checkpoint, "tasks": split_names(tasks), "data": data, "device": device}
    settings = read_settings(recipe, given | {"output": folder / "budgets"}, {"num_questions": num_questions})
    numbers = analyze(settings, names)
    save_analysis(folder, "budgets", draw(numbers["sets"], names), numbers, CAPTION)
    typer.echo(CAPTION)
