"""BM25 does not load JAX, which would take memory of the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Leaves a file where it is imported.
JAX = """
import os, pathlib
pathlib.Path(os.environ["JAX_IS_USED"]).touch()
"""
SEARCH = """
from arcaligner.train.distractors import NearestPassages
passages = [{"title": "", "text": text} for text in ("The tower of Oslo.", "A tower.", "Nothing.")]
nearest = NearestPassages([{"question": "", "answers": [], "passages": passages, "gold": []}])
assert nearest.without_answer("oslo", ["x"], [], 1) == passages[:1]
"""


@pytest.fixture
def run(tmp_path):
    """Runs code in a process where a stand-in for JAX can be imported; returns whether it was."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(JAX)
    (tmp_path / "jax" / "lax.py").write_text("def top_k(scores, k):\n    raise AssertionError('JAX is used')")
    used = tmp_path / "used"

    def run(code: str) -> bool:
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2].parent), *filter(None, sys.path)])
        environment = os.environ | {"PYTHONPATH": path, "JAX_IS_USED": str(used)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        return used.exists()

    return run


def test_searching_leaves_jax_alone(run):
    """Neither the import of bm25s nor a search imports JAX."""
    assert not run(SEARCH)


def test_jax_can_be_imported_later(run):
    """JAX is hidden from bm25s alone."""
    assert run(SEARCH + "import jax.lax\nassert jax.lax.top_k")


def test_jax_of_the_caller_stays(run):
    """A caller that has imported JAX keeps its modules, and bm25s does not use them."""
    assert run("import sys, jax.lax\nown = jax\n" + SEARCH + "assert sys.modules['jax'] is own and jax.lax.top_k")
