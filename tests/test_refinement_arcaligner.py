"""Where the slots of a batch are, found on the host, against a plain loop over tokens."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from arcaligner.slot_rows_arcaligner import find_slot_rows, to_numpy_in_one_sync

PADDING, TEXT, SLOT = range(3)
kinds = arrays(np.int64, array_shapes(min_dims=2, max_dims=2, max_side=7), elements=st.sampled_from([0, 1, 2]))


def packed(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.long).view(len(rows), width)


@given(kinds, st.integers(0, 2))
def test_rows_are_those_that_a_loop_over_tokens_finds(kind, spare):
    slots = [[place for place, token in enumerate(row) if token == SLOT] for row in kind]
    texts = [
        [place for place, token in enumerate(row) if token == TEXT and place < max(own, default=-1)]
        for row, own in zip(kind, slots, strict=True)
    ]
    max_slots = max(map(len, slots)) + spare
    found = find_slot_rows(kind == SLOT, kind == TEXT, max_slots, torch.device("cpu"))
    assert torch.equal(found.slot_positions, packed(slots, max_slots))
    assert torch.equal(found.text_positions, packed(texts, max(map(len, texts))))
    flat = [row * kind.shape[1] + place for row, own in enumerate(slots) for place in own]
    assert found.slot_rows.tolist() == flat
    cells = [row * max_slots + cell for row, own in enumerate(slots) for cell in range(len(own))]
    assert found.slot_cells.tolist() == cells
    stand_together = flat != [] and flat == list(range(flat[0], flat[-1] + 1))
    assert found.slot_span == ((flat[0], flat[-1] + 1) if stand_together else None)


def test_flags_of_any_shapes_are_read_as_they_are():
    flags = [torch.rand(*shape) > 0.5 for shape in ((2, 3), (4,), (0, 5), (1, 2, 2))]
    found = to_numpy_in_one_sync(*flags)
    assert [each.shape for each in found] == [tuple(each.shape) for each in flags]
    assert all(np.array_equal(each, flag.numpy()) for each, flag in zip(found, flags, strict=True))
