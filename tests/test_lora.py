"""Eq. 3 in one linear layer: only slot rows get the residual, with gradients and without."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny_models import collate, for_generate, random_rows, tiny_aligner
from torch import nn

from arcaligner import modeling_arcaligner
from arcaligner.modeling_arcaligner import (
    ADAPTER_NAME,
    ALL_POSITIONS,
    LEAST_ROWS,
    FrozenLinear,
    lora_on,
    mix_in,
    slot_lora_layers,
)

SLOTS = torch.tensor([1, 2, 5, 9])  # flat, of two rows of five
TOGETHER = slice(3, 8)
some_or_all_rows = pytest.mark.parametrize("rows", [SLOTS, TOGETHER, ALL_POSITIONS], ids=["some", "together", "all"])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def layer():
    """The first LoRA linear of an aligner."""
    return next(slot_lora_layers(tiny_aligner("llama"))).eval()


@pytest.fixture
def states(layer):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 5, layer.in_features, generator=generator, dtype=layer.base_layer.weight.dtype)


def by_eq_3(layer, states: torch.Tensor, rows: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """W x + M_r * s * B A x with whole matrices, in float64."""
    down, up = layer.lora_A[ADAPTER_NAME].weight.double(), layer.lora_B[ADAPTER_NAME].weight.double()
    states = states.double()
    mask = torch.zeros(10, 1, dtype=torch.float64)
    mask[rows] = sign
    residual = mask.view(2, 5, 1) * layer.scaling[ADAPTER_NAME] * (states @ down.T @ up.T)
    return states @ layer.base_layer.weight.double().T + residual


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("rows", [SLOTS, TOGETHER, ALL_POSITIONS, torch.arange(10), torch.tensor([], dtype=torch.long)])
def test_residual_follows_eq_3(layer, states, rows, with_gradients):
    """On slot rows the residual is that of Eq. 3."""
    with torch.set_grad_enabled(with_gradients), lora_on(rows):
        output = layer(states)
    expected = by_eq_3(layer, states, rows)
    torch.testing.assert_close(output.double(), expected, **CLOSE)
    if with_gradients:
        up = layer.lora_B[ADAPTER_NAME].weight
        gradients = (torch.autograd.grad(tensor.square().sum(), up)[0] for tensor in (output, expected))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("with_gradients", [True, False])
@some_or_all_rows
def test_residual_has_backbone_dtype(layer, states, rows, with_gradients):
    """A bfloat16 backbone multiplies with LoRA weights that are cast, not with its states cast to float32."""
    layer.float().base_layer.to(torch.bfloat16).weight.data.zero_()
    states = states.bfloat16()
    with torch.set_grad_enabled(with_gradients), lora_on(rows):
        output = layer(states)
    down, up = (part[ADAPTER_NAME].weight.detach().bfloat16() for part in (layer.lora_A, layer.lora_B))
    hidden = states.view(10, -1)[rows] @ down.T  # rounded to bfloat16, as each product is
    expected = torch.zeros(10, layer.out_features, dtype=torch.bfloat16)
    expected[rows] = (layer.scaling[ADAPTER_NAME] * (hidden.double() @ up.double().T)).bfloat16()
    torch.testing.assert_close(output.view(10, -1), expected, rtol=0.01, atol=0.01)
    if with_gradients:
        output.float().square().sum().backward()
        assert layer.lora_A[ADAPTER_NAME].weight.grad.dtype == torch.float32


WAYS = "in place, loaded, assigned, moved, replaced, another linear, another forward, dropped out, scaled, off".split(
    ", "
)


def make_zero(layer, how: str) -> None:
    """Makes the residual of `layer` zero, in one of these ways."""
    down, zeros = layer.lora_A[ADAPTER_NAME], torch.zeros_like(layer.lora_A[ADAPTER_NAME].weight)
    if how == "in place":
        down.weight.zero_()
    elif how == "loaded":
        down.load_state_dict({"weight": zeros})
    elif how == "assigned":
        down.load_state_dict({"weight": nn.Parameter(zeros)}, assign=True)
    elif how == "moved":
        down.weight.data = zeros
    elif how == "replaced":
        down.weight = nn.Parameter(zeros)
    elif how == "another linear":
        layer.lora_A[ADAPTER_NAME] = nn.Linear(*zeros.shape[::-1], bias=False, dtype=zeros.dtype)
        layer.lora_A[ADAPTER_NAME].weight.zero_()
    elif how == "another forward":
        down.forward = lambda slots: slots.new_zeros(len(slots), len(zeros))
    elif how == "dropped":
        layer.lora_dropout[ADAPTER_NAME] = nn.Dropout(p=1.0)  # in training mode, as for Monte Carlo dropout
    elif how == "scaled":
        layer.set_scale(ADAPTER_NAME, 0.0)
    else:
        layer.enable_adapters(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "how",
    "in place, loaded, assigned, moved, replaced, another linear, another forward, dropped out, scaled, off".split(
        ", "
    ),
)
def test_changed_weights_are_used(layer, states, how, dtype):
    """The weights that inference has prepared are prepared again after any change."""
    layer.base_layer.to(dtype)
    states = states.to(dtype)
    with torch.no_grad(), lora_on(ALL_POSITIONS):
        assert not torch.equal(layer(states), layer.base_layer(states))
        make_zero(layer, how)
        assert torch.equal(layer(states), layer.base_layer(states))


def test_other_weights_for_call(layer, states):
    """`functional_call` is for one call only."""
    zeros = {"lora_A.slot.weight": torch.zeros_like(layer.lora_A[ADAPTER_NAME].weight)}
    with torch.no_grad(), lora_on(TOGETHER):
        before = layer(states)
        assert torch.equal(torch.func.functional_call(layer, zeros, (states,)), layer.base_layer(states))
        assert torch.equal(layer(states), before)


@torch.no_grad()
def test_precision_changes_between_calls(layer, states):
    """Each call has the precision of its backbone, autocast's too."""
    for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.float64):
        layer.base_layer.to(dtype)
        fresh = copy.deepcopy(layer)
        for inputs in (states, states.flip(0)):
            with lora_on(TOGETHER):
                assert torch.equal(layer(inputs.to(dtype)), fresh(inputs.to(dtype)))
    layer.float()
    with lora_on(TOGETHER):
        plain = layer(states.float())
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(states.float()).dtype == torch.bfloat16
        assert torch.equal(layer(states.float()), plain)


