"""Aligners of well-known shapes with random weights, built on the device: no download, and speed and memory are real.

On a CPU a shape keeps its number of layers, and its hidden size is cut to 64. The counts of operations are then those
of the shape. The milliseconds are mostly the time to start operations, which limits the speed of a GPU at batch size 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ..configuration_arcaligner import ArcAlignerConfig
from ..modeling_arcaligner import ArcAlignerForCausalLM

GIB = 2**30

# Name -> (model_type, sizes of the backbone, hidden size of the encoder of its recipe).
SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "tiny": (
        "llama",
        {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192},
        32,
    ),
    "smollm2-135m": (
        "llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192}
        | {"tie_word_embeddings": True},
        384,
    ),
    "llama-1b": (
        "llama",
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072}
        | {"tie_word_embeddings": True},
        384,
    ),
    "mistral-7b": (
        "mistral",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768}
        | {"sliding_window": None},
        4096,
    ),
    "llama-8b": (
        "llama",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        4096,
    ),
}
# What replaces a shape's sizes on a CPU.
CUT = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128}
CUT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def make_config(shape: str, is_cut: bool = False, passage_attention: str = "joint", **changes: Any) -> ArcAlignerConfig:
    """The configuration of the aligner in the paper's tables, with the backbone of a shape: LoRA of rank 128 on all
    linear layers, gates on all layers, two refinement steps. It has no dropout, whose cost differs between PEFT and the
    aligner. `changes` replace sizes of the backbone."""
    model_type, sizes, encoder_hidden_size = SHAPES[shape]
    is_small = is_cut or shape == "tiny"
    config = ArcAlignerConfig(
        text_config=AutoConfig.for_model(model_type, **sizes | (CUT if is_cut else {}) | changes),
        encoder_hidden_size=32 if is_cut else encoder_hidden_size,
        lora_r=8 if is_small else 128,
        gate_hidden_size=8 if is_small else 64,
        lora_dropout=0.0,
        passage_attention=passage_attention,
    )
    config._attn_implementation = "sdpa"
    return config


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_aligner(config: ArcAlignerConfig, device: str | torch.device, dtype: torch.dtype) -> ArcAlignerForCausalLM:
    """An aligner with random weights in evaluation mode: the backbone in `dtype` and the aligner in float32, like one
    that is loaded. Weights are created on their final device; on `"meta"` nothing is allocated."""
    with torch.device(device), _default_dtype(dtype):
        model = ArcAlignerForCausalLM(config)
    for _, parameter in model.aligner_parameters():
        parameter.data = parameter.data.float()
    return model.eval()


# What fits


def weight_bytes(shape: str, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the weights of a shape's backbone and of its aligner, from models of one and two layers on the meta
    device: layers are equal, and building all of them takes seconds."""
    counts = []
    for num_layers in (1, 2):
        model = build_aligner(make_config(shape, num_hidden_layers=num_layers), "meta", dtype)
        aligner = sum(parameter.nbytes for _, parameter in model.aligner_parameters())
        counts.append((sum(parameter.nbytes for parameter in model.parameters()) - aligner, aligner))
    more = SHAPES[shape][1]["num_hidden_layers"] - 1
    backbone, aligner = (one + more * (two - one) for one, two in zip(*counts, strict=True))
    return backbone, aligner


def prefill_bytes(config: PreTrainedConfig, positions: int, itemsize: int) -> int:
    """Estimate the bytes that a prefill of `positions` (of all rows together) takes in addition to the weights: its
    keys and values, those of a cached prefix, and the states of a layer."""
    keys_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    states = 8 * config.hidden_size + 4 * config.intermediate_size
    return positions * itemsize * (2 * keys_values + states)


def step_bytes(config: PreTrainedConfig, positions: int, aligner_bytes: int) -> int:
    """Estimate the bytes that a training step of `positions` takes in addition to the weights: activations of all
    layers, logits, and twice the aligner for PEFT's LoRA and gradients. The factors of activations are fitted to the
    memory of a step of PEFT's LoRA in bfloat16 on an H200."""
    activations = config.num_hidden_layers * (24 * config.hidden_size + 12 * config.intermediate_size)
    return positions * (activations + 14 * config.vocab_size) + 2 * aligner_bytes


def check_fits(shape: str, dtype: torch.dtype, longest: int, device: str, free: int, total: int) -> None:
    """Check, before anything is allocated, that the weights of a shape and one prompt of `longest` positions fit.

    Args:
        free, total (`int`): Bytes of the GPU's memory.

    Raises:
        `ValueError`: they do not; the message names the shapes that fit.
    """

    def needed(name: str) -> int:
        prefill = prefill_bytes(make_config(name).text_config, longest, dtype.itemsize)
        return sum(weight_bytes(name, dtype)) + prefill

    if (bytes_needed := needed(shape)) <= free:
        return
    fitting = [name for name in SHAPES if name not in (shape, "tiny") and needed(name) <= free]
    advice = "No shape fits. Free memory of this GPU, or choose another GPU with `--device`."
    if fitting:
        advice = f"Pass a shape that fits: {', '.join(fitting)}."
    raise ValueError(
        f"`--shape` is {shape}, which needs about {bytes_needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
        f"but {device} has {free / GIB:.1f} GiB free of {total / GIB:.1f}. {advice}"
    )
