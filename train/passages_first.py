"""A training step in two phases for independent passages: first their slots, then the turns that attend to them.

A slot of an independent passage attends to the beginning of the prompt and to its own passage, never to a turn or
another passage. The passages of a batch therefore run through the aligner first, and then the turns of each example
run through the frozen layers, over the keys and values of its slots. No row is as long as all passages of a question
together, no mask hides most of the computation, and turns never pass through the LoRA. The loss equals that of a step
in one phase (`tests/train/test_passages_first.py`).

Beyond the paper, the *attention loss* trains single layers directly, while the NLL depends on the output of the last
layer. At a position that predicts a token of the answer, it is `-log` of a share: of the attention to slots, summed
over heads, the share that goes to passages with the answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..attention_arcaligner import CACHE, check_can_separate, key_rotation, rotate_keys, separate_inputs
from ..configuration_arcaligner import are_layers
from ..encoder_arcaligner import EncoderTokenizer
from ..modeling_arcaligner import ArcAlignerCausalLMOutputWithPast, ArcAlignerForCausalLM, postprocess_logits
from ..segmentation_arcaligner import equal_spans
from .batches import drawn_tokens_per_slot, encoder_inputs, padded, placed_words

NO_SHARE = 1e-4  # added to attention, so that the logarithm is finite
# transformers' name of an attention kernel that is `sdpa`, and in addition computes the attention loss.
SDPA_WITH_LOSS = "sdpa_with_attention_loss"


@dataclass
class PassagesFirstCollator:
    """
    Makes a batch of examples in two parts. Both are packed, because padding would be more than half of them: short
    passages share a row of the first part, and an example has as many rows of turns as its turns need, each as long as
    the longest turn of the batch. Arguments are those of `ContextCollator`, and

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The backbone's. Passages with an answer are found in the
            text that it decodes.

    Returns a dictionary of

    - `passage_ids`, `passage_mask`: `torch.LongTensor` (passage_rows, longest): the beginning of the prompt and a
      context token for each slot of one or several passages;
    - `context_passage_ids`: `torch.LongTensor` (passage_rows, max_slots), the number, within its row, of the passage
      that a slot belongs to, -1 in padding;
    - `encoder_inputs`, `context_word_ids`: the slots of these rows;
    - `input_ids`, `labels`, `turn_ids`, `position_ids`: `torch.LongTensor` (turn_rows, seq_len): packed turns, each row
      of one example; `turn_ids` is -1 in padding;
    - `prefix_positions`: `torch.LongTensor` (turn_rows, num_prefix), the positions of passages, counted over all rows,
      that the turns of a row attend to: those of the beginning once, then all slots of the example; -1 in padding;
    - `prefix_moves`: `torch.LongTensor` (turn_rows, num_prefix), by how many positions their keys are moved if each
      passage directly precedes the turns (`passage_alignment="end"`);
    - `is_slot`: `torch.BoolTensor` (turn_rows, num_prefix);
    - `holds_answer`: `torch.BoolTensor` (turn_rows, max_turns, num_prefix), the slots of passages with the turn's
      answer; none if no passage has it, or if all have it;
    - `row_ids`: `list[str]`, of the examples.
    """

    context_token_id: int
    tokenizer: PreTrainedTokenizerBase
    encoder_tokenizer: EncoderTokenizer
    tokens_per_slot: Sequence[int | str] = ("segment",)
    context_words: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        row_ids = [row["row_id"] for row in rows]
        tokens_per_slot = drawn_tokens_per_slot(rows, self.tokens_per_slot)
        segments = [segment for row in rows for segment in row["segments"]]
        spans = [equal_spans(len(segment["word_ids"]), tokens_per_slot) for segment in segments]
        words = [
            segment["word_ids"][start:end] for segment, ends in zip(segments, spans, strict=True) for start, end in ends
        ]
        # Slots of a segment are adjacent, and so are segments of a passage.
        slots_of_segment = iter(map(len, spans))
        prefixes, sizes, passages_of_row = [], [], []
        for row in rows:
            counts: dict[int, int] = {}
            for segment in row["segments"]:
                counts[segment["document"]] = counts.get(segment["document"], 0) + next(slots_of_segment)
            passages_of_row.append(list(counts))
            sizes += counts.values()
            prefixes += [tuple(row["head"])] * len(counts)
        packed = PackedPassages.of(prefixes, sizes)
        slot_indices = np.concatenate([packed.slot_indices(n) for n in range(len(sizes))])  # (num_slots,)
        slot_indices = torch.from_numpy(slot_indices)
        shape = len(packed.prefixes), packed.max_slots
        passage_ids = [
            [*prefix_ids, *[self.context_token_id] * size]
            for prefix_ids, size in zip(packed.prefixes, packed.used, strict=True)
        ]
        numbers = np.repeat(packed.numbers, sizes)  # (num_slots,)
        context_passage_ids = torch.full((shape[0] * shape[1],), -1)
        context_passage_ids[slot_indices] = torch.from_numpy(numbers)
        batch = {
            "passage_ids": padded(passage_ids, 0),
            "passage_mask": padded([[1] * len(ids) for ids in passage_ids], 0),
            "context_passage_ids": context_passage_ids.view(shape),
            "encoder_inputs": encoder_inputs(
                self.encoder_tokenizer, segments, tokens_per_slot, slot_indices, shape[0] * shape[1]
            ),
            **self._turns(rows, passages_of_row, packed),
            "row_ids": row_ids,
        }
        if self.context_words:
            batch["context_word_ids"] = placed_words(words, slot_indices, shape)
        return batch

    def _turns(
        self, rows: list[dict[str, Any]], passages_of_row: list[list[int]], packed: "PackedPassages"
    ) -> dict[str, torch.Tensor]:
        """The part of the batch for the second phase: the turns, and which slots they attend to."""
        names = ("input_ids", "labels", "turn_ids", "position_ids", "prefix_positions", "prefix_moves", "is_slot")
        columns: dict[str, list[list[int]]] = {name: [] for name in names}
        capacity = max(len(turn["input_ids"]) for row in rows for turn in row["turns"])
        # By row and turn: which of the row's prefix positions belong to a passage with the answer.
        answer_masks, first = [], 0
        for row, passages in zip(rows, passages_of_row, strict=True):
            numbers, length = range(first, first + len(passages)), len(row["head"])
            num_slots = [packed.sizes[number] for number in numbers]
            prefix_positions = np.concatenate(
                [packed.prefix_text_indices(first), *map(packed.position_indices, numbers)]
            ).tolist()
            moves = [0] * length + np.repeat([max(num_slots) - count for count in num_slots], num_slots).tolist()
            begin = length + max(num_slots)  # positions of a turn continue after the longest passage
            texts = self._texts(row, passages)
            for turns in turn_rows(row["turns"], capacity):
                for name in ("input_ids", "labels"):
                    columns[name].append([token for turn in turns for token in turn[name]])
                counts = [len(turn["input_ids"]) for turn in turns]
                columns["turn_ids"].append([number for number, count in enumerate(counts) for _ in range(count)])
                columns["position_ids"].append([begin + offset for count in counts for offset in range(count)])
                columns["prefix_positions"].append(prefix_positions)
                columns["prefix_moves"].append(moves)
                columns["is_slot"].append([0] * length + [1] * sum(num_slots))
                answer_masks.append([])
                for turn in turns:
                    answer = self._plain([label for label in turn["labels"] if label >= 0])
                    holds = [bool(answer) and answer in text for text in texts]
                    if all(holds):  # all passages contain it: no preference to learn
                        holds = [False] * len(holds)
                    answer_masks[-1].append([0] * length + np.repeat(holds, num_slots).tolist())
            first += len(passages)
        padding = {"labels": -100, "turn_ids": -1, "prefix_positions": -1}
        batch = {name: padded(values, padding.get(name, 0)) for name, values in columns.items()}
        batch["is_slot"] = batch["is_slot"].bool()
        holds_answer = torch.zeros(
            len(answer_masks), max(map(len, answer_masks)), batch["prefix_positions"].shape[1], dtype=torch.bool
        )
        for number, turns in enumerate(answer_masks):
            holds_answer[number, : len(turns), : len(turns[0])] = torch.tensor(turns, dtype=torch.bool)
        return batch | {"holds_answer": holds_answer}

    def _texts(self, row: dict[str, Any], passages: list[int]) -> list[str]:
        """The texts of the passages of an example."""
        words: dict[int, list[int]] = {number: [] for number in passages}
        for segment in row["segments"]:
            words[segment["document"]] += segment["word_ids"]
        return [self._plain(ids) for ids in words.values()]

    def _plain(self, ids: list[int]) -> str:
        return " ".join(self.tokenizer.decode(ids, skip_special_tokens=True).lower().split())


class PackedPassages(NamedTuple):
    """Where the passages of a batch are: rows with the beginning of a prompt, and the slots of passages after it."""

    prefixes: list[tuple[int, ...]]  # of each row, the ids before the slots
    used: list[int]  # of each row, its slots
    sizes: Sequence[int]  # of each passage, its slots
    rows: list[int]  # of each passage
    starts: list[int]  # of each passage: the slots before it in its row
    numbers: list[int]  # of each passage: the passages before it in its row
    max_slots: int  # of a row
    width: int  # positions of the longest row

    @classmethod
    def of(cls, prefixes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> "PackedPassages":
        """Pack passages of `sizes` slots, the largest first, each into the first row with room for it and the same
        beginning. No row is longer than the longest passage needs.

        >>> PackedPassages.of([(7,)] * 4, [3, 5, 2, 4]).rows
        [2, 0, 2, 1]
        """
        width = max(len(prefix_ids) + size for prefix_ids, size in zip(prefixes, sizes, strict=True))
        row_prefixes, used, counts = [], [], []  # of each row
        rows, starts, numbers = ([0] * len(sizes) for _ in range(3))
        for passage in sorted(range(len(sizes)), key=lambda passage: -sizes[passage]):
            prefix_ids, size = prefixes[passage], sizes[passage]
            free = width - len(prefix_ids) - size
            row = next(
                (n for n, slots in enumerate(used) if slots <= free and row_prefixes[n] == prefix_ids), len(used)
            )
            if row == len(used):
                row_prefixes.append(prefix_ids)
                used.append(0)
                counts.append(0)
            rows[passage], starts[passage], numbers[passage] = row, used[row], counts[row]
            used[row] += size
            counts[row] += 1
        return cls(row_prefixes, used, sizes, rows, starts, numbers, max(used), width)

    def slot_indices(self, passage: int) -> np.ndarray:
        """The flat indices of a passage's slots among (passage_rows, max_slots)."""
        return self.rows[passage] * self.max_slots + self.starts[passage] + np.arange(self.sizes[passage])

    def prefix_text_indices(self, passage: int) -> np.ndarray:
        """Where the beginning of the prompt is in the row of a passage: flat indices among (passage_rows, longest)."""
        row = self.rows[passage]
        return row * self.width + np.arange(len(self.prefixes[row]))

    def position_indices(self, passage: int) -> np.ndarray:
        """Where a passage's slots are: flat indices among (passage_rows, longest)."""
        row = self.rows[passage]
        start = row * self.width + len(self.prefixes[row]) + self.starts[passage]
        return start + np.arange(self.sizes[passage])


