"""The folder of a run: its settings, its lock, the checkpoint to resume from, and its final files.

The settings are the keys of the recipe, overridden by those of the command line. They are saved in `recipe.yaml`: the
command as a comment, then the unchanged recipe file or, if the command line sets keys, all keys together.
"""

import contextlib
import json
import logging
import os
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from ..common.files import printable, write_atomically
from ..encoder_arcaligner import ENCODER_FOLDER
from ..loading_arcaligner import AlignerMixin
from ..processing_arcaligner import ArcAlignerProcessor
from ..share.hub import RECIPE_FILE

logger = logging.getLogger(__name__)

SCRIPT = "arcaligner.train.sft"  # the script that trains one stage
LOCK_FILE = ".lock"
# `torch.save` writes a zip file, whose table of contents is at the end.
ZIP_SUFFIXES = (".pt", ".pth", ".bin")
# Settings of logging, location and speed, which do not change the result.
MAY_CHANGE_ON_RESUME = {
    *("disable_tqdm", "eval_steps", "eval_strategy", "logging_steps", "report_to", "run_name"),
    *("eval_files", "eval_slot_gap", "max_eval_samples", "per_device_eval_batch_size"),
    *("save_steps", "save_total_limit"),
    *("dataloader_num_workers", "dataset_num_proc", "data_dir", "examples_cache_dir", "output_dir", "use_cpu"),
    *("attn_implementation", "compile_layers", "dtype"),
    "resume_from_checkpoint",  # the last checkpoint, or nothing: `check_resume` refuses others
    *("eval_answers", "no_answer", "test_files"),  # of recipes of earlier versions
}


# Settings


def run_settings(script: str, arguments: list[str]) -> str:
    """The text of `recipe.yaml` for a run of `script`, such as `"arcaligner.train.sft"`, with `arguments`."""
    recipe = ""
    if "--config" in arguments:
        recipe = Path(arguments[arguments.index("--config") + 1]).read_text(encoding="utf-8")
    command_keys = _command_keys(arguments)
    if command_keys:
        recipe = yaml.safe_dump((yaml.safe_load(recipe) or {}) | command_keys, sort_keys=False, allow_unicode=True)
    command = printable(shlex.join(arguments)).replace("\n", " ")  # a comment is one line
    return f"# {script} {command}\n{recipe.rstrip()}\n"


def read_keys(settings: str) -> dict[str, Any]:
    """Keys and values of a text of [`run_settings`]."""
    return {key: _as_number(value) for key, value in (yaml.safe_load(settings) or {}).items()}


def has_begun(folder: Path) -> bool:
    """Whether the folder contains a checkpoint or a result."""
    return any(folder.glob("checkpoint-*")) or any(folder.glob("*config.json"))  # PEFT's is adapter_config.json


def check_settings(folder: Path, settings: str) -> None:
    """Raises `ValueError` if the run was started with settings other than `settings`, except for
    `MAY_CHANGE_ON_RESUME`."""
    if not has_begun(folder):
        return
    if not (folder / RECIPE_FILE).exists():
        raise ValueError(
            f"{folder} contains a model or checkpoints, but no {RECIPE_FILE}, which says how they were trained. Choose "
            "another folder with `--output` of `arcaligner train` or `output_dir` of the recipe."
        )
    was, now = read_keys((folder / RECIPE_FILE).read_text(encoding="utf-8")), read_keys(settings)
    # The mean of the last checkpoints depends on when they were saved.
    decides = {"save_steps", "save_total_limit"} if was.get("average_checkpoints") else set()
    may_change = MAY_CHANGE_ON_RESUME - decides | (set() if was.get("unanswerable") else {"unanswerable"})
    starts = {os.path.relpath(str(keys.get("model_name_or_path")), str(keys.get("output_dir"))) for keys in (was, now)}
    may_change |= {"model_name_or_path"} if len(starts) == 1 else set()  # however its path is spelled
    changed = [key for key in {**was, **now} if key not in may_change and was.get(key) != now.get(key)]
    if changed:

        def shown(keys: dict[str, Any], key: str) -> str:
            return "not set" if keys.get(key) is None else repr(keys[key])

        differences = ", ".join(f"`{key}` was {shown(was, key)} and is now {shown(now, key)}" for key in changed)
        raise ValueError(
            f"The run in {folder} was started with different settings: {differences}. Restore these settings to "
            "continue the run. To train again, delete the folder, or choose another one with `--output` of `arcaligner "
            "train` or `output_dir` of the recipe."
        )


def check_resume(value: str | bool | None, output_dir: str | Path, is_stage: bool) -> None:
    """Raises `ValueError` if `resume_from_checkpoint` names anything else than the checkpoint that a run in
    `output_dir` continues from anyway. `true` and `false` are also accepted if there is none yet. Only a stage of an
    aligner (`is_stage`) can start from another checkpoint."""
    if value is None or str(value).lower() == "true":
        return
    last = next((path for path in _checkpoints(output_dir) if _find_fault(path) is None), None)
    if last is None and str(value).lower() in ("false", ""):
        return
    if last is None or Path(str(value)).resolve() != last.resolve():
        remedy = "set `model_name_or_path` to its folder, and choose" if is_stage else "choose"
        raise ValueError(
            f"`resume_from_checkpoint` is {value!r}, but a run always continues from the last complete checkpoint in "
            f"`output_dir` ({last or f'{output_dir} contains none yet'}). Leave `resume_from_checkpoint` out. To start "
            f"{'from another checkpoint' if is_stage else 'again from the base model'}, {remedy} a new `output_dir`."
        )


