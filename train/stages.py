"""All stages of a recipe, one after another, each from the end of the one before.

    python -m arcaligner train --recipe smollm2_135m
    python -m arcaligner train --recipe smollm2_135m --stage 2
    python -m arcaligner train --recipe smollm2_135m --output runs/rank64 -- --learning_rate 3e-4
    python -m arcaligner train --recipe mistral_7b --accelerate ddp

A recipe is a folder of `train/recipes`, or any folder, with a file for each stage: `1_reconstruction.yaml`,
`2_grounding.yaml`, `3_gating.yaml`. A finished stage is skipped, a broken one goes on from its last checkpoint, and
one that was trained with other settings is refused. Each stage is a process of its own.
"""

import logging
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
ACCELERATE_CONFIGS = Path(__file__).parent / "accelerate"
STAGE_FILES = "[1-3]_*.yaml"


@dataclass
class Stage:
    """One file of a recipe: what `train.sft` is called with, and where its result goes."""

    number: int
    name: str
    arguments: list[str]
    output_dir: Path

    @property
    def is_finished(self) -> bool:
        """Whether the stage has saved its model; `config.json` is written last."""
        return (self.output_dir / "config.json").exists()

    @property
    def recipe_file(self) -> Path:
        """Where `train.sft` keeps `stage_settings`."""
        return self.output_dir / "recipe.yaml"


def stage_settings(arguments: list[str]) -> str:
    """The text kept with a stage's result: the command line, then the recipe file it names."""
    text = f"# arcaligner.train.sft {shlex.join(arguments)}\n"
    if "--config" in arguments:
        text += Path(arguments[arguments.index("--config") + 1]).read_text(encoding="utf-8")
    return text


def find_recipe(recipe: str) -> Path:
    """The folder of a recipe, by its name or path.

    Raises:
        `ValueError`: no such recipe; the message names those there are.
    """
    for folder in (RECIPES / recipe, Path(recipe)):
        if any(folder.glob(STAGE_FILES)):
            return folder
    known = sorted(path.parent.name for path in RECIPES.glob("*/1_*.yaml"))
    raise ValueError(
        f"There is no recipe {recipe!r}: neither one of {', '.join(known)} nor a folder with files like "
        "1_reconstruction.yaml. Copy the folder of a recipe and name the copy."
    )


def read_stages(
    folder: Path, output: str | None = None, overrides: list[str] | None = None, only: int | None = None
) -> list[Stage]:
    """The stages of a recipe in order.

    Args:
        folder (`Path`): Of the recipe.
        output (`str`, *optional*): Folder for the stages' results in place of the one in the recipe; later stages
            start from what is there.
        overrides (`list[str]`, *optional*): Keys and values for every stage, such as `["--seed", "2"]`.
        only (`int`, *optional*): Number of the one stage that is wanted.

    Raises:
        `ValueError`: no such stage, a recipe that is no YAML or says no `output_dir`, a key that all stages cannot
            share.
    """
    overrides = overrides or []
    _check_overrides(overrides, only)
    stages: list[Stage] = []
    for path in sorted(folder.glob(STAGE_FILES)):
        output_dir = Path(_output_dir(path))
        arguments = ["--config", _shown(path)]
        if output is not None:
            output_dir = Path(output) / path.stem
            arguments += ["--output_dir", str(output_dir)]
            if stages:
                arguments += ["--model_name_or_path", str(stages[-1].output_dir)]
        stages.append(Stage(int(path.name[0]), path.stem, arguments + overrides, output_dir))
    numbers = [stage.number for stage in stages]
    if only is not None and only not in numbers:
        raise ValueError(f"{folder} has no stage {only}; it has {', '.join(map(str, numbers))}.")
    return [stage for stage in stages if only in (None, stage.number)]


