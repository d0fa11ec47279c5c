"""Quantizers take the backbone's linears, leave the aligner in full precision, and are not written with it."""

import json

import pytest
import torch
from conftest import chat_inputs
from safetensors import safe_open
from tiny_models import tiny_aligner
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from arcaligner import ArcAlignerForCausalLM
from arcaligner.loading_arcaligner import _check_aligner_is_complete


def quantization(name):
    """The settings of a quantizer to 8 bits, for `from_pretrained`."""
    if name == "torchao":
        return TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True)


def saved_keys(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def test_quantizers_skip_aligner():
    model = tiny_aligner(word_parts=2)
    kept = HfQuantizer.get_modules_to_not_convert(model, keep_in_fp32_modules=model._keep_in_fp32_modules)
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    converted = {name for name in linears if should_convert_module(name, kept)}
    of_backbone = {name for name in linears if not model.is_aligner_key(f"{name}.weight")}
    assert converted == of_backbone - {"lm_head"}
    assert len(converted) == 3 * 7


@pytest.mark.parametrize("name", ["torchao", "bitsandbytes"])
def test_aligner_around_a_quantized_backbone(name, checkpoint_dir, processor, model, tmp_path):
    """An aligner learns and is saved around a quantized backbone."""
    quantized = ArcAlignerForCausalLM.from_pretrained(checkpoint_dir, quantization_config=quantization(name)).eval()
    inputs = chat_inputs(processor, "Who wrote it?", ["It was written by Ada."])
    with torch.no_grad():
        expected, logits = (aligner(**inputs, gate_mode="off").logits for aligner in (model, quantized))
    assert 0 < (logits - expected).abs().mean() < 0.2 * expected.abs().mean()
    quantized.train().set_stage("grounding")
    labels = torch.where(inputs["input_ids"] < quantized.config.context_token_id, inputs["input_ids"], -100)
    quantized(**inputs, labels=labels).loss.backward()
    trained = {key: weight for key, weight in quantized.named_parameters() if weight.grad is not None}
    assert any("lora_B" in key for key in trained) and all(map(quantized.is_aligner_key, trained))
    torch.optim.SGD(trained.values(), lr=1.0).step()
    quantized.save_pretrained(tmp_path)
    assert saved_keys(tmp_path) == saved_keys(checkpoint_dir)
    again = dict(ArcAlignerForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(again[key], weight) for key, weight in quantized.aligner_parameters())


def test_saved_without_quantization(model, checkpoint_dir, tmp_path):
    """An aligner is saved without the quantization of its backbone."""
    quantizer, settings = object(), {"quant_method": "torchao"}
    model.hf_quantizer, model.config.quantization_config = quantizer, settings
    model.save_pretrained(tmp_path)
    assert saved_keys(tmp_path) == saved_keys(checkpoint_dir)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert (model.hf_quantizer, model.config.quantization_config) == (quantizer, settings)


def test_quantized_aligner_is_refused(model):
    """A quantizer that changes weights of the aligner is refused."""

    class Int8Parameter(torch.nn.Parameter):
        pass

    model.model.projector.out.weight = Int8Parameter(model.model.projector.out.weight)
    with pytest.raises(
        ValueError, match="changed weights of the aligner .1 in all.*`model.projector.* is now of type Int8Parameter"
    ):
        _check_aligner_is_complete(model)
