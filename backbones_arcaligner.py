"""Backbones: which ones can be refined, what a layer costs, what the head does."""

import inspect
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
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
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
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


class LayerKeysValues:
    """Stands in for the cache in compiled code: the part of one layer, independent of its index."""

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


# What forwards record

try:  # a variable that the hooks of `output_attentions=True` write to; transformers has no public name for it
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # then attentions are recorded for the passes of refinement as well
    _active_collector = ContextVar("active_collector", default=None)


def is_recording_outputs() -> bool:
    """Whether this forward records attentions or router logits."""
    return bool(_active_collector.get())


class not_recording_outputs:  # noqa: N801 - a context manager, used like a function
    """Inside, nothing is recorded: attentions and router logits are those of the mandatory pass."""

    def __enter__(self):
        self.token = _active_collector.set(None)

    def __exit__(self, *exception):
        _active_collector.reset(self.token)


# What a layer costs


class LayerCost(NamedTuple):
    """Operations of one decoder layer; the methods take counts or tensors of them."""

    linears: int  # for one row, without LoRA
    lora: int  # for one slot
    keys_values: int  # for the keys and values of one row; an upper bound
    keys_values_lora: int  # for one slot
    key: int  # for the attention of one row to one key
    gate: int  # for one slot

    def of_prefill(self, num_text, num_slots):
        """The cost of a slot prefix with the gates off: `num_text` rows of text and `num_slots` slots."""
        length = num_text + num_slots
        return self.linears * length + self.lora * num_slots + self.key * length * length // 2

    def of_keys_values(self, num_text, num_slots):
        """The cost of the keys and values of a slot prefix, paid once before a layer's first step."""
        return self.keys_values * (num_text + num_slots) + self.keys_values_lora * num_slots

    def of_slot_pass(self, num_text, num_slots):
        """The cost of another pass of one slot through the layer. It attends to the prefix and to the other slots."""
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


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Positions of `hidden_states` (batch, seq_len, hidden) that logits are computed for: the last ones, 0 for all, or
    those of a tensor, (positions,) for all rows or (batch, positions)."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() == 2:
        return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)
    return hidden_states[:, logits_to_keep]


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
