"""Answers in the words of the passages: what can be copied, what is preferred for it, and what stays as it was."""

import gc
import time
import weakref

import pytest
import torch
from conftest import chat_inputs, greedy_answer, pipeline_of, processor_with, score_passages
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import GenerationConfig

from arcaligner.answering_arcaligner import (
    YES_NO,
    PassageCopyLogitsProcessor,
    clear_text_caches,
    copied_next,
    copied_texts,
    similarities_of,
)
from arcaligner.benchmarks.compare import Reader
from arcaligner.encoder_arcaligner import SentenceEncoder
from arcaligner.evaluation.methods import METHODS
from arcaligner.tokenization_arcaligner import readable

QUESTION = "Who wrote it?"
DOCUMENTS = ["It was written by Ada.  Nobody else knew.", {"title": "Toronto Northwest", "text": "A riding, in 1924."}]
CHAT = [{"role": "user", "content": QUESTION}]
ROW = {"question": QUESTION, "documents": DOCUMENTS}
NEW_TOKENS = 12
HUGE = 1e4  # leaves no other token a chance


@pytest.fixture
def ask(model, processor):
    return pipeline_of(model, processor, max_new_tokens=NEW_TOKENS)


def copies(tokenizer, documents: list, no_answer: str | None = None) -> list[tuple[list[int], list[bool]]]:
    """From each word on all that can be copied: ids, and whether a word ends with each."""
    texts = copied_texts(tokenizer, documents, no_answer)
    words = [(text, *word) for text in texts for words in text.words.values() for word in words]
    return [(own + text.ids[at:], ends + text.ends_word[at:]) for text, own, ends, at in words]


def texts_of(documents: list) -> str:
    return "\n".join(each if isinstance(each, str) else f"{each['title']}\n{each['text']}" for each in documents)


# What can be copied


@example(text="a-\na")  # a word that is divided at the end of a line
@given(text=st.text(st.sampled_from("ab Z.,-!?\n\té漢😀'\"1"), max_size=60))
def test_copies_are_of_the_text(processor, text):
    """What can be copied is the text as it is read, from one of its words on."""
    tokenizer, texts = processor.tokenizer, copied_texts(processor.tokenizer, [text])
    text = readable(text).text
    for ids, ends_word in copies(tokenizer, [text])[: -len(YES_NO)]:
        copied = tokenizer.decode(ids).rstrip("\ufffd")
        assert len(ids) == len(ends_word) > 0 and copied and not copied[0].isspace()
        starts = [place for place in range(len(text)) if text.startswith(copied, place)]
        assert any(place == 0 or not (text[place - 1] + text[place]).isalnum() for place in starts)
        for length in range(1, len(ids)):  # it is not ended early
            assert ids[length] in copied_next(texts, ids[:length], set())


def test_copies_begin_and_end(processor):
    """A copy begins with any word, and may end where a word does."""
    tokenizer = processor.tokenizer
    found = copies(tokenizer, [{"title": "Ada", "text": "It was, (é) 3.5%."}, "<|im_end|> end."], "not there")
    whole = ["Ada", "It was, (é) 3.5%.", "was, (é) 3.5%.", "(é) 3.5%.", "é) 3.5%.", "3.5%.", "5%.", *YES_NO]
    whole += ["not there", "im_end|> end.", "end|> end.", "end."]  # of a control token no more than its text
    assert sorted(tokenizer.decode(ids) for ids, _ in found) == sorted(whole)
    assert not {tokenizer.eos_token_id} & {each for ids, _ in found for each in ids}
    ids, ends_word = next(each for each in found if tokenizer.decode(each[0]) == whole[1])
    ends = {tokenizer.decode(ids[: number + 1]) for number, is_end in enumerate(ends_word) if is_end}
    assert {"It", "It was", "It was, (é", "It was, (é) 3", "It was, (é) 3.5%."} <= ends
    assert not any(each.endswith(("\ufffd", "wa")) or each == "I" for each in ends)


