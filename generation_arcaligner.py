"""Generation with slots: they are read with the prompt, reused by any question, and never written.

`generate` is transformers' own. What is added here: slots reach the model with the prompt and no later, no logits
processor or candidate lookup takes a slot for a token, and passages that are read apart are read by themselves and
joined (`read_passages`, `join_keys_values`).
"""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.logits_process import SuppressTokensLogitsProcessor
from transformers.utils import logging

from .base_model_arcaligner import CACHE, cache_of, one_cache, share_file, tensors_digest
from .configuration_arcaligner import REFINEMENT_SETTINGS, check_gates, check_ids, check_length
from .slot_rows_arcaligner import (
    SlotRows,
    can_separate,
    pad_passage_ids,
    pad_words,
    passage_positions,
    place_passage_ids,
    separate_passages,
)

logger = logging.get_logger(__name__)

# A variable of the context, not an argument of `generate`: threads that share a model do not see each other's.
_recorded_depths: ContextVar[list[torch.Tensor] | None] = ContextVar("recorded_depths", default=None)


def text_for_slots(input_ids: torch.LongTensor, context_token_id: int) -> torch.LongTensor:
    """`input_ids` (batch, seq_len) with the row's first text token in the place of each slot.

    >>> text_for_slots(torch.tensor([[9, 9, 4, 5]]), context_token_id=9)
    tensor([[4, 4, 4, 5]])
    """
    if input_ids.shape[1] == 0:
        return input_ids
    is_slot = input_ids == context_token_id
    first_text = input_ids.gather(1, is_slot.to(torch.int8).argmin(dim=1, keepdim=True))  # (batch, 1)
    return torch.where(is_slot, first_text, input_ids)


def check_slots_after_cache(config, rows: SlotRows, cache: Cache | None, context_passage_ids, *wanted) -> None:
    """Raises `ValueError` for slots after cached text where that is not the same as reading both at once; `wanted` are
    the `REFINEMENT_SETTINGS` of the call."""
    if rows.slot_rows.shape[0] == 0 or cache is None or cache.get_seq_length() == 0:
        return
    if config.refines(*wanted):
        reason = "refinement needs the deeper states of earlier tokens, which a cache does not hold"
    elif config.passage_attention == "separate" and context_passage_ids is not None:
        reason = "the slots of several passages need the positions of the whole prompt"
    else:
        return
    raise ValueError(
        f"Found context tokens after {cache.get_seq_length()} cached tokens, but {reason}. Start with an "
        "empty cache, or continue a cached slot prefix with plain text."
    )


