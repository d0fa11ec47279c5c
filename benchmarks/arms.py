"""The ways to read k passages that the latency benchmark compares, from the same prompts.

standard_rag           the passages' text, read by the bare base model of transformers
standard_rag_cached    the same, with cached keys and values of everything before the question
off                    slots, no refinement
adaptive               slots, the gates decide
budgeted               slots, the gates decide within `BUDGET` of the slot prefix's operations
always                 slots, each gate forced open
slots_cached           `adaptive`, with cached keys and values of the slot prefix

A prompt is cut where the question begins. Nothing in its prefix (the passages, as text or as slots) depends on the
question, so the keys and values of a prefix serve any number of questions.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from ..base_model_arcaligner import CACHE, cache_of
from ..common.rows import Row
from ..evaluation.analyses.speed import BUDGET
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..slot_rows_arcaligner import pad_passage_ids, pad_words, passage_positions, place_passage_ids
from ..train.data import text_ids

TOKENS_PER_PASSAGE = 150


# Models


def load_models(
    checkpoint: str, dtype: torch.dtype, device: str, **settings: Any
) -> tuple[ArcAlignerForCausalLM, PreTrainedModel]:
    """A checkpoint's aligner, with `settings` in place of its own, and a base model that shares its weights, so that
    both read the same memory."""
    aligner = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=dtype, **settings).to(device).eval()
    return aligner, base_of(aligner, dtype, device)


def base_of(aligner: ArcAlignerForCausalLM, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of transformers with the backbone's weights, which are shared and not copied."""
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(aligner.config.text_config, dtype=dtype).eval()
    state = {
        name.replace(".base_layer.", ".").replace("model.backbone.", f"{base.base_model_prefix}."): parameter
        for name, parameter in aligner.named_parameters(remove_duplicate=False)
        if not aligner.is_aligner_key(name)
    }
    base.load_state_dict(state, strict=True, assign=True)
    return base.requires_grad_(False)


# Prompts


@dataclass
class TokenBatch:
    """Rows of ids, left-padded: `input_ids` and `attention_mask`, both (batch, seq_len); where passages are read apart
    also `passages`, the number of each slot's, -1 on text."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    passages: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: list[list[int]], pad: int, device: str) -> "TokenBatch":
        """Rows of different lengths."""
        width = max(map(len, rows))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        return cls(ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device))

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions that do not count padding, nor the slots of other passages that are read apart."""
        if self.passages is not None:
            return passage_positions(self.passages, self.attention_mask)
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return self.attention_mask.sum(dim=1).tolist()

    def then(self, tail: "TokenBatch") -> "TokenBatch":
        """These columns followed by those of `tail`, for a `tail` that is read after a cache of these."""
        ids = torch.cat([self.input_ids, tail.input_ids], dim=1)
        passages = self.passages
        if passages is not None:  # a tail is text
            passages = torch.cat([passages, torch.full_like(tail.input_ids, -1)], dim=1)
        return TokenBatch(ids, torch.cat([self.attention_mask, tail.attention_mask], dim=1), passages)


@dataclass
class Prompts:
    """A batch of prompts, whole and in two parts, and what the model reads in their slots, if there are any."""

    whole: TokenBatch
    prefix: TokenBatch
    tail: TokenBatch
    slots: dict[str, torch.Tensor] = field(default_factory=dict)


def pick_rows(rows: list[Row], processor: ArcAlignerProcessor, k: int, batch_size: int) -> list[Row]:
    """`batch_size` rows with `k` passages each: those nearest to `TOKENS_PER_PASSAGE`, each with its own question; the
    passages of the next rows follow it.

    Raises:
        `ValueError`: fewer than `k` passages.
    """
    own = [(row, passage) for row in rows if row["question"] for passage in row["passages"]]
    if len(own) < k:
        raise ValueError(
            f"Found {len(own)} passages with a question; {k} passages in a prompt need at least as many. Name larger "
            "`--data`, or fewer passages in `--sizes`."
        )
    counts = [len(ids) for ids in processor.tokenizer([passage["text"] for _, passage in own])["input_ids"]]
    nearest = sorted(range(len(own)), key=lambda index: (abs(counts[index] - TOKENS_PER_PASSAGE), index))
    own = [own[index] for index in nearest[: k + batch_size - 1]]
    return [
        {
            "question": own[number % len(own)][0]["question"],
            "passages": [own[(number + offset) % len(own)][1] for offset in range(k)],
        }
        for number in range(batch_size)
    ]


