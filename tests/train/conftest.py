"""Fixtures of the tests of training."""

import pytest
from training_recipes import RecipeWriter


@pytest.fixture(scope="module")
def write_recipe(tmp_path_factory, base_model_dir, encoder_dir) -> RecipeWriter:
    """Writes recipes with a cache of examples of their own."""
    return RecipeWriter(tmp_path_factory.mktemp("recipes"), base_model_dir, encoder_dir)
