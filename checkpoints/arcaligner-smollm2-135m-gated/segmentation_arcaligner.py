"""Passages to segments and their tokens. A segment is a sentence, half of one, or several, and becomes one slot; with
`tokens_per_slot`, a slot is a span of a segment's tokens.

spaCy finds the sentences. Documents are normalized to what people see (`readable`). The `start` and `end` of a segment
count characters of the normalized text; `in_original_text` maps segments to the given text, so that an answer can be
traced back to it.
"""

import functools
import importlib
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from .configuration_arcaligner import is_number, warn_of_rename
from .tokenization_arcaligner import original_text, readable, text_of, title_of, tokenize_with_ends

# spaCy refuses longer texts by default; its rule-based sentence splitter needs little memory for each character.
_MAX_SPACY_CHARACTERS = 100_000_000


@dataclass(frozen=True)
class Segment:
    """Characters `start` to `end` of document number `document`, and their `text`."""

    document: int
    start: int
    end: int
    text: str

    def of_document(self, part: "Segment") -> "Segment":
        """Map this segment of a `part` of a document to a segment of the document."""
        return Segment(part.document, part.start + self.start, part.start + self.end, self.text)


@dataclass(frozen=True)
class SegmentTokens:
    """A segment with its tokens in the backbone's vocabulary and the encoder's input."""

    segment: Segment
    encoder_text: str
    word_ids: tuple[int, ...]
    word_ends: tuple[int, ...]  # the character of the segment's text where each token ends; 0 for those of a title

    @property
    def encoder_start(self) -> int:
        """Where the segment's text begins in the encoder's input."""
        return len(self.encoder_text) - len(self.segment.text)

    def token_spans(self, tokens_per_slot: int | str) -> list[tuple[int, int]]:
        """First and end token of each slot."""
        return equal_spans(len(self.word_ids), tokens_per_slot)

    def span_ends(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Where the slots end that represent these spans of tokens: characters of the encoder's input."""
        return span_ends(self.encoder_start, self.word_ends, spans)

    def slot_segments(self, spans: Sequence[tuple[int, int]]) -> list[Segment]:
        """The part of the segment's text that each slot represents, with its characters in the document; `spans` are
        those of `token_spans` or of `zoomed_spans`."""
        segments, start = [], 0
        for _, last in spans:
            end = self.word_ends[last - 1] if last < len(self.word_ids) else len(self.segment.text)
            text = self.segment.text[start:end]
            segments.append(Segment(self.segment.document, self.segment.start + start, self.segment.start + end, text))
            start = end
        return segments


# Placeholder segment for "no passages": one slot for the empty string.
EMPTY_SEGMENT = SegmentTokens(Segment(0, 0, 0, ""), "", (), ())


def count_slots(num_tokens, tokens_per_slot: int | str):
    """The number of slots of a segment of `num_tokens`, a number or an array of numbers: one for `"segment"`, else the
    quotient, rounded, and at least one.

    >>> count_slots(10, 4), count_slots(2, 4), count_slots(10, "segment")
    (3, 1, 1)
    """
    if tokens_per_slot == "segment":
        return num_tokens * 0 + 1
    quotient = (2 * num_tokens + tokens_per_slot) // (2 * tokens_per_slot)
    return quotient + (quotient < 1)


def equal_spans(num_tokens: int, tokens_per_slot: int | str) -> list[tuple[int, int]]:
    """Cut a segment's tokens into equal spans of about `tokens_per_slot`, one for each slot.

    >>> equal_spans(10, 4), equal_spans(2, 4), equal_spans(10, "segment")
    ([(0, 3), (3, 6), (6, 10)], [(0, 2)], [(0, 10)])
    """
    count = count_slots(num_tokens, tokens_per_slot)
    bounds = [number * num_tokens // count for number in range(count + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def zoomed_spans(
    spans: Sequence[tuple[int, int]], is_zoomed: Sequence[bool], tokens_per_slot: int
) -> list[tuple[int, int]]:
    """Cut the spans that `is_zoomed` marks into spans of about `tokens_per_slot` tokens. Others are unchanged.

    >>> zoomed_spans([(0, 4), (4, 8)], [False, True], 2)
    [(0, 4), (4, 6), (6, 8)]
    """
    cut = []
    for (start, stop), zoomed in zip(spans, is_zoomed, strict=True):
        parts = equal_spans(stop - start, tokens_per_slot) if zoomed else [(0, stop - start)]
        cut += [(start + first, start + last) for first, last in parts]
    return cut


def equal_runs(num_tokens: int, tokens_per_slot: int | str) -> list[tuple[int, int]]:
    """The name of `equal_spans` in version 0.2."""
    warn_of_rename("equal_runs", "equal_spans")
    return equal_spans(num_tokens, tokens_per_slot)


def span_ends(start: int, word_ends: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Where the slots of a segment end, which represent these spans of its tokens: characters of the encoder's text, in
    which the segment begins at `start`."""
    return [start + (word_ends[last - 1] if last else 0) for _, last in spans]


def check_tokens_per_slot(tokens_per_slot: int | str) -> None:
    """Raise `ValueError` unless `tokens_per_slot` is `"segment"` or a whole number of at least 1."""
    is_segment = isinstance(tokens_per_slot, str) and tokens_per_slot == "segment"
    if not is_segment and not (is_number(tokens_per_slot, int) and tokens_per_slot >= 1):
        raise ValueError(
            f'`tokens_per_slot` is {tokens_per_slot!r}; expected a whole number of tokens, at least 1, or "segment" '
            "for one slot per segment, by default a sentence."
        )


def check_slot_settings(max_slots: int | None, tokens_per_slot: int | str | None) -> None:
    """Raise `ValueError` for `max_slots` below 1, or an invalid `tokens_per_slot`; `None` is valid."""
    if max_slots is not None and not (is_number(max_slots, Integral) and max_slots >= 1):
        raise ValueError(f"`max_slots` is {max_slots!r}; expected a whole number of at least 1, or None for no limit.")
    if tokens_per_slot is not None:
        check_tokens_per_slot(tokens_per_slot)


def check_num_tokens(name: str, value) -> None:
    """Raise `ValueError` unless the `value` of the setting `name` is a whole number of at least 1."""
    if not (is_number(value, Integral) and value >= 1):
        raise ValueError(f"`{name}` is {value!r}; expected a whole number of tokens, at least 1.")


def in_original_text(segments: Sequence[Segment], documents: Sequence[str | dict]) -> list[Segment]:
    """Map segments of normalized documents to segments of the given texts."""
    texts = [original_text(document, number) for number, document in enumerate(documents)]
    normalized = list(map(readable, texts))
    mapped = []
    for segment in segments:
        if normalized[segment.document].edits:
            start, end = normalized[segment.document].to_original(segment.start, segment.end)
            segment = Segment(segment.document, start, end, texts[segment.document][start:end])
        mapped.append(segment)
    return mapped


# A word of at least 100 characters or 9 punctuation marks. spaCy's tokenizer takes quadratic time for some of these
# words, such as a long row of "(".
_LONG_WORD = re.compile(r"(?<!\S)(?=\S{100}|(?:\w*[^\w\s]){9})\S+")

_MARKS_AT_THE_END = re.compile(r"[^\w\s]*$")

_SPACE = re.compile(r"\s")

# spaCy's vocabulary only grows; reload the pipeline after this many new entries.
_MAX_NEW_WORDS = 100_000


# A lock for all that is loaded on first use. Without it, a thread could use a package that another thread has not
# imported completely, or a model that is not set up yet and gives other results.
LOADING = threading.RLock()


def _load_spacy(spacy_model: str):
    """spaCy's pipeline, which finds sentences, and the size of its vocabulary at which it is loaded again."""
    with LOADING:
        return _new_spacy(spacy_model)


@functools.lru_cache(maxsize=4)
def _new_spacy(spacy_model: str):
    spacy = importlib.import_module("spacy")  # here, because it takes a second
    if len(spacy_model) <= 3:  # a language code
        nlp = spacy.blank(spacy_model)
        nlp.add_pipe("sentencizer")
        is_punct = spacy.attrs.IS_PUNCT  # the only attribute that the splitter uses; the others would take most time
        nlp.vocab.lex_attr_getters = {is_punct: nlp.vocab.lex_attr_getters[is_punct]}
    else:
        nlp = spacy.load(spacy_model)
    nlp.max_length = _MAX_SPACY_CHARACTERS
    if isinstance(nlp.tokenizer, spacy.tokenizer.Tokenizer):
        nlp.tokenizer.max_cache_size = _MAX_NEW_WORDS  # 10,000 by default; words beyond it are split again each time
        nlp.tokenizer = functools.partial(_tokenize, nlp.tokenizer, spacy.tokens.Doc)
    return nlp, len(nlp.vocab.strings) + _MAX_NEW_WORDS


def _tokenize(tokenizer, doc_class, text: str):
    """As spaCy's `tokenizer`, in linear time. A very long word is not tokenized: it contains no end of a sentence."""
    tokens, done = [], 0  # text, and whether a space follows
    for word in _LONG_WORD.finditer(text):
        tokens += [(token.text, bool(token.whitespace_)) for token in tokenizer(text[done : word.start()])]
        done = _MARKS_AT_THE_END.search(text, word.end() - 10, word.end()).start()
        tokens += [("x" * min(100, done - start), False) for start in range(word.start(), done, 100)]
    rest = tokenizer(text[done:])
    if not tokens:
        return rest
    tokens += [(token.text, bool(token.whitespace_)) for token in rest]
    return doc_class(tokenizer.vocab, *zip(*tokens, strict=True))


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    """`start` and `end` moved inwards over white space; equal if there is nothing else."""
    start = end - len(text[start:end].lstrip())
    return start, start + len(text[start:end].rstrip())


def _sentences(text: str, spacy_model: str) -> list[tuple[int, int]]:
    nlp, max_words = _load_spacy(spacy_model)
    spans = [_strip(text, s.start_char, s.end_char) for s in nlp(text).sents]
    if len(nlp.vocab.strings) > max_words:
        _new_spacy.cache_clear()
    return [(start, end) for start, end in spans if start < end]


def _halves(text: str, start: int, end: int, anywhere: bool = False) -> list[tuple[int, int]]:
    """Two halves, cut at the white space nearest to the middle. Without white space the cut is in the middle if
    `anywhere`, else there is none."""
    middle = (start + end) // 2
    before = _SPACE.search(text[start + 1 : middle][::-1])
    after = _SPACE.search(text, middle, max(middle, end - 1))
    cuts = [middle - 1 - before.start()] if before else []
    cuts += [after.start()] if after else []
    if cuts:
        cut = min(cuts, key=lambda index: abs(index - middle))
        return [_strip(text, start, cut), _strip(text, cut, end)]
    return [(start, middle), (middle, end)] if anywhere and start < middle else [(start, end)]


def fitting_spans(text: str, start: int, end: int, num_parts: Callable[[str], int]) -> list[tuple[int, int]]:
    """Spans that fit into the encoder: cut in two at a space, or anywhere in a long word, until each span fits."""
    spans, count = [(start, end)], num_parts(text[start:end])
    if count <= 1 or end - start <= 1:
        return spans
    for _ in range(1 if count < 5 else (count - 1).bit_length()):  # several cuts together, because each test takes time
        spans = [half for span in spans for half in _halves(text, *span, anywhere=True)]
    return [small for span in spans for small in fitting_spans(text, *span, num_parts)]


def check_sentences_per_segment(sentences_per_segment: int | float) -> None:
    """Raise `ValueError` unless `sentences_per_segment` is 0.5 or a whole number of at least 1."""
    is_whole = float(sentences_per_segment).is_integer() and sentences_per_segment >= 1
    if sentences_per_segment != 0.5 and not is_whole:
        raise ValueError(
            f"`sentences_per_segment` is {sentences_per_segment}; expected 0.5 for half sentences, 1 for sentences, or "
            "a larger whole number for segments of several sentences."
        )


def segment_document(
    text: str,
    document: int = 0,
    *,
    sentences_per_segment: int | float = 1,
    spacy_model: str = "en",
    num_parts: Callable[[str], int] = lambda text: 1,
) -> list[Segment]:
    """Cut a document into segments.

    Args:
        text (`str`): The document. White space between segments belongs to no segment.
        document (`int`): Its number, a field of the segments.
        sentences_per_segment (`int` or `float`): 0.5 for half sentences, 1 for sentences, n to merge n sentences.
        spacy_model (`str`): A language code, for rule-based sentences, or the name of an installed spaCy pipeline.
        num_parts (`Callable`): Returns roughly how many times longer a text is than the encoder's limit. Above 1, the
            text is split.

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
    parts = [part for span in spans for part in fitting_spans(text, *span, num_parts)]
    return [Segment(document, start, end, text[start:end]) for start, end in parts]


def segment_documents(
    documents: Sequence[str | dict],
    *,
    sentences_per_segment: int | float,
    spacy_model: str,
    num_parts: Callable[[str], int],
) -> list[Segment]:
    """The segments of one question's documents, in order; see [`segment_document`]. Their `start` and `end` count
    characters of the normalized text (`text_of`).

    Raises:
        `ValueError`: a document that is neither a string nor `{"title": str, "text": str}`.
    """
    settings = {"sentences_per_segment": sentences_per_segment, "spacy_model": spacy_model, "num_parts": num_parts}
    texts = [text_of(document, number) for number, document in enumerate(documents)]
    return [segment for number, text in enumerate(texts) for segment in segment_document(text, number, **settings)]


# Passages: a long text in parts, measured in tokens of the backbone
class _Gaps:
    """Places where a text may be cut, in order: where the text before each gap ends, and where the text after it
    starts."""

    def __init__(self, ends: Sequence[int], starts: Sequence[int]):
        self.ends, self.starts = ends, starts

    def first(self, lower: int, upper: int) -> int | None:
        """Where the text after the first suitable gap starts: before it, text has to end between `lower` and
        `upper`."""
        number = bisect_left(self.ends, lower)
        return self.starts[number] if number < len(self.ends) and self.ends[number] <= upper else None

    def last(self, lower: int, upper: int) -> int | None:
        """As `first`, for the last suitable gap."""
        number = bisect_right(self.ends, upper) - 1
        return self.starts[number] if number >= 0 and self.ends[number] >= lower else None


_PARAGRAPH, _LINE_END, _SPACES, _NO_SPACE = (
    re.compile(expression) for expression in (r"\s*\n[^\S\n]*\n\s*", r"\s*\n\s*", r"\s+", r"\S")
)


def _gaps(pattern: re.Pattern, text: str, start: int, end: int) -> _Gaps:
    spans = [match.span() for match in pattern.finditer(text, start, end)]
    return _Gaps([before for before, _ in spans], [after for _, after in spans])


def cut_text(
    text: str, tokenizer, passage_tokens: int, *, spacy_model: str = "en", sections: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """
    Cut a text into passages of nearly the same size, in any script, with spaces or without.

    A passage ends before the first section that begins after it is half full. Without such a section, a passage that
    would become too long ends before its last paragraph, if it is half full by then, else before its last sentence. A
    sentence that is too long for a passage is cut before a line, before a word or between two tokens.

    Args:
        text (`str`): A normalized text (`readable`).
        tokenizer (`PreTrainedTokenizerFast`): The backbone's.
        passage_tokens (`int`): Maximum number of tokens of a passage, without white space at its ends.
        spacy_model (`str`): As in [`segment_document`].
        sections (`Sequence[int]`): The characters where sections begin, in order.

    Returns:
        `list[tuple[int, int]]`: First and end character of each passage. Together they contain the whole text.
    """
    ((_, ends),) = tokenize_with_ends(tokenizer, [text])
    if len(ends) <= passage_tokens and not sections:
        return [(0, len(text))]
    sentences = _sentences(text, spacy_model)
    sentence_gaps = _Gaps([end for _, end in sentences[:-1]], [start for start, _ in sentences[1:]])
    paragraphs = _gaps(_PARAGRAPH, text, 0, len(text))
    stop = len(text.rstrip())
    starts = sorted({_next_character(text, start, stop) for start in sections})
    section_gaps = _Gaps([_end_before(text, start) for start in starts], starts)
    passages, start = [], 0
    while True:
        first = bisect_right(ends, _next_character(text, start, stop))  # the passage's first token
        if first == len(ends):  # the rest has no tokens
            return [*passages, (start, len(text))]
        limit = _end_of_tokens(ends, first, passage_tokens)
        half = _end_of_tokens(ends, first, -(-passage_tokens // 2))
        if stop <= limit:
            cut = section_gaps.first(half, stop)
        else:
            cut = section_gaps.first(half, limit) or paragraphs.last(half, limit)
            if cut is None and (cut := sentence_gaps.last(start + 1, limit)) is not None and cut <= half:
                after = bisect_right(ends, cut)
                if (sentence_gaps.first(cut + 1, stop) or stop) > _end_of_tokens(ends, after, passage_tokens):
                    cut = None  # the next sentence is cut anyway
            for pattern in (_LINE_END, _SPACES):
                cut = cut or _gaps(pattern, text, half, limit + 1).last(half, limit)
            cut = cut or limit
        if cut is None or cut >= stop:
            return [*passages, (start, len(text))]
        passages.append((start, cut))
        start = cut


def _next_character(text: str, start: int, end: int) -> int:
    """The first character from `start` on that is not white space; `end` if there is none."""
    match = _NO_SPACE.search(text, start, end)
    return match.start() if match else end


def _end_before(text: str, start: int) -> int:
    """The end of the text before `start`, without white space."""
    while start and text[start - 1].isspace():
        start -= 1
    return start


def _end_of_tokens(ends: Sequence[int], first: int, count: int) -> int:
    """The end of the last character that lies completely in `count` tokens from `first` on, at least one."""
    last = min(first + count, len(ends)) - 1
    end = ends[last]
    if last + 1 < len(ends) and ends[last + 1] == end:  # a character of several tokens
        fitting = bisect_left(ends, end, first)
        end = ends[fitting - 1] if fitting > first else end
    return end


def cut_long(
    documents: Sequence[str | dict], tokenizer, longest: float, passage_tokens: int, spacy_model: str = "en"
) -> tuple[list[str | dict], list[Segment]]:
    """Cut documents of more than `longest` tokens with [`cut_text`]. Return all passages, and the place of each passage
    in its document."""
    passages, segments = [], []
    for number, document in enumerate(documents):
        text = original_text(document, number)
        spans = [(0, len(text))]
        if len(text.encode()) > longest:  # no token is less than a byte
            normalized = readable(text)
            if len(tokenize_with_ends(tokenizer, [normalized.text])[0][0]) > longest:
                cuts = cut_text(normalized.text, tokenizer, passage_tokens, spacy_model=spacy_model)
                starts = [0, *(normalized.to_original(start, end)[0] for start, end in cuts[1:])]
                spans = list(zip(starts, [*starts[1:], len(text)], strict=True))
        new_segments = [Segment(number, start, end, text[start:end]) for start, end in spans]
        passages += [
            document | {"text": segment.text} if isinstance(document, dict) else segment.text
            for segment in new_segments
        ]
        segments += new_segments
    return passages, segments


def encoder_texts(segments: Sequence[Segment], documents: Sequence[str | dict]) -> list[str]:
    """The encoder's input for each segment: the title, if there is one, and the text. Without the title, the subject of
    a sentence may be unknown."""
    titles = [title_of(document) for document in documents]
    return [f"{titles[s.document]}: {s.text}" if titles[s.document] else s.text for s in segments]


def tokenize_segments(tokenizer, segments: Sequence[Segment], documents: Sequence[str | dict]) -> list[SegmentTokens]:
    """Each segment's tokens in the backbone's vocabulary, as they are in the whole document; no tokens without a
    `tokenizer`. The words of a title belong to the first segment of its document."""
    texts = encoder_texts(segments, documents)
    if tokenizer is None:
        return [SegmentTokens(segment, text, (), ()) for segment, text in zip(segments, texts, strict=True)]
    # A document is tokenized whole, as in a prompt of text: its pieces would have other tokens at their borders.
    numbers = sorted({segment.document for segment in segments})
    tokens = _tokenize_documents(tokenizer, [documents[number] for number in numbers], numbers)
    tokens_of = dict(zip(numbers, tokens, strict=True))
    tokenized = []
    for number, (segment, text) in enumerate(zip(segments, texts, strict=True)):
        ids, ends = tokens_of[segment.document]
        is_first = number == 0 or segments[number - 1].document != segment.document
        start = 0 if is_first else np.searchsorted(ends, segment.start, side="right")
        end = np.searchsorted(ends, segment.end, side="right")
        word_ends = np.clip(ends[start:end] - segment.start, 0, len(segment.text))
        tokenized.append(SegmentTokens(segment, text, tuple(ids[start:end].tolist()), tuple(word_ends.tolist())))
    return tokenized


def _tokenize_documents(
    tokenizer, documents: Sequence[str | dict], numbers: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each document's tokens, title first, and the characters of its text where they end, below 1 for tokens
    of the title. `numbers` are those of the documents, for errors."""
    titles = [f"{title}: " if (title := title_of(document)) else "" for document in documents]
    texts = [text_of(document, number) for document, number in zip(documents, numbers, strict=True)]
    rows = tokenize_with_ends(tokenizer, [title + text for title, text in zip(titles, texts, strict=True)])
    return [
        (np.array(ids, dtype=np.int64), np.array(ends, dtype=np.int64) - len(title))
        for title, (ids, ends) in zip(titles, rows, strict=True)
    ]


def stop_words(spacy_model: str) -> set[str]:
    """The stop words of a spaCy pipeline, in lower case."""
    return _load_spacy(spacy_model)[0].Defaults.stop_words
