"""Passages apart, beyond the paper: a slot reads the text before the slots and the slots of its own passage.

What is computed for a passage then depends on nothing else of the prompt, so it can be kept and joined with any other:

    head          passage 0      passage 1          question
    0 1 2 3 4     5 6 7 8        5 6 7 8 9 10       11 12 13 ...      positions

The slots of all passages count from the same position, and the text after them goes on behind the longest passage, so
no key has to be rotated when passages are joined. With one passage, the paper's case, all is as without.

Shapes: batch, seq_len, max_slots (slots of the fullest row).
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

# Attention kernels that take a mask of rows by columns.
MASK_KERNELS = ("eager", "sdpa")


def check_can_separate(config: PreTrainedConfig, in_one_row: bool = True) -> None:
    """Raises `ValueError` for a backbone with which passages cannot be read apart, or an attention kernel with which
    they cannot be `in_one_row`; kept passages are joined without a mask."""
    if in_one_row and (kernel := config._attn_implementation) not in MASK_KERNELS:
        raise ValueError(
            f"`passage_attention` is 'separate', but attention `{kernel}` takes no mask that keeps passages apart. "
            f"Load the model with `attn_implementation` {' or '.join(MASK_KERNELS)}, or pass one passage."
        )
    if any(DynamicCache(config=config).is_sliding):
        raise ValueError(
            f"`passage_attention` is 'separate', but layers of the backbone {config.model_type} have a sliding window, "
            "which counts the slots of all passages. Use 'joint', or pass one passage."
        )


def can_separate(config: PreTrainedConfig) -> bool:
    """Whether passages can be read apart in one row."""
    return config._attn_implementation in MASK_KERNELS and not any(DynamicCache(config=config).is_sliding)


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
    begins = pad(passage_ids[:, 1:] != passage_ids[:, :-1], (1, 0), value=True)
    in_passage = index - torch.where(begins, index, 0).cummax(dim=1).values  # of a slot: its place in its passage
    is_slot = passage_ids >= 0
    is_text = is_real.bool() & ~is_slot
    longest = torch.where(is_slot, in_passage + 1, 0).amax(dim=1, keepdim=True)  # (batch, 1)
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


# Keys and values of passages: read, kept, joined. One passage, or all that are read jointly, is a tensor
# (num_layers, 2, key_value_heads, num_slots, head_dim).

# Slots of a batch of passages, padding included: large enough for fast products, small enough to hold little padding.
SLOTS_PER_BATCH = 1024
# Slots of a row that several passages share: attention across passages is computed and thrown away.
SLOTS_PER_ROW = 256


def entry_shape(config: PreTrainedConfig, num_slots: int) -> tuple[int, int, int, int, int]:
    """The shape of keys and values that a backbone has of some slots."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, config.num_key_value_heads, num_slots, head_dim


def keys_values_of(cache: Cache, row: int, start: int, end: int) -> torch.Tensor:
    """Keys and values of the positions `start` to `end` of a row of a cache, (num_layers, 2, heads, end - start,
    head_dim), in memory of their own."""
    length = cache.get_seq_length()
    layers = []
    for layer in cache.layers:
        # A sliding window has dropped the first positions; zeros, which it never reads, keep the rest in place.
        dropped = length - layer.keys.shape[2]
        both = torch.stack([layer.keys[row], layer.values[row]])  # (2, heads, kept, head_dim)
        layers.append(pad(both, (0, 0, dropped, 0))[:, :, start:end])
    return torch.stack(layers)


# Positions that a joined cache has room for before it is copied: a question and a short answer.
ROOM = 128