def run_stages(stages: list[Stage], accelerate: str | None = None) -> None:
    """Runs what is not finished, after a look at what is.

    Args:
        stages (`list[Stage]`): From `read_stages`.
        accelerate (`str`, *optional*): A config of `train/accelerate` by name, or a file, for `accelerate launch`.

    Raises:
        `ValueError`: an unknown accelerate config, a finished stage with other settings than it has now, or one
            whose start is not the stage before as it is now.
        `ChildProcessError`: a stage failed; what it said stands on standard error.
    """
    launcher = _launcher(accelerate)
    for before, stage in zip([None, *stages], stages, strict=False):
        if stage.is_finished:
            _check_settings(stage)
            _check_start(stage, before)
    for stage in stages:
        if stage.is_finished:
            logger.info("%s is finished: %s", stage.name, stage.output_dir)
            continue
        logger.info("%s -> %s", stage.name, stage.output_dir)
        code = subprocess.run([*launcher, "-m", "arcaligner.train.sft", *stage.arguments]).returncode
        if code != 0:
            end = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            raise ChildProcessError(
                f"{stage.name} {end}; what it said stands above. The same command goes on from its last checkpoint."
            )


def _check_overrides(overrides: list[str], only: int | None) -> None:
    """Refuses keys that would send all stages to one folder, or start them all from one model."""
    keys = {argument.split("=")[0] for argument in overrides}
    for key, remedy in {
        "--config": "Copy the recipe's folder and name the copy with `--recipe`",
        "--output_dir": "Name a folder for all stages with `--output`",
        "--model_name_or_path": "Each stage starts from the one before; for another start name one stage, `--stage`",
    }.items():
        if key in keys and not (key == "--model_name_or_path" and only is not None):
            raise ValueError(f"`{key}` cannot be given for the stages of a recipe. {remedy}.")


def _output_dir(path: Path) -> str:
    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(keys, dict) or "output_dir" not in keys:
        raise ValueError(f"{path} has no `output_dir`; a stage needs a folder for its result.")
    return keys["output_dir"]


def _launcher(accelerate: str | None) -> list[str]:
    if accelerate is None:
        return [sys.executable]
    known = {path.stem: path for path in sorted(ACCELERATE_CONFIGS.glob("*.yaml"))}
    path = known.get(accelerate, Path(accelerate))
    if not path.is_file():
        raise ValueError(f"There is no accelerate config {accelerate!r}; name {', '.join(known)} or a file.")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    if accelerate in known and torch.accelerator.device_count():  # ours name the paper's number of GPUs
        command += ["--num_processes", str(torch.accelerator.device_count())]
    return command


def _check_settings(stage: Stage) -> None:
    """Refuses a finished stage whose keys had other values; comments may differ, and the folder may have moved."""
    if not stage.recipe_file.exists():
        raise ValueError(
            f"{stage.output_dir} holds a model without recipe.yaml, which says how it was trained. Name another folder "
            "with `--output`."
        )
    was = _keys(stage.recipe_file.read_text(encoding="utf-8"))
    now = _keys(stage_settings(stage.arguments))
    changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise ValueError(
            f"{stage.output_dir} was finished with `{key}` {was.get(key)!r}, but {stage.name} now has "
            f"{now.get(key)!r}. Delete that folder to train it again, or name another one with `--output`."
        )


def _check_start(stage: Stage, before: Stage | None) -> None:
    """Refuses a finished stage when the one before it is not there; warns when that one is newer."""
    if before is None:
        return
    if not before.is_finished:
        raise ValueError(
            f"{stage.output_dir} is finished, but {before.name}, from which it starts, is not. Delete that folder to "
            "train it again, too, or run one stage only with `--stage`."
        )
    if before.recipe_file.stat().st_mtime > stage.recipe_file.stat().st_mtime:  # or the folders were copied
        logger.warning(
            "%s is older than %s, from which it starts: delete it if you trained %s again",
            stage.output_dir,
            before.output_dir,
            before.name,
        )


def _keys(settings: str) -> dict[str, Any]:
    """Keys and values of a text of `stage_settings`, the command line over the file."""
    command, _, recipe = settings.partition("\n")
    keys = yaml.safe_load(recipe) or {}
    key = None
    for argument in shlex.split(command)[2:]:  # behind "# arcaligner.train.sft"
        if argument.startswith("--"):
            key, has_value, value = argument.removeprefix("--").partition("=")
            keys[key] = yaml.safe_load(value) if has_value else True
        elif key is not None:
            keys[key] = yaml.safe_load(argument)
    return {key: value for key, value in keys.items() if key not in ("config", "output_dir")}


def _shown(path: Path) -> str:
    """The path as people write it: relative to the working directory where it lies below."""
    path, here = path.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
