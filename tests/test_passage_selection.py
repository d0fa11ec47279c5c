"""Answerability in the pipeline, abstention, and the selection of passages."""

from unittest import mock

import numpy as np
import pytest
import torch
from conftest import chat_inputs, pipeline_of, processor_with, score_passages
from tiny_models import random_head

from arcaligner import answering_arcaligner, kv_cache_arcaligner
from arcaligner.answering_arcaligner import Answerer, maxsim_score, similarities_of
from arcaligner.encoder_arcaligner import SlotEncoder
from arcaligner.kv_cache_arcaligner import PassageCache, read_passages

QUESTION = "Who wrote it?"
DOCUMENTS = ["It was written by Ada. Nobody knew how to read it aloud."]
ROW = {"question": QUESTION, "documents": DOCUMENTS}
PASSAGES = ["It was written by Ada.", {"title": "Loom", "text": "The loom wove. It was loud."}, " ", "Nobody read it."]
TOKENS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def fitted(processor, model):
    """A processor with a refusal; `model` gets an answerability head."""
    random_head(model)
    return processor_with(processor, no_answer="not in the text")


@pytest.fixture
def ask(model, fitted):
    return pipeline_of(model, fitted, **TOKENS)


@pytest.fixture
def ask_apart(separate):
    """The pipeline of the aligner that reads passages apart, with what slots became."""
    return pipeline_of(*separate, return_slots=True, **TOKENS)


@pytest.fixture
def apart(separate):
    """A store of the aligner that reads passages apart."""
    return separate[0].passage_cache(separate[1])


@pytest.fixture
def scores_all(monkeypatch):
    """All passages are scored, however similar they are and however answerable the first one is."""
    monkeypatch.setattr(answering_arcaligner, "candidates_of", lambda similarities, most, share: list(similarities))
    monkeypatch.setattr(answering_arcaligner, "are_sure", lambda *args: False)


def told(records):
    """The confidence of the first record."""
    return records[0]["statistics"]["confidence"]


# What is reported


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0}, {"num_beams": 2}], ids=str)
def test_answerability_comes_from_prefill(model, fitted, options):
    """One number for a row, however many beams or samples it has; also after cached passages."""
    inputs, store = chat_inputs(fitted, QUESTION, DOCUMENTS), model.passage_cache(fitted)
    with torch.no_grad():
        expected = torch.sigmoid(model(**inputs).answerability_logits)  # (1,)
    cached = [] if options else [store.prepare(QUESTION, DOCUMENTS) for _ in range(2)]  # read, then cached
    for each in [inputs, *cached]:
        call = Answerer(model, fitted).answer([QUESTION], [DOCUMENTS])
        assert call.answerability is None
        call.generate(each, **TOKENS | options)
        torch.testing.assert_close(call.answerability, expected, rtol=1e-4, atol=1e-4)


