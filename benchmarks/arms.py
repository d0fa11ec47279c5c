"""The ways to read k passages that are compared, from the same prompts: each a first token and a cache to go on from.

standard_rag           the passages' text, read by the bare base model of transformers
standard_rag_cached    the same, with the keys and values of everything before the question made before
off                    slots, no refinement
adaptive               slots, the gates decide
budgeted               slots, the gates decide within `BUDGET` of the slot prefix's operations
always                 slots, each gate forced open
slots_cached           `adaptive`, with the keys and values of the slot prefix made before
plain                  `adaptive` by Algorithm 1 as it is written
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..modeling_arcaligner import ArcAlignerForCausalLM
from .plain_algorithm import plain_algorithm
from .prompts import Ids, Prompts
from .timing import Turn

ARMS = ("standard_rag", "standard_rag_cached", "off", "adaptive", "budgeted", "always", "slots_cached", "plain")
BUDGET = 0.2
# What must begin its answer as another does, up to the rounding of differently shaped products.
SAME_AS = {"standard_rag_cached": "standard_rag", "slots_cached": "adaptive", "plain": "adaptive"}


@dataclass
class FirstToken:
    """What an arm has read: the first token of each answer (batch,), the cache, and refinement steps."""

    tokens: torch.Tensor
    cache: Cache | None
    recursion_depth: torch.Tensor | None = None  # (batch, num_layers, max_slots), -1 where there is no slot


@dataclass
class Arm(Turn):
    """`run` gives a [`FirstToken`]."""

    run: Callable[[], FirstToken]


def share(cache: Cache) -> Cache:
    """A cache that goes on by itself: it begins with the same tensors, and an update makes new ones."""
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    return own


def cache_bytes(cache: Cache) -> int:
    """Of all keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def read(model: PreTrainedModel, ids: Ids, cache: Cache | None = None, **inputs: Any) -> FirstToken:
    """Reads the columns of `ids` that are not in `cache`, and scores the last of them."""
    cached = 0 if cache is None else cache.get_seq_length()
    outputs = model(
        input_ids=ids.input_ids[:, cached:],
        attention_mask=ids.attention_mask,
        position_ids=ids.position_ids[:, cached:],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **inputs,
    )
    # The bare base model's output has no depth.
    return FirstToken(outputs.logits[:, -1].argmax(dim=-1), outputs.past_key_values, outputs.get("recursion_depth"))


@torch.no_grad()
def make_arms(
    aligner: ArcAlignerForCausalLM, base: PreTrainedModel, text: Prompts, slots: Prompts
) -> tuple[dict[str, Arm], dict[str, Cache]]:
    """
    Returns:
        `dict`: The arms by name, in the order of `ARMS`.
        `dict`: The caches that two of them begin with, of their prefixes.
    """
    embeds = {"context_embeds": slots.context_embeds}
    text_prefix = read(base, text.prefix).cache
    prefix = slots.prefix
    with in_gate_mode(aligner, "adaptive"):
        slot_prefix = aligner.prefill_context(
            prefix.input_ids, slots.context_embeds, prefix.attention_mask, position_ids=prefix.position_ids
        )
    text_after, slots_after = text.prefix.then(text.tail), slots.prefix.then(slots.tail)
    modes = {
        mode: Arm(lambda: read(aligner, slots.whole, **embeds), lambda mode=mode: in_gate_mode(aligner, mode))
        for mode in ("off", "adaptive", "always")
    }
    arms = {
        "standard_rag": Arm(lambda: read(base, text.whole)),
        "standard_rag_cached": Arm(lambda: read(base, text_after, share(text_prefix))),
        "off": modes["off"],
        "adaptive": modes["adaptive"],
        "budgeted": Arm(
            lambda: read(aligner, slots.whole, refinement_budget=BUDGET, **embeds), modes["adaptive"].state
        ),
        "always": modes["always"],
        "slots_cached": Arm(lambda: read(aligner, slots_after, share(slot_prefix))),
        "plain": Arm(lambda: read(aligner, slots.whole, **embeds), lambda: plain_algorithm(aligner)),
    }
    return arms, {"standard_rag_cached": text_prefix, "slots_cached": slot_prefix}


@contextmanager
def in_gate_mode(aligner: ArcAlignerForCausalLM, mode: str) -> Iterator[None]:
    """Inside, the gates do what `mode` says."""
    before, aligner.config.gate_mode = aligner.config.gate_mode, mode
    try:
        yield
    finally:
        aligner.config.gate_mode = before


@dataclass
class Decoding:
    """Greedy decoding after a prompt that was read, a token at a time, by `model`, as `generate` calls it."""

    model: PreTrainedModel
    prompt: Ids
    read: FirstToken
    ids: Ids = field(init=False)
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
    def _with(ids: Ids, tokens: torch.Tensor) -> Ids:
        column = tokens[:, None]
        return ids.then(Ids(column, torch.ones_like(column)))
