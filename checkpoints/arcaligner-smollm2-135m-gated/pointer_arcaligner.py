"""Pointer heads: attention heads of the backbone that attend to the slots which an answer comes from. Copy-biased
decoding begins an answer at the words of these slots. Beyond the paper."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, StaticLayer

from .attention_arcaligner import CACHE
from .refinement_arcaligner import CompleteKeysValues, gather_rotary

LAST_WEIGHTS = "arcaligner_last_weights"  # an attention kernel that computes weights only
MIN_SHARE = 1e-9  # of the attention, for a logarithm
# Attributes with which accelerate replaces the forward of a module; a copy of it would call the original.
HOOKED = "forward", "_old_forward", "_hf_hook"


def last_weights(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **options,
) -> tuple[torch.Tensor, None]:
    """An attention kernel that leaves its weights (batch, heads, queries, kv_len), float32, in `module.last_weights`.
    Its output is zero."""
    dtype = torch.promote_types(query.dtype, torch.float32)  # products may overflow in float16
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # (batch, kv_heads, group * queries, head_dim)
    scores = ((grouped.to(dtype) * scaling) @ key.to(dtype).transpose(2, 3)).view(*query.shape[:3], -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        is_flag = attention_mask.dtype == torch.bool
        scores = scores.masked_fill(~attention_mask, -torch.inf) if is_flag else scores + attention_mask
    module.last_weights = torch.nn.functional.softmax(scores, dim=-1).float()
    return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None


AttentionInterface.register(LAST_WEIGHTS, last_weights)


class PointerAttention:
    """The attention of a prompt's last token to all positions, the mean over `heads`. Layers add their part in a
    prefill with a cache. Prompts are padded on the left.

    Args:
        heads (`list[list[int]]`): Numbers of a layer and of a head in it, as in `config.pointer_heads`.
    """

    def __init__(self, heads: Sequence[Sequence[int]]):
        self.heads: dict[int, list[int]] = {}
        for layer, head in heads:
            self.heads.setdefault(layer, []).append(head)
        self.by_layer: dict[int, torch.Tensor] = {}  # of each layer, (batch, heads, kv_len), float32

    @torch.no_grad()
    def add(self, layer: torch.nn.Module, run_layer, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Add the part of a `layer`, which has just been called with `kwargs` and a cache.

        Args:
            layer (`nn.Module`): A decoder layer.
            run_layer (`Callable`): The forward of the layer's class in the backbone.
            hidden_states (`torch.Tensor`): The input of its last position, (batch, 1, hidden).
        """
        keys_values = kwargs[CACHE].layers[layer.layer_idx]
        if keys_values.is_sliding or not isinstance(keys_values, DynamicLayer | StaticLayer):
            return  # it does not have the keys of all positions
        if keys_values.keys.dim() != 4 or keys_values.keys.shape[2] < keys_values.get_seq_length():
            return  # nor as they were computed: it is a quantized one
        # The layer runs again for one position, because usual kernels return no weights. Copies leave it as it is for
        # other threads.
        reader, attention = copy.copy(layer), copy.copy(layer.self_attn)
        for name in HOOKED:
            attention.__dict__.pop(name, None)
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = LAST_WEIGHTS
        reader._modules = {**layer._modules, "self_attn": attention}
        num_rows, length = len(hidden_states), kwargs["position_embeddings"][0].shape[1]
        last = torch.full((num_rows, 1), length - 1, device=hidden_states.device)
        mask, device = kwargs["attention_mask"], hidden_states.device
        if mask is not None and mask.dim() == 2:  # of flash attention
            mask = mask[:, None, None].bool()
        inputs = gather_rotary(kwargs, last) | {"attention_mask": None if mask is None else mask[:, :, -1:]}
        inputs[CACHE] = CompleteKeysValues(keys_values.keys.to(device), keys_values.values.to(device))
        run_layer(reader, hidden_states, **{**kwargs, **inputs})
        self.by_layer[layer.layer_idx] = attention.last_weights[:, self.heads[layer.layer_idx], 0]

    def mean(self) -> torch.Tensor | None:
        """The mean over all heads, (batch, kv_len); `None` if no layer has a cache with the keys of all positions."""
        if not self.by_layer:
            return None
        *_, last = self.by_layer.values()
        return torch.cat([weights.to(last.device) for weights in self.by_layer.values()], dim=1).mean(dim=1)


