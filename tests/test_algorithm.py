"""The model against the paper: one test per numbered equation, then Algorithm 1 as a whole.

`reference.py` computes every equation plainly; everything here is float64 and must agree to 1e-9.
"""

import random
from unittest import mock

import pytest
import torch
from reference import EXACT, Reference, assert_matches_reference, loss_gradients, random_case
from tiny_models import backbone_config, collate, for_generate, random_row, random_rows, tiny_aligner

from arcaligner import refinement_arcaligner
from arcaligner.modeling_arcaligner import SlotDecoderLayer
from arcaligner.refinement_arcaligner import OpenSlotsSteps, refinement_mask

pytestmark = pytest.mark.usefixtures("float64_model_code")


@pytest.fixture
def model():
    return tiny_aligner("llama")


@pytest.fixture
def row(model):
    return random_row(model, 8, seed=3)


@pytest.fixture
def is_slot(model, row):
    return row.input_ids == model.config.context_token_id


def run(model, row, **gates):
    """One row without padding through the model."""
    inputs = {"input_ids": row.input_ids[None], "context_embeds": row.context_embeds[None]}
    return model(**inputs, output_hidden_states=True, **gates)


def after_first_layer(model, row, **gates):
    """The output states (length, hidden) of the first layer."""
    return run(model, row, **gates).hidden_states[1][0]


# --- Eq. 1 and 2: the slots -----------------------------------------------------------------------


def test_eq1_projector_maps_embeddings(model, row):
    expected = Reference(model)(row.input_ids, row.context_embeds).slot_embeds
    torch.testing.assert_close(model.model.projector(row.context_embeds), expected, **EXACT)


def test_eq2_slots_replace_embeddings(model, row, is_slot):
    """Slots take projected embeddings; text positions keep their token embeddings."""
    expected = Reference(model)(row.input_ids, row.context_embeds).layers[0]
    first = run(model, row).hidden_states[0][0]
    torch.testing.assert_close(first, expected, **EXACT)
    assert torch.equal(first[~is_slot], model.get_input_embeddings()(row.input_ids[~is_slot]))


# --- Eq. 3 and 4: selective LoRA, the mandatory pass ----------------------------------------------


def test_eq3_lora_reaches_slots_only(model, row, is_slot):
    """LoRA is applied to slots, and text passes through the frozen weights."""
    model.config.gate_mode = "off"
    states = after_first_layer(model, row)
    torch.testing.assert_close(states, Reference(model)(row.input_ids, row.context_embeds).layers[1], **EXACT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    without = after_first_layer(model, row)
    before_first_slot = is_slot.cumsum(0) == 0
    assert before_first_slot.any() and torch.equal(states[before_first_slot], without[before_first_slot])
    assert not torch.isclose(states[is_slot], without[is_slot]).any(1).all()


def test_eq4_mandatory_pass_runs_once(model, row):
    model.config.gate_mode = "off"
    output = run(model, row)
    *expected, _ = Reference(model)(row.input_ids, row.context_embeds).layers
    torch.testing.assert_close([states[0] for states in output.hidden_states[:-1]], expected, **EXACT)
    assert torch.equal(output.recursion_depth, torch.zeros_like(output.recursion_depth))


# --- Eq. 5 to 9: gates and refinement -------------------------------------------------------------


def test_eq5_gate_opens_at_threshold(model):
    """A threshold just below or just above a slot's probability changes the first decision of that slot only."""
    model.config.max_refinement_steps, row = 1, random_row(model, 4)
    for slot, prob in enumerate(Reference(model)(row.input_ids, row.context_embeds).gate_probs[0, 0].tolist()):
        depths = []
        for model.config.gate_threshold in (prob - 1e-9, prob + 1e-9):
            depths.append(run(model, row).recursion_depth[0, 0])
        assert (depths[0] - depths[1]).tolist() == [int(other == slot) for other in range(4)]


@pytest.mark.parametrize("training", [True, False])
def test_eq7_threshold_probability_opens(model, row, training):
    with torch.no_grad():
        for name, parameter in model.train(training).named_parameters():
            if ".slot_gate.out." in name:
                parameter.zero_()  # sigmoid(0) is 0.5 exactly
    depth = run(model, row).recursion_depth
    assert (depth[:, : 3 if training else 2] == 2).all()


def test_eq6_candidate_reapplies_the_layer(model, row, is_slot):
    """With gates forced open, one step later the slots are the candidate itself."""
    model.config.gate_mode, model.config.max_refinement_steps = "always", 1
    states, mandatory = after_first_layer(model, row), after_first_layer(model, row, gate_mode="off")
    torch.testing.assert_close(states, Reference(model)(row.input_ids, row.context_embeds).layers[1], **EXACT)
    assert not torch.isclose(states[is_slot], mandatory[is_slot]).all(1).any()


def test_eq7_gate_is_straight_through(model):
    """Hard forward, soft backward: training gives the same logits as inference, and gate gradients through the
    probability."""
    rows = random_rows(model, [5, 3])
    batch = collate(rows)
    with torch.no_grad():
        inference = model.eval()(**batch)
        training = model.train()(**batch)
    is_text = batch["input_ids"] != model.config.context_token_id
    torch.testing.assert_close(training.logits[is_text], inference.logits[is_text], **EXACT)
    assert torch.equal(training.recursion_depth[:, :-1], inference.recursion_depth[:, :-1])
    both = loss_gradients(model, rows, "right")
    actual, expected = ({k: grad for k, grad in gradients.items() if ".slot_gate." in k} for gradients in both)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected.values())
    torch.testing.assert_close(actual, expected, **EXACT)


