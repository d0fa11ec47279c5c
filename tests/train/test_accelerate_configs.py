"""The shipped configurations for `accelerate launch`, as accelerate itself reads them; no process is started."""

import inspect
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin

CONFIGS = Path(__file__).parents[2] / "train" / "accelerate"


def read(name: str, *options: str):
    command = ["--config_file", str(CONFIGS / f"{name}.yaml"), *options, "-m", "arcaligner.train.sft", "--config", "x"]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_accelerate_reads_the_configuration_and_the_command_line_over_it(name):
    args = read(name, "--num_processes", "8", "--num_machines", "2")
    assert (args.num_processes, args.num_machines, args.training_script_args) == (8, 2, ["--config", "x"])
    assert read(name).num_processes == 4
    kinds = {"ddp": args.multi_gpu, "fsdp2": args.use_fsdp, "zero3": args.use_deepspeed}
    assert [kind for kind, used in kinds.items() if used] == [name]
    assert args.mixed_precision == "no"  # the recipe's `bf16` decides


def test_zero_is_stage_3_and_saves_whole_weights():
    args = read("zero3")
    assert (int(args.zero_stage), args.zero3_init_flag, args.zero3_save_16bit_model) == (3, True, True)
    # set by the trainer, for any backbone, and handed on to deepspeed under this name
    assert "transformer_moe_cls_names" in inspect.signature(DeepSpeedPlugin).parameters
