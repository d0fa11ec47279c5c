"""Convert users' files to text: plain text in any encoding, Markdown, HTML, PDF and DOCX.

    file = read_file("report.pdf")
    file.title, file.text, file.sections    # "", "Our year\n...", [(0, 1), (5120, 2)]

Files are not trusted. HTML, PDF and DOCX are converted to Markdown in a separate process, within limits of time and
memory: scripts are removed, nothing is run or downloaded. Text files are not changed, so that character offsets refer
to the file; converted text is normalized by `readable`.
"""

import codecs
import contextlib
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __package__:
    from ..tokenization_arcaligner import readable
else:  # the converting process runs this file as a script
    _spec = importlib.util.spec_from_file_location("texts", Path(__file__).parents[1] / "tokenization_arcaligner.py")
    _texts = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_texts)
    readable = _texts.readable

MARKDOWN = (".md", ".markdown")
PLAIN = (".txt", ".text", ".rst", ".tex", ".log", ".adoc", "")  # the last one means no suffix
CONVERTED = (".html", ".htm", ".pdf", ".docx")
LARGEST_CONVERTED = 64 * 2**20  # bytes of a file
LARGEST_UNPACKED = 256 * 2**20  # bytes of an unpacked DOCX, as the file declares them
SECONDS, MEMORY = 120, 2 * 2**30  # limits of a conversion, the memory in bytes
# Of about equally likely encodings, the first one is used.
PREFERRED = ("cp1252", "cp1251")
# A title is encoded with each sentence, so a long one would be costly.
LONGEST_TITLE = 1000
_HEADING = re.compile(r"(#{1,6})[ \t]+")
_FENCE = re.compile(r"\s*(```|~~~)")
_UNDERLINE = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
# A line that is not an underlined heading: a list, quote, table, code, heading, rule or HTML.
_NO_HEADING = re.compile(r"( {4}|\t)|\s*([-+*>|<#]|\d+[.)]\s|```|~~~|[-=_*\s]*$)|.*\|")
# Metadata at the top of Markdown, as Jekyll, Hugo, Docusaurus and Obsidian write it: YAML, or TOML between "+++".
_FRONT_MATTER = re.compile(r"\ufeff?(---|\+\+\+)[ \t]*\r?\n((?:[^\r\n]*\r?\n)*?)(?:\1|\.\.\.)[ \t]*(?:\r?\n|$)")
_METADATA = re.compile(r"[ \t]*(#.*)?$|[\w\"'][^:=\n]*[:=](\s|$)|[ \t]+\S|-(\s|$)|[\]})]|\[[\w.]+\]")
_META_TITLE = re.compile(
    r"""^title\s*[:=]\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^#|>\s].*?)\s*(?:\s#.*)?$""", re.IGNORECASE | re.MULTILINE
)
_BOMS = {  # the longest first
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig",
}  # fmt: skip


class FileText(NamedTuple):
    """A file as text. `sections` are the offsets at which its parts begin, each with its heading or page number."""

    title: str
    text: str
    sections: list[tuple[int, str | int]]


def read_file(path: str | Path, data: bytes | None = None) -> FileText:
    """
    Read a file as text.

    Args:
        path (`str` or `Path`): Its name. Files with the suffixes `CONVERTED` are converted; all others are text files.
        data (`bytes`, *optional*): Its content, if the file is not on this machine.

    Raises:
        `ValueError`: a file that is not text, or is broken, encrypted or too large, or whose library is missing.
    """
    suffix, size = Path(path).suffix.lower(), Path(path).stat().st_size if data is None else len(data)
    if suffix in CONVERTED and size > LARGEST_CONVERTED:
        most = LARGEST_CONVERTED // 2**20
        raise ValueError(f"{path} has {math.ceil(size / 2**20)} MiB; expected at most {most} MiB. Split it.")
    data = Path(path).read_bytes() if data is None else data
    text, pages = convert(data, suffix, path) if suffix in CONVERTED else (decode(data, path), [])
    is_markdown = suffix in (*MARKDOWN, *CONVERTED) and not pages
    return read_markdown(text) if is_markdown else FileText("", text, pages)


