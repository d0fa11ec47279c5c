"""Recipes: mistakes are refused, starts are checked, shipped recipes load."""

import contextlib
import dataclasses
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import edit_json
from training_recipes import parse

from arcaligner import ArcAlignerConfig
from arcaligner.common.rows import FILES, parse_source
from arcaligner.train import cocom, full_text, sft
from arcaligner.train import recipe as recipe_module
from arcaligner.train.recipe import (
    RecipeArguments,
    accumulation_steps,
    check_devices,
    check_start,
    parse_recipe,
    resolve_dtype,
    run_script,
    with_help,
)
from arcaligner.train.run import claim_folder, preparation
from arcaligner.train.sft import load_processor
from arcaligner.train.stages import RECIPES, SCRIPT

STAGES = ["reconstruction", "grounding", "gating"]
NUM_GPUS = 4  # in both of the paper's tables


def recipe(**changes):
    required = {"stage": "grounding", "model_name_or_path": "base", "train_files": {"a": 1.0}}
    return RecipeArguments(**required | changes)


def test_missing_recipe_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no recipe file {tmp_path}/none.yaml.*`--config`.*{RECIPES}"):
        parse_recipe(SCRIPT, sft.KINDS, ["--config", f"{tmp_path}/none.yaml"])


@pytest.mark.parametrize(
    "setting, message",
    [
        ("learning_rat: 1", "Unknown key `learning_rat` in the recipe. Did you mean `learning_rate`?"),
        *(
            (setting, f"`{setting.split(':')[0]}=.*its slots would no longer match")
            for setting in ("packing: true", "padding_free: true", "max_length: 64", "remove_unused_columns: true")
        ),
        ("eval_slot_gap: true\nper_device_eval_batch_size: 1", "`per_device_eval_batch_size` is 1"),
        (
            "average_checkpoints: 3\nsave_total_limit: 2",
            "`average_checkpoints` is 3, but `save_total_limit` is 2, .* to at least 3",
        ),
        (
            "average_checkpoints: 3\nsave_strategy: 'no'",
            "`average_checkpoints` is 3, but `save_strategy` is 'no', .*'steps' or 'epoch'",
        ),
        ("average_checkpoints: -1", "`average_checkpoints` is -1; expected a number of at least 0"),
    ],
)
def test_unsafe_settings_are_refused(tmp_path, setting, message):
    """Unknown keys and settings that lose slots are refused."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{(RECIPES / 'tiny/1_reconstruction.yaml').read_text('utf-8')}\n{setting}\n")
    with pytest.raises(ValueError, match=message):
        parse(["--config", str(path)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"validation_share": -0.1}, "`validation_share` is -0.1; .* at least 0 and less than 1"),
        ({"reconstruction_share": 1.0}, "`reconstruction_share` is 1.0; .* at least 0 and less than 1"),
        ({"reconstruction_share": 0.5}, "`reconstruction_files` is empty"),
        ({"distractors": -0.1}, "`distractors` is .*; expected a share"),
        ({"distractors": 1.5}, "`distractors` is .*; expected a share"),
        ({"max_distractors": 13}, "`max_distractors` is 13; expected a number from 1 to 12"),
        ({"distractors": 0.5, "stage": "reconstruction"}, "stage `reconstruction` has no questions"),
        ({"max_questions": 0}, "`max_questions` is 0; expected a number of at least 1"),
        ({"passage_words": 0}, "`passage_words` is 0; expected a number of at least 1"),
        ({"tokens_per_slot": ["4.5"]}, "`tokens_per_slot` is .*expected a whole number"),
        ({"tokens_per_slot": []}, "`tokens_per_slot` is empty"),
        (
            {"processor": {"context_words": True}},
            "`context_words` is in `processor`, but follows from .* `word_parts` in `aligner` instead",
        ),
        ({"aligner": {"encoder_hidden_size": 7}}, "`encoder_hidden_size` is in `aligner`.*belongs in `processor`"),
        ({"aligner": {"lora_rank": 1}}, "Unknown key `lora_rank` in `aligner`. Did you mean `lora_r`?"),
        ({"processor": {"spacy": 1}}, "Unknown key `spacy` in `processor`. Did you mean `spacy_model`?"),
        ({"attn_implementation": "flash_attention_2", "continues": True}, "several chat turns"),
        ({"attn_implementation": "flash_attention_2", "max_questions": 2}, "several chat turns"),
    ],
)
def test_invalid_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes)


@pytest.mark.parametrize("max_tokens, limit", [(None, 512), (600, 512), (200, 200)])
def test_examples_fit_backbone_context(base_model_dir, max_tokens, limit):
    assert recipe(model_name_or_path=str(base_model_dir), max_tokens=max_tokens).token_limit() == limit


def test_help_lists_the_keys(capsys):
    """The help lists the keys, and an unknown option is named."""
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0 and "--tokens_per_slot" in capsys.readouterr().out
    refused = {"--foo_bar_x": "`foo_bar_x` in the command line. `--help` lists", "--no_foo": "`no_foo`"}
    for option, message in (refused | {"--max_token=7": "`max_token` .*. Did you mean `max_tokens`?"}).items():
        with pytest.raises(ValueError, match=f"Unknown key {message}") as error:
            parse([option, "1"])
        assert " no_tokens_per_slot" not in str(error.value)  # argparse adds such names; they are no keys


# Processes and cards


@pytest.mark.parametrize("processes, accumulated", [(1, 32), (2, 16), (8, 4), (32, 1)])
def test_global_batch_decides_accumulation(monkeypatch, processes, accumulated):
    """A step has the recipe's examples on any number of processes."""
    monkeypatch.setattr(recipe_module, "num_processes", lambda: processes)
    path = RECIPES / "mistral_7b" / "1_reconstruction.yaml"
    assert parse_shipped(path)[1].gradient_accumulation_steps == accumulated


