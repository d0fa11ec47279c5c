"""Sparse form of a refinement step (Eq. 6): the positions that a layer computes again, what they attend to, and the
cost.

A step applies layer `l` to its own output. Only slots with an open gate change, so a step needs

    queries           of these slots (of all slots in training, and if nearly all gates are open)
    keys and values   of the text before the last slot and of the other slots, once from the layer's output, and of the
                      slots that change, in each step

The layer gets a substitute for the cache: it writes the slots' keys and values to the substitute, and gets those of all
positions back. The real cache has the mandatory pass only and does not change. If all slots are computed and there is
little text before them, the layer computes the whole prefix instead. With `refinement_budget=0.1` all steps together
take at most 10 % of the operations of the slot prefix's prefill, spent layer by layer.

Shapes: batch, seq_len, max_slots (slots of the fullest row), max_text (text before the last slot), hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .attention_arcaligner import CACHE, MASK_KERNELS, SlotLayout, key_rotation, rotate_keys
from .configuration_arcaligner import ArcAlignerConfig, GateSettings


# Slots among the positions of a layer
def take_positions(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Vectors of `tensor` (batch or 1, seq_len, dim) at `positions` (batch, width) -> (batch, width, dim); at -1 those
    of position 0."""
    tensor = tensor.expand(positions.shape[0], -1, -1)  # (batch, seq_len, dim)
    index = positions.clamp(min=0)[:, :, None].expand(-1, -1, tensor.shape[-1])  # (batch, width, dim)
    return tensor.gather(1, index)


class SlotStates:
    """The slots among the hidden states (batch, seq_len, hidden) of a layer.

    If all slots are adjacent in one prompt, they are split from the text before and after them without an index.
    """

    def __init__(self, hidden_states: torch.Tensor, layout: SlotLayout):
        self.hidden_states, self.layout = hidden_states, layout
        self._parts = None
        if layout.slot_span is not None and hidden_states.shape[0] == 1:
            start, end = layout.slot_span
            self._parts = hidden_states.split([start, end - start, hidden_states.shape[1] - end], dim=1)

    def slots(self) -> torch.Tensor:
        """The states of the slots (batch, max_slots, hidden)."""
        if self._parts is not None:
            return self._parts[1]
        return take_positions(self.hidden_states, self.layout.slot_positions)

    def prefix_with(self, states: torch.Tensor, length: int) -> torch.Tensor:
        """The first `length` positions, those up to the last slot, with `states` (batch, max_slots, hidden) on the
        slots."""
        if self._parts is not None:
            return torch.cat([self._parts[0], states], dim=1)  # (1, length, hidden)
        return self._with_states(states)[:, :length]

    def slots_of_prefix(self, prefix: torch.Tensor) -> torch.Tensor:
        """The slots (batch, max_slots, hidden) of another `prefix` (batch, length, hidden)."""
        if self._parts is not None:
            return prefix[:, self.layout.slot_span[0] :]
        return take_positions(prefix, self.layout.slot_positions)

    def with_slots(self, states: torch.Tensor) -> torch.Tensor:
        """Eq. 9: all hidden states, with `states` (batch, max_slots, hidden) on the slots."""
        if self._parts is not None:
            return torch.cat([self._parts[0], states, self._parts[2]], dim=1)  # (1, seq_len, hidden)
        return self._with_states(states)

    def _with_states(self, states: torch.Tensor) -> torch.Tensor:
        flat = self.hidden_states.reshape(-1, states.shape[-1])  # (batch * seq_len, hidden)
        slots = states.reshape(-1, states.shape[-1]).index_select(0, self.layout.slot_cells)  # (num_slots, hidden)
        return flat.index_copy(0, self.layout.slot_indices, slots).view_as(self.hidden_states)


class StepPositions(NamedTuple):
    """The positions of a refinement step of one layer: those that it computes and those that it only attends to."""

    slot_positions: torch.Tensor  # (batch, width), slots that are computed, -1 padding
    fixed_positions: torch.Tensor  # (batch, max_fixed), before the row's last slot, -1 padding
    fixed_slots: torch.Tensor | None  # flat indices into (batch * max_fixed) that carry LoRA; None where all is text


