"""ArcAligner on a decoder-only backbone (huggingface.co/papers/2601.05038), bottom-up, in the order of the data flow:

    context_embeds -> ContextProjector (Eq. 1) -> rows of the prompt's slots (Eq. 2) -> decoder layers, each with
    LoRA on slots (Eq. 3-4) and, if it has a gate, refinement of the slots whose gate is open (Eq. 5-9) -> logits

Shapes: batch, seq_len, max_slots (slots of the fullest row), max_text (text before the last slot), hidden.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.logits_process import SuppressTokensLogitsProcessor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from .attention_arcaligner import (
    CACHE,
    MASK_KERNELS,
    SlotLayout,
    check_can_separate,
    check_passage_ids,
    find_slots,
    prompt_positions,
    separate_inputs,
    slot_bias_of,
    with_slot_bias,
)
from .configuration_arcaligner import (
    REFINEMENT_SETTINGS,
    ArcAlignerConfig,
    check_answerability_layers,
    check_gates,
    check_length,
    check_multihop_head,
)
from .loading_arcaligner import HEADS, AlignerMixin
from .pointer_arcaligner import PointerAttention, attention_to_slots
from .refinement_arcaligner import (
    AllSlotsSteps,
    CompleteKeysValues,
    KeysValuesComplete,
    KeysValuesRecorder,
    LayerCost,
    LayerKeysValues,
    MovedKeysValues,
    OpenSlotsSteps,
    RefinementKeysValues,
    RefinementSettings,
    Slots,
    SlotStates,
    StepInputs,
    StepPositions,
    count_layer_cost,
    later_text_inputs,
    new_slots,
    prefix_inputs,
    step_inputs,
    take_positions,
)

logger = logging.get_logger(__name__)

# Below zero: without training in stage III, all gates are closed, so the model equals that of stage II.
FRESH_GATE_BIAS = -0.5


@dataclass
class ArcAlignerModelOutputWithPast(BaseModelOutputWithPast):
    """Adds to `BaseModelOutputWithPast`:

    recursion_depth (`torch.LongTensor` of shape `(batch, num_layers, max_slots)`, *optional*):
        Refinement steps taken per layer and slot, -1 where there is no slot. Only if the input has slots.
    """

    recursion_depth: torch.LongTensor | None = None


@dataclass
class ArcAlignerCausalLMOutputWithPast(CausalLMOutputWithPast):
    """Adds to `CausalLMOutputWithPast` the `recursion_depth` of [`ArcAlignerModelOutputWithPast`] and:

    answerability_logits (`torch.FloatTensor` of shape `(batch,)`, *optional*):
        Log-odds that the passages contain an answer, computed from the last token, so the prompt has to be padded on
        the left. Only with an [`AnswerabilityHead`], and not in training or for generated tokens.
    """

    recursion_depth: torch.LongTensor | None = None
    answerability_logits: torch.FloatTensor | None = None


@dataclass
class PrefillOutputs:
    """Outputs of the prompt's prefill other than the scores of the first token. `generate(...,
    prefill=PrefillOutputs())` sets them before logits processors and streamers get the first token. Rows are repeated
    for beams and samples.

    Args:
        recursion_depth (`torch.LongTensor` of shape `(batch * num_beams, num_layers, max_slots)`, *optional*):
            Refinement steps, as in [`ArcAlignerModelOutputWithPast`], of slots that were computed, not cached.
        answerability_logits (`torch.FloatTensor` of shape `(batch * num_beams,)`, *optional*):
            As in [`ArcAlignerCausalLMOutputWithPast`]. Not with assisted decoding, which computes more than the prompt.
    slot_attention (`torch.FloatTensor` of shape `(batch * num_beams, max_slots)`, *optional*):
        The pointer heads' attention to the slots of each row, in their order; rows with fewer slots end in zeros.
        Not with assisted decoding.
    is_slot (`torch.BoolTensor` of shape `(batch, prompt_len)`, *optional*):
        Which positions of the prompt are slots, if the aligner has pointer heads.
    pointer ([`PointerAttention`], *optional*):
        Their attention to all positions.
    """

    recursion_depth: torch.LongTensor | None = None
    answerability_logits: torch.FloatTensor | None = None
    slot_attention: torch.FloatTensor | None = None
    is_slot: torch.BoolTensor | None = None
    pointer: PointerAttention | None = None


class ContextProjector(nn.Module):
    """`W_psi` (Eq. 1): context embeddings (..., encoder_hidden_size) to slot embeddings (..., hidden).

    With `word_parts`, beyond the paper, the slot's words are added: their embeddings in the backbone's frozen table,
    minus the table's mean, are averaged within each part of the slot and passed through a linear map of this part,
    which is the identity at first. The weight of a word in the average depends on its rarity at first, and is learned.
    The sum is scaled to the norm of a word's embedding: the frozen layers copy a slot that is much larger, and ignore
    one that is much smaller.
    """

    def __init__(self, encoder_hidden_size: int, hidden_size: int, word_parts: int = 0, vocab_size: int = 0):
        super().__init__()
        self.word_parts = word_parts
        self.up = nn.Linear(encoder_hidden_size, hidden_size)
        self.act = nn.GELU()
        self.out = nn.Linear(hidden_size, hidden_size)
        if word_parts:
            self.part_maps = nn.Parameter(torch.empty(word_parts, hidden_size, hidden_size))
            self.slot_norm = nn.Parameter(torch.empty(()))  # Euclidean norm of a slot, without the mean embedding
            self.slot_mean = nn.Parameter(torch.empty(hidden_size))
            self.register_buffer("word_mean", torch.empty(hidden_size))
            self.word_weights = nn.Parameter(torch.empty(vocab_size))

    def forward(self, context_embeds: torch.Tensor, part_embeds: torch.Tensor | None = None) -> torch.Tensor:
        """`context_embeds` (..., encoder_hidden_size) and `part_embeds` (..., word_parts, hidden), from
        `average_words`, to slots (..., hidden)."""
        slots = self.out(self.act(self.up(context_embeds.to(self.up.weight.dtype))))  # (..., hidden)
        if part_embeds is None:
            return slots
        slots = slots + torch.einsum("...pd,ped->...e", part_embeds.to(slots.dtype), self.part_maps)
        return nn.functional.normalize(slots, dim=-1) * self.slot_norm + self.slot_mean

    def average_words(self, word_ids: torch.LongTensor, table: torch.Tensor) -> torch.Tensor:
        """The words of each part of a slot, weighted relative to all words of the slot.

        Args:
            word_ids (`torch.LongTensor` of shape `(..., max_words)`): Ids of a slot's tokens in order, -1 after them.
            table (`torch.Tensor` of shape `(vocab_size, hidden)`): The backbone's embeddings.

        Returns:
            `torch.Tensor` of shape `(..., word_parts, hidden)`; the sum over the parts is the slot's weighted mean.
        """
        is_word = word_ids >= 0
        ids = word_ids.clamp(min=0)  # padding gets any word, with the weight 0
        weights = self.word_weights[ids].float().abs() * is_word  # (..., max_words)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-6)  # (..., max_words), a sum of 1
        num_words = is_word.sum(dim=-1, keepdim=True).clamp(min=1)  # (..., 1)
        part = torch.arange(word_ids.shape[-1], device=ids.device) * self.word_parts // num_words  # (..., max_words)
        in_part = part[..., None, :] == torch.arange(self.word_parts, device=ids.device)[:, None]
        # Subtract the mean of all embeddings, which would otherwise dominate an average of words.
        words = nn.functional.embedding(ids, table).float() - self.word_mean.float()  # (..., max_words, hidden)
        return (weights[..., None, :] * in_part) @ words  # (..., word_parts, hidden)


ADAPTER_NAME = "slot"

ALL_POSITIONS = ...

# Of flat positions (batch * seq_len): indices (num_slots,), a slice if slots are adjacent, or all positions.
PositionIndex = torch.Tensor | slice | EllipsisType


class _SlotScope(threading.local):
    def __init__(self):  # runs in each thread; compiled code would treat defaults of the class in another way
        self.positions: PositionIndex | None = None  # None: LoRA off. ALL_POSITIONS: each is a slot.
        # The input of the last linear, and its slots: query, key and value have the same input, and gate and up.
        self.input: torch.Tensor | None = None
        self.slots: torch.Tensor | None = None


_scope = _SlotScope()


@contextlib.contextmanager
def lora_on(positions: PositionIndex | None):
    """Context in which LoRA is applied to `positions`. They cannot be an argument, because attention and MLP of the
    backbone call PEFT's layers without further arguments."""
    before, _scope.positions = _scope.positions, positions
    _scope.input = _scope.slots = None
    try:
        yield
    finally:
        _scope.positions = before
        _scope.input = _scope.slots = None


def _slots_of(x: torch.Tensor, positions: PositionIndex) -> torch.Tensor:
    """The slots (num_slots, features) of `x` (batch, seq_len, features); a view if they are adjacent."""
    x, width = x.contiguous(), x.shape[-1]
    if isinstance(positions, slice):  # view and slice in one operation: a GPU waits for each operation of the host
        return x.as_strided(
            (positions.stop - positions.start, width), (width, 1), x.storage_offset() + positions.start * width
        )
    return x.view(-1, width) if positions is ALL_POSITIONS else x.view(-1, width).index_select(0, positions)


def _shared_slots_of(x: torch.Tensor, positions: PositionIndex) -> torch.Tensor:
    """As `_slots_of`, once for all linears with the same input `x`."""
    if torch.compiler.is_compiling():
        return _slots_of(x, positions)
    if _scope.input is not x:
        _scope.input, _scope.slots = x, _slots_of(x, positions)
    return _scope.slots


def _add_residual_(
    result: torch.Tensor,
    positions: PositionIndex,
    slots: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Add `scaling * x A B` to the slots of the contiguous `result` (batch, seq_len, out_features), in place, and
    return `x A`. x are the `slots` (num_slots, in_features), A is `down` (in_features, r), B is `up` (r,
    out_features)."""
    hidden = torch.mm(slots, down)  # (num_slots, r)
    if isinstance(positions, torch.Tensor):
        result.view(-1, result.shape[-1]).index_add_(0, positions, torch.mm(hidden, up), alpha=scaling)
    else:  # one prompt: its slots are adjacent, so the sum is written in place
        _slots_of(result, positions).addmm_(hidden, up, alpha=scaling)
    return hidden


class _SlotResidual(torch.autograd.Function):
    """Eq. 3 with explicit gradients: autograd would fill a tensor of all positions with zeros for each linear.

    The gradient of the frozen `result` (batch, seq_len, out_features) passes unchanged. The caller takes `slots`
    (num_slots, in_features) from the linear's input, so that their gradients are summed over the linears that share
    this input.
    """

    @staticmethod
    def forward(ctx, result, slots, down, up, scaling, positions):
        # Not in place, because autograd and hooks may hold the frozen result.
        down_t, up_t = down.transpose(0, 1), up.transpose(0, 1)  # (in_features, r), (r, out_features)
        if positions is ALL_POSITIONS:
            hidden = torch.mm(slots, down_t)  # (num_slots, r)
            flat = result.reshape(-1, result.shape[-1])  # (batch * seq_len, out_features)
            total = torch.addmm(flat, hidden, up_t, alpha=scaling).view_as(result)
        else:
            total = result.clone(memory_format=torch.contiguous_format)
            hidden = _add_residual_(total, positions, slots, down_t, up_t, scaling)
        ctx.save_for_backward(slots, hidden, down, up, positions if isinstance(positions, torch.Tensor) else None)
        ctx.scaling, ctx.positions = scaling, None if isinstance(positions, torch.Tensor) else positions
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        slots, hidden, down, up, index = ctx.saved_tensors
        d_residual = _slots_of(d_total, ctx.positions if index is None else index)  # (num_slots, out_features)
        # `beta=0`: a scaled product in one operation; of the first argument only the shape is used.
        d_hidden = torch.addmm(hidden, d_residual, up, beta=0, alpha=ctx.scaling)  # (num_slots, r)
        _, for_slots, for_down, for_up, *_ = ctx.needs_input_grad
        d_slots = torch.mm(d_hidden, down) if for_slots else None  # (num_slots, in_features)
        d_down = torch.mm(d_hidden.transpose(0, 1), slots) if for_down else None  # (r, in_features)
        d_up = torch.addmm(up, d_residual.transpose(0, 1), hidden, beta=0, alpha=ctx.scaling) if for_up else None
        return d_total, d_slots, d_down, d_up, None, None


class SlotLoraVariant(LoraVariant):
    """PEFT's interface for another LoRA formula in its layers: here the usual formula, on slots only."""

    def supports_lora_conversion(self) -> bool:
        return False

    @staticmethod
    def init(module: LoraLayer, adapter_name: str, **kwargs) -> None:
        pass

    @staticmethod
    def _refuse_merge(module, active_adapter, orig_weight):
        raise ValueError(
            f"The LoRA adapter `{active_adapter}` cannot be merged, because it applies to slots only, but merged "
            "weights would also apply it to text. Leave the adapter unmerged."
        )

    merge_safe = merge_unsafe = unmerge = _refuse_merge

    @staticmethod
    def forward(module, active_adapter, x, result, **kwargs):
        """Eq. 3: add the residual to the slots of the frozen `result` (batch, seq_len, out_features)."""
        positions = _scope.positions
        if positions is None:
            return result
        # A and B are computed for slots only: PEFT would compute them for all positions, and most results would be
        # masked.
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        dropout, scaling = module.lora_dropout[active_adapter], module.scaling[active_adapter]
        is_patched = "forward" in vars(down) or "forward" in vars(up)  # offloading replaces it, to fetch weights
        if is_patched or result.dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
            slots = down(dropout(_slots_of(x, positions).to(down.weight.dtype)))  # (num_slots, r)
            residual = up(slots * scaling).to(result.dtype)  # (num_slots, out_features)
            flat = result.reshape(-1, result.shape[-1]).clone()  # (batch * seq_len, out_features)
            if isinstance(positions, torch.Tensor):
                return flat.index_add(0, positions, residual).view_as(result)
            flat[positions] += residual
            return flat.view_as(result)
        slots = _shared_slots_of(x, positions)  # (num_slots, in_features)
        if dropout.training:
            slots = dropout(slots)
        down, up = (part.weight if part.weight.dtype == x.dtype else part.weight.to(x.dtype) for part in (down, up))
        if torch.is_grad_enabled():
            return _SlotResidual.apply(result, slots, down, up, scaling, positions)
        result = result.contiguous()
        _add_residual_(result, positions, slots, down.t(), up.t(), scaling)
        return result


# One class for each pair of mixin and class: compiled code is for a class, and layers share it if they share a class.
@functools.cache
def _subclass(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _empty_module(mixin: type, cls: type[nn.Module]) -> nn.Module:
    """Make the empty module that `pickle` and `copy` fill: pickle cannot find two classes under one name."""
    subclass = _subclass(mixin, cls)
    return subclass.__new__(subclass)


class InPlaceMixin:
    """Base of the mixins for `mix_in`."""

    def __reduce_ex__(self, protocol):
        return _empty_module, type(self).__bases__, self.__getstate__()


def mix_in(mixin: type[InPlaceMixin], module: nn.Module) -> None:
    """Give `module` a subclass of its class that inherits from `mixin` first, in place."""
    module.__class__ = _subclass(mixin, type(module))


# A product of fewer rows, or with a smaller weight, takes less time than the copies to another layout of tensors.
LEAST_ROWS, LEAST_WEIGHT = 16, 2**16


@functools.cache
def has_slow_mkl() -> bool:
    """Whether PyTorch multiplies float32 with MKL on an x86 CPU with AVX-512 that is not Intel's. On such a CPU, MKL
    uses half of the width of the vector units, and oneDNN all of it."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    is_wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return is_wide and cpuinfo.exists() and "GenuineIntel" not in cpuinfo.read_text()


class FrozenLinear(InPlaceMixin):
    """A linear layer of the base model that multiplies large float32 tensors with oneDNN where MKL is slow. This is up
    to twice as fast as MKL; terms are added in another order, so results differ by rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        # The condition that decides most often comes first: the host checks it for each linear, and a GPU waits.
        if weight.dtype != torch.float32 or weight.numel() < LEAST_WEIGHT or not self._is_slow(x):
            return nn.functional.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])  # (num_rows, in_features)
        # oneDNN caches half a megabyte of code for each number of rows, so there are eight numbers between two powers
        # of 2.
        step = max(LEAST_ROWS, 2 ** (len(rows).bit_length() - 4))
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % step)).to_mkldnn()  # in the layout of oneDNN
        products = nn.functional.linear(padded, weight, bias).to_dense()  # (num_rows + padding, out_features)
        return products[: len(rows)].view(*x.shape[:-1], -1)

    def _is_slow(self, x: torch.Tensor) -> bool:
        """Whether PyTorch would multiply `x` with MKL, slowly, and nothing prevents oneDNN."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not has_slow_mkl():
            return False
        is_plain = x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        is_large = x.numel() >= LEAST_ROWS * x.shape[-1]
        return is_plain and is_large and x.device.type == self.weight.device.type == "cpu"


class SlotLoraLayer(InPlaceMixin):
    """A PEFT layer without PEFT's checks, if its only adapter is the slots' LoRA. The checks take longer than the
    linears of a small backbone. Without slots, as in decoding, the layer is its frozen linear."""

    low_rank: tuple[nn.ModuleDict, ...]  # the dictionaries of PEFT's layer for A, B and dropout, by adapter
    _factors: tuple | None = None  # the state of the weights, and the result of `factors` for it

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args or kwargs or self.active_adapter != [ADAPTER_NAME] or self.merged_adapters:
            return super().forward(x, *args, **kwargs)
        if (positions := _scope.positions) is None:
            return self.base_layer(x)
        if self.disable_adapters:
            return super().forward(x)
        result = self.base_layer(x)
        if (factors := self.factors(x, result)) is None:
            return SlotLoraVariant.forward(self, ADAPTER_NAME, x, result)
        result = result.contiguous()  # in place: a copy of the text in each linear would cost a tenth of a prefill
        _add_residual_(result, positions, _shared_slots_of(x, positions), *factors, self.scaling[ADAPTER_NAME])
        return result

    def factors(self, x: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A (in_features, r) and B (r, out_features) in the backbone's `dtype`, from the weights `down` (r,
        in_features) and `up` (out_features, r); cached as long as these do not change.

        The host runs this for each linear, and a GPU waits: so the statements are plain, and the dictionaries are not
        searched as attributes of the module.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        linears_a, linears_b, dropouts = self.low_rank
        down, up = linears_a[ADAPTER_NAME], linears_b[ADAPTER_NAME]
        if dropouts[ADAPTER_NAME].training or "forward" in vars(down) or "forward" in vars(up):
            return None
        down, up = down.weight, up.weight
        try:
            state = x.device, x.dtype, result.dtype, down.data_ptr(), down._version, up.data_ptr(), up._version
        except RuntimeError:  # weights that were made in inference mode have no version
            return None
        cached = self._factors  # a local reference: another thread may replace the attribute
        if cached is None or cached[0] != state:
            if x.dtype != result.dtype or x.device != down.device:  # a replica on another device has other weights
                return None
            sources = down.detach(), up.detach()  # referenced, so that no other weights get their addresses
            self._factors = cached = state, x.device.type, [part.to(x.dtype).t() for part in sources], sources
        return None if torch.is_autocast_enabled(cached[1]) else cached[2]

    def train(self, mode: bool = True):
        self._factors = None  # training, such as sharded training, may write weights without counting a version
        return super().train(mode)

    def __getstate__(self):
        return super().__getstate__() | {"_factors": None}


def slot_lora_layers(module: nn.Module):
    """The PEFT layers below `module` that have the slot LoRA."""
    return (m for m in module.modules() if isinstance(m, LoraLayer) and ADAPTER_NAME in m.lora_A)


def check_adapters(backbone: nn.Module) -> None:
    """Raise `ValueError` if an adapter other than the slots' LoRA is active or merged."""
    layer = next(slot_lora_layers(backbone), None)  # none with `lora_r=0`
    adapters = [ADAPTER_NAME] if layer is None else [*layer.active_adapters, *layer.merged_adapters]
    if adapters != [ADAPTER_NAME]:
        raise ValueError(
            f"Active or merged PEFT adapters: {adapters}; expected only {ADAPTER_NAME!r}, the LoRA of the slots. "
            "Activate only this adapter. To train it, call `model.set_stage`, and pass no `peft_config` to the trainer."
        )


def inject_slot_lora(backbone: nn.Module, layers: nn.ModuleList, config) -> None:
    """Put PEFT's LoRA layers (adapter `slot`) into `backbone`, in place; none with `lora_r=0`."""
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
        layer.low_rank = layer.lora_A, layer.lora_B, layer.lora_dropout  # a tuple: else modules had a second name
        if type(layer.base_layer) is nn.Linear:
            mix_in(FrozenLinear, layer.base_layer)
        layer.lora_variant[ADAPTER_NAME] = SlotLoraVariant()
        layer.cast_input_dtype_enabled = False  # the variant casts the slots; PEFT would cast all positions


class SlotGate(nn.Module):
    """The gate of one layer (Eq. 5): slot states (..., hidden) to the probability (..., 1) of another pass."""

    def __init__(self, hidden_size: int, gate_hidden_size: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, gate_hidden_size)
        self.act = nn.SiLU()
        self.out = nn.Linear(gate_hidden_size, 1)

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        # In float32, the dtype of its weights: near the threshold, rounding would decide.
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
    """Eq. 8: slots (batch, width, hidden) take the `candidate` where their `gate` (batch, width, 1) is open: a boolean
    or, in training, a number from [`straight_through_gate`]."""
    if gate.dtype == torch.bool:
        return torch.where(gate, candidate, states)
    return states + gate.to(states.dtype) * (candidate - states)


# Recording of outputs
try:  # a variable that the hooks of `output_attentions=True` write to; transformers has no public name for it
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # then attentions of refinement passes are recorded as well
    _active_collector = ContextVar("active_collector", default=None)


def is_recording_outputs() -> bool:
    """Whether this forward records attentions or router logits."""
    return bool((_active_collector.get() or {}).keys() - {"hidden_states"})


class not_recording_outputs:  # noqa: N801 - a context manager, used like a function
    """Context in which nothing is recorded, so that attentions and router logits are those of the mandatory pass."""

    def __enter__(self):
        self.token = _active_collector.set(None)

    def __exit__(self, *exception):
        _active_collector.reset(self.token)


class LayerStates:
    """States of the input's last token in some layers. Layers return hidden states only, so they write these states
    here.

    Args:
        layers (`list[int]`): These layers, in ascending order.
        are_all (`bool`): Whether the forward needs no other output. Then layers above the last of `layers` do nothing.
    """

    def __init__(self, layers: list[int], are_all: bool = False):
        self.layers, self.are_all = layers, are_all
        # An attribute: if this object were a dictionary, hooks that move a layer's inputs to its device would copy it.
        self.by_layer: dict[int, torch.Tensor] = {}  # each (batch, hidden)

    def need(self, layer_idx: int) -> bool:
        """Whether the layer has to be computed."""
        return not self.are_all or layer_idx <= self.layers[-1]

    def record(self, layer_idx: int, hidden_states: torch.Tensor) -> None:
        """Record the state of the last token of the states (batch, seq_len, hidden) that a layer returns, if it is one
        of these layers."""
        if layer_idx in self.layers:
            self.by_layer[layer_idx] = hidden_states[:, -1].clone()  # a view would hold all states in memory

    def stacked(self) -> torch.Tensor:
        """The recorded states (batch, num_layers, hidden), on the device of the last layer."""
        device = self.by_layer[self.layers[-1]].device
        return torch.stack([self.by_layer[layer_idx].to(device) for layer_idx in self.layers], dim=1)


class SlotDecoderLayer(InPlaceMixin):
    """What ArcAligner adds to a decoder layer of the backbone, by `mix_in`.

    The layer keeps its class name, its state-dict keys and its role in checkpointing, sharding and output recording.
    """

    arcaligner_config: ArcAlignerConfig
    layer_idx: int
    is_last: bool
    has_lora_on_text: bool  # whether LoRA is an ordinary one, on all positions
    slot_cost: LayerCost
    _compiled_algorithm: Callable | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        slots: Slots | None = None,
        layer_states: LayerStates | None = None,
        pointer: PointerAttention | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Run the backbone's layer and, with `slots`, its part of Algorithm 1; states are (batch, seq_len, hidden)."""
        if layer_states is not None and not layer_states.need(self.layer_idx):
            return hidden_states
        has_pointer = pointer is not None and self.layer_idx in pointer.heads and kwargs.get(CACHE) is not None
        last = hidden_states[:, -1:].clone() if has_pointer else None  # a layer may change its input in place
        if slots is None and self._compiled_algorithm is None and not self.has_lora_on_text:
            # A generated token: the unchanged layer.
            hidden_states = super().forward(hidden_states, **kwargs)
        else:
            run = self._algorithm_1 if self._compiled_algorithm is None else self._run_compiled
            hidden_states, depth = run(hidden_states, slots, kwargs)
            if depth is not None:
                slots.depths.by_layer[self.layer_idx] = depth
        if layer_states is not None:
            layer_states.record(self.layer_idx, hidden_states)
        if has_pointer:
            with lora_on(ALL_POSITIONS if self.has_lora_on_text else None):
                pointer.add(self, super(SlotDecoderLayer, type(self)).forward, last, kwargs)
        return hidden_states

    def _algorithm_1(
        self, hidden_states: torch.Tensor, slots: Slots | None, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The body of Algorithm 1's loop over layers.

        Returns the layer's output (batch, seq_len, hidden) and, if it refined slots, their numbers of steps (batch,
        max_slots).
        """
        if slots is None:
            with lora_on(ALL_POSITIONS if self.has_lora_on_text else None):
                return super().forward(hidden_states, **kwargs), None
        hidden_states = self._mandatory_pass(hidden_states, slots, kwargs)  # Eq. 4
        if not self._may_refine(slots):
            return self._with_unused_gate(hidden_states, slots.settings), None
        # Both kinds of steps have the same result for the slots (`tests/test_algorithm.py`), and compute other
        # positions.
        takes_all_slots = self.training or torch.compiler.is_compiling()
        hidden = SlotStates(hidden_states, slots.layout)
        slot_pass = functools.partial(self._slot_pass, hidden, slots, kwargs)
        steps = (AllSlotsSteps if takes_all_slots else OpenSlotsSteps)(self, hidden, slots, slot_pass)
        states = hidden.slots()  # (batch, max_slots, hidden)
        for _ in range(slots.settings.max_refinement_steps):
            if not steps.can_compute_gates():  # a budget is spent
                break
            prob = self.gate_prob(states, slots.settings)  # Eq. 5, (batch, width, 1)
            is_open = prob >= slots.settings.gate_threshold
            gate = straight_through_gate(prob, is_open) if self.training else is_open  # Eq. 7
            states, gate = steps.narrow(states, gate, prob)  # (batch, width, ...): only slots that a step computes
            if gate is None:  # all are closed: their input has not changed, so they stay closed
                break
            candidate = steps.reapply(states)  # Eq. 6
            states = gated_update(states, candidate, gate)  # Eq. 8
        return steps.write_back(states)  # Eq. 9: text stays; also the depths

    def _mandatory_pass(self, hidden_states: torch.Tensor, slots: Slots, kwargs: dict[str, Any]) -> torch.Tensor:
        """The layer applied once to all positions (batch, seq_len, hidden), with LoRA on slots (Eq. 3).

        If independent passages are moved, the text after the slots is computed once more: it attends to the slots at
        other positions than they attend to each other.
        """
        cache = None if slots.rotation is None else MovedKeysValues(kwargs.get(CACHE), slots.rotation)
        if cache is not None and is_recording_outputs():
            raise ValueError(
                "`output_attentions` is set, but attentions cannot be recorded for passages of different lengths with "
                "`passage_alignment='end'`: a slot then has one position for its passage, and another for the text "
                "after it. Leave out `output_attentions`, pass only one passage, or cache the passages with a "
                "`PassageCache` first."
            )
        with lora_on(self._lora_positions(slots.flat_index())):
            # The explicit form of `super` can be compiled twice in a method.
            run_layer = super(SlotDecoderLayer, self).forward  # noqa: UP008
            output = run_layer(hidden_states, **(kwargs if cache is None else {**kwargs, CACHE: cache}))
        positions, cells = slots.layout.later_text, slots.layout.later_cells
        if cache is None or positions.shape[1] == 0:
            return output
        inputs = slots.later_text_inputs.get(kwargs, lambda: later_text_inputs(positions, kwargs))
        text_kwargs = {**kwargs, **inputs, CACHE: CompleteKeysValues(cache.keys, cache.values)}
        with lora_on(ALL_POSITIONS if self.has_lora_on_text else None), not_recording_outputs():
            # (batch, max_later, hidden)
            text = run_layer(take_positions(hidden_states, positions), **text_kwargs)
        return torch.where(cells[:, :, None] >= 0, take_positions(text, cells), output)

    def _lora_positions(self, positions: PositionIndex | None) -> PositionIndex | None:
        """The positions that LoRA is applied to: `positions`, unless LoRA is on all positions."""
        return ALL_POSITIONS if self.has_lora_on_text else positions

    def _may_refine(self, slots: Slots) -> bool:
        """Whether this layer may take refinement steps."""
        settings, layout = slots.settings, slots.layout
        if self.slot_gate is None or settings.gate_mode == "off" or settings.max_refinement_steps == 0:
            return False
        # The last layer's states of slots are used only if a prompt ends in a slot; training takes all steps.
        return layout.slot_indices.shape[0] > 0 and (
            self.training or not self.is_last or layout.ends_in_slot is not None
        )

    def _with_unused_gate(self, hidden_states: torch.Tensor, settings: RefinementSettings) -> torch.Tensor:
        """In training, a gate without slots gets a gradient of zero instead of none: other processes wait for it."""
        if not self.training or self.slot_gate is None or settings.gate_mode != "adaptive":
            return hidden_states
        return hidden_states + self.slot_gate(hidden_states[:, :0]).sum().to(hidden_states.dtype)

    def gate_prob(self, slot_states: torch.Tensor, settings: RefinementSettings) -> torch.Tensor:
        """Eq. 5: slot states (..., hidden) to probabilities (..., 1); 1 in the mode `always`."""
        if settings.gate_mode == "always":
            return slot_states.new_ones(*slot_states.shape[:-1], 1)
        return self.slot_gate(slot_states)

    def compile(self, *args, **kwargs) -> None:
        """Compile the layer, as `nn.Module.compile`. Compiled code does not contain the layer's index and its place in
        the cache, so that layers share it.

        Compiled code does the same work for any decision of the gates, and the host reads no value, so that it can be
        captured in a CUDA graph: every slot is computed in each of `max_refinement_steps` steps. These run without
        compiled code: a forward with a budget, one whose independent passages are moved (`passage_alignment="end"`),
        one that records attentions, and one whose cache is offloaded or has no place for the layer yet (a static cache
        before `early_initialization`, `DynamicCache` without a configuration).
        """
        self._compiled_algorithm = torch.compile(self._algorithm_1, *args, **kwargs)

    def _run_compiled(
        self, hidden_states: torch.Tensor, slots: Slots | None, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_budget = slots is not None and slots.settings.budget is not None
        cache = kwargs.get(CACHE)
        is_moved = slots is not None and slots.rotation is not None  # compiled code would differ for each shape
        if has_budget or is_moved or is_recording_outputs() or not LayerKeysValues.fits(cache, self.layer_idx):
            return self._algorithm_1(hidden_states, slots, kwargs)
        if cache is not None:
            kwargs = {**kwargs, CACHE: LayerKeysValues(cache.layers[self.layer_idx])}
        if slots is not None:
            slots = slots._replace(layout=slots.layout.for_any_length())
        return self._compiled_algorithm(hidden_states, slots, kwargs)

    def __getstate__(self):
        state = super().__getstate__()
        state.pop("_compiled_algorithm", None)  # it holds this layer: a copy would run this layer's weights
        return state

    def _slot_pass(
        self, hidden: SlotStates, slots: Slots, kwargs: dict[str, Any], step_positions: StepPositions | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The layer as a function of the states (batch, width, hidden) of all slots, or of those of `step_positions`;
        all other positions stay fixed."""
        layout, dtype = slots.layout, hidden.hidden_states.dtype
        if self.arcaligner_config.text_config._attn_implementation not in MASK_KERNELS or (
            step_positions is None
            and slots.has_little_text
            and slots.settings.budget is None  # a budget pays for keys and values of the text once
            and not torch.compiler.is_compiling()
        ):
            return self._prefix_pass(hidden, slots, kwargs)
        if step_positions is None:
            all_slots = StepPositions(layout.slot_positions, layout.text_positions, None)
            inputs = slots.shared_inputs.get(kwargs, lambda: step_inputs(all_slots, kwargs, dtype))
        else:
            inputs = step_inputs(step_positions, kwargs, dtype)
        # The fixed positions are projected to keys and values once, not in each step.
        cache = RefinementKeysValues(*self._fixed_keys_values(hidden.hidden_states, inputs, kwargs))
        step_kwargs = {**kwargs, **inputs.for_slots, CACHE: cache}

        def reapply(states: torch.Tensor) -> torch.Tensor:
            with lora_on(ALL_POSITIONS), not_recording_outputs():
                return super(SlotDecoderLayer, self).forward(states, **step_kwargs)

        return reapply

    def _fixed_keys_values(
        self, hidden_states: torch.Tensor, inputs: StepInputs, kwargs: dict
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keys and values of the fixed positions of a step, each (batch, heads, max_fixed, head_dim)."""
        if inputs.positions.fixed_positions.shape[1] == 0:
            return None, None
        recorder = KeysValuesRecorder()
        fixed = take_positions(hidden_states, inputs.positions.fixed_positions)  # (batch, max_fixed, hidden)
        fixed_kwargs = {**kwargs, **inputs.for_fixed, CACHE: recorder}
        try:
            with lora_on(self._lora_positions(inputs.positions.fixed_slots)), not_recording_outputs():
                super().forward(fixed, **fixed_kwargs)
        except KeysValuesComplete:  # only an exception ends the layer of any backbone after its keys and values
            pass
        assert recorder.keys is not None, "the layer's attention wrote no keys and values to the cache it was given"
        return recorder.keys, recorder.values

    def _prefix_pass(
        self, hidden: SlotStates, slots: Slots, kwargs: dict[str, Any]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `_slot_pass` for all slots, but the layer computes the whole prefix. Used for attention kernels that take
        no mask of queries by keys, and if there is so little text that separating it would take longer."""
        layout, (batch, seq_len, _) = slots.layout, hidden.hidden_states.shape
        length = seq_len if layout.prefix_length is None else layout.prefix_length
        step_kwargs = kwargs | slots.shared_inputs.get(kwargs, lambda: prefix_inputs(length, kwargs))
        if batch == 1:  # the slots have the same positions in a prefix that is shorter
            index = slots.flat_index()
        else:
            index = layout.slot_indices // seq_len * length + layout.slot_indices % seq_len

        def reapply(states: torch.Tensor) -> torch.Tensor:
            with lora_on(self._lora_positions(index)), not_recording_outputs():
                output = super(SlotDecoderLayer, self).forward(hidden.prefix_with(states, length), **step_kwargs)
            return hidden.slots_of_prefix(output)

        return reapply


def add_slots_to_layer(layer: nn.Module, layer_idx: int, config: ArcAlignerConfig) -> None:
    """Make a decoder layer a `SlotDecoderLayer`, in place, with a gate if the configuration has one for this layer."""
    mix_in(SlotDecoderLayer, layer)
    layer.arcaligner_config = config
    layer.layer_idx = layer_idx
    layer.is_last = layer_idx == config.text_config.num_hidden_layers - 1
    layer.has_lora_on_text = config.lora_positions == "all"
    is_gated = layer_idx in config.gated_layers
    layer.slot_gate = SlotGate(config.text_config.hidden_size, config.gate_hidden_size) if is_gated else None
    layer.slot_cost = count_layer_cost(layer, config.text_config)


# Kinds of attention with which a layer can be applied again to its slots alone.
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Backbones that are refused for a reason that neither their configuration nor their layers' signatures show.
_CACHED_INPUT = "a linear layer of its attention takes cached states as input, so LoRA cannot be limited to slots"
_UNSUPPORTED = {
    "minicpm3": _CACHED_INPUT,
    "doge": _CACHED_INPUT,
    "modernbert-decoder": "its language-model head is more than one linear layer",
    "gemma3n_text": "its layers pass more than hidden states to each other",
}


def _refuse(config: PreTrainedConfig, reason: str):
    raise ValueError(
        f"The base model (of type `{config.model_type}`) is not supported: {reason}. Use a decoder-only model with "
        "rotary attention and dense layers, such as Llama, Mistral, Qwen2, Qwen3, Gemma 2 or 3, Phi-3, OLMo-2, "
        "SmolLM3, Granite or Cohere."
    )


def check_backbone_config(config: PreTrainedConfig) -> None:
    """Refuse a backbone whose configuration shows that it cannot be refined, before the model is made."""
    if config.model_type in _UNSUPPORTED:
        _refuse(config, _UNSUPPORTED[config.model_type])
    if config.is_encoder_decoder:
        _refuse(config, "it is an encoder-decoder model, but slots need a causal decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse(config, "transformers has no causal language model of this type")
    other_types = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYER_TYPES
    if other_types:
        _refuse(
            config,
            f"it has layers of the type {', '.join(sorted(other_types))}; expected only full or sliding attention",
        )


def find_decoder_layers(backbone: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of `backbone`: its only list of `num_hidden_layers` checkpointable layers.

    Raises:
        `ValueError`: a backbone that is not supported; the message names it and the reason.
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
        _refuse(config, f"it has {len(stacks)} stacks of {config.num_hidden_layers} decoder layers; expected 1")
    # The signature of a layer decides: an argument that it lacks would be ignored, or fail in the first forward.
    parameters = inspect.signature(type(stacks[0][0]).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        _refuse(
            config, "its decoder layers accept no additional keyword arguments, which ArcAligner needs to pass slots"
        )
    missing = {"attention_mask", "position_embeddings", CACHE} - set(parameters)
    if missing:
        _refuse(config, f"its decoder layers do not accept {' or '.join(f'`{name}`' for name in sorted(missing))}")
    if any(parameter.dim() > 2 for parameter in stacks[0].parameters()):
        _refuse(config, "its experts are fused into one parameter, so LoRA cannot be limited to slots")
    return stacks[0]


def make_lm_head(config: PreTrainedConfig) -> nn.Linear:
    """A head like the one of the backbone's causal language model in transformers: some have a bias."""
    with torch.device("meta"):
        original = AutoModelForCausalLM.from_config(config).get_output_embeddings()
    return nn.Linear(config.hidden_size, config.vocab_size, bias=original.bias is not None)


class ArcAlignerPreTrainedModel(AlignerMixin, PreTrainedModel):
    """Base of `ArcAlignerModel` and `ArcAlignerForCausalLM`: initialization and, from [`AlignerMixin`], checkpoints."""

    config_class = ArcAlignerConfig
    config: ArcAlignerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values", "cache"]

    def initialize_weights(self):
        """Initialize the aligner first: the backbone would initialize LoRA and gates like any other linear."""
        text_config = self.config.text_config
        for module in self.modules():
            if isinstance(module, ContextProjector):
                # Embeddings have norm 1; slots are at first about as large as the backbone's initial embeddings.
                init.normal_(module.up.weight, std=1.0)
                init.normal_(module.out.weight, std=1.5 * text_config.initializer_range / text_config.hidden_size**0.5)
                if module.word_parts:  # slots are at first the mean of their words, unweighted until training begins
                    init.normal_(module.out.weight, std=text_config.initializer_range / text_config.hidden_size**0.5)
                    init.copy_(module.part_maps, torch.eye(text_config.hidden_size).expand_as(module.part_maps))
                    init.ones_(module.slot_norm)
                    init.zeros_(module.slot_mean)
                    init.zeros_(module.word_mean)
                    init.ones_(module.word_weights)
            if isinstance(module, SlotGate):
                init.normal_(module.up.weight, std=self.config.initializer_range)
                init.zeros_(module.out.weight)
            if isinstance(module, ContextProjector | SlotGate):
                init.zeros_(module.up.bias)
                init.constant_(module.out.bias, FRESH_GATE_BIAS if isinstance(module, SlotGate) else 0.0)
            if isinstance(module, AnswerabilityHead):  # neutral until it is fitted
                init.zeros_(module.weight)
                init.zeros_(module.bias)
                init.copy_(module.match, torch.tensor(NO_MATCH))
            if isinstance(module, MultihopHead):
                init.zeros_(module.weight)
                init.zeros_(module.bias)
                init.copy_(module.pair, torch.tensor(NEUTRAL_PAIR))
        for layer in slot_lora_layers(self):
            init.kaiming_uniform_(layer.lora_A[ADAPTER_NAME].weight, a=5**0.5)
            init.zeros_(layer.lora_B[ADAPTER_NAME].weight)
        for name, parameter in self.named_parameters():
            if self.is_aligner_key(name):
                parameter._is_hf_initialized = True
        super().initialize_weights()


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache, which may be passed under either of its two names.

    Raises:
        `ValueError`: a cache under both names.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError(
            "Got both `past_key_values` and `cache`, two names of the same argument. Pass only one of them."
        )
    return past_key_values if cache is None else cache


class ArcAlignerModel(ArcAlignerPreTrainedModel):
    """The backbone's decoder with slots: `input_ids` with context tokens and `context_embeds` to hidden states.

    Raises:
        `ValueError`: a backbone that is not supported; the message names it and the reason.
    """

    _keys_to_ignore_on_load_unexpected = [rf"^{head}\." for head in HEADS]

    def __init__(self, config: ArcAlignerConfig, **kwargs):
        super().__init__(config, **kwargs)
        check_backbone_config(config.text_config)
        self.backbone = AutoModel.from_config(config.text_config)
        config.text_config = self.backbone.config
        self.projector = ContextProjector(
            config.encoder_hidden_size, config.text_config.hidden_size, config.word_parts, config.text_config.vocab_size
        )
        layers = find_decoder_layers(self.backbone)
        inject_slot_lora(self.backbone, layers, config)
        for layer_idx, layer in enumerate(layers):
            add_slots_to_layer(layer, layer_idx, config)
        self.layer_costs = [layer.slot_cost for layer in layers]
        self.decoder_layers = tuple(layers)  # not a list of modules, in which their weights would have second names
        self.post_init()
        self.freeze_base_model()

    def get_input_embeddings(self):
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.backbone.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        context_embeds: torch.FloatTensor | None = None,
        context_word_ids: torch.LongTensor | None = None,
        context_passage_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        gate_mode: str | None = None,
        gate_threshold: float | None = None,
        max_refinement_steps: int | None = None,
        refinement_budget: float | None = None,
        slot_bias: torch.FloatTensor | None = None,
        is_generated: bool = False,
        cache: Cache | None = None,
        **kwargs,
    ) -> ArcAlignerModelOutputWithPast:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, seq_len)`): Tokens; `config.context_token_id` marks a slot.
            context_embeds (`torch.FloatTensor` of shape `(batch, max_slots, encoder_hidden_size)`, *optional*):
                The embeddings `E` of the slots, in the order of the context tokens of a row, padded at the end.
            context_word_ids (`torch.LongTensor` of shape `(batch, max_slots, max_words)`, *optional*):
                With `config.word_parts`: the tokens of a slot's text, in order, padded with -1.
            context_passage_ids (`torch.LongTensor` of shape `(batch, max_slots)`, *optional*):
                With `config.passage_attention` `"separate"`: the number of each slot's passage, which never decreases
                along a row. Default: all slots of a row are of one passage.
            cache (`Cache`, *optional*): The name of `past_key_values` in transformers since 5.24.
            gate_mode, gate_threshold, max_refinement_steps (*optional*): Override the configuration for this forward.
            refinement_budget (`float`, *optional*):
                Maximum number of operations of a row's refinement, relative to those of the prefill up to its last
                slot; see [`RefinementBudget`]. 0 is no refinement, infinity is no limit.
            slot_bias (`torch.FloatTensor` of shape `(batch, prompt_len)`, *optional*):
                Beyond the paper: a number for each position of the prompt, added to the attention logits of text that
                attends to it. `generate` makes it from `passage_prior`. Slots attend to each other without it.
            is_generated (`bool`, defaults to `False`): Set by `generate` for new tokens, which are never slots.

        Raises:
            `ValueError`: slots and embeddings that do not fit each other, slots after a non-empty cache, a prompt
                longer than the backbone's context, an invalid setting of the gates or budget.
        """
        cache = one_cache(past_key_values, cache)
        gate_options = (gate_mode, gate_threshold, max_refinement_steps, refinement_budget)
        gate_options = {
            name: value for name, value in zip(REFINEMENT_SETTINGS, gate_options, strict=True) if value is not None
        }
        if not torch.compiler.is_compiling():
            self._check_inputs(input_ids, inputs_embeds, context_embeds, is_generated, gate_options)
        has_slots = input_ids is not None and context_embeds is not None
        slot_mask = input_ids == self.config.context_token_id if has_slots else None  # `M_r`, (batch, seq_len)
        text = inputs_embeds if input_ids is None else input_ids
        if not has_slots and text is not None and self.training and torch.is_grad_enabled():
            # Gradients of zero instead of none: other processes wait for those of each trained parameter.
            slot_mask, context_embeds, context_word_ids = self._no_slots(text)
        if slot_mask is not None:
            of_slots = (context_embeds, context_word_ids, context_passage_ids)
            kwargs["slots"], attention_mask, position_ids = self._prepare_slots(
                slot_mask, *of_slots, attention_mask, position_ids, cache, gate_options
            )
            inputs_embeds = self._embed(input_ids, inputs_embeds, slot_mask, context_embeds, context_word_ids)
            input_ids = None  # the backbone takes one of the two
        if slot_bias is not None:
            num_queries = (inputs_embeds if input_ids is None else input_ids).shape[1]
            attention_mask = with_slot_bias(attention_mask, slot_bias, slot_mask, num_queries, cache, self.dtype)
        outputs = self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: cache},
            **kwargs,
        )
        return ArcAlignerModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recursion_depth=kwargs["slots"].stacked_depths(len(self.decoder_layers)) if has_slots else None,
        )

    def _no_slots(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The slot mask, embeddings and words of an input (batch, seq_len, ...) without slots."""
        slot_mask = torch.zeros(text.shape[:2], dtype=torch.bool, device=text.device)  # (batch, seq_len)
        embeds = torch.zeros(len(text), 0, self.config.encoder_hidden_size, device=text.device)
        return slot_mask, embeds, slot_mask.new_zeros(len(text), 0, 1).long() if self.config.word_parts else None

    def _check_inputs(
        self,
        input_ids: torch.LongTensor | None,
        inputs_embeds: torch.FloatTensor | None,
        context_embeds: torch.FloatTensor | None,
        is_generated: bool,
        gate_options: dict[str, Any],
    ) -> None:
        """Check the gates' settings of a call, and the tokens of its input before its slots are searched. Compiled code
        checks nothing. A generated token is not checked, because the host would wait for the device."""
        if gate_options:  # the settings of the configuration were checked
            check_gates(**gate_options)
        slot_id = self.config.context_token_id
        if input_ids is None:
            if context_embeds is not None:
                raise ValueError(
                    "Got `context_embeds` without `input_ids`, which show where the slots are. Pass `input_ids` with "
                    f"the `context_token_id` {slot_id} in the place of each slot."
                )
            return
        if context_embeds is None and is_generated:
            return
        check_ids(input_ids, "`input_ids`", self.config.text_config.vocab_size, (slot_id,))
        if context_embeds is None:
            if (input_ids == slot_id).any():
                raise ValueError(
                    f"`input_ids` has slots (the `context_token_id` {slot_id}), but `context_embeds` is missing. Pass "
                    "`context_embeds`, as the processor returns it."
                )
        if inputs_embeds is not None:
            raise ValueError(
                "Got both `inputs_embeds` and `input_ids`. Pass only one of them; for a prompt with slots, pass "
                "`input_ids`."
            )

    def _prepare_slots(
        self,
        slot_mask: torch.BoolTensor,
        context_embeds: torch.FloatTensor,
        context_word_ids: torch.LongTensor | None,
        context_passage_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        cache: Cache | None,
        wanted: dict[str, Any],
    ) -> tuple[Slots, torch.Tensor | None, torch.LongTensor | None]:
        """The slots of a forward, with the mask and the positions of its prompt; `wanted` are the
        `REFINEMENT_SETTINGS` of the call. Compiled code checks nothing, and contains no Python numbers."""
        are_independent = self.config.passage_attention == "separate" and context_passage_ids is not None
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            passage_ids = context_passage_ids if are_independent else None
            self._check_slot_inputs(slot_mask, context_embeds, context_word_ids, passage_ids)
        is_moved = are_independent and self.config.passage_alignment == "end"
        layout = find_slots(slot_mask, attention_mask, context_embeds, context_passage_ids if is_moved else None)
        if are_independent:
            attention_mask, position_ids = separate_inputs(
                slot_mask, context_passage_ids, attention_mask, position_ids, cache, self.dtype
            )
        if is_compiling:
            layout = layout.for_any_length()
        else:
            check_length(slot_mask.shape[1], "The prompt", self.config.text_config, position_ids)
            check_slots_after_cache(self.config, layout, cache, context_passage_ids, wanted)
        settings = self.config.gate_settings(**wanted)
        slots = new_slots(self.config, settings, self.layer_costs, layout, self.training)
        return slots, attention_mask, position_ids

    def _check_slot_inputs(
        self,
        slot_mask: torch.BoolTensor,
        context_embeds: torch.FloatTensor,
        context_word_ids: torch.LongTensor | None,
        passage_ids: torch.LongTensor | None,
    ) -> None:
        """Check the inputs of slots; `passage_ids` are `None` if all slots are of one passage."""
        check_adapters(self.backbone)
        check_context_embeds(self.config, slot_mask, context_embeds)
        check_word_ids(self.config, context_embeds, context_word_ids)
        if passage_ids is not None:
            check_passage_ids(passage_ids, context_embeds, slot_mask)
            check_can_separate(self.config.text_config)

    def _embed(
        self,
        input_ids: torch.LongTensor | None,
        inputs_embeds: torch.FloatTensor | None,
        slot_mask: torch.BoolTensor,
        context_embeds: torch.FloatTensor,
        context_word_ids: torch.LongTensor | None,
    ) -> torch.Tensor:
        """`H^(0,0)` (Eq. 2): projected embeddings on slots, frozen ones on text, (batch, seq_len, hidden)."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids.masked_fill(slot_mask, 0))  # (batch, seq_len, hidden)
        if context_embeds.shape[1] == 0:  # the sum is 0, and gives trained parameters a gradient of 0
            return inputs_embeds + self.project(context_embeds, context_word_ids).sum().to(inputs_embeds.dtype)
        # A NaN in the padding would not change the output, but it would change gradients.
        is_real = torch.arange(context_embeds.shape[1], device=slot_mask.device) < slot_mask.sum(dim=1, keepdim=True)
        context_embeds = context_embeds.masked_fill(~is_real[:, :, None], 0.0)
        slot_embeds = self.project(context_embeds, context_word_ids)  # (batch, max_slots, hidden)
        placed = take_positions(slot_embeds.to(inputs_embeds.dtype), slot_mask.cumsum(dim=1) - 1)  # as `inputs_embeds`
        return torch.where(slot_mask[:, :, None], placed, inputs_embeds)

    def project(self, context_embeds: torch.Tensor, context_word_ids: torch.LongTensor | None = None) -> torch.Tensor:
        """Slots (batch, max_slots, hidden) as inputs of the first layer (Eq. 1), with their words, if any."""
        if not self.config.word_parts:
            return self.projector(context_embeds)
        embeddings, projector = self.get_input_embeddings(), self.projector
        with _fetched(embeddings), _fetched(projector):  # weights are used without a call of their modules
            part_embeds = projector.average_words(context_word_ids, embeddings.weight)
        return projector(context_embeds, part_embeds)


def _fetched(module: nn.Module) -> contextlib.AbstractContextManager:
    """Context in which the weights of a module, which may be offloaded, are on the device where it computes."""
    if all(not weight.is_meta for weight in module.parameters(recurse=False)):
        return contextlib.nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


# Answerability, beyond the paper
NO_MATCH = (1.0, 0.0, 0.0)


class AnswerabilityHead(nn.Module):
    """Logistic regression on states of a prompt's last token. It estimates how likely it is that the passages contain
    an answer: the states of the middle layers of a frozen model show whether it has found one. `train/confidence.py`
    fits the head; it is not trained with the aligner, and is in float32 like the aligner.

    `match` are three numbers that combine the log-odds of the regression with the late-interaction (MaxSim) score of
    question and passages: the weights of both, and an offset; (1, 0, 0) before they are fitted.
    """

    def __init__(self, num_layers: int, hidden_size: int):
        super().__init__()
        # Buffers, not parameters: no optimizer, stage, sharding or quantizer may change them. Loading keeps their type.
        self.register_buffer("weight", torch.zeros(num_layers, hidden_size, dtype=torch.float32))
        self.register_buffer("bias", torch.zeros((), dtype=torch.float32))
        self.register_buffer("match", torch.tensor(NO_MATCH, dtype=torch.float32))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The last token's states (batch, num_layers, hidden) to log-odds (batch,)."""
        with torch.autocast(states.device.type, enabled=False):
            return states.to(self.weight).flatten(1) @ self.weight.flatten() + self.bias

    def with_match(self, logits: torch.Tensor, match_scores: Sequence[float] | torch.Tensor) -> torch.Tensor:
        """Log-odds (batch,) from the head's `logits` (batch,) and the `match_scores` (rows,). With beams and samples,
        successive logits share a score. A NaN score, for texts without words, changes nothing."""
        scores = torch.as_tensor(match_scores, dtype=logits.dtype, device=logits.device)
        if scores.numel() == 0:
            return logits
        scores = scores.repeat_interleave(len(logits) // len(scores))  # (batch,)
        scale, weight, bias = self.match.to(logits)
        return torch.where(scores.isnan(), logits, scale * logits + weight * scores + bias)


NEUTRAL_PAIR = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # the weights of `pair_features` before they are fitted


class MultihopHead(nn.Module):
    """Two logistic regressions. One estimates whether a question is a multi-hop question, which needs two passages
    together; the other one estimates from the features of a pair of passages whether the question needs these two.

    `train/multihop.py` fits both; they are not trained with the aligner, and are in float32 like the aligner. Before
    they are fitted, no question counts as a multi-hop question, and pairs rank by log-odds.
    """

    def __init__(self, encoder_hidden_size: int):
        super().__init__()
        # Buffers for the same reasons as in the answerability head.
        self.register_buffer("weight", torch.zeros(encoder_hidden_size + 3, dtype=torch.float32))
        self.register_buffer("bias", torch.zeros((), dtype=torch.float32))
        self.register_buffer("pair", torch.tensor(NEUTRAL_PAIR, dtype=torch.float32))

    def forward(
        self,
        question_embeds: torch.Tensor,
        num_words: torch.Tensor,
        answerability_logits: torch.Tensor,
        match_gains: torch.Tensor,
    ) -> torch.Tensor:
        """Embeddings of questions from the search encoder (batch, d_r), their numbers of words (batch,), the
        answerability of their top-ranked passages, by `top_odds` (batch,), and the `match_gain` of their passages
        (batch,) to log-odds (batch,)."""
        evidence = torch.stack([answerability_logits, match_gains], dim=1)  # (batch, 2)
        features = torch.cat([self.wording(question_embeds, num_words), evidence], dim=1)
        with torch.autocast(features.device.type, enabled=False):
            return features.to(self.weight) @ self.weight + self.bias

    @staticmethod
    def wording(question_embeds: torch.Tensor, num_words: torch.Tensor) -> torch.Tensor:
        """The features of the questions themselves (batch, d_r + 1): embeddings, and logarithms of numbers of words."""
        return torch.cat([question_embeds, num_words.clamp(min=1).log()[:, None]], dim=1)

    def pair_logits(self, features: torch.Tensor) -> torch.Tensor:
        """Features of pairs (pairs, 8), by `pair_features`, to log-odds (pairs,), up to a constant, in the dtype of the
        features."""
        with torch.autocast(features.device.type, enabled=False):
            return features @ self.pair.to(features)


# The frozen head and the loss (Eq. 10)
def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions of `hidden_states` (batch, seq_len, hidden) for which logits are computed. `logits_to_keep` is a
    number of last positions (0: all), or a tensor of positions, (positions,) for all rows or (batch, positions)."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() == 2:
        return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)
    return hidden_states[:, logits_to_keep]


