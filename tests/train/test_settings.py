"""What is kept of a run's settings, and which changes of them are refused."""

from pathlib import Path

import pytest
import yaml

from arcaligner.train.settings import check_settings, read_keys, run_settings

SCRIPT = "arcaligner.train.sft"
RECIPE = "# why\nstage: grounding\nseed: 1  # paper: 2\noutput_dir: runs/2\nmodel_name_or_path: runs/1\nbf16: true"


@pytest.fixture
def config(tmp_path) -> list[str]:
    path = tmp_path / "2_grounding.yaml"
    path.write_text(RECIPE)
    return ["--config", str(path)]


@pytest.fixture
def begun(tmp_path, config) -> Path:
    """The folder of a run with a checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoint-2").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(run_settings(SCRIPT, config))
    return folder


def test_a_recipe_alone_is_kept_as_it_is_below_the_command(config):
    assert run_settings(SCRIPT, config) == f"# {SCRIPT} --config {config[1]}\n{RECIPE}\n"


def test_keys_of_the_command_line_are_among_those_that_are_kept(config):
    given = ["--stage", "gating", "--learning-rate=3e-4", "--report_to", "wandb", "tensorboard"]
    given += ["--no_bf16", "--tf32", "--run_name", "it's mine\nand yours"]
    text = run_settings(SCRIPT, config + given)
    keys = {"stage": "gating", "seed": 1, "output_dir": "runs/2", "model_name_or_path": "runs/1", "bf16": False}
    keys |= {"learning_rate": 3e-4, "report_to": ["wandb", "tensorboard"], "tf32": True}
    keys["run_name"] = "it's mine and yours"
    assert yaml.safe_load(text) == read_keys(text) == keys
    assert text.startswith(f"# {SCRIPT} --config") and text.endswith("\n")


def test_settings_without_a_recipe_file_are_kept_too():
    assert yaml.safe_load(run_settings(SCRIPT, ["--stage", "gating"])) == {"stage": "gating"}


def test_files_with_the_keys_of_the_command_line_in_the_comment_only_are_read_alike(config):
    earlier = f"# {SCRIPT} --config a.yaml --seed 2 --max_steps=3\n{RECIPE}\n"
    assert read_keys(earlier) == read_keys(run_settings(SCRIPT, [*config, "--max_steps", "3", "--seed", "2"]))
    assert read_keys(earlier)["seed"] == 2


def test_a_number_is_the_same_however_it_is_written(tmp_path, config):
    kept = Path(config[1])
    kept.write_text(RECIPE + "\nlearning_rate: 1e-4")  # which YAML takes for text
    assert read_keys(run_settings(SCRIPT, config)) == read_keys(
        run_settings(SCRIPT, [*config, "--learning_rate", "0.0001"])
    )


def test_a_run_goes_on_with_its_own_settings_and_other_ways_to_watch_it(begun, config):
    check_settings(begun, run_settings(SCRIPT, config))
    free = ["--logging_steps", "1", "--save_steps", "5", "--report_to", "wandb", "--dataloader_num_workers", "2"]
    check_settings(begun, run_settings(SCRIPT, config + free))


@pytest.mark.parametrize("left", ["checkpoint-2", "config.json", "adapter_config.json"])
def test_other_settings_are_refused_with_all_that_changed(begun, config, left):
    (begun / "checkpoint-2").rename(begun / left)
    message = "run was begun with .*: `seed` was 1 and is now 2, `train_files` was None and is now .*Delete that folder"
    with pytest.raises(ValueError, match=message):
        check_settings(begun, run_settings(SCRIPT, [*config, "--seed", "2", "--train_files", "{a: 1}"]))


def test_a_folder_with_nothing_to_go_on_from_takes_any_settings(begun, config):
    (begun / "checkpoint-2").rmdir()
    check_settings(begun, run_settings(SCRIPT, [*config, "--seed", "2"]))


def test_a_checkpoint_that_does_not_say_its_settings_is_warned_of(begun, config, caplog):
    (begun / "recipe.yaml").unlink()
    check_settings(begun, run_settings(SCRIPT, config))
    assert "run has no recipe.yaml: it may have been begun with other settings" in caplog.text


def test_result_and_start_may_move_together_but_not_one_of_them(begun, config):
    check_settings(begun, run_settings(SCRIPT, [*config, "--output_dir", "/new/2", "--model_name_or_path", "/new/1"]))
    with pytest.raises(ValueError, match="`model_name_or_path` was 'runs/1' and is now '/new/1'"):
        check_settings(begun, run_settings(SCRIPT, [*config, "--model_name_or_path", "/new/1"]))
