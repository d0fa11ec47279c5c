"""A broken run: where it goes on from, that it ends as if it had not been broken, and what a kill leaves."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_recipes import RecipeWriter, parameters, run

from arcaligner.train import sft
from arcaligner.train.resuming import last_checkpoint
from arcaligner.train.trainer import AlignerTrainer

STEPS = {"max_steps": 8, "save_steps": 2}  # three steps an epoch


class InterruptError(Exception):
    pass


@pytest.fixture(scope="module")
def write_recipe(tmp_path_factory, base_model_dir, encoder_dir) -> RecipeWriter:
    return RecipeWriter(tmp_path_factory.mktemp("recipes"), base_model_dir, encoder_dir)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, write_recipe) -> Path:
    """The folder of a run that nothing broke."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(write_recipe("grounding", folder, **STEPS))
    return folder


def num_tokens(folder: Path) -> list[float]:
    """Tokens trained on so far, at each entry of the log."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["num_tokens"] for entry in history if "num_tokens" in entry]


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "step, checkpoint",
    [
        (3, "checkpoint-2"),  # in the first epoch
        (5, "checkpoint-4"),  # in the second
        (7, "checkpoint-6"),  # where the third begins
    ],
)
def test_a_broken_run_ends_as_if_it_was_not(tmp_path, write_recipe, whole_run, monkeypatch, caplog, step, checkpoint):
    arguments = write_recipe("grounding", tmp_path / "run", **STEPS)

    def stop(self, *args, **kwargs):
        if self.state.global_step == step:
            raise InterruptError
        return original(self, *args, **kwargs)

    original = AlignerTrainer.training_step
    with monkeypatch.context() as patch, pytest.raises(InterruptError):
        patch.setattr(AlignerTrainer, "training_step", stop)
        run(arguments)
    with caplog.at_level("INFO"):
        run(arguments)
    assert f"going on from {tmp_path / 'run' / checkpoint}" in caplog.text
    assert same_tensors(parameters(tmp_path / "run"), parameters(whole_run))
    assert num_tokens(tmp_path / "run") == num_tokens(whole_run)


def test_a_broken_run_goes_on_with_no_other_settings(tmp_path, write_recipe, monkeypatch):
    arguments = write_recipe("grounding", tmp_path / "run", **STEPS)

    def stop(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise InterruptError
        return original(self, *args, **kwargs)

    original = AlignerTrainer.training_step
    monkeypatch.setattr(AlignerTrainer, "training_step", stop)
    with pytest.raises(InterruptError):
        run(arguments)
    for key, was, value in [("learning_rate", "0.01", "0.5"), ("seed", "None", "7")]:
        with pytest.raises(ValueError, match=f"run was begun with .*`{key}` was {was} and is now {value}"):
            run([*arguments, f"--{key}", value])
    with pytest.raises(InterruptError):
        run([*arguments, "--save_steps", "1"])


def test_a_run_that_broke_when_it_was_trained_is_only_saved(tmp_path, write_recipe, whole_run, monkeypatch):
    arguments = write_recipe("grounding", tmp_path / "run", **STEPS, lr_scheduler_type="constant")

    def stop(*args):
        raise InterruptError

    with monkeypatch.context() as patch, pytest.raises(InterruptError):
        patch.setattr(sft, "save_stage", stop)
        run(arguments)
    run(arguments)
    assert same_tensors(parameters(tmp_path / "run"), parameters(tmp_path / "run" / "checkpoint-8"))
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 8


@pytest.fixture
def run_copy(tmp_path, whole_run) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def test_the_last_checkpoint_is_that_of_the_highest_step(run_copy, tmp_path):
    (run_copy / "checkpoint-4").rename(run_copy / "checkpoint-10")
    (run_copy / "checkpoint-11.old").mkdir()
    assert last_checkpoint(run_copy) == str(run_copy / "checkpoint-10")
    assert last_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize(
    "name",
    ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"],
)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_checkpoint_with_a_cut_file_is_passed_over_and_logged(run_copy, caplog, name, kept):
    path = run_copy / "checkpoint-8" / name
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    assert last_checkpoint(run_copy) == str(run_copy / "checkpoint-6")
    assert f"checkpoint-8 is not whole ({name} is cut)" in caplog.text


def test_a_checkpoint_without_its_last_file_is_passed_over_and_logged(run_copy, caplog):
    for step in (6, 8):
        (run_copy / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert last_checkpoint(run_copy) == str(run_copy / "checkpoint-4")
    assert caplog.text.count("no trainer_state.json, which is written last") == 2


KILLED = """
import os, signal, sys
import torch
from arcaligner.train import sft

def save(obj, path, *args, **kwargs):
    original(obj, path, *args, **kwargs)
    if "checkpoint-4" in str(path) and {name!r} in str(path):
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

original, torch.save = torch.save, save
sft.main(*sft.parse(sys.argv[1:]))
"""


def test_a_run_that_was_killed_while_it_saved_ends_as_if_it_was_not(tmp_path, write_recipe, whole_run, caplog):
    arguments = write_recipe("grounding", tmp_path / "run", **STEPS)
    killed = subprocess.run([sys.executable, "-c", KILLED.format(name="optimizer.pt"), *arguments], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with caplog.at_level("INFO"):
        run(arguments)
    assert f"{tmp_path / 'run' / 'checkpoint-4'} is not whole" in caplog.text
    assert f"going on from {tmp_path / 'run' / 'checkpoint-2'}" in caplog.text
    assert same_tensors(parameters(tmp_path / "run"), parameters(whole_run))


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, write_recipe, whole_run, monkeypatch):
    arguments = write_recipe("grounding", tmp_path / "run", **STEPS)

    def save(obj, path, *args, **kwargs):
        if "checkpoint-4" in str(path) and str(path).endswith("optimizer.pt"):
            Path(path).write_bytes(b"PK")
            raise OSError("No space left on device")
        original(obj, path, *args, **kwargs)

    original = torch.save
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(torch, "save", save)
        run(arguments)
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2")
    run(arguments)
    assert same_tensors(parameters(tmp_path / "run"), parameters(whole_run))
