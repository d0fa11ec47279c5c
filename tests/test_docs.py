"""What the documents say is so: README code and the notebook run, files and tests that are named exist."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
METHOD = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
NO_SOURCES = ("tests", "checkpoints", "runs", "data")  # nor what begins with a dot
SOURCES = [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("[a-z]*/**/*.py"))]
SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in NO_SOURCES]
WITH_EXAMPLES = [path.relative_to(ROOT).with_suffix("") for path in SOURCES if "    >>> " in path.read_text("utf-8")]
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.default_backbone
@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=range(len(PYTHON_BLOCKS)))
def test_readme_code_runs(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    exec(compile(block, "README.md", "exec"), names)  # noqa: S102
    assert len(names) > 1


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples_of_functions_are_so(path):
    module = importlib.import_module(".".join(("arcaligner", *path.parts)))
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(module):
        if inspect.isfunction(getattr(module, example.name.split(".")[-1], None)):  # those of classes load models
            runner.run(example)
    assert runner.failures == 0


def test_the_map_lists_the_flat_files_there_are():
    contributing = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\s*(\w+_arcaligner\.py)", contributing, flags=re.MULTILINE))
    assert listed == {path.name for path in ROOT.glob("*_arcaligner.py")}


def test_paths_and_links_of_the_documents_exist():
    paths = re.findall(r"(?:train|docs|benchmarks|checkpoints|tests|examples)/[\w./-]+\w", README)
    written = re.findall(r"--output (\S+)", README)  # by the reader's own commands
    missing = [path for path in paths if path not in written and not (ROOT / path).exists()]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").glob("*.md")):
        links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
        missing += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
    assert not missing


def test_the_readme_is_read_in_two_minutes_and_its_make_targets_exist():
    lines, makefile = README.splitlines(), (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(lines) <= 110 and max(map(len, lines)) <= 120
    targets = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert targets and all(f"\n{target}:" in makefile for target in targets)


def test_every_equation_has_a_test_that_exists():
    tests = (ROOT / "tests" / "test_algorithm.py").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", METHOD)
    assert [f"Eq. {n}" in METHOD for n in range(1, 11)] == [True] * 10
    assert len(named) == 11 and all(f"def {name}(" in tests for name in named)


# The notebook


def shown(notebook) -> list[list[str]]:
    """The number of each cell, what it printed, without times, and which pictures it drew."""
    found = []
    for cell in notebook.cells:
        outputs = [each.get("text") or " ".join(sorted(each["data"])) for each in cell.get("outputs", [])]
        outputs = [re.sub(r"\d+ ms", "ms", text).replace(" ", "") for text in outputs]
        found.append([str(cell.get("execution_count")), *outputs])
    return found


@pytest.mark.default_backbone
def test_the_notebook_prints_what_is_saved_in_it():
    saved, again = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    for cell in again.cells:
        cell.pop("outputs", None)
    kernel = {"kernel_name": "python3", "coalesce_streams": True, "timeout": 300}
    NotebookClient(again, **kernel, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert shown(again) == shown(saved)
    assert sum("image/png" in text for outputs in shown(again) for text in outputs) == 2
