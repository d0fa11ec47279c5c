"""How many loops the gates trigger at each layer: the paper's analysis of gate behavior.

    python -m arcaligner.evaluation.analyses gates --checkpoint runs/mine --data ../data

A slot takes one loop, the pass that every row takes, and one more for each refinement step.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.progress import track

from ...common.rows import Row
from ...modeling_arcaligner import ArcAlignerForCausalLM
from ...processing_arcaligner import ArcAlignerProcessor
from ..answering import in_batches, load_aligner, longest_first, slot_inputs
from ..metrics import ratio_interval
from ..settings import split_names
from ..tasks import choose_passages, find_task
from .figures import FIGURES, Folder, new_figure, save_analysis

CAPTION = (
    "Each line is a set of questions: how many loops a slot takes at a layer, the mean over all slots of the set's "
    "passages, the gold ones where these are marked. 1 is the single pass that every slot takes, {max_loops} the most. "
    "The band is a 95 % bootstrap interval over questions. The last layer never loops when an aligner answers: no "
    "later layer reads its slots."
)


def gates(
    checkpoint: Annotated[str, typer.Option(help="Aligner checkpoint: a folder or a Hub id.")],
    folder: Folder = FIGURES,
    data: Annotated[Path | None, typer.Option(help="Folder of local files, TASK.jsonl.gz. Default: the Hub.")] = None,
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = "squad,nq,hotpotqa,popqa_longtail",
    num_questions: Annotated[int, typer.Option("-n", help="Maximum number of questions of each task.", min=1)] = 500,
    batch_size: Annotated[int, typer.Option(help="Questions at a time.", min=1)] = 16,
    device: Annotated[str, typer.Option(help="Where models run: cpu, cuda.")] = "cpu",
) -> None:
    """Draws how many loops the gates trigger at each layer, on several sets."""
    asked = [find_task(name) for name in split_names(tasks)]
    rows = {task.title: rows_with_passages(task.name, task.load(data, num_questions)) for task in asked}
    model, processor = load_aligner(checkpoint, device)
    require_gates(model, checkpoint)
    sets = {title: summarize(count_loops(model, processor, each, batch_size, title)) for title, each in rows.items()}
    caption = CAPTION.format(max_loops=model.config.max_refinement_steps + 1)
    numbers = {"checkpoint": checkpoint, "gate_mode": model.config.gate_mode, "sets": sets}
    save_analysis(folder, "gates", draw(sets), numbers, caption)
    typer.echo(caption)


def rows_with_passages(name: str, rows: list[Row]) -> list[Row]:
    """The rows with the passages that their answer needs, without those that have none: nothing is compressed there."""
    with_passages = [row for row in choose_passages(rows, "gold") if row["passages"]]
    if not with_passages:
        raise ValueError(f"No question of {name} has a passage, so there are no slots. Name another task.")
    return with_passages


def require_gates(model: ArcAlignerForCausalLM, checkpoint: str) -> None:
    """Raises `ValueError` if the checkpoint has no active gate."""
    config = model.config
    if config.gate_mode != "adaptive" or not config.gated_layers:
        raise ValueError(
            f"The gates of {checkpoint} decide nothing: its `gate_mode` is {config.gate_mode!r}, and "
            f"{len(config.gated_layers)} of its layers have a gate. Name a checkpoint of stage III, which trains them."
        )


@torch.inference_mode()
def count_loops(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row], batch_size: int, title: str
) -> np.ndarray:
    """How many slots of a row took 1, 2, ... loops at a layer, (num_rows, num_layers, max_loops)."""

    def count(batch: list[Row]) -> torch.Tensor:
        inputs = slot_inputs(processor, batch).to(model.device)
        depth = model.model(**inputs, use_cache=False).recursion_depth  # (batch, num_layers, max_slots), -1 no slot
        steps = range(model.config.max_refinement_steps + 1)
        return torch.stack([(depth == number).sum(dim=2) for number in steps], dim=2)

    of_rows = (counts for _, of_batch in in_batches(longest_first(rows), batch_size, count) for counts in of_batch)
    return torch.stack(list(track(of_rows, title, total=len(rows), transient=True))).cpu().numpy()


def summarize(counts: np.ndarray) -> dict[str, Any]:
    """A set's `questions` and `slots`, from [`count_loops`]; for each layer its `loops`, the mean over slots with the
    ends of its interval, and `shares`, of slots that took 1, 2, ... loops."""
    slots = counts.sum(axis=2)  # (num_rows, num_layers)
    loops = counts @ np.arange(1, counts.shape[2] + 1)  # (num_rows, num_layers)
    mean = loops.sum(axis=0) / slots.sum(axis=0)  # (num_layers,)
    return {
        "questions": len(counts),
        "slots": int(slots[:, 0].sum()),
        "loops": np.stack([mean, *ratio_interval(loops, slots)], axis=1).tolist(),
        "shares": (counts.sum(axis=0) / slots.sum(axis=0)[:, None]).tolist(),
    }


def draw(sets: dict[str, dict[str, Any]]) -> Figure:
    """Loops by layer, one line per set."""
    figure, axes = new_figure()
    for title, numbers in sets.items():
        mean, low, high = np.transpose(numbers["loops"])  # each (num_layers,)
        (line,) = axes.plot(mean, marker="o", markersize=3, label=f"{title} ({numbers['slots']} slots)")
        axes.fill_between(range(len(mean)), low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("loops of a slot, mean")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
