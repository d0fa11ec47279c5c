"""Tables and figures of a report of `benchmarks/latency.py`: how soon an answer begins, and what F1 it has then."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from ...common.files import counted, markdown_table
from ..methods import rate_title
from ..results import MAIN
from .figures import draw_curve, new_figure, save_analysis

BUDGET = 0.2  # of refinement, where it has one
ARM_TITLES = {
    "standard_rag": "text",
    "standard_rag_cached": "text, kept",
    "off": "slots",
    "adaptive": "slots, **adaptive**",
    "budgeted": f"slots, adaptive within {BUDGET:.0%}",
    "always": "slots, all refined",
    "slots_cached": "**slots, kept**",
}
COLUMNS = ("Arm", "First token, ms", "x text", "x text, with encoding", "ms/token", "questions/s")
COLUMNS += ("peak", "cache", "GFLOP")

SHORT_PASSAGES = 5, 20

# Tables


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
        ARM_TITLES[name],
        f"{1000 * first['median']:.0f} ({1000 * first['lower']:.0f} to {1000 * first['upper']:.0f})",
        f"{arm['speed_up']['median']:.1f}",
        "-" if encoded is None else f"{encoded:.1f}",
        f"{1000 * arm['per_token']['median']:.1f}",
        f"{arm['questions_per_second']['median']:.2f}",
        "-" if peak is None else f"{peak / 2**20:.1f} MiB",
        f"{arm['cache_bytes'] / 2**20:.1f} MiB",
        f"{arm['flops_counted'] / 1e9:.1f}",
    ]


def size_lines(size: dict[str, Any]) -> list[str]:
    """Markdown lines of a size: a heading, one arm per row, and what holds for all arms."""
    title = f"{counted(size['k'], 'passage')}, {rate_title(size['tokens_per_slot'])}, {size['dtype']}: "
    title += f"{size['text_tokens']:.0f} tokens of text or {size['slots']:.0f} slots"
    notes = [
        f"{size['rounds']} rounds",
        f"{size['open_share']:.1%} of gates open, in {size['open_layers']:.0%} of layers",
        f"kept text takes {size['prefix_bytes_ratio']:.1f} x the bytes of kept slots and "
        f"{size['cached_speed_up']['median']:.1f} x their time",
        f"a token after slots takes {size['decoding_ratio']['median']:.3f} x the bare base model's time",
        *(f"{name} {1000 * seconds['median']:.0f} ms" for name, seconds in size["encoder"].items()),
    ]
    table = markdown_table(COLUMNS, (arm_cells(size, name) for name in ARM_TITLES))
    return [f"### {title}", "", *table, "", f"{'; '.join(notes)}.", ""]


def first_token_table(report: dict[str, Any], every_size: bool = False) -> list[str]:
    """Markdown lines: milliseconds to the first token of one question, and times faster than text without and with
    encoding, a row for each k of `SHORT_PASSAGES` at the first, second and last rate, or for every size."""
    sizes = report["sizes"]
    if not every_size:
        sizes = [size for size in sizes if size["k"] in SHORT_PASSAGES]
        rates = list(dict.fromkeys(size["tokens_per_slot"] for size in sizes))
        sizes = [size for size in sizes if size["tokens_per_slot"] in (*rates[:2], rates[-1])]
    arms = [arm for arm in ARM_TITLES if arm not in ("adaptive", "budgeted", "always")]
    rows = []
    for size in sizes:
        cells = [size["k"], f"{size['text_tokens']:.0f}", size["tokens_per_slot"], f"{size['slots']:.0f}"]
        for name in arms:
            arm, encoded = size["arms"][name], encoded_speed_up(size, name)
            times = f" (x{arm['speed_up']['median']:.1f}{'' if encoded is None else f'; x{encoded:.1f}'})"
            cells.append(f"{1000 * arm['first_token']['median']:.0f}{'' if name == arms[0] else times}")
        rows.append(cells)
    lines = markdown_table(["Passages", "Tokens", "Rate", "Slots", *(ARM_TITLES[arm] for arm in arms)], rows)
    notes = f"Milliseconds (times faster than text; the same with encoding, in {report['encoder_dtype']})"
    return [*lines, "", f"{notes}; {report['model']}, one question; {machine_line(report)}."]


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
    """A panel for each rate."""
    sizes = sorted(report["sizes"], key=lambda size: size["k"])
    titles = list(dict.fromkeys(f"{rate_title(size['tokens_per_slot'])}, {size['dtype']}" for size in sizes))
    figure, panels = new_figure(3.6 * len(titles) + 1.2, 4.0, ncols=len(titles), sharey=True, squeeze=False)
    for axes, title in zip(panels[0], titles, strict=True):
        own = [size for size in sizes if f"{rate_title(size['tokens_per_slot'])}, {size['dtype']}" == title]
        passages = [size["k"] for size in own]
        for arm in ARM_TITLES:
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
    """Writes the picture and the report: `latency.svg`, `latency.json`."""
    save_analysis(folder, "latency", draw_figure(report), report, CAPTION)


# What a wait buys

TRADEOFF = "f1_of_speed"
TRADEOFF_PASSAGES = 20
TRADEOFF_CAPTION = (
    "F1, mean over the sets of the results, against the time to the first token of an answer from {k} passages that "
    "are known beforehand: encoded before the question, or kept, slots or text, from an earlier one. Each point of a "
    "line is a rate, tokens per slot, from one checkpoint. The fine-tuned reader is timed as the model that it is made "
    "from. F1 is of the sets' own passages, which are fewer."
)


def find_size(report: dict[str, Any], k: int, rate: int | str) -> dict[str, Any]:
    """The part of a report on a question about `k` passages at a rate."""
    for size in report["sizes"]:
        if (size["k"], size["tokens_per_slot"]) == (k, rate):
            return size
    raise ValueError(
        f"The report on latency has no {k} passages at the rate {rate}. Measure again: "
        f"`python -m arcaligner.benchmarks.latency --sizes {k} --tokens-per-slot {rate}`, with its other sizes."
    )


def first_token_ms(size: dict[str, Any], arm: str) -> float:
    """Median milliseconds to the first token of an arm."""
    return 1000 * size["arms"][arm]["first_token"]["median"]


def mean_f1(sets: dict[str, Any], method: str) -> float | None:
    """The mean F1 of a method over `sets` of the results, if all have it."""
    f1 = [each["methods"][method]["f1"][0] for each in sets.values() if method in each["methods"]]
    return sum(f1) / len(f1) if f1 and len(f1) == len(sets) else None


def tradeoff(report: dict[str, Any], sets: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Points of each way to read `TRADEOFF_PASSAGES` passages, by a `report` on latency at several rates and the `sets`
    of an evaluation at these: `rate`, `ms` to the first token, and `f1`."""
    own = report["own_tokens_per_slot"]
    curves: dict[str, list[dict[str, Any]]] = {}

    def add(curve: str, method: str, rate: int | str, ms: float) -> None:
        if (f1 := mean_f1(sets, method)) is not None:
            curves.setdefault(curve, []).append({"rate": rate, "ms": ms, "f1": f1})

    for rate in dict.fromkeys(size["tokens_per_slot"] for size in report["sizes"]):
        size = find_size(report, TRADEOFF_PASSAGES, rate)
        method = MAIN if rate == own else f"{MAIN}_x{rate}"
        add("slots, encoded before", method, rate, first_token_ms(size, "off"))
        add("slots, kept", method, rate, first_token_ms(size, "slots_cached"))
    size = find_size(report, TRADEOFF_PASSAGES, own)
    add("text, fine-tuned", "full_text_lora", "text", first_token_ms(size, "standard_rag"))
    add("text, fine-tuned, kept", "full_text_lora", "text", first_token_ms(size, "standard_rag_cached"))
    return curves