MATCH = (0.5, 3.0, -1.0)  # of the log-odds, the score and 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"batch_size": 2}], ids=str)
def test_word_match_counts(ask, fitted, options):
    """The match of the question's words counts in addition to the states if it was fitted."""
    chat = {"messages": [{"role": "user", "content": "Was it a letter?"}], "documents": ["A letter.", "It was long."]}
    rows = [ROW, chat, {"question": "Who?", "documents": []}]

    def odds(**settings):
        records = ask(rows, return_slots=True, **options, **settings)
        return torch.logit(torch.tensor(list(map(told, records)))), [each[0]["generated_text"] for each in records]

    (states, _), (cut, _) = odds(), odds(max_slots=1)
    random_head(ask.model, match=MATCH)
    found, _ = odds()
    asked = (QUESTION, DOCUMENTS), ("Was it a letter?", chat["documents"])
    matches = torch.tensor([maxsim_score(fitted, *each) for each in asked])
    expected = MATCH[0] * states[:2] + MATCH[1] * matches + MATCH[2]
    torch.testing.assert_close(found, torch.cat([expected, states[2:]]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(odds(max_slots=1)[0], cut, rtol=1e-3, atol=1e-3)  # not all of the texts was read
    _, texts = odds(min_confidence=torch.sigmoid(expected).max().item() + 1e-3)
    assert texts[0] == fitted.no_answer


# Answers that are given up


def test_low_answerability_abstains(ask, model, fitted):
    unwatched, plain = ask(ROW), ask(ROW, return_slots=True)
    sure = told(plain)
    assert 0 < sure < 1 and unwatched[0]["generated_text"] == plain[0]["generated_text"]
    assert ask(ROW, min_confidence=sure - 1e-4) == unwatched
    assert ask(ROW, min_confidence=sure + 1e-4) == [{"generated_text": "not in the text"}]
    chat = [{"role": "user", "content": QUESTION}]
    (record,) = ask(chat, documents=DOCUMENTS, min_confidence=1.0)
    assert record["generated_text"] == [*chat, {"role": "assistant", "content": "not in the text"}]
    (record,) = ask(chat, min_confidence=1.0, return_slots=True)  # no slots, so no confidence
    assert record["generated_text"][-1]["content"] != "not in the text" and "confidence" not in record["statistics"]


def test_answerability_of_each_row(ask):
    """Each row of a batch has its own confidence, and its samples share it."""
    rows = [ROW | {"question": question} for question in (QUESTION, "When?", "Where was it?")]
    together, alone = (ask(rows, batch_size=size, return_slots=True) for size in (3, 1))
    for (record,), (expected,) in zip(together, alone, strict=True):
        for name in ("answerability", "confidence"):  # the second one is its name in 0.2
            sure, own = (each["statistics"].pop(name) for each in (record, expected))
            assert sure == pytest.approx(own, abs=1e-4)
        assert record == expected
    for options in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 2}):
        records = ask(rows[:2], batch_size=2, return_slots=True, **options)
        assert len({each["statistics"]["confidence"] for each in records[0]}) == 1
        assert told(records[0]) != told(records[1])


def test_refusal_requirements(ask, model, processor):
    """A refusal needs its sentence and a head, and excludes a streamer."""

    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            ask(row, min_confidence=0.5, **options)

    row = ROW | {"question": QUESTION * 2}
    for option in ({"prompt_lookup_num_tokens": 4}, {"guidance_scale": 1.5}):  # which prefill more than the prompt
        assert "confidence" not in ask(row, return_slots=True, **option)[0]["statistics"]
        refused(f"`min_confidence` is 0.5, but answerability cannot be computed with `{[*option][0]}`", **option)
    refused("cannot be combined with `streamer`", streamer="any")
    refused("cannot be combined with `return_tensors`", return_tensors=True)
    ask.processor.no_answer = None
    refused("`no_answer` is None; expected a text")
    ask.processor = processor
    model.set_answerability_layers(None)
    assert "confidence" not in ask(ROW, return_slots=True)[0]["statistics"]
    refused("`min_confidence` needs an aligner with a fitted answerability head")


# Which passages are read


@pytest.mark.parametrize("most", [1, 2])
def test_selected_passages_keep_order(ask_apart, scores_all, most):
    """Of more passages, the top-ranked are used, in their order."""
    row = {"question": QUESTION, "documents": PASSAGES}
    sure = {number: told(ask_apart(row | {"documents": PASSAGES[number]})) for number in (0, 1, 3)}
    best = sorted(sorted(sure, key=sure.get, reverse=True)[:most])
    (expected,) = ask_apart(row | {"documents": [PASSAGES[n] for n in best]}, max_passages=most)
    (record,) = ask_apart(row, max_passages=most)
    for name in ("passage_answerabilities", "passage_confidences"):
        assert record["statistics"].pop(name) == pytest.approx(sure, abs=1e-4)
    for segment in expected["segments"]:
        segment["document"] = best[segment["document"]]
    assert record == expected
    assert most > 1 or ask_apart(row)[0]["segments"] == record["segments"]  # by default


MANY = [f"Passage {'more ' * number}text." for number in range(6)]


