"""Rows of the training set to a padded batch, the embeddings of their slots read from the store."""

from dataclasses import dataclass
from typing import Any

import torch

from .embedding_store import EmbeddingStore


def labelled_columns(labels: torch.Tensor) -> int:
    """Columns of `labels` (batch, seq_len) from the first one with a label on, and the one whose logits predict it."""
    return labels.shape[1] - int((labels != -100).any(dim=0).int().argmax()) + 1


@dataclass
class ContextCollator:
    """
    Pads rows of `data.build_dataset` and adds the embeddings of their slots. Text is padded on the
    left, so that the targets of a batch end together and the language model's head is needed for
    few positions.

    Args:
        store ([`EmbeddingStore`]): Where the rows' `segment_rows` point to.
        context_token_id (`int`): The id that marks a slot.
        pad_token_id (`int`): Fills `input_ids`; padding is masked and has no label.

    Returns a dictionary of

    - `input_ids`, `attention_mask`, `labels`: `torch.LongTensor` (batch, seq_len), labels -100
      where nothing is learned;
    - `context_embeds`: `torch.FloatTensor` (batch, max_slots,
      encoder_hidden_size), rows padded with zeros at the end;
    - `row_ids`: `list[str]`, to name a batch that goes wrong.

    Raises:
        `ValueError`: a row whose context tokens and segments differ in number.
    """

    store: EmbeddingStore
    context_token_id: int
    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch, seq_len = len(rows), max(len(row["input_ids"]) for row in rows)
        max_slots = max(len(row["segment_rows"]) for row in rows)
        input_ids = torch.full((batch, seq_len), self.pad_token_id)
        attention_mask = torch.zeros((batch, seq_len), dtype=torch.long)
        labels = torch.full((batch, seq_len), -100)
        context_embeds = torch.zeros(batch, max_slots, self.store.encoder_hidden_size)
        for index, row in enumerate(rows):
            length, num_slots = len(row["input_ids"]), len(row["segment_rows"])
            num_context_tokens = row["input_ids"].count(self.context_token_id)
            if num_context_tokens != num_slots:
                raise ValueError(
                    f"Row {row['row_id']} has {num_context_tokens} context tokens but {num_slots} "
                    "segments. Build rows with `data.build_dataset`; nothing may truncate them."
                )
            input_ids[index, seq_len - length :] = torch.tensor(row["input_ids"])
            attention_mask[index, seq_len - length :] = 1
            labels[index, seq_len - length :] = torch.tensor(row["labels"])
            embeddings = self.store[row["segment_rows"]]  # (num_slots, encoder_hidden_size)
            context_embeds[index, :num_slots] = torch.from_numpy(embeddings)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "context_embeds": context_embeds,
            "row_ids": [row["row_id"] for row in rows],
        }
