"""What ArcAligner adds to a decoder layer of the backbone: LoRA on slot rows, and Algorithm 1 (Eq. 3 to 9).

    y = W x + M_r * s * B A x            Eq. 3, in each linear, row by row: M_r = 1 on slots and 0 on text
    layer, gate, layer, gate, ...        Eq. 4 to 9: slots whose gate is open pass through the layer again

The layer opens `lora_on` around its own forward, and every LoRA layer inside reads from it which rows are slots.
Outside of it (decoding, text) the LoRA is off and a linear is exactly the frozen one.

Which rows a step computes is decided here by two classes, for training and for inference; what these rows are and what
they may read stands in `slot_rows_arcaligner.py`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from torch import nn
from torch.autograd.function import once_differentiable

from .base_model_arcaligner import (
    CACHE,
    is_recording_outputs,
    not_recording_outputs,
)
from .configuration_arcaligner import ArcAlignerConfig
from .slot_rows_arcaligner import (
    ROW_KERNELS,
    KeysValuesComplete,
    KeysValuesRecorder,
    LayerCost,
    LayerKeysValues,
    RefinementKeysValues,
    RefinementSettings,
    SharedStepInputs,
    SlotRows,
    SlotStates,
    StepInputs,
    StepRows,
    count_layer_cost,
    open_slots_plan,
    prefix_inputs,
    step_inputs,
    take_rows,
)


# One class for each pair: code is compiled for classes, and would be compiled again for each layer.
@functools.cache
def _subclass(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _empty_module(mixin: type, cls: type[nn.Module]) -> nn.Module:
    """Makes the empty module that `pickle` and `copy` fill: pickle cannot find two classes under one name."""
    subclass = _subclass(mixin, cls)
    return subclass.__new__(subclass)


class InPlaceMixin:
    """Base of the mixins for `mix_in`; they come before the module's own class."""

    def __reduce_ex__(self, protocol):
        return _empty_module, type(self).__bases__, self.__getstate__()


def mix_in(mixin: type[InPlaceMixin], module: nn.Module) -> None:
    """Puts `mixin` before the class of `module`, in place."""
    module.__class__ = _subclass(mixin, type(module))


ADAPTER_NAME = "slot"

ALL_ROWS = ...

# Of flat rows (batch * seq_len, features): indices (num_slots,), where slots stand together a slice, or all rows.
RowIndex = torch.Tensor | slice | EllipsisType


class _SlotScope(threading.local):
    def __init__(self):  # runs in each thread; defaults of the class would be another thing to compiled code
        self.rows: RowIndex | None = None  # None: LoRA off. ALL_ROWS: each row is a slot.
        # What the last linear was given and its slot rows: query, key and value, or gate and up, have one input.
        self.input: torch.Tensor | None = None
        self.slots: torch.Tensor | None = None


_scope = _SlotScope()


@contextlib.contextmanager
def lora_on(rows: RowIndex | None):
    """Inside, LoRA is applied to `rows`: PEFT's layers are called by the backbone's attention and MLP, which pass no
    such argument on."""
    before, _scope.rows = _scope.rows, rows
    _scope.input = _scope.slots = None
    try:
        yield
    finally:
        _scope.rows = before
        _scope.input = _scope.slots = None


