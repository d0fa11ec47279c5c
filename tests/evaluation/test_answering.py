"""The prompts of the ways to answer differ where they should and nowhere else; answers keep the rows' order."""

import pytest
from training_rows import question_rows

from arcaligner.evaluation import answering
from arcaligner.evaluation.answering import (
    batches_by_length,
    closed_book_text,
    full_text,
    passages_text,
    predict,
    slot_inputs,
    text_inputs,
)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(answering, "MAX_NEW_TOKENS", 4)


def test_the_prompt_with_text_differs_from_the_one_with_slots_in_the_passage_alone(processor):
    (row,) = question_rows(1)
    slots = processor.decode(slot_inputs(processor, [row])["input_ids"][0])
    text = processor.decode(text_inputs(processor, [row], full_text)["input_ids"][0])
    passage = f"Toronto Northwest: {row['passages'][0]['text']}"
    assert text == slots.replace("<context>" * 3, passage)
    closed = processor.decode(text_inputs(processor, [row], closed_book_text)["input_ids"][0])
    assert closed == text.replace(f"Refer to the background document: {passage}\n", "")
    empty = processor.decode(slot_inputs(processor, [row], with_passages=False)["input_ids"][0])
    assert empty == slots.replace("<context>" * 3, "<context>")


def test_passages_follow_each_other_with_their_titles():
    row = {"passages": [{"title": "Ada", "text": "She wrote it."}, {"title": "", "text": "Nobody read it."}]}
    assert passages_text(row) == "Ada: She wrote it. Nobody read it."


def test_batches_hold_each_row_once_those_of_like_length_together():
    rows = question_rows(7)
    batches = list(batches_by_length(rows, 3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
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
    together, seconds = predict(model, processor, batches, "all")
    assert together == single and len(set(single)) > 1
    assert seconds > 0
