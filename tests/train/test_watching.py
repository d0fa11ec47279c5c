"""What a run says of itself: open gates by layer, pace and time left, answers to questions, the best checkpoint."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from training_recipes import RecipeWriter, parameters, run
from training_rows import question_rows, write_rows

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.evaluation.answering import slot_inputs
from arcaligner.evaluation.metrics import contains_match, token_f1
from arcaligner.train import sft, watching
from arcaligner.train import trainer as trainer_module
from arcaligner.train.collator import ContextCollator
from arcaligner.train.data import ExampleBuilder, build_dataset
from arcaligner.train.embedding_store import EmbeddingStore
from arcaligner.train.recipe import eval_examples
from arcaligner.train.watching import Clock, GateWatch, OtherSlots, answer_questions


@pytest.fixture(scope="module")
def write_recipe(tmp_path_factory, base_model_dir, encoder_dir) -> RecipeWriter:
    return RecipeWriter(tmp_path_factory.mktemp("recipes"), base_model_dir, encoder_dir)


def logs(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_open_gates_are_counted_by_layer_and_padding_is_not():
    watch = GateWatch()
    watch.add(torch.tensor([[[0, 2, -1], [1, 1, -1]], [[0, 0, 2], [0, 0, 1]]]))  # (batch, num_layers, max_slots)
    watch.add(torch.tensor([[[1], [0]]]))
    counts = watch.pop(Accelerator(cpu=True))
    # Of 6 slots: steps 5 and 3, open 3 and 3.
    assert counts == pytest.approx(
        {
            "refinement_steps": 8 / 12,
            "open_gates": 6 / 12,
            "open_gates/layer_0": 3 / 6,
            "open_gates/layer_1": 3 / 6,
        }
    )
    assert watch.pop(Accelerator(cpu=True)) == {}


def test_time_left_is_at_the_pace_since_the_start_and_speed_since_the_last_log(monkeypatch):
    times = iter([100.0, 160.0, 180.0])
    monkeypatch.setattr(watching.time, "perf_counter", lambda: next(times))
    clock = Clock()
    clock.start(500.0, 10)  # resumed at step 10
    clock.start(900.0, 11)
    assert clock.read(1100.0, 20, 50) == {"tokens_per_second": 10.0, "minutes_left": 3.0}
    assert clock.read(1500.0, 30, 50) == {"tokens_per_second": 20.0, "minutes_left": pytest.approx(1.3)}


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("held_out") / "questions.jsonl", question_rows(7))


def test_evaluation_logs_perplexity_and_answers(tmp_path, write_recipe, questions):
    keys = {"eval_files": {str(questions): 1.0}, "eval_strategy": "steps", "eval_steps": 2, "eval_answers": 3}
    run(write_recipe("grounding", tmp_path / "run", **keys))
    history = logs(tmp_path / "run")
    assert all(entry["eval_perplexity"] > 1.0 for entry in history if "eval_f1" in entry)
    scores = [entry for entry in history if "eval_f1" in entry]
    assert [entry["step"] for entry in scores] == [2, 4]
    assert all(0.0 <= entry["eval_f1"] <= 100.0 and 0.0 <= entry["eval_em"] <= 100.0 for entry in scores)
    assert all("minutes_left" in entry and "grad_norm" in entry for entry in history if "loss" in entry)


def test_perplexity_and_gap_weigh_all_targets_alike_whatever_the_batches(tmp_path, write_recipe, questions):
    keys = {"eval_files": {str(questions): 1.0}, "eval_strategy": "steps", "eval_steps": 2, "eval_slot_gap": True}
    found = []
    for batch_size in (2, 7):
        folder = tmp_path / str(batch_size)
        run(write_recipe("grounding", folder, max_steps=2, per_device_eval_batch_size=batch_size, **keys))
        (entry,) = [entry for entry in logs(folder) if "eval_slot_gap" in entry]
        found.append(entry["eval_perplexity"])
        assert abs(entry["eval_slot_gap"]) > 1e-5 and "eval_mean_token_accuracy" not in entry
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_perplexity_and_gap_are_those_of_the_rows_one_by_one(tmp_path, write_recipe, questions):
    keys = {"eval_files": {str(questions): 1.0}, "eval_strategy": "steps", "eval_steps": 2, "eval_slot_gap": True}
    keys |= {"train_sampling_strategy": "random", "per_device_eval_batch_size": 7}  # rows are evaluated in their order
    arguments = write_recipe("grounding", tmp_path / "run", max_steps=2, **keys)
    run(arguments)
    (entry,) = [entry for entry in logs(tmp_path / "run") if "eval_slot_gap" in entry]
    recipe, args, _ = sft.parse(arguments)
    model = ArcAlignerForCausalLM.from_pretrained(tmp_path / "run").eval()
    processor = ArcAlignerProcessor.from_pretrained(tmp_path / "run")
    store = EmbeddingStore(
        write_recipe.folder / "cache",
        processor.encoder_name_or_path,
        processor.encoder_hidden_size,
        processor.encode_segments,
    )
    rows = list(build_dataset(eval_examples(recipe, ExampleBuilder(processor), args.seed), store))
    collator = ContextCollator(store, processor.context_token_id, processor.tokenizer.pad_token_id or 0)
    nll = []
    for collate in (collator, OtherSlots(collator)):
        batch = collate(rows)
        batch.pop("row_ids")
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        nll.append((losses.sum() / (labels[:, 1:] != -100).sum()).item())
    assert entry["eval_perplexity"] == pytest.approx(math.exp(nll[0]), rel=1e-5)
    assert entry["eval_slot_gap"] == pytest.approx(nll[1] - nll[0], abs=1e-5)


def test_other_slots_are_those_of_the_next_row_with_other_slots(asked):
    rows = [asked.dataset[index] for index in (0, 0, 2, 1)]  # 3, 3, 1 and 2 slots
    other_slots = OtherSlots(asked.collator)
    batch, other = asked.collator(rows), other_slots(rows)
    first, _, third, fourth = batch["context_embeds"]
    zero = torch.zeros_like(first[0])
    expected = torch.stack(
        [
            torch.stack([third[0], third[0], third[0]]),
            torch.stack([third[0], third[0], third[0]]),
            torch.stack([fourth[0], zero, zero]),
            torch.stack([first[0], first[1], zero]),
        ]
    )
    torch.testing.assert_close(other["context_embeds"], expected, rtol=0, atol=0)
    for key in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(other[key], batch[key])
    alone = other_slots(rows[3:])["context_embeds"]
    torch.testing.assert_close(alone[0], first[:2], rtol=0, atol=0)


def test_a_gap_within_batches_of_one_row_is_refused(write_recipe, tmp_path):
    with pytest.raises(ValueError, match="`per_device_eval_batch_size` is 1"):
        sft.parse(write_recipe("grounding", tmp_path, eval_slot_gap=True, per_device_eval_batch_size=1))


def test_questions_that_are_not_there_are_not_asked(tmp_path, write_recipe, questions):
    passages = write_recipe.files["reconstruction"]
    keys = {"eval_files": {str(passages): 1.0}, "eval_strategy": "steps", "eval_steps": 2, "eval_answers": 3}
    with pytest.raises(ValueError, match="`eval_answers` is 3, but no row of `eval_files` has a question"):
        run(write_recipe("reconstruction", tmp_path / "run", **keys))


def test_the_gating_stage_logs_open_gates_of_each_layer(tmp_path, write_recipe):
    run(write_recipe("reconstruction", tmp_path / "1"))
    run(write_recipe("grounding", tmp_path / "2", tmp_path / "1"))
    run(write_recipe("gating", tmp_path / "3", tmp_path / "2"))
    entries = [entry for entry in logs(tmp_path / "3") if "loss" in entry]
    layers = [key for key in entries[0] if key.startswith("open_gates/layer_")]
    assert len(layers) == ArcAlignerForCausalLM.from_pretrained(tmp_path / "3").config.text_config.num_hidden_layers
    for entry in entries:
        assert entry["open_gates"] == pytest.approx(sum(entry[key] for key in layers) / len(layers), abs=1e-4)


def test_the_best_checkpoint_is_kept_and_is_what_the_stage_ends_with(tmp_path, write_recipe, questions, monkeypatch):
    scores = iter([1.0, 5.0, 3.0])
    monkeypatch.setattr(trainer_module, "answer_questions", lambda *args: {"em": 0.0, "f1": next(scores)})
    keys = {
        "eval_files": {str(questions): 1.0},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_answers": 3,
        "save_total_limit": 1,
        "metric_for_best_model": "eval_f1",
        "load_best_model_at_end": True,
        "max_steps": 6,
    }
    run(write_recipe("grounding", tmp_path / "run", **keys))
    kept = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert kept == {"checkpoint-4"}
    best, final = parameters(tmp_path / "run" / "checkpoint-4"), parameters(tmp_path / "run")
    for name, tensor in best.items():
        torch.testing.assert_close(final[name], tensor, rtol=0, atol=0)


@pytest.fixture
def asked(tmp_path, checkpoint_dir):
    """Model, processor, rows, their dataset and the collator."""
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint_dir).eval()
    processor = ArcAlignerProcessor.from_pretrained(checkpoint_dir)
    rows = question_rows(5)
    store = EmbeddingStore(
        tmp_path, processor.encoder_name_or_path, processor.encoder_hidden_size, processor.encode_segments
    )
    builder = ExampleBuilder(processor)
    dataset = build_dataset([example for row in rows for example in builder.question_examples(row)], store)
    collator = ContextCollator(store, processor.context_token_id, processor.tokenizer.pad_token_id or 0)
    return SimpleNamespace(model=model, processor=processor, rows=rows, dataset=dataset, collator=collator)


def reference_scores(asked) -> list[tuple[float, float]]:
    """EM and F1 of each row, asked alone, with the processor's own prompt; a row's answer is among its golds."""
    scores = []
    for row in asked.rows:
        inputs = slot_inputs(asked.processor, [row])
        output = asked.model.generate(**inputs, max_new_tokens=watching.MAX_NEW_TOKENS, do_sample=False)
        text = asked.processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores.append((contains_match(text, row["answers"]), token_f1(text, row["answers"])))
    return scores


def make_an_answer_right(asked) -> None:
    """Row 2's golds become what the model says first, so that a score is not zero."""
    inputs = slot_inputs(asked.processor, [asked.rows[2]])
    output = asked.model.generate(**inputs, max_new_tokens=watching.MAX_NEW_TOKENS, do_sample=False)
    text = asked.processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    asked.rows[2]["answers"] = [*asked.rows[2]["answers"], text]
    golds = [row["answers"] for row in asked.rows]
    asked.dataset = asked.dataset.remove_columns("answers").add_column("answers", golds)


