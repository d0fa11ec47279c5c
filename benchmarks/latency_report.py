"""The latency benchmark's report: targets, and the tables in which people read it."""

from typing import Any

from rich.console import Console
from rich.table import Table

from .arms import BUDGET
from .timing import spread

SPEED_UPS = {5: 8.0, 20: 15.0}  # over `standard_rag`, without refinement, by passages
REFINED_SHARE = 0.8  # of these with adaptive refinement
CACHED_SPEED_UPS = {20: 25.0}
CACHE_RATIO = 24.0  # bytes of the text's cached prefix over those of the slots'
DECODING_BOUND = 1.02  # seconds a token, over those of the bare backbone
PLAIN_RATIO = 4.0  # seconds that plain refinement adds, over those that adaptive refinement adds

COLUMNS = ("Arm", "First token, ms", "x text", "x limit", "ms/token", "questions/s", "peak", "cache", "GFLOP")

Seconds = list[dict[str, float]]  # a round's, by arm


def ratio(seconds: Seconds, slow: str, fast: str) -> dict[str, float]:
    """How many times faster `fast` is, by rounds."""
    return spread([each[slow] / each[fast] for each in seconds])


def refinement_ratio(seconds: Seconds) -> float | None:
    """Median seconds that plain refinement adds to `off`, over those of adaptive; `None` where that adds none."""
    plain, adaptive = (spread([each[arm] - each["off"] for each in seconds])["median"] for arm in ("plain", "adaptive"))
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
    """An arm's figures under `COLUMNS`, but for its name."""
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


def size_table(size: dict[str, Any]) -> Table:
    """An arm a row."""
    table = Table(*COLUMNS, title=size_title(size), caption=size_caption(size))
    for name, arm in size["arms"].items():
        table.add_row(name, *arm_cells(arm))
    return table


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


def profile_table(size: dict[str, Any]) -> Table:
    """Milliseconds of one pass of each arm, by kind of work."""
    kinds = next(iter(size["profile"].values()))
    title = f"Where the time goes: {size['k']} passages x {size['batch_size']} questions, {size['dtype']}, ms"
    table = Table("Arm", *kinds, title=title)
    for name, seconds in size["profile"].items():
        table.add_row(name, *(f"{1000 * each:.1f}" for each in seconds.values()))
    return table


def show_size(console: Console, size: dict[str, Any]) -> None:
    """The tables of a size."""
    console.print(size_table(size))
    if "profile" in size:
        console.print(profile_table(size))


def _mebibytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f} MiB"


def target_cells(size: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Of a row: size, what is aimed at, what was reached, the bound, and whether it is met."""
    digits = 2 if target["at_least"] else 3  # bounds from above are close to 1
    value = "no time added" if target["value"] is None else f"{target['value']:.{digits}f}"
    bound = f"{'at least' if target['at_least'] else 'at most'} {target['bound']:g}"
    return [size_name(size), target["what"], value, bound, "yes" if target["met"] else "no"]


def size_name(size: dict[str, Any]) -> str:
    """Passages x questions, and the dtype."""
    return f"{size['k']}x{size['batch_size']} {size['dtype']}"


def targets_table(sizes: list[dict[str, Any]]) -> Table:
    """A target a row, of every size."""
    table = Table("Size", "Target", "Reached", "Bound", "Met", title="Targets")
    for size in sizes:
        for each in size["targets"]:
            table.add_row(*target_cells(size, each))
    return table


def machine_line(report: dict[str, Any]) -> str:
    """The machine, its peaks and the versions."""
    made_on = report["machine"]
    peaks = [
        f"{dtype} {each['flops_per_second'] / 1e9:.0f} GFLOP/s, {each['bytes_per_second'] / 1e9:.1f} GB/s"
        for dtype, each in report["peaks"].items()
    ]
    line = f"{made_on['device']}, {made_on['cpu']}, {made_on['threads']} threads, load {made_on['load']:.1f}; "
    return line + "; ".join(peaks) + f"; torch {made_on['torch']}, transformers {made_on['transformers']}"
