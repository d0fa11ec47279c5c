"""Passages to segments and their tokens. A segment is a sentence, half of one, or several, and becomes one slot;
with `tokens_per_slot`, a slot is a run of a segment's tokens.

spaCy finds the sentences. Offsets always count characters of the document's text, so an answer can be traced back to
it. What an answer may copy of texts is here, too.
"""

import bisect
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers.utils import logging

from .base_model_arcaligner import of_texts
from .configuration_arcaligner import check_text, is_number

logger = logging.get_logger(__name__)

# spaCy refuses longer texts by default; its rule-based sentence splitter needs little memory for each character.
_MAX_SPACY_CHARACTERS = 100_000_000


@dataclass(frozen=True)
class Segment:
    """Characters `start` to `end` of the text of document number `document`, as `text`."""

    document: int
    start: int
    end: int
    text: str

    def of_document(self, piece: "Segment") -> "Segment":
        """This segment of a `piece` of a document as a segment of the document."""
        return Segment(piece.document, piece.start + self.start, piece.start + self.end, self.text)


@dataclass(frozen=True)
class SegmentTokens:
    """A segment with its tokens in the backbone's vocabulary and the text that the encoder reads."""

    segment: Segment
    encoder_text: str
    word_ids: tuple[int, ...]
    word_ends: tuple[int, ...]  # the character of the segment's text where each token ends; 0 for those of a title

    @property
    def encoder_start(self) -> int:
        """Where the segment's text begins in what the encoder reads."""
        return len(self.encoder_text) - len(self.segment.text)

    def runs(self, tokens_per_slot: int | str) -> list[tuple[int, int]]:
        """First and end token of each slot."""
        return equal_runs(len(self.word_ids), tokens_per_slot)

    def pieces(self, tokens_per_slot: int | str) -> list[Segment]:
        """The part of the segment's text that each slot stands for, with its characters in the document."""
        pieces, start = [], 0
        for _, last in self.runs(tokens_per_slot):
            end = self.word_ends[last - 1] if last < len(self.word_ids) else len(self.segment.text)
            text = self.segment.text[start:end]
            pieces.append(Segment(self.segment.document, self.segment.start + start, self.segment.start + end, text))
            start = end
        return pieces


# What "no passages" is: one slot that stands for the empty string.
EMPTY_SEGMENT = SegmentTokens(Segment(0, 0, 0, ""), "", (), ())


