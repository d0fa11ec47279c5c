"""The benchmark of training speed: every arm learns the same targets, with the loss of training; times to ratios."""

import json
from dataclasses import asdict

import pytest
import torch
from tiny_models import float64_throughout
from training_rows import question_rows, write_rows

from arcaligner import ArcAlignerForCausalLM
from arcaligner.benchmarks import throughput
from arcaligner.benchmarks.throughput import (
    STAGES,
    WARM_UP,
    TrainingArm,
    load_models,
    loss_of,
    main,
    make_arms,
    make_batches,
    measure,
    size_of,
    stage_examples,
    summarize,
    training_step,
)

ARMS = ["before", "bfloat16", "eager", "no_logits", "turns", "compiled"]
RATE = 4


@pytest.fixture
def rows():
    """Two passages with three questions each."""
    rows = question_rows(6)
    for number, row in enumerate(rows):
        row["passages"] = rows[number % 2]["passages"]
    return rows


@pytest.fixture(params=STAGES.values())
def examples(processor, rows, request):
    return stage_examples(processor, rows, request.param, RATE)


def test_each_arm_adds_one_step_to_the_one_before():
    arms = make_arms("bfloat16")
    assert list(arms) == ARMS and arms["before"] == TrainingArm(torch.float32, "sdpa", True, False, False)
    for one, other in zip(list(arms.values())[:-1], list(arms.values())[1:], strict=True):
        assert sum(a != b for a, b in zip(asdict(one).values(), asdict(other).values(), strict=True)) == 1
    assert arms["compiled"] == TrainingArm(torch.bfloat16, "eager", False, True, True)
    assert {arm.dtype for arm in make_arms("float32").values()} == {torch.float32}
    assert list(make_arms("float32")) == [name for name in ARMS if name != "bfloat16"]
    with pytest.raises(ValueError, match="`--dtype` is 'float64'; expected bfloat16 or float32"):
        make_arms("float64")


def test_the_longest_examples_come_first_and_questions_of_a_passage_share_one(processor, rows):
    examples = stage_examples(processor, rows, "grounding", RATE)
    assert [len(example.turns) for example in examples] == [3, 3]
    assert examples[0].length >= examples[1].length
    assert max(len(each.turns) for each in stage_examples(processor, rows, "reconstruction", RATE)) == 2


def test_all_arms_learn_the_same_targets(model, processor, examples):
    side_by_side, apart = make_batches(model, processor, examples, 2, RATE)
    for one, several in zip(side_by_side, apart, strict=True):
        wide, long = size_of(one), size_of(several)
        assert wide["targets"] == long["targets"] and wide["turns"] == long["turns"]
        assert all(len(batch["input_ids"]) <= 2 for batch in several)
    tokens = [sum(size_of(batches)["tokens"] for batches in each) for each in (side_by_side, apart)]
    assert tokens[0] < tokens[1]  # the slots once


