"""Batches of like length, and what becomes of them when memory lacks."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_rows import question_rows

from arcaligner.evaluation.batches import in_batches, longest_first


def test_rows_come_once_each_the_longest_first():
    rows = question_rows(7)
    found = longest_first(rows)
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows)
    lengths = [len(row["passages"][0]["text"]) for row in found]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 1


@given(st.lists(st.integers()), st.integers(1, 9))
def test_each_item_is_run_once_in_order(items, batch_size):
    found = list(in_batches(items, batch_size, lambda batch: [-item for item in batch]))
    assert [item for batch, _ in found for item in batch] == items
    assert [item for _, results in found for item in results] == [-item for item in items]
    assert all(len(batch) == batch_size for batch, _ in found[:-1])


def short_of_memory(error, sizes, most=2):
    """Does what it is asked for batches of `most` items alone."""

    def run(batch):
        sizes.append(len(batch))
        if len(batch) > most:
            raise error
        return list(batch)

    return run


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_a_lack_of_memory_halves_the_batch_and_goes_on(error, caplog):
    sizes, items = [], list(range(9))
    found = list(in_batches(items, 8, short_of_memory(error, sizes)))
    assert sizes == [8, 4, 2, 2, 2, 2, 1]
    assert [item for _, results in found for item in results] == items
    assert "going on with batches of 2" in caplog.text


def test_the_failed_batch_is_let_go_before_the_next():
    alive = []

    def run(batch):
        assert not any(tensor() is not None for tensor in alive)
        tensor = torch.empty(len(batch))
        alive.append(weakref.ref(tensor))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert len(list(in_batches(range(3), 4, run))) == 3


def test_other_errors_are_raised():
    with pytest.raises(RuntimeError, match="a bug"):
        list(in_batches(range(4), 4, short_of_memory(RuntimeError("a bug"), [])))


def test_a_lack_of_memory_for_one_item_is_raised():
    with pytest.raises(torch.OutOfMemoryError):
        list(in_batches(range(4), 4, short_of_memory(torch.OutOfMemoryError("CUDA out of memory."), [], most=0)))
