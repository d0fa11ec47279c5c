"""Recipes: mistakes are refused, starts are checked, reconstruction mixes in; those that are shipped load."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from training_recipes import parse

from arcaligner import ArcAlignerConfig
from arcaligner.common.rows import parse_source
from arcaligner.train import sft
from arcaligner.train.recipe import FILES, RecipeArguments, check_start, run_script
from arcaligner.train.sft import load_processor
from arcaligner.train.stages import SCRIPT

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "train/recipes/tiny/1_reconstruction.yaml"
RECIPES = sorted((ROOT / "train/recipes").glob("*/[1-3]_*.yaml"))
STAGES = ["reconstruction", "grounding", "gating"]
PAPERS = ["mistral_7b", "llama_3_1_8b"]
NUM_GPUS = 4  # in both of the paper's tables


def recipe(**changes):
    required = {"stage": "grounding", "model_name_or_path": "base", "train_files": {"a": 1.0}, "data_dir": ""}
    return RecipeArguments(**{**required, **changes})


def test_the_command_line_overrides_the_recipe():
    arguments = ["--config", str(RECIPE), "--learning_rate", "0.5", "--tokens_per_slot", "4", "segment"]
    parsed, args, text = parse(arguments)
    assert (args.learning_rate, parsed.tokens_per_slot) == (0.5, recipe(tokens_per_slot=[4, "segment"]).tokens_per_slot)
    assert "--learning_rate 0.5" in text.splitlines()[0]


@pytest.mark.parametrize(
    "setting, message",
    [
        ("learning_rat: 1", "Unknown key `learning_rat` in the recipe. Did you mean `learning_rate`?"),
        ("packing: true", "`packing=.*context tokens from their"),
        ("padding_free: true", "`padding_free=.*context tokens from their"),
        ("max_length: 64", "`max_length=.*context tokens from their"),
        ("remove_unused_columns: true", "`remove_unused_columns=.*context tokens from their"),
    ],
)
def test_unknown_keys_and_settings_that_lose_slots_are_refused(tmp_path, setting, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPE.read_text('utf-8')}\n{setting}\n")
    with pytest.raises(ValueError, match=message):
        parse(["--config", str(path)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reconstruction_share": -0.1, "reconstruction_files": {"a": 1.0}}, "at least 0 and less than 1"),
        ({"reconstruction_share": 1.0, "reconstruction_files": {"a": 1.0}}, "at least 0 and less than 1"),
        ({"reconstruction_share": 0.5}, "`reconstruction_files` names none"),
        ({"distractors": -0.1}, "`distractors` is .*; expected a share"),
        ({"distractors": 1.5}, "`distractors` is .*; expected a share"),
        ({"max_distractors": 13}, "`max_distractors` is 13; expected 1 to 12"),
        ({"distractors": 0.5, "stage": "reconstruction"}, "stage `reconstruction` asks none"),
        ({"max_questions": 0}, "`max_questions` is 0"),
        ({"tokens_per_slot": [0]}, "`tokens_per_slot` is .*expected a whole number"),
        ({"tokens_per_slot": ["4.5"]}, "`tokens_per_slot` is .*expected a whole number"),
        ({"tokens_per_slot": []}, "`tokens_per_slot` is empty"),
        ({"processor": {"tokens_per_slot": 4}}, "`tokens_per_slot` is in `processor`, but follows from"),
        ({"processor": {"context_words": True}}, "`context_words` is in `processor`, but follows from"),
        ({"aligner": {"encoder_hidden_size": 7}}, "`encoder_hidden_size` is in `aligner`.*set it in `processor`"),
        ({"aligner": {"lora_rank": 1}}, "Unknown key `lora_rank` in `aligner`. Did you mean `lora_r`?"),
        ({"processor": {"spacy": 1}}, "Unknown key `spacy` in `processor`. Did you mean `spacy_model`?"),
        ({"attn_implementation": "flash_attention_2", "continues": True}, "which cannot read several turns"),
        ({"attn_implementation": "flash_attention_2", "max_questions": 2}, "which cannot read several turns"),
    ],
)
def test_values_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes)


@pytest.mark.parametrize("max_tokens, limit", [(None, 512), (600, 512), (200, 200)])
def test_no_example_is_longer_than_the_backbone_reads(base_model_dir, max_tokens, limit):
    assert recipe(model_name_or_path=str(base_model_dir), max_tokens=max_tokens).token_limit() == limit


def test_help_tells_the_keys_and_an_unknown_option_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0 and "--tokens_per_slot" in capsys.readouterr().out
    refused = {"--foo_bar_x": "`foo_bar_x` in the command line. Known", "--no_foo": "`no_foo`"}
    for option, message in (refused | {"--max_token=7": "`max_token` .*. Did you mean `max_tokens`?"}).items():
        with pytest.raises(ValueError, match=f"Unknown key {message}") as error:
            parse([option, "1"])
        assert " no_tokens_per_slot" not in str(error.value)  # what argparse makes of keys is none


# Starts


def start_recipe(stage, name, **changes):
    return RecipeArguments(stage=stage, model_name_or_path=str(name), train_files={"rows.jsonl": 1.0}, **changes)


@pytest.fixture
def start(tmp_path, checkpoint_dir):
    """Writes a copy of the aligner checkpoint, as a stage or with other keys in its configuration."""

    def write(**changes):
        folder = tmp_path / "start"
        shutil.copytree(checkpoint_dir, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"digests": None} | changes))
        return folder

    return write


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_starts_from_the_one_before_or_goes_on(processor, checkpoint_dir, stage):
    for before in STAGES:
        config = ArcAlignerConfig.from_pretrained(checkpoint_dir, training_stage=before)
        if STAGES.index(stage) - STAGES.index(before) in (0, 1):
            check_start(start_recipe(stage, "runs/1"), processor, config)
        else:
            with pytest.raises(ValueError, match=f"`{stage}` cannot start from runs/1, which is a {before} checkpoint"):
                check_start(start_recipe(stage, "runs/1"), processor, config)


def test_a_stage_has_rates_of_its_own(start):
    processor = load_processor(start_recipe("grounding", start(), tokens_per_slot=[4, "segment"]), None)
    assert processor.encoder_hidden_size == 12
    assert (processor.tokens_per_slot, processor.trained_tokens_per_slot) == (4, [4, "segment"])


def test_a_base_model_is_no_start_for_gating(base_model_dir):
    for stage in STAGES[:2]:
        assert load_processor(start_recipe(stage, base_model_dir), None)
    with pytest.raises(ValueError, match="which is a base model; expected one of grounding, gating"):
        load_processor(start_recipe("gating", base_model_dir), None)


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
        load_processor(start_recipe("grounding", folder, **changes), None)


# The shipped recipes


def parse_shipped(path, *arguments):
    """A recipe as on a machine without an accelerator, where bf16 is refused."""
    return parse(["--config", str(path), "--use_cpu", "true", *arguments])


def recipe_id(path):
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_a_shipped_recipe_parses(path):
    parsed, args, text = parse_shipped(path)
    assert parsed.stage == path.stem.split("_")[1] == STAGES[int(path.stem[0]) - 1]
    assert Path(args.output_dir).parts == ("runs", path.parent.name, path.stem)
    assert yaml.safe_load(text) == yaml.safe_load(path.read_text("utf-8")) | {"use_cpu": True}
    for source in [*parsed.train_files, *parsed.reconstruction_files, *parsed.eval_files]:
        assert not parse_source(source)[0].endswith(FILES) or "/" not in source, "files are found by `data_dir`"


@pytest.mark.parametrize("folder", sorted({path.parent for path in RECIPES}), ids=lambda folder: folder.name)
def test_each_stage_starts_where_the_one_before_ended(folder):
    stages = [yaml.safe_load(path.read_text("utf-8")) for path in sorted(folder.glob("[1-3]_*.yaml"))]
    first = STAGES.index(stages[0]["stage"])
    assert [stage["stage"] for stage in stages] == STAGES[first : first + len(stages)] and len(stages) > 1
    assert [stage["model_name_or_path"] for stage in stages[1:]] == [stage["output_dir"] for stage in stages[:-1]]


# Tables "Hyperparameters for Stage I" and "Hyperparameters for Stage II & III".
OF_BOTH_TABLES = {"lr_scheduler_type": "linear", "warmup_steps": 0.03, "weight_decay": 0.0}
OF_BOTH_TABLES |= {"num_train_epochs": 1, "per_device_train_batch_size": 8}
OF_STAGE = {
    1: {"learning_rate": 2e-4, "gradient_accumulation_steps": 8},
    2: {"learning_rate": 2e-5, "gradient_accumulation_steps": 2},
    3: {"learning_rate": 2e-5, "gradient_accumulation_steps": 2},
}
EXAMPLES = {1: (200_000, 256), 2: (90_447, 64), 3: (90_447, 64)}  # in all, and in a step
ALIGNER = {"lora_r": 128, "lora_alpha": 32, "lora_dropout": 0.05, "gate_layers": "all"}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", PAPERS)
def test_the_recipes_of_the_paper_have_its_values(name, stage):
    (path,) = (ROOT / "train/recipes" / name).glob(f"{stage}_*.yaml")
    parsed, args, _ = parse_shipped(path)
    expected = OF_BOTH_TABLES | OF_STAGE[stage]
    assert {key: getattr(args, key) for key in expected} == expected
    assert args.optim.startswith("adamw")
    examples_a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * NUM_GPUS
    assert (parsed.max_train_samples, examples_a_step) == EXAMPLES[stage]
    assert {key: parsed.aligner[key] for key in ALIGNER} == ALIGNER
    assert 1 + parsed.aligner["max_refinement_steps"] == 3  # "max loops"
    assert args.bf16 and parsed.dtype == "bfloat16" and args.max_steps == -1
    ArcAlignerConfig(text_config={"model_type": "llama"}, **parsed.aligner)


@pytest.mark.slow
@pytest.mark.default_backbone
def test_the_tiny_recipe_trains_all_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = [tmp_path / stage for stage in STAGES]
    quick = ["--max_steps", "1", "--per_device_train_batch_size", "1", "--eval_strategy", "no"]
    quick += ["--examples_cache_dir", str(tmp_path / "cache")]
    for number, path in enumerate(path for path in RECIPES if path.parent.name == "tiny"):
        start = ["--model_name_or_path", str(folders[number - 1])] if number else []
        sft.train(*parse_shipped(path, "--output_dir", str(folders[number]), *quick, *start))
        assert ArcAlignerConfig.from_pretrained(folders[number]).training_stage == STAGES[number]


def test_a_missing_data_file_is_said_in_one_line_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    path = ROOT / "train/recipes/smollm2_135m/2_grounding.yaml"
    monkeypatch.setattr(sys, "argv", ["sft", "--config", str(path), "--data_dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        run_script(SCRIPT, sft.KINDS, lambda *parsed: pytest.fail("training began"))
    assert f"There is no file {tmp_path}/train_qa.jsonl.gz" in capsys.readouterr().err.replace("\n", "")
