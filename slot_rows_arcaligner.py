"""Rows of slots: where they are in a batch, what they may read, and what it costs to compute them again.

A refinement step (Eq. 6) applies layer `l` to its own output. Only slots with an open gate change, so a step needs

    queries           of these slots (of all slots in training, and where nearly all gates are open)
    keys and values   of the text before the last slot and of the other slots, once from the layer's output, and of the
                      slots that change, afresh

The layer gets a stand-in for the cache: it writes the slots' keys and values to it and gets all of them back. The real
cache holds the mandatory pass only and is never touched. With `refinement_budget=0.1` all of it takes at most 10 % of
the operations of the slot prefix's prefill, spent layer by layer.

Beyond the paper, passages may be read apart: a slot reads the text before the slots and the slots of its own passage.
What is computed for a passage then depends on nothing else of the prompt, so it can be kept and joined with any other:

    head          passage 0      passage 1          question
    0 1 2 3 4     5 6 7 8        5 6 7 8 9 10       11 12 13 ...      positions

The slots of all passages count from the same position, and the text after them goes on behind the longest passage, so
no key has to be rotated when passages are joined. With one passage, the paper's case, all is as without.

Shapes: batch, seq_len, max_slots (slots of the fullest row), max_text (text rows before the last slot), hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .base_model_arcaligner import CACHE
from .configuration_arcaligner import ArcAlignerConfig, normalize_budget

# Attention kernels that take a mask of rows by columns, so that some slots can be computed without the others.
ROW_KERNELS = ("eager", "sdpa")
# Text before the slots, as a share of the slots, that a step of all slots computes once more.
MOST_TEXT_PER_SLOT = 0.5


class SlotRows(NamedTuple):
    """Where the slots of a batch are; computed once per forward."""

    slot_positions: torch.Tensor  # (batch, max_slots), position in the row, -1 where there is no slot
    text_positions: torch.Tensor  # (batch, max_text), text before the row's last slot, -1 padding
    slot_rows: torch.Tensor  # (num_slots,), flat indices into (batch * seq_len)
    slot_cells: torch.Tensor  # (num_slots,), flat indices into (batch * max_slots)
    is_slot: torch.Tensor  # (batch, max_slots), False where a row has fewer slots
    slot_span: tuple[int, int] | None  # first and end of `slot_rows` where all stand together, as in one prompt
    ends_in_slot: torch.Tensor | None  # (batch,), rows whose last slot decides a token; None where there is none
    prefix_length: int | None  # positions up to the last slot of all rows; None where code is compiled for any

    def refinable(self, is_last_layer: bool) -> torch.Tensor:
        """Slots (batch, max_slots) that may be refined: nothing reads the last layer's, except at the end of a row."""
        if is_last_layer and self.ends_in_slot is not None:
            return self.is_slot & self.ends_in_slot[:, None]
        return self.is_slot

    @property
    def has_little_text(self) -> bool:
        """Whether the text before the slots is so short that it is cheaper to compute it again in each step than to
        keep its keys and values apart."""
        return MOST_TEXT_PER_SLOT * self.slot_positions.shape[1] >= self.text_positions.shape[1]

    def for_any_length(self) -> "SlotRows":
        """Without numbers of the host: code would be compiled again for each place of the slots."""
        return self._replace(slot_span=None, prefix_length=None)

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
    # A cell that only fills its row up keeps its place among the others: it is read there and not computed.
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
    values = torch.cat([flag.flatten() for flag in flags]).numpy(force=True)
    parts = np.split(values, np.cumsum([flag.numel() for flag in flags])[:-1])
    return [part.reshape(flag.shape) for part, flag in zip(parts, flags, strict=True)]