def test_weights_of_inference_mode(states):
    """Weights that were made in inference mode can still be changed."""
    with torch.inference_mode():
        layer = next(slot_lora_layers(tiny_aligner("llama"))).eval()
        with lora_on(TOGETHER):
            torch.testing.assert_close(layer(states).double(), by_eq_3(layer, states, TOGETHER), **CLOSE)
            layer.lora_B[ADAPTER_NAME].weight.zero_()
            assert torch.equal(layer(states), layer.base_layer(states))


def test_copy_has_own_weights(layer, states):
    """A change of the weights of a copy does not change the original."""
    with torch.no_grad(), lora_on(TOGETHER):
        before = layer(states)
        copied = copy.deepcopy(layer)
        copied.lora_A[ADAPTER_NAME].weight.zero_()
        assert torch.equal(copied(states), layer.base_layer(states)) and torch.equal(layer(states), before)


def test_sharded_weights_are_cast_again(layer, states):
    """Sharding changes weights without a new version, so a change of mode drops the cast weights."""
    layer.base_layer.to(torch.bfloat16)
    states, down = states.bfloat16(), layer.lora_A[ADAPTER_NAME].weight
    with torch.no_grad(), lora_on(ALL_POSITIONS):
        layer(states)
        with torch.autograd._unsafe_preserve_version_counter(down):
            down.zero_()
        layer.train().eval()
        assert torch.equal(layer(states), layer.base_layer(states))


def test_linears_share_input_slots(layer, states, monkeypatch):
    """Query, key and value take the slot rows of their input once; another input has its own."""
    taken = []
    monkeypatch.setattr(modeling_arcaligner, "_slots_of", lambda x, rows: taken.append(x) or x.view(10, -1)[rows])
    with torch.no_grad(), lora_on(SLOTS):
        first, again, other = layer(states), layer(states), layer(states + 1)
    assert len(taken) == 2
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_peft_computes_other_adapters(layer, states):
    """An adapter with another name is computed by PEFT."""
    holder = nn.ModuleDict({"linear": copy.deepcopy(layer)})
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False), holder, "other")
    both = holder["linear"]
    both.set_adapter("other")
    with torch.no_grad():
        residual = both.lora_B["other"](both.lora_A["other"](states)) * both.scaling["other"]
        for rows in (None, SLOTS):
            with lora_on(rows):
                torch.testing.assert_close(both(states), layer.base_layer(states) + residual)


def test_hooked_output_stays_frozen(layer, states):
    """The frozen output that a hook holds is not changed, even with gradients."""
    seen = []
    layer.base_layer.register_forward_hook(lambda module, args, output: seen.append(output))
    with lora_on(SLOTS):
        layer(states)
    assert torch.equal(seen[0], layer.base_layer(states))
    layer.train().lora_dropout[ADAPTER_NAME] = nn.Dropout(p=1.0)  # not changed without gradients either
    with torch.no_grad(), lora_on(SLOTS):
        assert torch.equal(layer(states), seen[0])


@pytest.mark.parametrize("name", ["lora_A", "lora_B"])
@some_or_all_rows
def test_patched_linear_sees_slots_only(layer, states, rows, name):
    """The low-rank linear of a patched forward is called for slot rows only."""
    linear = getattr(layer, name)[ADAPTER_NAME]

    def negated(slots):  # such as one that fetches weights first
        assert len(slots) == len(torch.arange(10)[rows])
        return -nn.functional.linear(slots, linear.weight)

    linear.forward = negated
    with torch.no_grad(), lora_on(rows):
        torch.testing.assert_close(layer(states).double(), by_eq_3(layer, states, rows, sign=-1), **CLOSE)


