"""The encoder of training segments: on several devices as on one, and told from others by its settings."""

import copy
import pickle

import numpy as np
import pytest

from arcaligner import ArcAlignerProcessor
from arcaligner.train import encoding
from arcaligner.train.embedding_store import EmbeddingStore
from arcaligner.train.encoding import DevicePool, encoder_settings

TEXTS = ["The riding was created in 1924.", "Ada", "", "What sport does he play? He has competed since 2003.", "Ada"]


@pytest.fixture
def own_processor(checkpoint_dir):
    """A processor with an encoder that nobody else uses."""
    processor = ArcAlignerProcessor.from_pretrained(checkpoint_dir)
    processor.encoder_device = "cpu"
    return processor


def test_several_devices_encode_as_one(own_processor, monkeypatch):
    monkeypatch.setattr(encoding, "MIN_TEXTS_OF_A_POOL", 2)
    with DevicePool(own_processor, ["cpu", "cpu"]) as encode:
        embeddings = encode(TEXTS)
        assert encode._pool is not None
    assert encode._pool is None
    expected = own_processor.encode_segments(TEXTS).numpy()
    np.testing.assert_allclose(embeddings, expected, atol=1e-6)


@pytest.mark.parametrize("devices", [[], ["cpu"], ["cpu", "cpu"]])
def test_few_texts_and_one_device_start_no_process(own_processor, devices):
    with DevicePool(own_processor, devices) as encode:
        np.testing.assert_array_equal(encode(TEXTS), own_processor.encode_segments(TEXTS).numpy())
        assert encode._pool is None


def test_settings_tell_what_the_encoder_reads(own_processor):
    assert encoder_settings(own_processor) == {
        "modules": ["Transformer", "Pooling"],
        "max_seq_length": 64,
        "prompt": None,
        "normalize_embeddings": True,
    }


@pytest.mark.parametrize(
    "change, name", [({"max_seq_length": 32}, "max_seq_length"), ({"prompt": "query: "}, "prompt")]
)
def test_a_store_refuses_its_encoder_with_other_settings(tmp_path, own_processor, change, name):
    def open_store():
        return EmbeddingStore(tmp_path, "tiny", 12, lambda texts: np.zeros((1, 12)), encoder_settings(own_processor))

    open_store()
    open_store()
    encoder = own_processor.sentence_encoder
    if name == "prompt":
        encoder.prompts["query"], encoder.default_prompt_name = change["prompt"], "query"
    else:
        encoder.max_seq_length = change["max_seq_length"]
    with pytest.raises(ValueError, match=f"other settings: `{name}` is {change[name]!r}, in the store"):
        open_store()


def test_a_process_that_cuts_passages_gets_no_encoder_weights(own_processor):
    documents = [{"title": "Ada", "text": "word " * 200 + ". It was Ada."}]
    expected = own_processor.segment_documents(documents)  # loads the encoder: the first sentence is too long for it
    sent = pickle.dumps(own_processor)
    received = pickle.loads(sent)
    assert received.segment_documents(documents) == expected
    assert received._encoder._model is None
    assert copy.deepcopy(own_processor).sentence_encoder is own_processor.sentence_encoder
