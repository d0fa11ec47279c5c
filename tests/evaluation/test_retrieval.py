"""An evaluation uses the passages that a corpus, or a dense retriever in a pool, finds, in the order of a re-ranker."""

import json
import logging

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from training_rows import question_rows, write_rows
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

import arcaligner.apps.corpus  # noqa: F401 (quiets lancedb, which reads its settings when it is imported)

pytest.importorskip("lancedb")

from arcaligner.apps.corpus import retrieve, table
from arcaligner.apps.corpus.build import build_corpus
from arcaligner.common.rows import read_rows
from arcaligner.evaluation import evaluate, rerankers, retrieval
from arcaligner.evaluation.chat_endpoint import ChatEndpoint
from arcaligner.evaluation.paper import TASKS_OF_PAPER, Reproduction, reproduce
from arcaligner.evaluation.rerankers import WrongListError, listwise, listwise_prompt, load_reranker, parse_ranking
from arcaligner.evaluation.retrieval import DensePool, RetrievalSettings, main, open_pool, recall_at_k
from arcaligner.evaluation.runs import row_digest
from arcaligner.evaluation.settings import read_settings

WORDS = "parkdale it riding ski zebra 2003 jumper canada x9 nobody".split()
PASSAGES = [{"title": f"Title {n}", "text": f"Ada wrote {word} aloud; {word} again."} for n, word in enumerate(WORDS)]
# Each question has a word of one passage.
ROWS = [row | {"question": f"Who wrote {word}?"} for row, word in zip(question_rows(4), WORDS, strict=False)]


@pytest.mark.parametrize("top_k", [None, 7])
def test_retrieved_passages_are_ordered(processor, checkpoint_dir, tmp_path, top_k):
    """Questions get the passages that the corpus returns, the best first."""
    source = write_rows(tmp_path / "corpus.jsonl", [ROWS[0] | {"passages": PASSAGES}])
    corpus = table.Corpus.create(tmp_path / "corpus", processor)
    build_corpus([source], corpus, processor)
    write_rows(tmp_path / "nq.jsonl", ROWS)
    keys = {"checkpoint": str(checkpoint_dir), "output": "run", "data": tmp_path, "corpus": str(corpus.path)}
    keys |= {"tasks": ["nq"], "methods": ["naive"]}
    retriever = retrieve.Retriever(corpus, processor)
    rows = evaluate.load_rows("nq", read_settings(None, keys, {"passages": "retrieved", "top_k": top_k}))
    for row, before in zip(rows, ROWS, strict=True):
        best = retriever(before["question"], top_k or 5).documents[: top_k or 1]
        assert row["passages"] == [{key: passage[key] for key in ("title", "text")} for passage in best]
        assert {**row, "passages": None, "gold": None} == {**before, "passages": None, "gold": None}
    assert len({row["passages"][0]["text"] for row in rows}) > 1


# A dense retriever and a re-ranker


@pytest.fixture
def pool(tmp_path):
    """Ten passages, one of them twice, and an empty one."""
    extra = [PASSAGES[0], {"title": "", "text": " "}]
    return write_rows(tmp_path / "pool.jsonl", [ROWS[0] | {"passages": PASSAGES}, ROWS[1] | {"passages": extra}])


def test_pool_is_searched_exactly(pool, encoder_dir, tmp_path, monkeypatch):
    """A search over several shards finds the largest inner products; a second search uses the stored vectors."""
    monkeypatch.setattr(retrieval, "SHARD", 4)
    questions = [row["question"] for row in ROWS]
    dense = DensePool(open_pool([pool]), str(encoder_dir), tmp_path / "kept")
    places = dense.search(questions, 3)
    encoder = SentenceTransformer(str(encoder_dir), device="cpu")
    texts = [f"{passage['title']} {passage['text']}" for passage in PASSAGES]
    products = encoder.encode(questions) @ encoder.encode(texts).T  # (num_questions, num_passages)
    assert places == torch.topk(torch.from_numpy(products), 3).indices.tolist()
    assert len(list((tmp_path / "kept").rglob("*.npy"))) == 3
    monkeypatch.setattr(SentenceTransformer, "encode_document", None)
    assert DensePool(open_pool([pool]), str(encoder_dir), tmp_path / "kept").search(questions, 3) == places


def test_recall_counts_first_passages():
    rows = [{"answers": [answer], "passages": [{"text": text} for text in "bcdefg"]} for answer in "bfx"]
    assert [recall_at_k(rows)[k][0] for k in (1, 5, 20)] == pytest.approx([100 / 3, 200 / 3, 200 / 3])


def test_ranking_names_each_passage_once():
    assert parse_ranking("Sure: [3] > [1] > [2].", 3) == [2, 0, 1]
    wrong = {
        "I cannot": "the reply names no passage",
        "[4] > [1] > [2]": "the reply has a number that belongs to no passage",
        "[1] > [1] > [2]": "the reply names a passage twice",
    }
    for reply, reason in (wrong | {"[1] > [3]": "the reply leaves out a passage"}).items():
        with pytest.raises(WrongListError, match=f"^{reason}$"):
            parse_ranking(reply, 3)


def test_listwise_prompt_has_all_passages():
    prompt = listwise_prompt("Who?", [{"title": "T", "text": "word " * 400}, PASSAGES[1]])
    assert "I will provide you with 2 passages" in prompt and "[2] Title 1 Ada wrote it aloud; it again." in prompt
    assert prompt.split("[2]")[0].count("word") == 299 and prompt.count("query: Who?.") == 1