def postprocess_logits(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Change the logits after the head as the backbone does: Cohere and HyperCLOVA X multiply, Granite divides, Gemma 2
    and 3 limit them by tanh."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        logits = logits * scaling if config.model_type == "hyperclovax" else logits / scaling
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


# Positions whose logits are in memory together: 50 MB in float32 for a vocabulary of 49,152.
HEAD_POSITIONS = 256


class _HeadLoss(torch.autograd.Function):
    """Loss through the frozen head that computes the gradient for the hidden states in the forward pass,
    `HEAD_POSITIONS` positions at a time, so that the logits of all positions are never in memory together. On CPUs,
    logits and softmax take longer than all decoder layers of a small backbone; on GPUs, they take most of the
    memory."""

    @staticmethod
    def forward(ctx, hidden_states, targets, head, text_config):
        total, gradients = torch.zeros((), device=hidden_states.device), []
        for states, part_targets in zip(
            hidden_states.split(HEAD_POSITIONS), targets.split(HEAD_POSITIONS), strict=True
        ):
            states = states.detach().requires_grad_(ctx.needs_input_grad[0])
            with torch.set_grad_enabled(states.requires_grad):
                logits = head(states)  # (positions, vocab_size)
                logits = postprocess_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), text_config)
                nll = nn.functional.cross_entropy(logits, part_targets, reduction="sum")
            gradients += torch.autograd.grad(nll, states) if states.requires_grad else ()
            total = total + nll.detach()
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        (gradient,) = ctx.saved_tensors
        # In float32 at least: the factor of a gradient scaler may be too large for float16.
        return (gradient.to(d_total.dtype) * d_total).to(gradient.dtype), None, None, None


