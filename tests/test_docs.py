"""Documents are correct: the README's code and the notebook run, and the files and tests that they name exist."""

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
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("dev/*.md"))]
PAGES += sorted(ROOT.glob(".github/*.md"))
NO_SOURCES = ("tests", "checkpoints", "runs", "data")  # nor names that begin with a dot
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
def test_docstring_examples_are_correct(path):
    module = importlib.import_module(".".join(("arcaligner", *path.parts)))
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(module):
        if inspect.isfunction(getattr(module, example.name.split(".")[-1], None)):  # tests in classes load models
            runner.run(example)
    assert runner.failures == 0


def test_map_lists_flat_files():
    contributing = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\s*(\w+_arcaligner\.py)", contributing, flags=re.MULTILINE))
    assert listed == {path.name for path in ROOT.glob("*_arcaligner.py")}


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return not target.exists() or bool(anchor) and anchor not in anchors_of(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    """Each relative link of a page leads to a file of the repository, and its anchor to a heading of that file."""
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if is_broken(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_tables_have_lines_of_their_own(page):
    """A table whose rows were joined to a paragraph is no longer a table."""
    lines = page.read_text(encoding="utf-8").splitlines()
    separators = [line for line in lines if re.search(r"\|\s*:?-{3,}:?\s*\|", line)]
    assert [line for line in separators if line.strip("|-: ")] == []


def test_readme_names_existing_paths():
    """Paths in the README exist, except for those that its commands write."""
    paths = re.findall(r"(?:train|docs|benchmarks|checkpoints|tests|examples)/[\w./-]+\w", README)
    written = re.findall(r"--output (\S+)", README)
    assert [path for path in paths if path not in written and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["method.md", "extensions.md", "versions.md"])
def test_named_files_exist(name):
    """Files of code and tests that a page names exist."""
    paths = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_readme_names_make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert targets and all(f"\n{target}:" in makefile for target in targets)


def test_every_equation_has_a_test():
    tests = (ROOT / "tests" / "test_algorithm.py").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", METHOD)
    assert [f"Eq. {n}" in METHOD for n in range(1, 11)] == [True] * 10
    assert len(named) == 11 and all(f"def {name}(" in tests for name in named)


# The notebook


def shown(notebook) -> list[list[str]]:
    """For each cell its number, its printed output without times, and the types of its pictures."""
    contents = []
    for cell in notebook.cells:
        outputs = [output.get("text") or " ".join(sorted(output["data"])) for output in cell.get("outputs", [])]
        outputs = [re.sub(r"\d+ ms", "ms", text).replace(" ", "") for text in outputs]
        contents.append([str(cell.get("execution_count")), *outputs])
    return contents


@pytest.mark.default_backbone
def test_notebook_reproduces_saved_outputs():
    saved, again = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    for cell in again.cells:
        cell.pop("outputs", None)
    kernel = {"kernel_name": "python3", "coalesce_streams": True, "timeout": 300}
    NotebookClient(again, **kernel, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert shown(again) == shown(saved)
    assert sum("image/png" in text for outputs in shown(again) for text in outputs) == 2