def _command_keys(arguments: list[str]) -> dict[str, Any]:
    """Keys and values that a command line sets, except the recipe file's name."""
    flags: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            name, has_value, value = argument.removeprefix("--").partition("=")
            values = flags[name.replace("-", "_")] = [value] if has_value else []
        elif flags:
            values.append(argument)
    keys: dict[str, Any] = {}
    for name, values in flags.items():
        if values:
            loaded = [_value(value) for value in values]
            keys[name] = loaded[0] if len(loaded) == 1 else loaded
        else:  # a flag such as --bf16 or --no_bf16
            keys[name.removeprefix("no_")] = not name.startswith("no_")
    keys.pop("config", None)
    return keys


def _value(text: str) -> Any:
    try:
        return _as_number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _as_number(value: Any) -> Any:
    """Convert a number such as 1e-4, which YAML reads as text because it has no point."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# The folder while it trains


class PreparationError(ValueError):
    """The folder, the start or the data of a run cannot be used."""


@contextlib.contextmanager
def preparation() -> Iterator[None]:
    """Context in which errors about the folder, the start or the data become a [`PreparationError`], which
    `recipe.run_script` reports in one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise PreparationError(str(error)) from error


@contextlib.contextmanager
def claim_folder(output_dir: str, settings: str, is_main: bool) -> Iterator[None]:
    """Lock a folder against other trainers, and write the `settings` of [`run_settings`] before anything else. Only the
    first process of a run, `is_main`, does so.
    """
    if not is_main:
        yield
        return
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / LOCK_FILE).acquire(timeout=0)  # the system releases it however the process ends
    except Timeout as error:
        raise PreparationError(
            f"Another process is training in {folder}. Wait until it ends, stop it, or choose another `output_dir`."
        ) from error
    with lock:
        with preparation():
            check_settings(folder, settings)
        for leftover in folder.glob(".saving-*"):  # left by a killed process
            shutil.rmtree(leftover)
        if not has_begun(folder):
            write_atomically(folder / RECIPE_FILE, settings)
        yield


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The last complete checkpoint in `output_dir`, or `None`. Incomplete ones are logged and not removed.

    A full disk or a killed process leaves a checkpoint with files that are missing or truncated. `trainer_state.json`
    is written last, when the weights of all processes are there. The state of a process's random generator may be
    missing: then the process draws other dropout, and `Trainer` warns.
    """
    for checkpoint in _checkpoints(output_dir):
        fault = _find_fault(checkpoint)
        if fault is None:
            logger.info("resuming from %s", checkpoint)
            return str(checkpoint)
        logger.warning("the checkpoint %s is incomplete (%s) and is skipped", checkpoint, fault)
    return None


def _checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders of the checkpoints in `output_dir`, the last one first."""
    steps = {path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in Path(output_dir).glob("*")}
    checkpoints = {path: int(step) for path, step in steps.items() if step.isdigit() and path.is_dir()}
    return sorted(checkpoints, key=checkpoints.get, reverse=True)


def _find_fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, or `None` if it is complete."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {TRAINER_STATE_NAME}, which is written last"
    except ValueError:
        return f"{TRAINER_STATE_NAME} is truncated"
    for path in sorted(checkpoint.rglob("*")):
        if path.suffix in ZIP_SUFFIXES and not zipfile.is_zipfile(path):
            return f"{path.relative_to(checkpoint)} is truncated"
        if path.suffix == ".safetensors":
            try:
                safe_open(path, framework="pt")
            except SafetensorError:
                return f"{path.relative_to(checkpoint)} is truncated"
    return None


# The result


def last_checkpoints(output_dir: str | Path, number: int) -> list[Path]:
    """The last `number` complete checkpoints of a run, or all if there are fewer, the last one first."""
    whole = (checkpoint for checkpoint in _checkpoints(output_dir) if _find_fault(checkpoint) is None)
    folders = [folder for folder in whole if (folder / SAFE_WEIGHTS_NAME).exists()][:number]
    if not folders:
        raise ValueError(
            f"No complete checkpoint in {output_dir} has a {SAFE_WEIGHTS_NAME}, so there are no weights to average. "
            "Save checkpoints with `save_steps`; with FSDP, also set `fsdp_state_dict_type` to FULL_STATE_DICT, as in "
            "train/accelerate/fsdp2.yaml."
        )
    return folders


def mean_of_checkpoints(folders: Sequence[Path], processor: ArcAlignerProcessor) -> dict[str, torch.Tensor]:
    """The mean of the aligner's weights in some checkpoints. If the encoder was trained jointly, `processor` gets the
    mean of its weights."""
    logger.info("the aligner gets the mean of the weights in %s", ", ".join(str(folder) for folder in folders))
    adapter = Path(ENCODER_FOLDER, SAFETENSORS_WEIGHTS_NAME)
    if (folders[0] / adapter).exists():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(folders[0] / ENCODER_FOLDER, Path(folder, ENCODER_FOLDER))
            save_file(_mean_weights(folders, adapter), Path(folder, adapter), metadata={"format": "pt"})
            processor.load_trained_encoder(folder)
            assert processor.encoder.model is not None  # load it now, before the folder can be removed
    return _mean_weights(folders, SAFE_WEIGHTS_NAME)


def _mean_weights(folders: Sequence[Path], name: str | Path) -> dict[str, torch.Tensor]:
    weights = [load_file(folder / name) for folder in folders]
    names = (key for key in weights[0] if not AlignerMixin.is_head_key(key))  # fitted to different weights
    return {key: torch.stack([tensors[key] for tensors in weights]).mean(dim=0) for key in names}
