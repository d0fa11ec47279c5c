"""Refinement: a decoder layer re-applied to its slot rows alone, and what that may cost.

A refinement step (Eq. 6) applies layer `l` to its own output. Only slots with an open gate change, so a step needs

    queries           of these slots (of all slots in training, and where nearly all gates are open)
    keys and values   of the text before the last slot and of the other slots, once from the layer's output, and of the
                      slots that change, afresh

This file picks the rows, positions and part of the attention mask that belong to them, and gives the layer a stand-in
for the cache: the layer writes the slots' keys and values to it and gets all of them back. The real cache holds the
mandatory pass only and is never touched.

With `refinement_budget=0.1` all of it takes at most 10 % of the operations of the slot prefix's prefill, spent layer by
layer.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .backbones_arcaligner import LayerCost
from .configuration_arcaligner import ArcAlignerConfig, normalize_budget

# Attention kernels that take a mask of rows by columns, so that some slots can be computed without the others.
ROW_KERNELS = ("eager", "sdpa")
# If at least this share of the slots is open, a step computes all of them.
DENSE_STEP_SHARE = 7 / 8


class SlotRows(NamedTuple):
    """Where the slots of a batch are; computed once per forward."""

    slot_positions: torch.Tensor  # (batch, max_slots), position in the row, -1 where there is no slot
    text_positions: torch.Tensor  # (batch, max_text), text before the row's last slot, -1 padding
    slot_rows: torch.Tensor  # (num_slots,), flat indices into (batch * seq_len)
    slot_cells: torch.Tensor  # (num_slots,), flat indices into (batch * max_slots)
    slot_span: tuple[int, int] | None  # first and end of `slot_rows` where all stand together, as in one prompt
    ends_in_slot: torch.Tensor | None  # (batch,), rows whose last slot decides a token; None where there is none

    def refinable(self, is_last_layer: bool) -> torch.Tensor:
        """Slots (batch, max_slots) that may be refined: nothing reads the last layer's, except at the end of a row."""
        is_slot = self.slot_positions >= 0
        return is_slot & self.ends_in_slot[:, None] if is_last_layer and self.ends_in_slot is not None else is_slot

    def sizes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of text before the last slot and slots, each (batch,)."""
        return (self.text_positions >= 0).sum(dim=1), (self.slot_positions >= 0).sum(dim=1)

    def row_index(self) -> torch.Tensor | slice:
        """The slots among flat rows, as a slice where they stand together: their rows need no copy then."""
        return self.slot_rows if self.slot_span is None else slice(*self.slot_span)


class StepRows(NamedTuple):
    """The rows of a refinement step of one layer: those it computes and those it only reads."""

    slot_positions: torch.Tensor  # (batch, width), slots that are computed, -1 padding
    fixed_positions: torch.Tensor  # (batch, max_fixed), before the row's last slot, -1 padding
    fixed_slots: torch.Tensor | None  # flat indices into (batch * max_fixed) that carry LoRA; None where all is text


class StepInputs(NamedTuple):
    """Rows of a step, and the keyword arguments that replace the layer's own for them."""

    rows: StepRows
    for_slots: dict[str, Any]
    for_fixed: dict[str, Any]


def open_slots_plan(rows: SlotRows, cells: torch.Tensor, is_taken: torch.Tensor) -> StepRows:
    """A step that computes the slots in `cells` (batch, width) where `is_taken`, and reads the others like text."""
    max_text, max_slots = rows.text_positions.shape[1], rows.slot_positions.shape[1]
    filler = rows.slot_positions.gather(1, cells).masked_fill(is_taken, -1)
    others = rows.slot_positions.scatter(1, cells, filler)  # (batch, max_slots), -1 where taken
    batch_index = rows.slot_cells // max_slots
    return StepRows(
        slot_positions=rows.slot_positions.gather(1, cells).masked_fill(~is_taken, -1),
        fixed_positions=torch.cat([rows.text_positions, others], dim=1),
        fixed_slots=rows.slot_cells + (batch_index + 1) * max_text,  # those of all slots: masked ones do no harm
    )


