"""What `pip install .` leaves behind is whole: the wheel is built, without a network, and unpacked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("common", "share", "train", "corpus", "server", "engines", "evaluation", "benchmarks", "cli")
# What the code reads beside itself, as modules name it.
PATHS = """
import os
from pathlib import Path
from arcaligner.common import files
from arcaligner.share import hub
from arcaligner.evaluation import results, settings
from arcaligner.evaluation.lm_eval_tasks import __file__ as lm_eval_tasks
from arcaligner.server.app import PAGE
from arcaligner.train.stages import ACCELERATE_CONFIGS, RECIPES

named = [files.DEFAULT_CHECKPOINT, files.CASE_STUDIES, files.SQUAD_SAMPLE, hub.TEMPLATE, settings.RECIPES, PAGE,
         ACCELERATE_CONFIGS, RECIPES, Path(lm_eval_tasks)]
print(*(path.relative_to(os.environ["PYTHONPATH"]) for path in named), sep="\\n")
assert all(path.exists() for path in named)
"""


def files_below(folder: Path) -> dict[str, bytes]:
    """Contents by path; links are followed."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("folder", [*FOLDERS, "checkpoints/arcaligner-smollm2-135m", "tests/data"])
def test_a_wheel_holds_all_of_a_folder(installed, folder):
    of_tree = {path: content for path, content in files_below(ROOT / folder).items() if "__pycache__" not in path}
    assert files_below(installed / folder) == of_tree


def test_a_wheel_holds_the_modules_of_the_root_and_no_folder_without_a_use(installed):
    assert {path.name for path in installed.glob("*.py")} == {path.name for path in ROOT.glob("*.py")}
    assert {path.name for path in installed.iterdir() if path.is_dir()} == {*FOLDERS, "checkpoints", "tests"}
    assert {path.name for path in (installed / "tests").iterdir()} == {"data"}


def test_a_wheel_holds_every_file_that_modules_name(installed, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PATHS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed.parent)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert all(path.startswith("arcaligner/") for path in run.stdout.split())


def test_recipes_name_files_that_are_found_from_any_folder(installed, tmp_path):
    code = """
from pathlib import Path
from arcaligner.common.files import find_path
from arcaligner.evaluation.settings import read_settings
from arcaligner.train.stages import RECIPES
import yaml
recipes = [yaml.safe_load(path.read_text()) for path in RECIPES.glob("*/*.yaml")]
named = {recipe["chat_template_path"] for recipe in recipes if "chat_template_path" in recipe}
named |= {"tests/data/" + name for recipe in recipes if recipe.get("data_dir") == "tests/data"
          for name in recipe["train_files"]}
found = [find_path(name) for name in named]
found.append(Path(read_settings("smollm2_135m", {}, {}).checkpoint))
assert len(found) >= 3 and all(path.is_absolute() and path.exists() for path in found), found
Path("tests/data").mkdir(parents=True)
Path("tests/data/squad_dev_sample.jsonl").write_text("")
assert find_path("tests/data/squad_dev_sample.jsonl") == Path("tests/data/squad_dev_sample.jsonl")  # one's own first
"""
    env = os.environ | {"PYTHONPATH": str(installed.parent)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