def equal_runs(num_tokens: int, tokens_per_slot: int | str) -> list[tuple[int, int]]:
    """Cuts a segment's tokens into equal runs of about `tokens_per_slot`, one run for `"segment"` and at least one.

    >>> equal_runs(10, 4), equal_runs(2, 4), equal_runs(10, "segment")
    ([(0, 3), (3, 6), (6, 10)], [(0, 2)], [(0, 10)])
    """
    count = 1 if tokens_per_slot == "segment" else max(1, (2 * num_tokens + tokens_per_slot) // (2 * tokens_per_slot))
    bounds = [number * num_tokens // count for number in range(count + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def run_ends(start: int, word_ends: Sequence[int], tokens_per_slot: int | str) -> list[int]:
    """Where the slots of a segment end: characters of the encoder's text, in which the segment begins at `start`."""
    return [start + (word_ends[last - 1] if last else 0) for _, last in equal_runs(len(word_ends), tokens_per_slot)]


def check_tokens_per_slot(tokens_per_slot: int | str) -> None:
    """Raises `ValueError` unless it is `"segment"` or a whole number of at least 1."""
    is_segment = isinstance(tokens_per_slot, str) and tokens_per_slot == "segment"
    if not is_segment and not (is_number(tokens_per_slot, int) and tokens_per_slot >= 1):
        raise ValueError(
            f'`tokens_per_slot` is {tokens_per_slot!r}; expected a whole number of tokens of at least 1, or "segment" '
            "for one slot per segment."
        )


def documents_of(row, name: str) -> list:
    """The passages of one question as a list; a single passage is wrapped."""
    if isinstance(row, str | dict):
        return [row]
    try:
        if isinstance(row, Mapping | Set):  # whose texts have other names, or no order
            raise TypeError
        return list(row)
    except TypeError as error:
        raise ValueError(f'{name} is {row!r}; expected a list of strings or {{"title": str, "text": str}}.') from error


def title_of(document) -> str | None:
    """The title of a document, if it has one; raises `ValueError` unless it is a text."""
    title = document.get("title") if isinstance(document, dict) else None
    if title is not None and not isinstance(title, str):
        raise ValueError(f"A title is of type {type(title).__name__}; expected a string or none.")
    check_text(title or "", "A title")
    return title


def text_of(document, number: int) -> str:
    """The text of document `number`; raises `ValueError` if it has none."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise ValueError(
            f"Document {number} is of type {type(document).__name__}"
            + (f" with {[*document][:9]}, `text` of type {type(text).__name__}" if isinstance(document, dict) else "")
            + '; expected a string or {"title": str, "text": str}.'
        )
    check_text(text, f"Document {number}")
    return text


# Slots that somebody has computed already


class GivenSlots(NamedTuple):
    """Precomputed slots of one question."""

    context_embeds: torch.FloatTensor  # (num_slots, encoder_hidden_size)
    context_word_ids: torch.LongTensor | None  # (num_slots, max_words), -1 after a slot's tokens
    context_passage_ids: torch.LongTensor | None = None  # (num_slots,); without them all slots are of one passage


def _embeds_of(values, name: str) -> torch.FloatTensor:
    return _dense_tensor_of(values, name).float()


def _ids_of(values, name: str) -> torch.LongTensor:
    """Words or numbers of passages; a float might be another one by rounding."""
    tensor = _dense_tensor_of(values, name)
    ids = tensor.long()
    if tensor.dtype == torch.bool or tensor.is_floating_point() or (ids < -1).any():
        raise ValueError(f"{name} is {tensor.dtype}; expected whole numbers of -1 or more. Pass them as int64.")
    return ids


def _dense_tensor_of(values, name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(np.asarray(values) if isinstance(values, list | tuple) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is of type {type(values).__name__}; expected a tensor of numbers ({error})."
        ) from error
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        raise ValueError(f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}; expected a dense tensor.")
    return tensor


def _rows_of(read: Callable, given, name: str, is_single: bool, num_rows: int) -> list:
    """An entry of `given` for each of `num_rows` questions, converted by `read`."""
    try:
        rows = [given] if is_single or isinstance(given, str | dict) else list(given)
    except TypeError:  # a number, or a tensor without dimensions
        rows = []
    if len(rows) != num_rows:
        raise ValueError(f"Got {num_rows} questions but {len(rows)} entries of {name}; each question needs its own.")
    return [read(row, f"{name} of row {number}") for number, row in enumerate(rows)]


def passages_of_questions(
    documents, context_embeds, context_word_ids, context_passage_ids, is_single: bool, num_rows: int, has_words: bool
) -> list[list] | list[GivenSlots]:
    """For each of `num_rows` questions, its documents or its precomputed slots, which need words if the aligner
    `has_words`.

    Raises:
        `ValueError`: both or neither, values of another kind, or not one entry for each question.
    """
    if (documents is None) == (context_embeds is None):
        found = "no" if documents is None else "both"
        raise ValueError(f"Got {found} `documents` and `context_embeds`; expected one of the two.")
    if context_embeds is None:
        return _rows_of(documents_of, documents, "`documents`", is_single, num_rows)
    embeds = _rows_of(_embeds_of, context_embeds, "`context_embeds`", is_single, num_rows)
    words = passage_ids = [None] * num_rows
    if context_word_ids is not None:
        words = _rows_of(_ids_of, context_word_ids, "`context_word_ids`", is_single, num_rows)
    elif has_words:
        raise ValueError(
            "Got `context_embeds` without `context_word_ids`, which this aligner reads beside them: the tokens of "
            "each slot, (num_slots, max_words), -1 after them."
        )
    if context_passage_ids is not None:
        passage_ids = _rows_of(_ids_of, context_passage_ids, "`context_passage_ids`", is_single, num_rows)
    return [GivenSlots(*given) for given in zip(embeds, words, passage_ids, strict=True)]


# Control tokens in what people write. Characters for private use stand around each, so that a chat template passes them
# on and they can still be told from those that the template writes.
_START, _END = "\ue0c0", "\ue0c1"


@functools.lru_cache
def _token_patterns(tokens: tuple[str, ...]) -> tuple[re.Pattern, re.Pattern]:
    """Finds any of `tokens`, the longest first, and finds them where they are marked, or a mark that is left alone."""
    plain = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"  # (?!) never matches
    return re.compile(plain), re.compile(f"{_START}({plain}){_END}|[{_START}{_END}]")


def mark_tokens(value, tokens: tuple[str, ...]):
    """Texts, also in dictionaries and lists, with the `tokens` in them marked. Marks that they hold already go."""
    if isinstance(value, str):
        unmarked = value.replace(_START, "").replace(_END, "")
        return _token_patterns(tokens)[0].sub(f"{_START}\\g<0>{_END}", unmarked)
    if isinstance(value, dict):
        return {key: mark_tokens(each, tokens) for key, each in value.items()}
    return [mark_tokens(each, tokens) for each in value] if isinstance(value, list | tuple) else value


def mark_control_tokens(tokenizer, text):
    """Texts or messages with control tokens marked, so that `encode_marked` reads them as text: special tokens, and
    added ones that the chat template writes. Marks of a turn that are no tokens, such as Llama 2's `[INST]`, are
    left alone."""
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.values()
    of_template = (token.content for token in added if token.content.strip() and token.content in template)
    special = (token.content for token in added if token.special)
    return mark_tokens(text, tuple(dict.fromkeys((*special, *of_template))))


def encode_marked(tokenizer, text: str) -> list[int]:
    """Ids of a text, with what `mark_tokens` marked as plain text: `ValueError` for a tokenizer that makes a token of
    its characters. No special tokens are added."""
    pieces = _token_patterns(tuple(tokenizer.added_tokens_encoder))[1].split(text)  # text, marked token, text, ...
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    ids = encode(pieces[0])
    newline = encode("\n") if len(pieces) > 1 else []
    for number, piece in enumerate(pieces[1:], start=1):
        if not piece:  # `None` is a mark that was alone
            continue
        is_marked = number % 2 == 1
        read = functools.partial(_encode_as_text, tokenizer) if is_marked else encode
        # After a newline, since some tokenizers add a space at the beginning of a text.
        own_ids = read("\n" + piece)
        own_ids = own_ids[len(newline) :] if own_ids[: len(newline)] == newline else read(piece)
        if is_marked and tokenizer.convert_tokens_to_ids(piece) in own_ids:
            raise ValueError(f"The tokenizer reads {piece!r} as a control token even in plain text. Leave it out.")
        ids += own_ids
    return ids


def _encode_as_text(tokenizer, text: str) -> list[int]:
    """Ids of a text in which nothing is a control token. `split_special_tokens` would change the tokenizer meanwhile,
    which other threads may be using."""
    backend = tokenizer.backend_tokenizer
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    words = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return [token.id for word, _ in words for token in backend.model.tokenize(word)]


# A word of 100 characters or 9 marks. spaCy's tokenizer takes quadratic time on some, such as "((((".
_LONG_WORD = re.compile(r"(?<!\S)(?=\S{100}|(?:\w*[^\w\s]){9})\S+")
_MARKS_AT_THE_END = re.compile(r"[^\w\s]*$")
_SPACE = re.compile(r"\s")
# spaCy never forgets a word. After this number of new ones it is loaded again.
_MAX_NEW_WORDS = 100_000


@functools.lru_cache(maxsize=4)
def _load_spacy(spacy_model: str):
    """The pipeline that finds sentences, and the number of words at which it is loaded again."""
    spacy = importlib.import_module("spacy")  # here, as it takes a second
    if len(spacy_model) <= 3:  # a language code
        nlp = spacy.blank(spacy_model)
        nlp.add_pipe("sentencizer")
        is_punct = spacy.attrs.IS_PUNCT  # all that it reads of a word; computing the rest would take most of the time
        nlp.vocab.lex_attr_getters = {is_punct: nlp.vocab.lex_attr_getters[is_punct]}
    else:
        nlp = spacy.load(spacy_model)
    nlp.max_length = _MAX_SPACY_CHARACTERS
    if isinstance(nlp.tokenizer, spacy.tokenizer.Tokenizer):
        nlp.tokenizer = functools.partial(_tokenize, nlp.tokenizer, spacy.tokens.Doc)
    return nlp, len(nlp.vocab.strings) + _MAX_NEW_WORDS


def _tokenize(tokenizer, doc_class, text: str):
    """As spaCy's `tokenizer`, in linear time: nothing inside of a very long word ends a sentence."""
    tokens, done = [], 0  # text, and whether a space follows
    for word in _LONG_WORD.finditer(text):
        tokens += [(token.text, bool(token.whitespace_)) for token in tokenizer(text[done : word.start()])]
        done = _MARKS_AT_THE_END.search(text, word.end() - 10, word.end()).start()
        tokens += [("x" * min(100, done - start), False) for start in range(word.start(), done, 100)]
    read = tokenizer(text[done:])
    if not tokens:
        return read
    tokens += [(token.text, bool(token.whitespace_)) for token in read]
    return doc_class(tokenizer.vocab, *zip(*tokens, strict=True))


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    """`start` and `end` moved inwards over white space; equal when nothing else is there."""
    start = end - len(text[start:end].lstrip())
    return start, start + len(text[start:end].rstrip())


def _sentences(text: str, spacy_model: str) -> list[tuple[int, int]]:
    nlp, most_words = _load_spacy(spacy_model)
    spans = [_strip(text, s.start_char, s.end_char) for s in nlp(text).sents]
    if len(nlp.vocab.strings) > most_words:
        _load_spacy.cache_clear()
    return [(start, end) for start, end in spans if start < end]


def _halves(text: str, start: int, end: int, anywhere: bool = False) -> list[tuple[int, int]]:
    """Two halves, cut at the white space nearest to the middle; where there is none `anywhere`, or one piece."""
    middle = (start + end) // 2
    before = _SPACE.search(text[start + 1 : middle][::-1])
    after = _SPACE.search(text, middle, max(middle, end - 1))
    cuts = [middle - 1 - before.start()] if before else []
    cuts += [after.start()] if after else []
    if cuts:
        cut = min(cuts, key=lambda place: abs(place - middle))
        return [_strip(text, start, cut), _strip(text, cut, end)]
    return [(start, middle), (middle, end)] if anywhere and start < middle else [(start, end)]


def fitting_pieces(text: str, start: int, end: int, num_reads: Callable[[str], int]) -> list[tuple[int, int]]:
    """Pieces the encoder reads whole: cut in two at a space (or anywhere in one long word) until each fits."""
    pieces, reads = [(start, end)], num_reads(text[start:end])
    if reads <= 1 or end - start <= 1:
        return pieces
    for _ in range(1 if reads < 5 else (reads - 1).bit_length()):  # several cuts at once: to ask takes time
        pieces = [half for piece in pieces for half in _halves(text, *piece, anywhere=True)]
    return [small for piece in pieces for small in fitting_pieces(text, *piece, num_reads)]


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
    num_reads: Callable[[str], int] = lambda text: 1,
) -> list[Segment]:
    """Cuts a document into segments.

    Args:
        text (`str`): The document. White space between segments belongs to none.
        document (`int`): Its number, kept in the segments.
        sentences_per_segment (`int` or `float`): 0.5 for half sentences, 1 for sentences, n to merge n of them.
        spacy_model (`str`): A language code (rule-based sentences) or the name of an installed spaCy pipeline.
        num_reads (`Callable`): Roughly how many times longer a text is than the encoder's limit; above 1, it is split.

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
    pieces = [piece for span in spans for piece in fitting_pieces(text, *span, num_reads)]
    return [Segment(document, start, end, text[start:end]) for start, end in pieces]


def _num_words(text: str) -> int:
    return max(len(text.split()), len(text) // 10)  # the latter of long words, and of text without spaces


def cut_long(
    documents: Sequence[str | dict], longest: float, most: int, spacy_model: str = "en"
) -> tuple[list[str | dict], list[Segment]]:
    """Passages, and what they are of documents: all or, of one with more than `longest` words, pieces of at most `most`
    words, between sentences where one fits."""
    passages, pieces = [], []
    for number, document in enumerate(documents):
        text, starts, size = text_of(document, number), [0], 0
        cut = {"spacy_model": spacy_model, "num_reads": lambda text: -(-_num_words(text) // most)}
        for sentence in segment_document(text, **cut) if _num_words(text) > longest else ():
            size += (num_words := _num_words(sentence.text))
            if size > max(most, num_words):
                starts, size = [*starts, sentence.start], num_words
        ends = [*starts[1:], len(text)]
        own = [Segment(number, start, end, text[start:end]) for start, end in zip(starts, ends, strict=True)]
        passages += [document | {"text": each.text} if isinstance(document, dict) else each.text for each in own]
        pieces += own
    return passages, pieces


def check_max_slots(max_slots: int | None) -> None:
    """Raises `ValueError` for a maximum that holds no slot."""
    if max_slots is not None and not (is_number(max_slots, Integral) and max_slots >= 1):
        raise ValueError(
            f"`max_slots` is {max_slots!r}; expected a whole number of at least 1, the maximum number of slots, or "
            "None for all."
        )


def encoder_texts(segments: Sequence[Segment], documents: Sequence[str | dict]) -> list[str]:
    """What the encoder reads for each segment: the title, if any, which keeps the subject, and the text."""
    titles = [title_of(document) for document in documents]
    return [f"{titles[s.document]}: {s.text}" if titles[s.document] else s.text for s in segments]


def tokenize_segments(tokenizer, segments: Sequence[Segment], documents: Sequence[str | dict]) -> list[SegmentTokens]:
    """Each segment's tokens in the backbone's vocabulary, as the whole document has them. The words of a title
    belong to the first segment of its document."""
    texts = encoder_texts(segments, documents)
    # A document is tokenized whole, as the backbone would read it: at a border its pieces would have other tokens.
    tokens_of = {
        number: _tokenize_document(tokenizer, documents[number], number) for number in {s.document for s in segments}
    }
    tokenized = []
    for number, (segment, text) in enumerate(zip(segments, texts, strict=True)):
        ids, ends = tokens_of[segment.document]
        is_first = number == 0 or segments[number - 1].document != segment.document
        start = 0 if is_first else np.searchsorted(ends, segment.start, side="right")
        end = np.searchsorted(ends, segment.end, side="right")
        word_ends = np.clip(ends[start:end] - segment.start, 0, len(segment.text))
        tokenized.append(SegmentTokens(segment, text, tuple(ids[start:end].tolist()), tuple(word_ends.tolist())))
    return tokenized


def _tokenize_document(tokenizer, document: str | dict, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a document's tokens, title first, and the character of its text where each ends, below 1 in titles."""
    text, title = text_of(document, number), title_of(document)
    title = f"{title}: " if title else ""
    read = tokenizer(title + text, add_special_tokens=False, return_offsets_mapping=True)
    ids, ends = read["input_ids"], [end for _, end in read["offset_mapping"]]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    if special.intersection(ids):  # a document's `<|im_end|>` is text
        tokens = [tokenizer.convert_ids_to_tokens(token_id) if token_id in special else None for token_id in ids]
        read_as_text = [
            [each] if token is None else encode_marked(tokenizer, mark_control_tokens(tokenizer, token))
            for each, token in zip(ids, tokens, strict=True)
        ]
        ends = [end for end, each in zip(ends, read_as_text, strict=True) for _ in each]
        ids = [each for row in read_as_text for each in row]
    return np.array(ids, dtype=np.int64), np.array(ends, dtype=np.int64) - len(title)


def passages_apart(passages: list | GivenSlots) -> dict[int, list | GivenSlots]:
    """Each passage of a question by itself, by its number; those without text are left out, unless all are."""
    if not isinstance(passages, GivenSlots):
        return {number: [each] for number, each in enumerate(passages) if text_of(each, number).strip()} or {0: []}
    embeds, words, ids = passages
    if ids is None:
        return {0: passages}
    numbers, sizes = (each.tolist() for each in ids.unique_consecutive(return_counts=True))
    # As wide as each needs by itself, or it would be another passage beside one with longer slots.
    words = [None] * len(sizes) if words is None else [own[:, (own >= 0).any(dim=0)] for own in words.split(sizes)]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"`context_passage_ids` has runs of {numbers}; expected the slots of a passage to stand together."
        )
    apart = map(GivenSlots, embeds.split(sizes), words)
    return dict(zip(numbers, apart, strict=True))


