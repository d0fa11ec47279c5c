"""The report of the latency benchmark for readers: tables, the figure, `docs/speed.md` and the README's table.

    python -m arcaligner.benchmarks.report --figures runs/figures

writes `docs/speed.md` and the README's table of `latency.json` in the folder, with the figures about speed; F1 beside
it is that of the checkpoint's results.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from ..common.files import DEFAULT_CHECKPOINT, ROOT, markdown_table, run_command, write_whole
from ..evaluation.analyses.figures import draw_curve, new_figure, save_analysis, use_powers_of_two
from ..evaluation.methods import find_method
from ..evaluation.publish import SPEED_FIGURES, copy_figures, with_block
from ..evaluation.results import MAIN, MAIN_TITLE
from ..share.hub import RESULTS_FILE
from .arms import BUDGET

MARKS = "<!-- speed: benchmarks/report.py -->", "<!-- end of speed -->"
README_PASSAGES = 5, 20
_SHOWN = {
    "standard_rag": "text",
    "standard_rag_cached": "text, cached",
    "off": "slots, no refinement",
    "adaptive": "slots, **adaptive**",
    "budgeted": f"slots, adaptive within {BUDGET:.0%}",
    "always": "slots, all refined",
    "slots_cached": "**slots, cached**",
}
COLUMNS = (
    "Arm",
    "First token, ms",
    "x text",
    "x text, with encoding",
    "ms/token",
    "questions/s",
    "peak",
    "cache",
    "GFLOP",
)

# Tables


def size_title(size: dict[str, Any]) -> str:
    """How many passages and questions there are, and how long they are as text and as slots."""
    title = f"{size['k']} passages x {size['batch_size']} questions, {_rate(size)}, {size['dtype']}: "
    return title + f"{size['text_tokens']:.0f} tokens of text or {size['slots']:.0f} slots per question"


def _rate(size: dict[str, Any]) -> str:
    rate = size["tokens_per_slot"]
    return f"one slot per {rate}" if rate == "segment" else f"{rate} tokens per slot"


def encoded_speed_up(size: dict[str, Any], name: str) -> float | None:
    """How many times sooner than from text the first token of an arm comes where its slots are made first, of medians;
    `None` where none are made."""
    if name in ("standard_rag", "standard_rag_cached", "slots_cached"):
        return None
    first = {arm: found["first_token"]["median"] for arm, found in size["arms"].items()}
    return first["standard_rag"] / (first[name] + sum(part["median"] for part in size["encoder"].values()))


def arm_cells(size: dict[str, Any], name: str) -> list[str]:
    """An arm's numbers under `COLUMNS`."""
    arm, encoded = size["arms"][name], encoded_speed_up(size, name)
    first, peak = arm["first_token"], arm["peak_bytes"]
    return [
        _SHOWN[name],
        f"{1000 * first['median']:.0f} ({1000 * first['lower']:.0f} to {1000 * first['upper']:.0f})",
        f"{arm['speed_up']['median']:.1f}",
        "-" if encoded is None else f"{encoded:.1f}",
        f"{1000 * arm['per_token']['median']:.1f}",
        f"{arm['questions_per_second']['median']:.2f}",
        "-" if peak is None else f"{peak / 2**20:.1f} MiB",
        f"{arm['cache_bytes'] / 2**20:.1f} MiB",
        f"{arm['flops_counted'] / 1e9:.1f}",
    ]


def size_caption(size: dict[str, Any]) -> str:
    """What holds for all arms of a size."""
    parts = [
        f"{size['rounds']} rounds",
        f"{size['open_share']:.1%} of gates open, in {size['open_layers']:.0%} of layers",
        f"cached text takes {size['prefix_bytes_ratio']:.1f} x the bytes of cached slots and "
        f"{size['cached_speed_up']['median']:.1f} x their time",
        f"a token after slots takes {size['decoding_ratio']['median']:.3f} x the bare base model's time",
        *(f"{name} {1000 * seconds['median']:.0f} ms" for name, seconds in size["encoder"].items()),
    ]
    return "; ".join(parts)


def size_lines(size: dict[str, Any]) -> list[str]:
    """Markdown lines of a size, one arm per row, under a heading."""
    table = markdown_table(COLUMNS, (arm_cells(size, name) for name in _SHOWN))
    return [f"### {size_title(size)}", "", *table, "", f"{size_caption(size)}.", ""]


def machine_line(report: dict[str, Any]) -> str:
    """The machine and the versions."""
    made_on = report["machine"]
    line = f"{made_on['device']}, {made_on['cpu']}, {made_on['threads']} threads, load {made_on['load']:.1f}; "
    return line + f"torch {made_on['torch']}, transformers {made_on['transformers']}"


