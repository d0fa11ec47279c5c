"""All stages by one command: finished ones are skipped, interrupted ones continue, and what does not fit is refused."""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from arcaligner.train import stages
from arcaligner.train.run import read_keys, run_settings
from arcaligner.train.stages import RECIPES, SCRIPT, find_recipe, read_stages, run_stages, run_to_end

NAMES = ["1_reconstruction", "2_grounding", "3_gating"]


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """A recipe that is never trained: three files with one or two keys."""
    monkeypatch.chdir(tmp_path)
    folder = Path("recipe")
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.yaml").write_text(f"output_dir: runs/{name}\nlearning_rate: 1.0e-3\nseed: 1\n")
    (folder / "full_text.yaml").write_text("output_dir: runs/full_text\n")
    return folder


@pytest.fixture
def calls(monkeypatch) -> list[list[str]]:
    """The commands that would have been run; each leaves the folder of a finished stage."""
    made: list[list[str]] = []

    def finish(command):
        made.append(command)
        settings = run_settings(SCRIPT, command[command.index("arcaligner.train.sft") + 1 :])
        (place := Path(read_keys(settings)["output_dir"])).mkdir(parents=True)
        (place / "recipe.yaml").write_text(settings)
        (place / "config.json").write_text("{}")
        return 0

    monkeypatch.setattr(stages, "run_to_end", finish)
    return made


def trained(calls: list[list[str]]) -> list[str]:
    return [Path(command[command.index("--config") + 1]).stem for command in calls]


def test_stages_run_in_order(recipe, calls):
    """Stages run in order, each from the folder of the one before."""
    run_stages(read_stages(recipe, output="mine", overrides=["--seed", "2"]))
    start = [sys.executable, "-m", "arcaligner.train.sft", "--config"]
    for call, name, before in zip(calls, NAMES, [None, *NAMES], strict=False):
        from_before = ["--model_name_or_path", f"mine/{before}"] if before else []
        assert call == [*start, f"recipe/{name}.yaml", "--output_dir", f"mine/{name}", *from_before, "--seed", "2"]
    calls.clear()
    run_stages(read_stages(recipe))  # the recipe's own folders
    assert [command[3:] for command in calls] == [["--config", f"recipe/{name}.yaml"] for name in NAMES]


def test_finished_stages_are_skipped(recipe, calls, caplog):
    """Finished stages are skipped if their settings are the same; a single one can be trained with its own settings."""
    run_stages(read_stages(recipe))
    shutil.rmtree("runs/3_gating")
    with caplog.at_level("INFO"):
        run_stages(read_stages(recipe))
    assert trained(calls) == [*NAMES, "3_gating"]
    assert "skipped 1_reconstruction, which is finished; to train it again, delete runs/1_reconstruction" in caplog.text
    assert "training 3_gating; its folder is runs/3_gating" in caplog.text
    shutil.rmtree("runs/3_gating")
    run_stages(read_stages(recipe, overrides=["--seed", "2"], only=3))
    assert trained(calls)[4:] == ["3_gating"] and calls[-1][-2:] == ["--seed", "2"]
    with pytest.raises(ValueError, match="runs/1_reconstruction was started .* `seed` was 1 and is now 2"):
        run_stages(read_stages(recipe, overrides=["--seed=2"]))
    (recipe / "2_grounding.yaml").write_text("output_dir: runs/2_grounding\nlearning_rate: 0.5\nseed: 1\n")
    shutil.rmtree("runs/3_gating")
    message = "runs/2_grounding was started with different settings: `learning_rate` was 0.001 and is now 0.5.*--output"
    with pytest.raises(ValueError, match=message):
        run_stages(read_stages(recipe))
    shutil.rmtree("runs/1_reconstruction")
    with pytest.raises(ValueError, match="runs/2_grounding is finished, but 1_reconstruction, the stage before it"):
        run_stages(read_stages(recipe, overrides=["--learning_rate", "1.0e-3"]))
    assert len(calls) == 5  # settings are looked at before anything runs