def decode(data: bytes, path: str | Path) -> str:
    """Text in the encoding that its byte order mark names, in UTF-8, or in the most likely encoding.

    Raises:
        `ValueError`: data that are not text.
    """
    if encoding := encoding_of_mark(data):
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode(encoding)
    is_binary = len(data) < 10 * data.count(b"\0")  # some texts contain a few, such as logs of crashed machines
    try:
        if is_binary:
            raise UnicodeDecodeError("utf-8", data, data.index(b"\0"), len(data), "NUL")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        try:
            from charset_normalizer import from_bytes
        except ImportError:
            what = f"{path} is not text in UTF-8 (the first byte that does not fit is at offset {error.start})"
            raise ValueError(f"{what}. To read other encodings, run `pip install 'arcaligner[files]'`.") from error
        likely = [] if is_binary else from_bytes(data)
        best = likely.best() if likely else None
        if best is None:
            raise ValueError(
                f"{path} is not text in UTF-8 or in any other known encoding (the first byte that does not fit is at "
                f"offset {error.start}). Save it as text in UTF-8, or leave it out."
            ) from error
        for name in PREFERRED:
            for match in likely:
                is_as_likely = match.percent_chaos <= best.percent_chaos
                is_as_likely &= match.percent_coherence >= best.percent_coherence - 5
                if name in (match.encoding, *match.could_be_from_charset) and is_as_likely:
                    return str(match)
        return str(best).removeprefix("\ufeff")


def encoding_of_mark(data: bytes) -> str | None:
    """The encoding that a byte order mark at the beginning names, if there is one."""
    return next((encoding for mark, encoding in _BOMS.items() if data.startswith(mark)), None)


def read_markdown(text: str) -> FileText:
    """Find the title and the sections of Markdown. The title is that of the front matter, else a heading at the top.
    Further headings name the sections, with the headings above them. Spaces replace front matter and title, so that
    they do not occur twice, and offsets do not change.

    >>> read_markdown("# Ships\\n\\nOf wood.\\n\\nSails\\n-----\\n\\nOf linen.")[::2]
    ('Ships', [(19, 'Sails')])
    """
    title, begin = _front_matter(text)
    text = _blank(text, 0, begin)
    sections, above, is_first = [], [], True
    for start, end, level, name in _headings(text):
        is_first = is_first and not text[:start].strip()
        if is_first and text[end:].strip() and (not title or name == title):
            title, text, is_first = name, _blank(text, start, end), False
        else:
            above = [heading for heading in above if heading[0] < level] + [(level, name)]
            sections.append((start, " › ".join(name for _, name in above)))
    return FileText(title, text, sections)


def _front_matter(text: str) -> tuple[str, int]:
    """The title that front matter names, or an empty one, and where the text after the front matter begins."""
    matter = _FRONT_MATTER.match(text)
    if not matter or not all(map(_METADATA.match, matter[2].splitlines())):
        return "", 0
    title = named[1] if (named := _META_TITLE.search(matter[2])) else ""
    if title[:1] in ("'", '"'):
        quote = title[0]
        title = title[1:-1].replace("''", "'") if quote == "'" else re.sub(r"\\(.)", r"\1", title[1:-1])
    title = readable(title).text.strip()
    return title if len(title) <= LONGEST_TITLE else "", matter.end()


def _blank(text: str, start: int, end: int) -> str:
    return text[:start] + re.sub(r"[^\r\n]", " ", text[start:end]) + text[end:]


def _headings(text: str) -> Iterator[tuple[int, int, int, str]]:
    """First and end character, level and name of each heading: marked by "#", or underlined."""
    is_code, start, before = False, 0, ""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        is_code ^= _FENCE.match(line) is not None
        below = lines[number + 1].rstrip("\r\n") if number + 1 < len(lines) else ""
        level, name, length = 0, "", len(line.rstrip("\r\n"))
        if not is_code and (mark := _HEADING.match(line)):
            level, name = len(mark[1]), line[mark.end() :].strip().rstrip("#").rstrip()
        elif not is_code and not before.strip() and not _NO_HEADING.match(line) and (mark := _UNDERLINE.match(below)):
            level, name, length = 1 if mark[1][0] == "=" else 2, line.strip(), len(line) + len(below)
        name = readable(name).text
        if 0 < len(name) <= LONGEST_TITLE:
            yield start, start + length, level, name
        start, before = start + len(line), line


def convert(data: bytes, suffix: str, path: str | Path) -> tuple[str, list[tuple[int, int]]]:
    """The text of a file with its pages, converted by another process.

    Raises:
        `ValueError`: a file that cannot be converted within the limits, or whose library is missing.
    """
    command = [sys.executable, "-P", __file__, suffix]  # the process does not import this package
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=SECONDS)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{path} takes longer than {SECONDS} seconds to read. Split it.") from error
    except ValueError as error:  # no output, because the process was killed
        raise ValueError(
            f"{path} takes more than {MEMORY // 2**30} GiB of memory to read, or is broken. Split it, or save it again."
        ) from error
    if "missing" in answer:
        raise ValueError(
            f"{path} cannot be read without the package {answer['missing']}. Run `pip install 'arcaligner[files]'`."
        )
    if "error" in answer:
        raise ValueError(f"{path} cannot be read: {answer['error']}")
    return answer["text"], [(offset, number) for offset, number in answer["pages"]]


