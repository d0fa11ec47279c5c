"""The prompts of the ways to answer differ where they should and nowhere else."""

from training_rows import question_rows

from arcaligner.evaluation.answering import (
    closed_book_text,
    full_text,
    passages_text,
    slot_inputs,
    text_inputs,
)


def test_the_prompt_with_text_differs_from_the_one_with_slots_in_the_passage_alone(processor):
    (row,) = question_rows(1)
    slots = processor.decode(slot_inputs(processor, [row])["input_ids"][0])
    text = processor.decode(text_inputs(processor, [full_text(row)])["input_ids"][0])
    passage = f"Toronto Northwest: {row['passages'][0]['text']}"
    assert text == slots.replace("<context>" * 3, passage)
    closed = processor.decode(text_inputs(processor, [closed_book_text(row)])["input_ids"][0])
    assert closed == text.replace(f"Refer to the background document: {passage}\n", "")
    empty = processor.decode(slot_inputs(processor, [row], with_passages=False)["input_ids"][0])
    assert empty == slots.replace("<context>" * 3, "<context>")


def test_passages_follow_each_other_with_their_titles():
    row = {"passages": [{"title": "Ada", "text": "She wrote it."}, {"title": "", "text": "Nobody read it."}]}
    assert passages_text(row) == "Ada: She wrote it. Nobody read it."


def test_without_a_passage_the_text_prompt_is_the_question_alone():
    row = question_rows(1)[0] | {"passages": []}
    assert full_text(row) == closed_book_text(row)
