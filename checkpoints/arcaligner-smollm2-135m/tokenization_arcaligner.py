"""Input texts: remove invisible characters from documents, treat control tokens in documents as text, check
messages."""

import functools
import html
import html.entities
import itertools
import re
import reprlib
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple


# Inputs
def check_text(text: str, subject: str) -> None:
    """Raise `ValueError` for text that is not valid Unicode, such as a command-line argument in a wrong encoding. The
    message begins with `subject`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{subject} is not valid Unicode: its character {error.start} is {text[error.start]!a}. Decode the text "
            "with the encoding that it was written in."
        ) from error


def check_question(question) -> None:
    """Raise `ValueError` unless the question is a text that is not empty."""
    if not isinstance(question, str):
        raise ValueError(f"A question is of type {type(question).__name__}; expected a string.")
    check_text(question, "The question")
    if not question.strip():
        raise ValueError("The question is empty; expected a string with text.")


def check_conversation(conversation: Any) -> None:
    """Raise `ValueError` unless `conversation` is a list of messages, or a list of such lists."""
    messages = getattr(conversation, "messages", conversation)  # an attribute of transformers' `Chat`
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"A conversation is {messages!r}; expected a list with at least one message.")
    if any(isinstance(message, list | tuple) for message in messages):
        for several in messages:
            check_conversation(several)
        return
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'A message is {message!r}; expected {{"role": str, "content": str}}.')


def with_plain_texts(conversation: Sequence) -> list:
    """The conversation, or each of several, with each message's parts joined to one text. A content of `None` stays in
    a message with tool calls.

    Raises:
        `ValueError`: as [`check_conversation`], or a content that is not text.
    """
    check_conversation(conversation)
    if isinstance(conversation[0], dict):
        return _with_plain_texts(conversation)
    return [_with_plain_texts(getattr(chat, "messages", chat)) for chat in conversation]


def _with_plain_texts(messages: Sequence[dict]) -> list[dict]:
    texts = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list | tuple) and content:
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            is_text = all(isinstance(part, str) for part in parts) and all(part["type"] == "text" for part in content)
            content = "".join(parts) if is_text else content
        if isinstance(content, str):
            check_text(content, f"The content of a message with the role {message['role']!r}")
        elif content is not None or not message.get("tool_calls"):
            raise ValueError(
                f"The content of a message with the role {message['role']!r} is {reprlib.repr(content)}; expected a "
                'string or [{"type": "text", "text": str}].'
            )
        texts.append({**message, "content": content})
    return texts


def has_empty_message(conversation: Sequence) -> bool:
    """Whether a message of the conversation, or of one of several, is empty."""
    return any(
        has_empty_message(message) if isinstance(message, list) else message["content"] == ""
        for message in conversation
    )


# Text as people see it. Files from the web, from PDFs and from programs contain invisible characters. A word that
# contains one has other tokens, and an answer that copies the word is wrong.
_SPACES = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u2800\u3000\u3164\uffa0"  # of other widths, or without a break
_BREAKS = "\x0b\x0c\x1c-\x1e\x85\u2028\u2029"  # of lines, pages and records
_UNSEEN = (
    "\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f"  # control characters
    "\u00ad\u034f\u17b4\u17b5\u180b-\u180f\u200b\u2060-\u2065\ufeff"  # soft hyphens, widths of zero
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # directions
    "\ufff0-\ufffc\ufffe\uffff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # tags, variants
)
# Forms of letters that only fonts have, styles of mathematics, radicals that look like characters.
_LIGATURES = "\u0132\u0133\u0149\ufb00-\ufb17\ufb50-\ufdff\ufe70-\ufefc"
_LIGATURES += "\u210e\U0001d400-\U0001d7ff\u2e9f\u2ef3\u2f00-\u2fd5"
# Joiners and non-joiners are visible between letters of these scripts, as in Persian, Hindi and emoji.
_JOINED = "\u0590-\u109f\u1780-\u18af\u2190-\u2bff\ufb1d-\ufdff\ufe0f\ufe70-\ufefc\U0001f000-\U0001faff"

_ODD = re.compile(
    r"(?P<escape>\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))|[^\n]\x08)"  # colors; letters struck over
    r"|(?P<parted>\u00ad[ \t]*\r?\n[ \t]*)"  # a soft hyphen at the end of a line, inside of a word
    # A word that is hyphenated at the end of a line. Its first half is searched backwards, once the rest matches.
    r"|(?P<hyphen>(?<=[^\W\d_])[-\u2010][ \t]*\r?\n[ \t]*(?=[^\W\d_A-Z]))"
    r"|(?P<dash>[\u2010\u2011])"  # a hyphen, or one without a break
    r"|(?P<line>\r\n?|[" + _BREAKS + r"])"
    r"|(?P<space>[" + _SPACES + r"])"
    r"|(?P<unseen>[" + _UNSEEN + r"]+|(?<![" + _JOINED + r"])[\u200c\u200d]|[\u200c\u200d](?![" + _JOINED + r"])"
    r"|(?<![0-9#*" + _JOINED + r"])[\ufe00-\ufe0f])"  # selectors of the form of a sign
    r"|(?P<letters>[" + _LIGATURES + r"])"
    # `&lt;` and `&gt;` stay: a text with them may be about markup. So does `&amp;nbsp;`, which shows how to write one.
    r"|(?P<entity>&(?!(?:lt|gt|amp);)(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});"
    r"|&amp;(?!#?[a-zA-Z0-9]{2,32};))"
)
# Any text that has to change contains one of these; a search for them takes a tenth of the time of `_ODD`.
_MAY_BE_ODD = re.compile(
    r"[&\r\u200c\u200d\u2010\u2011\ufe00-\ufe0f" + _BREAKS + _SPACES + _UNSEEN + _LIGATURES + r"]|[-\u2010][ \t]*\r?\n"
)


_SEEN_AS = {"line": "\n", "space": " ", "dash": "-"}


class _Edits(NamedTuple):
    """The replaced pieces of a text, in order, each with its place in the new and in the old text."""

    new_starts: list[int]
    new_ends: list[int]
    old_starts: list[int]
    old_ends: list[int]

    def old_index(self, index: int, at_end: bool) -> int:
        """Where a character of the new text begins, or ends, in the old one."""
        number = bisect_right(self.new_starts, index) - 1
        if number < 0:
            return index + at_end
        if index < self.new_ends[number]:
            return (self.old_ends if at_end else self.old_starts)[number]
        return self.old_ends[number] + index - self.new_ends[number] + at_end

    def new_index(self, index: int) -> int:
        """The place in the new text of a character of the old one or, if it was deleted, of the next one."""
        number = bisect_right(self.old_starts, index) - 1
        if number < 0:
            return index
        if index < self.old_ends[number]:
            return self.new_starts[number]
        return self.new_ends[number] + index - self.old_ends[number]


class ReadableText(NamedTuple):
    """A text as people see it. `to_original` and `from_original` map between its characters and those of the given
    text."""

    text: str
    edits: tuple[_Edits, ...] = ()  # none if the text did not change

    def to_original(self, start: int, end: int) -> tuple[int, int]:
        """The first and end character in the given text of the characters `start` to `end` of this text."""
        last = end - 1
        for edits in reversed(self.edits):
            start, last = edits.old_index(start, at_end=False), edits.old_index(last, at_end=True) - 1
        return start, max(start, last + 1)

    def from_original(self, index: int) -> int:
        """The place in this text that corresponds to a place in the given text."""
        for edits in self.edits:
            index = edits.new_index(index)
        return index


def readable(text: str) -> ReadableText:
    r"""
    A text as people see it: without soft hyphens, zero-width characters and control characters; with plain spaces and
    line breaks; with letters for ligatures, decomposed accents and left-over HTML entities; with hyphenated words
    joined across line ends. A text that needs no change is returned unchanged.

    >>> seen = readable("The o\ufb03ce &amp; Inter\u00adnational law")
    >>> seen.text, seen.to_original(13, 26)
    ('The office & International law', (15, 29))
    """
    passes = []
    while edits := [*(_odd_edits(text) or _form_edits(text))]:
        text, applied = _edited(text, edits)
        passes.append(applied)
    return ReadableText(text, tuple(passes))


def _odd_edits(text: str) -> list[tuple[int, int, str]]:
    """Spans of a text that people see as another text: start, end and the text that they see."""
    edits: list[tuple[int, int, str]] = []
    if not _MAY_BE_ODD.search(text):
        return edits
    compounds: set[str] | None = None  # words with hyphens, collected on first use
    for match in _ODD.finditer(text):
        kind, seen = match.lastgroup, ""
        if kind == "hyphen":
            compounds = set(_COMPOUND.findall(text)) if compounds is None else compounds
            seen = _seen_hyphen(text, *match.span(), compounds)
        elif kind in _SEEN_AS:
            seen = _SEEN_AS[kind]
        elif kind == "letters":
            seen = unicodedata.normalize("NFKC", match[0])
        elif kind == "entity":
            seen = _seen_entity(match[0])
        if seen != match[0]:
            edits.append((*match.span(), seen))
    return edits


_WORD, _LONGEST_WORD = r"[^\W\d_]+", 64
_COMPOUND = re.compile(rf"(?<![^\W\d_]){_WORD}+(?:-{_WORD}+)+")
_WORD_BEFORE, _WORD_AFTER = re.compile(rf"{_WORD}(?:-{_WORD})*$"), re.compile(_WORD)


def _seen_hyphen(text: str, start: int, end: int, compounds: Set[str]) -> str:
    """The text between the halves of a word that is divided from `start` to `end`: a hyphen if the text also has the
    word with one on a single line, else nothing."""
    if not text[end].islower():
        return text[start:end].replace("\r", "")
    before = _WORD_BEFORE.search(text, max(0, start - _LONGEST_WORD), start)[0]
    after = _WORD_AFTER.match(text, end, end + _LONGEST_WORD)[0]
    return "-" if "-" in before or f"{before}-{after}" in compounds else ""


def _seen_entity(entity: str) -> str:
    """The character of an HTML entity; the entity itself if there is none, or if it is markup."""
    seen = html.unescape(entity) if entity[1] == "#" else html.entities.html5.get(entity[1:], entity)
    return entity if seen in ("<", ">") else seen


# Characters that may combine with the letter before them, and that letter: marks, the parts of a Korean syllable.
_MARKED = re.compile(r"[\s\S]?[^\x00-\u02ff]+")


def _form_edits(text: str) -> Iterable[tuple[int, int, str]]:
    """Letters written as several characters that also exist as one (Unicode's form NFC)."""
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return
    for match in _MARKED.finditer(text):
        index = match.start()
        for _, characters in itertools.groupby(_letters(match[0]), key=lambda pair: pair[0]):
            letter = "".join(character for _, character in characters)
            if (seen := unicodedata.normalize("NFC", letter)) != letter:
                yield index, index + len(letter), seen
            index += len(letter)


def _letters(text: str) -> Iterable[tuple[int, str]]:
    """Characters, each with the number of the letter that it is part of."""
    number = 0
    for character in text:
        number += not (unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff")
        yield number, character


def _edited(text: str, edits: Sequence[tuple[int, int, str]]) -> tuple[str, _Edits]:
    parts, applied, done, length = [], _Edits([], [], [], []), 0, 0
    for start, end, seen in edits:
        parts += [text[done:start], seen]
        length += start - done
        applied.new_starts.append(length)
        length += len(seen)
        applied.new_ends.append(length)
        applied.old_starts.append(start)
        applied.old_ends.append(end)
        done = end
    return "".join([*parts, text[done:]]), applied


# Documents: strings, or dictionaries with a title and a text
def title_of(document) -> str | None:
    """The `readable` title of a document, if it has one. Raises `ValueError` for a title that is not a text."""
    title = document.get("title") if isinstance(document, dict) else None
    if title is not None and not isinstance(title, str):
        beginning = f"The title of the document that begins with {str(document.get('text'))[:40]!r}"
        raise ValueError(f"{beginning} is of type {type(title).__name__}; expected a string or None.")
    check_text(title or "", "A title")
    return title and readable(title).text


def text_of(document, number: int) -> str:
    """The `readable` text of document `number`. Raises `ValueError` if it has none."""
    return readable(original_text(document, number)).text


def original_text(document, number: int) -> str:
    """The unchanged text of document `number`. Raises `ValueError` if it has none."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        kind = type(document).__name__
        if isinstance(document, dict):
            kind += f" with the keys {[*document][:9]} and a `text` of type {type(text).__name__}"
        raise ValueError(f'Document {number} is of type {kind}; expected a string or {{"title": str, "text": str}}.')
    check_text(text, f"Document {number}")
    return text


# Control tokens in users' texts. Private-use characters surround each of them, so that it passes through a chat
# template and differs from those that the template writes.
_START, _END = "\ue0c0", "\ue0c1"


@functools.lru_cache
def _token_patterns(tokens: tuple[str, ...]) -> tuple[re.Pattern, re.Pattern]:
    """Patterns for any of `tokens`, the longest first, and for marked tokens or a mark without a token."""
    plain = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"  # (?!) never matches
    return re.compile(plain), re.compile(f"{_START}({plain}){_END}|[{_START}{_END}]")


def mark_tokens(value, tokens: tuple[str, ...]):
    """Texts, also in dictionaries and lists, with the `tokens` in them marked. Existing marks are removed."""
    if isinstance(value, str):
        unmarked = value.replace(_START, "").replace(_END, "")
        return _token_patterns(tokens)[0].sub(f"{_START}\\g<0>{_END}", unmarked)
    if isinstance(value, dict):
        return {key: mark_tokens(field, tokens) for key, field in value.items()}
    return [mark_tokens(text, tokens) for text in value] if isinstance(value, list | tuple) else value


def mark_control_tokens(tokenizer, text):
    """Texts or messages with control tokens marked, so that `encode_marked` treats them as text: special tokens, and
    added ones that the chat template writes. What a template writes without a token, such as Llama 2's `[INST]`, stays
    unmarked."""
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.values()
    of_template = (token.content for token in added if token.content.strip() and token.content in template)
    special = (token.content for token in added if token.special)
    return mark_tokens(text, tuple(dict.fromkeys((*special, *of_template))))


def control_token_ids(tokenizer) -> set[int]:
    """Ids of tokens that a document's characters never become: special tokens, and tokens that were added to a
    tokenizer beyond its vocabulary. The added ones are slots, or unknown to the model."""
    size = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special or number >= size}


def encode_marked(tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts without special tokens. Tokens that `mark_tokens` marked become ids of plain text. Raises
    `ValueError` if the tokenizer makes a control token of plain characters."""
    if not texts:  # no tokenizer takes an empty batch
        return []
    pattern = _token_patterns(tuple(tokenizer.added_tokens_encoder))[1]
    spans = [pattern.split(text) for text in texts]  # of each text: text, marked token, text, ...
    encode = functools.partial(
        tokenizer, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
    )
    rows = encode([first for first, *_ in spans])["input_ids"]
    return [
        _with_marked(tokenizer, ids, others) if others else ids for ids, (_, *others) in zip(rows, spans, strict=True)
    ]


def _with_marked(tokenizer, ids: list[int], spans: Sequence[str | None]) -> list[int]:
    """Ids of a text: `ids` of its beginning, then those of `spans`, in turn a marked token and the text after it."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    newline, ids = encode("\n"), list(ids)
    for number, span in enumerate(spans, start=1):
        if not span:  # `None` is a mark without a token
            continue
        is_marked = number % 2 == 1
        encode_span = functools.partial(_encode_as_text, tokenizer) if is_marked else encode
        # After a newline, because some tokenizers add a space at the beginning of a text.
        span_ids = encode_span("\n" + span)
        span_ids = span_ids[len(newline) :] if span_ids[: len(newline)] == newline else encode_span(span)
        if is_marked and tokenizer.convert_tokens_to_ids(span) in span_ids:
            raise ValueError(
                f"The tokenizer turns {span!r} into a control token even in plain text. Remove {span!r} from the "
                "question and the documents."
            )
        ids += span_ids
    return ids


def _encode_as_text(tokenizer, text: str) -> list[int]:
    """Ids of a text in which nothing is a control token. `split_special_tokens` would change the tokenizer, which other
    threads may be using."""
    backend = tokenizer.backend_tokenizer
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    words = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return [token.id for word, _ in words for token in backend.model.tokenize(word)]


def tokenize_with_ends(tokenizer, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """For each text the ids of its tokens, of which none is a control token, and the characters where they end."""
    if not texts:  # no tokenizer takes an empty batch
        return []
    options = {"return_attention_mask": False, "return_token_type_ids": False, "return_offsets_mapping": True}
    batch = tokenizer(list(texts), add_special_tokens=False, **options)
    special, rows = control_token_ids(tokenizer), []
    for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
        ends = [end for _, end in offsets]
        if special.intersection(ids):  # a document's `<|im_end|>` is text
            tokens = [tokenizer.convert_ids_to_tokens(token_id) if token_id in special else None for token_id in ids]
            spans = [  # the ids of plain text for each token
                [token_id] if token is None else encode_marked(tokenizer, [mark_tokens(token, (token,))])[0]
                for token_id, token in zip(ids, tokens, strict=True)
            ]
            ends = [end for end, span in zip(ends, spans, strict=True) for _ in span]
            ids = [token_id for span in spans for token_id in span]
        rows.append((ids, ends))
    return rows
