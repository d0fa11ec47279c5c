"""Which checkpoint a broken run goes on from: the last one that was written to its end.

A full disk or a killed process leaves a checkpoint with files that are missing or cut. `trainer_state.json` is written
last, when the files of all processes are there, so a checkpoint without it is not whole; and a file that was cut later,
by a machine that lost its power, is seen by its own format.
"""

import json
import logging
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

# What `torch.save` writes is a zip file; its table of contents stands at the end.
ZIP_SUFFIXES = (".pt", ".pth", ".bin")


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The last whole checkpoint in `output_dir`, if there is one. Others are left where they are, and logged."""
    steps = {path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in Path(output_dir).glob("*")}
    checkpoints = {path: int(step) for path, step in steps.items() if step.isdigit() and path.is_dir()}
    for checkpoint in sorted(checkpoints, key=checkpoints.get, reverse=True):
        fault = find_fault(checkpoint)
        if fault is None:
            logger.info("going on from %s", checkpoint)
            return str(checkpoint)
        logger.warning("%s is not whole (%s): going on from the one before", checkpoint, fault)
    return None


def find_fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, or `None` for one that can be read to its end."""
    state = checkpoint / TRAINER_STATE_NAME
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {TRAINER_STATE_NAME}, which is written last"
    except ValueError:
        return f"{TRAINER_STATE_NAME} is cut"
    for path in sorted(checkpoint.rglob("*")):
        if path.suffix in ZIP_SUFFIXES and not zipfile.is_zipfile(path):
            return f"{path.relative_to(checkpoint)} is cut"
        if path.suffix == ".safetensors":
            try:
                safe_open(path, framework="pt")
            except SafetensorError:
                return f"{path.relative_to(checkpoint)} is cut"
    return None
