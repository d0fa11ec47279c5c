"""What readers see comes from a run and from nothing else."""

import json
from pathlib import Path

import pytest

from arcaligner.evaluation.publish import INTRODUCTION, MARKS, readme_tables, with_block
from arcaligner.evaluation.tables import results_page

ROOT = Path(__file__).parents[2]
SHIPPED = json.loads((ROOT / "checkpoints/arcaligner-smollm2-135m/results.json").read_text("utf-8"))


def test_the_readmes_tables_are_those_of_the_shipped_results():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert with_block(readme, readme_tables(SHIPPED)) == readme


def test_the_results_page_is_that_of_the_shipped_results():
    page = (ROOT / "docs/results.md").read_text("utf-8")
    assert page.startswith("\n".join([INTRODUCTION, results_page(SHIPPED)]).rstrip())


def test_figures_of_the_results_page_are_there_with_their_reading_help():
    page = (ROOT / "docs/results.md").read_text("utf-8")
    for data in (ROOT / "docs/figures").glob("*.json"):
        assert f"(figures/{data.with_suffix('.svg').name})\n\n{json.loads(data.read_text('utf-8'))['reading']}" in page
        assert data.with_suffix(".svg").exists()


def test_a_block_is_replaced_between_its_marks_alone():
    start, end = MARKS
    assert with_block(f"a\n{start}\nold\n{end}\nb", "new") == f"a\n{start}\nnew\n{end}\nb"
    for text in ("none", f"{end}{start}", f"{start}{start}{end}"):
        with pytest.raises(ValueError, match="each once"):
            with_block(text, "new")