class StepInputs(NamedTuple):
    """Positions of a step, and the keyword arguments that replace the layer's own for them."""

    positions: StepPositions
    for_slots: dict[str, Any]
    for_fixed: dict[str, Any]


def open_slots_plan(layout: SlotLayout, cells: torch.Tensor, is_selected: torch.Tensor) -> StepPositions:
    """A step that computes the slots in `cells` (batch, width) where `is_selected`; the others are fixed, like text."""
    max_text, max_slots = layout.text_positions.shape[1], layout.slot_positions.shape[1]
    # A cell that only fills up its row stays among the fixed slots: others attend to it, but it is not computed.
    filler = layout.slot_positions.gather(1, cells).masked_fill(is_selected, -1)  # (batch, width)
    others = layout.slot_positions.scatter(1, cells, filler)  # (batch, max_slots), -1 where taken
    batch_index = layout.slot_cells // max_slots
    return StepPositions(
        slot_positions=layout.slot_positions.gather(1, cells).masked_fill(~is_selected, -1),
        fixed_positions=torch.cat([layout.text_positions, others], dim=1),
        fixed_slots=layout.slot_cells + (batch_index + 1) * max_text,  # all slots: masked ones have no effect
    )


def step_inputs(positions: StepPositions, kwargs: dict[str, Any], dtype: torch.dtype) -> StepInputs:
    """The inputs of a step with these `positions`, for a layer that was called with `kwargs`."""
    mask = refinement_mask(kwargs["attention_mask"], positions, dtype)
    return StepInputs(
        positions=positions,
        for_slots=gather_rotary(kwargs, positions.slot_positions) | {"attention_mask": mask, "use_cache": False},
        for_fixed=gather_rotary(kwargs, positions.fixed_positions) | {"attention_mask": None, "use_cache": False},
    )


def gather_rotary(kwargs: dict[str, Any], positions: torch.Tensor) -> dict[str, Any]:
    """Rotary angles and position ids at `positions` (batch, width)."""
    cos, sin = kwargs["position_embeddings"]
    arguments = {"position_embeddings": (take_positions(cos, positions), take_positions(sin, positions))}
    if kwargs.get("position_ids") is not None:
        arguments["position_ids"] = take_positions(kwargs["position_ids"][:, :, None], positions)[:, :, 0]
    return arguments


