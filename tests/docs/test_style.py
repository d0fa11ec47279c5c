"""Texts that users meet use the words of the field: pages, errors, help and messages are searched for a few phrases.

The list holds phrases of ours that readers stumbled over, each with what to write instead. It is no spelling checker.
"""

import ast
import re
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
    r"read ahead": "precomputed",
    r"kept (?:passages?|slots?|prefix\w*|ones)": "cached",
    r"most likely answers?(?: it| the question)?[,.;)]": "most likely to contain the answer",
    r"(?:is|are) asked about": "is scored",
    r"side by side": "packed",
    r"does nothing with": "ignores",
    r"what (?:people|others|somebody) (?:have|has)": "name the thing",
}
# Of a file, phrases that are right there.
ALLOWED = {
    "docs/decisions.md": {"apart"},  # links to headings of the log
    "apps/corpus/table.py": {"nobody"},  # the sentence that the fingerprint of an encoder is made of
}
PHRASE = re.compile("|".join(rf"(?<![\w-])(?:{phrase})(?![\w-])" for phrase in INSTEAD), flags=re.IGNORECASE)
# Whose arguments users see.
SHOWN = {
    "print",
    "echo",
    "warn",
    "warning",
    "warning_once",
    "info",
    "error",
    "BadParameter",
    "Option",
    "Argument",
    "Table",
}
NO_SOURCES = ("tests", "checkpoints", "runs", "data")


def phrases_in(text: str) -> list[str]:
    """Phrases of the list in a text, outside of code."""
    return [found[0] for found in PHRASE.finditer(re.sub(r"`[^`\n]*`", "``", text))]


def literal(node: ast.AST) -> str:
    """The text of the strings below a node, with braces for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(part, ast.FormattedValue) else literal(part) for part in node.values)
    return " ".join(filter(None, (literal(child) for child in ast.iter_child_nodes(node))))


def is_command(node: ast.AST) -> bool:
    """Whether a function's docstring is what `--help` prints: it has options in its signature."""
    return isinstance(node, ast.FunctionDef) and "typer." in ast.unparse(node.args)


def messages(path: Path) -> list[str]:
    """What a file of code shows to users: errors, warnings, help, tables, and constants that these may print."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            found.append(literal(node.exc))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SHOWN:
            found.append(literal(node))
        elif is_command(node):
            found.append(ast.get_docstring(node) or "")
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found.append(literal(node.value))
    return found


def pages() -> list[Path]:
    named = ("README.md", "share/model_card.md.jinja", "apps/server/page.html", ".github/SECURITY.md")
    return [*(ROOT / name for name in named), *sorted(ROOT.glob("docs/*.md"))]


def sources() -> list[Path]:
    found = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]
    return sorted(path for path in found if path.relative_to(ROOT).parts[0] not in NO_SOURCES)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_pages_are_plain(path):
    """No page has a phrase of the list; answers of the model are its own words."""
    name = path.relative_to(ROOT).as_posix()
    lines = path.read_text(encoding="utf-8").splitlines()
    if name == "docs/answers.md":
        lines = [line for line in lines if not line.startswith("|")]
    found = {number: words for number, line in enumerate(lines, start=1) if (words := phrases_in(line))}
    allowed = ALLOWED.get(name, set())
    assert {number: words for number, words in found.items() if not allowed.issuperset(words)} == {}


def test_changes_are_plain():
    """The part of the changelog that is not released yet."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert phrases_in(text.split("\n## ")[1]) == []


def test_messages_are_plain():
    """Errors, warnings, help and printed tables."""
    found = [
        f"{path.relative_to(ROOT)}: {words} in {message[:100]!r}"
        for path in sources()
        for message in messages(path)
        if (words := {*phrases_in(message)} - ALLOWED.get(path.relative_to(ROOT).as_posix(), set()))
    ]
    assert found == []


def test_phrases_are_found():
    """The list finds what it is for."""
    assert phrases_in("It tells of a port, built anew, but for one.") == ["tells of", "anew", "but for"]
    assert phrases_in("apart from this, a stand-in") == []
    assert messages.__doc__ and literal(ast.parse("raise ValueError(f'no {x} ' 'there')")) == "no {} there"