def head_nll(
    hidden_states: torch.Tensor, targets: torch.LongTensor, head: nn.Linear, text_config: PreTrainedConfig
) -> torch.Tensor:
    """Sum of the negative log-likelihoods of `targets` (positions,) through a frozen head, from `hidden_states`
    (positions, hidden). It cannot be differentiated twice.

    Raises:
        `ValueError`: a head that is trained, because this function gives it no gradient.
    """
    if any(parameter.requires_grad for parameter in head.parameters()):
        raise ValueError(
            "With `skip_logits=True` the language-model head gets no gradient, but it requires one. Call "
            "`lm_head.requires_grad_(False)`, or leave out `skip_logits`."
        )
    return _HeadLoss.apply(hidden_states, targets, head, text_config)


def text_for_slots(input_ids: torch.LongTensor, context_token_id: int) -> torch.LongTensor:
    """`input_ids` (batch, seq_len) with the row's first text token in the place of each slot.

    >>> text_for_slots(torch.tensor([[9, 9, 4, 5]]), context_token_id=9)
    tensor([[4, 4, 4, 5]])
    """
    if input_ids.shape[1] == 0:
        return input_ids
    is_slot = input_ids == context_token_id
    first_text = input_ids.gather(1, is_slot.to(torch.int8).argmin(dim=1, keepdim=True))  # (batch, 1)
    return torch.where(is_slot, first_text, input_ids)


