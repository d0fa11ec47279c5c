"""Quality against operations: one aligner read with several settings of refinement and numbers of slots.

    python -m arcaligner.evaluation.analyzes budgets --recipe smollm2_135m --tasks squad,hotpotqa -n 200
    python -m arcaligner.evaluation.analyzes budgets --recipe smollm2_135m --tasks hotpotqa --knobs max_slots

Each knob is turned alone, and its curve goes through the aligner as it is configured. The operations of an answer are
those of its prefill, with the steps that its own slots took.

    <output>/budgets/<task>/<setting>.jsonl   the answers, with their operations; a killed run goes on
"""

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ...configuration_arcaligner import ArcAlignerConfig
from ...refinement_arcaligner import prefix_flops
from ...train.corpora import Row
from ...train.data import full_text
from ..answering import Answer, SlotAnswerer, load_aligner, text_inputs
from ..evaluate import answer_tasks, load_rows
from ..methods import fingerprint
from ..operations import count_operations, recorded_depths
from ..runs import answers_to
from ..settings import EvaluationSettings, read_settings, split_names
from ..tasks import TASKS
from .figures import COLORS, FIGURES, QUALITY, Data, Folder, draw_curve, new_figure, quality, save_analysis
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
MARKERS = "os^Dvp"  # of the values of a knob, in order
CAPTION = (
    "In each column one setting of the aligner is turned (a mark for each value), all others stay as they are "
    "configured. To the right: operations of the prefill of all questions, with the LoRA of the slots and the "
    "refinement that they really took (a gate counts in every layer, also behind a spent budget); 100 % are those of "
    "the same questions with all their slots and no refinement. Sentence encoder and output head are not counted. Bars "
    "are 95 % bootstrap intervals over questions."
)


