"""Operations of a prefill with slots, for the refinement that the slots really took, by the formulas of the core.

Counted are the products with weights and of attention, for one row without its padding. Not counted are the head's one
row of logits, the sentence encoder, and closed slots that a step computes beside many open ones.
"""

import contextlib
from collections.abc import Iterator

import torch

from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..refinement_arcaligner import LayerCost, keys_values_flops, pass_flops, prefix_flops


@contextlib.contextmanager
def recorded_depths(model: ArcAlignerForCausalLM) -> Iterator[list[torch.Tensor]]:
    """Inside, a list that fills with the `recursion_depth` (batch, num_layers, max_slots) of each input with slots."""
    depths = []

    def record(module, args, output) -> None:
        if output.recursion_depth is not None:
            depths.append(output.recursion_depth)

    handle = model.model.register_forward_hook(record)
    try:
        yield depths
    finally:
        handle.remove()


def count_operations(
    model: ArcAlignerForCausalLM, prompt_ids: list[int], depth: torch.Tensor, max_refinement_steps: int
) -> dict[str, int]:
    """
    Operations of reading a prompt with slots.

    Args:
        model ([`ArcAlignerForCausalLM`]): That read it.
        prompt_ids (`list[int]`): Without padding.
        depth (`torch.Tensor` of shape `(num_layers, max_slots)`): Steps that its slots took, -1 where there is none.
        max_refinement_steps (`int`): Steps that a slot may take; 0 where gates are off.

    Returns:
        `dict`: `prefill_flops` of the whole prompt without refinement, `prefix_flops` of its part up to the last slot,
        and `refinement_flops`.
    """
    costs, slot = model.model.layer_costs, model.config.context_token_id
    num_slots = prompt_ids.count(slot)
    before = len(prompt_ids) - prompt_ids[::-1].index(slot) - num_slots  # text up to the last slot
    return {
        "prefill_flops": prefix_flops(costs, len(prompt_ids) - num_slots, num_slots),
        "prefix_flops": prefix_flops(costs, before, num_slots),
        "refinement_flops": refinement_flops(costs, depth[:, :num_slots], before, max_refinement_steps),
    }


def refinement_flops(costs: list[LayerCost], depth: torch.Tensor, num_text: int, max_refinement_steps: int) -> int:
    """
    Operations of refinement by gates.

    Gates count as asked in all layers but the last; a budget that is spent asks fewer.

    Args:
        costs (`list[LayerCost]`): Of all layers.
        depth (`torch.Tensor` of shape `(num_layers, num_slots)`): Steps that each slot took.
        num_text (`int`): Rows of text before the last slot.
        max_refinement_steps (`int`): Steps that a slot may take; with none, no gate is asked.
    """
    if max_refinement_steps == 0:
        return 0
    num_slots, total = depth.shape[1], 0
    for cost, steps in zip(costs[:-1], depth[:-1].tolist(), strict=True):
        total += num_slots * cost.gate
        if taken := sum(step > 0 for step in steps):  # slots that took the first step are in each that follows
            total += keys_values_flops(cost, num_text, num_slots)
            total += max(steps) * taken * pass_flops(cost, num_text, num_slots)
            total += min(max(steps), max_refinement_steps - 1) * taken * cost.gate
    return total
