"""Shared parts of the collators: the compression of a batch, the encoder's inputs, the tokens of slots."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..common.files import stable_number
from ..encoder_arcaligner import EncoderInputs, EncoderTokenizer
from ..segmentation_arcaligner import run_ends


def drawn_rate(row_ids: Sequence[str], rates: Sequence[int | str]) -> int | str:
    """Draw the tokens per slot of a batch, the same for all rows, so that they have similar lengths. The ids of the
    rows decide it, so a resumed run needs no generator state."""
    return rates[stable_number("rate:" + ":".join(row_ids), len(rates))]


def padded(rows: Sequence[Sequence[int]], value: int, side: str = "right") -> torch.LongTensor:
    """Pad lists to the rows of a tensor (rows, longest), with `value` on one `side`."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    filled = np.full((len(rows), lengths.max()), value)
    is_own = np.arange(filled.shape[1]) < lengths[:, None]
    filled[is_own if side == "right" else is_own[:, ::-1]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return torch.from_numpy(filled)


def encoder_inputs(
    tokenizer: EncoderTokenizer,
    segments: Sequence[dict[str, Any]],
    rate: int | str,
    places: torch.LongTensor,
    num_places: int,
) -> EncoderInputs:
    """Encoder inputs of segments, whose slots go to the `places` (num_slots,) among `num_places`."""
    texts, starts = ([segment[name] for segment in segments] for name in ("encoder_text", "encoder_start"))
    ends = None
    if rate != "segment":
        ends = [run_ends(segment["encoder_start"], segment["word_ends"], rate) for segment in segments]
    return tokenizer(texts, starts, ends).placed(places, num_places)


def placed_words(words: list[list[int]], places: torch.LongTensor, shape: Sequence[int]) -> torch.LongTensor:
    """The word ids of each slot at its place, (*shape, max_words), -1 elsewhere; `shape` (rows, max_slots)."""
    own = padded(words, -1)  # (num_slots, max_words)
    placed = torch.full((shape[0] * shape[1], own.shape[1]), -1)
    placed[places] = own
    return placed.view(*shape, -1)
