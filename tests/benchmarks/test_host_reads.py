"""Counting reads of the host: each operator that must read, none that need not, and the line that asked."""

import warnings

import pytest
import torch

from arcaligner.benchmarks.host_reads import Read, ReadCounter, asked_by, waits_on_cuda
from arcaligner.benchmarks.prompts import Ids

VALUES = torch.tensor([3, 0, 2])
MASK = VALUES > 0


def count(run) -> dict[str, int]:
    """Operators read by, and how often."""
    with torch.no_grad(), ReadCounter() as counter:
        run()
    return {read.operator: times for read, times in counter.found.items()}


@pytest.mark.parametrize(
    ("operator", "run"),
    [
        ("_local_scalar_dense", lambda: bool(MASK.any())),
        ("_local_scalar_dense", lambda: int(VALUES.max())),
        ("_local_scalar_dense", lambda: VALUES[0].item()),
        ("nonzero", lambda: MASK.nonzero()),
        ("masked_select", lambda: VALUES.masked_select(MASK)),
        ("index", lambda: VALUES[MASK]),
        ("index_put_", lambda: VALUES.clone().index_put_((MASK,), torch.tensor([1, 2]))),
        ("repeat_interleave", lambda: VALUES.repeat_interleave(VALUES)),
        ("_unique2", lambda: VALUES.unique()),
        ("unique_consecutive", lambda: VALUES.unique_consecutive()),
        ("equal", lambda: torch.equal(VALUES, VALUES)),
        ("tolist", lambda: VALUES.tolist()),
        ("numpy", lambda: VALUES.numpy()),
        ("cpu", lambda: VALUES.cpu()),
    ],
)
def test_a_read_is_counted_once(operator, run):
    assert count(run) == {operator: 1}


@pytest.mark.parametrize(
    "run",
    [
        lambda: VALUES[VALUES.clamp(max=2)],
        lambda: torch.where(MASK, VALUES, -1),
        lambda: VALUES.masked_fill(MASK, 7),
        lambda: VALUES.clone().index_put_((MASK,), torch.tensor(7)),
        lambda: VALUES.repeat_interleave(VALUES, output_size=5),
        lambda: VALUES.index_select(0, VALUES.clamp(max=2)),
        lambda: VALUES.to(torch.float32).clone().copy_(VALUES),
        lambda: VALUES.shape[0] + VALUES.numel(),
    ],
)
def test_what_stays_on_the_device_is_no_read(run):
    assert count(run) == {}


def test_each_mask_of_an_index_is_read():
    square = torch.zeros(3, 3)
    assert count(lambda: square[MASK, MASK]) == {"index": 2}


def test_the_line_is_the_innermost_of_ours():
    ids = Ids(VALUES[None], MASK[None].long())
    with torch.no_grad(), ReadCounter() as counter:
        assert ids.lengths == [2]
    ((read, times),) = counter.found.items()
    assert times == 1 and read.line.startswith("benchmarks.prompts:") and read.line.endswith(" lengths")
    assert read.source == "return self.attention_mask.sum(dim=1).tolist()"


def test_a_read_of_nobodys_is_noted_too():
    assert asked_by("nonzero") == Read("nonzero", "elsewhere", "")


def test_what_runs_outside_is_not_counted():
    with ReadCounter() as counter:
        pass
    VALUES.tolist()
    bool(MASK.any())
    assert not counter.found


def test_the_waits_of_cuda_are_its_warnings_and_its_mode_is_put_back(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with waits_on_cuda() as found:
        for message in ("called a synchronizing CUDA operation (Triggered internally)",) * 2 + ("another",):
            warnings.warn(message, stacklevel=1)
    assert dict(found) == {Read("cuda", "elsewhere", ""): 2} and modes == ["warn", 0]