def _packed_positions(mask: np.ndarray) -> np.ndarray:
    """Positions of the true entries of `mask` (batch, seq_len), in order, packed to the left and padded with -1.

    >>> _packed_positions(np.array([[False, True, True], [True, False, False]]))
    array([[ 1,  2],
           [ 0, -1]])
    """
    counts = mask.sum(axis=1, keepdims=True)  # (batch, 1)
    width = counts.max(initial=0)
    order = np.argsort(~mask, axis=1, kind="stable")[:, :width]  # true ones first, in their order
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
    texts = _packed_positions(is_text & (np.arange(is_slot.shape[1]) < last_slot))  # no slot reads what comes later
    rows = is_slot.ravel().nonzero()[0]
    last_real = np.where(is_slot | is_text, np.arange(is_slot.shape[1]), -1).max(axis=1, initial=-1)  # (batch,)
    stand_together = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows)
    indices = (slots, texts, rows, (slots >= 0).ravel().nonzero()[0])  # in the order of the fields of `SlotRows`
    ends_in_slot = (last_slot[:, 0] >= 0) & (last_slot[:, 0] == last_real)  # (batch,)
    at_once = device.type == "cuda"  # copies before it returns; other devices might read memory that is freed
    return SlotRows(
        *(torch.from_numpy(each).to(device, non_blocking=at_once) for each in indices),
        is_slot=torch.from_numpy(slots >= 0).to(device, non_blocking=at_once),
        slot_span=(int(rows[0]), int(rows[-1]) + 1) if stand_together else None,
        ends_in_slot=torch.from_numpy(ends_in_slot).to(device) if ends_in_slot.any() else None,
        prefix_length=int(last_slot.max(initial=-1)) + 1,
    )


