"""How much refinement a call takes: the settings of the gates, and a budget of operations.

refinement_budget=0.1    at most 10 % of the operations of the slot prefix's prefill, spent layer by layer
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import nn

from .configuration_arcaligner import ArcAlignerConfig, check_gates

# Keyword arguments of `generate` and `forward`.
REFINEMENT_SETTINGS = ("gate_mode", "gate_threshold", "max_refinement_steps", "refinement_budget")
# Attention kernels that take a mask of rows by columns, so that some slots can be computed without the others.
ROW_KERNELS = ("eager", "sdpa")


# Far more than any prompt takes, and the sum of two is still an int64.
_MOST_FLOPS = 2.0**61


class LayerCost(NamedTuple):
    """Operations of one decoder layer."""

    linears: int  # of a row, without LoRA
    lora: int  # of a slot
    keys_values: int  # of a row, for its keys and values; an upper bound
    keys_values_lora: int  # of a slot
    key: int  # attention of one row to one key
    gate: int  # of a slot


def count_layer_cost(layer: nn.Module, text_config) -> LayerCost:
    """The cost of a decoder layer with its LoRA and gate, from the sizes of its linears.

    Args:
        layer (`nn.Module`): As `add_slots_to_layer` leaves it.
        text_config (`PreTrainedConfig`): The backbone's.
    """
    counts = dict.fromkeys(LayerCost._fields, 0)
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        flops = 2 * module.in_features * module.out_features
        if name.startswith("slot_gate."):
            counts["gate"] += flops
            continue
        lora = ".lora_A." in name or ".lora_B." in name
        counts["lora" if lora else "linears"] += flops
        # These come after keys and values. Any other linear is counted as if it came before.
        if "mlp" not in name and "o_proj" not in name:
            counts["keys_values_lora" if lora else "keys_values"] += flops
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    counts["key"] = 4 * text_config.num_attention_heads * head_dim
    return LayerCost(**counts)


def prefix_flops(costs: list[LayerCost], num_text: int, num_slots: int) -> int:
    """Operations of the prefill of a slot prefix, gates off: `num_text` rows of text and `num_slots` slots."""
    length = num_text + num_slots
    return sum(c.linears * length + c.lora * num_slots + c.key * length * length // 2 for c in costs)


def keys_values_flops(cost: LayerCost, num_text, num_slots):
    """Operations of the keys and values of a slot prefix, once before a layer's first step; of counts or tensors."""
    return cost.keys_values * (num_text + num_slots) + cost.keys_values_lora * num_slots


def pass_flops(cost: LayerCost, num_text, num_slots):
    """Operations of another pass of one slot through the layer: it attends to the prefix and to the other slots."""
    return cost.linears + cost.lora + cost.key * (num_text + 2 * num_slots)


class RefinementBudget:
    """The operations that each row of one forward may still spend on refinement, layer by layer.

    Args:
        share (`float`): Of `prefix_flops`, at least 0.
        costs (`list[LayerCost]`): Of all layers.
        rows ([`SlotRows`]): Of the forward.
    """

    def __init__(self, share: float, costs: list[LayerCost], rows):
        sizes = zip(*(size.tolist() for size in rows.sizes()), strict=True)
        left = [int(min(share * prefix_flops(costs, text, slots), _MOST_FLOPS)) for text, slots in sizes]
        self.left = torch.tensor(left, device=rows.slot_positions.device)  # (batch,)
        self._is_spent = False  # kept here, so that the device is not asked again

    def pay_gates(self, cost: LayerCost, num_asked: torch.Tensor) -> bool:
        """Pays for the gates of `num_asked` slots (batch,). Returns whether a row has anything left."""
        if self._is_spent:
            return False
        left, price = self.left.to(num_asked.device), num_asked * cost.gate
        self.left = torch.where(left >= price, left - price, 0)
        self._is_spent = not bool(self.left.any())
        return not self._is_spent

    def take_slots(self, gate_prob: torch.Tensor, gate_open: torch.Tensor, cost: LayerCost, rows) -> torch.Tensor:
        """The open slots (batch, max_slots) that a row can pay a first step for: by probability, then by position."""
        num_text, num_slots = rows.sizes()
        once = keys_values_flops(cost, num_text, num_slots)
        each = pass_flops(cost, num_text, num_slots)
        wanted = gate_open.sum(dim=1)
        affordable = torch.div(self.left - once, each, rounding_mode="floor").clamp(min=0)
        taken = torch.minimum(wanted, affordable)
        paid = torch.where(taken > 0, once + taken * each, 0)
        self.left = torch.where(taken < wanted, 0, self.left - paid)
        order = gate_prob.masked_fill(~gate_open, -1.0).argsort(dim=1, descending=True, stable=True)
        return gate_open & (order.argsort(dim=1) < taken[:, None])

    def take_step(self, gate_open: torch.Tensor, is_taken: torch.Tensor, cost: LayerCost, rows) -> torch.Tensor:
        """The slots (batch, width) that are still open, where a row can pay another step of all that are taken."""
        each = pass_flops(cost, *rows.sizes())
        price = torch.where(gate_open.any(dim=1), is_taken.sum(dim=1) * each, 0)
        affords = self.left >= price
        self.left = torch.where(affords, self.left - price, 0)
        return gate_open & affords[:, None]


