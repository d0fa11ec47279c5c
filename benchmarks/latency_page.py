"""The latency benchmark for readers: the README's table and `docs/speed.md`, from its report alone."""

from collections.abc import Iterable
from typing import Any

from .arms import BUDGET
from .latency_report import COLUMNS, arm_cells, machine_line, size_caption, size_title, target_cells

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
_INTRODUCTION = f"""\
# Speed

Written by `python -m arcaligner.evaluation.publish` from the report of `python -m arcaligner.benchmarks.latency`. All
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
    lines = [_INTRODUCTION, "## Aims", "", *_targets(report), ""]
    for size in report["sizes"]:
        lines += _size(size)
    return "\n".join([*lines, machine_line(report) + ".", "", *figures]).rstrip() + "\n"


def _targets(report: dict[str, Any]) -> list[str]:
    lines = _head(["Passages x questions", "Aim", "Reached", "Bound", "Met"])
    return lines + [_row(target_cells(size, each)) for size in report["sizes"] for each in size["targets"]]


def _size(size: dict[str, Any]) -> list[str]:
    lines = [f"## {size_title(size)}", "", *_head(COLUMNS)]
    lines += [_row([_SHOWN[name], *arm_cells(arm)]) for name, arm in size["arms"].items()]
    lines += ["", f"{size_caption(size)}.", ""]
    if "profile" in size:
        lines += ["Where the time of one pass goes, in ms:", "", *_head(["Arm", *next(iter(size["profile"].values()))])]
        for name, seconds in size["profile"].items():
            lines.append(_row([_SHOWN[name], *(f"{1000 * each:.0f}" for each in seconds.values())]))
        lines.append("")
    return lines


def _ms(size: dict[str, Any], arm: str) -> str:
    return f"{1000 * size['arms'][arm]['first_token']['median']:.0f}"


def _times(size: dict[str, Any], arm: str) -> str:
    return f"{size['arms'][arm]['speed_up']['median']:.1f}"


def _head(columns: Iterable[str]) -> list[str]:
    columns = list(columns)
    return [_row(columns), "|" + "---|" * len(columns)]


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
