"""The report asks each question in each way and counts what it says it counts."""

import json

import pytest
import torch
from training_rows import question_rows, write_rows

from arcaligner.benchmarks import squad_report
from arcaligner.benchmarks.squad_report import (
    batches_by_length,
    closed_book_text,
    full_text,
    markdown_table,
    predict,
    run,
    score,
    slot_inputs,
    text_inputs,
)

WAYS = [
    "closed_book",
    "full_text",
    "compressed_off",
    "compressed_adaptive",
    "compressed_always",
    "empty_slot",
]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(squad_report, "MAX_NEW_TOKENS", 4)


def test_the_prompt_with_text_differs_from_the_one_with_slots_in_the_passage_alone(processor):
    (row,) = question_rows(1)
    slots = processor.decode(slot_inputs(processor, [row])["input_ids"][0])
    text = processor.decode(text_inputs(processor, [row], full_text)["input_ids"][0])
    passage = f"Toronto Northwest: {row['passages'][0]['text']}"
    assert text == slots.replace("<context>" * 3, passage)
    closed = processor.decode(text_inputs(processor, [row], closed_book_text)["input_ids"][0])
    assert closed == text.replace(f"Refer to the background document: {passage}\n", "")


def test_batches_hold_each_row_once_those_of_like_length_together():
    rows = question_rows(7)
    batches = list(batches_by_length(rows, 3))
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    lengths = [len(rows[index]["passages"][0]["text"]) for batch in batches for index in batch]
    assert lengths == sorted(lengths)


def test_answers_come_back_in_the_order_of_the_rows(model, processor):
    rows = question_rows(5)
    single = []
    for index, row in enumerate(rows):
        texts, _ = predict(model, processor, [(range(1), slot_inputs(processor, [row]))], str(index))
        single += texts
    batches = [
        (indices, slot_inputs(processor, [rows[index] for index in indices])) for indices in batches_by_length(rows, 2)
    ]
    together, _ = predict(model, processor, batches, "all")
    assert together == single


def test_scores_are_means_in_percent():
    rows = [{"answers": ["Paris"]}, {"answers": ["Rome"]}]
    report = score(rows, ["in Paris", "in paris"])
    assert report["em"]["mean"] == 50.0 and report["em_raw"]["mean"] == 50.0
    assert report["f1"]["mean"] == pytest.approx(100 / 3)
    assert report["em"]["low"] <= report["em"]["mean"] <= report["em"]["high"]


def test_a_run_reports_all_ways(model, processor):
    rows = question_rows(4)
    report = run(model, processor, rows, batch_size=2)
    assert list(report["ways"]) == WAYS
    assert [row["id"] for row in report["predictions"]] == [row["id"] for row in rows]
    assert all(set(WAYS) < set(row) for row in report["predictions"])
    slots = 3 + 2 + 1 + 3
    assert report["context"]["slots_per_question"] == slots / 4
    inputs = slot_inputs(processor, rows)
    model.config.gate_mode = "adaptive"
    depth = model(**inputs).recursion_depth
    expected = depth[depth >= 0].float().mean().item()
    assert report["refinement_steps"] == pytest.approx(expected)
    assert markdown_table({**report, "machine": "here"}).count("\n| ") == 1 + len(WAYS) - 1


def test_the_gate_mode_reaches_the_model(model, processor):
    rows = question_rows(3)
    seen = []

    def generate(**kwargs):
        seen.append(model.config.gate_mode)
        return torch.cat([kwargs["input_ids"], kwargs["input_ids"][:, -1:]], dim=1)

    model.generate = generate
    run(model, processor, rows, batch_size=3)
    assert seen == ["off", "off", "off", "adaptive", "always", "adaptive"]


def test_the_command_writes_json_and_prints_a_table(tmp_path, checkpoint_dir, capsys):
    data = tmp_path / "rows.jsonl"
    write_rows(data, question_rows(3))
    output = tmp_path / "report.json"
    squad_report.main(str(checkpoint_dir), output, data=data, num_questions=2, batch_size=2)
    report = json.loads(output.read_text("utf-8"))
    assert len(report["predictions"]) == 2 and report["data"] == "rows.jsonl"
    assert "| compressed adaptive | " in capsys.readouterr().out
    assert not list(tmp_path.glob("*.tmp"))