def check_slots_after_cache(
    config: ArcAlignerConfig,
    layout: SlotLayout,
    cache: Cache | None,
    context_passage_ids: torch.LongTensor | None,
    gate_options: dict[str, Any],
) -> None:
    """Raise `ValueError` for slots after cached text, if the result would differ from one prefill of both.
    `gate_options` are the `REFINEMENT_SETTINGS` of the call."""
    if layout.slot_indices.shape[0] == 0 or cache is None or cache.get_seq_length() == 0:
        return
    if config.refines(**gate_options):
        reason = "the gates are on, and extra passes of slots need states of earlier tokens that no cache contains"
    elif config.passage_attention == "separate" and context_passage_ids is not None:
        reason = "the positions of independent passages can only be computed from the whole prompt"
    else:
        return
    raise ValueError(
        f"The input has slots after {cache.get_seq_length()} cached tokens, but {reason}. Pass the whole prompt with "
        "an empty cache. If the cache already contains these slots, pass only the tokens after them."
    )


class SlotGenerationMixin(GenerationMixin):
    """`GenerationMixin` for prompts with context slots."""

    def prompt_positions(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        context_passage_ids: torch.LongTensor | None = None,
    ) -> torch.LongTensor:
        """The position of each token of a prompt (batch, seq_len), counted from the first one that is not padding.
        If passages are independent, each begins at the same position, and the text after them continues after the
        longest. `context_passage_ids` (batch, max_slots) names the passage of each slot."""
        is_real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if context_passage_ids is None or self.config.passage_attention == "joint":
            return (is_real.long().cumsum(dim=1) - 1).clamp(min=0)
        is_slot = input_ids == self.config.context_token_id
        return prompt_positions(is_slot, context_passage_ids, is_real)

    def slot_bias(
        self,
        input_ids: torch.LongTensor,
        context_passage_ids: torch.LongTensor | None,
        passage_prior: torch.FloatTensor | None,
    ) -> torch.FloatTensor | None:
        """The `slot_bias` (batch, seq_len) of `forward` for a prompt whose passages have the `passage_prior` (batch,
        num_passages) of `generate`; `None` without a prior."""
        if passage_prior is None:
            return None
        is_slot = input_ids == self.config.context_token_id
        return slot_bias_of(is_slot, context_passage_ids, passage_prior, self.config.text_config)

    def passage_cache(self, processor, **options):
        """A cache of per-passage keys and values, shared across questions: a [`PassageCache`], with its options."""
        return processor.passage_cache(self, **options)  # through the processor, whose code encodes passages

    def slot_prefix_store(self, processor, **options):
        """The name of `passage_cache` in version 0.2."""
        return processor.slot_prefix_store(self, **options)

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        inputs_embeds=None,
        context_embeds=None,
        context_word_ids=None,
        context_passage_ids=None,
        is_first_iteration=False,
        gate_mode=None,
        gate_threshold=None,
        max_refinement_steps=None,
        refinement_budget=None,
        cache=None,
        slot_bias=None,
        prefill=None,  # no input of the model, except for its `pointer`
        **kwargs,
    ):
        cache = one_cache(past_key_values, cache)
        if context_passage_ids is not None and inputs_embeds is None:
            kwargs["position_ids"] = self.prompt_positions(input_ids, attention_mask, context_passage_ids)
        model_inputs = super().prepare_inputs_for_generation(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **{CACHE: cache},
            **kwargs,
        )
        # Slots are computed once, with the prompt. A generated token is never a slot, which the host knows without
        # waiting for the device.
        new_ids = model_inputs.get("input_ids")
        if slot_bias is not None:
            model_inputs["slot_bias"] = slot_bias
        if prefill is not None and prefill.pointer is not None:
            model_inputs["pointer"] = prefill.pointer
        is_one = new_ids is not None and new_ids.shape[1] == 1
        if is_one and cache is not None and not is_first_iteration:
            model_inputs["is_generated"] = True
            return model_inputs
        continues = cache is not None and cache.get_seq_length() > 0
        has_slots = new_ids is not None and bool((new_ids == self.config.context_token_id).any())
        if context_embeds is not None and (has_slots or not continues):
            model_inputs["context_embeds"] = context_embeds
            model_inputs["context_word_ids"] = context_word_ids
            model_inputs["context_passage_ids"] = context_passage_ids
            gate_options = (gate_mode, gate_threshold, max_refinement_steps, refinement_budget)
            model_inputs |= dict(zip(REFINEMENT_SETTINGS, gate_options, strict=True))
        return model_inputs

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        if (prefill := model_kwargs.pop("prefill", None)) is not None:  # the first step
            prefill.recursion_depth = outputs.recursion_depth
            has_candidates = outputs.logits.shape[1] > 1  # of assisted decoding, computed after the prompt
            prefill.answerability_logits = None if has_candidates else outputs.answerability_logits
            attention = None if prefill.pointer is None or has_candidates else prefill.pointer.mean()
            if attention is not None:
                rows = attention_to_slots(attention, prefill.is_slot)
                prefill.slot_attention = pad_sequence(rows, batch_first=True)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def generate(self, inputs=None, *args, **kwargs):
        """Generate text as `GenerationMixin.generate`. The context token is never generated, and logits processors do
        not get it. Pass `prefill=`, a [`PrefillOutputs`], to get refinement steps and answerability before the first
        token.

        The refinement of slots can be set for a call: `gate_mode`, `gate_threshold`, `max_refinement_steps` instead of
        the configuration's, and `refinement_budget`, the maximum number of operations relative to the prefill up to the
        last slot. Slots that are already in the cache are not changed; a warning says so.

        Several independent passages can be weighted: `passage_prior` (batch, num_passages) is added to the attention
        logits of the text after the slots for the slots of each passage.

        Raises:
            `ValueError`: `prefill_chunk_size`, because slots are refined together with all text before them; an invalid
                setting of the gates or budget; a `passage_prior` that does not fit the passages or the attention.
        """
        input_ids, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
        cache = one_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        kwargs |= {} if cache is None else {CACHE: cache}
        if input_ids is not None:
            check_ids(input_ids, vocab_size=self.config.text_config.vocab_size, others=(self.config.context_token_id,))
            if input_ids.numel() == 0 and kwargs.get("inputs_embeds") is None:
                raise ValueError(
                    f"`input_ids` has shape {tuple(input_ids.shape)}; expected (batch, seq_len) with at least one "
                    "token in each row."
                )
            if kwargs.get("context_embeds") is None and cache is None:  # text alone
                check_length(input_ids.shape[1], "The prompt", self.config.text_config)
        if not (mask is None or isinstance(mask, dict) or isinstance(mask, torch.Tensor) and mask.dim() > 1):
            shape = f" and shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else ""
            raise ValueError(
                f"`attention_mask` is of type {type(mask).__name__}{shape}; expected a tensor of shape (batch, "
                "seq_len)."
            )
        if settings := {name: kwargs[name] for name in REFINEMENT_SETTINGS if kwargs.get(name) is not None}:
            check_gates(**settings)
            if self._has_cached_slots(input_ids, cache):
                logger.warning_once(
                    f"`generate` ignores {', '.join(f'`{name}`' for name in settings)}, because the slots are already "
                    "in the cache. Pass such settings to `PassageCache.prepare` instead."
                )
        generation_config = kwargs.get("generation_config") or self.generation_config
        chunk_size = kwargs.get("prefill_chunk_size", generation_config.prefill_chunk_size)
        if chunk_size is not None:
            is_argument = "prefill_chunk_size" in kwargs
            advice = "Leave `prefill_chunk_size` out." if is_argument else "Set it to None in the generation config."
            raise ValueError(
                f"`prefill_chunk_size` is {chunk_size}, but a prompt with slots cannot be prefilled in chunks. {advice}"
            )
        if (prefill := kwargs.get("prefill")) is not None:
            has_pointer = self.config.has_pointer and input_ids is not None
            prefill.pointer = PointerAttention(self.config.pointer_heads) if has_pointer else None
            prefill.is_slot = input_ids == self.config.context_token_id if has_pointer else None
            prefill.slot_attention = None
        if (passage_prior := kwargs.pop("passage_prior", None)) is not None:
            kwargs["slot_bias"] = self.slot_bias(input_ids, kwargs.get("context_passage_ids"), passage_prior)
        return super().generate(inputs, *args, **kwargs)

    def _has_cached_slots(self, input_ids: torch.LongTensor | None, cache: Cache | None) -> bool:
        """Whether a prompt (batch, seq_len) has slots and all of them are in a cache."""
        if input_ids is None or cache is None:
            return False
        is_slot, length = input_ids == self.config.context_token_id, int(cache.get_seq_length())
        return bool(is_slot[:, :length].any()) and not bool(is_slot[:, length:].any())

    def _get_logits_processor(self, *args, **kwargs) -> LogitsProcessorList:
        token_id, vocab_size = self.config.context_token_id, self.config.text_config.vocab_size
        prompt = kwargs.get("encoder_input_ids")  # the input of `encoder_repetition_penalty` and similar
        if isinstance(prompt, torch.Tensor) and prompt.dim() == 2 and not prompt.is_floating_point():
            kwargs["encoder_input_ids"] = text_for_slots(prompt, token_id)
        processors = super()._get_logits_processor(*args, **kwargs)
        if token_id < vocab_size:
            processors.append(SuppressTokensLogitsProcessor([token_id], device=self.device))
        return _BlindToSlots(processors, token_id)

    def _get_candidate_generator(self, *args, **kwargs):
        candidates = super()._get_candidate_generator(*args, **kwargs)
        if isinstance(candidates, PromptLookupCandidateGenerator):
            return _CandidatesBlindToSlots(candidates, self.config.context_token_id)
        return candidates