def test_single_stage_needs_finished_start(recipe, calls):
    message = "2_grounding starts from the result of 1_reconstruction in mine/1_reconstruction, but .* with `--stage 1`"
    Path("mine/1_reconstruction/checkpoint-2").mkdir(parents=True)  # broken
    with pytest.raises(ValueError, match=message):
        run_stages(read_stages(recipe, "mine", only=2))
    shutil.rmtree("mine")
    for number in (1, 2):
        run_stages(read_stages(recipe, "mine", only=number))
    assert trained(calls) == NAMES[:2] and calls[1][-2:] == ["--model_name_or_path", "mine/1_reconstruction"]
    path = recipe / "3_gating.yaml"  # a start that the recipe names
    path.write_text(path.read_text() + "model_name_or_path: runs/2_grounding/\n")
    with pytest.raises(
        ValueError, match="3_gating starts from the result of 2_grounding in runs/2_grounding, but 2_grounding is not"
    ):
        run_stages(read_stages(recipe, only=3))
    run_stages(read_stages(recipe, overrides=["--model_name_or_path", "user/aligner"], only=3))
    assert trained(calls)[2:] == ["3_gating"]


@pytest.mark.parametrize("code, end", [(3, "failed with exit code 3"), (-9, "was killed by signal 9")])
def test_failed_stage_stops_others(recipe, monkeypatch, code, end):
    made = []
    monkeypatch.setattr(stages, "run_to_end", lambda command: made.append(command) or code)
    with pytest.raises(ChildProcessError, match=f"1_reconstruction {end}"):
        run_stages(read_stages(recipe))
    assert len(made) == 1


@pytest.mark.parametrize("num_devices", [0, 3])
def test_accelerate_launches_stages(recipe, calls, tmp_path, monkeypatch, num_devices):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    run_stages(read_stages(recipe, only=1), accelerate="ddp")
    shipped = str(RECIPES.parent / "accelerate" / "ddp.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    numbers = ["--num_processes", str(num_devices)] if num_devices else []
    assert calls[0][: 7 + len(numbers)] == [*launch, shipped, *numbers, "-m", "arcaligner.train.sft"]
    config = tmp_path / "own.yaml"
    config.touch()
    run_stages(read_stages(recipe, only=2), accelerate=str(config))
    assert calls[1][:6] == [*launch, str(config), "-m"]
    with pytest.raises(
        ValueError, match="no configuration 'fsdp3' of accelerate; expected one of cpu, ddp, fsdp2, or the path"
    ):
        run_stages(read_stages(recipe), accelerate="fsdp3")


def test_mistakes_are_named(recipe):
    for key, instead in {"--output_dir": "output", "--config": "recipe", "--model_name_or_path": "stage"}.items():
        for arguments in ([key, "x"], [f"{key}=x"]):
            with pytest.raises(ValueError, match=f"`{key}` cannot be given.*`--{instead}\\b"):
                read_stages(recipe, overrides=arguments)
    with pytest.raises(
        ValueError, match="no recipe 'none'; expected one of all_positions, llama_3_1_8b, .*tiny, xrag, or"
    ):
        find_recipe("none")
    with pytest.raises(ValueError, match="recipe has no stage 4; expected one of 1, 2, 3"):
        read_stages(recipe, only=4)
    for text, message in (("seed: 1\n", "has no `output_dir`"), ("seed: [\n", "is not YAML"), ("- 1", "is not YAML")):
        (recipe / "2_grounding.yaml").write_text(text)
        with pytest.raises(ValueError, match=f"2_grounding.yaml {message}"):
            read_stages(recipe)


def test_recipes_have_names_or_folders(recipe):
    for name, folder in (("recipe", recipe), ("smollm2_135m", RECIPES / "smollm2_135m")):  # each has a full_text.yaml
        assert find_recipe(name) == folder
        stages = read_stages(folder)
        assert [(stage.number, stage.name) for stage in stages] == list(enumerate(NAMES, start=1))
    assert [stage.start for stage in stages] == [None, *stages[:2]]


@pytest.fixture
def interruptible():
    """Handles interrupts as in a terminal; a background job would ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stage_ends_with_its_command(tmp_path, interruptible, number):
    """A stage ends with the command that runs it."""
    child = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, 'w')); "
        f"os.kill(os.getppid(), {number}); signal.pause()"
    )
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else contextlib.nullcontext():
        assert run_to_end([sys.executable, "-c", child]) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) == former
