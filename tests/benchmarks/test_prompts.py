"""The benchmark's prompts: those of the evaluation, cut where the question begins, with passages of like length."""

import pytest
import torch
from training_rows import question_rows

from arcaligner.benchmarks.prompts import both_prompts, pick_rows, random_embeds
from arcaligner.evaluation.answering import full_text, passages_text, slot_inputs, text_inputs


@pytest.fixture
def rows(processor):
    return pick_rows(question_rows(6), processor, k=3, batch_size=2)


def encode(processor, rows):
    segments = [processor.segment_documents(row["passages"]) for row in rows]
    texts = [processor.encoder_texts(own, row["passages"]) for own, row in zip(segments, rows, strict=True)]
    return [processor.encode_segments(own) for own in texts]


def test_both_prompts_are_those_of_the_evaluation(processor, rows):
    text, slots = both_prompts(processor, rows, encode(processor, rows), vocab_size=len(processor.tokenizer))
    expected = text_inputs(processor, [full_text(row) for row in rows])
    assert torch.equal(text.whole.input_ids, expected["input_ids"])
    assert torch.equal(text.whole.attention_mask, expected["attention_mask"])
    expected = slot_inputs(processor, rows)
    assert torch.equal(slots.whole.input_ids, expected["input_ids"])
    assert torch.equal(slots.whole.attention_mask, expected["attention_mask"])
    torch.testing.assert_close(slots.context_embeds, expected["context_embeds"])


def test_prefix_and_tail_are_the_whole_prompt_with_the_same_positions(processor, rows):
    for prompts in both_prompts(processor, rows, encode(processor, rows), vocab_size=len(processor.tokenizer)):
        joined = prompts.prefix.then(prompts.tail)
        for row in range(len(rows)):
            whole, parts = prompts.whole.attention_mask[row].bool(), joined.attention_mask[row].bool()
            assert torch.equal(prompts.whole.input_ids[row, whole], joined.input_ids[row, parts])
            assert torch.equal(prompts.whole.position_ids[row, whole], joined.position_ids[row, parts])
        assert bool(prompts.prefix.attention_mask[:, -1].all()) and bool(prompts.tail.attention_mask[:, -1].all())
        assert prompts.context_embeds is None or (prompts.prefix.input_ids[:, -1] == processor.context_token_id).all()


def test_the_question_stands_in_the_tail_alone(processor, rows):
    text, _ = both_prompts(processor, rows, encode(processor, rows), vocab_size=len(processor.tokenizer))
    for row, tail in zip(rows, text.tail.input_ids.tolist(), strict=True):
        assert row["question"] in processor.decode(tail)
        assert all(passage["text"] not in processor.decode(tail) for passage in row["passages"])


def test_rows_take_the_passages_nearest_in_length_and_the_question_of_the_first(processor):
    rows = [
        {"question": f"{size}?", "passages": [{"title": "", "text": " ".join(["sky"] * size)}]}
        for size in (1, 50, 400, 60, 55)
    ]
    tokens = [len(processor.tokenizer(row["passages"][0]["text"])["input_ids"]) for row in rows]
    nearest = sorted(range(5), key=lambda index: abs(tokens[index] - 150))[:3]
    picked = pick_rows(rows, processor, k=2, batch_size=2)
    passages = [rows[index]["passages"][0] for index in nearest]
    assert [row["passages"] for row in picked] == [passages[:2], passages[1:]]
    assert [row["question"] for row in picked] == [rows[index]["question"] for index in nearest[:2]]


def test_no_passage_stands_twice_in_a_prompt_of_a_large_batch(processor):
    for row in pick_rows(question_rows(3), processor, k=3, batch_size=7):
        assert len({passage["text"] for passage in row["passages"]}) == 3


def test_too_few_passages_are_refused(processor):
    with pytest.raises(ValueError, match="Found 3 passages with a question; 4 passages in a prompt need"):
        pick_rows(question_rows(3), processor, k=4, batch_size=1)


def test_ids_of_another_tokenizer_stay_within_the_vocabulary(processor, rows):
    text, slots = both_prompts(processor, rows, encode(processor, rows), vocab_size=50)
    assert int(text.whole.input_ids.max()) < 50
    is_slot = slots.whole.input_ids == processor.context_token_id
    assert is_slot.sum(dim=1).tolist() == [len(each) for each in encode(processor, rows)]
    assert int(slots.whole.input_ids[~is_slot].max()) < 50


def test_random_embeddings_are_unit_vectors_one_for_24_tokens(processor, rows):
    embeds = random_embeds(processor, rows, width=7)
    counts = [len(ids) for ids in processor.tokenizer([passages_text(row) for row in rows])["input_ids"]]
    assert [each.shape for each in embeds] == [(-(-count // 24), 7) for count in counts]
    torch.testing.assert_close(torch.cat(embeds).norm(dim=1), torch.ones(sum(map(len, embeds))))
