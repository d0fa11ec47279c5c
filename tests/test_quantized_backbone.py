"""Quantizers take the backbone's linears and leave the aligner in full precision."""

import torch
from tiny_models import tiny_aligner
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module


def test_quantizers_take_the_backbone_and_leave_the_aligner():
    model = tiny_aligner(word_parts=2)
    kept = HfQuantizer.get_modules_to_not_convert(model, keep_in_fp32_modules=model._keep_in_fp32_modules)
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    converted = {name for name in linears if should_convert_module(name, kept)}
    of_backbone = {name for name in linears if not model.is_aligner_key(f"{name}.weight")}
    assert converted == of_backbone - {"lm_head"}
    assert len(converted) == 3 * 7
