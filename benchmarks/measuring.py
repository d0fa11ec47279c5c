"""Time in turns, memory, the machine's peaks, and the work of an arm by formula.

Machines drift, ratios within a moment do not. So the arms of a comparison alternate in one process, who goes first
rotates, and a ratio is taken within a round; its median over rounds is told with the middle half.
"""

import ctypes
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel

from ..evaluation.operations import refinement_flops
from ..lora_arcaligner import ADAPTER_NAME, slot_lora_layers
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..refinement_arcaligner import prefix_flops
from .arms import Arm, Prompts

_TRIES = 5
_PROCESS = Path("/proc/self")


def wait_for(device: str | torch.device) -> None:
    """Until everything that was started on `device` is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def time_interleaved(arms: dict[str, Arm], first: int, device: str) -> dict[str, float]:
    """Seconds of each arm, in the order of `arms`; the one at `first`, modulo their number, goes first."""
    names = list(arms)
    start = first % len(names)
    seconds = dict.fromkeys(names, 0.0)
    for name in names[start:] + names[:start]:
        with arms[name].state():
            wait_for(device)
            begin = time.perf_counter()
            arms[name].run()
            wait_for(device)
            seconds[name] = time.perf_counter() - begin
    return seconds


def quartiles(values: list[float]) -> dict[str, float]:
    """Median and the middle half."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"lower": lower, "median": median, "upper": upper}


def measured_peaks(device: str, dtype: torch.dtype, scale: int = 1) -> dict[str, float]:
    """Floating-point operations per second of a matrix product, bytes per second of a copy; `scale` makes both smaller.

    They are measured in the same run: those of a data sheet are seldom reached, and those of a shared machine unknown.
    """
    side = (2048 if device == "cpu" else 8192) // scale
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.empty(2**28 // scale, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    arms = {"product": Arm(lambda: left @ right), "copy": Arm(lambda: target.copy_(source))}
    tries = [time_interleaved(arms, number, device) for number in range(1 + _TRIES)][1:]
    return {
        "flops_per_second": 2 * side**3 / min(each["product"] for each in tries),
        "bytes_per_second": 2 * source.numel() / min(each["copy"] for each in tries),
    }


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, int | None]]:
    """
    The most memory in use inside, beyond what was in use before.

    Yields:
        `dict`: `bytes`, known afterwards. On a CPU it is the growth of the resident size, which only Linux tells;
            elsewhere `None`.
    """
    found: dict[str, int | None] = {"bytes": None}
    if torch.device(device).type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found["bytes"] = torch.cuda.max_memory_allocated(device) - before
    elif (_PROCESS / "clear_refs").exists():
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be taken for room that was there
        (_PROCESS / "clear_refs").write_text("5")  # the peak starts anew
        before = _status_bytes("VmRSS")
        yield found
        found["bytes"] = max(0, _status_bytes("VmHWM") - before)
    else:
        yield found


def _status_bytes(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def flop_counter() -> FlopCounterMode:
    """Counts what is computed inside, masked attention as if it were not; the CPU's attention kernel included."""

    def attention(query, key, value, *args, **kwargs) -> int:
        return sdpa_flop_count(query, key, value)

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={on_cpu: attention})


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes read from memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def limit(self, peaks: dict[str, float]) -> float:
        """Seconds that a machine with these peaks needs at least."""
        return max(self.flops / peaks["flops_per_second"], self.bytes / peaks["bytes_per_second"])