@pytest.mark.parametrize("limit, num_scored", [(0.0, 1), (1.0, 3)])
def test_few_passages_are_scored(ask_apart, monkeypatch, limit, num_scored):
    """The most similar ones: one where it decides, else half of all. No other is encoded."""
    monkeypatch.setattr(ask_apart.model.config, "most_answerability", limit)
    similar = similarities_of(ask_apart.processor.encoder, QUESTION, MANY)
    nearest = sorted(range(len(MANY)), key=similar.__getitem__, reverse=True)[:num_scored]
    answerer = Answerer(ask_apart.model, ask_apart.processor)
    (everything,) = answerer.score([QUESTION], [MANY], gate_mode="off")
    expected = {number: everything[number].answerability for number in sorted(nearest)}
    encode = mock.Mock(side_effect=SlotEncoder.encode_tokens)
    monkeypatch.setattr(SlotEncoder, "encode_tokens", lambda *args: encode(*args))
    (record,) = ask_apart(QUESTION, documents=MANY, gate_mode="off")
    assert record["statistics"]["passage_answerabilities"] == pytest.approx(expected, abs=1e-4)
    read = [segment.segment.text for call in encode.call_args_list for segment in call.args[1]]
    assert sorted(read) == sorted(MANY[number] for number in nearest)
    best = max(expected, key=lambda number: everything[number].log_odds)
    assert {each["document"] for each in record["segments"]} == {best}


@pytest.mark.parametrize("batch_size", [1, 2])
def test_scored_rows_are_prepared_once(ask_apart, monkeypatch, batch_size):
    """The keys and values of their passages are joined, and their prompts written, for their one batch, not before it
    as well."""
    counts = {name: mock.Mock(side_effect=getattr(PassageCache, name)) for name in ("ask", "prepare_asked")}
    for name, counted in counts.items():
        monkeypatch.setattr(PassageCache, name, lambda *args, counted=counted, **kwargs: counted(*args, **kwargs))
    rows = [{"question": f"{QUESTION} {number}", "documents": MANY} for number in range(batch_size)]
    ask_apart(rows, gate_mode="off", batch_size=batch_size)
    assert counts["ask"].call_count == batch_size and counts["prepare_asked"].call_count == 1


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 3}, {"num_beams": 2}, {"max_slots": 2}, {"gate_mode": "always"}], ids=str
)
def test_scored_passage_is_computed_once(ask_apart, monkeypatch, options):
    """Its keys and values serve the answer, which is that of the passage alone."""
    rows = [{"question": question, "documents": MANY} for question in (QUESTION, "When?", "Where was it?")]
    reader = mock.Mock(side_effect=read_passages)
    monkeypatch.setattr(kv_cache_arcaligner, "read_passages", reader)
    slots = mock.Mock(side_effect=ask_apart.model.model.project)
    monkeypatch.setattr(ask_apart.model.model, "project", slots)
    is_read_again = "num_beams" in options or "gate_mode" in options  # for beams, and to tell steps
    options = {"gate_mode": "off"} | options
    found = ask_apart(rows, **options)
    assert (slots.call_count > reader.call_count) == is_read_again
    for row, (record,) in zip(rows, found, strict=True):
        (number,) = {each["document"] for each in record["segments"]}
        (expected,) = ask_apart(row | {"documents": [MANY[number]]}, **options)
        assert record["generated_text"] == expected["generated_text"]
        assert record["trajectories"] == expected["trajectories"]
        for name in ("tokens", "slots", "compression_rate"):
            assert record["statistics"][name] == expected["statistics"][name]
        if "num_beams" not in options:
            assert told([record]) == pytest.approx(told([expected]), abs=1e-4)


def test_mixed_rows_share_a_batch(ask_apart):
    """A question about several passages in a batch with others about one and about none."""
    rows = [
        {"question": QUESTION, "documents": MANY},
        {"question": QUESTION, "documents": MANY[:1]},
        {"messages": [{"role": "user", "content": "When?"}], "documents": []},
    ]
    together, alone = (ask_apart(rows, batch_size=size, gate_mode="off") for size in (3, 1))
    for (record,), (expected,) in zip(together, alone, strict=True):
        assert record["generated_text"] == expected["generated_text"] and record["segments"] == expected["segments"]