class SlotGenerationMixin(GenerationMixin):
    """`GenerationMixin` for prompts with context slots."""

    def prompt_positions(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        context_passage_ids: torch.LongTensor | None = None,
    ) -> torch.LongTensor:
        """The position of each token of a prompt (batch, seq_len): counted after the padding, and behind the longest
        passage where passages are read apart, `context_passage_ids` (batch, max_slots)."""
        is_real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if context_passage_ids is None or self.config.passage_attention == "joint":
            return (is_real.long().cumsum(dim=1) - 1).clamp(min=0)
        is_slot = input_ids == self.config.context_token_id
        return passage_positions(place_passage_ids(is_slot, context_passage_ids), is_real)

    def slot_prefix_store(self, processor, **options):
        """Keeps what was read of passages for further questions: a [`SlotPrefixStore`], with its options."""
        return processor.slot_prefix_store(self, **options)  # the processor's code: only it reads passages

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        inputs_embeds=None,
        context_embeds=None,
        context_word_ids=None,
        context_passage_ids=None,
        is_first_iteration=False,
        gate_mode=None,
        gate_threshold=None,
        max_refinement_steps=None,
        refinement_budget=None,
        cache=None,
        **kwargs,
    ):
        cache = one_cache(past_key_values, cache)
        if context_passage_ids is not None and inputs_embeds is None:
            kwargs["position_ids"] = self.prompt_positions(input_ids, attention_mask, context_passage_ids)
        model_inputs = super().prepare_inputs_for_generation(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **{CACHE: cache},
            **kwargs,
        )
        # Slots are read once, with the prompt. A generated token is not searched for slots: the host would wait.
        new_ids = model_inputs.get("input_ids")
        is_one = new_ids is not None and new_ids.shape[1] == 1
        if is_one and cache is not None and not is_first_iteration:
            model_inputs["is_generated"] = True
            return model_inputs
        continues = cache is not None and cache.get_seq_length() > 0
        has_slots = new_ids is not None and bool((new_ids == self.config.context_token_id).any())
        if context_embeds is not None and (has_slots or not continues):
            model_inputs["context_embeds"] = context_embeds
            model_inputs["context_word_ids"] = context_word_ids
            model_inputs["context_passage_ids"] = context_passage_ids
            wanted = (gate_mode, gate_threshold, max_refinement_steps, refinement_budget)
            model_inputs |= dict(zip(REFINEMENT_SETTINGS, wanted, strict=True))
        return model_inputs

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        depth = getattr(outputs, "recursion_depth", None)
        if depth is not None and (recorded := _recorded_depths.get()) is not None:
            recorded.append(depth)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    @contextlib.contextmanager
    def recorded_depths(self) -> Iterator[list[torch.Tensor]]:
        """Inside, `generate` adds to the list that this gives the `recursion_depth` of the slots it reads, (batch *
        num_beams, num_layers, max_slots), as soon as they are read. Another thread needs a copy of this context:
        `Thread(target=contextvars.copy_context().run, args=(model.generate,), kwargs=inputs)`."""
        depths: list[torch.Tensor] = []
        token = _recorded_depths.set(depths)
        try:
            yield depths
        finally:
            _recorded_depths.reset(token)

    def generate(self, inputs=None, *args, **kwargs):
        """`GenerationMixin.generate`. The context token is never generated and no logits processor sees it.

        How slots are refined can be set for a call: `gate_mode`, `gate_threshold`, `max_refinement_steps` instead of
        the configuration's, and `refinement_budget`, the maximum number of operations as a share of the prefill up to
        the last slot. Slots that are already in the cache are not changed; a warning says so.

        Raises:
            `ValueError`: `prefill_chunk_size`, since slots are refined together with all text before them; an invalid
                setting of the gates or budget.
        """
        input_ids, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
        cache = one_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        kwargs |= {} if cache is None else {CACHE: cache}
        if input_ids is not None:
            check_ids(input_ids, vocab_size=self.config.text_config.vocab_size, others=(self.config.context_token_id,))
            if input_ids.numel() == 0 and kwargs.get("inputs_embeds") is None:
                raise ValueError(f"`input_ids` has shape {tuple(input_ids.shape)}; expected a prompt in each row.")
            if kwargs.get("context_embeds") is None and cache is None:  # text alone
                check_length(input_ids.shape[1], "The prompt", self.config.text_config)
        if not (mask is None or isinstance(mask, dict) or isinstance(mask, torch.Tensor) and mask.dim() > 1):
            found = f" of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else ""
            raise ValueError(f"`attention_mask` is a {type(mask).__name__}{found}; expected a tensor (batch, seq_len).")
        settings = {name: kwargs[name] for name in REFINEMENT_SETTINGS if kwargs.get(name) is not None}
        check_gates(**settings)
        if settings and self._has_read_slots(input_ids, cache):
            logger.warning_once(
                f"{', '.join(f'`{name}`' for name in settings)} of `generate` changes no slot that is in "
                "`past_key_values` already. For other gates, give them to `store.prepare`."
            )
        generation_config = kwargs.get("generation_config") or self.generation_config
        if kwargs.get("prefill_chunk_size", generation_config.prefill_chunk_size) is not None:
            raise ValueError(
                "`prefill_chunk_size` is set, but slots are refined together with all text before them and cannot be "
                "read in chunks. Leave it unset: a compressed prompt is short."
            )
        return super().generate(inputs, *args, **kwargs)

    def _has_read_slots(self, input_ids: torch.LongTensor | None, cache: Cache | None) -> bool:
        """Whether a prompt (batch, seq_len) has slots and all of them are in a cache already."""
        if input_ids is None or cache is None:
            return False
        is_slot, length = input_ids == self.config.context_token_id, int(cache.get_seq_length())
        return bool(is_slot[:, :length].any()) and not bool(is_slot[:, length:].any())

    def _get_logits_processor(self, *args, **kwargs) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        token_id, vocab_size = self.config.context_token_id, self.config.text_config.vocab_size
        if token_id < vocab_size:
            processors.append(SuppressTokensLogitsProcessor([token_id], device=self.device))
        return _BlindToSlots(processors, token_id)

    def _get_candidate_generator(self, *args, **kwargs):
        candidates = super()._get_candidate_generator(*args, **kwargs)
        if isinstance(candidates, PromptLookupCandidateGenerator):
            return _CandidatesBlindToSlots(candidates, self.config.context_token_id)
        return candidates