def test_all_arms_have_the_same_loss_and_gradients(model, processor, examples):
    model = model.double()
    model.set_stage("reconstruction")
    side_by_side, apart = make_batches(model, processor, examples, 2, RATE)
    found = []
    for arm in (arm for name, arm in make_arms("float32").items() if name != "compiled"):
        batches = (side_by_side if arm.side_by_side else apart)[-1]
        batches = [{k: v.double() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
        model.set_attn_implementation(arm.attention)
        model.zero_grad()
        with float64_throughout():
            loss = sum(loss_of(model, batch, arm) for batch in batches)
            loss.backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((loss.detach(), torch.cat(gradients)))
    (first_loss, first_gradient), *others = found
    for loss, gradient in others:  # the encoder, in float32, reads other batches
        torch.testing.assert_close(loss, first_loss, rtol=1e-6, atol=0)
        assert (gradient - first_gradient).norm() < 1e-5 * first_gradient.norm()
    assert first_gradient.norm() > 1


def test_a_step_takes_gradients_and_leaves_the_weights(model, processor, examples, monkeypatch):
    model.train().set_stage("reconstruction")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    norms = []
    step = optimizer.step
    monkeypatch.setattr(
        optimizer, "step", lambda: norms.extend(p.grad.norm().item() for p in trained if p.grad is not None) or step()
    )
    _, apart = make_batches(model, processor, examples, 2, RATE)
    training_step(model, optimizer, TrainingArm(), apart[0])
    assert len(norms) > 0 and sum(norms) > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_arms_share_a_model_where_only_batches_and_loss_differ(checkpoint_dir, monkeypatch):
    compiled = []
    monkeypatch.setattr(throughput, "slot_decoder_layers", lambda model: [model])
    monkeypatch.setattr(ArcAlignerForCausalLM, "compile", lambda self, dynamic: compiled.append(self))
    models = load_models(str(checkpoint_dir), make_arms("bfloat16"), "cpu")
    assert len(set(models.values())) == 4
    assert models["eager"] is models["no_logits"] is models["turns"]
    assert compiled == [models["compiled"]]
    assert models["before"].dtype == torch.float32 and models["turns"].dtype == torch.bfloat16
    assert models["turns"].config.text_config._attn_implementation == "eager"


def test_all_arms_take_each_batch_in_a_rotating_order_and_the_warm_up_does_not_count():
    seen = []
    steps = {name: lambda n, name=name: seen.append((name, n)) for name in "ab"}
    found = measure(steps, num_steps=3, num_batches=2, device="cpu")
    assert "".join(name for name, _ in seen) == "abbaabbaab"
    assert [number for _, number in seen] == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert len(found) == 3 and all(list(step) == ["a", "b"] for step in found)


def test_ratios_are_medians_of_each_steps_seconds_over_the_first_arms():
    seconds = [{"before": 2.0, "turns": 1.0}, {"before": 6.0, "turns": 4.0}, {"before": 6.0, "turns": 6.0}]
    sizes = {
        "before": [{"tokens": 20, "targets": 4, "turns": 2}] * 2,
        "turns": [{"tokens": 12, "targets": 4, "turns": 2}, {"tokens": 24, "targets": 8, "turns": 4}],
    }
    summary = summarize(seconds, sizes)
    assert summary["turns"]["ratio"] == {"lower": 1.25, "median": 1.5, "upper": 1.75}
    assert summary["before"]["ratio"]["median"] == 1.0
    assert WARM_UP == 2  # so the first measured step has the first batch
    assert summary["turns"]["tokens_per_second"]["median"] == 6.0  # of 12, 6 and 2
    assert summary["turns"]["targets_per_second"]["median"] == 2.0


def test_too_few_examples_for_a_batch_are_refused(model, processor, rows):
    examples = stage_examples(processor, rows, "grounding", RATE)
    with pytest.raises(ValueError, match="Found 2 examples; expected at least one batch of 4"):
        make_batches(model, processor, examples, 4, RATE)


def test_the_command_writes_one_json_line_and_its_tables(tmp_path, checkpoint_dir, rows, capsys, monkeypatch):
    monkeypatch.setattr(throughput, "slot_decoder_layers", lambda model: [])  # compiling takes half a minute
    data, output = tmp_path / "rows.jsonl", tmp_path / "throughput.json"
    write_rows(data, rows)
    options = {"tokens_per_slot": "segment", "batch_size": 2, "device": "cpu", "checkpoint": str(checkpoint_dir)}
    main(output, steps=2, dtype="bfloat16", stages="I,II", data=data, **options)
    text = output.read_text("utf-8")
    assert text.count("\n") == 1 and text in capsys.readouterr().out
    report = json.loads(text)
    assert list(report["stages"]) == ["I", "II"] and report["tokens_per_slot"] == "segment"
    for stage in report["stages"].values():
        assert list(stage["arms"]) == ARMS and stage["encoder_seconds"]["median"] > 0
        assert all(arm["tokens_per_second"]["median"] > 0 for arm in stage["arms"].values())
    tables = (tmp_path / "throughput.txt").read_text("utf-8")
    assert all(f"{name} " in tables for name in ARMS) and "Stage II: 2 steps of 2 rows" in tables


def test_a_stage_that_is_none_is_refused(checkpoint_dir):
    with pytest.raises(ValueError, match="`--stages` names III; expected I, II"):
        main(None, 2, "bfloat16", "I,III", "8", 16, "cpu")
