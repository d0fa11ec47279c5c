"""The report of the latency benchmark for readers: tables, the figure, `docs/speed.md` and the README's table.

    python -m arcaligner.benchmarks.report --figures runs/figures

writes `docs/speed.md` and the README's table of `latency.json` in the folder, with the figures about speed.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from ..evaluation.analyses.figures import new_figure, reach, save_analysis
from ..evaluation.publish import ROOT, SPEED_FIGURES, copy_figures, with_block
from ..files import run_command, write_whole
from .arms import BUDGET
from .measuring import quartiles

MARKS = "<!-- speed: benchmarks/report.py -->", "<!-- end of speed -->"
SPEED_UPS = {5: 8.0, 20: 15.0}  # over `standard_rag`, without refinement, by passages
REFINED_SHARE = 0.8  # of these with adaptive refinement
CACHED_SPEED_UPS = {20: 25.0}
CACHE_RATIO = 24.0  # bytes of the text's cached prefix over those of the slots'
DECODING_BOUND = 1.02  # seconds per token, over those of the bare backbone
PLAIN_RATIO = 4.0  # seconds that plain refinement adds, over those that adaptive refinement adds

_SHOWN = {
    "standard_rag": "text",
    "standard_rag_cached": "text, cached",
    "off": "slots, no refinement",
    "adaptive": "slots, **adaptive**",
    "budgeted": f"slots, adaptive within {BUDGET:.0%}",
    "always": "slots, all refined",
    "slots_cached": "**slots, cached**",
    "plain": "plain Algorithm 1",
}
COLUMNS = ("Arm", "First token, ms", "x text", "x limit", "ms/token", "questions/s", "peak", "cache", "GFLOP")

# Tables

Seconds = list[dict[str, float]]  # a round's, by arm


def ratio(seconds: Seconds, slow: str, fast: str) -> dict[str, float]:
    """How many times faster `fast` is, by rounds."""
    return quartiles([each[slow] / each[fast] for each in seconds])


def refinement_ratio(seconds: Seconds) -> float | None:
    """Median seconds that plain refinement adds to `off`, over those of adaptive; `None` where that adds none."""
    plain, adaptive = (
        quartiles([each[arm] - each["off"] for each in seconds])["median"] for arm in ("plain", "adaptive")
    )
    return plain / adaptive if adaptive > 0 else None


def targets(size: dict[str, Any]) -> list[dict[str, Any]]:
    """What is aimed at with this many passages: `what`, the `value` reached, its `bound`, whether `met`."""
    k, arms = size["k"], size["arms"]
    speed_up = {name: arm["speed_up"]["median"] for name, arm in arms.items()}
    found = []

    def at_least(what: str, value: float | None, bound: float) -> None:
        # Refinement that takes no time at all is cheap enough.
        met = value is None or value >= bound
        found.append({"what": what, "value": value, "bound": bound, "at_least": True, "met": met})

    if k in SPEED_UPS:
        at_least("first token, off", speed_up["off"], SPEED_UPS[k])
        at_least("first token, adaptive", speed_up["adaptive"], REFINED_SHARE * SPEED_UPS[k])
        at_least(f"first token, adaptive within {BUDGET:.0%}", speed_up["budgeted"], REFINED_SHARE * SPEED_UPS[k])
    if k in CACHED_SPEED_UPS:
        at_least("first token, slots cached", speed_up["slots_cached"], CACHED_SPEED_UPS[k])
        at_least("first token, slots cached over text cached", size["cached_speed_up"]["median"], 1.0)
        at_least("bytes of the text's cached prefix over the slots'", size["prefix_bytes_ratio"], CACHE_RATIO)
    at_least("added by refinement, plain over adaptive", size["refinement_ratio"], PLAIN_RATIO)
    decoding = size["decoding_ratio"]["median"]
    found.append(
        {
            "what": "time per output token over the bare backbone's",
            "value": decoding,
            "bound": DECODING_BOUND,
            "at_least": False,
            "met": decoding <= DECODING_BOUND,
        }
    )
    return found


def size_title(size: dict[str, Any]) -> str:
    """How many passages and questions, how long in text and in slots."""
    title = f"{size['k']} passages x {size['batch_size']} questions, {size['dtype']}: "
    return title + f"{size['text_tokens']:.0f} tokens of text or {size['slots']:.0f} slots a question"


def arm_cells(arm: dict[str, Any]) -> list[str]:
    """An arm's figures under `COLUMNS`, except its name."""
    first = arm["first_token"]
    return [
        f"{1000 * first['median']:.0f} ({1000 * first['lower']:.0f} to {1000 * first['upper']:.0f})",
        f"{arm['speed_up']['median']:.1f}",
        f"{first['median'] / arm['first_token_limit']:.1f}",
        f"{1000 * arm['per_token']['median']:.1f}",
        f"{arm['questions_per_second']['median']:.2f}",
        _mebibytes(arm["peak_bytes"]),
        _mebibytes(arm["cache_bytes"]),
        f"{arm['flops'] / 1e9:.1f} ({arm['flops_counted'] / 1e9:.1f})",
    ]


