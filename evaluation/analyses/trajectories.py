"""Trajectories of single questions: how many loops each slot takes at each layer, as in the paper's case studies.

    python -m arcaligner.evaluation.analyses trajectories --checkpoint runs/mine

For a question of your own: `python -m arcaligner answer --question ... --document ... --show-slots`.
"""

import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.progress import track

from ...files import CASE_STUDIES, DEFAULT_CHECKPOINT, printable, read_json_lines
from ...pipeline_arcaligner import ArcAlignerPipeline, format_trajectory
from ...train.corpora import Row
from ..answering import load_aligner
from .figures import FIGURES, Folder, new_figure, save_analysis

MAX_NEW_TOKENS = 32  # as in the demo
CAPTION = (
    "Each row is a slot, with the text that it stands for on its left, and each column a layer. The darker, the more "
    "loops the slot takes there: L0. is the single pass that every slot takes, LL two loops, LLL three."
)
SLOT_WIDTH, TITLE_WIDTH = 60, 100  # characters


def trajectories(
    checkpoint: Annotated[str, typer.Option(help="An aligner: a folder or a Hub id.")] = str(DEFAULT_CHECKPOINT),
    folder: Folder = FIGURES,
) -> None:
    """Draws the loops of each slot at each layer, a figure for each of the paper's cases."""
    cases = list(read_json_lines(CASE_STUDIES))
    model, processor = load_aligner(checkpoint, "cpu")
    ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
    for row in track(cases, "Trajectories", transient=True):
        case = trace(ask, row)
        figure = draw(case, ask.model.config.max_refinement_steps + 1)
        data = {"checkpoint": Path(checkpoint).name, **case}
        save_analysis(folder, file_name(row["question"]), figure, data, CAPTION)
    typer.echo(CAPTION)


def trace(ask: ArcAlignerPipeline, row: Row) -> dict[str, Any]:
    """
    Asks a question.

    Returns:
        `dict` with `question`, `answer`, `gold`, `segments` (what each slot stands for) and `trajectories` (for each
        layer the loops of each slot, as the paper writes them).
    """
    asked = {"question": row["question"], "documents": row["passages"]}
    record = ask(asked, return_slots=True, max_new_tokens=MAX_NEW_TOKENS)[0]
    return {
        "question": row["question"],
        "answer": record["generated_text"].strip(),
        "gold": row["answers"],
        "segments": record["segments"],
        "trajectories": record["trajectories"],
    }


def draw(case: dict[str, Any], max_loops: int) -> Figure:
    """Slots down, layers across, loops as color."""
    loops = np.array([[each.count("L") for each in layer] for layer in case["trajectories"]]).T  # (slots, layers)
    texts = [segment["text"] for segment in case["segments"]] or ["(no passage)"]
    labels = [one_line(text, SLOT_WIDTH) for text in texts]
    figure, axes = new_figure(width=10.0, height=1.6 + 0.3 * len(labels))
    shades = matplotlib.colormaps["Blues"].resampled(max_loops)  # one for each number of loops
    image = axes.imshow(loops, cmap=shades, vmin=0.5, vmax=max_loops + 0.5, aspect="auto")
    bar = figure.colorbar(image, ax=axes, ticks=range(1, max_loops + 1), label="loops")
    bar.ax.set_yticklabels([format_trajectory(steps) for steps in range(max_loops)])
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.grid(False)
    axes.set_title(title(case), parse_math=False, loc="left")
    return figure


def title(case: dict[str, Any]) -> str:
    """The question, the answer and the gold, if it is known."""
    parts = [case["question"], f"answer: {case['answer']}"]
    if case["gold"]:
        parts.append(f"gold: {' / '.join(case['gold'])}")
    return "\n".join(one_line(part, TITLE_WIDTH) for part in parts)


def one_line(text: str, width: int) -> str:
    """The beginning of a text, with visible escapes for control characters, which no picture may hold."""
    return textwrap.shorten(printable(text), width, placeholder=" …")


def file_name(question: str) -> str:
    """A name for the files of a question.

    >>> file_name("In what country is Toronto Northwest?")
    'trajectory_in_what_country_is_toronto_northwest'
    """
    words = re.findall(r"\w+", question.lower())
    return "_".join(["trajectory", *words])[:80]
