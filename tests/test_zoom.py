"""Zoom: which slots are replaced, with which finer ones, and answers from both kinds."""

import pytest
import torch
from conftest import aligner_for, chat_inputs, pipeline_of, processor_with
from hypothesis import given
from hypothesis import strategies as st

from arcaligner import zoom_arcaligner
from arcaligner.encoder_arcaligner import PrecomputedSlots
from arcaligner.evaluation.answering import answer_slots
from arcaligner.modeling_arcaligner import PrefillOutputs
from arcaligner.segmentation_arcaligner import equal_spans, zoomed_spans
from arcaligner.zoom_arcaligner import attended_slots, check_zoom, inputs_of, slot_attention, zoom_in

QUESTION = "Who wrote it?"
DOCUMENTS = ["It was written by Ada.  Nobody else knew.", {"title": "Toronto Northwest", "text": "A riding, in 1924."}]
ROW = {"question": QUESTION, "passages": [{"title": "T", "text": "It was Ada. Nobody knew."}], "answers": ["Ada"]}
HEADS = [[0, 1], [1, 0], [1, 3]]
COARSE = 4


@pytest.fixture(params=["joint", "separate"])
def zooming(processor, request):
    """A random aligner with pointer heads, without an influence on copies, and its processor."""
    model = aligner_for(processor, passage_attention=request.param, pointer_heads=HEADS)
    return model, processor_with(processor, passage_attention=request.param, tokens_per_slot=2)


# Spans


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6), st.integers(1, 4))
def test_zoomed_spans_have_the_same_tokens(sizes, tokens_per_slot):
    """Unmarked spans stay; marked ones are cut as a segment of their length."""
    ends = [sum(size for size, _ in sizes[: number + 1]) for number in range(len(sizes))]
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    cut = zoomed_spans(spans, [zoomed for _, zoomed in sizes], tokens_per_slot)
    assert [token for start, end in cut for token in range(start, end)] == list(range(ends[-1]))
    for (start, end), (size, zoomed) in zip(spans, sizes, strict=True):
        inside = [(first - start, last - start) for first, last in cut if start <= first < end]
        assert inside == (equal_spans(size, tokens_per_slot) if zoomed else [(0, size)])


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_attended_slots_are_the_fewest(shares, share):
    """Together they have at least the share, without the least attended one less than it; no other has more."""
    attention = torch.tensor(shares)
    found = attended_slots(attention, share)
    chosen, total = attention[found].double(), attention.double().sum()
    assert chosen.sum() >= share * total - 1e-9 and chosen.sum() - chosen.min() < share * total
    assert found.all() or attention[~found].max() <= chosen.min()


# Slots


def test_unmarked_slots_are_unchanged(zooming):
    _, processor = zooming
    encoded = processor.encode_documents(DOCUMENTS, tokens_per_slot=COARSE)
    none = torch.zeros(len(encoded.context_embeds), dtype=torch.bool)
    same = processor.slot_encoder.zoom(DOCUMENTS, encoded.context_embeds, none, COARSE)
    for name in PrecomputedSlots._fields:
        torch.testing.assert_close(getattr(same, name), getattr(encoded, name), rtol=0, atol=0)
    assert same.segments == encoded.segments


@pytest.mark.parametrize("coarse", [COARSE, "segment"])
def test_marked_slots_are_late_chunks(zooming, coarse):
    """The finer slots are means of the same states of the encoder, and the other slots of a segment stay."""
    _, processor = zooming
    encoder, encoded = processor.slot_encoder, processor.encode_documents(DOCUMENTS, tokens_per_slot=coarse)
    marked = torch.zeros(len(encoded.context_embeds), dtype=torch.bool)
    marked[0] = marked[-1] = True
    zoomed = encoder.zoom(DOCUMENTS, encoded.context_embeds, marked, coarse)
    spans = [(part.document, part.start, part.end) for part in zoomed.segments]
    old = [(part.document, part.start, part.end) for part in encoded.segments]
    kept = [spans.index(span) for span, is_marked in zip(old, marked.tolist(), strict=True) if not is_marked]
    assert len(kept) == len(old) - 2 and len(spans) > len(old)
    torch.testing.assert_close(zoomed.context_embeds[kept], encoded.context_embeds[~marked], rtol=0, atol=0)
    first, last = old[0], old[-1]
    for document, start, end in (first, last):
        inside = [number for number, span in enumerate(spans) if span[0] == document and start <= span[1] < end]
        assert len(inside) > 1 and spans[inside[-1]][2] == end
        assert (zoomed.context_word_ids is None) == (encoded.context_word_ids is None)