_COPIED = WeakKeyDictionary()  # of each tokenizer, what is copied of texts
_WORD_START = re.compile(r"(?<![^\W_])[^\W_]|(?<!\S)\S")
_WORD = re.compile(r"\S{1,40}")  # what is looked at of one
# Answers that are as good as copied: else a question that wants "yes" would be answered by a "no" of the text.
YES_NO = ("yes", "no", "Yes", "No")


class CopiedText(NamedTuple):
    """A text, from any of its words on, as the backbone writes it at the beginning of an answer."""

    ids: list[int]
    ends_word: list[bool]  # whether a word ends with the token
    # Of each word, by its first id: its ids by itself, as an answer has no space before it, whether a word ends with
    # each, and where the text's own `ids` go on.
    words: dict[int, list[tuple[list[int], list[bool], int]]]

    def follow(self, written: list[int]) -> tuple[set[int], bool]:
        """The ids that go on with what is `written`, wherever it stands, and whether a word ends there."""
        found, is_end, length = set(), False, len(written)
        for own, own_ends, after in self.words.get(written[0], ()):
            place = after + max(0, length - len(own))
            if own[:length] + self.ids[after:place] == written:
                found.update(own[length : length + 1] or self.ids[place : place + 1])
                is_end |= self.ends_word[place - 1] if place > after else own_ends[length - 1]
        return found, is_end


