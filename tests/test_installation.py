"""`pip install .` installs all files, and a command whose extra is missing says which one."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from arcaligner.apps.server.app import PAGE
from arcaligner.common import files
from arcaligner.evaluation import settings
from arcaligner.evaluation.lm_eval_tasks import __file__ as lm_eval_tasks
from arcaligner.share import hub
from arcaligner.train.stages import ACCELERATE_CONFIGS, RECIPES

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
OF_CLI = ("typer", "rich")  # spaCy and transformers install it too
# Packages that only extras install.
OF_EXTRAS = ("lancedb", "datasets", "trl", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "gguf")
FOLDERS = {"common", "share", "train", "evaluation", "benchmarks", "apps"}
OF_WHEEL = (*FOLDERS, "checkpoints/arcaligner-smollm2-135m", "tests/data")


def run(first_on_path: Path, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Python in a process that looks for modules in a folder first."""
    path = os.pathsep.join([str(first_on_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, **options)


# The wheel, built without a network and unpacked


def files_below(folder: Path) -> dict[str, bytes]:
    """Contents by path; links are followed."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_wheel_contains_the_package(installed):
    """A wheel contains the modules of the root and all of each folder of use."""
    for folder in OF_WHEEL:
        assert files_below(installed / folder) == files_below(ROOT / folder)
    assert {path.name for path in installed.glob("*.py")} == {path.name for path in ROOT.glob("*.py")}
    assert {path.name for path in installed.iterdir() if path.is_dir()} == {*FOLDERS, "checkpoints", "tests"}
    assert {path.name for path in (installed / "tests").iterdir()} == {"data"}


def test_wheel_contains_named_files(tmp_path, monkeypatch):
    """Every file that modules and recipes name is in the wheel and found from any folder."""
    monkeypatch.chdir(tmp_path)
    paths = [files.DEFAULT_CHECKPOINT, files.CASE_STUDIES, files.SQUAD_SAMPLE, hub.TEMPLATE, settings.RECIPES, PAGE]
    paths += [ACCELERATE_CONFIGS, RECIPES, lm_eval_tasks, settings.read_settings("smollm2_135m", {}, {}).checkpoint]
    recipes = [yaml.safe_load(path.read_text("utf-8")) for path in RECIPES.glob("*/*.yaml")]
    named = {recipe["chat_template_path"] for recipe in recipes if "chat_template_path" in recipe}
    of_samples = [recipe["train_files"] for recipe in recipes if recipe.get("data_dir") == "tests/data"]
    named |= {f"tests/data/{name}" for names in of_samples for name in names}
    assert len(named) >= 2
    for path in map(Path, (*paths, *map(files.find_path, named))):
        assert path.exists() and any(path.is_relative_to(files.ROOT / folder) for folder in OF_WHEEL), path
    sample = Path("tests/data/squad_dev_sample.jsonl")
    sample.parent.mkdir(parents=True)
    sample.touch()
    assert files.find_path(str(sample)) == sample  # a file in the working folder comes first


# Without extras


@pytest.fixture
def run_without(tmp_path):
    """Runs Python in processes in which importing some modules is an error."""

    def run_it(missing: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess:
        block = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
        (tmp_path / "sitecustomize.py").write_text(block)  # Python imports it first
        return run(tmp_path, *arguments)

    return run_it


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("cli", "arcaligner demo"),
        ("corpus", "arcaligner corpus build README.md --output unused.lance"),
        ("corpus", "arcaligner corpus info --corpus unused.lance"),
        ("corpus", "arcaligner ask --corpus unused.lance Why?"),
        ("server", "arcaligner serve"),
        ("train", "arcaligner train --recipe tiny"),
        ("train", "arcaligner.train.validate"),
        ("evaluation", "arcaligner evaluate --tasks squad"),
        ("evaluation", "arcaligner.evaluation.publish"),
        ("evaluation", "arcaligner.benchmarks.latency"),
        ("default-models", "arcaligner default-models"),
        ("llama-cpp", f"arcaligner export-gguf {ROOT} --output unused"),
    ],
)
def test_missing_extra_is_named(run_without, extra, arguments):
    """A command without its extra says in one line what to install."""
    ran = run_without(OF_CLI + OF_EXTRAS if extra == "cli" else OF_EXTRAS, "-m", *arguments.split())
    assert ran.returncode == 1 and ran.stdout == ""
    (error,) = [line for line in ran.stderr.splitlines() if not line.startswith("Loading")]
    assert error.startswith("Error: ") and f"pip install 'arcaligner[{extra}]'" in error and extra in EXTRAS


def test_checkpoint_answers_without_extras(run_without, checkpoint_dir):
    code = f"""
from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor
processor = ArcAlignerProcessor.from_pretrained({str(checkpoint_dir)!r})
model = ArcAlignerForCausalLM.from_pretrained({str(checkpoint_dir)!r})
ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
print(ask({{"question": "Who?", "documents": ["It was Ada."]}}, max_new_tokens=4, return_slots=True)[0]["statistics"])
"""
    # sentence-transformers imports `datasets` where it is installed, so importing it must be no error.
    ran = run_without(tuple(package for package in OF_EXTRAS if package != "datasets"), "-c", code)
    assert ran.returncode == 0 and "'slots': " in ran.stdout, ran.stderr[-2000:]
