"""The host waits for the device once per forward to find the slots, and never for a decoded token."""

from contextlib import ExitStack

import pytest
import torch
from tiny_models import backbone_config, collate, random_rows, tiny_aligner
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from arcaligner import modeling_arcaligner
from arcaligner.benchmarks.arms import Decoding, TokenBatch, read
from arcaligner.benchmarks.models import base_of

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


@pytest.fixture(params=[3, 9])
def found(request, monkeypatch) -> dict[str, int]:
    """The waits of prefills and of a decoded token, for models of 3 and 9 layers."""
    monkeypatch.setattr(modeling_arcaligner, "check_ids", lambda *_: None)  # looks at ids on the CPU alone
    aligner = tiny_aligner(backbone_config("llama", num_hidden_layers=request.param), dtype=torch.float32)
    base = base_of(aligner, torch.float32, "cpu")
    batch = collate(random_rows(aligner, [3, 2], contiguous=True), padding_side="left")
    ids = TokenBatch(batch["input_ids"], batch["attention_mask"])
    text = TokenBatch(ids.input_ids.clamp(max=5), ids.attention_mask)
    slots = {"context_embeds": batch["context_embeds"]}
    decoding = {}
    for name, model in (("aligner", aligner), ("base", base)):
        with torch.no_grad():
            decoding[name] = Decoding(model, ids, read(aligner, ids, gate_mode="off", **slots))
            decoding[name].restart()
    return {
        "text": waits(lambda: read(base, text)),
        "off": waits(lambda: read(aligner, ids, gate_mode="off", **slots)),
        "token of the base model": waits(decoding["base"].step),
        "token": waits(decoding["aligner"].step),
    }


def test_slots_are_found_with_one_wait_for_any_number_of_layers(found):
    assert 0 <= found["off"] - found["text"] <= 1


def test_a_decoded_token_waits_no_more_than_the_bare_base_models(found):
    assert found["token"] <= found["token of the base model"]