def draw_f1(curves: dict[str, list[dict[str, Any]]]) -> Figure:
    """F1 across milliseconds to the first token, each point with its rate."""
    figure, axes = new_figure(6.4, 3.8)
    for name, points in curves.items():
        axes.plot([point["ms"] for point in points], [point["f1"] for point in points], marker="o", label=name)
        for point in points:
            place = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 8}
            axes.annotate(point["rate"], (point["ms"], point["f1"]), **place)
    axes.set(xlabel="time to the first token, ms", ylabel="F1, %", xscale="log", ylim=(0, None))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def save_tradeoff(folder: Path, report: dict[str, Any], sets: dict[str, Any]) -> None:
    """Writes `f1_of_speed.svg` and `.json`."""
    curves = tradeoff(report, sets)
    caption = TRADEOFF_CAPTION.format(k=TRADEOFF_PASSAGES)
    save_analysis(folder, TRADEOFF, draw_f1(curves), {"curves": curves}, caption)


# Passages that are known

KEPT_REPORT = "kept.json"
LIKELIEST = "_likeliest"  # ends the name of an arm that asks about each passage first
_KEPT_TITLES = {
    "text": "text, nothing kept",
    "text_same_set": "text, the same passages asked about before",
    "text_apart": "text apart, kept",
}
_HOW = {"_folder": ", from disk", LIKELIEST: ", each asked, the likeliest read", "": ""}


def _kept_arm(name: str) -> tuple[str, str]:
    """What an arm of `kept.py` keeps, and its title."""
    end = next(end for end in _HOW if name.endswith(end))
    kept = name.removesuffix(end)
    title = _KEPT_TITLES.get(kept) or "**slots**, kept: " + rate_title(kept.removeprefix("slots_x"))
    return kept, title + _HOW[end]


def kept_lines(report: dict[str, Any]) -> list[str]:
    """Markdown lines: milliseconds to the first token and times sooner than from text, a row for each arm, a column
    for each number of passages, and what is kept of a passage."""
    sizes = report["sizes"]
    rows = []
    for name in sizes[0]["arms"]:
        kept, title = _kept_arm(name)
        cells = [f"{report['kept_bytes'][kept] / 1e6:.2f} MB" if kept in report["kept_bytes"] else "-"]
        for size in sizes:
            arm = size["arms"][name]
            times = "" if name == "text" else f" (x{arm['speed_up']['median']:.1f})"
            cells.append(f"{1000 * arm['first_token']['median']:.0f}{times}")
        rows.append([title, *cells])
    columns = ["First token, ms (times sooner than text)", "kept of a passage"]
    counts = [counted(size["k"], "passage") for size in sizes]
    note = f"A passage has {report['tokens_per_passage']:.0f} tokens; medians of {sizes[-1]['rounds']} rounds or more"
    note += f"; {report['model']}, {report['dtype']}, one question; {machine_line(report)}."
    return [*markdown_table([*columns, *counts], rows), "", note]
