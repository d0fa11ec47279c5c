"""Products by oneDNN are those of PyTorch, and only large ones of plain float32 go there."""

import pytest
import torch
from torch.nn.functional import linear

from arcaligner.apps.server import products
from arcaligner.apps.server.products import LEAST_ROWS, OneDnnProducts, fast_products

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


@pytest.fixture
def layouts(monkeypatch):
    """The shapes of tensors that were given to oneDNN."""
    found, convert = [], torch.Tensor.to_mkldnn
    monkeypatch.setattr(torch.Tensor, "to_mkldnn", lambda x: found.append(tuple(x.shape)) or convert(x))
    return found


@needs_onednn
@pytest.mark.parametrize("shape", [(LEAST_ROWS, 64), (2, 40, 64)])
@torch.inference_mode()
def test_products_equal_pytorch(shape, layouts):
    x, weight, bias = random(*shape), random(96, 64), random(96)
    for own in (None, bias):
        with OneDnnProducts():
            found = linear(x, weight, own)
        expected = linear(x.double(), weight.double(), None if own is None else own.double())
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)
    assert layouts == [shape, shape]


@needs_onednn
def test_other_products_stay(layouts):
    """Of few rows, in other precisions, and with gradients."""
    weight = random(96, 64)
    with OneDnnProducts():
        with torch.no_grad():
            assert torch.equal(linear(few := random(LEAST_ROWS - 1, 64), weight), few @ weight.t())
            half = torch.bfloat16
            assert linear(random(40, 64, dtype=half), weight.to(half)).dtype == half
        assert linear(random(40, 64), weight.requires_grad_()).requires_grad
    assert not layouts


@needs_onednn
@pytest.mark.parametrize("is_slow", [True, False])
def test_the_cpu_decides(is_slow, monkeypatch, layouts):
    monkeypatch.setattr(products, "has_slow_mkl", lambda: is_slow)

    @fast_products()
    @torch.no_grad()
    def multiply():
        return linear(random(40, 64), random(96, 64))

    for _ in range(2):
        multiply()
    assert len(layouts) == 2 * is_slow
