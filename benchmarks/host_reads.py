"""What makes the host wait for the device: reads of a value, or of a shape that values decide, and who asked for them.

Launches of kernels are queued, and a read waits until all that was queued is done. `ReadCounter` counts on any device
the operators that must read; `waits_on_cuda` hears of every wait from CUDA itself, copies to the device among them.
"""

import linecache
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ALWAYS_READ = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.bincount,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# Of a tensor on a CPU these read memory without an operator; of another they copy, which is an operator.
PYTHON_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__)
PACKAGES = (__name__.split(".")[0], "transformers")
_CUDA_WAITS = "called a synchronizing CUDA operation"


class Read(NamedTuple):
    """A read of the host's: the operator and the innermost line of ours or of transformers that led to it."""

    operator: str
    line: str  # module:line function
    source: str


class ReadCounter(TorchDispatchMode):
    """Inside, `found` counts reads. Enter with gradients off, as `generate` and the benchmarks run."""

    def __init__(self):
        super().__init__()
        self.found: Counter[Read] = Counter()
        self._python = _PythonReads(self.found)

    def __enter__(self):
        self._python.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._python.__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if times := _reads(func, args, kwargs, result):
            self.found[asked_by(func.overloadpacket.__name__)] += times
        return result


class _PythonReads(TorchFunctionMode):
    """Counts what reaches no operator."""

    def __init__(self, found: Counter[Read]):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in PYTHON_READS and args[0].device.type == "cpu":
            self.found[asked_by(func.__name__)] += 1
        return func(*args, **(kwargs or {}))


def _reads(func, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """How many values or shapes the operator had to bring to the host."""
    packet = func.overloadpacket
    if packet in ALWAYS_READ:
        return 1
    if packet in INDEXING:
        return _masks_read(packet, args, kwargs)
    if packet is aten.repeat_interleave:
        return int(kwargs.get("output_size") is None)
    if packet in (aten._to_copy, aten.copy_):  # a copy that the host may go on from is no read
        source = args[1] if packet is aten.copy_ else args[0]
        waits = not (kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2]))
        return int(waits and result.device.type == "cpu" and source.device.type != "cpu")
    return 0


def _masks_read(packet, args: tuple, kwargs: dict[str, Any]) -> int:
    """The masks among the indices: the places of each are found with `nonzero`, but for one that one number fills."""
    masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
    fills = packet not in (aten.index, aten._unsafe_index) and args[2].numel() == 1 and len(args[1]) == 1
    accumulates = (len(args) > 3 and args[3]) or kwargs.get("accumulate", False)
    return 0 if fills and not accumulates else len(masks)


def asked_by(operator: str) -> Read:
    """The innermost line of the stack that is ours or transformers', this file's own left out."""
    frame = sys._getframe(1)
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module.split(".")[0] in PACKAGES and code.co_filename != __file__:
            place = ".".join(module.split(".")[1:]) or Path(code.co_filename).stem
            owner = "" if module.split(".")[0] == PACKAGES[0] else "transformers."
            source = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return Read(operator, f"{owner}{place}:{frame.f_lineno} {code.co_name}", source)
        frame = frame.f_back
    return Read(operator, "elsewhere", "")


@contextmanager
def waits_on_cuda() -> Iterator[Counter[Read]]:
    """Inside, counts what CUDA says it waited for."""
    found: Counter[Read] = Counter()

    def note(message, *_args, **_kwargs) -> None:
        if _CUDA_WAITS in str(message):
            found[asked_by("cuda")] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