class _BlindToSlots(LogitsProcessorList):
    """Gives processors a prompt whose slots repeat the first text token of the row, so that no slot is penalized."""

    def __init__(self, processors: LogitsProcessorList, context_token_id: int):
        super().__init__(processors)
        self.context_token_id = context_token_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.FloatTensor:
        return super().__call__(text_for_slots(input_ids, self.context_token_id), scores, **kwargs)


class _CandidatesBlindToSlots(CandidateGenerator):
    """Searches candidates in a prompt whose slots repeat the row's first text token, so that none is a slot."""

    def __init__(self, candidates: CandidateGenerator, context_token_id: int):
        self.candidates = candidates
        self.context_token_id = context_token_id

    def get_candidates(self, input_ids: torch.LongTensor):
        text_ids = text_for_slots(input_ids, self.context_token_id)
        candidates, scores = self.candidates.get_candidates(text_ids)
        return torch.cat([input_ids, candidates[:, input_ids.shape[1] :]], dim=1), scores

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        self.candidates.update_candidate_strategy(input_ids, scores, num_matches)


def check_finite(logits: torch.Tensor) -> None:
    """Raise `ValueError` for float16 `logits` (batch, kept, vocab_size) of a prompt that are not finite at the last
    position."""
    if not torch.isfinite(logits[:, -1]).all():
        raise ValueError(
            "The logits contain NaN or infinite values, because the model computes in float16, in which numbers above "
            "65,504 overflow. Load the model with `dtype=torch.bfloat16` or `dtype=torch.float32`. If that does not "
            "help, check that the values of `context_embeds` are finite and not very large."
        )


