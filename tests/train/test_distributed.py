"""Training in two processes on the CPU, launched by accelerate with the shipped configuration.

One launch does all runs, because starting Python twice takes longer than the training.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_recipes import COMPARED, logs, parameters, run

from arcaligner.train.run import last_checkpoint

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("distributed_worker.py")
CONFIGS = Path(__file__).parents[2] / "train" / "accelerate"
# Two turns side by side in each of six rows. All gates learn in tests/test_training_properties.py.
TURNS = {"logging_steps": 1, "max_steps": 4, "max_questions": 2, "ddp_timeout": 60}

# Three steps an epoch, each process and batch at a rate of its own.
LONG = {"per_device_train_batch_size": 2, "max_steps": 8, "save_steps": 2, "ddp_timeout": 60}
LONG["tokens_per_slot"] = [2, 4, "segment"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def launch(config: Path, runs: list[dict], folder: Path) -> list[list[dict]]:
    """Runs `runs` in two processes; returns the reports of each process on each run."""
    (folder / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
    command += ["--main_process_port", str(free_port()), str(WORKER), str(folder / "runs.json"), str(folder)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()[-5000:]
    by_process = [json.loads((folder / f"{process}.json").read_text()) for process in (0, 1)]
    return list(map(list, zip(*by_process, strict=True)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, write_recipe) -> SimpleNamespace:
    """One run in two processes and in one, one that breaks, and one with a NaN: `root` has their folders, `reports` the
    report of each process by the name of the run."""
    root = tmp_path_factory.mktemp("distributed")
    plan = {}
    for processes in (2, 1):
        keys = COMPARED | TURNS | {"per_device_train_batch_size": 2 // processes}
        name = f"grounding-{processes}"
        plan[name] = {"arguments": write_recipe("grounding", root / name, **keys)}
    broken = write_recipe("grounding", root / "broken", **LONG)
    plan["whole"] = {"arguments": write_recipe("grounding", root / "whole", **LONG)}
    plan["interrupted"] = {"arguments": broken, "interrupt_at": 5}
    plan["resumed"] = {"arguments": broken}
    plan["nan"] = {"arguments": write_recipe("grounding", root / "nan", **LONG), "nan_at": 3}
    in_two = {name: entry for name, entry in plan.items() if not name.endswith("-1")}
    reports = launch(CONFIGS / "ddp.yaml", list(in_two.values()), root)
    run(plan["grounding-1"]["arguments"])
    return SimpleNamespace(root=root, reports=dict(zip(in_two, reports, strict=True)))


def test_two_processes_equal_one(runs):
    """Two processes train as one with the same rows."""
    for key in ("loss", "grad_norm"):
        entries = (logs(runs.root / f"grounding-{processes}", key) for processes in (2, 1))
        two, one = (torch.tensor([entry[key] for entry in run_entries]) for run_entries in entries)
        # Rounding of other kernels grows over four steps at this learning rate: 1.5e-5 on a CPU with avx512_bf16.
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    assert (one.diff().abs() > 1e-3).all()
    two, one = (parameters(runs.root / f"grounding-{processes}") for processes in (2, 1))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


def test_epochs_reorder_rows(runs):
    """Each epoch uses each row once, in another order."""
    batches = list(zip(*(report["rows"] for report in runs.reports["whole"]), strict=True))
    orders = [[row for batch in batches[start : start + 3] for rows in batch for row in rows] for start in (0, 3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(f"row-{number}" for number in range(12))
    assert orders[0] != orders[1]


def test_resumed_run_equals_uninterrupted(runs):
    assert [report["error"] for report in runs.reports["interrupted"]] == ["interrupted"] * 2
    whole, resumed = runs.reports["whole"], runs.reports["resumed"]
    assert [report["rows"] for report in resumed] == [report["rows"][4:] for report in whole]
    for folder in ("checkpoint-6", "checkpoint-8", "."):
        whole, broken = (parameters(runs.root / name / folder) for name in ("whole", "broken"))
        torch.testing.assert_close(broken, whole, rtol=0, atol=0)


def test_nan_loss_stops_all_processes(runs):
    """A NaN loss in one process stops all, and names its rows."""
    first, last = runs.reports["nan"]
    message = f"The loss is nan at step 3 for the rows with the ids {last['rows'][-1]}; expected a finite number. Lower"
    assert first["error"].startswith(message) and last["error"].startswith(message)
    assert last_checkpoint(runs.root / "nan") == str(runs.root / "nan" / "checkpoint-2")
    assert all(tensor.isfinite().all() for tensor in parameters(runs.root / "nan" / "checkpoint-2").values())
    assert not (runs.root / "nan" / "config.json").exists()


def test_first_process_writes(runs, write_recipe):
    """Only the first process writes and makes the examples."""
    for name, (first, second) in runs.reports.items():
        assert not any(path.startswith((str(runs.root), str(write_recipe.folder))) for path in second["written"]), name
        assert "model.safetensors" in {Path(path).name for path in first["written"]}, name
    cache, (first, _) = str(write_recipe.folder / "cache"), runs.reports["grounding-2"]
    assert any(path.startswith(cache) for path in first["written"])
    one, two = ({path.name for path in (runs.root / f"grounding-{n}" / "checkpoint-4").iterdir()} for n in (1, 2))
    assert two - one == {"rng_state_0.pth", "rng_state_1.pth"} and one - two == {"rng_state.pth"}


def test_sharded_model_trains(runs, write_recipe, tmp_path):
    """A sharded model trains, resumes and is saved as any other."""
    arguments = write_recipe("grounding", tmp_path / "run", **LONG)
    plan = [{"arguments": arguments, "interrupt_at": 5}, {"arguments": arguments}]
    interrupted, resumed = launch(CONFIGS / "fsdp2.yaml", plan, tmp_path)
    assert [report["error"] for report in interrupted] == ["interrupted"] * 2
    assert [report["rows"] for report in resumed] == [report["rows"][4:] for report in runs.reports["whole"]]
    assert not resumed[1]["written"]
    for folder in ("checkpoint-8", "."):
        whole, sharded = runs.root / "whole" / folder, tmp_path / "run" / folder
        torch.testing.assert_close(parameters(sharded), parameters(whole), rtol=1e-4, atol=1e-6)
        more = {path.name for path in sharded.iterdir()} - {path.name for path in whole.iterdir()}
        assert more <= {"pytorch_model_fsdp.bin", "optimizer.bin"}
        configs = [json.loads((run_folder / "config.json").read_text()) for run_folder in (whole, sharded)]
        for config in configs:
            del config["digests"]["model.safetensors"]  # they are close, not equal
        assert configs[0] == configs[1]
