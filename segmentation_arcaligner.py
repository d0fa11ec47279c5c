"""Passages to segments, the units that become one slot each: sentences, halves of them, or several merged.

spaCy finds the sentences. Offsets always count characters of the document's text, so an answer can be traced back to
it.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

# spaCy refuses longer texts by default; its rule-based sentence splitter needs little memory for each character.
_MAX_SPACY_CHARACTERS = 100_000_000


@dataclass(frozen=True)
class Segment:
    """Characters `start` to `end` of the text of document number `document`, as `text`."""

    document: int
    start: int
    end: int
    text: str


def equal_runs(num_tokens: int, tokens_per_slot: int | str) -> list[tuple[int, int]]:
    """Cuts a segment's tokens into equal runs of about `tokens_per_slot`, one run for `"segment"` and at least one.

    >>> equal_runs(10, 4), equal_runs(2, 4), equal_runs(10, "segment")
    ([(0, 3), (3, 6), (6, 10)], [(0, 2)], [(0, 10)])
    """
    count = 1 if tokens_per_slot == "segment" else max(1, (2 * num_tokens + tokens_per_slot) // (2 * tokens_per_slot))
    bounds = [number * num_tokens // count for number in range(count + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def check_tokens_per_slot(tokens_per_slot: int | str) -> None:
    """Raises `ValueError` unless it is `"segment"` or a whole number of at least 1."""
    is_number = isinstance(tokens_per_slot, int) and not isinstance(tokens_per_slot, bool)
    if tokens_per_slot != "segment" and not (is_number and tokens_per_slot >= 1):
        raise ValueError(
            f'`tokens_per_slot` is {tokens_per_slot!r}; expected a whole number of tokens of at least 1, or "segment" '
            "for one slot per segment."
        )


@functools.lru_cache(maxsize=4)
def _load_spacy(spacy_model: str):
    try:
        spacy = importlib.import_module("spacy")
    except ImportError as error:
        raise ImportError(
            "Passages are split into sentences by spaCy, which is not installed: `pip install spacy`. Or pass "
            "precomputed `context_embeds`, which need no splitting."
        ) from error
    if len(spacy_model) <= 3:  # a language code
        nlp = spacy.blank(spacy_model)
        nlp.add_pipe("sentencizer")
    else:
        nlp = spacy.load(spacy_model)
    nlp.max_length = _MAX_SPACY_CHARACTERS
    return nlp


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    """`start` and `end` moved inwards over white space; equal when nothing else is there."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


def _sentences(text: str, spacy_model: str) -> list[tuple[int, int]]:
    spans = [_strip(text, s.start_char, s.end_char) for s in _load_spacy(spacy_model)(text).sents]
    return [(start, end) for start, end in spans if start < end]


def _halves(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Two halves, cut at the white space nearest to the middle; one piece when it has none."""
    middle = (start + end) // 2
    spaces = [i for i in range(start + 1, end - 1) if text[i].isspace()]
    if not spaces:
        return [(start, end)]
    cut = min(spaces, key=lambda i: abs(i - middle))
    return [_strip(text, start, cut), _strip(text, cut, end)]


def _fitting_pieces(text: str, start: int, end: int, fits: Callable[[str], bool]) -> list[tuple[int, int]]:
    """Pieces the encoder reads whole: cut in two at a space (or anywhere in one long word) until each fits."""
    if end - start <= 1 or fits(text[start:end]):
        return [(start, end)]
    pieces = _halves(text, start, end)
    if len(pieces) == 1:
        middle = (start + end) // 2
        pieces = [(start, middle), (middle, end)]
    return [small for piece in pieces for small in _fitting_pieces(text, *piece, fits)]


def check_sentences_per_segment(sentences_per_segment: int | float) -> None:
    """Raises `ValueError` unless it is 0.5 or a whole number of at least 1."""
    whole = float(sentences_per_segment).is_integer() and sentences_per_segment >= 1
    if sentences_per_segment != 0.5 and not whole:
        raise ValueError(
            f"`sentences_per_segment` is {sentences_per_segment}; expected 0.5 (half sentences, the paper's 12x), 1 "
            "(sentences, 24x) or a whole number of sentences to merge (3: 72x)."
        )


def segment_document(
    text: str,
    document: int = 0,
    *,
    sentences_per_segment: int | float = 1,
    spacy_model: str = "en",
    fits: Callable[[str], bool] = lambda text: True,
) -> list[Segment]:
    """Cuts a document into segments.

    Args:
        text (`str`): The document. White space between segments belongs to none.
        document (`int`): Its number, kept in the segments.
        sentences_per_segment (`int` or `float`): 0.5 for half sentences, 1 for sentences, n to merge n of them.
        spacy_model (`str`): A language code (rule-based sentences) or the name of an installed spaCy pipeline.
        fits (`Callable`): Whether the encoder reads a text whole; what does not fit is split further.

    Returns:
        `list[Segment]`: In order, without overlap; empty for a document of white space.

    >>> [s.text for s in segment_document("One. Two!  Three?")]
    ['One.', 'Two!', 'Three?']
    """
    check_sentences_per_segment(sentences_per_segment)
    spans = _sentences(text, spacy_model)
    if sentences_per_segment == 0.5:
        spans = [half for span in spans for half in _halves(text, *span)]
    elif sentences_per_segment > 1:
        size = int(sentences_per_segment)
        spans = [(spans[i][0], spans[min(i + size, len(spans)) - 1][1]) for i in range(0, len(spans), size)]
    pieces = [piece for span in spans for piece in _fitting_pieces(text, *span, fits)]
    return [Segment(document, start, end, text[start:end]) for start, end in pieces]


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
