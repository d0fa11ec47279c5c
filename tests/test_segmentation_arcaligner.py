"""Passages to segments: nothing is lost, offsets are true, pieces fit the encoder."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcaligner import segmentation_arcaligner
from arcaligner.segmentation_arcaligner import Segment, check_max_slots, segment_document

TEXT = "One is here. Two goes there!  Is three next? Four ends it."
documents = st.text(st.sampled_from("ab .!?\n\t\u2028\x00é漢😀'\""), max_size=200)


def reads_of(longest):
    return lambda text: -(-len(text) // longest)


def cut(text, **settings):
    return [segment.text for segment in segment_document(text, **settings)]


def test_sentences_are_segments_with_their_offsets():
    assert segment_document("One. Two!", 3) == [Segment(3, 0, 4, "One."), Segment(3, 5, 9, "Two!")]


@pytest.mark.parametrize(
    "text, sentences, expected",
    [
        ("Aaaa bbbb cccc dddd.", 0.5, ["Aaaa bbbb", "cccc dddd."]),  # at the space nearest to the middle
        ("Stop!", 0.5, ["Stop!"]),  # one word has no half
        (TEXT, 3, ["One is here. Two goes there!  Is three next?", "Four ends it."]),
        *((white_space, 1, []) for white_space in ("", "   ", "\n\t\u2028 ")),
    ],
)
def test_sentences_are_halved_or_merged(text, sentences, expected):
    assert cut(text, sentences_per_segment=sentences) == expected


@pytest.mark.parametrize("text, longest", [("aa bb cc dd ee ff gg hh", 6), ("x" * 100, 7)])
def test_a_segment_that_does_not_fit_is_split_at_spaces_or_anywhere_in_a_huge_word(text, longest):
    pieces = cut(text, num_reads=reads_of(longest))
    assert max(map(len, pieces)) <= longest
    assert (" " if " " in text else "").join(pieces) == text


HOSTILE = [*'("[😀$a!. \n', "(.a", "你好。", "(" * 16 + " ", "[1].", "a ", "мир! Hi. "]


@pytest.mark.parametrize("text", HOSTILE)
def test_time_is_linear_in_any_text(text):
    """On runs of brackets, spaCy's own tokenizer needs 25 seconds for 10,000 characters, four times that for 20,000."""
    text, start = (text * 100_000)[:100_000], time.process_time()
    segments = segment_document(text, sentences_per_segment=0.5, num_reads=reads_of(500))
    assert time.process_time() - start < 3
    assert "".join("".join(segment.text.split()) for segment in segments) == "".join(text.split())


def test_time_is_linear_in_scripts_without_spaces():
    start = time.process_time()
    assert cut("你好。" * 90_000, spacy_model="zh") == ["你好。"] * 90_000
    assert time.process_time() - start < 3


def test_a_sentence_ends_after_a_very_long_word():
    word = "https://" + "example.com/!?" * 20
    assert cut(f"See {word}page. It is long! Yes.") == [f"See {word}page.", "It is long!", "Yes."]


def test_spacy_forgets_the_words_of_others(monkeypatch):
    nlp, most_words = segmentation_arcaligner._load_spacy("en")
    monkeypatch.setattr(segmentation_arcaligner, "_MAX_NEW_WORDS", 100)
    segmentation_arcaligner._load_spacy.cache_clear()
    for start in range(0, 200, 50):
        assert len(cut(" ".join(f"new{number}." for number in range(start, start + 50)))) == 50
        assert len(segmentation_arcaligner._load_spacy("en")[0].vocab.strings) < most_words
    segmentation_arcaligner._load_spacy.cache_clear()


@pytest.mark.parametrize("sentences", [0, -1, 0.25, 1.5])
def test_impossible_numbers_of_sentences_are_refused(sentences):
    with pytest.raises(ValueError, match=rf"`sentences_per_segment` is {sentences}; expected 0.5"):
        segment_document("One.", sentences_per_segment=sentences)


@settings(max_examples=150, deadline=None)
@given(text=documents, sentences=st.sampled_from([0.5, 1, 2, 3]), longest=st.integers(1, 30))
def test_segments_keep_order_and_offsets_and_lose_only_white_space(text, sentences, longest):
    segments = segment_document(text, sentences_per_segment=sentences, num_reads=reads_of(longest))
    ends = [0]
    for segment in segments:
        assert text[segment.start : segment.end] == segment.text
        assert segment.text.strip() and len(segment.text) <= longest
        assert not text[ends[-1] : segment.start].strip()
        ends.append(segment.end)
    assert not text[ends[-1] :].strip()


@pytest.mark.parametrize("max_slots", [0, -1, 1.5, "3", True, float("nan")])
def test_a_maximum_that_holds_no_slot_is_refused(max_slots):
    with pytest.raises(ValueError, match=r"`max_slots` is .*expected a whole number of at least 1"):
        check_max_slots(max_slots)
