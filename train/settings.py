"""What a run is trained with: the keys of its recipe with those of the command line over them.

They are kept beside the result, in `recipe.yaml`: the command as a comment, then the recipe file as it is or, where the
command line sets keys, all keys in one. Of files of earlier versions, which have the command line's keys in the comment
only, the same keys are read.
"""

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from ..model_card import RECIPE_FILE

logger = logging.getLogger(__name__)

# What may be other when a run goes on or is found finished: how it is watched, where and with how many workers it runs.
# The start is compared by its place beside the result, so that the folders of all stages may move together.
FREE_KEYS = {
    *("disable_tqdm", "eval_steps", "eval_strategy", "logging_steps", "report_to", "run_name"),
    *("eval_answers", "eval_files", "eval_slot_gap", "max_eval_samples", "per_device_eval_batch_size"),
    *("save_steps", "save_total_limit"),
    *("dataloader_num_workers", "dataset_num_proc", "examples_cache_dir", "output_dir", "use_cpu"),
}


def run_settings(script: str, arguments: list[str]) -> str:
    """The text of `recipe.yaml` for a run of `script`, such as `"arcaligner.train.sft"`, with `arguments`."""
    recipe = ""
    if "--config" in arguments:
        recipe = Path(arguments[arguments.index("--config") + 1]).read_text(encoding="utf-8")
    given = _command_keys(arguments)
    if given:
        recipe = yaml.safe_dump((yaml.safe_load(recipe) or {}) | given, sort_keys=False, allow_unicode=True)
    command = shlex.join(arguments).replace("\n", " ")  # a comment is one line
    return f"# {script} {command}\n{recipe.rstrip()}\n"


def read_keys(settings: str) -> dict[str, Any]:
    """Keys and values of a text of [`run_settings`]."""
    keys = {key: _as_number(value) for key, value in (yaml.safe_load(settings) or {}).items()}
    command = settings.partition("\n")[0]
    return keys | _command_keys(shlex.split(command)[2:])  # behind "# arcaligner.train.sft"


def has_begun(folder: Path) -> bool:
    """Whether a run has left anything in its folder that it would go on from: a checkpoint, or its result."""
    return any(folder.glob("checkpoint-*")) or any(folder.glob("*config.json"))  # PEFT's is adapter_config.json


def check_settings(folder: Path, settings: str) -> None:
    """Refuses a run that has begun with other settings than `settings`; comments and `FREE_KEYS` do not count.

    Raises:
        `ValueError`: the keys with both values, and what to do.
    """
    if not has_begun(folder):
        return
    if not (folder / RECIPE_FILE).exists():
        logger.warning("%s has no %s: it may have been begun with other settings than now", folder, RECIPE_FILE)
        return
    was, now = read_keys((folder / RECIPE_FILE).read_text(encoding="utf-8")), read_keys(settings)
    changed = [key for key in {**was, **now} if key not in FREE_KEYS and was.get(key) != now.get(key)]
    if "model_name_or_path" in changed and _place_of_start(was) == _place_of_start(now):
        changed.remove("model_name_or_path")
    if changed:
        differences = ", ".join(f"`{key}` was {was.get(key)!r} and is now {now.get(key)!r}" for key in changed)
        raise ValueError(
            f"{folder} was begun with other settings: {differences}. Delete that folder to train it anew, or name "
            "another one with `--output` of `arcaligner train` or `output_dir` of the recipe."
        )


def _command_keys(arguments: list[str]) -> dict[str, Any]:
    """Keys and values that a command line sets, besides the recipe file's name."""
    given: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            name, has_value, value = argument.removeprefix("--").partition("=")
            values = given[name.replace("-", "_")] = [value] if has_value else []
        elif given:
            values.append(argument)
    keys: dict[str, Any] = {}
    for name, values in given.items():
        if values:
            loaded = [_value(value) for value in values]
            keys[name] = loaded[0] if len(loaded) == 1 else loaded
        else:  # a flag, or its opposite
            keys[name.removeprefix("no_")] = not name.startswith("no_")
    keys.pop("config", None)
    return keys


def _value(text: str) -> Any:
    try:
        return _as_number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _as_number(value: Any) -> Any:
    """YAML takes numbers like 1e-4, without a point, for text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _place_of_start(keys: dict[str, Any]) -> str:
    """Where the model that a run starts from lies, seen from its result."""
    return os.path.relpath(str(keys.get("model_name_or_path")), str(keys.get("output_dir")))
