"""The folder of a run: saved settings, one trainer at a time, complete checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arcaligner.train.run import check_resume, check_settings, claim_folder, last_checkpoint, read_keys, run_settings

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


def test_recipe_is_saved(config):
    """The recipe is saved with its keys, after the command."""
    assert run_settings(SCRIPT, config) == f"# {SCRIPT} --config {config[1]}\n{RECIPE}\n"  # as it is
    Path(config[1]).write_text(RECIPE + "\nweight_decay: 1e-4")  # which YAML reads as a string
    options = ["--stage", "gating", "--learning-rate=3e-4", "--report_to", "wandb", "tensorboard"]
    options += ["--no_bf16", "--tf32", "--run_name", "it's mine\nand yours"]
    text = run_settings(SCRIPT, config + options)
    keys = {"stage": "gating", "seed": 1, "output_dir": "runs/2", "model_name_or_path": "runs/1", "bf16": False}
    keys |= {"learning_rate": 3e-4, "weight_decay": 1e-4, "report_to": ["wandb", "tensorboard"], "tf32": True}
    keys["run_name"] = "it's mine and yours"
    assert read_keys(text) == keys
    assert text.startswith(f"# {SCRIPT} --config") and text.endswith("\n")


def test_run_resumes_with_its_settings(begun, config):
    """A run resumes with its own settings; logging and speed may change."""
    check_settings(begun, run_settings(SCRIPT, config))
    free = ["--logging_steps", "1", "--save_steps", "5", "--report_to", "wandb", "--dataloader_num_workers", "2"]
    free += ["--dtype", "auto", "--compile_layers", "true", "--data_dir", "elsewhere"]
    check_settings(begun, run_settings(SCRIPT, config + free))
    old = "\nunanswerable: {}\ntest_files: []\nno_answer: not in the text"  # keys of version 0.2.0
    (begun / "recipe.yaml").write_text(RECIPE + old.format(0.0))
    check_settings(begun, run_settings(SCRIPT, config))
    (begun / "recipe.yaml").write_text(RECIPE + old.format(0.3))  # rows that this version cannot make
    with pytest.raises(ValueError, match="`unanswerable` was 0.3 and is now not set"):
        check_settings(begun, run_settings(SCRIPT, config))
    start = ["--model_name_or_path", "runs/1", "--output_dir", "runs/2"]
    (begun / "recipe.yaml").write_text(run_settings(SCRIPT, [*config, *start]))
    elsewhere = [str(Path(argument).resolve()) if "/" in argument else argument for argument in start]
    check_settings(begun, run_settings(SCRIPT, [*config, *elsewhere]))
    averaged = [*config, "--average_checkpoints", "2"]  # `save_steps` decides which checkpoints
    (begun / "recipe.yaml").write_text(run_settings(SCRIPT, averaged))
    with pytest.raises(ValueError, match="`save_steps` was not set and is now 5"):
        check_settings(begun, run_settings(SCRIPT, [*averaged, "--save_steps", "5"]))


def test_missing_checkpoint_is_refused(begun):
    """A run whose folder has no complete checkpoint continues from none."""
    for value in ("true", "false"):
        check_resume(value, begun, is_stage=True)
    for value in ("checkpoint-2", str(begun / "checkpoint-2")):
        with pytest.raises(ValueError, match=f"is '{value}', but .*{begun} contains none yet"):
            check_resume(value, begun, is_stage=True)


@pytest.mark.parametrize("left", ["checkpoint-2", "config.json", "adapter_config.json"])
def test_changed_settings_are_listed(begun, config, left):
    (begun / "checkpoint-2").rename(begun / left)
    message = "run was started with .*: `seed` was 1 and is now 2, `train_files` was not set and is now .*delete"
    other = run_settings(SCRIPT, [*config, "--seed", "2", "--train_files", "{a: 1}"])
    with pytest.raises(ValueError, match=message):
        check_settings(begun, other)
    (begun / "recipe.yaml").unlink()
    with pytest.raises(ValueError, match="run contains a model or checkpoints, but no recipe.yaml"):
        check_settings(begun, other)
    (begun / left).rmdir()
    check_settings(begun, other)


def test_trainer_locks_its_folder(tmp_path):
    """One trainer at a time uses a folder, and writes its settings first."""
    folder, settings = tmp_path / "runs" / "1", "# arcaligner.train.sft --config a.yaml\nseed: 1\n"

    def claim(settings, is_main=True):
        return claim_folder(str(folder), settings, is_main)

    with claim(settings, is_main=False):  # not the first process of a run
        assert not folder.exists()
    (folder / ".saving-killed").mkdir(parents=True)  # what a killed run has left
    with claim(settings):
        assert (folder / "recipe.yaml").read_text() == settings
        assert {path.name for path in folder.iterdir()} == {"recipe.yaml", ".lock"}
        with pytest.raises(ValueError, match=f"Another process is training in {folder}"):
            claim(settings).__enter__()
    other = settings.replace("1", "2")
    with claim(other):  # there was no checkpoint to continue from
        assert (folder / "recipe.yaml").read_text() == other
        (folder / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="`seed` was 2 and is now 1"):
        claim(settings).__enter__()
    assert (folder / "recipe.yaml").read_text() == other


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "training_args.bin"]
)
def test_truncated_checkpoint_is_skipped(tmp_path, caplog, name):
    """A checkpoint with a truncated file is skipped and logged."""
    checkpoints = tmp_path / "run"
    for step in (2, 10, 8):
        folder = checkpoints / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"weight": torch.arange(100.0)}, folder / "model.safetensors")
        for file in ("optimizer.pt", "training_args.bin", "rng_state.pth"):
            torch.save({"step": torch.arange(100.0)}, folder / file)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (checkpoints / "checkpoint-11.old").mkdir()
    assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-10")
    path = checkpoints / "checkpoint-10" / name
    data = path.read_bytes()
    for kept in (0.99, 0.5, 0.0):
        path.write_bytes(data[: int(kept * len(data))])
        assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-8")
    assert caplog.text.count(f"checkpoint-10 is incomplete ({name} is truncated)") == 3
    (checkpoints / "checkpoint-8" / "trainer_state.json").unlink()
    assert last_checkpoint(checkpoints) == str(checkpoints / "checkpoint-2")
    assert "no trainer_state.json, which is written last" in caplog.text
    assert last_checkpoint(checkpoints / "none") is None
