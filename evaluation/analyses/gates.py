"""Loops per layer, the paper's analysis of gate behavior, and traces of single questions.

At a layer, a slot takes one loop, the mandatory pass, and one more for each refinement step. In traces, `L0.` is one
loop, `LL` two and `LLL` three.
"""

import textwrap
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...common.files import counted, markdown_table, printable
from ...common.rows import Row
from ...modeling_arcaligner import ArcAlignerForCausalLM
from ...pipeline_arcaligner import ArcAlignerPipeline, format_trajectory
from ...processing_arcaligner import ArcAlignerProcessor
from ...train.prompts import slot_inputs
from ..answering import in_batches
from .figures import new_figure

TEXT_WIDTH = 60  # characters of a slot's text next to its row
TITLE_WIDTH = 100


def require_gates(model: ArcAlignerForCausalLM, checkpoint: str) -> None:
    """Raises `ValueError` if the gates of the checkpoint are off or missing."""
    config = model.config
    if config.gate_mode != "adaptive" or not config.gated_layers:
        raise ValueError(
            f"{checkpoint} has no active gates: its `gate_mode` is {config.gate_mode!r}, and it has "
            f"{counted(len(config.gated_layers), 'layer')} with a gate. Name a checkpoint of stage III with trained "
            "gates as `gated` in the recipe or, if the recipe has no `gated`, with `--checkpoint`."
        )


@torch.inference_mode()
def count_loops(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    rows: list[Row],
    batch_size: int,
    title: str,
    tokens_per_slot: int | str | None = None,
) -> np.ndarray:
    """How many slots of a row took 1, 2, ... loops at a layer: (num_rows, num_layers, max_loops). The order of the rows
    may change."""
    counts: list[torch.Tensor] = []
    steps = range(model.config.max_refinement_steps + 1)

    def count(batch: list[Row]) -> None:
        inputs = slot_inputs(processor, batch, tokens_per_slot).to(model.device)
        depth = model.model(**inputs, use_cache=False).recursion_depth  # (batch, num_layers, max_slots), -1: no slot
        counts.append(torch.stack([(depth == number).sum(dim=2) for number in steps], dim=2).cpu())

    in_batches(rows, batch_size, count, title)
    return torch.cat(counts).numpy()


def summarize_loops(counts: np.ndarray) -> dict[str, Any]:
    """A set's `questions` and `slots`, of [`count_loops`]; for each layer its `loops`, the mean over slots, and
    `shares`, of slots that took 1, 2, ... loops."""
    slots, total = counts.sum(axis=2), counts.sum(axis=0)  # (num_rows, num_layers), (num_layers, max_loops)
    shares = total / total.sum(axis=1, keepdims=True)
    return {
        "questions": len(counts),
        "slots": int(slots[:, 0].sum()),
        "loops": (shares @ np.arange(1, counts.shape[2] + 1)).tolist(),
        "shares": shares.tolist(),
    }


