"""What an arm has to do: operations and bytes by formula, and the shortest time in which a machine could do it.

The operations are those of the method and not of its code: each product of a weight matrix with a row, attention to
what comes before, one row of logits. The bytes are the weights, once and again for each refinement step of a layer, and
the keys and values. No time is shorter than the greater of both over what the machine does in a second.
"""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel

from ..lora_arcaligner import ADAPTER_NAME, slot_lora_layers
from ..modeling_arcaligner import ArcAlignerForCausalLM, find_decoder_layers
from .models import base_weights
from .prompts import Prompts


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes read from memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def limit(self, peaks: dict[str, float]) -> float:
        """Seconds that a machine with these peaks needs at least."""
        return max(self.flops / peaks["flops_per_second"], self.bytes / peaks["bytes_per_second"])


@dataclass(frozen=True)
class Sizes:
    """What the work of a model follows from; weights and LoRA are those of one layer's linears."""

    layers: int
    weights: int
    lora: int
    head: int  # hidden * vocab
    hidden: int
    attention: int  # query heads * head_dim
    keys_values: int  # key-value heads * head_dim * 2
    itemsize: int
    lora_itemsize: int
    steps: int
    gated: int

    @classmethod
    def of(cls, aligner: ArcAlignerForCausalLM, base: PreTrainedModel) -> "Sizes":
        config = base.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        lora = [
            weight
            for module in slot_lora_layers(aligner)
            for weight in (module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight)
        ]
        return cls(
            layers=config.num_hidden_layers,
            weights=base_weights(find_decoder_layers(base)),
            lora=sum(weight.numel() for weight in lora) // config.num_hidden_layers,
            head=config.hidden_size * config.vocab_size,
            hidden=config.hidden_size,
            attention=config.num_attention_heads * head_dim,
            keys_values=config.num_key_value_heads * head_dim * 2,
            itemsize=base.dtype.itemsize,
            lora_itemsize=lora[0].dtype.itemsize if lora else 0,
            steps=aligner.config.max_refinement_steps,
            gated=len(aligner.config.gated_layers),
        )

    def reading(self, new: list[int], cached: list[int]) -> Work:
        """Rows of `new` tokens after `cached` ones, through all layers and, for the last token, the head."""
        flops = sum(
            self.layers * (2 * self.weights * n + 4 * self.attention * (c * n + n * n / 2)) + 2 * self.head
            for n, c in zip(new, cached, strict=True)
        )
        rows = sum(new) + sum(cached)  # keys and values are written or read once
        weights = self.layers * self.weights + self.head
        return Work(flops, self.itemsize * (weights + self.layers * self.keys_values * rows))

    def slot_lora(self, slots: int) -> Work:
        """The LoRA of all layers on `slots` rows."""
        return Work(2.0 * self.layers * self.lora * slots, self.layers * self.lora * self.lora_itemsize)

    def refinement(self, depth: torch.Tensor, text: list[int]) -> Work:
        """
        Steps of slots on their own, after the keys and values of the text and of closed slots are made anew once a
        layer (the closed slots' without LoRA).

        Args:
            depth (`torch.Tensor` of shape `(batch, num_layers, max_slots)`): Steps, -1 where there is no slot.
            text (`list[int]`): Rows of text before the slots of each row.
        """
        slots = (depth[:, 0] >= 0).sum(dim=1)  # (batch,)
        taken = depth.clamp(min=0).sum(dim=2)  # (batch, num_layers)
        before = torch.tensor(text, device=depth.device)  # (batch,)
        each = 2 * (self.weights + self.lora) + 4 * self.attention * (before + slots)  # (batch,)
        fixed = (before + slots)[:, None] - (depth > 0).sum(dim=2)  # (batch, num_layers), rows that stay
        once = 2 * self.hidden * self.keys_values * fixed
        flops = (taken * each[:, None]).sum() + ((taken > 0) * once).sum()
        passes = int(depth.clamp(min=0).amax(dim=(0, 2)).sum())
        return Work(float(flops), passes * self._layer_bytes)

    def plain_refinement(self, lengths: list[int], slots: int) -> Work:
        """All steps of all rows of prompts of these lengths, `slots` of them slots."""
        each = sum(2 * self.weights * n + 2 * self.attention * n * n for n in lengths) + 2 * self.lora * slots
        return Work(float(self.steps * self.gated * each), self.steps * self.gated * self._layer_bytes)

    @property
    def _layer_bytes(self) -> int:
        return self.weights * self.itemsize + self.lora * self.lora_itemsize


def work_of_arms(sizes: Sizes, text: Prompts, slots: Prompts, depths: dict[str, torch.Tensor]) -> dict[str, Work]:
    """
    What each arm has to do until the first token.

    Args:
        sizes ([`Sizes`]): Of the models.
        text, slots ([`Prompts`]): The batch in both forms.
        depths (`dict[str, torch.Tensor]`): Steps that `adaptive`, `budgeted` and `always` took.
    """
    none = [0] * len(text.whole.lengths)
    per_row = (depths["adaptive"][:, 0] >= 0).sum(dim=1).tolist()
    before = [length - count for length, count in zip(slots.prefix.lengths, per_row, strict=True)]
    off = sizes.reading(slots.whole.lengths, none) + sizes.slot_lora(sum(per_row))
    return {
        "standard_rag": sizes.reading(text.whole.lengths, none),
        "standard_rag_cached": sizes.reading(text.tail.lengths, text.prefix.lengths),
        "off": off,
        "adaptive": off + sizes.refinement(depths["adaptive"], before),
        "budgeted": off + sizes.refinement(depths["budgeted"], before),
        "always": off + sizes.refinement(depths["always"], before),
        "slots_cached": sizes.reading(slots.tail.lengths, slots.prefix.lengths),
        "plain": off + sizes.plain_refinement(slots.whole.lengths, sum(per_row)),
    }


def flop_counter() -> FlopCounterMode:
    """Counts what is computed inside, masked attention as if it were not; the CPU's attention kernel included."""

    def attention(query, key, value, *args, **kwargs) -> int:
        return sdpa_flop_count(query, key, value)

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={on_cpu: attention})
