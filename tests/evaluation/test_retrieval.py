"""An evaluation reads what a corpus finds for its questions."""

import pytest
from training_rows import question_rows, write_rows

import arcaligner.apps.corpus  # noqa: F401 (quiets lancedb, which reads its settings when it is imported)

pytest.importorskip("lancedb")

from arcaligner.apps.corpus import retrieve, table
from arcaligner.apps.corpus.build import build_corpus
from arcaligner.evaluation import evaluate
from arcaligner.evaluation.settings import read_settings

WORDS = "parkdale it riding ski zebra 2003 jumper canada x9 nobody".split()
PASSAGES = [{"title": f"Title {n}", "text": f"Ada wrote {word} aloud; {word} again."} for n, word in enumerate(WORDS)]
# Each asks for the word of one passage.
ROWS = [row | {"question": f"Who wrote {word}?"} for row, word in zip(question_rows(4), WORDS, strict=False)]


@pytest.mark.parametrize("top_k", [None, 7])
def test_questions_get_the_passages_that_the_corpus_finds_the_best_first(processor, checkpoint_dir, tmp_path, top_k):
    source = write_rows(tmp_path / "corpus.jsonl", [ROWS[0] | {"passages": PASSAGES}])
    corpus = table.Corpus.create(tmp_path / "corpus", processor)
    build_corpus([source], corpus, processor)
    write_rows(tmp_path / "nq.jsonl", ROWS)
    keys = {"checkpoint": str(checkpoint_dir), "output": "run", "data": tmp_path, "corpus": str(corpus.path)}
    keys |= {"tasks": ["nq"], "methods": ["naive"]}
    retriever = retrieve.Retriever(corpus, processor)
    found = evaluate.load_rows("nq", read_settings(None, keys, {"passages": "retrieved", "top_k": top_k}))
    for row, before in zip(found, ROWS, strict=True):
        best = retriever(before["question"], top_k or 5).documents[: top_k or 1]
        assert row["passages"] == [{key: each[key] for key in ("title", "text")} for each in best]
        assert {**row, "passages": None, "gold": None} == {**before, "passages": None, "gold": None}
    assert len({row["passages"][0]["text"] for row in found}) > 1
