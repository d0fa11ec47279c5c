"""What is retrieved is what brute force finds; nothing is encoded or re-ranked twice, or mixed up."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import typer
from sentence_transformers import CrossEncoder, SentenceTransformer
from tiny_models import randomize
from training_rows import question_rows, write_rows
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification
from typer.testing import CliRunner

from arcaligner.evaluation import retrieval
from arcaligner.evaluation.retrieval import (
    RetrievalSettings,
    embed_passages,
    main,
    open_passages,
    recall_at_k,
    retrieve,
)
from arcaligner.train.corpora import read_rows

PASSAGES = [
    {"title": f"Title {number}" if number % 3 else "", "text": f"Ada wrote {word} aloud in 19{number}4; {word} again."}
    for number, word in enumerate("parkdale it riding ski zebra 2003 jumper canada x9 nobody".split())
]
QUESTIONS = ["Who wrote parkdale?", "What sport does he play?", "Which riding was it?", "zebra", "How many in 2003?"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(retrieval, "PASSAGES_PER_SHARD", 4)


def write_corpus(path, passages):
    rows = [
        {"id": str(number), "question": "", "answers": [], "passages": [passage]}
        for number, passage in enumerate(passages)
    ]
    return write_rows(path, rows)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl.gz", PASSAGES)


@pytest.fixture
def settings(corpus, encoder_dir):
    return RetrievalSettings(corpus, str(encoder_dir), reranker=None, top_n=5, top_k=5)


@pytest.fixture
def rows():
    return [row | {"question": question} for row, question in zip(question_rows(5), QUESTIONS, strict=True)]


@pytest.fixture(scope="session")
def other_encoder(encoder_dir, tmp_path_factory):
    """An encoder of other weights."""
    encoder = SentenceTransformer(str(encoder_dir), device="cpu")
    randomize(encoder, seed=7)
    folder = tmp_path_factory.mktemp("other") / "encoder"
    encoder.save(str(folder))
    return str(folder)


@pytest.fixture(scope="session")
def cross_encoder(encoder_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cross") / "encoder"
    bert = encoder_dir.parent / "bert"
    model = BertForSequenceClassification.from_pretrained(bert, num_labels=1)
    randomize(model, seed=8)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    return str(folder)


def read_text(passage):
    """A passage as the models read it."""
    return f"{passage['title']} {passage['text']}" if passage["title"] else passage["text"]


def inner_products(encoder, questions, passages=PASSAGES):
    """(num_questions, num_passages), passages rounded as they are kept."""
    model = SentenceTransformer(str(encoder), device="cpu")
    texts = model.encode([read_text(passage) for passage in passages]).astype(np.float16).astype(np.float32)
    return model.encode(questions) @ texts.T


def assert_found(found, scores, passages=PASSAGES, top_n=5, top_k=5):
    """`found` are rows with the passages of the largest `scores` (num_questions, num_passages)."""
    for row, of_question in zip(found, scores, strict=True):
        order = np.argsort(-of_question, kind="stable")[:top_n][:top_k]
        assert row["passages"] == [passages[index] for index in order]
        np.testing.assert_allclose(row["meta"]["retrieval"]["scores"], of_question[order], rtol=1e-4, atol=1e-5)


def test_the_passages_of_the_largest_inner_products_are_found(rows, settings, tmp_path, encoder_dir):
    scores = inner_products(encoder_dir, QUESTIONS)
    assert len({tuple(np.argsort(-each)[:5]) for each in scores}) > 1
    assert_found(retrieve(rows, settings, tmp_path), scores)


def test_a_checkpoint_of_transformers_is_read_by_the_mean_of_its_tokens_as_it_is(rows, settings, tmp_path, encoder_dir):
    bert = encoder_dir.parent / "bert"
    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert)

    def means(texts):
        inputs = [tokenizer(text, return_tensors="pt", truncation=True) for text in texts]
        return np.stack([model(**each).last_hidden_state.mean(dim=1)[0].detach().numpy() for each in inputs])

    embeddings = means([read_text(passage) for passage in PASSAGES])
    assert np.ptp(np.linalg.norm(embeddings, axis=1)) > 0.01  # not of one length
    scores = means(QUESTIONS) @ embeddings.astype(np.float16).astype(np.float32).T
    assert_found(retrieve(rows, replace(settings, retriever=str(bert)), tmp_path), scores)


def test_rows_keep_all_else_but_not_the_numbers_of_other_passages(rows, settings, tmp_path):
    rows[0]["meta"] = {"gold": [3], "level": "hard"}
    first, second = retrieve(rows[:2], replace(settings, top_k=1), tmp_path)
    assert len(first["passages"]) == len(first["meta"]["retrieval"]["scores"]) == 1
    assert first["meta"] == {"level": "hard", "retrieval": first["meta"]["retrieval"]}
    assert {key: value for key, value in second.items() if key not in ("passages", "meta")} == {
        key: value for key, value in rows[1].items() if key != "passages"
    }
    assert rows[0]["meta"]["gold"] == [3] and len(rows[0]["passages"]) == 1


def test_passages_come_once_and_not_without_a_text(tmp_path):
    empty = {"title": "Empty", "text": " "}
    same_text = PASSAGES[1] | {"title": "Another"}
    passages = open_passages(
        write_corpus(tmp_path / "corpus.jsonl", [PASSAGES[0], PASSAGES[1], PASSAGES[0], empty, same_text])
    )
    assert list(passages) == [PASSAGES[0], PASSAGES[1], same_text]


def length_encoder(asked):
    def encode(texts):
        asked.extend(texts)
        return np.array([[len(text), 1.0] for text in texts])

    return encode


def test_a_killed_encoding_goes_on_behind_its_last_shard(corpus, tmp_path):
    passages, asked = open_passages(corpus), []
    texts = [read_text(passage) for passage in PASSAGES]

    def killed(batch):
        if texts[7] in batch:
            raise KeyboardInterrupt
        return length_encoder([])(batch)

    with pytest.raises(KeyboardInterrupt):
        embed_passages(passages, killed, tmp_path / "shards")
    found = embed_passages(passages, length_encoder(asked), tmp_path / "shards")
    assert asked == texts[4:] and len(list((tmp_path / "shards").iterdir())) == 3
    expected = np.array([[len(text), 1.0] for text in texts], dtype=np.float16)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("value", [np.nan, 1e6])
def test_embeddings_that_cannot_be_kept_are_refused_before_anything_is_written(corpus, tmp_path, value):
    with pytest.raises(ValueError, match="first for the passage 'Ada wrote parkdale"):
        embed_passages(open_passages(corpus), lambda texts: np.full((len(texts), 2), value), tmp_path / "shards")
    assert not list(tmp_path.glob("shards/*"))


def test_a_second_time_no_model_is_loaded(rows, settings, tmp_path, monkeypatch, cross_encoder):
    settings = replace(settings, reranker=f"cross_encoder:{cross_encoder}")
    found = retrieve(rows, settings, tmp_path)

    def load(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(retrieval, "SentenceTransformer", load)
    assert retrieve(rows, settings, tmp_path) == found
    fewer = retrieve(rows, replace(settings, top_k=2), tmp_path)
    assert [row["passages"] for row in fewer] == [row["passages"][:2] for row in found]


def test_what_was_found_otherwise_is_not_taken(rows, settings, tmp_path, encoder_dir, other_encoder):
    folder = tmp_path / "encoder"
    shutil.copytree(encoder_dir, folder)
    settings = replace(settings, retriever=str(folder))
    assert_found(retrieve(rows, settings, tmp_path), inner_products(encoder_dir, QUESTIONS))
    # Another model of the same name, another corpus of the same name, another question of the same id.
    shutil.rmtree(folder)
    shutil.copytree(other_encoder, folder)
    scores = inner_products(other_encoder, QUESTIONS)
    assert_found(retrieve(rows, settings, tmp_path), scores)
    write_corpus(tmp_path / "corpus.jsonl.gz", PASSAGES[::-1][1:])
    assert_found(retrieve(rows, settings, tmp_path), scores[:, ::-1][:, 1:], PASSAGES[::-1][1:])
    rows[0]["question"] = "x9"
    scores = inner_products(other_encoder, ["x9", *QUESTIONS[1:]], PASSAGES[::-1][1:])
    assert_found(retrieve(rows, settings, tmp_path), scores, PASSAGES[::-1][1:])
    assert_found(retrieve(rows, replace(settings, top_n=6, top_k=6), tmp_path), scores, PASSAGES[::-1][1:], 6, 6)


def reranked(first, second, top_n=5):
    """Scores of a re-ranker for the `top_n` best of a retriever, else less than any."""
    scores = np.full_like(second, -np.inf)
    for row, (of_first, of_second) in enumerate(zip(first, second, strict=True)):
        best = np.argsort(-of_first)[:top_n]
        scores[row, best] = of_second[best]
    return scores


def test_a_cross_encoder_puts_the_passages_found_in_its_own_order(rows, settings, tmp_path, encoder_dir, cross_encoder):
    found = retrieve(rows, replace(settings, reranker=f"cross_encoder:{cross_encoder}"), tmp_path)
    model = CrossEncoder(cross_encoder, device="cpu")
    pairs = [(question, read_text(passage)) for question in QUESTIONS for passage in PASSAGES]
    second = model.predict(pairs).reshape(len(QUESTIONS), len(PASSAGES))
    assert_found(found, reranked(inner_products(encoder_dir, QUESTIONS), second))


@pytest.fixture
def rank_llm(tmp_path, encoder_dir, monkeypatch):
    """A package of this name, with the parts of its interface that are used, that orders by the text, last first."""
    package = tmp_path / "installed" / "rank_llm"
    (package / "rerank").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rerank" / "__init__.py").touch()
    (package / "data.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Query:\n    text: str\n    qid: int\n"
        "@dataclass\nclass Candidate:\n    docid: int\n    score: float\n    doc: dict\n"
        "@dataclass\nclass Request:\n    query: Query\n    candidates: list\n"
    )
    (package / "rerank" / "listwise.py").write_text(
        "class ZephyrReranker:\n"
        "    def __init__(self, model_path, device):\n"
        "        assert (model_path, device) == (MODEL, 'cpu')\n"
        "    def rerank_batch(self, requests, rank_end):\n"
        "        for request in requests:\n"
        "            assert len(request.candidates) == rank_end and request.query.text\n"
        "            request.candidates.sort(key=lambda each: each.doc['text'], reverse=True)\n"
        "        return requests\n".replace("MODEL", repr(str(encoder_dir)))
    )
    monkeypatch.syspath_prepend(package.parent)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "rank_llm"]:
        del sys.modules[name]


def test_rank_llm_orders_all_passages_of_a_question_at_once(rows, settings, tmp_path, encoder_dir, rank_llm):
    first = retrieve(rows, settings, tmp_path)
    found = retrieve(rows, replace(settings, reranker=f"rank_llm:{encoder_dir}"), tmp_path)
    for row, before in zip(found, first, strict=True):
        assert row["passages"] == sorted(before["passages"], key=lambda each: each["text"], reverse=True)
        assert row["meta"]["retrieval"]["scores"] == [0.0, -1.0, -2.0, -3.0, -4.0]


def test_a_missing_package_is_named_before_anything_is_encoded(rows, settings, tmp_path, encoder_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "rank_llm", None)
    with pytest.raises(ImportError, match="pip install rank-llm"):
        retrieve(rows, replace(settings, reranker=f"rank_llm:{encoder_dir}"), tmp_path)
    assert not (tmp_path / "embeddings").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top_k": 6}, "`top_k` is 6 and `top_n` 5"),
        ({"top_k": 0}, "at least 1"),
        ({"reranker": "org/model"}, "expected kind:model, the kind one of rank_llm, cross_encoder"),
        ({"reranker": "cross_encoder:"}, "expected kind:model"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(settings, **changes)


@pytest.mark.parametrize("role", ["retriever", "re-ranker"])
def test_a_model_that_is_not_there_is_named_with_how_to_get_it(rows, settings, tmp_path, role):
    name = "facebook/contriever" if role == "retriever" else "missing/re-ranker"
    changes = {"retriever": name} if role == "retriever" else {"reranker": f"cross_encoder:{name}"}
    with pytest.raises(OSError, match=f"The {role} `{name}` is not on this machine.*hf download {name}"):
        retrieve(rows, replace(settings, **changes), tmp_path)


def test_an_empty_corpus_and_an_empty_question_are_refused(rows, settings, tmp_path):
    empty = write_corpus(tmp_path / "empty.jsonl", [{"title": "T", "text": ""}])
    with pytest.raises(ValueError, match="empty.jsonl has no passage with a text"):
        retrieve(rows, replace(settings, corpus=empty), tmp_path)
    rows[1]["question"] = " "
    with pytest.raises(ValueError, match="1 rows have no question to retrieve for, first 'row-1'"):
        retrieve(rows, settings, tmp_path)


def test_recall_looks_for_a_gold_in_the_text_of_the_first_passages():
    texts = ["Nobody knew.", "In TORONTO it was.", "The Beatles, live!"]
    passages = [{"title": "Ada", "text": text} for text in texts]
    golds = [["Toronto"], ["Ada"], ["the", "Beatles live"], ["nobody"]]
    rows = [{"id": "a", "answers": each, "passages": passages} for each in golds]
    rows.append({"id": "b", "answers": ["Toronto"], "passages": []})
    found = {k: recall_at_k(rows, k) for k in (1, 2, 20)}
    assert found == {1: [0, 0, 0, 1, 0], 2: [1, 0, 0, 1, 0], 20: [1, 0, 1, 1, 0]}


def test_the_command_writes_rows_and_prints_recall(rows, settings, tmp_path):
    rows[0]["answers"], rows[1]["answers"], rows[2]["answers"] = ["Ada"], ["the"], ["absent"]
    app = typer.Typer()
    app.command()(main)
    output = tmp_path / "out" / "found.jsonl.gz"
    options = ["--corpus", settings.corpus, "--retriever", settings.retriever, "--reranker", "none", "--top-n", "5"]
    options += ["--questions", write_rows(tmp_path / "questions.jsonl", rows), "--cache-dir", str(tmp_path / "cache")]
    result = CliRunner().invoke(app, [*options, "--top-k", "2", "--output", str(output), "-n", "3"])
    assert result.exit_code == 0, result.output
    assert read_rows(output) == json.loads(json.dumps(retrieve(rows[:3], replace(settings, top_k=2), tmp_path)))
    assert "50.0" in result.output and "[0.0, 100.0]" in result.output
    assert "2 of 3 questions have a gold" in result.output
    refused = CliRunner().invoke(app, [*options, "--top-k", "6", "--output", str(output)])
    assert isinstance(refused.exception, ValueError) and "`top_k` is 6" in str(refused.exception)
