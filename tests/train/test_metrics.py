"""What a run logs of itself: open gates, pace, perplexity and gap, answers, the best checkpoint."""

import math

import pytest
import torch
from accelerate import Accelerator
from training_recipes import logs, parameters, parse, run
from training_rows import question_rows, write_rows

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.train import trainer as trainer_module
from arcaligner.train.data import ContextCollator, ExampleBuilder, encode_slots
from arcaligner.train.metrics import GateCounter, SwappedSlots
from arcaligner.train.selection import ExampleSelector


def test_open_gates_are_counted_by_layer_and_padding_is_not():
    gates = GateCounter()
    gates.add(torch.tensor([[[0, 2, -1], [1, 1, -1]], [[0, 0, 2], [0, 0, 1]]]))  # (batch, num_layers, max_slots)
    gates.add(torch.tensor([[[1], [0]]]))
    # Of 6 slots: steps 5 and 3, open 3 and 3.
    expected = {"refinement_steps": 8 / 12, "open_gates": 6 / 12}
    expected |= {"open_gates/layer_0": 3 / 6, "open_gates/layer_1": 3 / 6}
    assert gates.pop(Accelerator(cpu=True)) == pytest.approx(expected)
    assert gates.pop(Accelerator(cpu=True)) == {}


# Evaluation during a run


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> dict:
    path = write_rows(tmp_path_factory.mktemp("held_out") / "questions.jsonl", question_rows(7))
    return {"eval_files": {path: 1.0}, "eval_strategy": "steps", "eval_steps": 2}


def test_perplexity_and_gap_are_those_of_all_targets_whatever_the_batches(tmp_path, write_recipe, held_out):
    found = []
    # Rows are evaluated in their order.
    keys = {"train_sampling_strategy": "random", "max_steps": 2, "eval_slot_gap": True, **held_out}
    for batch_size in (2, 7):
        arguments = write_recipe("grounding", tmp_path / str(batch_size), per_device_eval_batch_size=batch_size, **keys)
        run(arguments)
        (entry,) = logs(tmp_path / str(batch_size), "eval_slot_gap")
        found.append(entry)
    assert found[0]["eval_perplexity"] == pytest.approx(found[1]["eval_perplexity"], rel=1e-5)
    recipe, args, _ = parse(arguments)
    model = ArcAlignerForCausalLM.from_pretrained(tmp_path / "7").eval()
    processor = ArcAlignerProcessor.from_pretrained(tmp_path / "7")
    rows = list(ExampleSelector(recipe, ExampleBuilder(processor), args.seed).eval_examples())
    collator = ContextCollator(processor.context_token_id, 0)
    nll = []
    for collate in (collator, SwappedSlots(collator)):
        batch = collate(rows)
        mask, embeds = (batch["turn_ids"] >= 0).long(), encode_slots(processor, batch)
        with torch.no_grad():
            logits = model(batch["input_ids"], attention_mask=mask, context_embeds=embeds).logits
        targets = batch["labels"][:, 1:].flatten()
        nll.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets).item())
    assert found[1]["eval_perplexity"] == pytest.approx(math.exp(nll[0]), rel=1e-5)
    assert found[1]["eval_slot_gap"] == pytest.approx(nll[1] - nll[0], abs=1e-5)
    assert abs(nll[1] - nll[0]) > 1e-5


def test_swapped_slots_are_those_of_the_next_row_with_other_passages():
    def row(name, segments):
        empty = {"document": 0, "encoder_start": 0, "word_ids": [], "word_ends": []}
        segments = [empty | {"encoder_text": text} for text in segments]
        return {"row_id": name, "head": [1], "turns": [{"input_ids": [2], "labels": [2]}], "segments": segments}

    rows = [row("x", "abc"), row("same as x", "abc"), row("y", "d"), row("z", "ef")]
    swapped = SwappedSlots(ContextCollator(9, 0))
    batch = swapped(rows)
    assert batch["encoder_texts"] == [*"d", *"d", *"ef", *"abc"] and batch["num_slots"] == [1, 1, 2, 3]
    assert (batch["input_ids"] == 9).sum(dim=1).tolist() == [1, 1, 2, 3] and batch["row_ids"][0] == "x"
    assert swapped(rows[3:])["encoder_texts"] == [*"abc"]  # the first row of the batch before


def test_a_gap_within_batches_of_one_row_is_refused(write_recipe, tmp_path):
    with pytest.raises(ValueError, match="`per_device_eval_batch_size` is 1"):
        parse(write_recipe("grounding", tmp_path, eval_slot_gap=True, per_device_eval_batch_size=1))


def test_the_best_checkpoint_is_kept_and_is_what_the_stage_ends_with(tmp_path, write_recipe, held_out, monkeypatch):
    losses = iter([5.0, 1.0, 3.0])
    monkeypatch.setattr(trainer_module, "_mean", lambda pair: math.log(next(losses)))
    keys = {"save_total_limit": 1, "max_steps": 6, **held_out}
    keys |= {"metric_for_best_model": "eval_perplexity", "greater_is_better": False, "load_best_model_at_end": True}
    run(write_recipe("grounding", tmp_path / "run", **keys))
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-4"}
    best, final = parameters(tmp_path / "run" / "checkpoint-4"), parameters(tmp_path / "run")
    assert all(torch.equal(final[name], tensor) for name, tensor in best.items())