def _slots_of(x: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """The slot rows (num_slots, features) of `x` (batch, seq_len, features); a view where they stand together."""
    x = x.contiguous()
    if isinstance(rows, torch.Tensor):
        return x.view(-1, x.shape[-1]).index_select(0, rows)
    if rows is ALL_ROWS:
        return x.view(-1, x.shape[-1])
    # One operation for a view and a slice: a GPU waits for each.
    width = x.shape[-1]
    return x.as_strided((rows.stop - rows.start, width), (width, 1), x.storage_offset() + rows.start * width)


def _shared_slots_of(x: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """As `_slots_of`, once for the linears that read the same `x`."""
    if torch.compiler.is_compiling():
        return _slots_of(x, rows)
    if _scope.input is not x:
        _scope.input, _scope.slots = x, _slots_of(x, rows)
    return _scope.slots


def _add_residual_(
    result: torch.Tensor, rows: RowIndex, slots: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Adds `scaling * x A B` of the `slots` x (num_slots, in_features) to their rows of the contiguous `result`
    (batch, seq_len, out_features), in place. A is (in_features, r), B (r, out_features). Returns `x A`."""
    hidden = torch.mm(slots, down)  # (num_slots, r)
    if isinstance(rows, torch.Tensor):
        result.view(-1, result.shape[-1]).index_add_(0, rows, torch.mm(hidden, up), alpha=scaling)
    else:  # one prompt: its slots stand together, so the sum is written where it belongs
        _slots_of(result, rows).addmm_(hidden, up, alpha=scaling)
    return hidden


class _SlotResidual(torch.autograd.Function):
    """Eq. 3 with the gradients written out: autograd would fill a tensor of all rows with zeros for each linear.

    The frozen `result` (batch, seq_len, out_features) goes through with its gradient unchanged; `slots`
    (num_slots, in_features) were taken from the linear's input outside, where their gradients are summed over the
    linears that share it.
    """

    @staticmethod
    def forward(ctx, result, slots, down, up, scaling, rows):
        # Not in place, as autograd and hooks may hold the frozen result.
        down_t, up_t = down.transpose(0, 1), up.transpose(0, 1)
        if rows is ALL_ROWS:
            hidden = torch.mm(slots, down_t)  # (num_slots, r)
            flat = result.reshape(-1, result.shape[-1])  # (batch * seq_len, out_features)
            total = torch.addmm(flat, hidden, up_t, alpha=scaling).view_as(result)
        else:
            total = result.clone(memory_format=torch.contiguous_format)
            hidden = _add_residual_(total, rows, slots, down_t, up_t, scaling)
        ctx.save_for_backward(slots, hidden, down, up, rows if isinstance(rows, torch.Tensor) else None)
        ctx.scaling, ctx.rows = scaling, None if isinstance(rows, torch.Tensor) else rows
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        slots, hidden, down, up, index = ctx.saved_tensors
        d_residual = _slots_of(d_total, ctx.rows if index is None else index)  # (num_slots, out_features)
        # `beta=0`: a scaled product in one operation; the first argument gives its shape only.
        d_hidden = torch.addmm(hidden, d_residual, up, beta=0, alpha=ctx.scaling)  # (num_slots, r)
        _, for_slots, for_down, for_up, *_ = ctx.needs_input_grad
        d_slots = torch.mm(d_hidden, down) if for_slots else None
        d_down = torch.mm(d_hidden.transpose(0, 1), slots) if for_down else None
        d_up = torch.addmm(up, d_residual.transpose(0, 1), hidden, beta=0, alpha=ctx.scaling) if for_up else None
        return d_total, d_slots, d_down, d_up, None, None


class SlotLoraVariant(LoraVariant):
    """PEFT's hook for another LoRA formula in its own layers: here the usual one, on slot rows only."""

    def supports_lora_conversion(self) -> bool:
        return False

    @staticmethod
    def init(module: LoraLayer, adapter_name: str, **kwargs) -> None:
        pass

    @staticmethod
    def _refuse_merge(module, active_adapter, orig_weight):
        raise ValueError(
            f"LoRA adapter `{active_adapter}` cannot be merged: it applies to context slots only, a merged weight "
            "would apply it to text as well. Keep it unmerged; text rows already run on the frozen weights alone."
        )

    merge_safe = merge_unsafe = unmerge = _refuse_merge

    @staticmethod
    def forward(module, active_adapter, x, result, **kwargs):
        """Eq. 3: adds the residual to the slot rows of the frozen `result` (batch, seq_len, out_features)."""
        rows = _scope.rows
        if rows is None:
            return result
        # A over slots, B over slots: PEFT would compute both on all rows and a mask would throw most of it away.
        down, up, dropout = (part[active_adapter] for part in (module.lora_A, module.lora_B, module.lora_dropout))
        scaling = module.scaling[active_adapter]
        if result.dtype != x.dtype or torch.is_autocast_enabled(x.device.type) or _is_patched(down) or _is_patched(up):
            slots = down(dropout(_slots_of(x, rows).to(down.weight.dtype)))  # (num_slots, r)
            residual = up(slots * scaling).to(result.dtype)  # (num_slots, out_features)
            flat = result.reshape(-1, result.shape[-1]).clone()  # (batch * seq_len, out_features)
            if isinstance(rows, torch.Tensor):
                return flat.index_add(0, rows, residual).view_as(result)
            flat[rows] += residual
            return flat.view_as(result)
        slots = _shared_slots_of(x, rows)  # (num_slots, in_features)
        if dropout.training:
            slots = dropout(slots)
        if torch.is_grad_enabled():
            down, up = (part.weight if part.weight.dtype == x.dtype else part.weight.to(x.dtype) for part in (down, up))
            return _SlotResidual.apply(result, slots, down, up, scaling, rows)
        result = result.contiguous()  # in place: a copy of the text rows in each linear would cost a tenth of a prefill
        _add_residual_(result, rows, slots, *module.transposed_weights(x.dtype), scaling)
        return result


def _is_patched(linear: nn.Linear) -> bool:
    """Whether a forward of its own, as offloading gives it, fetches the weights of `linear`."""
    return "forward" in vars(linear)


class SlotLoraLayer(InPlaceMixin):
    """A PEFT layer without PEFT's bookkeeping where its one adapter is the slots'. The bookkeeping takes longer than
    the linears of a small backbone. Without slots, as when decoding, the layer is its frozen linear."""

    _transposed: tuple | None = None  # the state of the weights, and what `transposed_weights` made of it

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args or kwargs or self.active_adapter != [ADAPTER_NAME] or self.merged_adapters:
            return super().forward(x, *args, **kwargs)
        if _scope.rows is None:
            return self.base_layer(x)
        if self.disable_adapters:
            return super().forward(x)
        return SlotLoraVariant.forward(self, ADAPTER_NAME, x, self.base_layer(x))

    def transposed_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A (in_features, r) and B (r, out_features) in the backbone's `dtype`, made once while the weights stay."""
        weights = self.lora_A[ADAPTER_NAME].weight, self.lora_B[ADAPTER_NAME].weight
        if torch.compiler.is_compiling() or any(weight.is_inference() for weight in weights):
            return tuple(weight.to(dtype).t() for weight in weights)
        state = dtype, *((weight.data_ptr(), weight._version) for weight in weights)
        if self._transposed is None or self._transposed[0] != state:
            self._transposed = state, *(weight.detach().to(dtype).t() for weight in weights)
        return self._transposed[1:]

    def train(self, mode: bool = True):
        self._transposed = None  # training may write weights without a new version, as sharding does
        return super().train(mode)

    def __getstate__(self):
        return super().__getstate__() | {"_transposed": None}


def slot_lora_layers(module: nn.Module):
    """The PEFT layers below `module` that carry the slot LoRA."""
    return (m for m in module.modules() if isinstance(m, LoraLayer) and ADAPTER_NAME in m.lora_A)


def check_adapters(backbone: nn.Module) -> None:
    """Raises `ValueError` where an adapter other than the slots' LoRA is active or merged."""
    layer = next(slot_lora_layers(backbone), None)  # none with `lora_r=0`
    adapters = [ADAPTER_NAME] if layer is None else [*layer.active_adapters, *layer.merged_adapters]
    if adapters != [ADAPTER_NAME]:
        raise ValueError(
            f"PEFT adapter {adapters} is active or merged, which switches the slots' own LoRA `{ADAPTER_NAME}` off. "
            "ArcAligner brings its LoRA: train it with `set_stage` and without a `peft_config`."
        )


def inject_slot_lora(backbone: nn.Module, layers: nn.ModuleList, config) -> None:
    """Puts PEFT's LoRA layers (adapter `slot`) into `backbone`, in place; none with `lora_r=0`."""
    if config.lora_r == 0:
        return
    targets = config.lora_target_modules
    if targets == "all-linear":  # those of the decoder layers
        linears = {module for module in layers.modules() if isinstance(module, nn.Linear)}
        targets = [name for name, module in backbone.named_modules() if module in linears]
    lora_config = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        bias="none",
        target_modules=targets,
    )
    inject_adapter_in_model(lora_config, backbone, ADAPTER_NAME)
    for layer in list(slot_lora_layers(backbone)):
        mix_in(SlotLoraLayer, layer)
        layer.lora_variant[ADAPTER_NAME] = SlotLoraVariant()
        layer.cast_input_dtype_enabled = False  # the variant casts the slot rows, PEFT would cast all rows


class SlotGate(nn.Module):
    """The gate of one layer (Eq. 5): slot states (..., hidden) to the probability (..., 1) of another pass."""

    def __init__(self, hidden_size: int, gate_hidden_size: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, gate_hidden_size)
        self.act = nn.SiLU()
        self.out = nn.Linear(gate_hidden_size, 1)

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        # In float32, as its weights are: next to the threshold rounding would decide.
        with torch.autocast(slots.device.type, enabled=False):
            return torch.sigmoid(self.out(self.act(self.up(slots.to(self.up.weight.dtype)))))


def straight_through_gate(prob: torch.Tensor, is_open: torch.Tensor) -> torch.Tensor:
    """Eq. 7: the hard decision in the forward pass, the probability's gradient in the backward pass.

    >>> prob = torch.tensor([0.25, 0.5, 0.75])
    >>> straight_through_gate(prob, prob >= 0.5)
    tensor([0., 1., 1.])
    """
    return prob + (is_open.to(prob.dtype) - prob).detach()


def gated_update(states: torch.Tensor, candidate: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Eq. 8: slots (batch, width, hidden) take the `candidate` where their `gate` (batch, width, 1) is open: a truth
    value or, in training, a number of [`straight_through_gate`]."""
    if gate.dtype == torch.bool:
        return torch.where(gate, candidate, states)
    return states + gate.to(states.dtype) * (candidate - states)


# Steps of a layer


class RecordedDepths:
    """Refinement steps of slots. Layers return hidden states only, so they write their steps here. Not a dictionary
    itself: hooks that move a layer's inputs to its device would copy it."""

    def __init__(self):
        self.by_layer: dict[int, torch.Tensor] = {}  # each (batch, max_slots)


class Slots(NamedTuple):
    """All that the layers of one forward know about its slots, as one keyword argument, which gradient checkpointing
    passes again when it repeats a layer."""

    rows: SlotRows
    settings: RefinementSettings
    depths: RecordedDepths
    shared_inputs: SharedStepInputs

    def stacked_depths(self, num_layers: int) -> torch.LongTensor:
        """Depths of the layers that refined, 0 for the others -> (batch, num_layers, max_slots), -1 without a slot."""
        none = torch.zeros_like(self.rows.slot_positions)
        depths = [self.depths.by_layer.get(layer_idx, none).to(none.device) for layer_idx in range(num_layers)]
        return torch.stack(depths, dim=1).masked_fill(self.rows.slot_positions[:, None, :] < 0, -1)


# If at least this share of the slots is open, a step computes all of them.
DENSE_STEP_SHARE = 7 / 8


# The layer for the rows of a step (`None`: all slots), as a function of their states (batch, width, hidden).
SlotPass = Callable[[StepRows | None], Callable[[torch.Tensor], torch.Tensor]]


class AllSlotsSteps:
    """Steps of one layer that compute every slot: in training, where the gradient of a closed gate needs its candidate
    (Eq. 7), and in compiled code, whose operations may not depend on what the gates decide."""

    def __init__(self, layer, hidden: SlotStates, slots: Slots, slot_pass: SlotPass):
        self.layer, self.hidden, self.slots = layer, hidden, slots
        self.reapply = slot_pass(None)  # prepared once for all steps: what they read does not change
        self.depth = torch.zeros_like(slots.rows.slot_positions)  # (batch, max_slots)

    def can_ask(self) -> bool:
        """Whether gates may be asked: always, no budget goes with this."""
        return True

    def narrow(self, states: torch.Tensor, gate: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All slots are computed; counts those that are open."""
        rows, is_open = self.slots.rows, prob >= self.slots.settings.gate_threshold  # (batch, max_slots, 1)
        if not self.layer.training:  # compiled: the slots that are refined otherwise, too
            gate = is_open = is_open & rows.refinable(self.layer.is_last)[:, :, None]
        self.depth = self.depth + (is_open[:, :, 0] & rows.is_slot)
        return states, gate

    def write_back(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Eq. 9, and the steps that each slot took (batch, max_slots)."""
        return self.hidden.with_slots(states), self.depth


class OpenSlotsSteps:
    """Steps of one layer at inference: of the slots whose gate is open after the mandatory pass. That is exact, since a
    closed gate reads an unchanged slot and stays closed. Where nearly all are open, a step computes the others too."""

    def __init__(self, layer, hidden: SlotStates, slots: Slots, slot_pass: SlotPass):
        self.layer, self.hidden, self.slots, self._slot_pass = layer, hidden, slots, slot_pass
        self.is_taken = slots.rows.refinable(layer.is_last)  # (batch, width), all slots at first
        self.cells: torch.Tensor | None = None  # (batch, width), which slots are computed; None for all
        self.depth: torch.Tensor | None = None  # (batch, width), once a slot is open

    def _asked(self) -> torch.Tensor:
        """Slots (batch, width) whose gates are asked: a row in which all have closed is done."""
        return self.is_taken if self.depth is None else self.is_taken & self.is_open.any(dim=1, keepdim=True)

    def can_ask(self) -> bool:
        """Whether a row can pay for its gates; without a budget it can."""
        budget = self.slots.settings.budget
        return budget is None or budget.pay_gates(self.layer.slot_cost, self._asked().sum(dim=1))

    def narrow(
        self, states: torch.Tensor, gate: torch.Tensor, prob: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States and gates of the slots that are computed, (batch, width, ...); no gates where none is open."""
        settings, rows, cost = self.slots.settings, self.slots.rows, self.layer.slot_cost
        budget, is_first = settings.budget, self.depth is None
        self.is_open = gate[:, :, 0] & self._asked()
        if budget is not None and is_first:
            self.is_open = budget.take_slots(prob[:, :, 0], self.is_open, cost, rows)
        elif budget is not None:
            self.is_open = budget.take_step(self.is_open, self.is_taken, cost, rows)
        # Where each slot takes each step the host knows, and does not wait for the device.
        if not settings.takes_all and not bool(self.is_open.any()):
            return states, None
        if is_first:
            states = self._lay_out(states)
        self.depth = self.depth + self.is_open
        return states, self.is_open[:, :, None]

    def _lay_out(self, states: torch.Tensor) -> torch.Tensor:
        """Decides which slots the steps compute, and gives their states (batch, width, hidden)."""
        step_rows, width = None, self._width(self.is_open)
        if width < self.is_open.shape[1]:
            # Open ones first, in their order. Rows with fewer are filled up: a batch needs one width.
            self.cells = (~self.is_open).to(torch.int8).argsort(dim=1, stable=True)[:, :width]  # (batch, width)
            self.is_open = self.is_open.gather(1, self.cells)
            step_rows = open_slots_plan(self.slots.rows, self.cells, self.is_open)
            states = take_rows(states, self.cells)
        # From here on nothing opens again: the steps that follow are among these slots.
        self.is_taken, self.depth = self.is_open, torch.zeros_like(self.is_open, dtype=torch.long)
        self.reapply = self._slot_pass(step_rows)
        return states

    def _width(self, gate_open: torch.Tensor) -> int:
        """Slots of a row that a step computes: the open ones (batch, max_slots) of the fullest row, or all."""
        max_slots, settings = gate_open.shape[1], self.slots.settings
        has_choice = self.layer.arcaligner_config.text_config._attn_implementation in ROW_KERNELS
        if settings.takes_all or not has_choice:
            return max_slots  # known without reading the gates, which would make the host wait
        width = int(gate_open.sum(dim=1).max())
        # Without a budget, a few closed slots are computed too: cheaper than to read each of them like text.
        return max_slots if settings.budget is None and width >= DENSE_STEP_SHARE * max_slots else width

    def write_back(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Eq. 9, and the steps that each slot took (batch, max_slots), if any took one."""
        depth = self.depth
        if depth is None:
            return self.hidden.hidden_states, None
        if self.cells is not None:  # slots that were not computed keep the mandatory pass
            states = self.hidden.slots().scatter(1, self.cells[:, :, None].expand_as(states), states)
            depth = torch.zeros_like(self.slots.rows.slot_positions).scatter(1, self.cells, depth)
        return self.hidden.with_slots(states), depth


class SlotDecoderLayer(InPlaceMixin):
    """What ArcAligner adds to a decoder layer of the backbone; mixed in place before the layer's own class.

    The layer keeps its class name, its state-dict keys and its place in checkpointing, sharding and output recording.
    """

    arcaligner_config: ArcAlignerConfig
    layer_idx: int
    is_last: bool
    slot_cost: LayerCost
    _compiled_algorithm: Callable | None = None

    def forward(self, hidden_states: torch.Tensor, slots: Slots | None = None, **kwargs) -> torch.Tensor:
        """Runs the backbone's layer and, with `slots`, its part of Algorithm 1; all (batch, seq_len, hidden)."""
        if slots is None and self._compiled_algorithm is None:  # a generated token: the layer as it was
            return super().forward(hidden_states, **kwargs)
        run = self._algorithm_1 if self._compiled_algorithm is None else self._run_compiled
        hidden_states, depth = run(hidden_states, slots, kwargs)
        if depth is not None:
            slots.depths.by_layer[self.layer_idx] = depth
        return hidden_states

    def _algorithm_1(
        self, hidden_states: torch.Tensor, slots: Slots | None, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The body of Algorithm 1's loop over layers.

        Returns the layer's output (batch, seq_len, hidden) and, if it refined, the steps of its slots
        (batch, max_slots).
        """
        if slots is None:
            return super().forward(hidden_states, **kwargs), None
        with lora_on(slots.rows.row_index()):
            hidden_states = super().forward(hidden_states, **kwargs)  # Eq. 4: the mandatory pass, LoRA on slots (Eq. 3)
        if not self._may_refine(slots):
            return self._with_unused_gate(hidden_states, slots.settings), None
        # They differ in which rows a step computes, not in what is read of the slots (`tests/test_algorithm.py`).
        takes_all_slots = self.training or torch.compiler.is_compiling()
        hidden = SlotStates(hidden_states, slots.rows)
        slot_pass = functools.partial(self._slot_pass, hidden, slots, kwargs)
        steps = (AllSlotsSteps if takes_all_slots else OpenSlotsSteps)(self, hidden, slots, slot_pass)
        states = hidden.slots()  # (batch, max_slots, hidden)
        for _ in range(slots.settings.max_refinement_steps):
            if not steps.can_ask():  # a budget is spent
                break
            prob = self.gate_prob(states, slots.settings)  # Eq. 5, (batch, width, 1)
            is_open = prob >= slots.settings.gate_threshold
            gate = straight_through_gate(prob, is_open) if self.training else is_open  # Eq. 7
            states, gate = steps.narrow(states, gate, prob)  # (batch, width, ...): only slots that a step computes
            if gate is None:  # all closed: they read what has not changed, and stay closed
                break
            candidate = steps.reapply(states)  # Eq. 6
            states = gated_update(states, candidate, gate)  # Eq. 8
        return steps.write_back(states)  # Eq. 9: text rows stay; and the depths

    def _may_refine(self, slots: Slots) -> bool:
        """Whether this layer takes steps at all."""
        settings, rows = slots.settings, slots.rows
        if self.slot_gate is None or settings.gate_mode == "off" or settings.max_refinement_steps == 0:
            return False
        # Nothing reads the slots of the last layer, except a prompt that ends in one; training takes all steps.
        return rows.slot_rows.shape[0] > 0 and (self.training or not self.is_last or rows.ends_in_slot is not None)

    def _with_unused_gate(self, hidden_states: torch.Tensor, settings: RefinementSettings) -> torch.Tensor:
        """In training, a gate without slots gets a zero gradient instead of none: other processes wait for it."""
        if not self.training or self.slot_gate is None or settings.gate_mode != "adaptive":
            return hidden_states
        return hidden_states + self.slot_gate(hidden_states[:, :0]).sum().to(hidden_states.dtype)

    def gate_prob(self, slot_states: torch.Tensor, settings: RefinementSettings) -> torch.Tensor:
        """Eq. 5: slot states (..., hidden) to probabilities (..., 1); 1 in the mode `always`."""
        if settings.gate_mode == "always":
            return slot_states.new_ones(*slot_states.shape[:-1], 1)
        return self.slot_gate(slot_states)

    def compile(self, *args, **kwargs) -> None:
        """As `nn.Module.compile`. The layer's index and its place in the cache stay outside, so that layers share
        compiled code.

        Compiled code does the same work for any decision of the gates and the host reads no value, so that it can be
        captured in a CUDA graph: every slot is computed in each of `max_refinement_steps` steps. Not compiled are a
        forward with a budget, one that records attentions, and one whose cache is offloaded or has no place for the
        layer yet (a static cache before `early_initialization`, `DynamicCache` without a configuration).
        """
        self._compiled_algorithm = torch.compile(self._algorithm_1, *args, **kwargs)

    def _run_compiled(self, hidden_states, slots, kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_budget = slots is not None and slots.settings.budget is not None
        cache = kwargs.get(CACHE)
        if has_budget or is_recording_outputs() or not LayerKeysValues.fits(cache, self.layer_idx):
            return self._algorithm_1(hidden_states, slots, kwargs)
        if cache is not None:
            kwargs = {**kwargs, CACHE: LayerKeysValues(cache.layers[self.layer_idx])}
        if slots is not None:
            slots = slots._replace(rows=slots.rows.for_any_length())
        return self._compiled_algorithm(hidden_states, slots, kwargs)

    def __getstate__(self):
        state = super().__getstate__()
        state.pop("_compiled_algorithm", None)  # it holds this layer: a copy would run this layer's weights
        return state

    def _slot_pass(
        self, hidden: SlotStates, slots: Slots, kwargs: dict[str, Any], step_rows: StepRows | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The layer as a function of the states (batch, width, hidden) of all slots or those of `step_rows`; all other
        rows stay fixed."""
        rows, dtype = slots.rows, hidden.hidden_states.dtype
        if self.arcaligner_config.text_config._attn_implementation not in ROW_KERNELS or (
            step_rows is None
            and rows.has_little_text
            and slots.settings.budget is None  # which pays for keys and values of the text once
            and not torch.compiler.is_compiling()
        ):
            return self._prefix_pass(hidden, slots, kwargs)
        if step_rows is None:
            all_slots = StepRows(rows.slot_positions, rows.text_positions, None)
            inputs = slots.shared_inputs.get(kwargs, lambda: step_inputs(all_slots, kwargs, dtype))
        else:
            inputs = step_inputs(step_rows, kwargs, dtype)
        # The rows that stay are projected to keys and values once, not in each step.
        cache = RefinementKeysValues(*self._fixed_keys_values(hidden.hidden_states, inputs, kwargs))
        step_kwargs = {**kwargs, **inputs.for_slots, CACHE: cache}

        def reapply(states: torch.Tensor) -> torch.Tensor:
            with lora_on(ALL_ROWS), not_recording_outputs():
                return super(SlotDecoderLayer, self).forward(states, **step_kwargs)

        return reapply

    def _fixed_keys_values(
        self, hidden_states: torch.Tensor, inputs: StepInputs, kwargs: dict
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keys and values of the rows that stay in a step, each (batch, heads, max_fixed, head_dim)."""
        if inputs.rows.fixed_positions.shape[1] == 0:
            return None, None
        recorder = KeysValuesRecorder()
        fixed = take_rows(hidden_states, inputs.rows.fixed_positions)  # (batch, max_fixed, hidden)
        fixed_kwargs = {**kwargs, **inputs.for_fixed, CACHE: recorder}
        try:
            with lora_on(inputs.rows.fixed_slots), not_recording_outputs():
                super().forward(fixed, **fixed_kwargs)
        except KeysValuesComplete:  # the only way to leave any backbone's layer once its keys and values are known
            pass
        assert recorder.keys is not None, "the layer's attention wrote no keys and values to the cache it was given"
        return recorder.keys, recorder.values

    def _prefix_pass(
        self, hidden: SlotStates, slots: Slots, kwargs: dict[str, Any]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `_slot_pass` for all slots, but the layer runs on the whole prefix: for attention kernels that take no
        mask of rows and columns, and where there is so little text that it costs less than to part it."""
        rows, (batch, seq_len, _) = slots.rows, hidden.hidden_states.shape
        length = seq_len if rows.prefix_length is None else rows.prefix_length
        step_kwargs = kwargs | slots.shared_inputs.get(kwargs, lambda: prefix_inputs(length, kwargs))
        if batch == 1:  # the same positions of a row that is shorter
            index = rows.row_index()
        else:
            index = rows.slot_rows // seq_len * length + rows.slot_rows % seq_len

        def reapply(states: torch.Tensor) -> torch.Tensor:
            with lora_on(index), not_recording_outputs():
                whole = super(SlotDecoderLayer, self).forward(hidden.prefix_with(states, length), **step_kwargs)
            return hidden.slots_of_prefix(whole)

        return reapply


def add_slots_to_layer(layer: nn.Module, layer_idx: int, config: ArcAlignerConfig) -> None:
    """Turns a decoder layer into a `SlotDecoderLayer`, in place, with a gate if the configuration has one there."""
    mix_in(SlotDecoderLayer, layer)
    layer.arcaligner_config = config
    layer.layer_idx = layer_idx
    layer.is_last = layer_idx == config.text_config.num_hidden_layers - 1
    is_gated = layer_idx in config.gated_layers
    layer.slot_gate = SlotGate(config.text_config.hidden_size, config.gate_hidden_size) if is_gated else None
    layer.slot_cost = count_layer_cost(layer, config.text_config)


def format_trajectory(depth: int) -> str:
    """Passes of a slot through a layer as the paper's case studies write them, one `L` for each; `depth` is an
    entry of `recursion_depth`.

    >>> [format_trajectory(depth) for depth in (0, 1, 2)]
    ['L0.', 'LL', 'LLL']
    """
    return "L0." if depth == 0 else "L" * (depth + 1)