def both_prompts(
    processor: ArcAlignerProcessor, rows: list[Row], slots: dict[str, list[torch.Tensor]], device: str = "cpu"
) -> tuple[Prompts, Prompts]:
    """Prompts with the passages' text and with slots, of the same questions; `slots` are those of [`encoded_slots`]."""
    text_prefixes, slot_prefixes, tails = [], [], []
    for row, embeds in zip(rows, slots["context_embeds"], strict=True):
        before, after = processor.prompt_ids(row["question"])
        text_prefixes.append(text_ids(processor, row)[0])
        slot_prefixes.append(before + [processor.context_token_id] * len(embeds))
        tails.append(after)
    padded = {"context_embeds": pad_sequence(slots["context_embeds"], batch_first=True).to(device)}
    if "context_word_ids" in slots:
        padded["context_word_ids"] = pad_words(slots["context_word_ids"]).to(device)
    if "context_passage_ids" in slots:
        padded["context_passage_ids"] = pad_passage_ids(slots["context_passage_ids"]).to(device)
    pad = processor.tokenizer.pad_token_id or 0

    def prompts(prefixes: list[list[int]], slots: dict[str, torch.Tensor]) -> Prompts:
        whole = [prefix + tail for prefix, tail in zip(prefixes, tails, strict=True)]
        parts = [TokenBatch.of(part, pad, device) for part in (whole, prefixes, tails)]
        if "context_passage_ids" in slots:
            for part in parts[:2]:  # a tail is text
                is_slot = part.input_ids == processor.context_token_id
                part.passages = place_passage_ids(is_slot, slots["context_passage_ids"])
        return Prompts(*parts, slots)

    return prompts(text_prefixes, {}), prompts(slot_prefixes, padded)


def encoded_slots(
    processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: int | str | None = None
) -> dict[str, list[torch.Tensor]]:
    """What the aligner reads for the passages of each row, as `both_prompts` takes it."""
    encoded = [processor.encode_documents(row["passages"], tokens_per_slot=tokens_per_slot) for row in rows]
    slots = {"context_embeds": [each.context_embeds for each in encoded]}
    if encoded[0].context_word_ids is not None:
        slots["context_word_ids"] = [each.context_word_ids for each in encoded]
    if processor.passage_attention == "separate":
        slots["context_passage_ids"] = [each.context_passage_ids for each in encoded]
    return slots


# Arms


@dataclass
class FirstToken:
    """What an arm has read: the first token of each answer (batch,), the cache, and refinement steps."""

    tokens: torch.Tensor
    cache: Cache | None
    recursion_depth: torch.Tensor | None = None  # (batch, num_layers, max_slots), -1 where there is no slot


def share(cache: Cache) -> Cache:
    """A copy of a cache that shares its tensors; an update of the copy makes new ones."""
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    return own


def cache_bytes(cache: Cache) -> int:
    """The size of all keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def read(model: PreTrainedModel, ids: TokenBatch, cache: Cache | None = None, **inputs: Any) -> FirstToken:
    """Reads the columns of `ids` that are not in `cache`, and scores the last of them."""
    cached = 0 if cache is None else cache.get_seq_length()
    outputs = model(
        input_ids=ids.input_ids[:, cached:],
        attention_mask=ids.attention_mask,
        position_ids=ids.position_ids[:, cached:],
        use_cache=True,
        logits_to_keep=1,
        **{CACHE: cache},
        **inputs,
    )
    # The bare base model's output has no depth.
    return FirstToken(outputs.logits[:, -1].argmax(dim=-1), cache_of(outputs), outputs.get("recursion_depth"))


@torch.no_grad()
def make_arms(
    aligner: ArcAlignerForCausalLM, base: PreTrainedModel, text: Prompts, slots: Prompts
) -> tuple[dict[str, Callable[[], FirstToken]], dict[str, Cache]]:
    """The arms of a batch by name, and by the names of two of them the caches of the prefixes that these start from."""
    text_prefix = read(base, text.prefix).cache
    prefix = slots.prefix
    slot_prefix = aligner.prefill_context(
        prefix.input_ids,
        attention_mask=prefix.attention_mask,
        position_ids=prefix.position_ids,
        gate_mode="adaptive",
        **slots.slots,
    )
    text_after, slots_after = text.prefix.then(text.tail), slots.prefix.then(slots.tail)

    def read_slots(**settings: Any) -> Callable[[], FirstToken]:
        return lambda: read(aligner, slots.whole, **slots.slots, **settings)

    arms = {
        "standard_rag": lambda: read(base, text.whole),
        "standard_rag_cached": lambda: read(base, text_after, share(text_prefix)),
        "off": read_slots(gate_mode="off"),
        "adaptive": read_slots(gate_mode="adaptive"),
        "budgeted": read_slots(gate_mode="adaptive", refinement_budget=BUDGET),
        "always": read_slots(gate_mode="always"),
        "slots_cached": lambda: read(aligner, slots_after, share(slot_prefix)),
    }
    return arms, {"standard_rag_cached": text_prefix, "slots_cached": slot_prefix}


@dataclass
class Decoding:
    """Greedy decoding after a prompt, one token at a time, with `model` called as in `generate`."""

    model: PreTrainedModel
    prompt: TokenBatch
    read: FirstToken
    ids: TokenBatch = field(init=False)
    cache: Cache = field(init=False)

    def restart(self) -> None:
        """Back to the first token."""
        self.cache = share(self.read.cache)
        self.ids = self._with(self.prompt, self.read.tokens)

    def step(self) -> None:
        """The next token of each row."""
        own = {"is_generated": True} if isinstance(self.model, ArcAlignerForCausalLM) else {}
        found = read(self.model, self.ids, self.cache, **own)
        self.ids = self._with(self.ids, found.tokens)

    @staticmethod
    def _with(ids: TokenBatch, tokens: torch.Tensor) -> TokenBatch:
        column = tokens[:, None]
        return ids.then(TokenBatch(column, torch.ones_like(column)))
