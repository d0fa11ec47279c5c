"""The shipped configuration that no test runs, as accelerate itself reads it; `test_distributed.py` runs the others."""

import inspect
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin

ZERO3 = Path(__file__).parents[2] / "train" / "accelerate" / "zero3.yaml"


def test_zero_is_stage_3_and_saves_whole_weights():
    command = ["--config_file", str(ZERO3), "--num_machines", "2", "-m", "arcaligner.train.sft", "--config", "x"]
    args = _validate_launch_command(launch_command_parser().parse_args(command))[0]
    assert (args.use_deepspeed, args.num_processes, args.num_machines) == (True, 4, 2)
    assert (int(args.zero_stage), args.zero3_init_flag, args.zero3_save_16bit_model) == (3, True, True)
    assert args.mixed_precision == "no"  # the recipe's `bf16` decides
    # set by the trainer, for any backbone, and handed on to deepspeed under this name
    assert "transformer_moe_cls_names" in inspect.signature(DeepSpeedPlugin).parameters