# The figure

CAPTION = (
    "Median time to the first token, both scales logarithmic; bars are the middle half of the rounds. Slots were made "
    "before: the encoder's time is not included."
)


def draw_figure(report: dict[str, Any]) -> Figure:
    """A panel for each rate and dtype, of the sizes with the smallest batch."""
    smallest = min(size["batch_size"] for size in report["sizes"])
    sizes = sorted((size for size in report["sizes"] if size["batch_size"] == smallest), key=lambda size: size["k"])
    titles = list(dict.fromkeys(f"{_rate(size)}, {size['dtype']}" for size in sizes))
    figure, panels = new_figure(3.6 * len(titles) + 1.2, 4.0, ncols=len(titles), sharey=True, squeeze=False)
    for axes, title in zip(panels[0], titles, strict=True):
        own = [size for size in sizes if f"{_rate(size)}, {size['dtype']}" == title]
        passages = [size["k"] for size in own]
        for arm in _SHOWN:
            first = [(size["k"], size["arms"][arm]["first_token"]) for size in own]
            points = [{"k": k, "ms": [1000 * each[key] for key in ("median", "lower", "upper")]} for k, each in first]
            draw_curve(axes, points, "k", "ms", label=arm)
        axes.set(xscale="log", yscale="log", xlabel="passages", title=title, xticks=passages)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0][0].set_ylabel("time to the first token, ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def save_figure(folder: Path, report: dict[str, Any]) -> None:
    """Writes the picture and the report: `latency.png`, `latency.svg`, `latency.json`."""
    save_analysis(folder, "latency", draw_figure(report), report, CAPTION)


# What a wait buys

TRADEOFF = "f1_of_speed"
TRADEOFF_PASSAGES = 5
TRADEOFF_CAPTION = (
    "F1, mean over the sets of the results, across how many times sooner than from their text the first token of an "
    "answer from {k} passages comes. Each point of a line is a rate, from one checkpoint."
)


def tradeoff(report: dict[str, Any], sets: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Points of each way to read: `rate`, `speed_up` over text and `f1`, of one question about `TRADEOFF_PASSAGES`
    passages in the first dtype.

    Args:
        report (`dict`): The report of the latency benchmark at several rates.
        sets (`dict`): The results of an evaluation at these rates.
    """
    wanted = TRADEOFF_PASSAGES, 1, report["sizes"][0]["dtype"]
    curves: dict[str, list[dict[str, Any]]] = {}

    def add(curve: str, title: str, rate: int | str, speed_up: float) -> None:
        f1 = [each["methods"][title]["f1"][0] for each in sets.values() if title in each["methods"]]
        if len(f1) == len(sets):
            point = {"rate": rate, "speed_up": speed_up, "f1": sum(f1) / len(f1)}
            curves.setdefault(curve, []).append(point)

    for size in report["sizes"]:
        if (size["k"], size["batch_size"], size["dtype"]) == wanted:
            rate = size["tokens_per_slot"]
            title = find_method(f"{MAIN}_x{rate}").title
            if rate == report["own_tokens_per_slot"]:
                title = MAIN_TITLE
            add("slots, encoded first", title, rate, encoded_speed_up(size, "off"))
            add("slots, encoded before", title, rate, size["arms"]["off"]["speed_up"]["median"])
            add("slots, cached", title, rate, size["arms"]["slots_cached"]["speed_up"]["median"])
    add("text", find_method("standard_rag").title, "text", 1.0)
    add("text, fine-tuned", find_method("full_text_lora").title, "text", 1.0)
    return curves


def draw_tradeoff(curves: dict[str, list[dict[str, Any]]]) -> Figure:
    """F1 across times sooner than text."""
    figure, axes = new_figure(6.4, 3.8)
    for name, points in curves.items():
        points = sorted(points, key=lambda point: point["speed_up"])
        axes.plot(*([point[key] for point in points] for key in ("speed_up", "f1")), marker="o", label=name)
        for point in points:
            label = f"x{point['rate']}" if isinstance(point["rate"], int) else point["rate"]
            axes.annotate(label, (point["speed_up"], point["f1"]), (4, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="first token, times sooner than from text", ylabel="F1, %", ylim=(0, None))
    use_powers_of_two(axes)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


# The page and the README

_INTRODUCTION = """\
# Speed

How soon an answer begins when passages are read as slots, and when they are read as text.

- **Several questions about the same passages**: keep the slots, with `model.slot_prefix_store(processor)`. The server
  does so by itself. This is the column *slots, cached*.
- **Passages known before the question**: encode them once, in a [corpus](corpus.md). In the other columns of slots, the
  first number in parentheses is with passages encoded before, the second with segmenting and encoding.
- **A faster first token**: more text per slot, `tokens_per_slot=4` or `"segment"`. The answers get worse: see the
  second figure. With a single short passage there is little to gain.

```bash
python -m arcaligner.benchmarks.latency --output runs/latency    # --help: passages, rates, dtype, device
python -m arcaligner.benchmarks.report --figures runs/latency    # writes this page
```

## Time to the first token
"""
_DETAILS = f"""\
## All numbers

All columns of a row read the same questions and passages, in one process and in turns, so that their ratios hold. Times
are medians.

- *text* is the bare base model reading the passages; *cached*: the keys and values of all before the question are kept.
- *within {BUDGET:.0%}* is *adaptive* with `refinement_budget={BUDGET}`. Refinement takes at most this share of the
  operations of the slot prefix's prefill, the most confident slots first.
- *GFLOP*: operations of the products of the prefill, counted while it runs.
"""


def first_token_table(report: dict[str, Any], every_size: bool = False) -> list[str]:
    """Markdown lines: milliseconds to the first token of one question, and times faster than text without and with
    encoding, a row for each k of `README_PASSAGES` at the first, second and last rate, or for every size."""
    dtype = report["sizes"][0]["dtype"]
    sizes = [size for size in report["sizes"] if (size["batch_size"], size["dtype"]) == (1, dtype)]
    if not every_size:
        sizes = [size for size in sizes if size["k"] in README_PASSAGES]
        rates = list(dict.fromkeys(size["tokens_per_slot"] for size in sizes))
        sizes = [size for size in sizes if size["tokens_per_slot"] in (*rates[:2], rates[-1])]
    arms = [arm for arm in _SHOWN if arm not in ("budgeted", "always")]
    rows = []
    for size in sizes:
        cells = [size["k"], f"{size['text_tokens']:.0f}", size["tokens_per_slot"], f"{size['slots']:.0f}"]
        for name in arms:
            arm, encoded = size["arms"][name], encoded_speed_up(size, name)
            times = f" (x{arm['speed_up']['median']:.1f}{'' if encoded is None else f'; x{encoded:.1f}'})"
            cells.append(f"{1000 * arm['first_token']['median']:.0f}{'' if name == arms[0] else times}")
        rows.append(cells)
    lines = markdown_table(["Passages", "Tokens", "Rate", "Slots", *(_SHOWN[arm] for arm in arms)], rows)
    notes = f"Milliseconds (times faster than text; the same with encoding, in {report['encoder_dtype']})"
    return [*lines, "", f"{notes}; {report['model']}, one question; {machine_line(report)}."]


def speed_page(report: dict[str, Any], figures: list[str]) -> str:
    """`docs/speed.md`: the time to the first token, the lines of `figures`, and folded, a table of each size."""
    folded: dict[str, list[str]] = {}
    for size in report["sizes"]:
        title = f"{_rate(size)}, {size['dtype']}, questions at a time: {size['batch_size']}"
        folded.setdefault(title, []).extend(size_lines(size))
    lines = [_INTRODUCTION, *first_token_table(report, every_size=True), "", *figures, _DETAILS]
    for title, tables in folded.items():
        lines += [f"<details><summary>{title}</summary>", "", *tables, "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def publish(
    figures: Annotated[Path, typer.Option(help="Folder with latency.json and the analyses.")] = Path("runs/figures"),
    results: Annotated[Path, typer.Option(help="Results of an evaluation.")] = DEFAULT_CHECKPOINT / RESULTS_FILE,
) -> None:
    """Writes docs/speed.md and the README's table of speed; the figures about speed are copied to docs/figures."""
    report = json.loads((figures / "latency.json").read_text(encoding="utf-8"))
    curves = tradeoff(report, json.loads(results.read_text(encoding="utf-8"))["sets"])
    caption = TRADEOFF_CAPTION.format(k=TRADEOFF_PASSAGES)
    save_analysis(figures, TRADEOFF, draw_tradeoff(curves), {"curves": curves}, caption)
    shown = copy_figures(figures)
    lines = [line for name in SPEED_FIGURES for line in shown.get(name, [])]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    write_whole(ROOT / "README.md", with_block(readme, "\n".join(first_token_table(report)), MARKS))
    write_whole(ROOT / "docs" / "speed.md", speed_page(report, lines))


if __name__ == "__main__":
    run_command(publish)
