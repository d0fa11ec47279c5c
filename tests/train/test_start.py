"""What a stage refuses to start from: another order, backbone, encoder or segmentation."""

import json
import shutil

import pytest

from arcaligner import ArcAlignerConfig, ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.train.recipe import RecipeArguments
from arcaligner.train.sft import load_processor
from arcaligner.train.start import check_resume

STAGES = ("reconstruction", "grounding", "gating")


def recipe(stage, name, **changes):
    return RecipeArguments(stage=stage, model_name_or_path=str(name), train_files={"rows.jsonl": 1.0}, **changes)


@pytest.fixture
def start(tmp_path, checkpoint_dir):
    """Writes a copy of the aligner checkpoint, as a stage or with other keys in its configuration."""

    def write(**changes):
        folder = tmp_path / "start"
        shutil.copytree(checkpoint_dir, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return write


@pytest.mark.parametrize(
    "stage, before",
    [
        ("reconstruction", "reconstruction"),
        ("grounding", "reconstruction"),
        ("grounding", "grounding"),
        ("gating", "grounding"),
        ("gating", "gating"),
    ],
)
def test_a_stage_starts_from_the_one_before_or_goes_on(start, stage, before):
    assert load_processor(recipe(stage, start(training_stage=before)), None).encoder_hidden_size == 12


@pytest.mark.parametrize(
    "stage, before",
    [
        ("reconstruction", "grounding"),
        ("reconstruction", "gating"),
        ("grounding", "gating"),
        ("gating", "reconstruction"),
    ],
)
def test_a_stage_out_of_order_is_refused(start, stage, before):
    folder = start(training_stage=before)
    with pytest.raises(ValueError, match=f"`{stage}` cannot start from {folder}, which is a {before} checkpoint; exp"):
        load_processor(recipe(stage, folder), None)


def test_a_base_model_is_no_start_for_gating(base_model_dir):
    for stage in STAGES[:2]:
        assert load_processor(recipe(stage, base_model_dir), None)
    with pytest.raises(ValueError, match="which is a base model; expected one of grounding, gating"):
        load_processor(recipe("gating", base_model_dir), None)


def test_a_model_says_which_stage_it_was_trained_in(tmp_path, model):
    assert model.config.training_stage is None
    for stage in STAGES:
        model.set_stage(stage)
        model.save_pretrained(tmp_path)
        assert ArcAlignerForCausalLM.from_pretrained(tmp_path).config.training_stage == stage


@pytest.mark.parametrize(
    "changes, was",
    [
        ({"processor": {"sentences_per_segment": 3}}, "1"),
        ({"processor": {"encoder_name_or_path": "org/another"}}, "'.*encoder'"),
        ({"aligner": {"base_model_name_or_path": "org/another"}}, "'.*base_model0'"),
    ],
)
def test_another_backbone_encoder_or_segmentation_is_refused(start, changes, was):
    folder = start()
    ((key, value),) = next(iter(changes.values())).items()
    with pytest.raises(ValueError, match=f"`{key}` to {value!r}, but {folder} was trained with {was}.*stage I"):
        load_processor(recipe("grounding", folder, **changes), None)


def test_settings_that_the_start_has_may_be_said_again(start):
    processor = load_processor(recipe("grounding", start(), processor={"sentences_per_segment": 1}), None)
    assert processor.sentences_per_segment == 1


def test_a_folder_of_two_aligners_is_refused(start):
    with pytest.raises(ValueError, match="two aligners: `encoder_name_or_path` is 'org/another' in its config.json"):
        load_processor(recipe("grounding", start(encoder_name_or_path="org/another")), None)


def test_a_run_goes_on_only_from_its_own_checkpoint(start, checkpoint_dir):
    config = ArcAlignerConfig.from_pretrained(checkpoint_dir)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint_dir)
    check_resume(checkpoint_dir, config, processor)
    for key, value in [("training_stage", "gating"), ("base_model_name_or_path", "org/another")]:
        folder = start(**{key: value})
        with pytest.raises(ValueError, match=f"was made with `{key}` '{value}', but this run has .*output_dir"):
            check_resume(folder, config, processor)
        shutil.rmtree(folder)
    processor.sentences_per_segment = 0.5
    with pytest.raises(ValueError, match="`sentences_per_segment` 1, but this run has 0.5"):
        check_resume(checkpoint_dir, config, processor)


def test_what_the_processor_decides_is_no_key_of_the_aligner():
    with pytest.raises(ValueError, match="`encoder_hidden_size` is in `aligner`.*set it in `processor`"):
        recipe("grounding", "base", aligner={"encoder_hidden_size": 7})
