"""A question finds its passages, and their stored slots are used without encoding them again."""

import shutil

import pytest
import torch
from conftest import new_processor
from training_rows import write_rows

from arcaligner import ArcAlignerProcessor
from arcaligner.apps.corpus.retrieve import Retriever
from arcaligner.apps.corpus.table import Corpus
from arcaligner.encoder_arcaligner import SlotEncoder


@pytest.mark.parametrize(("tokens_per_slot", "has_words"), [("segment", False), ("segment", True), (3, True)])
def test_retrieved_slots_equal_encoding(
    tokens_per_slot, has_words, letters, make_corpus, base_model_dir, encoder_dir, monkeypatch
):
    """Retrieved passages have the slots that encoding them gives."""
    reader = new_processor(base_model_dir, encoder_dir, context_words=has_words)
    corpus, question = (
        make_corpus(letters, by=reader, passage_tokens=36, tokens_per_slot=tokens_per_slot),
        "Who is a ski jumper?",
    )
    # The padding of an earlier call does not matter.
    reader.tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=3)
    retriever = Retriever(corpus, reader)
    with monkeypatch.context() as patched:
        patched.setattr(SlotEncoder, "encode_batch", lambda *a, **k: pytest.fail("a passage was encoded again"))
        retrieved = retriever(question, top_k=9)
    assert sorted(document["title"] for document in retrieved.documents) == ["", "", "", "Zhaparov"]
    expected = reader.encode_documents(retrieved.documents, tokens_per_slot=tokens_per_slot)
    embeds, words, ids = retrieved.encoded[1:4]
    torch.testing.assert_close(embeds, expected.context_embeds, atol=1e-3, rtol=0)
    torch.testing.assert_close((words, ids), (expected.context_word_ids, expected.context_passage_ids))
    assert retrieved.encoded.segments == expected.segments
    inputs = reader("Who?", **retrieved.inputs, return_tensors="pt")
    torch.testing.assert_close(inputs["context_embeds"][0], embeds)
    assert retrieved.seconds.keys() == {"retrieval", "slots"} and min(retrieved.seconds.values()) > 0
    query = reader.encoder.encode([question])[0]
    for number, passage in enumerate(retrieved.documents):
        text = (corpus.path.parent / passage["document"]).read_text("utf-8")
        assert passage["text"] == text[passage["start"] : passage["end"]]
        vector = torch.nn.functional.normalize(embeds[ids == number].mean(dim=0), dim=0)
        assert passage["similarity"] == pytest.approx(float(vector @ query), abs=2e-3)


def test_full_text_finds_unknown_words(corpus, processor):
    """Full-text search finds a word that the encoder does not know."""
    for word, part in (("Toronto", "district"), ("Zhaparov's", "He jumps")):  # of a text and of a title
        documents = Retriever(corpus, processor)(word, top_k=9).documents
        assert part in documents[0]["text"] and len(documents) == len(corpus)
        scores = [document["score"] for document in documents]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("question", ["the of", '"(a AND', "?", "\x00", "x" * 5000])
def test_any_question_finds_something(question, corpus, processor):
    assert len(Retriever(corpus, processor)(question, top_k=2).documents) == 2


def test_open_retriever_sees_changes(corpus, processor):
    """An open retriever sees changes of the corpus."""
    retriever = Retriever(corpus, processor)
    best = retriever("Toronto", top_k=1).documents[0]
    Corpus(corpus.path).remove([best["document"]])
    assert retriever("Toronto", top_k=1).documents[0]["document"] != best["document"]


def test_changed_slot_is_refused(corpus, processor):
    """A slot that has changed on disk is refused."""
    slots = Retriever(corpus, processor)("Toronto", top_k=1).encoded.context_embeds[0].half().numpy().tobytes()
    paths = [path for path in corpus.path.rglob("*.lance") if path.is_file() and slots in path.read_bytes()]
    assert paths
    for path in paths:
        path.write_bytes(path.read_bytes().replace(slots, bytes(8) + slots[8:]))
    with pytest.raises(OSError, match="is damaged: a passage of .*letter.txt differs from what was written"):
        Retriever(Corpus(corpus.path), processor)("Toronto", top_k=1)


def test_mistakes_are_clear(corpus, processor, make_corpus):
    retriever = Retriever(corpus, processor)
    for question, top_k, message in (
        ("", 1, "The question is empty"),
        ("Who?", 0, "`top_k` is 0; expected the number of passages to retrieve"),
        ("Who?", "2", "`top_k` is '2'; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            retriever(question, top_k)
    with pytest.raises(ValueError, match="is empty. Add documents"):
        Retriever(make_corpus(name="empty"), processor)
    shutil.rmtree(corpus.path)
    with pytest.raises(OSError, match="cannot be searched"):
        retriever("Who?")


def test_index_finds_the_same(tmp_path, processor, make_corpus, monkeypatch):
    """A large corpus has an index, and a search with it finds the same passages as one without."""
    monkeypatch.setattr("arcaligner.apps.corpus.table.MIN_INDEXED_ROWS", 300)
    words = "Toronto riding Canada Ada letter Kazakh ski jumper Parkdale sport".split()
    rows = [{"text": f"{words[n % 10]} {words[n // 10 % 10]} {words[n // 100]} {n}."} for n in range(400)]
    corpus = make_corpus(write_rows(tmp_path / "rows.jsonl", rows))
    assert {column for index in corpus.table.list_indices() for column in index.columns} >= {"vector", "text"}
    retriever = Retriever(corpus, processor)
    assert all(retriever(row["text"], 1).documents[0]["text"] == row["text"] for row in rows[:5])


def test_search_uses_the_base_encoder(tmp_path, letters, processor, make_corpus, checkpoint_dir):
    """A search uses the encoder as it was before joint training."""
    trained = ArcAlignerProcessor.from_pretrained(checkpoint_dir)
    for weight in trained.train_encoder(lora_r=2):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    trained.save_pretrained(tmp_path / "trained")
    trained = ArcAlignerProcessor.from_pretrained(tmp_path / "trained")
    corpus = make_corpus(letters, by=trained)
    rows = corpus.table.search().select(["title", "text", "vector", "slots"]).to_arrow().to_pylist()
    texts = [f"{row['title']} {row['text']}".strip() for row in rows]
    vectors = torch.tensor([row["vector"] for row in rows]).float()
    torch.testing.assert_close(vectors, processor.encoder.encode(texts), rtol=0, atol=1e-3)
    slot = torch.tensor(rows[0]["slots"][0]).float()
    assert (slot - processor.encoder.encode(texts[:1])[0]).abs().max() > 0.01
    assert Retriever(corpus, trained)(texts[0], 1).documents[0]["text"] == rows[0]["text"]
