"""Operations are counted by the steps that slots took, and are those that the model computes."""

import pytest
import torch
from tiny_models import random_row, tiny_aligner
from torch.utils.flop_counter import FlopCounterMode

from arcaligner.evaluation.operations import count_operations, recorded_depths, refinement_flops
from arcaligner.refinement_arcaligner import LayerCost, keys_values_flops, prefix_flops

COST = LayerCost(linears=1000, lora=100, keys_values=10, keys_values_lora=5, key=1, gate=7)


def test_steps_that_were_taken_are_counted_layer_by_layer():
    depth = torch.tensor([[2, 0, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    once = 10 * (4 + 3) + 5 * 3  # of 4 rows of text and 3 slots
    each = 1000 + 100 + (4 + 2 * 3)
    two_slots_twice = 3 * 7 + once + 2 * 2 * each + 2 * 7  # the gates of both are asked once more
    nothing = 3 * 7
    one_slot_once = 3 * 7 + once + each + 7
    assert refinement_flops([COST] * 4, depth, 4, 2) == two_slots_twice + nothing + one_slot_once
    # With a third step allowed, the two slots are asked again, and stay.
    assert refinement_flops([COST] * 4, depth, 4, 3) == two_slots_twice + nothing + one_slot_once + 2 * 7
    assert refinement_flops([COST] * 4, torch.zeros_like(depth), 4, 2) == 3 * nothing
    assert refinement_flops([COST] * 4, torch.zeros_like(depth), 4, 0) == 0


@pytest.mark.parametrize("all_open", [False, True])
def test_counted_are_the_operations_that_are_computed(all_open):
    model = tiny_aligner("llama", attn_implementation="eager")
    if all_open:
        for layer in model.model.backbone.layers:
            layer.slot_gate.out.bias.data.fill_(1e6)
    row = random_row(model, 8, num_text=6, contiguous=True)
    inputs = {"input_ids": row.input_ids[None], "context_embeds": row.context_embeds[None]}

    def computed(gate_mode: str) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model(**inputs, gate_mode=gate_mode)
        return counter.get_total_flops()

    with recorded_depths(model) as depths:
        refinement = computed("adaptive") - computed("off")
    found = count_operations(model, row.input_ids.tolist(), depths[0][0], max_refinement_steps=2)
    taken = (depths[0][0] > 0).sum(dim=1)  # (num_layers,)
    assert taken.any() and (taken.tolist() == [8, 8, 0]) == all_open
    # The formula lets each slot read all slots and as many fresh ones, and not only those that are open afresh. A step
    # of all slots needs none of their keys and values beforehand.
    passes = depths[0][0].amax(dim=1).clamp(min=0) * taken
    cost = model.model.layer_costs[0]
    unread = int((passes * torch.where(taken == 8, 8, 8 - taken)).sum()) * cost.key
    not_made = int((taken == 8).sum()) * keys_values_flops(cost, 0, 8)
    assert found["refinement_flops"] == refinement + unread + not_made


def test_prompt_and_prefix_are_counted_apart():
    model = tiny_aligner("llama")
    slot = model.config.context_token_id
    depth = torch.zeros(model.config.text_config.num_hidden_layers, 2, dtype=torch.long)
    found = count_operations(model, [5, 6, slot, 7, slot, 8, 9, 3, 4], depth, max_refinement_steps=0)
    costs = model.model.layer_costs
    assert found == {
        "prefill_flops": prefix_flops(costs, 7, 2),
        "prefix_flops": prefix_flops(costs, 3, 2),
        "refinement_flops": 0,
    }


def test_depths_are_recorded_inside_alone_and_only_of_inputs_with_slots():
    model = tiny_aligner("llama")
    row = random_row(model, 3)
    with torch.no_grad(), recorded_depths(model) as depths:
        expected = model(input_ids=row.input_ids[None], context_embeds=row.context_embeds[None]).recursion_depth
        model(input_ids=torch.tensor([[3, 4]]))
    with torch.no_grad():
        model(input_ids=row.input_ids[None], context_embeds=row.context_embeds[None])
    (found,) = depths
    assert torch.equal(found, expected)
