"""Files become text with headings, tables and pages, in any encoding. Unreadable and hostile files are refused by name,
and no code in them is run."""

import io
import zipfile

import pytest
from pdf_files import line, pdf

from arcaligner.common import reading
from arcaligner.common.reading import read_file, read_markdown

pytest.importorskip("pdfplumber")
pytest.importorskip("mammoth")
pytest.importorskip("markdownify")

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"


def docx(body: str) -> bytes:
    """A DOCX file with this body."""
    types = f'<Types xmlns="{PACKAGE}/content-types"><Default Extension="xml" ContentType="application/xml"/></Types>'
    link = f'<Relationship Id="r" Type="{OFFICE}" Target="word/document.xml"/>'
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("[Content_Types].xml", types)
        packed.writestr("_rels/.rels", f'<Relationships xmlns="{PACKAGE}/relationships">{link}</Relationships>')
        packed.writestr("word/document.xml", f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>')
    return file.getvalue()


def paragraph(text: str, style: str = "Normal") -> str:
    return f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>'


GRID = "".join(f"{x} {y} 100 20 re S\n" for x in (50, 150) for y in (600, 580))
PAGE = line(50, 700, "Annual report", 20) + line(50, 660, "The meeting is on Thurs-") + line(50, 648, "day.")
PAGE += GRID + "".join(line(x, y, text) for x, y, text in [(55, 607, "City"), (155, 607, "People")])
PAGE += line(55, 587, "Oslo") + line(155, 587, "700,000") + line(50, 540, "After the table.")


def test_pdf_has_pages_and_tables():
    """The text of a PDF has its pages in order, with tables where they are on the page."""
    document = read_file("report.PDF", pdf(PAGE, line(50, 700, "Anna brings the cake.")))
    table = "| City | People |\n|---|---|\n| Oslo | 700,000 |"
    first = f"Annual report\n\nThe meeting is on Thursday.\n\n{table}\n\nAfter the table.\n\n"
    assert document.text == f"{first}Anna brings the cake.\n\n"
    assert document.sections == [(0, 1), (len(first), 2)] and document.title == ""
    assert read_file("pictures.pdf", pdf("50 50 100 100 re f")).text.strip() == ""


def test_pdf_columns_keep_order():
    sides = (("left", 50), ("right", 350))
    columns = [line(x, 700 - 12 * row, f"{side} {row}.") for side, x in sides for row in range(9)]
    text = read_file("a.pdf", pdf("".join(columns))).text
    assert text.split() == " ".join(f"{side} {row}." for side in ("left", "right") for row in range(9)).split()


def test_docx_keeps_headings_and_tables():
    cells = "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in ("Mast", "30 m"))
    body = paragraph("Ships", "Title") + paragraph("Sails", "Heading1") + paragraph("Of linen.")
    document = read_file("a.docx", docx(body + f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>"))
    assert "Of linen.\n\n| Mast | 30 m |\n| --- | --- |" in document.text
    assert [name for _, name in document.sections] == ["Sails"] and document.text.startswith("Ships\n\n# Sails")


def test_html_has_no_scripts():
    """The text of an HTML file contains no scripts, links or styles."""
    html = "<title>Shop</title><body onload=evil()><script>evil()</script><h2>Terms</h2><p>Pay <a href='x'>now</a>. "
    html += "&lt;b&gt;<style>p {}</style><table><tr><td>a</td><td>b</td></tr></table><img src=x onerror=evil()>"
    document = read_file("a.html", html.encode())
    assert document.title == "Shop" and [name for _, name in document.sections] == ["Terms"]
    assert "Pay now. <b>" in document.text and "| a | b |" in document.text
    assert not any(word in document.text for word in ("evil", "href", "{}"))


def test_headings_name_sections():
    """A heading names the section after it; a line of code that starts with # is not a heading."""
    document = read_markdown("# Ships #\n\n## Sails\nLinen.\n### Main\n~~~\n# no\n~~~\n## Oars\nOak.")
    assert document.title == "Ships" and [name for _, name in document.sections] == ["Sails", "Sails › Main", "Oars"]
    assert all(document.text[start] == "#" for start, _ in document.sections)


@pytest.mark.parametrize(
    ("matter", "title"),
    [
        ("---\ntitle: Ships\ntags: [wood, sea]\ndraft: false\n---\n", "Ships"),
        ("---\r\ntitle: 'Anna''s ship'  # the first\r\ntags:\r\n  - wood\r\n- sea\r\n---\r\n", "Anna's ship"),
        ('+++\ntitle = "Ships \\"A\\""\n[params]\nweight = 3\n+++\n', 'Ships "A"'),
        ("---\nsubtitle: No\n...\n", "Oars"),  # then the first heading is the title
        ("---\n---\n", "Oars"),
    ],
)
def test_front_matter_is_no_text(matter, title):
    """The title is taken from the front matter, and offsets into the text do not change."""
    text = matter + "\n# Oars\n\nOf oak.\n"
    document = read_markdown(text)
    assert document.title == title and len(document.text) == len(text)
    assert document.text.split() == ("Of oak." if title == "Oars" else "# Oars Of oak.").split()
    assert document.text.index("Of oak.") == text.index("Of oak.")


def test_repeated_title_is_encoded_once():
    """A title that is also a heading is encoded once."""
    document = read_markdown("---\ntitle: Ships\n---\n\n# Ships\n\nOf wood.\n\n## Sails\n\nOf linen.\n")
    assert document.title == "Ships" and document.text.split() == "Of wood. ## Sails Of linen.".split()
    assert [name for _, name in document.sections] == ["Sails"]


@pytest.mark.parametrize(
    "text", ["---\nIt was written.\n---\nEnd.", "---\ntitle: Never closed\n\nText.", "--- x\na: b\n---\n"]
)
def test_rules_are_no_front_matter(text):
    assert read_markdown(text).text.split() == text.split()


def test_underlined_headings_are_headings():
    document = read_markdown("Ships\n=====\n\nOf wood.\n\nSails\n---\nLinen.\n\n### Main\n\nBig.\n\nOars\n----\n\nOak.")
    assert document.title == "Ships" and [name for _, name in document.sections] == ["Sails", "Sails › Main", "Oars"]
    assert "Ships" not in document.text and "===" not in document.text
    for text in (
        "One\ntwo\n---\n",
        "- one\n---\n",
        "| a |\n|---|\n",
        "A\n\n---\n\nB",
        "```\nA\n===\n```\n",
        "> q\n---",
    ):
        assert read_markdown(text) == ("", text, [])


@pytest.mark.parametrize("name", ["a.rst", "a.tex", "a.log", "a.adoc", "README", "a.txt"])
def test_any_suffix_is_text(name):
    """Text files are not changed, not even their control characters, so that offsets refer to the file."""
    text = "writ\u00ad\nten\0 at \x1b[1mnight\x1b[0m, in a long line of a log"
    assert read_file(name, text.encode()) == ("", text, [])
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_file(name, b"\x7fELF\2\1\1" + bytes(100))


def test_what_is_converted_is_readable():
    html = "<title>Inter&shy;national</title><h2>La&shy;w</h2><p>The o\ufb03ce&nbsp;wro&#8203;te caf&eacute;, e\u0301."
    document = read_file("a.html", html.encode())
    assert (document.title, document.sections[0][1]) == ("International", "Law")
    assert "The office wrote caf\u00e9, \u00e9." in document.text


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8-sig", "Straße"),
        ("utf-16", "Straße 東京"),
        ("utf-32", "Straße 東京"),
        ("latin-1", "Café"),
        ("cp1252", "L’été dernier, à Paris, nous avons mangé des crêpes."),
        ("cp1250", "Zażółć gęślą jaźń. Łódź jest miastem w Polsce."),
        ("cp1251", "Москва является столицей России."),
        ("shift_jis", "東京は日本の首都です。人口は多い。"),
    ],
)
def test_text_encodings(encoding, text):
    """Text is decoded in its own encoding."""
    assert read_file("a.txt", text.encode(encoding)).text == text


EMPTY = "<" + "00" * 32 + ">"
LOCKED = pdf(PAGE, encrypted=f"/ID[{EMPTY}{EMPTY}]/Encrypt<</Filter/Standard/V 1/R 2/O{EMPTY}/U{EMPTY}/P -1>>")
BOMB = docx("<w:p>" + " " * (reading.LARGEST_UNPACKED + 1) + "</w:p>")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("../../a.pdf", b"%PDF-1.4 broken", r"^\.\./\.\./a\.pdf cannot be read: it is broken, or not a PDF"),
        ("a.pdf", pdf(PAGE)[:-200], "a.pdf cannot be read: it is broken"),
        ("a.pdf", LOCKED, r"a\.pdf cannot be read: it is protected by a password. Save it without a password\."),
        ("a.docx", b"PK\3\4", "a.docx cannot be read: it is broken"),
        ("a.docx", BOMB, "it unpacks to 257 MiB; expected at most 256 MiB"),
        ("a.html", b"<div>" * 100_000 + b"x", "a.html cannot be read: its elements are nested too deep"),
        ("a.txt", b"\0\1\2", "a.txt is not text in UTF-8 or in any other known encoding"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\xff\0", "is not text in UTF-8 or in any other known encoding"),
    ],
)
def test_unreadable_files_are_named(name, data, message):
    """Files that cannot be read are named with the reason."""
    with pytest.raises(ValueError, match=message):
        read_file(name, data)


def test_conversions_are_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(reading, "SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"a\.html takes longer than 0\.01 seconds"):
        read_file("a.html", b"<p>x")
    with (tmp_path / "a.pdf").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ValueError, match=r"a\.pdf has 65 MiB; expected at most 64 MiB\. Split it\."):
        read_file(tmp_path / "a.pdf")


def test_missing_library_is_named(monkeypatch, tmp_path):
    (tmp_path / "pdfplumber.py").write_text("raise ImportError(name='pdfplumber')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"a\.pdf cannot be read without the package pdfplumber. Run `pip install 'arcaligner\[files\]'`\.",
    ):
        read_file("a.pdf", pdf(PAGE))