class ArcAlignerForCausalLM(ArcAlignerPreTrainedModel, SlotGenerationMixin):
    """A frozen language model with passages as context slots.

    ```python
    >>> processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)
    >>> model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    >>> options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    >>> inputs = processor.apply_chat_template([{"role": "user", "content": "Who?"}], documents=["Ada did."], **options)
    >>> answer = model.generate(**inputs, max_new_tokens=16)
    ```
    """

    accepts_loss_kwargs = True
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ArcAlignerConfig, **kwargs):
        super().__init__(config, **kwargs)
        self.model = ArcAlignerModel(config)
        self.lm_head = make_lm_head(config.text_config)
        if config.tie_word_embeddings:
            embeddings = self.model.get_input_embeddings()
            name = next(name for name, module in self.named_modules() if module is embeddings)
            self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        self.answerability_head: AnswerabilityHead | None = None
        self.multihop_head: MultihopHead | None = None
        use_multihop_head = config.use_multihop_head
        self.set_answerability_layers(config.answerability_layers)
        self.set_multihop_head(use_multihop_head)
        self.post_init()
        self.freeze_base_model()

    @property
    def device(self) -> torch.device:
        """The device of the weights; of an offloaded model, whose weights are on "meta", the device where it
        computes."""
        if (device := super().device).type != "meta":
            return device
        first = self.model.projector.up
        with _fetched(first):
            return first.weight.device

    def set_answerability_layers(self, layers: list[int] | None) -> None:
        """Give the model a new answerability head for the states of these layers, which is neutral until it is fitted,
        or remove the head (`None`). Call this after training, because training changes the states. The multi-hop head
        is removed, because it was fitted to the former answerability head.

        Raises:
            `ValueError`: layers that the backbone does not have, or that are not in ascending order.
        """
        config = self.config
        check_answerability_layers(layers, config.text_config.num_hidden_layers)
        if layers is None:
            config.answerability_uses_match, config.answerability_threshold = False, None
            config.answer_calibration = None
        config.answerability_layers, self.answerability_head = layers, None
        self.set_multihop_head(False)
        if layers is not None:
            head = AnswerabilityHead(len(layers), config.text_config.hidden_size)
            self.answerability_head = head.to(self.lm_head.weight.device)

    def set_multihop_head(self, is_used: bool) -> None:
        """Give the model a new multi-hop head, which is neutral until it is fitted, or remove the head.

        Raises:
            `ValueError`: a model without an answerability head, which the multi-hop head needs.
        """
        config = self.config
        check_multihop_head(is_used, config.answerability_layers)
        config.use_multihop_head, self.multihop_head = is_used, None
        if is_used:
            self.multihop_head = MultihopHead(config.encoder_hidden_size).to(self.lm_head.weight.device)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        context_embeds: torch.FloatTensor | None = None,
        context_word_ids: torch.LongTensor | None = None,
        context_passage_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        only_answerability: bool = False,
        **kwargs,
    ) -> ArcAlignerCausalLMOutputWithPast:
        r"""
        Args:
            input_ids, context_embeds, context_word_ids, context_passage_ids: As for [`ArcAlignerModel`].
            labels (`torch.LongTensor` of shape `(batch, seq_len)`, *optional*):
                Targets of the NLL (Eq. 10) of all three stages; -100 and context tokens are ignored.
            logits_to_keep (`int` or `torch.Tensor`, defaults to 0):
                The number of last positions that get logits, 0 for all; or a tensor of positions.
            skip_logits (`bool`, defaults to `False`):
                With `labels`, compute only the loss: the frozen head computes `HEAD_POSITIONS` labeled positions at a
                time, and the output has no logits. For training.
            only_answerability (`bool`, defaults to `False`):
                Compute `answerability_logits` only: the layers above the last one that they need are skipped, so the
                cache of this call cannot be continued.
            kwargs: `gate_mode`, `gate_threshold`, `max_refinement_steps`, `refinement_budget` and `cache` of
                [`ArcAlignerModel`], and arguments of the backbone.

        Raises:
            `ValueError`: `only_answerability` with a model without an answerability head; a prompt whose states or
                logits overflow in float16.
        """
        is_prefill = not (self.training or skip_logits or kwargs.get("is_generated"))
        layer_states = None
        if only_answerability or (is_prefill and self.answerability_head is not None):
            kwargs["layer_states"] = layer_states = self._new_layer_states(only_answerability)
        if labels is not None:
            check_ids(labels, "`labels`", self.config.text_config.vocab_size, (-100, self.config.context_token_id))
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            context_embeds=context_embeds,
            context_word_ids=context_word_ids,
            context_passage_ids=context_passage_ids,
            use_cache=False if only_answerability else use_cache,
            **kwargs,
        )
        answerability = None if layer_states is None else self.answerability_head(layer_states.stacked())
        if only_answerability:
            return ArcAlignerCausalLMOutputWithPast(answerability_logits=answerability)
        if skip_logits:
            loss = self.targets_loss(outputs.last_hidden_state, labels, kwargs.get("num_items_in_batch"))
            return ArcAlignerCausalLMOutputWithPast(
                loss=loss, hidden_states=outputs.hidden_states, recursion_depth=outputs.recursion_depth
            )
        hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)  # (batch, kept, hidden)
        # Flattened to (batch * kept, hidden): for a frozen head, a batched product would copy the weight.
        logits = self.lm_head(hidden_states.flatten(0, 1)).unflatten(0, hidden_states.shape[:2])
        logits = postprocess_logits(logits, self.config.text_config)
        if is_prefill and logits.dtype == torch.float16 and not torch.compiler.is_compiling():
            check_finite(logits)
        loss = None
        if labels is not None:
            labels = labels.masked_fill(labels == self.config.context_token_id, -100)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size, **kwargs
            )
        return ArcAlignerCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recursion_depth=outputs.recursion_depth,
            answerability_logits=answerability,
        )

    def _new_layer_states(self, only_answerability: bool) -> LayerStates:
        if self.answerability_head is None:
            raise ValueError(
                "`only_answerability` needs an answerability head, but this aligner has none (its "
                "`answerability_layers` is None). Fit one with `python -m arcaligner.train.confidence`, or leave out "
                "`only_answerability`."
            )
        return LayerStates(self.config.answerability_layers, only_answerability)

    def targets_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.LongTensor,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean NLL (Eq. 10) of the labeled positions; `hidden_states` (batch, seq_len, hidden)."""
        targets = labels[:, 1:].flatten()  # (batch * (seq_len - 1),)
        is_target = (targets != -100) & (targets != self.config.context_token_id)
        # (num_targets,), computed once, because the host waits for the device
        target_indices = is_target.nonzero()[:, 0]
        predicting = hidden_states[:, :-1].flatten(0, 1).index_select(0, target_indices)  # (num_targets, hidden)
        nll = head_nll(predicting, targets.index_select(0, target_indices), self.lm_head, self.config.text_config)
        return nll / (is_target.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


ArcAlignerForCausalLM.register_for_auto_class("AutoModelForCausalLM")


def check_ids(
    ids,
    name: str = "`input_ids`",
    vocab_size: int | None = None,
    others: tuple[int, ...] = (),
    shape: str = "(batch, seq_len)",
) -> None:
    """Raise `ValueError` unless `ids` are whole numbers with as many dimensions as `shape` and, with `vocab_size`, ids
    below it or among `others`. On an accelerator values are not checked, because the host would wait for them."""
    is_tensor = isinstance(ids, torch.Tensor) and ids.layout == torch.strided and not ids.is_meta
    is_whole = is_tensor and not ids.is_floating_point() and not ids.is_complex()
    if vocab_size is not None:  # an embedding table takes two dtypes
        is_whole = is_whole and ids.dtype in (torch.int32, torch.int64)
    if not is_whole or ids.dim() != shape.count(",") + 1:
        kind = f"of type {type(ids).__name__}"
        if isinstance(ids, torch.Tensor):
            kind = f"a tensor of dtype {ids.dtype}, layout {ids.layout} and shape {tuple(ids.shape)}"
        whole = "whole numbers" if vocab_size is None else "dtype int64 or int32"
        raise ValueError(f"{name} is {kind}; expected a dense tensor of {whole}, of shape {shape}.")
    if vocab_size is None or ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    is_unknown = (ids < 0) | (ids >= vocab_size)
    for other in others:
        is_unknown &= ids != other
    if is_unknown.any():
        alternatives = "".join(f", or {other}" for other in others)
        raise ValueError(
            f"{name} has the id {ids[is_unknown][0]}; expected ids from 0 to {vocab_size - 1}{alternatives}."
        )


def check_context_embeds(config: ArcAlignerConfig, slot_mask: torch.Tensor, context_embeds) -> None:
    """Raise `ValueError` unless `context_embeds` is (batch, max_slots, encoder_hidden_size), for the rows of
    `slot_mask` (batch, seq_len)."""
    width = config.encoder_hidden_size
    kind = context_embeds.dtype if isinstance(context_embeds, torch.Tensor) else type(context_embeds).__name__
    if kind not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"`context_embeds` is of type {kind}; expected a tensor of floating-point numbers with at least 16 bits."
        )
    if context_embeds.dim() != 3 or context_embeds.shape[0] != slot_mask.shape[0]:
        raise ValueError(
            f"`context_embeds` has shape {tuple(context_embeds.shape)}; expected ({slot_mask.shape[0]}, max_slots, "
            f"{width}), with a row for each row of `input_ids`."
        )
    if context_embeds.shape[2] != width:
        raise ValueError(
            f"The embeddings in `context_embeds` have {context_embeds.shape[2]} dimensions; expected {width}, the "
            "`encoder_hidden_size` of the aligner. Use the encoder that the aligner was trained with: "
            f"{config.encoder_name_or_path}."
        )


def check_word_ids(config: ArcAlignerConfig, context_embeds: torch.Tensor, context_word_ids) -> None:
    """Raise `ValueError` unless `context_word_ids` is (batch, max_slots, max_words), if the aligner uses them."""
    if not config.word_parts:
        if context_word_ids is not None:
            raise ValueError(
                "Got `context_word_ids`, but this aligner uses no token ids of passages (`config.word_parts` is 0). "
                "Leave out `context_word_ids`, or use the processor of this checkpoint."
            )
        return
    if context_word_ids is None:
        raise ValueError(
            "`context_word_ids` is missing, but slots of this aligner need the token ids of their texts "
            f"(`config.word_parts` is {config.word_parts}). Pass the `context_word_ids` that the processor of this "
            "checkpoint returns."
        )
    expected = f"({context_embeds.shape[0]}, {context_embeds.shape[1]}, max_words)"
    check_ids(context_word_ids, "`context_word_ids`", config.text_config.vocab_size, (-1,), expected)
    if context_word_ids.shape[:2] != context_embeds.shape[:2]:
        raise ValueError(
            f"`context_word_ids` has shape {tuple(context_word_ids.shape)}; expected {expected}, with an entry for "
            "each slot of `context_embeds`."
        )
