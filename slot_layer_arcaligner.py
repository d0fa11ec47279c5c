"""A decoder layer that knows slots: the mandatory pass, its gate, and the steps of the slots that the gate opens.

Eq. 4   the layer, with LoRA on slot rows
Eq. 5   the gate's probability of another pass, Eq. 7 its hard decision with a soft gradient
Eq. 6   the layer applied again to its own output, on slot rows; which rows and keys, refinement_arcaligner.py knows
Eq. 8   the step's result where the gate is open, Eq. 9 text rows stay
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.utils.output_capturing import _active_collector

from .configuration_arcaligner import ArcAlignerConfig
from .lora_arcaligner import ALL_ROWS, slot_scope
from .recording_arcaligner import recording_depths
from .refinement_arcaligner import (
    KeysValuesComplete,
    KeysValuesRecorder,
    LayerKeysValues,
    RefinementKeysValues,
    SlotRows,
    StepInputs,
    StepRows,
    at_positions,
    open_slots_first,
    some_slots,
    step_inputs,
    take_rows,
)
from .refinement_budget_arcaligner import LayerCost, count_layer_cost
from .refinement_settings_arcaligner import ROW_KERNELS, RefinementSettings
from .subclassing_arcaligner import InPlaceMixin, mix_in

# Where so large a part of the slots is open, a step computes the others too.
ALMOST_ALL = 7 / 8


class SlotGate(nn.Module):
    """The gate of one layer (Eq. 5): slot states (..., hidden) to the probability (..., 1) of another pass."""

    def __init__(self, hidden_size: int, gate_hidden_size: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, gate_hidden_size)
        self.act = nn.SiLU()
        self.out = nn.Linear(gate_hidden_size, 1)

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        with torch.autocast(slots.device.type, enabled=False):
            return torch.sigmoid(self.out(self.act(self.up(slots.to(self.up.weight.dtype)))))


def straight_through_gate(gate_prob: torch.Tensor, threshold: float) -> torch.Tensor:
    """Eq. 7: the hard decision in the forward pass, the probability's gradient in the backward pass.

    >>> straight_through_gate(torch.tensor([0.25, 0.5, 0.75]), threshold=0.5)
    tensor([0., 1., 1.])
    """
    gate_hard = (gate_prob >= threshold).to(gate_prob.dtype)
    return gate_prob + (gate_hard - gate_prob).detach()


class SlotDecoderLayer(InPlaceMixin):
    """What ArcAligner adds to a decoder layer of the backbone. Mixed in before the layer's own class, in place.

    The layer keeps its class name, its state-dict keys and its place in checkpointing, sharding and output recording.
    """

    arcaligner_config: ArcAlignerConfig
    layer_idx: int
    is_last: bool
    slot_cost: LayerCost
    _compiled_compute: Callable | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        slot_positions: torch.Tensor | None = None,
        text_positions: torch.Tensor | None = None,
        slot_rows: torch.Tensor | None = None,
        slot_cells: torch.Tensor | None = None,
        slot_span: tuple[int, int] | None = None,
        refinement: RefinementSettings | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """`hidden_states` (batch, seq_len, hidden) through Algorithm 1's loop body for this layer."""
        if slot_rows is None and self._compiled_compute is None:  # a generated token: the layer as it was
            return super().forward(hidden_states, **kwargs)
        rows = None
        if slot_rows is not None:
            rows = SlotRows(slot_positions, text_positions, slot_rows, slot_cells, slot_span)
        if self._compiled_compute is None:
            hidden_states, depth = self._compute(hidden_states, rows, refinement, kwargs)
        else:
            hidden_states, depth = self._compute_compiled(hidden_states, rows, refinement, kwargs)
        if depth is not None:
            recording_depths.add(self.layer_idx, depth)
        return hidden_states

    def compile(self, *args, **kwargs) -> None:
        """As `nn.Module.compile`, but for what tells one layer from another, so that layers share compiled code: its
        number, its place in the cache and in the record of depths stay outside.

        Compiled code takes the same operations whatever the gates decide, with no read of the host, so that it can be
        captured in a CUDA graph: every slot is computed in each of `max_refinement_steps` steps. What cannot be so
        runs as if it were not compiled: a forward with a budget, one that records attentions, with an offloaded cache,
        or whose cache has no place for the layer yet (a static cache before `early_initialization`, `DynamicCache`
        without a configuration).
        """
        self._compiled_compute = torch.compile(self._compute, *args, **kwargs)

    def __getstate__(self):
        state = super().__getstate__()
        state.pop("_compiled_compute", None)  # as of any module: it holds this layer, a copy would run its weights
        return state

    def _compute_compiled(self, hidden_states, rows, refinement, kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_budget = refinement is not None and refinement.budget is not None
        cache = kwargs.get("past_key_values")
        is_recording = bool(_active_collector.get())  # of attentions or router logits, by hooks
        if has_budget or is_recording or not LayerKeysValues.fits(cache, self.layer_idx):
            return self._compute(hidden_states, rows, refinement, kwargs)
        if cache is not None:
            kwargs = {**kwargs, "past_key_values": LayerKeysValues(cache.layers[self.layer_idx])}
        rows = None if rows is None else rows._replace(slot_span=None)  # or code would be made for each place
        return self._compiled_compute(hidden_states, rows, refinement, kwargs)

    def _compute(
        self, hidden_states: torch.Tensor, rows: SlotRows | None, refinement: RefinementSettings | None, kwargs: dict
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's output (batch, seq_len, hidden), and the steps of its slots (batch, max_slots) if it took any."""
        if rows is None:
            return super().forward(hidden_states, **kwargs), None
        with slot_scope(rows.where()):
            hidden_states = super().forward(hidden_states, **kwargs)  # Eq. 4, the mandatory pass
        if not self._refines(refinement):
            return hidden_states, None
        return self._refine(hidden_states, rows, refinement, kwargs)

    def _refines(self, refinement: RefinementSettings) -> bool:
        if self.slot_gate is None or refinement.gate_mode == "off" or refinement.max_refinement_steps == 0:
            return False
        # No later layer reads the slots of the last one. Only training runs its steps, for Algorithm 1 to the letter.
        return self.training or not self.is_last

    def _refine(
        self, hidden_states: torch.Tensor, rows: SlotRows, refinement: RefinementSettings, kwargs: dict
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        every = self.training or torch.compiler.is_compiling()
        steps = self._every_step if every else self._open_steps
        refined = steps(hidden_states, rows, refinement, kwargs)
        if refined is None:
            return hidden_states, None
        slots, depth = refined  # (batch, max_slots, hidden), (batch, max_slots)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])  # (batch * seq_len, hidden)
        slots = slots.reshape(-1, slots.shape[-1]).index_select(0, rows.slot_cells)  # (num_slots, hidden)
        return flat.index_copy(0, rows.slot_rows, slots).view_as(hidden_states), depth  # Eq. 9: text rows stay

    def _every_step(self, hidden_states, rows, refinement, kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """All steps of all slots: in training, since the gradient of a closed gate needs its candidate (Eq. 7), and in
        compiled code, whose operations may not depend on what the gates decide."""
        slots = take_rows(hidden_states, rows.slot_positions)  # (batch, max_slots, hidden)
        depth = torch.zeros_like(rows.slot_positions)  # (batch, max_slots)
        reapply = self._slot_pass(hidden_states, rows, refinement, kwargs)
        for _step in range(refinement.max_refinement_steps):
            gate_prob = self._gate_prob(slots, refinement)
            gate_open = gate_prob >= refinement.gate_threshold
            candidate = reapply(slots)  # Eq. 6, (batch, max_slots, hidden)
            if self.training:
                gate = straight_through_gate(gate_prob, refinement.gate_threshold)
                slots = slots + gate.to(slots.dtype) * (candidate - slots)  # Eq. 8
            else:
                slots = torch.where(gate_open, candidate, slots)  # Eq. 8 with the hard gate
            depth = depth + (gate_open[:, :, 0] & (rows.slot_positions >= 0))
        return slots, depth

    def _open_steps(self, hidden_states, rows, refinement, kwargs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Inference: the steps of slots whose gate is open, exactly, since a closed gate reads an unchanged slot and
        stays closed. `None` when there is none after the mandatory pass."""
        gate_open = self._first_open(hidden_states, rows, refinement)  # (batch, max_slots)
        if gate_open is None:
            return None
        slots = take_rows(hidden_states, rows.slot_positions)  # (batch, max_slots, hidden)
        width = self._width(gate_open, refinement)
        if width == gate_open.shape[1]:
            cells, taken, step_rows = None, slots, None
        else:  # (batch, width): of the fullest row; others are filled up with slots that do not move
            cells = open_slots_first(gate_open, width)
            gate_open = gate_open.gather(1, cells)
            taken, step_rows = take_rows(slots, cells), some_slots(rows, cells, gate_open)
        is_taken, depth = gate_open, torch.zeros_like(gate_open, dtype=torch.long)
        reapply = self._slot_pass(hidden_states, rows, refinement, kwargs, step_rows)
        for step in range(refinement.max_refinement_steps):
            if step > 0 and (gate_open := self._still_open(taken, is_taken, gate_open, rows, refinement)) is None:
                break
            taken = torch.where(gate_open[:, :, None], reapply(taken), taken)  # Eq. 6, and Eq. 8 with the hard gate
            depth = depth + gate_open
        if cells is None:
            return taken, depth
        slots = slots.scatter(1, cells[:, :, None].expand_as(taken), taken)
        return slots, torch.zeros_like(rows.slot_positions).scatter(1, cells, depth)

    def _width(self, gate_open: torch.Tensor, refinement: RefinementSettings) -> int:
        """Slots of a row that a step computes: the open ones (batch, max_slots) of the fullest row, or all."""
        max_slots, budget = gate_open.shape[1], refinement.budget
        has_choice = self.arcaligner_config.text_config._attn_implementation in ROW_KERNELS
        if not has_choice or (budget is None and refinement.gate_mode == "always"):
            return max_slots
        width = int(gate_open.sum(dim=1).max())
        # Without a budget, a few closed slots are computed too: cheaper than to read each of them like text.
        return max_slots if budget is None and width >= ALMOST_ALL * max_slots else width

    def _first_open(self, hidden_states, rows, refinement) -> torch.Tensor | None:
        """Open slots (batch, max_slots) after the mandatory pass, as far as the budget goes; `None` for none."""
        budget = refinement.budget
        if rows.slot_rows.shape[0] == 0:
            return None
        if budget is None and refinement.gate_mode == "always":
            return rows.slot_positions >= 0
        if budget is not None and not budget.pay_gates(self._cost(refinement), (rows.slot_positions >= 0).sum(dim=1)):
            return None
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])  # (batch * seq_len, hidden)
        prob = self._gate_prob(flat.index_select(0, rows.slot_rows), refinement)  # (num_slots, 1)
        if not bool((prob >= refinement.gate_threshold).any()):
            return None  # the usual case, found without laying out a step
        cells = prob.new_zeros(rows.slot_positions.numel()).index_copy(0, rows.slot_cells, prob[:, 0])
        gate_prob = cells.view_as(rows.slot_positions)
        gate_open = gate_prob >= refinement.gate_threshold
        if budget is None:
            return gate_open
        gate_open = budget.take_slots(gate_prob, gate_open, self._cost(refinement), rows)
        return gate_open if bool(gate_open.any()) else None

    def _still_open(self, taken, is_taken, was_open, rows, refinement) -> torch.Tensor | None:
        """Open slots (batch, width) of those that took the steps before; `None` for none."""
        budget = refinement.budget
        if budget is None and refinement.gate_mode == "always":
            return is_taken
        asked = is_taken & was_open.any(dim=1, keepdim=True)  # a row that has closed is done
        if budget is not None and not budget.pay_gates(self._cost(refinement), asked.sum(dim=1)):
            return None
        gate_open = (self._gate_prob(taken, refinement)[:, :, 0] >= refinement.gate_threshold) & asked
        if budget is not None:
            gate_open = budget.take_step(gate_open, is_taken, self._cost(refinement), rows)
        return gate_open if bool(gate_open.any()) else None

    def _gate_prob(self, slots: torch.Tensor, refinement: RefinementSettings) -> torch.Tensor:
        """Eq. 5, slot states (..., hidden) to (..., 1); 1 where no gate is asked."""
        if refinement.gate_mode == "always":
            return slots.new_ones(*slots.shape[:-1], 1)
        return self.slot_gate(slots)

    def _cost(self, refinement: RefinementSettings) -> LayerCost:
        return self.slot_cost._replace(gate=0) if refinement.gate_mode == "always" else self.slot_cost

    def _slot_pass(self, hidden_states, rows, refinement, kwargs, step_rows: StepRows | None = None):
        """The layer as a function of slot rows (batch, width, hidden), all slots or some, other rows held fixed."""
        if self.arcaligner_config.text_config._attn_implementation not in ROW_KERNELS:
            return self._prefix_pass(hidden_states, rows, kwargs)
        if step_rows is None:
            inputs = refinement.shared_inputs.get(rows, kwargs, hidden_states.dtype)
        else:
            inputs = step_inputs(step_rows, kwargs, hidden_states.dtype)
        cache = RefinementKeysValues(*self._fixed_keys_values(hidden_states, inputs, kwargs))
        step_kwargs = {**kwargs, **inputs.for_slots, "past_key_values": cache}

        def reapply(slots: torch.Tensor) -> torch.Tensor:
            with slot_scope(ALL_ROWS), _not_recording_outputs():
                return super(SlotDecoderLayer, self).forward(slots, **step_kwargs)

        return reapply

    def _fixed_keys_values(
        self, hidden_states: torch.Tensor, inputs: StepInputs, kwargs: dict
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keys and values of the rows that stay in a step, each (batch, heads, max_fixed, head_dim)."""
        if inputs.rows.fixed_positions.shape[1] == 0:
            return None, None
        recorder = KeysValuesRecorder()
        fixed = take_rows(hidden_states, inputs.rows.fixed_positions)  # (batch, max_fixed, hidden)
        fixed_kwargs = {**kwargs, **inputs.for_fixed, "past_key_values": recorder}
        try:
            with slot_scope(inputs.rows.fixed_slots), _not_recording_outputs():
                super().forward(fixed, **fixed_kwargs)
        except KeysValuesComplete:
            pass
        if recorder.keys is None:
            raise AssertionError("the layer's attention did not write its keys and values to the cache it was given")
        return recorder.keys, recorder.values

    def _prefix_pass(self, hidden_states: torch.Tensor, rows: SlotRows, kwargs: dict):
        """As `_slot_pass` for attention kernels without a mask of rows by columns: the whole prefix is re-applied."""
        compiling = torch.compiler.is_compiling()
        length = hidden_states.shape[1] if compiling else int(rows.slot_positions.max()) + 1
        prefix = hidden_states[:, :length]
        batch, _, hidden = prefix.shape
        prefix_rows = rows.slot_rows // hidden_states.shape[1] * length + rows.slot_rows % hidden_states.shape[1]
        step_kwargs = {**kwargs, "use_cache": False, "past_key_values": None}
        step_kwargs |= at_positions(kwargs, torch.arange(length, device=prefix.device).expand(batch, -1))
        if (mask := kwargs["attention_mask"]) is not None:
            step_kwargs["attention_mask"] = mask[:, :length] if mask.dim() == 2 else mask[..., :length, :length]

        def reapply(slots: torch.Tensor) -> torch.Tensor:
            current = slots.reshape(-1, hidden).index_select(0, rows.slot_cells)
            states = prefix.reshape(-1, hidden).index_copy(0, prefix_rows, current).view(batch, length, hidden)
            with slot_scope(prefix_rows), _not_recording_outputs():
                states = super(SlotDecoderLayer, self).forward(states, **step_kwargs)
            return take_rows(states, rows.slot_positions)

        return reapply


class _not_recording_outputs:  # noqa: N801 - a context manager, used like a function
    """Keeps transformers' recording of attentions and router logits to the mandatory pass."""

    def __enter__(self):
        self.token = _active_collector.set(None)

    def __exit__(self, *exception):
        _active_collector.reset(self.token)


def add_slots_to_layer(layer: nn.Module, layer_idx: int, config: ArcAlignerConfig) -> None:
    """Turns a decoder layer into one that knows slots, in place; gives it a gate where the configuration wants one."""
    mix_in(SlotDecoderLayer, layer)
    layer.arcaligner_config = config
    layer.layer_idx = layer_idx
    layer.is_last = layer_idx == config.text_config.num_hidden_layers - 1
    is_gated = layer_idx in config.gated_layers
    layer.slot_gate = SlotGate(config.text_config.hidden_size, config.gate_hidden_size) if is_gated else None
    layer.slot_cost = count_layer_cost(layer, config.text_config)


def slot_decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model that know slots, in order."""
    return [module for module in model.modules() if isinstance(module, SlotDecoderLayer)]
