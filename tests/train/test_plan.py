"""The plan of a recipe, made without weights: parameters, memory, steps and disk, on any number of GPUs."""

import dataclasses
import shutil

import pytest
import torch
from conftest import edit_json

from arcaligner import ArcAlignerForCausalLM
from arcaligner.cli.app import app
from arcaligner.train.plan import (
    GATING_FACTOR,
    GIB,
    activation_bytes,
    empty_aligner,
    lines_of,
    model_config,
    num_encoder_lora,
    num_parameters,
    plan_stages,
)
from arcaligner.train.stages import find_recipe, read_stages

MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"


def plans(recipe, num_gpus, only=None, overrides=None, device=None):
    return plan_stages(read_stages(find_recipe(recipe), None, overrides, device=device), only, num_gpus)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Makes all models missing on this machine."""
    monkeypatch.setenv("ARCALIGNER_MODELS", str(tmp_path / "models"))


def test_meta_7b_aligner_has_sizes(offline):
    """Without weights, the parts have the sizes of Mistral-7B with a LoRA of rank 128 on its 224 linear layers."""
    model = empty_aligner(model_config(MISTRAL), "gating", encoder_hidden_size=4096, lora_r=128)
    assert all(parameter.is_meta for parameter in model.parameters())
    sizes = {"lora": 0, "slot_gate": 0, "projector": 0, "backbone": 0}
    for name, parameter in model.named_parameters():
        part = next((part for part in sizes if part in name and model.is_aligner_key(name)), "backbone")
        sizes[part] += parameter.numel()
    of_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert sizes["lora"] == 32 * 128 * of_layer
    assert sizes["slot_gate"] == 32 * (4096 * 64 + 64 + 64 + 1)
    assert sizes["backbone"] == 7_241_732_096
    assert all(parameter.requires_grad == model.is_aligner_key(name) for name, parameter in model.named_parameters())
    assert num_parameters(model_config("Salesforce/SFR-Embedding-Mistral")) == 7_241_732_096 - 32000 * 4096


def test_the_lora_of_an_encoder(offline):
    """The LoRA is on all linear layers of the six layers of MiniLM, and not on the pooler."""
    config = model_config("sentence-transformers/all-MiniLM-L6-v2")
    assert num_encoder_lora(config, 2) == 2 * 6 * (4 * (384 + 384) + 2 * (384 + 1536))


# On one H200: batches of 8, GiB at the peak, of which weights, gradients and Adam are 19.05.
MEASURED = ((8 * 134, 8 * 4, 1.0, 23.3), (8 * 62, 8 * 12, 1.0, 21.2), (8 * 62, 8 * 12, GATING_FACTOR, 23.3))


@pytest.mark.parametrize("positions, slots, factor, peak", MEASURED)
def test_activations_as_measured(offline, positions, slots, factor, peak):
    """The estimate is within a fifth of the memory that a GPU used beyond the weights."""
    kept = factor * activation_bytes(model_config(MISTRAL), positions, slots, itemsize=2, layers=32) / GIB
    assert abs(kept - (peak - 19.05)) < 0.2 * (peak - 19.05)


def test_a_plan_of_the_paper(offline):
    """Steps are those of the paper's tables, and both 7B models are counted."""
    stage_plans = plans("mistral_7b", num_gpus := 4)
    assert [plan.accumulated for plan in stage_plans] == [8, 2, 2]
    assert [(plan.global_batch, plan.steps) for plan in stage_plans] == [(256, 782), (64, 1414), (64, 1414)]
    assert [plan.examples.number for plan in stage_plans] == [200_000, 90_447, 90_447]
    first, _, last = stage_plans
    assert 0 < last.num_trained - first.num_trained == 32 * (4096 * 64 + 64 + 64 + 1)
    for plan in stage_plans:
        memory = plan.memory
        assert memory.backbone == 2 * 7_241_732_096 and memory.encoder == 2 * (7_241_732_096 - 32000 * 4096)
        assert memory.with_checkpointing < memory.activations / 5
        assert plan.bytes_needed == memory.fixed + memory.activations
    assert last.memory.aligner == 16 * last.num_trained
    assert first.hours(1000.0) * num_gpus == pytest.approx(782 * 256 * 104 / 1000 / 3600)
    assert 0 < first.gigabytes["downloaded data"] < 0.5  # of 12 GB of Wikipedia


def test_activation_checkpointing_counts(offline):
    """On one GPU a step has the same number of examples, and needs less memory with checkpointing."""
    (plan,) = plans("mistral_7b", 1, only=3, overrides=["--activation_checkpointing", "true"])
    assert (plan.global_batch, plan.accumulated) == (64, 8)
    assert plan.bytes_needed == plan.memory.fixed + plan.memory.with_checkpointing