def test_wrong_lists_are_counted(pool, encoder_dir, tmp_path, monkeypatch, caplog):
    """A wrong list leaves its question in the order of the retriever; its reason is named and counted."""
    replies = iter(["[2] > [1] > [3]", "[1] > [1] > [2]", None, "no"])
    monkeypatch.setattr(ChatEndpoint, "__call__", lambda self, prompts: (next(replies) for _ in prompts))
    settings = RetrievalSettings([pool], str(encoder_dir), "listwise:judge", num_candidates=3)
    with caplog.at_level(logging.WARNING):
        rows, report = retrieval.retrieve(settings, "nq", ROWS, tmp_path / "out")
    assert report["wrong_lists"] == {
        "the reply names a passage twice": 1,
        "there is no reply": 1,
        "the reply names no passage": 1,
    }
    assert (
        "nq: listwise:judge returned no usable ranking for 3 of 4 questions" in caplog.text
        and "the reply names a passage twice (1)" in caplog.text
    )
    unordered = RetrievalSettings([pool], str(encoder_dir), num_candidates=3)
    plain, _ = retrieval.retrieve(unordered, "nq", ROWS, tmp_path / "plain")
    first = plain[0]["passages"]
    assert rows[0]["passages"] == [first[1], first[0], first[2]]
    assert [row["passages"] for row in rows[1:]] == [row["passages"] for row in plain[1:]]
    assert [row["passages"] for row in read_rows(tmp_path / "out" / "nq.jsonl.gz")] == [row["passages"] for row in rows]
    assert retrieval.retrieve(settings, "nq", ROWS, tmp_path / "out") == (rows, report)  # the judge gets no request


def test_real_server_orders_passages(tiny_server):
    """The project's server is asked for an order; the random text of its model is a wrong list for each question."""
    rank = listwise(ChatEndpoint("base", tiny_server))
    orders = list(rank(["Who?", "What?"], [PASSAGES[:2], PASSAGES[2:4]]))
    assert all(isinstance(order, WrongListError) for order in orders) and len(orders) == 2


def test_cross_encoder_orders_passages(encoder_dir, tmp_path):
    config = BertConfig.from_pretrained(encoder_dir, num_labels=1)
    torch.manual_seed(5)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "reranker")
    BertTokenizerFast.from_pretrained(encoder_dir).save_pretrained(tmp_path / "reranker")
    (order,) = load_reranker(f"cross_encoder:{tmp_path / 'reranker'}")(["Who wrote it?"], [PASSAGES])
    model = CrossEncoder(str(tmp_path / "reranker"), device="cpu")
    scores = model.predict([("Who wrote it?", f"{passage['title']} {passage['text']}") for passage in PASSAGES])
    assert [scores[number] for number in order] == sorted(scores, reverse=True)
    for name, message in (("colbert:x", "expected KIND:MODEL"), ("listwise:", "expected KIND:MODEL")):
        with pytest.raises(ValueError, match=message):
            load_reranker(name)
    with pytest.raises(OSError, match="re-ranker"):
        load_reranker(f"cross_encoder:{tmp_path / 'none'}")


def test_aligner_orders_passages(separate, monkeypatch):
    """An aligner orders by its log-odds; a passage without text comes last."""
    monkeypatch.setattr(rerankers, "load_aligner", lambda *names: separate)
    passages = [{"title": "", "text": ""}, *PASSAGES[:3]]
    (order,) = load_reranker("aligner:any")(["Who wrote it?"], [passages])
    answerer = rerankers.Answerer(*separate)
    (scores,) = answerer.score(["Who wrote it?"], [passages])
    odds = [scores[number].log_odds for number in order[:-1]]
    assert odds == sorted(odds, reverse=True) and order[-1] == 0


@pytest.mark.usefixtures("few_tokens")
def test_tables_read_first_found(pool, encoder_dir, checkpoint_dir, tmp_path, capsys):
    """With a `retrieval` recipe the tables use the first passage that is found; the command prints recall."""
    write_rows(tmp_path / "nq.jsonl", ROWS)
    keys = {"checkpoint": str(checkpoint_dir), "output": tmp_path / "run", "data": tmp_path, "batch_size": 2}
    of = {"retrieval": {"pool": [pool], "retriever": str(encoder_dir), "num_candidates": 3}}
    made = Reproduction(read_settings(None, keys | {"tasks": list(TASKS_OF_PAPER), "reproduce": of}, {}))
    (page,) = reproduce("recall", made)
    assert "| Natural Questions | after |" in page.read_text("utf-8")
    reproduce("table1", made)
    retrieved = {row["id"]: row["passages"] for row in read_rows(tmp_path / "run" / "retrieved" / "nq.jsonl.gz")}
    path = tmp_path / "run" / "nq" / "arcaligner.jsonl"
    for line in map(json.loads, path.read_text("utf-8").splitlines()):
        row = next(row for row in ROWS if row["id"] == line["id"])
        assert line["row"] == row_digest(row | {"passages": retrieved[line["id"]][:1]})
    main(pool, tmp_path / "out", "nq", tmp_path, str(encoder_dir))
    assert "| Natural Questions | before |" in capsys.readouterr().out and (tmp_path / "out" / "recall.md").exists()
