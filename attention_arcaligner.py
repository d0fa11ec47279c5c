"""Positions and attention masks of slots, for joint and independent passages.

Beyond the paper, passages may be independent: a slot attends to the text before the slots and to the slots of its own
passage. The keys and values of a passage then depend on no other passage and not on the question, so they can be cached
and joined with those of any other passages:

    prefix        passage 0      passage 1          question
    0 1 2 3 4     5 6 7 8        5 6 7 8 9 10       11 12 13 ...      positions

The slots of all passages are computed from the same position on, and the text after them continues after the longest
passage. With `passage_alignment="start"` it attends to all slots at these positions. With `"end"` each passage directly
precedes the text: for this text, the keys of a shorter passage are rotated to positions that are as much later as the
passage is shorter than the longest one:

    prefix             passage 0      passage 1          question
    0 1 2 3 4          7 8 9 10       5 6 7 8 9 10       11 12 13 ...      positions, seen from the question

With one passage, the paper's case, nothing changes.

Shapes: batch, seq_len, max_slots (slots of the fullest row), max_text (text before the last slot), hidden.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# The name of the argument for the cache in models and layers of the installed transformers: `cache` since 5.24. Users
# may pass either name.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


# Attention kernels that take a mask of queries by keys, so that some slots can be computed without the others.
MASK_KERNELS = ("eager", "sdpa")


class SlotLayout(NamedTuple):
    """Where the slots of a batch are; computed once per forward."""

    slot_positions: torch.Tensor  # (batch, max_slots), position in the row, -1 where there is no slot
    text_positions: torch.Tensor  # (batch, max_text), text before the row's last slot, -1 padding
    slot_indices: torch.Tensor  # (num_slots,), flat indices into (batch * seq_len)
    slot_cells: torch.Tensor  # (num_slots,), flat indices into (batch * max_slots)
    is_slot: torch.Tensor  # (batch, max_slots), False where a row has fewer slots
    slot_span: tuple[int, int] | None  # first and end of `slot_indices` if all are adjacent, as in one prompt
    ends_in_slot: torch.Tensor | None  # (batch,), rows whose last position is a slot; None if there are none
    prefix_length: int | None  # positions up to the last slot of all rows; None in code that is compiled for any length
    # If the text after the slots attends to slots at later positions than those where they were computed:
    moves: torch.Tensor | None = None  # (batch, seq_len), by how many positions, 0 on text
    later_text: torch.Tensor | None = None  # (batch, max_later), positions of the text after the slots, -1 padding
    later_cells: torch.Tensor | None = None  # (batch, seq_len), the index in `later_text`, -1 on other positions

    def for_any_length(self) -> "SlotLayout":
        """The same layout without its Python numbers, so that compiled code works wherever the slots are."""
        return self._replace(slot_span=None, prefix_length=None)


@torch.compiler.disable  # runs on the CPU
def find_slots(
    slot_mask: torch.Tensor,
    attention_mask: torch.Tensor | None,
    context_embeds: torch.FloatTensor,
    moved_passage_ids: torch.LongTensor | None = None,
) -> SlotLayout:
    """Find the slots of a batch.

    Args:
        slot_mask (`torch.BoolTensor` of shape `(batch, seq_len)`): The paper's `M_r`.
        attention_mask (`torch.Tensor`, *optional*): The mask of a layer; if it is (batch, kv_len), 0 is padding.
        context_embeds (`torch.FloatTensor` of shape `(batch, max_slots, encoder_hidden_size)`): The slots' embeddings.
        moved_passage_ids (`torch.LongTensor` of shape `(batch, max_slots)`, *optional*): The passages of the slots, if
            each passage directly precedes the text after the slots (`passage_alignment="end"`).

    Raises:
        `ValueError`: a slot without an embedding, or with one that is not finite.
    """
    passage_ids = torch.zeros_like(slot_mask[:, :0]) if moved_passage_ids is None else moved_passage_ids
    is_text = ~slot_mask  # without a 2-D mask padding counts as text; then the masks of the layers hide it
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        is_text = is_text & attention_mask[:, -slot_mask.shape[1] :].bool()  # columns of a cache come before
    is_slot, is_text, changes, is_finite, is_nonzero = _to_numpy_in_one_sync(
        slot_mask,
        is_text,
        passage_ids[:, 1:] != passage_ids[:, :-1],  # (batch, max_slots - 1), where a passage begins
        (context_embeds.abs() < LARGEST_VALUE).all(dim=2),  # (batch, max_slots), False for NaN
        context_embeds.ne(0).any(dim=2),  # (batch, max_slots)
    )
    _check_slots(is_slot, is_finite, is_nonzero)
    layout = _slot_layout(is_slot, is_text, context_embeds.shape[1], slot_mask.device)
    if moved_passage_ids is None or not (moves := _moves_of_slots(is_slot, changes)).any():
        return layout
    later_text = is_text & (is_slot.cumsum(axis=1) > 0)  # (batch, seq_len)
    cells = np.where(later_text, later_text.cumsum(axis=1) - 1, -1)
    indices = (moves, _packed_positions(later_text), cells)
    moves, later_text, cells = (torch.from_numpy(index).to(slot_mask.device) for index in indices)
    return layout._replace(moves=moves, later_text=later_text, later_cells=cells)


def _to_numpy_in_one_sync(*flags: torch.Tensor) -> list[np.ndarray]:
    """Boolean tensors of any shapes as arrays; the CPU waits for the device once."""
    values = torch.cat([flag.flatten() for flag in flags]).numpy(force=True)  # all entries, one array after another
    parts = np.split(values, np.cumsum([flag.numel() for flag in flags])[:-1])
    return [part.reshape(flag.shape) for part, flag in zip(parts, flags, strict=True)]


# The largest value in a context embedding. Its norm is 1; a much larger value would give logits that are not finite.
LARGEST_VALUE = 1e6


def _check_slots(is_slot: np.ndarray, is_finite: np.ndarray, is_nonzero: np.ndarray) -> None:
    """Raise `ValueError` unless each slot of `is_slot` (batch, seq_len) has a finite embedding. `is_finite` and
    `is_nonzero` (batch, max_slots) are those of the embeddings, of which padding is zero."""
    counts, num_embeds = is_slot.sum(axis=1), is_nonzero.shape[1]  # (batch,)
    max_count = counts.max(initial=0)
    if max_count > num_embeds or is_nonzero[:, max_count:].any():
        raise ValueError(
            f"The rows of `input_ids` have {counts.tolist()} slots (context tokens), but `context_embeds` has "
            f"{num_embeds} embeddings per row; expected one for each slot. Pad the rows of `context_embeds` that have "
            "fewer slots with zeros at their end."
        )
    is_broken = ~is_finite & (np.arange(num_embeds) < counts[:, None])  # (batch, max_slots)
    if is_broken.any():
        row, slot = np.argwhere(is_broken)[0]
        raise ValueError(
            f"`context_embeds` has NaN or absolute values above {LARGEST_VALUE:,.0f} in {is_broken.sum()} of "
            f"{counts.sum()} slots, first in slot {slot} of row {row}; expected the embeddings of a sentence encoder. "
            "Check the encoder's output."
        )


def _moves_of_slots(is_slot: np.ndarray, changes: np.ndarray) -> np.ndarray:
    """By how many positions each slot of `is_slot` (batch, seq_len) is moved, so that its passage directly precedes the
    text after the slots; 0 on text. `changes` (batch, max_slots - 1) is true where the next slot is of another passage.

    >>> _moves_of_slots(np.array([[False, True, True, True, False]]), np.array([[True, False]]))
    array([[0, 1, 0, 0, 0]])
    """
    is_real = np.arange(changes.shape[1] + 1) < is_slot.sum(axis=1, keepdims=True)  # (batch, max_slots)
    numbers = np.pad(changes.cumsum(axis=1), ((0, 0), (1, 0)))  # of the passage of each slot
    lengths = np.zeros((len(is_slot), numbers.max(initial=0) + 1), dtype=np.int64)  # (batch, num_passages)
    batch, slots = is_real.nonzero()
    np.add.at(lengths, (batch, numbers[batch, slots]), 1)
    moves = np.zeros(is_slot.shape, dtype=np.int64)
    moves[is_slot] = lengths.max(axis=1)[batch] - lengths[batch, numbers[batch, slots]]  # slots in the same order
    return moves


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


def _slot_layout(is_slot: np.ndarray, is_text: np.ndarray, max_slots: int, device: torch.device) -> SlotLayout:
    """Compute the indices of a batch on the CPU, and copy them to `device`.

    Args:
        is_slot (`np.ndarray` of shape `(batch, seq_len)`): The paper's `M_r`.
        is_text (`np.ndarray` of shape `(batch, seq_len)`): Real text, neither slot nor padding.
        max_slots (`int`): Width of `context_embeds`; rows of positions are padded to it.
        device (`torch.device`): The device of the model's inputs.
    """
    slots = _packed_positions(is_slot)  # (batch, slots of the fullest row)
    slots = np.pad(slots, ((0, 0), (0, max_slots - slots.shape[1])), constant_values=-1)  # (batch, max_slots)
    last_slot = slots.max(axis=1, keepdims=True, initial=-1)  # (batch, 1)
    texts = _packed_positions(is_text & (np.arange(is_slot.shape[1]) < last_slot))  # no slot attends to later text
    slot_indices = is_slot.ravel().nonzero()[0]  # (num_slots,)
    last_real = np.where(is_slot | is_text, np.arange(is_slot.shape[1]), -1).max(axis=1, initial=-1)  # (batch,)
    are_adjacent = len(slot_indices) > 0 and slot_indices[-1] - slot_indices[0] + 1 == len(slot_indices)
    # In the order of the fields of `SlotLayout`.
    indices = (slots, texts, slot_indices, (slots >= 0).ravel().nonzero()[0])
    ends_in_slot = (last_slot[:, 0] >= 0) & (last_slot[:, 0] == last_real)  # (batch,)
    # CUDA copies before the call returns; other devices might read memory that is freed.
    non_blocking = device.type == "cuda"
    return SlotLayout(
        *(torch.from_numpy(index).to(device, non_blocking=non_blocking) for index in indices),
        is_slot=torch.from_numpy(slots >= 0).to(device, non_blocking=non_blocking),
        slot_span=(int(slot_indices[0]), int(slot_indices[-1]) + 1) if are_adjacent else None,
        ends_in_slot=torch.from_numpy(ends_in_slot).to(device) if ends_in_slot.any() else None,
        prefix_length=int(last_slot.max(initial=-1)) + 1,
    )


def check_can_separate(config: PreTrainedConfig, in_one_row: bool = True) -> None:
    """Raise `ValueError` for a backbone that cannot have independent passages, or for an attention kernel that cannot
    have them `in_one_row`. Cached passages are joined without a mask, so they work with any kernel."""
    if in_one_row and (kernel := config._attn_implementation) not in MASK_KERNELS:
        raise ValueError(
            f"`passage_attention` is 'separate', but the attention kernel `{kernel}` does not accept a mask that "
            f"separates passages. Load the model with `attn_implementation` {' or '.join(map(repr, MASK_KERNELS))}, or "
            "pass only one passage."
        )
    if any(DynamicCache(config=config).is_sliding):
        raise ValueError(
            f"`passage_attention` is 'separate', but layers of the base model (of type `{config.model_type}`) have a "
            "sliding window, which would also count the slots of other passages. Load model and processor with "
            "`passage_attention='joint'`, or pass only one passage."
        )


def can_separate(config: PreTrainedConfig) -> bool:
    """Whether independent passages can share a row."""
    return config._attn_implementation in MASK_KERNELS and not any(DynamicCache(config=config).is_sliding)


def _described(value) -> str:
    """The type of a value, with the dtype and the shape of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"