def later_text_inputs(positions: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that replace those of a layer, called with `kwargs`, for the text after the slots, which is
    at `positions` (batch, max_later)."""
    mask = take_positions(kwargs["attention_mask"][:, 0], positions)[:, None]  # (batch, 1, max_later, kv_len)
    return gather_rotary(kwargs, positions) | {"attention_mask": mask}


def prefix_inputs(length: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that replace those of a layer, called with `kwargs`, for its first `length` positions."""
    cos, sin = kwargs["position_embeddings"]
    arguments = {"position_embeddings": (cos[:, :length], sin[:, :length]), "use_cache": False, CACHE: None}
    if kwargs.get("position_ids") is not None:
        arguments["position_ids"] = kwargs["position_ids"][:, :length]
    if (mask := kwargs["attention_mask"]) is not None:
        arguments["attention_mask"] = mask[:, :length] if mask.dim() == 2 else mask[..., :length, :length]
    return arguments


class SharedStepInputs:
    """Inputs of a step of all slots, made once per forward for all layers with the same mask and rotary angles.

    Backbones have layers of one or two kinds, so the last two inputs are cached. If each layer gets its own copies of
    mask and angles, as with weights on several devices, nothing is shared, and memory stays bounded.
    """

    def __init__(self):
        # Mask and angles are referenced, because the `id()` of a freed tensor can be reused.
        self._cached: list[tuple[torch.Tensor | None, torch.Tensor, Any]] = []

    def get(self, kwargs: dict[str, Any], make: Callable[[], Any]) -> Any:
        """The cached result of `make` for a layer that was called with `kwargs`."""
        if torch.compiler.is_compiling():
            return make()
        mask, cosines = kwargs["attention_mask"], kwargs["position_embeddings"][0]
        for cached_mask, cached_cosines, inputs in self._cached:
            if cached_mask is mask and cached_cosines is cosines:
                return inputs
        inputs = make()
        self._cached = [*self._cached[-1:], (mask, cosines, inputs)]
        return inputs


def refinement_mask(attention_mask: torch.Tensor | None, positions: StepPositions, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a step: each slot attends to the text and the slots to which it attends in the layer's mask.

    Args:
        attention_mask: The layer's mask, (batch or 1, 1, seq_len, kv_len), boolean or additive; `None` means causal.
        positions (`StepPositions`): Positions of the step.
        dtype (`torch.dtype`): The dtype of the hidden states, for an additive mask.

    Returns:
        `torch.Tensor` of shape `(batch, 1, width, max_fixed + width)`, boolean if `attention_mask` is boolean or
        `None`, else additive.
    """
    queries = positions.slot_positions  # (batch, width)
    keys = torch.cat([positions.fixed_positions, positions.slot_positions], dim=1)  # (batch, max_fixed + width)
    num_queries, num_keys = queries.shape[1], keys.shape[1]
    real_keys = (keys >= 0)[:, None, None, :]  # (batch, 1, 1, max_fixed + width)
    # A query that is not a slot (padding) attends to itself, so that its softmax is not empty.
    self_key = torch.eye(num_queries, dtype=torch.bool, device=keys.device)
    self_key = torch.nn.functional.pad(self_key, (num_keys - num_queries, 0)) & (queries < 0)[:, None, :, None]
    if attention_mask is None:
        return ((keys[:, None, None, :] <= queries[:, None, :, None]) & real_keys) | self_key
    mask = take_positions(attention_mask[:, 0], queries)  # (batch, width, kv_len)
    columns = keys.clamp(min=0)[:, None, :].expand(-1, num_queries, -1)  # (batch, width, max_fixed + width)
    mask = mask.gather(2, columns)[:, None]  # (batch, 1, width, max_fixed + width)
    if mask.dtype == torch.bool:
        return (mask & real_keys) | self_key
    return mask.masked_fill(~real_keys, torch.finfo(dtype).min).masked_fill(self_key, 0.0)


class KeysValuesComplete(Exception):  # noqa: N818 - no error: the rest of the layer is not needed
    """Ends a layer's forward as soon as its keys and values are known."""


class KeysValuesRecorder:
    """A substitute for the cache that records keys and values of fixed positions, (batch, heads, max_fixed,
    head_dim)."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        self.keys, self.values = keys, values
        if torch.compiler.is_compiling():
            return keys, values  # the compiler cannot trace an exception, and drops the unused rest of the layer
        raise KeysValuesComplete


class RefinementKeysValues:
    """A substitute for the cache in a refinement step: slots attend to the keys and values of the fixed positions, then
    to their own."""

    def __init__(self, keys: torch.Tensor | None, values: torch.Tensor | None):
        self.keys, self.values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        if self.keys is None:
            return keys, values
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


class MovedKeysValues:
    """A substitute for the cache in the mandatory pass, if independent passages are moved. Slots attend to the keys of
    their passage as they were computed; `keys` and `values` are those that the text after the slots attends to, and
    those that the `cache`, if there is one, gets. Before the pass the cache is empty."""

    def __init__(self, cache: Cache | None, rotation: tuple[torch.Tensor, torch.Tensor]):
        self._cache, self._rotation = cache, rotation
        self.keys = self.values = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        moved = rotate_keys(keys, *(factor.to(keys.device) for factor in self._rotation))
        if self._cache is None:
            self.keys, self.values = moved, values
            return keys, values
        self.keys, self.values = self._cache.update(moved, values, *args, **kwargs)
        if self.keys.shape[2] > keys.shape[2]:  # a static cache returns unused positions, too
            keys = torch.cat([keys, self.keys[:, :, keys.shape[2] :]], dim=2)
        return keys, self.values


class CompleteKeysValues:
    """A substitute for the cache that has the `keys` and `values` of all positions, each (batch, heads, kv_len,
    head_dim)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        return self.keys, self.values


class LayerKeysValues:
    """A substitute for the cache in compiled code: the part of one layer, independent of its index."""

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
        # A static layer that is allocated in compiled code would have no fixed address for CUDA graphs.
        return layer.is_initialized or not layer.is_compileable

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layer.update(keys, values, *args, **kwargs)


# What a layer costs
class LayerCost(NamedTuple):
    """Operations of one decoder layer. The methods take counts of text and slots, or tensors of counts."""

    linears: int  # for one position, without LoRA
    lora: int  # for one slot
    keys_values: int  # for the keys and values of one position; an upper bound
    keys_values_lora: int  # for one slot
    key: int  # for the attention of one position to one key
    gate: int  # for one slot

    def of_prefill(self, num_text, num_slots):
        """The cost of a slot prefix with the gates off: `num_text` positions of text and `num_slots` slots."""
        length = num_text + num_slots
        return self.linears * length + self.lora * num_slots + self.key * length * length // 2

    def of_keys_values(self, num_text, num_slots):
        """The cost of the keys and values of a slot prefix, paid once before a layer's first step."""
        return self.keys_values * (num_text + num_slots) + self.keys_values_lora * num_slots

    def of_slot_pass(self, num_text, num_slots):
        """The cost of another pass of one slot, which attends to the prefix and to the other slots."""
        return self.linears + self.lora + self.key * (num_text + 2 * num_slots)


def count_layer_cost(layer: nn.Module, text_config: PreTrainedConfig) -> LayerCost:
    """The cost of a decoder layer after `add_slots_to_layer`, from the sizes of its linears."""
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
        # Linears of the MLP and of the attention's output come after keys and values. Any other linear is counted as
        # if it came before.
        if "mlp" not in name and "o_proj" not in name:
            counts["keys_values_lora" if lora else "keys_values"] += flops
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    counts["key"] = 4 * text_config.num_attention_heads * head_dim
    return LayerCost(**counts)


# Settings, and a budget of operations


# More operations than any prompt takes; the sum of two such numbers still fits into an int64.
_MAX_FLOPS = 2.0**61


def _prefix_sizes(layout: SlotLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of positions of text before the last slot, and of slots, each (batch,)."""
    return (layout.text_positions >= 0).sum(dim=1), (layout.slot_positions >= 0).sum(dim=1)


class RefinementBudget:
    """The operations that each row of one forward may still spend on refinement, layer by layer.

    Args:
        share (`float`): The budget relative to the operations of the prefill of a row's slot prefix, at least 0.
        costs (`list[LayerCost]`): The costs of all layers.
        rows ([`SlotLayout`]): The slots of the forward.
        computes_gates (`bool`): Whether gates are computed.
    """

    def __init__(self, share: float, costs: list[LayerCost], layout: SlotLayout, computes_gates: bool):
        # Whole numbers on the host: float32 on the device would round the operations of a large model.
        sizes = zip(*(size.tolist() for size in _prefix_sizes(layout)), strict=True)
        prefills = [sum(cost.of_prefill(*size) for cost in costs) for size in sizes]
        shares = [int(min(share * prefill, _MAX_FLOPS)) for prefill in prefills]
        self.remaining = torch.tensor(shares, device=layout.slot_positions.device)  # (batch,)
        self.computes_gates = computes_gates
        self._is_spent = False  # a copy on the host, so that it does not wait for the device again

    def pay_gates(self, cost: LayerCost, num_gates: torch.Tensor) -> bool:
        """Pay for the gates of `num_gates` slots (batch,). Return whether any row has operations left."""
        if self._is_spent:
            return False
        remaining = self.remaining.to(num_gates.device)
        price = num_gates * (cost.gate if self.computes_gates else 0)  # (batch,)
        self.remaining = torch.where(remaining >= price, remaining - price, 0)
        self._is_spent = not bool(self.remaining.any())
        return not self._is_spent

    def select_slots(
        self, gate_prob: torch.Tensor, gate_open: torch.Tensor, cost: LayerCost, layout: SlotLayout
    ) -> torch.Tensor:
        """Choose the slots that take a first step, and pay for them: in each row as many slots with an open gate as the
        budget covers, the most probable first, and equally probable ones from left to right. Return which slots were
        chosen (batch, max_slots)."""
        sizes = _prefix_sizes(layout)
        once, per_slot = cost.of_keys_values(*sizes), cost.of_slot_pass(*sizes)  # (batch,)
        num_open = gate_open.sum(dim=1)
        affordable = torch.div(self.remaining - once, per_slot, rounding_mode="floor").clamp(min=0)
        num_selected = torch.minimum(num_open, affordable)
        paid = torch.where(num_selected > 0, once + num_selected * per_slot, 0)
        # A step that the budget does not cover ends the row's refinement, so that a larger budget has all steps of a
        # smaller one.
        self.remaining = torch.where(num_selected < num_open, 0, self.remaining - paid)
        order = gate_prob.masked_fill(~gate_open, -1.0).argsort(dim=1, descending=True, stable=True)
        # Sorting the order gives the rank of each slot.
        return gate_open & (order.argsort(dim=1) < num_selected[:, None])

    def select_step(
        self, gate_open: torch.Tensor, is_selected: torch.Tensor, cost: LayerCost, layout: SlotLayout
    ) -> torch.Tensor:
        """Choose the slots that take another step, and pay for them: the slots of a row take it together, if the budget
        covers all of them. Return the chosen slots (batch, width): in the rows that pay, those with an open gate."""
        price = torch.where(gate_open.any(dim=1), is_selected.sum(dim=1) * cost.of_slot_pass(*_prefix_sizes(layout)), 0)
        affords = self.remaining >= price  # (batch,)
        self.remaining = torch.where(affords, self.remaining - price, 0)
        return gate_open & affords[:, None]


@dataclass(frozen=True)
class RefinementSettings:
    """The settings of the refinement in one forward."""

    gate_mode: str
    gate_threshold: float
    max_refinement_steps: int
    budget: RefinementBudget | None

    @property
    def takes_all(self) -> bool:
        """Whether each slot takes each step, without gates and without a budget."""
        return self.gate_mode == "always" and self.budget is None


def _budget_of(
    config: ArcAlignerConfig, gate_settings: GateSettings, costs: list[LayerCost], layout: SlotLayout, training: bool
) -> RefinementBudget | None:
    """The budget of a forward, if its settings have one.

    Raises:
        `ValueError`: a budget in training, or with an attention kernel that cannot compute only a part of the slots.
    """
    if (share := gate_settings.refinement_budget) is None:
        return None
    if training:
        raise ValueError(
            f"`refinement_budget` is {share}, but the model is in training mode, which computes all extra passes of "
            "all slots. Call `model.eval()`, or leave out `refinement_budget`."
        )
    if (kernel := config.text_config._attn_implementation) not in MASK_KERNELS:
        raise ValueError(
            f"`refinement_budget` is {share}, but the attention kernel `{kernel}` cannot apply a layer again to only "
            f"some of the slots. Load the model with `attn_implementation` {' or '.join(map(repr, MASK_KERNELS))}, or "
            "leave out `refinement_budget`."
        )
    return RefinementBudget(share, costs, layout, computes_gates=gate_settings.gate_mode != "always")


# Steps of a layer
class RecordedDepths:
    """Refinement steps of slots. Layers return hidden states only, so they write their steps here. This class is not a
    dictionary, because hooks that move a layer's inputs to its device would copy a dictionary."""

    def __init__(self):
        self.by_layer: dict[int, torch.Tensor] = {}  # each (batch, max_slots)


# Text before the slots, as a share of the slots, that a step of all slots computes once more.
MAX_TEXT_PER_SLOT = 0.5


class Slots(NamedTuple):
    """The slots of one forward, for its layers: one keyword argument, which gradient checkpointing passes again when it
    repeats a layer."""

    layout: SlotLayout
    settings: RefinementSettings
    depths: RecordedDepths
    shared_inputs: SharedStepInputs
    later_text_inputs: SharedStepInputs
    # Factors that move the keys of slots for the text after them, each (batch, 1, seq_len, head_dim).
    rotation: tuple[torch.Tensor, torch.Tensor] | None

    def flat_index(self) -> torch.Tensor | slice:
        """The slots among flat positions (batch * seq_len), as a slice if they are adjacent, which needs no copy."""
        return self.layout.slot_indices if self.layout.slot_span is None else slice(*self.layout.slot_span)

    def refinable(self, is_last_layer: bool) -> torch.Tensor:
        """Slots (batch, max_slots) that may be refined. Nothing uses those of the last layer, except at the end of a
        row."""
        if is_last_layer and self.layout.ends_in_slot is not None:
            return self.layout.is_slot & self.layout.ends_in_slot[:, None]
        return self.layout.is_slot

    @property
    def has_little_text(self) -> bool:
        """Whether the text before the slots is so short that it is cheaper to compute it again in each step than to
        store its keys and values separately."""
        return MAX_TEXT_PER_SLOT * self.layout.slot_positions.shape[1] >= self.layout.text_positions.shape[1]

    def stacked_depths(self, num_layers: int) -> torch.LongTensor:
        """The number of steps of each slot at each layer (batch, num_layers, max_slots): 0 at layers that did not
        refine, -1 where there is no slot."""
        none = torch.zeros_like(self.layout.slot_positions)  # (batch, max_slots)
        depths = [self.depths.by_layer.get(layer_idx, none).to(none.device) for layer_idx in range(num_layers)]
        return torch.stack(depths, dim=1).masked_fill(self.layout.slot_positions[:, None, :] < 0, -1)


def new_slots(
    config: ArcAlignerConfig, gate_settings: GateSettings, costs: list[LayerCost], layout: SlotLayout, training: bool
) -> Slots:
    """The slots of a forward before its first layer, with the settings `gate_settings`.

    Raises:
        `ValueError`: a budget in training, or with an attention kernel that does not support it.
    """
    budget = _budget_of(config, gate_settings, costs, layout, training)
    settings = RefinementSettings(
        gate_settings.gate_mode, gate_settings.gate_threshold, gate_settings.max_refinement_steps, budget
    )
    rotation = None if layout.moves is None else key_rotation(layout.moves[:, None], config.text_config)
    return Slots(layout, settings, RecordedDepths(), SharedStepInputs(), SharedStepInputs(), rotation)


# If at least this share of the slots is open, a step computes all of them.
DENSE_STEP_SHARE = 7 / 8

# Makes, for the positions of a step (`None`: all slots), the layer as a function of their states (batch, width,
# hidden).
SlotPass = Callable[[StepPositions | None], Callable[[torch.Tensor], torch.Tensor]]


class AllSlotsSteps:
    """Steps of one layer that compute every slot: in training, where the gradient of a closed gate needs its candidate
    (Eq. 7), and in compiled code, whose operations may not depend on what the gates decide."""

    def __init__(self, layer, hidden: SlotStates, slots: Slots, slot_pass: SlotPass):
        self.layer, self.hidden, self.slots = layer, hidden, slots
        self.reapply = slot_pass(None)  # prepared once for all steps: the fixed positions do not change
        self.depth = torch.zeros_like(slots.layout.slot_positions)  # (batch, max_slots)

    def can_compute_gates(self) -> bool:
        """Whether gates may be computed: always, because there is no budget here."""
        return True

    def narrow(self, states: torch.Tensor, gate: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute all slots, and count the open ones."""
        layout, is_open = self.slots.layout, prob >= self.slots.settings.gate_threshold  # (batch, max_slots, 1)
        if not self.layer.training:  # compiled code refines the same slots as other code
            gate = is_open = is_open & self.slots.refinable(self.layer.is_last)[:, :, None]
        self.depth = self.depth + (is_open[:, :, 0] & layout.is_slot)
        return states, gate

    def write_back(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states after Eq. 9, and the number of steps of each slot (batch, max_slots)."""
        return self.hidden.with_slots(states), self.depth


class OpenSlotsSteps:
    """Steps of one layer at inference, for the slots whose gate is open after the mandatory pass. The result is exact:
    the input of a closed gate does not change, so the gate stays closed. If nearly all gates are open, a step computes
    all slots."""

    def __init__(self, layer, hidden: SlotStates, slots: Slots, slot_pass: SlotPass):
        self.layer, self.hidden, self.slots, self._slot_pass = layer, hidden, slots, slot_pass
        self.is_selected = slots.refinable(layer.is_last)  # (batch, width), all slots at first
        self.cells: torch.Tensor | None = None  # (batch, width), which slots are computed; None for all
        self.depth: torch.Tensor | None = None  # (batch, width), once a slot is open

    def _has_gate(self) -> torch.Tensor:
        """Slots (batch, width) whose gates are computed: none in a row whose gates have all closed."""
        return self.is_selected if self.depth is None else self.is_selected & self.is_open.any(dim=1, keepdim=True)

    def can_compute_gates(self) -> bool:
        """Whether the remaining budget covers the gates of a row; always true without a budget."""
        budget = self.slots.settings.budget
        return budget is None or budget.pay_gates(self.layer.slot_cost, self._has_gate().sum(dim=1))

    def narrow(
        self, states: torch.Tensor, gate: torch.Tensor, prob: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States and gates of the slots that are computed, (batch, width, ...); the gates are `None` if none is
        open."""
        settings, layout, cost = self.slots.settings, self.slots.layout, self.layer.slot_cost
        budget, is_first = settings.budget, self.depth is None
        self.is_open = gate[:, :, 0] & self._has_gate()  # (batch, width)
        if budget is not None and is_first:
            self.is_open = budget.select_slots(prob[:, :, 0], self.is_open, cost, layout)
        elif budget is not None:
            self.is_open = budget.select_step(self.is_open, self.is_selected, cost, layout)
        # If each slot takes each step, the host knows that without waiting for the device.
        if not settings.takes_all and not bool(self.is_open.any()):
            return states, None
        if is_first:
            states = self._lay_out(states)
        self.depth = self.depth + self.is_open
        return states, self.is_open[:, :, None]

    def _lay_out(self, states: torch.Tensor) -> torch.Tensor:
        """Decide which slots the steps compute, and return their states (batch, width, hidden)."""
        step_positions, width = None, self._width(self.is_open)
        if width < self.is_open.shape[1]:
            # Open slots first, in their order. Rows with fewer are filled up with others: a batch needs one width.
            self.cells = (~self.is_open).to(torch.int8).argsort(dim=1, stable=True)[:, :width]  # (batch, width)
            self.is_open = self.is_open.gather(1, self.cells)  # (batch, width)
            step_positions = open_slots_plan(self.slots.layout, self.cells, self.is_open)
            states = take_positions(states, self.cells)  # (batch, width, hidden)
        # No gate opens again later: the following steps are among these slots.
        self.is_selected, self.depth = self.is_open, torch.zeros_like(self.is_open, dtype=torch.long)
        self.reapply = self._slot_pass(step_positions)
        return states

    def _width(self, gate_open: torch.Tensor) -> int:
        """Slots of a row that a step computes: the open ones (batch, max_slots) of the fullest row, or all."""
        max_slots, settings = gate_open.shape[1], self.slots.settings
        has_choice = self.layer.arcaligner_config.text_config._attn_implementation in MASK_KERNELS
        if settings.takes_all or not has_choice:
            return max_slots  # known without copying the gates from the device, for which the host would wait
        width = int(gate_open.sum(dim=1).max())
        # Without a budget, a few closed slots are computed, too, which is faster than to treat them like text.
        return max_slots if settings.budget is None and width >= DENSE_STEP_SHARE * max_slots else width

    def write_back(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The hidden states after Eq. 9, and the number of steps of each slot (batch, max_slots), if any took one."""
        depth = self.depth
        if depth is None:
            return self.hidden.hidden_states, None
        if self.cells is not None:  # slots that were not computed keep the mandatory pass
            states = self.hidden.slots().scatter(1, self.cells[:, :, None].expand_as(states), states)
            no_steps = torch.zeros_like(self.slots.layout.slot_positions)  # (batch, max_slots)
            depth = no_steps.scatter(1, self.cells, depth)
        return self.hidden.with_slots(states), depth