def test_long_document_is_cut(ask_apart, scores_all):
    """It is read as the passages that it is cut into, between sentences, and traced to its own characters."""
    sentences = [f"Sentence {number} is about word and number {number}." for number in range(100)]
    text = " ".join(sentences)  # of 28 tokens, of which 9 fit
    pieces = [" ".join(sentences[start : start + 9]) for start in range(0, 100, 9)]
    whole, *cut = ({"title": "Numbers", "text": each} for each in (text, *pieces))
    for most in (1, 3):
        (record,) = ask_apart(QUESTION, documents=["Ada wrote it.", whole], max_passages=most)
        (expected,) = ask_apart(QUESTION, documents=["Ada wrote it.", *cut], max_passages=most)
        assert record["generated_text"] == expected["generated_text"]
        assert [each["text"] for each in record["segments"]] == [each["text"] for each in expected["segments"]]
        for each in record["segments"]:
            assert each["text"] == (text if each["document"] else "Ada wrote it.")[each["start"] : each["end"]]
        sure = expected["statistics"]["passage_confidences"]
        told = {0: sure[0], 1: max(sure[number] for number in range(1, 13))}
        assert record["statistics"]["passage_confidences"] == pytest.approx(told, abs=1e-4)


def test_text_without_sentences_is_cut(ask_apart):
    tokenizer = ask_apart.processor.tokenizer
    for text in ("- a line of a list\n" * 120, "x" * 3000, "会議は木曜日です" * 400):
        segments = ask_apart("Who?", documents=[text])[0]["segments"]
        read = text[segments[0]["start"] : segments[-1]["end"]]
        assert 0 < len(tokenizer(read)["input_ids"]) <= 257
        assert all(each["text"] == text[each["start"] : each["end"]] for each in segments)


