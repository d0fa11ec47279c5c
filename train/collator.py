"""Makes a padded batch of examples, at a rate of slots drawn for the batch, and the mask of turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..encoding_arcaligner import pad_words
from ..files import stable_number
from ..segmentation_arcaligner import equal_runs


@dataclass
class ContextCollator:
    """
    Pads rows of `data.EXAMPLE_FEATURES`. A rate drawn for the batch decides how many slots they have.

    Args:
        context_token_id (`int`): The id that marks a slot.
        pad_token_id (`int`): Fills `input_ids`.
        tokens_per_slot (`Sequence`): The rates. The ids of a batch's rows choose its rate, so that a resumed run draws
            the same ones.
        context_words (`bool`): Whether the slots' words are in the batch.
        padding_side (`str`): `"left"` for prompts to generate from.

    Returns a dictionary of

    - `input_ids`, `labels`: `torch.LongTensor` (batch, seq_len), labels -100 where nothing is learned;
    - `turn_ids`: `torch.LongTensor` (batch, seq_len), 0 before the turns, slots included, 1, 2, ... in the turns, -1 in
      padding; see [`turn_mask`];
    - `max_turns`: `int`, the maximum number of turns of a row;
    - `encoder_texts`, `encoder_starts`, `encoder_ends`: what `ArcAlignerProcessor.encode_runs` takes, of all rows in
      order; `encoder_ends` is `None` where each text is one slot;
    - `num_slots`: `list[int]`, of each row;
    - `context_word_ids`: `torch.LongTensor` (batch, max_slots, max_words), with `context_words`;
    - `row_ids`: `list[str]`, for error messages.
    """

    context_token_id: int
    pad_token_id: int
    tokens_per_slot: Sequence[int | str] = ("segment",)
    context_words: bool = False
    padding_side: str = "right"

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        row_ids = [row["row_id"] for row in rows]
        rate = self.tokens_per_slot[stable_number("rate:" + ":".join(row_ids), len(self.tokens_per_slot))]
        slots = [_words_of_slots(row, rate) for row in rows]
        ids, labels, turns = [], [], []
        for row, row_slots in zip(rows, slots, strict=True):
            before = row["head"] + [self.context_token_id] * len(row_slots)
            ids.append(before + [each for turn in row["turns"] for each in turn["input_ids"]])
            labels.append([-100] * len(before) + [each for turn in row["turns"] for each in turn["labels"]])
            turns.append([0] * len(before))
            for number, turn in enumerate(row["turns"], start=1):
                turns[-1] += [number] * len(turn["input_ids"])
        segments = [segment for row in rows for segment in row["segments"]]
        batch = {
            "input_ids": _padded(ids, self.pad_token_id, self.padding_side),
            "labels": _padded(labels, -100, self.padding_side),
            "turn_ids": _padded(turns, -1, self.padding_side),
            "max_turns": max(len(row["turns"]) for row in rows),
            "encoder_texts": [segment["encoder_text"] for segment in segments],
            "encoder_starts": [segment["encoder_start"] for segment in segments],
            "encoder_ends": None if rate == "segment" else [_ends(segment, rate) for segment in segments],
            "num_slots": [len(row_slots) for row_slots in slots],
            "row_ids": row_ids,
        }
        if self.context_words:
            words = [_padded(row_slots, -1) for row_slots in slots]  # each (num_slots, max_words)
            batch["context_word_ids"] = pad_words(words)
        return batch


def turn_mask(turn_ids: torch.LongTensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.LongTensor]:
    """What each position of a batch may read, and its position: turns stand side by side behind the slots.

    Args:
        turn_ids (`torch.LongTensor` of shape `(batch, seq_len)`): From [`ContextCollator`].
        dtype (`torch.dtype`): Of the mask.

    Returns:
        The mask (batch, 1, seq_len, seq_len), 0 where a position reads another and the lowest number where not, and
        `position_ids` (batch, seq_len).
    """
    seq_len = turn_ids.shape[1]
    key, query = turn_ids[:, None, :], turn_ids[:, :, None]
    index = torch.arange(seq_len, device=turn_ids.device)
    reads = (index[None, :] <= index[:, None]) & ((key == 0) | (key == query))
    mask = torch.zeros(reads.shape, dtype=dtype, device=turn_ids.device)
    mask = mask.masked_fill(~reads, torch.finfo(dtype).min)[:, None]
    # The positions of each turn continue from the last slot.
    begins = torch.nn.functional.pad(turn_ids[:, 1:] != turn_ids[:, :-1], (1, 0))
    start_of_turn = torch.where(begins, index, 0).cummax(dim=1).values  # (batch, seq_len)
    prefix_length = (turn_ids == 0).sum(dim=1, keepdim=True)
    return mask, index - start_of_turn + torch.where(turn_ids == 0, 0, prefix_length)


def _words_of_slots(row: dict[str, Any], rate: int | str) -> list[list[int]]:
    """The words of each slot of a row."""
    return [
        segment["word_ids"][start:end]
        for segment in row["segments"]
        for start, end in equal_runs(len(segment["word_ids"]), rate)
    ]


def _ends(segment: dict[str, Any], rate: int) -> list[int]:
    """The characters of the encoder's text where the slots of a segment end."""
    ends = segment["word_ends"]
    return [segment["encoder_start"] + (ends[last - 1] if last else 0) for _, last in equal_runs(len(ends), rate)]


def _padded(rows: list[list[int]], value: int, side: str = "right") -> torch.LongTensor:
    """Lists as the rows of a tensor (rows, longest)."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
