"""What the probes note: first decisions as the forward takes them, states as the layers read them, spread gates."""

import pytest
import torch
from tiny_models import collate, random_row, tiny_aligner

from arcaligner.benchmarks.gate_probes import asked_gates, first_decisions, layers_read, spread_gates


def one_row(aligner, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of one random row with eight slots; the same places for any seed."""
    batch = collate([random_row(aligner, 8, seed=seed, contiguous=True)])
    del batch["labels"]
    return batch


@pytest.fixture
def aligner():
    return tiny_aligner(dtype=torch.float32, max_refinement_steps=3)


@torch.no_grad()
def read(aligner, inputs, given=None):
    """First decisions (asked_layers, 2, num_slots), states that the layers read, and depths."""
    with first_decisions(aligner) as first, layers_read(aligner, given) as states:
        depth = aligner(**inputs).recursion_depth[0]
    return torch.stack(list(first.values())), states, depth


def test_the_last_layer_is_not_asked_nor_a_layer_without_a_gate():
    assert list(asked_gates(tiny_aligner())) == [0, 1]
    assert list(asked_gates(tiny_aligner(gate_layers=[1, 2]))) == [1]


def test_first_decisions_are_those_of_the_forward(aligner):
    probs, _, depth = read(aligner, one_row(aligner))
    assert torch.equal(probs[:, 0] >= 0.5, depth[:2] > 0)
    assert depth.unique().tolist()[-1] > 1, "later steps would show"


def test_rounded_decisions_are_the_gates_own_of_rounded_states(aligner):
    probs, states, depth = read(aligner, one_row(aligner))
    closed = depth[0] == 0  # these leave the layer as they were when its gate was asked
    positions = (one_row(aligner)["input_ids"][0] == aligner.config.context_token_id).nonzero()[:, 0]
    left = states[1][0, positions][closed]
    gate = asked_gates(aligner)[0]
    torch.testing.assert_close(probs[0, 0, closed], gate(left)[:, 0])
    torch.testing.assert_close(probs[0, 1, closed], gate(left.to(torch.bfloat16))[:, 0])
    assert closed.any() and not torch.equal(probs[0, 0], probs[0, 1])


def test_layers_that_are_given_states_decide_by_these(aligner):
    own, states, _ = read(aligner, one_row(aligner, seed=1))
    other, other_states, _ = read(aligner, one_row(aligner, seed=2))
    given, given_states, _ = read(aligner, one_row(aligner, seed=2), states)
    assert len(states) == 3 and not torch.equal(own, other) and not torch.equal(states[0], other_states[0])
    assert torch.equal(own, given)
    assert all(torch.equal(left, right) for left, right in zip(states, given_states, strict=True))


def test_nothing_is_noted_outside(aligner):
    with first_decisions(aligner) as first, layers_read(aligner) as states:
        pass
    with torch.no_grad():
        aligner(**one_row(aligner))
    assert not first and not states


def test_spread_gates_have_logits_of_mean_0_and_deviation_1(aligner):
    inputs = one_row(aligner)
    for gate in asked_gates(aligner).values():
        torch.nn.init.constant_(gate.out.bias, 9.0)
    spread_gates(aligner, inputs)
    probs, _, depth = read(aligner, inputs)
    logits = probs[:, 0].logit()
    torch.testing.assert_close(logits.mean(dim=1), torch.zeros(2), atol=1e-4, rtol=0.0)
    torch.testing.assert_close(logits.std(dim=1), torch.ones(2), atol=1e-4, rtol=0.0)
    assert (depth[:2] > 0).any() and (depth[:2] == 0).any()
