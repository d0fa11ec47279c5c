"""A small corpus for the tests of `apps/corpus/` and `apps/server/`."""

import pytest

import arcaligner.apps.corpus  # noqa: F401 (quiets lancedb, which reads its settings when it is imported)

pytest.importorskip("lancedb")

from arcaligner.apps.corpus.build import build_corpus
from arcaligner.apps.corpus.table import Corpus

LETTER = (
    "It was written by Ada, and nobody else knew how to read it aloud. "
    "Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003! "
    "Toronto Northwest was a federal district in Canada. The riding was created in 1924."
)


@pytest.fixture
def letters(tmp_path):
    """A folder with a text of three passages and a Markdown file of one."""
    folder = tmp_path / "letters"
    (folder / "old").mkdir(parents=True)
    (folder / "letter.txt").write_text(LETTER, encoding="utf-8")
    (folder / "old" / "ski.md").write_text("# Zhaparov\n\nHe jumps. He has competed since 2003.", encoding="utf-8")
    return folder


@pytest.fixture
def make_corpus(tmp_path, processor):
    """Builds a corpus from sources."""

    def make(*sources, name="corpus", by=processor, **settings) -> Corpus:
        made = Corpus.create(tmp_path / name, by, **settings)
        if sources:
            build_corpus([str(source) for source in sources], made, by)
        return made

    return make


@pytest.fixture
def corpus(letters, make_corpus):
    """The corpus of `letters`."""
    return make_corpus(letters, passage_tokens=36)
