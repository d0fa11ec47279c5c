"""Properties that training relies on: stages, new aligners, and the loss."""

import pytest
import torch
from tiny_models import ENCODER_HIDDEN_SIZE, VOCAB_SIZE, backbone_config, collate, random_rows, randomize, tiny_aligner
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from arcaligner.modeling_arcaligner import ArcAlignerForCausalLM

SLOT_COUNTS = [3, 6, 1, 4]
PROJECTOR_AND_LORA = (".projector.", ".lora_")


# Stages


@pytest.mark.parametrize("stage", ["reconstruction", "grounding", "gating"])
def test_step_moves_stage_parameters_only(stage):
    """A step changes only parameters of the stage; in the last layer only LoRA of keys and values changes."""
    model = tiny_aligner("llama").train()
    for previous in ("gating", "reconstruction", stage):  # an earlier stage does not matter
        model.set_stage(previous)
    parts = PROJECTOR_AND_LORA + (".slot_gate.",) * (stage == "gating")
    assert model.config.gate_mode == ("adaptive" if stage == "gating" else "off")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = collate(random_rows(model, SLOT_COUNTS, contiguous=True), "left")
    batch["labels"][:, :-2] = -100  # only the answer: the state of a slot would predict a label right after that slot
    model(**batch).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    for name, parameter in model.named_parameters():
        is_trained = any(part in name for part in parts)
        assert parameter.requires_grad == (parameter.grad is not None) == is_trained, name  # else processes wait for it
        in_last_layer = ".layers.2." in name and not any(leaf in name for leaf in (".k_proj.", ".v_proj."))
        assert torch.equal(parameter, before[name]) != (is_trained and not in_last_layer), name
    with pytest.raises(ValueError, match="'pretraining'.*reconstruction, grounding, gating"):
        model.set_stage("pretraining")


SETTINGS = {"encoder_hidden_size": ENCODER_HIDDEN_SIZE, "lora_r": 4, "lora_dropout": 0.0, "gate_hidden_size": 7}


def save_base_model(folder, backbone="llama", **changes):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(backbone_config(backbone, **changes))
    randomize(base)
    base.save_pretrained(folder)
    return base


@pytest.mark.parametrize("backbone", ["llama", "gemma2", "gemma3_text", "phi3", "cohere"])
def test_new_aligner_equals_base_model(tmp_path, backbone):
    """In a new aligner LoRA B is zero, gates are closed, and base weights are those of the base model, frozen."""
    base = save_base_model(tmp_path, backbone)
    torch.manual_seed(3)
    torch.randn(1000)  # new weights must not contain values that were in the memory before
    model = ArcAlignerForCausalLM.from_pretrained(tmp_path, **SETTINGS)
    assert model.config.base_model_name_or_path == str(tmp_path)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            assert not parameter.any(), name
        elif ".lora_A." in name or (".projector." in name and name.endswith("weight")):
            assert 1e-4 < parameter.std() < 2, name
        assert parameter.requires_grad == any(part in name for part in (*PROJECTOR_AND_LORA, ".slot_gate.")), name
    rows = random_rows(model, [3, 5])
    ids = torch.randint(3, VOCAB_SIZE, (2, 11))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, base.eval()(ids).logits)
        assert not model(**collate(rows)).recursion_depth.clamp(min=0).any()


# The loss


@pytest.mark.parametrize("stage", ["reconstruction", "gating"])
@pytest.mark.parametrize("max_slots", [None, 0, 1])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_slotless_batch_gives_zero_gradients(stage, max_slots, is_sharded, request):
    """Gradients are zeros, not `None`, so that a process with such a batch takes part in the reduction, also with the
    sharded weights of FSDP2."""
    model = tiny_aligner("llama").train()
    model.set_stage(stage)
    if is_sharded:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        request.addfinalizer(distributed.destroy_process_group)
        for module in (*model.model.backbone.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    batch = collate(random_rows(model, [0, 0], num_text=8))
    if max_slots is not None:
        batch["context_embeds"] = torch.zeros(2, max_slots, ENCODER_HIDDEN_SIZE)
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_context_token_label_is_ignored():
    model = tiny_aligner("llama").train()
    batch = collate(random_rows(model, SLOT_COUNTS))
    expected = model(**batch).loss
    is_slot = batch["input_ids"] == model.config.context_token_id
    batch["labels"] = torch.where(is_slot, batch["input_ids"], batch["labels"])
    assert torch.equal(model(**batch).loss, expected)
