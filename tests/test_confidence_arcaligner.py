"""How likely it is that passages answer a question: what is read, and answers that are given up for it."""

import functools
import threading

import numpy as np
import pytest
import torch
from conftest import chat_inputs, pipeline_of, processor_with
from tiny_models import random_probe

from arcaligner import prefix_store_arcaligner
from arcaligner.encoder_arcaligner import word_match
from arcaligner.generation_arcaligner import read_passages as read
from arcaligner.pipeline_arcaligner import AnswerConfidence, rank_passages

DOCUMENTS = ["It was written by Ada. Nobody knew how to read it aloud."]
TOKENS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def fitted(processor, model):
    """A processor that knows how to tell the confidence of `model`."""
    return processor_with(processor, no_answer="not in the text", answer_probe=random_probe(model))


@pytest.fixture
def ask(model, fitted):
    return pipeline_of(model, fitted)


@pytest.fixture
def ask_apart(separate):
    """The pipeline of the aligner that reads passages apart."""
    model, fitted = separate
    return pipeline_of(model, fitted)


def watched(model, processor, inputs, **options):
    """The log-odds (batch,) that the passages answer."""
    with AnswerConfidence(model, processor) as watch:
        model.generate(**inputs, **TOKENS | options, logits_processor=[watch])
    return torch.logit(watch.confidence)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0}, {"num_beams": 2}], ids=str)
def test_confidence_is_the_regression_on_the_states_of_the_last_token_of_the_prompt(model, fitted, options):
    weight = torch.linspace(-1, 1, model.config.text_config.hidden_size)
    fitted.answer_probe = random_probe(model, layers=[0], weight=weight.tolist())
    inputs = chat_inputs(fitted, "Who wrote it?", DOCUMENTS)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[1]  # (1, seq_len, hidden)
    expected = (states[:, -1] @ weight + 0.1).expand(options.get("num_beams", 1))
    torch.testing.assert_close(watched(model, fitted, inputs, **options), expected, rtol=1e-4, atol=1e-4)