def to_numpy_in_one_sync(*flags: torch.Tensor) -> list[np.ndarray]:
    """Boolean tensors of any shapes as arrays; the CPU waits for the device once."""
    read = torch.cat([each.flatten() for each in flags]).numpy(force=True)
    parts = np.split(read, np.cumsum([each.numel() for each in flags])[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, flags, strict=True)]


def _packed_positions(mask: np.ndarray) -> np.ndarray:
    """Positions of the true entries of `mask` (batch, seq_len), in order, packed to the left and padded with -1.

    >>> _packed_positions(np.array([[False, True, True], [True, False, False]]))
    array([[ 1,  2],
           [ 0, -1]])
    """
    counts = mask.sum(axis=1, keepdims=True)  # (batch, 1)
    width = counts.max(initial=0)
    order = np.argsort(~mask, axis=1, kind="stable")[:, :width]
    return np.where(np.arange(width) < counts, order, -1)


def find_slot_rows(is_slot: np.ndarray, is_text: np.ndarray, max_slots: int, device: torch.device) -> SlotRows:
    """Row indices of a batch, computed on the CPU and sent to `device`.

    Args:
        is_slot (`np.ndarray` of shape `(batch, seq_len)`): The paper's `M_r`.
        is_text (`np.ndarray` of shape `(batch, seq_len)`): Real text, neither slot nor padding.
        max_slots (`int`): Width of `context_embeds`; rows of positions are padded to it.
        device (`torch.device`): Where the model's input is.
    """
    slots = _packed_positions(is_slot)
    slots = np.pad(slots, ((0, 0), (0, max_slots - slots.shape[1])), constant_values=-1)
    last_slot = slots.max(axis=1, keepdims=True, initial=-1)  # (batch, 1)
    texts = _packed_positions(is_text & (np.arange(is_slot.shape[1]) < last_slot))
    rows = is_slot.ravel().nonzero()[0]
    last_real = np.where(is_slot | is_text, np.arange(is_slot.shape[1]), -1).max(axis=1, initial=-1)  # (batch,)
    stand_together = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows)
    indices = (slots, texts, rows, (slots >= 0).ravel().nonzero()[0])
    ends_in_slot = (last_slot[:, 0] >= 0) & (last_slot[:, 0] == last_real)  # (batch,)
    at_once = device.type == "cuda"  # copies before it returns; other devices might read memory that is freed
    return SlotRows(
        *(torch.from_numpy(each).to(device, non_blocking=at_once) for each in indices),
        slot_span=(int(rows[0]), int(rows[-1]) + 1) if stand_together else None,
        ends_in_slot=torch.from_numpy(ends_in_slot).to(device) if ends_in_slot.any() else None,
    )


