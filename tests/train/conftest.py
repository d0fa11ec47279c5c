"""Fixtures for the tests of training."""

from pathlib import Path

import pytest
import yaml
from training_recipes import RecipeWriter
from training_rows import article_rows, write_rows


@pytest.fixture(scope="module")
def write_recipe(tmp_path_factory, base_model_dir, encoder_dir) -> RecipeWriter:
    """Writes recipes whose examples have a cache of their own."""
    return RecipeWriter(tmp_path_factory.mktemp("recipes"), base_model_dir, encoder_dir)


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    """A recipe of stage II with questions about articles, some of which are held out."""
    rows = write_rows(tmp_path / "rows.jsonl", [row | {"id": f"town_{row['id']}"} for row in article_rows(60)])
    keys = {"stage": "grounding", "train_files": {rows: 1.0}, "reconstruction_files": {rows: 1.0}, "data_dir": ""}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(keys | {"model_name_or_path": "x", "output_dir": "x", "validation_share": 0.4}))
    return path