class WideLinear(nn.Linear):
    """Gives its output in the order of another layout, as a kernel may, and always in its input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)


@some_or_all_rows
def test_frozen_linear_supports_other_layouts(layer, states, rows):
    layer.float().base_layer.__class__ = WideLinear
    outputs = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16), lora_on(rows):
            outputs.append(layer(states.float()).detach())
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0.01, atol=0.01)


def test_zero_lora_equals_none():
    """An aligner without LoRA computes the same as one with a LoRA of zeros."""
    alone, with_lora = tiny_aligner("llama", lora_r=0), tiny_aligner("llama")
    state = {name: torch.zeros_like(p) if "lora_B" in name else p for name, p in with_lora.state_dict().items()}
    with_lora.load_state_dict(state)
    alone.load_state_dict({k.replace(".base_layer", ""): p for k, p in state.items() if ".lora_" not in k})
    batch = for_generate(collate(random_rows(alone, [3, 0, 2]), "left"))
    for gates in ({"gate_mode": mode} for mode in ("off", "adaptive", "always")):
        torch.testing.assert_close(alone(**batch, **gates).logits, with_lora(**batch, **gates).logits, rtol=0, atol=0)


@pytest.mark.parametrize("gate_mode", ["off", "adaptive", "always"])
def test_ordinary_lora_is_merged(gate_mode):
    """With `lora_positions` "all" an aligner equals one with merged weights for slots, text and new tokens."""
    model = tiny_aligner("llama", lora_positions="all", gate_mode=gate_mode).eval()
    merged = copy.deepcopy(model)
    for layer in slot_lora_layers(merged):
        up, down = layer.lora_B[ADAPTER_NAME].weight, layer.lora_A[ADAPTER_NAME].weight
        layer.base_layer.weight.data += layer.scaling[ADAPTER_NAME] * (up @ down)
        layer.set_scale(ADAPTER_NAME, 0.0)
    batch = collate(random_rows(model, [3, 1]), padding_side="left")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "context_embeds")}
    output, expected = model(**inputs), merged(**inputs)
    torch.testing.assert_close(output.logits, expected.logits, **CLOSE)
    assert torch.equal(output.recursion_depth, expected.recursion_depth)
    texts = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(model(texts).logits, merged(texts).logits, **CLOSE)
    slots_alone = tiny_aligner("llama", gate_mode=gate_mode).eval()
    slots_alone.load_state_dict(model.state_dict())
    assert not torch.allclose(slots_alone(**inputs).logits, output.logits)
    prompts = for_generate(batch)
    ids = [aligner.generate(**prompts, max_new_tokens=4, do_sample=False) for aligner in (model, merged)]
    assert torch.equal(*ids)


@pytest.fixture
def linear(monkeypatch):
    """A frozen linear layer on a CPU with a slow MKL, which records the shapes of oneDNN's inputs."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(modeling_arcaligner, "has_slow_mkl", lambda: True)
    monkeypatch.setattr(modeling_arcaligner, "LEAST_WEIGHT", 96 * 64)
    made, convert = nn.Linear(64, 96), torch.Tensor.to_mkldnn
    mix_in(FrozenLinear, made)
    made.shapes = []
    monkeypatch.setattr(torch.Tensor, "to_mkldnn", lambda x: made.shapes.append(tuple(x.shape)) or convert(x))
    return made


@pytest.mark.parametrize(("shape", "padded"), [((LEAST_ROWS, 64), LEAST_ROWS), ((3, 43, 64), 144)])
@torch.no_grad()
def test_large_products_equal_pytorch(linear, shape, padded):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for bias in (linear.bias, None):
        linear.bias = bias
        expected = nn.functional.linear(x.double(), linear.weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(linear(x).double(), expected, **CLOSE)
    assert linear.shapes == [(padded, 64)] * 2


@torch.no_grad()
def test_few_numbers_of_rows(linear):
    """Numbers of rows are padded to few sizes, as oneDNN caches code for each size."""
    for rows in range(LEAST_ROWS, 513):
        assert linear(torch.ones(rows, 64)).shape == (rows, 96)
    numbers = {rows for rows, _ in linear.shapes}
    assert len(numbers) == 8 * 3 and all(rows % LEAST_ROWS == 0 for rows in numbers)


def test_other_products_stay(linear, monkeypatch):
    """oneDNN is not used for few rows, small weights, other dtypes, with gradients, or if MKL is fast."""
    x = torch.randn(40, 64)
    assert linear(x).requires_grad
    with torch.no_grad():
        assert torch.equal(linear(x[: LEAST_ROWS - 1]), nn.functional.linear(x[: LEAST_ROWS - 1], *linear.parameters()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        assert copy.deepcopy(linear).double()(x.double()).dtype == torch.float64
        for name, value in (("LEAST_WEIGHT", 96 * 64 + 1), ("has_slow_mkl", lambda: False)):
            with monkeypatch.context() as changed:
                changed.setattr(modeling_arcaligner, name, value)
                linear(x)
        assert not linear.shapes
        linear(x)
    assert linear.shapes == [(48, 64)]


def test_base_linears_multiply_fast(layer):
    assert isinstance(layer.base_layer, FrozenLinear)