class RoomyLayer(DynamicLayer):
    """A cache layer that is written into room behind what it holds, so that no token copies all that came before it.

    Args:
        room (`torch.Tensor` of shape `(2, batch, heads, num_positions, head_dim)`): Keys and values; only it is theirs.
        length (`int`): The positions that are filled.
    """

    def __init__(self, room: torch.Tensor, length: int):
        super().__init__()
        self.lazy_initialization(room, room)
        self._fill(room, length)

    def _fill(self, room: torch.Tensor, length: int) -> None:
        self._room = room
        self.keys, self.values = room[:, :, :, :length]
        self._in_room = self.keys

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values (batch, heads, new_positions, head_dim), and returns all."""
        start, room = self.get_seq_length(), self._room
        end = start + key_states.shape[2]
        if self.keys is not self._in_room or end > room.shape[3]:  # beams and selected rows have memory of their own
            room = _empty(key_states, 2, *key_states.shape[:2], end + ROOM, key_states.shape[3])
            if start:
                room[0, :, :, :start], room[1, :, :, :start] = self.keys, self.values
        room[0, :, :, start:end], room[1, :, :, start:end] = key_states, value_states
        self.is_initialized = True
        self._fill(room, end)
        return self.keys, self.values


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """An ordinary tensor, that can be written to in and outside of inference mode."""
    with torch.inference_mode(False):
        return like.new_empty(shape)


def join_keys_values(rows: Sequence[Sequence[torch.Tensor]], config: PreTrainedConfig) -> DynamicCache:
    """Joins what was read, the text before the slots first, to a left-padded cache with a row for each of `rows`.

    Everything is copied, once: generating from the cache leaves what is kept as it is.
    """
    lengths = [sum(part.shape[3] for part in parts) for parts in rows]
    first, length, cache = rows[0][0], max(lengths), DynamicCache(config=config)
    num_layers, _, heads, _, head_dim = first.shape
    for layer_idx in range(num_layers):
        # Memory of a layer at a time: an allocator keeps pieces of this size, while larger ones are new each time.
        joined = _empty(first, 2, len(rows), heads, length + ROOM, head_dim)
        for row, parts in enumerate(rows):
            padding = length - lengths[row]
            joined[:, row, :, :padding] = 0.0  # which is masked, so that any number would do, but no NaN
            torch.cat([part[layer_idx] for part in parts], dim=2, out=joined[:, row, :, padding:length])
        if cache.layers[layer_idx].is_sliding:
            cache.update(*joined[:, :, :, :length], layer_idx)
        else:
            cache.layers[layer_idx] = RoomyLayer(joined, length)
    return cache


@torch.no_grad()
def read_text(model, ids: Sequence[int]) -> torch.Tensor:
    """Keys and values of the text before the slots, which runs on the unchanged base model."""
    if not ids:
        return torch.empty(entry_shape(model.config.text_config, 0), dtype=model.dtype, device=model.device)
    outputs = model.model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=True)
    return keys_values_of(outputs.past_key_values, 0, 0, len(ids))


@torch.no_grad()
def read_passages(model, head_ids: Sequence[int], head: torch.Tensor, passages: Sequence, **settings) -> list:
    """Keys and values of passages that each stand alone behind the same text.

    Short passages share a row, with no attention across; rows are of about the same length, so that there is little
    padding. Where nothing is refined, the rows continue from the text's own keys and values. A refinement step reads
    the text's deeper states, so there each row begins with the text, and has one passage, as a budget is one for a row.

    Args:
        model ([`ArcAlignerForCausalLM`]): In evaluation mode.
        head_ids (`Sequence[int]`), head (`torch.Tensor`): The text before the slots, and what `read_text` made of it.
        passages (`Sequence[EncodedDocuments]`): Slots of each; one of several documents is read jointly.
        settings: `gate_mode`, `gate_threshold`, `max_refinement_steps` and `refinement_budget`, as in `forward`.

    Returns:
        `list[torch.Tensor]`, each (num_layers, 2, heads, num_slots, head_dim), in the order of `passages`.
    """
    lengths = [len(each.context_embeds) for each in passages]
    shares = can_separate(model.config.text_config) and not model.config.refines(**settings)
    found: list[torch.Tensor | None] = [None] * len(passages)
    batch: list[list[int]] = []
    for row in share_rows(lengths, -(-sum(lengths) // SLOTS_PER_ROW) if shares else len(lengths)):
        width = sum(lengths[number] for number in (batch or [row])[0])
        if (len(batch) + 1) * width > SLOTS_PER_BATCH and batch:
            _read_batch(model, head_ids, head, passages, batch, found, settings)
            batch = []
        batch.append(row)
    if batch:
        _read_batch(model, head_ids, head, passages, batch, found, settings)
    return found


def share_rows(lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    """Which passages of these lengths share a row, by their numbers: all rows nearly as long, the longest first.

    >>> share_rows([30, 10, 25, 20], num_rows=2)
    [[2, 3], [0, 1]]
    """
    rows, sizes = [[] for _ in range(num_rows)], [0] * num_rows
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        emptiest = sizes.index(min(sizes))
        rows[emptiest].append(number)
        sizes[emptiest] += lengths[number]
    return [rows[row] for row in sorted(range(num_rows), key=sizes.__getitem__, reverse=True) if rows[row]]


def _read_batch(model, head_ids, head, passages, batch: list[list[int]], found: list, settings: dict) -> None:
    """Reads the rows of `batch`, each the numbers of its passages, into `found`."""
    rows, device, start = [[passages[number] for number in row] for row in batch], model.device, len(head_ids)
    continues = not model.config.refines(**settings)
    numbers = pad_passage_ids(
        [torch.cat([torch.full((len(each.context_embeds),), n) for n, each in enumerate(row)]) for row in rows]
    )  # (batch, max_slots); rows are padded at the end
    is_slot = numbers >= 0
    ids = torch.where(is_slot, model.config.context_token_id, 0)
    mask, positions = torch.cat([torch.ones(len(rows), start).long(), is_slot.long()], dim=1), None
    if not continues:
        ids = torch.cat([torch.tensor([list(head_ids)]).expand(len(rows), -1).long(), ids], dim=1)
    elif max(map(len, rows)) > 1:
        positions = (start + passage_positions(numbers, is_slot)).to(device)
        # (batch, 1, max_slots, start + max_slots): the text before is read by all
        mask = pad(separate_passages(is_slot, numbers, model.dtype), (start, 0))
    if positions is None:
        positions = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1], device=device).expand(len(rows), -1)
    words = [[each.context_word_ids for each in row] for row in rows]
    outputs = model.model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions,
        past_key_values=join_keys_values([[head]] * len(rows), model.config.text_config) if continues else None,
        context_embeds=pad_sequence(
            [torch.cat([each.context_embeds for each in row]) for row in rows], batch_first=True
        ).to(device),
        context_word_ids=None if words[0][0] is None else pad_words(list(map(_join_words, words))).to(device),
        use_cache=True,
        **settings,
    )
    for row, members in enumerate(batch):
        first = start
        for number in members:
            end = first + len(passages[number].context_embeds)
            found[number] = keys_values_of(outputs.past_key_values, row, first, end)
            first = end


def _join_words(parts: Sequence[torch.LongTensor]) -> torch.LongTensor:
    """Word ids of passages, each (num_slots, max_words), one below the other."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=-1) for part in parts])
