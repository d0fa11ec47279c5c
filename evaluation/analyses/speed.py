"""Tables of time to first token, from the reports of `benchmarks/latency.py` and `cached_passages.py`."""

import textwrap
from typing import Any

from ...common.files import counted, markdown_table
from ..methods import compression_title

ARM_TITLES = {
    "standard_rag": "Text, ms",
    "standard_rag_cached": "Text, cached, ms",
    "off": "Slots, encoded beforehand, ms",
    "slots_cached": "**Slots, cached, ms**",
}
ZOOMED = "zoomed"  # a further arm, with more tokens per slot than the checkpoint's own
LATENCY_REPORT, CACHED_REPORT = "latency.json", "kept.json"  # of the benchmarks
SHORT_PASSAGES = 5, 20  # of the README's table


def first_token_table(report: dict[str, Any]) -> list[str]:
    """Markdown lines: milliseconds to the first token of one question, and times faster than text; a row for each
    size."""
    rows, has_zoom = [], any(ZOOMED in size["arms"] for size in report["sizes"])
    for size in report["sizes"]:
        arms, cells = size["arms"], []
        encoder = sum(part["median"] for part in size["encoder"].values())
        text = arms["standard_rag"]["first_token"]["median"]
        for name in ARM_TITLES:
            first, times = arms[name]["first_token"]["median"], f" (x{arms[name]['speed_up']['median']:.1f})"
            cells.append(f"{1000 * first:.0f}" + ("" if name == "standard_rag" else times))
            if name == "off":
                cells.append(f"{1000 * (first + encoder):.0f} (x{text / (first + encoder):.1f})")
            if name == "off" and has_zoom:
                zoomed = arms.get(ZOOMED)
                cells.append(
                    f"{first_token_ms(size, ZOOMED):.0f} (x{zoomed['speed_up']['median']:.1f})" if zoomed else "-"
                )
        compression = "a segment" if size["tokens_per_slot"] == "segment" else size["tokens_per_slot"]
        rows.append([size["k"], f"{size['text_tokens']:.0f}", compression, f"{size['slots']:.0f}", *cells])
    titles = list(ARM_TITLES.values())
    after = list(ARM_TITLES).index("off") + 1
    titles.insert(after, "Slots, encoding included, ms")
    if has_zoom:
        titles.insert(after + 1, "Slots with zoom, the first ones encoded beforehand, ms")
    lines = markdown_table(["Passages", "Tokens of the prompt as text", "Tokens per slot", "Slots", *titles], rows)
    note = (
        "In brackets: how many times faster than *Text* in the same row. Each time is the median of several rounds. "
        "Each ratio is the median of the ratios of the rounds, except with encoding included: there it is the ratio "
        f"of the two medians. There was one question at a time, with the checkpoint {report['model']} and its "
        f"encoder in {report['encoder_dtype']}. Machine: {machine_line(report['machine'])}."
    )
    return [*lines, "", *textwrap.wrap(note, 120)]


def machine_line(machine: dict[str, Any]) -> str:
    """One line from `describe_machine`."""
    line = f"{machine['device']}, {machine['cpu']}, {machine['threads']} threads, load average {machine['load']:.1f}; "
    return line + f"torch {machine['torch']}, transformers {machine['transformers']}"


def find_size(report: dict[str, Any], k: int, tokens_per_slot: int | str) -> dict[str, Any]:
    """The part of a report on a question about `k` passages at these tokens per slot."""
    for size in report["sizes"]:
        if (size["k"], size["tokens_per_slot"]) == (k, tokens_per_slot):
            return size
    raise ValueError(
        f"The latency report has no measurement of {counted(k, 'passage')} with `tokens_per_slot` {tokens_per_slot}. "
        f"Measure again with `python -m arcaligner.benchmarks.latency`, with {k} in `--sizes` and {tokens_per_slot} in "
        "`--tokens-per-slot`."
    )


def first_token_ms(size: dict[str, Any], arm: str) -> float:
    """Median milliseconds to the first token of an arm."""
    return 1000 * size["arms"][arm]["first_token"]["median"]


# Cached passages

TOP_RANKED = "_top_ranked"  # suffix of an arm that selects a passage first
_CACHED_TITLES = {
    "text": "text, nothing cached",
    "text_same_set": "text, the same passages in the same order cached",
    "text_apart": "text of independent passages, cached",
}
_HOW = {"_folder": ", from disk", TOP_RANKED: ", the top-ranked used", "": ""}


def _cached_arm(name: str) -> tuple[str, str]:
    """The title of an arm of `cached_passages.py`, with what it caches."""
    end = next(end for end in _HOW if name.endswith(end))
    cached = name.removesuffix(end)
    title = _CACHED_TITLES.get(cached) or "**slots**, cached: " + compression_title(cached.removeprefix("slots_x"))
    return cached, title + _HOW[end]


def cached_passages_table(report: dict[str, Any]) -> list[str]:
    """Markdown lines: milliseconds to the first token, and how many times faster than text. A row for each arm, and a
    column for each number of passages and for the cached bytes of a passage."""
    sizes = report["sizes"]
    rows = []
    for name in sizes[0]["arms"]:
        cached, title = _cached_arm(name)
        cells = [f"{report['kept_bytes'][cached] / 1e6:.2f} MB" if cached in report["kept_bytes"] else "-"]
        for size in sizes:
            arm = size["arms"][name]
            times = "" if name == "text" else f" (x{arm['speed_up']['median']:.1f})"
            cells.append(f"{1000 * arm['first_token']['median']:.0f}{times}")
        rows.append([title, *cells])
    columns = ["The model is given", "Cache of a passage"]
    counts = [f"{counted(size['k'], 'passage')}, ms" for size in sizes]
    note = (
        "Each cell is the time to the first token and, in brackets, how many times faster this is than text with "
        f"nothing cached. A passage has {report['tokens_per_passage']:.0f} tokens on average. Times and ratios are "
        f"medians of {sizes[-1]['rounds']} rounds or more. There was one question at a time, with the checkpoint "
        f"{report['model']} in {report['dtype']}. Machine: {machine_line(report['machine'])}."
    )
    return [*markdown_table([*columns, *counts], rows), "", *textwrap.wrap(note, 120)]
