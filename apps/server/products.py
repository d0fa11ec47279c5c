"""Faster products of matrices in float32 on CPUs that MKL has no fast ones for.

PyTorch multiplies float32 by MKL, which uses half of the width of the vector units of CPUs other than Intel's. oneDNN,
which PyTorch has for its own layout of tensors, uses all of it: 230 GFLOP/s on a core of an AMD EPYC with AVX-512 and
240 rows, and MKL 105. The results differ by the rounding of another order of additions.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

# With fewer rows, as in the tokens of short batches, copies to oneDNN's layout take what its products save.
LEAST_ROWS = 16


class OneDnnProducts(TorchFunctionMode):
    """Inside, linear layers multiply float32 by oneDNN, in this thread."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear and not kwargs and _is_large(*args):
            return function(args[0].to_mkldnn(), *args[1:]).to_dense()
        return function(*args, **(kwargs or {}))


def _is_large(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    is_plain = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    return is_plain and x.numel() >= LEAST_ROWS * x.shape[-1] and not torch.is_grad_enabled()


def has_slow_mkl() -> bool:
    """Whether PyTorch multiplies by MKL on an x86 CPU that is not Intel's and has AVX-512."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    is_wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return is_wide and cpuinfo.exists() and "GenuineIntel" not in cpuinfo.read_text()


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """Inside, linear layers of this thread multiply by what is fastest on this CPU. A decorator, too."""
    with OneDnnProducts() if has_slow_mkl() else contextlib.nullcontext():
        yield
