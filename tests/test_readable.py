"""Documents are encoded as people see them: invisible characters change no slot and no answer, and offsets refer to the
text that was given."""

import time
import unicodedata

import pytest
import torch
from conftest import new_processor
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arcaligner.answering_arcaligner import copied_texts
from arcaligner.tokenization_arcaligner import readable

ODD = [
    "\u00ad", "\u200b", "\u200c", "\u200d", "\ufeff", "\u00a0", "\u202f", "\u3000", "\ufb01", "\ufb03",
    "&shy;", "&nbsp;", "&amp;", "&lt;", "&eacute;", "&#173;", "a\u0301", "e\u0302\u0301", "\u1112\u1161\u11ab",
    "\x00", "\x1b[31m", "\x08", "\r\n", "\r", "-\n", "\u00ad\n", "\u2028", "\ufe0f", "\u202e", "\U000e0041",
    "\u0344", "\ufdfa", "\u2011", "\u2f08", "\U0001d465", "\U000e0100", "\u3164", "\u180b",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("Inter\u00adnational", "International"),
        ("writ\u00ad\nten, Octo\u00ad \r\n ber", "written, October"),
        ("zero\u200b\u2060\ufeff\u200c\u200dwidth", "zerowidth"),
        ("10\u00a0000\u202f\u2009km", "10 000  km"),
        ("o\ufb03ce, \ufb01nal, \ufb05", "office, final, st"),
        ("cafe\u0301, A\u030angstro\u0308m, \u1112\u1161\u11ab", "caf\u00e9, \u00c5ngstr\u00f6m, \ud55c"),
        ("a&shy;b&nbsp;c&#8203;d &eacute; AT&amp;T &#39;", "ab cd \u00e9 AT&T '"),
        ("&lt;b&gt; &amp;nbsp; &amp;lt; a&b; &copy &nothing; ?a=1&b=2", None),  # entities in markup, or no entities
        ("nul\x00 \x1b[1;31mred\x1b[0m N\x08Na\x08am\x08me\x7f", "nul red Name"),
        ("a\r\nb\rc\x0cd\u2028e", "a\nb\nc\nd\ne"),
        ("Thurs-\nday, gr\u00f6-\n  \u00dfer", "Thursday, gr\u00f6\u00dfer"),
        ("state-of-the-\nart, well-\nknown and well-known", "state-of-the-art, well-known and well-known"),
        ("- one -\n- two\nA-\nB 1990-\n1995\n---\nend-\n\nnew", None),  # lists, names, numbers, rules
        (
            "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f468\u200d\U0001f469 \u2764\ufe0f 1\ufe0f\u20e3",
            None,
        ),
        ("m\u00b2 \u00bd \uff11 \u2122 \u201cq\u201d \u2013 \t\n", None),  # all of these characters are visible
        ("COVID\u201119, e\u2010mail, 2020\u20132021", "COVID-19, e-mail, 2020\u20132021"),
        (
            "\u2f42\u2f08 \u845b\U000e0100 \U0001d465 = \U0001d7cf, \U0001d461\u210e\U0001d452, \u0133s",
            "\u6587\u4eba \u845b x = 1, the, ijs",
        ),
        ("a\u2800b\u3164c\u1820\u180bd\u17b4e\ufffef\U0001d173g", "a b c\u1820defg"),
        ("left\u200eto\u202eright\u2066!", "lefttoright!"),
    ],
)
def test_text_is_what_people_see(text, seen):
    assert readable(text).text == (text if seen is None else seen)