@pytest.mark.parametrize("text", ["a-", "a ", "(", "漢", "a" * 99 + "-", "<|im_end|>"])
def test_time_is_linear_in_text(processor, text):
    times = [time.process_time()]
    for size in (6_000, 60_000):
        found = copied_texts(processor.tokenizer, [(text * size)[:size]])
        copied_next(found, found[0].ids[:3], set())
        times.append(time.process_time())
    assert times[2] - times[1] < 30 * max(times[1] - times[0], 0.1)


# What is preferred


@pytest.mark.parametrize("as_ends", [int, lambda end: [end], torch.tensor], ids=["int", "list", "tensor"])
def test_bonus_of_tokens(processor, as_ends):
    """Those that go on with a copy, or end it, have it, and no others."""
    tokenizer, refusal = processor.tokenizer, "Nobody knows zebra"
    learned = processor_with(processor, no_answer=refusal)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompt, end = encode("Who?"), tokenizer.eos_token_id
    for written, expected in (
        ("", {encode(each)[0] for each in ("It", "was", "written", "by", "Ada", *YES_NO, refusal)}),
        ("yes", {end}),
        ("Nobody", {encode(refusal)[len(encode("Nobody"))]}),  # a learned refusal counts as copied, as a whole
        (refusal, {end}),
        ("It was", {encode("It was written by Ada")[len(encode("It was"))], end}),
        ("by Ada", {encode("by Ada.")[-1], end}),
        ("was Ada", set()),
    ):
        bonus = PassageCopyLogitsProcessor(learned, [["It was written by Ada."]], 3.0, as_ends(end))
        scores = torch.randn(1, len(tokenizer))
        bonus(torch.tensor([prompt]), scores)
        found = bonus(torch.tensor([prompt + encode(written)]), scores)
        scores[0, sorted(expected)] += 3.0
        torch.testing.assert_close(found, scores.log_softmax(dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_answer_is_a_passage_span(ask, options):
    """Word for word."""
    torch.manual_seed(0)
    records = ask(ROW, copy_bonus=HUGE, **options)
    assert records[0] != ask(ROW, copy_bonus=0)[0]
    for record in records:
        assert record["generated_text"] in YES_NO or record["generated_text"] in texts_of(DOCUMENTS)


def test_beams_of_copies(model, processor):
    """One is as likely as its tokens, and not preferred for its length."""
    copier = PassageCopyLogitsProcessor(processor, [DOCUMENTS], 3.0, processor.tokenizer.eos_token_id)
    options = {"max_new_tokens": 6, "num_beams": 3, "length_penalty": 0.0, "logits_processor": [copier]}
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    found = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    whole = inputs | {"input_ids": found.sequences, "attention_mask": torch.ones_like(found.sequences)}
    logits, ids, total = model(**whole).logits, found.sequences, 0.0
    copier.prompt_length = None
    for place in range(inputs["input_ids"].shape[1], ids.shape[1]):
        total += copier(ids[:, :place], logits[:, place - 1])[0, ids[0, place]]
    torch.testing.assert_close(found.sequences_scores[0], total, rtol=1e-3, atol=1e-3)


def test_rows_copy_their_own_passages(ask):
    """Those of a batch."""
    rows = [ROW, {"question": "Is there anything?", "documents": []}, ROW | {"documents": ["He is a ski jumper."]}]
    for beams in (2, 1):
        together, alone = (ask(rows, copy_bonus=HUGE, num_beams=beams, batch_size=size) for size in (3, 1))
        assert together == alone
    assert alone[2][0]["generated_text"] in (*YES_NO, "He is a ski jumper.") and alone[1] == ask(rows[1], copy_bonus=0)


def test_selected_passages_are_copied(separate):
    """Of several passages, those that are read are copied from."""
    ask = pipeline_of(*separate, max_new_tokens=4)  # of an aligner that reads the likeliest passage
    (record,) = ask(ROW, copy_bonus=HUGE, max_passages=1, return_slots=True)
    read = {segment["document"] for segment in record["segments"]}
    assert len(read) == 1 and record["generated_text"] in texts_of([DOCUMENTS[number] for number in read])


def test_evaluation_copies_as_the_pipeline(ask, model, processor, few_tokens):
    """And can do without."""
    row = {"question": QUESTION, "answers": ["Ada"], "passages": [{"title": "", "text": DOCUMENTS[0]}]}
    copying = processor_with(processor, copy_bonus=HUGE)
    for name, bonus in (("arcaligner", HUGE), ("no_copying", 0)):
        (found,) = METHODS[name].answer(model, copying, [row], gate_mode="off")
        asked = {"question": QUESTION, "documents": row["passages"]}
        (record,) = ask(asked, copy_bonus=bonus, max_new_tokens=4, gate_mode="off")
        assert found.text == record["generated_text"].strip()
    reader = Reader("slots", 2, model)
    answers = {bonus: reader.ask(processor_with(processor, copy_bonus=bonus), row).answer for bonus in (HUGE, 0.0)}
    assert answers[HUGE] in (*YES_NO, DOCUMENTS[0]) or answers[HUGE] in DOCUMENTS[0]
    assert answers[HUGE] != answers[0.0]


# What stays as it was


def test_begun_answers_ignore_copy_bonus(ask):
    """An empty text is not copied, and an answer that has begun has no bonus."""
    begun = {"documents": DOCUMENTS, "messages": [*CHAT, {"role": "assistant", "content": "It was"}]}
    for row in (begun, *(ROW | {"documents": [each]} for each in ("", " ", {"title": "Ada", "text": ""}))):
        assert ask(row, copy_bonus=HUGE) == ask(row, copy_bonus=0)


def test_end_of_answers(ask):
    """It is the model's where a generation configuration names none."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    config = GenerationConfig(**options)
    assert config.eos_token_id is None
    assert ask(ROW, copy_bonus=HUGE, generation_config=config) == ask(ROW, copy_bonus=HUGE, **options)


def test_bonus_of_processor_and_call(ask, model, processor, tmp_path):
    """The processor says how much copying is preferred, and a call may say otherwise."""
    free = greedy_answer(model, processor, chat_inputs(processor, QUESTION, DOCUMENTS), NEW_TOKENS)
    processor_with(processor, copy_bonus=HUGE).save_pretrained(tmp_path)
    asked = pipeline_of(model, type(processor).from_pretrained(tmp_path), max_new_tokens=NEW_TOKENS)
    assert asked(ROW) == ask(ROW, copy_bonus=HUGE) != ask(ROW)
    assert asked(ROW, copy_bonus=0) == ask(ROW) == [{"generated_text": free}]  # as of older checkpoints


# How near question and passage are


def test_passages_are_ranked_by_cosines(separate):
    model, fitted = separate
    (ranked,) = score_passages(model.passage_cache(fitted), [QUESTION], [["Ada wrote it."]])
    assert [ranked[0].similarity] == similarities_of(fitted.encoder, QUESTION, ["Ada wrote it."])


def test_vectors_are_cached_by_encoder(encoder_dir):
    """As long as it lives, or until the caches are cleared."""
    encoder, plain, asked = SentenceEncoder(str(encoder_dir)), SentenceEncoder(str(encoder_dir)), []
    encoder.encode = lambda texts: asked.extend(texts) or plain.encode(texts)
    for documents in (["Ada.", "Bob."], ["Bob.", "Eve."], ["a" * 20_000], ["a" * 20_000]):
        found = similarities_of(encoder, [{"role": "user", "content": QUESTION}], documents)
        vectors = plain.encode([QUESTION, *documents])
        torch.testing.assert_close(torch.tensor(found), vectors[1:] @ vectors[0], rtol=0, atol=1e-5)
    assert asked == [QUESTION, "Ada.", "Bob.", "Eve.", "a" * 20_000, "a" * 20_000]
    clear_text_caches()
    similarities_of(encoder, QUESTION, ["Eve."])
    assert asked[6:] == [QUESTION, "Eve."]
    seen = weakref.ref(encoder)
    del encoder
    gc.collect()
    assert seen() is None
