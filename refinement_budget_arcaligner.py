"""A budget of operations for refinement: what a step costs, and which open slots a row can pay for.

The budget is a share of the prefill of the slot prefix, that is of the rows up to the last slot with the gates off, so
that slots still do not depend on what is asked behind them. Each row of a batch has its own, and spends it in the order
of the computation, layer by layer and step by step:

    gates          of the slots that are asked
    first step     keys and values of the prefix once, then a pass for each open slot, the most confident first
    further steps  a pass for each slot that took the first one, for all of them or for none

The first thing that a row cannot pay in full ends its refinement. So a larger budget does all that a smaller one does,
in the same states, and then more: no slot takes fewer steps for it.

Counted are the products with weights and of attention, as they are computed for one row alone: norms, activations and
the padding of a batch are not. A step of all slots takes less than it pays: it has no use for the slots' former keys.
"""

from typing import NamedTuple

import torch
from torch import nn

from .refinement_arcaligner import SlotRows

# Far above any prompt's operations, and still an int64 when another such number is added.
_MOST_FLOPS = 2.0**61


class LayerCost(NamedTuple):
    """Operations of one decoder layer."""

    linears: int  # of a row, without LoRA
    lora: int  # of a slot
    keys_values: int  # of a row, until its keys and values are known; of these linears at most
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
        # What surely comes after keys and values. A linear of another name counts as if it came before.
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
    """Operations of one slot through the layer again. It reads the prefix, and at most as many slots afresh."""
    return cost.linears + cost.lora + cost.key * (num_text + 2 * num_slots)


class RefinementBudget:
    """What each row of one forward has left for refinement. The layers of that forward draw on it in turn.

    Args:
        share (`float`): Of `prefix_flops`, at least 0.
        costs (`list[LayerCost]`): Of all layers.
        rows (`SlotRows`): Of the forward.
    """

    def __init__(self, share: float, costs: list[LayerCost], rows: SlotRows):
        sizes = zip(*(size.tolist() for size in _text_and_slots(rows)), strict=True)
        left = [int(min(share * prefix_flops(costs, text, slots), _MOST_FLOPS)) for text, slots in sizes]
        self.left = torch.tensor(left, device=rows.slot_positions.device)  # (batch,)
        self._is_spent = False  # known without another look at the device

    def pay_gates(self, cost: LayerCost, num_asked: torch.Tensor) -> bool:
        """Pays for asking the gates of `num_asked` slots (batch,); whether a row has anything left after it."""
        if self._is_spent:
            return False
        left, price = self.left.to(num_asked.device), num_asked * cost.gate
        self.left = torch.where(left >= price, left - price, 0)
        self._is_spent = not bool(self.left.any())
        return not self._is_spent

    def take_slots(
        self, gate_prob: torch.Tensor, gate_open: torch.Tensor, cost: LayerCost, rows: SlotRows
    ) -> torch.Tensor:
        """The open slots (batch, max_slots) that a row can pay a first step for: by probability, then by position."""
        num_text, num_slots = _text_and_slots(rows)
        once = keys_values_flops(cost, num_text, num_slots)
        each = pass_flops(cost, num_text, num_slots)
        wanted = gate_open.sum(dim=1)
        affordable = torch.div(self.left - once, each, rounding_mode="floor").clamp(min=0)
        taken = torch.minimum(wanted, affordable)
        paid = torch.where(taken > 0, once + taken * each, 0)
        self.left = torch.where(taken < wanted, 0, self.left - paid)
        order = gate_prob.masked_fill(~gate_open, -1.0).argsort(dim=1, descending=True, stable=True)
        return gate_open & (order.argsort(dim=1) < taken[:, None])

    def take_step(
        self, gate_open: torch.Tensor, is_taken: torch.Tensor, cost: LayerCost, rows: SlotRows
    ) -> torch.Tensor:
        """The slots (batch, width) that are still open, where a row can pay another step of all that are taken."""
        each = pass_flops(cost, *_text_and_slots(rows))
        price = torch.where(gate_open.any(dim=1), is_taken.sum(dim=1) * each, 0)
        affords = self.left >= price
        self.left = torch.where(affords, self.left - price, 0)
        return gate_open & affords[:, None]


def _text_and_slots(rows: SlotRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of text before the last slot and slots, each (batch,)."""
    return (rows.text_positions >= 0).sum(dim=1), (rows.slot_positions >= 0).sum(dim=1)
