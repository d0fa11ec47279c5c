"""Rows become examples: the prompt of inference, labels on what the assistant says, turns side by side."""

from collections import Counter

import numpy as np
import pytest
from conftest import chat_inputs
from training_rows import passage_rows, question_rows

from arcaligner.common.files import stable_number
from arcaligner.segmentation_arcaligner import Segment, encoder_texts
from arcaligner.train.data import (
    CONTINUATION,
    MIN_RARITY,
    RECONSTRUCTION_TEMPLATES,
    ExampleBuilder,
    choose_template,
    chunk_segments,
    word_rarity,
)

# Table "Stage-I instruction templates", as printed.
TEMPLATES = (
    "Background: [B]. This is equivalent to: [T].",
    "Rewrite the background in your own words: [B] → [T].",
    "Provide a restatement of the background: [B]. Return: [T].",
    "[B] is a paraphrase of what? Answer with: [T].",
    "These two expressions convey the same meaning: (1) [B] (2) [T].",
    "Restate [B] using a single sentence. Output only [T].",
)


@pytest.fixture
def builder(processor):
    return ExampleBuilder(processor, max_segments=2)


def targets(processor, example) -> list[str]:
    """What the assistant is to say in each turn."""
    return [processor.decode([label for label in turn.labels if label != -100]) for turn in example.turns]


def test_templates_are_those_of_the_paper_fixed_by_the_id_and_used_about_equally():
    assert tuple(f"{before}[B]{after} [T]." for before, after in RECONSTRUCTION_TEMPLATES) == TEMPLATES
    # Written out: another hash would change every training set, and `hash` does so in each process.
    assert stable_number("recon_train_0", 1000) == 200
    counts = Counter(choose_template(f"row-{number}") for number in range(6000))
    assert len(counts) == 6 and min(counts.values()) > 850


def test_a_question_has_the_prompt_of_inference(processor, builder):
    for row in question_rows(3):
        (example,) = builder.question_examples([row])
        prompt = chat_inputs(processor, row["question"], row["passages"])["input_ids"][0].tolist()
        (turn,) = example.turns
        answer = processor.tokenizer(row["answers"][0] + "<|im_end|>")["input_ids"]
        whole = example.head + [processor.context_token_id] * len(example.segments) + turn.input_ids
        assert whole == prompt + answer
        assert turn.labels == [-100] * (len(turn.input_ids) - len(answer)) + answer
        assert example.length == len(whole)


def test_segments_keep_what_the_encoder_reads_and_their_own_words(processor, builder):
    (row,) = question_rows(1)
    (example,) = builder.question_examples([row])
    (passage,) = row["passages"]
    assert [segment["encoder_text"] for segment in example.segments] == [
        "Toronto Northwest: It was a federal district.",
        "Toronto Northwest: It was created in 1924!",
        "Toronto Northwest: Parkdale lost a part to it?",
    ]
    for segment in example.segments:
        assert segment["encoder_text"][segment["encoder_start"] :] in passage["text"]
        assert segment["word_ends"] == sorted(segment["word_ends"])
    words = [processor.tokenizer.decode(segment["word_ids"]).strip() for segment in example.segments]
    assert " ".join(words) == f"{passage['title']}: {passage['text']}"


def test_questions_about_the_same_passages_are_turns_of_one_example(processor, builder):
    rows = [row | {"passages": question_rows(1)[0]["passages"]} for row in question_rows(3)]
    rows[1]["answers"] = [" "]  # no turn for it
    (together,) = builder.question_examples(rows)
    alone = [next(builder.question_examples([row])) for row in (rows[0], rows[2])]
    assert together.turns == [each.turns[0] for each in alone]
    assert all((each.head, each.segments) == (together.head, together.segments) for each in alone)
    assert together.length == alone[0].length + len(alone[1].turns[0].input_ids)


def test_questions_that_do_not_fit_become_further_examples(processor, builder):
    rows = [row | {"passages": question_rows(1)[0]["passages"]} for row in question_rows(5)]
    (together,) = builder.question_examples(rows)
    one = together.length - sum(len(turn.input_ids) for turn in together.turns[1:])
    for limit, sizes in ((together.length, [5]), (together.length - 1, [4, 1]), (one, [1] * 5), (1, [1] * 5)):
        found = list(ExampleBuilder(processor, max_segments=2, max_tokens=limit).question_examples(rows))
        assert [len(example.turns) for example in found] == sizes
        assert [turn for example in found for turn in example.turns] == together.turns
        assert len({example.row_id for example in found}) == len(found)
        assert all(example.segments == together.segments for example in found)
        assert limit in (1, one) or max(example.length for example in found) <= limit


def test_the_finest_rate_decides_how_long_an_example_is(processor):
    (row,) = question_rows(1)
    lengths = []
    for rates in (["segment"], ["segment", 4, 2]):
        (example,) = ExampleBuilder(processor, tokens_per_slot=rates).question_examples([row])
        lengths.append(example.length)
    fewest, most = (len(processor.encode_documents(row["passages"], tokens_per_slot=r)[1]) for r in ("segment", 2))
    assert fewest < most and lengths[1] - lengths[0] == most - fewest