def test_whole_segments_become_the_finer_slots(zooming):
    """If a slot is a segment, all of them become what the finer number of tokens gives."""
    _, processor = zooming
    encoded = processor.encode_documents(DOCUMENTS, tokens_per_slot="segment")
    all_slots = torch.ones(len(encoded.context_embeds), dtype=torch.bool)
    zoomed = processor.slot_encoder.zoom(DOCUMENTS, encoded.context_embeds, all_slots, "segment")
    expected = processor.encode_documents(DOCUMENTS, tokens_per_slot=2)
    torch.testing.assert_close(zoomed.context_embeds, expected.context_embeds, rtol=0, atol=1e-6)
    torch.testing.assert_close(zoomed.context_passage_ids, expected.context_passage_ids)
    assert zoomed.segments == expected.segments


# The first reading


def test_attention_is_that_of_generate(zooming):
    """Also of padded rows, and with a prior of the passages."""
    model, processor = zooming
    chats = [[{"role": "user", "content": QUESTION}]] * 2
    options = {"processor_kwargs": {"padding": True, "padding_side": "left"}, "add_generation_prompt": True}
    options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt", "tokens_per_slot": COARSE}
    inputs = processor.apply_chat_template(chats, documents=[DOCUMENTS, DOCUMENTS[1:]], **options)
    priors = [None] + [torch.tensor([[0.0, -3.0], [0.0, 0.0]])] * (processor.passage_attention == "separate")
    found = []
    for prior in priors:
        found.append(slot_attention(model, inputs, prior))
        model.config.pointer_weight, prefill = 1.0, PrefillOutputs()
        model.generate(**inputs, max_new_tokens=1, do_sample=False, passage_prior=prior, prefill=prefill)
        model.config.pointer_weight = 0.0
        for row, expected in zip(found[-1], prefill.slot_attention, strict=True):
            torch.testing.assert_close(row, expected[: len(row)], rtol=0, atol=1e-6)
    assert len(priors) == 1 or not torch.allclose(found[0][0], found[1][0])


def test_attended_slots_become_finer(zooming, monkeypatch):
    """Each row has its own; the rest of the text keeps its slots."""
    model, processor = zooming
    rows = [
        chat_inputs(processor, QUESTION, documents, tokens_per_slot=COARSE) for documents in (DOCUMENTS, DOCUMENTS[1:])
    ]
    counts = [row["context_embeds"].shape[1] for row in rows]
    attention = [torch.full((count,), 0.01) for count in counts]
    attention[0][2], attention[1][0] = 1.0, 1.0
    monkeypatch.setattr(zoom_arcaligner, "slot_attention", lambda *args, **settings: attention)
    inputs = {"context_embeds": torch.zeros(2, max(counts), processor.encoder_hidden_size)}
    inputs["attention_mask"] = torch.ones(2, 40)
    for number, row in enumerate(rows):
        inputs["context_embeds"][number, : counts[number]] = row["context_embeds"][0]
    zoomed = zoom_in(model, processor, inputs, [DOCUMENTS, DOCUMENTS[1:]], COARSE, 0.5)
    for row, documents, place in zip(zoomed, (DOCUMENTS, DOCUMENTS[1:]), (2, 0), strict=True):
        encoded = processor.encode_documents(documents, tokens_per_slot=COARSE)
        marked = torch.zeros(len(encoded.context_embeds), dtype=torch.bool)
        marked[place] = True
        expected = processor.slot_encoder.zoom(documents, encoded.context_embeds, marked, COARSE)
        torch.testing.assert_close(row.context_embeds, expected.context_embeds, rtol=0, atol=1e-6)
        assert row.segments == expected.segments


