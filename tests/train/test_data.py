"""Rows become examples: the prompt of inference, labels on the answer, a segment a slot."""

import numpy as np
import pytest
from training_rows import passage_rows, question_rows

from arcaligner.segmentation_arcaligner import Segment
from arcaligner.train.data import ExampleBuilder, build_dataset, chunk_segments
from arcaligner.train.embedding_store import EmbeddingStore
from arcaligner.train.templates import choose_template


@pytest.fixture
def builder(processor):
    return ExampleBuilder(processor, max_segments=2)


def test_a_question_has_the_prompt_of_inference(processor, builder):
    for row in question_rows(3):
        (example,) = builder.question_examples(row)
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": row["question"]}],
            documents=row["passages"],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
        prompt = inputs["input_ids"][0]
        assert example.input_ids[: len(prompt)] == prompt
        assert example.labels[: len(prompt)] == [-100] * len(prompt)
        expected = processor.tokenizer(row["answers"][0] + "<|im_end|>")["input_ids"]
        assert example.labels[len(prompt) :] == example.input_ids[len(prompt) :] == expected


def test_slots_stand_for_the_segments_of_inference_in_order(processor, builder):
    (row,) = question_rows(1)
    (example,) = builder.question_examples(row)
    assert example.segment_texts == [
        "Toronto Northwest: It was a federal district.",
        "Toronto Northwest: It was created in 1924!",
        "Toronto Northwest: Parkdale lost a part to it?",
    ]
    assert example.input_ids.count(processor.context_token_id) == 3


def test_a_question_without_passages_has_the_slot_of_the_empty_text(processor, builder):
    row = question_rows(1)[0] | {"passages": []}
    (example,) = builder.question_examples(row)
    assert example.segment_texts == [""]
    assert example.input_ids.count(processor.context_token_id) == 1


@pytest.mark.parametrize("answers", [[], [""], ["  "]])
def test_a_question_without_an_answer_gives_no_example(builder, answers):
    assert not list(builder.question_examples(question_rows(1)[0] | {"answers": answers}))


def test_reconstruction_covers_each_segment_once_with_its_text_as_target(processor, builder):
    for row in passage_rows(3):
        examples = list(builder.reconstruction_examples(row))
        (passage,) = row["passages"]
        targets = [processor.decode([label for label in example.labels if label != -100]) for example in examples]
        assert all(target.endswith("<|im_end|>") for target in targets)
        assert " ".join(target.removesuffix("<|im_end|>") for target in targets) == passage["text"]
        segments = processor.segment_documents(row["passages"])
        texts = [text for example in examples for text in example.segment_texts]
        assert texts == processor.encoder_texts(segments, row["passages"])
        for example in examples:
            num_slots = example.input_ids.count(processor.context_token_id)
            assert 1 <= num_slots == len(example.segment_texts) <= 2


def test_reconstruction_puts_the_slots_where_the_template_says(processor):
    builder = ExampleBuilder(processor, max_segments=1)
    row = passage_rows(3)[2]
    (example,) = builder.reconstruction_examples(row)
    text = processor.decode(example.input_ids)
    target = "Nobody else knew how to read it aloud."
    template = choose_template("row-2:0:0")
    assert text == (
        f"<|im_start|>user\n{template.before}<context>{template.after}<|im_end|>\n"
        f"<|im_start|>assistant\n{target}<|im_end|>"
    )


def test_the_context_token_in_a_text_is_text(processor, builder):
    row = question_rows(1)[0]
    row["question"] = "What does <context> mean?"
    (example,) = builder.question_examples(row)
    assert example.input_ids.count(processor.context_token_id) == len(example.segment_texts) == 3


def test_chunks_are_consecutive_and_fixed_by_the_row():
    segments = [Segment(0, start, start + 1, "x") for start in range(40)]
    chunks = list(chunk_segments(segments, 3, "row"))
    assert [segment for chunk in chunks for segment in chunk] == segments
    assert {len(chunk) for chunk in chunks} == {1, 2, 3}
    assert chunks == list(chunk_segments(segments, 3, "row"))
    assert chunks != list(chunk_segments(segments, 3, "another row"))


def test_a_template_that_renders_the_prompt_in_two_ways_is_refused(builder, processor, monkeypatch):
    template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    template += "{% if add_generation_prompt %}?{% endif %}"
    monkeypatch.setattr(processor, "chat_template", template)
    with pytest.raises(ValueError, match="Row row-0: the prompt .* is not how the whole .*chat_template_path"):
        list(builder.question_examples(question_rows(1)[0]))


def test_a_template_that_ends_no_turn_gets_the_eos_token(builder, processor, monkeypatch):
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    monkeypatch.setattr(processor, "chat_template", template)
    (example,) = builder.question_examples(question_rows(1)[0])
    assert processor.decode(example.input_ids).endswith("it?<|im_end|>")


def test_max_segments_below_one_is_refused(processor):
    with pytest.raises(ValueError, match="`max_segments` is 0"):
        ExampleBuilder(processor, max_segments=0)


def test_the_dataset_points_to_the_embeddings_of_its_segments(tmp_path, processor, builder):
    store = EmbeddingStore(tmp_path, "tiny", processor.encoder_hidden_size, processor.encode_segments)
    examples = [e for row in question_rows(4) for e in builder.question_examples(row)]
    dataset = build_dataset(examples, store)
    assert dataset.column_names == ["row_id", "input_ids", "labels", "answers", "length", "segment_rows"]
    for row, example in zip(dataset, examples, strict=True):
        assert (row["row_id"], row["input_ids"], row["labels"], row["length"]) == (
            example.row_id,
            example.input_ids,
            example.labels,
            len(example.input_ids),
        )
        expected = processor.encode_segments(example.segment_texts).numpy()
        np.testing.assert_allclose(store[row["segment_rows"]], expected, atol=1e-3)
    assert len(store) == 6  # rows 0 and 3 share their passage
