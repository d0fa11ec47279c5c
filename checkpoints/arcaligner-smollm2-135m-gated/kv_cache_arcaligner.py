"""Cache of per-passage keys and values, shared across questions.

    questions, passages -> fingerprints -> keys and values (in memory, in files, or computed) -> one batch -> `generate`

Slots come before the question and do not depend on it, and the text after them passes through the layers of the
unmodified base model. If passages are independent, an entry is one passage, so it serves every question that retrieves
it, next to any other passages. If passages are joint, an entry is all passages of a question together. The text before
the slots is cached once.

An unmodified backbone continues from the files (the text before the slots, then passages) with the same logits, except
with int8. With independent passages, `position_ids` continue after the longest passage:

    parts = [load_file(path)["keys_values"] for path in paths]
    cache = DynamicCache(config=backbone.config)  # backbone = AutoModelForCausalLM.from_pretrained(base_model)
    for layer, (keys, values) in enumerate(torch.cat(parts, dim=3)):
        cache.update(keys[None], values[None], layer)
    logits = backbone(input_ids=ids_after_the_slots, past_key_values=cache).logits

With `passage_alignment="end"` keys of shorter passages have to be moved: `join_keys_values` makes such a cache.

Shapes: keys and values (num_layers, 2, key_value_heads, num_slots, head_dim); rows of a batch are left-padded.
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.utils import ModelOutput, logging

from .attention_arcaligner import (
    CACHE,
    can_separate,
    check_can_separate,
    check_passage_prior,
    key_rotation,
    passage_positions,
    rotate_keys,
    separate_passages,
)
from .configuration_arcaligner import (
    REFINEMENT_SETTINGS,
    SLOT_SETTINGS,
    ArcAlignerConfig,
    check_gates,
    check_length,
    longest_prompt,
    normalize_budget,
    warn_of_rename,
)
from .encoder_arcaligner import (
    PrecomputedSlots,
    pad_words,
    passages_of_questions,
    single_passages,
)
from .loading_arcaligner import HEADS, share_file, tensors_digest

logger = logging.get_logger(__name__)

# How many passages `iter_single_passages` prefills together, and how many rows it yields together: enough for fast
# matrix products, few enough for memory.
PASSAGES_AT_ONCE, ROWS_AT_ONCE = 32, 16


@dataclass
class _EntrySpec:
    """What an entry of the cache is computed from: passages after the text `prefix_ids`, or this text alone. An error
    begins with `name`."""

    prefix_ids: tuple[int, ...]
    passages: list | PrecomputedSlots | None = None
    name: str = ""
    number: int = 0  # of the passage in its question
    # Set before its entry is searched. `weights` are those in `fingerprint`, `None` if nothing is cached.
    key: str = ""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] | None = None

    @property
    def is_passage(self) -> bool:
        return self.passages is not None


class _Question(NamedTuple):
    """A prompt in parts: the text before the slots, the passages, and the text after the slots."""

    specs: list[_EntrySpec]
    suffix_ids: list[int]

    @property
    def passage_numbers(self) -> list[int]:
        """The numbers of the passages that have text or slots."""
        return [spec.number for spec in self.specs[1:] if spec.passages != []]

    @property
    def texts(self) -> dict[int, str | dict]:
        """The independent passages that have text, by their numbers."""
        return {spec.number: spec.passages[0] for spec in self.specs[1:] if spec.passages}

    def only(self, numbers: Sequence[int]) -> "_Question":
        """The question with some of its passages only; if none of them has text, with the slot for no passages."""
        selected = [spec for spec in self.specs[1:] if spec.number in numbers] or self.specs[1:]
        return self._replace(specs=[self.specs[0], *selected])

    def with_slots(self, slots: PrecomputedSlots) -> "_Question":
        """The same with precomputed slots of some of its independent passages in place of their texts."""
        passages = single_passages(slots)
        specs = [
            replace(spec, passages=passages[spec.number], key="") if spec.number in passages else spec
            for spec in self.specs[1:]
        ]
        return self._replace(specs=[self.specs[0], *specs])


class Turn:
    """A thread's turn to compute. This class is for a thread that shares the model with no other thread. A server has
    a subclass, which lets other threads compute, or raises to end a computation that is no longer needed."""

    def pass_on(self) -> None:
        """Called before each call of the model."""

    def away(self) -> AbstractContextManager:
        """A context in which this thread waits for the result of another one."""
        return contextlib.nullcontext()


ALONE = Turn()


class QuestionBatch(NamedTuple):
    """The result of [`PassageCache.make_batch`]: prompts, passages, settings of slots and gates, and the turn of the
    thread that computes them. Do not use it after the weights have changed: its passages are looked up for the weights
    that the model had at the first use."""

    questions: list[_Question]
    settings: dict[str, Any]
    turn: Turn = ALONE

    def with_slots(self, precomputed: Sequence[PrecomputedSlots | None]) -> "QuestionBatch":
        """The same with precomputed slots of some passages of each question; `None` for a question that stays."""
        pairs = zip(self.questions, precomputed, strict=True)
        questions = [question if slots is None else question.with_slots(slots) for question, slots in pairs]
        return self._replace(questions=questions)

    @property
    def num_positions(self) -> list[int]:
        """The number of positions of each prompt, whose passages are precomputed slots."""
        counts = []
        for question in self.questions:
            num_slots = sum(len(spec.passages.context_embeds) for spec in question.specs[1:])
            counts.append(len(question.specs[0].prefix_ids) + num_slots + len(question.suffix_ids))
        return counts


class PrefixFiles(NamedTuple):
    """The files with the keys and values of everything before a question, for another engine: the text before the
    slots, then each passage in order. A passage that occurs twice is there twice."""

    paths: list[Path]
    num_slots: list[int]  # of each file, the number of its first slots that are used
    prefix_ids: list[int]  # ids of the text before the slots, the content of the first file
    suffix_ids: list[int]  # ids of the text after the slots
    num_passages: int  # independent passages; 1 for joint ones
    num_cached: int  # independent passages that were in the cache


class Prepared(dict):
    """The inputs of `generate`. Attributes: for each question `num_passages`, its independent passages (1 for joint
    ones), and `num_cached`, how many of them were in the cache."""

    num_passages: list[int]
    num_cached: list[int]

    @property
    def num_kept(self) -> list[int]:
        """The name of `num_cached` in version 0.2."""
        warn_of_rename("num_kept", "num_cached")
        return self.num_cached


class PassageCache:
    """
    Caches the keys and values of passages for further questions. The least recently used entries are dropped first.

    Gates, number of slots, segmentation, and the weights of model and encoder may change between two calls: an entry is
    used only with the settings and weights that it was made with. These changes are not detected: writes to weights
    through `.data` or NumPy, modules and hooks that are added or replaced, and a tokenizer or a spaCy pipeline that is
    changed in place. Make a new cache after such a change. If changes of weights cannot be detected, as with a
    quantized model, nothing is cached, and a warning says so. A copy of a cache is empty.

    Args:
        model ([`ArcAlignerForCausalLM`]): In evaluation mode.
        processor ([`ArcAlignerProcessor`]): The model's.
        max_bytes (`int`, defaults to 1 GiB): Memory for keys and values; 0 caches none in memory.
        folder (`str` or `Path`, *optional*): Folder for the entries, which other processes may use, too.
        read_only (`bool`, defaults to `False`): Whether nothing is written to `folder`, such as that of a corpus.
        dtype (`"int8"`, *optional*): Stores passages in about a quarter of the bytes of float32, as whole numbers with
            one scale for each slot and head. Joining them takes longer, and answers are nearly the same. Default: the
            backbone's dtype.

    Attributes: `hits`, `loads` and `misses` count passages found in memory, loaded from the folder and computed by the
    model; `bytes` are in use.

    Example:

    ```python
    >>> store = model.passage_cache(processor, folder="passages")
    >>> inputs = store.prepare(["Who wrote it?", "When?"], documents=[passages, passages])
    >>> answers = model.generate(**inputs, max_new_tokens=16)
    >>> processor.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ```
    """

    def __init__(
        self,
        model,
        processor,
        max_bytes: int = 2**30,
        folder: str | Path | None = None,
        read_only: bool = False,
        dtype: str | None = None,
    ):
        if dtype not in (None, "int8"):
            raise ValueError(f'`dtype` is {dtype!r}; expected "int8", or None for the dtype of the base model.')
        if max_bytes < 0:
            raise ValueError(
                f"`max_bytes` is {max_bytes}; expected a number of bytes, or 0 to cache nothing in memory."
            )
        if model.config.passage_attention != processor.passage_attention:
            raise ValueError(
                f"`passage_attention` is {model.config.passage_attention!r} in the model, but "
                f"{processor.passage_attention!r} in the processor. Load both from the same checkpoint."
            )
        self.model, self.processor, self.max_bytes = model, processor, max_bytes
        self.folder, self.read_only = None if folder is None else Path(folder), read_only
        self.dtype = dtype
        self.hits = self.loads = self.misses = self.bytes = 0
        self._entries: OrderedDict[str, torch.Tensor] = OrderedDict()  # least recently used first
        part_of = {True: "aligner_weights", False: "backbone_weights"}
        self._watched = WatchedWeights(model, lambda name: part_of[model.is_aligner_key(name)])
        self._encoder: WatchedWeights | None = None
        self._base_model: tuple[str, dict[str, Any]] | None = None  # with the digest of the weights that it describes
        self._tokenizers = {}  # the digest of each, by its id
        self._lock = threading.RLock()
        self._computing: dict[str, threading.Event] = {}  # by the keys of entries that are computed now; set at the end

    def __getstate__(self):
        return {
            name: self.__dict__[name] for name in ("model", "processor", "max_bytes", "folder", "read_only", "dtype")
        }

    def __setstate__(self, state):
        self.__init__(**state)

    def __len__(self) -> int:
        return len(self._entries)

    @torch.no_grad()
    def prepare(
        self,
        questions,
        documents=None,
        *,
        context_embeds=None,
        context_word_ids=None,
        context_passage_ids=None,
        passage_prior: Sequence[Sequence[float] | None] | None = None,
        **kwargs,
    ) -> Prepared:
        """The inputs of `generate` for questions about passages. Passages that are not cached are computed, equal
        ones only once.

        Args:
            questions (`str`, chat, or a list of them): With slots before the first user message.
            documents (`list`, *optional*): Passages, as the processor takes them; a list for each of several questions.
            context_embeds (tensor or a list, *optional*): Instead, embeddings (num_slots, encoder_hidden_size).
            context_word_ids (tensor or a list, *optional*): Their token ids (num_slots, max_words), if the aligner uses
                them.
            context_passage_ids (tensor or a list, *optional*): Their passages (num_slots,).
            passage_prior (`list[list[float]]`, *optional*): For each question, the bias on the attention logits of each
                of its passages, those without text included; `passage_prior` of `generate`. `None` is no bias.
            kwargs: How slots are made and refined, as for the processor and `generate`: `max_slots`, `tokens_per_slot`,
                `gate_mode`, `gate_threshold`, `max_refinement_steps`, `refinement_budget`. Each combination has its
                own entries, but independent passages are cached once for any `max_slots`. The rest is for the chat
                template; `add_generation_prompt` is on.

        Returns:
            [`Prepared`], a `dict` with `input_ids`, `attention_mask` (batch, seq_len) and `past_key_values`, and
            `context_passage_ids` (batch, max_slots) for independent passages, and `passage_prior` (batch,
            num_passages) if it was given. For beams or several answers to a question, call
            `past_key_values.batch_repeat_interleave(n)` first.

        Raises:
            `ValueError`: as the processor; prompts longer than the backbone's context; no question. A file that cannot
                be used is no error: a warning is logged, and the passage is computed again.
        """
        batch = self.make_batch(questions, documents, context_embeds, context_word_ids, context_passage_ids, **kwargs)
        return self.prepare_batch(batch, passage_prior)

    @torch.no_grad()
    def prepare_batch(
        self, batch: QuestionBatch, passage_prior: Sequence[Sequence[float] | None] | None = None
    ) -> Prepared:
        """As `prepare`, for the result of `make_batch`."""
        questions, (settings, max_slots) = batch.questions, self._settings_of_entries(batch)
        entries, missing = self._fetch(questions, settings, batch.turn)
        parts = [first_slots([entries[spec.key] for spec in question.specs], max_slots) for question in questions]
        inputs = self._make_inputs(questions, parts)
        if passage_prior is not None and any(prior is not None for prior in passage_prior):
            inputs["passage_prior"] = _prior_of_questions(questions, passage_prior).to(
                self.model.device, self.model.dtype
            )
            check_passage_prior(
                inputs["passage_prior"], inputs.get("context_passage_ids"), self.model.config.text_config
            )
        inputs.num_passages = [len(question.specs) - 1 for question in questions]
        inputs.num_cached = [sum(spec.key not in missing for spec in question.specs[1:]) for question in questions]
        return inputs

    def make_batch(
        self,
        questions,
        documents,
        context_embeds=None,
        context_word_ids=None,
        context_passage_ids=None,
        turn: Turn = ALONE,
        **kwargs,
    ) -> QuestionBatch:
        """Check questions and their passages, without encoding them yet; arguments as for `prepare`. `turn` is the turn
        of the thread that will compute them."""
        if not isinstance(questions, str | list | tuple) or not questions:
            raise ValueError(f"`questions` is {questions!r}; expected a question, or a list of questions.")
        is_single = isinstance(questions, str) or isinstance(questions[0], dict)
        questions = [questions] if is_single else list(questions)
        inputs = (documents, context_embeds, context_word_ids, context_passage_ids)
        all_passages = passages_of_questions(*inputs, is_single, len(questions), self.processor.context_words)
        all_passages = [single_passages(passages) if self._is_separate else {0: passages} for passages in all_passages]
        settings, template_kwargs = _split_settings(self.processor, kwargs)
        if any(len(passages) > 1 for passages in all_passages):
            check_can_separate(self.model.config.text_config, in_one_row=False)
        prompts = []
        for question_number, (question, passages) in enumerate(zip(questions, all_passages, strict=True)):
            prefix_ids, suffix_ids = self.processor.prompt_ids(question, **template_kwargs)
            whose = f" of question {question_number}" if len(questions) > 1 else ""
            specs = [_EntrySpec(tuple(prefix_ids))]
            for number, passage in passages.items():
                name = f"Passage {number}{whose} needs" if self._is_separate else f"The passages{whose} need"
                specs.append(_EntrySpec(tuple(prefix_ids), passage, name, number))
            prompts.append(_Question(specs, suffix_ids))
        return QuestionBatch(prompts, settings, turn)

    def iter_single_passages(
        self, questions, documents=None, only: Sequence[Sequence[int]] | None = None, **kwargs
    ) -> Iterator[tuple[list[tuple[int, int, bool]], Prepared]]:
        """Yield each question with each of its passages by itself, several rows together: the numbers of question and
        passage, whether the passage was cached, and the result of `prepare` for these rows. Passages without text are
        left out.

        Args:
            questions, documents, kwargs: As for `prepare`.
            only (`Sequence[Sequence[int]]`, *optional*): For each question the numbers of the passages to compute;
                others are not even encoded. Default: all.
        """
        yield from self.iter_batch(self.make_batch(questions, documents, **kwargs), only)

    @torch.no_grad()
    def iter_batch(
        self, batch: QuestionBatch, only: Sequence[Sequence[int]] | None = None
    ) -> Iterator[tuple[list[tuple[int, int, bool]], Prepared]]:
        """As `iter_single_passages`, for the result of `make_batch`, which serves several calls."""
        settings, max_slots = self._settings_of_entries(batch)
        numbers = [question.passage_numbers for question in batch.questions] if only is None else only
        singles = [
            (question_number, _Question([question.specs[0], spec], question.suffix_ids))
            for question_number, question in enumerate(batch.questions)
            for spec in question.specs[1:]
            if spec.number in numbers[question_number] and spec.passages != []
        ]
        for rows in (singles[first : first + PASSAGES_AT_ONCE] for first in range(0, len(singles), PASSAGES_AT_ONCE)):
            entries, missing = self._fetch([question for _, question in rows], settings, batch.turn)
            rows.sort(key=lambda row: entries[row[1].specs[1].key].shape[3])  # rows of similar length together
            for group in (rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE)):
                questions = [question for _, question in group]
                parts = [
                    first_slots([entries[spec.key] for spec in question.specs], max_slots) for question in questions
                ]
                specs = [(question_number, question.specs[1]) for question_number, question in group]
                named = [(question_number, spec.number, spec.key not in missing) for question_number, spec in specs]
                yield named, self._make_inputs(questions, parts)

    @torch.no_grad()
    def precompute(self, questions, documents=None, **kwargs) -> list[Path]:
        """Precompute passages that are not cached yet, for questions with the same text before their slots, such as the
        same system message.

        Args:
            questions, documents, kwargs: As for `prepare`.

        Returns:
            `list[Path]`: The files of the passages and of the text before them; none without a `folder`.

        Raises:
            `ValueError`: a model whose passages cannot be cached.
        """
        batch = self.make_batch(questions, documents, **kwargs)
        self.weights(batch.questions[0].specs[1].passages)
        entries, _ = self._fetch(batch.questions, self._settings_of_entries(batch)[0], batch.turn)
        return [] if self.folder is None else [self._path(key) for key in entries]

    @torch.no_grad()
    def prefix_files(self, questions, documents=None, **kwargs) -> list[PrefixFiles]:
        """Precompute passages as `precompute`, and return for each question the files that precede it.

        Args:
            questions, documents, kwargs: As for `prepare`.

        Raises:
            `ValueError`: a cache without a `folder`; a model whose passages cannot be cached.
            `OSError`: a file that could not be written.
        """
        return self.prefix_files_of_batch(self.make_batch(questions, documents, **kwargs))

    @torch.no_grad()
    def prefix_files_of_batch(self, batch: QuestionBatch) -> list[PrefixFiles]:
        """As `prefix_files`, for the result of `make_batch`."""
        if self.folder is None:
            raise ValueError(
                "This `PassageCache` has no folder, so it cannot write files for other engines, such as vLLM. Create "
                "it with `folder=PATH`."
            )
        questions, turn, (settings, max_slots) = batch.questions, batch.turn, self._settings_of_entries(batch)
        self.weights(questions[0].specs[1].passages)
        entries, missing = self._fetch(questions, settings, turn)
        for spec in {spec.key: spec for question in questions for spec in question.specs}.values():
            # The file was removed meanwhile, is by a version that did not name the base model, or the disk is full.
            if not names_base_model(path := self._path(spec.key)):
                self._write(spec, entries[spec.key])
                if not names_base_model(path):
                    raise OSError(
                        f"{path} could not be written. Check that {self.folder} is writable and has free disk space."
                    )
        files = []
        for question in questions:
            counts = [entries[spec.key].shape[3] for spec in question.specs]
            remaining = max_slots
            for number in range(1, len(counts)) if max_slots is not None else ():
                counts[number] = min(counts[number], remaining)
                remaining -= counts[number]
            used = [number for number, count in enumerate(counts) if count or not number]
            paths = [self._path(question.specs[number].key) for number in used]
            passages, prefix_ids = question.specs[1:], list(question.specs[0].prefix_ids)
            num_cached = sum(spec.key not in missing for spec in passages)
            slots = [counts[number] for number in used]
            files.append(PrefixFiles(paths, slots, prefix_ids, question.suffix_ids, len(passages), num_cached))
        return files

    def keep(self, questions, documents=None, **kwargs) -> list[Path]:
        """The name of `precompute` in version 0.2."""
        warn_of_rename("keep", "precompute")
        return self.precompute(questions, documents, **kwargs)

    def each_alone(self, questions, documents=None, **kwargs):
        """The name of `iter_single_passages` in version 0.2."""
        warn_of_rename("each_alone", "iter_single_passages")
        return self.iter_single_passages(questions, documents, **kwargs)

    def prefill_suffix(self, inputs: Prepared, only_answerability: bool = False, turn: Turn = ALONE):
        """Prefill the text after the slots on the cached keys and values. Return the model's output with the logits of
        the first token of the answer, (batch, 1, vocab_size), or only its `answerability_logits` (batch,)."""
        inputs = prefill_beginning(self.model, inputs, turn)
        ids, mask, cache = (inputs[name] for name in ("input_ids", "attention_mask", "past_key_values"))
        positions = self.model.prompt_positions(ids, mask, inputs.get("context_passage_ids"))  # (batch, seq_len)
        new = slice(cache.get_seq_length(), None)
        options = {"attention_mask": mask, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        options["slot_bias"] = self.model.slot_bias(ids, inputs.get("context_passage_ids"), inputs.get("passage_prior"))
        options["only_answerability"] = only_answerability
        return self.model(input_ids=ids[:, new], position_ids=positions[:, new], **options)

    def read_question(self, inputs: Prepared):
        """The name of `prefill_suffix` in version 0.2."""
        warn_of_rename("read_question", "prefill_suffix")
        return self.prefill_suffix(inputs)

    @property
    def _is_separate(self) -> bool:
        return self.processor.passage_attention == "separate"

    def _settings_of_entries(self, batch: QuestionBatch) -> tuple[dict[str, Any], int | None]:
        """The settings that entries depend on, and the maximum number of slots of a question. An independent passage
        is cached whole and cut afterwards, so that one entry serves any `max_slots`."""
        if not self._is_separate:
            return batch.settings, None
        settings = {name: value for name, value in batch.settings.items() if name != "max_slots"}
        return settings, batch.settings.get("max_slots")

    # Keys and values to a batch

    def _make_inputs(self, questions: list[_Question], parts: list[list[torch.Tensor]]) -> Prepared:
        """Prompts (batch, seq_len), left-padded in both halves, with the cache of everything before the questions.
        `parts` are the keys and values of each question's entries."""
        config, slot_id = self.model.config.text_config, self.processor.context_token_id
        sizes = [[part.shape[3] for part in row[1:]] for row in parts]  # slots of each passage of each question
        ids, suffixes = [], [question.suffix_ids for question in questions]
        for question, counts in zip(questions, sizes, strict=True):
            prefix_ids = question.specs[0].prefix_ids
            ids.append([*prefix_ids, *[slot_id] * sum(counts)])
            num_slots = max(counts) if self._is_separate else sum(counts)  # independent passages share positions
            check_length(len(prefix_ids) + num_slots + len(question.suffix_ids), "The prompt", config)
        cache = join_keys_values(parts, config, self.model.config.passage_alignment)
        if any(cache.is_sliding):
            ids, suffixes, cache = self._align_suffixes(ids, suffixes, parts)
        device, pad_id = parts[0][0].device, self.processor.tokenizer.pad_token_id or 0
        halves = [_left_padded(rows, pad_id) for rows in (ids, suffixes)]
        masks = [_left_padded([[1] * len(row) for row in rows], 0) for rows in (ids, suffixes)]
        inputs = Prepared(
            input_ids=torch.cat(halves, dim=1).to(device),  # padding may be any id: it is masked
            attention_mask=torch.cat(masks, dim=1).to(device),
            past_key_values=cache,
        )
        if self._is_separate:
            numbers = [[number for number, size in enumerate(counts) for _ in range(size)] for counts in sizes]
            numbers = [torch.tensor(row, dtype=torch.long, device="cpu") for row in numbers]
            inputs["context_passage_ids"] = pad_sequence(numbers, batch_first=True, padding_value=-1).to(device)
        return inputs

    def _align_suffixes(
        self, ids: list[list[int]], suffixes: list[list[int]], parts: list[list[torch.Tensor]]
    ) -> tuple[list[list[int]], list[list[int]], DynamicCache]:
        """Make the texts after the slots equally long: the beginning of a longer one is prefilled after its slots.

        Padding between slots and their question would push the slots out of a sliding window, which counts columns.
        """
        shortest, config = min(len(suffix_ids) for suffix_ids in suffixes), self.model.config.text_config
        extended = []
        for suffix_ids, row in zip(suffixes, parts, strict=True):
            if len(suffix_ids) > shortest:
                cache = join_keys_values([row], config)
                new = torch.tensor([suffix_ids[:-shortest]], device=self.model.device)  # (1, num_new)
                for chunk in in_chunks(new.shape[1]):
                    self.model.model(input_ids=new[:, chunk], past_key_values=cache, use_cache=True)
                row = [keys_values_of(cache, 0, 0, cache.get_seq_length())]
            extended.append(row)
        ids = [before + suffix_ids[:-shortest] for before, suffix_ids in zip(ids, suffixes, strict=True)]
        return ids, [suffix_ids[-shortest:] for suffix_ids in suffixes], join_keys_values(extended, config)

    # Passages to keys and values

    def _fetch(
        self, questions: list[_Question], settings: dict[str, Any], turn: Turn
    ) -> tuple[dict[str, torch.Tensor], dict[str, _EntrySpec]]:
        """Keys and values of each entry, cached or computed now, by its key, and the specs of those that were not
        cached. The cache owns the tensors: copy them before they are changed."""
        specs = [spec for question in questions for spec in question.specs]
        if unknown := [spec for spec in specs if not spec.key]:
            self._identify(unknown, questions[0].specs[1].passages, settings)
        entries, missing = self._claim(specs, turn)
        try:
            if missing:
                # Passages are computed after the text before them, which may be cached even if they are not.
                beginnings = [question.specs[0] for question in questions]
                prefixes = {spec.prefix_ids: entries.get(spec.key) for spec in beginnings}
                entries |= self._compute(
                    missing, prefixes, settings, max(len(question.suffix_ids) for question in questions), turn
                )
                self._store_all(missing, entries, questions[0].specs[1].passages)
        finally:
            with self._lock:
                for key in missing:
                    if (is_done := self._computing.pop(key, None)) is not None:
                        is_done.set()
        return entries, missing

    def _identify(self, specs: list[_EntrySpec], passages: list | PrecomputedSlots, settings: dict[str, Any]) -> None:
        """Set the keys of entries, for the current weights; `passages` are those of one entry."""
        weights = None  # without a cache, weights are not watched
        if self.max_bytes or self.folder is not None:
            try:
                weights = self._current_weights(passages)
            except UnwatchableError as error:  # a quantized model answers, but nothing is cached
                logger.warning_once(str(error))
        # The part that all passages share, with the weights, is digested once.
        shared = shared_fingerprint(self.model, self.processor, weights or {}, settings)
        shared |= {} if self.dtype is None else {"kept_dtype": self.dtype}
        digest = json_digest(shared)
        for spec in specs:
            of_entry = passage_fingerprint(spec.prefix_ids, spec.passages)
            spec.key, spec.fingerprint, spec.weights = json_digest([digest, of_entry]), shared | of_entry, weights

    def _store_all(
        self, missing: dict[str, _EntrySpec], entries: dict[str, torch.Tensor], passages: list | PrecomputedSlots
    ) -> None:
        """Cache the entries, except those of weights that have changed meanwhile."""
        specs = [spec for spec in missing.values() if spec.weights is not None]
        current = self._current_weights(passages) if specs else None
        with self._lock:
            for spec in specs:
                if spec.weights == current:
                    self._write(spec, entries[spec.key])
                    self._store(spec.key, entries[spec.key])

    def _claim(self, specs: list[_EntrySpec], turn: Turn) -> tuple[dict[str, torch.Tensor], dict[str, _EntrySpec]]:
        """The cached entries, by their keys, and the specs of those that the caller has to compute. Waits for entries
        that another thread computes, so that concurrent questions about one passage compute it once."""
        while True:
            with self._lock:
                if not (busy := [self._computing[spec.key] for spec in specs if spec.key in self._computing]):
                    return self._find_all(specs)
            with turn.away():
                busy[0].wait()

    def _find_all(self, specs: list[_EntrySpec]) -> tuple[dict[str, torch.Tensor], dict[str, _EntrySpec]]:
        entries: dict[str, torch.Tensor] = {}
        missing: dict[str, _EntrySpec] = {}  # by key, so that a passage of several questions is computed once
        for spec in specs:
            if spec.key in entries or spec.key in missing:
                self.hits += spec.is_passage
            elif spec.weights is not None and (entry := self._find(spec)) is not None:
                entries[spec.key] = entry
            else:
                self.misses += spec.is_passage
                missing[spec.key] = spec
        self._computing |= {key: threading.Event() for key, spec in missing.items() if spec.weights is not None}
        return entries, missing

    def _compute(
        self,
        missing: dict[str, _EntrySpec],
        prefixes: dict[tuple[int, ...], torch.Tensor | None],
        settings: dict[str, Any],
        suffix_length: int,
        turn: Turn,
    ) -> dict[str, torch.Tensor]:
        """Compute entries, by their keys. `prefixes` are texts before the slots, each with its cached keys and
        values."""
        if self.model.training:
            raise ValueError(
                "The model is in training mode, in which dropout changes slots. Call `model.eval()` first."
            )
        gates = {name: value for name, value in settings.items() if name in REFINEMENT_SETTINGS}
        slot_settings = {name: value for name, value in settings.items() if name not in REFINEMENT_SETTINGS}
        specs = [spec for spec in missing.values() if spec.is_passage]
        longest, encoded = longest_prompt(self.model.config.text_config), []
        if specs:  # passages after all prefixes together: the encoder is fastest with many texts of similar length
            slot_limits = longest and [longest - len(spec.prefix_ids) - suffix_length for spec in specs]
            passages, names = [spec.passages for spec in specs], [spec.name for spec in specs]
            encoded = self.processor.slot_encoder.encode_batch(
                passages, **slot_settings, slot_limits=slot_limits, names=names
            )
        computed: dict[str, torch.Tensor] = {}
        for prefix_ids, cached in prefixes.items():  # mostly one, as questions have the same system message
            prefixes[prefix_ids] = prefill_text(self.model, prefix_ids) if cached is None else cached
            after = [
                (spec.key, slots) for spec, slots in zip(specs, encoded, strict=True) if spec.prefix_ids == prefix_ids
            ]
            entries = prefill_passages(
                self.model, prefix_ids, prefixes[prefix_ids], [slots for _, slots in after], turn, **gates
            )
            if self.dtype is not None:  # quantized now, so that first and later uses are equal
                entries = map(to_int8, entries)
            computed |= zip((key for key, _ in after), entries, strict=True)
        return {key: computed[key] if spec.is_passage else prefixes[spec.prefix_ids] for key, spec in missing.items()}

    def weights(self, passages: Sequence | tuple) -> dict[str, Any]:
        """Digests of the model and, unless `passages` are embeddings, of encoder and tokenizers."""
        return self._weights(passages, WatchedWeights.digests, self._tokenizer_digest)

    def _current_weights(self, passages: Sequence | tuple) -> dict[str, Any]:
        """The part of a key for the weights. Files outlive the process and need digests, which take a second to
        compute; memory is used by this process only, so a mark is enough."""
        if self.folder is not None:
            return self.weights(passages)
        return self._weights(passages, WatchedWeights.mark, self._tokenizer_mark)

    def _weights(self, passages, digest: Callable, digest_tokenizer: Callable) -> dict[str, Any]:
        """The weights of model and encoder, as `digest` gives them, and the tokenizers, as `digest_tokenizer` does."""
        with self._lock:
            weights, processor = digest(self._watched), self.processor
            if isinstance(passages, PrecomputedSlots):
                return weights
            encoder = processor.encoder.model
            if self._encoder is None or self._encoder.module is not encoder:
                self._encoder = WatchedWeights(encoder, lambda name: "weights")
            return {
                **weights,
                **{f"encoder_{name}": part for name, part in digest(self._encoder).items()},
                "encoder_reads": [encoder.max_seq_length, encoder.prompts, encoder.default_prompt_name],
                "tokenizers": [digest_tokenizer(tokenizer) for tokenizer in (encoder.tokenizer, processor.tokenizer)],
                "spacy": spacy_version(),
            }

    def _tokenizer_mark(self, tokenizer) -> tuple[int, int]:
        self._tokenizers.setdefault(id(tokenizer), (tokenizer, 0, ""))  # a reference, so that no other gets its id
        return id(tokenizer), len(tokenizer)

    def _tokenizer_digest(self, tokenizer) -> str:
        # Its JSON has megabytes, so it is digested once; added tokens show in its length.
        known, size, digest = self._tokenizers.get(id(tokenizer), (None, 0, ""))
        if known is not tokenizer or size != len(tokenizer):
            backend = copy.deepcopy(tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()  # padding and truncation are those of the last call; `encoder_reads` has the limit
            digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
            self._tokenizers[id(tokenizer)] = tokenizer, len(tokenizer), digest
        return digest

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _find(self, spec: _EntrySpec) -> torch.Tensor | None:
        if spec.key in self._entries:
            self.hits += spec.is_passage
            self._entries.move_to_end(spec.key)  # the least recently used are dropped first
            return self._entries[spec.key]
        if self.folder is None or not (path := self._path(spec.key)).exists():
            return None
        try:
            entry = load_keys_values(path, spec.fingerprint, self.model.config.text_config, self.model.device)
        except ValueError as error:
            logger.warning("%s The passage is computed again.", error)
            return None
        self.loads += spec.is_passage
        self._store(spec.key, entry)
        return entry

    def _write(self, spec: _EntrySpec, entry: torch.Tensor) -> None:
        """Write an entry to the folder. If the disk is full or read-only, the passage is computed again next time."""
        if self.folder is None or self.read_only:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_keys_values(self._path(spec.key), entry, spec.fingerprint, self._describe_base_model())
        except (OSError, SafetensorError) as error:
            logger.warning_once(
                f"Passages cannot be cached in {self.folder} ({error}), so they are computed again when they are "
                "needed. Check that the folder is writable and has free disk space."
            )

    def _describe_base_model(self) -> dict[str, Any]:
        """The fingerprint by which other engines recognize the base model, computed once for its weights."""
        digest = self._watched.digests()["backbone_weights"]
        if self._base_model is None or self._base_model[0] != digest:
            self._base_model = digest, base_model_fingerprint(self.model)
        return self._base_model[1]

    def _store(self, key: str, entry: torch.Tensor) -> None:
        """Cache an entry as the most recently used, unless it is larger than the budget."""
        if entry.nbytes > self.max_bytes:
            return
        while self.bytes + entry.nbytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= oldest.nbytes
        self._entries[key] = entry
        self.bytes += entry.nbytes


@functools.cache
def spacy_version() -> str:
    """The version of spaCy, which splits passages."""
    return version("spacy")


class SlotPrefixStore(PassageCache):
    """The name of [`PassageCache`] in version 0.2."""

    def __init__(self, *args, **kwargs):
        warn_of_rename("SlotPrefixStore", "PassageCache")
        super().__init__(*args, **kwargs)


def _prior_of_questions(questions: list[_Question], passage_prior: Sequence[Sequence[float] | None]) -> torch.Tensor:
    """The prior of each question's passages that have slots, (batch, num_passages), padded with 0."""
    if len(passage_prior) != len(questions):
        raise ValueError(
            f"`passage_prior` has the length {len(passage_prior)}; expected {len(questions)}, a list (or None) for "
            "each question."
        )
    rows = []
    for question, prior in zip(questions, passage_prior, strict=True):
        last = max((spec.number for spec in question.specs), default=0)
        prior = [0.0] * (last + 1) if prior is None else prior
        if len(prior) <= last:
            raise ValueError(
                f"`passage_prior` has a list of length {len(prior)} for a question with {last + 1} passages; expected "
                "a number for each passage."
            )
        numbers = [float(prior[spec.number]) for spec in question.specs[1:]]
        rows.append(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
    return pad_sequence(rows, batch_first=True)


def _left_padded(rows: Sequence[Sequence[int]], padding_value: int) -> torch.LongTensor:
    """Rows of ids (batch, longest), on the CPU."""
    rows = [torch.tensor(row, device="cpu") for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=padding_value, padding_side="left")


def _split_settings(processor, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of slots and gates, checked, and the rest of `kwargs`, for the chat template."""
    slots = {name: kwargs[name] for name in SLOT_SETTINGS if kwargs.get(name) is not None}
    if slots:
        processor.slot_encoder.check_settings(**slots)
    settings = {name: value for name, value in kwargs.items() if name in PREFIX_SETTINGS}
    rest = {name: value for name, value in kwargs.items() if name not in PREFIX_SETTINGS}
    return canonical_settings(settings), rest


# Keys and values of passages: computed and joined. One passage, or all joint ones, are a tensor
# (num_layers, 2, key_value_heads, num_slots, head_dim).

# Slots of a batch of passages, padding included: enough for fast matrix products, few enough for little padding.
SLOTS_PER_BATCH = 1024

# Slots of a row that several passages share; few, because attention across passages is computed and discarded.
SLOTS_PER_ROW = 256


# Positions, of all rows together, in the first chunk of a long computation, and the seconds that each further chunk may
# take.
CHUNK_POSITIONS, CHUNK_SECONDS = 1024, 0.5


def in_chunks(length: int, num_rows: int = 1, turn: Turn = ALONE) -> Iterator[slice]:
    """Yield parts of `length` positions, each as long as the caller can compute in `CHUNK_SECONDS`. `turn` is passed on
    before each part."""
    start, size = 0, max(1, CHUNK_POSITIONS // num_rows)
    while start < length:
        turn.pass_on()
        end, began = min(length, start + size), time.perf_counter()
        yield slice(start, end)
        start, share = end, CHUNK_SECONDS / max(1e-9, time.perf_counter() - began)
        size = max(1, int(size * min(2.0, max(0.25, share))))


@torch.no_grad()
def prefill_beginning(model, inputs: dict[str, Any], turn: Turn = ALONE) -> dict[str, Any]:
    """Prefill all but the last part of a long text, which may follow slots in `past_key_values`, and return the inputs
    of `generate` for the rest. Short texts stay unchanged."""
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], inputs.get("past_key_values")
    start = 0 if cache is None else cache.get_seq_length()
    if (ids.shape[1] - start) * len(ids) <= CHUNK_POSITIONS:
        turn.pass_on()
        return inputs
    cache = DynamicCache(config=model.config.text_config) if cache is None else cache
    numbers = inputs.get("context_passage_ids")
    positions = model.prompt_positions(ids, mask, numbers)  # (batch, seq_len)
    bias = model.slot_bias(ids, numbers, inputs.get("passage_prior"))  # (batch, seq_len)
    for part in in_chunks(ids.shape[1] - start, len(ids), turn):
        first, end = start + part.start, start + part.stop
        if end == ids.shape[1]:
            break
        model.model(
            input_ids=ids[:, first:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, first:end],
            past_key_values=cache,
            use_cache=True,
            slot_bias=bias,
        )
    return {**inputs, "past_key_values": cache}


@torch.no_grad()
def prefill_text(model, ids: Sequence[int]) -> torch.Tensor:
    """Compute keys and values of the text before the slots, by the unchanged base model."""
    if not ids:
        return torch.empty(entry_shape(model.config.text_config, 0), dtype=model.dtype, device=model.device)
    outputs = model.model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=True)
    return keys_values_of(cache_of(outputs), 0, 0, len(ids))


@torch.no_grad()
def prefill_passages(
    model, prefix_ids: Sequence[int], prefix: torch.Tensor, passages: Sequence, turn: Turn = ALONE, **settings
) -> list:
    """Compute keys and values of independent passages after the same text.

    Short passages share a row, without attention from one to another. Rows have about the same length, so that there is
    little padding. Without refinement, the rows continue from the keys and values of the text. A refinement step
    attends to deeper states of the text, so with refinement each row begins with the text. Then it has one passage,
    because each row has a budget of its own.

    Args:
        model ([`ArcAlignerForCausalLM`]): In evaluation mode.
        prefix_ids (`Sequence[int]`), prefix (`torch.Tensor`): The text before the slots, and the result of
            `prefill_text`.
        passages (`Sequence[EncodedDocuments]`): The slots of each passage; several documents in one entry are joint.
        turn ([`Turn`]): The thread's turn, which is passed on before each batch of rows.
        settings: `gate_mode`, `gate_threshold`, `max_refinement_steps` and `refinement_budget`, as in `forward`.

    Returns:
        `list[torch.Tensor]`, each (num_layers, 2, heads, num_slots, head_dim), in the order of `passages`.
    """
    lengths = [len(passage.context_embeds) for passage in passages]
    refines = model.config.refines(**settings)
    shares = can_separate(model.config.text_config) and not refines
    entries: list[torch.Tensor | None] = [None] * len(passages)
    batches: list[list[list[int]]] = []
    for row in pack_rows(lengths, -(-sum(lengths) // SLOTS_PER_ROW) if shares else len(lengths)):
        # The first row of a batch is the longest.
        longest = sum(lengths[number] for number in batches[-1][0]) if batches else 0
        if not batches or (len(batches[-1]) + 1) * longest > SLOTS_PER_BATCH:
            batches.append([])
        batches[-1].append(row)
    for batch in batches:
        turn.pass_on()
        _prefill_rows(model, prefix_ids, prefix, passages, batch, entries, refines, settings)
    return entries


def read_text(model, ids: Sequence[int]) -> torch.Tensor:
    """The name of `prefill_text` in version 0.2."""
    warn_of_rename("read_text", "prefill_text")
    return prefill_text(model, ids)


def read_passages(model, head_ids: Sequence[int], head: torch.Tensor, passages: Sequence, **settings) -> list:
    """The name of `prefill_passages` in version 0.2."""
    warn_of_rename("read_passages", "prefill_passages")
    return prefill_passages(model, head_ids, head, passages, **settings)


def pack_rows(lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    """Distribute passages of these lengths to rows of nearly equal length: the numbers of the passages in each row, the
    longest row first.

    >>> pack_rows([30, 10, 25, 20], num_rows=2)
    [[2, 3], [0, 1]]
    """
    rows, sizes = [[] for _ in range(num_rows)], [0] * num_rows
    # The longest passage first, each into the emptiest row: the rows become nearly equal, and need little padding.
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        emptiest = sizes.index(min(sizes))
        rows[emptiest].append(number)
        sizes[emptiest] += lengths[number]
    return [rows[row] for row in sorted(range(num_rows), key=sizes.__getitem__, reverse=True) if rows[row]]


def _prefill_rows(
    model,
    prefix_ids: Sequence[int],
    prefix: torch.Tensor,
    passages: Sequence,
    batch: list[list[int]],
    entries: list[torch.Tensor | None],
    refines: bool,
    settings: dict[str, Any],
) -> None:
    """Compute the rows of `batch`, each the numbers of its passages, and put the results into `entries`. With `refines`
    the rows take refinement steps, and do not continue from the keys and values of the text before the slots."""
    rows, start = [[passages[number] for number in row] for row in batch], len(prefix_ids)
    numbers = [[number for number, passage in enumerate(row) for _ in passage.context_embeds] for row in rows]
    numbers = [torch.tensor(row, dtype=torch.long, device="cpu") for row in numbers]
    numbers = pad_sequence(numbers, batch_first=True, padding_value=-1)  # (batch, max_slots), padded at the end
    is_slot = numbers >= 0  # (batch, max_slots)
    ids = torch.where(is_slot, model.config.context_token_id, 0)  # padding may be any id: it is masked
    mask, positions = torch.cat([is_slot.new_ones(len(rows), start).long(), is_slot.long()], dim=1), None
    if refines:
        ids = torch.cat([ids.new_tensor([list(prefix_ids)]).expand(len(rows), -1), ids], dim=1)
    elif max(map(len, rows)) > 1:  # else a plain causal mask is enough, which all attention kernels take
        positions = start + passage_positions(numbers, is_slot)
        # (batch, 1, max_slots, start + max_slots): all attend to the text before
        mask = pad(separate_passages(is_slot, numbers, model.dtype), (start, 0))
    if positions is None:
        positions = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1], device="cpu").expand(len(rows), -1)
    words = [[passage.context_word_ids for passage in row] for row in rows]
    joined = None if refines else join_keys_values([[prefix]] * len(rows), model.config.text_config)
    device = model.device
    outputs = model.model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        past_key_values=joined,
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
    """Word ids of passages, each (num_slots, max_words), one after the other."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=-1) for part in parts])


def entry_shape(config: PreTrainedConfig, num_slots: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
    """The shape of a backbone's keys and values of some slots, or of bytes for [`from_int8`]."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, config.num_key_value_heads, num_slots, head_dim + 4 * (dtype == torch.int8)


def cache_of(outputs: ModelOutput) -> Cache | None:
    """The cache that a model returned."""
    return getattr(outputs, CACHE)


def keys_values_of(cache: Cache, row: int, start: int, end: int) -> torch.Tensor:
    """A copy of the keys and values of the positions `start` to `end` of a row of a cache, (num_layers, 2, heads,
    end - start, head_dim)."""
    length = cache.get_seq_length()
    layers = []
    for layer in cache.layers:
        # A sliding window has dropped the first positions. Zeros in their places, outside of the window, do no harm.
        dropped = length - layer.keys.shape[2]
        both = torch.stack([layer.keys[row], layer.values[row]])  # (2, heads, window, head_dim)
        layers.append(pad(both, (0, 0, dropped, 0))[:, :, start:end])
    return torch.stack(layers)  # (num_layers, 2, heads, end - start, head_dim)


def from_int8(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values (..., head_dim) in `dtype`, from stored ones: unchanged if these are of a float dtype. Bytes are
    (..., head_dim + 4): whole numbers, and their scale in float32."""
    if stored.dtype != torch.int8:
        return stored
    return (stored[..., :-4].float() * stored[..., -4:].contiguous().view(torch.float32)).to(dtype)


def to_int8(keys_values: torch.Tensor) -> torch.Tensor:
    """Keys and values (..., head_dim) as bytes for `from_int8`: whole numbers with one scale for each slot and head."""
    step = keys_values.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127  # (..., 1)
    return torch.cat([(keys_values.float() / step).round().to(torch.int8), step.contiguous().view(torch.int8)], dim=-1)


def first_slots(parts: list[torch.Tensor], max_slots: int | None) -> list[torch.Tensor]:
    """The text before the slots and the first `max_slots` slots, which do not depend on later slots of the passage."""
    first, remaining = parts[:1], max_slots
    for part in parts[1:]:
        if remaining is not None:
            part = part[:, :, :, :remaining]
            remaining -= part.shape[3]
        if part.shape[3]:
            first.append(part)
    return first


# Further positions that a joined cache has memory for before it is copied: a question and a short answer.
SPARE_POSITIONS = 128


class BufferedLayer(DynamicLayer):
    """A cache layer with a buffer for further tokens, so that no token copies all earlier ones.

    Args:
        buffer (`torch.Tensor` of shape `(2, batch, heads, num_positions, head_dim)`): The layer's buffer for keys and
            values.
        length (`int`): The number of positions that are filled.
    """

    def __init__(self, buffer: torch.Tensor, length: int):
        super().__init__()
        self.lazy_initialization(buffer, buffer)
        self._fill(buffer, length)

    def _fill(self, buffer: torch.Tensor, length: int) -> None:
        self._buffer = buffer
        self.keys, self.values = buffer[:, :, :, :length]  # each (batch, heads, length, head_dim)
        self._keys_in_buffer = self.keys

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values (batch, heads, new_positions, head_dim), and return all."""
        start, buffer = self.get_seq_length(), self._buffer
        end = start + key_states.shape[2]
        # Repeated or selected rows are not in the buffer.
        if self.keys is not self._keys_in_buffer or end > buffer.shape[3]:
            buffer = _empty(key_states, 2, *key_states.shape[:2], end + SPARE_POSITIONS, key_states.shape[3])
            if start:
                buffer[0, :, :, :start], buffer[1, :, :, :start] = self.keys, self.values
        buffer[0, :, :, start:end], buffer[1, :, :, start:end] = key_states, value_states
        self.is_initialized = True
        self._fill(buffer, end)
        return self.keys, self.values


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """An uninitialized tensor that can be written to in inference mode and outside of it."""
    with torch.inference_mode(False):
        return like.new_empty(shape)


def join_keys_values(
    rows: Sequence[Sequence[torch.Tensor]], config: PreTrainedConfig, passage_alignment: str = "start"
) -> DynamicCache:
    """Join keys and values, the text before the slots first, to a left-padded cache with a row for each of `rows`. With
    `passage_alignment="end"` the keys of shorter passages are moved, so that each passage directly precedes the
    question.

    Everything is copied once, so that generating from the cache does not change the entries.
    """
    lengths = [sum(part.shape[3] for part in parts) for parts in rows]
    rotations = [_rotation_of(parts, config) if passage_alignment == "end" else None for parts in rows]
    first, length, cache = rows[0][0], max(lengths), DynamicCache(config=config)
    num_layers, _, heads, _, head_dim = first.shape
    for layer_idx in range(num_layers):
        # Memory for one layer at a time: an allocator reuses pieces of this size, and gets larger ones from the system.
        joined = _empty(first, 2, len(rows), heads, length + SPARE_POSITIONS, head_dim)
        for row, parts in enumerate(rows):
            padding = length - lengths[row]
            joined[:, row, :, :padding] = 0.0  # masked: any finite number would do
            layer_parts = [from_int8(part[layer_idx], joined.dtype) for part in parts]
            torch.cat(layer_parts, dim=2, out=joined[:, row, :, padding:length])
            if rotations[row] is not None:
                keys = joined[0, row, :, padding + parts[0].shape[3] : length]  # (heads, slots, head_dim)
                keys.copy_(rotate_keys(keys, *rotations[row]))
        if cache.layers[layer_idx].is_sliding:
            cache.update(*joined[:, :, :, :length], layer_idx)
        else:
            cache.layers[layer_idx] = BufferedLayer(joined, length)
    return cache


def _rotation_of(parts: Sequence[torch.Tensor], config: PreTrainedConfig) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The factors that move the keys of the slots of passages so that each passage ends at the same position, each
    (slots, head_dim); `None` if all are equally long. The first of `parts` is the text before the slots."""
    sizes = torch.tensor([part.shape[3] for part in parts[1:]], dtype=torch.long, device="cpu")
    if len(sizes) < 2 or bool((sizes == sizes[0]).all()):
        return None
    factors = key_rotation(sizes.max() - sizes, config)  # each (passages, head_dim)
    cos, sin = (factor.repeat_interleave(sizes, dim=0).to(parts[0].device) for factor in factors)
    return cos, sin


# Files of keys and values
FORMAT = "arcaligner-passage-3"

BASE_MODEL = "base_model"  # in the metadata; files of version 0.2 do not have it

_NAME = "keys_values"


def names_base_model(path: Path) -> bool:
    """Whether a file exists and names its base model."""
    try:
        with safe_open(path, framework="pt") as file:
            return BASE_MODEL in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def base_model_fingerprint(model) -> dict[str, Any]:
    """A fingerprint of a base model that any engine can compute, to check that keys and values belong to it. `weights`
    is the SHA-256 of the names, shapes and bfloat16 values of the decoder's weights, named as in safetensors files
    without `model.`; `rope` is the model's `rope_parameters`. Float32 and bfloat16 weights have the same
    fingerprint."""
    digest, weights = hashlib.sha256(), {}
    for name, weight in model.model.backbone.named_parameters():
        if not model.is_aligner_key(name):
            weights[name.replace(".base_layer.", ".")] = weight
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().to(torch.bfloat16).cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {"weights": digest.hexdigest(), "rope": model.config.text_config.to_dict().get("rope_parameters")}


def save_keys_values(
    path: str | Path,
    keys_values: torch.Tensor,
    fingerprint: dict[str, Any],
    base_model: dict[str, Any] | None = None,
) -> None:
    """Write keys and values of a passage as safetensors, complete or not at all.

    Args:
        path (`str` or `Path`): File to write, in an existing folder.
        keys_values (`torch.Tensor` of shape `(num_layers, 2, heads, num_slots, head_dim)`): From `prefill_passages`.
        fingerprint (`dict`): From `shared_fingerprint` and `passage_fingerprint`.
        base_model (`dict`, *optional*): From `base_model_fingerprint`, for engines that read the file.
    """
    path, tensors = Path(path), {_NAME: keys_values.contiguous()}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        metadata = {"format": FORMAT, "fingerprint": json.dumps(fingerprint), "payload": tensors_digest(tensors)}
        metadata |= {} if base_model is None else {BASE_MODEL: json.dumps(base_model)}
        save_file(tensors, temporary, metadata=metadata)
        share_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_REPLACED = (
    "A `PassageCache` replaces this file. With `read_only=True` it does not; in that case delete the file yourself."
)


def load_keys_values(
    path: str | Path, fingerprint: dict[str, Any], config: PreTrainedConfig, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Load a file of `save_keys_values`.

    Args:
        path (`str` or `Path`): The file.
        fingerprint (`dict`): Of the model, passage and prompt that the file will be used with.
        config (`PreTrainedConfig`): The backbone's, `model.config.text_config`.
        device (`str` or `torch.device`, defaults to `"cpu"`): The model's device.

    Raises:
        `ValueError`: a file that is broken or of another format, a file with another fingerprint (the message names the
            first field that differs), or a file that does not fit the backbone.
    """
    try:
        # Read, not mapped into memory: if another process cuts a mapped file, this one is killed.
        content = Path(path).read_bytes()
        tensors = load(content)
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size]).get("__metadata__") or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}; expected {FORMAT!r}")
        if metadata.get("payload") != tensors_digest(tensors):
            raise ValueError("its keys and values were changed after they were saved")
        if not isinstance(stored := json.loads(metadata.get("fingerprint", "")), dict):
            raise ValueError(
                f"`fingerprint` in its metadata is of type {type(stored).__name__}; expected a JSON object"
            )
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. {_REPLACED}") from error
    for name in [*fingerprint, *stored]:
        if stored.get(name) != fingerprint.get(name):
            raise ValueError(
                f"The cached passage {path} was made with `{name}` {stored.get(name)!r}; expected "
                f"{fingerprint.get(name)!r}. {_REPLACED}"
            )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = shapes.get(_NAME, ())
    if len(shapes) != 1 or len(shape) != 5 or shape != entry_shape(config, shape[3], tensors[_NAME].dtype):
        num_layers, _, num_heads, _, head_dim = entry_shape(config, 0)
        raise ValueError(
            f"{path} has tensors of the shapes {shapes}; expected only `{_NAME}`, of shape ({num_layers}, 2, "
            f"{num_heads}, num_slots, {head_dim}) for this base model (of type `{config.model_type}`). Load the file "
            "with the base model that it was made for."
        )
    check_length(shape[3], f"The cached passage {path}", config)
    return tensors[_NAME].to(device)


# Settings of one call for making and refining slots, which override those of processor and model.
PREFIX_SETTINGS = {
    "max_slots": int,
    "tokens_per_slot": lambda rate: rate if rate == "segment" else int(rate),
    "gate_mode": str,
    "gate_threshold": float,
    "max_refinement_steps": int,
    "refinement_budget": float,
}

# Settings of the aligner that change no slot, or only say where weights are. All other settings are part of the
# fingerprint.
_IRRELEVANT_SETTINGS = (
    "answer_calibration",
    "answerability_layers",
    "answerability_threshold",
    "answerability_uses_match",
    "base_model_name_or_path",
    "base_model_revision",
    "context_token",
    "digests",
    "includes_base_model",
    "initializer_range",
    "lora_dropout",
    "match_weight",
    "most_answerability",
    "pointer_heads",
    "pointer_weight",
    "scored_share",
    "similarity_weight",
    "tie_word_embeddings",
    "training_stage",
    "use_multihop_head",
)

# Settings that are newer than the first fingerprints, with their values before. A fingerprint leaves out such a value,
# so that files which were written before the setting existed stay valid.
_FORMER_SETTINGS = {"lora_positions": "slots", "passage_alignment": "start"}

# Fields in which two copies of a backbone's configuration may differ.
_NOT_COMPUTED_WITH = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def json_digest(value: Any) -> str:
    """SHA-256 of a value as JSON; values that JSON cannot represent are taken as they are printed."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def slot_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an aligner that its slots depend on; `text_config` is a dictionary."""
    known = ArcAlignerConfig.__annotations__
    relevant = {name: value for name, value in settings.items() if name in known and name not in _IRRELEVANT_SETTINGS}
    for name, former in _FORMER_SETTINGS.items():
        if relevant.get(name) == former:
            del relevant[name]
    if isinstance(backbone := relevant.get("text_config"), dict):
        relevant["text_config"] = {name: value for name, value in backbone.items() if name not in _NOT_COMPUTED_WITH}
    return relevant


def shared_fingerprint(model, processor, weights: dict[str, str], settings: dict | None = None) -> dict[str, Any]:
    """Everything that the keys and values of any passage depend on, as JSON, except its text and the text before it.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): Of one checkpoint.
        weights (`dict`): Digests of weights and tokenizers, from `PassageCache.weights`.
        settings (`dict`, *optional*): Overrides of the configuration, from `canonical_settings`.
    """
    config = slot_settings(model.config.to_dict())
    backbone = config.pop("text_config")
    return {
        **config,
        **(settings or {}),
        "backbone": json_digest(backbone),
        **weights,
        "encoder": processor.encoder_name_or_path,
        "sentences_per_segment": processor.sentences_per_segment,
        "spacy_model": processor.spacy_model,
        "tokens_per_slot": (settings or {}).get("tokens_per_slot", processor.tokens_per_slot),
        "context_words": processor.context_words,
    }


def passage_fingerprint(prompt_ids: Sequence[int], passages: Sequence | None) -> dict[str, Any]:
    """The rest of what keys and values depend on: the text before the slots, and the passages of one entry.

    Args:
        prompt_ids (`Sequence[int]`): The text before the slots.
        passages (`Sequence`, *optional*):
            Documents, each a string or `{"title", "text"}`, or [`PrecomputedSlots`]. `None` if the entry is only the
            text before the slots.
    """
    return {
        "prompt": json_digest(list(prompt_ids)),
        "passages": _passages_digest(passages or []),
        "has_slots": passages is not None,
    }


def canonical_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of `PREFIX_SETTINGS` for one call: equal settings are written equally, and those that change nothing are
    left out.

    >>> canonical_settings({"max_slots": None, "gate_mode": None, "refinement_budget": 0})
    {'gate_mode': 'off'}
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if gates := {name: settings[name] for name in REFINEMENT_SETTINGS if name in settings}:
        check_gates(**gates)
    settings = {name: PREFIX_SETTINGS[name](value) for name, value in settings.items()}  # in the types of JSON
    if "refinement_budget" in settings:
        mode, budget = normalize_budget(settings.get("gate_mode"), settings["refinement_budget"])
        settings |= {"gate_mode": mode, "refinement_budget": budget}
    return {name: value for name, value in settings.items() if value is not None}


def _passages_digest(passages: Sequence) -> str:
    if isinstance(passages, tuple):
        return tensors_digest({str(i): tensor for i, tensor in enumerate(passages) if tensor is not None})
    # Scores and ids of a retriever do not change the slots of a passage.
    return json_digest([[d.get("title"), d.get("text")] if isinstance(d, dict) else [None, d] for d in passages])


class UnwatchableError(ValueError):
    """A weight whose changes cannot be detected."""


class _WatchedWeight(NamedTuple):
    """A weight at the time of its digest, by its name in the model."""

    name: str
    owner: nn.Module
    attribute: str
    weight: torch.Tensor
    alias: torch.Tensor  # holds the memory, so that no other weight gets its address
    version: int

    def is_current(self) -> bool:
        """Whether the model still has this weight, unchanged."""
        weight = getattr(self.owner, self.attribute)
        is_there = weight is self.weight and weight.data_ptr() == self.alias.data_ptr()
        return is_there and _version(weight) == self.version


def _version(weight: torch.Tensor) -> int:
    """PyTorch's count of the writes to a weight; for weights made in inference mode there is none, so it is 0."""
    return 0 if weight.is_inference() else weight._version


class WatchedWeights:
    """Digests of a module's weights, or a mark, a random text for the current weights. Both are made again if a weight
    was moved, replaced, or written to by PyTorch: by an optimizer, an in-place operation, `load_state_dict` or `to`.

    Not detected: writes through `.data`, a NumPy array or a pointer, and modules and hooks that are added or replaced.
    Active adapters of PEFT, and their scales, are part of the digest.

    Args:
        module (`nn.Module`): The module.
        part_of (`Callable`): Returns the part that a weight belongs to, from its name; each part has a digest.
    """

    def __init__(self, module: nn.Module, part_of: Callable[[str], str]):
        self.module, self._part_of = module, part_of
        self._layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
        self._weights: list[_WatchedWeight] = []
        self._adapters, self._modules, self._mark, self._digests = [], [], "", {}

    def mark(self) -> dict[str, str]:
        """A mark of the current weights in this process, which changes with any change of a weight. The values of
        weights are not read.

        Raises:
            `UnwatchableError`: a weight whose changes cannot be detected; the message names it.
        """
        self._look()
        return {"weights": self._mark}

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part's names, types, shapes and values.

        Raises:
            `UnwatchableError`: a weight whose changes cannot be detected; the message names it.
        """
        self._look()
        if not self._digests:
            # The same weights in other classes, or with another active adapter, give other results.
            first, parts = hashlib.sha256(repr((self._adapters, self._modules)).encode()), {}
            for name, _, _, weight, *_ in self._weights:
                digest = hashlib.sha256(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).digest()
                part = parts.setdefault(self._part_of(name), first.copy())
                part.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode() + digest)
            self._digests = {part: digest.hexdigest() for part, digest in parts.items()}
        return self._digests

    def _look(self) -> None:
        """Find all weights, if any has changed since the last time."""
        adapters = [
            (m.active_adapter, m.disable_adapters, *m.merged_adapters, *m.scaling.items()) for m in self._layers
        ]
        if self._mark and adapters == self._adapters and all(weight.is_current() for weight in self._weights):
            return
        modules, weights = [], {}
        for prefix, module in self.module.named_modules():
            if prefix in HEADS:  # they change no keys and values, so caches stay valid
                continue
            modules.append((prefix, type(module).__qualname__))
            for name, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                weights.setdefault(id(weight), (f"{prefix}.{name}".lstrip("."), module, name, weight))  # tied ones once
        for name, _, _, weight in weights.values():
            _check_watchable(name, weight)
        self._weights = [
            _WatchedWeight(name, module, attribute, weight, weight.detach(), _version(weight))
            for name, module, attribute, weight in weights.values()
        ]
        self._adapters, self._modules, self._mark, self._digests = adapters, modules, uuid.uuid4().hex, {}


def _check_watchable(name: str, weight: torch.Tensor) -> None:
    if type(weight) not in (torch.Tensor, nn.Parameter) or weight.is_meta or weight.layout != torch.strided:
        raise UnwatchableError(
            f"The weight `{name}` is of type {type(weight).__name__} on the device {weight.device}. Changes of such a "
            "weight cannot be detected, so passages cannot be cached. Load the model without quantization, sharding or "
            "offloading."
        )
