"""The order of the training rows: the same in all processes, and again after a broken run."""

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """
    A sampler whose order follows from a seed and the number of the epoch, and from nothing else.

    transformers' own draw it from the global generator. Dropout moves that differently in each process, so that from
    the second epoch on they would read different orders, some rows twice and others never; and a run that goes on in
    the second epoch would read another order than the one it left.

    Args:
        sampler (`Sampler`): With a `generator` attribute that it draws from, as torch's and transformers' have.
        seed (`int`): Of the run.
        epoch (`Callable`): Gives the number of the epoch that begins.
    """

    def __init__(self, sampler: Sampler[int], seed: int, epoch: Callable[[], int]):
        self.sampler = sampler
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch())
        return iter(self.sampler)