@dataclass(frozen=True)
class RefinementSettings:
    """The settings of one forward."""

    gate_mode: str
    gate_threshold: float
    max_refinement_steps: int
    budget: RefinementBudget | None


def check_refinement_settings(
    gate_mode: str | None = None,
    gate_threshold: float | None = None,
    max_refinement_steps: int | None = None,
    refinement_budget: float | None = None,
) -> None:
    """Raises `ValueError` for an invalid setting; `None` is valid."""
    check_gates(gate_mode, gate_threshold, max_refinement_steps)
    if refinement_budget is None:
        return
    is_number = isinstance(refinement_budget, Real) and not isinstance(refinement_budget, bool)
    if not is_number or not refinement_budget >= 0:  # NaN is not
        raise ValueError(
            f"`refinement_budget` is {refinement_budget!r}; expected a share of the prefill of at least 0, such as "
            "0.1 for 10 % more operations. 0 switches refinement off, infinity leaves it to the gates."
        )


def normalize_budget(gate_mode: str | None, refinement_budget: float | None) -> tuple[str | None, float | None]:
    """Makes equal settings look equal: a budget of 0 is no refinement, and an infinite one is no budget.

    >>> normalize_budget("adaptive", 0), normalize_budget("adaptive", math.inf), normalize_budget("adaptive", 0.1)
    (('off', None), ('adaptive', None), ('adaptive', 0.1))
    """
    if refinement_budget == 0:
        return "off", None
    return gate_mode, None if refinement_budget == math.inf else refinement_budget


def resolve_settings(
    config: ArcAlignerConfig,
    costs: list[LayerCost],
    rows,
    training: bool,
    gate_mode: str | None = None,
    gate_threshold: float | None = None,
    max_refinement_steps: int | None = None,
    refinement_budget: float | None = None,
) -> RefinementSettings:
    """The settings of a forward: the given ones, which are checked already, otherwise the configuration's.

    Raises:
        `ValueError`: a budget in training, or with an attention kernel that computes slots all or none.
    """
    gate_mode = config.gate_mode if gate_mode is None else gate_mode
    gate_mode, refinement_budget = normalize_budget(gate_mode, refinement_budget)
    budget = None
    if refinement_budget is not None:
        if training:
            raise ValueError(
                f"`refinement_budget` is {refinement_budget} in training, where every slot takes every step for the "
                "gradients of the gates. Call `model.eval()`, or leave it out."
            )
        if (kernel := config.text_config._attn_implementation) not in ROW_KERNELS:
            raise ValueError(
                f"`refinement_budget` is {refinement_budget}, but attention `{kernel}` can only refine the whole "
                f"prefix at once. Load the model with `attn_implementation` {' or '.join(ROW_KERNELS)}."
            )
        budget = RefinementBudget(refinement_budget, costs, rows)
    return RefinementSettings(
        gate_mode=gate_mode,
        gate_threshold=config.gate_threshold if gate_threshold is None else gate_threshold,
        max_refinement_steps=config.max_refinement_steps if max_refinement_steps is None else max_refinement_steps,
        budget=budget,
    )
