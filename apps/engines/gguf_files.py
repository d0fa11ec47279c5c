"""GGUF files for llama.cpp: write the slot LoRA of an aligner, and check a base model.

llama.cpp has its own names for weights. In the Llama architecture, its RoPE rotates pairs of neighboring values of a
head, where transformers pairs the values of both halves. So `translate` reorders the rows of weights that make queries
and keys.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...configuration_arcaligner import ArcAlignerConfig
from ...loading_arcaligner import write_folder_atomically
from ...modeling_arcaligner import ADAPTER_NAME, ArcAlignerForCausalLM, slot_lora_layers
from ...processing_arcaligner import ArcAlignerProcessor

ADAPTER_FILE = "adapter.gguf"
# llama.cpp's name of an architecture, by that of transformers.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
SIZES = {  # name in the configuration of the backbone, by the one in GGUF metadata after the architecture's name
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def architecture_of(config: PreTrainedConfig) -> str:
    """llama.cpp's name for the architecture of a backbone.

    Raises:
        `ValueError`: the architecture is not supported here.
    """
    window = config.to_dict().get("sliding_window")
    if config.model_type not in ARCHITECTURES or window:
        with_window = f", with a sliding window of {window}" if window else ""
        raise ValueError(
            f"The base model is of type `{config.model_type}`{with_window}; with llama.cpp, expected one of "
            f"the types {', '.join(ARCHITECTURES)}, without a sliding window. Use PyTorch instead of llama.cpp."
        )
    return ARCHITECTURES[config.model_type]


def head_dim_of(config: PreTrainedConfig) -> int:
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


def export_gguf(checkpoint: str, output: str | Path) -> None:
    """Write an aligner (a folder or a Hub id) for llama.cpp: its checkpoint, and its slot LoRA as `adapter.gguf`. Each
    file of `output` is written atomically.
    """
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint)
    architecture_of(model.config.text_config)
    check_lora_positions(model.config, checkpoint)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    with write_folder_atomically(output) as folder:
        if model.config.lora_r:
            write_adapter(model, folder / ADAPTER_FILE)
        processor.save_pretrained(folder)
        model.save_pretrained(folder)


def check_lora_positions(config: ArcAlignerConfig, checkpoint: str | Path) -> None:
    """Raise `ValueError` for an aligner whose LoRA also applies to text."""
    if config.lora_positions != "slots":
        raise ValueError(
            f"{checkpoint} has `lora_positions` {config.lora_positions!r}; expected 'slots', because llama.cpp "
            "processes text without the LoRA. Use an aligner whose LoRA applies to slots only, or use PyTorch instead "
            "of llama.cpp."
        )


def write_adapter(model: ArcAlignerForCausalLM, path: Path) -> None:
    """Write the slot LoRA in llama.cpp's format for adapters, in float32."""
    config: ArcAlignerConfig = model.config
    architecture = architecture_of(config.text_config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, config.lora_alpha)
    names = {module: name for name, module in model.model.backbone.named_modules()}
    for layer in slot_lora_layers(model.model.backbone):
        name = gguf_name(f"model.{names[layer]}.weight", config.text_config)
        down, up = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        writer.add_tensor(f"{name}.lora_a", down.detach().float().numpy())
        writer.add_tensor(f"{name}.lora_b", translate(name, up, config.text_config))
    write(writer)


def gguf_name(name: str, config: PreTrainedConfig) -> str:
    """llama.cpp's name of a weight."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture_of(config)], config.num_hidden_layers)
    translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if translated is None:
        raise ValueError(
            f"The aligner has a LoRA on `{name}`, a weight that llama.cpp does not know. Train an aligner without this "
            "module in `lora_target_modules`."
        )
    return translated


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
    """Raise `ValueError` for a GGUF file of a base model or a tokenizer that is not the aligner's."""
    path = reader.data.filename
    architecture = architecture_of(config)
    expected = {"general.architecture": architecture}
    expected |= {f"{architecture}.{key}": config.to_dict()[name] for key, name in SIZES.items()}
    # SmolLM and SmolLM2 have the same sizes and tokens; they differ in the base frequency of RoPE.
    expected[f"{architecture}.rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    for key, value in expected.items():
        field = reader.get_field(key)
        if (in_file := field and field.contents()) != value:
            raise ValueError(
                f"{path} has the `{key}` {in_file!r}; expected {value!r}, as in the aligner's base model. Pass a GGUF "
                "file of the base model that the aligner was trained with."
            )
    field = reader.get_field("tokenizer.ggml.tokens")
    in_file, expected_tokens = field.contents() if field else [], tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    for number, token in enumerate(expected_tokens):
        other = in_file[number] if number < len(in_file) else None
        if token != other:
            raise ValueError(
                f"Token {number} of {path} is {other!r}; expected {token!r}, as in the aligner's tokenizer. Pass a "
                "GGUF file of the base model that the aligner was trained with."
            )