def check_passage_ids(passage_ids, context_embeds: torch.Tensor, slot_mask: torch.Tensor) -> None:
    """Raise `ValueError` unless `passage_ids` number the passages of a row's slots in order, each in one span.

    Args:
        passage_ids: The argument of the call, which has to be (batch, max_slots).
        context_embeds (`torch.Tensor` of shape `(batch, max_slots, encoder_hidden_size)`): The slots' embeddings.
        slot_mask (`torch.Tensor` of shape `(batch, seq_len)`): Where the slots are.
    """
    expected = tuple(context_embeds.shape[:2])
    is_ids = isinstance(passage_ids, torch.Tensor) and passage_ids.dtype in (torch.int64, torch.int32)
    if not is_ids or tuple(passage_ids.shape) != expected:
        raise ValueError(
            f"`context_passage_ids` is {_described(passage_ids)}; expected an int64 tensor of shape {expected}, "
            "with the passage number of each slot."
        )
    if passage_ids.device.type != "cpu":
        return  # reading them would make the host wait for the device
    if bool(((slot_mask[:, 1:] & ~slot_mask[:, :-1]).sum(dim=1) + slot_mask[:, 0] > 1).any()):
        raise ValueError(
            "`input_ids` has text between the slots of a row, but with `passage_attention='separate'` all passages "
            "start at the same position. Put the slots of all passages directly after each other, before the question, "
            "or load model and processor with `passage_attention='joint'`."
        )
    is_real = (
        torch.arange(expected[1], device=slot_mask.device) < slot_mask.sum(dim=1)[:, None]
    )  # padding follows the slots
    falls = (passage_ids[:, 1:] < passage_ids[:, :-1]) & is_real[:, 1:]  # (batch, max_slots - 1)
    is_wrong = torch.cat([falls, falls.new_zeros(len(falls), 1)], dim=1) | (passage_ids < 0) & is_real
    if bool(is_wrong.any()):
        row, slot = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"`context_passage_ids` of row {row} has the numbers {passage_ids[row, slot : slot + 2].tolist()} from "
            f"slot {slot} on; expected numbers of at least 0 that never decrease from one slot to the next. Sort the "
            "slots by passage, and number the passages from 0."
        )