def draw_loops(sets: dict[str, dict[str, Any]]) -> Figure:
    """Mean loops of a slot across layers, a line for each set."""
    figure, axes = new_figure(6.4, 3.5)
    for title, numbers in sets.items():
        axes.plot(numbers["loops"], marker="o", markersize=3, label=f"{title} ({numbers['slots']:,} slots)")
    axes.set(xlabel="layer", ylabel="loops of a slot, mean", ylim=(0.95, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def loops_table(sets: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown lines: mean loops by layer, a row for each layer where a slot of any set took more than one."""
    layers = range(len(next(iter(sets.values()))["loops"]))
    opened = [layer for layer in layers if any(numbers["loops"][layer] > 1 for numbers in sets.values())]
    rows = [[layer, *(f"{numbers['loops'][layer]:.2f}" for numbers in sets.values())] for layer in opened]
    mean = [f"{np.mean(numbers['loops']):.2f}" for numbers in sets.values()]
    columns = [f"{title} ({numbers['questions']} questions)" for title, numbers in sets.items()]
    return markdown_table(["Layer", *columns], [*rows, [f"all {len(layers)} layers", *mean]])


# Single questions


def trace(ask: ArcAlignerPipeline, row: Row, **settings: Any) -> dict[str, Any]:
    """
    Answer a question, and record the loops of its slots.

    Returns:
        `dict` with `question`, `answer`, `gold`, `evidence` (the number of the segment with the evidence, from 1, or
        None if it is not known), `segments` (the text of each slot, and its characters) and `trajectories` (for each
        layer the loops of each slot, as the paper writes them).
    """
    record = ask({"question": row["question"], "documents": row["passages"]}, return_slots=True, **settings)[0]
    return {
        "question": row["question"],
        "answer": record["generated_text"].strip(),
        "gold": row["answers"],
        "evidence": row.get("evidence"),
        "segments": record["segments"],
        "trajectories": record["trajectories"],
    }


def draw_trace(case: dict[str, Any], max_loops: int) -> Figure:
    """Draw a row for each slot and a column for each layer: loops as colors and, above one, as the paper's letters."""
    loops = np.array([[passes.count("L") for passes in layer] for layer in case["trajectories"]]).T  # (slots, layers)
    labels = [one_line(segment["text"], TEXT_WIDTH) for segment in case["segments"]] or ["(no passage)"]
    figure, axes = new_figure(11.0, 1.7 + 0.28 * len(labels))
    shades = matplotlib.colormaps["Blues"].resampled(max_loops)
    image = axes.imshow(loops, cmap=shades, vmin=0.5, vmax=max_loops + 0.5, aspect="auto")
    bar = figure.colorbar(image, ax=axes, ticks=range(1, max_loops + 1), label="loops")
    bar.ax.set_yticklabels([format_trajectory(steps) for steps in range(max_loops)])
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.grid(False)
    parts = case["question"], f"answer: {case['answer']}", f"gold: {' / '.join(case['gold'])}"
    axes.set_title("\n".join(one_line(part, TITLE_WIDTH) for part in parts), parse_math=False, loc="left", fontsize=10)
    return figure


def trace_lines(case: dict[str, Any]) -> list[str]:
    """Markdown lines: the text of each slot, which slot takes the most passes, and the `traj` of each layer that loops,
    as in the paper."""
    lines = [f"**Question.** {one_line(case['question'], TITLE_WIDTH)}", ""]
    lines += ["**Sentences**, with the paper's misprints. A slot, one vector, replaces each sentence:", ""]
    lines += [f"{number}. {one_line(segment['text'], 300)}" for number, segment in enumerate(case["segments"], start=1)]
    answer, gold = one_line(case["answer"], TITLE_WIDTH), " / ".join(case["gold"])
    lines += ["", f"**Answer.** {answer} (right answer: {gold})", ""]
    looping = [
        f"- Layer {layer}: `traj = [{', '.join(passes)}]`"
        for layer, passes in enumerate(case["trajectories"])
        if any(slot.count("L") > 1 for slot in passes)
    ]
    if not looping:
        return [*lines, "At each layer all slots take one pass, `L0.`: the layer is applied to a slot once."]
    passes_of_slots = [sum(slot.count("L") for slot in slots) for slots in zip(*case["trajectories"], strict=True)]
    most = max(passes_of_slots)
    largest = " and ".join(str(number) for number, passes in enumerate(passes_of_slots, start=1) if passes == most)
    found = (
        "Each time that a layer is applied to a slot is a *pass*. A slot takes one pass, and more where the gate of "
        f"the layer is open. Summed over all {len(case['trajectories'])} layers, sentence {largest} takes the most "
        f"passes, {most}."
    )
    if case["evidence"] is not None:
        number = case["evidence"]
        found += f" The evidence, the fact that the answer needs, is in sentence {number}"
        found += ", too." if largest == str(number) else f", which takes {passes_of_slots[number - 1]} passes."
    order = (
        "At these layers a slot takes more than one pass. Each entry is a sentence, in the order above; `L0.` is one "
        "pass, `LL` two, `LLL` three:"
    )
    return [*lines, found, "", order, "", *looping]


def one_line(text: str, width: int) -> str:
    """The beginning of a text, with visible escapes for control characters, which an SVG cannot contain."""
    return textwrap.shorten(printable(text), width, placeholder=" …")