@dataclass(frozen=True)
class Setting:
    """What is other than the aligner's configuration, at inference; `None` is as it is configured."""

    refinement_budget: float | None = None
    gate_threshold: float | None = None
    max_refinement_steps: int | None = None
    max_slots: int | None = None
    slot_policy: str | None = None

    @property
    def changed(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def name(self) -> str:
        """Of its answers' files."""
        return "_".join(f"{key}_{value}" for key, value in self.changed.items()) or "as_configured"


AS_CONFIGURED, NO_REFINEMENT = Setting(), Setting(max_refinement_steps=0)
Curves = dict[str, dict[str, Setting]]  # settings by value of the knob, by curve


def curves_of(knobs: list[str], config: ArcAlignerConfig) -> Curves:
    """The settings of each curve of the knobs, in the order of their cost or against it. Equal ones are read once."""
    threshold, steps = config.gate_threshold, config.max_refinement_steps
    thresholds = {each: Setting(gate_threshold=each) for each in THRESHOLDS} | {threshold: AS_CONFIGURED}
    budgets = {f"{each:g}": Setting(refinement_budget=each) for each in BUDGETS}
    numbers = {str(each): Setting(max_refinement_steps=each) for each in range(steps)}
    curves = {
        "refinement_budget": {"0": NO_REFINEMENT, **budgets, "∞": AS_CONFIGURED},
        "gate_threshold": {f"{each:g}": thresholds[each] for each in sorted(thresholds)},
        "max_refinement_steps": numbers | {str(steps): AS_CONFIGURED},
    }
    for policy in KNOBS["max_slots"]:
        slots = {str(each): Setting(max_slots=each, slot_policy=policy) for each in MAX_SLOTS}
        curves[policy] = slots | {"all": AS_CONFIGURED}
    return {curve: curves[curve] for knob in knobs for curve in KNOBS[knob]}


class MeasuringAnswerer(SlotAnswerer):
    """Measures the operations of each answer's prefill, with the steps that its slots took, and of StandardRAG's."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        steps = self.refinement.get("max_refinement_steps", self.model.config.max_refinement_steps)
        with recorded_depths(self.model) as depths:
            answers = super().answer(rows)
        (depth,) = depths  # (batch, num_layers, max_slots), of the one prefill
        texts = text_inputs(self.processor, [full_text(row) for row in rows])["attention_mask"].sum(dim=1)
        measured = []
        for answer, depth_of_row, length in zip(answers, depth, texts.tolist(), strict=True):
            operations = count_operations(self.model, answer.prompt_ids, depth_of_row, steps)
            operations["standard_rag_flops"] = prefix_flops(self.model.model.layer_costs, length, num_slots=0)
            measured.append(dataclasses.replace(answer, measured=operations))
        return measured


def load_answerer(checkpoint: str, setting: Setting, device: str) -> MeasuringAnswerer:
    """The aligner, read with a setting."""
    model, processor = load_aligner(checkpoint, device)
    require_gates(model, checkpoint)
    slots = {key: value for key, value in setting.changed.items() if key in ("max_slots", "slot_policy")}
    refinement = {key: value for key, value in setting.changed.items() if key not in slots}
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
    for setting in dict.fromkeys(setting for points in curves.values() for setting in points.values()):
        made_with = {"checkpoint": checkpoint, "weights": weights, **dataclasses.asdict(setting)}
        load = partial(load_answerer, checkpoint, setting, device)
        answer_tasks(setting.name, setting.name, made_with, load, rows, settings)
    sets = {}
    for name, asked in rows.items():
        as_configured = answers_to(asked, settings.output, name, AS_CONFIGURED.name)
        sets[TASKS[name].title] = {
            curve: [
                {"value": value, **measure(answers_to(asked, settings.output, name, setting.name), as_configured)}
                for value, setting in points.items()
            ]
            for curve, points in curves.items()
        }
    return {"checkpoint": checkpoint, "weights": weights, "sets": sets}


def measure(answers: list[dict[str, Any]], as_configured: list[dict[str, Any]]) -> dict[str, Any]:
    """
    A point of a curve.

    Args:
        answers (`list[dict]`): With the setting.
        as_configured (`list[dict]`): To the same questions, with all slots.

    Returns:
        `dict`: `cost`, the operations of the prefills in percent of those with all slots and no refinement;
        `of_standard_rag`, the same in percent of StandardRAG's; `refinement`, those of refinement in percent of the
        prefills up to the last slot without it, the share that a budget bounds; `slots` of a question; and the answers'
        quality.
    """
    total = {key: sum(answer[key] for answer in answers) for key in answers[0] if key.endswith("_flops")}
    taken = total["prefill_flops"] + total["refinement_flops"]
    return {
        "cost": 100 * taken / sum(answer["prefill_flops"] for answer in as_configured),
        "of_standard_rag": 100 * taken / total["standard_rag_flops"],
        "refinement": 100 * total["refinement_flops"] / total["prefix_flops"],
        "slots": sum(answer["context_tokens"] for answer in answers) / len(answers),
        **quality(answers),
    }


def draw(sets: dict[str, dict[str, list[dict[str, Any]]]], knobs: list[str]) -> Figure:
    """A column for each knob, a row for each metric, a color for each set of questions."""
    shape = {"nrows": len(QUALITY), "ncols": len(knobs), "sharex": "col", "sharey": "row", "squeeze": False}
    figure, grid = new_figure(3.2 * len(knobs) + 0.6, 2.6 * len(QUALITY) + 1.0, **shape)
    colors = dict(zip(sets, itertools.cycle(COLORS), strict=False))
    for panels, metric in zip(grid, QUALITY, strict=True):
        for axes, knob in zip(panels, knobs, strict=True):
            for (title, curves), (curve, line) in itertools.product(sets.items(), KNOBS[knob].items()):
                draw_points(axes, curves[curve], metric, colors[title], line)
        panels[0].set_ylabel(f"{QUALITY[metric]}, %")
    for axes, knob in zip(grid[0], knobs, strict=True):
        explain(axes, knob, next(iter(sets.values())))
    figure.supxlabel("operations of the prefill, % of that with all slots and no refinement", fontsize=10)
    handles = [set_line(color, title, sets[title]) for title, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_points(axes: Axes, points: list[dict[str, Any]], metric: str, color: str, line: str) -> None:
    """A curve with another mark for each value; hollow where the line is broken."""
    draw_curve(axes, points, "cost", metric, color=color, linestyle=line, linewidth=1, elinewidth=0.6, marker="")
    filling = color if line == "-" else "white"
    for point, marker in zip(points, itertools.cycle(MARKERS), strict=False):
        axes.scatter(point["cost"], point[metric][0], s=28, marker=marker, color=filling, edgecolors=color, zorder=3)


def explain(axes: Axes, knob: str, curves: dict[str, list[dict[str, Any]]]) -> None:
    """Above a column: the name of the knob, the marks of its values and, where there are several, its lines."""
    look = {"color": "grey", "markersize": 5}
    lines = KNOBS[knob]
    values = [point["value"] for point in curves[next(iter(lines))]]
    marks = [
        Line2D([], [], linestyle="", marker=marker, label=value, **look)
        for marker, value in zip(itertools.cycle(MARKERS), values, strict=False)
    ]
    if len(lines) > 1:
        marks += [Line2D([], [], linestyle=line, label=curve, **look) for curve, line in lines.items()]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(marks), "frameon": False}
    axes.legend(handles=marks, title=knob, fontsize=8, handlelength=1.6, handletextpad=0.2, columnspacing=0.7, **place)


def set_line(color: str, title: str, curves: dict[str, list[dict[str, Any]]]) -> Line2D:
    """A set of questions in the legend, and what 100 % of its operations are."""
    point = next(iter(curves.values()))[0]
    share = 100 * point["of_standard_rag"] / point["cost"]
    return Line2D([], [], color=color, label=f"{title} (100 % are {share:.0f} % of StandardRAG's)")


def budgets(
    checkpoint: Annotated[str | None, typer.Option(help="An aligner, not the recipe's.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe of evaluation/recipes, or a YAML file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, with commas between; else those of the recipe.")] = None,
    knobs: Annotated[str, typer.Option(help="What is turned, with commas between.")] = ",".join(KNOBS),
    data: Data = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="Maximum number of questions of each task.")] = None,
    device: Annotated[str | None, typer.Option(help="Where models run: cpu, cuda.")] = None,
    folder: Folder = FIGURES,
) -> None:
    """F1 and EM against operations, for budgets of refinement and numbers of slots.

    Takes long: all four knobs ask each question 15 times. Two cores answer 500 questions of a task once in two to four
    minutes, so each task takes half an hour to an hour. A killed run goes on where it was.
    """
    names = split_names(knobs)
    if unknown := [name for name in names if name not in KNOBS]:
        raise ValueError(f"There is no knob {', '.join(map(repr, unknown))}; known: {', '.join(KNOBS)}.")
    given = {"checkpoint": checkpoint, "tasks": split_names(tasks), "data": data, "device": device}
    settings = read_settings(recipe, given | {"output": folder / "budgets"}, {"num_questions": num_questions})
    numbers = analyze(settings, names)
    save_analysis(folder, "budgets", draw(numbers["sets"], names), numbers, CAPTION)
    typer.echo(CAPTION)
