"""Algorithm 1 with a budget of operations, written plainly: one row, slot by slot, counted by hand.

As `reference.py`, in float64, with every step on the whole sequence; only who may take a step follows the budget.
"""

import torch
from reference import Reference, ReferenceOutput

UNLIMITED = 10**18


class FrugalReference(Reference):
    """`spent` and `prefill` are the operations of the last row's refinement, and of its prefill up to the last slot."""

    def __init__(self, model: torch.nn.Module, share: float):
        super().__init__(model)
        self.share = share
        text = model.config.text_config
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        hidden, inner, rank = text.hidden_size, text.intermediate_size, model.config.lora_r
        queries, keys = text.num_attention_heads * head_dim, text.num_key_value_heads * head_dim
        read = [(hidden, queries), (hidden, keys), (hidden, keys)]  # done when keys and values are known
        rest = [(queries, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
        self.read_row, self.read_lora = flops(read), lora_flops(read, rank)
        self.layer_row, self.layer_lora = flops(read + rest), lora_flops(read + rest, rank)
        self.per_key = 4 * queries
        gates = model.config.gate_mode == "adaptive"
        self.gate_slot = flops([(hidden, model.config.gate_hidden_size), (model.config.gate_hidden_size, 1)]) * gates

    def __call__(self, input_ids: torch.Tensor, context_embeds: torch.Tensor) -> ReferenceOutput:
        is_slot = (input_ids == self.config.context_token_id).tolist()
        self.num_slots = sum(is_slot)
        length = max((i + 1 for i, slot in enumerate(is_slot) if slot), default=0)
        self.num_text = length - self.num_slots
        layer = self.layer_row * length + self.layer_lora * self.num_slots + self.per_key * length * length // 2
        self.prefill = layer * len(self.layers)
        self.left = int(min(self.share * self.prefill, UNLIMITED))
        self.spent = 0
        return super().__call__(input_ids, context_embeds)

    def refine(self, layer: int, hidden: torch.Tensor, apply_layer) -> torch.Tensor:
        is_slot = self.slot_mask[:, 0].bool()
        positions = is_slot.nonzero()[:, 0]
        each = self.layer_row + self.layer_lora + self.per_key * (self.num_text + 2 * self.num_slots)
        once = self.read_row * (self.num_text + self.num_slots) + self.read_lora * self.num_slots
        asked = list(range(self.num_slots))
        for step in range(self.config.max_refinement_steps):
            if not self.pay(len(asked) * self.gate_slot):
                break
            always = self.config.gate_mode == "always"
            probs = [1.0] * self.num_slots if always else self.gate_prob(layer, hidden[is_slot])[:, 0].tolist()
            wanted = sorted((j for j in asked if probs[j] >= self.config.gate_threshold), key=lambda j: (-probs[j], j))
            if step == 0:
                can = min(len(wanted), max(0, (self.left - once) // each))
                moving = asked = wanted[:can]
                self.pay(once + can * each if can else 0)
                if can < len(wanted):
                    self.left = 0
            else:
                moving = wanted if wanted and self.pay(len(asked) * each) else []
            if not moving:
                break
            candidate = apply_layer(hidden)
            hidden = hidden.index_copy(0, positions[moving], candidate[positions[moving]])
            self.output.recursion_depth[layer, moving] += 1
        return hidden

    def pay(self, price: int) -> bool:
        """Whether it could be paid; what cannot ends the row's refinement."""
        if self.left < price or self.left == 0:
            self.left = 0
            return False
        self.left -= price
        self.spent += price
        return True


def flops(linears: list[tuple[int, int]]) -> int:
    """Operations of one row through linears (inputs, outputs)."""
    return sum(2 * inputs * outputs for inputs, outputs in linears)


def lora_flops(linears: list[tuple[int, int]], rank: int) -> int:
    """Operations of one slot through the LoRA of linears."""
    return sum(2 * rank * (inputs + outputs) for inputs, outputs in linears)
