"""The throughput benchmark: arms that train what they say, on the same tokens; times to ratios; whole files."""

import json

import pytest
import torch
from training_rows import question_rows, write_rows

from arcaligner.benchmarks import throughput
from arcaligner.benchmarks.throughput import load_plain, make_arms, make_batches, measure, num_tokens, summarise
from arcaligner.train import saving
from arcaligner.train.data import ExampleBuilder

ARMS = ["plain", "plain_labelled", "stage_2", "stage_3", "stage_3_always"]


@pytest.fixture
def batches(processor):
    return make_batches(processor, question_rows(6), batch_size=2)


@pytest.fixture
def plain(model):
    return load_plain(model, "cpu")


def test_batches_hold_each_question_once_and_count_its_tokens(processor, batches):
    lengths = [
        len(example.input_ids)
        for row in question_rows(6)
        for example in ExampleBuilder(processor).question_examples(row)
    ]
    by_row = [length for batch in batches for length in batch["attention_mask"].sum(dim=1).tolist()]
    assert by_row == sorted(lengths, reverse=True)
    assert [num_tokens(batch) for batch in batches] == [int(batch["attention_mask"].sum()) for batch in batches]
    assert sum(map(num_tokens, batches)) == sum(lengths)
    assert all(batch["context_embeds"].abs().sum() > 0 for batch in batches)


def test_too_few_questions_for_a_batch_are_refused(processor):
    with pytest.raises(ValueError, match="Found 3 questions with answers; expected at least one batch of 4"):
        make_batches(processor, question_rows(3), batch_size=4)


def test_both_plain_arms_have_the_loss_of_the_base_model_over_ordinary_tokens(model, plain, batches):
    plain.eval()
    arms = make_arms(model, plain)
    for batch in batches:
        ids = batch["input_ids"].masked_fill(batch["input_ids"] == model.config.context_token_id, 0)
        expected = plain(input_ids=ids, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        torch.testing.assert_close(arms["plain"].loss(batch), expected)
        torch.testing.assert_close(arms["plain_labelled"].loss(batch), expected)


def test_the_stages_have_the_loss_of_the_aligner_in_their_gate_mode(model, plain, batches):
    arms = make_arms(model, plain)
    for name, gate_mode in (("stage_2", "off"), ("stage_3", "adaptive"), ("stage_3_always", "always")):
        arms[name].prepare()
        assert model.config.gate_mode == gate_mode
        losses = torch.stack([arms[name].loss(batch) for batch in batches])
        torch.testing.assert_close(losses, torch.stack([model(**batch).loss for batch in batches]), msg=name)


def test_plain_lora_is_of_the_aligners_rank_on_the_same_linears(model, plain):
    own = {
        name.replace("model.backbone.", "").replace(".slot.", "."): parameter.shape
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    bare = {
        name.replace("base_model.model.model.", "").replace(".default.", "."): parameter.shape
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    assert own == bare and len(own) == 3 * 7 * 2


def test_each_step_gives_gradients_to_what_its_arm_trains_and_leaves_the_weights(model, plain, batches):
    arms = make_arms(model.train(), plain)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {}

    def note(name, arm):
        step = arm.optimizer.step

        def noting(*args):
            moved = [n for n, p in arm.model.named_parameters() if p.grad is not None]
            trained[name] = {part for part in ("projector", "slot_gate", "lora_") if any(part in n for n in moved)}
            return step(*args)

        return noting

    for name, arm in arms.items():
        arm.optimizer.step, original = note(name, arm), arm.optimizer.step
        throughput.seconds_of_step(arm, batches[0])
        arm.optimizer.step = original
    assert trained == {
        "plain": {"lora_"},
        "plain_labelled": {"lora_"},
        "stage_2": {"projector", "lora_"},
        "stage_3": {"projector", "lora_", "slot_gate"},
        "stage_3_always": {"projector", "lora_"},
    }
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for arm in arms.values() for parameter in arm.model.parameters())


def test_all_arms_take_each_batch_in_a_rotating_order_and_the_warm_up_does_not_count(monkeypatch, batches):
    seen = []

    def step(arm, batch):
        seen.append((arm, num_tokens(batch)))
        return float(len(seen))

    monkeypatch.setattr(throughput, "seconds_of_step", step)
    seconds, tokens = measure({"a": "a", "b": "b"}, batches, steps=3)
    turns = [num_tokens(batches[index % len(batches)]) for index in range(5)]
    assert [count for _, count in seen] == [count for count in turns for _ in "ab"]
    assert "".join(arm for arm, _ in seen) == "abbaabbaab"
    assert tokens == turns[2:]
    assert seconds == [{"a": 5.0, "b": 6.0}, {"b": 7.0, "a": 8.0}, {"a": 9.0, "b": 10.0}]
    assert all(list(step) == ["a", "b"] for step in seconds)


def test_ratios_are_medians_of_each_steps_seconds_over_the_arms():
    seconds = [
        {"plain": 4.0, "plain_labelled": 2.0, "stage_2": 1.0},
        {"plain": 8.0, "plain_labelled": 6.0, "stage_2": 4.0},
        {"plain": 9.0, "plain_labelled": 6.0, "stage_2": 6.0},
    ]
    summary = summarise(seconds, [10, 20, 30])
    assert list(summary) == ["plain", "plain_labelled", "stage_2"]
    stage = summary["stage_2"]
    assert stage["ratio"]["plain"] == {"lower": 1.75, "median": 2.0, "upper": 3.0}
    assert stage["ratio"]["plain_labelled"] == {"lower": 1.25, "median": 1.5, "upper": 1.75}
    assert stage["tokens_per_second"] == {"lower": 5.0, "median": 5.0, "upper": 7.5}
    assert stage["target"] == 0.85 and summary["plain"]["target"] is None
    assert summary["plain"]["ratio"]["plain"]["median"] == 1.0


def test_the_command_writes_one_json_line_and_its_table(tmp_path, checkpoint_dir, capsys):
    data, output = tmp_path / "rows.jsonl", tmp_path / "throughput.json"
    write_rows(data, question_rows(4))
    throughput.main(output, steps=2, device="cpu", data=data, model=str(checkpoint_dir), batch_size=2)
    text = output.read_text("utf-8")
    assert text.count("\n") == 1 and text in capsys.readouterr().out
    report = json.loads(text)
    assert list(report["arms"]) == ARMS and report["steps"] == 2 and report["data"] == "rows.jsonl"
    assert report["slots_per_row"] == (3 + 2 + 1 + 3) / 4
    assert {"cpu", "threads", "load", "torch", "transformers", "peft", "trl"} < set(report["machine"])
    table = (tmp_path / "throughput.txt").read_text("utf-8")
    assert all(f"{name} " in table for name in ARMS) and "0.85" in table
    assert not list(tmp_path.glob("*.tmp"))


def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "throughput.json"
    saving.write_whole(path, "before")

    def full_disk(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(saving.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        saving.write_whole(path, "after")
    assert path.read_text() == "before"
