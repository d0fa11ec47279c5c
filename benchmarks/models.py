"""The models that are compared: an aligner and the bare base model with the same weights, in one dtype.

A checkpoint's, or, for a machine where a large one would not be at hand, random weights of a published shape.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..configuration_arcaligner import ArcAlignerConfig
from ..modeling_arcaligner import ArcAlignerForCausalLM

_SEVEN_B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
SHAPES = {
    "mistral_7b": {
        **_SEVEN_B,
        "model_type": "mistral",
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "llama_3_1_8b": {
        **_SEVEN_B,
        "model_type": "llama",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
SHAPE_ENCODER_WIDTH = 4096  # of the paper's encoder
SHAPE_OPEN_LAYERS = 4  # of random weights every fourth layer refines all of its slots, the others none


def load_models(checkpoint: str, dtype: torch.dtype, device: str) -> tuple[ArcAlignerForCausalLM, PreTrainedModel]:
    """A checkpoint's aligner, and a base model that shares its weights, so that both read the same memory."""
    aligner = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    return aligner, base_of(aligner, dtype, device)


def random_models(
    shape: dict, dtype: torch.dtype, device: str, context_token_id: int
) -> tuple[ArcAlignerForCausalLM, PreTrainedModel]:
    """An aligner of the paper's size around random weights of a shape, and a base model that shares these."""
    text_config = AutoConfig.for_model(**shape)
    config = ArcAlignerConfig(
        text_config=text_config, encoder_hidden_size=SHAPE_ENCODER_WIDTH, context_token_id=context_token_id
    )
    torch.manual_seed(0)
    with torch.device(device):
        aligner = ArcAlignerForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in aligner.named_parameters():
        if not aligner.is_aligner_key(name):  # as `from_pretrained` loads it: the aligner stays in float32
            parameter.data = parameter.data.to(dtype)
        elif name.endswith("slot_gate.out.bias"):
            layer = int(name.split(".layers.")[1].split(".")[0])
            parameter.data.fill_(1.0 if layer % SHAPE_OPEN_LAYERS == 0 else -1.0)
    return aligner, base_of(aligner, dtype, device)


def base_of(aligner: ArcAlignerForCausalLM, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of transformers with the backbone's weights, which are shared and not copied."""
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(aligner.config.text_config, dtype=dtype).eval()
    state = {
        name.replace(".base_layer.", ".").replace("model.backbone.", f"{base.base_model_prefix}."): parameter
        for name, parameter in aligner.named_parameters(remove_duplicate=False)
        if not aligner.is_aligner_key(name)
    }
    base.load_state_dict(state, strict=True, assign=True)
    return base.requires_grad_(False)
