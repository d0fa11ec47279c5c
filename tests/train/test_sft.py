"""The script: three stages, each training its parts only; resuming; saving; refusals."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig
from training_recipes import RecipeWriter, parameters, run
from training_rows import question_rows
from transformers import default_data_collator

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.train import saving
from arcaligner.train.collator import ContextCollator
from arcaligner.train.data import ExampleBuilder, build_dataset
from arcaligner.train.embedding_store import EmbeddingStore
from arcaligner.train.trainer import AlignerTrainer, AlignerTrainingConfig

PARTS = {
    "reconstruction": {"projector", "lora_A", "lora_B"},
    "grounding": {"projector", "lora_A", "lora_B"},
    "gating": {"projector", "lora_A", "lora_B", "slot_gate"},
}


@pytest.fixture(scope="session")
def write_recipe(tmp_path_factory, base_model_dir, encoder_dir) -> RecipeWriter:
    return RecipeWriter(tmp_path_factory.mktemp("recipes"), base_model_dir, encoder_dir)


def moved_parts(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Parts of the aligner with a changed tensor; the full name of one of the base model."""
    names = {name for name in before if not torch.equal(before[name], after[name])}
    return {next((part for part in PARTS["gating"] if part in name), name) for name in names}


def logs(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory, write_recipe) -> dict[str, Path]:
    """The three stages, each from the one before."""
    root = tmp_path_factory.mktemp("runs")
    folders = {stage: root / f"{number}_{stage}" for number, stage in enumerate(PARTS, start=1)}
    run(write_recipe("reconstruction", folders["reconstruction"]))
    run(write_recipe("grounding", folders["grounding"], folders["reconstruction"]))
    run(write_recipe("gating", folders["gating"], folders["grounding"]))
    return folders


def test_each_stage_trains_its_parts_and_nothing_else(stages):
    before = parameters(stages["reconstruction"] / "checkpoint-2")
    for stage in PARTS:
        after = parameters(stages[stage])
        assert moved_parts(before, after) == PARTS[stage]
        before = after


def test_a_stage_starts_from_the_one_before(stages):
    # With a learning rate of 0.01, four steps of Adam move no element by more than 0.05.
    before, after = parameters(stages["grounding"]), parameters(stages["gating"])
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0.05)


def test_a_stage_leaves_a_folder_that_answers(stages):
    processor = ArcAlignerProcessor.from_pretrained(str(stages["gating"]), trust_remote_code=False)
    model = ArcAlignerForCausalLM.from_pretrained(str(stages["gating"]))
    assert model.config.gate_mode == "adaptive"
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": "Who?"}],
        documents=["It was Ada. Nobody else."],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]


def test_a_stage_keeps_its_recipe_and_no_base_weights(stages):
    folder = stages["grounding"]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recipe["stage"] == "grounding" and recipe["max_steps"] == 4
    assert not list(folder.glob(".saving-*"))
    size = (folder / "model.safetensors").stat().st_size
    kept = {name: p for name, p in parameters(folder).items() if "base_layer" not in name}
    aligner = sum(p.nbytes for name, p in kept.items() if any(part in name for part in PARTS["gating"]))
    assert size < 1.5 * aligner + 50_000


def test_logs_tell_speed_and_gates(stages):
    for stage, folder in stages.items():
        entries = [entry for entry in logs(folder) if "loss" in entry]
        assert len(entries) == 2
        for entry in entries:
            assert entry["tokens_per_second"] > 0 and 0 <= entry["mean_token_accuracy"] <= 1
            assert ("refinement_steps" in entry) == ("open_gates" in entry) == (stage == "gating")


def test_an_interrupted_run_ends_as_if_it_was_not(tmp_path, write_recipe, stages, caplog):
    arguments = write_recipe("reconstruction", tmp_path / "run")

    class InterruptError(Exception):
        pass

    def stop(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise InterruptError
        return original(self, *args, **kwargs)

    original = AlignerTrainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignerTrainer, "training_step", stop)
        with pytest.raises(InterruptError):
            run(arguments)
    assert not (tmp_path / "run/config.json").exists()
    run(arguments)
    assert "missing keys" not in caplog.text
    resumed, whole = parameters(tmp_path / "run"), parameters(stages["reconstruction"])
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_held_out_loss_is_logged(tmp_path, write_recipe, stages):
    files = yaml.safe_load((stages["reconstruction"] / "recipe.yaml").read_text())["train_files"]
    run(
        write_recipe(
            "reconstruction",
            tmp_path,
            eval_files=files,
            max_eval_samples=3,
            eval_strategy="steps",
            eval_steps=2,
        )
    )
    losses = [entry["eval_loss"] for entry in logs(tmp_path) if "eval_loss" in entry]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)


