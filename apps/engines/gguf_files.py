"""GGUF files for llama.cpp: write the slot LoRA of an aligner, check a base model.

llama.cpp has names of its own for weights, and in the Llama architecture it rotates neighboring values of a head where
transformers rotates its two halves: rows that make queries and keys are reordered (`translate`).
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...configuration_arcaligner import ArcAlignerConfig
from ...loading_arcaligner import written_whole
from ...modeling_arcaligner import ADAPTER_NAME, ArcAlignerForCausalLM, slot_lora_layers
from ...processing_arcaligner import ArcAlignerProcessor

ADAPTER_FILE = "adapter.gguf"
# Names of architectures, of transformers and of llama.cpp.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
SIZES = {  # in GGUF metadata, after the architecture's name, and in the backbone's configuration
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def architecture_of(config: PreTrainedConfig) -> str:
    """llama.cpp's name for the architecture of a backbone."""
    if config.model_type not in ARCHITECTURES or config.to_dict().get("sliding_window"):
        raise ValueError(
            f"Backbone `{config.model_type}` has no GGUF export here; expected one of {', '.join(ARCHITECTURES)}, "
            "without a sliding window. Use the PyTorch model."
        )
    return ARCHITECTURES[config.model_type]


def head_dim_of(config: PreTrainedConfig) -> int:
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


def export_gguf(checkpoint: str, output: str | Path) -> None:
    """Writes an aligner, a folder or a Hub id, for llama.cpp: the checkpoint, and its slot LoRA as `adapter.gguf`. Each
    file of `output` is written atomically.
    """
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint)
    architecture_of(model.config.text_config)
    check_lora_positions(model.config, checkpoint)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    with written_whole(output) as folder:
        if model.config.lora_r:
            write_adapter(model, folder / ADAPTER_FILE)
        processor.save_pretrained(folder)
        model.save_pretrained(folder)


def check_lora_positions(config: ArcAlignerConfig, checkpoint: str | Path) -> None:
    """Raises `ValueError` for an aligner whose LoRA also applies to text."""
    if config.lora_positions != "slots":
        raise ValueError(
            f"{checkpoint} has `lora_positions` {config.lora_positions!r}, but llama.cpp processes text with the base "
            "model alone. Use an aligner whose LoRA is on its slots, or use the PyTorch model."
        )


def write_adapter(model: ArcAlignerForCausalLM, path: Path) -> None:
    """Writes the slot LoRA in llama.cpp's format for adapters, float32."""
    config: ArcAlignerConfig = model.config
    architecture = architecture_of(config.text_config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, config.lora_alpha)
    names = {module: name for name, module in model.model.backbone.named_modules()}
    for layer in slot_lora_layers(model.model.backbone):
        name = gguf_name(f"model.{names[layer]}.weight", config.text_config)
        down, up = (each[ADAPTER_NAME].weight for each in (layer.lora_A, layer.lora_B))
        writer.add_tensor(f"{name}.lora_a", down.detach().float().numpy())
        writer.add_tensor(f"{name}.lora_b", translate(name, up, config.text_config))
    write(writer)


def gguf_name(name: str, config: PreTrainedConfig) -> str:
    """llama.cpp's name of a weight."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture_of(config)], config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"llama.cpp has no weight like `{name}`. Leave it out of `lora_target_modules`.")
    return found


def translate(name: str, weight: torch.Tensor, config: PreTrainedConfig) -> np.ndarray:
    """A weight with its rows in llama.cpp's order; `name` is llama.cpp's."""
    rows = weight.detach().float().numpy()
    if architecture_of(config) == "llama" and (".attn_q." in name or ".attn_k." in name):
        halves = rows.reshape(-1, 2, head_dim_of(config) // 2, *rows.shape[1:])
        rows = halves.swapaxes(1, 2).reshape(rows.shape)
    return np.ascontiguousarray(rows)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_base_model(reader: gguf.GGUFReader, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` for a GGUF file of another base model or tokenizer than an aligner's."""
    path = reader.data.filename
    architecture = architecture_of(config)
    expected = {"general.architecture": architecture}
    expected |= {f"{architecture}.{key}": config.to_dict()[name] for key, name in SIZES.items()}
    # SmolLM and SmolLM2 have the same sizes and tokens, and differ in the base of RoPE.
    expected[f"{architecture}.rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    for key, value in expected.items():
        field = reader.get_field(key)
        if (found := field and field.contents()) != value:
            raise ValueError(
                f"`{key}` is {found!r} in {path}, but {value!r} in the aligner's base model. Pass the GGUF file of the "
                "base model that the aligner was trained with."
            )
    tokens = reader.get_field("tokenizer.ggml.tokens")
    tokens, own = tokens.contents() if tokens else [], tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    for number, (token, found) in enumerate(zip(own, tokens + [None] * len(own), strict=False)):
        if token != found:
            raise ValueError(
                f"Token {number} of {path} is {found!r}, but {token!r} in the aligner's tokenizer. Pass the GGUF file "
                "of the base model that the aligner was trained with."
            )