class _BlindToSlots(LogitsProcessorList):
    """Shows processors a prompt whose slots repeat the first text token of the row, so that no slot is penalized."""

    def __init__(self, processors: LogitsProcessorList, context_token_id: int):
        super().__init__(processors)
        self.context_token_id = context_token_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.FloatTensor:
        return super().__call__(text_for_slots(input_ids, self.context_token_id), scores, **kwargs)


class _CandidatesBlindToSlots(CandidateGenerator):
    """Looks candidates up in a prompt whose slots repeat the row's first text token, so that none is a slot."""

    def __init__(self, candidates: CandidateGenerator, context_token_id: int):
        self.candidates = candidates
        self.context_token_id = context_token_id

    def get_candidates(self, input_ids: torch.LongTensor):
        text_ids = text_for_slots(input_ids, self.context_token_id)
        found, scores = self.candidates.get_candidates(text_ids)
        return torch.cat([input_ids, found[:, input_ids.shape[1] :]], dim=1), scores

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        self.candidates.update_candidate_strategy(input_ids, scores, num_matches)


# Keys and values of passages: read and joined. One passage, or all that are read jointly, is a tensor
# (num_layers, 2, key_value_heads, num_slots, head_dim).

# Slots of a batch of passages, padding included: large enough for fast products, small enough to hold little padding.
SLOTS_PER_BATCH = 1024
# Slots of a row that several passages share: attention across passages is computed and thrown away.
SLOTS_PER_ROW = 256