@pytest.mark.parametrize(
    "numbers, message",
    [
        ((12, 4, 2), "is 12; .* multiple of 8, .*batch_size` to 1, 2, 3 or 6, or the number of processes to 1 or 3"),
        ((256, 8, 3), "Change the number of processes to 1, 2, 4, 8, 16 or 32, or `global_batch_size`"),
        ((2, 4, 4), "Change `global_batch_size`"),
        ((0, 4, 4), "is 0; expected a positive multiple of 16.* Change `global_batch_size`"),
        ((4, 0, 2), "`per_device_train_batch_size` is 0; expected a number of at least 1"),
    ],
)
def test_batches_that_do_not_divide(numbers, message):
    """The error names the numbers that divide the batch."""
    with pytest.raises(ValueError, match=message):
        accumulation_steps(*numbers)


def test_accumulation_is_given_once():
    """Accumulation that follows from `global_batch_size` cannot be set as well."""
    path = RECIPES / "mistral_7b" / "1_reconstruction.yaml"
    with pytest.raises(ValueError, match="`global_batch_size` is 256 and `gradient_accumulation_steps` is 4.*Leave"):
        parse_shipped(path, "--gradient_accumulation_steps", "4")


@pytest.mark.parametrize(
    "count, started, message",
    [
        (
            4,
            {},
            "has 4 GPUs, but only one process would train. Train on all of them with `arcaligner train --accel",
        ),
        (1, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "2 processes were started on a machine with 1 GPU, but"),
        (
            2,
            {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"},
            "3 processes were started on a machine with 2 GPUs.*num_processes 2",
        ),
        (0, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, None),
        (1, {}, None),
        (2, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
    ],
)
def test_each_process_has_a_card(monkeypatch, count, started, message):
    """Several GPUs with one process are refused, and so are several processes on one GPU."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_devices(needs_bfloat16=False)
    if message:  # a recipe is refused, too
        with pytest.raises(ValueError, match=message):
            parse(["--config", str(RECIPES / "tiny" / "1_reconstruction.yaml"), "--use_cpu", "false"])


def test_cards_without_bfloat16(monkeypatch):
    """A GPU without bfloat16 is named, for the precision of the trainer and for that of the backbone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(ValueError, match="Tesla T4 does not compute in bfloat16.*--bf16 false --dtype float32"):
        check_devices(needs_bfloat16=True)
    with pytest.raises(ValueError, match="Tesla T4 does not"):
        resolve_dtype("bfloat16", torch.device("cuda"))
    assert resolve_dtype("float32", torch.device("cuda")) == torch.float32


# Starts


@pytest.mark.parametrize("stage", STAGES)
def test_start_of_a_stage(processor, checkpoint_dir, base_model_dir, stage):
    """A stage starts from the stage before, or continues from a checkpoint of its own."""
    stage_recipe = recipe(stage=stage, model_name_or_path="runs/1")
    for before in STAGES:
        config = ArcAlignerConfig.from_pretrained(checkpoint_dir, training_stage=before)
        if STAGES.index(stage) - STAGES.index(before) in (0, 1):
            check_start(stage_recipe, processor, config)
        else:
            with pytest.raises(
                ValueError, match=f"`{stage}` cannot start from runs/1, which is the result of stage `{before}`"
            ):
                check_start(stage_recipe, processor, config)
    base = recipe(stage=stage, model_name_or_path=str(base_model_dir))
    if stage != "gating":
        assert load_processor(base, None)
    else:
        with pytest.raises(ValueError, match="which is a base model; expected the result of stage `grounding` or the"):
            load_processor(base, None)


def test_rates_of_a_stage(tmp_path, checkpoint_dir):
    """A stage has its own rates, and the segmentation of the checkpoint that it starts from."""
    start = shutil.copytree(checkpoint_dir, tmp_path / "start")
    edit_json(start / "config.json", digests=None)
    (template := tmp_path / "template.jinja").write_text("{{ messages }}")
    processor = load_processor(recipe(model_name_or_path=str(start), tokens_per_slot=[4, "segment"]), str(template))
    assert (processor.tokens_per_slot, processor.trained_tokens_per_slot) == (4, [4, "segment"])
    assert processor.chat_template == processor.tokenizer.chat_template == "{{ messages }}"
    for part, key, value, was in (
        ("processor", "sentences_per_segment", 3, "1"),
        ("processor", "encoder_name_or_path", "org/another", "'.*encoder'"),
        ("aligner", "base_model_name_or_path", "org/another", "'.*base_model0'"),
    ):
        with pytest.raises(
            ValueError, match=f"`{key}` is {value!r} in the recipe, but {start}, .* was trained with {was}.*stage I"
        ):
            load_processor(recipe(model_name_or_path=str(start), **{part: {key: value}}), None)


# The shipped recipes


def parse_shipped(path, *arguments):
    """A recipe, parsed as on a machine without an accelerator, where bf16 is refused."""
    return parse(["--config", str(path), "--use_cpu", "true", *arguments])


@pytest.mark.parametrize("folder", sorted(RECIPES.glob("*/")), ids=lambda folder: folder.name)
def test_shipped_recipes_parse(folder):
    """A shipped recipe parses, and each stage starts where the one before ended."""
    paths, before = sorted(folder.glob("[1-3]_*.yaml")), None
    assert len(paths) > 1
    for stage, path in zip(STAGES, paths, strict=False):
        parsed, args, text = parse_shipped(path, "--learning_rate", "0.5", "--tokens_per_slot", "4", "segment")
        assert (parsed.stage, path.stem) == (stage, f"{STAGES.index(stage) + 1}_{stage}")
        assert Path(args.output_dir).parts == ("runs", folder.name, path.stem)
        assert before is None or parsed.model_name_or_path == before
        before = args.output_dir
        for source in parsed.sources:
            assert not parse_source(source)[0].endswith(FILES) or "/" not in source, "files are found by `data_dir`"
        overrides = {"learning_rate": 0.5, "tokens_per_slot": [4, "segment"], "use_cpu": True}
        assert yaml.safe_load(text) == yaml.safe_load(path.read_text("utf-8")) | overrides
        assert (args.learning_rate, parsed.tokens_per_slot) == (0.5, [4, "segment"])


# Tables "Hyperparameters for Stage I" and "Hyperparameters for Stage II & III".
OF_BOTH_TABLES = {"lr_scheduler_type": "linear", "warmup_steps": 0.03, "weight_decay": 0.0}
OF_BOTH_TABLES |= {"num_train_epochs": 1, "per_device_train_batch_size": 8}
OF_STAGE = {
    1: {"learning_rate": 2e-4, "gradient_accumulation_steps": 8},
    2: {"learning_rate": 2e-5, "gradient_accumulation_steps": 2},
    3: {"learning_rate": 2e-5, "gradient_accumulation_steps": 2},
}
EXAMPLES = {1: (200_000, 256), 2: (90_447, 64), 3: (90_447, 64)}  # examples in total, and in a step
ALIGNER = {"lora_r": 128, "lora_alpha": 32, "lora_dropout": 0.05, "gate_layers": "all"}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["mistral_7b", "llama_3_1_8b"])
def test_paper_recipes_match_tables(name, stage, monkeypatch):
    (path,) = (RECIPES / name).glob(f"{stage}_*.yaml")
    monkeypatch.setattr(recipe_module, "num_processes", lambda: NUM_GPUS)
    parsed, args, _ = parse_shipped(path)
    expected = OF_BOTH_TABLES | OF_STAGE[stage]
    assert {key: getattr(args, key) for key in expected} == expected
    assert args.optim.startswith("adamw")
    examples_a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * NUM_GPUS
    assert (parsed.max_train_samples, examples_a_step) == EXAMPLES[stage]
    assert args.global_batch_size == examples_a_step
    assert {key: parsed.aligner[key] for key in ALIGNER} == ALIGNER
    assert 1 + parsed.aligner["max_refinement_steps"] == 3  # "max loops"
    assert args.bf16 and parsed.dtype == "bfloat16" and args.max_steps == -1
    ArcAlignerConfig(text_config={"model_type": "llama"}, **parsed.aligner)


@pytest.mark.slow
@pytest.mark.default_backbone
def test_tiny_recipe_trains_all_stages(tmp_path, monkeypatch):
    monkeypatch.delenv("ARCALIGNER_MODELS", raising=False)  # a training in another test sets it
    monkeypatch.chdir(RECIPES.parents[1])
    quick = ["--max_steps", "1", "--per_device_train_batch_size", "1", "--eval_strategy", "no"]
    quick += ["--examples_cache_dir", str(tmp_path / "cache")]
    start = []
    for stage, path in zip(STAGES, sorted((RECIPES / "tiny").glob("*.yaml")), strict=True):
        sft.train(*parse_shipped(path, "--output_dir", str(tmp_path / stage), *quick, *start))
        assert ArcAlignerConfig.from_pretrained(tmp_path / stage).training_stage == stage
        start = ["--model_name_or_path", str(tmp_path / stage)]


def test_missing_data_fails_early(tmp_path, monkeypatch, capsys):
    """A missing data file is reported in one line before anything is loaded."""
    path = RECIPES / "smollm2_135m" / "2_grounding.yaml"
    monkeypatch.setattr(sys, "argv", ["sft", "--config", str(path), "--data_dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        run_script(SCRIPT, sft.KINDS, lambda *parsed: pytest.fail("training began"))
    assert f"There is no file {tmp_path}/train_qa.jsonl.gz" in capsys.readouterr().err.replace("\n", "")


def test_bad_data_print_one_line(tmp_path, monkeypatch, capsys):
    """Bad data and folders give one line before training; an error in training shows where it was raised."""
    path, rows = tmp_path / "recipe.yaml", tmp_path / "mine.jsonl"
    keys = yaml.safe_load((RECIPES / "tiny" / "2_grounding.yaml").read_text())
    path.write_text(yaml.safe_dump(keys | {"train_files": {str(rows): 1.0}, "eval_files": {str(rows): 1.0}}))
    rows.touch()
    monkeypatch.setattr(sys, "argv", ["sft", "--config", str(path)])

    def fail(*parsed):
        with preparation():
            raise ValueError("mine.jsonl, line 5: no.")

    with pytest.raises(SystemExit):
        run_script(SCRIPT, sft.KINDS, fail)
    assert capsys.readouterr().err.splitlines()[-1] == "Error: mine.jsonl, line 5: no."

    def claim(*parsed):
        folder = tmp_path / "run"
        (folder / "checkpoint-2").mkdir(parents=True)
        with claim_folder(str(folder), parsed[-1], is_main=True):
            pytest.fail("training began")

    with pytest.raises(SystemExit):
        run_script(SCRIPT, sft.KINDS, claim)
    assert "but no recipe.yaml" in capsys.readouterr().err.splitlines()[-1]

    def diverge(*parsed):
        raise ValueError("The loss is not finite.")

    with pytest.raises(ValueError, match="The loss is not finite"):
        run_script(SCRIPT, sft.KINDS, diverge)


def test_evaluation_needs_files(tmp_path):
    """A copied recipe without `eval_files` is refused before the model is loaded."""
    path = RECIPES / "tiny" / "2_grounding.yaml"
    keys = yaml.safe_load(path.read_text())
    copied = tmp_path / path.name
    copied.write_text(yaml.safe_dump({key: value for key, value in keys.items() if key != "eval_files"}))
    with pytest.raises(ValueError, match="`eval_strategy` is 'epoch', but the recipe has no `eval_files`"):
        parse_recipe(SCRIPT, sft.KINDS, ["--config", str(copied)])


# Help


@pytest.mark.parametrize("script", [sft, cocom, full_text], ids=lambda script: script.__name__.rpartition(".")[2])
def test_help_describes_each_key(script, capsys):
    """Those of the recipe and those of TRL whose defaults we change."""
    with pytest.raises(SystemExit) as stopped:
        parse_recipe("x", script.KINDS, ["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for kind in script.KINDS:
        for field in dataclasses.fields(kind):
            if field.name in kind.__annotations__:
                assert field.metadata["help"].replace("%%", "%")[:40] in text


def test_help_is_the_docstrings_text():
    """Each name of an entry for several keys has its text; a key without an entry keeps its parent's."""

    @dataclasses.dataclass
    class Parent:
        kept: int = dataclasses.field(default=1, metadata={"help": "Of the parent."})
        replaced: int = dataclasses.field(default=1, metadata={"help": "Of the parent."})

    @with_help
    @dataclasses.dataclass
    class Keys(Parent):
        """
        Keys.

        Args:
            first (`dict[str, int]`), second: Of both,
                5 % of all: so many.
            replaced (`int`, *optional*): Of the child.

        More text: none.
        """

        first: int = 0
        second: int = 0
        kept: int = 2
        replaced: int = 2

    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(Keys)}
    assert helps == {
        "first": "Of both, 5 %% of all: so many.",
        "second": "Of both, 5 %% of all: so many.",
        "kept": "Of the parent.",
        "replaced": "Of the child.",
    }
