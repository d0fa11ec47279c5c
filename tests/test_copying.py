"""Copy-biased decoding: what can be copied, which tokens get the bonus, and which answers do not change."""

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
    """The text from each word on: its ids, and whether a word ends with each id."""
    texts = copied_texts(tokenizer, documents, no_answer)
    words = [(text, *word) for text in texts for words in text.words.values() for word in words]
    return [(ids + text.ids[at:], ends + text.ends_word[at:]) for text, ids, ends, at in words]


def texts_of(documents: list) -> str:
    return "\n".join(text if isinstance(text, str) else f"{text['title']}\n{text['text']}" for text in documents)


# What can be copied


@example(text="a-\na")  # a word that is divided at the end of a line
@given(text=st.text(st.sampled_from("ab Z.,-!?\n\té漢😀'\"1"), max_size=60))
def test_copies_are_of_the_text(processor, text):
    """Copies are parts of the cleaned text that begin with a word."""
    tokenizer, texts = processor.tokenizer, copied_texts(processor.tokenizer, [text])
    text = readable(text).text
    for ids, ends_word in copies(tokenizer, [text])[: -len(YES_NO)]:
        copied = tokenizer.decode(ids).rstrip("\ufffd")
        assert len(ids) == len(ends_word) > 0 and copied and not copied[0].isspace()
        starts = [place for place in range(len(text)) if text.startswith(copied, place)]
        assert any(place == 0 or not (text[place - 1] + text[place]).isalnum() for place in starts)
        for length in range(1, len(ids)):  # so that an answer does not end early
            assert ids[length] in copied_next(texts, ids[:length], set())


def test_copies_begin_and_end(processor):
    """A copy may begin with any word, and may end with any word."""
    tokenizer = processor.tokenizer
    copied = copies(tokenizer, [{"title": "Ada", "text": "It was, (é) 3.5%."}, "<|im_end|> end."], "not there")
    whole = ["Ada", "It was, (é) 3.5%.", "was, (é) 3.5%.", "(é) 3.5%.", "é) 3.5%.", "3.5%.", "5%.", *YES_NO]
    whole += ["not there", "im_end|> end.", "end|> end.", "end."]  # a control token in a document is copied as text
    assert sorted(tokenizer.decode(ids) for ids, _ in copied) == sorted(whole)
    assert not {tokenizer.eos_token_id} & {token for ids, _ in copied for token in ids}
    ids, ends_word = next(copy for copy in copied if tokenizer.decode(copy[0]) == whole[1])
    ends = {tokenizer.decode(ids[: number + 1]) for number, is_end in enumerate(ends_word) if is_end}
    assert {"It", "It was", "It was, (é", "It was, (é) 3", "It was, (é) 3.5%."} <= ends
    assert not any(text.endswith(("\ufffd", "wa")) or text == "I" for text in ends)


@pytest.mark.parametrize("text", ["a-", "a ", "(", "漢", "a" * 99 + "-", "<|im_end|>"])
def test_time_is_linear_in_text(processor, text):
    times = [time.process_time()]
    for size in (6_000, 60_000):
        copied = copied_texts(processor.tokenizer, [(text * size)[:size]])
        copied_next(copied, copied[0].ids[:3], set())
        times.append(time.process_time())
    assert times[2] - times[1] < 30 * max(times[1] - times[0], 0.1)


# Which tokens get the bonus