WORDS = {"scale": 0.5, "weight": 3.0, "bias": -1.0}


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"batch_size": 2}], ids=str)
def test_the_match_of_the_questions_words_counts_beside_the_states_where_it_was_fitted(ask, fitted, options):
    rows = [
        {"question": "Who wrote it?", "documents": DOCUMENTS},
        {"messages": [{"role": "user", "content": "Was it a letter?"}], "documents": ["A letter.", "It was long."]},
        {"question": "Who?", "documents": []},
    ]

    def odds(**settings):
        records = [each[0] for each in ask(rows, return_slots=True, **TOKENS, **options, **settings)]
        sure = torch.tensor([each["statistics"]["confidence"] for each in records])
        return torch.logit(sure), [each["generated_text"] for each in records]

    (states, _), (cut, _) = odds(), odds(max_slots=1)
    fitted.answer_probe = fitted.answer_probe | {"words": WORDS}
    found, _ = odds()
    asked = ("Who wrote it?", rows[0]["documents"]), ("Was it a letter?", rows[1]["documents"])
    matches = torch.tensor([word_match(fitted, *each) for each in asked])
    expected = WORDS["scale"] * states[:2] + WORDS["weight"] * matches + WORDS["bias"]
    torch.testing.assert_close(found, torch.cat([expected, states[2:]]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(odds(max_slots=1)[0], cut, rtol=1e-3, atol=1e-3)  # not all of the texts was read
    least = torch.sigmoid(expected).max().item() + 1e-3
    _, texts = odds(min_confidence=least)
    assert texts[0] == fitted.no_answer


def test_the_states_of_several_layers_stand_in_the_order_of_their_names(model, fitted):
    inputs, width = chat_inputs(fitted, "Who wrote it?", DOCUMENTS), model.config.text_config.hidden_size
    both, weight = watched(model, fitted, inputs), fitted.answer_probe["weight"]
    total = 0.1
    for layer, part in zip(fitted.answer_probe["layers"], (weight[:width], weight[width:]), strict=True):
        fitted.answer_probe = random_probe(model, layers=[layer], weight=part, bias=0.0)
        total = total + watched(model, fitted, inputs)
    torch.testing.assert_close(both, total, rtol=1e-4, atol=1e-4)


def test_watching_changes_no_token_and_leaves_no_hook(model, fitted):
    inputs = chat_inputs(fitted, "Who wrote it?", DOCUMENTS)
    plain = model.generate(**inputs, **TOKENS)
    with AnswerConfidence(model, fitted) as watch:
        torch.testing.assert_close(model.generate(**inputs, **TOKENS, logits_processor=[watch]), plain)
    assert not any(module._forward_hooks for module in model.modules())


def test_kept_passages_have_the_confidence_of_read_ones(model, fitted):
    expected = watched(model, fitted, chat_inputs(fitted, "Who wrote it?", DOCUMENTS))
    store = model.slot_prefix_store(fitted)
    for _ in range(2):  # read, then kept
        found = watched(model, fitted, store.prepare("Who wrote it?", DOCUMENTS))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_forward_of_another_thread_is_not_watched(model, fitted):
    inputs, other = (chat_inputs(fitted, question, DOCUMENTS) for question in ("Who wrote it?", "When, and where?"))
    alone = watched(model, fitted, inputs)
    watch = AnswerConfidence(model, fitted)

    class Interrupt:
        """Between the forward of the prompt and its scores."""

        def __call__(self, input_ids, scores):
            thread = threading.Thread(target=lambda: model(**other))
            thread.start()
            thread.join()
            return watch(input_ids, scores)

    with watch:
        model.generate(**inputs, **TOKENS, logits_processor=[Interrupt()])
    torch.testing.assert_close(torch.logit(watch.confidence), alone)


def test_an_answer_with_less_confidence_becomes_the_sentence(ask):
    row = {"question": "Who wrote it?", "documents": DOCUMENTS}
    (plain,) = ask(row, return_slots=True, **TOKENS)
    sure = plain["statistics"]["confidence"]
    assert 0 < sure < 1
    kept, given_up = (ask(row, min_confidence=each, **TOKENS)[0] for each in (sure - 1e-4, sure + 1e-4))
    assert kept["generated_text"] == plain["generated_text"] and given_up["generated_text"] == "not in the text"
    chat = [{"role": "user", "content": "Who wrote it?"}]
    (record,) = ask(chat, documents=DOCUMENTS, min_confidence=1.0, **TOKENS)
    assert record["generated_text"] == [*chat, {"role": "assistant", "content": "not in the text"}]


def test_each_row_of_a_batch_has_its_own_confidence_and_its_samples_share_it(ask):
    rows = [{"question": question, "documents": DOCUMENTS} for question in ("Who wrote it?", "When?", "Where was it?")]
    together = ask(rows, batch_size=3, return_slots=True, **TOKENS)
    alone = [ask(row, return_slots=True, **TOKENS) for row in rows]
    for (record,), (expected,) in zip(together, alone, strict=True):
        assert record["statistics"].pop("confidence") == pytest.approx(
            expected["statistics"].pop("confidence"), abs=1e-4
        )
        assert record == expected
    for options in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 2}):
        records = ask(rows[:2], batch_size=2, return_slots=True, max_new_tokens=6, **options)
        assert len({each["statistics"]["confidence"] for each in records[0]}) == 1
        assert records[0][0]["statistics"]["confidence"] != records[1][0]["statistics"]["confidence"]


def test_text_without_slots_has_no_confidence(ask):
    chat = [{"role": "user", "content": "Who?"}]
    (record,) = ask(chat, min_confidence=1.0, return_slots=True, **TOKENS)
    assert record["generated_text"][-1]["content"] != "not in the text" and "confidence" not in record["statistics"]


