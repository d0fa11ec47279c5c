"""Recipes: the shipped ones parse and chain, nonsense is refused, stage-I rows mix in."""

from pathlib import Path

import pytest
import yaml
from training_rows import passage_rows, question_rows, write_rows

from arcaligner.train.data import ExampleBuilder
from arcaligner.train.recipe import RecipeArguments, eval_examples, training_examples
from arcaligner.train.sft import parse

RECIPES = sorted((Path(__file__).parents[2] / "train/recipes").glob("*/*.yaml"))
STAGES = ["reconstruction", "grounding", "gating"]


def recipe(**changes):
    required = {"stage": "grounding", "model_name_or_path": "base", "train_files": {"a": 1.0}}
    return RecipeArguments(**{**required, **changes})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_recipe_parses(path):
    parsed, args, text = parse(["--config", str(path)])
    assert parsed.stage == path.stem.split("_")[1] == STAGES[int(path.stem[0]) - 1]
    assert Path(args.output_dir).parts[-2:] == (path.parent.name, path.stem)
    assert text.endswith(path.read_text("utf-8"))


@pytest.mark.parametrize("folder", sorted({path.parent for path in RECIPES}), ids=lambda f: f.name)
def test_each_stage_starts_where_the_one_before_ended(folder):
    stages = [yaml.safe_load(path.read_text("utf-8")) for path in sorted(folder.glob("*.yaml"))]
    assert [stage["stage"] for stage in stages] == STAGES
    assert [stage["model_name_or_path"] for stage in stages[1:]] == [stage["output_dir"] for stage in stages[:-1]]


def test_the_command_line_overrides_the_recipe():
    arguments = ["--config", str(RECIPES[0]), "--learning_rate", "0.5", "--max_train_samples", "3"]
    parsed, args, text = parse(arguments)
    assert (args.learning_rate, parsed.max_train_samples) == (0.5, 3)
    assert "--learning_rate 0.5" in text.splitlines()[0]


def test_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPES[0].read_text("utf-8") + "learning_speed: 1\n")
    with pytest.raises(ValueError, match="learning_speed"):
        parse(["--config", str(path)])


@pytest.mark.parametrize(
    "setting",
    ["packing: true", "padding_free: true", "max_length: 64", "remove_unused_columns: true"],
)
def test_settings_that_lose_slots_are_refused(tmp_path, setting):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPES[0].read_text('utf-8')}\n{setting}\n")
    with pytest.raises(ValueError, match=f"`{setting.split(':')[0]}=.*context tokens from their"):
        parse(["--config", str(path)])


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match="at least 0 and less than 1"):
        recipe(reconstruction_share=share, reconstruction_files={"a": 1.0})


def test_a_share_without_files_is_refused():
    with pytest.raises(ValueError, match="`reconstruction_files` names none"):
        recipe(reconstruction_share=0.5)


@pytest.fixture
def local(base_model_dir, tmp_path):
    """Keys of a recipe that looks at files of this machine only."""
    return {"model_name_or_path": str(base_model_dir), "embedding_cache_dir": str(tmp_path / "cache")}


def test_stage_one_rows_mix_into_a_later_stage(tmp_path, processor, local):
    questions = write_rows(tmp_path / "questions.jsonl", question_rows(12))
    passages = write_rows(tmp_path / "passages.jsonl", passage_rows(12))
    mixed = recipe(
        train_files={questions: 1.0},
        max_train_samples=8,
        reconstruction_files={passages: 1.0},
        reconstruction_share=0.25,
        **local,
    )
    examples = training_examples(mixed, ExampleBuilder(processor), seed=0)
    texts = [processor.decode(example["input_ids"]) for example in examples]
    assert ["Question: " in text for text in texts] == [True] * 6 + [False] * 2


def test_held_out_examples_are_those_of_the_stage(tmp_path, processor, local):
    passages = write_rows(tmp_path / "passages.jsonl", passage_rows(3))
    held_out = recipe(stage="reconstruction", eval_files={passages: 1.0}, max_eval_samples=4, **local)
    assert len(eval_examples(held_out, ExampleBuilder(processor), seed=0)) == 4
    assert eval_examples(recipe(), ExampleBuilder(processor), seed=0) is None