def attention_to_slots(attention: torch.Tensor, is_slot: torch.BoolTensor) -> list[torch.Tensor]:
    """The attention (batch * repeats, kv_len) to the slots of each row, in their order: (num_slots,). `is_slot` (batch,
    prompt_len) says which positions of a prompt are slots."""
    is_slot = is_slot.to(attention.device).repeat_interleave(len(attention) // len(is_slot), dim=0)
    return [row[: len(slots)][slots] for row, slots in zip(attention, is_slot, strict=True)]


class Pointer:
    """
    How much the pointer heads attend to the slots in which words of the passages begin, for the rows of one call of
    `generate`.

    Args:
        processor ([`ArcAlignerProcessor`]): Of the aligner.
        documents (`list[list]`): The passages of each row, from which its slots were made; an empty list if their texts
            are not known.
        tokens_per_slot (`int` or `"segment"`): Of these slots.
        weight (`float`): `config.pointer_weight`.
        prefill ([`PrefillOutputs`]): Of the call.
    """

    def __init__(self, processor, documents: Sequence[list], tokens_per_slot: int | str, weight: float, prefill):
        spans_of = processor.slot_encoder.slot_spans
        self.spans = [spans_of(passages, tokens_per_slot) if passages else [] for passages in documents]
        self.weight, self.prefill = weight, prefill

    def log_shares(
        self, row: int, repeats: int, starts: Sequence[tuple[int | None, Mapping[int, Sequence[int]]]]
    ) -> dict[int, float]:
        """The weighted logarithm of the attention to the slot of a word, less that of the slot with the most attention,
        so at most 0, by the first token of the word; of several words with the same token, the highest. Empty if the
        slots of the row are not those of its passages, for example because their number was limited.

        Args:
            row (`int`): With beams or samples, `repeats` successive rows have the same passages.
            starts (`list[tuple]`): For each text the number of its passage, or `None` for another text, whose words
                have 0; and the characters where words begin, by their first tokens.
        """
        attention, spans = self.prefill.slot_attention, self.spans[row // repeats]
        if attention is None or not spans or int(self.prefill.is_slot[row // repeats].sum()) != len(spans):
            return {}
        shares = attention[row, : len(spans)].clamp(min=MIN_SHARE).log()  # (num_slots,)
        log_shares, highest = (self.weight * (shares - shares.max())).tolist(), {}
        for number, words in starts:
            of_document = [index for index, span in enumerate(spans) if span.document == number]
            found = dict.fromkeys(words, 0.0)
            if of_document:
                found = log_shares_of_words(
                    words, [spans[index] for index in of_document], [log_shares[index] for index in of_document]
                )
            for first, share in found.items():
                highest[first] = max(share, highest.get(first, share))
        return highest


def log_shares_of_words(
    starts: Mapping[int, Sequence[int]], spans: Sequence, log_shares: Sequence[float]
) -> dict[int, float]:
    """The highest `log_shares` of the slots in which the words of a text begin, by the first token of the words.

    Args:
        starts (`dict[int, list[int]]`): For each first token, the characters where such words begin.
        spans (`list[Segment]`): The parts of the text that its slots represent.
        log_shares (`list[float]`): Of these slots. A word in none of them has the lowest value.

    >>> from arcaligner.segmentation_arcaligner import Segment
    >>> spans = [Segment(0, 0, 8, "Ada Byrn"), Segment(0, 8, 16, " of York")]
    >>> log_shares_of_words({5: [0], 7: [4, 12]}, spans, [-2.0, 0.0])
    {5: -2.0, 7: 0.0}
    """
    lowest, best = min(log_shares, default=0.0), {}
    for first, places in starts.items():
        found = [
            share
            for place in places
            for span, share in zip(spans, log_shares, strict=True)
            if span.start <= place < span.end
        ]
        best[first] = max(found, default=lowest)
    return best
