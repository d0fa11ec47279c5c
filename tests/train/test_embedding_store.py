"""The store encodes a text once, finds it again later, and never mixes two encoders."""

import hashlib

import numpy as np
import pytest

from arcaligner.train import embedding_store
from arcaligner.train.embedding_store import EmbeddingStore

WIDTH = 6


class CountingEncoder:
    """Embeddings drawn from the text's hash; remembers what it was asked for."""

    def __init__(self, shift: float = 0.0):
        self.shift = shift
        self.texts: list[str] = []

    def __call__(self, texts: list[str]) -> np.ndarray:
        self.texts += texts
        return np.stack([self.embedding(text) for text in texts])

    def embedding(self, text: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return (np.random.default_rng(seed).standard_normal(WIDTH) + self.shift).astype(np.float32)


@pytest.fixture
def encoder():
    return CountingEncoder()


def open_store(folder, encoder, name="org/encoder"):
    store = EmbeddingStore(folder, name, WIDTH, encoder)
    encoder.texts.clear()  # the probe sentence
    return store


def expected(encoder, texts):
    embeddings = np.stack([encoder.embedding(text) for text in texts])
    return embeddings.astype(np.float16).astype(np.float32)


def test_embeddings_come_back_in_the_order_asked_for(tmp_path, encoder):
    store = open_store(tmp_path, encoder)
    texts = ["short", "a much longer text", "", "short", "middle one"]
    rows = store.add(texts)
    np.testing.assert_array_equal(store[rows], expected(encoder, texts))
    assert rows[0] == rows[3]


def test_each_text_is_encoded_once_longest_first(tmp_path, encoder):
    store = open_store(tmp_path, encoder)
    store.add(["bb", "a", "dddd", "a"])
    store.add(["dddd", "ccc"])
    assert encoder.texts == ["dddd", "bb", "a", "ccc"]


def test_another_process_finds_what_is_stored(tmp_path, encoder):
    open_store(tmp_path, encoder).add(["one", "two"])
    reopened = open_store(tmp_path, encoder)
    texts = ["two", "three", "one"]
    rows = reopened.add(texts)
    assert encoder.texts == ["three"]
    np.testing.assert_array_equal(reopened[rows], expected(encoder, texts))


def test_parts_are_read_as_one_store(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(embedding_store, "TEXTS_PER_PART", 3)
    monkeypatch.setattr(embedding_store, "TEXTS_PER_STEP", 2)
    store = open_store(tmp_path, encoder)
    texts = [f"text {number}" for number in range(8)]
    rows = store.add(texts)
    assert len(store) == 8 and len(list(store.folder.glob("*.keys.npy"))) == 3
    np.testing.assert_array_equal(store[rows], expected(encoder, texts))


def test_an_interrupted_run_keeps_finished_parts(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(embedding_store, "TEXTS_PER_PART", 2)

    def stop_at_short(texts):
        if "x" in texts:
            raise KeyboardInterrupt
        return encoder(texts)

    store = open_store(tmp_path, encoder)
    store._encode = stop_at_short
    with pytest.raises(KeyboardInterrupt):
        store.add(["xxxx", "xxx", "xx", "x"])
    encoder.texts.clear()
    open_store(tmp_path, encoder).add(["xxxx", "xxx", "xx", "x"])
    assert encoder.texts == ["xx", "x"]
    assert not list(store.folder.glob("*.tmp"))


def test_a_part_without_its_keys_is_not_read(tmp_path, encoder):
    store = open_store(tmp_path, encoder)
    store.add(["one"])
    next(store.folder.glob("*.keys.npy")).unlink()
    assert len(open_store(tmp_path, encoder)) == 0


def test_another_encoder_of_the_same_name_is_refused(tmp_path, encoder):
    open_store(tmp_path, encoder).add(["one"])
    with pytest.raises(ValueError, match="another encoder named org/encoder"):
        open_store(tmp_path, CountingEncoder(shift=1.0))


def test_stores_of_two_encoders_do_not_meet(tmp_path, encoder):
    open_store(tmp_path, encoder).add(["one"])
    other = CountingEncoder(shift=1.0)
    store = open_store(tmp_path, other, name="org/other")
    np.testing.assert_array_equal(store[store.add(["one"])], expected(other, ["one"]))


def test_nan_and_wrong_width_are_refused_before_anything_is_written(tmp_path, encoder):
    store = open_store(tmp_path, encoder)
    store._encode = lambda texts: np.full((len(texts), WIDTH), np.nan)
    with pytest.raises(ValueError, match="NaN or infinite values, first for the segment 'one'"):
        store.add(["one"])
    store._encode = lambda texts: np.zeros((len(texts), WIDTH + 1))
    with pytest.raises(ValueError, match="encoder_hidden_size"):
        store.add(["one"])
    assert not list(store.folder.glob("*.npy"))
