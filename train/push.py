"""Uploads a checkpoint folder to the Hub as it stands: no model is loaded, no base model is needed.

A training folder holds more than a model: optimizer states, logs, earlier checkpoints. Only the files of a checkpoint
are uploaded, and only once the checkpoint is known to be complete.
"""

import shutil
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo
from transformers.utils import logging

from ..hub_arcaligner import PEFT_FOLDER, upload_checkpoint
from ..model_card_arcaligner import RECIPE_FILE, RESULTS_FILE, is_hub_id, write_model_card
from .checkpoint_folder import check_loads_from_hub, empty_model
from .peft_export import export_peft

logger = logging.get_logger(__name__)

_CHECKPOINT_FILES = (
    "*_arcaligner.py",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "processor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.jinja",
    RECIPE_FILE,
    RESULTS_FILE,
)


def push_checkpoint(repo_id: str, checkpoint: str | Path, *, private: bool = False, peft: bool = False) -> CommitInfo:
    """Uploads the checkpoint in a folder to `repo_id` on the Hub, in one commit.

    Args:
        repo_id (`str`): `user/name`; made when it is not there.
        checkpoint (`str` or `Path`): Folder of a complete checkpoint; files in it may be links.
        private (`bool`): Whether only its owner may see the repository.
        peft (`bool`): Whether to add the LoRA as a PEFT adapter, in the subfolder `peft_lora`.

    Raises:
        `ValueError`: a checkpoint that nobody could load from the Hub, or a name that is none; nothing is uploaded.
        `PermissionError`, `ConnectionError`: as for [`upload_checkpoint`].
    """
    folder = Path(checkpoint)
    config = empty_model(folder).config
    check_loads_from_hub(folder)
    if config.base_model_name_or_path is not None and not is_hub_id(config.base_model_name_or_path):
        logger.warning(
            f"The base model of {folder} is {config.base_model_name_or_path}, not a model on the Hub: whoever loads "
            "the aligner from there needs it at the same place."
        )
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary)
        for pattern in _CHECKPOINT_FILES:
            for path in folder.glob(pattern):
                (staged / path.name).symlink_to(path.resolve())
        if (folder / "README.md").exists():
            shutil.copyfile(folder / "README.md", staged / "README.md")
        write_model_card(config, staged)
        if peft:
            export_peft(folder, staged / PEFT_FOLDER)
        return upload_checkpoint(staged, repo_id, private=private or None)
