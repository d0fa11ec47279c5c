"""An evaluation reads what a corpus finds for its questions, and says how many of the right passages that are."""

import pytest
from training_rows import question_rows, write_rows

import arcaligner.corpus  # noqa: F401 (quiets lancedb, which reads its settings when it is imported)

pytest.importorskip("lancedb")

from arcaligner.common.passages import Document
from arcaligner.corpus.build import build_corpus
from arcaligner.corpus.retrieve import Retriever
from arcaligner.corpus.table import Corpus
from arcaligner.evaluation import retrieval
from arcaligner.evaluation.evaluate import load_rows
from arcaligner.evaluation.retrieval import gold_documents, main, recall_at_k, retrieve
from arcaligner.evaluation.settings import read_settings

WORDS = "parkdale it riding ski zebra 2003 jumper canada x9 nobody".split()
PASSAGES = [{"title": f"Title {n}", "text": f"Ada wrote {word} aloud; {word} again."} for n, word in enumerate(WORDS)]


@pytest.fixture
def rows():
    """Each asks for the word of one passage, its gold; the last has two more that are not needed."""
    asked = zip(question_rows(4), WORDS, PASSAGES, strict=False)
    made = [row | {"question": f"Who wrote {word}?", "passages": [passage]} for row, word, passage in asked]
    made[3] |= {"passages": PASSAGES[3:6], "meta": {"gold": [0]}}
    return made


@pytest.fixture
def corpus(tmp_path, processor):
    source = write_rows(tmp_path / "corpus.jsonl", [question_rows(1)[0] | {"passages": PASSAGES}])
    made = Corpus.create(tmp_path / "corpus", processor)
    build_corpus([source], made, processor)
    return made


@pytest.mark.parametrize("top_k", [1, 7])
def test_rows_get_the_passages_that_the_corpus_finds_the_best_first(rows, corpus, processor, checkpoint_dir, top_k):
    retriever = Retriever(corpus, processor)
    found = retrieve(rows, corpus.path, str(checkpoint_dir), None, top_k)
    for row, before in zip(found, rows, strict=True):
        best = retriever(before["question"], max(top_k, 5)).documents[:top_k]
        assert [Document("", *each.values()).digest for each in row["passages"]] == [each["document"] for each in best]
        assert {**row, "passages": None} == {**before, "passages": None}
    assert len({row["passages"][0]["text"] for row in found}) > 1


def test_a_re_ranker_chooses_among_twenty(rows, tmp_path, monkeypatch):
    asked = []

    class Watched:
        def __init__(self, corpus, processor, reranker):
            assert reranker == "a/reranker"

        def __call__(self, question, top_k):
            asked.append(top_k * retrieval.CANDIDATES)
            return type("Found", (), {"documents": PASSAGES})

    for name, value in {"Retriever": Watched, "Corpus": str}.items():
        monkeypatch.setattr(retrieval, name, value)
    monkeypatch.setattr(retrieval.ArcAlignerProcessor, "from_pretrained", str)
    assert [row["passages"] for row in retrieve(rows[:1], "c", "a", "a/reranker", 1)] == [PASSAGES[:1]]
    retrieve(rows[:1], "c", "a", "a/reranker", 8)
    assert asked == [20, 32]


def test_a_task_of_an_evaluation_reads_retrieved_passages(rows, corpus, checkpoint_dir, tmp_path):
    write_rows(tmp_path / "nq.jsonl", rows)
    keys = {"checkpoint": str(checkpoint_dir), "output": "run", "data": tmp_path, "corpus": str(corpus.path)}
    keys |= {"tasks": ["nq"], "methods": ["naive"]}
    for top_k in (None, 3):
        settings = read_settings(None, keys, {"passages": "retrieved", "top_k": top_k})
        read = load_rows("nq", settings.tasks["nq"], settings)
        found = retrieve(rows, corpus.path, str(checkpoint_dir), None, top_k or 1)
        assert [row | {"gold": []} for row in read] == [row | {"gold": []} for row in found]


def test_recall_is_the_share_of_the_gold_documents_among_the_first(rows):
    documents = [Document("", *each.values()).digest for each in PASSAGES]
    rows[0] = rows[0] | {"passages": [PASSAGES[0], PASSAGES[6]]}
    assert gold_documents(rows[0]) == {documents[0], documents[6]} and gold_documents(rows[3]) == {documents[3]}

    def in_order(question, top_k):
        return type("Found", (), {"documents": [{"document": each} for each in documents[:top_k]]})

    assert recall_at_k(in_order, rows) == {1: [0.5, 0, 0, 0], 5: [0.5, 1, 1, 1], 20: [1, 1, 1, 1]}


def test_the_command_counts_only_questions_whose_gold_is_there(rows, corpus, checkpoint_dir, tmp_path, capsys):
    rows[1] = rows[1] | {"passages": [{"title": "", "text": "Elsewhere."}]}
    rows[2] = rows[2] | {"passages": []}
    main(corpus.path, write_rows(tmp_path / "q.jsonl", rows), str(checkpoint_dir))
    printed = capsys.readouterr().out
    assert "2 questions, 10 passages" in printed and "100.0 [100.0, 100.0]" in printed
    with pytest.raises(ValueError, match="No question of .* has its gold passages"):
        main(corpus.path, write_rows(tmp_path / "none.jsonl", rows[1:3]), str(checkpoint_dir))
