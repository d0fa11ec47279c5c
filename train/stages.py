"""Run all stages of a recipe, each from the result of the one before.

    python -m arcaligner train --recipe smollm2_135m
    python -m arcaligner train --recipe smollm2_135m --stage 2
    python -m arcaligner train --recipe smollm2_135m --output runs/rank64 -- --learning_rate 3e-4
    python -m arcaligner train --recipe smollm2_135m --device gpu
    python -m arcaligner train --recipe mistral_7b --dry-run
    python -m arcaligner train --recipe mistral_7b --accelerate ddp

A recipe is a folder of `train/recipes`, or any folder, with a file for each stage: `1_reconstruction.yaml`,
`2_grounding.yaml`, `3_gating.yaml`. A finished stage is skipped, an interrupted one continues from its last checkpoint,
and one that was started with different settings is an error. Each stage runs in a separate process, which ends if this
process ends.
"""

import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ..common.files import refuse_unknown
from .run import SCRIPT, check_settings, read_keys, run_settings

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
ACCELERATE_CONFIGS = Path(__file__).parent / "accelerate"
STAGE_FILES = "[1-3]_*.yaml"
# Keys that would write all stages to one folder, or start all of them from one model, and what to do instead.
_OF_ALL_STAGES = {
    "--config": "Copy the recipe's folder, change the copy, and pass it as `--recipe`",
    "--output_dir": "Pass a folder for all stages as `--output`",
    "--model_name_or_path": "Each stage starts from the result of the one before; to start a stage from another model, "
    "run only that stage, with `--stage NUMBER`",
}


@dataclass
class Stage:
    """One file of a recipe: the arguments of `train.sft`, the folder of its result, and the stage it starts from."""

    number: int
    name: str
    arguments: list[str]
    output_dir: Path
    start: "Stage | None" = None

    @property
    def is_finished(self) -> bool:
        """Whether the stage has saved its model; `config.json` is written last."""
        return (self.output_dir / "config.json").exists()


def find_recipe(recipe: str) -> Path:
    """The folder of a recipe, by its name or path."""
    for folder in (RECIPES / recipe, Path(recipe)):
        if any(folder.glob(STAGE_FILES)):
            return folder
    known = sorted(path.parent.name for path in RECIPES.glob("*/1_*.yaml"))
    raise ValueError(
        f"There is no recipe {recipe!r}; expected one of {', '.join(known)}, or a folder with files like "
        "1_reconstruction.yaml. To make a new recipe, copy the folder of one of these and change the copy."
    )


def read_stages(
    folder: Path,
    output: str | None = None,
    overrides: list[str] | None = None,
    only: int | None = None,
    device: str | None = None,
) -> list[Stage]:
    """The stages of a recipe in order.

    Args:
        folder (`Path`): The recipe's folder.
        output (`str`, *optional*): Folder for the stages' results in place of the one in the recipe; later stages start
            from these results.
        overrides (`list[str]`, *optional*): Keys and values for every stage, such as `["--seed", "2"]`.
        only (`int`, *optional*): Number of the only stage to read.
        device (`str`, *optional*): `"gpu"` to override the keys of the stages with those of the recipe's `gpu.yaml`.
    """
    overrides = overrides or []
    overridden = {argument.split("=")[0] for argument in overrides}
    for key, remedy in _OF_ALL_STAGES.items():
        if key in overridden and not (key == "--model_name_or_path" and only is not None):
            raise ValueError(f"`{key}` cannot be given for the stages of a recipe. {remedy}.")
    of_device = _read_device_keys(folder, device)
    stages: list[Stage] = []
    for path in sorted(folder.glob(STAGE_FILES)):
        arguments = ["--config", os.path.relpath(path)]
        if output is not None:
            arguments += ["--output_dir", str(Path(output, path.stem))]
            if stages:
                arguments += ["--model_name_or_path", str(stages[-1].output_dir)]
        for key, value in (of_device.get("every_stage", {}) | of_device.get(path.stem, {})).items():
            if f"--{key}" not in overridden:
                arguments += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
        arguments += overrides
        try:
            keys = read_keys(run_settings(SCRIPT, arguments))
        except (yaml.YAMLError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{path} is not YAML that consists of keys and values: {error}. Correct the file."
            ) from error
        if "output_dir" not in keys:
            raise ValueError(
                f"{path} has no `output_dir`; expected a folder for the result of the stage. Add `output_dir`."
            )
        named = Path(str(keys.get("model_name_or_path")))
        start = next((stage for stage in stages if stage.output_dir == named), None)
        stages.append(Stage(int(path.name[0]), path.stem, arguments, Path(keys["output_dir"]), start))
    numbers = [stage.number for stage in stages]
    if only is not None and only not in numbers:
        raise ValueError(
            f"{folder} has no stage {only}; expected one of {', '.join(map(str, numbers))}. Pass one of these as "
            "`--stage`."
        )
    return [stage for stage in stages if only in (None, stage.number)]


