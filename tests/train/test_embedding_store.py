"""The store encodes a text once, finds it again later, and never mixes two encoders."""

import errno
import hashlib
import os
import signal
import subprocess
import sys

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


def test_another_setting_of_the_encoder_is_refused(tmp_path, encoder):
    settings = {"max_seq_length": 64, "prompt": None}
    EmbeddingStore(tmp_path, "org/encoder", WIDTH, encoder, settings).add(["one"])
    assert len(EmbeddingStore(tmp_path, "org/encoder", WIDTH, encoder, dict(settings))) == 1
    with pytest.raises(ValueError, match="other settings: `max_seq_length` is 32, in the store 64. Delete the folder"):
        EmbeddingStore(tmp_path, "org/encoder", WIDTH, encoder, settings | {"max_seq_length": 32})


def test_a_store_without_settings_is_read(tmp_path, encoder):
    open_store(tmp_path, encoder).add(["one"])
    assert len(EmbeddingStore(tmp_path, "org/encoder", WIDTH, encoder, {"max_seq_length": 64})) == 1


# A process that writes four texts, two a part, and is killed before its n-th file gets its name.
KILLED = """
import os, signal, sys
import numpy as np
from arcaligner.train import embedding_store
folder, survived = sys.argv[1], int(sys.argv[2])
rename, calls = os.replace, []
def replace(source, target):
    calls.append(target)
    if len(calls) > survived:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
embedding_store.os.replace = replace
embedding_store.TEXTS_PER_PART = 2
encode = lambda texts: np.array([[float(len(text))] * 6 for text in texts])
embedding_store.EmbeddingStore(folder, "org/encoder", 6, encode).add(["xxxx", "xxx", "xx", "x"])
"""


@pytest.mark.parametrize("survived, kept", [(0, []), (2, []), (3, ["xxxx", "xxx"]), (4, ["xxxx", "xxx"])])
def test_a_killed_process_leaves_a_store_that_reads(tmp_path, survived, kept):
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(survived)])
    assert process.returncode == -signal.SIGKILL
    asked = []

    def encode(texts):
        asked.extend(texts)
        return np.array([[float(len(text))] * WIDTH for text in texts])

    store = EmbeddingStore(tmp_path, "org/encoder", WIDTH, encode)
    assert len(store) == len(kept)
    asked.clear()
    texts = ["x", "xx", "xxx", "xxxx"]
    rows = store.add(texts)
    assert set(asked) == set(texts) - set(kept)
    np.testing.assert_array_equal(store[rows][:, 0], [1.0, 2.0, 3.0, 4.0])


def test_a_full_disk_leaves_the_parts_written_before(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(embedding_store, "TEXTS_PER_PART", 2)
    store = open_store(tmp_path, encoder)
    save, saved = np.save, []

    def fill_up(file, array):
        saved.append(array)
        if len(saved) > 2:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, array)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", fill_up)
        with pytest.raises(OSError, match="No space left"):
            store.add(["xxxx", "xxx", "xx", "x"])
    assert not list(store.folder.glob("*.tmp"))
    reopened = open_store(tmp_path, encoder)
    assert len(reopened) == 2
    reopened.add(["xxxx", "xxx", "xx", "x"])
    assert encoder.texts == ["xx", "x"]


def test_what_killed_processes_left_goes_after_a_day(tmp_path, encoder):
    folder = open_store(tmp_path, encoder).folder
    old, new = folder / "old.tmp", folder / "new.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    open_store(tmp_path, encoder)
    assert not old.exists() and new.exists()


def test_a_part_that_cannot_be_read_is_named(tmp_path, encoder):
    store = open_store(tmp_path, encoder)
    store.add(["one"])
    path = next(store.folder.glob("*.keys.npy"))
    path.with_name(path.name.replace(".keys", "")).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{path} or the file of its embeddings cannot be read.*Delete both"):
        open_store(tmp_path, encoder)
