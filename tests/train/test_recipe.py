"""Recipes: nonsense is refused, stage-I rows mix in, distractors are added."""

from pathlib import Path

import pytest
from training_rows import passage_rows, question_rows, write_rows

from arcaligner.train.data import ExampleBuilder
from arcaligner.train.recipe import RecipeArguments, eval_examples, training_examples
from arcaligner.train.sft import parse

RECIPE = Path(__file__).parents[2] / "train/recipes/tiny/1_reconstruction.yaml"


def recipe(**changes):
    required = {"stage": "grounding", "model_name_or_path": "base", "train_files": {"a": 1.0}}
    return RecipeArguments(**{**required, **changes})


def test_the_command_line_overrides_the_recipe():
    arguments = ["--config", str(RECIPE), "--learning_rate", "0.5", "--max_train_samples", "3"]
    parsed, args, text = parse(arguments)
    assert (args.learning_rate, parsed.max_train_samples) == (0.5, 3)
    assert "--learning_rate 0.5" in text.splitlines()[0]


def test_an_unknown_key_of_a_recipe_is_refused_with_the_nearest(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.read_text("utf-8") + "learning_rat: 1\n")
    with pytest.raises(ValueError, match="Unknown key `learning_rat` in the recipe. Did you mean `learning_rate`?"):
        parse(["--config", str(path)])


@pytest.mark.parametrize("flags", [["--max_token", "7"], ["--max_token=7"]])
def test_an_unknown_key_of_the_command_line_is_refused_with_the_nearest(flags):
    with pytest.raises(ValueError, match="`max_token` in the command line. Did you mean `max_tokens`?"):
        parse(["--config", str(RECIPE), *flags])


@pytest.mark.parametrize(
    "place, key, nearest",
    [("aligner", "lora_rank", "lora_r"), ("processor", "sentence_per_segment", "sentences_per_segment")],
)
def test_an_unknown_key_of_aligner_or_processor_is_refused(place, key, nearest):
    with pytest.raises(ValueError, match=f"Unknown key `{key}` in `{place}`. Did you mean `{nearest}`?"):
        recipe(**{place: {key: 1}})


@pytest.mark.parametrize(
    "setting",
    ["packing: true", "padding_free: true", "max_length: 64", "remove_unused_columns: true"],
)
def test_settings_that_lose_slots_are_refused(tmp_path, setting):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPE.read_text('utf-8')}\n{setting}\n")
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


@pytest.mark.parametrize("changes", [{"min_passages": 2}, {"min_passages": 3, "max_passages": 2}, {"max_passages": 0}])
def test_a_range_of_passages_that_is_none_is_refused(changes):
    with pytest.raises(ValueError, match="expected 1 <= `min_passages` <= `max_passages`"):
        recipe(**changes)


def test_stage_one_has_no_distractors():
    with pytest.raises(ValueError, match="stage I asks none"):
        recipe(stage="reconstruction", max_passages=2)


def test_a_recipe_adds_distractors_to_questions_and_leaves_stage_one_rows_alone(tmp_path, processor, local):
    questions = write_rows(tmp_path / "questions.jsonl", question_rows(12))
    mixed = recipe(
        train_files={questions: 1.0},
        min_passages=3,
        max_passages=3,
        max_train_samples=8,
        reconstruction_files={questions: 1.0},
        reconstruction_share=0.25,
        **local,
    )
    examples = training_examples(mixed, ExampleBuilder(processor), seed=0)
    assert [len(texts) for texts in examples["segment_texts"]] == [6] * 6 + [1] * 2


@pytest.mark.parametrize("max_tokens, limit", [(None, 512), (600, 512), (200, 200)])
def test_what_the_backbone_cannot_read_is_left_out_and_counted(tmp_path, processor, local, caplog, max_tokens, limit):
    rows = question_rows(3)
    rows[1]["passages"][0]["text"] = "It was so. " * 600
    path = write_rows(tmp_path / "questions.jsonl", rows)
    examples = training_examples(
        recipe(train_files={path: 1.0}, max_tokens=max_tokens, **local), ExampleBuilder(processor), seed=0
    )
    assert sorted(examples["row_id"]) == ["row-0", "row-2"]
    assert f"left out 1 longer than {limit} tokens" in caplog.text and "row-1" in caplog.text


def test_strict_is_a_key_of_the_recipe(tmp_path, processor, local):
    path = write_rows(tmp_path / "questions.jsonl", [row | {"answers": []} for row in question_rows(1)])
    with pytest.raises(ValueError, match="row row-0 has no answer"):
        training_examples(recipe(train_files={path: 1.0}, strict=True, **local), ExampleBuilder(processor), seed=0)