def turn_rows(turns: Sequence[dict[str, list[int]]], capacity: int) -> list[list[dict[str, list[int]]]]:
    """The turns of an example in rows of at most `capacity` tokens, in order.

    >>> [len(row) for row in turn_rows([{"input_ids": [1] * size} for size in (4, 5, 3, 2, 9)], 9)]
    [2, 2, 1]
    """
    rows, free = [], 0
    for turn in turns:
        if (size := len(turn["input_ids"])) > free:
            rows.append([])
            free = capacity
        rows[-1].append(turn)
        free -= size
    return rows


def check_passages_first(
    model: ArcAlignerForCausalLM, args: TrainingArguments | None, attention_layers: Sequence[int] = ()
) -> None:
    """Raises `ValueError` for a model or arguments that exclude a step in two phases, and for `attention_layers` that
    the model does not have."""
    if model.config.passage_attention != "separate":
        raise ValueError(
            f"`passage_attention` is {model.config.passage_attention!r}, so passages attend to earlier ones, but "
            "`passages_first` needs passages that do not attend to each other. Set `aligner: {passage_attention: "
            "separate}`, or leave `passages_first` out."
        )
    check_can_separate(model.config.text_config)
    num_layers = model.config.text_config.num_hidden_layers
    if attention_layers and not are_layers([*attention_layers], num_layers):
        raise ValueError(
            f"`attention_loss_layers` is {[*attention_layers]}; expected numbers of layers from 0 to {num_layers - 1}, "
            "in ascending order and without repetition."
        )
    if args is not None and args.gradient_checkpointing:
        raise ValueError(
            "`activation_checkpointing` (in older versions of transformers `gradient_checkpointing`) is true, so no "
            "keys and values are stored, but `passages_first` needs keys and values. Leave one of the two out."
        )


