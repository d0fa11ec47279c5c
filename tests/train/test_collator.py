"""Batches: padding, a rate of slots for each batch, turns that stand side by side and do not read each other."""

from dataclasses import asdict

import pytest
import torch
from tiny_models import float64_throughout
from torch.nn.functional import cross_entropy
from training_rows import passage_rows, question_rows

from arcaligner.train.data import ContextCollator, ExampleBuilder, encode_slots
from arcaligner.train.trainer import turn_mask

SLOT, PAD = 99, 7


def row(row_id, num_words, num_turns=1):
    """An example as 🤗 Datasets gives it: a segment of one-character words after a title of three characters."""
    turns = [{"input_ids": [20 + n, 30 + n], "labels": [-100, 30 + n]} for n in range(num_turns)]
    segment = {"document": 0, "encoder_text": "T: " + "w" * num_words, "encoder_start": 3}
    segment |= {"word_ids": list(range(num_words)), "word_ends": list(range(1, num_words + 1))}
    return {"row_id": row_id, "head": [1, 2], "turns": turns, "segments": [segment]}


def collate(rows, rates=("segment",), **settings):
    return ContextCollator(SLOT, PAD, rates, **settings)(rows)


def test_a_batch_is_padded_and_tells_turns_apart():
    batch = collate([row("x", 2, num_turns=2), row("y", 4)], context_words=True)
    expected = {
        "input_ids": torch.tensor([[1, 2, SLOT, 20, 30, 21, 31], [1, 2, SLOT, 20, 30, PAD, PAD]]),
        "labels": torch.tensor([[-100, -100, -100, -100, 30, -100, 31], [-100, -100, -100, -100, 30, -100, -100]]),
        "turn_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, -1, -1]]),
        "context_word_ids": torch.tensor([[[0, 1, -1, -1]], [[0, 1, 2, 3]]]),
        "context_passage_ids": torch.tensor([[0], [0]]),
    }
    for key, tensor in expected.items():
        assert torch.equal(batch.pop(key), tensor), key
    read = {"encoder_texts": ["T: ww", "T: wwww"], "encoder_starts": [3, 3], "encoder_ends": None}
    assert batch == read | {"num_slots": [1, 1], "max_turns": 2, "row_ids": ["x", "y"]}


def test_a_rate_cuts_segments_into_slots_with_their_words_and_characters():
    batch = collate([row("x", 6), row("y", 3)], rates=(3,), context_words=True)
    assert batch["num_slots"] == [2, 1]
    assert (batch["input_ids"] == SLOT).sum(dim=1).tolist() == [2, 1]
    assert batch["encoder_ends"] == [[6, 9], [6]]
    assert torch.equal(batch["context_word_ids"], torch.tensor([[[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [-1, -1, -1]]]))


def test_the_rows_alone_decide_the_rate_and_all_rates_are_drawn():
    rates = (1, 2, "segment")
    found = [collate([row(f"{n}", 4), row("y", 4)], rates)["num_slots"][0] for n in range(40)]
    assert set(found) == {4, 2, 1}
    assert found == [collate([row(f"{n}", 4), row("y", 4)], rates)["num_slots"][0] for n in range(40)]
    both = [collate([row("3", 4), row("y", 4, num_turns)], rates)["num_slots"] for num_turns in (1, 2)]
    assert both[0] == both[1]  # another number of turns, as where a prompt is answered, is no other batch


def test_slots_of_a_batch_are_those_of_inference(processor):
    """The same embeddings and words as `encode_documents` has for each row's passages."""
    rows = [asdict(example) for example in examples_of(processor, 3)]
    for rate in ("segment", 4):
        batch = ContextCollator(processor.context_token_id, PAD, (rate,), context_words=True)(rows)
        embeds = encode_slots(processor, batch)
        for number, (own, asked) in enumerate(zip(embeds, question_rows(3), strict=True)):
            expected = processor.encode_documents(asked["passages"], tokens_per_slot=rate)
            own = own[: batch["num_slots"][number]]
            torch.testing.assert_close(own, expected.context_embeds, rtol=1e-5, atol=1e-6)
            words = [segment["word_ids"] for segment in rows[number]["segments"]]
            found = batch["context_word_ids"][number]
            assert found[found >= 0].tolist() == [word for each in words for word in each]


def examples_of(processor, count):
    builder = ExampleBuilder(processor)
    return [example for each in question_rows(count) for example in builder.question_examples([each])]


def test_a_turn_reads_the_slots_and_itself_and_counts_on_from_the_slots():
    turn_ids = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 2, -1, -1]])
    mask, position_ids = turn_mask(turn_ids, torch.tensor([[-1, 0, -1, -1, -1], [0, -1, -1, -1, -1]]), torch.float32)
    reads = [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]],
    ]
    expected = torch.where(torch.tensor(reads) == 1, 0.0, torch.finfo(torch.float32).min)
    assert mask.shape == (2, 1, 5, 5) and torch.equal(mask[:, 0], expected)
    assert position_ids[0].tolist() == [0, 1, 2, 3, 2] and position_ids[1, :3].tolist() == [0, 1, 1]


