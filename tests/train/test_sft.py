"""The training script: each stage trains its own parts; interrupted runs continue; mistakes are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import chat_inputs
from training_recipes import logs, parameters, parse, run, run_until

from arcaligner import ArcAlignerConfig, ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.train import recipe, sft
from arcaligner.train.examples import MIN_RARITY, word_rarity
from arcaligner.train.sft import AlignerTrainer

PARTS = {
    "reconstruction": {"projector", "lora_A", "lora_B"},
    "grounding": {"projector", "lora_A", "lora_B"},
    "gating": {"projector", "lora_A", "lora_B", "slot_gate"},
}
RATES = [2, 4, "segment"]
STEPS = {"max_steps": 8, "save_steps": 2, "tokens_per_slot": RATES, "max_questions": 2}  # two steps an epoch


@pytest.fixture(scope="module")
def stages(tmp_path_factory, write_recipe) -> dict[str, Path]:
    """The folders of three stages of an aligner with words, each trained from the one before."""
    root = tmp_path_factory.mktemp("runs")
    folders = {stage: root / f"{number}_{stage}" for number, stage in enumerate(PARTS, start=1)}
    aligner = {"lora_r": 4, "gate_hidden_size": 8, "lora_dropout": 0.1, "word_parts": 2}
    keys = {"tokens_per_slot": ["segment", 3], "max_segments": 2, "continues": True}
    run(write_recipe("reconstruction", folders["reconstruction"], aligner=aligner, **keys))
    run(write_recipe("grounding", folders["grounding"], folders["reconstruction"], max_questions=3))
    run(write_recipe("gating", folders["gating"], folders["grounding"], max_questions=3))
    return folders


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, write_recipe) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(write_recipe("grounding", folder, **STEPS))
    return folder


def moved_parts(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """The parts of the aligner that have a changed tensor; a changed tensor of the base model has its full name."""
    names = {name for name in before if not torch.equal(before[name], after[name])}
    return {next((part for part in PARTS["gating"] if part in name), name) for name in names}


# The stages


def test_stages_train_their_parts(stages):
    """Each stage starts from the one before, and trains its own parts only."""
    before = parameters(stages["reconstruction"] / "checkpoint-2")
    for stage, parts in PARTS.items():
        after = parameters(stages[stage])
        assert moved_parts(before, after) == parts, stage
        # With a rate of 0.01, four steps of Adam move no element further.
        torch.testing.assert_close(after, before, rtol=0, atol=0.05)
        before = after


def test_stage_folder_answers(stages):
    """The folder of a stage answers at the rates of the stage."""
    processor = ArcAlignerProcessor.from_pretrained(str(stages["reconstruction"]))
    assert (processor.tokens_per_slot, processor.trained_tokens_per_slot) == ("segment", ["segment", 3])
    processor = ArcAlignerProcessor.from_pretrained(str(stages["gating"]))
    model = ArcAlignerForCausalLM.from_pretrained(str(stages["gating"]))
    assert model.config.gate_mode == "adaptive"
    inputs = chat_inputs(processor, "Who?", ["It was Ada. Nobody else."])
    assert "context_word_ids" in inputs
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_logs_report_tokens_and_gates(tmp_path, write_recipe, stages, monkeypatch):
    seen, compute_loss = [], AlignerTrainer.compute_loss

    def recording(self, *args, **kwargs):
        loss, outputs = compute_loss(self, *args, **kwargs | {"return_outputs": True})
        seen.append(outputs.recursion_depth[outputs.recursion_depth >= 0].double())
        return loss

    monkeypatch.setattr(AlignerTrainer, "compute_loss", recording)
    run(write_recipe("gating", tmp_path / "run", stages["grounding"], aligner={"gate_threshold": 0.3}))
    entries = logs(tmp_path / "run", "open_gates")
    for entry, *depths in zip(entries, seen[::2], seen[1::2], strict=True):  # logged every other step
        depths = torch.cat(depths)
        assert entry["refinement_steps"] == pytest.approx(depths.mean().item())
        assert entry["open_gates"] == pytest.approx((depths > 0).double().mean().item())
        assert 0 < entry["open_gates"] < entry["refinement_steps"] and entry["num_tokens"] > 0
    assert not logs(stages["grounding"], "open_gates")


def test_gates_have_own_learning_rate(tmp_path, write_recipe, stages):
    keys = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-3}
    run(write_recipe("gating", tmp_path / "slow", stages["grounding"], **keys))
    run(write_recipe("gating", tmp_path / "fast", stages["grounding"], gate_learning_rate=1e-1, **keys))
    before, slow, fast = (parameters(path) for path in (stages["grounding"], tmp_path / "slow", tmp_path / "fast"))
    for name, tensor in before.items():
        if "slot_gate" not in name:
            assert torch.equal(fast[name], slow[name])
        else:  # a first step of Adam moves each number by the learning rate
            torch.testing.assert_close((fast[name] - tensor) / 100, slow[name] - tensor, rtol=1e-2, atol=1e-5)
    assert any(not torch.equal(fast[name], before[name]) for name in fast if "slot_gate" in name)


def test_projector_without_lora(tmp_path, write_recipe):
    """A projector alone, the design of xRAG, trains."""
    run(write_recipe("reconstruction", tmp_path / "1", aligner={"lora_r": 0, "gate_hidden_size": 8}))
    run(write_recipe("grounding", tmp_path / "2", tmp_path / "1"))
    assert moved_parts(parameters(tmp_path / "1"), parameters(tmp_path / "2")) == {"projector"}
    assert ArcAlignerForCausalLM.from_pretrained(tmp_path / "2").config.lora_r == 0


# Interrupted runs


@pytest.mark.parametrize("step, checkpoint", [(3, "checkpoint-2"), (5, "checkpoint-4")])
def test_resumed_run_equals_uninterrupted(tmp_path, write_recipe, whole_run, caplog, step, checkpoint):
    """A resumed run is bit for bit the same, within an epoch or in the next, with batches at several rates."""
    arguments = write_recipe("grounding", tmp_path / "run", **STEPS)
    run_until(step, arguments)
    assert not (tmp_path / "run/config.json").exists()
    with caplog.at_level("INFO"):
        run(arguments)
    assert f"resuming from {tmp_path / 'run' / checkpoint}" in caplog.text and "missing keys" not in caplog.text
    torch.testing.assert_close(parameters(tmp_path / "run"), parameters(whole_run), rtol=0, atol=0)
    for key in ("num_tokens", "loss"):
        values = [[entry[key] for entry in logs(folder, key)] for folder in (tmp_path / "run", whole_run)]
        assert values[0] == values[1]


TIMED = {"max_steps": 100, "max_seconds": 45.0, "logging_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 0}


@pytest.fixture
def steps_of_ten_seconds(monkeypatch):
    """A clock that only training steps move, by ten seconds each."""
    now, step = [100.0], AlignerTrainer.training_step

    def training_step(self, *args, **kwargs):
        now[0] += 10
        return step(self, *args, **kwargs)

    monkeypatch.setattr(sft, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(AlignerTrainer, "training_step", training_step)


def test_time_limit_ends_run(tmp_path, write_recipe, steps_of_ten_seconds):
    """The learning rate falls to 0 with the time, and the stage is saved."""
    run(write_recipe("grounding", tmp_path, **TIMED))
    rates = [entry["learning_rate"] for entry in logs(tmp_path, "learning_rate")]
    assert rates == pytest.approx([0.01 * (1 - share / 100) for share in (0, 22, 44, 66, 88)])
    assert parameters(tmp_path)


def test_steps_end_before_time(tmp_path, write_recipe, steps_of_ten_seconds):
    run(write_recipe("grounding", tmp_path, **TIMED | {"max_steps": 2}))
    assert [entry["learning_rate"] for entry in logs(tmp_path, "learning_rate")] == pytest.approx([0.01, 0.005])


def test_resumed_run_continues_to_count_time(tmp_path, write_recipe, steps_of_ten_seconds):
    run(write_recipe("grounding", tmp_path / "whole", **TIMED))
    arguments = write_recipe("grounding", tmp_path / "run", **TIMED)
    run_until(3, arguments)
    run(arguments)
    assert len(logs(tmp_path / "run", "learning_rate")) == 5
    torch.testing.assert_close(parameters(tmp_path / "run"), parameters(tmp_path / "whole"), rtol=0, atol=0)


def test_time_limit_saves_and_evaluates(tmp_path, write_recipe, steps_of_ten_seconds):
    """Also if the next checkpoint and the next evaluation would come later; the mean contains the last weights."""
    evaluated = {"eval_files": {write_recipe.files["grounding"]: 1.0}, "eval_strategy": "steps", "eval_steps": 50}
    evaluated |= {"validation_share": 0.5}
    run(write_recipe("grounding", tmp_path, **TIMED | evaluated | {"save_steps": 50, "average_checkpoints": 2}))
    assert [entry["step"] for entry in logs(tmp_path, "eval_loss")] == [5]
    assert json.loads((tmp_path / "checkpoint-5/trainer_state.json").read_text())["num_input_tokens_seen"] > 0


@pytest.mark.parametrize("changes", [{}, {"batch_tokens": 400}])
def test_run_resumed_at_its_limit_takes_no_step(tmp_path, write_recipe, steps_of_ten_seconds, monkeypatch, changes):
    arguments = write_recipe("grounding", tmp_path, **TIMED | {"lr_scheduler_type": "constant"} | changes)
    run(arguments)
    before = parameters(tmp_path)
    monkeypatch.setattr(AlignerTrainer, "training_step", None)
    run(arguments)
    torch.testing.assert_close(parameters(tmp_path), before, rtol=0, atol=0)


def test_invalid_time_limits_are_refused(tmp_path, write_recipe):
    with pytest.raises(ValueError, match="`max_seconds` is 0.0; expected"):
        run(write_recipe("grounding", tmp_path, **TIMED | {"max_seconds": 0.0}))
    with pytest.raises(ValueError, match="`restore_callback_states_from_checkpoint` is true, but"):
        run(write_recipe("grounding", tmp_path, **TIMED | {"restore_callback_states_from_checkpoint": True}))
    evaluated = {"eval_files": {write_recipe.files["grounding"]: 1.0}, "eval_strategy": "steps"}
    with pytest.raises(ValueError, match="is 'reduce_lr_on_plateau', .* cannot follow `max_seconds`"):
        run(write_recipe("grounding", tmp_path, **TIMED | evaluated | {"lr_scheduler_type": "reduce_lr_on_plateau"}))


def test_time_limit_needs_one_process(tmp_path, write_recipe, monkeypatch):
    monkeypatch.setattr(recipe, "num_processes", lambda: 2)
    with pytest.raises(ValueError, match="2 processes were started, but with `max_seconds`"):
        parse(write_recipe("grounding", tmp_path, **TIMED))


def test_checkpoint_to_resume_from(tmp_path, write_recipe, whole_run):
    """A run accepts `true` and the last checkpoint of its folder, the one that it continues from anyway."""
    arguments, last = write_recipe("grounding", whole_run, **STEPS), whole_run / "checkpoint-8"
    before = parameters(whole_run)
    for value in ("true", "True", str(last), str(last / "..") + "/checkpoint-8/"):
        run([*arguments, "--resume_from_checkpoint", value])
        torch.testing.assert_close(parameters(whole_run), before, rtol=0, atol=0)
    for value in (str(whole_run / "checkpoint-6"), str(tmp_path), "false"):
        with pytest.raises(ValueError, match=f"is '{value}', but .* from the last .*{last}.*`model_name_or_path`"):
            run([*arguments, "--resume_from_checkpoint", value])
    arguments = write_recipe("grounding", tmp_path / "run", whole_run / "checkpoint-6", **STEPS)
    run([*arguments, "--resume_from_checkpoint", "true"])  # the folder has no checkpoint yet
    assert [entry["step"] for entry in logs(tmp_path / "run", "loss")] == [2, 4, 6, 8]


def test_trained_run_is_only_saved(tmp_path, write_recipe, monkeypatch):
    """A run that was interrupted after its last step is saved without more training."""
    arguments = write_recipe("grounding", tmp_path / "run", lr_scheduler_type="constant")
    with monkeypatch.context() as patch, pytest.raises(TypeError, match="'NoneType' object is not callable"):
        patch.setattr(sft, "save_stage", None)
        run(arguments)
    run(arguments)
    trained, saved = (parameters(tmp_path / folder) for folder in ("run/checkpoint-4", "run"))
    torch.testing.assert_close(saved, trained, rtol=0, atol=0)
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 4


def test_rare_words_weigh_more():
    segments = [{"word_ids": ids} for ids in ([0, 1], [0, 2, 2], [0], [0, 2])]
    rarity = word_rarity([{"segments": segments[:1]}, {"segments": []}, {"segments": segments[1:]}], 4)
    np.testing.assert_allclose(rarity, [MIN_RARITY, *np.log([5 / 2, 5 / 3, 5]) / np.log(5)])


# The dtype of the backbone


@pytest.mark.parametrize("name", ["bfloat61", "int8", "nn"])
def test_invalid_dtype_is_refused(name):
    with pytest.raises(ValueError, match=f"`dtype` is '{name}'; expected auto, float32, bfloat16"):
        recipe.resolve_dtype(name, torch.device("cpu"))


def test_resumed_run_keeps_dtype(tmp_path, write_recipe, monkeypatch):
    """A resumed run keeps the dtype that `auto` chose."""
    arguments = write_recipe("grounding", tmp_path / "run", dtype="auto")
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(recipe, "fastest_dtype", lambda device_type, dtype=dtype: dtype)
        run_until(3, arguments) if dtype == torch.bfloat16 else run(arguments)
    assert ArcAlignerConfig.from_pretrained(tmp_path / "run").dtype == torch.bfloat16
