"""The collator pads text on the left, embeddings at the end, and refuses rows that lost a slot."""

import numpy as np
import pytest
import torch

from arcaligner.train.collator import ContextCollator
from arcaligner.train.embedding_store import EmbeddingStore

SLOT, PAD = 99, 7


@pytest.fixture
def collator(tmp_path):
    def encode(texts):
        return np.array([[len(text), 0.5] for text in texts], dtype=np.float32)

    store = EmbeddingStore(tmp_path, "length", 2, encode)
    assert store.add(["a", "bb", "ccc"]).tolist() == [2, 1, 0]
    return ContextCollator(store, context_token_id=SLOT, pad_token_id=PAD)


def test_a_batch_is_padded_and_has_its_embeddings(collator):
    batch = collator(
        [
            {
                "row_id": "x",
                "input_ids": [1, SLOT, 2],
                "labels": [-100, -100, 2],
                "segment_rows": [2],
            },
            {
                "row_id": "y",
                "input_ids": [1, SLOT, SLOT, 3, 4],
                "labels": [-100, -100, -100, 3, 4],
                "segment_rows": [0, 1],
            },
        ]
    )
    assert batch.pop("row_ids") == ["x", "y"]
    expected = {
        "input_ids": torch.tensor([[PAD, PAD, 1, SLOT, 2], [1, SLOT, SLOT, 3, 4]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "labels": torch.tensor([[-100, -100, -100, -100, 2], [-100, -100, -100, 3, 4]]),
        "context_embeds": torch.tensor([[[1.0, 0.5], [0.0, 0.0]], [[3.0, 0.5], [2.0, 0.5]]]),
    }
    torch.testing.assert_close(batch, expected, rtol=0, atol=0)


def test_slots_and_segments_that_disagree_are_refused(collator):
    row = {"row_id": "cut", "input_ids": [1, SLOT], "labels": [-100, 1], "segment_rows": [0, 1]}
    with pytest.raises(ValueError, match="Row cut has 1 context tokens but 2 segments"):
        collator([row])