@pytest.mark.parametrize("as_ends", [int, lambda end: [end], torch.tensor], ids=["int", "list", "tensor"])
def test_bonus_of_tokens(processor, as_ends):
    """Only tokens that continue or end a copy get the bonus."""
    tokenizer, refusal = processor.tokenizer, "Nobody knows zebra"
    learned = processor_with(processor, no_answer=refusal)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompt, end = encode("Who?"), tokenizer.eos_token_id
    for written, expected in (
        ("", {encode(word)[0] for word in ("It", "was", "written", "by", "Ada", *YES_NO, refusal)}),
        ("yes", {end}),
        ("Nobody", {encode(refusal)[len(encode("Nobody"))]}),  # the sentence for an abstention is copied as a whole
        (refusal, {end}),
        ("It was", {encode("It was written by Ada")[len(encode("It was"))], end}),
        ("by Ada", {encode("by Ada.")[-1], end}),
        ("was Ada", set()),
    ):
        bonus = PassageCopyLogitsProcessor(learned, [["It was written by Ada."]], 3.0, as_ends(end))
        scores = torch.randn(1, len(tokenizer))
        bonus(torch.tensor([prompt]), scores)
        biased = bonus(torch.tensor([prompt + encode(written)]), scores)
        scores[0, sorted(expected)] += 3.0
        torch.testing.assert_close(biased, scores.log_softmax(dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_answer_is_a_passage_span(ask, options):
    """With a large bonus the answer is a span of the passages, word for word."""
    torch.manual_seed(0)
    records = ask(ROW, copy_bonus=HUGE, **options)
    assert records[0] != ask(ROW, copy_bonus=0)[0]
    for record in records:
        assert record["generated_text"] in YES_NO or record["generated_text"] in texts_of(DOCUMENTS)


def test_beams_of_copies(model, processor):
    """The score of a beam is the sum over its tokens, so that a long copy is not preferred."""
    copier = PassageCopyLogitsProcessor(processor, [DOCUMENTS], 3.0, processor.tokenizer.eos_token_id)
    options = {"max_new_tokens": 6, "num_beams": 3, "length_penalty": 0.0, "logits_processor": [copier]}
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    output = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    whole = inputs | {"input_ids": output.sequences, "attention_mask": torch.ones_like(output.sequences)}
    logits, ids, total = model(**whole).logits, output.sequences, 0.0
    copier.prompt_length = None
    for place in range(inputs["input_ids"].shape[1], ids.shape[1]):
        total += copier(ids[:, :place], logits[:, place - 1])[0, ids[0, place]]
    torch.testing.assert_close(output.sequences_scores[0], total, rtol=1e-3, atol=1e-3)


def test_rows_copy_their_own_passages(ask):
    """Each row of a batch copies from its own passages."""
    rows = [ROW, {"question": "Is there anything?", "documents": []}, ROW | {"documents": ["He is a ski jumper."]}]
    for beams in (2, 1):
        together, alone = (ask(rows, copy_bonus=HUGE, num_beams=beams, batch_size=size) for size in (3, 1))
        assert together == alone
    assert alone[2][0]["generated_text"] in (*YES_NO, "He is a ski jumper.") and alone[1] == ask(rows[1], copy_bonus=0)


def test_selected_passages_are_copied(separate):
    """Answers are copied only from the selected passages."""
    ask = pipeline_of(*separate, max_new_tokens=4)  # of an aligner that uses the top-ranked passage
    (record,) = ask(ROW, copy_bonus=HUGE, max_passages=1, return_slots=True)
    documents = {segment["document"] for segment in record["segments"]}
    assert len(documents) == 1 and record["generated_text"] in texts_of([DOCUMENTS[number] for number in documents])


def test_evaluation_copies_as_the_pipeline(ask, model, processor, few_tokens):
    """The evaluation copies as the pipeline does, and can switch it off."""
    row = {"question": QUESTION, "answers": ["Ada"], "passages": [{"title": "", "text": DOCUMENTS[0]}]}
    copying = processor_with(processor, copy_bonus=HUGE)
    for name, bonus in (("arcaligner", HUGE), ("no_copying", 0)):
        (answer,) = METHODS[name].answer(model, copying, [row], gate_mode="off")
        inputs = {"question": QUESTION, "documents": row["passages"]}
        (record,) = ask(inputs, copy_bonus=bonus, max_new_tokens=4, gate_mode="off")
        assert answer.text == record["generated_text"].strip()
    reader = Reader("slots", 2, model)
    answers = {bonus: reader.ask(processor_with(processor, copy_bonus=bonus), row).answer for bonus in (HUGE, 0.0)}
    assert answers[HUGE] in (*YES_NO, DOCUMENTS[0]) or answers[HUGE] in DOCUMENTS[0]
    assert answers[HUGE] != answers[0.0]


# Answers that do not change


def test_begun_answers_ignore_copy_bonus(ask):
    """An empty text is not copied, and an answer that has already begun gets no bonus."""
    begun = {"documents": DOCUMENTS, "messages": [*CHAT, {"role": "assistant", "content": "It was"}]}
    for row in (begun, *(ROW | {"documents": [document]} for document in ("", " ", {"title": "Ada", "text": ""}))):
        assert ask(row, copy_bonus=HUGE) == ask(row, copy_bonus=0)


def test_end_of_answers(ask):
    """Answers end with the model's end token if a generation configuration has none."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    config = GenerationConfig(**options)
    assert config.eos_token_id is None
    assert ask(ROW, copy_bonus=HUGE, generation_config=config) == ask(ROW, copy_bonus=HUGE, **options)


def test_bonus_of_processor_and_call(ask, model, processor, tmp_path):
    """The processor has a default bonus, and a call can change it."""
    free = greedy_answer(model, processor, chat_inputs(processor, QUESTION, DOCUMENTS), NEW_TOKENS)
    processor_with(processor, copy_bonus=HUGE).save_pretrained(tmp_path)
    saved = pipeline_of(model, type(processor).from_pretrained(tmp_path), max_new_tokens=NEW_TOKENS)
    assert saved(ROW) == ask(ROW, copy_bonus=HUGE) != ask(ROW)
    assert saved(ROW, copy_bonus=0) == ask(ROW) == [{"generated_text": free}]  # older checkpoints have no bonus


# Similarity of question and passage


def test_passages_are_ranked_by_cosines(separate):
    model, fitted = separate
    (ranked,) = score_passages(model.passage_cache(fitted), [QUESTION], [["Ada wrote it."]])
    assert [ranked[0].similarity] == similarities_of(fitted.encoder, QUESTION, ["Ada wrote it."])


def test_vectors_are_cached_by_encoder(encoder_dir):
    """Vectors are cached as long as the encoder exists, or until the caches are cleared."""
    encoder, plain, encoded = SentenceEncoder(str(encoder_dir)), SentenceEncoder(str(encoder_dir)), []
    encoder.encode = lambda texts: encoded.extend(texts) or plain.encode(texts)
    for documents in (["Ada.", "Bob."], ["Bob.", "Eve."], ["a" * 20_000], ["a" * 20_000]):
        similarities = similarities_of(encoder, [{"role": "user", "content": QUESTION}], documents)
        vectors = plain.encode([QUESTION, *documents])
        torch.testing.assert_close(torch.tensor(similarities), vectors[1:] @ vectors[0], rtol=0, atol=1e-5)
    assert encoded == [QUESTION, "Ada.", "Bob.", "Eve.", "a" * 20_000, "a" * 20_000]
    clear_text_caches()
    similarities_of(encoder, QUESTION, ["Eve."])
    assert encoded[6:] == [QUESTION, "Eve."]
    seen = weakref.ref(encoder)
    del encoder
    gc.collect()
    assert seen() is None
