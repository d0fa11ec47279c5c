"""A budget of operations is not exceeded and goes to the slots with the highest gate probability."""

import itertools
import random

import pytest
import torch
from reference import EXACT, Reference, assert_matches_reference, random_case
from tiny_models import collate, for_generate, random_row, random_rows, tiny_aligner
from torch.utils.flop_counter import FlopCounterMode

from arcaligner.refinement_arcaligner import OpenSlotsSteps

pytestmark = pytest.mark.usefixtures("float64_model_code")
SHARES = [0.01, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6]


class FrugalReference(Reference):
    """Algorithm 1 within a budget, with the costs from the model, which a test below compares with counted ones."""

    def __init__(self, model: torch.nn.Module, share: float):
        super().__init__(model)
        self.share, self.costs = share, model.model.layer_costs

    def __call__(self, input_ids: torch.Tensor, context_embeds: torch.Tensor, **options):
        slots = (input_ids == self.config.context_token_id).nonzero()[:, 0].tolist()
        self.sizes = max(slots, default=-1) + 1 - len(slots), len(slots)  # text up to the last slot, slots
        self.left = int(self.share * sum(cost.of_prefill(*self.sizes) for cost in self.costs))
        return super().__call__(input_ids, context_embeds, **options)

    def refine(self, layer: int, hidden: torch.Tensor, apply_layer) -> torch.Tensor:
        positions, always = self.slot_mask[:, 0].nonzero()[:, 0], self.config.gate_mode == "always"
        cost = self.costs[layer]
        once, pass_cost = cost.of_keys_values(*self.sizes), cost.of_slot_pass(*self.sizes)
        active = list(range(len(positions)))
        for step in range(self.config.max_refinement_steps):
            if not self.pay(0 if always else len(active) * cost.gate):
                break
            probs = [1.0] * len(positions) if always else self.gate_prob(layer, hidden[positions])[:, 0].tolist()
            wanted = sorted((j for j in active if probs[j] >= self.config.gate_threshold), key=lambda j: (-probs[j], j))
            if step == 0:
                can = min(len(wanted), max(0, (self.left - once) // pass_cost))
                moving = active = wanted[:can]
                self.pay(once + can * pass_cost if can else 0)
                if can < len(wanted):
                    self.left = 0
            else:
                moving = wanted if wanted and self.pay(len(active) * pass_cost) else []
            if not moving:
                break
            hidden = hidden.index_copy(0, positions[moving], apply_layer(hidden)[positions[moving]])
            self.output.recursion_depth[layer, moving] += 1
        return hidden

    def pay(self, price: int) -> bool:
        """Whether the budget covers a cost; if not, the refinement of the row ends."""
        can = self.left > 0 and self.left >= price
        self.left = self.left - price if can else 0
        return can


@pytest.mark.parametrize("seed", range(20))
def test_budget_refines_confident_slots(seed):
    """Rows of a batch get the steps that a plain implementation takes for each row alone."""
    draw = random.Random(seed)
    share = draw.choice([0, *SHARES])
    model, rows, padding_side = random_case(draw)
    reference = FrugalReference(model, share)
    assert_matches_reference(model, rows, padding_side, reference=reference, refinement_budget=share)


@pytest.mark.parametrize("gate_mode", ["adaptive", "always"])
def test_larger_budget_adds_steps(gate_mode):
    """A larger budget removes no step, and with an infinite one only the gates decide."""
    model = tiny_aligner("mistral_window", gate_mode=gate_mode)
    batch = for_generate(collate(random_rows(model, [5, 0, 9], seed=2), "left"))
    shares = [*(percent / 100 for percent in range(0, 100, 2)), 1000, 1e300, float("inf")]
    outputs = [model(**batch, refinement_budget=share) for share in [*shares, None]]
    for smaller, larger in itertools.pairwise(outputs):
        assert (smaller.recursion_depth <= larger.recursion_depth).all()
    for output in outputs[-4:-1]:
        assert torch.equal(output.recursion_depth, outputs[-1].recursion_depth)
        torch.testing.assert_close(output.logits, outputs[-1].logits, **EXACT)


@pytest.mark.parametrize("gate_mode", ["adaptive", "always"])
def test_counted_operations_within_budget(gate_mode):
    """Operations that are counted during a run stay within the share."""
    model = tiny_aligner("llama", attn_implementation="eager", gate_mode=gate_mode)
    row = random_row(model, 12, num_text=6, contiguous=True)
    end = int((row.input_ids == model.config.context_token_id).nonzero().max()) + 1
    prefix = {"input_ids": row.input_ids[None, :end], "context_embeds": row.context_embeds[None]}

    def measured(**settings) -> int:
        # The counter knows `addmm`, but not `addmm_`, which adds the LoRA of the slots.
        in_place = {torch.ops.aten.addmm_: lambda _, left, right, **kwargs: 2 * left[0] * left[1] * right[1]}
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter, torch.no_grad():
            model.model(**prefix, **settings)
        return counter.get_total_flops()

    off = measured(gate_mode="off")
    extra = [measured(refinement_budget=share) / off - 1 for share in SHARES]
    assert all(taken <= share for taken, share in zip(extra, SHARES, strict=True))
    assert extra == sorted(extra) and extra[-1] > 0.2
    costs, projector = model.model.layer_costs, model.model.projector
    of_projector = 2 * 12 * (projector.up.weight.numel() + projector.out.weight.numel())
    above_diagonal = sum(cost.key for cost in costs) * end**2 // 2  # is computed, but does not count
    assert off == sum(cost.of_prefill(end - 12, 12) for cost in costs) + of_projector + above_diagonal
    assert measured(refinement_budget=0) == off


def test_unpaid_slots_are_not_computed(monkeypatch):
    """A step computes no slot that the budget does not cover."""
    model, width, taken = tiny_aligner("llama"), OpenSlotsSteps._width, []

    def noted(steps, gate_open):
        taken.append((width(steps, gate_open), int(gate_open.sum(dim=1).max())))
        return taken[-1][0]

    monkeypatch.setattr(OpenSlotsSteps, "_width", noted)
    batch = for_generate(collate(random_rows(model, [12]), "left"))
    for percent in range(1, 100):
        model(**batch, refinement_budget=percent / 100, gate_mode="always")
    assert all(computed == paid for computed, paid in taken)
    assert {(11, 11), (12, 12)} <= set(taken)  # without a budget all would be computed


def test_budget_is_refused_where_meaningless(monkeypatch):
    """Training, and kernels that refine all slots or none, are refused."""
    model = tiny_aligner("llama")
    batch = for_generate(collate(random_rows(model, [3])))
    with pytest.raises(ValueError, match=r"`refinement_budget` is 0.1, but.* in training mode.*`model.eval\(\)`"):
        model.train()(**batch, refinement_budget=0.1)
    monkeypatch.setattr(model.config.text_config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(
        ValueError, match="`flash_attention_2` cannot apply a layer again to only some of the slots.*'eager' or 'sdpa'"
    ):
        model.eval()(**batch, refinement_budget=0.1)