def run_passages_first(
    model: ArcAlignerForCausalLM,
    batch: dict[str, torch.Tensor],
    slots: dict[str, torch.Tensor],
    num_items_in_batch: torch.Tensor | int | None = None,
    attention_layers: Sequence[int] = (),
    with_logits: bool = False,
) -> tuple[ArcAlignerCausalLMOutputWithPast, torch.Tensor | None]:
    """Run both phases of a step.

    Args:
        model ([`ArcAlignerForCausalLM`]): With independent passages (`passage_attention="separate"`).
        batch: Of [`PassagesFirstCollator`], on the model's device.
        slots: `context_embeds` (passage_rows, max_slots, encoder_hidden_size), `context_word_ids` and
            `context_passage_ids` of the batch.
        num_items_in_batch: Divisor of the NLL. Default: the number of targets.
        attention_layers: Layers of the attention loss.
        with_logits: Whether the output has `logits` (turn_rows, seq_len, vocab_size). The loss needs none.

    Returns:
        The output, with the NLL as its `loss` and the `recursion_depth` (passage_rows, num_layers, max_slots) of the
        slots; and the attention loss, `None` without `attention_layers` and if no passage can be preferred.
    """
    text_config, cache = model.config.text_config, DynamicCache()
    numbers = slots["context_passage_ids"]
    mask, positions = separate_inputs(
        batch["passage_ids"] == model.config.context_token_id, numbers, batch["passage_mask"], None, None, model.dtype
    )
    # Without `context_passage_ids`: rows share passages of several examples, so their keys are moved afterwards.
    passage_outputs = model.model(
        input_ids=batch["passage_ids"],
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        **{CACHE: cache},
        **{name: value for name, value in slots.items() if name != "context_passage_ids"},
    )
    turn_ids = batch["turn_ids"]
    moves = batch["prefix_moves"] if model.config.passage_alignment == "end" else None
    attention_loss = AttentionLoss(batch, attention_layers) if attention_layers else None
    with nullcontext({}) if attention_loss is None else attention_loss.observe(model.model.backbone) as options:
        outputs = model.model.backbone(
            input_ids=batch["input_ids"],
            attention_mask=turns_mask(turn_ids, batch["prefix_positions"], model.dtype),
            position_ids=batch["position_ids"],
            use_cache=True,
            **{CACHE: select_prefix(cache, batch["prefix_positions"], text_config, moves)},
            **options,
        )
    loss = model.targets_loss(outputs.last_hidden_state, batch["labels"], num_items_in_batch)
    attention = None if attention_loss is None else attention_loss.value(outputs)
    logits = None
    if with_logits:
        logits = postprocess_logits(model.lm_head(outputs.last_hidden_state), text_config)
    output = ArcAlignerCausalLMOutputWithPast(loss=loss, logits=logits, recursion_depth=passage_outputs.recursion_depth)
    return output, attention