def test_turns_count_on_from_the_longest_of_passages_that_are_read_apart():
    turn_ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2]])
    _, position_ids = turn_mask(turn_ids, torch.tensor([[-1, 0, 0, 1, 2, -1, -1, -1]]), torch.float32)
    assert position_ids.tolist() == [[0, 1, 2, 1, 1, 3, 4, 3]]


def turns_apart(example):
    row_id = example["row_id"]
    return [example | {"row_id": f"{row_id}-{n}", "turns": [turn]} for n, turn in enumerate(example["turns"])]


@pytest.mark.parametrize("gate_mode", ["off", "adaptive"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_turns_side_by_side_give_the_logits_and_loss_of_each_alone(processor, model, gate_mode, attention):
    model = model.double()
    model.set_attn_implementation(attention)
    rows = [each | {"passages": question_rows(1)[0]["passages"]} for each in question_rows(3)]
    (example,) = ExampleBuilder(processor).question_examples(rows)
    together = asdict(example)
    collator = ContextCollator(processor.context_token_id, 0)

    def forward(rows, use_turn_mask):
        batch = collator(rows)
        is_slot = batch["input_ids"] == processor.context_token_id
        mask, position_ids = turn_mask(batch["turn_ids"], torch.where(is_slot, 0, -1), torch.float64)
        if not use_turn_mask:
            mask, position_ids = (batch["turn_ids"] >= 0).long(), None
        embeds = encode_slots(processor, batch).double()
        inputs = {"input_ids": batch["input_ids"], "attention_mask": mask, "position_ids": position_ids}
        with torch.no_grad(), float64_throughout():
            logits = model(**inputs, context_embeds=embeds, gate_mode=gate_mode, use_cache=False).logits
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        return batch, logits, losses

    batch, logits, loss = forward([together], use_turn_mask=True)
    alone, alone_logits, alone_loss = forward(turns_apart(together), use_turn_mask=False)
    torch.testing.assert_close(loss, alone_loss, rtol=1e-10, atol=1e-10)
    for number in (1, 2, 3):
        own = logits[0][batch["turn_ids"][0] == number]
        torch.testing.assert_close(own, alone_logits[number - 1][alone["turn_ids"][number - 1] == 1], rtol=0, atol=1e-9)


def test_rows_without_words_keep_their_slot(processor):
    empty = {"document": 0, "encoder_text": "", "encoder_start": 0, "word_ids": [], "word_ends": []}
    batch = collate([row("x", 4), row("y", 0) | {"segments": [empty]}], rates=(2,), context_words=True)
    assert batch["num_slots"] == [2, 1] and batch["encoder_ends"] == [[5, 7], [0]]
    assert torch.equal(batch["context_word_ids"][1], torch.full((2, 2), -1))
    (example, *_) = ExampleBuilder(processor).reconstruction_examples(passage_rows(1))
    assert collate([asdict(example)])["num_slots"] == [1]
