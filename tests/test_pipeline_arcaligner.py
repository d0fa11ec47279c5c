"""The pipeline gives the answer of the model to the processor's inputs, for every form of input."""

import copy

import pytest
from conftest import chat_inputs, greedy_answer, pipeline_of, processor_with
from transformers import AutoModelForCausalLM, TextGenerationPipeline, TextIteratorStreamer

from arcaligner.pipeline_arcaligner import format_trajectory

QUESTION = "Who wrote it?"
TORONTO = {"title": "Toronto Northwest", "text": "The riding was created in 1924."}
DOCUMENTS = ["It was written by Ada.  Nobody else knew.", TORONTO]
CHAT = [{"role": "user", "content": QUESTION}]
TURNS = [*CHAT, {"role": "assistant", "content": "Ada."}, {"role": "user", "content": "When?"}]
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


@pytest.mark.parametrize(
    "inputs, chat, documents",
    [
        (ROWS[0], CHAT, DOCUMENTS),
        ({"messages": TURNS}, TURNS, DOCUMENTS),
        ({"question": QUESTION}, CHAT, []),
    ],
    ids=["question", "earlier turns", "no passage"],
)
def test_pipeline_equals_generate(ask, model, processor, inputs, chat, documents):
    expected = greedy_answer(model, processor, chat_inputs(processor, chat, documents), NEW_TOKENS)
    record = ask({"documents": documents} | inputs, return_full_text=False, return_slots=True)[0]
    assert record["generated_text"] == expected and record["statistics"]["slots"] == (3 if documents else 1)


def test_question_and_chat_outputs(ask):
    """A question returns an answer, and a chat the conversation with the answer appended."""
    answer = ask(ROWS[0])[0]["generated_text"]
    whole = [{"generated_text": [*CHAT, {"role": "assistant", "content": answer}]}]
    assert ask(CHAT, documents=DOCUMENTS) == ask(ROWS[0], return_full_text=True) == whole
    for answer_only in (ask(CHAT, documents=DOCUMENTS, return_full_text=False), ask(QUESTION, documents=DOCUMENTS)):
        assert answer_only == [{"generated_text": answer}]


def test_assistant_turn_is_continued(ask, model, processor):
    chat = [*CHAT, {"role": "assistant", "content": "It was"}]
    inputs = chat_inputs(processor, chat, DOCUMENTS, add_generation_prompt=False, continue_final_message=True)
    expected = "It was" + greedy_answer(model, processor, inputs, NEW_TOKENS)
    assert ask(chat, documents=DOCUMENTS)[0]["generated_text"] == [*CHAT, chat[1] | {"content": expected}]


@pytest.mark.parametrize("inputs", ["Once upon a time", CHAT], ids=["text", "chat"])
def test_input_without_documents(ask, base_model_dir, processor, inputs):
    """Input without documents is answered by the base model."""
    settings = {"device": "cpu", "max_new_tokens": NEW_TOKENS, "do_sample": False, "task": "text-generation"}
    base, tokenizer = AutoModelForCausalLM.from_pretrained(base_model_dir), copy.deepcopy(processor.tokenizer)
    expected = TextGenerationPipeline(model=base, tokenizer=tokenizer, **settings)(inputs)
    assert ask(inputs) == ask(inputs, max_slots=2) == expected


def test_documents_of_rows(ask):
    """Rows use their own documents, or those of the call, with any batch size."""
    rows = [{"messages": CHAT}, *ROWS]  # the first has no slots
    one_by_one = [ask(row, return_slots=True) for row in rows]
    texts = [records[0]["generated_text"] for records in one_by_one[1:]]
    assert len(set(texts)) == len(texts)
    assert [r[0]["statistics"]["slots"] for r in one_by_one] == [0, 3, 1, 1, 7]
    for batch_size in (1, 2, 3, 5):
        assert ask(rows, batch_size=batch_size, return_slots=True) == one_by_one
    assert list(ask((row for row in rows), return_slots=True)) == one_by_one  # a generator, lazily
    assert ask([{"question": QUESTION}, ROWS[1]], documents=DOCUMENTS, batch_size=2) == [ask(ROWS[0]), ask(ROWS[1])]
    assert ask([CHAT, CHAT], documents=DOCUMENTS) == 2 * [ask(CHAT, documents=DOCUMENTS)]


ALWAYS = {"gate_mode": "always", "max_refinement_steps": 3}


