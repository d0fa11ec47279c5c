"""`results.json` as Markdown: the paper's tables with our numbers, beside the paper's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..model_card import METRIC_TITLES
from .methods import ABLATIONS, METHODS
from .metrics import shown_interval

PAPER = json.loads((Path(__file__).parent / "paper_results.json").read_text(encoding="utf-8"))
METHOD_TITLES = [method.title for method in METHODS.values()]
ABLATION_TITLES = [METHODS[name].title for name in ABLATIONS]
MAIN_TITLE = METHODS["arcaligner"].title
# Titles of the same design here and in the paper.
SAME_IN_PAPER = {"xRAG (our training)": "xRAG", "xRAG (released)": "xRAG"}


def results_page(results: dict[str, Any]) -> str:
    """All tables of a run."""
    sets = results["sets"]
    lines: list[str] = []
    for metric in ("f1", "em", "em_raw"):
        lines += method_table(METRIC_TITLES[metric], sets, metric)
    lines += accuracy_tables(sets)
    ablation = [method_table(METRIC_TITLES[metric], sets, metric, ABLATION_TITLES) for metric in ("em", "f1")]
    differences = [difference_table(METRIC_TITLES[metric], sets, metric) for metric in ("f1", "em")]
    lines += _section("Ablation", *ablation, accuracy_tables(sets, ABLATION_TITLES))
    lines += _section(f"{MAIN_TITLE} less another method, on the same questions", *differences, ratio_lines(sets))
    lines += _section("Costs", cost_table(sets))
    lines += _section("The paper's numbers", paper_table(sets))
    return "\n".join([*lines, *described(results), ""])


def _section(title: str, *parts: list[str]) -> list[str]:
    """Lines under a heading, and no heading where there are none."""
    lines = [line for part in parts for line in part]
    return [f"## {title}", "", *lines] if lines else []


def method_table(title: str, sets: dict, metric: str, methods: list[str] = METHOD_TITLES) -> list[str]:
    """Methods down, sets across, a mean with its interval in each cell, and of how many questions where not of all."""

    def show(entry: dict, method: str) -> str | None:
        numbers = entry["methods"].get(method, {})
        shown = _interval(numbers.get(metric))
        return f"{shown} of {numbers['questions']}" if shown and numbers["questions"] < entry["questions"] else shown

    return table(title, methods, sets, show)


def accuracy_tables(sets: dict, methods: list[str] = METHOD_TITLES) -> list[str]:
    """A table for each judge, of its judged accuracy."""
    judges = sorted({judge for entry in sets.values() for each in entry["methods"].values() for judge in each["acc"]})
    lines = []
    for judge in judges:

        def show(entry: dict, method: str, judge: str = judge) -> str | None:
            return _interval(entry["methods"].get(method, {"acc": {}})["acc"].get(judge))

        lines += table(f"Acc, judged by {judge}", methods, sets, show)
    return lines


def difference_table(title: str, sets: dict, metric: str) -> list[str]:
    """The main method's mean less another's."""

    def show(entry: dict, method: str) -> str | None:
        return _interval(entry.get("differences", {}).get(method, {}).get(metric), sign="+")

    return table(f"{title}, {MAIN_TITLE} less", METHOD_TITLES, sets, show)


def cost_table(sets: dict) -> list[str]:
    """Positions that stand for the passages, the rate of that, and seconds a question."""

    def show(entry: dict, method: str) -> str | None:
        numbers = entry["methods"].get(method)
        if numbers is None:
            return None
        rate = f", x{numbers['compression_rate']:.1f}" if "compression_rate" in numbers else ""
        return f"{numbers['context_tokens']:.1f}{rate}, {numbers['seconds']:.2f} s"

    return table("positions for the passages, rate, seconds a question", METHOD_TITLES, sets, show)


def ratio_lines(sets: dict, metric: str = "f1") -> list[str]:
    """The main method's mean over that of nothing read, of an empty slot, and of the fine-tuned upper bound."""
    lines = []
    for name in ("naive", "empty_slot", "projector_only", "full_text_lora"):
        other = METHODS[name].title
        ratios = [
            f"{title} {entry['methods'][MAIN_TITLE][metric][0] / entry['methods'][other][metric][0]:.2f}"
            for title, entry in sets.items()
            if {MAIN_TITLE, other} <= set(entry["methods"]) and entry["methods"][other][metric][0]
        ]
        if ratios:
            lines.append(f"- {METRIC_TITLES[metric]} of {MAIN_TITLE} over that of {other}: {', '.join(ratios)}.")
    return [*lines, ""] if lines else []


