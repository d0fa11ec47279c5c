"""The pipeline gives what the model gives on the processor's inputs, for every form of input."""

import copy

import pytest
import torch
from conftest import chat_inputs, greedy_answer, pipeline_of
from transformers import AutoModelForCausalLM, TextGenerationPipeline, TextIteratorStreamer

from arcaligner.layers_arcaligner import format_trajectory

QUESTION = "Who wrote it?"
TORONTO = {"title": "Toronto Northwest", "text": "The riding was created in 1924."}
DOCUMENTS = ["It was written by Ada.  Nobody else knew.", TORONTO]
CHAT = [{"role": "user", "content": QUESTION}]
ROWS = [
    {"question": QUESTION, "documents": DOCUMENTS},
    {"question": "What sport does Radik Zhaparov play?", "documents": ["He is a ski jumper."]},
    {"question": "Is there anything?", "documents": []},
    {"question": "Where is the riding?", "documents": [f"Line {i}." for i in range(7)]},
]
NEW_TOKENS = 6


@pytest.fixture
def ask(model, processor):
    return pipeline_of(model, processor, max_new_tokens=NEW_TOKENS)


@pytest.fixture
def ask_base_model(base_model_dir, processor):
    """The built-in pipeline around the base model."""
    base = AutoModelForCausalLM.from_pretrained(base_model_dir)
    settings = {"device": "cpu", "max_new_tokens": NEW_TOKENS, "do_sample": False}
    tokenizer = copy.deepcopy(processor.tokenizer)
    return TextGenerationPipeline(model=base, tokenizer=tokenizer, task="text-generation", **settings)


def test_question_gets_the_answer_that_the_model_generates(ask, model, processor):
    expected = greedy_answer(model, processor, chat_inputs(processor, CHAT, DOCUMENTS), NEW_TOKENS)
    assert ask(ROWS[0]) == [{"generated_text": expected}]


def test_a_question_comes_back_as_an_answer_and_a_chat_with_the_answer_appended(ask):
    answer = ask(ROWS[0])[0]["generated_text"]
    whole = [{"generated_text": [*CHAT, {"role": "assistant", "content": answer}]}]
    assert ask(CHAT, documents=DOCUMENTS) == ask(ROWS[0], return_full_text=True) == whole
    for answer_only in (ask(CHAT, documents=DOCUMENTS, return_full_text=False), ask(QUESTION, documents=DOCUMENTS)):
        assert answer_only == [{"generated_text": answer}]


def test_earlier_turns_are_kept_and_the_slots_stand_in_the_first(ask, model, processor):
    chat = [*CHAT, {"role": "assistant", "content": "Ada."}, {"role": "user", "content": "When?"}]
    expected = greedy_answer(model, processor, chat_inputs(processor, chat, DOCUMENTS), NEW_TOKENS)
    output = ask(chat, documents=DOCUMENTS)[0]["generated_text"]
    assert output == [*chat, {"role": "assistant", "content": expected}]


def test_chat_ending_with_the_assistant_is_continued(ask):
    chat = [*CHAT, {"role": "assistant", "content": "It was"}]
    output = ask(chat, documents=DOCUMENTS)[0]["generated_text"]
    assert output[:-1] == CHAT
    assert output[-1]["content"].startswith("It was") and output[-1]["content"] != "It was"


@pytest.mark.parametrize("given", ["Once upon a time", CHAT], ids=["text", "chat"])
def test_input_without_documents_is_answered_by_the_base_model(ask, ask_base_model, given):
    assert ask(given) == ask_base_model(given)


def test_rows_bring_their_own_documents_whatever_the_batch_size(ask):
    rows = [{"messages": CHAT}, *ROWS]  # the first has no slots
    one_by_one = [ask(row, return_slots=True) for row in rows]
    texts = [records[0]["generated_text"] for records in one_by_one[1:]]
    assert len(set(texts)) == len(texts)
    assert [r[0]["statistics"]["slots"] for r in one_by_one] == [0, 3, 1, 1, 7]
    for batch_size in (1, 2, 3, 5):
        assert ask(rows, batch_size=batch_size, return_slots=True) == one_by_one


def test_rows_without_documents_take_those_of_the_call(ask):
    rows = [{"question": QUESTION}, ROWS[1]]
    assert ask(rows, documents=DOCUMENTS, batch_size=2) == [ask(ROWS[0]), ask(ROWS[1])]
    assert ask([CHAT, CHAT], documents=DOCUMENTS) == 2 * [ask(CHAT, documents=DOCUMENTS)]


def test_a_generator_of_rows_is_answered_lazily(ask):
    answers = ask(row for row in ROWS)
    assert [answer for answer in answers] == [ask(row) for row in ROWS]


def test_question_without_documents_has_the_slot_of_no_passages(ask, model, processor):
    expected = greedy_answer(model, processor, chat_inputs(processor, CHAT, []), NEW_TOKENS)
    records = ask({"question": QUESTION}, return_slots=True)
    assert records[0]["generated_text"] == expected
    assert records[0]["statistics"]["slots"] == 1 and records[0]["segments"] == []