@settings(deadline=None, max_examples=150)
@example("\ufdfa\ufe0f")
@given(st.lists(st.sampled_from(ODD) | st.text("ab. -\n", max_size=4), max_size=30).map("".join))
def test_normalization_is_idempotent(text):
    """A clean text does not change, no invisible character remains, and offsets can be mapped in both directions."""
    clean = readable(text)
    assert readable(clean.text) == (clean.text, ()) and (clean.edits or clean.text == text)
    assert not set(clean.text) & set(
        "\u00ad\u200b\ufeff\u2011\U000e0100\u3164\u00a0\u3000\ufb01\x00\x08\x1b\r\u2028\u202e"
    )
    assert unicodedata.is_normalized("NFC", clean.text)
    before = 0
    for place in range(len(clean.text)):
        start, end = clean.to_original(place, place + 1)
        assert before <= start < end <= len(text)
        is_alone = clean.text[place] in readable(text[start:end]).text
        # A variation selector is dropped without the character before it.
        assert is_alone or clean.text[place] == "\ufe0f" or "&" in text or "-" in text or "\x08" in text
        assert clean.from_original(start) <= place
        before = start
    assert clean.to_original(0, 0) == (
        clean.to_original(0, 1)[0] if clean.text else clean.to_original(0, 0)[0],
        clean.to_original(0, 0)[1],
    )


@settings(deadline=None, max_examples=80)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_cleaning_twice_changes_nothing(text):
    clean = readable(text)
    assert readable(clean.text) == (clean.text, ())
    for place in range(len(clean.text)):
        start, end = clean.to_original(place, place + 1)
        assert 0 <= start < end <= len(text)


@pytest.mark.parametrize(
    "text", ["a\x08", "\x1b[", "\x1b]", "&", "&amp;", "a\u0301", "ab-\nba ", "a-", "a", "\u200d", "\u00ad\n", "\r"]
)
def test_time_of_reading_is_linear(text):
    text, start = (text * 200_000)[:200_000] + "-\na", time.process_time()
    readable(text)
    assert time.process_time() - start < 2


CLEAN = "The o\ufb03ce (cafe\u0301) wrote it. Ada read it aloud."
CLEAN = readable(CLEAN).text
UNCLEAN = "\ufeffThe o\ufb03ce\u00a0(cafe\u0301) wro\u00adte it.\r\nA\u200bda read it alo-\nud.\u200b"


@pytest.mark.parametrize("rate", [2, "segment"])
def test_slots_equal_clean_text(base_model_dir, encoder_dir, rate):
    """Slots, copies and statistics are those of the clean text; offsets refer to the given text."""
    processor = new_processor(base_model_dir, encoder_dir, context_words=True)
    clean, unclean = CLEAN.replace("it. ", "it.\n"), UNCLEAN
    expected, actual = (
        processor.encode_documents([{"title": title, "text": text}], tokens_per_slot=rate)
        for title, text in (("Office", clean), ("O\ufb03\u00adce", unclean))
    )
    torch.testing.assert_close(actual.context_embeds, expected.context_embeds, rtol=0, atol=0)
    assert torch.equal(actual.context_word_ids, expected.context_word_ids)
    if rate == "segment":  # in smaller slots, two of them may share a ligature
        texts = [readable(segment.text).text for segment in actual.segments]
        assert texts == [segment.text for segment in expected.segments]
    assert all(segment.text == unclean[segment.start : segment.end] for segment in actual.segments)
    documents = [[{"title": "Office", "text": text}] for text in (clean, unclean)]
    same = [copied_texts(processor.tokenizer, passages) for passages in documents]
    assert same[0] == same[1]
    counts = [
        processor.slot_encoder.statistics(passages, encoded, has_budget=False)
        for passages, encoded in zip(documents, (expected, actual), strict=True)
    ]
    assert counts[0] == counts[1]


def test_added_tokens_are_text(base_model_dir, encoder_dir):
    """A word that was added to the tokenizer, whose id is unknown to the model or that of slots, is text."""
    processor = new_processor(base_model_dir, encoder_dir, context_words=True)
    text = "It is <brand> here, and <other>."
    expected = processor.encode_documents([text], tokens_per_slot=2)
    size = len(processor.tokenizer)
    processor.tokenizer.add_tokens(["<brand>", "<other>"])
    encoded = processor.encode_documents([text], tokens_per_slot=2)
    assert int(encoded.context_word_ids.max()) < size == processor.context_token_id
    assert encoded.context_word_ids.shape[0] >= expected.context_word_ids.shape[0]
    assert max(max(copied.ids, default=0) for copied in copied_texts(processor.tokenizer, [text])) < size
