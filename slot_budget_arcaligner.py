"""At most so many slots a question: which segments share one, and which have none.

"drop"    segments stay as they are; the first ones are kept (documents come best first)
"merge"   neighbours in a document become one segment, none longer than needed and none longer than the encoder
          reads; where even that is not enough, the last ones are dropped
"""

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import NamedTuple

from .segmentation_arcaligner import Segment

SLOT_POLICIES = ("drop", "merge")


class FittedSegments(NamedTuple):
    """Segments within a budget of slots, and what became of those there were before."""

    segments: list[Segment]
    num_merged: int  # share their slot with others
    dropped: list[Segment]  # have no slot


def check_slot_budget(max_slots: int | None, slot_policy: str) -> None:
    """Raises `ValueError` for a budget that holds no slot, or an unknown policy."""
    is_whole = isinstance(max_slots, Integral) and not isinstance(max_slots, bool)
    if max_slots is not None and not (is_whole and max_slots >= 1):
        raise ValueError(
            f"`max_slots` is {max_slots!r}; expected a whole number of at least 1, the most slots of a question, or "
            "None for as many as its passages have segments."
        )
    if slot_policy not in SLOT_POLICIES:
        raise ValueError(f"`slot_policy` is {slot_policy!r}; expected one of {', '.join(SLOT_POLICIES)}.")


def fit_segments(
    segments: Sequence[Segment],
    texts: Sequence[str],
    max_slots: int | None,
    slot_policy: str = "drop",
    fits: Callable[[str], bool] = lambda text: True,
) -> FittedSegments:
    """Drops or merges segments until there are at most `max_slots`.

    Args:
        segments (`Sequence[Segment]`): Of one question's documents, in order.
        texts (`Sequence[str]`): Of these documents.
        max_slots (`int`, *optional*): `None` keeps all.
        slot_policy (`str`, defaults to `"drop"`): Or `"merge"`, see above.
        fits (`Callable`): Whether the encoder reads a text whole.

    >>> segments = [Segment(0, 0, 2, "A."), Segment(0, 3, 5, "B."), Segment(1, 0, 2, "C.")]
    >>> [s.text for s in fit_segments(segments, ["A. B.", "C."], 2, "merge").segments]
    ['A. B.', 'C.']
    """
    check_slot_budget(max_slots, slot_policy)
    if max_slots is None or len(segments) <= max_slots:
        return FittedSegments(list(segments), 0, [])
    if slot_policy == "drop":
        return FittedSegments(list(segments[:max_slots]), 0, list(segments[max_slots:]))
    groups = _shortest_groups(segments, texts, max_slots, fits)
    kept, dropped = groups[:max_slots], groups[max_slots:]
    return FittedSegments(
        segments=[_merged(group, texts) for group in kept],
        num_merged=sum(len(group) for group in kept if len(group) > 1),
        dropped=[segment for group in dropped for segment in group],
    )


def _shortest_groups(segments, texts, max_slots, fits) -> list[list[Segment]]:
    """Neighbours in groups of at most as many characters as it takes for `max_slots` groups, if that can be had."""
    fits_within = functools.cache(lambda document, start, end: fits(texts[document][start:end]))

    def groups_of(longest: int) -> list[list[Segment]]:
        groups = []
        for segment in segments:
            first = groups[-1][0] if groups else None
            joins = first is not None and first.document == segment.document and segment.end - first.start <= longest
            if joins and fits_within(segment.document, first.start, segment.end):
                groups[-1].append(segment)
            else:
                groups.append([segment])
        return groups

    shortest, longest = 1, max(len(text) for text in texts)
    while shortest < longest:
        middle = (shortest + longest) // 2
        if len(groups_of(middle)) <= max_slots:
            longest = middle
        else:
            shortest = middle + 1
    return groups_of(longest)


def _merged(group: list[Segment], texts: Sequence[str]) -> Segment:
    document, start, end = group[0].document, group[0].start, group[-1].end
    return Segment(document, start, end, texts[document][start:end])


__all__ = ["FittedSegments", "check_slot_budget", "fit_segments"]