# Answers


def zoomed_answer(model, processor, documents, share, coarse=COARSE) -> tuple[str, int]:
    """The answer by the functions of the library, and the number of its slots."""
    inputs = chat_inputs(processor, QUESTION, documents, tokens_per_slot=coarse)
    slots = inputs_of(zoom_in(model, processor, inputs, [documents], coarse, share))
    finer = processor.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        **{name: values[0] for name, values in slots.items()},
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    ids = model.generate(**finer, max_new_tokens=6, do_sample=False)[0, finer["input_ids"].shape[1] :]
    return processor.decode(ids, skip_special_tokens=True), finer["context_embeds"].shape[1]


def test_pipeline_answers_from_finer_slots(zooming):
    model, processor = zooming
    ask = pipeline_of(model, processor, max_new_tokens=6)
    settings = {"zoom": 0.4, "tokens_per_slot": COARSE, "copy_bonus": 0.0}
    (record,) = ask(QUESTION, documents=DOCUMENTS, return_slots=True, **settings)
    answer, num_slots = zoomed_answer(model, processor, DOCUMENTS, 0.4)
    assert record["generated_text"] == answer
    assert record["statistics"]["slots"] == len(record["segments"]) == num_slots
    coarse, fine = (len(processor.encode_documents(DOCUMENTS, tokens_per_slot=rate).segments) for rate in (COARSE, 2))
    assert coarse < num_slots < fine
    texts = ["".join(part["text"] for part in record["segments"] if part["document"] == number) for number in (0, 1)]
    assert texts == ["It was written by Ada.Nobody else knew.", "A riding, in 1924."]


def test_batches_zoom_as_single_questions(zooming):
    model, processor = zooming
    ask = pipeline_of(model, processor, max_new_tokens=6)
    inputs = [{"question": QUESTION, "documents": documents} for documents in (DOCUMENTS, DOCUMENTS[1:], [], [" "])]
    single = [ask(entry, zoom=0.4, return_slots=True) for entry in inputs]
    batched = ask(inputs, zoom=0.4, return_slots=True, batch_size=4)
    for one, other in zip(single, batched, strict=True):
        assert one[0]["generated_text"] == other[0]["generated_text"] and one[0]["segments"] == other[0]["segments"]


def test_evaluation_answers_as_the_pipeline(zooming):
    model, processor = zooming
    (answer,) = answer_slots(model, processor, [ROW], zoom=0.4, max_new_tokens=6)
    ask = pipeline_of(model, processor, max_new_tokens=6)
    (record,) = ask(QUESTION, documents=ROW["passages"], zoom=0.4, return_slots=True)
    assert answer.text == record["generated_text"].strip()
    assert answer.context_tokens == record["statistics"]["slots"]


def test_default_is_four_times_coarser(zooming):
    model, processor = zooming
    ask = pipeline_of(model, processor, max_new_tokens=2)
    one, other = (
        ask(QUESTION, documents=DOCUMENTS, zoom=0.3, return_slots=True, **settings)[0]["segments"]
        for settings in ({}, {"tokens_per_slot": 8})
    )
    assert one == other and check_zoom(model, processor, 0.3) == 8


# Errors


@pytest.mark.parametrize(
    "zoom, settings, message",
    [
        (0.0, {}, "`zoom` is 0.0; expected a number above 0"),
        (1.5, {}, "`zoom` is 1.5; expected a number above 0"),
        (True, {}, "`zoom` is True; expected a number above 0"),
        ("a", {}, "`zoom` is 'a'; expected a number above 0"),
        (0.5, {"tokens_per_slot": 2}, 'expected a `tokens_per_slot` above 2, or "segment"'),
        (0.5, {"max_slots": 3}, "cannot be combined with `max_slots`"),
    ],
)
def test_invalid_settings_are_refused(zooming, zoom, settings, message):
    ask = pipeline_of(*zooming, max_new_tokens=1)
    with pytest.raises(ValueError, match=message):
        ask(QUESTION, documents=DOCUMENTS, zoom=zoom, **settings)


