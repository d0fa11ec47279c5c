"""The host waits for the device once per forward to find the slots, and never for a decoded token."""

from contextlib import ExitStack

import torch
from tiny_models import backbone_config, collate, random_rows, tiny_aligner
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from arcaligner import modeling_arcaligner
from arcaligner.benchmarks.arms import base_of, read, share

aten = torch.ops.aten
OPERATORS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2}
METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__)  # no operator on a CPU


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in OPERATORS
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in METHODS
        return func(*args, **(kwargs or {}))


def waits(run) -> int:
    """How often `run` has to know a value, or a shape that values decide."""
    operators, methods = _Operators(), _Methods()
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(methods)
        stack.enter_context(operators)
        run()
    return operators.count + methods.count


def test_slots_are_found_with_one_wait_for_all_layers_and_a_decoded_token_needs_none(monkeypatch):
    monkeypatch.setattr(modeling_arcaligner, "check_ids", lambda *_: None)  # looks at ids on the CPU alone
    aligner = tiny_aligner(backbone_config("llama", num_hidden_layers=9), dtype=torch.float32)
    base = base_of(aligner, torch.float32, "cpu")
    batch = collate(random_rows(aligner, [3], contiguous=True))
    ids, positions = batch["input_ids"], batch["position_ids"]

    def read_slots():
        return read(aligner, ids, positions, gate_mode="off", context_embeds=batch["context_embeds"])

    assert 0 <= waits(read_slots) - waits(lambda: read(base, ids.clamp(max=5), positions)) <= 1
    found = read_slots()
    new, cache = (found.token[:, None], positions[:, -1:] + 1), share(found.cache)
    decoded = waits(lambda: read(aligner, *new, found.cache, is_generated=True))
    assert decoded <= waits(lambda: read(base, *new, cache))