def test_slots_tell_their_segments_trajectories_and_rate(ask, model, processor):
    record = ask(ROWS[0], return_slots=True)[0]
    texts = [DOCUMENTS[0], DOCUMENTS[1]["text"]]
    for segment in record["segments"]:
        assert texts[segment["document"]][segment["start"] : segment["end"]] == segment["text"]
    sentences = ["It was written by Ada.", "Nobody else knew.", "The riding was created in 1924."]
    assert [segment["text"] for segment in record["segments"]] == sentences
    inputs = chat_inputs(processor, CHAT, DOCUMENTS)
    depth = model(**inputs).recursion_depth[0]  # (num_layers, num_slots)
    expected = [[format_trajectory(each) for each in layer] for layer in depth.tolist()]
    assert record["trajectories"] == expected
    assert {"L0.", "LLL"} <= {each for layer in expected for each in layer}
    tokens = sum(len(processor.tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts)
    assert record["statistics"] == {"tokens": tokens, "slots": 3, "compression_rate": tokens / 3}


def test_streamer_receives_the_answer_piece_by_piece(ask, processor):
    streamer = TextIteratorStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=30)
    answer = ask(ROWS[1], streamer=streamer)[0]["generated_text"]
    assert "".join(streamer) == answer


def test_streamer_that_shows_the_prompt_survives_slots(ask, processor):
    streamer = TextIteratorStreamer(processor.tokenizer, timeout=30)
    ask(ROWS[0], streamer=streamer)
    assert f"Question: {QUESTION}" in "".join(streamer)


def test_generation_options_reach_the_model(ask, model, processor):
    beams = ask(ROWS[0], num_beams=3, num_return_sequences=2, return_slots=True)
    inputs = chat_inputs(processor, CHAT, DOCUMENTS)
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, num_beams=3, num_return_sequences=2)
    texts = processor.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [record["generated_text"] for record in beams] == texts
    assert beams[0]["trajectories"] == beams[1]["trajectories"]
    (record,) = ask(ROWS[0], max_new_tokens=1, return_tensors=True)
    assert len(record["generated_token_ids"]) == inputs["input_ids"].shape[1] + 1


def test_it_samples_only_when_asked_to(ask):
    torch.manual_seed(0)
    greedy = [ask(ROWS[0]) for _ in range(3)]
    sampled = [ask(ROWS[0], do_sample=True, temperature=5.0) for _ in range(3)]
    assert greedy[0] == greedy[1] == greedy[2]
    assert not sampled[0] == sampled[1] == sampled[2]


def test_backbone_without_chat_template_gets_the_plain_prompt(ask, model, processor):
    ask.processor = copy.deepcopy(processor)
    ask.processor.chat_template = None
    inputs = processor(text=QUESTION, documents=DOCUMENTS, return_tensors="pt")
    expected = greedy_answer(model, processor, inputs, NEW_TOKENS)
    assert ask(ROWS[0]) == [{"generated_text": expected}]
    assert expected != greedy_answer(model, processor, chat_inputs(processor, CHAT, DOCUMENTS), NEW_TOKENS)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"question": 3, "documents": DOCUMENTS}, {}, "`question` of type int"),
        ({"query": "Who?"}, {}, "`query` of type str"),
        ({"question": QUESTION, "passages": DOCUMENTS}, {}, "no `documents` but `passages`"),
        ({"messages": CHAT, "context": "It was Ada.", "id": 1}, {}, "no `documents` but `context`, `id`"),
        (7, {}, "got int"),
        (CHAT, {"documents": [DOCUMENTS]}, "Document 0 is of type list"),
        ([{"role": "system", "content": "x"}], {"documents": DOCUMENTS}, "no user message"),
        (ROWS[0], {"handle_long_generation": "hole"}, "where the slots stand"),
        (ROWS[0], {"truncation": True, "max_length": 4}, "would cut slots"),
    ],
)
def test_bad_input_is_refused_with_what_was_given(ask, given, options, message):
    with pytest.raises(ValueError, match=message):
        ask(given, **options)


def test_budget_of_slots_reaches_the_processor(ask, processor):
    record = ask(ROWS[0], max_slots=2, return_slots=True)[0]
    expected = processor(text=QUESTION, documents=DOCUMENTS, return_segments=True, max_slots=2)
    assert record["segments"] == [vars(segment) for segment in expected["segments"][0]]
    assert record["statistics"] == expected["statistics"][0]
    assert [len(layer) for layer in record["trajectories"]] == [2, 2, 2]
    assert ask("Once upon a time", max_slots=2) == ask("Once upon a time")


@pytest.mark.parametrize(
    "settings, config",
    [
        ({"refinement_budget": 0}, {"gate_mode": "off"}),
        *(2 * (each,) for each in ({"max_refinement_steps": 1}, {"gate_mode": "always", "max_refinement_steps": 3})),
    ],
)
def test_settings_of_the_gates_hold_for_answer_and_trajectories(ask, settings, config):
    found = ask(ROWS[3], return_slots=True, **settings)
    plain = ask(ROWS[3], return_slots=True)
    ask.model.config.update(config)
    assert found == ask(ROWS[3], return_slots=True)
    assert found[0]["trajectories"] != plain[0]["trajectories"]