def select_prefix(
    cache: Cache, positions: torch.LongTensor, config: PreTrainedConfig, moves: torch.LongTensor | None = None
) -> DynamicCache:
    """Select from `cache` the keys and values at the positions `positions` (batch, num_prefix), counted over all rows.
    Where `positions` is -1 they are arbitrary. Keys are moved by `moves` (batch, num_prefix) positions, if given;
    `config` is the backbone's."""
    selection, (batch, num_prefix) = DynamicCache(), positions.shape
    flat = positions.clamp(min=0).flatten()
    rotation = None if moves is None else key_rotation(moves[:, None], config)  # each (batch, 1, num_prefix, head_dim)
    for number, layer in zip(range(config.num_hidden_layers), cache.layers, strict=True):
        selected = []
        for states in (layer.keys, layer.values):  # (passages, heads, longest, head_dim)
            rows = states.transpose(1, 2).flatten(0, 1).index_select(0, flat)  # (batch * num_prefix, heads, head_dim)
            selected.append(rows.view(batch, num_prefix, *rows.shape[1:]).transpose(1, 2))
        if rotation is not None:
            selected[0] = rotate_keys(selected[0], *rotation)
        selection.update(*selected, number)
    return selection


def turns_mask(turn_ids: torch.LongTensor, prefix_positions: torch.LongTensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask of the turns: a position attends to its prefix (the beginning of the prompt and the slots
    of its example), and to its own turn up to itself. 0 where it attends and the lowest number elsewhere, (batch, 1,
    seq_len, num_prefix + seq_len); `turn_ids` (batch, seq_len), `prefix_positions` -1 in padding."""
    (batch, seq_len), index = turn_ids.shape, torch.arange(turn_ids.shape[1], device=turn_ids.device)
    before = (prefix_positions >= 0)[:, None, :].expand(batch, seq_len, -1)
    in_turn = (turn_ids[:, :, None] == turn_ids[:, None, :]) & (index[None, :] <= index[:, None])
    is_visible = torch.cat([before, in_turn], dim=2)[:, None]
    mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
    return mask.masked_fill(~is_visible, torch.finfo(dtype).min)


class AttentionLoss:
    """Mean of `-log` of the share of slot attention that goes to passages with the answer. It is the mean over layers,
    and over positions that predict an answer which some passages contain and others do not.

    With the kernel `eager`, layers return all their attention weights. `sdpa` neither returns nor stores them, which
    saves memory; then the weights of the few positions that predict an answer are computed again.

    Args:
        batch: Of [`PassagesFirstCollator`].
        layers (`Sequence[int]`): Their indices.
    """

    def __init__(self, batch: dict[str, torch.Tensor], layers: Sequence[int]):
        turns = batch["turn_ids"]  # (turn_rows, seq_len)
        predicts = torch.nn.functional.pad(batch["labels"][:, 1:] >= 0, (0, 1))
        num_prefix = batch["prefix_positions"].shape[1]
        holds = batch["holds_answer"].gather(1, turns.clamp(min=0)[:, :, None].expand(-1, -1, num_prefix))
        has_answer = predicts & holds.any(dim=2)
        width = int(has_answer.sum(dim=1).max())
        # The positions that predict an answer come first: (turn_rows, width).
        self.positions = has_answer.int().argsort(dim=1, descending=True, stable=True)[:, :width]
        self.is_real = has_answer.gather(1, self.positions)
        self.holds_answer = holds.gather(1, self.positions[:, :, None].expand(-1, -1, num_prefix))
        self.is_slot = batch["is_slot"][:, None]  # (turn_rows, 1, num_prefix)
        self.layers, self.losses = tuple(layers), []

    @contextmanager
    def observe(self, backbone: PreTrainedModel) -> Iterator[dict[str, Any]]:
        """Arguments of the forward of a `backbone`, with which its layers return weights or call `add_layer`."""
        kernel = backbone.config._attn_implementation
        if kernel == "eager":
            yield {"output_attentions": True}
            return
        backbone.set_attn_implementation(SDPA_WITH_LOSS)
        try:
            yield {"attention_loss": self}
        finally:
            backbone.set_attn_implementation(kernel)

    def value(self, outputs: BaseModelOutputWithPast) -> torch.Tensor | None:
        """The loss, for the outputs of that forward; `None` if no passage can be preferred."""
        if self.positions.shape[1] == 0:
            return None
        for layer in self.layers if outputs.attentions is not None else ():
            weights = outputs.attentions[layer]  # (turn_rows, heads, seq_len, num_prefix + seq_len)
            self._add(weights.gather(2, self._index(weights)))
        assert len(self.losses) == len(self.layers), "some layers did not compute their attention loss"
        return torch.stack(self.losses).mean()

    def add_layer(self, layer: int, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scaling: float) -> None:
        """Add the loss of a layer, if it is one of `layers`. `query` is (turn_rows, heads, seq_len, head_dim), `key`
        (turn_rows, kv_heads, num_prefix + seq_len, head_dim), both rotated to their positions."""
        if layer not in self.layers or self.positions.shape[1] == 0:
            return
        chosen = query.gather(2, self._index(query))  # (turn_rows, heads, width, head_dim)
        grouped = chosen.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # (turn_rows, kv_heads, group * width, ...)
        scores = (grouped @ key.transpose(2, 3)).view(*chosen.shape[:3], -1) * scaling
        scores = scores + mask.gather(2, self._index(mask))
        dtype = torch.promote_types(scores.dtype, torch.float32)
        self._add(torch.nn.functional.softmax(scores, dim=-1, dtype=dtype))

    def _index(self, states: torch.Tensor) -> torch.LongTensor:
        """Selects the positions that predict an answer from `states` (turn_rows, heads, seq_len, size)."""
        return self.positions[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])

    def _add(self, weights: torch.Tensor) -> None:
        """Add the loss of a layer with these attention `weights` (turn_rows, heads, width, num_prefix + seq_len)."""
        slot_attention = weights[..., : self.is_slot.shape[2]].float().sum(dim=1)  # (turn_rows, width, num_prefix)
        in_slots = (slot_attention * self.is_slot).sum(dim=2)  # (turn_rows, width)
        in_answers = (slot_attention * self.holds_answer).sum(dim=2)
        self.losses.append((torch.log(in_slots + NO_SHARE) - torch.log(in_answers + NO_SHARE))[self.is_real].mean())


def sdpa_with_attention_loss(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention_loss: AttentionLoss | None = None,
    **options,
) -> tuple[torch.Tensor, None]:
    """The attention kernel `sdpa` of a layer, which adds the layer's loss to an `attention_loss`."""
    if attention_loss is not None:
        attention_loss.add_layer(module.layer_idx, query, key, attention_mask, options["scaling"])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(SDPA_WITH_LOSS, sdpa_with_attention_loss)