@pytest.mark.parametrize("size", ["a", 8.0, True, [8]])
def test_invalid_sizes_are_refused(zooming, size):
    with pytest.raises(ValueError, match="expected a whole number of at least 1|expected a whole number of tokens"):
        check_zoom(*zooming, 0.5, size)


def test_settings_of_the_pipeline_and_of_a_call_are_one(zooming):
    """A setting may be an argument of the pipeline or of its call."""
    model, processor = zooming
    segments = []
    for own, of_call in (
        ({"tokens_per_slot": COARSE}, {"zoom": 0.4}),
        ({"zoom": 0.4}, {"tokens_per_slot": COARSE}),
        ({}, {"zoom": 0.4, "tokens_per_slot": COARSE}),
    ):
        ask = pipeline_of(model, processor, max_new_tokens=1, **own)
        segments.append(ask(QUESTION, documents=DOCUMENTS, return_slots=True, **of_call)[0]["segments"])
    assert segments[0] == segments[1] == segments[2]
    for own, of_call in (({"zoom": 0.4}, {"max_slots": 3}), ({"max_slots": 3}, {"zoom": 0.4})):
        with pytest.raises(ValueError, match="cannot be combined with `max_slots`"):
            pipeline_of(model, processor, max_new_tokens=1, **own)(QUESTION, documents=DOCUMENTS, **of_call)


def test_neighbours_in_a_batch_do_not_count(zooming, monkeypatch):
    """A weight of the pointer heads has no effect with zoom, also next to questions without passages."""
    model, processor = zooming
    monkeypatch.setattr(model.config, "pointer_weight", 50.0)
    ask = pipeline_of(model, processor, max_new_tokens=4, copy_bonus=5.0)
    entry, empty = {"question": QUESTION, "documents": ["Ada. He. in. of."]}, {"question": QUESTION, "documents": []}
    monkeypatch.setattr("arcaligner.pointer_arcaligner.Pointer.log_shares", lambda *args: pytest.fail("used"))
    alone = ask(entry, zoom=1.0)[0]["generated_text"]
    assert [record[0]["generated_text"] for record in ask([entry, empty], zoom=1.0, batch_size=2)][0] == alone


def test_a_prompt_that_becomes_too_long_is_refused(zooming, monkeypatch):
    """Before finer slots are encoded."""
    model, processor = zooming
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS, tokens_per_slot="segment")
    monkeypatch.setattr(processor, "max_prompt_length", inputs["input_ids"].shape[1] + 2)
    monkeypatch.setattr("arcaligner.encoder_arcaligner.SlotEncoder._encode_spans", lambda *args: pytest.fail("encoded"))
    with pytest.raises(ValueError, match="With zoom the passages need .* slots, but .* Use a smaller `zoom`"):
        zoom_in(model, processor, inputs, [DOCUMENTS], "segment", 1.0)


def test_other_slots_are_refused(zooming):
    model, processor = zooming
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS, tokens_per_slot=COARSE)
    with pytest.raises(ValueError, match="The question has .* slots, but with `tokens_per_slot` 8 its passages have"):
        zoom_in(model, processor, inputs, [DOCUMENTS], 8, 0.5)


def test_an_aligner_without_heads_is_refused(processor):
    with pytest.raises(ValueError, match="`zoom` needs pointer heads.*train.pointer --save"):
        check_zoom(aligner_for(processor), processor_with(processor, tokens_per_slot=2), 0.5)


def test_sliding_layers_are_refused(processor):
    model = aligner_for(processor, "mistral", {"sliding_window": 8}, pointer_heads=HEADS)
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    with pytest.raises(ValueError, match="All pointer heads .* are in layers with a sliding window"):
        slot_attention(model, inputs)


def test_segments_cannot_be_finer(zooming, processor):
    with pytest.raises(ValueError, match='the processor\'s `tokens_per_slot` is "segment"; expected a number'):
        check_zoom(zooming[0], processor_with(processor, tokens_per_slot="segment"), 0.5)
