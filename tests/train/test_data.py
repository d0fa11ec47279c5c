"""Rows become examples: the prompt of inference, labels on the answer, a segment a slot."""

import numpy as np
import pytest
from training_rows import passage_rows, question_rows, write_rows

from arcaligner.segmentation_arcaligner import Segment
from arcaligner.train.data import (
    Example,
    ExampleBuilder,
    build_dataset,
    chunk_segments,
    read_rows,
    select_examples,
)
from arcaligner.train.embedding_store import EmbeddingStore
from arcaligner.train.templates import choose_template


@pytest.fixture
def builder(processor):
    return ExampleBuilder(processor, max_segments=2)


def one_token_examples(row):
    """A stand-in for a builder: one example a row, of as many tokens as the row says."""
    yield Example(row["id"], [0] * row.get("tokens", 1), [0], [""])


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


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_are_read_plain_and_gzipped(tmp_path, name):
    rows = question_rows(2)
    assert read_rows(write_rows(tmp_path / name, rows)) == rows


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is not a JSON object"),
        ("7", "line 2"),
        ('{"id": "1"}', "has no question, answers"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    write_rows(path, question_rows(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(path)


@pytest.fixture
def two_files(tmp_path):
    many = [{**row, "id": f"many-{row['id']}"} for row in question_rows(30)]
    few = [{**row, "id": f"few-{row['id']}"} for row in question_rows(6)]
    return write_rows(tmp_path / "many.jsonl", many), write_rows(tmp_path / "few.jsonl", few)


def counts(examples):
    return {kind: sum(example.row_id.startswith(kind) for example in examples) for kind in ("many", "few")}


def test_a_mixture_has_the_shares_and_repeats_nothing(two_files):
    many, few = two_files
    mixture = select_examples({many: 3.0, few: 1.0}, one_token_examples, 16, None, seed=0)
    assert counts(mixture) == {"many": 12, "few": 4}
    assert len({example.row_id for example in mixture}) == 16


def test_a_short_file_shrinks_the_mixture_but_keeps_its_shares(two_files):
    many, few = two_files
    for limit in (30, None):
        mixture = select_examples({many: 1.0, few: 1.0}, one_token_examples, limit, None, seed=0)
        assert counts(mixture) == {"many": 6, "few": 6}


def test_the_selection_is_random_and_repeatable(two_files):
    many, _ = two_files

    def ids(seed):
        return [e.row_id for e in select_examples({many: 1.0}, one_token_examples, 8, None, seed)]

    assert ids(0) == ids(0) != ids(1)
    assert ids(0) != [f"many-row-{number}" for number in range(8)]


def test_long_examples_are_left_out_and_made_up_for(tmp_path):
    rows = [row | {"tokens": 1 + number % 2} for number, row in enumerate(question_rows(20))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    mixture = select_examples({path: 1.0}, one_token_examples, 8, max_tokens=1, seed=0)
    assert [len(example.input_ids) for example in mixture] == [1] * 8


def test_max_passages_limits_passages_not_questions(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(30))
    mixture = select_examples({path: 1.0}, one_token_examples, None, None, 0, max_passages=2)
    assert len(mixture) == 20
    assert len({int(example.row_id.split("-")[1]) % 3 for example in mixture}) == 2


def test_no_examples_and_bad_weights_are_refused(two_files):
    many, few = two_files
    with pytest.raises(ValueError, match="No examples"):
        select_examples({many: 1.0}, one_token_examples, 8, max_tokens=0, seed=0)
    with pytest.raises(ValueError, match="positive weights"):
        select_examples({many: 1.0, few: 0.0}, one_token_examples, 8, None, seed=0)


def test_the_dataset_points_to_the_embeddings_of_its_segments(tmp_path, processor, builder):
    store = EmbeddingStore(tmp_path, "tiny", processor.encoder_hidden_size, processor.encode_segments)
    examples = [e for row in question_rows(4) for e in builder.question_examples(row)]
    dataset = build_dataset(examples, store)
    assert dataset.column_names == ["row_id", "input_ids", "labels", "length", "segment_rows"]
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
