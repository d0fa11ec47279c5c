"""The backbone: which ones can be refined, what is put into their layers, what a layer costs, what their head does.

Selective LoRA (Eq. 3) is PEFT's layers, with a low-rank residual that reaches slot rows only:

    y = W x + M_r * s * B A x        row by row, M_r = 1 on slots and 0 on text

A decoder layer opens a `lora_on` around its own forward, and every LoRA layer inside reads from it which rows are
slots. Outside of a scope (decoding, text) the LoRA is off and a linear is exactly the frozen one.
"""

import contextlib
import functools
import inspect
import threading
from types import EllipsisType
from typing import NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

# Kinds of attention with which a layer can be re-applied to its slot rows alone.
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Refused for reasons that neither their configuration nor the signature of their layers shows.
_UNSUPPORTED = {
    "minicpm3": "a linear of its attention reads rows of the cache, where LoRA cannot be limited to slots",
    "doge": "a linear of its attention reads rows of the cache, where LoRA cannot be limited to slots",
    "modernbert-decoder": "its head is more than one linear",
    "gemma3n_text": "its layers exchange more than hidden states",
}


def _refuse(config: PreTrainedConfig, reason: str):
    raise ValueError(
        f"Backbone `{config.model_type}` is not supported: {reason}. Choose a decoder-only backbone with rotary "
        "attention and dense layers, such as Llama, Mistral, Qwen2, Qwen3, Gemma 2 or 3, Phi-3, OLMo-2, SmolLM3, "
        "Granite or Cohere."
    )


def check_backbone_config(config: PreTrainedConfig) -> None:
    """Refuses, before anything is built, a backbone whose configuration shows that it cannot be refined."""
    if config.model_type in _UNSUPPORTED:
        _refuse(config, _UNSUPPORTED[config.model_type])
    if config.is_encoder_decoder:
        _refuse(config, "it is an encoder-decoder model, slots need a causal decoder")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        _refuse(config, "transformers has no causal language model for it")
    other_types = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYER_TYPES
    if other_types:
        _refuse(
            config, f"its layers use {', '.join(sorted(other_types))}, which keeps no keys and values to refine with"
        )