def paper_table(sets: dict) -> list[str]:
    """EM / F1 / Acc as the paper has them, of the sets that were measured here."""
    shared = {name: {"paper": PAPER["sets"][name]} for name in sets if name in PAPER["sets"]}
    methods = list(dict.fromkeys(method for entry in shared.values() for method in entry["paper"]))

    def show(entry: dict, method: str) -> str | None:
        numbers = entry["paper"].get(method)
        return None if numbers is None else " / ".join(f"{number:.1f}" for number in numbers)

    return [*table("EM / F1 / Acc, Mistral 7B", methods, shared, show), *order_lines(sets)]


def order_lines(sets: dict, metric: str = "f1") -> list[str]:
    """For each set of the paper, the order of the methods that both have, there and here."""
    lines = []
    column = PAPER["metrics"].index(metric)
    for name, entry in sets.items():
        paper = PAPER["sets"].get(name, {})
        ours = {
            SAME_IN_PAPER.get(title, title): numbers[metric][0]
            for title, numbers in entry["methods"].items()
            if SAME_IN_PAPER.get(title, title) in paper
        }
        if len(ours) < 2:
            continue
        theirs = {title: paper[title][column] for title in ours}
        there, here = (sorted(scores, key=scores.get, reverse=True) for scores in (theirs, ours))
        said = "the same order here" if there == here else f"here {' > '.join(here)}"
        lines.append(f"- {name}, {METRIC_TITLES[metric]}: in the paper {' > '.join(there)}; {said}.")
    return [*lines, ""] if lines else []


def described(results: dict) -> list[str]:
    """What the numbers are."""
    counts = ", ".join(f"{name} {entry['questions']}" for name, entry in results["sets"].items())
    recalls = ", ".join(f"{name} {entry['recall'][0]:.0f} %" for name, entry in results["sets"].items())
    rates = ", ".join(
        f"{name} {entry['slots_per_question']:.1f} (x{entry['compression_rate']:.0f})"
        for name, entry in results["sets"].items()
        if "compression_rate" in entry
    )
    return [
        f"Questions: {counts}. Percent, with 95 % bootstrap intervals over questions; differences are paired. "
        f"EM is non-strict: the answer contains a gold. A gold stands in the passages read: {recalls}. "
        f"Slots a question, and tokens of text for each: {rates or 'none'}. "
        f"{results['machine']}."
    ]


def table(title: str, rows: list[str], sets: dict, show: Callable[[dict, str], str | None]) -> list[str]:
    """Lines of a Markdown table, whose cells `show` makes of a set's entry and a row's title, without empty rows."""
    cells = {row: [show(entry, row) for entry in sets.values()] for row in rows}
    shown = {row: found for row, found in cells.items() if any(cell is not None for cell in found)}
    if not shown:
        return []
    lines = [f"| {title} | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    for row, found in shown.items():
        name = f"**{row}**" if row == MAIN_TITLE else row
        lines.append(f"| {name} | {' | '.join('-' if cell is None else cell for cell in found)} |")
    return [*lines, ""]


def _interval(values: list[float] | None, sign: str = "") -> str | None:
    return None if values is None else shown_interval(values, sign)