# In the converting process


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def html_to_markdown(html: bytes | str) -> str:
    """The text of a page, with headings, lists and tables; without scripts, styles, pictures and links."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    soup = BeautifulSoup(html, "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    for element in soup(["script", "style", "noscript", "template", "svg", "head", "iframe", "object", "nav", "form"]):
        element.decompose()
    settings = {"heading_style": "ATX", "strip": ["a", "img"], "table_infer_header": True}
    settings |= {"escape_asterisks": False, "escape_underscores": False}
    text = re.sub(r"\n{3,}", "\n\n", readable(MarkdownConverter(**settings).convert_soup(soup)).text).strip()
    return f"# {title}\n\n{text}" if title and not text.startswith("# ") else text


def docx_to_markdown(data: bytes) -> str:
    """The text of a DOCX file, with headings, lists and tables."""
    import mammoth

    with zipfile.ZipFile(io.BytesIO(data)) as unpacked:
        size = sum(entry.file_size for entry in unpacked.infolist())
    if size > LARGEST_UNPACKED:
        most = LARGEST_UNPACKED // 2**20
        raise ValueError(f"it unpacks to {math.ceil(size / 2**20)} MiB; expected at most {most} MiB. Split it.")
    without_pictures = mammoth.images.img_element(lambda image: {})
    options = {"convert_image": without_pictures, "style_map": "p[style-name='Title'] => h1:fresh"}
    return html_to_markdown(mammoth.convert_to_html(io.BytesIO(data), **options).value)


def pdf_pages(data: bytes) -> list[str]:
    """The text of each page of a PDF file in reading order, with tables as Markdown in place."""
    import pdfplumber
    from pdfminer.pdfdocument import PDFPasswordIncorrect
    from pdfplumber.utils.exceptions import PdfminerException

    try:
        with pdfplumber.open(io.BytesIO(data), laparams={}) as pdf:
            pages = []
            for page in pdf.pages:
                pages.append(_page_text(page))
                page.close()
            return pages
    except PdfminerException as error:
        if error.args and isinstance(error.args[0], PDFPasswordIncorrect):
            raise ValueError("it is protected by a password. Save it without a password.") from error
        raise ValueError("it is broken, or not a PDF. Save it again as a PDF.") from error


def _page_text(page: Any) -> str:
    tables = {table.bbox: table.extract() for table in page.find_tables()}
    parts = []
    for box in page.textboxhorizontals:
        x, y = (box["x0"] + box["x1"]) / 2, (box["top"] + box["bottom"]) / 2
        around = [area for area in tables if area[0] <= x <= area[2] and area[1] <= y <= area[3]]
        if not around:
            parts.append(" ".join(readable(box["text"]).text.split()))
        elif (table := tables[around[0]]) is not None:
            cells = [[" ".join(readable(cell or "").text.split()).replace("|", "\\|") for cell in row] for row in table]
            rows = [f"| {' | '.join(row)} |" for row in cells]
            parts.append("\n".join([rows[0], "|" + "---|" * len(cells[0]), *rows[1:]]))
            tables[around[0]] = None  # write each table once
    return "\n\n".join(filter(None, parts))


def main(suffix: str) -> None:
    """Read a file from standard input and write its text as JSON."""
    _limit_memory()
    pages = []
    try:
        data = sys.stdin.buffer.read()
        if suffix == ".pdf":
            text = ""
            for number, page in enumerate(pdf_pages(data), start=1):
                pages.append((len(text), number))
                text += page + "\n\n"
        else:
            text = docx_to_markdown(data) if suffix == ".docx" else html_to_markdown(data)
        answer = {"text": text, "pages": pages}
    except ImportError as error:
        answer = {"missing": error.name}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY // 2**30} GiB of memory. Split it."}
    except RecursionError:
        answer = {"error": "its elements are nested too deeply. Close them (`</p>`, `</li>`, `</div>`)."}
    except Exception as error:  # any error of the libraries on a broken file
        answer = {
            "error": str(error)
            if type(error) is ValueError
            else f"it is broken ({type(error).__name__}). Save it again."
        }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