def test_eq8_only_open_slots_move(model, row, is_slot):
    output, mandatory = run(model, row), after_first_layer(model, row, gate_mode="off")
    moved = (output.hidden_states[1][0] != mandatory)[is_slot].any(1)
    assert 0 < moved.sum() < 8
    assert torch.equal(moved, output.recursion_depth[0, 0] > 0)


def test_eq9_text_keeps_mandatory_pass(model, row, is_slot):
    off, always = (after_first_layer(model, row, gate_mode=mode)[~is_slot] for mode in ("off", "always"))
    assert torch.equal(off, always)


# --- Eq. 10: the loss -----------------------------------------------------------------------------


@pytest.mark.parametrize("gate_mode", ["adaptive", "off", "always"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_eq10_loss_and_gradients(model, gate_mode, padding_side):
    """The loss, and the gradients of all trainable parameters, are those of the reference."""
    model.config.gate_mode = gate_mode
    rows = random_rows(model, [4, 0, 7, 1], seed=2)
    torch.testing.assert_close(*loss_gradients(model, rows, padding_side), **EXACT)


# --- Algorithm 1 ----------------------------------------------------------------------------------


def test_algorithm1_without_text(model):
    rows = [random_row(model, 4, num_text=0), random_row(model, 2, seed=1)]
    assert_matches_reference(model, rows, "left", training=True)


@pytest.mark.parametrize("seed", range(20))
def test_algorithm1_in_random_cases(seed):
    """Logits, decisions and gradients equal the reference for random weights, slots, padding and settings."""
    model, rows, padding_side = random_case(random.Random(seed))
    assert_matches_reference(model, rows, padding_side)
    assert_matches_reference(model, rows, padding_side, training=True)
    if any(len(row.context_embeds) for row in rows):  # text alone has nothing to train
        torch.testing.assert_close(*loss_gradients(model, rows, padding_side), **EXACT)


@pytest.mark.parametrize("almost_all", [0.0, 0.5, 2.0])  # closed slots are computed too: always, sometimes, never
@pytest.mark.parametrize("backbone", ["llama", "gemma3_text"])
def test_closed_slots_do_not_change(monkeypatch, backbone, almost_all):
    """Slots with a closed gate do not change, whether a step computes them or not."""
    model = tiny_aligner(backbone)
    width, widths = OpenSlotsSteps._width, []

    def noted(steps, gate_open):
        widths.append((int(gate_open.sum(dim=1).max()), width(steps, gate_open), gate_open.shape[1]))
        return widths[-1][1]

    monkeypatch.setattr(OpenSlotsSteps, "_width", noted)
    monkeypatch.setattr(refinement_arcaligner, "DENSE_STEP_SHARE", almost_all)
    for seed in range(3):
        assert_matches_reference(model, random_rows(model, [8, 3, 6], seed=seed), "left")
    assert any(most < max_slots for most, _, max_slots in widths)
    assert all(taken == (max_slots if most >= almost_all * max_slots else most) for most, taken, max_slots in widths)


@pytest.mark.parametrize("backbone, kinds", [("llama", 1), ("gemma3_text", 2)])
def test_shared_mask_shares_inputs(monkeypatch, backbone, kinds):
    """Layers with one mask share the inputs of a step of all slots."""
    types = {} if kinds == 1 else {"layer_types": ["sliding_attention", "full_attention", "full_attention"] * 2}
    model = tiny_aligner(backbone_config(backbone, num_hidden_layers=6, **types), gate_mode="always")
    rows = random_rows(model, [3, 5])
    assert_matches_reference(model, rows, "left")
    made = mock.Mock(side_effect=refinement_mask)
    monkeypatch.setattr(refinement_arcaligner, "refinement_mask", made)
    for forwards in (1, 2):  # nothing is shared between two calls of forward
        model(**for_generate(collate(rows)))
        assert made.call_count == kinds * forwards


@pytest.mark.parametrize("backbone", ["llama", "mistral_window", "gemma3_text"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_dense_mask_refines_the_prefix(monkeypatch, backbone, padding_side):
    """The code path of flash attention gives the same, run with an attention that can do both paths."""
    model = tiny_aligner(backbone, gate_mode="always")
    batch = for_generate(collate(random_rows(model, [3, 0, 5], seed=3), padding_side))
    expected = model(**batch).logits
    whole = mock.Mock(side_effect=lambda layer, hidden, slots, more, _: layer._prefix_pass(hidden, slots, more))
    monkeypatch.setattr(SlotDecoderLayer, "_slot_pass", lambda *args: whole(*args))
    is_real = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).logits[is_real], expected[is_real], **EXACT)
    assert whole.call_count == model.config.text_config.num_hidden_layers - 1