def entry_shape(config: PreTrainedConfig, num_slots: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
    """The shape of keys and values that a backbone has of some slots, or of bytes of [`from_int8`]."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, config.num_key_value_heads, num_slots, head_dim + 4 * (dtype == torch.int8)


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


def from_int8(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values (..., head_dim) in `dtype`, of those kept as they are or as bytes (..., head_dim + 4): numbers of
    steps, and the float32 that a step is."""
    if kept.dtype != torch.int8:
        return kept
    return (kept[..., :-4].float() * kept[..., -4:].contiguous().view(torch.float32)).to(dtype)


def to_int8(keys_values: torch.Tensor) -> torch.Tensor:
    """Keys and values (..., head_dim) as bytes for `from_int8`: steps of a slot and head, as many as bytes tell."""
    step = keys_values.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return torch.cat([(keys_values.float() / step).round().to(torch.int8), step.contiguous().view(torch.int8)], dim=-1)


def first_slots(parts: list[torch.Tensor], most: int | None) -> list[torch.Tensor]:
    """The text before the slots and the first `most` slots: what follows a slot in its passage does not change it."""
    kept, room = parts[:1], most
    for part in parts[1:]:
        if room is not None:
            part = part[:, :, :, :room]
            room -= part.shape[3]
        if part.shape[3]:
            kept.append(part)
    return kept


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
            read = [from_int8(part[layer_idx], joined.dtype) for part in parts]
            torch.cat(read, dim=2, out=joined[:, row, :, padding:length])
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
    return keys_values_of(cache_of(outputs), 0, 0, len(ids))


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
    lengths = [len(passage.context_embeds) for passage in passages]
    shares = can_separate(model.config.text_config) and not model.config.refines(**settings)
    entries: list[torch.Tensor | None] = [None] * len(passages)
    batch: list[list[int]] = []
    for row in share_rows(lengths, -(-sum(lengths) // SLOTS_PER_ROW) if shares else len(lengths)):
        width = sum(lengths[number] for number in (batch or [row])[0])  # the first row is the longest
        if (len(batch) + 1) * width > SLOTS_PER_BATCH and batch:
            _read_batch(model, head_ids, head, passages, batch, entries, settings)
            batch = []
        batch.append(row)
    if batch:
        _read_batch(model, head_ids, head, passages, batch, entries, settings)
    return entries


def share_rows(lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    """Which passages of these lengths share a row, by their numbers: all rows nearly as long, the longest first.

    >>> share_rows([30, 10, 25, 20], num_rows=2)
    [[2, 3], [0, 1]]
    """
    rows, sizes = [[] for _ in range(num_rows)], [0] * num_rows
    # The longest goes first, each into the emptiest row: close to equal rows, which need the least padding.
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        emptiest = sizes.index(min(sizes))
        rows[emptiest].append(number)
        sizes[emptiest] += lengths[number]
    return [rows[row] for row in sorted(range(num_rows), key=sizes.__getitem__, reverse=True) if rows[row]]


def _read_batch(model, head_ids, head, passages, batch: list[list[int]], entries: list, settings: dict) -> None:
    """Reads the rows of `batch`, each the numbers of its passages, into their places in `entries`."""
    rows, device, start = [[passages[number] for number in row] for row in batch], model.device, len(head_ids)
    continues = not model.config.refines(**settings)
    numbers = pad_passage_ids(
        [torch.cat([torch.full((len(own.context_embeds),), number) for number, own in enumerate(row)]) for row in rows]
    )  # (batch, max_slots); rows are padded at the end
    is_slot = numbers >= 0
    ids = torch.where(is_slot, model.config.context_token_id, 0)  # padding may be any id: it is masked
    mask, positions = torch.cat([torch.ones(len(rows), start).long(), is_slot.long()], dim=1), None
    if not continues:
        ids = torch.cat([torch.tensor([list(head_ids)]).expand(len(rows), -1).long(), ids], dim=1)
    elif max(map(len, rows)) > 1:  # else a plain causal mask does, which all attention kernels take
        positions = (start + passage_positions(numbers, is_slot)).to(device)
        # (batch, 1, max_slots, start + max_slots): the text before is read by all
        mask = pad(separate_passages(is_slot, numbers, model.dtype), (start, 0))
    if positions is None:
        positions = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1], device=device).expand(len(rows), -1)
    words = [[passage.context_word_ids for passage in row] for row in rows]
    outputs = model.model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions,
        past_key_values=join_keys_values([[head]] * len(rows), model.config.text_config) if continues else None,
        context_embeds=pad_sequence(
            [torch.cat([passage.context_embeds for passage in row]) for row in rows], batch_first=True
        ).to(device),
        context_word_ids=None if words[0][0] is None else pad_words(list(map(_join_words, words))).to(device),
        use_cache=True,
        **settings,
    )
    for row, members in enumerate(batch):
        first = start
        for number in members:
            end = first + len(passages[number].context_embeds)
            entries[number] = keys_values_of(cache_of(outputs), row, first, end)
            first = end


def _join_words(parts: Sequence[torch.LongTensor]) -> torch.LongTensor:
    """Word ids of passages, each (num_slots, max_words), one below the other."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=-1) for part in parts])


# Files of what was read

FORMAT = "arcaligner-passage-3"

_NAME = "keys_values"


def save_keys_values(path: str | Path, keys_values: torch.Tensor, fingerprint: dict[str, Any]) -> None:
    """Writes what was read of a passage as safetensors, whole or not at all.

    Args:
        path (`str` or `Path`): File to write; its folder exists.
        keys_values (`torch.Tensor` of shape `(num_layers, 2, heads, num_slots, head_dim)`): From `read_passages`.
        fingerprint (`dict`): What `shared_fingerprint` and `passage_fingerprint` return.
    """
    path, tensors = Path(path), {_NAME: keys_values.contiguous()}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        metadata = {"format": FORMAT, "fingerprint": json.dumps(fingerprint), "payload": tensors_digest(tensors)}
        save_file(tensors, temporary, metadata=metadata)
        share_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_keys_values(
    path: str | Path, fingerprint: dict[str, Any], config: PreTrainedConfig, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Reads what `save_keys_values` wrote.

    Args:
        path (`str` or `Path`): The file.
        fingerprint (`dict`): That of the model, passage and prompt it will be used with.
        config (`PreTrainedConfig`): The backbone's, `model.config.text_config`.
        device (`str` or `torch.device`, defaults to `"cpu"`): Where the model is.

    Raises:
        `ValueError`: a file that is broken or of another kind, one with another fingerprint (the first field that
            differs is named), or one that does not fit the backbone.
    """
    advice = "Use what it was made with, or delete the file to make a new one."
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}; expected {FORMAT!r}")
        if metadata.get("payload") != tensors_digest(tensors):
            raise ValueError("its keys and values are not those that were saved")
        if not isinstance(found := json.loads(metadata.get("fingerprint", "")), dict):
            raise ValueError(f"its fingerprint is a {type(found).__name__}; expected an object")
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Delete the file to make a new one.") from error
    for name in [*fingerprint, *found]:
        if found.get(name) != fingerprint.get(name):
            raise ValueError(
                f"The kept passage {path} was made with `{name}` {found.get(name)!r}; expected "
                f"{fingerprint.get(name)!r}. {advice}"
            )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = shapes.get(_NAME, ())
    if len(shapes) != 1 or len(shape) != 5 or shape != entry_shape(config, shape[3], tensors[_NAME].dtype):
        raise ValueError(
            f"{path} holds tensors of shapes {shapes}; the backbone {config.model_type} needs `{_NAME}` of shape "
            f"{entry_shape(config, 1)}, for a slot. Load it with the backbone it was made for."
        )
    check_length(shape[3], f"The kept passage {path}", config)
    return tensors[_NAME].to(device)
