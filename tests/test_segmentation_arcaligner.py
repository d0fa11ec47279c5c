"""Passages to segments: nothing is lost, offsets are true, pieces fit the encoder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcaligner.segmentation_arcaligner import Segment, segment_document

TEXT = "One is here. Two goes there!  Is three next? Four ends it."
documents = st.text(st.sampled_from("ab .!?\n\t\u2028\x00é漢😀'\""), max_size=200)


def cut(text, **settings):
    return [segment.text for segment in segment_document(text, **settings)]


def test_sentences_are_segments_with_their_offsets():
    assert segment_document("One. Two!", 3) == [Segment(3, 0, 4, "One."), Segment(3, 5, 9, "Two!")]


def test_half_sentences_are_cut_at_the_space_nearest_to_the_middle():
    assert cut("Aaaa bbbb cccc dddd.", sentences_per_segment=0.5) == ["Aaaa bbbb", "cccc dddd."]


def test_a_sentence_of_one_word_has_no_half():
    assert cut("Stop!", sentences_per_segment=0.5) == ["Stop!"]


def test_n_sentences_are_merged_and_the_rest_is_kept():
    assert cut(TEXT, sentences_per_segment=3) == ["One is here. Two goes there!  Is three next?", "Four ends it."]


@pytest.mark.parametrize("text", ["", "   ", "\n\t\u2028 "])
def test_white_space_has_no_segments(text):
    assert segment_document(text) == []


def test_a_segment_that_does_not_fit_is_split_at_spaces():
    pieces = cut("aa bb cc dd ee ff gg hh", num_reads=lambda text: -(-len(text) // 6))
    assert all(len(piece) <= 6 for piece in pieces)
    assert " ".join(pieces) == "aa bb cc dd ee ff gg hh"


def test_a_huge_word_is_split_anywhere():
    pieces = cut("x" * 100, num_reads=lambda text: -(-len(text) // 7))
    assert "".join(pieces) == "x" * 100
    assert max(map(len, pieces)) <= 7


def test_a_document_of_one_megabyte_is_segmented():
    segments = segment_document("Nine bytes. " * 87_382)
    assert len(segments) == 87_382


@pytest.mark.parametrize("sentences", [0, -1, 0.25, 1.5])
def test_impossible_numbers_of_sentences_are_refused(sentences):
    with pytest.raises(ValueError, match=rf"`sentences_per_segment` is {sentences}; expected 0.5"):
        segment_document("One.", sentences_per_segment=sentences)


@settings(max_examples=150, deadline=None)
@given(text=documents, sentences=st.sampled_from([0.5, 1, 2, 3]), longest=st.integers(1, 30))
def test_segments_keep_order_and_offsets_and_lose_only_white_space(text, sentences, longest):
    segments = segment_document(text, sentences_per_segment=sentences, num_reads=lambda piece: -(-len(piece) // longest))
    ends = [0]
    for segment in segments:
        assert text[segment.start : segment.end] == segment.text
        assert segment.text.strip() and len(segment.text) <= longest
        assert not text[ends[-1] : segment.start].strip()
        ends.append(segment.end)
    assert not text[ends[-1] :].strip()
