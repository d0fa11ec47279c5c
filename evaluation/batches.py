"""What is read in batches: items of like length together, fewer at a time where memory lacks."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from .answering import Row

logger = logging.getLogger(__name__)


def longest_first(rows: Sequence[Row]) -> list[Row]:
    """Rows by the length of their passages: those of like length together, and a lack of memory shows at once."""
    return sorted(rows, key=lambda row: sum(len(passage["text"]) for passage in row["passages"]), reverse=True)


def in_batches(
    items: Sequence[Any], batch_size: int, run: Callable[[Sequence[Any]], Any]
) -> Iterator[tuple[Sequence[Any], Any]]:
    """
    Args:
        items (`Sequence`): Taken in their order.
        batch_size (`int`): How many at a time; halved, from then on, when memory lacks.
        run (`Callable`): What is done with a batch.

    Returns:
        `Iterator`: Each batch and what `run` found.
    """
    done = 0
    while done < len(items):
        batch = items[done : done + batch_size]
        try:
            found = run(batch)
        except (RuntimeError, MemoryError) as error:
            if len(batch) == 1 or not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
                raise
        else:
            yield batch, found
            done += len(batch)
            continue
        # Behind the `except`, where nothing holds the tensors of the failed batch any more.
        batch_size = len(batch) // 2
        logger.warning("out of memory: going on with batches of %d", batch_size)
        clear_device_cache(garbage_collection=True)
