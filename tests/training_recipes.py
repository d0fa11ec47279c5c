"""Recipes on tiny models for the tests, and the results of a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from training_rows import passage_rows, question_rows, write_rows

from arcaligner import ArcAlignerForCausalLM
from arcaligner.train import sft
from arcaligner.train.recipe import parse_recipe
from arcaligner.train.sft import AlignerTrainer
from arcaligner.train.stages import SCRIPT

# For runs that are compared: plain gradient descent, as Adam turns gradients near zero into rounding errors.
COMPARED = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 100.0, "train_sampling_strategy": "random"}
COMPARED |= {"tokens_per_slot": [4], "aligner": {"lora_r": 4, "gate_hidden_size": 8, "lora_dropout": 0.0}}


class RecipeWriter:
    """Writes recipes into `folder`, all on the same twelve rows and with the same cache of examples."""

    def __init__(self, folder: Path, base_model_dir: Path, encoder_dir: Path):
        self.folder, self.base_model_dir, self.encoder_dir = folder, base_model_dir, encoder_dir
        questions = write_rows(folder / "questions.jsonl", question_rows(12))
        passages = write_rows(folder / "passages.jsonl.gz", passage_rows(12))
        self.files = {"reconstruction": passages, "grounding": questions, "gating": questions}

    def __call__(self, stage: str, output_dir: Path, model: Path | None = None, **changes) -> list[str]:
        """Arguments for `train.sft`: `stage`, from `model` or the base model, with other keys `changes`."""
        keys = {"stage": stage, "model_name_or_path": str(model or self.base_model_dir), "output_dir": str(output_dir)}
        keys |= {"train_files": {self.files[stage]: 1.0}, "examples_cache_dir": str(self.folder / "cache")}
        keys |= {"data_dir": "", "use_cpu": True, "bf16": False, "report_to": "none", "learning_rate": 0.01}
        keys |= {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 2, "save_steps": 2}
        if model is None:
            keys["processor"] = {"encoder_name_or_path": str(self.encoder_dir), "encoder_hidden_size": 12}
            keys["aligner"] = {"lora_r": 4, "gate_hidden_size": 8, "lora_dropout": 0.1}
        path = self.folder / f"{stage}-{len(list(self.folder.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump(keys | changes))
        return ["--config", str(path)]


def parse(arguments: list[str]) -> tuple:
    """The arguments of `sft.train`."""
    return parse_recipe(SCRIPT, sft.KINDS, arguments)


def run(arguments: list[str]) -> None:
    """Trains in this process."""
    sft.train(*parse(arguments))


def run_until(step: int, arguments: list[str], run: Callable = run, trainer: type = AlignerTrainer) -> None:
    """Trains in this process and stops after `step` steps."""
    original = trainer.training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step == step:
            raise InterruptedError
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(trainer, "training_step", training_step)
        run(arguments)


def logs(folder: Path, key: str) -> list[dict]:
    """Log entries of the run in `folder` that have `key`."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if key in entry]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the aligner in `folder`, by name."""
    model = ArcAlignerForCausalLM.from_pretrained(str(folder))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
