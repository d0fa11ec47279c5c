"""Texts that people read use the words of the field: pages, messages, docstrings and comments are searched for a few
phrases.

The list has phrases of ours that readers stumbled over, each with better words. It is not a spelling checker.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTEAD = {
    r"tells? of": "reports",
    r"(?:is|are|was|were|be|been) told": "is reported, gets",
    r"anew": "again",
    r"that one's": "its",
    r"but for": "except for",
    r"(?:is|are|was|were|what) read of": "cached keys and values of",
    r"stands?(?! for \w+ in)": "is, contains, represents",
    r"at once": "immediately, at the same time",
    r"what is left": "the rest",
    r"go(?:es)? on": "continues",
    r"went on": "continued",
    r"of old": "formerly",
    r"beside": "next to, with, in addition to",
    r"nobody": "cannot",
    r"sooner": "faster",
    r"likeliest": "top-ranked, most likely",
    r"apart(?! from)": "independent, separately",
    r"read (?:ahead|jointly)": "precomputed, joint",
    r"kept (?:passages?|slots?|prefix\w*|ones|or read)": "cached",
    r"what is kept": "entries of the cache",
    r"most likely answers?(?: it| the question)?[,.;)]": "most likely to contain the answer",
    r"(?:is|are) asked about": "is scored",
    r"how likely (?:the|its|this|these|an?) (?:\w+ )+(?:contains?|is right)": "how likely it is that",
    r"side by side": "packed",
    r"does nothing with": "ignores",
    r"what (?:people|others|somebody) (?:have|has)": "name the thing",
    r"(?:is|are|was|were) warned (?:of|about)": "gives a warning",
    r"(?:is|are) to (?:have|hold|take)": "has to",
    r"piece by piece": "as it is generated",
    r"of like length": "of similar length",
    r"is no (?:list|text)": "is not a",
    r"says? nothing yet": "is neutral",
    r"by way of": "through, from",
    r"make room": "free disk space, free memory",
    r"words (?:are in|of this (?:page|list))": "the glossary explains the terms",
    r"NaturalQuestions": "Natural Questions",
}
# Phrases that a file may use.
ALLOWED = {
    "docs/decisions.md": {"apart"},  # links to headings of the log
    "apps/corpus/table.py": {"nobody"},  # the sentence that the fingerprint of an encoder is made of
    "dev/count_moves.py": {"Nobody"},  # a passage
}
PHRASE = re.compile("|".join(rf"(?<![\w-])(?:{phrase})(?![\w-])" for phrase in INSTEAD), flags=re.IGNORECASE)
NO_SOURCES = ("tests", "checkpoints", "runs", "data")


def phrases_in(text: str) -> list[str]:
    """Phrases of the list that a text contains outside of code."""
    return [match[0] for match in PHRASE.finditer(re.sub(r"`[^`\n]*`", "``", text))]


def literal(node: ast.AST) -> str:
    """The text of a string, with braces for what is filled in; empty for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(part, ast.FormattedValue) else literal(part) for part in node.values)
    return ""


def texts_of(code: str) -> list[tuple[int, str]]:
    """Strings of several words, docstrings included, and comments of a file of code, each with the number of its line.
    A message that a variable holds until it is shown is a string like any other."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant | ast.JoinedStr)]
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    strings = [(node.lineno, literal(node)) for node in nodes if id(node) not in parts]
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return [(line, text) for line, text in (*strings, *comments) if " " in text.strip()]


def comments_of(settings: str) -> list[tuple[int, str]]:
    """Comments of a YAML file. Adjacent lines of comments are one text, as phrases may be wrapped."""
    comments: list[tuple[int, str]] = []
    last = 0
    for number, line in enumerate(settings.splitlines(), start=1):
        comment = re.search(r"(?:^|\s)#\s?(.*)", line)
        if comment and last == number - 1 and comments:
            comments[-1] = comments[-1][0], f"{comments[-1][1]} {comment[1]}"
        elif comment:
            comments.append((number, comment[1]))
        last = number if comment else last
    return comments


def pages() -> list[Path]:
    named = ("README.md", "share/model_card.md.jinja", "apps/server/page.html", ".github/SECURITY.md")
    return [*(ROOT / name for name in (*named, ".github/CONTRIBUTING.md")), *sorted(ROOT.glob("docs/*.md"))]


def sources() -> list[Path]:
    paths = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]
    return sorted(path for path in paths if path.relative_to(ROOT).parts[0] not in NO_SOURCES)


def recipes() -> list[Path]:
    return sorted(path for folder in ("train", "evaluation") for path in (ROOT / folder).rglob("*.yaml"))


def stumbles(path: Path, texts: list[tuple[int, str]]) -> list[str]:
    """Lines of a file with phrases of the list that it may not use."""
    name = path.relative_to(ROOT).as_posix()
    phrases = ((line, {*phrases_in(text)} - ALLOWED.get(name, set())) for line, text in texts)
    return [f"{name}:{line}: {sorted(words)}" for line, words in phrases if words]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_pages_are_plain(path):
    """No page has a phrase of the list, except in answers of the model."""
    lines = [*enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)]
    if path.name == "answers.md":
        lines = [(number, line) for number, line in lines if not line.startswith("|")]
    assert stumbles(path, lines) == []


def test_changes_are_plain():
    """The changelog has no phrase of the list, in any version."""
    path = ROOT / "CHANGELOG.md"
    assert stumbles(path, [*enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)]) == []


def test_code_is_plain():
    """Messages, help, docstrings and comments of the package have no phrase of the list."""
    places = [place for path in sources() for place in stumbles(path, texts_of(path.read_text(encoding="utf-8")))]
    assert places == []


def test_recipes_are_plain():
    """Comments of recipes and of accelerate's configurations have no phrase of the list."""
    places = [place for path in recipes() for place in stumbles(path, comments_of(path.read_text(encoding="utf-8")))]
    assert places == []


def test_phrases_are_found():
    """The search finds phrases in variables, f-strings, docstrings, comments and wrapped comments of YAML."""
    assert phrases_in("It tells of a port, built anew, but for one.") == ["tells of", "anew", "but for"]
    assert phrases_in("apart from this, a stand-in") == []
    code = '"""Built anew."""\nwhy = f"read {x} " "but for one"  # beside it\nraise ValueError(why)\n'
    assert [(line, phrases_in(text)) for line, text in texts_of(code)] == [
        (1, ["anew"]),
        (2, ["but for"]),
        (2, ["beside"]),
    ]
    assert comments_of("# built\n# anew\nlora_r: 4   # beside it\nseed: 1\n") == [(1, "built anew beside it")]
