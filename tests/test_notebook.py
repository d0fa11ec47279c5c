"""The notebook runs from its first to its last cell, and what is saved in it is what it prints."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_steps.ipynb"


def shown(notebook) -> list[list[str]]:
    """What each cell printed, without times, and which pictures it drew."""
    found = []
    for cell in notebook.cells:
        outputs = [each.get("text") or " ".join(sorted(each["data"])) for each in cell.get("outputs", [])]
        found.append([re.sub(r"\d+ ms", "ms", text).replace(" ", "") for text in outputs])
    return found


@pytest.mark.default_backbone
def test_the_notebook_prints_what_is_saved_in_it():
    saved, again = nbformat.read(NOTEBOOK, as_version=4), nbformat.read(NOTEBOOK, as_version=4)
    for cell in again.cells:
        cell.pop("outputs", None)
    kernel = {"kernel_name": "python3", "coalesce_streams": True, "timeout": 300}
    NotebookClient(again, **kernel, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert len(saved.cells) == 20
    assert shown(again) == shown(saved)
    assert sum("image/png" in text for outputs in shown(again) for text in outputs) == 2
    counts = [[cell.get("execution_count") for cell in each.cells] for each in (again, saved)]
    assert counts[0] == counts[1]
