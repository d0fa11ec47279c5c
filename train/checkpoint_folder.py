"""A checkpoint folder on this machine, looked at without its base model: complete, or refused."""

import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError

from ..checkpoint_arcaligner import check_aligner_weights, tensor_shapes
from ..configuration_arcaligner import ArcAlignerConfig
from ..modeling_arcaligner import ArcAlignerForCausalLM


def weight_files(folder: Path) -> list[Path]:
    """The files of the aligner's weights in `folder`."""
    return sorted(folder.glob("model*.safetensors"))


def weights_digest(files: list[Path]) -> str:
    """Tells the weights in `files` from others."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def empty_model(folder: Path) -> ArcAlignerForCausalLM:
    """The model of the checkpoint in `folder` without memory for weights, all of whose aligner weights are there.

    Raises:
        `ValueError`: no folder of an aligner, or weights that are missing, broken or of another shape.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(
            f"There is no checkpoint in {folder}: no config.json. Name a folder that a training stage or "
            "`save_pretrained` wrote; an interrupted one has to be written again."
        )
    model_type = json.loads(config_file.read_text(encoding="utf-8")).get("model_type")
    if model_type != ArcAlignerConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}; expected 'arcaligner', that is a folder that an "
            "ArcAligner model was saved to."
        )
    with torch.device("meta"):
        model = ArcAlignerForCausalLM(ArcAlignerConfig.from_pretrained(folder))
    try:
        shapes = tensor_shapes([str(path) for path in weight_files(folder)])
    except SafetensorError as error:
        raise ValueError(f"The weights in {folder} cannot be read ({error}). Save the checkpoint again.") from error
    check_aligner_weights(model, shapes, str(folder), ignore_mismatched_sizes=False)
    return model


def check_loads_from_hub(folder: Path) -> None:
    """Refuses a checkpoint without its processor, or without all of the code that its configurations name."""
    missing = [name for name in ("processor_config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"The checkpoint in {folder} lacks its processor ({', '.join(missing)}). Write it there with "
            "`processor.save_pretrained`."
        )
    configs = [json.loads((folder / name).read_text("utf-8")) for name in ("config.json", "processor_config.json")]
    modules = {target.split(".")[0] for config in configs for target in config.get("auto_map", {}).values()}
    modules |= {task["impl"].split(".")[0] for task in configs[0].get("custom_pipelines", {}).values()}
    modules |= {path.stem for path in folder.glob("*_arcaligner.py")}
    for name in list(modules):
        if (folder / f"{name}.py").is_file():
            code = (folder / f"{name}.py").read_text(encoding="utf-8")
            modules |= set(re.findall(r"^ *from \.(\w+) import", code, flags=re.MULTILINE))
    lacking = sorted(f"{name}.py" for name in modules if not (folder / f"{name}.py").is_file())
    if lacking:
        raise ValueError(
            f"The checkpoint in {folder} lacks {', '.join(lacking)} of its code, without which nobody can load it. "
            "Write it again with `save_pretrained`."
        )
