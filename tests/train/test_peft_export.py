"""The exported adapter is the aligner's LoRA in plain PEFT: the same on slots, and, as its card warns, on text too."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from tiny_models import ENCODER_HIDDEN_SIZE, tiny_aligner
from transformers import AutoModelForCausalLM

from arcaligner import ArcAlignerForCausalLM
from arcaligner.lora_arcaligner import ADAPTER_NAME, slot_lora_layers
from arcaligner.train.peft_export import export_peft

FILES = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
TEXT = torch.tensor([[5, 9, 4, 30, 8, 17]])


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def base_model_of(aligner):
    """The plain base model, its weights copied from `aligner`."""
    base = AutoModelForCausalLM.from_config(aligner.config.text_config, dtype=aligner.dtype).eval()
    weights = aligner.model.backbone.state_dict()
    weights = {key.replace(".base_layer.", "."): weights[key] for key in weights if not aligner.is_aligner_key(key)}
    base.base_model.load_state_dict(weights)
    base.get_output_embeddings().load_state_dict(aligner.lm_head.state_dict())
    return base


@pytest.fixture
def adapter(checkpoint_dir, tmp_path) -> Path:
    """The LoRA of `checkpoint_dir`, exported."""
    export_peft(checkpoint_dir, tmp_path / "lora")
    return tmp_path / "lora"


@pytest.mark.parametrize("backbone", ["llama", "phi3", "gemma3_text", "granite"])
@torch.no_grad()
def test_adapter_in_plain_peft_is_the_aligner_where_every_row_is_a_slot(backbone, tmp_path):
    aligner = tiny_aligner(backbone, gate_mode="off")
    aligner.save_pretrained(tmp_path / "checkpoint")
    export_peft(tmp_path / "checkpoint", tmp_path / "lora")
    adapted = PeftModel.from_pretrained(base_model_of(aligner), tmp_path / "lora").eval()
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    for layer, expected in zip(layers, slot_lora_layers(aligner), strict=True):
        assert torch.equal(layer.get_delta_weight("default"), expected.get_delta_weight(ADAPTER_NAME))
    embeds = torch.randn(2, 6, ENCODER_HIDDEN_SIZE, dtype=aligner.dtype)
    input_ids = torch.full((2, 6), aligner.config.context_token_id)
    expected = aligner(input_ids=input_ids, context_embeds=embeds).logits
    found = adapted(inputs_embeds=aligner.model.projector(embeds)).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_adapter_changes_text_in_plain_peft_as_its_card_warns(adapter, model, base_model_dir):
    base = AutoModelForCausalLM.from_pretrained(base_model_dir).eval()
    unchanged = base(TEXT).logits
    assert torch.equal(model(TEXT).logits, unchanged)
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    assert (adapted(TEXT).logits - unchanged).abs().max() > 0.1
    card = (adapter / "README.md").read_text()
    assert "applies the LoRA to every token" in card and "to context slots only" in card


@torch.no_grad()
def test_adapter_in_a_subfolder_loads_by_its_name_and_the_aligner_beside_it_ignores_it(
    checkpoint_dir, base_model_dir, model, tmp_path
):
    shutil.copytree(checkpoint_dir, tmp_path / "checkpoint")
    export_peft(tmp_path / "checkpoint", tmp_path / "checkpoint" / "peft_lora")
    base = AutoModelForCausalLM.from_pretrained(base_model_dir)
    adapted = PeftModel.from_pretrained(base, tmp_path / "checkpoint", subfolder="peft_lora")
    assert sum(isinstance(module, LoraLayer) for module in adapted.modules()) == 21
    aligner = ArcAlignerForCausalLM.from_pretrained(str(tmp_path / "checkpoint")).eval()
    assert torch.equal(aligner(TEXT).logits, model(TEXT).logits)
    assert all(list(layer.lora_A) == [ADAPTER_NAME] for layer in aligner.modules() if isinstance(layer, LoraLayer))


def test_adapter_names_its_base_model_and_the_settings_of_the_lora(adapter, model, base_model_dir):
    assert {path.name for path in adapter.iterdir()} == FILES
    config = LoraConfig.from_pretrained(adapter)
    assert (config.r, config.lora_alpha, config.bias) == (4, model.config.lora_alpha, "none")
    assert config.base_model_name_or_path == str(base_model_dir)
    assert (config.peft_type, config.task_type, config.inference_mode) == ("LORA", "CAUSAL_LM", True)


def test_adapter_on_a_base_model_of_the_hub_is_listed_under_it(checkpoint_dir, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name, content in file_bytes(checkpoint_dir).items():
        (checkpoint / name).write_bytes(content)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/base"}))
    export_peft(checkpoint, tmp_path / "lora")
    card = (tmp_path / "lora" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\nbase_model: someone/base\n---\n# LoRA of an ArcAligner")


def test_weights_keep_the_checkpoints_dtype(checkpoint_dir, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_bytes((checkpoint_dir / "config.json").read_bytes())
    weights = {key: tensor.bfloat16() for key, tensor in load_file(checkpoint_dir / "model.safetensors").items()}
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    export_peft(checkpoint, checkpoint / "peft_lora")
    exported = load_file(checkpoint / "peft_lora" / "adapter_model.safetensors")
    expected = {
        key.replace("model.backbone.", "base_model.model.model.").replace(".slot.", "."): tensor
        for key, tensor in weights.items()
        if ".lora_A." in key or ".lora_B." in key
    }
    assert exported.keys() == expected.keys() and len(exported) == 2 * 21
    for key, tensor in expected.items():
        assert exported[key].dtype == torch.bfloat16 and torch.equal(exported[key], tensor), key


def test_earlier_export_is_replaced(checkpoint_dir, adapter):
    expected = file_bytes(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"old")
    export_peft(checkpoint_dir, adapter)
    assert file_bytes(adapter) == expected
    assert [path.name for path in adapter.parent.iterdir()] == ["lora"]


def somebodys_adapter(folder: Path) -> None:
    for name in FILES:
        (folder / name).write_text("another adapter, in PEFT's format")


@pytest.mark.parametrize(
    "fill",
    [
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "README.md").write_text("notes"),
        somebodys_adapter,
    ],
)
def test_folder_with_something_else_in_it_is_refused_and_left_alone(checkpoint_dir, tmp_path, fill):
    output = tmp_path / "mine"
    output.mkdir()
    fill(output)
    before = file_bytes(output)
    with pytest.raises(ValueError, match="mine is not an empty folder and no earlier export.*name a new one"):
        export_peft(checkpoint_dir, output)
    assert file_bytes(output) == before


def test_file_in_the_place_of_the_folder_is_refused(checkpoint_dir, tmp_path):
    (tmp_path / "README.md").write_text("notes")
    with pytest.raises(ValueError, match="is not an empty folder"):
        export_peft(checkpoint_dir, tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == "notes"


@pytest.mark.parametrize("is_there", [False, True])
def test_export_that_breaks_off_leaves_what_was_there(checkpoint_dir, tmp_path, monkeypatch, is_there):
    output = tmp_path / "lora"
    if is_there:
        export_peft(checkpoint_dir, output)
    before = file_bytes(output) if is_there else None

    def full_disk(self, folder):
        raise OSError("No space left on device")

    monkeypatch.setattr(LoraConfig, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export_peft(checkpoint_dir, output)
    assert os.listdir(tmp_path) == (["lora"] if is_there else [])
    assert not is_there or file_bytes(output) == before


def test_incomplete_checkpoint_is_refused_before_anything_is_written(checkpoint_dir, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        export_peft(checkpoint, tmp_path / "out" / "lora")
    (checkpoint / "config.json").write_bytes((checkpoint_dir / "config.json").read_bytes())
    weights = load_file(checkpoint_dir / "model.safetensors")
    weights.pop(next(key for key in weights if "lora_A" in key))
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of "):
        export_peft(checkpoint, tmp_path / "out" / "lora")
    assert not (tmp_path / "out").exists()
