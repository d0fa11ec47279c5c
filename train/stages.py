"""All stages of a recipe, one after another, each from the end of the one before.

    python -m arcaligner train --recipe smollm2_135m
    python -m arcaligner train --recipe smollm2_135m --stage 2
    python -m arcaligner train --recipe smollm2_135m --output runs/rank64 -- --learning_rate 3e-4
    python -m arcaligner train --recipe mistral_7b --accelerate ddp

A recipe is a folder of `train/recipes`, or any folder, with a file for each stage: `1_reconstruction.yaml`,
`2_grounding.yaml`, `3_gating.yaml`. A finished stage is skipped, a broken one goes on from its last checkpoint, and
one that was trained with other settings is never built upon. Each stage is a process of its own.
"""

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
ACCELERATE_CONFIGS = Path(__file__).parent / "accelerate"


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
    def settings(self) -> str:
        """What `train.sft` writes into `recipe.yaml` when it is called so."""
        return stage_settings(self.arguments)


def stage_settings(arguments: list[str]) -> str:
    """The text kept with a stage's result: the command line, then the recipe file it names."""
    text = f"# arcaligner.train.sft {' '.join(arguments)}\n"
    if "--config" in arguments:
        text += Path(arguments[arguments.index("--config") + 1]).read_text(encoding="utf-8")
    return text


def find_recipe(recipe: str) -> Path:
    """The folder of a recipe, by its name or path.

    Raises:
        `ValueError`: no such recipe; the message names those there are.
    """
    for folder in (RECIPES / recipe, Path(recipe)):
        if sorted(folder.glob("[1-3]_*.yaml")):
            return folder
    known = sorted(path.parent.name for path in RECIPES.glob("*/1_*.yaml"))
    raise ValueError(
        f"There is no recipe {recipe!r}: neither one of {', '.join(known)} nor a folder with files like "
        "1_reconstruction.yaml. Copy the folder of a recipe and name the copy."
    )


def read_stages(folder: Path, output: str | None = None, overrides: list[str] | None = None) -> list[Stage]:
    """The stages of a recipe in order.

    Args:
        folder (`Path`): Of the recipe.
        output (`str`, *optional*): Folder for the stages' results in place of the one in the recipe; later stages
            start from what is there.
        overrides (`list[str]`, *optional*): Keys and values for every stage, such as `["--seed", "2"]`.
    """
    stages = []
    for path in sorted(folder.glob("[1-3]_*.yaml")):
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
        arguments = ["--config", _shown(path)]
        output_dir = Path(keys["output_dir"])
        if output is not None:
            output_dir = Path(output) / path.stem
            arguments += ["--output_dir", str(output_dir)]
            if stages:
                arguments += ["--model_name_or_path", str(stages[-1].output_dir)]
        number = int(path.name[0])
        stages.append(Stage(number, path.stem, arguments + (overrides or []), output_dir))
    return stages


def run_stages(stages: list[Stage], only: int | None = None, accelerate: str | None = None) -> None:
    """Runs what is not finished.

    Args:
        stages (`list[Stage]`): From `read_stages`.
        only (`int`, *optional*): Number of the one stage to run.
        accelerate (`str`, *optional*): A config of `train/accelerate` by name, or a file, for `accelerate launch`.

    Raises:
        `ValueError`: no such stage, an unknown accelerate config, or a finished stage that was trained with other
            settings.
        `subprocess.CalledProcessError`: a stage failed.
    """
    if only is not None and only not in [stage.number for stage in stages]:
        raise ValueError(f"The recipe has no stage {only}; it has {', '.join(str(s.number) for s in stages)}.")
    launcher = _launcher(accelerate)
    for stage in stages:
        if only is not None and stage.number != only:
            continue
        if stage.is_finished:
            _check_settings(stage)
            logger.info("%s is finished: %s", stage.name, stage.output_dir)
            continue
        logger.info("%s -> %s", stage.name, stage.output_dir)
        subprocess.run([*launcher, "-m", "arcaligner.train.sft", *stage.arguments], check=True)


def _launcher(accelerate: str | None) -> list[str]:
    if accelerate is None:
        return [sys.executable]
    known = {path.stem: path for path in sorted(ACCELERATE_CONFIGS.glob("*.yaml"))}
    path = known.get(accelerate, Path(accelerate))
    if not path.is_file():
        raise ValueError(f"There is no accelerate config {accelerate!r}; name {', '.join(known)} or a file.")
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]


def _check_settings(stage: Stage) -> None:
    path = stage.output_dir / "recipe.yaml"
    saved = path.read_text(encoding="utf-8")
    if saved == stage.settings:
        return
    was, now = saved.splitlines(), stage.settings.splitlines()
    changed = [line.strip() for line in now if line not in was] or [line.strip() for line in was if line not in now]
    raise ValueError(
        f"{stage.output_dir} was finished with other settings than {stage.name} has now, first {changed[0]!r}. "
        "Delete the folder to train it again, or name another one with `--output`."
    )


def _shown(path: Path) -> str:
    """The path as people write it: relative to the working directory where it lies below."""
    path, here = path.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
