"""`lora_r=0`: an aligner without LoRA, xRAG's design when its gates are off."""

from pathlib import Path

import pytest
import torch
from tiny_models import collate, for_generate, random_rows, tiny_aligner
from training_recipes import RecipeWriter, parameters, run

from arcaligner import ArcAlignerConfig, ArcAlignerForCausalLM


def test_it_computes_what_an_aligner_does_whose_lora_does_nothing():
    alone, with_lora = tiny_aligner("llama", lora_r=0), tiny_aligner("llama")
    state = {name: torch.zeros_like(p) if "lora_B" in name else p for name, p in with_lora.state_dict().items()}
    with_lora.load_state_dict(state)
    alone.load_state_dict({k.replace(".base_layer", ""): p for k, p in state.items() if ".lora_" not in k})
    batch = for_generate(collate(random_rows(alone, [3, 0, 2]), "left"))
    for gate_mode in ("off", "adaptive", "always"):
        alone.config.gate_mode = with_lora.config.gate_mode = gate_mode
        torch.testing.assert_close(alone(**batch).logits, with_lora(**batch).logits, rtol=0, atol=0)


def test_it_trains_the_projector_and_comes_back_from_its_checkpoint(tmp_path: Path, base_model_dir, encoder_dir):
    write_recipe = RecipeWriter(tmp_path, base_model_dir, encoder_dir)
    run(write_recipe("reconstruction", tmp_path / "1", aligner={"lora_r": 0, "gate_hidden_size": 8}))
    run(write_recipe("grounding", tmp_path / "2", tmp_path / "1"))
    first, second = parameters(tmp_path / "1"), parameters(tmp_path / "2")
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    assert moved == {name for name in first if "projector" in name}
    assert ArcAlignerForCausalLM.from_pretrained(tmp_path / "2").config.lora_r == 0


def test_a_negative_rank_is_refused():
    with pytest.raises(ValueError, match="`lora_r` is -1; expected a rank, or 0"):
        ArcAlignerConfig(text_config={"model_type": "llama"}, lora_r=-1)
