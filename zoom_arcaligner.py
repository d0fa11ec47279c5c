"""Zoom: passages are read twice, first as few slots, and then with finer slots where the answer seems to be. Beyond the
paper.

The pointer heads say where: attention heads that attend to the slots which an answer comes from
(`pointer_arcaligner.py`).
"""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from transformers import DynamicCache

from .attention_arcaligner import CACHE
from .configuration_arcaligner import is_number
from .encoder_arcaligner import EncodedDocuments, PrecomputedSlots
from .pointer_arcaligner import PointerAttention, attention_to_slots
from .segmentation_arcaligner import check_tokens_per_slot

COARSER = 4  # times more tokens per slot for the first reading, by default
ZOOM = 0.7  # the share of the attention with which published numbers were measured


def is_coarser(tokens_per_slot: int | str, other: int | str) -> bool:
    """Whether slots of `tokens_per_slot` tokens are larger than those of `other` tokens.

    >>> is_coarser("segment", 2), is_coarser(8, 2), is_coarser(2, 2), is_coarser(2, "segment")
    (True, True, False, False)
    """
    return other != "segment" and (tokens_per_slot == "segment" or tokens_per_slot > other)


def check_zoom(
    model, processor, zoom: float, tokens_per_slot: int | str | None = None, max_slots: int | None = None
) -> int | str:
    """Check the settings of a call with `zoom`, and return the `tokens_per_slot` of its first reading: by default
    `COARSER` times the processor's.

    Raises:
        `ValueError`: a `zoom` that is invalid, or that the other settings or the aligner do not allow.
    """
    if not is_number(zoom, Real) or not 0.0 < zoom <= 1.0:
        raise ValueError(
            f"`zoom` is {zoom!r}; expected a number above 0 and at most 1, the share of the attention that the "
            "replaced slots have. Leave it out to read the passages once."
        )
    if not model.config.pointer_heads:
        raise ValueError(
            "`zoom` needs pointer heads, which find the slots to replace, but this aligner has none (its "
            "`pointer_heads` is None). Find them with `python -m arcaligner.train.pointer --save`, or leave out `zoom`."
        )
    if max_slots is not None:
        raise ValueError(f"`zoom` cannot be combined with `max_slots` ({max_slots}). Leave one of the two out.")
    if tokens_per_slot is not None:
        check_tokens_per_slot(tokens_per_slot)
    finer = processor.tokens_per_slot
    if finer == "segment":
        raise ValueError(
            '`zoom` replaces slots with finer ones, but the processor\'s `tokens_per_slot` is "segment"; expected a '
            "number. Set it to one that the aligner was trained with, such as 2, or leave out `zoom`."
        )
    coarser = COARSER * finer if tokens_per_slot is None else tokens_per_slot
    if not is_coarser(coarser, finer):
        raise ValueError(
            f"`zoom` replaces slots of {coarser} tokens with slots of {finer}, the `tokens_per_slot` of the processor; "
            f'expected a `tokens_per_slot` above {finer}, or "segment". Set it to {COARSER * finer}, or leave it out.'
        )
    return coarser


def attended_slots(attention: torch.Tensor, share: float) -> torch.BoolTensor:
    """The fewest slots that together get a `share` of the attention (num_slots,): (num_slots,), on the CPU.

    >>> attended_slots(torch.tensor([0.1, 0.5, 0.1, 0.3]), 0.7)
    tensor([False,  True, False,  True])
    """
    sorted_attention, order = attention.cpu().double().sort(descending=True, stable=True)
    before = sorted_attention.cumsum(0) - sorted_attention  # the attention to slots with more of it
    is_attended = torch.zeros(len(order), dtype=torch.bool, device="cpu")
    is_attended[order] = before < float(share) * sorted_attention.sum()
    return is_attended


@torch.inference_mode()
def slot_attention(
    model, inputs: dict[str, Any], passage_prior: torch.FloatTensor | None = None, **gates: Any
) -> list[torch.Tensor]:
    """The attention of the pointer heads from the last token of each prompt to its slots, each (num_slots,).

    Args:
        model ([`ArcAlignerForCausalLM`]): With `pointer_heads`.
        inputs (`dict`): Prompts with slots, as of the processor, padded on the left.
        passage_prior (`torch.FloatTensor` of shape `(batch, num_passages)`, *optional*): As for `generate`.
        gates (`Any`): Settings of the gates, as for `generate`.
    """
    pointer = PointerAttention(model.config.pointer_heads)
    bias = model.slot_bias(inputs["input_ids"], inputs.get("context_passage_ids"), passage_prior)
    cache = DynamicCache(config=model.config.text_config)
    model(**inputs, **gates, **{CACHE: cache}, slot_bias=bias, pointer=pointer, logits_to_keep=1)
    attention, is_slot = pointer.mean(), inputs["input_ids"] == model.config.context_token_id
    if attention is None:
        raise ValueError(
            f"All pointer heads ({model.config.pointer_heads}) are in layers with a sliding window, which do not "
            "attend to the whole prompt. Find others with `python -m arcaligner.train.pointer --save`, or leave out "
            "`zoom`."
        )
    return attention_to_slots(attention, is_slot)


def zoom_in(
    model,
    processor,
    inputs: dict[str, Any],
    passages: Sequence[list],
    tokens_per_slot: int | str,
    zoom: float,
    **settings: Any,
) -> list[EncodedDocuments]:
    """
    Read prompts once, and replace the slots that the pointer heads attend to most with finer ones, of about
    `processor.tokens_per_slot` tokens.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): Of one checkpoint.
        inputs (`dict`): Prompts with slots, as of the processor, padded on the left.
        passages (`Sequence[list]`): For each prompt the passages of its slots.
        tokens_per_slot (`int` or `"segment"`): Of these slots.
        zoom (`float`): Above 0 and at most 1. The fewest slots are replaced that together get this share of the
            attention to all slots.
        settings (`Any`): As for [`slot_attention`].

    Returns:
        For each prompt its slots, the unchanged and the finer ones in the order of the text.

    Raises:
        `ValueError`: settings that are invalid, slots that are not those of the passages, a prompt that becomes too
            long.
    """
    tokens_per_slot = check_zoom(model, processor, zoom, tokens_per_slot)
    attention = slot_attention(model, inputs, **settings)
    num_positions = inputs["attention_mask"].sum(dim=1).tolist()
    is_separate, rows = processor.passage_attention == "separate", []
    for number, (documents, row) in enumerate(zip(passages, attention, strict=True)):
        limit = processor.max_prompt_length
        limit = None if limit is None else limit - (num_positions[number] - len(row))
        embeds = inputs["context_embeds"][number, : len(row)].cpu()
        marked = attended_slots(row, zoom)
        rows.append(processor.slot_encoder.zoom(documents, embeds, marked, tokens_per_slot, limit, is_separate))
    return rows


def inputs_of(rows: Sequence[EncodedDocuments]) -> dict[str, list[torch.Tensor]]:
    """The arguments of the processor for these slots, one entry for each question."""
    columns = {name: [getattr(row, name) for row in rows] for name in PrecomputedSlots._fields}
    return {name: values for name, values in columns.items() if all(value is not None for value in values)}