def take_rows(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of `tensor` (batch or 1, seq_len, dim) at `positions` (batch, rows) -> (batch, rows, dim); row 0 for -1."""
    tensor = tensor.expand(positions.shape[0], -1, -1)
    index = positions.clamp(min=0)[:, :, None].expand(-1, -1, tensor.shape[-1])
    return tensor.gather(1, index)


class SlotStates:
    """The slots among the hidden states (batch, seq_len, hidden) of a layer.

    Where all stand together in one prompt they are parted from the text before and after them, without an index.
    """

    def __init__(self, hidden_states: torch.Tensor, rows: SlotRows):
        self.hidden_states, self.rows = hidden_states, rows
        self._parts = None
        if rows.slot_span is not None and hidden_states.shape[0] == 1:
            start, end = rows.slot_span
            self._parts = hidden_states.split([start, end - start, hidden_states.shape[1] - end], dim=1)

    def slots(self) -> torch.Tensor:
        """The states of the slots (batch, max_slots, hidden)."""
        if self._parts is not None:
            return self._parts[1]
        return take_rows(self.hidden_states, self.rows.slot_positions)

    def prefix_with(self, states: torch.Tensor, length: int) -> torch.Tensor:
        """The first `length` positions, those up to the last slot, with `states` (batch, max_slots, hidden) on the
        slots."""
        if self._parts is not None:
            return torch.cat([self._parts[0], states], dim=1)
        return self._written(states)[:, :length]

    def slots_of_prefix(self, prefix: torch.Tensor) -> torch.Tensor:
        """The slots (batch, max_slots, hidden) of another `prefix` (batch, length, hidden)."""
        if self._parts is not None:
            return prefix[:, self.rows.slot_span[0] :]
        return take_rows(prefix, self.rows.slot_positions)

    def with_slots(self, states: torch.Tensor) -> torch.Tensor:
        """Eq. 9: all hidden states, with `states` (batch, max_slots, hidden) on the slots."""
        if self._parts is not None:
            return torch.cat([self._parts[0], states, self._parts[2]], dim=1)
        return self._written(states)

    def _written(self, states: torch.Tensor) -> torch.Tensor:
        flat = self.hidden_states.reshape(-1, states.shape[-1])  # (batch * seq_len, hidden)
        slots = states.reshape(-1, states.shape[-1]).index_select(0, self.rows.slot_cells)  # (num_slots, hidden)
        return flat.index_copy(0, self.rows.slot_rows, slots).view_as(self.hidden_states)


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


def prefix_inputs(length: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that replace those of a layer, called with `kwargs`, for its first `length` positions."""
    cos, sin = kwargs["position_embeddings"]
    taken = {"position_embeddings": (cos[:, :length], sin[:, :length]), "use_cache": False, CACHE: None}
    if kwargs.get("position_ids") is not None:
        taken["position_ids"] = kwargs["position_ids"][:, :length]
    if (mask := kwargs["attention_mask"]) is not None:
        taken["attention_mask"] = mask[:, :length] if mask.dim() == 2 else mask[..., :length, :length]
    return taken


class SharedStepInputs:
    """Inputs of a step of all slots, made once per forward for all layers with the same mask and rotary angles.

    Backbones have layers of one or two kinds, so the last two are kept: where each layer gets copies of its own, as
    with weights on several devices, nothing is shared and no more is held.
    """

    def __init__(self):
        # With what they were made of: a tensor that is gone could give its identity to another.
        self._made: list[tuple[torch.Tensor | None, torch.Tensor, Any]] = []

    def get(self, kwargs: dict[str, Any], make: Callable[[], Any]) -> Any:
        """What `make` gives for a layer that was called with `kwargs`."""
        if torch.compiler.is_compiling():
            return make()
        mask, cosines = kwargs["attention_mask"], kwargs["position_embeddings"][0]
        for made_mask, made_cosines, inputs in self._made:
            if made_mask is mask and made_cosines is cosines:
                return inputs
        inputs = make()
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


def check_can_separate(config: PreTrainedConfig, in_one_row: bool = True) -> None:
    """Raises `ValueError` for a backbone with which passages cannot be read apart, or an attention kernel with which
    they cannot be `in_one_row`; kept passages are joined without a mask."""
    if in_one_row and (kernel := config._attn_implementation) not in ROW_KERNELS:
        raise ValueError(
            f"`passage_attention` is 'separate', but attention `{kernel}` takes no mask that keeps passages apart. "
            f"Load the model with `attn_implementation` {' or '.join(ROW_KERNELS)}, or pass one passage."
        )
    if any(DynamicCache(config=config).is_sliding):
        raise ValueError(
            f"`passage_attention` is 'separate', but layers of the backbone {config.model_type} have a sliding window, "
            "which counts the slots of all passages. Use 'joint', or pass one passage."
        )


def can_separate(config: PreTrainedConfig) -> bool:
    """Whether passages can be read apart in one row."""
    return config._attn_implementation in ROW_KERNELS and not any(DynamicCache(config=config).is_sliding)


def check_passage_ids(passage_ids, context_embeds: torch.Tensor, slot_mask: torch.Tensor) -> None:
    """Raises `ValueError` unless `passage_ids` number the passages of a row's slots in order, and these stand together.

    Args:
        passage_ids: What was given, to be (batch, max_slots).
        context_embeds (`torch.Tensor` of shape `(batch, max_slots, encoder_hidden_size)`): What it has to fit.
        slot_mask (`torch.Tensor` of shape `(batch, seq_len)`): Where the slots are.
    """
    expected = tuple(context_embeds.shape[:2])
    is_ids = isinstance(passage_ids, torch.Tensor) and passage_ids.dtype in (torch.int64, torch.int32)
    if not is_ids or tuple(passage_ids.shape) != expected:
        kind = f"{passage_ids.dtype} of shape {tuple(passage_ids.shape)}" if is_ids else type(passage_ids).__name__
        raise ValueError(f"`context_passage_ids` is {kind}; expected whole numbers of shape {expected}.")
    if torch.compiler.is_compiling() or passage_ids.device.type != "cpu":
        return  # reading them would make the host wait for the device
    if bool(((slot_mask[:, 1:] & ~slot_mask[:, :-1]).sum(dim=1) + slot_mask[:, 0] > 1).any()):
        raise ValueError(
            "There is text between the slots of a row, but passages that are read apart count their positions from one "
            "place. Put all passages before the question, or load the model with `passage_attention='joint'`."
        )
    is_real = torch.arange(expected[1]) < slot_mask.sum(dim=1)[:, None]  # padding stands behind the slots
    falls = (passage_ids[:, 1:] < passage_ids[:, :-1]) & is_real[:, 1:]
    if bool(falls.any()) or bool(((passage_ids < 0) & is_real).any()):
        raise ValueError(
            f"`context_passage_ids` is {passage_ids.tolist()}; expected numbers of at least 0 that never fall along "
            "the slots of a row, since the slots of a passage stand together."
        )


def place_passage_ids(slot_mask: torch.Tensor, passage_ids: torch.Tensor | None) -> torch.Tensor:
    """The passage of each position (batch, seq_len), -1 on text; without `passage_ids` (batch, max_slots) all slots of
    a row are of one passage. `slot_mask` is (batch, seq_len)."""
    if passage_ids is None or passage_ids.shape[1] == 0:
        return torch.where(slot_mask, 0, -1)
    which_slot = (slot_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    placed = passage_ids.to(slot_mask.device).long().gather(1, which_slot.clamp(max=passage_ids.shape[1] - 1))
    return torch.where(slot_mask, placed, -1)


def passage_positions(passage_ids: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Positions of a prompt whose passages count from the same place.

    Args:
        passage_ids (`torch.Tensor` of shape `(batch, seq_len)`): From [`place_passage_ids`].
        is_real (`torch.Tensor` of shape `(batch, seq_len)`): `False` on padding, on either side.

    Returns:
        `torch.LongTensor` of shape `(batch, seq_len)`; 0 on padding before the text.

    >>> passage_positions(torch.tensor([[-1, -1, 0, 0, 1, 1, 1, -1]]), torch.ones(1, 8, dtype=torch.bool))
    tensor([[0, 1, 2, 3, 2, 3, 4, 5]])
    """
    index = torch.arange(passage_ids.shape[1], device=passage_ids.device)
    # The last begin up to a position is that of its own passage, so a running maximum finds it without a loop.
    begins = pad(passage_ids[:, 1:] != passage_ids[:, :-1], (1, 0), value=True)
    in_passage = index - torch.where(begins, index, 0).cummax(dim=1).values  # of a slot: its place in its passage
    is_slot = passage_ids >= 0
    is_text = is_real.bool() & ~is_slot
    longest = torch.where(is_slot, in_passage + 1, 0).amax(dim=1, keepdim=True)  # (batch, 1); text goes on behind it
    text_before = is_text.long().cumsum(dim=1)  # text up to a position, itself included
    follows = is_slot.long().cumsum(dim=1) > 0
    return torch.where(is_slot, text_before + in_passage, (text_before - 1).clamp(min=0) + longest * follows)


def separate_passages(
    attention_mask: torch.Tensor | None, passage_ids: torch.Tensor, dtype: torch.dtype, num_keys: int | None = None
) -> torch.Tensor:
    """The mask of a prompt in which no slot reads a slot of another passage.

    Args:
        attention_mask: (batch, seq_len), 0 on padding; or (batch, 1, seq_len, num_keys), boolean or additive, for a
            prompt of which more is hidden; `None` hides nothing.
        passage_ids (`torch.Tensor` of shape `(batch, seq_len)`): From [`place_passage_ids`].
        dtype (`torch.dtype`): Of the hidden states.
        num_keys (`int`, *optional*): Columns, more than `seq_len` where a static cache has room left.

    Returns:
        `torch.Tensor` of shape `(batch, 1, seq_len, num_keys)`, of the kind that was given; additive for a 2-D mask.
    """
    seq_len = passage_ids.shape[1]
    query, key = passage_ids[:, :, None], passage_ids[:, None, :]
    is_other = (query >= 0) & (key >= 0) & (query != key)  # (batch, seq_len, seq_len)
    if attention_mask is None or attention_mask.dim() == 2:
        is_hidden = is_other | torch.ones_like(is_other[0]).triu(1)
        if attention_mask is not None:
            is_hidden = is_hidden | ~attention_mask[:, None, :seq_len].bool()
        is_hidden = pad(is_hidden, (0, (num_keys or seq_len) - seq_len), value=True)
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=passage_ids.device)
        return mask.masked_fill(is_hidden, torch.finfo(dtype).min)[:, None]
    is_other = pad(is_other, (0, attention_mask.shape[-1] - seq_len))[:, None]
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~is_other
    return attention_mask.masked_fill(is_other, torch.finfo(attention_mask.dtype).min)


def pad_passage_ids(rows: Sequence[torch.LongTensor]) -> torch.LongTensor:
    """Stacks passage numbers of rows, each (num_slots,), to (batch, max_slots), padded with -1."""
    return pad_sequence(rows, batch_first=True, padding_value=-1)


def pad_words(rows: Sequence[torch.LongTensor]) -> torch.LongTensor:
    """Stacks word ids of rows, each (num_slots, max_words), to (batch, max_slots, max_words), padded with -1."""
    sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
    padded = torch.full((len(rows), *sizes), -1, device=rows[0].device)
    for number, row in enumerate(rows):
        padded[number, : row.shape[0], : row.shape[1]] = row
    return padded


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
        # Whole numbers on the host: float32 on the device would round the operations of a large model.
        sizes = zip(*(size.tolist() for size in rows.sizes()), strict=True)
        prefills = [sum(cost.of_prefill(*size) for cost in costs) for size in sizes]
        shares = [int(min(share * prefill, _MOST_FLOPS)) for prefill in prefills]
        self.remaining = torch.tensor(shares, device=rows.slot_positions.device)  # (batch,)
        self.asks_gates = asks_gates
        self._is_spent = False  # kept here, so that the device is not asked again

    def pay_gates(self, cost: LayerCost, num_asked: torch.Tensor) -> bool:
        """Pays for the gates of `num_asked` slots (batch,). Returns whether a row has anything left."""
        if self._is_spent:
            return False
        remaining = self.remaining.to(num_asked.device)
        price = num_asked * (cost.gate if self.asks_gates else 0)
        self.remaining = torch.where(remaining >= price, remaining - price, 0)
        self._is_spent = not bool(self.remaining.any())
        return not self._is_spent

    def take_slots(
        self, gate_prob: torch.Tensor, gate_open: torch.Tensor, cost: LayerCost, rows: SlotRows
    ) -> torch.Tensor:
        """The open slots (batch, max_slots) that a row can pay a first step for: by probability, then by position."""
        once, per_slot = cost.of_keys_values(*rows.sizes()), cost.of_slot_pass(*rows.sizes())
        wanted = gate_open.sum(dim=1)
        affordable = torch.div(self.remaining - once, per_slot, rounding_mode="floor").clamp(min=0)
        taken = torch.minimum(wanted, affordable)
        paid = torch.where(taken > 0, once + taken * per_slot, 0)
        # What cannot be paid in full ends the row's refinement: so a larger budget does all that a smaller one does.
        self.remaining = torch.where(taken < wanted, 0, self.remaining - paid)
        order = gate_prob.masked_fill(~gate_open, -1.0).argsort(dim=1, descending=True, stable=True)
        return gate_open & (order.argsort(dim=1) < taken[:, None])  # the order of an order is each slot's rank

    def take_step(
        self, gate_open: torch.Tensor, is_taken: torch.Tensor, cost: LayerCost, rows: SlotRows
    ) -> torch.Tensor:
        """The slots (batch, width) that are still open, where a row can pay another step of all that are taken."""
        price = torch.where(gate_open.any(dim=1), is_taken.sum(dim=1) * cost.of_slot_pass(*rows.sizes()), 0)
        affords = self.remaining >= price
        self.remaining = torch.where(affords, self.remaining - price, 0)
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
