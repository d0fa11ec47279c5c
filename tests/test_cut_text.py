"""A long text of any script is cut into passages of a similar number of tokens, at ends of sentences or lines."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arcaligner.segmentation_arcaligner import cut_long, cut_text
from arcaligner.tokenization_arcaligner import readable, tokenize_with_ends

# With characters of several tokens, marks, control tokens, white space of all kinds.
TEXTS = st.text(st.sampled_from("abé .!?\n\t会😀ာ\u0301x"), max_size=200) | st.lists(
    st.sampled_from(["Ada wrote it. ", "\n\n", "x" * 30, "会议改到星期四", "<|im_end|>", " ", "| a | b |\n"]),
    max_size=20,
).map("".join)


def num_tokens(tokenizer, text: str, start: int, end: int) -> int:
    """Number of tokens that end between two offsets of the text."""
    ((_, ends),) = tokenize_with_ends(tokenizer, [text])
    return sum(start < token_end <= end for token_end in ends)


def stripped(text: str, start: int, end: int) -> tuple[int, int]:
    span = text[start:end]
    return start + len(span) - len(span.lstrip()), end - len(span) + len(span.rstrip())


@settings(deadline=None, max_examples=80)
@given(TEXTS, st.integers(1, 40), st.lists(st.integers(0, 200), max_size=4))
@example("", 1, [])
@example(" \n ", 1, [0, 1])
@example("😀" * 9, 1, [])
def test_passages_hold_all_and_fit(tokenizer, text, most, sections):
    """No character is lost, and no passage is too long, except for a single character with many tokens."""
    text = readable(text).text
    sections = sorted(section for section in sections if section < len(text))
    spans = cut_text(text, tokenizer, most, sections=sections)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == len(text)
    for start, end in (stripped(text, *span) for span in spans):
        is_one = end - start == 1 or text[start:end] == "<|im_end|>"  # one character or one mark
        assert num_tokens(tokenizer, text, start, end) <= most or is_one
        assert start < end or len(spans) == 1


@pytest.mark.parametrize(
    "unit", ["会议改到星期四安娜带蛋糕", "aGVsbG8gd29ybGQ0123456789+/", "အစည်းအဝေးကို", "4f3a90b1", "x"]
)
def test_text_without_spaces_fills_passages(tokenizer, unit):
    """Passages of text without spaces (Chinese, base64, Burmese, keys) are full, except for the last one."""
    text = unit * 120
    spans = cut_text(text, tokenizer, 40)
    sizes = [num_tokens(tokenizer, text, *span) for span in spans]
    assert len(sizes) > 2 and all(36 <= size <= 40 for size in sizes[:-1]) and sizes[-1] <= 40


SENTENCE = "It was written by Ada. "  # 10 tokens


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (3 * SENTENCE, {}, [2 * SENTENCE, SENTENCE]),
        # a paragraph, half full
        (f"{SENTENCE}Ada.\n\nYes. {SENTENCE}", {}, [f"{SENTENCE}Ada.\n\n", f"Yes. {SENTENCE}"]),
        (f"Ada.\n\n{3 * SENTENCE}", {}, [f"Ada.\n\n{SENTENCE}", 2 * SENTENCE]),  # which is less than half full
        ("Yes. " + SENTENCE * 2, {"sections": [5 + len(SENTENCE)]}, ["Yes. " + SENTENCE, SENTENCE]),
        (
            f"{SENTENCE}Ada. Yes.",
            {"sections": [len(SENTENCE) + 5]},
            [f"{SENTENCE}Ada. ", "Yes."],
        ),  # although both would fit
        (f"Ada. {SENTENCE}", {"sections": [5]}, [f"Ada. {SENTENCE}"]),
        ("| a b c |\n" * 6, {}, ["| a b c |\n" * 3] * 2),  # a table between its lines
        ("word " * 12, {}, None),
    ],
)
def test_passages_end_where_people_pause(tokenizer, text, options, expected):
    spans = cut_text(text, tokenizer, 20, **options)
    passages = [text[start:end] for start, end in spans]
    if expected:
        assert passages == expected
    else:
        assert len(passages) > 1 and all(passage.endswith(" ") for passage in passages)


def test_fitting_sentence_stays_whole(tokenizer):
    """A short sentence is a passage of its own if the next one fits whole, but not if that has to be cut anyway."""
    short, fitting, longer = "Ada. ", "It was " + "a" * 14 + ". ", "It was " + "a" * 60 + ". "
    for second, first_end in ((fitting, len(short)), (longer, None)):
        text = short + second
        spans = cut_text(text, tokenizer, 18)
        assert spans[0][1] == first_end if first_end else spans[0][1] > len(short)


def test_cuts_refer_to_given_text(tokenizer):
    """Offsets refer to the text as it was given, with its invisible characters, and titles do not change."""
    document = "It was writ\u00adten by Ada. " * 5
    documents = [{"title": "T", "text": document, "id": 3}, "Short.", document]
    passages, pieces = cut_long(documents, tokenizer, 30, 20)
    assert [piece.document for piece in pieces] == [0, 0, 0, 1, 2, 2, 2]
    for passage, piece in zip(passages, pieces, strict=True):
        text = "Short." if piece.document == 1 else document
        assert text[piece.start : piece.end] == piece.text == (passage if piece.document else passage["text"])
    assert all((passage["title"], passage["id"]) == ("T", 3) for passage in passages[:3])
    assert "".join(piece.text for piece in pieces[4:]) == document
    assert cut_long(documents, tokenizer, 60, 20)[0] == documents