def place_passage_ids(slot_mask: torch.Tensor, passage_ids: torch.Tensor | None) -> torch.Tensor:
    """The index of the passage at each position (batch, seq_len), -1 on text. Without `passage_ids` (batch, max_slots)
    all slots of a row are of one passage. `slot_mask` is (batch, seq_len)."""
    if passage_ids is None or passage_ids.shape[1] == 0:
        return torch.where(slot_mask, 0, -1)
    which_slot = (slot_mask.long().cumsum(dim=1) - 1).clamp(min=0)  # (batch, seq_len), the last slot so far
    placed = passage_ids.to(slot_mask.device).long().gather(1, which_slot.clamp(max=passage_ids.shape[1] - 1))
    return torch.where(slot_mask, placed, -1)


def passage_positions(passage_ids: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Positions of a prompt whose passages all start at the same position.

    Args:
        passage_ids (`torch.Tensor` of shape `(batch, seq_len)`): From [`place_passage_ids`].
        is_real (`torch.Tensor` of shape `(batch, seq_len)`): `False` on padding, on either side.

    Returns:
        `torch.LongTensor` of shape `(batch, seq_len)`; 0 on padding before the text.

    >>> passage_positions(torch.tensor([[-1, -1, 0, 0, 1, 1, 1, -1]]), torch.ones(1, 8, dtype=torch.bool))
    tensor([[0, 1, 2, 3, 2, 3, 4, 5]])
    """
    index = torch.arange(passage_ids.shape[1], device=passage_ids.device)  # (seq_len,)
    # The last beginning of a passage up to a slot is that of the slot's passage: a running maximum finds it.
    begins = pad(passage_ids[:, 1:] != passage_ids[:, :-1], (1, 0), value=True)  # (batch, seq_len)
    in_passage = index - torch.where(begins, index, 0).cummax(dim=1).values  # of a slot: its place in its passage
    is_slot = passage_ids >= 0
    is_text = is_real.bool() & ~is_slot
    longest = torch.where(is_slot, in_passage + 1, 0).amax(dim=1, keepdim=True)  # (batch, 1); text continues after it
    text_before = is_text.long().cumsum(dim=1)  # text up to a position, itself included
    follows = is_slot.long().cumsum(dim=1) > 0
    return torch.where(is_slot, text_before + in_passage, (text_before - 1).clamp(min=0) + longest * follows)


def separate_passages(
    attention_mask: torch.Tensor | None, passage_ids: torch.Tensor, dtype: torch.dtype, num_keys: int | None = None
) -> torch.Tensor:
    """The mask of a prompt in which no slot attends to a slot of another passage.

    Args:
        attention_mask: (batch, seq_len), 0 on padding; or (batch, 1, seq_len, num_keys), boolean or additive, for a
            prompt with further hidden positions; `None` hides nothing.
        passage_ids (`torch.Tensor` of shape `(batch, seq_len)`): From [`place_passage_ids`].
        dtype (`torch.dtype`): The dtype of the hidden states.
        num_keys (`int`, *optional*): Columns, more than `seq_len` if a static cache has unused room.

    Returns:
        `torch.Tensor` of shape `(batch, 1, seq_len, num_keys)`, boolean if `attention_mask` is, else additive.
    """
    seq_len = passage_ids.shape[1]
    query, key = passage_ids[:, :, None], passage_ids[:, None, :]  # (batch, seq_len, 1), (batch, 1, seq_len)
    is_other = (query >= 0) & (key >= 0) & (query != key)  # (batch, seq_len, seq_len)
    if attention_mask is None or attention_mask.dim() == 2:
        is_hidden = is_other | torch.ones_like(is_other[0]).triu(1)
        if attention_mask is not None:
            is_hidden = is_hidden | ~attention_mask[:, None, :seq_len].bool()
        is_hidden = pad(is_hidden, (0, (num_keys or seq_len) - seq_len), value=True)  # (batch, seq_len, num_keys)
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=passage_ids.device)
        return mask.masked_fill(is_hidden, torch.finfo(dtype).min)[:, None]  # (batch, 1, seq_len, num_keys)
    is_other = pad(is_other, (0, attention_mask.shape[-1] - seq_len))[:, None]  # (batch, 1, seq_len, num_keys)
    if attention_mask.dtype == torch.bool:
        return attention_mask & ~is_other
    return attention_mask.masked_fill(is_other, torch.finfo(attention_mask.dtype).min)


def prompt_positions(
    slot_mask: torch.Tensor, passage_ids: torch.Tensor | None, is_real: torch.Tensor
) -> torch.LongTensor:
    """As `passage_positions`, from the slots (batch, seq_len) of a prompt and their passages (batch, max_slots)."""
    return passage_positions(place_passage_ids(slot_mask, passage_ids), is_real)


def separate_inputs(
    slot_mask: torch.Tensor,
    passage_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.LongTensor | None,
    cache: Cache | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.LongTensor]:
    """The mask and the positions of a prompt with independent passages; `position_ids` of a caller do not change.
    `slot_mask` is (batch, seq_len), `passage_ids` (batch, max_slots)."""
    placed = place_passage_ids(slot_mask, passage_ids)  # (batch, seq_len)
    if position_ids is None:
        is_2d = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
        is_real = attention_mask[:, : slot_mask.shape[1]] if is_2d else torch.ones_like(slot_mask)
        position_ids = passage_positions(placed, is_real)
    is_static = cache is not None and cache.is_compileable  # then the mask has columns for unused positions, too
    num_keys = cache.get_mask_sizes(slot_mask.shape[1], 0)[0] if is_static else None
    return separate_passages(attention_mask, placed, dtype, num_keys), position_ids


# Rotation of keys. RoPE encodes a position as an angle for each pair of values of a key, so that a key is moved to
# another position by a rotation.


def key_rotation(moves: torch.Tensor, config: PreTrainedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of [`rotate_keys`] that move keys by `moves` (...) positions; `config` is the backbone's. They are
    cosines and signed sines, each (..., head_dim) in float32."""
    exact = torch.float32 if moves.device.type == "mps" else torch.float64
    angles = moves.to(exact)[..., None] * _inverse_frequencies(config).to(moves.device, exact)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate_keys(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Keys (..., head_dim) moved to other positions, with the factors of [`key_rotation`], whose shapes have to fit."""
    wide = keys.float()
    return (wide * cos + wide.roll(keys.shape[-1] // 2, dims=-1) * sin).to(keys.dtype)


def _inverse_frequencies(config: PreTrainedConfig) -> torch.Tensor:
    """The angle by which RoPE rotates each pair of values of a key per position, (head_dim / 2,), in float64."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))[0].double()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)


def prior_of_positions(passage_ids: torch.Tensor, passage_prior: torch.Tensor) -> torch.Tensor:
    """For each position (batch, seq_len) the number that is added to the attention logits of text that attends to it:
    on a slot the bias of its passage, on text 0.

    Args:
        passage_ids (`torch.Tensor` of shape `(batch, seq_len)`): From [`place_passage_ids`].
        passage_prior (`torch.Tensor` of shape `(batch, num_passages)`): The bias of each passage.

    >>> prior_of_positions(torch.tensor([[-1, 0, 1, 1, -1]]), torch.tensor([[0.0, -2.0]]))
    tensor([[ 0.,  0., -2., -2.,  0.]])
    """
    of_passage = passage_prior.gather(1, passage_ids.clamp(min=0))  # (batch, seq_len)
    return torch.where(passage_ids >= 0, of_passage, 0.0)


def check_passage_prior(passage_prior, passage_ids: torch.Tensor | None, config: PreTrainedConfig) -> None:
    """Raise `ValueError` unless `passage_prior` has a finite number for each passage of `passage_ids` (batch,
    max_slots), and the attention kernel accepts it."""
    if (kernel := config._attn_implementation) not in MASK_KERNELS:
        raise ValueError(
            f"`passage_prior` is set, but the attention kernel `{kernel}` cannot add it to the attention logits. Load "
            f"the model with `attn_implementation` {' or '.join(map(repr, MASK_KERNELS))}, or leave out "
            "`passage_prior`."
        )
    check_can_separate(config)
    if passage_ids is None:
        raise ValueError(
            "Got `passage_prior` without `context_passage_ids`, the passage number of each slot. Pass both."
        )
    is_tensor = isinstance(passage_prior, torch.Tensor)
    is_numbers = is_tensor and passage_prior.is_floating_point()
    min_shape = (len(passage_ids), int(passage_ids.max()) + 1 if passage_ids.numel() else 0)
    shape = tuple(passage_prior.shape) if is_tensor else None
    if not is_numbers or len(shape) != 2 or shape[0] != min_shape[0] or shape[1] < min_shape[1]:
        raise ValueError(
            f"`passage_prior` is {_described(passage_prior)}; expected a floating-point tensor of shape {min_shape}, a "
            "number for each passage of each row."
        )
    if not bool(passage_prior.isfinite().all()):
        raise ValueError(
            "`passage_prior` contains NaN or infinite numbers; expected finite numbers. To hide a passage, use a low "
            "number, such as -100."
        )


def slot_bias_of(
    slot_mask: torch.Tensor, passage_ids: torch.Tensor | None, passage_prior, config: PreTrainedConfig
) -> torch.FloatTensor:
    """The `slot_bias` (batch, seq_len) of a prompt whose passages have the `passage_prior` (batch, num_passages).

    Raises:
        `ValueError`: as [`check_passage_prior`].
    """
    check_passage_prior(passage_prior, passage_ids, config)
    placed = place_passage_ids(slot_mask, passage_ids)
    return prior_of_positions(placed, passage_prior.to(placed.device))


def with_slot_bias(
    attention_mask: torch.Tensor | None,
    slot_bias: torch.Tensor,
    slot_mask: torch.Tensor | None,
    num_queries: int,
    cache: Cache | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A mask with a bias on slots, for text that attends to them. Slots attend to each other without the bias.

    Args:
        attention_mask: (batch, num_keys) or (batch, 1, num_queries, num_keys), boolean or additive; or `None`.
        slot_bias (`torch.Tensor` of shape `(batch, prompt_len)`): From [`prior_of_positions`]. Later columns of the
            cache have no bias.
        slot_mask (`torch.Tensor` of shape `(batch, num_queries)`, *optional*): Queries that are slots.
        num_queries (`int`), cache: The number of queries, which come after the positions of the cache.
        dtype (`torch.dtype`): The dtype of the hidden states.

    Returns:
        `torch.Tensor` of shape `(batch, 1, num_queries, num_keys)`, additive.
    """
    num_cached = 0 if cache is None else int(cache.get_seq_length())
    num_keys = num_queries if cache is None else cache.get_mask_sizes(num_queries, 0)[0]
    if attention_mask is None or attention_mask.dim() == 2:
        keys = torch.arange(num_keys, device=slot_bias.device)
        is_visible = (keys <= torch.arange(num_cached, num_cached + num_queries, device=keys.device)[:, None])[None]
        if attention_mask is not None:
            is_real = attention_mask[:, :num_keys].bool()  # (batch, keys so far)
            is_visible = is_visible & pad(is_real, (0, num_keys - is_real.shape[1]))[:, None]
        attention_mask = is_visible[:, None]  # (batch or 1, 1, num_queries, num_keys)
    if attention_mask.dtype == torch.bool:
        hidden = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device)
        attention_mask = hidden.masked_fill(~attention_mask, torch.finfo(dtype).min)
    bias = slot_bias[:, : attention_mask.shape[-1]].to(attention_mask.dtype)
    bias = pad(bias, (0, attention_mask.shape[-1] - bias.shape[1]))[:, None, None]  # (batch, 1, 1, num_keys)
    if slot_mask is not None:
        bias = bias * ~slot_mask[:, None, :, None]
    return attention_mask + bias
