"""Only what a checkpoint needs is installed: it answers, and each command says which extra it lacks."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
OF_CLI = ("typer", "rich")  # which spaCy and transformers bring too
# What only extras bring.
OF_EXTRAS = ("lancedb", "datasets", "trl", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "gguf")


@pytest.fixture
def run_without(tmp_path, monkeypatch):
    """Runs Python in processes in which importing some modules is an error."""

    def run(missing: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess:
        block = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
        (tmp_path / "sitecustomize.py").write_text(block)  # Python imports it first
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return run


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("corpus", "arcaligner corpus build README.md --output unused.lance"),
        ("corpus", "arcaligner corpus info --corpus unused.lance"),
        ("corpus", "arcaligner ask --corpus unused.lance Why?"),
        ("server", "arcaligner serve"),
        ("train", "arcaligner train --recipe tiny"),
        ("train", "arcaligner.train.validate"),
        ("evaluation", "arcaligner evaluate --tasks squad"),
        ("evaluation", "arcaligner.evaluation.publish"),
        ("evaluation", "arcaligner.benchmarks.latency"),
        ("llama-cpp", f"arcaligner export-gguf {ROOT} --output unused"),
    ],
)
def test_a_command_without_its_extra_says_in_one_line_what_to_install(run_without, extra, arguments):
    run = run_without(OF_EXTRAS, "-m", *arguments.split())
    assert run.returncode == 1 and run.stdout == ""
    errors = [line for line in run.stderr.splitlines() if not line.startswith("Loading")]
    assert len(errors) == 1 and errors[0].startswith("Error: ")
    assert f"pip install 'arcaligner[{extra}]'" in errors[0] and extra in EXTRAS


def test_the_command_line_itself_is_an_extra(run_without):
    run = run_without((*OF_CLI, *OF_EXTRAS), "-m", "arcaligner", "demo")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "Error: typer, rich not found. Install what is needed here: pip install 'arcaligner[cli]'\n"


def test_a_checkpoint_answers_without_any_extra(run_without, checkpoint_dir):
    code = f"""
from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor
processor = ArcAlignerProcessor.from_pretrained({str(checkpoint_dir)!r})
model = ArcAlignerForCausalLM.from_pretrained({str(checkpoint_dir)!r})
ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
print(ask({{"question": "Who?", "documents": ["It was Ada."]}}, max_new_tokens=4, return_slots=True)[0]["statistics"])
"""
    # sentence-transformers imports `datasets` where it is installed, so importing it must be no error.
    run = run_without(tuple(each for each in OF_EXTRAS if each != "datasets"), "-c", code)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "'slots': " in run.stdout
