"""The benchmark of training speed: all arms learn the same targets with the same loss."""

import json
import runpy
import sys

import pytest
import torch
from training_recipes import RecipeWriter, parse
from training_rows import question_rows, write_rows

from arcaligner.benchmarks import throughput
from arcaligner.benchmarks.throughput import make_arms


@pytest.fixture(scope="module")
def writer(tmp_path_factory, base_model_dir, encoder_dir):
    return RecipeWriter(tmp_path_factory.mktemp("throughput"), base_model_dir, encoder_dir)


def arguments(writer, stage="grounding", **changes):
    """Command-line arguments for a recipe of questions about the same passages."""
    rows = [row | {"passages": question_rows(1)[0]["passages"]} for row in question_rows(8)]
    path = write_rows(writer.folder / "shared.jsonl", rows)
    keys = {"train_files": {path: 1.0}, "max_questions": 2, "per_device_train_batch_size": 2, "max_steps": 2}
    keys |= {"eval_files": {path: 1.0}, "eval_strategy": "steps", "eval_steps": 1}  # not measured
    keys |= {"dtype": "bfloat16", "attn_implementation": "eager", "compile_layers": True}
    keys |= {"aligner": {"lora_r": 4, "gate_hidden_size": 8, "lora_dropout": 0.0}}
    return writer(stage, writer.folder / "run", **keys | changes)


def parsed(writer, **changes):
    return parse(arguments(writer, **changes))


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiling takes half a minute."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)


def test_each_arm_adds_a_setting_and_learns_the_same_targets(writer, uncompiled):
    arms, rows = make_arms(*parsed(writer)[:2])
    assert list(arms) == ["plain", "loss", "dtype", "attention", "turns", "compiled"]
    assert arms["plain"].trainer is arms["loss"].trainer and arms["attention"].trainer is arms["turns"].trainer
    models = {name: arm.trainer.model for name, arm in arms.items()}
    assert [model.dtype for model in models.values()] == [torch.float32] * 2 + [torch.bfloat16] * 4
    kinds = [model.config.text_config._attn_implementation for model in models.values()]
    assert kinds == ["sdpa", "sdpa", "sdpa", "eager", "eager", "eager"]
    sizes = {name: throughput.size_of(arm.batches(rows[0])) for name, arm in arms.items()}
    assert {size["targets"] for size in sizes.values()} == {sizes["plain"]["targets"]}
    assert sizes["turns"]["tokens"] < sizes["attention"]["tokens"]  # the slots once


def test_all_arms_have_the_same_gradients_and_leave_the_weights(writer, uncompiled):
    arms, rows = make_arms(*parsed(writer, dtype="float32")[:2])
    assert list(arms) == ["plain", "loss", "attention", "turns", "compiled"]
    found = []
    for name, arm in arms.items():
        model = arm.trainer.model
        before = {key: value.clone() for key, value in model.state_dict().items()}
        gradients = []
        arm.optimizer.register_step_pre_hook(
            lambda optimizer, *_, gradients=gradients: gradients.extend(
                parameter.grad.flatten() for group in optimizer.param_groups for parameter in group["params"]
            )
        )
        arm.step(arm.batches(rows[0]))
        assert arm.trainer.skip_logits == (name != "plain")
        found.append(torch.cat(gradients))
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert found[0].norm() > 0
    for gradient in found[1:]:
        assert (gradient - found[0]).norm() < 1e-3 * found[0].norm()


def test_the_command_prints_a_table_and_one_json_line(writer, capsys, uncompiled, monkeypatch):
    changes = {"train_files": {writer.files["reconstruction"]: 1.0}, "continues": True}
    monkeypatch.setattr(sys, "argv", ["throughput", *arguments(writer, stage="reconstruction", **changes)])
    runpy.run_module("arcaligner.benchmarks.throughput", run_name="__main__")
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert set(found["arms"]) == {"plain", "loss", "dtype", "attention", "turns", "compiled"}
    assert all(arm["tokens_per_second"]["median"] > 0 for arm in found["arms"].values())
    assert "reconstruction, 2 steps of 2 rows" in printed


@pytest.mark.parametrize(
    "changes, message",
    [({"max_steps": -1}, "`max_steps` is -1"), ({"per_device_train_batch_size": 16}, "at least one batch of 16")],
)
def test_too_few_steps_or_examples_are_refused(writer, changes, message):
    with pytest.raises(ValueError, match=message):
        make_arms(*parsed(writer, **changes)[:2])