def test_scores_are_those_of_the_prompts_asked_one_by_one(asked):
    make_an_answer_right(asked)
    arguments = (Accelerator(cpu=True), asked.dataset, asked.collator, asked.processor.tokenizer, 2)
    scores = answer_questions(asked.model, *arguments)
    expected = reference_scores(asked)
    assert scores["em"] == pytest.approx(100 * sum(em for em, _ in expected) / 5) and scores["em"] > 0
    assert scores["f1"] == pytest.approx(100 * sum(f1 for _, f1 in expected) / 5)


def test_several_processes_ask_each_question_once_and_take_as_many_steps(asked, monkeypatch):
    make_an_answer_right(asked)
    gathered, calls = [], []
    monkeypatch.setattr(watching, "gather_object", lambda scores: gathered.extend(scores) or list(gathered))
    for process in (0, 1):
        accelerator = SimpleNamespace(
            num_processes=2, process_index=process, device="cpu", unwrap_model=lambda model: model
        )
        steps = []
        generate = asked.model.generate

        def counted(steps=steps, generate=generate, **kwargs):
            assert kwargs.pop("synced_gpus") is True
            steps.append(len(kwargs["input_ids"]))
            return generate(**kwargs)

        model = SimpleNamespace(generate=counted)
        scores = answer_questions(model, accelerator, asked.dataset, asked.collator, asked.processor.tokenizer, 2)
        calls.append(len(steps))
    assert sorted(index for index, *_ in gathered) == [0, 1, 2, 3, 4]
    assert calls == [2, 2]
    expected = reference_scores(asked)
    assert scores["f1"] == pytest.approx(100 * sum(f1 for _, f1 in expected) / 5)