class Formula:
    """
    The work of the method, not of its code, by the core's count of operations.

    The bytes are the weights, once and again for each refinement step of a layer, and the keys and values.

    Args:
        aligner ([`ArcAlignerForCausalLM`]), base (`PreTrainedModel`): The aligner and its bare base model.
    """

    def __init__(self, aligner: ArcAlignerForCausalLM, base: PreTrainedModel):
        config = base.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        lora = [module.lora_A[ADAPTER_NAME].weight.dtype.itemsize for module in slot_lora_layers(aligner)]
        self.costs = aligner.model.layer_costs
        self.gated = aligner.config.gated_layers
        self.steps = aligner.config.max_refinement_steps
        self.head = config.hidden_size * config.vocab_size  # elements
        self.itemsize = base.dtype.itemsize
        self.row_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self.itemsize
        # A product with a weight takes two operations for each of its elements.
        self.lora_bytes = [cost.lora // 2 * (lora[0] if lora else 0) for cost in self.costs]
        self.layer_bytes = [cost.linears // 2 * self.itemsize for cost in self.costs]

    def reading(self, new: list[int], cached: list[int]) -> Work:
        """Rows of `new` tokens after `cached` ones, through all layers and, for the last token, the head."""
        pairs = list(zip(new, cached, strict=True))
        flops = sum(prefix_flops(self.costs, n + c, 0) - prefix_flops(self.costs, c, 0) for n, c in pairs)
        rows = sum(new) + sum(cached)  # keys and values are written or read once
        weights = sum(self.layer_bytes) + self.head * self.itemsize
        return Work(flops + 2 * self.head * len(new), weights + rows * self.row_bytes)

    def slot_lora(self, num_slots: int) -> Work:
        """The LoRA of all layers on `num_slots` rows."""
        return Work(sum(cost.lora for cost in self.costs) * num_slots, sum(self.lora_bytes))

    def refinement(self, depth: torch.Tensor, text: list[int]) -> Work:
        """
        Steps of slots on their own.

        Args:
            depth (`torch.Tensor` of shape `(batch, num_layers, max_slots)`): Steps, -1 where there is no slot.
            text (`list[int]`): Rows of text before the last slot of each row.
        """
        flops = sum(
            refinement_flops(self.costs, row[:, row[0] >= 0], before, self.steps)
            for row, before in zip(depth.cpu(), text, strict=True)
        )
        passes = depth.clamp(min=0).amax(dim=(0, 2)).tolist()  # of each layer
        sizes = zip(passes, self.layer_bytes, self.lora_bytes, strict=True)
        return Work(flops, sum(steps * (weights + lora) for steps, weights, lora in sizes))

    def plain_refinement(self, lengths: list[int], num_slots: list[int]) -> Work:
        """All steps of all rows of prompts of these lengths, with so many slots each."""
        work = Work()
        for layer in self.gated:
            cost = self.costs[layer]
            flops = sum(
                prefix_flops([cost], length - slots, slots) + cost.gate * length
                for length, slots in zip(lengths, num_slots, strict=True)
            )
            work += Work(self.steps * flops, self.steps * (self.layer_bytes[layer] + self.lora_bytes[layer]))
        return work

    def of_arms(self, text: Prompts, slots: Prompts, depths: dict[str, torch.Tensor]) -> dict[str, Work]:
        """
        The work of each arm until the first token.

        Args:
            text, slots ([`Prompts`]): The batch in both forms.
            depths (`dict[str, torch.Tensor]`): Steps that `adaptive`, `budgeted` and `always` took.
        """
        none = [0] * len(text.whole.lengths)
        num_slots = (depths["adaptive"][:, 0] >= 0).sum(dim=1).tolist()
        before = [length - count for length, count in zip(slots.prefix.lengths, num_slots, strict=True)]
        off = self.reading(slots.whole.lengths, none) + self.slot_lora(sum(num_slots))
        refined = {name: off + self.refinement(depth, before) for name, depth in depths.items()}
        return {
            "standard_rag": self.reading(text.whole.lengths, none),
            "standard_rag_cached": self.reading(text.tail.lengths, text.prefix.lengths),
            "off": off,
            **refined,
            "slots_cached": self.reading(slots.tail.lengths, slots.prefix.lengths),
            "plain": off + self.plain_refinement(slots.whole.lengths, num_slots),
        }
