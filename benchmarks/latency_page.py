"""The latency benchmark for readers: the README's table and `docs/speed.md`, from its report alone."""

from typing import Any

from .latency_report import machine_line, size_name, target_cells

_SHOWN = {
    "standard_rag": "text",
    "standard_rag_cached": "text, cached",
    "off": "slots, no refinement",
    "adaptive": "slots, **adaptive**",
    "always": "slots, all refined",
    "slots_cached": "**slots, cached**",
    "plain": "plain Algorithm 1",
}
_INTRODUCTION = """\
# Speed

Written by `python -m arcaligner.evaluation.publish` from the report of `python -m arcaligner.benchmarks.latency`. All
rows of a table read the same questions and passages, in one process and in turns, so that their ratios hold; times are
medians. Slots were encoded before; what that takes is said below each table.

- *text* is the bare base model that reads the passages, *cached* with the keys and values of all before the question.
- *plain Algorithm 1* makes the same decisions as *adaptive* and applies a layer to the whole prompt in each step.
- *x limit*: times what the operations and bytes of the method would take at the peaks measured on the machine.
- *GFLOP*: of the method by formula, in brackets as counted in the code.
"""


def first_token_table(report: dict[str, Any]) -> list[str]:
    """Markdown lines: milliseconds to the first token of one question, and times faster than text, a row a size."""
    dtype = next(iter(report["peaks"]))
    sizes = [size for size in report["sizes"] if (size["batch_size"], size["dtype"]) == (1, dtype)]
    arms = [arm for arm in _SHOWN if arm not in ("always", "plain")]
    lines = _head(["Passages", "Tokens", "Slots", *(_SHOWN[arm] for arm in arms)])
    for size in sizes:
        cells = [f"{_ms(size, arm)}" + ("" if arm == "standard_rag" else f" (x{_times(size, arm)})") for arm in arms]
        lines.append(_row([size["k"], f"{size['text_tokens']:.0f}", f"{size['slots']:.0f}", *cells]))
    return [*lines, "", f"{report['model']}, one question, {machine_line(report)}."]


def speed_page(report: dict[str, Any], figures: list[str]) -> str:
    """`docs/speed.md`: what was aimed at, each size, and the lines of `figures`."""
    lines = [_INTRODUCTION, "## Aims", "", *_targets(report), ""]
    for size in report["sizes"]:
        lines += [*_size(size), ""]
    return "\n".join([*lines, machine_line(report) + ".", "", *figures]).rstrip() + "\n"


def _targets(report: dict[str, Any]) -> list[str]:
    lines = _head(["Passages x questions", "Aim", "Reached", "Bound", "Met"])
    return lines + [_row(target_cells(size, each)) for size in report["sizes"] for each in size["targets"]]


def _size(size: dict[str, Any]) -> list[str]:
    title = f"## {size_name(size)}: {size['text_tokens']:.0f} tokens of text or {size['slots']:.0f} slots a question"
    columns = ["", "first token, ms", "x text", "x limit", "ms a token", "questions/s"]
    columns += ["peak MiB", "cache MiB", "GFLOP"]
    lines = [title, "", *_head(columns)]
    for name, arm in size["arms"].items():
        cells = [
            _SHOWN[name],
            f"{_ms(size, name)} ({1000 * arm['first_token']['lower']:.0f} to {1000 * arm['first_token']['upper']:.0f})",
            _times(size, name),
            f"{arm['first_token']['median'] / arm['first_token_limit']:.1f}",
            f"{1000 * arm['per_token']['median']:.1f}",
            f"{arm['questions_per_second']['median']:.2f}",
            f"{arm['peak_bytes'] / 2**20:.1f}",
            f"{arm['cache_bytes'] / 2**20:.1f}",
            f"{arm['flops'] / 1e9:.1f} ({arm['flops_counted'] / 1e9:.1f})",
        ]
        lines.append(_row(cells))
    before = ", ".join(f"{name} {1000 * seconds['median']:.0f} ms" for name, seconds in size["encoder"].items())
    said = f"{size['rounds']} rounds. {100 * size['open_share']:.0f} % of gates open"
    said += f", in {100 * size['open_layers']:.0f} % of layers." + (f" Before: {before}." if before else "")
    return [*lines, "", said]


def _ms(size: dict[str, Any], arm: str) -> str:
    return f"{1000 * size['arms'][arm]['first_token']['median']:.0f}"


def _times(size: dict[str, Any], arm: str) -> str:
    return f"{size['arms'][arm]['speed_up']['median']:.1f}"


def _head(columns: list[str]) -> list[str]:
    return [_row(columns), "|" + "---|" * len(columns)]


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