@pytest.fixture
def trainer_arguments(tmp_path, processor, model):
    """What an `AlignerTrainer` needs, on two batches of questions."""
    store = EmbeddingStore(tmp_path, "tiny", processor.encoder_hidden_size, processor.encode_segments)
    builder = ExampleBuilder(processor)
    examples = [example for row in question_rows(8) for example in builder.question_examples(row)]
    return {
        "model": model,
        "stage": "grounding",
        "args": AlignerTrainingConfig(
            str(tmp_path / "run"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=4,
            max_steps=2,
        ),
        "data_collator": ContextCollator(store, processor.context_token_id, processor.tokenizer.pad_token_id),
        "train_dataset": build_dataset(examples, store),
        "processing_class": processor,
    }


def test_the_loss_is_that_of_the_whole_model(trainer_arguments):
    trainer = AlignerTrainer(**trainer_arguments)
    collator, rows = trainer.data_collator, list(trainer.train_dataset)
    batch = collator(rows)
    batch.pop("row_ids")
    loss = trainer.compute_loss(trainer.model.eval(), collator(rows))
    torch.testing.assert_close(loss, trainer.model(**batch).loss)
    loss = trainer.compute_loss(trainer.model, collator(rows), num_items_in_batch=100)
    num_targets = (batch["labels"] != -100).sum()
    torch.testing.assert_close(loss, trainer.model(**batch).loss * num_targets / 100)


def test_a_peft_config_is_refused(trainer_arguments):
    with pytest.raises(ValueError, match="LoraConfig.*another adapter"):
        AlignerTrainer(**trainer_arguments, peft_config=LoraConfig())


@pytest.mark.parametrize("collator", [None, default_data_collator])
def test_another_collator_is_refused(trainer_arguments, collator):
    with pytest.raises(ValueError, match="expected a `ContextCollator`"):
        AlignerTrainer(**{**trainer_arguments, "data_collator": collator})


def test_an_unknown_stage_is_refused(trainer_arguments):
    with pytest.raises(ValueError, match="warm-up"):
        AlignerTrainer(**{**trainer_arguments, "stage": "warm-up"})


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_rows(trainer_arguments):
    trainer = AlignerTrainer(**trainer_arguments)
    with torch.no_grad():
        trainer.model.model.projector.up.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"The loss is nan at step 0 for the rows \['row-"):
        trainer.train()


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_changes_a_weight(trainer_arguments):
    trainer = AlignerTrainer(**trainer_arguments)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.model.model.projector.up.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(ValueError, match=r"The gradient norm is (nan|inf) at step 0 for the rows \['row-"):
        trainer.train()
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())


def test_an_error_of_the_model_names_the_rows(trainer_arguments, monkeypatch):
    monkeypatch.setattr(EmbeddingStore, "__getitem__", lambda self, rows: np.full((len(rows), 12), np.nan))
    with pytest.raises(ValueError, match="NaN or infinite values") as error:
        AlignerTrainer(**trainer_arguments).train()
    assert error.value.__notes__[0].startswith("At step 0, in the batch of the rows ['row-")


def test_an_interrupted_save_leaves_no_folder_that_loads(tmp_path, processor, monkeypatch, model):
    saving.save_stage(tmp_path, model, processor, "stage: gating\n")
    assert (tmp_path / "config.json").exists()

    def replace(source, target):
        if target == tmp_path / "model.safetensors":
            raise OSError("disk full")
        move(source, target)

    move = os.replace
    monkeypatch.setattr(saving.os, "replace", replace)
    with pytest.raises(OSError, match="disk full"):
        saving.save_stage(tmp_path, model, processor, "stage: gating\n")
    assert not (tmp_path / "config.json").exists()
    assert not list(tmp_path.glob(".saving-*"))


def test_the_gates_can_learn_faster_than_the_rest(tmp_path, write_recipe, stages):
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    run(write_recipe("gating", slow, stages["grounding"], max_steps=1, warmup_steps=0, learning_rate=1e-3))
    keys = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-3, "gate_learning_rate": 1e-1}
    run(write_recipe("gating", fast, stages["grounding"], **keys))
    before, slow, fast = parameters(stages["grounding"]), parameters(slow), parameters(fast)
    for name, tensor in before.items():
        if "slot_gate" not in name:
            torch.testing.assert_close(fast[name], slow[name], rtol=0, atol=0)
        else:  # a first step of Adam moves each number by the learning rate
            torch.testing.assert_close((fast[name] - tensor) / 100, slow[name] - tensor, rtol=1e-2, atol=1e-5)
    assert any(not torch.equal(fast[name], before[name]) for name in fast if "slot_gate" in name)