def copied_texts(tokenizer, documents: Sequence[str | dict], no_answer: str | None = None) -> list[CopiedText]:
    """What an answer may copy of documents, titles included; `YES_NO` and `no_answer` are copied whole."""
    read = [(text_of(document, number), title_of(document)) for number, document in enumerate(documents)]
    texts = [each for text, title in read if text.strip() for each in (text, title) if each]
    found = of_texts(_COPIED, tokenizer, texts, lambda missing: [_copied(tokenizer, text) for text in missing])
    others = [each for each in (*YES_NO, no_answer) if each] if texts else []
    whole = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in others]
    return found + [CopiedText([], [], {ids[0]: [(ids, [*[False] * (len(ids) - 1), True], 0)]}) for ids in whole]


def _copied(tokenizer, text: str) -> CopiedText:
    """No copy begins with a word that holds a control token."""

    def ends_word(ends: Sequence[int]) -> list[bool]:
        pairs = zip(ends, [*ends[1:], len(text) + 1], strict=True)  # equal where a character has several tokens
        return [end < after and not (text[end - 1].isalnum() and text[end : end + 1].isalnum()) for end, after in pairs]

    ids, ends = (each.tolist() for each in _tokenize_document(tokenizer, text, 0))
    copied = CopiedText(ids, ends_word(ends), {})
    starts = [found.start() for found in _WORD_START.finditer(text)]
    words = [_WORD.match(text, start)[0] for start in starts] or [""]  # no tokenizer takes an empty batch
    read = tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    for start, word, own, offsets in zip(starts, words, read["input_ids"], read["offset_mapping"], strict=False):
        if own and not special.intersection(own):
            after = bisect.bisect_right(ends, start + len(word))
            is_start = after and ends[after - 1] == start + len(word)  # else a token crosses the end of the word
            own_ends = ends_word([start + end for _, end in offsets])
            copied.words.setdefault(own[0], []).append((own, own_ends, after if is_start else len(ids)))
    return copied


def copied_next(texts: Sequence[CopiedText], written: list[int], end_ids: Set[int]) -> list[int]:
    """Ids that go on with an answer in the words of `texts`, and, where a word of it is whole, of those that end it."""
    if not written:
        return sorted({first for text in texts for first in text.words})
    found = [text.follow(written) for text in texts]
    return sorted(set().union(*(ids for ids, _ in found), end_ids if any(is_end for _, is_end in found) else ()))


def stop_words(spacy_model: str) -> set[str]:
    """Words that say little by themselves, in lower case."""
    return _load_spacy(spacy_model)[0].Defaults.stop_words
