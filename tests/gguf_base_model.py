"""Writes a base model as a GGUF file for tests; `convert_hf_to_gguf.py` of llama.cpp writes complete files."""

from pathlib import Path

import gguf
from transformers import PreTrainedModel

from arcaligner.apps.engines.gguf_files import SIZES, architecture_of, gguf_name, head_dim_of, translate, write


def write_base_model(model: PreTrainedModel, tokens: list[str], path: Path) -> None:
    """Writes a base model in float32. The file names its `tokens`, but not how to make them from text, which the
    processor does."""
    config = model.config
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in SIZES.items():
        writer.add_uint32(f"{architecture}.{key}", config.to_dict()[field])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = head_dim_of(config)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_token_list(tokens)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            name = gguf_name(name, config)
            writer.add_tensor(name, translate(name, weight, config))
    write(writer)
