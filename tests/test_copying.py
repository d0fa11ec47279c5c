"""Answers in the words of the passages: what can be copied, what is preferred for it, and what stays as it was."""

import time

import pytest
import torch
from conftest import chat_inputs, greedy_answer, processor_with
from hypothesis import given
from hypothesis import strategies as st

from arcaligner import ArcAlignerPipeline
from arcaligner.pipeline_arcaligner import CopyBonus
from arcaligner.segmentation_arcaligner import YES_NO, copied_next, text_spans

QUESTION = "Who wrote it?"
DOCUMENTS = ["It was written by Ada.  Nobody else knew.", {"title": "Toronto Northwest", "text": "A riding, in 1924."}]
ROW = {"question": QUESTION, "documents": DOCUMENTS}
NEW_TOKENS = 12
HUGE = 1e4  # leaves no other token a chance


@pytest.fixture
def ask(model, processor):
    settings = {"task": "text-generation", "device": "cpu", "max_new_tokens": NEW_TOKENS}
    return ArcAlignerPipeline(model=model, processor=processor, **settings)


def texts_of(documents: list) -> str:
    return "\n".join(each if isinstance(each, str) else f"{each['title']}\n{each['text']}" for each in documents)


@given(text=st.text(st.sampled_from("ab Z.,-!?\n\té漢😀'\"1"), max_size=60))
def test_a_span_is_the_text_from_one_of_its_words_on(processor, text):
    tokenizer = processor.tokenizer
    for ids, ends_word in text_spans(tokenizer, [text])[: -len(YES_NO)]:
        copied = tokenizer.decode(ids).rstrip("\ufffd")
        assert len(ids) == len(ends_word) > 0 and copied and not copied[0].isspace()
        starts = [place for place in range(len(text)) if text.startswith(copied, place)]
        assert any(place == 0 or not (text[place - 1] + text[place]).isalnum() for place in starts)


def test_there_is_a_span_for_each_word_and_it_may_end_where_a_word_does(processor):
    tokenizer = processor.tokenizer
    spans = text_spans(tokenizer, [{"title": "Ada", "text": "It was, (é) 3.5%."}])
    whole = [tokenizer.decode(ids) for ids, _ in spans]
    assert whole == ["Ada", "It was, (é) 3.5%.", "was, (é) 3.5%.", "(é) 3.5%.", "é) 3.5%.", "3.5%.", "5%.", *YES_NO]
    ids, ends_word = spans[1]
    ends = {tokenizer.decode(ids[: number + 1]) for number, is_end in enumerate(ends_word) if is_end}
    assert {"It", "It was", "It was, (é", "It was, (é) 3", "It was, (é) 3.5%."} <= ends
    assert not any(each.endswith(("\ufffd", "wa")) or each == "I" for each in ends)


def test_a_control_token_of_a_text_is_never_copied(processor):
    tokenizer, text = processor.tokenizer, "Ada <|im_end|> wrote it."
    spans = text_spans(tokenizer, [text])
    assert {"Ada", "wrote it.", "it."} <= {tokenizer.decode(ids).split("<")[0].strip() for ids, _ in spans}
    assert not {tokenizer.eos_token_id} & {each for ids, _ in spans for each in ids}


@pytest.mark.parametrize("text", ["a-", "a ", "(", "漢", "a" * 99 + "-", "<|im_end|>"])
def test_time_to_find_spans_is_linear_in_any_text(processor, text):
    text, start = (text * 30_000)[:30_000], time.process_time()
    copied_next(text_spans(processor.tokenizer, [text]), [], set())
    assert time.process_time() - start < 5


def test_the_bonus_is_of_tokens_that_go_on_with_a_span_or_end_it_and_of_no_others(processor):
    tokenizer = processor.tokenizer
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompt, end = encode("Who?"), tokenizer.eos_token_id
    for written, expected in (
        ("", {encode(each)[0] for each in ("It", "was", "written", "by", "Ada", *YES_NO)}),
        ("yes", {end}),
        ("It was", {encode("It was written by Ada")[len(encode("It was"))], end}),
        ("by Ada", {encode("by Ada.")[-1], end}),
        ("was Ada", set()),
    ):
        ids, scores = torch.tensor([prompt + encode(written)]), torch.randn(1, len(tokenizer))
        bonus = CopyBonus(tokenizer, [["It was written by Ada."]], 3.0, end)
        bonus(torch.tensor([prompt]), scores)
        found, before = bonus(ids, scores), scores.clone()
        before[0, sorted(expected)] += 3.0
        torch.testing.assert_close(found, before, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_an_answer_is_word_for_word_in_the_passages(ask, options):
    torch.manual_seed(0)
    records = ask(ROW, copy_bonus=HUGE, **options)
    assert records[0] != ask(ROW, copy_bonus=0)[0]
    for record in records:
        assert record["generated_text"] in YES_NO or record["generated_text"] in texts_of(DOCUMENTS)


def test_the_processor_says_how_much_copying_is_preferred_and_a_call_may_say_otherwise(model, processor):
    free = greedy_answer(model, processor, chat_inputs(processor, QUESTION, DOCUMENTS), NEW_TOKENS)
    settings = {"task": "text-generation", "device": "cpu", "max_new_tokens": NEW_TOKENS}
    copying = ArcAlignerPipeline(model=model, processor=processor_with(processor, copy_bonus=HUGE), **settings)
    plain = ArcAlignerPipeline(model=model, processor=processor, **settings)
    assert copying(ROW)[0] == plain(ROW, copy_bonus=HUGE)[0] != {"generated_text": free}
    assert copying(ROW, copy_bonus=0)[0] == plain(ROW)[0] == {"generated_text": free}


def test_rows_of_a_batch_copy_from_their_own_passages(ask):
    rows = [ROW, {"question": "Is there anything?", "documents": []}, ROW | {"documents": ["He is a ski jumper."]}]
    alone = [ask(row, copy_bonus=HUGE)[0] for row in rows]
    assert [record for (record,) in ask(rows, copy_bonus=HUGE, batch_size=3)] == alone
    assert alone[2]["generated_text"] in (*YES_NO, "He is a ski jumper.") and alone[1] == ask(rows[1], copy_bonus=0)[0]


def test_an_answer_that_is_begun_goes_on_as_before(ask):
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It was"}]
    assert ask(chat, documents=DOCUMENTS, copy_bonus=HUGE) == ask(chat, documents=DOCUMENTS)


def test_of_chosen_passages_those_that_are_read_are_copied_from(separate):
    model, fitted = separate
    ask = ArcAlignerPipeline(model=model, processor=fitted, task="text-generation", device="cpu", max_new_tokens=4)
    (record,) = ask(ROW, copy_bonus=HUGE, max_passages=1, return_slots=True)
    read = {segment["document"] for segment in record["segments"]}
    assert len(read) == 1 and record["generated_text"] in texts_of([DOCUMENTS[number] for number in read])


def test_the_setting_is_saved_and_absent_in_older_checkpoints(processor, tmp_path):
    assert "copy_bonus" in processor.to_dict() and processor.copy_bonus == 0.0
    processor_with(processor, copy_bonus=2.5).save_pretrained(tmp_path)
    assert type(processor).from_pretrained(tmp_path).copy_bonus == 2.5


@pytest.mark.parametrize("bonus", [-1, True, "6", float("inf"), float("nan")])
def test_another_bonus_is_refused(ask, processor, bonus):
    for use in (lambda: ask(ROW, copy_bonus=bonus), lambda: processor_with(processor, copy_bonus=bonus)):
        with pytest.raises(ValueError, match="`copy_bonus` is .*expected a number from 0"):
            use()