@pytest.mark.parametrize(
    "slots, gates", [({}, {}), ({"max_slots": 2}, ALWAYS), ({"tokens_per_slot": 4}, {"refinement_budget": 0})]
)
def test_slots_report_trajectories(ask, model, processor, slots, gates):
    """Records have segments, trajectories and the compression of slots, also with other gates."""
    record = ask(ROWS[0], return_slots=True, **slots, **gates)[0]
    inputs = processor(text=QUESTION, documents=DOCUMENTS, return_segments=True, **slots)
    assert record["segments"] == list(map(vars, inputs["segments"][0]))
    assert record["statistics"] == inputs["statistics"][0]
    if "tokens_per_slot" not in slots:
        sentences = ["It was written by Ada.", "Nobody else knew.", "The riding was created in 1924."]
        assert [segment["text"] for segment in record["segments"]] == sentences[: slots.get("max_slots")]
    depth = model(**chat_inputs(processor, CHAT, DOCUMENTS, **slots), **gates).recursion_depth[0]  # (layers, slots)
    expected = [[format_trajectory(passes) for passes in layer] for layer in depth.tolist()]
    assert record["trajectories"] == expected
    assert gates or {"L0.", "LLL"} <= {trajectory for layer in expected for trajectory in layer}


def test_streamer_gets_the_answer(ask, processor):
    """A streamer receives the answer piece by piece, or after the prompt."""
    for skips_prompt in (True, False):
        streamer = TextIteratorStreamer(processor.tokenizer, skips_prompt, timeout=30, skip_special_tokens=True)
        answer, streamed = ask(ROWS[1], streamer=streamer)[0]["generated_text"], "".join(streamer)
        assert streamed == answer if skips_prompt else f"Question: {ROWS[1]['question']}" in streamed


def test_generation_options_reach_the_model(ask, model, processor):
    beams = ask(ROWS[0], num_beams=3, num_return_sequences=2, return_slots=True)
    inputs = chat_inputs(processor, CHAT, DOCUMENTS)
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, num_beams=3, num_return_sequences=2)
    texts = processor.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [record["generated_text"] for record in beams] == texts
    assert beams[0]["trajectories"] == beams[1]["trajectories"]
    (record,) = ask(ROWS[0], max_new_tokens=1, return_tensors=True)
    assert len(record["generated_token_ids"]) == inputs["input_ids"].shape[1] + 1


def test_missing_template_uses_plain_prompt(ask, model, processor):
    plain = processor(text=QUESTION, documents=DOCUMENTS, return_tensors="pt")
    expected = greedy_answer(model, processor, plain, NEW_TOKENS)
    assert ask(ROWS[0]) != [{"generated_text": expected}]
    ask.processor = copy.deepcopy(processor)
    ask.processor.chat_template = None
    assert ask(ROWS[0]) == [{"generated_text": expected}]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"question": 3, "documents": DOCUMENTS}, {}, "`question` of type int"),
        ({"query": "Who?"}, {}, "`query` of type str"),
        ({"messages": CHAT, "context": "It was Ada.", "id": 1}, {}, "no `documents`, but it has `context`, `id`"),
        ({"question": QUESTION}, {}, "no `documents`. Pass .* an empty list"),
        (
            [ROWS[0], {"question": QUESTION, "documents": 5}],
            {"batch_size": 2},
            "`documents` of an input is 5; expected",
        ),
        ([ROWS[0], 7], {"batch_size": 2}, "An input is of type int"),
        (
            {"question": "Who? " * 600, "documents": ["One."]},
            {},
            "need 1 slot, but besides the question the prompt has space for only 0. Pass a shorter",
        ),
        (CHAT, {"documents": [DOCUMENTS]}, "Document 0 is of type list"),
        ([{"role": "system", "content": "x"}], {"documents": DOCUMENTS}, "no user message"),
        (ROWS[0], {"truncation": True, "max_length": 4}, "would cut slots"),
    ],
)
def test_bad_input_is_named(ask, inputs, options, message):
    with pytest.raises(ValueError, match=message):
        ask(inputs, **options)


NAN = float("nan")
SETTINGS = {
    "max_slots": ([0, -1, 1.5, "3", True, NAN], "expected a whole number of at least 1"),
    "max_passages": ([0, -1, 1.5, True, "2"], "expected a whole number of at least 1"),
    "tokens_per_slot": ([0, -1, 2.5, "sentence", True, [4]], "expected a whole number of tokens, at least 1"),
    "min_confidence": ([-0.1, 1.5, "0.5", True, NAN], "expected a number from 0 to 1"),
    "copy_bonus": ([-1, True, "6", float("inf"), NAN], "expected a finite number of at least 0"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_impossible_setting_is_named(ask, processor, name):
    """An impossible setting is refused by its name."""
    values, message = SETTINGS[name]
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` is .*{message}"):
            ask(ROWS[0], **{name: value})
        if name in ("copy_bonus", "tokens_per_slot"):
            with pytest.raises(ValueError, match=f"`{name}` is .*{message}"):
                processor_with(processor, **{name: value})
