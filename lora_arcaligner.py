"""Selective LoRA (Eq. 3): PEFT's layers, with a low-rank residual that reaches slot rows only:

    y = W x + M_r * s * B A x        row by row, M_r = 1 on slots and 0 on text

A decoder layer opens `lora_on` around its own forward, and every LoRA layer inside reads from it which rows are
slots. Outside `lora_on` (decoding, text) the LoRA is off and a linear is exactly the frozen one.
"""

import contextlib
import functools
import threading
from types import EllipsisType

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks


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
        # None: LoRA off. ALL_ROWS: each row is a slot.
        self.rows: RowIndex | None = None
        # The last input that slot rows were taken from, and these rows: query, key and value linears read the same.
        self.taken: tuple[torch.Tensor, torch.Tensor] | None = None


_scope = _SlotScope()


@contextlib.contextmanager
def lora_on(rows: RowIndex | None):
    """Inside, LoRA is applied to `rows`: PEFT's layers are called by the backbone's attention and MLP, which pass no
    such argument on."""
    before, _scope.rows, _scope.taken = _scope.rows, rows, None
    try:
        yield
    finally:
        _scope.rows, _scope.taken = before, None


def _take_slots(x: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """Rows of `x` (batch, seq_len, in_features) -> (num_slots, in_features), once for the linears that share `x`."""
    if (taken := _scope.taken) is not None and taken[0] is x:
        return taken[1]
    flat = x.reshape(-1, x.shape[-1])  # (batch * seq_len, in_features)
    slots = flat.index_select(0, rows) if isinstance(rows, torch.Tensor) else flat[rows]
    _scope.taken = x, slots
    return slots


class SlotLoraVariant(LoraVariant):
    """PEFT's hook for another LoRA formula in its own layers: here the usual one, on slot rows only (Eq. 3)."""

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
        rows = _scope.rows
        if rows is None:
            return result
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        dropout, scaling = module.lora_dropout[active_adapter], module.scaling[active_adapter]
        slots = _take_slots(x, rows)  # (num_slots, in_features)
        residual = (up(down(dropout(slots.to(down.weight.dtype)))) * scaling).to(result.dtype)
        flat = result.reshape(-1, result.shape[-1])  # (batch * seq_len, out_features)
        if isinstance(rows, torch.Tensor):
            return flat.index_add(0, rows, residual).view_as(result)
        if rows is ALL_ROWS:
            return (flat + residual).view_as(result)
        return flat.slice_scatter(flat[rows] + residual, 0, rows.start, rows.stop).view_as(result)


_ALONE = [ADAPTER_NAME]


def _is_plain(linear: nn.Module) -> bool:
    """Whether calling `linear` computes its product and nothing else."""
    own = linear.__dict__
    return type(linear) is nn.Linear and not (own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own)


def _plain_weight(linear: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of a plain linear without bias, if it is an ordinary parameter of `dtype`; otherwise `None`."""
    parameters = linear.__dict__["_parameters"]
    weight = parameters["weight"]
    is_alone = _is_plain(linear) and parameters["bias"] is None and type(weight) is nn.Parameter  # no sharded tensor
    return weight if is_alone and weight.dtype == dtype else None


class SlotLoraLayer(InPlaceMixin):
    """A PEFT layer that costs no more than its frozen linear where there are no slots, as when decoding, and that skips
    PEFT's bookkeeping where there are no gradients.

    On short prompts the time of Python calls matters, so this class reads the modules' dictionaries directly and
    computes the products without calling the modules.
    """

    def __call__(self, x: torch.Tensor, *args, **kwargs):
        own = self.__dict__
        base_layer = own["_modules"]["base_layer"]
        if (
            args
            or kwargs
            or own["_active_adapter"] != _ALONE
            or own["merged_adapters"]
            # Hooks and patched forwards have to be called. They may keep the frozen result, so it is not written to.
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or "forward" in own
            or not _is_plain(base_layer)
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or torch.is_grad_enabled()  # for hooks of the backward pass as well
        ):
            return self._call_modules(x, *args, **kwargs)
        rows = _scope.rows
        if rows is not None and (own["training"] or self._disable_adapters):
            return self._call_modules(x)
        parameters = base_layer.__dict__["_parameters"]
        result = nn.functional.linear(x, parameters["weight"], parameters["bias"])
        return result if rows is None else self._add_in_place(x, result, rows)

    def _call_modules(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """PEFT's forward or, for text alone, the frozen linear of any kind, such as a quantized one."""
        is_alone = self._active_adapter == _ALONE and not self.merged_adapters and not args and not kwargs
        if is_alone and _scope.rows is None and not (self._forward_hooks or self._forward_pre_hooks):
            return self.base_layer(x)
        return super().__call__(x, *args, **kwargs)

    def _add_in_place(self, x: torch.Tensor, result: torch.Tensor, rows: RowIndex) -> torch.Tensor:
        """Eq. 3 as `SlotLoraVariant.forward` has it, written into `result` (batch, seq_len, out_features)."""
        own = self.__dict__
        down = own["_modules"]["lora_A"]._modules[ADAPTER_NAME]
        up = own["_modules"]["lora_B"]._modules[ADAPTER_NAME]
        scaling = own["scaling"][ADAPTER_NAME]
        slots = _take_slots(x, rows)  # (num_slots, in_features)
        flat = result.view(-1, result.shape[-1])  # (batch * seq_len, out_features)
        down_weight, up_weight = _plain_weight(down, x.dtype), _plain_weight(up, result.dtype)
        if down_weight is None:
            slots = down(slots.to(down.weight.dtype))  # (num_slots, r)
        else:
            slots = nn.functional.linear(slots, down_weight)
        if isinstance(rows, torch.Tensor):
            flat.index_add_(0, rows, up(slots).to(result.dtype), alpha=scaling)
        elif up_weight is None or slots.dtype != result.dtype:
            flat[rows].add_(up(slots).to(result.dtype), alpha=scaling)
        else:
            (flat if rows is ALL_ROWS else flat[rows]).addmm_(slots, up_weight.t(), alpha=scaling)
        return result


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