@pytest.mark.parametrize(
    "options, message",
    [
        *(
            ({"min_confidence": each}, "expected a number from 0 to 1")
            for each in (-0.1, 1.5, "0.5", True, float("nan"))
        ),
        *(({"max_passages": n}, "is .*; expected a whole number of at least 1") for n in (0, -1, 1.5, True, "2")),
        ({"max_passages": 1}, "this aligner was trained to read those of a question jointly"),
        ({"min_confidence": 0.5, "streamer": "any"}, "not possible with `streamer`"),
        ({"min_confidence": 0.5, "return_tensors": True}, "not possible with `return_tensors`"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused(ask, options, message):
    with pytest.raises(ValueError, match=message):
        ask({"question": "Who?", "documents": DOCUMENTS}, **options)


def test_a_refusal_needs_its_words(ask):
    ask.processor.no_answer = None
    with pytest.raises(ValueError, match="`no_answer` is None; expected what is answered instead"):
        ask({"question": "Who?", "documents": DOCUMENTS}, min_confidence=0.5)


def test_an_aligner_without_a_probe_has_no_confidence(model, processor):
    ask = pipeline_of(model, processor)
    row = {"question": "Who?", "documents": DOCUMENTS}
    assert "confidence" not in ask(row, return_slots=True, **TOKENS)[0]["statistics"]
    with pytest.raises(ValueError, match="`min_confidence` needs an aligner whose confidence was fitted"):
        ask(row, min_confidence=0.5)
    with pytest.raises(ValueError, match="A confidence needs an aligner"):
        AnswerConfidence(model, processor)


@pytest.mark.parametrize("changes", [{"layers": [0, 99]}, {"weight": [0.5] * 7}], ids=["layers", "width"])
def test_a_probe_of_another_model_is_refused(model, fitted, changes):
    fitted.answer_probe = random_probe(model, **changes)
    with pytest.raises(ValueError, match="It was fitted for another model"):
        AnswerConfidence(model, fitted)


def test_what_reads_more_than_the_prompt_has_no_confidence_and_is_refused_with_one(ask, model, fitted):
    row = {"question": "Who wrote it? Who wrote it?", "documents": DOCUMENTS}
    for option in ({"prompt_lookup_num_tokens": 4}, {"guidance_scale": 1.5}):
        assert "confidence" not in ask(row, return_slots=True, **TOKENS, **option)[0]["statistics"]
        with pytest.raises(ValueError, match="not possible with any of guidance_scale, prompt_lookup"):
            ask(row, min_confidence=0.5, **TOKENS, **option)
    with pytest.raises(ValueError, match="No states of the prompt's last token were seen"):
        model.generate(
            **chat_inputs(fitted, "Who?", DOCUMENTS), **TOKENS, logits_processor=[AnswerConfidence(model, fitted)]
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": []},
        {"layers": [-1]},
        {"weight": [float("nan")]},
        {"bias": "0"},
        {"threshold": None},
    ],
    ids=str,
)
def test_a_probe_that_is_none_is_refused_on_loading(processor, model, changes):
    with pytest.raises(ValueError, match="`answer_probe` is .*Fit it again with"):
        processor_with(processor, answer_probe=random_probe(model, **changes))


def asked_alone(model, processor, question, document):
    return torch.sigmoid(watched(model, processor, chat_inputs(processor, question, [document]))).item()


PASSAGES = ["It was written by Ada.", {"title": "Loom", "text": "The loom wove. It was loud."}, " ", "Nobody read it."]


@pytest.mark.parametrize("most", [1, 2])
def test_of_more_passages_the_likeliest_are_read_in_their_order(ask_apart, separate, most):
    model, fitted = separate
    sure = [None if each == " " else asked_alone(model, fitted, "Who wrote it?", each) for each in PASSAGES]
    best = sorted(sorted((0, 1, 3), key=lambda number: -sure[number])[:most])
    row = {"question": "Who wrote it?", "documents": PASSAGES}
    chosen = row | {"documents": [PASSAGES[n] for n in best]}
    expected = ask_apart(chosen, return_slots=True, max_passages=most, **TOKENS)
    (record,) = ask_apart(row, return_slots=True, max_passages=most, **TOKENS)
    told = record["statistics"].pop("passage_confidences")
    assert told == pytest.approx({number: sure[number] for number in (0, 1, 3)}, abs=1e-4)
    for segment in expected[0]["segments"]:
        segment["document"] = best[segment["document"]]
    assert record == expected[0]
    if most == 1:
        assert ask_apart(row, return_slots=True, **TOKENS)[0]["segments"] == record["segments"]  # by default


def test_a_passage_that_is_too_long_is_told_of(ask_apart, caplog):
    for words in (500, 501, 502):
        assert any("paragraph or two" in each for each in caplog.messages) == (words == 502)  # told once
        ask_apart({"question": "Who?", "documents": ["word " * words]}, tokens_per_slot="segment", **TOKENS)
    assert len([each for each in caplog.messages if "more than 500 words" in each]) == 1


@pytest.mark.parametrize(
    "documents",
    [PASSAGES[0], PASSAGES[1], tuple(PASSAGES), np.array(PASSAGES[::3])],
    ids=["text", "one", "tuple", "array"],
)
def test_documents_of_any_form_are_chosen_from(ask_apart, documents):
    as_list = [documents] if isinstance(documents, str | dict) else list(documents)
    rows = [{"question": "Who?", "documents": each} for each in (documents, as_list)]
    for options in ({"max_passages": 4}, {}):
        assert ask_apart(rows[0], **TOKENS, **options) == ask_apart(rows[1], **TOKENS, **options)


def test_of_passages_without_text_none_is_likely(ask_apart, separate):
    model, fitted = separate
    assert rank_passages(model.slot_prefix_store(fitted), ["Who?"], [[" ", ""]]) == [{}]
    (record,) = ask_apart({"question": "Who?", "documents": [" ", ""]}, return_slots=True, max_passages=1, **TOKENS)
    (expected,) = ask_apart({"question": "Who?", "documents": []}, return_slots=True, **TOKENS)
    assert record["statistics"].pop("passage_confidences") == {} and record == expected


@pytest.mark.parametrize(
    "chat, options",
    [
        ([{"role": "user", "content": "Who wrote it?"}, {"role": "assistant", "content": "It was"}], {}),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who <|im_end|> wrote it?"}], {}),
        ([{"role": "user", "content": "Who <|im_end|> wrote it?"}], {"sanitize_control_tokens": False}),
    ],
    ids=["an answer that is begun", "a system message", "control tokens"],
)
def test_passages_are_ranked_for_the_prompt_that_is_answered(ask_apart, chat, options):
    settings = {"return_slots": True, **TOKENS, **options}
    (record,) = ask_apart(chat, documents=PASSAGES, max_passages=1, **settings)
    sure = record["statistics"]["passage_confidences"]
    for number in (0, 1, 3):
        (alone,) = ask_apart(chat, documents=[PASSAGES[number]], **settings)
        assert sure[number] == pytest.approx(alone["statistics"]["confidence"], abs=1e-4)


def test_gates_of_the_pipeline_and_of_the_call_are_those_that_passages_are_ranked_with(separate):
    model, fitted = separate
    gates, row = {"gate_mode": "always", "max_refinement_steps": 1}, {"question": "Who?", "documents": PASSAGES}
    pipe = functools.partial(pipeline_of, model, fitted)
    expected = pipe()(row, max_passages=1, return_slots=True, **gates, **TOKENS)
    assert pipe(max_passages=1)(row, return_slots=True, **gates, **TOKENS) == expected
    assert pipe(**gates)(row, max_passages=1, return_slots=True, **TOKENS) == expected
    assert pipe()(row, max_passages=1, return_slots=True, **TOKENS) != expected


def test_passages_are_ranked_at_the_rate_and_with_the_gates_that_are_asked_for(separate):
    model, fitted = separate
    settings = {"tokens_per_slot": 2, "gate_mode": "always", "max_refinement_steps": 1}
    store = model.slot_prefix_store(fitted)
    (ranked,) = rank_passages(store, ["Who wrote it?"], [PASSAGES], **settings)
    (other,) = rank_passages(store, ["Who wrote it?"], [PASSAGES])
    for number in (0, 1, 3):
        inputs = chat_inputs(fitted, "Who wrote it?", [PASSAGES[number]], tokens_per_slot=2)
        alone = watched(model, fitted, inputs, gate_mode="always", max_refinement_steps=1)
        assert ranked[number].confidence == pytest.approx(torch.sigmoid(alone).item(), abs=1e-4)
        assert ranked[number].confidence != pytest.approx(other[number].confidence, abs=1e-4)


def test_precomputed_slots_are_ranked_as_their_passages_and_kept_for_the_answer(separate):
    model, fitted = separate
    store = model.slot_prefix_store(fitted)
    (encoded,) = fitted.slot_encoder.encode_batch([PASSAGES])
    slots = {"context_embeds": [encoded.context_embeds], "context_passage_ids": [encoded.context_passage_ids]}
    (first,), (again,) = (rank_passages(store, ["Who wrote it?"], **slots) for _ in range(2))
    (expected,) = rank_passages(store, ["Who wrote it?"], [PASSAGES])
    assert list(first) == list(expected) == [0, 1, 3]
    for number, passage in first.items():
        assert passage.confidence == pytest.approx(expected[number].confidence, abs=1e-4)
        assert not passage.is_kept and again[number].is_kept
    assert store.prepare(["Who?"], **slots).num_kept == [3]


def test_passages_of_several_questions_are_read_at_once_and_ranked_some_at_a_time(separate, monkeypatch):
    model, fitted = separate
    documents = [[f"Passage {'more ' * number}text." for number in range(5)], PASSAGES, [" "], PASSAGES[:2]]
    questions = ["Who?", "Who wrote it, and when?", "Why?", "Where?"]
    expected = [
        {n: each.confidence for n, each in rank_passages(model.slot_prefix_store(fitted), [question], [own])[0].items()}
        for question, own in zip(questions, documents, strict=True)
    ]
    monkeypatch.setattr(prefix_store_arcaligner, "ROWS_AT_ONCE", 3)
    store, calls = model.slot_prefix_store(fitted), []
    monkeypatch.setattr(
        prefix_store_arcaligner, "read_passages", lambda *args, **kw: calls.append(0) or read(*args, **kw)
    )
    found = rank_passages(store, questions, documents)
    assert len(calls) == 1 and store.misses == 9  # equal passages once, and one that is empty
    for one, other in zip(found, expected, strict=True):
        assert {number: each.confidence for number, each in one.items()} == pytest.approx(other, abs=1e-5)


def test_passages_that_are_read_jointly_are_not_ranked(model, fitted):
    with pytest.raises(ValueError, match="this aligner was trained to read those of a question jointly"):
        rank_passages(model.slot_prefix_store(fitted), ["Who?"], [PASSAGES])


def test_slots_of_a_passage_that_do_not_stand_together_are_refused(separate):
    model, fitted = separate
    embeds, numbers = torch.ones(3, fitted.encoder_hidden_size), torch.tensor([0, 1, 0])
    slots = {"context_embeds": [embeds], "context_passage_ids": [numbers]}
    for use in (rank_passages, type(model.slot_prefix_store(fitted)).prepare):
        with pytest.raises(ValueError, match="expected the slots of a passage to stand together"):
            use(model.slot_prefix_store(fitted), ["Who?"], **slots)
