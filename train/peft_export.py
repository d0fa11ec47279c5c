"""The aligner's LoRA as a standard PEFT adapter folder, for those who want to look at it with PEFT.

The folder stands beside a checkpoint or in a subfolder of it: transformers injects an adapter that it finds next to a
`config.json` into every model it loads from there, a second time and on all tokens.
"""

import os
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..lora_arcaligner import ADAPTER_NAME
from ..model_card_arcaligner import is_hub_id
from .checkpoint_folder import empty_model, weight_files

_PEFT_PREFIX = "base_model.model."
_FILES = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
_TITLE = "# LoRA of an ArcAligner, in PEFT's format"
_CARD = """{metadata}{title}

**Not the model.** This is one of three parts of an aligner, to look at: projector and gates are not in it, and plain
PEFT applies the LoRA to every token, where the aligner applies it to context slots only. With
`PeftModel.from_pretrained` the base model therefore answers plain text differently than it does without.

To answer questions from passages load the whole aligner, with
`AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`.
"""


def export_peft(checkpoint: str | Path, output: str | Path) -> None:
    """Writes the LoRA of `checkpoint` to `output`: adapter_config.json, adapter_model.safetensors and README.md.

    Args:
        checkpoint (`str` or `Path`): Folder of an aligner; its base model is not needed.
        output (`str` or `Path`): A new folder, an empty one or an earlier export, which is replaced.

    Raises:
        `ValueError`: an incomplete checkpoint, one without LoRA, or an `output` with other files in it.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    model = empty_model(checkpoint)
    if output.exists() and not _is_free(output):
        raise ValueError(
            f"{output} is not an empty folder and no earlier export. A PEFT adapter needs a folder of its own (beside "
            f"a config.json it would be loaded with that model): name a new one, for example {output / 'peft_lora'}."
        )
    if model.config.lora_r == 0:
        raise ValueError(f"The aligner in {checkpoint} has no LoRA to export: its `lora_r` is 0.")
    weights = _adapter_weights(model, checkpoint)
    config = _adapter_config(model, weights)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".exporting-") as temporary:
        folder = Path(temporary) / output.name
        folder.mkdir()
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        base = config.base_model_name_or_path
        metadata = f"---\nlibrary_name: peft\nbase_model: {base}\n---\n" if is_hub_id(base) else ""
        (folder / "README.md").write_text(_CARD.format(metadata=metadata, title=_TITLE), encoding="utf-8")
        config.save_pretrained(folder)
        if output.exists():
            os.replace(output, Path(temporary) / "former")
        os.replace(folder, output)


def _is_free(output: Path) -> bool:
    """Whether `output` is empty or holds an earlier export: PEFT's own adapters have files of the same names."""
    names = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
    return not names or (names == _FILES and _TITLE in (output / "README.md").read_text(encoding="utf-8"))


def _adapter_weights(model, checkpoint: Path) -> dict[str, torch.Tensor]:
    """LoRA matrices of `checkpoint`, in its dtype, under the names they have in a `PeftModel` of the base model."""
    prefix = f"{model.base_model_prefix}.backbone."
    weights = {}
    for file in weight_files(checkpoint):
        with safe_open(file, framework="pt") as tensors:
            weights |= {
                key.removeprefix(prefix): tensors.get_tensor(key) for key in tensors.keys() if key.startswith(prefix)
            }
    backbone = model.model.backbone
    weights = get_peft_model_state_dict(
        backbone, state_dict=weights, adapter_name=ADAPTER_NAME, save_embedding_layers=False
    )
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config.text_config)].base_model_prefix
    return {f"{_PEFT_PREFIX}{decoder}.{key}": tensor for key, tensor in weights.items()}


def _adapter_config(model, weights: dict[str, torch.Tensor]) -> LoraConfig:
    """The configuration the aligner's own LoRA was made from, for the same linears of the base model."""
    config = model.model.backbone.peft_config[ADAPTER_NAME]
    config.base_model_name_or_path = model.config.base_model_name_or_path
    config.revision = model.config.base_model_revision
    config.task_type = TaskType.CAUSAL_LM
    config.inference_mode = True
    config.target_modules = sorted({key.removeprefix(_PEFT_PREFIX).split(".lora_")[0] for key in weights})
    return config