def take_rows(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of `tensor` (batch or 1, seq_len, dim) at `positions` (batch, rows) -> (batch, rows, dim); row 0 for -1."""
    tensor = tensor.expand(positions.shape[0], -1, -1)
    index = positions.clamp(min=0)[:, :, None].expand(-1, -1, tensor.shape[-1])
    return tensor.gather(1, index)


def step_inputs(rows: StepRows, kwargs: dict[str, Any], dtype: torch.dtype) -> StepInputs:
    """The inputs of a step with these `rows`, for a layer that was called with `kwargs`."""
    mask = refinement_mask(kwargs["attention_mask"], rows, dtype)
    return StepInputs(
        rows=rows,
        for_slots=gather_rotary(kwargs, rows.slot_positions) | {"attention_mask": mask, "use_cache": False},
        for_fixed=gather_rotary(kwargs, rows.fixed_positions) | {"attention_mask": None, "use_cache": False},
    )


def gather_rotary(kwargs: dict[str, Any], positions: torch.Tensor) -> dict[str, Any]:
    """Rotary angles and position ids of the rows at `positions` (batch, rows)."""
    cos, sin = kwargs["position_embeddings"]
    picked = {"position_embeddings": (take_rows(cos, positions), take_rows(sin, positions))}
    if kwargs.get("position_ids") is not None:
        picked["position_ids"] = take_rows(kwargs["position_ids"][:, :, None], positions)[:, :, 0]
    return picked


class SharedStepInputs:
    """Inputs of a step of all slots, made once per forward for all layers with the same mask and rotary angles.

    Backbones have layers of one or two kinds, so the last two are kept: where each layer gets copies of its own, as
    with weights on several devices, nothing is shared and no more is held.
    """

    def __init__(self):
        # With what they were made of: a tensor that is gone could give its identity to another.
        self._made: list[tuple[torch.Tensor | None, torch.Tensor, StepInputs]] = []

    def get(self, rows: SlotRows, kwargs: dict[str, Any], dtype: torch.dtype) -> StepInputs:
        """The inputs of a step of all slots, for a layer that was called with `kwargs`."""
        all_slots = StepRows(rows.slot_positions, rows.text_positions, None)
        if torch.compiler.is_compiling():
            return step_inputs(all_slots, kwargs, dtype)
        mask, cosines = kwargs["attention_mask"], kwargs["position_embeddings"][0]
        for made_mask, made_cosines, inputs in self._made:
            if made_mask is mask and made_cosines is cosines:
                return inputs
        inputs = step_inputs(all_slots, kwargs, dtype)
        self._made = [*self._made[-1:], (mask, cosines, inputs)]
        return inputs


def refinement_mask(attention_mask: torch.Tensor | None, rows: StepRows, dtype: torch.dtype) -> torch.Tensor:
    """What each slot of a step may read: the text and the slots that the layer's own mask shows it.

    Args:
        attention_mask: The layer's mask, (batch or 1, 1, seq_len, kv_len), boolean or additive; `None` means causal.
        rows (`StepRows`): Rows of the step.
        dtype (`torch.dtype`): The dtype of the hidden states, for an additive mask.

    Returns:
        `torch.Tensor` of shape `(batch, 1, width, max_fixed + width)`, of the kind that was given.
    """
    queries = rows.slot_positions  # (batch, width)
    keys = torch.cat([rows.fixed_positions, rows.slot_positions], dim=1)  # (batch, max_fixed + width)
    num_queries, num_keys = queries.shape[1], keys.shape[1]
    real_keys = (keys >= 0)[:, None, None, :]
    # A row that is no slot (padding) reads itself, so that its softmax has something to sum over.
    own_key = torch.eye(num_queries, dtype=torch.bool, device=keys.device)
    own_key = torch.nn.functional.pad(own_key, (num_keys - num_queries, 0)) & (queries < 0)[:, None, :, None]
    if attention_mask is None:
        return ((keys[:, None, None, :] <= queries[:, None, :, None]) & real_keys) | own_key
    mask = take_rows(attention_mask[:, 0], queries)  # (batch, width, kv_len)
    columns = keys.clamp(min=0)[:, None, :].expand(-1, num_queries, -1)
    mask = mask.gather(2, columns)[:, None]  # (batch, 1, width, max_fixed + width)
    if mask.dtype == torch.bool:
        return (mask & real_keys) | own_key
    return mask.masked_fill(~real_keys, torch.finfo(dtype).min).masked_fill(own_key, 0.0)


class KeysValuesComplete(Exception):  # noqa: N818 - nothing went wrong, the rest of the layer is just not needed
    """Ends a layer's forward as soon as its keys and values are known."""


class KeysValuesRecorder:
    """Stands in for the cache to learn a layer's keys and values of fixed rows: (batch, heads, max_fixed, head_dim)."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        self.keys, self.values = keys, values
        if torch.compiler.is_compiling():
            return keys, values  # it cannot trace an exception, and drops the rest of the layer, which nothing reads
        raise KeysValuesComplete


class RefinementKeysValues:
    """Stands in for the cache in a refinement step: slots read the fixed rows' keys and values, then their own."""

    def __init__(self, keys: torch.Tensor | None, values: torch.Tensor | None):
        self.keys, self.values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        if self.keys is None:
            return keys, values
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


# Settings, and a budget of operations


# Far more than any prompt takes, and the sum of two is still an int64.
_MOST_FLOPS = 2.0**61


class RefinementBudget:
    """The operations that each row of one forward may still spend on refinement, layer by layer.

    Args:
        share (`float`): Share of the operations of the prefill of a row's slot prefix, at least 0.
        costs (`list[LayerCost]`): The costs of all layers.
        rows ([`SlotRows`]): The slots of the forward.
        asks_gates (`bool`): Whether gates are computed.
    """

    def __init__(self, share: float, costs: list[LayerCost], rows: SlotRows, asks_gates: bool):
        sizes = zip(*(size.tolist() for size in rows.sizes()), strict=True)
        prefills = [sum(cost.of_prefill(*size) for cost in costs) for size in sizes]
        left = [int(min(share * prefill, _MOST_FLOPS)) for prefill in prefills]
        self.left = torch.tensor(left, device=rows.slot_positions.device)  # (batch,)
        self.asks_gates = asks_gates
        self._is_spent = False  # kept here, so that the device is not asked again

    def pay_gates(self, cost: LayerCost, num_asked: torch.Tensor) -> bool:
        """Pays for the gates of `num_asked` slots (batch,). Returns whether a row has anything left."""
        if self._is_spent:
            return False
        left = self.left.to(num_asked.device)
        price = num_asked * (cost.gate if self.asks_gates else 0)
        self.left = torch.where(left >= price, left - price, 0)
        self._is_spent = not bool(self.left.any())
        return not self._is_spent

    def take_slots(
        self, gate_prob: torch.Tensor, gate_open: torch.Tensor, cost: LayerCost, rows: SlotRows
    ) -> torch.Tensor:
        """The open slots (batch, max_slots) that a row can pay a first step for: by probability, then by position."""
        once, each = cost.of_keys_values(*rows.sizes()), cost.of_slot_pass(*rows.sizes())
        wanted = gate_open.sum(dim=1)
        affordable = torch.div(self.left - once, each, rounding_mode="floor").clamp(min=0)
        taken = torch.minimum(wanted, affordable)
        paid = torch.where(taken > 0, once + taken * each, 0)
        self.left = torch.where(taken < wanted, 0, self.left - paid)
        order = gate_prob.masked_fill(~gate_open, -1.0).argsort(dim=1, descending=True, stable=True)
        return gate_open & (order.argsort(dim=1) < taken[:, None])

    def take_step(
        self, gate_open: torch.Tensor, is_taken: torch.Tensor, cost: LayerCost, rows: SlotRows
    ) -> torch.Tensor:
        """The slots (batch, width) that are still open, where a row can pay another step of all that are taken."""
        each = cost.of_slot_pass(*rows.sizes())
        price = torch.where(gate_open.any(dim=1), is_taken.sum(dim=1) * each, 0)
        affords = self.left >= price
        self.left = torch.where(affords, self.left - price, 0)
        return gate_open & affords[:, None]


@dataclass(frozen=True)
class RefinementSettings:
    """The settings of one forward."""

    gate_mode: str
    gate_threshold: float
    max_refinement_steps: int
    budget: RefinementBudget | None

    @property
    def takes_all(self) -> bool:
        """Whether each slot takes each step: no gate is asked, nothing is paid for."""
        return self.gate_mode == "always" and self.budget is None


def resolve_settings(
    config: ArcAlignerConfig,
    costs: list[LayerCost],
    rows: SlotRows,
    training: bool,
    gate_mode: str | None,
    gate_threshold: float | None,
    max_refinement_steps: int | None,
    refinement_budget: float | None,
) -> RefinementSettings:
    """The settings of a forward: the given ones, which are checked already, otherwise the configuration's.

    Raises:
        `ValueError`: a budget in training, or with an attention kernel that computes slots all or none.
    """
    gate_mode, refinement_budget = normalize_budget(gate_mode or config.gate_mode, refinement_budget)
    budget = None
    if refinement_budget is not None:
        if training:
            raise ValueError(
                f"`refinement_budget` is {refinement_budget} in training, where every slot takes every step for the "
                "gradients of the gates. Call `model.eval()`, or leave it out."
            )
        if (kernel := config.text_config._attn_implementation) not in ROW_KERNELS:
            raise ValueError(
                f"`refinement_budget` is {refinement_budget}, but attention `{kernel}` can only refine the whole "
                f"prefix at once. Load the model with `attn_implementation` {' or '.join(ROW_KERNELS)}."
            )
        budget = RefinementBudget(refinement_budget, costs, rows, asks_gates=gate_mode != "always")
    steps = config.max_refinement_steps if max_refinement_steps is None else max_refinement_steps
    return RefinementSettings(gate_mode, gate_threshold or config.gate_threshold, steps, budget)


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


def gated_update(states: torch.Tensor, candidate: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Eq. 8: slots (batch, width, hidden) take the `candidate` where their `gate` (batch, width, 1) is open: a truth
    value or, in training, the number of [`straight_through_gate`]."""
    if gate.dtype == torch.bool:
        return torch.where(gate, candidate, states)
    return states + gate.to(states.dtype) * (candidate - states)


def straight_through_gate(gate_prob: torch.Tensor, threshold: float) -> torch.Tensor:
    """Eq. 7: the hard decision in the forward pass, the probability's gradient in the backward pass.

    >>> straight_through_gate(torch.tensor([0.25, 0.5, 0.75]), threshold=0.5)
    tensor([0., 1., 1.])
    """
    gate_hard = (gate_prob >= threshold).to(gate_prob.dtype)
    return gate_prob + (gate_hard - gate_prob).detach()


def _write_slots(hidden_states: torch.Tensor, states: torch.Tensor, rows: SlotRows) -> torch.Tensor:
    """Eq. 9: `states` (batch, max_slots, hidden) on the slot rows of `hidden_states` (batch, seq_len, hidden)."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])  # (batch * seq_len, hidden)
    slots = states.reshape(-1, states.shape[-1]).index_select(0, rows.slot_cells)  # (num_slots, hidden)
    return flat.index_copy(0, rows.slot_rows, slots).view_as(hidden_states)


class AllSlotsSteps:
    """Steps of one layer that compute every slot: in training, where the gradient of a closed gate needs its candidate
    (Eq. 7), and in compiled code, whose operations may not depend on what the gates decide."""

    rows = None  # a step computes all slots

    def __init__(self, layer, hidden_states: torch.Tensor, slots: Slots):
        self.layer, self.hidden_states, self.slots = layer, hidden_states, slots
        self.depth = torch.zeros_like(slots.rows.slot_positions)  # (batch, max_slots)

    def first_states(self) -> torch.Tensor:
        return take_rows(self.hidden_states, self.slots.rows.slot_positions)  # (batch, max_slots, hidden)

    def open_gates(self, step: int, states: torch.Tensor) -> torch.Tensor:
        """Eq. 5 and 7 for all slots, (batch, max_slots, 1)."""
        settings = self.slots.settings
        gate_prob = self.layer.gate_prob(states, settings)
        is_open = gate_prob >= settings.gate_threshold
        if not self.layer.training:
            is_open = is_open & self.slots.rows.refinable(self.layer.is_last)[:, :, None]
        self.depth = self.depth + (is_open[:, :, 0] & (self.slots.rows.slot_positions >= 0))
        return straight_through_gate(gate_prob, settings.gate_threshold) if self.layer.training else is_open

    def write_back(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Eq. 9, and the steps that each slot took (batch, max_slots)."""
        return _write_slots(self.hidden_states, states, self.slots.rows), self.depth


class OpenSlotsSteps:
    """Steps of one layer at inference: of the slots whose gate is open after the mandatory pass. That is exact, since a
    closed gate reads an unchanged slot and stays closed. Where nearly all are open, a step computes the others too."""

    def __init__(self, layer, hidden_states: torch.Tensor, slots: Slots, gate_open: torch.Tensor):
        self.layer, self.hidden_states, self.slots = layer, hidden_states, slots
        width = self._width(gate_open)
        self.cells, self.rows = None, None
        if width < gate_open.shape[1]:  # as many as the fullest row has; others are filled up with closed slots
            self.cells = (~gate_open).to(torch.int8).argsort(dim=1, stable=True)[:, :width]  # (batch, width)
            gate_open = gate_open.gather(1, self.cells)
            self.rows = open_slots_plan(slots.rows, self.cells, gate_open)
        self.is_taken = self.is_open = gate_open  # (batch, width)
        self.depth = torch.zeros_like(gate_open, dtype=torch.long)

    @classmethod
    def plan(cls, layer, hidden_states: torch.Tensor, slots: Slots) -> "OpenSlotsSteps | None":
        """The steps of a layer, or `None` where no gate is open after the mandatory pass or nothing can be paid for."""
        rows, settings, budget = slots.rows, slots.settings, slots.settings.budget
        is_slot = rows.refinable(layer.is_last)  # (batch, max_slots)
        if settings.takes_all:
            return cls(layer, hidden_states, slots, is_slot)
        if budget is not None and not budget.pay_gates(layer.slot_cost, is_slot.sum(dim=1)):
            return None
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])  # (batch * seq_len, hidden)
        prob = layer.gate_prob(flat.index_select(0, rows.slot_rows), settings)  # (num_slots, 1)
        if not bool((prob >= settings.gate_threshold).any()):
            return None  # the usual case, found without laying out a step
        gate_prob = prob.new_zeros(is_slot.numel()).index_copy(0, rows.slot_cells, prob[:, 0]).view_as(is_slot)
        gate_open = (gate_prob >= settings.gate_threshold) & is_slot
        if budget is not None:
            gate_open = budget.take_slots(gate_prob, gate_open, layer.slot_cost, rows)
        if (budget is not None or layer.is_last) and not bool(gate_open.any()):
            return None
        return cls(layer, hidden_states, slots, gate_open)

    def _width(self, gate_open: torch.Tensor) -> int:
        """Slots of a row that a step computes: the open ones (batch, max_slots) of the fullest row, or all."""
        max_slots, settings = gate_open.shape[1], self.slots.settings
        has_choice = self.layer.arcaligner_config.text_config._attn_implementation in ROW_KERNELS
        if settings.takes_all or not has_choice:
            return max_slots
        width = int(gate_open.sum(dim=1).max())
        # Without a budget, a few closed slots are computed too: cheaper than to read each of them like text.
        return max_slots if settings.budget is None and width >= DENSE_STEP_SHARE * max_slots else width

    def first_states(self) -> torch.Tensor:
        states = take_rows(self.hidden_states, self.slots.rows.slot_positions)  # (batch, max_slots, hidden)
        return states if self.cells is None else take_rows(states, self.cells)  # (batch, width, hidden)

    def open_gates(self, step: int, states: torch.Tensor) -> torch.Tensor | None:
        """Eq. 5 and 7, (batch, width, 1); `None` where no gate is open any more."""
        if step > 0 and not self._ask_again(states):
            return None
        self.depth = self.depth + self.is_open
        return self.is_open[:, :, None]

    def _ask_again(self, states: torch.Tensor) -> bool:
        """Asks the gates of the slots that took the steps before; whether one is open."""
        settings, budget, cost = self.slots.settings, self.slots.settings.budget, self.layer.slot_cost
        if settings.takes_all:
            self.is_open = self.is_taken
            return True
        asked = self.is_taken & self.is_open.any(dim=1, keepdim=True)  # a row that has closed is done
        if budget is not None and not budget.pay_gates(cost, asked.sum(dim=1)):
            return False
        self.is_open = (self.layer.gate_prob(states, settings)[:, :, 0] >= settings.gate_threshold) & asked
        if budget is not None:
            self.is_open = budget.take_step(self.is_open, self.is_taken, cost, self.slots.rows)
        return bool(self.is_open.any())

    def write_back(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Eq. 9, and the steps that each slot took (batch, max_slots)."""
        rows, depth = self.slots.rows, self.depth
        if self.cells is not None:
            all_states = take_rows(self.hidden_states, rows.slot_positions)  # (batch, max_slots, hidden)
            states = all_states.scatter(1, self.cells[:, :, None].expand_as(states), states)
            depth = torch.zeros_like(rows.slot_positions).scatter(1, self.cells, depth)
        return _write_slots(self.hidden_states, states, rows), depth