def _read_device_keys(folder: Path, device: str | None) -> dict[str, dict[str, Any]]:
    """The keys that a recipe sets for a device, in `every_stage` and for single stages."""
    if device is None:
        return {}
    path = folder / f"{device}.yaml"
    if not path.is_file():
        raise ValueError(
            f"The recipe {folder.name} has no {path.name}, so it has no values for `--device {device}`. Leave "
            "`--device` out; training uses a GPU if there is one. If the recipe has `use_cpu: true`, append `-- "
            "--use_cpu false` to the command."
        )
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    refuse_unknown(str(path), keys, ["every_stage", *(path.stem for path in folder.glob(STAGE_FILES))])
    return keys


def run_stages(stages: list[Stage], accelerate: str | None = None) -> None:
    """Check finished stages, and run the others.

    Args:
        stages (`list[Stage]`): From `read_stages`.
        accelerate (`str`, *optional*): A config of `train/accelerate` by name, or a file, for `accelerate launch`.
    """
    launcher = _launcher(accelerate)
    for before, stage in zip([None, *stages], stages, strict=False):
        check_settings(stage.output_dir, run_settings(SCRIPT, stage.arguments))
        if stage.is_finished and before is not None and not before.is_finished:
            raise ValueError(
                f"Stage {stage.name} in {stage.output_dir} is finished, but {before.name}, the stage before it, is "
                f"not. Delete {stage.output_dir} to train both stages, or train only one stage with `--stage`."
            )
        if not stage.is_finished and stage.start not in (None, *stages) and not stage.start.is_finished:
            raise ValueError(
                f"{stage.name} starts from the result of {stage.start.name} in {stage.start.output_dir}, but "
                f"{stage.start.name} is not finished. Train {stage.start.name} first with `--stage "
                f"{stage.start.number}`, or all stages without `--stage`."
            )
    for stage in stages:
        if stage.is_finished:
            message = "skipped %s, which is finished; to train it again, delete %s and the folders of later stages"
            logger.info(message, stage.name, stage.output_dir)
            continue
        logger.info("training %s; its folder is %s", stage.name, stage.output_dir)
        code = run_to_end([*launcher, "-m", SCRIPT, *stage.arguments])
        if code != 0:
            end = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            raise ChildProcessError(
                f"{stage.name} {end}; the reason is above, if it was printed. Run the same command again to continue "
                "from the last checkpoint of this stage, if there is one."
            )


def run_to_end(command: list[str]) -> int:
    """Run a command, and return its exit code. If this process is stopped, the command is stopped as well."""
    process = subprocess.Popen(command)
    former = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, former)
        process.terminate()  # after an interrupt; no effect if it has ended
        process.wait()


def _launcher(accelerate: str | None) -> list[str]:
    if accelerate is None:
        return [sys.executable]
    known = {path.stem: path for path in sorted(ACCELERATE_CONFIGS.glob("*.yaml"))}
    path = known.get(accelerate, Path(accelerate))
    if not path.is_file():
        raise ValueError(
            f"There is no configuration {accelerate!r} of accelerate; expected one of {', '.join(known)}, or the path "
            "of a configuration file. Correct `--accelerate`."
        )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    if accelerate in known and torch.accelerator.device_count():  # these configs contain the paper's number of GPUs
        command += ["--num_processes", str(torch.accelerator.device_count())]
    return command
