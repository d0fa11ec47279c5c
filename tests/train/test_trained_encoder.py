"""The sentence encoder is trained jointly, is kept in the checkpoint, and can be used by itself."""

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from training_recipes import logs, parameters, run, run_until

from arcaligner import ArcAlignerProcessor
from arcaligner.share import export

TEXTS = ["Radik Zhaparov is a Kazakh ski jumper.", "It was written by Ada."]
RATES = {"tokens_per_slot": [4, "segment"], "encoder_lora_r": 2, "encoder_learning_rate": 0.05}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, write_recipe):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(write_recipe("grounding", folder, lr_scheduler_type="constant", **RATES))
    return folder


def embeds(folder) -> torch.Tensor:
    return ArcAlignerProcessor.from_pretrained(folder).encoder.encode(TEXTS)


def test_checkpoint_has_trained_encoder(trained, processor):
    """The encoder of a checkpoint is the trained one."""
    assert (embeds(trained) - processor.encoder.encode(TEXTS)).abs().max() > 1e-3
    assert torch.equal(embeds(trained), embeds(trained / "checkpoint-4"))
    encoder = SentenceTransformer(processor.encoder_name_or_path)
    encoder.load_adapter(str(trained / "encoder"))
    expected = encoder.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
    torch.testing.assert_close(embeds(trained), expected)


def test_bfloat16_encoder_is_evaluated(tmp_path, write_recipe):
    """An encoder in bfloat16 is evaluated in the precision of its training."""
    held_out = {"eval_files": {write_recipe.files["grounding"]: 1.0}, "eval_strategy": "steps", "eval_steps": 2}
    losses = []
    for dtype in ("float32", "bfloat16"):
        keys = RATES | held_out | {"max_steps": 2, "dtype": dtype, "tokens_per_slot": [4]}
        run(write_recipe("grounding", tmp_path / dtype, **keys))
        losses.append(logs(tmp_path / dtype, "eval_loss")[0]["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05) and losses[0] != losses[1]


def test_search_device_and_encoder(trained, processor):
    """Search uses the base encoder, on the requested device."""
    loaded = ArcAlignerProcessor.from_pretrained(trained)
    loaded.encoder.device = "cpu"
    assert torch.equal(loaded.encoder.untrained.encode(TEXTS), processor.encoder.encode(TEXTS))
    loaded.encoder.device = "meta"
    assert loaded.encoder.untrained.model.device.type == "meta"


def test_resumed_run_keeps_encoder(tmp_path, write_recipe, trained):
    """An interrupted run continues with its own encoder."""
    arguments = write_recipe("grounding", tmp_path / "run", lr_scheduler_type="constant", **RATES)
    run_until(2, arguments)
    run(arguments)
    torch.testing.assert_close(embeds(tmp_path / "run"), embeds(trained), rtol=0, atol=1e-5)
    torch.testing.assert_close(parameters(tmp_path / "run"), parameters(trained), rtol=0, atol=1e-5)


def test_stage_ends_with_the_mean(tmp_path, write_recipe):
    """The result of a stage is the mean of its last checkpoints."""
    folder = tmp_path / "run"
    keys = {"save_steps": 1, "save_total_limit": 3, "average_checkpoints": 2, "max_steps": 4}
    run(write_recipe("grounding", folder, **keys, **RATES))
    for file in ("model.safetensors", "encoder/adapter_model.safetensors"):
        checkpoints = ("", "checkpoint-4", "checkpoint-3")
        mean, last, before = (load_file(folder / checkpoint / file) for checkpoint in checkpoints)
        torch.testing.assert_close(mean, {name: (last[name] + before[name]) / 2 for name in last})
        assert any(not torch.equal(mean[name], last[name]) for name in mean)


def test_later_stage_keeps_the_encoder(tmp_path, write_recipe, trained):
    """A later stage keeps the trained encoder, and refuses LoRA of another rank."""
    run(write_recipe("gating", tmp_path / "gating", model=trained, max_steps=1))
    assert torch.equal(embeds(tmp_path / "gating"), embeds(trained))
    with pytest.raises(ValueError, match="`encoder_lora_r` is 3, but the encoder already has a LoRA of rank 2"):
        run(write_recipe("grounding", tmp_path / "run", model=trained, encoder_lora_r=3))


def test_exported_encoder_is_bfloat16(tmp_path, trained):
    for _ in range(2):  # the second one replaces the first
        export.main(stages=trained.parent, output=tmp_path / "shipped")
    weights = load_file(tmp_path / "shipped" / "encoder" / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    torch.testing.assert_close(embeds(tmp_path / "shipped"), embeds(trained), rtol=0, atol=0.02)