def size_caption(size: dict[str, Any]) -> str:
    """What holds for all arms of a size."""
    parts = [
        f"{size['rounds']} rounds",
        f"{size['open_share']:.1%} of gates open, in {size['open_layers']:.0%} of layers",
    ]
    if (times := size["refinement_flops_ratio"]) is not None:
        parts.append(f"plain refinement takes {times:.1f} x the operations")
    decoding = size["arms"]["adaptive"]["per_token"]["median"] / size["per_token_limit"]
    parts.append(f"decoding after slots {decoding:.1f} x its limit")
    for name, seconds in size["encoder"].items():
        parts.append(f"{name} {1000 * seconds['median']:.0f} ms, not included")
    return "; ".join(parts)


def _mebibytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f} MiB"


def size_lines(size: dict[str, Any]) -> list[str]:
    """Markdown lines of a size, one arm per row, under a heading."""
    lines = [f"## {size_title(size)}", "", *_head(COLUMNS)]
    lines += [_row([_SHOWN[name], *arm_cells(arm)]) for name, arm in size["arms"].items()]
    return [*lines, "", f"{size_caption(size)}.", ""]


def target_lines(sizes: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: what is aimed at, what was reached, the bound, and whether it is met, of every size."""
    lines = _head(["Passages x questions", "Aim", "Reached", "Bound", "Met"])
    for size in sizes:
        for target in size["targets"]:
            digits = 2 if target["at_least"] else 3  # bounds from above are close to 1
            value = "no time added" if target["value"] is None else f"{target['value']:.{digits}f}"
            bound = f"{'at least' if target['at_least'] else 'at most'} {target['bound']:g}"
            name = f"{size['k']}x{size['batch_size']} {size['dtype']}"
            lines.append(_row([name, target["what"], value, bound, "yes" if target["met"] else "no"]))
    return lines


def machine_line(report: dict[str, Any]) -> str:
    """The machine, its peaks and the versions."""
    made_on = report["machine"]
    peaks = [
        f"{dtype} {each['flops_per_second'] / 1e9:.0f} GFLOP/s, {each['bytes_per_second'] / 1e9:.1f} GB/s"
        for dtype, each in report["peaks"].items()
    ]
    line = f"{made_on['device']}, {made_on['cpu']}, {made_on['threads']} threads, load {made_on['load']:.1f}; "
    return line + "; ".join(peaks) + f"; torch {made_on['torch']}, transformers {made_on['transformers']}"


# The figure

CAPTION = (
    "Median time to the first token, both scales logarithmic; bars are the middle half of the rounds. Dashed lines are "
    "the shortest times that the machine's own peaks allow. Slots were made before: the encoder's time is not in it."
)
_WITH_LIMIT = ("standard_rag", "adaptive", "slots_cached")


def draw_figure(report: dict[str, Any]) -> Figure:
    """A panel for each dtype, of the sizes with the smallest batch."""
    smallest = min(size["batch_size"] for size in report["sizes"])
    sizes = sorted((size for size in report["sizes"] if size["batch_size"] == smallest), key=lambda size: size["k"])
    dtypes = list(report["peaks"])
    figure, panels = new_figure(4.8 * len(dtypes), 4.0, ncols=len(dtypes), sharey=True, squeeze=False)
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        own = [size for size in sizes if size["dtype"] == dtype]
        passages = [size["k"] for size in own]
        for arm in own[0]["arms"]:
            first = [size["arms"][arm]["first_token"] for size in own]
            spread = [[1000 * each[key] for key in ("median", "lower", "upper")] for each in first]
            style = {"marker": "o", "markersize": 4, "capsize": 2, "label": arm}
            line = axes.errorbar(passages, [each[0] for each in spread], reach(spread), **style)
            if arm in _WITH_LIMIT:
                limit = [1000 * size["arms"][arm]["first_token_limit"] for size in own]
                axes.plot(passages, limit, linestyle="--", linewidth=1, color=line[0].get_color())
        axes.set(xscale="log", yscale="log", xlabel="passages", title=dtype, xticks=passages)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0][0].set_ylabel("time to the first token, ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def save_figure(folder: Path, report: dict[str, Any]) -> None:
    """Writes the picture and the report: `latency.png`, `latency.svg`, `latency.json`."""
    save_analysis(folder, "latency", draw_figure(report), report, CAPTION)


# The page and the README

_INTRODUCTION = f"""\
# Speed

Written by `python -m arcaligner.benchmarks.report` from the report of `python -m arcaligner.benchmarks.latency`. All
rows of a table read the same questions and passages, in one process and in turns, so that their ratios hold; times are
medians. Slots were encoded before; what that takes stands below each table.

- *text* is the bare base model that reads the passages, *cached* with the keys and values of all before the question.
- *within {BUDGET:.0%}*: as *adaptive* with `refinement_budget={BUDGET}`, which computes less: refinement takes at
  most so many operations of the slot prefix's prefill, the most confident slots first.
- *plain Algorithm 1* makes the same decisions as *adaptive* and applies a layer to the whole prompt in each step.
- *x limit*: times what the operations and bytes of the method would take at the peaks measured on the machine.
- *GFLOP*: of the method by formula, in brackets as counted in the code.
"""


def first_token_table(report: dict[str, Any]) -> list[str]:
    """Markdown lines: milliseconds to the first token of one question, and times faster than text, a row for each k."""
    dtype = next(iter(report["peaks"]))
    sizes = [size for size in report["sizes"] if (size["batch_size"], size["dtype"]) == (1, dtype)]
    arms = [arm for arm in _SHOWN if arm not in ("budgeted", "always", "plain")]
    lines = _head(["Passages", "Tokens", "Slots", *(_SHOWN[arm] for arm in arms)])
    for size in sizes:
        cells = [f"{_ms(size, arm)}" + ("" if arm == "standard_rag" else f" (x{_times(size, arm)})") for arm in arms]
        lines.append(_row([size["k"], f"{size['text_tokens']:.0f}", f"{size['slots']:.0f}", *cells]))
    return [*lines, "", f"Milliseconds; {report['model']}, one question; {machine_line(report)}."]


def speed_page(report: dict[str, Any], figures: list[str]) -> str:
    """`docs/speed.md`: what was aimed at, each size, and the lines of `figures`."""
    lines = [_INTRODUCTION, "## Aims", "", *target_lines(report["sizes"]), ""]
    for size in report["sizes"]:
        lines += size_lines(size)
    return "\n".join([*lines, machine_line(report) + ".", "", *figures]).rstrip() + "\n"


def _ms(size: dict[str, Any], arm: str) -> str:
    return f"{1000 * size['arms'][arm]['first_token']['median']:.0f}"


def _times(size: dict[str, Any], arm: str) -> str:
    return f"{size['arms'][arm]['speed_up']['median']:.1f}"


def _head(columns: Iterable[str]) -> list[str]:
    columns = list(columns)
    return [_row(columns), "|" + "---|" * len(columns)]


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def publish(figures: Path, root: Path) -> None:
    """Writes the page and the README's table; the figures about speed are copied to `docs/figures`."""
    report = json.loads((figures / "latency.json").read_text(encoding="utf-8"))
    shown = copy_figures(figures, root / "docs" / "figures")
    lines = [line for name in SPEED_FIGURES for line in shown.get(name, [])]
    readme = (root / "README.md").read_text(encoding="utf-8")
    write_whole(root / "README.md", with_block(readme, "\n".join(first_token_table(report)), MARKS))
    write_whole(root / "docs" / "speed.md", speed_page(report, lines))


def main(
    figures: Annotated[Path, typer.Option(help="Folder with latency.json and the analyses.")] = Path("runs/figures"),
) -> None:
    """Writes docs/speed.md and the README's table of speed."""
    publish(figures, ROOT)


if __name__ == "__main__":
    run_command(main)