def test_a_question_without_passages_has_the_slot_of_the_empty_text(builder):
    (example,) = builder.question_examples([question_rows(1)[0] | {"passages": []}])
    assert example.segments == [
        {"document": 0, "encoder_text": "", "encoder_start": 0, "word_ids": [], "word_ends": []}
    ]


@pytest.mark.parametrize("answers", [[], [""], ["  "]])
def test_a_question_without_an_answer_gives_no_example(builder, answers):
    assert not list(builder.question_examples([question_rows(1)[0] | {"answers": answers}]))


def test_reconstruction_covers_each_segment_once_with_its_text_as_target(processor, builder):
    for row in passage_rows(3):
        examples = list(builder.reconstruction_examples([row]))
        (passage,) = row["passages"]
        texts = [text for example in examples for text in targets(processor, example)]
        assert all(text.endswith("<|im_end|>") for text in texts)
        assert " ".join(text.removesuffix("<|im_end|>") for text in texts) == passage["text"]
        read = [segment["encoder_text"] for example in examples for segment in example.segments]
        assert read == encoder_texts(processor.slot_encoder.segment_documents(row["passages"]), row["passages"])
        assert all(1 <= len(example.segments) <= 2 for example in examples)


def test_reconstruction_puts_the_slots_where_the_template_says(processor):
    (example,) = ExampleBuilder(processor).reconstruction_examples([passage_rows(3)[2]])
    before, after = choose_template("row-2:0:0")
    assert processor.decode(example.head) == f"<|im_start|>user\n{before}"
    assert processor.decode(example.turns[0].input_ids) == (
        f"{after}<|im_end|>\n<|im_start|>assistant\nNobody else knew how to read it aloud.<|im_end|>"
    )


def test_a_second_turn_goes_on_with_the_next_segment(processor):
    row = passage_rows(1)[0]
    plain = list(ExampleBuilder(processor, max_segments=1).reconstruction_examples([row]))
    examples = list(ExampleBuilder(processor, max_segments=1, continues=True).reconstruction_examples([row]))
    texts = [segment.text + "<|im_end|>" for segment in processor.slot_encoder.segment_documents(row["passages"])]
    assert [targets(processor, each) for each in examples] == [texts[:2], texts[1:], texts[2:]]
    for example, without in zip(examples, plain, strict=True):
        assert (example.head, example.turns[0], example.segments) == (without.head, without.turns[0], without.segments)
    assert processor.decode(examples[0].turns[1].input_ids).startswith(f"{CONTINUATION}<|im_end|>\n<|im_start|>assis")


def test_the_context_token_in_a_text_is_text(processor, builder):
    (example,) = builder.question_examples([question_rows(1)[0] | {"question": "What does <context> mean?"}])
    assert processor.context_token_id not in example.head + example.turns[0].input_ids


def test_chunks_are_consecutive_and_fixed_by_the_row():
    segments = [Segment(0, start, start + 1, "x") for start in range(40)]
    chunks = list(chunk_segments(segments, 3, "row"))
    assert [segment for chunk in chunks for segment in chunk] == segments
    assert {len(chunk) for chunk in chunks} == {1, 2, 3}
    assert chunks == list(chunk_segments(segments, 3, "row")) != list(chunk_segments(segments, 3, "another row"))


def test_a_template_that_renders_the_prompt_in_two_ways_is_refused(builder, processor, monkeypatch):
    template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    template += "{% if add_generation_prompt %}?{% endif %}"
    monkeypatch.setattr(processor, "chat_template", template)
    with pytest.raises(ValueError, match="Row row-0: the prompt .* is not how the whole .*chat_template_path"):
        list(builder.question_examples(question_rows(1)))


def test_a_template_that_ends_no_turn_gets_the_eos_token(builder, processor, monkeypatch):
    monkeypatch.setattr(processor, "chat_template", "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    (example,) = builder.question_examples(question_rows(1))
    assert processor.decode(example.turns[0].input_ids).endswith("it?<|im_end|>")


def test_max_segments_below_one_is_refused(processor):
    with pytest.raises(ValueError, match="`max_segments` is 0"):
        ExampleBuilder(processor, max_segments=0)


def test_rare_words_weigh_more_and_none_nothing():
    segments = [[0, 1], [0, 2, 2], [0], [0, 2]]
    rarity = word_rarity([{"segments": [{"word_ids": ids} for ids in segments[:2]]}, {"segments": []}], 4)
    np.testing.assert_allclose(rarity, [MIN_RARITY, *2 * [np.log(3 / 2) / np.log(3)], 1.0])
    rarity = word_rarity([{"segments": [{"word_ids": ids} for ids in segments]}], 4)
    assert rarity.shape == (4,) and rarity[0] == MIN_RARITY < rarity[2] < rarity[1] < rarity[3] == 1.0