def find_decoder_layers(backbone: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of `backbone`: its one list of `num_hidden_layers` checkpointable layers.

    Raises:
        `ValueError`: naming the backbone and what it lacks.
    """
    config = backbone.config
    stacks = [
        module
        for module in backbone.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == config.num_hidden_layers
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if len(stacks) != 1:
        _refuse(config, f"found {len(stacks)} stacks of {config.num_hidden_layers} decoder layers, expected 1")
    parameters = inspect.signature(type(stacks[0][0]).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        _refuse(config, "its decoder layers take no further keyword arguments, so slot rows cannot reach them")
    missing = {"attention_mask", "position_embeddings", "past_key_values"} - set(parameters)
    if missing:
        _refuse(config, f"its decoder layers take no {' and no '.join(f'`{name}`' for name in sorted(missing))}")
    if any(parameter.dim() > 2 for parameter in stacks[0].parameters()):
        _refuse(config, "its experts are fused into one parameter, where LoRA cannot be limited to slot rows")
    return stacks[0]


# What is put into a layer


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
Rows = torch.Tensor | slice | EllipsisType


class _SlotScope(threading.local):
    def __init__(self):  # runs in each thread; defaults of the class would be another thing to compiled code
        # None: LoRA off. ALL_ROWS: each row is a slot.
        self.rows: Rows | None = None
        # The last input that slot rows were taken from, and these rows: query, key and value linears read the same.
        self.taken: tuple[torch.Tensor, torch.Tensor] | None = None


_scope = _SlotScope()


@contextlib.contextmanager
def lora_on(rows: Rows | None):
    """Inside, LoRA is applied to `rows`: PEFT's layers are called by the backbone's attention and MLP, which pass no
    such argument on."""
    before, _scope.rows, _scope.taken = _scope.rows, rows, None
    try:
        yield
    finally:
        _scope.rows, _scope.taken = before, None


def _take_slots(x: torch.Tensor, rows: Rows) -> torch.Tensor:
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

    On short prompts the time of Python calls shows. So this class reads the modules' dictionaries directly and computes
    the products without calling the modules.
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

    def _add_in_place(self, x: torch.Tensor, result: torch.Tensor, rows: Rows) -> torch.Tensor:
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
    if targets == "all-linear":  # of the decoder layers
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


class LayerKeysValues:
    """Stands in for the cache in compiled code: the part of one layer, whatever its index."""

    def __init__(self, layer: CacheLayerMixin):
        self.layer = layer

    @staticmethod
    def fits(cache: Cache | None, layer_idx: int) -> bool:
        """Whether the layer's part of `cache`, if there is one, can be written to by itself and by compiled code."""
        if cache is None:
            return True
        if cache.offloading or len(cache) <= layer_idx:
            return False
        layer = cache.layers[layer_idx]
        # A static layer that compiled code lays out would have no fixed address for CUDA graphs.
        return layer.is_initialized or not layer.is_compileable

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layer.update(keys, values, *args, **kwargs)


# What a layer costs


class LayerCost(NamedTuple):
    """Operations of one decoder layer; the methods take counts or tensors of them."""

    linears: int  # of a row, without LoRA
    lora: int  # of a slot
    keys_values: int  # of a row, for its keys and values; an upper bound
    keys_values_lora: int  # of a slot
    key: int  # attention of one row to one key
    gate: int  # of a slot

    def of_prefill(self, num_text, num_slots):
        """Of a slot prefix, gates off: `num_text` rows of text and `num_slots` slots."""
        length = num_text + num_slots
        return self.linears * length + self.lora * num_slots + self.key * length * length // 2

    def of_keys_values(self, num_text, num_slots):
        """Of the keys and values of a slot prefix, once before a layer's first step."""
        return self.keys_values * (num_text + num_slots) + self.keys_values_lora * num_slots

    def of_slot_pass(self, num_text, num_slots):
        """Of another pass of one slot through the layer: it attends to the prefix and to the other slots."""
        return self.linears + self.lora + self.key * (num_text + 2 * num_slots)


def count_layer_cost(layer: nn.Module, text_config: PreTrainedConfig) -> LayerCost:
    """The cost of a decoder layer as `add_slots_to_layer` leaves it, from the sizes of its linears."""
    counts = dict.fromkeys(LayerCost._fields, 0)
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        flops = 2 * module.in_features * module.out_features
        if name.startswith("slot_gate."):
            counts["gate"] += flops
            continue
        lora = ".lora_A." in name or ".lora_B." in name
        counts["lora" if lora else "linears"] += flops
        # These come after keys and values. Any other linear is counted as if it came before.
        if "mlp" not in name and "o_proj" not in name:
            counts["keys_values_lora" if lora else "keys_values"] += flops
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    counts["key"] = 4 * text_config.num_attention_heads * head_dim
    return LayerCost(**counts)


# What the head does


def make_lm_head(config: PreTrainedConfig) -> nn.Linear:
    """A head like the one of the backbone's own causal language model (some have a bias)."""
    with torch.device("meta"):
        own_head = AutoModelForCausalLM.from_config(config).get_output_embeddings()
    return nn.Linear(config.hidden_size, config.vocab_size, bias=own_head.bias is not None)


def postprocess_logits(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """What backbones do to logits after the head: Cohere scales, Granite divides, Gemma 2 and 3 cap softly.

    The same configuration fields are read by TRL's fused loss, so both give the same numbers.
    """
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / scaling
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


# Rows of logits that exist at a time: 50 MB of them for a vocabulary of 49,152.
HEAD_ROWS = 256


class _FrozenHeadLoss(torch.autograd.Function):
    """The summed cross-entropy through a frozen head. The gradient for the hidden states is made in the forward pass, a
    few rows at a time, so that the logits of all rows never exist at once: on CPUs they and their softmax cost more
    than all decoder layers of a small backbone, on GPUs they take most of the memory."""

    @staticmethod
    def forward(ctx, hidden_states, targets, weight, bias, text_config):
        gradient = torch.empty_like(hidden_states)
        total = hidden_states.new_zeros((), dtype=torch.promote_types(hidden_states.dtype, torch.float32))
        for start in range(0, len(hidden_states), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            logits = nn.functional.linear(hidden_states[rows], weight, bias).to(total.dtype)  # (rows, vocab_size)
            logits = postprocess_logits(logits, text_config)
            cap = getattr(text_config, "final_logit_softcapping", None)
            slope = None if cap is None else 1 - (logits / cap) ** 2
            top, target = logits.amax(dim=1, keepdim=True), targets[rows, None]  # (rows, 1)
            picked = logits.gather(1, target)
            weights = logits.sub_(top).exp_()  # in place, as all of this: a copy would cost as much as the product
            mass = weights.sum(dim=1, keepdim=True)
            total += (mass.log() + top - picked).sum()
            d_logits = weights.div_(mass).scatter_add_(1, target, weights.new_full(target.shape, -1.0))
            if slope is not None:
                d_logits *= slope
            gradient[rows] = d_logits.to(weight.dtype) @ weight
        scale = getattr(text_config, "logit_scale", None) or 1.0
        scale /= getattr(text_config, "logits_scaling", None) or 1.0
        ctx.save_for_backward(gradient.mul_(scale) if scale != 1.0 else gradient)
        return total

    @staticmethod
    def backward(ctx, d_total):
        (gradient,) = ctx.saved_tensors
        return gradient * d_total.to(gradient.dtype), None, None, None, None


def frozen_head_nll(
    hidden_states: torch.Tensor, targets: torch.LongTensor, head: nn.Linear, text_config: PreTrainedConfig
) -> torch.Tensor:
    """Sum of the negative log-likelihoods of `targets` (rows,) through a frozen head, from `hidden_states`
    (rows, hidden).

    The head gets no gradient, and the loss cannot be differentiated twice.
    """
    return _FrozenHeadLoss.apply(hidden_states, targets, head.weight, head.bias, text_config)