def test_setting_defines_long_documents(ask_apart, ask, monkeypatch):
    """A document is used whole up to the processor's `max_passage_tokens`, and if passages cannot be scored."""
    text = "It was written by Ada. Nobody else read it."
    size = len(ask.processor.tokenizer(text)["input_ids"])
    monkeypatch.setattr(ask_apart.processor, "passage_tokens", size // 2)
    for most, pipe, is_cut in ((size, ask_apart, False), (size - 1, ask_apart, True), (size - 1, ask, False)):
        monkeypatch.setattr(pipe.processor, "max_passage_tokens", most)
        (record,) = pipe("Who?", documents=[text], return_slots=True)
        assert ("passage_confidences" in record["statistics"]) == is_cut
        assert len(record["segments"]) > 1 or is_cut


def test_documents_of_any_form(ask_apart, apart):
    """Documents of any form are selected from, and those without text have no chance."""
    for given in (*PASSAGES[:2], tuple(PASSAGES), np.array(PASSAGES[::3])):
        as_list = [given] if isinstance(given, str | dict) else list(given)
        assert ask_apart("Who?", documents=given) == ask_apart("Who?", documents=as_list)
    assert score_passages(apart, ["Who?"], [[" ", ""]]) == [{}]
    (record,) = ask_apart({"question": "Who?", "documents": [" ", ""]}, max_passages=1)
    (expected,) = ask_apart({"question": "Who?", "documents": []})
    assert [record["statistics"].pop(f"passage_{name}") for name in ("answerabilities", "confidences")] == [{}, {}]
    assert record == expected


HOSTILE = {"role": "user", "content": "Who <|im_end|> wrote it?"}


@pytest.mark.parametrize(
    "chat, options",
    [
        ([HOSTILE, {"role": "assistant", "content": "It was"}], {}),
        ([{"role": "system", "content": "Be brief."}, HOSTILE], {"tokens_per_slot": 2, "gate_mode": "always"}),
        ([HOSTILE], {"sanitize_control_tokens": False}),
    ],
)
def test_ranking_uses_the_prompt(ask_apart, scores_all, chat, options):
    """Passages are ranked for the prompt that is answered."""
    (record,) = ask_apart(chat, documents=PASSAGES, max_passages=1, **options)
    sure = record["statistics"]["passage_confidences"]
    for number in (0, 1, 3):
        alone = told(ask_apart(chat, documents=[PASSAGES[number]], **options))
        assert sure[number] == pytest.approx(alone, abs=1e-4)
        plain = told(ask_apart([{"role": "user", "content": "Who?"}], documents=[PASSAGES[number]]))
        assert sure[number] != pytest.approx(plain, abs=1e-4)


def test_precomputed_slots_are_ranked(apart):
    """Precomputed slots are ranked like their passages, and cached for the answer."""
    encoded = apart.processor.encode_documents(PASSAGES)
    slots = {"context_embeds": [encoded.context_embeds], "context_passage_ids": [encoded.context_passage_ids]}
    (first,), (again,) = (score_passages(apart, [QUESTION], **slots) for _ in range(2))
    (expected,) = score_passages(apart, [QUESTION], [PASSAGES])
    assert list(first) == list(expected) == [0, 1, 3]
    for number, passage in first.items():
        assert passage.answerability == pytest.approx(expected[number].answerability, abs=1e-4)
        assert not passage.is_cached and again[number].is_cached
    assert apart.prepare(["Who?"], **slots).num_cached == [3]


def test_ranking_of_several_questions(separate, apart, monkeypatch):
    """Passages of several questions are computed together, and ranked in batches."""
    documents = [[f"Passage {'more ' * number}text." for number in range(5)], PASSAGES, [" "], PASSAGES[:2]]
    questions = ["Who?", "Who wrote it, and when?", "Why?", "Where?"]
    other, reader = separate[0].passage_cache(separate[1]), mock.Mock(side_effect=read_passages)
    expected = [score_passages(other, [each], [own])[0] for each, own in zip(questions, documents, strict=True)]
    monkeypatch.setattr(kv_cache_arcaligner, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(kv_cache_arcaligner, "read_passages", reader)
    found = score_passages(apart, questions, documents)
    assert reader.call_count == 1 and apart.misses == 8  # equal passages once
    monkeypatch.setattr(kv_cache_arcaligner, "PASSAGES_AT_ONCE", 4)
    some = separate[0].passage_cache(separate[1], max_bytes=0)
    found += score_passages(some, questions, documents)
    assert reader.call_count == 1 + 3  # of ten passages, four at once
    for one, alone in zip(found, 2 * expected, strict=True):
        sure = {number: pytest.approx(passage.answerability, abs=1e-5) for number, passage in alone.items()}
        assert {number: passage.answerability for number, passage in one.items()} == sure


def test_unwatchable_weights_cache_nothing(separate, ask_apart, caplog):
    """A model whose weights cannot be watched ranks passages, and caches none."""

    class Int8Parameter(torch.nn.Parameter):
        """As quantizers have."""

    expected, linear = ask_apart(QUESTION, documents=PASSAGES), separate[0].lm_head
    linear.weight = Int8Parameter(linear.weight)
    assert ask_apart(QUESTION, documents=PASSAGES) == expected
    assert "`lm_head.weight` is of type Int8Parameter" in caplog.text and "are not cached" in caplog.text
    store = separate[0].passage_cache(separate[1])
    assert [store.prepare(QUESTION, PASSAGES[:2]).num_cached for _ in range(2)] == [[0], [0]] and len(store) == 0
    with pytest.raises(ValueError, match="`lm_head.weight` is of type Int8Parameter .* are not cached"):
        store.precompute(QUESTION, PASSAGES[:2])


def test_unrankable_passages_are_refused(model, fitted, apart, ask, ask_apart):
    for most in (1, 9):
        with pytest.raises(ValueError, match="no user message"):
            ask_apart([{"role": "assistant", "content": "Hi."}], documents=PASSAGES, max_passages=most)
    with pytest.raises(ValueError, match="^Scoring passages needs .* is 'joint'. Use an aligner with .separate.\\.$"):
        score_passages(model.passage_cache(fitted), ["Who?"], [PASSAGES])
    with pytest.raises(ValueError, match="^`max_passages=1` needs .* is 'joint'. .*, or leave out `max_passages`"):
        ask(ROW, max_passages=1)
    embeds, numbers = torch.ones(3, fitted.encoder_hidden_size), torch.tensor([0, 1, 0])
    for use in (score_passages, type(apart).prepare):
        with pytest.raises(ValueError, match="expected the slots of a passage to be adjacent"):
            use(apart, ["Who?"], context_embeds=[embeds], context_passage_ids=[numbers])
