"""Algorithm 1 as it is written, on the model's own weights: what its fast path is measured against.

In each gated layer every step runs the whole layer over all rows and keeps the slots whose gate is open; there is no
early stop, no cached key of the text, and the last layer refines like any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..modeling_arcaligner import ArcAlignerForCausalLM, SlotDecoderLayer


@contextmanager
def plain_algorithm(model: ArcAlignerForCausalLM) -> Iterator[None]:
    """Inside, `model` refines in the plain way; its gates decide as they do without."""
    config = model.config
    gate_mode, config.gate_mode = config.gate_mode, "off"  # a layer is its mandatory pass alone
    gated = [layer for layer in model.modules() if isinstance(layer, SlotDecoderLayer) and layer.slot_gate is not None]
    hooks = [layer.register_forward_hook(_refine_all_rows, with_kwargs=True) for layer in gated]
    try:
        yield
    finally:
        config.gate_mode = gate_mode
        for hook in hooks:
            hook.remove()


def _refine_all_rows(layer: SlotDecoderLayer, args: tuple, kwargs: dict, hidden: torch.Tensor) -> torch.Tensor:
    """`H^(l+1,0)` (batch, seq_len, hidden) to `H^(l+1,T)`: lines 3 to 15."""
    rows = kwargs.get("slot_rows")  # (num_slots,)
    if rows is None:
        return hidden
    config = layer.arcaligner_config
    is_slot = torch.zeros(hidden.shape[0] * hidden.shape[1], dtype=torch.bool, device=hidden.device)
    is_slot = is_slot.index_fill(0, rows, True).view(*hidden.shape[:2], 1)  # (batch, seq_len, 1)
    without_cache = {**kwargs, "past_key_values": None, "use_cache": False}
    for _step in range(config.max_refinement_steps):
        gate_open = (layer.slot_gate(hidden) >= config.gate_threshold) & is_slot  # Eq. 5, 7
        candidate = layer.forward(hidden, *args[1:], **without_cache)  # Eq. 6
        hidden = torch.where(gate_open, candidate, hidden)  # Eq. 8, 9
    return hidden
