"""Which examples form a batch, and the shared parts of the collators: the compression of a batch, the encoder's
inputs, the tokens of slots."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset, Sampler

from ..common.files import stable_number
from ..encoder_arcaligner import EncoderInputs, EncoderTokenizer
from ..segmentation_arcaligner import count_slots, equal_spans, span_ends

COMPRESSION_KEY = "tokens_per_slot"  # key that an example of a `TokenBatches` has in addition
# Number of batches that are composed together, from examples in order of length, so that they need little padding.
BATCHES_PER_POOL = 8
EXAMPLES_PER_BLOCK = 2048


class TokenBatches(Sampler[list[tuple[int, int | str]]]):
    """
    Composes batches of about equally many positions: the tokens per slot of a batch are drawn first, and then the batch
    gets as many examples as fit. So memory and the time of a step stay the same. A fixed number of examples would have
    several times as many positions at two tokens per slot as at one slot per sentence.

    One pass is a whole run, over the examples as often as needed, so that a resumed run only skips batches. The order
    depends on the seed alone.

    Args:
        lengths (`dict[int | str, np.ndarray]`): The positions of each example for each number of tokens per slot, from
            [`example_lengths`].
        compressions (`Sequence`): Tokens per slot to draw from; an entry that is listed twice is drawn twice as often.
        batch_tokens (`int`): Maximum number of positions of a batch, padding included.
        num_batches (`int`): Batches of the run.
        seed (`int`): The run's seed.

    Yields lists of pairs for [`ExamplesWithCompression`]: the number of an example, and the tokens per slot of the
    batch.
    """

    def __init__(
        self,
        lengths: dict[int | str, np.ndarray],
        compressions: Sequence[int | str],
        batch_tokens: int,
        num_batches: int,
        seed: int,
    ):
        longest = max(int(sizes.max()) for sizes in lengths.values())
        if longest > batch_tokens:
            raise ValueError(
                f"`batch_tokens` is {batch_tokens}, but the longest example has {longest} positions (tokens and "
                f"slots). Raise `batch_tokens` to at least {longest}, or lower `max_tokens` to leave out long examples."
            )
        self.lengths, self.compressions, self.batch_tokens = lengths, compressions, batch_tokens
        self.num_batches, self.seed = num_batches, seed

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[tuple[int, int | str]]]:
        draw, num_left = np.random.default_rng(self.seed), self.num_batches
        num_examples = len(self.lengths[self.compressions[0]])
        waiting = np.empty(0, dtype=np.int64)
        while num_left:
            tokens_per_slot = self.compressions[draw.integers(len(self.compressions))]
            sizes = self.lengths[tokens_per_slot]
            while sizes[waiting].sum() < BATCHES_PER_POOL * self.batch_tokens:
                waiting = np.concatenate([waiting, draw.permutation(num_examples)])
            num_pooled = int(np.searchsorted(sizes[waiting].cumsum(), BATCHES_PER_POOL * self.batch_tokens)) + 1
            batches, rest = self._compose(waiting[:num_pooled], sizes, is_descending=draw.random() < 0.5)
            waiting = np.concatenate([rest, waiting[num_pooled:]])
            for number in draw.permutation(len(batches))[:num_left]:
                yield [(example, tokens_per_slot) for example in batches[number]]
            num_left = max(0, num_left - len(batches))

    def _compose(self, pool: np.ndarray, sizes: np.ndarray, is_descending: bool) -> tuple[list[list[int]], np.ndarray]:
        """Batches of a pool of examples in order of length, and the examples that do not fill one: they wait for the
        next pool. Either the longest ones wait or the shortest, so that each gets its turn."""
        order = pool[np.argsort(-sizes[pool] if is_descending else sizes[pool], kind="stable")]
        batches, start = [], 0
        for end in range(1, len(order) + 1):
            if (end - start) * sizes[order[start:end]].max() > self.batch_tokens:
                batches.append(order[start : end - 1].tolist())
                start = end - 1
        return batches, order[start:]


class ExamplesWithCompression(Dataset):
    """Examples for a [`TokenBatches`]: a key is the number of an example and the tokens per slot of its batch."""

    def __init__(self, examples: datasets.Dataset):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitems__(self, keys: Sequence[tuple[int, int | str]]) -> list[dict[str, Any]]:
        examples = self.examples.__getitems__([number for number, _ in keys])
        return [
            example | {COMPRESSION_KEY: tokens_per_slot}
            for example, (_, tokens_per_slot) in zip(examples, keys, strict=True)
        ]


def example_lengths(examples: datasets.Dataset, compressions: Sequence[int | str]) -> dict[int | str, np.ndarray]:
    """The positions of each example for each number of tokens per slot: the beginning of its prompt, its slots, and its
    turns, each (num_examples,)."""
    lengths: dict[int | str, list[np.ndarray]] = {tokens_per_slot: [] for tokens_per_slot in compressions}
    columns = examples.select_columns(["head", "turns", "segments"]).with_format("arrow")
    for table in columns.iter(EXAMPLES_PER_BLOCK):
        head, turns, segments = (table[name].combine_chunks() for name in ("head", "turns", "segments"))
        num_text_tokens = _numpy(pc.list_value_length(head)) + _sums(turns, "input_ids")
        owners, num_tokens = _list_lengths(segments, "word_ids")
        for tokens_per_slot, blocks in lengths.items():
            slots = np.bincount(owners, weights=count_slots(num_tokens, tokens_per_slot), minlength=len(table))
            blocks.append(num_text_tokens + slots.astype(np.int64))
    return {tokens_per_slot: np.concatenate(blocks) for tokens_per_slot, blocks in lengths.items()}


def _list_lengths(structs, field: str) -> tuple[np.ndarray, np.ndarray]:
    """For lists of structs whose `field` is a list: the row that each struct belongs to, and the length of its list."""
    return _numpy(pc.list_parent_indices(structs)), _numpy(pc.list_value_length(structs.flatten().field(field)))


def _sums(structs, field: str) -> np.ndarray:
    owners, sizes = _list_lengths(structs, field)
    return np.bincount(owners, weights=sizes, minlength=len(structs)).astype(np.int64)


def _numpy(array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False).astype(np.int64)


def drawn_tokens_per_slot(rows: Sequence[dict[str, Any]], compressions: Sequence[int | str]) -> int | str:
    """The tokens per slot of a batch, the same for all rows, so that they have similar lengths. A [`TokenBatches`] has
    drawn them already. Without one, they depend on the ids of the rows, so that a resumed run needs no state of a
    random generator."""
    if COMPRESSION_KEY in rows[0]:
        return rows[0][COMPRESSION_KEY]
    return compressions[stable_number("rate:" + ":".join(row["row_id"] for row in rows), len(compressions))]


def padded(rows: Sequence[Sequence[int]], value: int, side: str = "right") -> torch.LongTensor:
    """Lists of numbers as a tensor (rows, longest), padded with `value` on one `side`."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    filled = np.full((len(rows), lengths.max()), value)
    is_filled = np.arange(filled.shape[1]) < lengths[:, None]
    filled[is_filled if side == "right" else is_filled[:, ::-1]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return torch.from_numpy(filled)


def encoder_inputs(
    tokenizer: EncoderTokenizer,
    segments: Sequence[dict[str, Any]],
    tokens_per_slot: int | str,
    slot_indices: torch.LongTensor,
    num_indices: int,
) -> EncoderInputs:
    """Encoder inputs of segments, whose slots go to the `slot_indices` (num_slots,) among `num_indices`."""
    texts, starts = ([segment[name] for segment in segments] for name in ("encoder_text", "encoder_start"))
    ends = None
    if tokens_per_slot != "segment":
        ends = []
        for segment in segments:
            spans = equal_spans(len(segment["word_ends"]), tokens_per_slot)
            ends.append(span_ends(segment["encoder_start"], segment["word_ends"], spans))
    return tokenizer(texts, starts, ends).placed(slot_indices, num_indices)


def placed_words(words: list[list[int]], slot_indices: torch.LongTensor, shape: Sequence[int]) -> torch.LongTensor:
    """The word ids of each slot at its place, (*shape, max_words), -1 elsewhere; `shape` (rows, max_slots)."""
    word_ids = padded(words, -1)  # (num_slots, max_words)
    placed = torch.full((shape[0] * shape[1], word_ids.shape[1]), -1)
    placed[slot_indices] = word_ids
    return placed.view(*shape, -1)