def test_batches_of_tokens_are_planned(write_recipe, tmp_path):
    """Tokens per batch decide memory and time, whatever the number of examples."""
    plans = []
    for number, keys in enumerate(({"batch_tokens": 4000}, {"batch_tokens": 8000}, {"per_device_train_batch_size": 8})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (_, path) = write_recipe("grounding", tmp_path / "out", gradient_accumulation_steps=2, **keys)
        shutil.copy(path, folder / "2_grounding.yaml")
        plans += plan_stages(read_stages(folder), None, 1)
    small, large, fixed = plans
    assert 2 * small.memory.activations == pytest.approx(large.memory.activations, rel=1e-3)
    assert small.memory.activations == pytest.approx(fixed.memory.activations * 4000 / (8 * 512), rel=1e-3)
    assert small.hours(100.0) == pytest.approx(4 * 2 * 4000 / 100 / 3600)
    assert "2 batches, each of as many examples as fit into 4,000 tokens" in "\n".join(lines_of([small]))


def test_time_limit_is_planned(offline):
    (plan,) = plans("mistral_7b", 4, only=1)
    limited = dataclasses.replace(plan, max_seconds=480)
    assert limited.hours(1.0) == pytest.approx(480 / 3600)
    assert limited.hours(1e9) == plan.hours(1e9) < limited.hours(1.0)
    assert dataclasses.replace(limited, steps=None).hours(1e9) == pytest.approx(480 / 3600)
    assert f"{plan.steps:,}, or as many as 480 seconds allow" in "\n".join(lines_of([limited]))


def test_batches_that_do_not_divide(offline):
    """A number of GPUs that does not divide the batch is refused before anything is counted."""
    with pytest.raises(ValueError, match="is 256; .* the number of processes to 1, 2, 4, 8, 16 or 32, or"):
        plans("mistral_7b", 3)


def test_missing_data_are_named(offline, tmp_path):
    """A missing file is named, as in training."""
    with pytest.raises(FileNotFoundError, match=f"There is no file {tmp_path}/recon_train.jsonl.gz.*prepare_data"):
        plans("smollm2_135m", 1, overrides=["--data_dir", str(tmp_path)])


def test_models_of_unknown_size(offline, tmp_path, monkeypatch):
    """A model that is not published and cannot be reached is named, with what a gated model needs."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="configuration of org/gated is neither on this machine .*`hf auth login`"):
        model_config("org/gated")


def test_examples_are_measured(write_recipe, tmp_path):
    """If the data are files and the tokenizer is on this machine, examples are counted and measured."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    (_, path) = write_recipe("grounding", tmp_path / "out", per_device_train_batch_size=2, max_steps=-1)
    shutil.copy(path, folder / "2_grounding.yaml")
    (plan,) = plan_stages(read_stages(folder), None, 1)
    assert plan.examples.is_measured and plan.examples.number == 12 and plan.steps == 18
    assert 20 < plan.examples.mean < plan.examples.longest == 512


def test_a_stage_from_a_checkpoint(write_recipe, tmp_path, checkpoint_dir):
    """A stage that starts from a checkpoint has the sizes of that checkpoint."""
    folder, start = tmp_path / "recipe", shutil.copytree(checkpoint_dir, tmp_path / "start")
    folder.mkdir()
    edit_json(start / "config.json", digests=None, training_stage="reconstruction")
    (_, path) = write_recipe("grounding", tmp_path / "out", model=start)
    shutil.copy(path, folder / "2_grounding.yaml")
    (plan,) = plan_stages(read_stages(folder), None, 1)
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint_dir)
    model.set_stage("grounding")
    assert plan.num_trained == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_lines_and_a_busy_card(offline, monkeypatch):
    """Memory that another process uses and memory that the GPU lacks give different errors."""
    stage_plans = plans("mistral_7b", 4, only=1)
    text = "\n".join(lines_of(stage_plans, tokens_per_second=5000))
    assert "256 examples: 4 GPUs x 8 accumulated batches of 8" in text and "17 minutes at 5,000 tokens a second" in text
    assert text.endswith("This machine has no GPU, so it was not checked whether the memory is enough.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    memory = {"free": 80 * GIB, "total": 80 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: tuple(memory.values()))
    assert lines_of(stage_plans)[-1] == "Card: 80.0 of 80.0 GiB are free, which is enough."
    memory["free"] = 10 * GIB
    assert "GiB are needed. Other processes use the rest; wait until they end. To use" in lines_of(stage_plans)[-1]
    memory["total"] = 20 * GIB
    assert "are needed. To use less memory, append `-- --activation_checkpointing true`" in lines_of(stage_plans)[-1]
    memory["total"] = memory["free"] = GIB
    stage_plans = [dataclasses.replace(plan, activation_checkpointing=True) for plan in stage_plans]
    assert "are needed. To use less memory, lower `per_device_train_batch_size`" in lines_of(stage_plans)[-1]


def test_dry_run_prints_the_plan(offline, capsys, monkeypatch):
    """`arcaligner train --dry-run` prints the plan and starts nothing."""
    monkeypatch.setattr("arcaligner.train.stages.run_stages", lambda *args: pytest.fail("training began"))
    app(["train", "--recipe", "mistral_7b", "--dry-run", "--gpus", "2", "--stage", "2"], standalone_mode=False)
    assert "64 examples: 2 GPUs x 4 accumulated batches of 8" in capsys.readouterr().out
    with pytest.raises(ValueError, match="work with `--dry-run`"):
        app(["train", "--recipe", "mistral_7b", "--gpus", "2"], standalone_mode=False)
    with pytest.raises(ValueError, match="`--accelerate` has no effect with `--dry-run`"):
        app(["train", "--recipe", "mistral_7b", "--dry-run", "--accelerate", "ddp"], standalone_mode=False)


def test_device_gpu_overrides_keys():
    """`--device gpu` sets keys of all stages and of single ones; the command line overrides them."""
    stages = read_stages(find_recipe("smollm2_135m"), overrides=["--compile_layers", "true"], device="gpu")
    for stage, batch in zip(stages, (32, 12, 24), strict=True):
        keys = dict(zip(stage.arguments[::2], stage.arguments[1::2], strict=True))
        assert keys["--use_cpu"] == "false" and keys["--dtype"] == "bfloat16" and keys["--compile_layers"] == "true"
        assert keys["--per_device_train_batch_size"] == str(batch)
    with pytest.raises(ValueError, match="recipe mistral_7b has no gpu.yaml.*Leave `--device` out"):
        read_stages(find_recipe("mistral_7b"), device="gpu")
