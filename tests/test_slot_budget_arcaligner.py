"""At most so many slots: the first segments, or neighbours in one; nothing twice, nothing out of order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcaligner.segmentation_arcaligner import Segment, fit_segments, segment_document

TEXTS = ["One is here. Two goes there! Is three next? Four ends it.", "Five. Six is the last one."]
texts_of_documents = st.lists(st.text(st.sampled_from("ab .!?\n\u2028é漢"), max_size=60), max_size=4)


def segments_of(texts: list[str]) -> list[Segment]:
    return [segment for number, text in enumerate(texts) for segment in segment_document(text, number)]


def cut(max_slots, slot_policy, texts=TEXTS, **options):
    return [s.text for s in fit_segments(segments_of(texts), texts, max_slots, slot_policy, **options).segments]


@pytest.mark.parametrize("slot_policy", ["drop", "merge"])
@pytest.mark.parametrize("max_slots", [None, 6, 7])
def test_segments_within_the_budget_stay_as_they_are(slot_policy, max_slots):
    assert fit_segments(segments_of(TEXTS), TEXTS, max_slots, slot_policy) == (segments_of(TEXTS), 0, [])


def test_drop_keeps_the_first_segments():
    fitted = fit_segments(segments_of(TEXTS), TEXTS, 5, "drop")
    assert fitted == (segments_of(TEXTS)[:5], 0, segments_of(TEXTS)[5:])


def test_merge_joins_the_shortest_neighbours_first():
    assert cut(5, "merge") == ["One is here.", "Two goes there!", "Is three next?", "Four ends it.", TEXTS[1]]
    assert cut(3, "merge") == ["One is here. Two goes there!", "Is three next? Four ends it.", TEXTS[1]]


def test_merge_never_joins_documents_and_drops_the_last_ones():
    fitted = fit_segments(segments_of(TEXTS), TEXTS, 1, "merge")
    assert fitted == ([Segment(0, 0, len(TEXTS[0]), TEXTS[0])], 4, segments_of(TEXTS)[4:])


def test_merge_stops_where_the_encoder_does():
    """What no slot could be read whole with is dropped, and not cut behind the caller's back."""
    longest = len("One is here. Two goes there!")
    fitted = fit_segments(segments_of(TEXTS), TEXTS, 2, "merge", num_reads=lambda text: -(-len(text) // longest))
    assert [s.text for s in fitted.segments] == ["One is here. Two goes there!", "Is three next? Four ends it."]
    assert fitted.num_merged == 4 and [s.text for s in fitted.dropped] == ["Five.", "Six is the last one."]


@settings(max_examples=200, deadline=None)
@given(
    texts=texts_of_documents,
    max_slots=st.integers(1, 9),
    slot_policy=st.sampled_from(["drop", "merge"]),
    longest=st.integers(5, 80),
)
def test_no_more_slots_than_the_budget_each_character_once_and_in_order(texts, max_slots, slot_policy, longest):
    def num_reads(text):
        return -(-len(text) // longest)

    segments = segments_of(texts)
    fitted = fit_segments(segments, texts, max_slots, slot_policy, num_reads)
    assert len(fitted.segments) <= max_slots
    assert len(fitted.segments) == min(len(segments), max_slots) or slot_policy == "merge"
    num_kept = len(segments) - len(fitted.dropped)
    assert segments[num_kept:] == fitted.dropped
    left = segments[:num_kept]
    num_merged = 0
    for slot in fitted.segments:  # each is a run of the segments that come next, and these are all
        assert texts[slot.document][slot.start : slot.end] == slot.text
        run = [s for s in left if s.document == slot.document and s.start >= slot.start and s.end <= slot.end]
        assert run == left[: len(run)] and (run[0].start, run[-1].end) == (slot.start, slot.end)
        assert len(run) == 1 or num_reads(slot.text) == 1
        num_merged += len(run) if len(run) > 1 else 0
        left = left[len(run) :]
    assert not left and num_merged == fitted.num_merged


@settings(max_examples=100, deadline=None)
@given(texts=texts_of_documents, max_slots=st.integers(1, 9))
def test_merge_drops_only_when_documents_outnumber_slots(texts, max_slots):
    segments = segments_of(texts)
    fitted = fit_segments(segments, texts, max_slots, "merge")
    assert bool(fitted.dropped) == (len({segment.document for segment in segments}) > max_slots)


@pytest.mark.parametrize("max_slots", [0, -1, 1.5, "3", True, float("nan")])
def test_a_budget_that_holds_no_slot_is_refused(max_slots):
    with pytest.raises(ValueError, match=r"`max_slots` is .*expected a whole number of at least 1"):
        fit_segments([], [], max_slots)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="`slot_policy` is 'squeeze'; expected one of drop, merge"):
        fit_segments([], [], 3, "squeeze")
